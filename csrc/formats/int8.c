/* Rows of a layer, from float to storage and back: the same bytes on every path.
 *
 * INT8, symmetric: scale = max|x| / 127, code = rint(x * (127 / max|x|)), ties to even.
 */
#include <float.h>
#include <math.h>

#include "system/dispatch.h"
#include "formats/half.h"
#include "store/layer.h"

enum { MAX_HEAD_DIM = 1024 };

/* Below this, 127 / max|x| could overflow; such a row is first multiplied by 2^96, exactly. */
#define TINY_ROW 0x1p-96f
#define TINY_ROW_FACTOR 0x1p96f

static void subtract(const float *x, const float *offset, int n, float *out) {
  for (int d = 0; d < n; d++) out[d] = x[d] - offset[d];
}

/* x - offset in `buffer`, or x itself where there is no offset. `row` counts (token, head) pairs. */
static const float *centred(const kvedge_layer *layer, const float *rows, int64_t row,
                            const float *offset, float buffer[MAX_HEAD_DIM]) {
  int dim = layer->config.head_dim;
  const float *x = rows + row * dim;
  if (!offset) return x;
  subtract(x, offset + row % layer->config.num_kv_heads * dim, dim, buffer);
  return buffer;
}

kvedge_status kvedge_rows_check(const kvedge_layer *layer, const float *rows, int64_t num_tokens,
                                const float *offset, float *largest) {
  const kvedge_kernels *kernels = kvedge_active();
  int64_t num_rows = num_tokens * layer->config.num_kv_heads;
  int dim = layer->config.head_dim;
  uint32_t bits = 0;
  if (!offset) {
    bits = kernels->abs_max_bits(rows, (size_t)(num_rows * dim));
  } else {
    float buffer[MAX_HEAD_DIM];
    for (int64_t row = 0; row < num_rows; row++) {
      uint32_t row_bits = kernels->abs_max_bits(centred(layer, rows, row, offset, buffer), (size_t)dim);
      bits = row_bits > bits ? row_bits : bits;
    }
  }
  if (bits >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
  *largest = kvedge_float_of_bits(bits);
  if (layer->config.format == KVEDGE_INT8) {
    *largest /= 127.0f;
    if (layer->config.scale_type == KVEDGE_SCALE_FLOAT16) {
      if (*largest > KVEDGE_HALF_MAX) return KVEDGE_ERROR_SCALE;
      *largest = kvedge_half_to_float(kvedge_float_to_half_up(*largest));
    }
  }
  return KVEDGE_OK;
}

/* Quantizes one group of a row and stores its scale as scale number `index`. */
static void store_group(const kvedge_kernels *kernels, kvedge_scale_type scale_type, const float *x,
                        int n, int8_t *codes, void *scales, int64_t index) {
  float largest = kvedge_float_of_bits(kernels->abs_max_bits(x, (size_t)n));
  float scale = largest / 127.0f, inverse;
  if (scale_type == KVEDGE_SCALE_FLOAT16) {
    uint16_t half = kvedge_float_to_half_up(scale);
    ((uint16_t *)scales)[index] = half;
    scale = kvedge_half_to_float(half);
    inverse = 1.0f / scale;
  } else {
    ((float *)scales)[index] = scale;
    inverse = 127.0f / largest;
  }
  if (scale == 0.0f) {
    memset(codes, 0, (size_t)n);
  } else if (scale_type == KVEDGE_SCALE_FLOAT32 && largest < TINY_ROW) {
    float enlarged[MAX_HEAD_DIM];
    for (int d = 0; d < n; d++) enlarged[d] = x[d] * TINY_ROW_FACTOR;
    kernels->quantize(enlarged, (size_t)n, 127.0f / (largest * TINY_ROW_FACTOR), codes);
  } else {
    kernels->quantize(x, (size_t)n, inverse, codes);
  }
}

void kvedge_rows_store(const kvedge_layer *layer, const float *rows, int64_t num_tokens,
                       const float *offset, void *codes, void *scales, int64_t position) {
  const kvedge_kernels *kernels = kvedge_active();
  const kvedge_layer_config *config = &layer->config;
  int dim = config->head_dim, group = config->group_size, num_groups = layer->num_groups;
  int64_t num_rows = num_tokens * config->num_kv_heads, first = position * config->num_kv_heads;
  if (config->format == KVEDGE_FLOAT32) {
    /* rows may be a layer's own, and lie where they are going to */
    if (num_rows > 0) memmove((float *)codes + first * dim, rows, (size_t)(num_rows * dim) * sizeof(float));
    return;
  }
  float buffer[MAX_HEAD_DIM];
  for (int64_t row = 0; row < num_rows; row++) {
    const float *x = centred(layer, rows, row, offset, buffer);
    int8_t *out = (int8_t *)codes + (first + row) * dim;
    for (int g = 0; g < num_groups; g++) {
      int start = g * group, n = dim - start < group ? dim - start : group;
      store_group(kernels, config->scale_type, x + start, n, out + start, scales,
                  (first + row) * num_groups + g);
    }
  }
}

static void clamp_to_finite(float *x, int n) {
  for (int d = 0; d < n; d++) x[d] = x[d] > FLT_MAX ? FLT_MAX : x[d] < -FLT_MAX ? -FLT_MAX : x[d];
}

void kvedge_rows_load(const kvedge_layer *layer, const void *codes, const void *scales,
                      const float *offset, int64_t start, int64_t stop, float *out) {
  const kvedge_kernels *kernels = kvedge_active();
  const kvedge_layer_config *config = &layer->config;
  int dim = config->head_dim, group = config->group_size, num_groups = layer->num_groups;
  int64_t first = start * config->num_kv_heads, num_rows = (stop - start) * config->num_kv_heads;
  if (config->format == KVEDGE_FLOAT32) {
    memcpy(out, (const float *)codes + first * dim, (size_t)(num_rows * dim) * sizeof(float));
    return;
  }
  for (int64_t row = 0; row < num_rows; row++, out += dim) {
    const int8_t *in = (const int8_t *)codes + (first + row) * dim;
    int overflows = 0; /* 127 * (FLT_MAX / 127) may round to infinity */
    for (int g = 0; g < num_groups; g++) {
      int begin = g * group, n = dim - begin < group ? dim - begin : group;
      float scale = kvedge_load_scale(scales, config->scale_type, (first + row) * num_groups + g);
      kernels->dequantize(in + begin, (size_t)n, scale, out + begin);
      overflows |= scale > FLT_MAX / 128;
    }
    if (overflows) clamp_to_finite(out, dim);
    if (offset) {
      const float *added = offset + row % config->num_kv_heads * dim;
      for (int d = 0; d < dim; d++) out[d] += added[d];
      clamp_to_finite(out, dim);
    }
  }
}

float kvedge_rows_bound(const kvedge_layer *layer, const void *codes, const void *scales, int64_t start,
                        int64_t stop) {
  const kvedge_layer_config *config = &layer->config;
  if (config->format == KVEDGE_FLOAT32) {
    int64_t token = (int64_t)config->num_kv_heads * config->head_dim;
    const float *rows = (const float *)codes + start * token;
    return kvedge_float_of_bits(kvedge_active()->abs_max_bits(rows, (size_t)((stop - start) * token)));
  }
  int64_t per_token = (int64_t)config->num_kv_heads * layer->num_groups;
  float bound = 0.0f;
  for (int64_t i = start * per_token; i < stop * per_token; i++)
    bound = fmaxf(bound, kvedge_load_scale(scales, config->scale_type, i));
  return bound;
}
