/* One step of a slice: one tile of one KV head, or of several side by side, met by all their queries. Scores, softmax,
 * weighted sums.
 */
#include <math.h>

#include "attention/tile.h"

/* Scores become logits where an option wants these, and hidden ones -INFINITY. */
static void finish_scores(const kvedge_attention *a, const head_tile *h, workspace *w) {
  for (int i = 0; i < h->count; i++) {
    float *row = w->scores + (h->at + i) * KVEDGE_TILE;
    int query_row = h->first + i;
    if (a->real_logits) kvedge_to_logits(a, &w->queries, kvedge_index_of(a, h) + (size_t)i, h->tile->num_tokens, row);
    if (h->masking)
      kvedge_apply_options(a, h->block->first + query_row / a->heads_per_kv_head,
                           h->kv_head * a->heads_per_kv_head + query_row % a->heads_per_kv_head, h->tile->token,
                           h->tile->num_tokens, row);
  }
}

/* Which of the query rows have scores that are not finite: keys are larger than their bound. */
static void find_lost(const kvedge_attention *a, const head_tile *heads, int num, const workspace *w,
                      uint8_t *is_lost) {
  for (int i = 0; i < num * heads->count; i++) {
    const float *row = w->scores + (heads->at + i) * KVEDGE_TILE;
    is_lost[i] = a->kernels->rows->abs_max_bits(row, (size_t)heads->tile->num_tokens) >= KVEDGE_NOT_FINITE;
  }
}

/* ---- A step: one tile of one KV head, or of several ------------------------------------------ */

/* Probabilities of `num` head tiles, in the workspace; maxima and sums go along. */
static void take_probabilities(const kvedge_attention *a, const head_tile *heads, int num, int batch,
                               kvedge_partial *partial, workspace *w) {
  uint8_t is_lost[KVEDGE_QUERY_ROWS];
  if (!batch || !kvedge_scores_of_batch(a, heads, w))
    for (int j = 0; j < num; j++) kvedge_head_scores(a, &heads[j], w);
  if (a->view.bounds_unknown) find_lost(a, heads, num, w, is_lost);
  for (int j = 0; j < num && (a->real_logits || heads->masking); j++) finish_scores(a, &heads[j], w);
  const size_t index = kvedge_index_of(a, &heads[0]);
  a->kernels->rows->softmax(w->scores, num * heads->count, heads->tile->num_tokens, w->queries.log2_scale + index,
                            partial->max + index, partial->sum + index, w->rescale);
  for (int i = 0; a->view.bounds_unknown && i < num * heads->count; i++)
    if (is_lost[i]) partial->sum[index + (size_t)i] = NAN; /* so that the row is attended to again (attention.c) */
}

void kvedge_step(const kvedge_attention *a, head_tile *heads, int num, const token_tile *next, kvedge_partial *partial,
                 workspace *w) {
  const int batch = a->batches_heads && num == KVEDGE_HEADS;
  const int query_rows = (int)heads->block->count * a->heads_per_kv_head;
  for (int i = 0; i < query_rows; i += KVEDGE_QUERY_ROWS) { /* once, if there are several heads */
    const int count = query_rows - i < KVEDGE_QUERY_ROWS ? query_rows - i : KVEDGE_QUERY_ROWS, prefetches = i == 0;
    for (int j = 0; j < num; j++) {
      heads[j].first = i, heads[j].count = count, heads[j].at = j * count;
      heads[j].prefetches &= prefetches;
    }
    if (prefetches) kvedge_prefetch_scales(&a->view, next, KEYS, heads->kv_head, num);
    take_probabilities(a, heads, num, batch, partial, w);
    if (prefetches) kvedge_prefetch_scales(&a->view, next, VALUES, heads->kv_head, num);
    if (batch) {
      kvedge_weighted_sum_of_batch(a, heads, w, partial);
      continue;
    }
    for (int j = 0; j < num; j++)
      kvedge_weighted_sum(a, &heads[j], w->scores + heads[j].at * KVEDGE_TILE, w->rescale + heads[j].at, w, partial);
  }
}
