/* Values that need not be read: options.tolerance, the share of the softmax mass that a query row may lose.
 *
 * After the softmax of a tile, the mass of each block of 16 tokens is compared with the sum so
 * far, of which the final sum is at least as much. A block that for every query row of its KV
 * head holds at most its share of the tolerance (16 tokens of all that are attended to) is
 * dropped: its values are neither read nor multiplied. All shares together are the tolerance, so
 * no row loses more, whatever the data. The sum counts what is dropped, so the log-sum-exp stays
 * as it is (docs/numerics.md).
 *
 * Values in runs are dropped as whole runs, where no 16 of their tokens matter, of tiles that begin with one.
 *
 * A decoded token waits for memory: kept blocks are prefetched and join a list of their KV head,
 * which is summed when it and the one after it are full, as if it were a tile. A prompt waits
 * for products: of its tiles the kept blocks are summed at once. Where little can be dropped,
 * decoding goes on as without tolerance and looks again now and then.
 */
#include <float.h>

#include "attention/tile.h"
#include "system/measuring.h"
#include "system/target.h"

enum {
  LIST_QUERIES = 8,   /* up to so many query rows of a KV head values are worth waiting for */
  LEAST_TOKENS = 512, /* in fewer, finding out costs as much as it saves */
  LEAST_ROW = 32,     /* bytes of a head's values: the rows of smaller ones share a line with other heads' */
  LONGEST_WAIT = 7,   /* tiles that are not looked at where little could be dropped, at most */
};

/* Kept blocks of a KV head. */
typedef struct {
  token_tile tile;
  float *p; /* (query rows, KVEDGE_TILE) */
} kept_list;

struct kvedge_skipping {
  int num_queries;       /* query rows of a KV head */
  float share;           /* 1 / what a block may hold of the sum */
  float *newest;         /* (num_kv_heads, query_rows) sums of the newest tokens, as maxima are now */
  int is_dense;          /* values of this tile are read as a whole */
  int wait, longest;     /* tiles until it is looked at whether they need be, and how many there were */
  int looked_at, kept;   /* blocks of this tile, of all KV heads */
  int64_t seen, dropped; /* of the slice, in blocks of 16 tokens */
  kept_list (*lists)[2]; /* (num_kv_heads): the one that is filled, and a full one that is waited for */
};

static int has_lists(const kvedge_attention *a) { return a->query_rows <= LIST_QUERIES; }

int kvedge_skip_wants_newest(const kvedge_attention *a) { return has_lists(a) && a->chunks_per_block > 1; }

static kvedge_skipping *lay_out(const kvedge_attention *a, char *base, size_t *used) {
  const int heads = has_lists(a) ? a->view.num_kv_heads : 0;
  kvedge_skipping *s = kvedge_take(base, used, sizeof *s);
  kept_list(*lists)[2] = kvedge_take(base, used, (size_t)heads * sizeof *lists);
  float *newest = NULL;
  if (kvedge_skip_wants_newest(a))
    newest = kvedge_take(base, used, (size_t)heads * (size_t)a->query_rows * sizeof *newest);
  for (int i = 0; i < 2 * heads; i++) {
    float *p = kvedge_take(base, used, (size_t)a->query_rows * KVEDGE_TILE * sizeof *p);
    if (base) lists[i / 2][i % 2] = (kept_list){.p = p};
  }
  if (base) *s = (kvedge_skipping){.lists = heads ? lists : NULL, .newest = newest};
  return s;
}

size_t kvedge_skipping_bytes(const kvedge_attention *a) {
  size_t used = 0;
  if (a->options.tolerance > 0.0f) lay_out(a, NULL, &used);
  return used;
}

static char *state_of(const kvedge_attention *a, int slot) { return a->skipping + (size_t)slot * a->skipping_bytes; }

static int pays(const kvedge_attention *a, int64_t tokens) {
  const kvedge_view_side *values = &a->view.side[VALUES];
  return tokens >= LEAST_TOKENS && (values->head_stride >= LEAST_ROW || values->head_stride == values->row_stride);
}

kvedge_skipping *kvedge_skip_start(const kvedge_attention *a, const kvedge_row_block *block, int slot) {
  size_t used = 0;
  if (!a->skipping_bytes) return NULL;
  kvedge_skipping *s = lay_out(a, state_of(a, slot), &used);
  const kvedge_attended attended = kvedge_attended_tokens(a, block);
  const int64_t tokens = attended.sinks + attended.stop - attended.first;
  if (!pays(a, tokens)) return NULL;
  const double share = (double)tokens / KVEDGE_BLOCK / (double)a->options.tolerance;
  s->share = share < FLT_MAX ? (float)share : FLT_MAX;
  s->num_queries = (int)block->count * a->heads_per_kv_head;
  return s;
}

void kvedge_skip_take_newest(const kvedge_attention *a, kvedge_skipping *s, kvedge_partial *partial) {
  const size_t states = (size_t)a->view.num_kv_heads * (size_t)a->query_rows;
  memcpy(s->newest, partial->sum, states * sizeof *partial->sum);
  memset(partial->sum, 0, states * sizeof *partial->sum);
}

/* ---- The process's counts ---- */

static atomic_llong num_seen, num_dropped;

void kvedge_skip_count(const kvedge_attention *a, int slot) {
  if (!a->skipping_bytes) return;
  const kvedge_skipping *s = (const kvedge_skipping *)state_of(a, slot);
  atomic_fetch_add_explicit(&num_seen, s->seen, memory_order_relaxed);
  atomic_fetch_add_explicit(&num_dropped, s->dropped, memory_order_relaxed);
}

void kvedge_tolerance_counts(int64_t *seen, int64_t *dropped) {
  *seen = atomic_load_explicit(&num_seen, memory_order_relaxed);
  *dropped = atomic_load_explicit(&num_dropped, memory_order_relaxed);
}

/* ---- What is kept ---- */

/* Shares of the tolerance that a block of values has: one for each 16 tokens. */
static int shares_of_block(const kvedge_attention *a) { return a->view.side[VALUES].block_tokens / KVEDGE_BLOCK; }

static uint32_t all_blocks(const token_tile *tile) { return ((uint32_t)1 << tile->num_blocks[VALUES]) - 1; }

/* The blocks of values of whose `shares` some are kept. A tile that begins within a run keeps all:
 * its shares do not begin where its blocks do. */
static uint32_t whole_blocks(uint32_t kept, int shares, const token_tile *tile) {
  uint32_t whole = 0;
  if (tile->first[VALUES]) return all_blocks(tile);
  for (int b = 0; b < tile->num_blocks[VALUES]; b++)
    if (kept >> b * shares & ((1u << shares) - 1)) whole |= 1u << b;
  return whole;
}

/* The blocks of a head tile that matter to some of its queries. Fewer than 16 tokens do: they have no share. */
static uint32_t blocks_to_keep(const kvedge_attention *a, const kvedge_skipping *s, const head_tile *h, const float *p,
                               const kvedge_partial *partial) {
  const float *sum = partial->sum + kvedge_index_of(a, h),
              *newest = s->newest ? s->newest + kvedge_index_of(a, h) : NULL;
  float factor[KVEDGE_QUERY_ROWS];
  const int whole = h->tile->num_tokens / KVEDGE_BLOCK;
  for (int i = 0; i < h->count; i++) {
    float least = sum[i]; /* of the final sum */
    if (newest && newest[i] > least) least = newest[i];
    factor[i] = least > 0.0f ? s->share / least : 0.0f; /* 0: it has seen nothing */
    if (!(factor[i] <= FLT_MAX)) factor[i] = FLT_MAX;
  }
  const uint32_t kept = a->kernels->rows->heavy_blocks(p, h->count, whole, factor) |
                        (h->tile->num_tokens > whole * KVEDGE_BLOCK ? 1u << whole : 0u);
  const int shares = shares_of_block(a);
  return shares == 1 ? kept : whole_blocks(kept, shares, h->tile);
}

/* Appends block b of a tile to `to`: where its values lie, and their probabilities. */
static void add_block(const kvedge_attention *a, const head_tile *h, int b, const float *p, token_tile *to,
                      float *to_p) {
  const int size = a->view.side[VALUES].block_tokens, at = to->num_blocks[VALUES]++;
  const int left = h->tile->num_tokens - b * size, num_tokens = left < size ? left : size;
  if (at == 0) to->token = h->tile->token;
  to->rows[VALUES][at] = h->tile->rows[VALUES][b];
  to->scales[VALUES][at] = h->tile->scales[VALUES][b];
  to->num_tokens += num_tokens;
  for (int i = 0; i < h->count; i++)
    memmove(to_p + i * KVEDGE_TILE + at * size, p + i * KVEDGE_TILE + b * size,
            (size_t)((num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK) * sizeof *p);
}

/* Accumulators to a new maximum. */
static void rescale(const kvedge_attention *a, const head_tile *h, const float *by, kvedge_partial *partial) {
  float *acc = partial->acc + kvedge_index_of(a, h) * (size_t)a->acc_stride;
  for (int i = 0; i < h->count; i++, acc += a->acc_stride)
    for (int d = 0; by[i] != 1.0f && d < a->view.side[VALUES].shape.dim; d++) acc[d] *= by[i];
}

static int is_raised(const head_tile *h, const float *by) {
  for (int i = 0; i < h->count; i++)
    if (by[i] != 1.0f) return 1;
  return 0;
}

static const float unchanged[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                   1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* ---- Prompts: what is kept of a tile is summed at once ---- */

static void sum_kept(const kvedge_attention *a, const head_tile *h, uint32_t kept, workspace *w,
                     kvedge_partial *partial) {
  float *p = w->scores + h->at * KVEDGE_TILE;
  const float *by = w->rescale + h->at;
  if (!kept) {
    rescale(a, h, by, partial);
    return;
  }
  if (kept == all_blocks(h->tile)) {
    kvedge_weighted_sum(a, h, p, by, w, partial);
    return;
  }
  token_tile tile = {.num_tokens = 0};
  head_tile own = *h;
  own.tile = &tile;
  for (int b = 0; b < h->tile->num_blocks[VALUES]; b++) {
    if (!(kept >> b & 1)) continue;
    own.next[VALUES][tile.num_blocks[VALUES]] = h->next[VALUES][b];
    add_block(a, h, b, p, &tile, p);
  }
  own.next_in_order = 0;
  w->scales[VALUES].count = 0;
  kvedge_weighted_sum(a, &own, p, by, w, partial);
  w->scales[VALUES].count = 0;
}

/* ---- Decoding: lists ---- */

static void sum_list(const kvedge_attention *a, const head_tile *h, kept_list *list, workspace *w,
                     kvedge_partial *partial) {
  if (list->tile.num_tokens == 0) return;
  const head_tile own = {.tile = &list->tile, .kv_head = h->kv_head, .count = h->count};
  w->scales[VALUES].count = 0;
  kvedge_weighted_sum(a, &own, list->p, unchanged, w, partial);
  w->scales[VALUES].count = 0;
  list->tile.num_tokens = list->tile.num_blocks[VALUES] = 0;
}

/* The older first, and then the one that was filled. */
static void sum_lists(const kvedge_attention *a, const head_tile *h, workspace *w, kvedge_partial *partial) {
  kept_list *lists = w->skipping->lists[h->kv_head];
  sum_list(a, h, &lists[1], w, partial);
  sum_list(a, h, &lists[0], w, partial);
}

/* Lines of some rows of a KV head. */
KVEDGE_INLINE void prefetch_rows(const char *row, int num_rows, ptrdiff_t stride, ptrdiff_t bytes) {
  for (int t = 0; t < num_rows; t++, row += stride)
    for (uintptr_t line = (uintptr_t)row & ~(uintptr_t)63; line < (uintptr_t)row + (uintptr_t)bytes; line += 64)
      __builtin_prefetch((const void *)line, 0, 2);
}

static void prefetch_block(const kvedge_view_side *values, const token_tile *tile, int b, int kv_head) {
  const char *rows = tile->rows[VALUES][b] + kv_head * values->head_stride;
  const ptrdiff_t scale_bytes = (KVEDGE_BLOCK - 1) * values->scale_token_stride + values->scale_head_stride;
  const char *scales = tile->scales[VALUES][b] + kv_head * values->scale_head_stride;
  prefetch_rows(rows, values->block_rows, values->row_stride, values->head_stride);
  for (ptrdiff_t at = 0; values->scale_head_stride && at < scale_bytes; at += 64) __builtin_prefetch(scales + at, 0, 2);
}

static void list_kept(const kvedge_attention *a, const head_tile *h, uint32_t kept, workspace *w,
                      kvedge_partial *partial) {
  const float *by = w->rescale + h->at;
  float *p = w->scores + h->at * KVEDGE_TILE;
  kept_list *lists = w->skipping->lists[h->kv_head];
  if (is_raised(h, by)) { /* lists hold probabilities of the maximum before */
    sum_lists(a, h, w, partial);
    rescale(a, h, by, partial);
  }
  const kvedge_view_side *values = &a->view.side[VALUES];
  if (h->tile->first[VALUES]) { /* within a run: as a whole */
    kvedge_weighted_sum(a, h, p, unchanged, w, partial);
    return;
  }
  for (int b = 0; b < h->tile->num_blocks[VALUES]; b++) {
    if (!(kept >> b & 1)) continue;
    const int held = lists[0].tile.num_tokens;
    if (held == KVEDGE_TILE || held % values->block_tokens) {
      sum_list(a, h, &lists[1], w, partial);
      const kept_list full = lists[0];
      lists[0] = lists[1], lists[1] = full;
    }
    prefetch_block(values, h->tile, b, h->kv_head);
    add_block(a, h, b, p, &lists[0].tile, lists[0].p);
  }
}

/* ---- A tile ---- */

int kvedge_skip_reads_values(const kvedge_skipping *s) { return s->is_dense || !s->lists; }

static void follow_maxima(float *sums, const float *by, int n) {
  for (int i = 0; i < n; i++) sums[i] *= by[i];
}

int kvedge_skip_heads(const kvedge_attention *a, const head_tile *heads, int num, workspace *w,
                      kvedge_partial *partial) {
  kvedge_skipping *s = w->skipping;
  const int num_blocks = heads->tile->num_blocks[VALUES], shares = shares_of_block(a);
  s->seen += num * num_blocks * shares;
  if (s->newest) follow_maxima(s->newest + kvedge_index_of(a, heads), w->rescale, num * heads->count);
  if (s->is_dense && s->wait > 0) return 0;
  for (int j = 0; j < num; j++) {
    const head_tile *h = &heads[j];
    const uint32_t kept = blocks_to_keep(a, s, h, w->scores + h->at * KVEDGE_TILE, partial);
    const int num_kept = __builtin_popcount(kept);
    s->looked_at += num_blocks, s->kept += num_kept;
    if (s->is_dense) continue;
    s->dropped += (num_blocks - num_kept) * shares;
    if (s->lists) list_kept(a, h, kept, w, partial);
    else sum_kept(a, h, kept, w, partial);
  }
  return !s->is_dense;
}

static void sum_all_lists(const kvedge_attention *a, workspace *w, kvedge_partial *partial) {
  for (int kv_head = 0; kv_head < a->view.num_kv_heads; kv_head++) {
    const head_tile h = {.kv_head = kv_head, .count = w->skipping->num_queries};
    sum_lists(a, &h, w, partial);
  }
}

void kvedge_skip_end_tile(const kvedge_attention *a, workspace *w, kvedge_partial *partial, int last) {
  kvedge_skipping *s = w->skipping;
  if (!s->lists) return;
  if (s->wait > 0) {
    s->wait--;
  } else {
    const int was_dense = s->is_dense;
    s->is_dense = 8 * s->kept > 5 * s->looked_at;
    if (!s->is_dense) s->longest = 0;
    else s->wait = s->longest = s->longest < LONGEST_WAIT ? 2 * s->longest + 1 : LONGEST_WAIT;
    if (s->is_dense && !was_dense) sum_all_lists(a, w, partial);
  }
  s->looked_at = s->kept = 0;
  if (last) sum_all_lists(a, w, partial);
}
