/* First tokens, body, last tokens: where they lie, how they come there, how readers find them. ranges.h says what they are. */
#include "store/ranges.h"

#include <math.h>
#include <sched.h>
#include <string.h>

#include "system/bits.h"
#include "system/dispatch.h"
#include "system/parallel.h"

enum {
  DRAFT = 64, /* last tokens that may be taken back, and those before them are still all there */
  ROOM = 64,  /* tokens appended between two moves of the last ones, at least */
};

#define LARGEST_IN_RUNS 65504.0f /* their steps are float16 */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t kvedge_kept_rows(const kvedge_layer_config *config) {
  if (config->recent_format == 0) return 0;
  const int64_t recent = kvedge_in_runs(config) ? larger(config->recent, KVEDGE_RUN) : config->recent;
  return recent ? recent + DRAFT : 0;
}

int64_t kvedge_last_rows(const kvedge_layer_config *config) {
  const int64_t kept = kvedge_kept_rows(config), room = larger(config->recent_room, ROOM);
  return kept ? (kept + room + KVEDGE_RUN - 1) / KVEDGE_RUN * KVEDGE_RUN : 0;
}

static kvedge_layer_config plain_config(const kvedge_layer_config *config, int64_t rows) {
  return (kvedge_layer_config){.format = (kvedge_format)(config->recent_format - 1),
                               .capacity = larger(rows, 1),
                               .num_kv_heads = config->num_kv_heads,
                               .head_dim = config->head_dim,
                               .value_head_dim = config->value_head_dim};
}

kvedge_layer_config kvedge_first_config(const kvedge_layer_config *config) {
  return plain_config(config, config->sinks);
}

kvedge_layer_config kvedge_last_config(const kvedge_layer_config *config) {
  return plain_config(config, kvedge_last_rows(config));
}

/* Last tokens that there is room for. */
static int64_t room_of(const kvedge_layer *layer) {
  return kvedge_kept_rows(&layer->config) ? layer->last->config.capacity : 0;
}

/* The row after the last run, of a layer whose tokens end before row `stop`: the last tokens hold all behind it. Where they do
 * not reach back to it, the layer was cut inside a run, and this ends there. */
static int64_t stop_of_runs(int64_t stop, int64_t last_from) {
  const int64_t whole = stop & -KVEDGE_RUN;
  return last_from <= whole ? whole : stop;
}

/* ---- Readers -------------------------------------------------------------------------------------------------------- */

/* In a process that was forked while others read, they read no more. */
static void forget_parents_readers(kvedge_layer *layer) {
  uint32_t own = atomic_load(&layer->process);
  const uint32_t process = kvedge_process();
  if (own != process && atomic_compare_exchange_strong(&layer->process, &own, process)) {
    atomic_store(&layer->num_readers, 0);
    atomic_store(&layer->is_draining, 0);
    if (atomic_load(&layer->version) % 2) atomic_fetch_add(&layer->version, 1); /* its writer was at it */
  }
}

kvedge_ranges kvedge_ranges_written(const kvedge_layer *layer, int64_t *last_written) {
  kvedge_ranges r;
  uint32_t before, after;
  do {
    before = atomic_load_explicit(&layer->version, memory_order_acquire);
    r.start = atomic_load_explicit(&layer->start, memory_order_acquire);
    r.stop = atomic_load_explicit(&layer->stop, memory_order_acquire);
    r.last_from = atomic_load_explicit(&layer->last_from, memory_order_acquire);
    r.last_row = atomic_load_explicit(&layer->last_row, memory_order_acquire);
    r.first_row = atomic_load_explicit(&layer->first_row, memory_order_acquire);
    r.num_first = atomic_load_explicit(&layer->num_first, memory_order_acquire);
    *last_written = atomic_load_explicit(&layer->last_written, memory_order_acquire);
    after = atomic_load_explicit(&layer->version, memory_order_relaxed);
  } while (before != after || before % 2);
  r.first_stop = layer->first_stop;
  return r;
}

kvedge_ranges kvedge_ranges_now(const kvedge_layer *layer) {
  int64_t unused;
  kvedge_ranges r = kvedge_ranges_written(layer, &unused);
  r.last_from = smaller(r.last_from, r.stop);
  r.num_first = larger(0, smaller(r.num_first, r.stop - r.first_row));
  return r;
}

int kvedge_try_hold(const kvedge_layer *of) {
  kvedge_layer *layer = (kvedge_layer *)of;
  forget_parents_readers(layer);
  atomic_fetch_add(&layer->num_readers, 1);
  if (!atomic_load(&layer->is_draining)) return 1;
  kvedge_release(layer);
  return 0;
}

void kvedge_hold(const kvedge_layer *layer) {
  while (!kvedge_try_hold(layer)) sched_yield();
}

void kvedge_release(const kvedge_layer *layer) { atomic_fetch_sub(&((kvedge_layer *)layer)->num_readers, 1); }

int kvedge_parts_of_ranges(const kvedge_layer *layer, const kvedge_ranges *r, int64_t row, int64_t num_tokens,
                           int64_t query_row, kvedge_part parts[3]) {
  const int64_t stop = row + num_tokens, recent = layer->config.recent;
  int64_t tail = larger(larger(row, r->last_from), recent ? query_row - recent + 1 : stop);
  tail = smaller(tail, stop);
  /* Of runs, all behind the last one is read here; stop_of_runs(r->stop, ...) where the moment is later than the call. */
  if (kvedge_in_runs(&layer->config)) tail = smaller(tail, larger(row, stop_of_runs(r->stop, r->last_from)));
  int64_t sinks = row;
  if (r->first_row <= row && !(tail <= r->first_row + r->num_first && r->last_from <= row))
    sinks = larger(row, smaller(stop, r->first_row + r->num_first));
  else if (r->first_row <= row) tail = row; /* the last tokens are all there is */
  tail = larger(tail, sinks);
  int n = 0;
  if (sinks > row)
    parts[n++] = (kvedge_part){.layer = layer->first, .first_row = row - r->first_row, .num_tokens = sinks - row};
  if (tail > sinks)
    parts[n++] = (kvedge_part){.layer = layer, .first_row = sinks, .num_tokens = tail - sinks, .position = sinks - row};
  if (stop > tail)
    parts[n++] = (kvedge_part){
        .layer = layer->last, .first_row = tail - r->last_row, .num_tokens = stop - tail, .position = tail - row};
  return n;
}

static void load(const kvedge_layer *layer, const kvedge_ranges *ranges, int values, int64_t start, int64_t stop,
                 float *out) {
  kvedge_part parts[3];
  const kvedge_side *side = values ? &layer->values : &layer->keys;
  const int n = kvedge_parts_of_ranges(layer, ranges, start, stop - start, ranges->stop - 1, parts);
  for (int i = 0; i < n; i++)
    kvedge_rows_load(values ? &parts[i].layer->values : &parts[i].layer->keys, parts[i].first_row,
                     parts[i].first_row + parts[i].num_tokens,
                     out + parts[i].position * side->num_kv_heads * side->shape.dim);
}

void kvedge_ranges_load(const kvedge_layer *layer, int values, int64_t start, int64_t stop, float *out) {
  kvedge_hold(layer);
  const kvedge_ranges ranges = kvedge_ranges_now(layer);
  load(layer, &ranges, values, start, stop, out);
  kvedge_release(layer);
}

/* ---- The writer: what can be stored --------------------------------------------------------------------------------- */

static int is_mapped(const kvedge_side *side) { return side->offset || side->scale || side->rotated; }

/* A magnitude as last tokens have it. */
static float rounded(const kvedge_side *last, float x) {
  const kvedge_row_shape single = {.dim = 1};
  uint32_t code = 0;
  last->format->encode(&single, &x, 1, &code, NULL);
  last->format->decode(&single, &code, NULL, 1, &x);
  return x;
}

/* As kvedge_rows_check, of rows as last tokens have them: a run is encoded from these. */
static kvedge_status check_rounded(const kvedge_side *side, const kvedge_side *last, const kvedge_array *rows,
                                   int64_t num_tokens) {
  const int dim = side->shape.dim;
  const kvedge_row_shape shape = {.dim = dim};
  float row[KVEDGE_MAX_HEAD_DIM], codes[KVEDGE_MAX_HEAD_DIM], bound;
  const kvedge_array array = kvedge_dense_array(row, 1, dim);
  for (int64_t token = 0; token < num_tokens; token++)
    for (int head = 0; head < side->num_kv_heads; head++) {
      kvedge_side single = *side;
      single.num_kv_heads = 1;
      if (single.offset) single.offset += (ptrdiff_t)head * dim;
      if (single.scale) single.scale += (ptrdiff_t)head * dim;
      last->format->encode(&shape, kvedge_array_row(rows, token, head, dim, row), 1, codes, NULL);
      last->format->decode(&shape, codes, NULL, 1, row);
      const kvedge_status status = kvedge_rows_check(&single, &array, 1, &bound);
      if (status != KVEDGE_OK) return status;
    }
  return KVEDGE_OK;
}

static kvedge_status check_side(const kvedge_layer *layer, int values, const kvedge_array *rows, int64_t num_tokens,
                                float *bound) {
  const kvedge_side *side = values ? &layer->values : &layer->keys;
  const kvedge_side *last = values ? &layer->last->values : &layer->last->keys;
  const uint32_t bits = kvedge_array_abs_max_bits(rows, num_tokens, side->num_kv_heads, side->shape.dim);
  if (bits >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
  float most = kvedge_float_of_bits(bits);
  float *bound_of_last = values ? &layer->last->checked.values : &layer->last->checked.keys;
  *bound_of_last = last->format->bound_of(&last->shape, most);
  if (isinf(*bound_of_last)) return KVEDGE_ERROR_SCALE;
  const int in_runs = kvedge_in_runs(&layer->config);
  if (!in_runs && is_mapped(side)) return kvedge_rows_check(side, rows, num_tokens, bound);
  if (in_runs) {
    most = rounded(last, most);
    if (most > LARGEST_IN_RUNS) return KVEDGE_ERROR_SCALE; /* of rows beside runs, too */
  }
  if (side->rotated && !side->offset && !side->scale) most *= 1.001f * sqrtf((float)side->rotated); /* at most */
  else if (is_mapped(side)) return check_rounded(side, last, rows, num_tokens);
  *bound = isfinite(most) ? side->format->bound_of(&side->shape, most) : INFINITY;
  if (isinf(*bound) && side->rotated) return check_rounded(side, last, rows, num_tokens);
  return isinf(*bound) ? KVEDGE_ERROR_SCALE : KVEDGE_OK;
}

kvedge_status kvedge_ranges_check(const kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values,
                                  int64_t num_tokens, kvedge_bounds *bound) {
  const kvedge_status status = check_side(layer, 0, keys, num_tokens, &bound->keys);
  return status == KVEDGE_OK ? check_side(layer, 1, values, num_tokens, &bound->values) : status;
}

/* ---- The writer: tokens in ------------------------------------------------------------------------------------------ */

/* Waits until no call reads, and lets none begin. */
static void drain(kvedge_layer *layer) {
  forget_parents_readers(layer);
  atomic_store(&layer->is_draining, 1);
  while (atomic_load(&layer->num_readers)) sched_yield();
  kvedge_quiesce();
}

static void publish(kvedge_layer *layer, const kvedge_ranges *ranges, int64_t last_written) {
  const uint32_t version = atomic_load_explicit(&layer->version, memory_order_relaxed);
  atomic_store_explicit(&layer->version, version + 1, memory_order_relaxed);
  atomic_store_explicit(&layer->start, ranges->start, memory_order_release);
  atomic_store_explicit(&layer->last_from, ranges->last_from, memory_order_release);
  atomic_store_explicit(&layer->last_row, ranges->last_row, memory_order_release);
  atomic_store_explicit(&layer->first_row, ranges->first_row, memory_order_release);
  atomic_store_explicit(&layer->num_first, ranges->num_first, memory_order_release);
  atomic_store_explicit(&layer->last_written, last_written, memory_order_release);
  atomic_store_explicit(&layer->stop, ranges->stop, memory_order_release);
  atomic_store_explicit(&layer->version, version + 2, memory_order_release);
}

/* Lets row `row` be the first of the last tokens, of which those from row `from` to `stop` are moved along. */
static void move_last(kvedge_layer *layer, kvedge_ranges *ranges, int64_t row, int64_t from, int64_t stop) {
  drain(layer);
  if (from < stop) kvedge_copy_tokens(layer->last, from - ranges->last_row, layer->last, from - row, stop - from);
  ranges->last_row = row;
}

/* Stores tokens as rows from `at` on, the first of which is `from` of the caller's. */
static void store_tokens(const kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values, int64_t from,
                         int64_t at, int64_t num_tokens) {
  const kvedge_array some_keys = kvedge_array_from(keys, from, 0), some_values = kvedge_array_from(values, from, 0);
  kvedge_rows_store(&layer->keys, &some_keys, num_tokens, at);
  kvedge_rows_store(&layer->values, &some_values, num_tokens, at);
}

/* Last tokens as an array, from one on. */
static kvedge_array array_of_last(const kvedge_side *side, int64_t row) {
  const kvedge_format format = side->format->id;
  const ptrdiff_t bytes = (ptrdiff_t)side->row_bytes;
  return (kvedge_array){.data = kvedge_codes_at(side, row),
                        .type = format == KVEDGE_FLOAT32   ? KVEDGE_TYPE_FLOAT32
                                : format == KVEDGE_FLOAT16 ? KVEDGE_TYPE_FLOAT16
                                                           : KVEDGE_TYPE_BFLOAT16,
                        .token_stride = bytes * side->num_kv_heads,
                        .head_stride = bytes};
}

/* Encodes the run that begins at a row, from the last tokens. */
static void encode_run(kvedge_layer *layer, int64_t row, int64_t last_row) {
  for (int values = 0; values < 2; values++) {
    const kvedge_side *side = values ? &layer->values : &layer->keys;
    const kvedge_array rows = array_of_last(values ? &layer->last->values : &layer->last->keys, row - last_row);
    kvedge_run_store(side, &rows, row);
    kvedge_raise_bound(values ? &layer->value_bound : &layer->key_bound,
                       kvedge_rows_bound(side, row, row + KVEDGE_RUN));
  }
}

/* Lets tokens from now->last_row on be last ones as well, as they are read now: those of a run that the layer was cut in. */
static void reload(kvedge_layer *layer, const kvedge_ranges *ranges, int64_t stop) {
  const int64_t last_row = ranges->last_row, first_stop = smaller(ranges->stop, ranges->first_row + ranges->num_first);
  const int heads = layer->config.num_kv_heads;
  float row[KVEDGE_MAX_HEAD_DIM];
  for (int64_t token = last_row; token < stop; token++) {
    if (token >= ranges->first_row && token < first_stop) {
      kvedge_copy_tokens(layer->first, token - ranges->first_row, layer->last, token - last_row, 1);
      continue;
    }
    for (int values = 0; values < 2; values++) {
      const kvedge_side *side = values ? &layer->values : &layer->keys;
      const kvedge_side *last = values ? &layer->last->values : &layer->last->keys;
      char *codes = kvedge_codes_at(last, token - last_row);
      for (int head = 0; head < heads; head++, codes += last->row_bytes) {
        const kvedge_side single = kvedge_side_of_head(side, token, head);
        kvedge_rows_load(&single, token % side->format->row_tokens, token % side->format->row_tokens + 1, row);
        last->format->encode(&last->shape, row, 1, codes, NULL);
      }
    }
  }
}

/* First tokens: those that follow them below first_stop. */
static void append_first(kvedge_layer *layer, kvedge_ranges *ranges, const kvedge_array *keys,
                         const kvedge_array *values, int64_t num_tokens) {
  const int64_t num_first = larger(0, smaller(ranges->num_first, ranges->stop - ranges->first_row));
  const int64_t more = smaller(smaller(num_tokens, layer->first_stop - ranges->stop), layer->config.sinks - num_first);
  if (more > 0 && ranges->start == ranges->stop)
    ranges->first_row = ranges->stop - num_first; /* an empty layer begins anew */
  if (more <= 0 || ranges->first_row + num_first != ranges->stop) return;
  store_tokens(layer->first, keys, values, 0, num_first, more);
  kvedge_raise_bound(&layer->first->key_bound, layer->last->checked.keys);
  kvedge_raise_bound(&layer->first->value_bound, layer->last->checked.values);
  ranges->num_first = num_first + more;
}

/* Last tokens, and the runs that they fill. */
static void append_last(kvedge_layer *layer, kvedge_ranges *ranges, const kvedge_array *keys,
                        const kvedge_array *values, int64_t num_tokens) {
  const int64_t stop = ranges->stop, end = stop + num_tokens, room = room_of(layer);
  const int64_t run = kvedge_in_runs(&layer->config) ? KVEDGE_RUN : 1, cut = stop & -run;
  const int64_t kept = (layer->config.recent ? stop : end) - kvedge_kept_rows(&layer->config);
  if (ranges->last_from > cut) { /* the layer went back further than its last tokens reach */
    const int64_t tail = layer->config.recent ? larger(ranges->last_from, stop - layer->config.recent) : stop;
    const int64_t rest = smaller(tail, stop); /* up to here they are not read among the last ones */
    move_last(layer, ranges, cut, rest, stop);
    reload(layer, ranges, rest);
    ranges->last_from = cut;
  }
  const int64_t since = larger(ranges->last_from, larger(kept, end - room)); /* what is needed once all have come */
  kvedge_raise_bound(&layer->last->key_bound, layer->last->checked.keys);
  kvedge_raise_bound(&layer->last->value_bound, layer->last->checked.values);
  for (int64_t at = run == 1 ? larger(stop, since) : stop, n; at < end; at += n) {
    const int64_t low = smaller(since, at & -run); /* and what is needed now */
    if (run > 1 ? at == ranges->last_row + room : end > ranges->last_row + room) move_last(layer, ranges, low, low, at);
    n = smaller(end, ranges->last_row + room) - at;
    if (run > 1) n = smaller(n, (at & -run) + run - at);
    store_tokens(layer->last, keys, values, at - stop, at - ranges->last_row, n);
    if (run > 1 && (at + n) % run == 0) encode_run(layer, at + n - run, ranges->last_row);
  }
  ranges->last_from = since;
}

void kvedge_ranges_append(kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens,
                          const kvedge_bounds *bound) {
  int64_t last_written;
  kvedge_ranges ranges = kvedge_ranges_written(layer, &last_written);
  const int64_t stop = ranges.stop, end = stop + num_tokens;
  append_first(layer, &ranges, keys, values, num_tokens);
  if (room_of(layer)) append_last(layer, &ranges, keys, values, num_tokens);
  else ranges.last_from = end;
  if (kvedge_in_runs(&layer->config)) {
    kvedge_raise_written(layer, larger(stop & -KVEDGE_RUN, end & -KVEDGE_RUN));
  } else {
    store_tokens(layer, keys, values, 0, stop, num_tokens);
    kvedge_raise_bound(&layer->key_bound, bound->keys);
    kvedge_raise_bound(&layer->value_bound, bound->values);
    kvedge_raise_written(layer, end);
  }
  ranges.stop = end;
  publish(layer, &ranges, end);
  atomic_store_explicit(&layer->is_draining, 0, memory_order_release);
}

/* ---- The writer: going back and forth, taking over -------------------------------------------------------------------- */

void kvedge_ranges_set_stop(kvedge_layer *layer, int64_t stop) {
  int64_t last_written;
  kvedge_ranges ranges = kvedge_ranges_written(layer, &last_written);
  /* Of more tokens a copy of the layer would not have the last ones. */
  if (stop < ranges.stop) ranges.last_from = larger(ranges.last_from, ranges.stop - kvedge_kept_rows(&layer->config));
  if (stop > last_written || !room_of(layer)) ranges.last_from = stop;
  ranges.stop = stop;
  publish(layer, &ranges, last_written);
}

static void raise_bounds(kvedge_layer *plain, int64_t row, int64_t num_tokens) {
  kvedge_raise_bound(&plain->key_bound, kvedge_rows_bound(&plain->keys, row, row + num_tokens));
  kvedge_raise_bound(&plain->value_bound, kvedge_rows_bound(&plain->values, row, row + num_tokens));
}

kvedge_status kvedge_layer_set_ranges(kvedge_layer *layer, const kvedge_ranges *r) {
  if (!layer || !r || !kvedge_has_ranges(layer)) return KVEDGE_ERROR_ARGUMENT;
  const int64_t room = room_of(layer), whole = r->stop & -KVEDGE_RUN;
  if (r->start < 0 || r->stop < r->start || r->stop > layer->config.capacity) return KVEDGE_ERROR_ARGUMENT;
  if (r->last_from < 0 || r->last_from > r->stop) return KVEDGE_ERROR_ARGUMENT;
  if (r->last_from < r->stop && (r->last_row > r->last_from || r->stop - r->last_row > room))
    return KVEDGE_ERROR_ARGUMENT;
  if (r->num_first < 0 || r->num_first > layer->config.sinks || r->first_row < 0) return KVEDGE_ERROR_ARGUMENT;
  const int in_runs = kvedge_in_runs(&layer->config);
  const int64_t encoded = !in_runs || r->last_from > whole ? r->stop : whole;
  kvedge_quiesce();
  layer->written = (encoded + KVEDGE_RUN - 1) & -KVEDGE_RUN;
  if (!in_runs) layer->written = encoded;
  layer->first_stop = r->first_stop;
  kvedge_ranges ranges = *r;
  if (r->last_from == r->stop) ranges.last_row = r->stop;
  publish(layer, &ranges, r->stop);
  const int64_t first = in_runs ? r->start & -KVEDGE_RUN : r->start;
  if (first < encoded) raise_bounds(layer, first, encoded - first);
  raise_bounds(layer->first, 0, r->num_first);
  if (r->last_from < r->stop) raise_bounds(layer->last, r->last_from - r->last_row, r->stop - r->last_from);
  return KVEDGE_OK;
}

void kvedge_ranges_copy(kvedge_layer *layer, const kvedge_layer *from, const kvedge_ranges *r, int64_t written,
                        int64_t row) {
  const int64_t room = room_of(layer), since = larger(larger(r->last_from, row), written - room);
  kvedge_copy_tokens(from->first, 0, layer->first, 0, r->num_first);
  if (room && since < written) kvedge_copy_tokens(from->last, since - r->last_row, layer->last, 0, written - since);
  kvedge_copy_bounds(from->first, layer->first);
  kvedge_copy_bounds(from->last, layer->last);
  kvedge_copy_bounds(from, layer);
  layer->written = written - row;
  if (kvedge_in_runs(&layer->config)) {
    const int64_t whole = written & -KVEDGE_RUN, cut = stop_of_runs(r->stop, r->last_from);
    layer->written = larger(whole, (cut + KVEDGE_RUN - 1) & -KVEDGE_RUN) - row;
  }
  layer->first_stop = from->first_stop - row;
  const kvedge_ranges ranges = {.start = r->start - row,
                                .stop = r->stop - row,
                                .last_from = (room ? since : r->stop) - row,
                                .last_row = since - row,
                                .first_row = r->first_row - row,
                                .num_first = r->num_first};
  publish(layer, &ranges, written - row);
}

/* ---- The writer: moving tokens within the layer ------------------------------------------------------------------------ */

void kvedge_ranges_compact(kvedge_layer *layer) {
  int64_t last_written;
  kvedge_ranges r = kvedge_ranges_written(layer, &last_written);
  const int64_t by = kvedge_in_runs(&layer->config) ? r.start & -KVEDGE_RUN : r.start;
  if (by == 0) return;
  kvedge_quiesce();
  kvedge_copy_tokens(layer, by, layer, 0, layer->written - by);
  layer->written -= by, layer->first_stop -= by;
  r.start -= by, r.stop -= by, r.first_row -= by;
  r.last_from -= by, r.last_row -= by;
  publish(layer, &r, last_written - by);
}

void kvedge_ranges_keep(kvedge_layer *layer, const int64_t *tokens, int64_t num_tokens) {
  kvedge_ranges r = kvedge_ranges_now(layer);
  int64_t num_first = 0, num_last = 0;
  for (int64_t i = 0; i < num_tokens; i++) { /* tokens only move to rows below their own */
    const int64_t from = r.start + tokens[i];
    if (from >= r.first_row && from < r.first_row + r.num_first && num_first == i)
      kvedge_copy_tokens(layer->first, from - r.first_row, layer->first, num_first++, 1);
    if (from >= r.last_from) kvedge_copy_tokens(layer->last, from - r.last_row, layer->last, num_last++, 1);
  }
  r.stop = r.start + num_tokens, r.first_row = r.start, r.num_first = num_first;
  r.last_from = r.last_row = r.stop - num_last;
  publish(layer, &r, r.stop);
}
