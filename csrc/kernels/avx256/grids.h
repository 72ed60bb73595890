/* Levels of grids for kernels/x86_grids.h: up to 5 bits from tables of 8. Part of avx2.c and avxvnni.c, after floats.h. */
enum { MOST_TABLES = 4 };
KVEDGE_INLINE int tables_of(const int bits) { return bits <= 3 ? 1 : bits <= 5 ? (1 << bits) / FLOATS : 0; }
#define V(op) _mm256_##op
typedef __m256i integers;

KVEDGE_INLINE integers load_integers(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
KVEDGE_INLINE integers load_codes(const char *p) {
  return _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
}

KVEDGE_INLINE floats levels_by(const int bits, const floats *table, integers codes) {
  const int tables = tables_of(bits);
  floats level[MOST_TABLES];
#pragma GCC unroll 4
  for (int i = 0; i < tables; i++) level[i] = _mm256_permutevar8x32_ps(table[i], codes);
#pragma GCC unroll 2
  for (int bit = 3, left = tables / 2; left > 0; bit++, left /= 2) {
    const floats upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 31 - bit)); /* blends look at signs */
#pragma GCC unroll 2
    for (int i = 0; i < left; i++) level[i] = _mm256_blendv_ps(level[2 * i], level[2 * i + 1], upper);
  }
  return level[0];
}

#include "kernels/x86_grids.h"
#include "kernels/grids.h"
