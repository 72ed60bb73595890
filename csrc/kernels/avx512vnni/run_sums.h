/* kernels/run_sums.h of the AVX-512 VNNI path. Part of avx512vnni.c.
 *
 * Keys are multiplied as unsigned codes, from 0 on, and queries are rounded to 16 bits or 24 at once: what the middle code
 * adds, the sum of the query's integers, is taken off in floats, where it is no larger than the rest.
 */
#include "kernels/run_tiles.h"

enum { KEYS_ARE_RAW = 1 };

KVEDGE_INLINE __m512 floats_at(const uint16_t *halves, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), halves));
}

static inline void read_steps(const run_parts *run, int dim, int bits, run_queries *to) {
  const __m512 most = _mm512_set1_ps((float)(1 << (bits - 1)));
  for (int d = 0; d < kvedge_padded_channels(dim); d += FLOATS) {
    const int left = dim > d ? dim - d : 0;
    const __m512 steps = floats_at(run->steps + d, left);
    _mm512_storeu_ps(to->steps + d, steps);
    _mm512_storeu_ps(to->middles + d, _mm512_fmadd_ps(steps, most, floats_at(run->lows + d, left)));
  }
}

/* Bytes of 64 channels as packs leave them, dword e of lane L being that of channels 16 e + 4 L, to the order of codes. */
KVEDGE_INLINE void put_digits(__m512i packed, const int of_codes, int8_t *codes) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  packed = _mm512_permutexvar_epi32(in_order, packed);
  if (of_codes) /* as encode_query_of_int4_avx512vnni() has it */
    packed = _mm512_shuffle_epi8(
        packed, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
  _mm512_storeu_si512(codes, packed);
}

/* The low bytes of 64 integers of 32 bits, packed. */
KVEDGE_INLINE __m512i low_bytes(const __m512i x[4]) {
  const __m512i byte = _mm512_set1_epi32(0xff);
  __m512i low[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) low[i] = _mm512_and_si512(x[i], byte);
  return _mm512_packus_epi16(_mm512_packs_epi32(low[0], low[1]), _mm512_packs_epi32(low[2], low[3]));
}

/* x times the steps of a run, times `inverse`, as codes of `planes` digits; returns their sums, in the unit of the last.
 * (`planes` and `of_codes`: constants where this is inlined.) */
KVEDGE_INLINE __m512 encode_products(const float *x, const float *steps, int padded, float inverse, const int planes,
                                     const int of_codes, int8_t *codes) {
  const __m512 by = _mm512_set1_ps(inverse);
  const __m512i half = _mm512_set1_epi32(128), half_word = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(0xff);
  __m512i sum = _mm512_setzero_si512();
  for (int d = 0; d < padded; d += 64, codes += CODES_OF_64) {
    __m512i code[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512 product = _mm512_mul_ps(_mm512_loadu_ps(x + d + 16 * i), _mm512_loadu_ps(steps + d + 16 * i));
      code[i] = _mm512_cvtps_epi32(_mm512_mul_ps(product, by));
      sum = _mm512_add_epi32(sum, code[i]);
    }
    if (planes == 3) {
      put_digits(low_bytes(code), of_codes, codes + 128);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) code[i] = _mm512_srai_epi32(_mm512_add_epi32(code[i], half), 8);
    }
    __m512i low = _mm512_packs_epi32(code[0], code[1]), high = _mm512_packs_epi32(code[2], code[3]);
    if (planes > 1) {
      put_digits(_mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte)), of_codes, codes + 64);
      low = _mm512_srai_epi16(_mm512_add_epi16(low, half_word), 8);
      high = _mm512_srai_epi16(_mm512_add_epi16(high, half_word), 8);
    }
    put_digits(_mm512_packs_epi16(low, high), of_codes, codes);
  }
  return _mm512_cvtepi32_ps(sum);
}

/* Of `count` queries, 1 to 4: the largest product with the steps, and the sum of products with the middles. (`count`: a
 * constant where this is inlined, as below.) */
KVEDGE_INLINE void measure_products(const float *x, ptrdiff_t stride, const int count, int padded,
                                    const run_queries *room, float *largest, float *constant) {
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  __m512 most[4], sum[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) most[i] = sum[i] = _mm512_setzero_ps();
  for (int d = 0; d < padded; d += FLOATS) {
    const __m512 steps = _mm512_loadu_ps(room->steps + d), middles = _mm512_loadu_ps(room->middles + d);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      const __m512 of_query = _mm512_loadu_ps(x + i * stride + d);
      most[i] = _mm512_max_ps(most[i], _mm512_abs_ps(_mm512_mul_ps(of_query, steps)));
      sum[i] = _mm512_fmadd_ps(of_query, middles, sum[i]);
    }
  }
  _mm_mask_storeu_ps(largest, queries, reduce_4(MAX, most));
  _mm_mask_storeu_ps(constant, queries, reduce_4(ADD, sum));
}

/* Codes of `count` queries, 1 to 4, of `planes` digits; their constants less what the middle code adds. */
KVEDGE_INLINE void encode_products_of(const float *x, ptrdiff_t stride, const int count, int padded, const int planes,
                                      const int of_codes, float middle, const float *steps, const float *scale,
                                      float *constant, int8_t *codes) {
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  const float digits = planes == 3 ? 1.0f : planes == 2 ? 256.0f : 65536.0f;
  const __m128 units = _mm_mul_ps(_mm_maskz_loadu_ps(queries, scale), _mm_set1_ps(digits));
  float inverse[4];
  _mm_storeu_ps(inverse,
                _mm_maskz_div_ps(_mm_cmp_ps_mask(units, _mm_setzero_ps(), _CMP_GT_OQ), _mm_set1_ps(1.0f), units));
  __m512 sum[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    sum[i] = encode_products(x + i * stride, steps, padded, inverse[i], planes, of_codes, codes + 3 * i * padded);
  const __m128 added = _mm_mul_ps(_mm_mul_ps(units, _mm_set1_ps(middle)), reduce_4(ADD, sum));
  _mm_mask_storeu_ps(constant, queries, _mm_sub_ps(_mm_maskz_loadu_ps(queries, constant), added));
}

KVEDGE_INLINE void encode_all(const kvedge_query *to, const float *x, ptrdiff_t stride, int padded, const int planes,
                              const int of_codes, float middle, run_queries *room) {
#define ENCODE(count)                                                                                                  \
  encode_products_of(x + i * stride, stride, count, padded, planes, of_codes, middle, room->steps, room->scale + i,    \
                     room->constant + i, room->codes + 3 * i * padded)
  int i = 0;
  BY_FOURS(to->num_queries, ENCODE)
#undef ENCODE
}

static kvedge_query queries_of_run(const kvedge_query *q, int first, int count, const kvedge_cell *cell, int bits,
                                   run_queries *room) {
  static const int32_t zeros[4];
  const int padded = kvedge_padded_channels(q->dim), of_codes = cell->scores == scores_int4_avx512vnni;
  const float middle = (float)(1 << (bits - 1)), *x = q->values + first * q->stride;
  kvedge_query to = {.num_queries = count,
                     .dim = q->dim,
                     .planes = q->planes ? q->planes : 2,
                     .stride = padded / 2, /* three bytes for a channel */
                     .codes = room->codes,
                     .scale_stride = 1,
                     .scale = room->scale,
                     .offsets = room->offsets};
  int i = 0;
#define MEASURE(count)                                                                                                 \
  measure_products(x + i * q->stride, q->stride, count, padded, room, room->scale + i, room->constant + i)
  BY_FOURS(count, MEASURE)
#undef MEASURE
  for (i = 0; i < count; i++) {
    room->scale[i] = room->scale[i] > QUERY_NOTHING ? room->scale[i] * (1.0f / QUERY_MAX) : 0.0f;
    if (q->planes == 0 && !(q->error[first + i] * 256.0f * room->scale[i] <= KVEDGE_LOGIT_ERROR)) to.planes = 3;
    memcpy(room->offsets + 4 * i, zeros, sizeof zeros);
  }
#define ENCODE_ALL(planes)                                                                                             \
  if (of_codes) encode_all(&to, x, q->stride, padded, planes, 1, middle, room);                                        \
  else encode_all(&to, x, q->stride, padded, planes, 0, middle, room)
  if (to.planes == 3) {
    ENCODE_ALL(3);
  } else if (to.planes == 2) {
    ENCODE_ALL(2);
  } else {
    ENCODE_ALL(1);
  }
#undef ENCODE_ALL
  return to;
}

/* 16 tokens' steps of both groups of up to 128 channels, or of the one of 64, side by side: of the n first tokens. */
KVEDGE_INLINE void floats_of_groups(const uint16_t *halves, const int groups, int n, __m512 out[2]) {
  if (groups == 1) {
    out[0] = floats_at(halves, n);
    return;
  }
  const __m512i pairs = _mm512_maskz_loadu_epi32(first_lanes(n), halves);
  out[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
  out[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

KVEDGE_INLINE void read_columns_of(const kvedge_tile *values, const int groups, step_columns *to) {
  const __m512 most = _mm512_set1_ps((float)(1 << (values->bits - 1)));
  for (int t = 0, r = 0, first, count; t < values->num_tokens; t += count, r++) {
    count = tokens_of_run(values, r, t, &first);
    const run_parts run = parts_at(values, r, 1);
    for (int i = 0; i < count; i += FLOATS) {
      __m512 steps[2], lows[2];
      const int at = (first + i) * groups;
      floats_of_groups(run.steps + at, groups, count - i, steps);
      floats_of_groups(run.lows + at, groups, count - i, lows);
#pragma GCC unroll 2
      for (int g = 0; g < groups; g++) {
        _mm512_storeu_ps(to->steps[g] + t + i, steps[g]);
        _mm512_storeu_ps(to->middles[g] + t + i, _mm512_fmadd_ps(steps[g], most, lows[g]));
      }
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < groups; g++) { /* to the end of the last block */
    _mm512_storeu_ps(to->steps[g] + values->num_tokens, _mm512_setzero_ps());
    _mm512_storeu_ps(to->middles[g] + values->num_tokens, _mm512_setzero_ps());
  }
}

static void read_columns(const kvedge_tile *values, step_columns *to) {
  if (values->dim <= GROUP) read_columns_of(values, 1, to);
  else if (values->dim <= 2 * GROUP) read_columns_of(values, 2, to);
  else read_many_columns(values, to);
}

/* Of `count` queries, 1 to 4. */
KVEDGE_INLINE void add_middles_of(const float *p, const int count, const float *middles, int num_tokens, int n,
                                  float *acc, ptrdiff_t stride) {
  __m512 sum[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
  for (int t = 0; t < num_tokens; t += FLOATS)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      sum[i] = _mm512_fmadd_ps(_mm512_loadu_ps(p + i * KVEDGE_TILE + t), _mm512_loadu_ps(middles + t), sum[i]);
  const __m512 sums = _mm512_zextps128_ps512(reduce_4(ADD, sum));
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    const __m512 of_query = _mm512_permutexvar_ps(_mm512_set1_epi32(i), sums);
    for (int d = 0; d < n; d += FLOATS) {
      float *to = acc + i * stride + d;
      const __mmask16 there = first_lanes(n - d);
      _mm512_mask_storeu_ps(to, there, _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), of_query));
    }
  }
}

static void add_middles(const kvedge_probabilities *p, const float *middles, int num_tokens, int n, float *acc,
                        ptrdiff_t stride) {
#define ADD_MIDDLES(count)                                                                                             \
  add_middles_of(p->p + i * KVEDGE_TILE, count, middles, num_tokens, n, acc + i * stride, stride)
  int i = 0;
  BY_FOURS(p->num_queries, ADD_MIDDLES)
#undef ADD_MIDDLES
}
