/* The gated delta rule, by chunks of up to 16 tokens (the WY representation of Bischof and Van Loan 1987, for delta rules
 * Yang, Wang, Zhang, Shen, Kim 2024; README.md). A token alone is a chunk of one. */
#include <limits.h>

#include "state/state.h"
#include "store/layer_struct.h"
#include "system/dispatch.h"
#include "system/float_mode.h"

enum { CHUNK = KVEDGE_STATE_CHUNK, DIM = KVEDGE_STATE_DIM };

typedef struct {
  const kvedge_delta_shape *shape;
  const kvedge_delta_call *calls;
  const kvedge_kernels *kernels;
} delta_work;

/* One head of a call. */
typedef struct {
  const delta_work *work;
  const kvedge_delta_call *call;
  kvedge_state_memory *memory;
  int head, key_head;
  float *state; /* (key_dim, stride) in blocks of `columns` columns, each (key_dim, stride) */
  ptrdiff_t stride;
  int columns;
} delta_head;

typedef float four_floats __attribute__((vector_size(16)));
typedef float stored_four __attribute__((vector_size(16), aligned(4), may_alias));

/* Of rows behind which zeros stand. */
static float product_of(const float *a, const float *b, int dim) {
  four_floats sum[2] = {{0}};
  for (int d = 0; d < dim; d += 8)
    for (int j = 0; j < 2; j++) sum[j] += *(const stored_four *)(a + d + 4 * j) * *(const stored_four *)(b + d + 4 * j);
  sum[0] += sum[1];
  return sum[0][0] + sum[0][1] + (sum[0][2] + sum[0][3]);
}

/* The row times `scale`, and over its length where rows are normalized; zeros stand behind it. */
static void scale_row(float *row, int dim, int normalize, float scale) {
  if (normalize) scale /= sqrtf(product_of(row, row, dim) + 1e-6f);
  for (int d = 0; d < dim; d++) row[d] *= scale;
}

/* rows[0..n-1] become the keys of tokens first.., rows[n..2n-1] their queries; `more` the keys once more. */
static void take_rows(const delta_head *h, int64_t first, int n) {
  const kvedge_delta_shape *shape = h->work->shape;
  kvedge_state_memory *m = h->memory;
  for (int i = 0; i < n; i++) {
    kvedge_state_take_row(&h->call->key, first + i, h->key_head, shape->key_dim, m->rows[i]);
    kvedge_state_take_row(&h->call->query, first + i, h->key_head, shape->key_dim, m->rows[n + i]);
    if (shape->normalize) scale_row(m->rows[i], shape->key_dim, 1, 1.0f);
    scale_row(m->rows[n + i], shape->key_dim, shape->normalize, shape->scale);
    memcpy(m->more[i], m->rows[i], (size_t)shape->key_dim * sizeof(float));
  }
}

/* With one decay for all channels. weights[i][j], weights[n + i][j] = the products of key and query i with key j, decayed
 * from j to i; keys in `more` decay to the end of the chunk. keep[i]: the decay from the state to token i. */
static void decay_rows(const delta_head *h, int64_t first, int n, float *keep) {
  const int dim = h->work->shape->key_dim;
  kvedge_state_memory *m = h->memory;
  float gate[CHUNK], since[CHUNK], sum = 0.0f,
                                   decays[CHUNK][CHUNK]; /* `since`: logarithms of the decay from the state */
  for (int i = 0; i < n; i++) {
    gate[i] = kvedge_log_decay(kvedge_state_number(&h->call->gate, first + i, h->head));
    since[i] = sum += gate[i];
  }
  h->work->kernels->states->decays(since, n, keep);
  float decay[CHUNK];
  h->work->kernels->states->decays(gate, n, decay);
  kvedge_state_decays(decay, n, decays);
  kvedge_state_multiply(h->work->kernels, m->scratch, m->rows[0], KVEDGE_TILE, 2 * n, m->more[0], KVEDGE_TILE, n, dim,
                        m->weights);
  for (int i = 0; i < n; i++) {
    for (int j = 0; j <= i; j++) m->weights[i][j] *= decays[i][j], m->weights[n + i][j] *= decays[i][j];
    for (int j = i + 1; j < n; j++) m->weights[n + i][j] = 0.0f;
  }
  for (int j = 0; j < n - 1; j++)
    for (int d = 0; d < dim; d++) m->more[j][d] *= decays[n - 1][j];
  for (int d = 0; d < dim; d++) m->decay[d] = keep[n - 1];
}

/* The same with a decay for each channel: keys decay on from token to token, so that no factor is above 1; rows decay from
 * the state on. */
static void decay_channels(const delta_head *h, int64_t first, int n) {
  const int dim = h->work->shape->key_dim;
  kvedge_state_memory *m = h->memory;
  float gate[DIM], since[DIM] = {0}, decays_of_token[DIM];
  for (int i = 0; i < n; i++) {
    const float *gates = kvedge_array_row(&h->call->gate, first + i, h->head, dim, gate);
    float products[2][KVEDGE_TILE];
    for (int d = 0; d < dim; d++) since[d] += kvedge_log_decay(gates[d]);
    h->work->kernels->states->decays(gates, dim, decays_of_token);
    h->work->kernels->states->decays(since, dim, m->decay);
    for (int j = 0; j < i; j++)
      for (int d = 0; d < dim; d++) m->more[j][d] *= decays_of_token[d];
    kvedge_state_multiply(h->work->kernels, m->scratch, m->rows[i], n * KVEDGE_TILE, 2, m->more[0], KVEDGE_TILE, i + 1,
                          dim, products);
    for (int j = 0; j <= i; j++) m->weights[i][j] = products[0][j], m->weights[n + i][j] = products[1][j];
    for (int j = i + 1; j < n; j++) m->weights[n + i][j] = 0.0f;
    for (int d = 0; d < dim; d++) m->rows[i][d] *= m->decay[d], m->rows[n + i][d] *= m->decay[d];
  }
}

/* solve[i][j], j <= i: the inverse of I + beta_i (key i with key j, decayed), which is triangular. */
static void solve_keys(const delta_head *h, int n, const float *beta) {
  kvedge_state_memory *m = h->memory;
  for (int i = 0; i < n; i++) {
    float row[CHUNK] = {0};
    for (int j = 0; j < i; j++) {
      const float factor = -beta[i] * m->weights[i][j];
      for (int l = 0; l < CHUNK; l++) row[l] += factor * m->solve[j][l];
    }
    row[i] = 1.0f;
    memcpy(m->solve[i], row, sizeof row);
  }
}

/* The tokens first.. on columns column.. of the state, which begin at `state`. sums[i] become the products of key i and
 * query i with the state; updates[i] = u_i, what token i adds to the state along its key: beta (v - its key's product with
 * the state that it meets). */
static void run_columns(const delta_head *h, int64_t first, int n, int column, const float *keep, const float *beta,
                        float *state) {
  const kvedge_delta_shape *shape = h->work->shape;
  const kvedge_kernels *kernels = h->work->kernels;
  const int left = shape->value_dim - column, columns = left < h->columns ? left : h->columns;
  kvedge_state_memory *m = h->memory;
  float room[DIM];
  for (int i = 0; i < 2 * n; i++) memset(m->sums[i], 0, (size_t)columns * sizeof(float));
  for (int i = 0; i < n; i++) memset(m->updates[i], 0, (size_t)columns * sizeof(float));
  kvedge_state_add_rows(kernels, m->scratch, m->rows[0], 2 * n, state, h->stride, shape->key_dim, columns,
                        kvedge_state_ones, m->sums[0], KVEDGE_TILE);
  for (int i = 0; i < n; i++) {
    const float *value = kvedge_array_row(&h->call->value, first + i, h->head, shape->value_dim, room) + column;
    for (int c = 0; c < columns; c++) m->values[i][c] = beta[i] * (value[c] - keep[i] * m->sums[i][c]);
  }
  kvedge_state_add_rows(kernels, m->scratch, m->solve[0], n, m->values[0], KVEDGE_TILE, n, columns, kvedge_state_ones,
                        m->updates[0], KVEDGE_TILE);
  kvedge_state_add_rows(kernels, m->scratch, m->weights[n], n, m->updates[0], KVEDGE_TILE, n, columns, keep, m->sums[n],
                        KVEDGE_TILE);
  for (int i = 0; i < n; i++) {
    kvedge_array out = h->call->out;
    out.data = (char *)out.data + column * kvedge_element_bytes(out.type);
    kvedge_state_put_row(m->sums[n + i], columns, &out, first + i, h->head);
  }
  for (int k = 0; k < shape->key_dim; k += KVEDGE_QUERY_ROWS) {
    const int rows = shape->key_dim - k < KVEDGE_QUERY_ROWS ? shape->key_dim - k : KVEDGE_QUERY_ROWS;
    float *weights = &m->to_state[0][k / KVEDGE_QUERY_ROWS * CHUNK];
    kvedge_state_add_rows(kernels, m->scratch, weights, rows, m->updates[0], KVEDGE_TILE, n, columns, m->decay + k,
                          state + k * h->stride, h->stride);
  }
}

static void run_chunk(const delta_head *h, int64_t first, int n) {
  const kvedge_delta_shape *shape = h->work->shape;
  kvedge_state_memory *m = h->memory;
  take_rows(h, first, n);
  float keep[CHUNK], beta[CHUNK];
  for (int i = 0; i < n; i++) beta[i] = kvedge_state_number(&h->call->beta, first + i, h->head), keep[i] = 1.0f;
  if (shape->gate_dim == 1) decay_rows(h, first, n, keep);
  else decay_channels(h, first, n);
  solve_keys(h, n, beta);
  /* Of 32 rows of the state beside those of the next 32. */
  for (int k = 0; k < shape->key_dim; k += KVEDGE_QUERY_ROWS)
    kvedge_state_transpose(h->work->kernels, m->more[0], n, k,
                           shape->key_dim - k < KVEDGE_QUERY_ROWS ? shape->key_dim - k : KVEDGE_QUERY_ROWS,
                           &m->to_state[0][k / KVEDGE_QUERY_ROWS * CHUNK]);
  for (int c = 0, block = 0; c < shape->value_dim; c += h->columns, block++)
    run_columns(h, first, n, c, keep, beta, h->state + (ptrdiff_t)block * shape->key_dim * h->stride);
}

/* A token alone: its kernel passes over the state once, and takes the second time what is in the first-level cache. */
static void run_token(const delta_head *h) {
  const kvedge_delta_shape *shape = h->work->shape;
  const int dim = shape->key_dim;
  kvedge_state_memory *m = h->memory;
  float room[DIM], *key = m->rows[0], *query = m->rows[1], *decay = m->decay;
  take_rows(h, 0, 1);
  const float *gates = kvedge_array_row(&h->call->gate, 0, h->head, shape->gate_dim, room);
  h->work->kernels->states->decays(gates, shape->gate_dim, decay);
  for (int d = shape->gate_dim; d < dim; d++) decay[d] = decay[0];
  kvedge_delta_token token = {.state = h->state,
                              .stride = h->stride,
                              .key_dim = dim,
                              .value_dim = shape->value_dim,
                              .read_key = key,
                              .read_query = query,
                              .decay = decay,
                              .key = m->more[0],
                              .beta = kvedge_state_number(&h->call->beta, 0, h->head),
                              .value = kvedge_array_row(&h->call->value, 0, h->head, shape->value_dim, m->values[0]),
                              .out = m->sums[0]};
  token.product = product_of(key, query, dim);
  for (int d = 0; d < dim; d++) key[d] *= decay[d], query[d] *= decay[d];
  h->work->kernels->states->delta_token(&token);
  kvedge_state_put_row(m->sums[0], shape->value_dim, &h->call->out, 0, h->head);
}

/* The state of a head as float32 in blocks of columns, and back. */
static void unpack_state(const delta_head *h, const char *state, kvedge_element_type type) {
  const int key_dim = h->work->shape->key_dim, value_dim = h->work->shape->value_dim;
  float room[DIM];
  if (h->columns == value_dim && type != KVEDGE_TYPE_FLOAT32) {
    h->work->kernels->states->widen_bfloats((const uint16_t *)state, key_dim * value_dim, h->state);
    return;
  }
  for (int k = 0; k < key_dim; k++, state += value_dim * kvedge_element_bytes(type)) {
    const float *row = (const float *)state;
    if (type != KVEDGE_TYPE_FLOAT32)
      h->work->kernels->states->widen_bfloats((const uint16_t *)state, value_dim, room), row = room;
    for (int c = 0; c < value_dim; c += h->columns) {
      const int n = value_dim - c < h->columns ? value_dim - c : h->columns;
      memcpy(h->state + (ptrdiff_t)c * key_dim + k * h->stride, row + c, (size_t)n * sizeof *row);
    }
  }
}

static void pack_state(const delta_head *h, char *state, kvedge_element_type type) {
  const int key_dim = h->work->shape->key_dim, value_dim = h->work->shape->value_dim;
  float room[DIM];
  if (h->columns == value_dim && type != KVEDGE_TYPE_FLOAT32) {
    h->work->kernels->states->narrow_bfloats(h->state, key_dim * value_dim, (uint16_t *)state);
    return;
  }
  for (int k = 0; k < key_dim; k++, state += value_dim * kvedge_element_bytes(type)) {
    float *row = type == KVEDGE_TYPE_FLOAT32 ? (float *)state : room;
    for (int c = 0; c < value_dim; c += h->columns) {
      const int n = value_dim - c < h->columns ? value_dim - c : h->columns;
      memcpy(row + c, h->state + (ptrdiff_t)c * key_dim + k * h->stride, (size_t)n * sizeof *row);
    }
    if (row == room) h->work->kernels->states->narrow_bfloats(room, value_dim, (uint16_t *)state);
  }
}

/* Columns of which a block stays in the first-level cache. */
static int columns_of_block(const kvedge_kernels *kernels, int key_dim) {
  const int columns = kernels->tuning.step_bytes / (key_dim * (int)sizeof(float)) / 16 * 16;
  return columns < 16 ? 16 : columns > DIM ? DIM : columns;
}

static void run_head(const void *context, int task, kvedge_state_memory *memory) {
  const delta_work *work = context;
  const kvedge_delta_shape *shape = work->shape;
  const kvedge_delta_call *call = &work->calls[task / shape->num_heads];
  const ptrdiff_t elements = (ptrdiff_t)shape->key_dim * shape->value_dim;
  const int head = task % shape->num_heads,
            in_place = call->state_type == KVEDGE_TYPE_FLOAT32 && call->num_tokens <= CHUNK;
  char *state = (char *)call->state + head * elements * kvedge_element_bytes(call->state_type);
  delta_head h = {.work = work,
                  .call = call,
                  .memory = memory,
                  .head = head,
                  .key_head = head / (shape->num_heads / shape->num_key_heads),
                  .state = in_place ? (float *)state : memory->state,
                  .stride = shape->value_dim,
                  .columns = shape->value_dim};
  if (!in_place) {
    const int columns = columns_of_block(work->kernels, shape->key_dim);
    if (columns < shape->value_dim && call->num_tokens > CHUNK) h.columns = h.stride = columns;
    unpack_state(&h, state, call->state_type);
  }
  if (call->num_tokens == 1) run_token(&h);
  else
    for (int64_t t = 0; t < call->num_tokens; t += CHUNK)
      run_chunk(&h, t, call->num_tokens - t < CHUNK ? (int)(call->num_tokens - t) : CHUNK);
  if (!in_place) pack_state(&h, state, call->state_type);
}

static int is_shape(const kvedge_delta_shape *shape) {
  return shape->num_heads >= 1 && shape->num_key_heads >= 1 && shape->num_heads % shape->num_key_heads == 0 &&
         shape->key_dim >= 1 && shape->key_dim <= DIM && shape->value_dim >= 1 && shape->value_dim <= DIM &&
         (shape->gate_dim == 1 || shape->gate_dim == shape->key_dim) && isfinite(shape->scale);
}

static kvedge_status check_call(const kvedge_delta_shape *shape, const kvedge_delta_call *call) {
  const int heads = shape->num_heads, key_heads = shape->num_key_heads;
  const int64_t n = call->num_tokens;
  kvedge_status status = KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_is_state(call->state, call->state_type) || !kvedge_array_is_valid(&call->out) ||
      !kvedge_state_is_valid(&call->query, n, key_heads, shape->key_dim, &status) ||
      !kvedge_state_is_valid(&call->key, n, key_heads, shape->key_dim, &status) ||
      !kvedge_state_is_valid(&call->value, n, heads, shape->value_dim, &status) ||
      !kvedge_state_is_valid(&call->gate, n, heads, shape->gate_dim, &status) ||
      !kvedge_state_is_valid(&call->beta, n, heads, 1, &status))
    return status;
  if (!kvedge_state_is_nonpositive(&call->gate, n, heads, shape->gate_dim)) return KVEDGE_ERROR_ARGUMENT;
  return kvedge_array_is_apart(&call->out, n, heads, shape->value_dim) ? KVEDGE_OK : KVEDGE_ERROR_ARGUMENT;
}

kvedge_status kvedge_delta_extend(const kvedge_delta_shape *shape, const kvedge_delta_call *calls, int num_calls,
                                  int num_threads) {
  KVEDGE_FLOAT_MODE;
  if (!shape || !calls || num_calls < 1 || num_threads < 0 || !is_shape(shape)) return KVEDGE_ERROR_ARGUMENT;
  if (num_calls > INT_MAX / shape->num_heads) return KVEDGE_ERROR_ARGUMENT;
  kvedge_status status = kvedge_isa_ready();
  int64_t work = 0;
  for (int i = 0; i < num_calls && status == KVEDGE_OK; i++) {
    status = check_call(shape, &calls[i]);
    /* Bytes of the state, times 3 for reading it and one for each of two rows a token, and twice: it is changed too. */
    work += (int64_t)shape->num_heads * shape->key_dim * shape->value_dim * 4 * (3 + 4 * calls[i].num_tokens);
  }
  if (status != KVEDGE_OK) return status;
  const delta_work all = {shape, calls, kvedge_active()};
  return kvedge_state_run(run_head, &all, num_calls * shape->num_heads, work, num_threads);
}
