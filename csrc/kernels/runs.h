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
 * Included by a path after its kernels and after run_sums.h or what it has for that. Plain C, which the path compiles for
 * itself.
 */
/* The cells of a path for rows of bytes, and of 4 bits (`scores` NULL: it has none) with the levels of a tile. */
typedef struct {
  kvedge_cell of_bytes, of_codes;
} run_kernels;

/* What codes of 4 bits stand for: less the middle one; raw, where a path takes the middle off: less 128. */
static const int8_t run_levels[2][16] = {
    {-8,   -7,   -6,   -5,   -4,   -3,   -2,   -1,   0,    1,    2,    3,    4,    5,    6,    7   },
    {-128, -127, -126, -125, -124, -123, -122, -121, -120, -119, -118, -117, -116, -115, -114, -113}
};

/* ---- Rows ---- */

typedef union {
  _Alignas(64) int8_t rows[RUN_CODES];
  uint16_t pairs[RUN_CODES / 2];
  uint32_t fours[RUN_CODES / 4];
} wide_run;

/* Codes of `bytes` bytes as run_levels has them, from `at` on, counted in what a byte becomes. (Signs are extended byte
 * by byte.) */
static inline void widen_codes(const uint8_t *codes, int bytes, int bits, int raw, wide_run *to, ptrdiff_t at) {
  if (bits == 4) {
    uint16_t *restrict out = to->pairs + at;
    for (int i = 0; i < bytes; i++) {
      const uint16_t code = (uint16_t)((codes[i] & 15u) | (codes[i] & 240u) << 4), lower = (uint16_t)(~code & 0x0808u);
      out[i] = (uint16_t)(raw ? code ^ 0x8080u : (code ^ 0x0808u) | lower << 1 | lower << 2 | lower << 3 | lower << 4);
    }
  } else if (bits == 2) {
    uint32_t *restrict out = to->fours + at;
    for (int i = 0; i < bytes; i++) {
      const uint32_t x = codes[i];
      const uint32_t code = (x & 3u) | (x & 12u) << 6 | (x & 48u) << 12 | (x & 192u) << 18;
      out[i] = raw ? code ^ 0x80808080u : (code ^ 0x02020202u) | ((~code & 0x02020202u) >> 1) * 0xfcu;
    }
  } else {
    int8_t *restrict out = to->rows + at;
    for (int i = 0; i < bytes; i++) out[i] = (int8_t)(codes[i] ^ 0x80);
  }
}

/* Prefetches bytes from..to-1 of the run that comes later with the r-th one. */
static inline void prefetch_run(const kvedge_tile *tile, int r, size_t from, size_t to) {
  if (!tile->next.blocks) return;
  const uintptr_t run = (uintptr_t)tile->next.blocks[r] + (uintptr_t)tile->next.offset;
  prefetch_bytes((const char *)(run + from), (ptrdiff_t)(to - from));
}

/* ---- Scores ---- */

static inline void score_tile_of_runs(const run_kernels *kernels, const kvedge_query *q, const kvedge_tile *keys,
                                      float *scores) {
  static const float ones[RUN + KVEDGE_BLOCK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const int dim = keys->dim, bits = keys->bits, in_place = bits == 4 && kernels->of_codes.scores;
  const kvedge_cell *cell = in_place ? &kernels->of_codes : &kernels->of_bytes;
  const int most = RUN_CHANNELS / kvedge_padded_channels(dim);
  const size_t bytes = bytes_of_run(dim, bits, 0);
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
      rows.token_stride = (ptrdiff_t)run.row, rows.levels = run_levels[KEYS_ARE_RAW];
      for (int b = 0; b < 2; b++) blocks[b] = (const char *)codes + b * half;
      if (keys->next.blocks) {
        for (int b = 0; b < 2; b++) next[b] = keys->next.blocks[r] + keys->next.offset + b * half;
        rows.next = (kvedge_prefetch){.blocks = next, .in_order = keys->next.in_order};
      }
      prefetch_run(keys, r, RUN * run.row, bytes);
    } else {
      rows.token_stride = width;
      for (int b = 0; b < 2; b++) blocks[b] = (const char *)wide.rows + b * KVEDGE_BLOCK * width;
      widen_codes(codes, count * (int)run.row, bits, KEYS_ARE_RAW, &wide, 0);
      prefetch_run(keys, r, 0, bytes);
    }
    read_steps(&run, dim, bits, &room);
    for (int i = 0, n; i < q->num_queries; i += n) {
      n = q->num_queries - i < most ? q->num_queries - i : most;
      const kvedge_query of_run = queries_of_run(q, i, n, cell, bits, &room);
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

static inline void weigh_tile_of_runs(const run_kernels *kernels, const kvedge_probabilities *p,
                                      const kvedge_tile *values, const kvedge_accumulators *to) {
  const int bits = values->bits;
  const int in_place = bits == 4 && kernels->of_codes.scores && values->first % KVEDGE_BLOCK == 0;
  const size_t bytes = bytes_of_run(values->dim, bits, 1);
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
      rows.levels = run_levels[0], rows.offset = g * GROUP / 2;
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
        for (int i = 0; i < count; i++, codes += run.row)
          widen_codes(codes, row_bytes, bits, 0, &wide, (t + i) * row_bytes);
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
    score_tile_of_runs(&run_kernels_##isa, q, keys, scores);                                                           \
  }                                                                                                                    \
  static void weighted_sum_of_runs_##isa(const kvedge_probabilities *p, const kvedge_tile *values,                     \
                                         const kvedge_accumulators *to) {                                              \
    weigh_tile_of_runs(&run_kernels_##isa, p, values, to);                                                             \
  }
#define KVEDGE_RUNS_CELL(isa) {.scores = scores_of_runs_##isa, .weighted_sum = weighted_sum_of_runs_##isa}
