/* Runs one decode step, or one prompt's intake, for callgrind to count: see instructions.py.
 *
 *   instructions HQ HKV D TOKENS KEYS VALUES     KEYS, VALUES: formats by name
 *
 * and prints the path and the bytes stored.
 *
 * callgrind is told to count within kvedge_attend or within kvedge_layer_append, in all calls of it
 * together; so each is called exactly once. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvedge.h"

/* Numbers between -1 and 1, the same on every machine (Numerical Recipes' generator). */
static float next_value(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(int32_t)*state * (1.0f / 2147483648.0f);
}

static float *values(size_t count, uint32_t seed) {
  float *made = malloc(count * sizeof *made);
  if (!made) exit(1);
  for (size_t i = 0; i < count; i++) made[i] = next_value(&seed);
  return made;
}

static void check(kvedge_status status) {
  if (status == KVEDGE_OK) return;
  fprintf(stderr, "%s\n", kvedge_strerror(status));
  exit(1);
}

static kvedge_format format_of(const char *name) {
  static const struct {
    const char *name;
    kvedge_format format;
  } formats[] = {
      {"int8",  KVEDGE_INT8 },
      {"kivi4", KVEDGE_KIVI4},
      {"kivi8", KVEDGE_KIVI8},
  };
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (strcmp(name, formats[i].name) == 0) return formats[i].format;
  fprintf(stderr, "unknown format: %s\n", name);
  exit(2);
}

int main(int argc, char **argv) {
  if (argc != 7) {
    fprintf(stderr, "usage: instructions HQ HKV D TOKENS KEYS VALUES\n");
    return 2;
  }
  int num_heads = atoi(argv[1]), num_kv_heads = atoi(argv[2]), head_dim = atoi(argv[3]);
  int64_t tokens = atoll(argv[4]);
  kvedge_layer_config config = {.format = format_of(argv[5]),
                                .value_format = KVEDGE_VALUES(format_of(argv[6])),
                                .capacity = tokens,
                                .num_kv_heads = num_kv_heads,
                                .head_dim = head_dim};
  size_t row = (size_t)num_kv_heads * (size_t)head_dim;
  float *keys = values((size_t)tokens * row, 1);                  /* [tokens][num_kv_heads][head_dim] */
  float *vals = values((size_t)tokens * row, 2);                  /* the same */
  float *query = values((size_t)num_heads * (size_t)head_dim, 3); /* [num_heads][head_dim] */
  float *out = values((size_t)num_heads * (size_t)head_dim, 4);   /* the same */
  kvedge_layer *layer;
  check(kvedge_layer_create(&config, &layer));
  check(kvedge_layer_append(layer, keys, vals, tokens));
  check(kvedge_attend(layer, query, 1, num_heads, NULL, 1, out, NULL));
  printf("%s %zu\n", kvedge_isa_name(), kvedge_layer_bytes(&config) - kvedge_layer_header_bytes(&config));
  kvedge_layer_destroy(layer);
  free(keys), free(vals), free(query), free(out);
  return 0;
}
