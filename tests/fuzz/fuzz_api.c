/* Programs of calls on the public C API (csrc/kvedge.h), held against the header's promises:
 *
 *   - a call that fails has changed nothing: length, the bytes of every row ever written, the outputs
 *   - rows are stored as exactly as their format allows, and with the same bytes on every kernel path
 *   - attention, scores and paged attention agree with reference.h; of numbers far from ordinary, results are finite,
 *     no denormals, and within the values' range
 *   - rows that no query row sees have no influence, whatever numbers they hold
 *   - slices give the bits of kvedge_attend, in any order and with any number of slots; so do threads
 *
 * Memory that nobody has written holds NaNs (MemorySanitizer: is unknown), and arrays are exactly as large as they must
 * be. One input is one layer, on one of the kernel paths that this CPU runs, and up to MAX_CALLS calls.
 */
#define _GNU_SOURCE
#include "../c/layer_calls.h"
#include "reference.h"

#ifndef FUZZ_WITHOUT
#define FUZZ_WITHOUT "" /* a path that this build has left out */
#endif

enum {
  MAX_CALLS = 24,
  MAX_FLOATS = 150000,   /* of a layer's keys */
  MAX_PRODUCTS = 300000, /* rows * heads * tokens * channels of a call */
};

/* ---- The layer, and what is known of it ----------------------------------------------------------- */

enum { NUM_ARRAYS = 4 };

static struct {
  kvedge_layer *layer;
  kvedge_layer_config config; /* group_size as it is used */
  const ref_format *format;
  int created; /* by kvedge_layer_create */
  void *memory, *own[NUM_ARRAYS];
  char *arrays[NUM_ARRAYS];     /* key and value codes, key and value scales */
  char *copies[NUM_ARRAYS];     /* what they held after the last call that changed them */
  size_t row_bytes[NUM_ARRAYS]; /* of a token; where tokens lie in runs, of a run */
  int tokens;                   /* of a row */
  uint8_t *written;             /* [capacity] */
  float *given[2];              /* [capacity][entry] keys and values as they were handed over */
  uint8_t *is_given;            /* [capacity] 0: other bytes, or keys stored with another offset */
  float *offset;                /* NULL: none */
  int64_t len, entry;           /* entry: num_kv_heads * head_dim */
  const char *paths[8];
  int num_paths;
} it;

/* Bytes of an array before a token that begins a row. */
static size_t bytes_before(int array, int64_t token) { return (size_t)(token / it.tokens) * it.row_bytes[array]; }

static size_t bytes_of(int array) { return bytes_before(array, it.config.capacity); }

static void note_rows(int64_t position, int64_t n) {
  for (int i = 0; i < NUM_ARRAYS; i++) {
    size_t at = bytes_before(i, position);
    if (it.row_bytes[i]) memcpy(it.copies[i] + at, it.arrays[i] + at, bytes_before(i, n));
  }
  memset(it.written + position, 1, (size_t)n);
}

/* Length and rows, also those above the length, are what they were. */
static void check_unchanged(void) {
  REQUIRE(kvedge_layer_len(it.layer) == it.len, "%lld, not %lld", (long long)kvedge_layer_len(it.layer),
          (long long)it.len);
  for (int64_t start = 0, stop; start < it.config.capacity; start = stop + 1) {
    for (stop = start; stop < it.config.capacity && it.written[stop]; stop++) continue;
    for (int i = 0; i < NUM_ARRAYS && stop > start; i++) {
      if (!it.row_bytes[i]) continue;
      size_t at = bytes_before(i, start);
      REQUIRE(!memcmp(it.arrays[i] + at, it.copies[i] + at, bytes_before(i, stop - start)),
              "rows %lld to %lld of array %d", (long long)start, (long long)stop, i);
    }
  }
}

static int all_written(int64_t start, int64_t stop) {
  return start <= stop && !memchr(it.written + start, 0, (size_t)(stop - start));
}

/* Element i of a token's keys or values; *size as stored_value has it. */
static double stored(int values, int64_t token, int64_t i, double *size) {
  const int head = (int)(i / it.config.head_dim), d = (int)(i % it.config.head_dim);
  double x = stored_value(&it.config, values, it.arrays[values], it.arrays[2 + values], token, head, d, size);
  return !values && it.offset ? clamped(x + it.offset[i]) : x;
}

/* ---- Making one ----------------------------------------------------------------------------------- */

static void check_bad_configs(kvedge_layer_config config) {
  kvedge_layer *layer = NULL;
  switch (next_below(9)) {
    case 0: config.capacity = 0; break;
    case 1: config.capacity = ((int64_t)1 << 40) + 1; break;
    case 2: config.head_dim = ONE_OF(int, 0, -1, 1025, INT32_MAX); break;
    case 3: config.num_kv_heads = ONE_OF(int, 0, -1, 65537, INT32_MAX); break;
    case 4: config.group_size = -1 - next_byte() * 7654321; break;
    case 5: config.format = (kvedge_format)KVEDGE_NUM_FORMATS; break;
    case 6: config.scale_type = (kvedge_scale_type)(2 + next_byte()); break;
    case 7:
      if (ref_formats[config.format].tokens) {
        config.capacity += 1 + next_below(REF_RUN - 1);
        break;
      } /* fall through */
    default: /* valid, but for 32-bit sizes and up to 2^69 bytes */
      config.capacity = (int64_t)1 << 40, config.head_dim = 1024, config.num_kv_heads = 65536;
  }
  REQUIRE(kvedge_layer_bytes(&config) == 0, "bytes of a bad config");
  REQUIRE(kvedge_layer_create(&config, NULL, &layer) == KVEDGE_ERROR_ARGUMENT && !layer, "create with a bad config");
}

static kvedge_layer_config next_config(void) {
  unsigned other = next_byte(); /* half of the layers are int8 */
  kvedge_layer_config config = {.format = ref_names[other % 2 ? 1 + other / 2 % (NUM_REF_FORMATS - 1) : 0],
                                .scale_type = next_byte() % 2 ? KVEDGE_SCALE_FLOAT16 : KVEDGE_SCALE_FLOAT32};
  config.head_dim = one_in(3) ? ONE_OF(int, 8, 16, 32, 64, 80, 128) : 1 + next_below(130);
  config.num_kv_heads = 1 + next_below(next_below(4) == 3 ? 8 : 3);
  config.group_size = one_in(2) ? ONE_OF(int, 32, 64, 16, 1, 7, 8, 33, 128, 1000) : 0;
  config.capacity = 1 + (one_in(4) ? next_word() % 800 : next_below(100));
  int64_t most = (one_in(4) ? MAX_FLOATS : MAX_FLOATS / 8) / (config.head_dim * config.num_kv_heads);
  if (config.capacity > most) config.capacity = most;
  if (ref_formats[config.format].tokens) config.capacity = (config.capacity + REF_RUN - 1) / REF_RUN * REF_RUN;
  return config;
}

static void open_layer(void) {
  kvedge_layer_config config = next_config();
  if (one_in(32)) check_bad_configs(config);
  it.config = config;
  if (!config.group_size || config.group_size > config.head_dim) it.config.group_size = config.head_dim;
  int groups = (config.head_dim + it.config.group_size - 1) / it.config.group_size;
  it.format = &ref_formats[config.format];
  it.entry = (int64_t)config.num_kv_heads * config.head_dim;
  it.tokens = it.format->tokens ? it.format->tokens : 1;
  for (int i = 0; i < 2; i++)
    it.row_bytes[i] =
        (size_t)config.num_kv_heads * (it.format->tokens ? ref_run_bytes(config.format, config.head_dim, i)
                                                         : ref_row_bytes(config.format, config.head_dim));
  size_t scale_bytes = config.scale_type == KVEDGE_SCALE_FLOAT16 ? 2 : 4;
  it.row_bytes[2] = it.row_bytes[3] = it.format->steps ? (size_t)(config.num_kv_heads * groups) * scale_bytes : 0;
  size_t header = kvedge_layer_header_bytes(&config), bytes = kvedge_layer_bytes(&config);
  REQUIRE(header > 0 && bytes > header, "bytes of a good config");
  kvedge_status status;
  switch (next_below(4)) {
    case 0:
      status = kvedge_layer_create(&config, NULL, &it.layer);
      it.created = 1;
      break;
    case 1:
      it.memory = exact_aligned(bytes, 64);
      REQUIRE(kvedge_layer_init(it.memory, bytes - 1, &config, NULL, &it.layer) == KVEDGE_ERROR_MEMORY,
              "a byte too few");
      status = kvedge_layer_init(it.memory, bytes, &config, NULL, &it.layer);
      break;
    default: { /* arrays of exactly their size, half of them with no more alignment than malloc's */
      int aligned = one_in(2);
      it.memory = exact_aligned(header, 64);
      for (int i = 0; i < NUM_ARRAYS; i++)
        if (it.row_bytes[i]) it.own[i] = aligned ? exact_aligned(bytes_of(i), 64) : exact(bytes_of(i));
      const kvedge_slabs slabs = {
          .key_codes = it.own[0], .value_codes = it.own[1], .key_scales = it.own[2], .value_scales = it.own[3]};
      REQUIRE(kvedge_layer_init(it.memory, header - 1, &config, &slabs, &it.layer) == KVEDGE_ERROR_MEMORY,
              "a byte too few");
      status = kvedge_layer_init(it.memory, header, &config, &slabs, &it.layer);
    }
  }
  REQUIRE(status == KVEDGE_OK, "status %d of a new layer", status);
  kvedge_slabs slabs;
  kvedge_layer_describe(it.layer, NULL, &slabs);
  it.arrays[0] = slabs.key_codes, it.arrays[1] = slabs.value_codes;
  it.arrays[2] = slabs.key_scales, it.arrays[3] = slabs.value_scales;
  for (int i = 0; i < NUM_ARRAYS; i++) {
    make_unknown(it.arrays[i], bytes_of(i));
    it.copies[i] = exact(bytes_of(i));
  }
  for (int i = 0; i < 2; i++) it.given[i] = exact((size_t)(config.capacity * it.entry) * sizeof(float));
  it.written = calloc((size_t)config.capacity, 1), it.is_given = calloc((size_t)config.capacity, 1);
}

static void close_layer(void) {
  kvedge_quiesce();
  if (it.created) kvedge_layer_destroy(it.layer);
  release(it.memory), release(it.written), release(it.is_given), release(it.offset), release(it.given[0]),
      release(it.given[1]);
  for (int i = 0; i < NUM_ARRAYS; i++) release(it.own[i]), release(it.copies[i]);
}

static void choose_path(void) {
  const char *name = it.paths[next_below(it.num_paths)];
  REQUIRE(kvedge_select_isa(name, NULL) == KVEDGE_OK && !strcmp(kvedge_isa_name(), name), "path %s", name);
}

/* ---- Tokens in ------------------------------------------------------------------------------------ */

/* Which failures these rows must give: bit 1 << status. */
static unsigned failures_of(const float *rows, int64_t n, const float *offset) {
  unsigned failures = 0;
  float largest = 0.0f;
  for (int64_t i = 0; i < n * it.entry; i++) {
    float x = offset ? rows[i] - offset[i % it.entry] : rows[i];
    if (!isfinite(x)) failures |= 1u << KVEDGE_ERROR_NONFINITE;
    else largest = fmaxf(largest, fabsf(x));
  }
  int half_scales = it.format->steps && it.config.scale_type == KVEDGE_SCALE_FLOAT16;
  float of_scale = it.format->bits == 4 ? 2.1f : 1.0f; /* int4: what least squares may make of a scale, at most */
  if (largest >= it.format->too_large || (half_scales && of_scale * (largest / (float)it.format->steps) > 65504.0f))
    failures |= 1u << KVEDGE_ERROR_SCALE;
  return failures;
}

static void check_status(kvedge_status status, unsigned failures) {
  if (failures) REQUIRE(status != KVEDGE_OK && failures >> status & 1, "status %d, not one of %#x", status, failures);
  else REQUIRE(status == KVEDGE_OK, "status %d", status);
}

/* Puts random rows at a position, by append or write. */
static void put(int64_t position, int64_t n, int style, int appending, int may_spoil) {
  int64_t made = n < 0 ? 0 : n > it.config.capacity + 3 ? 0 : n; /* more is refused before a row is read */
  float *rows[2];
  unsigned failures = 0;
  for (int i = 0; i < 2; i++) {
    rows[i] = exact((size_t)(made * it.entry) * sizeof(float));
    fill_rows(rows[i], made * it.config.num_kv_heads, it.config.head_dim, style);
    if (may_spoil) maybe_spoil(rows[i], (size_t)(made * it.entry));
    failures |= failures_of(rows[i], made, i ? NULL : it.offset);
  }
  if (position < 0 || n < 0 || position % it.tokens || n % it.tokens) failures = 1u << KVEDGE_ERROR_ARGUMENT;
  else if (n > it.config.capacity - position) failures = 1u << KVEDGE_ERROR_CAPACITY;
  kvedge_status status = appending ? kvedge_layer_append(it.layer, rows[0], rows[1], n)
                                   : kvedge_layer_write(it.layer, position, rows[0], rows[1], n);
  check_status(status, failures);
  if (status == KVEDGE_OK) {
    if (appending) it.len += n;
    note_rows(position, n);
    memset(it.is_given + position, 1, (size_t)n);
    for (int i = 0; i < 2; i++)
      memcpy(it.given[i] + position * it.entry, rows[i], (size_t)(n * it.entry) * sizeof(float));
    if (one_in(8)) { /* again, on another path: the same bytes */
      choose_path();
      REQUIRE(kvedge_layer_write(it.layer, position, rows[0], rows[1], n) == KVEDGE_OK, "written twice");
    }
  }
  check_unchanged();
  release(rows[0]), release(rows[1]);
}

/* Whole runs, mostly. */
static int64_t whole(int64_t n) { return one_in(16) ? n : (n + it.tokens - 1) / it.tokens * it.tokens; }

static int64_t next_count(int64_t room) {
  switch (next_below(8)) {
    case 0: return extreme_int();
    case 1: return room;
    case 2: return room + 1 + next_below(3);
    case 3: return whole(next_below(3));
    default: return whole(room > 0 ? next_word() % room : 0);
  }
}

static int64_t next_position(void) {
  int64_t position = next_word() % (it.config.capacity + 1);
  return it.tokens == 1 || one_in(16) ? position : position / it.tokens * it.tokens;
}

static void append_call(void) {
  int64_t n = next_count(it.config.capacity - it.len);
  put(it.len, n, next_style(), 1, 1);
}

static void write_call(void) {
  int64_t position = one_in(16) ? extreme_int() : next_position();
  int64_t n = next_count(it.config.capacity - (position >= 0 && position <= it.config.capacity ? position : 0));
  put(position, n, next_style(), 0, 1);
}

/* Bytes of the caller's own in rows from a position on: any codes, any finite scales >= 0. */
static void fill_own(int64_t position, int64_t n, int style) {
  const int dim = it.config.head_dim;
  for (int i = 0; i < NUM_ARRAYS; i++) {
    if (!it.row_bytes[i]) continue;
    char *at = it.arrays[i] + bytes_before(i, position);
    const size_t bytes = bytes_before(i, n), of_head = it.row_bytes[i] / (size_t)it.config.num_kv_heads;
    if (i < 2) {
      for (size_t j = 0; j < bytes; j += of_head)
        if (it.format->tokens) ref_fill_run(it.config.format, at + j, dim, i, style);
        else ref_fill(it.format, at + j, dim, style);
    } else if (it.config.scale_type == KVEDGE_SCALE_FLOAT16) {
      for (size_t j = 0; j < bytes; j += 2)
        *(uint16_t *)(at + j) =
            (uint16_t)(style < ORDINARY_STYLES ? 0x1c00 + random_bits() % 0x800 : random_bits() % 0x7c00);
    } else {
      for (size_t j = 0; j < bytes; j += 4)
        *(float *)(at + j) = fabsf(element_of(style, (int)(random_bits() % 250) - 125, 0));
    }
  }
  note_rows(position, n);
  memset(it.is_given + position, 0, (size_t)n);
}

static void fill_call(void) {
  int64_t position = next_word() % it.config.capacity / it.tokens * it.tokens;
  int64_t n = next_count(it.config.capacity - position);
  int style = next_style(), fits = n >= 0 && n <= it.config.capacity - position;
  if (n > 0 && fits && n % it.tokens == 0) fill_own(position, n, style);
  if (!(fits && !all_written(position, position + n))) {
    kvedge_status status = kvedge_layer_filled(it.layer, position, n);
    check_status(status, fits ? 0 : 1u << KVEDGE_ERROR_ARGUMENT);
  }
  check_unchanged();
}

static void set_len_call(void) {
  int64_t len = one_in(8) ? extreme_int() : one_in(3) ? it.len : next_word() % (it.config.capacity + 2);
  int bad = len < 0 || len > it.config.capacity;
  if (!bad && len > it.len && !all_written(it.len, len)) return;
  kvedge_status status = kvedge_layer_set_len(it.layer, len);
  check_status(status, bad ? 1u << KVEDGE_ERROR_ARGUMENT : 0);
  if (!bad) it.len = len;
  check_unchanged();
}

static void offset_call(void) {
  float *offset = NULL;
  unsigned failures = 0;
  if (!one_in(4)) {
    offset = exact((size_t)it.entry * sizeof(float));
    fill_rows(offset, it.config.num_kv_heads, it.config.head_dim, next_style());
    maybe_spoil(offset, (size_t)it.entry);
    for (int64_t i = 0; i < it.entry; i++)
      if (!isfinite(offset[i])) failures = 1u << KVEDGE_ERROR_NONFINITE;
  }
  if (it.len > 0 || !it.format->steps) failures = 1u << KVEDGE_ERROR_ARGUMENT;
  check_status(kvedge_layer_set_key_offset(it.layer, offset), failures);
  if (failures) {
    release(offset);
  } else {
    release(it.offset);
    it.offset = offset;
    memset(it.is_given, 0, (size_t)it.config.capacity); /* keys above the length were stored with another */
  }
  check_unchanged();
}

/* ---- Tokens out ----------------------------------------------------------------------------------- */

/* Half a step of the group of a run that element d of a token's row of a head is in. */
static double run_error(int values, int64_t token, int head, int d) {
  const int64_t first = token / REF_RUN * REF_RUN;
  const int dim = it.config.head_dim, start = d / REF_GROUP * REF_GROUP;
  float smallest = INFINITY, largest = -INFINITY;
  for (int i = 0; i < (values ? REF_GROUP : REF_RUN); i++) {
    const int64_t of = values ? token : first + i;
    const int channel = values ? start + i : d;
    if (channel >= dim) break;
    const float x = it.given[values][of * it.entry + head * dim + channel];
    smallest = fminf(smallest, x), largest = fmaxf(largest, x);
  }
  const double below = fabs(smallest) * 0x1p-10 + 0x1p-24; /* that the smallest value is stored as less */
  const double step = (largest - smallest + below) / ((1 << it.format->bits) - 1) * (1.0 + 0x1p-10) + 0x1p-24;
  return 0.5001 * step + 3e-7 * fmax(fabs(smallest), fabs(largest));
}

/* How far what is stored may be from what was given: half a step of its group, or the format's rounding. */
static double storage_error(int values, int64_t token, int64_t at) {
  const int dim = it.config.head_dim, d = (int)(at % dim);
  const float *row = it.given[values] + token * it.entry + at / dim * dim;
  if (it.format->tokens) return run_error(values, token, (int)(at / dim), d);
  if (!it.format->steps) return ref_rounding(it.format, row[d]);
  int group = it.config.group_size, start = d / group * group;
  double largest = 0.0, step, rounding = 0.0;
  for (int i = start; i < start + group && i < dim; i++) {
    double offset = values || !it.offset ? 0.0 : it.offset[at / dim * dim + i];
    largest = fmax(largest, fabs(row[i] - offset));
    if (i == d) rounding = 3e-7 * (fabs(row[i]) + fabs(offset));
  }
  step = largest / it.format->steps;
  if (it.config.scale_type == KVEDGE_SCALE_FLOAT16) step = step * (1.0 + 0x1p-10) + 0x1p-24;
  /* int4: half of the gap between its largest levels is 15.5, and its scale is one of least squares. */
  return (it.format->bits == 4 ? 50.0 : 0.5001) * step + rounding + 1e-38;
}

static void get_call(void) {
  int values = next_below(2), bad;
  int64_t start = one_in(8) ? extreme_int() : next_word() % (it.len + 1);
  int64_t stop = one_in(8) ? extreme_int() : one_in(2) ? it.len : next_word() % (it.len + 1);
  bad = start < 0 || stop < start || stop > it.len;
  int64_t n = bad ? 0 : stop - start;
  float *out = exact((size_t)(n * it.entry) * sizeof(float));
  kvedge_status status = kvedge_layer_get(it.layer, values, -1, start, stop, out);
  check_status(status, bad ? 1u << KVEDGE_ERROR_ARGUMENT : 0);
  for (int64_t i = 0; i < n * it.entry; i++) {
    int64_t token = start + i / it.entry, at = i % it.entry;
    double size, expected = stored(values, token, at, &size), off = !values && it.offset ? it.offset[at] : 0.0;
    double slack = 3e-7 * (fabs(expected) + fabs(off)) + 1e-38;
    REQUIRE(isfinite(out[i]) && fabs(out[i] - expected) <= slack, "element %lld: %g, stored %g", (long long)i, out[i],
            expected);
    if (!it.is_given[token]) continue;
    float given = it.given[values][token * it.entry + at];
    REQUIRE(fabs((double)out[i] - given) <= storage_error(values, token, at), "element %lld: %g, given %g",
            (long long)i, out[i], given);
  }
  check_unchanged();
  release(out);
}

/* ---- Options -------------------------------------------------------------------------------------- */

typedef struct {
  ref_call ref;
  const kvedge_attention_options *options; /* as handed over; NULL: defaults */
  kvedge_attention_options own;
  kvedge_status expected;
  int ordinary, with_lse, num_threads;
  float *query, *sinks, *slopes;
  void *mask, *bias;
  float *out, *lse;
  size_t num_out, num_lse;
  double *stored[2], *sizes[2]; /* keys and values */
} attention_call;

/* An array over heads, rows and tokens in any order, repeated along some of them: strides, and its size. */
static size_t next_strides(const int64_t sizes[3], int64_t strides[3]) {
  static const int orders[6][3] = {
      {0, 1, 2},
      {0, 1, 2},
      {1, 0, 2},
      {0, 2, 1},
      {2, 1, 0},
      {1, 2, 0}
  };
  const int *order = orders[next_below(6)];
  int repeats = next_byte() & 7, last = 0;
  int64_t stride = one_in(4) ? 2 : 1;
  for (int i = 2; i >= 0; i--) {
    int axis = order[i];
    strides[axis] = repeats >> axis & 1 ? 0 : stride;
    if (strides[axis] && sizes[axis] > 1) last += (int)((sizes[axis] - 1) * stride), stride *= sizes[axis];
  }
  return (size_t)last + 1;
}

static void next_mask(attention_call *c) {
  const int64_t sizes[3] = {c->ref.num_heads, c->ref.num_rows, c->ref.len};
  size_t n = next_strides(sizes, c->own.mask_strides);
  unsigned share = next_byte();
  uint8_t *mask = c->mask = exact(n);
  for (size_t i = 0; i < n; i++) mask[i] = (uint8_t)(random_bits() % 256 < share ? 1 + random_bits() % 255 : 0);
  c->own.mask = mask;
}

static void next_bias(attention_call *c) {
  const int64_t sizes[3] = {c->ref.num_heads, c->ref.num_rows, c->ref.len};
  size_t n = next_strides(sizes, c->own.bias_strides);
  unsigned hidden = next_byte(), style = (unsigned)next_style();
  float *bias = c->bias = exact(n * sizeof *bias);
  fill_rows(bias, (int64_t)n, 1, (int)style);
  for (size_t i = 0; i < n; i++)
    if (random_bits() % 256 < hidden) bias[i] = -INFINITY;
  c->own.bias = bias;
}

static float *next_per_head(int num_heads) {
  float *x = exact((size_t)num_heads * sizeof *x);
  fill_rows(x, num_heads, 1, next_style());
  return x;
}

static int64_t next_tokens(int64_t len) { return one_in(6) ? extreme_int() : next_word() % (len + 5); }

/* Any options; c->expected becomes ARGUMENT where they make none. */
static void next_options(attention_call *c, int no_masks) {
  kvedge_attention_options *o = &c->own;
  kvedge_attention_defaults(o);
  c->options = o;
  if (one_in(6)) {
    c->options = NULL;
  } else {
    unsigned chosen = next_byte(), more = next_byte();
    o->causal = chosen % 4 != 3;
    if (chosen >> 2 & 1)
      o->scale = ONE_OF(float, 0.3f, -0.2f, 0.0f, 1.0f, 1e30f, -1e-30f, INFINITY, -INFINITY, 1e-45f, 3e38f);
    if (chosen >> 3 & 1) o->window = next_tokens(c->ref.len);
    if (chosen >> 4 & 1) o->sink_tokens = next_tokens(c->ref.len);
    if (chosen >> 5 & 1)
      o->softcap = ONE_OF(float, 1.5f, 50.0f, 30.0f, 1e-30f, 1e30f, 1.2e-38f, 3.4e38f, -1.0f, NAN, INFINITY);
    if (chosen >> 6 & 1) o->precision_bits = ONE_OF(int, 8, 16, 24, 24, 0, 12, 32, -8);
    if (more & 1) o->sink_logits = c->sinks = next_per_head(c->ref.num_heads);
    if (more & 2) o->alibi_slopes = c->slopes = next_per_head(c->ref.num_heads);
    if (more & 4 && !no_masks) next_mask(c);
    if (more & 8 && !no_masks) next_bias(c);
  }
  if (isinf(o->scale) || !(o->softcap >= 0.0f) || isinf(o->softcap) || o->window < 0 || o->sink_tokens < 0 ||
      (o->window && !o->causal) || o->precision_bits % 8 || o->precision_bits < 0 || o->precision_bits > 24)
    c->expected = KVEDGE_ERROR_ARGUMENT;
  c->ref.options = *o;
  if (isnan(o->scale)) c->ref.options.scale = (float)(1.0 / sqrt(it.config.head_dim));
}

/* ---- A call of attention -------------------------------------------------------------------------- */

static int next_num_heads(void) {
  int heads = it.config.num_kv_heads * ONE_OF(int, 1, 1, 2, 3, 4, 5, 8, 16, 17, 33);
  return it.config.head_dim > 64 && heads > 20 ? it.config.num_kv_heads : heads;
}

/* 0: all. */
static int64_t next_num_tokens(void) {
  return !one_in(3) ? 0 : one_in(12) ? extreme_int() : it.len ? 1 + next_word() % (it.len + (next_byte() == 0)) : 0;
}

/* Rows and heads that the reference can bear. */
static void next_shape(attention_call *c, int64_t len) {
  c->ref.len = len;
  c->ref.num_kv_heads = it.config.num_kv_heads;
  c->ref.dim = it.config.head_dim;
  c->ref.num_heads = next_num_heads();
  c->ref.num_rows = 1;
  if (one_in(2)) c->ref.num_rows = one_in(8) ? 1 + next_word() % 600 : 1 + next_below(40);
  int64_t most = MAX_PRODUCTS / (len * c->ref.num_heads * c->ref.dim + 1) + 1;
  if (c->ref.num_rows > most) c->ref.num_rows = most;
}

static void next_query(attention_call *c) {
  const ref_call *r = &c->ref;
  size_t n = (size_t)(r->num_rows * r->num_heads * r->dim);
  c->query = exact(n * sizeof(float));
  fill_rows(c->query, r->num_rows * r->num_heads, r->dim, next_style());
  maybe_spoil(c->query, n);
  for (size_t i = 0; i < n; i++)
    if (!isfinite(c->query[i]) && c->expected == KVEDGE_OK) c->expected = KVEDGE_ERROR_NONFINITE;
  c->ref.query = c->query;
  c->ref.offset = it.offset;
  c->num_out = n, c->num_lse = (size_t)(r->num_rows * r->num_heads);
  c->out = exact(n * sizeof(float)), c->lse = exact(c->num_lse * sizeof(float));
  c->with_lse = !one_in(4);
  c->num_threads = ONE_OF(int, 1, 1, 1, 0, 2, 3);
}

/* What the call's tokens hold now: token t of it is token of_token(t) of the layer. */
static void load_tokens(attention_call *c, const int32_t *blocks, int64_t block_size) {
  size_t n = (size_t)(c->ref.len * it.entry);
  for (int s = 0; s < 2; s++) {
    if (!c->stored[s]) c->stored[s] = exact(n * sizeof(double)), c->sizes[s] = exact(n * sizeof(double));
    for (int64_t t = 0; t < c->ref.len; t++) {
      int64_t token = blocks ? blocks[t / block_size] * block_size + t % block_size : t;
      for (int64_t i = 0; i < it.entry; i++)
        c->stored[s][t * it.entry + i] = stored(s, token, i, &c->sizes[s][t * it.entry + i]);
    }
    c->ref.sizes[s] = c->sizes[s];
  }
  c->ref.keys = c->stored[0], c->ref.values = c->stored[1];
}

static void free_call(attention_call *c) {
  release(c->query), release(c->sinks), release(c->slopes), release(c->mask), release(c->bias), release(c->out),
      release(c->lse);
  for (int s = 0; s < 2; s++) release(c->stored[s]), release(c->sizes[s]);
}

static int is_number(float x) { return x == 0.0f || isnormal(x); }

/* The contract, docs/numerics.md; and what rounding float logits of this amplitude may cost. */
static double allowed_error(const attention_call *c, const ref_row *r, double largest) {
  int bits = c->ref.options.precision_bits;
  double of_largest = bits == 24  ? 3e-5
                      : bits == 8 ? 5e-2
                                  : 2e-4,
         of_spread = bits == 24  ? 1e-6
                     : bits == 8 ? 2e-1
                                 : 2e-5;
  if (bits == 16) of_spread = 1e-3;
  /* Where all that is seen cancels or has next to no weight, results are what is left of much larger terms. */
  return of_largest * largest + (of_spread + 4e-7 * r->amplitude) * r->spread + 1e-12 * r->largest;
}

/* Ordinary enough for the contract: logits that float32 can tell apart, values whose products stay in its range. */
static int is_ordinary(const ref_row *r) {
  return r->amplitude <= 300.0 && (r->largest == 0.0 || (r->largest >= 1e-25 && r->largest <= 1e25));
}

static void check_row(const attention_call *c, const ref_row *r, const double *expected, double largest, size_t at) {
  const ref_call *f = &c->ref;
  const float *out = c->out + at * (size_t)f->dim, lse = c->lse[at];
  double most = 1.02 * r->largest + 2e-38, allowed = allowed_error(c, r, largest);
  int ordinary = is_ordinary(r);
  for (int d = 0; d < f->dim; d++) {
    REQUIRE(is_number(out[d]), "out %zu, %d: %g", at, d, out[d]);
    REQUIRE(fabs(out[d]) <= most, "out %zu, %d: %g, but values are at most %g", at, d, out[d], r->largest);
    if (ordinary)
      REQUIRE(fabs(out[d] - expected[d]) <= allowed + 2e-38, "out %zu, %d: %g, not %g; allowed %g (path %s)", at, d,
              out[d], expected[d], allowed, kvedge_isa_name());
  }
  if (!c->with_lse) return;
  REQUIRE(lse == -INFINITY || is_number(lse), "lse %zu: %g", at, lse);
  REQUIRE((lse == -INFINITY) == (r->lse == -INFINITY), "lse %zu: %g, not %g", at, lse, r->lse);
  double of_lse =
      3.0 * allowed_error(c, &(ref_row){.spread = 1.0, .amplitude = r->amplitude}, 1.0) * fmax(1.0, fabs(r->lse));
  if (ordinary && r->lse != -INFINITY)
    REQUIRE(fabs(lse - r->lse) <= of_lse, "lse %zu: %g, not %g; allowed %g", at, lse, r->lse, of_lse);
}

static void check_results(const attention_call *c) {
  const ref_call *f = &c->ref;
  size_t rows = (size_t)(f->num_rows * f->num_heads), dim = (size_t)f->dim;
  double *expected = exact(rows * dim * sizeof *expected), *room = exact((size_t)(2 * f->len + f->dim) * sizeof *room);
  ref_row *of_rows = exact(rows * sizeof *of_rows);
  double largest = 0.0;
  for (size_t i = 0; i < rows; i++) {
    of_rows[i] =
        reference(f, (int)(i % (size_t)f->num_heads), (int64_t)(i / (size_t)f->num_heads), room, expected + i * dim);
    for (size_t d = 0; d < dim; d++) largest = fmax(largest, fabs(expected[i * dim + d]));
  }
  for (size_t i = 0; i < rows; i++) check_row(c, &of_rows[i], expected + i * dim, largest, i);
  release(expected), release(room), release(of_rows);
}

/* Outputs of a refused call are as they were. */
static void check_untouched(const attention_call *c) {
#ifdef FUZZ_MSAN
  REQUIRE(__msan_test_shadow(c->out, c->num_out * sizeof(float)) == 0, "out was written");
  REQUIRE(__msan_test_shadow(c->lse, c->num_lse * sizeof(float)) == 0, "lse was written");
#else
  const unsigned char *out = (const unsigned char *)c->out, *lse = (const unsigned char *)c->lse;
  for (size_t i = 0; i < c->num_out * sizeof(float); i++) REQUIRE(out[i] == 0xff, "out was written");
  for (size_t i = 0; i < c->num_lse * sizeof(float); i++) REQUIRE(lse[i] == 0xff, "lse was written");
#endif
}

static kvedge_status attend(attention_call *c) {
  return kvedge_attend(it.layer, c->query, c->ref.num_rows, c->ref.num_heads, c->options, c->num_threads, c->out,
                       c->with_lse ? c->lse : NULL);
}

/* Slices in some order, on some threads, in memory of exactly the size asked for. */
static void check_slices(const attention_call *c) {
  const ref_call *f = &c->ref;
  const int num_threads = 1 + next_below(4);
  float *out = exact(c->num_out * sizeof *out), *lse = c->with_lse ? exact(c->num_lse * sizeof *lse) : NULL;
  const kvedge_attention_call call = call_on(it.layer, c->query, f->num_rows, f->num_heads, c->options, out, lse);
  const size_t bytes = kvedge_slices_bytes(&call, 1, num_threads);
  REQUIRE(bytes == 0 || c->expected != KVEDGE_ERROR_ARGUMENT, "bytes of a refused call");
  kvedge_slices *slices = NULL;
  void *memory = exact_aligned(bytes, 64);
  if (bytes)
    REQUIRE(kvedge_slices_init(memory, bytes - 1, &call, 1, num_threads, &slices) ==
                (c->expected ? c->expected : KVEDGE_ERROR_MEMORY),
            "a byte too few");
  kvedge_status status = kvedge_slices_init(memory, bytes, &call, 1, num_threads, &slices);
  REQUIRE(status == c->expected, "status %d, not %d", status, c->expected);
  const int num = status == KVEDGE_OK ? kvedge_slices_count(slices) : 0, backwards = next_below(2);
  for (int i = 0; i < num; i++) {
    const int slice = backwards ? num - 1 - i : i, next = i + 1 == num ? -1 : backwards ? slice - 1 : slice + 1;
    kvedge_slices_run(slices, slice, next_below(2) ? next : -1, next_below((unsigned)num_threads));
  }
  if (status == KVEDGE_OK) {
    REQUIRE(!memcmp(out, c->out, c->num_out * sizeof *out), "slices give another out (%d slices)", num);
    if (lse) REQUIRE(!memcmp(lse, c->lse, c->num_lse * sizeof *lse), "slices give another lse");
  }
  release(memory), release(out), release(lse);
}

/* Rows that no query row sees get other numbers, of any size; the results are as right as before. */
static void check_unseen(attention_call *c) {
  const ref_call *f = &c->ref;
  int style = next_below(NUM_STYLES), changed = 0;
  const int n = it.tokens;
  for (int64_t t = 0; t < it.len; t += n) {
    int seen = 0;
    for (int64_t i = 0; i < n * f->num_rows * f->num_heads && !seen; i++) {
      const int64_t row = i / n / f->num_heads, token = t + i % n;
      seen = token < f->len && ref_sees(f, (int)(i / n % f->num_heads), row, token);
    }
    if (seen) continue;
    float *rows = exact((size_t)(2 * n * it.entry) * sizeof *rows);
    fill_rows(rows, 2 * n * it.config.num_kv_heads, f->dim, style);
    if (kvedge_layer_write(it.layer, t, rows, rows + n * it.entry, n) == KVEDGE_OK) {
      note_rows(t, n);
      memset(it.is_given + t, 0, (size_t)n);
      changed = 1;
    }
    release(rows);
  }
  if (!changed) return;
  load_tokens(c, NULL, 0);
  REQUIRE(attend(c) == KVEDGE_OK, "attended twice");
  check_results(c);
}

static void attend_call(void) {
  attention_call c = {.expected = KVEDGE_OK};
  int64_t tokens = next_num_tokens();
  int all = tokens <= 0 || tokens > it.len;
  next_shape(&c, all ? it.len : tokens);
  next_options(&c, 0);
  if (tokens) c.options = &c.own, c.own.num_tokens = tokens;
  if (it.len == 0 || (tokens && all)) c.expected = KVEDGE_ERROR_ARGUMENT;
  kvedge_status without_rows = c.expected;
  if (c.own.causal && c.ref.num_rows > c.ref.len) c.expected = KVEDGE_ERROR_ARGUMENT;
  next_query(&c);
  int64_t good_rows = c.ref.num_rows;
  int good_heads = c.ref.num_heads;
  switch (next_below(24)) { /* no rows, or a shape that is refused before anything is read */
    case 1:
      c.ref.num_rows = 0;
      c.expected = without_rows;
      break;
    case 2:
      c.ref.num_rows = ONE_OF(int64_t, -1, INT64_MIN);
      c.expected = KVEDGE_ERROR_ARGUMENT;
      break;
    case 3:
      c.ref.num_heads = it.config.num_kv_heads > 1 ? c.ref.num_heads + 1 : ONE_OF(int, 0, -1, INT32_MIN);
      c.expected = KVEDGE_ERROR_ARGUMENT;
      break;
    case 4:
      if (c.own.causal) {
        c.ref.num_rows = next_below(2) ? c.ref.len + 1 : INT64_MAX;
        c.expected = KVEDGE_ERROR_ARGUMENT;
      }
  }
  kvedge_status status = attend(&c);
  REQUIRE(status == c.expected, "status %d, not %d", status, c.expected);
  check_unchanged();
  if (status != KVEDGE_OK || c.ref.num_rows == 0) {
    check_untouched(&c);
    c.expected = status == KVEDGE_OK ? KVEDGE_ERROR_ARGUMENT : status; /* slices are of one row or more */
    if (one_in(2)) check_slices(&c);
  } else {
    load_tokens(&c, NULL, 0);
    check_results(&c);
    if (c.num_threads != 1) {
      float *out = c.out;
      c.out = exact(c.num_out * sizeof *out), c.num_threads = 1;
      REQUIRE(attend(&c) == KVEDGE_OK && !memcmp(out, c.out, c.num_out * sizeof *out), "threads give another out");
      release(out);
    }
    if (one_in(2)) check_slices(&c);
    if (one_in(2)) check_unseen(&c);
  }
  check_unchanged();
  c.ref.num_rows = good_rows, c.ref.num_heads = good_heads;
  free_call(&c);
}

/* ---- Scores --------------------------------------------------------------------------------------- */

static double largest_of(const double *x, int64_t n) {
  double largest = 0.0;
  for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(x[i]));
  return largest;
}

/* The keys of a call's tokens share one factor: so far below the largest of them, float32 products are lost. */
static const double LOST = 1e-40;

static void scores_call(void) {
  attention_call c = {.expected = KVEDGE_OK};
  int64_t tokens = next_num_tokens();
  if (tokens == 0 && next_byte()) tokens = it.len;
  int good = tokens > 0 && tokens <= it.len;
  next_shape(&c, good ? tokens : 0);
  c.ref.num_rows = 1;
  kvedge_attention_defaults(&c.ref.options);
  float scale = c.ref.options.scale = ONE_OF(float, 1.0f, 0.2f, -0.3f, 0.0f, NAN, INFINITY, 1e30f, 1e-30f);
  if (isinf(scale) || !good) c.expected = KVEDGE_ERROR_ARGUMENT;
  if (isnan(scale)) c.ref.options.scale = (float)(1.0 / sqrt(it.config.head_dim));
  next_query(&c);
  int64_t n = c.ref.num_heads * c.ref.len;
  float *logits = exact((size_t)n * sizeof *logits);
  kvedge_status status = kvedge_scores(it.layer, c.query, c.ref.num_heads, scale, -1, tokens, logits);
  REQUIRE(status == c.expected, "status %d, not %d", status, c.expected);
  if (status == KVEDGE_OK) {
    load_tokens(&c, NULL, 0);
    double largest = largest_of(c.stored[0], tokens * it.entry);
    for (int64_t i = 0; i < n; i++) {
      int64_t row = i % tokens * c.ref.num_kv_heads + kv_head_of(&c.ref, (int)(i / tokens));
      double amplitude, expected = ref_score(&c.ref, (int)(i / tokens), 0, i % tokens, &amplitude);
      REQUIRE(isfinite(logits[i]), "logit %lld: %g", (long long)i, logits[i]);
      if (amplitude <= 1e6 && largest_of(c.stored[0] + row * c.ref.dim, c.ref.dim) >= LOST * largest)
        REQUIRE(fabs(logits[i] - expected) <= 4e-6 * amplitude + 1e-30, "logit %lld: %g, not %g (terms of %g, path %s)",
                (long long)i, logits[i], expected, amplitude, kvedge_isa_name());
    }
  }
  check_unchanged();
  release(logits);
  free_call(&c);
}

/* ---- Paged ---------------------------------------------------------------------------------------- */

enum { MAX_SEQUENCES = 4 };

/* A table of blocks whose tokens have been written, and the length of its sequence; 0: there is none. */
static int64_t next_table(int64_t block_size, int64_t most, int32_t **table) {
  int64_t num_blocks = it.config.capacity / block_size, wanted = 1 + next_word() % most, len = 0;
  int64_t room = (wanted + block_size - 1) / block_size;
  int32_t *blocks = exact((size_t)room * sizeof *blocks);
  int64_t next = num_blocks ? next_word() % num_blocks : 0;
  while (len < wanted && num_blocks) {
    int64_t tokens = wanted - len < block_size ? wanted - len : block_size, tried = 0;
    while (tried++ < num_blocks && !all_written(next * block_size, next * block_size + tokens))
      next = (next + 1) % num_blocks;
    if (tried > num_blocks) break;
    blocks[len / block_size] = (int32_t)next;
    len += tokens;
    next = one_in(3) ? next_word() % num_blocks : (next + 1) % num_blocks;
  }
  *table = exact((size_t)((len + block_size - 1) / block_size) * sizeof **table);
  memcpy(*table, blocks, (size_t)((len + block_size - 1) / block_size) * sizeof **table);
  release(blocks);
  return len;
}

static void batch_call(void) {
  attention_call calls[MAX_SEQUENCES];
  kvedge_part parts[MAX_SEQUENCES];
  kvedge_attention_call sequences[MAX_SEQUENCES];
  int32_t *tables[MAX_SEQUENCES];
  int count = 1 + next_below(MAX_SEQUENCES), made = 0;
  int64_t block_size = 1 + next_below(one_in(4) ? 100 : 20);
  if (it.tokens > 1 && !one_in(16)) block_size = it.tokens * (1 + block_size % 4);
  if (block_size > it.config.capacity) block_size = it.config.capacity;
  kvedge_status expected = block_size % it.tokens ? KVEDGE_ERROR_ARGUMENT : KVEDGE_OK;
  for (int i = 0; i < count; i++) {
    attention_call *c = &calls[made];
    int64_t len = next_table(block_size, it.config.capacity < 300 ? it.config.capacity : 300, &tables[made]);
    if (len == 0) {
      release(tables[made]);
      continue;
    }
    *c = (attention_call){.expected = KVEDGE_OK};
    next_shape(c, len);
    if (made) c->ref.num_heads = calls[0].ref.num_heads;
    if (!made) next_options(c, count > 1);
    c->ref.options = calls[0].ref.options, c->own = calls[0].own, c->options = calls[0].options;
    if (made) c->expected = calls[0].expected;
    if (c->own.causal && c->ref.num_rows > len && c->expected == KVEDGE_OK) {
      if (one_in(8) && !c->own.mask && !c->own.bias) c->expected = KVEDGE_ERROR_ARGUMENT;
      else c->ref.num_rows = len; /* masks have more rows than that, then */
    }
    next_query(c);
    if (c->expected != KVEDGE_OK && expected == KVEDGE_OK) expected = c->expected;
    parts[made] = (kvedge_part){.layer = it.layer, .num_tokens = len, .blocks = tables[made], .block_size = block_size};
    sequences[made] = call_on_part(&parts[made], c->query, c->ref.num_rows, c->ref.num_heads, calls[0].options, c->out,
                                   c->with_lse ? c->lse : NULL);
    made++;
  }
  if (made && one_in(16)) { /* a block that the pool does not have */
    int64_t last = (parts[made - 1].num_tokens - 1) / block_size, num_blocks = it.config.capacity / block_size;
    tables[made - 1][one_in(2) ? last : 0] = ONE_OF(int32_t, -1, INT32_MIN, INT32_MAX, (int32_t)num_blocks);
    if (expected == KVEDGE_OK) expected = KVEDGE_ERROR_ARGUMENT;
  }
  if (made) {
    kvedge_status status = kvedge_attend_layers(sequences, made, calls[0].num_threads);
    REQUIRE(status == expected, "status %d, not %d", status, expected);
    for (int i = 0; i < made; i++) {
      if (status == KVEDGE_OK) load_tokens(&calls[i], tables[i], block_size), check_results(&calls[i]);
      else check_untouched(&calls[i]);
    }
  }
  check_unchanged();
  for (int i = 0; i < made; i++) free_call(&calls[i]), release(tables[i]);
}

/* ---- Programs ------------------------------------------------------------------------------------- */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv) {
  (void)argc, (void)argv;
  const char *why_not, *name;
  reserve_slots();
  for (int i = 0; (name = kvedge_isa_compiled(i)) != NULL; i++)
    if (kvedge_isa_available(name, &why_not) && strcmp(name, FUZZ_WITHOUT)) it.paths[it.num_paths++] = name;
  REQUIRE(kvedge_set_num_threads(2) == KVEDGE_OK && kvedge_get_num_threads() == 2, "two threads");
  REQUIRE(kvedge_select_isa("none such", &why_not) == KVEDGE_ERROR_ISA && why_not, "a path that is not there");
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  program_start(bytes, size);
  memset(&it, 0, offsetof(__typeof__(it), paths));
  guarded = next_below(2);
  choose_path();
  open_layer();
  put(0, it.config.capacity - next_byte() % it.config.capacity, next_below(2), 1, 0);
  for (int i = 0; i < MAX_CALLS && !program_ended(); i++) {
    switch (next_below(16)) {
      case 0:
      case 1: append_call(); break;
      case 2: write_call(); break;
      case 3: fill_call(); break;
      case 4: set_len_call(); break;
      case 5: offset_call(); break;
      case 6: get_call(); break;
      case 7: choose_path(); break;
      case 8: scores_call(); break;
      case 9:
      case 10: batch_call(); break;
      default: attend_call();
    }
  }
  close_layer();
  return 0;
}
