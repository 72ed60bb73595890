/* 8-bit floats of the OCP specification (OFP8), in integer arithmetic that compilers make vector code of.
 *
 *            sign, exponent, mantissa   bias   subnormal step   largest        not finite
 *   e4m3     1, 4, 3                    7      2^-9             448 (0x7e)     NaN 0x7f; no infinity ("e4m3fn")
 *   e5m2     1, 5, 2                    15     2^-16            57344 (0x7b)   infinity 0x7c, NaN above; the upper byte of
 *                                                                              a half
 *
 * Rounded to nearest, ties to even; what is beyond the largest becomes the largest (OCP's
 * saturating conversion), so every finite float can be stored and codes that are not finite are
 * never made.
 */
#ifndef KVEDGE_FP8_H
#define KVEDGE_FP8_H

#include "system/bits.h"

/* The bits of finite x in a type of `mantissa_bits` whose exponents are `rebias` below a float's. Adding 2^23 subnormal
 * steps to what becomes a subnormal leaves its digits, rounded, at the end of a float. */
static inline uint8_t kvedge_fp8_of_float(float x, const int mantissa_bits, const uint32_t rebias,
                                          const float largest) {
  const int shift = 23 - mantissa_bits;
  const uint32_t bits = kvedge_bits_of_float(x), limit = kvedge_bits_of_float(largest);
  const uint32_t finite = bits & 0x7fffffffu, magnitude = finite < limit ? finite : limit;
  const float steps = kvedge_float_of_bits((rebias + 1 + (uint32_t)shift) << 23);
  const uint32_t normal = (magnitude - (rebias << 23) + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1)) >> shift;
  const uint32_t subnormal =
      kvedge_bits_of_float(kvedge_float_of_bits(magnitude) + steps) - kvedge_bits_of_float(steps);
  return (uint8_t)((bits >> 24 & 0x80u) | (magnitude < (rebias + 1) << 23 ? subnormal : normal));
}

/* Any code: its exponent and mantissa in a float's place, brought to a float's bias. Subnormal ones as in half.h. */
static inline float kvedge_float_of_fp8(uint8_t code, const int mantissa_bits, const uint32_t rebias) {
  const uint32_t bits = (code & 0x7fu) << (23 - mantissa_bits), least_normal = (rebias + 1) << 23;
  const float subnormal = kvedge_float_of_bits(bits + least_normal) - kvedge_float_of_bits(least_normal);
  const uint32_t magnitude = bits < 1u << 23 ? kvedge_bits_of_float(subnormal) : bits + (rebias << 23);
  return kvedge_float_of_bits(magnitude | (code & 0x80u) << 24);
}

#define KVEDGE_E4M3_MAX 448.0f
#define KVEDGE_E5M2_MAX 57344.0f

static inline uint8_t kvedge_e4m3_of_float(float x) { return kvedge_fp8_of_float(x, 3, 120, KVEDGE_E4M3_MAX); }
static inline uint8_t kvedge_e5m2_of_float(float x) { return kvedge_fp8_of_float(x, 2, 112, KVEDGE_E5M2_MAX); }
static inline float kvedge_float_of_e4m3(uint8_t code) { return kvedge_float_of_fp8(code, 3, 120); }
static inline float kvedge_float_of_e5m2(uint8_t code) { return kvedge_float_of_fp8(code, 2, 112); }

#endif
