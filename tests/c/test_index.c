/* Lists of tokens: what index keys choose, and attention over them, against double; any shapes, on each kernel path. */
#include "check.h"
#include "formats/format.h"
#include "formats/half.h"
#include "kvedge.h"

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; }

static block floats_of(size_t n) {
  block memory = new_block(n * sizeof(float));
  for (size_t i = 0; i < n; i++) ((float *)memory.data)[i] = random_signed(1.0f);
  return memory;
}

/* ---- Selection ---- */

static double score_of(const kvedge_index_call *c, const float *keys, int dim, int64_t row, int list, int64_t key) {
  double sum = 0.0;
  for (int h = 0; h < c->num_heads; h++) {
    double product = 0.0;
    if (c->per_head && h != list) continue;
    for (int d = 0; d < dim; d++) product += (double)c->query[(row * c->num_heads + h) * dim + d] * keys[key * dim + d];
    product *= c->scale;
    if (c->per_head) sum = product;
    else sum += (c->weights ? c->weights[row * c->num_heads + h] : 1.0) * fmax(0.0, product);
  }
  return sum;
}

/* A list has the tail and as many blocks as it may, none of which is much worse than one that it has not. */
static void check_list(const kvedge_index_call *c, const float *keys, int dim, int64_t row, int list, double allowed) {
  const int64_t position = c->first_position + row, seen = (position + 1) / c->ratio, size = c->ratio * c->block;
  const int64_t first = c->start / size, blocks = (seen + c->block - 1) / c->block;
  const int32_t *tokens = c->tokens + (row * (c->per_head ? c->num_heads : 1) + list) * c->token_width;
  double least = INFINITY, most = -INFINITY;
  int64_t chosen = 0, at = 0;
  for (int64_t b = first; b < blocks; b++) {
    double best = -INFINITY;
    for (int64_t k = b * c->block; k < (b + 1) * c->block && k < seen; k++)
      if (k * c->ratio >= c->start) best = fmax(best, score_of(c, keys, dim, row, list, k));
    if (best == -INFINITY) continue;
    const int64_t from = b * size > c->start ? b * size : c->start;
    const int is_chosen = at < c->token_width && tokens[at] == from, is_local = b >= blocks - c->local_blocks;
    if (is_local && !is_chosen) fail("row %d: local block %d is not chosen", (int)row, (int)b);
    chosen += is_chosen;
    if (is_chosen && !is_local) least = fmin(least, best);
    if (!is_chosen) most = fmax(most, best);
    for (int64_t t = from; is_chosen && t < (b + 1) * size && t < seen * c->ratio; t++)
      if (at >= c->token_width || tokens[at++] != t) fail("row %d: token %d is not there", (int)row, (int)t);
  }
  for (int64_t t = seen * c->ratio > c->start ? seen * c->ratio : c->start; t <= position; t++)
    if (at >= c->token_width || tokens[at++] != t) fail("row %d: last token %d is not there", (int)row, (int)t);
  for (; at < c->token_width; at++)
    if (tokens[at] != -1) fail("row %d: %d behind the last", (int)row, tokens[at]);
  if (blocks > first && chosen != (blocks - first < c->k ? blocks - first : c->k)) fail("%d chosen", (int)chosen);
  if (most > least) {
    if (!near(most, least, allowed)) fail("row %d: %g is left out, %g is not", (int)row, most, least);
  }
}

/* The same lists where keys lie in blocks, anywhere in a pool of a third more. */
static void check_in_blocks(const kvedge_index_keys *keys, const kvedge_index_call *call, size_t key_bytes, int lists) {
  const int of_block = ONE_OF(1, 5, 16, 40), num_blocks = (int)((keys->num_keys + of_block - 1) / of_block);
  const int pool_blocks = num_blocks + num_blocks / 3 + 1;
  block rows = new_block((size_t)(pool_blocks * of_block) * key_bytes);
  block scales = new_block((size_t)(pool_blocks * of_block) * sizeof(float));
  block table = new_block((size_t)pool_blocks * sizeof(int32_t));
  int32_t *numbers = table.data;
  for (int b = 0; b < pool_blocks; b++) { /* shuffled */
    const int other = random_below(b + 1);
    numbers[b] = numbers[other], numbers[other] = b;
  }
  for (int64_t j = 0; j < keys->num_keys; j++) {
    const size_t at = (size_t)(numbers[j / of_block] * of_block + j % of_block);
    memcpy((char *)rows.data + at * key_bytes, (const char *)keys->keys + (size_t)j * key_bytes, key_bytes);
    if (keys->scales) ((float *)scales.data)[at] = keys->scales[j];
  }
  const size_t bytes = (size_t)(call->num_rows * lists * call->token_width) * sizeof(int32_t);
  block room = new_block(bytes);
  kvedge_index_keys in_blocks = *keys;
  kvedge_index_call own = *call;
  in_blocks.keys = rows.data, in_blocks.scales = keys->scales ? scales.data : NULL;
  in_blocks.blocks = numbers, in_blocks.keys_of_block = of_block;
  own.tokens = room.data;
  CHECK(kvedge_index_select(&in_blocks, &own, 1 + random_below(2)) == KVEDGE_OK);
  if (memcmp(room.data, call->tokens, bytes) != 0) fail("other lists in blocks of %d keys", of_block);
  in_blocks.keys_of_block = 0;
  CHECK(kvedge_index_select(&in_blocks, &own, 1) == KVEDGE_ERROR_ARGUMENT);
  free_block(&rows), free_block(&scales), free_block(&table), free_block(&room);
}

static void test_selection(void) {
  const int dim = ONE_OF(1, 3, 72, 128), num_keys = 1 + random_below(600), num_heads = ONE_OF(1, 2, 5, 16, 40, 64);
  const kvedge_format format = (kvedge_format)ONE_OF(KVEDGE_FLOAT32, KVEDGE_BFLOAT16, KVEDGE_INT8);
  const size_t bytes = format == KVEDGE_FLOAT32 ? 4 : format == KVEDGE_BFLOAT16 ? 2 : 1;
  block plain = floats_of((size_t)(num_keys * dim)), scales = new_block((size_t)num_keys * sizeof(float));
  block stored = new_block((size_t)(num_keys * dim) * bytes);
  kvedge_index_keys keys = {.format = format,
                            .head_dim = dim,
                            .num_keys = num_keys,
                            .keys = stored.data,
                            .scales = format == KVEDGE_INT8 ? scales.data : NULL};
  CHECK(kvedge_index_encode(format, dim, plain.data, num_keys, stored.data, (float *)(uintptr_t)keys.scales) ==
        KVEDGE_OK);
  kvedge_index_call call = {.num_heads = num_heads,
                            .per_head = random_below(2),
                            .scale = 0.3f,
                            .k = ONE_OF(1, 2, 40, 100000),
                            .ratio = ONE_OF(1, 3, 4),
                            .block = ONE_OF(1, 1, 7, 32)};
  const int64_t tokens = num_keys * call.ratio + random_below((int)call.ratio);
  call.num_rows = 1 + random_below(tokens < 9 ? (int)tokens : 9);
  call.first_position = tokens - call.num_rows;
  call.local_blocks = random_below(2);
  call.start = random_below(2) ? 0 : call.first_position / 2 / call.ratio * call.ratio;
  block query = floats_of((size_t)(call.num_rows * num_heads * dim));
  block weights = floats_of((size_t)(call.num_rows * num_heads));
  call.query = query.data, call.weights = call.per_head || random_below(2) ? NULL : weights.data;
  call.token_width = kvedge_index_width(&call);
  const int lists = call.per_head ? num_heads : 1;
  block room = new_block((size_t)(call.num_rows * lists * call.token_width) * sizeof(int32_t));
  call.tokens = room.data;
  CHECK(kvedge_index_select(&keys, &call, 1 + random_below(2)) == KVEDGE_OK);
  const double size = (call.per_head ? 1 : num_heads) * 0.3 * dim;
  const double allowed = format == KVEDGE_FLOAT32 ? 1e-5 * size : 0.05 * size;
  for (int64_t row = 0; row < call.num_rows; row++)
    for (int list = 0; list < lists; list++) check_list(&call, plain.data, dim, row, list, allowed);
  check_in_blocks(&keys, &call, (size_t)dim * bytes, lists);
  end_case();
  call.token_width--;
  CHECK(kvedge_index_select(&keys, &call, 1) == KVEDGE_ERROR_ARGUMENT);
  free_block(&plain), free_block(&scales), free_block(&stored), free_block(&query), free_block(&weights),
      free_block(&room);
}

/* ---- Scores alone ---- */

/* Keys of any format, some bytes apart, and as floats. */
static block new_keys(kvedge_format format, int dim, int num_keys, ptrdiff_t stride, float *plain) {
  const kvedge_format_info *blocks = kvedge_format_of_blocks(format);
  const kvedge_format_info *info = blocks ? blocks : kvedge_format_of(format);
  const kvedge_row_shape shape = kvedge_row_shape_of(info, dim, dim, KVEDGE_SCALE_FLOAT32);
  const size_t row = kvedge_row_bytes(info, dim);
  block memory = new_block((size_t)(num_keys - 1) * (size_t)stride + row);
  for (int i = 0; i < num_keys; i++) {
    char *key = (char *)memory.data + i * stride;
    if (info->encode) {
      for (int d = 0; d < dim; d++) plain[i * dim + d] = random_signed(1.0f);
      info->encode(&shape, plain + i * dim, 1, key, NULL);
    } else { /* ggml's blocks: any codes, with scales and minima of 0.125 */
      for (size_t b = 0; b < row; b++) key[b] = (char)random_below(256);
      for (int g = 0; g < shape.num_groups; g++)
        for (int at = 0; at < info->codes_at && at < 4; at += 2)
          memcpy(key + g * info->group_bytes + at, &(uint16_t){kvedge_half_of_float(0.125f)}, sizeof(uint16_t));
    }
    info->decode(&shape, key, NULL, 1, plain + i * dim);
  }
  return memory;
}

static void test_scores(void) {
  const kvedge_format format = (kvedge_format)ONE_OF(KVEDGE_FLOAT32, KVEDGE_FLOAT16, KVEDGE_BFLOAT16, KVEDGE_Q8_0,
                                                     KVEDGE_Q4_0, KVEDGE_Q5_1, KVEDGE_IQ4_NL);
  const int is_of_blocks = format == KVEDGE_Q8_0 || kvedge_format_of_blocks(format);
  const int dim = is_of_blocks ? ONE_OF(32, 128) : ONE_OF(1, 3, 72, 128);
  const int num_keys = 1 + random_below(random_below(4) ? 600 : 2500), pad = random_below(2);
  const int num_rows = 1 + random_below(9), num_heads = ONE_OF(1, 2, 5, 16, 40, 64);
  const kvedge_format_info *blocks = kvedge_format_of_blocks(format);
  const ptrdiff_t stride =
      (ptrdiff_t)kvedge_row_bytes(blocks ? blocks : kvedge_format_of(format), dim) + pad * ONE_OF(4, 64);
  float *plain = random_floats((size_t)(num_keys * dim), 1.0f);
  block keys = new_keys(format, dim, num_keys, stride, plain);
  const int head_stride = dim + 3 * pad, row_stride = head_stride * num_heads + 5 * pad;
  const int by_head = random_below(2); /* queries of a head side by side */
  const int from_row = by_head ? head_stride : row_stride, from_head = by_head ? head_stride * num_rows : head_stride;
  block query = floats_of((size_t)((num_rows - 1) * from_row + (num_heads - 1) * from_head + dim));
  block weights = floats_of((size_t)((num_rows - 1) * (num_heads + pad) + num_heads));
  block scores = new_block((size_t)((num_rows - 1) * (num_keys + pad) + num_keys) * sizeof(float));
  block memory = new_block(kvedge_index_scores_bytes(dim) + 64);
  void *aligned = (void *)(((uintptr_t)memory.data + 63) & ~(uintptr_t)63);
  kvedge_index_scores_call call = {.format = format,
                                   .head_dim = dim,
                                   .keys = keys.data,
                                   .key_stride = stride,
                                   .num_keys = num_keys,
                                   .query = query.data,
                                   .row_stride = from_row * 4,
                                   .head_stride = from_head * 4,
                                   .weights = weights.data,
                                   .weight_stride = (num_heads + pad) * 4,
                                   .num_rows = num_rows,
                                   .num_heads = num_heads,
                                   .scores = scores.data,
                                   .score_stride = (num_keys + pad) * 4};
  CHECK(kvedge_index_scores(&call, aligned) == KVEDGE_OK);
  for (int row = 0; row < num_rows; row++)
    for (int key = 0; key < num_keys; key++) {
      double sum = 0.0, size = 0.0;
      for (int h = 0; h < num_heads; h++) {
        const float *q = (float *)query.data + row * from_row + h * from_head;
        const double weight = ((float *)weights.data)[row * (num_heads + pad) + h];
        double product = 0.0, absolute = 0.0;
        for (int d = 0; d < dim; d++) {
          product += (double)q[d] * plain[key * dim + d];
          absolute += fabs((double)q[d] * plain[key * dim + d]);
        }
        sum += weight * fmax(0.0, product), size += fabs(weight) * absolute;
      }
      const double got = ((float *)scores.data)[row * (num_keys + pad) + key];
      if (!near(got, sum, 1e-6 * size)) fail("row %d, key %d: %g, not %g", row, key, got, sum);
    }
  end_case();
  ((float *)query.data)[(num_rows - 1) * from_row] = NAN;
  CHECK(kvedge_index_scores(&call, aligned) == KVEDGE_ERROR_NONFINITE);
  call.key_stride--;
  CHECK(kvedge_index_scores(&call, aligned) == KVEDGE_ERROR_ARGUMENT);
  call.key_stride++, call.format = KVEDGE_INT8;
  CHECK(kvedge_index_scores(&call, aligned) == KVEDGE_ERROR_ARGUMENT);
  free_block(&keys), free_block(&query), free_block(&weights), free_block(&scores), free_block(&memory);
  free(plain);
}

/* ---- Attention over lists ---- */

typedef struct {
  kvedge_layer *layer;
  float *keys, *values; /* (tokens, kv_heads, dim) as they are stored */
  int tokens, kv_heads, dim;
} stored_layer;

static stored_layer new_layer(void) {
  stored_layer s = {.tokens = 1 + random_below(500), .kv_heads = ONE_OF(1, 2, 3), .dim = ONE_OF(5, 32, 64, 72)};
  const char *names[] = {"int8", "float32", "bfloat16", "int4", "fp8_e4m3", "kivi4"};
  kvedge_layer_config config = {.capacity = s.tokens + 7, .num_kv_heads = s.kv_heads, .head_dim = s.dim};
  const char *name = names[random_below(6)];
  config.format = !strcmp(name, "int8")       ? KVEDGE_INT8
                  : !strcmp(name, "float32")  ? KVEDGE_FLOAT32
                  : !strcmp(name, "bfloat16") ? KVEDGE_BFLOAT16
                  : !strcmp(name, "int4")     ? KVEDGE_INT4
                  : !strcmp(name, "fp8_e4m3") ? KVEDGE_FP8_E4M3
                                              : KVEDGE_KIVI4;
  if (config.format == KVEDGE_KIVI4) config.recent = 32, config.sinks = 4, config.recent_format = KVEDGE_FLOAT16;
  if (kvedge_layer_create(&config, NULL, &s.layer) != KVEDGE_OK) fail("no layer of %s", name);
  const size_t n = (size_t)(s.tokens * s.kv_heads * s.dim);
  s.keys = random_floats(n, 1.0f), s.values = random_floats(n, 1.0f);
  if (kvedge_layer_append(s.layer, s.keys, s.values, s.tokens) != KVEDGE_OK) fail("append to %s", name);
  int64_t first_row;
  kvedge_layer_range(s.layer, &first_row);
  kvedge_layer_get(s.layer, 0, first_row, 0, s.tokens, s.keys);
  kvedge_layer_get(s.layer, 1, first_row, 0, s.tokens, s.values);
  return s;
}

static void test_attention_over_lists(void) {
  stored_layer s = new_layer();
  const int group = ONE_OF(1, 2, 6), num_heads = group * s.kv_heads, lists = random_below(2) ? 1 : s.kv_heads;
  const int num_rows = 1; /* of a layer with last tokens, only the last row reads what the getters tell */
  const int width = 1 + random_below(s.tokens), run = ONE_OF(1, 3, 16, 64);
  block query = floats_of((size_t)(num_heads * s.dim)), tokens = new_block((size_t)(lists * width) * sizeof(int32_t));
  block out = new_block((size_t)(num_heads * s.dim) * sizeof(float));
  int32_t *list = tokens.data;
  for (int l = 0; l < lists; l++) {
    int at = 0, t = random_below(s.tokens - width + 1);
    while (at < width && t < s.tokens) {
      for (int i = 0; i < run && at < width && t < s.tokens; i++) list[l * width + at++] = t++;
      t += random_below(20) * (s.tokens - t > 20 * (width - at));
    }
    while (at < width) list[l * width + at++] = -1;
  }
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.tokens = list, o.token_heads = lists, o.token_width = width;
  CHECK(kvedge_attend(s.layer, query.data, num_rows, num_heads, &o, 1 + random_below(2), out.data, NULL) == KVEDGE_OK);
  double largest = 0.0;
  for (int pass = 0; pass < 2; pass++) /* the largest output first */
    for (int h = 0; h < num_heads; h++) {
      const int kv = h / group, l = lists == 1 ? 0 : kv;
      double sum = 0.0, acc[128] = {0};
      for (int i = 0; i < width && list[l * width + i] >= 0; i++) {
        const size_t at = ((size_t)list[l * width + i] * (size_t)s.kv_heads + (size_t)kv) * (size_t)s.dim;
        double logit = 0.0;
        for (int d = 0; d < s.dim; d++) logit += (double)((float *)query.data)[h * s.dim + d] * s.keys[at + (size_t)d];
        const double p = exp(logit / sqrt(s.dim));
        sum += p;
        for (int d = 0; d < s.dim; d++) acc[d] += p * s.values[at + (size_t)d];
      }
      for (int d = 0; d < s.dim; d++) {
        const double want = acc[d] / sum, got = ((float *)out.data)[h * s.dim + d];
        largest = fmax(largest, fabs(want));
        if (pass && !near(got, want, 2e-4 * largest)) fail("head %d: %g, not %g", h, got, want);
      }
    }
  end_case();
  if (width > 1 && list[1] >= 0) {
    const int32_t first = list[0];
    list[0] = list[1];
    CHECK(kvedge_attend(s.layer, query.data, 1, num_heads, &o, 1, out.data, NULL) == KVEDGE_ERROR_ARGUMENT);
    list[0] = first;
  }
  o.window = 3;
  CHECK(kvedge_attend(s.layer, query.data, 1, num_heads, &o, 1, out.data, NULL) == KVEDGE_ERROR_ARGUMENT);
  free_block(&query), free_block(&tokens), free_block(&out);
  free(s.keys), free(s.values), kvedge_layer_destroy(s.layer);
}

/* The first call of the process: no path is picked yet. */
static void test_first_call(void) {
  const float key[3] = {1.0f, 2.0f, 3.0f};
  int8_t codes[3];
  float scale;
  int32_t token = -1;
  begin("the first call");
  CHECK(kvedge_index_encode(KVEDGE_INT8, 3, key, 1, codes, &scale) == KVEDGE_OK);
  kvedge_index_keys keys = {.format = KVEDGE_INT8, .head_dim = 3, .num_keys = 1, .keys = codes, .scales = &scale};
  kvedge_index_call call = {.query = key, .num_rows = 1, .num_heads = 1, .k = 1, .ratio = 1, .block = 1};
  call.tokens = &token, call.token_width = 1;
  CHECK(kvedge_index_select(&keys, &call, 1) == KVEDGE_OK && token == 0);
  end_case();
  end();
}

int main(void) {
  const int times = is_short() ? 12 : 150;
  const char *name;
  test_first_call();
  for (int i = 0; (name = kvedge_isa_compiled(i)); i++) {
    if (kvedge_select_isa(name, NULL) != KVEDGE_OK) continue;
    begin("%s: selection", name);
    for (int n = 0; n < times; n++) test_selection();
    end();
    begin("%s: scores alone", name);
    for (int n = 0; n < times; n++) test_scores();
    end();
    begin("%s: attention over lists", name);
    for (int n = 0; n < times; n++) test_attention_over_lists();
    end();
  }
  return report();
}
