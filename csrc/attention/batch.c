/* The calls of a batch: rows that attend to layers of their own, or to sequences in the blocks of a pool. All are
 * checked, then run together. */
#include <stdlib.h>

#include "attention/parts.h"
#include "system/memory.h"
#include "system/float_mode.h"

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
