/* One slice of attention: a block of query rows over a chunk of tokens.
 *
 * The cache is read in memory order, tile by tile over all KV heads, so that its two streams (keys
 * and values) are sequential; every step asks for its head's share of the next tile. Softmax is
 * online (Milakov and Gimelshein 2018): a tile only needs the maximum and the sum so far.
 */
#include <float.h>
#include <math.h>

#include "attention.h"

/* A tile of one KV head's rows. */
typedef struct {
  const char *keys, *values, *key_scales, *value_scales;
} tile_rows;

/* Rows that lie token_stride apart: a tile has one run of them, or several where segments meet in it. */
typedef struct {
  int first, num_tokens; /* of the tile's tokens; first is a multiple of KVEDGE_BLOCK */
  tile_rows rows;        /* of KV head 0 */
} piece;

enum { MAX_PIECES = KVEDGE_TILE_BLOCKS };

/* A tile of all heads: tokens token..token+num_tokens-1. */
typedef struct {
  int64_t token;
  int num_tokens; /* 0: there is none */
  int num_pieces;
  piece pieces[MAX_PIECES];
} tile_of_tokens;

static tile_rows rows_of_head(const kvedge_cache_view *view, const tile_rows *first, int kv_head) {
  ptrdiff_t code = kv_head * view->head_stride, scale = kv_head * view->scale_head_stride;
  return (tile_rows){first->keys + code, first->values + code, first->key_scales + scale,
                     first->value_scales + scale};
}

/* Where a chunk stands. Chunks count visible tokens, sinks first. */
typedef struct {
  kvedge_visible visible;
  int64_t next, stop;         /* in visible tokens */
  int segment;                /* that of the last tile, and its first token */
  int64_t segment_start;
} tile_cursor;

static tile_of_tokens next_tile(const kvedge_attention *a, tile_cursor *cursor) {
  const kvedge_cache_view *view = &a->view;
  int64_t i = cursor->next;
  if (i >= cursor->stop) return (tile_of_tokens){.num_tokens = 0};
  int in_sinks = i < cursor->visible.sinks;
  int64_t token = in_sinks ? i : i - cursor->visible.sinks + cursor->visible.first;
  /* Tiles start at multiples of their size: a token is always weighed beside the same others, so a
   * prompt gives the same results in whatever chunks it comes. */
  int64_t count = a->tile - token % a->tile;
  if (in_sinks && count > cursor->visible.sinks - i) count = cursor->visible.sinks - i;
  if (count > cursor->stop - i) count = cursor->stop - i;
  while (token >= cursor->segment_start + view->segments[cursor->segment].num_tokens)
    cursor->segment_start += view->segments[cursor->segment++].num_tokens;
  tile_of_tokens tile = {.token = token};
  do {
    const kvedge_segment *segment = &view->segments[cursor->segment];
    int64_t offset = token + tile.num_tokens - cursor->segment_start, here = count - tile.num_tokens;
    if (here > segment->num_tokens - offset) here = segment->num_tokens - offset;
    ptrdiff_t code = offset * view->token_stride, scale = offset * view->scale_token_stride;
    tile.pieces[tile.num_pieces++] = (piece){
        .first = tile.num_tokens, .num_tokens = (int)here,
        .rows = {segment->keys + code, segment->values + code, segment->key_scales + scale,
                 segment->value_scales + scale}};
    tile.num_tokens += (int)here;
    if (tile.num_tokens == count) break;
    cursor->segment_start += segment->num_tokens;
    cursor->segment++;
  } while (tile.num_tokens % KVEDGE_BLOCK == 0);
  cursor->next += tile.num_tokens;
  return tile;
}

/* Room for a tile's scales: a tile, and a line so that columns do not lie a power of two apart. */
enum { SCALES = KVEDGE_TILE + KVEDGE_BLOCK };

/* Scales of some columns of a tile, column by column. A column is one group of one head; in the cache a token's
 * scales lie side by side, so several columns at once cost little more than one. */
typedef struct {
  int first; /* column; -KVEDGE_SCALE_COLUMNS: none */
  _Alignas(64) float scale[KVEDGE_SCALE_COLUMNS][SCALES]; /* 0 after the last token of a block */
} scale_columns;

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
  columns->first = column;
  return columns->scale[0];
}

/* What a step asks for: its head's share of the tile that follows, in the order of memory. Pieces that are NULL ask
 * for nothing. */
typedef struct {
  const char *keys[MAX_PIECES], *values[MAX_PIECES];
} rows_ahead;

/* Rows of a tile of several pieces, by blocks. */
typedef struct {
  const int8_t *keys[KVEDGE_TILE_BLOCKS], *values[KVEDGE_TILE_BLOCKS];
} tile_blocks;

/* Those of KV head 0; the others' lie at an offset. */
static tile_blocks blocks_of_tile(const kvedge_cache_view *view, const tile_of_tokens *tile) {
  tile_blocks blocks;
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &tile->pieces[i];
    for (int t = 0; t < p->num_tokens; t += KVEDGE_BLOCK) {
      blocks.keys[(p->first + t) / KVEDGE_BLOCK] = (const int8_t *)p->rows.keys + t * view->token_stride;
      blocks.values[(p->first + t) / KVEDGE_BLOCK] = (const int8_t *)p->rows.values + t * view->token_stride;
    }
  }
  return blocks;
}

/* ---- Options that look at single logits ---------------------------------------------------- */

static float clamp(float x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

static void to_logits(const kvedge_attention *a, const kvedge_queries *q, size_t index, int num_tokens, float *row) {
  double factor = q->logit_factor[index], bias = q->logit_bias[index];
  float cap = a->options.softcap;
  for (int t = 0; t < num_tokens; t++) {
    double logit = row[t] * factor + bias;
    if (cap > 0.0f) logit = cap * tanh(logit / cap);
    row[t] = clamp((float)logit);
  }
}

/* What causality and the window let a row see of a tile: tokens 0..sinks-1 and first..stop-1 of it. */
typedef struct {
  int sinks, first, stop;
} sight;

static int within(int64_t token, int num_tokens) {
  return token < 0 ? 0 : token > num_tokens ? num_tokens : (int)token;
}

static sight sight_of(const kvedge_attention *a, int64_t row, int64_t token, int num_tokens) {
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

/* ALiBi and masks on one query row's logits of a tile that starts at `token`. */
static void apply_options(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
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
  sight seen = sight_of(a, row, token, num_tokens);
  for (int t = seen.sinks; t < seen.first; t++) logits[t] = -INFINITY;
  for (int t = seen.stop; t < num_tokens; t++) logits[t] = -INFINITY;
}

/* Does any row of the block not see the whole tile? */
static int needs_masking(const kvedge_attention *a, int64_t first_row, int64_t rows,
                         const tile_of_tokens *tile) {
  const kvedge_attention_options *o = &a->options;
  if (o->mask || o->bias || o->alibi_slopes) return 1;
  int64_t first = a->first_position + first_row, last = first + rows - 1;
  int64_t end = tile->token + tile->num_tokens;
  if (o->causal && end - 1 > first) return 1;
  return o->window && tile->token <= last - o->window && end > o->sink_tokens;
}

typedef struct {
  kvedge_queries queries; /* of the row block */
  _Alignas(64) float scores[KVEDGE_STACK * KVEDGE_TILE]; /* (stack, tile): scores, then probabilities */
  _Alignas(64) float alpha[KVEDGE_STACK];
  scale_columns key_scales, value_scales; /* of the tile */
} workspace;

/* ---- Scores ---------------------------------------------------------------------------------- */

/* Which stacked queries of a row block meet which head's part of a tile. */
typedef struct {
  int64_t block;
  int kv_head, first, count; /* stack positions first..first+count-1 */
  int at;                    /* of their rows in the workspace */
  const kvedge_queries *queries;
  const tile_of_tokens *tile;
  int masking;               /* as needs_masking() */
  const rows_ahead *ahead;   /* what is asked for meanwhile; NULL: nothing */
  /* Where pieces are worked on at once, rows of KV head 0, and what is asked for then; NULL: one by one, and nothing. */
  const tile_blocks *blocks, *next_blocks;
} encounter;

/* Position of the first of its queries in what is prepared of a row block, and in partial results. */
static size_t index_of(const kvedge_attention *a, const encounter *e) {
  return kvedge_query_index(a, e->kv_head) + (size_t)e->first;
}

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
  sight seen = sight_of(a, row, token, num_tokens);
  if (!o->mask && !o->bias) return largest_of(scale, 0, seen.sinks, largest_of(scale, seen.first, seen.stop, 0.0f));
  int head = e->kv_head * a->heads_per_kv_head + stacked % a->heads_per_kv_head;
  const uint8_t *mask = o->mask ? o->mask + head * o->mask_strides[0] + row * o->mask_strides[1] : NULL;
  const float *bias = o->bias ? o->bias + head * o->bias_strides[0] + row * o->bias_strides[1] : NULL;
  float largest = 0.0f;
  for (int t = 0; t < seen.stop; t++) {
    int hidden = (t >= seen.sinks && t < seen.first) || (mask && !mask[(token + t) * o->mask_strides[2]]) ||
                 (bias && bias[(token + t) * o->bias_strides[2]] == -INFINITY);
    if (!hidden && scale[t] > largest) largest = scale[t];
  }
  return largest;
}

/* Bytes of the codes of stacked queries against a tile: two where they move no logit by more than about
 * COARSEST, else three. At this figure the output keeps the numerics contract (2e-4) between flat and sharp, where
 * it is hardest (tools/accuracy.py --worst). A row's heads get the same, since a kernel call for each kind would
 * unpack the keys again. */
static void choose_bytes(const kvedge_attention *a, const encounter *e, const float *scale, int *bytes) {
  static const float COARSEST = 8e-5f;
  const size_t query_index = index_of(a, e);
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
    size_t at = (index_of(a, e) + (size_t)i) * (size_t)a->num_groups + (size_t)group;
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

/* Scores of one head's part of a tile as they come from the kernels. */
static void tile_scores(const kvedge_attention *a, const encounter *e, workspace *w) {
  const kvedge_cache_view *view = &a->view;
  const tile_of_tokens *tile = e->tile;
  const rows_ahead *ahead = e->ahead;
  float *scores = w->scores + e->at * KVEDGE_TILE;
  size_t index = index_of(a, e);
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
    if (a->real_logits) to_logits(a, &w->queries, index_of(a, e) + (size_t)i, e->tile->num_tokens, row);
    if (e->masking)
      apply_options(a, first_row + stacked / a->heads_per_kv_head,
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
  float *acc = partial->acc + index_of(a, e) * (size_t)a->acc_stride;
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
                                     e->count, p + of->first, a->value_factor, keep, prefetch, acc, a->acc_stride);
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

/* How many KV heads a step takes, as far as there are as many left. (Measured: with four queries for each it is slower.) */
static int heads_together(const kvedge_attention *a) {
  return a->num_row_blocks > 1 || a->stack > 3 ? 1 : a->stack == 1 ? KVEDGE_HEADS : 2;
}

/* Are there kernels for this many heads at once? */
static int has_heads_kernels(const kvedge_attention *a, int num_kv_heads) {
  const kvedge_cache_view *view = &a->view;
  return num_kv_heads == KVEDGE_HEADS && a->stack == 1 && a->kernels->scores_i8_heads &&
         view->format == KVEDGE_INT8 && view->num_groups == 1 && view->head_dim % 16 == 0 && view->head_dim >= 64 &&
         view->head_dim <= KVEDGE_HEADS_DIM;
}

/* Their scores; 0: nothing was done, since their queries need different numbers of bytes. */
static int scores_of_heads(const kvedge_attention *a, const encounter *heads, workspace *w) {
  const kvedge_cache_view *view = &a->view;
  const encounter *e = &heads[0];
  const size_t index = index_of(a, e);
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
  a->kernels->scores_i8_heads(&q, e->blocks->keys, e->kv_head * view->head_stride, view->token_stride,
                              e->tile->num_tokens, scale, SCALES, e->next_blocks ? e->next_blocks->keys : NULL,
                              w->scores);
  return 1;
}

static void weighted_sum_of_heads(const kvedge_attention *a, const encounter *heads, workspace *w,
                                  kvedge_partial *partial) {
  const kvedge_cache_view *view = &a->view;
  const encounter *e = &heads[0];
  a->kernels->weighted_sum_i8_heads(
      e->blocks->values, e->kv_head * view->head_stride, view->token_stride, e->tile->num_tokens, view->head_dim,
      weight_bytes(a, e->tile), w->scores, tile_scales(a, e->tile, e->kv_head, 0, 1, &w->value_scales), SCALES,
      w->alpha, e->next_blocks ? e->next_blocks->values : NULL, partial->acc + index_of(a, e) * (size_t)a->acc_stride);
}

/* ---- A step: one tile of one KV head, or of several ------------------------------------------ */

/* `heads`: what is the same for all their queries, head by head. */
static void step(const kvedge_attention *a, encounter *heads, int num_kv_heads, kvedge_partial *partial,
                 workspace *w) {
  const int at_once = has_heads_kernels(a, num_kv_heads), num_tokens = heads->tile->num_tokens;
  const int stack = (int)kvedge_rows_in_block(a, heads->block) * a->heads_per_kv_head;
  for (int i = 0; i < stack; i += KVEDGE_STACK) { /* once, if there are several heads */
    const int count = stack - i < KVEDGE_STACK ? stack - i : KVEDGE_STACK;
    for (int j = 0; j < num_kv_heads; j++) heads[j].first = i, heads[j].count = count, heads[j].at = j * count;
    if (!at_once || !scores_of_heads(a, heads, w))
      for (int j = 0; j < num_kv_heads; j++) tile_scores(a, &heads[j], w);
    for (int j = 0; j < num_kv_heads && (a->real_logits || heads->masking); j++) finish_scores(a, &heads[j], w);
    const size_t index = index_of(a, &heads[0]);
    a->kernels->softmax(w->scores, num_kv_heads * count, num_tokens, w->queries.softmax_factor + index,
                        partial->max + index, partial->sum + index, w->alpha);
    if (at_once) weighted_sum_of_heads(a, heads, w, partial);
    else
      for (int j = 0; j < num_kv_heads; j++) weighted_sum(a, &heads[j], w, partial);
    for (int j = 0; j < num_kv_heads; j++) heads[j].ahead = NULL, heads[j].next_blocks = NULL; /* asked for */
  }
}

/* Asks for a head's scales in a tile, unless they are in the lines that were asked for with those of the head before. A
 * step ahead is early enough; what is asked for long before is often forgotten (AMD). */
static void prefetch_scales(const kvedge_cache_view *view, const tile_of_tokens *tile, int kv_head) {
  const ptrdiff_t stride = view->scale_token_stride, size = view->scale_head_stride, first = kv_head * size;
  const int shared = stride < 64; /* a line, by all heads of several tokens */
  if (kv_head > 0 && (shared || (first - 1) / 64 == (first + size - 1) / 64)) return;
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &tile->pieces[i];
    const char *keys = p->rows.key_scales, *values = p->rows.value_scales;
    for (ptrdiff_t row = first; row < p->num_tokens * stride; row += shared ? 64 : stride)
      for (ptrdiff_t at = row; at < row + (shared ? 1 : size); at += 64) {
        __builtin_prefetch(keys + at, 0, 2);
        __builtin_prefetch(values + at, 0, 2);
      }
  }
}

/* A head's share of the tile that follows, piece by piece: as many bytes as its own rows there. */
static const rows_ahead *share_of_head(const kvedge_cache_view *view, const tile_of_tokens *tile,
                                       const tile_of_tokens *following, int kv_head, rows_ahead *ahead) {
  ptrdiff_t row = view->head_stride;
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &following->pieces[i];
    if (i >= following->num_pieces) {
      ahead->keys[i] = ahead->values[i] = NULL;
      continue;
    }
    ptrdiff_t at = kv_head * p->num_tokens * row;
    ahead->keys[i] = p->rows.keys + at;
    ahead->values[i] = p->rows.values + at;
  }
  return ahead;
}

/* Likewise where a tile is worked on in blocks: one block after the other, and each as a whole, since pieces may lie
 * anywhere. `num_tokens`: of this tile; the one that follows has as many, or more. The shares of a step's heads, kv_head
 * and num - 1 more, are made of runs of num blocks, of which each head has one: the j-th. */
static const tile_blocks *share_in_blocks(const kvedge_cache_view *view, const tile_blocks *following, int num_tokens,
                                          int kv_head, int num, int j, tile_blocks *share) {
  int num_blocks = (num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK, heads = view->num_kv_heads;
  for (int i = 0; i < num_blocks; i++) {
    int block = kv_head * num_blocks + i * num + j;
    ptrdiff_t at = block % heads * KVEDGE_BLOCK * view->head_stride;
    share->keys[i] = following->keys[block / heads] + at;
    share->values[i] = following->values[block / heads] + at;
  }
  return share;
}

kvedge_visible kvedge_visible_tokens(const kvedge_attention *a, int64_t block) {
  const kvedge_attention_options *o = &a->options;
  int64_t row = block * a->rows_per_block, position = a->first_position + row;
  kvedge_visible visible = {.sinks = 0, .first = 0, .stop = a->view.len};
  if (o->causal) visible.stop = position + kvedge_rows_in_block(a, block);
  if (o->window) {
    if (position - o->window + 1 > 0) visible.first = (position - o->window + 1) / a->tile * a->tile;
    visible.sinks = o->sink_tokens < visible.first ? o->sink_tokens : visible.first;
  }
  return visible;
}

/* In visible tokens: where chunk number `chunk` of a row block starts, or the one before it ends. */
static int64_t start_of_chunk(const kvedge_attention *a, int64_t total, int64_t chunk) {
  int64_t tiles = (total + a->tile - 1) / a->tile;
  return chunk >= a->chunks_per_block ? total : tiles * chunk / a->chunks_per_block * a->tile;
}

static tile_cursor start_of_slice(const kvedge_attention *a, int slice) {
  int64_t block = slice / a->chunks_per_block, chunk = slice % a->chunks_per_block;
  tile_cursor cursor = {.visible = kvedge_visible_tokens(a, block)};
  int64_t total = cursor.visible.sinks + cursor.visible.stop - cursor.visible.first;
  cursor.next = start_of_chunk(a, total, chunk);
  cursor.stop = start_of_chunk(a, total, chunk + 1);
  return cursor;
}

static tile_of_tokens first_tile(kvedge_slice of) {
  if (!of.attention) return (tile_of_tokens){.num_tokens = 0};
  tile_cursor cursor = start_of_slice(of.attention, of.slice);
  return next_tile(of.attention, &cursor);
}

void kvedge_slice_run(const kvedge_attention *a, int slice, kvedge_slice next, int slot, const volatile int *stop) {
  const kvedge_cache_view *view = &a->view;
  int64_t block = slice / a->chunks_per_block;
  kvedge_partial partial = kvedge_partial_at(a, slot);
  size_t states = (size_t)view->num_kv_heads * (size_t)a->stack;
  for (size_t i = 0; i < states; i++) {
    partial.max[i] = -FLT_MAX;
    partial.sum[i] = 0.0f;
  }
  memset(partial.acc, 0, states * (size_t)a->acc_stride * sizeof *partial.acc);

  tile_cursor cursor = start_of_slice(a, slice);
  workspace w;
  w.queries = kvedge_queries_for(a, block, slot);
  const int together = heads_together(a);
  tile_of_tokens tile = next_tile(a, &cursor);
  while (tile.num_tokens > 0 && !(stop && __atomic_load_n(stop, __ATOMIC_RELAXED))) {
    int last = cursor.next >= cursor.stop;
    tile_of_tokens following = last ? first_tile(next) : next_tile(a, &cursor);
    w.key_scales.first = w.value_scales.first = -KVEDGE_SCALE_COLUMNS;
    int in_blocks = (tile.num_pieces > 1 || has_heads_kernels(a, together)) && view->format == KVEDGE_INT8 &&
                    a->kernels->scores_i8_blocks;
    int asking = !in_blocks || following.num_tokens >= tile.num_tokens;
    tile_blocks blocks, following_blocks;
    if (in_blocks) blocks = blocks_of_tile(view, &tile);
    if (in_blocks && asking) following_blocks = blocks_of_tile(view, &following);
    const encounter all = {.block = block, .queries = &w.queries, .tile = &tile, .blocks = in_blocks ? &blocks : NULL,
                           .masking = needs_masking(a, block * a->rows_per_block, kvedge_rows_in_block(a, block), &tile)};
    for (int h = 0, num; h < view->num_kv_heads; h += num) {
      encounter heads[KVEDGE_HEADS];
      rows_ahead ahead[KVEDGE_HEADS];
      tile_blocks share[KVEDGE_HEADS];
      num = view->num_kv_heads - h < together ? view->num_kv_heads - h : together;
      for (int i = h + num; i < h + 2 * num && view->num_groups > 0; i++) {
        int next = i < view->num_kv_heads;
        prefetch_scales(view, next ? &tile : &following, next ? i : i - view->num_kv_heads);
      }
      for (int j = 0; j < num; j++) {
        heads[j] = all;
        heads[j].kv_head = h + j;
        if (!asking) continue;
        if (in_blocks) heads[j].next_blocks = share_in_blocks(view, &following_blocks, tile.num_tokens, h, num, j, &share[j]);
        else heads[j].ahead = share_of_head(view, &tile, &following, h + j, &ahead[j]);
      }
      step(a, heads, num, &partial, &w);
    }
    if (last) break;
    tile = following;
  }
}

void kvedge_attention_run(const kvedge_attention *a, int slice, int slot, const volatile int *stop) {
  int num_slices = a->num_row_blocks * a->chunks_per_block;
  kvedge_slice next = {slice + 1 < num_slices ? a : NULL, slice + 1};
  kvedge_slice_run(a, slice, next, slot, stop);
}

void kvedge_all_logits(const kvedge_attention *a, float *logits) {
  const kvedge_cache_view *view = &a->view;
  tile_cursor cursor = {.visible = {.stop = view->len}, .stop = view->len};
  workspace w;
  w.queries = kvedge_queries_for(a, 0, 0);
  for (tile_of_tokens tile = next_tile(a, &cursor); tile.num_tokens > 0; tile = next_tile(a, &cursor)) {
    w.key_scales.first = -KVEDGE_SCALE_COLUMNS;
    for (int kv_head = 0; kv_head < view->num_kv_heads; kv_head++) {
      for (int i = 0; i < a->stack; i += KVEDGE_STACK) {
        int count = a->stack - i < KVEDGE_STACK ? a->stack - i : KVEDGE_STACK;
        encounter e = {.kv_head = kv_head, .first = i, .count = count, .queries = &w.queries, .tile = &tile};
        tile_scores(a, &e, &w);
        for (int j = 0; j < count; j++) {
          float *row = w.scores + j * KVEDGE_TILE;
          to_logits(a, &w.queries, index_of(a, &e) + (size_t)j, tile.num_tokens, row);
          int64_t head = (int64_t)kv_head * a->heads_per_kv_head + i + j;
          memcpy(logits + head * view->len + tile.token, row, (size_t)tile.num_tokens * sizeof *row);
        }
      }
    }
  }
}
