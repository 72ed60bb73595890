/* Runs of kivi2, kivi4 and kivi8 by the kernels of int8. Codes less the middle one, 2^(bits - 1), are integers of 8 bits, so
 * with middle = low + step * 2^(bits - 1)
 *
 *   scores[t] = sum_d q[d] middle[d] + sum_d (q[d] step[d]) code[t][d]            a step per channel and run
 *   acc[d]    = sum_t p[t] middle[t] + sum_t (p[t] step[t]) code[t][d]            a step per token and 64 channels
 *
 * The first sums are of floats: one number for a query and a run, and one for a query and 64 channels. The second ones
 * are those of int8: keys' steps multiply the query, once per run, and values' steps are their scales. Rows are widened to
 * bytes in room that stays in the first-level cache; a path that multiplies codes of 4 bits as they lie does so.
 *
 * Included by a path after its kernels. Plain C, which the path compiles for itself.
 */
#include "formats/kivi.h"

enum {
  RUN_LANES = 16,             /* independent sums, as in portable.h */
  RUN_CHANNELS = 32 * 256,    /* of queries that are prepared at a time */
  RUN_CODES = RUN * 1024,     /* of keys that are widened at a time; more than those of values */
  RUN_GROUPS = 1024 / GROUP,  /* of a value, at most */
  COLUMN = KVEDGE_TILE + RUN, /* a tile's steps, and no power of two */
};

/* The cells of a path for rows of bytes, and of 4 bits (`scores` NULL: it has none) with the levels of a tile. */
typedef struct {
  kvedge_cell of_bytes, of_codes;
} run_kernels;

static const int8_t run_levels[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* ---- Rows ---- */

typedef union {
  _Alignas(64) int8_t rows[RUN_CODES];
  uint16_t pairs[RUN_CODES / 2];
  uint32_t fours[RUN_CODES / 4];
} wide_run;

/* Codes of `bytes` bytes, less the middle one, to `out`, counted in what a byte becomes. (Signs are extended byte by
 * byte.) */
static inline void widen_codes(const uint8_t *codes, int bytes, int bits, wide_run *to, ptrdiff_t at) {
  if (bits == 4) {
    uint16_t *restrict out = to->pairs + at;
    for (int i = 0; i < bytes; i++) {
      const uint16_t code = (uint16_t)(((codes[i] & 15u) | (codes[i] & 240u) << 4) ^ 0x0808u);
      out[i] = (uint16_t)(code | (code & 0x0808u) << 1 | (code & 0x0808u) << 2 | (code & 0x0808u) << 3 |
                          (code & 0x0808u) << 4);
    }
  } else if (bits == 2) {
    uint32_t *restrict out = to->fours + at;
    for (int i = 0; i < bytes; i++) {
      const uint32_t x = codes[i];
      const uint32_t code = ((x & 3u) | (x & 12u) << 6 | (x & 48u) << 12 | (x & 192u) << 18) ^ 0x02020202u;
      out[i] = code | ((code & 0x02020202u) >> 1) * 0xfcu;
    }
  } else {
    int8_t *restrict out = to->rows + at;
    for (int i = 0; i < bytes; i++) out[i] = (int8_t)(codes[i] ^ 0x80);
  }
}

/* Tokens of a tile that lie in its r-th run: the first of them in the run, and how many from token t of the tile on. */
static inline int tokens_of_run(const kvedge_tile *tile, int r, int t, int *first) {
  *first = r ? 0 : tile->first;
  const int left = tile->num_tokens - t, here = RUN - *first;
  return left < here ? left : here;
}

static inline run_parts parts_at(const kvedge_tile *tile, int r, int of_values) {
  return parts_of(tile->blocks[r] + tile->offset, tile->dim, tile->bits, of_values);
}

/* Prefetches bytes from..to-1 of the run that comes later with the r-th one. */
static inline void prefetch_run(const kvedge_tile *tile, int r, size_t from, size_t to) {
  if (!tile->next.blocks) return;
  const uintptr_t run = (uintptr_t)tile->next.blocks[r] + (uintptr_t)tile->next.offset;
  prefetch_bytes((const char *)(run + from), (ptrdiff_t)(to - from));
}

/* ---- Scores ---- */

/* A run's steps and middles, and queries times its steps as a cell has them. */
typedef struct {
  float steps[1024], middles[1024], products[1024]; /* (padded), 0 from dim on */
  union {
    _Alignas(64) int8_t codes[RUN_CHANNELS * KVEDGE_CODE_BYTES];
    float values[RUN_CHANNELS];
  };
  float scale[KVEDGE_STACK], constant[KVEDGE_STACK];
  int32_t offsets[4 * KVEDGE_STACK];
} run_queries;

static inline void read_steps(const run_parts *run, int dim, int bits, run_queries *to) {
  const float most = (float)(1 << (bits - 1));
  const int padded = kvedge_padded_channels(dim);
  floats_of_steps(run->steps, dim, to->steps);
  floats_of_steps(run->lows, dim, to->middles);
  for (int d = 0; d < dim; d++) to->middles[d] += to->steps[d] * most;
  for (int d = dim; d < padded; d++) to->steps[d] = to->middles[d] = 0.0f;
}

static inline float sum_of_lanes(float lane[RUN_LANES]) {
  for (int width = RUN_LANES / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

/* products = x * steps, and the largest of them; returns the sum of x * middles. */
static inline float multiply_steps(const float *x, int padded, const float *steps, const float *middles,
                                   float *restrict products, float *largest) {
  float sum[RUN_LANES] = {0}, most[RUN_LANES] = {0};
  for (int d = 0; d < padded; d += RUN_LANES)
    for (int j = 0; j < RUN_LANES; j++) {
      const float product = x[d + j] * steps[d + j], size = fabsf(product);
      products[d + j] = product;
      most[j] = size > most[j] ? size : most[j];
      sum[j] += x[d + j] * middles[d + j];
    }
  *largest = 0.0f;
  for (int j = 0; j < RUN_LANES; j++) *largest = most[j] > *largest ? most[j] : *largest;
  return sum_of_lanes(sum);
}

/* Queries first..first+count-1, prepared for a run. */
static inline kvedge_query queries_of_run(const kvedge_query *q, int first, int count, const kvedge_cell *cell,
                                          run_queries *room) {
  const int padded = kvedge_padded_channels(q->dim);
  kvedge_query to = {.num_queries = count, .dim = q->dim, .planes = q->planes ? q->planes : 2, .stride = padded};
  for (int i = 0; i < count; i++) {
    float largest, *products = cell->encode_query ? room->products : room->values + i * padded;
    const float *x = q->values + (first + i) * q->stride;
    room->constant[i] = multiply_steps(x, padded, room->steps, room->middles, products, &largest);
    if (!cell->encode_query) continue;
    const float unit = kvedge_float_of_bits(kvedge_bits_of_float(largest) & 0x7f800000u); /* a power of two */
    const float factor = unit > 0x1p-100f ? 1.0f / unit : 0.0f;
    cell->encode_query(products, q->dim, factor, largest * factor, room->codes + i * padded * KVEDGE_CODE_BYTES,
                       &room->scale[i], room->offsets + 4 * i);
    room->scale[i] *= unit;
    if (q->planes == 0 && !(q->error[first + i] * 256.0f * room->scale[i] <= KVEDGE_LOGIT_ERROR)) to.planes = 3;
  }
  if (cell->encode_query) to.codes = room->codes, to.scale = room->scale, to.offsets = room->offsets;
  else to.values = room->values;
  to.scale_stride = 1;
  return to;
}

static inline void score_runs(const run_kernels *kernels, const kvedge_query *q, const kvedge_tile *keys,
                              float *scores) {
  static const float ones[RUN + KVEDGE_BLOCK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const int dim = keys->dim, bits = keys->bits, in_place = bits == 4 && kernels->of_codes.scores;
  const kvedge_cell *cell = in_place ? &kernels->of_codes : &kernels->of_bytes;
  const int most = RUN_CHANNELS / kvedge_padded_channels(dim);
  const size_t bytes = run_bytes(dim, bits, 0);
  run_queries room;
  wide_run wide;
  for (int t = 0, r = 0, count; t < keys->num_tokens; t += count, r++) {
    int first;
    count = tokens_of_run(keys, r, t, &first);
    const run_parts run = parts_at(keys, r, 0);
    const uint8_t *codes = run.codes + (size_t)first * run.row;
    const ptrdiff_t half = KVEDGE_BLOCK * (ptrdiff_t)run.row, width = (ptrdiff_t)run.row * (8 / bits);
    const char *blocks[2], *next[2];
    kvedge_tile rows = {.blocks = blocks, .num_tokens = count, .dim = dim, .scales = ones + RUN - count};
    if (in_place) {
      rows.token_stride = (ptrdiff_t)run.row, rows.levels = run_levels;
      for (int b = 0; b < 2; b++) blocks[b] = (const char *)codes + b * half;
      if (keys->next.blocks) {
        for (int b = 0; b < 2; b++) next[b] = keys->next.blocks[r] + keys->next.offset + b * half;
        rows.next = (kvedge_prefetch){.blocks = next, .in_order = keys->next.in_order};
      }
      prefetch_run(keys, r, RUN * run.row, bytes);
    } else {
      rows.token_stride = width;
      for (int b = 0; b < 2; b++) blocks[b] = (const char *)wide.rows + b * KVEDGE_BLOCK * width;
      widen_codes(codes, count * (int)run.row, bits, &wide, 0);
      prefetch_run(keys, r, 0, bytes);
    }
    read_steps(&run, dim, bits, &room);
    for (int i = 0, n; i < q->num_queries; i += n) {
      n = q->num_queries - i < most ? q->num_queries - i : most;
      const kvedge_query of_run = queries_of_run(q, i, n, cell, &room);
      float *to = scores + i * KVEDGE_TILE + t;
      for (int j = 0; j < n; j++)
        for (int k = 0; k < (count + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK; k++)
          to[j * KVEDGE_TILE + k] = room.constant[j];
      cell->scores(&of_run, &rows, to, 1);
      rows.next.blocks = NULL;
    }
  }
}

/* ---- Weighted sums ---- */

/* Steps and middles of a tile's values: a column for each group, 0 after the last token. */
typedef struct {
  float steps[RUN_GROUPS][COLUMN], middles[RUN_GROUPS][COLUMN];
} step_columns;

static inline void read_columns(const kvedge_tile *values, step_columns *to) {
  enum { MOST = RUN * RUN_GROUPS };
  const int groups = (values->dim + GROUP - 1) / GROUP;
  const float most = (float)(1 << (values->bits - 1));
  float steps[MOST], lows[MOST];
  int t = 0;
  for (int r = 0, first, count; t < values->num_tokens; t += count, r++) {
    count = tokens_of_run(values, r, t, &first);
    const run_parts run = parts_at(values, r, 1);
    floats_of_steps(run.steps + first * groups, count * groups, steps);
    floats_of_steps(run.lows + first * groups, count * groups, lows);
    for (int g = 0; g < groups; g++)
      for (int i = 0; i < count; i++) {
        to->steps[g][t + i] = steps[i * groups + g];
        to->middles[g][t + i] = lows[i * groups + g] + steps[i * groups + g] * most;
      }
  }
  for (; t % KVEDGE_BLOCK; t++)
    for (int g = 0; g < groups; g++) to->steps[g][t] = to->middles[g][t] = 0.0f;
}

/* sum_t p[t] * middle[t] for each query, added to n channels. */
static inline void add_middles(const kvedge_probabilities *p, const float *middles, int num_tokens, int n,
                               float *restrict acc, ptrdiff_t stride) {
  for (int i = 0; i < p->num_queries; i++, acc += stride) {
    const float *of_query = p->p + i * KVEDGE_TILE;
    float lane[RUN_LANES] = {0};
    for (int t = 0; t < num_tokens; t += RUN_LANES)
      for (int j = 0; j < RUN_LANES; j++) lane[j] += of_query[t + j] * middles[t + j];
    const float sum = sum_of_lanes(lane);
    for (int d = 0; d < n; d++) acc[d] += sum;
  }
}

static inline void weigh_runs(const run_kernels *kernels, const kvedge_probabilities *p, const kvedge_tile *values,
                              const kvedge_accumulators *to) {
  const int bits = values->bits;
  const int in_place = bits == 4 && kernels->of_codes.scores && values->first % KVEDGE_BLOCK == 0;
  const size_t bytes = run_bytes(values->dim, bits, 1);
  step_columns columns;
  wide_run wide;
  const char *blocks[KVEDGE_TILE_BLOCKS], *next[KVEDGE_TILE_BLOCKS];
  read_columns(values, &columns);
  for (int g = 0; g * GROUP < values->dim; g++) {
    const int left = values->dim - g * GROUP, n = left < GROUP ? left : GROUP;
    const int row_bytes = (int)codes_row(n, bits), width = row_bytes * 8 / bits;
    kvedge_accumulators of_group = {to->acc + g * GROUP, to->stride, to->rescale};
    kvedge_tile rows = {
        .blocks = blocks, .num_tokens = values->num_tokens, .dim = n, .scales = columns.steps[g], .factor = 1.0f};
    if (in_place) {
      rows.levels = run_levels, rows.offset = g * GROUP / 2;
      for (int b = 0; b * KVEDGE_BLOCK < values->num_tokens; b++) {
        const int row = values->first + b * KVEDGE_BLOCK;
        const run_parts run = parts_at(values, row / RUN, 1);
        const ptrdiff_t at = row % RUN * (ptrdiff_t)run.row;
        rows.token_stride = (ptrdiff_t)run.row;
        blocks[b] = (const char *)run.codes + at;
        if (values->next.blocks && g == 0) {
          next[b] = values->next.blocks[row / RUN] + values->next.offset + at;
          if (row % RUN == 0) prefetch_run(values, row / RUN, RUN * run.row, bytes);
        }
      }
      if (values->next.blocks)
        rows.next = (kvedge_prefetch){next, g * KVEDGE_BLOCK * (GROUP / 2), values->next.in_order};
    } else {
      rows.token_stride = width;
      for (int t = 0, r = 0, first, count; t < values->num_tokens; t += count, r++) {
        count = tokens_of_run(values, r, t, &first);
        const run_parts run = parts_at(values, r, 1);
        const uint8_t *codes = run.codes + (size_t)first * run.row + g * GROUP * bits / 8;
        for (int i = 0; i < count; i++, codes += run.row) widen_codes(codes, row_bytes, bits, &wide, (t + i) * row_bytes);
        if (g == 0) prefetch_run(values, r, 0, bytes);
      }
      for (int b = 0; b * KVEDGE_BLOCK < values->num_tokens; b++)
        blocks[b] = (const char *)wide.rows + b * KVEDGE_BLOCK * width;
    }
    (in_place ? &kernels->of_codes : &kernels->of_bytes)->weighted_sum(p, &rows, &of_group);
    add_middles(p, columns.middles[g], values->num_tokens, n, of_group.acc, to->stride);
  }
}

/* The cell of a path's table, from the cells that it has. */
#define KVEDGE_RUNS(isa, cell_of_bytes, cell_of_codes)                                                                 \
  static const run_kernels run_kernels_##isa = {cell_of_bytes, cell_of_codes};                                         \
  static void scores_of_runs_##isa(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {    \
    (void)accumulate; /* keys have one group */                                                                        \
    score_runs(&run_kernels_##isa, q, keys, scores);                                                                   \
  }                                                                                                                    \
  static void weighted_sum_of_runs_##isa(const kvedge_probabilities *p, const kvedge_tile *values,                     \
                                         const kvedge_accumulators *to) {                                              \
    weigh_runs(&run_kernels_##isa, p, values, to);                                                                     \
  }
#define KVEDGE_RUNS_CELL(isa) {.scores = scores_of_runs_##isa, .weighted_sum = weighted_sum_of_runs_##isa}
