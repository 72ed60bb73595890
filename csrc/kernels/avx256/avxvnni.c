/* AVX-VNNI, 256 bits wide: Alder Lake and later laptops, Zen 5. The method of AVX2, with one instruction for its two:
 *
 *   instruction              what for                              Golden Cove         Gracemont
 *   vpdpwssd ymm             products of 16-bit integers, added     5 cycles, p01       FP01
 *
 *   vpdpbusd ymm             products of bytes, four added          5 cycles, p01       FP01
 *
 * vpdpbusd multiplies one plane (bytes.h). With two bytes of a query it would do as much as vpdpwssd: twice the channels,
 * half the bits. But it needs twice the sums, where there are 16 registers.
 *
 * KVEDGE_AVXVNNI_AS_EVEX builds the same code in AVX-512VL's encoding of this instruction, so that it can be run,
 * tested and timed on a server that has that but not AVX-VNNI.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/avx256/bytes_order.h"
#include "kernels/avx256/floats_cells.h"
#include "system/target.h"

#ifdef KVEDGE_AVXVNNI_AS_EVEX
KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")
#define ENCODED_AS ""
#else
KVEDGE_TARGET_BEGIN("avxvnni,avx2,fma,f16c")
#define ENCODED_AS "%{vex%} "
#endif
#define KVEDGE_NAME(function) function##_avxvnni

/* sum += the products of 16-bit integers, those of a pair added. Written as an instruction for the reason in
 * avx512vnni.c. */
KVEDGE_INLINE void multiply_add_pairs(__m256i *sum, __m256i a, __m256i b) {
  __asm__(ENCODED_AS "vpdpwssd %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}

/* sum += the products of unsigned and signed bytes, those of a lane added; there are no multipliers (bytes.h). */
enum { BYTE_MULTIPLIERS = 0 };
#define BYTE_QUERY_MAX 127.0f
#define BYTE_WEIGHT_MAX 255.0f
KVEDGE_INLINE void multiply_add_fours(__m256i *sum, __m256i of_unsigned, __m256i of_signed, __m256i multipliers) {
  (void)multipliers;
  __asm__(ENCODED_AS "vpdpbusd %2, %1, %0" : "+x"(*sum) : "x"(of_unsigned), "x"(of_signed));
}

#include "kernels/avx256/common.h"
#include "kernels/avx256/bytes.h"
#include "kernels/avx256/scores.h"
#include "kernels/avx256/values.h"
#include "kernels/avx256/sum_bytes.h"
#include "kernels/avx256/groups.h"
#include "kernels/avx256/int4.h"
#include "kernels/avx256/blocks.h"
#include "kernels/avx256/kivi.h"
#include "kernels/avx256/table.h"

const kvedge_kernels kvedge_kernels_avxvnni = KVEDGE_TABLE("avxvnni");
KVEDGE_TARGET_END
#endif
