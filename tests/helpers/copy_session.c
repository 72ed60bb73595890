/* Copies a session file by way of the C API: reads it, makes layers, fills them, and writes them.
 *
 *   copy_session FROM TO     exit code 3 and a sentence: the file was refused
 */
#include <stdio.h>
#include <stdlib.h>

#include "kvedge.h"

static int put(void *file, const void *piece, size_t bytes) { return fwrite(piece, 1, bytes, file) != bytes; }

static int refused(kvedge_status status, const char *why) {
  fprintf(stderr, "%s: %s\n", kvedge_strerror(status), why ? why : "");
  return 3;
}

int main(int argc, char **argv) {
  FILE *from = argc == 3 ? fopen(argv[1], "rb") : NULL;
  if (!from || fseek(from, 0, SEEK_END)) return 2;
  const size_t bytes = (size_t)ftell(from);
  char *data = malloc(bytes ? bytes : 1);
  rewind(from);
  if (!data || fread(data, 1, bytes, from) != bytes) return 2;
  fclose(from);

  size_t needed;
  const char *why;
  kvedge_session_reader *reader;
  kvedge_status status = kvedge_session_reader_bytes(data, bytes, &needed, &why);
  if (status != KVEDGE_OK) return refused(status, why);
  void *memory = malloc(needed);
  status = kvedge_session_read(data, bytes, memory, needed, &reader, &why);
  if (status != KVEDGE_OK) return refused(status, why);
  const kvedge_session *session = kvedge_session_held(reader);
  kvedge_layer **layers = calloc((size_t)session->num_layers, sizeof *layers);
  for (int i = 0; i < session->num_layers; i++) {
    kvedge_layer_config config = session->layers[i].config;
    config.capacity += 3;
    status = kvedge_layer_create(&config, &layers[i]);
    if (status != KVEDGE_OK) return refused(status, "a layer");
  }
  status = kvedge_session_load(reader, layers, &why);
  if (status != KVEDGE_OK) return refused(status, why);

  FILE *to = fopen(argv[2], "wb");
  if (!to || kvedge_session_write(session, layers, put, to) != KVEDGE_OK || fclose(to)) return 2;
  for (int i = 0; i < session->num_layers; i++) kvedge_layer_destroy(layers[i]);
  free(layers), free(memory), free(data);
  return 0;
}
