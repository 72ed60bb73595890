/* int4 by the kernels of int8: levels are integers of 8 bits, so rows are widened to them, into
 * room that stays in the first-level cache, and served as rows of int8. Memory is read once, as
 * int4. Included by a path after its int8 kernels; the path first defines
 *
 *   widen_row(codes, n, out)    n levels of a row to out, which has room for 63 more
 */
#include "formats/int4_levels.h"

/* Tokens first..first+num_tokens-1 of a tile, whose rows have `width` channels, as a tile of int8. What is to be
 * prefetched with them is, a row's share with each row. */
static inline kvedge_tile widen(const kvedge_tile *from, int first, int num_tokens, int width, wide_rows *room) {
  const ptrdiff_t row_bytes = (width + 1) / 2;
  int8_t *out = room->rows;
  for (int t = 0; t < num_tokens; t += KVEDGE_BLOCK) { /* `first` is a block's */
    const int block = (first + t) / KVEDGE_BLOCK, rows = num_tokens - t < KVEDGE_BLOCK ? num_tokens - t : KVEDGE_BLOCK;
    const uint8_t *codes = (const uint8_t *)from->blocks[block] + from->offset;
    uintptr_t next = from->next.blocks ? (uintptr_t)from->next.blocks[block] + (uintptr_t)from->next.offset : 0;
    room->blocks[t / KVEDGE_BLOCK] = (const char *)out;
    for (int r = 0; r < rows; r++, codes += from->token_stride, out += width) {
      widen_row(codes, width, out);
      if (!next) continue;
      prefetch_bytes((const char *)next, row_bytes);
      next += (uintptr_t)row_bytes;
    }
  }
  return (kvedge_tile){.blocks = room->blocks,
                       .token_stride = width,
                       .num_tokens = num_tokens,
                       .dim = from->dim,
                       .scales = from->scales + first,
                       .scale_stride = from->scale_stride};
}

typedef void wide_scores(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate);
typedef void wide_sum(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to);

static inline void scores_of_wide(wide_scores *int8, const kvedge_query *q, const kvedge_tile *keys, int width,
                                  float *scores, int accumulate) {
  kvedge_query of_tile = *q;
  wide_rows *room = kvedge_take_scratch(&of_tile.scratch, sizeof *room);
  const int step = wide_step(width);
  for (int t = 0; t < keys->num_tokens; t += step) {
    const int left = keys->num_tokens - t;
    const kvedge_tile tile = widen(keys, t, left < step ? left : step, width, room);
    int8(&of_tile, &tile, scores + t, accumulate);
  }
}

static inline void weighted_sum_of_wide(wide_sum *int8, const kvedge_probabilities *p, const kvedge_tile *values,
                                        int width, const kvedge_accumulators *to) {
  static const float ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  kvedge_probabilities of_tile = *p;
  wide_rows *room = kvedge_take_scratch(&of_tile.scratch, sizeof *room);
  const int step = wide_step(width);
  for (int t = 0; t < values->num_tokens; t += step) {
    const int left = values->num_tokens - t;
    const kvedge_tile tile = widen(values, t, left < step ? left : step, width, room);
    kvedge_accumulators add = *to;
    of_tile.p = p->p + t;
    if (t > 0) add.rescale = ones;
    int8(&of_tile, &tile, &add);
  }
}

/* Cells over scores8 and sum8 of a path; KVEDGE_INT4_HEADS for those of a head batch. */
#define KVEDGE_INT4_FUNCTIONS(isa, scores8, sum8)                                                                      \
  static void scores_int4_##isa(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {       \
    scores_of_wide(scores8, q, keys, keys->dim, scores, accumulate);                                                   \
  }                                                                                                                    \
  static void weighted_sum_int4_##isa(const kvedge_probabilities *p, const kvedge_tile *values,                        \
                                      const kvedge_accumulators *to) {                                                 \
    weighted_sum_of_wide(sum8, p, values, values->dim, to);                                                            \
  }
#define KVEDGE_INT4_HEADS(isa, scores8, sum8)                                                                          \
  static void scores_of_heads_int4_##isa(const kvedge_query *q, const kvedge_tile *keys, float *scores,                \
                                         int accumulate) {                                                             \
    scores_of_wide(scores8, q, keys, KVEDGE_HEADS * keys->dim, scores, accumulate);                                    \
  }                                                                                                                    \
  static void weighted_sum_of_heads_int4_##isa(const kvedge_probabilities *p, const kvedge_tile *values,               \
                                               const kvedge_accumulators *to) {                                        \
    weighted_sum_of_wide(sum8, p, values, KVEDGE_HEADS * values->dim, to);                                             \
  }
