/* Grids (formats/grids.c) by the kernels of float32: codes become levels in room that stays in
 * the first-level cache, once for all queries of a call; scales multiply scores and
 * probabilities. Memory is read once, as codes. Included by a path after its kernels of float32;
 * the path first defines
 *
 *   GRID_LOAD       bytes that it loads at once, at least 8: rows that it is given have as many or more
 *   GRID_CHANNELS   channels that it decodes at once, at least 8
 *   decode_in_registers(from, row_bytes, out, stride)   decode_rows(), or 0: the path has nothing for so many bits
 */
#include "formats/format.h"

enum {
  GRID_FLOATS = 4096, /* of the rows that are decoded at a time: half of a first-level cache of 32 KB */
  GRID_ROOM = KVEDGE_BLOCK * 1024,
};

typedef struct {
  _Alignas(64) float rows[GRID_ROOM];
  const char *blocks[KVEDGE_TILE_BLOCKS];
} grid_room;

static inline int grid_stride(int dim) { return (dim + GRID_CHANNELS - 1) / GRID_CHANNELS * GRID_CHANNELS; }

/* Tokens that are decoded at a time. */
static inline int grid_step(int dim) {
  const int step = GRID_FLOATS / grid_stride(dim) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  return step < KVEDGE_BLOCK ? KVEDGE_BLOCK : step < KVEDGE_TILE ? step : KVEDGE_TILE;
}

/* Levels of a tile's rows, `stride` floats apart. What is written past the last channel, to the
 * next multiple of GRID_CHANNELS, is any number. In plain C: the last codes of a row are loaded
 * with those before them, so that no byte past it is read. */
static __attribute__((noinline)) void KVEDGE_NAME(decode_rows)(const kvedge_tile *from, int row_bytes, float *out,
                                                               ptrdiff_t stride) {
  if (decode_in_registers(from, row_bytes, out, stride)) return;
  const int bits = from->bits, last = row_bytes - 8;
  const float *levels = kvedge_grid_levels[bits];
  const size_t mask = ((size_t)1 << bits) - 1;
  for (int t = 0; t < from->num_tokens; t++, out += stride) {
    const uint8_t *row = (const uint8_t *)kvedge_tile_row(from, t);
    prefetch_lines_of(from, t / KVEDGE_BLOCK, row_bytes, t % KVEDGE_BLOCK, KVEDGE_BLOCK);
    if (bits == 8) {
      for (int d = 0; d < from->dim; d++) {
        size_t code = row[d];
        __asm__("" : "+r"(code)); /* else compilers make vectors of codes, and take them apart again */
        out[d] = levels[code];
      }
      continue;
    }
    for (int d = 0, begin = 0; d < from->dim; d += 8, begin += bits) {
      const int load = begin < last ? begin : last;
      const uint8_t *at = row + load;
      uint64_t w = 0;
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) w |= (uint64_t)at[i] << 8 * i;
      w >>= 8 * (begin - load);
      for (int i = 0; i < 8; i++, w >>= bits) out[d + i] = levels[w & mask];
    }
  }
}

/* Rows that are shorter than GRID_LOAD, in room of their own. */
static __attribute__((noinline)) void KVEDGE_NAME(decode_short_rows)(const kvedge_tile *from, int row_bytes, float *out,
                                                                     ptrdiff_t stride) {
  char rows[KVEDGE_TILE * GRID_LOAD];
  const char *blocks[KVEDGE_TILE_BLOCKS];
  kvedge_tile tile = *from;
  memset(rows, 0, sizeof rows);
  for (int t = 0; t < from->num_tokens; t++) memcpy(rows + t * GRID_LOAD, kvedge_tile_row(from, t), (size_t)row_bytes);
  for (int b = 0; b < KVEDGE_TILE_BLOCKS; b++) blocks[b] = rows + b * KVEDGE_BLOCK * GRID_LOAD;
  tile.blocks = blocks, tile.offset = 0, tile.token_stride = GRID_LOAD;
  KVEDGE_NAME(decode_rows)(&tile, GRID_LOAD, out, stride);
}

/* Levels of up to `step` tokens of a tile, from `first` on, as a tile of float32. What is to be
 * prefetched with them is. */
static inline kvedge_tile decode_tile(const kvedge_tile *from, int first, int step, grid_room *room) {
  const int row_bytes = (int)kvedge_packed_bytes(from->dim, from->bits), block = first / KVEDGE_BLOCK;
  const int left = from->num_tokens - first, num_tokens = left < step ? left : step;
  const ptrdiff_t stride = grid_stride(from->dim);
  kvedge_tile rows_of_tile = *from;
  rows_of_tile.blocks += block, rows_of_tile.num_tokens = num_tokens;
  if (rows_of_tile.next.blocks) rows_of_tile.next.blocks += block;
  for (int b = 0; b * KVEDGE_BLOCK < num_tokens; b++)
    room->blocks[b] = (const char *)(room->rows + b * KVEDGE_BLOCK * stride);
  if (row_bytes < GRID_LOAD) KVEDGE_NAME(decode_short_rows)(&rows_of_tile, row_bytes, room->rows, stride);
  else KVEDGE_NAME(decode_rows)(&rows_of_tile, row_bytes, room->rows, stride);
  return (kvedge_tile){.blocks = room->blocks,
                       .token_stride = stride * (ptrdiff_t)sizeof(float),
                       .num_tokens = num_tokens,
                       .dim = from->dim,
                       .factor = 1.0f};
}

KVEDGE_CELL void KVEDGE_NAME(scores_of_grids)(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                              int accumulate) {
  (void)accumulate; /* keys have one group */
  kvedge_query of_step = *q;
  grid_room *room = kvedge_take_scratch(&of_step.scratch, sizeof *room);
  const int step = grid_step(keys->dim), padded = (keys->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  for (int t = 0; t < keys->num_tokens; t += step) {
    const kvedge_tile tile = decode_tile(keys, t, step, room);
    KVEDGE_NAME(scores_float32)(&of_step, &tile, scores + t, 0);
  }
  for (int i = 0; i < q->num_queries; i++)
    for (int t = 0; t < padded; t++) scores[i * KVEDGE_TILE + t] *= keys->scales[t];
}

KVEDGE_CELL void KVEDGE_NAME(weighted_sum_of_grids)(const kvedge_probabilities *p, const kvedge_tile *values,
                                                    const kvedge_accumulators *to) {
  static const float ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  kvedge_probabilities of_step = *p;
  grid_room *room = kvedge_take_scratch(&of_step.scratch, sizeof *room);
  float *weights = kvedge_take_scratch(&of_step.scratch, KVEDGE_QUERY_ROWS * KVEDGE_TILE * sizeof *weights);
  const int step = grid_step(values->dim),
            padded = (values->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  for (int i = 0; i < p->num_queries; i++)
    for (int t = 0; t < padded; t++) weights[i * KVEDGE_TILE + t] = p->p[i * KVEDGE_TILE + t] * values->scales[t];
  kvedge_accumulators add = *to;
  for (int t = 0; t < values->num_tokens; t += step, add.rescale = ones) {
    const kvedge_tile tile = decode_tile(values, t, step, room);
    of_step.p = weights + t;
    KVEDGE_NAME(weighted_sum_float32)(&of_step, &tile, &add);
  }
}
#define KVEDGE_GRIDS_CELL {.scores = KVEDGE_NAME(scores_of_grids), .weighted_sum = KVEDGE_NAME(weighted_sum_of_grids)}
