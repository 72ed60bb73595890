/* Every read beside one writer: a reader sees a prefix of the tokens that were written, and nothing else.
 *
 * The value of token t is t + 1 (times a factor of its KV head and channel), so that results tell which tokens
 * a reader saw. Keys depend on the token too. One oracle in double, of the rows as the format stores them, checks every
 * format. Masks, biases and logits are heap blocks of their exact size
 * (AddressSanitizer); data races are ThreadSanitizer's to find.
 */
#include "check.h"
#include "layer_calls.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>

#include "formats/format.h"
#include "system/dispatch.h"

enum {
  HEADS = 8,
  KV_HEADS = 4,
  GROUP = HEADS / KV_HEADS,
  DIM = 64,
  TOKEN = KV_HEADS * DIM, /* values */
  CAPACITY = 2048,        /* with MAX_ROWS rows enough to wake helpers on every path */
  MAX_ROWS = 8,
  MAX_WRITE = 96,
  NUM_READERS = 4,
};

/* ---- Tokens ---- */

static float given_key(int64_t t, int kv_head) { return 0.6f + 0.4f * (float)cos(0.37 * (double)t + kv_head); }
static float given_value(int64_t t, int kv_head) { return (float)(t + 1) * (kv_head % 2 ? -1.0f : 1.0f); }

/* As the format of the test stores them, in channels of sign 1. */
static float stored_keys[CAPACITY][KV_HEADS], stored_values[CAPACITY][KV_HEADS];
static float key_of(int64_t t, int kv_head) { return stored_keys[t][kv_head]; }
static float value_of(int64_t t, int kv_head) { return stored_values[t][kv_head]; }

static float sign_of(int channel) { return channel % 3 ? 1.0f : -1.0f; }
static float query_of(int head) { return 0.02f + 0.01f * (float)head; } /* times the channel's sign */
static float slope_of(int head) { return 0.002f * (float)(head + 1); }
static float sink_logit_of(int head) { return 0.5f * (float)head; }
static int mask_of(int head, int64_t t) { return (t + head) % 3 != 1 || t == 0; }
static float bias_of(int head, int64_t t) { return mask_of(head, t) ? 0.25f * (float)(t % 4) : -INFINITY; }

static void fill_tokens(float *keys, float *values, int64_t start, int64_t count) {
  for (int64_t t = 0; t < count; t++)
    for (int h = 0; h < KV_HEADS; h++)
      for (int c = 0; c < DIM; c++) {
        int64_t i = (t * KV_HEADS + h) * DIM + c;
        keys[i] = given_key(start + t, h) * sign_of(c);
        values[i] = given_value(start + t, h) * sign_of(c);
      }
}

/* Of a layer of its own, since threads are yet to write to that of the test. */
static void store_tokens(kvedge_layer_config config) {
  float keys[TOKEN], values[TOKEN];
  kvedge_layer *one;
  int right = 1;
  config.capacity = 1;
  CHECK(kvedge_layer_create(&config, NULL, &one) == KVEDGE_OK);
  for (int64_t t = 0; t < CAPACITY; t++) {
    fill_tokens(keys, values, t, 1);
    right &= kvedge_layer_write(one, 0, keys, values, 1) == KVEDGE_OK && kvedge_layer_set_len(one, 1) == KVEDGE_OK;
    right &= kvedge_layer_get(one, 0, -1, 0, 1, keys) == KVEDGE_OK;
    right &= kvedge_layer_get(one, 1, -1, 0, 1, values) == KVEDGE_OK;
    for (int h = 0; h < KV_HEADS; h++) /* channel 1 has sign 1 */
      stored_keys[t][h] = keys[h * DIM + 1], stored_values[t][h] = values[h * DIM + 1];
  }
  CHECK(right);
  kvedge_layer_destroy(one);
}

/* ---- The oracle ---- */

typedef struct {
  kvedge_attention_options options;
  int64_t len; /* tokens seen by the last row, if causal */
  int num_rows;
  int with_mask, with_bias;
} call;

/* Attention of one row and head in double; *lse too. The result is that of channels of sign 1. */
static double expected(const call *c, int row, int head, double *lse) {
  const kvedge_attention_options *o = &c->options;
  int kv_head = head / GROUP;
  int64_t position = c->len - c->num_rows + row;
  double sum = o->sink_logits ? exp(o->sink_logits[head]) : 0.0, weighted = 0.0;
  for (int64_t t = 0; t <= (o->causal ? position : c->len - 1); t++) {
    if (o->window && t <= position - o->window && t >= o->sink_tokens) continue;
    if (c->with_mask && !mask_of(head, t)) continue;
    if (c->with_bias && !mask_of(head, t)) continue;
    double logit = (double)o->scale * query_of(head) * key_of(t, kv_head) * DIM;
    if (o->softcap > 0.0f) logit = o->softcap * tanh(logit / o->softcap);
    if (o->alibi_slopes) logit += (double)o->alibi_slopes[head] * (double)(t - position);
    if (c->with_bias) logit += bias_of(head, t);
    double weight = exp(logit);
    sum += weight, weighted += weight * value_of(t, kv_head);
  }
  *lse = log(sum);
  return weighted / sum;
}

/* The error allowed of a result, as a share of the largest value attended to: far below what one token more or less
 * makes (1 / len) with all bits; with fewer, that of the probabilities' digits. */
static double tolerance_of(const call *c) {
  return (double)c->len * (c->options.precision_bits == 24 ? 2e-5 : c->options.precision_bits == 8 ? 2e-2 : 1e-3);
}

/* Whether out and lse of the first row and the last, and a head of each half, are what the oracle says. */
static int is_right(const call *c, const float *out, const float *lse) {
  for (int i = 0; i < 4; i++) {
    int row = i % 2 ? c->num_rows - 1 : 0, head = i / 2 * (HEADS / 2) + (int)(c->len % (HEADS / 2));
    double log_sum, value = expected(c, row, head, &log_sum);
    const float *got = out + ((size_t)row * HEADS + head) * DIM;
    for (int channel = 0; channel < DIM; channel++)
      if (!(fabs(got[channel] - value * sign_of(channel)) <= tolerance_of(c))) return 0;
    if (!(fabs(lse[row * HEADS + head] - log_sum) <= (c->options.precision_bits == 8 ? 1e-1 : 1e-3))) return 0;
  }
  return 1;
}

/* ---- What the threads share ---- */

static kvedge_layer *layer;
static atomic_int writer_done;
static float queries[MAX_ROWS * HEADS * DIM], slopes[HEADS], sink_logits[HEADS];

/* A thread's own: random numbers, and what it found wrong. */
typedef struct {
  uint64_t state;
  long done, wrong;
  char what[160]; /* the first thing wrong */
} reader;

static int below(reader *r, int n) {
  r->state = r->state * 6364136223846793005u + 1442695040888963407u;
  return (int)((r->state >> 33) % (uint64_t)n);
}

static void count(reader *r, int right, const char *what, int kind, int64_t len) {
  r->done++;
  if (!right && !r->wrong++) snprintf(r->what, sizeof r->what, "%s, kind %d, %lld tokens", what, kind, (long long)len);
}

static int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; } /* valgrind, qemu */

static void pause_us(int us) { nanosleep(&(struct timespec){.tv_nsec = us * 1000L}, NULL); }

/* ---- Reads ---- */

enum { PLAIN, ALL_TOKENS, WINDOW, SINKS, ALIBI, SOFTCAP, SINK_LOGITS, MASK, BIAS, EVERYTHING, FEWER_BITS, NUM_KINDS };

/* Options of a kind for `len` tokens; the mask or the bias, one block [HEADS][len] of its exact size, is to be freed. */
static call make_call(reader *r, int kind, int64_t len, block *arrays) {
  call c = {.len = len, .num_rows = 1 + below(r, len < MAX_ROWS ? (int)len : MAX_ROWS)};
  kvedge_attention_options *o = &c.options;
  kvedge_attention_defaults(o);
  o->scale = 0.1f, o->precision_bits = 24, o->num_tokens = len;
  if (kind == ALL_TOKENS) o->causal = 0;
  if (kind == FEWER_BITS) o->precision_bits = 8 * below(r, 3);
  if (kind == WINDOW || kind == SINKS || kind == EVERYTHING) o->window = 1 + below(r, (int)len);
  if (kind == SINKS || kind == EVERYTHING) o->sink_tokens = below(r, 40);
  if (kind == ALIBI || kind == EVERYTHING) o->alibi_slopes = slopes;
  if (kind == SOFTCAP || kind == EVERYTHING) o->softcap = 2.0f;
  if (kind == SINK_LOGITS || kind == EVERYTHING) o->sink_logits = sink_logits;
  c.with_mask = kind == MASK || kind == EVERYTHING, c.with_bias = kind == BIAS;
  *arrays = (block){.data = NULL};
  if (!c.with_mask && !c.with_bias) return c;
  *arrays = new_block(HEADS * (size_t)len * (c.with_bias ? sizeof(float) : 1));
  for (int head = 0; head < HEADS; head++)
    for (int64_t t = 0; t < len; t++) {
      /* A row whose window holds masked tokens only has no result, so the mask spares every row's own token. */
      if (c.with_mask) ((uint8_t *)arrays->data)[head * len + t] = (uint8_t)mask_of(head, t);
      if (c.with_bias) ((float *)arrays->data)[head * len + t] = bias_of(head, t);
    }
  int64_t *strides = c.with_mask ? o->mask_strides : o->bias_strides;
  strides[0] = len, strides[1] = 0, strides[2] = 1;
  if (c.with_mask) o->mask = arrays->data;
  if (c.with_bias) o->bias = arrays->data;
  if (kind == EVERYTHING && o->window < 4) o->window = 4; /* of three tokens the mask hides one */
  return c;
}

static void read_attend(reader *r, int kind, int64_t len) {
  block arrays;
  float out[MAX_ROWS * HEADS * DIM], lse[MAX_ROWS * HEADS];
  call c = make_call(r, kind, len, &arrays);
  kvedge_status status = kvedge_attend(layer, queries, c.num_rows, HEADS, &c.options, below(r, 3), out, lse);
  count(r, status == KVEDGE_OK && is_right(&c, out, lse), "attend", kind, len);
  if (arrays.data) free_block(&arrays);
}

/* Without num_tokens: the result, with scale 0 a mean, is that of some length of the time of the call. */
static void read_attend_unsized(reader *r, int windowed) {
  float out[HEADS * DIM], lse[HEADS];
  call c = {.num_rows = 1};
  kvedge_attention_defaults(&c.options);
  c.options.scale = 0.0f, c.options.precision_bits = 24;
  if (windowed) c.options.window = 16;
  int64_t before = kvedge_layer_len(layer);
  kvedge_status status = kvedge_attend(layer, queries, 1, HEADS, &c.options, 1 + below(r, 2), out, lse);
  int64_t after = kvedge_layer_len(layer);
  int right = 0;
  for (c.len = before; c.len <= after && !right; c.len++) right = status == KVEDGE_OK && is_right(&c, out, lse);
  count(r, right, "attend to all there is", windowed, before);
}

static void read_sliced(reader *r, int kind, int64_t len) {
  block arrays;
  float out[MAX_ROWS * HEADS * DIM], lse[MAX_ROWS * HEADS];
  call c = make_call(r, kind, len, &arrays);
  const kvedge_attention_call sliced = call_on(layer, queries, c.num_rows, HEADS, &c.options, out, lse);
  size_t bytes = kvedge_slices_bytes(&sliced, 1, 1);
  block memory = new_block((bytes + 63) / 64 * 64);
  kvedge_slices *slices;
  kvedge_status status = kvedge_slices_init(memory.data, bytes, &sliced, 1, 1, &slices);
  for (int slice = status == KVEDGE_OK ? kvedge_slices_count(slices) : 0; slice-- > 0;)
    kvedge_slices_run(slices, slice, -1, 0);
  count(r, status == KVEDGE_OK && is_right(&c, out, lse), "sliced", kind, len);
  free_block(&memory);
  if (arrays.data) free_block(&arrays);
}

static void read_scores(reader *r, int64_t len) {
  block logits = new_block(HEADS * (size_t)len * sizeof(float));
  int right = kvedge_scores(layer, queries, HEADS, 0.1f, -1, len, logits.data) == KVEDGE_OK;
  for (int head = 0; head < HEADS && right; head++)
    for (int64_t t = 0; t < len; t++) {
      double logit = 0.1 * query_of(head) * key_of(t, head / GROUP) * DIM;
      right &= fabs(((float *)logits.data)[head * len + t] - logit) <= 1e-4;
    }
  count(r, right, "scores", 0, len);
  free_block(&logits);
}

static void read_rows(reader *r, int values, int64_t len) {
  int64_t start = below(r, (int)len), n = len - start;
  block rows = new_block((size_t)n * TOKEN * sizeof(float));
  int right = kvedge_layer_get(layer, values, -1, start, len, rows.data) == KVEDGE_OK;
  for (int64_t i = 0; i < n * TOKEN && right; i++) {
    int kv_head = (int)(i / DIM % KV_HEADS), channel = (int)(i % DIM);
    int64_t t = start + i / TOKEN;
    double is = sign_of(channel) * (values ? value_of(t, kv_head) : key_of(t, kv_head));
    right &= fabs(((float *)rows.data)[i] - is) <= 1e-5 * fabs(is);
  }
  count(r, right, values ? "get_values" : "get_keys", 0, len);
  free_block(&rows);
}

/* More tokens than there are is refused. */
static void read_too_many(reader *r) {
  float out[HEADS * DIM];
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.num_tokens = CAPACITY + 1;
  int right = kvedge_attend(layer, queries, 1, HEADS, &o, 1, out, NULL) == KVEDGE_ERROR_ARGUMENT;
  right &= kvedge_scores(layer, queries, HEADS, 1.0f, -1, CAPACITY + 1, out) == KVEDGE_ERROR_ARGUMENT;
  right &= kvedge_layer_get(layer, 0, -1, 0, CAPACITY + 1, out) == KVEDGE_ERROR_ARGUMENT;
  count(r, right, "more tokens than there are", 0, CAPACITY + 1);
}

static void *read_layer(void *argument) {
  reader *r = argument;
  for (int last = 0; !last;) {
    last = atomic_load(&writer_done); /* once more when all is there */
    for (int i = 0; i < (last ? NUM_KINDS : 1); i++) {
      int64_t len = kvedge_layer_len(layer);
      if (len == 0) continue;
      if (below(r, 4) == 0) len = 1 + below(r, (int)len); /* an older length is as good */
      int kind = last ? i : below(r, NUM_KINDS);
      switch (below(r, 8)) {
        case 0: read_scores(r, len); break;
        case 1: read_rows(r, below(r, 2), len); break;
        case 2: read_sliced(r, kind, len); break;
        case 3: read_attend_unsized(r, below(r, 2)); break;
        case 4:
          if (below(r, 8) == 0) read_too_many(r); /* fall through */
        default: read_attend(r, kind, len);
      }
    }
  }
  return NULL;
}

/* ---- The writer, and the one who changes settings ---- */

static void *set_threads(void *unused) {
  for (int i = 0; !atomic_load(&writer_done); i++) {
    if (kvedge_set_num_threads(1 + i % 3) != KVEDGE_OK || kvedge_get_num_threads() > 3) return unused;
    pause_us(50);
  }
  return NULL;
}

/* Fills the layer, one token at a time and many at a time. */
static void fill_layer(int64_t limit) {
  float *keys = malloc(MAX_WRITE * TOKEN * sizeof *keys), *values = malloc(MAX_WRITE * TOKEN * sizeof *values);
  while (kvedge_layer_len(layer) < limit) {
    int64_t len = kvedge_layer_len(layer), n = random_below(4) ? 1 : 1 + random_below(MAX_WRITE);
    if (n > limit - len) n = limit - len;
    fill_tokens(keys, values, len, n);
    CHECK(kvedge_layer_append(layer, keys, values, n) == KVEDGE_OK);
    if (n == 1 && random_below(2)) pause_us(is_short() ? 1 : 1000);
  }
  free(keys), free(values);
}

static void start_all(pthread_t *threads, reader *readers, void *(*run)(void *)) {
  atomic_store(&writer_done, 0);
  for (int i = 0; i < NUM_READERS; i++) {
    readers[i] = (reader){.state = random_bits()};
    CHECK(pthread_create(&threads[i], NULL, run, &readers[i]) == 0);
  }
  CHECK(pthread_create(&threads[NUM_READERS], NULL, set_threads, readers) == 0);
}

static void join_all(pthread_t *threads, reader *readers) {
  atomic_store(&writer_done, 1);
  for (int i = 0; i <= NUM_READERS; i++) {
    void *failed;
    pthread_join(threads[i], &failed);
    CHECK(failed == NULL);
  }
  for (int i = 0; i < NUM_READERS; i++) {
    for (long n = 0; n < readers[i].done - readers[i].wrong; n++) end_case();
    if (readers[i].wrong)
      fail("%ld of %ld wrong, first: %s", readers[i].wrong, readers[i].done, readers[i].what), end_case();
  }
}

/* ---- A writer that appends and drops: row r of the layer is token r ---- */

/* What the layer held at a moment: its rows, and logits of them, though some may have been dropped since. */
static void read_held(reader *r) {
  int64_t start, len = kvedge_layer_range(layer, &start);
  if (len == 0) return;
  float *logits = malloc(HEADS * (size_t)len * sizeof *logits), *rows = malloc((size_t)len * TOKEN * sizeof *rows);
  int right = kvedge_scores(layer, queries, HEADS, 0.1f, start, len, logits) == KVEDGE_OK;
  right &= kvedge_layer_get(layer, 1, start, 0, len, rows) == KVEDGE_OK;
  for (int64_t i = 0; i < len && right; i++) {
    double logit = 0.1 * query_of(0) * key_of(start + i, 0) * DIM;
    right &= fabs(logits[i] - logit) <= 1e-4;
    right &= fabs(rows[i * TOKEN] - sign_of(0) * value_of(start + i, 0)) <= 1e-5 * (double)(start + i + 1);
  }
  count(r, right, "what was held", 0, len);
  free(logits), free(rows);
}

/* Without first_row: the tokens of some moment of the call, whole. With scale 0 the result is the mean of their values,
 * and lse their number. */
static void read_held_unsized(reader *r) {
  float out[HEADS * DIM], lse[HEADS];
  int64_t first[2], stop[2];
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.scale = 0.0f, o.precision_bits = 24;
  stop[0] = kvedge_layer_range(layer, &first[0]) + first[0];
  kvedge_status status = kvedge_attend(layer, queries, 1, HEADS, &o, 1 + below(r, 2), out, lse);
  stop[1] = kvedge_layer_range(layer, &first[1]) + first[1];
  if (status == KVEDGE_ERROR_ARGUMENT && stop[0] == first[0]) return; /* empty then, perhaps */
  int64_t tokens = status == KVEDGE_OK ? lround(exp(lse[0])) : 0;
  int right = 0;
  for (int64_t start = first[0]; start <= first[1] && tokens > 0 && !right; start++) {
    double sum = 0.0;
    if (start + tokens < stop[0] || start + tokens > stop[1]) continue;
    for (int64_t t = start; t < start + tokens; t++) sum += value_of(t, 0);
    right = fabs(out[0] * sign_of(0) - sum / (double)tokens) <= 0.1;
  }
  count(r, right, "all that is held", 0, stop[0] - first[0]);
}

static void *read_sliding(void *argument) {
  reader *r = argument;
  while (!atomic_load(&writer_done))
    if (below(r, 2)) read_held(r);
    else read_held_unsized(r);
  return NULL;
}

static void test_sliding_layer(kvedge_format format) {
  begin("sliding, %s", kvedge_format_of(format)->name);
  const kvedge_layer_config config = {
      .format = format, .capacity = CAPACITY, .num_kv_heads = KV_HEADS, .head_dim = DIM};
  pthread_t threads[NUM_READERS + 1];
  reader readers[NUM_READERS];
  float *keys = malloc(MAX_WRITE * TOKEN * sizeof *keys), *values = malloc(MAX_WRITE * TOKEN * sizeof *values);
  store_tokens(config);
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  start_all(threads, readers, read_sliding);
  for (int64_t next = 0, limit = is_short() ? 100 : CAPACITY, n; next < limit; next += n) {
    n = random_below(4) ? 1 : 1 + random_below(MAX_WRITE);
    if (n > limit - next) n = limit - next;
    fill_tokens(keys, values, next, n);
    CHECK(kvedge_layer_append(layer, keys, values, n) == KVEDGE_OK);
    int64_t len = kvedge_layer_len(layer), window = 1 + random_below(200);
    if (len > window) CHECK(kvedge_layer_drop_first(layer, len - window) == KVEDGE_OK);
    if (n == 1) pause_us(is_short() ? 1 : 500);
  }
  join_all(threads, readers);
  kvedge_layer_destroy(layer);
  free(keys), free(values);
  end();
}

static void test_layer(kvedge_format format) {
  begin("%s, %s", kvedge_format_of(format)->name, kvedge_isa_name());
  const kvedge_layer_config config = {
      .format = format, .capacity = CAPACITY, .num_kv_heads = KV_HEADS, .head_dim = DIM};
  pthread_t threads[NUM_READERS + 1];
  reader readers[NUM_READERS];
  store_tokens(config);
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  start_all(threads, readers, read_layer);
  fill_layer(is_short() ? 100 : CAPACITY);
  join_all(threads, readers);
  kvedge_layer_destroy(layer);
  end();
}

/* ---- A pool of blocks: sequences grow while others read them, and each other's neighbours ---- */

enum { BLOCK = 32, NUM_SEQUENCES = 4, BLOCKS_EACH = 12, NUM_BLOCKS = NUM_SEQUENCES * BLOCKS_EACH };

static int32_t tables[NUM_SEQUENCES][BLOCKS_EACH]; /* of all blocks that a sequence will have */
static _Atomic int64_t lengths[NUM_SEQUENCES];     /* tokens written, told by the writer */

static void *read_pool(void *argument) {
  reader *r = argument;
  float *out = malloc(sizeof(float) * NUM_SEQUENCES * MAX_ROWS * HEADS * DIM), lse[NUM_SEQUENCES][MAX_ROWS * HEADS];
  for (int last = 0; !last;) {
    last = atomic_load(&writer_done);
    kvedge_part parts[NUM_SEQUENCES];
    kvedge_attention_call sequences[NUM_SEQUENCES];
    call calls[NUM_SEQUENCES];
    const int kinds[] = {PLAIN, ALL_TOKENS, WINDOW, SINKS, ALIBI, SOFTCAP, SINK_LOGITS};
    int kind = kinds[below(r, 7)], n = 0;
    kvedge_attention_options options;
    for (int s = 0; s < NUM_SEQUENCES; s++) {
      int64_t len = atomic_load_explicit(&lengths[s], memory_order_acquire);
      if (len == 0) continue;
      block none;
      calls[n] = make_call(r, kind, len, &none);
      if (n > 0) calls[n].options = options;
      options = calls[n].options;
      options.num_tokens = calls[n].options.num_tokens = 0; /* all of the part */
      parts[n] = (kvedge_part){.layer = layer, .num_tokens = len, .blocks = tables[s], .block_size = BLOCK};
      sequences[n] = call_on_part(&parts[n], queries, calls[n].num_rows, HEADS, &options,
                                  out + n * MAX_ROWS * HEADS * DIM, lse[n]);
      n++;
    }
    if (n == 0) continue;
    int right = kvedge_attend_layers(sequences, n, below(r, 3)) == KVEDGE_OK;
    for (int i = 0; i < n; i++)
      count(r, right && is_right(&calls[i], sequences[i].out.data, sequences[i].lse), "batch", kind, calls[i].len);
  }
  free(out);
  return NULL;
}

static void test_pool(kvedge_format format) {
  begin("a pool of blocks, %s", kvedge_format_of(format)->name);
  const kvedge_layer_config config = {
      .format = format, .capacity = NUM_BLOCKS * BLOCK, .num_kv_heads = KV_HEADS, .head_dim = DIM};
  pthread_t threads[NUM_READERS + 1];
  reader readers[NUM_READERS];
  for (int i = 0; i < NUM_BLOCKS; i++) /* neighbours now and then */
    tables[i / 2 % NUM_SEQUENCES][i / 2 / NUM_SEQUENCES * 2 + i % 2] = i;
  for (int s = 0; s < NUM_SEQUENCES; s++) atomic_store(&lengths[s], 0);
  store_tokens(config);
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  start_all(threads, readers, read_pool);
  float keys[TOKEN * 8], values[TOKEN * 8];
  const int64_t limit = is_short() ? 2 * BLOCK : BLOCKS_EACH * BLOCK;
  for (int done = 0; done < NUM_SEQUENCES;) {
    int s = random_below(NUM_SEQUENCES);
    int64_t len = atomic_load(&lengths[s]), n = 1 + random_below(8);
    if (len == limit) continue;
    if (n > BLOCK - len % BLOCK) n = BLOCK - len % BLOCK;
    fill_tokens(keys, values, len, n);
    int64_t position = (int64_t)tables[s][len / BLOCK] * BLOCK + len % BLOCK;
    CHECK(kvedge_layer_write(layer, position, keys, values, n) == KVEDGE_OK);
    atomic_store_explicit(&lengths[s], len + n, memory_order_release);
    done += len + n == limit;
    if (random_below(4) == 0) pause_us(is_short() ? 1 : 1000);
  }
  join_all(threads, readers);
  kvedge_layer_destroy(layer);
  end();
}

/* ---- The kernel path, chosen for the first time by several threads at once ---- */

static atomic_int waiting;

static void *first_use(void *select) {
  atomic_fetch_add(&waiting, 1);
  while (atomic_load(&waiting) < 3) {}
  if (select) return (void *)(intptr_t)(kvedge_select_isa("scalar", NULL) != KVEDGE_OK);
  const char *name = kvedge_isa_name();
  return (void *)(intptr_t)(!kvedge_isa_available(name, NULL));
}

/* A child of its own for every time, since a process chooses once. What was asked for by name stays. */
static void test_first_use(void) {
  begin("a path asked for at first use");
  for (int i = 0; i < (is_short() ? 3 : 100); i++) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
      pthread_t threads[2];
      intptr_t wrong = 0;
      void *result;
      for (int j = 0; j < 2; j++) wrong |= pthread_create(&threads[j], NULL, first_use, NULL);
      wrong |= (intptr_t)first_use("scalar");
      for (int j = 0; j < 2; j++) pthread_join(threads[j], &result), wrong |= (intptr_t)result;
      wrong |= strcmp(kvedge_isa_name(), "scalar") != 0;
      kill(getpid(), wrong ? SIGABRT : SIGKILL); /* without an exit, which valgrind would look into */
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  }
  end();
}

int main(void) {
  on_heap(); /* known before there are threads */
  test_first_use();
  for (int row = 0; row < MAX_ROWS; row++)
    for (int i = 0; i < HEADS * DIM; i++) queries[row * HEADS * DIM + i] = query_of(i / DIM) * sign_of(i % DIM);
  for (int head = 0; head < HEADS; head++) slopes[head] = slope_of(head), sink_logits[head] = sink_logit_of(head);
  CHECK(kvedge_isa_ready() == KVEDGE_OK);
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) {
    test_layer((kvedge_format)format);
    test_sliding_layer((kvedge_format)format);
    test_pool((kvedge_format)format);
  }
  CHECK(kvedge_select_isa("scalar", NULL) == KVEDGE_OK);
  test_layer(KVEDGE_INT8);
  return report();
}
