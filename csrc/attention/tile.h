/* What the files of a slice share: its tiles (slice.c), what is prefetched (prefetch.c), a step over one (step.c) and
 * its products (products.c), masks and other options on logits (logits.c). */
#ifndef KVEDGE_TILE_H
#define KVEDGE_TILE_H

#include "attention/internal.h"

/* Tokens token..token+num_tokens-1 of all heads, as a table of blocks of keys, and one of values. */
typedef struct {
  int64_t token;
  int num_tokens; /* 0: there is none */
  int num_blocks[SIDES];
  int first[SIDES];                              /* of runs: where in the first one the tile begins; else 0 */
  int in_order;                                  /* the blocks lie side by side */
  const char *rows[SIDES][KVEDGE_TILE_BLOCKS];   /* of KV head 0 of the view; the others' lie at an offset */
  const char *scales[SIDES][KVEDGE_TILE_BLOCKS]; /* their scales */
} token_tile;

/* Room for a tile's scales: a tile, and a line so that columns do not lie a power of two apart. */
enum { SCALES = KVEDGE_TILE + KVEDGE_BLOCK };

/* Scales of some columns of a tile, column by column. A column is one group of one head; in the cache a token's
 * scales mostly lie side by side, so several columns at once cost little more than one. */
typedef struct {
  int first, count;                                /* columns; count 0: none */
  _Alignas(64) float scale[KVEDGE_GROUPS][SCALES]; /* 0 after the last token of a block */
} scale_columns;

/* What a thread works in: too large for the stacks that threads may have. */
struct kvedge_workspace {
  kvedge_queries queries;                                     /* of the row block */
  _Alignas(64) float scores[KVEDGE_QUERY_ROWS * KVEDGE_TILE]; /* (query rows, tile): scores, then probabilities */
  _Alignas(64) float rescale[KVEDGE_QUERY_ROWS];
  scale_columns scales[SIDES];               /* of the tile */
  _Alignas(64) char scratch[KVEDGE_SCRATCH]; /* of the cells; where rows are decoded, first the block */
};
typedef kvedge_workspace workspace;

/* A head tile: one KV head of a tile, and the query rows that meet it: first..first+count-1 of those of the KV head. */
typedef struct {
  const token_tile *tile;
  const kvedge_row_block *block;
  int kv_head, first, count;
  int at; /* of their rows in the workspace */
  const kvedge_queries *queries;
  int masking;                                 /* as kvedge_needs_masking() */
  const char *next[SIDES][KVEDGE_TILE_BLOCKS]; /* blocks of the next tile to prefetch */
  int prefetches, next_in_order;               /* 0: nothing is prefetched */
} head_tile;

/* Position of the first of its queries in what is prepared of a row block, and in partial results. */
static inline size_t kvedge_index_of(const kvedge_attention *a, const head_tile *h) {
  return kvedge_query_index(a, h->kv_head) + (size_t)h->first;
}

/* ---- prefetch.c ---- */

/* What head tile j of a batch (batch 1: there is none) prefetches of the next tile: a block for each of its own. */
void kvedge_share_next(const kvedge_cache_view *view, const token_tile *next, int batch, int j, head_tile *h);
/* The scales of the next tile that a step of `num` KV heads from kv_head on prefetches: some of
 * its blocks, or where these are few some of each one's lines, in the order of memory. (Zen 4
 * drops prefetches when there are too many at once.) */
void kvedge_prefetch_scales(const kvedge_cache_view *view, const token_tile *next, int s, int kv_head, int num);
/* Before the steps of a tile: what this thread has not prefetched of it is brought into the cache. The steps prefetch
 * the next one, as far as that goes. */
void kvedge_fetch_rest(const kvedge_cache_view *view, const token_tile *tile, const token_tile *next);

/* ---- products.c ---- */

/* Scores of a head tile as they come from the kernels. */
void kvedge_head_scores(const kvedge_attention *a, const head_tile *h, workspace *w);
/* acc = acc * rescale + p . values of a head tile; p (count, KVEDGE_TILE) may be changed. */
void kvedge_weighted_sum(const kvedge_attention *a, const head_tile *h, float *p, const float *rescale, workspace *w,
                         kvedge_partial *partial);
/* The same for a head batch. Of its scores 0: nothing was done, since the queries need different numbers of planes. */
int kvedge_scores_of_batch(const kvedge_attention *a, const head_tile *heads, workspace *w);
void kvedge_weighted_sum_of_batch(const kvedge_attention *a, const head_tile *heads, workspace *w,
                                  kvedge_partial *partial);

/* ---- step.c ---- */

/* One tile of `num` KV heads side by side; `heads` has of each what is the same for all its queries. The next tile is
 * prefetched meanwhile. */
void kvedge_step(const kvedge_attention *a, head_tile *heads, int num, const token_tile *next, kvedge_partial *partial,
                 workspace *w);

/* ---- logits.c ---- */

/* What causality and the window let a row attend to in a tile: tokens 0..sinks-1 and first..stop-1 of it. */
typedef struct {
  int sinks, first, stop;
} mask_range;

mask_range kvedge_mask_range(const kvedge_attention *a, int64_t row, int64_t token, int num_tokens);
/* Is any token of the tile hidden from any row of the block, or its logit changed? */
int kvedge_needs_masking(const kvedge_attention *a, const kvedge_row_block *block, const token_tile *tile);
/* A query row's scores become logits: those of the query at `index`, see kvedge_index_of(). */
void kvedge_to_logits(const kvedge_attention *a, const kvedge_queries *q, size_t index, int num_tokens, float *row);
/* Of a tile's values, those that masks hide from one query row's head become 0. */
void kvedge_clear_hidden(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                         float *values);
/* ALiBi and masks on one query row's logits of a tile that starts at `token`. */
void kvedge_apply_options(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                          float *logits);

#endif
