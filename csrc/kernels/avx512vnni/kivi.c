/* Runs (kivi2, kivi4, kivi8) on the AVX-512 VNNI path: kernels/kivi_portable.h has the sums.
 *
 * A vector of words has four bytes of each of 16 tokens, or channels, as vpdpbusd wants them: the k-th codes of
 * its bytes, times a dword of digits for all lanes. Nothing is transposed, and nothing summed over lanes.
 *
 *   keys     unsigned codes x signed digits of a query times the steps, encoded for each run
 *   values   unsigned digits of weights x signed codes, of which there are no negative ones (kivi8: less 128)
 *
 * Codes are counted from 0 on; what the middle code adds, the sum of all digits, is taken off in
 * floats, where it is no larger than the rest. The unit of a query's digits is one for as many
 * runs as have steps of about the same size, so that no run waits for a maximum.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include "kernels/avx512vnni/common.h"
#include "kernels/avx256/floats_cells.h"
#include "kernels/kivi_portable.h"

enum {
  DIGITS = 4 * 1024 + 192, /* bytes of a query's: of each four numbers 8 bytes, or of three planes 16; not 4 KB apart */
  MOST_VECTORS = 4,        /* of 16 lanes that are worked on together */
};

KVEDGE_INLINE __mmask16 first_of_16(int n) { return (__mmask16)first_bytes(n); }

KVEDGE_INLINE __m512 floats_at(const uint16_t *halves) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}

/* ---- Digits ----
 *
 * Of the numbers that meet the codes of a word: first those of the first codes of its four bytes, then of the second ones. Of
 * each four numbers the highest digits come first. */

/* What signed numbers are raised by, so that their digits but the first are those of an unsigned one less 128. */
KVEDGE_INLINE int32_t carry_of(const int planes) { return planes == 3 ? 0x8080 : 0x80; }

/* Bytes that digits of four numbers take. */
KVEDGE_INLINE int digits_of_4(const int planes) { return planes == 3 ? 16 : 8; }

/* Two digits each of 32 numbers of 16 bits. (`bits`: 4 or 8.) */
KVEDGE_INLINE __m512i split_words(__m512i numbers, const int bits) {
  return _mm512_shuffle_epi8(
      numbers, _mm512_broadcast_i32x4(bits == 8 ? _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14)
                                                : _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15, 2, 6, 10, 14)));
}

/* Three digits each of 16 numbers of 24 bits, and a byte of no use. */
KVEDGE_INLINE __m512i split_dwords(__m512i numbers, const int bits) {
  const __m512i by_word = bits == 8   ? _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                          : bits == 4 ? _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                                      : _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return split_bytes(bits == 8 ? numbers : _mm512_permutexvar_epi32(by_word, numbers), 3);
}

/* Words as packs leave them, those of two vectors of 16 numbers. */
KVEDGE_INLINE __m512i in_order(__m512i packed) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

/* 64 unsigned numbers as digits of `planes` planes, 2 or 3. */
KVEDGE_INLINE void put_digits(const __m512i number[4], int planes, int bits, int8_t *digits) {
#pragma GCC unroll 4
  for (int v = 0; v < 4 && planes == 3; v++) _mm512_storeu_si512(digits + 64 * v, split_dwords(number[v], bits));
#pragma GCC unroll 2
  for (int v = 0; v < 4 && planes == 2; v += 2)
    _mm512_storeu_si512(digits + 32 * v, split_words(in_order(_mm512_packus_epi32(number[v], number[v + 1])), bits));
}

/* The same of signed numbers that were raised by carry_of(). Each dword of `sum` grows by four digits of one plane, the highest
 * plane's first; of three planes every fourth dword is of no use. (`planes` and `bits`: constants where this is inlined.) */
KVEDGE_INLINE void put_signed(const __m512i number[4], const int planes, const int bits, int8_t *digits, __m512i *sum) {
  const __m512i ones = _mm512_set1_epi8(1);
#pragma GCC unroll 4
  for (int v = 0; v < 4; v += planes == 3 ? 1 : 2) {
    __m512i split;
    if (planes == 3) {
      split = split_dwords(_mm512_xor_si512(number[v], _mm512_set1_epi32(carry_of(3))), bits);
    } else {
      const __m512i words = in_order(_mm512_packs_epi32(number[v], number[v + 1]));
      split = split_words(_mm512_xor_si512(words, _mm512_set1_epi16(0x80)), bits);
    }
    multiply_add(sum, ones, split);
    _mm512_storeu_si512(digits + 16 * v * digits_of_4(planes) / 4, split);
  }
}

/* ---- Products ---- */

/* Sums of products: (queries, planes, vectors of lanes, chains), chains being added up at the end. */
typedef __m512i word_sums[RUN_QUERIES][3][MOST_VECTORS][2];

/* A product waits 5 cycles for the one before it in the same sum: few sums are made twice as many. */
KVEDGE_INLINE int chains_of(const int count, const int planes, const int vectors) {
  return planes == 2 && count * planes * vectors <= 8 ? 2 : 1;
}

/* Four digits of a query, or of weights, for all lanes, times bytes of codes. (`of_values`: a constant.) */
KVEDGE_INLINE void multiply_digits(__m512i *sum, __m512i codes, const int8_t *digits, const int of_values) {
  if (of_values) multiply_add(sum, four_for_all(digits), codes);
  else multiply_add(sum, codes, four_for_all(digits));
}

/* sum += the products of all words of 16 * vectors lanes, those in `there` of the last 16, with
 * `count` queries' digits. (`of_values`, `count`, `planes` and `vectors`: constants where this
 * is inlined. `bits` is one where it is 4 by itself.) */
KVEDGE_INLINE void multiply_words(const lane_words *w, __mmask16 there, const int8_t *digits, const int bits,
                                  const int of_values, const int count, const int planes, const int vectors,
                                  word_sums sum) {
  const int chains = chains_of(count, planes, vectors);
  const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
  const uint8_t *words = w->words;
  uintptr_t next = (uintptr_t)words + w->ahead, again = next - w->after;
  for (int n = 0; n < w->num; n++, words += w->stride) {
    __m512i word[MOST_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      word[v] = v == vectors - 1 ? _mm512_maskz_loadu_epi32(there, words + 64 * v) : _mm512_loadu_si512(words + 64 * v);
      if (of_values && bits == 8) word[v] = _mm512_xor_si512(word[v], _mm512_set1_epi8((char)0x80));
      if (w->ahead) {
        _mm_prefetch((const char *)(next + 64 * v), _MM_HINT_T1);
        _mm_prefetch((const char *)(again + 64 * v), _MM_HINT_T1);
      }
    }
#pragma GCC unroll 2
    for (int k = 0; k < 8 / bits; k++, digits += digits_of_4(planes)) {
      __m512i codes[MOST_VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        if (__builtin_constant_p(bits)) codes[v] = k > 0 ? _mm512_srli_epi16(word[v], (unsigned)(k * bits)) : word[v];
        else codes[v] = _mm512_srl_epi16(word[v], _mm_cvtsi32_si128(k * bits));
        codes[v] = _mm512_and_si512(codes[v], mask);
      }
#pragma GCC unroll 4
      for (int i = 0; i < count; i++)
#pragma GCC unroll 3
        for (int b = 0; b < planes; b++)
#pragma GCC unroll 4
          for (int v = 0; v < vectors; v++)
            multiply_digits(&sum[i][b][v][chains == 2 ? k % 2 : 0], codes[v], digits + i * DIGITS + 4 * b, of_values);
    }
    next += (uintptr_t)w->stride, again += (uintptr_t)w->stride;
  }
}

KVEDGE_INLINE void clear_sums(const int count, const int planes, const int vectors, word_sums sum) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 3
    for (int b = 0; b < planes; b++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[i][b][v][0] = sum[i][b][v][1] = _mm512_setzero_si512();
}

/* A query's sum of 16 lanes, as a float. (Constants, as above.) */
KVEDGE_INLINE __m512 total_of_sums(const int planes, const int chains, const int v, __m512i (*sum)[MOST_VECTORS][2]) {
  __m512i all[3];
#pragma GCC unroll 3
  for (int b = 0; b < planes; b++) all[b] = chains == 2 ? _mm512_add_epi32(sum[b][v][0], sum[b][v][1]) : sum[b][v][0];
  return total_of(planes, all[0], all[1], planes == 3 ? all[2] : all[0]);
}

/* ---- Scores ---- */

/* n halves, fewer than 64, and zeros. */
KVEDGE_INLINE void copy_halves(const uint16_t *from, int n, uint16_t *to) {
  for (int d = 0; d < 64; d += 32)
    _mm512_storeu_si512(to + d, _mm512_maskz_loadu_epi16((__mmask32)first_bytes(n > d ? n - d : 0), from + d));
}

/* Steps and middles of 64 channels of a run from d on; those past the last are 0. */
KVEDGE_INLINE void read_steps(const kvedge_tile *keys, const run_arrays *run, int d, __m512 most, __m512 steps[4],
                              __m512 middles[4]) {
  const uint16_t *steps_of = run->steps + d, *lows_of = run->lows + d;
  uint16_t last[2][64];
  if (keys->dim - d < 64) {
    copy_halves(steps_of, keys->dim - d, last[0]);
    copy_halves(lows_of, keys->dim - d, last[1]);
    steps_of = last[0], lows_of = last[1];
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    steps[v] = floats_at(steps_of + 16 * v);
    middles[v] = _mm512_fmadd_ps(steps[v], most, floats_at(lows_of + 16 * v));
  }
}

/* Digits of queries times a run's steps; returns their sums of products with all middles, less
 * what the middle code adds to those of the digits: in units. (`count`, `planes` and `bits`:
 * constants where this is inlined.) */
KVEDGE_INLINE __m128 quantize_for_run(const run_scoring *s, const run_arrays *run, const int count, const int planes,
                                      const int bits, int8_t (*digits)[DIGITS]) {
  const __m512 most = _mm512_set1_ps((float)(1 << (bits - 1))), carry = _mm512_set1_ps((float)carry_of(planes));
  const __m512 of_planes =
      _mm512_broadcast_f32x4(planes == 3 ? _mm_setr_ps(65536, 256, 1, 0) : _mm_setr_ps(256, 1, 256, 1));
  __m512 constant[RUN_QUERIES];
  __m512i total[RUN_QUERIES]; /* of digits: of each plane in turn */
#pragma GCC unroll 4
  for (int i = 0; i < RUN_QUERIES; i++) constant[i] = _mm512_setzero_ps(), total[i] = _mm512_setzero_si512();
  for (int d = 0; d < s->padded; d += 64) {
    __m512 steps[4], middles[4];
    read_steps(s->keys, run, d, most, steps, middles);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m512i number[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        const __m512 x = _mm512_loadu_ps(s->x[i] + d + 16 * v);
        number[v] = _mm512_cvtps_epi32(_mm512_fmadd_ps(x, steps[v], carry));
        constant[i] = _mm512_fmadd_ps(x, middles[v], constant[i]);
      }
      put_signed(number, planes, bits, digits[i] + d / 4 * digits_of_4(planes), &total[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    constant[i] = _mm512_fnmadd_ps(_mm512_mul_ps(most, of_planes), _mm512_cvtepi32_ps(total[i]), constant[i]);
  return reduce_4(ADD, constant);
}

/* Scores of a run, by digits of queries. (Constants, as above.) */
KVEDGE_INLINE void score_run(const run_scoring *s, int r, const int count, const int planes, const int bits,
                             const int8_t *digits, const float *constant) {
  enum { VECTORS = RUN / 16 };
  const tile_run run = run_of_tile(s->keys, r, bits, 0);
  const lane_words words = words_of_run(s->keys, r, &run.arrays, bits, 0, 0);
  word_sums sum;
  float within[RUN];
  prefetch_run(s->keys, r, bytes_of_words(s->keys->dim, bits, 0), bytes_of_run(s->keys->dim, bits, 0));
  clear_sums(count, planes, VECTORS, sum);
  multiply_words(&words, 0xffff, digits, bits, 0, count, planes, VECTORS, sum);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    float *to = run.first > 0 ? within : s->scores + i * KVEDGE_TILE + run.at;
    const __m512 unit = _mm512_set1_ps(s->unit[i]), plus = _mm512_set1_ps(constant[i] * s->unit[i]);
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
      const __m512 total = total_of_sums(planes, chains_of(count, planes, VECTORS), v, sum[i]);
      _mm512_storeu_ps(to + 16 * v, _mm512_fmadd_ps(total, unit, plus));
    }
    if (run.first > 0) put_run_scores(&run, within, s->scores + i * KVEDGE_TILE);
  }
}

KVEDGE_INLINE void score_runs(const run_scoring *s, const int count, const int planes, const int bits) {
  int8_t (*digits)[DIGITS] = (void *)s->scratch;
  for (int r = s->first_run; r < s->stop_run; r++) {
    const run_arrays run = run_of_tile(s->keys, r, bits, 0).arrays;
    float constant[RUN_QUERIES];
    _mm_storeu_ps(constant, quantize_for_run(s, &run, count, planes, bits, digits));
    score_run(s, r, count, planes, bits, digits[0], constant);
  }
}

/* Of 4 and 8 bits with two planes for up to four queries; of any bits with three for up to two. */
#define SCORE_RUNS(name, count, planes, bits)                                                                          \
  static __attribute__((noinline)) void score_runs_##name(const run_scoring *s) { score_runs(s, count, planes, bits); }
SCORE_RUNS(1, 1, 2, 4)
SCORE_RUNS(2, 2, 2, 4)
SCORE_RUNS(3, 3, 2, 4)
SCORE_RUNS(4, 4, 2, 4)
SCORE_RUNS(1_of_bytes, 1, 2, 8)
SCORE_RUNS(2_of_bytes, 2, 2, 8)
SCORE_RUNS(3_of_bytes, 3, 2, 8)
SCORE_RUNS(4_of_bytes, 4, 2, 8)
SCORE_RUNS(1_of_any, 1, 3, s->keys->bits)
SCORE_RUNS(2_of_any, 2, 3, s->keys->bits)
#undef SCORE_RUNS

static int most_queries(int planes) { return planes == 2 ? RUN_QUERIES : 2; }

/* The row of a table of functions: of any bits, or with two planes of 4 or of 8. */
static int kind_of(int planes, int bits) { return planes == 3 ? 0 : bits / 4; }

/* The largest products of `count` queries, 1 to 4, with steps. (`count`: a constant where this is inlined.) */
KVEDGE_INLINE void largest_products(const float *x, ptrdiff_t stride, const int count, int padded, const float *steps,
                                    float *largest) {
  __m512 most[RUN_QUERIES];
#pragma GCC unroll 4
  for (int i = 0; i < RUN_QUERIES; i++) most[i] = _mm512_setzero_ps();
  for (int d = 0; d < padded; d += 16) {
    const __m512 of = _mm512_loadu_ps(steps + d);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      most[i] = _mm512_max_ps(most[i], _mm512_abs_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i * stride + d), of)));
  }
  _mm_mask_storeu_ps(largest, (__mmask8)((1 << count) - 1), reduce_4(MAX, most));
}

/* Does a query need three planes, whose codes of 24 bits have this unit? */
static int needs_three(const kvedge_query *q, int i, float unit) {
  return !(q->error[i] * 256.0f * unit <= logit_error_for(q));
}

void scores_of_runs_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  char *scratch = q->scratch;
  kvedge_tile tile = *keys;
  uint16_t *halves = kvedge_take_scratch(&scratch, 1024 * sizeof *halves);
  float *steps = kvedge_take_scratch(&scratch, 1024 * sizeof *steps), unit[KVEDGE_QUERY_ROWS];
  float (*x)[RUN_ROW] = kvedge_take_scratch(&scratch, RUN_QUERIES * sizeof *x);
  run_scoring s = {.q = q, .keys = &tile, .padded = kvedge_padded_channels(keys->dim), .x = x, .scratch = scratch};
  for (s.first_run = 0; s.first_run < num_runs(keys); s.first_run = s.stop_run) {
    s.stop_run = runs_alike(keys, s.first_run, halves);
    for (int d = 0; d < s.padded; d += 16) _mm512_storeu_ps(steps + d, floats_at(halves + d));
    int i = 0, planes = keys->bits > 2 && q->planes < 3 ? 2 : 3;
#define LARGEST(count) largest_products(q->values + i * q->stride, q->stride, count, s.padded, steps, unit + i)
    BY_FOURS(q->num_queries, LARGEST)
#undef LARGEST
    for (i = 0; i < q->num_queries; i++) {
      if (needs_decoding(q, i, unit[i])) {
        scores_of_runs_avx256(q, keys, scores, accumulate); /* of the whole tile: it is rare */
        return;
      }
      unit[i] = unit[i] > QUERY_NOTHING ? unit[i] * (1.0f / QUERY_MAX) : 1.0f; /* 1: products round to 0 */
      if (unit[i] < 1.0f && needs_three(q, i, unit[i])) planes = 3;
    }
    const float digits = planes == 3 ? 1.0f : 256.0f;
    tile.next = keys->next;
    for (int n, most = most_queries(planes), first = 0; first < q->num_queries; first += n) {
      n = q->num_queries - first < most ? q->num_queries - first : most;
      for (int j = 0; j < n; j++) {
        float *of_unit = &unit[first + j];
        if (*of_unit < 1.0f) *of_unit *= digits;
        const __m512 inverse = _mm512_set1_ps(1.0f / *of_unit);
        for (int d = 0; d < s.padded; d += 16)
          _mm512_storeu_ps(x[j] + d, _mm512_mul_ps(_mm512_loadu_ps(q->values + (first + j) * q->stride + d), inverse));
      }
      s.unit = unit + first, s.scores = scores + first * KVEDGE_TILE;
      static void (*const of[3][RUN_QUERIES])(const run_scoring *) = {
          {score_runs_1_of_any, score_runs_2_of_any},
          {score_runs_1, score_runs_2, score_runs_3, score_runs_4},
          {score_runs_1_of_bytes, score_runs_2_of_bytes, score_runs_3_of_bytes, score_runs_4_of_bytes}
      };
      of[kind_of(planes, keys->bits)][n - 1](&s);
      tile.next.blocks = NULL; /* the next tile is prefetched once */
    }
  }
}

/* ---- Weighted sums ---- */

static void read_columns_of_runs(const kvedge_tile *values, int g, step_columns *to) {
  const __m512 most = _mm512_set1_ps((float)(1 << (values->bits - 1)));
  for (int r = 0; r < num_runs(values); r++) {
    const run_arrays run = run_of_tile(values, r, values->bits, 1).arrays;
    for (int t = 0; t < RUN; t += 16) {
      const __m512 steps = floats_at(run.steps + g * RUN + t), lows = floats_at(run.lows + g * RUN + t);
      _mm512_storeu_ps(to->steps + r * RUN + t, steps);
      _mm512_storeu_ps(to->middles + r * RUN + t, _mm512_fmadd_ps(steps, most, lows));
    }
  }
}

/* The largest weights of `count` queries, and the sums of p times the middles. (`count`: a
 * constant where this is inlined.) */
KVEDGE_INLINE void measure_weights(const run_sums *w, const int count, int tokens, float *largest, float *added) {
  const float *steps = w->columns->steps, *middles = w->columns->middles;
  __m512 most[RUN_QUERIES], sum[RUN_QUERIES];
#pragma GCC unroll 4
  for (int i = 0; i < RUN_QUERIES; i++) most[i] = sum[i] = _mm512_setzero_ps();
  for (int t = 0; t < tokens; t += 16)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      const __m512 p = _mm512_loadu_ps(w->p[i] + t);
      most[i] = _mm512_max_ps(most[i], _mm512_mul_ps(p, _mm512_loadu_ps(steps + t)));
      sum[i] = _mm512_fmadd_ps(p, _mm512_loadu_ps(middles + t), sum[i]);
    }
  _mm_storeu_ps(largest, reduce_4(MAX, most));
  _mm_storeu_ps(added, reduce_4(ADD, sum));
}

/* Digits of a query's weights, p times steps times `factor`; returns the sums of these in lanes, where bits are not 8. */
static RUN_FUNCTION __m512 encode_weights_of(const float *p, const float *steps, int tokens, float factor, int planes,
                                             int bits, int8_t *digits) {
  const __m512 by = _mm512_set1_ps(factor);
  __m512 sum = _mm512_setzero_ps();
  for (int t = 0; t < tokens; t += 64, digits += 16 * digits_of_4(planes)) {
    __m512i number[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const int at = t + 16 * v;
      const __mmask16 there = at < tokens ? 0xffff : 0;
      __m512 weight = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, p + at), _mm512_maskz_loadu_ps(there, steps + at));
      weight = _mm512_mul_ps(weight, by);
      if (planes < 3) {
        const __mmask16 small = _mm512_cmp_ps_mask(weight, _mm512_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
        weight = _mm512_mask_add_ps(weight, small, weight, _mm512_maskz_loadu_ps(there, kvedge_dither + at));
      }
      number[v] = _mm512_cvtps_epi32(weight);
      if (bits != 8) sum = _mm512_add_ps(sum, _mm512_cvtepi32_ps(number[v]));
    }
    put_digits(number, planes, bits, digits);
  }
  return sum;
}

/* Digits of weights, their units, and what is the same for all channels. (`count` and `planes`: constants where this is
 * inlined.) */
KVEDGE_INLINE void encode_weights_of_runs(const run_sums *w, const int count, const int planes, const int bits,
                                          int8_t (*digits)[DIGITS], float *unit, float *constant) {
  const int tokens = num_runs(w->values) * RUN;
  const float most = planes == 3 ? WEIGHT_MAX : WEIGHT_MAX_16;
  const float middle = bits == 8 ? 0.0f : (float)(1 << (bits - 1)); /* of bytes it is taken off by them */
  __m512 sums[RUN_QUERIES];
  measure_weights(w, count, tokens, unit, constant);
#pragma GCC unroll 4
  for (int i = 0; i < RUN_QUERIES; i++) sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    const float factor = unit[i] > WEIGHT_NOTHING ? most / unit[i] : 0.0f;
    unit[i] = unit[i] > WEIGHT_NOTHING ? unit[i] / most : 0.0f;
    sums[i] = encode_weights_of(w->p[i], w->columns->steps, tokens, factor, planes, bits, digits[i]);
  }
  const __m128 taken = _mm_mul_ps(_mm_mul_ps(_mm_set1_ps(middle), _mm_loadu_ps(unit)), reduce_4(ADD, sums));
  if (bits != 8) _mm_storeu_ps(constant, _mm_sub_ps(_mm_loadu_ps(constant), taken));
}

/* 16 * vectors channels of the group from d on, or the first of them. (Constants where this is inlined.) */
KVEDGE_INLINE void sum_lanes(const run_sums *w, int d, int left, const int count, const int planes, const int bits,
                             const int vectors, int8_t (*digits)[DIGITS], const float *unit, const float *constant) {
  const __mmask16 there = first_of_16(left - 16 * (vectors - 1));
  word_sums sum;
  clear_sums(count, planes, vectors, sum);
  for (int r = 0; r < num_runs(w->values); r++) {
    const tile_run run = run_of_tile(w->values, r, bits, 1);
    const lane_words words = words_of_run(w->values, r, &run.arrays, bits, 1, 4 * (w->group * GROUP + d));
    multiply_words(&words, there, digits[0] + r * RUN / 4 * digits_of_4(planes), bits, 1, count, planes, vectors, sum);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float *acc = w->acc + i * w->stride + d + 16 * v;
      const __mmask16 here = v == vectors - 1 ? there : 0xffff;
      const __m512 total = total_of_sums(planes, chains_of(count, planes, vectors), v, sum[i]);
      const __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, acc), _mm512_set1_ps(w->rescale[i]));
      const __m512 plus = _mm512_add_ps(kept, _mm512_set1_ps(constant[i]));
      _mm512_mask_storeu_ps(acc, here, _mm512_fmadd_ps(total, _mm512_set1_ps(unit[i]), plus));
    }
}

/* (`most`: vectors of lanes at a time, at most; a constant as the others.) */
KVEDGE_INLINE void sum_runs(const run_sums *w, const int count, const int planes, const int bits, const int most) {
  int8_t (*digits)[DIGITS] = (void *)w->scratch;
  float unit[RUN_QUERIES], constant[RUN_QUERIES];
  int left = w->values->dim - w->group * GROUP, d = 0;
  if (left > GROUP) left = GROUP;
  encode_weights_of_runs(w, count, planes, bits, digits, unit, constant);
#define SUM_LANES(vectors)                                                                                             \
  for (; left > 16 * (vectors - 1); d += 16 * vectors, left -= 16 * vectors)                                           \
  sum_lanes(w, d, left, count, planes, bits, vectors, digits, unit, constant)
  if (most >= 4) SUM_LANES(4);
  if (most >= 2) SUM_LANES(2);
  SUM_LANES(1);
#undef SUM_LANES
}

#define SUM_RUNS(name, count, planes, bits, most)                                                                      \
  static __attribute__((noinline)) void sum_runs_##name(const run_sums *w) { sum_runs(w, count, planes, bits, most); }
SUM_RUNS(1, 1, 2, 4, 4)
SUM_RUNS(2, 2, 2, 4, 2)
SUM_RUNS(3, 3, 2, 4, 2)
SUM_RUNS(4, 4, 2, 4, 2)
SUM_RUNS(1_of_bytes, 1, 2, 8, 4)
SUM_RUNS(2_of_bytes, 2, 2, 8, 2)
SUM_RUNS(3_of_bytes, 3, 2, 8, 2)
SUM_RUNS(4_of_bytes, 4, 2, 8, 2)
SUM_RUNS(1_by_3, 1, 3, 4, 4)
SUM_RUNS(2_by_3, 2, 3, 4, 2)
SUM_RUNS(3_by_3, 3, 3, 4, 2)
SUM_RUNS(4_by_3, 4, 3, 4, 2)
SUM_RUNS(1_of_bytes_by_3, 1, 3, 8, 4)
SUM_RUNS(2_of_bytes_by_3, 2, 3, 8, 2)
SUM_RUNS(3_of_bytes_by_3, 3, 3, 8, 2)
SUM_RUNS(4_of_bytes_by_3, 4, 3, 8, 2)
SUM_RUNS(1_of_any, 1, 3, w->values->bits, 2)
SUM_RUNS(2_of_any, 2, 3, w->values->bits, 2)
#undef SUM_RUNS

void weighted_sum_of_runs_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,
                                     const kvedge_accumulators *to) {
  static run_sum_function *const of[5][RUN_QUERIES] = {
      {sum_runs_1_of_any, sum_runs_2_of_any},
      {sum_runs_1, sum_runs_2, sum_runs_3, sum_runs_4},
      {sum_runs_1_of_bytes, sum_runs_2_of_bytes, sum_runs_3_of_bytes, sum_runs_4_of_bytes},
      {sum_runs_1_by_3, sum_runs_2_by_3, sum_runs_3_by_3, sum_runs_4_by_3},
      {sum_runs_1_of_bytes_by_3, sum_runs_2_of_bytes_by_3, sum_runs_3_of_bytes_by_3, sum_runs_4_of_bytes_by_3}
  };
  const int by_3 = p->planes == 3, kind = values->bits / 4; /* 0: of any bits */
  sum_by_groups(p, values, to, read_columns_of_runs, of[kind ? kind + 2 * by_3 : 0], kind ? RUN_QUERIES : 2);
}

KVEDGE_TARGET_END
#endif
