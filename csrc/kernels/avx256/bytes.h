/* Products of 8 bits on the 256-bit paths (one plane: precision_bits 8), with keys and values of int8 and int4. Part of
 * avx2.c and avxvnni.c: queries and scores; before scores.h, which uses it. sum_bytes.h has the weighted sums. Four
 * products of bytes are added up in a lane of 32 bits, by multiply_add_fours() of the path:
 *
 *   vpdpbusd                           on avxvnni
 *   vpmaddubsw, vpmaddwd, vpaddd       on avx2
 *
 * One factor is unsigned: keys, raised by 128, which a query's offset takes off again; and weights. Columns
 * of keys are made for both paths by bytes.c.
 *
 * vpmaddubsw adds two products in 16 bits and saturates: 2 x 255 x 64 fit, so a query's codes go to 64, and weights,
 * 2 x 127 x 128, to 127. But vpmaddwd, which widens the two sums, multiplies each: two neighbours have a multiplier of
 * their own. So the unit of a query or of 64 tokens' weights is that of 16 bits, and a code is off by 1/128 or 1/254 of
 * the larger neighbour, where a code of 8 bits of vpdpbusd is off by 1/254 of the largest of all: on SmolLM2-135M an
 * eighth of what seven bits without multipliers cost, a fifth of eight bits (docs/numerics.md). */

#define BYTE_MULTIPLIER_MAX 510.0f /* of a query: as CHANNELS_OF_TWO_BYTES has it for integers of 16 bits */

enum { BYTES_OF_32 = 64 }; /* a query's codes of 32 channels, then their 16 multipliers */

/* Four bytes in all lanes: as a float, since GCC else makes one load of two neighbours, and takes them apart. */
KVEDGE_INLINE __m256i broadcast_word(const void *p) { return _mm256_castps_si256(_mm256_broadcast_ss(p)); }

/* ---- Queries ---- */

/* 16 multipliers of 32 floats, each at least so large that its two codes are at most BYTE_QUERY_MAX; the floats become
 * codes. */
KVEDGE_INLINE __m256i divide_by_multipliers(__m256 x[4]) {
  __m256i multipliers[2];
  for (int k = 0; k < 2; k++) {
    __m256 m[2];
    for (int j = 0; j < 2; j++) {
      __m256 *of_8 = &x[2 * k + j];
      const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), *of_8);
      const __m256 larger = _mm256_max_ps(size, _mm256_permute_ps(size, 0xb1));
      m[j] = _mm256_max_ps(_mm256_ceil_ps(_mm256_mul_ps(larger, _mm256_set1_ps(1.0f / BYTE_QUERY_MAX))),
                           _mm256_set1_ps(1.0f));
      *of_8 = _mm256_div_ps(*of_8, m[j]);
    }
    const __m256i of_pairs = _mm256_cvtps_epi32(_mm256_shuffle_ps(m[0], m[1], 0x88));
    multipliers[k] = _mm256_permute4x64_epi64(of_pairs, 0xd8);
  }
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(multipliers[0], multipliers[1]), 0xd8);
}

/* A query in one plane, as encode_query of kernels.h has it. Of each 8 channels those of int4 lie with the even ones
 * first. (bits: of keys.) */
static __attribute__((noinline)) void encode_query_bytes(const float *x, int dim, float factor, float largest, int bits,
                                                         int8_t *codes, float *scale, int32_t *offsets) {
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' lanes */
  const __m256i order =
      bits == 4 ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7) : _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const float most = BYTE_QUERY_MAX * (!BYTE_MULTIPLIERS              ? 1.0f
                                       : dim <= CHANNELS_OF_TWO_BYTES ? BYTE_MULTIPLIER_MAX
                                                                      : BYTE_MULTIPLIER_MAX / 2);
  const float inverse = largest > QUERY_NOTHING ? most / largest : 0.0f;
  __m256i total = _mm256_setzero_si256(), multipliers = _mm256_set1_epi16(1);
#pragma GCC unroll 1
  for (int d = 0; d < kvedge_padded_channels(dim); d += 32, codes += BYTES_OF_32) {
    __m256 of_32[4];
#pragma GCC unroll 1
    for (int k = 0; k < 4; k++) {
      const int at = d + 8 * k;
      const __m256 values = _mm256_maskload_ps(x + (at < dim ? at : 0), first_lanes(dim - at));
      const __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(values, _mm256_set1_ps(factor)), _mm256_set1_ps(inverse));
      of_32[k] = _mm256_permutevar8x32_ps(scaled, order);
    }
    if (BYTE_MULTIPLIERS) multipliers = divide_by_multipliers(of_32);
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(of_32[0]), _mm256_cvtps_epi32(of_32[1]));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(of_32[2]), _mm256_cvtps_epi32(of_32[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order);
    _mm256_storeu_si256((__m256i *)codes, bytes);
    _mm256_storeu_si256((__m256i *)(codes + 32), multipliers);
    multiply_add_fours(&total, _mm256_set1_epi8(1), bytes, multipliers);
  }
  uint32_t lane[8], sum = 0;
  _mm256_storeu_si256((__m256i *)lane, total);
#pragma GCC unroll 1
  for (int j = 0; j < 8; j++) sum += lane[j];
  _mm_storeu_si128((__m128i *)offsets, _mm_setzero_si128());
  offsets[0] = (int32_t)(0u - 128 * sum);
  *scale = inverse > 0.0f ? largest / most : 0.0f;
}

/* ---- Scores ---- */

KVEDGE_INLINE __m256i unsigned_keys(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }

/* The last n < 32 bytes of rows from `at` on, with zeros after them. */
static __attribute__((noinline)) void copy_last_bytes(const int8_t *const row[8], int rows, int at, int n,
                                                      int8_t out[8][32]) {
#pragma GCC unroll 1
  for (int t = 0; t < rows; t++) _mm256_storeu_si256((__m256i *)out[t], load_up_to_32(row[t] + at, n));
}

/* Sums of products of `rows` rows of int8 with the codes of `count` queries: (count, rows). (rows and count: constants
 * where this is inlined.) */
KVEDGE_INLINE void dot_bytes(const int8_t *codes, ptrdiff_t stride, const int count, const int8_t *const *from,
                             const int rows, int dim, __m256i *sum) {
  const int whole = dim / 32 * 32;
  int8_t last[8][32];
  if (whole < dim) copy_last_bytes(from, rows, whole, dim - whole, last);
#pragma GCC unroll 8
  for (int i = 0; i < count * rows; i++) sum[i] = _mm256_setzero_si256();
  for (int is_whole = whole == dim; is_whole < 2; is_whole++) { /* the last bytes first: no call between products */
    const int8_t *row[8], *code = is_whole ? codes : codes + whole / 32 * BYTES_OF_32;
#pragma GCC unroll 8
    for (int t = 0; t < rows; t++) row[t] = is_whole ? from[t] : last[t];
    for (ptrdiff_t at = 0, end = is_whole ? whole : 32; at < end; at += 32, code += BYTES_OF_32)
#pragma GCC unroll 8
      for (int t = 0; t < rows; t++) {
        const __m256i key = unsigned_keys(_mm256_loadu_si256((const __m256i *)(row[t] + at)));
#pragma GCC unroll 2
        for (int i = 0; i < count; i++) {
          const __m256i *of_32 = (const __m256i *)(code + i * stride);
          multiply_add_fours(sum + i * rows + t, key, _mm256_loadu_si256(of_32), _mm256_loadu_si256(of_32 + 1));
        }
      }
  }
}
