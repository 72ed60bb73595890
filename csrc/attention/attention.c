/* A call checked, its slices collected, and its logits. */
#include <math.h>

#include "attention/tile.h"
#include "store/ranges.h"
#include "system/memory.h"
#include "system/float_mode.h"

kvedge_status kvedge_request_check(const kvedge_request *r) {
  const kvedge_cache_view *view = &r->view;
  const kvedge_attention_options *o = r->options;
  if (r->num_rows < 0 || r->num_heads < 1 || r->num_heads % view->num_kv_heads) return KVEDGE_ERROR_ARGUMENT;
  if (view->len < 1 || ((!o || o->causal) && r->num_rows > view->len)) return KVEDGE_ERROR_ARGUMENT;
  if (o) {
    if (isinf(o->scale) || !(o->softcap >= 0.0f) || isinf(o->softcap)) return KVEDGE_ERROR_ARGUMENT;
    if (o->precision_bits != KVEDGE_PRECISION_AUTO &&
        (o->precision_bits % 8 || o->precision_bits < 0 || o->precision_bits > 24))
      return KVEDGE_ERROR_ARGUMENT;
    if (o->start < 0 || o->start > view->len) return KVEDGE_ERROR_ARGUMENT;
    for (int h = 0; o->bias_factors && h < r->num_heads; h++)
      if (!(o->bias_factors[h] > 0.0f) || isinf(o->bias_factors[h])) return KVEDGE_ERROR_ARGUMENT;
    if (o->bias && o->half_bias) return KVEDGE_ERROR_ARGUMENT;
    if (o->tokens && (!o->causal || o->window || kvedge_has_mask(o) || o->alibi_slopes || o->start))
      return KVEDGE_ERROR_ARGUMENT;
    if (o->window < 0 || o->sink_tokens < 0 || (o->window && !o->causal)) return KVEDGE_ERROR_ARGUMENT;
  }
  if (!r->query.data) return KVEDGE_OK;
  const uint32_t bits = kvedge_array_abs_max_bits(&r->query, r->num_rows, r->num_heads, view->side[KEYS].shape.dim);
  return bits < KVEDGE_NOT_FINITE ? KVEDGE_OK : KVEDGE_ERROR_NONFINITE;
}

kvedge_status kvedge_request_layer(kvedge_request *r, const kvedge_layer *layer, kvedge_segment *segment) {
  const kvedge_attention_options *o = r->options;
  r->view = kvedge_layer_view(layer, o, segment);
  if (!r->query.data && o && o->num_tokens > r->view.len && o->num_tokens <= layer->config.capacity)
    r->view.len = segment->num_tokens = o->num_tokens;
  const kvedge_status status = kvedge_request_check(r);
  if (status != KVEDGE_OK) return status;
  if (o) kvedge_cut_view(&r->view, segment, o->start);
  r->first_position = r->view.len - r->num_rows;
  return KVEDGE_OK;
}

/* ---- A slice is collected -----------------------------------------------------------------------------
 *
 * A row of one head may see much less than its call: others of its rows or heads, hidden tokens or stale ones may be
 * larger by many orders of magnitude. Then its sums come out so small that the smallest parts of them may be lost; that
 * is seen on the sums, and the row is attended to again with factors of what it sees itself. So tokens that are hidden
 * change nothing in the result, and ordinary calls pay nothing.
 */

/* What kernels may take for nothing is below 2^-96 of 1 for a token (WEIGHT_NOTHING times a code). Sums of a million
 * tokens above the first figure have lost less than 2^-36 of themselves, and logits of queries up to the second less
 * than 2^-46. */
#define LEAST_SUM 0x1p-40f
#define LARGEST_QUERY 0x1p80

static int may_have_lost(const kvedge_attention *a, const kvedge_queries *q, size_t state, float sum,
                         const float *acc) {
  if (!(sum > 0.0f)) return isnan(sum); /* so step.c marks scores that were not finite */
  if (q->logit_factor[state] > LARGEST_QUERY) return 1;
  const kvedge_view_side *values = &a->view.side[VALUES];
  if (values->bound == 0.0f) return 0;
  const uint32_t bits = a->kernels->rows->abs_max_bits(acc, (size_t)values->shape.dim);
  return bits >= KVEDGE_NOT_FINITE || kvedge_float_of_bits(bits) < LEAST_SUM;
}

/* Plans the call for one row of one query head: its KV head is the only one of the view. */
static void plan_one(const kvedge_attention *a, int64_t row, int head, kvedge_attention *single) {
  kvedge_attention_options options = a->options;
  const int64_t at = row * a->num_heads + head;
  kvedge_request r = {.view = a->view,
                      .num_heads = 1,
                      .num_rows = 1,
                      .first_position = a->first_position + row,
                      .query = kvedge_array_from(&a->query, row, head),
                      .out = kvedge_array_from(&a->out, row, head),
                      .lse = a->lse ? a->lse + at : NULL,
                      .log_sums = a->log_sums ? a->log_sums + at : NULL,
                      .options = &options};
  r.view.num_kv_heads = 1;
  kvedge_move_kv_heads(&r.view, head / a->heads_per_kv_head);
  kvedge_move_heads(&options, head);
  kvedge_move_masks(&options, 0, row, 0);
  kvedge_attention_plan(single, &r, 0, 1);
  single->is_refit = single->query_stays = 1;
}

/* The largest that the row of a planned call of one row sees. */
static float largest_seen(const kvedge_attention *single, int s) {
  const kvedge_row_block block = {.count = 1};
  const kvedge_attended attended = kvedge_attended_tokens(single, &block);
  float largest = 0.0f, of_token[KVEDGE_TILE];
  kvedge_row_cursor c = {.view = &single->view};
  for (int64_t token = 0, count; token < attended.stop; token += count) {
    count = attended.stop - token < KVEDGE_TILE ? attended.stop - token : KVEDGE_TILE;
    const mask_range seen = kvedge_mask_range(single, 0, token, (int)count);
    for (int t = 0; t < count; t++) {
      const int is_seen = t < seen.sinks || (t >= seen.first && t < seen.stop);
      of_token[t] = is_seen ? kvedge_bound_of_rows(&c, s, token + t, 0, 1) : 0.0f;
    }
    kvedge_clear_hidden(single, 0, 0, token, (int)count, of_token);
    for (int t = 0; t < count; t++) largest = fmaxf(largest, of_token[t]);
  }
  return largest;
}

static void refit(const kvedge_attention *a, int64_t row, int head, char *room, kvedge_workspace *w) {
  kvedge_attention *single = (kvedge_attention *)room;
  plan_one(a, row, head, single);
  for (int s = 0; s < SIDES; s++)
    single->factor[s] = kvedge_normalizing_factor(single->view.side[s].bound = largest_seen(single, s));
  const int same = single->factor[KEYS] == a->factor[KEYS] && single->factor[VALUES] == a->factor[VALUES];
  if (same && !a->view.bounds_unknown) return;
  single->view.bounds_unknown = 0; /* what is too large for the factors now is hidden */
  kvedge_attention_lay_out(single, room, 1);
  kvedge_prepare_queries(single);
  for (int slice = 0; slice < single->chunks_per_block; slice++) {
    kvedge_slice_run(single, slice, (kvedge_slice){.attention = NULL}, 0, w, NULL);
    kvedge_merge_slice(single, slice, 0);
  }
}

void kvedge_slice_collect(kvedge_attention *a, int slice, int slot, int refit_index, kvedge_workspace *w) {
  const kvedge_slice_place of = kvedge_place_of(a, slice);
  const int heads = a->heads_per_kv_head, first = of.kv_head * heads, stop = first + of.num_kv_heads * heads;
  kvedge_merge_slice(a, slice, slot);
  if (of.chunk + 1 < a->chunks_per_block) return;
  const kvedge_queries q = kvedge_queries_of(a, of.block.index, slot);
  const kvedge_partial total = kvedge_partial_at(a, a->chunks_per_block > 1 ? a->num_slots : slot);
  for (int64_t r = 0; r < of.block.count; r++)
    for (int head = first; head < stop; head++) {
      const size_t state = kvedge_query_index(a, head / heads) + (size_t)(r * heads + head % heads);
      if (!may_have_lost(a, &q, state, total.sum[state], total.acc + state * (size_t)a->acc_stride)) continue;
      refit(a, of.block.first + r, head, a->refit + (size_t)refit_index * a->refit_bytes, w);
    }
}

/* ---- Logits --------------------------------------------------------------------------------- */

/* Those of a view. */
static kvedge_status scores_of_view(const kvedge_cache_view *view, const float *query, int num_heads, float scale,
                                    float *logits) {
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  options.scale = scale;
  options.precision_bits = 24;
  kvedge_request r = {.view = *view,
                      .num_heads = num_heads,
                      .num_rows = 1,
                      .query = kvedge_dense_array(query, num_heads, view->side[KEYS].shape.dim),
                      .first_position = view->len - 1,
                      .options = &options};
  const kvedge_status status = kvedge_request_check(&r);
  if (status != KVEDGE_OK) return status;
  kvedge_attention planned;
  kvedge_attention_plan(&planned, &r, 0, 1);
  planned.has_workspace = 1;
  void *memory = kvedge_aligned_alloc(64, kvedge_attention_lay_out(&planned, NULL, 1));
  if (!memory) return KVEDGE_ERROR_MEMORY;
  kvedge_all_logits(kvedge_attention_set_up(&planned, memory, 1), logits);
  kvedge_aligned_free(memory);
  return KVEDGE_OK;
}

/* Of tokens in a layer of three ranges: part by part, to their places among all. */
static kvedge_status scores_of_ranges(const kvedge_layer *layer, const kvedge_ranges *ranges, const float *query,
                                      int num_heads, float scale, int64_t row, int64_t num_tokens, float *logits) {
  kvedge_part parts[3];
  kvedge_segment segments[2];
  if (num_tokens > ranges->stop - row) return KVEDGE_ERROR_ARGUMENT;
  const int n = kvedge_parts_of_ranges(layer, ranges, row, num_tokens, ranges->stop - 1, parts);
  float *some = kvedge_aligned_alloc(64, kvedge_align((size_t)num_heads * (size_t)num_tokens * sizeof *some));
  kvedge_status status = some ? KVEDGE_OK : KVEDGE_ERROR_MEMORY;
  for (int i = 0; i < n && status == KVEDGE_OK; i++) {
    const kvedge_part *p = &parts[i];
    kvedge_attention_options at = {.num_tokens = p->num_tokens, .first_row = p->first_row};
    kvedge_cache_view view;
    if (p->blocks) kvedge_view_blocks(p->layer, p->block_size, p->blocks, p->first_row, p->num_tokens, segments, &view);
    else view = kvedge_layer_view(p->layer, &at, segments);
    status = scores_of_view(&view, query, num_heads, scale, some);
    for (int head = 0; head < num_heads && status == KVEDGE_OK; head++)
      memcpy(logits + head * num_tokens + p->position, some + head * p->num_tokens,
             (size_t)p->num_tokens * sizeof *some);
  }
  kvedge_aligned_free(some);
  return status;
}

kvedge_status kvedge_scores(const kvedge_layer *layer, const float *query, int num_heads, float scale,
                            int64_t first_row, int64_t num_tokens, float *logits) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !query || !logits || num_tokens < 1 || num_heads < 1) return KVEDGE_ERROR_ARGUMENT;
  if (kvedge_has_ranges(layer)) {
    kvedge_ranges ranges;
    kvedge_hold(layer);
    kvedge_layer_get_ranges(layer, &ranges);
    const int64_t row = first_row < 0 ? ranges.start : first_row;
    const kvedge_status status = scores_of_ranges(layer, &ranges, query, num_heads, scale, row, num_tokens, logits);
    kvedge_release(layer);
    return status;
  }
  const kvedge_attention_options at = {.num_tokens = num_tokens, .first_row = first_row};
  kvedge_segment segment;
  const kvedge_cache_view view = kvedge_layer_view(layer, &at, &segment);
  return scores_of_view(&view, query, num_heads, scale, logits);
}
