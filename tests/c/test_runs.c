/* Runs of tokens (KVEDGE_KIVI2, 4, 8): attention over them is that over the decoded tokens, whatever part of a run a call
 * begins or ends with; and what is refused. */
#include "check.h"
#include "kvedge.h"

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static void attend_case(void) {
  const int heads = ONE_OF(1, 2), num_heads = 4, dim = ONE_OF(1, 7, 24, 64, 130), value_dim = ONE_OF(3, 64, 65);
  const int len = 32 * ONE_OF(1, 2, 5, 12), seen = 1 + random_below(len),
            rows = 1 + random_below(seen < 40 ? seen : 40);
  kvedge_layer_config config = {.format = (kvedge_format)ONE_OF(KVEDGE_KIVI2, KVEDGE_KIVI4, KVEDGE_KIVI8),
                                .capacity = len,
                                .num_kv_heads = heads,
                                .head_dim = dim,
                                .value_head_dim = value_dim};
  kvedge_layer *runs = NULL, *floats = NULL, *copy = NULL;
  float *keys = random_floats((size_t)(len * heads * dim), 2.0f);
  float *values = random_floats((size_t)(len * heads * value_dim), 2.0f);
  CHECK(kvedge_layer_create(&config, &runs) == KVEDGE_OK && kvedge_layer_create(&config, &copy) == KVEDGE_OK);
  CHECK(kvedge_layer_append(runs, keys, values, 32) == KVEDGE_OK);
  CHECK(kvedge_layer_append(runs, keys + 32 * heads * dim, values + 32 * heads * value_dim, len - 32) == KVEDGE_OK);
  CHECK(kvedge_layer_copy(runs, copy) == KVEDGE_OK && kvedge_layer_set_len(copy, seen) == KVEDGE_OK);
  CHECK(kvedge_layer_get_keys(runs, 0, len, keys) == KVEDGE_OK);
  CHECK(kvedge_layer_get_values(runs, 0, len, values) == KVEDGE_OK);
  config.format = KVEDGE_FLOAT32;
  CHECK(kvedge_layer_create(&config, &floats) == KVEDGE_OK);
  CHECK(kvedge_layer_append(floats, keys, values, seen) == KVEDGE_OK);
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.start = random_below(2) ? 0 : random_below(seen + 1);
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
  float *some = malloc((size_t)(seen * heads * dim) * sizeof *some);
  const int first = random_below(seen);
  CHECK(kvedge_layer_get_keys(copy, first, seen, some) == KVEDGE_OK);
  if (memcmp(some, keys + first * heads * dim, (size_t)((seen - first) * heads * dim) * sizeof *some)) fail("keys");
  end_case();
  kvedge_layer_destroy(runs), kvedge_layer_destroy(copy), kvedge_layer_destroy(floats);
  free(keys), free(values), free(query), free(out), free(expected), free(some);
}

static void test_attention(void) {
  begin("attention over runs");
  const int count = getenv("KVEDGE_TEST_SHORT") ? 40 : 200;
  for (int i = 0; i < count; i++) attend_case();
  end();
}

static void test_refused(void) {
  enum { DIM = 4 };
  begin("what runs refuse");
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
  config.capacity = 64, config.value_format = KVEDGE_VALUES(KVEDGE_INT8);
  CHECK(kvedge_layer_bytes(&config) == 0);
  config.value_format = 0;
  CHECK(kvedge_layer_create(&config, &layer) == KVEDGE_OK);
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
  test_refused();
  return report();
}
