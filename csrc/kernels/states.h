/* Kernels of states (csrc/state/), for any width of vectors. Included by each path after portable.h; the path first defines
 *
 *   STATE_FLOATS                     floats of a vector
 *   state_multiply_add(a, b, c)      a * b + c of vectors, where that is one instruction
 */
#ifndef state_multiply_add
#define state_multiply_add(a, b, c) ((a) * (b) + (c))
#endif

typedef float state_floats __attribute__((vector_size(4 * STATE_FLOATS)));
typedef float stored_floats __attribute__((vector_size(4 * STATE_FLOATS), aligned(4), may_alias));

#define state_load(p) ((state_floats) * (const stored_floats *)(p))
#define state_store(p, x) (*(stored_floats *)(p) = (x))
#define state_all(x) ((x) - (state_floats){0})

enum {
  STATE_VECTORS = 4,                           /* side by side, whose sums are in registers */
  STATE_COLUMNS = STATE_VECTORS * STATE_FLOATS /* 256 rows of them stay in the first-level cache */
};

/* exp(-|x|); beyond 87, where it would cease to be a normal float, that of 87. By bits, as kvedge_bounded() is: without a
 * branch, which no compiler makes vector code of. */
static inline float exp_of_negative(float x) {
  enum { LARGEST = 0x42ae0000 }; /* 87 */
  const int32_t magnitude = (int32_t)(kvedge_bits_of_float(x) & 0x7fffffffu);
  return exp2_within(-1.44269504f * kvedge_float_of_bits((uint32_t)(magnitude > LARGEST ? LARGEST : magnitude)));
}

static void decays_portable(const float *restrict x, int n, float *restrict out) {
  for (int i = 0; i < n; i++) out[i] = exp_of_negative(x[i]);
}

/* x / (1 + exp(-x)), by exp(-|x|), which cannot overflow. */
static inline float silu_of(float x) {
  const float power = exp_of_negative(x);
  const uint32_t unity = kvedge_bits_of_float(1.0f), negative = 0u - (kvedge_bits_of_float(x) >> 31);
  const uint32_t above = unity ^ ((unity ^ kvedge_bits_of_float(power)) & negative); /* power where x is negative */
  return x * kvedge_float_of_bits(above) / (1.0f + power);
}

/* `count` tokens, rows[0] being the oldest input of the first. (A constant where this is inlined.) */
KVEDGE_INLINE void convolve_tokens(const float *const *rows, const float *weights, const float *bias, int width,
                                   const int count, int n, int silu, float *const *out) {
  int c = 0;
  for (; c + STATE_FLOATS <= n; c += STATE_FLOATS) {
    state_floats sum[STATE_VECTORS] = {{0}};
    if (bias)
      for (int i = 0; i < count; i++) sum[i] = state_load(bias + c);
    for (int w = 0; w < width; w++) {
      const state_floats weight = state_load(weights + w * KVEDGE_TILE + c);
#pragma GCC unroll 4
      for (int i = 0; i < count; i++) sum[i] = state_multiply_add(weight, state_load(rows[i + w] + c), sum[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) state_store(out[i] + c, sum[i]);
  }
  for (; c < n; c++)
    for (int i = 0; i < count; i++) {
      float sum = bias ? bias[c] : 0.0f;
      for (int w = 0; w < width; w++) sum += weights[w * KVEDGE_TILE + c] * rows[i + w][c];
      out[i][c] = sum;
    }
  for (int i = 0; i < count && silu; i++)
    for (int d = 0; d < n; d++) out[i][d] = silu_of(out[i][d]);
}

static void convolve_portable(const float *const *rows, const float *weights, const float *bias, int width,
                              int num_tokens, int n, int silu, float *const *out) {
  int t = 0;
  for (; t + STATE_VECTORS <= num_tokens; t += STATE_VECTORS)
    convolve_tokens(rows + t, weights, bias, width, STATE_VECTORS, n, silu, out + t);
  for (; t < num_tokens; t++) convolve_tokens(rows + t, weights, bias, width, 1, n, silu, out + t);
}

/* Columns from `first` on, `count` vectors of them. The second time rows come from the first-level cache; those of the next
 * columns are on their way meanwhile. (A constant where this is inlined: count.) */
KVEDGE_INLINE void delta_columns(const kvedge_delta_token t, int first, const int count) {
  state_floats read[STATE_VECTORS] = {{0}}, out[STATE_VECTORS] = {{0}}, update[STATE_VECTORS];
  float *row = t.state + first;
  for (int k = 0; k < t.key_dim; k++, row += t.stride) {
    const state_floats key = state_all(t.read_key[k]), query = state_all(t.read_query[k]);
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) {
      const state_floats x = state_load(row + j * STATE_FLOATS);
      read[j] = state_multiply_add(x, key, read[j]);
      out[j] = state_multiply_add(x, query, out[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < count; j++) {
    update[j] = (state_load(t.value + first + j * STATE_FLOATS) - read[j]) * t.beta;
    state_store(t.out + first + j * STATE_FLOATS, state_multiply_add(update[j], state_all(t.product), out[j]));
  }
  row = t.state + first;
  const int behind = first + 2 * count * STATE_FLOATS <= t.value_dim; /* else the first columns of what is behind */
  const ptrdiff_t next = behind ? count * STATE_FLOATS : t.key_dim * t.stride - first;
  for (int k = 0; k < t.key_dim; k++, row += t.stride) {
    const state_floats decay = state_all(t.decay[k]), key = state_all(t.key[k]);
    for (int line = 0; line < count * STATE_FLOATS; line += 16) __builtin_prefetch(row + next + line, 1);
#pragma GCC unroll 4
    for (int j = 0; j < count; j++) {
      float *x = row + j * STATE_FLOATS;
      state_store(x, state_multiply_add(update[j], key, state_load(x) * decay));
    }
  }
}

static void delta_token_portable(const kvedge_delta_token *token) {
  const kvedge_delta_token t = *token; /* nothing that is written is a part of it, as far as a compiler knows */
  int c = 0;
  for (; c + STATE_COLUMNS <= t.value_dim; c += STATE_COLUMNS) delta_columns(t, c, STATE_VECTORS);
  for (; c + STATE_FLOATS <= t.value_dim; c += STATE_FLOATS) delta_columns(t, c, 1);
  for (; c < t.value_dim; c++) {
    float read = 0.0f, out = 0.0f, *x = t.state + c;
    for (int k = 0; k < t.key_dim; k++, x += t.stride) read += *x * t.read_key[k], out += *x * t.read_query[k];
    const float update = (t.value[c] - read) * t.beta;
    t.out[c] = out + update * t.product;
    x = t.state + c;
    for (int k = 0; k < t.key_dim; k++, x += t.stride) *x = *x * t.decay[k] + update * t.key[k];
  }
}

/* Rows of the state, so many at once. (A constant where this is inlined: count.) */
KVEDGE_INLINE void mamba_rows(float *state, int size, float keep, const float *x, const float *b, const float *c,
                              const int count, float *out) {
  enum { AHEAD = 1024 }; /* floats that are prefetched: the next rows, whose page may be another */
  state_floats sum[STATE_VECTORS] = {{0}}, of[STATE_VECTORS];
  float rest[STATE_VECTORS] = {0};
  int d = 0;
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) of[i] = state_all(x[i]);
  for (; d + STATE_FLOATS <= size; d += STATE_FLOATS) {
    const state_floats from = state_load(b + d), to = state_load(c + d);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      float *at = state + i * size + d;
      if (d % 16 == 0) __builtin_prefetch(at + AHEAD, 1);
      const state_floats s = state_multiply_add(state_load(at), state_all(keep), from * of[i]);
      state_store(at, s);
      sum[i] = state_multiply_add(s, to, sum[i]);
    }
  }
  for (; d < size; d++)
    for (int i = 0; i < count; i++) {
      float *at = state + i * size + d;
      *at = *at * keep + x[i] * b[d];
      rest[i] += *at * c[d];
    }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    float lane[STATE_FLOATS];
    state_store(lane, sum[i]);
    for (int width = STATE_FLOATS / 2; width > 0; width /= 2)
      for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    out[i] = lane[0] + rest[i];
  }
}

static void mamba_token_portable(float *state, int num_rows, int size, float keep, const float *x, const float *b,
                                 const float *c, float *out) {
  int p = 0;
  for (; p + STATE_VECTORS <= num_rows; p += STATE_VECTORS, state += STATE_VECTORS * size)
    mamba_rows(state, size, keep, x + p, b, c, STATE_VECTORS, out + p);
  for (; p < num_rows; p++, state += size) mamba_rows(state, size, keep, x + p, b, c, 1, out + p);
}

static void widen_bfloats_portable(const uint16_t *restrict from, int n, float *restrict to) {
  for (int i = 0; i < n; i++) to[i] = kvedge_float_of_bfloat(from[i]);
}

static void narrow_bfloats_portable(const float *restrict from, int n, uint16_t *restrict to) {
  enum { LARGEST = 0x7f7f0000 };
  for (int i = 0; i < n; i++) {
    const int32_t bits = (int32_t)kvedge_bits_of_float(from[i]), magnitude = bits & 0x7fffffff;
    const int32_t kept = magnitude > LARGEST ? LARGEST : magnitude;
    to[i] = kvedge_bfloat_of_float(kvedge_float_of_bits((uint32_t)((bits ^ magnitude) | kept)));
  }
}

#define KVEDGE_STATE_KERNELS                                                                                           \
  {decays_portable,   widen_bfloats_portable, narrow_bfloats_portable,                                                 \
   convolve_portable, delta_token_portable,   mamba_token_portable}
