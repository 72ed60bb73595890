/* Cells of ggml's blocks. Part of avx2.c and avxvnni.c, after groups.h and int4.h. */
#define KVEDGE_INT8_CELL                                                                                               \
  {.encode_query = KVEDGE_NAME(encode_query),                                                                          \
   .scores = KVEDGE_NAME(scores_int8),                                                                                 \
   .weighted_sum = KVEDGE_NAME(weighted_sum_int8),                                                                     \
   .scores_of_groups = KVEDGE_NAME(scores_of_groups),                                                                  \
   .weighted_sum_of_groups = KVEDGE_NAME(weighted_sum_of_groups)}

#include "kernels/blocks.h"
static const kvedge_cell int8_cell = KVEDGE_INT8_CELL;

/* Products of other planes are those of int8. */
static void KVEDGE_NAME(scores_of_blocks)(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  const int n = q->num_queries, is_linear = kvedge_levels_follow(keys->codes);
  if (q->planes != 2 || keys->codes->fifth) scores_of_blocks(&int8_cell, q, keys, scores);
  else if (n > 2) (is_linear ? score_many_blocks : score_many_levels)(q, keys, scores);
  else if (n == 2) (is_linear ? score_codes_2 : score_levels_2)(q, keys, scores);
  else (is_linear ? score_codes_1 : score_levels_1)(q, keys, scores);
}

static void KVEDGE_NAME(scores_of_block)(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                         int accumulate) {
  (void)accumulate; /* there is none before */
  KVEDGE_NAME(scores_of_blocks)(q, keys, scores);
}

/* ---- Weighted sums ---- */

/* Adds a block of two tokens, times the weights of `count` queries, to sums of 8 channels: (count, 4). (kind and count:
 * constants where this is inlined.) */
KVEDGE_INLINE void add_two_blocks(const group_kind kind, __m256i table, const int8_t *first, const int8_t *second,
                                  const int count, const int16_t *codes, __m256i (*sum)[4]) {
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
    split_codes(kind, table, _mm256_cvtepu8_epi16(both[v]), values);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
#pragma GCC unroll 2
      for (int i = 0; i < count; i++) multiply_add_pairs(&sum[i][2 * h + v], values[h], weights[i]);
  }
}

/* The values of a chunk's tokens, of a block `at` bytes into rows, added for `count` queries, one or two. (As before.) */
KVEDGE_INLINE void sum_blocks(const group_kind kind, __m256i table, const kvedge_stretch *stretch,
                              const kvedge_tile *values, int num_tokens, ptrdiff_t at, const int count,
                              const int16_t *codes, const float *scale, const float *rescale,
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
      add_two_blocks(kind, table, row, row + stride, count, codes, sum[0]);
      add_two_blocks(kind, table, row + 2 * stride, row + 3 * stride, count, codes + 2, sum[chains - 1]);
    }
    for (; t < tokens; t += 2, codes += 2, row += 2 * stride) /* the weight of one past the last is 0 */
      add_two_blocks(kind, table, row, t + 1 < tokens ? row + stride : row, count, codes, sum[0]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const __m256i of_8 = chains == 2 ? _mm256_add_epi32(sum[0][i][v], sum[1][i][v]) : sum[0][i][v];
      add_sums(_mm256_cvtepi32_ps(of_8), 8, scale[i * KVEDGE_TILE_BLOCKS], rescale[i], acc + i * to->stride + 8 * v);
    }
}

/* Half of a block of the tokens of a chunk, 16 channels, as sum_groups() keeps them. (kind, half: constants where this is
 * inlined.) */
KVEDGE_INLINE void keep_half(const group_kind kind, __m256i table, const kvedge_stretch *stretch,
                             const kvedge_tile *values, int num_tokens, ptrdiff_t at, const int half,
                             __m256i (*kept)[2]) {
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
        __m256i of[2];
        split_codes(kind, table, _mm256_cvtepu8_epi16(both[v]), of);
        (*kept)[v] = _mm256_add_epi16(of[half], lowest);
      }
    }
  }
}

/* The same as sum_blocks() for more queries, whose codes and scales are rows. */
KVEDGE_INLINE void sum_kept_blocks(const group_kind kind, __m256i table, const kvedge_stretch *stretch,
                                   const kvedge_tile *values, int num_tokens, ptrdiff_t at, int n, const int16_t *codes,
                                   const float *scale, const float *rescale, const kvedge_accumulators *to,
                                   float *acc) {
  static const int32_t start[SUM_QUERIES];
  __m256i kept[TOGETHER / 2][2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++, acc += 16) {
    keep_half(kind, table, stretch, values, num_tokens, at, half, kept);
#define SUM_KEPT(count)                                                                                                \
  sum_groups(8, stretch, 0, num_tokens, 0, KEPT, kept, 1, 16, count, codes + i * KVEDGE_TILE, start,                   \
             scale + i * KVEDGE_TILE_BLOCKS, rescale + i, acc + i * to->stride, to->stride)
    int i = 0;
    BY_FOURS(n, SUM_KEPT)
#undef SUM_KEPT
  }
}

/* As sum_few(), of any number of queries. (kind: a constant where this is inlined.) */
KVEDGE_INLINE void sum_few_blocks(const group_kind kind, const kvedge_probabilities *p, const kvedge_tile *values,
                                  const kvedge_accumulators *to) {
  static const float one[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                               1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const int n = p->num_queries, together = p->planes == 3 ? TOGETHER / 2 : TOGETHER;
  const int num_groups = values->dim / KVEDGE_GROUP, at_a_time = KVEDGE_QUERY_ROWS / n;
  const kvedge_next_tile next = kvedge_next_of(values, (int)(num_groups * values->group_stride));
  const __m256i table = kind == OF_LEVELS ? levels_above(values->codes) : _mm256_setzero_si256();
  tile_weights *weights = (void *)p->scratch;
  for (int first = 0, groups; first < num_groups; first += groups) {
    groups = num_groups - first < at_a_time ? num_groups - first : at_a_time;
    quantize_weights_of(p, values, together, first, groups, 1, weights);
    for (int t = 0, k = 0; t < values->num_tokens; t += together, k++) {
      const int num_tokens = values->num_tokens - t < together ? values->num_tokens - t : together;
      kvedge_stretch stretches[TOGETHER / KVEDGE_BLOCK];
      for (int i = 0, start = t; start < t + num_tokens; start += stretches[i++].num_tokens)
        stretches[i] = kvedge_stretch_of(values, &next, start, t + num_tokens);
      for (int g = 0; g < groups; g++)
        for (int i = 0; i < n; i += 2) {
          const int row = g * n + i;
          if (n > SUM_QUERIES) {
            sum_kept_blocks(kind, table, stretches, values, num_tokens, (first + g) * values->group_stride, n,
                            weights->codes[row] + t, weights->scale[row] + k, t > 0 ? one : to->rescale, to,
                            to->acc + (first + g) * KVEDGE_GROUP);
            break;
          }
#define SUM_BLOCKS(count)                                                                                              \
  sum_blocks(kind, table, stretches, values, num_tokens, (first + g) * values->group_stride, count,                    \
             weights->codes[row] + t, weights->scale[row] + k, (t > 0 ? one : to->rescale) + i, to,                    \
             to->acc + i * to->stride + (first + g) * KVEDGE_GROUP)
          if (n - i >= 2) SUM_BLOCKS(2);
          else SUM_BLOCKS(1);
#undef SUM_BLOCKS
        }
    }
  }
}

static __attribute__((noinline)) void sum_few_codes(const kvedge_probabilities *p, const kvedge_tile *values,
                                                    const kvedge_accumulators *to) {
  sum_few_blocks(OF_CODES, p, values, to);
}

static __attribute__((noinline)) void sum_few_levels(const kvedge_probabilities *p, const kvedge_tile *values,
                                                     const kvedge_accumulators *to) {
  sum_few_blocks(OF_LEVELS, p, values, to);
}

static void KVEDGE_NAME(weighted_sum_of_blocks)(const kvedge_probabilities *p, const kvedge_tile *values,
                                                const kvedge_accumulators *to) {
  const int is_few = p->planes == 2 || (p->planes == 3 && p->by_32);
  if (!is_few || values->codes->fifth) weighted_sum_of_blocks(&int8_cell, p, values, to);
  else (kvedge_levels_follow(values->codes) ? sum_few_codes : sum_few_levels)(p, values, to);
}
