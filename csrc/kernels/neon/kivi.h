/* Runs of the NEON paths: what kernels/kivi_pairs.h wants, on aarch64; smlal makes a sum of each
 * half of a word. 32-bit ARM has runs in floats. Part of neon.c, neondot.c and neoni8mm.c, which
 * first define KVEDGE_NAME(function). */
#if !defined(__aarch64__)
#include "kernels/kivi_portable.h"
#define KVEDGE_NEON_RUNS KVEDGE_RUNS_PORTABLE
#else

enum { FLOATS = 4 };

typedef float32x4_t floats;
typedef int32x4_t integers;
typedef uint16x8_t word_vector;
typedef int16x8_t pair;
typedef struct {
  int32x4_t half[2]; /* of the first two lanes, and of the others: their lower and upper halves */
} lane_sum;

KVEDGE_INLINE floats load_floats(const float *p) { return vld1q_f32(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { vst1q_f32(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return load_first_f32(p, n); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) {
  float four[4];
  vst1q_f32(four, x);
  memcpy(p, four, (size_t)n * sizeof *p);
}
KVEDGE_INLINE floats zero_floats(void) { return vdupq_n_f32(0.0f); }
KVEDGE_INLINE floats all_floats(float x) { return vdupq_n_f32(x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return vmulq_f32(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
KVEDGE_INLINE floats max_floats(floats a, floats b) { return vmaxq_f32(a, b); }
KVEDGE_INLINE floats magnitudes(floats x) { return vabsq_f32(x); }
KVEDGE_INLINE float sum_of_floats(floats x) { return sum_across(x); }
KVEDGE_INLINE float max_of_floats(floats x) { return max_across(x); }
KVEDGE_INLINE floats load_halves(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

KVEDGE_INLINE integers zero_integers(void) { return vdupq_n_s32(0); }
KVEDGE_INLINE integers add_integers(integers a, integers b) { return vaddq_s32(a, b); }
KVEDGE_INLINE integers round_floats(floats x) { return round_to_i32(x); }
KVEDGE_INLINE integers round_dithered_floats(floats x, floats dither) { return round_dithered(x, dither); }
KVEDGE_INLINE floats floats_of_integers(integers x) { return vcvtq_f32_s32(x); }

KVEDGE_INLINE void store_pairs(const int bits, const integers number[4], int16_t *to) {
  const int16x4_t a = vmovn_s32(number[0]), b = vmovn_s32(number[1]), c = vmovn_s32(number[2]),
                  d = vmovn_s32(number[3]);
  int16x8_t first, second; /* numbers of lower halves, and of upper ones */
  if (bits == 2) {
    first = vcombine_s16(a, b), second = vcombine_s16(c, d);
  } else if (bits == 4) {
    first = vcombine_s16(a, c), second = vcombine_s16(b, d);
  } else {
    const int32x4_t ab = vreinterpretq_s32_s16(vcombine_s16(a, b)), cd = vreinterpretq_s32_s16(vcombine_s16(c, d));
    first = vreinterpretq_s16_s32(vuzp1q_s32(ab, cd)), second = vreinterpretq_s16_s32(vuzp2q_s32(ab, cd));
  }
  vst1q_s16(to, vzip1q_s16(first, second));
  vst1q_s16(to + 8, vzip2q_s16(first, second));
}

KVEDGE_INLINE word_vector load_words(const uint8_t *p) { return vreinterpretq_u16_u8(vld1q_u8(p)); }
KVEDGE_INLINE word_vector load_first_words(const uint8_t *p, int n) {
  uint8_t bytes[16] = {0};
  memcpy(bytes, p, 4 * (size_t)n);
  return load_words(bytes);
}
KVEDGE_INLINE word_vector low_codes(word_vector x, const int bits) {
  return vandq_u16(x, vdupq_n_u16((uint16_t)((1 << bits) - 1)));
}
KVEDGE_INLINE word_vector next_codes(word_vector x, const int bits) {
  return vshlq_u16(x, vdupq_n_s16((int16_t)-bits));
}

KVEDGE_INLINE pair pair_for_all(const int16_t *numbers) {
  int32_t two;
  memcpy(&two, numbers, sizeof two);
  return vreinterpretq_s16_s32(vdupq_n_s32(two));
}
KVEDGE_INLINE lane_sum zero_sum(void) {
  return (lane_sum){
      {vdupq_n_s32(0), vdupq_n_s32(0)}
  };
}
KVEDGE_INLINE floats floats_of_sum(lane_sum x) { return vcvtq_f32_s32(vpaddq_s32(x.half[0], x.half[1])); }
KVEDGE_INLINE void multiply_pair(lane_sum *sum, word_vector codes, pair by) {
  const int16x8_t both = vreinterpretq_s16_u16(codes);
  sum->half[0] = vmlal_s16(sum->half[0], vget_low_s16(both), vget_low_s16(by));
  sum->half[1] = vmlal_high_s16(sum->half[1], both, by);
  AS_WRITTEN(sum->half[0]);
  AS_WRITTEN(sum->half[1]);
}

#define scores_in_floats scores_of_runs_portable
#define weighted_sum_in_floats weighted_sum_of_runs_portable
#include "kernels/kivi_pairs.h"
#define KVEDGE_NEON_RUNS {.scores = KVEDGE_NAME(scores_of_runs), .weighted_sum = KVEDGE_NAME(weighted_sum_of_runs)}
#endif
