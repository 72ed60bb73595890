/* Checked requests on threads of our own: planned, and the slices of all plans run together. */
#include <stdlib.h>

#include "attention/internal.h"
#include "system/memory.h"
#include "system/parallel.h"

enum {
  /* Query rows of a plan, and of plans that run together, which bounds the memory of long prompts. */
  MAX_ROWS = 512,
};

/* ---- On this thread alone -------------------------------------------------------------------- */

static kvedge_status run_here(kvedge_attention *planned, int num_planned) {
  size_t most = 0;
  for (int i = 0; i < num_planned; i++) {
    planned[i].query_stays = planned[i].has_workspace = 1;
    size_t bytes = kvedge_attention_lay_out(&planned[i], NULL, 1);
    if (bytes > most) most = bytes;
  }
  void *memory = kvedge_aligned_alloc(64, most);
  if (!memory) return KVEDGE_ERROR_MEMORY;
  for (int i = 0; i < num_planned; i++) {
    kvedge_attention *a = kvedge_attention_set_up(&planned[i], memory, 1);
    for (int slice = 0; slice < kvedge_num_slices(a); slice++) {
      kvedge_slice next = {a, slice + 1};
      if (next.slice == kvedge_num_slices(a)) next = (kvedge_slice){i + 1 < num_planned ? &planned[i + 1] : NULL, 0};
      kvedge_slice_run(a, slice, next, 0, a->workspace, NULL);
      kvedge_slice_collect(a, slice, 0, 0, a->workspace);
    }
  }
  kvedge_aligned_free(memory);
  return KVEDGE_OK;
}

/* ---- On several threads: the slices of all plans are tasks of one job ------------------------- */

/* A plan and its tasks. Its slots are its own: one per slice and one to spare. */
typedef struct {
  kvedge_attention *attention;
  int first_task, num_tasks;
} planned_tasks;

typedef struct {
  char *workspaces; /* (threads, workspace_bytes) */
  size_t workspace_bytes;
  planned_tasks *plans; /* (plans) */
  int32_t *plan_of;     /* (tasks) */
  int num_tasks;
} tasks;

static int slot_of(const tasks *all, const planned_tasks *of, int task, int slot) {
  return slot == all->num_tasks ? of->num_tasks : task - of->first_task;
}

static kvedge_workspace *workspace_of(const tasks *all, int thread) {
  return (kvedge_workspace *)(all->workspaces + (size_t)thread * all->workspace_bytes);
}

static void run_task(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const tasks *all = context;
  const planned_tasks *of = &all->plans[all->plan_of[task]];
  kvedge_slice following = {.attention = NULL};
  if (next >= 0) {
    const planned_tasks *of_next = &all->plans[all->plan_of[next]];
    following = (kvedge_slice){of_next->attention, next - of_next->first_task};
  }
  kvedge_slice_run(of->attention, task - of->first_task, following, slot_of(all, of, task, slot),
                   workspace_of(all, thread), stop);
}

static void collect_task(void *context, int task, int slot) {
  const tasks *all = context;
  const planned_tasks *of = &all->plans[all->plan_of[task]];
  kvedge_slice_collect(of->attention, task - of->first_task, slot_of(all, of, task, slot), 0, workspace_of(all, 0));
}

/* Runs plans together; here alone where there is little work. */
static kvedge_status run_together(kvedge_attention *planned, int num_planned, int num_threads) {
  double us = 0.0;
  int num_tasks = 0, is_masked = 0;
  for (int i = 0; i < num_planned; i++) us += kvedge_attention_us(&planned[i]);
  num_threads = kvedge_threads_for(us, num_threads);
  kvedge_cut_heads(planned, num_planned, us, num_threads);
  for (int i = 0; i < num_planned; i++) {
    num_tasks += kvedge_num_slices(&planned[i]);
    is_masked |= kvedge_has_mask(&planned[i].options);
  }
  if (num_threads == 1 || num_tasks == 1) return run_here(planned, num_planned);
  size_t plans = kvedge_align((size_t)num_planned * sizeof(planned_tasks));
  size_t plan_of = kvedge_align((size_t)num_tasks * sizeof(int32_t));
  size_t workspace_bytes = 0;
  for (int i = 0; i < num_planned; i++)
    if (planned[i].gather_bytes > workspace_bytes) workspace_bytes = planned[i].gather_bytes;
  workspace_bytes += kvedge_workspace_bytes();
  size_t workspaces = (size_t)kvedge_job_threads(num_threads, num_tasks) * workspace_bytes;
  size_t bytes = kvedge_align(sizeof(tasks)) + plans + plan_of + workspaces;
  for (int i = 0; i < num_planned; i++)
    bytes += kvedge_attention_lay_out(&planned[i], NULL, kvedge_num_slices(&planned[i]) + 1);
  kvedge_job *job = kvedge_job_take(bytes);
  if (!job) return KVEDGE_ERROR_MEMORY;
  char *memory = kvedge_job_memory(job);
  tasks *all = (tasks *)memory;
  memory += kvedge_align(sizeof *all);
  *all = (tasks){.plans = (planned_tasks *)memory,
                 .plan_of = (int32_t *)(memory + plans),
                 .workspaces = memory + plans + plan_of,
                 .workspace_bytes = workspace_bytes,
                 .num_tasks = num_tasks};
  memory += plans + plan_of + workspaces;
  for (int i = 0, task = 0; i < num_planned; i++) {
    const int slices = kvedge_num_slices(&planned[i]);
    all->plans[i] = (planned_tasks){kvedge_attention_set_up(&planned[i], memory, slices + 1), task, slices};
    memory += kvedge_attention_lay_out(&planned[i], NULL, slices + 1);
    for (int j = 0; j < slices; j++) all->plan_of[task++] = i;
  }
  kvedge_job_run(job, (kvedge_work){.context = all, .num_tasks = num_tasks, .run = run_task, .collect = collect_task},
                 num_threads);
  /* A helper that was left behind reads cache rows, which wait for it, and the job's own memory; but masks and biases
   * are the caller's, too large to copy, and may be gone after this. */
  if (is_masked) kvedge_quiesce();
  return KVEDGE_OK;
}

kvedge_status kvedge_run_requests(const kvedge_request *requests, int num_requests, int num_threads) {
  kvedge_attention own, *planned = &own;
  const int room = num_requests < MAX_ROWS ? num_requests : MAX_ROWS;
  if (room > 1 && !(planned = malloc((size_t)room * sizeof *planned))) return KVEDGE_ERROR_MEMORY;
  kvedge_status status = KVEDGE_OK;
  int num_planned = 0;
  int64_t num_rows = 0; /* of plans, of which each has one at least */
  for (int i = 0; i < num_requests; i++)
    for (int64_t row = 0, count; row < requests[i].num_rows && status == KVEDGE_OK; row += count) {
      count = requests[i].num_rows - row < MAX_ROWS ? requests[i].num_rows - row : MAX_ROWS;
      if (num_planned == room || num_rows + count > MAX_ROWS) {
        status = run_together(planned, num_planned, num_threads);
        num_planned = 0, num_rows = 0;
      }
      kvedge_attention_plan(&planned[num_planned++], &requests[i], row, count);
      num_rows += count;
    }
  if (status == KVEDGE_OK && num_planned > 0) status = run_together(planned, num_planned, num_threads);
  if (planned != &own) free(planned);
  return status;
}
