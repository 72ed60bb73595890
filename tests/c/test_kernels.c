/* Holds every kernel of every table that this CPU can run against a plain reference in double.
 *
 *   test_kernels [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Prints a line per kernel, then 'N passed, N failed'; exits with 1 if one failed.
 */
#include "check.h"
#include "system/dispatch.h"

static const int dims[] = {1,  3,  7,  8,   15,  16,  17,  31,  32,  40,  48,  63,   64,
                           65, 80, 96, 100, 112, 128, 192, 256, 333, 513, 1000, 1024};
enum { NUM_DIMS = sizeof dims / sizeof dims[0], TOKENS = 128, SHAPES = TOKENS + KVEDGE_STACK };

static const kvedge_kernels *kernels; /* under test */
static const float untouched = 12345.678f;

typedef struct {
  int dim, num_tokens, num_queries;
} shape;

/* The s-th shape of a dim: numbers of tokens, each up to half of TOKENS and then every third up to a whole tile; after
 * them each number of queries. */
static shape shape_at(int dim, int s) {
  int tokens = s < TOKENS / 2 ? s + 1 : TOKENS / 2 + 3 * (s + 1 - TOKENS / 2);
  return (shape){dim, s < TOKENS ? tokens : 1 + random_below(KVEDGE_TILE),
                 s < TOKENS ? 1 + random_below(KVEDGE_STACK) : s - TOKENS + 1};
}
_Static_assert(TOKENS / 2 + 3 * TOKENS / 2 == KVEDGE_TILE, "the last number of tokens is a whole tile");

static int end_of_blocks(shape at) { return (at.num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK; }

/* Every shape of narrow rows, some of each of the wider, which take most of the time. */
#define FOR_SHAPES(n, s)             \
  for (int n = 0; n < NUM_DIMS; n++) \
    for (int s = n % shape_step(dims[n]); s < SHAPES; s += shape_step(dims[n]))

static int shape_step(int dim) {
  int step = dim > 256 ? 17 : dim > 128 ? 7 : dim > 64 ? 5 : dim > 17 ? 3 : 1;
  return getenv("KVEDGE_TEST_SHORT") ? 2 * step + 1 : step;
}

/* Those of FOR_SHAPES are few for wide rows: each of these numbers of queries for which a path may have code of its
 * own, with whole blocks and with a last one that is not. */
#define FOR_EACH_DIM_AND_QUERIES(at)                                                       \
  for (shape at = {.num_tokens = 32}; at.num_tokens <= 39; at.num_tokens += 7)             \
    for (int n = 0; n < NUM_DIMS; n++)                                                     \
      for (at.dim = dims[n], at.num_queries = 1; at.num_queries <= 9; at.num_queries++)

static void fail_at(shape at, int query, int index, double got, double expected) {
  fail("dim=%d tokens=%d queries=%d: query %d, number %d: %.9g, not %.9g", at.dim, at.num_tokens,
       at.num_queries, query, index, got, expected);
}

/* Where prefetch asks for rows: memory that must never be read. */
static const void *random_prefetch(void) {
  static char *no_access;
  if (!no_access) no_access = mmap(NULL, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return random_below(2) ? no_access + random_below(64) : NULL;
}

static int is_clean(float x) { return x == 0.0f || isnormal(x); }

/* ---- storing rows ---- */

static void test_abs_max_bits(void) {
  begin("%s abs_max_bits", kernels->name);
  for (int n = 0; n <= 300; n++)
    for (int kind = 0; kind < 6; kind++) {
      block b = new_block((size_t)n * 4 + !n);
      float *x = b.data;
      for (int i = 0; i < n; i++) x[i] = kind == 0 ? -0.0f : random_signed(kind == 1 ? 1e-39f : 3e38f);
      if (n && kind >= 3) {
        uint32_t special[] = {0x7f800000u, 0xff800000u, 0xffc12345u}; /* inf, -inf, a NaN */
        memcpy(x + random_below(n), &special[kind - 3], 4);
      }
      uint32_t expected = 0;
      for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        if (bits > expected) expected = bits;
      }
      uint32_t got = kernels->abs_max_bits(x, (size_t)n);
      if (got != expected) fail("n=%d kind=%d: %08x, not %08x", n, kind, got, expected);
      end_case();
      free_block(&b);
    }
  end();
}

static int8_t expected_code(float x, float inverse) {
  volatile float product = x * inverse; /* rounded to float before it is rounded to an integer */
  return (int8_t)nearbyint(product);
}

enum { TIES, TIES_AFTER_ROUNDING, HUGE_NUMBERS, TINY_NUMBERS, DENORMALS, ZEROS, PLAIN, NUM_KINDS };

static float number_to_quantize(int kind) {
  switch (kind) {
    case TIES: return (float)random_below(254) - 126.5f;
    case TIES_AFTER_ROUNDING: return (float)(random_below(255) - 127) * 0.37f;
    case HUGE_NUMBERS: return random_signed(3.4e38f);
    case TINY_NUMBERS: return random_signed(1e-36f);
    case DENORMALS: return random_signed(3e-37f) * random_signed(1e-2f); /* among others */
    case ZEROS: return 0.0f;
    default: return random_signed(4.0f);
  }
}

static void test_quantize(void) {
  begin("%s quantize", kernels->name);
  for (int n = 0; n <= 150; n++)
    for (int kind = 0; kind < NUM_KINDS; kind++) {
      block b = new_block((size_t)n * 4 + !n), c = new_block((size_t)n + !n);
      float *x = b.data, largest = 0.0f;
      int8_t *codes = c.data;
      for (int i = 0; i < n; i++) {
        x[i] = number_to_quantize(kind);
        largest = fmaxf(fabsf(x[i]), largest);
      }
      float inverse = kind == TIES ? 1.0f : 127.0f / largest;
      if (kind == DENORMALS || !(inverse < FLT_MAX)) inverse = FLT_MAX;
      memset(codes, 0x55, (size_t)n);
      kernels->quantize(x, (size_t)n, inverse, codes);
      for (int i = 0; i < n; i++)
        if (codes[i] != expected_code(x[i], inverse))
          fail("n=%d kind=%d: rint(%a * %a) = %d", n, kind, x[i], inverse, codes[i]);
      end_case();
      free_block(&b), free_block(&c);
    }
  end();
}

static void test_dequantize(void) {
  begin("%s dequantize", kernels->name);
  const float scales[] = {0.0f, 1.0f, 0.0123f, 2.6e36f, 1.2e-38f, 1e-40f, 1e-45f};
  for (int n = 0; n <= 150; n++)
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
      block b = new_block((size_t)n + !n), c = new_block((size_t)n * 4 + !n);
      int8_t *codes = b.data;
      float *out = c.data;
      for (int i = 0; i < n; i++) codes[i] = (int8_t)(random_below(255) - 127);
      kernels->dequantize(codes, (size_t)n, scales[s], out);
      for (int i = 0; i < n; i++) {
        volatile float expected = (float)codes[i] * scales[s];
        if (out[i] != expected) fail("n=%d: %d * %a = %a, not %a", n, codes[i], scales[s], out[i], expected);
      }
      end_case();
      free_block(&b), free_block(&c);
    }
  end();
}

static double half_value(uint16_t half) {
  int exponent = half >> 10, mantissa = half & 0x3ff;
  return exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
}

/* Scales of both kinds lie at the end of what can be read, in rows of which some columns are asked for. */
static void transpose_case(int num_tokens, int num_columns, int columns_of_row, int half) {
  enum { OUT_STRIDE = 300 };
  const size_t size = half ? sizeof(uint16_t) : sizeof(float);
  const float factor = 0.125f;
  block b = new_block((size_t)num_tokens * columns_of_row * size);
  float out[KVEDGE_SCALE_COLUMNS * OUT_STRIDE];
  for (int i = 0; i < KVEDGE_SCALE_COLUMNS * OUT_STRIDE; i++) out[i] = untouched;
  for (int i = 0; i < num_tokens * columns_of_row; i++)
    if (half) ((uint16_t *)b.data)[i] = (uint16_t)random_below(i % 3 ? 0x7c00 : 0x400 /* subnormal */);
    else ((float *)b.data)[i] = (float)random_below(1 << 20) * 0x1p-20f;
  const int first = columns_of_row - num_columns;
  const ptrdiff_t stride = (ptrdiff_t)(columns_of_row * size);
  kernels->transpose_scales((char *)b.data + first * size, half ? KVEDGE_SCALE_FLOAT16 : KVEDGE_SCALE_FLOAT32, stride,
                            num_tokens, num_columns, factor, out, OUT_STRIDE);
  for (int c = 0; c < KVEDGE_SCALE_COLUMNS; c++)
    for (int t = 0; t < OUT_STRIDE; t++) {
      int at = t * columns_of_row + first + c;
      double expected = c >= num_columns || t >= num_tokens ? (double)untouched
                        : half ? half_value(((uint16_t *)b.data)[at]) * factor : ((float *)b.data)[at] * factor;
      if (out[c * OUT_STRIDE + t] != (float)expected)
        fail("half=%d tokens=%d columns=%d of %d: [%d][%d] is %a, not %a", half, num_tokens, num_columns,
             columns_of_row, c, t, out[c * OUT_STRIDE + t], expected);
    }
  end_case();
  free_block(&b);
}

static void test_transpose_scales(void) {
  begin("%s transpose_scales", kernels->name);
  for (int n = 1; n <= KVEDGE_TILE; n += n < 50 ? 1 : 37)
    for (int columns = 1; columns <= KVEDGE_SCALE_COLUMNS; columns++)
      for (int more = 0; more < 3; more++)
        for (int half = 0; half < 2; half++) transpose_case(n, columns, columns + more, half);
  end();
}

/* ---- queries ---- */

/* Do the 256-bit paths' kernels run, whose codes are numbers of 16 bits and floats? */
static int has_words(void) { return strcmp(kernels->name, "avx2") == 0 || strcmp(kernels->name, "avxvnni") == 0; }

/* Byte b, the high one first, of number d of a query's codes. Each path orders them for itself. */
static int digit_at(const int8_t *codes, int b, int d) {
  if (strcmp(kernels->name, "avx512vnni") == 0)
    return codes[d / 64 * 192 + b * 64 + d % 64];
  if (has_words()) return 0; /* see code_at() */
  return codes[d / 4 * 16 + b * 4 + d % 4]; /* of four channels, and four zeros */
}

/* Number d of a query's codes: of three digits, or of the first two, or one. */
static double code_at(const int8_t *codes, int num_bytes, int d) {
  int in_fours = strcmp(kernels->name, "avx512vnni") != 0 && !has_words();
  if (in_fours && digit_at(codes, 3, d) != 0) return NAN;
  if (has_words()) { /* high bytes together, and floats of the same unit */
    const int8_t *sixteen = codes + d / 16 * 16 * KVEDGE_CODE_BYTES;
    if (num_bytes == 3) return ((const float *)(sixteen + 32))[d % 16];
    return 256.0 * ((const int16_t *)sixteen)[d % 16];
  }
  return 65536.0 * digit_at(codes, 0, d) + (num_bytes > 1 ? 256.0 * digit_at(codes, 1, d) : 0.0) +
         (num_bytes > 2 ? digit_at(codes, 2, d) : 0.0);
}

/* vpdpbusd multiplies k + 128. */
static int has_unsigned_keys(void) { return strcmp(kernels->name, "avx512vnni") == 0; }

/* Is channel d, past the last one of a group, a copy of the one 32 before it? */
static int is_doubled(int dim, int d) {
  int left = dim % 64;
  return strcmp(kernels->name, "avx512vnni") == 0 && left > 0 && left <= 32 && d % 64 >= 32;
}

static void test_encode_query(void) {
  const float sizes[] = {2.0f, 1.0f, 1e-3f, 1e-20f, 1e-30f, 1e-38f, 1e-44f, 0.0f};
  begin("%s encode_query", kernels->name);
  for (int dim = 1; dim <= 1024; dim += 1 + random_below(40))
    for (size_t s = 0; s < 2 * sizeof sizes / sizeof sizes[0]; s++) {
      int n = kvedge_padded_channels(dim), extreme = s % 2;
      block b = new_block((size_t)n * 4), c = new_block((size_t)n * KVEDGE_CODE_BYTES);
      float *values = b.data, scale, largest = 0.0f;
      int8_t *codes = c.data;
      int32_t offsets[4], sums[4] = {0};
      for (int d = 0; d < n; d++) {
        values[d] = d >= dim ? 0.0f : extreme ? (d % 3 - 1) * sizes[s / 2] : random_signed(sizes[s / 2]);
        largest = fmaxf(fabsf(values[d]), largest);
      }
      kernels->encode_query(values, dim, 1.0f, largest, codes, &scale, offsets);
      /* Where a group is nothing beside the rest of its row, which reaches 1, all of it may be 0. */
      double allowed = largest < 0x1p-90f ? largest : largest * 1.8e-7;
      if (!(scale >= 0.0f && isfinite(scale))) fail("dim=%d: scale %g", dim, scale);
      for (int d = 0; d < dim; d++) {
        if (!near(scale * code_at(codes, 3, d), values[d], allowed))
          fail("dim=%d: %.9g became %.9g of %.9g", dim, values[d], scale * code_at(codes, 3, d), largest);
        for (int digit = 0; digit < 3; digit++) sums[digit] += digit_at(codes, digit, d);
      }
      for (int d = dim; d < n; d++) /* what two rows in a register read twice is there twice */
        if (code_at(codes, 3, d) != (is_doubled(dim, d) ? code_at(codes, 3, d - 32) : 0.0))
          fail("dim=%d: padding", dim);
      for (int digit = 0; digit < 3; digit++)
        if (offsets[digit] != (has_unsigned_keys() ? -128 * sums[digit] : 0)) fail("dim=%d: offsets", dim);
      end_case();
      free_block(&b), free_block(&c);
    }
  end();
}

/* ---- scores ---- */

/* The kernel must leave what lies beyond its tokens' blocks alone. */
static void fill_scores(float *scores, shape at, int accumulate) {
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < KVEDGE_TILE; t++)
      scores[i * KVEDGE_TILE + t] = t >= end_of_blocks(at) ? untouched : accumulate ? random_signed(10.0f) : NAN;
}

/* Scores over num_tokens are held against expected within allowed, both (num_queries, KVEDGE_TILE). */
static void check_scores(const float *scores, shape at, const double *expected, const double *allowed) {
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < KVEDGE_TILE; t++) {
      int n = i * KVEDGE_TILE + t;
      if (t >= at.num_tokens && t < end_of_blocks(at)) continue;
      if (t < at.num_tokens ? !near(scores[n], expected[n], allowed[n]) : scores[n] != untouched)
        fail_at(at, i, t, scores[n], t < at.num_tokens ? expected[n] : untouched);
    }
}

static double expected[KVEDGE_STACK * 1024], allowed[KVEDGE_STACK * 1024];

/* A stack of queries as the driver prepares it: padded with zeros, encoded where the path wants that. */
typedef struct {
  block values, codes, scale, offsets;
  kvedge_query query;
} query_rows;

static query_rows new_query(shape at, int extreme) {
  int pad = kvedge_padded_channels(at.dim);
  ptrdiff_t stride = pad + KVEDGE_QUERY_PAD * random_below(2), scale_stride = 1 + random_below(3);
  size_t channels = (size_t)(at.num_queries * stride), groups = (size_t)(at.num_queries * scale_stride);
  query_rows rows = {.values = new_block(4 * channels), .codes = new_block(KVEDGE_CODE_BYTES * channels),
                     .scale = new_block(4 * groups), .offsets = new_block(16 * groups)};
  float *values = rows.values.data, *scale = rows.scale.data;
  int8_t *codes = rows.codes.data;
  int32_t *offsets = rows.offsets.data;
  memset(values, 0, rows.values.size);
  for (int i = 0; i < at.num_queries; i++) {
    float size = random_below(4) ? 2.0f : 1e-3f; /* one group of a row may be small beside another */
    for (int d = 0; d < at.dim; d++)
      values[i * stride + d] = extreme ? (i % 2 ? 1.999f : -1.999f) : random_signed(size);
    if (kernels->encode_query) {
      float largest = 0.0f;
      for (int d = 0; d < at.dim; d++) largest = fmaxf(fabsf(values[i * stride + d]), largest);
      kernels->encode_query(values + i * stride, at.dim, 1.0f, largest, codes + KVEDGE_CODE_BYTES * i * stride,
                            scale + i * scale_stride, offsets + 4 * i * scale_stride);
    }
  }
  rows.query = (kvedge_query){.num_queries = at.num_queries, .dim = at.dim, .num_bytes = 2 + random_below(2),
                              .stride = stride, .values = values,
                              .codes = kernels->encode_query ? codes : NULL,
                              .scale_stride = scale_stride, .scale = scale, .offsets = offsets};
  return rows;
}

static void free_query(query_rows *rows) {
  free_block(&rows->values), free_block(&rows->codes), free_block(&rows->scale), free_block(&rows->offsets);
}

/* Does the kernel add up products of floats, which loses up to half a unit per addition? */
static int multiplies_floats(const kvedge_query *q) {
  return !q->codes || (has_words() && (q->num_bytes == 3 || q->dim > 512));
}

/* What the kernel is to multiply: the floats, or what their codes stand for. */
static double query_number(const kvedge_query *q, int i, int d) {
  if (!q->codes) return q->values[i * q->stride + d];
  const int8_t *codes = q->codes + KVEDGE_CODE_BYTES * i * q->stride;
  return q->scale[i * q->scale_stride] * code_at(codes, multiplies_floats(q) ? 3 : q->num_bytes, d);
}

static void score_case(shape at, int extreme, float largest_scale) {
  int stride = at.dim + (random_below(2) ? 0 : 1 + random_below(80)), accumulate = random_below(2);
  query_rows rows = new_query(at, extreme);
  block k_block = new_rows(at.num_tokens, (size_t)at.dim, (size_t)stride);
  block scores_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  int8_t *k = k_block.data;
  float *scores = scores_block.data, k_scale[KVEDGE_TILE];
  for (int t = 0; t < at.num_tokens; t++)
    for (int d = 0; d < at.dim; d++)
      k[t * stride + d] = (int8_t)(extreme ? (t % 2 ? 127 : -127) : random_below(255) - 127);
  for (int t = 0; t < KVEDGE_TILE; t++)
    k_scale[t] = t >= at.num_tokens ? NAN : random_below(8) ? (float)random_unit() * largest_scale : 0.0f;
  fill_scores(scores, at, accumulate);
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < at.num_tokens; t++) {
      double dot = 0.0, size = 0.0, old = accumulate ? scores[i * KVEDGE_TILE + t] : 0.0;
      for (int d = 0; d < at.dim; d++) {
        double product = query_number(&rows.query, i, d) * k[t * stride + d] * k_scale[t];
        dot += product, size += fabs(product);
      }
      /* Digits' sums are joined as floats. */
      double rounding = multiplies_floats(&rows.query) ? 3e-7 + 3e-8 * at.dim : 3e-7;
      expected[i * KVEDGE_TILE + t] = dot + old;
      allowed[i * KVEDGE_TILE + t] = rounding * size + 1.2e-7 * fabs(dot + old) + 1e-44;
    }
  kernels->scores_i8(&rows.query, k, stride, at.num_tokens, k_scale, random_prefetch(), scores, accumulate);
  check_scores(scores, at, expected, allowed);
  end_case();
  free_query(&rows), free_block(&k_block), free_block(&scores_block);
}

static void test_scores_i8(void) {
  begin("%s scores_i8", kernels->name);
  FOR_SHAPES(n, s)
    score_case(shape_at(dims[n], s), s % 4 == 1, s % 8 == 2 ? 0x1p61f : s % 8 == 3 ? 0x1p-80f : 1.0f);
  FOR_EACH_DIM_AND_QUERIES(at) score_case(at, 0, 1.0f);
  end();
}

static void score_f32_case(shape at, int huge) {
  int stride = at.dim + (random_below(2) ? 0 : 1 + random_below(20));
  query_rows rows = new_query(at, 0);
  block k_block = new_rows(at.num_tokens, (size_t)at.dim * 4, (size_t)stride * 4);
  block scores_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  float *k = k_block.data, *scores = scores_block.data;
  float k_scale = huge ? 0x1p-100f : random_below(2) ? 1.0f : 0.25f; /* a power of two */
  for (int t = 0; t < at.num_tokens; t++)
    for (int d = 0; d < at.dim; d++) k[t * stride + d] = random_signed(huge ? 3.4e38f : 3.0f);
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < at.num_tokens; t++) {
      double dot = 0.0, size = 0.0;
      for (int d = 0; d < at.dim; d++) {
        double product = (double)rows.query.values[i * rows.query.stride + d] * k[t * stride + d] * k_scale;
        dot += product, size += fabs(product);
      }
      expected[i * KVEDGE_TILE + t] = dot, allowed[i * KVEDGE_TILE + t] = 2e-6 * size;
    }
  fill_scores(scores, at, 0);
  kernels->scores_f32(&rows.query, k, 4 * stride, at.num_tokens, k_scale, random_prefetch(), scores);
  check_scores(scores, at, expected, allowed);
  end_case();
  free_query(&rows), free_block(&k_block), free_block(&scores_block);
}

static void test_scores_f32(void) {
  begin("%s scores_f32", kernels->name);
  FOR_SHAPES(n, s)
    score_f32_case(shape_at(dims[n], s), s % 4 == 0);
  end();
}

/* ---- softmax ---- */

/* Is p right for 2^((s - m) * factor)? The exponent is held to float's precision, as computed. */
static int is_power(float p, float s, float m, float factor) {
  volatile float difference = s - m, product = difference * factor;
  float x = product;
  if (!is_clean(p)) return 0;
  if (s == m) return p == 1.0f;
  if (!(x > -125.001f)) return p == 0.0f;
  if (x < -124.999f && p == 0.0f) return 1;
  return near(p, exp2(x), exp2(x) * (3e-7 + 1.2e-7 * fabs(x)));
}

typedef struct {
  float scores[KVEDGE_STACK * KVEDGE_TILE], factor[KVEDGE_STACK];
  float max[KVEDGE_STACK], sum[KVEDGE_STACK], alpha[KVEDGE_STACK];
} softmax_state;

static void fill_softmax_row(softmax_state *state, int i, int num_tokens) {
  const float sizes[] = {0.01f, 1.0f, 30.0f, 1e4f, 1e30f, 3e38f};
  const float factors[] = {FLT_MIN, 1e-30f, 1e-3f, 0.18033688f, 1.0f, 1e3f, 1e30f, 3e38f};
  float size = sizes[random_below(6)], *scores = state->scores + i * KVEDGE_TILE;
  int masked = random_below(6); /* 0: all, 1: many, else none */
  state->factor[i] = factors[random_below(8)];
  state->max[i] = random_below(3) ? random_signed(size) : -FLT_MAX;
  state->sum[i] = state->max[i] == -FLT_MAX ? 0.0f : 1.0f + 100.0f * (float)random_unit();
  for (int t = 0; t < KVEDGE_TILE; t++) {
    int hidden = masked == 0 || (masked == 1 && random_below(3));
    scores[t] = t >= num_tokens ? NAN /* left over from an earlier tile */
                : hidden ? -INFINITY : random_signed(size);
  }
  if (random_below(4) == 0) scores[random_below(num_tokens)] = state->max[i]; /* the same maximum again */
}

static void check_softmax_row(const softmax_state *before, const softmax_state *after, int i, shape at) {
  const float *p = after->scores + i * KVEDGE_TILE, *scores = before->scores + i * KVEDGE_TILE;
  const int num_tokens = at.num_tokens;
  float old = before->max[i], m = old, factor = before->factor[i];
  for (int t = 0; t < num_tokens; t++) m = fmaxf(scores[t], m);
  double total = (double)before->sum[i] * after->alpha[i];
  int may_stay = old != -FLT_MAX && ((double)m - old) * factor <= KVEDGE_HEADROOM * (1 + 1e-6);
  if (after->max[i] != m && !(after->max[i] == old && may_stay))
    fail("tokens=%d: maximum %g, neither %g nor %g", num_tokens, after->max[i], m, old);
  m = after->max[i];
  if (!is_power(after->alpha[i], before->max[i], m, factor))
    fail("tokens=%d: alpha of %.9g, %.9g, factor %g: %.9g", num_tokens, before->max[i], m, factor,
         after->alpha[i]);
  for (int t = end_of_blocks(at); t < KVEDGE_TILE; t++)
    if (!isnan(p[t])) fail("tokens=%d: number %d was written", num_tokens, t);
  for (int t = 0; t < end_of_blocks(at); t++) {
    int nothing = t >= num_tokens || scores[t] == -INFINITY;
    if (nothing ? p[t] != 0.0f : !is_power(p[t], scores[t], m, factor))
      fail("tokens=%d: score %.9g, maximum %.9g, factor %g: %.9g", num_tokens, scores[t], m, factor, p[t]);
    total += p[t];
  }
  if (!near(after->sum[i], total, 1e-6 * total) || !is_clean(after->sum[i]))
    fail("tokens=%d: sum %.9g, not %.9g", num_tokens, after->sum[i], total);
}

static void test_softmax(void) {
  begin("%s softmax", kernels->name);
  for (int s = 0; s < 12 * SHAPES; s++) {
    shape at = shape_at(1, s % SHAPES);
    size_t n = (size_t)at.num_queries;
    block scores = new_block(n * KVEDGE_TILE * 4), max = new_block(n * 4), sum = new_block(n * 4);
    block alpha = new_block(n * 4), factor = new_block(n * 4);
    softmax_state before, after;
    for (int i = 0; i < at.num_queries; i++) fill_softmax_row(&before, i, at.num_tokens);
    memcpy(scores.data, before.scores, scores.size), memcpy(factor.data, before.factor, factor.size);
    memcpy(max.data, before.max, max.size), memcpy(sum.data, before.sum, sum.size);
    kernels->softmax(scores.data, at.num_queries, at.num_tokens, factor.data, max.data, sum.data, alpha.data);
    memcpy(after.scores, scores.data, scores.size), memcpy(after.alpha, alpha.data, alpha.size);
    memcpy(after.max, max.data, max.size), memcpy(after.sum, sum.data, sum.size);
    for (int i = 0; i < at.num_queries; i++) check_softmax_row(&before, &after, i, at);
    end_case();
    free_block(&scores), free_block(&max), free_block(&sum), free_block(&alpha), free_block(&factor);
  }
  end();
}

/* ---- weighted sums ---- */

typedef struct {
  block acc_block, p_block;
  float *acc, *p, alpha[KVEDGE_STACK]; /* (num_queries, stride), (num_queries, KVEDGE_TILE) */
  int stride;
} weighing;

static weighing new_weighing(shape at, int zero, int side_by_side) {
  weighing w = {.stride = at.dim + (side_by_side || random_below(2) ? 0 : 1 + random_below(20))};
  w.acc_block = new_rows(at.num_queries, (size_t)at.dim * 4, (size_t)w.stride * 4);
  w.p_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  w.acc = w.acc_block.data, w.p = w.p_block.data;
  for (int i = 0; i < at.num_queries; i++) {
    float size = random_below(4) ? 1.0f : 0x1p-118f;
    w.alpha[i] = random_below(3) == 0 ? 1.0f : random_below(3) == 0 ? 0.0f : (float)random_unit();
    for (int d = 0; d < at.dim; d++) w.acc[i * w.stride + d] = random_signed(3.0f);
    for (int t = 0; t < KVEDGE_TILE; t++) {
      float p = (float)random_unit() * size;
      float weight = t < at.num_tokens && random_below(4) && !zero && isnormal(p) ? p : 0.0f;
      w.p[i * KVEDGE_TILE + t] = t < end_of_blocks(at) ? weight : NAN; /* left over from an earlier tile */
    }
  }
  return w;
}

/* What the kernel left is held against expected within allowed, both (num_queries, dim). */
static void check_weighing(weighing *w, shape at) {
  for (int i = 0; i < at.num_queries; i++)
    for (int d = 0; d < at.dim; d++)
      if (!near(w->acc[i * w->stride + d], expected[i * at.dim + d], allowed[i * at.dim + d]))
        fail_at(at, i, d, w->acc[i * w->stride + d], expected[i * at.dim + d]);
  end_case();
  free_block(&w->acc_block), free_block(&w->p_block);
}

static void weigh_case(shape at, int extreme, int zero, float largest_scale) {
  int stride = at.dim + (random_below(2) ? 0 : 1 + random_below(80)), num_bytes = 2 + random_below(2);
  double step = num_bytes == 3 ? 0x1p-24 : 0x1p-15; /* of a weight, relative to the largest */
  weighing w = new_weighing(at, zero, 0);
  block v_block = new_rows(at.num_tokens, (size_t)at.dim, (size_t)stride);
  int8_t *v = v_block.data;
  float v_scale[KVEDGE_TILE];
  for (int t = 0; t < KVEDGE_TILE; t++) v_scale[t] = t < end_of_blocks(at) ? 0.0f : NAN;
  for (int t = 0; t < at.num_tokens; t++) {
    v_scale[t] = extreme ? largest_scale : (float)random_unit() * largest_scale;
    for (int d = 0; d < at.dim; d++)
      v[t * stride + d] = (int8_t)(extreme ? (d % 2 ? 127 : -127) : random_below(255) - 127);
  }
  for (int i = 0; i < at.num_queries; i++) {
    const float *p = w.p + i * KVEDGE_TILE;
    double largest = 0.0, codes = 127.0 * at.num_tokens;
    for (int t = 0; t < at.num_tokens; t++) largest = fmax((double)p[t] * v_scale[t], largest);
    for (int d = 0; d < at.dim; d++) {
      double sum = 0.0, size = 0.0, kept = (double)w.acc[i * w.stride + d] * w.alpha[i];
      for (int t = 0; t < at.num_tokens; t++) {
        double product = (double)p[t] * v_scale[t] * v[t * stride + d];
        sum += product, size += fabs(product);
      }
      /* Weights that are nothing beside those of some other tile may be 0. */
      expected[i * at.dim + d] = kept + sum;
      allowed[i * at.dim + d] = (step * largest + 0x1p-100) * codes + 6e-7 * size + 2e-7 * fabs(kept);
    }
  }
  kernels->weighted_sum_i8(v, stride, at.num_tokens, at.dim, at.num_queries, num_bytes, w.p, v_scale, w.alpha,
                           random_prefetch(), w.acc, w.stride);
  check_weighing(&w, at);
  free_block(&v_block);
}

static void test_weighted_sum_i8(void) {
  const float scales[] = {1.0f, 0.01f, 0x1p61f, 1e-30f, 1e-38f, 1e-42f, 0.0f};
  begin("%s weighted_sum_i8", kernels->name);
  FOR_SHAPES(n, s)
    weigh_case(shape_at(dims[n], s), s % 4 == 1, s % 11 == 0, scales[random_below(2) ? 0 : random_below(7)]);
  FOR_EACH_DIM_AND_QUERIES(at) weigh_case(at, 0, 0, 1.0f);
  end();
}

/* Small weights beside one large one: each is below half a step of 16 bits, together they count. */
static void test_small_weights(void) {
  begin("%s small weights in 16 bits", kernels->name);
  for (int n = 1; n < 40; n++) {
    float p[KVEDGE_TILE], v_scale[KVEDGE_TILE], acc[16] = {0}, alpha = 0.0f;
    int8_t v[KVEDGE_TILE * 16];
    memset(v, 127, sizeof v), memset(v, 0, 16);
    for (int t = 0; t < KVEDGE_TILE; t++) p[t] = t ? n / 40.0f / 65536.0f : 1.0f, v_scale[t] = 1.0f;
    kernels->weighted_sum_i8(v, 16, KVEDGE_TILE, 16, 1, 2, p, v_scale, &alpha, NULL, acc, 16);
    double sum = (KVEDGE_TILE - 1) * 127.0 * p[1];
    for (int d = 0; d < 16; d++)
      if (!near(acc[d], sum, 2 * 127.0 / 32768.0)) fail("weights %g: %g, not %g", p[1], acc[d], sum);
    end_case();
  }
  end();
}

static void weigh_f32_case(shape at, int huge) {
  int stride = at.dim + (random_below(2) ? 0 : 1 + random_below(20));
  weighing w = new_weighing(at, 0, 0);
  block v_block = new_rows(at.num_tokens, (size_t)at.dim * 4, (size_t)stride * 4);
  float *v = v_block.data, v_scale = huge ? 0x1p-120f : random_below(2) ? 1.0f : 0.25f; /* a power of two */
  for (int t = 0; t < at.num_tokens; t++)
    for (int d = 0; d < at.dim; d++) v[t * stride + d] = random_signed(huge ? 3.4e38f : 3.0f);
  for (int i = 0; i < at.num_queries; i++)
    for (int d = 0; d < at.dim; d++) {
      double kept = (double)w.acc[i * w.stride + d] * w.alpha[i], sum = 0.0, size = fabs(kept);
      for (int t = 0; t < at.num_tokens; t++) {
        double product = (double)w.p[i * KVEDGE_TILE + t] * v[t * stride + d] * v_scale;
        sum += product, size += fabs(product);
      }
      expected[i * at.dim + d] = kept + sum, allowed[i * at.dim + d] = 2e-6 * size + 1e-37;
    }
  kernels->weighted_sum_f32(v, 4 * stride, at.num_tokens, at.dim, at.num_queries, w.p, v_scale, w.alpha,
                            random_prefetch(), w.acc, w.stride);
  check_weighing(&w, at);
  free_block(&v_block);
}

static void test_weighted_sum_f32(void) {
  begin("%s weighted_sum_f32", kernels->name);
  FOR_SHAPES(n, s)
    weigh_f32_case(shape_at(dims[n], s), s % 4 == 0);
  end();
}

/* ---- several heads ---- */

static const int heads_dims[] = {64, 80, 96, 112, 128, 144, 208, 240, 256};

/* A tile of rows of KVEDGE_HEADS heads, in blocks that lie in disorder; of the last one only the tokens that are
 * there. */
typedef struct {
  block rows;
  const int8_t *blocks[KVEDGE_TILE_BLOCKS], *prefetch[KVEDGE_TILE_BLOCKS];
  ptrdiff_t offset; /* of the first head in a row */
  int stride;
} rows_of_heads;

static rows_of_heads new_rows_of_heads(shape at, int extreme) {
  rows_of_heads r = {.offset = 16 * random_below(5)};
  int width = KVEDGE_HEADS * at.dim, num_blocks = (at.num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK;
  int shift = random_below(num_blocks), reads_ahead = random_below(3);
  r.stride = (int)r.offset + width + (random_below(2) ? 0 : 1 + random_below(80));
  r.rows = new_rows(at.num_tokens, (size_t)(r.offset + width), (size_t)r.stride);
  for (int b = 0; b < num_blocks; b++) {
    int at_block = b == num_blocks - 1 ? b : (b + shift) % (num_blocks - 1);
    int8_t *first = (int8_t *)r.rows.data + at_block * KVEDGE_BLOCK * r.stride;
    r.blocks[b] = first;
    r.prefetch[b] = reads_ahead == 0 ? random_prefetch() : first; /* in disorder, or in order where rows are */
    for (int t = 0; t < KVEDGE_BLOCK && b * KVEDGE_BLOCK + t < at.num_tokens; t++)
      for (int d = 0; d < width; d++)
        first[t * r.stride + r.offset + d] = (int8_t)(extreme ? ((t + d) % 2 ? 127 : -127) : random_below(255) - 127);
  }
  return r;
}

static int number_in_row(const rows_of_heads *r, shape at, int head, int t, int d) {
  return r->blocks[t / KVEDGE_BLOCK][t % KVEDGE_BLOCK * r->stride + r->offset + head * at.dim + d];
}

/* Scales of each head, as tiles have them. */
static void fill_scales(float *scales, int stride, shape at, float largest, float beyond) {
  for (int i = 0; i < KVEDGE_HEADS; i++)
    for (int t = 0; t < stride; t++)
      scales[i * stride + t] = t >= end_of_blocks(at)  ? NAN
                               : t >= at.num_tokens    ? beyond
                               : random_below(8)       ? (float)random_unit() * largest
                                                       : 0.0f;
}

enum { HEADS_SCALES = KVEDGE_TILE + 16 };

static void score_heads_case(shape at, int extreme, float largest_scale) {
  query_rows queries = new_query(at, extreme);
  rows_of_heads rows = new_rows_of_heads(at, extreme);
  block scores_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  float *scores = scores_block.data, k_scale[KVEDGE_HEADS * HEADS_SCALES];
  queries.query.num_bytes = 1 + random_below(3);
  fill_scales(k_scale, HEADS_SCALES, at, largest_scale, NAN);
  fill_scores(scores, at, 0);
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < at.num_tokens; t++) {
      double dot = 0.0, size = 0.0;
      for (int d = 0; d < at.dim; d++) {
        double product = query_number(&queries.query, i, d) * number_in_row(&rows, at, i, t, d);
        dot += product * k_scale[i * HEADS_SCALES + t], size += fabs(product * k_scale[i * HEADS_SCALES + t]);
      }
      expected[i * KVEDGE_TILE + t] = dot, allowed[i * KVEDGE_TILE + t] = 4.2e-7 * size + 1e-44;
    }
  kernels->scores_i8_heads(&queries.query, rows.blocks, rows.offset, rows.stride, at.num_tokens, k_scale, HEADS_SCALES,
                           random_below(2) ? rows.prefetch : NULL, random_below(2), scores);
  check_scores(scores, at, expected, allowed);
  end_case();
  free_query(&queries), free_block(&rows.rows), free_block(&scores_block);
}

static void weigh_heads_case(shape at, int extreme, int zero, float largest_scale) {
  int num_bytes = 1 + random_below(3);
  double step = num_bytes == 3 ? 0x1p-24 : num_bytes == 2 ? 0x1p-15 : 0x1p-7;
  weighing w = new_weighing(at, zero, 1);
  rows_of_heads rows = new_rows_of_heads(at, extreme);
  float v_scale[KVEDGE_HEADS * HEADS_SCALES];
  fill_scales(v_scale, HEADS_SCALES, at, largest_scale, 0.0f);
  for (int i = 0; i < at.num_queries; i++) {
    const float *p = w.p + i * KVEDGE_TILE, *scale = v_scale + i * HEADS_SCALES;
    double largest = 0.0;
    for (int t = 0; t < at.num_tokens; t++) largest = fmax((double)p[t] * scale[t], largest);
    for (int d = 0; d < at.dim; d++) {
      double sum = 0.0, size = 0.0, kept = (double)w.acc[i * w.stride + d] * w.alpha[i];
      for (int t = 0; t < at.num_tokens; t++) {
        double product = (double)p[t] * scale[t] * number_in_row(&rows, at, i, t, d);
        sum += product, size += fabs(product);
      }
      expected[i * at.dim + d] = kept + sum;
      allowed[i * at.dim + d] = (step * largest + 0x1p-100) * 127.0 * at.num_tokens + 6e-7 * size + 2e-7 * fabs(kept);
    }
  }
  kernels->weighted_sum_i8_heads(rows.blocks, rows.offset, rows.stride, at.num_tokens, at.dim, num_bytes, w.p, v_scale,
                                 HEADS_SCALES, w.alpha, random_below(2) ? rows.prefetch : NULL, random_below(2), w.acc);
  check_weighing(&w, at);
  free_block(&rows.rows);
}

enum { NUM_HEADS_DIMS = sizeof heads_dims / sizeof heads_dims[0] };

#define FOR_SHAPES_OF_HEADS(at, step)                                                                      \
  for (int n = 0; n < NUM_HEADS_DIMS; n++)                                                                 \
    for (shape at = {heads_dims[n], 1 + n % (step), KVEDGE_HEADS}; at.num_tokens <= KVEDGE_TILE;           \
         at.num_tokens += (step))

static void test_heads(void) {
  const int step = getenv("KVEDGE_TEST_SHORT") ? 9 : 3;
  begin("%s scores_i8_heads", kernels->name);
  FOR_SHAPES_OF_HEADS(at, step)
    score_heads_case(at, random_below(4) == 0, random_below(4) ? 1.0f : random_below(2) ? 0x1p61f : 0x1p-80f);
  end();
  begin("%s weighted_sum_i8_heads", kernels->name);
  FOR_SHAPES_OF_HEADS(at, step)
    weigh_heads_case(at, random_below(4) == 0, random_below(8) == 0,
                     random_below(4) ? 1.0f : random_below(2) ? 0x1p61f : 1e-38f);
  end();
}

static void test_read_bytes(void) {
  begin("%s read_bytes", kernels->name);
  for (size_t n = 0; n <= 16384; n += 512) {
    block b = new_block(n + 64 * !n);
    memset(b.data, 0, b.size);
    kernels->read_bytes(b.data, n);
    end_case();
    free_block(&b);
  }
  end();
}

static void test_multiply(void) {
  begin("%s multiply", kernels->name);
  for (size_t n = 0; n <= 4096; n = 2 * n + 1) {
    if (n > 0 && kernels->multiply(n) == 0) fail("%zu products add up to nothing", n);
    end_case();
  }
  end();
}

static void test_table(const kvedge_kernels *table) {
  kernels = table;
  random_state = 88172645463325252u; /* the same cases for every table */
  test_abs_max_bits();
  test_quantize();
  test_dequantize();
  test_transpose_scales();
  if (table->encode_query) test_encode_query();
  test_scores_i8();
  test_scores_f32();
  test_softmax();
  test_weighted_sum_i8();
  test_small_weights();
  test_weighted_sum_f32();
  if (table->scores_i8_heads) test_heads();
  test_read_bytes();
  test_multiply();
}

int main(int argc, char **argv) {
  const char *why_not;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (argc < 2 || strcmp(argv[1], "all") == 0) {
    for (int i = 0; kvedge_kernels_at(i); i++) {
      const char *name = kvedge_kernels_at(i)->name;
      if (kvedge_kernels_find(name, &why_not)) test_table(kvedge_kernels_at(i));
      else printf("%s skipped: %s\n", name, why_not);
    }
    return report();
  }
  for (int a = 1; a < argc; a++) {
    const kvedge_kernels *table = kvedge_kernels_find(argv[a], &why_not);
    if (!table) return fprintf(stderr, "test_kernels: %s: %s\n", argv[a], why_not), 2;
    test_table(table);
  }
  return report();
}
