/* Rows of 16-bit floats. Included once by float16.c and bfloat16.c, which first define
 *   FROM_FLOAT(x), TO_FLOAT(bits)   a float32 to the format's 16 bits, rounded to nearest, and back
 */
#include "formats/format.h"
#include "formats/half.h"

static void encode(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)scales;
  uint16_t *out = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) out[i] = FROM_FLOAT(x[i]);
}

static void decode(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows, float *x) {
  (void)scales;
  const uint16_t *in = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) x[i] = TO_FLOAT(in[i]);
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
  return TO_FLOAT(largest);
}
