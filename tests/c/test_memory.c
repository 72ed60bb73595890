/* With the caller's memory and threads, a decode step allocates nothing; kvedge_attend takes one block and gives it back.
 *
 * malloc and its kin are replaced here by ones that count, where the C library is glibc, linked dynamically, and no
 * sanitizer has its own. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "check.h"
#include "kvedge.h"

#if defined(__GLIBC__) && !defined(KVEDGE_TEST_IS_STATIC) && !defined(__SANITIZE_ADDRESS__) &&                         \
    !defined(__SANITIZE_THREAD__)
static long asked, given_back;

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

void *malloc(size_t bytes) { return asked++, __libc_malloc(bytes); }
void *calloc(size_t n, size_t bytes) { return asked++, __libc_calloc(n, bytes); }
void *realloc(void *old, size_t bytes) { return asked++, __libc_realloc(old, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return asked++, __libc_memalign(alignment, bytes); }
void free(void *memory) { given_back += memory != NULL, __libc_free(memory); }

/* Appends a token and attends, in slices, as a runtime does that has memory and threads of its own. */
static void step(kvedge_layer *layer, const float *row, int heads, void *room, size_t bytes, float *out) {
  kvedge_attention *attention;
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  CHECK(kvedge_layer_append(layer, row, row, 1) == KVEDGE_OK);
  const int slices = kvedge_attention_num_slices(layer, 1, heads, &options);
  CHECK(kvedge_attention_bytes(layer, 1, heads, &options, slices) <= bytes);
  CHECK(kvedge_attention_init(room, bytes, layer, row, 1, heads, &options, slices, out, NULL, &attention) == KVEDGE_OK);
  for (int i = 0; i < slices; i++) kvedge_attention_run(attention, i, i, NULL);
  for (int i = 0; i < slices; i++) kvedge_attention_collect(attention, i, i);
}

static void test_step(kvedge_format format) {
  enum { HEADS = 2, DIM = 64, HELD = 3000, STEPS = 40 };
  const kvedge_layer_config config = {.format = format, .capacity = 4096, .num_kv_heads = HEADS, .head_dim = DIM};
  block memory = new_block(kvedge_layer_bytes(&config)), room;
  float *rows = malloc(HELD * HEADS * DIM * sizeof *rows), out[HEADS * DIM], again[HEADS * DIM];
  for (int i = 0; i < HELD * HEADS * DIM; i++) rows[i] = (float)(i * 37 % 101) / 101;
  kvedge_layer *layer;
  CHECK(kvedge_layer_init(memory.data, memory.size, &config, &layer) == KVEDGE_OK);
  kvedge_attention_options longest;
  kvedge_attention_defaults(&longest);
  longest.num_tokens = config.capacity;
  const int slices = kvedge_attention_num_slices(layer, 1, HEADS, &longest);
  room = new_block((kvedge_attention_bytes(layer, 1, HEADS, &longest, slices) + 63) / 64 * 64); /* of an empty layer */
  CHECK(kvedge_layer_append(layer, rows, rows, HELD) == KVEDGE_OK);
  const long before = asked;
  for (int i = 0; i < STEPS; i++) step(layer, rows + i * HEADS * DIM, HEADS, room.data, room.size, out);
  CHECK(asked == before);
  const long back = given_back;
  CHECK(kvedge_attend(layer, rows + (STEPS - 1) * HEADS * DIM, 1, HEADS, NULL, 1, again, NULL) == KVEDGE_OK);
  CHECK(asked == before + 1 && given_back == back + 1);
  CHECK(memcmp(out, again, sizeof out) == 0);
  free(rows), free_block(&memory), free_block(&room);
}

int main(void) {
  begin("memory that a decode step takes");
  CHECK(kvedge_select_isa(NULL, NULL) == KVEDGE_OK);
  const long before = asked;
  void *(*volatile ask)(size_t) = malloc; /* not inlined: valgrind puts its own in place where malloc is called */
  free(ask(1));
  if (asked == before) { /* valgrind's are in use */
    printf("malloc cannot be counted here\n");
    return 0;
  }
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) test_step((kvedge_format)format);
  end();
  return report();
}
#else
int main(void) {
  printf("malloc cannot be counted here\n");
  return 0;
}
#endif
