/* What attention sees of a cache: a layer, or tokens in the blocks of a pool, as a view,
 * segments of equal strides; and which of its tokens query rows attend to. */
#include "attention/tile.h"

/* ---- A layer ---------------------------------------------------------------------------------- */

/* Where the scales of row `row` begin: in the row itself, or apart. */
static const char *scales_of(const kvedge_side *side, int64_t row) {
  return side->format->group_bytes ? kvedge_codes_at(side, row) : kvedge_scales_at(side, row);
}

static kvedge_view_side view_side(const kvedge_side *side, int64_t first, float bound) {
  const int row_tokens = side->format->row_tokens, block_tokens = row_tokens > KVEDGE_BLOCK ? row_tokens : KVEDGE_BLOCK;
  const ptrdiff_t heads = side->num_kv_heads, row = (ptrdiff_t)side->row_bytes,
                  scales = (ptrdiff_t)side->scale_row_bytes;
  kvedge_view_side of = {.format = side->format,
                         .shape = side->shape,
                         .block_tokens = block_tokens,
                         .block_rows = block_tokens / row_tokens,
                         .row_stride = row * heads,
                         .head_stride = row,
                         .token_bytes = row * heads / row_tokens,
                         .group_stride = (ptrdiff_t)side->shape.group_size * side->format->bits / 8,
                         .scale_token_stride = scales * heads,
                         .scale_head_stride = scales,
                         .scale_group_stride = (ptrdiff_t)kvedge_scale_size(side->shape.scale_type),
                         .first = kvedge_place_in_row(side->format, first),
                         .bound = bound};
  if (side->format->group_bytes) kvedge_find_scales_in_rows(&of);
  return of;
}

kvedge_cache_view kvedge_layer_view(const kvedge_layer *layer, const kvedge_attention_options *options,
                                    kvedge_segment *segment) {
  int64_t row, len = kvedge_layer_range(layer, &row);
  if (options && options->num_tokens) {
    const int64_t stop = row + len;
    if (options->first_row >= 0) row = options->first_row < stop ? options->first_row : stop;
    len = options->num_tokens > 0 && options->num_tokens <= stop - row ? options->num_tokens : 0; /* 0: refused */
  }
  *segment = (kvedge_segment){
      .rows = {kvedge_codes_at(&layer->keys, row), kvedge_codes_at(&layer->values, row)},
      .scales = {scales_of(&layer->keys,       row), scales_of(&layer->values,       row)},
      .num_tokens = len
  };
  return (kvedge_cache_view){
      .side = {view_side(&layer->keys, row, atomic_load_explicit(&layer->key_bound, memory_order_relaxed)),
               view_side(&layer->values, row, atomic_load_explicit(&layer->value_bound, memory_order_relaxed))},
      .num_kv_heads = layer->config.num_kv_heads,
      .key_offset = layer->keys.offset,
      .key_scale = layer->keys.scale,
      .values_rotated = layer->values.rotated,
      .len = len,
      .num_segments = 1,
      .segments = segment
  };
}

void kvedge_cut_view(kvedge_cache_view *view, kvedge_segment *segments, int64_t start) {
  view->len -= start;
  while (view->num_segments > 1 && start >= segments->num_tokens) {
    start -= segments->num_tokens;
    segments++, view->num_segments--;
    view->side[KEYS].first = view->side[VALUES].first = 0;
  }
  view->segments = segments;
  segments->num_tokens -= start;
  for (int s = 0; s < SIDES; s++) {
    kvedge_view_side *side = &view->side[s];
    const int64_t token = side->first + start;
    segments->rows[s] += kvedge_row_of(side->format, token) * side->row_stride;
    segments->scales[s] += start * side->scale_token_stride;
    side->first = kvedge_place_in_row(side->format, token);
  }
}

/* ---- Blocks of a pool: a segment for each, or for several that are neighbours ----------------- */

int kvedge_view_blocks(const kvedge_layer *pool, int64_t block_size, const int32_t *blocks, int64_t first_row,
                       int64_t num_tokens, kvedge_segment *segments, kvedge_cache_view *view) {
  const int64_t num_blocks = pool->config.capacity / block_size, stop = first_row + num_tokens;
  int n = 0;
  for (int64_t i = first_row / block_size; i * block_size < stop; i++) {
    const int64_t block = blocks[i], left = stop - i * block_size;
    if (block < 0 || block >= num_blocks) return 0;
    const int64_t tokens = left < block_size ? left : block_size, row = block * block_size;
    if (n > 0 && block == (int64_t)blocks[i - 1] + 1) {
      segments[n - 1].num_tokens += tokens;
      continue;
    }
    segments[n++] = (kvedge_segment){
        .rows = {kvedge_codes_at(&pool->keys, row), kvedge_codes_at(&pool->values, row)},
        .scales = {scales_of(&pool->keys,       row), scales_of(&pool->values,       row)},
        .num_tokens = tokens
    };
  }
  kvedge_segment unused;
  *view = kvedge_layer_view(pool, NULL, &unused);
  const int64_t before = first_row % block_size; /* rows of the first block */
  view->len = before + num_tokens;
  view->segments = segments;
  view->num_segments = n;
  kvedge_cut_view(view, segments, before);
  return 1;
}

/* ---- Attended ranges -------------------------------------------------------------------------- */

kvedge_attended kvedge_attended_tokens(const kvedge_attention *a, const kvedge_row_block *block) {
  const kvedge_attention_options *o = &a->options;
  const int64_t position = a->first_position + block->first;
  kvedge_attended attended = {.sinks = 0, .first = 0, .stop = a->view.len};
  if (o->causal && position + block->count < a->view.len) attended.stop = position + block->count;
  if (attended.stop < 0) attended.stop = 0; /* all rows are before the view */
  if (o->window) {
    if (position - o->window + 1 > 0) attended.first = (position - o->window + 1) / a->tile * a->tile;
    if (attended.first > attended.stop) attended.first = attended.stop; /* the window is behind the view */
    attended.sinks = o->sink_tokens < attended.first ? o->sink_tokens : attended.first;
  }
  return attended;
}

static int within(int64_t token, int num_tokens) {
  return token < 0 ? 0 : token > num_tokens ? num_tokens : (int)token;
}

mask_range kvedge_mask_range(const kvedge_attention *a, int64_t row, int64_t token, int num_tokens) {
  const kvedge_attention_options *o = &a->options;
  int64_t position = a->first_position + row;
  mask_range s = {.stop = num_tokens};
  if (o->causal) s.stop = within(position + 1 - token, num_tokens);
  if (o->window) {
    s.first = within(position - o->window + 1 - token, s.stop);
    s.sinks = within(o->sink_tokens - token, s.first);
  }
  return s;
}
