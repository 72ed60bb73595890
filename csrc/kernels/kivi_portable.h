/* Runs of kivi2, kivi4 and kivi8 as they are stored (formats/kivi.c has their layout), in
 * floats: in plain C, which a path compiles for itself. Codes are counted from the middle one,
 * 2^(bits - 1); with middle = low + step * 2^(bits - 1)
 *
 *   scores[t] = sum_d q[d] middle[d] + sum_d (q[d] step[d]) code[t][d]            a step per channel and run
 *   acc[d]    = sum_t p[t] middle[t] + sum_t (p[t] step[t]) code[t][d]            a step per token and 64 channels
 *
 * The second sums are the same thing twice: of a vector of words, those of 32 tokens or of 64
 * channels side by side, the k-th codes times a number that all lanes share. Cells that
 * multiply integers do so too.
 */
#include "formats/kivi.h"

enum {
  RUN_LANES = 16,  /* independent sums, as in portable.h */
  RUN_QUERIES = 4, /* that words are unpacked for at a time */
  MOST_LANES = 64, /* tokens, or channels, that are worked on together */
  RUN_ROW = 1024 +
            32, /* elements of a query in working memory: not 4 KB apart, or loads of one wait for stores of the next */
};

#if defined(__clang__)
#define RUN_FUNCTION __attribute__((noinline, unused))
#else
#define RUN_FUNCTION __attribute__((noinline, noclone, unused))
#endif

/* The r-th run of a tile, and what the tile has of it: `count` tokens from `first` on, of which the first is the tile's
 * token `at`. */
typedef struct {
  run_arrays arrays;
  int first, count, at;
} tile_run;

KVEDGE_INLINE tile_run run_of_tile(const kvedge_tile *tile, int r, const int bits, int of_values) {
  tile_run run = {.arrays = arrays_of(tile->blocks[r] + tile->offset, tile->dim, bits, of_values)};
  run.first = r ? 0 : tile->first;
  run.at = r ? r * RUN - tile->first : 0;
  run.count = tile->num_tokens - run.at < RUN - run.first ? tile->num_tokens - run.at : RUN - run.first;
  return run;
}

static inline int num_runs(const kvedge_tile *tile) { return (tile->first + tile->num_tokens + RUN - 1) / RUN; }

/* Prefetches bytes from..to-1 of the r-th run of the next tile. */
KVEDGE_INLINE void prefetch_run(const kvedge_tile *tile, int r, size_t from, size_t to) {
  if (!tile->next.blocks) return;
  const uintptr_t run = (uintptr_t)tile->next.blocks[r] + (uintptr_t)tile->next.offset;
  prefetch_bytes((const char *)(run + from), (ptrdiff_t)(to - from));
}

/* Scores of a run's 32 tokens, where the tile has them: of all of them unless it begins within. */
static inline void put_run_scores(const tile_run *run, const float *all, float *scores) {
  memcpy(scores + run->at, all + run->first, (size_t)run->count * sizeof *scores);
}

/* sum[i][lane] += the sum over codes k of a lane's word of by[i][k] * (code - middle), for
 * `lanes` lanes and `count` queries. (`bits` and `count`: constants where this is inlined.) */
KVEDGE_INLINE void add_words(const uint8_t *restrict words, int lanes, const int bits, const int count,
                             const float *restrict by, ptrdiff_t stride, float (*restrict sum)[MOST_LANES]) {
  const uint32_t mask = (1u << bits) - 1;
  const int32_t middle = 1 << (bits - 1);
  float times[RUN_QUERIES][16];
  for (int i = 0; i < count; i++)
    for (int k = 0; k < 32 / bits; k++) times[i][k] = by[i * stride + k];
  for (int lane = 0; lane < lanes; lane++) {
    uint32_t word;
    memcpy(&word, words + 4 * lane, sizeof word);
    float of_lane[RUN_QUERIES];
    for (int i = 0; i < count; i++) of_lane[i] = sum[i][lane];
#pragma GCC unroll 16
    for (int k = 0; k < 32 / bits; k++) {
      const float code = (float)((int32_t)(word >> k * bits & mask) - middle);
      for (int i = 0; i < count; i++) of_lane[i] += times[i][k] * code;
    }
    for (int i = 0; i < count; i++) sum[i][lane] = of_lane[i];
  }
}

/* The same for `num` words of each lane, those of all lanes `lane_stride` words after the ones
 * before. (Apart, since it is large. Of other bits than 4 a query at a time.) */
static RUN_FUNCTION void add_all_words(const uint8_t *restrict words, int num, ptrdiff_t lane_stride, int lanes,
                                       int bits, int count, const float *restrict by, ptrdiff_t stride,
                                       float (*restrict sum)[MOST_LANES]) {
  for (int w = 0; w < num; w++, words += 4 * lane_stride, by += 32 / bits) {
    if (bits == 4 && count == RUN_QUERIES) {
      add_words(words, lanes, 4, RUN_QUERIES, by, stride, sum);
      continue;
    }
    for (int i = 0; i < count; i++) {
      if (bits == 4) add_words(words, lanes, 4, 1, by + i * stride, stride, sum + i);
      else if (bits == 2) add_words(words, lanes, 2, 1, by + i * stride, stride, sum + i);
      else add_words(words, lanes, 8, 1, by + i * stride, stride, sum + i);
    }
  }
}

/* Queries to compute for n of them: three of kivi4 are computed as four, with zeros, since only
 * four share unpacked codes. */
static inline int queries_for(int n, int bits) { return n > 2 && bits == 4 ? RUN_QUERIES : n; }

static inline float sum_of_lanes(float lane[RUN_LANES]) {
  for (int width = RUN_LANES / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

/* ---- Scores ---- */

/* products = x * steps; returns the sum of x * middles. */
static inline float multiply_steps(const float *x, int padded, const float *steps, const float *middles,
                                   float *restrict products) {
  float sum[RUN_LANES] = {0};
  for (int d = 0; d < padded; d += RUN_LANES)
    for (int j = 0; j < RUN_LANES; j++) {
      products[d + j] = x[d + j] * steps[d + j];
      sum[j] += x[d + j] * middles[d + j];
    }
  return sum_of_lanes(sum);
}

/* The error of a logit that rounding of a query may cause: larger where options.precision_bits is 16 or 8. */
static inline float logit_error_for(const kvedge_query *q) {
  return KVEDGE_LOGIT_ERROR * (q->planes == 2 ? 2.0f : q->planes == 1 ? 16.0f : 1.0f);
}

/* One key of a run may be thousands of times the others, even one that is hidden; then steps and
 * middles are as large, and what is left of the others' scores has lost too much, in floats and
 * in integers of 24 bits alike. `largest`: of a query's products with steps. */
static inline int needs_decoding(const kvedge_query *q, int i, float largest) {
  return !(q->error[i] * (largest * 0x1p-23f) * 8.0f <= KVEDGE_LOGIT_ERROR);
}

static inline float largest_of_products(const float *products, int padded) {
  float lane[RUN_LANES] = {0}, largest = 0.0f;
  for (int d = 0; d < padded; d += RUN_LANES)
    for (int j = 0; j < RUN_LANES; j++) lane[j] = fabsf(products[d + j]) > lane[j] ? fabsf(products[d + j]) : lane[j];
  for (int j = 0; j < RUN_LANES; j++) largest = lane[j] > largest ? lane[j] : largest;
  return largest;
}

/* Scores of a query with the tokens of a run that the tile has, of decoded keys: x = low + step
 * * code, as formats/kivi.c has it. */
static RUN_FUNCTION void score_decoded_run(const float *query, const tile_run *run, int dim, int bits,
                                           const float *steps, const float *lows, float *scores) {
  for (int t = 0; t < run->count; t++) {
    float sum[RUN_LANES] = {0};
    for (int d = 0; d < dim; d++) {
      const code_place at = place_of_code(dim, bits, 0, run->first + t, d);
      const int code = run->arrays.words[at.byte] >> at.shift & ((1 << bits) - 1);
      sum[d % RUN_LANES] += query[d] * (lows[d] + steps[d] * (float)code);
    }
    scores[run->at + t] = sum_of_lanes(sum);
  }
}

static inline void scores_of_runs_portable(const kvedge_query *q, const kvedge_tile *keys, float *scores,
                                           int accumulate) {
  (void)accumulate; /* keys have one group */
  const int dim = keys->dim, bits = keys->bits, padded = kvedge_padded_channels(dim);
  const float most = (float)(1 << (bits - 1));
  struct {
    float steps[1024], lows[1024], middles[1024], products[RUN_QUERIES][1024];
  } *room = (void *)q->scratch;
  float *steps = room->steps, *lows = room->lows, *middles = room->middles, (*products)[1024] = room->products;
  float sum[RUN_QUERIES][MOST_LANES];
  for (int d = dim; d < padded; d++) steps[d] = middles[d] = 0.0f;
  for (int r = 0; r < num_runs(keys); r++) {
    const tile_run run = run_of_tile(keys, r, keys->bits, 0);
    floats_of_steps(run.arrays.steps, dim, steps);
    floats_of_steps(run.arrays.lows, dim, lows);
    for (int d = 0; d < dim; d++) middles[d] = lows[d] + steps[d] * most;
    prefetch_run(keys, r, 0, bytes_of_run(dim, bits, 0));
    for (int i = 0, n; i < q->num_queries; i += n) {
      n = q->num_queries - i < RUN_QUERIES ? q->num_queries - i : RUN_QUERIES;
      const int all = queries_for(n, bits);
      for (int j = 0; j < all; j++) {
        float constant = 0.0f;
        if (j < n) constant = multiply_steps(q->values + (i + j) * q->stride, padded, steps, middles, products[j]);
        else memset(products[j], 0, (size_t)padded * sizeof **products);
        for (int t = 0; t < RUN; t++) sum[j][t] = constant;
      }
      add_all_words(run.arrays.words, num_words(dim, bits, 0), RUN, RUN, bits, all, products[0], 1024, sum);
      for (int j = 0; j < n; j++) {
        float *to = scores + (i + j) * KVEDGE_TILE;
        if (needs_decoding(q, i + j, largest_of_products(products[j], padded)))
          score_decoded_run(q->values + (i + j) * q->stride, &run, dim, bits, steps, lows, to);
        else put_run_scores(&run, sum[j], to);
      }
    }
  }
}

/* ---- Weighted sums ---- */

/* Steps and middles of the values of a tile, of one group of channels: (num_runs, RUN), in the
 * order of the runs' tokens. */
typedef struct {
  float steps[KVEDGE_TILE], middles[KVEDGE_TILE];
} step_columns;

static inline void read_columns(const kvedge_tile *values, int g, step_columns *to) {
  const float most = (float)(1 << (values->bits - 1));
  for (int r = 0; r < num_runs(values); r++) {
    const run_arrays run = run_of_tile(values, r, values->bits, 1).arrays;
    float *steps = to->steps + r * RUN, *middles = to->middles + r * RUN;
    floats_of_steps(run.steps + g * RUN, RUN, steps);
    floats_of_steps(run.lows + g * RUN, RUN, middles);
    for (int t = 0; t < RUN; t++) middles[t] += steps[t] * most;
  }
}

/* A query's probabilities in the order of the runs' tokens; 0 where the tile has none. */
static inline const float *p_of_runs(const kvedge_probabilities *p, int i, const kvedge_tile *values,
                                     float room[KVEDGE_TILE]) {
  const float *of_query = p->p + i * KVEDGE_TILE;
  const int end = values->first + values->num_tokens, whole = num_runs(values) * RUN;
  if (values->first == 0 && whole - values->num_tokens < KVEDGE_BLOCK) return of_query;
  for (int t = 0; t < values->first; t++) room[t] = 0.0f;
  memcpy(room + values->first, of_query, (size_t)values->num_tokens * sizeof *room);
  for (int t = end; t < whole; t++) room[t] = 0.0f;
  return room;
}

static inline void weighted_sum_of_runs_portable(const kvedge_probabilities *p, const kvedge_tile *values,
                                                 const kvedge_accumulators *to) {
  const int dim = values->dim, bits = values->bits, runs = num_runs(values);
  step_columns columns;
  float room[KVEDGE_TILE], weights[RUN_QUERIES][KVEDGE_TILE], sum[RUN_QUERIES][MOST_LANES];
  for (int g = 0; g * GROUP < dim; g++) {
    const int left = dim - g * GROUP, lanes = left < GROUP ? left : GROUP;
    read_columns(values, g, &columns);
    for (int i = 0, n; i < p->num_queries; i += n) {
      n = p->num_queries - i < RUN_QUERIES ? p->num_queries - i : RUN_QUERIES;
      const int all = queries_for(n, bits);
      for (int j = 0; j < all; j++) {
        float constant = 0.0f;
        if (j >= n) memset(weights[j], 0, sizeof weights[j]);
        else
          constant =
              multiply_steps(p_of_runs(p, i + j, values, room), runs * RUN, columns.steps, columns.middles, weights[j]);
        for (int d = 0; d < lanes; d++) sum[j][d] = constant;
      }
      for (int r = 0; r < runs; r++) {
        const tile_run run = run_of_tile(values, r, values->bits, 1);
        const uint8_t *words = run.arrays.words + 4 * g * GROUP;
        add_all_words(words, num_words(dim, bits, 1), dim, lanes, bits, all, weights[0] + r * RUN, KVEDGE_TILE, sum);
        if (g + i == 0) prefetch_run(values, r, 0, bytes_of_run(dim, bits, 1));
      }
      for (int j = 0; j < n; j++) {
        float *acc = to->acc + (i + j) * to->stride + g * GROUP;
        for (int d = 0; d < lanes; d++) acc[d] = acc[d] * to->rescale[i + j] + sum[j][d];
      }
    }
  }
}

/* ---- What paths share that multiply runs as integers ---- */

/* Words to multiply: `num` of each lane, `stride` bytes apart. The words of the next tile,
 * `ahead` bytes behind these unless that is 0, are prefetched meanwhile, and once more `after` bytes later. */
typedef struct {
  const uint8_t *words;
  ptrdiff_t stride;
  int num;
  uintptr_t ahead, after;
} lane_words;

/* Words of run r of a tile, of codes of `bits` bits, from byte `at` on. (`bits` is no field of the tile, since it is a
 * constant where this is inlined: words are else counted by dividing.) */
KVEDGE_INLINE lane_words words_of_run(const kvedge_tile *tile, int r, const run_arrays *run, const int bits,
                                      int of_values, ptrdiff_t at) {
  const kvedge_prefetch *next = &tile->next;
  const uintptr_t here = (uintptr_t)(tile->blocks[r] + tile->offset);
  return (lane_words){.words = run->words + at,
                      .stride = 4 * num_lanes(tile->dim, of_values),
                      .num = num_words(tile->dim, bits, of_values),
                      .ahead = next->blocks ? (uintptr_t)(next->blocks[r] + next->offset) - here : 0,
                      .after = next->blocks && next->in_order ? kvedge_prefetch_again_after() : 0};
}

/* Runs of a tile of keys for some queries from the first of `q` on, times 1 / unit: (count, padded). */
typedef struct {
  const kvedge_query *q;
  const kvedge_tile *keys;
  int first_run, stop_run, padded;
  float (*x)[RUN_ROW];
  const float *unit; /* (count) */
  float *scores;
  char *scratch; /* working memory that is left */
} run_scoring;

/* The runs from `first` on that can share a unit of the quantized query: their largest steps are
 * within 1/4 to 4 times of each other, else the unit costs some of them their precision. Returns
 * the run after them; `largest` is their largest step of each channel. A run whose steps are all
 * 0 shares any unit. */
static inline int runs_alike(const kvedge_tile *keys, int first, uint16_t *largest) {
  const int dim = keys->dim, stop = num_runs(keys);
  int least = 0, most = 0, r = first; /* as bits of a half, which order as what they stand for */
  memset(largest, 0, (size_t)kvedge_padded_channels(dim) * sizeof *largest);
  for (; r < stop; r++) {
    const uint16_t *steps = run_of_tile(keys, r, keys->bits, 0).arrays.steps;
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

/* A group of channels of the values of a tile, for some queries. */
typedef struct {
  const kvedge_tile *values;
  int group;
  const float *p[RUN_QUERIES]; /* in the order of the runs' tokens */
  const step_columns *columns;
  int unit_tokens; /* whose weights have one unit, where they become integers of 16 bits: RUN, or twice as many */
  float *acc;      /* (count, stride), of the group */
  ptrdiff_t stride;
  const float *rescale;
  char *scratch; /* working memory that is left */
} run_sums;

typedef void run_sum_function(const run_sums *w);

/* Weighted sums of a tile of runs: of a group of channels at a time, whose steps read_steps()
 * brings, for up to `most` queries, by the sum_function of as many. */
KVEDGE_INLINE void sum_by_groups(const kvedge_probabilities *p, const kvedge_tile *values,
                                 const kvedge_accumulators *to,
                                 void (*const read_steps)(const kvedge_tile *values, int group, step_columns *to),
                                 run_sum_function *const *sum_functions, int most) {
  char *scratch = p->scratch;
  float (*room)[KVEDGE_TILE] = kvedge_take_scratch(&scratch, RUN_QUERIES * sizeof *room);
  step_columns *columns = kvedge_take_scratch(&scratch, sizeof *columns);
  kvedge_tile again = *values; /* for further queries: the next tile is prefetched once */
  again.next.blocks = NULL;
  for (int g = 0; g * GROUP < values->dim; g++) {
    read_steps(values, g, columns);
    for (int i = 0, n; i < p->num_queries; i += n) {
      n = p->num_queries - i < most ? p->num_queries - i : most;
      run_sums w = {.values = i ? &again : values,
                    .group = g,
                    .columns = columns,
                    .unit_tokens = p->planes == 3 ? RUN : 2 * RUN,
                    .scratch = scratch,
                    .acc = to->acc + i * to->stride + g * GROUP,
                    .stride = to->stride,
                    .rescale = to->rescale + i};
      for (int j = 0; j < n; j++) w.p[j] = p_of_runs(p, i + j, values, room[j]);
      sum_functions[n - 1](&w);
    }
  }
  for (int r = 0; r < num_runs(values); r++)
    prefetch_run(values, r, bytes_of_words(values->dim, values->bits, 1), bytes_of_run(values->dim, values->bits, 1));
}

/* A path's cell of runs in floats. */
#define KVEDGE_RUNS_PORTABLE {.scores = scores_of_runs_portable, .weighted_sum = weighted_sum_of_runs_portable}
