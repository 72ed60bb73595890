/* float16 (IEEE 754 half precision): rounded to nearest, ties to even. Elements that would become infinite, from 65520
 * on, are refused.
 */
#include <math.h>

#define CODE uint16_t
#define FROM_FLOAT kvedge_half_of_float
#define TO_FLOAT kvedge_float_of_half
#define LARGEST_BITS 0x7bffu
#include "formats/small_floats.h"

static float bound_of(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return largest < KVEDGE_HALF_OVERFLOW ? kvedge_float_of_half(kvedge_half_of_float(largest)) : INFINITY;
}

const kvedge_format_info kvedge_format_float16 = {.id = KVEDGE_FLOAT16,
                                                  .name = "float16",
                                                  .file_type = "F16",
                                                  .bits = 16,
                                                  .tokens_per_group = 1,
                                                  .bound_of = bound_of,
                                                  .encode = encode,
                                                  .decode = decode,
                                                  .bound = bound,
                                                  .is_valid = is_valid};
