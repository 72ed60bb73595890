/* ggml's formats of 4 and 5 bits, for rows in memory of others alone. Each 32 elements of a row are a block: a scale, a half
 * that may be negative, and codes (kernels.h).
 *
 *   q4_0    18 bytes: scale, 16 bytes of codes;  value = (code - 8) * scale
 *   q4_1    20 bytes: scale, minimum, codes;  value = code * scale + minimum
 *   q5_0    22 bytes: scale, 4 bytes of fifth bits, codes;  value = (code + 16 * fifth - 16) * scale
 *   q5_1    24 bytes: scale, minimum, fifth bits, codes;  value = (code + 16 * fifth) * scale + minimum
 *   iq4_nl  18 bytes: as q4_0;  value = level[code] * scale
 */
#include <math.h>
#include <string.h>

#include "formats/format.h"
#include "formats/half.h"
#include "system/dispatch.h"

enum { CHANNELS = KVEDGE_GROUP, CODES_BYTES = CHANNELS / 2, FIFTH_BYTES = CHANNELS / 8 };

static float half_at(const char *p) {
  uint16_t half;
  memcpy(&half, p, sizeof half);
  return kvedge_float_of_half(half);
}

static void decode(const kvedge_block_codes *of, const char *blocks, int64_t num_blocks, float *x) {
  for (int64_t i = 0; i < num_blocks; i++, blocks += of->codes_at + CODES_BYTES, x += CHANNELS) {
    const uint8_t *codes = (const uint8_t *)blocks + of->codes_at, *fifth = codes - FIFTH_BYTES;
    const float scale = half_at(blocks), min = of->mins_at ? half_at(blocks + of->mins_at) : 0.0f;
    for (int j = 0; j < CHANNELS; j++) {
      const int level = of->levels[codes[j % CODES_BYTES] >> 4 * (j / CODES_BYTES) & 15];
      x[j] = (float)(level + (of->fifth ? of->fifth * (fifth[j / 8] >> j % 8 & 1) : 0)) * scale + min;
    }
  }
}

static float bound(const kvedge_block_codes *of, const char *blocks, int64_t num_blocks) {
  float largest = 0.0f;
  for (int64_t i = 0; i < num_blocks; i++, blocks += of->codes_at + CODES_BYTES) {
    largest = kvedge_larger(largest, fabsf(half_at(blocks)));
    if (of->mins_at)
      largest = kvedge_larger(largest, fabsf(half_at(blocks + of->mins_at)) / 127.0f); /* as the largest code */
  }
  return largest;
}

#define CODES_0_TO_15 {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define FORMAT(type, at, ...)                                                                                          \
  static const kvedge_block_codes codes_of_##type = {.codes_at = at, __VA_ARGS__};                                     \
  static void decode_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,    \
                            float *x) {                                                                                \
    (void)scales;                                                                                                      \
    decode(&codes_of_##type, codes, num_rows * shape->num_groups, x);                                                  \
  }                                                                                                                    \
  static float bound_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {  \
    (void)scales;                                                                                                      \
    return bound(&codes_of_##type, codes, num_rows * shape->num_groups);                                               \
  }                                                                                                                    \
  static const kvedge_format_info format_##type = {.name = #type,                                                      \
                                                   .bits = 4,                                                          \
                                                   .row_tokens = 1,                                                    \
                                                   .group_channels = CHANNELS,                                         \
                                                   .group_bytes = at + CODES_BYTES,                                    \
                                                   .codes_at = at,                                                     \
                                                   .codes = &codes_of_##type,                                          \
                                                   .decode = decode_##type,                                            \
                                                   .bound = bound_##type}
FORMAT(q4_0, 2, .levels = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7});
FORMAT(q4_1, 4, .mins_at = 2, .levels = CODES_0_TO_15);
FORMAT(q5_0, 6, .fifth = 16, .levels = {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1});
FORMAT(q5_1, 8, .mins_at = 2, .fifth = 16, .levels = CODES_0_TO_15);
FORMAT(iq4_nl, 2, .levels = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});

const kvedge_format_info *kvedge_format_of_blocks(kvedge_format format) {
  switch ((int)format) {
    case KVEDGE_Q4_0: return &format_q4_0;
    case KVEDGE_Q4_1: return &format_q4_1;
    case KVEDGE_Q5_0: return &format_q5_0;
    case KVEDGE_Q5_1: return &format_q5_1;
    case KVEDGE_IQ4_NL: return &format_iq4_nl;
    default: return NULL;
  }
}
