/* Vectors of 16 floats as kernels/float_rows.h wants them. Part of avx512vnni.c.
 *
 *   vcvtph2ps zmm, ymm        float16 to float32          Intel: p0 + p5, Zen 4: 2 uops
 *   vpmovzxwd, vpslld         bfloat16 to float32         p5, p0
 *   vpmov(s,z)xbw, vpsllw     FP8 to float16              p5, p0
 *   vfmadd231ps zmm           products                    4 cycles, p05; Zen 4: one per cycle
 */
enum { FLOATS = 16, CONVERTED_QUERIES = 8, PART_LOADS_ARE_CHEAP = 1 };
typedef __m512 floats;

KVEDGE_INLINE __mmask16 first_lanes(int n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

KVEDGE_INLINE floats zero_floats(void) { return _mm512_setzero_ps(); }
KVEDGE_INLINE floats all_floats(float x) { return _mm512_set1_ps(x); }
KVEDGE_INLINE floats load_floats(const float *p) { return _mm512_loadu_ps(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { _mm512_storeu_ps(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return _mm512_mul_ps(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
KVEDGE_INLINE __m256 sums_of_8(const floats x[8]) { return _mm256_set_m128(reduce_4(ADD, x + 4), reduce_4(ADD, x)); }

KVEDGE_INLINE floats floats_of_halves(__m256i halves, const kvedge_format format) {
  if (format == KVEDGE_FLOAT16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* The upper byte of a half is an e5m2. Of an e4m3 the sign, extended to bits 7 to 15, is kept in bit 15. */
KVEDGE_INLINE floats floats_of_fp8(__m128i codes, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff)));
}

KVEDGE_INLINE int is_fp8(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 || format == KVEDGE_FP8_E5M2; }

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  if (is_fp8(format)) return floats_of_fp8(_mm_loadu_si128((const __m128i *)from), format);
  return floats_of_halves(_mm256_loadu_si256((const __m256i *)from), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  if (is_fp8(format)) return floats_of_fp8(_mm_maskz_loadu_epi8(first_lanes(n), from), format);
  return floats_of_halves(_mm256_maskz_loadu_epi16(first_lanes(n), from), format);
}
