/* What formats with a scale per group of a row share. */
#ifndef KVEDGE_SCALES_H
#define KVEDGE_SCALES_H

#include <math.h>

#include "formats/format.h"
#include "formats/half.h"

/* A scale, to nearest. */
static inline void kvedge_store_scale(kvedge_scale_type type, void *scales, int group, float scale) {
  if (type == KVEDGE_SCALE_FLOAT16) ((uint16_t *)scales)[group] = kvedge_half_of_float(scale);
  else ((float *)scales)[group] = scale;
}

/* Sum of x[0..n-1] by halves; changes x, which has room for the next power of two. */
static inline double kvedge_sum_by_halves(double *x, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n; i < size; i++) x[i] = 0.0;
  for (int half = size / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

/* At least a scale as it is stored; INFINITY: its type cannot hold it. */
static inline float kvedge_stored_scale_bound(const kvedge_row_shape *shape, float scale) {
  if (shape->scale_type == KVEDGE_SCALE_FLOAT32) return scale;
  return scale > KVEDGE_HALF_MAX ? INFINITY : kvedge_float_of_half(kvedge_float_to_half_up(scale));
}

/* The bound of stored rows: their largest scale. */
static inline float kvedge_largest_scale(const kvedge_row_shape *shape, const void *codes, const void *scales,
                                         int64_t num_rows) {
  (void)codes;
  float largest = 0.0f;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++)
    largest = kvedge_larger(largest, kvedge_load_scale(scales, shape->scale_type, i));
  return largest;
}

/* Are stored scales from 0 to a limit, and none of them -0? */
static inline int kvedge_scales_are_valid(const kvedge_row_shape *shape, const void *scales, int64_t num_rows,
                                          float limit) {
  const int64_t n = num_rows * shape->num_groups;
  uint32_t largest = 0; /* of their bits: larger than any number's where the sign is set */
  if (shape->scale_type == KVEDGE_SCALE_FLOAT16) {
    for (int64_t i = 0; i < n; i++)
      largest = ((const uint16_t *)scales)[i] > largest ? ((const uint16_t *)scales)[i] : largest;
    return largest < 0x7c00u && kvedge_float_of_half((uint16_t)largest) <= limit;
  }
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = kvedge_bits_of_float(((const float *)scales)[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest <= kvedge_bits_of_float(limit);
}

#endif
