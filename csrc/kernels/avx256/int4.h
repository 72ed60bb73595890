/* Cells of int4. Part of avx2.c and avxvnni.c, after scores.h and values.h, which have the
 * products of integers. Where floats are wanted (three planes, or more channels than sums of 32
 * bits hold), rows are widened for the kernels of int8; so are values for many queries, which
 * keep what they have widened, and those of part of 16 channels. */

/* Levels of 32 or 16 channels, and the last ones one by one. */
static inline void widen_row(const uint8_t *codes, int n, int8_t *out) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvedge_int4_levels));
  int d = 0;
  for (; d + 16 <= n; d += 32) {
    const int all = d + 32 <= n;
    const __m128i bytes = load_up_to_16((const int8_t *)codes + d / 2, all ? 16 : 8);
    const __m256i pairs = _mm256_cvtepu8_epi16(bytes);
    const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi16(0x0f));
    const __m256i high = _mm256_and_si256(_mm256_slli_epi16(pairs, 4), _mm256_set1_epi16(0x0f00));
    _mm256_storeu_si256((__m256i *)(out + d), _mm256_shuffle_epi8(levels, _mm256_or_si256(low, high)));
  }
  for (d = n / 16 * 16; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"

static void KVEDGE_NAME(scores_int4)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  if (q->planes == 1) score_many_as_bytes(4, q, keys, scores, accumulate);
  else if (q->planes < 3 && q->dim <= CHANNELS_OF_TWO_BYTES) score_codes(q, keys, scores, accumulate);
  else scores_of_wide(KVEDGE_NAME(scores_int8), q, keys, keys->dim, scores, accumulate);
}

enum { IN_REGISTERS = 2 * SUM_QUERIES }; /* query rows whose weighted sums make integers of codes, for four at a time */

static void KVEDGE_NAME(weighted_sum_int4)(const kvedge_probabilities *p, const kvedge_tile *values,
                                           const kvedge_accumulators *to) {
  if (p->planes == 1) {
    sum_bytes(4, p, values, to);
    return;
  }
  if ((p->planes == 3 && !p->by_32) || p->num_queries > IN_REGISTERS || values->dim % 16 != 0) {
    weighted_sum_of_wide(KVEDGE_NAME(weighted_sum_int8), p, values, values->dim, to);
    return;
  }
  kvedge_tile tile = *values;
  for (int i = 0; i < p->num_queries; i += SUM_QUERIES) {
    const int left = p->num_queries - i;
    kvedge_probabilities four = *p;
    four.num_queries = left < SUM_QUERIES ? left : SUM_QUERIES, four.p += i * KVEDGE_TILE;
    const kvedge_accumulators sums = {to->acc + i * to->stride, to->stride, to->rescale + i};
    sum_codes(4, &four, &tile, &sums);
    tile.next.blocks = NULL; /* prefetched with the first four */
  }
}
