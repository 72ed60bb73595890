/* Floats by their bits. */
#ifndef KVEDGE_BITS_H
#define KVEDGE_BITS_H

#include <stdint.h>
#include <string.h>

static inline float kvedge_float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint32_t kvedge_bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* x, or the nearest float that is neither infinite nor denormal. By its bits, which every compiler makes
 * vector code of; comparing floats would need leave to ignore traps. */
static inline float kvedge_bounded(float x) {
  enum { SMALLEST = 0x00800000, LARGEST = 0x7f7fffff };
  int32_t bits = (int32_t)kvedge_bits_of_float(x);
  int32_t magnitude = bits & 0x7fffffff;
  int32_t kept = magnitude > LARGEST ? LARGEST : magnitude;
  return kvedge_float_of_bits((uint32_t)(magnitude < SMALLEST ? 0 : (bits ^ magnitude) | kept));
}

#endif
