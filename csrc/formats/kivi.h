/* Where things lie in a run of kivi2, kivi4 and kivi8; kivi.c says what they are. */
#ifndef KVEDGE_KIVI_H
#define KVEDGE_KIVI_H

#include <math.h>

#include "formats/format.h"
#include "formats/half.h"

enum { RUN = KVEDGE_RUN, GROUP = 64 /* channels of a value that share a step */ };

static inline size_t codes_row(int dim, int bits) { return kvedge_packed_bytes(dim, bits); }

static inline size_t num_steps(int dim, int of_values) {
  return of_values ? (size_t)RUN * (size_t)((dim + GROUP - 1) / GROUP) : (size_t)dim;
}

static inline size_t bytes_of_run(int dim, int bits, int of_values) {
  return RUN * codes_row(dim, bits) + 2 * num_steps(dim, of_values) * sizeof(uint16_t);
}

typedef struct {
  uint8_t *codes;         /* (RUN, row) */
  uint16_t *steps, *lows; /* aligned to 2 bytes, as the run is */
  size_t row;
} run_parts;

static inline run_parts parts_of(const void *run, int dim, int bits, int of_values) {
  run_parts p = {.codes = (uint8_t *)run, .row = codes_row(dim, bits)};
  p.steps = (uint16_t *)(p.codes + RUN * p.row);
  p.lows = p.steps + num_steps(dim, of_values);
  return p;
}

/* What runs refuse: what a half cannot hold. */
static inline float bound_of_runs(const kvedge_row_shape *shape, float largest) {
  (void)shape;
  return largest > KVEDGE_HALF_MAX ? INFINITY : largest;
}

static inline void floats_of_steps(const uint16_t *halves, int n, float *x) {
  for (int i = 0; i < n; i++) x[i] = kvedge_float_of_half(halves[i]);
}

#endif
