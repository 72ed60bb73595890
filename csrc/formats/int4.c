/* int4: each element is one of 16 levels, and a scale per group of a row.
 *
 *   t     = x * (127 / max|x|)                  over the group
 *   code  = number of boundaries <= t           boundaries lie half way between levels; 0 is one
 *   scale = sum(x level) / sum(level^2)         least squares, rounded to the scale's type; 0 for a group of zeros
 *   value = level[code] * scale
 *
 * All in double, each sum by halves, so that every machine stores the same bytes. Two codes to a byte, the first one in
 * its lower half; a row of an odd number ends with a half byte of 0. The levels are int4_levels.h's.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats/int4_levels.h"
#include "formats/scales.h"

/* An element is at most twice its level times max|x| / 127 (between the two smallest levels, 6 and 18), so a scale is
 * at most twice that; the rest is for rounding. */
#define LARGEST_SCALE 2.1f

static float bound_of_int4(const kvedge_row_shape *shape, float largest) {
  return kvedge_stored_scale_bound(shape, LARGEST_SCALE * (largest / 127.0f));
}

/* Bisection without branches: the boundary below a code is half the sum of its level and the one before. */
static inline unsigned nearest_code(double t) {
  unsigned code = 0;
  for (unsigned step = 8; step > 0; step /= 2) {
    const int twice = kvedge_int4_levels[code + step - 1] + kvedge_int4_levels[code + step];
    code += step & (0u - (unsigned)(0.5 * twice <= t));
  }
  return code;
}

/* Returns the group's scale. */
static float encode_group(const float *x, int n, uint8_t *codes) {
  double terms[KVEDGE_MAX_HEAD_DIM];
  float largest = 0.0f;
  int squares = 0;
  for (int d = 0; d < n; d++) largest = fmaxf(largest, fabsf(x[d]));
  const double inverse = largest > 0.0f ? 127.0 / (double)largest : 0.0;
  for (int d = 0; d < n; d++) {
    codes[d] = (uint8_t)nearest_code((double)x[d] * inverse);
    const int level = kvedge_int4_levels[codes[d]];
    terms[d] = (double)x[d] * level;
    squares += level * level;
  }
  const double product = kvedge_sum_by_halves(terms, n);
  return product > 0.0 ? (float)(product / squares) : 0.0f;
}

static void encode_int4(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  const size_t row_bytes = kvedge_packed_bytes(shape->dim, 4), scale_bytes = kvedge_scale_row_bytes(shape);
  uint8_t room[KVEDGE_MAX_HEAD_DIM + 1];
  for (int64_t row = 0; row < num_rows; row++, x += shape->dim) {
    for (int g = 0, start = 0; g < shape->num_groups; g++, start += shape->group_size) {
      const int left = shape->dim - start, n = left < shape->group_size ? left : shape->group_size;
      kvedge_store_scale(shape->scale_type, (char *)scales + (size_t)row * scale_bytes, g,
                         encode_group(x + start, n, room + start));
    }
    room[shape->dim] = 0;
    uint8_t *out = (uint8_t *)codes + (size_t)row * row_bytes;
    for (size_t i = 0; i < row_bytes; i++) out[i] = (uint8_t)(room[2 * i] | room[2 * i + 1] << 4);
  }
}

static void decode_int4(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,
                        float *x) {
  const size_t row_bytes = kvedge_packed_bytes(shape->dim, 4), scale_bytes = kvedge_scale_row_bytes(shape);
  for (int64_t row = 0; row < num_rows; row++, x += shape->dim) {
    const uint8_t *in = (const uint8_t *)codes + (size_t)row * row_bytes;
    const void *row_scales = (const char *)scales + (size_t)row * scale_bytes;
    for (int g = 0, d = 0; g < shape->num_groups; g++) {
      const float scale = kvedge_load_scale(row_scales, shape->scale_type, g);
      const int stop = d + shape->group_size < shape->dim ? d + shape->group_size : shape->dim;
      const int overflows = scale > FLT_MAX / 128; /* the product may round to infinity */
      for (; d < stop; d++) {
        const float value = kvedge_int4_levels[in[d / 2] >> 4 * (d % 2) & 15] * scale;
        x[d] = overflows ? fminf(fmaxf(value, -FLT_MAX), FLT_MAX) : value;
      }
    }
  }
}

static int is_valid_int4(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  const size_t row_bytes = kvedge_packed_bytes(shape->dim, 4);
  for (int64_t row = 0; shape->dim % 2 && row < num_rows; row++)
    if (((const uint8_t *)codes)[(size_t)(row + 1) * row_bytes - 1] >> 4) return 0;
  return kvedge_scales_are_valid(shape, scales, num_rows, LARGEST_SCALE * (FLT_MAX / 127.0f));
}

const kvedge_format_info kvedge_format_int4 = {.id = KVEDGE_INT4,
                                               .name = "int4",
                                               .file_type = "U8",
                                               .bits = 4,
                                               .product_bits = 8,
                                               .has_scales = 1,
                                               .row_tokens = 1,
                                               .bound_of = bound_of_int4,
                                               .encode = encode_int4,
                                               .decode = decode_int4,
                                               .bound = kvedge_largest_scale,
                                               .is_valid = is_valid_int4};
