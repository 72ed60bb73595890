/* Vectors of 8 floats as kernels/float_rows.h wants them. Part of avx2.c and avxvnni.c, after scores.h. */
enum { FLOATS = 8, CONVERTED_QUERIES = 4, PART_LOADS_ARE_CHEAP = 0 };
typedef __m256 floats;

KVEDGE_INLINE floats zero_floats(void) { return _mm256_setzero_ps(); }
KVEDGE_INLINE floats all_floats(float x) { return _mm256_set1_ps(x); }
KVEDGE_INLINE floats load_floats(const float *p) { return _mm256_loadu_ps(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { _mm256_storeu_ps(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) { _mm256_maskstore_ps(p, first_lanes(n), x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return _mm256_mul_ps(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
KVEDGE_INLINE __m256 sums_of_8(const floats x[8]) { return reduce_add_8(x); }

KVEDGE_INLINE floats floats_of_halves(__m128i halves, const kvedge_format format) {
  if (format == KVEDGE_FLOAT16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The upper byte of a half is an e5m2. Of an e4m3 the sign, extended to bits 7 to 15, is kept in bit 15. */
KVEDGE_INLINE floats floats_of_fp8(__m128i codes, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
  const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)0xbfff)));
}

KVEDGE_INLINE int is_fp8(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 || format == KVEDGE_FP8_E5M2; }

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  if (is_fp8(format)) return floats_of_fp8(_mm_loadl_epi64((const __m128i *)from), format);
  return floats_of_halves(_mm_loadu_si128((const __m128i *)from), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  if (is_fp8(format)) return floats_of_fp8(load_up_to_16((const int8_t *)from, n), format);
  return floats_of_halves(load_up_to_16((const int8_t *)from, 2 * n), format);
}
