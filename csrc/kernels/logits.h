/* Options on a query's logits of a tile, in plain C which each path compiles for itself. Included once by each
 * kernels_<isa>.c after its target pragma; loops are written so that compilers make vector code of them. */
#ifndef KVEDGE_KERNELS_LOGITS_H
#define KVEDGE_KERNELS_LOGITS_H

#include <float.h>
#include <math.h>

#include "formats/half.h"
#include "system/bits.h"
#include "kernels/kernels.h"
#include "kernels/exp2.h"
#include "system/target.h"

/* The nearest number that is finite. */
KVEDGE_INLINE float nearest_finite(float x) {
  float above = x < -FLT_MAX ? -FLT_MAX : x;
  return above > FLT_MAX ? FLT_MAX : above;
}

/* cap * tanh(x / cap), relative error below 3e-7. */
KVEDGE_INLINE float soft_capped(float x, float cap, float inverse_of_cap) {
  enum { HALF = 0x3f000000, TEN = 0x41200000 }; /* floats' bits: by these compilers choose where they would branch */
  const float ratio = x * inverse_of_cap;
  const int32_t magnitude = (int32_t)(kvedge_bits_of_float(ratio) & 0x7fffffff), is_small = magnitude < HALF;
  /* tanh(r) = r (1 + r^2 (c0 + r^2 (...))) for |r| <= 1/2: the coefficients of least relative error, 2e-8. */
  const float r = kvedge_float_of_bits((uint32_t)(is_small ? magnitude : HALF)), square = r * r;
  float series = 1.724149150e-2f;
  series = series * square - 5.304549428e-2f;
  series = series * square + 1.332587896e-1f;
  series = series * square - 3.333314390e-1f;
  const float small = x + x * (square * series);
  /* tanh(r) = (1 - e^(-2 r)) / (1 + e^(-2 r)), from 10 on 1 */
  const float power = exp2_within(-2.885390082f * kvedge_float_of_bits((uint32_t)(magnitude < TEN ? magnitude : TEN)));
  const float large = cap * ((1.0f - power) / (1.0f + power));
  const uint32_t sign = kvedge_bits_of_float(x) & 0x80000000u, all_if_small = 0u - (uint32_t)is_small;
  return kvedge_float_of_bits((kvedge_bits_of_float(small) & all_if_small) |
                              ((kvedge_bits_of_float(large) | sign) & ~all_if_small));
}

static inline void to_logits_portable(float *row, int n, double factor, double bias, float cap) {
  enum { RANGE = 1 << 30 }; /* within which float is no less exact than a logit in float can be */
  if (factor > 1.0 / RANGE && factor < RANGE && fabs(bias) < RANGE) {
    const float by = (float)factor, plus = (float)bias;
    for (int t = 0; t < n; t++) row[t] = nearest_finite(row[t] * by + plus);
  } else {
    for (int t = 0; t < n; t++) row[t] = nearest_finite((float)(row[t] * factor + bias));
  }
  if (!(cap > 0.0f)) return;
  const float inverse_of_cap = nearest_finite(1.0f / cap);
  for (int t = 0; t < n; t++) row[t] = soft_capped(row[t], cap, inverse_of_cap);
}

static inline void add_slope_portable(float *logits, int n, float slope, float first) {
  for (int t = 0; t < n; t++) logits[t] = nearest_finite(logits[t] + slope * (first + (float)t));
}

static inline void add_bias_portable(float *restrict logits, int n, const float *restrict bias) {
  for (int t = 0; t < n; t++) {
    float sum = nearest_finite(logits[t] + bias[t]);
    logits[t] = bias[t] < -FLT_MAX ? -INFINITY : sum;
  }
}

static inline void widen_bias_portable(const uint16_t *restrict bias, int n, float factor, float *restrict out) {
  for (int t = 0; t < n; t++) out[t] = kvedge_float_of_any_half(bias[t]) * factor;
}

static inline void hide_portable(float *restrict row, int n, const uint8_t *restrict mask, const float *restrict bias,
                                 float instead) {
  if (mask)
    for (int t = 0; t < n; t++) row[t] = mask[t] ? row[t] : instead;
  if (bias)
    for (int t = 0; t < n; t++) row[t] = bias[t] < -FLT_MAX ? instead : row[t];
}

#define KVEDGE_LOGIT_KERNELS                                                                                           \
  {to_logits_portable, add_slope_portable, add_bias_portable, widen_bias_portable, hide_portable}

#endif
