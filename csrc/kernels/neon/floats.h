/* Rows of floats, or of codes that become floats. Part of neon.c and neondot.c, after common.h.
 *
 * Scores and weighted sums are one function for rows of every format, inlined for each: 8 channels become two registers
 * of floats (load_row_8), and the rest is one multiply-add per four.
 *
 * Keys: four tokens at a time, 8 channels of each, so that a load of a query's channels serves
 * four rows; a sum per token and query, joined across lanes at the end. Values: a row's elements
 * times one lane of four tokens' weights; the sums of 16 to 64 channels stay in registers over
 * the tile.
 */

/* Bytes of an element. */
KVEDGE_INLINE int element_size(const kvedge_format format) {
  return format == KVEDGE_FLOAT32 ? 4 : format == KVEDGE_FLOAT16 || format == KVEDGE_BFLOAT16 ? 2 : 1;
}

/* Eight halves as floats. On armv7 an instruction of the fp16 extension does it (with VFPv4:
 * Cortex-A7 and A15), by name because GCC has the intrinsic with -mfp16-format only. */
KVEDGE_INLINE void load_8_halves(uint16x8_t halves, float32x4_t out[2]) {
#if defined(__aarch64__)
  out[0] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves)));
  out[1] = vcvt_high_f32_f16(vreinterpretq_f16_u16(halves));
#elif defined(__ARM_FP) && (__ARM_FP & 2)
  __asm__("vcvt.f32.f16 %q0, %P1" : "=w"(out[0]) : "w"(vget_low_u16(halves)));
  __asm__("vcvt.f32.f16 %q0, %P1" : "=w"(out[1]) : "w"(vget_high_u16(halves)));
#else
  /* Exponent and mantissa in a float's place, brought to a float's bias. A subnormal half, m * 2^-24, is given the
   * exponent of 2^-14 as well, and loses 2^-14 again: the vector unit would take a denormal float for 0. */
  const uint16x4_t half[2] = {vget_low_u16(halves), vget_high_u16(halves)};
  for (int j = 0; j < 2; j++) {
    uint32x4_t magnitude = vmovl_u16(vand_u16(half[j], vdup_n_u16(0x7fff)));
    uint32x4_t sign = vshll_n_u16(vand_u16(half[j], vdup_n_u16(0x8000)), 15);
    uint32x4_t subnormal = vcltq_u32(magnitude, vdupq_n_u32(0x400));
    uint32x4_t bias = vaddq_u32(vdupq_n_u32(112u << 23), vandq_u32(subnormal, vdupq_n_u32(1u << 23)));
    float32x4_t value = vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(magnitude, 13), bias));
    value = vsubq_f32(value, vreinterpretq_f32_u32(vandq_u32(subnormal, vdupq_n_u32(113u << 23))));
    out[j] = vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), vaddq_u32(sign, sign)));
  }
#endif
}

/* Eight channels as floats; of formats without scales times `factor`, a power of two. */
KVEDGE_INLINE void load_row_8(const char *p, const kvedge_format format, float factor, float32x4_t out[2]) {
  if (format == KVEDGE_INT8) {
    int16x8_t wide = vmovl_s8(vld1_s8((const int8_t *)p));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    out[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
    return;
  }
  if (format == KVEDGE_FLOAT32) {
    out[0] = vld1q_f32((const float *)p);
    out[1] = vld1q_f32((const float *)p + 4);
  } else if (format == KVEDGE_FLOAT16) {
    load_8_halves(vld1q_u16((const uint16_t *)p), out);
  } else if (format == KVEDGE_FP8_E5M2) { /* the upper byte of a half */
    load_8_halves(vshlq_n_u16(vmovl_u8(vld1_u8((const uint8_t *)p)), 8), out);
  } else if (format == KVEDGE_FP8_E4M3) { /* as the digits of a half, 2^-8 of what they are; the sign in bit 15 */
    const uint16x8_t halves = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t *)p)), 7));
    load_8_halves(vandq_u16(halves, vdupq_n_u16(0xbfff)), out);
    factor *= 256.0f;
  } else { /* a bfloat16 is the upper half of a float */
    uint16x8x2_t floats = vzipq_u16(vdupq_n_u16(0), vld1q_u16((const uint16_t *)p));
    out[0] = vreinterpretq_f32_u16(floats.val[0]);
    out[1] = vreinterpretq_f32_u16(floats.val[1]);
  }
  out[0] = vmulq_n_f32(out[0], factor);
  out[1] = vmulq_n_f32(out[1], factor);
}

/* The last n < 8 channels of four rows, with zeros after them. */
enum { END_BYTES = 32 }; /* 8 floats */
OUT_OF_LINE void gather_ends(const char *rows, const ptrdiff_t offset[4], int n, int size,
                             char *ends) { /* (4, END_BYTES) */
  for (int j = 0; j < 4; j++, ends += END_BYTES) {
    if (size == 1) {
      uint64_t bytes = load_below_8((const int8_t *)rows + offset[j], n);
      memcpy(ends, &bytes, sizeof bytes);
    } else {
      memset(ends, 0, END_BYTES);
      memcpy(ends, rows + offset[j], (size_t)(n * size));
    }
  }
}
static const ptrdiff_t end_offset[4] = {0, END_BYTES, 2 * END_BYTES, 3 * END_BYTES};

/* sum[i][j] += values[i][0..7] . k[j][0..7] */
KVEDGE_INLINE void score_8_channels(const float *values, ptrdiff_t stride, const char *rows, const ptrdiff_t offset[4],
                                    const kvedge_format format, float factor, const int count,
                                    float32x4_t sum[SCORE_QUERIES][4]) {
  float32x4_t k[4][2];
  UNROLLED (j, 4) load_row_8(rows + offset[j], format, factor, k[j]);
  UNROLLED (i, count) {
    float32x4_t low = vld1q_f32(values + i * stride), high = vld1q_f32(values + i * stride + 4);
    UNROLLED (j, 4) {
      sum[i][j] = multiply_add_f32(sum[i][j], low, k[j][0]);
      sum[i][j] = multiply_add_f32(sum[i][j], high, k[j][1]);
    }
  }
}

/* Scores of four tokens for `count` queries from first on. ends (4, END_BYTES): the channels past the last multiple of
 * 8, if there are any. `scale` is for int8 only. */
KVEDGE_INLINE void score_four(const kvedge_query *q, int first, const int count, const kvedge_format format,
                              const char *rows, const ptrdiff_t offset[4], const char *ends, float factor,
                              float32x4_t scale, float *scores, int accumulate) {
  const float *values = q->values + first * q->stride; /* (count, stride), padded with zeros */
  ptrdiff_t stride = q->stride;
  float32x4_t sum[SCORE_QUERIES][4]; /* (count, 4 tokens) */
  int d = 0;
  UNROLLED (i, count)
    UNROLLED (j, 4) sum[i][j] = vdupq_n_f32(0.0f);
#define EIGHT(values, rows, offset) score_8_channels(values, stride, rows, offset, format, factor, count, sum)
  if (format == KVEDGE_INT8) { /* among the codes: int16.h */
    stride = q->stride / 16 * (CODES_OF_16 / 4);
    values = (const float *)(q->quantized + FLOATS_AT) + first * stride;
    for (; d + 16 <= q->dim; d += 16, values += CODES_OF_16 / 4) {
      EIGHT(values, rows + d, offset);
      EIGHT(values + 8, rows + d + 8, offset);
    }
  }
  for (; d + 8 <= q->dim; d += 8, values += 8) EIGHT(values, rows + d * element_size(format), offset);
  if (d < q->dim) EIGHT(values, ends, end_offset);
#undef EIGHT
  UNROLLED (i, count) {
    float32x4_t score = sum_each_f32(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    if (format == KVEDGE_INT8) score = vmulq_f32(vmulq_n_f32(score, q->scale[(first + i) * q->scale_stride]), scale);
    store_scores(score, accumulate, scores + (first + i) * KVEDGE_TILE);
  }
}

KVEDGE_INLINE void score_rows(const kvedge_query *q, const kvedge_tile *keys, const kvedge_format format, float *scores,
                              int accumulate) {
  const int size = element_size(format), whole = q->dim / 8 * 8;
  const ptrdiff_t stride = keys->token_stride;
  ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
  for (int first = 0; first < keys->num_tokens; first += KVEDGE_BLOCK) {
    const char *rows = kvedge_tile_block(keys, first);
    const int end = min_int(first + KVEDGE_BLOCK, keys->num_tokens);
    prefetch_cursor next = prefetch_of_block(keys, first);
    for (int t = first; t < end; t += 4, rows += 4 * stride) {
      const int left = end - t;
      char ends[4 * END_BYTES];
      float32x4_t scale = vdupq_n_f32(1.0f);
      if (left < 4) row_offsets(left, stride, offset);
      prefetch_next(&next, min_int(left, 4) * size * q->dim);
      if (whole < q->dim) gather_ends(rows + whole * size, offset, q->dim - whole, size, ends);
      if (format == KVEDGE_INT8) scale = vld1q_f32(keys->scales + t);
      for (int i = 0; i < q->num_queries; i += SCORE_QUERIES) {
#define FOUR(count) score_four(q, i, count, format, rows, offset, ends, keys->factor, scale, scores + t, accumulate)
        switch (min_int(q->num_queries - i, SCORE_QUERIES)) {
          case 1: FOUR(1); break;
          case 2: FOUR(2); break;
#if defined(__aarch64__)
          case 3: FOUR(3); break;
          default: FOUR(4);
#endif
        }
#undef FOUR
      }
    }
  }
}

/* The sums of 8 * eights channels from `channel` on for `count` query rows, held in registers over the tile. Of a
 * partial slice (eights is 1) only the first `channels` exist. */
KVEDGE_INLINE void sum_slice(const kvedge_tile *values, const kvedge_format format, int channel, int channels,
                             const int partial, const float *weights, const int count, const int eights,
                             const int prefetch, const float *rescale, float *acc, ptrdiff_t acc_stride) {
  const int size = element_size(format);
  const ptrdiff_t stride = values->token_stride;
  const float factor = values->factor;
  float32x4_t sum[MOST_SUMS]; /* (count, 2 * eights) */
  ptrdiff_t offset[4] = {0, stride, 2 * stride, 3 * stride};
  UNROLLED (s, 2 * eights * count) sum[s] = vdupq_n_f32(0.0f);
  const char *rows = NULL, *next = NULL;
  for (int t = 0; t < values->num_tokens; t += 4, rows += 4 * stride) {
    if (t % KVEDGE_BLOCK == 0) {
      rows = kvedge_tile_block(values, t) + channel * size;
      next = prefetch ? prefetch_of_slice(values, t, channel * size) : NULL;
    }
    const char *v = rows;
    const ptrdiff_t *at = offset;
    char ends[4 * END_BYTES];
    if (values->num_tokens - t < 4) row_offsets(values->num_tokens - t, stride, offset);
    if (next) next = prefetch_slice(next, t, (partial ? channels : 8 * eights) * size, partial);
    if (partial) {
      gather_ends(rows, offset, channels, size, ends);
      v = ends;
      at = end_offset;
    }
    float32x4_t weight[WEIGHTED_QUERIES]; /* of four tokens */
    UNROLLED (i, count) weight[i] = vld1q_f32(weights + i * KVEDGE_TILE + t);
#define TOKEN(j)                                                                                                       \
  UNROLLED (e, eights) {                                                                                               \
    float32x4_t row[2];                                                                                                \
    load_row_8(v + at[j] + 8 * e * size, format, factor, row);                                                         \
    UNROLLED (i, count) {                                                                                              \
      float32x4_t *s = sum + 2 * (eights * i + e);                                                                     \
      s[0] = MULTIPLY_ADD_LANE_F32(s[0], row[0], weight[i], j);                                                        \
      s[1] = MULTIPLY_ADD_LANE_F32(s[1], row[1], weight[i], j);                                                        \
    }                                                                                                                  \
  }
    TOKEN(0) TOKEN(1) TOKEN(2) TOKEN(3)
#undef TOKEN
  }
  UNROLLED (i, count)
    add_to_acc(sum + 2 * eights * i, 2 * eights, rescale[i], acc + channel + i * acc_stride, channels);
}

/* All channels, for `count` query rows of weights (count, KVEDGE_TILE), 0 from num_tokens on. */
KVEDGE_INLINE void sum_channels(const kvedge_tile *values, const kvedge_format format, const int count,
                                const float *weights, int prefetch, const float *rescale, float *acc,
                                ptrdiff_t acc_stride) {
  const int most = MOST_SUMS / 2 / (count == 3 ? 4 : count), dim = values->dim;
  int d = 0;
#define SLICE(channels, partial, eights)                                                                               \
  sum_slice(values, format, d, channels, partial, weights, count, eights, prefetch, rescale, acc, acc_stride)
  for (; d + 8 * most <= dim; d += 8 * most) SLICE(8 * most, 0, most);
  for (; d + 8 <= dim; d += 8) SLICE(8, 0, 1);
  if (d < dim) SLICE(dim - d, 1, 1);
#undef SLICE
}

KVEDGE_INLINE void sum_rows(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_format format,
                            const kvedge_accumulators *to) {
  for (int i = 0; i < p->num_queries; i += WEIGHTED_QUERIES) {
    const int count = min_int(p->num_queries - i, WEIGHTED_QUERIES);
    const float *weights = p->p + i * KVEDGE_TILE;
    float scaled[WEIGHTED_QUERIES * KVEDGE_TILE];
    if (format == KVEDGE_INT8) {
      for (int j = 0; j < count; j++)
        for (int t = 0; t < values->num_tokens; t += 4) /* p and scales are 0 up to the block's end */
          vst1q_f32(scaled + j * KVEDGE_TILE + t,
                    vmulq_f32(vld1q_f32(weights + j * KVEDGE_TILE + t), vld1q_f32(values->scales + t)));
      weights = scaled;
    }
#define QUERIES(count)                                                                                                 \
  sum_channels(values, format, count, weights, i == 0, to->rescale + i, to->acc + i * to->stride, to->stride)
    switch (count) {
      case 1: QUERIES(1); break;
      case 2: QUERIES(2); break;
#if defined(__aarch64__)
      case 3: QUERIES(3); break;
      default: QUERIES(4);
#endif
    }
#undef QUERIES
  }
}

/* Not inlined anywhere but where the format is a constant. */
#define KVEDGE_NEON_KERNELS(name, format)                                                                              \
  static void scores_##name##_neon(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {    \
    score_rows(q, keys, format, scores, accumulate);                                                                   \
  }                                                                                                                    \
  static void weighted_sum_##name##_neon(const kvedge_probabilities *p, const kvedge_tile *values,                     \
                                         const kvedge_accumulators *to) {                                              \
    sum_rows(p, values, format, to);                                                                                   \
  }
#define KVEDGE_NEON_CELL(name) {.scores = scores_##name##_neon, .weighted_sum = weighted_sum_##name##_neon}

KVEDGE_NEON_KERNELS(float32, KVEDGE_FLOAT32)
KVEDGE_NEON_KERNELS(float16, KVEDGE_FLOAT16)
KVEDGE_NEON_KERNELS(bfloat16, KVEDGE_BFLOAT16)
KVEDGE_NEON_KERNELS(fp8_e4m3, KVEDGE_FP8_E4M3)
KVEDGE_NEON_KERNELS(fp8_e5m2, KVEDGE_FP8_E5M2)
