/* Digests of what the libkvedge it is linked to stores and computes, a line per storage format and path; before that, whether
 * loading the library changed how this process treats denormals. Builds with other flags print the same. */
#include <kvedge.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 320, HEADS = 2, DIM = 48, QUERY_HEADS = 6, ROWS = 3 };

static const int formats[] = {KVEDGE_INT8,     KVEDGE_FLOAT32, KVEDGE_FLOAT16, KVEDGE_BFLOAT16, KVEDGE_FP8_E4M3,
                              KVEDGE_FP8_E5M2, KVEDGE_INT4,    KVEDGE_KIVI2,   KVEDGE_KIVI4,    KVEDGE_KIVI8,
                              KVEDGE_GRID2,    KVEDGE_GRID3,   KVEDGE_GRID4,   KVEDGE_GRID5,    KVEDGE_GRID6,
                              KVEDGE_GRID7,    KVEDGE_GRID8};

/* FNV-1a. */
static uint64_t digest(const void *bytes, size_t n, uint64_t hash) {
  for (const unsigned char *at = bytes; n--; at++) hash = (hash ^ *at) * 0x100000001b3u;
  return hash;
}

/* From -1 to 1, some of them -0; a row in eight is small. */
static void fill(float *out, int rows, uint32_t seed) {
  for (int i = 0; i < rows * DIM; i++) {
    seed = seed * 1664525u + 1013904223u;
    const float x = (float)((int32_t)seed >> 8) / 8388608.0f;
    out[i] = seed >> 24 == 7 ? -0.0f : (i / DIM) % 8 == 7 ? x * 0.001f : x;
  }
}

static void check(kvedge_status status, const char *what) {
  if (status == KVEDGE_OK) return;
  fprintf(stderr, "%s: %s\n", what, kvedge_strerror(status));
  exit(1);
}

/* Plain, causal, within a window, with an explicit scale, a softcap, a mask, a bias, slopes, sinks. */
static uint64_t attend_every_way(const kvedge_layer *layer, const float *query) {
  static float out[ROWS * QUERY_HEADS * DIM], lse[ROWS * QUERY_HEADS], bias[TOKENS];
  static const float slopes[QUERY_HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f};
  static uint8_t mask[TOKENS];
  for (int i = 0; i < TOKENS; i++) mask[i] = i % 3 != 0, bias[i] = (float)(i % 7) * 0.25f;
  uint64_t hash = 0xcbf29ce484222325u;
  for (int way = 0; way < 9; way++) {
    kvedge_attention_options options;
    kvedge_attention_defaults(&options);
    if (way == 1) options.causal = 1;
    if (way == 2) options.causal = 1, options.window = 40, options.sink_tokens = 4;
    if (way == 3) options.scale = 3.5f;
    if (way == 4) options.softcap = 2.0f;
    if (way == 5) options.mask = mask, options.mask_strides[2] = 1;
    if (way == 6) options.bias = bias, options.bias_strides[2] = 1;
    if (way == 7) options.alibi_slopes = slopes;
    if (way == 8) options.sink_logits = slopes;
    check(kvedge_attend(layer, query, ROWS, QUERY_HEADS, &options, 1, out, lse), "attend");
    hash = digest(lse, sizeof lse, digest(out, sizeof out, hash));
  }
  return hash;
}

int main(void) {
#if defined(__SSE__)
  printf("mxcsr %x\n", __builtin_ia32_stmxcsr() & 0x8040u); /* FTZ, DAZ */
#endif
  static float keys[TOKENS * HEADS * DIM], values[TOKENS * HEADS * DIM], query[ROWS * QUERY_HEADS * DIM];
  fill(keys, TOKENS * HEADS, 1);
  fill(values, TOKENS * HEADS, 2);
  fill(query, ROWS * QUERY_HEADS, 3);
  const char *path;
  for (int index = 0; (path = kvedge_isa_compiled(index)); index++) {
    if (kvedge_isa_available(path, NULL)) {
      check(kvedge_select_isa(path, NULL), path);
      for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const kvedge_layer_config config = {
            .format = (kvedge_format)formats[i], .capacity = TOKENS, .num_kv_heads = HEADS, .head_dim = DIM};
        const size_t bytes = kvedge_layer_bytes(&config);
        char *memory = aligned_alloc(64, bytes);
        if (!memory) return 1;
        memset(memory, 0, bytes);
        kvedge_layer *layer;
        kvedge_slabs slabs;
        check(kvedge_layer_init(memory, bytes, &config, NULL, &layer), "init");
        check(kvedge_layer_append(layer, keys, values, TOKENS), "append");
        kvedge_layer_describe(layer, NULL, &slabs);
        const char *codes = slabs.key_codes; /* the first of the arrays, which end the block */
        printf("%s %d: %016llx %016llx\n", path, formats[i],
               (unsigned long long)digest(codes, (size_t)(memory + bytes - codes), 0xcbf29ce484222325u),
               (unsigned long long)attend_every_way(layer, query));
        free(memory);
      }
    }
  }
  return 0;
}
