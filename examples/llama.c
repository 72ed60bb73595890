/* A Llama in C whose keys and values lie in kvedge: reads llama2.c checkpoints, writes text.
 *
 *   make -C csrc install PREFIX=$HOME/.local
 *   export PKG_CONFIG_PATH=$HOME/.local/lib/pkgconfig
 *   cc -std=c11 -O3 examples/llama.c -o llama $(pkg-config --cflags --libs --static kvedge) -lm
 *   ./llama -p "Once upon a time" kvedge/data/stories260K.bin kvedge/data/tok512.bin
 *
 * -S FILE saves the caches as a session of kvedge, which KVCache.load of Python reads as well; -L FILE goes on from one.
 *
 * It prints what `kvedge generate --cache FORMAT` prints, token for token; then its speed, and with -x that of a float32
 * cache in the same process. Everything but forward() is what any small runtime has; the cache is the five calls in it and
 * in new_caches(). The model's layout is that of llama2.c (Andrej Karpathy, MIT), version 0.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kvedge.h"

/* ---- Errors, memory, files, time ------------------------------------------------------------- */

static void die(const char *what, const char *why) {
  fprintf(stderr, "llama: %s: %s\n", what, why);
  exit(1);
}

static void check(kvedge_status status, const char *what) {
  if (status != KVEDGE_OK) die(what, kvedge_strerror(status));
}

static void *allocate(size_t bytes) {
  void *memory = calloc(bytes ? bytes : 1, 1);
  if (!memory) die("memory", "there is not enough");
  return memory;
}

static float *floats(size_t n) { return allocate(n * sizeof(float)); }

typedef struct {
  char *bytes;
  size_t size;
} file;

static file read_file(const char *path) {
  FILE *from = fopen(path, "rb");
  if (!from) die(path, "cannot be opened");
  fseek(from, 0, SEEK_END);
  const long size = ftell(from);
  if (size < 0) die(path, "is no plain file");
  file f = {allocate((size_t)size), (size_t)size};
  rewind(from);
  if (fread(f.bytes, 1, f.size, from) != f.size) die(path, "cannot be read");
  fclose(from);
  return f;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- The model ------------------------------------------------------------------------------- */

/* Sizes, and weights where they lie in the file; matrices are (out, in). */
typedef struct {
  int dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_seq_len;
  int head_dim, kv_dim;
  const float *token_embedding; /* (vocab_size, dim) */
  const float *attention_norm;  /* (num_layers, dim) */
  const float *wq, *wk, *wv, *wo;
  const float *ffn_norm; /* (num_layers, dim) */
  const float *w1, *w2, *w3;
  const float *final_norm; /* (dim) */
  const float *output;     /* (vocab_size, dim) */
} model;

static model load_model(const char *path) {
  file f = read_file(path);
  int32_t sizes[7];
  if (f.size < sizeof sizes) die(path, "is too short for a llama2.c checkpoint");
  memcpy(sizes, f.bytes, sizeof sizes);
  model m = {.dim = sizes[0],
             .hidden_dim = sizes[1],
             .num_layers = sizes[2],
             .num_heads = sizes[3],
             .num_kv_heads = sizes[4],
             .vocab_size = abs(sizes[5]),
             .max_seq_len = sizes[6]};
  for (int i = 0; i < 7; i++)
    if (sizes[i] == 0 || (i != 5 && sizes[i] < 0) || abs(sizes[i]) > 1 << 24) die(path, "is no llama2.c checkpoint");
  if (m.dim % m.num_heads || m.num_heads % m.num_kv_heads) die(path, "has sizes that make no sense");
  m.head_dim = m.dim / m.num_heads;
  m.kv_dim = m.head_dim * m.num_kv_heads;

  const size_t layers = (size_t)m.num_layers, dim = (size_t)m.dim, hidden = (size_t)m.hidden_dim;
  const size_t kv = (size_t)m.kv_dim, vocab = (size_t)m.vocab_size;
  const size_t rope_tables = (size_t)m.max_seq_len * (size_t)m.head_dim; /* of older versions; not used */
  const struct {
    const float **at;
    size_t count;
  } arrays[] = {
      {&m.token_embedding, vocab * dim                   },
      {&m.attention_norm,  layers * dim                  },
      {&m.wq,              layers * dim * dim            },
      {&m.wk,              layers * kv * dim             },
      {&m.wv,              layers * kv * dim             },
      {&m.wo,              layers * dim * dim            },
      {&m.ffn_norm,        layers * dim                  },
      {&m.w1,              layers * hidden * dim         },
      {&m.w2,              layers * dim * hidden         },
      {&m.w3,              layers * hidden * dim         },
      {&m.final_norm,      dim                           },
      {NULL,               rope_tables                   },
      {&m.output,          sizes[5] < 0 ? vocab * dim : 0}
  };
  size_t at = sizeof sizes;
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
    if (arrays[i].count > (f.size - at) / sizeof(float)) die(path, "ends before its last weight");
    if (arrays[i].at) *arrays[i].at = (const float *)(const void *)(f.bytes + at);
    at += arrays[i].count * sizeof(float);
  }
  if (at != f.size) die(path, "is longer than its sizes say");
  if (sizes[5] > 0) m.output = m.token_embedding;
  return m;
}

/* ---- The tokenizer: byte pair encoding by scores ---------------------------------------------- */

enum { UNKNOWN, BOS, EOS, FIRST_PLAIN };

typedef struct {
  const char *text;
  int length;
  float score;
  int byte; /* "<0x41>" stands for the byte 0x41; -1: for itself */
} piece;

typedef struct {
  piece *pieces;
  int count;
  int byte_token[256];
} tokenizer;

static tokenizer load_tokenizer(const char *path, int count) {
  file f = read_file(path);
  tokenizer t = {.pieces = allocate((size_t)count * sizeof(piece)), .count = count};
  size_t at = sizeof(int32_t); /* of the longest piece's length */
  for (int i = 0; i < count; i++) {
    int32_t length;
    piece *p = &t.pieces[i];
    if (at + 8 > f.size) die(path, "has fewer tokens than the model");
    memcpy(&p->score, f.bytes + at, 4);
    memcpy(&length, f.bytes + at + 4, 4);
    at += 8;
    if (length < 0 || (size_t)length > f.size - at) die(path, "ends within a token");
    p->text = f.bytes + at;
    p->length = length;
    p->byte = -1;
    unsigned byte;
    char name[8] = {0};
    if (length == 6) memcpy(name, p->text, 6);
    if (sscanf(name, "<0x%2x>", &byte) == 1) t.byte_token[byte] = i, p->byte = (int)byte;
    at += (size_t)length;
  }
  if (at != f.size) die(path, "has more tokens than the model");
  return t;
}

/* The first token of this text, -1: none. */
static int find_piece(const tokenizer *t, const char *text, int length) {
  for (int i = FIRST_PLAIN; i < t->count; i++)
    if (t->pieces[i].length == length && memcmp(t->pieces[i].text, text, (size_t)length) == 0) return i;
  return -1;
}

/* BOS and the tokens of a text; `tokens` has room for 2 + strlen(text). Returns how many. */
static int encode(const tokenizer *t, const char *text, int *tokens) {
  int n = 0;
  tokens[n++] = BOS;
  if (!*text) return n;
  char *spaced = allocate(strlen(text) + 2); /* as if a space came before */
  spaced[0] = ' ';
  strcpy(spaced + 1, text);
  for (const char *c = spaced; *c;) { /* characters; what has no token becomes its bytes */
    int length = 1;
    while ((c[length] & 0xc0) == 0x80) length++;
    const int token = find_piece(t, c, length);
    if (token >= 0) tokens[n++] = token;
    else
      for (int i = 0; i < length; i++) tokens[n++] = t->byte_token[(unsigned char)c[i]];
    c += length;
  }
  free(spaced);
  for (;;) { /* join the pair with the best score, the leftmost of equals, until there is none */
    int best = -1, best_at = 0;
    for (int i = 1; i + 1 < n; i++) {
      const piece *a = &t->pieces[tokens[i]], *b = &t->pieces[tokens[i + 1]];
      char pair[512];
      if (a->length + b->length > (int)sizeof pair) continue;
      memcpy(pair, a->text, (size_t)a->length);
      memcpy(pair + a->length, b->text, (size_t)b->length);
      const int token = find_piece(t, pair, a->length + b->length);
      if (token >= 0 && (best < 0 || t->pieces[token].score > t->pieces[best].score)) best = token, best_at = i;
    }
    if (best < 0) return n;
    tokens[best_at] = best;
    memmove(tokens + best_at + 1, tokens + best_at + 2, (size_t)(n - best_at - 2) * sizeof *tokens);
    n--;
  }
}

static void print_token(const tokenizer *t, int token, int previous) {
  const piece *p = &t->pieces[token];
  if (token < FIRST_PLAIN) return;
  const int skip = previous == BOS && p->length > 0 && p->text[0] == ' '; /* the space that encode() put there */
  if (p->byte >= 0) putchar(p->byte);
  else fwrite(p->text + skip, 1, (size_t)(p->length - skip), stdout);
  fflush(stdout);
}

/* ---- The forward pass ------------------------------------------------------------------------- */

/* out (n, rows) = x (n, columns) times w (rows, columns) transposed. Sums in lanes, so that compilers vectorize them. */
static void matmul(const float *x, const float *w, int n, int rows, int columns, float *out) {
  enum { LANES = 16 };
  for (int row = 0; row < rows; row++, w += columns)
    for (int i = 0; i < n; i++) {
      const float *from = x + (ptrdiff_t)i * columns;
      float lane[LANES] = {0}, sum = 0.0f;
      int c = 0;
      for (; c + LANES <= columns; c += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += from[c + j] * w[c + j];
      for (; c < columns; c++) sum += from[c] * w[c];
      for (int j = 0; j < LANES; j++) sum += lane[j];
      out[(ptrdiff_t)i * rows + row] = sum;
    }
}

static void rms_norm(const float *x, const float *weight, int n, int dim, float *out) {
  for (int i = 0; i < n; i++, x += dim, out += dim) {
    float square = 0.0f;
    for (int d = 0; d < dim; d++) square += x[d] * x[d];
    const float scale = 1.0f / sqrtf(square / (float)dim + 1e-5f);
    for (int d = 0; d < dim; d++) out[d] = x[d] * scale * weight[d];
  }
}

/* RoPE: pairs of neighbouring channels turn with the position. x is (n, heads, head_dim). */
static void rotate(float *x, int n, int heads, int head_dim, int first_position) {
  for (int i = 0; i < n; i++)
    for (int h = 0; h < heads; h++, x += head_dim)
      for (int d = 0; d < head_dim; d += 2) {
        const double angle = (first_position + i) * pow(10000.0, -(double)d / head_dim);
        const float c = (float)cos(angle), s = (float)sin(angle), a = x[d], b = x[d + 1];
        x[d] = a * c - b * s;
        x[d + 1] = a * s + b * c;
      }
}

static void add(float *x, const float *y, size_t count) {
  for (size_t i = 0; i < count; i++) x[i] += y[i];
}

typedef struct {
  kvedge_layer **layers; /* one for each of the model's */
  int length;            /* tokens */
  int num_threads;       /* of attention */
  double attention_seconds;
  float *x, *h, *q, *k, *v, *gate, *up; /* (max_rows, ..) */
  float *logits;                        /* (vocab_size) of the last token */
} run_state;

static run_state new_caches(const model *m, kvedge_format format, int max_rows, int num_threads) {
  const size_t rows = (size_t)max_rows, dim = (size_t)m->dim;
  run_state s = {.layers = allocate((size_t)m->num_layers * sizeof(kvedge_layer *)), .num_threads = num_threads};
  const kvedge_layer_config config = {
      .format = format, .capacity = m->max_seq_len, .num_kv_heads = m->num_kv_heads, .head_dim = m->head_dim};
  for (int l = 0; l < m->num_layers; l++) check(kvedge_layer_create(&config, NULL, &s.layers[l]), "cache");
  s.x = floats(rows * dim), s.h = floats(rows * dim), s.q = floats(rows * dim);
  s.k = floats(rows * (size_t)m->kv_dim), s.v = floats(rows * (size_t)m->kv_dim);
  s.gate = floats(rows * (size_t)m->hidden_dim), s.up = floats(rows * (size_t)m->hidden_dim);
  s.logits = floats((size_t)m->vocab_size);
  return s;
}

static void drop_caches(const model *m, run_state *s) {
  for (int l = 0; l < m->num_layers; l++) kvedge_layer_destroy(s->layers[l]);
  float *buffers[] = {s->x, s->h, s->q, s->k, s->v, s->gate, s->up, s->logits};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
  free(s->layers);
}

/* Runs n tokens after those that the cache holds. Leaves the logits of what follows the last. */
static void forward(const model *m, run_state *s, const int *tokens, int n) {
  const int dim = m->dim, hidden = m->hidden_dim, kv = m->kv_dim;
  const size_t width = (size_t)dim;
  for (int i = 0; i < n; i++)
    memcpy(s->x + (size_t)i * width, m->token_embedding + (size_t)tokens[i] * width, width * sizeof(float));
  for (int l = 0; l < m->num_layers; l++) {
    const size_t layer = (size_t)l;
    rms_norm(s->x, m->attention_norm + layer * width, n, dim, s->h);
    matmul(s->h, m->wq + layer * width * width, n, dim, dim, s->q);
    matmul(s->h, m->wk + layer * (size_t)kv * width, n, kv, dim, s->k);
    matmul(s->h, m->wv + layer * (size_t)kv * width, n, kv, dim, s->v);
    rotate(s->q, n, m->num_heads, m->head_dim, s->length);
    rotate(s->k, n, m->num_kv_heads, m->head_dim, s->length);

    /* Keys and values into the cache; then each token attends to all that it holds up to itself. */
    const double start = seconds();
    check(kvedge_layer_append(s->layers[l], s->k, s->v, n), "append");
    check(kvedge_attend(s->layers[l], s->q, n, m->num_heads, NULL, s->num_threads, s->h, NULL), "attention");
    s->attention_seconds += seconds() - start;

    matmul(s->h, m->wo + layer * width * width, n, dim, dim, s->q);
    add(s->x, s->q, (size_t)n * width);
    rms_norm(s->x, m->ffn_norm + layer * width, n, dim, s->h);
    matmul(s->h, m->w1 + layer * (size_t)hidden * width, n, hidden, dim, s->gate);
    matmul(s->h, m->w3 + layer * (size_t)hidden * width, n, hidden, dim, s->up);
    for (size_t i = 0; i < (size_t)n * (size_t)hidden; i++) s->gate[i] *= s->up[i] / (1.0f + expf(-s->gate[i]));
    matmul(s->gate, m->w2 + layer * width * (size_t)hidden, n, dim, hidden, s->q);
    add(s->x, s->q, (size_t)n * width);
  }
  s->length += n;
  rms_norm(s->x + (size_t)(n - 1) * width, m->final_norm, 1, dim, s->h);
  matmul(s->h, m->output, 1, m->vocab_size, dim, s->logits);
}

/* ---- Sessions --------------------------------------------------------------------------------- */

/* What the file holds besides the caches: the token that comes next, as text. */
static const char NEXT_TOKEN[] = "next_token";

/* Told before the text is written, not after it: the file is written in place, and is to be a regular one. */
static void check_can_save(const char *path) {
  struct stat status;
  if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) die(path, "is no regular file");
  FILE *to = fopen(path, "ab"); /* what is in it stays: -L may name it too */
  if (!to || fclose(to)) die(path, "cannot be written");
}

static int write_piece(void *to, const void *piece, size_t bytes) { return fwrite(piece, 1, bytes, to) != bytes; }

static void save_session(const char *path, const model *m, const run_state *s, int next) {
  char text[16];
  const kvedge_session_text metadata = {.key = NEXT_TOKEN,
                                        .key_bytes = strlen(NEXT_TOKEN),
                                        .value = text,
                                        .value_bytes = (size_t)snprintf(text, sizeof text, "%d", next)};
  const kvedge_session session = {.num_layers = m->num_layers,
                                  .length = s->length,
                                  .max_seq_len = m->max_seq_len,
                                  .metadata = &metadata,
                                  .num_metadata = 1};
  FILE *to = fopen(path, "wb");
  if (!to) die(path, "cannot be written");
  check(kvedge_session_write(&session, s->layers, write_piece, to), path);
  if (fclose(to)) die(path, "cannot be written");
}

/* Fills the caches, and returns the token that comes next. */
static int load_session(const char *path, const model *m, run_state *s) {
  file f = read_file(path);
  size_t bytes;
  const char *why;
  kvedge_session_reader *reader;
  if (kvedge_session_reader_bytes(f.bytes, f.size, &bytes, &why) != KVEDGE_OK) die(path, why);
  void *memory = allocate(bytes);
  if (kvedge_session_read(f.bytes, f.size, memory, bytes, &reader, &why) != KVEDGE_OK) die(path, why);
  const kvedge_session *session = kvedge_session_held(reader);
  if (session->num_layers != m->num_layers) die(path, "is of another model");
  const kvedge_status status = kvedge_session_load(reader, s->layers, &why);
  if (status != KVEDGE_OK) die(path, why ? why : "is of another model or format");
  s->length = (int)session->length;
  int next = -1;
  for (int i = 0; i < session->num_metadata; i++) {
    const kvedge_session_text *text = &session->metadata[i];
    if (text->key_bytes == strlen(NEXT_TOKEN) && !memcmp(text->key, NEXT_TOKEN, text->key_bytes))
      for (size_t d = next = 0; d < text->value_bytes && next < m->vocab_size; d++)
        next = 10 * next + text->value[d] - '0';
  }
  if (next < 0 || next >= m->vocab_size) die(path, "does not tell the next token");
  free(memory), free(f.bytes);
  return next;
}

/* ---- Writing ---------------------------------------------------------------------------------- */

static int likeliest(const float *logits, int count) {
  int best = 0;
  for (int i = 1; i < count; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}

typedef struct {
  int written, next; /* tokens; the one that comes next, which the cache does not hold */
  double prompt_seconds, seconds, attention_seconds; /* the latter two: of writing */
} figures;

/* Continues a prompt by up to `most` tokens, greedy; with t, prints them, ids if so asked. */
static figures write_text(const model *m, run_state *s, const int *prompt, int num_prompt, int most, const tokenizer *t,
                          int ids) {
  figures f = {0};
  double start = seconds();
  forward(m, s, prompt, num_prompt);
  f.prompt_seconds = seconds() - start;
  s->attention_seconds = 0.0;
  int previous = prompt[num_prompt - 1];
  start = seconds();
  while (f.written < most) {
    const int token = f.next = likeliest(s->logits, m->vocab_size);
    if (token == BOS || token == EOS) break;
    if (t && ids) printf("%d ", token);
    else if (t) print_token(t, token, previous);
    f.written++;
    previous = token;
    if (f.written == most || s->length == m->max_seq_len) break;
    forward(m, s, &token, 1);
  }
  f.seconds = seconds() - start;
  f.attention_seconds = s->attention_seconds;
  return f;
}

static const struct {
  const char *name;
  kvedge_format format;
} FORMATS[] = {
    {"int8",     KVEDGE_INT8    },
    {"float32",  KVEDGE_FLOAT32 },
    {"float16",  KVEDGE_FLOAT16 },
    {"bfloat16", KVEDGE_BFLOAT16},
    {"fp8_e4m3", KVEDGE_FP8_E4M3},
    {"fp8_e5m2", KVEDGE_FP8_E5M2},
    {"int4",     KVEDGE_INT4    }
};
enum { NUM_FORMATS = sizeof FORMATS / sizeof *FORMATS };

static void report(const model *m, const char *name, kvedge_format format, figures f) {
  const kvedge_layer_config one = {
      .format = format, .capacity = m->max_seq_len, .num_kv_heads = m->num_kv_heads, .head_dim = m->head_dim};
  fprintf(stderr, "%-8s  %.1f tokens/s, attention %.1f%% of the time, %.2f MB for %d tokens; prompt %.1f ms\n", name,
          f.written / f.seconds, 100.0 * f.attention_seconds / f.seconds,
          1e-6 * (double)kvedge_layer_bytes(&one) * m->num_layers, m->max_seq_len, 1e3 * f.prompt_seconds);
}

static void usage(void) {
  fprintf(
      stderr,
      "usage: llama [-p PROMPT] [-n TOKENS] [-c FORMAT] [-t THREADS] [-i] [-x] [-L FILE] [-S FILE] MODEL TOKENIZER\n"
      "  -n  tokens to write at most (200)    -c  int8 (default)");
  for (int i = 1; i < NUM_FORMATS; i++) fprintf(stderr, ", %s", FORMATS[i].name);
  fprintf(stderr, "\n  -t  threads of attention (1)         -i  print token ids instead of text\n"
                  "  -x  the same with a float32 cache afterwards, for its speed\n"
                  "  -L  go on from a session         -S  save the session afterwards\n");
  exit(2);
}

int main(int argc, char **argv) {
  const char *prompt = "", *format_name = "int8", *load = NULL, *save = NULL;
  int most = 200, num_threads = 1, ids = 0, compare = 0;
  for (int option; (option = getopt(argc, argv, "p:n:c:t:ixL:S:")) != -1;) {
    if (option == 'p') prompt = optarg;
    else if (option == 'n') most = atoi(optarg);
    else if (option == 'c') format_name = optarg;
    else if (option == 't') num_threads = atoi(optarg);
    else if (option == 'i') ids = 1;
    else if (option == 'x') compare = 1;
    else if (option == 'L') load = optarg;
    else if (option == 'S') save = optarg;
    else usage();
  }
  int chosen = 0;
  while (chosen < NUM_FORMATS && strcmp(FORMATS[chosen].name, format_name)) chosen++;
  if (argc - optind != 2 || chosen == NUM_FORMATS || most < 1 || num_threads < 1) usage();
  if (compare && (load || save)) usage();

  if (save) check_can_save(save);

  const model m = load_model(argv[optind]);
  const tokenizer t = load_tokenizer(argv[optind + 1], m.vocab_size);
  int *tokens = allocate((strlen(prompt) + 2) * sizeof *tokens);
  const int num_tokens = encode(&t, prompt, tokens);

  if (!ids) printf("%s", prompt);
  for (int i = 0; i <= compare; i++) {
    const char *name = i ? "float32" : format_name;
    const kvedge_format format = i ? KVEDGE_FLOAT32 : FORMATS[chosen].format;
    run_state s = new_caches(&m, format, num_tokens, num_threads);
    if (load) tokens[0] = load_session(load, &m, &s); /* instead of BOS */
    if (num_tokens > m.max_seq_len - s.length) die("prompt", "is longer than what is left of the model's context");
    const figures f = write_text(&m, &s, tokens, num_tokens, most, i ? NULL : &t, ids);
    if (!i) printf("\n");
    fflush(stdout);
    report(&m, name, format, f);
    if (save) save_session(save, &m, &s, f.next);
    drop_caches(&m, &s);
  }
  free(tokens);
  return 0;
}
