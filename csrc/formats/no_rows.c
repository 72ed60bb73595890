/* Rows of no bytes, of a layer that counts tokens which lie in runs and in the last tokens' layer. It refuses what runs
 * refuse. */
#include <string.h>

#include "formats/kivi.h"

static void encode_nothing(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales) {
  (void)shape, (void)x, (void)num_rows, (void)codes, (void)scales;
}

static void decode_zeros(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,
                         float *x) {
  (void)codes, (void)scales;
  memset(x, 0, (size_t)num_rows * (size_t)shape->dim * sizeof *x);
}

static float bound_of_nothing(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {
  (void)shape, (void)codes, (void)scales, (void)num_rows;
  return 0.0f;
}

const kvedge_format_info kvedge_format_no_rows = {.id = KVEDGE_NO_ROWS,
                                                  .name = "no rows",
                                                  .row_tokens = 1,
                                                  .bound_of = bound_of_runs,
                                                  .encode = encode_nothing,
                                                  .decode = decode_zeros,
                                                  .bound = bound_of_nothing};
