/* NEON of the armv8-a baseline: Raspberry Pi 3 and 4 (Cortex-A53, A72); compiles for armv7 NEON too.
 *
 *   instruction         what for                        Cortex-A72              Cortex-A76
 *   sshll, sshll2       s8 -> s16 -> s32                3 cycles, F1            2, V1
 *   smlal v.4s, v.4h    4 products of 16-bit integers   5 (1), F0               4 (1), V0
 *   scvtf v.4s          s32 -> float                    10, 1 a cycle           4, V0, one in two cycles
 *   fmla v.4s           4 products                      10 (4), 1 a cycle       4 (2), V01
 *   fmla v.4s, v.s[i]   the same by one token's weight  as fmla v.4s            as fmla v.4s
 *
 * (A72: as LLVM models it, like an A57. In brackets: from sum to sum.)
 *
 * There is no 8-bit dot product here. smlal does 4 products a cycle, as many as fmla, but on one
 * of two pipes, and codes become its operands by one instruction for 8 of them, on the other
 * pipe: as floats they take five. So queries and weights are integers of 16 bits where these
 * suffice (int16.h), else floats (floats.h).
 *
 * llvm-mca on gcc 12's code, cycles of a Cortex-A72 for a row of 64 bytes: scores 21 with one
 * query, 67 with four (as floats 49 and 113), weighted sums 21 and 79 (44 and 97).
 */
#include "kernels/kernels.h"

#if defined(__aarch64__) || defined(__ARM_NEON) || (defined(__arm__) && !defined(__clang__))
#include "system/target.h"

#if defined(__arm__) && !defined(__ARM_NEON)
KVEDGE_TARGET_BEGIN("fpu=neon")
#define TARGET_BEGUN
#endif

#include "kernels/neon/common.h"
#include "kernels/neon/codes.h"
#include "kernels/neon/floats.h"
#include "kernels/neon/int16.h"
#include "kernels/neon/int4.h"

KVEDGE_INT4_FUNCTIONS(neon, scores_int8_neon, weighted_sum_int8_neon)

static uint64_t multiply_neon(size_t n) {
  int32x4_t sum[SUMS];
  int16x4_t keys = vdup_n_s16(1);
  const int16x4_t codes = keys;
  UNROLLED (j, SUMS) sum[j] = vdupq_n_s32(0);
  for (size_t i = 0; i < n; i += SUMS * 4)
    UNROLLED (j, SUMS) {
      __asm__("" : "+w"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      sum[j] = vmlal_s16(sum[j], keys, codes);
    }
  for (int j = 1; j < SUMS; j++) sum[0] = vorrq_s32(sum[0], sum[j]);
  return (uint64_t)vgetq_lane_s32(sum[0], 0);
}

#define KVEDGE_NEON_INT16_CELL(name)                                                                                   \
  {.encode_query = encode_query_neon, .scores = scores_##name##_neon, .weighted_sum = weighted_sum_##name##_neon}
#define KVEDGE_NAME(function) function##_neon
#include "kernels/neon/kivi.h"
#include "kernels/blocks.h"
KVEDGE_BLOCKS_FUNCTIONS(neon, KVEDGE_NEON_INT16_CELL(int8))
const kvedge_kernels kvedge_kernels_neon =
    KVEDGE_NEON_TABLE("neon", KVEDGE_NEON_INT16_CELL(int8), KVEDGE_NEON_INT16_CELL(int4), KVEDGE_NEON_RUNS,
                      KVEDGE_BLOCKS_CELL(neon, encode_query_neon), multiply_neon);

#ifdef TARGET_BEGUN
KVEDGE_TARGET_END
#endif
#endif
