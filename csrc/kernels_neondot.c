/* NEON with the dot product instructions of armv8.2: Raspberry Pi 5 (Cortex-A76) and later.
 *
 * HEAD
 */
#if defined(__aarch64__)
#include "target.h"

#if !defined(__clang__)
KVEDGE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#else
KVEDGE_TARGET_BEGIN("dotprod")
#if !defined(__ARM_FEATURE_DOTPROD)
#define __ARM_FEATURE_DOTPROD 1 /* before version 16, its arm_neon.h asks this and not the target */
#endif
#endif

#include "kernels_neon_common.h"

/* ---- scores ---- */

/* {sum a, sum b, sum c, sum d} */
KVEDGE_INLINE int32x4_t sum_each_i32(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

enum { SCORE_QUERIES = 2 }; /* 16 registers of sums: high and low bytes, 2 queries, 4 tokens */

typedef struct {
  int32x4_t hi[SCORE_QUERIES][4]; /* (count, 4 tokens) */
  int32x4_t lo[SCORE_QUERIES][4];
} score_sums;

KVEDGE_INLINE void score_16_channels(const int8_t *hi, const int8_t *lo, ptrdiff_t stride,
                                     const int8x16_t k[4], const int count, score_sums *sums) {
  UNROLL
  for (int i = 0; i < count; i++) {
    int8x16_t q_hi = vld1q_s8(hi + i * stride), q_lo = vld1q_s8(lo + i * stride);
    UNROLL
    for (int j = 0; j < 4; j++) {
      sums->hi[i][j] = vdotq_s32(sums->hi[i][j], k[j], q_hi);
      sums->lo[i][j] = vdotq_s32(sums->lo[i][j], k[j], q_lo);
    }
  }
}

/* Scores of a group of four tokens, of which num_stored are stored, for `count` queries from first on. */
KVEDGE_INLINE void score_block(const kvedge_query_i8 *q, int first, const int count, const int8_t *rows,
                               const ptrdiff_t offset[4], const int8_t ends[4][16], float32x4_t k_scale,
                               int num_stored, float *scores, int accumulate) {
  const int8_t *hi = q->hi + first * q->stride, *lo = q->lo + first * q->stride;
  int8x16_t k[4];
  score_sums sums;
  UNROLL
  for (int i = 0; i < count; i++) {
    UNROLL
    for (int j = 0; j < 4; j++) sums.hi[i][j] = sums.lo[i][j] = vdupq_n_s32(0);
  }
  int d = 0;
  for (; d + 16 <= q->dim; d += 16) {
    UNROLL
    for (int j = 0; j < 4; j++) k[j] = vld1q_s8(rows + offset[j] + d);
    score_16_channels(hi + d, lo + d, q->stride, k, count, &sums);
  }
  if (d < q->dim) { /* codes are padded with zeros */
    UNROLL
    for (int j = 0; j < 4; j++) k[j] = vld1q_s8(ends[j]);
    score_16_channels(hi + d, lo + d, q->stride, k, count, &sums);
  }
  UNROLL
  for (int i = 0; i < count; i++) {
    /* |sum| <= 128 * 127 * 1024 < 2^24: exact in float, where 256 * hi + lo may pass 2^31 as an integer */
    float32x4_t dot_hi = vcvtq_f32_s32(sum_each_i32(sums.hi[i][0], sums.hi[i][1], sums.hi[i][2], sums.hi[i][3]));
    float32x4_t dot_lo = vcvtq_f32_s32(sum_each_i32(sums.lo[i][0], sums.lo[i][1], sums.lo[i][2], sums.lo[i][3]));
    store_scores(vfmaq_n_f32(dot_lo, dot_hi, 256.0f), k_scale, q->scale[(first + i) * q->scale_stride],
                 num_stored, accumulate, scores + (first + i) * KVEDGE_TILE);
  }
}

static void scores_i8_neondot(const kvedge_query_i8 *q, const int8_t *k, ptrdiff_t token_stride,
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
    int i = 0;
    for (; i + 2 <= q->num_queries; i += 2)
      score_block(q, i, 2, rows, offset, ends, scale, left, scores + t, accumulate);
    if (i < q->num_queries)
      score_block(q, i, 1, rows, offset, ends, scale, left, scores + t, accumulate);
  }
}

/* ---- weighted sum ---- */

/* Weights are negated before they are split: -w is in -32767..0, so that -w = 256 * hi + lo with hi in
 * -128..0 and lo in -128..127. For w itself hi would reach 128, which is no signed byte. */
typedef struct {
  int8_t hi[KVEDGE_STACK][KVEDGE_TILE];
  int8_t lo[KVEDGE_STACK][KVEDGE_TILE];
} split_weights;

static void split_negated(const int16_t *weights, int num_queries, split_weights *split) {
  for (int i = 0; i < num_queries; i++, weights += KVEDGE_TILE)
    for (int t = 0; t < KVEDGE_TILE; t += 16) {
      int16x8_t a = vnegq_s16(vld1q_s16(weights + t)), b = vnegq_s16(vld1q_s16(weights + t + 8));
      vst1q_s8(split->hi[i] + t, vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)));
      vst1q_s8(split->lo[i] + t, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
    }
}

enum { WEIGH_QUERIES = 4, WEIGH_SUMS = 8 }; /* registers of sums: 8 of high and 8 of low bytes */

/* Four tokens' codes, 8 or 16 channels, as registers of 4 channels by 4 tokens. */
KVEDGE_INLINE void interleave_tokens(const int8x16_t row[4], const int vectors, int8x16_t out[4]) {
  int16x8_t tokens_01 = vreinterpretq_s16_s8(vzip1q_s8(row[0], row[1]));
  int16x8_t tokens_23 = vreinterpretq_s16_s8(vzip1q_s8(row[2], row[3]));
  out[0] = vreinterpretq_s8_s16(vzip1q_s16(tokens_01, tokens_23));
  out[1] = vreinterpretq_s8_s16(vzip2q_s16(tokens_01, tokens_23));
  if (vectors == 4) {
    tokens_01 = vreinterpretq_s16_s8(vzip2q_s8(row[0], row[1]));
    tokens_23 = vreinterpretq_s16_s8(vzip2q_s8(row[2], row[3]));
    out[2] = vreinterpretq_s8_s16(vzip1q_s16(tokens_01, tokens_23));
    out[3] = vreinterpretq_s8_s16(vzip2q_s16(tokens_01, tokens_23));
  }
}

/* The sums of 4 * vectors channels, vectors 2 or 4, for `count` query rows from first on, held in
 * registers over the tile. */
KVEDGE_INLINE void weigh_block(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int channels,
                               const split_weights *weights, int first, const float *w_scale,
                               const float *alpha, const int count, const int vectors,
                               const char *prefetch, float *acc, ptrdiff_t acc_stride) {
  int32x4_t hi[WEIGH_SUMS], lo[WEIGH_SUMS]; /* (count, vectors) */
  UNROLL
  for (int s = 0; s < count * vectors; s++) hi[s] = lo[s] = vdupq_n_s32(0);
  ptrdiff_t offset[4] = {0, token_stride, 2 * token_stride, 3 * token_stride};
  for (int t = 0; t < num_tokens; t += 16) {
    int8x16_t w_hi[WEIGH_QUERIES], w_lo[WEIGH_QUERIES]; /* of 16 tokens */
    UNROLL
    for (int i = 0; i < count; i++) {
      w_hi[i] = vld1q_s8(weights->hi[first + i] + t);
      w_lo[i] = vld1q_s8(weights->lo[first + i] + t);
    }
#define FOUR_TOKENS(group)                                                         \
  {                                                                                \
    int left = num_tokens - t - 4 * group;                                         \
    if (left <= 0) break;                                                          \
    if (left < 4) row_offsets(left, token_stride, offset);                         \
    if (prefetch) {                                                                \
      UNROLL                                                                       \
      for (int j = 0; j < 4; j++) __builtin_prefetch(prefetch + offset[j]);        \
      prefetch += 4 * token_stride;                                                \
    }                                                                              \
    int8x16_t row[4], codes[4];                                                    \
    UNROLL                                                                         \
    for (int j = 0; j < 4; j++)                                                    \
      row[j] = vectors == 4 ? vld1q_s8(v + offset[j])                              \
                            : vcombine_s8(vld1_s8(v + offset[j]), vdup_n_s8(0));   \
    interleave_tokens(row, vectors, codes);                                        \
    UNROLL                                                                         \
    for (int i = 0; i < count; i++) {                                              \
      UNROLL                                                                       \
      for (int c = 0; c < vectors; c++) {                                          \
        int32x4_t *sum_hi = hi + vectors * i + c, *sum_lo = lo + vectors * i + c;  \
        *sum_hi = vdotq_laneq_s32(*sum_hi, codes[c], w_hi[i], group);              \
        *sum_lo = vdotq_laneq_s32(*sum_lo, codes[c], w_lo[i], group);              \
      }                                                                            \
    }                                                                              \
    v += 4 * token_stride;                                                         \
  }
    FOUR_TOKENS(0) FOUR_TOKENS(1) FOUR_TOKENS(2) FOUR_TOKENS(3)
#undef FOUR_TOKENS
  }
  UNROLL
  for (int s = 0; s < count * vectors; s++) hi[s] = vaddq_s32(vshlq_n_s32(hi[s], 8), lo[s]);
  UNROLL
  for (int i = 0; i < count; i++)
    fold_sums(hi + vectors * i, vectors, alpha[i], -w_scale[i], acc + i * acc_stride, channels);
}

KVEDGE_INLINE void weigh_rows(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                              const int count, const split_weights *weights, int first,
                              const float *w_scale, const float *alpha, const char *prefetch,
                              float *acc, ptrdiff_t acc_stride) {
  int d = 0;
#define BLOCK(rows, stride, channels, vectors)                                                    \
  weigh_block(rows, stride, num_tokens, channels, weights, first, w_scale, alpha, count, vectors, \
              prefetch && d % 64 == 0 ? prefetch + d : NULL, acc + d, acc_stride)
  if (count <= 2)
    for (; d + 16 <= dim; d += 16) BLOCK(v + d, token_stride, 16, 4);
  for (; d + 8 <= dim; d += 8) BLOCK(v + d, token_stride, 8, 2);
  if (d < dim) {
    int8_t ends[KVEDGE_TILE][8];
    gather_ends_8(v + d, token_stride, num_tokens, dim - d, ends);
    prefetch = NULL; /* would be asked for by the stride of ends */
    BLOCK(ends[0], 8, dim - d, 2);
  }
#undef BLOCK
}

static void weighted_sum_i8_neondot(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                    int num_queries, const int16_t *weights, const float *w_scale,
                                    const float *alpha, const void *prefetch, float *acc,
                                    ptrdiff_t acc_stride) {
  split_weights split;
  split_negated(weights, num_queries, &split);
  for (int i = 0; i < num_queries; i += WEIGH_QUERIES, prefetch = NULL) {
#define ROWS(count)                                                                         \
  weigh_rows(v, token_stride, num_tokens, dim, count, &split, i, w_scale + i, alpha + i,    \
             prefetch, acc + i * acc_stride, acc_stride)
    switch (min_int(num_queries - i, WEIGH_QUERIES)) {
      case 1: ROWS(1); break;
      case 2: ROWS(2); break;
      case 3: ROWS(3); break;
      default: ROWS(4);
    }
#undef ROWS
  }
}

const kvedge_kernels kvedge_kernels_neondot =
    KVEDGE_NEON_TABLE("neondot", scores_i8_neondot, weighted_sum_i8_neondot);

KVEDGE_TARGET_END
#endif
