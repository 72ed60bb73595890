/* What scores.c and scores_of_heads.c share. */
#include "kernels/avx512vnni/common.h"

/* A block of 16 tokens' keys. */
typedef struct {
  const int8_t *rows;
  ptrdiff_t token_stride;
  int num_tokens; /* that are there */
} key_rows;

/* Rows 4u..4u+3 of 64 bytes from d on, of int8 as unsigned numbers. Rows past the last token repeat it, bytes past the
 * last are 128 (int4: 0). (`how` and `bits`: constants where this is inlined.) */
KVEDGE_INLINE void load_keys(const key_rows *k, const extent how, const int bits, int u, int d, int row_bytes,
                             __m512i row[4]) {
  const __m512i to_unsigned = _mm512_set1_epi8((char)0x80);
  const int last = how == WHOLE ? BLOCK - 1 : k->num_tokens < BLOCK ? k->num_tokens - 1 : BLOCK - 1;
  const ptrdiff_t stride = k->token_stride;
  const int8_t *from = k->rows + 4 * u * stride + d;
  OPAQUE(from);
#pragma GCC unroll 4
  for (int t = 0; t < 4; t++) {
    const ptrdiff_t at = (4 * u + t <= last ? t : last - 4 * u) * stride;
    if (how == WHOLE) row[t] = _mm512_loadu_si512(from + at);
    else row[t] = _mm512_maskz_loadu_epi8(first_bytes(row_bytes - d), from + at);
    if (bits == 8) row[t] = _mm512_xor_si512(row[t], to_unsigned);
  }
}

/* The unit of a query's code of `bytes` planes. */
KVEDGE_INLINE float unit_of(const kvedge_query *q, int i, const int bytes) {
  return q->scale[i * q->scale_stride] * (bytes == 3 ? 1.0f : bytes == 2 ? 256.0f : 65536.0f);
}

/* A query's scores of a block: its sums of products in `unit`s, times the keys' scales; added to `out`'s or not. */
KVEDGE_INLINE void put_scores(__m512 dot, float unit, __m512 k_scale, float *out, int accumulate) {
  __m512 score = _mm512_mul_ps(_mm512_mul_ps(dot, _mm512_set1_ps(unit)), k_scale);
  if (accumulate) score = _mm512_add_ps(score, _mm512_loadu_ps(out));
  _mm512_storeu_ps(out, score);
}

/* Scores of a tile's keys from block `first` on. */
typedef struct {
  const kvedge_query *q;
  const kvedge_tile *keys;
  int bits; /* of a key's element: 8 or 4 */
  int first;
  int num_tokens;       /* from there on */
  const float *k_scale; /* of them */
  lines_ahead *ahead;
  float *scores; /* of them */
  int accumulate;
} scoring;

/* First row of block b, counted from the first, of the channels at hand. */
KVEDGE_INLINE const int8_t *block_of(const scoring *s, int b) {
  return (const int8_t *)s->keys->blocks[s->first + b] + s->keys->offset;
}
