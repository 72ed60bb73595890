/* AVX-512 with VNNI: Cascade Lake, Ice Lake and later servers, Zen 4 and later.
 *
 *   instruction               what for                    Cascade Lake        Zen 4
 *   vpdpbusd zmm, zmm, m32    u8 keys x s8 query          5 cycles, p05       4, FP01 (2 x 256)
 *   vpdpbusd zmm, zmm, m512   u8 weights x s8 values      5 cycles, p05       4, FP01
 *   vpunpck*, vshufi32x4      transposing                 1-3 cycles, p5      1-2, FP12
 *
 * Keys. A dot product along a row ends in a sum across lanes, which costs more than the product.
 * So 16 tokens are transposed, 4 channels (one dword) at a time: lane t of column j holds channels
 * 4j..4j+3 of token t, and vpdpbusd with a broadcast dword of the query leaves token t's score in
 * lane t. The transpose (4 shuffles per 64-byte line) is done once for all stacked queries, each of
 * which then costs 3 instructions per line, one for each byte of its 24-bit code.
 * vpdpbusd wants unsigned keys: k + 128 = k xor 0x80, and 128 * sum(query) is taken off at the end.
 *
 * Values. Rows of four tokens are interleaved byte by byte (2 shuffles per line, once for all
 * queries), so that vpdpbusd with a broadcast dword of weights, which are unsigned, adds all four
 * tokens to 16 channels: again 3 instructions per line and query for weights of 24 bits.
 */
#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#include "kernels_portable.h"

enum {
  BLOCK = KVEDGE_BLOCK, /* tokens transposed at a time: one per 32-bit lane */
  SCORE_QUERIES = 8,    /* x 3 accumulators = 24 of the 32 registers */
  SUM_REGISTERS = 24,   /* of 32: 4 quarters of the channels x bytes of the weights x queries */
  SUM_QUERIES = 6,
};

/* sum += u8 x s8 products by fours. Written as instructions, since compilers (GCC 12) surround the
 * intrinsic with copies of the accumulators, which take twice the time of the products. */
KVEDGE_INLINE void multiply_add(__m512i *sum, __m512i u8, __m512i s8) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(u8), "v"(s8));
}

/* The same with four s8 for all. */
KVEDGE_INLINE void multiply_add_four(__m512i *sum, __m512i u8, const int8_t *four) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(u8), "m"(*(const int8_t(*)[4])four));
}

/* Of n bytes, or of 64 if there are more. */
KVEDGE_INLINE __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

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

/* In each 128-bit lane, four dwords become their high, middle and low bytes side by side, and zeros. */
KVEDGE_INLINE __m512i split_bytes(__m512i codes) {
  const __m128i order = _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
}

static void encode_query_avx512vnni(const float *values, int n, int8_t *codes, float *scale, int32_t *sums) {
  __m512 largest_of = _mm512_setzero_ps();
  for (int d = 0; d < n; d += 16)
    largest_of = _mm512_max_ps(largest_of, _mm512_abs_ps(_mm512_loadu_ps(values + d)));
  float largest = _mm512_reduce_max_ps(largest_of);
  float inverse = largest > QUERY_NOTHING ? QUERY_MAX / largest : 0.0f;
  const __m512i carry = _mm512_set1_epi32(0x808080); /* makes unsigned digits of signed ones and back */
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < n; d += 16) {
    __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + d), _mm512_set1_ps(inverse)));
    __m512i digits = split_bytes(_mm512_xor_si512(_mm512_add_epi32(code, carry), carry));
    _mm512_storeu_si512(codes + 4 * d, digits);
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), digits);
  }
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  _mm_storeu_si128((__m128i *)sums, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  *scale = inverse > 0.0f ? largest / QUERY_MAX : 0.0f;
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

/* A row's 64 bytes of which `valid` are read, the others 0. `whole`: all (a plain load is cheaper). */
KVEDGE_INLINE __m512i load_row(const int8_t *row, const int whole, __mmask64 valid) {
  return whole ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi8(valid, row);
}

/* columns[j]: channels 4j..4j+3 of 16 tokens, as unsigned bytes, for 64 channels. Rows past the last
 * token repeat it, channels past the last are 128. */
KVEDGE_INLINE void transpose_keys(const int8_t *k, ptrdiff_t token_stride, int num_tokens,
                                  const int whole, __mmask64 valid, const char *prefetch,
                                  __m512i *columns) {
  const __m512i to_unsigned = _mm512_set1_epi8((char)0x80);
  __m512i row[BLOCK];
#pragma GCC unroll 16
  for (int t = 0; t < BLOCK; t++) {
    ptrdiff_t at = (t < num_tokens ? t : num_tokens - 1) * token_stride;
    row[t] = _mm512_xor_si512(load_row(k + at, whole, valid), to_unsigned);
    if (prefetch) _mm_prefetch(prefetch + at, _MM_HINT_T0);
  }
  transpose_16x16(row, columns);
}

/* Scores of 16 tokens for `count` queries of `bytes` bytes (constants where this is inlined). */
KVEDGE_INLINE void score_block(const kvedge_query *q, int first, const int count, const int bytes,
                               const __m512i *columns, __mmask16 valid, __m512 k_scale,
                               float *scores, int accumulate) {
  /* A product waits 5 cycles for the one before it in the same sum: few queries get two sums each. */
  const int chains = count <= 2 ? 2 : 1;
  __m512i sum[SCORE_QUERIES][3][2]; /* of each byte of the query, of even and odd columns */
  const int8_t *codes = q->codes + first * 4 * q->stride;
  const int32_t *sums = q->sums + first * 4 * q->sums_stride;
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) /* u8 keys are 128 too large: start from what that adds */
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++) {
      sum[i][b][0] = _mm512_set1_epi32(-128 * sums[i * 4 * q->sums_stride + b]);
      sum[i][b][1] = _mm512_setzero_si512();
    }
  int num_columns = (q->dim + 3) / 4; /* an odd one out: the next is there, and its codes are 0 */
  for (int j = 0; j < num_columns; j += chains)
#pragma GCC unroll 2
    for (int c = 0; c < chains; c++, codes += 16) {
      __m512i column = columns[j + c];
#pragma GCC unroll 8
      for (int i = 0; i < count; i++)
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++)
          multiply_add_four(&sum[i][b][c], column, codes + i * 4 * q->stride + 4 * b);
    }
  const __m512 byte = _mm512_set1_ps(256.0f);
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
#pragma GCC unroll 3
    for (int b = 0; b < bytes && chains == 2; b++) sum[i][b][0] = _mm512_add_epi32(sum[i][b][0], sum[i][b][1]);
    __m512 dot = _mm512_cvtepi32_ps(sum[i][0][0]);
#pragma GCC unroll 3
    for (int b = 1; b < bytes; b++) dot = _mm512_fmadd_ps(dot, byte, _mm512_cvtepi32_ps(sum[i][b][0]));
    float unit = q->scale[(first + i) * q->sums_stride] * (bytes == 3 ? 1.0f : bytes == 2 ? 256.0f : 65536.0f);
    __m512 scale = _mm512_mul_ps(k_scale, _mm512_set1_ps(unit));
    float *out = scores + (first + i) * KVEDGE_TILE;
    __m512 score = _mm512_mul_ps(dot, scale);
    if (accumulate) score = _mm512_add_ps(score, _mm512_maskz_loadu_ps(valid, out));
    _mm512_mask_storeu_ps(out, valid, score);
  }
}

KVEDGE_INLINE void score_queries(const kvedge_query *q, const int bytes, const __m512i *columns,
                                 __mmask16 valid, __m512 scale, float *scores, int accumulate) {
  int i = 0;
  for (; i + SCORE_QUERIES <= q->num_queries; i += SCORE_QUERIES)
    score_block(q, i, SCORE_QUERIES, bytes, columns, valid, scale, scores, accumulate);
  switch (q->num_queries - i) {
    case 7: score_block(q, i, 7, bytes, columns, valid, scale, scores, accumulate); break;
    case 6: score_block(q, i, 6, bytes, columns, valid, scale, scores, accumulate); break;
    case 5: score_block(q, i, 5, bytes, columns, valid, scale, scores, accumulate); break;
    case 4: score_block(q, i, 4, bytes, columns, valid, scale, scores, accumulate); break;
    case 3: score_block(q, i, 3, bytes, columns, valid, scale, scores, accumulate); break;
    case 2: score_block(q, i, 2, bytes, columns, valid, scale, scores, accumulate); break;
    case 1: score_block(q, i, 1, bytes, columns, valid, scale, scores, accumulate); break;
  }
}

static void scores_i8_blocks_avx512vnni(const kvedge_query *q, const int8_t *const *k, ptrdiff_t offset,
                                        ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                                        const int8_t *const *prefetch, float *scores, int accumulate) {
  __m512i columns[1024 / 4]; /* (dim / 4) x 16 tokens x 4 channels; what a dim of 64 uses is 1 KB */
  for (int t = 0; t < num_tokens; t += BLOCK) {
    int tokens = num_tokens - t < BLOCK ? num_tokens - t : BLOCK;
    for (int d = 0; d < q->dim; d += 64) {
      const int8_t *from = k[t / BLOCK] + offset + d;
      const char *ahead = prefetch ? (const char *)prefetch[t / BLOCK] + offset + d : NULL;
      if (tokens == BLOCK && q->dim - d >= 64) /* the same code, with nothing left to ask */
        transpose_keys(from, token_stride, BLOCK, 1, ~0ull, ahead, columns + d / 4);
      else
        transpose_keys(from, token_stride, tokens, 0, first_bytes(q->dim - d), ahead, columns + d / 4);
    }
    __mmask16 valid = (__mmask16)((1u << tokens) - 1);
    __m512 scale = _mm512_loadu_ps(k_scale + t);
    switch (q->num_bytes) {
      case 3: score_queries(q, 3, columns, valid, scale, scores + t, accumulate); break;
      case 2: score_queries(q, 2, columns, valid, scale, scores + t, accumulate); break;
      default: score_queries(q, 1, columns, valid, scale, scores + t, accumulate);
    }
  }
}

/* Blocks of rows that all lie token_stride apart. */
KVEDGE_INLINE void blocks_of(const void *rows, ptrdiff_t token_stride, const int8_t *blocks[KVEDGE_TILE_BLOCKS]) {
  for (int b = 0; b < KVEDGE_TILE_BLOCKS; b++) blocks[b] = (const int8_t *)rows + b * BLOCK * token_stride;
}

static void scores_i8_avx512vnni(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                                 int num_tokens, const float *k_scale, const void *prefetch,
                                 float *scores, int accumulate) {
  const int8_t *blocks[KVEDGE_TILE_BLOCKS], *ahead[KVEDGE_TILE_BLOCKS];
  blocks_of(k, token_stride, blocks);
  if (prefetch) blocks_of(prefetch, token_stride, ahead);
  scores_i8_blocks_avx512vnni(q, blocks, 0, token_stride, num_tokens, k_scale, prefetch ? ahead : NULL, scores,
                              accumulate);
}

/* 2^x for x <= 0, as exp2_nonpositive(). */
KVEDGE_INLINE __m512 exp2_of(__m512 x) {
  const __m512 round = _mm512_set1_ps(ROUND_TO_INTEGER);
  __m512 clamped = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
  __m512 rounded = _mm512_add_ps(clamped, round);
  __m512 f = _mm512_sub_ps(clamped, _mm512_sub_ps(rounded, round)), y = _mm512_set1_ps(EXP2_5);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_4));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_3));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_2));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_1));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(rounded), 23);
  __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP2_NOTHING), _CMP_GT_OQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(counts, _mm512_castps_si512(y), exponent));
}

static void softmax_avx512vnni(float *scores, int num_queries, int num_tokens, const float *factor,
                               float *max, float *sum, float *alpha) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  int blocks = (num_tokens + 15) / 16;
  __mmask16 last = (__mmask16)(0xffffu >> (16 * blocks - num_tokens));
  float fallen[KVEDGE_STACK] __attribute__((aligned(64))); /* old maximum minus new, times factor */
  for (int i = 0; i < num_queries; i++) {
    float *row = scores + i * KVEDGE_TILE;
    __m512 largest = _mm512_mask_loadu_ps(nothing, last, row + 16 * (blocks - 1));
    for (int j = 0; j + 1 < blocks; j++) largest = _mm512_max_ps(largest, _mm512_loadu_ps(row + 16 * j));
    float tile_max = _mm512_reduce_max_ps(largest), old = max[i];
    max[i] = old > tile_max ? old : tile_max;
    fallen[i] = (old - max[i]) * factor[i];
  }
  for (int i = 0; i < num_queries; i += 16) {
    __mmask16 valid = num_queries - i >= 16 ? 0xffff : (__mmask16)((1u << (num_queries - i)) - 1);
    _mm512_mask_storeu_ps(alpha + i, valid, exp2_of(_mm512_maskz_loadu_ps(valid, fallen + i)));
  }
  for (int i = 0; i < num_queries; i++) {
    float *row = scores + i * KVEDGE_TILE;
    __m512 m = _mm512_set1_ps(max[i]), f = _mm512_set1_ps(factor[i]), total = _mm512_setzero_ps();
    for (int j = 0; j < blocks; j++) {
      __mmask16 valid = j + 1 < blocks ? 0xffff : last;
      __m512 score = _mm512_mask_loadu_ps(nothing, valid, row + 16 * j);
      __m512 p = exp2_of(_mm512_mul_ps(_mm512_sub_ps(score, m), f));
      _mm512_storeu_ps(row + 16 * j, p);
      total = _mm512_add_ps(total, p);
    }
    for (int j = blocks; j < KVEDGE_TILE / 16; j++) _mm512_storeu_ps(row + 16 * j, _mm512_setzero_ps());
    sum[i] = sum[i] * alpha[i] + _mm512_reduce_add_ps(total);
  }
}

/* Weights of a tile as unsigned codes of 24 bits, or fewer and zeros, four tokens at a time as
 * split_bytes() leaves them. Returns the scale of the codes. */
KVEDGE_INLINE float encode_weights(const float *p, const float *v_scale, int num_tokens, int num_bytes,
                                   uint8_t *codes) {
  __m512 weight[KVEDGE_TILE / 16], largest_of = _mm512_setzero_ps();
  int blocks = (num_tokens + 15) / 16;
  for (int j = 0; j < blocks; j++) {
    weight[j] = _mm512_mul_ps(_mm512_loadu_ps(p + 16 * j), _mm512_loadu_ps(v_scale + 16 * j));
    largest_of = _mm512_max_ps(largest_of, weight[j]);
  }
  float largest = _mm512_reduce_max_ps(largest_of);
  float most = num_bytes == 3 ? WEIGHT_MAX : num_bytes == 2 ? WEIGHT_MAX_16 : WEIGHT_MAX_8;
  float inverse = largest > WEIGHT_NOTHING ? most / largest : 0.0f;
  __m512 factor = _mm512_set1_ps(inverse);
  for (int j = 0; j < blocks; j++) {
    __m512i code;
    if (num_bytes == 3) {
      code = _mm512_cvtps_epi32(_mm512_mul_ps(weight[j], factor));
    } else {
      __m512 dithered = _mm512_fmadd_ps(weight[j], factor, _mm512_loadu_ps(kvedge_dither + 16 * j));
      code = _mm512_slli_epi32(_mm512_cvttps_epi32(dithered), num_bytes == 2 ? 8 : 16);
    }
    _mm512_storeu_si512(codes + 64 * j, split_bytes(code));
  }
  return inverse > 0.0f ? largest / most : 0.0f;
}

/* Interleaves the bytes of four rows: dword e of 128-bit lane L of out[c] has channel 16 L + 4 c + e. */
KVEDGE_INLINE void interleave_4_rows(const int8_t *row[4], const int whole, __mmask64 valid, __m512i *out) {
  __m512i a = load_row(row[0], whole, valid), b = load_row(row[1], whole, valid);
  __m512i c = load_row(row[2], whole, valid), d = load_row(row[3], whole, valid);
  __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
  __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_unpacklo_epi16(low_ab, low_cd);
  out[1] = _mm512_unpackhi_epi16(low_ab, low_cd);
  out[2] = _mm512_unpacklo_epi16(high_ab, high_cd);
  out[3] = _mm512_unpackhi_epi16(high_ab, high_cd);
}

KVEDGE_INLINE void interleave_values(const int8_t *const *v, ptrdiff_t offset, ptrdiff_t token_stride,
                                     int num_tokens, const int whole, __mmask64 valid,
                                     const int8_t *const *prefetch, __m512i *out) {
  for (int t = 0; t < num_tokens; t += 4, out += 4) {
    const int8_t *row[4];
    for (int j = 0; j < 4; j++) { /* rows past the last token repeat it: their weight is 0 */
      int token = t + j < num_tokens ? t + j : num_tokens - 1;
      ptrdiff_t at = token % BLOCK * token_stride + offset;
      row[j] = v[t / BLOCK] + at;
      if (prefetch) _mm_prefetch((const char *)prefetch[t / BLOCK] + at, _MM_HINT_T0);
    }
    interleave_4_rows(row, whole, valid, out);
  }
}

/* Adds a tile's values to 64 channels (those in `valid`) of `count` queries, with weights of `bytes`
 * bytes (constants where this is inlined). */
KVEDGE_INLINE void weighted_sum_block(const __m512i *values, int num_tokens, __mmask64 valid,
                                      const int count, const int bytes, const uint8_t *codes,
                                      const float *scale, const float *alpha, float *acc,
                                      ptrdiff_t acc_stride) {
  __m512i sum[SUM_QUERIES][3][4]; /* of each byte of the weights, of each quarter of the channels */
#pragma GCC unroll 6
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[i][b][c] = _mm512_setzero_si512();
  for (int t = 0; t < num_tokens; t += 4, values += 4)
#pragma GCC unroll 6
    for (int i = 0; i < count; i++)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        int32_t four; /* tokens */
        memcpy(&four, codes + i * CODE_ROW + 4 * t + 4 * b, sizeof four);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) multiply_add(&sum[i][b][c], _mm512_set1_epi32(four), values[c]);
      }
  const __m512 byte = _mm512_set1_ps(256.0f);
#pragma GCC unroll 6
  for (int i = 0; i < count; i++) {
    __m512 total[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      total[c] = _mm512_cvtepi32_ps(sum[i][0][c]);
#pragma GCC unroll 3
      for (int b = 1; b < bytes; b++)
        total[c] = _mm512_fmadd_ps(total[c], byte, _mm512_cvtepi32_ps(sum[i][b][c]));
    }
    /* 128-bit lane L of total[c] belongs to lane c of channels 16 L */
    __m512 low_ab = _mm512_shuffle_f32x4(total[0], total[1], 0x44), high_ab = _mm512_shuffle_f32x4(total[0], total[1], 0xee);
    __m512 low_cd = _mm512_shuffle_f32x4(total[2], total[3], 0x44), high_cd = _mm512_shuffle_f32x4(total[2], total[3], 0xee);
    __m512 ordered[4] = {
        _mm512_shuffle_f32x4(low_ab, low_cd, 0x88), _mm512_shuffle_f32x4(low_ab, low_cd, 0xdd),
        _mm512_shuffle_f32x4(high_ab, high_cd, 0x88), _mm512_shuffle_f32x4(high_ab, high_cd, 0xdd)};
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      __mmask16 mask = (__mmask16)(valid >> (16 * c));
      float *out = acc + i * acc_stride + 16 * c;
      __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, out), _mm512_set1_ps(alpha[i]));
      _mm512_mask_storeu_ps(out, mask, _mm512_fmadd_ps(ordered[c], _mm512_set1_ps(scale[i]), kept));
    }
  }
}

/* One block of 64 channels for all queries, as many at a time as registers hold the sums of. */
KVEDGE_INLINE void weighted_sum_queries(const __m512i *values, int num_tokens, __mmask64 valid,
                                        int num_queries, const int bytes, const uint8_t *codes,
                                        const float *scale, const float *alpha, float *acc,
                                        ptrdiff_t acc_stride) {
#define WEIGHTED_SUM(count)                                                                        \
  weighted_sum_block(values, num_tokens, valid, count, bytes, codes + i * CODE_ROW, scale + i, \
                     alpha + i, acc + i * acc_stride, acc_stride)
  const int most = SUM_REGISTERS / (4 * bytes);
  int i = 0;
  for (; i + most <= num_queries; i += most) WEIGHTED_SUM(most);
  int left = num_queries - i;
  if (bytes == 1 && left >= 3) { /* most is 6 */
    WEIGHTED_SUM(3);
    i += 3;
    left -= 3;
  }
  if (left == 2) WEIGHTED_SUM(2);
  if (left == 1) WEIGHTED_SUM(1);
#undef WEIGHTED_SUM
}

static void weighted_sum_i8_blocks_avx512vnni(const int8_t *const *v, ptrdiff_t offset, ptrdiff_t token_stride,
                                              int num_tokens, int dim, int num_queries, int num_bytes,
                                              const float *p, const float *v_scale, const float *alpha,
                                              const int8_t *const *prefetch, float *acc, ptrdiff_t acc_stride) {
  _Alignas(64) uint8_t codes[KVEDGE_STACK * CODE_ROW];
  float scale[KVEDGE_STACK];
  for (int i = 0; i < num_queries; i++)
    scale[i] = encode_weights(p + i * KVEDGE_TILE, v_scale, num_tokens, num_bytes, codes + i * CODE_ROW);
  for (int d = 0; d < dim; d += 64) {
    __m512i values[KVEDGE_TILE]; /* (tokens / 4, 4) */
    __mmask64 valid = first_bytes(dim - d);
    if (dim - d >= 64) interleave_values(v, offset + d, token_stride, num_tokens, 1, valid, prefetch, values);
    else interleave_values(v, offset + d, token_stride, num_tokens, 0, valid, prefetch, values);
#define WEIGHTED_SUM_QUERIES(bytes) \
  weighted_sum_queries(values, num_tokens, valid, num_queries, bytes, codes, scale, alpha, acc + d, acc_stride)
    switch (num_bytes) {
      case 3: WEIGHTED_SUM_QUERIES(3); break;
      case 2: WEIGHTED_SUM_QUERIES(2); break;
      default: WEIGHTED_SUM_QUERIES(1);
    }
#undef WEIGHTED_SUM_QUERIES
  }
}

static void weighted_sum_i8_avx512vnni(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                       int num_queries, int num_bytes, const float *p,
                                       const float *v_scale, const float *alpha, const void *prefetch,
                                       float *acc, ptrdiff_t acc_stride) {
  const int8_t *blocks[KVEDGE_TILE_BLOCKS], *ahead[KVEDGE_TILE_BLOCKS];
  blocks_of(v, token_stride, blocks);
  if (prefetch) blocks_of(prefetch, token_stride, ahead);
  weighted_sum_i8_blocks_avx512vnni(blocks, 0, token_stride, num_tokens, dim, num_queries, num_bytes, p, v_scale,
                                    alpha, prefetch ? ahead : NULL, acc, acc_stride);
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
    .encode_query = encode_query_avx512vnni,
    .scores_i8 = scores_i8_avx512vnni,
    .scores_f32 = scores_f32_portable,
    .softmax = softmax_avx512vnni,
    .weighted_sum_i8 = weighted_sum_i8_avx512vnni,
    .scores_i8_blocks = scores_i8_blocks_avx512vnni,
    .weighted_sum_i8_blocks = weighted_sum_i8_blocks_avx512vnni,
    .weighted_sum_f32 = weighted_sum_f32_portable,
    .read_bytes = read_bytes_avx512vnni,
};
KVEDGE_TARGET_END
#endif
