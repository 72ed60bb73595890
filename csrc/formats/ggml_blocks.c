/* q4_0, q5_0 and iq4_nl: ggml's bytes, of rows in memory of others alone. Each 32 elements of a row are a scale, which is a
 * half and may be negative, and codes; attention expands a tile of them to q8_0 at a time, exactly.
 *
 *   q4_0    18 bytes: scale, 16 bytes of codes (elements j and j + 16);  value = (code - 8) * scale
 *   q5_0    22 bytes: scale, 4 bytes of fifth bits (element j: bit j), 16 as q4_0's;  value = (code - 16) * scale
 *   iq4_nl  18 bytes: as q4_0;  value = level[code] * scale
 */
#include <math.h>
#include <string.h>

#include "formats/scales.h"

enum { CHANNELS = 32, HALF = CHANNELS / 2, SCALE_BYTES = 2, Q8_0_BYTES = SCALE_BYTES + CHANNELS };

/* A scale, which is made positive and smaller by a power of two where that is exact; codes are to be multiplied by `times`. */
static uint16_t positive_scale(const char *block, int shift, int *times) {
  enum { SIGN = 0x8000, EXPONENT = 10 };
  uint16_t scale;
  memcpy(&scale, block, sizeof scale);
  const int is_negative = scale >= SIGN, is_large = (scale & (SIGN - 1)) >> EXPONENT > shift;
  *times = (is_large ? 1 << shift : 1) * (is_negative ? -1 : 1);
  return (uint16_t)((scale & (SIGN - 1)) - (is_large ? shift << EXPONENT : 0));
}

/* Of larger codes scales are smaller, and so is the error that queries in 16 bits may have beside them. */
enum { SHIFT_OF_Q4_0 = 3, SHIFT_OF_Q5_0 = 2, SHIFT_OF_IQ4_NL = 0 };

static void expand_q4_0(const char *block, char *to) {
  int times;
  const uint16_t scale = positive_scale(block, SHIFT_OF_Q4_0, &times);
  const uint8_t *codes = (const uint8_t *)block + SCALE_BYTES;
  int8_t *out = (int8_t *)to + SCALE_BYTES;
  memcpy(to, &scale, sizeof scale);
  for (int j = 0; j < HALF; j++) out[j] = (int8_t)(((codes[j] & 15) - 8) * times);
  for (int j = 0; j < HALF; j++) out[HALF + j] = (int8_t)(((codes[j] >> 4) - 8) * times);
}

static void expand_q5_0(const char *block, char *to) {
  int times;
  const uint16_t scale = positive_scale(block, SHIFT_OF_Q5_0, &times);
  const uint8_t *fifth = (const uint8_t *)block + SCALE_BYTES, *codes = fifth + 4;
  int8_t *out = (int8_t *)to + SCALE_BYTES;
  memcpy(to, &scale, sizeof scale);
  for (int j = 0; j < CHANNELS; j++) {
    const int low = codes[j % HALF] >> 4 * (j / HALF) & 15, high = fifth[j / 8] >> j % 8 & 1;
    out[j] = (int8_t)((low + 16 * high - 16) * times);
  }
}

static void expand_iq4_nl(const char *block, char *to) {
  static const int8_t levels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  int times;
  const uint16_t scale = positive_scale(block, SHIFT_OF_IQ4_NL, &times);
  const uint8_t *codes = (const uint8_t *)block + SCALE_BYTES;
  int8_t *out = (int8_t *)to + SCALE_BYTES;
  memcpy(to, &scale, sizeof scale);
  for (int j = 0; j < HALF; j++) out[j] = (int8_t)(levels[codes[j] & 15] * times);
  for (int j = 0; j < HALF; j++) out[HALF + j] = (int8_t)(levels[codes[j] >> 4] * times);
}

/* ---- Expanded, all else is q8_0's ----------------------------------------------------------------- */

static void decode(const kvedge_row_shape *shape, const char *block, int block_bytes,
                   void (*expand)(const char *, char *), int64_t num_rows, float *x) {
  char expanded[Q8_0_BYTES];
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, block += block_bytes, x += CHANNELS) {
    kvedge_row_shape of_one = *shape;
    of_one.dim = CHANNELS, of_one.num_groups = 1;
    expand(block, expanded);
    kvedge_format_q8_0.decode(&of_one, expanded, NULL, 1, x);
  }
}

static float bound(const kvedge_row_shape *shape, const char *block, int block_bytes, int shift, int64_t num_rows) {
  float largest = 0.0f;
  int times;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, block += block_bytes)
    largest = fmaxf(largest, kvedge_half_to_float(positive_scale(block, shift, &times)));
  return largest;
}

#define FORMAT(type, code_bits, bytes, shift)                                                                          \
  static void decode_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,    \
                            float *x) {                                                                                \
    (void)scales;                                                                                                      \
    decode(shape, codes, bytes, expand_##type, num_rows, x);                                                           \
  }                                                                                                                    \
  static float bound_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {  \
    (void)scales;                                                                                                      \
    return bound(shape, codes, bytes, shift, num_rows);                                                                \
  }                                                                                                                    \
  static const kvedge_format_info format_##type = {.name = #type,                                                      \
                                                   .bits = code_bits,                                                  \
                                                   .row_tokens = 1,                                                    \
                                                   .group_channels = CHANNELS,                                         \
                                                   .group_bytes = bytes,                                               \
                                                   .codes_at = SCALE_BYTES,                                            \
                                                   .decode = decode_##type,                                            \
                                                   .bound = bound_##type,                                              \
                                                   .expand = expand_##type};
FORMAT(q4_0, 4, 18, SHIFT_OF_Q4_0)
FORMAT(q5_0, 5, 22, SHIFT_OF_Q5_0)
FORMAT(iq4_nl, 4, 18, SHIFT_OF_IQ4_NL)

const kvedge_format_info *kvedge_format_of_blocks(kvedge_format format) {
  switch ((int)format) {
    case KVEDGE_Q4_0: return &format_q4_0;
    case KVEDGE_Q5_0: return &format_q5_0;
    case KVEDGE_IQ4_NL: return &format_iq4_nl;
    default: return NULL;
  }
}
