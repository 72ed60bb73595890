/* NEON of the armv8-a baseline: Raspberry Pi 3 and 4 (Cortex-A53, A72); compiles for armv7 NEON too.
 *
 *   instruction         what for                        Cortex-A72              Cortex-A76
 *   sshll, sshll2       s8 -> s16 -> s32                3 cycles, 2 a cycle     2, V1
 *   scvtf v.4s          s32 -> float                    10, 1 a cycle           4, V0, one in two cycles
 *   fmla v.4s           4 products                      10 (4), 1 a cycle       4 (2), V01
 *   fmla v.4s, v.s[i]   the same by one token's weight  as fmla v.4s            as fmla v.4s
 *
 * (A72: as LLVM models it, like an A57. In brackets: from sum to sum.)
 *
 * There is no 8-bit dot product here, and a query of 24 bits would take several 16-bit products: smlal
 * does 4 a cycle, as many as fmla. So codes become floats and are multiplied with the query as it is. That takes 10
 * instructions for 16 codes, once for up to 4 queries; each query then takes 4.
 *
 * Keys: four tokens at a time, 8 channels of each, so that a load of a query's channels serves four
 * rows; a sum per token and query, joined across lanes at the end. Values: a row's codes times
 * one lane of four tokens' weights; the sums of 16 to 64 channels stay in registers over the tile.
 * llvm-mca -mcpu=cortex-a72 on gcc 12's loops: keys 18 cycles for 32 bytes with one query, 48 with
 * four; values 19 and 45.
 */
#include "kernels/kernels.h"

#if defined(__aarch64__) || defined(__ARM_NEON) || (defined(__arm__) && !defined(__clang__))
#include "system/target.h"

#if defined(__arm__) && !defined(__ARM_NEON)
KVEDGE_TARGET_BEGIN("fpu=neon")
#define TARGET_BEGUN
#endif

#include "kernels/neon/common.h"

KVEDGE_NEON_KERNELS(int8, KVEDGE_INT8)
KVEDGE_INT4_FUNCTIONS(neon, scores_int8_neon, weighted_sum_int8_neon)

static uint64_t multiply_neon(size_t n) {
  float32x4_t sum[SUMS], keys = vdupq_n_f32(1.0f);
  const float32x4_t codes = keys;
  UNROLLED (j, SUMS) sum[j] = vdupq_n_f32(0.0f);
  for (size_t i = 0; i < n; i += SUMS * 4)
    UNROLLED (j, SUMS) {
      __asm__("" : "+w"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      sum[j] = multiply_add_f32(sum[j], keys, codes);
    }
  for (int j = 1; j < SUMS; j++) sum[0] = vaddq_f32(sum[0], sum[j]);
  return (uint64_t)vgetq_lane_f32(sum[0], 0);
}

const kvedge_kernels kvedge_kernels_neon =
    KVEDGE_NEON_TABLE("neon", KVEDGE_NEON_CELL(int8), KVEDGE_NEON_CELL(int4), multiply_neon);

#ifdef TARGET_BEGUN
KVEDGE_TARGET_END
#endif
#endif
