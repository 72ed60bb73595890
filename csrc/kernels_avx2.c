/* AVX2 with FMA: x86 laptops since Haswell and Zen.
 *
 *   instruction              what for                  Haswell/Skylake     Zen 2
 *   vpmaddwd ymm             s16 x s16, pairs added    5 cycles, p01       3, FP0
 *   vpaddd ymm               the sum                   1, p015             1, FP013
 *   vpmovsxbw ymm, m128      widening                  3, p5               4, FP12
 *   vpunpck*, vperm2i128     transposing keys          1-3, p5             1-3, FP12
 *
 * There is no 8-bit product here that keeps 15 bits of the query (vpmaddubsw saturates), so keys and
 * values are widened to 16 bits and multiplied in pairs: 8 + 8 instructions per 64-byte line and
 * query. As in the wider paths, keys are first transposed, 8 tokens by 4 channels to a register, so
 * that no sum across lanes is needed but one final horizontal add of neighbours.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

KVEDGE_TARGET_BEGIN("avx2,fma")
#define KVEDGE_NAME(function) function##_avx2

KVEDGE_INLINE __m256i multiply_add_i16(__m256i sum, __m256i a, __m256i b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}

#include "kernels_avx256.h"

KVEDGE_INLINE void score_block(const kvedge_query_i8 *q, int first, const int count,
                               const __m256i *columns, __m256i valid, __m256 k_scale, float *scores,
                               int accumulate) {
  /* sums of channel pairs (0,1) and (2,3), side by side: tokens 0-3 in low, 4-7 in high */
  __m256i low[SCORE_QUERIES], high[SCORE_QUERIES];
  const int16_t *codes = q->codes + first * q->stride;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) low[i] = high[i] = _mm256_setzero_si256();
  int num_columns = (q->dim + 3) / 4;
  for (int j = 0; j < num_columns; j++) {
    const __m128i *column = (const __m128i *)(columns + j);
    __m256i tokens_low = _mm256_cvtepi8_epi16(column[0]);
    __m256i tokens_high = _mm256_cvtepi8_epi16(column[1]);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      int64_t four;
      memcpy(&four, codes + i * q->stride + 4 * j, sizeof four);
      __m256i query = _mm256_set1_epi64x(four);
      low[i] = multiply_add_i16(low[i], tokens_low, query);
      high[i] = multiply_add_i16(high[i], tokens_high, query);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    /* added as floats: at a dim above 517 the two may pass 2^31 together */
    __m256 mixed = _mm256_hadd_ps(_mm256_cvtepi32_ps(low[i]), _mm256_cvtepi32_ps(high[i])); /* tokens 0 1 4 5 | 2 3 6 7 */
    __m256 dot = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
    store_scores(q, first + i, dot, valid, k_scale, scores + (first + i) * KVEDGE_TILE, accumulate);
  }
}

const kvedge_kernels kvedge_kernels_avx2 = KVEDGE_TABLE("avx2");
KVEDGE_TARGET_END
#endif
