/* Kernels of rows, of floats and of scales, of both 256-bit paths. Part of floats.c. */
static uint32_t KVEDGE_NAME(abs_max_bits)(const float *x, size_t n) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i a = _mm256_setzero_si256(), b = a;
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    a = _mm256_max_epu32(a, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), magnitude));
    b = _mm256_max_epu32(b, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i + 8)), magnitude));
  }
  uint32_t lane[8], largest = 0;
  _mm256_storeu_si256((__m256i *)lane, _mm256_max_epu32(a, b));
  for (int j = 0; j < 8; j++) largest = lane[j] > largest ? lane[j] : largest;
  for (; i < n; i++) {
    uint32_t bits = kvedge_bits_of_float(x[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

static void KVEDGE_NAME(quantize)(const float *x, size_t n, float inverse, int8_t *codes) {
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' lanes */
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i integers_of[4];
    for (int j = 0; j < 4; j++)
      integers_of[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * j), factor));
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(integers_of[0], integers_of[1]),
                                        _mm256_packs_epi32(integers_of[2], integers_of[3]));
    _mm256_storeu_si256((__m256i *)(codes + i), _mm256_permutevar8x32_epi32(packed, order));
  }
  for (; i + 8 <= n; i += 8) {
    __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    __m128i lanes = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storel_epi64((__m128i *)(codes + i), _mm_packs_epi16(lanes, lanes));
  }
  for (; i < n; i++) codes[i] = (int8_t)_mm_cvtss_si32(_mm_mul_ss(_mm_load_ss(x + i), _mm_set_ss(inverse)));
}

/* 2^x for x <= 0, as exp2_nonpositive(). */
KVEDGE_INLINE __m256 exp2_of(__m256 x) {
  const __m256 round = _mm256_set1_ps(ROUND_TO_INTEGER);
  __m256 clamped = _mm256_max_ps(x, _mm256_set1_ps(-126.0f));
  __m256 rounded = _mm256_add_ps(clamped, round);
  __m256 f = _mm256_sub_ps(clamped, _mm256_sub_ps(rounded, round)), y = _mm256_set1_ps(EXP2_5);
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(EXP2_4));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(EXP2_3));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(EXP2_2));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(EXP2_1));
  y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0f));
  __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
  y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  return _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(EXP2_NOTHING), _CMP_GT_OQ));
}

static void KVEDGE_NAME(softmax)(float *scores, int num_queries, int num_tokens, const float *factor, float *max,
                                 float *sum, float *rescale) {
  int padded = (num_tokens + 7) / 8 * 8;
  float exponent[KVEDGE_QUERY_ROWS]; /* old maximum minus new, times factor */
  for (int i = 0; i < num_queries; i++) {
    float *row = scores + i * KVEDGE_TILE;
    for (int t = num_tokens; t < padded; t++) row[t] = -INFINITY;
    __m256 largest = _mm256_loadu_ps(row);
    for (int t = 8; t < padded; t += 8) largest = _mm256_max_ps(largest, _mm256_loadu_ps(row + t));
    float tile_max = reduce_max(largest), old = max[i];
    max[i] = old > tile_max ? old : tile_max;
    exponent[i] = (old - max[i]) * factor[i];
  }
  for (int i = 0; i < num_queries; i += 8) {
    __m256i valid = first_lanes(num_queries - i);
    _mm256_maskstore_ps(rescale + i, valid, exp2_of(_mm256_maskload_ps(exponent + i, valid)));
  }
  for (int i = 0; i < num_queries; i++) {
    float *row = scores + i * KVEDGE_TILE;
    __m256 m = _mm256_set1_ps(max[i]), f = _mm256_set1_ps(factor[i]), total = _mm256_setzero_ps();
    for (int t = 0; t < padded; t += 8) {
      __m256 p = exp2_of(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(row + t), m), f));
      _mm256_storeu_ps(row + t, p);
      total = _mm256_add_ps(total, p);
    }
    if (padded % KVEDGE_BLOCK) _mm256_storeu_ps(row + padded, _mm256_setzero_ps());
    sum[i] = sum[i] * rescale[i] + reduce_add(total);
  }
}

static uint64_t KVEDGE_NAME(read_bytes)(const void *p, size_t n) {
  const char *bytes = p;
  __m256i lane[8];
  for (int j = 0; j < 8; j++) lane[j] = _mm256_setzero_si256();
  for (size_t i = 0; i < n; i += 256)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      lane[j] = _mm256_or_si256(lane[j], _mm256_load_si256((const __m256i *)(bytes + i + 32 * j)));
  uint64_t lanes[4], all = 0;
  for (int j = 1; j < 8; j++) lane[0] = _mm256_or_si256(lane[0], lane[j]);
  _mm256_storeu_si256((__m256i *)lanes, lane[0]);
  for (int j = 0; j < 4; j++) all |= lanes[j];
  return all;
}

/* transpose_scales of whole fours of tokens; returns how many. (`type`, and `all` for four
 * columns: constants where this is inlined. Fewer columns of float32 only.) */
KVEDGE_INLINE int transpose_fours(const char *scales, const kvedge_scale_type type, const int all,
                                  ptrdiff_t token_stride, int num_tokens, int num_columns, float factor, float *out,
                                  ptrdiff_t out_stride) {
  const __m128i columns = _mm256_castsi256_si128(first_lanes(num_columns));
  int t = 0;
  for (; t + 4 <= num_tokens; t += 4) {
    __m128 row[4];
    for (int i = 0; i < 4; i++, scales += token_stride)
      row[i] = type == KVEDGE_SCALE_FLOAT16 ? _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)scales))
               : all                        ? _mm_loadu_ps((const float *)scales)
                                            : _mm_maskload_ps((const float *)scales, columns);
    _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
      if (all || c < num_columns) _mm_storeu_ps(out + c * out_stride + t, _mm_mul_ps(row[c], _mm_set1_ps(factor)));
  }
  return t;
}

static void KVEDGE_NAME(transpose_scales)(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride,
                                          int num_tokens, int num_columns, float factor, float *out,
                                          ptrdiff_t out_stride) {
  int done = 0;
#define TRANSPOSE(type, all)                                                                                           \
  transpose_fours(scales, type, all, token_stride, num_tokens, num_columns, factor, out, out_stride)
  if (type == KVEDGE_SCALE_FLOAT32 && num_columns == 4) done = TRANSPOSE(KVEDGE_SCALE_FLOAT32, 1);
  else if (type == KVEDGE_SCALE_FLOAT32) done = TRANSPOSE(KVEDGE_SCALE_FLOAT32, 0);
  else if (num_columns == 4) done = TRANSPOSE(KVEDGE_SCALE_FLOAT16, 1);
  else if (num_columns == 1) /* as of q8_0, whose scales lie among the codes */
    for (const char *from = scales; done + 8 <= num_tokens; done += 8, from += 8 * token_stride)
      _mm256_storeu_ps(out + done,
                       _mm256_mul_ps(_mm256_cvtph_ps(kvedge_eight_halves(from, token_stride)), _mm256_set1_ps(factor)));
#undef TRANSPOSE
  transpose_scales_portable((const char *)scales + done * token_stride, type, token_stride, num_tokens - done,
                            num_columns, factor, out + done, out_stride);
}

const kvedge_row_kernels kvedge_rows_avx256 = {
    .abs_max_bits = KVEDGE_NAME(abs_max_bits),
    .quantize = KVEDGE_NAME(quantize),
    .dequantize = dequantize_portable,
    .transpose_scales = KVEDGE_NAME(transpose_scales),
    .softmax = KVEDGE_NAME(softmax),
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .read_bytes = KVEDGE_NAME(read_bytes),
};
