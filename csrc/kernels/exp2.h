/* Powers of two: what every path's softmax computes them from, and one at a time in plain C. */
#ifndef KVEDGE_KERNELS_EXP2_H
#define KVEDGE_KERNELS_EXP2_H

#include "system/bits.h"

/* 2^f = 1 + f (EXP2_1 + f (EXP2_2 + ...)) for |f| <= 1/2: the coefficients of least relative error,
 * 1e-7, for which 2^0 is 1. */
#define EXP2_1 6.931470037e-1f
#define EXP2_2 2.402224243e-1f
#define EXP2_3 5.550733581e-2f
#define EXP2_4 9.671512991e-3f
#define EXP2_5 1.326472731e-3f
#define EXP2_NOTHING -125.0f /* powers of two below it count as 0 */
/* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits: shifted by 23, the constant's own bits fall
 * out. */
#define ROUND_TO_INTEGER 12582912.0f

/* 2^x for -126 <= x <= 0, relative error below 2e-7: 2^rint(x) by writing the exponent, times 2^f for what is left. */
static inline float exp2_within(float x) {
  float rounded = x + ROUND_TO_INTEGER;
  float f = x - (rounded - ROUND_TO_INTEGER);
  float y = EXP2_5;
  y = y * f + EXP2_4;
  y = y * f + EXP2_3;
  y = y * f + EXP2_2;
  y = y * f + EXP2_1;
  y = y * f + 1.0f;
  return kvedge_float_of_bits(kvedge_bits_of_float(y) + (kvedge_bits_of_float(rounded) << 23));
}

/* 2^x for x <= 0; 0 below -125. */
static inline float exp2_nonpositive(float x) {
  float power = exp2_within(x > -126.0f ? x : -126.0f); /* takes -inf too */
  return x > EXP2_NOTHING ? power : 0.0f;
}

#endif
