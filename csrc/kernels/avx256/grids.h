/* Levels of grids: up to 4 bits from tables of 8 floats (kernels/x86_grids.h), 5 to 7 bits byte
 * by byte of the floats from tables of 16 bytes. (8 bits would take as many instructions as
 * loading each level.) Part of floats.c, after floats.h.
 *
 *   vpshufb, vpmullw, vpsrlw   codes to words, their bits to the upper byte, and down       p15, p01, p01
 *   vpshufb, vpblendvb         a byte of 32 levels, by 4 bits of their codes; by the others   p15, 2 of p015
 *   vpunpck*                   bytes to floats                                               p15
 */
#include "formats/format.h"

enum { MOST_TABLES = 2, CHANNELS_OF_BYTES = 32 };
KVEDGE_INLINE int tables_of(const int bits) { return bits <= 3 ? 1 : bits == 4 ? 2 : 0; }
#define V(op) _mm256_##op
typedef __m256i integers;

KVEDGE_INLINE integers load_integers(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
KVEDGE_INLINE integers load_codes(const char *p) {
  return _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
}

KVEDGE_INLINE floats levels_by(const int bits, const floats *table, integers codes) {
  const floats level = _mm256_permutevar8x32_ps(table[0], codes);
  if (bits < 4) return level;
  const floats upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)); /* a blend looks at signs */
  return _mm256_blendv_ps(level, _mm256_permutevar8x32_ps(table[1], codes), upper);
}

/* Where codes are taken from: lane L has channels 4 L..4 L+3 and 8 + 4 L..8 + 4 L+3 of 16, each as a word. */
typedef struct {
  __m256i bytes, power; /* which two bytes hold a code; what brings it to the upper one */
} int16_places;

static inline int16_places int16_places_of(int bits) {
  uint16_t bytes[16], power[16];
  for (int i = 0; i < 16; i++) {
    const int bit = (i % 8 / 4 * 8 + i / 8 * 4 + i % 4) * bits;
    bytes[i] = (uint16_t)(0x0100 + bit / 8 * 0x0101);
    power[i] = (uint16_t)(256 >> bit % 8);
  }
  return (int16_places){_mm256_loadu_si256((const __m256i *)bytes), _mm256_loadu_si256((const __m256i *)power)};
}

/* 16 codes, in the low bits of words. */
KVEDGE_INLINE __m256i int16_of(const uint8_t *row, int begin, int last, const int16_places *at) {
  const int load = begin < last ? begin : last;
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + load)));
  const __m256i bytes = _mm256_add_epi8(at->bytes, _mm256_set1_epi8((char)(begin - load)));
  return _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(all, bytes), at->power), 8);
}

/* One of the four bytes of 32 levels by codes below 16 * count. */
KVEDGE_INLINE __m256i byte_of_levels(const int count, uint8_t table[][16], __m256i codes) {
  __m256i byte[4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    byte[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table[i])), codes);
#pragma GCC unroll 2
  for (int left = count / 2, bit = 4; left > 0; left /= 2, bit++) {
    const __m256i upper = _mm256_slli_epi16(codes, 7 - bit);
#pragma GCC unroll 2
    for (int i = 0; i < left; i++) byte[i] = _mm256_blendv_epi8(byte[2 * i], byte[2 * i + 1], upper);
  }
  return byte[0];
}

/* Rows of codes of 5 to 7 bits. Of 7 bits tables have the lower half of the levels, which the upper half mirrors.
 * (`bits`: a constant where this is inlined.) */
KVEDGE_INLINE int decode_by_bytes(const int bits, const kvedge_tile *from, int row_bytes, float *out,
                                  ptrdiff_t stride) {
  const int mirrors = bits > 6, tables = (1 << (bits - mirrors)) / 16, last = row_bytes - 16;
  const int16_places at = int16_places_of(bits);
  const __m256i mask = _mm256_set1_epi8((char)((1 << (bits - mirrors)) - 1));
  uint8_t table[4][4][16];
  for (int code = 0; code < 16 * tables; code++) {
    const uint32_t level = kvedge_bits_of_float(kvedge_grid_levels[bits][code]);
    for (int b = 0; b < 4; b++) table[b][code / 16][code % 16] = (uint8_t)(level >> 8 * b);
  }
  for (int t = 0; t < from->num_tokens; t++, out += stride) {
    const uint8_t *row = (const uint8_t *)kvedge_tile_row(from, t);
    prefetch_lines_of(from, t / KVEDGE_BLOCK, row_bytes, t % KVEDGE_BLOCK, KVEDGE_BLOCK);
    for (int d = 0; d < from->dim; d += CHANNELS_OF_BYTES) {
      const int begin = d / 8 * bits;
      __m256i codes = _mm256_packus_epi16(int16_of(row, begin, last, &at), int16_of(row, begin + 2 * bits, last, &at));
      const __m256i upper = _mm256_cmpgt_epi8(_mm256_setzero_si256(), _mm256_slli_epi16(codes, 8 - bits));
      codes = _mm256_and_si256(mirrors ? _mm256_xor_si256(codes, upper) : codes, mask);
      __m256i byte[4];
#pragma GCC unroll 4
      for (int b = 0; b < 4; b++) byte[b] = byte_of_levels(tables, table[b], codes);
      if (mirrors) byte[3] = _mm256_xor_si256(byte[3], _mm256_and_si256(upper, _mm256_set1_epi8((char)0x80)));
      const __m256i low[2] = {_mm256_unpacklo_epi8(byte[0], byte[1]), _mm256_unpackhi_epi8(byte[0], byte[1])};
      const __m256i high[2] = {_mm256_unpacklo_epi8(byte[2], byte[3]), _mm256_unpackhi_epi8(byte[2], byte[3])};
      for (int i = 0; i < 2; i++) {
        float *to = out + d + 16 * i;
        store_floats(to, _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[i], high[i])));
        store_floats(to + 8, _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[i], high[i])));
      }
    }
  }
  return 1;
}

enum { GRID_LOAD = 16, GRID_CHANNELS = CHANNELS_OF_BYTES };
#include "kernels/x86_grids.h"

static inline int decode_in_registers(const kvedge_tile *from, int row_bytes, float *out, ptrdiff_t stride) {
  switch (from->bits) {
#define DECODE(bits)                                                                                                   \
  case bits: return decode_by_bytes(bits, from, row_bytes, out, stride)
    DECODE(5);
    DECODE(6);
    DECODE(7);
#undef DECODE
  }
  return decode_to_floats(from, row_bytes, out, stride);
}

#include "kernels/grids.h"
