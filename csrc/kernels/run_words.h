/* What paths share that multiply runs as integers. Each first has kvedge_prefetch_again_after(), as x86.h. */
#ifndef KVEDGE_RUN_WORDS_H
#define KVEDGE_RUN_WORDS_H

#include "kernels/runs.h"

/* Words to multiply: `num` of each lane, `stride` bytes from those of all lanes to the next. What lies `ahead` of them is
 * prefetched meanwhile, and once more `after` bytes later. */
typedef struct {
  const uint8_t *words;
  ptrdiff_t stride;
  int num;
  uintptr_t ahead, after;
} lane_words;

/* Words of the r-th run of a tile, from byte `at` on. Where nothing follows, its own are prefetched, which are there anyway. */
KVEDGE_INLINE lane_words words_of_run(const kvedge_tile *tile, int r, const run_parts *run, int of_values,
                                      ptrdiff_t at) {
  const kvedge_prefetch *next = &tile->next;
  const uintptr_t here = (uintptr_t)(tile->blocks[r] + tile->offset);
  return (lane_words){.words = run->words + at,
                      .stride = 4 * num_lanes(tile->dim, of_values),
                      .num = num_words(tile->dim, tile->bits, of_values),
                      .ahead = next->blocks ? (uintptr_t)(next->blocks[r] + next->offset) - here : 0,
                      .after = next->blocks && next->in_order ? kvedge_prefetch_again_after() : 0};
}

/* Runs of a tile of keys for some queries from the first of `q` on, times 1 / unit: (count, padded). */
typedef struct {
  const kvedge_query *q;
  const kvedge_tile *keys;
  int first_run, stop_run, padded;
  float (*x)[1024];
  const float *unit; /* (count) */
  float *scores;
  char *scratch; /* working memory that is left */
} run_scoring;

/* Where a run's largest step is of another size than those before it, from 1/4 to 4 times, a unit for all loses too much:
 * the first run from `first` on that is, and the largest steps of those before it. Runs without steps go with any. */
static inline int runs_alike(const kvedge_tile *keys, int first, uint16_t *largest) {
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

/* A group of channels of the values of a tile, for some queries. */
typedef struct {
  const kvedge_tile *values;
  int group;
  const float *p[RUN_QUERIES]; /* in the order of the runs' tokens */
  const step_columns *columns;
  float *acc; /* (count, stride), of the group */
  ptrdiff_t stride;
  const float *rescale;
  char *scratch; /* working memory that is left */
} run_weighing;

typedef void run_weigher(const run_weighing *w);

/* Weighted sums of a tile of runs: of a group of channels at a time, whose steps read_steps() brings, for up to `most` queries,
 * by the weigher of as many. */
KVEDGE_INLINE void weigh_by_groups(const kvedge_probabilities *p, const kvedge_tile *values,
                                   const kvedge_accumulators *to,
                                   void (*const read_steps)(const kvedge_tile *values, int group, step_columns *to),
                                   run_weigher *const *weighers, int most) {
  char *scratch = p->scratch;
  float (*room)[KVEDGE_TILE] = kvedge_take_scratch(&scratch, RUN_QUERIES * sizeof *room);
  step_columns *columns = kvedge_take_scratch(&scratch, sizeof *columns);
  for (int g = 0; g * GROUP < values->dim; g++) {
    read_steps(values, g, columns);
    for (int i = 0, n; i < p->num_queries; i += n) {
      n = p->num_queries - i < most ? p->num_queries - i : most;
      run_weighing w = {.values = values,
                        .group = g,
                        .columns = columns,
                        .scratch = scratch,
                        .acc = to->acc + i * to->stride + g * GROUP,
                        .stride = to->stride,
                        .rescale = to->rescale + i};
      for (int j = 0; j < n; j++) w.p[j] = p_of_runs(p, i + j, values, room[j]);
      weighers[n - 1](&w);
    }
  }
  for (int r = 0; r < num_runs(values); r++)
    prefetch_run(values, r, bytes_of_words(values->dim, values->bits, 1), bytes_of_run(values->dim, values->bits, 1));
}

#endif
