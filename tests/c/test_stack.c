/* No call takes more of a thread's stack than KVEDGE_STACK_BYTES, whatever the format and the path: threads of musl have 128 KiB,
 * and those of an embedder's pool as few as it likes. Each case runs on a thread whose stack was painted beforehand; what is no
 * longer paint was used. Rows have 1,024 channels, since arrays on the stack would have as many. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "layer_calls.h"

enum { DIM = 1024, KV_HEADS = 1, HEADS = 4, TOKENS = 96, ROWS = 10, STACK = 1 << 20, PAINT = 0xa5 };
#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__) /* frames are larger */
enum { LIMIT = STACK };
#else
enum { LIMIT = KVEDGE_STACK_BYTES };
#endif

typedef struct {
  kvedge_layer_config config;
  int num_rows, is_masked;
} stack_case;

static float keys[TOKENS * KV_HEADS * DIM], query[ROWS * HEADS * DIM], out[ROWS * HEADS * DIM], row[KV_HEADS * DIM];
static uint8_t mask[ROWS * TOKENS];

typedef struct {
  char *data;
  size_t bytes;
} file;

static int append_to_file(void *context, const void *piece, size_t bytes) {
  file *f = context;
  memcpy(f->data + f->bytes, piece, bytes);
  f->bytes += bytes;
  return 0;
}

static void attend_in_slices(const kvedge_layer *layer, int num_rows, const kvedge_attention_options *o) {
  const kvedge_attention_call call = call_on(layer, query, num_rows, HEADS, o, out, NULL);
  const size_t bytes = kvedge_slices_bytes(&call, 1, 1);
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  kvedge_slices *slices;
  CHECK(kvedge_slices_init(memory, bytes, &call, 1, 1, &slices) == KVEDGE_OK);
  for (int s = 0; s < kvedge_slices_count(slices); s++) kvedge_slices_run(slices, s, -1, 0);
  free(memory);
}

/* The two halves of a layer as parts, whose results are merged. */
static void attend_in_parts(const kvedge_layer *layer, int num_rows) {
  const kvedge_part parts[2] = {
      {.layer = layer, .first_row = 0, .num_tokens = TOKENS / 2},
      {.layer = layer, .first_row = TOKENS / 2, .num_tokens = TOKENS / 2, .position = TOKENS / 2}
  };
  const kvedge_attention_call call = {
      .parts = parts,
      .num_parts = 2,
      .num_rows = num_rows,
      .num_heads = HEADS,
      .query = {query, KVEDGE_TYPE_FLOAT32, HEADS * DIM * 4, DIM * 4},
      .out = {out,   KVEDGE_TYPE_FLOAT32, HEADS * DIM * 4, DIM * 4}
  };
  CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_OK);
}

/* The layer written to a file, and loaded again; grids have no files. */
static void save_and_load(kvedge_layer *layer, const kvedge_layer_config *config) {
  const kvedge_session session = {.num_layers = 1, .length = TOKENS};
  file f = {.data = malloc(kvedge_session_bytes(&session, &layer) + 1)};
  size_t needed;
  kvedge_session_reader *reader;
  kvedge_layer *again;
  if (kvedge_session_bytes(&session, &layer) == 0) {
    free(f.data);
    return;
  }
  CHECK(kvedge_session_write(&session, &layer, append_to_file, &f) == KVEDGE_OK);
  CHECK(kvedge_session_reader_bytes(f.data, f.bytes, &needed, NULL) == KVEDGE_OK);
  void *memory = aligned_alloc(16, (needed + 15) / 16 * 16);
  CHECK(kvedge_session_read(f.data, f.bytes, memory, needed, &reader, NULL) == KVEDGE_OK);
  CHECK(kvedge_layer_create(config, NULL, &again) == KVEDGE_OK);
  CHECK(kvedge_session_load(reader, &again, NULL) == KVEDGE_OK);
  kvedge_layer_destroy(again);
  free(memory), free(f.data);
}

static void *use_layer(void *argument) {
  const stack_case *c = argument;
  const int runs = c->config.format >= KVEDGE_KIVI2 && c->config.format <= KVEDGE_KIVI8;
  kvedge_layer *layer;
  CHECK(kvedge_layer_create(&c->config, NULL, &layer) == KVEDGE_OK);
  for (int d = 0; d < KV_HEADS * DIM; d++) row[d] = 1.0f + (float)(d % 3);
  if (!runs) CHECK(kvedge_layer_set_key_scale(layer, row) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, keys, keys, TOKENS) == KVEDGE_OK);
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  if (c->is_masked) o.mask = mask, o.mask_strides[1] = TOKENS, o.mask_strides[2] = 1;
  for (int bits = 0; bits <= 24; bits += 8) {
    o.precision_bits = bits;
    CHECK(kvedge_attend(layer, query, c->num_rows, HEADS, &o, 1 + bits / 24, out, NULL) == KVEDGE_OK);
  }
  attend_in_slices(layer, c->num_rows, &o);
  attend_in_parts(layer, c->num_rows);
  CHECK(kvedge_scores(layer, query, HEADS, 0.1f, 0, TOKENS, out) == KVEDGE_OK);
  CHECK(kvedge_layer_get(layer, 0, -1, TOKENS - 5, TOKENS, out) == KVEDGE_OK);
  CHECK(kvedge_layer_get(layer, 1, 0, 3, 5, out) == KVEDGE_OK);
  save_and_load(layer, &c->config);
  if (!runs) {
    float cosines[DIM / 2], sines[DIM / 2];
    const int64_t kept[3] = {1, 5, 9};
    const int dims = c->config.head_dim;
    const kvedge_rotation rotation = {.dims = dims, .cosines = cosines, .sines = sines};
    CHECK(kvedge_rotation_angles(1e4, dims, -3, cosines, sines) == KVEDGE_OK);
    CHECK(kvedge_layer_shift(layer, 4, 40, &rotation) == KVEDGE_OK);
    CHECK(kvedge_layer_keep(layer, kept, 3) == KVEDGE_OK);
  }
  kvedge_layer_destroy(layer);
  return NULL;
}

/* Bytes of its stack that a thread used. */
static size_t stack_used(void *(*run)(void *), void *argument) {
  char *stack = NULL;
  pthread_attr_t attributes;
  pthread_t thread;
  size_t untouched = 0;
  if (posix_memalign((void **)&stack, 4096, STACK)) abort();
  memset(stack, PAINT, STACK);
  pthread_attr_init(&attributes);
  CHECK(pthread_attr_setstack(&attributes, stack, STACK) == 0);
  CHECK(pthread_create(&thread, &attributes, run, argument) == 0);
  pthread_join(thread, NULL);
  pthread_attr_destroy(&attributes);
  while (untouched < STACK && (unsigned char)stack[untouched] == PAINT) untouched++;
  free(stack);
  return STACK - untouched;
}

static void *do_nothing(void *argument) { return argument; }

static const kvedge_format formats[] = {
    KVEDGE_INT8,  KVEDGE_FLOAT32, KVEDGE_FLOAT16, KVEDGE_BFLOAT16, KVEDGE_FP8_E4M3, KVEDGE_FP8_E5M2, KVEDGE_INT4,
    KVEDGE_KIVI2, KVEDGE_KIVI4,   KVEDGE_KIVI8,   KVEDGE_GRID2,    KVEDGE_GRID3,    KVEDGE_GRID5,    KVEDGE_GRID8};
enum { FORMATS = sizeof formats / sizeof *formats };

int main(void) {
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) keys[i] = random_signed(3.0f);
  for (size_t i = 0; i < sizeof query / sizeof *query; i++) query[i] = random_signed(3.0f);
  for (size_t i = 0; i < sizeof mask; i++) mask[i] = i % 3 > 0;
  const size_t of_thread = stack_used(do_nothing, NULL); /* what the system takes at the top */
  for (int p = 0; kvedge_isa_compiled(p); p++) {
    if (!kvedge_isa_available(kvedge_isa_compiled(p), NULL)) continue;
    CHECK(kvedge_select_isa(kvedge_isa_compiled(p), NULL) == KVEDGE_OK);
    size_t most = 0;
    begin("stack, %s", kvedge_isa_compiled(p));
    for (int f = 0; f < FORMATS; f++)
      for (int kind = 0; kind < 3; kind++) {
        stack_case c = {
            .config = {.format = formats[f],
                       .capacity = TOKENS,
                       .num_kv_heads = KV_HEADS,
                       .head_dim = kind == 1 ? 100 : DIM},
            .num_rows = (int[]){1, 3, ROWS}
              [kind],
            .is_masked = kind == 2
        };
        const size_t used = stack_used(use_layer, &c) - of_thread;
        if (used > LIMIT) fail("format %d, %d rows: %zu bytes", formats[f], c.num_rows, used);
        most = used > most ? used : most;
        end_case();
      }
    printf("  %s: at most %zu bytes\n", kvedge_isa_compiled(p), most);
    end();
  }
  return report();
}
