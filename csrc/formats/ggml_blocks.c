/* q4_0, q5_0 and iq4_nl: ggml's bytes, of rows in memory of others alone. Each 32 elements of a row are a block: a scale,
 * which is a half and may be negative, and codes (kernels.h).
 *
 *   q4_0    18 bytes: scale, 16 bytes of codes;  value = (code - 8) * scale
 *   q5_0    22 bytes: scale, 4 bytes of fifth bits, 16 of codes;  value = (code + 16 * fifth - 16) * scale
 *   iq4_nl  18 bytes: as q4_0;  value = level[code] * scale
 */
#include <math.h>
#include <string.h>

#include "formats/scales.h"

enum { CHANNELS = KVEDGE_GROUP, CODES_BYTES = CHANNELS / 2, FIFTH_BYTES = CHANNELS / 8, SCALE_BYTES = 2 };

static float scale_of(const char *block) {
  uint16_t scale;
  memcpy(&scale, block, sizeof scale);
  return kvedge_float_of_half(scale);
}

static void decode(const kvedge_block_codes *of, const char *blocks, int64_t num_blocks, float *x) {
  const int codes_at = SCALE_BYTES + (of->fifth ? FIFTH_BYTES : 0);
  for (int64_t i = 0; i < num_blocks; i++, blocks += codes_at + CODES_BYTES, x += CHANNELS) {
    const uint8_t *fifth = (const uint8_t *)blocks + SCALE_BYTES, *codes = (const uint8_t *)blocks + codes_at;
    const float scale = scale_of(blocks);
    for (int j = 0; j < CHANNELS; j++) {
      const int level = of->levels[codes[j % CODES_BYTES] >> 4 * (j / CODES_BYTES) & 15];
      x[j] = (float)(level + (of->fifth ? of->fifth * (fifth[j / 8] >> j % 8 & 1) : 0)) * scale;
    }
  }
}

static float bound(const char *blocks, int64_t num_blocks, int block_bytes) {
  float largest = 0.0f;
  for (int64_t i = 0; i < num_blocks; i++, blocks += block_bytes) largest = fmaxf(largest, fabsf(scale_of(blocks)));
  return largest;
}

#define FORMAT(type, bytes, ...)                                                                                       \
  static const kvedge_block_codes codes_of_##type = {__VA_ARGS__};                                                     \
  static void decode_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,    \
                            float *x) {                                                                                \
    (void)scales;                                                                                                      \
    decode(&codes_of_##type, codes, num_rows * shape->num_groups, x);                                                  \
  }                                                                                                                    \
  static float bound_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {  \
    (void)scales;                                                                                                      \
    return bound(codes, num_rows * shape->num_groups, bytes);                                                          \
  }                                                                                                                    \
  static const kvedge_format_info format_##type = {.name = #type,                                                      \
                                                   .bits = 4,                                                          \
                                                   .row_tokens = 1,                                                    \
                                                   .group_channels = CHANNELS,                                         \
                                                   .group_bytes = bytes,                                               \
                                                   .codes_at = bytes - CODES_BYTES,                                    \
                                                   .codes = &codes_of_##type,                                          \
                                                   .decode = decode_##type,                                            \
                                                   .bound = bound_##type}
FORMAT(q4_0, 18, .levels = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7});
FORMAT(q5_0, 22, .levels = {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1}, .fifth = 16);
FORMAT(iq4_nl, 18, .levels = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});

const kvedge_format_info *kvedge_format_of_blocks(kvedge_format format) {
  switch ((int)format) {
    case KVEDGE_Q4_0: return &format_q4_0;
    case KVEDGE_Q5_0: return &format_q5_0;
    case KVEDGE_IQ4_NL: return &format_iq4_nl;
    default: return NULL;
  }
}
