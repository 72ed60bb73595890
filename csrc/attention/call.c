/* Calls planned, then run together on as many threads as asked; kvedge_attend. */
#include <stdlib.h>

#include "attention/parts.h"
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

/* ---- Layers ---------------------------------------------------------------------------------- */

/* A call checked, as a request; `segment` goes with it. The layer's length is read here, once. */
static kvedge_status request_of_call(const kvedge_attention_call *call, int num_heads, kvedge_request *request,
                                     kvedge_segment *segment) {
  const kvedge_attention_options *options = call->options;
  if (!call->layer) return KVEDGE_ERROR_ARGUMENT;
  *request = (kvedge_request){.view = kvedge_layer_view(call->layer, options, segment),
                              .num_rows = call->num_rows,
                              .query = call->query,
                              .out = call->out,
                              .lse = call->lse,
                              .options = options};
  if (!kvedge_array_is_valid(&call->query) || !kvedge_array_is_valid(&call->out)) return KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_array_is_apart(&call->out, call->num_rows, num_heads, request->view.side[VALUES].shape.dim))
    return KVEDGE_ERROR_ARGUMENT;
  const kvedge_status status = kvedge_attention_check(&request->view, &call->query, call->num_rows, num_heads, options);
  if (status == KVEDGE_OK && options) kvedge_cut_view(&request->view, segment, options->start);
  request->first_position = request->view.len - call->num_rows;
  return status;
}

/* The requests of a call, one or those of its parts; returns their number. */
static int requests_of_call(const kvedge_attention_call *call, int num_heads, kvedge_segment **segments,
                            kvedge_attention_options *options, kvedge_request *requests, kvedge_status *status) {
  if (call->num_parts) return kvedge_requests_of_parts(call, num_heads, segments, options, requests, status);
  *status = request_of_call(call, num_heads, requests, (*segments)++);
  return 1;
}

/* Runs checked requests, and merges those of calls that have several. */
static kvedge_status run_calls(const kvedge_attention_call *calls, int num_calls, const int *counts,
                               kvedge_request *requests, int num_requests, int num_heads, int num_threads) {
  size_t bytes = 0;
  for (int i = 0, first = 0; i < num_calls; first += counts[i++])
    bytes += kvedge_parts_bytes(&requests[first], counts[i], num_heads);
  if (bytes == 0) return kvedge_run_requests(requests, num_requests, num_heads, num_threads);
  char *memory = kvedge_aligned_alloc(64, bytes), *room = memory;
  if (!memory) return KVEDGE_ERROR_MEMORY;
  for (int i = 0, first = 0; i < num_calls; first += counts[i++])
    room = kvedge_parts_take_room(&requests[first], counts[i], num_heads, room);
  const kvedge_status status = kvedge_run_requests(requests, num_requests, num_heads, num_threads);
  for (int i = 0, first = 0; i < num_calls && status == KVEDGE_OK; first += counts[i++])
    kvedge_merge_parts(&calls[i], &requests[first], counts[i], num_heads);
  kvedge_aligned_free(memory);
  return status;
}

/* The most requests of calls, and segments of all of them; 0: a call is not valid. */
static int count_parts(const kvedge_attention_call *calls, int num_calls, int *requests, int64_t *segments) {
  *requests = 0, *segments = 0;
  for (int i = 0; i < num_calls; i++) {
    const int parts = calls[i].num_parts ? calls[i].num_parts : 1;
    if (parts < 0 || parts > KVEDGE_MOST_PARTS || __builtin_add_overflow(*requests, parts, requests)) return 0;
    if (calls[i].num_parts && !calls[i].parts) return 0;
    *segments += !calls[i].num_parts;
    for (int p = 0; p < calls[i].num_parts; p++) {
      const int64_t of_part = kvedge_segments_of_part(&calls[i].parts[p]);
      if (of_part == 0 || __builtin_add_overflow(*segments, of_part, segments)) return 0;
    }
  }
  return *segments <= (int64_t)(SIZE_MAX / sizeof(kvedge_segment) / 2);
}

kvedge_status kvedge_attend_layers(const kvedge_attention_call *calls, int num_calls, int num_heads, int num_threads) {
  KVEDGE_FLOAT_MODE;
  enum { FEW = 8 }; /* that need no memory of the heap */
  kvedge_request few[FEW], *requests = few;
  kvedge_attention_options few_options[FEW], *options = few_options;
  kvedge_segment few_segments[FEW], *segments = few_segments;
  int few_counts[FEW], *counts = few_counts, most, n = 0;
  int64_t most_segments;
  kvedge_status status = KVEDGE_OK;
  if (!calls || num_calls < 1 || num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  if (!count_parts(calls, num_calls, &most, &most_segments)) return KVEDGE_ERROR_ARGUMENT;
  if (most > FEW || most_segments > FEW) {
    requests = malloc((size_t)most * sizeof *requests);
    options = malloc((size_t)most * sizeof *options);
    segments = malloc((size_t)most_segments * sizeof *segments);
    counts = malloc((size_t)num_calls * sizeof *counts);
    if (!requests || !options || !segments || !counts) status = KVEDGE_ERROR_MEMORY;
  }
  kvedge_segment *left = segments;
  for (int i = 0; i < num_calls && status == KVEDGE_OK; i++)
    n += counts[i] = requests_of_call(&calls[i], num_heads, &left, &options[n], &requests[n], &status);
  if (status == KVEDGE_OK) status = run_calls(calls, num_calls, counts, requests, n, num_heads, num_threads);
  if (requests != few) free(requests), free(options), free(segments), free(counts);
  return status;
}

/* ---- Sequences in the blocks of a pool --------------------------------------------------------- */

/* Checks all sequences, and counts the segments they need. */
static kvedge_status check_batch(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                 int num_sequences, int num_heads, const kvedge_attention_options *options,
                                 int64_t *num_segments) {
  if (!pool || !kvedge_is_block_size(pool, block_size) || !sequences || num_sequences < 1) return KVEDGE_ERROR_ARGUMENT;
  if (options && (options->mask || options->bias) && num_sequences > 1) return KVEDGE_ERROR_ARGUMENT;
  if (options && options->num_tokens) return KVEDGE_ERROR_ARGUMENT;
  kvedge_segment unused;
  kvedge_cache_view view = kvedge_layer_view(pool, NULL, &unused);
  *num_segments = 0;
  for (int i = 0; i < num_sequences; i++) {
    const kvedge_sequence *s = &sequences[i];
    if (!s->blocks || !s->query || !s->out || s->len < 1) return KVEDGE_ERROR_ARGUMENT;
    if (s->len > (int64_t)INT32_MAX * block_size) return KVEDGE_ERROR_ARGUMENT;
    view.len = s->len;
    const kvedge_array query = kvedge_dense_array(s->query, num_heads, pool->keys.shape.dim);
    kvedge_status status = kvedge_attention_check(&view, &query, s->num_rows, num_heads, options);
    if (status != KVEDGE_OK) return status;
    if (s->start < 0 || s->start > s->len) return KVEDGE_ERROR_ARGUMENT;
    if (s->start && options && (options->mask || options->bias || options->start)) return KVEDGE_ERROR_ARGUMENT;
    *num_segments += kvedge_blocks_of_rows(block_size, s->len);
  }
  return KVEDGE_OK;
}

/* Checked sequences as requests; `segments` has room for those of all. */
static kvedge_status requests_of_batch(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                       int num_sequences, int num_heads, const kvedge_attention_options *options,
                                       kvedge_segment *segments, kvedge_request *requests) {
  for (int i = 0; i < num_sequences; i++) {
    const kvedge_sequence *s = &sequences[i];
    kvedge_cache_view view;
    kvedge_segment *first = segments;
    if (!kvedge_view_blocks(pool, block_size, s->blocks, 0, s->len, segments, &view)) return KVEDGE_ERROR_ARGUMENT;
    segments += view.num_segments;
    kvedge_cut_view(&view, first, s->start ? s->start : options ? options->start : 0);
    requests[i] = (kvedge_request){.view = view,
                                   .num_rows = s->num_rows,
                                   .first_position = view.len - s->num_rows,
                                   .query = kvedge_dense_array(s->query, num_heads, pool->keys.shape.dim),
                                   .out = kvedge_dense_array(s->out, num_heads, pool->values.shape.dim),
                                   .lse = s->lse,
                                   .options = options};
  }
  return KVEDGE_OK;
}

kvedge_status kvedge_attend_batch(const kvedge_layer *pool, int64_t block_size, const kvedge_sequence *sequences,
                                  int num_sequences, int num_heads, const kvedge_attention_options *options,
                                  int num_threads) {
  KVEDGE_FLOAT_MODE;
  int64_t num_segments;
  if (num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  kvedge_status status = check_batch(pool, block_size, sequences, num_sequences, num_heads, options, &num_segments);
  if (status != KVEDGE_OK) return status;
  kvedge_segment *segments = malloc((size_t)num_segments * sizeof *segments);
  kvedge_request *requests = malloc((size_t)num_sequences * sizeof *requests);
  status = KVEDGE_ERROR_MEMORY;
  if (segments && requests)
    status = requests_of_batch(pool, block_size, sequences, num_sequences, num_heads, options, segments, requests);
  if (status == KVEDGE_OK) status = kvedge_run_requests(requests, num_sequences, num_heads, num_threads);
  free(segments);
  free(requests);
  return status;
}
