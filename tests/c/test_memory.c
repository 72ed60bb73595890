/* With the caller's memory and threads, a decode step allocates nothing; kvedge_attend takes one block and gives it back.
 *
 * malloc and its kin are replaced here by ones that count, where the C library is glibc, linked dynamically, and no
 * sanitizer has its own. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "check.h"
#include "layer_calls.h"

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
static void step(kvedge_layer *layer, const float *row, int heads, const kvedge_attention_options *options, void *room,
                 size_t bytes, float *out) {
  kvedge_slices *slices;
  const kvedge_attention_call call = call_on(layer, row, 1, heads, options, out, NULL);
  CHECK(kvedge_layer_append(layer, row, row, 1) == KVEDGE_OK);
  CHECK(kvedge_slices_bytes(&call, 1, 2) <= bytes);
  CHECK(kvedge_slices_init(room, bytes, &call, 1, 2, &slices) == KVEDGE_OK);
  for (int i = 0; i < kvedge_slices_count(slices); i++) kvedge_slices_run(slices, i, -1, i % 2);
}

enum { HEADS = 2, DIM = 64, HELD = 3000, STEPS = 40, CAPACITY = 4096 };

/* A row per token; a key offset and a key scale, of ones. */
static float *rows, ones[HEADS * DIM];

static void test_step(kvedge_layer_config config, const kvedge_attention_options *options) {
  config.capacity = CAPACITY, config.num_kv_heads = HEADS, config.head_dim = DIM;
  block memory = new_block(kvedge_layer_bytes(&config));
  float out[HEADS * DIM], again[HEADS * DIM];
  kvedge_layer *layer;
  CHECK(kvedge_layer_init(memory.data, memory.size, &config, NULL, &layer) == KVEDGE_OK);
  kvedge_attention_options longest = *options; /* room for it is known while the layer is empty */
  longest.num_tokens = CAPACITY;
  const kvedge_attention_call call = call_on(layer, NULL, 1, HEADS, &longest, NULL, NULL);
  block room = new_block((kvedge_slices_bytes(&call, 1, 2) + 63) / 64 * 64);
  const long before = asked;
  CHECK(kvedge_layer_set_key_scale(layer, ones) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, rows, rows, HELD) == KVEDGE_OK);
  for (int i = 0; i < STEPS; i++) step(layer, rows + i * HEADS * DIM, HEADS, options, room.data, room.size, out);
  CHECK(asked == before);
  const long back = given_back;
  CHECK(kvedge_attend(layer, rows + (STEPS - 1) * HEADS * DIM, 1, HEADS, options, 1, again, NULL) == KVEDGE_OK);
  CHECK(asked == before + 1 && given_back == back + 1);
  CHECK(memcmp(out, again, sizeof out) == 0);
  free_block(&memory), free_block(&room);
}

/* Formats alone and in pairs, groups, options. */
static void test_steps(void) {
  kvedge_attention_options plain, o;
  kvedge_attention_defaults(&plain);
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) {
    test_step((kvedge_layer_config){.format = (kvedge_format)format}, &plain);
    test_step((kvedge_layer_config){.format = KVEDGE_INT8, .value_format = KVEDGE_VALUES(format)}, &plain);
  }
  const kvedge_layer_config groups = {.scale_type = KVEDGE_SCALE_FLOAT16, .group_size = 32};
  test_step(groups, &plain);
  test_step((kvedge_layer_config){.format = KVEDGE_GRID4}, &plain);
  static uint8_t mask[CAPACITY];
  static float bias[CAPACITY];
  const float slopes[HEADS] = {0.5f, 0.25f};
  for (int i = 0; i < CAPACITY; i++) mask[i] = i % 3 != 0, bias[i] = (float)(i % 5);
  o = plain, o.mask = mask, o.mask_strides[2] = 1, test_step(groups, &o);
  o = plain, o.bias = bias, o.bias_strides[2] = 1, test_step(groups, &o);
  o = plain, o.window = 500, o.sink_tokens = 4, o.softcap = 30.0f, test_step(groups, &o);
  o = plain, o.alibi_slopes = slopes, o.sink_logits = slopes, o.precision_bits = 8, test_step(groups, &o);
}

/* What else moves tokens: windows, edits, arrays with strides. */
static void test_edits(void) {
  const kvedge_layer_config config = {.capacity = CAPACITY, .num_kv_heads = HEADS, .head_dim = DIM};
  block memory[2] = {new_block(kvedge_layer_bytes(&config)), new_block(kvedge_layer_bytes(&config))};
  kvedge_layer *layers[2];
  for (int i = 0; i < 2; i++)
    CHECK(kvedge_layer_init(memory[i].data, memory[i].size, &config, NULL, &layers[i]) == KVEDGE_OK);
  float cosines[DIM / 2], sines[DIM / 2], out[2 * HEADS * DIM];
  const kvedge_rotation rotation = {.dims = DIM, .cosines = cosines, .sines = sines};
  const ptrdiff_t head = DIM * sizeof(float), token = HEADS * head;
  const kvedge_array array = {rows, KVEDGE_TYPE_FLOAT32, token, head};
  const long before = asked;
  CHECK(kvedge_layers_append(layers, (const kvedge_array[]){array, array}, (const kvedge_array[]){array, array}, 2,
                             9) == KVEDGE_OK);
  CHECK(kvedge_layers_append(layers, &array, &array, 1, HELD) == KVEDGE_OK);
  CHECK(kvedge_layer_drop_first(layers[0], 100) == KVEDGE_OK && kvedge_layer_compact(layers[0]) == KVEDGE_OK);
  CHECK(kvedge_rotation_angles(10000.0, DIM, -100, cosines, sines) == KVEDGE_OK);
  CHECK(kvedge_layer_shift(layers[0], 0, kvedge_layer_len(layers[0]), &rotation) == KVEDGE_OK);
  CHECK(kvedge_layer_keep(layers[0], (const int64_t[]){0, 1, 7, 2000}, 4) == KVEDGE_OK);
  CHECK(kvedge_layer_set_len(layers[0], 2) == KVEDGE_OK);
  CHECK(kvedge_layer_get(layers[0], 0, -1, 0, 2, out) == KVEDGE_OK);
  CHECK(kvedge_layer_set_len(layers[1], 0) == KVEDGE_OK && kvedge_layer_copy(layers[0], layers[1]) == KVEDGE_OK);
  CHECK(asked == before);
  free_block(&memory[0]), free_block(&memory[1]);
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
  rows = malloc(HELD * HEADS * DIM * sizeof *rows);
  for (int i = 0; i < HELD * HEADS * DIM; i++) rows[i] = (float)(i * 37 % 101) / 101;
  for (int i = 0; i < HEADS * DIM; i++) ones[i] = 1.0f;
  test_steps();
  test_edits();
  free(rows);
  end();
  return report();
}
#else
int main(void) {
  printf("malloc cannot be counted here\n");
  return 0;
}
#endif
