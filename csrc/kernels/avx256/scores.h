/* Scores of the 256-bit paths with keys of int8 and int4. Part of avx2.c and avxvnni.c.
 *
 * vpmaddubsw, the 8-bit product of AVX2, saturates, and keeps no more than 8 bits of a query. So
 * keys become 16-bit integers, and so do queries: two planes of a query cost a product and an
 * addition for 16 channels, which is what float FMAs cost, but the keys take 1 instruction to
 * widen and not 4. Where two planes do not suffice, keys and queries are multiplied as floats.
 *
 * For many queries keys are transposed besides, two channels of a token side by side, so that no sum goes across
 * lanes: those of a block while the one before it is multiplied, since they want other ports.
 *
 * Keys of int4 become unsigned integers of 16 bits, 127 above their levels (common.h), those of even channels and
 * those of odd ones. So queries have their codes in that order, and sums start at -127 times the sum of these, modulo
 * 2^32. For many queries the bytes are transposed as they are, eight channels to a column.
 */
enum { SCORES = 8 }; /* made at a time: 8 tokens of 1 query, 4 of 2, 2 of 4; a register of sums each */

/* Codes are kept for every 16 channels as 16 integers of 16 bits, the two high planes, and 16 floats of the same unit,
 * which take the place of all three planes. */
enum { CODES_OF_16 = KVEDGE_QUANTIZED_BYTES * 16, FLOATS_AT = 32 };

static void KVEDGE_NAME(encode_query)(const float *x, int dim, float factor, float largest, int planes, int8_t *codes,
                                      float *scale, int32_t *offsets) {
  if (planes == 1) {
    encode_query_bytes(x, dim, factor, largest, 8, codes, scale, offsets);
    return;
  }
  float inverse = largest > QUERY_NOTHING ? QUERY_MAX / largest : 0.0f;
  for (int d = 0; d < kvedge_padded_channels(dim); d += 16, codes += CODES_OF_16) {
    __m256i high[2];
    for (int i = 0; i < 2; i++) {
      int at = d + 8 * i;
      __m256 values = _mm256_maskload_ps(x + (at < dim ? at : 0), first_lanes(dim - at));
      __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(values, _mm256_set1_ps(factor)), _mm256_set1_ps(inverse));
      high[i] = _mm256_cvtps_epi32(_mm256_mul_ps(scaled, _mm256_set1_ps(0x1p-8f)));
      _mm256_storeu_ps((float *)(codes + FLOATS_AT) + 8 * i, scaled);
    }
    __m256i packed = _mm256_packs_epi32(high[0], high[1]);
    _mm256_storeu_si256((__m256i *)codes, _mm256_permute4x64_epi64(packed, 0xd8)); /* undoes the pack's lanes */
  }
  _mm_storeu_si128((__m128i *)offsets, _mm_setzero_si128()); /* keys are signed here */
  *scale = inverse > 0.0f ? largest / QUERY_MAX : 0.0f;
}

/* As encode_query for keys of int4: of each 32 channels the codes of the even ones take the
 * place of the first 16, those of the odd ones that of the others. */
static void KVEDGE_NAME(encode_query_int4)(const float *x, int dim, float factor, float largest, int planes,
                                           int8_t *codes, float *scale, int32_t *offsets) {
  if (planes == 1) {
    encode_query_bytes(x, dim, factor, largest, 4, codes, scale, offsets);
    return;
  }
  const __m256i even_first =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  __m256i total = _mm256_setzero_si256();
  KVEDGE_NAME(encode_query)(x, dim, factor, largest, planes, codes, scale, offsets);
  for (int d = 0; d < kvedge_padded_channels(dim); d += 32, codes += 2 * CODES_OF_16) {
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
      const __m256i of_16 = _mm256_loadu_si256((const __m256i *)(codes + i * CODES_OF_16));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(of_16, _mm256_set1_epi16(INT4_ABOVE)));
      half[i] = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(of_16, even_first), 0xd8);
    }
    _mm256_storeu_si256((__m256i *)codes, _mm256_permute2x128_si256(half[0], half[1], 0x20));
    _mm256_storeu_si256((__m256i *)(codes + CODES_OF_16), _mm256_permute2x128_si256(half[0], half[1], 0x31));
  }
  uint32_t lane[8], sum = 0;
  _mm256_storeu_si256((__m256i *)lane, total);
  for (int j = 0; j < 8; j++) sum += lane[j];
  offsets[0] = (int32_t)(0u - sum);
}

/* Sums of eight registers, side by side. */
KVEDGE_INLINE __m256i reduce_add_8_i32(const __m256i x[SCORES]) {
  __m256i first = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  __m256i second = _mm256_hadd_epi32(_mm256_hadd_epi32(x[4], x[5]), _mm256_hadd_epi32(x[6], x[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                          _mm256_permute2x128_si256(first, second, 0x31));
}

/* sum += products of 16 channels of rows from `channel` on, of which n are there. (Constants where this is inlined:
 * count, and whether n is 16.) */
KVEDGE_INLINE void dot_16(const int8_t *codes, ptrdiff_t stride, const int count, const int8_t *const *row, int channel,
                          int n, __m256i sum[SCORES]) {
  const int rows = SCORES / count;
  __m256i query[4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    query[i] = _mm256_loadu_si256((const __m256i *)(codes + i * stride + KVEDGE_QUANTIZED_BYTES * channel));
#pragma GCC unroll 8
  for (int t = 0; t < rows; t++) {
    __m256i key = _mm256_cvtepi8_epi16(load_up_to_16(row[t] + channel, n));
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) multiply_add_pairs(sum + i * rows + t, key, query[i]);
  }
}

/* dot_16() of rows of int4, of 32 channels, of which n are there. */
KVEDGE_INLINE void dot_32_codes(const int8_t *codes, ptrdiff_t stride, const int count, const int8_t *const *row,
                                int channel, int n, __m256i sum[SCORES]) {
  const int rows = SCORES / count;
  __m256i query[2][2];
#pragma GCC unroll 2
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
      query[i][j] = _mm256_loadu_si256(
          (const __m256i *)(codes + i * stride + KVEDGE_QUANTIZED_BYTES * channel + j * CODES_OF_16));
#pragma GCC unroll 8
  for (int t = 0; t < rows; t++) {
    __m256i key[2];
    int16_of_pairs(_mm256_cvtepu8_epi16(load_up_to_16(row[t] + channel / 2, (n + 1) / 2)), key);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
#pragma GCC unroll 2
      for (int i = 0; i < count; i++) multiply_add_pairs(sum + i * rows + t, key[j], query[i][j]);
  }
}

/* Dot products of SCORES / count rows of `bits` a channel with the codes of `count` queries, 1,
 * 2 or 4 (int4: 1 or 2), of which the integers at `codes` are taken: (count, rows). Up to
 * CHANNELS_OF_TWO_BYTES. */
KVEDGE_INLINE __m256i dot_rows(const int bits, const int8_t *codes, ptrdiff_t stride, const int count,
                               const int8_t *const *from, int dim) {
  __m256i sum[SCORES];
  const int8_t *row[SCORES];
#pragma GCC unroll 8
  for (int i = 0; i < SCORES; i++) sum[i] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int t = 0; t < SCORES / count; t++) row[t] = from[t];
  int left = dim;
  for (; left >= 64; left -= 64, codes += KVEDGE_QUANTIZED_BYTES * 64) {
#pragma GCC unroll 4
    for (int d = 0; d < 64; d += 128 / bits)
      if (bits == 8) dot_16(codes, stride, count, row, d, 16, sum);
      else dot_32_codes(codes, stride, count, row, d, 32, sum);
#pragma GCC unroll 8
    for (int t = 0; t < SCORES / count; t++) row[t] += 8 * bits;
  }
  for (int d = 0; d < left; d += 128 / bits) /* codes are zero past the last channel */
    if (bits == 8) dot_16(codes, stride, count, row, d, left - d < 16 ? left - d : 16, sum);
    else dot_32_codes(codes, stride, count, row, d, left - d < 32 ? left - d : 32, sum);
  return reduce_add_8_i32(sum);
}

KVEDGE_INLINE __m256 floats_of(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }

/* sum += products of 8 channels of rows from `channel` on, of which n are there, with the queries' floats at `query`.
 * (Constants as in dot_16(), n 8.) */
KVEDGE_INLINE void dot_8_floats(const int8_t *query, ptrdiff_t stride, const int count, const int8_t *const *row,
                                ptrdiff_t channel, int n, __m256 sum[SCORES]) {
  const int rows = SCORES / count;
  __m256 values[4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) values[i] = _mm256_loadu_ps((const float *)(query + i * stride));
#pragma GCC unroll 8
  for (int t = 0; t < rows; t++) {
    const int8_t *from = row[t] + channel;
    __m256 key = floats_of(n >= 8 ? _mm_loadl_epi64((const __m128i *)from) : load_up_to_16(from, n));
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) sum[i * rows + t] = _mm256_fmadd_ps(key, values[i], sum[i * rows + t]);
  }
}

/* dot_rows() with the queries' floats, of any number of channels. */
KVEDGE_INLINE __m256 dot_rows_of_floats(const int8_t *codes, ptrdiff_t stride, const int count,
                                        const int8_t *const *row, int dim) {
  __m256 sum[SCORES];
#pragma GCC unroll 8
  for (int i = 0; i < SCORES; i++) sum[i] = _mm256_setzero_ps();
  const int8_t *query = codes + FLOATS_AT;
  ptrdiff_t d = 0;
  for (; d + 16 <= dim; d += 16, query += CODES_OF_16) {
    dot_8_floats(query, stride, count, row, d, 8, sum);
    dot_8_floats(query + 32, stride, count, row, d + 8, 8, sum);
  }
  for (int left = dim - (int)d; left > 0; left -= 8, d += 8, query += 32)
    dot_8_floats(query, stride, count, row, d, left, sum);
  return reduce_add_8(sum);
}

/* The scales of 8, 4 or 2 tokens, repeated for each query. */
KVEDGE_INLINE __m256 scales_of_tokens(const float *k_scale, const int tokens) {
  if (tokens == 8) return _mm256_loadu_ps(k_scale);
  if (tokens == 4) return _mm256_broadcast_ps((const __m128 *)k_scale);
  double two;
  memcpy(&two, k_scale, sizeof two);
  return _mm256_castpd_ps(_mm256_set1_pd(two));
}

/* Stores scores of 8, 4 or 2 tokens as store_scores() does, of which `left` may be fewer, or adds them. */
static __attribute__((noinline)) void add_scores(__m256 score, int tokens, int left, int accumulate, float *scores) {
  float lanes[SCORES]; /* (SCORES / tokens, tokens) */
  _mm256_storeu_ps(lanes, score);
  for (int i = 0; i < SCORES; i += tokens, scores += KVEDGE_TILE)
    for (int j = 0; j < tokens && j < left; j++) scores[j] = accumulate ? scores[j] + lanes[i + j] : lanes[i + j];
}

/* How keys are multiplied: as integers of 16 bits, as floats, as integers that are made of the codes of int4, or as
 * bytes. */
typedef enum { AS_INT16, AS_FLOATS, AS_CODES, AS_BYTES } key_kind;

/* Scores of a stretch's tokens for `count` queries, 1, 2 or 4: (count, KVEDGE_TILE). (Constants where this is inlined:
 * count, kind.) */
KVEDGE_INLINE void score_stretch(const kvedge_stretch *stretch, ptrdiff_t token_stride, int dim, const int8_t *codes,
                                 ptrdiff_t stride, const key_kind kind, const int count, __m256i offsets, __m256 units,
                                 const float *k_scale, float *scores, int accumulate) {
  const int tokens = SCORES / count, row_bytes = kind == AS_CODES ? (dim + 1) / 2 : dim;
  const int8_t *rows = (const int8_t *)stretch->rows;
  for (int t = 0; t < stretch->num_tokens; t += tokens) {
    int left = stretch->num_tokens - t;
    const int8_t *row[SCORES];
#pragma GCC unroll 8
    for (int j = 0; j < tokens; j++) row[j] = rows + (j < left ? t + j : stretch->num_tokens - 1) * token_stride;
    __m256 dot;
    if (kind == AS_FLOATS) dot = dot_rows_of_floats(codes, stride, count, row, dim);
    else if (kind == AS_INT16) dot = _mm256_cvtepi32_ps(dot_rows(8, codes, stride, count, row, dim));
    else if (kind == AS_CODES)
      dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dot_rows(4, codes, stride, count, row, dim), offsets));
    else {
      __m256i sum[SCORES];
      dot_bytes(codes, stride, count, row, tokens, dim, sum);
      dot = _mm256_cvtepi32_ps(_mm256_add_epi32(reduce_add_8_i32(sum), offsets));
    }
    /* Behind the loads of these rows, which else wait for the prefetches: Zen 4, dim 64, one
     * query, 3 planes: 1.1 times. */
    if (stretch->next.first)
      for (int at = 0; at < tokens * row_bytes; at += 64) kvedge_prefetch_line(stretch->next, t * row_bytes + at);
    __m256 score = _mm256_mul_ps(_mm256_mul_ps(dot, units), scales_of_tokens(k_scale + t, tokens));
    if (left >= tokens)
      store_scores(accumulate ? _mm256_add_ps(score, load_scores(tokens, scores + t)) : score, tokens, scores + t);
    else add_scores(score, tokens, left, accumulate, scores + t);
  }
}

/* Scores of all tokens for `count` queries from the `first` on. (Constants as in score_stretch().) */
KVEDGE_INLINE void score_queries(const kvedge_query *q, const key_kind kind, int first, const int count,
                                 const kvedge_tile *keys, const kvedge_next_tile *next, float *scores, int accumulate) {
  const ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride;
  float unit[SCORES]; /* (count, tokens) */
  int32_t offset[SCORES];
  for (int i = 0; i < SCORES; i++) {
    const ptrdiff_t query = (first + i * count / SCORES) * q->scale_stride;
    unit[i] = q->scale[query] * (kind == AS_INT16 || kind == AS_CODES ? 256.0f : 1.0f);
    offset[i] = q->offsets[4 * query];
  }
  const __m256 units = _mm256_loadu_ps(unit);
  const __m256i offsets = _mm256_loadu_si256((const __m256i *)offset);
  for (int t = 0; t < keys->num_tokens;) {
    kvedge_stretch stretch = kvedge_stretch_of(keys, next, t, keys->num_tokens);
    if (first > 0) stretch.next.first = 0; /* prefetched with the first queries */
    score_stretch(&stretch, keys->token_stride, q->dim, q->quantized + first * stride, stride, kind, count, offsets,
                  units, keys->scales + t, scores + first * KVEDGE_TILE + t, accumulate);
    t += stretch.num_tokens;
  }
}

/* One function for each case, since GCC 12 spills more registers where all are inlined into one. */
#define SCORE_QUERIES(name, kind, count)                                                                               \
  static __attribute__((noinline)) void name(const kvedge_query *q, int first, const kvedge_tile *keys,                \
                                             const kvedge_next_tile *next, float *scores, int accumulate) {            \
    score_queries(q, kind, first, count, keys, next, scores, accumulate);                                              \
  }
SCORE_QUERIES(score_1, AS_INT16, 1)
SCORE_QUERIES(score_2, AS_INT16, 2)
SCORE_QUERIES(score_4, AS_INT16, 4)
SCORE_QUERIES(score_1_of_floats, AS_FLOATS, 1)
SCORE_QUERIES(score_2_of_floats, AS_FLOATS, 2)
SCORE_QUERIES(score_4_of_floats, AS_FLOATS, 4)
SCORE_QUERIES(score_1_of_codes, AS_CODES, 1)
SCORE_QUERIES(score_2_of_codes, AS_CODES, 2)
SCORE_QUERIES(score_1_of_bytes, AS_BYTES, 1)
SCORE_QUERIES(score_2_of_bytes, AS_BYTES, 2)
#undef SCORE_QUERIES

/* ---- Scores for many queries ---- */

/* Channels 0 and 2 of each four, 1 and 3, as integers of 16 bits. */
KVEDGE_INLINE __m256i even_channels(__m256i column) { return _mm256_maddubs_epi16(_mm256_set1_epi16(1), column); }

KVEDGE_INLINE __m256i odd_channels(__m256i column) { return _mm256_srai_epi16(column, 8); }

/* Such a pair of channels of a column: the first or second pair, for int4 of the even channels, then of the odd ones.
 * (pair: a constant where this is inlined.) */
KVEDGE_INLINE __m256i pair_of_column(const int bits, __m256i column, const int pair) {
  if (bits == 8) return pair == 0 ? even_channels(column) : odd_channels(column);
  const __m256i codes = pair < 2 ? column : _mm256_srli_epi16(column, 4);
  const __m256i bytes = bytes_of_codes(codes); /* four, 127 above their levels */
  return pair % 2 == 0 ? _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(bytes, 8);
}

/* Where the codes of a pair are of `column` of each four, from the first of these 16 bytes' on:
 * pair_codes() leaves those of 32 channels of int4 with 8 pairs of even channels before 8 of odd
 * ones. */
KVEDGE_INLINE int place_of_pair(const int bits, const int column, const int pair) {
  return bits == 8 ? 2 * column + pair : 8 * (pair / 2) + 2 * column + pair % 2;
}

/* Codes of all queries, as such pairs of channels: (num_queries, padded channels / 2). */
KVEDGE_INLINE void pair_codes(const kvedge_query *q, int padded, int32_t *pairs) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  for (int i = 0; i < q->num_queries; i++) {
    const int8_t *codes = q->quantized + i * KVEDGE_QUANTIZED_BYTES * q->stride;
    for (int d = 0; d < padded; d += 16, codes += CODES_OF_16, pairs += 8)
      _mm256_storeu_si256((__m256i *)pairs, _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)codes), order));
  }
}

KVEDGE_INLINE void store_block(const int count, __m256i sum[4][VECTORS], const float *unit, const float *k_scale,
                               float *scores, int accumulate) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
      float *out = scores + i * KVEDGE_TILE + 8 * j;
      __m256 score = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[i][j]), _mm256_set1_ps(unit[i]));
      score = _mm256_mul_ps(score, _mm256_loadu_ps(k_scale + 8 * j));
      if (accumulate) score = _mm256_add_ps(score, _mm256_loadu_ps(out));
      _mm256_storeu_ps(out, score);
    }
}

/* Scores of a block for `count` queries. (bits and count: constants where this is inlined.) */
KVEDGE_INLINE void score_block(const int bits, const int count, const int32_t *codes, const __m256i *columns,
                               int num_pairs, const int32_t *offset, const float *unit, const float *k_scale,
                               float *scores, int accumulate) {
  const int pairs_of_column = 16 / bits, pairs_of_16 = 4 * pairs_of_column; /* bytes */
  __m256i sum[4][VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) sum[i][j] = bits == 8 ? _mm256_setzero_si256() : _mm256_set1_epi32(offset[i]);
  for (int p = 0; p < num_pairs; p += pairs_of_16)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {     /* of 16 bytes */
      if (bits == 4) __asm__("" : "+r"(half)); /* not unrolled: half of the code */
#pragma GCC unroll 8
      for (int c = 0; c < 2 * pairs_of_column; c++) { /* made integers of 16 bits here: storing those costs more */
        const int of_half = c / pairs_of_column, which = c % pairs_of_column;
        __m256i keys[VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) keys[j] = pair_of_column(bits, columns[of_half * VECTORS + j], which);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
          const __m256i pair =
              _mm256_set1_epi32(codes[i * num_pairs + p + place_of_pair(bits, 2 * half + of_half, which)]);
#pragma GCC unroll 2
          for (int j = 0; j < VECTORS; j++) multiply_add_pairs(&sum[i][j], keys[j], pair);
        }
      }
      columns += 2 * VECTORS;
    }
  store_block(count, sum, unit, k_scale, scores, accumulate);
}

/* As score_block() in products of bytes, for query rows from the i-th on. */
KVEDGE_INLINE void score_block_of_bytes(const int count, const kvedge_query *q, int i, ptrdiff_t stride,
                                        const __m256i *columns, const float *k_scale, float *scores, int accumulate) {
  __m256i sum[4][VECTORS];
  float unit[4];
  const int8_t *codes = q->quantized + i * stride;
#pragma GCC unroll 4
  for (int k = 0; k < count; k++) {
    const ptrdiff_t query = (i + k) * q->scale_stride;
    unit[k] = q->scale[query];
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) sum[k][j] = _mm256_set1_epi32(q->offsets[4 * query]);
  }
  for (int c = 0; c < (q->dim + 7) / 8 * 2; c++, columns += VECTORS) { /* of int4 eight channels have two */
    const int8_t *at = codes + c / 8 * BYTES_OF_32 + c % 8 * 4;
    __m256i keys[VECTORS];
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) keys[j] = unsigned_keys(columns[j]);
#pragma GCC unroll 4
    for (int k = 0; k < count; k++, at += stride) {
      const __m256i query = broadcast_word(at), multipliers = broadcast_word(at + 32);
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++) multiply_add_fours(&sum[k][j], keys[j], query, multipliers);
    }
  }
  store_block(count, sum, unit, k_scale, scores, accumulate);
}

/* Whether transposing costs less than sums across lanes: measured. */
static int are_many(int num_queries, int dim) { return num_queries > (dim <= 128 ? 2 : 4); }

KVEDGE_INLINE void score_many(const int bits, const kvedge_query *q, const kvedge_tile *keys, float *scores,
                              int accumulate) {
  const int n = q->num_queries, row_bytes = (q->dim * bits + 7) / 8, num_pairs = (row_bytes + 15) / 16 * 16 * 4 / bits;
  struct {
    __m256i columns[COLUMNS * VECTORS];
    char rows[KVEDGE_BLOCK * CHANNELS_OF_TWO_BYTES];
    int32_t codes[KVEDGE_QUERY_ROWS * 2 * COLUMNS];
  } *room = (void *)q->scratch;
  float unit[KVEDGE_QUERY_ROWS];
  int32_t offset[KVEDGE_QUERY_ROWS];
  for (int i = 0; i < n; i++) {
    unit[i] = q->scale[i * q->scale_stride] * 256.0f;
    offset[i] = q->offsets[4 * i * q->scale_stride];
  }
  pair_codes(q, 2 * num_pairs, room->codes);
  for (int t = 0; t < keys->num_tokens; t += KVEDGE_BLOCK) {
    transpose_block_avx256(bits, 0, keys, t, 0, (char *)room->columns, room->rows);
#define SCORE_BLOCK(count)                                                                                             \
  score_block(bits, count, room->codes + i * num_pairs, room->columns, num_pairs, offset + i, unit + i,                \
              keys->scales + t, scores + i * KVEDGE_TILE + t, accumulate)
    int i = 0;
    BY_FOURS(n, SCORE_BLOCK)
#undef SCORE_BLOCK
  }
}

static __attribute__((noinline)) void score_many_bytes(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                                       int accumulate) {
  score_many(8, q, keys, scores, accumulate);
}

static __attribute__((noinline)) void score_many_codes(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                                       int accumulate) {
  score_many(4, q, keys, scores, accumulate);
}

/* As score_many() in products of bytes, of any number of channels: blocks become columns of them (bytes.c). */
static __attribute__((noinline)) void score_many_as_bytes(int bits, const kvedge_query *q, const kvedge_tile *keys,
                                                          float *scores, int accumulate) {
  const int n = q->num_queries, columns = kvedge_padded_channels(q->dim) / 4;
  const ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride;
  __m256i *of_block = (void *)q->scratch; /* (columns, VECTORS) */
  for (int t = 0; t < keys->num_tokens; t += KVEDGE_BLOCK) {
    transpose_block_avx256(bits, 1, keys, t, 0, (char *)of_block, (char *)(of_block + columns * VECTORS));
#define SCORE_BLOCK(count)                                                                                             \
  score_block_of_bytes(count, q, i, stride, of_block, keys->scales + t, scores + i * KVEDGE_TILE + t, accumulate)
    int i = 0;
    BY_FOURS(n, SCORE_BLOCK)
#undef SCORE_BLOCK
  }
}

static void KVEDGE_NAME(scores_int8)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  const int n = q->num_queries;
  const kvedge_next_tile next = kvedge_next_of(keys, q->dim);
#define SCORE(suffix)                                                                                                  \
  {                                                                                                                    \
    int i = 0;                                                                                                         \
    for (; i + 4 <= n; i += 4) score_4##suffix(q, i, keys, &next, scores, accumulate);                                 \
    for (; i + 2 <= n; i += 2) score_2##suffix(q, i, keys, &next, scores, accumulate);                                 \
    if (i < n) score_1##suffix(q, i, keys, &next, scores, accumulate);                                                 \
  }
  if (q->planes == 1 && n == 2) score_2_of_bytes(q, 0, keys, &next, scores, accumulate);
  else if (q->planes == 1 && n == 1) score_1_of_bytes(q, 0, keys, &next, scores, accumulate);
  else if (q->planes == 1) score_many_as_bytes(8, q, keys, scores, accumulate);
  else if (q->planes == 3 || q->dim > CHANNELS_OF_TWO_BYTES) SCORE(_of_floats)
  else if (are_many(n, q->dim)) score_many_bytes(q, keys, scores, accumulate);
  else SCORE()
#undef SCORE
}

/* Of int4, with integers of 16 bits. */
static void score_codes(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  const kvedge_next_tile next = kvedge_next_of(keys, (q->dim + 1) / 2);
  if (q->num_queries > 2) score_many_codes(q, keys, scores, accumulate);
  else if (q->num_queries == 2) score_2_of_codes(q, 0, keys, &next, scores, accumulate);
  else score_1_of_codes(q, 0, keys, &next, scores, accumulate);
}
