/* IEEE half precision in integer arithmetic: the baseline CPUs have no instruction for it, and scales
 * are few. Only non-negative numbers are converted here: scales. */
#ifndef KVEDGE_HALF_H
#define KVEDGE_HALF_H

#include <stddef.h>

#include "system/bits.h"
#include "kvedge.h"

#define KVEDGE_HALF_MAX 65504.0f

static inline float kvedge_half_to_float(uint16_t half) {
  uint32_t exponent = (half >> 10) & 0x1f, mantissa = half & 0x3ff;
  if (exponent == 0) return (float)mantissa * 0x1p-24f;
  return kvedge_float_of_bits((exponent + 112) << 23 | mantissa << 13);
}

/* Scale number `index` of a layer's. */
static inline float kvedge_load_scale(const void *scales, kvedge_scale_type type, ptrdiff_t index) {
  return type == KVEDGE_SCALE_FLOAT16 ? kvedge_half_to_float(((const uint16_t *)scales)[index])
                                      : ((const float *)scales)[index];
}

/* The smallest half >= x, for 0 <= x <= KVEDGE_HALF_MAX. Rounding up keeps every code within 127. */
static inline uint16_t kvedge_float_to_half_up(float x) {
  if (x < 0x1p-14f) { /* subnormal halves are multiples of 2^-24 */
    float steps = x * 0x1p24f;
    uint16_t whole = (uint16_t)steps;
    return (uint16_t)(whole + (steps > (float)whole));
  }
  return (uint16_t)((kvedge_bits_of_float(x) - (112u << 23) + 0x1fff) >> 13);
}

#endif
