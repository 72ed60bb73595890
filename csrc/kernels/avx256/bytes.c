/* Blocks of keys as columns of bytes, for both 256-bit paths (bytes.h). */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/avx256/bytes_order.h"
#include "system/target.h"

KVEDGE_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/avx256/common.h"

/* A block of keys to transpose, whose tokens are all there. */
typedef struct {
  const int8_t *rows;
  ptrdiff_t stride;
  int row_bytes;
  __m256i *columns; /* (padded bytes / 4, VECTORS): four bytes of 8 tokens */
  kvedge_next_block next;
} key_block;

/* Four columns: bytes d..d+15, of which n are there, of rows 8j..8j+7. (Whether n is 16 is a constant where this is
 * inlined.) */
KVEDGE_INLINE void transpose_bytes(const key_block *k, int d, const int j, int n) {
  const int8_t *first = k->rows + 8 * j * k->stride + d, *last = first + 4 * k->stride;
  __m256i *columns = k->columns + d / 4 * VECTORS + j;
  __m256i two[4], four[4]; /* two: rows i and i + 4; four: bytes 4c..4c+3 of all */
  if (k->next.first)
    for (int line = 0; line < 2; line++) kvedge_prefetch_line(k->next, (VECTORS * d + 16 * j) * 8 + 64 * line);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    two[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_up_to_16(first + i * k->stride, n)),
                                     load_up_to_16(last + i * k->stride, n), 1);
  transpose_in_lanes(two, four);
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) columns[c * VECTORS] = four[c];
}

static __attribute__((noinline)) void transpose_last_bytes(const key_block *k, int d, int j) {
  transpose_bytes(k, d, j, k->row_bytes - d);
}

KVEDGE_INLINE void transpose_16(const key_block *k, int d, const int j) {
  if (k->row_bytes - d >= 16) transpose_bytes(k, d, j, 16);
  else transpose_last_bytes(k, d, j);
}

void transpose_block_avx256(int bits, int as_levels, const kvedge_tile *keys, int first, int gap, char *to,
                            char *room) {
  const int row_bytes = (keys->dim * bits + 7) / 8, padded = (row_bytes + 15) / 16 * 16;
  const int group_bytes = KVEDGE_GROUP * bits / 8, left = keys->num_tokens - first;
  const int span = row_bytes + (row_bytes - 1) / group_bytes * gap;
  const kvedge_next_tile next = kvedge_next_of(keys, span);
  __m256i *columns = (void *)to;
  key_block block = {.rows = (const int8_t *)kvedge_tile_block(keys, first),
                     .stride = keys->token_stride,
                     .row_bytes = row_bytes,
                     .columns = columns,
                     .next = kvedge_next_block_of(&next, first / KVEDGE_BLOCK)};
  if (left < KVEDGE_BLOCK) {
    for (int j = 0; j < KVEDGE_BLOCK; j++)
      memcpy(room + j * (padded - row_bytes + span), block.rows + (j < left ? j : left - 1) * block.stride,
             (size_t)span);
    block.rows = (const int8_t *)room, block.stride = padded - row_bytes + span;
  }
  for (int d = 0; d < row_bytes; d += 16) {
    if (d > 0 && d % group_bytes == 0) block.rows += gap;
#pragma GCC unroll 1
    for (int j = 0; j < VECTORS; j++) transpose_16(&block, d, j);
  }
  for (int c = padded / 4 * VECTORS; as_levels && bits == 4 && c > 0;) { /* the last first: they take twice the room */
    c -= VECTORS;
    const __m256i codes[VECTORS] = {columns[c], columns[c + 1]};
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < VECTORS; j++) columns[2 * c + half * VECTORS + j] = levels_of(codes[j], half);
  }
}

KVEDGE_TARGET_END
#endif
