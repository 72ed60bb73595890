/* FP8 e4m3 of OCP (e4m3fn: no infinities): rounded to nearest, ties to even, and beyond 448 to 448. */
#include "formats/fp8.h"

#define CODE uint8_t
#define FROM_FLOAT kvedge_e4m3_of_float
#define TO_FLOAT kvedge_float_of_e4m3
#define LARGEST_BITS 0x7eu
#include "formats/small_floats.h"

static float bound_of(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return kvedge_float_of_e4m3(kvedge_e4m3_of_float(largest));
}

const kvedge_format_info kvedge_format_fp8_e4m3 = {.id = KVEDGE_FP8_E4M3,
                                                   .name = "fp8_e4m3",
                                                   .file_type = "F8_E4M3",
                                                   .bits = 8,
                                                   .tokens_per_group = 1,
                                                   .bound_of = bound_of,
                                                   .encode = encode,
                                                   .decode = decode,
                                                   .bound = bound,
                                                   .is_valid = is_valid};
