/* What every path does with rows of floats in the same plain C, which each compiles for itself. Included once by
 * each kernels_<isa>.c after its target pragma. */
#include <string.h>

#include "kernels.h"

static inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Asks for the lines that begin in n bytes, for the second-level cache: a tile ahead is more than the first holds. */
static inline void prefetch_bytes(const char *bytes, ptrdiff_t n) {
  uintptr_t end = (uintptr_t)bytes + (uintptr_t)n;
  for (uintptr_t line = ((uintptr_t)bytes + 63) & ~(uintptr_t)63; line < end; line += 64)
    __builtin_prefetch((const void *)line, 0, 2);
}

static inline void merge_row_portable(float *to, float keep, const float *from, float add, int n) {
  for (int d = 0; d < n; d++) to[d] = to[d] * keep + from[d] * add;
}

/* x, or the nearest float that is neither infinite nor denormal. By its bits, which every compiler makes
 * vector code of; comparing floats would need leave to ignore traps. */
static inline float bounded(float x) {
  enum { SMALLEST = 0x00800000, LARGEST = 0x7f7fffff };
  int32_t bits = (int32_t)float_to_bits(x);
  int32_t magnitude = bits & 0x7fffffff;
  int32_t kept = magnitude > LARGEST ? LARGEST : magnitude;
  return bits_to_float((uint32_t)(magnitude < SMALLEST ? 0 : (bits ^ magnitude) | kept));
}

static inline void scale_row_portable(const float *row, int n, float factor, float power, float *restrict out) {
  for (int d = 0; d < n; d++) out[d] = bounded(row[d] * factor * power);
}

static inline void transpose_scales_portable(const float *scales, ptrdiff_t token_stride, int num_tokens,
                                             int num_columns, float factor, float *out, ptrdiff_t out_stride) {
  for (int t = 0; t < num_tokens; t++, scales = (const float *)((const char *)scales + token_stride))
    for (int c = 0; c < num_columns; c++) out[c * out_stride + t] = scales[c] * factor;
}
