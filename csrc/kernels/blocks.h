/* Rows in ggml's blocks by the kernels of int8, as kernels/int4.h has them for int4, which a path includes before: a block's
 * levels are integers of 8 bits. Memory is read once, as blocks.
 */
enum { BLOCK_CODES = KVEDGE_GROUP / 2, FIFTH_BYTES = KVEDGE_GROUP / 8 }; /* bytes */

/* -1 where the scale of the block whose codes these are is negative, else 0. */
static inline int sign_of_block(const kvedge_block_codes *of, const uint8_t *codes) {
  return -(codes[1 - of->codes_at] >> 7);
}

/* The levels of a block, times -1 if `sign` is -1 and not 0, to out, which has KVEDGE_GROUP. */
static inline void widen_block(const kvedge_block_codes *of, const uint8_t *codes, int sign, int8_t *out) {
#if defined(KVEDGE_KERNELS_X86_H)
  const __m128i levels = _mm_loadu_si128((const __m128i *)of->levels), low = _mm_set1_epi8(15);
  const __m128i bits = _mm_set1_epi64x((long long)0x8040201008040201u), signs = _mm_set1_epi8((char)sign);
  const __m128i both = _mm_loadu_si128((const __m128i *)codes);
  __m128i half[2] = {_mm_shuffle_epi8(levels, _mm_and_si128(both, low)),
                     _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(both, 4), low))};
  for (int h = 0; h < 2; h++) {
    if (of->fifth) {
      const uint8_t *fifth = codes - FIFTH_BYTES + 2 * h;
      const __m128i of_half = _mm_unpacklo_epi64(_mm_set1_epi8((char)fifth[0]), _mm_set1_epi8((char)fifth[1]));
      const __m128i is_set = _mm_cmpeq_epi8(_mm_and_si128(of_half, bits), bits);
      half[h] = _mm_add_epi8(half[h], _mm_and_si128(is_set, _mm_set1_epi8(of->fifth)));
    }
    _mm_storeu_si128((__m128i *)(out + BLOCK_CODES * h), _mm_sub_epi8(_mm_xor_si128(half[h], signs), signs));
  }
#elif defined(KVEDGE_KERNELS_NEON_COMMON_H) && defined(__aarch64__)
  static const uint8_t bits[] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const int8x16_t levels = vld1q_s8(of->levels), signs = vdupq_n_s8((int8_t)sign);
  const uint8x16_t both = vld1q_u8(codes);
  int8x16_t half[2] = {vqtbl1q_s8(levels, vandq_u8(both, vdupq_n_u8(15))), vqtbl1q_s8(levels, vshrq_n_u8(both, 4))};
  for (int h = 0; h < 2; h++) {
    if (of->fifth) {
      const uint8_t *fifth = codes - FIFTH_BYTES + 2 * h;
      const uint8x16_t of_half = vcombine_u8(vdup_n_u8(fifth[0]), vdup_n_u8(fifth[1]));
      const int8x16_t is_set = vreinterpretq_s8_u8(vtstq_u8(of_half, vld1q_u8(bits)));
      half[h] = vaddq_s8(half[h], vandq_s8(is_set, vdupq_n_s8(of->fifth)));
    }
    vst1q_s8(out + BLOCK_CODES * h, vsubq_s8(veorq_s8(half[h], signs), signs));
  }
#else
  for (int j = 0; j < KVEDGE_GROUP; j++) {
    const int code = codes[j % BLOCK_CODES] >> 4 * (j / BLOCK_CODES) & 15;
    const int fifth = of->fifth ? of->fifth * ((codes - FIFTH_BYTES)[j / 8] >> j % 8 & 1) : 0;
    out[j] = (int8_t)(((of->levels[code] + fifth) ^ sign) - sign);
  }
#endif
}

/* Groups first_group.. of tokens first.. of a tile, as a tile of int8 whose groups lie side by side. What is to be
 * prefetched with them is with the first group. */
static inline kvedge_tile widen_blocks(const kvedge_tile *from, int first, int num_tokens, int first_group,
                                       int num_groups, int by_sign, wide_rows *room) {
  const int width = num_groups * KVEDGE_GROUP;
  const ptrdiff_t row_bytes = from->dim / KVEDGE_GROUP * from->group_stride;
  int8_t *out = room->rows;
  for (int t = 0; t < num_tokens; t++) {
    const uint8_t *codes = (const uint8_t *)kvedge_tile_row(from, first + t) + first_group * from->group_stride;
    if (t % KVEDGE_BLOCK == 0) room->blocks[t / KVEDGE_BLOCK] = (const char *)out;
    for (int g = 0; g < num_groups; g++, codes += from->group_stride, out += KVEDGE_GROUP)
      widen_block(from->codes, codes, by_sign ? sign_of_block(from->codes, codes) : 0, out);
    if (from->next.blocks && first_group == 0)
      prefetch_lines_of(from, (first + t) / KVEDGE_BLOCK, (int)row_bytes, (first + t) % KVEDGE_BLOCK, KVEDGE_BLOCK);
  }
  return (kvedge_tile){.blocks = room->blocks,
                       .token_stride = width,
                       .group_stride = KVEDGE_GROUP,
                       .num_tokens = num_tokens,
                       .dim = width,
                       .scales = from->scales + first_group * from->scale_stride + first,
                       .scale_stride = from->scale_stride};
}

static inline void scores_of_blocks(const kvedge_cell *int8, const kvedge_query *q, const kvedge_tile *keys,
                                    float *scores) {
  const int num_groups = keys->dim / KVEDGE_GROUP, step = wide_step(keys->dim);
  kvedge_query of_tile = *q;
  wide_rows *room = kvedge_take_scratch(&of_tile.scratch, sizeof *room);
  for (int t = 0; t < keys->num_tokens; t += step) {
    const int left = keys->num_tokens - t;
    const kvedge_tile tile = widen_blocks(keys, t, left < step ? left : step, 0, num_groups, 0, room);
    if (num_groups > 1 && int8->scores_of_groups) int8->scores_of_groups(&of_tile, &tile, scores + t);
    else
      for (int g = 0; g < num_groups; g++) {
        const kvedge_query of_group = kvedge_query_group(&of_tile, g);
        const kvedge_tile group = kvedge_tile_group(&tile, g);
        int8->scores(&of_group, &group, scores + t, g > 0);
      }
  }
}

static inline void weighted_sum_of_blocks(const kvedge_cell *int8, const kvedge_probabilities *p,
                                          const kvedge_tile *values, const kvedge_accumulators *to) {
  const int end = (values->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
  kvedge_probabilities of_tile = *p;
  wide_rows *room = kvedge_take_scratch(&of_tile.scratch, sizeof *room);
  float scales[KVEDGE_TILE]; /* their magnitudes */
  for (int g = 0; g < values->dim / KVEDGE_GROUP; g++) {
    kvedge_tile group = widen_blocks(values, 0, values->num_tokens, g, 1, 1, room);
    for (int t = 0; t < end; t++) scales[t] = fabsf(group.scales[t]);
    group.scales = scales;
    const kvedge_accumulators sums = {to->acc + g * KVEDGE_GROUP, to->stride, to->rescale};
    int8->weighted_sum(&of_tile, &group, &sums);
  }
}

/* Cells of them, beside one of int8. */
#define KVEDGE_BLOCKS_FUNCTIONS(isa, ...)                                                                              \
  static const kvedge_cell int8_of_##isa = __VA_ARGS__;                                                                \
  static void scores_of_blocks_##isa(const kvedge_query *q, const kvedge_tile *keys, float *scores) {                  \
    scores_of_blocks(&int8_of_##isa, q, keys, scores);                                                                 \
  }                                                                                                                    \
  static void weighted_sum_of_blocks_##isa(const kvedge_probabilities *p, const kvedge_tile *values,                   \
                                           const kvedge_accumulators *to) {                                            \
    weighted_sum_of_blocks(&int8_of_##isa, p, values, to);                                                             \
  }
#define KVEDGE_BLOCKS_CELL(isa, encode)                                                                                \
  {.encode_query = encode,                                                                                             \
   .scores_of_groups = scores_of_blocks_##isa,                                                                         \
   .weighted_sum_of_groups = weighted_sum_of_blocks_##isa}
