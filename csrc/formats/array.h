/* Arrays of the caller's, kvedge_array: rows of (token, head), as float32 and back. */
#ifndef KVEDGE_ARRAY_H
#define KVEDGE_ARRAY_H

#include "formats/format.h"

/* A float32 array whose tokens, and the heads of each, lie one after the other. */
static inline kvedge_array kvedge_dense_array(const float *data, int num_heads, int dim) {
  const ptrdiff_t row = dim * (ptrdiff_t)sizeof(float);
  return (kvedge_array){
      .data = (void *)data, .type = KVEDGE_TYPE_FLOAT32, .token_stride = num_heads * row, .head_stride = row};
}

static inline ptrdiff_t kvedge_element_bytes(kvedge_element_type type) { return type == KVEDGE_TYPE_FLOAT32 ? 4 : 2; }

/* Is it there, of a known type, and are all rows aligned to its elements? */
static inline int kvedge_array_is_valid(const kvedge_array *array) {
  if (!array->data || (unsigned)array->type > KVEDGE_TYPE_BFLOAT16) return 0;
  const uintptr_t within = (uintptr_t)kvedge_element_bytes(array->type) - 1;
  return (((uintptr_t)array->data | (uintptr_t)array->token_stride | (uintptr_t)array->head_stride) & within) == 0;
}

/* Do no two rows share a byte? Surely not where the larger stride passes over all that the smaller one reaches;
 * interleaved in another way: no. */
int kvedge_array_is_apart(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim);

static inline int kvedge_array_is_dense(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim) {
  const ptrdiff_t row = dim * (ptrdiff_t)sizeof(float);
  return array->type == KVEDGE_TYPE_FLOAT32 && (num_heads == 1 || array->head_stride == row) &&
         (num_tokens == 1 || array->token_stride == num_heads * row);
}

static inline char *kvedge_array_at(const kvedge_array *array, int64_t token, int64_t head) {
  return (char *)array->data + token * array->token_stride + head * array->head_stride;
}

/* The same array from a token and head on. */
static inline kvedge_array kvedge_array_from(const kvedge_array *array, int64_t token, int64_t head) {
  kvedge_array from = *array;
  from.data = kvedge_array_at(array, token, head);
  return from;
}

/* n elements of 16 bits at `from` as float32. */
void kvedge_widen(kvedge_element_type type, const void *from, int n, float *to);

/* A row: where it lies, or if it is not float32 its values in `room` (dim). */
const float *kvedge_array_row(const kvedge_array *array, int64_t token, int64_t head, int dim, float *room);

/* Finite float32 to a row of 16-bit elements, to nearest, ties to even; the largest finite number instead of an
 * infinity. */
void kvedge_narrow(kvedge_element_type type, const float *from, int n, void *to);

/* The bits of the largest magnitude of all rows, as kvedge_row_kernels.abs_max_bits gives them. */
uint32_t kvedge_array_abs_max_bits(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim);

/* All rows as float32, one after the other. */
void kvedge_array_copy(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim, float *to);

#endif
