/* The reference in C: what every other kernel file computes, one element at a time, on any CPU. */
#include "kernels/portable.h"

static uint32_t abs_max_bits_scalar(const float *x, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = kvedge_bits_of_float(x[i]) & 0x7fffffffu;
    if (bits > largest) largest = bits;
  }
  return largest;
}

static void quantize_scalar(const float *x, size_t n, float inverse, int8_t *codes) {
  for (size_t i = 0; i < n; i++) codes[i] = (int8_t)rintf(x[i] * inverse);
}

static void scores_i8_scalar(const kvedge_query *q, const int8_t *k, ptrdiff_t token_stride,
                             int num_tokens, const float *k_scale, const void *prefetch,
                             float *scores, int accumulate) {
  (void)prefetch;
  for (int t = 0; t < num_tokens; t++, k += token_stride)
    for (int i = 0; i < q->num_queries; i++) {
      const float *query = q->values + i * q->stride;
      double dot = 0.0; /* one sum of up to 1024 products in a float would round too often */
      for (int d = 0; d < q->dim; d++) dot += query[d] * (float)k[d];
      float score = (float)dot * k_scale[t];
      float *out = scores + i * KVEDGE_TILE + t;
      *out = accumulate ? *out + score : score;
    }
}

static void weighted_sum_i8_scalar(const int8_t *v, ptrdiff_t token_stride, int num_tokens, int dim,
                                   int num_queries, int num_bytes, const float *p,
                                   const float *v_scale, const float *alpha, const void *prefetch,
                                   float *acc, ptrdiff_t acc_stride) {
  (void)num_bytes;
  (void)prefetch;
  for (int i = 0; i < num_queries; i++)
    for (int d = 0; d < dim; d++) {
      float sum = 0.0f;
      for (int t = 0; t < num_tokens; t++)
        sum += p[i * KVEDGE_TILE + t] * v_scale[t] * (float)v[t * token_stride + d];
      float *out = acc + i * acc_stride + d;
      *out = *out * alpha[i] + sum;
    }
}

#define DITHER_2(n) (n - 127.5f) / 256, (n + 0.5f) / 256
#define DITHER_4(n) DITHER_2(n), DITHER_2(n + 64)
#define DITHER_8(n) DITHER_4(n), DITHER_4(n + 32)
#define DITHER_16(n) DITHER_8(n), DITHER_8(n + 16)
#define DITHER_32(n) DITHER_16(n), DITHER_16(n + 8)
#define DITHER_64(n) DITHER_32(n), DITHER_32(n + 4)
#define DITHER_128(n) DITHER_64(n), DITHER_64(n + 2)
const float kvedge_dither[KVEDGE_TILE] = {DITHER_128(0), DITHER_128(1)};

const kvedge_kernels kvedge_kernels_scalar = {
    .name = "scalar",
    .step_bytes = 16 << 10,
    .parallel_work = 1 << 20,
    .abs_max_bits = abs_max_bits_scalar,
    .quantize = quantize_scalar,
    .dequantize = dequantize_portable,
    .scores_i8 = scores_i8_scalar,
    .transpose_scales = transpose_scales_portable,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .scores_f32 = scores_f32_portable,
    .softmax = softmax_portable,
    .weighted_sum_i8 = weighted_sum_i8_scalar,
    .weighted_sum_f32 = weighted_sum_f32_portable,
    .logits = KVEDGE_LOGIT_KERNELS,
    .read_bytes = read_bytes_portable,
    .multiply = multiply_portable,
};
