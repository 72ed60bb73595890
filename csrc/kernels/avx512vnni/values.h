/* Weighted sums of the AVX-512 VNNI path, with probabilities quantized to PLANES planes. Part of values_1.c to
 * values_3.c, which define it.
 *
 * Rows of four tokens are interleaved byte by byte (2 shuffles per 64-byte line, once for all queries), so that
 * vpdpbusd with a broadcast dword of weights, which are unsigned, adds all four tokens to 16 channels: a product per
 * line, query and byte of the weights. Sums stay in registers over a tile, of as many queries as there is room for.
 *
 * Many queries: for the others what was interleaved is kept. Several: half of the sums are made at a time, so that
 * there is room for twice as many, from rows that are read and interleaved by halves, since Zen 4 pays for a stored
 * vector with one and a half products.
 *
 * With up to 32 channels left, rows of two tokens share a register.
 *
 * Rows of int4 are interleaved as they are stored, which takes half of the shuffles; values_int4.h has them.
 */
#define WEIGHTED_SUM_NAMED(of, planes) weighted_sum_##of##_##planes##_avx512vnni
#define WEIGHTED_SUM_OF(of, planes) WEIGHTED_SUM_NAMED(of, planes)
#define WEIGHTED_SUM(of) WEIGHTED_SUM_OF(of, PLANES)

enum {
  SUM_REGISTERS = 24, /* of 32: queries x bytes of the weights x 4 */
  SUM_QUERIES = 4,    /* at most */
  HALF_QUERIES = 4,   /* at most, where half of the sums are made at a time */
  FEW_QUERIES = 2,    /* up to which all sums of 64 channels are made at a time */
  ROWS_NEAR = 8,      /* a row is prefetched into L1 this many rows before it is used */
};

/* The scale of `count` queries' codes of a tile's weights, and what makes codes of weights. (Constants where this is
 * inlined.) Values' scales are v_scale_stride apart from query to query: 0 where they are the same ones. */
KVEDGE_INLINE void scale_of_weights(const int count, const int bytes, const float *p, const float *v_scale,
                                    ptrdiff_t v_scale_stride, int num_tokens, float *scale, float *factor) {
  const __m128 most = _mm_set1_ps(bytes == 3 ? WEIGHT_MAX : bytes == 2 ? WEIGHT_MAX_16 : WEIGHT_MAX_8);
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  __m512 reduced[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) reduced[i] = _mm512_setzero_ps();
  for (int t = 0; t < num_tokens; t += 16)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m512 scales = _mm512_loadu_ps(v_scale + i * v_scale_stride + t);
      reduced[i] = _mm512_max_ps(reduced[i], _mm512_mul_ps(_mm512_loadu_ps(p + i * KVEDGE_TILE + t), scales));
    }
  __m128 largest = reduce_4(MAX, reduced);
  __mmask8 some = _mm_cmp_ps_mask(largest, _mm_set1_ps(WEIGHT_NOTHING), _CMP_GT_OQ);
  _mm_mask_storeu_ps(factor, queries, _mm_maskz_div_ps(some, most, largest));
  _mm_mask_storeu_ps(scale, queries, _mm_maskz_div_ps(some, largest, most));
}

/* Weights of `count` queries as unsigned codes of 24 bits or fewer, four tokens at a time as split_bytes() leaves them.
 * (Constants where this is inlined.) */
KVEDGE_INLINE void encode_weights_of(const int count, const int bytes, const float *p, const float *v_scale,
                                     ptrdiff_t v_scale_stride, int num_tokens, const float *factor, uint8_t *codes) {
  for (int t = 0; t < num_tokens; t += 16) {
    __m512 dither = _mm512_loadu_ps(kvedge_dither + t);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m512 scales = _mm512_loadu_ps(v_scale + i * v_scale_stride + t);
      __m512 weight = _mm512_mul_ps(_mm512_loadu_ps(p + i * KVEDGE_TILE + t), scales);
      __m512 number = _mm512_mul_ps(weight, _mm512_set1_ps(factor[i]));
      if (bytes < 3) {
        __mmask16 small = _mm512_cmp_ps_mask(number, _mm512_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
        number = _mm512_mask_add_ps(number, small, number, dither);
      }
      __m512i code = _mm512_cvtps_epi32(number);
      _mm512_storeu_si512(codes + i * CODE_ROW + 4 * t, split_bytes(code, bytes));
    }
  }
}

/* First all scales, then all codes, so that these need not wait for sums over lanes and divisions. */
KVEDGE_INLINE void encode_weights(int num_queries, const int bytes, const float *p, const float *v_scale,
                                  const ptrdiff_t v_scale_stride, int num_tokens, uint8_t *codes, float *scale) {
  float factor[KVEDGE_QUERY_ROWS];
#define SCALE_OF(count)                                                                                                \
  scale_of_weights(count, bytes, p + i * KVEDGE_TILE, v_scale, v_scale_stride, num_tokens, scale + i, factor + i)
#define ENCODE_OF(count)                                                                                               \
  encode_weights_of(count, bytes, p + i * KVEDGE_TILE, v_scale, v_scale_stride, num_tokens, factor + i,                \
                    codes + i * CODE_ROW)
  int i = 0;
  BY_FOURS(num_queries, SCALE_OF)
  i = 0;
  BY_FOURS(num_queries, ENCODE_OF)
#undef SCALE_OF
#undef ENCODE_OF
}

/* The values of a tile from a channel on, and the lines to prefetch. */
typedef struct {
  const char *const *blocks;
  ptrdiff_t offset, token_stride;
  int num_tokens;
  lines_ahead *ahead;
  const kvedge_tile *tile;
} value_rows;

KVEDGE_INLINE const int8_t *block_of(const value_rows *v, int b) { return (const int8_t *)v->blocks[b] + v->offset; }

/* Where add_rows() reads values, and how many lines it prefetches with every four rows. */
typedef enum {
  ROWS,             /* whole rows; four lines */
  ROWS_KEPT,        /* rows, which are kept interleaved; two lines */
  KEPT_PREFETCHING, /* kept rows, for the first time; the other two lines */
  KEPT,             /* kept rows; none */
} value_source;

/* All of a tile's values interleaved: (tokens of whole blocks / 4, 4). Rows past the last token repeat it: their weight
 * is 0. */
static __attribute__((noinline)) void keep_values(const value_rows *v, int num_channels, __m512i *kept) {
  __mmask64 valid = first_bytes(num_channels);
  int padded = (v->num_tokens + BLOCK - 1) / BLOCK * BLOCK;
  for (int t = 0; t < padded; t += 4, kept += 4) {
    __m512i row[4];
    for (int j = 0; j < 4; j++) {
      int token = t + j < v->num_tokens ? t + j : v->num_tokens - 1;
      row[j] = _mm512_maskz_loadu_epi8(valid, block_of(v, token / BLOCK) + token % BLOCK * v->token_stride);
      prefetch_lines(v->ahead, take_lines(v->ahead, 1), 1, 1);
    }
    interleave_4_rows(row, kept);
  }
}

/* Loads four rows of 64 channels (WHOLE), or of those in `valid` (MASKED); or of up to 32
 * channels with the next four rows in the upper halves (HALF). The four rows at `near`, unless
 * it is NULL, are prefetched into L1. (All but `valid`: constants where this is inlined.) */
KVEDGE_INLINE void load_values(const int8_t *from, const int8_t *near, ptrdiff_t stride, const extent how,
                               __mmask64 valid, __m512i row[4]) {
  const int prefetches = near != NULL;
  OPAQUE(from);
  OPAQUE(near);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    if (how == HALF) {
      row[j] = load_two_rows(from + j * stride, from + (4 + j) * stride, 1, (__mmask32)valid);
      continue;
    }
    if (how == WHOLE) row[j] = _mm512_loadu_si512(from + j * stride);
    else row[j] = _mm512_maskz_loadu_epi8(valid, from + j * stride);
    if (prefetches) _mm_prefetch((const char *)near + j * stride, _MM_HINT_T0);
  }
}

/* The weights of four tokens for all lanes; `half`: of the four after them for the upper half. */
KVEDGE_INLINE __m512i weights_at(const uint8_t *codes, const int half) {
  __m512i weights = four_for_all(codes);
  return half ? _mm512_mask_blend_epi32(0xff00, weights, four_for_all(codes + 16)) : weights;
}

/* Sums over a tile of `count` queries' weights, of `bytes` bytes, times the values, as interleave_4_rows() orders
 * them: (count, 4). `how` and `valid`: as load_values() has them. (Constants where this is inlined.) */
KVEDGE_INLINE void add_rows(const value_rows *v, const value_source source, const extent how, __mmask64 valid,
                            __m512i *kept, const int count, const int bytes, const uint8_t *codes,
                            __m512 (*totals)[4]) {
  const int half = how == HALF;
  const int step = half ? 8 : 4, per_step = source == ROWS ? 4 : source == KEPT ? 0 : 2; /* lines in a step */
  /* Rows come from L2, and lie too far apart for prefetchers. Where there is little arithmetic, prefetching costs more. */
  const int prefetches_near = source == ROWS_KEPT || count * bytes > 4;
  const int times = source != ROWS ? 1 : prefetches_near ? 2 : 3;
  __m512i sum[SUM_QUERIES][3][4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[i][b][c] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const int8_t *next = t + BLOCK < v->num_tokens ? block_of(v, t / BLOCK + 1) : from;
    const char *lines =
        per_step ? take_lines(v->ahead, per_step * BLOCK / step) : (const char *)from; /* not used then */
#pragma GCC unroll 4
    for (int r = 0; r < BLOCK; r += step) {
      __m512i value[4];
      if (source == KEPT || source == KEPT_PREFETCHING) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) value[c] = kept[c];
      } else {
        __m512i row[4];
        const int8_t *near = r < BLOCK - ROWS_NEAR ? from + ROWS_NEAR * v->token_stride
                                                   : next + (r - BLOCK + ROWS_NEAR) * v->token_stride;
        load_values(from, prefetches_near ? near : NULL, v->token_stride, how, valid, row);
        interleave_4_rows(row, value);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
          if (source == ROWS_KEPT) kept[c] = value[c];
      }
      prefetch_lines(v->ahead, lines, per_step, times);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++) {
          __m512i weights = weights_at(codes + i * CODE_ROW + 4 * b, half);
#pragma GCC unroll 4
          for (int c = 0; c < 4; c++) multiply_add(&sum[i][b][c], weights, value[c]);
        }
      codes += 4 * step, kept += 4, from += step * v->token_stride, lines += 64 * per_step;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      __m512 total = total_of(bytes, sum[i][0][c], sum[i][1][c], sum[i][2][c]);
      totals[i][c] = half ? _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e)) : total;
    }
}

/* Half of interleave_4_rows(): its out[0] and out[1], or [2] and [3]. */
KVEDGE_INLINE void interleave_half(const __m512i row[4], const int high, __m512i out[2]) {
  __m512i ab = high ? _mm512_unpackhi_epi8(row[0], row[1]) : _mm512_unpacklo_epi8(row[0], row[1]);
  __m512i cd = high ? _mm512_unpackhi_epi8(row[2], row[3]) : _mm512_unpacklo_epi8(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi16(ab, cd);
  out[1] = _mm512_unpackhi_epi16(ab, cd);
}

/* add_rows(), of rows: totals[i][0] and [1], or [2] and [3]. (`how`, WHOLE or MASKED, `high`,
 * `count` and `bytes`: constants where this is inlined.) */
KVEDGE_INLINE void sum_half(const value_rows *v, const extent how, __mmask64 valid, const int high, const int count,
                            const int bytes, const uint8_t *codes, __m512 (*totals)[4]) {
  __m512i sum[HALF_QUERIES][3][2];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < 3; b++) sum[i][b][0] = sum[i][b][1] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const int8_t *next = t + BLOCK < v->num_tokens ? block_of(v, t / BLOCK + 1) : from;
    const char *lines = take_lines(v->ahead, BLOCK / 2);
#pragma GCC unroll 4
    for (int r = 0; r < BLOCK; r += 4) {
      __m512i row[4], value[2];
      const int8_t *near =
          r < BLOCK - ROWS_NEAR ? from + ROWS_NEAR * v->token_stride : next + (r - BLOCK + ROWS_NEAR) * v->token_stride;
      load_values(from, near, v->token_stride, how, valid, row);
      interleave_half(row, high, value);
      prefetch_lines(v->ahead, lines, 2, 2);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 3
        for (int b = 0; b < bytes; b++) {
          __m512i weights = four_for_all(codes + i * CODE_ROW + 4 * b);
          multiply_add(&sum[i][b][0], weights, value[0]);
          multiply_add(&sum[i][b][1], weights, value[1]);
        }
      codes += 16, from += 4 * v->token_stride, lines += 128;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) totals[i][2 * high + c] = total_of(bytes, sum[i][0][c], sum[i][1][c], sum[i][2][c]);
}

/* acc = acc * rescale + total * scale of 64 channels (those in `valid`) of one query. */
KVEDGE_INLINE void add_totals(const __m512 total[4], __mmask64 valid, float scale, float rescale, float *acc) {
  /* 128-bit lane L of total[c] belongs to lane c of channels 16 L */
  __m512i lanes[4], ordered[4];
  for (int c = 0; c < 4; c++) lanes[c] = _mm512_castps_si512(total[c]);
  transpose_lanes(lanes, ordered);
  for (int c = 0; c < 4; c++) {
    __mmask16 mask = (__mmask16)(valid >> (16 * c));
    __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, acc + 16 * c), _mm512_set1_ps(rescale));
    __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(ordered[c]), _mm512_set1_ps(scale), kept);
    _mm512_mask_storeu_ps(acc + 16 * c, mask, sum);
  }
}

/* Where sums go: rows of queries' codes, (num_queries) scales and factors, and accumulators. */
typedef struct {
  int num_queries;
  const uint8_t *codes;
  const float *scale, *rescale;
  float *acc;
  ptrdiff_t acc_stride;
  __m512i *kept; /* (KVEDGE_TILE / 4, 4) room for interleaved rows */
} weighted_sums;

/* 64 channels (or those in `valid`) of a tile of values, added for all queries, three or more, by halves. (`how` and
 * `bytes`: constants where this is inlined.) */
KVEDGE_INLINE void sum_64_by_halves(const value_rows *v, const extent how, __mmask64 valid, const weighted_sums *w,
                                    const int bytes) {
  int passes = (w->num_queries + HALF_QUERIES - 1) / HALF_QUERIES;
  for (int i = 0, count; passes > 0; i += count, passes--) {
    __m512 totals[HALF_QUERIES][4];
    const uint8_t *codes = w->codes + i * CODE_ROW;
    count = (w->num_queries - i + passes - 1) / passes; /* as equal as can be */
#define SUM_HALVES(count)                                                                                              \
  case count:                                                                                                          \
    sum_half(v, how, valid, 0, count, bytes, codes, totals);                                                           \
    sum_half(v, how, valid, 1, count, bytes, codes, totals);                                                           \
    break
    switch (count) {
      SUM_HALVES(2);
      SUM_HALVES(3);
      SUM_HALVES(4);
    }
#undef SUM_HALVES
    for (int j = i; j < i + count; j++)
      add_totals(totals[j - i], how == WHOLE ? ~0ull : valid, w->scale[j], w->rescale[j], w->acc + j * w->acc_stride);
  }
}

/* (Apart: so compilers make of whole rows what they make without this.) */
static __attribute__((noinline)) void sum_part_by_halves(const value_rows *v, __mmask64 valid, const weighted_sums *w) {
  sum_64_by_halves(v, MASKED, valid, w, PLANES);
}

/* 64 channels, or fewer, of a tile of values, added for all queries, with weights of `bytes` bytes (a constant where
 * this is inlined). */
KVEDGE_INLINE void sum_64(const value_rows *v, int num_channels, const weighted_sums *w, const int bytes) {
  const int most = SUM_REGISTERS / (4 * bytes) < SUM_QUERIES ? SUM_REGISTERS / (4 * bytes) : SUM_QUERIES;
  const int whole = v->num_tokens % BLOCK == 0, n = w->num_queries;
  const extent how = num_channels >= 64 ? WHOLE : num_channels > 32 || !whole ? MASKED : HALF;
  const __mmask64 valid = first_bytes(num_channels);
  if (n > FEW_QUERIES && n <= SEVERAL_QUERIES && whole && how != HALF) {
    if (how == WHOLE) sum_64_by_halves(v, WHOLE, valid, w, bytes);
    else sum_part_by_halves(v, valid, w);
    return;
  }
  __m512i *kept = w->kept; /* (tokens / 4, 4) */
  value_source source = n > most ? ROWS_KEPT : ROWS;
  if (!whole) {
    keep_values(v, num_channels, kept);
    source = KEPT;
  }
  for (int i = 0, count, passes = (n + most - 1) / most; passes > 0; i += count, passes--) {
    __m512 totals[SUM_QUERIES][4];
    const uint8_t *codes = w->codes + i * CODE_ROW;
    count = (n - i + passes - 1) / passes; /* as equal as can be */
#define SUM_FROM(source, count)                                                                                        \
  if (how == HALF) add_rows(v, source, HALF, valid, kept, count, bytes, codes, totals);                                \
  else if (how == MASKED && source < KEPT_PREFETCHING)                                                                 \
    add_rows(v, source, MASKED, valid, kept, count, bytes, codes, totals);                                             \
  else add_rows(v, source, WHOLE, valid, kept, count, bytes, codes, totals)
#define SUM(count)                                                                                                     \
  switch (source) {                                                                                                    \
    case ROWS: SUM_FROM(ROWS, count); break;                                                                           \
    case ROWS_KEPT: SUM_FROM(ROWS_KEPT, count); break;                                                                 \
    case KEPT_PREFETCHING: SUM_FROM(KEPT_PREFETCHING, count); break;                                                   \
    case KEPT: SUM_FROM(KEPT, count); break;                                                                           \
  }
    if (count == 1) {
      SUM(1)
    } else if (count == 2) {
      SUM(2)
    }
#if PLANES < 3 /* else there are no registers for more */
    else if (count == 3) {
      SUM(3)
    }
#endif
#if PLANES == 1
    else {
      SUM(4)
    }
#endif
#undef SUM
#undef SUM_FROM
    source = source == ROWS_KEPT ? KEPT_PREFETCHING : KEPT;
    for (int j = i; j < i + count; j++)
      add_totals(totals[j - i], valid, w->scale[j], w->rescale[j], w->acc + j * w->acc_stride);
  }
}

void WEIGHTED_SUM(int8)(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to) {
  char *scratch = p->scratch;
  uint8_t *codes = kvedge_take_scratch(&scratch, KVEDGE_QUERY_ROWS * CODE_ROW);
  float scale[KVEDGE_QUERY_ROWS];
  lines_ahead ahead = lines_of(values, values->dim);
  encode_weights(p->num_queries, PLANES, p->p, values->scales, 0, values->num_tokens, codes, scale);
  value_rows rows = {values->blocks, values->offset, values->token_stride, values->num_tokens, &ahead, values};
  weighted_sums w = {p->num_queries, codes, scale, to->rescale, to->acc, to->stride, (__m512i *)scratch};
  for (int d = 0; d < values->dim; d += 64, w.acc += 64, rows.offset += 64) sum_64(&rows, values->dim - d, &w, PLANES);
}

/* ---- A head batch: see scores_of_heads.c ---- */

/* Sums of 64 channels of a tile, of the first head's weights in lanes 0..lanes-1 and of the next one's in the others;
 * `kept`, if not NULL: interleaved rows. (`whole`: lanes are 4; it, `from_rows` and `bytes` are constants where this is
 * inlined.) */
KVEDGE_INLINE void sum_64_of_heads(const value_rows *v, const int from_rows, const __m512i *kept, const int whole,
                                   int lanes, const int bytes, const uint8_t *codes, __m512 totals[4]) {
  const __mmask16 next = (__mmask16)(whole ? 0 : 0xffffu << 4 * lanes);
  const int to_next = lanes < 4 ? CODE_ROW : 0; /* the last head has no next */
  __m512i sum[3][4];
#pragma GCC unroll 3
  for (int b = 0; b < 3; b++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) sum[b][c] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const char *lines = from_rows ? take_lines(v->ahead, BLOCK) : NULL;
#pragma GCC unroll 4
    for (int r = 0; r < BLOCK; r += 4, codes += 16) {
      __m512i row[4], value[4];
      if (from_rows) {
        load_values(from + r * v->token_stride, NULL, v->token_stride, WHOLE, ~0ull, row);
        interleave_4_rows(row, value);
        prefetch_lines(v->ahead, lines + 64 * r, 4, 4);
      } else {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) value[c] = *kept++;
      }
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i weights = four_for_all(codes + 4 * b);
        if (!whole) weights = _mm512_mask_blend_epi32(next, weights, four_for_all(codes + to_next + 4 * b));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) multiply_add(&sum[b][c], weights, value[c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) totals[c] = total_of(bytes, sum[0][c], sum[1][c], sum[2][c]);
}

/* acc = acc * rescale + total * scale of 64 channels, 16 by 16. */
KVEDGE_INLINE void add_totals_of_heads(const __m512 total[4], int lanes, const float *scale, const float *rescale,
                                       float *acc) {
  __m512i in[4], ordered[4];
  for (int c = 0; c < 4; c++) in[c] = _mm512_castps_si512(total[c]);
  transpose_lanes(in, ordered);
  for (int c = 0; c < 4; c++, acc += 16) {
    __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(acc), _mm512_set1_ps(rescale[c >= lanes]));
    _mm512_storeu_ps(acc, _mm512_fmadd_ps(_mm512_castsi512_ps(ordered[c]), _mm512_set1_ps(scale[c >= lanes]), kept));
  }
}

KVEDGE_INLINE void sum_heads(value_rows *v, int dim, const int bytes, const float *p, const float *v_scale,
                             ptrdiff_t v_scale_stride, const float *rescale, float *acc, char *scratch) {
  _Alignas(64) uint8_t codes[HEADS * CODE_ROW];
  float scale[HEADS];
  __m512i *kept = (__m512i *)scratch; /* (KVEDGE_TILE / 4, 4) */
  encode_weights(HEADS, bytes, p, v_scale, v_scale_stride, v->num_tokens, codes, scale);
  int head = 0, left = dim / 16; /* as in score_block_of_heads() */
  for (int d = 0; d < HEADS * dim; d += 64, acc += 64, v->offset += 64) {
    __m512 totals[4];
    const uint8_t *of_head = codes + head * CODE_ROW;
    if (v->num_tokens % BLOCK) {
      keep_values(v, 64, kept);
      sum_64_of_heads(v, 0, kept, 0, left < 4 ? left : 4, bytes, of_head, totals);
    } else if (left >= 4) sum_64_of_heads(v, 1, NULL, 1, 4, bytes, of_head, totals);
    else sum_64_of_heads(v, 1, NULL, 0, left, bytes, of_head, totals);
    add_totals_of_heads(totals, left, scale + head, rescale + head, acc);
    left -= 4;
    if (left <= 0) head++, left += dim / 16;
  }
}

void WEIGHTED_SUM(of_heads_int8)(const kvedge_probabilities *p, const kvedge_tile *values,
                                 const kvedge_accumulators *to) {
  lines_ahead ahead = lines_of(values, HEADS * values->dim);
  value_rows rows = {values->blocks, values->offset, values->token_stride, values->num_tokens, &ahead, values};
  sum_heads(&rows, values->dim, PLANES, p->p, values->scales, values->scale_stride, to->rescale, to->acc, p->scratch);
}

#if PLANES == 2
/* ---- Groups of 32 channels: two share a register, with weights of their own ---- */

/* Sums of `count` queries' weights times the values of two groups, side by side or `apart`; the codes of the second one's
 * weights are `to_second` bytes further. (count, apart: constants where this is inlined.) */
KVEDGE_INLINE void sum_two_groups(const value_rows *v, const int apart, const int count, const uint8_t *codes,
                                  ptrdiff_t to_second, __m512 (*totals)[4]) {
  const ptrdiff_t stride = v->token_stride, second = v->tile->group_stride;
  __m512i sum[SUM_QUERIES][2][4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int b = 0; b < 2; b++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[i][b][c] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const char *lines = take_lines(v->ahead, apart ? BLOCK + 1 : BLOCK);
    if (apart) prefetch_lines(v->ahead, lines + 64 * BLOCK, 1, 2);
    for (int r = 0; r < BLOCK; r += 4, codes += 16, from += 4 * stride, lines += 256) {
      __m512i row[4], value[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++)
        row[j] = apart ? load_two_rows(from + j * stride, from + j * stride + second, 0, 0)
                       : _mm512_loadu_si512(from + j * stride);
      interleave_4_rows(row, value);
      prefetch_lines(v->ahead, lines, 4, 2);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
          const uint8_t *four = codes + i * CODE_ROW + 4 * b;
          const __m512i weights = _mm512_mask_blend_epi32(0xff00, four_for_all(four), four_for_all(four + to_second));
#pragma GCC unroll 4
          for (int c = 0; c < 4; c++) multiply_add(&sum[i][b][c], weights, value[c]);
        }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) totals[i][c] = total_of(2, sum[i][0][c], sum[i][1][c], sum[i][1][c]);
}

/* Two queries at a time: three would be as fast, for half as much code again. */
KVEDGE_INLINE void sum_groups(const value_rows *v, const int apart, int num_queries, const uint8_t *codes,
                              const float *scale, const kvedge_accumulators *to, float *acc) {
  for (int i = 0, count, passes = (num_queries + 1) / 2; passes > 0; i += count, passes--) {
    __m512 totals[SUM_QUERIES][4];
    const ptrdiff_t to_second = num_queries * CODE_ROW;
    count = (num_queries - i + passes - 1) / passes;
    if (count == 1) sum_two_groups(v, apart, 1, codes + i * CODE_ROW, to_second, totals);
    else sum_two_groups(v, apart, 2, codes + i * CODE_ROW, to_second, totals);
    for (int j = i; j < i + count; j++) {
      const float scales[] = {scale[j], scale[KVEDGE_QUERY_ROWS + j]}, rescales[] = {to->rescale[j], to->rescale[j]};
      add_totals_of_heads(totals[j - i], 2, scales, rescales, acc + j * to->stride);
    }
  }
}

static __attribute__((noinline)) void sum_groups_in_order(const value_rows *v, int num_queries, const uint8_t *codes,
                                                          const float *scale, const kvedge_accumulators *to,
                                                          float *acc) {
  sum_groups(v, 0, num_queries, codes, scale, to, acc);
}

static __attribute__((noinline)) void sum_groups_apart(const value_rows *v, int num_queries, const uint8_t *codes,
                                                       const float *scale, const kvedge_accumulators *to, float *acc) {
  sum_groups(v, 1, num_queries, codes, scale, to, acc);
}

/* Pairs of groups, of few queries and whole blocks; what else there is group by group. */
void weighted_sum_of_groups_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,
                                       const kvedge_accumulators *to) {
  const int num_groups = values->dim / KVEDGE_GROUP, n = p->num_queries, apart = values->group_stride != KVEDGE_GROUP;
  int g = 0;
  if (p->planes == 2 && n <= SEVERAL_QUERIES && values->num_tokens % BLOCK == 0) {
    char *scratch = p->scratch;
    uint8_t *codes = kvedge_take_scratch(&scratch, 2 * SEVERAL_QUERIES * CODE_ROW);
    lines_ahead ahead = lines_of(values, (int)(num_groups * values->group_stride));
    for (; g + 2 <= num_groups; g += 2) {
      float scale[2 * KVEDGE_QUERY_ROWS];
      for (int second = 0; second < 2; second++)
        encode_weights(n, 2, p->p, values->scales + (g + second) * values->scale_stride, 0, values->num_tokens,
                       codes + second * n * CODE_ROW, scale + second * KVEDGE_QUERY_ROWS);
      const value_rows rows = {
          values->blocks, values->offset + g * values->group_stride, values->token_stride, values->num_tokens, &ahead,
          values};
      if (apart) sum_groups_apart(&rows, n, codes, scale, to, to->acc + g * KVEDGE_GROUP);
      else sum_groups_in_order(&rows, n, codes, scale, to, to->acc + g * KVEDGE_GROUP);
    }
  }
  for (; g < num_groups; g++) {
    const kvedge_tile of_group = kvedge_tile_group(values, g);
    const kvedge_accumulators sums = {to->acc + g * KVEDGE_GROUP, to->stride, to->rescale};
    if (p->planes == 3) weighted_sum_int8_3_avx512vnni(p, &of_group, &sums);
    else if (p->planes == 2) weighted_sum_int8_2_avx512vnni(p, &of_group, &sums);
    else weighted_sum_int8_1_avx512vnni(p, &of_group, &sums);
  }
}
#endif
