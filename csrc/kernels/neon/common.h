/* What the NEON paths share besides scores and weighted sums: small helpers that make 32-bit ARM
 * (armv7 NEON: 16 registers, no rounding, no sums across a register) look like aarch64,
 * prefetch, scales, storing rows, softmax, the table. Included once by neon.c and neondot.c,
 * inside their KVEDGE_TARGET_BEGIN. Static functions only.
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

#include "kernels/portable.h"

/* Query rows that scores and weighted sums of floats and 16-bit integers have in registers. */
enum {
#if defined(__aarch64__)
  SCORE_QUERIES = 4, /* x 4 tokens = 16 registers of sums, 8 of keys */
  MOST_SUMS = 16,    /* registers: 1 query and 64 channels, 2 and 32, 3 or 4 and 16 */
#else
  SCORE_QUERIES = 2,
  MOST_SUMS = 8, /* 1 query and 32 channels, 2 and 16 */
#endif
  WEIGHTED_QUERIES = MOST_SUMS / 4,
};

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

/* After a product that is added to a sum: else GCC 12 takes products of several tokens together, and spills sums. */
#define AS_WRITTEN(sum) __asm__ volatile("" : "+w"(sum))

/* A factor of 16-bit integers by lane is one of the first 16 registers: else GCC 12 copies it
 * there before each product. */
#if defined(__aarch64__) && !defined(__clang__)
#define IN_LOWER_REGISTER(factor) __asm__ volatile("" : "+x"(factor))
#else
#define IN_LOWER_REGISTER(factor)
#endif

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

/* The upper four, or eight, of a register */
#if defined(__aarch64__)
#define MULTIPLY_ADD_HIGH_S16(acc, a, b) vmlal_high_s16(acc, a, b)
#define MULTIPLY_ADD_HIGH_LANE_U16(acc, a, b, j) vmlal_high_lane_u16(acc, a, b, j)
#define WIDEN_HIGH_S8(x) vmovl_high_s8(x)
#define SUBTRACT_HIGH_S8(x, y) vsubl_high_s8(x, y)
#else
#define MULTIPLY_ADD_HIGH_S16(acc, a, b) vmlal_s16(acc, vget_high_s16(a), vget_high_s16(b))
#define MULTIPLY_ADD_HIGH_LANE_U16(acc, a, b, j) vmlal_lane_u16(acc, vget_high_u16(a), b, j)
#define WIDEN_HIGH_S8(x) vmovl_s8(vget_high_s8(x))
#define SUBTRACT_HIGH_S8(x, y) vsubl_s8(vget_high_s8(x), vget_high_s8(y))
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

KVEDGE_INLINE uint32_t sum_across_u32(uint32x4_t x) {
#if defined(__aarch64__)
  return vaddvq_u32(x);
#else
  uint32x2_t half = vpadd_u32(vget_low_u32(x), vget_high_u32(x));
  return vget_lane_u32(vpadd_u32(half, half), 0);
#endif
}

/* {sum a, sum b, sum c, sum d} */
KVEDGE_INLINE int32x4_t sum_each_s32(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
#if defined(__aarch64__)
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
#else
  int32x2_t ab = vpadd_s32(vadd_s32(vget_low_s32(a), vget_high_s32(a)), vadd_s32(vget_low_s32(b), vget_high_s32(b)));
  int32x2_t cd = vpadd_s32(vadd_s32(vget_low_s32(c), vget_high_s32(c)), vadd_s32(vget_low_s32(d), vget_high_s32(d)));
  return vcombine_s32(ab, cd);
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
KVEDGE_INLINE float32x4_t load_first_f32(const float *p, int n) {
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
  float copy[4 * 16];
  float *out = acc;
  if (channels < 4 * vectors) memcpy(out = copy, acc, (size_t)channels * sizeof *acc);
  UNROLLED (j, vectors) vst1q_f32(out + 4 * j, multiply_add_f32(sum[j], vld1q_f32(out + 4 * j), vdupq_n_f32(rescale)));
  if (out == copy) memcpy(acc, copy, (size_t)channels * sizeof *acc);
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

/* Prefetches a line and moves to the next, unless the address is 0: opaque, because GCC 12 drops the test of an address
 * that is then prefetched from. */
KVEDGE_INLINE void prefetch_line(uintptr_t *line) {
  uintptr_t address = *line;
  if (!address) return;
  __asm__("" : "+r"(address));
  __builtin_prefetch((const void *)address, 0, 2);
  *line = address + 64;
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
/* Halves of four rows, four columns of each: columns. */
KVEDGE_INLINE void transpose_halves(const char *row, ptrdiff_t stride, uint16x4_t column[4]) {
  uint16x4_t halves[4];
  uint32x2_t even[2], odd[2]; /* columns 0 and 2, 1 and 3, of two rows */
  UNROLLED (j, 4) halves[j] = vld1_u16((const uint16_t *)(const void *)(row + j * stride));
  UNROLLED (j, 2) {
    even[j] = vreinterpret_u32_u16(vtrn1_u16(halves[2 * j], halves[2 * j + 1]));
    odd[j] = vreinterpret_u32_u16(vtrn2_u16(halves[2 * j], halves[2 * j + 1]));
  }
  column[0] = vreinterpret_u16_u32(vtrn1_u32(even[0], even[1]));
  column[1] = vreinterpret_u16_u32(vtrn1_u32(odd[0], odd[1]));
  column[2] = vreinterpret_u16_u32(vtrn2_u32(even[0], even[1]));
  column[3] = vreinterpret_u16_u32(vtrn2_u32(odd[0], odd[1]));
}

KVEDGE_INLINE uint16x4_t column_of_halves(const char *row, ptrdiff_t stride) {
  uint16x4_t column = vld1_dup_u16((const uint16_t *)(const void *)row);
  column = vld1_lane_u16((const uint16_t *)(const void *)(row + stride), column, 1);
  column = vld1_lane_u16((const uint16_t *)(const void *)(row + 2 * stride), column, 2);
  return vld1_lane_u16((const uint16_t *)(const void *)(row + 3 * stride), column, 3);
}

KVEDGE_INLINE void store_halves(uint16x4_t halves, float factor, float *out) {
  vst1q_f32(out, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)), factor));
}

#endif

/* On aarch64 a half becomes a float by an instruction: four tokens at a time. */
static void transpose_scales_neon(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride, int num_tokens,
                                  int num_columns, float factor, float *out, ptrdiff_t out_stride) {
  const char *row = scales;
  int t = 0;
#if defined(__aarch64__)
  for (; type == KVEDGE_SCALE_FLOAT16 && t + 4 <= num_tokens; t += 4, row += 4 * token_stride) {
    if (num_columns == 4) {
      uint16x4_t column[4];
      transpose_halves(row, token_stride, column);
      UNROLLED (c, 4) store_halves(column[c], factor, out + c * out_stride + t);
    } else {
      for (int c = 0; c < num_columns; c++)
        store_halves(column_of_halves(row + 2 * c, token_stride), factor, out + c * out_stride + t);
    }
  }
#endif
  if (t < num_tokens)
    transpose_scales_portable(row, type, token_stride, num_tokens - t, num_columns, factor, out + t, out_stride);
}

/* ---- storing rows ---- */

KVEDGE_INLINE uint32x4_t magnitude_bits(float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); }

static uint32_t abs_max_bits_neon(const float *x, size_t n) {
  uint32x4_t largest[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    UNROLLED (j, 4) largest[j] = vmaxq_u32(largest[j], magnitude_bits(vld1q_f32(x + i + 4 * j)));
  for (; i + 4 <= n; i += 4) largest[0] = vmaxq_u32(largest[0], magnitude_bits(vld1q_f32(x + i)));
  if (i < n) largest[1] = vmaxq_u32(largest[1], magnitude_bits(load_first_f32(x + i, (int)(n - i))));
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

/* 2^x for x <= 0, as exp2_nonpositive(), by pairs of terms, which wait less for each other; 0
 * also for NaN (-inf times a factor that armv7 took for 0). What comes of an x below the least,
 * perhaps a NaN, is masked out. */
KVEDGE_INLINE float32x4_t exp2_of(float32x4_t x) {
  const float32x4_t round = vdupq_n_f32(ROUND_TO_INTEGER);
  const float32x4_t shifted = vaddq_f32(x, round);
  const float32x4_t f = vsubq_f32(x, vsubq_f32(shifted, round)), f2 = vmulq_f32(f, f);
  const float32x4_t terms_45 = multiply_add_f32(vdupq_n_f32(EXP2_4), f, vdupq_n_f32(EXP2_5));
  const float32x4_t terms_23 = multiply_add_f32(vdupq_n_f32(EXP2_2), f, vdupq_n_f32(EXP2_3));
  float32x4_t y = multiply_add_f32(vdupq_n_f32(1.0f), f, vdupq_n_f32(EXP2_1));
  y = multiply_add_f32(y, multiply_add_f32(terms_23, terms_45, f2), f2);
  const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
  const uint32x4_t bits = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(y), exponent));
  return vreinterpretq_f32_u32(vandq_u32(bits, vcgtq_f32(x, vdupq_n_f32(EXP2_NOTHING))));
}

static void softmax_neon(float *scores, int num_queries, int num_tokens, const float *factor, float *max, float *sum,
                         float *rescale) {
  enum { LANES = KVEDGE_BLOCK / 4 };
  const int end = (num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  for (int i = 0; i < num_queries; i++, scores += KVEDGE_TILE) {
    const float by = factor[i];
    float32x4_t largest[LANES], total[LANES];
    for (int t = num_tokens; t < end; t++) scores[t] = -INFINITY;
    UNROLLED (j, LANES) largest[j] = vld1q_f32(scores + 4 * j), total[j] = vdupq_n_f32(0.0f);
    for (int t = KVEDGE_BLOCK; t < end; t += KVEDGE_BLOCK)
      UNROLLED (j, LANES) largest[j] = vmaxq_f32(largest[j], vld1q_f32(scores + t + 4 * j));
    const float tile_max = max_across(vmaxq_f32(vmaxq_f32(largest[0], largest[1]), vmaxq_f32(largest[2], largest[3])));
    const float m = max[i] > tile_max ? max[i] : tile_max;
    rescale[i] = vgetq_lane_f32(exp2_of(vdupq_n_f32((max[i] - m) * by)), 0);
    max[i] = m;
    for (int t = 0; t < end; t += KVEDGE_BLOCK)
      UNROLLED (j, LANES) {
        float *four = scores + t + 4 * j;
        const float32x4_t p = exp2_of(vmulq_n_f32(vsubq_f32(vld1q_f32(four), vdupq_n_f32(m)), by));
        vst1q_f32(four, p);
        total[j] = vaddq_f32(total[j], p);
      }
    sum[i] = sum[i] * rescale[i] + sum_across(vaddq_f32(vaddq_f32(total[0], total[1]), vaddq_f32(total[2], total[3])));
  }
}

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

#define STATE_FLOATS 4
#if defined(__aarch64__)
#define state_multiply_add(a, b, c) vfmaq_f32(c, a, b)
#endif
#include "kernels/states.h"

static const kvedge_row_kernels path_rows = {
    .abs_max_bits = abs_max_bits_neon,
    .quantize = quantize_neon,
    .dequantize = dequantize_neon,
    .transpose_scales = transpose_scales_neon,
    .softmax = softmax_neon,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .read_bytes = read_bytes_neon,
};
static const kvedge_logit_kernels path_logits = KVEDGE_LOGIT_KERNELS;
static const kvedge_state_kernels path_states = KVEDGE_STATE_KERNELS;

/* work_per_us: by bench/arm_cycles.py a Pi 4 does 8,000 to 20,000, a Pi 5 22,000 to 43,000. */
#define KVEDGE_NEON_TABLE(isa_name, int8_cell, int4_cell, of_runs, of_blocks, multiplied)                              \
  {                                                                                                                    \
      .name = isa_name,                                                                                                \
      .tuning = {.step_bytes = 16 << 10, .work_per_us = 10000},                                                        \
      .cells = {[KVEDGE_INT8] = int8_cell,                                                                             \
                 [KVEDGE_INT4] = int4_cell,                                                                             \
                 [KVEDGE_FLOAT32] = KVEDGE_NEON_CELL(float32),                                                          \
                 [KVEDGE_FLOAT16] = KVEDGE_NEON_CELL(float16),                                                          \
                 [KVEDGE_BFLOAT16] = KVEDGE_NEON_CELL(bfloat16),                                                        \
                 [KVEDGE_FP8_E4M3] = KVEDGE_NEON_CELL(fp8_e4m3),                                                        \
                 [KVEDGE_FP8_E5M2] = KVEDGE_NEON_CELL(fp8_e5m2)},                                                       \
      .runs = of_runs,                                                                                                 \
      .blocks = of_blocks,                                                                                             \
      .rows = &path_rows,                                                                                              \
      .logits = &path_logits,                                                                                          \
      .states = &path_states,                                                                                          \
      .multiply = multiplied,                                                                                          \
}

#endif
