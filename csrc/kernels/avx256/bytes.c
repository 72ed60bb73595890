/* Blocks of keys as columns of bytes, for both 256-bit paths (bytes.h). */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/avx256/bytes_order.h"
#include "system/target.h"

KVEDGE_TARGET_BEGIN("avx2,fma,f16c")

#include "kernels/avx256/common.h"
#include "kernels/avx256/transpose.h"

void transpose_block_avx256(int bits, const kvedge_tile *keys, int first, char *to, char *room) {
  const int row_bytes = (keys->dim * bits + 7) / 8, padded = (row_bytes + 15) / 16 * 16;
  const int left = keys->num_tokens - first;
  const kvedge_next_tile next = kvedge_next_of(keys, row_bytes);
  __m256i *columns = (void *)to;
  key_block block = {.rows = (const int8_t *)kvedge_tile_block(keys, first),
                     .stride = keys->token_stride,
                     .row_bytes = row_bytes,
                     .columns = columns,
                     .next = kvedge_next_block_of(&next, first / KVEDGE_BLOCK)};
  if (left < KVEDGE_BLOCK) {
    for (int j = 0; j < KVEDGE_BLOCK; j++)
      memcpy(room + j * padded, block.rows + (j < left ? j : left - 1) * block.stride, (size_t)row_bytes);
    block.rows = (const int8_t *)room, block.stride = padded;
  }
  for (int d = 0; d < row_bytes; d += 16)
#pragma GCC unroll 1
    for (int j = 0; j < VECTORS; j++) transpose_16(&block, d, j);
  for (int c = padded / 4 * VECTORS; bits == 4 && c > 0;) { /* the last first: they take twice the room */
    c -= VECTORS;
    const __m256i codes[VECTORS] = {columns[c], columns[c + 1]};
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < VECTORS; j++) columns[2 * c + half * VECTORS + j] = levels_of(codes[j], half);
  }
}

KVEDGE_TARGET_END
#endif
