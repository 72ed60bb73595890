/* NEON with the dot product instructions of armv8.2: Raspberry Pi 5 (Cortex-A76) and later.
 *
 *   instruction               what for                              Cortex-A76
 *   sdot v.4s, v.16b, v.4b[i] 4 tokens (channels) x 4 products      3 (1 from sum to sum), V01
 *   trn1, trn2, zip1, zip2    transposing                           2, V01
 *   tbl v.16b                 bytes of codes into digits            2, V01
 *
 * A query, and the quantized probabilities of a tile, are integers of 24 bits in three planes (kernels.h),
 * 16 bytes for four elements. So one register holds all planes of four elements, and sdot picks a plane by
 * its lane number. With two planes (16 bits) the high two are multiplied, with one (8 bits) the high one; scores have
 * their own order for that (dots.h).
 *
 * Keys. Four tokens are transposed, 4 channels (one dword) at a time: lane t of a column holds
 * channels 4j..4j+3 of token t, and token t's score grows in lane t: no sums across lanes. 8
 * shuffles for 64 bytes of keys, once for up to 4 queries; 12 sdot (8 with two planes) for each query.
 *
 * Values. Rows of four tokens are interleaved byte by byte, so that a lane holds one channel of the
 * four: 8 shuffles for 64 bytes, 12 sdot (8) for each query, sums in registers over the whole tile.
 *
 * At two a cycle, 64 bytes take 10 cycles (8) with one query, 28 (20) with four. The same by floats,
 * as in neon.c, takes twice that and more.
 */
#include "kernels/kernels.h"

#if defined(__aarch64__)
#include "system/target.h"

#if !defined(__clang__)
KVEDGE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#else
KVEDGE_TARGET_BEGIN("dotprod")
#if !defined(__ARM_FEATURE_DOTPROD)
#define __ARM_FEATURE_DOTPROD 1 /* before version 16, its arm_neon.h asks this and not the target */
#endif
#endif

#include "kernels/neon/common.h"
#include "kernels/neon/codes.h"
#include "kernels/neon/floats.h"
#include "kernels/neon/int4.h"
#include "kernels/neon/dots.h"

/* ---- scores ---- */

static void encode_query_neondot(const float *x, int dim, float factor, float largest, int planes, int8_t *codes,
                                 float *scale, int32_t *offsets) {
  float inverse = divide_or_0(LARGEST_CODE, largest, largest);
  *scale = divide_or_0(largest, LARGEST_CODE, largest);
  vst1q_s32(offsets, vdupq_n_s32(0)); /* keys are signed here */
  if (planes == 1) {
    encode_query_bytes(x, dim, factor, inverse, codes);
    return;
  }
  for (int d = 0; d < kvedge_padded_channels(dim); d += 4) {
    const float32x4_t four = vmulq_n_f32(vmulq_n_f32(load_query_f32(x, dim, d), factor), inverse);
    vst1q_s8(codes + 4 * d, split_digits(round_to_i32(four)));
  }
}

/* Rows of 4 dwords become columns: lane t of out[c] is dword c of row t. */
KVEDGE_INLINE void transpose_4x4(const int8x16_t row[4], int8x16_t out[4]) {
  int32x4_t a = vreinterpretq_s32_s8(row[0]), b = vreinterpretq_s32_s8(row[1]);
  int32x4_t c = vreinterpretq_s32_s8(row[2]), d = vreinterpretq_s32_s8(row[3]);
  int64x2_t even_ab = vreinterpretq_s64_s32(vtrn1q_s32(a, b));
  int64x2_t even_cd = vreinterpretq_s64_s32(vtrn1q_s32(c, d));
  int64x2_t odd_ab = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
  int64x2_t odd_cd = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
  out[0] = vreinterpretq_s8_s64(vtrn1q_s64(even_ab, even_cd));
  out[1] = vreinterpretq_s8_s64(vtrn1q_s64(odd_ab, odd_cd));
  out[2] = vreinterpretq_s8_s64(vtrn2q_s64(even_ab, even_cd));
  out[3] = vreinterpretq_s8_s64(vtrn2q_s64(odd_ab, odd_cd));
}

/* sum[3 * i + plane] */
KVEDGE_INLINE void score_16_dots(const int8_t *codes, ptrdiff_t stride, const int8_t *rows, const ptrdiff_t offset[4],
                                 const int count, const int planes, int32x4_t sum[SCORE_SUMS]) {
  int8x16_t k[4], column[4];
  UNROLLED (j, 4) k[j] = vld1q_s8(rows + offset[j]);
  transpose_4x4(k, column);
  UNROLLED (c, 4)
    UNROLLED (i, count) dot_digits(sum + 3 * i, column[c], vld1q_s8(codes + i * stride + 16 * c), planes);
}

KVEDGE_INLINE float32x4_t join_dots(const int32x4_t sum[SCORE_SUMS], const int i, const int planes) {
  return join_digits(sum + 3 * i, planes);
}

static void scores_int8_neondot(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  if (q->planes == 1) {
    scores_in_bytes(q, keys, scores, accumulate);
    return;
  }
  const token_stretches stretches = stretches_of(keys);
#define SCORE(count)                                                                                                   \
  if (q->planes == 3)                                                                                                  \
    score_stretches(q, i, count, 3, 64, score_16_dots, join_dots, keys, &stretches, scores, accumulate);               \
  else score_stretches(q, i, count, 2, 64, score_16_dots, join_dots, keys, &stretches, scores, accumulate)
  BY_QUERIES(i, q->num_queries, SCORE)
#undef SCORE
}

/* ---- weighted sums ---- */

static void weighted_sum_int8_neondot(const kvedge_probabilities *p, const kvedge_tile *values,
                                      const kvedge_accumulators *to) {
  const token_stretches stretches = stretches_of(values);
#define SUM(count)                                                                                                     \
  if (p->planes == 3) sum_queries(p, i, count, 3, values, &stretches, to);                                             \
  else if (p->planes == 2) sum_queries(p, i, count, 2, values, &stretches, to);                                        \
  else sum_queries(p, i, count, 1, values, &stretches, to)
  BY_QUERIES(i, p->num_queries, SUM)
#undef SUM
}

KVEDGE_INT4_FUNCTIONS(neondot, scores_int8_neondot, weighted_sum_int8_neondot)
#define KVEDGE_NEONDOT_INT4_CELL                                                                                       \
  {.encode_query = encode_query_neondot, .scores = scores_int4_neondot, .weighted_sum = weighted_sum_int4_neondot}
#define KVEDGE_NEONDOT_INT8_CELL                                                                                       \
  {.encode_query = encode_query_neondot, .scores = scores_int8_neondot, .weighted_sum = weighted_sum_int8_neondot}

static uint64_t multiply_neondot(size_t n) {
  int32x4_t sum[SUMS];
  int8x16_t keys = vdupq_n_s8(1);
  const int8x16_t codes = keys;
  UNROLLED (j, SUMS) sum[j] = vdupq_n_s32(0);
  for (size_t i = 0; i < n; i += SUMS * 8) /* 16 bytes of keys with one of the two of codes */
    UNROLLED (j, SUMS) {
      __asm__("" : "+w"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      sum[j] = vdotq_laneq_s32(sum[j], keys, codes, 0);
    }
  for (int j = 1; j < SUMS; j++) sum[0] = vorrq_s32(sum[0], sum[j]);
  return (uint64_t)vgetq_lane_s32(sum[0], 0);
}

#define KVEDGE_NAME(function) function##_neondot
#include "kernels/neon/kivi.h"
#include "kernels/blocks.h"
KVEDGE_BLOCKS_FUNCTIONS(neondot, KVEDGE_NEONDOT_INT8_CELL)
const kvedge_kernels kvedge_kernels_neondot =
    KVEDGE_NEON_TABLE("neondot", KVEDGE_NEONDOT_INT8_CELL, KVEDGE_NEONDOT_INT4_CELL, KVEDGE_NEON_RUNS,
                      KVEDGE_BLOCKS_CELL(neondot, encode_query_neondot), multiply_neondot);

KVEDGE_TARGET_END
#endif
