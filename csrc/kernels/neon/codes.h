/* What the NEON paths share that multiply rows of int8 as integers. Part of neon.c and neondot.c, after common.h. */

/* What the largest of a query's channels becomes. Three signed digits of 127 would be 8355711; one less, because the
 * product of a number and a rounded factor may end a little above. */
#define LARGEST_CODE 8355710.0f
/* Below, LARGEST_CODE / largest is no float any more: such a set counts as zeros. */
#define SMALLEST_ENCODED 0x1p-104f

KVEDGE_INLINE float divide_or_0(float a, float b, float largest) { return largest > SMALLEST_ENCODED ? a / b : 0.0f; }

/* A query's codes where 16-bit integers are multiplied: for 16 channels the two high planes as such integers, then
 * floats of the unit of all three, which take the place of these. */
enum { CODES_OF_16 = KVEDGE_CODE_BYTES * 16, FLOATS_AT = 32 };

/* Four channels of a query from d on, zeros past its last. */
KVEDGE_INLINE float32x4_t load_query_f32(const float *x, int dim, int d) {
  return dim - d >= 4 ? vld1q_f32(x + d) : load_part_f32(x + min_int(d, dim), dim - d);
}

/* The last n < 16 channels of four rows, with zeros after them. */
OUT_OF_LINE void gather_ends_16(const int8_t *rows, const ptrdiff_t offset[4], int n, int8_t *ends) { /* (4, 16) */
  for (int j = 0; j < 4; j++) {
    const int8_t *p = rows + offset[j];
    int8x8_t low = n < 8 ? vcreate_s8(load_below_8(p, n)) : vld1_s8(p);
    int8x8_t high = n < 8 ? vdup_n_s8(0) : vcreate_s8(load_below_8(p + 8, n - 8));
    vst1q_s8(ends + 16 * j, vcombine_s8(low, high));
  }
}
static const ptrdiff_t end_offset_16[4] = {0, 16, 32, 48};

/* WORK(count) for query rows i..i+count-1 of n, SCORE_QUERIES at a time. */
#if defined(__aarch64__)
#define BY_QUERIES(i, n, WORK)                                                                                         \
  for (int i = 0; i < (n); i += 4) switch ((n) - i) {                                                                  \
      case 1: WORK(1); break;                                                                                          \
      case 2: WORK(2); break;                                                                                          \
      case 3: WORK(3); break;                                                                                          \
      default: WORK(4);                                                                                                \
    }
#else
#define BY_QUERIES(i, n, WORK)                                                                                         \
  for (int i = 0; i < (n); i += 2) switch ((n) - i) {                                                                  \
      case 1: WORK(1); break;                                                                                          \
      default: WORK(2);                                                                                                \
    }
#endif

/* Weights, probabilities times scales, of a tile's tokens to the end of the last block; returns the largest. */
KVEDGE_INLINE float weigh_tokens(const float *p, const float *scales, int num_tokens, float *weights) {
  float32x4_t largest[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
  for (int t = 0; t < num_tokens; t += KVEDGE_BLOCK) /* p and scales are 0 from num_tokens to the end of the block */
    UNROLLED (j, KVEDGE_BLOCK / 4) {
      const float32x4_t four = vmulq_f32(vld1q_f32(p + t + 4 * j), vld1q_f32(scales + t + 4 * j));
      largest[j] = vmaxq_f32(largest[j], four);
      vst1q_f32(weights + t + 4 * j, four);
    }
  return max_across(vmaxq_f32(vmaxq_f32(largest[0], largest[1]), vmaxq_f32(largest[2], largest[3])));
}

/* Codes of 16 or 8 bits, small ones dithered. */
KVEDGE_INLINE int32x4_t round_dithered(float32x4_t x, float32x4_t dither) {
  const uint32x4_t small = vcltq_f32(x, vdupq_n_f32(KVEDGE_DITHERED));
  const float32x4_t added = vreinterpretq_f32_u32(vandq_u32(small, vreinterpretq_u32_f32(dither)));
  return round_to_i32(vaddq_f32(x, added));
}
