/* int8 rows times queries and weights of 16 bits. Part of neon.c, after common.h.
 *
 * Scores. A query's codes are the two high planes of its 24 bits as one signed integer of 16;
 * keys are widened to 16 bits, once for up to four queries, and smlal adds the products in 32
 * bits: a register of sums per token and query, joined across lanes at the end. The largest sum
 * is 32639 * 127 * 512 < 2^31 (INT16_CHANNELS).
 *
 * Weighted sums. A weight is p[t] * scale[t], rounded to an unsigned integer of 16 bits relative
 * to the tile's largest, and a value v counts as v + 128, unsigned too. Each sum starts at -128
 * times the sum of the weights, which takes that off again: sums run modulo 2^32, and what they
 * end with is below 65534 * 127 * 256 < 2^31 in magnitude. So a tile has one scale, where signed
 * weights would have 15 bits.
 *
 * Where 16 bits do not suffice (three planes), codes become floats, score_rows() and sum_rows() of common.h; or 32
 * tokens have a scale where that does (by_32).
 */

enum { INT16_CHANNELS = 512 };  /* of a row, for sums in 32 bits */
#define LARGEST_UINT16 65534.0f /* of weights: a little below what fits, because products round */

/* ---- scores ---- */

/* Channels at..at+3 of a query times a power of two. On armv7, whose vector instructions take
 * denormal numbers for 0, one by one. */
KVEDGE_INLINE float32x4_t scale_query(const float *x, int dim, int at, float factor) {
#ifdef __aarch64__
  return vmulq_n_f32(load_query_f32(x, dim, at), factor);
#else
  float four[4];
  for (int i = 0; i < 4; i++) four[i] = at + i < dim ? x[at + i] * factor : 0.0f;
  return vld1q_f32(four);
#endif
}

static void encode_query_neon(const float *x, int dim, float factor, float largest, int planes, int8_t *codes,
                              float *scale, int32_t *offsets) {
  (void)planes;
  const float inverse = divide_or_0(LARGEST_CODE, largest, largest);
  for (int d = 0; d < kvedge_padded_channels(dim); d += 16, codes += CODES_OF_16) {
    for (int i = 0; i < 4; i++) {
      const float32x4_t four = vmulq_n_f32(scale_query(x, dim, d + 4 * i, factor), inverse);
      vst1q_f32((float *)(codes + FLOATS_AT) + 4 * i, four);
      vst1_s16((int16_t *)codes + 4 * i, vmovn_s32(round_to_i32(vmulq_n_f32(four, 0x1p-8f))));
    }
  }
  *scale = divide_or_0(largest, LARGEST_CODE, largest);
  vst1q_s32(offsets, vdupq_n_s32(0)); /* keys are signed here */
}

/* sum[4 * i + j] += query i . row j, of 16 channels */
KVEDGE_INLINE void score_16_int16(const int8_t *codes, ptrdiff_t stride, const int8_t *rows, const ptrdiff_t offset[4],
                                  const int count, const int planes, int32x4_t sum[SCORE_SUMS]) {
  int16x8_t low[4], high[4];
  (void)planes;
  UNROLLED (j, 4) {
    const int8x16_t row = vld1q_s8(rows + offset[j]);
    low[j] = vmovl_s8(vget_low_s8(row)), high[j] = WIDEN_HIGH_S8(row);
  }
  UNROLLED (i, count) {
    const int16x8_t first = vld1q_s16((const int16_t *)(codes + i * stride));
    const int16x8_t second = vld1q_s16((const int16_t *)(codes + i * stride) + 8);
    int32x4_t *of_query = sum + 4 * i;
    UNROLLED (j, 4) of_query[j] = vmlal_s16(of_query[j], vget_low_s16(low[j]), vget_low_s16(first));
    UNROLLED (j, 4) of_query[j] = MULTIPLY_ADD_HIGH_S16(of_query[j], low[j], first);
    UNROLLED (j, 4) of_query[j] = vmlal_s16(of_query[j], vget_low_s16(high[j]), vget_low_s16(second));
    UNROLLED (j, 4) {
      of_query[j] = MULTIPLY_ADD_HIGH_S16(of_query[j], high[j], second);
      AS_WRITTEN(of_query[j]);
    }
  }
}

KVEDGE_INLINE float32x4_t join_int16(const int32x4_t sum[SCORE_SUMS], const int i, const int planes) {
  (void)planes; /* two, whose unit is 256 times that of three */
  return vmulq_n_f32(vcvtq_f32_s32(sum_each_s32(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3])), 256.0f);
}

static void scores_int8_neon(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  if (q->planes == 3 || q->dim > INT16_CHANNELS) {
    score_rows(q, keys, KVEDGE_INT8, scores, accumulate);
    return;
  }
  const token_stretches stretches = stretches_of(keys);
#define SCORE(count)                                                                                                   \
  score_stretches(q, i, count, 2, CODES_OF_16, score_16_int16, join_int16, keys, &stretches, scores, accumulate)
  BY_QUERIES(i, q->num_queries, SCORE)
#undef SCORE
}

/* ---- weighted sums ---- */

/* p * scales of up to WEIGHTED_QUERIES query rows, each relative to its largest in the tile. */
typedef struct {
  uint16_t codes[WEIGHTED_QUERIES][KVEDGE_TILE]; /* 0 from num_tokens to the end of the block */
  float scale[WEIGHTED_QUERIES];
  uint32_t start[WEIGHTED_QUERIES]; /* -128 times the sum of the codes, modulo 2^32 */
} int16_weights;

KVEDGE_INLINE void encode_int16(const float *p, const float *scales, int num_tokens, int count,
                                int16_weights *weights) {
  for (int i = 0; i < count; i++, p += KVEDGE_TILE) {
    float w[KVEDGE_TILE];
    const float largest = weights_of_tokens(p, scales, num_tokens, w);
    const float factor = divide_or_0(LARGEST_UINT16, largest, largest);
    uint32x4_t total = vdupq_n_u32(0);
    for (int t = 0; t < num_tokens; t += 8) { /* blocks are of 16 tokens */
      uint32x4_t code[2];
      UNROLLED (j, 2)
        code[j] = vreinterpretq_u32_s32(
            round_dithered(vmulq_n_f32(vld1q_f32(w + t + 4 * j), factor), vld1q_f32(kvedge_dither + t + 4 * j)));
      const uint16x8_t eight = vcombine_u16(vmovn_u32(code[0]), vmovn_u32(code[1]));
      total = vpadalq_u16(total, eight);
      vst1q_u16(weights->codes[i] + t, eight);
    }
    weights->scale[i] = divide_or_0(largest, LARGEST_UINT16, largest);
    weights->start[i] = 0u - 128u * sum_across_u32(total);
  }
}

/* The sums of 8 * eights channels from `channel` on for `count` query rows, as sum_slice() has them. */
KVEDGE_INLINE void sum_int16(const kvedge_tile *values, const token_stretches *stretches, int channel, int channels,
                             const int partial, const int16_weights *weights, const int count, const int eights,
                             const int prefetch, const float *rescale, float *acc, ptrdiff_t acc_stride) {
  const int sixteens = (eights + 1) / 2, halves = eights == 1 ? 1 : 2;
  const int8x16_t least = vdupq_n_s8(-128);
  uint32x4_t sum[MOST_SUMS]; /* (count, 2 * eights) */
  UNROLLED (i, count)
    UNROLLED (s, 2 * eights) sum[2 * eights * i + s] = vdupq_n_u32(weights->start[i]);
  const token_stretch *stretch = stretches->stretch;
  for (int r = 0, t = 0; r < stretches->count; r++, stretch++) {
    const char *rows = stretch->rows + channel;
    uintptr_t next = next_of_stretch(stretch, channel, prefetch);
    ptrdiff_t offset[4];
    row_offsets(stretch->num_tokens, values->token_stride, offset);
    for (const int end = t + stretch->num_tokens; t < end; t += 4, rows += 4 * values->token_stride) {
      const char *v = rows;
      const ptrdiff_t *at = offset;
      char ends[4 * END_BYTES];
      prefetch_of_four(&next, (unsigned)t / 4, partial ? 8 : 8 * eights);
      if (partial) {
        gather_ends(rows, offset, channels, 1, ends);
        v = ends;
        at = end_offset;
      }
      uint16x4_t weight[WEIGHTED_QUERIES]; /* of four tokens */
      UNROLLED (i, count) {
        weight[i] = vld1_u16(weights->codes[i] + t);
        IN_LOWER_REGISTER(weight[i]);
      }
#define TOKEN(j)                                                                                                       \
  UNROLLED (e, sixteens) {                                                                                             \
    const int8_t *codes = (const int8_t *)v + at[j] + 16 * e;                                                          \
    const int8x16_t row = eights == 1 ? vcombine_s8(vld1_s8(codes), vdup_n_s8(0)) : vld1q_s8(codes);                   \
    const uint16x8_t wide[2] = {vreinterpretq_u16_s16(vsubl_s8(vget_low_s8(row), vget_low_s8(least))),                 \
                                vreinterpretq_u16_s16(SUBTRACT_HIGH_S8(row, least))};                                  \
    UNROLLED (h, halves)                                                                                               \
      UNROLLED (i, count) {                                                                                            \
        uint32x4_t *s = sum + 2 * (eights * i + 2 * e + h);                                                            \
        s[0] = vmlal_lane_u16(s[0], vget_low_u16(wide[h]), weight[i], j);                                              \
        s[1] = MULTIPLY_ADD_HIGH_LANE_U16(s[1], wide[h], weight[i], j);                                                \
        AS_WRITTEN(s[0]);                                                                                              \
        AS_WRITTEN(s[1]);                                                                                              \
      }                                                                                                                \
  }
      TOKEN(0) TOKEN(1) TOKEN(2) TOKEN(3)
#undef TOKEN
    }
  }
  UNROLLED (i, count) {
    float32x4_t joined[MOST_SUMS];
    UNROLLED (s, 2 * eights)
      joined[s] = vmulq_n_f32(vcvtq_f32_s32(vreinterpretq_s32_u32(sum[2 * eights * i + s])), weights->scale[i]);
    add_to_acc(joined, 2 * eights, rescale[i], acc + channel + i * acc_stride, channels);
  }
}

/* All channels, for `count` query rows. */
KVEDGE_INLINE void sum_channels_int16(const kvedge_tile *values, const token_stretches *stretches, const int count,
                                      const int16_weights *weights, int prefetch, const float *rescale, float *acc,
                                      ptrdiff_t acc_stride) {
  const int most = MOST_SUMS / 2 / (count == 3 ? 4 : count), dim = values->dim;
  int d = 0;
#define SLICE(channels, partial, eights)                                                                               \
  sum_int16(values, stretches, d, channels, partial, weights, count, eights, prefetch, rescale, acc, acc_stride)
  for (; d + 8 * most <= dim; d += 8 * most) SLICE(8 * most, 0, most);
  if (most > 2)
    for (; d + 16 <= dim; d += 16) SLICE(16, 0, 2);
  for (; d + 8 <= dim; d += 8) SLICE(8, 0, 1);
  if (d < dim) SLICE(dim - d, 1, 1);
#undef SLICE
}

static void weighted_sum_int8_neon(const kvedge_probabilities *p, const kvedge_tile *values,
                                   const kvedge_accumulators *to);

/* Tokens 32 at a time, each with weights of 16 bits. */
static void weighted_sum_by_32(const kvedge_probabilities *p, const kvedge_tile *values,
                               const kvedge_accumulators *to) {
  enum { TOKENS = 2 * KVEDGE_BLOCK };
  float ones[KVEDGE_QUERY_ROWS];
  kvedge_probabilities probabilities = *p;
  kvedge_tile tile = *values;
  kvedge_accumulators sums = *to;
  for (int i = 0; i < p->num_queries; i++) ones[i] = 1.0f;
  probabilities.planes = 2;
  for (int left = values->num_tokens; left > 0; left -= TOKENS, sums.rescale = ones) {
    tile.num_tokens = min_int(left, TOKENS);
    weighted_sum_int8_neon(&probabilities, &tile, &sums);
    probabilities.p += TOKENS, tile.scales += TOKENS, tile.blocks += 2;
    if (tile.next.blocks) tile.next.blocks += 2;
  }
}

static void weighted_sum_int8_neon(const kvedge_probabilities *p, const kvedge_tile *values,
                                   const kvedge_accumulators *to) {
  if (p->planes == 3 && p->by_32) {
    weighted_sum_by_32(p, values, to);
    return;
  }
  if (p->planes == 3) {
    sum_rows(p, values, KVEDGE_INT8, to);
    return;
  }
  const token_stretches stretches = stretches_of(values);
  for (int i = 0; i < p->num_queries; i += WEIGHTED_QUERIES) {
    const int count = min_int(p->num_queries - i, WEIGHTED_QUERIES);
    int16_weights weights;
    encode_int16(p->p + i * KVEDGE_TILE, values->scales, values->num_tokens, count, &weights);
#define SUM(count)                                                                                                     \
  sum_channels_int16(values, &stretches, count, &weights, i == 0, to->rescale + i, to->acc + i * to->stride, to->stride)
    switch (count) {
      case 1: SUM(1); break;
      case 2: SUM(2); break;
#if defined(__aarch64__)
      case 3: SUM(3); break;
      default: SUM(4);
#endif
    }
#undef SUM
  }
}
