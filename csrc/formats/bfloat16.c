/* bfloat16 (a float32 without its last 16 bits): rounded to nearest, ties to even. Elements that would become infinite,
 * from 3.396e38 on, are refused.
 */
#include <math.h>

#define CODE uint16_t
#define FROM_FLOAT kvedge_bfloat_of_float
#define TO_FLOAT kvedge_float_of_bfloat
#define LARGEST_BITS 0x7f7fu
#include "formats/small_floats.h"

static float bound_of(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return kvedge_float_of_bfloat(kvedge_bfloat_of_float(largest));
}

const kvedge_format_info kvedge_format_bfloat16 = {.id = KVEDGE_BFLOAT16,
                                                   .name = "bfloat16",
                                                   .file_type = "BF16",
                                                   .bits = 16,
                                                   .tokens_per_group = 1,
                                                   .bound_of = bound_of,
                                                   .encode = encode,
                                                   .decode = decode,
                                                   .bound = bound,
                                                   .is_valid = is_valid};
