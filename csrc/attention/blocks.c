/* Tokens in the blocks of a pool, as attention sees them: a segment for each block, or for several that are neighbours. */
#include "attention/attention.h"

int kvedge_is_block_size(const kvedge_layer *pool, int64_t block_size) {
  if (block_size < 1 || block_size > pool->config.capacity) return 0;
  return !kvedge_holds_runs(pool) || block_size % KVEDGE_RUN == 0;
}

int kvedge_view_blocks(const kvedge_layer *pool, int64_t block_size, const int32_t *blocks, int64_t first_row,
                       int64_t num_tokens, kvedge_segment *segments, kvedge_cache_view *view) {
  const int64_t num_blocks = pool->config.capacity / block_size, stop = first_row + num_tokens;
  int n = 0;
  for (int64_t i = first_row / block_size; i * block_size < stop; i++) {
    const int64_t block = blocks[i], left = stop - i * block_size;
    if (block < 0 || block >= num_blocks) return 0;
    const int64_t tokens = left < block_size ? left : block_size, row = block * block_size;
    if (n > 0 && block == (int64_t)blocks[i - 1] + 1) {
      segments[n - 1].num_tokens += tokens;
      continue;
    }
    segments[n++] = (kvedge_segment){
        .rows = {kvedge_codes_at(&pool->keys,  row), kvedge_codes_at(&pool->values,  row)},
        .scales = {kvedge_scales_at(&pool->keys, row), kvedge_scales_at(&pool->values, row)},
        .num_tokens = tokens
    };
  }
  kvedge_segment unused;
  *view = kvedge_layer_view(pool, NULL, &unused);
  const int64_t before = first_row % block_size; /* rows of the first block */
  view->first_row = 0;
  view->len = before + num_tokens;
  view->segments = segments;
  view->num_segments = n;
  kvedge_cut_view(view, segments, before);
  return 1;
}
