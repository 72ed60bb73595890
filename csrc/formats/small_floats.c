/* Floats of 16 and 8 bits, rounded to nearest, ties to even; half.h and fp8.h convert them.
 *
 *   float16    IEEE half precision; elements from 65520 on, which would become infinite, are refused
 *   bfloat16   a float32 without its last 16 bits; elements from 3.396e38 on are refused
 *   fp8_e4m3   OCP's e4m3fn, without infinities; beyond 448 to 448
 *   fp8_e5m2   OCP's e5m2, the upper byte of a half; beyond 57344 to 57344
 */
#include <math.h>

#include "formats/format.h"
#include "formats/fp8.h"
#include "formats/half.h"

/* A format's functions, and its row of the table.
 *   CODE                          the integer that holds an element, the sign on top
 *   CODE_OF(x), FLOAT_OF(code)    a float32 to the format's bits, and back
 *   LARGEST                       the bits of the largest finite number; magnitudes order as their bits do
 *   OVERFLOW                      magnitudes from which on elements are refused, if CODE_OF does not make them infinite */
#define SMALL_FLOATS(format, ID, FILE_TYPE, CODE, CODE_OF, FLOAT_OF, LARGEST, OVERFLOW)                                \
  static float bound_of_##format(const kvedge_row_shape *shape, float largest) {                                       \
    (void)shape;                                                                                                       \
    return largest < (OVERFLOW) ? FLOAT_OF(CODE_OF(largest)) : INFINITY;                                               \
  }                                                                                                                    \
  static void encode_##format(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes,            \
                              void *scales) {                                                                          \
    (void)scales;                                                                                                      \
    CODE *restrict out = codes;                                                                                        \
    const int64_t n = num_rows * shape->dim;                                                                           \
    for (int64_t i = 0; i < n; i++) out[i] = CODE_OF(x[i]);                                                            \
  }                                                                                                                    \
  static void decode_##format(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,  \
                              float *x) {                                                                              \
    (void)scales;                                                                                                      \
    const CODE *in = codes;                                                                                            \
    float *restrict out = x;                                                                                           \
    const int64_t n = num_rows * shape->dim;                                                                           \
    for (int64_t i = 0; i < n; i++) out[i] = FLOAT_OF(in[i]);                                                          \
  }                                                                                                                    \
  static CODE largest_##format(const kvedge_row_shape *shape, const CODE *in, int64_t num_rows) {                      \
    const CODE all_but_sign = (CODE) - 1 >> 1;                                                                         \
    CODE largest = 0;                                                                                                  \
    for (int64_t i = 0; i < num_rows * shape->dim; i++) {                                                              \
      const CODE magnitude = in[i] & all_but_sign;                                                                     \
      largest = magnitude > largest ? magnitude : largest;                                                             \
    }                                                                                                                  \
    return largest;                                                                                                    \
  }                                                                                                                    \
  static float bound_##format(const kvedge_row_shape *shape, const void *codes, const void *scales,                    \
                              int64_t num_rows) {                                                                      \
    (void)scales;                                                                                                      \
    return FLOAT_OF(largest_##format(shape, codes, num_rows));                                                         \
  }                                                                                                                    \
  static int is_valid_##format(const kvedge_row_shape *shape, const void *codes, const void *scales,                   \
                               int64_t num_rows) {                                                                     \
    (void)scales;                                                                                                      \
    return largest_##format(shape, codes, num_rows) <= (LARGEST);                                                      \
  }                                                                                                                    \
  const kvedge_format_info kvedge_format_##format = {.id = ID,                                                         \
                                                     .name = #format,                                                  \
                                                     .file_type = FILE_TYPE,                                           \
                                                     .bits = 8 * sizeof(CODE),                                         \
                                                     .row_tokens = 1,                                                  \
                                                     .bound_of = bound_of_##format,                                    \
                                                     .encode = encode_##format,                                        \
                                                     .decode = decode_##format,                                        \
                                                     .bound = bound_##format,                                          \
                                                     .is_valid = is_valid_##format}

SMALL_FLOATS(float16, KVEDGE_FLOAT16, "F16", uint16_t, kvedge_half_of_float, kvedge_float_of_half, 0x7bffu,
             KVEDGE_HALF_OVERFLOW);
SMALL_FLOATS(bfloat16, KVEDGE_BFLOAT16, "BF16", uint16_t, kvedge_bfloat_of_float, kvedge_float_of_bfloat, 0x7f7fu,
             INFINITY);
SMALL_FLOATS(fp8_e4m3, KVEDGE_FP8_E4M3, "F8_E4M3", uint8_t, kvedge_e4m3_of_float, kvedge_float_of_e4m3, 0x7eu,
             INFINITY);
SMALL_FLOATS(fp8_e5m2, KVEDGE_FP8_E5M2, "F8_E5M2", uint8_t, kvedge_e5m2_of_float, kvedge_float_of_e5m2, 0x7bu,
             INFINITY);
