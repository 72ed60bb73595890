/* What the NEON paths share: every kernel but the products with codes that need an instruction of their
 * own, and small helpers that make 32-bit ARM (armv7 NEON: 16 registers, no rounding, no sums across a
 * register) look like aarch64.
 *
 * Scores and weighted sums of float rows and of 8-bit rows are the same function here, inlined for an
 * element size: 8 channels become two registers of floats, and the rest is one multiply-add per four.
 * Included once by each kernels_neon*.c, inside its KVEDGE_TARGET_BEGIN. Static functions only.
 *
 * Two things differ on armv7 and are seen to here, because stored bytes must not depend on the CPU:
 * its vector unit has no round-to-even (adding 1.5 * 2^23 rounds), and takes denormals for zero.
 */
#ifndef KVEDGE_KERNELS_NEON_COMMON_H
#define KVEDGE_KERNELS_NEON_COMMON_H

#include <arm_neon.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/exp2.h"
#include "kernels/logits.h"
#include "kernels/rows.h"
#include "system/target.h"

/* ---- helpers ---- */

/* Before a loop of constant length over an array that is to live in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Seldom called: kept out of the loops that inline everything else. */
#define OUT_OF_LINE static __attribute__((noinline))

KVEDGE_INLINE int min_int(int a, int b) { return a < b ? a : b; }

/* acc + a * b; fused where the instruction exists */
KVEDGE_INLINE float32x4_t multiply_add_f32(float32x4_t acc, float32x4_t a, float32x4_t b) {
#if defined(__aarch64__) || defined(__ARM_FEATURE_FMA)
  return vfmaq_f32(acc, a, b);
#else
  return vmlaq_f32(acc, a, b);
#endif
}

/* acc + a * (lane j of b), j a constant */
#if defined(__aarch64__)
#define MULTIPLY_ADD_LANE_F32(acc, a, b, j) vfmaq_laneq_f32(acc, a, b, j)
#else
#define MULTIPLY_ADD_LANE_F32(acc, a, b, j) \
  multiply_add_f32(acc, a, vdupq_lane_f32(j < 2 ? vget_low_f32(b) : vget_high_f32(b), j % 2))
#endif

/* rint, ties to even, for |x| < 2^22 */
KVEDGE_INLINE int32x4_t round_to_i32(float32x4_t x) {
#if defined(__aarch64__)
  return vcvtnq_s32_f32(x);
#else
  /* In [2^23, 2^24) neighbouring floats are 1 apart: the addition rounds, and the sum's bits are
   * the bits of 1.5 * 2^23 plus the integer. The barrier keeps the product that made x from being
   * contracted with the addition into a multiply-add, which would round once instead of twice. */
  __asm__("" : "+w"(x));
  int32x4_t bits = vreinterpretq_s32_f32(vaddq_f32(x, vdupq_n_f32(12582912.0f)));
  return vsubq_s32(bits, vdupq_n_s32(0x4b400000));
#endif
}

KVEDGE_INLINE float max_across(float32x4_t x) {
#if defined(__aarch64__)
  return vmaxvq_f32(x);
#else
  float32x2_t half = vpmax_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(vpmax_f32(half, half), 0);
#endif
}

KVEDGE_INLINE float sum_across(float32x4_t x) {
#if defined(__aarch64__)
  return vaddvq_f32(x);
#else
  float32x2_t half = vpadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(vpadd_f32(half, half), 0);
#endif
}

/* {sum a, sum b, sum c, sum d} */
KVEDGE_INLINE float32x4_t sum_each_f32(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
#if defined(__aarch64__)
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
#else
  float32x2_t ab = vpadd_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)),
                             vadd_f32(vget_low_f32(b), vget_high_f32(b)));
  float32x2_t cd = vpadd_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)),
                             vadd_f32(vget_low_f32(d), vget_high_f32(d)));
  return vcombine_f32(ab, cd);
#endif
}

/* n < 8 bytes as the low bytes of a word, the others zero; no byte past them is read. Two loads that
 * overlap cover any length between theirs and twice theirs. */
KVEDGE_INLINE uint64_t load_below_8(const int8_t *p, int n) {
  if (n >= 4) {
    uint32_t first, last;
    memcpy(&first, p, 4);
    memcpy(&last, p + n - 4, 4);
    return first | (uint64_t)last << (8 * (n - 4));
  }
  if (n == 0) return 0;
  const uint8_t *bytes = (const uint8_t *)p;
  return (uint32_t)bytes[0] | (uint32_t)bytes[n / 2] << (8 * (n / 2)) |
         (uint32_t)bytes[n - 1] << (8 * (n - 1));
}

/* n < 4 floats, then zeros */
KVEDGE_INLINE float32x4_t load_part_f32(const float *p, int n) {
  float32x4_t x = vdupq_n_f32(0.0f);
  if (n > 0) x = vld1q_lane_f32(p, x, 0);
  if (n > 1) x = vld1q_lane_f32(p + 1, x, 1);
  if (n > 2) x = vld1q_lane_f32(p + 2, x, 2);
  return x;
}

KVEDGE_INLINE void store_part_f32(float *p, float32x4_t x, int n) {
  if (n > 0) vst1q_lane_f32(p, x, 0);
  if (n > 1) vst1q_lane_f32(p + 1, x, 1);
  if (n > 2) vst1q_lane_f32(p + 2, x, 2);
}

/* Where the four rows of a group of tokens lie. Where fewer are left, the last stands in for the
 * missing: what comes of it has weight 0, or is not stored. */
KVEDGE_INLINE void row_offsets(int tokens_left, ptrdiff_t token_stride, ptrdiff_t offset[4]) {
  UNROLL
  for (int j = 0; j < 4; j++) offset[j] = min_int(j, tokens_left - 1) * token_stride;
}

/* acc * alpha + sum, for `vectors` times four channels of which `channels` exist. */
KVEDGE_INLINE void add_to_acc(const float32x4_t *sum, const int vectors, float alpha, float *acc,
                              int channels) {
  float part[4 * 16];
  float *out = acc;
  if (channels < 4 * vectors) memcpy(out = part, acc, (size_t)channels * sizeof *acc);
  UNROLL
  for (int j = 0; j < vectors; j++)
    vst1q_f32(out + 4 * j, multiply_add_f32(sum[j], vld1q_f32(out + 4 * j), vdupq_n_f32(alpha)));
  if (out == part) memcpy(acc, part, (size_t)channels * sizeof *acc);
}

/* Four tokens' scores of one query, of which `left` or all are stored. */
KVEDGE_INLINE void store_scores(float32x4_t score, int left, int accumulate, float *scores) {
  if (accumulate) score = vaddq_f32(vld1q_f32(scores), score);
  if (left >= 4)
    vst1q_f32(scores, score);
  else
    store_part_f32(scores, score, left);
}

/* ---- storing rows ---- */

KVEDGE_INLINE uint32x4_t magnitude_bits(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }

static uint32_t abs_max_bits_neon(const float *x, size_t n) {
  uint32x4_t largest[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    UNROLL
    for (int j = 0; j < 4; j++)
      largest[j] = vmaxq_u32(largest[j], magnitude_bits(vld1q_f32(x + i + 4 * j)));
  for (; i + 4 <= n; i += 4)
    largest[0] = vmaxq_u32(largest[0], magnitude_bits(vld1q_f32(x + i)));
  if (i < n)
    largest[1] = vmaxq_u32(largest[1], magnitude_bits(load_part_f32(x + i, (int)(n - i))));
  uint32x4_t all = vmaxq_u32(vmaxq_u32(largest[0], largest[1]), vmaxq_u32(largest[2], largest[3]));
  uint32x2_t half = vpmax_u32(vget_low_u32(all), vget_high_u32(all));
  return vget_lane_u32(vpmax_u32(half, half), 0);
}

KVEDGE_INLINE void quantize_16(const float *x, float inverse, int8_t *codes) {
  int16x8_t low = vcombine_s16(vmovn_s32(round_to_i32(vmulq_n_f32(vld1q_f32(x), inverse))),
                               vmovn_s32(round_to_i32(vmulq_n_f32(vld1q_f32(x + 4), inverse))));
  int16x8_t high = vcombine_s16(vmovn_s32(round_to_i32(vmulq_n_f32(vld1q_f32(x + 8), inverse))),
                                vmovn_s32(round_to_i32(vmulq_n_f32(vld1q_f32(x + 12), inverse))));
  vst1q_s8(codes, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static void quantize_neon(const float *x, size_t n, float inverse, int8_t *codes) {
#if !defined(__aarch64__)
  /* The vector unit takes a denormal x for 0. That shows only if inverse is so large that a denormal
   * (below 2^-126) would round to 1 or more; the scalar unit keeps denormals. */
  if (inverse > 0x1p100f) {
    for (size_t i = 0; i < n; i++) codes[i] = (int8_t)rintf(x[i] * inverse);
    return;
  }
#endif
  size_t i = 0;
  for (; i + 16 <= n; i += 16) quantize_16(x + i, inverse, codes + i);
  if (i < n) {
    float rest[16] = {0};
    int8_t rest_codes[16];
    memcpy(rest, x + i, (n - i) * sizeof *x);
    quantize_16(rest, inverse, rest_codes);
    memcpy(codes + i, rest_codes, n - i);
  }
}

static void dequantize_neon(const int8_t *codes, size_t n, float scale, float *out) {
  size_t i = 0;
#if !defined(__aarch64__)
  if (scale < FLT_MIN) { /* a denormal, which the vector unit would take for 0 */
    for (; i < n; i++) out[i] = (float)codes[i] * scale;
    return;
  }
#endif
  for (; i + 8 <= n; i += 8) {
    int16x8_t wide = vmovl_s8(vld1_s8(codes + i));
    vst1q_f32(out + i, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), scale));
    vst1q_f32(out + i + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide))), scale));
  }
  for (; i < n; i++) out[i] = (float)codes[i] * scale;
}

/* ---- softmax ---- */

/* 2^x for x <= 0, as exp2_nonpositive(); 0 also for NaN (-inf times a factor that armv7 took for 0). */
KVEDGE_INLINE float32x4_t exp2_of(float32x4_t x) {
  const float32x4_t round = vdupq_n_f32(ROUND_TO_INTEGER);
  float32x4_t clamped = vmaxq_f32(x, vdupq_n_f32(-126.0f)); /* takes -inf too */
  float32x4_t shifted = vaddq_f32(clamped, round);
  float32x4_t f = vsubq_f32(clamped, vsubq_f32(shifted, round));
  float32x4_t y = vdupq_n_f32(EXP2_5);
  y = multiply_add_f32(vdupq_n_f32(EXP2_4), y, f);
  y = multiply_add_f32(vdupq_n_f32(EXP2_3), y, f);
  y = multiply_add_f32(vdupq_n_f32(EXP2_2), y, f);
  y = multiply_add_f32(vdupq_n_f32(EXP2_1), y, f);
  y = multiply_add_f32(vdupq_n_f32(1.0f), y, f);
  int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
  uint32x4_t bits = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(y), exponent));
  return vreinterpretq_f32_u32(vandq_u32(bits, vcgtq_f32(x, vdupq_n_f32(EXP2_NOTHING))));
}

static void softmax_neon(float *scores, int num_queries, int num_tokens, const float *factor,
                         float *max, float *sum, float *alpha) {
  int padded = (num_tokens + 3) / 4 * 4;
  for (int i = 0; i < num_queries; i++, scores += KVEDGE_TILE) {
    for (int t = num_tokens; t < padded; t++) scores[t] = -INFINITY;
    float32x4_t largest = vld1q_f32(scores), other = largest;
    int t = 4;
    for (; t + 8 <= padded; t += 8) {
      largest = vmaxq_f32(largest, vld1q_f32(scores + t));
      other = vmaxq_f32(other, vld1q_f32(scores + t + 4));
    }
    if (t < padded) other = vmaxq_f32(other, vld1q_f32(scores + t));
    float tile_max = max_across(vmaxq_f32(largest, other));
    float m = max[i] > tile_max ? max[i] : tile_max;
    float32x4_t p = exp2_of(vdupq_n_f32((max[i] - m) * factor[i]));
    alpha[i] = vgetq_lane_f32(p, 0);
    max[i] = m;
    float32x4_t total = vdupq_n_f32(0.0f);
    for (t = 0; t < padded; t += 4) {
      p = exp2_of(vmulq_n_f32(vsubq_f32(vld1q_f32(scores + t), vdupq_n_f32(m)), factor[i]));
      vst1q_f32(scores + t, p);
      total = vaddq_f32(total, p);
    }
    for (; t % KVEDGE_BLOCK; t += 4) vst1q_f32(scores + t, vdupq_n_f32(0.0f));
    sum[i] = sum[i] * alpha[i] + sum_across(total);
  }
}

/* ---- rows of floats, or of codes that become floats ---- */

/* What the loops below need of a tile's rows. `size` is 1 for codes and 4 for floats, a constant
 * wherever these functions are inlined; factor is for floats only (a power of two). */
typedef struct {
  const char *first; /* channel 0 of the first row */
  ptrdiff_t stride;
  int num_tokens;
  float factor;
} tile_rows;

/* Channels after the last multiple of 8, with zeros up to 8. */
typedef union {
  int8_t codes[KVEDGE_TILE][8];
  float floats[KVEDGE_TILE][8];
} row_ends;

KVEDGE_INLINE tile_rows from_channel(tile_rows rows, int channel, int size) {
  return (tile_rows){rows.first + channel * size, rows.stride, rows.num_tokens, rows.factor};
}

/* The n < 8 channels that rows start with, which are their last. */
OUT_OF_LINE tile_rows gather_ends(tile_rows rows, int n, int size, row_ends *ends) {
  const char *from = rows.first;
  for (int t = 0; t < rows.num_tokens; t++, from += rows.stride) {
    if (size == 1) {
      uint64_t bytes = load_below_8((const int8_t *)from, n);
      memcpy(ends->codes[t], &bytes, 8);
    } else {
      memset(ends->floats[t], 0, sizeof ends->floats[t]);
      memcpy(ends->floats[t], from, (size_t)n * sizeof(float));
    }
  }
  return (tile_rows){(const char *)ends, 8 * size, rows.num_tokens, rows.factor};
}

/* Eight channels. */
KVEDGE_INLINE void load_row_8(const char *p, const int size, float factor, float32x4_t out[2]) {
  if (size == 1) {
    int16x8_t wide = vmovl_s8(vld1_s8((const int8_t *)p));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
  } else {
    out[0] = vmulq_n_f32(vld1q_f32((const float *)p), factor);
    out[1] = vmulq_n_f32(vld1q_f32((const float *)p + 4), factor);
  }
}

enum {
#if defined(__aarch64__)
  SCORE_QUERIES = 4, /* x 4 tokens = 16 registers of sums, 8 of keys */
  WEIGH_SUMS = 16,   /* registers: 1 query and 64 channels, 2 and 32, 3 or 4 and 16 */
#else
  SCORE_QUERIES = 2,
  WEIGH_SUMS = 8,    /* 1 query and 32 channels, 2 and 16 */
#endif
  WEIGH_QUERIES = WEIGH_SUMS / 4,
};

/* sum[i][j] += values[i][0..7] . k[j][0..7] */
KVEDGE_INLINE void score_8_channels(const float *values, ptrdiff_t stride, const char *rows,
                                    const ptrdiff_t offset[4], const int size, float factor,
                                    const int count, float32x4_t sum[SCORE_QUERIES][4]) {
  float32x4_t k[4][2];
  UNROLL
  for (int j = 0; j < 4; j++) load_row_8(rows + offset[j], size, factor, k[j]);
  UNROLL
  for (int i = 0; i < count; i++) {
    float32x4_t low = vld1q_f32(values + i * stride), high = vld1q_f32(values + i * stride + 4);
    UNROLL
    for (int j = 0; j < 4; j++) {
      sum[i][j] = multiply_add_f32(sum[i][j], low, k[j][0]);
      sum[i][j] = multiply_add_f32(sum[i][j], high, k[j][1]);
    }
  }
}

/* Scores of the four tokens from t on, as far as they are stored, for `count` queries. `ends`: the
 * channels past the last multiple of 8, if there are any. k_scale is for codes only. */
KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count, const tile_rows *rows,
                               const tile_rows *ends, const int size, int t, const float *k_scale,
                               float *scores, int accumulate) {
  const float *values = q->values + first * q->stride; /* (count, stride), padded with zeros */
  const char *row = rows->first + t * rows->stride;
  int left = rows->num_tokens - t, d = 0;
  float32x4_t sum[SCORE_QUERIES][4]; /* (count, 4 tokens) */
  ptrdiff_t offset[4];
  UNROLL
  for (int i = 0; i < count; i++)
    UNROLL
    for (int j = 0; j < 4; j++) sum[i][j] = vdupq_n_f32(0.0f);
  row_offsets(left, rows->stride, offset);
  for (; d + 8 <= q->dim; d += 8)
    score_8_channels(values + d, q->stride, row + d * size, offset, size, rows->factor, count, sum);
  if (d < q->dim) {
    row_offsets(left, ends->stride, offset);
    score_8_channels(values + d, q->stride, ends->first + t * ends->stride, offset, size, rows->factor,
                     count, sum);
  }
  float32x4_t scale = vdupq_n_f32(1.0f);
  if (size == 1) scale = left >= 4 ? vld1q_f32(k_scale + t) : load_part_f32(k_scale + t, left);
  UNROLL
  for (int i = 0; i < count; i++) {
    float32x4_t score = sum_each_f32(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    if (size == 1) score = vmulq_f32(score, scale);
    store_scores(score, left, accumulate, scores + (first + i) * KVEDGE_TILE + t);
  }
}

KVEDGE_INLINE void score_rows(const kvedge_query *q, tile_rows rows, const int size, const float *k_scale,
                              const void *prefetch, float *scores, int accumulate) {
  int whole = q->dim / 8 * 8;
  row_ends gathered;
  tile_rows ends = rows;
  if (whole < q->dim) ends = gather_ends(from_channel(rows, whole, size), q->dim - whole, size, &gathered);
  for (int t = 0; t < rows.num_tokens; t += 4) {
    if (prefetch) prefetch_bytes((const char *)prefetch + (ptrdiff_t)t * q->dim * size, 4 * q->dim * size);
    for (int i = 0; i < q->num_queries; i += SCORE_QUERIES) {
#define BLOCK(count) score_block(q, i, count, &rows, &ends, size, t, k_scale, scores, accumulate)
      switch (min_int(q->num_queries - i, SCORE_QUERIES)) {
        case 1: BLOCK(1); break;
        case 2: BLOCK(2); break;
#if defined(__aarch64__)
        case 3: BLOCK(3); break;
        default: BLOCK(4);
#endif
      }
#undef BLOCK
    }
  }
}

static void scores_f32_neon(const kvedge_query *q, const float *k, ptrdiff_t token_stride,
                            int num_tokens, float k_scale, const void *prefetch, float *scores) {
  tile_rows rows = {(const char *)k, token_stride, num_tokens, k_scale};
  score_rows(q, rows, sizeof(float), NULL, prefetch, scores, 0);
}

/* The sums of 8 * eights channels for `count` query rows, held in registers over the tile. `channels`
 * of them exist. */
KVEDGE_INLINE void weigh_block(tile_rows rows, const int size, int channels, const float *weights,
                               const float *alpha, const int count, const int eights,
                               const char *prefetch, float *acc, ptrdiff_t acc_stride) {
  enum { LINE = 64 };
  const int lines = 8 * eights * size / LINE > 1 ? 8 * eights * size / LINE : 1;
  const char *v = rows.first;
  float32x4_t sum[WEIGH_SUMS]; /* (count, 2 * eights) */
  ptrdiff_t offset[4] = {0, rows.stride, 2 * rows.stride, 3 * rows.stride};
  UNROLL
  for (int s = 0; s < 2 * eights * count; s++) sum[s] = vdupq_n_f32(0.0f);
  for (int t = 0; t < rows.num_tokens; t += 4) {
    if (rows.num_tokens - t < 4) row_offsets(rows.num_tokens - t, rows.stride, offset);
    float32x4_t weight[WEIGH_QUERIES]; /* of four tokens */
    UNROLL
    for (int i = 0; i < count; i++) weight[i] = vld1q_f32(weights + i * KVEDGE_TILE + t);
    if (prefetch) {
      UNROLL
      for (int line = 0; line < 4 * lines; line++) __builtin_prefetch(prefetch + LINE * line, 0, 2);
      prefetch += 4 * LINE * lines;
    }
#define TOKEN(j)                                                                               \
  UNROLL                                                                                       \
  for (int e = 0; e < eights; e++) {                                                           \
    float32x4_t row[2];                                                                        \
    load_row_8(v + offset[j] + 8 * e * size, size, rows.factor, row);                          \
    UNROLL                                                                                     \
    for (int i = 0; i < count; i++) {                                                          \
      float32x4_t *s = sum + 2 * (eights * i + e);                                             \
      s[0] = MULTIPLY_ADD_LANE_F32(s[0], row[0], weight[i], j);                                \
      s[1] = MULTIPLY_ADD_LANE_F32(s[1], row[1], weight[i], j);                                \
    }                                                                                          \
  }
    TOKEN(0) TOKEN(1) TOKEN(2) TOKEN(3)
#undef TOKEN
    v += 4 * rows.stride;
  }
  UNROLL
  for (int i = 0; i < count; i++)
    add_to_acc(sum + 2 * eights * i, 2 * eights, alpha[i], acc + i * acc_stride, channels);
}

/* All channels, for `count` query rows of weights (count, KVEDGE_TILE), 0 from num_tokens on. */
KVEDGE_INLINE void weigh_rows(tile_rows rows, const int size, int dim, const int count,
                              const float *weights, const float *alpha, const char *prefetch, float *acc,
                              ptrdiff_t acc_stride) {
  const int eights = WEIGH_SUMS / 2 / (count == 3 ? 4 : count);
  int d = 0;
#define BLOCK(rows, channels, eights)                                                             \
  weigh_block(rows, size, channels, weights, alpha, count, eights,                                \
              prefetch && d * size % 64 == 0 ? prefetch + d * size * (ptrdiff_t)(rows).num_tokens : NULL, \
              acc + d, acc_stride)
  for (; d + 8 * eights <= dim; d += 8 * eights) BLOCK(from_channel(rows, d, size), 8 * eights, eights);
  for (; d + 8 <= dim; d += 8) BLOCK(from_channel(rows, d, size), 8, 1);
  if (d < dim) {
    row_ends ends;
    tile_rows last = gather_ends(from_channel(rows, d, size), dim - d, size, &ends);
    BLOCK(last, dim - d, 1);
  }
#undef BLOCK
}

/* The same for up to WEIGH_QUERIES query rows. */
KVEDGE_INLINE void weigh_queries(tile_rows rows, const int size, int dim, int count, const float *weights,
                                 const float *alpha, const void *prefetch, float *acc, ptrdiff_t acc_stride) {
#define ROWS(count) weigh_rows(rows, size, dim, count, weights, alpha, prefetch, acc, acc_stride)
  switch (count) {
    case 1: ROWS(1); break;
    case 2: ROWS(2); break;
#if defined(__aarch64__)
    case 3: ROWS(3); break;
    default: ROWS(4);
#endif
  }
#undef ROWS
}

static void weighted_sum_f32_neon(const float *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                  int num_queries, const float *p, float v_scale,
                                  const float *alpha, const void *prefetch, float *acc,
                                  ptrdiff_t acc_stride) {
  tile_rows rows = {(const char *)v, token_stride, num_tokens, v_scale};
  for (int i = 0; i < num_queries; i += WEIGH_QUERIES, prefetch = NULL)
    weigh_queries(rows, sizeof(float), dim, min_int(num_queries - i, WEIGH_QUERIES), p + i * KVEDGE_TILE,
                  alpha + i, prefetch, acc + i * acc_stride, acc_stride);
}

/* ---- the yardsticks ---- */

static uint64_t read_bytes_neon(const void *p, size_t n) {
  const uint8_t *bytes = p; /* (n), n a multiple of 512 */
  uint8x16_t lane[8];
  UNROLL
  for (int j = 0; j < 8; j++) lane[j] = vdupq_n_u8(0);
  for (size_t i = 0; i < n; i += 128)
    UNROLL
    for (int j = 0; j < 8; j++) lane[j] = vorrq_u8(lane[j], vld1q_u8(bytes + i + 16 * j));
  UNROLL
  for (int j = 1; j < 8; j++) lane[0] = vorrq_u8(lane[0], lane[j]);
  uint64x2_t all = vreinterpretq_u64_u8(lane[0]);
  return vgetq_lane_u64(all, 0) | vgetq_lane_u64(all, 1);
}

enum { SUMS = 12 }; /* a product waits up to 7 cycles for the one before it in the same sum */

#define KVEDGE_NEON_TABLE(isa_name, encode, scores, weighted_sum, multiplied)                      \
  {                                                                                                \
    .name = isa_name, .step_bytes = 16 << 10, .parallel_work = 3 << 20 /* not measured */,         \
    .abs_max_bits = abs_max_bits_neon,                                                             \
    .quantize = quantize_neon, .dequantize = dequantize_neon, .encode_query = encode,              \
    .transpose_scales = transpose_scales_portable,                                                 \
    .merge_row = merge_row_portable, .scale_row = scale_row_portable, .scores_i8 = scores,         \
    .scores_f32 = scores_f32_neon, .softmax = softmax_neon, .weighted_sum_i8 = weighted_sum,       \
    .weighted_sum_f32 = weighted_sum_f32_neon, .logits = KVEDGE_LOGIT_KERNELS,                     \
    .read_bytes = read_bytes_neon, .multiply = multiplied,                                         \
  }

#endif
