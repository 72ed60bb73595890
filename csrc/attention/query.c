/* Query rows into the form that the kernels read: normalised floats, and codes where a path has them. */
#include <float.h>
#include <math.h>

#include "attention/internal.h"

#define LOG2_E 1.4426950408889634

static double dot(const float *a, const float *b, int n) {
  double sum = 0.0;
  for (int d = 0; d < n; d++) sum += (double)a[d] * b[d];
  return sum;
}

static float sum_of(const float *x, int n, float factor) {
  double sum = 0.0;
  for (int d = 0; d < n; d++) sum += (double)x[d] * factor;
  return (float)sum;
}

static float largest_magnitude(const kvedge_attention *a, const float *x, int n) {
  return kvedge_float_of_bits(a->kernels->rows->abs_max_bits(x, (size_t)n));
}

/* One query times factor, group by group: as codes, or as floats padded with zeros. `largest` is of all of x. */
static void fill(const kvedge_attention *a, const kvedge_queries *to, const float *x, float factor, float largest,
                 size_t index) {
  const int dim = a->view.side[KEYS].shape.dim;
  size_t pad = (size_t)a->group_pad;
  size_t at = index * (size_t)a->num_groups;
  for (int start = 0; start < dim; start += a->group_size, at++) {
    int n = dim - start < a->group_size ? dim - start : a->group_size;
    if (to->sums) to->sums[at] = sum_of(x + start, n, factor);
    if (to->quantized) {
      const int one_scale = a->num_groups == 1 || a->takes_groups[KEYS];
      float of_group = one_scale ? largest : largest_magnitude(a, x + start, n);
      a->cells[KEYS]->encode_query(x + start, n, factor, of_group * fabsf(factor), a->planes[KEYS],
                                   to->quantized + at * pad * KVEDGE_QUANTIZED_BYTES, to->scales + at,
                                   to->offsets + at * 4);
      continue;
    }
    float *values = to->values + at * pad;
    for (int d = 0; d < n; d++) values[d] = x[start + d] * factor;
    memset(values + n, 0, (pad - (size_t)n) * sizeof *values);
  }
}

static double between(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

/* The power of two below a magnitude. Below 2^-126 it is 1: such channels are left as they are, and
 * count for nothing. (Its inverse must be a number too.) */
static double power_below(float magnitude) {
  return magnitude >= FLT_MIN ? kvedge_float_of_bits(kvedge_bits_of_float(magnitude) & 0x7f800000u) : 1.0;
}

/* What two planes of a query may cost, as kvedge_queries.error has it. They round a channel by up to half of
 * 256 * scale, evenly spread; that moves a logit by about the spread times |key|: one channel of 127 codes, and a third
 * of that in the others. */
static float quantization_error(const kvedge_attention *a, const kvedge_queries *q, size_t index, double key_norm) {
  const float *scales = q->scales + index * (size_t)a->num_groups;
  float largest = 0.0f;
  for (int g = 0; g < a->num_groups; g++) largest = scales[g] > largest ? scales[g] : largest;
  const double inverse_sqrt_12 = 0.28867513459481287;
  return (float)between(256.0 * inverse_sqrt_12 * largest * key_norm * q->logit_factor[index], 0.0, FLT_MAX);
}

/* The same for runs, per unit of a code of the query: their cell encodes it. Less the middle
 * one, codes of `bits` bits are taken for even from end to end. */
static float error_of_code(const kvedge_attention *a, const kvedge_queries *q, size_t index) {
  const kvedge_view_side *keys = &a->view.side[KEYS];
  const double key_norm = (1 << keys->format->bits) * sqrt(keys->shape.dim / 12.0);
  return (float)between(key_norm / sqrt(12.0) * q->logit_factor[index], 0.0, FLT_MAX);
}

/* A query times the scales that stored keys were divided by, over a power of two, *unit, that brings the largest
 * product near 1: no finite numbers leave float's range. */
static const float *times_key_scale(const float *x, const float *key_scale, int dim, float room[KVEDGE_MAX_HEAD_DIM],
                                    double *unit) {
  double largest = 0.0;
  for (int d = 0; d < dim; d++) {
    const double product = fabs((double)x[d] * key_scale[d]);
    largest = product > largest ? product : largest;
  }
  *unit = largest > 0.0 ? ldexp(1.0, ilogb(largest)) : 1.0;
  const double inverse = 1.0 / *unit; /* exact */
  for (int d = 0; d < dim; d++) room[d] = (float)((double)x[d] * key_scale[d] * inverse);
  return room;
}

static void prepare_row(const kvedge_attention *a, const kvedge_queries *to, const float *x, int kv_head,
                        size_t index) {
  const kvedge_cache_view *view = &a->view;
  const float scale = a->options.scale;
  int dim = view->side[KEYS].shape.dim;
  const ptrdiff_t of_head = (ptrdiff_t)kv_head * dim;
  float room[KVEDGE_MAX_HEAD_DIM];
  double constant = view->key_offset ? scale * dot(x, view->key_offset + of_head, dim) : 0.0;
  double scale_unit = 1.0;
  if (view->key_scale) x = times_key_scale(x, view->key_scale + of_head, dim, room, &scale_unit);
  float largest = largest_magnitude(a, x, dim);
  double unit = power_below(largest);
  fill(a, to, x, (float)(scale < 0.0f ? -1.0 / unit : 1.0 / unit), largest, index);
  double factor = fabs((double)scale) * unit * scale_unit / a->factor[KEYS];
  to->logit_factor[index] = factor;
  to->logit_bias[index] = constant;
  /* > 0 even where the scale is 0: a score of -infinity times 0 would be no number */
  to->log2_scale[index] = (float)between(a->real_logits ? LOG2_E : factor * LOG2_E, FLT_MIN, FLT_MAX);
}

static void prepare_place(const kvedge_attention *a, const kvedge_slice_place *of, const kvedge_queries *to) {
  int dim = a->view.side[KEYS].shape.dim, heads = a->heads_per_kv_head;
  double key_norm = 127.0 * sqrt((dim + 8) / 9.0);
  float room[KVEDGE_MAX_HEAD_DIM];
  for (int64_t r = 0; r < of->block.count; r++)
    for (int kv_head = of->kv_head; kv_head < of->kv_head + of->num_kv_heads; kv_head++)
      for (int g = 0; g < heads; g++) {
        const float *x = kvedge_array_row(&a->query, of->block.first + r, kv_head * heads + g, dim, room);
        size_t index = kvedge_query_index(a, kv_head) + (size_t)(r * heads + g);
        prepare_row(a, to, x, kv_head, index);
        if (to->quantized) to->error[index] = quantization_error(a, to, index, key_norm);
        else if (to->error) to->error[index] = error_of_code(a, to, index);
      }
}

/* Returns the bytes; base NULL: only that. */
static size_t lay_out(const kvedge_attention *a, char *base, kvedge_queries *q) {
  size_t used = 0;
  size_t queries = (size_t)a->view.num_kv_heads * (size_t)a->query_rows, groups = queries * (size_t)a->num_groups;
  size_t channels = groups * (size_t)a->group_pad;
  *q = (kvedge_queries){.values = NULL};
  if (a->cells[KEYS]->encode_query || kvedge_is_of_runs(a->view.side[KEYS].format))
    q->error = kvedge_take(base, &used, queries * sizeof *q->error);
  if (a->cells[KEYS]->encode_query) {
    q->quantized = kvedge_take(base, &used, channels * KVEDGE_QUANTIZED_BYTES);
    q->scales = kvedge_take(base, &used, groups * sizeof *q->scales);
    q->offsets = kvedge_take(base, &used, groups * 4 * sizeof *q->offsets);
  } else {
    q->values = kvedge_take(base, &used, channels * sizeof *q->values);
  }
  const kvedge_block_codes *codes = a->view.side[KEYS].format->codes;
  if (codes && codes->mins_at) q->sums = kvedge_take(base, &used, groups * sizeof *q->sums);
  q->log2_scale = kvedge_take(base, &used, queries * sizeof *q->log2_scale);
  q->logit_factor = kvedge_take(base, &used, queries * sizeof *q->logit_factor);
  q->logit_bias = kvedge_take(base, &used, queries * sizeof *q->logit_bias);
  return used;
}

size_t kvedge_query_bytes(const kvedge_attention *a) {
  kvedge_queries unused;
  return lay_out(a, NULL, &unused);
}

kvedge_queries kvedge_queries_of(const kvedge_attention *a, int64_t block, int slot) {
  kvedge_queries q;
  lay_out(a, a->queries + (size_t)(kvedge_slices_prepare(a) ? slot : block) * a->query_bytes, &q);
  return q;
}

kvedge_queries kvedge_queries_for(const kvedge_attention *a, const kvedge_slice_place *place, int slot) {
  kvedge_queries q = kvedge_queries_of(a, place->block.index, slot);
  if (kvedge_slices_prepare(a)) prepare_place(a, place, &q);
  return q;
}

void kvedge_prepare_queries(const kvedge_attention *a) {
  if (kvedge_slices_prepare(a)) return;
  for (int64_t i = 0; i < a->num_row_blocks; i++) {
    const kvedge_slice_place all = {.block = kvedge_row_block_of(a, i), .num_kv_heads = a->view.num_kv_heads};
    kvedge_queries q = kvedge_queries_of(a, i, 0);
    prepare_place(a, &all, &q);
  }
}
