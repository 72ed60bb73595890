/* Runs (kivi2, kivi4, kivi8) as integers of 16 bits, for any width of vectors: kernels/kivi_portable.h
 * has the sums. Included by a path that first defines
 *
 *   floats, integers               vectors of FLOATS floats, and of as many integers of 32 bits
 *   load_floats(p), store_floats(p, x), zero_floats(), all_floats(f), multiply_floats(a, b), multiply_add_floats(a, b, c): a * b + c,
 *   max_floats(a, b), magnitudes(x), sum_of_floats(x), max_of_floats(x), load_halves(p)
 *   load_first_floats(p, n), store_first_floats(p, n, x)   only the first n, up to FLOATS
 *   zero_integers(), add_integers(a, b), round_floats(x), floats_of_integers(x)
 *   round_dithered_floats(x, dither)   round(x + dither) where x is below KVEDGE_DITHERED, else round(x)
 *   store_pairs(bits, number, to)  16 integers as 16 bits, in the order that multiply_pair() wants for words of codes of `bits` bits:
 *                                  pairs of the k-th numbers of the two halves that a word's codes have, for each word
 *   word_vector                    FLOATS words of 4 bytes
 *   load_words(p), load_first_words(p, n)   at any address; the first n
 *   low_codes(words, bits)         in each half of a word its lowest code
 *   next_codes(words, bits)        halves shifted down by a code
 *   pair, pair_for_all(numbers)    two numbers for all lanes
 *   lane_sum, zero_sum(), floats_of_sum(sum)   FLOATS sums of 32 bits
 *   multiply_pair(sum, codes, by)  sum += the first number times the lower half's code, and the second times the upper's
 *   scores_in_floats, weighted_sum_in_floats   a cell of runs in floats
 *   KVEDGE_NAME(function)          the path's function of that name
 *
 * So the two halves of a word are multiplied at once. Nothing is transposed, and nothing summed over lanes.
 *
 * Codes are counted from 0 on; what the middle code adds, the sum of all numbers, is taken off
 * in floats. Numbers have 15 bits and a sign. The unit of a query's is one for as many runs as
 * have steps of about the same size, so that no run waits for a maximum; weights of 64 tokens
 * have one, or of 32 where that does (by_32). Where it is not enough (three planes) codes become floats.
 */
#include "kernels/kivi_portable.h"

enum {
  SUMS_OF_LANES = 8,         /* vectors of sums at a time */
  UNITS = KVEDGE_TILE / RUN, /* of a tile's weights, at most */
  CHANNELS_OF_8_BITS = 256,  /* whose products add up in 32 bits: x 255 x 32767 */
  VECTORS_OF_16 = 16 / FLOATS,
};

#define NUMBER_MAX 32635.0f /* of a query: a little below what fits, because products round */
#define WEIGHT_NUMBER_MAX 32766.0f
#define NUMBER_NOTHING 1e-30f

/* A function for each of 2, 4 and 8 bits, and 1 to RUN_QUERIES queries, and a table of them by bits / 4. */
#define FOR_QUERIES(function, bits) function(bits, 1) function(bits, 2) function(bits, 3) function(bits, 4)
#define FOR_BITS_AND_QUERIES(function) FOR_QUERIES(function, 2) FOR_QUERIES(function, 4) FOR_QUERIES(function, 8)
#define RUN_NAME(verb, count, bits) KVEDGE_NAME(verb##_##count##_of_##bits##_bits)
#define BY_QUERIES_OF(verb, bits)                                                                                      \
  {RUN_NAME(verb, 1, bits), RUN_NAME(verb, 2, bits), RUN_NAME(verb, 3, bits), RUN_NAME(verb, 4, bits)}
#define TABLE_BY_BITS(verb) BY_QUERIES_OF(verb, 2), BY_QUERIES_OF(verb, 4), BY_QUERIES_OF(verb, 8)

/* Vectors of lanes that are worked on together. */
KVEDGE_INLINE int vectors_for(const int count) { return count <= SUMS_OF_LANES / 4 ? 4 : 2; }

/* Sums of products: (queries, vectors of lanes). */
typedef lane_sum lane_sums[RUN_QUERIES][4];

/* sum += the products of all words of FLOATS * vectors lanes, of one vector the first `left`,
 * with the numbers of `count` queries, `stride` from one to the next. (`count` and `vectors`:
 * constants where this is inlined, as is `bits`.) */
KVEDGE_INLINE void multiply_words(const lane_words *w, int left, const int16_t *numbers, ptrdiff_t stride,
                                  const int bits, const int count, const int vectors, lane_sums sum) {
  const uint8_t *from = w->words;
  uintptr_t next = (uintptr_t)from + w->ahead, again = next - w->after;
  for (int n = 0; n < w->num; n++, from += w->stride) {
    word_vector word[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      word[v] = vectors > 1 || left >= FLOATS ? load_words(from + 4 * FLOATS * v) : load_first_words(from, left);
      if (v * FLOATS % 16 > 0 || !w->ahead) continue;
      __builtin_prefetch((const void *)(next + 4 * FLOATS * (unsigned)v), 0, 2);
      __builtin_prefetch((const void *)(again + 4 * FLOATS * (unsigned)v), 0, 2);
    }
#define MULTIPLY_CODES(last)                                                                                           \
  {                                                                                                                    \
    word_vector codes[4];                                                                                              \
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) codes[v] = last ? word[v] : low_codes(word[v], bits);    \
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors && !last; v++) word[v] = next_codes(word[v], bits);            \
    _Pragma("GCC unroll 4") for (int i = 0; i < count; i++) {                                                          \
      const pair by = pair_for_all(numbers + i * stride);                                                              \
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) multiply_pair(&sum[i][v], codes[v], by);               \
    }                                                                                                                  \
    numbers += 2;                                                                                                      \
  }
#pragma GCC unroll 8
    for (int k = 1; k < 16 / bits; k++) MULTIPLY_CODES(0)
    MULTIPLY_CODES(1)
#undef MULTIPLY_CODES
    next += (uintptr_t)w->stride, again += (uintptr_t)w->stride;
  }
}

KVEDGE_INLINE void clear_sums(const int count, const int vectors, lane_sums sum) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[i][v] = zero_sum();
}

/* ---- Scores ---- */

/* Numbers of queries times a run's steps, and their sums of products with all middles, less what
 * the middle code adds to those of the numbers: in units. (`count` and `bits`: constants where
 * this is inlined.) */
KVEDGE_INLINE void quantize_for_run(const run_scoring *s, const run_arrays *run, const int count, const int bits,
                                    int16_t (*numbers)[RUN_ROW], float constant[RUN_QUERIES]) {
  const int dim = s->keys->dim;
  const floats most = all_floats((float)(1 << (bits - 1)));
  floats added[RUN_QUERIES];
  integers total[RUN_QUERIES];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) added[i] = zero_floats(), total[i] = zero_integers();
  for (int d = 0; d < dim; d += 16) {
    const uint16_t *steps_of = run->steps + d, *lows_of = run->lows + d;
    uint16_t last[2][16];
    if (dim - d < 16) { /* those past the last are 0 */
      memset(last, 0, sizeof last);
      memcpy(last[0], steps_of, (size_t)(dim - d) * sizeof **last);
      memcpy(last[1], lows_of, (size_t)(dim - d) * sizeof **last);
      steps_of = last[0], lows_of = last[1];
    }
    floats steps[VECTORS_OF_16], middles[VECTORS_OF_16];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS_OF_16; j++) {
      steps[j] = load_halves(steps_of + FLOATS * j);
      middles[j] = multiply_add_floats(steps[j], most, load_halves(lows_of + FLOATS * j));
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      integers number[VECTORS_OF_16];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_OF_16; j++) {
        const floats x = load_floats(s->x[i] + d + FLOATS * j);
        number[j] = round_floats(multiply_floats(x, steps[j]));
        total[i] = add_integers(total[i], number[j]);
        added[i] = multiply_add_floats(x, middles[j], added[i]);
      }
      store_pairs(bits, number, numbers[i] + d);
    }
  }
  const floats less = all_floats(-(float)(1 << (bits - 1)));
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
    constant[i] = sum_of_floats(multiply_add_floats(less, floats_of_integers(total[i]), added[i]));
}

KVEDGE_INLINE void score_pairs(const run_scoring *s, const int count, const int bits) {
  const int vectors = vectors_for(count);
  const size_t bytes = bytes_of_words(s->keys->dim, bits, 0), of_run = bytes_of_run(s->keys->dim, bits, 0);
  int16_t (*numbers)[RUN_ROW] = (void *)s->scratch;
  for (int r = s->first_run; r < s->stop_run; r++) {
    const tile_run run = run_of_tile(s->keys, r, bits, 0);
    float constant[RUN_QUERIES], within[RUN_QUERIES][RUN];
    quantize_for_run(s, &run.arrays, count, bits, numbers, constant);
    prefetch_run(s->keys, r, bytes, of_run);
    for (int t = 0; t < RUN; t += FLOATS * vectors) {
      const lane_words at = words_of_run(s->keys, r, &run.arrays, bits, 0, 4 * t);
      lane_sums sum;
      clear_sums(count, vectors, sum);
      multiply_words(&at, FLOATS, numbers[0], RUN_ROW, bits, count, vectors, sum);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) {
        float *to = (run.first > 0 ? within[i] : s->scores + i * KVEDGE_TILE + run.at) + t;
        const floats unit = all_floats(s->unit[i]), plus = all_floats(constant[i] * s->unit[i]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
          store_floats(to + FLOATS * v, multiply_add_floats(floats_of_sum(sum[i][v]), unit, plus));
      }
    }
    if (run.first > 0)
      for (int i = 0; i < count; i++) put_run_scores(&run, within[i], s->scores + i * KVEDGE_TILE);
  }
}

#define SCORE_RUNS(bits, count)                                                                                        \
  static RUN_FUNCTION void RUN_NAME(score, count, bits)(const run_scoring *s) { score_pairs(s, count, bits); }
FOR_BITS_AND_QUERIES(SCORE_RUNS)
#undef SCORE_RUNS

/* Units of the numbers of `q` times the largest steps; returns whether 15 bits of some move a logit too far. */
static int choose_units(const kvedge_query *q, int padded, const uint16_t *steps, float *unit) {
  int too_far = 0;
  for (int i = 0; i < q->num_queries; i++) {
    floats most = zero_floats();
    for (int d = 0; d < padded; d += FLOATS) {
      const floats product = multiply_floats(load_floats(q->values + i * q->stride + d), load_halves(steps + d));
      most = max_floats(most, magnitudes(product));
    }
    const float largest = max_of_floats(most);
    unit[i] = 1.0f; /* products round to 0 */
    if (!(largest > NUMBER_NOTHING)) continue;
    unit[i] = largest * (1.0f / NUMBER_MAX);
    if (!(q->error[i] * unit[i] <= logit_error_for(q))) too_far = 1;
  }
  return too_far;
}

static void KVEDGE_NAME(scores_of_runs)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate) {
  char *scratch = q->scratch;
  kvedge_tile tile = *keys;
  uint16_t *steps = kvedge_take_scratch(&scratch, 1024 * sizeof *steps);
  float (*x)[RUN_ROW] = kvedge_take_scratch(&scratch, RUN_QUERIES * sizeof *x), unit[KVEDGE_QUERY_ROWS];
  run_scoring s = {.q = q, .keys = &tile, .padded = kvedge_padded_channels(keys->dim), .x = x, .scratch = scratch};
  if (q->planes == 3 || (keys->bits == 8 && keys->dim > CHANNELS_OF_8_BITS)) {
    scores_in_floats(q, keys, scores, accumulate);
    return;
  }
  for (s.first_run = 0; s.first_run < num_runs(keys); s.first_run = s.stop_run) {
    s.stop_run = runs_alike(keys, s.first_run, steps);
    if (choose_units(q, s.padded, steps, unit)) {
      scores_in_floats(q, keys, scores, accumulate); /* of the whole tile: it is rare */
      return;
    }
    tile.next = keys->next;
    for (int n, first = 0; first < q->num_queries; first += n) {
      n = q->num_queries - first < RUN_QUERIES ? q->num_queries - first : RUN_QUERIES;
      for (int i = 0; i < n; i++) {
        const floats inverse = all_floats(1.0f / unit[first + i]);
        for (int d = 0; d < s.padded; d += FLOATS)
          store_floats(x[i] + d, multiply_floats(load_floats(q->values + (first + i) * q->stride + d), inverse));
      }
      s.unit = unit + first, s.scores = scores + first * KVEDGE_TILE;
      static void (*const of[3][RUN_QUERIES])(const run_scoring *) = {TABLE_BY_BITS(score)};
      of[keys->bits / 4][n - 1](&s);
      tile.next.blocks = NULL; /* the next tile is prefetched once */
    }
  }
}

/* ---- Weighted sums ---- */

static void read_columns_of_pairs(const kvedge_tile *values, int g, step_columns *to) {
  const floats most = all_floats((float)(1 << (values->bits - 1)));
  for (int r = 0; r < num_runs(values); r++) {
    const run_arrays run = run_of_tile(values, r, values->bits, 1).arrays;
    for (int t = 0; t < RUN; t += FLOATS) {
      const floats steps = load_halves(run.steps + g * RUN + t), lows = load_halves(run.lows + g * RUN + t);
      store_floats(to->steps + r * RUN + t, steps);
      store_floats(to->middles + r * RUN + t, multiply_add_floats(steps, most, lows));
    }
  }
}

/* Numbers of a query's weights, p times steps, the units of every `unit_tokens` of them, and what
 * is the same for all channels. */
static RUN_FUNCTION float encode_weights_of_runs(const float *p, const step_columns *columns, int tokens,
                                                 int unit_tokens, int bits, int16_t *numbers, float unit[UNITS]) {
  floats added = zero_floats();
  for (int first = 0, u = 0; first < tokens; first += unit_tokens, u++) {
    const int stop = tokens - first < unit_tokens ? tokens : first + unit_tokens;
    floats most = zero_floats();
    for (int t = first; t < stop; t += FLOATS) {
      const floats weights = load_floats(p + t);
      most = max_floats(most, multiply_floats(weights, load_floats(columns->steps + t)));
      added = multiply_add_floats(weights, load_floats(columns->middles + t), added);
    }
    unit[u] = max_of_floats(most);
  }
  for (int first = 0, u = 0; first < tokens; first += unit_tokens, u++) {
    const int stop = tokens - first < unit_tokens ? tokens : first + unit_tokens;
    const floats factor = all_floats(unit[u] > NUMBER_NOTHING ? WEIGHT_NUMBER_MAX / unit[u] : 0.0f);
    integers total = zero_integers();
    unit[u] = unit[u] > NUMBER_NOTHING ? unit[u] / WEIGHT_NUMBER_MAX : 0.0f;
    for (int t = first; t < stop; t += 16) {
      integers number[VECTORS_OF_16];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_OF_16; j++) {
        const int at = t + FLOATS * j;
        const floats weight = multiply_floats(load_floats(p + at), load_floats(columns->steps + at));
        number[j] = round_dithered_floats(multiply_floats(weight, factor), load_floats(kvedge_dither + at));
        total = add_integers(total, number[j]);
      }
      store_pairs(bits, number, numbers + t);
    }
    added = multiply_add_floats(all_floats(-(float)(1 << (bits - 1)) * unit[u]), floats_of_integers(total), added);
  }
  return sum_of_floats(added);
}

/* FLOATS * vectors channels of the group from d on, of one vector the first `left`. (`count`,
 * `bits` and `vectors`: constants where this is inlined.) */
KVEDGE_INLINE void sum_lanes(const run_sums *w, int d, int left, const int count, const int bits, const int vectors,
                             int16_t (*numbers)[KVEDGE_TILE], float (*unit)[UNITS], const float *constant) {
  const int runs = num_runs(w->values), whole = vectors > 1 || left >= FLOATS;
  floats all[RUN_QUERIES][4];
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const float *acc = w->acc + i * w->stride + d + FLOATS * v;
      const floats before = whole ? load_floats(acc) : load_first_floats(acc, left);
      all[i][v] = multiply_add_floats(before, all_floats(w->rescale[i]), all_floats(constant[i]));
    }
  for (int first = 0, u = 0; first < runs; first += w->unit_tokens / RUN, u++) {
    lane_sums sum;
    clear_sums(count, vectors, sum);
    for (int r = first; r < runs && r < first + w->unit_tokens / RUN; r++) {
      const tile_run run = run_of_tile(w->values, r, bits, 1);
      const lane_words at = words_of_run(w->values, r, &run.arrays, bits, 1, 4 * (w->group * GROUP + d));
      multiply_words(&at, left, numbers[0] + r * RUN, KVEDGE_TILE, bits, count, vectors, sum);
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++)
        all[i][v] = multiply_add_floats(floats_of_sum(sum[i][v]), all_floats(unit[i][u]), all[i][v]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float *acc = w->acc + i * w->stride + d + FLOATS * v;
      if (whole) store_floats(acc, all[i][v]);
      else store_first_floats(acc, left, all[i][v]);
    }
}

KVEDGE_INLINE void sum_pairs(const run_sums *w, const int count, const int bits) {
  const int vectors = vectors_for(count);
  int16_t (*numbers)[KVEDGE_TILE] = (void *)w->scratch;
  float unit[RUN_QUERIES][UNITS], constant[RUN_QUERIES];
  int left = w->values->dim - w->group * GROUP, d = 0;
  if (left > GROUP) left = GROUP;
  for (int i = 0; i < count; i++)
    constant[i] = encode_weights_of_runs(w->p[i], w->columns, num_runs(w->values) * RUN, w->unit_tokens, bits,
                                         numbers[i], unit[i]);
  for (; left >= FLOATS * vectors; d += FLOATS * vectors, left -= FLOATS * vectors)
    sum_lanes(w, d, left, count, bits, vectors, numbers, unit, constant);
  for (; left > 0; d += FLOATS, left -= FLOATS) sum_lanes(w, d, left, count, bits, 1, numbers, unit, constant);
}

#define SUM_RUNS(bits, count)                                                                                          \
  static RUN_FUNCTION void RUN_NAME(sum, count, bits)(const run_sums *w) { sum_pairs(w, count, bits); }
FOR_BITS_AND_QUERIES(SUM_RUNS)
#undef SUM_RUNS

static void KVEDGE_NAME(weighted_sum_of_runs)(const kvedge_probabilities *p, const kvedge_tile *values,
                                              const kvedge_accumulators *to) {
  static run_sum_function *const of[3][RUN_QUERIES] = {TABLE_BY_BITS(sum)};
  if (p->planes == 3 && !p->by_32) weighted_sum_in_floats(p, values, to);
  else sum_by_groups(p, values, to, read_columns_of_pairs, of[values->bits / 4], RUN_QUERIES);
}
