/* Options on logits: softcap, ALiBi, masks, causality and windows. */
#include <math.h>

#include "attention/tile.h"

void kvedge_to_logits(const kvedge_attention *a, const kvedge_queries *q, size_t index, int num_tokens, float *row) {
  a->kernels->logits->to_logits(row, num_tokens, q->logit_factor[index], q->logit_bias[index], a->options.softcap);
}

/* The mask and the bias of a query row, and room to gather them where their elements lie apart. */
typedef struct {
  const uint8_t *mask; /* (tokens) or NULL */
  const float *bias;   /* (tokens) or NULL */
  uint8_t mask_room[KVEDGE_TILE];
  float bias_room[KVEDGE_TILE];
} hiding;

static void find_hiding(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens, hiding *h) {
  const kvedge_attention_options *o = &a->options;
  h->mask = NULL;
  h->bias = NULL;
  if (o->mask) {
    const int64_t stride = o->mask_strides[2];
    h->mask = o->mask + head * o->mask_strides[0] + row * o->mask_strides[1] + token * stride;
    if (stride != 1) {
      for (int t = 0; t < num_tokens; t++) h->mask_room[t] = h->mask[t * stride];
      h->mask = h->mask_room;
    }
  }
  if (!kvedge_has_bias(o)) return;
  const int64_t stride = o->bias_strides[2];
  const int64_t at = head * o->bias_strides[0] + row * o->bias_strides[1] + token * stride;
  const float factor = o->bias_factors ? o->bias_factors[head] : 1.0f;
  if (o->half_bias) {
    const uint16_t *bias = o->half_bias + at;
    uint16_t halves[KVEDGE_TILE];
    for (int t = 0; stride != 1 && t < num_tokens; t++) halves[t] = bias[t * stride];
    a->kernels->logits->widen_bias(stride == 1 ? bias : halves, num_tokens, factor, h->bias_room);
    h->bias = h->bias_room;
    return;
  }
  h->bias = o->bias + at;
  if (stride == 1 && factor == 1.0f) return;
  for (int t = 0; t < num_tokens; t++) h->bias_room[t] = h->bias[t * stride] * factor;
  h->bias = h->bias_room;
}

void kvedge_clear_hidden(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                         float *values) {
  hiding h;
  find_hiding(a, row, head, token, num_tokens, &h);
  a->kernels->logits->hide(values, num_tokens, h.mask, h.bias, 0.0f);
}

void kvedge_apply_options(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                          float *logits) {
  const kvedge_attention_options *o = &a->options;
  const kvedge_logit_kernels *kernels = a->kernels->logits;
  if (o->alibi_slopes)
    kernels->add_slope(logits, num_tokens, o->alibi_slopes[head], (float)(token - (a->first_position + row)));
  if (kvedge_has_mask(o)) {
    hiding h;
    find_hiding(a, row, head, token, num_tokens, &h);
    if (h.bias) kernels->add_bias(logits, num_tokens, h.bias);
    kernels->hide(logits, num_tokens, h.mask, NULL, -INFINITY);
  }
  mask_range seen = kvedge_mask_range(a, row, token, num_tokens);
  for (int t = seen.sinks; t < seen.first; t++) logits[t] = -INFINITY;
  for (int t = seen.stop; t < num_tokens; t++) logits[t] = -INFINITY;
}

int kvedge_needs_masking(const kvedge_attention *a, const kvedge_row_block *block, const token_tile *tile) {
  const kvedge_attention_options *o = &a->options;
  if (kvedge_has_mask(o) || o->alibi_slopes) return 1;
  int64_t first = a->first_position + block->first, last = first + block->count - 1;
  int64_t end = tile->token + tile->num_tokens;
  if (o->causal && end - 1 > first) return 1;
  return o->window && tile->token <= last - o->window && end > o->sink_tokens;
}
