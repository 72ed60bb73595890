/* Partial results of slices into one, exactly, and that into the output. */
#include <float.h>
#include <math.h>

#include "attention/internal.h"
#include "store/rotation.h"

/* total += partial, of one query: maximum, sum and accumulator. */
static void merge(const kvedge_attention *a, const kvedge_queries *q, size_t state, kvedge_partial *total,
                  const kvedge_partial *partial) {
  float risen = partial->max[state] - total->max[state], keep = 1.0f, add = 1.0f;
  if (risen > 0.0f) keep = exp2f(-risen * q->log2_scale[state]);
  else add = exp2f(risen * q->log2_scale[state]);
  total->max[state] = risen > 0.0f ? partial->max[state] : total->max[state];
  total->sum[state] = total->sum[state] * keep + partial->sum[state] * add;
  size_t row = state * (size_t)a->acc_stride;
  a->kernels->rows->merge_row(total->acc + row, keep, partial->acc + row, add, a->view.side[VALUES].shape.dim);
}

/* The logarithm of one query's softmax denominator, without learned sinks; -INFINITY: it saw nothing. */
static double log_denominator(const kvedge_attention *a, const kvedge_queries *q, size_t state, double max,
                              double sum) {
  if (!(sum > 0.0)) return -INFINITY;
  if (!a->real_logits) max = max * q->logit_factor[state] + q->logit_bias[state];
  return max + log(sum);
}

/* A learned sink is one more logit, whose value is nothing. Returns what remains of the others' share. */
static double join_sink(double sink, double *log_sum) {
  double larger = *log_sum > sink ? *log_sum : sink;
  double together = larger + log(exp(*log_sum - larger) + exp(sink - larger));
  double share = exp(*log_sum - together);
  *log_sum = together;
  return share;
}

/* A row of the output: acc * factor, rotated back. */
static void write_row(const kvedge_attention *a, const float *acc, float factor, int64_t row, int head) {
  const int dim = a->view.side[VALUES].shape.dim, is_float32 = a->out.type == KVEDGE_TYPE_FLOAT32;
  const int rotated = a->view.values_rotated;
  float room[KVEDGE_MAX_HEAD_DIM], sums[KVEDGE_MAX_HEAD_DIM];
  void *out = kvedge_array_at(&a->out, row, head);
  if (rotated) {
    kvedge_rotate_sums(acc, dim, rotated, sums);
    acc = sums, factor /= sqrtf((float)rotated);
  }
  a->kernels->rows->scale_row(acc, dim, factor, 1.0f / a->factor[VALUES], is_float32 ? out : room);
  if (!is_float32) kvedge_narrow(a->out.type, room, dim, out);
}

/* One query's output and the logarithm of its softmax denominator. */
static void finish(const kvedge_attention *a, const kvedge_queries *q, size_t state, int64_t row, int head,
                   const kvedge_partial *total) {
  float *lse = a->lse ? a->lse + row * a->num_heads + head : NULL;
  double sum = total->sum[state], keep = 1.0;
  double *log_sum_out = a->log_sums ? a->log_sums + row * a->num_heads + head : NULL;
  if (lse || log_sum_out || a->options.sink_logits) {
    double log_sum = log_denominator(a, q, state, total->max[state], sum);
    if (a->options.sink_logits) keep = join_sink(a->options.sink_logits[head], &log_sum);
    if (log_sum_out) *log_sum_out = log_sum;
    if (lse) *lse = log_sum == -INFINITY ? -INFINITY : kvedge_bounded((float)log_sum);
  }
  float factor = sum > 0.0 ? (float)(keep / sum) : 0.0f;
  write_row(a, total->acc + state * (size_t)a->acc_stride, factor, row, head);
}

void kvedge_merge_slice(const kvedge_attention *a, int slice, int slot) {
  const kvedge_slice_place of = kvedge_place_of(a, slice);
  const int heads = a->heads_per_kv_head, is_last = of.chunk + 1 == a->chunks_per_block;
  const kvedge_queries q = kvedge_queries_of(a, of.block.index, slot);
  const kvedge_partial partial = kvedge_partial_at(a, slot);
  kvedge_partial total = kvedge_partial_at(a, a->num_slots);
  const size_t first = kvedge_query_index(a, of.kv_head), states = kvedge_query_index(a, of.num_kv_heads);
  if (of.chunk == 0 && !is_last) {
    const size_t stride = (size_t)a->acc_stride;
    memcpy(total.max + first, partial.max + first, states * sizeof *total.max);
    memcpy(total.sum + first, partial.sum + first, states * sizeof *total.sum);
    memcpy(total.acc + first * stride, partial.acc + first * stride, states * stride * sizeof *total.acc);
    return;
  }
  for (int64_t r = 0; r < of.block.count; r++)
    for (int kv_head = of.kv_head; kv_head < of.kv_head + of.num_kv_heads; kv_head++)
      for (int g = 0; g < heads; g++) {
        const size_t state = kvedge_query_index(a, kv_head) + (size_t)(r * heads + g);
        if (of.chunk > 0) merge(a, &q, state, &total, &partial);
        if (is_last) finish(a, &q, state, of.block.first + r, kv_head * heads + g, of.chunk > 0 ? &total : &partial);
      }
}
