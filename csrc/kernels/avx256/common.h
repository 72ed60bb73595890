/* What the files of the 256-bit paths share. Included by each after its target pragma. */
#include "formats/int4_levels.h"
#include "kernels/portable.h"
#include "kernels/x86.h"

KVEDGE_INLINE float reduce_max(__m256 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

KVEDGE_INLINE float reduce_add(__m256 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* Sums of eight registers, side by side. */
KVEDGE_INLINE __m256 reduce_add_8(const __m256 x[8]) {
  __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}

/* The first n bytes of a row, zero from there on; reads no byte past them. */
KVEDGE_INLINE __m128i load_up_to_16(const int8_t *row, int n) {
  if (n >= 16) return _mm_loadu_si128((const __m128i *)row);
  if (n == 8) return _mm_loadl_epi64((const __m128i *)row);
  int8_t copy[16] = {0};
  memcpy(copy, row, (size_t)n);
  return _mm_loadu_si128((const __m128i *)copy);
}

KVEDGE_INLINE __m256i load_up_to_32(const int8_t *row, int n) {
  if (n >= 32) return _mm256_loadu_si256((const __m256i *)row);
  __m128i low = load_up_to_16(row, n < 16 ? n : 16);
  __m128i high = n > 16 ? load_up_to_16(row + 16, n - 16) : _mm_setzero_si128();
  return _mm256_set_m128i(high, low);
}

/* 8 lanes, of which the first n are all ones. */
KVEDGE_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* In each 128-bit lane, dword i of out[c] is dword c of row[i]. */
KVEDGE_INLINE void transpose_in_lanes(const __m256i row[4], __m256i out[4]) {
  __m256i low_01 = _mm256_unpacklo_epi32(row[0], row[1]), high_01 = _mm256_unpackhi_epi32(row[0], row[1]);
  __m256i low_23 = _mm256_unpacklo_epi32(row[2], row[3]), high_23 = _mm256_unpackhi_epi32(row[2], row[3]);
  out[0] = _mm256_unpacklo_epi64(low_01, low_23);
  out[1] = _mm256_unpackhi_epi64(low_01, low_23);
  out[2] = _mm256_unpacklo_epi64(high_01, high_23);
  out[3] = _mm256_unpackhi_epi64(high_01, high_23);
}

KVEDGE_INLINE __m256 magnitudes_of(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

/* Rounds x, small ones dithered: up or down as kvedge_dither has it. (is_signed: a constant where this is inlined.) */
KVEDGE_INLINE __m256i round_dithered(const int is_signed, __m256 x, __m256 dither) {
  const __m256 small = _mm256_cmp_ps(is_signed ? magnitudes_of(x) : x, _mm256_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
  return _mm256_cvtps_epi32(_mm256_add_ps(x, _mm256_and_ps(small, dither)));
}

enum {
  VECTORS = KVEDGE_BLOCK / 8,          /* of 8 tokens */
  COLUMNS = CHANNELS_OF_TWO_BYTES / 4, /* of four bytes: four channels, or eight of int4 */
};

/* Vectors of floats, as kernels/floats.h and kernels/kivi_pairs.h name them. */
enum { FLOATS = 8 };
typedef __m256 floats;

KVEDGE_INLINE floats zero_floats(void) { return _mm256_setzero_ps(); }
KVEDGE_INLINE floats all_floats(float x) { return _mm256_set1_ps(x); }
KVEDGE_INLINE floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { _mm256_storeu_ps(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return _mm256_mul_ps(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }

/* ---- Codes of int4 as integers of 16 bits in registers ----
 *
 * A table has the levels plus 127, so that its first is 0. Looked up with codes in lanes of 16 bits, whose upper bytes are 0,
 * it gives lanes of 16 bits, without an instruction to widen them. Sums of products take the 127 off again. */

enum { INT4_ABOVE = 127 }; /* how much more than a level a table's number is */

/* The numbers of 32 codes, the lower halves of bytes. */
KVEDGE_INLINE __m256i bytes_of_codes(__m256i codes) {
  const __m128i levels = _mm_loadu_si128((const __m128i *)kvedge_int4_levels);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(levels, _mm_set1_epi8(INT4_ABOVE)));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}

/* Levels of codes that are the lower or the upper (half 1) ones of bytes. */
KVEDGE_INLINE __m256i levels_of(__m256i bytes, const int half) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvedge_int4_levels));
  if (half) bytes = _mm256_srli_epi16(bytes, 4);
  return _mm256_shuffle_epi8(levels, _mm256_and_si256(bytes, _mm256_set1_epi8(15)));
}

/* The numbers of 16 pairs of codes, a byte in 16 bits each: of the lower ones, and of the upper ones. */
KVEDGE_INLINE void int16_of_pairs(__m256i pairs, __m256i int16[2]) {
  const __m128i levels = _mm_loadu_si128((const __m128i *)kvedge_int4_levels);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_add_epi8(levels, _mm_set1_epi8(INT4_ABOVE)));
  int16[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, _mm256_set1_epi8(15)));
  int16[1] = _mm256_shuffle_epi8(table, _mm256_srli_epi16(pairs, 4));
}
