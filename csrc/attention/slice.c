/* One slice of attention: a block of query rows over a chunk of tokens.
 *
 * The cache is read in memory order, tile by tile over all KV heads, so that its two streams (keys
 * and values) are sequential; every step asks for its head's share of the next tile. Softmax is
 * online (Milakov and Gimelshein 2018): a tile only needs the maximum and the sum so far.
 */
#include <float.h>
#include <string.h>

#include "attention/tile.h"

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
    ptrdiff_t code = view->first_code + offset * view->token_stride;
    ptrdiff_t scale = view->first_scale + offset * view->scale_token_stride;
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

/* Those of KV head 0; the others' lie at an offset. */
static tile_blocks blocks_of_tile(const kvedge_cache_view *view, const tile_of_tokens *tile) {
  tile_blocks blocks = {.num_blocks = (tile->num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK,
                        .in_order = tile->num_pieces == 1};
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &tile->pieces[i];
    for (int t = 0; t < p->num_tokens; t += KVEDGE_BLOCK) {
      blocks.keys[(p->first + t) / KVEDGE_BLOCK] = (const int8_t *)p->rows.keys + t * view->token_stride;
      blocks.values[(p->first + t) / KVEDGE_BLOCK] = (const int8_t *)p->rows.values + t * view->token_stride;
    }
  }
  return blocks;
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
  const int together = kvedge_heads_together(a);
  tile_of_tokens tile = next_tile(a, &cursor);
  while (tile.num_tokens > 0 && !(stop && __atomic_load_n(stop, __ATOMIC_RELAXED))) {
    kvedge_fetch_rest(view, &tile);
    int last = cursor.next >= cursor.stop;
    tile_of_tokens following = last ? first_tile(next) : next_tile(a, &cursor);
    w.key_scales.first = w.value_scales.first = -KVEDGE_SCALE_COLUMNS;
    int in_blocks = (tile.num_pieces > 1 || kvedge_has_heads_kernels(a, together)) && view->format == KVEDGE_INT8 &&
                    a->kernels->scores_i8_blocks;
    tile_blocks blocks, following_blocks;
    if (in_blocks) blocks = blocks_of_tile(view, &tile);
    if (in_blocks) following_blocks = blocks_of_tile(view, &following);
    const encounter of_any_head = {.block = block, .queries = &w.queries, .tile = &tile,
                                   .masking = kvedge_needs_masking(a, block, &tile),
                                   .blocks = in_blocks ? &blocks : NULL};
    for (int h = 0, num; h < view->num_kv_heads; h += num) {
      encounter heads[KVEDGE_HEADS];
      rows_ahead ahead[KVEDGE_HEADS];
      tile_blocks share[KVEDGE_HEADS];
      num = view->num_kv_heads - h < together ? view->num_kv_heads - h : together;
      for (int j = 0; j < num; j++) {
        heads[j] = of_any_head;
        heads[j].kv_head = h + j;
        if (!in_blocks) heads[j].ahead = kvedge_share_of_head(view, &tile, &following, h + j, &ahead[j]);
        else if (following.num_tokens > 0)
          heads[j].next_blocks = kvedge_share_in_blocks(view, blocks.num_blocks, &following_blocks, h, num, j,
                                                        &share[j]);
      }
      kvedge_step(a, heads, num, &following, &partial, &w);
    }
    kvedge_remember_asking(&tile, &following, in_blocks);
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
        kvedge_tile_scores(a, &e, &w);
        for (int j = 0; j < count; j++) {
          float *row = w.scores + j * KVEDGE_TILE;
          kvedge_to_logits(a, &w.queries, kvedge_index_of(a, &e) + (size_t)j, tile.num_tokens, row);
          int64_t head = (int64_t)kv_head * a->heads_per_kv_head + i + j;
          memcpy(logits + head * view->len + tile.token, row, (size_t)tile.num_tokens * sizeof *row);
        }
      }
    }
  }
}
