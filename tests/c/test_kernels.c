/* Holds the kernels of every table that store rows, the softmax and what else is no cell against plain references in
 * double. Cells: test_cells.c; single logits: test_logits.c.
 *
 *   test_kernels [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Prints a line per kernel, then 'N passed, N failed'; exits with 1 if one failed.
 */
#include "tables.h"

static const float untouched = 12345.678f;

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
      uint32_t got = kernels->rows->abs_max_bits(x, (size_t)n);
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
      kernels->rows->quantize(x, (size_t)n, inverse, codes);
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
      kernels->rows->dequantize(codes, (size_t)n, scales[s], out);
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
  kernels->rows->transpose_scales((char *)b.data + first * size, half ? KVEDGE_SCALE_FLOAT16 : KVEDGE_SCALE_FLOAT32,
                                  stride, num_tokens, num_columns, factor, out, OUT_STRIDE);
  for (int c = 0; c < KVEDGE_SCALE_COLUMNS; c++)
    for (int t = 0; t < OUT_STRIDE; t++) {
      int at = t * columns_of_row + first + c;
      double expected = c >= num_columns || t >= num_tokens ? (double)untouched
                        : half                              ? half_value(((uint16_t *)b.data)[at]) * factor
                                                            : ((float *)b.data)[at] * factor;
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

/* ---- softmax ---- */

static int is_clean(float x) { return x == 0.0f || isnormal(x); }

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
  float scores[KVEDGE_QUERY_ROWS * KVEDGE_TILE], factor[KVEDGE_QUERY_ROWS];
  float max[KVEDGE_QUERY_ROWS], sum[KVEDGE_QUERY_ROWS], rescale[KVEDGE_QUERY_ROWS];
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
                : hidden        ? -INFINITY
                                : random_signed(size);
  }
  if (random_below(4) == 0) scores[random_below(num_tokens)] = state->max[i]; /* the same maximum again */
}

static void check_softmax_row(const softmax_state *before, const softmax_state *after, int i, int num_tokens) {
  const float *p = after->scores + i * KVEDGE_TILE, *scores = before->scores + i * KVEDGE_TILE;
  float old = before->max[i], m = old, factor = before->factor[i];
  for (int t = 0; t < num_tokens; t++) m = fmaxf(scores[t], m);
  double total = (double)before->sum[i] * after->rescale[i];
  int may_stay = old != -FLT_MAX && ((double)m - old) * factor <= KVEDGE_HEADROOM * (1 + 1e-6);
  if (after->max[i] != m && !(after->max[i] == old && may_stay))
    fail("tokens=%d: maximum %g, neither %g nor %g", num_tokens, after->max[i], m, old);
  m = after->max[i];
  if (!is_power(after->rescale[i], before->max[i], m, factor))
    fail("tokens=%d: rescale of %.9g, %.9g, factor %g: %.9g", num_tokens, before->max[i], m, factor, after->rescale[i]);
  for (int t = end_of_blocks(num_tokens); t < KVEDGE_TILE; t++)
    if (!isnan(p[t])) fail("tokens=%d: number %d was written", num_tokens, t);
  for (int t = 0; t < end_of_blocks(num_tokens); t++) {
    int nothing = t >= num_tokens || scores[t] == -INFINITY;
    if (nothing ? p[t] != 0.0f : !is_power(p[t], scores[t], m, factor))
      fail("tokens=%d: score %.9g, maximum %.9g, factor %g: %.9g", num_tokens, scores[t], m, factor, p[t]);
    total += p[t];
  }
  if (!near(after->sum[i], total, 1e-6 * total) || !is_clean(after->sum[i]))
    fail("tokens=%d: sum %.9g, not %.9g", num_tokens, after->sum[i], total);
}

static void softmax_case(int num_queries, int num_tokens) {
  size_t n = (size_t)num_queries;
  block scores = new_block(n * KVEDGE_TILE * 4), max = new_block(n * 4), sum = new_block(n * 4);
  block rescale = new_block(n * 4), factor = new_block(n * 4);
  softmax_state before, after;
  for (int i = 0; i < num_queries; i++) fill_softmax_row(&before, i, num_tokens);
  memcpy(scores.data, before.scores, scores.size), memcpy(factor.data, before.factor, factor.size);
  memcpy(max.data, before.max, max.size), memcpy(sum.data, before.sum, sum.size);
  kernels->rows->softmax(scores.data, num_queries, num_tokens, factor.data, max.data, sum.data, rescale.data);
  memcpy(after.scores, scores.data, scores.size), memcpy(after.rescale, rescale.data, rescale.size);
  memcpy(after.max, max.data, max.size), memcpy(after.sum, sum.data, sum.size);
  for (int i = 0; i < num_queries; i++) check_softmax_row(&before, &after, i, num_tokens);
  end_case();
  free_block(&scores), free_block(&max), free_block(&sum), free_block(&rescale), free_block(&factor);
}

static void test_softmax(void) {
  begin("%s softmax", kernels->name);
  for (int repeat = 0; repeat < (is_short() ? 1 : 7); repeat++)
    for (int num_tokens = 1; num_tokens <= KVEDGE_TILE; num_tokens++)
      softmax_case(1 + random_below(KVEDGE_QUERY_ROWS), num_tokens);
  for (int num_queries = 1; num_queries <= KVEDGE_QUERY_ROWS; num_queries++)
    softmax_case(num_queries, 1 + random_below(KVEDGE_TILE));
  end();
}

/* ---- rows of results ---- */

static void test_merge_row(void) {
  begin("%s merge_row", kernels->name);
  for (int n = 1; n <= 1024; n += n < 150 ? 1 : 437) {
    block to_block = new_block((size_t)n * 4), from_block = new_block((size_t)n * 4);
    float *to = to_block.data, *from = from_block.data, before[1024];
    float keep = (float)random_unit(), add = random_below(4) ? (float)random_unit() : 0.0f;
    for (int d = 0; d < n; d++) before[d] = to[d] = random_signed(3.0f), from[d] = random_signed(1e10f);
    kernels->rows->merge_row(to, keep, from, add, n);
    for (int d = 0; d < n; d++) {
      double kept = (double)before[d] * keep, added = (double)from[d] * add;
      if (!near(to[d], kept + added, 1.3e-7 * (fabs(kept) + fabs(added)))) fail("n=%d: number %d: %.9g", n, d, to[d]);
    }
    end_case();
    free_block(&to_block), free_block(&from_block);
  }
  end();
}

static float bounded(float x) { return fabsf(x) > FLT_MAX ? copysignf(FLT_MAX, x) : fabsf(x) < FLT_MIN ? 0.0f : x; }

static void test_scale_row(void) {
  const float sizes[] = {3.0f, 1e-20f, 1e-38f, 3e38f}, powers[] = {1.0f, 0x1p100f, 0x1p-100f, 0.25f};
  begin("%s scale_row", kernels->name);
  for (int n = 1; n <= 1024; n += n < 150 ? 1 : 437) {
    block row_block = new_block((size_t)n * 4), out_block = new_block((size_t)n * 4);
    float *row = row_block.data, *out = out_block.data;
    float size = sizes[random_below(4)], factor = random_signed(1.0f), power = powers[random_below(4)];
    for (int d = 0; d < n; d++) row[d] = random_signed(size);
    kernels->rows->scale_row(row, n, factor, power, out);
    for (int d = 0; d < n; d++) {
      volatile float product = row[d] * factor, expected = product * power; /* each rounded to a float */
      if (out[d] != bounded(expected)) fail("n=%d: %a * %a * %a: %a", n, row[d], factor, power, out[d]);
    }
    end_case();
    free_block(&row_block), free_block(&out_block);
  }
  end();
}

/* ---- yardsticks ---- */

static void test_read_bytes(void) {
  begin("%s read_bytes", kernels->name);
  for (size_t n = 0; n <= 16384; n += 512) {
    block b = new_block(n + 64 * !n);
    memset(b.data, 0, b.size);
    kernels->rows->read_bytes(b.data, n);
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

static void test_table(void) {
  test_abs_max_bits();
  test_quantize();
  test_dequantize();
  test_transpose_scales();
  test_softmax();
  test_merge_row();
  test_scale_row();
  test_read_bytes();
  test_multiply();
}

int main(int argc, char **argv) { return test_tables(argc, argv, test_table); }
