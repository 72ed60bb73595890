/* Weighted sums of the 256-bit paths in products of 8 bits (bytes.h), with values of int8 and int4. Part of avx2.c and
 * avxvnni.c, after values.h.
 *
 * Rows of four tokens are interleaved byte by byte, so that a lane has one channel of the four, whose products an
 * instruction adds up (three on avx2): of 32 channels of a tile at a time, once for all queries.
 */
enum { FOUR_WEIGHTS = 8 }; /* bytes: codes of four tokens, then two multipliers */

/* Quantized weights of a tile, whose sums stay below 2^31; and its values in lanes of four tokens, of 32 channels. */
typedef struct {
  uint8_t codes[KVEDGE_QUERY_ROWS][KVEDGE_TILE / 4][FOUR_WEIGHTS]; /* zeros to the end of the last block */
  float scale[KVEDGE_QUERY_ROWS];
  __m256i lanes[KVEDGE_TILE / 4][4];
} byte_weights;

/* Codes of 16 tokens' weights times `factor`, and multipliers of the pairs. */
KVEDGE_INLINE void encode_byte_weights(const float *p, const float *v_scale, int t, __m256 factor, uint8_t *codes) {
  __m256 w[2];
  __m256i code[2], multipliers = _mm256_set1_epi32(1);
  for (int j = 0; j < 2; j++) w[j] = _mm256_mul_ps(weights_at(p, v_scale, t + 8 * j), factor);
  if (BYTE_MULTIPLIERS) {
    const __m256 unity = _mm256_set1_ps(1.0f);
    const __m256 m = _mm256_max_ps(_mm256_shuffle_ps(w[0], w[1], 0x88), _mm256_shuffle_ps(w[0], w[1], 0xdd));
    /* Of pairs 0, 1, 4, 5, 2, 3, 6 and 7: the next integer above the quotient. */
    multipliers = _mm256_cvttps_epi32(_mm256_fmadd_ps(m, _mm256_set1_ps(1.0f / BYTE_WEIGHT_MAX), unity));
    const __m256 inverse = _mm256_div_ps(unity, _mm256_cvtepi32_ps(multipliers));
    w[0] = _mm256_mul_ps(w[0], _mm256_unpacklo_ps(inverse, inverse));
    w[1] = _mm256_mul_ps(w[1], _mm256_unpackhi_ps(inverse, inverse));
  }
  for (int j = 0; j < 2; j++) code[j] = round_dithered(0, w[j], _mm256_loadu_ps(kvedge_dither + t + 8 * j));
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_setzero_si256());
  const __m256i both = _mm256_unpacklo_epi32(bytes, _mm256_packs_epi32(multipliers, multipliers));
  _mm256_storeu_si256((__m256i *)codes, _mm256_permute4x64_epi64(both, 0xd8));
}

/* First all scales, then all codes, as in quantize_weights(). */
static __attribute__((noinline)) void quantize_byte_weights(const kvedge_probabilities *probabilities,
                                                            const kvedge_tile *values, byte_weights *w) {
  const int end = (values->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  const float most = BYTE_MULTIPLIERS ? WEIGHT_MAX_15 : WEIGHT_MAX_8;
  float factor[KVEDGE_QUERY_ROWS];
  for (int i = 0; i < probabilities->num_queries; i++) {
    const float *p = probabilities->p + i * KVEDGE_TILE;
    __m256 largest_of[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int t = 0; t < end; t += 16)
      for (int j = 0; j < 2; j++)
        largest_of[j] = _mm256_max_ps(largest_of[j], weights_at(p, values->scales, t + 8 * j));
    const float largest = reduce_max(_mm256_max_ps(largest_of[0], largest_of[1]));
    factor[i] = largest > WEIGHT_NOTHING ? most / largest : 0.0f;
    w->scale[i] = largest > WEIGHT_NOTHING ? largest / most : 0.0f;
  }
  for (int i = 0; i < probabilities->num_queries; i++)
    for (int t = 0; t < end; t += 16)
      encode_byte_weights(probabilities->p + i * KVEDGE_TILE, values->scales, t, _mm256_set1_ps(factor[i]),
                          w->codes[i][t / 4]);
}

/* 32 channels of four rows, in lanes of one channel of the four. Of int8 lanes[0] has channels 0 to 3 and 16 to 19,
 * lanes[1] those from 4 and 20 on, and so on; of int4 lanes[0] has the even and lanes[1] the odd ones of the first 16,
 * lanes[2] and lanes[3] those of the others. */
KVEDGE_INLINE void interleave_rows(int bits, const int8_t *first, const ptrdiff_t offset[4], __m256i lanes[4]) {
  if (bits == 8) {
    __m256i of[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) of[j] = _mm256_loadu_si256((const __m256i *)(first + offset[j]));
    const __m256i low[2] = {_mm256_unpacklo_epi8(of[0], of[1]), _mm256_unpacklo_epi8(of[2], of[3])};
    const __m256i high[2] = {_mm256_unpackhi_epi8(of[0], of[1]), _mm256_unpackhi_epi8(of[2], of[3])};
    lanes[0] = _mm256_unpacklo_epi16(low[0], low[1]), lanes[1] = _mm256_unpackhi_epi16(low[0], low[1]);
    lanes[2] = _mm256_unpacklo_epi16(high[0], high[1]), lanes[3] = _mm256_unpackhi_epi16(high[0], high[1]);
    return;
  }
  __m128i of[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) of[j] = _mm_loadu_si128((const __m128i *)(first + offset[j]));
  const __m128i low[2] = {_mm_unpacklo_epi8(of[0], of[1]), _mm_unpacklo_epi8(of[2], of[3])};
  const __m128i high[2] = {_mm_unpackhi_epi8(of[0], of[1]), _mm_unpackhi_epi8(of[2], of[3])};
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const __m128i *of_16 = k == 0 ? low : high;
    const __m256i pairs =
        _mm256_set_m128i(_mm_unpackhi_epi16(of_16[0], of_16[1]), _mm_unpacklo_epi16(of_16[0], of_16[1]));
    lanes[2 * k] = levels_of(pairs, 0), lanes[2 * k + 1] = levels_of(pairs, 1);
  }
}

/* Sums of such lanes, in the order of channels. */
KVEDGE_INLINE void order_channels(int bits, const __m256i sum[4], __m256i of_8[4]) {
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const __m256i first = sum[2 * k], second = sum[2 * k + 1];
    if (bits == 8) {
      of_8[k] = _mm256_permute2x128_si256(first, second, 0x20);
      of_8[k + 2] = _mm256_permute2x128_si256(first, second, 0x31);
    } else {
      const __m256i low = _mm256_unpacklo_epi32(first, second), high = _mm256_unpackhi_epi32(first, second);
      of_8[2 * k] = _mm256_permute2x128_si256(low, high, 0x20);
      of_8[2 * k + 1] = _mm256_permute2x128_si256(low, high, 0x31);
    }
  }
}

/* The last channels of four rows, fewer than 32; what comes after them means nothing. */
static __attribute__((noinline)) void gather_last_bytes(const int8_t *first, const ptrdiff_t offset[4], int num_bytes,
                                                        int8_t *out) { /* (4, 32) */
#pragma GCC unroll 1
  for (int j = 0; j < 4; j++)
    _mm256_storeu_si256((__m256i *)(out + 32 * j), load_up_to_32(first + offset[j], num_bytes));
}

/* Up to 32 channels of a tile's values. */
typedef struct {
  const kvedge_tile *tile;
  const kvedge_stretch *stretches;
  int bits;
  int channel; /* the first; where fewer than 32 are left of more, that of the last 32 */
  int done;    /* of them, which slices before have added: a multiple of 8 */
  int num_channels;
} value_slice;

/* Adds a slice, times the weights of `count` query rows from the `first` on, 1 or 2; or for one row two slices side by
 * side, so that a line of memory is read once. A slice is interleaved here, and kept if `keeps`, or taken from what was
 * kept. (groups, of slices, count and is_kept: constants where this is inlined.) */
KVEDGE_INLINE void sum_slice(const value_slice *slice, byte_weights *weights, int first, const int groups,
                             const int count, const int is_kept, int keeps, const kvedge_accumulators *to) {
  static const ptrdiff_t of_ends[4] = {0, 32, 64, 96};
  const int bits = slice->bits, num_tokens = slice->tile->num_tokens;
  const ptrdiff_t stride = slice->tile->token_stride;
  const kvedge_stretch *stretch = slice->stretches;
  const uint8_t (*codes)[FOUR_WEIGHTS] = (const uint8_t (*)[FOUR_WEIGHTS])weights->codes[first];
  __m256i(*kept)[4] = weights->lanes, sum[2][4]; /* (groups * count, 4) */
#pragma GCC unroll 2
  for (int i = 0; i < groups * count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) sum[i][v] = _mm256_setzero_si256();
  for (int left = num_tokens, tokens; left > 0; left -= tokens, stretch++) {
    tokens = is_kept ? left : stretch->num_tokens;
    const int8_t *rows = is_kept ? NULL : (const int8_t *)stretch->rows + slice->channel * bits / 8;
    const kvedge_next_block next =
        is_kept ? (kvedge_next_block){0, 0}
                : kvedge_further(stretch->next, (slice->channel + slice->done) * bits / 8 * tokens);
    ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
    for (int t = 0; t < tokens; t += 4, codes++, kept++, rows += 4 * stride) {
      const int8_t *from = rows;
      const ptrdiff_t *at = offset;
      int8_t ends[4 * 32];
      if (!is_kept) {
        if (tokens - t < 4) /* the weight of one past the last is 0 */
          for (int j = tokens - t; j < 4; j++) offset[j] = offset[tokens - t - 1];
        if (groups == 1 && slice->num_channels < 32) {
          gather_last_bytes(rows, offset, (slice->num_channels * bits + 7) / 8, ends);
          from = ends, at = of_ends;
        }
        if (next.first)
          for (int line = 0; line < groups * bits / 4; line++)
            kvedge_prefetch_line(next, 4 * groups * bits * t + 64 * line);
      }
#pragma GCC unroll 2
      for (int g = 0; g < groups; g++) {
        __m256i lanes[4];
        if (is_kept) {
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) lanes[v] = (*kept)[v];
        } else {
          interleave_rows(bits, from + 4 * bits * g, at, lanes);
        }
        if (count == 2 && !is_kept && keeps)
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) (*kept)[v] = lanes[v];
#pragma GCC unroll 2
        for (int i = 0; i < count; i++) {
          const uint8_t *four = codes[i * KVEDGE_TILE / 4];
          const __m256i w = broadcast_word(four), multipliers = broadcast_word(four + 4);
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) multiply_add_fours(&sum[g + i][v], w, lanes[v], multipliers);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < groups * count; i++) {
    __m256i of_8[4];
    const int query = groups == 2 ? first : first + i, channel = slice->channel + (groups == 2 ? 32 * i : 0);
    order_channels(bits, sum[i], of_8);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      if (8 * j >= slice->done && 8 * j < slice->num_channels)
        add_sums(_mm256_cvtepi32_ps(of_8[j]), slice->num_channels - 8 * j, weights->scale[query], to->rescale[query],
                 to->acc + query * to->stride + channel + 8 * j);
  }
}

/* One function for each case, as in scores.h. */
#define SUM_SLICE(name, groups, count, is_kept)                                                                        \
  static __attribute__((noinline)) void name(const value_slice *slice, byte_weights *weights, int first, int keeps,    \
                                             const kvedge_accumulators *to) {                                          \
    sum_slice(slice, weights, first, groups, count, is_kept, keeps, to);                                               \
  }
SUM_SLICE(sum_slice_1, 1, 1, 0)
SUM_SLICE(sum_two_slices_1, 2, 1, 0)
SUM_SLICE(sum_slice_2, 1, 2, 0)
SUM_SLICE(sum_kept_1, 1, 1, 1)
SUM_SLICE(sum_kept_2, 1, 2, 1)
#undef SUM_SLICE

/* A tile's weighted sum. */
static __attribute__((noinline)) void sum_bytes(int bits, const kvedge_probabilities *p, const kvedge_tile *values,
                                                const kvedge_accumulators *to) {
  const int n = p->num_queries, dim = values->dim;
  const kvedge_next_tile next = kvedge_next_of(values, (dim * bits + 7) / 8);
  byte_weights *weights = (void *)p->scratch;
  kvedge_stretch stretches[KVEDGE_TILE_BLOCKS];
  for (int i = 0, t = 0; t < values->num_tokens; t += stretches[i++].num_tokens)
    stretches[i] = kvedge_stretch_of(values, &next, t, values->num_tokens);
  quantize_byte_weights(p, values, weights);
  for (int d = 0; d < dim; d += 32) {
    value_slice slice = {values, stretches, bits, d, 0, dim - d < 32 ? dim - d : 32};
    if (dim > 32 && dim % 8 == 0 && dim - d < 32) slice.channel = dim - 32, slice.done = d - slice.channel;
    if (slice.done) slice.num_channels = 32;
    if (n == 1 && dim - d >= 64) {
      sum_two_slices_1(&slice, weights, 0, 0, to);
      d += 32;
      continue;
    }
    if (n == 1) {
      sum_slice_1(&slice, weights, 0, 0, to);
      continue;
    }
    sum_slice_2(&slice, weights, 0, n > 2, to);
    int i = 2;
    for (; i + 2 <= n; i += 2) sum_kept_2(&slice, weights, i, 0, to);
    if (i < n) sum_kept_1(&slice, weights, i, 0, to);
  }
}

/* By as many bits as the call wants. */
static void KVEDGE_NAME(weighted_sum_int8)(const kvedge_probabilities *p, const kvedge_tile *values,
                                           const kvedge_accumulators *to) {
  if (p->planes == 1) sum_bytes(8, p, values, to);
  else if (p->planes == 3 && !p->by_32) sum_floats(p, values, to);
  else sum_codes(8, p, values, to);
}
