/* Calls whose tokens lie in several layers: a part is attended to like a layer of its own, at
 * its place in the sequence, and the results are merged by their softmax denominators, exactly
 * but for rounding (in double). */
#include <math.h>
#include <stdlib.h>

#include "attention/parts.h"
#include "store/ranges.h"
#include "system/bits.h"

int kvedge_requests_of_part(const kvedge_part *p) { return p->layer && kvedge_has_ranges(p->layer) ? 3 : 1; }

int64_t kvedge_segments_of_part(const kvedge_part *p) {
  if (!p->layer || p->num_tokens < 0 || p->num_tokens > KVEDGE_MOST_TOKENS) return 0;
  if (kvedge_has_ranges(p->layer)) return p->blocks ? 0 : 3;
  if (!p->blocks) return 1;
  if (!kvedge_is_block_size(p->layer, p->block_size) || p->first_row < 0 || p->first_row > KVEDGE_MOST_TOKENS) return 0;
  return kvedge_blocks_of_rows(p->block_size, p->num_tokens);
}

/* Tokens of all parts; 0: they do not follow one another. */
static int64_t tokens_in(const kvedge_attention_call *call) {
  int64_t stop = 0;
  if (!call->parts || call->num_parts < 1) return 0;
  for (int i = 0; i < call->num_parts; i++) {
    const kvedge_part *p = &call->parts[i];
    if (!p->layer || p->num_tokens < 0 || p->position < stop || p->num_turns < 0) return 0;
    for (int turn = 0; turn < p->num_turns; turn++)
      if (!p->turns || !kvedge_is_rotation(&p->turns[turn], p->layer->config.head_dim)) return 0;
    if (p->position > KVEDGE_MOST_TOKENS || p->num_tokens > KVEDGE_MOST_TOKENS) return 0;
    stop = p->position + p->num_tokens;
  }
  return stop;
}

/* Do the results of all parts have one shape? */
static int are_alike(const kvedge_attention_call *call) {
  const kvedge_layer *first = call->parts[0].layer;
  for (int i = 1; i < call->num_parts; i++) {
    const kvedge_layer *other = call->parts[i].layer;
    if (other->config.num_kv_heads != first->config.num_kv_heads || other->keys.shape.dim != first->keys.shape.dim ||
        other->values.shape.dim != first->values.shape.dim)
      return 0;
  }
  return 1;
}

static kvedge_status check(const kvedge_attention_call *call, int64_t *len) {
  const kvedge_attention_options *o = call->options;
  *len = call->layer ? 0 : tokens_in(call);
  if (*len == 0 || !are_alike(call)) return KVEDGE_ERROR_ARGUMENT;
  if (o && o->num_tokens) {
    if (o->num_tokens < *len || o->num_tokens > KVEDGE_MOST_TOKENS) return KVEDGE_ERROR_ARGUMENT;
    *len = o->num_tokens;
  }
  if (!kvedge_array_is_valid(&call->query) || !kvedge_array_is_valid(&call->out)) return KVEDGE_ERROR_ARGUMENT;
  kvedge_segment unused;
  kvedge_cache_view view = kvedge_layer_view(call->parts[0].layer, NULL, &unused);
  if (!kvedge_array_is_apart(&call->out, call->num_rows, call->num_heads, view.side[VALUES].shape.dim))
    return KVEDGE_ERROR_ARGUMENT;
  view.len = *len;
  return kvedge_request_check(&(kvedge_request){
      .view = view, .num_heads = call->num_heads, .num_rows = call->num_rows, .query = call->query, .options = o});
}

static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

/* The request for one part; 0: it has no token that is seen. */
static int request_of_part(const kvedge_attention_call *call, const kvedge_part *part, int64_t len,
                           kvedge_segment *segments, kvedge_attention_options *own, kvedge_request *request) {
  if (call->options) *own = *call->options;
  else kvedge_attention_defaults(own);
  const int64_t start = clamp(own->start - part->position, part->num_tokens);
  if (start == part->num_tokens) return 0;
  own->num_tokens = part->num_tokens;
  own->first_row = part->first_row;
  kvedge_cache_view view = {.len = 0};
  if (!part->blocks) view = kvedge_layer_view(part->layer, own, segments);
  else if (!kvedge_view_blocks(part->layer, part->block_size, part->blocks, part->first_row, part->num_tokens, segments,
                               &view))
    view = kvedge_layer_view(part->layer, NULL, segments), view.len = 0;
  *request = (kvedge_request){.view = view,
                              .num_heads = call->num_heads,
                              .num_rows = call->num_rows,
                              .first_position = len - call->num_rows - part->position - start,
                              .query = call->query,
                              .out = call->out,
                              .lse = call->lse,
                              .options = own,
                              .turns = part->turns,
                              .num_turns = part->num_turns};
  if (view.len != part->num_tokens) return 1; /* the layer does not hold it: refused by the caller */
  kvedge_cut_view(&request->view, segments, start);
  const int64_t sinks = clamp(own->sink_tokens, KVEDGE_MOST_TOKENS); /* from the call's start on */
  own->sink_tokens = clamp(own->start + sinks - part->position - start, part->num_tokens - start);
  kvedge_move_masks(own, 0, 0, part->position);
  own->start = start;
  return 1;
}

/* The requests for one part, 0 or 1. */
static int put_request(const kvedge_attention_call *call, const kvedge_part *part, int64_t len, int is_first,
                       kvedge_call_room *room, kvedge_status *status) {
  if (!request_of_part(call, part, len, room->segments, room->options, room->requests)) return 0;
  if (room->requests->view.len + room->options->start != part->num_tokens) *status = KVEDGE_ERROR_ARGUMENT;
  if (!is_first) room->options->sink_logits = NULL; /* they count once */
  room->segments += part->blocks ? kvedge_blocks_of_rows(part->block_size, part->num_tokens) : 1;
  room->options++, room->requests++;
  return 1;
}

/* Those for tokens of a layer of three ranges, 0 to 3. */
static int put_requests_of_ranges(const kvedge_attention_call *call, const kvedge_part *of, int64_t len, int is_first,
                                  kvedge_call_room *room, kvedge_status *status) {
  kvedge_ranges ranges;
  kvedge_part parts[3];
  kvedge_layer_get_ranges(of->layer, &ranges);
  const int64_t row = of->first_row < 0 ? ranges.start : of->first_row;
  if (of->num_tokens > ranges.stop - row) {
    *status = KVEDGE_ERROR_ARGUMENT;
    return 0;
  }
  const int64_t query_row = row + len - call->num_rows - of->position;
  const int num_parts = kvedge_parts_of_ranges(of->layer, &ranges, row, of->num_tokens, query_row, parts);
  int n = 0;
  for (int i = 0; i < num_parts; i++) {
    parts[i].position += of->position;
    parts[i].turns = of->turns, parts[i].num_turns = of->num_turns;
    n += put_request(call, &parts[i], len, is_first && n == 0, room, status);
  }
  return n;
}

int kvedge_requests_of_parts(const kvedge_attention_call *call, kvedge_call_room *room, kvedge_status *status) {
  int64_t len;
  int n = 0;
  *status = check(call, &len);
  for (int i = 0; i < call->num_parts && *status == KVEDGE_OK; i++) {
    const kvedge_part *part = &call->parts[i];
    if (part->num_tokens > 0 && kvedge_has_ranges(part->layer))
      n += put_requests_of_ranges(call, part, len, n == 0, room, status);
    else n += put_request(call, part, len, n == 0, room, status);
  }
  if (*status != KVEDGE_OK || n > 0) return n;
  /* Nothing is seen: attention to no token of the last part. */
  const kvedge_part *last = &call->parts[call->num_parts - 1];
  kvedge_attention_options *own = room->options++;
  kvedge_request *request = room->requests++;
  *own = *call->options; /* whose start is behind all parts */
  own->num_tokens = own->start = 0;
  own->mask = NULL, own->bias = NULL, own->half_bias = NULL;
  *request = (kvedge_request){.view = kvedge_layer_view(last->layer, NULL, room->segments),
                              .num_heads = call->num_heads,
                              .num_rows = call->num_rows,
                              .query = call->query,
                              .out = call->out,
                              .lse = call->lse,
                              .options = own};
  kvedge_cut_view(&request->view, room->segments++, request->view.len);
  request->first_position = -call->num_rows;
  return 1;
}

/* ---- Room ------------------------------------------------------------------------------------ */

static size_t query_bytes(const kvedge_request *r) {
  const size_t rows = (size_t)r->num_rows * (size_t)r->num_heads;
  return r->num_turns ? kvedge_align(rows * (size_t)r->view.side[KEYS].shape.dim * sizeof(float)) : 0;
}

size_t kvedge_result_bytes(const kvedge_request *r) {
  const size_t rows = (size_t)r->num_rows * (size_t)r->num_heads;
  return kvedge_align(rows * (size_t)r->view.side[VALUES].shape.dim * sizeof(float)) +
         kvedge_align(rows * sizeof(double));
}

size_t kvedge_parts_bytes(const kvedge_request *requests, int num_parts) {
  size_t bytes = num_parts > 1 ? (size_t)num_parts * kvedge_result_bytes(requests) : 0;
  for (int i = 0; i < num_parts; i++) bytes += query_bytes(&requests[i]);
  return bytes;
}

/* Lets a request read its query turned, from `room`. */
static void turn_query(kvedge_request *r, float *room) {
  const int dim = r->view.side[KEYS].shape.dim, num_heads = r->num_heads;
  kvedge_array_copy(&r->query, r->num_rows, num_heads, dim, room);
  r->query = kvedge_dense_array(room, num_heads, dim);
  for (int64_t row = 0; row < r->num_rows * num_heads; row++, room += dim) {
    for (int i = 0; i < r->num_turns; i++) kvedge_rotate(&r->turns[i], room);
    for (int d = 0; d < dim; d++) room[d] = kvedge_bounded(room[d]);
  }
}

char *kvedge_parts_take_room(kvedge_request *requests, int num_parts, char *room) {
  const int dim = requests->view.side[VALUES].shape.dim, num_heads = requests->num_heads;
  const size_t rows = (size_t)requests->num_rows * (size_t)num_heads;
  for (int i = 0; i < num_parts; i++) {
    if (!requests[i].num_turns) continue;
    turn_query(&requests[i], (float *)room);
    room += query_bytes(&requests[i]);
  }
  for (int i = 0; i < num_parts && num_parts > 1; i++) {
    requests[i].log_sums = (double *)room;
    room += kvedge_align(rows * sizeof(double));
    requests[i].out = kvedge_dense_array((float *)room, num_heads, dim);
    room += kvedge_align(rows * (size_t)dim * sizeof(float));
    requests[i].lse = NULL;
  }
  return room;
}

/* ---- Merging --------------------------------------------------------------------------------- */

static void merge_row(const kvedge_attention_call *call, const kvedge_request *requests, int num_parts, int64_t row,
                      int head) {
  const kvedge_row_kernels *rows = kvedge_active()->rows;
  const int dim = requests->view.side[VALUES].shape.dim;
  const int64_t at = row * requests->num_heads + head;
  double largest = -INFINITY, total = 0.0;
  float room[KVEDGE_MAX_HEAD_DIM];
  const int is_float32 = call->out.type == KVEDGE_TYPE_FLOAT32;
  void *out = kvedge_array_at(&call->out, row, head);
  float *merged = is_float32 ? out : room;
  for (int i = 0; i < num_parts; i++) largest = fmax(largest, requests[i].log_sums[at]);
  for (int i = 0; i < num_parts && largest > -INFINITY; i++) total += exp(requests[i].log_sums[at] - largest);
  memset(merged, 0, (size_t)dim * sizeof *merged);
  for (int i = 0; i < num_parts && total > 0.0; i++) {
    const float weight = (float)(exp(requests[i].log_sums[at] - largest) / total);
    rows->merge_row(merged, 1.0f, (const float *)kvedge_array_at(&requests[i].out, row, head), weight, dim);
  }
  if (rows->abs_max_bits(merged, (size_t)dim) >= KVEDGE_NOT_FINITE) /* by rounding */
    for (int d = 0; d < dim; d++) merged[d] = kvedge_bounded(merged[d]);
  if (!is_float32) kvedge_narrow(call->out.type, merged, dim, out);
  if (call->lse) call->lse[at] = total > 0.0 ? kvedge_bounded((float)(largest + log(total))) : -INFINITY;
}

void kvedge_merge_parts(const kvedge_attention_call *call, const kvedge_request *requests, int num_parts) {
  for (int64_t row = 0; row < call->num_rows && num_parts > 1; row++)
    for (int head = 0; head < requests->num_heads; head++) merge_row(call, requests, num_parts, row, head);
}
