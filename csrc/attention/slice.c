/* One slice of attention: a block of query rows over a chunk of tokens (split-KV).
 *
 * The cache is read in memory order, tile by tile over all KV heads, so that its two streams (keys and values) are
 * sequential; every step prefetches some of the next tile. Softmax is online (Milakov and Gimelshein 2018): a tile
 * only needs the maximum and the sum so far.
 */
#include <float.h>

#include "attention/tile.h"
#include "system/float_mode.h"

/* ---- Tiles ----------------------------------------------------------------------------------- */

/* Where a chunk stands. Chunks count attended tokens, sinks first. */
typedef struct {
  kvedge_attended attended;
  int64_t next, stop; /* in attended tokens */
  int segment;        /* that of the last tile, and its first token */
  int64_t segment_start;
} tile_cursor;

/* Adds the blocks of a side that hold `count` tokens, from one of a segment on, to a tile that has `had` tokens. */
static void add_blocks(const kvedge_view_side *side, int s, const kvedge_segment *segment, int64_t token, int had,
                       int count, token_tile *tile) {
  const char *rows = segment->rows[s] + side->first_row + kvedge_row_of(side->format, token) * side->row_stride;
  const char *scales = segment->scales[s] + side->first_scale + token * side->scale_token_stride;
  if (had == 0) tile->first[s] = kvedge_place_in_row(side->format, token);
  const int stop = (tile->first[s] + had + count + side->block_tokens - 1) / side->block_tokens;
  for (int b = tile->num_blocks[s]; b < stop; b++) {
    tile->rows[s][b] = rows, tile->scales[s][b] = scales;
    rows += side->block_rows * side->row_stride, scales += side->block_tokens * side->scale_token_stride;
  }
  tile->num_blocks[s] = stop;
}

/* Adds `count` tokens of segment `index`, from `offset` on, to a tile. */
static void add_tokens(const kvedge_cache_view *view, int index, int64_t offset, int64_t count, token_tile *tile) {
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *side = &view->side[s];
    const int64_t token = offset + (index == 0 ? side->first : 0);
    add_blocks(side, s, &view->segments[index], token, tile->num_tokens, (int)count, tile);
  }
  tile->num_tokens += (int)count;
}

/* No tokens yet. */
static void clear_tile(token_tile *tile) { tile->num_tokens = tile->num_blocks[KEYS] = tile->num_blocks[VALUES] = 0; }

size_t kvedge_gathered_tile_bytes(const kvedge_attention *a) {
  ptrdiff_t of_token = 0;
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *side = &a->view.side[s];
    of_token += side->row_stride + (side->scales_in_rows ? 0 : side->scale_token_stride);
  }
  return kvedge_align((size_t)(a->tile * of_token)) + (size_t)4 * 64; /* each array begins at a line */
}

/* Copies `bytes` of each of `count` tokens side by side, from `offset` in a segment on; those of tokens to come are prefetched. */
static void gather(const kvedge_segment *segment, int64_t offset, int s, int scales, ptrdiff_t first, int count,
                   size_t bytes, ptrdiff_t from_stride, ptrdiff_t stride, char *to) {
  enum { AHEAD = 8 };
  const kvedge_segment *later = segment;
  int64_t later_offset = offset;
  for (int t = -AHEAD; t < count; t++) {
    if (t + AHEAD < count) {
      const char *from = (scales ? later->scales[s] : later->rows[s]) + first + later_offset * from_stride;
      for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
      if (++later_offset == later->num_tokens) later++, later_offset = 0;
    }
    if (t < 0) continue;
    memcpy(to + t * stride, (scales ? segment->scales[s] : segment->rows[s]) + first + offset * from_stride, bytes);
    if (++offset == segment->num_tokens) segment++, offset = 0;
  }
}

/* A tile of rows that lie anywhere, gathered in `room` as they are stored. */
static void gather_tile(const kvedge_attention *a, const kvedge_segment *segment, int64_t offset, int count, char *room,
                        token_tile *tile) {
  const kvedge_cache_view *view = &a->view;
  tile->num_tokens = count;
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *side = &view->side[s];
    char *rows = room, *scales = rows;
    room += kvedge_align((size_t)(a->tile * side->row_stride));
    gather(segment, offset, s, 0, side->first_row, count, (size_t)(view->num_kv_heads * side->head_stride),
           view->from_row_stride[s], side->row_stride, rows);
    if (!side->scales_in_rows && side->scale_token_stride) {
      scales = room, room += kvedge_align((size_t)(a->tile * side->scale_token_stride));
      gather(segment, offset, s, 1, side->first_scale, count, (size_t)(view->num_kv_heads * side->scale_head_stride),
             view->from_scale_stride[s], side->scale_token_stride, scales);
    }
    const kvedge_segment gathered = {
        .rows = {rows,   rows  },
          .scales = {scales, scales},
          .num_tokens = count
    };
    kvedge_view_side plain = *side; /* the first KV head is the gathered rows' first */
    plain.first_row = plain.first_scale = 0;
    add_blocks(&plain, s, &gathered, 0, 0, count, tile);
  }
}

/* `room`: for rows that are gathered. */
static token_tile next_tile(const kvedge_attention *a, tile_cursor *cursor, char *room) {
  const kvedge_cache_view *view = &a->view;
  const int64_t i = cursor->next;
  token_tile tile;
  clear_tile(&tile);
  if (i >= cursor->stop) return tile;
  int in_sinks = i < cursor->attended.sinks;
  tile.token = in_sinks ? i : i - cursor->attended.sinks + cursor->attended.first;
  tile.in_order = 1;
  /* Tiles start at multiples of their size: a token is always weighted beside the same others, so a
   * prompt gives the same results in whatever chunks it comes. Of runs, at multiples from the first one on. */
  const int first = view->side[KEYS].first | view->side[VALUES].first; /* both are the same, or one is 0 */
  int64_t count = a->tile - (tile.token + first) % a->tile;
  if (in_sinks && count > cursor->attended.sinks - i) count = cursor->attended.sinks - i;
  if (count > cursor->stop - i) count = cursor->stop - i;
  while (tile.token >= cursor->segment_start + view->segments[cursor->segment].num_tokens)
    cursor->segment_start += view->segments[cursor->segment++].num_tokens;
  if (view->gathers) {
    gather_tile(a, &view->segments[cursor->segment], tile.token - cursor->segment_start, (int)count, room, &tile);
    cursor->next += count;
    return tile;
  }
  do { /* segments that do not end with a block of 16 tokens end the tile */
    const kvedge_segment *segment = &view->segments[cursor->segment];
    int64_t offset = tile.token + tile.num_tokens - cursor->segment_start, here = count - tile.num_tokens;
    if (here > segment->num_tokens - offset) here = segment->num_tokens - offset;
    tile.in_order &= tile.num_tokens == 0;
    add_tokens(view, cursor->segment, offset, here, &tile);
    if (tile.num_tokens == count) break;
    cursor->segment_start += segment->num_tokens;
    cursor->segment++;
  } while (tile.num_tokens % KVEDGE_BLOCK == 0);
  cursor->next += tile.num_tokens;
  return tile;
}

/* In attended tokens: where chunk number `chunk` of a row block starts, or the one before it ends. */
static int64_t tokens_before_chunk(const kvedge_attention *a, int64_t total, int64_t chunk) {
  int64_t tiles = (total + a->tile - 1) / a->tile;
  return chunk >= a->chunks_per_block ? total : tiles * chunk / a->chunks_per_block * a->tile;
}

static tile_cursor start_of_slice(const kvedge_attention *a, const kvedge_slice_place *of) {
  tile_cursor cursor = {.attended = kvedge_attended_tokens(a, &of->block)};
  int64_t total = cursor.attended.sinks + cursor.attended.stop - cursor.attended.first;
  cursor.next = tokens_before_chunk(a, total, of->chunk);
  cursor.stop = tokens_before_chunk(a, total, of->chunk + 1);
  return cursor;
}

/* Do rows lie alike in two views? Else one's kernels cannot prefetch the other's. */
static int lie_alike(const kvedge_cache_view *first, const kvedge_cache_view *other) {
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *a = &first->side[s], *b = &other->side[s];
    if (a->format != b->format || a->row_stride != b->row_stride || a->head_stride != b->head_stride ||
        a->scale_token_stride != b->scale_token_stride || a->shape.group_size != b->shape.group_size)
      return 0;
  }
  return first->num_kv_heads == other->num_kv_heads;
}

static token_tile first_tile(const kvedge_cache_view *view, kvedge_slice of) {
  token_tile none;
  clear_tile(&none);
  if (!of.attention || view->gathers || of.attention->view.gathers || !lie_alike(view, &of.attention->view))
    return none;
  const kvedge_slice_place place = kvedge_place_of(of.attention, of.slice);
  tile_cursor cursor = start_of_slice(of.attention, &place);
  return next_tile(of.attention, &cursor, NULL);
}

/* ---- A slice --------------------------------------------------------------------------------- */

static void clear_partial(const kvedge_attention *a, const kvedge_slice_place *of, kvedge_partial *partial) {
  const size_t first = kvedge_query_index(a, of->kv_head), states = kvedge_query_index(a, of->num_kv_heads);
  for (size_t i = first; i < first + states; i++) {
    partial->max[i] = -FLT_MAX;
    partial->sum[i] = 0.0f;
  }
  const size_t stride = (size_t)a->acc_stride;
  memset(partial->acc + first * stride, 0, states * stride * sizeof *partial->acc);
}

void kvedge_slice_run(const kvedge_attention *a, int slice, kvedge_slice following, int slot, kvedge_workspace *w,
                      const volatile int *stop) {
  const kvedge_cache_view *view = &a->view;
  const kvedge_slice_place place = kvedge_place_of(a, slice);
  const int stop_head = place.kv_head + place.num_kv_heads;
  kvedge_partial partial = kvedge_partial_at(a, slot);
  w->queries = kvedge_queries_for(a, &place, slot);
  clear_partial(a, &place, &partial);
  tile_cursor cursor = start_of_slice(a, &place);
  char *gathered = (char *)w + kvedge_workspace_bytes(); /* two tiles in turn */
  int turn = 0;
  token_tile tile = next_tile(a, &cursor, gathered), none;
  clear_tile(&none);
  while (tile.num_tokens > 0 && !(stop && __atomic_load_n(stop, __ATOMIC_RELAXED))) {
    const int last = cursor.next >= cursor.stop;
    const token_tile next =
        last ? first_tile(view, following) : next_tile(a, &cursor, gathered + (turn ^= 1) * (a->gather_bytes / 2));
    const int masking = kvedge_needs_masking(a, &place.block, &tile);
    /* What is prefetched are all heads of a tile, in the order of memory. */
    const int prefetches = place.num_kv_heads == view->num_kv_heads && !view->gathers;
    const token_tile *to_prefetch = prefetches ? &next : &none;
    if (to_prefetch == &next) kvedge_fetch_rest(view, &tile, &next);
    w->scales[KEYS].count = w->scales[VALUES].count = 0;
    for (int kv_head = place.kv_head, num; kv_head < stop_head; kv_head += num) {
      head_tile heads[KVEDGE_HEADS];
      num = stop_head - kv_head < a->heads_per_step ? stop_head - kv_head : a->heads_per_step;
      for (int j = 0; j < num; j++) {
        head_tile *h = &heads[j];
        h->tile = &tile, h->block = &place.block, h->kv_head = kv_head + j, h->queries = &w->queries,
        h->masking = masking;
        kvedge_share_next(view, to_prefetch, a->batches_heads ? num : 1, j, h);
      }
      kvedge_step(a, heads, num, to_prefetch, &partial, w);
    }
    if (last) break;
    tile = next;
  }
}

size_t kvedge_workspace_bytes(void) { return kvedge_align(sizeof(workspace)); }

void kvedge_all_logits(const kvedge_attention *a, float *logits) {
  const kvedge_cache_view *view = &a->view;
  tile_cursor cursor = {.attended = {.stop = view->len}, .stop = view->len};
  workspace *w = a->workspace;
  const kvedge_slice_place all = {.block = {.count = a->num_rows}, .num_kv_heads = view->num_kv_heads};
  w->queries = kvedge_queries_for(a, &all, 0);
  for (token_tile tile = next_tile(a, &cursor, NULL); tile.num_tokens > 0; tile = next_tile(a, &cursor, NULL)) {
    w->scales[KEYS].count = 0;
    for (int kv_head = 0; kv_head < view->num_kv_heads; kv_head++) {
      for (int i = 0; i < a->query_rows; i += KVEDGE_QUERY_ROWS) {
        int count = a->query_rows - i < KVEDGE_QUERY_ROWS ? a->query_rows - i : KVEDGE_QUERY_ROWS;
        head_tile h = {.tile = &tile, .kv_head = kv_head, .first = i, .count = count, .queries = &w->queries};
        kvedge_head_scores(a, &h, w);
        for (int j = 0; j < count; j++) {
          float *row = w->scores + j * KVEDGE_TILE;
          kvedge_to_logits(a, &w->queries, kvedge_index_of(a, &h) + (size_t)j, tile.num_tokens, row);
          int64_t head = (int64_t)kv_head * a->heads_per_kv_head + i + j;
          memcpy(logits + head * view->len + tile.token, row, (size_t)tile.num_tokens * sizeof *row);
        }
      }
    }
  }
}
