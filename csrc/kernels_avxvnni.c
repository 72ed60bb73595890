/* AVX-VNNI, 256 bits wide: Alder Lake and later laptops, Zen 5.
 *
 *   instruction              what for                       Golden Cove         Gracemont
 *   vpdpbusd ymm             u8 keys x s8 query,            5 cycles, p01       4, FP01
 *                            u8 weights x s8 values
 *   vpbroadcastd ymm, m32    four channels, four weights    load                load
 *   vpunpck*, vperm2i128     transposing, interleaving      1-3, p15            1-6, FP01
 *
 * The method of kernels_avx512vnni.c at half its width: 6 products per 64-byte line and query. Keys
 * are transposed 8 tokens by 4 channels to a register, values interleaved 4 tokens by 8 channels.
 *
 * KVEDGE_AVXVNNI_AS_EVEX builds the same code in AVX-512VL's encoding of these instructions, so that
 * it can be run and tested on a server that has those but not AVX-VNNI.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

#ifdef KVEDGE_AVXVNNI_AS_EVEX
KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")
#define ENCODED_AS ""
#else
KVEDGE_TARGET_BEGIN("avxvnni,avx2,fma,f16c")
#define ENCODED_AS "%{vex%} "
#endif
#define KVEDGE_NAME(function) function##_avxvnni

#include "kernels_avx256.h"

/* sum += u8 x s8 products by fours; written as an instruction for the reason in kernels_avx512vnni.c. */
KVEDGE_INLINE void multiply_add(__m256i *sum, __m256i u8, __m256i s8) {
  __asm__(ENCODED_AS "vpdpbusd %2, %1, %0" : "+x"(*sum) : "x"(u8), "x"(s8));
}

enum {
  BLOCK = 8,         /* tokens transposed at a time: one per 32-bit lane */
  SCORE_QUERIES = 3, /* x 3 accumulators = 9 of the 16 registers */
};

/* In each 128-bit lane, four dwords become their high, middle and low bytes side by side, and zeros. */
KVEDGE_INLINE __m256i split_bytes(__m256i codes) {
  const __m128i order = _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15);
  return _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(order));
}

static void encode_query_avxvnni(const float *x, int dim, float factor, float largest, int8_t *codes, float *scale,
                                 int32_t *offsets) {
  float inverse = largest > QUERY_NOTHING ? QUERY_MAX / largest : 0.0f;
  const __m256i carry = _mm256_set1_epi32(0x808080); /* makes unsigned digits of signed ones and back */
  __m256i sum = _mm256_setzero_si256();
  for (int d = 0; d < kvedge_padded_channels(dim); d += 8) {
    __m256 values = _mm256_maskload_ps(x + (d < dim ? d : 0), first_lanes(dim - d));
    __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(values, _mm256_set1_ps(factor)), _mm256_set1_ps(inverse));
    __m256i code = _mm256_cvtps_epi32(scaled);
    __m256i digits = split_bytes(_mm256_xor_si256(_mm256_add_epi32(code, carry), carry));
    _mm256_storeu_si256((__m256i *)(codes + 4 * d), digits);
    multiply_add(&sum, _mm256_set1_epi8((char)128), digits);
  }
  __m128i all = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  _mm_storeu_si128((__m128i *)offsets, _mm_sub_epi32(_mm_setzero_si128(), all));
  *scale = inverse > 0.0f ? largest / QUERY_MAX : 0.0f;
}

/* columns[j]: channels 4j..4j+3 of 8 tokens. Rows past the last token repeat it, channels past the
 * last are 0. */
KVEDGE_INLINE void transpose_keys(const int8_t *k, ptrdiff_t token_stride, int num_tokens, int dim,
                                  __m256i *columns) {
  for (int d = 0; d < dim; d += 32) {
    __m256i row[BLOCK], quads[BLOCK]; /* quads[i + c]: dwords c (low lane) and 4 + c (high) of rows i..i+3 */
#pragma GCC unroll 8
    for (int t = 0; t < BLOCK; t++) {
      int token = t < num_tokens ? t : num_tokens - 1;
      row[t] = load_up_to_32(k + token * token_stride + d, dim - d);
    }
    for (int i = 0; i < BLOCK; i += 4) transpose_in_lanes(row + i, quads + i);
    for (int c = 0; c < 4; c++) {
      columns[d / 4 + c] = _mm256_permute2x128_si256(quads[c], quads[4 + c], 0x20);
      columns[d / 4 + 4 + c] = _mm256_permute2x128_si256(quads[c], quads[4 + c], 0x31);
    }
  }
}

/* Scores of 8 tokens for `count` queries of `bytes` bytes (constants where this is inlined). */
KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count, const int bytes,
                               const __m256i *columns, __m256i valid, __m256 k_scale, float *scores,
                               int accumulate) {
  const __m256i to_unsigned = _mm256_set1_epi8((char)0x80);
  __m256i sum[SCORE_QUERIES][3]; /* of each byte of the query */
  const int8_t *codes = q->codes + first * KVEDGE_CODE_BYTES * q->stride;
  const int32_t *offsets = q->offsets + first * 4 * q->scale_stride;
#pragma GCC unroll 3
  for (int i = 0; i < count; i++)
    for (int b = 0; b < bytes; b++) sum[i][b] = _mm256_set1_epi32(offsets[i * 4 * q->scale_stride + b]);
  int num_columns = (q->dim + 3) / 4;
  for (int j = 0; j < num_columns; j++, codes += 16) {
    __m256i column = _mm256_xor_si256(columns[j], to_unsigned);
#pragma GCC unroll 3
    for (int i = 0; i < count; i++)
      for (int b = 0; b < bytes; b++) {
        int32_t four; /* channels */
        memcpy(&four, codes + i * KVEDGE_CODE_BYTES * q->stride + 4 * b, sizeof four);
        multiply_add(&sum[i][b], column, _mm256_set1_epi32(four));
      }
  }
  const __m256 byte = _mm256_set1_ps(256.0f);
#pragma GCC unroll 3
  for (int i = 0; i < count; i++) {
    __m256 dot = _mm256_cvtepi32_ps(sum[i][0]);
    for (int b = 1; b < bytes; b++) dot = _mm256_fmadd_ps(dot, byte, _mm256_cvtepi32_ps(sum[i][b]));
    float unit = q->scale[(first + i) * q->scale_stride] * (bytes == 3 ? 1.0f : bytes == 2 ? 256.0f : 65536.0f);
    float *out = scores + (first + i) * KVEDGE_TILE;
    __m256 score = _mm256_mul_ps(_mm256_mul_ps(dot, _mm256_set1_ps(unit)), k_scale);
    if (accumulate) score = _mm256_add_ps(score, _mm256_maskload_ps(out, valid));
    _mm256_maskstore_ps(out, valid, score);
  }
}

KVEDGE_INLINE void score_queries(const kvedge_query *q, const int bytes, const __m256i *columns,
                                 __m256i valid, __m256 scale, float *scores, int accumulate) {
  int i = 0;
  for (; i + SCORE_QUERIES <= q->num_queries; i += SCORE_QUERIES)
    score_block(q, i, SCORE_QUERIES, bytes, columns, valid, scale, scores, accumulate);
  switch (q->num_queries - i) {
    case 2: score_block(q, i, 2, bytes, columns, valid, scale, scores, accumulate); break;
    case 1: score_block(q, i, 1, bytes, columns, valid, scale, scores, accumulate); break;
  }
}

static void scores_i8_avxvnni(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                              int num_tokens, const float *k_scale, const void *prefetch,
                              float *scores, int accumulate) {
  __m256i columns[1024 / 4]; /* (dim / 4) x 8 tokens x 4 channels */
  for (int t = 0; t < num_tokens; t += BLOCK) {
    int tokens = num_tokens - t < BLOCK ? num_tokens - t : BLOCK;
    if (prefetch) prefetch_bytes((const char *)prefetch + t * q->dim, BLOCK * q->dim);
    transpose_keys(k + t * token_stride, token_stride, tokens, q->dim, columns);
    __m256i valid = first_lanes(tokens);
    __m256 scale = _mm256_loadu_ps(k_scale + t);
    switch (q->num_bytes) {
      case 3: score_queries(q, 3, columns, valid, scale, scores + t, accumulate); break;
      case 2: score_queries(q, 2, columns, valid, scale, scores + t, accumulate); break;
      default: score_queries(q, 1, columns, valid, scale, scores + t, accumulate);
    }
  }
}

/* Weights of a tile as unsigned codes of 24 bits, or fewer and zeros, four tokens at a time as
 * split_bytes() leaves them. Returns the scale of the codes. */
KVEDGE_INLINE float encode_weights(const float *p, const float *v_scale, int num_tokens, int num_bytes,
                                   uint8_t *codes) {
  __m256 weight[KVEDGE_TILE / 8], largest_of = _mm256_setzero_ps();
  int blocks = (num_tokens + 7) / 8;
  for (int j = 0; j < blocks; j++) {
    weight[j] = _mm256_mul_ps(_mm256_loadu_ps(p + 8 * j), _mm256_loadu_ps(v_scale + 8 * j));
    largest_of = _mm256_max_ps(largest_of, weight[j]);
  }
  float largest = reduce_max(largest_of);
  float most = num_bytes == 3 ? WEIGHT_MAX : num_bytes == 2 ? WEIGHT_MAX_16 : WEIGHT_MAX_8;
  float inverse = largest > WEIGHT_NOTHING ? most / largest : 0.0f;
  __m256 factor = _mm256_set1_ps(inverse);
  for (int j = 0; j < blocks; j++) {
    __m256i code;
    if (num_bytes == 3) {
      code = _mm256_cvtps_epi32(_mm256_mul_ps(weight[j], factor));
    } else {
      __m256 number = _mm256_mul_ps(weight[j], factor);
      __m256 small = _mm256_cmp_ps(number, _mm256_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
      number = _mm256_add_ps(number, _mm256_and_ps(small, _mm256_loadu_ps(kvedge_dither + 8 * j)));
      code = _mm256_slli_epi32(_mm256_cvtps_epi32(number), num_bytes == 2 ? 8 : 16);
    }
    _mm256_storeu_si256((__m256i *)(codes + 32 * j), split_bytes(code));
  }
  return inverse > 0.0f ? largest / most : 0.0f;
}

/* Interleaves the bytes of four rows at a time, for up to 32 channels: dword e of 128-bit lane L of
 * out[t + c] has channel 16 L + 4 c + e of tokens t..t+3. */
KVEDGE_INLINE void interleave_values(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int channels,
                                     const char *prefetch, __m256i *out) {
  for (int t = 0; t < num_tokens; t += 4, out += 4) {
    if (prefetch) prefetch_bytes(prefetch + t * channels, 4 * channels);
    __m256i row[4];
    for (int j = 0; j < 4; j++) { /* rows past the last token repeat it: their weight is 0 */
      ptrdiff_t at = (t + j < num_tokens ? t + j : num_tokens - 1) * token_stride;
      row[j] = load_up_to_32(v + at, channels);
    }
    __m256i low_ab = _mm256_unpacklo_epi8(row[0], row[1]), high_ab = _mm256_unpackhi_epi8(row[0], row[1]);
    __m256i low_cd = _mm256_unpacklo_epi8(row[2], row[3]), high_cd = _mm256_unpackhi_epi8(row[2], row[3]);
    out[0] = _mm256_unpacklo_epi16(low_ab, low_cd);
    out[1] = _mm256_unpackhi_epi16(low_ab, low_cd);
    out[2] = _mm256_unpacklo_epi16(high_ab, high_cd);
    out[3] = _mm256_unpackhi_epi16(high_ab, high_cd);
  }
}

/* Adds a tile's values to up to 32 channels of one query, with weights of `bytes` bytes (a constant
 * where this is inlined). */
KVEDGE_INLINE void weighted_sum_block(const __m256i *values, int num_tokens, int channels, const int bytes,
                                      const uint8_t *codes, float scale, float alpha, float *acc) {
  __m256i sum[3][4]; /* of each byte of the weights, of each quarter of the channels */
  for (int b = 0; b < bytes; b++)
    for (int c = 0; c < 4; c++) sum[b][c] = _mm256_setzero_si256();
  for (int t = 0; t < num_tokens; t += 4, values += 4)
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++) {
      int32_t four; /* tokens */
      memcpy(&four, codes + 4 * t + 4 * b, sizeof four);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) multiply_add(&sum[b][c], _mm256_set1_epi32(four), values[c]);
    }
  const __m256 byte = _mm256_set1_ps(256.0f);
  __m256 total[4];
  for (int c = 0; c < 4; c++) {
    total[c] = _mm256_cvtepi32_ps(sum[0][c]);
    for (int b = 1; b < bytes; b++) total[c] = _mm256_fmadd_ps(total[c], byte, _mm256_cvtepi32_ps(sum[b][c]));
  }
  __m256 ordered[4] = {
      _mm256_permute2f128_ps(total[0], total[1], 0x20), _mm256_permute2f128_ps(total[2], total[3], 0x20),
      _mm256_permute2f128_ps(total[0], total[1], 0x31), _mm256_permute2f128_ps(total[2], total[3], 0x31)};
  for (int c = 0; c < 4 && 8 * c < channels; c++) {
    __m256i valid = first_lanes(channels - 8 * c);
    __m256 kept = _mm256_mul_ps(_mm256_maskload_ps(acc + 8 * c, valid), _mm256_set1_ps(alpha));
    _mm256_maskstore_ps(acc + 8 * c, valid, _mm256_fmadd_ps(ordered[c], _mm256_set1_ps(scale), kept));
  }
}

static void weighted_sum_i8_avxvnni(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                    int num_queries, int num_bytes, const float *p,
                                    const float *v_scale, const float *alpha, const void *prefetch,
                                    float *acc, ptrdiff_t acc_stride) {
  _Alignas(64) uint8_t codes[KVEDGE_STACK * CODE_ROW];
  float scale[KVEDGE_STACK];
  for (int i = 0; i < num_queries; i++)
    scale[i] = encode_weights(p + i * KVEDGE_TILE, v_scale, num_tokens, num_bytes, codes + i * CODE_ROW);
  for (int d = 0; d < dim; d += 32) {
    __m256i values[KVEDGE_TILE]; /* (tokens / 4, 4) */
    int channels = dim - d < 32 ? dim - d : 32;
    const char *ahead = prefetch ? (const char *)prefetch + d * num_tokens : NULL;
    interleave_values(v + d, token_stride, num_tokens, channels, ahead, values);
    for (int i = 0; i < num_queries; i++) {
      float *out = acc + i * acc_stride + d;
#define WEIGHTED_SUM(bytes) \
  weighted_sum_block(values, num_tokens, channels, bytes, codes + i * CODE_ROW, scale[i], alpha[i], out)
      switch (num_bytes) {
        case 3: WEIGHTED_SUM(3); break;
        case 2: WEIGHTED_SUM(2); break;
        default: WEIGHTED_SUM(1);
      }
#undef WEIGHTED_SUM
    }
  }
}

#define KVEDGE_ENCODE_QUERY encode_query_avxvnni
const kvedge_kernels kvedge_kernels_avxvnni = KVEDGE_TABLE("avxvnni");
KVEDGE_TARGET_END
#endif
