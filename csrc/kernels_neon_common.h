/* What the NEON paths share: the kernels without an integer product, and small helpers that make
 * 32-bit ARM (armv7 NEON: 16 registers, no rounding, no sums across a register) look like aarch64.
 *
 * Included once by each kernels_neon*.c, inside its KVEDGE_TARGET_BEGIN. Static functions only.
 * Vectors of codes are named by what they hold; a comment beside a pointer gives its shape.
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

#include "kernels.h"
#include "target.h"

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
  return (uint32_t)bytes[0] | (uint32_t)bytes[n / 2] << (8 * (n / 2)) | (uint32_t)bytes[n - 1] << (8 * (n - 1));
}

/* The last n < 16 channels of a group's four rows, with zeros after them. */
OUT_OF_LINE void gather_ends_16(const int8_t *rows, const ptrdiff_t offset[4], int n, int8_t ends[4][16]) {
  for (int j = 0; j < 4; j++) {
    const int8_t *p = rows + offset[j];
    int8x8_t low = n < 8 ? vcreate_s8(load_below_8(p, n)) : vld1_s8(p);
    int8x8_t high = n < 8 ? vdup_n_s8(0) : vcreate_s8(load_below_8(p + 8, n - 8));
    vst1q_s8(ends[j], vcombine_s8(low, high));
  }
}

/* The last n < 8 channels of a tile's rows, with zeros after them. */
OUT_OF_LINE void gather_ends_8(const int8_t *rows, ptrdiff_t token_stride, int num_tokens, int n,
                          int8_t ends[KVEDGE_TILE][8]) {
  for (int t = 0; t < num_tokens; t++, rows += token_stride) {
    uint64_t bytes = load_below_8(rows, n);
    memcpy(ends[t], &bytes, 8);
  }
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

/* Asks for row_bytes of each of a group's rows. */
KVEDGE_INLINE void prefetch_rows(const char *rows, const ptrdiff_t offset[4], int row_bytes) {
  for (int byte = 0; byte < row_bytes; byte += 64)
    UNROLL
    for (int j = 0; j < 4; j++) __builtin_prefetch(rows + offset[j] + byte);
}

/* Four tokens' dot products of one query become scores, of which `count` are stored. */
KVEDGE_INLINE void store_scores(float32x4_t dot, float32x4_t k_scale, float q_scale, int count,
                                int accumulate, float *scores) {
  float32x4_t score = vmulq_f32(dot, vmulq_n_f32(k_scale, q_scale));
  if (accumulate) score = vaddq_f32(vld1q_f32(scores), score);
  if (count >= 4)
    vst1q_f32(scores, score);
  else
    store_part_f32(scores, score, count);
}

/* acc * alpha + w_scale * sum: a tile's integer sums of `vectors` times four channels join the
 * accumulator, of which `channels` exist. */
KVEDGE_INLINE void fold_sums(const int32x4_t *sum, const int vectors, float alpha, float w_scale,
                             float *acc, int channels) {
  float part[4 * 16];
  float *out = acc;
  if (channels < 4 * vectors) memcpy(out = part, acc, (size_t)channels * sizeof *acc);
  UNROLL
  for (int j = 0; j < vectors; j++)
    vst1q_f32(out + 4 * j, multiply_add_f32(vmulq_n_f32(vld1q_f32(out + 4 * j), alpha),
                                            vcvtq_f32_s32(sum[j]), vdupq_n_f32(w_scale)));
  if (out == part) memcpy(acc, part, (size_t)channels * sizeof *acc);
}

/* ---- storing rows ---- */

static uint32_t abs_max_bits_neon(const float *x, size_t n) {
  const uint32x4_t magnitude = vdupq_n_u32(0x7fffffffu);
  uint32x4_t largest[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    UNROLL
    for (int j = 0; j < 4; j++)
      largest[j] = vmaxq_u32(largest[j], vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i + 4 * j)), magnitude));
  for (; i + 4 <= n; i += 4)
    largest[0] = vmaxq_u32(largest[0], vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), magnitude));
  if (i < n)
    largest[1] = vmaxq_u32(largest[1], vandq_u32(vreinterpretq_u32_f32(load_part_f32(x + i, (int)(n - i))), magnitude));
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

/* ---- softmax and weights ---- */

/* 2^x for x <= 0, relative error below 2e-7; 0 from -125 down, and for NaN (-inf times a factor that
 * armv7 took for 0). x = n + f, n = rint(x), |f| <= 1/2. 2^f: the minimax polynomial of degree 5 for
 * the relative error on [-1/2, 1/2], held to 1 at f = 0 (error 9e-8, then rounding), so that
 * 2^0 is 1 exactly. After adding 1.5 * 2^23 the low bits hold n: shifted by 23, the constant's own
 * bits fall out, and an integer addition puts n into the exponent of 2^f. */
KVEDGE_INLINE float32x4_t exp2_nonpositive(float32x4_t x) {
  const float32x4_t round = vdupq_n_f32(12582912.0f);
  float32x4_t clamped = vmaxq_f32(x, vdupq_n_f32(-126.0f)); /* takes -inf too */
  float32x4_t shifted = vaddq_f32(clamped, round);
  float32x4_t f = vsubq_f32(clamped, vsubq_f32(shifted, round));
  float32x4_t y = vdupq_n_f32(1.326472731e-03f);
  y = multiply_add_f32(vdupq_n_f32(9.671512991e-03f), y, f);
  y = multiply_add_f32(vdupq_n_f32(5.550733581e-02f), y, f);
  y = multiply_add_f32(vdupq_n_f32(2.402224243e-01f), y, f);
  y = multiply_add_f32(vdupq_n_f32(6.931470037e-01f), y, f);
  y = multiply_add_f32(vdupq_n_f32(1.0f), y, f);
  int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
  uint32x4_t bits = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(y), exponent));
  return vreinterpretq_f32_u32(vandq_u32(bits, vcgtq_f32(x, vdupq_n_f32(-125.0f))));
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
    float32x4_t p = exp2_nonpositive(vdupq_n_f32((max[i] - m) * factor[i]));
    alpha[i] = vgetq_lane_f32(p, 0);
    max[i] = m;
    float32x4_t total = vdupq_n_f32(0.0f);
    for (t = 0; t < padded; t += 4) {
      p = exp2_nonpositive(vmulq_n_f32(vsubq_f32(vld1q_f32(scores + t), vdupq_n_f32(m)), factor[i]));
      vst1q_f32(scores + t, p);
      total = vaddq_f32(total, p);
    }
    for (; t < KVEDGE_TILE; t += 4) vst1q_f32(scores + t, vdupq_n_f32(0.0f));
    sum[i] = sum[i] * alpha[i] + sum_across(total);
  }
}

static void weights_i16_neon(const float *p, int num_queries, int num_tokens, const float *v_scale,
                             int16_t *weights, float *w_scale) {
  int padded = (num_tokens + 7) / 8 * 8; /* p and v_scale are 0 from num_tokens to KVEDGE_TILE */
  for (int i = 0; i < num_queries; i++, p += KVEDGE_TILE, weights += KVEDGE_TILE) {
    float32x4_t low = vdupq_n_f32(0.0f), high = low;
    for (int t = 0; t < padded; t += 8) {
      low = vmaxq_f32(low, vmulq_f32(vld1q_f32(p + t), vld1q_f32(v_scale + t)));
      high = vmaxq_f32(high, vmulq_f32(vld1q_f32(p + t + 4), vld1q_f32(v_scale + t + 4)));
    }
    float largest = max_across(vmaxq_f32(low, high));
    /* Below 2^-100 a weight is nothing beside its row's sum, which holds a 1 from some tile. */
    float inverse = largest > 0x1p-100f ? KVEDGE_WEIGHT_MAX / largest : 0.0f;
    w_scale[i] = inverse > 0.0f ? largest / KVEDGE_WEIGHT_MAX : 0.0f;
    int t = 0;
    for (; t < padded; t += 8) {
      float32x4_t w_low = vmulq_f32(vld1q_f32(p + t), vld1q_f32(v_scale + t));
      float32x4_t w_high = vmulq_f32(vld1q_f32(p + t + 4), vld1q_f32(v_scale + t + 4));
      vst1q_s16(weights + t, vcombine_s16(vmovn_s32(round_to_i32(vmulq_n_f32(w_low, inverse))),
                                          vmovn_s32(round_to_i32(vmulq_n_f32(w_high, inverse)))));
    }
    for (; t < KVEDGE_TILE; t += 8) vst1q_s16(weights + t, vdupq_n_s16(0));
  }
}

/* ---- float rows ---- */

enum { F32_QUERIES = 4 }; /* query rows served by one pass over a group's rows */

KVEDGE_INLINE void score_block_f32(const float *query, ptrdiff_t query_stride, int dim,
                                   const char *rows, const ptrdiff_t offset[4], float k_scale,
                                   const int count, int num_stored, float *scores) {
  float32x4_t sum[F32_QUERIES][4];
  UNROLL
  for (int i = 0; i < count; i++)
    UNROLL
    for (int j = 0; j < 4; j++) sum[i][j] = vdupq_n_f32(0.0f);
  int d = 0;
  for (; d + 4 <= dim; d += 4) {
    float32x4_t k[4];
    UNROLL
    for (int j = 0; j < 4; j++)
      k[j] = vmulq_n_f32(vld1q_f32((const float *)(rows + offset[j]) + d), k_scale);
    UNROLL
    for (int i = 0; i < count; i++) {
      float32x4_t q = vld1q_f32(query + i * query_stride + d);
      UNROLL
      for (int j = 0; j < 4; j++) sum[i][j] = multiply_add_f32(sum[i][j], q, k[j]);
    }
  }
  if (d < dim)
    UNROLL
    for (int i = 0; i < count; i++) {
      float32x4_t q = load_part_f32(query + i * query_stride + d, dim - d);
      UNROLL
      for (int j = 0; j < 4; j++) {
        float32x4_t k = load_part_f32((const float *)(rows + offset[j]) + d, dim - d);
        sum[i][j] = multiply_add_f32(sum[i][j], q, vmulq_n_f32(k, k_scale));
      }
    }
  UNROLL
  for (int i = 0; i < count; i++) {
    float32x4_t score = sum_each_f32(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    if (num_stored >= 4)
      vst1q_f32(scores + i * KVEDGE_TILE, score);
    else
      store_part_f32(scores + i * KVEDGE_TILE, score, num_stored);
  }
}

static void scores_f32_neon(const kvedge_query_f32 *q, const float *k, ptrdiff_t token_stride,
                            int num_tokens, float k_scale, const void *prefetch, float *scores) {
  for (int t = 0; t < num_tokens; t += 4) {
    const char *rows = (const char *)k + t * token_stride;
    ptrdiff_t offset[4];
    row_offsets(num_tokens - t, token_stride, offset);
    if (prefetch) prefetch_rows((const char *)prefetch + t * token_stride, offset, 4 * q->dim);
    for (int i = 0; i < q->num_queries; i += F32_QUERIES) {
      const float *query = q->values + i * q->stride;
      float *out = scores + i * KVEDGE_TILE + t;
#define BLOCK(count) score_block_f32(query, q->stride, q->dim, rows, offset, k_scale, count, num_tokens - t, out)
      switch (min_int(q->num_queries - i, F32_QUERIES)) {
        case 1: BLOCK(1); break;
        case 2: BLOCK(2); break;
        case 3: BLOCK(3); break;
        default: BLOCK(4);
      }
#undef BLOCK
    }
  }
}

/* 4 * vectors channels for `count` query rows; the sums stay in registers over the tile. */
KVEDGE_INLINE void weigh_block_f32(const char *v, ptrdiff_t token_stride, int num_tokens, float v_scale,
                                   const float *p, const float *alpha, const int count,
                                   const int vectors, const char *prefetch, float *acc,
                                   ptrdiff_t acc_stride) {
  float32x4_t sum[F32_QUERIES][4];
  UNROLL
  for (int i = 0; i < count; i++)
    UNROLL
    for (int j = 0; j < vectors; j++) sum[i][j] = vdupq_n_f32(0.0f);
  for (int t = 0; t < num_tokens; t++, v += token_stride) {
    if (prefetch) __builtin_prefetch(prefetch + t * token_stride);
    float32x4_t row[4];
    UNROLL
    for (int j = 0; j < vectors; j++) row[j] = vmulq_n_f32(vld1q_f32((const float *)v + 4 * j), v_scale);
    UNROLL
    for (int i = 0; i < count; i++) {
      float32x4_t weight = vdupq_n_f32(p[i * KVEDGE_TILE + t]);
      UNROLL
      for (int j = 0; j < vectors; j++) sum[i][j] = multiply_add_f32(sum[i][j], row[j], weight);
    }
  }
  UNROLL
  for (int i = 0; i < count; i++)
    UNROLL
    for (int j = 0; j < vectors; j++) {
      float *out = acc + i * acc_stride + 4 * j;
      vst1q_f32(out, multiply_add_f32(sum[i][j], vld1q_f32(out), vdupq_n_f32(alpha[i])));
    }
}

KVEDGE_INLINE void weigh_rows_f32(const char *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                  const int count, const float *p, float v_scale, const float *alpha,
                                  const char *prefetch, float *acc, ptrdiff_t acc_stride) {
  int d = 0;
#define BLOCK(vectors)                                                                     \
  weigh_block_f32(v + 4 * d, token_stride, num_tokens, v_scale, p, alpha, count, vectors, \
                  prefetch && d % 16 == 0 ? prefetch + 4 * d : NULL, acc + d, acc_stride)
  for (; d + 16 <= dim; d += 16) BLOCK(4);
  for (; d + 4 <= dim; d += 4) BLOCK(1);
#undef BLOCK
  for (; d < dim; d++)
    UNROLL
    for (int i = 0; i < count; i++) {
      float sum = 0.0f;
      for (int t = 0; t < num_tokens; t++)
        sum += p[i * KVEDGE_TILE + t] * (((const float *)(v + t * token_stride))[d] * v_scale);
      acc[i * acc_stride + d] = acc[i * acc_stride + d] * alpha[i] + sum;
    }
}

static void weighted_sum_f32_neon(const float *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                  int num_queries, const float *p, float v_scale,
                                  const float *alpha, const void *prefetch, float *acc,
                                  ptrdiff_t acc_stride) {
  for (int i = 0; i < num_queries; i += F32_QUERIES, p += F32_QUERIES * KVEDGE_TILE,
           alpha += F32_QUERIES, acc += F32_QUERIES * acc_stride, prefetch = NULL) {
#define ROWS(count)                                                                              \
  weigh_rows_f32((const char *)v, token_stride, num_tokens, dim, count, p, v_scale, alpha,       \
                 (const char *)prefetch, acc, acc_stride)
    switch (min_int(num_queries - i, F32_QUERIES)) {
      case 1: ROWS(1); break;
      case 2: ROWS(2); break;
      case 3: ROWS(3); break;
      default: ROWS(4);
    }
#undef ROWS
  }
}

/* ---- the yardstick ---- */

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

#define KVEDGE_NEON_TABLE(isa_name, scores, weighted_sum)                                      \
  {                                                                                            \
    .name = isa_name, .abs_max_bits = abs_max_bits_neon, .quantize = quantize_neon,            \
    .dequantize = dequantize_neon, .scores_i8 = scores, .scores_f32 = scores_f32_neon,         \
    .softmax = softmax_neon, .weights_i16 = weights_i16_neon, .weighted_sum_i8 = weighted_sum, \
    .weighted_sum_f32 = weighted_sum_f32_neon, .read_bytes = read_bytes_neon,                  \
  }

#endif
