/* Runs (kivi2, kivi4, kivi8) of the 256-bit paths: kernels/runs.h has the sums. Part of avx2.c and avxvnni.c, after values.h.
 *
 * A vector of words has those of 8 tokens, or channels. The k-th codes of the two halves of a word become a pair of integers of
 * 16 bits, by a shift and a mask; multiply_add_pairs() multiplies them by the two numbers that they meet, of a query times
 * the steps, or of weights times steps, for all lanes alike. Nothing is transposed, and nothing summed over lanes.
 *
 * Codes are counted from 0 on; what the middle code adds, the sum of all numbers, is taken off in floats. Numbers have 15 bits
 * and a sign. The unit of a query's is one for as many runs as have steps of about the same size, so that no run waits for a
 * maximum; weights of 64 tokens have one, as for int8. Where that is not enough (three planes) codes become floats (runs.h).
 */
#include "kernels/x86_runs.h"

enum {
  RUN_REGISTERS = 8, /* of sums */
  /* Channels of 8 bits whose products add up in 32 bits: x 255 x 32767. */
  CHANNELS_OF_8_BITS = 256,
};

KVEDGE_INLINE __m256 steps_at(const uint16_t *halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

/* Vectors of lanes that are worked on together. */
KVEDGE_INLINE int vectors_for(const int count) { return count <= RUN_REGISTERS / 4 ? 4 : 2; }

/* 16 integers as pairs of 16 bits, in the order that the codes of words have. (`bits`: a constant where this is inlined, or
 * 2 and 8 are told apart.) */
KVEDGE_INLINE __m256i pair_up(const int bits, __m256i a, __m256i b) {
  __m256i first = a, second = b; /* 2 bits: a word has 16 codes */
  if (bits == 4) {
    first = _mm256_permute2x128_si256(a, b, 0x20), second = _mm256_permute2x128_si256(a, b, 0x31);
  } else if (bits == 8) {
    a = _mm256_permute4x64_epi64(a, 0xd8), b = _mm256_permute4x64_epi64(b, 0xd8); /* even pairs first, then odd ones */
    first = _mm256_permute2x128_si256(a, b, 0x20), second = _mm256_permute2x128_si256(a, b, 0x31);
  }
  return _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
}

/* Sums of products: (queries, vectors of lanes). */
typedef __m256i lane_sums[RUN_QUERIES][4];

/* sum += the products of the k-th codes of both halves of words of 8 * vectors lanes, with the pairs of numbers of `count` queries,
 * `stride` from one to the next. (`count` and `vectors`: constants where this is inlined; `bits` and k are where it is 4.) */
KVEDGE_INLINE void multiply_codes(const __m256i *word, const int16_t *numbers, ptrdiff_t stride, const int bits,
                                  const int k, const int count, const int vectors, lane_sums sum) {
  const __m256i mask = _mm256_set1_epi16((int16_t)((1 << bits) - 1));
  __m256i codes[4];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    if (__builtin_constant_p(bits)) codes[v] = k > 0 ? _mm256_srli_epi16(word[v], 4 * k) : word[v];
    else codes[v] = _mm256_srl_epi16(word[v], _mm_cvtsi32_si128(k * bits));
    if (!__builtin_constant_p(bits) || k < 3) codes[v] = _mm256_and_si256(codes[v], mask);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    int32_t two;
    memcpy(&two, numbers + i * stride, sizeof two);
    const __m256i by = _mm256_set1_epi32(two);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) multiply_add_pairs(&sum[i][v], codes[v], by);
  }
}

/* The same with all codes of all words, those in `there` of the last 8 lanes unless it is NULL. */
KVEDGE_INLINE void multiply_words(const lane_words *w, const __m256i *there, const int16_t *numbers, ptrdiff_t stride,
                                  const int bits, const int count, const int vectors, lane_sums sum) {
  const uint8_t *words = w->words;
  uintptr_t next = (uintptr_t)words + w->ahead, again = next - w->after;
  for (int n = 0; n < w->num; n++, words += w->stride, numbers += 32 / bits) {
    __m256i word[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const int *from = (const int *)(words + 32 * v);
      word[v] = there ? _mm256_maskload_epi32(from, *there) : _mm256_loadu_si256((const __m256i *)from);
      if (v % 2 > 0) continue;
      _mm_prefetch((const char *)(next + 32 * v), _MM_HINT_T1);
      _mm_prefetch((const char *)(again + 32 * v), _MM_HINT_T1);
    }
    if (__builtin_constant_p(bits)) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) multiply_codes(word, numbers + 2 * k, stride, 4, k, count, vectors, sum);
    } else {
#pragma GCC unroll 1
      for (int k = 0; k < 16 / bits; k++) multiply_codes(word, numbers + 2 * k, stride, bits, k, count, vectors, sum);
    }
    next += (uintptr_t)w->stride, again += (uintptr_t)w->stride;
  }
}

KVEDGE_INLINE void clear_sums(const int count, const int vectors, lane_sums sum) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[i][v] = _mm256_setzero_si256();
}

/* The sums of the lanes of each of four vectors. */
KVEDGE_INLINE void add_lanes_of_4(const __m256 x[RUN_QUERIES], float *sums) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

/* ---- Scores ---- */

/* Numbers of queries times a run's steps, and their sums of products with all middles, less what the middle code adds to those
 * of the numbers: in units. (`count` and `bits`: constants where this is inlined.) */
KVEDGE_INLINE void encode_run(const run_scoring *s, const run_parts *run, const int count, const int bits,
                              int16_t (*numbers)[1024], float constant[4]) {
  const int dim = s->keys->dim;
  const __m256 most = _mm256_set1_ps((float)(1 << (bits - 1)));
  __m256 added[RUN_QUERIES];
  __m256i total[RUN_QUERIES];
#pragma GCC unroll 4
  for (int i = 0; i < RUN_QUERIES; i++) added[i] = _mm256_setzero_ps(), total[i] = _mm256_setzero_si256();
  for (int d = 0; d < dim; d += 16) {
    const uint16_t *steps_of = run->steps + d, *lows_of = run->lows + d;
    uint16_t last[2][16] = {{0}};
    if (dim - d < 16) { /* those past the last are 0 */
      memcpy(last[0], steps_of, (size_t)(dim - d) * sizeof **last);
      memcpy(last[1], lows_of, (size_t)(dim - d) * sizeof **last);
      steps_of = last[0], lows_of = last[1];
    }
    __m256 steps[2], middles[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      steps[j] = steps_at(steps_of + 8 * j);
      middles[j] = _mm256_fmadd_ps(steps[j], most, steps_at(lows_of + 8 * j));
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      __m256i number[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const __m256 x = _mm256_loadu_ps(s->x[i] + d + 8 * j);
        number[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x, steps[j]));
        total[i] = _mm256_add_epi32(total[i], number[j]);
        added[i] = _mm256_fmadd_ps(x, middles[j], added[i]);
      }
      _mm256_storeu_si256((__m256i *)(numbers[i] + d), pair_up(bits, number[0], number[1]));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) added[i] = _mm256_fnmadd_ps(most, _mm256_cvtepi32_ps(total[i]), added[i]);
  add_lanes_of_4(added, constant);
}

KVEDGE_INLINE void score_runs(const run_scoring *s, const int count, const int bits) {
  const int vectors = vectors_for(count);
  const size_t bytes = bytes_of_words(s->keys->dim, bits, 0), of_run = bytes_of_run(s->keys->dim, bits, 0);
  int16_t numbers[RUN_QUERIES][1024];
  for (int r = s->first_run; r < s->stop_run; r++) {
    const tile_run run = run_of_tile(s->keys, r, 0);
    float constant[4], within[RUN_QUERIES][RUN];
    encode_run(s, &run.parts, count, bits, numbers, constant);
    prefetch_run(s->keys, r, bytes, of_run);
    for (int t = 0; t < RUN; t += 8 * vectors) {
      const lane_words words = words_of_run(s->keys, r, &run.parts, 0, 4 * t);
      lane_sums sum;
      clear_sums(count, vectors, sum);
      multiply_words(&words, NULL, numbers[0], 1024, bits, count, vectors, sum);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) {
        float *to = (run.first > 0 ? within[i] : s->scores + i * KVEDGE_TILE + run.at) + t;
        const __m256 unit = _mm256_set1_ps(s->unit[i]), plus = _mm256_set1_ps(constant[i] * s->unit[i]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
          _mm256_storeu_ps(to + 8 * v, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][v]), unit, plus));
      }
    }
    if (run.first > 0)
      for (int i = 0; i < count; i++) put_run_scores(&run, within[i], s->scores + i * KVEDGE_TILE);
  }
}

/* Of 4 bits for up to four queries, of any for up to two. */
#define SCORE_RUNS(name, count, bits)                                                                                  \
  static RUN_FUNCTION void score_runs_##name(const run_scoring *s) { score_runs(s, count, bits); }
SCORE_RUNS(1, 1, 4)
SCORE_RUNS(2, 2, 4)
SCORE_RUNS(3, 3, 4)
SCORE_RUNS(4, 4, 4)
SCORE_RUNS(1_of_any, 1, s->keys->bits)
SCORE_RUNS(2_of_any, 2, s->keys->bits)
#undef SCORE_RUNS

static int most_queries(int bits) { return bits == 4 ? RUN_QUERIES : 2; }

/* Where a run's largest step is of another size than those before it, from 1/4 to 4 times, a unit for all loses too much:
 * the first run from `first` on that is, and the largest steps of those before it. Runs without steps go with any. */
static int runs_alike(const kvedge_tile *keys, int first, uint16_t *largest) {
  const int dim = keys->dim, stop = num_runs(keys);
  int least = 0, most = 0, r = first; /* as bits of a half, which order as what they stand for */
  memset(largest, 0, (size_t)kvedge_padded_channels(dim) * sizeof *largest);
  for (; r < stop; r++) {
    const uint16_t *steps = run_of_tile(keys, r, 0).parts.steps;
    uint16_t here = 0;
    for (int d = 0; d < dim; d++) here = steps[d] > here ? steps[d] : here;
    if (here > 0) {
      const int low = least == 0 || here < least ? here : least, high = here > most ? here : most;
      if (r > first && high - low > 2 << 10) break;
      least = low, most = high;
    }
    for (int d = 0; d < dim; d++) largest[d] = steps[d] > largest[d] ? steps[d] : largest[d];
  }
  return r;
}

/* Units of the numbers of `q` times the largest steps; returns whether 15 bits of some move a logit too far. */
static int choose_units(const kvedge_query *q, int padded, const uint16_t *steps, float *unit) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  int too_far = 0;
  for (int i = 0; i < q->num_queries; i++) {
    __m256 most = _mm256_setzero_ps();
    for (int d = 0; d < padded; d += 8) {
      const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(q->values + i * q->stride + d), steps_at(steps + d));
      most = _mm256_max_ps(most, _mm256_and_ps(product, magnitude));
    }
    const float largest = reduce_max(most);
    unit[i] = 1.0f; /* products round to 0 */
    if (!(largest > QUERY_NOTHING)) continue;
    unit[i] = largest * (256.0f / QUERY_MAX);
    if (q->planes == 0 && !(q->error[i] * unit[i] <= KVEDGE_LOGIT_ERROR)) too_far = 1;
  }
  return too_far;
}

static void KVEDGE_NAME(scores_of_runs)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  _Alignas(32) uint16_t steps[1024];
  float x[RUN_QUERIES][1024], unit[KVEDGE_STACK];
  run_scoring s = {.q = q, .keys = keys, .padded = kvedge_padded_channels(keys->dim), .x = x};
  if (q->planes == 3 || (keys->bits == 8 && keys->dim > CHANNELS_OF_8_BITS)) {
    scores_of_runs_avx256(q, keys, scores, accumulate);
    return;
  }
  for (s.first_run = 0; s.first_run < num_runs(keys); s.first_run = s.stop_run) {
    s.stop_run = runs_alike(keys, s.first_run, steps);
    if (choose_units(q, s.padded, steps, unit)) {
      scores_of_runs_avx256(q, keys, scores, accumulate); /* of the whole tile: it is rare */
      return;
    }
    for (int n, most = most_queries(keys->bits), first = 0; first < q->num_queries; first += n) {
      n = q->num_queries - first < most ? q->num_queries - first : most;
      for (int i = 0; i < n; i++) {
        const __m256 inverse = _mm256_set1_ps(1.0f / unit[first + i]);
        for (int d = 0; d < s.padded; d += 8) {
          const __m256 of_query = _mm256_loadu_ps(q->values + (first + i) * q->stride + d);
          _mm256_storeu_ps(x[i] + d, _mm256_mul_ps(of_query, inverse));
        }
      }
      s.unit = unit + first, s.scores = scores + first * KVEDGE_TILE;
      static void (*const of[2][RUN_QUERIES])(const run_scoring *) = {
          {score_runs_1_of_any, score_runs_2_of_any},
          {score_runs_1, score_runs_2, score_runs_3, score_runs_4}
      };
      of[keys->bits == 4][n - 1](&s);
    }
  }
}

/* ---- Weighted sums ---- */

enum { UNITS = KVEDGE_TILE / TOGETHER };

/* Numbers of a query's weights, p times steps, the units of every TOGETHER of them, and what is the same for all channels.
 * (`bits`: a constant where this is inlined, or 2 and 8 are told apart.) */
KVEDGE_INLINE float encode_weights_of_run(const float *p, const step_columns *columns, int tokens, const int bits,
                                          int16_t *numbers, float unit[UNITS]) {
  const __m256 middle = _mm256_set1_ps((float)(1 << (bits - 1)));
  __m256 added = _mm256_setzero_ps();
  for (int first = 0, u = 0; first < tokens; first += TOGETHER, u++) {
    const int stop = tokens - first < TOGETHER ? tokens : first + TOGETHER;
    __m256 most = _mm256_setzero_ps();
    for (int t = first; t < stop; t += 8) {
      const __m256 of_8 = _mm256_loadu_ps(p + t);
      most = _mm256_max_ps(most, _mm256_mul_ps(of_8, _mm256_loadu_ps(columns->steps + t)));
      added = _mm256_fmadd_ps(of_8, _mm256_loadu_ps(columns->middles + t), added);
    }
    unit[u] = reduce_max(most);
  }
  for (int first = 0, u = 0; first < tokens; first += TOGETHER, u++) {
    const int stop = tokens - first < TOGETHER ? tokens : first + TOGETHER;
    const __m256 factor = _mm256_set1_ps(unit[u] > WEIGHT_NOTHING ? WEIGHT_MAX_15 / unit[u] : 0.0f);
    __m256i total = _mm256_setzero_si256();
    unit[u] = unit[u] > WEIGHT_NOTHING ? unit[u] / WEIGHT_MAX_15 : 0.0f;
    for (int t = first; t < stop; t += 16) {
      __m256i number[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        const int at = t + 8 * j;
        __m256 weight = _mm256_mul_ps(_mm256_loadu_ps(p + at), _mm256_loadu_ps(columns->steps + at));
        weight = _mm256_mul_ps(weight, factor);
        const __m256 small = _mm256_cmp_ps(weight, _mm256_set1_ps(KVEDGE_DITHERED), _CMP_LT_OQ);
        weight = _mm256_add_ps(weight, _mm256_and_ps(small, _mm256_loadu_ps(kvedge_dither + at)));
        number[j] = _mm256_cvtps_epi32(weight);
        total = _mm256_add_epi32(total, number[j]);
      }
      _mm256_storeu_si256((__m256i *)(numbers + t), pair_up(bits, number[0], number[1]));
    }
    const __m256 of_middle = _mm256_mul_ps(middle, _mm256_set1_ps(unit[u]));
    added = _mm256_fnmadd_ps(of_middle, _mm256_cvtepi32_ps(total), added);
  }
  return reduce_add(added);
}

/* 8 * vectors channels of the group from d on, or the first `left` of 8. (`count`, `bits` and `vectors`: constants where this
 * is inlined.) */
KVEDGE_INLINE void weigh_lanes(const run_weighing *w, int d, int left, const int count, const int bits,
                               const int vectors, int16_t (*numbers)[KVEDGE_TILE], float (*unit)[UNITS],
                               const float *constant) {
  const __m256i there = first_lanes(left);
  const int runs = num_runs(w->values);
  __m256 all[RUN_QUERIES][4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const float *acc = w->acc + i * w->stride + d + 8 * v;
      const __m256 before = vectors > 1 ? _mm256_loadu_ps(acc) : _mm256_maskload_ps(acc, there);
      all[i][v] = _mm256_fmadd_ps(before, _mm256_set1_ps(w->rescale[i]), _mm256_set1_ps(constant[i]));
    }
  for (int first = 0; first < runs; first += TOGETHER / RUN) {
    lane_sums sum;
    clear_sums(count, vectors, sum);
    for (int r = first; r < runs && r < first + TOGETHER / RUN; r++) {
      const tile_run run = run_of_tile(w->values, r, 1);
      const lane_words words = words_of_run(w->values, r, &run.parts, 1, 4 * (w->group * GROUP + d));
      multiply_words(&words, vectors > 1 ? NULL : &there, numbers[0] + r * RUN, KVEDGE_TILE, bits, count, vectors, sum);
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++)
        all[i][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][v]),
                                    _mm256_set1_ps(unit[i][first / (TOGETHER / RUN)]), all[i][v]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float *acc = w->acc + i * w->stride + d + 8 * v;
      if (vectors > 1) _mm256_storeu_ps(acc, all[i][v]);
      else _mm256_maskstore_ps(acc, there, all[i][v]);
    }
}

KVEDGE_INLINE void weigh_runs(const run_weighing *w, const int count, const int bits) {
  const int vectors = vectors_for(count);
  int16_t numbers[RUN_QUERIES][KVEDGE_TILE];
  float unit[RUN_QUERIES][UNITS], constant[RUN_QUERIES];
  int left = w->values->dim - w->group * GROUP, d = 0;
  if (left > GROUP) left = GROUP;
  for (int i = 0; i < count; i++)
    constant[i] =
        encode_weights_of_run(w->p[i], w->columns, num_runs(w->values) * RUN, bits, numbers[i], unit[i]);
  for (; left >= 8 * vectors; d += 8 * vectors, left -= 8 * vectors)
    weigh_lanes(w, d, left, count, bits, vectors, numbers, unit, constant);
  for (; left > 0; d += 8, left -= 8) weigh_lanes(w, d, left, count, bits, 1, numbers, unit, constant);
}

#define WEIGH_RUNS(name, count, bits)                                                                                  \
  static RUN_FUNCTION void weigh_runs_##name(const run_weighing *w) { weigh_runs(w, count, bits); }
WEIGH_RUNS(1, 1, 4)
WEIGH_RUNS(2, 2, 4)
WEIGH_RUNS(3, 3, 4)
WEIGH_RUNS(4, 4, 4)
WEIGH_RUNS(1_of_any, 1, w->values->bits)
WEIGH_RUNS(2_of_any, 2, w->values->bits)
#undef WEIGH_RUNS

static void KVEDGE_NAME(weighted_sum_of_runs)(const kvedge_probabilities *p, const kvedge_tile *values,
                                              const kvedge_accumulators *to) {
  const int bits = values->bits, most = most_queries(bits);
  float room[RUN_QUERIES][KVEDGE_TILE];
  step_columns columns;
  if (p->planes == 3) {
    weighted_sum_of_runs_avx256(p, values, to);
    return;
  }
  for (int g = 0; g * GROUP < values->dim; g++) {
    read_columns(values, g, &columns);
    for (int i = 0, n; i < p->num_queries; i += n) {
      n = p->num_queries - i < most ? p->num_queries - i : most;
      run_weighing w = {.values = values,
                        .group = g,
                        .columns = &columns,
                        .acc = to->acc + i * to->stride + g * GROUP,
                        .stride = to->stride,
                        .rescale = to->rescale + i};
      for (int j = 0; j < n; j++) w.p[j] = p_of_runs(p, i + j, values, room[j]);
      static void (*const of[2][RUN_QUERIES])(const run_weighing *) = {
          {weigh_runs_1_of_any, weigh_runs_2_of_any},
          {weigh_runs_1, weigh_runs_2, weigh_runs_3, weigh_runs_4}
      };
      of[bits == 4][n - 1](&w);
    }
  }
  for (int r = 0; r < num_runs(values); r++)
    prefetch_run(values, r, bytes_of_words(values->dim, bits, 1), bytes_of_run(values->dim, bits, 1));
}
