/* kivi2, kivi4, kivi8: runs of 32 tokens of a head encoded together, codes of 2, 4 or 8 bits with a step and a smallest
 * value, as KIVI has it (https://arxiv.org/abs/2402.02750): keys share them per channel over the tokens of a run, since
 * keys have channels that are large in all tokens; values per token over groups of 64 channels.
 *
 *   low  = smallest of the group, as a half, down        step = (largest - low) / (2^bits - 1), as a half, up
 *   code = (x - low) * (1 / step), to nearest, ties to even, at most 2^bits - 1
 *   x    = low + code * step                             the product is exact
 *
 * All in float, single operations, so every machine stores the same bytes. A run, in words of 4
 * bytes (low bytes first), the i-th code of a word at bit i * bits:
 *
 *   keys     words [ceil(dim * bits / 32)][32 tokens]   of a token's channels, codes past the last 0
 *            half steps [dim], lows [dim]
 *   values   words [bits][dim]                          of a channel's tokens
 *            half steps [ceil(dim / 64)][32], lows alike
 */
#include <math.h>
#include <string.h>

#include "formats/kivi.h"

/* ---- Encoding -------------------------------------------------------------------------------- */

/* The largest half <= x, for |x| <= KVEDGE_HALF_MAX. */
static uint16_t half_down(float x) {
  if (x < 0.0f) return (uint16_t)(0x8000u | kvedge_float_to_half_up(-x));
  const uint16_t half = kvedge_half_of_float(x);
  return kvedge_float_of_half(half) > x ? (uint16_t)(half - 1) : half;
}

typedef struct {
  float low, inverse;
} levels;

/* Of a group that reaches from `smallest` to `largest`. */
static levels choose_levels(float smallest, float largest, float most, uint16_t *step, uint16_t *low) {
  *low = half_down(smallest + 0.0f); /* never -0 */
  const float base = kvedge_float_of_half(*low), range = largest - base;
  *step = kvedge_float_to_half_up(range / most);
  const float size = kvedge_float_of_half(*step);
  return (levels){base, size > 0.0f ? 1.0f / size : 0.0f};
}

/* The codes of some elements, each with a level of its own (stride 1) or all with one (0). Loops that compilers make vectors
 * of: adding 1.5 * 2^23 rounds to nearest, ties to even, and rintf is a call on the baseline CPUs. */
static void codes_of(const float *x, int count, const float *lows, const float *inverses, int stride, float most,
                     uint32_t codes[GROUP]) {
  for (int i = 0; i < count; i++) {
    const float above = x[i] - lows[i * stride];
    const float scaled = above * inverses[i * stride];
    const float code = (scaled + 0x1.8p23f) - 0x1.8p23f;
    codes[i] = (uint32_t)(int32_t)(code > most ? most : code);
  }
}

/* The smallest and the largest element, by lanes that compilers make vectors of. */
static void find_ends(const float *x, int count, float *smallest, float *largest) {
  enum { LANES = 8 };
  float low[LANES], high[LANES];
  for (int lane = 0; lane < LANES; lane++) low[lane] = high[lane] = x[lane < count ? lane : 0];
  int i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; lane++) {
      const float element = x[i + lane];
      low[lane] = element < low[lane] ? element : low[lane];
      high[lane] = element > high[lane] ? element : high[lane];
    }
  for (int lane = 0; i < count; i++, lane++) {
    low[lane] = x[i] < low[lane] ? x[i] : low[lane];
    high[lane] = x[i] > high[lane] ? x[i] : high[lane];
  }
  *smallest = low[0], *largest = high[0];
  for (int lane = 1; lane < LANES; lane++) {
    *smallest = low[lane] < *smallest ? low[lane] : *smallest;
    *largest = high[lane] > *largest ? high[lane] : *largest;
  }
}

static void put_words(uint8_t *to, const uint32_t *words, int count, ptrdiff_t stride) {
  for (int i = 0; i < count; i++, to += 4 * stride)
    for (int byte = 0; byte < 4; byte++) to[byte] = (uint8_t)(words[i] >> 8 * byte);
}

/* A word has codes of one token; a group of channels has whole words, the last one perhaps with zeros. */
static void encode_keys(int dim, int bits, const float *x, int first, int count, void *run) {
  const float most = (float)((1 << bits) - 1);
  const run_arrays p = arrays_of(run, dim, bits, 0);
  const int of_word = codes_of_word(bits), num = (count + of_word - 1) / of_word;
  float smallest[GROUP], largest[GROUP], lows[GROUP], inverses[GROUP];
  memcpy(smallest, x, (size_t)count * sizeof *x);
  memcpy(largest, x, (size_t)count * sizeof *x);
  for (int t = 1; t < RUN; t++)
    for (int i = 0; i < count; i++) {
      const float element = x[t * count + i];
      smallest[i] = element < smallest[i] ? element : smallest[i];
      largest[i] = element > largest[i] ? element : largest[i];
    }
  for (int i = 0; i < count; i++) {
    const levels of = choose_levels(smallest[i], largest[i], most, &p.steps[first + i], &p.lows[first + i]);
    lows[i] = of.low, inverses[i] = of.inverse;
  }
  for (int t = 0; t < RUN; t++) {
    uint32_t codes[GROUP + 16] = {0}, words[GROUP / 4];
    codes_of(x + t * count, count, lows, inverses, 1, most, codes);
    for (int w = 0; w < num; w++) {
      words[w] = 0;
      for (int k = 0; k < of_word; k++) words[w] |= codes[w * of_word + k] << k * bits;
    }
    put_words(p.words + 4 * ((size_t)(first / of_word) * RUN + (size_t)t), words, num, RUN);
  }
}

/* A word has codes of one channel. */
static void encode_values(int dim, int bits, const float *x, int first, int count, void *run) {
  const float most = (float)((1 << bits) - 1);
  const run_arrays p = arrays_of(run, dim, bits, 1);
  const int of_word = codes_of_word(bits);
  uint32_t codes[GROUP], words[GROUP];
  for (int t = 0; t < RUN; t++, x += count) {
    float smallest, largest;
    find_ends(x, count, &smallest, &largest);
    const int at = first / GROUP * RUN + t;
    const levels of = choose_levels(smallest, largest, most, &p.steps[at], &p.lows[at]);
    codes_of(x, count, &of.low, &of.inverse, 0, most, codes);
    const int k = t % of_word, shift = k * bits;
    if (k == 0) memset(words, 0, sizeof words);
    for (int i = 0; i < count; i++) words[i] |= codes[i] << shift;
    if (k == of_word - 1)
      put_words(p.words + 4 * ((size_t)(t / of_word) * (size_t)dim + (size_t)first), words, count, 1);
  }
}

/* ---- Decoding -------------------------------------------------------------------------------- */

static inline uint8_t code_at(const run_arrays *p, code_place at, int bits) {
  return (uint8_t)(p->words[at.byte] >> at.shift & ((1 << bits) - 1));
}

/* Tokens first..first+count-1 of a run to floats, `stride` floats apart. */
static void decode_keys(int dim, int bits, const void *run, int first, int count, float *x, ptrdiff_t stride) {
  const run_arrays p = arrays_of(run, dim, bits, 0);
  float steps[KVEDGE_MAX_HEAD_DIM], lows[KVEDGE_MAX_HEAD_DIM];
  floats_of_steps(p.steps, dim, steps);
  floats_of_steps(p.lows, dim, lows);
  for (int t = first; t < first + count; t++, x += stride)
    for (int d = 0; d < dim; d++) /* the product is exact: fused or not */
      x[d] = lows[d] + (float)code_at(&p, place_of_code(dim, bits, 0, t, d), bits) * steps[d];
}

static void decode_values(int dim, int bits, const void *run, int first, int count, float *x, ptrdiff_t stride) {
  const run_arrays p = arrays_of(run, dim, bits, 1);
  for (int g = 0, d = 0; d < dim; g++) {
    const int start = d, stop = d + GROUP < dim ? d + GROUP : dim;
    float steps[RUN], lows[RUN], *row = x;
    floats_of_steps(p.steps + g * RUN, RUN, steps);
    floats_of_steps(p.lows + g * RUN, RUN, lows);
    for (int t = first; t < first + count; t++, row += stride)
      for (d = start; d < stop; d++)
        row[d] = lows[t] + (float)code_at(&p, place_of_code(dim, bits, 1, t, d), bits) * steps[t];
    d = stop;
  }
}

/* ---- The table's rows ------------------------------------------------------------------------ */

/* What a run can decode to, at most. */
static float bound_of_run(const kvedge_row_shape *shape, int bits, int of_values, const void *codes, int64_t num_runs) {
  const size_t bytes = bytes_of_run(shape->dim, bits, of_values), n = num_steps(shape->dim, of_values);
  float largest = 0.0f;
  for (int64_t i = 0; i < num_runs; i++) {
    const run_arrays p = arrays_of((const char *)codes + (size_t)i * bytes, shape->dim, bits, of_values);
    for (size_t j = 0; j < n; j++) {
      const float low = kvedge_float_of_half(p.lows[j]);
      const float high = low + (float)((1 << bits) - 1) * kvedge_float_of_half(p.steps[j]);
      largest = kvedge_larger(largest, kvedge_larger(fabsf(low), fabsf(high)));
    }
  }
  return largest;
}

/* Finite; steps of no sign, lows that are not -0. At any address. */
static int run_is_valid(const kvedge_row_shape *shape, int bits, int of_values, const void *codes, int64_t num_runs) {
  const size_t n = num_steps(shape->dim, of_values), skipped = bytes_of_run(shape->dim, bits, of_values) - 4 * n;
  const char *at = codes;
  for (int64_t i = 0; i < num_runs; i++) {
    at += skipped;
    for (size_t j = 0; j < 2 * n; j++, at += 2) {
      uint16_t half;
      memcpy(&half, at, sizeof half);
      if ((half & 0x7c00u) == 0x7c00u || (j < n ? half >= 0x8000u : half == 0x8000u)) return 0;
    }
  }
  return 1;
}

#define KIVI(bits_of_code, side, of_values)                                                                            \
  static size_t bytes_##side##bits_of_code(int dim) { return bytes_of_run(dim, bits_of_code, of_values); }             \
  static void encode_##side##bits_of_code(const kvedge_row_shape *shape, const float *x, int first, int count,         \
                                          void *run) {                                                                 \
    encode_##side(shape->dim, bits_of_code, x, first, count, run);                                                     \
  }                                                                                                                    \
  static void decode_##side##bits_of_code(const kvedge_row_shape *shape, const void *run, int first, int count,        \
                                          float *x, ptrdiff_t stride) {                                                \
    decode_##side(shape->dim, bits_of_code, run, first, count, x, stride);                                             \
  }                                                                                                                    \
  static float bound_##side##bits_of_code(const kvedge_row_shape *shape, const void *codes, const void *scales,        \
                                          int64_t num_runs) {                                                          \
    (void)scales;                                                                                                      \
    return bound_of_run(shape, bits_of_code, of_values, codes, num_runs);                                              \
  }                                                                                                                    \
  static int is_valid_##side##bits_of_code(const kvedge_row_shape *shape, const void *codes, const void *scales,       \
                                           int64_t num_runs) {                                                         \
    (void)scales;                                                                                                      \
    return run_is_valid(shape, bits_of_code, of_values, codes, num_runs);                                              \
  }                                                                                                                    \
  const kvedge_format_info kvedge_format_kivi##bits_of_code##_##side = {.id = KVEDGE_KIVI##bits_of_code,               \
                                                                        .name = "kivi" #bits_of_code,                  \
                                                                        .file_type = "U8",                             \
                                                                        .bits = bits_of_code,                          \
                                                                        .row_tokens = RUN,                             \
                                                                        .bound_of = bound_of_runs,                     \
                                                                        .encode_run = encode_##side##bits_of_code,     \
                                                                        .bound = bound_##side##bits_of_code,           \
                                                                        .is_valid = is_valid_##side##bits_of_code,     \
                                                                        .run_bytes = bytes_##side##bits_of_code,       \
                                                                        .decode_run = decode_##side##bits_of_code};
KIVI(2, keys, 0)
KIVI(4, keys, 0)
KIVI(8, keys, 0)
KIVI(2, values, 1)
KIVI(4, values, 1)
KIVI(8, values, 1)
