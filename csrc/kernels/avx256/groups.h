/* Groups of 32 channels, all groups of a row in one visit: of int8, and blocks of ggml's. Part of avx2.c and avxvnni.c,
 * after sum_bytes.h.
 *
 * Sums of integers of a group become floats and are added up times the group's scale: of few queries lane by lane, so that
 * sums go across lanes once per row; of many, whose keys are transposed, token by token.
 *
 * Codes of blocks become integers of 16 bits, which are not negative. What a lowest level below 0 takes off is where sums
 * start.
 */
enum { GROUP_COLUMNS = KVEDGE_GROUP / 4, GROUP_PAIRS = KVEDGE_GROUP / 2 };

/* What groups hold: bytes, or codes of 4 bits whose levels follow each other. */
typedef enum { OF_BYTES, OF_CODES } group_kind;

/* Lanes of 16 bits that hold a byte with two codes each: the lower ones, and the upper ones. */
KVEDGE_INLINE void split_codes(__m256i both, __m256i out[2]) {
  out[0] = _mm256_and_si256(both, _mm256_set1_epi16(15)), out[1] = _mm256_srli_epi16(both, 4);
}

/* Adds the products of a group of `rows` tokens, times their scales, to sums of floats: (count, rows). Sums of blocks start
 * at `start`: (count, KVEDGE_GROUPS). (Constants where this is inlined: kind; count, rows, together 4 sums.) */
KVEDGE_INLINE void dot_group(const group_kind kind, const int32_t *start, const int8_t *codes, ptrdiff_t stride,
                             const int count, const int rows, const int8_t *const *row, const float *k_scale,
                             __m256 *total) {
  __m256i sum[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    sum[i] = kind == OF_BYTES ? _mm256_setzero_si256()
                              : _mm256_zextsi128_si256(_mm_cvtsi32_si128(start[i / rows * KVEDGE_GROUPS]));
#pragma GCC unroll 4
  for (int t = 0; t < rows && kind != OF_BYTES; t++) {
    __m256i key[2];
    split_codes(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)row[t])), key);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
        multiply_add_pairs(&sum[i * rows + t], key[j],
                           _mm256_loadu_si256((const __m256i *)(codes + i * stride + CODES_OF_16 * j)));
  }
#pragma GCC unroll 2
  for (int d = 0; d < KVEDGE_GROUP && kind == OF_BYTES; d += 16)
#pragma GCC unroll 4
    for (int t = 0; t < rows; t++) {
      const __m256i key = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row[t] + d)));
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
        multiply_add_pairs(&sum[i * rows + t], key,
                           _mm256_loadu_si256((const __m256i *)(codes + i * stride + KVEDGE_QUANTIZED_BYTES * d)));
    }
#pragma GCC unroll 4
  for (int t = 0; t < rows; t++) {
    const __m256 scale = _mm256_broadcast_ss(k_scale + t);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      total[i * 2 * rows + t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i * rows + t]), scale, total[i * 2 * rows + t]);
  }
}

KVEDGE_INLINE int32_t sum_of_int32(__m256i x) {
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i pair = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 1);
}

/* Where sums of blocks start, of all queries: (num_queries, KVEDGE_GROUPS). */
static __attribute__((noinline)) void start_blocks(const kvedge_query *q, const kvedge_tile *keys, int32_t *start) {
  for (int i = 0; i < q->num_queries; i++)
    for (int g = 0; g < q->dim / KVEDGE_GROUP; g++) {
      const int8_t *codes = q->quantized + KVEDGE_QUANTIZED_BYTES * (i * q->stride + g * q->group_stride);
      __m256i sum = _mm256_setzero_si256();
      for (int j = 0; j < 2; j++)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *)(codes + CODES_OF_16 * j)),
                                                      _mm256_set1_epi16(1)));
      start[i * KVEDGE_GROUPS + g] = keys->codes->levels[0] * sum_of_int32(sum);
    }
}

/* Scores of all tokens for `count` queries, all there are. (kind and count: constants where this is inlined.) */
KVEDGE_INLINE void score_groups(const group_kind kind, const kvedge_query *q, const int count, const kvedge_tile *keys,
                                float *scores) {
  const ptrdiff_t stride = KVEDGE_QUANTIZED_BYTES * q->stride, group_codes = KVEDGE_QUANTIZED_BYTES * q->group_stride;
  const int tokens = SCORES / count, half = tokens / 2, num_groups = q->dim / KVEDGE_GROUP;
  const int row_bytes = (int)(num_groups * keys->group_stride);
  const kvedge_next_tile next = kvedge_next_of(keys, row_bytes);
  int32_t start_of[2 * KVEDGE_GROUPS];
  if (kind != OF_BYTES) start_blocks(q, keys, start_of);
  float unit[SCORES]; /* (count, tokens) */
  for (int i = 0; i < SCORES; i++) unit[i] = q->scale[i * count / SCORES * q->scale_stride] * 256.0f;
  const __m256 units = _mm256_loadu_ps(unit);
  for (int start = 0; start < keys->num_tokens;) {
    const kvedge_stretch stretch = kvedge_stretch_of(keys, &next, start, keys->num_tokens);
    for (int t = 0; t < stretch.num_tokens; t += tokens) {
      const int left = stretch.num_tokens - t;
      __m256 total[SCORES]; /* (count, tokens) */
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const int8_t *codes = q->quantized, *row[SCORES / 2];
        const float *k_scale = keys->scales + start + t + h * half;
#pragma GCC unroll 4
        for (int j = 0; j < half; j++) {
          const int token = t + h * half + j;
          row[j] = (const int8_t *)stretch.rows +
                   (token < stretch.num_tokens ? token : stretch.num_tokens - 1) * keys->token_stride;
        }
        __m256 of_half[SCORES]; /* as total */
#pragma GCC unroll 8
        for (int i = 0; i < SCORES; i++) of_half[i] = _mm256_setzero_ps();
        for (int g = 0; g < num_groups; g++, codes += group_codes, k_scale += keys->scale_stride) {
          dot_group(kind, start_of + g, codes, stride, count, half, row, k_scale, of_half);
#pragma GCC unroll 4
          for (int j = 0; j < half; j++) row[j] += keys->group_stride;
        }
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
#pragma GCC unroll 4
          for (int j = 0; j < half; j++) total[i * tokens + h * half + j] = of_half[i * tokens + j];
      }
      if (stretch.next.first)
        for (int at = 0; at < tokens * row_bytes; at += 64) kvedge_prefetch_line(stretch.next, t * row_bytes + at);
      const __m256 score = _mm256_mul_ps(reduce_add_8(total), units);
      if (left >= tokens) store_scores(score, tokens, scores + start + t);
      else add_scores(score, tokens, left, 0, scores + start + t);
    }
    start += stretch.num_tokens;
  }
}

#define SCORE_GROUPS(name, kind, count)                                                                                \
  static __attribute__((noinline)) void name(const kvedge_query *q, const kvedge_tile *keys, float *scores) {          \
    score_groups(kind, q, count, keys, scores);                                                                        \
  }
SCORE_GROUPS(score_groups_1, OF_BYTES, 1)
SCORE_GROUPS(score_groups_2, OF_BYTES, 2)
SCORE_GROUPS(score_codes_1, OF_CODES, 1)
SCORE_GROUPS(score_codes_2, OF_CODES, 2)
#undef SCORE_GROUPS

/* ---- Many queries ---- */

/* Two channels of 8 tokens: pair 0 to 3 of eight, of those in a column with two codes to a byte, lower codes are the even
 * pairs'. */
KVEDGE_INLINE __m256i pair_of_codes(__m256i column, const int pair) {
  if (pair > 0) column = _mm256_srli_epi16(column, pair == 1 ? 4 : pair == 2 ? 8 : 12);
  return pair < 3 ? _mm256_and_si256(column, _mm256_set1_epi16(15)) : column;
}

/* Codes of queries in the order of these pairs. */
static __attribute__((noinline)) void pair_codes_of_blocks(const kvedge_query *q, int32_t *to) {
  for (int i = 0; i < q->num_queries; i++)
    for (int g = 0; g < q->dim / KVEDGE_GROUP; g++) {
      const int8_t *codes = q->quantized + KVEDGE_QUANTIZED_BYTES * (i * q->stride + g * q->group_stride);
      for (int p = 0; p < GROUP_PAIRS; p++, to++) {
        const int channel = p / 4 * 4 + p % 4 / 2; /* and the one after the next, of one half of the group */
        const int8_t *half = codes + CODES_OF_16 * (p % 2);
        uint16_t two[2];
        memcpy(&two[0], half + 2 * channel, 2), memcpy(&two[1], half + 2 * (channel + 2), 2);
        *to = (int32_t)((uint32_t)two[1] << 16 | two[0]);
      }
    }
}

/* Scores of a block for `count` queries. (kind and count: constants where this is inlined.) */
KVEDGE_INLINE void score_groups_of_block(const group_kind kind, const int32_t *start, const int count,
                                         const int32_t *codes, const __m256i *columns, int num_groups,
                                         const float *unit, const float *k_scale, ptrdiff_t scale_stride,
                                         float *scores) {
  const int num_pairs = num_groups * GROUP_PAIRS;
  __m256 total[4][VECTORS];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) total[i][j] = _mm256_setzero_ps();
  for (int g = 0; g < num_groups; g++, k_scale += scale_stride) {
    __m256i sum[4][VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++)
        sum[i][j] = kind == OF_BYTES ? _mm256_setzero_si256() : _mm256_set1_epi32(start[i * KVEDGE_GROUPS + g]);
#pragma GCC unroll 1
    for (int d = 0; d < KVEDGE_GROUP; d += 8, columns += kind == OF_BYTES ? 2 * VECTORS : VECTORS, codes += 4)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        __m256i key[VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++)
          key[j] =
              kind == OF_BYTES ? pair_of_column(8, columns[c / 2 * VECTORS + j], c % 2) : pair_of_codes(columns[j], c);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
          const __m256i pair = _mm256_set1_epi32(codes[i * num_pairs + c]);
#pragma GCC unroll 2
          for (int j = 0; j < VECTORS; j++) multiply_add_pairs(&sum[i][j], key[j], pair);
        }
      }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++)
        total[i][j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][j]), _mm256_loadu_ps(k_scale + 8 * j), total[i][j]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++)
      _mm256_storeu_ps(scores + i * KVEDGE_TILE + 8 * j, _mm256_mul_ps(total[i][j], _mm256_set1_ps(unit[i])));
}

KVEDGE_INLINE void score_groups_of_many(const group_kind kind, const kvedge_query *q, const kvedge_tile *keys,
                                        float *scores) {
  const int n = q->num_queries, num_groups = q->dim / KVEDGE_GROUP, num_pairs = num_groups * GROUP_PAIRS;
  const int bits = kind == OF_BYTES ? 8 : 4, gap = (int)keys->group_stride - KVEDGE_GROUP * bits / 8;
  struct {
    __m256i columns[KVEDGE_GROUPS * GROUP_COLUMNS * VECTORS];
    char rows[KVEDGE_BLOCK * KVEDGE_GROUPS * (KVEDGE_GROUP + 4)];
    int32_t codes[KVEDGE_QUERY_ROWS * KVEDGE_GROUPS * GROUP_PAIRS];
    int32_t start[KVEDGE_QUERY_ROWS * KVEDGE_GROUPS];
  } *room = (void *)q->scratch;
  _Static_assert(sizeof *room <= KVEDGE_SCRATCH, "fits");
  float unit[KVEDGE_QUERY_ROWS];
  for (int i = 0; i < n; i++) unit[i] = q->scale[i * q->scale_stride] * 256.0f;
  if (kind != OF_BYTES) start_blocks(q, keys, room->start), pair_codes_of_blocks(q, room->codes);
  for (int g = 0; g < num_groups && kind == OF_BYTES; g++) {
    const kvedge_query of_group = kvedge_query_group(q, g);
    for (int i = 0; i < n; i++) {
      kvedge_query single = of_group;
      single.num_queries = 1, single.quantized += i * KVEDGE_QUANTIZED_BYTES * q->stride;
      pair_codes(&single, KVEDGE_GROUP, room->codes + i * num_pairs + g * GROUP_PAIRS);
    }
  }
  for (int t = 0; t < keys->num_tokens; t += KVEDGE_BLOCK) {
    transpose_block_avx256(bits, 0, keys, t, gap, (char *)room->columns, room->rows);
#define SCORE_BLOCK(count)                                                                                             \
  score_groups_of_block(kind, room->start + i * KVEDGE_GROUPS, count, room->codes + i * num_pairs, room->columns,      \
                        num_groups, unit + i, keys->scales + t, keys->scale_stride, scores + i * KVEDGE_TILE + t)
    int i = 0;
    BY_FOURS(n, SCORE_BLOCK)
#undef SCORE_BLOCK
  }
}

#define SCORE_GROUPS(name, kind)                                                                                       \
  static __attribute__((noinline)) void name(const kvedge_query *q, const kvedge_tile *keys, float *scores) {          \
    score_groups_of_many(kind, q, keys, scores);                                                                       \
  }
SCORE_GROUPS(score_many_groups, OF_BYTES)
SCORE_GROUPS(score_many_blocks, OF_CODES)
#undef SCORE_GROUPS

static void KVEDGE_NAME(scores_of_groups)(const kvedge_query *q, const kvedge_tile *keys, float *scores) {
  const int n = q->num_queries, num_groups = q->dim / KVEDGE_GROUP;
  if (q->planes != 2)
    for (int g = 0; g < num_groups; g++) {
      const kvedge_query of_query = kvedge_query_group(q, g);
      const kvedge_tile of_keys = kvedge_tile_group(keys, g);
      KVEDGE_NAME(scores_int8)(&of_query, &of_keys, scores, g > 0);
    }
  else if (n > 2) score_many_groups(q, keys, scores);
  else if (n == 2) score_groups_2(q, keys, scores);
  else score_groups_1(q, keys, scores);
}

/* ---- Weighted sums ----
 *
 * Weights of several groups are quantized together: where tiles are short, waiting for maxima and divisions took a third of
 * the time of a call for each group.
 */

/* The values of a chunk's tokens added to `num_groups` groups of `count` queries from one on; codes and scales of a group's
 * queries are num_queries rows. (A constant where this is inlined: count.) */
KVEDGE_INLINE void sum_chunk(const kvedge_stretch *stretches, const kvedge_tile *values, int num_tokens,
                             int first_group, int num_groups, const int count, int num_queries, const int16_t *codes,
                             const float *scale, const float *rescale, const kvedge_accumulators *to, float *acc) {
  static const int32_t start[SUM_QUERIES];
  __m256i none[2][2];
  for (int g = first_group; g < first_group + num_groups; g++) {
    const int channel = (int)(g * values->group_stride), together = count <= 2 ? 2 : 1; /* times 16 channels */
    for (int d = 0; d < KVEDGE_GROUP; d += 16 * together)
      sum_groups(8, stretches, values->token_stride, num_tokens, channel + d, ROWS, none, together, 16, count, codes,
                 start, scale, rescale, acc + g * KVEDGE_GROUP + d, to->stride);
    codes += num_queries * KVEDGE_TILE, scale += num_queries * KVEDGE_TILE_BLOCKS;
  }
}

/* Of up to SUM_QUERIES queries. */
static __attribute__((noinline)) void sum_few(const kvedge_probabilities *p, const kvedge_tile *values,
                                              const kvedge_accumulators *to) {
  const int n = p->num_queries, together = p->planes == 3 ? TOGETHER / 2 : TOGETHER;
  const int num_groups = values->dim / KVEDGE_GROUP, at_a_time = KVEDGE_QUERY_ROWS / n;
  const kvedge_next_tile next = kvedge_next_of(values, (int)(num_groups * values->group_stride));
  tile_weights *weights = (void *)p->scratch;
  for (int g = 0, groups; g < num_groups; g += groups) {
    groups = num_groups - g < at_a_time ? num_groups - g : at_a_time;
    quantize_weights_of(p, values, together, g, groups, 0, weights);
    for (int t = 0, k = 0; t < values->num_tokens; t += together, k++) {
      const int num_tokens = values->num_tokens - t < together ? values->num_tokens - t : together;
      const float *rescale = t > 0 ? ones : to->rescale;
      kvedge_stretch stretches[TOGETHER / KVEDGE_BLOCK];
      for (int i = 0, first = t; first < t + num_tokens; first += stretches[i++].num_tokens)
        stretches[i] = kvedge_stretch_of(values, &next, first, t + num_tokens);
#define SUM_CHUNK(count)                                                                                               \
  sum_chunk(stretches, values, num_tokens, g, groups, count, n, weights->codes[i] + t, weights->scale[i] + k,          \
            rescale + i, to, to->acc + i * to->stride)
      int i = 0;
      if (n == 4) SUM_CHUNK(4);
      else {
        if (n >= 2) SUM_CHUNK(2), i = 2;
        if (n % 2) SUM_CHUNK(1);
      }
#undef SUM_CHUNK
    }
  }
}

static void KVEDGE_NAME(weighted_sum_of_groups)(const kvedge_probabilities *p, const kvedge_tile *values,
                                                const kvedge_accumulators *to) {
  if (p->num_queries <= SUM_QUERIES && (p->planes < 3 || p->by_32)) {
    sum_few(p, values, to);
    return;
  }
  for (int g = 0; g * KVEDGE_GROUP < values->dim; g++) {
    const kvedge_tile of_group = kvedge_tile_group(values, g);
    const kvedge_accumulators sums = {to->acc + g * KVEDGE_GROUP, to->stride, to->rescale};
    KVEDGE_NAME(weighted_sum_int8)(p, &of_group, &sums);
  }
}
