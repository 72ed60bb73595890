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
  const double *sizes[2];      /* the same, of both: the terms that a key or value is the sum of */
  const float *offset;         /* [num_kv_heads][dim] or NULL; contained in keys */
} ref_call;

typedef struct {
  double lse;       /* -INFINITY: saw nothing */
  double amplitude; /* of the logits' terms: what their rounding errors are in proportion to */
  double spread;    /* the largest channel of sum(p |v|) */
  double largest;   /* size of the values seen */
  double largest_key;
} ref_row;

static inline double clamped(double x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

/* ---- Storage formats ---- */

/* What kvedge.h says of a format; a new one needs a row. */
typedef struct {
  int bits;           /* of an element */
  int steps;          /* an integer times a scale of its group, at most so many; 0: a float without scales, or runs */
  int mantissa, bias; /* of a float: bits, and what its exponent is more than it means */
  uint32_t largest;   /* code of the largest finite one */
  double too_large;   /* elements from here on are refused; smaller ones beyond the largest become that */
  int tokens;         /* of a run; 0: rows */
} ref_format;

enum { REF_RUN = 32, REF_GROUP = 64 /* channels of a run's value that share a step */ };

static const ref_format ref_formats[] = {
    [KVEDGE_INT8] = {.bits = 8, .steps = 127, .too_large = INFINITY},
    [KVEDGE_FLOAT32] = {.bits = 32, .mantissa = 23, .bias = 127, .largest = 0x7f7fffff, .too_large = INFINITY},
    [KVEDGE_FLOAT16] = {.bits = 16, .mantissa = 10, .bias = 15, .largest = 0x7bff, .too_large = 65520.0},
    [KVEDGE_BFLOAT16] = {.bits = 16, .mantissa = 7, .bias = 127, .largest = 0x7f7f, .too_large = 0x1.ffp127},
    [KVEDGE_FP8_E4M3] = {.bits = 8, .mantissa = 3, .bias = 7, .largest = 0x7e, .too_large = INFINITY},
    [KVEDGE_FP8_E5M2] = {.bits = 8, .mantissa = 2, .bias = 15, .largest = 0x7b, .too_large = INFINITY},
    [KVEDGE_INT4] = {.bits = 4, .steps = 127, .too_large = INFINITY},
    [KVEDGE_KIVI2] = {.bits = 2, .too_large = 0x1.ffc002p15, .tokens = REF_RUN},
    [KVEDGE_KIVI4] = {.bits = 4, .too_large = 0x1.ffc002p15, .tokens = REF_RUN},
    [KVEDGE_KIVI8] = {.bits = 8, .too_large = 0x1.ffc002p15, .tokens = REF_RUN},
};
static const kvedge_format ref_names[] = {KVEDGE_INT8,     KVEDGE_FLOAT32,  KVEDGE_FLOAT16, KVEDGE_BFLOAT16,
                                          KVEDGE_FP8_E4M3, KVEDGE_FP8_E5M2, KVEDGE_INT4,    KVEDGE_KIVI2,
                                          KVEDGE_KIVI4,    KVEDGE_KIVI8};
enum { NUM_REF_FORMATS = sizeof ref_names / sizeof *ref_names };
_Static_assert(NUM_REF_FORMATS == KVEDGE_NUM_FORMATS + 3, "a row for each format but grids");

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
  static const int levels[] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
  const int bit = d * format->bits;
  uint32_t code = 0; /* little-endian, as all that is fuzzed on */
  memcpy(&code, (const char *)row + bit / 8, (size_t)(format->bits + 7) / 8);
  if (format->bits < 8) code = code >> bit % 8 & ((1u << format->bits) - 1);
  if (format->tokens) return code;
  if (format->bits == 4) return levels[code];
  return format->steps ? (int8_t)code : ref_float(format, code);
}

/* A row of a caller's own: any bytes that the header allows. */
static inline void ref_fill(const ref_format *format, void *row, int dim, int style) {
  const int bits = format->bits;
  memset(row, 0, ((size_t)dim * (size_t)bits + 7) / 8);
  for (int d = 0; d < dim; d++) {
    uint32_t magnitude = random_bits() % (format->largest + 1);
    uint32_t code = magnitude | (random_bits() & 1u) << (bits - 1);
    if (style < ORDINARY_STYLES && format->mantissa) /* 1/8 to 2 */
      code = code % (1u << format->mantissa) | ((uint32_t)format->bias - random_bits() % 4) << format->mantissa;
    if (format->steps)
      code = (uint32_t)(int32_t)(random_bits() % (2 * (uint32_t)format->steps + 1)) - (uint32_t)format->steps;
    char *to = (char *)row + d * bits / 8;
    if (!format->mantissa && (bits < 8 || format->tokens)) /* any code */
      *to = (char)(*to | (random_bits() & ((1u << bits) - 1)) << d * bits % 8);
    else memcpy(to, &code, (size_t)bits / 8);
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

/* ---- Runs: words of 4 bytes, then steps and smallest values, as halves ----
 *
 * The words of a lane have its codes: of a token those of all channels, of a channel (values) those of all tokens. The first
 * words of all lanes come before their second ones. */

static inline size_t ref_lanes(int dim, int of_values) { return of_values ? (size_t)dim : (size_t)REF_RUN; }

static inline size_t ref_word_bytes(kvedge_format format, int dim, int of_values) {
  const int codes = 32 / ref_formats[format].bits, of_lane = of_values ? REF_RUN : dim;
  return 4 * ref_lanes(dim, of_values) * (size_t)((of_lane + codes - 1) / codes);
}

/* Of keys one per channel, of values one per token and group. */
static inline size_t ref_num_steps(int dim, int of_values) {
  return of_values ? (size_t)(REF_RUN * ((dim + REF_GROUP - 1) / REF_GROUP)) : (size_t)dim;
}

static inline size_t ref_run_bytes(kvedge_format format, int dim, int of_values) {
  return ref_word_bytes(format, dim, of_values) + 4 * ref_num_steps(dim, of_values);
}

/* A run of a caller's own: any codes, finite halves, steps not below 0. */
static inline void ref_fill_run(kvedge_format format, char *run, int dim, int of_values, int style) {
  const size_t words = ref_word_bytes(format, dim, of_values), steps = ref_num_steps(dim, of_values);
  for (size_t i = 0; i < words; i++) run[i] = (char)random_bits();
  for (size_t i = 0; i < 2 * steps; i++) {
    uint16_t half = (uint16_t)(random_bits() % 0x7c00);
    if (style < ORDINARY_STYLES) half = (uint16_t)((i < steps ? 0x1c00 : 0x3000) + random_bits() % 0x800);
    if (i >= steps && half && random_bits() % 2) half |= 0x8000;
    memcpy(run + words + 2 * i, &half, sizeof half);
  }
}

/* One element of a run, and in *size the sum of the terms that it is made of: half of all steps up, and the rest. */
static inline double ref_run_element(kvedge_format format, const char *run, int dim, int of_values, int token, int d,
                                     double *size) {
  const ref_format *f = &ref_formats[format];
  const size_t words = ref_word_bytes(format, dim, of_values), steps = ref_num_steps(dim, of_values);
  const size_t i = of_values ? (size_t)(d / REF_GROUP * REF_RUN + token) : (size_t)d;
  const int lane = of_values ? d : token, of_lane = of_values ? token : d, codes = 32 / f->bits;
  const char *word = run + 4 * ((size_t)(of_lane / codes) * ref_lanes(dim, of_values) + (size_t)lane);
  uint16_t step, low;
  memcpy(&step, run + words + 2 * i, sizeof step);
  memcpy(&low, run + words + 2 * (i + steps), sizeof low);
  const double of_step = ref_float(&ref_formats[KVEDGE_FLOAT16], step);
  const double x = ref_float(&ref_formats[KVEDGE_FLOAT16], low) + of_step * ref_element(f, word, of_lane % codes);
  *size = fabs(x) + of_step * ldexp(1.0, f->bits - 1);
  return x;
}

/* ---- Layers ---- */

/* One element of what a layer stores: of token t and head h. *size: the terms that it is the sum of. */
static inline double stored_value(const kvedge_layer_config *config, int of_values, const char *codes,
                                  const void *scales, int64_t t, int h, int d, double *size) {
  const ref_format *format = &ref_formats[config->format];
  const int64_t row = t * config->num_kv_heads + h;
  if (format->tokens) {
    const int64_t run = t / REF_RUN * config->num_kv_heads + h;
    const size_t bytes = ref_run_bytes(config->format, config->head_dim, of_values);
    return ref_run_element(config->format, codes + (size_t)run * bytes, config->head_dim, of_values, (int)(t % REF_RUN),
                           d, size);
  }
  size_t row_bytes = ref_row_bytes(config->format, config->head_dim);
  double x = ref_element(format, codes + (size_t)row * row_bytes, d), scale = 1.0;
  int group = config->group_size, groups = (config->head_dim + group - 1) / group;
  int64_t at = row * groups + d / group;
  if (format->steps)
    scale = config->scale_type == KVEDGE_SCALE_FLOAT16
                ? ref_float(&ref_formats[KVEDGE_FLOAT16], ((const uint16_t *)scales)[at])
                : (double)((const float *)scales)[at];
  x = clamped(x * scale);
  *size = fabs(x);
  return x;
}

/* ---- Attention ---- */

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
  const int64_t at = (token * c->num_kv_heads + kv_head) * c->dim;
  const double *k = c->keys + at, *sizes = c->sizes[0] + at;
  double sum = 0.0, largest = 1e-31,
         keys = 0.0; /* channels of a query below 2^-126 count for nothing (csrc/attention/query.c) */
  for (int d = 0; d < c->dim; d++) {
    double offset = c->offset ? c->offset[kv_head * c->dim + d] : 0.0;
    sum += q[d] * k[d];
    largest = fmax(largest, fabs(q[d]));
    keys += (c->offset ? fabs(k[d] - offset) : sizes[d]) + 2.0 * fabs(offset);
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
      magnitudes[d] += p[t] * c->sizes[1][at + d];
      r.largest = fmax(r.largest, c->sizes[1][at + d]);
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
