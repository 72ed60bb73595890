/* The slices of calls, for a runtime with threads of its own: each call becomes a request, or one for each KV head of
 * rows that do not lie side by side; the slices of all requests are numbered together. */
#include <stdatomic.h>

#include "attention/parts.h"
#include "store/ranges.h"
#include "system/float_mode.h"

/* Calls that join, of some KV heads: their requests, whose results are merged once all of them are there. */
typedef struct {
  kvedge_attention_call merged; /* what the result is written to */
  kvedge_request *requests;     /* (num_requests) */
  int num_requests;
  atomic_int num_left; /* requests whose slices have not all run */
} joined_calls;

/* A request's plan, set up; and its slices among all. */
typedef struct {
  kvedge_attention *attention;
  joined_calls *joined; /* or NULL */
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
  if (call->options && call->options->tokens) return 0;
  if (call->rows) return call->layer || call->lse ? 0 : kvedge_requests_of_rows(call->rows, call->num_heads);
  return call->layer && !kvedge_has_ranges(call->layer);
}

static int num_segments(const kvedge_attention_call *call) { return call->rows ? call->rows->num_segments : 1; }

/* A call and those that join it. */
typedef struct {
  int num_calls;
  int num_requests;   /* of each of them */
  int64_t num_tokens; /* of all of them; 0: of a layer, which tells its own */
} call_group;

static int are_alike(const kvedge_attention_call *a, const kvedge_attention_call *b) {
  return a->rows && b->rows && a->num_rows == b->num_rows && a->num_heads == b->num_heads &&
         a->rows->num_kv_heads == b->rows->num_kv_heads && a->rows->keys.dim == b->rows->keys.dim &&
         a->rows->values.dim == b->rows->values.dim;
}

/* The group that begins with a call; no calls: one is not valid. */
static call_group group_of_calls(const kvedge_attention_call *calls, int num_calls) {
  const call_group none = {.num_calls = 0};
  call_group of = none;
  for (int n = 0; n < num_calls && (n == 0 || calls[n].joins); n++) {
    const int requests = num_requests(&calls[n]);
    if (requests == 0 || (n == 0 ? calls[n].joins : !are_alike(&calls[0], &calls[n]))) return none;
    if (++of.num_calls > KVEDGE_MOST_JOINED) return none;
    if (requests > of.num_requests) of.num_requests = requests;
    for (int i = 0; calls[n].rows && i < calls[n].rows->num_segments; i++)
      of.num_tokens += calls[n].rows->segments[i].num_tokens;
  }
  return of;
}

/* The request of a call with all its heads, checked; sizes_only: of what it points to only the cache is looked at. `first` is
 * the call that it joins, or itself. */
static kvedge_status request_of(const kvedge_attention_call *call, const kvedge_attention_call *first,
                                const call_group *group, int sizes_only, kvedge_segment *segments, kvedge_request *r) {
  *r = (kvedge_request){
      .num_heads = call->num_heads, .num_rows = call->num_rows, .lse = call->lse, .options = call->options};
  if (!sizes_only) {
    if (!kvedge_array_is_valid(&first->query) || !kvedge_array_is_valid(&first->out)) return KVEDGE_ERROR_ARGUMENT;
    r->query = first->query, r->out = first->out;
  }
  const kvedge_status status = call->rows ? kvedge_request_rows(r, call->rows, group->num_tokens, segments)
                                          : kvedge_request_layer(r, call->layer, segments);
  if (status != KVEDGE_OK || sizes_only) return status;
  const int is_apart =
      kvedge_array_is_apart(&first->out, call->num_rows, call->num_heads, r->view.side[VALUES].shape.dim);
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

/* Plans a request, one of `num_plans` that share the threads; returns its bytes. Where tokens are not split, the thread
 * that runs a slice collects it: a slot for each slice that runs at the same time is enough. Bytes do not shrink as tokens
 * are added: they are those of the most slices, with queries in their slots if they may be cut by KV heads. */
static size_t plan_request(const kvedge_request *r, int num_threads, int num_plans, kvedge_attention *a,
                           int *num_slots) {
  const int share = (num_threads + num_plans - 1) / num_plans;
  kvedge_attention_plan(a, r, 0, r->num_rows);
  a->query_stays = 1;
  const int most = kvedge_most_slices(a, share);
  a->num_refits = num_threads < most ? num_threads : most;
  *num_slots = a->most_chunks == 1 ? a->num_refits : most;
  if (most > a->num_row_blocks * a->most_chunks) a->heads_per_slice = 1;
  const size_t bytes = kvedge_attention_lay_out(a, NULL, *num_slots);
  a->heads_per_slice = a->view.num_kv_heads;
  kvedge_cut_heads(a, 1, kvedge_attention_us(a), share);
  return bytes;
}

/* ---- Memory: the object, workspaces, plans, joined calls, segments of the group at hand, requests - */

/* What requests have in common. */
typedef struct {
  joined_calls *joined;
  kvedge_segment *segments;
  size_t bytes;
} common_room;

/* No bytes: a call's shapes are not valid. */
static common_room lay_out(const kvedge_attention_call *calls, int num_calls, int num_threads, char *base,
                           kvedge_slices *of) {
  enum { MOST_THREADS = 1024 };
  common_room room = {.bytes = 0};
  size_t num_plans = 0, num_joined = 0, most_segments = 0;
  if (!calls || num_calls < 1 || num_threads < 1 || num_threads > MOST_THREADS) return room;
  for (int i = 0; i < num_calls;) {
    const call_group group = group_of_calls(calls + i, num_calls - i);
    if (group.num_calls == 0) return room;
    num_plans += (size_t)group.num_requests * (size_t)group.num_calls;
    num_joined += group.num_calls > 1 ? (size_t)group.num_requests : 0;
    size_t segments = 0;
    for (const int stop = i + group.num_calls; i < stop; i++) segments += (size_t)num_segments(&calls[i]);
    if (segments > most_segments) most_segments = segments;
  }
  if (num_plans > INT32_MAX) return room;
  kvedge_take(base, &room.bytes, sizeof *of);
  of->workspaces = kvedge_take(base, &room.bytes, (size_t)num_threads * kvedge_workspace_bytes());
  of->plans = kvedge_take(base, &room.bytes, num_plans * sizeof *of->plans);
  of->num_plans = (int)num_plans, of->num_slices = 0;
  room.joined = kvedge_take(base, &room.bytes, num_joined * sizeof *room.joined);
  room.segments = kvedge_take(base, &room.bytes, most_segments * sizeof *room.segments);
  return room;
}

/* Bytes of a group's requests and of their results, of some KV heads; 0 where nothing joins. */
static size_t joined_bytes(const kvedge_request *request, int num_calls) {
  if (num_calls == 1) return 0;
  return kvedge_align((size_t)num_calls * sizeof *request) + (size_t)num_calls * kvedge_result_bytes(request);
}

size_t kvedge_slices_bytes(const kvedge_attention_call *calls, int num_calls, int num_threads) {
  kvedge_slices of;
  kvedge_segment segment;
  if (kvedge_isa_ready() != KVEDGE_OK) return 0; /* rows in memory of others may be the first that a process has */
  size_t bytes = lay_out(calls, num_calls, num_threads, NULL, &of).bytes;
  for (int i = 0; bytes && i < num_calls;) {
    const call_group group = group_of_calls(calls + i, num_calls - i);
    const kvedge_attention_call *first = &calls[i];
    kvedge_request r = {.num_rows = 0};
    for (const int stop = i + group.num_calls; i < stop; i++) {
      kvedge_request whole;
      kvedge_attention_options options;
      kvedge_attention planned;
      int num_slots;
      if (request_of(&calls[i], first, &group, 1, calls[i].rows ? NULL : &segment, &whole) != KVEDGE_OK) return 0;
      r = heads_of(&whole, 0, whole.view.num_kv_heads / group.num_requests, &options);
      bytes += (size_t)group.num_requests * plan_request(&r, num_threads, of.num_plans, &planned, &num_slots);
    }
    bytes += (size_t)group.num_requests * joined_bytes(&r, group.num_calls);
  }
  return bytes;
}

/* What init fills. */
typedef struct {
  char *memory;
  size_t used, bytes;
  int num_threads;
  slice_plan *plan;     /* the next one */
  joined_calls *joined; /* the same */
} filling;

/* Sets up a request; 0: there is too little memory. */
static int set_up(filling *f, kvedge_slices *of, const kvedge_request *r, joined_calls *joined) {
  kvedge_attention planned;
  int num_slots;
  const size_t needed = plan_request(r, f->num_threads, of->num_plans, &planned, &num_slots);
  if (needed > f->bytes - f->used) return 0;
  slice_plan *plan = f->plan++;
  plan->attention = kvedge_attention_set_up(&planned, f->memory + f->used, num_slots);
  plan->joined = joined;
  plan->first_slice = of->num_slices;
  plan->num_slices = kvedge_num_slices(&planned);
  atomic_init(&plan->num_left, plan->num_slices);
  of->num_slices += plan->num_slices;
  f->used += needed;
  return 1;
}

/* The same for the requests of calls that join, of some KV heads: they write where results wait to be merged. */
static int set_up_joined(filling *f, kvedge_slices *of, const kvedge_request *requests, int num) {
  const size_t needed = joined_bytes(requests, num);
  if (needed > f->bytes - f->used) return 0;
  joined_calls *joined = f->joined++;
  *joined = (joined_calls){
      .merged = {.out = requests->out, .num_rows = requests->num_rows},
      .requests = (kvedge_request *)(f->memory + f->used),
      .num_requests = num
  };
  atomic_init(&joined->num_left, num);
  memcpy(joined->requests, requests, (size_t)num * sizeof *requests);
  kvedge_parts_take_room(joined->requests, num, f->memory + f->used + kvedge_align((size_t)num * sizeof *requests));
  f->used += needed;
  for (int i = 0; i < num; i++)
    if (!set_up(f, of, &joined->requests[i], joined)) return 0;
  return 1;
}

/* Sets up the requests of a group, a call for each of `whole`. */
static int set_up_group(filling *f, kvedge_slices *of, const call_group *group, const kvedge_request *whole) {
  const int heads = whole->view.num_kv_heads / group->num_requests;
  for (int kv_head = 0; kv_head < whole->view.num_kv_heads; kv_head += heads) {
    kvedge_attention_options options[KVEDGE_MOST_JOINED];
    kvedge_request r[KVEDGE_MOST_JOINED];
    for (int i = 0; i < group->num_calls; i++) r[i] = heads_of(&whole[i], kv_head, heads, &options[i]);
    for (int i = 1; i < group->num_calls; i++) {
      if (r[i].options) options[i] = *r[i].options;
      else kvedge_attention_defaults(&options[i]);
      options[i].sink_logits = NULL; /* they count once */
      r[i].options = &options[i];
    }
    if (!(group->num_calls == 1 ? set_up(f, of, r, NULL) : set_up_joined(f, of, r, group->num_calls))) return 0;
  }
  return 1;
}

kvedge_status kvedge_slices_init(void *memory, size_t bytes, const kvedge_attention_call *calls, int num_calls,
                                 int num_threads, kvedge_slices **slices) {
  KVEDGE_FLOAT_MODE;
  kvedge_slices of;
  if (!memory || (uintptr_t)memory % 64 || !slices) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_status ready = kvedge_isa_ready();
  if (ready != KVEDGE_OK) return ready;
  const common_room room = lay_out(calls, num_calls, num_threads, memory, &of);
  if (room.bytes == 0) return KVEDGE_ERROR_ARGUMENT;
  if (room.bytes > bytes)
    return kvedge_slices_bytes(calls, num_calls, num_threads) ? KVEDGE_ERROR_MEMORY : KVEDGE_ERROR_ARGUMENT;
  filling f = {memory, room.bytes, bytes, num_threads, of.plans, room.joined};
  for (int i = 0; i < num_calls;) {
    const call_group group = group_of_calls(calls + i, num_calls - i);
    kvedge_request whole[KVEDGE_MOST_JOINED];
    kvedge_segment *segments = room.segments;
    for (int j = 0; j < group.num_calls; segments += num_segments(&calls[i + j]), j++) {
      const kvedge_status status = request_of(&calls[i + j], &calls[i], &group, 0, segments, &whole[j]);
      if (status != KVEDGE_OK) return status;
    }
    if (!set_up_group(&f, &of, &group, whole)) return KVEDGE_ERROR_MEMORY;
    i += group.num_calls;
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

static int was_last(atomic_int *num_left) { return atomic_fetch_sub_explicit(num_left, 1, memory_order_acq_rel) == 1; }

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
  const int index = slice - plan->first_slice, slot = a->num_slots < plan->num_slices ? thread : index;
  const int refit = a->num_refits < plan->num_slices ? thread : index;
  kvedge_slice_run(a, index, following, slot, w, NULL);
  const int runs_alone = a->chunks_per_block == 1;
  joined_calls *joined = plan->joined;
  if (runs_alone) kvedge_slice_collect(a, index, slot, refit, w);
  if ((runs_alone && !joined) || !was_last(&plan->num_left)) return;
  for (int i = 0; i < plan->num_slices && !runs_alone; i++) kvedge_slice_collect(a, i, i, 0, w);
  if (joined && was_last(&joined->num_left))
    kvedge_merge_parts(&joined->merged, joined->requests, joined->num_requests);
}
