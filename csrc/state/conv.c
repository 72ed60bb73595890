/* The short causal convolution of each channel alone, and its state: the last inputs (README.md). */
#include <limits.h>

#include "state/state.h"
#include "store/layer_struct.h"
#include "system/dispatch.h"
#include "system/float_mode.h"
#include "system/target.h"

enum {
  MOST_WIDTH = 16,
  BLOCK = 256, /* channels of a task: what its rows take stays in the first-level cache */
  TOKENS = 8,  /* that are worked on together */
};

typedef struct {
  const kvedge_conv_shape *shape;
  const kvedge_conv_call *calls;
  const kvedge_kernels *kernels;
  int num_blocks; /* of channels */
} conv_work;

static float element(const void *state, kvedge_element_type type, ptrdiff_t at) {
  return type == KVEDGE_TYPE_FLOAT32 ? ((const float *)state)[at]
                                     : kvedge_float_of_bfloat(((const uint16_t *)state)[at]);
}

static void set_element(void *state, kvedge_element_type type, ptrdiff_t at, float x) {
  if (type == KVEDGE_TYPE_FLOAT32) ((float *)state)[at] = x;
  else kvedge_narrow(type, &x, 1, (uint16_t *)state + at);
}

/* The array from a channel on. */
static kvedge_array from_channel(const kvedge_array *array, int first) {
  kvedge_array from = *array;
  from.data = (char *)array->data + first * kvedge_element_bytes(array->type);
  return from;
}

/* Channels of a row of x. */
static const float *row_of(const kvedge_array *x, int64_t token, int first, int n, float *room) {
  const kvedge_array from = from_channel(x, first);
  return kvedge_array_row(&from, token, 0, n, room);
}

/* sums[c] = the convolution of one token, and the state goes one input on, for n channels. (Constants where this is inlined:
 * the usual widths.) */
KVEDGE_INLINE void move_on(float *state, const float *weight, const float *bias, const float *x, const int width,
                           const int kept, int n, float *sums) {
  for (int c = 0; c < n; c++, state += kept, weight += width) {
    const float *last = state + kept - (width - 1);
    float sum = bias ? bias[c] : 0.0f;
    for (int w = 0; w + 1 < width; w++) sum += weight[w] * last[w];
    for (int j = 0; j + 1 < kept; j++) state[j] = state[j + 1];
    state[kept - 1] = x[c];
    sums[c] = sum + weight[width - 1] * x[c];
  }
}

/* One token of channels first..: their inputs and weights are passed over as they lie. */
static void run_token(const conv_work *work, const kvedge_conv_call *call, int first, int n,
                      kvedge_state_memory *memory) {
  const kvedge_conv_shape *shape = work->shape;
  const kvedge_state_kernels *kernels = work->kernels->states;
  const int width = shape->width, kept = shape->state_len;
  const float *x = row_of(&call->x, 0, first, n, memory->rows[0]), *sums = memory->sums[0],
              *weight = shape->weight + (ptrdiff_t)first * width, *bias = shape->bias ? shape->bias + first : NULL;
  float *state = (float *)call->state + (ptrdiff_t)first * kept, *out = memory->values[0];
  uint16_t *narrow = (uint16_t *)call->state + (ptrdiff_t)first * kept;
  const int is_narrow = call->state_type != KVEDGE_TYPE_FLOAT32;
  if (is_narrow) kernels->widen_bfloats(narrow, n * kept, memory->state), state = memory->state;
  if (width == 4 && kept == 4) move_on(state, weight, bias, x, 4, 4, n, memory->sums[0]);
  else if (width == 3 && kept == 3) move_on(state, weight, bias, x, 3, 3, n, memory->sums[0]);
  else move_on(state, weight, bias, x, width, kept, n, memory->sums[0]);
  if (is_narrow) kernels->narrow_bfloats(state, n * kept, narrow);
  for (int c = 0; c < n; c++) memory->weights[0][c] = 1.0f;
  kernels->convolve(&sums, memory->weights[0], NULL, 1, 1, n, shape->silu, &out);
  const kvedge_array to = from_channel(&call->out, first);
  kvedge_state_put_row(out, n, &to, 0, 0);
}

static void run_block(const void *context, int task, kvedge_state_memory *memory) {
  const conv_work *work = context;
  const kvedge_conv_shape *shape = work->shape;
  const kvedge_conv_call *call = &work->calls[task / work->num_blocks];
  const int first = task % work->num_blocks * BLOCK, left = shape->num_channels - first,
            n = left < BLOCK ? left : BLOCK, width = shape->width, kept = shape->state_len;
  const kvedge_element_type type = call->state_type;
  const kvedge_array to = from_channel(&call->out, first);
  const ptrdiff_t state = (ptrdiff_t)first * kept; /* where it begins, in elements */
  kvedge_state_row *weights = memory->weights, *rooms = memory->rows, *results = memory->values;
  const float *rows[MOST_WIDTH - 1 + TOKENS];
  float *out[TOKENS];
  if (call->num_tokens == 1 && kept <= MOST_WIDTH) {
    run_token(work, call, first, n, memory);
    return;
  }
  for (int w = 0; w < width; w++)
    for (int c = 0; c < n; c++) weights[w][c] = shape->weight[(ptrdiff_t)(first + c) * width + w];
  for (int w = 0; w < width - 1; w++) {
    for (int c = 0; c < n; c++)
      rooms[w][c] = element(call->state, type, state + (ptrdiff_t)c * kept + kept - (width - 1) + w);
    rows[w] = rooms[w];
  }
  for (int64_t t = 0; t < call->num_tokens; t += TOKENS) {
    const int count = call->num_tokens - t < TOKENS ? (int)(call->num_tokens - t) : TOKENS;
    for (int i = 0; i < count; i++) {
      rows[width - 1 + i] = row_of(&call->x, t + i, first, n, rooms[width - 1 + i]);
      out[i] = to.type == KVEDGE_TYPE_FLOAT32 ? (float *)kvedge_array_at(&to, t + i, 0) : results[i];
    }
    work->kernels->states->convolve(rows, weights[0], shape->bias ? shape->bias + first : NULL, width, count, n,
                                    shape->silu, out);
    for (int i = 0; i < count; i++)
      if (out[i] == results[i]) kvedge_state_put_row(out[i], n, &to, t + i, 0);
    for (int w = 0; w < width - 1; w++) {
      if (call->x.type != KVEDGE_TYPE_FLOAT32) memcpy(rooms[w], rows[count + w], (size_t)n * sizeof *rows[0]);
      rows[w] = call->x.type == KVEDGE_TYPE_FLOAT32 ? rows[count + w] : rooms[w];
    }
  }
  /* The last inputs are those of x, behind them what the state had. */
  const int64_t moved = call->num_tokens < kept ? call->num_tokens : kept;
  for (int c = 0; c < n; c++)
    for (int64_t j = moved; j < kept; j++) {
      const float x = element(call->state, type, state + (ptrdiff_t)c * kept + j);
      set_element(call->state, type, state + (ptrdiff_t)c * kept + j - moved, x);
    }
  for (int64_t j = kept - moved; j < kept; j++) {
    const float *row = row_of(&call->x, call->num_tokens - kept + j, first, n, rooms[0]);
    for (int c = 0; c < n; c++) set_element(call->state, type, state + (ptrdiff_t)c * kept + j, row[c]);
  }
}

static int is_shape(const kvedge_conv_shape *shape) {
  return shape->num_channels >= 1 && shape->width >= 1 && shape->width <= MOST_WIDTH &&
         shape->state_len >= shape->width - 1 && shape->state_len >= 1 && shape->weight;
}

static int are_finite(const kvedge_conv_shape *shape) {
  const size_t channels = (size_t)shape->num_channels;
  const uint32_t weight = kvedge_active()->rows->abs_max_bits(shape->weight, channels * (size_t)shape->width),
                 bias = shape->bias ? kvedge_active()->rows->abs_max_bits(shape->bias, channels) : 0;
  return weight < 0x7f800000u && bias < 0x7f800000u;
}

kvedge_status kvedge_conv_extend(const kvedge_conv_shape *shape, const kvedge_conv_call *calls, int num_calls,
                                 int num_threads) {
  KVEDGE_FLOAT_MODE;
  if (!shape || !calls || num_calls < 1 || num_threads < 0 || !is_shape(shape)) return KVEDGE_ERROR_ARGUMENT;
  const int num_blocks = (shape->num_channels - 1) / BLOCK + 1;
  if (num_calls > INT_MAX / num_blocks) return KVEDGE_ERROR_ARGUMENT;
  kvedge_status status = kvedge_isa_ready();
  if (status == KVEDGE_OK && !are_finite(shape)) status = KVEDGE_ERROR_NONFINITE;
  int64_t work = 0;
  for (int i = 0; i < num_calls && status == KVEDGE_OK; i++) {
    const kvedge_conv_call *call = &calls[i];
    if (!kvedge_is_state(call->state, call->state_type) || !kvedge_array_is_valid(&call->out))
      return KVEDGE_ERROR_ARGUMENT;
    for (int c = 0; c < shape->num_channels; c += BLOCK) {
      const int left = shape->num_channels - c;
      const kvedge_array x = from_channel(&call->x, c);
      if (!kvedge_state_is_valid(&x, call->num_tokens, 1, left < BLOCK ? left : BLOCK, &status)) return status;
    }
    status =
        kvedge_array_is_apart(&call->out, call->num_tokens, 1, shape->num_channels) ? KVEDGE_OK : KVEDGE_ERROR_ARGUMENT;
    work += (int64_t)shape->num_channels * shape->width * 4 * (3 + 2 * call->num_tokens);
  }
  if (status != KVEDGE_OK) return status;
  const conv_work all = {shape, calls, kvedge_active(), num_blocks};
  return kvedge_state_run(run_block, &all, num_calls * num_blocks, work, num_threads);
}
