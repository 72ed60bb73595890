/* Rows of 8-bit and 16-bit floats. Included once by the file of each such format, which first defines
 *   CODE                            the integer that holds the format's bits, the sign on top
 *   FROM_FLOAT(x), TO_FLOAT(bits)   a float32 to the format's bits, rounded to nearest, and back
 *   LARGEST_BITS                    the largest finite number's bits
 */
#include "formats/format.h"
#include "formats/half.h"

static void encode(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)scales;
  CODE *out = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) out[i] = FROM_FLOAT(x[i]);
}

static void decode(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows, float *x) {
  (void)scales;
  const CODE *in = codes;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) x[i] = TO_FLOAT(in[i]);
}

/* The bits of the largest magnitude: magnitudes order as their bits do. */
static CODE largest_bits(const kvedge_row_shape *shape, const CODE *in, int64_t num_rows) {
  const CODE all_but_sign = (CODE)-1 >> 1;
  CODE largest = 0;
  for (int64_t i = 0; i < num_rows * shape->dim; i++) {
    const CODE magnitude = in[i] & all_but_sign;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

static float bound(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  return TO_FLOAT(largest_bits(shape, codes, num_rows));
}

static int is_valid(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  return largest_bits(shape, codes, num_rows) <= LARGEST_BITS;
}
