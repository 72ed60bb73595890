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
  PAIR = 2,             /* blocks that are scored together, and share the loads of the queries */
  SCORE_QUERIES = 4,    /* x 3 bytes x PAIR = 24 of the 32 registers */
  FEW_QUERIES = 8,      /* up to which for every 64 channels keys are transposed by lanes only */
  FEW_BLOCKS = 32,      /* queries times 64 channels, whose codes are kept spread then */
  FEW_CHANNELS = 512,   /* up to which sums over two bytes of a query fit 32 bits: 512 x 127 x 32767 */
  SUM_REGISTERS = 24,   /* of 32: 4 quarters of the channels, or 2, x bytes of the weights x queries */
  SUM_QUERIES = 4,
};

/* sum += u8 x s8 products by fours. Written as instructions, since compilers (GCC 12) surround the
 * intrinsic with copies of the accumulators, which take twice the time of the products. */
KVEDGE_INLINE void multiply_add(__m512i *sum, __m512i u8, __m512i s8) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(u8), "v"(s8));
}

/* Hides where a pointer comes from. Compilers (GCC 12) else keep a pointer for each of 16 rows, most of them
 * spilled to vector registers, which takes longer than the arithmetic on the rows. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Four bytes, for all lanes. */
KVEDGE_INLINE __m512i four_for_all(const void *bytes) {
  int32_t four;
  memcpy(&four, bytes, sizeof four);
  return _mm512_set1_epi32(four);
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

/* Lane L of out[c] is lane c of in[L], lanes being of 128 bits. */
KVEDGE_INLINE void transpose_lanes(const __m512i in[4], __m512i out[4]) {
  __m512i low_01 = _mm512_shuffle_i32x4(in[0], in[1], 0x44), high_01 = _mm512_shuffle_i32x4(in[0], in[1], 0xee);
  __m512i low_23 = _mm512_shuffle_i32x4(in[2], in[3], 0x44), high_23 = _mm512_shuffle_i32x4(in[2], in[3], 0xee);
  out[0] = _mm512_shuffle_i32x4(low_01, low_23, 0x88);
  out[1] = _mm512_shuffle_i32x4(low_01, low_23, 0xdd);
  out[2] = _mm512_shuffle_i32x4(high_01, high_23, 0x88);
  out[3] = _mm512_shuffle_i32x4(high_01, high_23, 0xdd);
}

/* Codes are stored byte by byte: for every 64 channels 64 high bytes, 64 middle ones and 64 low ones. Where 32 or
 * fewer are left, they are there twice, since two rows then share a register. */
enum { CODES_OF_64 = 3 * 64 };

static void encode_query_avx512vnni(const float *x, int dim, float factor, float largest, int8_t *codes, float *scale,
                                    int32_t *offsets) {
  float inverse = largest > QUERY_NOTHING ? QUERY_MAX / largest : 0.0f;
  const __m512i carry = _mm512_set1_epi32(0x808080); /* makes unsigned digits of signed ones and back */
  const __m512i by_byte = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 64, codes += CODES_OF_64) {
    __m512i digits[4], lanes[4];
    __mmask64 valid = first_bytes(dim - d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)(valid >> 16 * i), x + d + 16 * i), _mm512_set1_ps(factor));
      __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse)));
      digits[i] = split_bytes(_mm512_xor_si512(_mm512_add_epi32(code, carry), carry));
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)128), digits[i]);
      digits[i] = _mm512_permutexvar_epi32(by_byte, digits[i]); /* lane b: byte b of 16 channels */
    }
    if (dim - d <= 32) {
      digits[2] = digits[0];
      digits[3] = digits[1];
    }
    transpose_lanes(digits, lanes);
    for (int b = 0; b < 3; b++) _mm512_storeu_si512(codes + 64 * b, lanes[b]);
  }
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  __m128i all = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  _mm_storeu_si128((__m128i *)offsets, _mm_sub_epi32(_mm_setzero_si128(), all));
  *scale = inverse > 0.0f ? largest / QUERY_MAX : 0.0f;
}

/* In each 128-bit lane, dword i of out[c] is dword c of row[i]. */
KVEDGE_INLINE void transpose_in_lanes(const __m512i row[4], __m512i out[4]) {
  __m512i low_01 = _mm512_unpacklo_epi32(row[0], row[1]), high_01 = _mm512_unpackhi_epi32(row[0], row[1]);
  __m512i low_23 = _mm512_unpacklo_epi32(row[2], row[3]), high_23 = _mm512_unpackhi_epi32(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi64(low_01, low_23);
  out[1] = _mm512_unpackhi_epi64(low_01, low_23);
  out[2] = _mm512_unpacklo_epi64(high_01, high_23);
  out[3] = _mm512_unpackhi_epi64(high_01, high_23);
}

/* transpose_scales of whole blocks. (`all`: of four columns; a constant where this is inlined.) */
KVEDGE_INLINE void transpose_scales_of(const int all, const char *scales, ptrdiff_t token_stride, int num_tokens,
                                       int num_columns, float factor, float *out, ptrdiff_t out_stride) {
  const __mmask8 columns = (__mmask8)((1 << num_columns) - 1);
  for (int t = 0; t < num_tokens; t += 16, scales += 16 * token_stride) {
    __m512i row[4], column[4]; /* lane L of row[i]: row t + 4 L + i */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m128i four[4];
#pragma GCC unroll 4
      for (int lane = 0; lane < 4; lane++) {
        const char *at = scales + (4 * lane + i) * token_stride;
        four[lane] = all ? _mm_loadu_si128((const __m128i *)at) : _mm_maskz_loadu_epi32(columns, at);
      }
      row[i] = _mm512_inserti32x4(_mm512_castsi128_si512(four[0]), four[1], 1);
      row[i] = _mm512_inserti32x4(_mm512_inserti32x4(row[i], four[2], 2), four[3], 3);
    }
    transpose_in_lanes(row, column);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
      if (all || c < num_columns)
        _mm512_storeu_ps(out + c * out_stride + t, _mm512_mul_ps(_mm512_castsi512_ps(column[c]), _mm512_set1_ps(factor)));
  }
}

static void transpose_scales_avx512vnni(const float *scales, ptrdiff_t token_stride, int num_tokens, int num_columns,
                                        float factor, float *out, ptrdiff_t out_stride) {
  int whole = num_tokens / 16 * 16;
  const char *from = (const char *)scales;
  if (num_columns == 4) transpose_scales_of(1, from, token_stride, whole, 4, factor, out, out_stride);
  else transpose_scales_of(0, from, token_stride, whole, num_columns, factor, out, out_stride);
  transpose_scales_portable((const float *)(from + whole * token_stride), token_stride, num_tokens - whole, num_columns,
                            factor, out + whole, out_stride);
}

/* ---- Keys ---- */

/* A block of 16 tokens' keys, and those to ask for. */
typedef struct {
  const int8_t *rows;
  const char *ahead;
  ptrdiff_t token_stride;
  int num_tokens; /* that are there */
} key_rows;

/* How the rows of a block are read, 64 channels at a time: plainly; with 1 to 32 channels left, two to a
 * register; or so that only tokens and channels that are there are read. */
typedef enum { WHOLE, HALF, PART, HALF_PART } extent;

KVEDGE_INLINE int is_half(const extent how) { return how == HALF || how == HALF_PART; }

/* Rows 4u..4u+3 of 64 channels from d on, as unsigned bytes; or 8u..8u+3, in whose upper halves are rows
 * 8u+4..8u+7. Rows past the last token repeat it, channels past the last are 128. */
KVEDGE_INLINE void load_keys(const key_rows *k, const extent how, int u, int d, int dim, __m512i row[4]) {
  const __m512i to_unsigned = _mm512_set1_epi8((char)0x80);
  const int first = (is_half(how) ? 8 : 4) * u;
  const int last = how == WHOLE || how == HALF ? BLOCK - 1 : k->num_tokens < BLOCK ? k->num_tokens - 1 : BLOCK - 1;
  const ptrdiff_t stride = k->token_stride;
  const int8_t *from = k->rows + first * stride + d;
  const char *ahead = k->ahead + d * BLOCK + 64 * 4 * u; /* a line for each register */
  OPAQUE(from);
#pragma GCC unroll 4
  for (int t = 0; t < 4; t++) {
    ptrdiff_t at = (first + t <= last ? t : last - first) * stride;
    if (how == WHOLE) row[t] = _mm512_loadu_si512(from + at);
    else if (how == PART) row[t] = _mm512_maskz_loadu_epi8(first_bytes(dim - d), from + at);
    else {
      __mmask32 valid = (__mmask32)first_bytes(dim - d);
      ptrdiff_t upper = (first + 4 + t <= last ? 4 + t : last - first) * stride;
      row[t] = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(valid, from + at));
      row[t] = _mm512_inserti64x4(row[t], _mm256_maskz_loadu_epi8(valid, from + upper), 1);
    }
    _mm_prefetch(ahead + 64 * t, _MM_HINT_T1);
    row[t] = _mm512_xor_si512(row[t], to_unsigned);
  }
}

/* ---- Scores for many queries ---- */

/* Channels 4j..4j+3 of 16 tokens into columns[PAIR * j], for 64 channels. */
KVEDGE_INLINE void transpose_rows(const key_rows *k, const extent how, int d, int dim, __m512i *columns) {
  __m512i quads[4][4];
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++) {
    __m512i row[4];
    load_keys(k, how, u, d, dim, row);
    transpose_in_lanes(row, quads[u]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512i units[4] = {quads[0][c], quads[1][c], quads[2][c], quads[3][c]}, ordered[4];
    transpose_lanes(units, ordered);
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) columns[PAIR * (4 * lane + c)] = ordered[lane];
  }
}

static __attribute__((noinline)) void transpose_part(const key_rows *k, int d, int dim, __m512i *columns) {
  transpose_rows(k, PART, d, dim, columns);
}

/* Scores of one block of tokens or of a pair for `count` queries of `bytes` bytes (constants where this is
 * inlined). */
KVEDGE_INLINE void score_blocks(const kvedge_query *q, int first, const int count, const int bytes,
                                const int blocks, const __m512i *columns, const float *k_scale, float *scores,
                                int accumulate) {
  /* A product waits 5 cycles for the one before it in the same sum: few sums are made twice as many. */
  const int chains = count * bytes * blocks <= 8 ? 2 : 1;
  __m512i sum[SCORE_QUERIES][3][PAIR][2]; /* of each byte of the query, of even and odd columns */
  const int8_t *codes = q->codes + first * KVEDGE_CODE_BYTES * q->stride;
  const int32_t *offsets = q->offsets + first * 4 * q->scale_stride;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++)
#pragma GCC unroll 2
      for (int k = 0; k < blocks; k++) {
        sum[i][b][k][0] = _mm512_set1_epi32(offsets[i * 4 * q->scale_stride + b]);
        sum[i][b][k][1] = _mm512_setzero_si512();
      }
  int num_columns = (q->dim + 3) / 4; /* an odd one out: the next is there, and its codes are 0 */
  for (int j = 0; j < num_columns; j += chains, columns += chains * PAIR) {
    const int8_t *at = codes + j / 16 * CODES_OF_64 + j % 16 * 4;
#pragma GCC unroll 2
    for (int c = 0; c < chains; c++) {
      __m512i column[PAIR];
#pragma GCC unroll 2
      for (int k = 0; k < blocks; k++) column[k] = columns[PAIR * c + k];
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++) {
          __m512i four = four_for_all(at + i * KVEDGE_CODE_BYTES * q->stride + 4 * c + 64 * b);
#pragma GCC unroll 2
          for (int k = 0; k < blocks; k++) multiply_add(&sum[i][b][k][c], column[k], four);
        }
    }
  }
  const __m512 byte = _mm512_set1_ps(256.0f);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    float unit = q->scale[(first + i) * q->scale_stride] * (bytes == 3 ? 1.0f : bytes == 2 ? 256.0f : 65536.0f);
#pragma GCC unroll 2
    for (int k = 0; k < blocks; k++) {
#pragma GCC unroll 3
      for (int b = 0; b < bytes && chains == 2; b++)
        sum[i][b][k][0] = _mm512_add_epi32(sum[i][b][k][0], sum[i][b][k][1]);
      __m512 dot = _mm512_cvtepi32_ps(sum[i][0][k][0]);
#pragma GCC unroll 3
      for (int b = 1; b < bytes; b++) dot = _mm512_fmadd_ps(dot, byte, _mm512_cvtepi32_ps(sum[i][b][k][0]));
      float *out = scores + (first + i) * KVEDGE_TILE + k * BLOCK;
      __m512 score = _mm512_mul_ps(dot, _mm512_mul_ps(_mm512_loadu_ps(k_scale + k * BLOCK), _mm512_set1_ps(unit)));
      if (accumulate) score = _mm512_add_ps(score, _mm512_loadu_ps(out));
      _mm512_storeu_ps(out, score);
    }
  }
}

KVEDGE_INLINE void score_queries(const kvedge_query *q, const int bytes, const int blocks, const __m512i *columns,
                                 const float *k_scale, float *scores, int accumulate) {
  int i = 0;
  for (; i + SCORE_QUERIES <= q->num_queries; i += SCORE_QUERIES)
    score_blocks(q, i, SCORE_QUERIES, bytes, blocks, columns, k_scale, scores, accumulate);
  switch (q->num_queries - i) {
    case 3: score_blocks(q, i, 3, bytes, blocks, columns, k_scale, scores, accumulate); break;
    case 2: score_blocks(q, i, 2, bytes, blocks, columns, k_scale, scores, accumulate); break;
    case 1: score_blocks(q, i, 1, bytes, blocks, columns, k_scale, scores, accumulate); break;
  }
}

static void score_many(const kvedge_query *q, const int8_t *const *k, ptrdiff_t offset, ptrdiff_t token_stride,
                       int num_tokens, const float *k_scale, const int8_t *const *ahead, float *scores,
                       int accumulate) {
  __m512i columns[PAIR * 1024 / 4]; /* (dim / 4, PAIR) x 16 tokens x 4 channels; a dim of 64 uses 2 KB */
  for (int t = 0; t < num_tokens; t += PAIR * BLOCK) {
    int blocks = num_tokens - t > BLOCK ? 2 : 1;
    for (int b = 0; b < blocks; b++) {
      int block = t / BLOCK + b;
      key_rows rows = {.rows = k[block] + offset, .ahead = (const char *)ahead[block],
                       .token_stride = token_stride, .num_tokens = num_tokens - block * BLOCK};
      for (int d = 0; d < q->dim; d += 64) {
        __m512i *to = columns + PAIR * (d / 4) + b;
        if (rows.num_tokens >= BLOCK && q->dim - d >= 64) transpose_rows(&rows, WHOLE, d, q->dim, to);
        else transpose_part(&rows, d, q->dim, to);
      }
    }
#define SCORE_QUERIES_OF(bytes)                                                                     \
  if (blocks == 2) score_queries(q, bytes, 2, columns, k_scale + t, scores + t, accumulate); \
  else score_queries(q, bytes, 1, columns, k_scale + t, scores + t, accumulate)
    switch (q->num_bytes) {
      case 3: SCORE_QUERIES_OF(3); break;
      case 2: SCORE_QUERIES_OF(2); break;
      default: SCORE_QUERIES_OF(1);
    }
#undef SCORE_QUERIES_OF
  }
}

/* ---- Scores for few queries ---- */

/* Sums of 16 tokens for the queries of a stack, from one 64 channels to the next: of the query's high and middle
 * bytes, and of its low ones if it has three. In lane L of sum u is that of tokens 4u..4u+3 over the channels
 * which lie in lane L. */
typedef __m512i few_sums[KVEDGE_STACK][2][4];

/* The codes of few queries as score_64() multiplies them, (queries, channels / 64, 4, bytes): lane L of the vector of
 * c and byte b has that byte of channels 16 L + 4 c .. + 3, four times. */
typedef __m512i few_codes[FEW_BLOCKS * 4 * 3];

KVEDGE_INLINE void spread_codes(const kvedge_query *q, const int bytes, __m512i *out) {
  for (int i = 0; i < q->num_queries; i++) {
    const int8_t *codes = q->codes + i * KVEDGE_CODE_BYTES * q->stride;
    for (int d = 0; d < q->dim; d += 64, codes += CODES_OF_64, out += 4 * bytes)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i all = _mm512_loadu_si512(codes + 64 * b);
        out[b] = _mm512_shuffle_epi32(all, 0x00);
        out[bytes + b] = _mm512_shuffle_epi32(all, 0x55);
        out[2 * bytes + b] = _mm512_shuffle_epi32(all, 0xaa);
        out[3 * bytes + b] = _mm512_shuffle_epi32(all, 0xff);
      }
  }
}

/* Half of adding lanes: lanes 0 and 1 of the result add up to those of a, 2 and 3 to those of b. */
KVEDGE_INLINE __m512i add_half_lanes(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

/* Scores of a block for one query: `sums` of the last 64 channels as score_64() has them. */
KVEDGE_INLINE void store_scores(const kvedge_query *q, int i, const int bytes, __m512i halves[2][2],
                                const float *k_scale, float *out, int accumulate) {
  const int32_t *offset = q->offsets + i * 4 * q->scale_stride;
  __m512 dot = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int part = 0; part < (bytes + 1) / 2; part++) {
    __m512i sum = _mm512_add_epi32(_mm512_shuffle_i32x4(halves[part][0], halves[part][1], 0x88),
                                   _mm512_shuffle_i32x4(halves[part][0], halves[part][1], 0xdd));
    int32_t start = part == 1 ? offset[2] : bytes == 1 ? offset[0] : 256 * offset[0] + offset[1];
    __m512 number = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(start)));
    dot = part == 0 ? number : _mm512_fmadd_ps(dot, _mm512_set1_ps(256.0f), number);
  }
  float unit = q->scale[i * q->scale_stride] * (bytes == 3 ? 1.0f : bytes == 2 ? 256.0f : 65536.0f);
  __m512 score = _mm512_mul_ps(dot, _mm512_mul_ps(_mm512_loadu_ps(k_scale), _mm512_set1_ps(unit)));
  if (accumulate) score = _mm512_add_ps(score, _mm512_loadu_ps(out));
  _mm512_storeu_ps(out, score);
}

/* A block's 64 channels from d on: adds to the sums, and after the last channels makes scores of them. */
KVEDGE_INLINE void score_64(const kvedge_query *q, const int bytes, const extent how, const __m512i *codes,
                            const key_rows *k, int d, const float *k_scale, few_sums sums, float *scores,
                            int accumulate) {
  const int parts = (bytes + 1) / 2, units = is_half(how) ? 2 : 4;
  __m512i column[4][4]; /* of each unit */
#pragma GCC unroll 4
  for (int u = 0; u < units; u++) {
    __m512i row[4];
    load_keys(k, how, u, d, q->dim, row);
    transpose_in_lanes(row, column[u]);
  }
  codes += d / 64 * 4 * bytes;
  for (int i = 0; i < q->num_queries; i++, codes += (q->dim + 63) / 64 * 4 * bytes) {
    __m512i sum[3][4]; /* of each byte, of each unit */
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++)
#pragma GCC unroll 4
      for (int u = 0; u < units; u++) sum[b][u] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i query = codes[c * bytes + b];
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) multiply_add(&sum[b][u], column[u][c], query);
      }
#pragma GCC unroll 4
    for (int u = 0; u < units; u++) {
      if (bytes > 1) sum[0][u] = _mm512_add_epi32(_mm512_slli_epi32(sum[0][u], 8), sum[1][u]);
      if (bytes > 2) sum[1][u] = sum[2][u];
    }
    __m512i halves[2][2];
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
      __m512i *before = sums[i][part];
      if (is_half(how)) { /* unit u has tokens 8u..8u+3 in its lower half, 8u+4..8u+7 in the upper one */
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++)
          halves[part][u] = d == 0 ? sum[part][u]
                                   : _mm512_add_epi32(sum[part][u], add_half_lanes(before[2 * u], before[2 * u + 1]));
      } else {
#pragma GCC unroll 4
        for (int u = 0; u < 4 && d > 0; u++) sum[part][u] = _mm512_add_epi32(sum[part][u], before[u]);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++)
          if (d + 64 < q->dim) before[u] = sum[part][u];
        halves[part][0] = add_half_lanes(sum[part][0], sum[part][1]);
        halves[part][1] = add_half_lanes(sum[part][2], sum[part][3]);
      }
    }
    if (d + 64 >= q->dim) store_scores(q, i, bytes, halves, k_scale, scores + i * KVEDGE_TILE, accumulate);
  }
}

static __attribute__((noinline)) void score_64_of_part(const kvedge_query *q, const __m512i *codes,
                                                       const key_rows *k, int d,
                                                       const float *k_scale, few_sums sums, float *scores,
                                                       int accumulate) {
#define SCORE_64_OF_PART(bytes)                                                                              \
  if (q->dim - d <= 32) score_64(q, bytes, HALF_PART, codes, k, d, k_scale, sums, scores, accumulate); \
  else score_64(q, bytes, PART, codes, k, d, k_scale, sums, scores, accumulate)
  switch (q->num_bytes) {
    case 3: SCORE_64_OF_PART(3); break;
    case 2: SCORE_64_OF_PART(2); break;
    default: SCORE_64_OF_PART(1);
  }
#undef SCORE_64_OF_PART
}

KVEDGE_INLINE void score_few(const kvedge_query *q, const int bytes, const int8_t *const *k, ptrdiff_t offset,
                             ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                             const int8_t *const *ahead, float *scores, int accumulate) {
  few_sums sums;
  few_codes codes;
  spread_codes(q, bytes, codes);
  for (int t = 0; t < num_tokens; t += BLOCK) {
    key_rows rows = {.rows = k[t / BLOCK] + offset, .ahead = (const char *)ahead[t / BLOCK],
                     .token_stride = token_stride, .num_tokens = num_tokens - t};
    for (int d = 0; d < q->dim; d += 64) {
      int left = q->dim - d;
      if (num_tokens - t < BLOCK || (left > 32 && left < 64))
        score_64_of_part(q, codes, &rows, d, k_scale + t, sums, scores + t, accumulate);
      else if (left >= 64) score_64(q, bytes, WHOLE, codes, &rows, d, k_scale + t, sums, scores + t, accumulate);
      else score_64(q, bytes, HALF, codes, &rows, d, k_scale + t, sums, scores + t, accumulate);
    }
  }
}

static void scores_i8_blocks_avx512vnni(const kvedge_query *q, const int8_t *const *k, ptrdiff_t offset,
                                        ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                                        const int8_t *const *prefetch, float *scores, int accumulate) {
  if (!prefetch) prefetch = k; /* rows that are here anyway */
  int blocks = (q->dim + 63) / 64;
  if (q->num_queries > FEW_QUERIES * blocks || q->num_queries * blocks > FEW_BLOCKS || q->dim > FEW_CHANNELS) {
    score_many(q, k, offset, token_stride, num_tokens, k_scale, prefetch, scores, accumulate);
    return;
  }
#define SCORE_FEW(bytes) \
  score_few(q, bytes, k, offset, token_stride, num_tokens, k_scale, prefetch, scores, accumulate)
  switch (q->num_bytes) {
    case 3: SCORE_FEW(3); break;
    case 2: SCORE_FEW(2); break;
    default: SCORE_FEW(1);
  }
#undef SCORE_FEW
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
  if (prefetch) blocks_of(prefetch, q->dim, ahead);
  scores_i8_blocks_avx512vnni(q, blocks, 0, token_stride, num_tokens, k_scale, prefetch ? ahead : NULL, scores,
                              accumulate);
}

/* ---- Softmax and weights, four queries at a time: so that nothing waits for one reduction across lanes ---- */

/* 2^x for x <= 0, as exp2_nonpositive(). */
KVEDGE_INLINE __m512 exp2_of(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, 0), y = _mm512_set1_ps(EXP2_5); /* f = x - rint(x) */
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_4));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_3));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_2));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_1));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP2_NOTHING), _CMP_GT_OQ);
  return _mm512_maskz_scalef_ps(counts, y, _mm512_sub_ps(x, f));
}

/* The largest in each of four vectors. */
KVEDGE_INLINE __m128 reduce_max_4(const __m512 v[4]) {
  __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* The sum of each of four vectors. */
KVEDGE_INLINE __m128 reduce_add_4(const __m512 v[4]) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* softmax of `count` queries, 1 to 4 (a constant where this is inlined). */
KVEDGE_INLINE void softmax_of(const int count, float *scores, int num_tokens, const float *factor, float *max,
                              float *sum, float *alpha) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  int whole = (num_tokens - 1) / 16; /* vectors before the last, of which this many are there: */
  __mmask16 last = (__mmask16)(0xffffu >> (16 * whole + 16 - num_tokens));
  __m512 reduced[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    reduced[i] = i < count ? _mm512_mask_loadu_ps(nothing, last, scores + i * KVEDGE_TILE + 16 * whole) : reduced[0];
  for (int j = 0; j < whole; j++)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      reduced[i] = _mm512_max_ps(reduced[i], _mm512_loadu_ps(scores + i * KVEDGE_TILE + 16 * j));
  __m128 old = _mm_maskz_loadu_ps(queries, max), f = _mm_maskz_loadu_ps(queries, factor);
  __m128 new = _mm_max_ps(old, reduce_max_4(reduced));
  __m512 fallen = exp2_of(_mm512_zextps128_ps512(_mm_mul_ps(_mm_sub_ps(old, new), f)));
  _mm_mask_storeu_ps(max, queries, new);
  _mm512_mask_storeu_ps(alpha, queries, fallen); /* 512 bits: masked, vextractf32x4 touches what it must not */
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) reduced[i] = _mm512_setzero_ps();
  for (int j = 0; j <= whole; j++) {
    __mmask16 valid = j < whole ? 0xffff : last;
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      float *at = scores + i * KVEDGE_TILE + 16 * j;
      __m512 below = _mm512_sub_ps(_mm512_mask_loadu_ps(nothing, valid, at), _mm512_set1_ps(max[i]));
      __m512 p = exp2_of(_mm512_mul_ps(below, _mm512_set1_ps(factor[i])));
      _mm512_storeu_ps(at, p);
      reduced[i] = _mm512_add_ps(reduced[i], p);
    }
  }
  for (int j = whole + 1; j < KVEDGE_TILE / 16; j++)
    for (int i = 0; i < count; i++) _mm512_storeu_ps(scores + i * KVEDGE_TILE + 16 * j, _mm512_setzero_ps());
  _mm_mask_storeu_ps(sum, queries, _mm_fmadd_ps(_mm_maskz_loadu_ps(queries, sum), _mm512_castps512_ps128(fallen), reduce_add_4(reduced)));
}

static void softmax_avx512vnni(float *scores, int num_queries, int num_tokens, const float *factor,
                               float *max, float *sum, float *alpha) {
#define SOFTMAX_OF(count) \
  softmax_of(count, scores + i * KVEDGE_TILE, num_tokens, factor + i, max + i, sum + i, alpha + i)
  int i = 0;
  for (; i + 4 <= num_queries; i += 4) SOFTMAX_OF(4);
  switch (num_queries - i) {
    case 3: SOFTMAX_OF(3); break;
    case 2: SOFTMAX_OF(2); break;
    case 1: SOFTMAX_OF(1); break;
  }
#undef SOFTMAX_OF
}

/* Weights of a tile as unsigned codes of 24 bits, or fewer and zeros, four tokens at a time as split_bytes()
 * leaves them, of `count` queries; and the scale of their codes. (Constants where this is inlined.) */
KVEDGE_INLINE void encode_weights_of(const int count, const int bytes, const float *p, const float *v_scale,
                                     int num_tokens, uint8_t *codes, float *scale) {
  const __m128 most = _mm_set1_ps(bytes == 3 ? WEIGHT_MAX : bytes == 2 ? WEIGHT_MAX_16 : WEIGHT_MAX_8);
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  __m512 reduced[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) reduced[i] = _mm512_setzero_ps();
  for (int t = 0; t < num_tokens; t += 16) {
    __m512 scales = _mm512_loadu_ps(v_scale + t);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      reduced[i] = _mm512_max_ps(reduced[i], _mm512_mul_ps(_mm512_loadu_ps(p + i * KVEDGE_TILE + t), scales));
  }
  __m128 largest = reduce_max_4(reduced);
  __mmask8 some = _mm_cmp_ps_mask(largest, _mm_set1_ps(WEIGHT_NOTHING), _CMP_GT_OQ);
  float factor[4];
  _mm_storeu_ps(factor, _mm_maskz_div_ps(some, most, largest));
  _mm_mask_storeu_ps(scale, queries, _mm_maskz_div_ps(some, largest, most));
  for (int t = 0; t < num_tokens; t += 16) {
    __m512 scales = _mm512_loadu_ps(v_scale + t), dither = _mm512_loadu_ps(kvedge_dither + t);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m512 weight = _mm512_mul_ps(_mm512_loadu_ps(p + i * KVEDGE_TILE + t), scales), by = _mm512_set1_ps(factor[i]);
      __m512i code;
      if (bytes == 3) code = _mm512_cvtps_epi32(_mm512_mul_ps(weight, by));
      else code = _mm512_slli_epi32(_mm512_cvttps_epi32(_mm512_fmadd_ps(weight, by, dither)), bytes == 2 ? 8 : 16);
      _mm512_storeu_si512(codes + i * CODE_ROW + 4 * t, split_bytes(code));
    }
  }
}

KVEDGE_INLINE void encode_weights(int num_queries, const int bytes, const float *p, const float *v_scale,
                                  int num_tokens, uint8_t *codes, float *scale) {
#define ENCODE_OF(count) \
  encode_weights_of(count, bytes, p + i * KVEDGE_TILE, v_scale, num_tokens, codes + i * CODE_ROW, scale + i)
  int i = 0;
  for (; i + 4 <= num_queries; i += 4) ENCODE_OF(4);
  switch (num_queries - i) {
    case 3: ENCODE_OF(3); break;
    case 2: ENCODE_OF(2); break;
    case 1: ENCODE_OF(1); break;
  }
#undef ENCODE_OF
}

/* ---- Weighted sums ---- */

/* Interleaves the bytes of four rows: dword e of 128-bit lane L of out[c] has channel 16 L + 4 c + e. */
KVEDGE_INLINE void interleave_4_rows(const __m512i row[4], __m512i out[4]) {
  __m512i low_ab = _mm512_unpacklo_epi8(row[0], row[1]), high_ab = _mm512_unpackhi_epi8(row[0], row[1]);
  __m512i low_cd = _mm512_unpacklo_epi8(row[2], row[3]), high_cd = _mm512_unpackhi_epi8(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi16(low_ab, low_cd);
  out[1] = _mm512_unpackhi_epi16(low_ab, low_cd);
  out[2] = _mm512_unpacklo_epi16(high_ab, high_cd);
  out[3] = _mm512_unpackhi_epi16(high_ab, high_cd);
}

/* The values of a tile, in blocks, and those to ask for. */
typedef struct {
  const int8_t *const *blocks, *const *ahead;
  ptrdiff_t offset, token_stride, ahead_offset;
  int num_tokens;
} value_rows;

/* Where weigh() has a tile's values from: rows that are whole; rows, and keeps them interleaved; what was kept. */
typedef enum { ROWS, ROWS_KEPT, KEPT } value_source;

/* All of a tile's values interleaved: (tokens / 4, 4). Rows past the last token repeat it: their weight is 0. */
static __attribute__((noinline)) void keep_values(const value_rows *v, int num_channels, __m512i *kept) {
  __mmask64 valid = first_bytes(num_channels);
  for (int t = 0; t < v->num_tokens; t += 4, kept += 4) {
    __m512i row[4];
    for (int j = 0; j < 4; j++) {
      int token = t + j < v->num_tokens ? t + j : v->num_tokens - 1;
      ptrdiff_t at = token % BLOCK * v->token_stride + v->offset;
      row[j] = _mm512_maskz_loadu_epi8(valid, v->blocks[token / BLOCK] + at);
    }
    interleave_4_rows(row, kept);
  }
}

/* Rows t..t+3 of 64 channels. `half`, of up to 32: in the upper halves are rows t+4..t+7. */
KVEDGE_INLINE void load_values(const value_rows *v, const int half, __mmask32 valid, int t, __m512i row[4]) {
  const ptrdiff_t stride = v->token_stride;
  const int8_t *from = v->blocks[t / BLOCK] + v->offset + t % BLOCK * stride;
  const char *ahead = (const char *)v->ahead[t / BLOCK] + v->ahead_offset + t % BLOCK * (half ? 32 : 64);
  OPAQUE(from);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    _mm_prefetch(ahead + 64 * j, _MM_HINT_T1); /* a line for each register */
    if (!half) {
      row[j] = _mm512_loadu_si512(from + j * stride);
    } else {
      row[j] = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(valid, from + j * stride));
      row[j] = _mm512_inserti64x4(row[j], _mm256_maskz_loadu_epi8(valid, from + (4 + j) * stride), 1);
    }
  }
}

/* The weights of four tokens for all lanes; `half`: of the four after them for the upper half. */
KVEDGE_INLINE __m512i weights_at(const uint8_t *codes, const int half) {
  __m512i weights = four_for_all(codes);
  return half ? _mm512_mask_blend_epi32(0xff00, weights, four_for_all(codes + 16)) : weights;
}

/* Sums over a tile of `count` queries' weights, of `bytes` bytes, times the values, as interleave_4_rows() orders
 * them: (count, 4). `half`: of up to 32 channels. (Constants where this is inlined.) */
KVEDGE_INLINE void weigh(const value_rows *v, const value_source source, const int half, __mmask32 valid,
                         __m512i *kept, const int count, const int bytes, const uint8_t *codes,
                         __m512 (*totals)[4]) {
  const int step = half ? 8 : 4;
  __m512i sum[SUM_QUERIES][3][4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[i][b][c] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += step, codes += 4 * step, kept += 4) {
    __m512i value[4];
    if (source == KEPT) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) value[c] = kept[c];
    } else {
      __m512i row[4];
      load_values(v, half, valid, t, row);
      interleave_4_rows(row, value);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++)
        if (source == ROWS_KEPT) kept[c] = value[c];
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i weights = weights_at(codes + i * CODE_ROW + 4 * b, half);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) multiply_add(&sum[i][b][c], weights, value[c]);
      }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      __m512 total = _mm512_cvtepi32_ps(sum[i][0][c]);
#pragma GCC unroll 3
      for (int b = 1; b < bytes; b++)
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sum[i][b][c]));
      totals[i][c] = half ? _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e)) : total;
    }
}

/* acc = acc * alpha + total * scale of 64 channels (those in `valid`) of one query. */
KVEDGE_INLINE void add_totals(const __m512 total[4], __mmask64 valid, float scale, float alpha, float *acc) {
  /* 128-bit lane L of total[c] belongs to lane c of channels 16 L */
  __m512i lanes[4], ordered[4];
  for (int c = 0; c < 4; c++) lanes[c] = _mm512_castps_si512(total[c]);
  transpose_lanes(lanes, ordered);
  for (int c = 0; c < 4; c++) {
    __mmask16 mask = (__mmask16)(valid >> (16 * c));
    __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, acc + 16 * c), _mm512_set1_ps(alpha));
    __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(ordered[c]), _mm512_set1_ps(scale), kept);
    _mm512_mask_storeu_ps(acc + 16 * c, mask, sum);
  }
}

/* 64 channels of a tile of values, added for all queries, with weights of `bytes` bytes (a constant where this is
 * inlined). */
KVEDGE_INLINE void weigh_64(const value_rows *v, int num_channels, int num_queries, const int bytes,
                            const uint8_t *codes, const float *scale, const float *alpha, float *acc,
                            ptrdiff_t acc_stride) {
  const int most = SUM_REGISTERS / (4 * bytes) < SUM_QUERIES ? SUM_REGISTERS / (4 * bytes) : SUM_QUERIES;
  __m512i kept[KVEDGE_TILE]; /* (tokens / 4, 4) */
  int whole = v->num_tokens % BLOCK == 0, half = whole && num_channels <= 32;
  value_source source = num_queries > most ? ROWS_KEPT : ROWS;
  if (!whole || (num_channels > 32 && num_channels < 64)) {
    keep_values(v, num_channels, kept);
    source = KEPT;
  }
  for (int i = 0; i < num_queries; i += most) {
    __m512 totals[SUM_QUERIES][4];
    int count = num_queries - i < most ? num_queries - i : most;
#define WEIGH_FROM(source, count)                                                                  \
  if (half) weigh(v, source, 1, (__mmask32)first_bytes(num_channels), kept, count, bytes, codes + i * CODE_ROW, totals); \
  else weigh(v, source, 0, 0, kept, count, bytes, codes + i * CODE_ROW, totals)
#define WEIGH(count)                                             \
  switch (source) {                                              \
    case ROWS: WEIGH_FROM(ROWS, count); break;                   \
    case ROWS_KEPT: WEIGH_FROM(ROWS_KEPT, count); break;         \
    case KEPT: WEIGH_FROM(KEPT, count); break;                   \
  }
    if (count == most) { WEIGH(most) }
    else if (count == 1) { WEIGH(1) }
    else if (count == 2) { WEIGH(2) }
    else { WEIGH(3) }
#undef WEIGH
#undef WEIGH_FROM
    source = KEPT;
    for (int j = 0; j < count; j++)
      add_totals(totals[j], first_bytes(num_channels), scale[i + j], alpha[i + j], acc + (i + j) * acc_stride);
  }
}

static void weighted_sum_i8_blocks_avx512vnni(const int8_t *const *v, ptrdiff_t offset, ptrdiff_t token_stride,
                                              int num_tokens, int dim, int num_queries, int num_bytes,
                                              const float *p, const float *v_scale, const float *alpha,
                                              const int8_t *const *prefetch, float *acc, ptrdiff_t acc_stride) {
  _Alignas(64) uint8_t codes[KVEDGE_STACK * CODE_ROW];
  float scale[KVEDGE_STACK];
  switch (num_bytes) {
    case 3: encode_weights(num_queries, 3, p, v_scale, num_tokens, codes, scale); break;
    case 2: encode_weights(num_queries, 2, p, v_scale, num_tokens, codes, scale); break;
    default: encode_weights(num_queries, 1, p, v_scale, num_tokens, codes, scale);
  }
  value_rows rows = {.blocks = v, .ahead = prefetch ? prefetch : v, .token_stride = token_stride,
                     .num_tokens = num_tokens};
  for (int d = 0; d < dim; d += 64) {
    rows.offset = offset + d;
    rows.ahead_offset = d * BLOCK;
    switch (num_bytes) {
      case 3: weigh_64(&rows, dim - d, num_queries, 3, codes, scale, alpha, acc + d, acc_stride); break;
      case 2: weigh_64(&rows, dim - d, num_queries, 2, codes, scale, alpha, acc + d, acc_stride); break;
      default: weigh_64(&rows, dim - d, num_queries, 1, codes, scale, alpha, acc + d, acc_stride);
    }
  }
}

static void weighted_sum_i8_avx512vnni(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                       int num_queries, int num_bytes, const float *p,
                                       const float *v_scale, const float *alpha, const void *prefetch,
                                       float *acc, ptrdiff_t acc_stride) {
  const int8_t *blocks[KVEDGE_TILE_BLOCKS], *ahead[KVEDGE_TILE_BLOCKS];
  blocks_of(v, token_stride, blocks);
  if (prefetch) blocks_of(prefetch, dim, ahead);
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
    .transpose_scales = transpose_scales_avx512vnni,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
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
