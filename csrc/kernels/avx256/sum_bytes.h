/* Weighted sums of the 256-bit paths in products of 8 bits (bytes.h), with values of int8 and int4. Part of avx2.c and
 * avxvnni.c, after values.h.
 *
 * Rows of four tokens are interleaved byte by byte, so that a lane has one channel of the four, whose products an
 * instruction adds up (three on avx2). For more than two queries such lanes are kept, of 32 channels of a tile.
 */
enum {
  BYTE_QUERIES = 2, /* whose sums stay in registers, of 32 channels */
  FOUR_WEIGHTS = 8, /* bytes: codes of four tokens, then two multipliers */
};

/* Quantized weights of a tile, whose sums stay below 2^31; and 32 channels of it that are kept. */
typedef struct {
  uint8_t codes[KVEDGE_QUERY_ROWS][KVEDGE_TILE / 4][FOUR_WEIGHTS]; /* zeros to the end of the last block */
  float scale[KVEDGE_QUERY_ROWS];
  __m256i kept[KVEDGE_TILE / 4][4];
} byte_weights;

/* Codes of 16 tokens' weights times `factor`, and multipliers of the pairs. */
KVEDGE_INLINE void encode_byte_weights(const float *p, const float *v_scale, int t, __m256 factor, uint8_t *codes) {
  __m256 w[2];
  __m256i code[2], multipliers = _mm256_set1_epi32(1);
  for (int j = 0; j < 2; j++) w[j] = _mm256_mul_ps(weights_at(p, v_scale, t + 8 * j), factor);
  if (BYTE_MULTIPLIERS) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 m = _mm256_max_ps(_mm256_shuffle_ps(w[0], w[1], 0x88), _mm256_shuffle_ps(w[0], w[1], 0xdd));
    /* Of pairs 0, 1, 4, 5, 2, 3, 6 and 7: the next integer above the quotient. */
    multipliers = _mm256_cvttps_epi32(_mm256_fmadd_ps(m, _mm256_set1_ps(1.0f / BYTE_WEIGHT_MAX), one));
    const __m256 inverse = _mm256_div_ps(one, _mm256_cvtepi32_ps(multipliers));
    w[0] = _mm256_mul_ps(w[0], _mm256_unpacklo_ps(inverse, inverse));
    w[1] = _mm256_mul_ps(w[1], _mm256_unpackhi_ps(inverse, inverse));
  }
  for (int j = 0; j < 2; j++) code[j] = round_dithered(w[j], _mm256_loadu_ps(kvedge_dither + t + 8 * j));
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

/* The last channels of four rows, fewer than 32; what comes after them means nothing. */
static __attribute__((noinline)) void gather_last_bytes(const int8_t *first, const ptrdiff_t offset[4], int num_bytes,
                                                        int8_t *out) { /* (4, 32) */
  for (int j = 0; j < 4; j++)
    _mm256_storeu_si256((__m256i *)(out + 32 * j), load_up_to_32(first + offset[j], num_bytes));
}
static const ptrdiff_t end_offset[4] = {0, 32, 64, 96};

/* 32 channels of four tokens, in `bytes` of a row, or the first 16 in half of these; a lane has a channel of the four.
 * Of int8 value[0] has channels 0 to 3 and 16 to 19, value[1] those from 4 and 20 on, and so on; of int4 value[0] has
 * the even and value[1] the odd ones of the first 16, value[2] and value[3] those of the others. (bits and bytes:
 * constants where this is inlined.) */
KVEDGE_INLINE void interleave_tokens(const int bits, const int8_t *first, const ptrdiff_t offset[4], const int bytes,
                                     __m256i value[4]) {
  if (bits == 8) {
    __m256i of[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      of[j] = bytes == 32 ? _mm256_loadu_si256((const __m256i *)(first + offset[j]))
                          : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(first + offset[j])));
    const __m256i low[2] = {_mm256_unpacklo_epi8(of[0], of[1]), _mm256_unpacklo_epi8(of[2], of[3])};
    const __m256i high[2] = {_mm256_unpackhi_epi8(of[0], of[1]), _mm256_unpackhi_epi8(of[2], of[3])};
    value[0] = _mm256_unpacklo_epi16(low[0], low[1]), value[1] = _mm256_unpackhi_epi16(low[0], low[1]);
    value[2] = _mm256_unpacklo_epi16(high[0], high[1]), value[3] = _mm256_unpackhi_epi16(high[0], high[1]);
    return;
  }
  __m128i of[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    of[j] = bytes == 16 ? _mm_loadu_si128((const __m128i *)(first + offset[j]))
                        : _mm_loadl_epi64((const __m128i *)(first + offset[j]));
  const __m128i low[2] = {_mm_unpacklo_epi8(of[0], of[1]), _mm_unpacklo_epi8(of[2], of[3])};
  const __m128i high[2] = {_mm_unpackhi_epi8(of[0], of[1]), _mm_unpackhi_epi8(of[2], of[3])};
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvedge_int4_levels));
  const __m256i lower_half = _mm256_set1_epi8(15);
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    const __m128i *of_16 = k == 0 ? low : high;
    const __m256i pairs =
        _mm256_set_m128i(_mm_unpackhi_epi16(of_16[0], of_16[1]), _mm_unpacklo_epi16(of_16[0], of_16[1]));
    value[2 * k] = _mm256_shuffle_epi8(levels, _mm256_and_si256(pairs, lower_half));
    value[2 * k + 1] = _mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), lower_half));
  }
}

/* Sums of such lanes, in the order of channels. */
KVEDGE_INLINE void order_channels(const int bits, const __m256i sum[4], __m256i of_8[4]) {
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

/* Adds the values of a tile's tokens to `groups` times 32 channels of `count` queries, of which num_channels are
 * there. They are of rows, and kept unless `kept` is NULL; or of what was kept. (groups, count, is_kept: constants
 * where this is inlined; so is bits, unless is_kept.) */
KVEDGE_INLINE void sum_bytes_of(const int bits, const kvedge_stretch *stretch, ptrdiff_t stride, int num_tokens,
                                int channel, const int is_kept, __m256i (*kept)[4], const int groups, int num_channels,
                                const int count, const uint8_t (*codes)[FOUR_WEIGHTS], const float *scale,
                                const float *rescale, float *acc, ptrdiff_t acc_stride) {
  __m256i sum[BYTE_QUERIES][2][4];
#pragma GCC unroll 2
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sum[i][g][v] = _mm256_setzero_si256();
  for (int left = num_tokens, tokens; left > 0; left -= tokens, stretch++) {
    tokens = is_kept ? left : stretch->num_tokens;
    const int8_t *first = (const int8_t *)stretch->rows + channel * bits / 8;
    const kvedge_next_block next = kvedge_further(stretch->next, channel * bits / 8 * tokens);
    ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
    for (int t = 0; t < tokens; t += 4, codes++, first += 4 * stride) {
      if (!is_kept) {
        if (tokens - t < 4) /* the weight of one past the last is 0 */
          for (int j = tokens - t; j < 4; j++) offset[j] = offset[tokens - t - 1];
        if (next.first)
#pragma GCC unroll 4
          for (int at = 0; at < 16 * groups * bits; at += 64) kvedge_prefetch_line(next, 4 * groups * bits * t + at);
      }
#pragma GCC unroll 2
      for (int g = 0; g < groups; g++) {
        __m256i value[4];
        if (is_kept) {
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) value[v] = (*kept)[v];
          kept++;
        } else {
          const int8_t *from = first + 4 * bits * g;
          const ptrdiff_t *at = offset;
          int8_t ends[4 * 32];
          if (groups == 1 && num_channels < 32 && num_channels != 16) {
            gather_last_bytes(from, offset, (num_channels * bits + 7) / 8, ends);
            from = ends, at = end_offset;
          }
          if (groups == 1 && num_channels == 16) interleave_tokens(bits, from, at, 2 * bits, value);
          else interleave_tokens(bits, from, at, 4 * bits, value);
          if (kept) {
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) (*kept)[v] = value[v];
            kept++;
          }
        }
#pragma GCC unroll 2
        for (int i = 0; i < count; i++) {
          const uint8_t *of_query = codes[i * KVEDGE_TILE / 4];
          const __m256i weights = broadcast_word(of_query), multipliers = broadcast_word(of_query + 4);
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) multiply_add_fours(&sum[i][g][v], weights, value[v], multipliers);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < count; i++, acc += acc_stride)
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
      __m256i of_8[4];
      order_channels(bits, sum[i][g], of_8);
      for (int j = 0; j < 4 && 32 * g + 8 * j < num_channels; j++)
        add_sums(_mm256_cvtepi32_ps(of_8[j]), num_channels - 32 * g - 8 * j, scale[i], rescale[i],
                 acc + 32 * g + 8 * j);
    }
}

/* A tile's weighted sum. (bits: a constant where this is inlined.) */
KVEDGE_INLINE void sum_bytes(const int bits, const kvedge_probabilities *p, const kvedge_tile *values,
                             const kvedge_accumulators *to) {
  const int dim = values->dim, num_queries = p->num_queries, num_tokens = values->num_tokens;
  const kvedge_next_tile next = kvedge_next_of(values, (dim * bits + 7) / 8);
  byte_weights *weights = (void *)p->scratch;
  kvedge_stretch stretches[KVEDGE_TILE_BLOCKS];
  for (int i = 0, t = 0; t < num_tokens; t += stretches[i++].num_tokens)
    stretches[i] = kvedge_stretch_of(values, &next, t, num_tokens);
  quantize_byte_weights(p, values, weights);
  for (int d = 0, n; d < dim; d += n) {
    const int left = dim - d;
    int i = 0;
    n = left < 32 ? left : 32;
#define SUM(is_kept, kept, groups, count)                                                                              \
  sum_bytes_of(bits, stretches, values->token_stride, num_tokens, d, is_kept, kept, groups, n, count,                  \
               (const uint8_t(*)[FOUR_WEIGHTS])weights->codes[i], weights->scale + i, to->rescale + i,                 \
               to->acc + i * to->stride + d, to->stride)
    if (num_queries == 1 && left >= 64) {
      n = 64;
      SUM(0, NULL, 2, 1);
      continue;
    }
    if (num_queries == 1) {
      SUM(0, NULL, 1, 1);
      continue;
    }
    SUM(0, num_queries > BYTE_QUERIES ? weights->kept : NULL, 1, BYTE_QUERIES);
    for (i = BYTE_QUERIES; i + BYTE_QUERIES <= num_queries; i += BYTE_QUERIES) SUM(1, weights->kept, 1, BYTE_QUERIES);
    if (i < num_queries) SUM(1, weights->kept, 1, 1);
#undef SUM
  }
}

static __attribute__((noinline)) void sum_bytes_int8(const kvedge_probabilities *p, const kvedge_tile *values,
                                                     const kvedge_accumulators *to) {
  sum_bytes(8, p, values, to);
}

static __attribute__((noinline)) void sum_bytes_int4(const kvedge_probabilities *p, const kvedge_tile *values,
                                                     const kvedge_accumulators *to) {
  sum_bytes(4, p, values, to);
}
