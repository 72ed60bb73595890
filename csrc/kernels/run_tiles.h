/* What the files of runs share: runs.h has them, run_sums.h, or a path's own, the sums that int8's kernels do not make. */
#include "formats/kivi.h"

enum {
  RUN_LANES = 16,             /* independent sums, as in portable.h */
  RUN_CHANNELS = 32 * 256,    /* of queries that are prepared at a time */
  RUN_CODES = RUN * 1024,     /* of keys that are widened at a time; more than those of values */
  RUN_GROUPS = 1024 / GROUP,  /* of a value, at most */
  COLUMN = KVEDGE_TILE + RUN, /* a tile's steps, and no power of two */
};

/* Tokens of a tile that lie in its r-th run: the first of them in the run, and how many from token t of the tile on. */
static inline int tokens_of_run(const kvedge_tile *tile, int r, int t, int *first) {
  *first = r ? 0 : tile->first;
  const int left = tile->num_tokens - t, here = RUN - *first;
  return left < here ? left : here;
}

static inline run_parts parts_at(const kvedge_tile *tile, int r, int of_values) {
  return parts_of(tile->blocks[r] + tile->offset, tile->dim, tile->bits, of_values);
}

/* A run's steps and middles, and queries times its steps as a cell has them. */
typedef struct {
  float steps[1024], middles[1024], products[1024]; /* (padded), 0 from dim on */
  union {
    _Alignas(64) int8_t codes[RUN_CHANNELS * KVEDGE_CODE_BYTES];
    float values[RUN_CHANNELS];
  };
  float scale[KVEDGE_STACK], constant[KVEDGE_STACK];
  int32_t offsets[4 * KVEDGE_STACK];
} run_queries;

/* Steps and middles of a tile's values: a column for each group, 0 after the last token. */
typedef struct {
  float steps[RUN_GROUPS][COLUMN], middles[RUN_GROUPS][COLUMN];
} step_columns;

/* Of any number of groups. */
static inline void read_many_columns(const kvedge_tile *values, step_columns *to) {
  enum { MOST = RUN * RUN_GROUPS };
  const int groups = (values->dim + GROUP - 1) / GROUP;
  const float most = (float)(1 << (values->bits - 1));
  float steps[MOST], lows[MOST];
  int t = 0;
  for (int r = 0, first, count; t < values->num_tokens; t += count, r++) {
    count = tokens_of_run(values, r, t, &first);
    const run_parts run = parts_at(values, r, 1);
    floats_of_steps(run.steps + first * groups, count * groups, steps);
    floats_of_steps(run.lows + first * groups, count * groups, lows);
    for (int g = 0; g < groups; g++)
      for (int i = 0; i < count; i++) {
        to->steps[g][t + i] = steps[i * groups + g];
        to->middles[g][t + i] = lows[i * groups + g] + steps[i * groups + g] * most;
      }
  }
  for (; t % KVEDGE_BLOCK; t++)
    for (int g = 0; g < groups; g++) to->steps[g][t] = to->middles[g][t] = 0.0f;
}
