/* What a kvedge_layer is made of; private to csrc/. */
#ifndef KVEDGE_LAYER_STRUCT_H
#define KVEDGE_LAYER_STRUCT_H

#include <stdatomic.h>

#include "kvedge.h"
#include "store/rows.h"

/* At least the largest magnitude of some stored rows. */
typedef struct {
  float keys, values;
} kvedge_bounds;

struct kvedge_layer {
  kvedge_layer_config config; /* no 0 here: group_size is at most the wider of head_dim and value_head_dim */
  kvedge_side keys, values;   /* their shapes; keys.offset and .scale are NULL or lie below */
  /* The tokens are rows start..stop-1. Readers look at these first, by kvedge_layer_range: what lies below stop, and
   * both bounds, is then written. Beside readers both only rise. */
  _Atomic int64_t start, stop;
  kvedge_bounds
      checked; /* kvedge_layers_append: bounds of this layer's rows, between checking all layers and storing */
  /* Rows below it have been written. They may lie above stop, where a caller can return to them with set_len. */
  int64_t written;
  /* At least the largest scale (formats without: magnitude) stored; attention scales by their exponents, so that
   * neither huge nor tiny caches leave float's range. */
  _Atomic float key_bound, value_bound;
  /* Of a layer of three ranges; else `first` and `last` are NULL. See store/ranges.h. */
  kvedge_layer *first, *last;
  _Atomic uint32_t version;  /* odd while the writer changes stop and the next five */
  _Atomic int64_t last_from; /* the first row whose token is among the last ones, up to stop; above stop: none is */
  _Atomic int64_t first_row, num_first; /* tokens of rows first_row.. that lie in rows 0..num_first-1 of `first` */
  int64_t first_stop;                   /* tokens of rows below it are first ones */
  _Atomic int64_t last_row;             /* whose token lies in row 0 of `last`; changes while no call reads */
  _Atomic int64_t last_written; /* rows from last_from up to it are in `last`; above stop where the layer went back */
  _Atomic int num_readers, is_draining;
  _Atomic uint32_t process;   /* kvedge_process() of the readers */
  kvedge_allocator allocator; /* that gave its memory; allocate is NULL: the caller brought it */
  float key_vectors[];        /* (2, num_kv_heads, head_dim): the key offset and the key scale, where they are set */
};

/* Tokens that come together, at multiples of as many rows: 1, or where keys or values are encoded in runs, those of one.
 * A power of two. */
static inline int kvedge_row_tokens(const kvedge_layer *layer) {
  const int of_keys = layer->keys.format->row_tokens, of_values = layer->values.format->row_tokens;
  return of_keys > of_values ? of_keys : of_values;
}

/* May blocks of a pool have so many tokens? */
static inline int kvedge_is_block_size(const kvedge_layer *pool, int64_t block_size) {
  return !pool->last && block_size >= 1 && block_size <= pool->config.capacity &&
         block_size % kvedge_row_tokens(pool) == 0;
}

static inline void kvedge_raise_bound(_Atomic float *bound, float value) {
  if (value > atomic_load_explicit(bound, memory_order_relaxed))
    atomic_store_explicit(bound, value, memory_order_relaxed);
}

static inline void kvedge_copy_bounds(const kvedge_layer *from, kvedge_layer *to) {
  kvedge_raise_bound(&to->key_bound, atomic_load_explicit(&from->key_bound, memory_order_relaxed));
  kvedge_raise_bound(&to->value_bound, atomic_load_explicit(&from->value_bound, memory_order_relaxed));
}

static inline void kvedge_raise_written(kvedge_layer *layer, int64_t stop) {
  if (stop > layer->written) layer->written = stop;
}

/* Copies tokens from a row of one layer on to another that is stored alike, or within one;
 * readers of those rows are gone. */
static inline void kvedge_copy_tokens(const kvedge_layer *from, int64_t row, kvedge_layer *to, int64_t at,
                                      int64_t num_tokens) {
  kvedge_copy_rows(&from->keys, row, &to->keys, at, num_tokens);
  kvedge_copy_rows(&from->values, row, &to->values, at, num_tokens);
}

/* Do the bytes of one layer mean the same in another? Of configs that are complete. */
int kvedge_stored_alike(const kvedge_layer_config *a, const kvedge_layer_config *b);

/* Can it turn heads of so many channels? */
int kvedge_is_rotation(const kvedge_rotation *rotation, int head_dim);

/* Turns pairs of channels of a head, each product rounded to float as NumPy does. */
void kvedge_rotate(const kvedge_rotation *by, float *x);

static inline size_t kvedge_align(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Takes `bytes` from a region that starts at base (NULL: only counts). */
static inline void *kvedge_take(char *base, size_t *used, size_t bytes) {
  void *at = base ? base + *used : NULL;
  *used += kvedge_align(bytes);
  return at;
}

#endif
