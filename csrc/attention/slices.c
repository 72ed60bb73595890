/* The slices of calls, for a runtime with threads of its own: each call becomes a request, or one for each KV head of
 * rows that do not lie side by side; the slices of all requests are numbered together. */
#include <stdatomic.h>

#include "attention/parts.h"
#include "store/ranges.h"
#include "system/float_mode.h"

/* A request's plan, set up; and its slices among all. */
typedef struct {
  kvedge_attention *attention;
  int first_slice, num_slices;
  atomic_int num_left; /* slices that have not run */
} slice_plan;

struct kvedge_slices {
  char *workspaces;  /* (num_threads) */
  slice_plan *plans; /* (num_plans) */
  int num_plans, num_slices;
};

/* ---- Requests ---------------------------------------------------------------------------------- */

/* Requests that a call becomes; 0: its shapes are not valid. */
static int num_requests(const kvedge_attention_call *call) {
  if (call->num_rows < 1 || call->num_rows > KVEDGE_MOST_TOKENS || call->num_heads < 1 || call->num_parts) return 0;
  if (call->rows) return call->layer || call->lse ? 0 : kvedge_requests_of_rows(call->rows, call->num_heads);
  return call->layer && !kvedge_has_ranges(call->layer);
}

static int num_segments(const kvedge_attention_call *call) { return call->rows ? call->rows->num_segments : 1; }

/* The request of a call with all its heads, checked; sizes_only: of what it points to only the cache is looked at. */
static kvedge_status request_of(const kvedge_attention_call *call, int sizes_only, kvedge_segment *segments,
                                kvedge_request *r) {
  *r = (kvedge_request){
      .num_heads = call->num_heads, .num_rows = call->num_rows, .lse = call->lse, .options = call->options};
  if (!sizes_only) {
    if (!kvedge_array_is_valid(&call->query) || !kvedge_array_is_valid(&call->out)) return KVEDGE_ERROR_ARGUMENT;
    r->query = call->query, r->out = call->out;
  }
  const kvedge_status status =
      call->rows ? kvedge_request_rows(r, call->rows, segments) : kvedge_request_layer(r, call->layer, segments);
  if (status != KVEDGE_OK || sizes_only) return status;
  const int is_apart =
      kvedge_array_is_apart(&call->out, call->num_rows, call->num_heads, r->view.side[VALUES].shape.dim);
  return is_apart ? KVEDGE_OK : KVEDGE_ERROR_ARGUMENT;
}

/* The part of a request from KV head `kv_head` on, `num` of them. */
static kvedge_request heads_of(const kvedge_request *whole, int kv_head, int num, kvedge_attention_options *options) {
  kvedge_request r = *whole;
  if (num == whole->view.num_kv_heads) return r;
  const int of_kv_head = whole->num_heads / whole->view.num_kv_heads, head = kv_head * of_kv_head;
  if (whole->options) *options = *whole->options;
  else kvedge_attention_defaults(options);
  r.options = options;
  r.num_heads = num * of_kv_head;
  if (kv_head > 0) {
    r.query = kvedge_array_from(&whole->query, 0, head), r.out = kvedge_array_from(&whole->out, 0, head);
    kvedge_move_heads(options, head);
    kvedge_move_kv_heads(&r.view, kv_head);
  }
  r.view.num_kv_heads = num;
  for (int s = 0; s < SIDES; s++) {
    kvedge_view_side *side = &r.view.side[s];
    side->token_bytes = side->head_stride = (ptrdiff_t)kvedge_row_bytes(side->format, side->shape.dim);
  }
  return r;
}

/* Plans a request; returns its bytes. Where a row block is one slice, the thread that runs it collects it: a slot for each row
 * block that is worked on at the same time is enough. Bytes do not shrink as tokens are added. */
static size_t plan_request(const kvedge_request *r, int num_threads, kvedge_attention *a, int *num_slots) {
  kvedge_attention_plan(a, r, 0, r->num_rows);
  a->query_stays = 1;
  a->num_refits = num_threads < a->num_row_blocks ? num_threads : a->num_row_blocks;
  *num_slots = a->chunks_per_block == 1 ? a->num_refits : a->num_row_blocks * a->chunks_per_block;
  return kvedge_attention_lay_out(a, NULL, *num_slots);
}

/* ---- Memory: the object, workspaces, plans, segments of the call at hand, requests --------------- */

/* Bytes of all but the requests; 0: a call's shapes are not valid. */
static size_t lay_out(const kvedge_attention_call *calls, int num_calls, int num_threads, char *base, kvedge_slices *of,
                      kvedge_segment **segments) {
  enum { MOST_THREADS = 1024 };
  size_t used = 0, num_plans = 0, most_segments = 0;
  if (!calls || num_calls < 1 || num_threads < 1 || num_threads > MOST_THREADS) return 0;
  for (int i = 0; i < num_calls; i++) {
    const int requests = num_requests(&calls[i]);
    if (requests == 0) return 0;
    num_plans += (size_t)requests;
    if ((size_t)num_segments(&calls[i]) > most_segments) most_segments = (size_t)num_segments(&calls[i]);
  }
  if (num_plans > INT32_MAX) return 0;
  kvedge_take(base, &used, sizeof *of);
  of->workspaces = kvedge_take(base, &used, (size_t)num_threads * kvedge_workspace_bytes());
  of->plans = kvedge_take(base, &used, num_plans * sizeof *of->plans);
  of->num_plans = (int)num_plans, of->num_slices = 0;
  *segments = kvedge_take(base, &used, most_segments * sizeof **segments);
  return used;
}

size_t kvedge_slices_bytes(const kvedge_attention_call *calls, int num_calls, int num_threads) {
  kvedge_slices of;
  kvedge_segment *unused, one;
  size_t bytes = lay_out(calls, num_calls, num_threads, NULL, &of, &unused);
  for (int i = 0; bytes && i < num_calls; i++) {
    kvedge_request whole;
    kvedge_attention_options options;
    kvedge_attention planned;
    int num_slots;
    if (request_of(&calls[i], 1, calls[i].rows ? NULL : &one, &whole) != KVEDGE_OK) return 0;
    const int requests = num_requests(&calls[i]);
    const kvedge_request r = heads_of(&whole, 0, whole.view.num_kv_heads / requests, &options);
    bytes += (size_t)requests * plan_request(&r, num_threads, &planned, &num_slots);
  }
  return bytes;
}

kvedge_status kvedge_slices_init(void *memory, size_t bytes, const kvedge_attention_call *calls, int num_calls,
                                 int num_threads, kvedge_slices **slices) {
  KVEDGE_FLOAT_MODE;
  kvedge_slices of;
  kvedge_segment *segments;
  if (!memory || (uintptr_t)memory % 64 || !slices) return KVEDGE_ERROR_ARGUMENT;
  size_t used = lay_out(calls, num_calls, num_threads, memory, &of, &segments);
  if (used == 0) return KVEDGE_ERROR_ARGUMENT;
  if (used > bytes)
    return kvedge_slices_bytes(calls, num_calls, num_threads) ? KVEDGE_ERROR_MEMORY : KVEDGE_ERROR_ARGUMENT;
  slice_plan *plan = of.plans;
  for (int i = 0; i < num_calls; i++) {
    kvedge_request whole;
    const kvedge_status status = request_of(&calls[i], 0, segments, &whole);
    if (status != KVEDGE_OK) return status;
    const int num_kv_heads = whole.view.num_kv_heads, heads = num_kv_heads / num_requests(&calls[i]);
    for (int kv_head = 0; kv_head < num_kv_heads; kv_head += heads, plan++) {
      kvedge_attention planned;
      kvedge_attention_options options;
      int num_slots;
      const kvedge_request r = heads_of(&whole, kv_head, heads, &options);
      const size_t needed = plan_request(&r, num_threads, &planned, &num_slots);
      if (needed > bytes - used) return KVEDGE_ERROR_MEMORY;
      plan->attention = kvedge_attention_set_up(&planned, (char *)memory + used, num_slots);
      plan->first_slice = of.num_slices;
      plan->num_slices = planned.num_row_blocks * planned.chunks_per_block;
      atomic_init(&plan->num_left, plan->num_slices);
      of.num_slices += plan->num_slices;
      used += needed;
    }
  }
  *slices = memory;
  **slices = of;
  return KVEDGE_OK;
}

int kvedge_slices_count(const kvedge_slices *slices) { return slices->num_slices; }

/* ---- Slices are run ------------------------------------------------------------------------------ */

static slice_plan *plan_of_slice(const kvedge_slices *of, int slice) {
  int first = 0, stop = of->num_plans;
  while (stop - first > 1) {
    const int middle = first + (stop - first) / 2;
    if (of->plans[middle].first_slice <= slice) first = middle;
    else stop = middle;
  }
  return &of->plans[first];
}

void kvedge_slices_run(kvedge_slices *of, int slice, int next, int thread) {
  KVEDGE_FLOAT_MODE;
  slice_plan *plan = plan_of_slice(of, slice);
  kvedge_attention *a = plan->attention;
  kvedge_workspace *w = (kvedge_workspace *)(of->workspaces + (size_t)thread * kvedge_workspace_bytes());
  kvedge_slice following = {.attention = NULL};
  if (next >= 0) {
    const slice_plan *of_next = plan_of_slice(of, next);
    following = (kvedge_slice){of_next->attention, next - of_next->first_slice};
  }
  const int index = slice - plan->first_slice, slot = a->num_slots == plan->num_slices ? index : thread;
  kvedge_slice_run(a, index, following, slot, w, NULL);
  if (a->chunks_per_block == 1) {
    kvedge_slice_collect(a, index, slot, slot, w);
    return;
  }
  if (atomic_fetch_sub_explicit(&plan->num_left, 1, memory_order_acq_rel) > 1) return;
  for (int i = 0; i < plan->num_slices; i++) kvedge_slice_collect(a, i, i, 0, w);
}
