/* Rows of a layer's keys or values: checked, stored, read back, in whatever format. */
#include "store/rows.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "store/rotation.h"
#include "system/bits.h"
#include "system/dispatch.h"
#include "system/parallel.h"

enum { KVEDGE_RUN_VALUES_PER_US = 300 }; /* that are encoded, about */

static int is_mapped(const kvedge_side *side) { return side->offset || side->scale || side->rotated; }

/* A row of the caller's as it is to be encoded: less the offset, over the scale, rotated, as floats; in `room` where it
 * does not lie so. */
static const float *mapped(const kvedge_side *side, const kvedge_array *rows, int64_t token, int head,
                           float room[KVEDGE_MAX_HEAD_DIM]) {
  const int dim = side->shape.dim;
  const float *x = kvedge_array_row(rows, token, head, dim, room);
  const ptrdiff_t at = (ptrdiff_t)head * dim;
  if (side->offset) {
    for (int d = 0; d < dim; d++) room[d] = x[d] - side->offset[at + d];
    x = room;
  }
  if (side->scale) {
    for (int d = 0; d < dim; d++) room[d] = x[d] / side->scale[at + d];
    x = room;
  }
  if (side->rotated) {
    kvedge_rotate_channels(x, side->rotated, 0, dim, room);
    x = room;
  }
  return x;
}

kvedge_status kvedge_rows_check(const kvedge_side *side, const kvedge_array *rows, int64_t num_tokens, float *bound) {
  const kvedge_kernels *kernels = kvedge_active();
  const int heads = side->num_kv_heads, dim = side->shape.dim;
  uint32_t bits = 0;
  if (!is_mapped(side)) {
    bits = kvedge_array_abs_max_bits(rows, num_tokens, heads, dim);
  } else {
    float room[KVEDGE_MAX_HEAD_DIM];
    for (int64_t token = 0; token < num_tokens; token++)
      for (int head = 0; head < heads; head++) {
        uint32_t row_bits = kernels->rows->abs_max_bits(mapped(side, rows, token, head, room), (size_t)dim);
        bits = row_bits > bits ? row_bits : bits;
      }
  }
  if (bits >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
  *bound = side->format->bound_of(&side->shape, kvedge_float_of_bits(bits));
  return isinf(*bound) ? KVEDGE_ERROR_SCALE : KVEDGE_OK;
}

kvedge_side kvedge_side_of_head(const kvedge_side *side, int64_t row, int head) {
  kvedge_side of_head = *side;
  of_head.num_kv_heads = 1;
  of_head.codes = kvedge_codes_at(side, row) + (size_t)head * side->row_bytes;
  of_head.scales = kvedge_scales_at(side, row) + (size_t)head * side->scale_row_bytes;
  if (of_head.offset) of_head.offset += (ptrdiff_t)head * side->shape.dim;
  if (of_head.scale) of_head.scale += (ptrdiff_t)head * side->shape.dim;
  return of_head;
}

/* Some channels of the tokens of a run, rotated. */
static void rotate_run(const kvedge_side *side, const kvedge_array *rows, int64_t first, int head, int channel,
                       int count, float *to) {
  float room[KVEDGE_MAX_HEAD_DIM];
  for (int64_t token = first; token < first + KVEDGE_RUN; token++, to += count)
    kvedge_rotate_channels(kvedge_array_row(rows, token, head, side->shape.dim, room), side->rotated, channel, count,
                           to);
}

/* A head's part of the run that goes to row `at`. */
static void store_head_of_run(const kvedge_side *side, const kvedge_array *rows, int64_t first, int head, int64_t at) {
  const int dim = side->shape.dim;
  float x[KVEDGE_RUN * KVEDGE_RUN_CHANNELS];
  char *run = kvedge_codes_at(side, at) + (size_t)head * side->row_bytes;
  kvedge_array of_group = kvedge_array_from(rows, first, head);
  const ptrdiff_t group_bytes = KVEDGE_RUN_CHANNELS * kvedge_element_bytes(rows->type);
  for (int d = 0; d < dim; d += KVEDGE_RUN_CHANNELS, of_group.data = (char *)of_group.data + group_bytes) {
    const int count = dim - d < KVEDGE_RUN_CHANNELS ? dim - d : KVEDGE_RUN_CHANNELS;
    if (side->rotated) rotate_run(side, rows, first, head, d, count, x);
    else kvedge_array_copy(&of_group, KVEDGE_RUN, 1, count, x);
    side->format->encode_run(&side->shape, x, d, count, run);
  }
}

/* ---- A run on several threads ---------------------------------------------------------------- */

typedef struct {
  const kvedge_side *side;
  const kvedge_array *rows;
  int64_t at;
} run_to_store;

static void store_head(void *context, int head) {
  const run_to_store *of = context;
  store_head_of_run(of->side, of->rows, 0, head, of->at);
}

void kvedge_run_store(const kvedge_side *side, const kvedge_array *rows, int64_t at) {
  const double us = (double)KVEDGE_RUN * side->num_kv_heads * side->shape.dim / KVEDGE_RUN_VALUES_PER_US;
  run_to_store of = {side, rows, at};
  if (kvedge_is_of_runs(side->format)) kvedge_run_once(store_head, &of, side->num_kv_heads, kvedge_threads_for(us, 0));
  else kvedge_rows_store(side, rows, KVEDGE_RUN, at);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* Some tokens of a run, all heads. */
static void load_run(const kvedge_side *side, int64_t row, int count, float *out) {
  const int dim = side->shape.dim;
  const char *run = kvedge_codes_at(side, row);
  for (int head = 0; head < side->num_kv_heads; head++, run += side->row_bytes)
    side->format->decode_run(&side->shape, run, (int)(row % KVEDGE_RUN), count, out + head * dim,
                             (ptrdiff_t)side->num_kv_heads * dim);
}

void kvedge_rows_store(const kvedge_side *side, const kvedge_array *rows, int64_t num_tokens, int64_t at) {
  const int heads = side->num_kv_heads;
  if (num_tokens < 1) return;
  if (kvedge_is_of_runs(side->format)) {
    for (int64_t first = 0; first < num_tokens; first += KVEDGE_RUN)
      for (int head = 0; head < heads; head++) store_head_of_run(side, rows, first, head, at + first);
    return;
  }
  char *codes = kvedge_codes_at(side, at), *scales = kvedge_scales_at(side, at);
  if (!is_mapped(side) && kvedge_array_is_dense(rows, num_tokens, heads, side->shape.dim)) {
    side->format->encode(&side->shape, rows->data, num_tokens * heads, codes, scales);
    return;
  }
  float room[KVEDGE_MAX_HEAD_DIM];
  for (int64_t token = 0; token < num_tokens; token++)
    for (int head = 0; head < heads; head++, codes += side->row_bytes, scales += side->scale_row_bytes)
      side->format->encode(&side->shape, mapped(side, rows, token, head, room), 1, codes, scales);
}

static void clamp_to_finite(float *x, int n) {
  for (int d = 0; d < n; d++) x[d] = x[d] > FLT_MAX ? FLT_MAX : x[d] < -FLT_MAX ? -FLT_MAX : x[d];
}

/* Decoded rows as they were before they were rotated. */
static void rotate_back(const kvedge_side *side, int64_t num_rows, float *rows) {
  const int dim = side->shape.dim;
  for (int64_t row = 0; side->rotated && row < num_rows; row++, rows += dim) {
    clamp_to_finite(rows, dim);
    kvedge_rotate_channels(rows, side->rotated, 0, dim, rows);
  }
}

void kvedge_rows_load(const kvedge_side *side, int64_t start, int64_t stop, float *out) {
  const int64_t num_rows = (stop - start) * side->num_kv_heads;
  const int dim = side->shape.dim;
  if (num_rows == 0) return;
  if (kvedge_is_of_runs(side->format)) {
    for (int64_t row = start, count; row < stop; row += count) {
      count = KVEDGE_RUN - row % KVEDGE_RUN < stop - row ? KVEDGE_RUN - row % KVEDGE_RUN : stop - row;
      load_run(side, row, (int)count, out + (row - start) * side->num_kv_heads * dim);
    }
    rotate_back(side, num_rows, out);
    return;
  }
  side->format->decode(&side->shape, kvedge_codes_at(side, start), kvedge_scales_at(side, start), num_rows, out);
  rotate_back(side, num_rows, out);
  for (int64_t row = 0; is_mapped(side) && row < num_rows; row++, out += dim) {
    const ptrdiff_t at = row % side->num_kv_heads * dim;
    for (int d = 0; side->scale && d < dim; d++) out[d] *= side->scale[at + d];
    for (int d = 0; side->offset && d < dim; d++) out[d] += side->offset[at + d];
    clamp_to_finite(out, dim);
  }
}

void kvedge_copy_rows(const kvedge_side *from, int64_t row, const kvedge_side *to, int64_t at, int64_t num_tokens) {
  const size_t rows = (size_t)kvedge_num_rows(from->format, num_tokens) * (size_t)from->num_kv_heads;
  memmove(kvedge_codes_at(to, at), kvedge_codes_at(from, row), rows * from->row_bytes);
  if (from->format->has_scales)
    memmove(kvedge_scales_at(to, at), kvedge_scales_at(from, row), rows * from->scale_row_bytes);
}

float kvedge_rows_bound(const kvedge_side *side, int64_t start, int64_t stop) {
  const int64_t num_rows = kvedge_num_rows(side->format, stop) - kvedge_row_of(side->format, start);
  return side->format->bound(&side->shape, kvedge_codes_at(side, start), kvedge_scales_at(side, start),
                             num_rows * side->num_kv_heads);
}
