/* bfloat16 (a float32 without its last 16 bits): rounded to nearest, ties to even. Elements that would become infinite,
 * from 3.396e38 on, are refused.
 */
#include <math.h>

#include "formats/format.h"
#include "formats/half.h"

static float bound_of(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return kvedge_float_of_bfloat(kvedge_bfloat_of_float(largest));
}

static void encode(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)scales;
  uint16_t *out = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) out[i] = kvedge_bfloat_of_float(x[i]);
}

static void decode(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows, float *x) {
  (void)scales;
  const uint16_t *in = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) x[i] = kvedge_float_of_bfloat(in[i]);
}

/* Magnitudes of halves order as their bits do. */
static float bound(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  const uint16_t *in = codes;
  uint16_t largest = 0;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) {
    uint16_t magnitude = in[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return kvedge_float_of_bfloat(largest);
}

const kvedge_format_info kvedge_format_bfloat16 = {.id = KVEDGE_BFLOAT16,
                                               .name = "bfloat16",
                                                  .bits = 16,
                                                  .tokens_per_group = 1,
                                                  .bound_of = bound_of,
                                                  .encode = encode,
                                                  .decode = decode,
                                                  .bound = bound};
