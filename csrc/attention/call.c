/* Calls planned, then run together on as many threads as asked; kvedge_attend. */
#include <stdlib.h>

#include "attention/attention.h"
#include "system/memory.h"
#include "system/parallel.h"
#include "system/float_mode.h"

enum {
  /* Query rows of a call, and of calls that run together, which bounds the memory of long prompts. */
  MAX_ROWS = 512,
};

typedef struct {
  kvedge_attention planned;
  kvedge_array query, out;
  float *lse;
} planned_call;

static int slices_of(const planned_call *call) { return call->planned.num_row_blocks * call->planned.chunks_per_block; }

/* As kvedge_tuning.parallel_work has it, about. */
static int64_t work_of(const planned_call *call) {
  const kvedge_attention *a = &call->planned;
  const kvedge_row_block last = kvedge_row_block_of(a, a->num_row_blocks - 1);
  const kvedge_visible seen = kvedge_visible_tokens(a, &last);
  const kvedge_view_side *keys = &a->view.side[KEYS], *values = &a->view.side[VALUES];
  int64_t tokens = (seen.sinks + seen.stop - seen.first) * a->num_row_blocks;
  return tokens * (keys->token_bytes + values->token_bytes) * (3 + a->query_rows);
}

/* ---- On several threads: the slices of all calls are tasks of one job ------------------------- */

/* The part of a job that one call has. Slots are its own: one per slice and one to spare. */
typedef struct {
  kvedge_attention *attention;
  int first_task, num_tasks;
} share;

typedef struct {
  char *workspaces; /* (threads) */
  share *shares;    /* (calls) */
  int32_t *owner;   /* (tasks) whose share a task is in */
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

static kvedge_workspace *workspace_of(const batch *b, int thread) {
  return (kvedge_workspace *)(b->workspaces + (size_t)thread * kvedge_workspace_bytes());
}

static void run_task(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const batch *b = context;
  const share *s = &b->shares[b->owner[task]];
  kvedge_slice_run(s->attention, task - s->first_task, slice_of_task(b, next), slot_of(b, s, task, slot),
                   workspace_of(b, thread), stop);
}

static void collect_task(void *context, int task, int slot) {
  const batch *b = context;
  const share *s = &b->shares[b->owner[task]];
  kvedge_slice_collect(s->attention, task - s->first_task, slot_of(b, s, task, slot), workspace_of(b, 0));
}

static kvedge_status run_on_threads(planned_call *calls, int num_calls, int num_tasks, int num_threads) {
  size_t shares = kvedge_align((size_t)num_calls * sizeof(share));
  size_t owners = kvedge_align((size_t)num_tasks * sizeof(int32_t));
  size_t workspaces = (size_t)kvedge_job_threads(num_threads, num_tasks) * kvedge_workspace_bytes();
  size_t bytes = kvedge_align(sizeof(batch)) + shares + owners + workspaces;
  for (int i = 0; i < num_calls; i++)
    bytes += kvedge_attention_lay_out(&calls[i].planned, NULL, slices_of(&calls[i]) + 1);
  kvedge_job *job = kvedge_job_take(bytes);
  if (!job) return KVEDGE_ERROR_MEMORY;
  char *memory = kvedge_job_memory(job);
  batch *b = (batch *)memory;
  memory += kvedge_align(sizeof *b);
  *b = (batch){.shares = (share *)memory,
               .owner = (int32_t *)(memory + shares),
               .workspaces = memory + shares + owners,
               .num_tasks = num_tasks};
  memory += shares + owners + workspaces;
  for (int i = 0, task = 0; i < num_calls; i++) {
    planned_call *call = &calls[i];
    int slices = slices_of(call);
    size_t used = kvedge_attention_lay_out(&call->planned, NULL, slices + 1);
    b->shares[i] = (share){
        .first_task = task,
        .num_tasks = slices,
        .attention = kvedge_attention_set_up(&call->planned, memory, slices + 1, &call->query, &call->out, call->lse)};
    memory += used;
    for (int j = 0; j < slices; j++) b->owner[task++] = i;
  }
  kvedge_job_run(job, (kvedge_work){.context = b, .num_tasks = num_tasks, .run = run_task, .collect = collect_task},
                 num_threads);
  /* A helper that was left behind reads cache rows, which wait for it, and the job's own memory; but masks and biases
   * are the caller's, too large to copy, and may be gone after this. */
  int is_masked = 0;
  for (int i = 0; i < num_calls; i++) is_masked |= calls[i].planned.options.mask || calls[i].planned.options.bias;
  if (is_masked) kvedge_quiesce();
  return KVEDGE_OK;
}

/* ---- On this thread alone -------------------------------------------------------------------- */

static kvedge_status run_here(planned_call *calls, int num_calls) {
  size_t most = 0;
  for (int i = 0; i < num_calls; i++) {
    calls[i].planned.query_stays = calls[i].planned.num_workspaces = 1;
    size_t bytes = kvedge_attention_lay_out(&calls[i].planned, NULL, 1);
    if (bytes > most) most = bytes;
  }
  void *memory = kvedge_aligned_alloc(64, most);
  if (!memory) return KVEDGE_ERROR_MEMORY;
  for (int i = 0; i < num_calls; i++) {
    planned_call *call = &calls[i];
    kvedge_attention *a = kvedge_attention_set_up(&call->planned, memory, 1, &call->query, &call->out, call->lse);
    for (int slice = 0; slice < slices_of(call); slice++) {
      kvedge_slice next = {a, slice + 1};
      if (next.slice == slices_of(call)) next = (kvedge_slice){i + 1 < num_calls ? &calls[i + 1].planned : NULL, 0};
      kvedge_slice_run(a, slice, next, 0, kvedge_workspace_at(a, 0), NULL);
      kvedge_slice_collect(a, slice, 0, kvedge_workspace_at(a, 0));
    }
  }
  kvedge_aligned_free(memory);
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

/* ---- Requests -------------------------------------------------------------------------------- */

/* Plans rows row..row+count-1 of a request; masks and biases start at that row. */
static void plan_rows(planned_call *call, const kvedge_request *r, int64_t row, int64_t count, int num_heads) {
  kvedge_attention_options own;
  if (r->options) own = *r->options;
  else kvedge_attention_defaults(&own);
  if (own.mask) own.mask += row * own.mask_strides[1];
  if (own.bias) own.bias += row * own.bias_strides[1];
  kvedge_attention_plan(&call->planned, &r->view, r->first_position + row, count, num_heads, &own);
  if (r->log_sums) call->planned.log_sums = r->log_sums + row * num_heads;
  call->query = kvedge_array_from(&r->query, row, 0);
  call->out = kvedge_array_from(&r->out, row, 0);
  call->lse = r->lse ? r->lse + row * num_heads : NULL;
}

static kvedge_status run_request(const kvedge_request *r, int num_heads, int num_threads) {
  kvedge_status status = KVEDGE_OK;
  for (int64_t row = 0; row < r->num_rows && status == KVEDGE_OK; row += MAX_ROWS) {
    planned_call call;
    plan_rows(&call, r, row, r->num_rows - row < MAX_ROWS ? r->num_rows - row : MAX_ROWS, num_heads);
    status = run_planned(&call, 1, num_threads);
  }
  return status;
}

kvedge_status kvedge_run_requests(const kvedge_request *requests, int num_requests, int num_heads, int num_threads) {
  if (num_requests == 1) return run_request(requests, num_heads, num_threads);
  const int room = num_requests < MAX_ROWS ? num_requests : MAX_ROWS;
  planned_call *calls = malloc((size_t)room * sizeof *calls);
  if (!calls) return KVEDGE_ERROR_MEMORY;
  kvedge_status status = KVEDGE_OK;
  int num_calls = 0;
  int64_t num_rows = 0; /* of calls, of which each has one at least */
  for (int i = 0; i < num_requests; i++)
    for (int64_t row = 0, count; row < requests[i].num_rows && status == KVEDGE_OK; row += count) {
      count = requests[i].num_rows - row < MAX_ROWS ? requests[i].num_rows - row : MAX_ROWS;
      if (num_calls == room || num_rows + count > MAX_ROWS) {
        status = run_planned(calls, num_calls, num_threads);
        num_calls = 0, num_rows = 0;
      }
      plan_rows(&calls[num_calls++], &requests[i], row, count, num_heads);
      num_rows += count;
    }
  if (status == KVEDGE_OK && num_calls > 0) status = run_planned(calls, num_calls, num_threads);
  free(calls);
  return status;
}

kvedge_status kvedge_attend(const kvedge_layer *layer, const float *query, int64_t num_rows, int num_heads,
                            const kvedge_attention_options *options, int num_threads, float *out, float *lse) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !query || !out || num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  kvedge_segment segment;
  kvedge_request request = {.view = kvedge_layer_view(layer, options, &segment),
                            .num_rows = num_rows,
                            .query = kvedge_dense_array(query, num_heads, layer->keys.shape.dim),
                            .out = kvedge_dense_array(out, num_heads, layer->values.shape.dim),
                            .lse = lse,
                            .options = options};
  kvedge_status status = kvedge_attention_check(&request.view, &request.query, num_rows, num_heads, options);
  if (status != KVEDGE_OK) return status;
  if (options) kvedge_cut_view(&request.view, &segment, options->start);
  request.first_position = request.view.len - num_rows;
  return run_request(&request, num_heads, num_threads);
}
