/* What floats.c has. */
#ifndef KVEDGE_AVX256_FLOATS_CELLS_H
#define KVEDGE_AVX256_FLOATS_CELLS_H

#include "kernels/kernels.h"

#define KVEDGE_CELL_OF_FLOATS(name)                                                                                    \
  void scores_##name##_avx256(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate);          \
  void weighted_sum_##name##_avx256(const kvedge_probabilities *p, const kvedge_tile *values,                          \
                                    const kvedge_accumulators *to);
KVEDGE_CELL_OF_FLOATS(float32)
KVEDGE_CELL_OF_FLOATS(float16)
KVEDGE_CELL_OF_FLOATS(bfloat16)
KVEDGE_CELL_OF_FLOATS(fp8_e4m3)
KVEDGE_CELL_OF_FLOATS(fp8_e5m2)
KVEDGE_CELL_OF_FLOATS(of_grids)
KVEDGE_CELL_OF_FLOATS(of_runs)
#undef KVEDGE_CELL_OF_FLOATS

extern const kvedge_row_kernels kvedge_rows_avx256;
extern const kvedge_logit_kernels kvedge_logits_avx256;
extern const kvedge_state_kernels kvedge_states_avx256;

#endif
