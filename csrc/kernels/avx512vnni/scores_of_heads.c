/* Scores of a head batch, of the AVX-512 VNNI path: several KV heads at once, one query each.
 *
 * Where each query head has keys of its own, a head tile is little work, and what comes with every one
 * (quantizing probabilities, sums over lanes, a call) costs as much again. Side by side KVEDGE_HEADS heads fill whole
 * vectors, as long as a head has a multiple of 16 channels (a unit), and a line that two heads share is read once.
 *
 * 4 tokens are transposed within 128-bit lanes, 2 shuffles per line, and stay in registers. A lane then has its own
 * channels, so a query's codes are spread accordingly, and each query and 16 tokens end in a sum over four lanes. The
 * two high planes of a query are added up as integers first.
 *
 * int8: a lane is a unit, and a vector belongs to one head or two. int4: a lane is two units,
 * which may belong to two heads; then their sums are kept apart. A vector belongs to up to three
 * heads.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/scores.h"

KVEDGE_INLINE void spread_vector(__m512i codes, const int bytes, __m512i *out) {
  out[0] = _mm512_shuffle_epi32(codes, 0x00);
  out[bytes] = _mm512_shuffle_epi32(codes, 0x55);
  out[2 * bytes] = _mm512_shuffle_epi32(codes, 0xaa);
  out[3 * bytes] = _mm512_shuffle_epi32(codes, 0xff);
}

/* Half of a sum over lanes: lanes 0 and 1 of the result add up to those of a, 2 and 3 to those of b. */
KVEDGE_INLINE __m512i add_half_lanes(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

/* Scores of a block for one query, whose sums over all channels are half added up, as add_half_lanes() leaves them. */
KVEDGE_INLINE void put_head_scores(const kvedge_query *q, int i, const int bytes, __m512i halves[2][2],
                                   const float *k_scale, float *out, int accumulate) {
  const int32_t *offset = q->offsets + i * 4 * q->scale_stride;
  __m512 dot = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int pair = 0; pair < (bytes + 1) / 2; pair++) {
    __m512i sum = _mm512_add_epi32(_mm512_shuffle_i32x4(halves[pair][0], halves[pair][1], 0x88),
                                   _mm512_shuffle_i32x4(halves[pair][0], halves[pair][1], 0xdd));
    int32_t start = pair == 1 ? offset[2] : bytes == 1 ? offset[0] : 256 * offset[0] + offset[1];
    __m512 number = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(start)));
    dot = pair == 0 ? number : _mm512_fmadd_ps(dot, _mm512_set1_ps(256.0f), number);
  }
  put_scores(dot, unit_of(q, i, bytes), _mm512_loadu_ps(k_scale), out, accumulate);
}

/* Where units of 16 channels of the heads' codes lie, one after the other. */
typedef struct {
  const int8_t *codes; /* of the head */
  ptrdiff_t stride;    /* to the next head's */
  int d, dim;          /* channel of the head */
} code_units;

/* That of a channel past the last head repeats one before. */
KVEDGE_INLINE const int8_t *next_unit(code_units *u, int *left) {
  const int8_t *unit = u->codes + u->d / 64 * CODES_OF_64 + u->d % 64;
  if (--*left <= 0) return unit;
  u->d += 16;
  if (u->d == u->dim) u->d = 0, u->codes += u->stride;
  return unit;
}

/* Codes of the heads' queries as if those were one query of all channels. Of int8, (channels /
 * 64, 4, bytes): lane L of the vector of c and plane b has that plane of channels 16 L + 4 c ..
 * + 3, four times. Of int4, (channels / 128, 8, bytes): that of the four channels of lane L's
 * bytes 4 c .. + 3, first codes (2 c), second codes (2 c + 1). (`bits` and `bytes`: constants
 * where this is inlined.) */
KVEDGE_INLINE void spread_codes_of_heads(const kvedge_query *q, const int bits, const int bytes, __m512i *out) {
  const int units = 8 / bits; /* of a lane */
  int left = HEADS * q->dim / 16;
  code_units from = {q->quantized, KVEDGE_QUANTIZED_BYTES * q->stride, 0, q->dim};
  while (left > 0) {
    const int8_t *lane[2][4]; /* by unit */
    for (int i = 0; i < 4; i++)
      for (int u = 0; u < units; u++) lane[u][i] = next_unit(&from, &left);
    for (int u = 0; u < units; u++, out += 4 * bytes)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i all = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)(lane[u][0] + 64 * b)));
        all = _mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[u][1] + 64 * b)), 1);
        all = _mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[u][2] + 64 * b)), 2);
        spread_vector(_mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[u][3] + 64 * b)), 3), bytes,
                      out + b);
      }
  }
}

/* Sums over 64 bytes of a block's rows from `at` on: of the products with the two high planes,
 * and with the low one if there are three. In lane L of out[][u] is the sum of tokens 4u..4u+3
 * over what lies in lane L. With `apart`, two outs: of the first and the second unit of int4.
 * (`how`, `bits`, `bytes` and `apart`: constants where this is inlined.) */
KVEDGE_INLINE void multiply_64_of_heads(const key_rows *k, const extent how, const int bits, int at, int row_bytes,
                                        const int bytes, const int apart, const __m512i *codes, const char *lines,
                                        const lines_ahead *ahead, __m512i out[2][2][4]) {
  const __m512i levels = int4_levels(1);
  const int wide = 8 / bits;
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++) {
    __m512i row[4], column[4], sum[2][3];
    load_keys(k, how, bits, u, at, row_bytes, row);
    prefetch_lines(ahead, lines + 256 * u, 4, 4);
    transpose_in_lanes(row, column);
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) sum[0][b] = sum[1][b] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
      for (int w = 0; w < wide; w++) {
        const __m512i keys = bits == 8 ? column[c] : level_of(levels, column[c], w);
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++)
          multiply_add(&sum[apart ? c / 2 : 0][b], keys, codes[(wide * c + w) * bytes + b]);
      }
#pragma GCC unroll 2
    for (int unit = 0; unit <= apart; unit++) {
      const __m512i *of = sum[unit];
      out[unit][0][u] = bytes > 1 ? _mm512_add_epi32(_mm512_slli_epi32(of[0], 8), of[1]) : of[0];
      out[unit][1][u] = of[2];
    }
  }
}

/* The dwords of lanes 0..n-1. */
KVEDGE_INLINE unsigned first_lanes_of(int n) { return n >= 4 ? 0xffff : (1u << 4 * n) - 1; }

/* Scores of a block. */
KVEDGE_INLINE void score_block_of_heads(const scoring *s, const key_rows *k, const extent how, const int bytes,
                                        const __m512i *codes, const float *k_scale, ptrdiff_t k_scale_stride,
                                        float *scores) {
  const int dim = s->q->dim, pairs = (bytes + 1) / 2;
  __m512i sum[2][4]; /* of the head so far */
#pragma GCC unroll 2
  for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) sum[pair][u] = _mm512_setzero_si512();
  int head = 0, left = dim / 16; /* lanes of the head that are left */
  for (int d = 0; d < HEADS * dim; d += 64, codes += 4 * bytes) {
    __m512i products[2][2][4], halves[2][2];
    multiply_64_of_heads(k, how, 8, d, HEADS * dim, bytes, 0, codes, take_lines(s->ahead, BLOCK), s->ahead, products);
    const __mmask16 its = (__mmask16)(left >= 4 ? 0xffff : (1 << 4 * left) - 1);
#pragma GCC unroll 2
    for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++)
        sum[pair][u] = _mm512_mask_add_epi32(sum[pair][u], its, sum[pair][u], products[0][pair][u]);
    left -= 4;
    if (left > 0) continue;
#pragma GCC unroll 2
    for (int pair = 0; pair < pairs; pair++) {
      halves[pair][0] = add_half_lanes(sum[pair][0], sum[pair][1]);
      halves[pair][1] = add_half_lanes(sum[pair][2], sum[pair][3]);
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) sum[pair][u] = _mm512_maskz_mov_epi32((__mmask16)~its, products[0][pair][u]);
    }
    put_head_scores(s->q, head, bytes, halves, k_scale + head * k_scale_stride, scores + head * KVEDGE_TILE,
                    s->accumulate);
    head++, left += dim / 16;
  }
}

/* The same of int4; `apart`: a lane may belong to two heads. (`how`, `bytes` and `apart`: constants where this is
 * inlined.) */
KVEDGE_INLINE void score_codes_of_heads(const scoring *s, const key_rows *k, const extent how, const int bytes,
                                        const int apart, const __m512i *codes, const float *k_scale,
                                        ptrdiff_t k_scale_stride, float *scores) {
  enum { UNITS = 8 }; /* of a vector */
  const int dim = s->q->dim, pairs = (bytes + 1) / 2, row_bytes = HEADS * dim / 2;
  __m512i sum[2][4]; /* of the head so far */
#pragma GCC unroll 2
  for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) sum[pair][u] = _mm512_setzero_si512();
  int head = 0, left = dim / 16; /* units of the head that are left */
  for (int at = 0; at < row_bytes; at += 64, codes += 8 * bytes) {
    __m512i products[2][2][4], halves[2][2];
    multiply_64_of_heads(k, how, 4, at, row_bytes, bytes, apart, codes, take_lines(s->ahead, BLOCK), s->ahead,
                         products);
    for (int unit = 0; unit < UNITS && head < HEADS;) {
      const int stop = left < UNITS - unit ? unit + left : UNITS;
      const __mmask16 first = (__mmask16)(first_lanes_of((stop + 1) / 2) & ~first_lanes_of((unit + 1) / 2));
      const __mmask16 second = (__mmask16)(first_lanes_of(stop / 2) & ~first_lanes_of(unit / 2));
#pragma GCC unroll 2
      for (int pair = 0; pair < pairs; pair++)
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          sum[pair][u] = _mm512_mask_add_epi32(sum[pair][u], first, sum[pair][u], products[0][pair][u]);
          if (apart) sum[pair][u] = _mm512_mask_add_epi32(sum[pair][u], second, sum[pair][u], products[1][pair][u]);
        }
      left -= stop - unit, unit = stop;
      if (left > 0) break;
#pragma GCC unroll 2
      for (int pair = 0; pair < pairs; pair++) {
        halves[pair][0] = add_half_lanes(sum[pair][0], sum[pair][1]);
        halves[pair][1] = add_half_lanes(sum[pair][2], sum[pair][3]);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) sum[pair][u] = _mm512_setzero_si512();
      }
      put_head_scores(s->q, head, bytes, halves, k_scale + head * k_scale_stride, scores + head * KVEDGE_TILE,
                      s->accumulate);
      head++, left = dim / 16;
    }
  }
}

/* Blocks that are not whole, or rows that are no whole vectors. */
static __attribute__((noinline)) void score_last_of_heads(const scoring *s, const key_rows *k, const __m512i *codes,
                                                          const float *k_scale, ptrdiff_t k_scale_stride,
                                                          float *scores) {
  switch (s->q->planes) {
    case 3: score_block_of_heads(s, k, MASKED, 3, codes, k_scale, k_scale_stride, scores); break;
    case 2: score_block_of_heads(s, k, MASKED, 2, codes, k_scale, k_scale_stride, scores); break;
    default: score_block_of_heads(s, k, MASKED, 1, codes, k_scale, k_scale_stride, scores);
  }
}

static __attribute__((noinline)) void score_last_of_codes(const scoring *s, const key_rows *k, const __m512i *codes,
                                                          const float *k_scale, ptrdiff_t k_scale_stride,
                                                          float *scores) {
  switch (s->q->planes) {
    case 3: score_codes_of_heads(s, k, MASKED, 3, 1, codes, k_scale, k_scale_stride, scores); break;
    case 2: score_codes_of_heads(s, k, MASKED, 2, 1, codes, k_scale, k_scale_stride, scores); break;
    default: score_codes_of_heads(s, k, MASKED, 1, 1, codes, k_scale, k_scale_stride, scores);
  }
}

KVEDGE_INLINE void score_heads(const scoring *s, ptrdiff_t k_scale_stride, const int bits, const int bytes) {
  __m512i codes[HEADS_VECTORS * 4 * 3];
  const int whole = bits == 8 || s->q->dim % 32 == 0;
  spread_codes_of_heads(s->q, bits, bytes, codes);
  for (int t = 0; t < s->num_tokens; t += BLOCK) {
    const key_rows rows = {block_of(s, t / BLOCK), s->keys->token_stride, s->num_tokens - t};
    const float *k_scale = s->k_scale + t;
    float *scores = s->scores + t;
    if (rows.num_tokens < BLOCK || !whole)
      (bits == 8 ? score_last_of_heads : score_last_of_codes)(s, &rows, codes, k_scale, k_scale_stride, scores);
    else if (bits == 8) score_block_of_heads(s, &rows, WHOLE, bytes, codes, k_scale, k_scale_stride, scores);
    else score_codes_of_heads(s, &rows, WHOLE, bytes, 0, codes, k_scale, k_scale_stride, scores);
  }
}

KVEDGE_INLINE void scores_of_heads(const kvedge_query *q, const kvedge_tile *keys, const int bits, float *scores,
                                   int accumulate) {
  lines_ahead ahead = lines_of(keys, bytes_of(HEADS * q->dim, bits));
  const scoring s = {q, keys, bits, 0, keys->num_tokens, keys->scales, &ahead, scores, accumulate};
  switch (q->planes) {
    case 3: score_heads(&s, keys->scale_stride, bits, 3); break;
    case 2: score_heads(&s, keys->scale_stride, bits, 2); break;
    default: score_heads(&s, keys->scale_stride, bits, 1);
  }
}

void scores_of_heads_int8_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  scores_of_heads(q, keys, 8, scores, accumulate);
}

void scores_of_heads_int4_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  scores_of_heads(q, keys, 4, scores, accumulate);
}

KVEDGE_TARGET_END
#endif
