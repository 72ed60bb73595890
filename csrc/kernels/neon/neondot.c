/* NEON with the dot product instructions of armv8.2: Raspberry Pi 5 (Cortex-A76) and later.
 *
 *   instruction               what for                              Cortex-A76
 *   sdot v.4s, v.16b, v.4b[i] 4 tokens (channels) x 4 products      3 (1 from sum to sum), V01
 *   trn1, trn2, zip1, zip2    transposing                           2, V01
 *   tbl v.16b                 bytes of codes into digits            2, V01
 *
 * A query, and the weights of a tile, are integers of 24 bits in three signed bytes (kernels.h),
 * 16 bytes for four of them. So one register holds all that a step of four needs, and sdot picks a
 * digit by its lane number.
 *
 * Where 16 bits will do, the low digits are left out.
 *
 * Keys. Four tokens are transposed, 4 channels (one dword) at a time: lane t of a column holds
 * channels 4j..4j+3 of token t, and token t's score grows in lane t: no sums across lanes. 8
 * shuffles for 64 bytes of keys, once for all stacked queries; 12 sdot (8) for each query.
 *
 * Values. Rows of four tokens are interleaved byte by byte, so that a lane holds one channel of the
 * four: 8 shuffles for 64 bytes, 12 sdot (8) for each query, sums in registers over the whole tile.
 *
 * At two a cycle, 64 bytes take 10 cycles (8) with one query, 28 (20) with four. The same by floats,
 * as in kernels_neon.c, takes twice that and more.
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

/* ---- numbers of 24 bits in three signed bytes, or 16 in two ---- */

/* What the largest of a set becomes. Three digits of 127 would be 8355711; one less, because the
 * product of a number and a rounded factor may end a little above. In 16 bits likewise 127 * 257 - 1,
 * as high digits. */
#define LARGEST_CODE 8355710.0f
#define LARGEST_CODE_16 (32638.0f * 256.0f)
/* Below, LARGEST_CODE / largest is no float any more: such a set counts as zeros. */
#define SMALLEST_ENCODED 0x1p-104f

KVEDGE_INLINE float divide_or_0(float a, float b, float largest) {
  return largest > SMALLEST_ENCODED ? a / b : 0.0f;
}

/* Codes 65536 * high + 256 * middle + low as {high x 4, middle x 4, low x 4, 0 x 4}. With 128 added to
 * each digit the digits are plain bytes, and inverting a byte's top bit takes 128 off. */
KVEDGE_INLINE int8x16_t split_digits(int32x4_t codes) {
  static const uint8_t order[16] = {2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15};
  const int32x4_t offset = vdupq_n_s32(0x808080);
  int32x4_t bytes = veorq_s32(vaddq_s32(codes, offset), offset);
  return vqtbl1q_s8(vreinterpretq_s8_s32(bytes), vld1q_u8(order));
}

/* The sums of four lanes' digits become one number each. A digit's sum is below 128 * 127 * 1024 =
 * 2^24 and exact as a float, where the three together would not fit an integer. */
KVEDGE_INLINE float32x4_t join_digits(const int32x4_t sum[3], const int bytes) {
  float32x4_t upper = vfmaq_n_f32(vcvtq_f32_s32(sum[1]), vcvtq_f32_s32(sum[0]), 256.0f);
  return bytes == 3 ? vfmaq_n_f32(vcvtq_f32_s32(sum[2]), upper, 256.0f) : vmulq_n_f32(upper, 256.0f);
}

/* sum += for each of four lanes, its four codes times four encoded numbers of 2 or 3 bytes */
KVEDGE_INLINE void dot_digits(int32x4_t sum[3], int8x16_t codes, int8x16_t digits, const int bytes) {
  sum[0] = vdotq_laneq_s32(sum[0], codes, digits, 0);
  sum[1] = vdotq_laneq_s32(sum[1], codes, digits, 1);
  if (bytes == 3) sum[2] = vdotq_laneq_s32(sum[2], codes, digits, 2);
}

/* ---- scores ---- */

static void encode_query_neondot(const float *x, int dim, float factor, float largest, int8_t *codes, float *scale,
                                 int32_t *offsets) {
  float inverse = divide_or_0(LARGEST_CODE, largest, largest);
  for (int d = 0; d < kvedge_padded_channels(dim); d += 4) {
    float32x4_t four = dim - d >= 4 ? vld1q_f32(x + d) : load_part_f32(x + min_int(d, dim), dim - d);
    vst1q_s8(codes + 4 * d, split_digits(round_to_i32(vmulq_n_f32(vmulq_n_f32(four, factor), inverse))));
  }
  *scale = divide_or_0(largest, LARGEST_CODE, largest);
  vst1q_s32(offsets, vdupq_n_s32(0)); /* keys are signed here */
}

/* The last n < 16 channels of four rows, with zeros after them. */
OUT_OF_LINE void gather_ends_16(const int8_t *rows, const ptrdiff_t offset[4], int n, int8_t ends[4][16]) {
  for (int j = 0; j < 4; j++) {
    const int8_t *p = rows + offset[j];
    int8x8_t low = n < 8 ? vcreate_s8(load_below_8(p, n)) : vld1_s8(p);
    int8x8_t high = n < 8 ? vdup_n_s8(0) : vcreate_s8(load_below_8(p + 8, n - 8));
    vst1q_s8(ends[j], vcombine_s8(low, high));
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

enum { DOT_SCORE_QUERIES = 4 }; /* x 3 digits = 12 registers of sums */

KVEDGE_INLINE void score_16_channels(const int8_t *codes, ptrdiff_t stride, const int8_t *rows,
                                     const ptrdiff_t offset[4], const int count, const int bytes,
                                     int32x4_t sum[DOT_SCORE_QUERIES][3]) {
  int8x16_t k[4], column[4];
  UNROLL
  for (int j = 0; j < 4; j++) k[j] = vld1q_s8(rows + offset[j]);
  transpose_4x4(k, column);
  UNROLL
  for (int c = 0; c < 4; c++)
    UNROLL
    for (int i = 0; i < count; i++)
      dot_digits(sum[i], column[c], vld1q_s8(codes + i * stride + 16 * c), bytes);
}

/* Scores of four tokens, of which `left` or all are stored, for `count` queries from first on. */
KVEDGE_INLINE void score_dots(const kvedge_query *q, int first, const int count, const int bytes,
                              const int8_t *rows, const ptrdiff_t offset[4], const int8_t ends[4][16],
                              float32x4_t k_scale, int left, float *scores, int accumulate) {
  static const ptrdiff_t end_offset[4] = {0, 16, 32, 48};
  const ptrdiff_t stride = KVEDGE_CODE_BYTES * q->stride;
  const int8_t *codes = q->codes + first * stride; /* (count, stride), padded with zeros */
  int32x4_t sum[DOT_SCORE_QUERIES][3];
  UNROLL
  for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = sum[i][2] = vdupq_n_s32(0);
  int d = 0;
  for (; d + 16 <= q->dim; d += 16)
    score_16_channels(codes + 4 * d, stride, rows + d, offset, count, bytes, sum);
  if (d < q->dim) score_16_channels(codes + 4 * d, stride, ends[0], end_offset, count, bytes, sum);
  UNROLL
  for (int i = 0; i < count; i++) {
    float32x4_t dot = vmulq_n_f32(join_digits(sum[i], bytes), q->scale[(first + i) * q->scale_stride]);
    store_scores(vmulq_f32(dot, k_scale), left, accumulate, scores + (first + i) * KVEDGE_TILE);
  }
}

KVEDGE_INLINE void scores_of_bytes(const kvedge_query *q, const int bytes, const int8_t *k,
                                   ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                                   const void *prefetch, float *scores, int accumulate) {
  for (int t = 0; t < num_tokens; t += 4) {
    const int8_t *rows = k + t * token_stride;
    int left = num_tokens - t, whole = q->dim / 16 * 16;
    int8_t ends[4][16];
    ptrdiff_t offset[4];
    row_offsets(left, token_stride, offset);
    if (prefetch) prefetch_bytes((const char *)prefetch + t * q->dim, 4 * q->dim);
    if (whole < q->dim) gather_ends_16(rows + whole, offset, q->dim - whole, ends);
    float32x4_t scale = left >= 4 ? vld1q_f32(k_scale + t) : load_part_f32(k_scale + t, left);
    for (int i = 0; i < q->num_queries; i += DOT_SCORE_QUERIES) {
#define BLOCK(count) score_dots(q, i, count, bytes, rows, offset, ends, scale, left, scores + t, accumulate)
      switch (min_int(q->num_queries - i, DOT_SCORE_QUERIES)) {
        case 1: BLOCK(1); break;
        case 2: BLOCK(2); break;
        case 3: BLOCK(3); break;
        default: BLOCK(4);
      }
#undef BLOCK
    }
  }
}

static void scores_i8_neondot(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                              int num_tokens, const float *k_scale, const void *prefetch, float *scores,
                              int accumulate) {
  if (q->num_bytes == 3)
    scores_of_bytes(q, 3, k, token_stride, num_tokens, k_scale, prefetch, scores, accumulate);
  else
    scores_of_bytes(q, 2, k, token_stride, num_tokens, k_scale, prefetch, scores, accumulate);
}

/* ---- weighted sum ---- */

enum { DOT_WEIGH_QUERIES = 4, DOT_WEIGH_SUMS = 8 }; /* x 3 digits = 24 registers of sums */

/* p * v_scale of up to DOT_WEIGH_QUERIES query rows, each relative to its largest. */
typedef struct {
  int8_t digits[DOT_WEIGH_QUERIES][KVEDGE_TILE / 4][16];
  float scale[DOT_WEIGH_QUERIES];
} encoded_weights;

/* Codes of 16 bits, small ones dithered, as those of 24 whose last digit is 0. */
KVEDGE_INLINE int32x4_t round_to_16_bits(float32x4_t x, float32x4_t dither) {
  uint32x4_t small = vcltq_f32(x, vdupq_n_f32(KVEDGE_DITHERED));
  float32x4_t added = vreinterpretq_f32_u32(vandq_u32(small, vreinterpretq_u32_f32(dither)));
  return vshlq_n_s32(round_to_i32(vaddq_f32(x, added)), 8);
}

KVEDGE_INLINE void encode_weights(const float *p, const float *v_scale, int num_tokens, int num_queries,
                                  const int bytes, encoded_weights *weights) {
  const float most = bytes == 3 ? LARGEST_CODE : LARGEST_CODE_16;
  for (int i = 0; i < num_queries; i++, p += KVEDGE_TILE) {
    float32x4_t w[KVEDGE_TILE / 4]; /* p and v_scale are 0 from num_tokens to the end of the block */
    float32x4_t largest_of = vdupq_n_f32(0.0f);
    for (int t = 0; t < num_tokens; t += 4) {
      w[t / 4] = vmulq_f32(vld1q_f32(p + t), vld1q_f32(v_scale + t));
      largest_of = vmaxq_f32(largest_of, w[t / 4]);
    }
    float largest = max_across(largest_of), factor = divide_or_0(most, largest, largest);
    weights->scale[i] = divide_or_0(largest, most, largest);
    for (int t = 0; t < num_tokens; t += 4) {
      int32x4_t codes;
      if (bytes == 3)
        codes = round_to_i32(vmulq_n_f32(w[t / 4], factor));
      else
        codes = round_to_16_bits(vmulq_n_f32(w[t / 4], factor / 256.0f), vld1q_f32(kvedge_dither + t));
      vst1q_s8(weights->digits[i][t / 4], split_digits(codes));
    }
  }
}

/* Four tokens' codes, 8 or 16 channels: lane c of out[j] holds channel 4 * j + c of the four tokens. */
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

/* The sums of 4 * vectors channels, vectors 2 or 4, for `count` query rows, held in registers over the
 * tile. */
KVEDGE_INLINE void weigh_dots(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int channels,
                              const encoded_weights *weights, const float *alpha, const int count,
                              const int bytes, const int vectors, const char *prefetch, float *acc,
                              ptrdiff_t acc_stride) {
  int32x4_t sum[DOT_WEIGH_SUMS][3]; /* (count, vectors) */
  ptrdiff_t offset[4] = {0, token_stride, 2 * token_stride, 3 * token_stride};
  UNROLL
  for (int s = 0; s < count * vectors; s++) sum[s][0] = sum[s][1] = sum[s][2] = vdupq_n_s32(0);
  for (int t = 0; t < num_tokens; t += 4, v += 4 * token_stride) {
    if (num_tokens - t < 4) row_offsets(num_tokens - t, token_stride, offset);
    if (prefetch) {
      UNROLL
      for (int j = 0; j < 4; j++) __builtin_prefetch(prefetch + 64 * (t + j), 0, 2);
    }
    int8x16_t row[4], codes[4];
    UNROLL
    for (int j = 0; j < 4; j++)
      row[j] = vectors == 4 ? vld1q_s8(v + offset[j]) : vcombine_s8(vld1_s8(v + offset[j]), vdup_n_s8(0));
    interleave_tokens(row, vectors, codes);
    UNROLL
    for (int i = 0; i < count; i++) {
      int8x16_t digits = vld1q_s8(weights->digits[i][t / 4]);
      UNROLL
      for (int c = 0; c < vectors; c++) dot_digits(sum[vectors * i + c], codes[c], digits, bytes);
    }
  }
  UNROLL
  for (int i = 0; i < count; i++) {
    float32x4_t joined[4];
    UNROLL
    for (int c = 0; c < vectors; c++)
      joined[c] = vmulq_n_f32(join_digits(sum[vectors * i + c], bytes), weights->scale[i]);
    add_to_acc(joined, vectors, alpha[i], acc + i * acc_stride, channels);
  }
}

KVEDGE_INLINE void weigh_dot_rows(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                  const int count, const int bytes, const encoded_weights *weights,
                                  const float *alpha, const char *prefetch, float *acc,
                                  ptrdiff_t acc_stride) {
  int d = 0;
#define BLOCK(rows, stride, channels, vectors)                                                  \
  weigh_dots(rows, stride, num_tokens, channels, weights, alpha, count, bytes, vectors,         \
             prefetch && d % 64 == 0 ? prefetch + d * num_tokens : NULL, acc + d, acc_stride)
  if (count <= 2)
    for (; d + 16 <= dim; d += 16) BLOCK(v + d, token_stride, 16, 4);
  for (; d + 8 <= dim; d += 8) BLOCK(v + d, token_stride, 8, 2);
  if (d < dim) {
    row_ends ends;
    tile_rows rows = {(const char *)(v + d), token_stride, num_tokens, 1.0f};
    gather_ends(rows, dim - d, sizeof(int8_t), &ends);
    BLOCK(ends.codes[0], 8, dim - d, 2);
  }
#undef BLOCK
}

KVEDGE_INLINE void weigh_of_bytes(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                  int num_queries, const int bytes, const float *p, const float *v_scale,
                                  const float *alpha, const void *prefetch, float *acc,
                                  ptrdiff_t acc_stride) {
  for (int i = 0; i < num_queries; i += DOT_WEIGH_QUERIES, prefetch = NULL) {
    int count = min_int(num_queries - i, DOT_WEIGH_QUERIES);
    encoded_weights weights;
    encode_weights(p + i * KVEDGE_TILE, v_scale, num_tokens, count, bytes, &weights);
#define ROWS(count)                                                                              \
  weigh_dot_rows(v, token_stride, num_tokens, dim, count, bytes, &weights, alpha + i, prefetch,  \
                 acc + i * acc_stride, acc_stride)
    switch (count) {
      case 1: ROWS(1); break;
      case 2: ROWS(2); break;
      case 3: ROWS(3); break;
      default: ROWS(4);
    }
#undef ROWS
  }
}

static void weighted_sum_i8_neondot(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                    int num_queries, int num_bytes, const float *p,
                                    const float *v_scale, const float *alpha, const void *prefetch,
                                    float *acc, ptrdiff_t acc_stride) {
#define WEIGH(bytes)                                                                            \
  weigh_of_bytes(v, token_stride, num_tokens, dim, num_queries, bytes, p, v_scale, alpha, prefetch, \
                 acc, acc_stride)
  if (num_bytes == 3) WEIGH(3);
  else WEIGH(2);
#undef WEIGH
}

static uint64_t multiply_neondot(size_t n) {
  int32x4_t sum[SUMS];
  int8x16_t keys = vdupq_n_s8(1);
  const int8x16_t codes = keys;
  UNROLL
  for (int j = 0; j < SUMS; j++) sum[j] = vdupq_n_s32(0);
  for (size_t i = 0; i < n; i += SUMS * 8) /* 16 bytes of keys with one of the two of codes */
    UNROLL
    for (int j = 0; j < SUMS; j++) {
      __asm__("" : "+w"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      sum[j] = vdotq_laneq_s32(sum[j], keys, codes, 0);
    }
  UNROLL
  for (int j = 1; j < SUMS; j++) sum[0] = vorrq_s32(sum[0], sum[j]);
  return (uint64_t)vgetq_lane_s32(sum[0], 0);
}

const kvedge_kernels kvedge_kernels_neondot =
    KVEDGE_NEON_TABLE("neondot", encode_query_neondot, scores_i8_neondot, weighted_sum_i8_neondot, multiply_neondot);

KVEDGE_TARGET_END
#endif
