/* Weighted sums of int4, after values.h: rows are interleaved as they are stored, and then 5
 * instructions make two vectors of levels of each one, those of even channels and of odd ones.
 * Sums are put in order at the end.
 *
 * 32 bytes of a row are 64 channels, so rows of two tokens share a register (HALF), four apart.
 * A head batch has rows of 64 bytes.
 *
 * One query or two: sums of all 64 channels stay in registers, or of half of them at a time.
 * More: levels are kept as int8's rows are, and weighted by the same code. (Zen 5 with 256-bit
 * data paths, hot: from four queries on that is 1.1 to 1.2 times as fast as making levels again
 * for every two or three queries, for two queries 0.88.)
 */

/* The rows of tokens 0..3 in lanes 0 and 1, of 4..7 in lanes 2 and 3: interleaved bytes 4c..4c+3 of each 16, for c = 0
 * and 1 into out[0] and [1], for c = 2 and 3 with `high`. (`high`: a constant where this is inlined.) */
KVEDGE_INLINE void interleave_8_rows(const int8_t *from, ptrdiff_t stride, __mmask32 valid, const int high,
                                     __m512i out[2]) {
  __m512i row[4];
  OPAQUE(from);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) row[j] = load_two_rows(from + j * stride, from + (4 + j) * stride, 1, valid);
  interleave_half(row, high, out);
}

/* Channels 16 high .. 16 high + 15 of each 32 from sums of first codes and of second ones: (2, codes), as
 * interleave_8_rows() and level_of() order them. A vector of 16 channels for each lane. */
KVEDGE_INLINE void order_channels(__m512 sums[2][2], __m512i ordered[4]) {
  __m512i quads[4]; /* in lane L: channels 32 L + 4 i .. + 3 of the 16 */
#pragma GCC unroll 2
  for (int c = 0; c < 2; c++) {
    quads[2 * c] = _mm512_castps_si512(_mm512_unpacklo_ps(sums[c][0], sums[c][1]));
    quads[2 * c + 1] = _mm512_castps_si512(_mm512_unpackhi_ps(sums[c][0], sums[c][1]));
  }
  transpose_lanes(quads, ordered);
}

/* acc = acc * rescale + sum * scale of 16 channels, or the first of them. */
KVEDGE_INLINE void add_16(__m512i sum, __mmask16 valid, float scale, float rescale, float *acc) {
  __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(valid, acc), _mm512_set1_ps(rescale));
  _mm512_mask_storeu_ps(acc, valid, _mm512_fmadd_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(scale), kept));
}

/* 64 channels or fewer of a tile of whole blocks, added for `count` queries, one or two: all of them, or of each 32 the
 * lower or the upper half. (`half` and `count`: constants where this is inlined.) */
enum { LOWER, UPPER, ALL };
KVEDGE_INLINE void sum_codes_of(const value_rows *v, int num_channels, const int half, const weighted_sums *w,
                                const int count) {
  const int from_half = half == UPPER, stop_half = half == LOWER ? 1 : 2;
  const __mmask32 there = (__mmask32)first_bytes(bytes_of(num_channels, 4));
  const __m512i levels = int4_levels(0);
  const uint8_t *codes = w->codes;
  __m512i sum[FEW_QUERIES][PLANES][2][2][2]; /* (half, c, first or second code) */
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < PLANES; b++)
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) sum[i][b][k / 4][k / 2 % 2][k % 2] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const int per_step = half == ALL ? 4 : 2; /* lines for 8 tokens */
    const char *lines = take_lines(v->ahead, 2 * per_step);
#pragma GCC unroll 2
    for (int r = 0; r < BLOCK; r += 8, codes += 32, from += 8 * v->token_stride) {
      prefetch_lines(v->ahead, lines + 64 * per_step * (r / 8), per_step, 3);
#pragma GCC unroll 2
      for (int p = from_half; p < stop_half; p++) {
        __m512i bytes[2];
        interleave_8_rows(from, v->token_stride, there, p, bytes);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          const __m512i value = level_of(levels, bytes[k / 2], k % 2);
#pragma GCC unroll 4
          for (int i = 0; i < count; i++)
#pragma GCC unroll 3
            for (int b = 0; b < PLANES; b++)
              multiply_add(&sum[i][b][p][k / 2][k % 2], weights_at(codes + i * CODE_ROW + 4 * b, 1), value);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    float *acc = w->acc + i * w->acc_stride;
#pragma GCC unroll 2
    for (int p = from_half; p < stop_half; p++) {
      __m512 totals[2][2];
      __m512i ordered[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        __m512 total = total_of(PLANES, sum[i][0][p][k / 2][k % 2], sum[i][PLANES > 1][p][k / 2][k % 2],
                                sum[i][PLANES > 2 ? 2 : 0][p][k / 2][k % 2]);
        totals[k / 2][k % 2] = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
      }
      order_channels(totals, ordered);
#pragma GCC unroll 2
      for (int lane = 0; lane < 2; lane++) {
        const int at = 32 * lane + 16 * p, left = num_channels - at;
        if (left <= 0) continue;
        add_16(ordered[lane], (__mmask16)first_bytes(left < 16 ? left : 16), w->scale[i], w->rescale[i], acc + at);
      }
    }
  }
}

/* Levels of 64 channels of a row, or of those that are there, in order. */
KVEDGE_INLINE __m512i levels_of_row(const int8_t *from, __mmask32 valid, __m512i levels) {
  const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(valid, from));
  const __m512i both = _mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4));
  return _mm512_shuffle_epi8(levels, _mm512_and_si512(both, _mm512_set1_epi8(15)));
}

/* keep_values() of int4. */
static __attribute__((noinline)) void keep_levels(const value_rows *v, int num_channels, __m512i *kept) {
  const __mmask32 valid = (__mmask32)first_bytes(bytes_of(num_channels, 4));
  const __m512i levels = int4_levels(0);
  const int padded = (v->num_tokens + BLOCK - 1) / BLOCK * BLOCK;
  for (int t = 0; t < padded; t += 4, kept += 4) {
    __m512i row[4];
    for (int j = 0; j < 4; j++) {
      const int token = t + j < v->num_tokens ? t + j : v->num_tokens - 1;
      row[j] = levels_of_row(block_of(v, token / BLOCK) + token % BLOCK * v->token_stride, valid, levels);
    }
    prefetch_lines(v->ahead, take_lines(v->ahead, 2), 2, 2);
    interleave_4_rows(row, kept);
  }
}

/* 64 channels, or fewer, of a tile, added for all queries. */
static void sum_codes(const value_rows *v, int num_channels, const weighted_sums *w) {
  enum { MOST = SUM_REGISTERS / (4 * PLANES) < SUM_QUERIES ? SUM_REGISTERS / (4 * PLANES) : SUM_QUERIES };
  const int n = w->num_queries;
  if (n <= FEW_QUERIES && v->num_tokens % BLOCK == 0) {
    if (n == 1) sum_codes_of(v, num_channels, ALL, w, 1);
    else sum_codes_of(v, num_channels, LOWER, w, 2), sum_codes_of(v, num_channels, UPPER, w, 2);
    return;
  }
  __m512i *kept = w->kept;
  keep_levels(v, num_channels, kept);
  for (int i = 0, count, passes = (n + MOST - 1) / MOST; passes > 0; i += count, passes--) {
    __m512 totals[SUM_QUERIES][4];
    const uint8_t *codes = w->codes + i * CODE_ROW;
    count = (n - i + passes - 1) / passes; /* as equal as can be */
#define SUM(count) add_rows(v, KEPT, WHOLE, ~0ull, kept, count, PLANES, codes, totals)
    if (count == 1) SUM(1);
    else if (count == 2) SUM(2);
#if PLANES < 3 /* else there are no registers for more */
    else if (count == 3) SUM(3);
#endif
#if PLANES == 1
    else SUM(4);
#endif
#undef SUM
    for (int j = i; j < i + count; j++)
      add_totals(totals[j - i], first_bytes(num_channels), w->scale[j], w->rescale[j], w->acc + j * w->acc_stride);
  }
}

void WEIGHTED_SUM(int4)(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to) {
  char *scratch = p->scratch;
  uint8_t *codes = kvedge_take_scratch(&scratch, KVEDGE_QUERY_ROWS * CODE_ROW);
  float scale[KVEDGE_QUERY_ROWS];
  lines_ahead ahead = lines_of(values, bytes_of(values->dim, 4));
  encode_weights(p->num_queries, PLANES, p->p, values->scales, 0, values->num_tokens, codes, scale);
  value_rows rows = {values->blocks, values->offset, values->token_stride, values->num_tokens, &ahead, values};
  weighted_sums w = {p->num_queries, codes, scale, to->rescale, to->acc, to->stride, (__m512i *)scratch};
  for (int d = 0; d < values->dim; d += 64, w.acc += 64, rows.offset += 32) sum_codes(&rows, values->dim - d, &w);
}

/* ---- A head batch: see scores_of_heads.c ---- */

/* 64 bytes of the rows of a tile from `unit` on, one of all heads' units of 16 channels, added for the heads that have
 * them. Each of the four lanes has two units, which may be of two heads where they are `apart`; with `masked` tokens or
 * bytes may be missing. (`apart` and `masked`: constants where this is inlined.) */
KVEDGE_INLINE void sum_codes_of_heads(const value_rows *v, const int apart, const int masked, int unit, int dim,
                                      const uint8_t *codes, const float *scale, const float *rescale, float *acc) {
  enum { UNITS = 8 };
  const int of_head = dim / 16, all = HEADS * of_head, first = unit / of_head, row_bytes = HEADS * dim / 2;
  const __mmask64 valid = first_bytes(row_bytes - 8 * unit);
  const __m512i levels = int4_levels(0);
  __mmask16 later[2][2]; /* lanes whose first, or second, unit is of the next head or one after it; of one after it */
  for (int u = 0; u < 2; u++)
    for (int h = 0; h < 2; h++) {
      const int before = (first + 1 + h) * of_head - unit; /* units of the vector that are of earlier heads */
      later[u][h] = (__mmask16)(first + 1 + h < HEADS && before < UNITS ? 0xffffu << 4 * ((before + 1 - u) / 2) : 0);
    }
  const int to_next = first + 1 < HEADS ? CODE_ROW : 0, to_last = first + 2 < HEADS ? 2 * CODE_ROW : 0;
  codes += first * CODE_ROW;
  __m512i sum[PLANES][2][2][2]; /* (c / 2, c % 2, first or second code) */
#pragma GCC unroll 3
  for (int b = 0; b < PLANES; b++)
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) sum[b][k / 4][k / 2 % 2][k % 2] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = block_of(v, t / BLOCK);
    const char *lines = take_lines(v->ahead, BLOCK);
    const int last = v->num_tokens - t - 1; /* of the block's rows */
#pragma GCC unroll 4
    for (int r = 0; r < BLOCK; r += 4, codes += 16) {
      __m512i row[4], bytes[4];
      if (masked) {
        for (int j = 0; j < 4; j++)
          row[j] = _mm512_maskz_loadu_epi8(valid, from + (r + j < last ? r + j : last) * v->token_stride);
      } else load_values(from + r * v->token_stride, NULL, v->token_stride, WHOLE, ~0ull, row);
      interleave_4_rows(row, bytes);
      prefetch_lines(v->ahead, lines + 64 * r, 4, 4);
      __m512i weights[PLANES][2];
#pragma GCC unroll 3
      for (int b = 0; b < PLANES; b++)
#pragma GCC unroll 2
        for (int u = 0; u <= apart; u++) {
          weights[b][u] =
              _mm512_mask_blend_epi32(later[u][0], four_for_all(codes + 4 * b), four_for_all(codes + to_next + 4 * b));
          if (apart)
            weights[b][u] = _mm512_mask_blend_epi32(later[u][1], weights[b][u], four_for_all(codes + to_last + 4 * b));
        }
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++) {
        const __m512i value = level_of(levels, bytes[k / 2], k % 2);
#pragma GCC unroll 3
        for (int b = 0; b < PLANES; b++)
          multiply_add(&sum[b][k / 4][k / 2 % 2][k % 2], weights[b][apart ? k / 4 : 0], value);
      }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < 2; p++) {
    __m512 totals[2][2];
    __m512i ordered[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
      totals[k / 2][k % 2] = total_of(PLANES, sum[0][p][k / 2][k % 2], sum[PLANES > 1][p][k / 2][k % 2],
                                      sum[PLANES > 2 ? 2 : 0][p][k / 2][k % 2]);
    order_channels(totals, ordered);
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
      const int at = unit + 2 * lane + p, head = at / of_head;
      if (at < all) add_16(ordered[lane], 0xffff, scale[head], rescale[head], acc + 16 * at);
    }
  }
}

void WEIGHTED_SUM(of_heads_int4)(const kvedge_probabilities *p, const kvedge_tile *values,
                                 const kvedge_accumulators *to) {
  _Alignas(64) uint8_t codes[HEADS * CODE_ROW];
  float scale[HEADS];
  const int dim = values->dim;
  lines_ahead ahead = lines_of(values, HEADS * dim / 2);
  encode_weights(HEADS, PLANES, p->p, values->scales, values->scale_stride, values->num_tokens, codes, scale);
  value_rows rows = {values->blocks, values->offset, values->token_stride, values->num_tokens, &ahead, values};
  const int whole = values->num_tokens % BLOCK == 0 && dim % 32 == 0;
  for (int unit = 0; unit < HEADS * dim / 16; unit += 8, rows.offset += 64) {
    if (whole) sum_codes_of_heads(&rows, 0, 0, unit, dim, codes, scale, to->rescale, to->acc);
    else sum_codes_of_heads(&rows, 1, 1, unit, dim, codes, scale, to->rescale, to->acc);
  }
}
