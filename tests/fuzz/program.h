/* The fuzzer's bytes as a program: small numbers, sizes, rows of floats. All functions return 0 once the bytes are used
 * up, so every input is a program and a shorter one does less. */
#ifndef KVEDGE_FUZZ_PROGRAM_H
#define KVEDGE_FUZZ_PROGRAM_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define FUZZ_MSAN 1
#endif
#endif

static const uint8_t *program_at;
static size_t program_left;
static uint64_t program_seed; /* of the floats; follows the bytes read */

static inline void program_start(const uint8_t *bytes, size_t size) {
  program_at = bytes;
  program_left = size;
  program_seed = 88172645463325252u;
}

static inline int program_ended(void) { return program_left == 0; }

static inline unsigned next_byte(void) {
  if (program_left == 0) return 0;
  program_left--;
  return *program_at++;
}

static inline int next_below(int n) { return (int)(next_byte() % (unsigned)n); } /* n <= 256 */
static inline int one_in(int n) { return next_byte() % (unsigned)n == (unsigned)n - 1; }

/* 0..65535, evenly enough */
static inline int next_word(void) {
  unsigned high = next_byte();
  return (int)(high << 8 | next_byte());
}

#define ONE_OF(type, ...)                                                                                              \
  ((const type[]){__VA_ARGS__}[next_byte() % (sizeof((const type[]){__VA_ARGS__}) / sizeof(type))])

/* Numbers of tokens that a caller might hand over by mistake, or as "everything". */
static inline int64_t extreme_int(void) {
  return ONE_OF(int64_t, INT64_MAX, INT64_MAX - 1, INT64_MAX / 2, (int64_t)1 << 62, ((int64_t)1 << 62) - 3,
                (int64_t)1 << 40, (int64_t)1 << 31, INT32_MAX, INT64_MIN, INT64_MIN + 1, -1, -65, 4097);
}

/* ---- Failing ------------------------------------------------------------------------------------- */

#define REQUIRE(condition, ...)                                                                                        \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #condition);                                          \
      fprintf(stderr, __VA_ARGS__);                                                                                    \
      fprintf(stderr, "\n");                                                                                           \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

/* ---- Memory: each array exactly as large as it must be --------------------------------------------- */

/* An array is a heap block of its size, which sanitized code cannot leave unnoticed; or, where the program says so, it
 * ends right before a page without access, which holds for code that is built without a sanitizer as well. */
enum { NUM_SLOTS = 128, SLOT_BYTES = 1 << 20, PAGE_BYTES = 4096 };

static char *slots; /* [NUM_SLOTS][SLOT_BYTES + PAGE_BYTES] */
static uint8_t slot_taken[NUM_SLOTS];
static int guarded;

static inline void reserve_slots(void) {
  const size_t bytes = (size_t)NUM_SLOTS * (SLOT_BYTES + PAGE_BYTES);
  slots = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slots == MAP_FAILED) perror("mmap"), exit(2);
  for (int i = 0; i < NUM_SLOTS; i++)
    if (mprotect(slots + (size_t)i * (SLOT_BYTES + PAGE_BYTES) + SLOT_BYTES, PAGE_BYTES, PROT_NONE))
      perror("mprotect"), exit(2);
}

/* Nothing may depend on it: without value for MemorySanitizer, else bytes that make NaNs. */
static inline void make_unknown(void *memory, size_t bytes) {
#ifdef FUZZ_MSAN
  __msan_poison(memory, bytes);
#else
  if (bytes) memset(memory, 0xff, bytes);
#endif
}

static inline void *exact_aligned(size_t bytes, size_t alignment) {
  void *memory = NULL;
  for (int i = 0; i < NUM_SLOTS && guarded && bytes <= SLOT_BYTES - 64; i++) {
    if (slot_taken[i]) continue;
    slot_taken[i] = 1;
    memory =
        slots + (size_t)i * (SLOT_BYTES + PAGE_BYTES) + SLOT_BYTES - (bytes + alignment - 1) / alignment * alignment;
    break;
  }
  if (!memory && alignment == 1) memory = malloc(bytes ? bytes : 1);
  else if (!memory && posix_memalign(&memory, alignment, bytes ? bytes : 1)) memory = NULL;
  if (!memory) perror("memory"), exit(2);
  make_unknown(memory, bytes);
  return memory;
}

static inline void *exact(size_t bytes) { return exact_aligned(bytes, 1); }

static inline void release(void *memory) {
  const size_t at = (size_t)((char *)memory - slots), slot = SLOT_BYTES + PAGE_BYTES;
  if (memory && (char *)memory >= slots && at < NUM_SLOTS * slot) slot_taken[(at - (at > 0)) / slot] = 0;
  else free(memory);
}

/* ---- Floats -------------------------------------------------------------------------------------- */

static inline uint32_t random_bits(void) { /* xorshift64* */
  program_seed ^= program_seed >> 12, program_seed ^= program_seed << 25, program_seed ^= program_seed >> 27;
  return (uint32_t)((program_seed * 2685821657736338717u) >> 32);
}

static inline float random_signed(float size) { return ((float)random_bits() * 0x1p-31f - 1.0f) * size; }

/* Rows of dim floats. Styles below ORDINARY_STYLES are ordinary numbers, the others what float32 allows. */
enum { ORDINARY_STYLES = 6, NUM_STYLES = 14 };

static inline float element_of(int style, int row_exponent, int is_first) {
  switch (style) {
    case 0: return random_signed(1.0f);
    case 1: return random_signed(8.0f);
    case 2: return random_bits() % 16 ? 0.0f : random_signed(2.0f);
    case 3: return 0.75f;
    case 4: return is_first ? 20.0f : random_signed(0.1f);
    case 5: return 0.0f;
    case 6: return random_signed(1e-30f);
    case 7: return random_signed(1e-39f);
    case 8: return random_signed(1e30f);
    case 9: return random_signed(3.4e38f);
    case 10: return ldexpf(random_signed(1.0f), row_exponent);
    case 11: return random_bits() % 2 ? 3.4028234e38f : -3.4028234e38f;
    case 12: return random_bits() % 4 ? random_signed(1.0f) : -0.0f;
    default: return random_signed(6e6f); /* about what a float16 scale takes */
  }
}

static inline void fill_rows(float *x, int64_t rows, int dim, int style) {
  for (int64_t row = 0; row < rows; row++) {
    int exponent = (int)(random_bits() % 250) - 125, first = (int)(random_bits() % (unsigned)dim);
    for (int d = 0; d < dim; d++) *x++ = element_of(style, exponent, d == first);
  }
}

/* Mostly ordinary. */
static inline int next_style(void) {
  int byte = next_below(32);
  return byte < NUM_STYLES ? byte : byte % 2;
}

/* Now and then one element that is not finite. */
static inline void maybe_spoil(float *x, size_t n) {
  int byte = next_byte();
  if (byte < 244 || n == 0) return;
  x[(size_t)next_word() % n] = (const float[]){NAN, INFINITY, -INFINITY, -NAN}[byte % 4];
}

#endif
