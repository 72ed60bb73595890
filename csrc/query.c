/* Query rows into the form that the kernels read: 16-bit codes, or scaled floats. */
#include <float.h>
#include <math.h>

#include "attention.h"

#define LOG2_E 1.4426950408889634

/* Adding it to a double of magnitude below 2^31 leaves the nearest integer, ties to even, in the low
 * bits: rounding that compilers turn into vector code on any CPU. */
#define ROUND 6755399441055744.0 /* 1.5 * 2^52 */

enum { MAX_HEAD_DIM = 1024 };

static double dot(const float *a, const float *b, int n) {
  double sum = 0.0;
  for (int d = 0; d < n; d++) sum += (double)a[d] * b[d];
  return sum;
}

/* Codes of n channels of one group; x becomes what they leave. unit is a power of two near the row's
 * largest magnitude. */
static void quantize_group(const kvedge_attention *a, kvedge_query_part *part, double *x, int n,
                           double unit, size_t index) {
  int16_t *codes = part->codes + index * (size_t)a->group_pad;
  int8_t *hi = part->hi + index * (size_t)a->group_pad;
  int8_t *lo = part->lo + index * (size_t)a->group_pad;
  double largest = 0.0;
  for (int d = 0; d < n; d++) largest = fabs(x[d]) > largest ? fabs(x[d]) : largest;
  float scale = (float)(largest / (KVEDGE_QUERY_MAX * unit));
  double step = scale * unit, inverse = scale > 0.0f ? 1.0 / step : 0.0;
  int32_t sum_hi = 0, sum_lo = 0;
  for (int d = 0; d < n; d++) {
    double rounded = (x[d] * inverse + ROUND) - ROUND;
    x[d] -= rounded * step;
    codes[d] = (int16_t)(int32_t)rounded;
  }
  for (int d = 0; d < n; d++) {
    lo[d] = (int8_t)codes[d];
    hi[d] = (int8_t)((codes[d] - lo[d]) >> 8);
    sum_lo += lo[d];
    sum_hi += hi[d];
  }
  size_t padding = (size_t)(a->group_pad - n);
  memset(codes + n, 0, padding * sizeof *codes);
  memset(hi + n, 0, padding);
  memset(lo + n, 0, padding);
  part->scale[index] = scale;
  part->sum_hi[index] = sum_hi;
  part->sum_lo[index] = sum_lo;
}

static void prepare_row(kvedge_attention *a, const float *x, int kv_head, size_t index) {
  const kvedge_cache_view *view = &a->view;
  const float scale = a->options.scale;
  int dim = view->head_dim;
  float largest = kvedge_float_of_bits(a->kernels->abs_max_bits(x, (size_t)dim));
  int exponent = largest > 0.0f ? ilogbf(largest) : 0;
  double unit = ldexp(1.0, exponent);
  int negative = scale < 0.0f;
  if (view->format == KVEDGE_INT8) {
    for (int g = 0; g < view->num_groups; g++) {
      int start = g * view->group_size, n = dim - start < view->group_size ? dim - start : view->group_size;
      double left[MAX_HEAD_DIM];
      for (int d = 0; d < n; d++) left[d] = negative ? -(double)x[start + d] : (double)x[start + d];
      for (int i = 0; i < a->num_parts; i++)
        quantize_group(a, &a->parts[i], left, n, unit, index * (size_t)view->num_groups + (size_t)g);
    }
  } else {
    float *values = a->values + index * (size_t)a->group_pad;
    double inverse = (negative ? -1.0 : 1.0) / unit;
    for (int d = 0; d < dim; d++) values[d] = (float)(x[d] * inverse);
    memset(values + dim, 0, (size_t)(a->group_pad - dim) * sizeof *values);
  }
  double factor = fabs((double)scale) * unit / a->key_factor;
  double constant = view->key_offset ? scale * dot(x, view->key_offset + (ptrdiff_t)kv_head * dim, dim) : 0.0;
  a->logit_factor[index] = factor;
  a->logit_bias[index] = constant;
  /* > 0 even where the scale is 0: a score of -infinity times 0 would be no number */
  double softmax_factor = a->real_logits ? LOG2_E : factor * LOG2_E;
  a->softmax_factor[index] = (float)fmin(fmax(softmax_factor, FLT_MIN), FLT_MAX);
}

void kvedge_prepare_queries(kvedge_attention *a, const float *query) {
  int dim = a->view.head_dim, group = a->heads_per_kv_head;
  for (int64_t block = 0; block < a->num_row_blocks; block++)
    for (int kv_head = 0; kv_head < a->view.num_kv_heads; kv_head++) {
      size_t index = kvedge_query_index(a, block, kv_head);
      int64_t rows = kvedge_rows_in_block(a, block);
      for (int64_t r = 0; r < rows; r++)
        for (int g = 0; g < group; g++, index++) {
          int64_t row = block * a->rows_per_block + r;
          const float *x = query + (row * a->num_heads + (int64_t)kv_head * group + g) * dim;
          prepare_row(a, x, kv_head, index);
        }
    }
}
