/* AVX-VNNI, 256 bits wide: Alder Lake and later laptops, Zen 5.
 *
 *   instruction              what for                  Golden Cove         Gracemont
 *   vpdpbusd ymm             u8 keys x s8 query        5 cycles, p01       4, FP01
 *   vpdpwssd ymm             s16 values x s16 weights  5 cycles, p01       4, FP01
 *   vpbroadcastd ymm, m32    four channels of a query  load                load
 *   vpunpck*, vperm2i128     transposing keys          1-3, p15            1-6, FP01
 *
 * The method of kernels_avx512vnni.c at half its width: 4 + 4 products per 64-byte line and query.
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

KVEDGE_INLINE void score_block(const kvedge_query_i8 *q, int first, const int count,
                               const __m256i *columns, __m256i valid, __m256 k_scale, float *scores,
                               int accumulate) {
  const __m256i to_unsigned = _mm256_set1_epi8((char)0x80);
  __m256i hi[SCORE_QUERIES], lo[SCORE_QUERIES];
  const int8_t *query_hi = q->hi + first * q->stride;
  const int8_t *query_lo = q->lo + first * q->stride;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) { /* u8 keys are 128 too large: start from what that adds */
    hi[i] = _mm256_set1_epi32(-128 * q->sum_hi[(first + i) * q->scale_stride]);
    lo[i] = _mm256_set1_epi32(-128 * q->sum_lo[(first + i) * q->scale_stride]);
  }
  int num_columns = (q->dim + 3) / 4;
  for (int j = 0; j < num_columns; j++) {
    __m256i column = _mm256_xor_si256(columns[j], to_unsigned);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      int32_t h, l;
      memcpy(&h, query_hi + i * q->stride + 4 * j, sizeof h);
      memcpy(&l, query_lo + i * q->stride + 4 * j, sizeof l);
      hi[i] = dpbusd(hi[i], column, _mm256_set1_epi32(h));
      lo[i] = dpbusd(lo[i], column, _mm256_set1_epi32(l));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    /* joined as floats: at a dim above 517 their sum may pass 2^31 */
    __m256 dot = _mm256_fmadd_ps(_mm256_cvtepi32_ps(hi[i]), _mm256_set1_ps(256.0f), _mm256_cvtepi32_ps(lo[i]));
    store_scores(q, first + i, dot, valid, k_scale, scores + (first + i) * KVEDGE_TILE, accumulate);
  }
}

const kvedge_kernels kvedge_kernels_avxvnni = KVEDGE_TABLE("avxvnni");
KVEDGE_TARGET_END
#endif
