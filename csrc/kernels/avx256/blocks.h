/* Cells of ggml's blocks. Part of avx2.c and avxvnni.c, after groups.h and int4.h. */
#define KVEDGE_INT8_CELL                                                                                               \
  {.encode_query = KVEDGE_NAME(encode_query),                                                                          \
   .scores = KVEDGE_NAME(scores_int8),                                                                                 \
   .weighted_sum = KVEDGE_NAME(weighted_sum_int8),                                                                     \
   .scores_of_groups = KVEDGE_NAME(scores_of_groups),                                                                  \
   .weighted_sum_of_groups = KVEDGE_NAME(weighted_sum_of_groups)}

#include "kernels/blocks.h"
static const kvedge_cell int8_cell = KVEDGE_INT8_CELL;

static void KVEDGE_NAME(scores_of_blocks)(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  scores_of_blocks(&int8_cell, q, keys, scores);
}

static void KVEDGE_NAME(scores_of_block)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  (void)accumulate; /* there is none before */
  KVEDGE_NAME(scores_of_blocks)(q, keys, scores);
}

static void KVEDGE_NAME(weighted_sum_of_blocks)(const kvedge_probabilities *p, const kvedge_tile *values,
                                                const kvedge_accumulators *to) {
  weighted_sum_of_blocks(&int8_cell, p, values, to);
}
