/* Editing: copies, room, keeping some tokens, moving keys; blocks of a pool. */
#include "check.h"
#include "kvedge.h"
#include "store/layer_struct.h"

enum { HEADS = 3, DIM = 10, WIDE = 6, TOKENS = 40 };

static const kvedge_format formats[] = {KVEDGE_INT8,     KVEDGE_FLOAT32,  KVEDGE_FLOAT16, KVEDGE_BFLOAT16,
                                        KVEDGE_FP8_E4M3, KVEDGE_FP8_E5M2, KVEDGE_GRID3};
enum { NUM = sizeof formats / sizeof *formats };

/* An allocator that counts, and fails when told to. Its memory comes filled with large numbers: rows that hold no token
 * may not be looked at. */
typedef struct {
  int held, asked, fails;
} counter;

static void *counted(void *context, size_t bytes) {
  counter *c = context;
  c->asked++;
  if (c->fails) return NULL;
  c->held++;
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  return memory ? memset(memory, 0x7e, bytes) : NULL;
}

static void released(void *context, void *memory, size_t bytes) {
  counter *c = context;
  c->held--;
  memset(memory, 0xee, bytes); /* what still reads it will show */
  free(memory);
}

static kvedge_layer_config config_of(kvedge_format format, int64_t capacity) {
  return (kvedge_layer_config){.format = format,
                               .capacity = capacity,
                               .num_kv_heads = HEADS,
                               .head_dim = DIM,
                               .value_head_dim = WIDE,
                               .group_size = 4};
}

static float keys[TOKENS][HEADS][DIM], values[TOKENS][HEADS][WIDE];

static void fill(void) {
  uint32_t state = 7;
  float *all[] = {&keys[0][0][0], &values[0][0][0]};
  const size_t sizes[] = {sizeof keys / 4, sizeof values / 4};
  for (int s = 0; s < 2; s++)
    for (size_t i = 0; i < sizes[s]; i++) {
      state = state * 1664525u + 1013904223u;
      all[s][i] = (float)(int32_t)state * 0x1p-30f;
    }
}

/* A layer with tokens first..stop-1. */
static kvedge_layer *layer_with(kvedge_format format, int64_t capacity, counter *c, int64_t first, int64_t stop) {
  const kvedge_layer_config config = config_of(format, capacity);
  const kvedge_allocator allocator = {.allocate = counted, .release = released, .context = c};
  kvedge_layer *layer = NULL;
  CHECK(kvedge_layer_create(&config, &allocator, &layer) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, keys[first][0], values[first][0], stop - first) == KVEDGE_OK);
  return layer;
}

typedef struct {
  float keys[TOKENS][HEADS][DIM], values[TOKENS][HEADS][WIDE];
  int64_t len;
} decoded;

static decoded decode(const kvedge_layer *layer) {
  decoded d;
  memset(&d, 0, sizeof d);
  d.len = kvedge_layer_len(layer);
  CHECK(kvedge_layer_get(layer, 0, -1, 0, d.len, d.keys[0][0]) == KVEDGE_OK);
  CHECK(kvedge_layer_get(layer, 1, -1, 0, d.len, d.values[0][0]) == KVEDGE_OK);
  return d;
}

static int same(const kvedge_layer *one, const kvedge_layer *other) {
  const decoded a = decode(one), b = decode(other);
  return memcmp(&a, &b, sizeof a) == 0;
}

static void test_copy(kvedge_format format) {
  counter c = {0};
  float offset[HEADS * DIM], scale[HEADS * DIM];
  for (int i = 0; i < HEADS * DIM; i++) offset[i] = (float)i / 64, scale[i] = 1 + (float)i / 32;
  kvedge_layer *from = layer_with(format, 20, &c, 0, 0), *to = layer_with(format, 12, &c, 0, 3);
  if (format == KVEDGE_INT8) CHECK(kvedge_layer_set_key_offset(from, offset) == KVEDGE_OK);
  CHECK(kvedge_layer_set_key_scale(from, scale) == KVEDGE_OK);
  CHECK(kvedge_layer_append(from, keys[0][0], values[0][0], 15) == KVEDGE_OK);
  CHECK(kvedge_layer_drop_first(from, 5) == KVEDGE_OK);
  CHECK(kvedge_layer_copy(from, to) == KVEDGE_ERROR_ARGUMENT); /* not empty */
  CHECK(kvedge_layer_drop_first(to, 3) == KVEDGE_OK);
  CHECK(kvedge_layer_copy(from, to) == KVEDGE_OK && same(from, to));
  CHECK(kvedge_layer_append(from, keys[20][0], values[20][0], 2) == KVEDGE_OK);
  CHECK(kvedge_layer_append(to, keys[20][0], values[20][0], 2) == KVEDGE_OK && same(from, to));
  kvedge_layer *small = layer_with(format, 11, &c, 0, 0);
  CHECK(kvedge_layer_copy(from, small) == KVEDGE_ERROR_CAPACITY && kvedge_layer_len(small) == 0);
  kvedge_layer *other = layer_with(format == KVEDGE_INT8 ? KVEDGE_FLOAT16 : KVEDGE_INT8, 20, &c, 0, 0);
  CHECK(kvedge_layer_copy(from, other) == KVEDGE_ERROR_ARGUMENT && kvedge_layer_copy(from, from) != KVEDGE_OK);
  CHECK(kvedge_layer_copy(NULL, to) == KVEDGE_ERROR_ARGUMENT && kvedge_layer_copy(from, NULL) == KVEDGE_ERROR_ARGUMENT);
  kvedge_layer *layers[] = {from, to, small, other};
  for (int i = 0; i < 4; i++) kvedge_layer_destroy(layers[i]);
  CHECK(c.held == 0);
}

static void test_reserve(kvedge_format format) {
  counter c = {0};
  kvedge_layer *layer = layer_with(format, 4, &c, 0, 4), *all = layer_with(format, TOKENS, &c, 0, TOKENS);
  kvedge_layer *before = layer;
  CHECK(kvedge_layer_reserve(&layer, 0) == KVEDGE_OK && layer == before);
  c.fails = 1;
  CHECK(kvedge_layer_reserve(&layer, 1) == KVEDGE_ERROR_MEMORY && layer == before && kvedge_layer_len(layer) == 4);
  CHECK(kvedge_layer_reserve(&layer, INT64_MAX) == KVEDGE_ERROR_MEMORY && layer == before);
  CHECK(kvedge_layer_reserve(&layer, -1) == KVEDGE_ERROR_ARGUMENT && kvedge_layer_reserve(NULL, 1) != KVEDGE_OK);
  c.fails = 0;
  for (int64_t i = 4; i < TOKENS; i++) {
    CHECK(kvedge_layer_reserve(&layer, 1) == KVEDGE_OK);
    CHECK(kvedge_layer_append(layer, keys[i][0], values[i][0], 1) == KVEDGE_OK);
  }
  CHECK(same(layer, all));
  const int asked = c.asked; /* a window of 8 slides: it neither grows nor loses what it sees */
  for (int64_t i = 0; i < 4000; i++) {
    CHECK(kvedge_layer_reserve(&layer, 1) == KVEDGE_OK);
    CHECK(kvedge_layer_append(layer, keys[i % TOKENS][0], values[i % TOKENS][0], 1) == KVEDGE_OK);
    const int64_t unseen = kvedge_layer_len(layer) - 7;
    if (unseen > 0) CHECK(kvedge_layer_drop_first(layer, unseen) == KVEDGE_OK);
  }
  CHECK(c.asked == asked && kvedge_layer_len(layer) == 7);
  CHECK(kvedge_layer_drop_first(all, TOKENS - 7) == KVEDGE_OK && same(layer, all));
  kvedge_layer_destroy(layer), kvedge_layer_destroy(all);
  CHECK(c.held == 0);

  const kvedge_layer_config config = config_of(format, 4);
  block memory = new_block(kvedge_layer_bytes(&config));
  CHECK(kvedge_layer_init(memory.data, memory.size, &config, NULL, &layer) == KVEDGE_OK);
  CHECK(kvedge_layer_reserve(&layer, 5) == KVEDGE_ERROR_ARGUMENT); /* the caller's memory does not grow */
  free_block(&memory);
}

static void test_keep(kvedge_format format) {
  static const int64_t some[] = {0, 1, 4, 5, 6, 9, 13};
  static const int64_t wrong[][2] = {
      {3,  3 },
      {4,  3 },
      {-1, 3 },
      {0,  14}
  };
  enum { NUM_SOME = sizeof some / sizeof *some };
  counter c = {0};
  kvedge_layer *layer = layer_with(format, 20, &c, 0, 16);
  CHECK(kvedge_layer_drop_first(layer, 2) == KVEDGE_OK);
  const decoded before = decode(layer);
  for (int i = 0; i < 4; i++) CHECK(kvedge_layer_keep(layer, wrong[i], 2) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_keep(layer, NULL, 1) == KVEDGE_ERROR_ARGUMENT && kvedge_layer_keep(NULL, some, 1) != KVEDGE_OK);
  decoded now = decode(layer);
  CHECK(memcmp(&before, &now, sizeof now) == 0);
  CHECK(kvedge_layer_keep(layer, some, NUM_SOME) == KVEDGE_OK);
  now = decode(layer);
  CHECK(now.len == NUM_SOME);
  for (int i = 0; i < NUM_SOME; i++) {
    CHECK(memcmp(now.keys[i], before.keys[some[i]], sizeof now.keys[i]) == 0);
    CHECK(memcmp(now.values[i], before.values[some[i]], sizeof now.values[i]) == 0);
  }
  CHECK(kvedge_layer_append(layer, keys[0][0], values[0][0], 4) == KVEDGE_OK);
  CHECK(kvedge_layer_keep(layer, NULL, 0) == KVEDGE_OK && kvedge_layer_len(layer) == 0);
  kvedge_layer_destroy(layer);
}

/* The keys of a shifted layer are those that a layer stores which is given the turned keys of the first. */
static void test_shift(kvedge_format format, int interleaved, int dims) {
  counter c = {0};
  float cosines[DIM / 2], sines[DIM / 2];
  kvedge_layer *layer = layer_with(format, 20, &c, 0, 16), *turned = layer_with(format, 20, &c, 0, 0);
  CHECK(kvedge_rotation_angles(100.0, dims, -5, cosines, sines) == KVEDGE_OK);
  CHECK(fabsf(cosines[1] - (float)cos(-5 * pow(100.0, -2.0 / dims))) < 1e-6f || dims == 2);
  const kvedge_rotation rotation = {.dims = dims, .interleaved = interleaved, .cosines = cosines, .sines = sines};
  decoded d = decode(layer);
  for (int t = 3; t < 16; t++)
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < dims / 2; i++) {
        float *x = &d.keys[t][h][interleaved ? 2 * i : i], *y = &d.keys[t][h][interleaved ? 2 * i + 1 : i + dims / 2];
        const float a = *x * cosines[i], b = *y * sines[i], e = *x * sines[i], f = *y * cosines[i];
        *x = a - b, *y = e + f;
      }
  CHECK(kvedge_layer_shift(layer, 3, 17, &rotation) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_shift(layer, -1, 3, &rotation) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_shift(layer, 4, 3, &rotation) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_shift(layer, 3, 16, NULL) == KVEDGE_ERROR_ARGUMENT);
  const kvedge_rotation wide = {.dims = DIM + 2, .cosines = cosines, .sines = sines};
  CHECK(kvedge_layer_shift(layer, 3, 16, &wide) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_shift(layer, 3, 16, &rotation) == KVEDGE_OK);
  CHECK(kvedge_layer_append(turned, keys[0][0], d.values[0][0], 3) == KVEDGE_OK);
  CHECK(kvedge_layer_append(turned, d.keys[3][0], d.values[3][0], 13) == KVEDGE_OK);
  const decoded now = decode(layer), expected = decode(turned);
  CHECK(memcmp(now.keys, expected.keys, sizeof now.keys) == 0);
  kvedge_layer_destroy(layer), kvedge_layer_destroy(turned);
}

/* Keys that a turn makes too large for the format: refused, and nothing has changed. */
static void test_shift_too_large(void) {
  counter c = {0};
  float large[HEADS * DIM];
  for (int i = 0; i < HEADS * DIM; i++) large[i] = 60000.0f;
  float cosines[DIM / 2], sines[DIM / 2];
  for (int i = 0; i < DIM / 2; i++) cosines[i] = sines[i] = 0.70710678f;
  const kvedge_rotation rotation = {.dims = DIM, .cosines = cosines, .sines = sines};
  kvedge_layer *layer = layer_with(KVEDGE_FLOAT16, 20, &c, 0, 5);
  CHECK(kvedge_layer_append(layer, large, values[0][0], 1) == KVEDGE_OK);
  const decoded before = decode(layer);
  CHECK(kvedge_layer_shift(layer, 0, 6, &rotation) == KVEDGE_ERROR_SCALE);
  const decoded now = decode(layer);
  CHECK(memcmp(&before, &now, sizeof now) == 0);
  CHECK(kvedge_layer_shift(layer, 0, 5, &rotation) == KVEDGE_OK);
  kvedge_layer_destroy(layer);
}

int main(void) {
  fill();
  begin("editing and blocks");
  for (int i = 0; i < NUM; i++) {
    test_copy(formats[i]);
    test_reserve(formats[i]);
    test_keep(formats[i]);
    test_shift(formats[i], 0, DIM);
    test_shift(formats[i], 1, DIM);
    test_shift(formats[i], 0, 4);
  }
  test_shift_too_large();
  end();
  return report();
}
