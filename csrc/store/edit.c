/* What is done to a layer's tokens once they are stored: where they lie, copies, room, keeping some of them, moving keys to
 * other positions. All but copying need the layer alone. */
#include <math.h>
#include <string.h>

#include "store/ranges.h"
#include "system/float_mode.h"

/* ---- Ranges ---------------------------------------------------------------------------------- */

void kvedge_layer_get_ranges(const kvedge_layer *layer, kvedge_ranges *ranges) {
  if (kvedge_has_ranges(layer)) {
    *ranges = kvedge_ranges_now(layer);
    return;
  }
  *ranges = (kvedge_ranges){0};
  ranges->stop = kvedge_layer_range(layer, &ranges->start) + ranges->start;
  ranges->last_from = ranges->stop;
}

kvedge_status kvedge_layer_adopt(kvedge_layer *layer, const kvedge_layer *from, int64_t row) {
  if (!layer || !from || layer == from || kvedge_layer_len(layer) > 0 || row < 0) return KVEDGE_ERROR_ARGUMENT;
  if (kvedge_has_ranges(layer) != kvedge_has_ranges(from)) return KVEDGE_ERROR_ARGUMENT;
  kvedge_ranges r;
  kvedge_layer_get_ranges(from, &r);
  if (row > r.start || r.stop - row > layer->config.capacity) return KVEDGE_ERROR_ARGUMENT;
  if (kvedge_has_ranges(from)) {
    if (row & (kvedge_row_tokens(from) - 1)) return KVEDGE_ERROR_ARGUMENT;
    int64_t last_written;
    kvedge_hold(from); /* it may be appended to meanwhile */
    r = kvedge_ranges_written(from, &last_written);
    kvedge_ranges_copy(layer, from, &r, last_written, row);
    kvedge_release(from);
    return KVEDGE_OK;
  }
  kvedge_copy_bounds(from, layer);
  layer->written = from->written - row;
  atomic_store_explicit(&layer->start, r.start - row, memory_order_relaxed);
  atomic_store_explicit(&layer->stop, r.stop - row, memory_order_release);
  return KVEDGE_OK;
}

/* ---- Copies ---------------------------------------------------------------------------------- */

int kvedge_stored_alike(const kvedge_layer_config *a, const kvedge_layer_config *b) {
  if (a->format != b->format || kvedge_side_format(a, 1) != kvedge_side_format(b, 1)) return 0;
  if (a->num_kv_heads != b->num_kv_heads || a->value_rotation != b->value_rotation) return 0;
  if (a->head_dim != b->head_dim || a->value_head_dim != b->value_head_dim) return 0;
  if (a->recent != b->recent || a->sinks != b->sinks || a->recent_format != b->recent_format) return 0;
  return !kvedge_has_scales(a) || (a->group_size == b->group_size && a->scale_type == b->scale_type);
}

kvedge_status kvedge_layer_copy(const kvedge_layer *from, kvedge_layer *to) {
  KVEDGE_FLOAT_MODE;
  if (!from || !to || from == to || kvedge_layer_len(to) > 0 || !kvedge_stored_alike(&from->config, &to->config))
    return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  const int64_t len = kvedge_layer_range(from, &row);
  if (kvedge_has_ranges(from)) row &= -KVEDGE_RUN;
  kvedge_status status = KVEDGE_OK;
  if (!kvedge_has_ranges(from)) {
    if (len > to->config.capacity) return KVEDGE_ERROR_CAPACITY;
    status = kvedge_layer_compact(to); /* its first row may lie anywhere */
  }
  if (status == KVEDGE_OK && (from->keys.offset || to->keys.offset))
    status = kvedge_layer_set_key_offset(to, from->keys.offset);
  if (status == KVEDGE_OK) status = kvedge_layer_set_key_scale(to, from->keys.scale);
  if (status != KVEDGE_OK) return status;
  if (kvedge_has_ranges(from)) {
    kvedge_ranges ranges;
    kvedge_hold(from);
    kvedge_layer_get_ranges(from, &ranges);
    const int fits = ranges.stop - row <= to->config.capacity;
    if (fits) {
      kvedge_copy_tokens(from, row, to, 0, ranges.stop - row);
      kvedge_ranges_copy(to, from, &ranges, ranges.stop, row);
    }
    kvedge_release(from);
    return fits ? KVEDGE_OK : KVEDGE_ERROR_CAPACITY;
  }
  kvedge_copy_tokens(from, row, to, 0, len);
  return kvedge_layer_set_len(to, len);
}

/* ---- Room ------------------------------------------------------------------------------------ */

kvedge_status kvedge_layer_reserve(kvedge_layer **grown, int64_t num_tokens) {
  enum { LEAST = 256 }; /* tokens */
  if (!grown || !*grown || num_tokens < 0 || !(*grown)->allocator.allocate) return KVEDGE_ERROR_ARGUMENT;
  kvedge_layer *layer = *grown, *next;
  int64_t start;
  const int64_t len = kvedge_layer_range(layer, &start), capacity = layer->config.capacity;
  if (num_tokens <= capacity - start - len) return KVEDGE_OK;
  if (num_tokens > INT64_MAX / 2 - len) return KVEDGE_ERROR_MEMORY;
  const int64_t tokens = len + num_tokens;
  if (tokens <= capacity / 2) return kvedge_layer_compact(layer); /* then half is free: a row is moved per token */
  kvedge_layer_config config = layer->config;
  config.capacity = tokens > LEAST / 2 ? (2 * tokens + KVEDGE_RUN - 1) / KVEDGE_RUN * KVEDGE_RUN : LEAST;
  kvedge_status status = kvedge_layer_create(&config, &layer->allocator, &next);
  if (status == KVEDGE_ERROR_ARGUMENT) return KVEDGE_ERROR_MEMORY; /* more than a layer can have */
  if (status == KVEDGE_OK) status = kvedge_layer_copy(layer, next);
  if (status != KVEDGE_OK) return status;
  kvedge_layer_destroy(layer);
  *grown = next;
  return KVEDGE_OK;
}

/* ---- Keeping some ---------------------------------------------------------------------------- */

kvedge_status kvedge_layer_keep(kvedge_layer *layer, const int64_t *tokens, int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  if (!layer || num_tokens < 0 || (num_tokens > 0 && !tokens) || kvedge_row_tokens(layer) > 1)
    return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  const int64_t len = kvedge_layer_range(layer, &row);
  for (int64_t i = 0; i < num_tokens; i++)
    if (tokens[i] < 0 || tokens[i] >= len || (i > 0 && tokens[i] <= tokens[i - 1])) return KVEDGE_ERROR_ARGUMENT;
  kvedge_quiesce(); /* a late reader may look at rows that are written over */
  if (kvedge_has_ranges(layer)) {
    kvedge_ranges_keep(layer, tokens, num_tokens);
  }
  for (int64_t i = 0, num; i < num_tokens; i += num) { /* tokens[i] >= i: what is read later is not yet written over */
    for (num = 1; i + num < num_tokens && tokens[i + num] == tokens[i] + num;) num++;
    if (tokens[i] > i) kvedge_copy_tokens(layer, row + tokens[i], layer, row + i, num);
  }
  layer->written = row + num_tokens; /* what lies above is no longer what it was */
  if (kvedge_has_ranges(layer)) return KVEDGE_OK;
  return kvedge_layer_set_len(layer, num_tokens);
}

/* ---- Moving keys to other positions ---------------------------------------------------------- */

kvedge_status kvedge_rotation_angles(double base, int dims, int64_t delta, float *cosines, float *sines) {
  KVEDGE_FLOAT_MODE;
  if (!(base > 0.0) || isinf(base) || dims < 2 || dims % 2 || dims > KVEDGE_MAX_HEAD_DIM || !cosines || !sines)
    return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < dims / 2; i++) {
    const double angle = (double)delta * pow(base, -2.0 * i / dims);
    cosines[i] = (float)cos(angle), sines[i] = (float)sin(angle);
  }
  return KVEDGE_OK;
}

int kvedge_is_rotation(const kvedge_rotation *rotation, int head_dim) {
  return rotation && rotation->cosines && rotation->sines && rotation->dims >= 2 && rotation->dims % 2 == 0 &&
         rotation->dims <= head_dim;
}

void kvedge_rotate(const kvedge_rotation *by, float *x) {
  const int half = by->dims / 2, step = by->interleaved ? 2 : 1, apart = by->interleaved ? 1 : half;
  for (int i = 0; i < half; i++) {
    float *first = x + i * step, *second = first + apart;
    const float products[4] = {*first * by->cosines[i], *second * by->sines[i], *first * by->sines[i],
                               *second * by->cosines[i]};
    *first = products[0] - products[1];
    *second = products[2] + products[3];
  }
}

/* Rotates keys of rows first..stop-1; `store` 0: only finds out whether all can be stored, and their bound. */
static kvedge_status rotate_keys(const kvedge_side *keys, int64_t first, int64_t stop, const kvedge_rotation *by,
                                 int store, float *largest) {
  float key[KVEDGE_MAX_HEAD_DIM] = {0}, bound;
  const kvedge_array array = kvedge_dense_array(key, 1, keys->shape.dim);
  for (int64_t row = first; row < stop; row++)
    for (int head = 0; head < keys->num_kv_heads; head++) {
      const kvedge_side of_head = kvedge_side_of_head(keys, row, head);
      kvedge_rows_load(&of_head, 0, 1, key);
      kvedge_rotate(by, key);
      if (store) {
        kvedge_rows_store(&of_head, &array, 1, 0);
        continue;
      }
      const kvedge_status status = kvedge_rows_check(&of_head, &array, 1, &bound);
      if (status != KVEDGE_OK) return status;
      *largest = bound > *largest ? bound : *largest;
    }
  return KVEDGE_OK;
}

typedef struct {
  kvedge_layer *layer;
  int64_t first, stop; /* rows of it */
} row_range;

/* Some tokens of a layer in its body, and where they lie apart besides: 1 to 3 ranges of rows. */
static int ranges_apart(kvedge_layer *layer, int64_t first, int64_t stop, row_range ranges[3]) {
  kvedge_ranges r;
  kvedge_layer_get_ranges(layer, &r);
  int n = 1;
  const int64_t end = r.first_row + r.num_first < stop ? r.first_row + r.num_first : stop;
  const int64_t begin = r.first_row > first ? r.first_row : first;
  if (begin < end) ranges[n++] = (row_range){layer->first, begin - r.first_row, end - r.first_row};
  const int64_t since = r.last_from > first ? r.last_from : first;
  if (since < stop) ranges[n++] = (row_range){layer->last, since - r.last_row, stop - r.last_row};
  return n;
}

kvedge_status kvedge_layer_shift(kvedge_layer *layer, int64_t first, int64_t stop, const kvedge_rotation *rotation) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !kvedge_is_rotation(rotation, layer->config.head_dim) || kvedge_row_tokens(layer) > 1)
    return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  if (first < 0 || first > stop || stop > kvedge_layer_range(layer, &row)) return KVEDGE_ERROR_ARGUMENT;
  kvedge_quiesce(); /* a late reader may look at rows that are written over */
  row_range ranges[3] = {
      {layer, row + first, row + stop}
  };
  const int n = kvedge_has_ranges(layer) ? ranges_apart(layer, row + first, row + stop, ranges) : 1;
  for (int store = 0; store < 2; store++)
    for (int i = 0; i < n; i++) {
      float largest = 0.0f;
      const kvedge_status status =
          rotate_keys(&ranges[i].layer->keys, ranges[i].first, ranges[i].stop, rotation, store, &largest);
      if (status != KVEDGE_OK) return status;
      kvedge_raise_bound(&ranges[i].layer->key_bound, largest);
    }
  return KVEDGE_OK;
}
