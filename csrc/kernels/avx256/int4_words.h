/* Codes of int4 as integers in registers. Part of avx2.c and avxvnni.c, after common.h.
 *
 * A table has the levels plus 127, so that its first is 0: looked up with codes in words of 16 bits, whose upper bytes are
 * 0, it gives words, without an instruction to widen them. Sums of products take the 127 off again.
 */
#include "formats/int4_levels.h"

enum { INT4_ABOVE = 127 }; /* how much more than a level a table's number is */

/* The numbers of 32 codes, the lower halves of bytes. */
KVEDGE_INLINE __m256i bytes_of_codes(__m256i codes) {
  const __m128i levels = _mm_loadu_si128((const __m128i *)kvedge_int4_levels);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(levels, _mm_set1_epi8(INT4_ABOVE)));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}

/* The numbers of 16 pairs of codes, a byte in a word each: of the lower ones, and of the upper ones. */
KVEDGE_INLINE void words_of_pairs(__m256i pairs, __m256i words[2]) {
  const __m128i levels = _mm_loadu_si128((const __m128i *)kvedge_int4_levels);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(levels, _mm_set1_epi8(INT4_ABOVE)));
  words[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, _mm256_set1_epi8(15)));
  words[1] = _mm256_shuffle_epi8(table, _mm256_srli_epi16(pairs, 4));
}
