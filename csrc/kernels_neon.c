/* NEON of the armv8-a baseline: Raspberry Pi 3 and 4 (Cortex-A53, A72); compiles for armv7 NEON too.
 *
 * HEAD
 */
#if defined(__aarch64__) || defined(__ARM_NEON) || (defined(__arm__) && !defined(__clang__))
#include "target.h"

#if defined(__arm__) && !defined(__ARM_NEON)
KVEDGE_TARGET_BEGIN("fpu=neon")
#define TARGET_BEGUN
#endif

#include "kernels_neon_common.h"

static void scores_i8_neon(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                           int num_tokens, const float *k_scale, const void *prefetch, float *scores,
                           int accumulate) {
  tile_rows rows = {(const char *)k, token_stride, num_tokens, 1.0f};
  score_rows(q, rows, sizeof(int8_t), k_scale, prefetch, scores, accumulate);
}

static void weighted_sum_i8_neon(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                 int num_queries, const float *p, const float *v_scale,
                                 const float *alpha, const void *prefetch, float *acc,
                                 ptrdiff_t acc_stride) {
  tile_rows rows = {(const char *)v, token_stride, num_tokens, 1.0f};
  for (int i = 0; i < num_queries; i += WEIGH_QUERIES, prefetch = NULL) {
    int count = min_int(num_queries - i, WEIGH_QUERIES);
    float weights[WEIGH_QUERIES * KVEDGE_TILE];
    for (int j = 0; j < count; j++)
      for (int t = 0; t < num_tokens; t += 4) /* p and v_scale are 0 from num_tokens to KVEDGE_TILE */
        vst1q_f32(weights + j * KVEDGE_TILE + t,
                  vmulq_f32(vld1q_f32(p + (i + j) * KVEDGE_TILE + t), vld1q_f32(v_scale + t)));
    weigh_queries(rows, sizeof(int8_t), dim, count, weights, alpha + i, prefetch, acc + i * acc_stride,
                  acc_stride);
  }
}

const kvedge_kernels kvedge_kernels_neon =
    KVEDGE_NEON_TABLE("neon", NULL, scores_i8_neon, weighted_sum_i8_neon);

#ifdef TARGET_BEGUN
KVEDGE_TARGET_END
#endif
#endif
