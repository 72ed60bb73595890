/* What multiplies floats, of both 256-bit paths: cells of rows of floats, of grids, and of runs where integers do not
 * suffice; rows, logits, states. It needs what AVX2 has.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/avx256/floats_cells.h"
#include "system/target.h"

KVEDGE_TARGET_BEGIN("avx2,fma,f16c")
#define KVEDGE_NAME(function) function##_avx256
#define KVEDGE_CELL

#include "kernels/avx256/common.h"
#include "kernels/avx256/floats.h"
#include "kernels/floats.h"
#include "kernels/avx256/grids.h"
#include "kernels/kivi_portable.h"

void scores_of_runs_avx256(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  scores_of_runs_portable(q, keys, scores, accumulate);
}

void weighted_sum_of_runs_avx256(const kvedge_probabilities *p, const kvedge_tile *values,
                                 const kvedge_accumulators *to) {
  weighted_sum_of_runs_portable(p, values, to);
}

#include "kernels/avx256/rows.h"

#define STATE_FLOATS 8
#define state_multiply_add(a, b, c) _mm256_fmadd_ps(a, b, c)
#include "kernels/states.h"

const kvedge_logit_kernels kvedge_logits_avx256 = KVEDGE_LOGIT_KERNELS;
const kvedge_state_kernels kvedge_states_avx256 = KVEDGE_STATE_KERNELS;

KVEDGE_TARGET_END
#endif
