/* Which blocks of a pool are in use, and by how many sequences; the blocks themselves are rows of layers. */
#include <string.h>

#include "store/layer_struct.h"
#include "system/float_mode.h"

struct kvedge_blocks {
  int32_t num_blocks, num_free;
  int32_t last;    /* where the search for a free block goes on, so that neighbours in time are neighbours in memory */
  int32_t users[]; /* [num_blocks] sequences that hold each; 0: free */
};

size_t kvedge_blocks_bytes(int32_t num_blocks) {
  return num_blocks < 1 ? 0 : sizeof(kvedge_blocks) + (size_t)num_blocks * sizeof(int32_t);
}

kvedge_status kvedge_blocks_init(void *memory, size_t bytes, int32_t num_blocks, kvedge_blocks **out) {
  if (!memory || (uintptr_t)memory % sizeof(int32_t) || !out || num_blocks < 1) return KVEDGE_ERROR_ARGUMENT;
  if (bytes < kvedge_blocks_bytes(num_blocks)) return KVEDGE_ERROR_MEMORY;
  kvedge_blocks *blocks = memory;
  blocks->num_blocks = blocks->num_free = num_blocks;
  blocks->last = num_blocks - 1;
  memset(blocks->users, 0, (size_t)num_blocks * sizeof *blocks->users);
  *out = blocks;
  return KVEDGE_OK;
}

int32_t kvedge_blocks_num_free(const kvedge_blocks *blocks) { return blocks->num_free; }

int32_t kvedge_blocks_users(const kvedge_blocks *blocks, int32_t block) {
  return block < 0 || block >= blocks->num_blocks ? 0 : blocks->users[block];
}

int32_t kvedge_blocks_take(kvedge_blocks *blocks) {
  if (blocks->num_free == 0) return -1;
  int32_t block = blocks->last;
  do block = block + 1 < blocks->num_blocks ? block + 1 : 0;
  while (blocks->users[block] > 0);
  blocks->users[block] = 1;
  blocks->num_free--;
  return blocks->last = block;
}

kvedge_status kvedge_blocks_hold(kvedge_blocks *blocks, int32_t block) {
  if (kvedge_blocks_users(blocks, block) < 1 || blocks->users[block] == INT32_MAX) return KVEDGE_ERROR_ARGUMENT;
  blocks->users[block]++;
  return KVEDGE_OK;
}

kvedge_status kvedge_blocks_release(kvedge_blocks *blocks, int32_t block) {
  if (kvedge_blocks_users(blocks, block) < 1) return KVEDGE_ERROR_ARGUMENT;
  if (blocks->users[block] == 1) kvedge_quiesce(); /* a late reader may look at what the next user writes over */
  if (--blocks->users[block] == 0) blocks->num_free++;
  return KVEDGE_OK;
}

static int is_pool(const kvedge_layer *pool, const kvedge_blocks *blocks, int64_t block_size) {
  return pool && kvedge_is_block_size(pool, block_size) && block_size <= pool->config.capacity / blocks->num_blocks;
}

kvedge_status kvedge_blocks_own(kvedge_blocks *blocks, kvedge_layer *const *pools, int num_layers, int64_t block_size,
                                int32_t *block) {
  KVEDGE_FLOAT_MODE;
  if (!block || !pools || num_layers < 1 || kvedge_blocks_users(blocks, *block) < 1) return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < num_layers; i++)
    if (!is_pool(pools[i], blocks, block_size)) return KVEDGE_ERROR_ARGUMENT;
  if (blocks->users[*block] == 1) return KVEDGE_OK;
  const int32_t own = kvedge_blocks_take(blocks);
  if (own < 0) return KVEDGE_ERROR_CAPACITY;
  /* The pool's bounds hold for the copies; they are not looked at, since rows without tokens may hold anything. */
  for (int i = 0; i < num_layers; i++) {
    kvedge_copy_tokens(pools[i], *block * block_size, pools[i], own * block_size, block_size);
    kvedge_raise_written(pools[i], (own + 1) * block_size);
  }
  blocks->users[*block]--;
  *block = own;
  return KVEDGE_OK;
}

kvedge_status kvedge_blocks_write(kvedge_layer *pool, int64_t block_size, const int32_t *table, int64_t first,
                                  const float *keys, const float *values, int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  if (!pool || !table || block_size < 1 || first < 0 || num_tokens < 0) return KVEDGE_ERROR_ARGUMENT;
  const int64_t num_blocks = pool->config.capacity / block_size;
  const ptrdiff_t key_row = (ptrdiff_t)pool->config.num_kv_heads * pool->config.head_dim;
  const ptrdiff_t value_row = (ptrdiff_t)pool->config.num_kv_heads * pool->config.value_head_dim;
  for (int64_t block = first / block_size; block * block_size < first + num_tokens; block++)
    if (table[block] < 0 || table[block] >= num_blocks) return KVEDGE_ERROR_ARGUMENT;
  for (int64_t done = 0, num; done < num_tokens; done += num) {
    const int64_t row = (first + done) % block_size, left = num_tokens - done;
    num = block_size - row < left ? block_size - row : left;
    const kvedge_status status = kvedge_layer_write(pool, table[(first + done) / block_size] * block_size + row,
                                                    keys + done * key_row, values + done * value_row, num);
    if (status != KVEDGE_OK) return status;
  }
  return KVEDGE_OK;
}
