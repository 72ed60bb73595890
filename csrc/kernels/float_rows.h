/* Scores and weighted sums over rows of floats of 32, 16 and 8 bits, for any width of vectors. Included by a path after
 * its target pragma and x86.h; the path first defines
 *
 *   floats                         a vector of FLOATS floats
 *   load_floats(p), store_floats(p, x), zero_floats(), all_floats(f), multiply_floats(a, b), multiply_add_floats(a, b, c): a * b + c
 *   load_first_floats(p, n), store_first_floats(p, n, x)   only the first n of them; zeros from there on
 *   load_channels(from, format), load_first_channels(from, format, n)   a row's channels as floats; likewise. Those of
 *                                  FP8 e4m3 come divided by channel_unit(format)
 *   sums_of_8(x)                   of each of 8 vectors the sum: __m256
 *   CONVERTED_QUERIES              with more of them rows of 16 and 8 bits are converted first
 *   PART_LOADS_ARE_CHEAP           load_first_channels() costs about what load_channels() does
 *
 * Scores: 8 sums stay in registers, of 8 rows and one query, 4 and 2, or 2 and 4; then lanes are added up, 8 vectors at
 * once. Weighted sums: 8 vectors of sums stay in registers over all tokens of a tile, of one query, 2 or up to 4. So each
 * FMA waits for no FMA of the 7 before it, and every row loaded serves up to 4 queries.
 *
 * Rows are converted as they are loaded where few queries meet them. They are converted first, and kept, where more do,
 * where tile->factor is not 1, and where channels do not fill vectors and part loads are not cheap: for scores 8 rows, for weighted sums the channels
 * of one pass. (factor may be as small as 2^-67 and rows as large as 3e38, so neither queries nor probabilities can take
 * it.)
 */

enum {
  FLOAT_SUMS = 8,
  LINE = 64, /* bytes */
};

KVEDGE_INLINE ptrdiff_t channel_bytes(const kvedge_format format) {
  return format == KVEDGE_FLOAT32 ? 4 : format == KVEDGE_FLOAT16 || format == KVEDGE_BFLOAT16 ? 2 : 1;
}

/* An e4m3 becomes a half by a shift, whose exponent counts from 15 where that of e4m3 counts from 7; instructions convert
 * halves, subnormal ones included. The 2^8 between them is left to be multiplied by once per sum. */
KVEDGE_INLINE float channel_unit(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 ? 256.0f : 1.0f; }

KVEDGE_INLINE int is_converted_first(const kvedge_tile *tile, const kvedge_format format, int dim, int num_queries) {
  return tile->factor != 1.0f || (dim % FLOATS != 0 && !PART_LOADS_ARE_CHEAP) ||
         (format != KVEDGE_FLOAT32 && num_queries > CONVERTED_QUERIES);
}

/* Converts n channels, FLOATS at a time; from n on, to the next multiple of FLOATS, zeros. */
KVEDGE_INLINE void convert_channels(const char *from, const kvedge_format format, int n, floats factor, float *to) {
  int d = 0;
  for (; d + FLOATS <= n; d += FLOATS, from += FLOATS * channel_bytes(format))
    store_floats(to + d, multiply_floats(load_channels(from, format), factor));
  if (d < n) store_floats(to + d, multiply_floats(load_first_channels(from, format, n - d), factor));
}

/* ---- Scores ---- */

/* sum[i * rows + j] += products of FLOATS channels, or n fewer, of query i and row j, `at` channels on. (Constants where
 * this is inlined: format, count, and whether n is FLOATS.) */
KVEDGE_INLINE void dot_channels(const float *query, ptrdiff_t stride, const int count, const char *const *row,
                                const kvedge_format format, ptrdiff_t at, int n, floats sum[FLOAT_SUMS]) {
  const int rows = FLOAT_SUMS / count;
  floats q[4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) q[i] = load_floats(query + i * stride + at);
#pragma GCC unroll 8
  for (int j = 0; j < rows; j++) {
    const char *from = row[j] + at * channel_bytes(format);
    const floats key = n >= FLOATS ? load_channels(from, format) : load_first_channels(from, format, n);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i * rows + j] = multiply_add_floats(key, q[i], sum[i * rows + j]);
  }
}

/* Dot products of FLOAT_SUMS / count rows with `count` queries, 1, 2 or 4: (count, rows). Meanwhile as many bytes are
 * prefetched as the rows have, from `next` on. */
KVEDGE_INLINE __m256 dot_float_rows(const float *query, ptrdiff_t stride, const int count, const char *const *from,
                                    const kvedge_format format, int dim, kvedge_next_block next) {
  const int rows = FLOAT_SUMS / count, per_line = LINE / (int)channel_bytes(format);
  floats sum[FLOAT_SUMS];
  const char *row[FLOAT_SUMS];
#pragma GCC unroll 8
  for (int i = 0; i < FLOAT_SUMS; i++) sum[i] = zero_floats();
#pragma GCC unroll 8
  for (int j = 0; j < rows; j++) row[j] = from[j];
  ptrdiff_t d = 0, asked = 0;
  for (; d + per_line <= dim; d += per_line) {
#pragma GCC unroll 4
    for (int e = 0; e < per_line; e += FLOATS) dot_channels(query, stride, count, row, format, d + e, FLOATS, sum);
    if (next.first)
#pragma GCC unroll 8
      for (int j = 0; j < rows; j++, asked += LINE) kvedge_prefetch_line(next, asked);
  }
  if (next.first)
    for (; asked < rows * dim * channel_bytes(format); asked += LINE) kvedge_prefetch_line(next, asked);
  for (; d + FLOATS <= dim; d += FLOATS) dot_channels(query, stride, count, row, format, d, FLOATS, sum);
  if (PART_LOADS_ARE_CHEAP && d < dim) dot_channels(query, stride, count, row, format, d, (int)(dim - d), sum);
  const __m256 dot = sums_of_8(sum);
  return channel_unit(format) == 1.0f ? dot : _mm256_mul_ps(dot, _mm256_set1_ps(channel_unit(format)));
}

/* Scores of up to 8 tokens, whose rows lie `stride` bytes apart, for `count` queries. */
KVEDGE_INLINE void score_8_rows(const kvedge_query *q, int first, const int count, const char *rows, ptrdiff_t stride,
                                int num_tokens, const kvedge_format format, int dim, kvedge_next_block next,
                                float *scores, int accumulate) {
  const int tokens = FLOAT_SUMS / count;
  const float *query = q->values + first * q->stride;
  scores += first * KVEDGE_TILE;
  for (int t = 0; t < num_tokens; t += tokens) {
    const int left = num_tokens - t;
    const char *row[FLOAT_SUMS];
#pragma GCC unroll 8
    for (int j = 0; j < tokens; j++) row[j] = rows + (j < left ? t + j : num_tokens - 1) * stride;
    const __m256 dot = dot_float_rows(query, q->stride, count, row, format, dim,
                                      kvedge_further(next, t * dim * channel_bytes(format)));
    if (left >= tokens && !accumulate) {
      store_scores(dot, tokens, scores + t);
      continue;
    }
    float made[FLOAT_SUMS]; /* (count, tokens) */
    _mm256_storeu_ps(made, dot);
    for (int i = 0; i < count; i++)
      for (int j = 0; j < tokens && j < left; j++) {
        float *out = scores + i * KVEDGE_TILE + t + j;
        *out = (accumulate ? *out : 0.0f) + made[i * tokens + j];
      }
  }
}

/* The same for all queries; the first ones prefetch. */
KVEDGE_INLINE void score_8_rows_of(const kvedge_query *q, const char *rows, ptrdiff_t stride, int num_tokens,
                                   const kvedge_format format, int dim, kvedge_next_block next, float *scores,
                                   int accumulate) {
  const int n = q->num_queries;
  int i = 0;
#define SCORE(count)                                                                                                   \
  score_8_rows(q, i, count, rows, stride, num_tokens, format, dim, next, scores, accumulate), next.first = 0
  for (; i + 4 <= n; i += 4) SCORE(4);
  if (i + 2 <= n) SCORE(2), i += 2;
  if (i < n) SCORE(1);
#undef SCORE
}

/* Rows that have been converted, which a call of their own keeps the code of once. */
static __attribute__((noinline)) void KVEDGE_NAME(score_8_converted)(const kvedge_query *q, const float *rows,
                                                                     ptrdiff_t stride, int num_tokens, float *scores,
                                                                     int accumulate) {
  score_8_rows_of(q, (const char *)rows, stride, num_tokens, KVEDGE_FLOAT32, (int)(stride / 4),
                  (kvedge_next_block){0, 0}, scores, accumulate);
}

KVEDGE_INLINE void score_floats(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate,
                                const kvedge_format format) {
  const ptrdiff_t row_bytes = q->dim * channel_bytes(format), stride = keys->token_stride;
  const kvedge_next_tile next_tile = kvedge_next_of(keys, (int)row_bytes);
  const int converted = is_converted_first(keys, format, q->dim, q->num_queries);
  const int padded = (q->dim + FLOATS - 1) / FLOATS * FLOATS; /* queries are padded with as many zeros and more */
  const floats factor = all_floats(keys->factor * channel_unit(format));
  float room[FLOAT_SUMS * 1024]; /* (FLOAT_SUMS, padded) */
  kvedge_next_block next = {0, 0};
  for (int t = 0; t < keys->num_tokens; t += FLOAT_SUMS) {
    const int left = keys->num_tokens - t, tokens = left < FLOAT_SUMS ? left : FLOAT_SUMS;
    const char *rows = kvedge_tile_row(keys, t);
    next = t % KVEDGE_BLOCK == 0 ? kvedge_next_block_of(&next_tile, t / KVEDGE_BLOCK)
                                 : kvedge_further(next, FLOAT_SUMS * row_bytes);
    if (!converted) {
      score_8_rows_of(q, rows, stride, tokens, format, q->dim, next, scores + t, accumulate);
      continue;
    }
    for (int j = 0; j < tokens; j++) {
      if (next.first)
        for (ptrdiff_t at = 0; at < row_bytes; at += LINE) kvedge_prefetch_line(next, j * row_bytes + at);
      convert_channels(rows + j * stride, format, q->dim, factor, room + j * padded);
    }
    KVEDGE_NAME(score_8_converted)(q, room, 4 * (ptrdiff_t)padded, tokens, scores + t, accumulate);
  }
}

/* ---- Weighted sums ---- */

/* Of one pass over a tile's tokens: where its rows are. */
typedef struct {
  const kvedge_run *runs;
  ptrdiff_t stride;
  int num_tokens;
} float_rows;

/* Adds the values of `vectors` vectors of channels, from channel `at` on, to the accumulators of `count` queries: of the
 * last vector n channels. (Constants where this is inlined: format, count, vectors, and whether n is FLOATS.) */
KVEDGE_INLINE void weigh_channels(const float_rows *v, const kvedge_format format, ptrdiff_t at, const int vectors,
                                  int n, const int count, int prefetches, const float *p, const float *rescale,
                                  float *acc, ptrdiff_t acc_stride) {
  const int size = (int)channel_bytes(format), bytes = vectors * FLOATS * size;
  floats sum[FLOAT_SUMS];
#pragma GCC unroll 8
  for (int i = 0; i < count * vectors; i++) sum[i] = zero_floats();
  const kvedge_run *run = v->runs;
  for (int left = v->num_tokens; left > 0; left -= run++->num_tokens) {
    const int tokens = run->num_tokens;
    const char *row = run->rows + at * size;
    const kvedge_next_block next =
        prefetches ? kvedge_further(run->next, at * size * tokens) : (kvedge_next_block){0, 0};
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++, row += v->stride, p++) {
      if (next.first && (bytes >= LINE || t % (LINE / bytes) == 0))
#pragma GCC unroll 8
        for (int line = 0; line < bytes; line += LINE) kvedge_prefetch_line(next, (ptrdiff_t)bytes * t + line);
      floats value[FLOAT_SUMS];
#pragma GCC unroll 8
      for (int k = 0; k < vectors; k++) {
        const char *from = row + k * FLOATS * size;
        value[k] = k < vectors - 1 || n >= FLOATS ? load_channels(from, format) : load_first_channels(from, format, n);
      }
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) {
        const floats weight = all_floats(p[i * KVEDGE_TILE]);
#pragma GCC unroll 8
        for (int k = 0; k < vectors; k++)
          sum[i * vectors + k] = multiply_add_floats(value[k], weight, sum[i * vectors + k]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++, acc += acc_stride) {
    const floats kept = all_floats(rescale[i]), unit = all_floats(channel_unit(format));
#pragma GCC unroll 8
    for (int k = 0; k < vectors; k++) {
      float *to = acc + k * FLOATS;
      const floats made = sum[i * vectors + k],
                   added = channel_unit(format) == 1.0f ? made : multiply_floats(made, unit);
      if (k < vectors - 1 || n >= FLOATS) store_floats(to, multiply_add_floats(load_floats(to), kept, added));
      else store_first_floats(to, n, multiply_add_floats(load_first_floats(to, n), kept, added));
    }
  }
}

/* A pass over the tokens for `count` queries, of as many of `left` channels as it can: how many is returned.
 * (Constants as in weigh_channels().) */
KVEDGE_INLINE int weigh_pass(const float_rows *v, const kvedge_format format, int at, int left, const int count,
                             int prefetches, const float *p, const float *rescale, float *acc, ptrdiff_t acc_stride) {
#define WEIGH_OF(vectors, n) weigh_channels(v, format, at, vectors, n, count, prefetches, p, rescale, acc, acc_stride)
#define WEIGH(vectors) WEIGH_OF(vectors, FLOATS)
  if (count == 1 && left >= 8 * FLOATS) return WEIGH(8), 8 * FLOATS;
  if (count <= 2 && left >= 4 * FLOATS) return WEIGH(4), 4 * FLOATS;
  if (left >= 2 * FLOATS) return WEIGH(2), 2 * FLOATS;
  if (PART_LOADS_ARE_CHEAP && left < FLOATS) WEIGH_OF(1, left);
  else WEIGH(1);
#undef WEIGH
#undef WEIGH_OF
  return FLOATS;
}

/* All queries, 2 * FLOATS channels or the first n of them, of rows that have been converted. */
static __attribute__((noinline)) void KVEDGE_NAME(weigh_converted)(const float *rows, int num_tokens, int n,
                                                                   const kvedge_probabilities *p,
                                                                   const kvedge_accumulators *to, int d) {
  const kvedge_run run = {.rows = (const char *)rows, .num_tokens = num_tokens};
  const float_rows v = {&run, 2 * FLOATS * sizeof(float), num_tokens};
  int i = 0;
#define WEIGH_VECTORS(vectors, last, count)                                                                            \
  weigh_channels(&v, KVEDGE_FLOAT32, 0, vectors, last, count, 0, p->p + i * KVEDGE_TILE, to->rescale + i,              \
                 to->acc + i * to->stride + d, to->stride)
#define WEIGH(count)                                                                                                   \
  if (n == 2 * FLOATS) WEIGH_VECTORS(2, FLOATS, count);                                                                \
  else if (n > FLOATS) WEIGH_VECTORS(2, n - FLOATS, count);                                                            \
  else WEIGH_VECTORS(1, n, count)
  BY_FOURS(p->num_queries, WEIGH)
#undef WEIGH
#undef WEIGH_VECTORS
}

KVEDGE_INLINE void weigh_rows_of_floats(const kvedge_probabilities *p, const kvedge_tile *values,
                                        const kvedge_accumulators *to, const kvedge_format format) {
  const int dim = values->dim, num_tokens = values->num_tokens, size = (int)channel_bytes(format);
  const kvedge_next_tile next = kvedge_next_of(values, dim * size);
  kvedge_run runs[KVEDGE_TILE_BLOCKS];
  int num_runs = 0;
  for (int t = 0; t < num_tokens; t += runs[num_runs++].num_tokens)
    runs[num_runs] = kvedge_run_of(values, &next, t, num_tokens);
  if (!is_converted_first(values, format, dim, p->num_queries)) {
    const float_rows v = {runs, values->token_stride, num_tokens};
    int i = 0;
#define WEIGH(count)                                                                                                   \
  for (int d = 0; d < dim;)                                                                                            \
  d += weigh_pass(&v, format, d, dim - d, count, i == 0, p->p + i * KVEDGE_TILE, to->rescale + i,                      \
                  to->acc + i * to->stride + d, to->stride)
    BY_FOURS(p->num_queries, WEIGH)
#undef WEIGH
    return;
  }
  const floats factor = all_floats(values->factor * channel_unit(format));
  float room[KVEDGE_TILE * 2 * FLOATS]; /* (num_tokens, 2 * FLOATS) */
  for (int d = 0; d < dim; d += 2 * FLOATS) {
    const int n = dim - d < 2 * FLOATS ? dim - d : 2 * FLOATS;
    float *row = room;
    for (int r = 0; r < num_runs; r++) {
      const kvedge_next_block ahead = kvedge_further(runs[r].next, d * size * runs[r].num_tokens);
      const char *from = runs[r].rows + d * size;
      for (int t = 0; t < runs[r].num_tokens; t++, from += values->token_stride, row += 2 * FLOATS) {
        if (ahead.first && t % (LINE / (FLOATS * size)) == 0)
          for (int line = 0; line < 2 * LINE; line += LINE) kvedge_prefetch_line(ahead, t * 2 * FLOATS * size + line);
        if (n == 2 * FLOATS)
          for (int k = 0; k < 2 * FLOATS; k += FLOATS)
            store_floats(row + k, multiply_floats(load_channels(from + k * size, format), factor));
        else convert_channels(from, format, n, factor, row);
      }
    }
    KVEDGE_NAME(weigh_converted)(room, num_tokens, n, p, to, d);
  }
}

#define KVEDGE_FLOAT_CELL_FUNCTIONS(name, format)                                                                      \
  static void KVEDGE_NAME(scores_##name)(const kvedge_query *q, const kvedge_tile *keys, float *scores,                \
                                         int accumulate) {                                                             \
    score_floats(q, keys, scores, accumulate, format);                                                                 \
  }                                                                                                                    \
  static void KVEDGE_NAME(weighted_sum_##name)(const kvedge_probabilities *p, const kvedge_tile *values,               \
                                               const kvedge_accumulators *to) {                                        \
    weigh_rows_of_floats(p, values, to, format);                                                                       \
  }
KVEDGE_FLOAT_CELL_FUNCTIONS(float32, KVEDGE_FLOAT32)
KVEDGE_FLOAT_CELL_FUNCTIONS(float16, KVEDGE_FLOAT16)
KVEDGE_FLOAT_CELL_FUNCTIONS(bfloat16, KVEDGE_BFLOAT16)
KVEDGE_FLOAT_CELL_FUNCTIONS(fp8_e4m3, KVEDGE_FP8_E4M3)
KVEDGE_FLOAT_CELL_FUNCTIONS(fp8_e5m2, KVEDGE_FP8_E5M2)
#undef KVEDGE_FLOAT_CELL_FUNCTIONS

#define KVEDGE_FLOAT_CELL(name) {.scores = KVEDGE_NAME(scores_##name), .weighted_sum = KVEDGE_NAME(weighted_sum_##name)}
