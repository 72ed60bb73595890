/* Grids (formats/grids.c) by the kernels of float32: codes become levels times the scale of their row, in room that stays in
 * the first-level cache, once for all queries of a call. Memory is read once, as codes. Included by a path after its kernels
 * of float32; the path first defines
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

/* Rows of a tile with scales, `stride` floats apart. What is written past the last channel, to the next multiple of
 * GRID_CHANNELS, is any number. In plain C: the last codes of a row are loaded with those before them, so that no byte past
 * it is read. */
static __attribute__((noinline)) void KVEDGE_NAME(decode_rows)(const kvedge_tile *from, int row_bytes, float *out,
                                                               ptrdiff_t stride) {
  if (decode_in_registers(from, row_bytes, out, stride)) return;
  const int bits = from->bits, last = row_bytes - 8;
  const float *levels = kvedge_grid_levels[bits];
  const unsigned mask = (1u << bits) - 1;
  for (int t = 0; t < from->num_tokens; t++, out += stride) {
    const uint8_t *row = (const uint8_t *)kvedge_tile_row(from, t);
    const float scale = from->scales[t];
    for (int d = 0, begin = 0; d < from->dim; d += 8, begin += bits) {
      const int load = begin < last ? begin : last;
      uint64_t w = 0;
      for (int i = 0; i < 8; i++) w |= (uint64_t)row[load + i] << 8 * i;
      w >>= 8 * (begin - load);
      const float x[8] = {levels[w & mask],
                          levels[w >> bits & mask],
                          levels[w >> 2 * bits & mask],
                          levels[w >> 3 * bits & mask],
                          levels[w >> 4 * bits & mask],
                          levels[w >> 5 * bits & mask],
                          levels[w >> 6 * bits & mask],
                          levels[w >> 7 * bits & mask]};
      for (int i = 0; i < 8; i++) out[d + i] = x[i] * scale;
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
  for (int t = 0; t < from->num_tokens; t++)
    memcpy(rows + t * GRID_LOAD, kvedge_tile_row(from, t), (size_t)row_bytes);
  for (int b = 0; b < KVEDGE_TILE_BLOCKS; b++) blocks[b] = rows + b * KVEDGE_BLOCK * GRID_LOAD;
  tile.blocks = blocks, tile.offset = 0, tile.token_stride = GRID_LOAD;
  KVEDGE_NAME(decode_rows)(&tile, GRID_LOAD, out, stride);
}

/* Tokens first..first+num_tokens-1 of a tile as a tile of float32. What is to be prefetched with them is. */
static inline kvedge_tile decode_tile(const kvedge_tile *from, int first, int num_tokens, grid_room *room) {
  const int row_bytes = (from->dim * from->bits + 7) / 8, block = first / KVEDGE_BLOCK;
  const ptrdiff_t stride = grid_stride(from->dim);
  kvedge_tile part = *from;
  part.blocks += block, part.scales += first, part.num_tokens = num_tokens;
  for (int b = 0; b * KVEDGE_BLOCK < num_tokens; b++) {
    room->blocks[b] = (const char *)(room->rows + b * KVEDGE_BLOCK * stride);
    if (from->next.blocks)
      prefetch_bytes((const char *)((uintptr_t)from->next.blocks[block + b] + (uintptr_t)from->next.offset),
                     KVEDGE_BLOCK * (ptrdiff_t)row_bytes);
  }
  if (row_bytes < GRID_LOAD) KVEDGE_NAME(decode_short_rows)(&part, row_bytes, room->rows, stride);
  else KVEDGE_NAME(decode_rows)(&part, row_bytes, room->rows, stride);
  return (kvedge_tile){.blocks = room->blocks,
                       .token_stride = stride * (ptrdiff_t)sizeof(float),
                       .num_tokens = num_tokens,
                       .dim = from->dim,
                       .factor = 1.0f};
}

static void KVEDGE_NAME(scores_of_grids)(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                         int accumulate) {
  grid_room room;
  const int step = grid_step(keys->dim);
  for (int t = 0; t < keys->num_tokens; t += step) {
    const int left = keys->num_tokens - t;
    const kvedge_tile tile = decode_tile(keys, t, left < step ? left : step, &room);
    KVEDGE_NAME(scores_float32)(q, &tile, scores + t, accumulate);
  }
}

static void KVEDGE_NAME(weighted_sum_of_grids)(const kvedge_probabilities *p, const kvedge_tile *values,
                                               const kvedge_accumulators *to) {
  static const float ones[KVEDGE_STACK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  grid_room room;
  const int step = grid_step(values->dim);
  kvedge_probabilities of_step = *p;
  kvedge_accumulators add = *to;
  for (int t = 0; t < values->num_tokens; t += step, of_step.p += step, add.rescale = ones) {
    const int left = values->num_tokens - t;
    const kvedge_tile tile = decode_tile(values, t, left < step ? left : step, &room);
    KVEDGE_NAME(weighted_sum_float32)(&of_step, &tile, &add);
  }
}
#define KVEDGE_GRIDS_CELL {.scores = KVEDGE_NAME(scores_of_grids), .weighted_sum = KVEDGE_NAME(weighted_sum_of_grids)}
