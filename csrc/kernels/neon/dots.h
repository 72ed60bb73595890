/* Digits of queries and weights, and weighted sums by sdot. Part of neondot.c and neoni8mm.c,
 * after codes.h; neondot.c says why. */

/* ---- integers of 24 bits in three planes of signed digits, or 16 bits in two ---- */

/* What the largest weight of a tile becomes in 16 bits: 127 * 257 - 1, as high digits. */
#define LARGEST_CODE_16 (32638.0f * 256.0f)
#define LARGEST_CODE_8 (126.9f * 65536.0f)

/* Codes 65536 * high + 256 * middle + low as {high x 4, middle x 4, low x 4, 0 x 4}. With 128 added to
 * each digit the digits are plain bytes, and inverting a byte's top bit takes 128 off. */
KVEDGE_INLINE int8x16_t split_digits(int32x4_t codes) {
  static const uint8_t order[16] = {2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15};
  const int32x4_t offset = vdupq_n_s32(0x808080);
  int32x4_t digits = veorq_s32(vaddq_s32(codes, offset), offset);
  return vqtbl1q_s8(vreinterpretq_s8_s32(digits), vld1q_u8(order));
}

/* The sums of four lanes' digits become one number each. A digit's sum is below 128 * 127 * 1024 =
 * 2^24 and exact as a float, where the three together would not fit an integer. */
KVEDGE_INLINE float32x4_t join_digits(const int32x4_t sum[3], const int planes) {
  if (planes == 1) return vmulq_n_f32(vcvtq_f32_s32(sum[0]), 65536.0f);
  float32x4_t upper = vfmaq_n_f32(vcvtq_f32_s32(sum[1]), vcvtq_f32_s32(sum[0]), 256.0f);
  return planes == 3 ? vfmaq_n_f32(vcvtq_f32_s32(sum[2]), upper, 256.0f) : vmulq_n_f32(upper, 256.0f);
}

/* sum += for each of four lanes, its four codes times four encoded values of 1 to 3 planes */
KVEDGE_INLINE void dot_digits(int32x4_t sum[3], int8x16_t codes, int8x16_t digits, const int planes) {
  sum[0] = vdotq_laneq_s32(sum[0], codes, digits, 0);
  if (planes > 1) sum[1] = vdotq_laneq_s32(sum[1], codes, digits, 1);
  if (planes == 3) sum[2] = vdotq_laneq_s32(sum[2], codes, digits, 2);
}

/* ---- Scores with one plane ----
 *
 * Its codes lie side by side, so that sdot takes rows as they are: nothing is transposed, and 16 sums of four tokens and
 * four queries stay in registers. */

KVEDGE_INLINE void encode_query_bytes(const float *x, int dim, float factor, float inverse, int8_t *codes) {
  for (int d = 0; d < kvedge_padded_channels(dim); d += 8) {
    int16x4_t four[2];
    UNROLLED (j, 2)
      four[j] = vmovn_s32(round_to_i32(
          vmulq_n_f32(vmulq_n_f32(vmulq_n_f32(load_query_f32(x, dim, d + 4 * j), factor), inverse), 1.0f / 65536)));
    vst1_s8(codes + d, vmovn_s16(vcombine_s16(four[0], four[1])));
  }
}

/* sum[4 * i + j] += query i . row j, of 16 channels */
KVEDGE_INLINE void score_16_bytes(const int8_t *codes, ptrdiff_t stride, const int8_t *rows, const ptrdiff_t offset[4],
                                  const int count, const int planes, int32x4_t sum[SCORE_SUMS]) {
  int8x16_t row[4];
  (void)planes;
  UNROLLED (j, 4) row[j] = vld1q_s8(rows + offset[j]);
  UNROLLED (i, count) {
    const int8x16_t of_query = vld1q_s8(codes + i * stride);
    UNROLLED (j, 4) sum[4 * i + j] = vdotq_s32(sum[4 * i + j], row[j], of_query);
  }
}

KVEDGE_INLINE float32x4_t join_bytes(const int32x4_t sum[SCORE_SUMS], const int i, const int planes) {
  const int32x4_t of_query = sum_each_s32(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  (void)planes;
  return vmulq_n_f32(vcvtq_f32_s32(of_query), 65536.0f);
}

static void scores_in_bytes(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  const token_stretches stretches = stretches_of(keys);
#define SCORE(count)                                                                                                   \
  score_stretches(q, i, count, 1, 16, score_16_bytes, join_bytes, keys, &stretches, scores, accumulate)
  BY_QUERIES(i, q->num_queries, SCORE)
#undef SCORE
}

/* ---- weighted sum ---- */

enum { DOT_SUM_QUERIES = 4, DOT_MOST_SUMS = 8 }; /* x 3 digits = 24 registers of sums */

/* p * scales of up to DOT_SUM_QUERIES query rows, each relative to its largest. */
typedef struct {
  int8_t digits[KVEDGE_TILE / 4][DOT_SUM_QUERIES][16]; /* of four tokens: (tokens / 4, num_queries) side by side */
  float scale[DOT_SUM_QUERIES];
} encoded_weights;

/* Codes of 24 bits of the weights of token t and three more, those of 16 or 8 with last digits of 0. */
KVEDGE_INLINE int32x4_t round_weights(float32x4_t four, float factor, int t, const int planes) {
  if (planes == 3) return round_to_i32(vmulq_n_f32(four, factor));
  if (planes == 1)
    return vshlq_n_s32(round_dithered(vmulq_n_f32(four, factor / 65536.0f), vld1q_f32(kvedge_dither + t)), 16);
  return vshlq_n_s32(round_dithered(vmulq_n_f32(four, factor / 256.0f), vld1q_f32(kvedge_dither + t)), 8);
}

KVEDGE_INLINE void encode_weights(const float *p, const float *scales, int num_tokens, int num_queries,
                                  const int planes, encoded_weights *weights) {
  const float most = planes == 3 ? LARGEST_CODE : planes == 2 ? LARGEST_CODE_16 : LARGEST_CODE_8;
  for (int i = 0; i < num_queries; i++, p += KVEDGE_TILE) {
    float w[KVEDGE_TILE];
    const float largest = weights_of_tokens(p, scales, num_tokens, w), factor = divide_or_0(most, largest, largest);
    weights->scale[i] = divide_or_0(largest, most, largest);
    for (int t = 0; t < num_tokens; t += 8)
      UNROLLED (j, 2) {
        const float32x4_t four = vld1q_f32(w + t + 4 * j);
        const int32x4_t codes = round_weights(four, factor, t + 4 * j, planes);
        vst1q_s8(weights->digits[t / 4 + j][i], split_digits(codes));
      }
  }
}

/* Four tokens' codes, 8 or 16 channels: lane c of out[j] holds channel 4 * j + c of the four tokens. */
KVEDGE_INLINE void interleave_tokens(const int8x16_t row[4], const int vectors, int8x16_t out[4]) {
  int16x8_t tokens_01 = vreinterpretq_s16_s8(vzip1q_s8(row[0], row[1]));
  int16x8_t tokens_23 = vreinterpretq_s16_s8(vzip1q_s8(row[2], row[3]));
  out[0] = vreinterpretq_s8_s16(vzip1q_s16(tokens_01, tokens_23));
  out[1] = vreinterpretq_s8_s16(vzip2q_s16(tokens_01, tokens_23));
  if (vectors == 4) {
    tokens_01 = vreinterpretq_s16_s8(vzip2q_s8(row[0], row[1]));
    tokens_23 = vreinterpretq_s16_s8(vzip2q_s8(row[2], row[3]));
    out[2] = vreinterpretq_s8_s16(vzip1q_s16(tokens_01, tokens_23));
    out[3] = vreinterpretq_s8_s16(vzip2q_s16(tokens_01, tokens_23));
  }
}

/* The sums of 4 * vectors channels from `channel` on, vectors 2 or 4, for `count` query rows, held in registers over
 * the tile. Of a partial slice (vectors is 2) only the first `channels` exist. */
KVEDGE_INLINE void sum_dots(const kvedge_tile *values, const token_stretches *stretches, int channel, int channels,
                            const int partial, const encoded_weights *weights, const int count, const int planes,
                            const int vectors, const int prefetch, const float *rescale, float *acc,
                            ptrdiff_t acc_stride) {
  int32x4_t sum[DOT_MOST_SUMS][3]; /* (count, vectors) */
  UNROLLED (s, count * vectors) sum[s][0] = sum[s][1] = sum[s][2] = vdupq_n_s32(0);
  const token_stretch *stretch = stretches->stretch;
  const int8_t (*digits)[16] = weights->digits[0]; /* (tokens / 4, DOT_SUM_QUERIES) */
  for (int r = 0; r < stretches->count; r++, stretch++) {
    const char *rows = stretch->rows + channel;
    uintptr_t next = next_of_stretch(stretch, channel, prefetch);
    ptrdiff_t offset[4];
    row_offsets(stretch->num_tokens, values->token_stride, offset);
    const unsigned groups = ((unsigned)stretch->num_tokens + 3) / 4;
    for (unsigned g = 0; g < groups; g++, rows += 4 * values->token_stride, digits += DOT_SUM_QUERIES) {
      const int8_t *v = (const int8_t *)rows;
      const ptrdiff_t *at = offset;
      char ends[4 * END_BYTES];
      prefetch_of_four(&next, g, partial ? 8 : 4 * vectors);
      if (partial) {
        gather_ends(rows, offset, channels, 1, ends);
        v = (const int8_t *)ends;
        at = end_offset;
      }
      int8x16_t row[4], codes[4];
      UNROLLED (j, 4) row[j] = vectors == 4 ? vld1q_s8(v + at[j]) : vcombine_s8(vld1_s8(v + at[j]), vdup_n_s8(0));
      interleave_tokens(row, vectors, codes);
      UNROLLED (i, count) {
        const int8x16_t of_query = vld1q_s8(digits[i]);
        UNROLLED (c, vectors) dot_digits(sum[vectors * i + c], codes[c], of_query, planes);
      }
    }
  }
  UNROLLED (i, count) {
    float32x4_t joined[4];
    UNROLLED (c, vectors) joined[c] = vmulq_n_f32(join_digits(sum[vectors * i + c], planes), weights->scale[i]);
    add_to_acc(joined, vectors, rescale[i], acc + channel + i * acc_stride, channels);
  }
}

KVEDGE_INLINE void sum_dot_channels(const kvedge_tile *values, const token_stretches *stretches, const int count,
                                    const int planes, const encoded_weights *weights, int prefetch,
                                    const float *rescale, float *acc, ptrdiff_t acc_stride) {
  const int dim = values->dim;
  int d = 0;
#define SLICE(channels, partial, vectors)                                                                              \
  sum_dots(values, stretches, d, channels, partial, weights, count, planes, vectors, prefetch, rescale, acc, acc_stride)
  if (count <= 2)
    for (; d + 16 <= dim; d += 16) SLICE(16, 0, 4);
  for (; d + 8 <= dim; d += 8) SLICE(8, 0, 2);
  if (d < dim) SLICE(dim - d, 1, 2);
#undef SLICE
}

/* Adds a tile's values to the accumulators of `count` query rows from the first on. */
KVEDGE_INLINE void sum_queries(const kvedge_probabilities *p, int first, const int count, const int planes,
                               const kvedge_tile *values, const token_stretches *stretches,
                               const kvedge_accumulators *to) {
  encoded_weights weights;
  encode_weights(p->p + first * KVEDGE_TILE, values->scales, values->num_tokens, count, planes, &weights);
  sum_dot_channels(values, stretches, count, planes, &weights, first == 0, to->rescale + first,
                   to->acc + first * to->stride, to->stride);
}
