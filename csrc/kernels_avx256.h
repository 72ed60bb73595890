/* What the two 256-bit paths share. Included by kernels_avx2.c and kernels_avxvnni.c after their
 * target pragma, each of which first defines
 *   KVEDGE_NAME(function)                 function_avx2 or function_avxvnni
 *   multiply_add_i16(sum, a, b)           sum + pairs of s16 products, 8 x s32
 *   score_block(...)                      the product with transposed keys, see below
 */
#include "kernels_portable.h"

enum {
  BLOCK = 8,         /* tokens transposed at a time: one per 32-bit lane */
  SCORE_QUERIES = 4, /* x 2 accumulators = 8 of the 16 registers */
  SUM_QUERIES = 4,   /* x 2 accumulators */
};

static uint32_t KVEDGE_NAME(abs_max_bits)(const float *x, size_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i a = _mm256_setzero_si256(), b = a;
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    a = _mm256_max_epu32(a, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), magnitude));
    b = _mm256_max_epu32(b, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i + 8)), magnitude));
  }
  uint32_t lane[8], largest = 0;
  _mm256_storeu_si256((__m256i *)lane, _mm256_max_epu32(a, b));
  for (int j = 0; j < 8; j++) largest = lane[j] > largest ? lane[j] : largest;
  for (; i < n; i++) {
    uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

static void KVEDGE_NAME(quantize)(const float *x, size_t n, float inverse, int8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' lanes */
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i part[4];
    for (int j = 0; j < 4; j++)
      part[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * j), factor));
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]),
                                        _mm256_packs_epi32(part[2], part[3]));
    _mm256_storeu_si256((__m256i *)(codes + i), _mm256_permutevar8x32_epi32(packed, order));
  }
  for (; i + 8 <= n; i += 8) {
    __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64((__m128i *)(codes + i), _mm_packs_epi16(words, words));
  }
  for (; i < n; i++) codes[i] = (int8_t)_mm_cvtss_si32(_mm_mul_ss(_mm_load_ss(x + i), _mm_set_ss(inverse)));
}

/* The first n bytes of a row, zero from there on; reads no byte past them. */
KVEDGE_INLINE __m128i load_up_to_16(const int8_t *row, int n) {
  if (n >= 16) return _mm_loadu_si128((const __m128i *)row);
  if (n == 8) return _mm_loadl_epi64((const __m128i *)row);
  int8_t copy[16] = {0};
  memcpy(copy, row, (size_t)n);
  return _mm_loadu_si128((const __m128i *)copy);
}

KVEDGE_INLINE __m256i load_up_to_32(const int8_t *row, int n) {
  if (n >= 32) return _mm256_loadu_si256((const __m256i *)row);
  __m128i low = load_up_to_16(row, n < 16 ? n : 16);
  __m128i high = n > 16 ? load_up_to_16(row + 16, n - 16) : _mm_setzero_si128();
  return _mm256_set_m128i(high, low);
}

/* columns[j]: channels 4j..4j+3 of 8 tokens. Rows past the last token repeat it, channels past the
 * last are 0. */
KVEDGE_INLINE void transpose_keys(const int8_t *k, ptrdiff_t token_stride, int num_tokens, int dim,
                                  const char *prefetch, __m256i *columns) {
  for (int d = 0; d < dim; d += 32) {
    __m256i row[BLOCK], pairs[BLOCK], quads[BLOCK];
#pragma GCC unroll 8
    for (int t = 0; t < BLOCK; t++) {
      int token = t < num_tokens ? t : num_tokens - 1;
      row[t] = load_up_to_32(k + token * token_stride + d, dim - d);
      if (prefetch) _mm_prefetch(prefetch + token * token_stride + d, _MM_HINT_T0);
    }
    for (int i = 0; i < BLOCK; i += 2) {
      pairs[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < BLOCK; i += 4) { /* quads[i + c]: dwords c (low lane) and 4 + c (high) of rows i..i+3 */
      quads[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
      quads[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
      quads[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
      quads[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
      columns[d / 4 + c] = _mm256_permute2x128_si256(quads[c], quads[4 + c], 0x20);
      columns[d / 4 + 4 + c] = _mm256_permute2x128_si256(quads[c], quads[4 + c], 0x31);
    }
  }
}

/* 8 lanes, of which the first n are all ones. */
KVEDGE_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Writes 8 dot products as scores of the first `valid` tokens. */
KVEDGE_INLINE void store_scores(const kvedge_query_i8 *q, int query, __m256 dot, __m256i valid,
                                __m256 k_scale, float *out, int accumulate) {
  __m256 scale = _mm256_mul_ps(k_scale, _mm256_set1_ps(q->scale[query * q->scale_stride]));
  __m256 score = _mm256_mul_ps(dot, scale);
  if (accumulate) score = _mm256_add_ps(score, _mm256_maskload_ps(out, valid));
  _mm256_maskstore_ps(out, valid, score);
}

/* Scores of 8 tokens for `count` queries from `first` on (a constant where this is inlined). */
KVEDGE_INLINE void score_block(const kvedge_query_i8 *q, int first, const int count,
                               const __m256i *columns, __m256i valid, __m256 k_scale, float *scores,
                               int accumulate);

static void KVEDGE_NAME(scores_i8)(const kvedge_query_i8 *q, const int8_t *k, ptrdiff_t token_stride,
                                   int num_tokens, const float *k_scale, const void *prefetch,
                                   float *scores, int accumulate) {
  __m256i columns[1024 / 4]; /* (dim / 4) x 8 tokens x 4 channels */
  for (int t = 0; t < num_tokens; t += BLOCK) {
    int tokens = num_tokens - t < BLOCK ? num_tokens - t : BLOCK;
    __m256i valid = first_lanes(tokens);
    const char *ahead = prefetch ? (const char *)prefetch + t * token_stride : NULL;
    transpose_keys(k + t * token_stride, token_stride, tokens, q->dim, ahead, columns);
    __m256 scale = _mm256_maskload_ps(k_scale + t, valid);
    for (int i = 0; i < q->num_queries; i += SCORE_QUERIES) switch (q->num_queries - i) {
        case 1: score_block(q, i, 1, columns, valid, scale, scores + t, accumulate); break;
        case 2: score_block(q, i, 2, columns, valid, scale, scores + t, accumulate); break;
        case 3: score_block(q, i, 3, columns, valid, scale, scores + t, accumulate); break;
        default: score_block(q, i, SCORE_QUERIES, columns, valid, scale, scores + t, accumulate);
      }
  }
}

/* Adds a tile's values to up to 16 channels of `count` queries (a constant where this is inlined). */
KVEDGE_INLINE void weighted_sum_block(const int8_t *v, ptrdiff_t token_stride, int num_tokens,
                                      int channels, const int count, const int16_t *weights,
                                      const float *w_scale, const float *alpha, const char *prefetch,
                                      float *acc, ptrdiff_t acc_stride) {
  __m256i sum[SUM_QUERIES][2]; /* channels 0-3 and 8-11; 4-7 and 12-15 */
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = _mm256_setzero_si256();
  for (int t = 0; t < num_tokens; t += 2) {
    const int8_t *row = v + t * token_stride;
    const int8_t *next = t + 1 < num_tokens ? row + token_stride : row; /* its weight is 0 */
    if (prefetch) {
      _mm_prefetch(prefetch + t * token_stride, _MM_HINT_T0);
      _mm_prefetch(prefetch + (t + 1) * token_stride, _MM_HINT_T0);
    }
    __m256i even = _mm256_cvtepi8_epi16(load_up_to_16(row, channels));
    __m256i odd = _mm256_cvtepi8_epi16(load_up_to_16(next, channels));
    __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      int32_t both;
      memcpy(&both, weights + i * KVEDGE_TILE + t, sizeof both);
      __m256i weight = _mm256_set1_epi32(both);
      sum[i][0] = multiply_add_i16(sum[i][0], low, weight);
      sum[i][1] = multiply_add_i16(sum[i][1], high, weight);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    __m256 old = _mm256_set1_ps(alpha[i]), scale = _mm256_set1_ps(w_scale[i]);
    for (int h = 0; h < 2 && 8 * h < channels; h++) {
      __m256i ordered = h == 0 ? _mm256_permute2x128_si256(sum[i][0], sum[i][1], 0x20)
                               : _mm256_permute2x128_si256(sum[i][0], sum[i][1], 0x31);
      __m256i valid = first_lanes(channels - 8 * h);
      float *out = acc + i * acc_stride + 8 * h;
      __m256 kept = _mm256_mul_ps(_mm256_maskload_ps(out, valid), old);
      _mm256_maskstore_ps(out, valid, _mm256_fmadd_ps(_mm256_cvtepi32_ps(ordered), scale, kept));
    }
  }
}

static void KVEDGE_NAME(weighted_sum_i8)(const int8_t *v, ptrdiff_t token_stride, int num_tokens,
                                         int dim, int num_queries, const int16_t *weights,
                                         const float *w_scale, const float *alpha, const void *prefetch,
                                         float *acc, ptrdiff_t acc_stride) {
  for (int d = 0; d < dim; d += 16) {
    int channels = dim - d < 16 ? dim - d : 16;
    const char *line = prefetch && d % 64 == 0 ? (const char *)prefetch + d : NULL;
    for (int i = 0; i < num_queries; i += SUM_QUERIES) {
      const int16_t *w = weights + i * KVEDGE_TILE;
      const char *ahead = i == 0 ? line : NULL;
      float *out = acc + i * acc_stride + d;
#define WEIGHTED_SUM(channels, count)                                                         \
  weighted_sum_block(v + d, token_stride, num_tokens, channels, count, w, w_scale + i, alpha + i, \
                     ahead, out, acc_stride)
      if (channels < 16) {
        for (int one = i; one < num_queries && one < i + SUM_QUERIES; one++, w += KVEDGE_TILE, out += acc_stride)
          weighted_sum_block(v + d, token_stride, num_tokens, channels, 1, w, w_scale + one, alpha + one,
                             ahead, out, acc_stride);
        continue;
      }
      switch (num_queries - i) {
        case 1: WEIGHTED_SUM(16, 1); break;
        case 2: WEIGHTED_SUM(16, 2); break;
        case 3: WEIGHTED_SUM(16, 3); break;
        default: WEIGHTED_SUM(16, SUM_QUERIES); break;
      }
#undef WEIGHTED_SUM
    }
  }
}

static uint64_t KVEDGE_NAME(read_bytes)(const void *p, size_t n) {
  const char *bytes = p;
  __m256i lane[8];
  for (int j = 0; j < 8; j++) lane[j] = _mm256_setzero_si256();
  for (size_t i = 0; i < n; i += 256)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      lane[j] = _mm256_or_si256(lane[j], _mm256_load_si256((const __m256i *)(bytes + i + 32 * j)));
  uint64_t words[4], all = 0;
  for (int j = 1; j < 8; j++) lane[0] = _mm256_or_si256(lane[0], lane[j]);
  _mm256_storeu_si256((__m256i *)words, lane[0]);
  for (int j = 0; j < 4; j++) all |= words[j];
  return all;
}

#define KVEDGE_TABLE(isa)                             \
  {                                                   \
      .name = isa,                                    \
      .abs_max_bits = KVEDGE_NAME(abs_max_bits),      \
      .quantize = KVEDGE_NAME(quantize),              \
      .dequantize = dequantize_portable,              \
      .scores_i8 = KVEDGE_NAME(scores_i8),            \
      .scores_f32 = scores_f32_portable,              \
      .softmax = softmax_portable,                    \
      .weights_i16 = weights_i16_portable,            \
      .weighted_sum_i8 = KVEDGE_NAME(weighted_sum_i8), \
      .weighted_sum_f32 = weighted_sum_f32_portable,  \
      .read_bytes = KVEDGE_NAME(read_bytes),          \
  }
