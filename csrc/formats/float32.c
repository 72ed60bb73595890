/* float32: the elements as they are. */
#include <math.h>
#include <string.h>

#include "formats/format.h"
#include "system/bits.h"
#include "system/dispatch.h"

static float bound_of_float32(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return largest;
}

static void encode_float32(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)scales;
  memmove(codes, x,
          (size_t)(num_rows * shape->dim) * sizeof *x); /* a layer's own rows may be where they are going to */
}

static void decode_float32(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,
                           float *x) {
  (void)scales;
  memcpy(x, codes, (size_t)(num_rows * shape->dim) * sizeof *x);
}

static float bound_float32(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)scales;
  return kvedge_float_of_bits(kvedge_active()->rows->abs_max_bits(codes, (size_t)(num_rows * shape->dim)));
}

static int is_valid_float32(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  return isfinite(bound_float32(shape, codes, scales, num_rows));
}

const kvedge_format_info kvedge_format_float32 = {.id = KVEDGE_FLOAT32,
                                                  .name = "float32",
                                                  .file_type = "F32",
                                                  .bits = 32,
                                                  .row_tokens = 1,
                                                  .bound_of = bound_of_float32,
                                                  .encode = encode_float32,
                                                  .decode = decode_float32,
                                                  .bound = bound_float32,
                                                  .is_valid = is_valid_float32};
