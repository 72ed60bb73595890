/* Scores and weighted sums over rows of floats of 32, 16 and 8 bits, for any width of vectors. Included by a path after
 * its target pragma and x86.h; the path first defines
 *
 *   KVEDGE_CELL                    static, or nothing where another file has the path's table
 *   floats                         a vector of FLOATS floats
 *   load_floats(p), store_floats(p, x), zero_floats(), all_floats(f), multiply_floats(a, b), multiply_add_floats(a, b, c): a * b + c
 *   load_first_floats(p, n), store_first_floats(p, n, x)   only the first n of them; zeros from there on
 *   load_channels(from, format), load_first_channels(from, format, n)   a row's channels as floats, or the first n. Those of
 *                                  FP8 e4m3 come divided by fp8_unit(format)
 *   load_two_vectors(from, format, x)   two vectors of them
 *   sums_of(x, n), store_sums(sums, queries, rows, scores)   of each of n vectors the sum: (queries, rows)
 *   load_4_for_all(p), sums_in_lanes(x), transpose_lanes_of_floats(x)   four floats for each 128-bit lane; of four vectors
 *                                  the sum of each lane; lane i of vector j becomes lane j of vector i
 *   interleave_fp8_rows(row, at, n, format, to, stride)   codes of up to WIDE channels as float16, see below
 *   is_fp8(format), channel_bytes(format)
 *   IN_REGISTER(x)                 x is loaded here, once: compilers else load operands anew for each FMA
 *   SUMS                           sums that stay in registers beside what they are made of; SUMS_OF_16 where they are 16
 *   MOST_QUERIES                   with more of them rows become float32 first
 *   MASKED_LOADS_ARE_CHEAP           load_first_channels() costs about what load_channels() does
 *
 * Scores: SUMS sums stay in registers, of so many queries and rows that each key and each query
 * loaded serves several FMAs, and each FMA waits for none of the SUMS - 1 before it. A sum over
 * the lanes of a vector costs as much as three FMAs. So where more than few queries meet a row,
 * rows are interleaved first, in L1: then a lane's four elements are all that is left to add up.
 * Weighted sums: so many queries and vectors of channels, over all tokens of a tile.
 *
 * Rows are converted as they are loaded where few queries meet them. They become float32 first
 * where more do, where tile->factor is not 1, and where channels do not fill vectors and masked
 * loads are not cheap: for weighted sums 32 channels of a tile. (factor may be as small as 2^-67
 * and rows as large as 3e38, so neither queries nor probabilities can take it.)
 */

enum { LINE = 64 /* bytes */ };

/* An e4m3 becomes a half by a shift, whose exponent counts from 15 where that of e4m3 counts
 * from 7; instructions convert halves, subnormal ones included. The 2^8 between them is left to
 * be multiplied by once per sum. */
KVEDGE_INLINE float fp8_unit(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 ? 256.0f : 1.0f; }

/* Do rows become float32 first? */
KVEDGE_INLINE int is_converted(const kvedge_tile *tile, const kvedge_format format, int dim, int num_queries) {
  return tile->factor != 1.0f || (dim % FLOATS != 0 && !MASKED_LOADS_ARE_CHEAP) ||
         (format != KVEDGE_FLOAT32 && num_queries > MOST_QUERIES);
}

/* Queries up to which rows are multiplied as they are stored, for scores. */
KVEDGE_INLINE int most_of_rows(const kvedge_format format) {
  if (format == KVEDGE_FP8_E4M3) return FLOATS == 8 ? 1 : 2;
  return is_fp8(format) ? 2 : 4;
}

/* n channels as float32, FLOATS at a time; from n on, to the next multiple of FLOATS, zeros. */
KVEDGE_INLINE void convert_channels(const char *from, const kvedge_format format, int n, floats factor, float *to) {
  int d = 0;
  for (; d + FLOATS <= n; d += FLOATS, from += FLOATS * channel_bytes(format))
    store_floats(to + d, multiply_floats(load_channels(from, format), factor));
  if (d < n) store_floats(to + d, multiply_floats(load_first_channels(from, format, n - d), factor));
}

/* ---- Scores ---- */

/* Up to 16 rows of a tile. */
typedef struct {
  const char *rows; /* (num_tokens), stride apart */
  ptrdiff_t stride;
  int num_tokens, dim;
  kvedge_next_block next; /* to prefetch meanwhile, as many bytes as there are */
} row_block;

/* Rows that meet `count` queries at a time. */
#define ROWS_OF(count) ((count) == 1 ? 8 : SUMS / (count) >= 8 ? 8 : SUMS / (count) >= 4 ? 4 : 2)

/* sum[i * rows + j] += products of FLOATS channels, or n fewer, of query i and row j, `at`
 * channels on. (Constants where this is inlined: format, count, and whether n is FLOATS.) */
KVEDGE_INLINE void dot_channels(const float *query, ptrdiff_t stride, const int count, const char *const *row,
                                const kvedge_format format, ptrdiff_t at, int n, floats sum[SUMS]) {
  const int rows = ROWS_OF(count);
  if (count == 1) {
    const floats values = load_floats(query + at);
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) {
      const char *from = row[j] + at * channel_bytes(format);
      sum[j] = multiply_add_floats(n >= FLOATS ? load_channels(from, format) : load_first_channels(from, format, n),
                                   values, sum[j]);
    }
    return;
  }
  floats key[8];
#pragma GCC unroll 8
  for (int j = 0; j < rows; j++) {
    const char *from = row[j] + at * channel_bytes(format);
    key[j] = n >= FLOATS ? load_channels(from, format) : load_first_channels(from, format, n);
    IN_REGISTER(key[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    floats values = load_floats(query + i * stride + at);
    IN_REGISTER(values);
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) sum[i * rows + j] = multiply_add_floats(key[j], values, sum[i * rows + j]);
  }
}

/* Scores of a block for `count` queries from `first` on. (Constants where this is inlined: format, count.) */
KVEDGE_INLINE void score_for(const kvedge_query *q, int first, const int count, const row_block *b,
                             const kvedge_format format, kvedge_next_block next, float *scores, int accumulate) {
  const int step = FLOATS == 16 ? 16 : LINE / (int)channel_bytes(format); /* channels */
  const int rows = ROWS_OF(count), lines = rows * step * (int)channel_bytes(format) / LINE;
  const float *query = q->values + first * q->stride;
  scores += first * KVEDGE_TILE;
  for (int t = 0; t < b->num_tokens; t += rows) {
    const int left = b->num_tokens - t;
    const char *row[8];
    floats sum[SUMS];
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) row[j] = b->rows + (j < left ? t + j : b->num_tokens - 1) * b->stride;
#pragma GCC unroll 16
    for (int i = 0; i < count * rows; i++) sum[i] = zero_floats();
    int d = 0;
    for (; d + step <= b->dim; d += step) {
#pragma GCC unroll 8
      for (int e = 0; e < step; e += FLOATS) dot_channels(query, q->stride, count, row, format, d + e, FLOATS, sum);
      if (next.first) {
#pragma GCC unroll 8
        for (int line = 0; line < lines; line++) kvedge_prefetch_line(next, LINE * line);
        next = kvedge_further(next, LINE * lines);
      }
    }
    if (next.first && d < b->dim) {
      const int rest = rows * (b->dim - d) * (int)channel_bytes(format);
      for (int at = 0; at < rest; at += LINE) kvedge_prefetch_line(next, at);
      next = kvedge_further(next, rest);
    }
    for (; FLOATS < step && d + FLOATS <= b->dim; d += FLOATS)
      dot_channels(query, q->stride, count, row, format, d, FLOATS, sum);
    if (MASKED_LOADS_ARE_CHEAP && d < b->dim)
      dot_channels(query, q->stride, count, row, format, d, (int)(b->dim - d), sum);
    const floats dot = multiply_floats(sums_of(sum, count * rows), all_floats(fp8_unit(format)));
    if (left >= rows && !accumulate) {
      store_sums(dot, count, rows, scores + t);
      continue;
    }
    float products[SUMS]; /* (count, rows) */
    store_floats(products, dot);
    for (int i = 0; i < count; i++)
      for (int j = 0; j < rows && j < left; j++) {
        float *out = scores + i * KVEDGE_TILE + t + j;
        *out = (accumulate ? *out : 0.0f) + products[i * rows + j];
      }
  }
}

/* WORK(count) for queries i..n-1: up to MOST_QUERIES at once, or four at a time. */
#if SUMS_OF_16
#define BY_QUERIES(n, WORK)                                                                                            \
  {                                                                                                                    \
    for (; i + MOST_QUERIES < (n); i += 4) WORK(4);                                                                    \
    switch ((n) - i) {                                                                                                 \
      case 8: WORK(8); break;                                                                                          \
      case 7: WORK(7); break;                                                                                          \
      case 6: WORK(6); break;                                                                                          \
      case 5: WORK(5); break;                                                                                          \
      case 4: WORK(4); break;                                                                                          \
      case 3: WORK(3); break;                                                                                          \
      case 2: WORK(2); break;                                                                                          \
      case 1: WORK(1); break;                                                                                          \
    }                                                                                                                  \
  }
#else
#define BY_QUERIES BY_FOURS
#endif

/* Scores of a block for all queries, up to most_of_rows(); the first ones prefetch. */
#define SCORE(count) score_for(q, i, count, b, format, next, scores, accumulate), next.first = 0
#define SCORE_BLOCK(name, of)                                                                                          \
  static __attribute__((noinline)) void KVEDGE_NAME(score_##name)(const kvedge_query *q, const row_block *b,           \
                                                                  float *scores, int accumulate) {                     \
    const kvedge_format format = of;                                                                                   \
    kvedge_next_block next = b->next;                                                                                  \
    const int n = q->num_queries;                                                                                      \
    int i = 0;                                                                                                         \
    if (n == 4 && most_of_rows(format) >= 4) SCORE(4), i = 4;                                                          \
    if (n - i >= 2 && most_of_rows(format) >= 2) SCORE(2), i += 2;                                                     \
    if (i < n) SCORE(1);                                                                                               \
  }
SCORE_BLOCK(float32, KVEDGE_FLOAT32)
SCORE_BLOCK(float16, KVEDGE_FLOAT16)
SCORE_BLOCK(bfloat16, KVEDGE_BFLOAT16)
SCORE_BLOCK(fp8_e4m3, KVEDGE_FP8_E4M3)
SCORE_BLOCK(fp8_e5m2, KVEDGE_FP8_E5M2)
#undef SCORE_BLOCK
#undef SCORE

/* ---- Scores of interleaved rows ----
 *
 * Four channels of ROWS_BESIDE rows side by side, a row to each 128-bit lane: a query's four channels come for all lanes by
 * one load, and of a sum no more than the four elements of a lane are left to be added up. Rows are in groups such that
 * sums of groups g to g + 3, added up, have their rows in order. Of every 32 channels, channels 4 c to 4 c + 3 lie beside
 * 16 + 4 c to 16 + 4 c + 3, as codes of 8 bits become 16 bits: a block is (channels / 32, c, GROUPS, 2, ROWS_BESIDE, 4). */
enum {
  ROWS_BESIDE = FLOATS / 4,
  GROUPS = KVEDGE_BLOCK / ROWS_BESIDE, /* of a block's rows */
  CHANNELS_BESIDE = 256,               /* that are interleaved at a time */
};

KVEDGE_INLINE int row_of_lane(int group, int lane) { return FLOATS * (group / 4) + 4 * lane + group % 4; }

/* Scores of a block for `count` queries, of `dim` channels. (Constants where this is inlined: format, count.) */
KVEDGE_INLINE void score_interleaved(const float *query, ptrdiff_t stride, const int count, const char *block,
                                     const kvedge_format format, int dim, float unit, float *scores, int accumulate) {
  const int size = FLOATS * (int)channel_bytes(format), at_once = 4 * count <= SUMS ? 4 : 2;
  for (int set = 0; set < GROUPS; set += 4, block += 8 * size, scores += FLOATS) {
    floats sum[MOST_QUERIES][4];
#pragma GCC unroll 2
    for (int g = 0; g < 4; g += at_once) {
#pragma GCC unroll 8
      for (int i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int k = g; k < g + at_once; k++) sum[i][k] = zero_floats();
      const char *from = block + 2 * g * size;
      const float *of_query = query;
      for (int c = 0; c < (dim + 31) / 32 * 4; c++, from += 2 * GROUPS * size) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          floats key[4];
#pragma GCC unroll 4
          for (int k = 0; k < at_once; k++) {
            key[k] = load_channels(from + (2 * k + half) * size, format);
            IN_REGISTER(key[k]);
          }
#pragma GCC unroll 8
          for (int i = 0; i < count; i++) {
            floats values = load_4_for_all(of_query + i * stride + 16 * half);
            IN_REGISTER(values);
#pragma GCC unroll 4
            for (int k = 0; k < at_once; k++) sum[i][g + k] = multiply_add_floats(key[k], values, sum[i][g + k]);
          }
        }
        of_query += c % 4 == 3 ? 20 : 4;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      float *out = scores + i * KVEDGE_TILE;
      const floats dot = sums_in_lanes(sum[i]), before = accumulate ? load_floats(out) : zero_floats();
      store_floats(out, multiply_add_floats(dot, all_floats(unit), before));
    }
  }
}

#define SCORE(count)                                                                                                   \
  score_interleaved(q->values + i * q->stride + channel, q->stride, count, block, format, dim, unit,                   \
                    scores + i * KVEDGE_TILE, accumulate)
#define SCORE_INTERLEAVED(name, of)                                                                                    \
  static __attribute__((noinline)) void KVEDGE_NAME(score_interleaved_##name)(                                         \
      const kvedge_query *q, int channel, const char *block, int dim, float unit, float *scores, int accumulate) {     \
    const kvedge_format format = of;                                                                                   \
    int i = 0;                                                                                                         \
    BY_QUERIES(q->num_queries, SCORE)                                                                                  \
  }
SCORE_INTERLEAVED(float32, KVEDGE_FLOAT32)
SCORE_INTERLEAVED(float16, KVEDGE_FLOAT16)
#undef SCORE_INTERLEAVED
#undef SCORE

/* The rows of a group; past the last one it is repeated. */
KVEDGE_INLINE void rows_of_group(const row_block *b, int group, const char *row[ROWS_BESIDE]) {
#pragma GCC unroll 4
  for (int lane = 0; lane < ROWS_BESIDE; lane++) {
    const int t = row_of_lane(group, lane);
    row[lane] = b->rows + (t < b->num_tokens ? t : b->num_tokens - 1) * b->stride;
  }
}

/* A group's share of what is to prefetch. */
KVEDGE_INLINE void prefetch_group(const row_block *b, int group, const kvedge_format format) {
  const int n = b->dim * (int)channel_bytes(format);
  if (!b->next.first) return;
  for (int at = 0; at < ROWS_BESIDE * n; at += LINE) kvedge_prefetch_line(b->next, group * ROWS_BESIDE * n + at);
}

/* Where in a block group 0 has channels d to d + 3. */
KVEDGE_INLINE int place_of(int d) { return ((d / 32 * 4 + d % 16 / 4) * GROUPS * 2 + d % 32 / 16) * FLOATS; }

KVEDGE_INLINE void interleave_fp8(const row_block *b, const kvedge_format format, uint16_t *to) {
  const int n = b->dim;
  for (int g = 0; g < GROUPS; g++, to += 2 * FLOATS) {
    const char *row[ROWS_BESIDE];
    rows_of_group(b, g, row);
    prefetch_group(b, g, format);
    int d = 0;
    for (; d + WIDE <= n; d += WIDE) interleave_fp8_rows(row, d, WIDE, format, to + place_of(d), 2 * GROUPS * FLOATS);
    for (; d < n; d += 32) interleave_fp8_rows(row, d, n - d, format, to + place_of(d), 2 * GROUPS * FLOATS);
  }
}

/* FLOATS channels from d on of a group's rows; where `n` is not FLOATS only as many are there, or none. */
KVEDGE_INLINE void interleave_channels(const char *const row[ROWS_BESIDE], int d, int n, const kvedge_format format,
                                       floats factor, float *to) {
  floats of_row[ROWS_BESIDE];
#pragma GCC unroll 4
  for (int lane = 0; lane < ROWS_BESIDE; lane++) {
    const char *from = row[lane] + d * channel_bytes(format);
    of_row[lane] = n <= 0        ? zero_floats()
                   : n >= FLOATS ? multiply_floats(load_channels(from, format), factor)
                                 : multiply_floats(load_first_channels(from, format, n), factor);
  }
  transpose_lanes_of_floats(of_row);
#pragma GCC unroll 4
  for (int j = 0; j < ROWS_BESIDE; j++) store_floats(to + place_of(4 * j), of_row[j]);
}

KVEDGE_INLINE void interleave_floats(const row_block *b, const kvedge_format format, floats factor, float *to) {
  const int n = b->dim;
  for (int g = 0; g < GROUPS; g++, to += 2 * FLOATS) {
    const char *row[ROWS_BESIDE];
    rows_of_group(b, g, row);
    prefetch_group(b, g, format);
    for (int d = 0; d < n; d += 32)
#pragma GCC unroll 4
      for (int e = 0; e < 32; e += FLOATS)
        if (d + 32 <= n) interleave_channels(row, d + e, FLOATS, format, factor, to + place_of(d) + place_of(e));
        else interleave_channels(row, d + e, n - d - e, format, factor, to + place_of(d) + place_of(e));
  }
}

/* Scores of rows that are interleaved first, as float16 or float32. */
KVEDGE_INLINE void score_by_interleaving(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate,
                                         const kvedge_format format) {
  const int size = (int)channel_bytes(format),
            as_halves = is_fp8(format) && !is_converted(keys, format, q->dim, q->num_queries);
  const kvedge_next_tile next_tile = kvedge_next_of(keys, q->dim * size);
  const floats factor = all_floats(keys->factor * fp8_unit(format));
  struct {
    _Alignas(64) float block[KVEDGE_BLOCK * CHANNELS_BESIDE];
    _Alignas(64) uint16_t halves[KVEDGE_BLOCK * CHANNELS_BESIDE]; /* of FP8 */
  } *room = (void *)q->scratch;
  float *block = room->block;
  uint16_t *halves = room->halves;
  for (int t = 0; t < keys->num_tokens; t += KVEDGE_BLOCK) {
    const int left = keys->num_tokens - t;
    const kvedge_next_block next = kvedge_next_block_of(&next_tile, t / KVEDGE_BLOCK);
    float before[KVEDGE_QUERY_ROWS]
                [KVEDGE_BLOCK]; /* what is added to, after all channels: it may be large beside them */
    for (int i = 0; accumulate && i < q->num_queries; i++)
      memcpy(before[i], scores + i * KVEDGE_TILE + t, sizeof before[i]);
    for (int d = 0; d < q->dim; d += CHANNELS_BESIDE) {
      const int n = q->dim - d < CHANNELS_BESIDE ? q->dim - d : CHANNELS_BESIDE;
      const row_block rows = {.rows = kvedge_tile_row(keys, t) + d * size,
                              .stride = keys->token_stride,
                              .num_tokens = left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK,
                              .dim = n,
                              .next = kvedge_further(next, d * size * KVEDGE_BLOCK)};
      if (is_fp8(format)) interleave_fp8(&rows, format, halves);
      else interleave_floats(&rows, format, factor, block);
      if (as_halves) {
        KVEDGE_NAME(score_interleaved_float16)(q, d, (const char *)halves, n, fp8_unit(format), scores + t, d > 0);
        continue;
      }
      const int filled = (n + 31) / 32 * 32 * KVEDGE_BLOCK;
      for (int i = 0; is_fp8(format) && i < filled; i += FLOATS)
        store_floats(block + i, multiply_floats(load_channels((const char *)(halves + i), KVEDGE_FLOAT16), factor));
      KVEDGE_NAME(score_interleaved_float32)(q, d, (const char *)block, n, 1.0f, scores + t, d > 0);
    }
    for (int i = 0; accumulate && i < q->num_queries; i++)
      for (int j = 0; j < KVEDGE_BLOCK; j++) scores[i * KVEDGE_TILE + t + j] += before[i][j];
  }
}

typedef void score_rows(const kvedge_query *q, const row_block *b, float *scores, int accumulate);

/* `score`: of rows of the format as they are. */
KVEDGE_INLINE void score_floats(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate,
                                const kvedge_format format, score_rows *score) {
  const ptrdiff_t row_bytes = q->dim * channel_bytes(format);
  if (is_converted(keys, format, q->dim, q->num_queries) || q->num_queries > most_of_rows(format)) {
    score_by_interleaving(q, keys, scores, accumulate, format);
    return;
  }
  const kvedge_next_tile next_tile = kvedge_next_of(keys, (int)row_bytes);
  for (int t = 0; t < keys->num_tokens; t += KVEDGE_BLOCK) {
    const int left = keys->num_tokens - t;
    const row_block block = {.rows = kvedge_tile_row(keys, t),
                             .stride = keys->token_stride,
                             .num_tokens = left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK,
                             .dim = q->dim,
                             .next = kvedge_next_block_of(&next_tile, t / KVEDGE_BLOCK)};
    score(q, &block, scores + t, accumulate);
  }
}

/* ---- Weighted sums ---- */

/* The rows of a pass over a tile, or converted channels of them. */
typedef struct {
  const kvedge_stretch *stretches;
  ptrdiff_t stride;
  int num_tokens, dim; /* channels */
  int prefetches;
} float_rows;

/* Adds the values of `vectors` vectors of channels, from channel `at` on, to the accumulators of
 * `count` queries: of one vector n channels. (Constants where this is inlined: format, count,
 * vectors, and whether n is FLOATS.) */
KVEDGE_INLINE void sum_channels(const float_rows *v, const kvedge_format format, ptrdiff_t at, const int vectors, int n,
                                const int count, int prefetches, const float *p, const float *rescale, float *acc,
                                ptrdiff_t acc_stride) {
  const int size = (int)channel_bytes(format), bytes = vectors * FLOATS * size;
  floats sum[SUMS];
#pragma GCC unroll 16
  for (int i = 0; i < count * vectors; i++) sum[i] = zero_floats();
  const kvedge_stretch *stretch = v->stretches;
  for (int left = v->num_tokens; left > 0; left -= stretch++->num_tokens) {
    const int tokens = stretch->num_tokens;
    const char *row = stretch->rows + at * size;
    const kvedge_next_block next =
        prefetches ? kvedge_further(stretch->next, at * size * tokens) : (kvedge_next_block){0, 0};
#pragma GCC unroll 2
    for (int t = 0; t < tokens; t++, row += v->stride, p++) {
      if (next.first && (bytes >= LINE || t % (LINE / bytes) == 0))
#pragma GCC unroll 8
        for (int line = 0; line < bytes; line += LINE) kvedge_prefetch_line(next, (ptrdiff_t)bytes * t + line);
      floats value[8];
#pragma GCC unroll 8
      for (int k = 0; k < vectors; k += 2) {
        const char *from = row + k * FLOATS * size;
        if (k + 1 < vectors) load_two_vectors(from, format, &value[k]);
        else if (n >= FLOATS || !MASKED_LOADS_ARE_CHEAP) value[k] = load_channels(from, format);
        else value[k] = load_first_channels(from, format, n);
        if (count > 1) IN_REGISTER(value[k]);
        if (count > 1 && k + 1 < vectors) IN_REGISTER(value[k + 1]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const floats weight = all_floats(p[i * KVEDGE_TILE]);
#pragma GCC unroll 8
        for (int k = 0; k < vectors; k++)
          sum[i * vectors + k] = multiply_add_floats(value[k], weight, sum[i * vectors + k]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++, acc += acc_stride) {
    const floats kept = all_floats(rescale[i]);
#pragma GCC unroll 8
    for (int k = 0; k < vectors; k++) {
      float *to = acc + k * FLOATS;
      const floats products = sum[i * vectors + k],
                   added =
                       format == KVEDGE_FP8_E4M3 ? multiply_floats(products, all_floats(fp8_unit(format))) : products;
      if (n >= FLOATS) store_floats(to, multiply_add_floats(load_floats(to), kept, added));
      else store_first_floats(to, n, multiply_add_floats(load_first_floats(to, n), kept, added));
    }
  }
}

/* A pass over the tokens for `count` queries, of as many of `left` channels as it can: how many is returned.
 * (Constants as in sum_channels().) */
KVEDGE_INLINE int sum_pass(const float_rows *v, const kvedge_format format, int at, int left, const int count,
                           int prefetches, const float *p, const float *rescale, float *acc, ptrdiff_t acc_stride) {
#define SUM_OF(vectors, n) sum_channels(v, format, at, vectors, n, count, prefetches, p, rescale, acc, acc_stride)
#define SUM(vectors)                                                                                                   \
  if (count * vectors <= SUMS && left >= vectors * FLOATS) return SUM_OF(vectors, FLOATS), vectors * FLOATS
  SUM(8);
  SUM(4);
  SUM(2);
  if (MASKED_LOADS_ARE_CHEAP || left < FLOATS) SUM_OF(1, left < FLOATS ? left : FLOATS);
  else SUM_OF(1, FLOATS);
#undef SUM
#undef SUM_OF
  return FLOATS;
}

/* All queries and channels, which are added to the accumulators from channel `first` on. */
#define SUM(count)                                                                                                     \
  for (int d = 0; d < v->dim;)                                                                                         \
  d += sum_pass(v, format, d, v->dim - d, count, v->prefetches && i == 0, p->p + i * KVEDGE_TILE, to->rescale + i,     \
                to->acc + i * to->stride + first + d, to->stride)
#define SUM_ROWS(name, of)                                                                                             \
  static __attribute__((noinline)) void KVEDGE_NAME(sum_##name)(const float_rows *v, const kvedge_probabilities *p,    \
                                                                const kvedge_accumulators *to, int first) {            \
    const kvedge_format format = of;                                                                                   \
    int i = 0;                                                                                                         \
    if (is_fp8(format)) BY_QUERIES(p->num_queries, SUM)                                                                \
    else BY_FOURS(p->num_queries, SUM)                                                                                 \
  }
SUM_ROWS(float32, KVEDGE_FLOAT32)
SUM_ROWS(float16, KVEDGE_FLOAT16)
SUM_ROWS(bfloat16, KVEDGE_BFLOAT16)
SUM_ROWS(fp8_e4m3, KVEDGE_FP8_E4M3)
SUM_ROWS(fp8_e5m2, KVEDGE_FP8_E5M2)
#undef SUM_ROWS
#undef SUM

typedef void sum_rows(const float_rows *v, const kvedge_probabilities *p, const kvedge_accumulators *to, int first);

/* `of_rows`: of rows of the format as they are. */
KVEDGE_INLINE void sum_rows_of_floats(const kvedge_probabilities *p, const kvedge_tile *values,
                                      const kvedge_accumulators *to, const kvedge_format format, sum_rows *of_rows) {
  enum { WIDE = 32 }; /* channels that are converted at a time */
  const int dim = values->dim, num_tokens = values->num_tokens, size = (int)channel_bytes(format);
  const kvedge_next_tile next = kvedge_next_of(values, dim * size);
  kvedge_stretch stretches[KVEDGE_TILE_BLOCKS];
  int num_stretches = 0;
  for (int t = 0; t < num_tokens; t += stretches[num_stretches++].num_tokens)
    stretches[num_stretches] = kvedge_stretch_of(values, &next, t, num_tokens);
  if (!is_converted(values, format, dim, p->num_queries)) {
    const float_rows v = {stretches, values->token_stride, num_tokens, dim, 1};
    of_rows(&v, p, to, 0);
    return;
  }
  const floats factor = all_floats(values->factor * fp8_unit(format));
  float *room = (float *)p->scratch; /* (num_tokens, WIDE) */
  const kvedge_stretch all = {.rows = (const char *)room, .num_tokens = num_tokens};
  for (int d = 0; d < dim; d += WIDE) {
    const int n = dim - d < WIDE ? dim - d : WIDE;
    const float_rows v = {&all, WIDE * sizeof(float), num_tokens, n, 0};
    float *row = room;
    for (int r = 0; r < num_stretches; r++) {
      const kvedge_next_block ahead = kvedge_further(stretches[r].next, d * size * stretches[r].num_tokens);
      const char *from = stretches[r].rows + d * size;
      for (int t = 0, fetched = 0; t < stretches[r].num_tokens; t++, row += WIDE, from += values->token_stride) {
        for (; ahead.first && fetched < n * size * (t + 1); fetched += LINE) kvedge_prefetch_line(ahead, fetched);
        if (n == WIDE) convert_channels(from, format, WIDE, factor, row);
        else convert_channels(from, format, n, factor, row);
      }
    }
    KVEDGE_NAME(sum_float32)(&v, p, to, d);
  }
}

#define KVEDGE_FLOAT_CELL_FUNCTIONS(name, format)                                                                      \
  KVEDGE_CELL void KVEDGE_NAME(scores_##name)(const kvedge_query *q, const kvedge_tile *keys, float *scores,           \
                                              int accumulate) {                                                        \
    score_floats(q, keys, scores, accumulate, format, KVEDGE_NAME(score_##name));                                      \
  }                                                                                                                    \
  KVEDGE_CELL void KVEDGE_NAME(weighted_sum_##name)(const kvedge_probabilities *p, const kvedge_tile *values,          \
                                                    const kvedge_accumulators *to) {                                   \
    sum_rows_of_floats(p, values, to, format, KVEDGE_NAME(sum_##name));                                                \
  }
KVEDGE_FLOAT_CELL_FUNCTIONS(float32, KVEDGE_FLOAT32)
KVEDGE_FLOAT_CELL_FUNCTIONS(float16, KVEDGE_FLOAT16)
KVEDGE_FLOAT_CELL_FUNCTIONS(bfloat16, KVEDGE_BFLOAT16)
KVEDGE_FLOAT_CELL_FUNCTIONS(fp8_e4m3, KVEDGE_FP8_E4M3)
KVEDGE_FLOAT_CELL_FUNCTIONS(fp8_e5m2, KVEDGE_FP8_E5M2)
#undef KVEDGE_FLOAT_CELL_FUNCTIONS

#define KVEDGE_FLOAT_CELL(name) {.scores = KVEDGE_NAME(scores_##name), .weighted_sum = KVEDGE_NAME(weighted_sum_##name)}
