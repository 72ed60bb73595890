/* Pages for large arrays. With pages of 4 KB, reading a cache at the speed of memory spends much
 * of its time looking pages up; with huge pages everywhere, the first token of a layer takes
 * megabytes. Where the system's policy is "always", both have to be said. */
#ifndef KVEDGE_PAGES_H
#define KVEDGE_PAGES_H

#include <stddef.h>
#include <stdint.h>

#include "system/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define KVEDGE_HUGE_PAGE ((size_t)2 << 20)

/* Advises huge pages in [start, start + bytes), where the system has them and has not decided by
 * itself; what is refused costs speed only. */
static inline void kvedge_advise_huge_pages(void *start, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  uintptr_t first = ((uintptr_t)start + KVEDGE_HUGE_PAGE - 1) / KVEDGE_HUGE_PAGE * KVEDGE_HUGE_PAGE;
  uintptr_t stop = ((uintptr_t)start + bytes) / KVEDGE_HUGE_PAGE * KVEDGE_HUGE_PAGE;
  if (first < stop) (void)madvise((void *)first, stop - first, MADV_HUGEPAGE);
#else
  (void)start;
  (void)bytes;
#endif
}

/* Bytes from which a block has pages of its own, small ones until kvedge_advise_huge_pages()
 * advises others: blocks side by side are one mapping to the system, and the heap, whose pages
 * are the policy's, is left alone. */
#define KVEDGE_OWN_PAGES ((size_t)64 << 10)

/* A block for arrays that are filled bit by bit, aligned to 64 bytes; NULL: not enough memory. */
static inline void *kvedge_pages_alloc(size_t bytes) {
#if defined(__linux__) && defined(MADV_NOHUGEPAGE)
  if (bytes >= KVEDGE_OWN_PAGES) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    return memory;
  }
#endif
  return kvedge_aligned_alloc(64, bytes);
}

/* `bytes` as they were taken. */
static inline void kvedge_pages_free(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_NOHUGEPAGE)
  if (bytes >= KVEDGE_OWN_PAGES) {
    (void)munmap(memory, bytes);
    return;
  }
#endif
  (void)bytes;
  kvedge_aligned_free(memory);
}

#endif
