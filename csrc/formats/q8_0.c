/* q8_0: ggml's bytes, 34 for each 32 elements of a row: a scale as a half, then 32 signed bytes.
 *
 *   d = max|x| / 127,  code = round(x * (1 / d)), halves away from 0,  scale = d to nearest,  value = code * scale
 *
 * The same bytes as ggml's quantize_row_q8_0_ref makes. Codes are of the scale before it is rounded, as there.
 */
#include <math.h>
#include <string.h>

#include "formats/scales.h"
#include "system/dispatch.h"

enum { CHANNELS = 32, CODES_AT = 2, GROUP_BYTES = CODES_AT + CHANNELS };

static float bound_of_q8_0(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  const float scale = largest / 127.0f;
  return scale >= KVEDGE_HALF_OVERFLOW ? INFINITY : kvedge_float_of_half(kvedge_half_of_float(scale));
}

static void encode_group(const float *x, char *group) {
  const float largest = kvedge_float_of_bits(kvedge_active()->rows->abs_max_bits(x, CHANNELS)), d = largest / 127.0f;
  const uint16_t scale = kvedge_half_of_float(d);
  const float inverse = 1.0f / d;
  int8_t codes[CHANNELS] = {0};
  if (isfinite(inverse)) /* else all elements are 0, or next to it, where the scale is 0 */
    for (int i = 0; i < CHANNELS; i++) {
      const int halves = (int)(x[i] * inverse * 2.0f); /* toward 0 */
      codes[i] = (int8_t)((halves + (halves < 0 ? -1 : 1)) / 2);
    }
  memcpy(group, &scale, sizeof scale);
  memcpy(group + CODES_AT, codes, sizeof codes);
}

static void encode_q8_0(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)scales;
  char *group = codes;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, x += CHANNELS, group += GROUP_BYTES)
    encode_group(x, group);
}

static float scale_of(const char *group) {
  uint16_t scale;
  memcpy(&scale, group, sizeof scale); /* rows of a foreign cache may lie at any address */
  return kvedge_float_of_half(scale);
}

static void decode_q8_0(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,
                        float *x) {
  (void)scales;
  const char *group = codes;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, x += CHANNELS, group += GROUP_BYTES)
    kvedge_active()->rows->dequantize((const int8_t *)group + CODES_AT, CHANNELS, scale_of(group), x);
}

static float bound_q8_0(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  const char *group = codes;
  float largest = 0.0f;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, group += GROUP_BYTES)
    largest = kvedge_larger(largest, scale_of(group));
  return largest;
}

static int is_valid_q8_0(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  const char *group = codes;
  int lowest = 0;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++, group += GROUP_BYTES) {
    uint16_t scale;
    memcpy(&scale, group, sizeof scale);
    if (scale >= 0x7c00u) return 0; /* infinite, not a number, or with the sign set */
    for (int c = 0; c < CHANNELS; c++) {
      const int code = (int8_t)group[CODES_AT + c];
      lowest = code < lowest ? code : lowest;
    }
  }
  return lowest >= -127;
}

const kvedge_format_info kvedge_format_q8_0 = {.id = KVEDGE_Q8_0,
                                               .name = "q8_0",
                                               .file_type = "U8",
                                               .bits = 8,
                                               .row_tokens = 1,
                                               .group_channels = CHANNELS,
                                               .group_bytes = GROUP_BYTES,
                                               .codes_at = CODES_AT,
                                               .bound_of = bound_of_q8_0,
                                               .encode = encode_q8_0,
                                               .decode = decode_q8_0,
                                               .bound = bound_q8_0,
                                               .is_valid = is_valid_q8_0};
