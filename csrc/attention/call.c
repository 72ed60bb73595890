/* Calls on threads of our own: on a layer, on several layers and parts of them. Each becomes a
 * request, or one for each part; requests are checked, and run.c runs them together. */
#include <stdlib.h>

#include "attention/lists.h"
#include "attention/parts.h"
#include "store/ranges.h"
#include "system/memory.h"
#include "system/float_mode.h"

/* ---- A layer --------------------------------------------------------------------------------- */

kvedge_status kvedge_attend(const kvedge_layer *layer, const float *query, int64_t num_rows, int num_heads,
                            const kvedge_attention_options *options, int num_threads, float *out, float *lse) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !query || !out || num_threads < 0) return KVEDGE_ERROR_ARGUMENT;
  if (kvedge_has_ranges(layer) || kvedge_has_lists(options)) {
    const kvedge_attention_call call = {.layer = layer,
                                        .query = kvedge_dense_array(query, num_heads, layer->keys.shape.dim),
                                        .num_rows = num_rows,
                                        .num_heads = num_heads,
                                        .out = kvedge_dense_array(out, num_heads, layer->values.shape.dim),
                                        .lse = lse,
                                        .options = options};
    return kvedge_attend_layers(&call, 1, num_threads);
  }
  kvedge_segment segment;
  kvedge_request request = kvedge_dense_request(layer, query, num_rows, num_heads, options, out, lse);
  const kvedge_status status = kvedge_request_layer(&request, layer, &segment);
  return status == KVEDGE_OK ? kvedge_run_requests(&request, 1, num_threads) : status;
}

/* ---- Several layers, and parts ---------------------------------------------------------------- */

/* The requests of a call, one or those of its parts; returns their number. */
static int requests_of_call(const kvedge_attention_call *call, kvedge_call_room *room, kvedge_status *status) {
  if (call->num_parts) return kvedge_requests_of_parts(call, room, status);
  *status = KVEDGE_ERROR_ARGUMENT;
  if (!call->layer || !kvedge_array_is_valid(&call->query) || !kvedge_array_is_valid(&call->out)) return 0;
  if (!kvedge_array_is_apart(&call->out, call->num_rows, call->num_heads, call->layer->values.shape.dim)) return 0;
  if (kvedge_has_ranges(call->layer)) {
    const kvedge_attention_options *o = call->options;
    kvedge_part part = {.layer = call->layer};
    part.num_tokens = kvedge_layer_range(call->layer, &part.first_row);
    if (o && o->num_tokens) part.num_tokens = o->num_tokens;
    if (o && o->num_tokens && o->first_row >= 0) part.first_row = o->first_row;
    kvedge_attention_call of_part = *call;
    of_part.layer = NULL, of_part.parts = &part, of_part.num_parts = 1;
    return kvedge_requests_of_parts(&of_part, room, status);
  }
  *room->requests = (kvedge_request){.num_heads = call->num_heads,
                                     .num_rows = call->num_rows,
                                     .query = call->query,
                                     .out = call->out,
                                     .lse = call->lse,
                                     .options = call->options};
  *status = kvedge_request_layer(room->requests++, call->layer, room->segments++);
  return 1;
}

/* Runs the requests of calls together, but those of lists call by call. */
static kvedge_status run_all(const kvedge_attention_call *calls, int num_calls, const int *counts,
                             const kvedge_request *requests, int num_requests, int num_threads) {
  int has_lists = 0;
  for (int i = 0; i < num_calls; i++) has_lists |= kvedge_has_lists(calls[i].options);
  if (!has_lists) return kvedge_run_requests(requests, num_requests, num_threads);
  kvedge_status status = KVEDGE_OK;
  for (int i = 0; i < num_calls && status == KVEDGE_OK; requests += counts[i++])
    status = kvedge_has_lists(calls[i].options) ? kvedge_run_lists(requests, counts[i], num_threads)
                                                : kvedge_run_requests(requests, counts[i], num_threads);
  return status;
}

/* Runs checked requests, and merges those of calls that have several. */
static kvedge_status run_calls(const kvedge_attention_call *calls, int num_calls, const int *counts,
                               kvedge_request *requests, int num_requests, int num_threads) {
  size_t bytes = 0;
  for (int i = 0, first = 0; i < num_calls; first += counts[i++])
    bytes += kvedge_parts_bytes(&requests[first], counts[i]);
  if (bytes == 0) return run_all(calls, num_calls, counts, requests, num_requests, num_threads);
  char *memory = kvedge_aligned_alloc(64, bytes), *room = memory;
  if (!memory) return KVEDGE_ERROR_MEMORY;
  for (int i = 0, first = 0; i < num_calls; first += counts[i++])
    room = kvedge_parts_take_room(&requests[first], counts[i], room);
  const kvedge_status status = run_all(calls, num_calls, counts, requests, num_requests, num_threads);
  for (int i = 0, first = 0; i < num_calls && status == KVEDGE_OK; first += counts[i++])
    kvedge_merge_parts(&calls[i], &requests[first], counts[i]);
  kvedge_aligned_free(memory);
  return status;
}

/* The most requests of calls, and segments of all of them; 0: a call is not valid. */
static int count_parts(const kvedge_attention_call *calls, int num_calls, int *requests, int64_t *segments) {
  *requests = 0, *segments = 0;
  for (int i = 0; i < num_calls; i++) {
    const kvedge_part whole = {.layer = calls[i].layer};
    const kvedge_part *parts = calls[i].num_parts ? calls[i].parts : &whole;
    const int num_parts = calls[i].num_parts ? calls[i].num_parts : 1;
    if (num_parts < 0 || num_parts > KVEDGE_MOST_PARTS || !parts) return 0;
    for (int p = 0; p < num_parts; p++) {
      const int64_t of_part = kvedge_segments_of_part(&parts[p]);
      if (of_part == 0 || __builtin_add_overflow(*segments, of_part, segments)) return 0;
      if (__builtin_add_overflow(*requests, kvedge_requests_of_part(&parts[p]), requests)) return 0;
    }
  }
  return *segments <= (int64_t)(SIZE_MAX / sizeof(kvedge_segment) / 2);
}

/* Layer `index` of a call, which has one or those of its parts, if it has three ranges; else NULL. */
static const kvedge_layer *layer_with_ranges(const kvedge_attention_call *call, int index) {
  const kvedge_layer *layer = call->num_parts ? call->parts[index].layer : call->layer;
  return kvedge_has_ranges(layer) ? layer : NULL;
}

/* Releases the layers of calls before part `part` of call `end`, the last of them first. */
static void release_before(const kvedge_attention_call *calls, int end, int part) {
  for (int i = end; i >= 0; i--) {
    if (i < end) part = calls[i].num_parts ? calls[i].num_parts : 1;
    while (part-- > 0)
      if (layer_with_ranges(&calls[i], part)) kvedge_release(layer_with_ranges(&calls[i], part));
  }
}

/* Holds the layers of calls, however often they occur: all at once, since a writer may wait for those that are held. */
static void hold_layers(const kvedge_attention_call *calls, int num_calls) {
  for (int i = 0; i < num_calls; i++)
    for (int p = 0; p < (calls[i].num_parts ? calls[i].num_parts : 1); p++) {
      const kvedge_layer *layer = layer_with_ranges(&calls[i], p);
      if (!layer || kvedge_try_hold(layer)) continue;
      release_before(calls, i, p);
      kvedge_hold(layer); /* once its writer is done, all are tried again */
      kvedge_release(layer);
      i = -1;
      break;
    }
}

kvedge_status kvedge_attend_layers(const kvedge_attention_call *calls, int num_calls, int num_threads) {
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
  kvedge_call_room room = {segments, options, requests};
  hold_layers(calls, num_calls);
  for (int i = 0; i < num_calls && status == KVEDGE_OK; i++)
    n += counts[i] = requests_of_call(&calls[i], &room, &status);
  if (status == KVEDGE_OK) status = run_calls(calls, num_calls, counts, requests, n, num_threads);
  release_before(calls, num_calls, 0);
  if (requests != few) free(requests), free(options), free(segments), free(counts);
  return status;
}
