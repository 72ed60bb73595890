/* Attention in double over what a layer stores, with every option; plain loops, nothing shared with csrc/. */
#ifndef KVEDGE_FUZZ_REFERENCE_H
#define KVEDGE_FUZZ_REFERENCE_H

#include <float.h>

#include "kvedge.h"
#include "program.h"

typedef struct {
  kvedge_attention_options options; /* scale is a number here */
  int64_t len, num_rows;
  int num_heads, num_kv_heads, dim;
  const float *query;          /* [num_rows][num_heads][dim] */
  const double *keys, *values; /* [len][num_kv_heads][dim], as stored */
  const float *offset;         /* [num_kv_heads][dim] or NULL; contained in keys */
} ref_call;

typedef struct {
  double lse;       /* -INFINITY: saw nothing */
  double amplitude; /* of the logits' terms: what their rounding errors are in proportion to */
  double spread;    /* the largest channel of sum(p |v|) */
  double largest;   /* magnitude of the values seen */
  double largest_key;
} ref_row;

static inline double half_value(uint16_t half) {
  int exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
  if (exponent == 31) return NAN;
  double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return half >> 15 ? -x : x;
}

static inline double clamped(double x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

/* ---- Storage formats ---- */

static inline double int8_element(const void *row, int d) { return ((const int8_t *)row)[d]; }
static inline double float32_element(const void *row, int d) { return ((const float *)row)[d]; }
static inline double float16_element(const void *row, int d) { return half_value(((const uint16_t *)row)[d]); }
static inline double bfloat16_element(const void *row, int d) {
  const uint32_t bits = (uint32_t)((const uint16_t *)row)[d] << 16;
  float x;
  return memcpy(&x, &bits, sizeof x), x;
}

/* Rows of a caller's own: any bytes that the header allows. */
static inline void fill_int8(void *row, int dim, int style) {
  (void)style;
  for (int d = 0; d < dim; d++) ((int8_t *)row)[d] = (int8_t)((int)(random_bits() % 255) - 127);
}
static inline void fill_float32(void *row, int dim, int style) { fill_rows(row, 1, dim, style); }
static inline void fill_float16(void *row, int dim, int style) {
  for (int d = 0; d < dim; d++) {
    unsigned exponent = style < ORDINARY_STYLES ? 12 + random_bits() % 4 : random_bits() % 31;
    ((uint16_t *)row)[d] = (uint16_t)((random_bits() % 2) << 15 | exponent << 10 | random_bits() % 1024);
  }
}
static inline void fill_bfloat16(void *row, int dim, int style) {
  for (int d = 0; d < dim; d++) {
    unsigned exponent = style < ORDINARY_STYLES ? 124 + random_bits() % 4 : random_bits() % 255;
    ((uint16_t *)row)[d] = (uint16_t)((random_bits() % 2) << 15 | exponent << 7 | random_bits() % 128);
  }
}

/* What kvedge.h and docs/numerics.md say of a format; a new one needs a row. */
typedef struct {
  int bits;       /* of an element */
  int has_scales; /* a row has one for each group; its largest element is `steps` of them */
  int steps;
  double rounding, smallest; /* what storing moves an element by: so much of it, or of the smallest subnormal */
  double too_large;          /* elements from here on are refused */
  double (*element)(const void *row, int d); /* times a scale, where there are scales */
  void (*fill)(void *row, int dim, int style);
} ref_format;

static const ref_format ref_formats[] = {
    [KVEDGE_INT8] =
        {.bits = 8, .has_scales = 1, .steps = 127, .too_large = INFINITY, .element = int8_element, .fill = fill_int8},
    [KVEDGE_FLOAT32] = {.bits = 32, .too_large = INFINITY, .element = float32_element, .fill = fill_float32},
    [KVEDGE_FLOAT16] = {.bits = 16,
                       .rounding = 0x1p-11,
                       .smallest = 0x1p-25,
                       .too_large = 65520.0,
                       .element = float16_element,
                       .fill = fill_float16},
    [KVEDGE_BFLOAT16] = {.bits = 16,
                       .rounding = 0x1p-8,
                       .smallest = 0x1p-134,
                       .too_large = 0x1.ffp127,
                       .element = bfloat16_element,
                       .fill = fill_bfloat16},
};
_Static_assert(sizeof ref_formats / sizeof *ref_formats == KVEDGE_NUM_FORMATS, "a row for each format");

static inline size_t ref_row_bytes(kvedge_format format, int dim) {
  return ((size_t)dim * (size_t)ref_formats[format].bits + 7) / 8;
}

/* One element of a row that is stored; `row` counts (token, head) pairs. */
static inline double stored_value(const kvedge_layer_config *config, const void *codes, const void *scales, int64_t row,
                                  int d) {
  const ref_format *format = &ref_formats[config->format];
  size_t row_bytes = ref_row_bytes(config->format, config->head_dim);
  double x = format->element((const char *)codes + (size_t)row * row_bytes, d), scale = 1.0;
  int group = config->group_size, groups = (config->head_dim + group - 1) / group;
  int64_t at = row * groups + d / group;
  if (format->has_scales)
    scale = config->scale_type == KVEDGE_SCALE_FLOAT16 ? half_value(((const uint16_t *)scales)[at])
                                                       : (double)((const float *)scales)[at];
  return clamped(x * scale);
}

/* Position of row 0, as a token: below 0 where rows that are not causal outnumber the tokens. */
static inline int64_t ref_position(const ref_call *c, int64_t row) { return c->len - c->num_rows + row; }

static inline int64_t strided(const int64_t strides[3], int head, int64_t row, int64_t token) {
  return head * strides[0] + row * strides[1] + token * strides[2];
}

static inline int ref_sees(const ref_call *c, int head, int64_t row, int64_t token) {
  const kvedge_attention_options *o = &c->options;
  int64_t position = ref_position(c, row);
  if (o->causal && token > position) return 0;
  if (o->window && position - token >= o->window && token >= o->sink_tokens) return 0;
  if (o->mask && !o->mask[strided(o->mask_strides, head, row, token)]) return 0;
  return !o->bias || o->bias[strided(o->bias_strides, head, row, token)] != -INFINITY;
}

static inline int kv_head_of(const ref_call *c, int head) { return head / (c->num_heads / c->num_kv_heads); }

/* The logit before any option, and in *amplitude the size of its terms. */
static inline double ref_score(const ref_call *c, int head, int64_t row, int64_t token, double *amplitude) {
  int kv_head = kv_head_of(c, head);
  const float *q = c->query + (row * c->num_heads + head) * c->dim;
  const double *k = c->keys + (token * c->num_kv_heads + kv_head) * c->dim;
  double sum = 0.0, largest = 1e-31,
         keys = 0.0; /* channels of a query below 2^-126 count for nothing (csrc/attention/query.c) */
  for (int d = 0; d < c->dim; d++) {
    double offset = c->offset ? c->offset[kv_head * c->dim + d] : 0.0;
    sum += q[d] * k[d];
    largest = fmax(largest, fabs(q[d]));
    keys += fabs(k[d] - offset) + 2.0 * fabs(offset);
  }
  double scale = c->options.scale;
  *amplitude = fabs(scale) * largest * keys;
  return scale * sum;
}

static inline double ref_logit(const ref_call *c, int head, int64_t row, int64_t token, double *amplitude) {
  const kvedge_attention_options *o = &c->options;
  double x = ref_score(c, head, row, token, amplitude);
  if (o->softcap > 0.0f) x = o->softcap * tanh(x / o->softcap);
  double slope = o->alibi_slopes ? o->alibi_slopes[head] * (double)(token - ref_position(c, row)) : 0.0;
  double bias = o->bias ? o->bias[strided(o->bias_strides, head, row, token)] : 0.0;
  *amplitude += fabs(slope) + fabs(bias);
  return x + slope + bias;
}

/* One row of one head: out[dim]. `room` has 2 * len + dim doubles. */
static inline ref_row reference(const ref_call *c, int head, int64_t row, double *room, double *out) {
  const float *sinks = c->options.sink_logits;
  double *logits = room, *amplitudes = room + c->len; /* (len), later (dim) */
  ref_row r = {.lse = -INFINITY};
  double max = sinks ? sinks[head] : -INFINITY;
  for (int64_t t = 0; t < c->len; t++) {
    logits[t] = -INFINITY;
    if (!ref_sees(c, head, row, t)) continue;
    logits[t] = ref_logit(c, head, row, t, &amplitudes[t]);
    max = fmax(max, logits[t]);
    r.amplitude = fmax(r.amplitude, amplitudes[t]);
  }
  double sum = sinks ? exp(sinks[head] - max) : 0.0, *p = logits, *magnitudes = amplitudes; /* of which dim are used */
  for (int d = 0; d < c->dim; d++) out[d] = magnitudes[d] = 0.0;
  for (int64_t t = 0; t < c->len; t++) {
    if (logits[t] == -INFINITY) continue;
    const int64_t at = (t * c->num_kv_heads + kv_head_of(c, head)) * c->dim;
    p[t] = exp(logits[t] - max);
    sum += p[t];
    for (int d = 0; d < c->dim; d++) {
      double value = c->values[at + d];
      out[d] += p[t] * value;
      magnitudes[d] += p[t] * fabs(value);
      r.largest = fmax(r.largest, fabs(value));
      r.largest_key = fmax(r.largest_key, fabs(c->keys[at + d]));
    }
  }
  for (int d = 0; d < c->dim; d++) {
    out[d] = sum > 0.0 ? out[d] / sum : 0.0;
    r.spread = fmax(r.spread, sum > 0.0 ? magnitudes[d] / sum : 0.0);
  }
  if (sum > 0.0) r.lse = max + log(sum);
  return r;
}

#endif
