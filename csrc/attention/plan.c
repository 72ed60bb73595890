/* One call of attention: its shapes and kernels, its memory. */
#include "attention/internal.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "system/memory.h"
#include "system/float_mode.h"

enum {
  /* A chunk of tokens has about this many bytes: large beside the cost of merging its result, small enough
   * that a helper which is held up delays nobody for long. */
  CHUNK_BYTES = 256 << 10,
  MAX_CHUNKS_OF_A_BLOCK = 32,
  /* Where there are few KV heads, which slices may be cut by as well, chunks are smaller until there are so many slices,
   * but take so many microseconds. */
  LEAST_SLICES = 8,
  LEAST_CHUNK_US = 20,
  /* For several threads slices are cut by KV heads until there are so many for each at most, which take so many
   * microseconds. */
  SLICES_OF_A_THREAD = 2,
  LEAST_SLICE_US = 5,
  SHORT_US = 200, /* calls up to this have their rows in a cache, mostly */
  /* Keys and values of all heads in a tile have up to twice this many bytes. Rows are prefetched a
   * tile before they are used, and the keys and values of two tiles have to fit a second-level
   * cache, which two threads may share. */
  TILE_BYTES = 100 << 10,
  LEAST_TILE = 48,         /* but this many tokens are worked on at once, since a call for fewer costs more */
  LEAST_TILE_OF_RUNS = 96, /* three runs; and they have half of the bytes */
  EVEN_TILE = 128, /* rather than a little more: then contexts of 512 tokens and so on are whole tiles, slices alike */
  /* Keys or values of up to this many channels get 24 bits: with few channels all of an output
   * may cancel, so that what 16 bits leave of an error is large beside it. */
  TINY_ROW_CHANNELS = 8,
};

/* What slices of some heads take, since nothing is prefetched for them, over slices of all. (Xeon, cold: 1.0 to 1.2, and 1.3
 * to 1.8.) */
#define COST_OF_SHORT_CUT 1.15
#define COST_OF_LONG_CUT 1.6

void kvedge_attention_defaults(kvedge_attention_options *options) {
  *options = (kvedge_attention_options){.scale = NAN, .causal = 1, .first_row = -1};
}

/* What a path has for keys or values. (Decoding a grid bounds what levels times very large
 * scales would take beyond float32.) */
static const kvedge_cell *cell_of(const kvedge_kernels *kernels, const kvedge_view_side *side) {
  static const kvedge_cell none = {.scores = NULL};
  const unsigned format = side->format->id;
  if (kvedge_is_of_runs(side->format)) return &kernels->runs;
  if (side->format->codes) return &kernels->blocks;
  if (side->scales_in_rows) return &kernels->cells[KVEDGE_INT8]; /* codes of int8 */
  if (format < KVEDGE_NUM_FORMATS) return &kernels->cells[format];
  return side->bound > FLT_MAX / 8 || side->shape.num_groups > 1 ? &none : &kernels->grids;
}

/* The kernels of a call: those of the path for its formats, or float32's after decoding. */
static void plan_kernels(kvedge_attention *a) {
  const kvedge_view_side *keys = &a->view.side[KEYS];
  a->kernels = kvedge_active();
  for (int s = 0; s < SIDES; s++) {
    const kvedge_row_shape *rows = &a->view.side[s].shape;
    const int whole_bytes = rows->num_groups <= 1 || rows->group_size * a->view.side[s].format->bits % 8 == 0;
    a->cells[s] = cell_of(a->kernels, &a->view.side[s]);
    a->decodes[s] = (!a->cells[s]->scores && !a->cells[s]->scores_of_groups) || !whole_bytes;
    if (a->decodes[s]) a->cells[s] = &a->kernels->cells[KVEDGE_FLOAT32];
    const int has_kernel =
        s == KEYS ? a->cells[s]->scores_of_groups != NULL : a->cells[s]->weighted_sum_of_groups != NULL;
    const int wants_kernel = rows->num_groups > 1 || !a->cells[s]->scores; /* blocks: also for one group */
    a->takes_groups[s] =
        has_kernel && wants_kernel && rows->group_size == KVEDGE_GROUP && rows->dim % KVEDGE_GROUP == 0;
  }
  const int grouped = keys->shape.num_groups && !a->decodes[KEYS];
  a->num_groups = grouped ? keys->shape.num_groups : 1;
  a->group_size = grouped ? keys->shape.group_size : keys->shape.dim;
  a->group_pad = kvedge_padded_channels(a->group_size);

  /* Where a KV head has few queries, several heads are worked on together. (Measured: with four queries for each it is
   * slower.) */
  a->heads_per_step = a->num_row_blocks > 1 || a->query_rows > 3 ? 1 : a->query_rows == 1 ? KVEDGE_HEADS : 2;
  a->batches_heads = a->query_rows == 1 && a->cells[KEYS]->scores_of_heads && a->cells[VALUES]->weighted_sum_of_heads;
  for (int s = 0; s < SIDES; s++) {
    const kvedge_row_shape *shape = &a->view.side[s].shape;
    a->batches_heads &= !a->decodes[s] && shape->num_groups <= 1 && shape->dim % 16 == 0 && shape->dim >= 64 &&
                        shape->dim <= KVEDGE_HEADS_DIM;
  }
}

/* Tokens of a tile. */
static int plan_tile(const kvedge_attention *a) {
  const kvedge_view_side *keys = &a->view.side[KEYS], *values = &a->view.side[VALUES];
  const int64_t of_token = keys->token_bytes + values->token_bytes;
  int64_t most = 2 * TILE_BYTES / (of_token > 0 ? of_token : 1);
  const int64_t of_head = keys->head_stride * (KVEDGE_RUN / keys->format->row_tokens) +
                          values->head_stride * (KVEDGE_RUN / values->format->row_tokens); /* for a run */
  int64_t tile = 2 * a->kernels->tuning.step_bytes * KVEDGE_RUN / (of_head > 0 ? of_head : 1);
  const int block = keys->block_tokens > values->block_tokens ? keys->block_tokens : values->block_tokens;
  const int least = block > KVEDGE_BLOCK ? LEAST_TILE_OF_RUNS : LEAST_TILE;
  if (most < least) most = least;
  if (tile > most) tile = most;
  if (block == KVEDGE_BLOCK && tile > EVEN_TILE && tile < KVEDGE_TILE) tile = EVEN_TILE;
  tile = (tile + block - KVEDGE_BLOCK) / block * block; /* of runs: up, since a call for one costs much beside it */
  return tile < block ? block : tile > KVEDGE_TILE ? KVEDGE_TILE : (int)tile;
}

/* Microseconds that `rows` query rows of each KV head take one thread for a token, about. */
static double us_of_token(const kvedge_attention *a, int rows) {
  int64_t work = 0;
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *side = &a->view.side[s];
    const int64_t channels = (int64_t)a->view.num_kv_heads * side->shape.dim; /* to unpack few bits takes as long */
    work += side->token_bytes > channels ? side->token_bytes : channels;
  }
  return (double)(work * (3 + rows)) / a->kernels->tuning.work_per_us;
}

double kvedge_attention_us(const kvedge_attention *a) {
  const kvedge_row_block last = kvedge_row_block_of(a, a->num_row_blocks - 1);
  const kvedge_attended seen = kvedge_attended_tokens(a, &last);
  return us_of_token(a, a->query_rows) * (double)(seen.sinks + seen.stop - seen.first) * a->num_row_blocks;
}

/* Tokens that a row block sees, at most. */
static int64_t tokens_seen(const kvedge_attention *a) {
  const kvedge_attention_options *o = &a->options;
  const int64_t by_window = o->window + a->rows_per_block + o->sink_tokens;
  return o->window && by_window < a->view.len ? by_window : a->view.len;
}

/* Steps that the KV heads of a tile take. */
static int steps_of_heads(const kvedge_attention *a) {
  return (a->view.num_kv_heads + a->heads_per_step - 1) / a->heads_per_step;
}

/* Chunks that the tokens of a row block are split into, at most. */
static int plan_chunks(const kvedge_attention *a) {
  const int64_t seen = tokens_seen(a), most_tiles = seen / a->tile;
  const ptrdiff_t of_token = a->view.side[KEYS].token_bytes + a->view.side[VALUES].token_bytes;
  const double us =
      us_of_token(a, a->heads_per_kv_head) * (double)seen; /* as of one row: its sums are those in a prompt */
  int64_t wanted = seen * of_token / CHUNK_BYTES, least = LEAST_SLICES / a->view.num_kv_heads;
  if (least > (int64_t)(us / LEAST_CHUNK_US)) least = (int64_t)(us / LEAST_CHUNK_US);
  if (wanted < least) wanted = least;
  if (wanted > MAX_CHUNKS_OF_A_BLOCK / a->num_row_blocks) wanted = MAX_CHUNKS_OF_A_BLOCK / a->num_row_blocks;
  if (wanted > most_tiles) wanted = most_tiles;
  return wanted < 1 ? 1 : (int)wanted;
}

/* Chunks of as many tiles each, but for the last one. */
static int even_chunks(const kvedge_attention *a) {
  const int64_t tiles = (tokens_seen(a) + a->tile - 1) / a->tile;
  const int64_t of_chunk = (tiles + a->most_chunks - 1) / a->most_chunks;
  return tiles < 1 ? 1 : (int)((tiles + of_chunk - 1) / of_chunk);
}

void kvedge_attention_plan(kvedge_attention *a, const kvedge_request *r, int64_t row, int64_t num_rows) {
  const kvedge_cache_view *view = &r->view;
  const int dim = view->side[KEYS].shape.dim, value_dim = view->side[VALUES].shape.dim, num_heads = r->num_heads;
  const int64_t first_position = r->first_position + row;
  memset(a, 0, sizeof *a);
  a->view = *view;
  a->query = row > 0 ? kvedge_array_from(&r->query, row, 0) : r->query; /* no address, where only sizes are planned */
  a->out = row > 0 ? kvedge_array_from(&r->out, row, 0) : r->out;
  if (r->lse) a->lse = r->lse + row * num_heads;
  if (r->log_sums) a->log_sums = r->log_sums + row * num_heads;
  if (r->options) a->options = *r->options;
  else kvedge_attention_defaults(&a->options);
  kvedge_attention_options *o = &a->options;
  kvedge_move_masks(o, 0, row, o->start);
  a->options.start = 0; /* the view begins there */
  if (isnan(a->options.scale)) a->options.scale = (float)(1.0 / sqrt(dim));
  /* A window that hides nothing is none, and sums with it stay in range. */
  if (a->options.window >= first_position + num_rows) a->options.window = 0;
  if (a->options.sink_tokens > view->len) a->options.sink_tokens = view->len;
  a->real_logits = a->options.softcap > 0.0f || a->options.alibi_slopes || kvedge_has_bias(&a->options);
  a->factor[KEYS] = a->factor[VALUES] = 1.0f;

  a->num_rows = num_rows;
  a->first_position = first_position;
  a->num_heads = num_heads;
  a->heads_per_kv_head = num_heads / view->num_kv_heads;
  a->rows_per_block = KVEDGE_QUERY_ROWS / a->heads_per_kv_head;
  if (a->rows_per_block < 1) a->rows_per_block = 1;
  if (a->rows_per_block > num_rows) a->rows_per_block = (int)num_rows;
  a->query_rows = a->rows_per_block * a->heads_per_kv_head;
  a->num_row_blocks = (int)((num_rows + a->rows_per_block - 1) / a->rows_per_block);

  plan_kernels(a);
  a->tile = plan_tile(a);
  a->gather_bytes = view->gathers ? 2 * kvedge_gathered_tile_bytes(a) : 0;
  a->most_chunks = plan_chunks(a);
  a->chunks_per_block = even_chunks(a);
  a->heads_per_slice = view->num_kv_heads;
  for (int s = KEYS; s <= VALUES; s++) {
    const int is_auto = o->precision_bits == KVEDGE_PRECISION_AUTO;
    a->planes[s] = (is_auto ? view->side[s].format->product_bits : o->precision_bits) / 8;
    if (a->planes[s] == 0 && (dim <= TINY_ROW_CHANNELS || value_dim <= TINY_ROW_CHANNELS)) a->planes[s] = 3;
  }
  a->acc_stride = (value_dim + 15) / 16 * 16;
  a->partial_floats = kvedge_partial_floats(a);
  a->num_refits = 1;
}

/* Slices of calls that run together, and microseconds of the longest. */
typedef struct {
  int count;
  double us, longest;
} slice_times;

/* Microseconds until `num_threads` threads have run slices that are cut in so many parts. */
static double span_of(const slice_times *of, int parts, int num_threads) {
  const int count = of->count * parts;
  const double cost = parts == 1 ? 1.0 : of->us < SHORT_US ? COST_OF_SHORT_CUT : COST_OF_LONG_CUT;
  const double busiest = (double)((count + num_threads - 1) / num_threads) * of->us / count;
  return cost *
         (fmax(busiest, of->longest / parts) + of->us / count / 2); /* at the end some wait for another's slice */
}

void kvedge_cut_heads(kvedge_attention *planned, int num_planned, double us, int num_threads) {
  slice_times of = {.us = us};
  int best = 1;
  if (num_threads == 1) return;
  for (int i = 0; i < num_planned; i++) {
    const int slices = kvedge_num_slices(&planned[i]);
    of.count += slices, of.longest = fmax(of.longest, kvedge_attention_us(&planned[i]) / slices);
  }
  const double wanted = fmin(SLICES_OF_A_THREAD * num_threads, us / LEAST_SLICE_US);
  for (int parts = 2; (parts - 1) * of.count < wanted; parts++)
    if (span_of(&of, parts, num_threads) < span_of(&of, best, num_threads)) best = parts;
  for (int i = 0; i < num_planned; i++) {
    kvedge_attention *a = &planned[i];
    a->heads_per_slice = (steps_of_heads(a) + best - 1) / best * a->heads_per_step;
    if (a->heads_per_slice > a->view.num_kv_heads) a->heads_per_slice = a->view.num_kv_heads;
  }
}

int kvedge_most_slices(const kvedge_attention *a, int num_threads) {
  const int uncut = a->num_row_blocks * a->most_chunks, wanted = SLICES_OF_A_THREAD * num_threads;
  if (num_threads == 1 || wanted <= a->num_row_blocks) return uncut;
  const int by_step = uncut * steps_of_heads(a), by_thread = uncut + wanted - 1;
  return by_step < by_thread ? by_step : by_thread;
}

static size_t query_floats(const kvedge_attention *a) {
  return (size_t)a->num_rows * (size_t)a->num_heads * (size_t)a->view.side[KEYS].shape.dim;
}

/* Bytes for one row of one head that is attended to again (attention.c). */
static size_t refit_bytes(const kvedge_attention *a) {
  kvedge_attention single = *a; /* as attention.c makes it, as far as sizes depend on it */
  single.view.num_kv_heads = single.heads_per_slice = single.num_heads = single.query_rows = 1;
  single.num_row_blocks = single.is_refit = single.query_stays = 1;
  single.has_workspace = 0; /* that of the slice is free by then */
  single.partial_floats = kvedge_partial_floats(&single);
  return kvedge_attention_lay_out(&single, NULL, 1);
}

size_t kvedge_attention_lay_out(kvedge_attention *a, char *base, int num_slots) {
  size_t used = 0;
  int slices_prepare = kvedge_slices_prepare(a);
  kvedge_take(base, &used, sizeof *a);
  if (!a->is_refit) a->segments = kvedge_take(base, &used, (size_t)a->view.num_segments * sizeof *a->segments);
  a->alibi_slopes = NULL;
  if (a->options.alibi_slopes) a->alibi_slopes = kvedge_take(base, &used, (size_t)a->num_heads * sizeof(float));
  a->query_copy = NULL;
  if (!a->query_stays) a->query_copy = kvedge_take(base, &used, query_floats(a) * sizeof(float));
  a->query_bytes = kvedge_query_bytes(a);
  a->queries = kvedge_take(base, &used, (size_t)(slices_prepare ? num_slots : a->num_row_blocks) * a->query_bytes);
  a->num_slots = num_slots;
  a->partials = kvedge_take(base, &used, ((size_t)num_slots + 1) * a->partial_floats * sizeof *a->partials);
  if (!a->is_refit) {
    a->refit_bytes = kvedge_align(refit_bytes(a));
    a->refit = kvedge_take(base, &used, (size_t)a->num_refits * a->refit_bytes);
  }
  a->workspace = NULL;
  if (a->has_workspace) a->workspace = kvedge_take(base, &used, kvedge_workspace_bytes() + a->gather_bytes);
  return used;
}

kvedge_attention *kvedge_attention_set_up(const kvedge_attention *planned, void *memory, int num_slots) {
  kvedge_attention *a = memory;
  *a = *planned;
  kvedge_attention_lay_out(a, memory, num_slots);
  memcpy(a->segments, planned->view.segments, (size_t)a->view.num_segments * sizeof *a->segments);
  a->view.segments = a->segments; /* the caller's may be gone before a late helper is done */
  if (a->alibi_slopes) {
    memcpy(a->alibi_slopes, planned->options.alibi_slopes, (size_t)a->num_heads * sizeof *a->alibi_slopes);
    a->options.alibi_slopes = a->alibi_slopes;
  }
  const int dim = a->view.side[KEYS].shape.dim;
  if (a->query_copy) {
    kvedge_array_copy(&a->query, a->num_rows, a->num_heads, dim, a->query_copy);
    a->query = kvedge_dense_array(a->query_copy, a->num_heads, dim);
  }
  kvedge_fit_factors(a);
  kvedge_prepare_queries(a);
  return a;
}
