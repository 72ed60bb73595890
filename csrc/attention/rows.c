/* Keys and values in memory of others, as attention sees them. */
#include <math.h>

#include "attention/parts.h"

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
    default:
      side->bound = 65504.0f;
      side->format = kvedge_format_of_blocks(rows->format);
      return side->format != NULL;
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

static int64_t tokens_of(const kvedge_rows_cache *rows) {
  int64_t len = 0;
  for (int i = 0; i < rows->num_segments; i++) {
    const kvedge_rows_segment *segment = &rows->segments[i];
    if (segment->num_tokens < 1 || segment->num_tokens > KVEDGE_MOST_TOKENS - len) return 0;
    len += segment->num_tokens;
  }
  return len;
}

enum { MOST_HEADS = 65536 };

/* The view of rows, without segments; *apart: heads of a side do not lie side by side. 0: they are not valid. */
static int view_of_rows(const kvedge_rows_cache *rows, kvedge_cache_view *view, int *apart) {
  *apart = 0;
  *view = (kvedge_cache_view){.num_kv_heads = rows->num_kv_heads, .num_segments = rows->num_segments};
  if (rows->num_kv_heads < 1 || rows->num_segments < 1 || !rows->segments) return 0;
  const kvedge_rows *of_side[SIDES] = {&rows->keys, &rows->values};
  for (int s = 0; s < SIDES; s++)
    if (!side_of_rows(of_side[s], rows->num_kv_heads, &view->side[s], apart, &view->bounds_unknown)) return 0;
  view->len = tokens_of(rows);
  return view->len > 0 && rows->num_behind >= 0 && rows->num_behind <= KVEDGE_MOST_TOKENS - view->len;
}

int kvedge_requests_of_rows(const kvedge_rows_cache *rows, int num_heads) {
  kvedge_cache_view view;
  int apart;
  if (!view_of_rows(rows, &view, &apart) || num_heads > MOST_HEADS || num_heads % rows->num_kv_heads) return 0;
  return apart ? rows->num_kv_heads : 1;
}

kvedge_status kvedge_request_rows(kvedge_request *r, const kvedge_rows_cache *rows, int64_t num_tokens,
                                  kvedge_segment *segments) {
  const kvedge_attention_options *o = r->options;
  int apart;
  if (o && (o->num_tokens || o->start)) return KVEDGE_ERROR_ARGUMENT;
  if (!view_of_rows(rows, &r->view, &apart)) return KVEDGE_ERROR_ARGUMENT;
  const ptrdiff_t of_key = alignment_of(r->view.side[KEYS].format),
                  of_value = alignment_of(r->view.side[VALUES].format);
  for (int i = 0; segments && i < rows->num_segments; i++) {
    const kvedge_rows_segment *at = &rows->segments[i];
    if (!at->keys || !is_multiple(of_key, (uintptr_t)at->keys)) return KVEDGE_ERROR_ARGUMENT;
    if (!at->values || !is_multiple(of_value, (uintptr_t)at->values)) return KVEDGE_ERROR_ARGUMENT;
    segments[i] = (kvedge_segment){
        .rows = {at->keys, at->values},
          .scales = {at->keys, at->values},
          .num_tokens = at->num_tokens
    };
  }
  r->view.segments = segments;
  r->first_position = r->view.len + rows->num_behind - r->num_rows;
  kvedge_request of_all = *r; /* the calls that join */
  of_all.view.len = num_tokens;
  return kvedge_request_check(&of_all);
}
