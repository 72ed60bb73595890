/* What the tests of kernel tables share: the table under test, sizes of tiles, and main(). */
#ifndef KVEDGE_TABLES_H
#define KVEDGE_TABLES_H

#include "check.h"
#include "system/dispatch.h"

static const kvedge_kernels *kernels; /* under test */

typedef struct {
  int dim, num_tokens, num_queries;
} shape;

static inline int end_of_blocks(int num_tokens) {
  return (num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
}

/* Fewer cases, for emulators: under 10 s in all on a CPU of today. */
static inline int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; }

/* What a finite half stands for. */
static inline double value_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  const double size = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
  return half >> 15 ? -size : size;
}

/* ---- Probabilities and accumulators of a weighted sum ---- */

/* Working memory for a cell, of exactly the bytes that it may use; what it holds at first is no number. */
static inline char *new_scratch(void) {
  static block scratch;
  if (!scratch.data) scratch = new_block(KVEDGE_SCRATCH);
  memset(scratch.data, 0xff, 4096);
  return scratch.data;
}

typedef enum { DENSE, SPARSE, NOTHING } spread;

typedef struct {
  block acc_block, p_block, rescale_block;
  float *acc, *p, *rescale; /* (num_queries, stride), (num_queries, KVEDGE_TILE), (num_queries) */
  kvedge_probabilities probabilities;
  kvedge_accumulators to;
} weighing;

static inline weighing new_weighing(shape at, spread of, int side_by_side) {
  const int stride = at.dim + (side_by_side || random_below(2) ? 0 : 1 + random_below(20));
  const float sizes[] = {1.0f, 1.0f, 1 << KVEDGE_HEADROOM, 0x1p-118f};
  weighing w = {.acc_block = new_rows(at.num_queries, (size_t)at.dim * 4, (size_t)stride * 4),
                .p_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4),
                .rescale_block = new_block((size_t)at.num_queries * 4)};
  w.acc = w.acc_block.data, w.p = w.p_block.data, w.rescale = w.rescale_block.data;
  for (int i = 0; i < at.num_queries; i++) {
    const float size = sizes[random_below(4)];
    const int one_of = of == SPARSE ? 1 + at.num_tokens / 2 : 4;
    w.rescale[i] = random_below(3) == 0 ? 1.0f : random_below(3) == 0 ? 0.0f : (float)random_unit();
    for (int d = 0; d < at.dim; d++) w.acc[i * stride + d] = random_signed(3.0f);
    for (int t = 0; t < KVEDGE_TILE; t++) {
      const float p = (float)random_unit() * size;
      const int none = of == NOTHING || !isnormal(p) || (random_below(one_of) == 0) == (of == DENSE);
      w.p[i * KVEDGE_TILE + t] = t >= end_of_blocks(at.num_tokens) ? NAN /* left over from an earlier tile */
                                 : t >= at.num_tokens || none      ? 0.0f
                                                                   : p;
    }
  }
  w.probabilities = (kvedge_probabilities){.num_queries = at.num_queries,
                                           .row_dim = at.dim,
                                           .planes = 1 + random_below(3),
                                           .p = w.p,
                                           .scratch = new_scratch()};
  w.to = (kvedge_accumulators){.acc = w.acc, .stride = stride, .rescale = w.rescale};
  return w;
}

static inline void free_weighing(weighing *w) {
  free_block(&w->acc_block), free_block(&w->p_block), free_block(&w->rescale_block);
}

/* ---- main() ---- */

/* The program's arguments: all | NAME..., as in KVEDGE_ISA; default all that this CPU runs. */
static inline int test_tables(int argc, char **argv, void (*test_table)(void)) {
  const char *why_not, *all[8];
  int num_tables = 0, named = argc > 1 && strcmp(argv[1], "all") != 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (kvedge_kernels_at(num_tables)) all[num_tables] = kvedge_kernels_at(num_tables)->name, num_tables++;
  for (int i = 0; i < (named ? argc - 1 : num_tables); i++) {
    const char *name = named ? argv[i + 1] : all[i];
    kernels = kvedge_kernels_find(name, &why_not);
    if (!kernels && named) return fprintf(stderr, "%s: %s: %s\n", argv[0], name, why_not), 2;
    if (!kernels) {
      printf("%s skipped: %s\n", name, why_not);
      continue;
    }
    random_state = 88172645463325252u; /* the same cases for every table */
    test_table();
  }
  return report();
}

#endif
