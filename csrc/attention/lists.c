/* Attention over lists of tokens.
 *
 * A row, or a row's heads of one KV head, with its list becomes a request for each part that has tokens of it, whose view
 * is of these tokens alone:
 *
 *   formats of rows   a segment for each run of adjacent tokens, if each is of whole blocks of a tile read where they lie;
 *                     else slices gather their rows, tile by tile as they are stored (slice.c)
 *   formats of runs   a segment for each run of 32 with a token of the list, and a mask of as many bytes
 *
 * The first rows of a prompt whose lists have all tokens are a request without lists, and rows that read nearly all,
 * with one list for all heads, a request under a mask.
 */
#include <math.h>
#include <stdlib.h>

#include "attention/lists.h"
#include "attention/parts.h"

enum {
  BATCH_ROWS = 128,         /* rows whose requests run together */
  BATCH_TOKENS = 128 << 10, /* tokens of their lists: 5 MB of segments; or one row */
  DENSE_PERCENT = 70, /* of the tokens up to its own that a row reads: from here on a mask costs less than lists */
  DENSE_ROWS = 8      /* rows that share tiles then, at least */
};

/* The list of a row for some heads: `count` tokens. */
typedef struct {
  const int32_t *tokens;
  int64_t count;
} token_list;

static token_list list_of(const kvedge_attention_options *o, int64_t row, int head) {
  token_list list = {.tokens = o->tokens + (row * o->token_heads + head) * o->token_width};
  /* Used places come first: the number of them by bisection. */
  int64_t low = 0, high = o->token_width;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (list.tokens[middle] >= 0) low = middle + 1;
    else high = middle;
  }
  list.count = low;
  return list;
}

/* Does a list ascend, from 0 or more to `position` at most, and is the rest of it -1? */
static int is_list(const kvedge_attention_options *o, int64_t row, int head, int64_t position) {
  const token_list list = list_of(o, row, head);
  int right = list.count > 0 && list.tokens[0] >= 0 && list.tokens[list.count - 1] <= position;
  for (int64_t i = 1; i < list.count; i++) right &= list.tokens[i] > list.tokens[i - 1];
  for (int64_t i = list.count; i < o->token_width; i++) right &= list.tokens[i] == -1;
  return right;
}

/* ---- The view of a list ------------------------------------------------------------------------- */

/* Room for the requests of a batch, moved past what was used. */
typedef struct {
  kvedge_request *requests;
  kvedge_attention_options *options;
  kvedge_segment *segments;
  uint8_t *mask;
  int num_requests;
} list_room;

/* Where a walk over a view's segments stands. */
typedef struct {
  int segment;
  int64_t start; /* first token of the segment */
} walk;

static int64_t offset_in_segment(const kvedge_cache_view *view, walk *at, int64_t token) {
  while (token >= at->start + view->segments[at->segment].num_tokens)
    at->start += view->segments[at->segment++].num_tokens;
  return token - at->start;
}

static kvedge_segment segment_at(const kvedge_cache_view *view, const walk *at, int64_t offset, int64_t num_tokens) {
  kvedge_segment segment = {.num_tokens = num_tokens};
  for (int s = 0; s < SIDES; s++) {
    const kvedge_view_side *side = &view->side[s];
    const kvedge_segment *from = &view->segments[at->segment];
    const int64_t token = offset + (at->segment == 0 ? side->first : 0);
    segment.rows[s] = from->rows[s] + kvedge_row_of(side->format, token) * side->row_stride;
    segment.scales[s] = from->scales[s] + offset * side->scale_token_stride;
  }
  return segment;
}

/* A view of the tokens of a list, which count from the view's first. */
static void view_rows(const kvedge_cache_view *all, token_list list, int64_t first, list_room *room,
                      kvedge_cache_view *view) {
  walk at = {0};
  int n = 0, whole = 1;
  for (int64_t i = 0, count; i < list.count; i += count) { /* runs of adjacent tokens in a segment */
    const int64_t offset = offset_in_segment(all, &at, list.tokens[i] - first);
    const int64_t left = all->segments[at.segment].num_tokens - offset;
    for (count = 1; i + count < list.count && count < left && list.tokens[i + count] == list.tokens[i] + count;)
      count++;
    room->segments[n++] = segment_at(all, &at, offset, count);
    whole &= count % KVEDGE_BLOCK == 0 || i + count == list.count;
  }
  view->num_segments = n, view->len = list.count, view->gathers = !whole;
}

/* The same of formats of runs: of whole runs, as a mask says whose tokens are of the list. */
static void view_runs(const kvedge_cache_view *all, token_list list, int64_t first, list_room *room,
                      kvedge_cache_view *view, kvedge_attention_options *options) {
  const int in_first = all->side[KEYS].first | all->side[VALUES].first; /* both are the same, or one is 0 */
  walk at = {0};
  int64_t run = -1, len = 0;
  int segment = -1, n = 0;
  for (int64_t i = 0; i < list.count; i++) {
    const int64_t offset = offset_in_segment(all, &at, list.tokens[i] - first);
    const int64_t place = offset + (at.segment == 0 ? in_first : 0); /* from the first run's start on */
    if (at.segment != segment || place / KVEDGE_RUN != run) {
      segment = at.segment, run = place / KVEDGE_RUN;
      const int64_t start = run * KVEDGE_RUN - (place - offset); /* of the run, as an offset; perhaps negative */
      const int64_t left = all->segments[segment].num_tokens - start;
      const int64_t tokens = left < KVEDGE_RUN ? left : KVEDGE_RUN;
      kvedge_segment of_run = {.num_tokens = tokens};
      for (int s = 0; s < SIDES; s++) {
        const kvedge_view_side *side = &all->side[s];
        const int64_t row = start + (segment == 0 ? side->first : 0);
        of_run.rows[s] = all->segments[segment].rows[s] + kvedge_row_of(side->format, row) * side->row_stride;
        of_run.scales[s] = all->segments[segment].scales[s] + start * side->scale_token_stride;
      }
      room->segments[n++] = of_run;
      memset(room->mask + len, 0, (size_t)tokens);
      len += tokens;
    }
    room->mask[len - room->segments[n - 1].num_tokens + place % KVEDGE_RUN] = 1;
  }
  view->side[KEYS].first = view->side[VALUES].first = 0;
  view->num_segments = n, view->len = len;
  options->mask = room->mask, options->mask_strides[0] = options->mask_strides[1] = 0, options->mask_strides[2] = 1;
  room->mask += len;
}

static int has_runs(const kvedge_cache_view *view) {
  return kvedge_is_of_runs(view->side[KEYS].format) || kvedge_is_of_runs(view->side[VALUES].format);
}

/* Rows of the view are gathered: their strides are those of what is gathered. */
static void take_gathered_strides(kvedge_cache_view *view) {
  for (int s = 0; s < SIDES; s++) {
    kvedge_view_side *side = &view->side[s];
    for (int i = 0; i < view->num_segments; i++) {
      kvedge_segment *segment = (kvedge_segment *)&view->segments[i];
      segment->rows[s] += side->first_row, segment->scales[s] += side->first_scale;
    }
    side->first_row = side->first_scale = 0;
    view->from_row_stride[s] = side->row_stride, view->from_scale_stride[s] = side->scale_token_stride;
    side->row_stride = view->num_kv_heads * side->head_stride;
    side->scale_token_stride = side->scales_in_rows ? side->row_stride : view->num_kv_heads * side->scale_head_stride;
  }
}

/* ---- Requests ----------------------------------------------------------------------------------- */

/* Query heads head..head+num_heads-1 of rows row..row+num_rows-1 of a part, without lists. */
static kvedge_request cut_request(const kvedge_request *part, int64_t row, int64_t num_rows, int head, int num_heads,
                                  kvedge_attention_options *options) {
  kvedge_request r = *part;
  const int64_t at = row * part->num_heads + head;
  *options = *part->options;
  options->tokens = NULL;
  options->num_tokens = 0, options->first_row = -1;
  if (options->sink_logits) options->sink_logits += head;
  r.options = options;
  r.num_heads = num_heads, r.num_rows = num_rows;
  r.first_position += row;
  r.query = kvedge_array_from(&part->query, row, head);
  r.out = kvedge_array_from(&part->out, row, head);
  r.lse = part->lse ? part->lse + at : NULL;
  r.log_sums = part->log_sums ? part->log_sums + at : NULL;
  r.view.num_kv_heads = part->view.num_kv_heads * num_heads / part->num_heads;
  kvedge_move_kv_heads(&r.view, part->view.num_kv_heads * head / part->num_heads);
  return r;
}

/* A row reads no token of a part. */
static void write_nothing(const kvedge_request *r) {
  for (int h = 0; h < r->num_heads; h++) {
    const size_t bytes = (size_t)r->view.side[VALUES].shape.dim * sizeof(float);
    memset(kvedge_array_at(&r->out, 0, h), 0, bytes);
    r->log_sums[h] = r->options->sink_logits ? (double)r->options->sink_logits[h] : -INFINITY;
  }
}

/* Adds the requests of a row's list for the parts that it has tokens of. */
static void add_list(const kvedge_request *parts, int num_parts, int64_t row, int head, list_room *room) {
  const kvedge_attention_options *o = parts->options;
  const int of_list = parts->num_heads / o->token_heads;
  token_list all = list_of(o, row, head);
  int64_t first = 0; /* position of the part's first token */
  for (int p = 0; p < num_parts; first += parts[p++].view.len) {
    token_list own = {.tokens = all.tokens};
    while (own.count < all.count && own.tokens[own.count] < first + parts[p].view.len) own.count++;
    kvedge_request r = cut_request(&parts[p], row, 1, head * of_list, of_list, room->options);
    if (own.count == 0) {
      write_nothing(&r); /* there are several parts, so there are log_sums */
      continue;
    }
    all.tokens += own.count, all.count -= own.count;
    room->options->causal = 0;
    if (has_runs(&parts[p].view)) view_runs(&parts[p].view, own, first, room, &r.view, room->options);
    else view_rows(&parts[p].view, own, first, room, &r.view);
    r.view.segments = room->segments;
    if (r.view.gathers) take_gathered_strides(&r.view);
    r.first_position = r.view.len - 1;
    room->segments += own.count;
    room->options++;
    room->requests[room->num_requests++] = r;
  }
}

/* Has each list of a row so many of the tokens up to its own? */
static int reads_percent(const kvedge_attention_options *o, int64_t row, int64_t position, int percent) {
  for (int h = 0; h < o->token_heads; h++)
    if (100 * list_of(o, row, h).count < percent * (position + 1)) return 0;
  return 1;
}

/* The parts of a call follow one another from position 0 on, and its lists are right. */
static int lists_are_valid(const kvedge_request *parts, int num_parts) {
  const kvedge_attention_options *o = parts->options;
  int64_t first = 0;
  for (int p = 0; p < num_parts; first += parts[p++].view.len)
    if (parts[0].first_position - parts[p].first_position != first) return 0;
  if (o->token_width < 1 || (o->token_heads != 1 && o->token_heads != parts->view.num_kv_heads)) return 0;
  for (int64_t row = 0; row < parts->num_rows; row++)
    for (int h = 0; h < o->token_heads; h++)
      if (!is_list(o, row, h, parts->first_position + row)) return 0;
  return parts->first_position + parts->num_rows <= first;
}

/* Runs the lists of rows first..stop-1, which have `tokens` in all. */
static kvedge_status run_batch(const kvedge_request *parts, int num_parts, int64_t first, int64_t stop, int64_t tokens,
                               int num_threads) {
  const size_t most = (size_t)(stop - first) * (size_t)parts->options->token_heads * (size_t)num_parts;
  const size_t requests = kvedge_align(most * sizeof(kvedge_request)),
               options = kvedge_align(most * sizeof(kvedge_attention_options)),
               segments = kvedge_align((size_t)tokens * sizeof(kvedge_segment));
  int runs = 0;
  for (int p = 0; p < num_parts; p++) runs |= has_runs(&parts[p].view);
  char *memory = malloc(requests + options + segments + (runs ? (size_t)tokens * KVEDGE_RUN : 0));
  if (!memory) return KVEDGE_ERROR_MEMORY;
  list_room room = {.requests = (kvedge_request *)memory,
                    .options = (kvedge_attention_options *)(memory + requests),
                    .segments = (kvedge_segment *)(memory + requests + options),
                    .mask = (uint8_t *)(memory + requests + options + segments)};
  const kvedge_request *all = room.requests;
  for (int64_t row = first; row < stop; row++)
    for (int h = 0; h < parts->options->token_heads; h++) add_list(parts, num_parts, row, h, &room);
  const kvedge_status status = kvedge_run_requests(all, room.num_requests, num_threads);
  free(memory);
  return status;
}

/* Runs rows first..stop-1 without lists; with `mask`, (rows, mask_row) by position, under it. */
static kvedge_status run_dense(const kvedge_request *parts, int num_parts, int64_t first, int64_t stop,
                               const uint8_t *mask, int64_t mask_row, int num_threads) {
  kvedge_request requests[4];
  kvedge_attention_options options[4];
  kvedge_status status = KVEDGE_OK;
  int64_t position = 0; /* of a part's first token */
  for (int p = 0; p < num_parts && status == KVEDGE_OK; p += 4) {
    int n = 0;
    for (; n < 4 && p + n < num_parts; position += parts[p + n++].view.len) {
      requests[n] = cut_request(&parts[p + n], first, stop - first, 0, parts->num_heads, &options[n]);
      if (!mask) continue;
      options[n].mask = mask + position;
      options[n].mask_strides[0] = 0, options[n].mask_strides[1] = mask_row, options[n].mask_strides[2] = 1;
    }
    status = kvedge_run_requests(requests, n, num_threads);
  }
  return status;
}

/* Runs the lists of rows first..stop-1, of all heads, as a mask. */
static kvedge_status run_masked(const kvedge_request *parts, int num_parts, int64_t first, int64_t stop,
                                int num_threads) {
  const int64_t mask_row = parts->first_position + stop;
  uint8_t *mask = calloc((size_t)(stop - first), (size_t)mask_row);
  if (!mask) return KVEDGE_ERROR_MEMORY;
  for (int64_t row = first; row < stop; row++) {
    const token_list list = list_of(parts->options, row, 0);
    for (int64_t i = 0; i < list.count; i++) mask[(row - first) * mask_row + list.tokens[i]] = 1;
  }
  const kvedge_status status = run_dense(parts, num_parts, first, stop, mask, mask_row, num_threads);
  free(mask);
  return status;
}

kvedge_status kvedge_run_lists(const kvedge_request *parts, int num_parts, int num_threads) {
  const kvedge_attention_options *o = parts->options;
  const int64_t at = parts->first_position;
  int64_t row = 0;
  if (!lists_are_valid(parts, num_parts)) return KVEDGE_ERROR_ARGUMENT;
  while (row < parts->num_rows && reads_percent(o, row, at + row, 100)) row++;
  kvedge_status status = row > 0 ? run_dense(parts, num_parts, 0, row, NULL, 0, num_threads) : KVEDGE_OK;
  for (int64_t stop = row; row < parts->num_rows && status == KVEDGE_OK; row = stop) {
    int64_t tokens = 0;
    while (o->token_heads == 1 && stop < parts->num_rows && stop - row < BATCH_ROWS &&
           reads_percent(o, stop, at + stop, DENSE_PERCENT))
      stop++;
    if (stop - row >= DENSE_ROWS) {
      status = run_masked(parts, num_parts, row, stop, num_threads);
      continue;
    }
    stop = row;
    while (stop < parts->num_rows && stop - row < BATCH_ROWS && (tokens < BATCH_TOKENS || stop == row)) {
      for (int h = 0; h < o->token_heads; h++) tokens += list_of(o, stop, h).count;
      stop++;
    }
    status = run_batch(parts, num_parts, row, stop, tokens, num_threads);
  }
  return status;
}
