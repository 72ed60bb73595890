/* Session files: what is written is read, and written again, to the same bytes; what is damaged is refused, and no layer
 * changes; SHA-256 as the standard has it. That Python's files are these, and that both refuse the same forged ones, is for
 * tests/session to check.
 *
 * Files and the reader's memory lie in blocks of exactly their size, so a stray access is a fault.
 */
#include "check.h"
#include "formats/format.h"
#include "kvedge.h"
#include "memory_sink.h"
#include "session/sha256.h"

/* ---- SHA-256 -------------------------------------------------------------------------------------------------------- */

static int digest_is(const char *text, size_t times, size_t piece, const char *expected) {
  const size_t n = strlen(text) * times;
  char *all = malloc(n + 1), hex[64];
  for (size_t i = 0; i < n; i++) all[i] = text[i % strlen(text)];
  kvedge_sha256 sha;
  kvedge_sha256_begin(&sha);
  for (size_t at = 0; at < n; at += piece) kvedge_sha256_take(&sha, all + at, n - at < piece ? n - at : piece);
  kvedge_sha256_end(&sha, hex);
  free(all);
  return memcmp(hex, expected, 64) == 0;
}

static void test_sha256(void) {
  static const struct {
    const char *text;
    size_t times;
    const char *digest;
  } examples[] = {
      /* of FIPS 180-4 and NIST's example values */
      {"",                                                         1,       "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc",                                                      1,       "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"                                                                     },
      {"a",                                                        1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}
  };
  begin("sha256");
  for (size_t i = 0; i < sizeof examples / sizeof *examples; i++)
    for (size_t piece = 1; piece < 200; piece = piece * 3 / 2 + 1)
      CHECK(digest_is(examples[i].text, examples[i].times, piece, examples[i].digest));
  end();
}

/* ---- Sessions ------------------------------------------------------------------------------------------------------- */

enum { MAX_LAYERS = 12, MOST_TOKENS = 500 };

typedef struct {
  kvedge_session session;
  kvedge_session_layer own[MAX_LAYERS];
  kvedge_layer *layers[MAX_LAYERS];
} sample;

static block write_file(const kvedge_session *session, kvedge_layer *const *layers) {
  block file = new_block(kvedge_session_bytes(session, layers));
  buffer to = {file.data, 0, file.size};
  if (kvedge_session_write(session, layers, take, &to) != KVEDGE_OK || to.bytes != file.size)
    fail("a file of %zu bytes was written as %zu", file.size, to.bytes);
  return file;
}

static void append_tokens(kvedge_layer *layer, const float *keys, const float *values, int tokens) {
  if (kvedge_layer_append(layer, keys, values, tokens) != KVEDGE_OK) fail("append");
}

static kvedge_layer *new_layer(kvedge_layer_config config, int tokens) {
  kvedge_layer *layer;
  if (kvedge_layer_create(&config, NULL, &layer) != KVEDGE_OK) fail("no layer"), exit(2);
  kvedge_layer_describe(layer, &config, NULL);
  const size_t keys = (size_t)(config.num_kv_heads * config.head_dim);
  const size_t values = (size_t)(config.num_kv_heads * config.value_head_dim);
  float *scale = random_floats(keys, 1.0f), *k = random_floats(keys * (size_t)tokens, 3.0f);
  float *v = random_floats(values * (size_t)tokens, 3.0f);
  for (size_t i = 0; i < keys; i++) scale[i] = 1.5f + scale[i];
  if (config.format == KVEDGE_INT8 && config.num_kv_heads > 1) kvedge_layer_set_key_offset(layer, k);
  if (config.head_dim % 2) kvedge_layer_set_key_scale(layer, scale); /* keys in runs refuse it */
  append_tokens(layer, k, v, tokens);
  free(scale), free(k), free(v);
  return layer;
}

/* Layers that differ in all they can, the last with windows. */
static sample new_sample(int num_layers, int length) {
  static const kvedge_session_text texts[] = {
      {"",                                 "\"quoted\\\"\n\t\x01\x7f", 0, 12},
      {"a\0b",                             "",                         3, 0 },
      {"\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87", "\xf0\x9f\x98\x80",         8, 4 },
  };
  sample s = {
      .session = {.num_layers = num_layers, .length = length, .metadata = texts, .num_metadata = 3}
  };
  for (int i = 0; i < num_layers; i++) {
    const int has_ranges = i % 3 == 1, in_runs = i % 6 == 1;
    kvedge_layer_config config = {.format = (kvedge_format)(i % KVEDGE_NUM_FORMATS),
                                  .scale_type = i > 5 ? KVEDGE_SCALE_FLOAT16 : KVEDGE_SCALE_FLOAT32,
                                  .capacity = MOST_TOKENS,
                                  .num_kv_heads = 1 + i % 3,
                                  .head_dim = 5 + i / 4,
                                  .value_head_dim = i % 4 == 3 ? 3 : 0,
                                  .value_format = i % 5 == 2 ? KVEDGE_VALUES(i / 5 % KVEDGE_NUM_FORMATS) : 0,
                                  .group_size = i % 2 ? 0 : 4,
                                  .value_rotation = i % 4 == 1};
    s.own[i].window = i > 6 ? 4 : 0;
    s.own[i].dropped = s.own[i].window && length > 3 ? length - 3 : 0;
    if (has_ranges) {
      config.recent = 2, config.sinks = s.own[i].window ? 0 : 3;
      config.recent_format = KVEDGE_RECENT(i % 2 ? KVEDGE_FLOAT16 : KVEDGE_BFLOAT16);
    }
    if (in_runs) {
      config.format = i > 5 ? KVEDGE_INT8 : KVEDGE_KIVI4;
      config.value_format = KVEDGE_VALUES(i > 5 ? KVEDGE_KIVI2 : num_layers % 2 ? KVEDGE_INT4 : KVEDGE_KIVI8);
    }
    s.layers[i] = new_layer(config, length + i % 2); /* one more than is saved */
    kvedge_layer_drop_first(s.layers[i], s.own[i].dropped);
  }
  return s;
}

static void free_sample(sample *s) {
  for (int i = 0; i < s->session.num_layers; i++) kvedge_layer_destroy(s->layers[i]);
}

/* A file that is read, and new layers for it, with room for more tokens. */
enum { MORE = 40 };
typedef struct {
  block memory;
  kvedge_session_reader *reader;
  const kvedge_session *held;
  kvedge_layer *layers[MAX_LAYERS];
} opened;

static void close_file(opened *o) {
  for (int i = 0; i < MAX_LAYERS; i++) kvedge_layer_destroy(o->layers[i]);
  if (o->memory.base) free_block(&o->memory);
}

/* Reads up to the layers, of another capacity, empty. */
static kvedge_status open_file(const block *file, opened *o, const char **why) {
  size_t needed;
  memset(o, 0, sizeof *o);
  kvedge_status status = kvedge_session_reader_bytes(file->data, file->size, &needed, why);
  if (status != KVEDGE_OK) return status;
  o->memory = new_block(needed);
  status = kvedge_session_read(file->data, file->size, o->memory.data, needed, &o->reader, why);
  if (status != KVEDGE_OK) return status;
  o->held = kvedge_session_held(o->reader);
  for (int i = 0; i < o->held->num_layers && i < MAX_LAYERS; i++) {
    kvedge_layer_config config = o->held->layers[i].config;
    config.capacity = o->held->length + MORE + i;
    if (kvedge_layer_create(&config, NULL, &o->layers[i]) != KVEDGE_OK) return KVEDGE_ERROR_MEMORY;
  }
  return KVEDGE_OK;
}

static kvedge_status load_file(const block *file, opened *o, const char **why) {
  const kvedge_status status = open_file(file, o, why);
  return status == KVEDGE_OK ? kvedge_session_load(o->reader, o->layers, why) : status;
}

static int same_file(const block *a, const block *b) {
  return a->size == b->size && memcmp(a->data, b->data, a->size) == 0;
}

/* A layer that was loaded holds what the saved one does, and goes on alike. */
static int goes_on(kvedge_layer *a, kvedge_layer *b, int64_t len) {
  kvedge_layer_config config;
  kvedge_layer_describe(a, &config, NULL);
  const size_t n = (size_t)(config.num_kv_heads * config.head_dim), m = (size_t)(len + MORE);
  float *rows = random_floats(MORE * n, 3.0f), *keys[2] = {malloc(m * n * 4), malloc(m * n * 4)};
  int same = kvedge_layer_set_len(a, len) == KVEDGE_OK && kvedge_layer_len(b) == len;
  for (int tokens = 1, at = 0; at < MORE; at += tokens, tokens = MORE - at < 17 ? MORE - at : 17) {
    append_tokens(a, rows, rows, tokens), append_tokens(b, rows, rows, tokens);
    const int64_t held = len + at + tokens;
    same = same && kvedge_layer_get(a, 0, -1, 0, held, keys[0]) == KVEDGE_OK &&
           kvedge_layer_get(b, 0, -1, 0, held, keys[1]) == KVEDGE_OK && !memcmp(keys[0], keys[1], (size_t)held * n * 4);
  }
  free(rows), free(keys[0]), free(keys[1]);
  return same;
}

static void test_round_trip(void) {
  begin("written, read, written");
  for (int num_layers = 1; num_layers <= MAX_LAYERS; num_layers++)
    for (int length = 0; length < 400; length = 3 * length + 1) {
      sample s = new_sample(num_layers, length);
      s.session.layers = s.own;
      s.session.auto_key_offset = s.session.auto_key_scale = length % 2;
      s.session.max_seq_len = num_layers % 2 ? MOST_TOKENS : 0;
      block file = write_file(&s.session, s.layers);
      opened o;
      const char *why = NULL;
      if (load_file(&file, &o, &why) != KVEDGE_OK) {
        fail("%d layers, %d tokens: %s", num_layers, length, why ? why : "no reason");
      } else {
        block again = write_file(o.held, o.layers);
        if (!same_file(&file, &again)) fail("%d layers, %d tokens: another file", num_layers, length);
        if (o.held->num_metadata != 3 || o.held->metadata[1].key_bytes != 3) fail("metadata");
        for (int i = 0; i < num_layers; i++) {
          kvedge_layer_config config = {0};
          kvedge_layer_describe(s.layers[i], &config, NULL);
          if (o.held->layers[i].config.head_dim != config.head_dim) fail("config of layer %d", i);
          if (!goes_on(s.layers[i], o.layers[i], length - s.own[i].dropped)) fail("layer %d goes on differently", i);
        }
        free_block(&again);
      }
      end_case();
      close_file(&o), free_block(&file), free_sample(&s);
    }
  end();
}

/* ---- What is refused ------------------------------------------------------------------------------------------------ */

static int are_empty(const opened *o) {
  for (int i = 0; o->held && i < o->held->num_layers && i < MAX_LAYERS; i++)
    if (o->layers[i] && kvedge_layer_len(o->layers[i])) return 0;
  return 1;
}

/* Is it refused, with a reason? */
static int is_refused(const block *file) {
  opened o;
  const char *why = NULL;
  const kvedge_status status = load_file(file, &o, &why);
  const int refused = status == KVEDGE_ERROR_FILE && why && are_empty(&o);
  close_file(&o);
  return refused;
}

/* Layer 1 is in runs, with first and last tokens, or not; the session's layers are the sample's own then, which is not copied. */
static void small_sample(sample *s, int in_runs) {
  *s = (sample){
      .session = {.num_layers = 2, .length = 3}
  };
  kvedge_layer_config config = {.format = KVEDGE_INT8, .capacity = 8, .num_kv_heads = 2, .head_dim = 3};
  s->layers[0] = new_layer(config, 3);
  config.format = in_runs ? KVEDGE_KIVI4 : KVEDGE_FLOAT16;
  if (in_runs) config.recent = 2, config.sinks = 2;
  s->layers[1] = new_layer(config, 3);
  if (in_runs) s->session.layers = s->own;
}

static void test_truncated(int in_runs) {
  begin(in_runs ? "runs: cut, or longer" : "cut, or longer");
  sample s;
  small_sample(&s, in_runs);
  block file = write_file(&s.session, s.layers);
  for (size_t bytes = 0; bytes < file.size; bytes++) {
    block cut = new_block(bytes ? bytes : 1);
    cut.size = bytes;
    memcpy(cut.data, file.data, bytes);
    CHECK(is_refused(&cut));
    cut.size = bytes ? bytes : 1;
    free_block(&cut);
  }
  block longer = new_block(file.size + 1);
  memcpy(longer.data, file.data, file.size), ((char *)longer.data)[file.size] = 0;
  CHECK(is_refused(&longer));
  free_block(&longer), free_block(&file), free_sample(&s);
  end();
}

/* Any byte changed: refused, or (spaces in the header) the same session. */
static void test_changed_bytes(int in_runs) {
  begin(in_runs ? "runs: every byte changed" : "every byte changed");
  sample s;
  small_sample(&s, in_runs);
  const kvedge_session_text text = {"k", "v\xc3\xa4\n", 1, 4};
  s.session.metadata = &text, s.session.num_metadata = 1;
  kvedge_layer_drop_first(s.layers[0], 1);
  s.own[0].window = 2, s.own[0].dropped = 1, s.session.layers = s.own;
  block file = write_file(&s.session, s.layers);
  static const unsigned char changes[] = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xff};
  for (size_t at = 0; at < file.size; at++) {
    unsigned char *byte = (unsigned char *)file.data + at;
    const unsigned char was = *byte;
    for (size_t i = 0; i < sizeof changes + 3; i++) {
      *byte = i < sizeof changes ? was ^ changes[i] : (unsigned char)" \"{"[i - sizeof changes];
      if (*byte == was) continue;
      opened o;
      const char *why = NULL;
      const kvedge_status status = load_file(&file, &o, &why);
      if (status == KVEDGE_OK) {
        block again = write_file(o.held, o.layers);
        *byte = was;
        if (!same_file(&file, &again)) fail("byte %zu changed by %zu: another session", at, i);
        free_block(&again);
      } else if (status != KVEDGE_ERROR_FILE || !why || !are_empty(&o)) {
        fail("byte %zu changed by %zu: status %d", at, i, (int)status);
      }
      close_file(&o);
      *byte = was;
    }
    end_case();
  }
  free_block(&file), free_sample(&s);
  end();
}

static void test_layers_that_do_not_fit(void) {
  begin("layers that do not fit");
  sample s;
  small_sample(&s, 0);
  block file = write_file(&s.session, s.layers);
  opened o;
  const char *why;
  CHECK(open_file(&file, &o, &why) == KVEDGE_OK);
  kvedge_layer *const good[] = {o.layers[0], o.layers[1]};
  CHECK(kvedge_session_load(o.reader, s.layers, &why) == KVEDGE_ERROR_ARGUMENT); /* not empty */
  CHECK(kvedge_session_load(o.reader, (kvedge_layer *[]){good[0], good[0]}, &why) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_session_load(o.reader, (kvedge_layer *[]){good[1], good[0]}, &why) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_session_load(o.reader, (kvedge_layer *[]){good[0], NULL}, &why) == KVEDGE_ERROR_ARGUMENT);
  kvedge_layer_config config = o.held->layers[1].config;
  kvedge_layer *small;
  config.capacity = 2;
  CHECK(kvedge_layer_create(&config, NULL, &small) == KVEDGE_OK);
  CHECK(kvedge_session_load(o.reader, (kvedge_layer *[]){good[0], small}, &why) == KVEDGE_ERROR_CAPACITY);
  kvedge_layer_destroy(small);
  CHECK(are_empty(&o));
  CHECK(kvedge_session_load(o.reader, good, NULL) == KVEDGE_OK);
  CHECK(kvedge_layer_len(good[0]) == 3 && kvedge_layer_len(good[1]) == 3);
  CHECK(kvedge_session_read(file.data, file.size, o.memory.data, o.memory.size - 16, &o.reader, &why) ==
        KVEDGE_ERROR_MEMORY);
  close_file(&o), free_block(&file), free_sample(&s);
  end();
}

/* A layer that is to be written or filled, with first and last tokens, and in runs. */
static void test_ranges_that_do_not_fit(void) {
  begin("ranges that do not fit");
  sample s;
  small_sample(&s, 1);
  kvedge_layer_config plain = {.format = KVEDGE_KIVI4, .capacity = 32, .num_kv_heads = 2, .head_dim = 3},
                      recent = plain;
  recent.recent = 2;
  kvedge_layer *whole_runs = new_layer(plain, 32), *without_sinks = new_layer(recent, 3);
  for (int i = 0; i < 4; i++) {
    kvedge_session wrong = s.session;
    kvedge_layer *layers[2] = {s.layers[0], s.layers[1]};
    memset(s.own, 0, sizeof s.own);
    if (i == 0) layers[1] = whole_runs;                                               /* no recent_format */
    if (i == 1) s.own[1].window = 8;                                                  /* and sinks */
    if (i == 2) layers[1] = without_sinks, s.own[1].window = 2, s.own[1].dropped = 1; /* runs of other positions */
    if (i == 3) layers[1] = without_sinks;
    CHECK((kvedge_session_bytes(&wrong, layers) == 0) == (i < 3));
  }
  kvedge_layer_destroy(whole_runs), kvedge_layer_destroy(without_sinks);
  memset(s.own, 0, sizeof s.own);

  block file = write_file(&s.session, s.layers);
  opened o;
  const char *why;
  CHECK(open_file(&file, &o, &why) == KVEDGE_OK);
  for (int i = 0; i < 5; i++) {
    kvedge_layer_config config = o.held->layers[1].config;
    kvedge_layer *other;
    if (i == 0) config.recent++;
    if (i == 1) config.sinks = 0;
    if (i == 2) config.recent_format = KVEDGE_RECENT(KVEDGE_BFLOAT16);
    if (i == 3) config = plain;
    if (i == 4) config.value_format = KVEDGE_VALUES(KVEDGE_KIVI2);
    CHECK(kvedge_layer_create(&config, NULL, &other) == KVEDGE_OK);
    CHECK(kvedge_session_load(o.reader, (kvedge_layer *[]){o.layers[0], other}, &why) == KVEDGE_ERROR_ARGUMENT);
    CHECK(are_empty(&o) && kvedge_layer_len(other) == 0);
    kvedge_layer_destroy(other);
  }
  CHECK(kvedge_session_load(o.reader, o.layers, &why) == KVEDGE_OK && kvedge_layer_len(o.layers[1]) == 3);
  close_file(&o), free_block(&file), free_sample(&s);
  end();
}

/* A session of fewer tokens than its layers hold is that of layers that were cut. */
static void test_sessions_of_fewer_tokens(void) {
  begin("fewer tokens than held");
  static const kvedge_format formats[] = {KVEDGE_INT8, KVEDGE_KIVI8};
  for (int i = 0; i < 2; i++)
    for (int length = 0; length <= 300; length += 1 + random_below(7)) {
      kvedge_layer *layer = new_layer(
          (kvedge_layer_config){
              .format = formats[i], .capacity = 320, .num_kv_heads = 1, .head_dim = 4, .recent = 30, .sinks = 3},
          300);
      const kvedge_session session = {.num_layers = 1, .length = length};
      block file = write_file(&session, &layer);
      kvedge_layer_set_len(layer, length);
      block of_cut = write_file(&session, &layer);
      CHECK(same_file(&file, &of_cut));
      free_block(&file), free_block(&of_cut), kvedge_layer_destroy(layer);
    }
  end();
}

static void test_what_cannot_be_written(void) {
  begin("what cannot be written");
  sample s;
  small_sample(&s, 0);
  const size_t bytes = kvedge_session_bytes(&s.session, s.layers);
  char *room = malloc(bytes);
  for (size_t i = 0; i < bytes; i += 50) { /* a sink that is full */
    buffer to = {room, 0, i};
    CHECK(kvedge_session_write(&s.session, s.layers, take, &to) == KVEDGE_ERROR_FILE);
  }
  free(room);
  const kvedge_session_text texts[] = {
      {"b", "",     1, 0},
      {"a", "",     1, 0},
      {"c", "\xff", 1, 1}
  };
  s.session.layers = s.own;
  for (int i = 0; i < 14; i++) {
    kvedge_session wrong = s.session;
    kvedge_layer *layers[] = {s.layers[0], s.layers[1]};
    memset(s.own, 0, sizeof s.own);
    wrong.metadata = texts;
    if (i == 0) wrong.num_layers = 0;
    if (i == 1) wrong.num_layers = 4097;
    if (i == 2) wrong.length = 4; /* than the layers hold */
    if (i == 3) wrong.length = -1;
    if (i == 4) wrong.max_seq_len = 2;
    if (i == 5) s.own[0].window = -1;
    if (i == 6) s.own[0].dropped = 1; /* of a layer without a window */
    if (i == 7) s.own[0].window = 4, s.own[0].dropped = 1;
    if (i == 8) wrong.num_metadata = 2;                             /* not in order */
    if (i == 9) wrong.metadata = texts + 1, wrong.num_metadata = 2; /* no UTF-8 */
    if (i == 10) wrong.num_metadata = 1, wrong.metadata = NULL;
    if (i == 11) layers[1] = NULL;
    if (i == 12) layers[0] = layers[1], wrong.auto_key_offset = 1;
    if (i == 13) layers[0] = layers[1], wrong.auto_key_scale = 1;
    buffer to = {NULL, 0, 0};
    CHECK(kvedge_session_bytes(&wrong, layers) == 0);
    CHECK(kvedge_session_write(&wrong, layers, take, &to) == KVEDGE_ERROR_ARGUMENT && to.bytes == 0);
  }
  kvedge_layer *grid =
      new_layer((kvedge_layer_config){.format = KVEDGE_GRID4, .capacity = 1, .num_kv_heads = 1, .head_dim = 4}, 1);
  const kvedge_session session = {.num_layers = 1, .length = 1};
  CHECK(kvedge_session_bytes(&session, &grid) == 0);
  kvedge_layer_destroy(grid), free_sample(&s);
  end();
}

/* ---- States --------------------------------------------------------------------------------------------------------- */

/* Layer 0 and layer 3, beside the layers 1 and 2 of keys and values, or layers 0 to 11 without such. */
static int fill_states(kvedge_session_state *states, int alone) {
  static const float floats[] = {0.5f, -1.25f, 3e38f, 0};
  static const uint16_t halves[] = {0x3c00, 0x7bff, 0x8001, 0x3f80, 0x7f7f, 0};
  const kvedge_session_state made[] = {
      {0, "_a1",       KVEDGE_TYPE_BFLOAT16, 2, {2, 3},    halves},
      {0, "recurrent", KVEDGE_TYPE_FLOAT32,  1, {4},       floats},
      {3, "S",         KVEDGE_TYPE_FLOAT16,  3, {1, 1, 3}, halves}
  };
  for (int i = 0; i < (alone ? 12 : 3); i++) {
    states[i] = made[i % 3];
    if (alone) states[i].layer = i;
  }
  return alone ? 12 : 3;
}

static void test_states(int alone) {
  begin(alone ? "states alone" : "states beside layers");
  sample s;
  small_sample(&s, 0);
  kvedge_session_state states[12];
  s.session.states = states, s.session.num_states = fill_states(states, alone);
  if (alone) free_sample(&s), s.session.num_layers = 0, memset(s.layers, 0, sizeof s.layers);
  block file = write_file(&s.session, s.layers);
  opened o;
  const char *why = NULL;
  CHECK(load_file(&file, &o, &why) == KVEDGE_OK && o.held->num_states == s.session.num_states);
  for (int i = 0; i < s.session.num_states; i++) {
    const kvedge_session_state *a = &states[i], *b = &o.held->states[i];
    size_t bytes = a->type == KVEDGE_TYPE_FLOAT32 ? 4 : 2;
    for (int d = 0; d < a->num_axes; d++) bytes *= (size_t)a->shape[d];
    CHECK(a->layer == b->layer && !strcmp(a->name, b->name) && a->type == b->type && a->num_axes == b->num_axes);
    CHECK(!memcmp(a->shape, b->shape, sizeof a->shape) && !memcmp(a->data, b->data, bytes));
  }
  block again = write_file(o.held, o.layers);
  CHECK(same_file(&file, &again));
  close_file(&o), free_block(&again);
  for (size_t at = 0; at < file.size; at++) { /* all bytes but spaces at the header's end count */
    ((unsigned char *)file.data)[at] ^= 0x04;
    CHECK(is_refused(&file));
    ((unsigned char *)file.data)[at] ^= 0x04;
  }
  free_block(&file), free_sample(&s);
  end();
}

static void test_states_that_cannot_be_written(void) {
  begin("states that cannot be written");
  sample s;
  small_sample(&s, 0);
  static const float infinite[] = {0, 0, 0, INFINITY};
  kvedge_session_state states[12];
  for (int i = 0; i < 14; i++) {
    s.session.states = states, s.session.num_states = fill_states(states, 0);
    if (i == 0) states[2].layer = 4; /* there is no layer 3 */
    if (i == 1) states[2].layer = 0; /* not in order */
    if (i == 2) states[0].layer = -1;
    if (i == 3) memcpy(states[0].name, "recurrent", 10); /* twice */
    if (i == 4) memcpy(states[0].name, "1a", 3);
    if (i == 5) states[0].name[0] = 0;
    if (i == 6) memset(states[0].name, 'a', sizeof states[0].name); /* without an end */
    if (i == 7) states[0].type = (kvedge_element_type)3;
    if (i == 8) states[0].num_axes = 0;
    if (i == 9) states[0].num_axes = 9;
    if (i == 10) states[0].shape[1] = 0;
    if (i == 11) states[0].shape[0] = INT64_MAX;
    if (i == 12) states[0].data = NULL;
    if (i == 13) s.session.states = NULL;
    buffer to = {NULL, 0, 0};
    CHECK(kvedge_session_bytes(&s.session, s.layers) == 0);
    CHECK(kvedge_session_write(&s.session, s.layers, take, &to) == KVEDGE_ERROR_ARGUMENT && to.bytes == 0);
  }
  s.session.states = states, s.session.num_states = fill_states(states, 0);
  states[1].data = infinite; /* written as keys that others filled in are; never read */
  block file = write_file(&s.session, s.layers);
  CHECK(is_refused(&file));
  free_block(&file), free_sample(&s);
  end();
}

int main(void) {
  test_sha256();
  test_round_trip();
  test_truncated(0), test_truncated(1);
  test_changed_bytes(0), test_changed_bytes(1);
  test_layers_that_do_not_fit();
  test_ranges_that_do_not_fit();
  test_sessions_of_fewer_tokens();
  test_what_cannot_be_written();
  test_states(0), test_states(1);
  test_states_that_cannot_be_written();
  return report();
}
