/* The steps of states against the formulas in double, token by token: any shapes, element types and strides, prompts cut
 * anywhere, on any threads. */
#include "check.h"
#include "formats/half.h"
#include "kvedge.h"

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; }

/* ---- Rows of (token, head), in memory that ends with the last one ---- */

typedef struct {
  kvedge_array array;
  block memory;
  int tokens, heads, dim;
} rows;

static char *row_at(const rows *r, int token, int head) {
  return (char *)r->memory.data + token * r->array.token_stride + head * r->array.head_stride;
}

static double get(const rows *r, int token, int head, int d) {
  const char *row = row_at(r, token, head);
  if (r->array.type == KVEDGE_TYPE_FLOAT32) return ((const float *)row)[d];
  const uint16_t bits = ((const uint16_t *)row)[d];
  return r->array.type == KVEDGE_TYPE_FLOAT16 ? kvedge_float_of_half(bits) : kvedge_float_of_bfloat(bits);
}

static rows random_rows(int tokens, int heads, int dim, float low, float high) {
  rows r = {.tokens = tokens, .heads = heads, .dim = dim};
  r.array.type =
      (kvedge_element_type)ONE_OF(KVEDGE_TYPE_FLOAT32, KVEDGE_TYPE_FLOAT32, KVEDGE_TYPE_FLOAT16, KVEDGE_TYPE_BFLOAT16);
  const ptrdiff_t bytes = r.array.type == KVEDGE_TYPE_FLOAT32 ? 4 : 2, row = dim * bytes + bytes * ONE_OF(0, 0, 3);
  if (random_below(2)) r.array.head_stride = row, r.array.token_stride = row * heads;
  else r.array.token_stride = row, r.array.head_stride = row * tokens;
  r.memory = new_block((size_t)((tokens - 1) * r.array.token_stride + (heads - 1) * r.array.head_stride + dim * bytes));
  r.array.data = r.memory.data;
  for (int t = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++)
      for (int d = 0; d < dim; d++) {
        const float x = low + (high - low) * (0.5f + random_signed(0.5f));
        char *at = row_at(&r, t, h);
        if (r.array.type == KVEDGE_TYPE_FLOAT32) ((float *)at)[d] = x;
        else
          ((uint16_t *)at)[d] =
              r.array.type == KVEDGE_TYPE_FLOAT16 ? kvedge_half_of_float(x) : kvedge_bfloat_of_float(x);
      }
  return r;
}

/* The tokens from `first` on. */
static kvedge_array from_token(const rows *r, int first) {
  kvedge_array from = r->array;
  from.data = row_at(r, first, 0);
  return from;
}

/* ---- A state, and the same in double ---- */

typedef struct {
  block memory;
  kvedge_element_type type;
  int elements;
  double *exact;
} state;

static double element(const state *s, int i) {
  return s->type == KVEDGE_TYPE_FLOAT32 ? ((const float *)s->memory.data)[i]
                                        : kvedge_float_of_bfloat(((const uint16_t *)s->memory.data)[i]);
}

static state new_state(int elements) {
  state s = {.elements = elements, .type = random_below(4) ? KVEDGE_TYPE_FLOAT32 : KVEDGE_TYPE_BFLOAT16};
  s.memory = new_block((size_t)elements * (s.type == KVEDGE_TYPE_FLOAT32 ? 4 : 2));
  s.exact = malloc((size_t)elements * sizeof(double));
  for (int i = 0; i < elements; i++) {
    const float x = random_signed(1.0f);
    if (s.type == KVEDGE_TYPE_FLOAT32) ((float *)s.memory.data)[i] = x;
    else ((uint16_t *)s.memory.data)[i] = kvedge_bfloat_of_float(x);
    s.exact[i] = element(&s, i);
  }
  return s;
}

static void end_state(state *s) { free_block(&s->memory), free(s->exact); }

/* Errors as shares of the largest number, against what docs/numerics.md allows. A state of 16 bits, and an out, are rounded
 * by up to 2^-9 of themselves, a state once a call. */
static void compare(const char *of, const state *s, const rows *out, const double *exact, int cuts) {
  const double contract = 5e-6;
  double largest = 1e-30, off = 0.0, of_state = 1e-30, state_off = 0.0;
  for (int t = 0, i = 0; t < out->tokens; t++)
    for (int h = 0; h < out->heads; h++)
      for (int d = 0; d < out->dim; d++, i++) {
        largest = fmax(largest, fabs(exact[i]));
        off = fmax(off, fabs(get(out, t, h, d) - exact[i]));
      }
  for (int i = 0; i < s->elements; i++) {
    of_state = fmax(of_state, fabs(s->exact[i]));
    state_off = fmax(state_off, fabs(element(s, i) - s->exact[i]));
  }
  const double rounded = s->type == KVEDGE_TYPE_FLOAT32 ? 0.0 : 0.02 * cuts;
  const double of_out = out->array.type == KVEDGE_TYPE_FLOAT32 ? 0.0 : 0.004;
  if (!near(off / largest, 0.0, contract + rounded + of_out)) fail("%s: out is off by %.1e", of, off / largest);
  if (!near(state_off / of_state, 0.0, contract + rounded))
    fail("%s: the state is off by %.1e", of, state_off / of_state);
  end_case();
}

/* Tokens of the next call. */
static int next_cut(int left) {
  const int wanted = ONE_OF(1, 2, 16, 17, 40);
  return wanted < left ? wanted : left;
}

/* ---- The gated delta rule ---- */

static void check_delta(void) {
  const int dims[] = {1, 7, 16, 40, 64, 72, 128, 160, 256};
  const int group = ONE_OF(1, 1, 2, 3), key_heads = ONE_OF(1, 2), heads = group * key_heads;
  const int key_dim = dims[random_below(9)], value_dim = dims[random_below(9)],
            tokens = ONE_OF(1, 2, 15, 16, 17, 33, 60);
  kvedge_delta_shape shape = {.num_heads = heads,
                              .num_key_heads = key_heads,
                              .key_dim = key_dim,
                              .value_dim = value_dim,
                              .gate_dim = random_below(3) ? 1 : key_dim,
                              .normalize = random_below(2),
                              .scale = 0.3f};
  const float size = shape.normalize ? 1.0f : 1.0f / sqrtf((float)key_dim);
  char of[120];
  snprintf(of, sizeof of, "%d/%d heads of %dx%d, gates of %d, %d tokens", heads, key_heads, key_dim, value_dim,
           shape.gate_dim, tokens);
  state s = new_state(heads * key_dim * value_dim);
  rows q = random_rows(tokens, key_heads, key_dim, -size, size),
       k = random_rows(tokens, key_heads, key_dim, -size, size), v = random_rows(tokens, heads, value_dim, -1, 1),
       g = random_rows(tokens, heads, shape.gate_dim, ONE_OF(-9, -1, 0), 0), b = random_rows(tokens, heads, 1, 0, 1),
       out = random_rows(tokens, heads, value_dim, 0, 0);
  double *exact = malloc((size_t)tokens * (size_t)heads * (size_t)value_dim * sizeof *exact);
  for (int t = 0, i = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++) {
      double *of = s.exact + (ptrdiff_t)h * key_dim * value_dim, squares[2] = {1e-6, 1e-6};
      for (int d = 0; d < key_dim; d++) {
        squares[0] += pow(get(&k, t, h / group, d), 2), squares[1] += pow(get(&q, t, h / group, d), 2);
        for (int c = 0; c < value_dim; c++) of[d * value_dim + c] *= exp(get(&g, t, h, shape.gate_dim == 1 ? 0 : d));
      }
      const double of_key = shape.normalize ? 1 / sqrt(squares[0]) : 1,
                   of_query = shape.normalize ? 1 / sqrt(squares[1]) : 1;
      for (int c = 0; c < value_dim; c++, i++) {
        double met = 0, sum = 0;
        for (int d = 0; d < key_dim; d++) met += of_key * get(&k, t, h / group, d) * of[d * value_dim + c];
        const double update = get(&b, t, h, 0) * (get(&v, t, h, c) - met);
        for (int d = 0; d < key_dim; d++) {
          of[d * value_dim + c] += of_key * get(&k, t, h / group, d) * update;
          sum += of_query * get(&q, t, h / group, d) * of[d * value_dim + c];
        }
        exact[i] = shape.scale * sum;
      }
    }
  int cuts = 0;
  for (int t = 0, n; t < tokens; t += n, cuts++) {
    n = next_cut(tokens - t);
    const kvedge_delta_call call = {s.memory.data,
                                    s.type,
                                    n,
                                    from_token(&q, t),
                                    from_token(&k, t),
                                    from_token(&v, t),
                                    from_token(&out, t),
                                    from_token(&g, t),
                                    from_token(&b, t)};
    if (kvedge_delta_extend(&shape, &call, 1, ONE_OF(1, 3)) != KVEDGE_OK) fail("%s: refused", of);
  }
  compare(of, &s, &out, exact, cuts);
  rows *all[] = {&q, &k, &v, &g, &b, &out};
  for (int i = 0; i < 6; i++) free_block(&all[i]->memory);
  free(exact), end_state(&s);
}

/* ---- Mamba-2 ---- */

static void check_mamba(void) {
  const int dims[] = {1, 7, 16, 40, 64, 72, 128, 160, 256};
  const int group = ONE_OF(1, 2, 3), groups = ONE_OF(1, 2), heads = group * groups,
            tokens = ONE_OF(1, 2, 15, 16, 17, 33, 60);
  const int dim = dims[random_below(9)], size = dims[random_below(9)];
  char of[120];
  snprintf(of, sizeof of, "%d/%d heads of %dx%d, %d tokens", heads, groups, dim, size, tokens);
  float *a = random_floats((size_t)heads, 4), *d = random_floats((size_t)heads, 1);
  for (int h = 0; h < heads; h++) a[h] = -fabsf(a[h]);
  const kvedge_mamba_shape shape = {heads, groups, dim, size, a, random_below(2) ? d : NULL};
  state s = new_state(heads * dim * size);
  rows x = random_rows(tokens, heads, dim, -1, 1), dt = random_rows(tokens, heads, 1, 0, ONE_OF(0, 1, 9)),
       b = random_rows(tokens, groups, size, -1, 1), c = random_rows(tokens, groups, size, -1, 1),
       out = random_rows(tokens, heads, dim, 0, 0);
  double *exact = malloc((size_t)tokens * (size_t)heads * (size_t)dim * sizeof *exact);
  for (int t = 0, i = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++)
      for (int p = 0; p < dim; p++, i++) {
        double *row = s.exact + ((ptrdiff_t)h * dim + p) * size;
        exact[i] = shape.d ? d[h] * get(&x, t, h, p) : 0;
        for (int n = 0; n < size; n++) {
          row[n] =
              row[n] * exp(get(&dt, t, h, 0) * a[h]) + get(&dt, t, h, 0) * get(&x, t, h, p) * get(&b, t, h / group, n);
          exact[i] += row[n] * get(&c, t, h / group, n);
        }
      }
  int cuts = 0;
  for (int t = 0, n; t < tokens; t += n, cuts++) {
    n = next_cut(tokens - t);
    const kvedge_mamba_call call = {
        s.memory.data,     s.type,           n, from_token(&x, t), from_token(&out, t), from_token(&dt, t),
        from_token(&b, t), from_token(&c, t)};
    if (kvedge_mamba_extend(&shape, &call, 1, ONE_OF(1, 3)) != KVEDGE_OK) fail("%s: refused", of);
  }
  compare(of, &s, &out, exact, cuts);
  rows *all[] = {&x, &dt, &b, &c, &out};
  for (int i = 0; i < 5; i++) free_block(&all[i]->memory);
  free(exact), free(a), free(d), end_state(&s);
}

/* ---- Short convolutions ---- */

static void check_conv(void) {
  const int channels = ONE_OF(1, 15, 40, 256, 257, 700), width = 1 + random_below(8), tokens = ONE_OF(1, 2, 5, 17, 40),
            kept = width - 1 + ONE_OF(0, 1, 2) + (width == 1);
  char of[120];
  snprintf(of, sizeof of, "%d channels, width %d of %d, %d tokens", channels, width, kept, tokens);
  float *weight = random_floats((size_t)channels * (size_t)width, 1), *bias = random_floats((size_t)channels, 1);
  const kvedge_conv_shape shape = {channels, width, kept, weight, random_below(2) ? bias : NULL, random_below(2)};
  state s = new_state(channels * kept);
  rows x = random_rows(tokens, 1, channels, -3, 3), out = random_rows(tokens, 1, channels, 0, 0);
  double *exact = malloc((size_t)tokens * (size_t)channels * sizeof *exact);
  for (int t = 0, i = 0; t < tokens; t++)
    for (int c = 0; c < channels; c++, i++) {
      double *row = s.exact + c * kept, sum = shape.bias ? bias[c] : 0;
      for (int w = 0; w + 1 < width; w++) sum += weight[c * width + w] * row[kept - (width - 1) + w];
      sum += weight[c * width + width - 1] * get(&x, t, 0, c);
      memmove(row, row + 1, (size_t)(kept - 1) * sizeof *row);
      row[kept - 1] = get(&x, t, 0, c);
      exact[i] = shape.silu ? sum / (1 + exp(-sum)) : sum;
    }
  int cuts = 0;
  for (int t = 0, n; t < tokens; t += n, cuts++) {
    n = next_cut(tokens - t);
    const kvedge_conv_call call = {s.memory.data, s.type, n, from_token(&x, t), from_token(&out, t)};
    if (kvedge_conv_extend(&shape, &call, 1, ONE_OF(1, 3)) != KVEDGE_OK) fail("%s: refused", of);
  }
  compare(of, &s, &out, exact, cuts);
  free_block(&x.memory), free_block(&out.memory), free(exact), free(weight), free(bias), end_state(&s);
}

/* ---- Bad arguments change nothing; sequences together are as each alone, on any threads ---- */

static void check_refusals(void) {
  enum { DIM = 16 };
  float values[DIM], out[DIM], held[DIM * DIM], gate = 0, beta = 1;
  for (int d = 0; d < DIM; d++) values[d] = 1, out[d] = 5;
  for (int i = 0; i < DIM * DIM; i++) held[i] = (float)i;
  const kvedge_array row = {values, KVEDGE_TYPE_FLOAT32, sizeof values, sizeof values},
                     to = {out, KVEDGE_TYPE_FLOAT32, sizeof out, sizeof out},
                     gates = {&gate, KVEDGE_TYPE_FLOAT32, sizeof gate, sizeof gate},
                     betas = {&beta, KVEDGE_TYPE_FLOAT32, sizeof beta, sizeof beta};
  const kvedge_delta_shape shape = {1, 1, DIM, DIM, 1, 1, 1.0f};
  const kvedge_delta_call call = {held, KVEDGE_TYPE_FLOAT32, 1, row, row, row, to, gates, betas};
  kvedge_delta_shape odd = shape;
  odd.key_dim = 257;
  CHECK(kvedge_delta_extend(&odd, &call, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  odd = shape, odd.gate_dim = 2;
  CHECK(kvedge_delta_extend(&odd, &call, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  CHECK(kvedge_delta_extend(&shape, &call, 0, 1) == KVEDGE_ERROR_ARGUMENT);
  kvedge_delta_call wrong = call;
  wrong.num_tokens = 0;
  CHECK(kvedge_delta_extend(&shape, &wrong, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  wrong = call, wrong.state_type = KVEDGE_TYPE_FLOAT16;
  CHECK(kvedge_delta_extend(&shape, &wrong, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  gate = 0.5f;
  CHECK(kvedge_delta_extend(&shape, &call, 1, 1) == KVEDGE_ERROR_ARGUMENT);
  gate = 0, values[3] = NAN;
  CHECK(kvedge_delta_extend(&shape, &call, 1, 1) == KVEDGE_ERROR_NONFINITE);
  CHECK(held[0] == 0 && held[DIM * DIM - 1] == DIM * DIM - 1 && out[0] == 5);
}

static void check_together(void) {
  enum { CALLS = 3, HEADS = 5, DIM = 64, TOKENS = 40, STATE = HEADS * DIM * DIM };
  float *inputs = random_floats(CALLS * TOKENS * HEADS * DIM, 1), *gates = random_floats(CALLS * TOKENS * HEADS, 1);
  for (int i = 0; i < CALLS * TOKENS * HEADS; i++) gates[i] = -fabsf(gates[i]);
  float *out[3], *held[3];
  const int threads[3] = {1, 2, 7};
  for (int r = 0; r < 3; r++) {
    kvedge_delta_call calls[CALLS];
    out[r] = calloc(CALLS * TOKENS * HEADS * DIM, sizeof(float)), held[r] = calloc(CALLS * STATE, sizeof(float));
    for (int c = 0; c < CALLS; c++) {
      const size_t at = (size_t)c * TOKENS * HEADS;
      const ptrdiff_t row = DIM * sizeof(float);
      const kvedge_array in = {inputs + at * DIM, KVEDGE_TYPE_FLOAT32, HEADS * row, row},
                         numbers = {gates + at, KVEDGE_TYPE_FLOAT32, HEADS * sizeof(float), sizeof(float)},
                         to = {out[r] + at * DIM, KVEDGE_TYPE_FLOAT32, HEADS * row, row};
      calls[c] =
          (kvedge_delta_call){held[r] + c * STATE, KVEDGE_TYPE_FLOAT32, TOKENS, in, in, in, to, numbers, numbers};
    }
    const kvedge_delta_shape shape = {HEADS, HEADS, DIM, DIM, 1, 1, 1.0f};
    if (r) { /* together */
      CHECK(kvedge_delta_extend(&shape, calls, CALLS, threads[r]) == KVEDGE_OK);
      CHECK(!memcmp(out[r], out[0], CALLS * TOKENS * HEADS * DIM * sizeof(float)));
      CHECK(!memcmp(held[r], held[0], CALLS * STATE * sizeof(float)));
    } else {
      for (int c = 0; c < CALLS; c++) CHECK(kvedge_delta_extend(&shape, &calls[c], 1, 1) == KVEDGE_OK);
    }
  }
  for (int r = 0; r < 3; r++) free(out[r]), free(held[r]);
  free(inputs), free(gates);
}

int main(void) {
  const int times = is_short() ? 12 : 150;
  const char *name;
  for (int i = 0; (name = kvedge_isa_compiled(i)); i++) {
    if (kvedge_select_isa(name, NULL) != KVEDGE_OK) continue;
    begin("%s: gated delta rule", name);
    for (int n = 0; n < times; n++) check_delta();
    end();
    begin("%s: Mamba-2", name);
    for (int n = 0; n < times; n++) check_mamba();
    end();
    begin("%s: convolutions", name);
    for (int n = 0; n < times; n++) check_conv();
    end();
    begin("%s: refusals, sequences together", name);
    check_refusals(), check_together();
    end();
  }
  return report();
}
