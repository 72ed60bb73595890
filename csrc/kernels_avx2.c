/* AVX2 with FMA: x86 laptops since Haswell and Zen.
 *
 *   instruction                what for                    Haswell/Skylake     Zen 2
 *   vfmadd231ps ymm            the products                4-5 cycles, p01     5, FP01
 *   vpmovsxbd ymm, m64         s8 to s32                   3, p5               3, FP12
 *   vcvtdq2ps ymm              s32 to float                4, p01              3, FP3
 *
 * There is no 8-bit product here that keeps more than 8 bits of the query (vpmaddubsw saturates),
 * and 16-bit ones would need two for what one float FMA gives. So codes become floats (2 instructions
 * per 8, once for all stacked queries), and each query then costs 8 instructions per 64-byte line.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

KVEDGE_TARGET_BEGIN("avx2,fma")
#define KVEDGE_NAME(function) function##_avx2

#include "kernels_avx256.h"

enum {
  SCORES = 8,      /* made at a time: 8 tokens of 1 query, 4 of 2, 2 of 4; an accumulator each */
  SUM_QUERIES = 4, /* x 2 accumulators of 8 channels */
};

KVEDGE_INLINE __m256 floats_of(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }

/* 8 codes of which the first n are read, as floats; the others 0. */
KVEDGE_INLINE __m256 load_codes(const int8_t *codes, int n) {
  return floats_of(n >= 8 ? _mm_loadl_epi64((const __m128i *)codes) : load_up_to_16(codes, n));
}

/* Sums of eight registers, side by side. */
KVEDGE_INLINE __m256 reduce_add_8(const __m256 x[SCORES]) {
  __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}

/* Scores of SCORES / count tokens, of which num_tokens are there, for `count` queries: 1, 2 or 4 (a
 * constant where this is inlined). */
KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count, const int8_t *k,
                               ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                               float *scores, int accumulate) {
  const int tokens = SCORES / count;
  const float *values = q->values + first * q->stride;
  const int8_t *row[SCORES];
  __m256 sum[SCORES]; /* (count, tokens) */
#pragma GCC unroll 8
  for (int t = 0; t < tokens; t++) row[t] = k + (t < num_tokens ? t : num_tokens - 1) * token_stride;
#pragma GCC unroll 8
  for (int i = 0; i < SCORES; i++) sum[i] = _mm256_setzero_ps();
  for (int d = 0; d < q->dim; d += 8) { /* values are zero past the last channel */
    __m256 query[4];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) query[i] = _mm256_loadu_ps(values + i * q->stride + d);
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) {
      __m256 key = load_codes(row[t] + d, q->dim - d);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) sum[i * tokens + t] = _mm256_fmadd_ps(key, query[i], sum[i * tokens + t]);
    }
  }
  float made[SCORES]; /* (count, tokens) */
  _mm256_storeu_ps(made, reduce_add_8(sum));
  scores += first * KVEDGE_TILE;
  if (num_tokens == tokens && !accumulate) {
#pragma GCC unroll 8
    for (int i = 0; i < SCORES; i++) scores[i / tokens * KVEDGE_TILE + i % tokens] = made[i] * k_scale[i % tokens];
    return;
  }
  for (int i = 0; i < count; i++)
    for (int t = 0; t < num_tokens; t++) {
      float *out = scores + i * KVEDGE_TILE + t, score = made[i * tokens + t] * k_scale[t];
      *out = accumulate ? *out + score : score;
    }
}

KVEDGE_INLINE void score_queries(const kvedge_query *q, int first, const int count, const int8_t *k,
                                 ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                                 float *scores, int accumulate) {
  const int tokens = SCORES / count;
  for (int t = 0; t < num_tokens; t += tokens) {
    int left = num_tokens - t < tokens ? num_tokens - t : tokens;
    score_block(q, first, count, k + t * token_stride, token_stride, left, k_scale + t, scores + t, accumulate);
  }
}

static void scores_i8_avx2(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                           int num_tokens, const float *k_scale, const void *prefetch, float *scores,
                           int accumulate) {
  for (int t = 0; prefetch && t < num_tokens; t++)
    for (int d = 0; d < q->dim; d += 64)
      _mm_prefetch((const char *)prefetch + t * token_stride + d, _MM_HINT_T0);
  int n = q->num_queries, i = 0;
  for (; i + 4 <= n; i += 4) score_queries(q, i, 4, k, token_stride, num_tokens, k_scale, scores, accumulate);
  for (; i + 2 <= n; i += 2) score_queries(q, i, 2, k, token_stride, num_tokens, k_scale, scores, accumulate);
  if (i < n) score_queries(q, i, 1, k, token_stride, num_tokens, k_scale, scores, accumulate);
}

/* Adds a tile's values to up to 16 channels of `count` queries (a constant where this is inlined). */
KVEDGE_INLINE void weighted_sum_block(const int8_t *v, ptrdiff_t token_stride, int num_tokens,
                                      int channels, const int count, const float *weights,
                                      const float *alpha, const char *prefetch, float *acc,
                                      ptrdiff_t acc_stride) {
  __m256 sum[SUM_QUERIES][2];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
  for (int t = 0; t < num_tokens; t++) {
    if (prefetch) _mm_prefetch(prefetch + t * token_stride, _MM_HINT_T0);
    __m128i row = load_up_to_16(v + t * token_stride, channels);
    __m256 low = floats_of(row), high = floats_of(_mm_unpackhi_epi64(row, row));
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m256 weight = _mm256_broadcast_ss(weights + i * KVEDGE_TILE + t);
      sum[i][0] = _mm256_fmadd_ps(low, weight, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(high, weight, sum[i][1]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    for (int h = 0; h < 2 && 8 * h < channels; h++) {
      __m256i valid = first_lanes(channels - 8 * h);
      float *out = acc + i * acc_stride + 8 * h;
      __m256 kept = _mm256_mul_ps(_mm256_maskload_ps(out, valid), _mm256_set1_ps(alpha[i]));
      _mm256_maskstore_ps(out, valid, _mm256_add_ps(sum[i][h], kept));
    }
}

static void weighted_sum_i8_avx2(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                 int num_queries, int num_bytes, const float *p,
                                 const float *v_scale, const float *alpha, const void *prefetch,
                                 float *acc, ptrdiff_t acc_stride) {
  (void)num_bytes; /* floats cost the same whatever their precision */
  float weights[KVEDGE_STACK * KVEDGE_TILE];
  for (int i = 0; i < num_queries; i++)
    for (int t = 0; t < num_tokens; t++) weights[i * KVEDGE_TILE + t] = p[i * KVEDGE_TILE + t] * v_scale[t];
  for (int d = 0; d < dim; d += 16) {
    int channels = dim - d < 16 ? dim - d : 16;
    for (int i = 0; i < num_queries; i += SUM_QUERIES) {
      const float *w = weights + i * KVEDGE_TILE;
      const char *ahead = prefetch && i == 0 && d % 64 == 0 ? (const char *)prefetch + d : NULL;
      float *out = acc + i * acc_stride + d;
#define WEIGHTED_SUM(count) \
  weighted_sum_block(v + d, token_stride, num_tokens, channels, count, w, alpha + i, ahead, out, acc_stride)
      switch (num_queries - i) {
        case 1: WEIGHTED_SUM(1); break;
        case 2: WEIGHTED_SUM(2); break;
        case 3: WEIGHTED_SUM(3); break;
        default: WEIGHTED_SUM(SUM_QUERIES); break;
      }
#undef WEIGHTED_SUM
    }
  }
}

#define KVEDGE_ENCODE_QUERY NULL
const kvedge_kernels kvedge_kernels_avx2 = KVEDGE_TABLE("avx2");
KVEDGE_TARGET_END
#endif
