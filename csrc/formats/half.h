/* 16-bit floats, IEEE half precision and bfloat16, in integer arithmetic: the baseline CPUs have no instructions for
 * them, and compilers make vector code of this. */
#ifndef KVEDGE_HALF_H
#define KVEDGE_HALF_H

#include <stddef.h>

#include "system/bits.h"
#include "kvedge.h"

#define KVEDGE_HALF_MAX 65504.0f
#define KVEDGE_HALF_OVERFLOW 65520.0f /* rounds to infinity, and what is above */

/* One of two, by masks: compilers make no vector code of a branch that has an addition of floats. */
static inline uint32_t kvedge_choose(int is_first, uint32_t first, uint32_t second) {
  const uint32_t mask = 0u - (uint32_t)is_first;
  return (first & mask) | (second & ~mask);
}

/* Any finite half, also subnormal ones: its exponent and mantissa in a float's place, brought to
 * a float's bias. Digits of a subnormal half are those after the point of 2^-14, which is taken
 * off: no denormal float is made, which a mode may flush. */
static inline float kvedge_float_of_half(uint16_t half) {
  const uint32_t bits = (half & 0x7fffu) << 13;
  const float subnormal = kvedge_float_of_bits(bits + (113u << 23)) - 0x1p-14f;
  const uint32_t magnitude = kvedge_choose(bits < 1u << 23, kvedge_bits_of_float(subnormal), bits + (112u << 23));
  return kvedge_float_of_bits(magnitude | (half & 0x8000u) << 16);
}

/* Any half, also infinities and NaNs. */
static inline float kvedge_float_of_any_half(uint16_t half) {
  const uint32_t bits = kvedge_bits_of_float(kvedge_float_of_half(half));
  return kvedge_float_of_bits(bits | kvedge_choose((half & 0x7c00u) == 0x7c00u, 0x7f800000u, 0));
}

/* The nearest half, ties to even, for |x| < KVEDGE_HALF_OVERFLOW. Adding 1/2 to what becomes a
 * subnormal half leaves its digits, rounded, at the end of a float. */
static inline uint16_t kvedge_half_of_float(float x) {
  uint32_t bits = kvedge_bits_of_float(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t subnormal = kvedge_bits_of_float(kvedge_float_of_bits(magnitude) + 0.5f) - kvedge_bits_of_float(0.5f);
  return (uint16_t)(sign | kvedge_choose(magnitude < 0x38800000u, subnormal, normal));
}

/* The larger, for what is at least 0. Not fmaxf(): gcc 12 for aarch64 ends in an internal error where it makes vector code
 * of the largest of many halves. */
static inline float kvedge_larger(float a, float b) { return a > b ? a : b; }

static inline float kvedge_float_of_bfloat(uint16_t bits) { return kvedge_float_of_bits((uint32_t)bits << 16); }

/* The nearest bfloat16, ties to even; may be infinite. */
static inline uint16_t kvedge_bfloat_of_float(float x) {
  uint32_t bits = kvedge_bits_of_float(x);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Scale number `index` of a layer's. */
static inline float kvedge_load_scale(const void *scales, kvedge_scale_type type, ptrdiff_t index) {
  return type == KVEDGE_SCALE_FLOAT16 ? kvedge_float_of_half(((const uint16_t *)scales)[index])
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
