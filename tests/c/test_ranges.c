/* Layers of three ranges (recent, sinks): what is read of each token, that going back by up to 64 leaves no trace, that a copy
 * goes on as its original, attention over what is read; what is refused. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

#include "kvedge.h"

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]
enum { HEADS = 2, DIM = 40, WIDE = 24, TOKENS = 700, KEY = HEADS * DIM, VALUE = HEADS * WIDE };

static float keys[TOKENS * KEY], values[TOKENS * VALUE];

static kvedge_layer_config random_config(void) {
  static const int formats[][2] = {
      {KVEDGE_INT8,    0                             },
      {KVEDGE_INT4,    0                             },
      {KVEDGE_FLOAT32, 0                             },
      {KVEDGE_KIVI4,   0                             },
      {KVEDGE_KIVI8,   KVEDGE_VALUES(KVEDGE_INT8)    },
      {KVEDGE_INT8,    KVEDGE_VALUES(KVEDGE_KIVI2)   },
      {KVEDGE_FLOAT16, KVEDGE_VALUES(KVEDGE_FP8_E4M3)}
  };
  const int i = random_below(sizeof formats / sizeof *formats);
  kvedge_layer_config config = {.format = (kvedge_format)formats[i][0],
                                .value_format = formats[i][1],
                                .capacity = TOKENS,
                                .num_kv_heads = HEADS,
                                .head_dim = DIM,
                                .value_head_dim = WIDE,
                                .group_size = ONE_OF(0, 16),
                                .value_rotation = random_below(2),
                                .recent = ONE_OF(0, 1, 32, 33, 96),
                                .sinks = ONE_OF(0, 4, 37),
                                .recent_room = ONE_OF(0, 0, 300)};
  config.recent_format = KVEDGE_RECENT(ONE_OF(KVEDGE_FLOAT16, KVEDGE_BFLOAT16, KVEDGE_FLOAT32));
  return config;
}

static kvedge_layer *new_layer(const kvedge_layer_config *config) {
  kvedge_layer *layer = NULL;
  if (kvedge_layer_create(config, NULL, &layer) != KVEDGE_OK) fail("no layer"), exit(1);
  return layer;
}

static void append(kvedge_layer *layer, int64_t from, int64_t n) {
  if (kvedge_layer_append(layer, keys + from * KEY, values + from * VALUE, n) != KVEDGE_OK) fail("append refused");
}

typedef struct {
  float keys[TOKENS * KEY], values[TOKENS * VALUE];
} tokens_read;

static void read_all(const kvedge_layer *layer, tokens_read *out) {
  const int64_t n = kvedge_layer_len(layer);
  if (kvedge_layer_get(layer, 0, -1, 0, n, out->keys) || kvedge_layer_get(layer, 1, -1, 0, n, out->values))
    fail("not read");
}

static int is_same(const kvedge_layer *a, const kvedge_layer *b) {
  static tokens_read of_a, of_b;
  const size_t n = (size_t)kvedge_layer_len(a);
  if (kvedge_layer_len(b) != (int64_t)n) return 0;
  read_all(a, &of_a), read_all(b, &of_b);
  return !memcmp(of_a.keys, of_b.keys, n * KEY * sizeof(float)) &&
         !memcmp(of_a.values, of_b.values, n * VALUE * sizeof(float));
}

/* Tokens as a plain layer of a format reads them back. */
static void through(kvedge_layer_config config, int64_t n, const float *k, const float *v, tokens_read *out) {
  config.recent = config.sinks = config.recent_format = config.recent_room = 0;
  config.capacity = (n + 32) / 32 * 32;
  kvedge_layer *layer = new_layer(&config);
  if (n && kvedge_layer_append(layer, k, v, n) != KVEDGE_OK) fail("plain append refused");
  read_all(layer, out);
  kvedge_layer_destroy(layer);
}

static int in_runs(const kvedge_layer_config *c) {
  return c->format >= KVEDGE_KIVI2 || c->value_format > KVEDGE_VALUES(KVEDGE_KIVI2) - 1;
}

/* What is read of the first n tokens, given in order. */
static void expect(const kvedge_layer_config *c, int64_t n, tokens_read *out) {
  static tokens_read exact;
  kvedge_layer_config plain = *c;
  plain.format = (kvedge_format)(c->recent_format - 1), plain.value_format = 0, plain.value_rotation = 0;
  through(plain, n, keys, values, &exact);
  const int runs = in_runs(c);
  if (runs) through(*c, n / 32 * 32, exact.keys, exact.values, out);
  else through(*c, n, keys, values, out);
  for (int64_t t = 0; t < n; t++) {
    const int is_exact = t < c->sinks || t >= n - c->recent || (runs && t >= n / 32 * 32);
    if (!is_exact) continue;
    memcpy(out->keys + t * KEY, exact.keys + t * KEY, KEY * sizeof(float));
    memcpy(out->values + t * VALUE, exact.values + t * VALUE, VALUE * sizeof(float));
  }
}

static void test_what_is_read(void) {
  begin("tokens read");
  static tokens_read got, expected;
  for (int i = 0; i < (getenv("KVEDGE_TEST_SHORT") ? 20 : 120); i++) {
    const kvedge_layer_config config = random_config();
    kvedge_layer *layer = new_layer(&config);
    for (int64_t n = 0, more; n < TOKENS; n += more) {
      more = ONE_OF(1, 1, 1, 2, 31, 32, 33, 64, 100, 300);
      if (more > TOKENS - n) more = TOKENS - n;
      append(layer, n, more);
      if (random_below(3) == 0) { /* a rejected draft: other tokens */
        const int64_t draft = 1 + random_below(64);
        if (n + more + draft <= TOKENS) append(layer, 0, draft);
        if (kvedge_layer_set_len(layer, n + more) != KVEDGE_OK) fail("set_len refused");
      }
      read_all(layer, &got), expect(&config, n + more, &expected);
      if (memcmp(got.keys, expected.keys, (size_t)((n + more) * KEY) * sizeof(float)) ||
          memcmp(got.values, expected.values, (size_t)((n + more) * VALUE) * sizeof(float)))
        fail("format %d, recent %d, sinks %d: other tokens at %d", config.format, config.recent, config.sinks,
             (int)(n + more));
      end_case();
    }
    kvedge_layer_destroy(layer);
  }
  end();
}

/* out[HEADS][WIDE] of a query row over the first n tokens read, in double. */
static void attend_to(const tokens_read *read, const float *query, int64_t n, double *out) {
  for (int h = 0; h < HEADS; h++) {
    static double p[TOKENS];
    double largest = -INFINITY, total = 0.0;
    for (int64_t t = 0; t < n; t++) {
      p[t] = 0.0;
      for (int d = 0; d < DIM; d++) p[t] += (double)query[h * DIM + d] * read->keys[t * KEY + h * DIM + d] / sqrt(DIM);
      largest = fmax(largest, p[t]);
    }
    for (int d = 0; d < WIDE; d++) out[h * WIDE + d] = 0.0;
    for (int64_t t = 0; t < n; t++) {
      total += p[t] = exp(p[t] - largest);
      for (int d = 0; d < WIDE; d++) out[h * WIDE + d] += p[t] * read->values[t * VALUE + h * WIDE + d];
    }
    for (int d = 0; d < WIDE; d++) out[h * WIDE + d] /= total;
  }
}

static void check_attention(const kvedge_layer *layer) {
  static tokens_read read;
  static float query[2 * KEY], out[2 * VALUE], logits[2 * HEADS * TOKENS];
  const int64_t n = kvedge_layer_len(layer);
  if (n == 0) return;
  for (int i = 0; i < KEY; i++) query[i] = random_signed(2.0f);
  read_all(layer, &read);
  if (kvedge_attend(layer, query, 1, HEADS, NULL, 1 + random_below(2), out, NULL) ||
      kvedge_scores(layer, query, HEADS, NAN, -1, n, logits))
    fail("attend refused");
  double wanted[VALUE], size = 0.0;
  attend_to(&read, query, n, wanted);
  for (int d = 0; d < VALUE; d++) size = fmax(size, fabs(wanted[d]));
  for (int d = 0; d < VALUE; d++)
    if (!near(out[d], wanted[d], 2e-4 * fmax(size, 0.1))) fail("of %d tokens: %g, not %g", (int)n, out[d], wanted[d]);
  for (int64_t t = 0; t < n; t++) {
    double logit = 0.0;
    for (int d = 0; d < DIM; d++) logit += (double)query[DIM + d] * read.keys[t * KEY + DIM + d] / sqrt(DIM);
    if (!near(logits[n + t], logit, 1e-3)) fail("logit %g, not %g", logits[n + t], logit);
  }
}

/* Random appends, cuts, dropped tokens; a layer, one with more room that was copied from it now and then, one that moves. */
static void test_copies_go_on_alike(void) {
  begin("copies go on as their originals");
  for (int i = 0; i < (getenv("KVEDGE_TEST_SHORT") ? 20 : 150); i++) {
    const kvedge_layer_config config = random_config();
    kvedge_layer_config larger = config;
    larger.capacity = 2 * TOKENS;
    kvedge_layer *layer = new_layer(&config), *copy = new_layer(&larger);
    for (int step = 0; step < 40; step++) {
      kvedge_ranges r;
      kvedge_layer_get_ranges(layer, &r);
      const int64_t n = kvedge_layer_len(layer);
      int64_t more = ONE_OF(1, 1, 2, 31, 33, 64, 150);
      if (more > TOKENS - r.stop) more = TOKENS - r.stop;
      const int64_t from = random_below((int)(TOKENS - more));
      int64_t to = random_below(2) ? n - random_below(100) : random_below((int)n + 1);
      if (to < 0) to = 0;
      switch (random_below(6)) {
        case 0: /* back */
          if (kvedge_layer_set_len(layer, to) || kvedge_layer_set_len(copy, to)) fail("set_len refused");
          break;
        case 1:
          if (kvedge_layer_drop_first(layer, n / 8) || kvedge_layer_drop_first(copy, n / 8)) fail("drop refused");
          break;
        case 2:
          kvedge_layer_destroy(copy);
          copy = new_layer(&larger);
          if (kvedge_layer_copy(layer, copy) != KVEDGE_OK) fail("copy refused");
          break;
        case 3:
          if (kvedge_layer_compact(copy) || kvedge_layer_reserve(&copy, random_below(1000))) fail("no room");
          break;
        default: append(layer, from, more), append(copy, from, more);
      }
      if (!is_same(layer, copy))
        fail("format %d/%d, recent %d, sinks %d, step %d: the copy differs", config.format, config.value_format - 1,
             config.recent, config.sinks, step);
      check_attention(layer);
      end_case();
    }
    kvedge_layer_destroy(layer), kvedge_layer_destroy(copy);
  }
  end();
}

/* A prompt's rows each read the last tokens before them, and those of the prompt. */
static void test_prompts(void) {
  begin("rows of a prompt");
  enum { ROWS = 200, BEFORE = 150 };
  static float query[ROWS * KEY], out[ROWS * VALUE];
  static tokens_read read;
  for (int i = 0; i < ROWS * KEY; i++) query[i] = random_signed(1.0f);
  for (int i = 0; i < 20; i++) {
    kvedge_layer_config config = random_config(), wide;
    config.recent_room = ROWS;
    if (config.recent == 0) config.recent = 20;
    wide = config, wide.recent += ROWS - 1;
    kvedge_layer *layer = new_layer(&config);
    append(layer, 0, BEFORE), append(layer, BEFORE, ROWS);
    if (kvedge_attend(layer, query, ROWS, HEADS, NULL, 1, out, NULL)) fail("attend refused");
    expect(&wide, BEFORE + ROWS, &read);
    for (int row = 0; row < ROWS; row++) {
      double wanted[VALUE], size = 0.0;
      attend_to(&read, query + row * KEY, BEFORE + row + 1, wanted);
      for (int d = 0; d < VALUE; d++) size = fmax(size, fabs(wanted[d]));
      for (int d = 0; d < VALUE; d++)
        if (!near(out[row * VALUE + d], wanted[d], 2e-4 * fmax(size, 0.1)))
          fail("format %d, row %d: %g, not %g", config.format, row, out[row * VALUE + d], wanted[d]);
      end_case();
    }
    kvedge_layer_destroy(layer);
  }
  end();
}

/* A layer in runs that went back into one of them reads its tokens as before once others follow. */
static void test_cut_runs(void) {
  begin("cut in a run");
  static tokens_read before, after;
  for (int i = 0; i < 300; i++) {
    kvedge_layer_config config = random_config();
    config.format = KVEDGE_KIVI4, config.recent_format = KVEDGE_RECENT(KVEDGE_FLOAT32); /* others round once more */
    kvedge_layer *layer = new_layer(&config);
    for (int64_t n = 0; n < 300; n += 100) append(layer, n, 100);
    const int64_t stop = 1 + random_below(300), run = stop / 32 * 32;
    CHECK(kvedge_layer_set_len(layer, stop) == KVEDGE_OK);
    read_all(layer, &before);
    if (stop + 1 < run + 32) append(layer, 0, 1);
    read_all(layer, &after);
    CHECK(!memcmp(before.keys + run * KEY, after.keys + run * KEY, (size_t)((stop - run) * KEY) * sizeof(float)));
    CHECK(!memcmp(before.values + run * VALUE, after.values + run * VALUE,
                  (size_t)((stop - run) * VALUE) * sizeof(float)));
    kvedge_layer_destroy(layer);
  }
  end();
}

/* A layer by its name, without a word of formats. */
static void test_recommended(void) {
  begin("recommended");
  static const float errors[] = {0.01f, 0.2f, 0.02f}; /* of attention, whose values are below 1 */
  static const char *const names[] = {"auto", "small", "int8"};
  for (int i = 0; i < 3; i++) {
    kvedge_layer_config config, exact = {.format = KVEDGE_FLOAT32};
    CHECK(kvedge_layer_config_of(names[i], &config) == KVEDGE_OK);
    config.capacity = exact.capacity = TOKENS, config.num_kv_heads = exact.num_kv_heads = HEADS;
    config.head_dim = exact.head_dim = DIM, config.value_head_dim = exact.value_head_dim = WIDE;
    kvedge_layer *layer = new_layer(&config), *reference = new_layer(&exact);
    float out[2][VALUE];
    append(layer, 0, 300), append(layer, 300, 1), append(reference, 0, 299);
    CHECK(kvedge_layer_set_len(layer, 299) == KVEDGE_OK);
    CHECK(kvedge_attend(layer, keys, 1, HEADS, NULL, 0, out[0], NULL) == KVEDGE_OK);
    CHECK(kvedge_attend(reference, keys, 1, HEADS, NULL, 0, out[1], NULL) == KVEDGE_OK);
    for (int d = 0; d < VALUE; d++)
      if (!near(out[0][d], out[1][d], errors[i])) fail("%s: %g, not %g", names[i], out[0][d], out[1][d]);
    end_case();
    kvedge_layer_destroy(layer), kvedge_layer_destroy(reference);
  }
  kvedge_layer_config config = {.capacity = 7};
  CHECK(kvedge_layer_config_of("other", &config) == KVEDGE_ERROR_ARGUMENT && config.capacity == 7);
  CHECK(kvedge_layer_config_of(NULL, &config) == KVEDGE_ERROR_ARGUMENT);
  end();
}

static void test_refused(void) {
  begin("refused");
  kvedge_layer_config config = random_config(), bad;
  kvedge_layer *layer, *plain;
  bad = config, bad.recent_format = KVEDGE_RECENT(KVEDGE_INT8);
  CHECK(kvedge_layer_bytes(&bad) == 0);
  bad = config, bad.recent = 65537;
  CHECK(kvedge_layer_bytes(&bad) == 0);
  bad = config, bad.sinks = -1;
  CHECK(kvedge_layer_create(&bad, NULL, &layer) == KVEDGE_ERROR_ARGUMENT);
  for (int i = 0; i < 40; i++) {
    config = random_config();
    config.recent_format = KVEDGE_RECENT(KVEDGE_FLOAT16);
    layer = new_layer(&config), plain = new_layer(&config);
    const int n = random_below(200);
    append(layer, 0, n), append(plain, 0, n);
    static float wrong[64 * KEY];
    memcpy(wrong, keys, sizeof wrong);
    wrong[63 * KEY + 3] = i % 2 ? NAN : 65521.0f; /* beyond a half */
    const kvedge_status status = i % 2 ? KVEDGE_ERROR_NONFINITE : KVEDGE_ERROR_SCALE;
    CHECK(kvedge_layer_append(layer, wrong, values, 64) == status);
    const kvedge_array key_rows[2] = {
        {keys,  KVEDGE_TYPE_FLOAT32, KEY * 4, DIM * 4},
        {wrong, KVEDGE_TYPE_FLOAT32, KEY * 4, DIM * 4}
    };
    const kvedge_array value_rows[2] = {
        {values, KVEDGE_TYPE_FLOAT32, VALUE * 4, WIDE * 4},
        {values, KVEDGE_TYPE_FLOAT32, VALUE * 4, WIDE * 4}
    };
    kvedge_layer *both[2] = {layer, new_layer(&config)};
    CHECK(kvedge_layers_append(both, key_rows, value_rows, 2, 64) == status);
    CHECK(is_same(layer, plain) && kvedge_layer_len(both[1]) == 0);
    CHECK(kvedge_layer_write(layer, 0, keys, values, 1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_set_len(layer, n + 1) == KVEDGE_ERROR_ARGUMENT);
    append(layer, n, 40), append(plain, n, 40);
    CHECK(is_same(layer, plain));
    kvedge_layer_destroy(layer), kvedge_layer_destroy(plain), kvedge_layer_destroy(both[1]);
  }
  end();
}

static void test_kept_and_shifted(void) {
  begin("kept and shifted");
  static tokens_read before, after;
  float cosines[DIM / 2], sines[DIM / 2];
  for (int i = 0; i < 60; i++) {
    kvedge_layer_config config = random_config();
    if (in_runs(&config)) continue;
    kvedge_layer *layer = new_layer(&config);
    const int64_t n = 1 + random_below(500), drop = random_below((int)n), first = random_below((int)drop + 1);
    append(layer, 0, n);
    append(layer, 0, 1);
    int64_t tokens[TOKENS], kept = 0;
    for (int64_t t = 0; t <= n; t++)
      if (t < first || t >= drop) tokens[kept++] = t;
    read_all(layer, &before);
    CHECK(kvedge_layer_keep(layer, tokens, kept) == KVEDGE_OK && kvedge_layer_len(layer) == kept);
    read_all(layer, &after);
    for (int64_t t = 0; t < kept; t++)
      if (t < kept - config.recent || tokens[t] > n - config.recent) /* others are recent now, and were not */
        if (memcmp(after.keys + t * KEY, before.keys + tokens[t] * KEY, KEY * sizeof(float)) ||
            memcmp(after.values + t * VALUE, before.values + tokens[t] * VALUE, VALUE * sizeof(float)))
          fail("token %d of %d kept is not %d", (int)t, (int)kept, (int)tokens[t]);
    end_case();
    check_attention(layer);
    CHECK(kvedge_rotation_angles(1e4, DIM, -5, cosines, sines) == KVEDGE_OK);
    const kvedge_rotation by = {.dims = DIM, .cosines = cosines, .sines = sines};
    CHECK(kvedge_layer_shift(layer, 0, kept, &by) == KVEDGE_OK);
    check_attention(layer);
    append(layer, 0, 150);
    check_attention(layer);
    end_case();
    kvedge_layer_destroy(layer);
  }
  end();
}

/* ---- Readers beside a writer: keys are zeros, so attention gives the mean of values, which are numbers of tokens --------- */

enum { LONG = 3000, READERS = 3 };
static kvedge_layer *shared;
static atomic_int is_done;

static float value_of(int64_t token) { return (float)(token * 37 % 101 + 27); }

static void *read_beside(void *wrong) {
  static const float query[KEY] = {0};
  float out[VALUE], read[4 * VALUE];
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  while (!atomic_load(&is_done)) {
    const int64_t n = kvedge_layer_len(shared);
    if (n == 0) continue;
    double mean = 0.0;
    for (int64_t t = 0; t < n; t++) mean += value_of(t) / (double)n;
    options.num_tokens = n;
    const kvedge_attention_call call = {
        .layer = shared,
        .query = {(void *)(uintptr_t)query, KVEDGE_TYPE_FLOAT32, KEY * 4,   DIM * 4 },
        .num_rows = 1,
        .num_heads = HEADS,
        .out = {out,                      KVEDGE_TYPE_FLOAT32, VALUE * 4, WIDE * 4},
        .options = &options
    };
    const kvedge_attention_call twice[2] = {call, call}; /* a writer that waits for readers lets both in or none */
    if (kvedge_attend_layers(twice, 1 + (int)(n % 2), 1) != KVEDGE_OK) *(int *)wrong += 1;
    for (int d = 0; d < VALUE; d++) *(int *)wrong += !(fabs(out[d] - mean) < 2e-2 * mean);
    const int64_t count = n < 4 ? n : 4;
    if (kvedge_layer_get(shared, 1, -1, n - count, n, read) != KVEDGE_OK) *(int *)wrong += 1;
    for (int64_t t = 0; t < count; t++)
      *(int *)wrong += !(fabs(read[t * VALUE] - value_of(n - count + t)) < 0.02 * value_of(n - count + t));
  }
  return NULL;
}

static void test_readers_beside_a_writer(void) {
  begin("readers beside a writer");
  static float zeros[300 * KEY], rows[300 * VALUE];
  for (int i = 0; i < 7; i++) {
    kvedge_layer_config config = random_config();
    config.capacity = LONG;
    if (config.format != KVEDGE_KIVI8) config.value_format = 0; /* two bits, or floats of 8, are too coarse here */
    if (config.format == KVEDGE_KIVI4 || config.format == KVEDGE_INT4) config.format = KVEDGE_KIVI8;
    config.value_rotation = 0;
    shared = new_layer(&config);
    pthread_t threads[READERS];
    int wrong[READERS] = {0};
    atomic_store(&is_done, 0);
    for (int r = 0; r < READERS; r++) CHECK(pthread_create(&threads[r], NULL, read_beside, &wrong[r]) == 0);
    const int64_t limit = getenv("KVEDGE_TEST_SHORT") ? 300 : LONG;
    for (int64_t end = 0, n; end < limit; end += n) {
      n = ONE_OF(1, 1, 1, 1, 2, 7, 33, 300);
      if (n > limit - end) n = limit - end;
      for (int64_t t = 0; t < n * VALUE; t++) rows[t] = value_of(end + t / VALUE);
      if (kvedge_layer_append(shared, zeros, rows, n) != KVEDGE_OK) fail("append refused");
    }
    atomic_store(&is_done, 1);
    for (int r = 0; r < READERS; r++) CHECK(pthread_join(threads[r], NULL) == 0 && wrong[r] == 0);
    kvedge_layer_destroy(shared);
  }
  end();
}

int main(void) {
  for (int i = 0; i < TOKENS * KEY; i++) keys[i] = random_signed(3.0f);
  for (int i = 0; i < TOKENS * VALUE; i++) values[i] = random_signed(3.0f);
  test_what_is_read();
  test_copies_go_on_alike();
  test_prompts();
  test_kept_and_shifted();
  test_cut_runs();
  test_recommended();
  test_refused();
  test_readers_beside_a_writer();
  return report();
}
