/* Cells of ggml's blocks. Part of avx2.c and avxvnni.c, after groups.h and int4.h. */
#define KVEDGE_INT8_CELL                                                                                               \
  {.encode_query = KVEDGE_NAME(encode_query),                                                                          \
   .scores = KVEDGE_NAME(scores_int8),                                                                                 \
   .weighted_sum = KVEDGE_NAME(weighted_sum_int8),                                                                     \
   .scores_of_groups = KVEDGE_NAME(scores_of_groups),                                                                  \
   .weighted_sum_of_groups = KVEDGE_NAME(weighted_sum_of_groups)}

#include "kernels/blocks.h"
static const kvedge_cell int8_cell = KVEDGE_INT8_CELL;

/* Fifth bits, other levels and other planes are widened to int8's. */
static void KVEDGE_NAME(scores_of_blocks)(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  if (q->planes != 2 || !kvedge_codes_are_levels(keys->codes)) scores_of_blocks(&int8_cell, q, keys, scores);
  else if (q->num_queries > 2) score_many_blocks(q, keys, scores);
  else if (q->num_queries == 2) score_codes_2(q, keys, scores);
  else score_codes_1(q, keys, scores);
}

/* ---- Weighted sums ---- */

/* Adds a block of two tokens, times the weights of `count` queries, to sums of 8 channels: (count, 4). (count: a
 * constant where this is inlined.) */
KVEDGE_INLINE void add_two_blocks(const int8_t *first, const int8_t *second, const int count, const int16_t *codes,
                                  __m256i (*sum)[4]) {
  const __m128i a = _mm_loadu_si128((const __m128i *)first), b = _mm_loadu_si128((const __m128i *)second);
  const __m128i both[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  __m256i weights[2];
#pragma GCC unroll 2
  for (int i = 0; i < count; i++) {
    int32_t two;
    memcpy(&two, codes + i * KVEDGE_TILE, sizeof two);
    weights[i] = _mm256_set1_epi32(two);
  }
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    __m256i values[2]; /* channels 8 v.., and 16 + 8 v.. */
    split_codes(_mm256_cvtepu8_epi16(both[v]), values);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
#pragma GCC unroll 2
      for (int i = 0; i < count; i++) multiply_add_pairs(&sum[i][2 * h + v], values[h], weights[i]);
  }
}

/* The values of a chunk's tokens, of a block `at` bytes into rows, added for `count` queries, one or two. (As before.) */
KVEDGE_INLINE void sum_blocks(const kvedge_stretch *stretch, const kvedge_tile *values, int num_tokens, ptrdiff_t at,
                              const int count, const int16_t *codes, const float *scale, const float *rescale,
                              const kvedge_accumulators *to, float *acc) {
  const ptrdiff_t stride = values->token_stride;
  const int chains = count == 1 ? 2 : 1, of_block = (int)values->group_stride; /* chains: as in sum_groups() */
  __m256i sum[2][2][4];
#pragma GCC unroll 2
  for (int i = 0; i < count; i++) {
    __m256i total = _mm256_setzero_si256();
    for (int t = 0; t < num_tokens; t += 16) /* 0 to the end of the last block */
      total = _mm256_add_epi32(
          total,
          _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_loadu_si256((const __m256i *)(codes + i * KVEDGE_TILE + t))));
    const int start = values->codes->levels[0] * sum_of_int32(total);
    for (int k = 0; k < chains; k++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sum[k][i][v] = k > 0 ? _mm256_setzero_si256() : _mm256_set1_epi32(start);
  }
  for (int left = num_tokens, tokens; left > 0; left -= tokens, stretch++) {
    tokens = stretch->num_tokens;
    const int8_t *row = (const int8_t *)stretch->rows + at;
    const kvedge_next_block next = kvedge_further(stretch->next, (int)at * tokens);
    int t = 0;
    for (; t + 4 <= tokens; t += 4, codes += 4, row += 4 * stride) {
      if (next.first)
        for (int line = 0; line < 2; line++) kvedge_prefetch_line(next, of_block * t + line * (3 * of_block));
      add_two_blocks(row, row + stride, count, codes, sum[0]);
      add_two_blocks(row + 2 * stride, row + 3 * stride, count, codes + 2, sum[chains - 1]);
    }
    for (; t < tokens; t += 2, codes += 2, row += 2 * stride) /* the weight of one past the last is 0 */
      add_two_blocks(row, t + 1 < tokens ? row + stride : row, count, codes, sum[0]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const __m256i of_8 = chains == 2 ? _mm256_add_epi32(sum[0][i][v], sum[1][i][v]) : sum[0][i][v];
      add_sums(_mm256_cvtepi32_ps(of_8), 8, scale[i * KVEDGE_TILE_BLOCKS], rescale[i], acc + i * to->stride + 8 * v);
    }
}

/* Half of a block of the tokens of a chunk, 16 channels, as sum_groups() keeps them. */
static __attribute__((noinline)) void keep_half(const kvedge_stretch *stretch, const kvedge_tile *values,
                                                int num_tokens, ptrdiff_t at, int half, __m256i (*kept)[2]) {
  const ptrdiff_t stride = values->token_stride;
  const __m256i lowest = _mm256_set1_epi16(values->codes->levels[0]);
  for (int left = num_tokens, tokens; left > 0; left -= tokens, stretch++) {
    tokens = stretch->num_tokens;
    const int8_t *row = (const int8_t *)stretch->rows + at;
    const kvedge_next_block next = kvedge_further(stretch->next, (int)at * tokens);
    for (int t = 0; t < tokens; t += 2, kept++, row += 2 * stride) {
      if (half == 0 && next.first) kvedge_prefetch_line(next, (int)values->group_stride * t);
      const __m128i a = _mm_loadu_si128((const __m128i *)row);
      const __m128i b = _mm_loadu_si128((const __m128i *)(t + 1 < tokens ? row + stride : row));
      const __m128i both[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const __m256i codes = _mm256_srl_epi16(_mm256_cvtepu8_epi16(both[v]), _mm_cvtsi32_si128(4 * half));
        (*kept)[v] = _mm256_add_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(15)), lowest);
      }
    }
  }
}

/* A chunk's kept values of 16 channels, added for all queries. */
static __attribute__((noinline)) void sum_kept(int num_tokens, __m256i (*kept)[2], int num_queries,
                                               const int16_t *codes, const float *scale, const float *rescale,
                                               float *acc, ptrdiff_t acc_stride) {
  static const int32_t start[SUM_QUERIES];
  const kvedge_stretch none = {.num_tokens = 0};
  int i = 0;
#define SUM_KEPT(count)                                                                                                \
  sum_groups(8, &none, 0, num_tokens, 0, KEPT, kept, 1, 16, count, codes + i * KVEDGE_TILE, start,                     \
             scale + i * KVEDGE_TILE_BLOCKS, rescale + i, acc + i * acc_stride, acc_stride)
  BY_FOURS(num_queries, SUM_KEPT)
#undef SUM_KEPT
}

/* As sum_few(), of any number of queries. */
static void sum_codes_of_blocks(const kvedge_probabilities *p, const kvedge_tile *values,
                                const kvedge_accumulators *to) {
  const int n = p->num_queries, together = p->planes == 3 ? TOGETHER / 2 : TOGETHER;
  const int num_groups = values->dim / KVEDGE_GROUP, at_a_time = KVEDGE_QUERY_ROWS / n;
  const kvedge_next_tile next = kvedge_next_of(values, (int)(num_groups * values->group_stride));
  tile_weights *weights = (void *)p->scratch;
  for (int first = 0, groups; first < num_groups; first += groups) {
    groups = num_groups - first < at_a_time ? num_groups - first : at_a_time;
    quantize_weights_of(p, values, together, first, groups, 1, weights);
    for (int t = 0, k = 0; t < values->num_tokens; t += together, k++) {
      const int num_tokens = values->num_tokens - t < together ? values->num_tokens - t : together;
      const float *rescale = t > 0 ? ones : to->rescale;
      kvedge_stretch stretches[TOGETHER / KVEDGE_BLOCK];
      for (int i = 0, start = t; start < t + num_tokens; start += stretches[i++].num_tokens)
        stretches[i] = kvedge_stretch_of(values, &next, start, t + num_tokens);
      for (int g = 0; g < groups; g++) {
        const ptrdiff_t at = (first + g) * values->group_stride;
        const int16_t *codes = weights->codes[g * n] + t;
        const float *scale = weights->scale[g * n] + k;
        float *acc = to->acc + (first + g) * KVEDGE_GROUP;
        if (n > SUM_QUERIES) {
          __m256i kept[TOGETHER / 2][2];
          for (int half = 0; half < 2; half++) {
            keep_half(stretches, values, num_tokens, at, half, kept);
            sum_kept(num_tokens, kept, n, codes, scale, rescale, acc + 16 * half, to->stride);
          }
          continue;
        }
#define SUM_BLOCKS(count)                                                                                              \
  sum_blocks(stretches, values, num_tokens, at, count, codes + i * KVEDGE_TILE, scale + i * KVEDGE_TILE_BLOCKS,        \
             rescale + i, to, acc + i * to->stride)
        int i = 0;
        for (; i + 2 <= n; i += 2) SUM_BLOCKS(2);
        if (i < n) SUM_BLOCKS(1);
#undef SUM_BLOCKS
      }
    }
  }
}

static void KVEDGE_NAME(weighted_sum_of_blocks)(const kvedge_probabilities *p, const kvedge_tile *values,
                                                const kvedge_accumulators *to) {
  const int are_15_bits = p->planes == 2 || (p->planes == 3 && p->by_32);
  if (are_15_bits && kvedge_codes_are_levels(values->codes)) sum_codes_of_blocks(p, values, to);
  else weighted_sum_of_blocks(&int8_cell, p, values, to);
}
