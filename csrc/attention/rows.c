/* Calls on keys and values in memory of others: each becomes a request, or one for each KV head where these do not lie
 * side by side; the slices of all of them are run on threads of the caller's. */
#include <math.h>
#include <stdatomic.h>

#include "attention/parts.h"
#include "system/float_mode.h"

/* A request's plan, set up; and its slices among all. */
typedef struct {
  kvedge_attention *attention;
  int first_slice, num_slices;
  atomic_int num_left; /* slices that have not run */
} planned_rows;

struct kvedge_rows_attention {
  char *workspaces;    /* (num_threads) */
  planned_rows *plans; /* (num_plans) */
  int num_plans, num_slices;
};

/* ---- Calls that are checked -------------------------------------------------------------------- */

/* The format of rows and what is known of their magnitudes; 0: rows of it cannot be read in place. */
static int format_of_rows(const kvedge_rows *rows, kvedge_view_side *side, int *unknown) {
  switch ((int)rows->format) {
    case KVEDGE_FLOAT16:
    case KVEDGE_Q8_0: side->bound = 65504.0f; break; /* of its scales */
    case KVEDGE_FLOAT32:
    case KVEDGE_BFLOAT16:
      side->bound = rows->bound > 0.0f ? rows->bound : 1.0f;
      *unknown |= !(rows->bound > 0.0f);
      break;
    default: return 0;
  }
  side->format = kvedge_format_of(rows->format);
  return 1;
}

static int is_multiple(ptrdiff_t of, uintptr_t x) { return x % (uintptr_t)of == 0; }

/* What addresses of rows are multiples of. */
static ptrdiff_t alignment_of(const kvedge_format_info *format) {
  return format->group_bytes ? (ptrdiff_t)sizeof(uint16_t) : format->bits / 8;
}

/* A side of the view; *apart: its heads do not lie side by side. 0: it is not valid. */
static int side_of_rows(const kvedge_rows *rows, int num_kv_heads, kvedge_view_side *side, int *apart, int *unknown) {
  *side = (kvedge_view_side){.block_tokens = KVEDGE_BLOCK, .block_rows = KVEDGE_BLOCK};
  if (rows->dim < 1 || rows->dim > KVEDGE_MAX_HEAD_DIM || !(rows->bound >= 0.0f) || isinf(rows->bound)) return 0;
  if (!format_of_rows(rows, side, unknown)) return 0;
  if (side->format->group_bytes && rows->dim % side->format->group_channels) return 0;
  const ptrdiff_t element = alignment_of(side->format), row = (ptrdiff_t)kvedge_row_bytes(side->format, rows->dim);
  if (rows->token_stride < row || !is_multiple(element, (uintptr_t)rows->token_stride)) return 0;
  if (!is_multiple(element, (uintptr_t)rows->head_stride)) return 0;
  side->shape = kvedge_row_shape_of(side->format, rows->dim, rows->dim, KVEDGE_SCALE_FLOAT32);
  side->row_stride = rows->token_stride;
  side->head_stride = num_kv_heads == 1 ? row : rows->head_stride;
  side->token_bytes = row * num_kv_heads;
  if (side->format->group_bytes) kvedge_find_scales_in_rows(side);
  *apart |= side->head_stride != row || rows->token_stride / row < num_kv_heads;
  return 1;
}

static int64_t tokens_of(const kvedge_rows_call *call) {
  int64_t len = 0;
  for (int i = 0; i < call->num_segments; i++) {
    const kvedge_rows_segment *segment = &call->segments[i];
    if (segment->num_tokens < 1 || segment->num_tokens > KVEDGE_MOST_TOKENS - len) return 0;
    len += segment->num_tokens;
  }
  return len;
}

enum { MOST_HEADS = 65536 };

/* The view of a call, without segments, and how many requests it becomes; 0: the call is not valid. */
static int view_of_call(const kvedge_rows_call *call, kvedge_cache_view *view) {
  int apart = 0;
  *view = (kvedge_cache_view){.num_kv_heads = call->num_kv_heads, .num_segments = call->num_segments};
  if (call->num_kv_heads < 1 || call->num_heads < 1 || call->num_heads > MOST_HEADS) return 0;
  if (call->num_heads % call->num_kv_heads) return 0;
  if (call->num_rows < 1 || call->num_rows > KVEDGE_MOST_TOKENS || call->num_segments < 1 || !call->segments) return 0;
  const kvedge_attention_options *o = call->options;
  if (o && (o->num_tokens || o->start)) return 0;
  const kvedge_rows *rows[SIDES] = {&call->keys, &call->values};
  for (int s = 0; s < SIDES; s++)
    if (!side_of_rows(rows[s], call->num_kv_heads, &view->side[s], &apart, &view->bounds_unknown)) return 0;
  view->len = tokens_of(call);
  if (view->len == 0) return 0;
  return apart ? call->num_kv_heads : 1;
}

/* The part of a call's request from KV head `kv_head` on, `num` of them. */
static kvedge_request heads_of(const kvedge_rows_call *call, const kvedge_cache_view *view, int kv_head, int num,
                               kvedge_attention_options *options) {
  const int of_kv_head = call->num_heads / call->num_kv_heads, head = kv_head * of_kv_head;
  kvedge_request r = {.view = *view,
                      .num_heads = num * of_kv_head,
                      .num_rows = call->num_rows,
                      .first_position = view->len - call->num_rows,
                      .query = kvedge_array_from(&call->query, 0, head),
                      .out = kvedge_array_from(&call->out, 0, head),
                      .options = options};
  if (call->options) *options = *call->options;
  else kvedge_attention_defaults(options);
  if (num == call->num_kv_heads) return r;
  kvedge_move_heads(options, head);
  kvedge_move_kv_heads(&r.view, kv_head);
  r.view.num_kv_heads = num;
  for (int s = 0; s < SIDES; s++) {
    kvedge_view_side *side = &r.view.side[s];
    side->token_bytes = side->head_stride = (ptrdiff_t)kvedge_row_bytes(side->format, side->shape.dim);
  }
  return r;
}

/* Plans a request for `num_threads` threads. Where a row block is one slice, the thread that runs it collects it, so a
 * slot for each thread is enough. Returns its bytes. */
static size_t plan_rows(const kvedge_request *r, int num_threads, kvedge_attention *a, int *num_slots) {
  kvedge_attention_plan(a, r, 0, r->num_rows);
  a->query_stays = 1;
  a->num_refits = a->chunks_per_block == 1 ? num_threads : 1;
  *num_slots = a->chunks_per_block == 1 ? num_threads : a->num_row_blocks * a->chunks_per_block;
  return kvedge_attention_lay_out(a, NULL, *num_slots);
}

/* ---- Memory: the object, workspaces, plans, segments of the call at hand, requests ----------------- */

/* Bytes of all but the requests; 0: a call is not valid. */
static size_t lay_out(const kvedge_rows_call *calls, int num_calls, int num_threads, char *base,
                      kvedge_rows_attention *of, kvedge_segment **segments) {
  enum { MOST_THREADS = 1024 };
  size_t used = 0, num_plans = 0, most_segments = 0;
  kvedge_cache_view view;
  if (!calls || num_calls < 1 || num_threads < 1 || num_threads > MOST_THREADS) return 0;
  for (int i = 0; i < num_calls; i++) {
    const int requests = view_of_call(&calls[i], &view);
    if (requests == 0) return 0;
    num_plans += (size_t)requests;
    if ((size_t)calls[i].num_segments > most_segments) most_segments = (size_t)calls[i].num_segments;
  }
  if (num_plans > INT32_MAX) return 0;
  kvedge_take(base, &used, sizeof *of);
  of->workspaces = kvedge_take(base, &used, (size_t)num_threads * kvedge_workspace_bytes());
  of->plans = kvedge_take(base, &used, num_plans * sizeof *of->plans);
  of->num_plans = (int)num_plans;
  *segments = kvedge_take(base, &used, most_segments * sizeof **segments);
  return used;
}

size_t kvedge_rows_attention_bytes(const kvedge_rows_call *calls, int num_calls, int num_threads) {
  kvedge_rows_attention of;
  kvedge_segment *segments;
  size_t bytes = lay_out(calls, num_calls, num_threads, NULL, &of, &segments);
  for (int i = 0; bytes && i < num_calls; i++) {
    kvedge_cache_view view;
    kvedge_attention_options options;
    kvedge_attention planned;
    int num_slots;
    const int requests = view_of_call(&calls[i], &view);
    const kvedge_request r = heads_of(&calls[i], &view, 0, calls[i].num_kv_heads / requests, &options);
    bytes += (size_t)requests * plan_rows(&r, num_threads, &planned, &num_slots);
  }
  return bytes;
}

static kvedge_status check(const kvedge_rows_call *call) {
  kvedge_cache_view view;
  kvedge_attention_options options;
  if (view_of_call(call, &view) == 0) return KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_array_is_valid(&call->query) || !kvedge_array_is_valid(&call->out)) return KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_array_is_apart(&call->out, call->num_rows, call->num_heads, call->values.dim))
    return KVEDGE_ERROR_ARGUMENT;
  const ptrdiff_t element[SIDES] = {alignment_of(view.side[KEYS].format), alignment_of(view.side[VALUES].format)};
  for (int i = 0; i < call->num_segments; i++) {
    const kvedge_rows_segment *at = &call->segments[i];
    if (!at->keys || !is_multiple(element[KEYS], (uintptr_t)at->keys)) return KVEDGE_ERROR_ARGUMENT;
    if (!at->values || !is_multiple(element[VALUES], (uintptr_t)at->values)) return KVEDGE_ERROR_ARGUMENT;
  }
  const kvedge_request whole = heads_of(call, &view, 0, call->num_kv_heads, &options);
  return kvedge_request_check(&whole);
}

kvedge_status kvedge_rows_attention_init(void *memory, size_t bytes, const kvedge_rows_call *calls, int num_calls,
                                         int num_threads, kvedge_rows_attention **attention) {
  KVEDGE_FLOAT_MODE;
  kvedge_rows_attention *of = memory;
  kvedge_segment *segments;
  if (!memory || (uintptr_t)memory % 64 || !attention) return KVEDGE_ERROR_ARGUMENT;
  const size_t needed = kvedge_rows_attention_bytes(calls, num_calls, num_threads);
  if (needed == 0) return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < num_calls; i++) {
    const kvedge_status status = check(&calls[i]);
    if (status != KVEDGE_OK) return status;
  }
  if (needed > bytes) return KVEDGE_ERROR_MEMORY;
  char *room = (char *)memory + lay_out(calls, num_calls, num_threads, memory, of, &segments);
  of->num_slices = 0;
  planned_rows *plan = of->plans;
  for (int i = 0; i < num_calls; i++) {
    kvedge_cache_view view;
    const int requests = view_of_call(&calls[i], &view), heads = calls[i].num_kv_heads / requests;
    for (int j = 0; j < calls[i].num_segments; j++) {
      const kvedge_rows_segment *at = &calls[i].segments[j];
      segments[j] = (kvedge_segment){
          .rows = {at->keys, at->values},
            .scales = {at->keys, at->values},
            .num_tokens = at->num_tokens
      };
    }
    view.segments = segments;
    for (int kv_head = 0; kv_head < calls[i].num_kv_heads; kv_head += heads, plan++) {
      kvedge_attention planned;
      kvedge_attention_options options;
      int num_slots;
      const kvedge_request r = heads_of(&calls[i], &view, kv_head, heads, &options);
      const size_t taken = plan_rows(&r, num_threads, &planned, &num_slots);
      plan->attention = kvedge_attention_set_up(&planned, room, num_slots);
      plan->first_slice = of->num_slices;
      plan->num_slices = planned.num_row_blocks * planned.chunks_per_block;
      atomic_init(&plan->num_left, plan->num_slices);
      of->num_slices += plan->num_slices;
      room += taken;
    }
  }
  *attention = of;
  return KVEDGE_OK;
}

int kvedge_rows_attention_num_slices(const kvedge_rows_attention *attention) { return attention->num_slices; }

/* ---- Slices are run ------------------------------------------------------------------------------ */

static planned_rows *plan_of_slice(const kvedge_rows_attention *of, int slice) {
  int first = 0, stop = of->num_plans;
  while (stop - first > 1) {
    const int middle = first + (stop - first) / 2;
    if (of->plans[middle].first_slice <= slice) first = middle;
    else stop = middle;
  }
  return &of->plans[first];
}

void kvedge_rows_attention_run(kvedge_rows_attention *of, int slice, int next, int thread) {
  KVEDGE_FLOAT_MODE;
  planned_rows *plan = plan_of_slice(of, slice);
  kvedge_attention *a = plan->attention;
  kvedge_workspace *w = (kvedge_workspace *)(of->workspaces + (size_t)thread * kvedge_workspace_bytes());
  kvedge_slice following = {.attention = NULL};
  if (next >= 0) {
    const planned_rows *of_next = plan_of_slice(of, next);
    following = (kvedge_slice){of_next->attention, next - of_next->first_slice};
  }
  const int index = slice - plan->first_slice, runs_alone = a->chunks_per_block == 1;
  kvedge_slice_run(a, index, following, runs_alone ? thread : index, w, NULL);
  if (runs_alone) {
    kvedge_slice_collect(a, index, thread, thread, w);
    return;
  }
  if (atomic_fetch_sub_explicit(&plan->num_left, 1, memory_order_acq_rel) > 1) return;
  for (int i = 0; i < plan->num_slices; i++) kvedge_slice_collect(a, i, i, 0, w);
}
