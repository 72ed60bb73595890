/* What one call of attention is made of; private to csrc/. README.md has the loop.
 *
 *   attention.c a call checked, its slices collected, its logits; rows that need factors of their own
 *   slices.c    the slices of kvedge.h, for threads of the caller's
 *   call.c      calls on threads of our own: kvedge_attend, several layers and parts of them
 *   run.c       plans and runs their requests
 *   parts.c     calls whose tokens lie in several layers; their results merged
 *   lists.c     calls whose rows read lists of tokens
 *   rows.c      keys and values in memory of others
 *   view.c      what attention sees of a cache, and which tokens query rows attend to
 *   plan.c      shapes, kernels and memory of a call
 *   query.c     query rows into the form that the kernels read
 *   slice.c     one slice: its tiles, in the order of memory
 *   step.c      one tile of a KV head, or of several: scores, online softmax, weighted sums
 *   products.c  the scores and weighted sums of a step, by the kernels that serve the call
 *   prefetch.c  what a step prefetches of the next tile, and what was not prefetched in time
 *   logits.c    options on logits, masks and windows
 *   merge.c     partial results into one, and that into the output
 *   range.c     factors that keep huge and tiny rows within float's range
 */
#ifndef KVEDGE_ATTENTION_INTERNAL_H
#define KVEDGE_ATTENTION_INTERNAL_H

#include <string.h>

#include "formats/array.h"
#include "store/layer_struct.h"
#include "system/bits.h"
#include "system/dispatch.h"

enum { KEYS, VALUES, SIDES };

/* Consecutive tokens that lie together. */
typedef struct {
  const char *rows[SIDES];   /* of its first token, KV head 0 of the layer */
  const char *scales[SIDES]; /* their scales; not read for formats without */
  int64_t num_tokens;
} kvedge_segment;

/* Keys, or values, as attention sees them; strides in bytes. */
typedef struct {
  const kvedge_format_info *format;
  kvedge_row_shape shape;
  int block_tokens;                  /* of a tile's block: KVEDGE_BLOCK, or those of a run */
  int block_rows;                    /* stored rows that hold them: as many, or one */
  ptrdiff_t row_stride, head_stride; /* from a stored row to the next of the head, and to that of the next head */
  ptrdiff_t token_bytes;             /* stored bytes of a token, all heads; of runs rounded down */
  ptrdiff_t group_stride;            /* from a group of a row to the next */
  int scales_in_rows;                /* a group's scale lies before its codes: strides of scales are those of rows */
  ptrdiff_t scale_token_stride, scale_head_stride, scale_group_stride;
  ptrdiff_t first_row, first_scale; /* from a segment's start to KV head 0 of the view */
  int first;                        /* of runs: where in the first run of the first segment token 0 lies; else 0 */
  float bound;                      /* as in kvedge_layer */
} kvedge_view_side;

/* Scales lie in the rows, whose strides are known. */
static inline void kvedge_find_scales_in_rows(kvedge_view_side *side) {
  side->scales_in_rows = 1;
  side->scale_token_stride = side->row_stride, side->scale_head_stride = side->head_stride;
  side->scale_group_stride = side->group_stride = side->format->group_bytes;
}

/* Any cache, as attention sees it: segments of equal strides. */
typedef struct {
  kvedge_view_side side[SIDES];
  int num_kv_heads;
  const float *key_offset; /* (num_kv_heads, head_dim) or NULL */
  const float *key_scale;  /* (num_kv_heads, head_dim) or NULL */
  int values_rotated;      /* channels of values that are rotated together, or 0 */
  int64_t len;             /* tokens in all segments */
  int num_segments;        /* of runs each begins with one, and ends with one unless it is the last */
  const kvedge_segment *segments;
  int gathers; /* slices gather the rows of segments tile by tile; strides of sides are those of gathered rows */
  ptrdiff_t from_row_stride[SIDES], from_scale_stride[SIDES]; /* with gathers: of the rows where they lie */
  int bounds_unknown; /* those of the sides are guesses: rows that they do not hold for are attended to again */
} kvedge_cache_view;

/* Prepared queries of a query tile, each array in the order (KV head, query row, ...). */
typedef struct {
  float *values;     /* (.., num_groups, group_pad)  for cells without encode_query */
  int8_t *quantized; /* (.., num_groups, group_pad * KVEDGE_QUANTIZED_BYTES)  for cells with encode_query */
  float *scales;     /* (.., num_groups)                 with encode_query */
  int32_t *offsets;  /* (.., num_groups, 4)              with encode_query */
  float *error;      /* (..) quantization error of a logit with two planes, per unit of key scale, with
                      * encode_query; of runs as kvedge_query has it */
  float *sums; /* (.., num_groups) of a group's channels, normalised; where blocks of keys have minima, else NULL */
  float *log2_scale;                 /* (..) score differences times this are powers of two */
  double *logit_factor, *logit_bias; /* (..) */
} kvedge_queries;

/* Rows of a prompt are worked on in query tiles (row blocks). The rows of one and the query heads of a KV head are
 * together the query rows of that KV head: index = row in the tile * heads_per_kv_head + head. */
typedef struct {
  const kvedge_kernels *kernels;
  kvedge_cache_view view;
  kvedge_segment *segments; /* what view.segments points to: a copy that lives with the call */
  kvedge_attention_options options;

  int64_t num_rows;
  int64_t first_position; /* of row 0, as a token */
  int num_heads, heads_per_kv_head;
  int rows_per_block, query_rows; /* query_rows: those of a KV head, rows_per_block * heads_per_kv_head */
  int num_row_blocks, chunks_per_block, most_chunks; /* most_chunks: it does not fall as tokens are added */
  int heads_per_slice; /* KV heads: all, or for several threads some, with the same results to the bit */
  int tile;            /* tokens, a multiple of 16 up to KVEDGE_TILE */
  size_t gather_bytes; /* of a thread's room for gathered rows, behind its workspace */

  /* Scores are kept divided by a factor so that nothing overflows: logit = score * logit_factor +
   * logit_bias. If an option needs true logits (real_logits), scores are turned into them at once. */
  int real_logits;
  float factor[SIDES]; /* powers of two that all scales are multiplied by */
  int is_refit;        /* one row of one head, with factors of what it sees: see attention.c */

  kvedge_array query; /* (num_rows, num_heads, head_dim) */
  float *query_copy;  /* the same, unless query_stays where it is until all slices have run and been collected */
  int query_stays;
  float *alibi_slopes; /* (num_heads) what options.alibi_slopes points to: a copy that lives with the call */
  char *queries;       /* (slots or row blocks, query_bytes), see kvedge_queries_of() */
  size_t query_bytes;
  int planes[2];  /* of queries (KEYS) and probabilities (VALUES): 1 to 3, or 0 for what each tile needs */
  int num_groups; /* of a query: those of the keys' scales, or 1 */
  int group_size; /* channels of each */
  int group_pad;  /* the same, rounded up to KVEDGE_QUERY_PAD */

  /* Which kernels serve the call. */
  const kvedge_cell *cells[SIDES];
  int takes_groups[SIDES]; /* all groups of a row by one kernel call */
  int decodes[SIDES]; /* the path has none for the format: rows are decoded, block by block, for those of float32 */
  int heads_per_step; /* KV heads whose tiles are worked on together */
  int batches_heads;  /* by kernels for as many heads at once */

  /* Partial results, one per slot and one total: maximum and sum (num_kv_heads, query_rows), accumulator
   * (num_kv_heads, query_rows, acc_stride). */
  int num_slots;
  ptrdiff_t acc_stride; /* channels of a value rounded up to 16 floats */
  size_t partial_floats;
  float *partials; /* (num_slots + 1, partial_floats), the total last */
  char *refit;     /* (num_refits, refit_bytes) room for one row of one head, see attention.c */
  size_t refit_bytes;
  int num_refits;    /* as many threads collect slices at once */
  int has_workspace; /* 0: threads that run its slices have one each */
  struct kvedge_workspace *workspace;

  kvedge_array out; /* (num_rows, num_heads, channels of a value) */
  float *lse;       /* (num_rows, num_heads) or NULL */
  double *log_sums; /* the same in double, where results of several parts are merged; or NULL */
} kvedge_attention;

typedef struct {
  float *max, *sum; /* (num_kv_heads, query_rows) */
  float *acc;       /* (num_kv_heads, query_rows, acc_stride) */
} kvedge_partial;

static inline size_t kvedge_partial_floats(const kvedge_attention *a) {
  size_t states = ((size_t)a->view.num_kv_heads * (size_t)a->query_rows + 15) / 16 * 16;
  return states * (2 + (size_t)a->acc_stride);
}

static inline kvedge_partial kvedge_partial_at(const kvedge_attention *a, int slot) {
  float *base = a->partials + (size_t)slot * a->partial_floats;
  size_t n = (size_t)a->view.num_kv_heads * (size_t)a->query_rows;
  size_t padded = (n + 15) / 16 * 16;
  return (kvedge_partial){.max = base, .sum = base + padded, .acc = base + 2 * padded};
}

/* 1: slices prepare their queries in their own slots soon before they are used; 0: those of all row blocks are prepared
 * beforehand, since several slices, of all heads, use the same. */
static inline int kvedge_slices_prepare(const kvedge_attention *a) {
  return a->chunks_per_block == 1 || a->heads_per_slice < a->view.num_kv_heads;
}

/* Query rows first..first+count-1 of a call: those of row block `index`, or the rest of them. */
typedef struct {
  int64_t index, first, count;
} kvedge_row_block;

static inline kvedge_row_block kvedge_row_block_of(const kvedge_attention *a, int64_t index) {
  const int64_t first = index * a->rows_per_block, left = a->num_rows - first;
  return (kvedge_row_block){index, first, left < a->rows_per_block ? left : a->rows_per_block};
}

/* What slice `index` of a call works on: a row block, a chunk of its tokens, and some KV heads. Slices of neighbouring
 * heads are neighbours, then those of chunks. */
typedef struct {
  kvedge_row_block block;
  int chunk;
  int kv_head, num_kv_heads;
} kvedge_slice_place;

static inline int kvedge_head_parts(const kvedge_attention *a) {
  return (a->view.num_kv_heads + a->heads_per_slice - 1) / a->heads_per_slice;
}

static inline int kvedge_num_slices(const kvedge_attention *a) {
  return a->num_row_blocks * a->chunks_per_block * kvedge_head_parts(a);
}

static inline kvedge_slice_place kvedge_place_of(const kvedge_attention *a, int index) {
  const int parts = kvedge_head_parts(a), chunks = index / parts, first = index % parts * a->heads_per_slice;
  const int left = a->view.num_kv_heads - first;
  return (kvedge_slice_place){.block = kvedge_row_block_of(a, chunks / a->chunks_per_block),
                              .chunk = chunks % a->chunks_per_block,
                              .kv_head = first,
                              .num_kv_heads = left < a->heads_per_slice ? left : a->heads_per_slice};
}

/* Position of a KV head's first query in what is prepared of a row block, and in partial results. */
static inline size_t kvedge_query_index(const kvedge_attention *a, int kv_head) {
  return (size_t)kv_head * (size_t)a->query_rows;
}

/* The tokens that some row of a row block sees: 0..sinks-1 and first..stop-1, sinks <= first. */
typedef struct {
  int64_t sinks, first, stop;
} kvedge_attended;

kvedge_attended kvedge_attended_tokens(const kvedge_attention *a, const kvedge_row_block *block);

/* The tokens of a layer that a call reads, by options' num_tokens and first_row (NULL: all); what the layer holds is
 * read here, once per call. No tokens: the layer does not hold those of the options. */
kvedge_cache_view kvedge_layer_view(const kvedge_layer *layer, const kvedge_attention_options *options,
                                    kvedge_segment *segment);

/* The tokens of a view from `start` on; `segments` are those of the view. */
void kvedge_cut_view(kvedge_cache_view *view, kvedge_segment *segments, int64_t start);

/* Rows first_row..first_row+num_tokens-1 of blocks of a pool, at least one of them, as a view;
 * `segments` has room for one for each of their blocks. 0: a block is not in the pool. */
int kvedge_view_blocks(const kvedge_layer *pool, int64_t block_size, const int32_t *blocks, int64_t first_row,
                       int64_t num_tokens, kvedge_segment *segments, kvedge_cache_view *view);
/* Blocks that these rows lie in, at most. */
static inline int64_t kvedge_blocks_of_rows(int64_t block_size, int64_t num_tokens) {
  return num_tokens / block_size + 2;
}

/* Query rows and what they attend to. */
typedef struct {
  kvedge_cache_view view; /* from options->start on */
  int num_heads;
  int64_t num_rows;
  int64_t first_position;  /* of row 0, as a token of the view; it may lie before or behind all of them */
  kvedge_array query, out; /* (num_rows, num_heads, channels); query.data NULL: only sizes are planned */
  float *lse;
  double *log_sums; /* or NULL */
  const kvedge_attention_options *options;
  const kvedge_rotation *turns; /* [num_turns], that the query is still to get */
  int num_turns;
} kvedge_request;

/* The request of a call on one layer with dense arrays; its view is kvedge_request_layer's. */
static inline kvedge_request kvedge_dense_request(const kvedge_layer *layer, const float *query, int64_t num_rows,
                                                  int num_heads, const kvedge_attention_options *options, float *out,
                                                  float *lse) {
  return (kvedge_request){.num_heads = num_heads,
                          .num_rows = num_rows,
                          .query = kvedge_dense_array(query, num_heads, layer->keys.shape.dim),
                          .out = kvedge_dense_array(out, num_heads, layer->values.shape.dim),
                          .lse = lse,
                          .options = options};
}

/* Is something added to the logits, or hidden by a mask, that the caller's memory has? */
static inline int kvedge_has_bias(const kvedge_attention_options *o) { return o->bias || o->half_bias; }
static inline int kvedge_has_mask(const kvedge_attention_options *o) { return o->mask || kvedge_has_bias(o); }

/* Moves the mask and the bias by heads, rows and tokens. */
static inline void kvedge_move_masks(kvedge_attention_options *o, int64_t head, int64_t row, int64_t token) {
  if (o->mask) o->mask += head * o->mask_strides[0] + row * o->mask_strides[1] + token * o->mask_strides[2];
  const int64_t bias = head * o->bias_strides[0] + row * o->bias_strides[1] + token * o->bias_strides[2];
  if (o->bias) o->bias += bias;
  if (o->half_bias) o->half_bias += bias;
}

/* Lets a call look at query heads from `head` on as its first ones; their KV heads are the view's to move. */
static inline void kvedge_move_heads(kvedge_attention_options *o, int head) {
  if (o->sink_logits) o->sink_logits += head;
  if (o->alibi_slopes) o->alibi_slopes += head;
  if (o->bias_factors) o->bias_factors += head;
  kvedge_move_masks(o, head, 0, 0);
}

/* Lets a view begin with KV head `kv_head`. */
static inline void kvedge_move_kv_heads(kvedge_cache_view *view, int kv_head) {
  for (int s = 0; s < SIDES; s++) {
    view->side[s].first_row += kv_head * view->side[s].head_stride;
    view->side[s].first_scale += kv_head * view->side[s].scale_head_stride;
  }
  const ptrdiff_t channel = (ptrdiff_t)kv_head * view->side[KEYS].shape.dim;
  if (view->key_offset) view->key_offset += channel;
  if (view->key_scale) view->key_scale += channel;
}

/* attention.c: checks a request whose view has all tokens yet, also those before options->start. */
kvedge_status kvedge_request_check(const kvedge_request *r);
/* Lets a request, which has the rest, attend to a layer: its view, checked. `segment` is the
 * view's. Sizes may be those of more tokens than the layer has, options->num_tokens up to its
 * capacity. */
kvedge_status kvedge_request_layer(kvedge_request *r, const kvedge_layer *layer, kvedge_segment *segment);

enum { KVEDGE_MOST_JOINED = 8 }; /* calls with one result */

/* rows.c: requests that rows in memory of others become: one, or where heads do not lie side by side one for each KV head; 0:
 * they are not valid. And a request's view of them, checked; segments NULL: only sizes are
 * planned; num_tokens are those of all calls that join. */
int kvedge_requests_of_rows(const kvedge_rows_cache *rows, int num_heads);
kvedge_status kvedge_request_rows(kvedge_request *r, const kvedge_rows_cache *rows, int64_t num_tokens,
                                  kvedge_segment *segments);

/* plan.c: plans rows row..row+num_rows-1 of a checked request; lays a plan out from `base` on
 * (NULL: only counts its bytes, which it returns); sets it up in as many: arrays, segments,
 * queries. */
void kvedge_attention_plan(kvedge_attention *a, const kvedge_request *r, int64_t row, int64_t num_rows);
/* Microseconds that a planned call takes one thread, about. */
double kvedge_attention_us(const kvedge_attention *a);
/* Cuts the slices of plans, which take `us` microseconds together, by KV heads for several threads; and the most slices
 * that a plan has then, with as many tokens or more. */
void kvedge_cut_heads(kvedge_attention *planned, int num_planned, double us, int num_threads);
int kvedge_most_slices(const kvedge_attention *a, int num_threads);
size_t kvedge_attention_lay_out(kvedge_attention *a, char *base, int num_slots);
kvedge_attention *kvedge_attention_set_up(const kvedge_attention *planned, void *memory, int num_slots);

/* run.c: plans and runs checked requests, the work of several shared out over the threads together. */
kvedge_status kvedge_run_requests(const kvedge_request *requests, int num_requests, int num_threads);

/* query.c: bytes of a row block's prepared queries; prepares those of all row blocks, unless slices do; those of a
 * slice, which prepares those of its heads in its slot if slices do; and the same once they are prepared. */
size_t kvedge_query_bytes(const kvedge_attention *a);
void kvedge_prepare_queries(const kvedge_attention *a);
kvedge_queries kvedge_queries_for(const kvedge_attention *a, const kvedge_slice_place *place, int slot);
kvedge_queries kvedge_queries_of(const kvedge_attention *a, int64_t block, int slot);

/* range.c: sets the factors of a call whose arrays are set, from what it sees. */
void kvedge_fit_factors(kvedge_attention *a);
/* A power of two that brings a bound near 1. */
float kvedge_normalizing_factor(float bound);
/* Where a walk over the tokens of a view stands. */
typedef struct {
  const kvedge_cache_view *view;
  int segment;
  int64_t start; /* first token of the segment */
} kvedge_row_cursor;

/* The bound of a token's rows of `num_heads` heads. */
float kvedge_bound_of_rows(kvedge_row_cursor *c, int s, int64_t token, int kv_head, int num_heads);

/* merge.c: adds a slice's result to the total, and writes out with the last one of a row block. */
void kvedge_merge_slice(const kvedge_attention *a, int slice, int slot);

/* A slice of a call; attention NULL: there is none. */
typedef struct {
  const kvedge_attention *attention; /* as the next slice it need be planned only, not set up */
  int slice;
} kvedge_slice;

/* Working memory of a thread that runs slices, 64-byte aligned (tile.h), and its bytes. */
typedef struct kvedge_workspace kvedge_workspace;
size_t kvedge_workspace_bytes(void);

/* Bytes of a tile of rows that are gathered, with their scales. */
size_t kvedge_gathered_tile_bytes(const kvedge_attention *a);

/* slice.c: runs a slice, whose result is left in a slot. What this thread runs next is prefetched at the end, if its rows lie
 * as those of this one. `stop`, if not NULL, is looked at now and then: not 0 ends the run early, its slot worthless. */
void kvedge_slice_run(const kvedge_attention *a, int slice, kvedge_slice next, int slot, kvedge_workspace *w,
                      const volatile int *stop);

/* attention.c: adds the result of a slice to its row block's, slices in order, and writes out with the last one. The slot is
 * free then. `refit`: the room, of num_refits, for rows that need factors of their own. */
void kvedge_slice_collect(kvedge_attention *a, int slice, int slot, int refit, kvedge_workspace *w);

/* slice.c: logits of a call of one query row over all tokens, (num_heads, len). */
void kvedge_all_logits(const kvedge_attention *a, float *logits);

#endif
