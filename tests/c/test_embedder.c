/* A small runtime that embeds kvedge, written from docs/c_api.md and kvedge.h alone: its own threads, its own allocator, its
 * own scratch. It decodes over layers of several formats that grow, slide within a window, or lie in memory of its own;
 * over sequences in blocks; goes away to a session and comes back. Under ASan, UBSan and TSan: run.sh asan, run.sh tsan.
 */
#define _POSIX_C_SOURCE 200809L
#include <kvedge.h>

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_int passed, failed;

static int check(int right, const char *what, int line) {
  if (right) atomic_fetch_add(&passed, 1);
  else atomic_fetch_add(&failed, 1), fprintf(stderr, "line %d: %s\n", line, what);
  return right;
}
#define CHECK(condition) check(condition, #condition, __LINE__)
#define OK(call) check_ok(call, #call, __LINE__)

static int check_ok(kvedge_status status, const char *what, int line) {
  if (status != KVEDGE_OK) fprintf(stderr, "%s\n", kvedge_strerror(status));
  return check(status == KVEDGE_OK, what, line);
}

/* ---- allocator: counts what is out, and keeps guards around it ------------------------------------- */

enum { GUARD = 64 };
typedef struct {
  atomic_llong blocks, bytes;
  int refuse; /* there is no memory */
} arena;

static void *arena_allocate(void *context, size_t bytes) {
  arena *a = context;
  void *memory;
  if (a->refuse || posix_memalign(&memory, 64, bytes + 2 * GUARD)) return NULL;
  memset(memory, 0xA5, bytes + 2 * GUARD); /* not cleared, as the header allows */
  atomic_fetch_add(&a->blocks, 1), atomic_fetch_add(&a->bytes, (long long)bytes);
  return (char *)memory + GUARD;
}

static void arena_release(void *context, void *memory, size_t bytes) {
  arena *a = context;
  unsigned char *first = (unsigned char *)memory - GUARD;
  int whole = 1;
  for (int i = 0; i < GUARD; i++) whole &= first[i] == 0xA5 && first[GUARD + bytes + (size_t)i] == 0xA5;
  CHECK(whole);
  atomic_fetch_sub(&a->blocks, 1), atomic_fetch_sub(&a->bytes, (long long)bytes);
  free(first);
}

static void *take(arena *a, size_t bytes) {
  void *memory = arena_allocate(a, bytes);
  if (!memory) abort();
  return memory;
}

/* ---- threads: workers that wait for a job and take its parts from a counter ----------------------------- */

enum { WORKERS = 3 };
typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t begin, end;
  pthread_t workers[WORKERS];
  void (*work)(void *job, int part);
  void *job;
  atomic_int next;
  int num_parts, generation, busy, stop;
} team;

static void work_parts(team *t) {
  for (int part; (part = atomic_fetch_add(&t->next, 1)) < t->num_parts;) t->work(t->job, part);
}

static void *worker(void *argument) {
  team *t = argument;
  for (int seen = 0;;) {
    pthread_mutex_lock(&t->lock);
    while (t->generation == seen && !t->stop) pthread_cond_wait(&t->begin, &t->lock);
    seen = t->generation;
    int stop = t->stop;
    pthread_mutex_unlock(&t->lock);
    if (stop) return NULL;
    work_parts(t);
    pthread_mutex_lock(&t->lock);
    if (--t->busy == 0) pthread_cond_signal(&t->end);
    pthread_mutex_unlock(&t->lock);
  }
}

static void in_parallel(team *t, void (*work)(void *, int), void *job, int num_parts) {
  pthread_mutex_lock(&t->lock);
  t->work = work, t->job = job, t->num_parts = num_parts, t->busy = WORKERS, t->generation++;
  atomic_store(&t->next, 0);
  pthread_cond_broadcast(&t->begin);
  pthread_mutex_unlock(&t->lock);
  work_parts(t);
  pthread_mutex_lock(&t->lock);
  while (t->busy) pthread_cond_wait(&t->end, &t->lock);
  pthread_mutex_unlock(&t->lock);
}

static void start(team *t) {
  memset(t, 0, sizeof *t);
  pthread_mutex_init(&t->lock, NULL), pthread_cond_init(&t->begin, NULL), pthread_cond_init(&t->end, NULL);
  for (int i = 0; i < WORKERS; i++) pthread_create(&t->workers[i], NULL, worker, t);
}

static void finish(team *t) {
  pthread_mutex_lock(&t->lock);
  t->stop = 1;
  pthread_cond_broadcast(&t->begin);
  pthread_mutex_unlock(&t->lock);
  for (int i = 0; i < WORKERS; i++) pthread_join(t->workers[i], NULL);
  pthread_mutex_destroy(&t->lock), pthread_cond_destroy(&t->begin), pthread_cond_destroy(&t->end);
}

/* ---- the model that stands for yours ------------------------------------------------------------------ */

enum { KV_HEADS = 2, HEADS = 6, DIM = 32, VALUE_DIM = 24, MOST = 700 };

static void fill(float *x, size_t n, unsigned *state) { /* -1..1 */
  for (size_t i = 0; i < n; i++) {
    *state = *state * 1664525u + 1013904223u;
    x[i] = (float)(int)(*state >> 8 & 0xffff) / 32768.0f - 1.0f;
  }
}

/* What a layer should answer, in double, from what it says it stores: one query row at the last token. */
static void reference(const kvedge_layer *layer, const float *query, int64_t window, double *out) {
  kvedge_layer_config config;
  kvedge_layer_describe(layer, &config, NULL);
  const int64_t n = kvedge_layer_len(layer), first = window && window < n ? n - window : 0;
  const int dim = config.head_dim, width = config.value_head_dim, kv_heads = config.num_kv_heads;
  float *keys = malloc((size_t)n * (size_t)(kv_heads * dim) * sizeof(float));
  float *values = malloc((size_t)n * (size_t)(kv_heads * width) * sizeof(float));
  double *p = malloc((size_t)n * sizeof(double));
  OK(kvedge_layer_get(layer, 0, -1, 0, n, keys));
  OK(kvedge_layer_get(layer, 1, -1, 0, n, values));
  for (int h = 0; h < HEADS; h++) {
    const int kv = h / (HEADS / kv_heads);
    double largest = -INFINITY, sum = 0;
    for (int64_t t = first; t < n; t++) {
      p[t] = 0;
      for (int i = 0; i < dim; i++) p[t] += (double)query[h * dim + i] * (double)keys[(t * kv_heads + kv) * dim + i];
      p[t] /= sqrt(dim);
      largest = fmax(largest, p[t]);
    }
    for (int i = 0; i < width; i++) out[h * width + i] = 0;
    for (int64_t t = first; t < n; t++) {
      const double weight = exp(p[t] - largest);
      sum += weight;
      for (int i = 0; i < width; i++) out[h * width + i] += weight * (double)values[(t * kv_heads + kv) * width + i];
    }
    for (int i = 0; i < width; i++) out[h * width + i] /= sum;
  }
  free(keys), free(values), free(p);
}

/* The contract of docs/numerics.md: 2e-4 of the largest. */
static int is_close(const float *out, const double *expected, int n) {
  double largest = 0, error = 0;
  for (int i = 0; i < n; i++) { /* fmax here is an internal error of gcc 12 for aarch64 */
    const double size = fabs(expected[i]), off = fabs((double)out[i] - expected[i]);
    if (size > largest || isnan(size)) largest = size; /* a NaN stays */
    if (off > error || isnan(off)) error = off;
  }
  return error <= 2e-4 * largest;
}

typedef struct {
  const char *name;
  kvedge_layer_config config;
  int64_t window;
  int offset, scale; /* has a key offset, a key scale */
  kvedge_layer *layer;
} model_layer;

#define SHAPE .capacity = 8, .num_kv_heads = KV_HEADS, .head_dim = DIM, .value_head_dim = VALUE_DIM
static model_layer layers[] = {
    {"int8",                                     {.format = KVEDGE_INT8, SHAPE},                  0,  1, 0, NULL},
    {"int8 in groups, float16 scales, a window",
     {.format = KVEDGE_INT8, .scale_type = KVEDGE_SCALE_FLOAT16, .group_size = 16, SHAPE},
     40,                                                                                              0,
     1,                                                                                                     NULL},
    {"float32",                                  {.format = KVEDGE_FLOAT32, SHAPE},               0,  0, 0, NULL},
    {"float16, a window",                        {.format = KVEDGE_FLOAT16, SHAPE},               33, 0, 0, NULL},
    {"bfloat16, a key scale",                    {.format = KVEDGE_BFLOAT16, SHAPE},              0,  0, 1, NULL},
    {"fp8",                                      {.format = KVEDGE_FP8_E4M3, SHAPE},              0,  0, 0, NULL},
    {"int8 keys, int4 values",
     {.format = KVEDGE_INT8, .value_format = KVEDGE_VALUES(KVEDGE_INT4), .group_size = 8, SHAPE},
     0,                                                                                               0,
     0,                                                                                                     NULL},
    {"int4, a window",                           {.format = KVEDGE_INT4, .group_size = 8, SHAPE}, 64, 0, 0, NULL},
    {"grid3",                                    {.format = KVEDGE_GRID3, SHAPE},                 0,  0, 0, NULL},
};
enum { LAYERS = sizeof layers / sizeof *layers };

static void make_layer(model_layer *m, const kvedge_allocator *allocator) {
  float vector[KV_HEADS * DIM];
  unsigned state = 5;
  OK(kvedge_layer_create(&m->config, allocator, &m->layer));
  fill(vector, KV_HEADS * DIM, &state);
  if (m->offset) OK(kvedge_layer_set_key_offset(m->layer, vector));
  for (int i = 0; i < KV_HEADS * DIM; i++) vector[i] = 1.25f + vector[i];
  if (m->scale) OK(kvedge_layer_set_key_scale(m->layer, vector));
}

static kvedge_attention_options options_of(const model_layer *m) {
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  options.window = m->window;
  return options;
}

/* A call with one query row, side by side with the others. */
static kvedge_attention_call call_on(const kvedge_layer *layer, const float *query,
                                     const kvedge_attention_options *options, float *out, float *lse) {
  const ptrdiff_t key = DIM * sizeof(float), value = VALUE_DIM * sizeof(float);
  return (kvedge_attention_call){
      .layer = layer,
      .query = {(void *)(uintptr_t)query, KVEDGE_TYPE_FLOAT32, HEADS * key,   key  },
      .num_rows = 1,
      .num_heads = HEADS,
      .out = {out,                      KVEDGE_TYPE_FLOAT32, HEADS * value, value},
      .lse = lse,
      .options = options
  };
}

typedef struct {
  kvedge_slices *slices;
  atomic_int next;
} step;

static void run_slices(void *job, int thread) {
  step *s = job;
  for (int slice; (slice = atomic_fetch_add(&s->next, 1)) < kvedge_slices_count(s->slices);)
    kvedge_slices_run(s->slices, slice, -1, thread);
}

/* One step of a layer on the team. */
static void attend_on(team *t, arena *a, const model_layer *m, const float *query, float *out, float *lse) {
  const kvedge_attention_options options = options_of(m);
  const kvedge_attention_call call = call_on(m->layer, query, &options, out, lse);
  const size_t bytes = kvedge_slices_bytes(&call, 1, WORKERS + 1);
  void *scratch = take(a, bytes);
  step s = {.next = 0};
  if (OK(kvedge_slices_init(scratch, bytes, &call, 1, WORKERS + 1, &s.slices)))
    in_parallel(t, run_slices, &s, WORKERS + 1);
  arena_release(a, scratch, bytes);
}

static void check_step(team *t, arena *a, const model_layer *m, unsigned *state) {
  float query[HEADS * DIM], out[HEADS * VALUE_DIM], again[HEADS * VALUE_DIM], lse[HEADS], lse_again[HEADS];
  double expected[HEADS * VALUE_DIM];
  const kvedge_attention_options options = options_of(m);
  fill(query, HEADS * DIM, state);
  attend_on(t, a, m, query, out, lse);
  OK(kvedge_attend(m->layer, query, 1, HEADS, &options, 2, again, lse_again));
  CHECK(!memcmp(out, again, sizeof out) && !memcmp(lse, lse_again, sizeof lse));
  reference(m->layer, query, m->window, expected);
  if (!CHECK(is_close(out, expected, HEADS * VALUE_DIM))) fprintf(stderr, "%s\n", m->name);
}

/* Tokens into every layer, a prompt first, then one by one: layers grow, or slide within their windows. */
static void decode(team *t, arena *a, const kvedge_allocator *allocator) {
  float *keys = take(a, (size_t)90 * KV_HEADS * DIM * sizeof *keys),
        *values = take(a, (size_t)90 * KV_HEADS * VALUE_DIM * sizeof *values);
  for (int i = 0; i < LAYERS; i++) {
    model_layer *m = &layers[i];
    unsigned state = (unsigned)i;
    make_layer(m, allocator);
    for (int64_t n = 0, more; n < 420; n += more) {
      more = n ? 1 : 90;
      fill(keys, (size_t)more * KV_HEADS * DIM, &state), fill(values, (size_t)more * KV_HEADS * VALUE_DIM, &state);
      OK(kvedge_layer_reserve(&m->layer, more));
      OK(kvedge_layer_append(m->layer, keys, values, more));
      if (n % 60 < 2) check_step(t, a, m, &state);
      const int64_t unseen = kvedge_layer_len(m->layer) - (m->window - 1);
      if (m->window && unseen > 0) OK(kvedge_layer_drop_first(m->layer, unseen));
    }
    CHECK(kvedge_layer_len(m->layer) == (m->window ? m->window - 1 : 420));
    /* What is refused changes nothing. */
    keys[1] = NAN;
    OK(kvedge_layer_reserve(&m->layer, 1));
    const int64_t before = kvedge_layer_len(m->layer);
    CHECK(kvedge_layer_append(m->layer, keys, values, 1) == KVEDGE_ERROR_NONFINITE &&
          kvedge_layer_len(m->layer) == before);
    arena *own = a;
    own->refuse = 1;
    const kvedge_layer *same = m->layer;
    CHECK(kvedge_layer_reserve(&m->layer, 1 << 20) == KVEDGE_ERROR_MEMORY && m->layer == same);
    own->refuse = 0;
  }
  arena_release(a, keys, (size_t)90 * KV_HEADS * DIM * sizeof *keys);
  arena_release(a, values, (size_t)90 * KV_HEADS * VALUE_DIM * sizeof *values);
}

/* ---- edits: a copy, some tokens kept, the rest turned to their new positions ----------------------------- */

static void edit(arena *a, const kvedge_allocator *allocator) {
  const model_layer *m = &layers[2]; /* float32: keys come back as they were */
  kvedge_layer_config config;
  kvedge_layer_describe(m->layer, &config, NULL);
  kvedge_layer *copy;
  OK(kvedge_layer_create(&config, allocator, &copy));
  OK(kvedge_layer_copy(m->layer, copy));
  int64_t kept[100];
  for (int i = 0; i < 100; i++) kept[i] = 4 * i + 1;
  OK(kvedge_layer_keep(copy, kept, 100));
  float *was = take(a, 2 * KV_HEADS * DIM * sizeof *was), *is = was + KV_HEADS * DIM;
  OK(kvedge_layer_get(m->layer, 0, -1, 41, 42, was));
  OK(kvedge_layer_get(copy, 0, -1, 10, 11, is));
  CHECK(!memcmp(was, is, KV_HEADS * DIM * sizeof *was));
  float cosines[DIM / 2], sines[DIM / 2];
  OK(kvedge_rotation_angles(10000.0, DIM, -31, cosines, sines));
  const kvedge_rotation rotation = {.dims = DIM, .interleaved = 0, .cosines = cosines, .sines = sines};
  OK(kvedge_layer_shift(copy, 10, 11, &rotation));
  OK(kvedge_layer_get(copy, 0, -1, 10, 11, is));
  double error = 0;
  for (int h = 0; h < KV_HEADS; h++)
    for (int i = 0; i < DIM / 2; i++) {
      const double x = (double)was[h * DIM + i], y = (double)was[h * DIM + i + DIM / 2],
                   angle = -31 * pow(10000.0, -2.0 * i / DIM);
      error = fmax(error, fabs((double)is[h * DIM + i] - (x * cos(angle) - y * sin(angle))));
      error = fmax(error, fabs((double)is[h * DIM + i + DIM / 2] - (x * sin(angle) + y * cos(angle))));
    }
  CHECK(error < 1e-5);
  OK(kvedge_layer_set_len(copy, 5));
  CHECK(kvedge_layer_len(copy) == 5 && kvedge_layer_written(copy) == 100);
  arena_release(a, was, 2 * KV_HEADS * DIM * sizeof *was);
  kvedge_layer_destroy(copy);
}

/* ---- sequences in blocks: a prompt that two share, and go on from ------------------------------------------ */

enum { BLOCKS = 24, BLOCK = 16 };

/* Writes tokens first..first+num_tokens-1 of a sequence to its blocks. */
static void write_blocks(kvedge_layer *pool, const int32_t *table, int first, const float *keys, const float *values,
                         int num_tokens) {
  for (int i = 0; i < num_tokens; i++, keys += KV_HEADS * DIM, values += KV_HEADS * DIM)
    OK(kvedge_layer_write(pool, table[(first + i) / BLOCK] * BLOCK + (first + i) % BLOCK, keys, values, 1));
}

static void paged(arena *a) {
  const kvedge_layer_config config = {
      .format = KVEDGE_INT8, .capacity = BLOCKS * BLOCK, .num_kv_heads = KV_HEADS, .head_dim = DIM};
  const size_t bytes = kvedge_layer_bytes(&config);
  void *memory = take(a, bytes);
  kvedge_layer *pool;
  OK(kvedge_layer_init(memory, bytes, &config, NULL, &pool));
  enum { PROMPT = 5 * BLOCK + 3, ROW = KV_HEADS * DIM };
  float *keys = take(a, 2 * (PROMPT + 1) * ROW * sizeof *keys), *values = keys + (PROMPT + 1) * ROW;
  unsigned state = 9;
  fill(keys, 2 * (PROMPT + 1) * ROW, &state);
  /* Each writes its next token to a last block of its own, where the end of the prompt is again. */
  const int32_t tables[2][6] = {
      {7, 3, 11, 0, 20, 5},
      {7, 3, 11, 0, 20, 9}
  };
  write_blocks(pool, tables[0], 0, keys, values, PROMPT);
  write_blocks(pool, tables[1], 5 * BLOCK, keys + 5 * BLOCK * ROW, values + 5 * BLOCK * ROW, PROMPT - 5 * BLOCK);
  write_blocks(pool, tables[0], PROMPT, keys + PROMPT * ROW, values + PROMPT * ROW, 1);
  write_blocks(pool, tables[1], PROMPT, keys, values, 1);
  float query[HEADS * DIM], outs[2][HEADS * DIM], expected[HEADS * DIM];
  fill(query, HEADS * DIM, &state);
  kvedge_part parts[2];
  kvedge_attention_call calls[2];
  for (int i = 0; i < 2; i++) {
    parts[i] = (kvedge_part){.layer = pool, .num_tokens = PROMPT + 1, .blocks = tables[i], .block_size = BLOCK};
    calls[i] = call_on(NULL, query, NULL, outs[i], NULL);
    calls[i].out = calls[i].query, calls[i].out.data = outs[i]; /* values are as wide as keys */
    calls[i].parts = &parts[i], calls[i].num_parts = 1;
  }
  OK(kvedge_attend_layers(calls, 2, 2));
  kvedge_layer *flat;
  OK(kvedge_layer_create(&config, NULL, &flat));
  for (int i = 0; i < 2; i++) {
    OK(kvedge_layer_set_len(flat, 0));
    OK(kvedge_layer_append(flat, keys, values, PROMPT));
    OK(kvedge_layer_append(flat, i ? keys : keys + PROMPT * ROW, i ? values : values + PROMPT * ROW, 1));
    OK(kvedge_attend(flat, query, 1, HEADS, NULL, 1, expected, NULL));
    CHECK(!memcmp(outs[i], expected, sizeof expected));
  }
  kvedge_layer_destroy(flat);
  kvedge_quiesce();
  arena_release(a, keys, 2 * (PROMPT + 1) * ROW * sizeof *keys);
  arena_release(a, memory, bytes);
}

/* ---- a session, away and back ------------------------------------------------------------------------------------- */

typedef struct {
  char *data;
  size_t used, room;
} buffer;

static int to_buffer(void *context, const void *piece, size_t bytes) {
  buffer *b = context;
  if (bytes > b->room - b->used) return 1;
  memcpy(b->data + b->used, piece, bytes);
  b->used += bytes;
  return 0;
}

static void session(team *t, arena *a, const kvedge_allocator *allocator) {
  enum { SAVED = LAYERS - 1 }; /* grids are in no session */
  kvedge_layer *held[SAVED];
  kvedge_session_layer of_layers[SAVED];
  memset(of_layers, 0, sizeof of_layers);
  const kvedge_session_text note = {"who", "an embedder", 3, 11};
  for (int i = 0; i < SAVED; i++) {
    held[i] = layers[i].layer;
    of_layers[i].window = layers[i].window;
    of_layers[i].dropped = 420 - kvedge_layer_len(held[i]);
  }
  const kvedge_session saved = {
      .num_layers = SAVED, .length = 420, .layers = of_layers, .metadata = &note, .num_metadata = 1};
  const size_t size = kvedge_session_bytes(&saved, held);
  buffer file = {.data = take(a, size), .room = size};
  if (!OK(kvedge_session_write(&saved, held, to_buffer, &file))) return;
  CHECK(size > 0 && file.used == size);

  size_t needed;
  const char *why = NULL;
  OK(kvedge_session_reader_bytes(file.data, size, &needed, &why));
  void *memory = take(a, needed);
  kvedge_session_reader *reader;
  file.data[size - 3] ^= 1; /* a damaged file is told, and fills no layer */
  kvedge_layer *loaded[SAVED];
  for (int round = 0; round < 2; round++) {
    if (!OK(kvedge_session_read(file.data, size, memory, needed, &reader, &why))) return;
    const kvedge_session *told = kvedge_session_held(reader);
    CHECK(told->num_layers == SAVED && told->length == 420 && told->num_metadata == 1 &&
          !memcmp(told->metadata->value, "an embedder", 11));
    for (int i = 0; i < SAVED; i++) {
      kvedge_layer_config config = told->layers[i].config;
      config.capacity += 10;
      CHECK(told->layers[i].window == layers[i].window && told->layers[i].has_key_offset == layers[i].offset);
      OK(kvedge_layer_create(&config, allocator, &loaded[i]));
    }
    const kvedge_status status = kvedge_session_load(reader, loaded, &why);
    CHECK(status == (round ? KVEDGE_OK : KVEDGE_ERROR_FILE) && (round || why));
    if (!round) {
      for (int i = 0; i < SAVED; i++) CHECK(kvedge_layer_len(loaded[i]) == 0), kvedge_layer_destroy(loaded[i]);
      file.data[size - 3] ^= 1;
    }
  }
  /* They answer as those that were saved, and go on. */
  for (int i = 0; i < SAVED; i++) {
    float query[HEADS * DIM], key[KV_HEADS * DIM], value[KV_HEADS * VALUE_DIM], outs[2][HEADS * VALUE_DIM];
    unsigned state = 77;
    fill(query, HEADS * DIM, &state), fill(key, KV_HEADS * DIM, &state), fill(value, KV_HEADS * VALUE_DIM, &state);
    model_layer other = layers[i];
    other.layer = loaded[i];
    for (int which = 0; which < 2; which++) {
      model_layer *m = which ? &other : &layers[i];
      OK(kvedge_layer_reserve(&m->layer, 1));
      OK(kvedge_layer_append(m->layer, key, value, 1));
      attend_on(t, a, m, query, outs[which], NULL);
    }
    if (!CHECK(!memcmp(outs[0], outs[1], sizeof outs[0]))) fprintf(stderr, "%s\n", other.name);
    kvedge_layer_destroy(other.layer);
  }
  arena_release(a, memory, needed), arena_release(a, file.data, size);
}

int main(void) {
  arena memory = {0};
  const kvedge_allocator allocator = {arena_allocate, arena_release, &memory};
  team t;
  start(&t);
  decode(&t, &memory, &allocator);
  edit(&memory, &allocator);
  session(&t, &memory, &allocator);
  for (int i = 0; i < LAYERS; i++) kvedge_layer_destroy(layers[i].layer);
  paged(&memory);
  finish(&t);
  CHECK(atomic_load(&memory.blocks) == 0 && atomic_load(&memory.bytes) == 0);
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
