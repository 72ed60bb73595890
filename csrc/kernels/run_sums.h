/* Sums over runs that are made of floats, in plain C, which each path compiles for itself: steps into queries, and what is the
 * same for all channels of a value's group. For runs.h. */
#include "kernels/run_tiles.h"

enum { KEYS_ARE_RAW = 0 }; /* see run_levels */

static inline void read_steps(const run_parts *run, int dim, int bits, run_queries *to) {
  const float most = (float)(1 << (bits - 1));
  const int padded = kvedge_padded_channels(dim);
  floats_of_steps(run->steps, dim, to->steps);
  floats_of_steps(run->lows, dim, to->middles);
  for (int d = 0; d < dim; d++) to->middles[d] += to->steps[d] * most;
  for (int d = dim; d < padded; d++) to->steps[d] = to->middles[d] = 0.0f;
}

static inline float sum_of_lanes(float lane[RUN_LANES]) {
  for (int width = RUN_LANES / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

/* products = x * steps, and the largest of them; returns the sum of x * middles. */
static inline float multiply_steps(const float *x, int padded, const float *steps, const float *middles,
                                   float *restrict products, float *largest) {
  float sum[RUN_LANES] = {0}, most[RUN_LANES] = {0};
  for (int d = 0; d < padded; d += RUN_LANES)
    for (int j = 0; j < RUN_LANES; j++) {
      const float product = x[d + j] * steps[d + j], size = fabsf(product);
      products[d + j] = product;
      most[j] = size > most[j] ? size : most[j];
      sum[j] += x[d + j] * middles[d + j];
    }
  *largest = 0.0f;
  for (int j = 0; j < RUN_LANES; j++) *largest = most[j] > *largest ? most[j] : *largest;
  return sum_of_lanes(sum);
}

/* Queries first..first+count-1, prepared for a run. */
static inline kvedge_query queries_of_run(const kvedge_query *q, int first, int count, const kvedge_cell *cell,
                                          int bits, run_queries *room) {
  (void)bits;
  const int padded = kvedge_padded_channels(q->dim);
  kvedge_query to = {.num_queries = count, .dim = q->dim, .planes = q->planes ? q->planes : 2, .stride = padded};
  for (int i = 0; i < count; i++) {
    float largest, *products = cell->encode_query ? room->products : room->values + i * padded;
    const float *x = q->values + (first + i) * q->stride;
    room->constant[i] = multiply_steps(x, padded, room->steps, room->middles, products, &largest);
    if (!cell->encode_query) continue;
    const float unit = kvedge_float_of_bits(kvedge_bits_of_float(largest) & 0x7f800000u); /* a power of two */
    const float factor = unit > 0x1p-100f ? 1.0f / unit : 0.0f;
    cell->encode_query(products, q->dim, factor, largest * factor, room->codes + i * padded * KVEDGE_CODE_BYTES,
                       &room->scale[i], room->offsets + 4 * i);
    room->scale[i] *= unit;
    if (q->planes == 0 && !(q->error[first + i] * 256.0f * room->scale[i] <= KVEDGE_LOGIT_ERROR)) to.planes = 3;
  }
  if (cell->encode_query) to.codes = room->codes, to.scale = room->scale, to.offsets = room->offsets;
  else to.values = room->values;
  to.scale_stride = 1;
  return to;
}

static inline void read_columns(const kvedge_tile *values, step_columns *to) { read_many_columns(values, to); }

/* sum_t p[t] * middle[t] for each query, added to n channels. */
static inline void add_middles(const kvedge_probabilities *p, const float *middles, int num_tokens, int n,
                               float *restrict acc, ptrdiff_t stride) {
  for (int i = 0; i < p->num_queries; i++, acc += stride) {
    const float *of_query = p->p + i * KVEDGE_TILE;
    float lane[RUN_LANES] = {0};
    for (int t = 0; t < num_tokens; t += RUN_LANES)
      for (int j = 0; j < RUN_LANES; j++) lane[j] += of_query[t + j] * middles[t + j];
    const float sum = sum_of_lanes(lane);
    for (int d = 0; d < n; d++) acc[d] += sum;
  }
}
