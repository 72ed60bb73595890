/* AVX-VNNI, 256 bits wide: Alder Lake and later laptops, Zen 5.
 *
 *   instruction              what for                  Golden Cove         Gracemont
 *   vpdpbusd ymm             u8 keys x s8 query        5 cycles, p01       4, FP01
 *   vpdpwssd ymm             s16 values x s16 weights  5 cycles, p01       4, FP01
 *   vpbroadcastd ymm, m32    four channels of a query  load                load
 *   vpunpck*, vperm2i128     transposing keys          1-3, p15            1-6, FP01
 *
 * The method of kernels_avx512vnni.c at half its width: 6 products per 64-byte line of keys and query, 4
 * per line of values. Keys are transposed 8 tokens by 4 channels to a register.
 *
 * KVEDGE_AVXVNNI_AS_EVEX builds the same code in AVX-512VL's encoding of these instructions, so that
 * it can be run and tested on a server that has those but not AVX-VNNI.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

#ifdef KVEDGE_AVXVNNI_AS_EVEX
KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")
#define dpbusd _mm256_dpbusd_epi32
#define dpwssd _mm256_dpwssd_epi32
#else
KVEDGE_TARGET_BEGIN("avxvnni,avx2,fma")
#define dpbusd _mm256_dpbusd_avx_epi32
#define dpwssd _mm256_dpwssd_avx_epi32
#endif
#define KVEDGE_NAME(function) function##_avxvnni

KVEDGE_INLINE __m256i multiply_add_i16(__m256i sum, __m256i a, __m256i b) { return dpwssd(sum, a, b); }

#include "kernels_avx256.h"

KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count,
                               const __m256i *columns, __m256i valid, __m256 k_scale, float *scores,
                               int accumulate) {
  const __m256i to_unsigned = _mm256_set1_epi8((char)0x80);
  __m256i sum[SCORE_QUERIES][3]; /* of each byte of the query */
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) /* u8 keys are 128 too large: start from what that adds */
    for (int b = 0; b < 3; b++)
      sum[i][b] = _mm256_set1_epi32(-128 * q->sums[b][(first + i) * q->scale_stride]);
  int num_columns = (q->dim + 3) / 4;
  for (int j = 0; j < num_columns; j++) {
    __m256i column = _mm256_xor_si256(columns[j], to_unsigned);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      for (int b = 0; b < 3; b++) {
        int32_t four; /* channels */
        memcpy(&four, q->bytes[b] + (first + i) * q->stride + 4 * j, sizeof four);
        sum[i][b] = dpbusd(sum[i][b], column, _mm256_set1_epi32(four));
      }
  }
  const __m256 byte = _mm256_set1_ps(256.0f);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    __m256 dot = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][0]), byte, _mm256_cvtepi32_ps(sum[i][1]));
    dot = _mm256_fmadd_ps(dot, byte, _mm256_cvtepi32_ps(sum[i][2]));
    __m256 scale = _mm256_mul_ps(k_scale, _mm256_set1_ps(q->scale[(first + i) * q->scale_stride]));
    store_scores(_mm256_mul_ps(dot, scale), valid, scores + (first + i) * KVEDGE_TILE, accumulate);
  }
}

static void scores_i8_avxvnni(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
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
        default: score_block(q, i, SCORE_QUERIES, columns, valid, scale, scores + t, accumulate);
      }
  }
}

const kvedge_kernels kvedge_kernels_avxvnni = KVEDGE_TABLE("avxvnni");
KVEDGE_TARGET_END
#endif
