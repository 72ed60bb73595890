/* Rows of a layer's keys or values: checked, stored, read back, in whatever format. */
#include "store/rows.h"

#include <float.h>
#include <math.h>

#include "system/bits.h"
#include "system/dispatch.h"

/* x - offset in `room`, or x itself where there is no offset. `row` counts (token, head) pairs. */
static const float *centred(const kvedge_side *side, const float *rows, int64_t row, float room[KVEDGE_MAX_HEAD_DIM]) {
  const int dim = side->shape.dim;
  const float *x = rows + row * dim;
  if (!side->offset) return x;
  const float *offset = side->offset + row % side->num_kv_heads * dim;
  for (int d = 0; d < dim; d++) room[d] = x[d] - offset[d];
  return room;
}

kvedge_status kvedge_rows_check(const kvedge_side *side, const float *rows, int64_t num_tokens, float *bound) {
  const kvedge_kernels *kernels = kvedge_active();
  const int64_t num_rows = num_tokens * side->num_kv_heads;
  const size_t dim = (size_t)side->shape.dim;
  uint32_t bits = 0;
  if (!side->offset) {
    bits = kernels->abs_max_bits(rows, (size_t)num_rows * dim);
  } else {
    float room[KVEDGE_MAX_HEAD_DIM];
    for (int64_t row = 0; row < num_rows; row++) {
      uint32_t row_bits = kernels->abs_max_bits(centred(side, rows, row, room), dim);
      bits = row_bits > bits ? row_bits : bits;
    }
  }
  if (bits >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
  *bound = side->format->bound_of(&side->shape, kvedge_float_of_bits(bits));
  return isinf(*bound) ? KVEDGE_ERROR_SCALE : KVEDGE_OK;
}

void kvedge_rows_store(const kvedge_side *side, const float *rows, int64_t num_tokens, int64_t position) {
  const int64_t num_rows = num_tokens * side->num_kv_heads;
  char *codes = kvedge_codes_at(side, position), *scales = kvedge_scales_at(side, position);
  if (!side->offset) {
    if (num_rows > 0) side->format->encode(&side->shape, rows, num_rows, codes, scales);
    return;
  }
  float room[KVEDGE_MAX_HEAD_DIM];
  for (int64_t row = 0; row < num_rows; row++, codes += side->row_bytes, scales += side->scale_row_bytes)
    side->format->encode(&side->shape, centred(side, rows, row, room), 1, codes, scales);
}

static void clamp_to_finite(float *x, int n) {
  for (int d = 0; d < n; d++) x[d] = x[d] > FLT_MAX ? FLT_MAX : x[d] < -FLT_MAX ? -FLT_MAX : x[d];
}

void kvedge_rows_load(const kvedge_side *side, int64_t start, int64_t stop, float *out) {
  const int64_t num_rows = (stop - start) * side->num_kv_heads;
  const int dim = side->shape.dim;
  if (num_rows == 0) return;
  side->format->decode(&side->shape, kvedge_codes_at(side, start), kvedge_scales_at(side, start), num_rows, out);
  for (int64_t row = 0; side->offset && row < num_rows; row++, out += dim) {
    const float *offset = side->offset + row % side->num_kv_heads * dim;
    for (int d = 0; d < dim; d++) out[d] += offset[d];
    clamp_to_finite(out, dim);
  }
}

float kvedge_rows_bound(const kvedge_side *side, int64_t start, int64_t stop) {
  return side->format->bound(&side->shape, kvedge_codes_at(side, start), kvedge_scales_at(side, start),
                             (stop - start) * side->num_kv_heads);
}
