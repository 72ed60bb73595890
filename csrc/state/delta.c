/* The gated delta rule, by chunks of up to 16 tokens (the WY representation of Bischof and Van Loan 1987, for delta rules
 * Yang, Wang, Zhang, Shen, Kim 2024; README.md). A token alone is a chunk of one. */
#include <limits.h>

#include "state/state.h"
#include "store/layer.h"
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
  const float *next; /* the state that this thread needs after this one, or NULL */
} delta_head;

static const float ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                              1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static void normalize(float *row, int dim) {
  float lane[4] = {0};
  for (int d = 0; d < dim; d++) lane[d % 4] += row[d] * row[d];
  const float inverse = 1.0f / sqrtf(lane[0] + lane[1] + (lane[2] + lane[3]) + 1e-6f);
  for (int d = 0; d < dim; d++) row[d] *= inverse;
}

/* rows[0..n-1] become the keys of tokens first.., rows[n..2n-1] their queries; `more` the keys once more. */
static void take_rows(const delta_head *h, int64_t first, int n) {
  const kvedge_delta_shape *shape = h->work->shape;
  kvedge_state_memory *m = h->memory;
  for (int i = 0; i < n; i++) {
    kvedge_state_take_row(&h->call->key, first + i, h->key_head, shape->key_dim, m->rows[i]);
    kvedge_state_take_row(&h->call->query, first + i, h->key_head, shape->key_dim, m->rows[n + i]);
    if (shape->normalize) normalize(m->rows[i], shape->key_dim), normalize(m->rows[n + i], shape->key_dim);
    memcpy(m->more[i], m->rows[i], (size_t)shape->key_dim * sizeof(float));
    for (int d = 0; d < shape->key_dim; d++) m->rows[n + i][d] *= shape->scale;
  }
}

/* With one decay for all channels. weights[i][j], weights[n + i][j] = the products of key and query i with key j, decayed
 * from j to i, for j < i and j <= i; rows decay from the state on, keys in `more` to the end of the chunk. */
static void decay_rows(const delta_head *h, int64_t first, int n) {
  const int dim = h->work->shape->key_dim;
  kvedge_state_memory *m = h->memory;
  double since[CHUNK], sum = 0.0; /* logarithms of the decay since the state; double, as their differences count */
  for (int i = 0; i < n; i++) since[i] = sum += kvedge_log_decay(kvedge_state_number(&h->call->gate, first + i, h->head));
  kvedge_state_multiply(h->work->kernels, m->scratch, m->rows, 2 * n, m->more[0], KVEDGE_TILE, n, dim, m->weights);
  for (int i = 0; i < n; i++) {
    const float from_state = kvedge_exp_nonpositive((float)since[i]),
                to_end = kvedge_exp_nonpositive((float)(sum - since[i]));
    for (int j = 0; j < i; j++) {
      const float decay = kvedge_exp_nonpositive((float)(since[i] - since[j]));
      m->weights[i][j] *= decay, m->weights[n + i][j] *= decay;
    }
    for (int d = 0; d < dim; d++) {
      m->rows[i][d] *= from_state, m->rows[n + i][d] *= from_state;
      m->more[i][d] *= to_end;
    }
  }
  for (int d = 0; d < dim; d++) m->decay[d] = kvedge_exp_nonpositive((float)sum);
}

/* The sum of products in eight sums, which a compiler keeps in registers. */
static float product_of(const float *a, const float *b, int dim) {
  float lane[8] = {0}, sum = 0.0f;
  for (int d = 0; d + 8 <= dim; d += 8)
    for (int j = 0; j < 8; j++) lane[j] += a[d + j] * b[d + j];
  for (int d = dim / 8 * 8; d < dim; d++) sum += a[d] * b[d];
  return sum + ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

/* The same with a decay for each channel: keys decay on from token to token, so that no factor is above 1. */
static void decay_channels(const delta_head *h, int64_t first, int n) {
  const int dim = h->work->shape->key_dim;
  kvedge_state_memory *m = h->memory;
  float gate[DIM], since[DIM] = {0};
  for (int i = 0; i < n; i++) {
    const float *gates = kvedge_array_row(&h->call->gate, first + i, h->head, dim, gate);
    float one[DIM];
    for (int d = 0; d < dim; d++) {
      one[d] = kvedge_exp_nonpositive(gates[d]);
      since[d] += gates[d];
      m->decay[d] = kvedge_exp_nonpositive(since[d]);
    }
    for (int j = 0; j < i; j++) {
      for (int d = 0; d < dim; d++) m->more[j][d] *= one[d];
      m->weights[i][j] = product_of(m->rows[i], m->more[j], dim);
      m->weights[n + i][j] = product_of(m->rows[n + i], m->more[j], dim);
    }
    m->weights[n + i][i] = product_of(m->rows[n + i], m->more[i], dim);
    for (int d = 0; d < dim; d++) m->rows[i][d] *= m->decay[d], m->rows[n + i][d] *= m->decay[d];
  }
}

/* values[i] = u_i, what token i adds to the state along its key: beta (v - its key's product with the state it meets). */
static void find_updates(const delta_head *h, int64_t first, int n, int column, int columns) {
  kvedge_state_memory *m = h->memory;
  for (int i = 0; i < n; i++) {
    const float beta = kvedge_state_number(&h->call->beta, first + i, h->head);
    float room[DIM], *to = m->values[i], *weights = m->weights[i];
    const float *value = kvedge_array_row(&h->call->value, first + i, h->head, h->work->shape->value_dim, room) + column;
    for (int c = 0; c < columns; c++) to[c] = value[c] - m->sums[i][c];
    float negative[KVEDGE_TILE];
    for (int j = 0; j < i; j++) negative[j] = -weights[j];
    for (int j = i; j < CHUNK; j++) negative[j] = 0.0f;
    if (i)
      kvedge_state_add_rows(h->work->kernels, m->scratch, (const kvedge_state_row *)&negative, 1, m->values[0],
                            KVEDGE_TILE, i, columns, ones, to, KVEDGE_TILE, NULL);
    for (int c = 0; c < columns; c++) to[c] *= beta;
  }
}

/* The tokens first.. on columns column.. of the state, which begin at `state`. */
static void run_columns(const delta_head *h, int64_t first, int n, int column, float *state) {
  const kvedge_delta_shape *shape = h->work->shape;
  const kvedge_kernels *kernels = h->work->kernels;
  const int left = shape->value_dim - column, columns = left < h->columns ? left : h->columns;
  kvedge_state_memory *m = h->memory;
  for (int i = 0; i < 2 * n; i++) memset(m->sums[i], 0, (size_t)columns * sizeof(float));
  kvedge_state_add_rows(kernels, m->scratch, m->rows, 2 * n, state, h->stride, shape->key_dim, columns, ones,
                        m->sums[0], KVEDGE_TILE, h->next);
  find_updates(h, first, n, column, columns);
  kvedge_state_add_rows(kernels, m->scratch, m->weights + n, n, m->values[0], KVEDGE_TILE, n, columns, ones, m->sums[n],
                        KVEDGE_TILE, NULL);
  for (int i = 0; i < n; i++) {
    kvedge_array out = h->call->out;
    out.data = (char *)out.data + column * kvedge_element_bytes(out.type);
    kvedge_state_put_row(m->sums[n + i], columns, &out, first + i, h->head);
  }
  for (int k = 0; k < shape->key_dim; k += KVEDGE_QUERY_ROWS) {
    const int rows = shape->key_dim - k < KVEDGE_QUERY_ROWS ? shape->key_dim - k : KVEDGE_QUERY_ROWS;
    const kvedge_state_row *weights = (const kvedge_state_row *)&m->update[0][k / KVEDGE_QUERY_ROWS * CHUNK];
    kvedge_state_add_rows(kernels, m->scratch, weights, rows, m->values[0], KVEDGE_TILE, n, columns, m->decay + k,
                          state + k * h->stride, h->stride, NULL);
  }
}

static void run_chunk(const delta_head *h, int64_t first, int n) {
  const kvedge_delta_shape *shape = h->work->shape;
  kvedge_state_memory *m = h->memory;
  take_rows(h, first, n);
  if (shape->gate_dim == 1) decay_rows(h, first, n);
  else decay_channels(h, first, n);
  for (int i = 0; i < n; i++)
    for (int j = i + 1; j < CHUNK; j++) m->weights[n + i][j] = 0.0f;
  /* Weights of the update, (key_dim, CHUNK): of 32 rows of the state beside those of the next 32. */
  for (int k = 0; k < shape->key_dim; k++) {
    float *weights = &m->update[k % KVEDGE_QUERY_ROWS][k / KVEDGE_QUERY_ROWS * CHUNK];
    for (int j = 0; j < CHUNK; j++) weights[j] = j < n ? m->more[j][k] : 0.0f;
  }
  for (int c = 0, block = 0; c < shape->value_dim; c += h->columns, block++)
    run_columns(h, first, n, c, h->state + (ptrdiff_t)block * shape->key_dim * h->stride);
}

/* The state of a head as float32 in blocks of columns, and back. */
static void unpack_state(const delta_head *h, const char *state, kvedge_element_type type) {
  const int key_dim = h->work->shape->key_dim, value_dim = h->work->shape->value_dim;
  float room[DIM];
  for (int k = 0; k < key_dim; k++, state += value_dim * kvedge_element_bytes(type)) {
    const float *row = (const float *)state;
    if (type != KVEDGE_TYPE_FLOAT32) kvedge_widen(type, state, value_dim, room), row = room;
    for (int c = 0; c < value_dim; c += h->columns) {
      const int n = value_dim - c < h->columns ? value_dim - c : h->columns;
      memcpy(h->state + (ptrdiff_t)c * key_dim + k * h->stride, row + c, (size_t)n * sizeof *row);
    }
  }
}

static void pack_state(const delta_head *h, char *state, kvedge_element_type type) {
  const int key_dim = h->work->shape->key_dim, value_dim = h->work->shape->value_dim;
  float room[DIM];
  for (int k = 0; k < key_dim; k++, state += value_dim * kvedge_element_bytes(type)) {
    float *row = type == KVEDGE_TYPE_FLOAT32 ? (float *)state : room;
    for (int c = 0; c < value_dim; c += h->columns) {
      const int n = value_dim - c < h->columns ? value_dim - c : h->columns;
      memcpy(row + c, h->state + (ptrdiff_t)c * key_dim + k * h->stride, (size_t)n * sizeof *row);
    }
    if (row == room) kvedge_narrow(type, room, value_dim, state);
  }
}

/* Columns of which a block stays in the first-level cache. */
static int columns_of_block(const kvedge_kernels *kernels, int key_dim) {
  const int columns = kernels->tuning.step_bytes / (key_dim * (int)sizeof(float)) / 16 * 16;
  return columns < 16 ? 16 : columns > DIM ? DIM : columns;
}

static void run_head(const void *context, int task, int next, kvedge_state_memory *memory) {
  const delta_work *work = context;
  const kvedge_delta_shape *shape = work->shape;
  const kvedge_delta_call *call = &work->calls[task / shape->num_heads];
  const ptrdiff_t elements = (ptrdiff_t)shape->key_dim * shape->value_dim;
  const int head = task % shape->num_heads, in_place = call->state_type == KVEDGE_TYPE_FLOAT32 && call->num_tokens <= CHUNK;
  char *state = (char *)call->state + head * elements * kvedge_element_bytes(call->state_type);
  delta_head h = {.work = work,
                  .call = call,
                  .memory = memory,
                  .head = head,
                  .key_head = head / (shape->num_heads / shape->num_key_heads),
                  .state = in_place ? (float *)state : memory->state,
                  .stride = shape->value_dim,
                  .columns = shape->value_dim};
  if (in_place && next == task + 1 && head + 1 < shape->num_heads) h.next = h.state + elements;
  if (!in_place) {
    const int columns = columns_of_block(work->kernels, shape->key_dim);
    if (columns < shape->value_dim) h.columns = h.stride = columns;
    unpack_state(&h, state, call->state_type);
  }
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
