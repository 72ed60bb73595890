/* What the steps of all states share: the memory of a thread, two products, and how tasks are shared out. */
#ifndef KVEDGE_STATE_H
#define KVEDGE_STATE_H

#include <math.h>
#include <string.h>

#include "formats/array.h"
#include "formats/half.h"
#include "kernels/kernels.h"

enum {
  KVEDGE_STATE_DIM = 256,  /* of a head, at most: rows of KVEDGE_TILE, which products take */
  KVEDGE_STATE_CHUNK = 16, /* tokens that are worked on together: with one row more each, KVEDGE_QUERY_ROWS */
};

/* Elements of a row of weights: kernels have them KVEDGE_TILE apart. */
typedef float kvedge_state_row[KVEDGE_TILE];

extern const float kvedge_state_ones[KVEDGE_QUERY_ROWS];

/* The working memory of a thread. */
typedef struct {
  _Alignas(64) char scratch[KVEDGE_SCRATCH];
  kvedge_state_row rows[KVEDGE_QUERY_ROWS];    /* what is multiplied with the state */
  kvedge_state_row weights[KVEDGE_QUERY_ROWS]; /* of rows that are added */
  kvedge_state_row sums[KVEDGE_QUERY_ROWS];
  kvedge_state_row to_state[KVEDGE_QUERY_ROWS]; /* weights of what is added to the state */
  kvedge_state_row more[KVEDGE_STATE_CHUNK], values[KVEDGE_STATE_CHUNK], updates[KVEDGE_STATE_CHUNK];
  kvedge_state_row solve[KVEDGE_STATE_CHUNK];
  float decay[KVEDGE_STATE_DIM];
  float state[KVEDGE_STATE_DIM * KVEDGE_STATE_DIM]; /* of a head, where it is not read in place */
} kvedge_state_memory;

/* sums[i] = sums[i] * keep[i] + the sum over t of weights[i][t] rows[t], for n rows i up to KVEDGE_QUERY_ROWS, and
 * num_rows rows t of `dim` floats, up to KVEDGE_TILE, `stride` floats apart. Weights are KVEDGE_TILE apart, and those behind
 * the last become 0 to a multiple of 4. */
void kvedge_state_add_rows(const kvedge_kernels *kernels, char *scratch, float *weights, int n, const float *rows,
                           ptrdiff_t stride, int num_rows, int dim, const float *keep, float *sums,
                           ptrdiff_t sum_stride);

/* products[i][t] = the product of query i and rows[t]. Queries are `query_stride` floats apart, and zeros from dim to a
 * multiple of 64. */
void kvedge_state_multiply(const kvedge_kernels *kernels, char *scratch, const float *queries, ptrdiff_t query_stride,
                           int n, const float *rows, ptrdiff_t stride, int num_rows, int dim,
                           kvedge_state_row *products);

/* to[r][t] = rows[t][first + r], for num_rows rows and `dim` elements of each; rows of both KVEDGE_TILE apart. */
void kvedge_state_transpose(const kvedge_kernels *kernels, const float *rows, int num_rows, int first, int dim,
                            float *to);

/* The first n elements, and zeros to a multiple of 64. */
static inline void kvedge_state_take_row(const kvedge_array *from, int64_t token, int head, int dim, float *to) {
  const float *row = kvedge_array_row(from, token, head, dim, to);
  if (row != to) memcpy(to, row, (size_t)dim * sizeof *to);
  for (int d = dim; d < kvedge_padded_channels(dim); d++) to[d] = 0.0f;
}

/* A row of floats to an array. */
static inline void kvedge_state_put_row(const float *row, int dim, const kvedge_array *to, int64_t token, int head) {
  char *out = kvedge_array_at(to, token, head);
  if (to->type == KVEDGE_TYPE_FLOAT32) memcpy(out, row, (size_t)dim * sizeof *row);
  else kvedge_narrow(to->type, row, dim, out);
}

/* One element. */
static inline float kvedge_state_number(const kvedge_array *from, int64_t token, int head) {
  float room;
  return *kvedge_array_row(from, token, head, 1, &room);
}

/* The logarithm of a decay. None is so small that a sum of them is infinite. */
static inline float kvedge_log_decay(float x) { return x > -1e30f ? x : -1e30f; }

/* decays[i][j], j <= i: from token j, which is not decayed, to token i, by the decay of each; 0 for j > i. */
static inline void kvedge_state_decays(const float *decay, int n,
                                       float decays[KVEDGE_STATE_CHUNK][KVEDGE_STATE_CHUNK]) {
  float row[KVEDGE_STATE_CHUNK] = {0};
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < KVEDGE_STATE_CHUNK; j++) row[j] *= decay[i];
    row[i] = 1.0f;
    memcpy(decays[i], row, sizeof row);
  }
}

/* Is it all finite, and of the shape? Where not, `status` is what to return. */
int kvedge_state_is_valid(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim, kvedge_status *status);

/* Is no number above 0? */
int kvedge_state_is_nonpositive(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim);

static inline int kvedge_is_state(const void *state, kvedge_element_type type) {
  return state && (type == KVEDGE_TYPE_FLOAT32 || type == KVEDGE_TYPE_BFLOAT16) &&
         (uintptr_t)state % (uintptr_t)kvedge_element_bytes(type) == 0;
}

/* Runs tasks 0..num_tasks-1, each once; `work` is what they do in all, as the unit of kvedge_tuning has it. */
typedef void kvedge_state_task(const void *context, int task, kvedge_state_memory *memory);
kvedge_status kvedge_state_run(kvedge_state_task *run, const void *context, int num_tasks, int64_t work,
                               int num_threads);

#endif
