/* bytes.c, for avx2.c and avxvnni.c. */
#ifndef KVEDGE_AVX256_BYTES_ORDER_H
#define KVEDGE_AVX256_BYTES_ORDER_H

#include "kernels/kernels.h"

/* Columns of the block of keys from token `first` on: four channels of 16 tokens each, as bytes; of int4 even channels
 * of eight, then odd ones. 64 bytes for four of the padded channels at `to`, room for a block's rows at `room`. The next
 * tile is prefetched. `gap`: bytes between a group of KVEDGE_GROUP bytes of a row and the next. */
void transpose_block_avx256(int bits, int as_levels, const kvedge_tile *keys, int first, int gap, char *to, char *room);

#endif
