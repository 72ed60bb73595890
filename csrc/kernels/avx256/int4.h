/* int4 for kernels/int4.h. Part of avx2.c and avxvnni.c, after values.h. */
#include "formats/int4_levels.h"

/* Levels of 32 or 16 channels, and the last ones one by one. */
static inline void widen_row(const uint8_t *codes, int n, int8_t *out) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvedge_int4_levels));
  int d = 0;
  for (; d + 16 <= n; d += 32) {
    const int all = d + 32 <= n;
    const __m128i bytes = load_up_to_16((const int8_t *)codes + d / 2, all ? 16 : 8);
    const __m256i pairs = _mm256_cvtepu8_epi16(bytes);
    const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi16(0x0f));
    const __m256i high = _mm256_and_si256(_mm256_slli_epi16(pairs, 4), _mm256_set1_epi16(0x0f00));
    _mm256_storeu_si256((__m256i *)(out + d), _mm256_shuffle_epi8(levels, _mm256_or_si256(low, high)));
  }
  for (d = n / 16 * 16; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"
