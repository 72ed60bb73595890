/* Scores of the AVX-512 VNNI path.
 *
 * A dot product along a row ends in a sum across lanes, which costs more than the product. So keys are transposed, four
 * channels (one dword) at a time, and vpdpbusd leaves one token's sum in one lane. It wants unsigned keys: k + 128 =
 * k xor 0x80; that adds 128 * sum(query), from which sums start (kvedge_query.offsets).
 *
 * Many queries: 16 tokens are transposed as a whole, 4 shuffles per 64-byte line, and stored; each byte of a query then
 * costs a product per line and no more.
 *
 * Up to eight queries: the same, but transposed keys stay in registers, since Zen 4 pays for a stored vector with one
 * and a half products. Loads put half lines of two rows side by side, so that 3 shuffles per line are left, and these
 * come between the products of the rows before.
 *
 * Keys of int4 are transposed as they are stored, four bytes (eight channels) at a time, which
 * takes half of the shuffles; then 5 instructions make two columns of each one: the levels of
 * first codes, and of second ones.
 *
 * scores_of_heads.c has head batches.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/scores.h"

enum {
  PAIR = 2,          /* blocks that are scored together, and share the loads of the queries */
  SCORE_QUERIES = 4, /* at a time: x 3 bytes x PAIR = 24 of the 32 registers */
};

/* ---- Scores for many queries ---- */

/* 64 channels of a block from d on: channels 4j..4j+3 of 16 tokens into columns[PAIR * j]. */
KVEDGE_INLINE void transpose_rows(const key_rows *k, const extent how, int d, int dim, __m512i *columns) {
  __m512i quads[4][4]; /* of rows 4u..4u+3, within 128-bit lanes */
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++) {
    __m512i row[4];
    load_keys(k, how, 8, u, d, dim, row);
    transpose_in_lanes(row, quads[u]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i units[4] = {quads[0][c], quads[1][c], quads[2][c], quads[3][c]};
    __m512i ordered[4];
    transpose_lanes(units, ordered);
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) columns[PAIR * (4 * lane + c)] = ordered[lane];
  }
}

static __attribute__((noinline)) void transpose_masked(const key_rows *k, int d, int dim, __m512i *columns) {
  transpose_rows(k, MASKED, d, dim, columns);
}

/* Rows i, 4 + i, 8 + i and 12 + i, 32 bytes of each, as lanes: lane L of low has the first 16
 * bytes of row 4 L + i, of high the others. (`masked`: a constant where this is inlined.) */
KVEDGE_INLINE void split_rows(const int8_t *const row[4], const int masked, __mmask32 valid, const int bits,
                              __m512i *low, __m512i *high) {
  const __m512i to_unsigned = _mm512_set1_epi8((char)0x80);
  __m512i a = load_two_rows(row[0], row[1], masked, valid);
  if (bits == 8) a = _mm512_xor_si512(a, to_unsigned);
  __m512i b = load_two_rows(row[2], row[3], masked, valid);
  if (bits == 8) b = _mm512_xor_si512(b, to_unsigned);
  *low = _mm512_shuffle_i32x4(a, b, 0x88);
  *high = _mm512_shuffle_i32x4(a, b, 0xdd);
}

/* transpose_rows() of int4: 32 bytes, so 64 channels, from d on. */
static __attribute__((noinline)) void transpose_codes(const key_rows *k, __m512i levels, int d, int dim,
                                                      __m512i *columns) {
  const __mmask32 valid = (__mmask32)first_bytes(bytes_of(dim - d, 4));
  __m512i half[2][4];
  for (int i = 0; i < 4; i++) {
    const int8_t *row[4];
    for (int j = 0, t = i; j < 4; j++, t += 4)
      row[j] = k->rows + (t < k->num_tokens ? t : k->num_tokens - 1) * k->token_stride + d / 2;
    split_rows(row, 1, valid, 4, &half[0][i], &half[1][i]);
  }
  for (int h = 0; h < 2; h++) {
    __m512i four[4]; /* bytes of a token */
    transpose_in_lanes(half[h], four);
    for (int c = 0; c < 4; c++, columns += 2 * PAIR) {
      columns[0] = level_of(levels, four[c], 0);
      columns[PAIR] = level_of(levels, four[c], 1);
    }
  }
}

/* Sums of the products of a pair of blocks: of each byte of each query; of even and odd columns, where they are few. */
typedef __m512i score_sums[SCORE_QUERIES][3][PAIR][2];

/* Four bytes of query i's codes, for all lanes. Written as an instruction for GCC, which (12) computes an address for
 * each query anew and copies the sums to and fro: together a third of all instructions. */
KVEDGE_INLINE __m512i code_for_all(const int8_t *codes, ptrdiff_t stride, ptrdiff_t three_strides, const int i,
                                   const int at) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
  typedef int8_t codes_of_all[SCORE_QUERIES * 1024 / 64 * CODES_OF_64]; /* at most: it is said that they are read */
#define BROADCAST_FROM(address)                                                                                        \
  __asm__("vpbroadcastd %c1" address ", %0"                                                                            \
          : "=v"(four)                                                                                                 \
          : "i"(at), "r"(codes), "r"(stride), "r"(three_strides), "m"(*(const codes_of_all *)codes))
  if (__builtin_constant_p(at)) { /* not so under sanitizers */
    __m512i four;
    if (i == 0) BROADCAST_FROM("(%2)");
    else if (i == 1) BROADCAST_FROM("(%2,%3)");
    else if (i == 2) BROADCAST_FROM("(%2,%3,2)");
    else BROADCAST_FROM("(%2,%4)");
    return four;
  }
#undef BROADCAST_FROM
#endif
  return four_for_all(codes + (i < 3 ? i * stride : three_strides) + at);
}

/* Adds two columns of `blocks` blocks, times the codes of `count` queries. */
KVEDGE_INLINE void multiply_two_columns(const int count, const int bytes, const int blocks, const int chains,
                                        const int8_t *codes, ptrdiff_t stride, ptrdiff_t three_strides,
                                        const __m512i *columns, score_sums sum) {
#pragma GCC unroll 2
  for (int c = 0; c < 2; c++) {
    __m512i column[PAIR];
#pragma GCC unroll 2
    for (int k = 0; k < blocks; k++) column[k] = columns[PAIR * c + k];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i four = code_for_all(codes, stride, three_strides, i, 4 * c + 64 * b);
#pragma GCC unroll 2
        for (int k = 0; k < blocks; k++) multiply_add(&sum[i][b][k][c % chains], column[k], four);
      }
  }
}

/* A block or a pair of them to score: its columns, and the lines to prefetch. */
typedef struct {
  const __m512i *columns;
  lines_ahead *ahead;
} key_blocks;

/* Scores of `blocks` blocks of tokens, one or two, for `count` queries of `bytes` bytes. (Constants where this is
 * inlined, as is `prefetches` for lines.) */
KVEDGE_INLINE void score_blocks(const kvedge_query *q, int first, const int count, const int bytes, const int blocks,
                                const int prefetches, const key_blocks *k, const float *unit, const float *k_scale,
                                float *scores, int accumulate) {
  /* A product waits 5 cycles for the one before it in the same sum: few sums are made twice as many. */
  const int chains = count * bytes * blocks <= 8 ? 2 : 1;
  ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride, three_strides = 3 * stride;
  OPAQUE(three_strides); /* else it is computed at every use */
  score_sums sum;
  const int8_t *codes = q->quantized + first * stride;
  const int32_t *offset = q->offsets + first * 4 * q->scale_stride;
  const __m512i *columns = k->columns;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++, offset += 4 * q->scale_stride)
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++)
#pragma GCC unroll 2
      for (int j = 0; j < blocks; j++) {
        sum[i][b][j][0] = _mm512_set1_epi32(offset[b]);
        sum[i][b][j][1] = _mm512_setzero_si512();
      }
  for (int d = 0; d < q->dim; d += 64, codes += CODES_OF_64) {
    /* An odd column out: the next is there, and its codes are 0. */
    const int8_t *end = codes + (q->dim - d < 64 ? q->dim - d : 64);
    for (const int8_t *at = codes; at < end; at += 8, columns += 2 * PAIR) {
      if (prefetches) prefetch_lines(k->ahead, take_lines(k->ahead, 2 * blocks), 2 * blocks, 1);
      multiply_two_columns(count, bytes, blocks, chains, at, stride, three_strides, columns, sum);
    }
  }
  scores += first * KVEDGE_TILE, unit += first;
  OPAQUE(scores);
  OPAQUE(unit);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < blocks; j++) {
#pragma GCC unroll 3
      for (int b = 0; b < bytes && chains == 2; b++)
        sum[i][b][j][0] = _mm512_add_epi32(sum[i][b][j][0], sum[i][b][j][1]);
      __m512 dot = total_of(bytes, sum[i][0][j][0], sum[i][1][j][0], sum[i][2][j][0]);
      put_scores(dot, unit[i], _mm512_loadu_ps(k_scale + j * BLOCK), scores + i * KVEDGE_TILE + j * BLOCK, accumulate);
    }
}

KVEDGE_INLINE void score_queries(const kvedge_query *q, const int bytes, const int blocks, const key_blocks *k,
                                 const float *unit, const float *k_scale, float *scores, int accumulate) {
#define SCORE_BLOCKS_OF(count)                                                                                         \
  if (i == 0) score_blocks(q, i, count, bytes, blocks, 1, k, unit, k_scale, scores, accumulate);                       \
  else score_blocks(q, i, count, bytes, blocks, 0, k, unit, k_scale, scores, accumulate)
  int i = 0;
  BY_FOURS(q->num_queries, SCORE_BLOCKS_OF)
#undef SCORE_BLOCKS_OF
}

KVEDGE_INLINE void score_many(const scoring *s, const int bytes) {
  const kvedge_query *q = s->q;
  __m512i *columns = (__m512i *)q->scratch; /* (dim / 4, PAIR) x 16 tokens x 4 channels: 2 KB for a dim of 64 */
  float unit[KVEDGE_QUERY_ROWS];
  const __m512i levels = int4_levels(1);
  for (int i = 0; i < q->num_queries; i++) unit[i] = unit_of(q, i, bytes);
  const key_blocks pair = {.columns = columns, .ahead = s->ahead};
  for (int t = 0; t < s->num_tokens; t += PAIR * BLOCK) {
    int blocks = s->num_tokens - t > BLOCK ? 2 : 1, block = t / BLOCK;
    for (int b = 0; b < blocks; b++) {
      key_rows rows = {.rows = block_of(s, block + b),
                       .token_stride = s->keys->token_stride,
                       .num_tokens = s->num_tokens - t - b * BLOCK};
      for (int d = 0; d < q->dim; d += 64) {
        __m512i *to = columns + PAIR * (d / 4) + b;
        if (s->bits == 4) transpose_codes(&rows, levels, d, q->dim, to);
        else if (rows.num_tokens >= BLOCK && q->dim - d >= 64) transpose_rows(&rows, WHOLE, d, q->dim, to);
        else transpose_masked(&rows, d, q->dim, to);
      }
    }
    if (blocks == 2) score_queries(q, bytes, 2, &pair, unit, s->k_scale + t, s->scores + t, s->accumulate);
    else score_queries(q, bytes, 1, &pair, unit, s->k_scale + t, s->scores + t, s->accumulate);
  }
}

/* ---- Scores for up to eight queries ---- */

/* Adds a column times four bytes of query i's codes. Written as one instruction with its
 * broadcast, and one that stays where it is: GCC (12) computes an address for each query anew,
 * and gathers the shuffles that are to come between products. */
KVEDGE_INLINE void multiply_add_code(__m512i *sum, __m512i column, const int8_t *codes, const int8_t *codes_of_4,
                                     ptrdiff_t stride, ptrdiff_t three_strides, const int i, const int at) {
  const int8_t *from = i < 4 ? codes : codes_of_4;
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
  typedef int8_t codes_of_all[4 * 1024 / 64 * CODES_OF_64]; /* at most: it is said that they are read */
#define MULTIPLY_FROM(address)                                                                                         \
  __asm__ volatile("vpdpbusd %c2" address "%{1to16%}, %1, %0"                                                          \
                   : "+v"(*sum)                                                                                        \
                   : "v"(column), "i"(at), "r"(from), "r"(stride), "r"(three_strides),                                 \
                     "m"(*(const codes_of_all *)from))
  if (__builtin_constant_p(at)) { /* not so under sanitizers */
    if (i % 4 == 0) MULTIPLY_FROM("(%3)");
    else if (i % 4 == 1) MULTIPLY_FROM("(%3,%4)");
    else if (i % 4 == 2) MULTIPLY_FROM("(%3,%4,2)");
    else MULTIPLY_FROM("(%3,%5)");
    return;
  }
#undef MULTIPLY_FROM
#endif
  multiply_add(sum, column, four_for_all(from + (i % 4 < 3 ? i % 4 * stride : three_strides) + at));
}

/* Holds the computation of `count` vectors (a constant where this is inlined) where it is written. */
KVEDGE_INLINE void pin(__m512i *vectors, const int count) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) __asm__ volatile("" : "+v"(vectors[i]));
}

/* Rows that are transposed while those before them are multiplied: 32 bytes of a block, or fewer. */
typedef struct {
  const int8_t *from;
  ptrdiff_t stride, three_strides;
  __mmask32 valid;         /* bytes that are there */
  __m512i low[4], high[4]; /* as split_rows() leaves them */
} next_rows;

KVEDGE_INLINE void load_rows(next_rows *n, const int masked, const int bits, const int i) {
  const int8_t *from = n->from + (i < 3 ? i * n->stride : n->three_strides);
  __asm__ volatile("" : "+r"(from));
  const int8_t *from_4 = from + 4 * n->stride;
  const int8_t *const row[4] = {from, from_4, from + 8 * n->stride, from_4 + 8 * n->stride};
  split_rows(row, masked, n->valid, bits, &n->low[i], &n->high[i]);
  pin(&n->low[i], 1);
  pin(&n->high[i], 1);
}

/* What comes before the products of column 0 to 7 of 32 bytes, a column being four bytes of each
 * token: after step 3 columns of the other 16 bytes are ready, after step 7 the first of the
 * next rows. (`masked`, `bits` and `step`: constants where this is inlined.) */
KVEDGE_INLINE void prepare_next(next_rows *n, const int masked, const int bits, const int step, __m512i column[4]) {
  __m512i *half = step < 4 ? n->high : n->low; /* transpose_in_lanes(), in two steps: */
  if (step == 1 || step == 6) pair_dwords(half, half), pin(half, 4);
  if (step == 3 || step == 7) pair_qwords(half, column), pin(column, 4);
  if (step == 4) load_rows(n, masked, bits, 0), load_rows(n, masked, bits, 1);
  if (step == 5) load_rows(n, masked, bits, 2), load_rows(n, masked, bits, 3);
}

/* Scores of whole blocks for `count` queries from `first` on, of `bytes` bytes; `masked`: a
 * row's bytes are not a multiple of 32; `grouped`: each 32 have a scale, and sums of their own. (Constants where this is
 * inlined.) */
KVEDGE_INLINE void score_several_of(const scoring *s, const int bits, int first, const int count, const int bytes,
                                    const int masked, const int grouped) {
  const kvedge_query *q = s->q;
  const int row_bytes = bytes_of(q->dim, bits), wide = 8 / bits; /* columns of channels in one of bytes */
  const int chains = count * bytes <= 4 && !grouped ? 2 : 1;     /* as in score_blocks() */
  const int times = count * bytes <= 2 ? 3 : 2; /* little arithmetic between prefetches: Zen 4 drops more of them */
  const __m512i levels = int4_levels(1);
  ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride, three_strides = 3 * stride;
  next_rows next = {.from = block_of(s, 0),
                    .stride = s->keys->token_stride,
                    .three_strides = 3 * s->keys->token_stride,
                    .valid = (__mmask32)first_bytes(row_bytes)};
  OPAQUE(three_strides); /* else they are computed at every use */
  OPAQUE(next.three_strides);
  float unit[SEVERAL_QUERIES];
  int32_t start[SEVERAL_QUERIES][3];
  for (int i = 0; i < count; i++) {
    unit[i] = unit_of(q, first + i, bytes);
    memcpy(start[i], q->offsets + (first + i) * 4 * q->scale_stride, sizeof start[i]);
  }
  float *scores = s->scores + first * KVEDGE_TILE;
  __m512i column[4];
#pragma GCC unroll 4
  for (int step = 4; step < 8; step++) prepare_next(&next, masked, bits, step, column);
  for (int t = 0; t < s->num_tokens; t += BLOCK, scores += BLOCK) {
    __m512i sum[SEVERAL_QUERIES][3][2];
    __m512 total[SEVERAL_QUERIES];
    const int32_t *offsets = q->offsets + first * 4 * q->scale_stride; /* of a group */
    const float *group_scale = s->k_scale + t;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      total[i] = _mm512_setzero_ps();
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        sum[i][b][0] = _mm512_set1_epi32(start[i][b]);
        sum[i][b][1] = _mm512_setzero_si512();
      }
    }
    const int8_t *codes = q->quantized + first * stride;
    for (int d = 32; d < row_bytes + 32; d += 32) { /* where these bytes end */
      const int8_t *codes_of_4 = codes + 4 * stride;
      if (count > 4) OPAQUE(codes_of_4);
      const int halves = masked && d - row_bytes >= 16 ? 1 : 2; /* of them that are there */
      const char *lines = take_lines(s->ahead, 4 * halves);
      next.from += grouped ? s->keys->group_stride : 32;
#pragma GCC unroll 8
      for (int i = 0; i < count && grouped; i++)
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++) sum[i][b][0] = _mm512_set1_epi32(offsets[4 * i * q->scale_stride + b]);
      if (d >= row_bytes) next.from = block_of(s, t / BLOCK + (t + BLOCK < s->num_tokens)); /* or this one again */
      if (masked) next.valid = (__mmask32)first_bytes(d >= row_bytes ? row_bytes : row_bytes - d);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m512i current[4] = {column[0], column[1], column[2], column[3]};
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
          prepare_next(&next, masked, bits, 4 * half + c, column);
          if (half >= halves) continue;
          prefetch_lines(s->ahead, lines + 64 * (4 * half + c), 1, times);
#pragma GCC unroll 2
          for (int w = 0; w < wide; w++) {
            const int at = wide * (4 * half + c) + w; /* column of channels */
            const __m512i keys = bits == 8 ? current[c] : level_of(levels, current[c], w);
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
#pragma GCC unroll 3
              for (int b = 0; b < bytes; b++)
                multiply_add_code(&sum[i][b][at % chains], keys, codes, codes_of_4, stride, three_strides, i,
                                  4 * at + 64 * b);
          }
        }
      }
      if (grouped) {
        const __m512 k_scale = _mm512_loadu_ps(group_scale);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++)
          total[i] = _mm512_fmadd_ps(total_of(bytes, sum[i][0][0], sum[i][1][0], sum[i][2][0]), k_scale, total[i]);
        if (s->keys->group_stride > KVEDGE_GROUP && d % 64 == 0)
          prefetch_lines(s->ahead, take_lines(s->ahead, 1), 1, times);
        codes += KVEDGE_QUANTIZED_BYTES * q->group_stride, offsets += 4, group_scale += s->keys->scale_stride;
      } else {
        codes += bits == 4 ? CODES_OF_64 : d % 64 ? 32 : CODES_OF_64 - 32;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count && grouped; i++)
      _mm512_storeu_ps(scores + i * KVEDGE_TILE, _mm512_mul_ps(total[i], _mm512_set1_ps(unit[i])));
    if (grouped) continue;
    const __m512 k_scale = _mm512_loadu_ps(s->k_scale + t);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
#pragma GCC unroll 3
      for (int b = 0; b < bytes && chains == 2; b++) sum[i][b][0] = _mm512_add_epi32(sum[i][b][0], sum[i][b][1]);
      __m512 dot = total_of(bytes, sum[i][0][0], sum[i][1][0], sum[i][2][0]);
      put_scores(dot, unit[i], k_scale, scores + i * KVEDGE_TILE, s->accumulate);
    }
  }
}

/* As few passes as sums have registers for, and as equal ones as can be. */
KVEDGE_INLINE void score_several(const scoring *s, const int bits, const int bytes, const int masked) {
  const int n = s->q->num_queries, most = bytes < 3 ? 7 : 4;
  for (int i = 0, count, passes = (n + most - 1) / most; passes > 0; i += count, passes--) {
    count = (n - i + passes - 1) / passes;
#define SEVERAL(count)                                                                                                 \
  case count: score_several_of(s, bits, i, count, bytes, masked, 0); break
    switch (count) {
      SEVERAL(1);
      SEVERAL(2);
      SEVERAL(3);
      SEVERAL(4);
    }
    if (bytes < 3) switch (count) {
        SEVERAL(5);
        SEVERAL(6);
        SEVERAL(7);
      }
#undef SEVERAL
  }
}

typedef void score_function(const scoring *s);

/* Scores a tile's whole blocks for several queries; returns what is left. */
KVEDGE_INLINE scoring whole_blocks(const scoring *s, score_function *several, score_function *several_masked) {
  scoring rest = *s;
  rest.num_tokens = s->num_tokens / BLOCK * BLOCK;
  if (rest.num_tokens > 0 && s->q->dim % 32 == 0) several(&rest);
  else if (rest.num_tokens > 0) several_masked(&rest);
  rest.first += rest.num_tokens / BLOCK;
  rest.k_scale += rest.num_tokens;
  rest.scores += rest.num_tokens;
  rest.num_tokens = s->num_tokens - rest.num_tokens;
  return rest;
}

/* One function for each number of planes: GCC does better with several than with one of all. */
#define SCORE(planes)                                                                                                  \
  static __attribute__((noinline)) void score_several_##planes(const scoring *s) { score_several(s, 8, planes, 0); }   \
  static __attribute__((noinline)) void score_parts_##planes(const scoring *s) { score_several(s, 8, planes, 1); }     \
  static __attribute__((noinline)) void score_codes_##planes(const scoring *s) { score_several(s, 4, planes, 1); }     \
  static __attribute__((noinline)) void score_many_##planes(const scoring *s) { score_many(s, planes); }               \
  static void score_##planes(const scoring *s) {                                                                       \
    scoring rest = *s;                                                                                                 \
    if (s->q->num_queries <= SEVERAL_QUERIES)                                                                          \
      rest = s->bits == 4 ? whole_blocks(s, score_codes_##planes, score_codes_##planes)                                \
                          : whole_blocks(s, score_several_##planes, score_parts_##planes);                             \
    if (rest.num_tokens > 0) score_many_##planes(&rest);                                                               \
  }
SCORE(1)
SCORE(2)
SCORE(3)
#undef SCORE

static void score(const scoring *s) {
  switch (s->q->planes) {
    case 3: score_3(s); break;
    case 2: score_2(s); break;
    default: score_1(s);
  }
}

/* ---- Groups of 32 channels ---- */

static __attribute__((noinline)) void score_groups_2(const scoring *s) {
  for (int i = 0, n = s->q->num_queries, count, passes = (n + 3) / 4; passes > 0; i += count, passes--) {
    count = (n - i + passes - 1) / passes;
#define GROUPS_OF(count)                                                                                               \
  case count: score_several_of(s, 8, i, count, 2, 0, 1); break
    switch (count) {
      GROUPS_OF(1);
      GROUPS_OF(2);
      GROUPS_OF(3);
      GROUPS_OF(4);
    }
#undef GROUPS_OF
  }
}

/* The whole blocks of a tile at once, of two planes; what else there is group by group. */
void scores_of_groups_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  const int num_groups = q->dim / KVEDGE_GROUP;
  int done = 0; /* tokens */
  if (q->planes == 2 && q->num_queries <= SEVERAL_QUERIES) {
    lines_ahead ahead = lines_of(keys, (int)(num_groups * keys->group_stride));
    done = keys->num_tokens / BLOCK * BLOCK;
    const scoring s = {q, keys, 8, 0, done, keys->scales, &ahead, scores, 0};
    if (done > 0) score_groups_2(&s);
  }
  for (int g = 0; g < num_groups && done < keys->num_tokens; g++) {
    const kvedge_query of_query = kvedge_query_group(q, g);
    kvedge_tile rest = kvedge_tile_group(keys, g);
    rest.blocks += done / BLOCK, rest.num_tokens -= done, rest.scales += done;
    if (done > 0) rest.next.blocks = NULL;
    scores_int8_avx512vnni(&of_query, &rest, scores + done, g > 0);
  }
}

/* ---- ggml's blocks: codes are unsigned as they are ---- */

/* Scores of whole blocks of tokens for `count` queries from `first` on, in two planes. (count: a constant where this is
 * inlined.) */
KVEDGE_INLINE void score_codes_of(const kvedge_query *q, int first, const int count, const kvedge_tile *keys,
                                  int num_tokens, lines_ahead *ahead, float *scores) {
  const int num_groups = q->dim / KVEDGE_GROUP, chains = count <= 2 ? 2 : 1; /* as in score_blocks() */
  const int zero = -keys->codes->levels[0];
  const ptrdiff_t key_stride = keys->token_stride;
  ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride, three_strides = 3 * stride;
  OPAQUE(three_strides);
  int32_t start[SCORE_QUERIES][KVEDGE_GROUPS][2];
  float unit[SCORE_QUERIES];
  for (int i = 0; i < count; i++) {
    unit[i] = unit_of(q, first + i, 2);
    for (int g = 0; g < num_groups; g++)
      for (int b = 0; b < 2; b++) /* offsets take off 128 times the sum of codes */
        start[i][g][b] = q->offsets[4 * ((first + i) * q->scale_stride + g) + b] / 128 * zero;
  }
  scores += first * KVEDGE_TILE;
  for (int t = 0; t < num_tokens; t += BLOCK, scores += BLOCK) {
    const int8_t *rows = (const int8_t *)kvedge_tile_block(keys, t), *codes = q->quantized + first * stride;
    const float *k_scale = keys->scales + t;
    __m512 total[SCORE_QUERIES];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) total[i] = _mm512_setzero_ps();
    for (int g = 0; g < num_groups; g++, rows += keys->group_stride, k_scale += keys->scale_stride) {
      __m512i lanes[4], column[4], sum[SCORE_QUERIES][2][2];
      const char *lines = take_lines(ahead, 4);
      if (g % 2) prefetch_lines(ahead, take_lines(ahead, 1), 1, 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) { /* lane L: row 4 L + i */
        const int8_t *from = rows + i * key_stride;
        OPAQUE(from);
        lanes[i] = load_four_lanes(from, from + 4 * key_stride, from + 8 * key_stride, from + 12 * key_stride);
      }
      transpose_in_lanes(lanes, column);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
          sum[i][b][0] = _mm512_set1_epi32(start[i][g][b]);
          sum[i][b][1] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        prefetch_lines(ahead, lines + 64 * c, 1, 2);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          __m512i key = half ? _mm512_srli_epi16(column[c], 4) : column[c];
          key = _mm512_and_si512(key, _mm512_set1_epi8(15));
#pragma GCC unroll 4
          for (int i = 0; i < count; i++)
#pragma GCC unroll 2
            for (int b = 0; b < 2; b++)
              multiply_add_code(&sum[i][b][half % chains], key, codes, codes, stride, three_strides, i,
                                16 * half + 4 * c + 64 * b);
        }
      }
      const __m512 scale = _mm512_loadu_ps(k_scale);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) {
#pragma GCC unroll 2
        for (int b = 0; b < 2 && chains == 2; b++) sum[i][b][0] = _mm512_add_epi32(sum[i][b][0], sum[i][b][1]);
        total[i] = _mm512_fmadd_ps(total_of(2, sum[i][0][0], sum[i][1][0], sum[i][1][0]), scale, total[i]);
      }
      codes += KVEDGE_QUANTIZED_BYTES * q->group_stride;
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      _mm512_storeu_ps(scores + i * KVEDGE_TILE, _mm512_mul_ps(total[i], _mm512_set1_ps(unit[i])));
  }
}

int score_few_blocks_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  const int whole = keys->num_tokens / BLOCK * BLOCK;
  if (q->planes != 2 || !kvedge_codes_are_levels(keys->codes) || q->num_queries > SEVERAL_QUERIES || whole == 0)
    return 0;
  lines_ahead ahead = lines_of(keys, (int)(q->dim / KVEDGE_GROUP * keys->group_stride));
#define SCORE_CODES(count) score_codes_of(q, i, count, keys, whole, &ahead, scores)
  int i = 0;
  BY_FOURS(q->num_queries, SCORE_CODES)
#undef SCORE_CODES
  return whole;
}

void scores_int8_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  lines_ahead ahead = lines_of(keys, q->dim);
  const scoring s = {q, keys, 8, 0, keys->num_tokens, keys->scales, &ahead, scores, accumulate};
  score(&s);
}

void scores_int4_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  lines_ahead ahead = lines_of(keys, bytes_of(q->dim, 4));
  const scoring s = {q, keys, 4, 0, keys->num_tokens, keys->scales, &ahead, scores, accumulate};
  score(&s);
}

KVEDGE_TARGET_END
#endif
