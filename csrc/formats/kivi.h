/* Where things lie in a run of kivi2, kivi4 and kivi8 (kivi.c says what they are), and how tokens of it become floats. Written
 * so that a compiler vectorizes it; each kernel path compiles it for itself.
 */
#ifndef KVEDGE_KIVI_H
#define KVEDGE_KIVI_H

#include <string.h>

#include "formats/format.h"
#include "formats/half.h"

enum { RUN = KVEDGE_RUN, GROUP = 64 /* channels of a value that share a step */ };

/* ---- Where things lie ------------------------------------------------------------------------ */

static inline size_t codes_row(int dim, int bits) { return kvedge_packed_bytes(dim, bits); }

static inline size_t num_steps(int dim, int of_values) {
  return of_values ? (size_t)RUN * (size_t)((dim + GROUP - 1) / GROUP) : (size_t)dim;
}

static inline size_t run_bytes(int dim, int bits, int of_values) {
  return RUN * codes_row(dim, bits) + 2 * num_steps(dim, of_values) * sizeof(uint16_t);
}

typedef struct {
  uint8_t *codes;         /* (RUN, row) */
  uint16_t *steps, *lows; /* aligned to 2 bytes, as the run is */
  size_t row;
} run_parts;

static run_parts parts_of(const void *run, int dim, int bits, int of_values) {
  run_parts p = {.codes = (uint8_t *)run, .row = codes_row(dim, bits)};
  p.steps = (uint16_t *)(p.codes + RUN * p.row);
  p.lows = p.steps + num_steps(dim, of_values);
  return p;
}

/* Codes of a row, a byte each. */
typedef union {
  uint8_t codes[KVEDGE_MAX_HEAD_DIM];
  uint16_t pairs[KVEDGE_MAX_HEAD_DIM / 2];
  uint32_t fours[KVEDGE_MAX_HEAD_DIM / 4];
} code_bytes;

/* Of a row of `bytes` bytes, low bits first: the codes of a byte are spread over a wider integer. */
static inline void unpack_codes(const uint8_t *row, int bytes, const int bits, code_bytes *out) {
  if (bits == 2)
    for (int i = 0; i < bytes; i++)
      out->fours[i] = (row[i] & 3u) | (row[i] & 12u) << 6 | (row[i] & 48u) << 12 | (row[i] & 192u) << 18;
  else if (bits == 4)
    for (int i = 0; i < bytes; i++) out->pairs[i] = (uint16_t)((row[i] & 15u) | (row[i] & 240u) << 4);
  else memcpy(out->codes, row, (size_t)bytes);
}

static inline void floats_of_steps(const uint16_t *halves, int n, float *x) {
  for (int i = 0; i < n; i++) x[i] = kvedge_float_of_half(halves[i]);
}

static inline void decode_keys(int dim, const int bits, const void *run, int first, int count, float *x,
                               ptrdiff_t stride) {
  const run_parts p = parts_of(run, dim, bits, 0);
  float steps[KVEDGE_MAX_HEAD_DIM], lows[KVEDGE_MAX_HEAD_DIM];
  code_bytes room;
  floats_of_steps(p.steps, dim, steps);
  floats_of_steps(p.lows, dim, lows);
  for (int t = first; t < first + count; t++, x += stride) {
    unpack_codes(p.codes + (size_t)t * p.row, (int)p.row, bits, &room);
    for (int d = 0; d < dim; d++)
      x[d] = lows[d] + (float)room.codes[d] * steps[d]; /* the product is exact: fused or not */
  }
}

static inline void decode_values(int dim, const int bits, const void *run, int first, int count, float *x,
                                 ptrdiff_t stride) {
  const run_parts p = parts_of(run, dim, bits, 1);
  const int groups = (dim + GROUP - 1) / GROUP;
  float steps[RUN * KVEDGE_MAX_HEAD_DIM / GROUP], lows[RUN * KVEDGE_MAX_HEAD_DIM / GROUP];
  code_bytes room;
  floats_of_steps(p.steps + first * groups, count * groups, steps);
  floats_of_steps(p.lows + first * groups, count * groups, lows);
  for (int t = 0; t < count; t++, x += stride) {
    unpack_codes(p.codes + (size_t)(first + t) * p.row, (int)p.row, bits, &room);
    for (int g = 0; g < groups; g++) {
      const int d = g * GROUP, stop = d + GROUP < dim ? d + GROUP : dim;
      const float step = steps[t * groups + g], low = lows[t * groups + g];
      for (int i = d; i < stop; i++) x[i] = low + (float)room.codes[i] * step;
    }
  }
}

/* Tokens first..first+count-1 of a run of keys or values to floats, `stride` floats apart. */
static inline void kvedge_decode_run(int bits, int of_values, int dim, const void *run, int first, int count, float *x,
                                     ptrdiff_t stride) {
  if (!of_values && bits == 2) decode_keys(dim, 2, run, first, count, x, stride);
  else if (!of_values && bits == 4) decode_keys(dim, 4, run, first, count, x, stride);
  else if (!of_values) decode_keys(dim, 8, run, first, count, x, stride);
  else if (bits == 2) decode_values(dim, 2, run, first, count, x, stride);
  else if (bits == 4) decode_values(dim, 4, run, first, count, x, stride);
  else decode_values(dim, 8, run, first, count, x, stride);
}

#endif
