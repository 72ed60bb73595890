/* A decode loop in C that brings its own threads and its own memory.
 *
 *   make run         or compile it with all of csrc: the Makefile is one line
 *
 * The runtime below stands for yours: a fixed team of threads that meets at a barrier. kvedge only
 * says how many slices there are; any thread may run any slice. The result is that of kvedge_attend()
 * to the bit, which the program checks at every step.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvedge.h"

enum { NUM_THREADS = 2, NUM_HEADS = 32, NUM_KV_HEADS = 8, HEAD_DIM = 64, CAPACITY = 3000 };

typedef struct {
  pthread_barrier_t barrier;
  kvedge_slices *slices; /* of this step; NULL: go home */
  atomic_int next;       /* the next slice nobody has taken */
  atomic_int num_helpers;
} team;

static void die(const char *what, kvedge_status status) {
  fprintf(stderr, "%s: %s\n", what, kvedge_strerror(status));
  exit(1);
}

static void *allocate(size_t bytes) { /* aligned as kvedge wants it: 64 bytes, a cache line */
  void *memory = NULL;
  if (bytes == 0 || posix_memalign(&memory, 64, bytes)) die("memory", KVEDGE_ERROR_MEMORY);
  return memory;
}

static void run_slices(team *t, int thread) {
  for (int slice; (slice = atomic_fetch_add(&t->next, 1)) < kvedge_slices_count(t->slices);)
    kvedge_slices_run(t->slices, slice, /* next */ -1, thread);
}

static void *helper(void *argument) {
  team *t = argument;
  const int thread = atomic_fetch_add(&t->num_helpers, 1) + 1;
  for (;;) {
    pthread_barrier_wait(&t->barrier); /* a step is ready */
    if (!t->slices) return NULL;
    run_slices(t, thread);
    pthread_barrier_wait(&t->barrier); /* all slices are done */
  }
}

/* Stands for a model: numbers in -1..1. */
static void fill(float *x, int n, unsigned *state) {
  for (int i = 0; i < n; i++) {
    *state = *state * 1664525u + 1013904223u;
    x[i] = (float)(int)(*state >> 8 & 0xffff) / 32768.0f - 1.0f;
  }
}

int main(void) {
  kvedge_layer_config config = {
      .format = KVEDGE_INT8, .capacity = CAPACITY, .num_kv_heads = NUM_KV_HEADS, .head_dim = HEAD_DIM};
  size_t layer_bytes = kvedge_layer_bytes(&config);
  void *layer_memory = allocate(layer_bytes);
  kvedge_layer *layer;
  kvedge_status status = kvedge_layer_init(layer_memory, layer_bytes, &config, NULL, &layer);
  if (status) die("layer", status);

  float key[NUM_KV_HEADS * HEAD_DIM], value[NUM_KV_HEADS * HEAD_DIM];
  float query[NUM_HEADS * HEAD_DIM], out[NUM_HEADS * HEAD_DIM], expected[NUM_HEADS * HEAD_DIM];
  unsigned state = 1;
  size_t scratch_bytes = 0;
  void *scratch = NULL; /* of one step at a time: a runtime shares it among its layers */

  int num_slices = 0;
  const ptrdiff_t row = HEAD_DIM * sizeof(float);
  const kvedge_attention_call call = {
      .layer = layer,
      .query = {query, KVEDGE_TYPE_FLOAT32, NUM_HEADS * row, row},
      .num_rows = 1,
      .num_heads = NUM_HEADS,
      .out = {out,   KVEDGE_TYPE_FLOAT32, NUM_HEADS * row, row}
  };

  team t = {.slices = NULL};
  pthread_barrier_init(&t.barrier, NULL, NUM_THREADS);
  pthread_t helpers[NUM_THREADS - 1];
  for (int i = 0; i < NUM_THREADS - 1; i++) pthread_create(&helpers[i], NULL, helper, &t);

  for (int token = 0; token < CAPACITY; token++) {
    fill(key, NUM_KV_HEADS * HEAD_DIM, &state);
    fill(value, NUM_KV_HEADS * HEAD_DIM, &state);
    fill(query, NUM_HEADS * HEAD_DIM, &state);
    if ((status = kvedge_layer_append(layer, key, value, 1))) die("append", status);

    size_t needed = kvedge_slices_bytes(&call, 1, NUM_THREADS);
    if (needed > scratch_bytes) { /* more slices as the context grows: a few times in all */
      free(scratch);
      scratch = allocate(scratch_bytes = needed);
    }
    if ((status = kvedge_slices_init(scratch, scratch_bytes, &call, 1, NUM_THREADS, &t.slices))) die("slices", status);
    num_slices = kvedge_slices_count(t.slices);
    atomic_store(&t.next, 0);
    pthread_barrier_wait(&t.barrier);
    run_slices(&t, 0);
    pthread_barrier_wait(&t.barrier);

    if ((status = kvedge_attend(layer, query, 1, NUM_HEADS, NULL, 1, expected, NULL))) die("attend", status);
    if (memcmp(out, expected, sizeof out)) {
      fprintf(stderr, "token %d: the slices give another result than kvedge_attend\n", token);
      return 1;
    }
  }
  t.slices = NULL;
  pthread_barrier_wait(&t.barrier);
  for (int i = 0; i < NUM_THREADS - 1; i++) pthread_join(helpers[i], NULL);

  printf("%s: %d tokens in %.1f MB, the last step in %d slices on %d threads, equal to the bit\n", kvedge_isa_name(),
         CAPACITY, (double)layer_bytes / 1e6, num_slices, NUM_THREADS);
  kvedge_quiesce();
  free(layer_memory);
  free(scratch);
  return 0;
}
