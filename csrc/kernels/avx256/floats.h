/* Vectors of 8 floats as kernels/float_rows.h wants them. Part of avx2.c and avxvnni.c, after scores.h. */
enum { FLOATS = 8, HALVES = 16, WIDE = 32, SUMS = 8, MOST_QUERIES = 4, PART_LOADS_ARE_CHEAP = 0 };
typedef __m256 floats;
#define IN_REGISTER(x) __asm__("" : "+x"(x))

KVEDGE_INLINE floats zero_floats(void) { return _mm256_setzero_ps(); }
KVEDGE_INLINE floats all_floats(float x) { return _mm256_set1_ps(x); }
KVEDGE_INLINE floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { _mm256_storeu_ps(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return _mm256_mul_ps(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }

/* Of 8 vectors the sums, lane i of the i-th; of n, the others repeat these. (n: a constant where this is inlined.) */
KVEDGE_INLINE floats sums_of(const floats *x, const int n) {
  const floats all[8] = {x[0], x[1 % n], x[2 % n], x[3 % n], x[4 % n], x[5 % n], x[6 % n], x[7 % n]};
  return reduce_add_8(all);
}

KVEDGE_INLINE void store_sums(floats sums, const int queries, const int rows, float *scores) {
  const __m128 half[2] = {_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)};
  if (rows == 8) {
    _mm256_storeu_ps(scores, sums);
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < queries; i++, scores += KVEDGE_TILE)
    if (rows == 4) _mm_storeu_ps(scores, half[i % 2]);
    else if (i % 2 == 0) _mm_storel_pi((__m64 *)scores, half[i / 2]);
    else _mm_storeh_pi((__m64 *)scores, half[i / 2]);
}

KVEDGE_INLINE floats floats_of_halves(__m128i halves, const kvedge_format format) {
  if (format == KVEDGE_FLOAT16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The upper byte of a half is an e5m2. Of an e4m3 the sign, extended to bits 7 to 15, is kept in bit 15. */
KVEDGE_INLINE void widen_fp8(const char *from, int n, const kvedge_format format, uint16_t *to) {
  const __m128i codes = load_up_to_16((const int8_t *)from, n);
  __m256i halves;
  if (format == KVEDGE_FP8_E5M2) halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
  else
    halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xbfff));
  _mm256_storeu_si256((__m256i *)to, halves);
}

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  return floats_of_halves(_mm_loadu_si128((const __m128i *)from), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  return floats_of_halves(load_up_to_16((const int8_t *)from, 2 * n), format);
}

KVEDGE_INLINE floats load_4_for_all(const float *p) { return _mm256_broadcast_ps((const __m128 *)p); }

/* In each lane the sums of four vectors' lanes. */
KVEDGE_INLINE floats sums_in_lanes(const floats x[4]) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

KVEDGE_INLINE void transpose_lanes_of_floats(floats x[2]) {
  const __m256 low = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
  x[0] = low;
}

/* The upper bytes of words are codes. */
KVEDGE_INLINE __m256i halves_of_upper(__m256i words, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return words;
  return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16((short)0xbfff));
}

/* `wide` channels, 32 or 16, from `at` on of two rows, of which n are there: four channels of them side by side, `stride`
 * halves from those to the next four. */
KVEDGE_INLINE void interleave_fp8_rows(const char *const row[2], int at, const int wide, int n,
                                       const kvedge_format format, uint16_t *to, ptrdiff_t stride) {
  __m256i a, b;
  if (wide == 32) {
    a = _mm256_loadu_si256((const __m256i *)(row[0] + at)), b = _mm256_loadu_si256((const __m256i *)(row[1] + at));
  } else {
    a = _mm256_castsi128_si256(load_up_to_16((const int8_t *)row[0] + at, n));
    b = _mm256_castsi128_si256(load_up_to_16((const int8_t *)row[1] + at, n));
  }
  const __m256i eight[2] = {_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)}; /* 0..7, 8..15 of each */
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m256i zero = _mm256_setzero_si256(), of = eight[c / 2];
    const __m256i halves =
        halves_of_upper(c % 2 ? _mm256_unpackhi_epi8(zero, of) : _mm256_unpacklo_epi8(zero, of), format);
    _mm_storeu_si128((__m128i *)(to + c * stride), _mm256_castsi256_si128(halves));
    if (wide == 32) _mm_storeu_si128((__m128i *)(to + (4 + c) * stride), _mm256_extracti128_si256(halves, 1));
  }
}
