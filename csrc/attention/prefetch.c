/* What a step prefetches: its share of the next tile, which kernels prefetch as they go; and what nobody has prefetched,
 * which is fetched before the tile is worked on.
 */
#include "attention/tile.h"

/* The rows of the next tile, in the order of memory, are blocks of KVEDGE_BLOCK rows of one head each: (token blocks,
 * heads), or runs of one head. A head tile prefetches as many of them as it has blocks; where fewer follow, some are prefetched again. The
 * heads of a batch share runs of `batch` blocks, of which head `j` has the j-th, since its kernels prefetch whole runs. */
static void share_side(const kvedge_cache_view *view, int s, const token_tile *next, int batch, int j, head_tile *h) {
  const kvedge_view_side *side = &view->side[s];
  const int heads = view->num_kv_heads, num_blocks = kvedge_num_pieces(side, h->tile);
  const int num_next = kvedge_num_pieces(side, next), there = num_next * heads;
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
    if (next->num_tokens > 0) share_side(view, s, next, batch, j, h);
  }
}

void kvedge_prefetch_scales(const kvedge_cache_view *view, const token_tile *next, int s, int kv_head, int num) {
  __asm__ volatile(""); /* GCC drops calls of a function that does nothing but prefetch */
  const ptrdiff_t token_stride = view->side[s].scale_token_stride;
  const int heads = view->num_kv_heads, runs = next->num_tokens == 0 ? 0 : next->in_order ? 1 : next->num_blocks;
  const int whole_runs = runs >= heads;
  if (token_stride == 0) return;
  int first = 0, stop = runs;
  if (whole_runs) first = stop * kv_head / heads, stop = stop * (kv_head + num) / heads;
  for (int i = first; i < stop; i++) {
    const char *scales = next->scales[s][i];
    const int lines = (int)(((next->in_order ? next->num_tokens : KVEDGE_BLOCK) * token_stride + 63) / 64);
    const int first_line = whole_runs ? 0 : (int)((int64_t)lines * kv_head / heads);
    const int stop_line = whole_runs ? lines : (int)((int64_t)lines * (kv_head + num) / heads);
    for (int line = first_line; line < stop_line; line++) __builtin_prefetch(scales + 64 * line, 0, 2);
  }
}

/* The tile that this thread prefetched last, and how many of its tokens. */
static _Thread_local struct {
  const char *keys;
  int num_tokens[SIDES];
} prefetched;

/* A run of memory; bytes <= 0: nothing. */
typedef struct {
  const char *start;
  ptrdiff_t bytes;
} memory_run;

/* Reads something in every line of all runs: of one in the order of memory, of several side by side, since the
 * processor needs a while to see where each one leads. */
static void fetch(const memory_run *runs, int num_runs) {
  enum { LINE = 64 };
  ptrdiff_t longest = 0;
  for (int i = 0; i < num_runs; i++) longest = runs[i].bytes > longest ? runs[i].bytes : longest;
  for (ptrdiff_t at = 0; at < longest; at += LINE)
    for (int i = 0; i < num_runs; i++)
      if (at < runs[i].bytes) (void)*(const volatile char *)(runs[i].start + at);
  for (int i = 0; i < num_runs; i++) /* what is not aligned may end in one more */
    if (runs[i].bytes > 0) (void)*(const volatile char *)(runs[i].start + runs[i].bytes - 1);
}

/* Rows, or scales, of a tile's tokens from `known` on, whose blocks are at `blocks`; of a token, row_bytes of all heads.
 * (A view of one head has fewer of them than a token's stride.) */
static void fetch_blocks(const token_tile *tile, const char *const *blocks, ptrdiff_t token_stride, ptrdiff_t row_bytes,
                         int known) {
  memory_run runs[KVEDGE_TILE_BLOCKS];
  int num_runs = 0;
  if (token_stride == 0) return; /* no scales */
  for (int b = known / KVEDGE_BLOCK; b < tile->num_blocks; b++) {
    const int first = b * KVEDGE_BLOCK, from = known > first ? known - first : 0;
    int tokens = tile->num_tokens - first;
    if (tokens > KVEDGE_BLOCK && !tile->in_order) tokens = KVEDGE_BLOCK;
    runs[num_runs++] = (memory_run){blocks[b] + from * token_stride, (tokens - from - 1) * token_stride + row_bytes};
    if (tile->in_order) break; /* this run has them all */
  }
  fetch(runs, num_runs);
}

/* Runs of a tile, but for those that hold the `known` first of its tokens. */
static void fetch_runs(const kvedge_cache_view *view, const token_tile *tile, int s, int known) {
  const ptrdiff_t bytes = view->num_kv_heads * view->side[s].head_stride;
  const int num_runs = kvedge_num_pieces(&view->side[s], tile), from = known / KVEDGE_RUN;
  memory_run runs[KVEDGE_TILE_BLOCKS];
  for (int r = from; r < num_runs; r++) runs[r - from] = (memory_run){tile->rows[s][r], bytes};
  fetch(runs, num_runs - from);
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
