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

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  return floats_of_halves(_mm_loadu_si128((const __m128i *)from), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  return floats_of_halves(load_up_to_16((const int8_t *)from, 2 * n), format);
}
