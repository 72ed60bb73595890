/* AVX2 with FMA: x86 laptops since Haswell and Zen. scores.h has the scores, values.h the weighted sums.
 *
 *   instruction                what for                       Haswell/Skylake     Zen 2         Zen 4
 *   vpmaddwd ymm               products of 16-bit integers     5 cycles, p01       3, FP0        3, FP01
 *   vpaddd ymm                 adding them up                 1, p015             1, FP013      1, FP0123
 *   vpmovsxbw ymm, m128        s8 to s16                      3, p5               3, FP12       FP12
 *   vfmadd231ps ymm            products of floats             4-5, p01            5, FP01       4, FP01
 *   vpmovsxbd ymm, m64         s8 to s32                      3, p5               3, FP12       FP12
 *   vcvtdq2ps ymm              s32 to float                   4, p01              3, FP3        FP23
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/avx256/bytes_order.h"
#include "kernels/avx256/floats_cells.h"
#include "system/target.h"

KVEDGE_TARGET_BEGIN("avx2,fma,f16c")
#define KVEDGE_NAME(function) function##_avx2

/* sum += the products of 16-bit integers, those of a pair added. */
KVEDGE_INLINE void multiply_add_pairs(__m256i *sum, __m256i a, __m256i b) {
  *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(*sum)); /* as written: GCC 12 else adds products of many channels first, and spills them */
}

/* sum += the products of unsigned and signed bytes, those of two neighbours added and times their multiplier, those of a
 * lane added. */
enum { BYTE_MULTIPLIERS = 1 };
#define BYTE_QUERY_MAX 64.0f
#define BYTE_WEIGHT_MAX 127.0f
KVEDGE_INLINE void multiply_add_fours(__m256i *sum, __m256i of_unsigned, __m256i of_signed, __m256i multipliers) {
  multiply_add_pairs(sum, _mm256_maddubs_epi16(of_unsigned, of_signed), multipliers);
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

const kvedge_kernels kvedge_kernels_avx2 = KVEDGE_TABLE("avx2");
KVEDGE_TARGET_END
#endif
