/* Asks the CPU once what it can run, and picks the kernel table. */
#include "system/dispatch.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif (defined(__aarch64__) || defined(__arm__)) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* Each returns NULL if the CPU (and the operating system, which must save the registers) can run
 * the path, else what is missing. */

static const char *can_scalar(void) { return NULL; }

#if defined(__x86_64__)
enum { STATE_AVX = 0x6, STATE_AVX512 = 0xe6 }; /* bits of XCR0: XMM+YMM; besides, opmask and ZMM */

static int os_saves(unsigned state) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state) == state;
}

static const char *can_avx2(void) {
  unsigned a, b, c, d;
  if (!os_saves(STATE_AVX)) return "the CPU or the operating system has no AVX";
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA)) return "the CPU has no FMA";
  if (!(c & bit_F16C)) return "the CPU has no F16C";
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return "the CPU has no AVX2";
  return NULL;
}

static const char *can_avxvnni(void) {
  unsigned a, b, c, d;
  const char *why_not = can_avx2();
  if (why_not) return why_not;
#ifdef KVEDGE_AVXVNNI_AS_EVEX /* test builds: the same code in AVX-512VL's encoding */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX512VL) || !(c & bit_AVX512VNNI))
    return "the CPU has no AVX512-VNNI with AVX512VL";
#else
  const unsigned bit_avxvnni = 1u << 4; /* leaf 7, subleaf 1, EAX */
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bit_avxvnni)) return "the CPU has no AVX-VNNI";
#endif
  return NULL;
}

static const char *can_avx512vnni(void) {
  unsigned a, b, c, d;
  const unsigned needs = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const char *why_not = can_avx2();
  if (why_not) return why_not;
  if (!os_saves(STATE_AVX512)) return "the operating system does not save AVX-512 registers";
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & needs) != needs)
    return "the CPU has no AVX-512 F, BW, DQ and VL";
  if (!(c & bit_AVX512VNNI)) return "the CPU has no AVX512-VNNI";
  return NULL;
}

#elif defined(__aarch64__) || defined(__arm__)

#if defined(__aarch64__) && defined(__APPLE__)
static int apple_has(const char *feature) {
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname(feature, &has, &size, NULL, 0) == 0 && has;
}
#endif

static const char *can_neon(void) {
#if defined(__arm__) && defined(__linux__)
  enum { HWCAP_NEON_BIT = 1 << 12 };
  if (!(getauxval(AT_HWCAP) & HWCAP_NEON_BIT)) return "the CPU has no NEON";
#endif
  return NULL; /* every armv8-a has it */
}

#if defined(__aarch64__)
static const char *can_neondot(void) {
#if defined(__linux__)
  enum { HWCAP_ASIMDDP_BIT = 1 << 20 };
  if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP_BIT)) return "the CPU has no dot product instructions (asimddp)";
  return NULL;
#elif defined(__APPLE__)
  return apple_has("hw.optional.arm.FEAT_DotProd") ? NULL : "the CPU has no dot product instructions (FEAT_DotProd)";
#else
  return "dot product instructions are looked for on Linux and macOS only";
#endif
}

static const char *can_neoni8mm(void) {
  const char *why_not = can_neondot();
  if (why_not) return why_not;
#if defined(__linux__)
  enum { HWCAP2_I8MM_BIT = 1 << 13 };
  if (!(getauxval(AT_HWCAP2) & HWCAP2_I8MM_BIT)) return "the CPU has no matrix product instructions (i8mm)";
#elif defined(__APPLE__)
  if (!apple_has("hw.optional.arm.FEAT_I8MM")) return "the CPU has no matrix product instructions (FEAT_I8MM)";
#endif
  return NULL;
}
#endif

#endif

static const struct {
  const kvedge_kernels *kernels;
  const char *(*can)(void);
} paths[] = {
    /* slowest first */
    {&kvedge_kernels_scalar,     can_scalar    },
#if defined(__x86_64__)
    {&kvedge_kernels_avx2,       can_avx2      },
    {&kvedge_kernels_avxvnni,    can_avxvnni   },
    {&kvedge_kernels_avx512vnni, can_avx512vnni},
#elif defined(__aarch64__)
    {&kvedge_kernels_neon, can_neon},
    {&kvedge_kernels_neondot, can_neondot},
    {&kvedge_kernels_neoni8mm, can_neoni8mm},
#elif defined(__arm__)
    {&kvedge_kernels_neon, can_neon},
#endif
};
enum { NUM_PATHS = sizeof paths / sizeof paths[0] };

static const char *const known_names[] = {"scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neondot", "neoni8mm"};

const kvedge_kernels *kvedge_kernels_at(int index) {
  return index >= 0 && index < NUM_PATHS ? paths[index].kernels : NULL;
}

const kvedge_kernels *kvedge_kernels_find(const char *name, const char **why_not) {
  const char *ignored;
  if (!why_not) why_not = &ignored;
  for (int i = 0; i < NUM_PATHS; i++)
    if (strcmp(name, paths[i].kernels->name) == 0) {
      *why_not = paths[i].can();
      return *why_not ? NULL : paths[i].kernels;
    }
  *why_not = "there is no path of that name";
  for (size_t i = 0; i < sizeof known_names / sizeof known_names[0]; i++)
    if (strcmp(name, known_names[i]) == 0) *why_not = "it is a path of another processor family";
  return NULL;
}

static _Atomic(const kvedge_kernels *) active;

static const kvedge_kernels *best(void) {
  for (int i = NUM_PATHS - 1; i > 0; i--)
    if (!paths[i].can()) return paths[i].kernels;
  return paths[0].kernels;
}

/* The path of that name, or with NULL what the environment names or else the best; NULL: it cannot be run here. */
static const kvedge_kernels *choose(const char *name, const char **why_not) {
  if (!name) name = getenv("KVEDGE_ISA");
  return name && *name ? kvedge_kernels_find(name, why_not) : best();
}

kvedge_status kvedge_select_isa(const char *name, const char **why_not) {
  const kvedge_kernels *chosen = choose(name, why_not);
  if (!chosen) return KVEDGE_ERROR_ISA;
  atomic_store(&active, chosen);
  return KVEDGE_OK;
}

kvedge_status kvedge_isa_ready(void) {
  if (atomic_load(&active)) return KVEDGE_OK;
  const kvedge_kernels *chosen = choose(NULL, NULL), *none = NULL;
  if (!chosen) return KVEDGE_ERROR_ISA;
  atomic_compare_exchange_strong(&active, &none, chosen); /* what another thread has selected meanwhile stays */
  return KVEDGE_OK;
}

const kvedge_kernels *kvedge_active(void) { return atomic_load_explicit(&active, memory_order_acquire); }

const char *kvedge_isa_name(void) { return kvedge_isa_ready() == KVEDGE_OK ? kvedge_active()->name : "none"; }

const char *kvedge_isa_compiled(int index) {
  const kvedge_kernels *kernels = kvedge_kernels_at(index);
  return kernels ? kernels->name : NULL;
}

int kvedge_isa_available(const char *name, const char **why_not) { return kvedge_kernels_find(name, why_not) != NULL; }
