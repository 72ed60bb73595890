/* Weighted sums of ggml's blocks on the AVX-512 VNNI path, in two planes.
 *
 * Codes of 4 bits are unsigned, so it is weights, which here may be negative, that vpdpbusd takes as signed: two digits of 8
 * bits. That is a bit less than for values of int8, so only 64 tokens share a scale: as exact as 16 bits over a tile of 256;
 * 32 do where three planes are wanted (by_32). What a lowest level of 0 adds is taken off where sums start.
 *
 * Rows of four tokens are interleaved byte by byte as they are stored, of two blocks and of four more tokens in the other
 * lanes. For several queries they are kept, and the lower and the upper codes summed one after the other.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/common.h"

#define WEIGHT_MAX_OF_DIGITS 32638.0f /* 127 * (256 + 1), a little less because products round */

enum {
  STEP = 8,         /* tokens that are added together */
  SUM_QUERIES = 3,  /* whose sums stay in registers */
  MOST_CHUNKS = 8,  /* of a tile */
  AT_A_TIME = 4,    /* chunks whose maxima are found together */
  CODES_OF_16 = 64, /* bytes: weights of 16 tokens, of two blocks */
};

/* Weights of two blocks, the first one's scales and the second one's in turn. */
typedef struct {
  _Alignas(64) int8_t codes[SEVERAL_QUERIES][KVEDGE_TILE_BLOCKS][CODES_OF_16]; /* high digits of 8 tokens, of the next
                                                                                 * 8; low ones: of four tokens of a block,
                                                                                 * of the other, of the next four */
  __m512i start[SEVERAL_QUERIES][MOST_CHUNKS][2];                              /* of sums of both digits */
  float scale[SEVERAL_QUERIES][MOST_CHUNKS][2];
  __m512i kept[KVEDGE_TILE / STEP][4]; /* rows, interleaved */
} block_weights;

/* Of a vector's four dwords that are the same in all lanes, lane L has the L-th. */
KVEDGE_INLINE __m512i one_for_each_lane(__m512i fours) {
  const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_castps_si512(_mm512_permutevar_ps(_mm512_castsi512_ps(fours), lane));
}

KVEDGE_INLINE __m512 weights_of_16(const float *p, const float *scale, int t) {
  return _mm512_mul_ps(_mm512_loadu_ps(p + t), _mm512_loadu_ps(scale + t));
}

/* The scales of a block's weights, chunk by chunk, and what makes codes of weights. */
KVEDGE_INLINE void scale_chunks(const float *p, const float *v_scale, int num_tokens, int together, float (*scale)[2],
                                float *factor) {
  const __m128 most = _mm_set1_ps(WEIGHT_MAX_OF_DIGITS);
  for (int k = 0; k * together < num_tokens; k += AT_A_TIME) {
    __m512 largest[AT_A_TIME];
    float found[AT_A_TIME];
#pragma GCC unroll 4
    for (int j = 0; j < AT_A_TIME; j++) {
      largest[j] = _mm512_setzero_ps();
      const int first = (k + j) * together, stop = first + together < num_tokens ? first + together : num_tokens;
      for (int t = first; t < stop; t += 16)
        largest[j] = _mm512_max_ps(largest[j], _mm512_abs_ps(weights_of_16(p, v_scale, t)));
    }
    const __m128 of_4 = reduce_4(MAX, largest);
    const __mmask8 some = _mm_cmp_ps_mask(of_4, _mm_set1_ps(WEIGHT_NOTHING), _CMP_GT_OQ);
    _mm_storeu_ps(factor + k, _mm_maskz_div_ps(some, most, of_4));
    _mm_storeu_ps(found, _mm_maskz_div_ps(some, of_4, most));
    for (int j = 0; j < AT_A_TIME; j++) scale[k + j][0] = found[j];
  }
}

/* Weights of 16 tokens as two signed digits, as split_bytes() leaves them. */
KVEDGE_INLINE __m512i digits_of_16(const float *p, const float *v_scale, int t, float factor) {
  const __m512i carry = _mm512_set1_epi32(0x8080); /* as in encode_query */
  __m512 number = _mm512_mul_ps(weights_of_16(p, v_scale, t), _mm512_set1_ps(factor));
  const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(number), _mm512_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
  number = _mm512_mask_add_ps(number, small, number, _mm512_loadu_ps(kvedge_dither + t));
  const __m512i code = _mm512_cvtps_epi32(number);
  return split_bytes(_mm512_xor_si512(_mm512_add_epi32(code, carry), carry), 2);
}

/* Weights of all queries with the scales of two blocks; `second` NULL: of one. `zero` is what values are above their
 * levels. */
KVEDGE_INLINE void encode_block_weights(const kvedge_probabilities *probabilities, const float *first,
                                        const float *second, int num_tokens, int together, int zero, block_weights *w) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), zeros = _mm512_set1_epi8((char)zero);
  for (int i = 0; i < probabilities->num_queries; i++) {
    const float *p = probabilities->p + i * KVEDGE_TILE;
    float factor[2][MOST_CHUNKS];
    scale_chunks(p, first, num_tokens, together, w->scale[i], factor[0]);
    if (second) scale_chunks(p, second, num_tokens, together, (float (*)[2])(w->scale[i][0] + 1), factor[1]);
    else
      for (int k = 0; k < MOST_CHUNKS; k++) w->scale[i][k][1] = 0.0f;
    for (int t = 0, k = 0; t < num_tokens; k++) {
      __m512i sum = _mm512_setzero_si512();
      for (const int stop = t + together < num_tokens ? t + together : num_tokens; t < stop; t += 16) {
        const __m512i a = digits_of_16(p, first, t, factor[0][k]);
        const __m512i b = second ? digits_of_16(p, second, t, factor[1][k]) : _mm512_setzero_si512();
        const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_unpacklo_epi32(a, b));
        _mm512_store_si512(w->codes[i][t / 16], codes);
        multiply_add(&sum, zeros, codes);
      }
      sum = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
      sum = _mm512_add_epi32(sum, _mm512_shuffle_i32x4(sum, sum, 0xb1)); /* of 16 tokens' first and second 8 */
      w->start[i][k][0] = one_for_each_lane(_mm512_shuffle_i32x4(sum, sum, 0x00));
      w->start[i][k][1] = one_for_each_lane(_mm512_shuffle_i32x4(sum, sum, 0xaa));
    }
  }
}

/* Two blocks of 8 tokens, interleaved: lanes have the first block of tokens 0 to 3, the second one, and those of tokens 4 to
 * 7, each four bytes of channels 4 c.. in out[c]. */
KVEDGE_INLINE void interleave_blocks(const int8_t *first, const int8_t *second, ptrdiff_t stride, __m512i out[4]) {
  __m512i row[4];
  OPAQUE(first);
  OPAQUE(second);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
    row[j] =
        load_four_lanes(first + j * stride, second + j * stride, first + (4 + j) * stride, second + (4 + j) * stride);
  interleave_4_rows(row, out);
}

typedef struct {
  const kvedge_tile *values;
  lines_ahead *ahead;
  ptrdiff_t at, to_second; /* bytes from a row's first block to the one at hand, and from this to the second */
  int together;
  block_weights *w;
} block_pair;

/* Where rows come from. */
typedef enum { ROWS, ROWS_KEPT, KEPT } row_source;

/* Sums over a tile of queries first..first+count-1, times their scales: of channels 4 c.. of both blocks from half 16
 * `half` on, (count, halves, 4). (All but `first` and, if halves is 1, `half`: constants where this is inlined.) */
KVEDGE_INLINE void add_blocks(const block_pair *b, const row_source source, const int count, const int halves,
                              int first, int half, __m512 (*totals)[2][4]) {
  const kvedge_tile *values = b->values;
  const __m128i shift = _mm_cvtsi32_si128(4 * half);
  block_weights *w = b->w;
#pragma GCC unroll 3
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) totals[i][h][c] = _mm512_setzero_ps();
  for (int t = 0, k = 0; t < values->num_tokens; k++) {
    const int stop = t + b->together < values->num_tokens ? t + b->together : values->num_tokens;
    __m512i sum[SUM_QUERIES][2][2][4]; /* (count, digits, halves, 4) */
#pragma GCC unroll 3
    for (int i = 0; i < count; i++)
#pragma GCC unroll 2
      for (int d = 0; d < 2; d++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
          for (int c = 0; c < 4; c++) sum[i][d][h][c] = w->start[first + i][k][d];
    for (; t < stop; t += STEP) {
      __m512i both[4], *kept = w->kept[t / STEP];
      if (source == KEPT) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) both[c] = kept[c];
      } else {
        const int8_t *row = (const int8_t *)kvedge_tile_row(values, t) + b->at;
        interleave_blocks(row, row + b->to_second, values->token_stride, both);
        prefetch_lines(b->ahead, take_lines(b->ahead, 4), 4, 2);
        if (t % 16 == 0) prefetch_lines(b->ahead, take_lines(b->ahead, 1), 1, 2);
#pragma GCC unroll 4
        for (int c = 0; c < 4 && source == ROWS_KEPT; c++) kept[c] = both[c];
      }
      __m512i weights[SUM_QUERIES][2];
#pragma GCC unroll 3
      for (int i = 0; i < count; i++)
#pragma GCC unroll 2
        for (int d = 0; d < 2; d++) {
          const int8_t *four = w->codes[first + i][t / 16] + t % 16 * 2 + 32 * d;
          weights[i][d] = one_for_each_lane(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)four)));
        }
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
          __m512i codes = halves == 1 ? _mm512_srl_epi16(both[c], shift) : h ? _mm512_srli_epi16(both[c], 4) : both[c];
          codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
#pragma GCC unroll 3
          for (int i = 0; i < count; i++)
#pragma GCC unroll 2
            for (int d = 0; d < 2; d++) multiply_add(&sum[i][d][h][c], codes, weights[i][d]);
        }
    }
#pragma GCC unroll 3
    for (int i = 0; i < count; i++) {
      const float *scale = w->scale[first + i][k];
      const __m512 scales = _mm512_mask_blend_ps(0xf0f0, _mm512_set1_ps(scale[0]), _mm512_set1_ps(scale[1]));
#pragma GCC unroll 2
      for (int h = 0; h < halves; h++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
          const __m512 total = total_of(2, sum[i][0][h][c], sum[i][1][h][c], sum[i][1][h][c]);
          totals[i][h][c] = _mm512_fmadd_ps(total, scales, totals[i][h][c]);
        }
    }
  }
}

/* acc = acc * rescale + total, of half a block each. */
KVEDGE_INLINE void add_totals(const __m512 total[4], int has_second, float rescale, float *acc) {
  __m512i in[4], of_block[4];
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++)
    in[c] = _mm512_castps_si512(_mm512_add_ps(total[c], _mm512_shuffle_f32x4(total[c], total[c], 0x4e)));
  transpose_lanes(in, of_block);
  for (int b = 0; b <= has_second; b++, acc += KVEDGE_GROUP)
    _mm512_storeu_ps(acc,
                     _mm512_fmadd_ps(_mm512_loadu_ps(acc), _mm512_set1_ps(rescale), _mm512_castsi512_ps(of_block[b])));
}

#define ADD_BLOCKS(name, source, count, halves)                                                                        \
  static __attribute__((noinline)) void name(const block_pair *b, int first, int half, __m512(*totals)[2][4]) {        \
    add_blocks(b, source, count, halves, first, half, totals);                                                         \
  }
ADD_BLOCKS(add_to_one, ROWS, 1, 2)
ADD_BLOCKS(add_to_two, ROWS_KEPT, 2, 1)
ADD_BLOCKS(add_to_three, ROWS_KEPT, 3, 1)
ADD_BLOCKS(add_kept_to_two, KEPT, 2, 1)
ADD_BLOCKS(add_kept_to_three, KEPT, 3, 1)
#undef ADD_BLOCKS

int sum_few_blocks_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to) {
  typedef void add_function(const block_pair *b, int first, int half, __m512(*totals)[2][4]);
  static add_function *const of_several[2][2] = {
      {add_to_two,      add_to_three     },
      {add_kept_to_two, add_kept_to_three}
  };
  const int n = p->num_queries, num_groups = values->dim / KVEDGE_GROUP;
  const int together = p->planes == 3 ? 32 : 64, zero = -values->codes->levels[0];
  if (!kvedge_codes_are_levels(values->codes) || n > SEVERAL_QUERIES || values->num_tokens % BLOCK) return 0;
  if (p->planes != 2 && (p->planes != 3 || !p->by_32)) return 0;
  char *scratch = p->scratch;
  lines_ahead ahead = lines_of(values, (int)(num_groups * values->group_stride));
  block_pair b = {.values = values,
                  .ahead = &ahead,
                  .together = together,
                  .w = kvedge_take_scratch(&scratch, sizeof(block_weights))};
  for (int g = 0; g < num_groups; g += 2, b.at += 2 * values->group_stride) {
    const float *scales = values->scales + g * values->scale_stride;
    const int has_second = g + 1 < num_groups;
    b.to_second = has_second ? values->group_stride : 0;
    encode_block_weights(p, scales, has_second ? scales + values->scale_stride : NULL, values->num_tokens, together,
                         zero, b.w);
    for (int i = 0, count, passes = (n + SUM_QUERIES - 1) / SUM_QUERIES; passes > 0; i += count, passes--) {
      __m512 totals[2][SUM_QUERIES][2][4]; /* by half where there are several queries */
      count = (n - i + passes - 1) / passes;
      for (int half = 0; half < (count > 1 ? 2 : 1); half++)
        (count == 1 ? add_to_one : of_several[i + half > 0][count - 2])(&b, i, half, totals[half]);
      for (int j = 0; j < count; j++)
        for (int half = 0; half < 2; half++)
          add_totals(count == 1 ? totals[0][0][half] : totals[half][j][0], has_second, to->rescale[i + j],
                     to->acc + (i + j) * to->stride + g * KVEDGE_GROUP + 16 * half);
    }
  }
  return 1;
}

KVEDGE_TARGET_END
#endif
