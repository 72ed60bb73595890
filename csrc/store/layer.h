/* What a kvedge_layer is made of; private to csrc/. */
#ifndef KVEDGE_LAYER_H
#define KVEDGE_LAYER_H

#include <stdatomic.h>
#include <string.h>

#include "system/bits.h"
#include "kernels/kernels.h"
#include "kvedge.h"

struct kvedge_layer {
  kvedge_layer_config config; /* group_size is never 0 here, nor above head_dim */
  int num_groups;             /* scales per row; 0 for float32 */
  kvedge_slabs slabs;
  /* Readers look at len first: what lies below it, and both bounds, is then written. */
  _Atomic int64_t len;
  /* Rows below it have been written. They may lie above len, where a caller can return to them with set_len. */
  int64_t written;
  /* At least the largest scale (float32: magnitude) stored; attention scales by their exponents, so
   * that neither huge nor tiny caches leave float's range. */
  _Atomic float key_bound, value_bound;
  int has_key_offset;
  float key_offset[]; /* (num_kv_heads, head_dim), int8 only */
};

static inline size_t kvedge_element_size(const kvedge_layer_config *config) {
  return config->format == KVEDGE_INT8 ? sizeof(int8_t) : sizeof(float);
}

static inline size_t kvedge_scale_size(const kvedge_layer_config *config) {
  return config->scale_type == KVEDGE_SCALE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

static inline size_t kvedge_align(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The largest magnitude of n floats, as the bits of a float; KVEDGE_NOT_FINITE or more: not finite. */
#define KVEDGE_NOT_FINITE 0x7f800000u

/* quantize.c: rows of one array of a layer, from float to storage and back. */

/* Checks num_tokens tokens without writing anything; *largest is what their bound will be. */
kvedge_status kvedge_rows_check(const kvedge_layer *layer, const float *rows, int64_t num_tokens,
                                const float *offset, float *largest);
/* Stores rows that passed the check as tokens position... */
void kvedge_rows_store(const kvedge_layer *layer, const float *rows, int64_t num_tokens,
                       const float *offset, void *codes, void *scales, int64_t position);
void kvedge_rows_load(const kvedge_layer *layer, const void *codes, const void *scales,
                      const float *offset, int64_t start, int64_t stop, float *out);
/* The bound of rows that are stored already. */
float kvedge_rows_bound(const kvedge_layer *layer, const void *codes, const void *scales, int64_t start,
                        int64_t stop);

#endif
