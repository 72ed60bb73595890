/* Blocks of keys, transposed. Part of scores.h, and of bytes.c. */
enum {
  VECTORS = KVEDGE_BLOCK / 8,          /* of 8 tokens */
  COLUMNS = CHANNELS_OF_TWO_BYTES / 4, /* of four bytes: four channels, or eight of int4 */
};

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
