/* Prefetch of the next tile, by the kernels of each step; and reading of those rows of a tile that no step prefetched. */
#include "attention/tile.h"

/* A head tile prefetches as many blocks of the next tile, in the order of memory (blocks,
 * heads), as it has itself; where the next tile has fewer, some twice. Of `batch` heads side by
 * side each takes every batch-th block from the j-th on, since kernels of a head batch prefetch
 * all of them together. */
static void blocks_to_prefetch(const kvedge_cache_view *view, int s, const token_tile *next, int batch, int j,
                               head_tile *h) {
  const kvedge_view_side *side = &view->side[s];
  const int heads = view->num_kv_heads, num_blocks = h->tile->num_blocks[s];
  const int num_next = next->num_blocks[s], there = num_next * heads;
  const ptrdiff_t of_head = side->block_rows * side->head_stride;
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
  h->prefetches = next->num_tokens > 0;
  for (int s = 0; h->prefetches && s < SIDES; s++) blocks_to_prefetch(view, s, next, batch, j, h);
}

void kvedge_prefetch_scales(const kvedge_cache_view *view, const token_tile *next, int s, int kv_head, int num) {
  __asm__ volatile(""); /* GCC drops calls of a function that does nothing but prefetch */
  const ptrdiff_t token_stride = view->side[s].scale_token_stride;
  const int heads = view->num_kv_heads, tables = next->num_tokens == 0 ? 0 : next->in_order ? 1 : next->num_blocks[s];
  const int whole_tables = tables >= heads;
  if (token_stride == 0 || view->side[s].scales_in_rows) return;
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
  int num_tokens;
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

/* Rows, or scales, of a tile's tokens from `known` on, whose blocks are at `blocks`: `stride` bytes from one to the next,
 * row_bytes of all heads. (A view of one head has fewer of them than the stride.) */
static void fetch_blocks(const kvedge_view_side *side, int s, const token_tile *tile, const char *const *blocks,
                         ptrdiff_t stride, ptrdiff_t row_bytes, int known) {
  memory_range ranges[KVEDGE_TILE_BLOCKS];
  int num_ranges = 0;
  if (stride == 0) return; /* no scales */
  const int start = (int)kvedge_row_of(side->format, tile->first[s] + known);
  const int stop = (int)kvedge_num_rows(side->format, tile->first[s] + tile->num_tokens);
  for (int b = start / side->block_rows; b < tile->num_blocks[s]; b++) {
    const int first = b * side->block_rows, from = start > first ? start - first : 0;
    int rows = stop - first;
    if (rows > side->block_rows && !tile->in_order) rows = side->block_rows;
    ranges[num_ranges++] = (memory_range){blocks[b] + from * stride, (rows - from - 1) * stride + row_bytes};
    if (tile->in_order) break; /* the rest lies behind it */
  }
  fetch(ranges, num_ranges);
}

/* All of a call's first tile, for a start. In the order of memory, at memory's speed: by heads, as steps read it, it
 * was a fifth of that, and Zen 4 drops so many prefetches at once. */
void kvedge_fetch_rest(const kvedge_cache_view *view, const token_tile *tile, const token_tile *next) {
  const int known = prefetched.keys == tile->rows[KEYS][0] ? prefetched.num_tokens : 0;
  prefetched.keys = next->num_tokens > 0 ? next->rows[KEYS][0] : NULL;
  prefetched.num_tokens = tile->num_tokens; /* blocks of the next tile, one for each of this one's */
  for (int s = 0; s < SIDES && known < tile->num_tokens; s++) {
    const kvedge_view_side *side = &view->side[s];
    if (!side->scales_in_rows)
      fetch_blocks(side, s, tile, tile->scales[s], side->scale_token_stride,
                   view->num_kv_heads * side->scale_head_stride, known);
    fetch_blocks(side, s, tile, tile->rows[s], side->row_stride, view->num_kv_heads * side->head_stride, known);
  }
}
