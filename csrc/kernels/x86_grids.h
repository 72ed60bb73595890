/* Codes of grids to levels, for any width of vectors. Included by a path after floats.h; the path first defines
 *
 *   V(op)                        the intrinsic of its width: _mm256_##op or _mm512_##op
 *   integers, load_integers(p)   a vector of them
 *   load_codes(p)                FLOATS bytes, in each lane of 128 bits all of them
 *   tables_of(bits)                 vectors of levels that levels_by() takes; 0: there is none for so many bits
 *   levels_by(bits, table, codes) levels by the low bits of codes, any others above them
 *
 * FLOATS codes of up to 8 bits lie in FLOATS bytes, and the 4 of each lane in 4 bytes, which
 * begin with a byte or in the middle of one. So
 *
 *   vbroadcasti32x4, vpbroadcastq   bytes to all lanes               a load
 *   vpshufb                         4 bytes to each dword            zmm p5, ymm p15
 *   vpsrlvd                         a code to its low bits           zmm p0, ymm p01
 *   vpermps, vpermi2ps              levels by codes of 3 bits (ymm), 4 and 5 (zmm); those of more are blended    p5
 *
 * make FLOATS levels of them, where a table of floats in memory takes three instructions for
 * each. The last codes of a row are loaded with those before them, so that no byte past it is
 * read. */
#include "formats/format.h"

/* Which bytes hold the code of each dword, and where in them it begins. */
typedef struct {
  integers bytes, shift;
} code_places;

KVEDGE_INLINE code_places places_of(int bits) {
  int32_t bytes[FLOATS], shift[FLOATS];
  for (int i = 0; i < FLOATS; i++) {
    const int four = i / 4 * 4 * bits; /* bit at which the lane's begin */
    bytes[i] = 0x03020100 + four / 8 * 0x01010101;
    shift[i] = four % 8 + i % 4 * bits;
  }
  return (code_places){load_integers(bytes), load_integers(shift)};
}

/* (`bits`: a constant where this is inlined.) */
KVEDGE_INLINE int decode_codes(const int bits, const kvedge_tile *from, int row_bytes, code_places at, float *out,
                               ptrdiff_t stride) {
  const float *levels = kvedge_grid_levels[bits];
  float repeated[FLOATS];
  floats table[MOST_TABLES];
  if (1 << bits < FLOATS) {
    for (int i = 0; i < FLOATS; i++) repeated[i] = levels[i & ((1 << bits) - 1)];
    levels = repeated;
  }
  const int tables = tables_of(bits); /* of the last levels, where they are fewer */
  if (FLOATS * tables < 1 << bits) levels += (1 << bits) - FLOATS * tables;
#pragma GCC unroll 8
  for (int i = 0; i < tables; i++) table[i] = load_floats(levels + FLOATS * i);
  const int columns = (from->dim + FLOATS - 1) / FLOATS;
  for (int d = 0; d < from->dim; d += FLOATS, out += FLOATS) {
    const int begin = d / 8 * bits, last = row_bytes - FLOATS, load = begin < last ? begin : last;
    const integers bytes = V(add_epi8)(at.bytes, V(set1_epi8)((char)(begin - load)));
    float *to = out;
    for (int t = 0; t < from->num_tokens; t += KVEDGE_BLOCK) {
      const char *row = kvedge_tile_block(from, t) + load;
      prefetch_lines_of(from, t / KVEDGE_BLOCK, row_bytes, d / FLOATS, columns);
      const int left = from->num_tokens - t, rows = left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK;
      for (int r = 0; r < rows; r++, row += from->token_stride, to += stride) {
        const integers codes = V(srlv_epi32)(V(shuffle_epi8)(load_codes(row), bytes), at.shift);
        store_floats(to, levels_by(bits, table, codes));
      }
    }
  }
  return 1;
}

static inline int decode_to_floats(const kvedge_tile *from, int row_bytes, float *out, ptrdiff_t stride) {
  const code_places at = places_of(from->bits);
  switch (from->bits) {
#define DECODE(bits)                                                                                                   \
  case bits: return tables_of(bits) > 0 && decode_codes(bits, from, row_bytes, at, out, stride)
    DECODE(2);
    DECODE(3);
    DECODE(4);
    DECODE(5);
    DECODE(6);
    DECODE(7);
    DECODE(8);
#undef DECODE
  }
  return 0;
}
