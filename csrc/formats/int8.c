/* int8: a signed byte per element and a scale per group of a row, symmetric.
 *
 *   scale = max|x| / 127,  code = rint(x * (127 / max|x|)), ties to even,  value = code * scale
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats/scales.h"
#include "system/dispatch.h"

/* Below this, 127 / max|x| could overflow; such a row is first multiplied by 2^96, exactly. */
#define TINY_ROW 0x1p-96f
#define TINY_ROW_FACTOR 0x1p96f

static float bound_of_int8(const kvedge_row_shape *shape, float largest) {
  return kvedge_stored_scale_bound(shape, largest / 127.0f);
}

static void encode_group(kvedge_scale_type scale_type, const float *x, int n, int8_t *codes, void *scales, int group) {
  const kvedge_kernels *kernels = kvedge_active();
  float largest = kvedge_float_of_bits(kernels->rows->abs_max_bits(x, (size_t)n));
  float scale = largest / 127.0f, inverse;
  if (scale_type == KVEDGE_SCALE_FLOAT16) {
    uint16_t half = kvedge_float_to_half_up(scale);
    ((uint16_t *)scales)[group] = half;
    scale = kvedge_float_of_half(half);
    inverse = 1.0f / scale;
  } else {
    ((float *)scales)[group] = scale;
    inverse = 127.0f / largest;
  }
  if (scale == 0.0f) {
    memset(codes, 0, (size_t)n);
  } else if (scale_type == KVEDGE_SCALE_FLOAT32 && largest < TINY_ROW) {
    float enlarged[KVEDGE_MAX_HEAD_DIM];
    for (int d = 0; d < n; d++) enlarged[d] = x[d] * TINY_ROW_FACTOR;
    kernels->rows->quantize(enlarged, (size_t)n, 127.0f / (largest * TINY_ROW_FACTOR), codes);
  } else {
    kernels->rows->quantize(x, (size_t)n, inverse, codes);
  }
}

static void encode_row(const kvedge_row_shape *shape, const float *x, void *codes, void *scales) {
  for (int g = 0, start = 0; g < shape->num_groups; g++, start += shape->group_size) {
    int left = shape->dim - start;
    encode_group(shape->scale_type, x + start, left < shape->group_size ? left : shape->group_size,
                 (int8_t *)codes + start, scales, g);
  }
}

static void encode_int8(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  const size_t scale_bytes = kvedge_scale_row_bytes(shape);
  for (int64_t row = 0; row < num_rows; row++)
    encode_row(shape, x + row * shape->dim, (int8_t *)codes + row * shape->dim,
               (char *)scales + (size_t)row * scale_bytes);
}

static void decode_row(const kvedge_row_shape *shape, const void *codes, const void *scales, float *x) {
  int overflows = 0; /* 127 * (FLT_MAX / 127) may round to infinity */
  for (int g = 0, start = 0; g < shape->num_groups; g++, start += shape->group_size) {
    int left = shape->dim - start;
    float scale = kvedge_load_scale(scales, shape->scale_type, g);
    kvedge_active()->rows->dequantize((const int8_t *)codes + start,
                                      (size_t)(left < shape->group_size ? left : shape->group_size), scale, x + start);
    overflows |= scale > FLT_MAX / 128;
  }
  for (int d = 0; overflows && d < shape->dim; d++) x[d] = fminf(fmaxf(x[d], -FLT_MAX), FLT_MAX);
}

static void decode_int8(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,
                        float *x) {
  const size_t scale_bytes = kvedge_scale_row_bytes(shape);
  for (int64_t row = 0; row < num_rows; row++)
    decode_row(shape, (const int8_t *)codes + row * shape->dim, (const char *)scales + (size_t)row * scale_bytes,
               x + row * shape->dim);
}

static int is_valid_int8(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  const int8_t *code = codes;
  int lowest = 0;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) lowest = code[i] < lowest ? code[i] : lowest;
  return lowest >= -127 && kvedge_scales_are_valid(shape, scales, num_rows, FLT_MAX / 127.0f);
}

const kvedge_format_info kvedge_format_int8 = {.id = KVEDGE_INT8,
                                               .name = "int8",
                                               .file_type = "I8",
                                               .bits = 8,
                                               .has_scales = 1,
                                               .row_tokens = 1,
                                               .bound_of = bound_of_int8,
                                               .encode = encode_int8,
                                               .decode = decode_int8,
                                               .bound = kvedge_largest_scale,
                                               .is_valid = is_valid_int8};
