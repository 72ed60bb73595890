/* Aligned memory. Windows has no aligned_alloc, and gives back what is aligned in a way of its own. */
#ifndef KVEDGE_MEMORY_H
#define KVEDGE_MEMORY_H

#include <stddef.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <malloc.h>
#endif

/* `bytes`, a multiple of `alignment`; NULL: not enough memory. Only kvedge_aligned_free() takes it back. */
static inline void *kvedge_aligned_alloc(size_t alignment, size_t bytes) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, alignment);
#else
  return aligned_alloc(alignment, bytes);
#endif
}

static inline void kvedge_aligned_free(void *memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  free(memory);
#endif
}

#endif
