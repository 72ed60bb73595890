/* Huge pages for large arrays: with 4 KB pages, reading a cache at the speed of memory spends much of
 * its time looking pages up. */
#ifndef KVEDGE_PAGES_H
#define KVEDGE_PAGES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define KVEDGE_HUGE_PAGE ((size_t)2 << 20)

/* Asks for huge pages in [start, start + bytes), where the system has them and has not decided by
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

#endif
