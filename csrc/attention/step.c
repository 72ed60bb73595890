/* One step of a slice: one tile of one KV head, or of several side by side, met by all their queries. Scores, softmax,
 * weighted sums.
 */
#include <string.h>

#include "system/target.h"
#include "attention/tile.h"

/* ---- Rows and scales of a head ---------------------------------------------------------------- */

static tile_rows rows_of_head(const kvedge_cache_view *view, const tile_rows *first, int kv_head) {
  ptrdiff_t code = kv_head * view->head_stride, scale = kv_head * view->scale_head_stride;
  return (tile_rows){first->keys + code, first->values + code, first->key_scales + scale,
                     first->value_scales + scale};
}

/* Factors of one row may take scales of tokens that it does not see out of range. */
static void clamp_hidden(float *scales, int num_columns, int num_tokens) {
  for (int c = 0; c < num_columns; c++, scales += SCALES)
    for (int t = 0; t < num_tokens; t++)
      if (scales[t] > 0x1p61f) scales[t] = 0x1p61f;
}

/* Scales of one group of one head's keys, or of its values, in a tile. */
static const float *tile_scales(const kvedge_attention *a, const tile_of_tokens *tile, int kv_head, int group,
                                int of_values, scale_columns *columns) {
  const kvedge_cache_view *view = &a->view;
  int column = kv_head * view->num_groups + group;
  if (column >= columns->first && column < columns->first + KVEDGE_SCALE_COLUMNS)
    return columns->scale[column - columns->first];
  int left = view->num_kv_heads * view->num_groups - column;
  int count = left < KVEDGE_SCALE_COLUMNS ? left : KVEDGE_SCALE_COLUMNS;
  float factor = of_values ? a->value_factor : a->key_factor;
  ptrdiff_t at = column * view->scale_head_stride / view->num_groups;
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &tile->pieces[i];
    const char *scales = of_values ? p->rows.value_scales : p->rows.key_scales;
    a->kernels->transpose_scales(scales + at, view->scale_type, view->scale_token_stride,
                                 p->num_tokens, count, factor, columns->scale[0] + p->first, SCALES);
  }
  for (int t = tile->num_tokens; t % KVEDGE_BLOCK; t++)
    for (int c = 0; c < count; c++) columns->scale[c][t] = 0.0f;
  if (a->is_refit) clamp_hidden(columns->scale[0], count, tile->num_tokens);
  columns->first = column;
  return columns->scale[0];
}

/* Asks for a share of the scales of the tile that follows, that of `num` KV heads from kv_head on: some of its pieces,
 * or where these are few a part of each one's lines, in the order of memory. (What is asked for all at once is often
 * forgotten: AMD. Always inlined, since GCC drops calls of a function that does nothing but this.) */
KVEDGE_INLINE void prefetch_scales(const kvedge_cache_view *view, const tile_of_tokens *following, int kv_head, int num,
                                   int of_values) {
  const int heads = view->num_kv_heads, whole_pieces = following->num_pieces >= heads;
  if (view->num_groups == 0) return;
  int first = 0, stop = following->num_pieces;
  if (whole_pieces) first = stop * kv_head / heads, stop = stop * (kv_head + num) / heads;
  for (int i = first; i < stop; i++) {
    const piece *p = &following->pieces[i];
    const char *scales = of_values ? p->rows.value_scales : p->rows.key_scales;
    const int lines = (int)((p->num_tokens * view->scale_token_stride + 63) / 64);
    const int first_line = whole_pieces ? 0 : (int)((int64_t)lines * kv_head / heads);
    const int stop_line = whole_pieces ? lines : (int)((int64_t)lines * (kv_head + num) / heads);
    for (int line = first_line; line < stop_line; line++) __builtin_prefetch(scales + 64 * line, 0, 2);
  }
}

/* ---- Scores ---------------------------------------------------------------------------------- */

/* The larger of `largest` and x[start..stop-1]; in lanes, so that maxima need not wait for each other. */
static float largest_of(const float *x, int start, int stop, float largest) {
  enum { LANES = 8 };
  float lane[LANES] = {0};
  int t = start;
  for (; t + LANES <= stop; t += LANES)
    for (int j = 0; j < LANES; j++) lane[j] = x[t + j] > lane[j] ? x[t + j] : lane[j];
  for (; t < stop; t++) largest = x[t] > largest ? x[t] : largest;
  for (int j = 0; j < LANES; j++) largest = lane[j] > largest ? lane[j] : largest;
  return largest;
}

/* The largest of a tile's key scales that one stacked query sees. What it does not see must not matter,
 * or results would depend on how a prompt is cut and on rows that are masked. */
static float largest_scale_seen(const kvedge_attention *a, const encounter *e, int stacked, const float *scale) {
  const kvedge_attention_options *o = &a->options;
  int num_tokens = e->tile->num_tokens;
  if (!e->masking) return largest_of(scale, 0, num_tokens, 0.0f);
  int64_t row = e->block * a->rows_per_block + stacked / a->heads_per_kv_head, token = e->tile->token;
  sight seen = kvedge_sight_of(a, row, token, num_tokens);
  float visible[KVEDGE_TILE];
  if (o->mask || o->bias) {
    memcpy(visible, scale, (size_t)num_tokens * sizeof *scale);
    kvedge_clear_hidden(a, row, e->kv_head * a->heads_per_kv_head + stacked % a->heads_per_kv_head, token, num_tokens,
                        visible);
    scale = visible;
  }
  return largest_of(scale, 0, seen.sinks, largest_of(scale, seen.first, seen.stop, 0.0f));
}

/* Bytes of the codes of stacked queries against a tile: two where they move no logit by more than about
 * COARSEST, else three. At this figure the output keeps the numerics contract (2e-4) between flat and sharp, where
 * it is hardest (tools/accuracy.py --worst). A row's heads get the same, since a kernel call for each kind would
 * unpack the keys again. */
static void choose_bytes(const kvedge_attention *a, const encounter *e, const float *scale, int *bytes) {
  static const float COARSEST = 8e-5f;
  const size_t query_index = kvedge_index_of(a, e);
  int plain = 1; /* do two suffice even with the largest scale of the layer? */
  float bound = a->view.key_bound * a->key_factor;
  for (int j = 0; j < e->count; j++) plain &= e->queries->coarseness[query_index + (size_t)j] * bound <= COARSEST;
  if (a->bytes || plain) {
    for (int j = 0; j < e->count; j++) bytes[j] = a->bytes ? a->bytes : 2;
    return;
  }
  int alike = !e->masking || (!a->options.mask && !a->options.bias); /* do a row's heads see the same? */
  float largest = 0.0f;
  for (int i = 0, next; i < e->count; i = next) {
    next = i - (e->first + i) % a->heads_per_kv_head + a->heads_per_kv_head;
    if (next > e->count) next = e->count;
    float coarsest = 0.0f;
    for (int j = i; j < next; j++) {
      if (!alike || (j == i && (i == 0 || e->masking))) largest = largest_scale_seen(a, e, e->first + j, scale);
      float error = e->queries->coarseness[query_index + (size_t)j] * largest;
      coarsest = error > coarsest ? error : coarsest;
    }
    for (int j = i; j < next; j++) bytes[j] = coarsest > COARSEST ? 3 : 2;
  }
}

/* What a group of channels asks for in blocks: what lies after the shares of those before it. NULL: nothing. */
static const int8_t *const *share_of_group(const int8_t *const *blocks, int start, int num_tokens,
                                           const int8_t *share[KVEDGE_TILE_BLOCKS]) {
  if (!blocks || start == 0) return blocks;
  for (int t = 0; t < num_tokens; t += KVEDGE_BLOCK)
    share[t / KVEDGE_BLOCK] = blocks[t / KVEDGE_BLOCK] + start * KVEDGE_BLOCK;
  return share;
}

/* Scores of one group of channels against a piece of a tile, in runs of queries that need as many
 * bytes. `scale` and `scores` are the piece's. */
static void piece_scores(const kvedge_attention *a, const encounter *e, int group, const piece *p, const int *bytes,
                         const float *scale, const char *prefetch, float *scores) {
  const kvedge_cache_view *view = &a->view;
  size_t pad = (size_t)a->group_pad;
  int start = group * view->group_size;
  const char *keys = rows_of_head(view, &p->rows, e->kv_head).keys + start;
  kvedge_query q = {.stride = (ptrdiff_t)pad * a->num_groups, .scale_stride = a->num_groups,
                    .dim = view->head_dim - start < view->group_size ? view->head_dim - start : view->group_size};
  for (int i = 0, next; i < e->count; i = next) {
    next = e->queries->codes ? i + 1 : e->count;
    while (next < e->count && bytes[next] == bytes[i]) next++;
    size_t at = (kvedge_index_of(a, e) + (size_t)i) * (size_t)a->num_groups + (size_t)group;
    q.num_queries = next - i;
    if (!e->queries->codes) {
      q.values = e->queries->values + at * pad;
    } else {
      q.num_bytes = bytes[i];
      q.codes = e->queries->codes + at * pad * KVEDGE_CODE_BYTES;
      q.scale = e->queries->scales + at;
      q.offsets = e->queries->offsets + at * 4;
    }
    if (e->blocks) {
      const int8_t *const *next = e->next_blocks && i == 0 ? e->next_blocks->keys : NULL, *share[KVEDGE_TILE_BLOCKS];
      a->kernels->scores_i8_blocks(&q, e->blocks->keys, start + e->kv_head * view->head_stride, view->token_stride,
                                   e->tile->num_tokens, scale, share_of_group(next, start, e->tile->num_tokens, share),
                                   scores + i * KVEDGE_TILE, group > 0);
    } else {
      a->kernels->scores_i8(&q, (const int8_t *)keys, view->token_stride, p->num_tokens, scale,
                            prefetch && i == 0 ? prefetch + start * p->num_tokens : NULL, scores + i * KVEDGE_TILE,
                            group > 0);
    }
  }
}

void kvedge_tile_scores(const kvedge_attention *a, const encounter *e, workspace *w) {
  const kvedge_cache_view *view = &a->view;
  const tile_of_tokens *tile = e->tile;
  const rows_ahead *ahead = e->ahead;
  float *scores = w->scores + e->at * KVEDGE_TILE;
  size_t index = kvedge_index_of(a, e);
  if (view->format == KVEDGE_FLOAT32) {
    kvedge_query q = {.num_queries = e->count, .dim = view->head_dim, .stride = a->group_pad,
                      .values = e->queries->values + index * (size_t)a->group_pad};
    for (int i = 0; i < tile->num_pieces; i++) {
      const piece *p = &tile->pieces[i];
      tile_rows rows = rows_of_head(view, &p->rows, e->kv_head);
      a->kernels->scores_f32(&q, (const float *)rows.keys, view->token_stride, p->num_tokens, a->key_factor,
                             ahead ? ahead->keys[i] : NULL, scores + p->first);
    }
    return;
  }
  int bytes[KVEDGE_STACK];
  for (int g = 0; g < view->num_groups; g++) {
    const float *scale = tile_scales(a, tile, e->kv_head, g, 0, &w->key_scales);
    if (e->queries->codes) choose_bytes(a, e, scale, bytes);
    for (int i = 0; i < (e->blocks ? 1 : tile->num_pieces); i++) {
      const piece *p = &tile->pieces[i];
      piece_scores(a, e, g, p, bytes, scale + p->first, ahead ? ahead->keys[i] : NULL, scores + p->first);
    }
  }
}

/* Scores become logits where an option wants these, and what is not seen -INFINITY. */
static void finish_scores(const kvedge_attention *a, const encounter *e, workspace *w) {
  int64_t first_row = e->block * a->rows_per_block;
  for (int i = 0; i < e->count; i++) {
    float *row = w->scores + (e->at + i) * KVEDGE_TILE;
    int stacked = e->first + i;
    if (a->real_logits) kvedge_to_logits(a, &w->queries, kvedge_index_of(a, e) + (size_t)i, e->tile->num_tokens, row);
    if (e->masking)
      kvedge_apply_options(a, first_row + stacked / a->heads_per_kv_head,
                           e->kv_head * a->heads_per_kv_head + stacked % a->heads_per_kv_head, e->tile->token,
                           e->tile->num_tokens, row);
  }
}

/* ---- Weighted sums --------------------------------------------------------------------------- */

/* Bytes of the codes of a tile's weights. Two leave an error of up to 1e-4 of the output, and twice that where there
 * are few channels; so those have three, and so has the start of a context, of which parts and the whole are to agree
 * to the last digits. The position decides, and nothing that depends on how a prompt is cut. */
static int weight_bytes(const kvedge_attention *a, const tile_of_tokens *tile) {
  enum { FIRST_TOKENS = 1024, FEW_CHANNELS = 64 };
  if (a->bytes) return a->bytes;
  return tile->token < FIRST_TOKENS || a->view.head_dim < FEW_CHANNELS ? 3 : 2;
}

/* Adds a head's values. What was summed before is taken times alpha, once: with the first piece. */
static void weighted_sum(const kvedge_attention *a, const encounter *e, workspace *w, kvedge_partial *partial) {
  static const float once[KVEDGE_STACK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                           1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const kvedge_cache_view *view = &a->view;
  const tile_of_tokens *tile = e->tile;
  const int bytes = weight_bytes(a, tile);
  const float *p = w->scores + e->at * KVEDGE_TILE, *alpha = w->alpha + e->at;
  float *acc = partial->acc + kvedge_index_of(a, e) * (size_t)a->acc_stride;
  float v_factor = a->value_factor;
  if (view->format == KVEDGE_FLOAT32 && v_factor > 1.0f) { /* values that are hidden may be too large for it */
    for (int i = 0; i < e->count; i++)
      for (int t = 0; t < tile->num_tokens; t++) w->scores[(e->at + i) * KVEDGE_TILE + t] *= v_factor;
    v_factor = 1.0f;
  }
  for (int g = 0; g < a->num_groups; g++) {
    int start = g * view->group_size;
    int n = view->head_dim - start < view->group_size ? view->head_dim - start : view->group_size;
    const float *v_scale = NULL;
    if (view->format == KVEDGE_INT8) v_scale = tile_scales(a, tile, e->kv_head, g, 1, &w->value_scales);
    if (e->blocks) {
      const int8_t *const *next = e->next_blocks ? e->next_blocks->values : NULL, *share[KVEDGE_TILE_BLOCKS];
      a->kernels->weighted_sum_i8_blocks(e->blocks->values, start + e->kv_head * view->head_stride, view->token_stride,
                                         tile->num_tokens, n, e->count, bytes, p, v_scale, alpha,
                                         share_of_group(next, start, tile->num_tokens, share), acc + start,
                                         a->acc_stride);
      continue;
    }
    for (int i = 0; i < tile->num_pieces; i++) {
      const piece *of = &tile->pieces[i];
      const char *values = rows_of_head(view, &of->rows, e->kv_head).values;
      const char *prefetch = e->ahead ? e->ahead->values[i] : NULL;
      const float *keep = i == 0 ? alpha : once;
      if (view->format == KVEDGE_FLOAT32)
        a->kernels->weighted_sum_f32((const float *)values, view->token_stride, of->num_tokens, view->head_dim,
                                     e->count, p + of->first, v_factor, keep, prefetch, acc, a->acc_stride);
      else
        a->kernels->weighted_sum_i8((const int8_t *)values + start, view->token_stride, of->num_tokens, n,
                                    e->count, bytes, p + of->first, v_scale + of->first, keep,
                                    prefetch ? prefetch + start * of->num_tokens : NULL, acc + start, a->acc_stride);
    }
  }
}

/* ---- Several heads at once --------------------------------------------------------------------
 *
 * A decoded token has few queries for a head. What comes with each call of softmax is shared by those of several heads
 * side by side; and where a head has one query, some paths have kernels for its scores and sums too. */

/* (Measured: with four queries for each it is slower.) */
int kvedge_heads_together(const kvedge_attention *a) {
  return a->num_row_blocks > 1 || a->stack > 3 ? 1 : a->stack == 1 ? KVEDGE_HEADS : 2;
}

int kvedge_has_heads_kernels(const kvedge_attention *a, int num_kv_heads) {
  const kvedge_cache_view *view = &a->view;
  return num_kv_heads == KVEDGE_HEADS && a->stack == 1 && a->kernels->scores_i8_heads &&
         view->format == KVEDGE_INT8 && view->num_groups == 1 && view->head_dim % 16 == 0 && view->head_dim >= 64 &&
         view->head_dim <= KVEDGE_HEADS_DIM;
}

/* Their scores; 0: nothing was done, since their queries need different numbers of bytes. */
static int scores_of_heads(const kvedge_attention *a, const encounter *heads, workspace *w) {
  const kvedge_cache_view *view = &a->view;
  const encounter *e = &heads[0];
  const size_t index = kvedge_index_of(a, e);
  const float *scale = tile_scales(a, e->tile, e->kv_head, 0, 0, &w->key_scales);
  int bytes[KVEDGE_HEADS], alike = 1;
  for (int j = 0; j < KVEDGE_HEADS; j++) {
    choose_bytes(a, &heads[j], scale + j * SCALES, &bytes[j]);
    alike &= bytes[j] == bytes[0];
  }
  if (!alike) return 0;
  kvedge_query q = {.num_queries = KVEDGE_HEADS, .dim = view->head_dim, .num_bytes = bytes[0],
                    .stride = a->group_pad, .scale_stride = 1,
                    .codes = e->queries->codes + index * (size_t)a->group_pad * KVEDGE_CODE_BYTES,
                    .scale = e->queries->scales + index, .offsets = e->queries->offsets + index * 4};
  const tile_blocks *next = e->next_blocks;
  a->kernels->scores_i8_heads(&q, e->blocks->keys, e->kv_head * view->head_stride, view->token_stride,
                              e->tile->num_tokens, scale, SCALES, next ? next->keys : NULL, next && next->in_order,
                              w->scores);
  return 1;
}

static void weighted_sum_of_heads(const kvedge_attention *a, const encounter *heads, workspace *w,
                                  kvedge_partial *partial) {
  const kvedge_cache_view *view = &a->view;
  const encounter *e = &heads[0];
  const float *scale = tile_scales(a, e->tile, e->kv_head, 0, 1, &w->value_scales);
  const tile_blocks *next = e->next_blocks;
  float *acc = partial->acc + kvedge_index_of(a, e) * (size_t)a->acc_stride;
  a->kernels->weighted_sum_i8_heads(e->blocks->values, e->kv_head * view->head_stride, view->token_stride,
                                    e->tile->num_tokens, view->head_dim, weight_bytes(a, e->tile), w->scores, scale,
                                    SCALES, w->alpha, next ? next->values : NULL, next && next->in_order, acc);
}

/* ---- A step: one tile of one KV head, or of several ------------------------------------------ */

void kvedge_step(const kvedge_attention *a, encounter *heads, int num_kv_heads, const tile_of_tokens *following,
                 kvedge_partial *partial, workspace *w) {
  const int at_once = kvedge_has_heads_kernels(a, num_kv_heads), num_tokens = heads->tile->num_tokens;
  const int stack = (int)kvedge_rows_in_block(a, heads->block) * a->heads_per_kv_head;
  for (int i = 0; i < stack; i += KVEDGE_STACK) { /* once, if there are several heads */
    const int count = stack - i < KVEDGE_STACK ? stack - i : KVEDGE_STACK, asking = i == 0;
    for (int j = 0; j < num_kv_heads; j++) {
      heads[j].first = i, heads[j].count = count, heads[j].at = j * count;
      if (!asking) heads[j].ahead = NULL, heads[j].next_blocks = NULL;
    }
    if (asking) prefetch_scales(&a->view, following, heads->kv_head, num_kv_heads, 0);
    if (!at_once || !scores_of_heads(a, heads, w))
      for (int j = 0; j < num_kv_heads; j++) kvedge_tile_scores(a, &heads[j], w);
    for (int j = 0; j < num_kv_heads && (a->real_logits || heads->masking); j++) finish_scores(a, &heads[j], w);
    const size_t index = kvedge_index_of(a, &heads[0]);
    a->kernels->softmax(w->scores, num_kv_heads * count, num_tokens, w->queries.softmax_factor + index,
                        partial->max + index, partial->sum + index, w->alpha);
    if (asking) prefetch_scales(&a->view, following, heads->kv_head, num_kv_heads, 1);
    if (at_once) weighted_sum_of_heads(a, heads, w, partial);
    else
      for (int j = 0; j < num_kv_heads; j++) weighted_sum(a, &heads[j], w, partial);
  }
}
