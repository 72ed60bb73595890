/* Weighted sums of the 256-bit paths with values of int8 and int4. Part of avx2.c and avxvnni.c, as scores.h is.
 *
 * A weight is p[t] * scale[t]. Weights are quantized to 15 bits, values widened to 16, those of
 * two tokens side by side: a product then adds both tokens to 8 channels, twice what a float FMA
 * does, and widening to 16 bits takes half of what conversion to floats takes. Sums stay in
 * registers, of four queries at a time; for more queries widened values are kept.
 *
 * The rounding error of weights is in proportion to the largest of them, so only 64 tokens share
 * a scale: as exact as 16 bits over a tile of 256. Where that is not enough (three planes)
 * 32 do mostly (by_32); else values become floats, which takes up to twice as long.
 *
 * Values of int4 become integers 127 above their levels (common.h), of two tokens side by side
 * as well: their bytes are interleaved first. Sums start at -127 times the sum of the weights,
 * modulo 2^32; those of even channels and of odd ones are put in order at the end.
 */
enum {
  SUM_QUERIES = 4, /* whose sums stay in registers */
  MOST_GROUPS = 4, /* of 16 channels at a time: the fewer queries, the more, so that rows far apart are read once */
  TOGETHER = 64,   /* tokens whose weights have one scale, at most; their sums stay below 2^31 */
};

#define WEIGHT_MAX_15 32766.0f /* as WEIGHT_MAX_16 */

/* Quantized weights of a tile; `together` is how many tokens share a scale. */
typedef struct {
  int16_t codes[KVEDGE_QUERY_ROWS][KVEDGE_TILE]; /* zeros to the end of the last block */
  float scale[KVEDGE_QUERY_ROWS][KVEDGE_TILE_BLOCKS];
} tile_weights;

KVEDGE_INLINE __m256 weights_at(const float *p, const float *v_scale, int t) {
  return _mm256_mul_ps(_mm256_loadu_ps(p + t), _mm256_loadu_ps(v_scale + t));
}

/* Weights with the scales of some groups, from one on, those of all queries group by group; first all their scales, then
 * all codes, so that these need not wait for maxima and divisions. (num_groups 1, and is_signed, whether scales may be
 * negative: constants where this is inlined.) */
KVEDGE_INLINE void quantize_weights_of(const kvedge_probabilities *probabilities, const kvedge_tile *values,
                                       const int together, int first_group, const int num_groups, const int is_signed,
                                       tile_weights *w) {
  const int end = (values->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  const int num_queries = probabilities->num_queries;
  const float *first_scale = values->scales + first_group * values->scale_stride;
  float factor[KVEDGE_QUERY_ROWS][KVEDGE_TILE_BLOCKS]; /* at first the largest weight */
  for (int g = 0, row = 0; g < num_groups; g++)
    for (int i = 0; i < num_queries; i++, row++) {
      const float *p = probabilities->p + i * KVEDGE_TILE, *v_scale = first_scale + g * values->scale_stride;
      for (int k = 0, t = 0; t < end; k++) {
        const int stop = t + together < end ? t + together : end;
        __m256 largest[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (; t < stop; t += 16)
          for (int j = 0; j < 2; j++) {
            const __m256 weights = weights_at(p, v_scale, t + 8 * j);
            largest[j] = _mm256_max_ps(largest[j], is_signed ? magnitudes_of(weights) : weights);
          }
        factor[row][k] = reduce_max(_mm256_max_ps(largest[0], largest[1]));
      }
    }
  for (int row = 0; row < num_groups * num_queries; row++)
    for (int k = 0; k * together < end; k += 8) {
      const __m256 most = _mm256_set1_ps(WEIGHT_MAX_15), nothing = _mm256_set1_ps(WEIGHT_NOTHING);
      const __m256 largest = load_first_floats(factor[row] + k, (end - k * together + together - 1) / together);
      const __m256 some = _mm256_cmp_ps(largest, nothing, _CMP_GT_OQ);
      _mm256_storeu_ps(factor[row] + k, _mm256_and_ps(some, _mm256_div_ps(most, _mm256_max_ps(largest, nothing))));
      _mm256_storeu_ps(w->scale[row] + k, _mm256_and_ps(some, _mm256_div_ps(largest, most)));
    }
  for (int g = 0, row = 0; g < num_groups; g++)
    for (int i = 0; i < num_queries; i++, row++) {
      const float *p = probabilities->p + i * KVEDGE_TILE, *v_scale = first_scale + g * values->scale_stride;
      int16_t *codes = w->codes[row];
      for (int k = 0, t = 0; t < end; k++) {
        const int stop = t + together < end ? t + together : end;
        const __m256 f = _mm256_set1_ps(factor[row][k]);
        for (; t < stop; t += 16) {
          __m256i code[2];
          for (int j = 0; j < 2; j++)
            code[j] = round_dithered(is_signed, _mm256_mul_ps(weights_at(p, v_scale, t + 8 * j), f),
                                     _mm256_loadu_ps(kvedge_dither + t + 8 * j));
          const __m256i packed = _mm256_packs_epi32(code[0], code[1]);
          _mm256_storeu_si256((__m256i *)(codes + t),
                              _mm256_permute4x64_epi64(packed, 0xd8)); /* undoes the pack's lanes */
        }
      }
    }
}

KVEDGE_INLINE void quantize_weights(const kvedge_probabilities *probabilities, const kvedge_tile *values,
                                    const int together, tile_weights *w) {
  quantize_weights_of(probabilities, values, together, 0, 1, 0, w);
}

/* acc = acc * rescale + sum * scale, 8 channels or the first of them. */
KVEDGE_INLINE void add_sums(__m256 sum, int num_channels, float scale, float rescale, float *acc) {
  __m256i valid = first_lanes(num_channels);
  __m256 kept =
      _mm256_mul_ps(num_channels >= 8 ? _mm256_loadu_ps(acc) : _mm256_maskload_ps(acc, valid), _mm256_set1_ps(rescale));
  sum = _mm256_fmadd_ps(sum, _mm256_set1_ps(scale), kept);
  if (num_channels >= 8) _mm256_storeu_ps(acc, sum);
  else _mm256_maskstore_ps(acc, valid, sum);
}

/* Where a pass over tokens has values from: from rows; from rows, and keeps them; from what was kept. */
typedef enum { ROWS, ROWS_KEPT, KEPT } value_source;

/* Sums of products of `count` queries with `groups` groups of 16 channels: of the first 8, of the last 8; for int4 of
 * even ones and of odd ones. */
typedef __m256i value_sums[SUM_QUERIES][MOST_GROUPS][2];

/* Adds two tokens' values, times their weights. (Constants where this is inlined: bits, source,
 * groups, count, and whether num_channels, of a group, is 16.) */
KVEDGE_INLINE void sum_pair(const int bits, const int8_t *first, const int8_t *second, const value_source source,
                            __m256i kept[2], const int groups, int num_channels, const int count, const int16_t *codes,
                            value_sums sum) {
#pragma GCC unroll 4
  for (int g = 0; g < groups; g++) {
    __m256i value[2];
    if (source == KEPT) {
      value[0] = kept[0], value[1] = kept[1];
    } else {
      if (bits == 8) {
        const __m128i a = load_up_to_16(first + 16 * g, num_channels);
        const __m128i b = load_up_to_16(second + 16 * g, num_channels);
        value[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
        value[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
      } else {
        const int bytes = (num_channels + 1) / 2;
        const __m128i a = load_up_to_16(first + 8 * g, bytes), b = load_up_to_16(second + 8 * g, bytes);
        int16_of_pairs(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), value);
      }
      if (source == ROWS_KEPT) kept[0] = value[0], kept[1] = value[1];
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      int32_t two;
      memcpy(&two, codes + i * KVEDGE_TILE, sizeof two);
      __m256i weights = _mm256_set1_epi32(two);
      multiply_add_pairs(&sum[i][g][0], value[0], weights);
      multiply_add_pairs(&sum[i][g][1], value[1], weights);
    }
  }
}

/* Adds the values of stretches, up to TOGETHER tokens, to `groups` times 16 channels, or to
 * num_channels fewer, of `count` queries. Only the values of 16 channels are kept. (Constants as
 * in sum_pair().) */
KVEDGE_INLINE void sum_groups(const int bits, const kvedge_stretch *stretch, ptrdiff_t stride, int num_tokens,
                              int channel, const value_source source, __m256i (*kept)[2], const int groups,
                              int num_channels, const int count, const int16_t *codes, const int32_t *start,
                              const float *scale, const float *rescale, float *acc, ptrdiff_t acc_stride) {
  /* Few sums are made twice as many, so that products need not wait for those before them. */
  const int chains = count * groups <= 2 ? 2 : 1;
  value_sums sum[2];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++)
      for (int k = 0; k < chains; k++)
        sum[k][i][g][0] = sum[k][i][g][1] = bits == 8 || k > 0 ? _mm256_setzero_si256() : _mm256_set1_epi32(start[i]);
  for (int left = num_tokens, tokens; left > 0; left -= tokens, stretch++) {
    tokens = source == KEPT ? left : stretch->num_tokens; /* what is kept lies side by side */
    const int8_t *row = (const int8_t *)stretch->rows + channel * bits / 8;
    const kvedge_next_block next = kvedge_further(stretch->next, channel * bits / 8 * tokens);
    int t = 0;
    for (; t + 4 <= tokens; t += 4, codes += 4, kept += 2, row += 4 * stride) {
      if (source != KEPT && next.first && (groups * bits > 4 || t % 8 == 0))
#pragma GCC unroll 4
        for (int at = 0; at < 8 * groups * bits; at += 64) kvedge_prefetch_line(next, 2 * groups * bits * t + at);
      sum_pair(bits, row, row + stride, source, kept[0], groups, num_channels, count, codes, sum[0]);
      sum_pair(bits, row + 2 * stride, row + 3 * stride, source, kept[1], groups, num_channels, count, codes + 2,
               sum[chains - 1]);
    }
    for (; t < tokens; t += 2, codes += 2, kept++, row += 2 * stride) /* the weight of one past the last is 0 */
      sum_pair(bits, row, t + 1 < tokens ? row + stride : row, source, kept[0], groups, num_channels, count, codes,
               sum[0]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++, acc += acc_stride)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      __m256i *of_16 = sum[0][i][g];
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++)
        if (chains == 2) of_16[j] = _mm256_add_epi32(of_16[j], sum[1][i][g][j]);
      __m256i of_8[2] = {of_16[0], of_16[1]};
      if (bits == 4) {
        const __m256i low = _mm256_unpacklo_epi32(of_16[0], of_16[1]), high = _mm256_unpackhi_epi32(of_16[0], of_16[1]);
        of_8[0] = _mm256_permute2x128_si256(low, high, 0x20), of_8[1] = _mm256_permute2x128_si256(low, high, 0x31);
      }
      for (int j = 0; j < 2 && 8 * j < num_channels; j++)
        add_sums(_mm256_cvtepi32_ps(of_8[j]), num_channels - 8 * j, scale[i * KVEDGE_TILE_BLOCKS], rescale[i],
                 acc + 16 * g + 8 * j);
    }
}

/* Accumulators stay as they are. */
static const float ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                              1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* Where sums of int4 start. */
KVEDGE_INLINE void sum_weights(const int16_t *codes, int num_queries, int num_tokens, int32_t *start) {
  for (int i = 0; i < num_queries; i++, codes += KVEDGE_TILE) {
    int sum = 0;
    for (int t = 0; t < num_tokens; t++) sum += codes[t];
    start[i] = -INT4_ABOVE * sum;
  }
}

/* A tile's weighted sum. Of int4 there are whole groups of 16 channels of up to SUM_QUERIES queries. (bits: a constant
 * where this is inlined.) */
KVEDGE_INLINE void sum_codes(const int bits, const kvedge_probabilities *p, const kvedge_tile *values,
                             const kvedge_accumulators *to) {
  const int dim = values->dim, num_queries = p->num_queries, together = p->planes == 3 ? TOGETHER / 2 : TOGETHER;
  const kvedge_next_tile next = kvedge_next_of(values, (dim * bits + 7) / 8);
  tile_weights *weights = (void *)p->scratch;
  /* Constants, for loops without branches: with four queries and more 1.02 times as fast. */
  if (together == TOGETHER) quantize_weights(p, values, TOGETHER, weights);
  else quantize_weights(p, values, TOGETHER / 2, weights);
  for (int t = 0, k = 0; t < values->num_tokens; t += together, k++) {
    const int num_tokens = values->num_tokens - t < together ? values->num_tokens - t : together;
    const int16_t *codes = weights->codes[0] + t;
    const float *scale = weights->scale[0] + k;
    kvedge_stretch stretches[TOGETHER / KVEDGE_BLOCK];
    int32_t start[KVEDGE_QUERY_ROWS] = {0};
    for (int i = 0, first = t; first < t + num_tokens; first += stretches[i++].num_tokens)
      stretches[i] = kvedge_stretch_of(values, &next, first, t + num_tokens);
    if (bits == 4) sum_weights(codes, num_queries, num_tokens, start);
    for (int d = 0, n; d < dim; d += n) {
      __m256i kept[TOGETHER / 2][2]; /* (tokens / 2, 2) x 8 channels x 2 tokens */
      const int left = dim - d;
      float *out = to->acc + d;
      n = left < 16 ? left : 16;
      int i = 0;
#define SUM(source, groups, num_channels, count)                                                                       \
  sum_groups(bits, stretches, values->token_stride, num_tokens, d, source, kept, groups, num_channels, count,          \
             codes + i * KVEDGE_TILE, start + i, scale + i * KVEDGE_TILE_BLOCKS, t > 0 ? ones : to->rescale + i,       \
             out + i * to->stride, to->stride)
#define SUM_ROWS(count)                                                                                                \
  if (count == 1 && left >= 64) SUM(ROWS, 4, 16, count), n = 64;                                                       \
  else if (count <= 2 && left >= 32) SUM(ROWS, 2, 16, count), n = 32;                                                  \
  else if (bits == 4 || left >= 16) SUM(ROWS, 1, 16, count);                                                           \
  else SUM(ROWS, 1, n, count)
      if (bits == 4 || num_queries <= SUM_QUERIES) {
        BY_FOURS(num_queries, SUM_ROWS)
        continue;
      }
      if (left >= 16) SUM(ROWS_KEPT, 1, 16, SUM_QUERIES);
      else SUM(ROWS_KEPT, 1, n, SUM_QUERIES);
      i = SUM_QUERIES;
#define SUM_KEPT(count) SUM(KEPT, 1, n, count)
      BY_FOURS(num_queries, SUM_KEPT)
#undef SUM_KEPT
#undef SUM_ROWS
#undef SUM
    }
  }
}

/* Adds a tile's values to up to 16 channels of `count` queries, with weights as floats: (num_queries, KVEDGE_TILE).
 * (Constants as in sum_pair().) */
KVEDGE_INLINE void sum_16_floats(const kvedge_stretch *stretch, ptrdiff_t stride, int num_tokens, int prefetches,
                                 int channel, int num_channels, const int count, const float *weights,
                                 const float *rescale, float *acc, ptrdiff_t acc_stride) {
  __m256 sum[SUM_QUERIES][2];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
  for (int left = num_tokens; left > 0; left -= stretch++->num_tokens) {
    const int tokens = stretch->num_tokens;
    const int8_t *row = (const int8_t *)stretch->rows + channel;
    const kvedge_next_block next =
        prefetches ? kvedge_further(stretch->next, channel * tokens) : (kvedge_next_block){0, 0};
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++, row += stride, weights++) {
      if (next.first && t % 4 == 0) kvedge_prefetch_line(next, 16 * t);
      __m256 low, high;
      if (num_channels >= 16) {
        low = floats_of(_mm_loadl_epi64((const __m128i *)row));
        high = floats_of(_mm_loadl_epi64((const __m128i *)(row + 8)));
      } else {
        __m128i codes = load_up_to_16(row, num_channels);
        low = floats_of(codes);
        high = floats_of(_mm_unpackhi_epi64(codes, codes));
      }
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) {
        __m256 weight = _mm256_broadcast_ss(weights + i * KVEDGE_TILE);
        sum[i][0] = _mm256_fmadd_ps(low, weight, sum[i][0]);
        sum[i][1] = _mm256_fmadd_ps(high, weight, sum[i][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    for (int j = 0; j < 2 && 8 * j < num_channels; j++)
      add_sums(sum[i][j], num_channels - 8 * j, 1.0f, rescale[i], acc + i * acc_stride + 8 * j);
}

/* A tile's weighted sum with weights of 24 bits. */
static void sum_floats(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to) {
  const int dim = values->dim, num_queries = p->num_queries, num_tokens = values->num_tokens;
  const kvedge_next_tile next = kvedge_next_of(values, dim);
  float *weights = (float *)p->scratch; /* (num_queries, KVEDGE_TILE) */
  for (int i = 0; i < num_queries; i++)
    for (int t = 0; t < num_tokens; t++) weights[i * KVEDGE_TILE + t] = p->p[i * KVEDGE_TILE + t] * values->scales[t];
  kvedge_stretch stretches[KVEDGE_TILE_BLOCKS];
  for (int i = 0, t = 0; t < num_tokens; t += stretches[i++].num_tokens)
    stretches[i] = kvedge_stretch_of(values, &next, t, num_tokens);
  for (int d = 0; d < dim; d += 16) {
    int i = 0;
#define SUM(num_channels, count)                                                                                       \
  sum_16_floats(stretches, values->token_stride, num_tokens, i == 0, d, num_channels, count,                           \
                weights + i * KVEDGE_TILE, to->rescale + i, to->acc + i * to->stride + d, to->stride)
#define SUM_16(count)                                                                                                  \
  if (dim - d >= 16) SUM(16, count);                                                                                   \
  else SUM(dim - d, count)
    BY_FOURS(num_queries, SUM_16)
#undef SUM_16
#undef SUM
  }
}
