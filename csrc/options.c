/* Options that look at single logits: softcap, ALiBi, masks, causality and windows. */
#include <float.h>
#include <math.h>

#include "tile.h"

static float clamp(float x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

void kvedge_to_logits(const kvedge_attention *a, const kvedge_queries *q, size_t index, int num_tokens, float *row) {
  double factor = q->logit_factor[index], bias = q->logit_bias[index];
  float cap = a->options.softcap;
  for (int t = 0; t < num_tokens; t++) {
    double logit = row[t] * factor + bias;
    if (cap > 0.0f) logit = cap * tanh(logit / cap);
    row[t] = clamp((float)logit);
  }
}

static int within(int64_t token, int num_tokens) {
  return token < 0 ? 0 : token > num_tokens ? num_tokens : (int)token;
}

sight kvedge_sight_of(const kvedge_attention *a, int64_t row, int64_t token, int num_tokens) {
  const kvedge_attention_options *o = &a->options;
  int64_t position = a->first_position + row;
  sight s = {.stop = num_tokens};
  if (o->causal) s.stop = within(position + 1 - token, num_tokens);
  if (o->window) {
    s.first = within(position - o->window + 1 - token, s.stop);
    s.sinks = within(o->sink_tokens - token, s.first);
  }
  return s;
}

void kvedge_apply_options(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                          float *logits) {
  const kvedge_attention_options *o = &a->options;
  int64_t position = a->first_position + row;
  if (o->alibi_slopes)
    for (int t = 0; t < num_tokens; t++)
      logits[t] = clamp(logits[t] + o->alibi_slopes[head] * (float)(token + t - position));
  if (o->bias) {
    const float *bias = o->bias + head * o->bias_strides[0] + row * o->bias_strides[1];
    for (int t = 0; t < num_tokens; t++) {
      float added = bias[(token + t) * o->bias_strides[2]];
      logits[t] = added == -INFINITY ? -INFINITY : clamp(logits[t] + added);
    }
  }
  if (o->mask) {
    const uint8_t *mask = o->mask + head * o->mask_strides[0] + row * o->mask_strides[1];
    for (int t = 0; t < num_tokens; t++)
      if (!mask[(token + t) * o->mask_strides[2]]) logits[t] = -INFINITY;
  }
  sight seen = kvedge_sight_of(a, row, token, num_tokens);
  for (int t = seen.sinks; t < seen.first; t++) logits[t] = -INFINITY;
  for (int t = seen.stop; t < num_tokens; t++) logits[t] = -INFINITY;
}

int kvedge_needs_masking(const kvedge_attention *a, int64_t block, const tile_of_tokens *tile) {
  const kvedge_attention_options *o = &a->options;
  if (o->mask || o->bias || o->alibi_slopes) return 1;
  int64_t first = a->first_position + block * a->rows_per_block, last = first + kvedge_rows_in_block(a, block) - 1;
  int64_t end = tile->token + tile->num_tokens;
  if (o->causal && end - 1 > first) return 1;
  return o->window && tile->token <= last - o->window && end > o->sink_tokens;
}
