/* Keys, values and queries of any finite magnitude, from denormal to 3e38, in float32 sums.
 *
 * Scales (of formats without: elements) are multiplied by a power of two that brings the largest near 1, and results divided
 * by it: both exact. The largest is that of the whole layer, which is kept as rows are stored, or where that is far
 * from 1, of the tokens that the call sees. A row of one head may see much less than the call: others of its rows or
 * heads, hidden tokens or stale ones may be larger by many orders of magnitude. Then its sums come out so small that
 * the smallest parts of them may be lost; that is seen on the sums, and the row is attended to again with factors of
 * what it sees itself. Tokens that are not seen so have no part in the result, and ordinary calls pay nothing.
 */
#include <float.h>
#include <math.h>

#include "attention/attention.h"
#include "attention/tile.h"

/* A power of two that takes scales (float32: values) of at most `bound` to where sums over a million
 * tokens stay within float's range, and leaves as much room below as above. Mostly 1. */
static float normalizing_factor(float bound) {
  enum { LARGEST = 60, SMALLEST = -40, MAX_FACTOR = 127 };
  if (bound <= 0.0f) return 1.0f;
  int exponent = ilogbf(bound);
  if (exponent > LARGEST) return ldexpf(1.0f, LARGEST - exponent);
  if (exponent < SMALLEST) return ldexpf(1.0f, -exponent < MAX_FACTOR ? -exponent : MAX_FACTOR);
  return 1.0f;
}

/* ---- Factors of a call ----------------------------------------------------------------------- */

/* Runs of tokens that lie together in memory, from `token` on; `segment` and `start` of it go along. */
typedef struct {
  const kvedge_cache_view *view;
  int segment;
  int64_t start; /* first token of the segment */
} row_cursor;

static const kvedge_segment *segment_of(row_cursor *c, int64_t token) {
  while (token >= c->start + c->view->segments[c->segment].num_tokens)
    c->start += c->view->segments[c->segment++].num_tokens;
  return &c->view->segments[c->segment];
}

/* The bound of a token's rows of `num_heads` heads. */
static float bound_of_rows(row_cursor *c, int s, int64_t token, int kv_head, int num_heads) {
  const kvedge_cache_view *view = c->view;
  const kvedge_segment *segment = segment_of(c, token);
  const int64_t offset = token - c->start;
  const kvedge_view_side *side = &view->side[s];
  return side->format->bound(
      &side->shape, segment->rows[s] + side->first_row + offset * side->token_stride + kv_head * side->head_stride,
      segment->scales[s] + side->first_scale + offset * side->scale_token_stride + kv_head * side->scale_head_stride,
      num_heads);
}

/* The largest of what is seen, of all heads. */
static float largest_in(const kvedge_attention *a, kvedge_visible seen, int s) {
  float largest = 0.0f;
  row_cursor c = {.view = &a->view};
  for (int64_t token = 0; token < seen.stop; token++) {
    if (token == seen.sinks && token < seen.first) token = seen.first;
    largest = fmaxf(largest, bound_of_rows(&c, s, token, 0, a->view.num_kv_heads));
  }
  return largest;
}

void kvedge_fit_factors(kvedge_attention *a) {
  for (int s = 0; s < SIDES; s++) a->factor[s] = normalizing_factor(a->view.side[s].bound);
  if (a->factor[KEYS] == 1.0f && a->factor[VALUES] == 1.0f) return;
  kvedge_visible seen = {.stop = kvedge_visible_tokens(a, a->num_row_blocks - 1).stop};
  if (a->options.window && a->options.window <= a->first_position) seen.first = a->first_position - a->options.window + 1;
  seen.sinks = a->options.sink_tokens < seen.first ? a->options.sink_tokens : seen.first;
  for (int s = 0; s < SIDES; s++)
    if (a->factor[s] != 1.0f) a->factor[s] = normalizing_factor(a->view.side[s].bound = largest_in(a, seen, s));
}

/* ---- Factors of one row ---------------------------------------------------------------------- */

/* What kernels may take for nothing is below 2^-96 of 1 for a token (WEIGHT_NOTHING times a code). Sums of a million
 * tokens above the first figure have lost less than 2^-36 of themselves, and logits of queries up to the second less
 * than 2^-46. */
#define LEAST_SUM 0x1p-40f
#define LARGEST_QUERY 0x1p80

int kvedge_may_have_lost(const kvedge_attention *a, const kvedge_queries *q, size_t state, float sum,
                         const float *acc) {
  if (a->is_refit || !(sum > 0.0f)) return 0;
  if (q->logit_factor[state] > LARGEST_QUERY) return 1;
  const kvedge_view_side *values = &a->view.side[VALUES];
  if (values->bound == 0.0f) return 0;
  return kvedge_float_of_bits(a->kernels->abs_max_bits(acc, (size_t)values->shape.dim)) < LEAST_SUM;
}

/* The call for one row of one query head: its KV head is the only one of the view. */
static void plan_one(const kvedge_attention *a, int64_t row, int head, kvedge_attention *one) {
  kvedge_cache_view view = a->view;
  kvedge_attention_options options = a->options;
  const int kv_head = head / a->heads_per_kv_head;
  view.num_kv_heads = 1;
  for (int s = 0; s < SIDES; s++) {
    view.side[s].first_row += kv_head * view.side[s].head_stride;
    view.side[s].first_scale += kv_head * view.side[s].scale_head_stride;
  }
  if (view.key_offset) view.key_offset += (ptrdiff_t)kv_head * view.side[KEYS].shape.dim;
  if (options.sink_logits) options.sink_logits += head;
  if (options.alibi_slopes) options.alibi_slopes += head;
  if (options.mask) options.mask += head * options.mask_strides[0] + row * options.mask_strides[1];
  if (options.bias) options.bias += head * options.bias_strides[0] + row * options.bias_strides[1];
  kvedge_attention_plan(one, &view, a->first_position + row, 1, 1, &options);
  one->is_refit = one->query_stays = 1;
}

size_t kvedge_refit_bytes(const kvedge_attention *a) {
  kvedge_attention one = *a; /* as plan_one() makes it, as far as sizes depend on it */
  one.view.num_kv_heads = one.num_heads = one.query_rows = 1;
  one.num_row_blocks = one.is_refit = one.query_stays = 1;
  one.partial_floats = kvedge_partial_floats(&one);
  return kvedge_attention_lay_out(&one, NULL, 1);
}

/* The largest that the row of a planned call of one row sees. */
static float largest_seen(const kvedge_attention *one, int s) {
  const kvedge_visible visible = kvedge_visible_tokens(one, 0);
  float largest = 0.0f, of_token[KVEDGE_TILE];
  row_cursor c = {.view = &one->view};
  for (int64_t token = 0, count; token < visible.stop; token += count) {
    count = visible.stop - token < KVEDGE_TILE ? visible.stop - token : KVEDGE_TILE;
    const mask_range seen = kvedge_mask_range(one, 0, token, (int)count);
    for (int t = 0; t < count; t++) {
      const int is_seen = t < seen.sinks || (t >= seen.first && t < seen.stop);
      of_token[t] = is_seen ? bound_of_rows(&c, s, token + t, 0, 1) : 0.0f;
    }
    kvedge_clear_hidden(one, 0, 0, token, (int)count, of_token);
    for (int t = 0; t < count; t++) largest = fmaxf(largest, of_token[t]);
  }
  return largest;
}

int kvedge_refit(const kvedge_attention *a, int64_t row, int head, float *out, float *lse) {
  kvedge_attention planned, *one = (kvedge_attention *)a->refit;
  plan_one(a, row, head, &planned);
  *one = planned;
  for (int s = 0; s < SIDES; s++)
    one->factor[s] = normalizing_factor(one->view.side[s].bound = largest_seen(one, s));
  if (one->factor[KEYS] == a->factor[KEYS] && one->factor[VALUES] == a->factor[VALUES]) return 0;
  kvedge_attention_lay_out(one, a->refit, 1);
  one->query = a->query + (row * a->num_heads + head) * a->view.side[KEYS].shape.dim;
  one->out = out;
  one->lse = lse;
  kvedge_prepare_queries(one);
  for (int slice = 0; slice < one->chunks_per_block; slice++) {
    kvedge_slice_run(one, slice, (kvedge_slice){.attention = NULL}, 0, NULL);
    kvedge_attention_collect(one, slice, 0);
  }
  return 1;
}
