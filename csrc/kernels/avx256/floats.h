/* Vectors of 8 floats as kernels/floats.h wants them. Part of floats.c, after common.h. */
enum { WIDE = 32, SUMS = 8, MOST_QUERIES = 4, MASKED_LOADS_ARE_CHEAP = 0 };

KVEDGE_INLINE int is_fp8(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 || format == KVEDGE_FP8_E5M2; }

KVEDGE_INLINE ptrdiff_t channel_bytes(const kvedge_format format) {
  return format == KVEDGE_FLOAT32 ? 4 : is_fp8(format) ? 1 : 2;
}

#define IN_REGISTER(x) __asm__("" : "+x"(x))

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

/* The upper bytes of lanes of 16 bits are codes. The upper byte of a half is an e5m2. Of an e4m3
 * the sign, extended to two bits, is kept in the first. */
KVEDGE_INLINE __m256i halves_of_upper(__m256i int16, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return int16;
  return _mm256_and_si256(_mm256_srai_epi16(int16, 1), _mm256_set1_epi16((short)0xbfff));
}

KVEDGE_INLINE floats floats_of_fp8(__m128i codes, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
  const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbfff)));
}

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  if (is_fp8(format)) return floats_of_fp8(_mm_loadl_epi64((const __m128i *)from), format);
  return floats_of_halves(_mm_loadu_si128((const __m128i *)from), format);
}

KVEDGE_INLINE void load_two_vectors(const char *from, const kvedge_format format, floats x[2]) {
  if (format == KVEDGE_FP8_E4M3) {
    const __m256i int16 = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
    const __m256i halves = _mm256_and_si256(int16, _mm256_set1_epi16((short)0xbfff));
    x[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    x[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    return;
  }
  x[0] = load_channels(from, format), x[1] = load_channels(from + FLOATS * channel_bytes(format), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  if (is_fp8(format)) return floats_of_fp8(load_up_to_16((const int8_t *)from, n), format);
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

/* n channels from `at` on of two rows, up to 32: four channels and the 16 after them side by
 * side, `stride` halves from those to the next four. */
KVEDGE_INLINE void interleave_fp8_rows(const char *const row[2], int at, int n, const kvedge_format format,
                                       uint16_t *to, ptrdiff_t stride) {
  const __m256i zero = _mm256_setzero_si256(), a = load_up_to_32((const int8_t *)row[0] + at, n),
                b = load_up_to_32((const int8_t *)row[1] + at, n);
  const __m256i eight[2] = {_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)};
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, to += stride) {
    const __m256i int16 = c % 2 ? _mm256_unpackhi_epi8(zero, eight[c / 2]) : _mm256_unpacklo_epi8(zero, eight[c / 2]);
    _mm256_storeu_si256((__m256i *)to, halves_of_upper(int16, format));
  }
}
