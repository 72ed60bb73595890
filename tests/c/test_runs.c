/* Runs of tokens (KVEDGE_KIVI2, 4, 8), beside runs or rows: attention over them is that over the decoded tokens, whatever
 * part of a run a call begins or ends with; and what is refused. */
#include "check.h"
#include "layer_calls.h"
#include "kvedge.h"

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static float *copy_of(const float *x, int n) {
  float *copy = malloc((size_t)n * sizeof *copy);
  CHECK(copy);
  return memcpy(copy, x, (size_t)n * sizeof *copy);
}

/* Attention to runs in the blocks of a pool, from row `first` on: as a part that begins behind the first block, and
 * where it is all of a sequence as one. */
static void attend_in_blocks(const kvedge_layer_config *given, const float *key_scale, const float *keys,
                             const float *values, int seen, int first, const float *query, int rows, int num_heads,
                             const kvedge_attention_options *o, const float *expected) {
  const int size = 32 * ONE_OF(1, 2, 4), used = (seen + size - 1) / size;
  const int64_t key = given->num_kv_heads * given->head_dim, value = given->num_kv_heads * given->value_head_dim;
  kvedge_layer_config config = *given;
  kvedge_layer *pool;
  int32_t table[13];
  config.capacity = (int64_t)size * (used + 2);
  CHECK(kvedge_layer_create(&config, NULL, &pool) == KVEDGE_OK &&
        kvedge_layer_set_key_scale(pool, key_scale) == KVEDGE_OK);
  const int backwards = random_below(2);
  table[0] = -1;
  for (int i = 0; i < used; i++) table[1 + i] = backwards ? used - i : i + 2;
  for (int i = 0; i < seen; i += 32)
    CHECK(kvedge_layer_write(pool, (int64_t)table[1 + i / size] * size + i % size, keys + i * key, values + i * value,
                             32) == KVEDGE_OK);
  const size_t outs = (size_t)(rows * num_heads * given->value_head_dim);
  float *out = malloc(outs * sizeof *out);
  kvedge_part part = {
      .layer = pool, .first_row = size + first, .num_tokens = seen - first, .blocks = table, .block_size = size};
  const kvedge_attention_call call = call_on_part(&part, query, rows, num_heads, o, out, NULL);
  float largest = 0.0f;
  for (size_t i = 0; i < outs; i++) largest = fmaxf(largest, fabsf(expected[i]));
  for (int i = 0; i < 4; i += first ? 2 : 1) {
    memset(out, -1, outs * sizeof *out);
    part.first_row = size + first, part.blocks = table;
    if (i % 2) part.first_row = 0, part.blocks = table + 1;
    CHECK(kvedge_attend_layers(&call, 1, 1 + i / 2) == KVEDGE_OK);
    for (size_t j = 0; j < outs; j++)
      if (!(fabsf(out[j] - expected[j]) <= 2e-4f * largest)) fail("in blocks %.9g, not %.9g", out[j], expected[j]);
    end_case();
  }
  part.block_size = 16;
  CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  kvedge_layer_destroy(pool);
  free(out);
}

/* At least one side in runs. */
static void choose_formats(kvedge_layer_config *config) {
  const int in_runs[2] = {ONE_OF(KVEDGE_KIVI2, KVEDGE_KIVI4, KVEDGE_KIVI8),
                          ONE_OF(KVEDGE_KIVI2, KVEDGE_KIVI4, KVEDGE_KIVI8)};
  const int row = random_below(KVEDGE_NUM_FORMATS), pair = random_below(4);
  config->format = (kvedge_format)(pair == 0 ? row : in_runs[0]);
  if (pair != 1) config->value_format = KVEDGE_VALUES(pair == 2 ? row : in_runs[1]);
  config->scale_type = random_below(2) ? KVEDGE_SCALE_FLOAT16 : KVEDGE_SCALE_FLOAT32;
  config->group_size = ONE_OF(0, 0, 8, 32);
}

static void attend_case(void) {
  const int heads = ONE_OF(1, 2), num_heads = 4, dim = ONE_OF(1, 7, 24, 64, 130), value_dim = ONE_OF(3, 64, 65);
  const int len = 32 * ONE_OF(1, 2, 5, 12), seen = 1 + random_below(len),
            rows = 1 + random_below(seen < 40 ? seen : 40);
  kvedge_layer_config config = {.capacity = len, .num_kv_heads = heads, .head_dim = dim, .value_head_dim = value_dim};
  choose_formats(&config);
  float *scale = random_floats((size_t)(heads * dim), 1.0f); /* of keys in rows */
  for (int i = 0; i < heads * dim; i++) scale[i] = 1.5f + fabsf(scale[i]);
  const float *key_scale = (int)config.format < KVEDGE_NUM_FORMATS && random_below(2) ? scale : NULL;
  kvedge_layer *runs = NULL, *floats = NULL, *copy = NULL;
  float *keys = random_floats((size_t)(len * heads * dim), 2.0f);
  float *values = random_floats((size_t)(len * heads * value_dim), 2.0f);
  CHECK(kvedge_layer_create(&config, NULL, &runs) == KVEDGE_OK &&
        kvedge_layer_create(&config, NULL, &copy) == KVEDGE_OK);
  CHECK(kvedge_layer_set_key_scale(runs, key_scale) == KVEDGE_OK);
  CHECK(kvedge_layer_append(runs, keys, values, 32) == KVEDGE_OK);
  CHECK(kvedge_layer_append(runs, keys + 32 * heads * dim, values + 32 * heads * value_dim, len - 32) == KVEDGE_OK);
  float *keys_given = copy_of(keys, len * heads * dim), *values_given = copy_of(values, len * heads * value_dim);
  CHECK(kvedge_layer_get(runs, 0, -1, 0, len, keys) == KVEDGE_OK);
  CHECK(kvedge_layer_get(runs, 1, -1, 0, len, values) == KVEDGE_OK);
  CHECK(kvedge_layer_set_len(runs, seen) == KVEDGE_OK && kvedge_layer_copy(runs, copy) == KVEDGE_OK);
  const kvedge_layer_config of_floats = {
      .format = KVEDGE_FLOAT32, .capacity = len, .num_kv_heads = heads, .head_dim = dim, .value_head_dim = value_dim};
  CHECK(kvedge_layer_create(&of_floats, NULL, &floats) == KVEDGE_OK);
  CHECK(kvedge_layer_append(floats, keys, values, seen) == KVEDGE_OK);
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  const int most = seen - rows, first = most == 0 ? 0 : ONE_OF(0, 0, most < 16 ? most : 16, 1 + random_below(most));
  if (first) o.first_row = first, o.num_tokens = seen - first;
  o.start = random_below(2) ? 0 : random_below(seen - first + 1);
  if (random_below(3) == 0) o.window = 1 + random_below(60), o.sink_tokens = random_below(50);
  if (random_below(3) == 0) o.softcap = 2.0f;
  const size_t outs = (size_t)(rows * num_heads * value_dim);
  float *query = random_floats((size_t)(rows * num_heads * dim), 2.0f), *out = malloc(outs * sizeof *out),
        *expected = malloc(outs * sizeof *out), lse[40 * 4], expected_lse[40 * 4];
  CHECK(kvedge_attend(floats, query, rows, num_heads, &o, 1, expected, expected_lse) == KVEDGE_OK);
  float largest = 0.0f;
  for (size_t i = 0; i < outs; i++) largest = fmaxf(largest, fabsf(expected[i]));
  for (int threads = 1; threads <= 3; threads += 2) {
    CHECK(kvedge_attend(copy, query, rows, num_heads, &o, threads, out, lse) == KVEDGE_OK);
    for (size_t i = 0; i < outs; i++)
      if (!(fabsf(out[i] - expected[i]) <= 2e-4f * largest)) fail("%.9g, not %.9g", out[i], expected[i]);
    for (int i = 0; i < rows * num_heads; i++)
      if (lse[i] != expected_lse[i] && !(fabsf(lse[i] - expected_lse[i]) <= 2e-4f)) fail("lse %.9g", lse[i]);
    end_case();
  }
  attend_in_blocks(&config, key_scale, keys_given, values_given, seen, first, query, rows, num_heads, &o, expected);
  float *some = malloc((size_t)(seen * heads * dim) * sizeof *some);
  const int from = random_below(seen);
  CHECK(kvedge_layer_get(copy, 0, -1, from, seen, some) == KVEDGE_OK);
  if (memcmp(some, keys + from * heads * dim, (size_t)((seen - from) * heads * dim) * sizeof *some)) fail("keys");
  end_case();
  kvedge_layer_destroy(runs), kvedge_layer_destroy(copy), kvedge_layer_destroy(floats);
  free(keys), free(values), free(query), free(out), free(expected), free(some);
  free(keys_given), free(values_given), free(scale);
}

static void test_attention(void) {
  begin("attention over runs");
  const int count = getenv("KVEDGE_TEST_SHORT") ? 40 : 200;
  for (int i = 0; i < count; i++) attend_case();
  end();
}

static void test_refused(int values_format) {
  enum { DIM = 4 };
  begin(values_format ? "what runs beside rows refuse" : "what runs refuse");
  kvedge_layer_config config = {.format = KVEDGE_KIVI4, .capacity = 64, .num_kv_heads = 1, .head_dim = DIM};
  kvedge_layer *layer;
  float *x = random_floats(64 * DIM, 1.0f);
  const int64_t kept[1] = {0};
  const float scale[DIM] = {1, 1, 1, 1}, cosines[2] = {1, 1}, sines[2] = {0, 0};
  const kvedge_rotation rotation = {.dims = DIM, .cosines = cosines, .sines = sines};
#define REFUSED(call)                                                                                                  \
  do {                                                                                                                 \
    CHECK((call) == KVEDGE_ERROR_ARGUMENT);                                                                            \
    end_case();                                                                                                        \
  } while (0)
  config.capacity = 65;
  CHECK(kvedge_layer_bytes(&config) == 0);
  config.value_format = KVEDGE_VALUES(KVEDGE_INT8);
  CHECK(kvedge_layer_bytes(&config) == 0);
  config.capacity = 64, config.value_format = values_format;
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  REFUSED(kvedge_layer_append(layer, x, x, 31));
  REFUSED(kvedge_layer_append(layer, x, x, 33));
  REFUSED(kvedge_layer_set_key_scale(layer, scale));
  REFUSED(kvedge_layer_set_key_offset(layer, scale));
  x[5] = 7e4f;
  CHECK(kvedge_layer_append(layer, x, x, 32) == KVEDGE_ERROR_SCALE && kvedge_layer_len(layer) == 0);
  x[5] = 1.0f;
  CHECK(kvedge_layer_append(layer, x, x, 64) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, x, x, 32) == KVEDGE_ERROR_CAPACITY);
  REFUSED(kvedge_layer_drop_first(layer, 32));
  REFUSED(kvedge_layer_keep(layer, kept, 1));
  REFUSED(kvedge_layer_shift(layer, 0, 64, &rotation));
  CHECK(kvedge_layer_set_len(layer, 40) == KVEDGE_OK);
  REFUSED(kvedge_layer_append(layer, x, x, 32));
  REFUSED(kvedge_layer_write(layer, 8, x, x, 32));
  CHECK(kvedge_layer_write(layer, 32, x, x, 32) == KVEDGE_OK);
#undef REFUSED
  kvedge_layer_destroy(layer), free(x);
  end();
}

int main(void) {
  test_attention();
  test_refused(0);
  test_refused(KVEDGE_VALUES(KVEDGE_INT8));
  return report();
}
