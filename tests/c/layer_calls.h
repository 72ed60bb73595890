/* Calls on a layer with dense arrays, in slices. Included by tests. */
#ifndef KVEDGE_TEST_LAYER_CALLS_H
#define KVEDGE_TEST_LAYER_CALLS_H

#include "kvedge.h"

static inline kvedge_array dense(const float *x, int num_heads, int dim) { /* (rows, num_heads, dim) */
  const ptrdiff_t row = (ptrdiff_t)sizeof(float) * dim;
  return (kvedge_array){(void *)(uintptr_t)x, KVEDGE_TYPE_FLOAT32, row * num_heads, row};
}

static inline kvedge_attention_call call_on(const kvedge_layer *layer, const float *query, int64_t num_rows,
                                            int num_heads, const kvedge_attention_options *options, float *out,
                                            float *lse) {
  kvedge_layer_config config;
  kvedge_layer_describe(layer, &config, NULL);
  return (kvedge_attention_call){.layer = layer,
                                 .query = dense(query, num_heads, config.head_dim),
                                 .num_rows = num_rows,
                                 .num_heads = num_heads,
                                 .out = dense(out, num_heads, config.value_head_dim),
                                 .lse = lse,
                                 .options = options};
}

/* On a part of a layer, such as the blocks of a sequence. */
static inline kvedge_attention_call call_on_part(const kvedge_part *part, const float *query, int64_t num_rows,
                                                 int num_heads, const kvedge_attention_options *options, float *out,
                                                 float *lse) {
  kvedge_attention_call call = call_on(part->layer, query, num_rows, num_heads, options, out, lse);
  call.layer = NULL, call.parts = part, call.num_parts = 1;
  return call;
}

#endif
