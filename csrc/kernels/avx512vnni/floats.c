/* Scores and weighted sums of the AVX-512 path for rows of floats: float32, float16, bfloat16.
 *
 *   vcvtph2ps zmm, ymm        float16 to float32          Intel: p0 + p5, Zen 4: 2 uops
 *   vpmovzxwd, vpslld         bfloat16 to float32         p5, p0
 *   vfmadd231ps zmm           products                    4 cycles, p05; Zen 4: one per cycle
 *
 * Four rows by up to four queries have their sums in registers; sums of four rows are then added across lanes together.
 * For values, 64 channels by up to four queries stay in registers over a tile. What limits is memory: a row takes 2 or 4
 * times the bytes of int8, and its arithmetic is an FMA for each 16 channels and query.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/common.h"

enum { ROWS = 4, FLOAT_QUERIES = 4, VECTORS = 4 /* of 16 channels at a time */ };

/* The storage formats (constants where these are inlined). */
typedef enum { FLOAT32, FLOAT16, BFLOAT16 } float_format;

KVEDGE_INLINE ptrdiff_t bytes_of(const float_format format) { return format == FLOAT32 ? 4 : 2; }

/* 16 channels of a row, those in `valid`, times factor. */
KVEDGE_INLINE __m512 load_channels(const float_format format, const char *row, int d, __mmask16 valid, __m512 factor) {
  __m512 x;
  if (format == FLOAT32) x = _mm512_maskz_loadu_ps(valid, (const float *)row + d);
  else {
    __m256i halves = _mm256_maskz_loadu_epi16(valid, (const uint16_t *)row + d);
    if (format == FLOAT16) x = _mm512_cvtph_ps(halves);
    else x = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  return _mm512_mul_ps(x, factor);
}

KVEDGE_INLINE __mmask16 first_lanes(int n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

/* Prefetches the next tile's lines, as many as `bytes` of this one take. */
KVEDGE_INLINE void prefetch_bytes_ahead(lines_ahead *ahead, ptrdiff_t bytes) {
  for (; bytes > 0; bytes -= 64) prefetch_lines(ahead, take_lines(ahead, 1), 1, 2);
}

/* Scores of four rows (those past the last token repeat it) for `count` queries. */
KVEDGE_INLINE void score_rows(const float_format format, const kvedge_query *q, int first, const int count,
                              const char *const row[ROWS], __m512 factor, int left, float *scores, int accumulate) {
  __m512 sum[FLOAT_QUERIES][ROWS];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[i][r] = _mm512_setzero_ps();
  const float *query = q->values + first * q->stride;
  for (int d = 0; d < q->dim; d += 16) {
    const __mmask16 valid = first_lanes(q->dim - d);
    __m512 key[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) key[r] = load_channels(format, row[r], d, valid, factor);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      const __m512 x = _mm512_loadu_ps(query + i * q->stride + d); /* padded with zeros */
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[i][r] = _mm512_fmadd_ps(x, key[r], sum[i][r]);
    }
  }
  const __mmask8 there = (__mmask8)(left >= ROWS ? 0xf : (1 << left) - 1);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    float *out = scores + (first + i) * KVEDGE_TILE;
    __m128 dot = reduce_4(ADD, sum[i]);
    if (accumulate) dot = _mm_add_ps(dot, _mm_maskz_loadu_ps(there, out));
    _mm_mask_storeu_ps(out, there, dot);
  }
}

KVEDGE_INLINE void score_floats(const float_format format, const kvedge_query *q, const kvedge_tile *keys,
                                float *scores, int accumulate) {
  const __m512 factor = _mm512_set1_ps(keys->factor);
  const int n = q->num_queries;
  lines_ahead ahead = lines_of(keys, (int)bytes_of(format) * q->dim);
  for (int t = 0; t < keys->num_tokens; t += ROWS) {
    const int left = keys->num_tokens - t;
    const char *row[ROWS], *block = kvedge_tile_row(keys, t);
    for (int r = 0; r < ROWS; r++) row[r] = block + (r < left ? r : left - 1) * keys->token_stride;
    if (keys->next.blocks) prefetch_bytes_ahead(&ahead, ROWS * bytes_of(format) * q->dim);
#define SCORE_ROWS(count) score_rows(format, q, i, count, row, factor, left, scores + t, accumulate)
    int i = 0;
    BY_FOURS(n, SCORE_ROWS)
#undef SCORE_ROWS
  }
}

/* Up to 64 channels from d on of a tile's values, for `count` queries. */
KVEDGE_INLINE void weigh_channels(const float_format format, const kvedge_probabilities *p, int first, const int count,
                                  const kvedge_tile *values, int d, const int vectors, lines_ahead *ahead,
                                  const kvedge_accumulators *to) {
  const __m512 factor = _mm512_set1_ps(values->factor);
  const __mmask16 last = first_lanes(values->dim - d - 16 * (vectors - 1));
  const float *weights = p->p + first * KVEDGE_TILE;
  __m512 sum[FLOAT_QUERIES][VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_setzero_ps();
  for (int t = 0; t < values->num_tokens; t++) {
    const char *row = kvedge_tile_row(values, t);
    if (ahead) prefetch_bytes_ahead(ahead, bytes_of(format) * 16 * vectors);
    __m512 value[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      value[v] = load_channels(format, row, d + 16 * v, v + 1 == vectors ? last : 0xffff, factor);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      const __m512 weight = _mm512_set1_ps(weights[i * KVEDGE_TILE + t]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_fmadd_ps(weight, value[v], sum[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const __mmask16 valid = v + 1 == vectors ? last : 0xffff;
      float *acc = to->acc + (first + i) * to->stride + d + 16 * v;
      const __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(valid, acc), _mm512_set1_ps(to->rescale[first + i]));
      _mm512_mask_storeu_ps(acc, valid, _mm512_add_ps(kept, sum[i][v]));
    }
}

KVEDGE_INLINE void weigh_floats(const float_format format, const kvedge_probabilities *p, const kvedge_tile *values,
                                const kvedge_accumulators *to) {
  lines_ahead lines = lines_of(values, (int)bytes_of(format) * values->dim);
  for (int d = 0, channels; d < values->dim; d += channels) {
    const int left = (values->dim - d + 15) / 16;
    channels = left >= VECTORS ? 16 * VECTORS : 16;
#define WEIGH_CHANNELS(count)                                                                                          \
  {                                                                                                                    \
    lines_ahead *ahead = i == 0 && values->next.blocks ? &lines : NULL;                                                \
    if (channels > 16) weigh_channels(format, p, i, count, values, d, VECTORS, ahead, to);                             \
    else weigh_channels(format, p, i, count, values, d, 1, ahead, to);                                                 \
  }
    int i = 0;
    BY_FOURS(p->num_queries, WEIGH_CHANNELS)
#undef WEIGH_CHANNELS
  }
}

#define FLOAT_KERNELS(name, format)                                                                                    \
  void scores_##name##_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {     \
    score_floats(format, q, keys, scores, accumulate);                                                                 \
  }                                                                                                                    \
  void weighted_sum_##name##_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,                      \
                                        const kvedge_accumulators *to) {                                               \
    weigh_floats(format, p, values, to);                                                                               \
  }
FLOAT_KERNELS(float32, FLOAT32)
FLOAT_KERNELS(float16, FLOAT16)
FLOAT_KERNELS(bfloat16, BFLOAT16)

KVEDGE_TARGET_END
#endif
