/* NEON with the matrix product instruction of armv8.6, i8mm: Neoverse V1 and N2, Cortex-X2 and
 * A710, Apple M2 and later.
 *
 *   instruction                 what for                                   Neoverse N2    V1
 *   smmla v.4s, v.16b, v.16b    2 x 8 by 8 x 2 products                    3 (1), V01     3 (1), V0123
 *   zip1, zip2                  rows of two tokens, transposing            2, V01         2, V0123
 *   tbl v.16b, {v, v}           digits of eight codes                      2, V01         2, V0123
 *
 * smmla multiplies the rows of one register with those of another, twice as many products as
 * sdot has. Digits of queries and weights are as neondot.c has them; two rows of eight make a
 * register:
 *
 * Keys. One register has 8 channels of two tokens, by one zip; the other the high and middle
 * digits of a query, or the low digits of two queries. So one query fills the instruction too:
 * 64 bytes take 4 zip and 4 smmla (16 bits), where sdot takes 8 and 8.
 *
 * Values. One register has the digits of a query's weights of 8 tokens, the other two channels
 * of these tokens. Values are transposed for that, 8 channels of the tile at a time, once for
 * all queries: 12 zip for 64 bytes, then 4 smmla for each query. For fewer than eight queries
 * sdot takes less (dots.h).
 */
#include "kernels/kernels.h"

#if defined(__aarch64__)
#include "system/target.h"

#if !defined(__clang__)
KVEDGE_TARGET_BEGIN("arch=armv8.2-a+dotprod+i8mm")
#else
KVEDGE_TARGET_BEGIN("dotprod,i8mm")
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#define __ARM_FEATURE_MATMUL_INT8 1 /* before version 16, its arm_neon.h asks these and not the target */
#endif
#if !defined(__ARM_FEATURE_DOTPROD)
#define __ARM_FEATURE_DOTPROD 1
#endif
#endif

#include "kernels/neon/common.h"
#include "kernels/neon/codes.h"
#include "kernels/neon/floats.h"
#include "kernels/neon/int4.h"
#include "kernels/neon/dots.h"

/* Eight codes as {high x 8, middle x 8} and low x 8, as split_digits() has them. */
KVEDGE_INLINE void split_eight(int32x4_t first, int32x4_t second, int8_t *upper, int8_t *lower) {
  static const uint8_t order[24] = {2,  6,  10, 14, 18, 22, 26, 30, 1,  5,  9,  13,
                                    17, 21, 25, 29, 0,  4,  8,  12, 16, 20, 24, 28};
  const int32x4_t offset = vdupq_n_s32(0x808080);
  const int8x16x2_t digits = {
      {vreinterpretq_s8_s32(veorq_s32(vaddq_s32(first, offset), offset)),
       vreinterpretq_s8_s32(veorq_s32(vaddq_s32(second, offset), offset))}
  };
  vst1q_s8(upper, vqtbl2q_s8(digits, vld1q_u8(order)));
  vst1_s8(lower, vqtbl2_s8(digits, vld1_u8(order + 16)));
}

/* ---- scores ---- */

enum { CODES_OF_8 = 24, LOWER_AT = 16 }; /* of eight channels: upper digits, then lower ones */

static void encode_query_neoni8mm(const float *x, int dim, float factor, float largest, int planes, int8_t *codes,
                                  float *scale, int32_t *offsets) {
  const float inverse = divide_or_0(LARGEST_CODE, largest, largest);
  *scale = divide_or_0(largest, LARGEST_CODE, largest);
  vst1q_s32(offsets, vdupq_n_s32(0)); /* keys are signed here */
  if (planes == 1) {
    encode_query_bytes(x, dim, factor, inverse, codes);
    return;
  }
  for (int d = 0; d < kvedge_padded_channels(dim); d += 8, codes += CODES_OF_8) {
    int32x4_t four[2];
    UNROLLED (j, 2)
      four[j] = round_to_i32(vmulq_n_f32(vmulq_n_f32(load_query_f32(x, dim, d + 4 * j), factor), inverse));
    split_eight(four[0], four[1], codes, codes + LOWER_AT);
  }
}

enum { LOWER_SUMS = 2 * SCORE_QUERIES }; /* behind two registers of each query's upper digits, of two tokens each */

KVEDGE_INLINE int8x16_t rows_of_two(int8x16_t first, int8x16_t second, const int half) {
  const int64x2_t a = vreinterpretq_s64_s8(first), b = vreinterpretq_s64_s8(second);
  return vreinterpretq_s8_s64(half == 0 ? vzip1q_s64(a, b) : vzip2q_s64(a, b));
}

KVEDGE_INLINE void score_16_matrix(const int8_t *codes, ptrdiff_t stride, const int8_t *rows, const ptrdiff_t offset[4],
                                   const int count, const int planes, int32x4_t sum[SCORE_SUMS]) {
  int8x16_t row[4];
  UNROLLED (j, 4) row[j] = vld1q_s8(rows + offset[j]);
  UNROLLED (half, 2) {
    const int8x16_t two[2] = {rows_of_two(row[0], row[1], half), rows_of_two(row[2], row[3], half)};
    UNROLLED (i, count) {
      const int8x16_t upper = vld1q_s8(codes + i * stride + CODES_OF_8 * half);
      UNROLLED (k, 2) sum[2 * i + k] = vmmlaq_s32(sum[2 * i + k], two[k], upper);
    }
    if (planes == 3)
      UNROLLED (i, count) {
        if (i % 2) continue;
        const int8_t *lower = codes + i * stride + CODES_OF_8 * half + LOWER_AT;
        const int8x16_t of_two = vcombine_s8(vld1_s8(lower), i + 1 < count ? vld1_s8(lower + stride) : vdup_n_s8(0));
        UNROLLED (k, 2) sum[LOWER_SUMS + i + k] = vmmlaq_s32(sum[LOWER_SUMS + i + k], two[k], of_two);
      }
  }
}

KVEDGE_INLINE float32x4_t join_matrix(const int32x4_t sum[SCORE_SUMS], const int i, const int planes) {
  const int32x4_t *upper = sum + 2 * i, *lower = sum + LOWER_SUMS + i / 2 * 2;
  const int32x4_t digits[3] = {vuzp1q_s32(upper[0], upper[1]), vuzp2q_s32(upper[0], upper[1]),
                               i % 2 ? vuzp2q_s32(lower[0], lower[1]) : vuzp1q_s32(lower[0], lower[1])};
  return join_digits(digits, planes);
}

static void scores_int8_neoni8mm(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  if (q->planes == 1) {
    scores_in_bytes(q, keys, scores, accumulate);
    return;
  }
  const token_stretches stretches = stretches_of(keys);
#define SCORE(count)                                                                                                   \
  if (q->planes == 3)                                                                                                  \
    score_stretches(q, i, count, 3, 2 * CODES_OF_8, score_16_matrix, join_matrix, keys, &stretches, scores,            \
                    accumulate);                                                                                       \
  else                                                                                                                 \
    score_stretches(q, i, count, 2, 2 * CODES_OF_8, score_16_matrix, join_matrix, keys, &stretches, scores, accumulate)
  BY_QUERIES(i, q->num_queries, SCORE)
#undef SCORE
}

/* ---- weighted sums ---- */

enum {
  MATRIX_QUERIES = 4, /* whose sums stay in registers, of 8 channels: 16, and 8 of lower digits */
  MATRIX_LEAST = 8,   /* queries from which on it pays to transpose values */
  GROUPS = KVEDGE_TILE / 8,
};

/* p * scales of up to MATRIX_QUERIES query rows, each relative to its largest, of 8 tokens at a time. */
typedef struct {
  int8_t upper[GROUPS][MATRIX_QUERIES][16];
  int8_t lower[GROUPS][MATRIX_QUERIES][8]; /* two queries' side by side; zeros where there is no second */
  float scale[MATRIX_QUERIES];
} matrix_weights;

KVEDGE_INLINE void encode_matrix_weights(const float *p, const float *scales, int num_tokens, int count,
                                         const int planes, matrix_weights *weights) {
  const float most = planes == 3 ? LARGEST_CODE : LARGEST_CODE_16;
  for (int i = 0; i < count; i++, p += KVEDGE_TILE) {
    float w[KVEDGE_TILE];
    const float largest = weights_of_tokens(p, scales, num_tokens, w), factor = divide_or_0(most, largest, largest);
    weights->scale[i] = divide_or_0(largest, most, largest);
    for (int t = 0; t < num_tokens; t += 8) {
      int32x4_t codes[2];
      UNROLLED (j, 2) codes[j] = round_weights(vld1q_f32(w + t + 4 * j), factor, t + 4 * j, planes);
      split_eight(codes[0], codes[1], weights->upper[t / 8][i], weights->lower[t / 8][i]);
    }
  }
  if (count % 2)
    for (int g = 0; 8 * g < num_tokens; g++) memset(weights->lower[g][count], 0, sizeof weights->lower[g][count]);
}

/* Eight channels of eight tokens: channels 2j and 2j + 1 in columns[j]. Of a partial slice only the first `channels`
 * exist. */
KVEDGE_INLINE void transpose_8x8(const int8_t *rows, const ptrdiff_t offset[8], int channels, int8x16_t columns[4]) {
  int8x16_t row[8];
  int16x8_t two[4], four[4];
  UNROLLED (j, 8) {
    const int8_t *at = rows + offset[j];
    row[j] = vcombine_s8(channels >= 8 ? vld1_s8(at) : vcreate_s8(load_below_8(at, channels)), vdup_n_s8(0));
  }
  UNROLLED (j, 4) two[j] = vreinterpretq_s16_s8(vzip1q_s8(row[2 * j], row[2 * j + 1]));
  UNROLLED (j, 2) {
    four[j] = vzip1q_s16(two[2 * j], two[2 * j + 1]); /* channels 0 to 3 of four tokens */
    four[2 + j] = vzip2q_s16(two[2 * j], two[2 * j + 1]);
  }
  UNROLLED (j, 2) {
    const int32x4_t a = vreinterpretq_s32_s16(four[2 * j]), b = vreinterpretq_s32_s16(four[2 * j + 1]);
    columns[2 * j] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    columns[2 * j + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

/* Channels from `channel` on of all tokens, (tokens / 8, 4), the last token in the place of those that are missing. */
static void transpose_slice(const kvedge_tile *values, int channel, int8x16_t (*columns)[4]) {
  const int channels = min_int(values->dim - channel, 8);
  ptrdiff_t offset[8];
  UNROLLED (j, 8) offset[j] = j * values->token_stride;
  for (int t = 0; t < values->num_tokens; t += 8, columns++) {
    const int left = values->num_tokens - t;
    const int8_t *rows = (const int8_t *)kvedge_tile_row(values, t) + channel;
    for (int j = left; j < 8; j++) offset[j] = offset[left - 1];
    if (values->next.blocks && t % KVEDGE_BLOCK == 0) {
      uintptr_t next = (uintptr_t)values->next.blocks[t / KVEDGE_BLOCK] +
                       (uintptr_t)(values->next.offset + channel * min_int(left, KVEDGE_BLOCK));
      prefetch_line(&next), prefetch_line(&next);
    }
    if (channels == 8) transpose_8x8(rows, offset, 8, *columns);
    else transpose_8x8(rows, offset, channels, *columns);
  }
}

/* Adds such channels, `channels` of 8, times the weights of `count` query rows. */
KVEDGE_INLINE void sum_matrix(const int8x16_t (*columns)[4], int num_tokens, int channels,
                              const matrix_weights *weights, const int count, const int planes, const float *rescale,
                              float *acc, ptrdiff_t acc_stride) {
  int32x4_t upper[MATRIX_QUERIES][4], lower[MATRIX_QUERIES][4]; /* of two channels; lower: of two queries */
  UNROLLED (i, count)
    UNROLLED (j, 4) upper[i][j] = lower[i][j] = vdupq_n_s32(0);
  for (int g = 0; 8 * g < num_tokens; g++, columns++) {
    UNROLLED (i, count) {
      const int8x16_t digits = vld1q_s8(weights->upper[g][i]);
      UNROLLED (j, 4) upper[i][j] = vmmlaq_s32(upper[i][j], digits, columns[0][j]);
    }
    if (planes == 3)
      UNROLLED (i, count) {
        if (i % 2) continue;
        const int8x16_t digits = vld1q_s8(weights->lower[g][i]);
        UNROLLED (j, 4) lower[i][j] = vmmlaq_s32(lower[i][j], digits, columns[0][j]);
      }
  }
  UNROLLED (i, count) {
    float32x4_t joined[2];
    UNROLLED (v, 2) {
      const int64x2_t a = vreinterpretq_s64_s32(upper[i][2 * v]), b = vreinterpretq_s64_s32(upper[i][2 * v + 1]);
      const int64x2_t c = vreinterpretq_s64_s32(lower[i / 2 * 2][2 * v]);
      const int64x2_t d = vreinterpretq_s64_s32(lower[i / 2 * 2][2 * v + 1]);
      const int32x4_t digits[3] = {vreinterpretq_s32_s64(vzip1q_s64(a, b)), vreinterpretq_s32_s64(vzip2q_s64(a, b)),
                                   vreinterpretq_s32_s64(i % 2 ? vzip2q_s64(c, d) : vzip1q_s64(c, d))};
      joined[v] = vmulq_n_f32(join_digits(digits, planes), weights->scale[i]);
    }
    add_to_acc(joined, 2, rescale[i], acc + i * acc_stride, channels);
  }
}

KVEDGE_INLINE void sum_by_matrix(const kvedge_probabilities *p, const int planes, const kvedge_tile *values,
                                 const kvedge_accumulators *to) {
  struct {
    matrix_weights weights[KVEDGE_QUERY_ROWS / MATRIX_QUERIES];
    int8x16_t columns[GROUPS][4];
  } *room = (void *)p->scratch;
  matrix_weights *weights = room->weights;
  int8x16_t(*columns)[4] = room->columns;
  const int n = p->num_queries;
  for (int i = 0; i < n; i += MATRIX_QUERIES)
    encode_matrix_weights(p->p + i * KVEDGE_TILE, values->scales, values->num_tokens, min_int(n - i, MATRIX_QUERIES),
                          planes, &weights[i / MATRIX_QUERIES]);
  for (int d = 0; d < values->dim; d += 8) {
    transpose_slice(values, d, columns);
#define SUM(count)                                                                                                     \
  sum_matrix((const int8x16_t(*)[4])columns, values->num_tokens, values->dim - d, &weights[i / MATRIX_QUERIES], count, \
             planes, to->rescale + i, to->acc + i * to->stride + d, to->stride)
    BY_QUERIES(i, n, SUM)
#undef SUM
  }
}

static void weighted_sum_int8_neoni8mm(const kvedge_probabilities *p, const kvedge_tile *values,
                                       const kvedge_accumulators *to) {
  if (p->planes > 1 && p->num_queries >= MATRIX_LEAST) {
    if (p->planes == 3) sum_by_matrix(p, 3, values, to);
    else sum_by_matrix(p, 2, values, to);
    return;
  }
  const token_stretches stretches = stretches_of(values);
#define SUM(count)                                                                                                     \
  if (p->planes == 3) sum_queries(p, i, count, 3, values, &stretches, to);                                             \
  else if (p->planes == 2) sum_queries(p, i, count, 2, values, &stretches, to);                                        \
  else sum_queries(p, i, count, 1, values, &stretches, to)
  BY_QUERIES(i, p->num_queries, SUM)
#undef SUM
}

KVEDGE_INT4_FUNCTIONS(neoni8mm, scores_int8_neoni8mm, weighted_sum_int8_neoni8mm)
#define KVEDGE_MATRIX_CELL(name)                                                                                       \
  {.encode_query = encode_query_neoni8mm,                                                                              \
   .scores = scores_##name##_neoni8mm,                                                                                 \
   .weighted_sum = weighted_sum_##name##_neoni8mm}

static uint64_t multiply_neoni8mm(size_t n) {
  int32x4_t sum[SUMS];
  int8x16_t keys = vdupq_n_s8(1);
  const int8x16_t codes = keys;
  UNROLLED (j, SUMS) sum[j] = vdupq_n_s32(0);
  for (size_t i = 0; i < n; i += SUMS * 16) /* 16 bytes of keys with both digits of codes */
    UNROLLED (j, SUMS) {
      __asm__("" : "+w"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      sum[j] = vmmlaq_s32(sum[j], keys, codes);
    }
  for (int j = 1; j < SUMS; j++) sum[0] = vorrq_s32(sum[0], sum[j]);
  return (uint64_t)vgetq_lane_s32(sum[0], 0);
}

#define KVEDGE_NAME(function) function##_neoni8mm
#include "kernels/neon/kivi.h"
#include "kernels/blocks.h"
KVEDGE_BLOCKS_FUNCTIONS(neoni8mm, KVEDGE_MATRIX_CELL(int8))
const kvedge_kernels kvedge_kernels_neoni8mm =
    KVEDGE_NEON_TABLE("neoni8mm", KVEDGE_MATRIX_CELL(int8), KVEDGE_MATRIX_CELL(int4), KVEDGE_NEON_RUNS,
                      KVEDGE_BLOCKS_CELL(neoni8mm, encode_query_neoni8mm), multiply_neoni8mm);

KVEDGE_TARGET_END
#endif
