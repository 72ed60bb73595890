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

KVEDGE_INLINE int32x4_t multiply_add_low(int32x4_t sum, int16x8_t a, int16x8_t b) {
  return vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b));
}

KVEDGE_INLINE int32x4_t multiply_add_high(int32x4_t sum, int16x8_t a, int16x8_t b) {
#if defined(__aarch64__)
  return vmlal_high_s16(sum, a, b);
#else
  return vmlal_s16(sum, vget_high_s16(a), vget_high_s16(b));
#endif
}

/* ---- scores ---- */

enum {
  SCORE_QUERIES = 4, /* query rows served by one pass over a group's rows */
#if defined(__aarch64__)
  SCORE_ROWS = 4, /* rows at a time: 16 sums, 8 registers of keys, 2 of codes */
#else
  SCORE_ROWS = 2, /* 8 sums, 4 registers of keys, 2 of codes */
#endif
};

/* sum[i][j] += codes[i][0..15] . k[j], for SCORE_ROWS tokens j */
KVEDGE_INLINE void score_16_channels(const int16_t *codes, ptrdiff_t stride, const int8x16_t k[SCORE_ROWS],
                                     const int count, int32x4_t sum[SCORE_QUERIES][SCORE_ROWS]) {
  int16x8_t low[SCORE_ROWS], high[SCORE_ROWS];
  UNROLL
  for (int j = 0; j < SCORE_ROWS; j++) {
    low[j] = vmovl_s8(vget_low_s8(k[j]));
    high[j] = vmovl_s8(vget_high_s8(k[j]));
  }
  UNROLL
  for (int i = 0; i < count; i++) {
    int16x8_t code = vld1q_s16(codes + i * stride);
    UNROLL
    for (int j = 0; j < SCORE_ROWS; j++) {
      sum[i][j] = multiply_add_low(sum[i][j], code, low[j]);
      sum[i][j] = multiply_add_high(sum[i][j], code, low[j]);
    }
    code = vld1q_s16(codes + i * stride + 8);
    UNROLL
    for (int j = 0; j < SCORE_ROWS; j++) {
      sum[i][j] = multiply_add_low(sum[i][j], code, high[j]);
      sum[i][j] = multiply_add_high(sum[i][j], code, high[j]);
    }
  }
}

/* SCORE_ROWS rows against `count` queries; ends holds the channels after the last multiple of 16. */
KVEDGE_INLINE void dot_rows(const int16_t *codes, ptrdiff_t stride, int dim, const int8_t *rows,
                            const ptrdiff_t *offset, const int8_t (*ends)[16], const int count,
                            int32x4_t sum[SCORE_QUERIES][SCORE_ROWS]) {
  int8x16_t k[SCORE_ROWS];
  UNROLL
  for (int i = 0; i < count; i++) {
    UNROLL
    for (int j = 0; j < SCORE_ROWS; j++) sum[i][j] = vdupq_n_s32(0);
  }
  int d = 0;
  for (; d + 16 <= dim; d += 16) {
    UNROLL
    for (int j = 0; j < SCORE_ROWS; j++) k[j] = vld1q_s8(rows + offset[j] + d);
    score_16_channels(codes + d, stride, k, count, sum);
  }
  if (d < dim) { /* codes are padded with zeros */
    UNROLL
    for (int j = 0; j < SCORE_ROWS; j++) k[j] = vld1q_s8(ends[j]);
    score_16_channels(codes + d, stride, k, count, sum);
  }
}

#if !defined(__aarch64__)
/* {sum a, sum b}; see score_block */
KVEDGE_INLINE float32x2_t sum_both(int32x4_t a, int32x4_t b) {
  return vpadd_f32(vcvt_f32_s32(vadd_s32(vget_low_s32(a), vget_high_s32(a))),
                   vcvt_f32_s32(vadd_s32(vget_low_s32(b), vget_high_s32(b))));
}
#endif

/* Scores of a group of four tokens, of which num_stored are stored, for `count` queries from first on.
 * A lane of a sum holds a quarter of the channels. Halves are integers still, and joined as floats, since
 * from dim 518 on the whole may pass 2^31. */
KVEDGE_INLINE void score_block(const kvedge_query_i8 *q, int first, const int count, const int8_t *rows,
                               const ptrdiff_t offset[4], const int8_t ends[4][16], float32x4_t k_scale,
                               int num_stored, float *scores, int accumulate) {
  const int16_t *codes = q->codes + first * q->stride;
  int32x4_t sum[SCORE_QUERIES][SCORE_ROWS];
  float32x4_t dot[SCORE_QUERIES];
  dot_rows(codes, q->stride, q->dim, rows, offset, ends, count, sum);
#if defined(__aarch64__)
  UNROLL
  for (int i = 0; i < count; i++)
    dot[i] = vpaddq_f32(vcvtq_f32_s32(vpaddq_s32(sum[i][0], sum[i][1])),
                        vcvtq_f32_s32(vpaddq_s32(sum[i][2], sum[i][3])));
#else
  float32x2_t first_pair[SCORE_QUERIES];
  UNROLL
  for (int i = 0; i < count; i++) first_pair[i] = sum_both(sum[i][0], sum[i][1]);
  dot_rows(codes, q->stride, q->dim, rows, offset + 2, ends + 2, count, sum);
  UNROLL
  for (int i = 0; i < count; i++) dot[i] = vcombine_f32(first_pair[i], sum_both(sum[i][0], sum[i][1]));
#endif
  UNROLL
  for (int i = 0; i < count; i++)
    store_scores(dot[i], k_scale, q->scale[(first + i) * q->scale_stride], num_stored, accumulate,
                 scores + (first + i) * KVEDGE_TILE);
}

static void scores_i8_neon(const kvedge_query_i8 *q, const int8_t *k, ptrdiff_t token_stride,
                           int num_tokens, const float *k_scale, const void *prefetch,
                           float *scores, int accumulate) {
  for (int t = 0; t < num_tokens; t += 4) {
    const int8_t *rows = k + t * token_stride;
    int left = num_tokens - t, whole = q->dim / 16 * 16;
    int8_t ends[4][16];
    ptrdiff_t offset[4];
    row_offsets(left, token_stride, offset);
    if (prefetch) prefetch_rows((const char *)prefetch + t * token_stride, offset, q->dim);
    if (whole < q->dim) gather_ends_16(rows + whole, offset, q->dim - whole, ends);
    float32x4_t scale = left >= 4 ? vld1q_f32(k_scale + t) : load_part_f32(k_scale + t, left);
    for (int i = 0; i < q->num_queries; i += SCORE_QUERIES) {
#define BLOCK(count) score_block(q, i, count, rows, offset, ends, scale, left, scores + t, accumulate)
      switch (min_int(q->num_queries - i, SCORE_QUERIES)) {
        case 1: BLOCK(1); break;
        case 2: BLOCK(2); break;
        case 3: BLOCK(3); break;
        default: BLOCK(4);
      }
#undef BLOCK
    }
  }
}

/* ---- weighted sum ---- */

enum {
#if defined(__aarch64__)
  WEIGH_SUMS = 16, /* registers of sums: 1 query and 64 channels, 2 and 32, 3 or 4 and 16 */
#else
  WEIGH_SUMS = 8, /* 1 query and 32 channels, 2 and 16 */
#endif
  WEIGH_QUERIES = WEIGH_SUMS / 4,
};

/* The sums of 8 * eights channels for `count` query rows, held in registers over the tile. */
KVEDGE_INLINE void weigh_block(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int channels,
                               const int16_t *weights, const float *w_scale, const float *alpha,
                               const int count, const int eights, const char *prefetch, float *acc,
                               ptrdiff_t acc_stride) {
  int32x4_t sum[WEIGH_SUMS]; /* (count, 2 * eights) */
  UNROLL
  for (int s = 0; s < 2 * eights * count; s++) sum[s] = vdupq_n_s32(0);
  ptrdiff_t offset[4] = {0, token_stride, 2 * token_stride, 3 * token_stride};
  for (int t = 0; t < num_tokens; t += 4) {
    if (num_tokens - t < 4) row_offsets(num_tokens - t, token_stride, offset);
    int16x4_t weight[WEIGH_QUERIES]; /* of four tokens */
    UNROLL
    for (int i = 0; i < count; i++) weight[i] = vld1_s16(weights + i * KVEDGE_TILE + t);
    if (prefetch) {
      UNROLL
      for (int j = 0; j < 4; j++) __builtin_prefetch(prefetch + offset[j]);
      prefetch += 4 * token_stride;
    }
#define TOKEN(j)                                                             \
  UNROLL                                                                     \
  for (int e = 0; e < eights; e++) {                                         \
    int16x8_t codes = vmovl_s8(vld1_s8(v + offset[j] + 8 * e));              \
    UNROLL                                                                   \
    for (int i = 0; i < count; i++) {                                        \
      int32x4_t *s = sum + 2 * (eights * i + e);                             \
      s[0] = vmlal_lane_s16(s[0], vget_low_s16(codes), weight[i], j);        \
      s[1] = vmlal_lane_s16(s[1], vget_high_s16(codes), weight[i], j);       \
    }                                                                        \
  }
    TOKEN(0) TOKEN(1) TOKEN(2) TOKEN(3)
#undef TOKEN
    v += 4 * token_stride;
  }
  UNROLL
  for (int i = 0; i < count; i++)
    fold_sums(sum + 2 * eights * i, 2 * eights, alpha[i], w_scale[i], acc + i * acc_stride, channels);
}

KVEDGE_INLINE void weigh_rows(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                              const int count, const int16_t *weights, const float *w_scale,
                              const float *alpha, const char *prefetch, float *acc, ptrdiff_t acc_stride) {
  const int eights = WEIGH_SUMS / 2 / (count == 3 ? 4 : count);
  int d = 0;
#define BLOCK(rows, stride, channels, eights)                                                 \
  weigh_block(rows, stride, num_tokens, channels, weights, w_scale, alpha, count, eights,     \
              prefetch && d % 64 == 0 ? prefetch + d : NULL, acc + d, acc_stride)
  for (; d + 8 * eights <= dim; d += 8 * eights) BLOCK(v + d, token_stride, 8 * eights, eights);
  for (; d + 8 <= dim; d += 8) BLOCK(v + d, token_stride, 8, 1);
  if (d < dim) {
    int8_t ends[KVEDGE_TILE][8];
    gather_ends_8(v + d, token_stride, num_tokens, dim - d, ends);
    prefetch = NULL; /* would be asked for by the stride of ends */
    BLOCK(ends[0], 8, dim - d, 1);
  }
#undef BLOCK
}

static void weighted_sum_i8_neon(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                 int num_queries, const int16_t *weights, const float *w_scale,
                                 const float *alpha, const void *prefetch, float *acc,
                                 ptrdiff_t acc_stride) {
  for (int i = 0; i < num_queries; i += WEIGH_QUERIES, prefetch = NULL) {
#define ROWS(count)                                                                                    \
  weigh_rows(v, token_stride, num_tokens, dim, count, weights + i * KVEDGE_TILE, w_scale + i, alpha + i, \
             prefetch, acc + i * acc_stride, acc_stride)
    switch (min_int(num_queries - i, WEIGH_QUERIES)) {
      case 1: ROWS(1); break;
      case 2: ROWS(2); break;
#if defined(__aarch64__)
      case 3: ROWS(3); break;
      default: ROWS(4);
#endif
    }
#undef ROWS
  }
}

const kvedge_kernels kvedge_kernels_neon = KVEDGE_NEON_TABLE("neon", scores_i8_neon, weighted_sum_i8_neon);

#ifdef TARGET_BEGUN
KVEDGE_TARGET_END
#endif
#endif
