/* FP8 e5m2 of OCP, the upper byte of a half: rounded to nearest, ties to even, and beyond 57344 to 57344. */
#include "formats/fp8.h"

#define CODE uint8_t
#define FROM_FLOAT kvedge_e5m2_of_float
#define TO_FLOAT kvedge_float_of_e5m2
#define LARGEST_BITS 0x7bu
#include "formats/small_floats.h"

static float bound_of(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return kvedge_float_of_e5m2(kvedge_e5m2_of_float(largest));
}

const kvedge_format_info kvedge_format_fp8_e5m2 = {.id = KVEDGE_FP8_E5M2,
                                                   .name = "fp8_e5m2",
                                                   .file_type = "F8_E5M2",
                                                   .bits = 8,
                                                   .tokens_per_group = 1,
                                                   .bound_of = bound_of,
                                                   .encode = encode,
                                                   .decode = decode,
                                                   .bound = bound,
                                                   .is_valid = is_valid};
