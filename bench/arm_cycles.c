/* Runs one call of attention between two marks, for arm_cycles.py to trace.
 *
 *   arm_cycles FORMAT BITS HEADS KV_HEADS DIM TOKENS PRECISION
 *
 * BITS are those of a channel, PRECISION is precision_bits.
 *
 * The rows are filled in and not appended: a trace has every instruction. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvedge.h"

void mark_begin(void), mark_end(void);
__attribute__((noinline)) void mark_begin(void) { __asm__ volatile(""); }
__attribute__((noinline)) void mark_end(void) { __asm__ volatile(""); }

static void check(kvedge_status status) {
  if (status == KVEDGE_OK) return;
  fprintf(stderr, "%s\n", kvedge_strerror(status));
  exit(1);
}

int main(int argc, char **argv) {
  if (argc != 8) {
    fprintf(stderr, "usage: arm_cycles FORMAT BITS HEADS KV_HEADS DIM TOKENS PRECISION\n");
    return 2;
  }
  const int bits = atoi(argv[2]), num_heads = atoi(argv[3]), num_kv_heads = atoi(argv[4]), dim = atoi(argv[5]);
  const kvedge_layer_config config = {.format = (kvedge_format)atoi(argv[1]),
                                      .scale_type = KVEDGE_SCALE_FLOAT16,
                                      .capacity = atoll(argv[6]),
                                      .num_kv_heads = num_kv_heads,
                                      .head_dim = dim};
  kvedge_layer *layer;
  check(kvedge_layer_create(&config, NULL, &layer));
  kvedge_slabs slabs;
  kvedge_layer_describe(layer, NULL, &slabs);
  const size_t row = (size_t)num_kv_heads * (size_t)(dim * bits / 8);
  memset(slabs.key_codes, 0x3c, (size_t)config.capacity * row); /* about 1, or 0.01, in every format */
  memset(slabs.value_codes, 0x3c, (size_t)config.capacity * row);
  for (int64_t i = 0; i < config.capacity * num_kv_heads && slabs.key_scales; i++)
    ((uint16_t *)slabs.key_scales)[i] = ((uint16_t *)slabs.value_scales)[i] = 0x1400; /* 0.001 */
  check(kvedge_layer_set_len(layer, config.capacity));
  float *query = malloc((size_t)num_heads * (size_t)dim * sizeof *query);
  float *out = malloc((size_t)num_heads * (size_t)dim * sizeof *out);
  if (!query || !out) return 1;
  for (int i = 0; i < num_heads * dim; i++) query[i] = i % 2 ? 1.0f : -1.0f;
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  options.precision_bits = atoi(argv[7]);
  mark_begin();
  const kvedge_status status = kvedge_attend(layer, query, 1, num_heads, &options, 1, out, NULL);
  mark_end();
  check(status);
  printf("%s\n", kvedge_isa_name());
  free(query), free(out);
  kvedge_layer_destroy(layer);
  return 0;
}
