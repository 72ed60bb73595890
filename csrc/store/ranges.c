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
  ROOM = 64,  /* tokens appended between two waits for readers, at least */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t kvedge_kept_rows(const kvedge_layer_config *config) {
  if (config->recent_format == 0) return 0;
  const int64_t recent = kvedge_in_runs(config) ? larger(config->recent, KVEDGE_RUN) : config->recent;
  return recent ? recent + DRAFT : 0;
}

int64_t kvedge_ring_rows(const kvedge_layer_config *config) {
  const int64_t kept = kvedge_kept_rows(config), room = larger(config->recent_room, ROOM);
  return kept ? (kept + room + KVEDGE_RUN - 1) / KVEDGE_RUN * KVEDGE_RUN : 0; /* a run does not cross its end */
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
  return plain_config(config, kvedge_ring_rows(config));
}

static int64_t ring_of(const kvedge_layer *layer) {
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
  const uint32_t now = kvedge_process();
  if (own != now && atomic_compare_exchange_strong(&layer->process, &own, now)) {
    atomic_store(&layer->num_readers, 0);
    atomic_store(&layer->is_draining, 0);
  }
}

kvedge_ranges kvedge_ranges_now(const kvedge_layer *layer) {
  kvedge_ranges r;
  uint32_t before, after;
  do {
    before = atomic_load_explicit(&layer->version, memory_order_acquire);
    r.start = atomic_load_explicit(&layer->start, memory_order_acquire);
    r.stop = atomic_load_explicit(&layer->stop, memory_order_acquire);
    r.last_from = atomic_load_explicit(&layer->last_from, memory_order_acquire);
    r.first_row = atomic_load_explicit(&layer->first_row, memory_order_acquire);
    r.num_first = atomic_load_explicit(&layer->num_first, memory_order_acquire);
    after = atomic_load_explicit(&layer->version, memory_order_relaxed);
  } while (before != after || before % 2);
  r.last_from = smaller(r.last_from, r.stop);
  r.num_first = larger(0, smaller(r.num_first, r.stop - r.first_row));
  r.first_stop = layer->first_stop;
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

/* Some rows of last tokens; its blocks are the ring, twice. */
static kvedge_part part_of_ring(const kvedge_layer *last, int64_t row, int64_t num_tokens) {
  static const int32_t ring[2] = {0, 0};
  const int64_t rows = last->config.capacity;
  kvedge_part part = {.layer = last, .first_row = row % rows, .num_tokens = num_tokens};
  if (part.first_row + num_tokens > rows) part.blocks = ring, part.block_size = rows;
  return part;
}

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
  if (stop > tail) {
    parts[n] = part_of_ring(layer->last, tail, stop - tail);
    parts[n++].position = tail - row;
  }
  return n;
}

/* Rows of one part: stored in a plain layer, or in the body. */
static void load_part(const kvedge_part *part, int values, float *out) {
  const kvedge_side *side = values ? &part->layer->values : &part->layer->keys;
  const ptrdiff_t token = (ptrdiff_t)side->num_kv_heads * side->shape.dim;
  const int64_t rows = part->layer->config.capacity, before = part->blocks ? rows - part->first_row : part->num_tokens;
  kvedge_rows_load(side, part->first_row, part->first_row + before, out);
  if (part->blocks) kvedge_rows_load(side, 0, part->num_tokens - before, out + before * token);
}

static void load(const kvedge_layer *layer, const kvedge_ranges *ranges, int values, int64_t start, int64_t stop,
                 float *out) {
  kvedge_part parts[3];
  const kvedge_side *side = values ? &layer->values : &layer->keys;
  const int n = kvedge_parts_of_ranges(layer, ranges, start, stop - start, ranges->stop - 1, parts);
  for (int i = 0; i < n; i++)
    load_part(&parts[i], values, out + parts[i].position * side->num_kv_heads * side->shape.dim);
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
  const kvedge_row_shape one = {.dim = 1};
  uint32_t code = 0;
  last->format->encode(&one, &x, 1, &code, NULL);
  last->format->decode(&one, &code, NULL, 1, &x);
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
      kvedge_side one = *side;
      one.num_kv_heads = 1;
      if (one.offset) one.offset += (ptrdiff_t)head * dim;
      if (one.scale) one.scale += (ptrdiff_t)head * dim;
      last->format->encode(&shape, kvedge_array_row(rows, token, head, dim, row), 1, codes, NULL);
      last->format->decode(&shape, codes, NULL, 1, row);
      const kvedge_status status = kvedge_rows_check(&one, &array, 1, &bound);
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
  if (in_runs) most = rounded(last, most);
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

static void publish(kvedge_layer *layer, int64_t stop, int64_t last_from, int64_t num_first) {
  const uint32_t version = atomic_load_explicit(&layer->version, memory_order_relaxed);
  atomic_store_explicit(&layer->version, version + 1, memory_order_relaxed);
  atomic_store_explicit(&layer->last_from, last_from, memory_order_release);
  atomic_store_explicit(&layer->num_first, num_first, memory_order_release);
  atomic_store_explicit(&layer->stop, stop, memory_order_release);
  atomic_store_explicit(&layer->version, version + 2, memory_order_release);
}

/* Stores tokens from row `at` on, the first of which is `from` of the caller's. */
static void store_in_ring(kvedge_layer *last, const kvedge_array *keys, const kvedge_array *values, int64_t from,
                          int64_t at, int64_t num_tokens) {
  const int64_t rows = last->config.capacity;
  for (int64_t done = 0, n; done < num_tokens; done += n) {
    const int64_t row = (at + done) % rows;
    n = smaller(num_tokens - done, rows - row);
    const kvedge_array some_keys = kvedge_array_from(keys, from + done, 0);
    const kvedge_array some_values = kvedge_array_from(values, from + done, 0);
    kvedge_rows_store(&last->keys, &some_keys, n, row);
    kvedge_rows_store(&last->values, &some_values, n, row);
  }
}

/* Rows of the ring as an array, from one on. */
static kvedge_array array_of_ring(const kvedge_side *side, int64_t row) {
  const kvedge_format format = side->format->id;
  const ptrdiff_t bytes = (ptrdiff_t)side->row_bytes;
  return (kvedge_array){.data = kvedge_codes_at(side, row),
                        .type = format == KVEDGE_FLOAT32   ? KVEDGE_TYPE_FLOAT32
                                : format == KVEDGE_FLOAT16 ? KVEDGE_TYPE_FLOAT16
                                                           : KVEDGE_TYPE_BFLOAT16,
                        .token_stride = bytes * side->num_kv_heads,
                        .head_stride = bytes};
}

/* Encodes the run that begins at a row, from the ring. */
static void encode_run(kvedge_layer *layer, int64_t row) {
  const int64_t at = row % layer->last->config.capacity;
  for (int values = 0; values < 2; values++) {
    const kvedge_side *side = values ? &layer->values : &layer->keys;
    const kvedge_array rows = array_of_ring(values ? &layer->last->values : &layer->last->keys, at);
    kvedge_rows_store(side, &rows, KVEDGE_RUN, row);
    kvedge_raise_bound(values ? &layer->value_bound : &layer->key_bound,
                       kvedge_rows_bound(side, row, row + KVEDGE_RUN));
  }
}

/* Puts tokens up to the last one into the ring as they are read: those of a run that the layer was cut in. */
static void reload(kvedge_layer *layer, int64_t start, int64_t stop) {
  const kvedge_ranges ranges = kvedge_ranges_now(layer);
  float row[KVEDGE_MAX_HEAD_DIM];
  for (int64_t token = start; token < stop; token++) {
    kvedge_part part[3]; /* one: a token lies in one of them */
    kvedge_parts_of_ranges(layer, &ranges, token, 1, stop - 1, part);
    for (int values = 0; values < 2; values++) {
      const kvedge_side *side = values ? &part->layer->values : &part->layer->keys;
      const kvedge_side *last = values ? &layer->last->values : &layer->last->keys;
      const int place = kvedge_place_in_row(side->format, part->first_row);
      char *codes = kvedge_codes_at(last, token % layer->last->config.capacity);
      for (int head = 0; head < side->num_kv_heads; head++, codes += last->row_bytes) {
        const kvedge_side one = kvedge_side_of_head(side, part->first_row, head);
        kvedge_rows_load(&one, place, place + 1, row);
        last->format->encode(&last->shape, row, 1, codes, NULL);
      }
    }
  }
}

void kvedge_ranges_append(kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens,
                          const kvedge_bounds *bound) {
  const int64_t ring = ring_of(layer), kept = kvedge_kept_rows(&layer->config);
  const int64_t stop = atomic_load_explicit(&layer->stop, memory_order_relaxed), end = stop + num_tokens;
  const int in_runs = kvedge_in_runs(&layer->config);
  const int64_t cut = in_runs ? stop & -KVEDGE_RUN : stop;
  int64_t last_from = atomic_load_explicit(&layer->last_from, memory_order_relaxed);
  const int is_behind = last_from > cut; /* the layer went back further than its last tokens reach */
  const int drains = ring && (is_behind || end > layer->drained_from + ring);
  if (drains) drain(layer);
  if (ring && is_behind) {
    last_from = cut;
    reload(layer, cut, stop);
  }
  const kvedge_bounds *of_last = &layer->last->checked;
  if (ring) {
    kvedge_raise_bound(&layer->last->key_bound, of_last->keys);
    kvedge_raise_bound(&layer->last->value_bound, of_last->values);
  }

  /* First tokens. */
  const int64_t first_row = atomic_load_explicit(&layer->first_row, memory_order_relaxed);
  int64_t num_first =
      smaller(atomic_load_explicit(&layer->num_first, memory_order_relaxed), larger(0, stop - first_row));
  const int64_t more = smaller(num_tokens, layer->first_stop - stop);
  if (more > 0 && first_row + num_first == stop) {
    kvedge_rows_store(&layer->first->keys, keys, more, num_first);
    kvedge_rows_store(&layer->first->values, values, more, num_first);
    kvedge_raise_bound(&layer->first->key_bound, of_last->keys);
    kvedge_raise_bound(&layer->first->value_bound, of_last->values);
    num_first += more;
  }

  /* Last tokens, and the body. */
  if (in_runs) {
    for (int64_t at = stop, next; at < end; at = next) {
      next = smaller(end, (at & -KVEDGE_RUN) + KVEDGE_RUN);
      store_in_ring(layer->last, keys, values, at - stop, at, next - at);
      if (next % KVEDGE_RUN == 0) encode_run(layer, next - KVEDGE_RUN);
    }
  } else {
    const int64_t from = larger(stop, end - ring);
    if (ring) store_in_ring(layer->last, keys, values, from - stop, from, end - from);
    kvedge_rows_store(&layer->keys, keys, num_tokens, stop);
    kvedge_rows_store(&layer->values, values, num_tokens, stop);
    kvedge_raise_bound(&layer->key_bound, bound->keys);
    kvedge_raise_bound(&layer->value_bound, bound->values);
  }

  last_from = larger(larger(last_from, end - ring), (layer->config.recent ? stop : end) - kept);
  layer->last_written = end;
  kvedge_raise_written(layer, in_runs ? larger(cut, end & -KVEDGE_RUN) : end);
  publish(layer, end, ring ? last_from : end, num_first);
  if (drains) {
    layer->drained_from = last_from;
    atomic_store(&layer->is_draining, 0);
  }
}

/* ---- The writer: going back and forth, taking over -------------------------------------------------------------------- */

void kvedge_ranges_set_stop(kvedge_layer *layer, int64_t stop) {
  const int64_t now = atomic_load_explicit(&layer->stop, memory_order_relaxed);
  int64_t last_from = atomic_load_explicit(&layer->last_from, memory_order_relaxed);
  /* Of more tokens a copy of the layer would not have the last ones. */
  if (stop < now) last_from = larger(last_from, now - kvedge_kept_rows(&layer->config));
  if (stop > layer->last_written || !ring_of(layer)) last_from = stop;
  layer->drained_from = 0; /* the layer is its writer's alone, and rows are written again */
  publish(layer, stop, last_from, atomic_load_explicit(&layer->num_first, memory_order_relaxed));
}

static void raise_bounds(kvedge_layer *plain, int64_t row, int64_t num_tokens) {
  kvedge_raise_bound(&plain->key_bound, kvedge_rows_bound(&plain->keys, row, row + num_tokens));
  kvedge_raise_bound(&plain->value_bound, kvedge_rows_bound(&plain->values, row, row + num_tokens));
}

kvedge_status kvedge_layer_set_ranges(kvedge_layer *layer, const kvedge_ranges *r) {
  if (!layer || !r || !kvedge_has_ranges(layer)) return KVEDGE_ERROR_ARGUMENT;
  const int64_t ring = ring_of(layer), whole = r->stop & -KVEDGE_RUN;
  if (r->start < 0 || r->stop < r->start || r->stop > layer->config.capacity) return KVEDGE_ERROR_ARGUMENT;
  if (r->last_from < 0 || r->last_from > r->stop || r->stop - r->last_from > ring) return KVEDGE_ERROR_ARGUMENT;
  if (r->num_first < 0 || r->num_first > layer->config.sinks || r->first_row < 0) return KVEDGE_ERROR_ARGUMENT;
  const int in_runs = kvedge_in_runs(&layer->config);
  const int64_t encoded = !in_runs || r->last_from > whole ? r->stop : whole;
  kvedge_quiesce();
  layer->written = (encoded + KVEDGE_RUN - 1) & -KVEDGE_RUN;
  if (!in_runs) layer->written = encoded;
  layer->last_written = r->stop;
  layer->first_stop = r->first_stop;
  layer->drained_from = 0;
  atomic_store_explicit(&layer->start, r->start, memory_order_relaxed);
  atomic_store_explicit(&layer->first_row, r->first_row, memory_order_relaxed);
  publish(layer, r->stop, r->last_from, r->num_first);
  const int64_t first = in_runs ? r->start & -KVEDGE_RUN : r->start;
  if (first < encoded) raise_bounds(layer, first, encoded - first);
  raise_bounds(layer->first, 0, r->num_first);
  for (int64_t at = r->last_from, n; at < r->stop; at += n) {
    n = smaller(r->stop - at, ring - at % ring);
    raise_bounds(layer->last, at % ring, n);
  }
  return KVEDGE_OK;
}

void kvedge_ranges_copy(kvedge_layer *layer, const kvedge_layer *from, const kvedge_ranges *r, int64_t written,
                        int64_t row) {
  const int64_t to = ring_of(layer), of = ring_of(from), since = larger(larger(r->last_from, row), written - to);
  kvedge_copy_tokens(from->first, 0, layer->first, 0, r->num_first);
  for (int64_t at = since, n; to && at < written; at += n) {
    n = smaller(written - at, smaller(of - at % of, to - (at - row) % to));
    kvedge_copy_tokens(from->last, at % of, layer->last, (at - row) % to, n);
  }
  kvedge_copy_bounds(from->first, layer->first), kvedge_copy_bounds(from->last, layer->last),
      kvedge_copy_bounds(from, layer);
  layer->last_written = written - row;
  layer->written = kvedge_in_runs(&layer->config) ? (written - row + KVEDGE_RUN - 1) & -KVEDGE_RUN : written - row;
  layer->first_stop = from->first_stop - row;
  layer->drained_from = 0;
  atomic_store_explicit(&layer->start, r->start - row, memory_order_relaxed);
  atomic_store_explicit(&layer->first_row, r->first_row - row, memory_order_relaxed);
  publish(layer, r->stop - row, (to ? since : r->stop) - row, r->num_first);
}

kvedge_ranges kvedge_ranges_written(const kvedge_layer *layer) {
  kvedge_ranges r = kvedge_ranges_now(layer);
  r.last_from = atomic_load_explicit(&layer->last_from, memory_order_relaxed);
  r.num_first = atomic_load_explicit(&layer->num_first, memory_order_relaxed);
  return r;
}

/* ---- The writer: moving tokens within the layer ------------------------------------------------------------------------ */

void kvedge_ranges_compact(kvedge_layer *layer) {
  kvedge_ranges r = kvedge_ranges_written(layer);
  const int64_t ring = larger(ring_of(layer), KVEDGE_RUN),
                by = r.start / ring * ring; /* rows stay where they are in the ring */
  if (by == 0) return;
  kvedge_quiesce();
  kvedge_copy_tokens(layer, by, layer, 0, layer->written - by);
  layer->written -= by, layer->last_written -= by, layer->first_stop -= by, layer->drained_from = 0;
  atomic_store_explicit(&layer->start, r.start - by, memory_order_relaxed);
  atomic_store_explicit(&layer->first_row, r.first_row - by, memory_order_relaxed);
  publish(layer, r.stop - by, larger(0, r.last_from - by), r.num_first);
}

void kvedge_ranges_keep(kvedge_layer *layer, const kvedge_layer *ring, const int64_t *tokens, int64_t num_tokens) {
  const kvedge_ranges r = kvedge_ranges_now(layer);
  const int64_t rows = ring_of(layer);
  int64_t last_from = r.start + num_tokens, num_first = 0;
  for (int64_t i = 0; i < num_tokens; i++) {
    const int64_t from = r.start + tokens[i], to = r.start + i;
    if (from >= r.first_row && from < r.first_row + r.num_first && num_first == i) {
      kvedge_copy_tokens(layer->first, from - r.first_row, layer->first, i, 1);
      num_first++;
    }
    if (from < r.last_from) continue;
    last_from = smaller(last_from, to);
    kvedge_copy_tokens(ring, from % rows, layer->last, to % rows, 1);
  }
  layer->last_written = r.start + num_tokens, layer->drained_from = 0;
  atomic_store_explicit(&layer->first_row, r.start, memory_order_relaxed);
  publish(layer, r.start + num_tokens, last_from, num_first);
}
