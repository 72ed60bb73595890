/* Copies session files by way of the C API: reads one, makes layers and parts, fills them, and writes them. In between it may
 * append tokens and attend to them. A line of standard input is a copy, words between tabs; a line of output answers it: empty,
 * or why the file was refused.
 *
 *   FROM TO
 *   FROM TO ROWS OUT TOKENS QUERIES GROUP
 *       ROWS, float: for each layer keys [TOKENS][num_kv_heads][head_dim], values, then queries of the last QUERIES tokens
 *       [QUERIES][num_kv_heads * GROUP][head_dim]; OUT gets what attention gives
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

static kvedge_layer *new_layer(kvedge_layer_config config) {
  kvedge_layer *layer = NULL;
  if (config.capacity > 0) DO(kvedge_layer_create(&config, &layer));
  return layer;
}

/* ---- Growing ------------------------------------------------------------------------------------------------------ */

/* Last tokens that are kept: those that are read there, a run's, and 64 more that may be taken back. */
static int64_t kept(const kvedge_session_layer *of, const kvedge_session_parts *parts) {
  const int64_t recent = parts->runs && of->recent < 32 ? 32 : of->recent;
  return recent ? recent + 64 : 0;
}

/* Tokens from `first` on, of those that the layer holds, as they are read now. */
static void read_tokens(const kvedge_session_layer *of, const kvedge_layer *layer, const kvedge_session_parts *parts,
                        int64_t first, float *keys, float *values) {
  kvedge_part at[3];
  const int n = kvedge_session_attended(of, layer, parts, at);
  for (int i = 0; i < n; i++) {
    kvedge_layer_config config;
    kvedge_layer_get_config(layer, &config);
    const int64_t skipped = first > at[i].position ? first - at[i].position : 0, tokens = at[i].num_tokens - skipped;
    if (tokens <= 0) continue;
    DO(kvedge_layer_get_rows(at[i].layer, 0, at[i].first_row + skipped, tokens, keys));
    DO(kvedge_layer_get_rows(at[i].layer, 1, at[i].first_row + skipped, tokens, values));
    keys += tokens * config.num_kv_heads * config.head_dim;
    values += tokens * config.num_kv_heads * config.value_head_dim;
  }
}

static void append_to(kvedge_layer **layer, const float *keys, const float *values, int64_t tokens) {
  DO(kvedge_layer_reserve(layer, tokens));
  DO(kvedge_layer_append(*layer, keys, values, tokens));
}

/* Appends tokens to a layer and to its parts. */
static void append(const kvedge_session_layer *of, kvedge_layer **layer, kvedge_session_parts *parts, const float *keys,
                   const float *values, int64_t tokens) {
  const int64_t end = of->dropped + kvedge_layer_len(*layer), run = end / 32 * 32;
  if (!parts->last) {
    append_to(layer, keys, values, tokens);
    return;
  }
  kvedge_layer_config config;
  kvedge_layer_get_config(*layer, &config);
  const int64_t key = config.num_kv_heads * config.head_dim, value = config.num_kv_heads * config.value_head_dim;
  if (parts->runs && end - kvedge_layer_len(parts->last) > run) { /* the layer was cut inside a run: it is made anew */
    const int64_t from = run > of->dropped ? run : of->dropped, n = end - from;
    float *k = calloc((size_t)(32 * key), sizeof *k), *v = calloc((size_t)(32 * value), sizeof *v);
    read_tokens(of, *layer, parts, from - of->dropped, k + (from - run) * key, v + (from - run) * value);
    DO(kvedge_layer_set_len(parts->last, 0)); /* tokens of the run that were dropped are never read: zeros */
    append_to(&parts->last, k, v, n + from - run);
    free(k), free(v);
  }
  if (parts->runs) DO(kvedge_layer_set_len(parts->runs, run - parts->runs_position));
  append_to(layer, keys, values, tokens);
  if (end == kvedge_layer_len(parts->first) && end < of->sinks)
    append_to(&parts->first, keys, values, tokens < of->sinks - end ? tokens : of->sinks - end);
  if (kept(of, parts) == 0) return;
  append_to(&parts->last, keys, values, tokens);
  for (int64_t at = run; parts->runs && at + 32 <= end + tokens; at += 32) { /* a run is whole */
    const int64_t row = at - (end + tokens - kvedge_layer_len(parts->last));
    float *k = malloc((size_t)(32 * key) * sizeof *k), *v = malloc((size_t)(32 * value) * sizeof *v);
    DO(kvedge_layer_get_keys(parts->last, row, row + 32, k));
    DO(kvedge_layer_get_values(parts->last, row, row + 32, v));
    append_to(&parts->runs, k, v, 32);
    free(k), free(v);
  }
  const int64_t more = kvedge_layer_len(parts->last) - kept(of, parts);
  if (more > 0) DO(kvedge_layer_drop_first(parts->last, more));
}

/* ---- Attention ---------------------------------------------------------------------------------------------------- */

static void attend(const kvedge_session_layer *of, const kvedge_layer *layer, const kvedge_session_parts *parts,
                   float *query, int64_t num_rows, int group, float *out) {
  kvedge_layer_config config;
  kvedge_layer_get_config(layer, &config);
  const int num_heads = config.num_kv_heads * group;
  kvedge_part at[3];
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  options.window = of->window;
  kvedge_session_layer read = *of; /* as kvedge.h says: all that is recent to the first row */
  if (read.recent) read.recent += (int)num_rows - 1;
  const ptrdiff_t row = config.head_dim * (ptrdiff_t)sizeof(float),
                  wide = config.value_head_dim * (ptrdiff_t)sizeof(float);
  const kvedge_attention_call call = {
      .query = {query, KVEDGE_TYPE_FLOAT32, num_heads * row,  row },
      .num_rows = num_rows,
      .out = {out,   KVEDGE_TYPE_FLOAT32, num_heads * wide, wide},
      .options = &options,
      .parts = at,
      .num_parts = kvedge_session_attended(&read, layer, parts, at)
  };
  DO(kvedge_attend_layers(&call, 1, num_heads, 1));
}

/* Of all layers; what rows see no more is dropped. */
static void grow(kvedge_session *session, kvedge_session_layer *of, kvedge_layer **layers, kvedge_session_parts *parts,
                 char **argv) {
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
      append(&of[i], &layers[i], &parts[i], keys + done * key, values + done * value, n);
    }
    const size_t size = (size_t)(queries * group * value);
    float *out = malloc(size * sizeof *out + 1);
    attend(&of[i], layers[i], &parts[i], query, queries, group, out);
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
  kvedge_session_parts *parts = calloc(n, sizeof *parts);
  for (int i = 0; i < session.num_layers; i++) {
    of[i] = session.layers[i];
    of[i].config.capacity += 3;
    layers[i] = new_layer(of[i].config);
    parts[i] = (kvedge_session_parts){.first = new_layer(of[i].first.config),
                                      .last = new_layer(of[i].last.config),
                                      .runs = new_layer(of[i].runs.config)};
  }
  status = kvedge_session_load(reader, layers, parts, &why);
  if (status == KVEDGE_OK) {
    session.layers = of;
    if (num_words == 7) grow(&session, of, layers, parts, words + 2);
    FILE *to = fopen(words[1], "wb");
    MUST(to && kvedge_session_write(&session, layers, parts, put, to) == KVEDGE_OK && fclose(to) == 0);
  } else {
    refused(status, why);
  }
  for (int i = 0; i < session.num_layers; i++) {
    kvedge_layer_destroy(layers[i]), kvedge_layer_destroy(parts[i].first);
    kvedge_layer_destroy(parts[i].last), kvedge_layer_destroy(parts[i].runs);
  }
  free(of), free(layers), free(parts), free(memory), free(data);
}

int main(void) {
  char line[1 << 14], *words[7];
  while (fgets(line, sizeof line, stdin)) {
    int num_words = 0;
    for (char *word = strtok(line, "\t\n"); word && num_words < 7; word = strtok(NULL, "\t\n"))
      words[num_words++] = word;
    MUST(num_words == 2 || num_words == 7);
    copy(num_words, words);
    printf("\n"), fflush(stdout);
  }
  return 0;
}
