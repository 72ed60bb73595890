/* What formats with a scale per group of a row share. */
#ifndef KVEDGE_SCALES_H
#define KVEDGE_SCALES_H

#include <math.h>

#include "formats/format.h"
#include "formats/half.h"

/* At least a scale as it is stored; INFINITY: its type cannot hold it. */
static inline float kvedge_stored_scale_bound(const kvedge_row_shape *shape, float scale) {
  if (shape->scale_type == KVEDGE_SCALE_FLOAT32) return scale;
  return scale > KVEDGE_HALF_MAX ? INFINITY : kvedge_half_to_float(kvedge_float_to_half_up(scale));
}

/* The bound of stored rows: their largest scale. */
static inline float kvedge_largest_scale(const kvedge_row_shape *shape, const void *codes, const void *scales,
                                         int64_t num_rows) {
  (void)codes;
  float largest = 0.0f;
  for (int64_t i = 0; i < num_rows * shape->num_groups; i++)
    largest = fmaxf(largest, kvedge_load_scale(scales, shape->scale_type, i));
  return largest;
}

#endif
