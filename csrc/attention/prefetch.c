/* Prefetch of the next tile, by the kernels of each step; and reading of those rows of a tile that no step prefetched. */
#include "attention/tile.h"

/* A head tile prefetches as many entries of the next tile, in the order of memory (entries,
 * heads), as it has itself; where the next tile has fewer, some twice. Of `batch` heads side by
 * side each takes every batch-th entry from the j-th on, since kernels of a head batch prefetch
 * all of them together. */
static void entries_to_prefetch(const kvedge_cache_view *view, int s, const token_tile *next, int batch, int j,
                                head_tile *h) {
  const kvedge_view_side *side = &view->side[s];
  const int heads = view->num_kv_heads, num_blocks = kvedge_num_entries(side, h->tile);
  const int num_next = kvedge_num_entries(side, next), there = num_next * heads;
  const ptrdiff_t of_head = (kvedge_is_of_runs(side->format) ? 1 : KVEDGE_BLOCK) * side->head_stride;
  int first = batch > 1 ? (h->kv_head - j) * num_blocks + j : h->kv_head * num_blocks; /* counted over all */
  if (first >= there) first %= there;
  int block = first / heads, head = first % heads;
  for (int i = 0; i < num_blocks; i++) {
    h->next[s][i] = next->rows[s][block] + head * of_head;
    for (head += batch; head >= heads; head -= heads) block++;
    if (block >= num_next) block = 0;
  }
}

void kvedge_share_next(const kvedge_cache_view *view, const token_tile *next, int batch, int j, head_tile *h) {
  h->next_in_order = next->in_order;
  for (int s = 0; s < SIDES; s++) {
    h->prefetches[s] = next->num_tokens > 0;
    if (next->num_tokens > 0) entries_to_prefetch(view, s, next, batch, j, h);
  }
}

void kvedge_prefetch_scales(const kvedge_cache_view *view, const token_tile *next, int s, int kv_head, int num) {
  __asm__ volatile(""); /* GCC drops calls of a function that does nothing but prefetch */
  const ptrdiff_t token_stride = view->side[s].scale_token_stride;
  const int heads = view->num_kv_heads, tables = next->num_tokens == 0 ? 0 : next->in_order ? 1 : next->num_blocks;
  const int whole_tables = tables >= heads;
  if (token_stride == 0) return;
  int first = 0, stop = tables;
  if (whole_tables) first = stop * kv_head / heads, stop = stop * (kv_head + num) / heads;
  for (int i = first; i < stop; i++) {
    const char *scales = next->scales[s][i];
    const int lines = (int)(((next->in_order ? next->num_tokens : KVEDGE_BLOCK) * token_stride + 63) / 64);
    const int first_line = whole_tables ? 0 : (int)((int64_t)lines * kv_head / heads);
    const int stop_line = whole_tables ? lines : (int)((int64_t)lines * (kv_head + num) / heads);
    for (int line = first_line; line < stop_line; line++) __builtin_prefetch(scales + 64 * line, 0, 2);
  }
}

/* The tile that this thread prefetched last, and how many of its tokens. */
static _Thread_local struct {
  const char *keys;
  int num_tokens[SIDES];
} prefetched;

/* Bytes side by side; bytes <= 0: none. */
typedef struct {
  const char *start;
  ptrdiff_t bytes;
} memory_range;

/* Reads a byte of every line of all ranges: of several by turns, since the hardware prefetcher
 * needs some lines to find the direction of each. */
static void fetch(const memory_range *range, int num_ranges) {
  enum { LINE = 64 };
  ptrdiff_t longest = 0;
  for (int i = 0; i < num_ranges; i++) longest = range[i].bytes > longest ? range[i].bytes : longest;
  for (ptrdiff_t at = 0; at < longest; at += LINE)
    for (int i = 0; i < num_ranges; i++)
      if (at < range[i].bytes) (void)*(const volatile char *)(range[i].start + at);
  for (int i = 0; i < num_ranges; i++) /* one that is not aligned may end in one more line */
    if (range[i].bytes > 0) (void)*(const volatile char *)(range[i].start + range[i].bytes - 1);
}

/* Rows, or scales, of a tile's tokens from `known` on, whose blocks are at `blocks`; of a token,
 * row_bytes of all heads. (A view of one head has fewer of them than a token's stride.) */
static void fetch_blocks(const token_tile *tile, const char *const *blocks, ptrdiff_t token_stride, ptrdiff_t row_bytes,
                         int known) {
  memory_range ranges[KVEDGE_TILE_BLOCKS];
  int num_ranges = 0;
  if (token_stride == 0) return; /* no scales */
  for (int b = known / KVEDGE_BLOCK; b < tile->num_blocks; b++) {
    const int first = b * KVEDGE_BLOCK, from = known > first ? known - first : 0;
    int tokens = tile->num_tokens - first;
    if (tokens > KVEDGE_BLOCK && !tile->in_order) tokens = KVEDGE_BLOCK;
    ranges[num_ranges++] =
        (memory_range){blocks[b] + from * token_stride, (tokens - from - 1) * token_stride + row_bytes};
    if (tile->in_order) break; /* the rest lies behind it */
  }
  fetch(ranges, num_ranges);
}

/* Runs of a tile, but for those that hold the `known` first of its tokens. */
static void fetch_runs(const kvedge_cache_view *view, const token_tile *tile, int s, int known) {
  const ptrdiff_t bytes = view->num_kv_heads * view->side[s].head_stride;
  const int num_runs = kvedge_num_entries(&view->side[s], tile), from = known / KVEDGE_RUN;
  memory_range ranges[KVEDGE_TILE_BLOCKS];
  for (int r = from; r < num_runs; r++) ranges[r - from] = (memory_range){tile->rows[s][r], bytes};
  fetch(ranges, num_runs - from);
}

/* All of a call's first tile, for a start. In the order of memory, at memory's speed: by heads, as steps read it, it
 * was a fifth of that, and Zen 4 drops so many prefetches at once. */
void kvedge_fetch_rest(const kvedge_cache_view *view, const token_tile *tile, const token_tile *next,
                       int reads_values) {
  const int is_known = prefetched.keys == tile->rows[KEYS][0], reads[SIDES] = {1, reads_values};
  prefetched.keys = next->num_tokens > 0 ? next->rows[KEYS][0] : NULL;
  for (int s = 0; s < SIDES; s++) {
    const int known = is_known ? prefetched.num_tokens[s] : 0;
    const kvedge_view_side *side = &view->side[s];
    /* blocks of the next tile, one for each of this one's */
    prefetched.num_tokens[s] = reads[s] ? tile->num_tokens : 0;
    if (known >= tile->num_tokens || !reads[s]) continue;
    if (kvedge_is_of_runs(side->format)) {
      fetch_runs(view, tile, s, known);
      continue;
    }
    fetch_blocks(tile, tile->scales[s], side->scale_token_stride, view->num_kv_heads * side->scale_head_stride, known);
    fetch_blocks(tile, tile->rows[s], side->token_stride, view->num_kv_heads * side->head_stride, known);
  }
}
