/* What lies ahead of a step: its share of the tile that follows, which kernels ask for as they go; and what nobody has
 * asked for, which is fetched.
 */
#include "attention/tile.h"

/* A head's share of the tile that follows, piece by piece: as many bytes as its own rows there. */
const rows_ahead *kvedge_share_of_head(const kvedge_cache_view *view, const tile_of_tokens *tile,
                                       const tile_of_tokens *following, int kv_head, rows_ahead *ahead) {
  ptrdiff_t row = view->head_stride;
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &following->pieces[i];
    if (i >= following->num_pieces) {
      ahead->keys[i] = ahead->values[i] = NULL;
      continue;
    }
    int num_tokens = tile->pieces[i].num_tokens < p->num_tokens ? tile->pieces[i].num_tokens : p->num_tokens;
    ptrdiff_t at = kv_head * num_tokens * row;
    ahead->keys[i] = p->rows.keys + at;
    ahead->values[i] = p->rows.values + at;
  }
  return ahead;
}

/* Likewise where a tile is worked on in blocks: one block after the other, and each as a whole, since pieces may lie
 * anywhere; where fewer follow, they are asked for again. The shares of a step's heads, kv_head and num - 1 more, are
 * made of runs of num blocks, of which each head has one: the j-th. */
const tile_blocks *kvedge_share_in_blocks(const kvedge_cache_view *view, int num_blocks, const tile_blocks *following,
                                          int kv_head, int num, int j, tile_blocks *share) {
  int heads = view->num_kv_heads, there = following->num_blocks * heads;
  for (int i = 0; i < num_blocks; i++) {
    int block = kv_head * num_blocks + i * num + j;
    if (block >= there) block %= there;
    ptrdiff_t at = block % heads * KVEDGE_BLOCK * view->head_stride;
    share->keys[i] = following->keys[block / heads] + at;
    share->values[i] = following->values[block / heads] + at;
  }
  share->in_order = following->in_order;
  return share;
}

/* The tile that this thread asked for last, and how many of its tokens. */
static _Thread_local struct {
  const char *keys;
  int num_tokens;
} asked_for;

void kvedge_remember_asking(const tile_of_tokens *tile, const tile_of_tokens *following, int in_blocks) {
  asked_for.keys = following->num_tokens > 0 ? following->pieces[0].rows.keys : NULL;
  asked_for.num_tokens = in_blocks ? tile->num_tokens : 0;
  for (int i = 0; i < tile->num_pieces && i < following->num_pieces && !in_blocks; i++) {
    int own = tile->pieces[i].num_tokens, theirs = following->pieces[i].num_tokens;
    asked_for.num_tokens += own < theirs ? own : theirs;
    if (own < theirs) break;
  }
}

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

/* All of a call's first tile, for a start. In the order of memory, at memory's speed: by heads, as steps read it, it
 * was a fifth of that, and so many lines asked for at once are forgotten (AMD). */
void kvedge_fetch_rest(const kvedge_cache_view *view, const tile_of_tokens *tile) {
  int known = asked_for.keys == tile->pieces[0].rows.keys ? asked_for.num_tokens : 0;
  if (known >= tile->num_tokens) return;
  memory_run keys[MAX_PIECES], values[MAX_PIECES], key_scales[MAX_PIECES], value_scales[MAX_PIECES];
  for (int i = 0; i < tile->num_pieces; i++) {
    const piece *p = &tile->pieces[i];
    const ptrdiff_t from = known > p->first ? known - p->first : 0, left = p->num_tokens - from;
    const ptrdiff_t row = from * view->token_stride, scale = from * view->scale_token_stride;
    const ptrdiff_t bytes = left * view->token_stride, scale_bytes = left * view->scale_token_stride;
    keys[i] = (memory_run){p->rows.keys + row, bytes};
    values[i] = (memory_run){p->rows.values + row, bytes};
    key_scales[i] = (memory_run){p->rows.key_scales + scale, scale_bytes};
    value_scales[i] = (memory_run){p->rows.value_scales + scale, scale_bytes};
  }
  const int scaled = view->num_groups > 0;
  if (scaled) fetch(key_scales, tile->num_pieces);
  fetch(keys, tile->num_pieces);
  if (scaled) fetch(value_scales, tile->num_pieces);
  fetch(values, tile->num_pieces);
}
