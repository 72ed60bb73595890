/* Keys, values and queries of any finite magnitude, from denormal to 3e38, in float32 sums.
 *
 * Scales (of formats without: elements) are multiplied by a power of two that brings the largest
 * near 1, and results divided by it: both exact. The largest is that of the whole layer, which
 * is kept as rows are stored, or where that is far from 1, of the tokens that the call sees. (A
 * row of one head may see much less than the call: attention.c.)
 */
#include <float.h>
#include <math.h>

#include "attention/internal.h"
#include "attention/tile.h"

/* A power of two that takes scales (float32: values) of at most `bound` to where sums over a million
 * tokens stay within float's range, and leaves as much room below as above. Mostly 1. */
float kvedge_normalizing_factor(float bound) {
  enum { LARGEST = 60, SMALLEST = -40, MAX_FACTOR = 126 - KVEDGE_HEADROOM }; /* times a weight it is finite */
  if (bound <= 0.0f) return 1.0f;
  int exponent = ilogbf(bound);
  if (exponent > LARGEST) return ldexpf(1.0f, LARGEST - exponent);
  if (exponent < SMALLEST) return ldexpf(1.0f, -exponent < MAX_FACTOR ? -exponent : MAX_FACTOR);
  return 1.0f;
}

/* ---- Factors of a call ----------------------------------------------------------------------- */

static const kvedge_segment *segment_of(kvedge_row_cursor *c, int64_t token) {
  while (token >= c->start + c->view->segments[c->segment].num_tokens)
    c->start += c->view->segments[c->segment++].num_tokens;
  return &c->view->segments[c->segment];
}

/* The bound of the rows of `num_heads` heads that a token lies in. */
float kvedge_bound_of_rows(kvedge_row_cursor *c, int s, int64_t token, int kv_head, int num_heads) {
  const kvedge_cache_view *view = c->view;
  const kvedge_view_side *side = &view->side[s];
  const kvedge_segment *segment = segment_of(c, token);
  const int64_t offset = token - c->start + (c->segment == 0 ? side->first : 0);
  const ptrdiff_t row = kvedge_row_of(side->format, offset) * side->row_stride + kv_head * side->head_stride;
  const ptrdiff_t scale = offset * side->scale_token_stride + kv_head * side->scale_head_stride;
  return side->format->bound(&side->shape, segment->rows[s] + side->first_row + row,
                             segment->scales[s] + side->first_scale + scale, num_heads);
}

/* The largest of what is seen, of all heads. */
static float largest_in(const kvedge_attention *a, kvedge_attended seen, int s) {
  float largest = 0.0f;
  kvedge_row_cursor c = {.view = &a->view};
  for (int64_t token = 0; token < seen.stop; token++) {
    if (token == seen.sinks && token < seen.first) token = seen.first;
    if (token >= seen.stop) break;
    largest = fmaxf(largest, kvedge_bound_of_rows(&c, s, token, 0, a->view.num_kv_heads));
  }
  return largest;
}

void kvedge_fit_factors(kvedge_attention *a) {
  for (int s = 0; s < SIDES; s++) a->factor[s] = kvedge_normalizing_factor(a->view.side[s].bound);
  if (a->factor[KEYS] == 1.0f && a->factor[VALUES] == 1.0f) return;
  const kvedge_row_block last = kvedge_row_block_of(a, a->num_row_blocks - 1);
  kvedge_attended seen = {.stop = kvedge_attended_tokens(a, &last).stop};
  if (a->options.window && a->options.window <= a->first_position)
    seen.first = a->first_position - a->options.window + 1;
  if (seen.first > seen.stop) seen.first = seen.stop;
  seen.sinks = a->options.sink_tokens < seen.first ? a->options.sink_tokens : seen.first;
  for (int s = 0; s < SIDES; s++)
    if (a->factor[s] != 1.0f) a->factor[s] = kvedge_normalizing_factor(a->view.side[s].bound = largest_in(a, seen, s));
}
