/* Products of a head tile: scores of its queries with the keys, weighted sums of its values. By
 * the cells that serve the call, all groups of channels at once or one by one, or block by block of 16 decoded
 * tokens where a path has none for the format.
 */
#include <math.h>

#include "attention/tile.h"

/* ---- Scales ---------------------------------------------------------------------------------- */

/* A factor of what a call, or a row, sees may take scales of tokens that it does not see out of range. */
static void clamp_hidden(float *scales, int num_columns, int num_tokens) {
  for (int c = 0; c < num_columns; c++, scales += SCALES)
    for (int t = 0; t < num_tokens; t++)
      if (scales[t] > 0x1p61f) scales[t] = 0x1p61f;
}

/* Columns of a tile's scales, `at` bytes from where those of a token start: `n` side by side. */
static void take_columns(const kvedge_attention *a, const token_tile *tile, int s, ptrdiff_t at, int n, float *out) {
  const kvedge_view_side *side = &a->view.side[s];
  for (int b = 0, blocks; b < tile->num_blocks[s]; b += blocks) {
    const int first = b * KVEDGE_BLOCK;
    int tokens = tile->num_tokens - first;
    blocks = tile->in_order ? tile->num_blocks[s] : 1;
    if (tokens > blocks * KVEDGE_BLOCK) tokens = blocks * KVEDGE_BLOCK;
    a->kernels->rows->transpose_scales(tile->scales[s][b] + at, side->shape.scale_type, side->scale_token_stride,
                                       tokens, n, a->factor[s], out + first, SCALES);
  }
}

/* Scales of one head's keys, or of its values, in a tile: of `count` groups from one on, column by column. */
static const float *tile_scales(const kvedge_attention *a, const token_tile *tile, int s, int kv_head, int group,
                                int count, scale_columns *columns) {
  const kvedge_view_side *side = &a->view.side[s];
  const int num_groups = side->shape.num_groups, column = kv_head * num_groups + group;
  if (count <= columns->count && column >= columns->first && column + count <= columns->first + columns->count)
    return columns->scale[column - columns->first];
  const int left = a->view.num_kv_heads * num_groups - column,
            together = side->scales_in_rows ? 1 : KVEDGE_SCALE_COLUMNS;
  if (count < together) count = left < together ? left : together;
  for (int c = 0, n; c < count; c += n) {
    const int head = (column + c) / num_groups;
    const ptrdiff_t at = head * side->scale_head_stride + (column + c) % num_groups * side->scale_group_stride;
    n = count - c < together ? count - c : together;
    take_columns(a, tile, s, at, n, columns->scale[c]);
  }
  for (int t = tile->num_tokens; t % KVEDGE_BLOCK; t++)
    for (int c = 0; c < count; c++) columns->scale[c][t] = 0.0f;
  if (a->factor[s] > 1.0f) clamp_hidden(columns->scale[0], count, tile->num_tokens);
  columns->first = column, columns->count = count;
  return columns->scale[0];
}

/* ---- Rows of a head -------------------------------------------------------------------------- */

/* Some groups of channels of a head's keys, or of its values; those of several groups are of KVEDGE_GROUP channels. */
static kvedge_tile rows_of_groups(const kvedge_attention *a, const head_tile *h, int s, int group, int count,
                                  workspace *w) {
  const kvedge_view_side *side = &a->view.side[s];
  const int left = side->shape.dim - group * side->shape.group_size, all = count * side->shape.group_size;
  const ptrdiff_t start_bytes = group * side->group_stride;
  kvedge_tile rows = {.blocks = h->tile->rows[s],
                      .offset = h->kv_head * side->head_stride + start_bytes + side->format->codes_at,
                      .token_stride = side->row_stride,
                      .group_stride = side->group_stride,
                      .num_tokens = h->tile->num_tokens,
                      .dim = left < all ? left : all,
                      .factor = a->factor[s],
                      .bits = side->format->bits,
                      .codes = side->format->codes,
                      .first = h->tile->first[s]};
  if (h->prefetches) rows.next = (kvedge_prefetch){h->next[s], KVEDGE_BLOCK * start_bytes, h->next_in_order};
  if (side->shape.num_groups) {
    rows.scales = tile_scales(a, h->tile, s, h->kv_head, group, count, &w->scales[s]);
    rows.scale_stride = SCALES;
  }
  return rows;
}

/* Where a path has no kernels for a format: block b of a head's rows as float32, in `room`. It
 * lies where cells have their working memory, which for them begins after it. */
typedef struct {
  float values[KVEDGE_BLOCK * KVEDGE_MAX_HEAD_DIM];
  const char *start;
} decoded_block;

static kvedge_tile decode_block(const kvedge_attention *a, const head_tile *h, int s, int b, decoded_block *room) {
  const kvedge_view_side *side = &a->view.side[s];
  const int dim = side->shape.dim, left = h->tile->num_tokens - b * KVEDGE_BLOCK;
  const int num_tokens = left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK;
  const char *rows = h->tile->rows[s][b] + h->kv_head * side->head_stride;
  const char *scales = h->tile->scales[s][b] + h->kv_head * side->scale_head_stride;
  for (int t = 0; t < num_tokens; t++, rows += side->row_stride, scales += side->scale_token_stride)
    side->format->decode(&side->shape, rows, scales, 1, room->values + t * dim);
  for (ptrdiff_t at = 0; h->prefetches && at < KVEDGE_BLOCK * side->head_stride; at += 64)
    __builtin_prefetch(h->next[s][b] + at, 0, 2);
  room->start = (const char *)room->values;
  return (kvedge_tile){.blocks = &room->start,
                       .token_stride = dim * (ptrdiff_t)sizeof(float),
                       .num_tokens = num_tokens,
                       .dim = dim,
                       .factor = a->factor[s]};
}

/* ---- Minima of blocks ------------------------------------------------------------------------- */

/* What is added to all elements of a head's g-th block, token by token of a tile; 0 to the end of the last block. */
static void take_mins(const kvedge_attention *a, const head_tile *h, int s, int g, float mins[KVEDGE_TILE]) {
  const kvedge_view_side *side = &a->view.side[s];
  const ptrdiff_t of_block = h->kv_head * side->scale_head_stride + g * side->scale_group_stride;
  take_columns(a, h->tile, s, of_block + side->format->codes->mins_at, 1, mins);
  for (int t = h->tile->num_tokens; t % KVEDGE_BLOCK; t++) mins[t] = 0.0f;
}

static int has_mins(const kvedge_attention *a, int s) {
  const kvedge_block_codes *codes = a->view.side[s].format->codes;
  return codes && codes->mins_at;
}

/* Adds to scores what they are of a block's minimum: times the sum of the query's channels. */
static void add_mins_to_scores(const kvedge_attention *a, const head_tile *h, float *scores) {
  float mins[KVEDGE_TILE];
  for (int g = 0; g < a->num_groups; g++) {
    take_mins(a, h, KEYS, g, mins);
    for (int i = 0; i < h->count; i++) {
      const float sum = h->queries->sums[(kvedge_index_of(a, h) + (size_t)i) * (size_t)a->num_groups + (size_t)g];
      for (int t = 0; t < h->tile->num_tokens; t++) scores[i * KVEDGE_TILE + t] += sum * mins[t];
    }
  }
}

/* And to weighted sums: all channels of a block get the same. */
static void add_mins_to_sums(const kvedge_attention *a, const head_tile *h, const float *p, float *acc) {
  enum { LANES = KVEDGE_BLOCK };
  float mins[KVEDGE_TILE];
  for (int g = 0; g < a->view.side[VALUES].shape.num_groups; g++) {
    take_mins(a, h, VALUES, g, mins);
    for (int i = 0; i < h->count; i++) {
      float lane[LANES] = {0}, sum = 0.0f, *of_block = acc + i * a->acc_stride + g * KVEDGE_GROUP;
      for (int t = 0; t < h->tile->num_tokens; t += LANES) /* probabilities are 0 to the end of the last block */
        for (int j = 0; j < LANES; j++) lane[j] += p[i * KVEDGE_TILE + t + j] * mins[t + j];
      for (int j = 0; j < LANES; j++) sum += lane[j];
      for (int d = 0; d < KVEDGE_GROUP; d++) of_block[d] += sum;
    }
  }
}

/* ---- Scores ---------------------------------------------------------------------------------- */

/* The larger of `largest` and the magnitudes of x[start..stop-1]; in lanes, so that maxima need not wait for each other. */
static float largest_of(const float *x, int start, int stop, float largest) {
  enum { LANES = 8 };
  float lane[LANES] = {0};
  int t = start;
  for (; t + LANES <= stop; t += LANES)
    for (int j = 0; j < LANES; j++) lane[j] = fabsf(x[t + j]) > lane[j] ? fabsf(x[t + j]) : lane[j];
  for (; t < stop; t++) largest = fabsf(x[t]) > largest ? fabsf(x[t]) : largest;
  for (int j = 0; j < LANES; j++) largest = lane[j] > largest ? lane[j] : largest;
  return largest;
}

/* The largest of a tile's key scales that one query row of the KV head sees. What it does not see must not matter,
 * or results would depend on how a prompt is cut and on rows that are masked. */
static float largest_scale_seen(const kvedge_attention *a, const head_tile *h, int query_row, const float *scale) {
  const kvedge_attention_options *o = &a->options;
  int num_tokens = h->tile->num_tokens;
  if (!h->masking) return largest_of(scale, 0, num_tokens, 0.0f);
  int64_t row = h->block->first + query_row / a->heads_per_kv_head, token = h->tile->token;
  mask_range seen = kvedge_mask_range(a, row, token, num_tokens);
  float attended[KVEDGE_TILE];
  if (kvedge_has_mask(o)) {
    memcpy(attended, scale, (size_t)num_tokens * sizeof *scale);
    kvedge_clear_hidden(a, row, h->kv_head * a->heads_per_kv_head + query_row % a->heads_per_kv_head, token, num_tokens,
                        attended);
    scale = attended;
  }
  return largest_of(scale, 0, seen.sinks, largest_of(scale, seen.first, seen.stop, 0.0f));
}

/* Planes of query rows against `num_groups` groups of a tile: two where these move no logit by more than about
 * KVEDGE_LOGIT_ERROR, else three. A row's heads get the same, since a kernel call for each kind would unpack the keys
 * again. */
static void choose_planes(const kvedge_attention *a, const head_tile *h, const kvedge_tile *keys, int num_groups,
                          int *planes) {
  const float *error = h->queries->error + kvedge_index_of(a, h);
  const kvedge_block_codes *codes = a->view.side[KEYS].format->codes;
  /* Of what an error is with int8's, by the largest level. */
  const int largest_level = !codes ? 127 : codes->levels[0] < 0 ? -codes->levels[0] : codes->levels[15] + codes->fifth;
  const float share = (float)largest_level / 127.0f;
  int plain = 1; /* do two suffice even with the largest scale of the layer? */
  float bound = a->view.side[KEYS].bound * a->factor[KEYS] * share;
  for (int j = 0; j < h->count; j++) plain &= error[j] * bound <= KVEDGE_LOGIT_ERROR;
  if (a->planes[KEYS] || plain) {
    for (int j = 0; j < h->count; j++) planes[j] = a->planes[KEYS] ? a->planes[KEYS] : 2;
    return;
  }
  int alike = !h->masking || !kvedge_has_mask(&a->options); /* do a row's heads see the same? */
  float largest = 0.0f;
  for (int i = 0, next; i < h->count; i = next) {
    next = i - (h->first + i) % a->heads_per_kv_head + a->heads_per_kv_head;
    if (next > h->count) next = h->count;
    float most = 0.0f;
    for (int j = i; j < next; j++) {
      if (!alike || (j == i && (i == 0 || h->masking))) {
        largest = 0.0f;
        for (int g = 0; g < num_groups; g++) {
          const float of_group = largest_scale_seen(a, h, h->first + j, keys->scales + g * keys->scale_stride);
          largest = of_group > largest ? of_group : largest;
        }
      }
      most = error[j] * largest * share > most ? error[j] * largest * share : most;
    }
    for (int j = i; j < next; j++) planes[j] = most > KVEDGE_LOGIT_ERROR ? 3 : 2;
  }
}

/* Some groups of channels of query rows i..i+count-1 of a head tile. */
static kvedge_query query_of_groups(const kvedge_attention *a, const head_tile *h, int group, int num_groups, int i,
                                    int count, workspace *w) {
  const kvedge_queries *queries = h->queries;
  const int left = a->view.side[KEYS].shape.dim - group * a->group_size, all = num_groups * a->group_size;
  const size_t pad = (size_t)a->group_pad;
  const size_t at = (kvedge_index_of(a, h) + (size_t)i) * (size_t)a->num_groups + (size_t)group;
  kvedge_query q = {.num_queries = count,
                    .stride = (ptrdiff_t)pad * a->num_groups,
                    .group_stride = (ptrdiff_t)pad,
                    .scale_stride = a->num_groups,
                    .dim = left < all ? left : all,
                    .scratch = w->scratch};
  if (queries->quantized) {
    q.quantized = queries->quantized + at * pad * KVEDGE_QUANTIZED_BYTES;
    q.scale = queries->scales + at;
    q.offsets = queries->offsets + at * 4;
  } else {
    q.values = queries->values + at * pad;
  }
  if (kvedge_is_of_runs(a->view.side[KEYS].format)) q.planes = a->planes[KEYS], q.error = queries->error + at;
  return q;
}

static void decoded_scores(const kvedge_attention *a, const head_tile *h, float *scores, workspace *w) {
  kvedge_query q = query_of_groups(a, h, 0, 1, 0, h->count, w);
  decoded_block *room = kvedge_take_scratch(&q.scratch, sizeof *room);
  for (int b = 0; b < h->tile->num_blocks[KEYS]; b++) {
    const kvedge_tile keys = decode_block(a, h, KEYS, b, room);
    a->cells[KEYS]->scores(&q, &keys, scores + b * KVEDGE_BLOCK, 0);
  }
}

void kvedge_head_scores(const kvedge_attention *a, const head_tile *h, workspace *w) {
  float *scores = w->scores + h->at * KVEDGE_TILE;
  if (a->decodes[KEYS]) {
    decoded_scores(a, h, scores, w);
    return;
  }
  const int together = a->takes_groups[KEYS] ? a->num_groups : 1; /* groups that a kernel call serves */
  for (int g = 0; g < a->num_groups; g += together) {
    kvedge_tile keys = rows_of_groups(a, h, KEYS, g, together, w);
    int planes[KVEDGE_QUERY_ROWS];
    if (h->queries->quantized) choose_planes(a, h, &keys, together, planes);
    for (int i = 0, next; i < h->count; i = next) { /* query rows side by side with as many planes */
      next = h->queries->quantized ? i + 1 : h->count;
      while (next < h->count && planes[next] == planes[i]) next++;
      kvedge_query q = query_of_groups(a, h, g, together, i, next - i, w);
      if (h->queries->quantized) q.planes = planes[i];
      if (a->takes_groups[KEYS]) a->cells[KEYS]->scores_of_groups(&q, &keys, scores + i * KVEDGE_TILE);
      else a->cells[KEYS]->scores(&q, &keys, scores + i * KVEDGE_TILE, g > 0);
      keys.next.blocks = NULL;
    }
  }
  if (has_mins(a, KEYS)) add_mins_to_scores(a, h, scores);
}

/* ---- Weighted sums --------------------------------------------------------------------------- */

/* Probabilities of a tile, and how exact their weights are. Two planes leave an error of up to 1e-4 of the output. So
 * the start of a context, of which chunks and the whole are to agree to the last digits, has three, or what is as good;
 * and rows of few channels, whose outputs may be small differences of large sums, have three. The position decides, and
 * nothing that depends on how a prompt is cut. */
static kvedge_probabilities probabilities_of(const kvedge_attention *a, const head_tile *h, int num_queries,
                                             const float *p, workspace *w) {
  enum { FIRST_TOKENS = 1024, FEW_CHANNELS = 64 };
  const int few = a->view.side[VALUES].shape.dim < FEW_CHANNELS, chosen = a->planes[VALUES];
  return (kvedge_probabilities){.num_queries = num_queries,
                                .planes = chosen                                 ? chosen
                                          : few || h->tile->token < FIRST_TOKENS ? 3
                                                                                 : 2,
                                .by_32 = !chosen && !few,
                                .p = p,
                                .scratch = w->scratch};
}

/* Where the factor of values that come without scales (also: decoded ones) is above 1, probabilities take it: values
 * that are hidden may be too large for it. */
static void take_factor(const kvedge_attention *a, const head_tile *h, float *p) {
  for (int i = 0; i < h->count; i++)
    for (int t = 0; t < h->tile->num_tokens; t++) p[i * KVEDGE_TILE + t] *= a->factor[VALUES];
}

void kvedge_weighted_sum(const kvedge_attention *a, const head_tile *h, float *probabilities, const float *rescale,
                         workspace *w, kvedge_partial *partial) {
  static const float ones[KVEDGE_QUERY_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  const kvedge_row_shape *shape = &a->view.side[VALUES].shape;
  const int takes_factor = (shape->num_groups == 0 || a->decodes[VALUES]) && a->factor[VALUES] > 1.0f;
  kvedge_probabilities p = probabilities_of(a, h, h->count, probabilities, w);
  kvedge_accumulators to = {
      .acc = partial->acc + kvedge_index_of(a, h) * (size_t)a->acc_stride, .stride = a->acc_stride, .rescale = rescale};
  if (takes_factor) take_factor(a, h, probabilities);
  if (a->decodes[VALUES]) {
    decoded_block *room = kvedge_take_scratch(&p.scratch, sizeof *room);
    for (int b = 0; b < h->tile->num_blocks[VALUES]; b++, p.p += KVEDGE_BLOCK, to.rescale = ones) {
      kvedge_tile values = decode_block(a, h, VALUES, b, room);
      if (takes_factor) values.factor = 1.0f;
      a->cells[VALUES]->weighted_sum(&p, &values, &to);
    }
    return;
  }
  const int num_groups = shape->num_groups ? shape->num_groups : 1, together = a->takes_groups[VALUES] ? num_groups : 1;
  for (int g = 0; g < num_groups; g += together, to.acc += shape->group_size) {
    kvedge_tile values = rows_of_groups(a, h, VALUES, g, together, w);
    if (takes_factor) values.factor = 1.0f;
    if (a->takes_groups[VALUES]) a->cells[VALUES]->weighted_sum_of_groups(&p, &values, &to);
    else a->cells[VALUES]->weighted_sum(&p, &values, &to);
  }
  if (has_mins(a, VALUES))
    add_mins_to_sums(a, h, probabilities, partial->acc + kvedge_index_of(a, h) * (size_t)a->acc_stride);
}

/* ---- A head batch ----------------------------------------------------------------------------
 *
 * A decoded token has few queries for a head. What comes with each call of softmax is shared by those of several heads
 * side by side; and where a head has one query, some paths have kernels for the scores and sums of several, too. */

int kvedge_scores_of_batch(const kvedge_attention *a, const head_tile *heads, workspace *w) {
  const kvedge_tile keys = rows_of_groups(a, &heads[0], KEYS, 0, 1, w);
  kvedge_query q = query_of_groups(a, &heads[0], 0, 1, 0, KVEDGE_HEADS, w);
  for (int j = 0; j < KVEDGE_HEADS; j++) {
    int planes;
    kvedge_tile of_head = keys;
    of_head.scales += j * keys.scale_stride;
    choose_planes(a, &heads[j], &of_head, 1, &planes);
    if (j > 0 && planes != q.planes) return 0;
    q.planes = planes;
  }
  a->cells[KEYS]->scores_of_heads(&q, &keys, w->scores, 0);
  return 1;
}

void kvedge_weighted_sum_of_batch(const kvedge_attention *a, const head_tile *heads, workspace *w,
                                  kvedge_partial *partial) {
  const kvedge_tile values = rows_of_groups(a, &heads[0], VALUES, 0, 1, w);
  const kvedge_probabilities p = probabilities_of(a, &heads[0], KVEDGE_HEADS, w->scores, w);
  const kvedge_accumulators to = {.acc = partial->acc + kvedge_index_of(a, &heads[0]) * (size_t)a->acc_stride,
                                  .stride = values.dim,
                                  .rescale = w->rescale};
  a->cells[VALUES]->weighted_sum_of_heads(&p, &values, &to);
}
