/* Mamba-2 by chunks of up to 16 tokens: the state space dual of Dao and Gu 2024 (README.md). A token alone is a chunk of one. */
#include <limits.h>

#include "state/state.h"
#include "store/layer_struct.h"
#include "system/dispatch.h"
#include "system/float_mode.h"

enum { CHUNK = KVEDGE_STATE_CHUNK, DIM = KVEDGE_STATE_DIM };

typedef struct {
  const kvedge_mamba_shape *shape;
  const kvedge_mamba_call *calls;
  const kvedge_kernels *kernels;
} mamba_work;

/* One head of a call. */
typedef struct {
  const mamba_work *work;
  const kvedge_mamba_call *call;
  kvedge_state_memory *memory;
  int head, group;
  float *state; /* (head_dim, state_size) */
} mamba_head;

/* Tokens first..first+n-1. */
static void run_chunk(const mamba_head *h, int64_t first, int n) {
  const kvedge_mamba_shape *shape = h->work->shape;
  const kvedge_mamba_call *call = h->call;
  const kvedge_kernels *kernels = h->work->kernels;
  const int dim = shape->head_dim, size = shape->state_size;
  kvedge_state_memory *m = h->memory;
  float keep[CHUNK], decay[CHUNK], dt[CHUNK], decays[CHUNK][CHUNK];
  /* Logarithms of the decay of a token, and from the state on. (Zeros, since GCC at -O3 sees no n of at least 1.) */
  float log_decays[CHUNK] = {0}, since[CHUNK] = {0}, sum = 0.0f;
  for (int i = 0; i < n; i++) {
    dt[i] = kvedge_state_number(&call->dt, first + i, h->head);
    log_decays[i] = kvedge_log_decay(dt[i] * shape->a[h->head]);
    since[i] = sum += log_decays[i];
    kvedge_state_take_row(&call->c, first + i, h->group, size, m->rows[i]);
    kvedge_state_take_row(&call->b, first + i, h->group, size, m->more[i]);
    kvedge_state_take_row(&call->x, first + i, h->head, dim, m->values[i]);
  }
  kernels->states->decays(log_decays, n, decay);
  kernels->states->decays(since, n, keep);
  kvedge_state_decays(decay, n, decays);
  /* sums[i] = decay of S C_i, + the sum over j <= i of (C_i B_j) decay from j to i, times dt_j x_j */
  kvedge_state_multiply(kernels, m->scratch, m->rows[0], KVEDGE_TILE, n, h->state, size, dim, size, m->sums);
  kvedge_state_multiply(kernels, m->scratch, m->rows[0], KVEDGE_TILE, n, m->more[0], KVEDGE_TILE, n, size, m->weights);
  for (int i = 0; i < n; i++) {
    for (int j = 0; j <= i; j++) m->weights[i][j] *= dt[j] * decays[i][j];
    for (int j = i + 1; j < n; j++) m->weights[i][j] = 0.0f;
    if (shape->d) m->weights[i][i] += shape->d[h->head];
  }
  kvedge_state_add_rows(kernels, m->scratch, m->weights[0], n, m->values[0], KVEDGE_TILE, n, dim, keep, m->sums[0],
                        KVEDGE_TILE);
  for (int i = 0; i < n; i++) kvedge_state_put_row(m->sums[i], dim, &call->out, first + i, h->head);
  /* S = decay S + the sum over j of decay to the end, dt_j x_j B_j^T */
  for (int j = 0; j < n; j++)
    for (int p = 0; p < dim; p++) m->values[j][p] *= dt[j] * decays[n - 1][j];
  for (int r = 0; r < KVEDGE_QUERY_ROWS; r++) m->decay[r] = keep[n - 1];
  for (int p = 0; p < dim; p += KVEDGE_QUERY_ROWS) {
    const int rows = dim - p < KVEDGE_QUERY_ROWS ? dim - p : KVEDGE_QUERY_ROWS;
    kvedge_state_transpose(kernels, m->values[0], n, p, rows, m->to_state[0]);
    kvedge_state_add_rows(kernels, m->scratch, m->to_state[0], rows, m->more[0], KVEDGE_TILE, n, size, m->decay,
                          h->state + (ptrdiff_t)p * size, size);
  }
}

/* A token alone. */
static void run_token(const mamba_head *h) {
  const kvedge_mamba_shape *shape = h->work->shape;
  const kvedge_mamba_call *call = h->call;
  const int dim = shape->head_dim, size = shape->state_size;
  kvedge_state_memory *m = h->memory;
  float *x = m->values[0], *updates = m->updates[0], *out = m->sums[0], keep;
  const float dt = kvedge_state_number(&call->dt, 0, h->head), decay = kvedge_log_decay(dt * shape->a[h->head]),
              *b = kvedge_array_row(&call->b, 0, h->group, size, m->more[0]),
              *c = kvedge_array_row(&call->c, 0, h->group, size, m->rows[0]);
  h->work->kernels->states->decays(&decay, 1, &keep);
  kvedge_state_take_row(&call->x, 0, h->head, dim, x);
  for (int p = 0; p < dim; p++) updates[p] = dt * x[p];
  h->work->kernels->states->mamba_token(h->state, dim, size, keep, updates, b, c, out);
  for (int p = 0; p < dim && shape->d; p++) out[p] += shape->d[h->head] * x[p];
  kvedge_state_put_row(out, dim, &call->out, 0, h->head);
}

static void run_head(const void *context, int task, kvedge_state_memory *memory) {
  const mamba_work *work = context;
  const kvedge_mamba_shape *shape = work->shape;
  const kvedge_mamba_call *call = &work->calls[task / shape->num_heads];
  const int head = task % shape->num_heads, in_place = call->state_type == KVEDGE_TYPE_FLOAT32,
            elements = shape->head_dim * shape->state_size;
  char *state = (char *)call->state + (ptrdiff_t)head * elements * kvedge_element_bytes(call->state_type);
  const mamba_head h = {.work = work,
                        .call = call,
                        .memory = memory,
                        .head = head,
                        .group = head / (shape->num_heads / shape->num_groups),
                        .state = in_place ? (float *)state : memory->state};
  if (!in_place) work->kernels->states->widen_bfloats((const uint16_t *)state, elements, h.state);
  if (call->num_tokens == 1) run_token(&h);
  else
    for (int64_t t = 0; t < call->num_tokens; t += CHUNK)
      run_chunk(&h, t, call->num_tokens - t < CHUNK ? (int)(call->num_tokens - t) : CHUNK);
  if (!in_place) work->kernels->states->narrow_bfloats(h.state, elements, (uint16_t *)state);
}

static int is_shape(const kvedge_mamba_shape *shape) {
  if (shape->num_heads < 1 || shape->num_groups < 1 || shape->num_heads % shape->num_groups || shape->head_dim < 1 ||
      shape->head_dim > DIM || shape->state_size < 1 || shape->state_size > DIM || !shape->a)
    return 0;
  for (int h = 0; h < shape->num_heads; h++)
    if (!(shape->a[h] <= 0.0f && isfinite(shape->a[h])) || (shape->d && !isfinite(shape->d[h]))) return 0;
  return 1;
}

static kvedge_status check_call(const kvedge_mamba_shape *shape, const kvedge_mamba_call *call) {
  const int heads = shape->num_heads, groups = shape->num_groups;
  const int64_t n = call->num_tokens;
  kvedge_status status = KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_is_state(call->state, call->state_type) || !kvedge_array_is_valid(&call->out) ||
      !kvedge_state_is_valid(&call->x, n, heads, shape->head_dim, &status) ||
      !kvedge_state_is_valid(&call->dt, n, heads, 1, &status) ||
      !kvedge_state_is_valid(&call->b, n, groups, shape->state_size, &status) ||
      !kvedge_state_is_valid(&call->c, n, groups, shape->state_size, &status))
    return status;
  for (int64_t t = 0; t < n; t++)
    for (int h = 0; h < heads; h++)
      if (kvedge_state_number(&call->dt, t, h) < 0.0f) return KVEDGE_ERROR_ARGUMENT;
  return kvedge_array_is_apart(&call->out, n, heads, shape->head_dim) ? KVEDGE_OK : KVEDGE_ERROR_ARGUMENT;
}

kvedge_status kvedge_mamba_extend(const kvedge_mamba_shape *shape, const kvedge_mamba_call *calls, int num_calls,
                                  int num_threads) {
  KVEDGE_FLOAT_MODE;
  if (!shape || !calls || num_calls < 1 || num_threads < 0 || !is_shape(shape)) return KVEDGE_ERROR_ARGUMENT;
  if (num_calls > INT_MAX / shape->num_heads) return KVEDGE_ERROR_ARGUMENT;
  kvedge_status status = kvedge_isa_ready();
  int64_t work = 0;
  for (int i = 0; i < num_calls && status == KVEDGE_OK; i++) {
    status = check_call(shape, &calls[i]);
    work += (int64_t)shape->num_heads * shape->head_dim * shape->state_size * 4 * (3 + 2 * calls[i].num_tokens);
  }
  if (status != KVEDGE_OK) return status;
  const mamba_work all = {shape, calls, kvedge_active()};
  return kvedge_state_run(run_head, &all, num_calls * shape->num_heads, work, num_threads);
}
