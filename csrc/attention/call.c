/* kvedge_attend and kvedge_attend_batch: calls planned, then run together on as many threads as asked. */
#include <stdlib.h>

#include "attention/attention.h"
#include "system/parallel.h"

enum {
  /* Query rows of a call, which bounds the memory of a long prompt. */
  MAX_ROWS = 512,
};

typedef struct {
  kvedge_attention planned;
  const float *query;
  float *out, *lse;
} planned_call;

static int slices_of(const planned_call *call) { return call->planned.num_row_blocks * call->planned.chunks_per_block; }

/* As kvedge_tuning.parallel_work has it, about. */
static int64_t work_of(const planned_call *call) {
  const kvedge_attention *a = &call->planned;
  kvedge_visible seen = kvedge_visible_tokens(a, a->num_row_blocks - 1);
  const kvedge_view_side *keys = &a->view.side[KEYS], *values = &a->view.side[VALUES];
  int64_t tokens = (seen.sinks + seen.stop - seen.first) * a->num_row_blocks;
  return tokens * (keys->token_stride + values->token_stride) * (3 + a->query_rows);
}

/* ---- On several threads: the slices of all calls are tasks of one job ------------------------- */

/* The part of a job that one call has. Slots are its own: one per slice and one to spare. */
typedef struct {
  kvedge_attention *attention;
  int first_task, num_tasks;
} share;

typedef struct {
  share *shares;  /* (calls) */
  int32_t *owner; /* (tasks) whose share a task is in */
  int num_tasks;
} batch;

static int slot_of(const batch *b, const share *s, int task, int slot) {
  return slot == b->num_tasks ? s->num_tasks : task - s->first_task;
}

static kvedge_slice slice_of_task(const batch *b, int task) {
  if (task < 0) return (kvedge_slice){.attention = NULL};
  const share *s = &b->shares[b->owner[task]];
  return (kvedge_slice){s->attention, task - s->first_task};
}

static void run_task(void *context, int task, int next, int slot, const volatile int *stop) {
  const batch *b = context;
  const share *s = &b->shares[b->owner[task]];
  kvedge_slice_run(s->attention, task - s->first_task, slice_of_task(b, next), slot_of(b, s, task, slot), stop);
}

static void collect_task(void *context, int task, int slot) {
  const batch *b = context;
  const share *s = &b->shares[b->owner[task]];
  kvedge_attention_collect(s->attention, task - s->first_task, slot_of(b, s, task, slot));
}

static kvedge_status run_on_threads(planned_call *calls, int num_calls, int num_tasks, int num_threads) {
  size_t shares = kvedge_align((size_t)num_calls * sizeof(share));
  size_t owners = kvedge_align((size_t)num_tasks * sizeof(int32_t));
  size_t bytes = kvedge_align(sizeof(batch)) + shares + owners;
  for (int i = 0; i < num_calls; i++)
    bytes += kvedge_attention_lay_out(&calls[i].planned, NULL, slices_of(&calls[i]) + 1);
  kvedge_job *job = kvedge_job_take(bytes);
  if (!job) return KVEDGE_ERROR_MEMORY;
  char *memory = kvedge_job_memory(job);
  batch *b = (batch *)memory;
  memory += kvedge_align(sizeof *b);
  *b = (batch){.shares = (share *)memory, .owner = (int32_t *)(memory + shares), .num_tasks = num_tasks};
  memory += shares + owners;
  for (int i = 0, task = 0; i < num_calls; i++) {
    planned_call *call = &calls[i];
    int slices = slices_of(call);
    size_t used = kvedge_attention_lay_out(&call->planned, NULL, slices + 1);
    b->shares[i] = (share){
        .first_task = task,
        .num_tasks = slices,
        .attention = kvedge_attention_set_up(&call->planned, memory, slices + 1, call->query, call->out, call->lse)};
    memory += used;
    for (int j = 0; j < slices; j++) b->owner[task++] = i;
  }
  kvedge_job_run(job, (kvedge_work){.context = b, .num_tasks = num_tasks, .run = run_task, .collect = collect_task},
                 num_threads);
  /* A helper that was left behind reads cache rows, which wait for it, and the job's own memory; but masks and biases
   * are the caller's, too large to copy, and may be gone after this. */
  const kvedge_attention_options *o = &calls[0].planned.options;
  if (o->mask || o->bias) kvedge_quiesce();
  return KVEDGE_OK;
}

/* ---- On this thread alone -------------------------------------------------------------------- */

static kvedge_status run_here(planned_call *calls, int num_calls) {
  size_t most = 0;
  for (int i = 0; i < num_calls; i++) {
    calls[i].planned.query_stays = 1;
    size_t bytes = kvedge_attention_lay_out(&calls[i].planned, NULL, 1);
    if (bytes > most) most = bytes;
  }
  void *memory = aligned_alloc(64, most);
  if (!memory) return KVEDGE_ERROR_MEMORY;
  for (int i = 0; i < num_calls; i++) {
    planned_call *call = &calls[i];
    kvedge_attention *a = kvedge_attention_set_up(&call->planned, memory, 1, call->query, call->out, call->lse);
    for (int slice = 0; slice < slices_of(call); slice++) {
      kvedge_slice next = {a, slice + 1};
      if (next.slice == slices_of(call)) next = (kvedge_slice){i + 1 < num_calls ? &calls[i + 1].planned : NULL, 0};
      kvedge_slice_run(a, slice, next, 0, NULL);
      kvedge_attention_collect(a, slice, 0);
    }
  }
  free(memory);
  return KVEDGE_OK;
}

static kvedge_status run_planned(planned_call *calls, int num_calls, int num_threads) {
  int64_t work = 0;
  int num_tasks = 0;
  for (int i = 0; i < num_calls; i++) {
    work += work_of(&calls[i]);
    num_tasks += slices_of(&calls[i]);
  }
  if (num_threads == 0) num_threads = kvedge_get_num_threads();
  if (num_threads > 1 && num_tasks > 1 && work >= calls[0].planned.kernels->tuning.parallel_work)
    return run_on_threads(calls, num_calls, num_tasks, num_threads);
  return run_here(calls, num_calls);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Plans rows row..row+count-1 of num_rows; masks and biases start at that row. */
static void plan_rows(planned_call *call, const kvedge_cache_view *view, const kvedge_sequence *rows, int64_t row,
                      int64_t count, int num_heads, const kvedge_attention_options *options) {
  kvedge_attention_options own;
  if (options) own = *options;
  else kvedge_attention_defaults(&own);
  if (own.mask) own.mask += row * own.mask_strides[1];
  if (own.bias) own.bias += row * own.bias_strides[1];
  kvedge_attention_plan(&call->planned, view, view->len - rows->num_rows + row, count, num_heads, &own);
  call->query = rows->query + row * num_heads * view->side[KEYS].shape.dim;
  call->out = rows->out + row * num_heads * view->side[VALUES].shape.dim;
  call->lse = rows->lse ? rows->lse + row * num_heads : NULL;
}

kvedge_status kvedge_attend(const kvedge_layer *layer, const float *query, int64_t num_rows, int num_heads,
                            const kvedge_attention_options *options, int num_threads, float *out, float *lse) {
  if (!layer || !query || !out || num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  kvedge_segment segment;
  kvedge_cache_view view = kvedge_layer_view(layer, options ? options->num_tokens : 0, &segment);
  kvedge_sequence rows = {.query = query, .num_rows = num_rows, .out = out, .lse = lse};
  kvedge_status status = kvedge_attention_check(&view, query, num_rows, num_heads, options);
  for (int64_t row = 0; row < num_rows && status == KVEDGE_OK; row += MAX_ROWS) {
    planned_call call;
    int64_t count = num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS;
    plan_rows(&call, &view, &rows, row, count, num_heads, options);
    status = run_planned(&call, 1, num_threads);
  }
  return status;
}

/* Blocks of a sequence as segments: neighbours in the pool that are neighbours in the sequence are one.
 * Returns their number; -1: a block is not in the pool. */
static int segments_of(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequence,
                       kvedge_segment *segments) {
  int64_t num_blocks = pool->config.capacity / block_size;
  int n = 0;
  for (int64_t i = 0; i * block_size < sequence->len; i++) {
    int64_t block = sequence->blocks[i], left = sequence->len - i * block_size;
    if (block < 0 || block >= num_blocks) return -1;
    int64_t tokens = left < block_size ? left : block_size;
    if (i > 0 && block == (int64_t)sequence->blocks[i - 1] + 1) {
      segments[n - 1].num_tokens += tokens;
      continue;
    }
    const int64_t token = block * block_size;
    segments[n++] = (kvedge_segment){
        .rows = {kvedge_codes_at(&pool->keys,  token), kvedge_codes_at(&pool->values,  token)},
        .scales = {kvedge_scales_at(&pool->keys, token), kvedge_scales_at(&pool->values, token)},
        .num_tokens = tokens
    };
  }
  return n;
}

/* Checks all sequences, and counts what they need. */
static kvedge_status check_batch(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                 int num_sequences, int num_heads, const kvedge_attention_options *options,
                                 int64_t *num_segments, int64_t *num_calls) {
  if (!pool || block_size < 1 || block_size > pool->config.capacity || !sequences || num_sequences < 1)
    return KVEDGE_ERROR_ARGUMENT;
  if (options && (options->mask || options->bias) && num_sequences > 1) return KVEDGE_ERROR_ARGUMENT;
  if (options && options->num_tokens) return KVEDGE_ERROR_ARGUMENT;
  kvedge_segment unused;
  kvedge_cache_view view = kvedge_layer_view(pool, 0, &unused);
  *num_segments = *num_calls = 0;
  for (int i = 0; i < num_sequences; i++) {
    const kvedge_sequence *s = &sequences[i];
    if (!s->blocks || !s->query || !s->out || s->len < 1) return KVEDGE_ERROR_ARGUMENT;
    if (s->len > (int64_t)INT32_MAX * block_size) return KVEDGE_ERROR_ARGUMENT;
    view.len = s->len;
    kvedge_status status = kvedge_attention_check(&view, s->query, s->num_rows, num_heads, options);
    if (status != KVEDGE_OK) return status;
    *num_segments += (s->len + block_size - 1) / block_size;
    *num_calls += (s->num_rows + MAX_ROWS - 1) / MAX_ROWS;
  }
  return *num_calls > INT32_MAX / 2 ? KVEDGE_ERROR_ARGUMENT : KVEDGE_OK;
}

static kvedge_status attend_sequences(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                      int num_sequences, int num_heads, const kvedge_attention_options *options,
                                      int num_threads, kvedge_segment *segments, planned_call *calls) {
  int num_calls = 0;
  for (int i = 0; i < num_sequences; i++) {
    const kvedge_sequence *s = &sequences[i];
    kvedge_cache_view view = kvedge_layer_view(pool, 0, segments);
    view.len = s->len;
    view.segments = segments;
    view.num_segments = segments_of(pool, block_size, s, segments);
    if (view.num_segments < 0) return KVEDGE_ERROR_ARGUMENT;
    segments += view.num_segments;
    for (int64_t row = 0; row < s->num_rows; row += MAX_ROWS) {
      int64_t count = s->num_rows - row < MAX_ROWS ? s->num_rows - row : MAX_ROWS;
      plan_rows(&calls[num_calls++], &view, s, row, count, num_heads, options);
    }
  }
  return run_planned(calls, num_calls, num_threads);
}

kvedge_status kvedge_attend_batch(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                  int num_sequences, int num_heads, const kvedge_attention_options *options,
                                  int num_threads) {
  int64_t num_segments, num_calls;
  if (num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  kvedge_status status =
      check_batch(pool, block_size, sequences, num_sequences, num_heads, options, &num_segments, &num_calls);
  if (status != KVEDGE_OK || num_calls == 0) return status;
  kvedge_segment *segments = malloc((size_t)num_segments * sizeof *segments);
  planned_call *calls = malloc((size_t)num_calls * sizeof *calls);
  if (segments && calls)
    status =
        attend_sequences(pool, block_size, sequences, num_sequences, num_heads, options, num_threads, segments, calls);
  else status = KVEDGE_ERROR_MEMORY;
  free(segments);
  free(calls);
  return status;
}
