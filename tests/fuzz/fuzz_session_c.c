/* Session files that nobody vouches for, read by the C API. The first byte of an input says
 * whether the sha256 of the others, which are the file, is made right, so that what is checked after it is reached, and how
 * far from a multiple of 8 the file lies; of a file of a prefix store, whose sha256 is not looked at then, also how the layers are
 * stored that are filled from it alone. Promises:
 *
 *   - it is refused with a sentence, and no layer has changed; or all layers are filled
 *   - what was filled reads back finite, and is written to a file that is read to the same bytes again
 *   - no byte beyond the file, or beyond the memory asked for, is touched, wherever the file lies
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../c/memory_sink.h"
#include "session/reader.h"

#define NOT_SO(condition)                                                                                              \
  do {                                                                                                                 \
    if (condition) fprintf(stderr, "not so: line %d: %s\n", __LINE__, #condition), abort();                            \
  } while (0)

enum { MOST_LAYERS = 64, MOST_BYTES = 16 << 20 };

static buffer written(const kvedge_session *session, kvedge_layer *const *layers) {
  buffer to = {.room = kvedge_session_bytes(session, layers)};
  NOT_SO(to.room == 0);
  to.at = malloc(to.room);
  NOT_SO(kvedge_session_write(session, layers, take, &to) != KVEDGE_OK || to.bytes != to.room);
  return to;
}

static void check_finite(const kvedge_layer *layer) {
  kvedge_layer_config config;
  kvedge_layer_describe(layer, &config, NULL);
  const int64_t len = kvedge_layer_len(layer);
  for (int values = 0; values < 2; values++) {
    const size_t n =
        (size_t)len * (size_t)config.num_kv_heads * (size_t)(values ? config.value_head_dim : config.head_dim);
    float *x = malloc(n * sizeof *x + 1);
    NOT_SO(kvedge_layer_get(layer, values, -1, 0, len, x) != KVEDGE_OK);
    for (size_t i = 0; i < n; i++) NOT_SO(!isfinite(x[i]));
    free(x);
  }
}

/* A layer takes a token more, and gives it back. */
static void check_append(kvedge_layer **layer) {
  kvedge_layer_config config;
  kvedge_layer_describe(*layer, &config, NULL);
  const int64_t len = kvedge_layer_len(*layer);
  const int widest = config.head_dim > config.value_head_dim ? config.head_dim : config.value_head_dim;
  float *zeros = calloc((size_t)config.num_kv_heads * (size_t)widest, sizeof *zeros);
  NOT_SO(kvedge_layer_reserve(layer, 1) != KVEDGE_OK);
  const kvedge_status status = kvedge_layer_append(*layer, zeros, zeros, 1);
  NOT_SO(status != KVEDGE_OK && status != KVEDGE_ERROR_NONFINITE && status != KVEDGE_ERROR_SCALE); /* key vectors */
  NOT_SO(kvedge_layer_set_len(*layer, len) != KVEDGE_OK);
  free(zeros);
}

/* Reads a file and fills layers; returns how the file is written again, or nothing. */
static buffer copied(const void *data, size_t bytes, int mend_digest) {
  buffer copy = {0};
  size_t needed = 0, total = 0;
  const char *why = NULL;
  kvedge_session_reader *reader = NULL;
  kvedge_layer *layers[MOST_LAYERS] = {0};
  kvedge_status status = kvedge_session_reader_bytes(data, bytes, &needed, &why);
  NOT_SO((status != KVEDGE_OK) != (why != NULL));
  if (status != KVEDGE_OK) return copy;
  NOT_SO(needed > 4 * bytes + 4096 * 500);
  char *memory = malloc(needed);
  status = kvedge_session_read(data, bytes, memory, needed, &reader, &why);
  NOT_SO(status == KVEDGE_OK ? why != NULL : status != KVEDGE_ERROR_FILE || !why);
  const kvedge_session *session = status == KVEDGE_OK ? kvedge_session_held(reader) : NULL;
  for (int i = 0; session && i < session->num_layers; i++) total += kvedge_layer_bytes(&session->layers[i].config);
  if (session && session->num_layers <= MOST_LAYERS && total <= MOST_BYTES) {
    for (int i = 0; i < session->num_layers; i++)
      NOT_SO(kvedge_layer_create(&session->layers[i].config, NULL, &layers[i]) != KVEDGE_OK);
    if (mend_digest) {
      const kvedge_contents contents = {.session = session, .tensors = reader->tensors};
      kvedge_contents_digest(&contents, reader->digest);
    }
    status = kvedge_session_load(reader, layers, &why);
    NOT_SO(status == KVEDGE_OK ? why != NULL : status != KVEDGE_ERROR_FILE || !why);
    if (status == KVEDGE_OK) copy = written(session, layers);
    for (int i = 0; i < session->num_layers; i++) {
      if (status == KVEDGE_OK) check_finite(layers[i]), check_append(&layers[i]);
      else NOT_SO(kvedge_layer_len(layers[i]) != 0);
      kvedge_layer_destroy(layers[i]);
    }
  }
  free(memory);
  return copy;
}

/* The layers that a file of a prefix store is read into, by a number. */
static kvedge_layer_config config_of(int which) {
  static const char *const names[] = {"int8", "auto", "small", "int8"};
  kvedge_layer_config config;
  NOT_SO(kvedge_layer_config_of(names[which % 4], &config) != KVEDGE_OK);
  if (which % 4 == 3) config.recent = 20, config.sinks = 0; /* rows beside last tokens */
  if (which / 4 % 4 == 1) config.format = KVEDGE_FLOAT16, config.value_format = 0, config.recent = config.sinks = 0;
  config.capacity = 600, config.num_kv_heads = 1, config.head_dim = 8;
  return config;
}

/* A file of a prefix store alone is a path. Returns how the layers are written, or nothing. */
static buffer filled(const void *data, size_t bytes, int is_checked, int which) {
  buffer copy = {0};
  size_t needed = 0;
  const char *why = NULL;
  kvedge_session_prefix *file = NULL;
  kvedge_layer *layers[MOST_LAYERS] = {0};
  const kvedge_layer_config config = config_of(which);
  kvedge_status status = kvedge_session_prefix_bytes(data, bytes, &needed, &why);
  NOT_SO((status != KVEDGE_OK) != (why != NULL));
  if (status != KVEDGE_OK) return copy;
  NOT_SO(needed > 4 * bytes + 4096 * 2048);
  char *memory = malloc(needed);
  status = kvedge_session_read_prefix(data, bytes, memory, needed, &file, &why);
  NOT_SO(status == KVEDGE_OK ? why != NULL : status != KVEDGE_ERROR_FILE || !why);
  const int n = status == KVEDGE_OK && file->num_layers <= MOST_LAYERS ? file->num_layers : 0;
  for (int i = 0; i < n; i++) NOT_SO(kvedge_layer_create(&config, NULL, &layers[i]) != KVEDGE_OK);
  if (n) {
    file->is_checked = is_checked;
    status = kvedge_session_load_prefix(&file, 1, layers, n, &why);
    NOT_SO((status == KVEDGE_ERROR_FILE) != (why != NULL));
    kvedge_session_layer of[MOST_LAYERS] = {{0}};
    kvedge_session session = {.num_layers = n, .length = file->start + file->num_ids, .layers = of};
    for (int i = 0; i < n; i++) {
      const int64_t len = kvedge_layer_len(layers[i]);
      NOT_SO(status != KVEDGE_OK && len != 0);
      of[i].dropped = session.length - len, of[i].window = of[i].dropped > 0;
    }
    if (status == KVEDGE_OK) copy = written(&session, layers);
    for (int i = 0; i < n; i++) {
      if (status == KVEDGE_OK) check_finite(layers[i]), check_append(&layers[i]);
      kvedge_layer_destroy(layers[i]);
    }
  }
  free(memory);
  return copy;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
  const int mend_digest = size > 0 && input[0] % 2;
  const size_t shift = size > 0 ? input[0] / 2 % 8 : 0;
  const int which = size > 0 ? input[0] / 16 : 0;
  if (size > 0) input++, size--;
  NOT_SO(kvedge_select_isa("scalar", NULL) != KVEDGE_OK);
  char *file = malloc(shift + size + (shift + size == 0)); /* at any address, with nothing behind it */
  memcpy(file + shift, input, size);
  buffer once = copied(file + shift, size, mend_digest);
  if (!once.at) once = filled(file + shift, size, mend_digest, which);
  if (once.at) {
    buffer twice = copied(once.at, once.bytes, 0);
    NOT_SO(!twice.at || twice.bytes != once.bytes || memcmp(twice.at, once.at, once.bytes) != 0);
    free(twice.at);
  }
  free(once.at), free(file);
  return 0;
}
