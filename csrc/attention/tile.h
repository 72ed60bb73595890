/* What the files of a slice share: its tiles (tile.c), what lies ahead (ahead.c), a step over one (step.c), options
 * (options.c). */
#ifndef KVEDGE_TILE_H
#define KVEDGE_TILE_H

#include "attention/attention.h"

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

/* What a step asks for: its head's share of the tile that follows, in the order of memory. Pieces that are NULL ask
 * for nothing. */
typedef struct {
  const char *keys[MAX_PIECES], *values[MAX_PIECES];
} rows_ahead;

/* Rows of a tile by blocks, of one piece or of several. */
typedef struct {
  const int8_t *keys[KVEDGE_TILE_BLOCKS], *values[KVEDGE_TILE_BLOCKS];
  int num_blocks;
  int in_order; /* they lie side by side */
} tile_blocks;

/* Room for a tile's scales: a tile, and a line so that columns do not lie a power of two apart. */
enum { SCALES = KVEDGE_TILE + KVEDGE_BLOCK };

/* Scales of some columns of a tile, column by column. A column is one group of one head; in the cache a token's
 * scales lie side by side, so several columns at once cost little more than one. */
typedef struct {
  int first; /* column; -KVEDGE_SCALE_COLUMNS: none */
  _Alignas(64) float scale[KVEDGE_SCALE_COLUMNS][SCALES]; /* 0 after the last token of a block */
} scale_columns;

typedef struct {
  kvedge_queries queries; /* of the row block */
  _Alignas(64) float scores[KVEDGE_STACK * KVEDGE_TILE]; /* (stack, tile): scores, then probabilities */
  _Alignas(64) float alpha[KVEDGE_STACK];
  scale_columns key_scales, value_scales; /* of the tile */
} workspace;

/* Which stacked queries of a row block meet which head's part of a tile. */
typedef struct {
  int64_t block;
  int kv_head, first, count; /* stack positions first..first+count-1 */
  int at;                    /* of their rows in the workspace */
  const kvedge_queries *queries;
  const tile_of_tokens *tile;
  int masking;               /* as kvedge_needs_masking() */
  const rows_ahead *ahead;   /* what is asked for meanwhile; NULL: nothing */
  /* Where pieces are worked on at once: rows of KV head 0, and what is asked for. NULL: one by one, and nothing. */
  const tile_blocks *blocks, *next_blocks;
} encounter;

/* Position of the first of its queries in what is prepared of a row block, and in partial results. */
static inline size_t kvedge_index_of(const kvedge_attention *a, const encounter *e) {
  return kvedge_query_index(a, e->kv_head) + (size_t)e->first;
}

/* ---- ahead.c ---- */

const rows_ahead *kvedge_share_of_head(const kvedge_cache_view *view, const tile_of_tokens *tile,
                                       const tile_of_tokens *following, int kv_head, rows_ahead *ahead);
/* Where a tile is worked on in blocks, of which it has `num_blocks`. */
const tile_blocks *kvedge_share_in_blocks(const kvedge_cache_view *view, int num_blocks, const tile_blocks *following,
                                          int kv_head, int num, int j, tile_blocks *share);
/* After the steps of a tile: this thread has asked for the one that follows, as far as that went. */
void kvedge_remember_asking(const tile_of_tokens *tile, const tile_of_tokens *following, int in_blocks);
/* Before the steps of a tile: what this thread has not asked for of it is brought into the cache. */
void kvedge_fetch_rest(const kvedge_cache_view *view, const tile_of_tokens *tile);

/* ---- step.c ---- */

/* How many KV heads a step takes, as far as there are as many left. */
int kvedge_heads_together(const kvedge_attention *a);
/* Are there kernels for this many heads at once? They want tiles in blocks. */
int kvedge_has_heads_kernels(const kvedge_attention *a, int num_kv_heads);
/* One tile of `num_kv_heads` heads side by side; `heads`: of each what is the same for all its queries. Rows and
 * scales of the tile that follows are asked for meanwhile. */
void kvedge_step(const kvedge_attention *a, encounter *heads, int num_kv_heads, const tile_of_tokens *following,
                 kvedge_partial *partial, workspace *w);
/* Scores of one head's part of a tile as they come from the kernels. */
void kvedge_tile_scores(const kvedge_attention *a, const encounter *e, workspace *w);

/* ---- options.c ---- */

/* What causality and the window let a row see of a tile: tokens 0..sinks-1 and first..stop-1 of it. */
typedef struct {
  int sinks, first, stop;
} sight;

sight kvedge_sight_of(const kvedge_attention *a, int64_t row, int64_t token, int num_tokens);
/* Does any row of the block not see the whole tile? */
int kvedge_needs_masking(const kvedge_attention *a, int64_t block, const tile_of_tokens *tile);
/* A query row's scores become logits: those of the query at `index`, see kvedge_index_of(). */
void kvedge_to_logits(const kvedge_attention *a, const kvedge_queries *q, size_t index, int num_tokens, float *row);
/* Of a tile's numbers, those that masks hide from one query row's head become 0. */
void kvedge_clear_hidden(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                         float *numbers);
/* ALiBi and masks on one query row's logits of a tile that starts at `token`. */
void kvedge_apply_options(const kvedge_attention *a, int64_t row, int head, int64_t token, int num_tokens,
                          float *logits);

#endif
