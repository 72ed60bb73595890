/* Attention through the public API, held against the formula in double over what the layer stores. */
#include "check.h"
#include "layer_calls.h"

static kvedge_layer *scaled_layer(kvedge_layer_config config, const float *offset, const float *scale,
                                  const float *keys, const float *values, int64_t len) {
  kvedge_layer *layer = NULL;
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  if (offset) CHECK(kvedge_layer_set_key_offset(layer, offset) == KVEDGE_OK);
  if (scale) CHECK(kvedge_layer_set_key_scale(layer, scale) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, keys, values, len) == KVEDGE_OK);
  return layer;
}

static kvedge_layer *new_layer(kvedge_layer_config config, const float *offset, const float *keys, const float *values,
                               int64_t len) {
  return scaled_layer(config, offset, NULL, keys, values, len);
}

/* `count` factors from 2^-exponent to 2^exponent. */
static float *random_scales(size_t count, float exponent) {
  float *scales = random_floats(count, exponent);
  for (size_t i = 0; i < count; i++) scales[i] = exp2f(scales[i]);
  return scales;
}

/* ---- The reference ---- */

typedef struct {
  int64_t len, num_rows;
  int num_heads, num_kv_heads, dim;
  int value_dim; /* 0: dim */
} sizes;

static int width_of_values(sizes n) { return n.value_dim ? n.value_dim : n.dim; }

static int is_seen(const kvedge_attention_options *o, int64_t position, int64_t token) {
  if (token < o->start || (o->causal && token > position)) return 0;
  return !o->window || token > position - o->window || token < o->start + o->sink_tokens;
}

static double logit(const kvedge_attention_options *o, sizes n, const float *query, const float *key, int head,
                    int64_t row, int64_t token) {
  int64_t position = n.len - n.num_rows + row;
  double x = 0.0;
  for (int d = 0; d < n.dim; d++) x += (double)query[d] * key[d];
  x *= isnan(o->scale) ? 1.0 / sqrt(n.dim) : o->scale;
  if (o->softcap > 0.0f) x = o->softcap * tanh(x / o->softcap);
  if (o->alibi_slopes) x += o->alibi_slopes[head] * (double)(token - position);
  const int64_t *b = o->bias_strides, *m = o->mask_strides;
  if (o->bias) x += o->bias[head * b[0] + row * b[1] + token * b[2]];
  int hidden = o->mask && !o->mask[head * m[0] + row * m[1] + token * m[2]];
  return hidden || !is_seen(o, position, token) ? -INFINITY : x;
}

/* One row of one head: out (value_dim) and the logarithm of the denominator. */
static double attend_row(const kvedge_attention_options *o, sizes n, const float *query, const float *keys,
                         const float *values, int head, int64_t row, double *out) {
  int kv_head = head / (n.num_heads / n.num_kv_heads), value_dim = width_of_values(n);
  double *logits = malloc((size_t)n.len * sizeof *logits), max = -INFINITY, sum = 0.0;
  if (o->sink_logits) max = o->sink_logits[head];
  for (int64_t t = 0; t < n.len; t++) {
    logits[t] = logit(o, n, query, keys + (t * n.num_kv_heads + kv_head) * n.dim, head, row, t);
    max = fmax(logits[t], max);
  }
  if (o->sink_logits) sum = exp(o->sink_logits[head] - max);
  for (int d = 0; d < value_dim; d++) out[d] = 0.0;
  for (int64_t t = 0; t < n.len; t++) {
    double p = logits[t] == -INFINITY ? 0.0 : exp(logits[t] - max);
    sum += p;
    for (int d = 0; d < value_dim; d++) out[d] += p * values[(t * n.num_kv_heads + kv_head) * value_dim + d];
  }
  for (int d = 0; d < value_dim; d++) out[d] = sum > 0.0 ? out[d] / sum : 0.0;
  free(logits);
  return sum > 0.0 ? max + log(sum) : -INFINITY;
}

/* Holds out and lse of a call against the reference. */
static void check_attention(const kvedge_layer *layer, sizes n, const float *query, const kvedge_attention_options *o,
                            const float *out, const float *lse) {
  size_t stored = (size_t)(n.len * n.num_kv_heads), rows = (size_t)(n.num_rows * n.num_heads);
  size_t value_dim = (size_t)width_of_values(n);
  float *keys = malloc(stored * (size_t)n.dim * sizeof *keys), *values = malloc(stored * value_dim * sizeof *values);
  double *expected = malloc(rows * value_dim * sizeof *expected), largest = 0.0;
  double allowed = o->precision_bits == 24 ? 3e-5 : 2e-4; /* the numerics contract, or much better */
  kvedge_layer_get(layer, 0, -1, 0, n.len, keys), kvedge_layer_get(layer, 1, -1, 0, n.len, values);
  for (size_t i = 0; i < rows; i++) {
    double *row = expected + i * value_dim;
    double log_sum = attend_row(o, n, query + i * (size_t)n.dim, keys, values, (int)(i % (size_t)n.num_heads),
                                (int64_t)(i / (size_t)n.num_heads), row);
    double of_lse = 3.0 * allowed * fmax(1.0, fabs(log_sum));
    int right = isinf(log_sum) ? lse[i] == log_sum : near(lse[i], log_sum, of_lse);
    if (!right) fail("lse %zu of %zu: %.9g, not %.9g", i, rows, lse[i], log_sum);
    for (size_t d = 0; d < value_dim; d++) largest = fmax(fabs(row[d]), largest);
  }
  for (size_t i = 0; i < rows * value_dim; i++)
    if (!near(out[i], expected[i], allowed * largest) || !(out[i] == 0.0f || isnormal(out[i])))
      fail("len %d, rows %d, heads %d/%d, dim %d/%d: number %zu: %.9g, not %.9g of %.3g", (int)n.len, (int)n.num_rows,
           n.num_heads, n.num_kv_heads, n.dim, (int)value_dim, i, out[i], expected[i], largest);
  free(keys), free(values), free(expected);
}

/* ---- Random calls ---- */

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static kvedge_layer_config random_config(int dim, int num_kv_heads) {
  kvedge_layer_config config = {.capacity = 700, .num_kv_heads = num_kv_heads, .head_dim = dim};
  config.format = random_below(2) ? KVEDGE_INT8 : (kvedge_format)random_below(KVEDGE_NUM_FORMATS);
  if (random_below(6) == 0) config.format = (kvedge_format)(KVEDGE_GRID2 + random_below(7));
  if (random_below(3) == 0) config.value_format = KVEDGE_VALUES(random_below(KVEDGE_NUM_FORMATS));
  config.scale_type = random_below(2) ? KVEDGE_SCALE_FLOAT32 : KVEDGE_SCALE_FLOAT16;
  config.group_size = ONE_OF(0, 0, 32, 64);
  config.value_rotation = random_below(4) == 0;
  return config;
}

/* Each option now and then. `numbers` and `bytes` have one for each head, row and token. */
static kvedge_attention_options random_options(sizes n, const float *numbers, const uint8_t *bytes) {
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.causal = random_below(4) > 0;
  o.precision_bits = random_below(2) ? 0 : 24;
  if (random_below(4) == 0) o.scale = (float[]){0.3f, -0.2f, 0.0f}[random_below(3)];
  if (random_below(4) == 0 && o.causal) o.window = 1 + random_below(100), o.sink_tokens = random_below(6);
  if (random_below(3) == 0) o.start = random_below((int)n.len + 1);
  if (random_below(5) == 0) o.sink_logits = numbers;
  if (random_below(5) == 0) o.softcap = 1.5f;
  if (random_below(5) == 0) o.alibi_slopes = numbers;
  int64_t strides[3] = {n.num_rows * n.len, n.len, 1};
  if (random_below(4) == 0) strides[0] = 0; /* the same for every head */
  if (random_below(5) == 0) o.mask = bytes, memcpy(o.mask_strides, strides, sizeof strides);
  if (random_below(5) == 0) o.bias = numbers, memcpy(o.bias_strides, strides, sizeof strides);
  return o;
}

static void attend_case(void) {
  sizes n = {.len = ONE_OF(1, 7, 16, 65, 130, 300, 600),
             .num_kv_heads = 1 + random_below(3),
             .dim = ONE_OF(1, 8, 33, 64, 80, 128)};
  n.num_heads = n.num_kv_heads * ONE_OF(1, 2, 5, 8);
  n.value_dim = random_below(3) ? 0 : ONE_OF(1, 7, 64, 96, 128, 192, 520);
  n.num_rows = random_below(2) ? 1 : 1 + random_below(n.len < 20 ? (int)n.len : 20);
  size_t stored = (size_t)(n.len * n.num_kv_heads), queries = (size_t)(n.num_rows * n.num_heads);
  size_t logits = queries * (size_t)n.len, value_dim = (size_t)width_of_values(n);
  kvedge_layer_config config = random_config(n.dim, n.num_kv_heads);
  config.value_head_dim = n.value_dim;
  if (n.dim % 32 == 0 && random_below(3) == 0) config.format = KVEDGE_Q8_0, config.value_format = 0;
  if (value_dim % 32 == 0 && random_below(3) == 0) config.value_format = KVEDGE_VALUES(KVEDGE_Q8_0);
  if (config.format == KVEDGE_Q8_0 && value_dim % 32 && !config.value_format)
    config.value_format = KVEDGE_VALUES(KVEDGE_INT8);
  float *keys = random_floats(stored * (size_t)n.dim, 1.0f), *values = random_floats(stored * value_dim, 2.0f);
  float *offset = config.format == KVEDGE_INT8 && random_below(3) == 0
                      ? random_floats((size_t)(n.num_kv_heads * n.dim), 3.0f)
                      : NULL;
  float *scale = random_below(3) == 0 ? random_scales((size_t)(n.num_kv_heads * n.dim), 2.5f) : NULL;
  float *query = random_floats(queries * (size_t)n.dim, (float[]){0.1f, 2.0f, 10.0f}[random_below(3)]);
  float *numbers = random_floats(logits, 1.0f);
  uint8_t *bytes = malloc(logits);
  for (size_t i = 0; i < logits; i++) bytes[i] = random_below(3) > 0;
  block out = new_block(queries * value_dim * 4), lse = new_block(queries * 4);
  kvedge_layer *layer = scaled_layer(config, offset, scale, keys, values, n.len);
  kvedge_attention_options o = random_options(n, numbers, bytes);
  if (kvedge_attend(layer, query, n.num_rows, n.num_heads, &o, 1, out.data, lse.data) != KVEDGE_OK)
    fail("a good call was refused");
  else check_attention(layer, n, query, &o, out.data, lse.data);
  end_case();
  kvedge_layer_destroy(layer), free_block(&out), free_block(&lse);
  free(keys), free(values), free(offset), free(scale), free(query), free(numbers), free(bytes);
}

static void test_attend(void) {
  begin("attend");
  int count = getenv("KVEDGE_TEST_SHORT") ? 80 : 250;
  for (int i = 0; i < count; i++) attend_case();
  end();
}

/* Keys, values and a query of these magnitudes, stored in `format`. */
static void check_magnitudes(kvedge_format format, float of_keys, float of_values, float of_query, int may_overflow) {
  const sizes n = {.len = 200, .num_rows = 3, .num_heads = 4, .num_kv_heads = 2, .dim = 40};
  const kvedge_layer_config config = {.format = format, .capacity = 200, .num_kv_heads = 2, .head_dim = 40};
  float *keys = random_floats(200 * 80, of_keys), *values = random_floats(200 * 80, of_values);
  float *query = random_floats(3 * 160, of_query), out[3 * 160], lse[12];
  kvedge_layer *layer = new_layer(config, NULL, keys, values, 200);
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  CHECK(kvedge_attend(layer, query, 3, 4, NULL, 1, out, lse) == KVEDGE_OK);
  if (!may_overflow) check_attention(layer, n, query, &o, out, lse);
  else
    for (int d = 0; d < 480; d++)
      if (!isfinite(out[d])) fail("not finite");
  end_case();
  kvedge_layer_destroy(layer), free(keys), free(values), free(query);
}

/* Finite numbers of any size give what the formula says, in float's range. */
static void test_sizes_of_numbers(void) {
  const float sizes_of[][3] = {
      {1e30f,  1.0f,   1e-30f},
      {1e-30f, 1e30f,  1e30f },
      {1.0f,   1e-33f, 1.0f  },
      {3e38f,  3e38f,  1e-37f},
      {1e-20f, 1.0f,   1e-20f},
      {1e25f,  1.0f,   1e25f }
  };
  const float of_halves[][3] = {
      {6e4f,   1.0f,   1e-4f },
      {1e-6f,  6e4f,   1e6f  },
      {1.0f,   3e-7f,  1.0f  }, /* also subnormal */
      {6.5e4f, 6.5e4f, 1e-37f},
      {1e-5f,  1.0f,   1e-20f},
      {6e4f,   1.0f,   1e38f }
  };
  const float of_fp8[][3] = {
      {448.0f, 1.0f,   1e-2f },
      {2e-3f,  448.0f, 1e3f  }, /* also subnormal, and 0 */
      {1.0f,   2e-3f,  1.0f  },
      {3e38f,  3e38f,  1e-37f}, /* becomes 448, or 57344 */
      {1e-2f,  1.0f,   1e-20f},
      {448.0f, 1.0f,   1e38f }
  };
  const kvedge_format wide[] = {KVEDGE_INT8, KVEDGE_FLOAT32, KVEDGE_BFLOAT16};
  begin("sizes of numbers");
  for (size_t i = 0; i < sizeof sizes_of / sizeof sizes_of[0]; i++) {
    for (size_t f = 0; f < sizeof wide / sizeof wide[0]; f++)
      check_magnitudes(wide[f], sizes_of[i][0], sizes_of[i][1], sizes_of[i][2], i == 5);
    check_magnitudes(KVEDGE_FLOAT16, of_halves[i][0], of_halves[i][1], of_halves[i][2], i == 5);
    check_magnitudes(KVEDGE_FP8_E4M3, of_fp8[i][0], of_fp8[i][1], of_fp8[i][2], i == 5);
    check_magnitudes(KVEDGE_FP8_E5M2, of_fp8[i][0], of_fp8[i][1], of_fp8[i][2], i == 5);
  }
  end();
}

/* Keys that scales take to any magnitude and queries that they take beyond float's range give what the formula says. */
static void test_sizes_of_key_scales(void) {
  begin("sizes of key scales");
  const sizes n = {.len = 100, .num_rows = 3, .num_heads = 4, .num_kv_heads = 2, .dim = 40};
  const float magnitudes[][2] = {
      {1.0f,   1.0f  },
      {1e30f,  1e-30f},
      {1e-30f, 1e30f },
      {1e-10f, 1e10f }
  }; /* of keys, of the query */
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++)
    for (size_t i = 0; i < sizeof magnitudes / sizeof magnitudes[0]; i++) {
      const kvedge_layer_config config = {
          .format = (kvedge_format)format, .capacity = 100, .num_kv_heads = 2, .head_dim = 40};
      float *keys = random_floats(100 * 80, 1.0f), *values = random_floats(100 * 80, 1.0f);
      float *query = random_floats(3 * 160, magnitudes[i][1]), out[3 * 160], lse[12];
      float *scale = random_scales(80, 10.0f);
      for (int d = 0; d < 80; d++) scale[d] *= magnitudes[i][0];
      for (int d = 0; d < 100 * 80; d++) keys[d] *= scale[d % 80]; /* channels as large as their scales */
      for (int d = 0; d < 3 * 160; d++) query[d] /= scale[d / 80 % 2 * 40 + d % 40] / magnitudes[i][0];
      kvedge_layer *layer = scaled_layer(config, NULL, scale, keys, values, 100);
      kvedge_attention_options o;
      kvedge_attention_defaults(&o);
      CHECK(kvedge_attend(layer, query, 3, 4, &o, 1, out, lse) == KVEDGE_OK);
      check_attention(layer, n, query, &o, out, lse);
      end_case();
      kvedge_layer_destroy(layer), free(keys), free(values), free(query), free(scale);
    }
  end();
}

/* Tokens that a mask hides may be larger than those seen by any power of two. */
static void test_sizes_of_hidden_tokens(void) {
  begin("sizes of hidden tokens");
  const sizes n = {.len = 100, .num_rows = 2, .num_heads = 2, .num_kv_heads = 2, .dim = 24};
  const float large[KVEDGE_NUM_FORMATS] = {
      [KVEDGE_INT8] = 1e38f,      [KVEDGE_FLOAT32] = 1e38f,     [KVEDGE_FLOAT16] = 6e4f, [KVEDGE_BFLOAT16] = 1e38f,
      [KVEDGE_FP8_E4M3] = 448.0f, [KVEDGE_FP8_E5M2] = 57344.0f, [KVEDGE_INT4] = 1e38f};
  const float least[KVEDGE_NUM_FORMATS] = {
      [KVEDGE_INT8] = 1e-30f,    [KVEDGE_FLOAT32] = 1e-30f, [KVEDGE_FLOAT16] = 1e-6f, [KVEDGE_BFLOAT16] = 1e-30f,
      [KVEDGE_FP8_E4M3] = 1e-2f, [KVEDGE_FP8_E5M2] = 1e-4f, [KVEDGE_INT4] = 1e-30f};
  uint8_t mask[100];
  for (int t = 0; t < 100; t++) mask[t] = t % 3 != 1;
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) {
    const kvedge_layer_config config = {
        .format = (kvedge_format)format, .capacity = 100, .num_kv_heads = 2, .head_dim = 24};
    const float small = least[format];
    float *keys = random_floats(4800, small), *values = random_floats(4800, small),
          *query = random_floats(96, 1.0f / small);
    for (int i = 0; i < 4800; i++)
      if (!mask[i / 48]) keys[i] = keys[i] / small * large[format], values[i] = values[i] / small * large[format];
    float out[96], lse[4];
    kvedge_layer *layer = new_layer(config, NULL, keys, values, 100);
    kvedge_attention_options o;
    kvedge_attention_defaults(&o);
    o.mask = mask, o.mask_strides[2] = 1;
    CHECK(kvedge_attend(layer, query, 2, 2, &o, 1, out, lse) == KVEDGE_OK);
    check_attention(layer, n, query, &o, out, lse);
    end_case();
    kvedge_layer_destroy(layer), free(keys), free(values), free(query);
  }
  end();
}

static void test_scores(void) {
  begin("scores");
  const kvedge_layer_config config = {.capacity = 100, .num_kv_heads = 2, .head_dim = 48};
  const sizes n = {.len = 100, .num_rows = 1, .num_heads = 6, .num_kv_heads = 2, .dim = 48};
  float *keys = random_floats(100 * 96, 1.0f), *query = random_floats(6 * 48, 3.0f);
  float *stored = malloc(100 * 96 * sizeof *stored);
  kvedge_layer *layer = new_layer(config, NULL, keys, keys, 100);
  block logits = new_block(600 * sizeof(float));
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  kvedge_layer_get(layer, 0, -1, 0, 100, stored);
  CHECK(kvedge_scores(layer, query, 6, o.scale = 0.2f, -1, 100, logits.data) == KVEDGE_OK);
  for (int head = 0; head < 6; head++)
    for (int t = 0; t < 100; t++)
      CHECK(near(((float *)logits.data)[head * 100 + t],
                 logit(&o, n, query + head * 48, stored + (2 * t + head / 3) * 48, head, 0, t), 1e-5));
  CHECK(kvedge_scores(layer, NULL, 6, 1.0f, -1, 100, logits.data) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_scores(layer, query, 5, 1.0f, -1, 100, logits.data) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_scores(layer, query, 6, INFINITY, -1, 100, logits.data) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_scores(layer, query, 6, 1.0f, -1, 101, logits.data) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_scores(layer, query, 6, 1.0f, -1, 0, logits.data) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_scores(layer, query, 6, 1.0f, -1, -1, logits.data) == KVEDGE_ERROR_ARGUMENT);
  for (int len = 1; len < 100; len += 7) { /* room for exactly so many tokens */
    block first = new_block(6 * (size_t)len * sizeof(float));
    CHECK(kvedge_scores(layer, query, 6, 0.2f, -1, len, first.data) == KVEDGE_OK);
    for (int i = 0; i < 6 * len; i++)
      CHECK(near(((float *)first.data)[i], ((float *)logits.data)[i / len * 100 + i % len], 1e-6));
    free_block(&first);
  }
  kvedge_layer_destroy(layer), free_block(&logits), free(keys), free(query), free(stored);
  end();
}

/* ---- Slices ---- */

static void slices_case(const kvedge_layer *layer, const float *query, int64_t rows, int heads, int dim,
                        const kvedge_attention_options *o, int least_threads, int most_threads) {
  size_t floats = (size_t)(rows * heads * dim);
  float *expected = malloc(4 * floats), *out = malloc(4 * floats), *lse = malloc(8 * (size_t)(rows * heads));
  float *second = lse + rows * heads;
  const kvedge_attention_call call = call_on(layer, query, rows, heads, o, out, second);
  CHECK(kvedge_attend(layer, query, rows, heads, o, 1, expected, lse) == KVEDGE_OK);
  for (int threads = least_threads; threads <= most_threads; threads++) {
    const size_t bytes = kvedge_slices_bytes(&call, 1, threads);
    block memory = new_block((bytes + 63) / 64 * 64);
    kvedge_slices *slices;
    memset(out, 0x55, 4 * floats);
    CHECK(kvedge_slices_init(memory.data, bytes - 1, &call, 1, threads, &slices) == KVEDGE_ERROR_MEMORY);
    CHECK(kvedge_slices_init(memory.data, bytes, &call, 1, threads, &slices) == KVEDGE_OK);
    const int num = kvedge_slices_count(slices);
    CHECK(num > 1);
    for (int i = 0; i < num; i++) { /* with one thread in order, else the last first */
      const int slice = threads == 1 ? i : num - 1 - i;
      kvedge_slices_run(slices, slice, threads == 1 && i + 1 < num ? i + 1 : -1, slice % threads);
    }
    CHECK(memcmp(out, expected, 4 * floats) == 0);
    CHECK(memcmp(lse, second, 4 * (size_t)(rows * heads)) == 0);
    free_block(&memory);
  }
  free(expected), free(out), free(lse);
}

static void test_slices(void) {
  const kvedge_layer_config config = {.capacity = 3000, .num_kv_heads = 2, .head_dim = 64};
  begin("slices in any order");
  float *keys = random_floats(3000 * 128, 1.0f), *query = random_floats(40 * 8 * 64, 3.0f);
  kvedge_layer *layer = new_layer(config, NULL, keys, keys, 3000);
  slices_case(layer, query, 1, 8, 64, NULL, 1, 3);
  slices_case(layer, query, 9, 8, 64, NULL, 1, 3);
  const kvedge_layer_config wide = {.capacity = 1500, .num_kv_heads = 2, .head_dim = 64, .value_head_dim = 128};
  kvedge_layer *other = new_layer(wide, NULL, keys, keys, 1500);
  slices_case(other, query, 9, 8, 128, NULL, 1, 3);
  kvedge_layer_destroy(other), kvedge_layer_destroy(layer), free(keys), free(query);
  end();
}

/* For eight threads slices of few tokens are cut by heads, where tokens are split (700) and where not. */
static void test_slices_of_heads(void) {
  begin("slices of some KV heads");
  const kvedge_layer_config config = {.capacity = 700, .num_kv_heads = 8, .head_dim = 64};
  float *keys = random_floats(700 * 512, 1.0f), *query = random_floats(3 * 2048, 3.0f);
  for (int tokens = 350; tokens <= 700; tokens *= 2)
    for (int rows = 1; rows <= 3; rows += 2)
      for (int heads = 8; heads <= 32; heads += 24) {
        kvedge_layer *layer = new_layer(config, NULL, keys, keys, tokens);
        slices_case(layer, query, rows, heads, 64, NULL, 8, 8);
        kvedge_layer_destroy(layer);
      }
  free(keys), free(query);
  end();
}

/* A call for the first n tokens is a call on a layer that holds n: with mask, bias and slices of that length. Sizes can be
 * had before the tokens have come, and never shrink as they do. */
static void test_the_first_tokens(void) {
  begin("the first tokens");
  const kvedge_layer_config config = {.capacity = 1500, .num_kv_heads = 2, .head_dim = 40};
  float *keys = random_floats(1500 * 80, 1.0f), *query = random_floats(3 * 160, 3.0f);
  kvedge_layer *all = new_layer(config, NULL, keys, keys, 1500), *empty = new_layer(config, NULL, NULL, NULL, 0);
  size_t most_bytes[4] = {0};
  for (int len = 3; len <= 1500; len += len < 20 ? 1 : 493) {
    kvedge_layer *first = new_layer(config, NULL, keys, keys, len);
    block mask = new_block((size_t)len), bias = new_block((size_t)len * sizeof(float));
    for (int t = 0; t < len; t++)
      ((uint8_t *)mask.data)[t] = t % 3 != 0, ((float *)bias.data)[t] = 0.1f * (float)(t % 7);
    for (int kind = 0; kind < 4; kind++) {
      float expected[480], expected_lse[12], out[480], lse[12];
      kvedge_attention_options o;
      kvedge_attention_defaults(&o);
      if (kind == 1) o.mask = mask.data, o.mask_strides[2] = 1;
      if (kind == 2) o.bias = bias.data, o.bias_strides[2] = 1;
      if (kind == 3) o.window = len, o.sink_tokens = 2;
      CHECK(kvedge_attend(first, query, 3, 4, &o, 1, expected, expected_lse) == KVEDGE_OK);
      o.num_tokens = len;
      CHECK(kvedge_attend(all, query, 3, 4, &o, 1, out, lse) == KVEDGE_OK);
      CHECK(memcmp(out, expected, sizeof out) == 0 && memcmp(lse, expected_lse, sizeof lse) == 0);
      const kvedge_attention_call of_first = call_on(first, query, 3, 4, NULL, out, lse);
      const kvedge_attention_call of_all = call_on(all, query, 3, 4, &o, out, lse);
      const kvedge_attention_call of_empty = call_on(empty, NULL, 3, 4, &o, NULL, NULL);
      const size_t bytes = kvedge_slices_bytes(&of_empty, 1, 8);
      CHECK(bytes == kvedge_slices_bytes(&of_first, 1, 8) || kind);
      CHECK(bytes == kvedge_slices_bytes(&of_all, 1, 8) && bytes >= most_bytes[kind]);
      most_bytes[kind] = bytes;
      o.num_tokens = 1501;
      CHECK(kvedge_slices_bytes(&of_empty, 1, 8) == 0);
      o.num_tokens = len + 1;
      CHECK(kvedge_attend(first, query, 3, 4, &o, 1, out, lse) == KVEDGE_ERROR_ARGUMENT);
      o.num_tokens = -1;
      CHECK(kvedge_attend(first, query, 3, 4, &o, 1, out, lse) == KVEDGE_ERROR_ARGUMENT);
      CHECK(memcmp(out, expected, sizeof out) == 0);
    }
    free_block(&mask), free_block(&bias), kvedge_layer_destroy(first);
  }
  kvedge_layer_destroy(all), kvedge_layer_destroy(empty), free(keys), free(query);
  end();
}

/* A layer whose first tokens were dropped gives the bits of one that never had them; with first_row and num_tokens,
 * what it held at some moment before. */
static void test_dropped_tokens(void) {
  begin("dropped tokens");
  float *keys = random_floats(600 * 80, 1.0f), *query = random_floats(3 * 160, 3.0f);
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) {
    const kvedge_layer_config config = {
        .format = (kvedge_format)format, .capacity = 600, .num_kv_heads = 2, .head_dim = 40};
    kvedge_layer *all = new_layer(config, NULL, keys, keys, 600);
    for (int first = 1; first < 597; first += first < 20 ? 3 : 191) {
      kvedge_layer *rest = new_layer(config, NULL, keys + first * 80, keys + first * 80, 600 - first);
      kvedge_attention_options o;
      kvedge_attention_defaults(&o);
      int64_t start;
      kvedge_layer_range(all, &start);
      CHECK(kvedge_layer_drop_first(all, first - start) == KVEDGE_OK);
      for (int kind = 0; kind < 2; kind++) {
        float expected[480], expected_lse[12], out[480], lse[12];
        block logits = new_block((size_t)(600 - first) * 4 * sizeof(float)),
              expected_logits = new_block((size_t)(600 - first) * 4 * sizeof(float));
        if (kind == 1) o.window = 50, o.sink_tokens = 3;
        o.num_tokens = 0, o.first_row = -1;
        CHECK(kvedge_attend(rest, query, 3, 4, &o, 1, expected, expected_lse) == KVEDGE_OK);
        CHECK(kvedge_attend(all, query, 3, 4, &o, 1, out, lse) == KVEDGE_OK);
        CHECK(memcmp(out, expected, sizeof out) == 0 && memcmp(lse, expected_lse, sizeof lse) == 0);
        CHECK(kvedge_scores(rest, query, 4, 0.2f, -1, 600 - first, expected_logits.data) == KVEDGE_OK);
        CHECK(kvedge_scores(all, query, 4, 0.2f, -1, 600 - first, logits.data) == KVEDGE_OK);
        CHECK(memcmp(logits.data, expected_logits.data, logits.size) == 0);
        kvedge_layer *later = new_layer(config, NULL, keys, keys, 600);
        CHECK(kvedge_layer_drop_first(later, 598) == KVEDGE_OK);
        o.first_row = first, o.num_tokens = 600 - first;
        CHECK(kvedge_attend(later, query, 3, 4, &o, 1, out, lse) == KVEDGE_OK);
        CHECK(memcmp(out, expected, sizeof out) == 0 && memcmp(lse, expected_lse, sizeof lse) == 0);
        CHECK(kvedge_scores(later, query, 4, 0.2f, first, 600 - first, logits.data) == KVEDGE_OK);
        CHECK(memcmp(logits.data, expected_logits.data, logits.size) == 0);
        o.num_tokens++;
        CHECK(kvedge_attend(later, query, 3, 4, &o, 1, out, lse) == KVEDGE_ERROR_ARGUMENT);
        o.num_tokens--, o.first_row = INT64_MAX;
        CHECK(kvedge_attend(later, query, 3, 4, &o, 1, out, lse) == KVEDGE_ERROR_ARGUMENT);
        free_block(&logits), free_block(&expected_logits), kvedge_layer_destroy(later);
      }
      kvedge_layer_destroy(rest);
    }
    kvedge_layer_destroy(all);
  }
  free(keys), free(query);
  end();
}

/* Windows and sinks near the largest integers hide nothing, and no sum with them overflows (UBSan). */
static void test_endless_windows(void) {
  begin("endless windows");
  const kvedge_layer_config config = {.capacity = 100, .num_kv_heads = 1, .head_dim = 8};
  float keys[800], query[24], expected[24], out[24];
  for (int i = 0; i < 800; i++) keys[i] = (float)(i * 37 % 101) / 50.0f - 1.0f;
  memcpy(query, keys, sizeof query);
  kvedge_layer *layer = new_layer(config, NULL, keys, keys, 100);
  CHECK(kvedge_attend(layer, query, 3, 1, NULL, 1, expected, NULL) == KVEDGE_OK);
  const int64_t sizes_of[] = {100, 101, INT32_MAX, (int64_t)1 << 62, INT64_MAX - 1, INT64_MAX};
  for (size_t i = 0; i < sizeof sizes_of / sizeof *sizes_of; i++) {
    kvedge_attention_options o;
    kvedge_attention_defaults(&o);
    o.window = sizes_of[i], o.sink_tokens = sizes_of[i];
    CHECK(kvedge_attend(layer, query, 3, 1, &o, 1, out, NULL) == KVEDGE_OK);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    o.window = 5; /* sinks alone make all visible */
    CHECK(kvedge_attend(layer, query, 3, 1, &o, 1, out, NULL) == KVEDGE_OK);
    for (int d = 0; d < 24; d++) CHECK(near(out[d], expected[d], 1e-5));
  }
  kvedge_layer_destroy(layer);
  end();
}

/* ---- Errors ---- */

enum { UNTOUCHED = 0x55 };

static int is_untouched(const void *memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)memory)[i] != UNTOUCHED) return 0;
  return 1;
}

static void test_errors(void) {
  const kvedge_layer_config config = {.capacity = 10, .num_kv_heads = 2, .head_dim = 8};
  float query[5 * 32] = {1.0f}, out[5 * 32], lse[5 * 4], keys[5 * 16] = {1.0f};
  begin("errors");
  memset(out, UNTOUCHED, sizeof out), memset(lse, UNTOUCHED, sizeof lse);
  kvedge_layer *layer = new_layer(config, NULL, keys, keys, 0);
  CHECK(kvedge_attend(layer, query, 1, 4, NULL, 1, out, NULL) == KVEDGE_ERROR_ARGUMENT); /* empty */
  CHECK(kvedge_layer_append(layer, keys, keys, 4) == KVEDGE_OK);
#define REFUSED(status, layer, query, rows, heads, options, threads, out)                                              \
  CHECK(kvedge_attend(layer, query, rows, heads, options, threads, out, lse) == status)
  REFUSED(KVEDGE_ERROR_ARGUMENT, NULL, query, 1, 4, NULL, 1, out);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, NULL, 1, 4, NULL, 1, out);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 1, 4, NULL, 1, NULL);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, -1, 4, NULL, 1, out);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 0, 3, NULL, 1, out);
  REFUSED(KVEDGE_OK, layer, query, 0, 4, NULL, 1, out);             /* nothing to do */
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 5, 4, NULL, 1, out); /* more rows than tokens */
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 1, 3, NULL, 1, out);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 1, 0, NULL, 1, out);
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 1, 4, NULL, -1, out);
  kvedge_attention_options o;
#define REFUSED_WITH(option)                                                                                           \
  kvedge_attention_defaults(&o);                                                                                       \
  o.option;                                                                                                            \
  REFUSED(KVEDGE_ERROR_ARGUMENT, layer, query, 1, 4, &o, 1, out)
  REFUSED_WITH(scale = INFINITY);
  REFUSED_WITH(softcap = -1.0f);
  REFUSED_WITH(softcap = NAN);
  REFUSED_WITH(softcap = INFINITY);
  REFUSED_WITH(precision_bits = 12);
  REFUSED_WITH(precision_bits = 32);
  REFUSED_WITH(precision_bits = -8);
  REFUSED_WITH(window = -1);
  REFUSED_WITH(sink_tokens = -1);
  REFUSED_WITH(window = 4 + (o.causal = 0));
  REFUSED_WITH(start = -1);
  REFUSED_WITH(start = 5);
  query[31] = NAN;
  REFUSED(KVEDGE_ERROR_NONFINITE, layer, query, 1, 4, NULL, 1, out);
  kvedge_attention_call call = call_on(layer, query, 1, 4, NULL, out, lse);
  kvedge_slices *slices;
  const size_t bytes = kvedge_slices_bytes(&call, 1, 1);
  block memory = new_block((bytes + 63) / 64 * 64);
  CHECK(kvedge_slices_init(memory.data, bytes, &call, 1, 1, &slices) == KVEDGE_ERROR_NONFINITE);
  query[31] = 0.0f;
  CHECK(kvedge_slices_init(NULL, bytes, &call, 1, 1, &slices) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_slices_init(memory.data, bytes, &call, 1, 0, &slices) == KVEDGE_ERROR_ARGUMENT);
  for (int i = 0; i < 6; i++) {
    kvedge_attention_call bad = call;
    const kvedge_part part = {.layer = layer, .num_tokens = 4};
    if (i == 0) bad.num_heads = 3;
    if (i == 1) bad.num_rows = 0;
    if (i == 2) bad.num_rows = 5;
    if (i == 3) bad.layer = NULL;
    if (i == 4) bad.layer = NULL, bad.parts = &part, bad.num_parts = 1;
    if (i == 5) bad.out.head_stride = 4;
    CHECK((kvedge_slices_bytes(&bad, 1, 1) == 0) == (i < 5)); /* arrays are not looked at yet */
    CHECK(kvedge_slices_init(memory.data, bytes, &bad, 1, 1, &slices) == KVEDGE_ERROR_ARGUMENT);
  }
  free_block(&memory);
  CHECK(is_untouched(out, sizeof out) && is_untouched(lse, sizeof lse));
  kvedge_layer_destroy(layer);
  end();
}

int main(void) {
  printf("path %s\n", kvedge_isa_name());
  test_attend();
  test_sizes_of_numbers();
  test_sizes_of_key_scales();
  test_sizes_of_hidden_tokens();
  test_scores();
  test_slices();
  test_slices_of_heads();
  test_the_first_tokens();
  test_dropped_tokens();
  test_endless_windows();
  test_errors();
  return report();
}
