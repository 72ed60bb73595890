/* What the NEON paths share: every kernel but the products with codes that need an instruction of their
 * own, and small helpers that make 32-bit ARM (armv7 NEON: 16 registers, no rounding, no sums across a
 * register) look like aarch64.
 *
 * Scores and weighted sums are one function here for rows of every format, inlined for each: 8 channels
 * become two registers of floats (load_row_8), and the rest is one multiply-add per four.
 * Included once by neon.c and neondot.c, inside their KVEDGE_TARGET_BEGIN. Static functions only.
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

#include "formats/int4_levels.h"
#include "kernels/kernels.h"
#include "kernels/exp2.h"
#include "kernels/logits.h"
#include "kernels/rows.h"
#include "system/target.h"

/* ---- helpers ---- */

/* Before a loop of constant length over an array that is to live in registers. */
#if defined(__clang__)
/* A loop of a constant count, unrolled. */
#define UNROLLED(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)
#else
/* A loop of a constant count, unrolled. */
#define UNROLLED(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
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
#define MULTIPLY_ADD_LANE_F32(acc, a, b, j)                                                                            \
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
  float32x2_t ab = vpadd_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)), vadd_f32(vget_low_f32(b), vget_high_f32(b)));
  float32x2_t cd = vpadd_f32(vadd_f32(vget_low_f32(c), vget_high_f32(c)), vadd_f32(vget_low_f32(d), vget_high_f32(d)));
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

/* n < 4 floats, then zeros */
KVEDGE_INLINE float32x4_t load_part_f32(const float *p, int n) {
  float32x4_t x = vdupq_n_f32(0.0f);
  if (n > 0) x = vld1q_lane_f32(p, x, 0);
  if (n > 1) x = vld1q_lane_f32(p + 1, x, 1);
  if (n > 2) x = vld1q_lane_f32(p + 2, x, 2);
  return x;
}

/* Where the four rows of a group of tokens lie. Where fewer are left, the last stands in for the
 * missing: what comes of it has weight 0, or is not stored. */
KVEDGE_INLINE void row_offsets(int tokens_left, ptrdiff_t token_stride, ptrdiff_t offset[4]) {
  UNROLLED (j, 4) offset[j] = min_int(j, tokens_left - 1) * token_stride;
}

/* acc * rescale + sum, for `vectors` times four channels of which `channels` exist. */
KVEDGE_INLINE void add_to_acc(const float32x4_t *sum, const int vectors, float rescale, float *acc, int channels) {
  float part[4 * 16];
  float *out = acc;
  if (channels < 4 * vectors) memcpy(out = part, acc, (size_t)channels * sizeof *acc);
  UNROLLED (j, vectors) vst1q_f32(out + 4 * j, multiply_add_f32(sum[j], vld1q_f32(out + 4 * j), vdupq_n_f32(rescale)));
  if (out == part) memcpy(acc, part, (size_t)channels * sizeof *acc);
}

/* ---- prefetch of the next tile ----
 *
 * The lines of `next` that come with a block of the tile at hand are issued with its groups of four tokens, so that
 * they never queue up: every 64 bytes from the block's first byte, wherever that lies in a line. */

typedef struct {
  uintptr_t line, end; /* the next address to prefetch; where the share of the tokens so far ends */
  int wanted;
} prefetch_cursor;

KVEDGE_INLINE prefetch_cursor prefetch_of_block(const kvedge_tile *tile, int token) {
  if (!tile->next.blocks) return (prefetch_cursor){0, 0, 0};
  uintptr_t line = (uintptr_t)tile->next.blocks[token / KVEDGE_BLOCK] + (uintptr_t)tile->next.offset;
  return (prefetch_cursor){line, line, 1};
}

KVEDGE_INLINE void prefetch_next(prefetch_cursor *next, int bytes) {
  if (!next->wanted) return;
  next->end += (uintptr_t)bytes;
  for (; next->line < next->end; next->line += 64) __builtin_prefetch((const void *)next->line, 0, 2);
}

/* A weighted sum passes over the tile once for each slice of channels: with a slice that starts `before` bytes into
 * each row come the lines that start as many bytes, times the block's tokens, into the block to prefetch. */
KVEDGE_INLINE const char *prefetch_of_slice(const kvedge_tile *tile, int token, int before) {
  if (!tile->next.blocks) return NULL;
  return tile->next.blocks[token / KVEDGE_BLOCK] + tile->next.offset +
         before * min_int(KVEDGE_BLOCK, tile->num_tokens - token);
}

/* The share of the four tokens from t on of a slice `width` bytes wide: 4 * width bytes, a multiple of 32 unless the
 * slice is partial; returns where the next share starts. */
KVEDGE_INLINE const char *prefetch_slice(const char *next, int t, const int width, const int partial) {
  /* opaque, because GCC 12 drops the caller's test for NULL of an address that is then prefetched from */
  __asm__("" : "+r"(next));
  if (partial) {
    const int from = t % KVEDGE_BLOCK * width, line = (from + 63) / 64 * 64;
    for (int i = line; i < from + 4 * width; i += 64) __builtin_prefetch(next - from + i, 0, 2);
  } else if (4 * width < 64) {
    if (t % 8 == 0) {
      __asm__("" : "+r"(next)); /* for the same reason */
      __builtin_prefetch(next, 0, 2);
    }
  } else {
    UNROLLED (i, width / 16) __builtin_prefetch(next + 64 * i, 0, 2);
  }
  return next + 4 * width;
}

/* Four tokens' scores of one query. Tokens past the tile's last have room, and nobody reads them. */
KVEDGE_INLINE void store_scores(float32x4_t score, int accumulate, float *scores) {
  if (accumulate) score = vaddq_f32(vld1q_f32(scores), score);
  vst1q_f32(scores, score);
}

/* ---- scales ---- */

#if defined(__aarch64__)
/* Four columns at a time; a half becomes a float by an instruction. */
static void transpose_scales_neon(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride, int num_tokens,
                                  int num_columns, float factor, float *out, ptrdiff_t out_stride) {
  if (type != KVEDGE_SCALE_FLOAT16) {
    transpose_scales_portable(scales, type, token_stride, num_tokens, num_columns, factor, out, out_stride);
    return;
  }
  for (int c = 0; c < num_columns; c += 4, out += 4 * out_stride) {
    const char *from = (const char *)scales + c * (ptrdiff_t)sizeof(__fp16);
    const int left = num_columns - c;
    for (int t = 0; t < num_tokens; t++, from += token_stride) {
      if (left < 4) {
        for (int j = 0; j < left; j++)
          out[j * out_stride + t] = (float)((const __fp16 *)(const void *)from)[j] * factor;
        continue;
      }
      const uint16x4_t halves = vld1_u16((const uint16_t *)(const void *)from);
      const float32x4_t four = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)), factor);
      vst1q_lane_f32(out + t, four, 0);
      vst1q_lane_f32(out + out_stride + t, four, 1);
      vst1q_lane_f32(out + 2 * out_stride + t, four, 2);
      vst1q_lane_f32(out + 3 * out_stride + t, four, 3);
    }
  }
}
#else
#define transpose_scales_neon transpose_scales_portable
#endif

/* ---- storing rows ---- */

KVEDGE_INLINE uint32x4_t magnitude_bits(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }

static uint32_t abs_max_bits_neon(const float *x, size_t n) {
  uint32x4_t largest[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    UNROLLED (j, 4) largest[j] = vmaxq_u32(largest[j], magnitude_bits(vld1q_f32(x + i + 4 * j)));
  for (; i + 4 <= n; i += 4) largest[0] = vmaxq_u32(largest[0], magnitude_bits(vld1q_f32(x + i)));
  if (i < n) largest[1] = vmaxq_u32(largest[1], magnitude_bits(load_part_f32(x + i, (int)(n - i))));
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

static void softmax_neon(float *scores, int num_queries, int num_tokens, const float *factor, float *max, float *sum,
                         float *rescale) {
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
    rescale[i] = vgetq_lane_f32(p, 0);
    max[i] = m;
    float32x4_t total = vdupq_n_f32(0.0f);
    for (t = 0; t < padded; t += 4) {
      p = exp2_of(vmulq_n_f32(vsubq_f32(vld1q_f32(scores + t), vdupq_n_f32(m)), factor[i]));
      vst1q_f32(scores + t, p);
      total = vaddq_f32(total, p);
    }
    for (; t % KVEDGE_BLOCK; t += 4) vst1q_f32(scores + t, vdupq_n_f32(0.0f));
    sum[i] = sum[i] * rescale[i] + sum_across(total);
  }
}

/* ---- rows of floats, or of codes that become floats ---- */

/* Bytes of an element. */
KVEDGE_INLINE int element_size(const kvedge_format format) {
  return format == KVEDGE_FLOAT32 ? 4 : format == KVEDGE_FLOAT16 || format == KVEDGE_BFLOAT16 ? 2 : 1;
}

/* Eight halves as floats. On armv7 an instruction of the fp16 extension does it (with VFPv4: Cortex-A7 and A15), by name because
 * GCC has the intrinsic with -mfp16-format only. */
KVEDGE_INLINE void load_8_halves(uint16x8_t halves, float32x4_t out[2]) {
#if defined(__aarch64__)
  out[0] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves)));
  out[1] = vcvt_high_f32_f16(vreinterpretq_f16_u16(halves));
#elif defined(__ARM_FP) && (__ARM_FP & 2)
  __asm__("vcvt.f32.f16 %q0, %P1" : "=w"(out[0]) : "w"(vget_low_u16(halves)));
  __asm__("vcvt.f32.f16 %q0, %P1" : "=w"(out[1]) : "w"(vget_high_u16(halves)));
#else
  /* Exponent and mantissa in a float's place, brought to a float's bias. A subnormal half, m * 2^-24, is given the
   * exponent of 2^-14 as well, and loses 2^-14 again: the vector unit would take a denormal float for 0. */
  const uint16x4_t half[2] = {vget_low_u16(halves), vget_high_u16(halves)};
  for (int j = 0; j < 2; j++) {
    uint32x4_t magnitude = vmovl_u16(vand_u16(half[j], vdup_n_u16(0x7fff)));
    uint32x4_t sign = vshll_n_u16(vand_u16(half[j], vdup_n_u16(0x8000)), 15);
    uint32x4_t subnormal = vcltq_u32(magnitude, vdupq_n_u32(0x400));
    uint32x4_t bias = vaddq_u32(vdupq_n_u32(112u << 23), vandq_u32(subnormal, vdupq_n_u32(1u << 23)));
    float32x4_t value = vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(magnitude, 13), bias));
    value = vsubq_f32(value, vreinterpretq_f32_u32(vandq_u32(subnormal, vdupq_n_u32(113u << 23))));
    out[j] = vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), vaddq_u32(sign, sign)));
  }
#endif
}

/* Eight channels as floats; of formats without scales times `factor`, a power of two. */
KVEDGE_INLINE void load_row_8(const char *p, const kvedge_format format, float factor, float32x4_t out[2]) {
  if (format == KVEDGE_INT8) {
    int16x8_t wide = vmovl_s8(vld1_s8((const int8_t *)p));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
    return;
  }
  if (format == KVEDGE_FLOAT32) {
    out[0] = vld1q_f32((const float *)p);
    out[1] = vld1q_f32((const float *)p + 4);
  } else if (format == KVEDGE_FLOAT16) {
    load_8_halves(vld1q_u16((const uint16_t *)p), out);
  } else if (format == KVEDGE_FP8_E5M2) { /* the upper byte of a half */
    load_8_halves(vshlq_n_u16(vmovl_u8(vld1_u8((const uint8_t *)p)), 8), out);
  } else if (format == KVEDGE_FP8_E4M3) { /* as the digits of a half, 2^-8 of what they are; the sign in bit 15 */
    const uint16x8_t halves = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t *)p)), 7));
    load_8_halves(vandq_u16(halves, vdupq_n_u16(0xbfff)), out);
    factor *= 256.0f;
  } else { /* a bfloat16 is the upper half of a float */
    uint16x8x2_t floats = vzipq_u16(vdupq_n_u16(0), vld1q_u16((const uint16_t *)p));
    out[0] = vreinterpretq_f32_u16(floats.val[0]);
    out[1] = vreinterpretq_f32_u16(floats.val[1]);
  }
  out[0] = vmulq_n_f32(out[0], factor);
  out[1] = vmulq_n_f32(out[1], factor);
}

/* The last n < 8 channels of four rows, with zeros after them. */
enum { END_BYTES = 32 }; /* 8 floats */
OUT_OF_LINE void gather_ends(const char *rows, const ptrdiff_t offset[4], int n, int size,
                             char *ends) { /* (4, END_BYTES) */
  for (int j = 0; j < 4; j++, ends += END_BYTES) {
    if (size == 1) {
      uint64_t bytes = load_below_8((const int8_t *)rows + offset[j], n);
      memcpy(ends, &bytes, sizeof bytes);
    } else {
      memset(ends, 0, END_BYTES);
      memcpy(ends, rows + offset[j], (size_t)(n * size));
    }
  }
}
static const ptrdiff_t end_offset[4] = {0, END_BYTES, 2 * END_BYTES, 3 * END_BYTES};

enum {
#if defined(__aarch64__)
  SCORE_QUERIES = 4, /* x 4 tokens = 16 registers of sums, 8 of keys */
  WEIGH_SUMS = 16,   /* registers: 1 query and 64 channels, 2 and 32, 3 or 4 and 16 */
#else
  SCORE_QUERIES = 2,
  WEIGH_SUMS = 8, /* 1 query and 32 channels, 2 and 16 */
#endif
  WEIGH_QUERIES = WEIGH_SUMS / 4,
};

/* sum[i][j] += values[i][0..7] . k[j][0..7] */
KVEDGE_INLINE void score_8_channels(const float *values, ptrdiff_t stride, const char *rows, const ptrdiff_t offset[4],
                                    const kvedge_format format, float factor, const int count,
                                    float32x4_t sum[SCORE_QUERIES][4]) {
  float32x4_t k[4][2];
  UNROLLED (j, 4) load_row_8(rows + offset[j], format, factor, k[j]);
  UNROLLED (i, count) {
    float32x4_t low = vld1q_f32(values + i * stride), high = vld1q_f32(values + i * stride + 4);
    UNROLLED (j, 4) {
      sum[i][j] = multiply_add_f32(sum[i][j], low, k[j][0]);
      sum[i][j] = multiply_add_f32(sum[i][j], high, k[j][1]);
    }
  }
}

/* Scores of four tokens for `count` queries from first on. ends (4, END_BYTES): the channels past the last multiple of
 * 8, if there are any. `scale` is for int8 only. */
KVEDGE_INLINE void score_four(const kvedge_query *q, int first, const int count, const kvedge_format format,
                              const char *rows, const ptrdiff_t offset[4], const char *ends, float factor,
                              float32x4_t scale, float *scores, int accumulate) {
  const float *values = q->values + first * q->stride; /* (count, stride), padded with zeros */
  float32x4_t sum[SCORE_QUERIES][4];                   /* (count, 4 tokens) */
  int d = 0;
  UNROLLED (i, count)
    UNROLLED (j, 4) sum[i][j] = vdupq_n_f32(0.0f);
  for (; d + 8 <= q->dim; d += 8)
    score_8_channels(values + d, q->stride, rows + d * element_size(format), offset, format, factor, count, sum);
  if (d < q->dim) score_8_channels(values + d, q->stride, ends, end_offset, format, factor, count, sum);
  UNROLLED (i, count) {
    float32x4_t score = sum_each_f32(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    if (format == KVEDGE_INT8) score = vmulq_f32(score, scale);
    store_scores(score, accumulate, scores + (first + i) * KVEDGE_TILE);
  }
}

KVEDGE_INLINE void score_rows(const kvedge_query *q, const kvedge_tile *keys, const kvedge_format format, float *scores,
                              int accumulate) {
  const int size = element_size(format), whole = q->dim / 8 * 8;
  const ptrdiff_t stride = keys->token_stride;
  ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
  for (int first = 0; first < keys->num_tokens; first += KVEDGE_BLOCK) {
    const char *rows = kvedge_tile_block(keys, first);
    const int end = min_int(first + KVEDGE_BLOCK, keys->num_tokens);
    prefetch_cursor next = prefetch_of_block(keys, first);
    for (int t = first; t < end; t += 4, rows += 4 * stride) {
      const int left = end - t;
      char ends[4 * END_BYTES];
      float32x4_t scale = vdupq_n_f32(1.0f);
      if (left < 4) row_offsets(left, stride, offset);
      prefetch_next(&next, min_int(left, 4) * size * q->dim);
      if (whole < q->dim) gather_ends(rows + whole * size, offset, q->dim - whole, size, ends);
      if (format == KVEDGE_INT8) scale = vld1q_f32(keys->scales + t);
      for (int i = 0; i < q->num_queries; i += SCORE_QUERIES) {
#define FOUR(count) score_four(q, i, count, format, rows, offset, ends, keys->factor, scale, scores + t, accumulate)
        switch (min_int(q->num_queries - i, SCORE_QUERIES)) {
          case 1: FOUR(1); break;
          case 2: FOUR(2); break;
#if defined(__aarch64__)
          case 3: FOUR(3); break;
          default: FOUR(4);
#endif
        }
#undef FOUR
      }
    }
  }
}

/* The sums of 8 * eights channels from `channel` on for `count` query rows, held in registers over the tile. Of a
 * partial slice (eights is 1) only the first `channels` exist. */
KVEDGE_INLINE void weigh_slice(const kvedge_tile *values, const kvedge_format format, int channel, int channels,
                               const int partial, const float *weights, const int count, const int eights,
                               const int prefetch, const float *rescale, float *acc, ptrdiff_t acc_stride) {
  const int size = element_size(format);
  const ptrdiff_t stride = values->token_stride;
  const float factor = values->factor;
  float32x4_t sum[WEIGH_SUMS]; /* (count, 2 * eights) */
  ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
  UNROLLED (s, 2 * eights * count) sum[s] = vdupq_n_f32(0.0f);
  const char *rows = NULL, *next = NULL;
  for (int t = 0; t < values->num_tokens; t += 4, rows += 4 * stride) {
    if (t % KVEDGE_BLOCK == 0) {
      rows = kvedge_tile_block(values, t) + channel * size;
      next = prefetch ? prefetch_of_slice(values, t, channel * size) : NULL;
    }
    const char *v = rows;
    const ptrdiff_t *at = offset;
    char ends[4 * END_BYTES];
    if (values->num_tokens - t < 4) row_offsets(values->num_tokens - t, stride, offset);
    if (next) next = prefetch_slice(next, t, (partial ? channels : 8 * eights) * size, partial);
    if (partial) {
      gather_ends(rows, offset, channels, size, ends);
      v = ends;
      at = end_offset;
    }
    float32x4_t weight[WEIGH_QUERIES]; /* of four tokens */
    UNROLLED (i, count) weight[i] = vld1q_f32(weights + i * KVEDGE_TILE + t);
#define TOKEN(j)                                                                                                       \
  UNROLLED (e, eights) {                                                                                               \
    float32x4_t row[2];                                                                                                \
    load_row_8(v + at[j] + 8 * e * size, format, factor, row);                                                         \
    UNROLLED (i, count) {                                                                                              \
      float32x4_t *s = sum + 2 * (eights * i + e);                                                                     \
      s[0] = MULTIPLY_ADD_LANE_F32(s[0], row[0], weight[i], j);                                                        \
      s[1] = MULTIPLY_ADD_LANE_F32(s[1], row[1], weight[i], j);                                                        \
    }                                                                                                                  \
  }
    TOKEN(0) TOKEN(1) TOKEN(2) TOKEN(3)
#undef TOKEN
  }
  UNROLLED (i, count)
    add_to_acc(sum + 2 * eights * i, 2 * eights, rescale[i], acc + channel + i * acc_stride, channels);
}

/* All channels, for `count` query rows of weights (count, KVEDGE_TILE), 0 from num_tokens on. */
KVEDGE_INLINE void weigh_channels(const kvedge_tile *values, const kvedge_format format, const int count,
                                  const float *weights, int prefetch, const float *rescale, float *acc,
                                  ptrdiff_t acc_stride) {
  const int most = WEIGH_SUMS / 2 / (count == 3 ? 4 : count), dim = values->dim;
  int d = 0;
#define SLICE(channels, partial, eights)                                                                               \
  weigh_slice(values, format, d, channels, partial, weights, count, eights, prefetch, rescale, acc, acc_stride)
  for (; d + 8 * most <= dim; d += 8 * most) SLICE(8 * most, 0, most);
  for (; d + 8 <= dim; d += 8) SLICE(8, 0, 1);
  if (d < dim) SLICE(dim - d, 1, 1);
#undef SLICE
}

KVEDGE_INLINE void weigh_rows(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_format format,
                              const kvedge_accumulators *to) {
  for (int i = 0; i < p->num_queries; i += WEIGH_QUERIES) {
    const int count = min_int(p->num_queries - i, WEIGH_QUERIES);
    const float *weights = p->p + i * KVEDGE_TILE;
    float scaled[WEIGH_QUERIES * KVEDGE_TILE];
    if (format == KVEDGE_INT8) {
      for (int j = 0; j < count; j++)
        for (int t = 0; t < values->num_tokens; t += 4) /* p and scales are 0 up to the block's end */
          vst1q_f32(scaled + j * KVEDGE_TILE + t,
                    vmulq_f32(vld1q_f32(weights + j * KVEDGE_TILE + t), vld1q_f32(values->scales + t)));
      weights = scaled;
    }
#define QUERIES(count)                                                                                                 \
  weigh_channels(values, format, count, weights, i == 0, to->rescale + i, to->acc + i * to->stride, to->stride)
    switch (count) {
      case 1: QUERIES(1); break;
      case 2: QUERIES(2); break;
#if defined(__aarch64__)
      case 3: QUERIES(3); break;
      default: QUERIES(4);
#endif
    }
#undef QUERIES
  }
}

/* Not inlined anywhere but where the format is a constant. */
#define KVEDGE_NEON_KERNELS(name, format)                                                                              \
  static void scores_##name##_neon(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {    \
    score_rows(q, keys, format, scores, accumulate);                                                                   \
  }                                                                                                                    \
  static void weighted_sum_##name##_neon(const kvedge_probabilities *p, const kvedge_tile *values,                     \
                                         const kvedge_accumulators *to) {                                              \
    weigh_rows(p, values, format, to);                                                                                 \
  }
#define KVEDGE_NEON_CELL(name) {.scores = scores_##name##_neon, .weighted_sum = weighted_sum_##name##_neon}

KVEDGE_NEON_KERNELS(float32, KVEDGE_FLOAT32)
KVEDGE_NEON_KERNELS(float16, KVEDGE_FLOAT16)
KVEDGE_NEON_KERNELS(bfloat16, KVEDGE_BFLOAT16)
KVEDGE_NEON_KERNELS(fp8_e4m3, KVEDGE_FP8_E4M3)
KVEDGE_NEON_KERNELS(fp8_e5m2, KVEDGE_FP8_E5M2)

/* ---- int4 ---- */

/* Levels of 32 channels from 16 bytes, and the last ones one by one. */
static inline void widen_row(const uint8_t *codes, int n, int8_t *out) {
  int d = 0;
#if defined(__aarch64__)
  const int8x16_t levels = vld1q_s8(kvedge_int4_levels);
  for (; d + 32 <= n; d += 32) {
    const uint8x16_t pairs = vld1q_u8(codes + d / 2);
    const uint8x16_t low = vandq_u8(pairs, vdupq_n_u8(15)), high = vshrq_n_u8(pairs, 4);
    vst1q_s8(out + d, vqtbl1q_s8(levels, vzip1q_u8(low, high)));
    vst1q_s8(out + d + 16, vqtbl1q_s8(levels, vzip2q_u8(low, high)));
  }
#endif
  for (; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"

/* ---- the yardsticks ---- */

static uint64_t read_bytes_neon(const void *p, size_t n) {
  const uint8_t *bytes = p; /* (n), n a multiple of 512 */
  uint8x16_t lane[8];
  UNROLLED (j, 8) lane[j] = vdupq_n_u8(0);
  for (size_t i = 0; i < n; i += 128)
    UNROLLED (j, 8) lane[j] = vorrq_u8(lane[j], vld1q_u8(bytes + i + 16 * j));
  for (int j = 1; j < 8; j++) lane[0] = vorrq_u8(lane[0], lane[j]);
  uint64x2_t all = vreinterpretq_u64_u8(lane[0]);
  return vgetq_lane_u64(all, 0) | vgetq_lane_u64(all, 1);
}

enum { SUMS = 12 }; /* a product waits up to 7 cycles for the one before it in the same sum */

#define KVEDGE_NEON_TABLE(isa_name, int8_cell, int4_cell, multiplied)                                                  \
  {                                                                                                                    \
      .name = isa_name,                                                                                                \
      .tuning = {.step_bytes = 16 << 10, .parallel_work = 3 << 20 /* not measured */},                                 \
      .cells = {[KVEDGE_INT8] = int8_cell,                                                                             \
                 [KVEDGE_INT4] = int4_cell,                                                                             \
                 [KVEDGE_FLOAT32] = KVEDGE_NEON_CELL(float32),                                                          \
                 [KVEDGE_FLOAT16] = KVEDGE_NEON_CELL(float16),                                                          \
                 [KVEDGE_BFLOAT16] = KVEDGE_NEON_CELL(bfloat16),                                                        \
                 [KVEDGE_FP8_E4M3] = KVEDGE_NEON_CELL(fp8_e4m3),                                                        \
                 [KVEDGE_FP8_E5M2] = KVEDGE_NEON_CELL(fp8_e5m2)},                                                       \
      .abs_max_bits = abs_max_bits_neon,                                                                               \
      .quantize = quantize_neon,                                                                                       \
      .dequantize = dequantize_neon,                                                                                   \
      .transpose_scales = transpose_scales_neon,                                                                       \
      .softmax = softmax_neon,                                                                                         \
      .heavy_blocks = heavy_blocks_portable,                                                                           \
      .logits = KVEDGE_LOGIT_KERNELS,                                                                                  \
      .merge_row = merge_row_portable,                                                                                 \
      .scale_row = scale_row_portable,                                                                                 \
      .read_bytes = read_bytes_neon,                                                                                   \
      .multiply = multiplied,                                                                                          \
}

#endif
