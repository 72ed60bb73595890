/* Vectors of 16 floats as kernels/floats.h wants them. Part of avx512vnni.c.
 *
 *   vcvtph2ps zmm, ymm        float16 to float32          Intel: p0 + p5, Zen 4: 2 uops
 *   vpmovzxwd, vpslld         bfloat16 to float32         p5, p0
 *   vpmov(s,z)xbw, vpsllw     FP8 to float16              p5, p0
 *   vfmadd231ps zmm           products                    4 cycles, p05; Zen 4: one per cycle, Zen 5 of servers: two
 */
enum { FLOATS = 16, WIDE = 64, SUMS = 16, MOST_QUERIES = 8, MASKED_LOADS_ARE_CHEAP = 1 };
#define SUMS_OF_16 1

KVEDGE_INLINE int is_fp8(const kvedge_format format) { return format == KVEDGE_FP8_E4M3 || format == KVEDGE_FP8_E5M2; }

KVEDGE_INLINE ptrdiff_t channel_bytes(const kvedge_format format) {
  return format == KVEDGE_FLOAT32 ? 4 : is_fp8(format) ? 1 : 2;
}

typedef __m512 floats;
#define IN_REGISTER(x) __asm__("" : "+v"(x))

KVEDGE_INLINE __mmask16 first_lanes(int n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

KVEDGE_INLINE floats zero_floats(void) { return _mm512_setzero_ps(); }
KVEDGE_INLINE floats all_floats(float x) { return _mm512_set1_ps(x); }
KVEDGE_INLINE floats load_floats(const float *p) { return _mm512_loadu_ps(p); }
KVEDGE_INLINE void store_floats(float *p, floats x) { _mm512_storeu_ps(p, x); }
KVEDGE_INLINE floats load_first_floats(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
KVEDGE_INLINE void store_first_floats(float *p, int n, floats x) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
KVEDGE_INLINE floats multiply_floats(floats a, floats b) { return _mm512_mul_ps(a, b); }
KVEDGE_INLINE floats multiply_add_floats(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }

/* Of 16 vectors the sums, lane i of the i-th; of n, the others repeat these. (n: a constant where this is inlined.) */
KVEDGE_INLINE floats sums_of(const floats *x, const int n) {
  __m512 four[4], eight[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 a = x[4 * i % n], b = x[(4 * i + 1) % n], c = x[(4 * i + 2) % n], d = x[(4 * i + 3) % n];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88), _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}

KVEDGE_INLINE void store_sums(floats sums, const int queries, const int rows, float *scores) {
  if (rows == 8) {
    _mm256_storeu_ps(scores, _mm512_castps512_ps256(sums));
    if (queries > 1) _mm256_storeu_ps(scores + KVEDGE_TILE, _mm512_extractf32x8_ps(sums, 1));
    return;
  }
  const __m128 lane[4] = {_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1),
                          _mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3)};
#pragma GCC unroll 8
  for (int i = 0; i < queries; i++, scores += KVEDGE_TILE)
    if (rows == 4) _mm_storeu_ps(scores, lane[i % 4]);
    else if (i % 2 == 0) _mm_storel_pi((__m64 *)scores, lane[i / 2]);
    else _mm_storeh_pi((__m64 *)scores, lane[i / 2]);
}

KVEDGE_INLINE floats floats_of_halves(__m256i halves, const kvedge_format format) {
  if (format == KVEDGE_FLOAT16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* The upper byte of a half is an e5m2. Of an e4m3 the sign, extended to bits 7 to 15, is kept in bit 15. */
KVEDGE_INLINE __m512i halves_of_fp8(__m256i codes, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return _mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 8);
  return _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7), _mm512_set1_epi16((short)0xbfff));
}

KVEDGE_INLINE floats floats_of_fp8(__m128i codes, const kvedge_format format) {
  if (format == KVEDGE_FP8_E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff)));
}

KVEDGE_INLINE floats load_channels(const char *from, const kvedge_format format) {
  if (format == KVEDGE_FLOAT32) return load_floats((const float *)from);
  if (is_fp8(format)) return floats_of_fp8(_mm_loadu_si128((const __m128i *)from), format);
  return floats_of_halves(_mm256_loadu_si256((const __m256i *)from), format);
}

KVEDGE_INLINE void load_two_vectors(const char *from, const kvedge_format format, floats x[2]) {
  if (is_fp8(format)) {
    const __m512i halves = halves_of_fp8(_mm256_loadu_si256((const __m256i *)from), format);
    x[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    x[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return;
  }
  x[0] = load_channels(from, format), x[1] = load_channels(from + FLOATS * channel_bytes(format), format);
}

KVEDGE_INLINE floats load_first_channels(const char *from, const kvedge_format format, int n) {
  if (format == KVEDGE_FLOAT32) return load_first_floats((const float *)from, n);
  if (is_fp8(format)) return floats_of_fp8(_mm_maskz_loadu_epi8(first_lanes(n), from), format);
  return floats_of_halves(_mm256_maskz_loadu_epi16(first_lanes(n), from), format);
}

KVEDGE_INLINE floats load_4_for_all(const float *p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

/* In each lane the sums of four vectors' lanes. */
KVEDGE_INLINE floats sums_in_lanes(const floats x[4]) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

KVEDGE_INLINE void transpose_lanes_of_floats(floats x[4]) {
  __m512i in[4], out[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) in[i] = _mm512_castps_si512(x[i]);
  transpose_lanes(in, out);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) x[i] = _mm512_castsi512_ps(out[i]);
}

/* n channels from `at` on of four rows, WIDE or up to 32 (a constant where it is WIDE): four
 * channels and the 16 after them side by side, `stride` halves from those to the next four. */
KVEDGE_INLINE void interleave_fp8_rows(const char *const row[4], int at, int n, const kvedge_format format,
                                       uint16_t *to, ptrdiff_t stride) {
  __m512i of_row[4], four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    of_row[i] = n == WIDE ? _mm512_loadu_si512(row[i] + at)
                          : _mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)first_bytes(n), row[i] + at));
  transpose_in_lanes(of_row, four);
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, to += stride) {
    _mm512_storeu_si512(to, halves_of_fp8(_mm512_castsi512_si256(four[c]), format));
    if (n == WIDE) _mm512_storeu_si512(to + 4 * stride, halves_of_fp8(_mm512_extracti64x4_epi64(four[c], 1), format));
  }
}
