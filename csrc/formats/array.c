/* Rows of the caller's arrays: float32, float16 or bfloat16, with any strides between rows. */
#include "formats/array.h"

#include "formats/half.h"
#include "system/dispatch.h"

int kvedge_array_is_apart(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim) {
  const ptrdiff_t row = dim * kvedge_element_bytes(array->type);
  ptrdiff_t tokens = array->token_stride < 0 ? -array->token_stride : array->token_stride;
  ptrdiff_t heads = array->head_stride < 0 ? -array->head_stride : array->head_stride;
  if (num_tokens <= 1) return num_heads <= 1 || heads >= row;
  if (num_heads <= 1) return tokens >= row;
  if (tokens >= heads) return heads >= row && (tokens - row) / heads >= num_heads - 1;
  return tokens >= row && (heads - row) / tokens >= num_tokens - 1;
}

void kvedge_widen(kvedge_element_type type, const void *from, int n, float *restrict to) {
  const uint16_t *in = from;
  if (type == KVEDGE_TYPE_BFLOAT16)
    for (int i = 0; i < n; i++) to[i] = kvedge_float_of_bfloat(in[i]);
  else
    for (int i = 0; i < n; i++) to[i] = kvedge_float_of_any_half(in[i]);
}

const float *kvedge_array_row(const kvedge_array *array, int64_t token, int64_t head, int dim, float *room) {
  const char *row = kvedge_array_at(array, token, head);
  if (array->type == KVEDGE_TYPE_FLOAT32) return (const float *)row;
  kvedge_widen(array->type, row, dim, room);
  return room;
}

/* x, or the nearest that is not beyond +-largest, as its bits. */
static inline float bounded(float x, uint32_t largest) {
  const uint32_t bits = kvedge_bits_of_float(x), magnitude = bits & 0x7fffffffu;
  return kvedge_float_of_bits((bits ^ magnitude) | (magnitude > largest ? largest : magnitude));
}

void kvedge_narrow(kvedge_element_type type, const float *from, int n, void *to) {
  enum { LARGEST_HALF = 0x477fe000, LARGEST_BFLOAT = 0x7f7f0000 };
  uint16_t *restrict out = to;
  if (type == KVEDGE_TYPE_BFLOAT16)
    for (int i = 0; i < n; i++) out[i] = kvedge_bfloat_of_float(bounded(from[i], LARGEST_BFLOAT));
  else
    for (int i = 0; i < n; i++) out[i] = kvedge_half_of_float(bounded(from[i], LARGEST_HALF));
}

uint32_t kvedge_array_abs_max_bits(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim) {
  const kvedge_kernels *kernels = kvedge_active();
  if (num_tokens < 1) return 0;
  if (kvedge_array_is_dense(array, num_tokens, num_heads, dim))
    return kernels->rows->abs_max_bits(array->data, (size_t)num_tokens * (size_t)num_heads * (size_t)dim);
  float room[KVEDGE_MAX_HEAD_DIM];
  uint32_t largest = 0;
  for (int64_t token = 0; token < num_tokens; token++)
    for (int head = 0; head < num_heads; head++) {
      const uint32_t bits = kernels->rows->abs_max_bits(kvedge_array_row(array, token, head, dim, room), (size_t)dim);
      largest = bits > largest ? bits : largest;
    }
  return largest;
}

void kvedge_array_copy(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim, float *to) {
  const size_t n = (size_t)num_heads * (size_t)dim;
  if (kvedge_array_is_dense(array, num_tokens, num_heads, dim)) {
    memcpy(to, array->data, (size_t)num_tokens * n * sizeof *to);
    return;
  }
  for (int64_t token = 0; token < num_tokens; token++)
    for (int head = 0; head < num_heads; head++, to += dim) {
      if (array->type == KVEDGE_TYPE_FLOAT32) memcpy(to, kvedge_array_at(array, token, head), (size_t)dim * sizeof *to);
      else kvedge_widen(array->type, kvedge_array_at(array, token, head), dim, to);
    }
}
