/* AVX-512 with VNNI: Cascade Lake, Ice Lake and later servers, Zen 4 and later.
 *
 *   instruction               what for                    Cascade Lake        Zen 4
 *   vpdpbusd zmm, zmm, m32    u8 keys x s8 query          5 cycles, p05       4, FP01 (2 x 256)
 *   vpdpwssd zmm, zmm, m32    s16 values x s16 weights    5 cycles, p05       4, FP01
 *   vpunpck*, vshufi32x4      transposing keys            1-3 cycles, p5      1-2, FP12
 *   vpmovsxbw zmm, m256       widening values             3 cycles, p5        3, FP12
 *
 * Keys. A dot product along a row ends in a sum across lanes, which costs more than the product.
 * So 16 tokens are transposed, 4 channels (one dword) at a time: lane t of column j holds channels
 * 4j..4j+3 of token t, and vpdpbusd with a broadcast dword of the query leaves token t's score in
 * lane t. The transpose (4 shuffles per 64-byte line) is done once for all stacked queries, each of
 * which then costs 3 instructions per line, one for each byte of its 24-bit code.
 * vpdpbusd wants unsigned keys: k + 128 = k xor 0x80, and 128 * sum(query) is taken off at the end.
 *
 * Values. Rows of two tokens are widened to 16 bits and interleaved, so that vpdpwssd with a
 * broadcast pair of weights adds both tokens to 16 channels: 4 shuffles per line for all queries,
 * 2 instructions per line and query, sums in registers over the whole tile.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#include "kernels_portable.h"

enum {
  BLOCK = 16,        /* tokens transposed at a time: one per 32-bit lane */
  SCORE_QUERIES = 8, /* x 3 accumulators = 24 of the 32 registers */
  SUM_QUERIES = 6,   /* x 4 accumulators = 24 of the 32 registers */
};

static uint32_t abs_max_bits_avx512vnni(const float *x, size_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i a = _mm512_setzero_si512(), b = a;
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    b = _mm512_max_epu32(b, _mm512_and_si512(_mm512_loadu_si512(x + i + 16), magnitude));
  }
  for (; i < n; i += 16) {
    __mmask16 valid = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
    a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_maskz_loadu_epi32(valid, x + i), magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

static void quantize_avx512vnni(const float *x, size_t n, float inverse, int8_t *codes) {
  const __m512 factor = _mm512_set1_ps(inverse);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
    _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtsepi32_epi8(rounded));
  }
  if (i < n) {
    __mmask16 valid = (__mmask16)((1u << (n - i)) - 1);
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(valid, x + i), factor));
    _mm512_mask_cvtsepi32_storeu_epi8(codes + i, valid, rounded);
  }
}

/* Rows 0..15 of dwords become columns: after it, lane t of out[j] is dword j of row t. */
KVEDGE_INLINE void transpose_16x16(const __m512i row[BLOCK], __m512i out[BLOCK]) {
  __m512i pairs[BLOCK], quads[BLOCK];
  for (int i = 0; i < BLOCK; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < BLOCK; i += 4) { /* quads[i + c]: dword 4L + c of rows i..i+3 in lane group L */
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    __m512i even_a = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0x88); /* lane groups 0, 2 */
    __m512i odd_a = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0xdd);  /* lane groups 1, 3 */
    __m512i even_b = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0x88);
    __m512i odd_b = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0xdd);
    out[c] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
    out[8 + c] = _mm512_shuffle_i32x4(even_a, even_b, 0xdd);
    out[4 + c] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
    out[12 + c] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
  }
}

/* columns[j]: channels 4j..4j+3 of 16 tokens, as unsigned bytes. Rows past the last token repeat
 * it, channels past the last are 128. */
KVEDGE_INLINE void transpose_keys(const int8_t *k, ptrdiff_t token_stride, int num_tokens, int dim,
                                  const char *prefetch, __m512i *columns) {
  const __m512i to_unsigned = _mm512_set1_epi8((char)0x80);
  for (int d = 0; d < dim; d += 64) {
    __mmask64 valid = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
    __m512i row[BLOCK];
#pragma GCC unroll 16
    for (int t = 0; t < BLOCK; t++) {
      int token = t < num_tokens ? t : num_tokens - 1;
      const int8_t *from = k + token * token_stride + d;
      row[t] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(valid, from), to_unsigned);
      if (prefetch) _mm_prefetch(prefetch + token * token_stride + d, _MM_HINT_T0);
    }
    transpose_16x16(row, columns + d / 4);
  }
}

/* Scores of 16 tokens for `count` queries (a constant where this is inlined). */
KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count,
                               const __m512i *columns, __mmask16 valid, __m512 k_scale,
                               float *scores, int accumulate) {
  __m512i sum[SCORE_QUERIES][3]; /* of each byte of the query */
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) /* u8 keys are 128 too large: start from what that adds */
    for (int b = 0; b < 3; b++)
      sum[i][b] = _mm512_set1_epi32(-128 * q->sums[b][(first + i) * q->scale_stride]);
  int num_columns = (q->dim + 3) / 4;
  for (int j = 0; j < num_columns; j++) {
    __m512i column = columns[j];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
      for (int b = 0; b < 3; b++) {
        int32_t four; /* channels */
        memcpy(&four, q->bytes[b] + (first + i) * q->stride + 4 * j, sizeof four);
        sum[i][b] = _mm512_dpbusd_epi32(sum[i][b], column, _mm512_set1_epi32(four));
      }
  }
  const __m512 byte = _mm512_set1_ps(256.0f);
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    __m512 dot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i][0]), byte, _mm512_cvtepi32_ps(sum[i][1]));
    dot = _mm512_fmadd_ps(dot, byte, _mm512_cvtepi32_ps(sum[i][2]));
    __m512 scale = _mm512_mul_ps(k_scale, _mm512_set1_ps(q->scale[(first + i) * q->scale_stride]));
    float *out = scores + (first + i) * KVEDGE_TILE;
    __m512 score = _mm512_mul_ps(dot, scale);
    if (accumulate) score = _mm512_add_ps(score, _mm512_maskz_loadu_ps(valid, out));
    _mm512_mask_storeu_ps(out, valid, score);
  }
}

static void scores_i8_avx512vnni(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                                 int num_tokens, const float *k_scale, const void *prefetch,
                                 float *scores, int accumulate) {
  __m512i columns[1024 / 4]; /* (dim / 4) x 16 tokens x 4 channels; what a dim of 64 uses is 1 KB */
  for (int t = 0; t < num_tokens; t += BLOCK) {
    int tokens = num_tokens - t < BLOCK ? num_tokens - t : BLOCK;
    __mmask16 valid = (__mmask16)((1u << tokens) - 1);
    const char *ahead = prefetch ? (const char *)prefetch + t * token_stride : NULL;
    transpose_keys(k + t * token_stride, token_stride, tokens, q->dim, ahead, columns);
    __m512 scale = _mm512_maskz_loadu_ps(valid, k_scale + t);
    int i = 0;
    for (; i + SCORE_QUERIES <= q->num_queries; i += SCORE_QUERIES)
      score_block(q, i, SCORE_QUERIES, columns, valid, scale, scores + t, accumulate);
    switch (q->num_queries - i) {
      case 7: score_block(q, i, 7, columns, valid, scale, scores + t, accumulate); break;
      case 6: score_block(q, i, 6, columns, valid, scale, scores + t, accumulate); break;
      case 5: score_block(q, i, 5, columns, valid, scale, scores + t, accumulate); break;
      case 4: score_block(q, i, 4, columns, valid, scale, scores + t, accumulate); break;
      case 3: score_block(q, i, 3, columns, valid, scale, scores + t, accumulate); break;
      case 2: score_block(q, i, 2, columns, valid, scale, scores + t, accumulate); break;
      case 1: score_block(q, i, 1, columns, valid, scale, scores + t, accumulate); break;
    }
  }
}

/* Adds a tile's values to 64 channels (those in `valid`) of `count` queries (a constant where this
 * is inlined). */
KVEDGE_INLINE void weighted_sum_block(const int8_t *v, ptrdiff_t token_stride, int num_tokens,
                                      __mmask64 valid, const int count, const int16_t *weights,
                                      const float *w_scale, const float *alpha, const char *prefetch,
                                      float *acc, ptrdiff_t acc_stride) {
  const __mmask32 valid_low = (__mmask32)valid, valid_high = (__mmask32)(valid >> 32);
  __m512i sum[SUM_QUERIES][4]; /* 16 channels each, in the order that the interleaving leaves */
#pragma GCC unroll 6
  for (int i = 0; i < count; i++)
    for (int c = 0; c < 4; c++) sum[i][c] = _mm512_setzero_si512();
  for (int t = 0; t < num_tokens; t += 2) {
    const int8_t *even = v + t * token_stride;
    const int8_t *odd = t + 1 < num_tokens ? even + token_stride : even; /* its weight is 0 */
    if (prefetch) {
      _mm_prefetch(prefetch + t * token_stride, _MM_HINT_T0);
      _mm_prefetch(prefetch + (t + 1) * token_stride, _MM_HINT_T0);
    }
    __m512i even_low = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(valid_low, even));
    __m512i odd_low = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(valid_low, odd));
    __m512i even_high = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(valid_high, even + 32));
    __m512i odd_high = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(valid_high, odd + 32));
    __m512i pair[4] = {
        _mm512_unpacklo_epi16(even_low, odd_low),   /* channels 0-3, 8-11, 16-19, 24-27 */
        _mm512_unpackhi_epi16(even_low, odd_low),   /* channels 4-7, 12-15, 20-23, 28-31 */
        _mm512_unpacklo_epi16(even_high, odd_high), /* the same + 32 */
        _mm512_unpackhi_epi16(even_high, odd_high),
    };
#pragma GCC unroll 6
    for (int i = 0; i < count; i++) {
      int32_t both;
      memcpy(&both, weights + i * KVEDGE_TILE + t, sizeof both);
      for (int c = 0; c < 4; c++)
        sum[i][c] = _mm512_dpwssd_epi32(sum[i][c], pair[c], _mm512_set1_epi32(both));
    }
  }
  const __m512i first_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second_half = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 6
  for (int i = 0; i < count; i++) {
    __m512 old = _mm512_set1_ps(alpha[i]), scale = _mm512_set1_ps(w_scale[i]);
    float *out = acc + i * acc_stride;
    for (int c = 0; c < 4; c += 2) {
      __m512i ordered[2] = {_mm512_permutex2var_epi32(sum[i][c], first_half, sum[i][c + 1]),
                            _mm512_permutex2var_epi32(sum[i][c], second_half, sum[i][c + 1])};
      for (int h = 0; h < 2; h++) {
        int channel = 16 * (c + h);
        __mmask16 mask = (__mmask16)(valid >> channel);
        __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, out + channel), old);
        _mm512_mask_storeu_ps(out + channel, mask,
                              _mm512_fmadd_ps(_mm512_cvtepi32_ps(ordered[h]), scale, kept));
      }
    }
  }
}

static void weighted_sum_i8_avx512vnni(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                       int num_queries, const int16_t *weights, const float *w_scale,
                                       const float *alpha, const void *prefetch, float *acc,
                                       ptrdiff_t acc_stride) {
  for (int d = 0; d < dim; d += 64) {
    __mmask64 valid = dim - d >= 64 ? ~0ull : (1ull << (dim - d)) - 1;
    const char *ahead = prefetch ? (const char *)prefetch + d : NULL;
    for (int i = 0; i < num_queries; i += SUM_QUERIES) {
      const int16_t *w = weights + i * KVEDGE_TILE;
      float *out = acc + i * acc_stride + d;
#define WEIGHTED_SUM(count)                                                                       \
  weighted_sum_block(v + d, token_stride, num_tokens, valid, count, w, w_scale + i, alpha + i, \
                     i == 0 ? ahead : NULL, out, acc_stride)
      switch (num_queries - i) {
        case 1: WEIGHTED_SUM(1); break;
        case 2: WEIGHTED_SUM(2); break;
        case 3: WEIGHTED_SUM(3); break;
        case 4: WEIGHTED_SUM(4); break;
        case 5: WEIGHTED_SUM(5); break;
        default: WEIGHTED_SUM(SUM_QUERIES); break;
      }
#undef WEIGHTED_SUM
    }
  }
}

static uint64_t read_bytes_avx512vnni(const void *p, size_t n) {
  const char *bytes = p;
  __m512i lane[8];
  for (int j = 0; j < 8; j++) lane[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      lane[j] = _mm512_or_si512(lane[j], _mm512_load_si512(bytes + i + 64 * j));
  for (int j = 1; j < 8; j++) lane[0] = _mm512_or_si512(lane[0], lane[j]);
  return (uint64_t)_mm512_reduce_or_epi64(lane[0]);
}

const kvedge_kernels kvedge_kernels_avx512vnni = {
    .name = "avx512vnni",
    .abs_max_bits = abs_max_bits_avx512vnni,
    .quantize = quantize_avx512vnni,
    .dequantize = dequantize_portable,
    .scores_i8 = scores_i8_avx512vnni,
    .scores_f32 = scores_f32_portable,
    .softmax = softmax_portable,
    .weights_i16 = weights_i16_portable,
    .weighted_sum_i8 = weighted_sum_i8_avx512vnni,
    .weighted_sum_f32 = weighted_sum_f32_portable,
    .read_bytes = read_bytes_avx512vnni,
};
KVEDGE_TARGET_END
#endif
