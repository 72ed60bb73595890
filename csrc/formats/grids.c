/* Grids of 2 to 8 bits: each element is one of 2^bits levels, times a scale per group. The levels are those of the
 * Lloyd-Max quantizer of a normal distribution, which a random rotation gives rows; rotating is the caller's.
 *
 *   t     = x / sqrt(mean x^2)                  over the group
 *   code  = number of boundaries <= t           boundaries lie half way between levels; 0 is one
 *   scale = sum(x level) / sum(level^2)         least squares, rounded to the scale's type
 *   value = level[code] * scale
 *
 * All in double, each sum by halves (the upper half is added to the lower one until one element is left), so that every
 * machine stores the same bytes. Codes lie in the bytes of a row like digits, the first one lowest: 8 codes in `bits`
 * bytes.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats/grid_levels.h"
#include "formats/scales.h"

/* A least-squares scale is at most 2.2 times the largest magnitude: t is at most 2.17 times its level (2 bits; fewer at
 * more), but for what lies beyond the last one. The rest is for rounding a scale to half precision. */
#define LARGEST_SCALE 2.25f

/* Half way between the levels of codes `code` - 1 and `code`. */
static inline double boundary_below(const float *level, unsigned code) {
  return (double)((level[code - 1] + level[code]) / 2.0f);
}

/* Bisection without branches, which would be mispredicted half of the time. */
static inline unsigned nearest_code(int bits, const double *boundary, double t) {
  unsigned code = 0;
  for (unsigned step = 1u << (bits - 1); step > 0; step /= 2)
    code += step & (0u - (unsigned)(boundary[code + step] <= t));
  return code;
}

/* Returns the group's scale. */
static inline float encode_group(int bits, const float *level, const double *boundary, const float *x, int n,
                                 uint8_t *codes) {
  double terms[KVEDGE_MAX_HEAD_DIM];
  for (int d = 0; d < n; d++) terms[d] = (double)x[d] * (double)x[d];
  const double rms = sqrt(kvedge_sum_by_halves(terms, n) / n), inverse = rms > 0.0 ? 1.0 / rms : 0.0;
  for (int d = 0; d < n; d++) codes[d] = (uint8_t)nearest_code(bits, boundary, (double)x[d] * inverse);
  for (int d = 0; d < n; d++) terms[d] = (double)x[d] * (double)level[codes[d]];
  const double product = kvedge_sum_by_halves(terms, n);
  for (int d = 0; d < n; d++) terms[d] = (double)level[codes[d]] * (double)level[codes[d]];
  return (float)(product / kvedge_sum_by_halves(terms, n));
}

static void pack(int bits, const uint8_t *codes, int n, uint8_t *out) {
  const int bytes = (int)kvedge_packed_bytes(n, bits);
  uint32_t digits = 0;
  int num_bits = 0, at = 0;
  for (int d = 0; d < n; d++) {
    digits |= (uint32_t)codes[d] << num_bits;
    for (num_bits += bits; num_bits >= 8; num_bits -= 8, digits >>= 8) out[at++] = (uint8_t)digits;
  }
  if (at < bytes) out[at] = (uint8_t)digits;
}

static inline void encode_rows(int bits, const float *level, const kvedge_row_shape *shape, const float *x,
                               int64_t num_rows, void *codes, void *scales) {
  double boundary[256]; /* [code]: below it; [0] is not used */
  for (unsigned code = 1; code < 1u << bits; code++) boundary[code] = boundary_below(level, code);
  uint8_t room[KVEDGE_MAX_HEAD_DIM];
  const size_t row_bytes = kvedge_packed_bytes(shape->dim, bits);
  for (int64_t row = 0; row < num_rows; row++, x += shape->dim) {
    void *row_scales = (char *)scales + (size_t)row * kvedge_scale_row_bytes(shape);
    for (int g = 0, start = 0; g < shape->num_groups; g++, start += shape->group_size) {
      const int left = shape->dim - start, n = left < shape->group_size ? left : shape->group_size;
      kvedge_store_scale(shape->scale_type, row_scales, g,
                         encode_group(bits, level, boundary, x + start, n, room + start));
    }
    pack(bits, room, shape->dim, (uint8_t *)codes + (size_t)row * row_bytes);
  }
}

/* Levels of 8 codes, which lie in `bits` bytes. */
static inline void unpack_8(int bits, const float *level, const uint8_t *codes, float *x) {
  const unsigned mask = (1u << bits) - 1;
  uint64_t digits = 0;
  for (int i = 0; i < bits; i++) digits |= (uint64_t)codes[i] << (8 * i);
  /* Not a loop: compilers make slow vector code of it. */
  x[0] = level[digits & mask];
  x[1] = level[digits >> bits & mask];
  x[2] = level[digits >> 2 * bits & mask];
  x[3] = level[digits >> 3 * bits & mask];
  x[4] = level[digits >> 4 * bits & mask];
  x[5] = level[digits >> 5 * bits & mask];
  x[6] = level[digits >> 6 * bits & mask];
  x[7] = level[digits >> 7 * bits & mask];
}

static void times_scale(float *x, int n, float scale) {
  if (scale > FLT_MAX / 8) /* the product may round to infinity */
    for (int d = 0; d < n; d++) x[d] = (float)fmin(fmax((double)x[d] * (double)scale, -FLT_MAX), FLT_MAX);
  else
    for (int d = 0; d < n; d++) x[d] *= scale;
}

static inline void decode_rows(int bits, const float *level, const kvedge_row_shape *shape, const void *codes,
                               const void *scales, int64_t num_rows, float *x) {
  const size_t row_bytes = kvedge_packed_bytes(shape->dim, bits);
  for (int64_t row = 0; row < num_rows; row++, x += shape->dim) {
    const uint8_t *in = (const uint8_t *)codes + (size_t)row * row_bytes;
    int d = 0;
    for (; d + 8 <= shape->dim; d += 8, in += bits) unpack_8(bits, level, in, x + d);
    if (d < shape->dim) {
      uint8_t last[8] = {0};
      float room[8];
      memcpy(last, in, kvedge_packed_bytes(shape->dim - d, bits));
      unpack_8(bits, level, last, room);
      memcpy(x + d, room, (size_t)(shape->dim - d) * sizeof *x);
    }
    const void *row_scales = (const char *)scales + (size_t)row * kvedge_scale_row_bytes(shape);
    for (int g = 0, start = 0; g < shape->num_groups; g++, start += shape->group_size) {
      const int left = shape->dim - start;
      times_scale(x + start, left < shape->group_size ? left : shape->group_size,
                  kvedge_load_scale(row_scales, shape->scale_type, g));
    }
  }
}

static float bound_of_grid(const kvedge_row_shape *shape, float largest) {
  return kvedge_stored_scale_bound(shape, LARGEST_SCALE * largest); /* infinite where float32 cannot hold it */
}

/* A format: functions in which `bits` is a constant, and its row of the table. */
#define GRID(BITS)                                                                                                     \
  static void encode_##BITS(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes,              \
                            void *scales) {                                                                            \
    encode_rows(BITS, kvedge_grid_levels_##BITS, shape, x, num_rows, codes, scales);                                   \
  }                                                                                                                    \
  static void decode_##BITS(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,    \
                            float *x) {                                                                                \
    decode_rows(BITS, kvedge_grid_levels_##BITS, shape, codes, scales, num_rows, x);                                   \
  }                                                                                                                    \
  const kvedge_format_info kvedge_format_grid##BITS = {.id = KVEDGE_GRID##BITS,                                        \
                                                       .name = "grid" #BITS,                                           \
                                                       .bits = BITS,                                                   \
                                                       .has_scales = 1,                                                \
                                                       .row_tokens = 1,                                                \
                                                       .bound_of = bound_of_grid,                                      \
                                                       .encode = encode_##BITS,                                        \
                                                       .decode = decode_##BITS,                                        \
                                                       .bound = kvedge_largest_scale};

GRID(2)
GRID(3)
GRID(4)
GRID(5)
GRID(6)
GRID(7)
GRID(8)

const float *const kvedge_grid_levels[9] = {NULL,
                                            NULL,
                                            kvedge_grid_levels_2,
                                            kvedge_grid_levels_3,
                                            kvedge_grid_levels_4,
                                            kvedge_grid_levels_5,
                                            kvedge_grid_levels_6,
                                            kvedge_grid_levels_7,
                                            kvedge_grid_levels_8};
