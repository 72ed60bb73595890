/* NEON with the dot product instructions of armv8.2: Raspberry Pi 5 (Cortex-A76) and later.
 *
 *   instruction               what for                              Cortex-A76
 *   sdot v.4s, v.16b, v.4b[i] 4 tokens (channels) x 4 products      3 (1 from sum to sum), V01
 *   trn1, trn2, zip1, zip2    transposing                           2, V01
 *   tbl v.16b                 bytes of codes into digits            2, V01
 *
 * A query, and the quantized probabilities of a tile, are integers of 24 bits in three planes (kernels.h),
 * 16 bytes for four elements. So one register holds all planes of four elements, and sdot picks a plane by
 * its lane number. With two planes (16 bits) or one, the high two are multiplied.
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

/* ---- integers of 24 bits in three planes of signed digits, or 16 bits in two ---- */

/* What the largest weight of a tile becomes in 16 bits: 127 * 257 - 1, as high digits. */
#define LARGEST_CODE_16 (32638.0f * 256.0f)

/* Codes 65536 * high + 256 * middle + low as {high x 4, middle x 4, low x 4, 0 x 4}. With 128 added to
 * each digit the digits are plain bytes, and inverting a byte's top bit takes 128 off. */
KVEDGE_INLINE int8x16_t split_digits(int32x4_t codes) {
  static const uint8_t order[16] = {2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15};
  const int32x4_t offset = vdupq_n_s32(0x808080);
  int32x4_t digits = veorq_s32(vaddq_s32(codes, offset), offset);
  return vqtbl1q_s8(vreinterpretq_s8_s32(digits), vld1q_u8(order));
}

/* The sums of four lanes' digits become one number each. A digit's sum is below 128 * 127 * 1024 =
 * 2^24 and exact as a float, where the three together would not fit an integer. */
KVEDGE_INLINE float32x4_t join_digits(const int32x4_t sum[3], const int planes) {
  float32x4_t upper = vfmaq_n_f32(vcvtq_f32_s32(sum[1]), vcvtq_f32_s32(sum[0]), 256.0f);
  return planes == 3 ? vfmaq_n_f32(vcvtq_f32_s32(sum[2]), upper, 256.0f) : vmulq_n_f32(upper, 256.0f);
}

/* sum += for each of four lanes, its four codes times four encoded values of 2 or 3 planes */
KVEDGE_INLINE void dot_digits(int32x4_t sum[3], int8x16_t codes, int8x16_t digits, const int planes) {
  sum[0] = vdotq_laneq_s32(sum[0], codes, digits, 0);
  sum[1] = vdotq_laneq_s32(sum[1], codes, digits, 1);
  if (planes == 3) sum[2] = vdotq_laneq_s32(sum[2], codes, digits, 2);
}

/* ---- scores ---- */

static void encode_query_neondot(const float *x, int dim, float factor, float largest, int8_t *codes, float *scale,
                                 int32_t *offsets) {
  float inverse = divide_or_0(LARGEST_CODE, largest, largest);
  for (int d = 0; d < kvedge_padded_channels(dim); d += 4) {
    const float32x4_t four = vmulq_n_f32(vmulq_n_f32(load_query_f32(x, dim, d), factor), inverse);
    vst1q_s8(codes + 4 * d, split_digits(round_to_i32(four)));
  }
  *scale = divide_or_0(largest, LARGEST_CODE, largest);
  vst1q_s32(offsets, vdupq_n_s32(0)); /* keys are signed here */
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
                                     const ptrdiff_t offset[4], const int count, const int planes,
                                     int32x4_t sum[DOT_SCORE_QUERIES][3]) {
  int8x16_t k[4], column[4];
  UNROLLED (j, 4) k[j] = vld1q_s8(rows + offset[j]);
  transpose_4x4(k, column);
  UNROLLED (c, 4)
    UNROLLED (i, count) dot_digits(sum[i], column[c], vld1q_s8(codes + i * stride + 16 * c), planes);
}

/* Scores of all tokens for `count` queries from `first` on; the next tile is prefetched with the first of them. */
KVEDGE_INLINE void score_dots(const kvedge_query *q, int first, const int count, const int planes,
                              const kvedge_tile *keys, const token_runs *runs, float *scores, int accumulate) {
  const int whole = q->dim / 16 * 16;
  const ptrdiff_t code_stride = KVEDGE_CODE_BYTES * q->stride;
  const int8_t *codes = q->codes + first * code_stride; /* (count, code_stride), padded with zeros */
  float unit[DOT_SCORE_QUERIES];
  UNROLLED (i, count) unit[i] = q->scale[(first + i) * q->scale_stride];
  scores += first * KVEDGE_TILE;
  const token_run *run = runs->run;
  for (int r = 0, t = 0; r < runs->count; r++, run++) {
    const int8_t *rows = (const int8_t *)run->rows;
    uintptr_t next = next_of_run(run, 0, first == 0);
    ptrdiff_t offset[4];
    row_offsets(run->num_tokens, keys->token_stride, offset);
    for (const int end = t + run->num_tokens; t < end; t += 4, rows += 4 * keys->token_stride) {
      int32x4_t sum[DOT_SCORE_QUERIES][3];
      UNROLLED (i, count) sum[i][0] = sum[i][1] = sum[i][2] = vdupq_n_s32(0);
      const int8_t *of_16 = codes;
      for (int d = 0; d < whole; d += 16, of_16 += 64) {
        prefetch_line(&next);
        score_16_channels(of_16, code_stride, rows + d, offset, count, planes, sum);
      }
      if (whole < q->dim) {
        int8_t ends[4 * 16];
        if (q->dim - whole >= 8) prefetch_line(&next);
        gather_ends_16(rows + whole, offset, q->dim - whole, ends);
        score_16_channels(of_16, code_stride, ends, end_offset_16, count, planes, sum);
      }
      const float32x4_t scale = vld1q_f32(keys->scales + t);
      UNROLLED (i, count) {
        const float32x4_t dot = vmulq_n_f32(join_digits(sum[i], planes), unit[i]);
        store_scores(vmulq_f32(dot, scale), accumulate, scores + i * KVEDGE_TILE + t);
      }
    }
  }
}

static void scores_int8_neondot(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  const token_runs runs = runs_of(keys);
#define SCORE(count)                                                                                                   \
  if (q->planes == 3) score_dots(q, i, count, 3, keys, &runs, scores, accumulate);                                            \
  else score_dots(q, i, count, 2, keys, &runs, scores, accumulate)
  BY_QUERIES(i, q->num_queries, SCORE)
#undef SCORE
}

/* ---- weighted sum ---- */

enum { DOT_WEIGH_QUERIES = 4, DOT_WEIGH_SUMS = 8 }; /* x 3 digits = 24 registers of sums */

/* p * scales of up to DOT_WEIGH_QUERIES query rows, each relative to its largest. */
typedef struct {
  int8_t digits[KVEDGE_TILE / 4][DOT_WEIGH_QUERIES][16]; /* of four tokens: (tokens / 4, num_queries) side by side */
  float scale[DOT_WEIGH_QUERIES];
} encoded_weights;

KVEDGE_INLINE void encode_weights(const float *p, const float *scales, int num_tokens, int num_queries,
                                  const int planes, encoded_weights *weights) {
  const float most = planes == 3 ? LARGEST_CODE : LARGEST_CODE_16;
  for (int i = 0; i < num_queries; i++, p += KVEDGE_TILE) {
    float w[KVEDGE_TILE];
    const float largest = weigh_tokens(p, scales, num_tokens, w), factor = divide_or_0(most, largest, largest);
    weights->scale[i] = divide_or_0(largest, most, largest);
    for (int t = 0; t < num_tokens; t += 8)
      UNROLLED (j, 2) {
        const float32x4_t four = vld1q_f32(w + t + 4 * j);
        int32x4_t codes; /* of 24 bits, those of 16 with a last digit of 0 */
        if (planes == 3) codes = round_to_i32(vmulq_n_f32(four, factor));
        else
          codes = vshlq_n_s32(
              round_dithered(vmulq_n_f32(four, factor / 256.0f), vld1q_f32(kvedge_dither + t + 4 * j)), 8);
        vst1q_s8(weights->digits[t / 4 + j][i], split_digits(codes));
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

/* The sums of 4 * vectors channels from `channel` on, vectors 2 or 4, for `count` query rows, held in registers over
 * the tile. Of a partial slice (vectors is 2) only the first `channels` exist. */
KVEDGE_INLINE void weigh_dots(const kvedge_tile *values, const token_runs *runs, int channel, int channels, const int partial,
                              const encoded_weights *weights, const int count, const int planes, const int vectors,
                              const int prefetch, const float *rescale, float *acc, ptrdiff_t acc_stride) {
  int32x4_t sum[DOT_WEIGH_SUMS][3]; /* (count, vectors) */
  UNROLLED (s, count * vectors) sum[s][0] = sum[s][1] = sum[s][2] = vdupq_n_s32(0);
  const token_run *run = runs->run;
  const int8_t(*digits)[16] = weights->digits[0]; /* (tokens / 4, DOT_WEIGH_QUERIES) */
  for (int r = 0; r < runs->count; r++, run++) {
    const char *rows = run->rows + channel;
    uintptr_t next = next_of_run(run, channel, prefetch);
    ptrdiff_t offset[4];
    row_offsets(run->num_tokens, values->token_stride, offset);
    const unsigned groups = ((unsigned)run->num_tokens + 3) / 4;
    for (unsigned g = 0; g < groups; g++, rows += 4 * values->token_stride, digits += DOT_WEIGH_QUERIES) {
      const int8_t *v = (const int8_t *)rows;
      const ptrdiff_t *at = offset;
      char ends[4 * END_BYTES];
      prefetch_of_group(&next, g, partial ? 8 : 4 * vectors);
      if (partial) {
        gather_ends(rows, offset, channels, 1, ends);
        v = (const int8_t *)ends;
        at = end_offset;
      }
      int8x16_t row[4], codes[4];
      UNROLLED (j, 4) row[j] = vectors == 4 ? vld1q_s8(v + at[j]) : vcombine_s8(vld1_s8(v + at[j]), vdup_n_s8(0));
      interleave_tokens(row, vectors, codes);
      UNROLLED (i, count) {
        const int8x16_t of_query = vld1q_s8(digits[i]);
        UNROLLED (c, vectors) dot_digits(sum[vectors * i + c], codes[c], of_query, planes);
      }
    }
  }
  UNROLLED (i, count) {
    float32x4_t joined[4];
    UNROLLED (c, vectors) joined[c] = vmulq_n_f32(join_digits(sum[vectors * i + c], planes), weights->scale[i]);
    add_to_acc(joined, vectors, rescale[i], acc + channel + i * acc_stride, channels);
  }
}

KVEDGE_INLINE void weigh_dot_channels(const kvedge_tile *values, const token_runs *runs, const int count, const int planes,
                                      const encoded_weights *weights, int prefetch, const float *rescale, float *acc,
                                      ptrdiff_t acc_stride) {
  const int dim = values->dim;
  int d = 0;
#define SLICE(channels, partial, vectors)                                                                              \
  weigh_dots(values, runs, d, channels, partial, weights, count, planes, vectors, prefetch, rescale, acc, acc_stride)
  if (count <= 2)
    for (; d + 16 <= dim; d += 16) SLICE(16, 0, 4);
  for (; d + 8 <= dim; d += 8) SLICE(8, 0, 2);
  if (d < dim) SLICE(dim - d, 1, 2);
#undef SLICE
}

KVEDGE_INLINE void weigh_tile(const kvedge_probabilities *p, const int planes, const kvedge_tile *values,
                              const kvedge_accumulators *to) {
  const token_runs runs = runs_of(values);
  for (int i = 0; i < p->num_queries; i += DOT_WEIGH_QUERIES) {
    const int count = min_int(p->num_queries - i, DOT_WEIGH_QUERIES);
    encoded_weights weights;
    encode_weights(p->p + i * KVEDGE_TILE, values->scales, values->num_tokens, count, planes, &weights);
#define QUERIES(count)                                                                                                 \
  weigh_dot_channels(values, &runs, count, planes, &weights, i == 0, to->rescale + i, to->acc + i * to->stride, to->stride)
    switch (count) {
      case 1: QUERIES(1); break;
      case 2: QUERIES(2); break;
      case 3: QUERIES(3); break;
      default: QUERIES(4);
    }
#undef QUERIES
  }
}

static void weighted_sum_int8_neondot(const kvedge_probabilities *p, const kvedge_tile *values,
                                      const kvedge_accumulators *to) {
  if (p->planes == 3) weigh_tile(p, 3, values, to);
  else weigh_tile(p, 2, values, to);
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

const kvedge_kernels kvedge_kernels_neondot =
    KVEDGE_NEON_TABLE("neondot", KVEDGE_NEONDOT_INT8_CELL, KVEDGE_NEONDOT_INT4_CELL, multiply_neondot);

KVEDGE_TARGET_END
#endif
