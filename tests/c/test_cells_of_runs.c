/* Holds the cells of runs (KVEDGE_KIVI2, 4, 8) of every table against plain references in double.
 *
 *   test_cells_of_runs [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Each run lies in memory of exactly its bytes, before a page without access. Prints a line per kernel and width of
 * codes, then 'N passed, N failed'; exits with 1 if one failed.
 */
#include "tables.h"

enum { RUN = 32, GROUP = 64, TILE_RUNS = KVEDGE_TILE / RUN };

static int bits; /* of a code */
static double expected[KVEDGE_QUERY_ROWS * 1024], allowed[KVEDGE_QUERY_ROWS * 1024];

typedef struct {
  shape of;
  int first; /* where in its first run a tile begins */
} place;

static void fail_at(place at, int query, int index, double got, double should_be) {
  fail("dim=%d first=%d tokens=%d queries=%d: query %d, element %d: %.9g, not %.9g", at.of.dim, at.first,
       at.of.num_tokens, at.of.num_queries, query, index, got, should_be);
}

/* ---- Tiles: csrc/formats/kivi.c says what a run is ------------------------------------------------- */

/* Steps and lows of ordinary rows; of groups of equal elements; subnormal; as large as encoding makes them; and any finite
 * ones, as a file may hold. */
typedef enum { PLAIN, CONSTANT, TINY, EXTREME, FOREIGN, NUM_KINDS } run_kind;

typedef struct {
  block runs[TILE_RUNS], table, prefetch;
  int num_runs, of_values;
  size_t words, num_steps; /* bytes of a run's codes; its steps */
  kvedge_tile tile;
} run_tile;

static uint8_t *run_of(const run_tile *r, int run) { return (uint8_t *)r->runs[run].data; }

static int groups_of(const run_tile *r) { return (r->tile.dim + GROUP - 1) / GROUP; }

/* Step `i` of a run; its smallest value is as many halves further as there are steps. */
static uint8_t *step_at(const run_tile *r, int run, size_t i) { return run_of(r, run) + r->words + 2 * i; }

/* That of an element of a run: keys have one per channel, values one per token and group. */
static size_t index_of_step(const run_tile *r, int token, int d) {
  return r->of_values ? (size_t)(d / GROUP * RUN + token) : (size_t)d;
}

/* Where the code of an element of a run begins: words have codes of a token, or of a channel of values. */
static uint8_t *code_at(const run_tile *r, int run, int token, int d, int *shift) {
  const int i = r->of_values ? token : d, lane = r->of_values ? d : token, lanes = r->of_values ? r->tile.dim : RUN;
  const int bit = i % (32 / bits) * bits;
  *shift = bit % 8;
  return run_of(r, run) + 4 * (i / (32 / bits) * lanes + lane) + bit / 8;
}

static void put_half(uint8_t *to, int half) {
  const uint16_t x = (uint16_t)half;
  memcpy(to, &x, sizeof x);
}

static double half_at(const uint8_t *from) {
  uint16_t half;
  return memcpy(&half, from, sizeof half), value_of_half(half);
}

static void put_levels(const run_tile *r, int run, size_t i, run_kind kind) {
  enum { LARGEST = 0x7bff, NEGATIVE = 0x8000 };
  const int sign = random_below(2) ? NEGATIVE : 0, plain = random_below(4 << 10); /* below 2^-11 */
  int step = (13 - bits) << 10 | random_below(1 << 10), low = sign | (12 << 10) | random_below(4 << 10);
  if (kind == CONSTANT) step = 0;
  if (kind == TINY) step = random_below(1 << 10), low = sign | random_below(1 << 10);
  if (kind == EXTREME) step = (31 - bits) << 10 | random_below(8), low = NEGATIVE | LARGEST;
  if (kind == FOREIGN) step = random_below(LARGEST + 1), low = sign | random_below(LARGEST + 1);
  if (random_below(16) == 0) step = kind == PLAIN ? plain : 0;
  if (low == NEGATIVE || random_below(16) == 0) low = 0;
  put_half(step_at(r, run, i), step), put_half(step_at(r, run, i + r->num_steps), low);
}

static void fill_run(const run_tile *r, int run, run_kind kind) {
  for (size_t i = 0; i < r->words; i++) /* codes past the last channel count for nothing */
    run_of(r, run)[i] =
        (uint8_t)(kind == EXTREME && random_below(2) ? 255u * (unsigned)random_below(2) : random_bits());
  for (size_t i = 0; i < r->num_steps; i++) put_levels(r, run, i, kind);
}

/* Half of the tiles prefetch, memory that may not be read. */
static void add_prefetch(run_tile *r, size_t bytes) {
  static char *no_access;
  if (!no_access) no_access = mmap(NULL, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  r->prefetch = new_block((size_t)r->num_runs * sizeof(char *));
  r->tile.next.in_order = random_below(2), r->tile.next.offset = random_below(4096);
  for (int i = 0; i < r->num_runs; i++)
    ((char **)r->prefetch.data)[i] =
        no_access + (r->tile.next.in_order ? (size_t)i * bytes : (size_t)random_below(1 << 20));
  if (random_below(2)) r->tile.next.blocks = r->prefetch.data;
}

static run_tile new_tile(place at, run_kind kind, int of_values) {
  const int dim = at.of.dim, offset = 2 * random_below(100), codes = 32 / bits;
  run_tile r = {.num_runs = (at.first + at.of.num_tokens + RUN - 1) / RUN,
                .of_values = of_values,
                .words = 4 * (size_t)(of_values ? dim * bits : (dim + codes - 1) / codes * RUN)};
  r.num_steps = of_values ? (size_t)(RUN * ((dim + GROUP - 1) / GROUP)) : (size_t)dim;
  const size_t bytes = r.words + 4 * r.num_steps;
  r.table = new_block((size_t)r.num_runs * sizeof(char *));
  r.tile = (kvedge_tile){.blocks = r.table.data,
                         .offset = offset,
                         .num_tokens = at.of.num_tokens,
                         .dim = dim,
                         .factor = NAN,
                         .bits = bits,
                         .first = at.first};
  for (int i = 0; i < r.num_runs; i++) {
    r.runs[i] = new_block(bytes);
    ((char **)r.table.data)[i] = (char *)r.runs[i].data - offset;
    fill_run(&r, i, kind == NUM_KINDS ? (run_kind)random_below(NUM_KINDS) : kind);
  }
  add_prefetch(&r, bytes);
  return r;
}

static void free_tile(run_tile *r) {
  for (int i = 0; i < r->num_runs; i++) free_block(&r->runs[i]);
  free_block(&r->table), free_block(&r->prefetch);
}

/* Element d of token t: middle + step * code, whose code is counted from the middle one. */
typedef struct {
  double middle, step, code;
} element;

static element element_at(const run_tile *r, int t, int d) {
  const int row = r->tile.first + t, run = row / RUN, token = row % RUN, half = 1 << (bits - 1);
  const size_t i = index_of_step(r, token, d);
  int shift;
  const uint8_t *from = code_at(r, run, token, d, &shift);
  const double step = half_at(step_at(r, run, i)), low = half_at(step_at(r, run, i + r->num_steps));
  const int code = *from >> shift & ((1 << bits) - 1);
  return (element){low + half * step, step, code - half};
}

/* Kinds of a whole tile, or (NUM_KINDS) of each of its runs. */
static run_kind random_kind(void) { return random_below(3) ? PLAIN : (run_kind)random_below(NUM_KINDS + 1); }

/* ---- Scores ---- */

typedef struct {
  block values, error;
  kvedge_query query;
} query_rows;

/* Query rows of floats, padded with zeros. Where planes is 0 an error of 0 asks for two planes, and FLT_MAX for three. */
static query_rows new_query(shape at) {
  const int padded = kvedge_padded_channels(at.dim), is_extreme = random_below(8) == 0;
  const ptrdiff_t stride = padded + KVEDGE_QUERY_PAD * random_below(2);
  query_rows rows = {.values = new_block(4 * (size_t)((at.num_queries - 1) * stride + padded)),
                     .error = new_block(4 * (size_t)at.num_queries)};
  float *values = rows.values.data, *error = rows.error.data;
  const int few = random_below(2);
  memset(values, 0xff, rows.values.size);
  for (int i = 0; i < at.num_queries; i++, values += stride) {
    const float size = random_below(4) ? 2.0f : random_below(4) ? 1e-3f : 0.0f;
    for (int d = 0; d < padded; d++)
      values[d] = d >= at.dim ? 0.0f : is_extreme ? (i % 2 ? 1.999f : -1.999f) : random_signed(size);
    error[i] = few ? 0.0f : random_below(2) ? FLT_MAX : 0.0f;
  }
  rows.query = (kvedge_query){.num_queries = at.num_queries,
                              .dim = at.dim,
                              .planes = random_below(4),
                              .stride = stride,
                              .values = rows.values.data,
                              .error = rows.error.data,
                              .scratch = new_scratch()};
  return rows;
}

/* A query's largest product with the steps of a tile, whose runs may share a unit. */
static double largest_product(const float *x, int dim, const run_tile *r) {
  double largest = 0.0;
  for (int run = 0; run < r->num_runs; run++)
    for (int d = 0; d < dim; d++) largest = fmax(largest, fabs(x[d] * half_at(step_at(r, run, (size_t)d))));
  return largest;
}

/* Scores, and how far a kernel may be from them: sums of middles are of floats, products of codes of so many planes, or of
 * floats; and where codes are counted from 0 on, what the middle one adds. */
static void expect_scores(const kvedge_query *q, const run_tile *r) {
  const double half = 1 << (bits - 1);
  const double units[] = {0, 0x1p-7, 0x1p-15, 2.4e-7}; /* of the largest of a query's products with the steps */
  for (int i = 0; i < q->num_queries; i++) {
    const int planes = q->planes ? q->planes : q->error[i] > 0.0f ? 3 : 2;
    const float *x = q->values + i * q->stride;
    const double largest = largest_product(x, q->dim, r);
    for (int t = 0; t < r->tile.num_tokens; t++) {
      double sum = 0.0, middles = 0.0, size = 0.0, codes = 0.0, added = 0.0;
      for (int d = 0; d < q->dim; d++) {
        const element e = element_at(r, t, d);
        sum += x[d] * (e.middle + e.step * e.code);
        middles += fabs(x[d] * e.middle), size += fabs(x[d] * e.step * e.code), codes += fabs(e.code);
        added += fabs(x[d] * e.step) * half;
      }
      expected[i * KVEDGE_TILE + t] = sum;
      allowed[i * KVEDGE_TILE + t] =
          6e-7 * (middles + added) + units[planes] * largest * codes + (4.2e-7 + 3e-8 * q->dim) * size + 1e-36 * q->dim;
    }
  }
}

static void score_case(place at) {
  query_rows rows = new_query(at.of);
  run_tile keys = new_tile(at, random_kind(), 0);
  block scores_block = new_block((size_t)at.of.num_queries * KVEDGE_TILE * 4);
  float *scores = scores_block.data;
  memset(scores, 0xff, scores_block.size);
  kernels->runs.scores(&rows.query, &keys.tile, scores, 0);
  expect_scores(&rows.query, &keys);
  for (int i = 0; i < at.of.num_queries; i++)
    for (int t = 0; t < at.of.num_tokens; t++) {
      const int n = i * KVEDGE_TILE + t;
      if (!near(scores[n], expected[n], allowed[n])) fail_at(at, i, t, scores[n], expected[n]);
    }
  end_case();
  free_block(&rows.values), free_block(&rows.error), free_tile(&keys), free_block(&scores_block);
}

/* ---- Weighted sums ---- */

/* expected and allowed, both (num_queries, dim), of a weighing that has not yet begun */
static void expect_weighing(const weighing *w, shape at, const run_tile *r) {
  const double units[] = {0, 0x1p-7, 0x1p-15, 0x1p-24}; /* of a weight, relative to the largest of its group */
  const int planes = w->probabilities.planes, by_runs = planes == 3 && w->probabilities.by_32;
  for (int i = 0; i < at.num_queries; i++)
    for (int d = 0; d < at.dim; d++) {
      const double kept = (double)w->acc[i * w->to.stride + d] * w->rescale[i];
      double sum = kept, middles = 0.0, size = 0.0, codes = 0.0, largest = 0.0, added = 0.0; /* by the middle code */
      double largest_of[KVEDGE_TILE / RUN + 1] = {0}, codes_of[KVEDGE_TILE / RUN + 1] = {0}, rounding = 0.0;
      for (int t = 0; t < at.num_tokens; t++) {
        const double p = w->p[i * KVEDGE_TILE + t];
        if (p == 0.0) continue;
        const element e = element_at(r, t, d);
        sum += p * (e.middle + e.step * e.code);
        middles += fabs(p * e.middle), size += fabs(p * e.step * e.code), codes += fabs(e.code);
        largest = fmax(largest, p * e.step), added += p * e.step * (1 << (bits - 1));
        const int run = (r->tile.first + t) / RUN;
        largest_of[run] = fmax(largest_of[run], p * e.step), codes_of[run] += fabs(e.code);
      }
      for (int j = 0; by_runs && j <= KVEDGE_TILE / RUN; j++) rounding += units[2] * largest_of[j] * codes_of[j];
      if (!by_runs) rounding = units[planes] * largest * codes;
      expected[i * at.dim + d] = sum;
      allowed[i * at.dim + d] =
          rounding + 0x1p-100 * codes + 6e-7 * (size + middles + added) + 2e-7 * fabs(kept) + 1e-36;
    }
}

static void weigh_case(place at) {
  weighing w = new_weighing(at.of, random_below(3) ? DENSE : random_below(3) ? SPARSE : NOTHING, 0);
  run_tile values = new_tile(at, random_kind(), 1);
  expect_weighing(&w, at.of, &values);
  kernels->runs.weighted_sum(&w.probabilities, &values.tile, &w.to);
  for (int i = 0; i < at.of.num_queries; i++)
    for (int d = 0; d < at.of.dim; d++)
      if (!near(w.acc[i * w.to.stride + d], expected[i * at.of.dim + d], allowed[i * at.of.dim + d]))
        fail_at(at, i, d, w.acc[i * w.to.stride + d], expected[i * at.of.dim + d]);
  end_case();
  free_weighing(&w), free_tile(&values);
}

/* Token t of a run's values becomes zeros, or the largest that a run can hold. */
static void overwrite(const run_tile *r, int t, int huge) {
  const int row = r->tile.first + t, run = row / RUN, token = row % RUN, groups = groups_of(r);
  for (int d = 0; d < r->tile.dim; d++) {
    int shift;
    uint8_t *to = code_at(r, run, token, d, &shift);
    const int code = ((1 << bits) - 1) << shift;
    *to = (uint8_t)(huge ? *to | code : *to & ~code);
  }
  for (int g = 0; g < groups; g++) {
    const size_t i = index_of_step(r, token, g * GROUP);
    put_half(step_at(r, run, i), huge ? 0x7bff : 0), put_half(step_at(r, run, i + r->num_steps), huge ? 0x7bff : 0);
  }
}

/* Tokens whose p is 0 for all queries add exactly 0, however large they are: they may as well be zeros. */
static void hidden_case(place at) {
  static float without[KVEDGE_QUERY_ROWS * 1024], before[KVEDGE_QUERY_ROWS * 1024];
  const int dim = at.of.dim, all = random_below(4) == 0;
  weighing w = new_weighing(at.of, all ? NOTHING : DENSE, 0);
  run_tile values = new_tile(at, PLAIN, 1);
  uint8_t is_hidden[KVEDGE_TILE];
  for (int t = 0; t < at.of.num_tokens; t++) {
    is_hidden[t] = all || random_below(2);
    for (int i = 0; i < at.of.num_queries && is_hidden[t]; i++) w.p[i * KVEDGE_TILE + t] = 0.0f;
  }
  for (int i = 0; i < at.of.num_queries; i++)
    memcpy(before + i * dim, w.acc + i * w.to.stride, (size_t)dim * sizeof *before);
  for (int huge = 0; huge < 2; huge++) {
    for (int t = 0; t < at.of.num_tokens; t++)
      if (is_hidden[t]) overwrite(&values, t, huge);
    for (int i = 0; i < at.of.num_queries; i++)
      memcpy(w.acc + i * w.to.stride, before + i * dim, (size_t)dim * sizeof *before);
    kernels->runs.weighted_sum(&w.probabilities, &values.tile, &w.to);
    for (int i = 0; i < at.of.num_queries; i++)
      for (int d = 0; d < dim; d++) {
        const float got = w.acc[i * w.to.stride + d];
        volatile float kept = before[i * dim + d] * w.rescale[i];
        if (!huge) without[i * dim + d] = got;
        if (got != without[i * dim + d]) fail_at(at, i, d, got, without[i * dim + d]);
        if (all && got != kept) fail_at(at, i, d, got, kept);
      }
  }
  end_case();
  free_weighing(&w), free_tile(&values);
}

/* ---- Shapes ---- */

/* The n-th width of rows; 0 past the last. */
static int dim_at(int n) {
  const int wide[] = {127, 128, 129, 192, 256, 333, 576, 1000, 1024, 0};
  return n < 80 ? n + 1 : wide[n - 80];
}

/* Half of the tiles begin with a run, half of the others with its second half, as attention's do. */
static place random_place(int dim, int num_queries) {
  const int first = random_below(2) ? 0 : random_below(2) ? KVEDGE_BLOCK : random_below(RUN);
  const int most = random_below(2) ? 3 * RUN : KVEDGE_TILE - first;
  return (place){
      {dim, 1 + random_below(most), num_queries},
      first
  };
}

/* Each dim with some numbers of queries, and each first token and number of tokens of up to three runs. */
static void for_places(void (*run)(place at)) {
  const int step = is_short() ? 29 : 5;
  for (int n = 0; dim_at(n); n++)
    for (int queries = 1 + n % step; queries <= KVEDGE_QUERY_ROWS; queries += dim_at(n) > 256 ? 31 : step)
      run(random_place(dim_at(n), queries));
  for (int first = 0; first < RUN; first += is_short() ? 5 : 1)
    for (int tokens = 1 + first % 3; tokens <= 3 * RUN; tokens += is_short() ? 17 : 3)
      run((place){
          {1 + random_below(130), tokens, 1 + random_below(4)},
          first
      });
}

static void test_table(void) {
  const int widths[] = {2, 4, 8};
  for (int i = 0; i < 3; i++) {
    bits = widths[i];
    begin("%s kivi%d scores", kernels->name, bits), for_places(score_case), end();
    begin("%s kivi%d weighted_sum", kernels->name, bits), for_places(weigh_case), end();
    begin("%s kivi%d hidden tokens", kernels->name, bits), for_places(hidden_case), end();
  }
}

int main(int argc, char **argv) { return test_tables(argc, argv, test_table); }
