/* Levels of grids for kernels/x86_grids.h: up to 6 bits from tables of 16 or 32, which masks
 * choose from; of more bits the upper half of the levels, since the lower half mirrors it. Part
 * of avx512vnni.c, after floats.h. */
enum { MOST_TABLES = 8 };
KVEDGE_INLINE int tables_of(const int bits) {
  return bits <= 4 ? 1 : bits <= 6 ? (1 << bits) / FLOATS : (1 << bits) / FLOATS / 2;
}
#define V(op) _mm512_##op
typedef __m512i integers;

KVEDGE_INLINE integers load_integers(const int32_t *p) { return _mm512_loadu_si512(p); }
KVEDGE_INLINE integers load_codes(const char *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }

KVEDGE_INLINE floats levels_by(const int bits, const floats *table, integers codes) {
  const __mmask16 mirrored = bits > 6 ? _mm512_testn_epi32_mask(codes, _mm512_set1_epi32(1 << (bits - 1))) : 0;
  if (bits > 6) codes = _mm512_mask_xor_epi32(codes, mirrored, codes, _mm512_set1_epi32(-1));
  if (bits <= 4) return _mm512_permutexvar_ps(codes, table[0]);
  floats level[4];
  const int count = tables_of(bits) / 2;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) level[i] = _mm512_permutex2var_ps(table[2 * i], codes, table[2 * i + 1]);
#pragma GCC unroll 2
  for (int bit = 32, left = count / 2; left > 0; bit *= 2, left /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(codes, _mm512_set1_epi32(bit));
#pragma GCC unroll 2
    for (int i = 0; i < left; i++) level[i] = _mm512_mask_blend_ps(upper, level[2 * i], level[2 * i + 1]);
  }
  return bits > 6 ? _mm512_mask_sub_ps(level[0], mirrored, zero_floats(), level[0]) : level[0];
}

#include "kernels/x86_grids.h"

enum { GRID_LOAD = FLOATS, GRID_CHANNELS = FLOATS };
#define decode_in_registers decode_to_floats
#include "kernels/grids.h"
