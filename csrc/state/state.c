/* Products of states by the kernels that attention has for rows of float32, and the sharing out of heads. */
#include "state/state.h"

#include "store/layer_struct.h"
#include "system/dispatch.h"
#include "system/parallel.h"

const float kvedge_state_ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* Rows side by side, as a tile of blocks. */
static kvedge_tile tile_of(const char **blocks, const float *rows, ptrdiff_t stride, int num_rows, int dim) {
  for (int t = 0; t < num_rows; t += KVEDGE_BLOCK) blocks[t / KVEDGE_BLOCK] = (const char *)(rows + t * stride);
  return (kvedge_tile){.blocks = blocks,
                       .token_stride = stride * (ptrdiff_t)sizeof(float),
                       .num_tokens = num_rows,
                       .dim = dim,
                       .factor = 1.0f};
}

void kvedge_state_add_rows(const kvedge_kernels *kernels, char *scratch, float *weights, int n, const float *rows,
                           ptrdiff_t stride, int num_rows, int dim, const float *keep, float *sums,
                           ptrdiff_t sum_stride) {
  const char *blocks[KVEDGE_TILE_BLOCKS];
  const kvedge_tile tile = tile_of(blocks, rows, stride, num_rows, dim);
  for (int t = num_rows; t % 4; t++)
    for (int i = 0; i < n; i++) weights[i * KVEDGE_TILE + t] = 0.0f;
  const kvedge_probabilities p = {.num_queries = n, .p = weights, .scratch = scratch};
  const kvedge_accumulators to = {sums, sum_stride, keep};
  kernels->cells[KVEDGE_FLOAT32].weighted_sum(&p, &tile, &to);
}

void kvedge_state_multiply(const kvedge_kernels *kernels, char *scratch, const float *queries, ptrdiff_t query_stride,
                           int n, const float *rows, ptrdiff_t stride, int num_rows, int dim,
                           kvedge_state_row *products) {
  const char *blocks[KVEDGE_TILE_BLOCKS];
  const kvedge_tile tile = tile_of(blocks, rows, stride, num_rows, dim);
  const kvedge_query q = {.num_queries = n, .dim = dim, .stride = query_stride, .values = queries, .scratch = scratch};
  kernels->cells[KVEDGE_FLOAT32].scores(&q, &tile, products[0], 0);
}

void kvedge_state_transpose(const kvedge_kernels *kernels, const float *rows, int num_rows, int first, int dim,
                            float *to) {
  for (int r = 0; r < dim; r += KVEDGE_SCALE_COLUMNS) {
    const int columns = dim - r < KVEDGE_SCALE_COLUMNS ? dim - r : KVEDGE_SCALE_COLUMNS;
    kernels->rows->transpose_scales(rows + first + r, KVEDGE_SCALE_FLOAT32, KVEDGE_TILE * sizeof *rows, num_rows,
                                    columns, 1.0f, to + r * KVEDGE_TILE, KVEDGE_TILE);
  }
}

int kvedge_state_is_valid(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim,
                          kvedge_status *status) {
  *status = KVEDGE_ERROR_ARGUMENT;
  if (num_tokens < 1 || !kvedge_array_is_valid(array)) return 0;
  *status = KVEDGE_ERROR_NONFINITE;
  return kvedge_array_abs_max_bits(array, num_tokens, num_heads, dim) < 0x7f800000u;
}

/* Floats above 0 are those whose bits are, as integers with a sign. */
int kvedge_state_is_nonpositive(const kvedge_array *array, int64_t num_tokens, int num_heads, int dim) {
  float room[KVEDGE_STATE_DIM];
  int32_t most = 0;
  for (int64_t t = 0; t < num_tokens; t++)
    for (int h = 0; h < num_heads; h++) {
      const float *row = kvedge_array_row(array, t, h, dim, room);
      for (int d = 0; d < dim; d++) {
        const int32_t bits = (int32_t)kvedge_bits_of_float(row[d]);
        most = bits > most ? bits : most;
      }
    }
  return most == 0;
}

typedef struct {
  kvedge_state_task *run;
  const void *context;
  kvedge_state_memory *memory; /* (threads) */
} state_job;

static void run_task(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const state_job *job = context;
  (void)next, (void)slot, (void)stop;
  job->run(job->context, task, &job->memory[thread]);
}

kvedge_status kvedge_state_run(kvedge_state_task *run, const void *context, int num_tasks, int64_t work,
                               int num_threads) {
  num_threads = kvedge_threads_for((double)work / kvedge_active()->tuning.work_per_us, num_threads);
  const int threads = kvedge_job_threads(num_threads, num_tasks);
  const size_t head = kvedge_align(sizeof(state_job));
  kvedge_job *job = kvedge_job_take(head + (size_t)threads * sizeof(kvedge_state_memory));
  if (!job) return KVEDGE_ERROR_MEMORY;
  state_job *all = kvedge_job_memory(job);
  *all = (state_job){run, context, (kvedge_state_memory *)((char *)all + head)};
  kvedge_job_run(job, (kvedge_work){.context = all, .num_tasks = num_tasks, .run = run_task, .once = 1}, threads);
  return KVEDGE_OK;
}
