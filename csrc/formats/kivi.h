/* Where things lie in a run of kivi2, kivi4 and kivi8; kivi.c says what they are. */
#ifndef KVEDGE_KIVI_H
#define KVEDGE_KIVI_H

#include <math.h>

#include "formats/format.h"
#include "formats/half.h"

enum { RUN = KVEDGE_RUN, GROUP = KVEDGE_RUN_CHANNELS /* of a value, that share a step */ };

/* Words of 4 bytes, each with as many codes: in a run of keys side by side those of all tokens,
 * in one of values those of all channels. So a vector of words is one of tokens, or of channels,
 * and nothing is transposed to multiply them. */
static inline int codes_of_word(int bits) { return 32 / bits; }

static inline int num_words(int dim, int bits, int of_values) { /* of a token, or of a channel */
  return of_values ? RUN / codes_of_word(bits) : (dim + codes_of_word(bits) - 1) / codes_of_word(bits);
}

static inline int num_lanes(int dim, int of_values) { return of_values ? dim : RUN; }

static inline size_t num_steps(int dim, int of_values) {
  return of_values ? (size_t)RUN * (size_t)((dim + GROUP - 1) / GROUP) : (size_t)dim;
}

static inline size_t bytes_of_words(int dim, int bits, int of_values) {
  return (size_t)num_words(dim, bits, of_values) * (size_t)num_lanes(dim, of_values) * 4;
}

static inline size_t bytes_of_run(int dim, int bits, int of_values) {
  return bytes_of_words(dim, bits, of_values) + 2 * num_steps(dim, of_values) * sizeof(uint16_t);
}

typedef struct {
  uint8_t *words;         /* (num_words, num_lanes) of 4 bytes, low bytes first, at an address that is even */
  uint16_t *steps, *lows; /* aligned to 2 bytes, as the run is */
} run_arrays;

static inline run_arrays arrays_of(const void *run, int dim, int bits, int of_values) {
  run_arrays p = {.words = (uint8_t *)run};
  p.steps = (uint16_t *)(p.words + bytes_of_words(dim, bits, of_values));
  p.lows = p.steps + num_steps(dim, of_values);
  return p;
}

/* Where the code of an element lies: that of channel d of token t. */
typedef struct {
  size_t byte;
  int shift;
} code_place;

static inline code_place place_of_code(int dim, int bits, int of_values, int t, int d) {
  const int i = of_values ? t : d, lane = of_values ? d : t; /* the i-th code of a lane */
  const int bit = i % codes_of_word(bits) * bits;
  const size_t word = (size_t)(i / codes_of_word(bits)) * (size_t)num_lanes(dim, of_values) + (size_t)lane;
  return (code_place){4 * word + (size_t)(bit / 8), bit % 8};
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
