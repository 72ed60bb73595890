/* Copies session files by way of the C API: reads one, makes layers, fills them, and writes them. In between it may
 * append tokens and attend to them. A line of standard input is a copy, words between tabs; a line of output answers it: empty,
 * or why the file was refused.
 *
 *   FROM TO
 *   FROM TO ROWS OUT TOKENS QUERIES GROUP
 *       ROWS, float: for each layer keys [TOKENS][num_kv_heads][head_dim], values, then queries of the last QUERIES tokens
 *       [QUERIES][num_kv_heads * GROUP][head_dim]; OUT gets what attention gives
 *   FROM TO path FILE...
 *       the layers get what a path of a prefix store's files holds, in place of what FROM holds
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvedge.h"

#define MUST(condition)                                                                                                \
  do {                                                                                                                 \
    if (!(condition)) fprintf(stderr, "line %d: not %s\n", __LINE__, #condition), exit(2);                             \
  } while (0)
#define DO(call) MUST((call) == KVEDGE_OK)

static int put(void *file, const void *piece, size_t bytes) { return fwrite(piece, 1, bytes, file) != bytes; }

static void refused(kvedge_status status, const char *why) {
  printf("%s: %s", kvedge_strerror(status), why ? why : "");
}

static void *read_file(const char *path, size_t *bytes) {
  FILE *from = fopen(path, "rb");
  MUST(from && fseek(from, 0, SEEK_END) == 0);
  *bytes = (size_t)ftell(from);
  void *data = malloc(*bytes ? *bytes : 1);
  rewind(from);
  MUST(data && fread(data, 1, *bytes, from) == *bytes);
  fclose(from);
  return data;
}

/* Appends to all layers and attends to them; what rows see no more is dropped. */
static void grow(kvedge_session *session, kvedge_session_layer *of, kvedge_layer **layers, char **argv) {
  size_t bytes;
  float *rows = read_file(argv[0], &bytes), *at = rows;
  const int64_t tokens = atoi(argv[2]), queries = atoi(argv[3]);
  const int group = atoi(argv[4]);
  FILE *to = fopen(argv[1], "wb");
  MUST(to);
  for (int i = 0; i < session->num_layers; i++) {
    const kvedge_layer_config *c = &of[i].config;
    const int64_t key = c->num_kv_heads * c->head_dim, value = c->num_kv_heads * c->value_head_dim;
    float *keys = at, *values = keys + tokens * key, *query = values + tokens * value;
    at = query + queries * group * key;
    for (int64_t done = 0, n = 1; done < tokens; done += n, n = 2 * n + 1) {
      if (n > tokens - done) n = tokens - done;
      DO(kvedge_layer_reserve(&layers[i], n));
      DO(kvedge_layer_append(layers[i], keys + done * key, values + done * value, n));
    }
    const size_t size = (size_t)(queries * group * value);
    float *out = malloc(size * sizeof *out + 1);
    kvedge_attention_options options;
    kvedge_attention_defaults(&options);
    options.window = of[i].window;
    DO(kvedge_attend(layers[i], query, queries, c->num_kv_heads * group, &options, 1, out, NULL));
    MUST(fwrite(out, sizeof *out, size, to) == size);
    free(out);
    const int64_t unseen = of[i].window ? kvedge_layer_len(layers[i]) - (of[i].window - 1) : 0;
    if (unseen <= 0) continue;
    DO(kvedge_layer_drop_first(layers[i], unseen));
    of[i].dropped += unseen;
  }
  MUST((char *)at - (char *)rows == (ptrdiff_t)bytes && fclose(to) == 0);
  session->length += tokens;
  free(rows);
}

enum { MOST_WORDS = 16 };

/* Fills layers from the files of a path, and tells what they then hold. */
static kvedge_status load_path(char **names, int num_files, kvedge_session *session, kvedge_session_layer *of,
                               kvedge_layer **layers, const char **why) {
  void *data[MOST_WORDS], *memory[MOST_WORDS];
  kvedge_session_prefix *path[MOST_WORDS];
  kvedge_status status = KVEDGE_OK;
  int n = 0;
  for (; n < num_files && status == KVEDGE_OK; n++) {
    size_t bytes, needed;
    data[n] = read_file(names[n], &bytes), memory[n] = NULL;
    status = kvedge_session_prefix_bytes(data[n], bytes, &needed, why);
    if (status != KVEDGE_OK) continue;
    memory[n] = malloc(needed);
    MUST(kvedge_session_read_prefix(data[n], bytes, memory[n], needed - 1, &path[n], why) == KVEDGE_ERROR_MEMORY);
    status = kvedge_session_read_prefix(data[n], bytes, memory[n], needed, &path[n], why);
  }
  if (status == KVEDGE_OK) status = kvedge_session_load_prefix(path, num_files, layers, session->num_layers, why);
  for (int i = 0; i < session->num_layers; i++) {
    const int64_t len = kvedge_layer_len(layers[i]);
    if (status != KVEDGE_OK) MUST(len == 0);
    else of[i].dropped = session->length - len;
  }
  if (status == KVEDGE_OK) {
    MUST(path[n - 1]->start + path[n - 1]->num_ids == session->length && path[0]->is_checked);
    kvedge_layer *own = layers[0], *small;
    kvedge_layer_config config = of[0].config;
    config.capacity = 1;
    MUST(kvedge_session_load_prefix(path, n, layers, session->num_layers, why) ==
         KVEDGE_ERROR_ARGUMENT); /* not empty */
    for (int i = 0; i < session->num_layers; i++) MUST(kvedge_layer_set_len(layers[i], 0) == KVEDGE_OK);
    MUST(kvedge_layer_create(&config, NULL, &small) == KVEDGE_OK);
    layers[0] = small;
    MUST(kvedge_session_load_prefix(path, n, layers, session->num_layers, why) == KVEDGE_ERROR_CAPACITY);
    for (int i = 0; i < session->num_layers; i++) MUST(kvedge_layer_len(layers[i]) == 0);
    kvedge_layer_destroy(small);
    layers[0] = own;
    MUST(kvedge_session_load_prefix(path, n, layers, session->num_layers, why) == KVEDGE_OK);
  }
  for (int i = 0; i < n; i++) free(data[i]), free(memory[i]);
  return status;
}

static void copy(int num_words, char **words) {
  size_t bytes, needed;
  void *data = read_file(words[0], &bytes);
  const char *why;
  kvedge_session_reader *reader;
  kvedge_status status = kvedge_session_reader_bytes(data, bytes, &needed, &why);
  void *memory = status == KVEDGE_OK ? malloc(needed) : NULL;
  if (status == KVEDGE_OK) status = kvedge_session_read(data, bytes, memory, needed, &reader, &why);
  if (status != KVEDGE_OK) {
    refused(status, why);
    free(memory), free(data);
    return;
  }
  kvedge_session session = *kvedge_session_held(reader);
  const size_t n = (size_t)session.num_layers;
  kvedge_session_layer *of = malloc(n * sizeof *of);
  kvedge_layer **layers = calloc(n, sizeof *layers);
  for (int i = 0; i < session.num_layers; i++) {
    of[i] = session.layers[i];
    of[i].config.capacity += 3;
    DO(kvedge_layer_create(&of[i].config, NULL, &layers[i]));
  }
  if (num_words > 3 && !strcmp(words[2], "path"))
    status = load_path(words + 3, num_words - 3, &session, of, layers, &why);
  else status = kvedge_session_load(reader, layers, &why);
  if (status == KVEDGE_OK) {
    session.layers = of;
    if (num_words == 7 && strcmp(words[2], "path")) grow(&session, of, layers, words + 2);
    FILE *to = fopen(words[1], "wb");
    MUST(to && kvedge_session_write(&session, layers, put, to) == KVEDGE_OK && fclose(to) == 0);
  } else {
    refused(status, why);
  }
  for (int i = 0; i < session.num_layers; i++) kvedge_layer_destroy(layers[i]);
  free(of), free(layers), free(memory), free(data);
}

int main(void) {
  char line[1 << 14], *words[MOST_WORDS];
  while (fgets(line, sizeof line, stdin)) {
    int num_words = 0;
    for (char *word = strtok(line, "\t\n"); word && num_words < MOST_WORDS; word = strtok(NULL, "\t\n"))
      words[num_words++] = word;
    MUST(num_words == 2 || num_words == 7 || (num_words > 3 && !strcmp(words[2], "path")));
    copy(num_words, words);
    printf("\n"), fflush(stdout);
  }
  return 0;
}
