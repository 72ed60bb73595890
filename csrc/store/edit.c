/* What is done to a layer's tokens once they are stored: copies, room, keeping some of them, moving keys to other
 * positions. All but copying need the layer alone. */
#include <math.h>
#include <string.h>

#include "store/layer.h"
#include "system/float_mode.h"

/* ---- Copies ---------------------------------------------------------------------------------- */

static int stored_alike(const kvedge_layer_config *one, const kvedge_layer_config *other) {
  return one->format == other->format && one->value_format == other->value_format &&
         one->scale_type == other->scale_type && one->num_kv_heads == other->num_kv_heads &&
         one->head_dim == other->head_dim && one->value_head_dim == other->value_head_dim &&
         one->group_size == other->group_size && one->value_rotation == other->value_rotation;
}

kvedge_status kvedge_layer_copy(const kvedge_layer *from, kvedge_layer *to) {
  KVEDGE_FLOAT_MODE;
  if (!from || !to || from == to || kvedge_layer_len(to) > 0 || !stored_alike(&from->config, &to->config))
    return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  const int64_t len = kvedge_layer_range(from, &row);
  if (len > to->config.capacity) return KVEDGE_ERROR_CAPACITY;
  kvedge_status status = kvedge_layer_compact(to); /* its first row may lie anywhere */
  if (status == KVEDGE_OK && (from->keys.offset || to->keys.offset))
    status = kvedge_layer_set_key_offset(to, from->keys.offset);
  if (status == KVEDGE_OK) status = kvedge_layer_set_key_scale(to, from->keys.scale);
  if (status != KVEDGE_OK) return status;
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
  kvedge_status status = kvedge_layer_create_with(&config, &layer->allocator, &next);
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
  kvedge_quiesce();                                    /* a late reader may look at rows that are written over */
  for (int64_t i = 0, num; i < num_tokens; i += num) { /* tokens[i] >= i: what is read later is not yet written over */
    for (num = 1; i + num < num_tokens && tokens[i + num] == tokens[i] + num;) num++;
    if (tokens[i] > i) kvedge_copy_tokens(layer, row + tokens[i], layer, row + i, num);
  }
  kvedge_status status = kvedge_layer_set_len(layer, num_tokens);
  layer->written = row + num_tokens; /* what lies above is no longer what it was */
  return status;
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

/* The keys of one token and head, as a side of one row; heads count through all tokens. */
static kvedge_side side_of_row(const kvedge_side *keys, int64_t row, int head) {
  kvedge_side one = *keys;
  one.num_kv_heads = 1;
  one.codes = kvedge_codes_at(keys, row) + (size_t)head * keys->row_bytes;
  one.scales = kvedge_scales_at(keys, row) + (size_t)head * keys->scale_row_bytes;
  if (one.offset) one.offset += head * keys->shape.dim;
  if (one.scale) one.scale += head * keys->shape.dim;
  return one;
}

/* Rotates keys of rows first..stop-1; `store` 0: only finds out whether all can be stored, and their bound. */
static kvedge_status rotate_keys(const kvedge_side *keys, int64_t first, int64_t stop, const kvedge_rotation *by,
                                 int store, float *largest) {
  float key[KVEDGE_MAX_HEAD_DIM] = {0}, bound;
  const kvedge_array array = kvedge_dense_array(key, 1, keys->shape.dim);
  for (int64_t row = first; row < stop; row++)
    for (int head = 0; head < keys->num_kv_heads; head++) {
      const kvedge_side one = side_of_row(keys, row, head);
      kvedge_rows_load(&one, 0, 1, key);
      kvedge_rotate(by, key);
      if (store) {
        kvedge_rows_store(&one, &array, 1, 0);
        continue;
      }
      const kvedge_status status = kvedge_rows_check(&one, &array, 1, &bound);
      if (status != KVEDGE_OK) return status;
      *largest = bound > *largest ? bound : *largest;
    }
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_shift(kvedge_layer *layer, int64_t first, int64_t stop, const kvedge_rotation *rotation) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !kvedge_is_rotation(rotation, layer->config.head_dim) || kvedge_row_tokens(layer) > 1)
    return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  if (first < 0 || first > stop || stop > kvedge_layer_range(layer, &row)) return KVEDGE_ERROR_ARGUMENT;
  kvedge_quiesce(); /* a late reader may look at rows that are written over */
  float largest = 0.0f;
  const kvedge_status status = rotate_keys(&layer->keys, row + first, row + stop, rotation, 0, &largest);
  if (status != KVEDGE_OK) return status;
  kvedge_raise_bound(&layer->key_bound, largest);
  return rotate_keys(&layer->keys, row + first, row + stop, rotation, 1, &largest);
}
