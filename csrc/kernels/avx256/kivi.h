/* Runs of the 256-bit paths: what kernels/kivi_pairs.h wants. Part of avx2.c and avxvnni.c, after values.h. */
typedef __m256i integers, word_vector, pair, lane_sum;

KVEDGE_INLINE floats max_floats(floats a, floats b) { return _mm256_max_ps(a, b); }
KVEDGE_INLINE floats magnitudes(floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
KVEDGE_INLINE float sum_of_floats(floats x) { return reduce_add(x); }
KVEDGE_INLINE float max_of_floats(floats x) { return reduce_max(x); }
KVEDGE_INLINE floats load_halves(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

KVEDGE_INLINE integers zero_integers(void) { return _mm256_setzero_si256(); }
KVEDGE_INLINE integers add_integers(integers a, integers b) { return _mm256_add_epi32(a, b); }
KVEDGE_INLINE integers round_floats(floats x) { return _mm256_cvtps_epi32(x); }
KVEDGE_INLINE floats floats_of_integers(integers x) { return _mm256_cvtepi32_ps(x); }

KVEDGE_INLINE integers round_dithered_floats(floats x, floats dither) { return round_dithered(0, x, dither); }

KVEDGE_INLINE void store_pairs(const int bits, const integers number[2], int16_t *to) {
  __m256i a = number[0], b = number[1], first = a, second = b; /* 2 bits: a word has 16 codes */
  if (bits == 4) {
    first = _mm256_permute2x128_si256(a, b, 0x20), second = _mm256_permute2x128_si256(a, b, 0x31);
  } else if (bits == 8) {
    a = _mm256_permute4x64_epi64(a, 0xd8), b = _mm256_permute4x64_epi64(b, 0xd8); /* even pairs first, then odd ones */
    first = _mm256_permute2x128_si256(a, b, 0x20), second = _mm256_permute2x128_si256(a, b, 0x31);
  }
  _mm256_storeu_si256((__m256i *)to, _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa));
}

KVEDGE_INLINE word_vector load_words(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
KVEDGE_INLINE word_vector load_first_words(const uint8_t *p, int n) {
  return _mm256_maskload_epi32((const int *)p, first_lanes(n));
}
KVEDGE_INLINE word_vector low_codes(word_vector x, const int bits) {
  return _mm256_and_si256(x, _mm256_set1_epi16((int16_t)((1 << bits) - 1)));
}
KVEDGE_INLINE word_vector next_codes(word_vector x, const int bits) { return _mm256_srli_epi16(x, bits); }

KVEDGE_INLINE pair pair_for_all(const int16_t *numbers) {
  int32_t two;
  memcpy(&two, numbers, sizeof two);
  return _mm256_set1_epi32(two);
}
KVEDGE_INLINE lane_sum zero_sum(void) { return _mm256_setzero_si256(); }
KVEDGE_INLINE floats floats_of_sum(lane_sum x) { return _mm256_cvtepi32_ps(x); }
KVEDGE_INLINE void multiply_pair(lane_sum *sum, word_vector codes, pair by) { multiply_add_pairs(sum, codes, by); }

#define scores_in_floats scores_of_runs_avx256
#define weighted_sum_in_floats weighted_sum_of_runs_avx256
#include "kernels/kivi_pairs.h"
