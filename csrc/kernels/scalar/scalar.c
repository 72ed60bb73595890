/* The reference in C: what every other kernel file computes, one element at a time, on any CPU. */
#include "formats/int4_levels.h"
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

static void scores_int8_scalar(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  for (int t = 0; t < keys->num_tokens; t++) {
    const int8_t *key = (const int8_t *)kvedge_tile_row(keys, t);
    for (int i = 0; i < q->num_queries; i++) {
      const float *query = q->values + i * q->stride;
      double dot = 0.0; /* one sum of up to 1024 products in a float would round too often */
      for (int d = 0; d < q->dim; d++) dot += query[d] * (float)key[d];
      float score = (float)dot * keys->scales[t];
      float *out = scores + i * KVEDGE_TILE + t;
      *out = accumulate ? *out + score : score;
    }
  }
}

static void weighted_sum_int8_scalar(const kvedge_probabilities *p, const kvedge_tile *values,
                                     const kvedge_accumulators *to) {
  const int8_t *rows[KVEDGE_TILE];
  float weights[KVEDGE_TILE];
  for (int t = 0; t < values->num_tokens; t++) rows[t] = (const int8_t *)kvedge_tile_row(values, t);
  for (int i = 0; i < p->num_queries; i++) {
    for (int t = 0; t < values->num_tokens; t++) weights[t] = p->p[i * KVEDGE_TILE + t] * values->scales[t];
    for (int d = 0; d < values->dim; d++) {
      float sum = 0.0f;
      for (int t = 0; t < values->num_tokens; t++) sum += weights[t] * (float)rows[t][d];
      float *out = to->acc + i * to->stride + d;
      *out = *out * to->rescale[i] + sum;
    }
  }
}

static void widen_row(const uint8_t *codes, int n, int8_t *out) {
  for (int d = 0; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"
KVEDGE_INT4_FUNCTIONS(scalar, scores_int8_scalar, weighted_sum_int8_scalar)

#include "kernels/kivi_portable.h"
#define INT8_CELL {.scores = scores_int8_scalar, .weighted_sum = weighted_sum_int8_scalar}

#include "kernels/blocks.h"
KVEDGE_BLOCKS_FUNCTIONS(scalar, INT8_CELL)

#define STATE_FLOATS 4
#include "kernels/states.h"

static const kvedge_row_kernels path_rows = {
    .abs_max_bits = abs_max_bits_scalar,
    .quantize = quantize_scalar,
    .dequantize = dequantize_portable,
    .transpose_scales = transpose_scales_portable,
    .softmax = softmax_portable,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .read_bytes = read_bytes_portable,
};
static const kvedge_logit_kernels path_logits = KVEDGE_LOGIT_KERNELS;
static const kvedge_state_kernels path_states = KVEDGE_STATE_KERNELS;

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
    .tuning = {.step_bytes = 16 << 10, .work_per_us = 2000},
    .cells = {[KVEDGE_INT8] = INT8_CELL,
               [KVEDGE_INT4] = {.scores = scores_int4_scalar, .weighted_sum = weighted_sum_int4_scalar},
               [KVEDGE_FLOAT32] = KVEDGE_PORTABLE_CELL(float32)},
    .runs = KVEDGE_RUNS_PORTABLE,
    .blocks = KVEDGE_BLOCKS_CELL(scalar, NULL),
    .rows = &path_rows,
    .logits = &path_logits,
    .states = &path_states,
    .multiply = multiply_portable,
};
