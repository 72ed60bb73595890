/* Batches: layers of their own, attended to and appended to in one call, from arrays with strides; and sequences of a
 * pool. Held against kvedge_attend and kvedge_layer_append, whose arrays are dense float32, bit for bit. */
#include "check.h"
#include "layer_calls.h"
#include "formats/half.h"
#include "kvedge.h"

enum { MOST_ROWS = 6, MOST_LAYERS = 9, UNTOUCHED = 0x55 };

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static int is_untouched(const void *memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)memory)[i] != UNTOUCHED) return 0;
  return 1;
}

/* ---- Arrays with strides ---- */

typedef struct {
  block memory;
  kvedge_array array;
  int tokens, heads, dim;
} strided;

static size_t size_of(kvedge_element_type type) { return type == KVEDGE_TYPE_FLOAT32 ? 4 : 2; }

static void *element(const strided *s, int token, int head, int d) {
  return (char *)s->array.data + token * s->array.token_stride + head * s->array.head_stride +
         (size_t)d * size_of(s->array.type);
}

static float read_element(const strided *s, int token, int head, int d) {
  uint16_t bits;
  float x;
  if (s->array.type == KVEDGE_TYPE_FLOAT32) return memcpy(&x, element(s, token, head, d), 4), x;
  memcpy(&bits, element(s, token, head, d), 2);
  return s->array.type == KVEDGE_TYPE_FLOAT16 ? kvedge_float_of_half(bits) : kvedge_float_of_bfloat(bits);
}

static void write_element(const strided *s, int token, int head, int d, float x) {
  uint16_t bits = s->array.type == KVEDGE_TYPE_FLOAT16 ? kvedge_half_of_float(x) : kvedge_bfloat_of_float(x);
  if (s->array.type == KVEDGE_TYPE_FLOAT32) memcpy(element(s, token, head, d), &x, 4);
  else memcpy(element(s, token, head, d), &bits, 2);
}

/* Memory that ends with the array's last row: tokens or heads outside, each perhaps backwards, with gaps. */
static strided new_strided(kvedge_element_type type, int tokens, int heads, int dim) {
  strided s = {.tokens = tokens, .heads = heads, .dim = dim, .array = {.type = type}};
  const size_t size = size_of(type), row = (size_t)dim * size, gap = size * (size_t)ONE_OF(0, 0, 1, 7);
  size_t inner = row + gap, outer;
  const int heads_outside = random_below(2), num_inner = heads_outside ? tokens : heads,
            num_outer = heads_outside ? heads : tokens;
  outer = inner * (size_t)num_inner + gap;
  s.memory = new_block(outer * (size_t)(num_outer - 1) + inner * (size_t)(num_inner - 1) + row);
  s.array.data = s.memory.data;
  s.array.token_stride = (ptrdiff_t)(heads_outside ? inner : outer);
  s.array.head_stride = (ptrdiff_t)(heads_outside ? outer : inner);
  if (random_below(3) == 0) s.array.data = element(&s, tokens - 1, 0, 0), s.array.token_stride = -s.array.token_stride;
  if (random_below(3) == 0) s.array.data = element(&s, 0, heads - 1, 0), s.array.head_stride = -s.array.head_stride;
  return s;
}

static void fill_strided(const strided *s, float size) {
  for (int t = 0; t < s->tokens; t++)
    for (int h = 0; h < s->heads; h++)
      for (int d = 0; d < s->dim; d++) write_element(s, t, h, d, random_signed(size));
}

static float *dense_of(const strided *s) {
  float *x = malloc((size_t)(s->tokens * s->heads * s->dim) * sizeof *x), *at = x;
  for (int t = 0; t < s->tokens; t++)
    for (int h = 0; h < s->heads; h++)
      for (int d = 0; d < s->dim; d++) *at++ = read_element(s, t, h, d);
  return x;
}

static kvedge_element_type random_type(void) {
  return (kvedge_element_type)ONE_OF(KVEDGE_TYPE_FLOAT32, KVEDGE_TYPE_FLOAT16, KVEDGE_TYPE_BFLOAT16);
}

/* What `out` has to hold where the result in float32 is x. */
static float rounded(kvedge_element_type type, float x) {
  if (type == KVEDGE_TYPE_FLOAT16) return kvedge_float_of_half(kvedge_half_of_float(x));
  return type == KVEDGE_TYPE_BFLOAT16 ? kvedge_float_of_bfloat(kvedge_bfloat_of_float(x)) : x;
}

static int same_tokens(const kvedge_layer *a, const kvedge_layer *b, int heads, int dim) {
  const int64_t len = kvedge_layer_len(a);
  const size_t n = (size_t)len * (size_t)(heads * dim);
  float *x = malloc((2 * n + 1) * sizeof *x);
  int same = len == kvedge_layer_len(b);
  for (int side = 0; side < 2 && same && len; side++) {
    if (side) kvedge_layer_get(a, 1, -1, 0, len, x), kvedge_layer_get(b, 1, -1, 0, len, x + n);
    else kvedge_layer_get(a, 0, -1, 0, len, x), kvedge_layer_get(b, 0, -1, 0, len, x + n);
    same = memcmp(x, x + n, n * sizeof *x) == 0;
  }
  free(x);
  return same;
}

/* ---- Layers ---- */

static kvedge_layer *random_layer(int heads, int dim, int capacity) {
  kvedge_layer_config config = {.format = (kvedge_format)random_below(KVEDGE_NUM_FORMATS),
                                .capacity = capacity,
                                .num_kv_heads = heads,
                                .head_dim = dim,
                                .group_size = ONE_OF(0, 0, 32)};
  kvedge_layer *layer = NULL;
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  if (config.format == KVEDGE_INT8 && random_below(2)) {
    float *offset = random_floats((size_t)(heads * dim), 2.0f);
    CHECK(kvedge_layer_set_key_offset(layer, offset) == KVEDGE_OK);
    free(offset);
  }
  return layer;
}

static kvedge_layer *empty_copy(const kvedge_layer *layer, int64_t capacity, const float *offset) {
  kvedge_layer_config config;
  kvedge_layer *copy = NULL;
  kvedge_layer_describe(layer, &config, NULL);
  config.capacity = capacity;
  CHECK(kvedge_layer_create(&config, NULL, &copy) == KVEDGE_OK);
  if (offset) CHECK(kvedge_layer_set_key_offset(copy, offset) == KVEDGE_OK);
  return copy;
}

/* One call on a batch is kvedge_attend for each of them. */
static void attend_case(void) {
  const int num = 1 + random_below(MOST_LAYERS), num_heads = 4 * ONE_OF(1, 2), dim = ONE_OF(1, 8, 33, 64, 128);
  kvedge_layer *layers[MOST_LAYERS];
  kvedge_attention_call calls[MOST_LAYERS];
  kvedge_attention_options options[MOST_LAYERS];
  strided queries[MOST_LAYERS], outs[MOST_LAYERS];
  float *expected[MOST_LAYERS], lses[MOST_LAYERS][8 * MOST_ROWS], expected_lses[MOST_LAYERS][8 * MOST_ROWS];
  for (int i = 0; i < num; i++) {
    const int kv_heads = ONE_OF(1, 2, 4), len = ONE_OF(1, 6, 17, 130, 400), rows = len < 6 ? 1 : 1 + random_below(6);
    if (i > 0 && random_below(5) == 0) {
      layers[i] = layers[i - 1]; /* one layer may occur several times */
    } else {
      layers[i] = random_layer(kv_heads, dim, 400);
      float *tokens = random_floats((size_t)(len * kv_heads * dim), 2.0f);
      CHECK(kvedge_layer_append(layers[i], tokens, tokens, len) == KVEDGE_OK);
      free(tokens);
    }
    const int64_t held = kvedge_layer_len(layers[i]);
    kvedge_attention_options *o = &options[i];
    kvedge_attention_defaults(o);
    o->start = random_below(2) ? 0 : random_below((int)held + 1);
    if (random_below(3) == 0) o->window = 1 + random_below(40), o->sink_tokens = random_below(4);
    if (random_below(4) == 0) o->softcap = 3.0f;
    calls[i] = (kvedge_attention_call){.layer = layers[i],
                                       .num_rows = held < rows ? 1 : rows,
                                       .num_heads = num_heads,
                                       .lse = random_below(2) ? lses[i] : NULL,
                                       .options = random_below(5) ? o : NULL};
    const int n = (int)calls[i].num_rows;
    queries[i] = new_strided(random_type(), n, num_heads, dim), outs[i] = new_strided(random_type(), n, num_heads, dim);
    fill_strided(&queries[i], 2.0f);
    if (random_below(4) == 0) queries[i].array.token_stride = 0; /* one row for all */
    calls[i].query = queries[i].array, calls[i].out = outs[i].array;
    float *query = dense_of(&queries[i]);
    expected[i] = malloc((size_t)(n * num_heads * dim) * sizeof(float));
    CHECK(kvedge_attend(layers[i], query, n, num_heads, calls[i].options, 1, expected[i], expected_lses[i]) ==
          KVEDGE_OK);
    free(query);
  }
  for (int threads = 1; threads <= 3; threads += 2) {
    CHECK(kvedge_attend_layers(calls, num, threads) == KVEDGE_OK);
    for (int i = 0; i < num; i++) {
      const int n = (int)calls[i].num_rows;
      float *got = dense_of(&outs[i]);
      for (int j = 0; j < n * num_heads * dim; j++)
        if (got[j] != rounded(outs[i].array.type, expected[i][j]))
          fail("call %d: %.9g, not %.9g", i, got[j], expected[i][j]);
      if (calls[i].lse && memcmp(lses[i], expected_lses[i], (size_t)(n * num_heads) * sizeof(float))) fail("lse");
      end_case();
      free(got);
    }
  }
  for (int i = 0; i < num; i++) {
    if (i == 0 || layers[i] != layers[i - 1]) kvedge_layer_destroy(layers[i]);
    free_block(&queries[i].memory), free_block(&outs[i].memory), free(expected[i]);
  }
}

static void test_attend_layers(void) {
  begin("attend to layers");
  int count = getenv("KVEDGE_TEST_SHORT") ? 20 : 80;
  for (int i = 0; i < count; i++) attend_case();
  end();
}

/* ---- Parts ---- */

enum { MOST_PARTS = 5, MOST_TURNED = 64 };

/* Tokens of one layer in layers of their own, of the same rows: attention over the parts is that over the whole, but for
 * rounding. */
enum { MOST_BLOCKS = 400 };

/* A part's tokens written to blocks of a pool, in any order, from a row of the first of them on; `table` gets the blocks. */
static kvedge_part part_in_blocks(kvedge_layer_config config, const float *keys, const float *values, int n, int at,
                                  int32_t *table) {
  const int size = ONE_OF(1, 3, 16, 40), row = random_below(2 * size), used = (row + n + size - 1) / size;
  kvedge_layer *pool;
  config.capacity = (int64_t)size * (used + 3);
  CHECK(used <= MOST_BLOCKS && kvedge_layer_create(&config, NULL, &pool) == KVEDGE_OK);
  if (random_below(2))
    for (int i = 0; i < used; i++) table[i] = used + 2 - i;
  else
    for (int i = 0; i < used; i++) table[i] = i + 1;
  for (int i = 0; i < row / size; i++) table[i] = -7; /* not looked at */
  const int64_t token = (int64_t)config.num_kv_heads * config.head_dim;
  for (int i = 0; i < n; i++) {
    const int64_t to = (int64_t)table[(row + i) / size] * size + (row + i) % size;
    CHECK(kvedge_layer_write(pool, to, keys + (at + i) * token, values + (at + i) * token, 1) == KVEDGE_OK);
  }
  return (kvedge_part){
      .layer = pool, .first_row = row, .num_tokens = n, .position = at, .blocks = table, .block_size = size};
}

/* Room of the rotations of a part: back is what turns queries, its sines are the other's negated. */
typedef struct {
  float cosines[MOST_TURNED / 2], sines[MOST_TURNED / 2], negated[MOST_TURNED / 2];
  kvedge_rotation there, back;
} turn_of_part;

/* Moves the keys of a part in the whole layer, and lets its own stay as they were stored. */
static void turn_part(turn_of_part *t, kvedge_layer *whole, int dim, kvedge_part *part) {
  const int dims = (dim < MOST_TURNED ? dim : MOST_TURNED) / 2 * 2;
  if (dims < 2 || random_below(2)) return;
  CHECK(kvedge_rotation_angles(100.0, dims, random_below(200) - 100, t->cosines, t->sines) == KVEDGE_OK);
  for (int i = 0; i < dims / 2; i++) t->negated[i] = -t->sines[i];
  t->there = (kvedge_rotation){dims, random_below(2), t->cosines, t->sines};
  t->back = t->there, t->back.sines = t->negated;
  CHECK(kvedge_layer_shift(whole, part->position, part->position + part->num_tokens, &t->there) == KVEDGE_OK);
  part->turns = &t->back, part->num_turns = 1;
}

static void parts_case(void) {
  const int num_heads = 4, heads = ONE_OF(1, 2, 4), dim = ONE_OF(1, 8, 33, 64), len = ONE_OF(1, 6, 40, 300);
  const int rows = 1 + random_below(len < 40 ? len : 40), num = 1 + random_below(MOST_PARTS);
  const size_t outs = (size_t)(rows * num_heads * dim), lses = (size_t)(rows * num_heads);
  float *keys = random_floats((size_t)(len * heads * dim), 2.0f),
        *values = random_floats((size_t)(len * heads * dim), 2.0f);
  float *query = random_floats(outs, 2.0f), *slopes = random_floats((size_t)num_heads, 0.2f);
  float *learned = random_floats((size_t)num_heads, 3.0f), *bias = random_floats((size_t)(rows * len), 1.0f);
  float *out = malloc(outs * sizeof *out), *expected = malloc(outs * sizeof *out);
  float *lse = malloc(lses * sizeof *lse), *expected_lse = malloc(lses * sizeof *lse);
  uint8_t *mask = malloc((size_t)(rows * len));
  for (int i = 0; i < rows * len; i++) mask[i] = random_below(4) != 0;
  kvedge_layer_config config = {.format = KVEDGE_FLOAT32, .capacity = 2 * len, .num_kv_heads = heads, .head_dim = dim};
  kvedge_layer *whole, *layers[MOST_PARTS];
  kvedge_part parts[MOST_PARTS];
  static int32_t tables[MOST_PARTS][MOST_BLOCKS];
  turn_of_part turns[MOST_PARTS];
  CHECK(kvedge_layer_create(&config, NULL, &whole) == KVEDGE_OK);
  CHECK(kvedge_layer_append(whole, keys, values, len) == KVEDGE_OK);
  for (int i = 0, at = 0; i < num; i++) {
    const int n = i + 1 < num ? random_below(len - at + 1) : len - at, before = random_below(3);
    if (random_below(2)) {
      parts[i] = part_in_blocks(config, keys, values, n, at, tables[i]);
      layers[i] = (kvedge_layer *)(uintptr_t)parts[i].layer;
      turn_part(&turns[i], whole, dim, &parts[i]);
      at += n;
      continue;
    }
    CHECK(kvedge_layer_create(&config, NULL, &layers[i]) == KVEDGE_OK);
    CHECK(kvedge_layer_append(layers[i], keys, values, before < len ? before : len) == KVEDGE_OK);
    const int64_t row = kvedge_layer_len(layers[i]);
    if (n) CHECK(kvedge_layer_append(layers[i], keys + at * heads * dim, values + at * heads * dim, n) == KVEDGE_OK);
    parts[i] = (kvedge_part){.layer = layers[i], .first_row = row ? row : -1, .num_tokens = n, .position = at};
    turn_part(&turns[i], whole, dim, &parts[i]);
    at += n;
  }
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  o.start = random_below(2) ? 0 : random_below(len + 1);
  if (random_below(3) == 0) o.window = 1 + random_below(60), o.sink_tokens = random_below(9);
  if (random_below(4) == 0) o.softcap = 3.0f;
  if (random_below(4) == 0) o.alibi_slopes = slopes;
  if (random_below(4) == 0) o.sink_logits = learned;
  if (random_below(4) == 0) o.mask = mask, o.mask_strides[1] = len, o.mask_strides[2] = 1;
  if (random_below(4) == 0) o.bias = bias, o.bias_strides[1] = len, o.bias_strides[2] = 1;
  if (!o.window && random_below(4) == 0) o.causal = 0;
  const kvedge_attention_call call = {
      .parts = parts,
      .num_parts = num,
      .num_rows = rows,
      .num_heads = num_heads,
      .query = {query, KVEDGE_TYPE_FLOAT32, num_heads * dim * 4, dim * 4},
      .out = {out,   KVEDGE_TYPE_FLOAT32, num_heads * dim * 4, dim * 4},
      .lse = lse,
      .options = &o
  };
  CHECK(kvedge_attend(whole, query, rows, num_heads, &o, 1, expected, expected_lse) == KVEDGE_OK);
  for (int threads = 1; threads <= 3; threads += 2) {
    CHECK(kvedge_attend_layers(&call, 1, threads) == KVEDGE_OK);
    for (size_t i = 0; i < outs; i++)
      if (!(fabsf(out[i] - expected[i]) <= 2e-5f)) fail("%.9g, not %.9g", out[i], expected[i]);
    for (size_t i = 0; i < lses; i++)
      if (lse[i] != expected_lse[i] && !(fabsf(lse[i] - expected_lse[i]) <= 2e-5f))
        fail("lse %.9g, not %.9g", lse[i], expected_lse[i]);
    end_case();
  }
  for (int i = 0; i < num; i++) kvedge_layer_destroy(layers[i]);
  kvedge_layer_destroy(whole);
  free(keys), free(values), free(query), free(slopes), free(learned), free(bias), free(mask);
  free(out), free(expected), free(lse), free(expected_lse);
}

static void test_parts(void) {
  begin("parts of a sequence");
  const int count = getenv("KVEDGE_TEST_SHORT") ? 60 : 300;
  for (int i = 0; i < count; i++) parts_case();
  end();
}

/* Of one shard the logarithm of the denominator, and what calls on parts are refused for. */
static void test_parts_are_checked(void) {
  enum { LEN = 20, HEADS = 2, DIM = 8 };
  begin("checks of parts");
  float *tokens = random_floats(LEN * HEADS * DIM, 1.0f), out[HEADS * DIM], lse[HEADS], both[HEADS * DIM], all[HEADS];
  kvedge_layer_config config = {.format = KVEDGE_FLOAT32, .capacity = LEN, .num_kv_heads = HEADS, .head_dim = DIM};
  kvedge_layer *layer, *narrow;
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, tokens, tokens, LEN) == KVEDGE_OK);
  config.head_dim = 4;
  CHECK(kvedge_layer_create(&config, NULL, &narrow) == KVEDGE_OK);
  CHECK(kvedge_layer_append(narrow, tokens, tokens, LEN) == KVEDGE_OK);
  kvedge_attention_options o;
  kvedge_attention_defaults(&o);
  const kvedge_part good[2] = {
      {.layer = layer, .num_tokens = 12},
      {.layer = layer, .first_row = 12, .num_tokens = 8, .position = 12}
  };
  kvedge_part parts[2] = {good[0], good[1]};
  kvedge_attention_call call = {
      .parts = parts,
      .num_parts = 2,
      .num_rows = 1,
      .num_heads = HEADS,
      .query = {tokens, KVEDGE_TYPE_FLOAT32, HEADS * DIM * 4, DIM * 4},
      .out = {both,   KVEDGE_TYPE_FLOAT32, HEADS * DIM * 4, DIM * 4},
      .lse = all,
      .options = &o
  };
  CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_OK);
  float sum[HEADS] = {0}; /* the shards one by one */
  for (int i = 0; i < 2; i++) {
    kvedge_attention_call shard = call;
    shard.parts = &good[i], shard.num_parts = 1, shard.lse = lse, shard.out.data = out;
    o.num_tokens = LEN;
    CHECK(kvedge_attend_layers(&shard, 1, 1) == KVEDGE_OK);
    for (int h = 0; h < HEADS; h++) sum[h] += expf(lse[h] - all[h]);
    o.num_tokens = 0;
  }
  for (int h = 0; h < HEADS; h++)
    if (fabsf(sum[h] - 1.0f) > 1e-5f) fail("shards sum up to %.9g", sum[h]);
  end_case();
#define REFUSED(change)                                                                                                \
  do {                                                                                                                 \
    kvedge_attention_call kept = call;                                                                                 \
    parts[0] = good[0], parts[1] = good[1];                                                                            \
    change;                                                                                                            \
    CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_ERROR_ARGUMENT);                                                 \
    call = kept, o.num_tokens = 0;                                                                                     \
    end_case();                                                                                                        \
  } while (0)
  REFUSED(call.layer = layer);
  REFUSED(call.parts = NULL);
  REFUSED(call.num_parts = -1);
  REFUSED(call.num_parts = 5000);
  REFUSED(parts[1].layer = NULL);
  REFUSED(parts[1].layer = narrow);
  REFUSED(parts[1].position = 11);
  REFUSED(parts[0].position = -1);
  REFUSED(parts[1].position = INT64_MAX - 2);
  REFUSED(parts[0].num_tokens = -1);
  REFUSED(parts[1].num_tokens = 9);
  const float angles[4] = {0.5f, 0.5f, 0.5f, 0.5f};
  const kvedge_rotation odd = {3, 0, angles, angles}, wide = {10, 0, angles, angles}, none = {2, 0, angles, NULL};
  REFUSED(parts[1].num_turns = 1);
  REFUSED(parts[1].num_turns = -1);
  REFUSED((parts[1].num_turns = 1, parts[1].turns = &odd));
  REFUSED((parts[1].num_turns = 1, parts[1].turns = &wide));
  REFUSED((parts[1].num_turns = 1, parts[1].turns = &none));
  const int32_t blocks[3] = {1, 0, 5};
  REFUSED(parts[1].blocks = blocks);
  REFUSED(parts[1].blocks = blocks; parts[1].block_size = LEN + 1);
  REFUSED(parts[1].blocks = blocks; parts[1].block_size = 10; parts[1].first_row = -1);
  REFUSED(parts[1].blocks = blocks; parts[1].block_size = 4; parts[1].first_row = 1);
  REFUSED(parts[1].blocks = blocks; parts[1].block_size = 4; parts[1].first_row = INT64_MAX - 2);
  REFUSED(parts[0].num_tokens = parts[1].num_tokens = 0; parts[1].position = 0);
  REFUSED(o.num_tokens = LEN - 1);
  REFUSED(call.num_rows = LEN + 1);
#undef REFUSED
  kvedge_layer_destroy(layer), kvedge_layer_destroy(narrow), free(tokens);
  end();
}

/* A prompt in every layer: more rows than run together. */
static void test_prompts(void) {
  enum { LEN = 700, NUM = 3, HEADS = 2, DIM = 8 };
  begin("prompts of a batch");
  float *tokens = random_floats(LEN * HEADS * DIM, 1.0f), *query = random_floats(NUM * LEN * HEADS * DIM, 1.0f);
  float *out = malloc(NUM * LEN * HEADS * DIM * sizeof *out), *expected = malloc(LEN * HEADS * DIM * sizeof *out);
  kvedge_layer *layer = random_layer(HEADS, DIM, LEN);
  CHECK(kvedge_layer_append(layer, tokens, tokens, LEN) == KVEDGE_OK);
  kvedge_attention_call calls[NUM];
  const ptrdiff_t row = DIM * sizeof(float);
  for (int i = 0; i < NUM; i++)
    calls[i] = (kvedge_attention_call){
        .layer = layer,
        .num_rows = LEN - i,
        .num_heads = HEADS,
        .query = {.data = query + i * LEN * HEADS * DIM, .token_stride = HEADS * row, .head_stride = row},
        .out = {.data = out + i * LEN * HEADS * DIM,   .token_stride = HEADS * row, .head_stride = row}
    };
  for (int threads = 1; threads <= 2; threads++) {
    CHECK(kvedge_attend_layers(calls, NUM, threads) == KVEDGE_OK);
    for (int i = 0; i < NUM; i++) {
      CHECK(kvedge_attend(layer, calls[i].query.data, LEN - i, HEADS, NULL, 1, expected, NULL) == KVEDGE_OK);
      CHECK(memcmp(expected, calls[i].out.data, (size_t)(LEN - i) * HEADS * row) == 0);
    }
  }
  kvedge_layer_destroy(layer), free(tokens), free(query), free(out), free(expected);
  end();
}

/* Half-precision results are the nearest finite numbers. */
static void test_narrow_results(void) {
  enum { DIM = 4 };
  begin("16-bit results");
  const kvedge_layer_config config = {.format = KVEDGE_FLOAT32, .capacity = 1, .num_kv_heads = 1, .head_dim = DIM};
  const float keys[DIM] = {0}, values[DIM] = {70000.0f, -1e38f, 65504.0f, 1e-8f};
  kvedge_layer *layer = NULL;
  CHECK(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_OK);
  CHECK(kvedge_layer_append(layer, keys, values, 1) == KVEDGE_OK);
  uint16_t out[DIM];
  kvedge_attention_call call = {
      .layer = layer,
      .num_rows = 1,
      .num_heads = 1,
      .query = {.data = (void *)keys},
      .out = {.data = out, .type = KVEDGE_TYPE_FLOAT16}
  };
  CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_OK);
  CHECK(out[0] == 0x7bff && out[1] == 0xfbff && out[2] == 0x7bff && out[3] == 0);
  call.out.type = KVEDGE_TYPE_BFLOAT16;
  CHECK(kvedge_attend_layers(&call, 1, 1) == KVEDGE_OK);
  for (int d = 0; d < DIM; d++) CHECK(out[d] == kvedge_bfloat_of_float(values[d]));
  kvedge_layer_destroy(layer);
  end();
}

/* One bad call, the last: none of them is written. */
static void test_errors_of_layers(void) {
  enum { NUM = 3, HEADS = 4, DIM = 8 };
  begin("errors of layers");
  kvedge_layer *layer = random_layer(2, DIM, 10);
  float *rows = random_floats(10 * 2 * DIM, 1.0f), out[NUM][2 * HEADS * DIM], lse[NUM][2 * HEADS];
  const ptrdiff_t row = DIM * sizeof(float);
  CHECK(kvedge_layer_append(layer, rows, rows, 5) == KVEDGE_OK);
  memset(out, UNTOUCHED, sizeof out), memset(lse, UNTOUCHED, sizeof lse);
  kvedge_attention_call good[NUM], all[NUM];
  kvedge_attention_options options;
  kvedge_attention_defaults(&options);
  for (int i = 0; i < NUM; i++)
    good[i] = (kvedge_attention_call){
        .layer = layer,
        .query = {.data = rows,   .token_stride = HEADS * row, .head_stride = row},
        .out = {.data = out[i], .token_stride = HEADS * row, .head_stride = row},
        .num_rows = 2,
        .num_heads = HEADS,
        .lse = lse[i],
        .options = &options
    };
#define LAYERS_REFUSED(status, change)                                                                                 \
  memcpy(all, good, sizeof all);                                                                                       \
  all[NUM - 1].change;                                                                                                 \
  for (int threads = 1; threads <= 2; threads++) CHECK(kvedge_attend_layers(all, NUM, threads) == status)
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, layer = NULL);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, query.data = NULL);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, query.data = (char *)rows + 2);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, query.head_stride = row + 1);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, query.token_stride = -2);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, query.type = (kvedge_element_type)3);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, out.data = NULL);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, out.token_stride = 0);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, out.token_stride = HEADS * row - 4);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, out.head_stride = row - 4);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, num_rows = 6);
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, num_rows = -1);
  options.start = 6;
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, num_rows = 1);
  options.start = 0;
  LAYERS_REFUSED(KVEDGE_ERROR_ARGUMENT, num_heads = 3);
  CHECK(kvedge_attend_layers(good, 0, 1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_attend_layers(NULL, NUM, 1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_attend_layers(good, NUM, -1) == KVEDGE_ERROR_ARGUMENT);
  uint16_t infinite[2 * HEADS * DIM] = {[DIM] = 0x7c00};
  LAYERS_REFUSED(KVEDGE_ERROR_NONFINITE,
                 query = ((kvedge_array){infinite, KVEDGE_TYPE_FLOAT16, HEADS * row / 2, row / 2}));
  infinite[DIM] = 0x7f80;
  LAYERS_REFUSED(KVEDGE_ERROR_NONFINITE,
                 query = ((kvedge_array){infinite, KVEDGE_TYPE_BFLOAT16, HEADS * row / 2, row / 2}));
  CHECK(is_untouched(out, sizeof out) && is_untouched(lse, sizeof lse));
  CHECK(kvedge_attend_layers(good, NUM, 1) == KVEDGE_OK);
  kvedge_layer_destroy(layer), free(rows);
  end();
}

/* ---- Tokens to all layers of a batch ---- */

/* The bytes of arrays with strides are those of the same values in dense float32. */
static void append_case(void) {
  const int num = 1 + random_below(4), heads = ONE_OF(1, 3, 8), dim = ONE_OF(1, 33, 64), n = ONE_OF(1, 1, 5, 40);
  kvedge_layer *layers[4], *expected[4];
  kvedge_array keys[4], values[4];
  strided sides[8];
  for (int i = 0; i < num; i++) {
    float *offset = random_below(2) ? random_floats((size_t)(heads * dim), 2.0f) : NULL;
    layers[i] = random_layer(heads, dim, 100);
    kvedge_layer_config config;
    kvedge_layer_describe(layers[i], &config, NULL);
    if (config.format == KVEDGE_INT8) CHECK(kvedge_layer_set_key_offset(layers[i], offset) == KVEDGE_OK);
    expected[i] = empty_copy(layers[i], 100, config.format == KVEDGE_INT8 ? offset : NULL);
    for (int side = 0; side < 2; side++) {
      sides[2 * i + side] = new_strided(random_type(), n, heads, dim);
      fill_strided(&sides[2 * i + side], 3.0f);
      if (random_below(5) == 0) sides[2 * i + side].array.head_stride = 0;
    }
    keys[i] = sides[2 * i].array, values[i] = sides[2 * i + 1].array;
    float *dense_keys = dense_of(&sides[2 * i]), *dense_values = dense_of(&sides[2 * i + 1]);
    for (int j = 0; j < 2; j++) CHECK(kvedge_layer_append(expected[i], dense_keys, dense_values, n) == KVEDGE_OK);
    free(dense_keys), free(dense_values), free(offset);
  }
  CHECK(kvedge_layers_append(layers, keys, values, num, n) == KVEDGE_OK);
  for (int i = 0; i < num; i++) CHECK(kvedge_layers_append(&layers[i], &keys[i], &values[i], 1, n) == KVEDGE_OK);
  for (int i = 0; i < num; i++) {
    CHECK(same_tokens(layers[i], expected[i], heads, dim));
    kvedge_layer_destroy(layers[i]), kvedge_layer_destroy(expected[i]);
    free_block(&sides[2 * i].memory), free_block(&sides[2 * i + 1].memory);
  }
}

static void test_append(void) {
  begin("append to layers");
  for (int i = 0; i < 60; i++) append_case();
  end();
}

/* What the last layer refuses, none of them takes. */
static void test_append_all_or_nothing(void) {
  enum { NUM = 3, DIM = 8 };
  begin("append: all or nothing");
  float good[2 * DIM] = {1.0f}, bad[2 * DIM] = {1.0f};
  kvedge_layer *layers[NUM], *twice[NUM];
  kvedge_array keys[NUM], values[NUM], refused[NUM];
  for (int i = 0; i < NUM; i++) {
    const kvedge_layer_config config = {
        .format = i ? KVEDGE_FLOAT16 : KVEDGE_INT8, .capacity = 4 - i, .num_kv_heads = 1, .head_dim = DIM};
    CHECK(kvedge_layer_create(&config, NULL, &layers[i]) == KVEDGE_OK);
    CHECK(kvedge_layer_append(layers[i], good, good, 1) == KVEDGE_OK);
    keys[i] = values[i] = refused[i] = (kvedge_array){.data = good, .token_stride = DIM * sizeof(float)};
  }
  refused[NUM - 1].data = bad;
  memcpy(twice, layers, sizeof twice);
  twice[NUM - 1] = layers[0];
  for (int i = 0; i < 3; i++) {
    bad[DIM - 1] = (float[]){NAN, INFINITY, 70000.0f}[i];
    const kvedge_status status = i < 2 ? KVEDGE_ERROR_NONFINITE : KVEDGE_ERROR_SCALE;
    CHECK(kvedge_layers_append(layers, refused, values, NUM, 1) == status);
    CHECK(kvedge_layers_append(layers, keys, refused, NUM, 1) == status);
  }
  CHECK(kvedge_layers_append(layers, keys, values, NUM, 2) == KVEDGE_ERROR_CAPACITY); /* the last has room for one */
  CHECK(kvedge_layers_append(twice, keys, values, NUM, 1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layers_append(layers, keys, values, NUM, -1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layers_append(layers, keys, values, 0, 1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layers_append(NULL, keys, values, NUM, 1) == KVEDGE_ERROR_ARGUMENT);
  refused[NUM - 1].data = NULL;
  CHECK(kvedge_layers_append(layers, keys, refused, NUM, 1) == KVEDGE_ERROR_ARGUMENT);
  refused[NUM - 1] = keys[0], refused[NUM - 1].token_stride = 3;
  CHECK(kvedge_layers_append(layers, refused, values, NUM, 1) == KVEDGE_ERROR_ARGUMENT);
  for (int i = 0; i < NUM; i++) CHECK(kvedge_layer_len(layers[i]) == 1);
  CHECK(kvedge_layers_append(layers, keys, values, NUM, 0) == KVEDGE_OK);
  CHECK(kvedge_layers_append(layers, keys, values, NUM, 1) == KVEDGE_OK);
  for (int i = 0; i < NUM; i++) {
    CHECK(kvedge_layer_len(layers[i]) == 2);
    kvedge_layer_destroy(layers[i]);
  }
  end();
}

/* ---- Sequences of a pool ---- */

/* One bad sequence, the last: none of them is written. */
static void test_errors_of_a_batch(void) {
  enum { BLOCK = 4, NUM = 3, HEADS = 4, DIM = 8 };
  const kvedge_layer_config config = {.capacity = 5 * BLOCK, .num_kv_heads = 2, .head_dim = DIM};
  begin("errors of a batch");
  float *rows = random_floats(5 * BLOCK * 2 * DIM, 1.0f), query[NUM][HEADS * DIM], out[NUM][HEADS * DIM],
        lse[NUM][HEADS];
  const int32_t blocks[] = {3, 0, 4};
  kvedge_layer *pool = NULL;
  CHECK(kvedge_layer_create(&config, NULL, &pool) == KVEDGE_OK);
  CHECK(kvedge_layer_write(pool, 0, rows, rows, 5 * BLOCK) == KVEDGE_OK);
  for (int i = 0; i < NUM * HEADS * DIM; i++) query[i / (HEADS * DIM)][i % (HEADS * DIM)] = rows[i];
  memset(out, UNTOUCHED, sizeof out), memset(lse, UNTOUCHED, sizeof lse);
  kvedge_part parts[NUM], bad;
  kvedge_attention_options options;
  kvedge_attention_call good[NUM], all[NUM];
  kvedge_attention_defaults(&options);
  for (int s = 0; s < NUM; s++) {
    parts[s] = (kvedge_part){.layer = pool, .num_tokens = 4 * s + 1, .blocks = blocks, .block_size = BLOCK};
    good[s] = call_on_part(&parts[s], query[s], 1, HEADS, &options, out[s], lse[s]);
  }
#define BATCH_REFUSED(status, change)                                                                                  \
  memcpy(all, good, sizeof all), bad = parts[NUM - 1];                                                                 \
  all[NUM - 1].parts = &bad;                                                                                           \
  change;                                                                                                              \
  for (int threads = 1; threads <= 2; threads++) CHECK(kvedge_attend_layers(all, NUM, threads) == status)
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, bad.block_size = 0);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, bad.num_tokens = 0);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, all[NUM - 1].num_rows = 10);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, all[NUM - 1].query.data = NULL);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, all[NUM - 1].out.data = NULL);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, options.start = -1);
  BATCH_REFUSED(KVEDGE_ERROR_ARGUMENT, options.start = 4 * NUM);
  options.start = 0;
  query[NUM - 1][HEADS * DIM - 1] = INFINITY;
  BATCH_REFUSED(KVEDGE_ERROR_NONFINITE, (void)0);
  CHECK(is_untouched(out, sizeof out) && is_untouched(lse, sizeof lse));
  query[NUM - 1][HEADS * DIM - 1] = 1.0f;
  CHECK(kvedge_attend_layers(good, NUM, 2) == KVEDGE_OK);
  CHECK(!is_untouched(out[NUM - 1], sizeof out[0]));
  kvedge_layer_destroy(pool), free(rows);
  end();
}

int main(void) {
  printf("path %s\n", kvedge_isa_name());
  test_attend_layers();
  test_parts();
  test_parts_are_checked();
  test_prompts();
  test_narrow_results();
  test_errors_of_layers();
  test_append();
  test_append_all_or_nothing();
  test_errors_of_a_batch();
  return report();
}
