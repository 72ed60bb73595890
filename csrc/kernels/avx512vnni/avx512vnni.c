/* AVX-512 with VNNI: Cascade Lake, Ice Lake and later servers, Zen 4 and later.
 *
 *   instruction               what for                    Cascade Lake        Zen 4 (512 bits, as measured)
 *   vpdpbusd zmm              u8 keys x s8 query,         5 cycles, p05       4 cycles, one per cycle: FP01
 *                             u8 weights x s8 values
 *   vpunpck*, vshufi32x4      transposing                 1-3 cycles, p5      3 in 2 cycles, 1; not on FP0
 *   vpbroadcastd zmm, m32     four weights for all        load                2 per cycle, other loads 1
 *   vreduceps, vscalefps      2^x                         4 cycles, p05       2 cycles each: FP23
 *   vmovups m512, zmm         keeping                     store               2 cycles, and 1.5 products fewer
 *
 * On Intel both products and shuffles want port 5, which bounds this path, so it is shuffles that are saved. On Zen 4
 * it is products, and what disturbs them is stores. scores.c has the scores, values.h the weighted
 * sums.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/common.h"
#define KVEDGE_CELL static
#define KVEDGE_NAME(function) function##_avx512vnni
#include "kernels/avx512vnni/floats.h"
#include "kernels/floats.h"
#include "kernels/avx512vnni/grids.h"

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

/* transpose_scales of whole blocks. (`type`, and `all` for four columns: constants where this is inlined.) */
KVEDGE_INLINE void transpose_blocks(const char *scales, const kvedge_scale_type type, const int all,
                                    ptrdiff_t token_stride, int num_tokens, int num_columns, float factor, float *out,
                                    ptrdiff_t out_stride) {
  const int half = type == KVEDGE_SCALE_FLOAT16;
  const __mmask8 columns = (__mmask8)((1 << num_columns) - 1);
  const __m512 by = _mm512_set1_ps(factor);
  for (int t = 0; t < num_tokens; t += 16, scales += 16 * token_stride) {
    __m512i row[4], column[4]; /* lane L of row[i]: row t + 4 L + i */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const char *from = scales + i * token_stride;
      OPAQUE(from);
      __m128i four[4];
#pragma GCC unroll 4
      for (int lane = 0; lane < 4; lane++) {
        const char *at = from + 4 * lane * token_stride;
        if (half) four[lane] = all ? _mm_loadl_epi64((const __m128i *)at) : _mm_maskz_loadu_epi16(columns, at);
        else four[lane] = all ? _mm_loadu_si128((const __m128i *)at) : _mm_maskz_loadu_epi32(columns, at);
        if (half) four[lane] = _mm_castps_si128(_mm_maskz_cvtph_ps(0xf, four[lane]));
      }
      row[i] = _mm512_inserti32x4(_mm512_castsi128_si512(four[0]), four[1], 1);
      row[i] = _mm512_inserti32x4(_mm512_inserti32x4(row[i], four[2], 2), four[3], 3);
    }
    transpose_in_lanes(row, column);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
      if (all || c < num_columns)
        _mm512_storeu_ps(out + c * out_stride + t, _mm512_mul_ps(_mm512_castsi512_ps(column[c]), by));
  }
}

static void transpose_scales_avx512vnni(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride,
                                        int num_tokens, int num_columns, float factor, float *out,
                                        ptrdiff_t out_stride) {
  const int whole = num_tokens / BLOCK * BLOCK;
#define TRANSPOSE(type, all)                                                                                           \
  transpose_blocks(scales, type, all, token_stride, whole, num_columns, factor, out, out_stride)
  if (type == KVEDGE_SCALE_FLOAT32 && num_columns == 4) TRANSPOSE(KVEDGE_SCALE_FLOAT32, 1);
  else if (type == KVEDGE_SCALE_FLOAT32) TRANSPOSE(KVEDGE_SCALE_FLOAT32, 0);
  else if (num_columns == 4) TRANSPOSE(KVEDGE_SCALE_FLOAT16, 1);
  else if (num_columns == 1) /* as of q8_0, whose scales lie among the codes */
    for (int t = 0; t < whole; t += 8) {
      const __m128i halves = kvedge_eight_halves((const char *)scales + t * token_stride, token_stride);
      _mm256_storeu_ps(out + t, _mm256_mul_ps(_mm256_maskz_cvtph_ps(0xff, halves), _mm256_set1_ps(factor)));
    }
  else TRANSPOSE(KVEDGE_SCALE_FLOAT16, 0);
#undef TRANSPOSE
  transpose_scales_portable((const char *)scales + whole * token_stride, type, token_stride, num_tokens - whole,
                            num_columns, factor, out + whole, out_stride);
}

/* ---- Softmax, four queries at a time: so that nothing waits for one reduction across lanes ---- */

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

/* Raises the maxima of `count` queries to those of a tile, given lane by lane. */
static __attribute__((noinline)) void raise_max(int count, const __m512 tile_max[4], const float *factor, float *max,
                                                float *sum, float *rescale) {
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  __m128 old = _mm_maskz_loadu_ps(queries, max), f = _mm_maskz_loadu_ps(queries, factor);
  __m128 new = _mm_max_ps(old, reduce_4(MAX, tile_max));
  __m512 factors = exp2_of(_mm512_zextps128_ps512(_mm_mul_ps(_mm_sub_ps(old, new), f)));
  __m128 before = _mm_mul_ps(_mm_maskz_loadu_ps(queries, sum), _mm512_castps512_ps128(factors));
  _mm_mask_storeu_ps(max, queries, new);
  _mm_mask_storeu_ps(sum, queries, before);
  _mm512_mask_storeu_ps(rescale, queries, factors); /* 512 bits: masked, vextractf32x4 touches what it must not */
}

/* Scores of up to 16 tokens become powers, which are added to the totals; those that are not valid become 0. (`count`
 * and `all` are constants where this is inlined.) */
KVEDGE_INLINE void raise_powers(const int count, const int all, __mmask16 valid, float *scores, const __m512 max[4],
                                const __m512 factor[4], __m512 total[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++, scores += KVEDGE_TILE) {
    __m512 score = all ? _mm512_loadu_ps(scores) : _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), valid, scores);
    __m512 p = exp2_of(_mm512_mul_ps(_mm512_sub_ps(score, max[i]), factor[i]));
    _mm512_storeu_ps(scores, p);
    total[i] = _mm512_add_ps(total[i], p);
  }
}

/* softmax of `count` queries, 1 to 4 (a constant where this is inlined). */
KVEDGE_INLINE void softmax_of(const int count, float *scores, int num_tokens, const float *factor, float *max,
                              float *sum, float *rescale) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  int whole = (num_tokens - 1) / 16; /* vectors before the last, of which this many are there: */
  __mmask16 last = (__mmask16)(0xffffu >> (16 * whole + 16 - num_tokens)), above = 0;
  __m512 largest[4], m[4], by[4], total[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    largest[i] = i < count ? _mm512_mask_loadu_ps(nothing, last, scores + i * KVEDGE_TILE + 16 * whole) : largest[0];
  for (int j = 0; j < whole; j++)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      largest[i] = _mm512_max_ps(largest[i], _mm512_loadu_ps(scores + i * KVEDGE_TILE + 16 * j));
  /* A maximum that is passed by a little stays, so that nothing need wait for the sum over lanes. */
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    __m512 risen = _mm512_mul_ps(_mm512_sub_ps(largest[i], _mm512_set1_ps(max[i])), _mm512_set1_ps(factor[i]));
    above |= _mm512_cmp_ps_mask(risen, _mm512_set1_ps(KVEDGE_HEADROOM), _CMP_GT_OQ);
    above |= max[i] == -FLT_MAX;
  }
  if (__builtin_expect(above != 0, 0)) raise_max(count, largest, factor, max, sum, rescale);
  else
    for (int i = 0; i < count; i++) rescale[i] = 1.0f;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    m[i] = _mm512_set1_ps(i < count ? max[i] : 0.0f);
    by[i] = _mm512_set1_ps(i < count ? factor[i] : 0.0f);
    total[i] = _mm512_setzero_ps();
  }
  for (int j = 0; j < whole; j++) raise_powers(count, 1, 0, scores + 16 * j, m, by, total);
  raise_powers(count, 0, last, scores + 16 * whole, m, by, total);
  _mm_mask_storeu_ps(sum, queries, _mm_add_ps(_mm_maskz_loadu_ps(queries, sum), reduce_4(ADD, total)));
}

static void softmax_avx512vnni(float *scores, int num_queries, int num_tokens, const float *factor, float *max,
                               float *sum, float *rescale) {
#define SOFTMAX_OF(count)                                                                                              \
  softmax_of(count, scores + i * KVEDGE_TILE, num_tokens, factor + i, max + i, sum + i, rescale + i)
  int i = 0;
  BY_FOURS(num_queries, SOFTMAX_OF)
#undef SOFTMAX_OF
}

#define WEIGHTED_SUM(of)                                                                                               \
  static void weighted_sum_##of##_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,                 \
                                             const kvedge_accumulators *to) {                                          \
    if (p->planes == 3) weighted_sum_##of##_3_avx512vnni(p, values, to);                                               \
    else if (p->planes == 2) weighted_sum_##of##_2_avx512vnni(p, values, to);                                          \
    else weighted_sum_##of##_1_avx512vnni(p, values, to);                                                              \
  }
WEIGHTED_SUM(int8)
WEIGHTED_SUM(of_heads_int8)
WEIGHTED_SUM(int4)
WEIGHTED_SUM(of_heads_int4)
#undef WEIGHTED_SUM

static uint64_t read_bytes_avx512vnni(const void *p, size_t n) {
  const char *bytes = p;
  __m512i lane[8];
  for (int j = 0; j < 8; j++) lane[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) lane[j] = _mm512_or_si512(lane[j], _mm512_load_si512(bytes + i + 64 * j));
  for (int j = 1; j < 8; j++) lane[0] = _mm512_or_si512(lane[0], lane[j]);
  return (uint64_t)_mm512_reduce_or_epi64(lane[0]);
}

static uint64_t multiply_avx512vnni(size_t n) {
  enum { SUMS = 12 }; /* a product waits up to 5 cycles for the one before it in the same sum, and two begin in one */
  __m512i sum[SUMS], keys = _mm512_set1_epi8(1);
  const __m512i codes = keys;
#pragma GCC unroll 12
  for (int j = 0; j < SUMS; j++) sum[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += SUMS * 32) /* 64 bytes of keys with one of the two of codes */
#pragma GCC unroll 12
    for (int j = 0; j < SUMS; j++) {
      __asm__("" : "+v"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      multiply_add(&sum[j], keys, codes);
    }
#pragma GCC unroll 12
  for (int j = 1; j < SUMS; j++) sum[0] = _mm512_or_si512(sum[0], sum[j]);
  return (uint64_t)_mm512_reduce_or_epi64(sum[0]);
}

/* ---- Queries ---- */

static void encode_query_avx512vnni(const float *x, int dim, float factor, float largest, int planes, int8_t *codes,
                                    float *scale, int32_t *offsets) {
  (void)planes;
  float inverse = largest > QUERY_NOTHING ? QUERY_MAX / largest : 0.0f;
  const __m512i carry = _mm512_set1_epi32(0x808080); /* makes unsigned digits of signed ones and back */
  const __m512i by_byte = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < dim; d += 64, codes += CODES_OF_64) {
    __m512i digits[4], lanes[4];
    __mmask64 valid = first_bytes(dim - d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m512 values = _mm512_maskz_loadu_ps((__mmask16)(valid >> 16 * i), x + d + 16 * i);
      __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(values, _mm512_set1_ps(factor)), _mm512_set1_ps(inverse));
      __m512i code = _mm512_cvtps_epi32(scaled);
      digits[i] = split_bytes(_mm512_xor_si512(_mm512_add_epi32(code, carry), carry), 3);
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)128), digits[i]);
      digits[i] = _mm512_permutexvar_epi32(by_byte, digits[i]); /* lane b: byte b of 16 channels */
    }
    transpose_lanes(digits, lanes);
    for (int b = 0; b < 3; b++) _mm512_storeu_si512(codes + 64 * b, lanes[b]);
  }
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  __m128i all = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  _mm_storeu_si128((__m128i *)offsets, _mm_sub_epi32(_mm_setzero_si128(), all));
  *scale = inverse > 0.0f ? largest / QUERY_MAX : 0.0f;
}

/* For keys of int4: see CODES_OF_64. */
static void encode_query_of_int4_avx512vnni(const float *x, int dim, float factor, float largest, int planes,
                                            int8_t *codes, float *scale, int32_t *offsets) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  encode_query_avx512vnni(x, dim, factor, largest, planes, codes, scale, offsets);
  for (int at = 0; at < 3 * kvedge_padded_channels(dim); at += 64)
    _mm512_storeu_si512(codes + at, _mm512_shuffle_epi8(_mm512_loadu_si512(codes + at), order));
}

#define STATE_FLOATS FLOATS
#define state_multiply_add(a, b, c) _mm512_fmadd_ps(a, b, c)
#include "kernels/states.h"

static const kvedge_row_kernels path_rows = {
    .abs_max_bits = abs_max_bits_avx512vnni,
    .quantize = quantize_avx512vnni,
    .dequantize = dequantize_portable,
    .transpose_scales = transpose_scales_avx512vnni,
    .softmax = softmax_avx512vnni,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .read_bytes = read_bytes_avx512vnni,
};
static const kvedge_logit_kernels path_logits = KVEDGE_LOGIT_KERNELS;
static const kvedge_state_kernels path_states = KVEDGE_STATE_KERNELS;

#define INT8_CELL                                                                                                      \
  {.encode_query = encode_query_avx512vnni,                                                                            \
   .scores = scores_int8_avx512vnni,                                                                                   \
   .weighted_sum = weighted_sum_int8_avx512vnni,                                                                       \
   .scores_of_groups = scores_of_groups_avx512vnni,                                                                    \
   .weighted_sum_of_groups = weighted_sum_of_groups_avx512vnni,                                                        \
   .scores_of_heads = scores_of_heads_int8_avx512vnni,                                                                 \
   .weighted_sum_of_heads = weighted_sum_of_heads_int8_avx512vnni}
#include "kernels/blocks.h"
static const kvedge_cell int8_cell = INT8_CELL;

static void scores_of_blocks_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  const int done = score_few_blocks_avx512vnni(q, keys, scores);
  if (done == keys->num_tokens) return;
  kvedge_tile rest = *keys;
  rest.blocks += done / BLOCK, rest.num_tokens -= done, rest.scales += done;
  if (done > 0) rest.next.blocks = NULL;
  scores_of_blocks(&int8_cell, q, &rest, scores + done);
}

static void weighted_sum_of_blocks_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,
                                              const kvedge_accumulators *to) {
  if (!sum_few_blocks_avx512vnni(p, values, to)) weighted_sum_of_blocks(&int8_cell, p, values, to);
}

const kvedge_kernels kvedge_kernels_avx512vnni = {
    .name = "avx512vnni",
    /* Keys are read once, for all queries; values are kept as they are needed. */
    .tuning = {.step_bytes = 64 << 10, .work_per_us = 80000},
    .cells = {[KVEDGE_INT8] = INT8_CELL,
               [KVEDGE_INT4] = {.encode_query = encode_query_of_int4_avx512vnni,
                               .scores = scores_int4_avx512vnni,
                               .weighted_sum = weighted_sum_int4_avx512vnni,
                               .scores_of_heads = scores_of_heads_int4_avx512vnni,
                               .weighted_sum_of_heads = weighted_sum_of_heads_int4_avx512vnni},
               [KVEDGE_FLOAT32] = KVEDGE_FLOAT_CELL(float32),
               [KVEDGE_FLOAT16] = KVEDGE_FLOAT_CELL(float16),
               [KVEDGE_BFLOAT16] = KVEDGE_FLOAT_CELL(bfloat16),
               [KVEDGE_FP8_E4M3] = KVEDGE_FLOAT_CELL(fp8_e4m3),
               [KVEDGE_FP8_E5M2] = KVEDGE_FLOAT_CELL(fp8_e5m2)},
    .grids = KVEDGE_GRIDS_CELL,
    .blocks = KVEDGE_BLOCKS_CELL(avx512vnni, encode_query_avx512vnni),
    .runs = {.scores = scores_of_runs_avx512vnni, .weighted_sum = weighted_sum_of_runs_avx512vnni},
    .rows = &path_rows,
    .logits = &path_logits,
    .states = &path_states,
    .multiply = multiply_avx512vnni,
};
KVEDGE_TARGET_END
#endif
