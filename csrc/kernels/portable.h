/* Kernels that need no instruction of their own, written so that a compiler vectorizes them.
 *
 * Included once by each kernels_<isa>.c after its target pragma, so that the same C becomes that
 * path's machine code. Sums and maxima run in LANES independent lanes: the order of additions is
 * written down, and no -ffast-math is needed for it to be vector code.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats/half.h"
#include "kernels/kernels.h"
#include "kernels/exp2.h"
#include "kernels/logits.h"
#include "system/bits.h"
#include "system/target.h"

enum {
  LANES = 16,
  CODE_ROW = 4 * KVEDGE_TILE,  /* bytes of a tile's encoded weights, for paths that encode them */
  CHANNELS_OF_TWO_BYTES = 512, /* whose products with two bytes of a query add up in 32 bits: x 127 x 32767 */
};

/* The largest codes of 24 bits, a little below what fits because products round: of queries, in three
 * signed bytes (up to 127 * (65536 + 256 + 1)), and of weights, in three unsigned ones. */
#define QUERY_MAX 8355000.0f
#define WEIGHT_MAX 16777000.0f
#define WEIGHT_MAX_16 65534.0f
#define WEIGHT_MAX_8 254.9f
/* Where a group's largest is below, all of it is nothing: beside the query's other channels, beside
 * the weights of some other tile. */
#define QUERY_NOTHING 1e-30f
#define WEIGHT_NOTHING 1e-31f

static inline float lanes_max(const float lane[LANES]) {
  float best = lane[0];
  for (int j = 1; j < LANES; j++) best = lane[j] > best ? lane[j] : best;
  return best;
}

static inline float lanes_sum(float lane[LANES]) {
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

static inline void softmax_portable(float *scores, int num_queries, int num_tokens, const float *factor, float *max,
                                    float *sum, float *rescale) {
  for (int i = 0; i < num_queries; i++, scores += KVEDGE_TILE) {
    int padded = (num_tokens + LANES - 1) / LANES * LANES;
    for (int t = num_tokens; t < padded; t++) scores[t] = -INFINITY;
    float lane[LANES];
    memcpy(lane, scores, sizeof lane);
    for (int t = LANES; t < padded; t += LANES)
      for (int j = 0; j < LANES; j++) lane[j] = scores[t + j] > lane[j] ? scores[t + j] : lane[j];
    float tile_max = lanes_max(lane);
    float m = max[i] > tile_max ? max[i] : tile_max;
    float f = factor[i];
    rescale[i] = exp2_nonpositive((max[i] - m) * f);
    max[i] = m;
    for (int j = 0; j < LANES; j++) lane[j] = 0.0f;
    for (int t = 0; t < padded; t += LANES)
      for (int j = 0; j < LANES; j++) {
        float p = exp2_nonpositive((scores[t + j] - m) * f);
        scores[t + j] = p;
        lane[j] += p;
      }
    sum[i] = sum[i] * rescale[i] + lanes_sum(lane);
  }
}

/* ---- Prefetch, scales, rows of results ---- */

/* Prefetches the lines that begin in n bytes, into the second-level cache: the first holds less than a tile. (Always
 * inlined: GCC may drop calls of a function that does nothing but prefetch.) */
KVEDGE_INLINE void prefetch_bytes(const char *bytes, ptrdiff_t n) {
  uintptr_t end = (uintptr_t)bytes + (uintptr_t)n;
  for (uintptr_t line = ((uintptr_t)bytes + 63) & ~(uintptr_t)63; line < end; line += 64)
    __builtin_prefetch((const void *)line, 0, 2);
}

/* Block `block` of the next tile in n steps, of which this is step i. A core waits, or drops
 * prefetches, when many lines are on their way, so they are spread over the rows that are worked
 * on meanwhile. */
KVEDGE_INLINE void prefetch_lines_of(const kvedge_tile *tile, int block, int row_bytes, int i, int n) {
  if (!tile->next.blocks) return;
  const int from = KVEDGE_BLOCK * row_bytes * i / n, to = KVEDGE_BLOCK * row_bytes * (i + 1) / n;
  const uintptr_t rows = (uintptr_t)tile->next.blocks[block] + (uintptr_t)tile->next.offset;
  prefetch_bytes((const char *)(rows + (uintptr_t)from), to - from);
}

/* Bytes between the two prefetches of a line.
 *
 * Zen 4 drops software prefetches when its miss queue is full, and a line that was dropped is
 * waited for when it is used. So each line is prefetched twice, the second time 4 KB later:
 * decoding is 1.04 to 1.6 times as fast. On other CPUs both come at once, which costs nothing. */
static inline uintptr_t kvedge_prefetch_again_after(void) {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") ? 4096 : 0;
#else
  return 0;
#endif
}

static inline void merge_row_portable(float *to, float keep, const float *from, float add, int n) {
  for (int d = 0; d < n; d++) to[d] = to[d] * keep + from[d] * add;
}

static inline void scale_row_portable(const float *row, int n, float factor, float power, float *restrict out) {
  for (int d = 0; d < n; d++) out[d] = kvedge_bounded(row[d] * factor * power);
}

static inline void transpose_scales_portable(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride,
                                             int num_tokens, int num_columns, float factor, float *out,
                                             ptrdiff_t out_stride) {
  for (int t = 0; t < num_tokens; t++, scales = (const char *)scales + token_stride)
    for (int c = 0; c < num_columns; c++) out[c * out_stride + t] = kvedge_load_scale(scales, type, c) * factor;
}

/* ---- Rows that are widened for the kernels of int8 ---- */

enum { WIDE_BYTES = 16 << 10, WIDE_PAD = 64 }; /* of rows that are wide at a time */

typedef struct {
  _Alignas(64) int8_t rows[WIDE_BYTES + WIDE_PAD];
  const char *blocks[KVEDGE_TILE_BLOCKS];
} wide_rows;

/* Tokens of `width` channels that are widened at a time. */
static inline int wide_step(int width) {
  const int step = WIDE_BYTES / width / KVEDGE_BLOCK * KVEDGE_BLOCK;
  return step < KVEDGE_TILE ? step : KVEDGE_TILE;
}

/* ---- Rows of floats: float32, float16, bfloat16 ----
 *
 * Of the 16-bit formats a row is converted as a whole, which compilers make vector code of, and then multiplied as
 * float32 rows are. */

/* The row at `from` as floats: as it lies. */
KVEDGE_INLINE const float *row_of_float32(const char *from, int dim, float *room) {
  (void)dim;
  (void)room;
  return (const float *)from;
}

KVEDGE_INLINE const float *row_of_float16(const char *from, int dim, float *room) {
  const uint16_t *halves = (const uint16_t *)from;
  for (int d = 0; d < dim; d++) room[d] = kvedge_float_of_half(halves[d]);
  return room;
}

KVEDGE_INLINE const float *row_of_bfloat16(const char *from, int dim, float *room) {
  const uint16_t *halves = (const uint16_t *)from;
  for (int d = 0; d < dim; d++) room[d] = kvedge_float_of_bits((uint32_t)halves[d] << 16);
  return room;
}

/* Prefetches row `token` of the next tile, of `bytes` bytes: rows of a block lie together there. */
KVEDGE_INLINE void prefetch_row(const kvedge_tile *tile, int token, ptrdiff_t bytes) {
  if (!tile->next.blocks) return;
  const char *block = tile->next.blocks[token / KVEDGE_BLOCK] + tile->next.offset;
  prefetch_bytes(block + token % KVEDGE_BLOCK * bytes, bytes);
}

typedef const float *row_function(const char *from, int dim, float *room);

KVEDGE_INLINE void score_float_rows(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate,
                                    row_function *row_of, const int size) {
  const int whole = q->dim / LANES * LANES;
  const float factor = keys->factor;
  float room[1024];
  for (int t = 0; t < keys->num_tokens; t++) {
    const float *row = row_of(kvedge_tile_row(keys, t), q->dim, room);
    prefetch_row(keys, t, (ptrdiff_t)size * q->dim);
    for (int i = 0; i < q->num_queries; i++) {
      const float *query = q->values + i * q->stride;
      float lane[LANES] = {0};
      for (int d = 0; d < whole; d += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += query[d + j] * (row[d + j] * factor);
      float dot = lanes_sum(lane);
      for (int d = whole; d < q->dim; d++) dot += query[d] * (row[d] * factor);
      float *out = scores + i * KVEDGE_TILE + t;
      *out = accumulate ? *out + dot : dot;
    }
  }
}

KVEDGE_INLINE void sum_float_rows(const kvedge_probabilities *p, const kvedge_tile *values,
                                  const kvedge_accumulators *to, row_function *row_of, const int size) {
  const int dim = values->dim;
  const float factor = values->factor;
  float room[1024];
  for (int i = 0; i < p->num_queries; i++)
    if (to->rescale[i] != 1.0f)
      for (int d = 0; d < dim; d++) to->acc[i * to->stride + d] *= to->rescale[i];
  for (int t = 0; t < values->num_tokens; t++) {
    const float *restrict row = row_of(kvedge_tile_row(values, t), dim, room);
    prefetch_row(values, t, (ptrdiff_t)size * dim);
    for (int i = 0; i < p->num_queries; i++) {
      const float weight = p->p[i * KVEDGE_TILE + t];
      float *restrict sums = to->acc + i * to->stride;
      for (int d = 0; d < dim; d++) sums[d] += weight * (row[d] * factor);
    }
  }
}

#define KVEDGE_FLOAT_KERNELS(format, size)                                                                             \
  static inline void scores_##format##_portable(const kvedge_query *q, const kvedge_tile *keys, float *scores,         \
                                                int accumulate) {                                                      \
    score_float_rows(q, keys, scores, accumulate, row_of_##format, size);                                              \
  }                                                                                                                    \
  static inline void weighted_sum_##format##_portable(const kvedge_probabilities *p, const kvedge_tile *values,        \
                                                      const kvedge_accumulators *to) {                                 \
    sum_float_rows(p, values, to, row_of_##format, size);                                                              \
  }
KVEDGE_FLOAT_KERNELS(float32, 4)
KVEDGE_FLOAT_KERNELS(float16, 2)
KVEDGE_FLOAT_KERNELS(bfloat16, 2)
#undef KVEDGE_FLOAT_KERNELS

#define KVEDGE_PORTABLE_CELL(format)                                                                                   \
  {.scores = scores_##format##_portable, .weighted_sum = weighted_sum_##format##_portable}

static inline void dequantize_portable(const int8_t *codes, size_t n, float scale, float *out) {
  for (size_t i = 0; i < n; i++) out[i] = (float)codes[i] * scale;
}

static inline uint64_t read_bytes_portable(const void *p, size_t n) {
  const uint64_t *eights = p; /* (n / 8) */
  uint64_t lane[8] = {0};
  for (size_t i = 0; i < n / 8; i += 8)
    for (int j = 0; j < 8; j++) lane[j] |= eights[i + j];
  return lane[0] | lane[1] | lane[2] | lane[3] | lane[4] | lane[5] | lane[6] | lane[7];
}

/* Each sum is multiplied and added to, since of sums that a product is added to a compiler would multiply that once. */
static inline uint64_t multiply_portable(size_t n) {
  enum { SUMS = 12 * 4 };
  float sum[SUMS], all = 0.0f;
  for (int j = 0; j < SUMS; j++) sum[j] = (float)j; /* all different: none makes one sum for all */
  for (size_t i = 0; i < n; i += SUMS)
    for (int j = 0; j < SUMS; j++) sum[j] = sum[j] * 0.5f + 1.0f;
  for (int j = 0; j < SUMS; j++) all += sum[j];
  return (uint64_t)all;
}
