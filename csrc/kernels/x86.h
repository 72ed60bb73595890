/* What the x86 paths share, whatever the width of their vectors. */
#ifndef KVEDGE_KERNELS_X86_H
#define KVEDGE_KERNELS_X86_H

#include <stdint.h>

/* How many bytes further on a line is to be asked for again.
 *
 * AMD's cores (Zen 4) forget what they are asked for when too much is on its way, and a line that was forgotten costs
 * its use the whole way to memory. So each is asked for twice, the second time 4 KB later, which makes decoding 1.04 to
 * 1.6 times as fast. Elsewhere at once, which costs nothing. */
static inline uintptr_t kvedge_ask_again_after(void) { return __builtin_cpu_is("amd") ? 4096 : 0; }

/* WORK(count) for queries i..n-1: four at a time, then those that are left. */
#define BY_FOURS(n, WORK)                 \
  {                                       \
    for (; i + 4 <= (n); i += 4) WORK(4); \
    switch ((n) - i) {                    \
      case 3: WORK(3); break;             \
      case 2: WORK(2); break;             \
      case 1: WORK(1); break;             \
    }                                     \
  }

#endif
