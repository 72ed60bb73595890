/* A layer's storage: what append writes, what the errors are, and that an error changes no byte.
 *
 * Layers here are attached to blocks of exactly the size they need, so a stray write is a fault.
 */
#include "check.h"
#include "kvedge.h"

typedef struct {
  kvedge_layer *layer;
  kvedge_layer_config config;
  block header, codes[2], scales[2]; /* of keys, of values */
} guarded_layer;

static size_t groups_of(const kvedge_layer_config *c) {
  return c->group_size ? (size_t)((c->head_dim + c->group_size - 1) / c->group_size) : 1;
}

static guarded_layer new_layer(kvedge_layer_config config) {
  guarded_layer g = {.config = config};
  size_t rows = (size_t)config.capacity * (size_t)config.num_kv_heads;
  const size_t elements[] = {8, 32, 16, 16, 8, 8, 4}; /* bits */
  size_t scale = config.scale_type == KVEDGE_SCALE_FLOAT16 ? 2 : sizeof(float);
  g.header = new_block(kvedge_layer_header_bytes(&config));
  for (int i = 0; i < 2; i++) {
    const int format = i && config.value_format ? config.value_format - 1 : (int)config.format;
    const int is_q8_0 = format == KVEDGE_Q8_0;
    const size_t element = is_q8_0 ? 8 : format >= KVEDGE_GRID2 ? (size_t)format - 64 : elements[format];
    const size_t in_rows = is_q8_0 ? (size_t)config.head_dim / 32 * 2 : 0; /* scales */
    g.codes[i] = new_block(rows * (((size_t)config.head_dim * element + 7) / 8 + in_rows));
    g.scales[i] = new_block(rows * groups_of(&config) * scale);
    memset(g.codes[i].data, 0x55, g.codes[i].size), memset(g.scales[i].data, 0x55, g.scales[i].size);
  }
  const kvedge_slabs slabs = {.key_codes = g.codes[0].data,
                              .value_codes = g.codes[1].data,
                              .key_scales = g.scales[0].data,
                              .value_scales = g.scales[1].data};
  CHECK(kvedge_layer_init(g.header.data, g.header.size, &config, &slabs, &g.layer) == KVEDGE_OK);
  return g;
}

static void free_layer(guarded_layer *g) {
  free_block(&g->header);
  for (int i = 0; i < 2; i++) free_block(&g->codes[i]), free_block(&g->scales[i]);
}

/* All bytes of a layer, to be compared with later ones. */
typedef struct {
  char *bytes;
  size_t size;
  int64_t len;
} picture;

static picture take_picture(const guarded_layer *g) {
  const block *blocks[] = {&g->codes[0], &g->codes[1], &g->scales[0], &g->scales[1]};
  picture p = {.len = kvedge_layer_len(g->layer)};
  for (int i = 0; i < 4; i++) {
    p.bytes = realloc(p.bytes, p.size + blocks[i]->size);
    memcpy(p.bytes + p.size, blocks[i]->data, blocks[i]->size);
    p.size += blocks[i]->size;
  }
  return p;
}

static int same_picture(const picture *before, const guarded_layer *g) {
  picture now = take_picture(g);
  int same = now.len == before->len && memcmp(now.bytes, before->bytes, now.size) == 0;
  free(now.bytes);
  return same;
}

static const kvedge_layer_config plain = {.capacity = 20, .num_kv_heads = 3, .head_dim = 21};

/* plain with a change: with(.capacity = 0) */
#define with(...)                                                                                                      \
  (kvedge_layer_config) { .capacity = 20, .num_kv_heads = 3, .head_dim = 21, __VA_ARGS__ }

static const kvedge_layer_config good[] = {
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 21},
    {.capacity = 20, .num_kv_heads = 1, .head_dim = 64, .group_size = 32, .scale_type = KVEDGE_SCALE_FLOAT16},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 70, .group_size = 32},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 1},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 33, .format = KVEDGE_FLOAT32},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 33, .format = KVEDGE_FLOAT16},
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 21, .format = KVEDGE_BFLOAT16},
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 21, .format = KVEDGE_FP8_E4M3},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 33, .format = KVEDGE_FP8_E5M2},
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 21, .format = KVEDGE_GRID3, .scale_type = KVEDGE_SCALE_FLOAT16},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 64, .format = KVEDGE_GRID4},
    {.capacity = 20, .num_kv_heads = 2, .head_dim = 70, .format = KVEDGE_GRID7, .group_size = 32},
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 21, .format = KVEDGE_INT4},
    {.capacity = 20,
     .num_kv_heads = 2,
     .head_dim = 70,
     .format = KVEDGE_INT4,
     .group_size = 32,
     .scale_type = KVEDGE_SCALE_FLOAT16},
    {.capacity = 20,
     .num_kv_heads = 2,
     .head_dim = 33,
     .format = KVEDGE_INT8,
     .value_format = KVEDGE_VALUES(KVEDGE_FLOAT16)},
    {.capacity = 20,
     .num_kv_heads = 2,
     .head_dim = 33,
     .format = KVEDGE_FLOAT32,
     .value_format = KVEDGE_VALUES(KVEDGE_INT8)},
    {.capacity = 20, .num_kv_heads = 3, .head_dim = 64, .format = KVEDGE_Q8_0},
};
enum { NUM_GOOD = sizeof good / sizeof good[0] };

/* A finite magnitude that is too large to be stored; 0: there is none. */
static float too_large(const kvedge_layer_config *config) {
  if (config->format == KVEDGE_FLOAT16) return 65520.0f;
  if (config->format == KVEDGE_BFLOAT16) return FLT_MAX;
  if (config->format == KVEDGE_Q8_0) return 127.0f * 65520.0f;
  if (config->format >= KVEDGE_GRID2) return config->scale_type == KVEDGE_SCALE_FLOAT16 ? 29200.0f : FLT_MAX / 2.0f;
  if (config->format == KVEDGE_INT4)
    return config->scale_type == KVEDGE_SCALE_FLOAT16 ? 127.0f / 2.1f * 65600.0f : 0.0f;
  return config->format == KVEDGE_INT8 && config->scale_type == KVEDGE_SCALE_FLOAT16 ? 127.0f * 65600.0f : 0.0f;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init"
static void test_bad_configs(void) {
  const kvedge_layer_config bad[] = {
      with(.capacity = 0),
      with(.capacity = -1),
      with(.capacity = (int64_t)1 << 41),
      with(.num_kv_heads = 0),
      with(.num_kv_heads = 65537),
      with(.head_dim = 0),
      with(.head_dim = 1025),
      with(.group_size = -1),
      with(.value_head_dim = -1),
      with(.value_head_dim = 1025),
      with(.format = (kvedge_format)KVEDGE_NUM_FORMATS),
      with(.format = KVEDGE_Q8_0),
      with(.format = KVEDGE_Q8_0, .head_dim = 64, .value_head_dim = 48),
      with(.scale_type = (kvedge_scale_type)2),
  };
  begin("bad configs");
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    kvedge_layer *layer = NULL;
    CHECK(kvedge_layer_bytes(&bad[i]) == 0);
    CHECK(kvedge_layer_header_bytes(&bad[i]) == 0);
    CHECK(kvedge_layer_create(&bad[i], NULL, &layer) == KVEDGE_ERROR_ARGUMENT && layer == NULL);
  }
  CHECK(kvedge_layer_bytes(NULL) == 0);
  CHECK(kvedge_layer_create(NULL, NULL, NULL) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_create(&plain, NULL, NULL) == KVEDGE_ERROR_ARGUMENT);
  for (int status = -1; status < 20; status++) CHECK(kvedge_strerror((kvedge_status)status)[0] != 0);
  end();
}
#pragma GCC diagnostic pop

static void test_memory_of_the_caller(void) {
  begin("memory of the caller");
  size_t bytes = kvedge_layer_bytes(&plain);
  char *memory = aligned_alloc(64, bytes + 64);
  kvedge_layer *layer = NULL;
  kvedge_slabs slabs = {0};
  CHECK(kvedge_layer_init(memory, bytes - 1, &plain, NULL, &layer) == KVEDGE_ERROR_MEMORY);
  CHECK(kvedge_layer_init(memory + 4, bytes, &plain, NULL, &layer) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_init(NULL, bytes, &plain, NULL, &layer) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_layer_init(memory, bytes, &plain, &slabs, &layer) == KVEDGE_ERROR_ARGUMENT);
  CHECK(layer == NULL);
  CHECK(kvedge_layer_init(memory, bytes, &plain, NULL, &layer) == KVEDGE_OK);
  kvedge_layer_config config;
  kvedge_layer_describe(layer, &config, &slabs);
  CHECK((char *)slabs.key_codes >= memory && (char *)slabs.value_scales < memory + bytes);
  CHECK(config.capacity == 20 && config.num_kv_heads == 3);
  CHECK(config.head_dim == 21 && config.group_size == 21);
  CHECK(kvedge_layer_len(layer) == 0);
  free(memory);
  end();
}

/* The reference of storage: scale = largest / 127, code = rint(x * (127 / largest)). */
static int stored_right(const float *x, int n, const int8_t *codes, float scale) {
  float largest = 0.0f;
  for (int d = 0; d < n; d++) largest = fmaxf(fabsf(x[d]), largest);
  volatile float inverse = 127.0f / largest;
  if (scale != largest / 127.0f) return 0;
  for (int d = 0; d < n; d++) {
    volatile float product = x[d] * inverse;
    if (codes[d] != (largest > 0.0f ? (int)nearbyintf(product) : 0)) return 0;
  }
  return 1;
}

static void test_stored_bytes(void) {
  begin("stored bytes");
  const kvedge_layer_config config = {.capacity = 50, .num_kv_heads = 2, .head_dim = 70, .group_size = 32};
  guarded_layer g = new_layer(config);
  float *keys = random_floats(50 * 140, 3.0f), *values = random_floats(50 * 140, 1e-3f);
  memset(keys, 0, 70 * sizeof *keys); /* one row of zeros */
  CHECK(kvedge_layer_append(g.layer, keys, values, 20) == KVEDGE_OK);
  CHECK(kvedge_layer_append(g.layer, keys + 20 * 140, values + 20 * 140, 30) == KVEDGE_OK);
  for (int row = 0; row < 100; row++)
    for (int group = 0, at = 70 * row; group < 3; group++, at += 32) {
      const float *x[] = {keys + at, values + at};
      for (int i = 0; i < 2; i++)
        CHECK(stored_right(x[i], group < 2 ? 32 : 6, (int8_t *)g.codes[i].data + at,
                           ((float *)g.scales[i].data)[3 * row + group]));
    }
  free(keys), free(values), free_layer(&g);
  end();
}

/* ggml's quantize_row_q8_0_ref of 32 elements. (Scales here are normal halves.) */
static void ggml_group(const float *x, int8_t group[34]) {
  float largest = 0.0f;
  for (int i = 0; i < 32; i++) largest = fmaxf(fabsf(x[i]), largest);
  volatile float d = largest / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
  const int exponent = d > 0.0f ? ilogbf(d) : 0;
  const int digits = (int)nearbyint(ldexp(d, 10 - exponent));
  const uint16_t half = (uint16_t)(d > 0.0f ? ((exponent + 14) << 10) + digits : 0); /* 2048 carries */
  memcpy(group, &half, sizeof half);
  for (int i = 0; i < 32; i++) {
    volatile float product = x[i] * inverse;
    group[2 + i] = (int8_t)roundf(product);
  }
}

static void test_bytes_of_ggml(void) {
  begin("bytes of ggml");
  const kvedge_layer_config config = {.capacity = 50, .num_kv_heads = 2, .head_dim = 96, .format = KVEDGE_Q8_0};
  guarded_layer g = new_layer(config);
  float *keys = random_floats(50 * 192, 3.0f), *values = random_floats(50 * 192, 1.0f);
  memset(keys, 0, 32 * sizeof *keys);                           /* one group of zeros */
  for (int i = 0; i < 32; i++) values[i] = (float)i * 4 + 0.5f; /* halves: 127 / 124.5 makes no others */
  values[31] = -127.0f;
  CHECK(kvedge_layer_append(g.layer, keys, values, 50) == KVEDGE_OK);
  for (int i = 0; i < 300; i++) {
    int8_t expected[34];
    ggml_group(keys + 32 * i, expected);
    CHECK(memcmp((char *)g.codes[0].data + 34 * i, expected, 34) == 0);
    ggml_group(values + 32 * i, expected);
    CHECK(memcmp((char *)g.codes[1].data + 34 * i, expected, 34) == 0);
  }
  free(keys), free(values), free_layer(&g);
  end();
}

/* ---- Floats of 16 and 8 bits ---- */

typedef struct {
  kvedge_format format;
  int bytes, mantissa_bits, least_exponent; /* of normal numbers; below it elements are subnormal */
  uint16_t last;                            /* bits of the largest number */
  int saturates;                            /* what rounds beyond it becomes it; else: is refused */
} float_type;

static const float_type float_types[] = {
    {KVEDGE_FLOAT16,  2, 10, -14,  0x7bff, 0},
    {KVEDGE_BFLOAT16, 2, 7,  -126, 0x7f7f, 0},
    {KVEDGE_FP8_E4M3, 1, 3,  -6,   0x7e,   1},
    {KVEDGE_FP8_E5M2, 1, 2,  -14,  0x7b,   1}
};
enum { NUM_FLOAT_TYPES = sizeof float_types / sizeof float_types[0] };

/* Bits of element i of a row. */
static uint16_t bits_at(const float_type *type, const void *codes, int i) {
  return type->bytes == 1 ? ((const uint8_t *)codes)[i] : ((const uint16_t *)codes)[i];
}

/* What a type's bits stand for. */
static double value_of(const float_type *type, uint16_t bits) {
  const int sign = 1 << (8 * type->bytes - 1), magnitude = bits & (sign - 1),
            exponent = magnitude >> type->mantissa_bits;
  const int mantissa = magnitude & ((1 << type->mantissa_bits) - 1), one = exponent ? 1 << type->mantissa_bits : 0;
  const double value =
      ldexp(one + mantissa, (exponent ? exponent - 1 : 0) + type->least_exponent - type->mantissa_bits);
  return bits & sign ? -value : value;
}

/* The nearest of a type's numbers, ties to even: whole multiples of its step there. */
static double rounded(const float_type *type, double x) {
  const int exponent = x == 0.0 || ilogb(x) < type->least_exponent ? type->least_exponent : ilogb(x);
  const double step = ldexp(1.0, exponent - type->mantissa_bits), largest = value_of(type, type->last);
  const double nearest = rint(x / step) * step;
  return type->saturates && fabs(nearest) > largest ? copysign(largest, nearest) : nearest;
}

/* Is a layer of one element what is expected: stored, or refused with no byte written? */
static void append_one(const float_type *type, float key, float value, kvedge_status expected) {
  guarded_layer g =
      new_layer((kvedge_layer_config){.capacity = 1, .num_kv_heads = 1, .head_dim = 1, .format = type->format});
  const float x[] = {key, value};
  CHECK(kvedge_layer_append(g.layer, &key, &value, 1) == expected);
  CHECK(kvedge_layer_len(g.layer) == (expected == KVEDGE_OK));
  for (int s = 0; s < 2; s++) {
    const uint16_t bits = bits_at(type, g.codes[s].data, 0);
    if (expected == KVEDGE_OK) CHECK(value_of(type, bits) == rounded(type, x[s]));
    else CHECK(memcmp(g.codes[s].data, "\x55\x55", (size_t)type->bytes) == 0);
  }
  free_layer(&g);
}

/* Every number that a type has, and beside each the tie with the next one and the floats next to that tie. */
static void test_rounding_of_floats(void) {
  begin("rounding of 16 and 8 bits");
  for (int t = 0; t < NUM_FLOAT_TYPES; t++) {
    const float_type *type = &float_types[t];
    const int tokens = type->last; /* the last tie is beyond what can be stored, or not between numbers */
    guarded_layer g =
        new_layer((kvedge_layer_config){.capacity = tokens, .num_kv_heads = 1, .head_dim = 4, .format = type->format});
    float *keys = malloc((size_t)tokens * 4 * sizeof *keys), *values = malloc((size_t)tokens * 4 * sizeof *values);
    float *out = malloc((size_t)tokens * 4 * sizeof *out);
    for (int i = 0; i < tokens; i++) {
      const double number = value_of(type, (uint16_t)i), next = value_of(type, (uint16_t)(i + 1));
      const float tie = (float)((number + next) / 2.0);
      const float at[] = {(float)number, tie, nextafterf(tie, 0.0f), nextafterf(tie, INFINITY)};
      for (int d = 0; d < 4; d++) keys[4 * i + d] = at[d], values[4 * i + d] = -at[d];
    }
    CHECK(kvedge_layer_append(g.layer, keys, values, tokens) == KVEDGE_OK);
    for (int s = 0; s < 2; s++) {
      const float *x = s ? values : keys;
      CHECK(kvedge_layer_get(g.layer, s, -1, 0, tokens, out) == KVEDGE_OK);
      for (int i = 0; i < 4 * tokens; i++) {
        const uint16_t bits = bits_at(type, g.codes[s].data, i);
        const double expected = rounded(type, x[i]);
        if (value_of(type, bits) != expected || out[i] != expected || !signbit(out[i]) != !signbit(x[i]))
          fail("%.9g is stored as %04x and read back as %.9g, not %.9g", x[i], bits, out[i], expected);
      }
      end_case();
    }
    free(keys), free(values), free(out), free_layer(&g);
  }
  end();
}

/* From the tie of the largest number with infinity on, which is even, elements are refused, keys and values; of types that
 * saturate none. */
static void test_range_of_floats(void) {
  begin("range of 16 and 8 bits");
  for (int t = 0; t < NUM_FLOAT_TYPES; t++) {
    const float_type *type = &float_types[t];
    const double last = value_of(type, type->last), step = last - value_of(type, (uint16_t)(type->last - 1));
    const float least = (float)(last + step / 2.0), most = nextafterf(least, 0.0f),
                beyond[] = {least, nextafterf(least, INFINITY), FLT_MAX};
    const kvedge_status expected = type->saturates ? KVEDGE_OK : KVEDGE_ERROR_SCALE;
    append_one(type, most, -most, KVEDGE_OK);
    append_one(type, FLT_TRUE_MIN, -FLT_TRUE_MIN, KVEDGE_OK);
    for (int i = 0; i < 3; i++)
      for (int sign = -1; sign <= 1; sign += 2) {
        append_one(type, sign * beyond[i], 1.0f, expected);
        append_one(type, 1.0f, sign * beyond[i], expected);
      }
  }
  end();
}

static void test_read_back(void) {
  begin("read back");
  for (int c = 0; c < NUM_GOOD; c++) {
    guarded_layer g = new_layer(good[c]);
    size_t row = (size_t)(good[c].num_kv_heads * good[c].head_dim);
    float *keys = random_floats(20 * row, 3.0f), *values = random_floats(20 * row, 3.0f);
    float *offset = random_floats(row, 10.0f), *out = malloc(20 * row * sizeof *out);
    const int value_format = good[c].value_format ? good[c].value_format - 1 : (int)good[c].format;
    const int is_q8_0 = good[c].format == KVEDGE_Q8_0, is_grid = good[c].format >= KVEDGE_GRID2 && !is_q8_0,
              centred = is_grid || good[c].format == KVEDGE_INT8 || good[c].format == KVEDGE_INT4;
    /* Of elements up to 3; with scales: keys - offset, 13. */
    const double errors[] = {13.0 / 127.0 * 0.51, 0.0, 0x1p-10, 0x1p-7, 0x1p-3, 0x1p-2, 13.0 / 127.0 * 20.0};
    const double allowed = is_grid   ? ldexp(52.0, KVEDGE_GRID2 - 2 - (int)good[c].format)
                           : is_q8_0 ? 3.0 / 127.0 * 0.51 + 3.0 * 0x1p-11
                                     : errors[good[c].format];
    const double of_values = is_grid || is_q8_0 ? allowed : errors[value_format];
    CHECK((kvedge_layer_set_key_offset(g.layer, offset) == KVEDGE_OK) == centred);
    CHECK(kvedge_layer_append(g.layer, keys, values, 20) == KVEDGE_OK);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 3, 20, out) == KVEDGE_OK);
    for (size_t i = 0; i < 17 * row; i++) CHECK(near(out[i], keys[3 * row + i], allowed));
    CHECK(kvedge_layer_get(g.layer, 1, -1, 0, 7, out) == KVEDGE_OK);
    for (size_t i = 0; i < 7 * row; i++) CHECK(near(out[i], values[i], of_values));
    CHECK(kvedge_layer_get(g.layer, 1, -1, 5, 5, out) == KVEDGE_OK);
    CHECK(kvedge_layer_get(g.layer, 0, -1, -1, 5, out) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 5, 4, out) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 5, 21, out) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 0, 5, NULL) == KVEDGE_ERROR_ARGUMENT);
    free(keys), free(values), free(offset), free(out), free_layer(&g);
  }
  end();
}

/* Rows above len, to which a caller may return, stay as they are when an append is refused at its very end: also
 * when it is so long that it is checked and stored in several chunks. */
static void test_refused_rows_above_len(void) {
  begin("refused rows above len");
  for (int c = 0; c < NUM_GOOD; c++) {
    kvedge_layer_config config = good[c];
    config.capacity = 2000;
    guarded_layer g = new_layer(config);
    size_t row = (size_t)(config.num_kv_heads * config.head_dim);
    float *keys = random_floats(2000 * row, 3.0f), *values = random_floats(2000 * row, 3.0f);
    CHECK(kvedge_layer_append(g.layer, keys, values, 1990) == KVEDGE_OK);
    CHECK(kvedge_layer_set_len(g.layer, 10) == KVEDGE_OK);
    picture before = take_picture(&g);
    values[1500 * row - 1] = NAN;
    CHECK(kvedge_layer_append(g.layer, keys, values, 1500) == KVEDGE_ERROR_NONFINITE);
    CHECK(kvedge_layer_write(g.layer, 300, keys, values, 1500) == KVEDGE_ERROR_NONFINITE);
    values[1500 * row - 1] = too_large(&config);
    if (too_large(&config) > 0.0f) CHECK(kvedge_layer_append(g.layer, keys, values, 1500) == KVEDGE_ERROR_SCALE);
    CHECK(same_picture(&before, &g));
    free(before.bytes);
    free(keys), free(values), free_layer(&g);
  }
  end();
}

static void test_errors_change_nothing(void) {
  const float poison[] = {NAN, INFINITY, -INFINITY};
  begin("errors change nothing");
  for (int c = 0; c < NUM_GOOD; c++) {
    guarded_layer g = new_layer(good[c]);
    size_t row = (size_t)(good[c].num_kv_heads * good[c].head_dim);
    float *keys = random_floats(21 * row, 3.0f), *values = random_floats(21 * row, 3.0f);
    CHECK(kvedge_layer_append(g.layer, keys, values, 5) == KVEDGE_OK);
    picture before = take_picture(&g);
    CHECK(kvedge_layer_append(g.layer, keys, values, 16) == KVEDGE_ERROR_CAPACITY);
    CHECK(kvedge_layer_append(g.layer, keys, values, INT64_MAX) == KVEDGE_ERROR_CAPACITY);
    CHECK(kvedge_layer_append(g.layer, keys, values, -1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_append(g.layer, NULL, values, 1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_append(g.layer, keys, NULL, 1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_append(NULL, keys, values, 1) == KVEDGE_ERROR_ARGUMENT);
    for (int p = 0; p < 3; p++) { /* at the very end: all that comes before is fine */
      float *last[] = {keys + 15 * row - 1, values + 15 * row - 1};
      for (int i = 0; i < 2; i++) {
        float kept = *last[i];
        *last[i] = poison[p];
        CHECK(kvedge_layer_append(g.layer, keys, values, 15) == KVEDGE_ERROR_NONFINITE);
        *last[i] = kept;
      }
    }
    if (too_large(&good[c]) > 0.0f) {
      float *large[] = {keys + 15 * row - 1, values + 2 * row};
      for (int i = 0; i < 2; i++) {
        float kept = *large[i];
        *large[i] = i ? too_large(&good[c]) : -too_large(&good[c]);
        CHECK(kvedge_layer_append(g.layer, keys, values, 15) == KVEDGE_ERROR_SCALE);
        *large[i] = kept;
      }
    }
    CHECK(kvedge_layer_set_key_offset(g.layer, keys) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_set_key_scale(g.layer, NULL) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_set_len(g.layer, -1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_set_len(g.layer, 21) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_append(g.layer, NULL, NULL, 0) == KVEDGE_OK);
    CHECK(same_picture(&before, &g));
    CHECK(kvedge_layer_append(g.layer, keys, values, 15) == KVEDGE_OK);
    free(before.bytes), free(keys), free(values), free_layer(&g);
  }
  end();
}

static void test_capacity_and_len(void) {
  begin("capacity and length");
  for (int c = 0; c < NUM_GOOD; c++) {
    guarded_layer g = new_layer(good[c]);
    size_t row = (size_t)(good[c].num_kv_heads * good[c].head_dim);
    float *keys = random_floats(20 * row, 3.0f), *values = random_floats(20 * row, 3.0f);
    for (int t = 0; t < 20; t++) {
      CHECK(kvedge_layer_len(g.layer) == t);
      CHECK(kvedge_layer_append(g.layer, keys + (size_t)t * row, values + (size_t)t * row, 1) == KVEDGE_OK);
    }
    CHECK(kvedge_layer_append(g.layer, keys, values, 1) == KVEDGE_ERROR_CAPACITY);
    picture full = take_picture(&g);
    CHECK(kvedge_layer_set_len(g.layer, 7) == KVEDGE_OK && kvedge_layer_len(g.layer) == 7);
    CHECK(kvedge_layer_append(g.layer, keys + 7 * row, values + 7 * row, 13) == KVEDGE_OK);
    CHECK(same_picture(&full, &g)); /* one by one, or many at once */
    CHECK(kvedge_layer_set_len(g.layer, 0) == KVEDGE_OK && kvedge_layer_len(g.layer) == 0);
    CHECK(kvedge_layer_set_len(g.layer, 20) == KVEDGE_OK && same_picture(&full, &g));
    free(full.bytes), free(keys), free(values), free_layer(&g);
  }
  end();
}

/* Whether token 0.. of the layer are those of number `first`.. of what was appended. */
static int holds(const guarded_layer *g, const float *keys, int64_t first, int64_t len) {
  const size_t row = (size_t)(g->config.num_kv_heads * g->config.head_dim);
  guarded_layer fresh = new_layer(g->config);
  float *out = malloc((size_t)len * row * sizeof *out), *expected = malloc((size_t)len * row * sizeof *out);
  CHECK(kvedge_layer_append(fresh.layer, keys + (size_t)first * row, keys + (size_t)first * row, len) == KVEDGE_OK);
  int same = kvedge_layer_len(g->layer) == len;
  for (int values = 0; values < 2; values++) {
    CHECK(kvedge_layer_get(fresh.layer, values, -1, 0, len, expected) == KVEDGE_OK);
    same &= kvedge_layer_get(g->layer, values, -1, 0, len, out) == KVEDGE_OK;
    same &= memcmp(out, expected, (size_t)len * row * sizeof *out) == 0;
  }
  free(out), free(expected), free_layer(&fresh);
  return same;
}

static void test_drop_first(void) {
  begin("dropping first tokens");
  for (int c = 0; c < NUM_GOOD; c++) {
    guarded_layer g = new_layer(good[c]);
    size_t row = (size_t)(good[c].num_kv_heads * good[c].head_dim);
    float *keys = random_floats(40 * row, 3.0f), *out = malloc(20 * row * sizeof *out);
    int64_t start;
    CHECK(kvedge_layer_append(g.layer, keys, keys, 15) == KVEDGE_OK);
    picture before = take_picture(&g);
    CHECK(kvedge_layer_drop_first(g.layer, -1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_drop_first(g.layer, 16) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_drop_first(NULL, 1) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_drop_first(g.layer, 0) == KVEDGE_OK && same_picture(&before, &g));
    CHECK(kvedge_layer_drop_first(g.layer, 4) == KVEDGE_OK && holds(&g, keys, 4, 11));
    CHECK(kvedge_layer_range(g.layer, &start) == 11 && start == 4);
    before.len = 11;
    CHECK(same_picture(&before, &g));                                /* no row has moved */
    CHECK(kvedge_layer_get(g.layer, 0, 2, 0, 13, out) == KVEDGE_OK); /* two that were dropped among them */
    CHECK(kvedge_layer_get(g.layer, 0, -2, 0, 2, out) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_get(g.layer, 1, 2, 0, 14, out) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 0, 12, out) == KVEDGE_ERROR_ARGUMENT);

    /* Positions count from the first token that is left; so does the room. */
    CHECK(kvedge_layer_append(g.layer, keys + 15 * row, keys + 15 * row, 6) == KVEDGE_ERROR_CAPACITY);
    CHECK(kvedge_layer_write(g.layer, 16, keys, keys, 1) == KVEDGE_ERROR_CAPACITY);
    CHECK(kvedge_layer_filled(g.layer, 11, 6) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_set_len(g.layer, 17) == KVEDGE_ERROR_ARGUMENT);
    CHECK(same_picture(&before, &g));
    CHECK(kvedge_layer_write(g.layer, 11, keys + 15 * row, keys + 15 * row, 5) == KVEDGE_OK);
    CHECK(kvedge_layer_written(g.layer) == 16 && kvedge_layer_len(g.layer) == 11);
    CHECK(kvedge_layer_set_len(g.layer, 16) == KVEDGE_OK && holds(&g, keys, 4, 16));
    CHECK(kvedge_layer_set_len(g.layer, 7) == KVEDGE_OK && holds(&g, keys, 4, 7));
    CHECK(kvedge_layer_append(g.layer, keys + 11 * row, keys + 11 * row, 9) == KVEDGE_OK && holds(&g, keys, 4, 16));

    /* Compact frees the rows of what was dropped, and what was above len is no longer there. */
    CHECK(kvedge_layer_compact(NULL) == KVEDGE_ERROR_ARGUMENT);
    CHECK(kvedge_layer_compact(g.layer) == KVEDGE_OK && holds(&g, keys, 4, 16));
    CHECK(kvedge_layer_range(g.layer, &start) == 16 && start == 0 && kvedge_layer_written(g.layer) == 16);
    CHECK(kvedge_layer_append(g.layer, keys + 20 * row, keys + 20 * row, 4) == KVEDGE_OK && holds(&g, keys, 4, 20));
    picture full = take_picture(&g);
    CHECK(kvedge_layer_compact(g.layer) == KVEDGE_OK && same_picture(&full, &g)); /* nothing to move */

    /* A sliding window: one row is moved per token, on average, and the oldest go. */
    CHECK(kvedge_layer_drop_first(g.layer, 10) == KVEDGE_OK);
    for (int64_t next = 24; next < 40; next++) {
      if (kvedge_layer_range(g.layer, &start) + start == 20) CHECK(kvedge_layer_compact(g.layer) == KVEDGE_OK);
      CHECK(kvedge_layer_append(g.layer, keys + (size_t)next * row, keys + (size_t)next * row, 1) == KVEDGE_OK);
      CHECK(kvedge_layer_drop_first(g.layer, 1) == KVEDGE_OK && holds(&g, keys, next - 9, 10));
    }
    CHECK(kvedge_layer_drop_first(g.layer, 10) == KVEDGE_OK && kvedge_layer_len(g.layer) == 0);
    CHECK(kvedge_layer_compact(g.layer) == KVEDGE_OK);
    CHECK(kvedge_layer_append(g.layer, keys, keys, 20) == KVEDGE_OK && holds(&g, keys, 0, 20));
    free(before.bytes), free(full.bytes), free(keys), free(out), free_layer(&g);
  }
  end();
}

static void test_key_offset(void) {
  begin("key offset");
  guarded_layer g = new_layer(plain);
  float *offset = random_floats(63, 10.0f), *keys = random_floats(63, 1.0f), out[63];
  CHECK(kvedge_layer_set_key_offset(g.layer, offset) == KVEDGE_OK);
  offset[62] = NAN;
  CHECK(kvedge_layer_set_key_offset(g.layer, offset) == KVEDGE_ERROR_NONFINITE); /* the old one stays */
  offset[62] = 1e38f; /* copied: the layer does not look here again */
  for (int i = 0; i < 62; i++) keys[i] += offset[i];
  CHECK(kvedge_layer_append(g.layer, keys, keys, 1) == KVEDGE_OK);
  CHECK(kvedge_layer_get(g.layer, 0, -1, 0, 1, out) == KVEDGE_OK);
  for (int i = 0; i < 42; i++) CHECK(near(out[i], keys[i], 1.0 / 127.0)); /* finer than 11 / 127 */
  CHECK(kvedge_layer_set_len(g.layer, 0) == KVEDGE_OK);
  CHECK(kvedge_layer_set_key_offset(g.layer, NULL) == KVEDGE_OK);
  free(offset), free(keys), free_layer(&g);
  end();
}

/* Keys are stored over the scale, in every format: a channel that is 1000 times as large costs the others nothing. */
static void test_key_scale(void) {
  begin("key scale");
  for (int format = 0; format < KVEDGE_NUM_FORMATS; format++) {
    kvedge_layer_config config = plain;
    config.format = (kvedge_format)format;
    guarded_layer g = new_layer(config);
    const int row = config.num_kv_heads * config.head_dim;
    float *keys = random_floats(4 * (size_t)row, 1.0f), *out = malloc(4 * (size_t)row * sizeof *out);
    float *scale = malloc((size_t)row * sizeof *scale);
    for (int i = 0; i < row; i++) scale[i] = i % 5 ? 1.25f : 1000.0f;
    for (int i = 0; i < 4 * row; i++) keys[i] *= scale[i % row];
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_OK);
    scale[0] = 0.0f;
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_ERROR_ARGUMENT);
    scale[0] = -1.0f;
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_ERROR_ARGUMENT);
    scale[0] = NAN;
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_ERROR_NONFINITE); /* the old one stays, a copy */
    scale[0] = 1000.0f;
    CHECK(kvedge_layer_append(g.layer, keys, keys, 4) == KVEDGE_OK);
    CHECK(kvedge_layer_get(g.layer, 0, -1, 0, 4, out) == KVEDGE_OK);
    for (int i = 0; i < 4 * row; i++) CHECK(near(out[i], keys[i], 0.13 * scale[i % row]));
    if (format == KVEDGE_INT8)
      for (int i = 0; i < 4 * row; i++) CHECK(near(out[i], keys[i], scale[i % row] / 250.0));
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_ERROR_ARGUMENT); /* not empty */
    CHECK(kvedge_layer_set_len(g.layer, 0) == KVEDGE_OK);
    for (int i = 0; i < row; i++) scale[i] = 1e-38f, keys[i] = 1e3f;
    CHECK(kvedge_layer_set_key_scale(g.layer, scale) == KVEDGE_OK);
    CHECK(kvedge_layer_append(g.layer, keys, keys, 1) == KVEDGE_ERROR_NONFINITE); /* 1e41 */
    CHECK(kvedge_layer_set_key_scale(g.layer, NULL) == KVEDGE_OK);
    CHECK(kvedge_layer_append(g.layer, keys, keys, 1) == KVEDGE_OK);
    free(keys), free(out), free(scale), free_layer(&g);
  }
  end();
}

int main(void) {
  test_bad_configs();
  test_memory_of_the_caller();
  test_stored_bytes();
  test_bytes_of_ggml();
  test_rounding_of_floats();
  test_range_of_floats();
  test_read_back();
  test_errors_change_nothing();
  test_refused_rows_above_len();
  test_capacity_and_len();
  test_drop_first();
  test_key_offset();
  test_key_scale();
  return report();
}
