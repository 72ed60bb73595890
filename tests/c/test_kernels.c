/* Holds every kernel of every table that this CPU can run against a plain reference.
 *
 *   test_kernels [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Integer sums are compared with exact ones, floats with double precision. Rows lie at the very end of
 * a block, so that a byte read past them is a fault: before a page without access, or, with
 * KVEDGE_TEST_HEAP=1 and under AddressSanitizer, at the end of a heap block of exactly their size, with
 * the bytes between rows poisoned (run.sh asan, run.sh valgrind).
 * Prints a line per kernel, then 'N passed, N failed'; exits with 1 if one failed.
 */
#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dispatch.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define ALLOW(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#elif defined(__has_include)
#if __has_include(<valgrind/memcheck.h>) && !defined(__aarch64__) && !defined(__arm__)
#include <valgrind/memcheck.h>
#define FORBID(p, n) (void)VALGRIND_MAKE_MEM_NOACCESS(p, n)
#define ALLOW(p, n) (void)VALGRIND_MAKE_MEM_DEFINED(p, n)
#endif
#endif
#if !defined(FORBID)
#define FORBID(p, n) ((void)(p), (void)(n))
#define ALLOW(p, n) ((void)(p), (void)(n))
#endif

static const int dims[] = {1,  7,  8,  15, 16,  31,  32,  40,  48,  63,   64,
                           65, 80, 96, 100, 112, 128, 192, 256, 1000, 1024};
enum { NUM_DIMS = sizeof dims / sizeof dims[0], SHAPES = KVEDGE_TILE + KVEDGE_STACK };

/* ---- bookkeeping ---- */

static const kvedge_kernels *kernels; /* under test */
static long passed, failed, cases, failures;
static double worst; /* error of a kernel, as a share of what is allowed */

static void begin(void) { cases = failures = 0, worst = 0.0; }

static void end(const char *name) {
  printf("%-11s %-17s %6ld cases", kernels->name, name, cases);
  if (failures)
    printf(", %ld FAILED\n", failures);
  else if (worst > 0.0)
    printf(", largest error %.0f%% of the allowed\n", 100.0 * worst);
  else
    printf(", exact\n");
  passed += cases - failures, failed += failures;
}

static int case_failed; /* one count per case, however much of it is wrong */

static void fail(const char *format, ...) {
  va_list args;
  if (!case_failed && failures < 5) {
    printf("  %s: ", kernels->name);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
  }
  case_failed = 1;
}

static void end_case(void) { cases++, failures += case_failed, case_failed = 0; }

/* Returns 0 and notes the failure where |got - expected| > allowed. */
static int near(double got, double expected, double allowed) {
  double error = fabs(got - expected);
  if (!(error <= allowed)) return 0;
  if (allowed > 0.0 && error / allowed > worst) worst = error / allowed;
  return 1;
}

/* ---- numbers ---- */

static uint64_t random_state;

static uint32_t random_bits(void) { /* xorshift64* */
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return (uint32_t)((random_state * 2685821657736338717u) >> 32);
}

static int random_below(int n) { return (int)(random_bits() % (uint32_t)n); }
static double random_unit(void) { return random_bits() / 4294967296.0; }                    /* 0..1 */
static float random_signed(float size) { return (float)((2.0 * random_unit() - 1.0) * size); } /* -size..size */

/* ---- memory ---- */

typedef struct {
  void *data;
  size_t size;
  void *base; /* as mapped or allocated */
  size_t mapped;
} block;

static int on_heap;
static char *no_access; /* 4 MB that must never be read */

static block new_block(size_t size) {
  block b = {.size = size};
  if (on_heap) {
    if (size % 64)
      b.base = malloc(size);
    else if (posix_memalign(&b.base, 64, size))
      b.base = NULL;
    b.data = b.base;
  } else {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (size + page - 1) / page * page;
    b.mapped = body + page;
    b.base = mmap(NULL, b.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.base == MAP_FAILED || mprotect((char *)b.base + body, page, PROT_NONE)) b.base = NULL;
    b.data = (char *)b.base + body - size;
  }
  if (!b.base) perror("memory"), exit(2);
  return b;
}

static void free_block(block *b) {
  ALLOW(b->data, b->size);
  if (on_heap)
    free(b->base);
  else
    munmap(b->base, b->mapped);
}

/* count rows of row_bytes, stride apart, the last one ending with the block; poison between them */
static block new_rows(int count, size_t row_bytes, size_t stride) {
  block b = new_block((size_t)(count - 1) * stride + row_bytes);
  memset(b.data, 0x80, b.size);
  for (int r = 0; r + 1 < count; r++) FORBID((char *)b.data + (size_t)r * stride + row_bytes, stride - row_bytes);
  return b;
}

static const void *random_prefetch(void) { return random_below(2) ? no_access + random_below(64) : NULL; }

/* The s-th shape to try: each number of tokens once, each number of queries once. Of wide rows, which
 * take most of the time, every third. */
static int next_shape(int s, int dim) { return s + (dim > 128 ? 3 : 1); }

static void shape(int s, int *num_tokens, int *num_queries) {
  *num_tokens = s < KVEDGE_TILE ? s + 1 : 1 + random_below(KVEDGE_TILE);
  *num_queries = s < KVEDGE_TILE ? 1 + random_below(KVEDGE_STACK) : s - KVEDGE_TILE + 1;
}

/* ---- storing rows ---- */

static void test_abs_max_bits(void) {
  begin();
  for (int n = 0; n <= 300; n++)
    for (int kind = 0; kind < 6; kind++) {
      block b = new_block((size_t)n * 4 + !n);
      float *x = b.data;
      for (int i = 0; i < n; i++) x[i] = kind == 0 ? -0.0f : kind == 1 ? random_signed(1e-39f) : random_signed(3e38f);
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
      if (got != expected) fail("abs_max_bits n=%d kind=%d: %08x, not %08x", n, kind, got, expected);
      end_case();
      free_block(&b);
    }
  end("abs_max_bits");
}

static int8_t expected_code(float x, float inverse) {
  volatile float product = x * inverse; /* rounded to float before it is rounded to an integer */
  return (int8_t)nearbyint(product);
}

static void test_quantize(void) {
  begin();
  for (int n = 0; n <= 150; n++)
    for (int kind = 0; kind < 7; kind++) {
      block b = new_block((size_t)n * 4 + !n), c = new_block((size_t)n + !n);
      float *x = b.data, inverse = 1.0f, largest = 0.0f;
      int8_t *codes = c.data;
      for (int i = 0; i < n; i++) switch (kind) {
          case 0: x[i] = random_signed(4.0f); break;
          case 1: x[i] = (float)random_below(254) - 126.5f; break;    /* ties */
          case 2: x[i] = random_signed(3.4e38f); break;               /* huge */
          case 3: x[i] = random_signed(1e-36f); break;                /* tiny */
          case 4: x[i] = random_signed(3e-37f) * random_signed(1e-2f); break; /* denormals among them */
          case 5: x[i] = 0.0f; break;
          case 6: x[i] = (float)(random_below(255) - 127) * 0.37f; break; /* ties after rounding */
        }
      for (int i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
      if (kind != 1) inverse = 127.0f / largest;
      if (kind == 4 || !(inverse < FLT_MAX)) inverse = FLT_MAX;
      if (kind == 4)
        for (int i = 0; i < n; i++) x[i] = fmaxf(-3.7e-37f, fminf(3.7e-37f, x[i]));
      memset(codes, 0x55, (size_t)n);
      kernels->quantize(x, (size_t)n, inverse, codes);
      for (int i = 0; i < n; i++)
        if (codes[i] != expected_code(x[i], inverse))
          fail("quantize n=%d kind=%d: rint(%a * %a) = %d, not %d", n, kind, x[i], inverse, codes[i], expected_code(x[i], inverse));
      end_case();
      free_block(&b), free_block(&c);
    }
  end("quantize");
}

static void test_dequantize(void) {
  begin();
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
        if (out[i] != expected) fail("dequantize n=%d: %d * %a = %a, not %a", n, codes[i], scales[s], out[i], expected);
      }
      end_case();
      free_block(&b), free_block(&c);
    }
  end("dequantize");
}

/* ---- scores ---- */

/* The kernel must leave what lies beyond its tokens alone. */
static const float untouched = 12345.678f;

static void fill_scores(float *scores, int num_queries, int num_tokens, int accumulate) {
  for (int i = 0; i < num_queries; i++)
    for (int t = 0; t < KVEDGE_TILE; t++)
      scores[i * KVEDGE_TILE + t] = t < num_tokens ? (accumulate ? random_signed(10.0f) : NAN) : untouched;
}

/* mode: 1 extreme codes, 2 small ones, so that one unit shows, else random */
static void score_case(int dim, int num_tokens, int num_queries, int mode) {
  int gap = random_below(2) ? 0 : 1 + random_below(80), stride = dim + gap, accumulate = random_below(2);
  ptrdiff_t pad = (dim + KVEDGE_QUERY_PAD - 1) / KVEDGE_QUERY_PAD * KVEDGE_QUERY_PAD;
  ptrdiff_t query_stride = pad + KVEDGE_QUERY_PAD * random_below(2), scale_stride = 1 + random_below(3);
  size_t queries = (size_t)num_queries * (size_t)query_stride, scales = (size_t)(num_queries * scale_stride);
  block k_block = new_rows(num_tokens, (size_t)dim, (size_t)stride), k_scale_block = new_block((size_t)num_tokens * 4);
  block codes_block = new_block(2 * queries), hi_block = new_block(queries), lo_block = new_block(queries);
  block scores_block = new_block((size_t)num_queries * KVEDGE_TILE * 4);
  int8_t *k = k_block.data, *hi = hi_block.data, *lo = lo_block.data;
  int16_t *codes = codes_block.data;
  float *k_scale = k_scale_block.data, *scores = scores_block.data, before[KVEDGE_STACK * KVEDGE_TILE];
  float *scale = malloc(scales * sizeof *scale);
  int32_t *sum_hi = malloc(scales * sizeof *sum_hi), *sum_lo = malloc(scales * sizeof *sum_lo);

  const int limit = KVEDGE_QUERY_MAX;
  for (int t = 0; t < num_tokens; t++) {
    k_scale[t] = random_below(8) ? (float)random_unit() : 0.0f;
    for (int d = 0; d < dim; d++)
      k[t * stride + d] = (int8_t)(mode == 1 ? (t % 2 ? 127 : -127) : mode == 2 ? random_below(3) - 1 : random_below(255) - 127);
  }
  memset(codes, 0, 2 * queries), memset(hi, 0, queries), memset(lo, 0, queries);
  for (int i = 0; i < num_queries; i++) {
    int32_t total_hi = 0, total_lo = 0;
    for (int d = 0; d < dim; d++) {
      int code = mode == 1 ? (i % 2 ? limit : -limit) : mode == 2 ? random_below(5) - 2 : random_below(2 * limit + 1) - limit;
      codes[i * query_stride + d] = (int16_t)code;
      hi[i * query_stride + d] = (int8_t)((code + 128) >> 8);
      lo[i * query_stride + d] = (int8_t)(code - 256 * ((code + 128) >> 8));
      total_hi += (code + 128) >> 8, total_lo += code - 256 * ((code + 128) >> 8);
    }
    scale[i * scale_stride] = (float)random_unit() * 1e-3f;
    sum_hi[i * scale_stride] = total_hi, sum_lo[i * scale_stride] = total_lo;
  }
  kvedge_query_i8 q = {.num_queries = num_queries, .dim = dim, .stride = query_stride, .codes = codes, .hi = hi,
                       .lo = lo, .scale_stride = scale_stride, .scale = scale, .sum_hi = sum_hi, .sum_lo = sum_lo};
  fill_scores(scores, num_queries, num_tokens, accumulate);
  memcpy(before, scores, scores_block.size);
  kernels->scores_i8(&q, k, stride, num_tokens, k_scale, random_prefetch(), scores, accumulate);

  for (int i = 0; i < num_queries; i++)
    for (int t = 0; t < KVEDGE_TILE; t++) {
      float got = scores[i * KVEDGE_TILE + t], old = before[i * KVEDGE_TILE + t];
      if (t >= num_tokens) {
        if (got != untouched) fail("scores_i8 dim=%d tokens=%d queries=%d: wrote score %d of query %d", dim, num_tokens, num_queries, t, i);
        continue;
      }
      int64_t dot = 0, size = 0; /* parts of the sum may be joined as floats: they round by their size */
      for (int d = 0; d < dim; d++) {
        int product = codes[i * query_stride + d] * k[t * stride + d];
        dot += product, size += abs(product);
      }
      double factor = (double)scale[i * scale_stride] * k_scale[t];
      double added = factor * (double)dot, expected = added + (accumulate ? old : 0.0);
      double allowed = 2e-7 * fabs(added) + (size >= 1 << 24 ? 6e-8 * factor * (double)size : 0.0);
      if (!near(got, expected, allowed + (accumulate ? 1e-7 * fabs(expected) : 0.0)))
        fail("scores_i8 dim=%d stride=%d tokens=%d queries=%d mode=%d accumulate=%d: query %d token %d: %.9g, not %.9g",
             dim, stride, num_tokens, num_queries, mode, accumulate, i, t, got, expected);
    }
  end_case();
  free_block(&k_block), free_block(&k_scale_block), free_block(&codes_block), free_block(&hi_block);
  free_block(&lo_block), free_block(&scores_block), free(scale), free(sum_hi), free(sum_lo);
}

static void test_scores_i8(void) {
  begin();
  for (int n = 0; n < NUM_DIMS; n++)
    for (int s = 0; s < SHAPES; s = next_shape(s, dims[n])) {
      int num_tokens, num_queries;
      shape(s, &num_tokens, &num_queries);
      score_case(dims[n], num_tokens, num_queries, s % 4);
    }
  end("scores_i8");
}

static void test_scores_f32(void) {
  begin();
  for (int n = 0; n < NUM_DIMS; n++)
    for (int s = 0; s < SHAPES; s = next_shape(s, dims[n])) {
      int dim = dims[n], num_tokens, num_queries, huge = random_below(4) == 0;
      shape(s, &num_tokens, &num_queries);
      int stride = dim + (random_below(2) ? 0 : 1 + random_below(20)), query_stride = dim + random_below(20);
      block k_block = new_rows(num_tokens, (size_t)dim * 4, (size_t)stride * 4);
      block q_block = new_rows(num_queries, (size_t)dim * 4, (size_t)query_stride * 4);
      block scores_block = new_block((size_t)num_queries * KVEDGE_TILE * 4);
      float *k = k_block.data, *values = q_block.data, *scores = scores_block.data;
      float k_scale = huge ? 0x1p-100f : random_below(2) ? 1.0f : 0.25f; /* a row times k_scale cannot overflow */
      for (int t = 0; t < num_tokens; t++)
        for (int d = 0; d < dim; d++) k[t * stride + d] = random_signed(huge ? 3.4e38f : 3.0f);
      for (int i = 0; i < num_queries; i++)
        for (int d = 0; d < dim; d++) values[i * query_stride + d] = random_signed(2.0f);
      kvedge_query_f32 q = {.num_queries = num_queries, .dim = dim, .stride = query_stride, .values = values};
      fill_scores(scores, num_queries, num_tokens, 0);
      kernels->scores_f32(&q, k, 4 * stride, num_tokens, k_scale, random_prefetch(), scores);
      for (int i = 0; i < num_queries; i++)
        for (int t = 0; t < KVEDGE_TILE; t++) {
          float got = scores[i * KVEDGE_TILE + t];
          double expected = 0.0, size = 0.0;
          if (t >= num_tokens) {
            if (got != untouched) fail("scores_f32 dim=%d tokens=%d queries=%d: wrote score %d of query %d", dim, num_tokens, num_queries, t, i);
            continue;
          }
          for (int d = 0; d < dim; d++) {
            double product = (double)values[i * query_stride + d] * k[t * stride + d] * k_scale;
            expected += product, size += fabs(product);
          }
          if (!near(got, expected, 2e-6 * size))
            fail("scores_f32 dim=%d tokens=%d queries=%d: query %d token %d: %.9g, not %.9g", dim, num_tokens, num_queries, i, t, got, expected);
        }
      end_case();
      free_block(&k_block), free_block(&q_block), free_block(&scores_block);
    }
  end("scores_f32");
}

/* ---- softmax and weights ---- */

static int is_clean(float x) { return x == 0.0f || isnormal(x); }

/* Is p right for 2^((s - m) * factor)? The exponent is held to float's precision, as computed. */
static int is_power(float p, float s, float m, float factor) {
  volatile float difference = s - m, product = difference * factor;
  float x = product;
  if (!is_clean(p)) return 0;
  if (s == m) return p == 1.0f;
  if (!(x > -125.001f)) return p == 0.0f;
  if (x < -124.999f && p == 0.0f) return 1;
  double expected = exp2(x);
  return near(p, expected, expected * (3e-7 + 1.2e-7 * fabs(x)));
}

static void test_softmax(void) {
  begin();
  const float sizes[] = {0.01f, 1.0f, 30.0f, 1e4f, 1e30f, 3e38f};
  const float factors[] = {1e-30f, 1e-3f, 0.18033688f, 1.0f, 1e3f, 1e30f, 3e38f};
  for (int s = 0; s < 12 * SHAPES; s++) {
    int num_tokens, num_queries;
    shape(s % SHAPES, &num_tokens, &num_queries);
    block scores_block = new_block((size_t)num_queries * KVEDGE_TILE * 4), line[4];
    for (int j = 0; j < 4; j++) line[j] = new_block((size_t)num_queries * 4);
    float *scores = scores_block.data, *factor = line[0].data, *max = line[1].data, *sum = line[2].data, *alpha = line[3].data;
    float before[KVEDGE_STACK * KVEDGE_TILE], max_before[KVEDGE_STACK], sum_before[KVEDGE_STACK];
    for (int i = 0; i < num_queries; i++) {
      float size = sizes[random_below(6)];
      int masked = random_below(6); /* 0: all, 1: many, else none */
      factor[i] = factors[random_below(7)];
      max[i] = random_below(3) ? random_signed(2 * size) : -FLT_MAX;
      if (!isfinite(max[i])) max[i] = FLT_MAX;
      sum[i] = max[i] == -FLT_MAX ? 0.0f : 1.0f + 100.0f * (float)random_unit();
      for (int t = 0; t < KVEDGE_TILE; t++)
        scores[i * KVEDGE_TILE + t] = t >= num_tokens ? NAN /* left over from an earlier tile */
                                      : masked == 0 || (masked == 1 && random_below(3)) ? -INFINITY : random_signed(size);
      if (random_below(4) == 0) scores[i * KVEDGE_TILE + random_below(num_tokens)] = max[i]; /* the same maximum again */
    }
    memcpy(before, scores, scores_block.size);
    memcpy(max_before, max, line[1].size), memcpy(sum_before, sum, line[2].size);
    kernels->softmax(scores, num_queries, num_tokens, factor, max, sum, alpha);
    for (int i = 0; i < num_queries; i++) {
      const float *p = scores + i * KVEDGE_TILE, *row = before + i * KVEDGE_TILE;
      float m = max_before[i];
      for (int t = 0; t < num_tokens; t++) m = row[t] > m ? row[t] : m;
      double total = (double)sum_before[i] * alpha[i];
      if (max[i] != m) fail("softmax tokens=%d: maximum %g, not %g", num_tokens, max[i], m);
      if (!is_power(alpha[i], max_before[i], m, factor[i]))
        fail("softmax tokens=%d: alpha of %.9g, %.9g, factor %g: %.9g", num_tokens, max_before[i], m, factor[i], alpha[i]);
      for (int t = 0; t < KVEDGE_TILE; t++) {
        if (t >= num_tokens ? p[t] != 0.0f : row[t] == -INFINITY ? p[t] != 0.0f : !is_power(p[t], row[t], m, factor[i]))
          fail("softmax tokens=%d: token %d: score %.9g, maximum %.9g, factor %g: %.9g", num_tokens, t, row[t], m, factor[i], p[t]);
        total += p[t];
      }
      if (!near(sum[i], total, 1e-6 * total) || !is_clean(sum[i])) fail("softmax tokens=%d: sum %.9g, not %.9g", num_tokens, sum[i], total);
    }
    end_case();
    free_block(&scores_block);
    for (int j = 0; j < 4; j++) free_block(&line[j]);
  }
  end("softmax");
}

static void test_weights_i16(void) {
  begin();
  for (int s = 0; s < 8 * SHAPES; s++) {
    int num_tokens, num_queries;
    shape(s % SHAPES, &num_tokens, &num_queries);
    block p_block = new_block((size_t)num_queries * KVEDGE_TILE * 4), v_block = new_block(KVEDGE_TILE * 4);
    block w_block = new_block((size_t)num_queries * KVEDGE_TILE * 2), scale_block = new_block((size_t)num_queries * 4);
    float *p = p_block.data, *v_scale = v_block.data, *w_scale = scale_block.data;
    int16_t *weights = w_block.data;
    int all_zero_scales = random_below(10) == 0;
    for (int t = 0; t < KVEDGE_TILE; t++) v_scale[t] = t < num_tokens && !all_zero_scales ? 2.0f * (float)random_unit() : 0.0f;
    for (int i = 0; i < num_queries; i++) {
      int kind = random_below(5); /* 0: all zero, 1: many small, 2: very small, else 0..1 */
      for (int t = 0; t < KVEDGE_TILE; t++)
        p[i * KVEDGE_TILE + t] = t >= num_tokens || kind == 0 ? 0.0f
                                 : (float)random_unit() * (kind == 1 && random_below(4) ? 1e-6f : kind == 2 ? 0x1p-118f : 1.0f);
    }
    memset(weights, 0x55, w_block.size);
    kernels->weights_i16(p, num_queries, num_tokens, v_scale, weights, w_scale);
    for (int i = 0; i < num_queries; i++) {
      float largest = 0.0f;
      int16_t largest_code = 0;
      for (int t = 0; t < num_tokens; t++) largest = fmaxf(largest, p[i * KVEDGE_TILE + t] * v_scale[t]);
      /* Too small to matter beside the sum, which holds a 1: all of them may be 0. */
      int nothing = largest < 0x1p-99f && w_scale[i] == 0.0f;
      if (!nothing && !near(w_scale[i], largest / KVEDGE_WEIGHT_MAX, 3e-7 * largest / KVEDGE_WEIGHT_MAX))
        fail("weights_i16 tokens=%d: scale %.9g, not %.9g", num_tokens, w_scale[i], largest / KVEDGE_WEIGHT_MAX);
      if (!is_clean(w_scale[i])) fail("weights_i16: scale %g", w_scale[i]);
      for (int t = 0; t < KVEDGE_TILE; t++) {
        int16_t code = weights[i * KVEDGE_TILE + t];
        double expected = t < num_tokens && !nothing ? (double)p[i * KVEDGE_TILE + t] * v_scale[t] / largest * KVEDGE_WEIGHT_MAX : 0.0;
        if (nothing || t >= num_tokens || largest == 0.0f ? code != 0 : !near(code, expected, 0.51))
          fail("weights_i16 tokens=%d: token %d: %d, not %.3f", num_tokens, t, code, expected);
        if (code > largest_code) largest_code = code;
      }
      if (!nothing && largest > 0.0f && largest_code != KVEDGE_WEIGHT_MAX) fail("weights_i16: the largest code is %d", largest_code);
    }
    end_case();
    free_block(&p_block), free_block(&v_block), free_block(&w_block), free_block(&scale_block);
  }
  end("weights_i16");
}

/* ---- weighted sums ---- */

typedef struct {
  block acc_block, alpha_block, before_block;
  float *acc, *alpha, *before;
  int stride;
} accumulator;

static accumulator new_accumulator(int num_queries, int dim) {
  accumulator a = {.stride = dim + (random_below(2) ? 0 : 1 + random_below(20))};
  a.acc_block = new_rows(num_queries, (size_t)dim * 4, (size_t)a.stride * 4);
  a.before_block = new_rows(num_queries, (size_t)dim * 4, (size_t)a.stride * 4);
  a.alpha_block = new_block((size_t)num_queries * 4);
  a.acc = a.acc_block.data, a.before = a.before_block.data, a.alpha = a.alpha_block.data;
  ALLOW(a.acc, a.acc_block.size), ALLOW(a.before, a.before_block.size);
  for (int i = 0; i < num_queries; i++) {
    a.alpha[i] = random_below(3) == 0 ? 1.0f : random_below(3) == 0 ? 0.0f : (float)random_unit();
    for (int d = 0; d < a.stride && i * a.stride + d < (num_queries - 1) * a.stride + dim; d++)
      a.acc[i * a.stride + d] = d < dim ? random_signed(3.0f) : untouched;
  }
  memcpy(a.before, a.acc, a.acc_block.size);
  return a;
}

/* expected and size: (num_queries, dim): what the kernel adds, and the size of the summands */
static void check_accumulator(accumulator *a, const char *name, int num_tokens, int num_queries, int dim,
                              const double *added, const double *size, double allowed) {
  for (int i = 0; i < num_queries; i++)
    for (int d = 0; d < a->stride && i * a->stride + d < (num_queries - 1) * a->stride + dim; d++) {
      float got = a->acc[i * a->stride + d];
      if (d >= dim) {
        if (got != untouched) fail("%s dim=%d tokens=%d queries=%d: wrote channel %d of query %d", name, dim, num_tokens, num_queries, d, i);
        continue;
      }
      double kept = (double)a->before[i * a->stride + d] * a->alpha[i], expected = kept + added[i * dim + d];
      if (!near(got, expected, 2e-7 * fabs(kept) + allowed * size[i * dim + d]))
        fail("%s dim=%d tokens=%d queries=%d: query %d channel %d: %.9g, not %.9g", name, dim, num_tokens, num_queries, i, d, got, expected);
    }
  free_block(&a->acc_block), free_block(&a->alpha_block), free_block(&a->before_block);
}

static double added[KVEDGE_STACK * 1024], size_of_terms[KVEDGE_STACK * 1024];

static void test_weighted_sum_i8(void) {
  begin();
  for (int n = 0; n < NUM_DIMS; n++)
    for (int s = 0; s < SHAPES; s = next_shape(s, dims[n])) {
      int dim = dims[n], num_tokens, num_queries, mode = s % 4; /* 1: extreme, 2: small codes */
      shape(s, &num_tokens, &num_queries);
      int stride = dim + (random_below(2) ? 0 : 1 + random_below(80));
      accumulator a = new_accumulator(num_queries, dim);
      block v_block = new_rows(num_tokens, (size_t)dim, (size_t)stride), scale_block = new_block((size_t)num_queries * 4);
      block w_block = new_block((size_t)num_queries * KVEDGE_TILE * 2);
      int8_t *v = v_block.data;
      int16_t *weights = w_block.data;
      float *w_scale = scale_block.data;
      for (int t = 0; t < num_tokens; t++)
        for (int d = 0; d < dim; d++)
          v[t * stride + d] = (int8_t)(mode == 1 ? (d % 2 ? 127 : -127) : mode == 2 ? random_below(3) - 1 : random_below(255) - 127);
      for (int i = 0; i < num_queries; i++) {
        w_scale[i] = random_below(8) ? (float)random_unit() / KVEDGE_WEIGHT_MAX : 0.0f;
        for (int t = 0; t < KVEDGE_TILE; t++)
          weights[i * KVEDGE_TILE + t] = (int16_t)(t >= num_tokens ? 0 : mode == 1 ? KVEDGE_WEIGHT_MAX : mode == 2 ? random_below(4) : random_below(KVEDGE_WEIGHT_MAX + 1));
        for (int d = 0; d < dim; d++) {
          int64_t sum = 0;
          for (int t = 0; t < num_tokens; t++) sum += weights[i * KVEDGE_TILE + t] * v[t * stride + d];
          added[i * dim + d] = (double)w_scale[i] * (double)sum;
          size_of_terms[i * dim + d] = fabs(added[i * dim + d]);
        }
      }
      kernels->weighted_sum_i8(v, stride, num_tokens, dim, num_queries, weights, w_scale, a.alpha, random_prefetch(), a.acc, a.stride);
      check_accumulator(&a, "weighted_sum_i8", num_tokens, num_queries, dim, added, size_of_terms, 3e-7);
      end_case();
      free_block(&v_block), free_block(&scale_block), free_block(&w_block);
    }
  end("weighted_sum_i8");
}

static void test_weighted_sum_f32(void) {
  begin();
  for (int n = 0; n < NUM_DIMS; n++)
    for (int s = 0; s < SHAPES; s = next_shape(s, dims[n])) {
      int dim = dims[n], num_tokens, num_queries, huge = random_below(4) == 0;
      shape(s, &num_tokens, &num_queries);
      int stride = dim + (random_below(2) ? 0 : 1 + random_below(20));
      accumulator a = new_accumulator(num_queries, dim);
      block v_block = new_rows(num_tokens, (size_t)dim * 4, (size_t)stride * 4), p_block = new_block((size_t)num_queries * KVEDGE_TILE * 4);
      float *v = v_block.data, *p = p_block.data, v_scale = huge ? 0x1p-120f : random_below(2) ? 1.0f : 0.25f;
      for (int t = 0; t < num_tokens; t++)
        for (int d = 0; d < dim; d++) v[t * stride + d] = random_signed(huge ? 3.4e38f : 3.0f);
      for (int i = 0; i < num_queries; i++) {
        for (int t = 0; t < KVEDGE_TILE; t++)
          p[i * KVEDGE_TILE + t] = t < num_tokens && random_below(4) ? (float)random_unit() : 0.0f;
        for (int d = 0; d < dim; d++) {
          double sum = 0.0, size = 0.0;
          for (int t = 0; t < num_tokens; t++) {
            double product = (double)p[i * KVEDGE_TILE + t] * v[t * stride + d] * v_scale;
            sum += product, size += fabs(product);
          }
          added[i * dim + d] = sum, size_of_terms[i * dim + d] = size + fabs((double)a.acc[i * a.stride + d]);
        }
      }
      kernels->weighted_sum_f32(v, 4 * stride, num_tokens, dim, num_queries, p, v_scale, a.alpha, random_prefetch(), a.acc, a.stride);
      check_accumulator(&a, "weighted_sum_f32", num_tokens, num_queries, dim, added, size_of_terms, 2e-6);
      end_case();
      free_block(&v_block), free_block(&p_block);
    }
  end("weighted_sum_f32");
}

static void test_read_bytes(void) {
  begin();
  for (size_t n = 0; n <= 16384; n += 512) {
    block b = new_block(n + 64 * !n);
    memset(b.data, 0, b.size);
    kernels->read_bytes(b.data, n);
    end_case();
    free_block(&b);
  }
  end("read_bytes");
}

static void test_table(const kvedge_kernels *table) {
  kernels = table;
  random_state = 88172645463325252u; /* the same cases for every table */
  test_abs_max_bits();
  test_quantize();
  test_dequantize();
  test_scores_i8();
  test_scores_f32();
  test_softmax();
  test_weights_i16();
  test_weighted_sum_i8();
  test_weighted_sum_f32();
  test_read_bytes();
}

int main(int argc, char **argv) {
#if defined(__SANITIZE_ADDRESS__)
  on_heap = 1;
#else
  on_heap = getenv("KVEDGE_TEST_HEAP") != NULL;
#endif
  setvbuf(stdout, NULL, _IOLBF, 0);
  no_access = mmap(NULL, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const char *why_not;
  if (argc < 2 || strcmp(argv[1], "all") == 0) {
    for (int i = 0; kvedge_kernels_at(i); i++) {
      const kvedge_kernels *table = kvedge_kernels_at(i);
      if (kvedge_kernels_find(table->name, &why_not))
        test_table(table);
      else
        printf("%-11s skipped: %s\n", table->name, why_not);
    }
  } else {
    for (int a = 1; a < argc; a++) {
      const kvedge_kernels *table = kvedge_kernels_find(argv[a], &why_not);
      if (!table) {
        fprintf(stderr, "test_kernels: %s: %s\n", argv[a], why_not);
        return 2;
      }
      test_table(table);
    }
  }
  printf("%ld passed, %ld failed\n", passed, failed);
  return failed != 0;
}
