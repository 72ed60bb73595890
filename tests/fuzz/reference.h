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

static inline double clamped(double x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

/* ---- Storage formats ---- */

/* What kvedge.h says of a format; a new one needs a row. */
typedef struct {
  int bits;           /* of an element: whole bytes */
  int steps;          /* an integer times a scale of its group, at most so many; 0: a float without scales */
  int mantissa, bias; /* of a float: bits, and what its exponent is more than it means */
  uint32_t largest;   /* code of the largest finite one */
  double too_large;   /* elements from here on are refused; smaller ones beyond the largest become that */
} ref_format;

static const ref_format ref_formats[] = {
    [KVEDGE_INT8] = {.bits = 8, .steps = 127, .too_large = INFINITY},
    [KVEDGE_FLOAT32] = {.bits = 32, .mantissa = 23, .bias = 127, .largest = 0x7f7fffff, .too_large = INFINITY},
    [KVEDGE_FLOAT16] = {.bits = 16, .mantissa = 10, .bias = 15, .largest = 0x7bff, .too_large = 65520.0},
    [KVEDGE_BFLOAT16] = {.bits = 16, .mantissa = 7, .bias = 127, .largest = 0x7f7f, .too_large = 0x1.ffp127},
    [KVEDGE_FP8_E4M3] = {.bits = 8, .mantissa = 3, .bias = 7, .largest = 0x7e, .too_large = INFINITY},
    [KVEDGE_FP8_E5M2] = {.bits = 8, .mantissa = 2, .bias = 15, .largest = 0x7b, .too_large = INFINITY},
};
/* int4, whose elements are no whole bytes, is left to tests/c. */
_Static_assert(sizeof ref_formats / sizeof *ref_formats == KVEDGE_INT4, "a row for each format of whole bytes");

/* The float that a code means. */
static inline double ref_float(const ref_format *format, uint32_t code) {
  const uint32_t sign = code >> (format->bits - 1), magnitude = code - (sign << (format->bits - 1));
  const int exponent = (int)(magnitude >> format->mantissa);
  const double hidden = exponent ? ldexp(1.0, format->mantissa) : 0.0; /* subnormals have none */
  const double digits = hidden + magnitude % (1u << format->mantissa);
  const double x = ldexp(digits, (exponent ? exponent : 1) - format->bias - format->mantissa);
  return sign ? -x : x;
}

/* Element d of a row, times its scale. */
static inline double ref_element(const ref_format *format, const void *row, int d) {
  const size_t bytes = (size_t)format->bits / 8;
  uint32_t code = 0; /* little-endian, as all that is fuzzed on */
  memcpy(&code, (const char *)row + (size_t)d * bytes, bytes);
  return format->steps ? (int8_t)code : ref_float(format, code);
}

/* A row of a caller's own: any bytes that the header allows. */
static inline void ref_fill(const ref_format *format, void *row, int dim, int style) {
  const size_t bytes = (size_t)format->bits / 8;
  for (int d = 0; d < dim; d++) {
    uint32_t magnitude = random_bits() % (format->largest + 1);
    uint32_t code = magnitude | (random_bits() & 1u) << (format->bits - 1);
    if (style < ORDINARY_STYLES && !format->steps) /* 1/8 to 2 */
      code = code % (1u << format->mantissa) | ((uint32_t)format->bias - random_bits() % 4) << format->mantissa;
    if (format->steps)
      code = (uint32_t)(int32_t)(random_bits() % (2 * (uint32_t)format->steps + 1)) - (uint32_t)format->steps;
    memcpy((char *)row + (size_t)d * bytes, &code, bytes);
  }
}

/* How far a float without scales may be from x, whose code it is. */
static inline double ref_rounding(const ref_format *format, double x) {
  const double beyond = fabs(x) - ref_float(format, format->largest);
  if (beyond > 0.0) return beyond;
  if (format->mantissa == 23) return 0.0; /* a float32 */
  return fmax(ldexp(fabs(x), -format->mantissa - 1), ldexp(1.0, -format->bias - format->mantissa));
}

static inline size_t ref_row_bytes(kvedge_format format, int dim) {
  return ((size_t)dim * (size_t)ref_formats[format].bits + 7) / 8;
}

/* One element of a row that is stored; `row` counts (token, head) pairs. */
static inline double stored_value(const kvedge_layer_config *config, const void *codes, const void *scales, int64_t row,
                                  int d) {
  const ref_format *format = &ref_formats[config->format];
  size_t row_bytes = ref_row_bytes(config->format, config->head_dim);
  double x = ref_element(format, (const char *)codes + (size_t)row * row_bytes, d), scale = 1.0;
  int group = config->group_size, groups = (config->head_dim + group - 1) / group;
  int64_t at = row * groups + d / group;
  if (format->steps)
    scale = config->scale_type == KVEDGE_SCALE_FLOAT16
                ? ref_float(&ref_formats[KVEDGE_FLOAT16], ((const uint16_t *)scales)[at])
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
