/* What the C tests share: counting, random numbers, and memory in which a stray access shows.
 *
 * A block ends right before a page without access, so that one byte read or written past it is a fault;
 * with KVEDGE_TEST_HEAP=1 and under AddressSanitizer it is a heap block of exactly its size, and what
 * lies between its rows is poisoned (run.sh valgrind, run.sh asan).
 */
#ifndef KVEDGE_CHECK_H
#define KVEDGE_CHECK_H

#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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

/* ---- Counting: a group of cases, each of which counts once, however much of it is wrong ---------- */

static long passed, failed;  /* over all groups */
static long cases, failures; /* of this group */
static int case_failed;
static double worst; /* largest error of the group, as a share of what is allowed */
static char group[80];

static inline void begin(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(group, sizeof group, format, args);
  va_end(args);
  cases = failures = 0, worst = 0.0;
}

static inline void fail(const char *format, ...) {
  va_list args;
  if (!case_failed && failures < 5) {
    printf("  %s: ", group);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
  }
  case_failed = 1;
}

static inline void end_case(void) { cases++, failures += case_failed, case_failed = 0; }

static inline void end(void) {
  printf("%-34s %6ld cases", group, cases);
  if (failures) printf(", %ld FAILED\n", failures);
  else if (worst > 0.0) printf(", largest error %.0f%% of the allowed\n", 100.0 * worst);
  else printf("\n");
  passed += cases - failures, failed += failures;
}

/* A case of its own: the condition holds. */
#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) fail("line %d: not so: %s", __LINE__, #condition);                                               \
    end_case();                                                                                                        \
  } while (0)

/* Returns 0 where |got - expected| > allowed, or got is no number. */
static inline int near(double got, double expected, double allowed) {
  double error = fabs(got - expected);
  if (!(error <= allowed)) return 0;
  if (allowed > 0.0 && error / allowed > worst) worst = error / allowed;
  return 1;
}

/* For the end of main(). */
static inline int report(void) {
  printf("%ld passed, %ld failed\n", passed, failed);
  return failed != 0;
}

/* ---- Random numbers ------------------------------------------------------------------------------ */

static uint64_t random_state = 88172645463325252u;

static inline uint32_t random_bits(void) { /* xorshift64* */
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return (uint32_t)((random_state * 2685821657736338717u) >> 32);
}

static inline int random_below(int n) { return (int)(random_bits() % (uint32_t)n); }
static inline double random_unit(void) { return random_bits() / 4294967296.0; } /* 0..1 */
static inline float random_signed(float size) { return (float)((2.0 * random_unit() - 1.0) * size); }

static inline float *random_floats(size_t n, float size) {
  float *x = malloc(n * sizeof *x);
  for (size_t i = 0; i < n; i++) x[i] = random_signed(size);
  return x;
}

/* ---- Memory -------------------------------------------------------------------------------------- */

typedef struct {
  void *data;
  size_t size;
  void *base; /* as mapped or allocated */
  size_t mapped;
} block;

static inline int on_heap(void) {
#if defined(__SANITIZE_ADDRESS__)
  return 1;
#else
  static int known = -1;
  if (known < 0) known = getenv("KVEDGE_TEST_HEAP") != NULL;
  return known;
#endif
}

static inline block new_block(size_t size) {
  block b = {.size = size};
  if (on_heap()) {
    if (size % 64) b.base = malloc(size);
    else if (posix_memalign(&b.base, 64, size)) b.base = NULL;
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

static inline void free_block(block *b) {
  ALLOW(b->data, b->size);
  if (on_heap()) free(b->base);
  else munmap(b->base, b->mapped);
}

/* count rows of row_bytes, stride apart, the last one ending with the block; poison between them */
static inline block new_rows(int count, size_t row_bytes, size_t stride) {
  block b = new_block((size_t)(count - 1) * stride + row_bytes);
  memset(b.data, 0x80, b.size);
  for (int r = 0; r + 1 < count; r++) FORBID((char *)b.data + (size_t)r * stride + row_bytes, stride - row_bytes);
  return b;
}

#endif
