/* Cells that multiply floats, of both 256-bit paths: rows of floats, grids, and runs where
 * integers do not suffice. They need what AVX2 has.
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

KVEDGE_TARGET_END
#endif
