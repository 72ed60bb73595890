/* What the x86 paths share, whatever the width of their vectors. */
#ifndef KVEDGE_KERNELS_X86_H
#define KVEDGE_KERNELS_X86_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "system/target.h"

/* ---- Prefetch of the next tile ---- */

/* The rows of the next tile that a kernel call prefetches. */
typedef struct {
  const kvedge_prefetch *rows; /* rows->blocks == NULL: nothing */
  int row_bytes;
  int again; /* the second prefetch of a line comes this many bytes later */
} kvedge_next_tile;

KVEDGE_INLINE kvedge_next_tile kvedge_next_of(const kvedge_tile *tile, int row_bytes) {
  return (kvedge_next_tile){&tile->next, row_bytes, (int)kvedge_prefetch_again_after()};
}

/* One block to prefetch. Addresses are integers, since `again` may lie before the first row. */
typedef struct {
  uintptr_t first; /* 0: nothing */
  uintptr_t again; /* of the second prefetch */
} kvedge_next_block;

/* Blocks out of order: the second prefetch comes with a later block, of the same place in it. */
KVEDGE_INLINE kvedge_next_block kvedge_next_out_of_order(const kvedge_next_tile *next, int block) {
  const unsigned blocks = (unsigned)next->again / (unsigned)(KVEDGE_BLOCK * next->row_bytes);
  const int later = next->again == 0 ? 0 : blocks == 0 ? 1 : (int)blocks;
  const char *current = next->rows->blocks[block], *before = next->rows->blocks[block < later ? block : block - later];
  return (kvedge_next_block){(uintptr_t)(current + next->rows->offset), (uintptr_t)(before + next->rows->offset)};
}

KVEDGE_INLINE kvedge_next_block kvedge_next_block_of(const kvedge_next_tile *next, int block) {
  const kvedge_prefetch *rows = next->rows;
  if (!rows->blocks) return (kvedge_next_block){0, 0};
  if (!rows->in_order) return kvedge_next_out_of_order(next, block);
  const uintptr_t first = (uintptr_t)(rows->blocks[block] + rows->offset);
  return (kvedge_next_block){first, first - (uintptr_t)next->again};
}

/* The block from `by` bytes on. */
KVEDGE_INLINE kvedge_next_block kvedge_further(kvedge_next_block next, ptrdiff_t by) {
  if (!next.first) return next;
  return (kvedge_next_block){next.first + (uintptr_t)by, next.again + (uintptr_t)by};
}

/* Prefetches the line `by` bytes into it, for the second-level cache, and the line of the second prefetch. Not where
 * next.first is 0. */
KVEDGE_INLINE void kvedge_prefetch_line(kvedge_next_block next, ptrdiff_t by) {
  __builtin_prefetch((const void *)(next.first + (uintptr_t)by), 0, 2);
  __builtin_prefetch((const void *)(next.again + (uintptr_t)by), 0, 2);
}

/* ---- Stretches: blocks of a tile that lie side by side, and whose prefetch does ---- */

typedef struct {
  const char *rows; /* (num_tokens), token_stride apart */
  int num_tokens;
  kvedge_next_block next; /* num_tokens * row_bytes to prefetch */
} kvedge_stretch;

/* The longest stretch from token `first` on, a block's first, to before token `stop`. Most
 * caches have one to a tile: a loop over its tokens then costs nothing for blocks. */
KVEDGE_INLINE kvedge_stretch kvedge_stretch_of(const kvedge_tile *tile, const kvedge_next_tile *next, int first,
                                               int stop) {
  const ptrdiff_t block_bytes = KVEDGE_BLOCK * tile->token_stride, next_bytes = KVEDGE_BLOCK * next->row_bytes;
  int block = first / KVEDGE_BLOCK;
  const char *const *blocks = tile->blocks, *const *next_blocks = tile->next.blocks;
  kvedge_stretch stretch = {.rows = blocks[block] + tile->offset, .next = kvedge_next_block_of(next, block)};
  for (; (block + 1) * KVEDGE_BLOCK < stop; block++) {
    if (blocks[block + 1] != blocks[block] + block_bytes) break;
    if (next_blocks && (next_blocks[block + 1] != next_blocks[block] + next_bytes || !tile->next.in_order)) break;
  }
  const int end = (block + 1) * KVEDGE_BLOCK;
  stretch.num_tokens = (end < stop ? end : stop) - first;
  return stretch;
}

/* Halves of eight tokens, token_stride bytes apart. */
KVEDGE_INLINE __m128i kvedge_eight_halves(const char *from, ptrdiff_t token_stride) {
  uint16_t half[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) memcpy(&half[i], from + i * token_stride, sizeof half[i]);
  return _mm_setr_epi16((short)half[0], (short)half[1], (short)half[2], (short)half[3], (short)half[4], (short)half[5],
                        (short)half[6], (short)half[7]);
}

/* Scores of 8, 4 or 2 tokens of each of 1, 2 or 4 queries, a row of the tile for each query. */
KVEDGE_INLINE void store_scores(__m256 score, const int tokens, float *scores) {
  __m128 low = _mm256_castps256_ps128(score), high = _mm256_extractf128_ps(score, 1);
  if (tokens == 8) {
    _mm256_storeu_ps(scores, score);
  } else if (tokens == 4) {
    _mm_storeu_ps(scores, low);
    _mm_storeu_ps(scores + KVEDGE_TILE, high);
  } else {
    _mm_storel_pi((__m64 *)scores, low);
    _mm_storeh_pi((__m64 *)(scores + KVEDGE_TILE), low);
    _mm_storel_pi((__m64 *)(scores + 2 * KVEDGE_TILE), high);
    _mm_storeh_pi((__m64 *)(scores + 3 * KVEDGE_TILE), high);
  }
}

/* What store_scores() stored. */
KVEDGE_INLINE __m256 load_scores(const int tokens, const float *scores) {
  if (tokens == 8) return _mm256_loadu_ps(scores);
  if (tokens == 4) return _mm256_set_m128(_mm_loadu_ps(scores + KVEDGE_TILE), _mm_loadu_ps(scores));
  __m128 low = _mm_loadl_pi(_mm_setzero_ps(), (const __m64 *)scores), high = low;
  low = _mm_loadh_pi(low, (const __m64 *)(scores + KVEDGE_TILE));
  high = _mm_loadl_pi(high, (const __m64 *)(scores + 2 * KVEDGE_TILE));
  return _mm256_set_m128(_mm_loadh_pi(high, (const __m64 *)(scores + 3 * KVEDGE_TILE)), low);
}

/* WORK(count) for queries i..n-1: four at a time, then those that are left. */
#define BY_FOURS(n, WORK)                                                                                              \
  {                                                                                                                    \
    for (; i + 4 <= (n); i += 4) WORK(4);                                                                              \
    switch ((n) - i) {                                                                                                 \
      case 3: WORK(3); break;                                                                                          \
      case 2: WORK(2); break;                                                                                          \
      case 1: WORK(1); break;                                                                                          \
    }                                                                                                                  \
  }

#endif
