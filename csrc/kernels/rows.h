/* What every path does with rows of floats in the same plain C, which each compiles for itself. Included once by
 * each kernels_<isa>.c after its target pragma. */
#include "system/bits.h"
#include "formats/half.h"
#include "kernels/kernels.h"
#include "system/target.h"

/* Asks for the lines that begin in n bytes, for the second-level cache: a tile ahead is more than the first holds.
 * (Always inlined, since GCC may drop calls of a function that does nothing but this.) */
KVEDGE_INLINE void prefetch_bytes(const char *bytes, ptrdiff_t n) {
  uintptr_t end = (uintptr_t)bytes + (uintptr_t)n;
  for (uintptr_t line = ((uintptr_t)bytes + 63) & ~(uintptr_t)63; line < end; line += 64)
    __builtin_prefetch((const void *)line, 0, 2);
}

/* The part-th of `parts` of what a tile prefetches with block `block`, as many bytes as its rows have: a few lines at a
 * time, since a core waits, or drops them, when many are on their way. */
KVEDGE_INLINE void prefetch_part(const kvedge_tile *tile, int block, int row_bytes, int part, int parts) {
  if (!tile->next.blocks) return;
  const int from = KVEDGE_BLOCK * row_bytes * part / parts, to = KVEDGE_BLOCK * row_bytes * (part + 1) / parts;
  const uintptr_t rows = (uintptr_t)tile->next.blocks[block] + (uintptr_t)tile->next.offset;
  prefetch_bytes((const char *)(rows + (uintptr_t)from), to - from);
}

static inline void merge_row_portable(float *to, float keep, const float *from, float add, int n) {
  for (int d = 0; d < n; d++) to[d] = to[d] * keep + from[d] * add;
}

static inline void scale_row_portable(const float *row, int n, float factor, float power, float *restrict out) {
  for (int d = 0; d < n; d++) out[d] = kvedge_bounded(row[d] * factor * power);
}

static inline void transpose_scales_portable(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride,
                                             int num_tokens, int num_columns, float factor, float *out,
                                             ptrdiff_t out_stride) {
  for (int t = 0; t < num_tokens; t++, scales = (const char *)scales + token_stride)
    for (int c = 0; c < num_columns; c++) out[c * out_stride + t] = kvedge_load_scale(scales, type, c) * factor;
}
