/* One attention node (GGML_OP_FLASH_ATTN_EXT) on kvedge. The node is a custom one while its graph is computed: ggml calls
 * run_node on all of its threads, and has them meet after it. Thread 0 plans, all take slices, the last one looks at the
 * result. */
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { QUERY, KEYS, VALUES, MASK, SINKS };
enum { MOST_DIM = 1024 };

/* With vectors attention was faster on kvedge from the first visible cell on (9 to 32 heads of 64 and 128, one row, AVX2 and
 * AVX-512: 1.4 to 4 times); llama.cpp's caches show 256 cells at least. */
int64_t least_cells(void) { return strcmp(kvedge_isa_name(), "scalar") == 0 ? 512 : 32; }

/* ---- Which nodes ----------------------------------------------------------------------------- */

const row_type row_types[NUM_ROW_TYPES] = {
    {TYPE_F32,    "f32",    KVEDGE_FLOAT32,  1,  4 },
    {TYPE_F16,    "f16",    KVEDGE_FLOAT16,  1,  2 },
    {TYPE_BF16,   "bf16",   KVEDGE_BFLOAT16, 1,  2 },
    {TYPE_Q8_0,   "q8_0",   KVEDGE_Q8_0,     32, 34},
    {TYPE_Q4_0,   "q4_0",   KVEDGE_Q4_0,     32, 18},
    {TYPE_Q4_1,   "q4_1",   KVEDGE_Q4_1,     32, 20},
    {TYPE_Q5_0,   "q5_0",   KVEDGE_Q5_0,     32, 22},
    {TYPE_Q5_1,   "q5_1",   KVEDGE_Q5_1,     32, 24},
    {TYPE_IQ4_NL, "iq4_nl", KVEDGE_IQ4_NL,   32, 18}
};

const row_type *row_type_of(const tensor *t) {
  for (int i = 0; i < NUM_ROW_TYPES; i++)
    if (row_types[i].type == t->type) return &row_types[i];
  return NULL;
}

/* Are the elements of each row side by side, in whole blocks? */
static int has_whole_rows(const host *h, const tensor *t) {
  const int64_t elements = h->f.ggml_blck_size(t->type);
  const size_t bytes = h->f.ggml_type_size(t->type);
  return t->nb[0] == bytes && t->ne[0] % elements == 0 && t->nb[1] >= row_bytes_of(h, t->type, t->ne[0]);
}

static float param(const int32_t *params, int i) {
  float x;
  memcpy(&x, params + i, sizeof x);
  return x;
}

reason serves(const host *h, const tensor *node, int takes_all) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *v = node->src[VALUES], *mask = node->src[MASK],
               *sinks = node->src[SINKS];
  if (!q || !k || !v) return LEFT_SHAPE;
  for (int i = SINKS + 1; i < MAX_SOURCES; i++)
    if (node->src[i]) return LEFT_SHAPE;
  const tensor *sides[] = {k, v};
  for (int i = 0; i < 2; i++)
    if (!row_type_of(sides[i])) return LEFT_TYPE;
  if (node->type != TYPE_F32 || q->type != TYPE_F32) return LEFT_TYPE;
  if (q->nb[0] != 4 || node->nb[0] != 4 || k->ne[0] > MOST_DIM || v->ne[0] > MOST_DIM) return LEFT_SHAPE;
  for (int i = 1; i < 4; i++)
    if (q->nb[i] % 4 || node->nb[i] % 4) return LEFT_SHAPE;
  if (!has_whole_rows(h, k) || !has_whole_rows(h, v)) return LEFT_SHAPE;
  for (int i = 1; i < 4; i++)
    if (k->ne[i] != v->ne[i]) return LEFT_SHAPE;
  if (k->ne[1] < 1 || q->ne[1] < 1 || q->ne[2] % k->ne[2] || q->ne[3] % k->ne[3]) return LEFT_SHAPE;
  if (mask) {
    if (mask->type != TYPE_F16 || mask->nb[0] != 2 || mask->nb[1] % 2 || mask->nb[2] % 2) return LEFT_SHAPE;
    if (mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] || q->ne[3] % mask->ne[3]) return LEFT_SHAPE;
    if (mask->ne[2] != 1 && mask->ne[2] != q->ne[2]) return LEFT_SHAPE;
  }
  if (sinks && (sinks->type != TYPE_F32 || sinks->nb[0] != 4 || sinks->ne[0] != q->ne[2])) return LEFT_SHAPE;
  if (takes_all) return TAKEN;
  return k->ne[1] < least_cells() ? LEFT_SMALL : TAKEN;
}

/* ---- A node becomes calls ---------------------------------------------------------------------- */

/* What ggml multiplies a mask by, for each head. */
static int make_slopes(hooked_backend *s, int64_t num_heads, float max_bias) {
  if (!grow(&s->slopes, &s->room_slopes, (int)num_heads, sizeof *s->slopes)) return 0;
  const uint32_t power = 1u << (uint32_t)floor(log2((double)num_heads));
  const float m0 = powf(2.0f, -max_bias / (float)power), m1 = powf(2.0f, -(max_bias / 2.0f) / (float)power);
  for (int64_t h = 0; h < num_heads; h++)
    s->slopes[h] = h < power ? powf(m0, (float)(h + 1)) : powf(m1, (float)(2 * (h - power) + 1));
  return 1;
}

/* What the mask of a node shows, looked at once per graph; NULL: there is no memory. */
static const seen_cells *seen_by(hooked_backend *s, const tensor *node, int adds) {
  enum { MOST_MASKS = sizeof s->masks / sizeof *s->masks };
  const tensor *mask = node->src[MASK];
  const int64_t rows = node->src[QUERY]->ne[1], cells = node->src[KEYS]->ne[1];
  for (int i = 0; i < MOST_MASKS; i++) {
    const seen_cells *m = &s->masks[i];
    if (m->mask == mask && m->rows == rows && m->cells == cells && m->adds == adds) return m;
  }
  seen_cells *m = &s->masks[s->next_mask];
  s->next_mask = (s->next_mask + 1) % MOST_MASKS;
  return look_at_mask(m, mask, rows, cells, adds) ? m : NULL;
}

/* Query rows that see nothing: their output is 0. */
static void clear_rows(tensor *node, int64_t stream, const row_group *g) {
  for (int64_t row = g->first; row < g->first + g->count; row++)
    for (int64_t h = 0; h < node->ne[1]; h++)
      memset((char *)node->data + stream * (int64_t)node->nb[3] + row * (int64_t)node->nb[2] + h * (int64_t)node->nb[1],
             0, (size_t)node->ne[0] * sizeof(float));
}

/* A side of a node as kvedge has it. */
static side side_of(const tensor *t) {
  return (side){
      .rows = {.format = row_type_of(t)->format,
               .dim = (int)t->ne[0],
               .token_stride = (ptrdiff_t)t->nb[1],
               .head_stride = (ptrdiff_t)t->nb[2]},
      .data = t->data,
      .stream_stride = (ptrdiff_t)t->nb[3]
  };
}

/* ---- Exact rows beside stored ones ------------------------------------------------------------- */

/* What a group of query rows reads: stored rows in runs, and exact rows, which are the last of it where it is causal. */
typedef struct {
  const cell_run *runs; /* as the mask shows them */
  int num_runs;
  int64_t first, stop; /* of the last run: cells whose exact rows are read */
  int is_causal;       /* exact rows */
  int only_behind;     /* of a window: exact cells before `first` are not read */
} exact_range;

/* Which cells' exact rows a group may read: those that all its rows see, and those at its end, which are causal. */
static exact_range exact_range_of(const hooked_backend *s, const row_group *g, const cell_run *runs) {
  const cell_run last = runs[g->num_runs - 1];
  exact_range of = {.runs = runs, .num_runs = g->num_runs, .first = last.first, .stop = last.stop};
  if (g->count == 1 || g->biased) return of;
  int at = s->num_exact; /* the first of those that lie side by side up to the end */
  while (at > 0 && s->exact[at - 1].cell >= last.stop) at--;
  int64_t first = last.stop;
  while (at > 0 && s->exact[at - 1].cell == first - 1 && first > last.first) at--, first--;
  const int64_t seen_by_all = last.stop - g->count + 1;
  of.is_causal = first <= seen_by_all;
  if (g->window) of.only_behind = 1, of.first = of.is_causal ? first : last.stop;
  else if (!of.is_causal) of.stop = seen_by_all > last.first ? seen_by_all : last.first;
  return of;
}

static int is_exact_read(const exact_range *of, int64_t cell) {
  if (cell >= of->runs[of->num_runs - 1].first) return cell >= of->first && cell < of->stop;
  for (int i = 0; i + 1 < of->num_runs && !of->only_behind; i++)
    if (cell >= of->runs[i].first && cell < of->runs[i].stop) return 1;
  return 0;
}

/* ---- Calls ------------------------------------------------------------------------------------- */

static const char *stored_row(const side *of, int64_t kv_stream, int64_t cell) {
  return of->data + kv_stream * of->stream_stride + cell * of->rows.token_stride;
}

/* Another segment of the node's; 0: there is no memory. */
static int add_segment(hooked_backend *s, const char *keys, const char *values, int64_t num_tokens) {
  if (!grow(&s->segments, &s->room_segments, s->num_segments + 1, sizeof *s->segments)) return 0;
  s->segments[s->num_segments++] = (kvedge_rows_segment){keys, values, num_tokens};
  return 1;
}

/* Segments of a group's stored rows: its runs, without cells whose exact rows are read. */
static int add_stored(hooked_backend *s, const exact_range *of, int64_t kv_stream) {
  int at = 0;
  for (int i = 0; i < of->num_runs; i++) {
    int64_t first = of->runs[i].first;
    while (at < s->num_exact && s->exact[at].cell < first) at++;
    for (; first < of->runs[i].stop; at++) {
      const int64_t cell = at < s->num_exact && s->exact[at].cell < of->runs[i].stop ? s->exact[at].cell : -1;
      if (cell >= 0 && !is_exact_read(of, cell)) continue;
      const int64_t stop = cell < 0 ? of->runs[i].stop : cell;
      if (stop > first && !add_segment(s, stored_row(&s->sides[0], kv_stream, first),
                                       stored_row(&s->sides[1], kv_stream, first), stop - first))
        return 0;
      if (cell < 0) break;
      first = cell + 1;
    }
  }
  return 1;
}

/* Segments of its exact rows; those that lie side by side in one. */
static int add_exact_rows(hooked_backend *s, const exact_range *of) {
  const int first = s->num_segments;
  for (int i = 0; i < s->num_exact; i++) {
    const exact_row *row = &s->exact[i];
    if (!is_exact_read(of, row->cell)) continue;
    kvedge_rows_segment *last = s->num_segments > first ? &s->segments[s->num_segments - 1] : NULL;
    if (last && row->rows[0] == (const char *)last->keys + last->num_tokens * s->exact_sides[0].token_stride &&
        row->rows[1] == (const char *)last->values + last->num_tokens * s->exact_sides[1].token_stride)
      last->num_tokens++;
    else if (!add_segment(s, row->rows[0], row->rows[1], 1)) return 0;
  }
  return 1;
}

static int64_t tokens_from(const hooked_backend *s, int first_segment) {
  int64_t num = 0;
  for (int i = first_segment; i < s->num_segments; i++) num += s->segments[i].num_tokens;
  return num;
}

/* Rows of scattered cells are copied side by side. */

/* Do the values lie within the keys, as latents of MLA do? */
static int values_in_keys(const host *h, const tensor *k, const tensor *v) {
  const char *keys = k->data, *values = v->data;
  return values >= keys && values + row_bytes_of(h, v->type, v->ne[0]) <= keys + row_bytes_of(h, k->type, k->ne[0]) &&
         k->nb[1] == v->nb[1] && k->nb[2] == v->nb[2] && k->nb[3] == v->nb[3];
}

/* Bytes of a cell's keys (values), all heads. */
static size_t cell_bytes_of(const host *h, const tensor *t) {
  return row_bytes_of(h, t->type, t->ne[0]) * (size_t)t->ne[2];
}

/* Room for the rows of all scattered cells that a node shows; 0: there is no memory. */
static int reserve_gathered(hooked_backend *s, const tensor *node, const seen_cells *seen) {
  int64_t cells = 0;
  for (int64_t stream = 0; seen && stream < node->src[QUERY]->ne[3]; stream++) {
    const shown *of = &seen->streams[stream % seen->num_streams];
    for (int i = 0; i < of->num_groups; i++) {
      const row_group *g = &seen->groups[of->first_group + i];
      for (int run = 0; g->scattered && run < g->num_runs; run++)
        cells += seen->runs[g->first_run + run].stop - seen->runs[g->first_run + run].first;
    }
  }
  s->gathered_used = 0;
  const size_t bytes = cell_bytes_of(s->of, node->src[KEYS]) + cell_bytes_of(s->of, node->src[VALUES]);
  return cells == 0 || reserve(&s->gathered, &s->gathered_bytes, (size_t)cells * bytes);
}

/* Copies a side's rows of the segments from `first` on; returns where they are. `rows` gets their strides. */
static char *gather_side(hooked_backend *s, const tensor *t, int values, int first, kvedge_rows *rows) {
  const size_t row = row_bytes_of(s->of, t->type, t->ne[0]), heads = (size_t)t->ne[2];
  char *start = (char *)s->gathered + s->gathered_used, *to = start;
  for (int i = first; i < s->num_segments; i++) {
    const char *from = values ? s->segments[i].values : s->segments[i].keys;
    for (int64_t token = 0; token < s->segments[i].num_tokens; token++, from += t->nb[1]) {
      if (heads == 1 || t->nb[2] == row) memcpy(to, from, row * heads);
      else
        for (size_t h = 0; h < heads; h++) memcpy(to + h * row, from + h * t->nb[2], row);
      to += row * heads;
    }
  }
  s->gathered_used += (size_t)(to - start);
  rows->token_stride = (ptrdiff_t)(row * heads), rows->head_stride = (ptrdiff_t)row;
  return start;
}

/* Makes the segments from `first` on one, of copies of their rows; an index's choice is 2,048 cells of as many as there are. */
static void gather(hooked_backend *s, const tensor *node, int first, kvedge_rows sides[2]) {
  const tensor *k = node->src[KEYS], *v = node->src[VALUES];
  const int64_t num = tokens_from(s, first);
  const char *keys = gather_side(s, k, 0, first, &sides[0]), *values;
  if (values_in_keys(s->of, k, v)) {
    values = keys + ((const char *)v->data - (const char *)k->data);
    sides[1].token_stride = sides[0].token_stride, sides[1].head_stride = sides[0].head_stride;
  } else {
    values = gather_side(s, v, 1, first, &sides[1]);
  }
  s->segments[first] = (kvedge_rows_segment){keys, values, num};
  s->num_segments = first + 1;
}

/* Another call of the node's, of a group of query rows and the segments from `first_segment` on; 0: there is no memory. */
static int add_call(hooked_backend *s, const tensor *node, const int32_t *params, int64_t stream, const row_group *g,
                    const kvedge_rows sides[2], int first_segment) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS];
  if (!grow(&s->calls, &s->room_calls, s->num_calls + 1, sizeof *s->calls) ||
      !grow(&s->options, &s->room_options, s->num_calls + 1, sizeof *s->options) ||
      !grow(&s->caches, &s->room_caches, s->num_calls + 1, sizeof *s->caches) ||
      !grow(&s->places, &s->room_places, s->num_calls + 1, sizeof *s->places))
    return 0;
  s->places[s->num_calls] = (call_place){first_segment, -1, -1};
  kvedge_attention_options *options = &s->options[s->num_calls];
  kvedge_attention_defaults(options);
  options->scale = param(params, 0);
  options->softcap = param(params, 2);
  options->causal = 0;
  if (node->src[SINKS]) options->sink_logits = node->src[SINKS]->data;
  s->caches[s->num_calls] = (kvedge_rows_cache){.keys = sides[0],
                                                .values = sides[1],
                                                .num_kv_heads = (int)k->ne[2],
                                                .num_segments = s->num_segments - first_segment};
  s->calls[s->num_calls++] = (kvedge_attention_call){
      .num_heads = (int)q->ne[2],
      .num_rows = g->count,
      .query = {.data = (char *)q->data + stream * (int64_t)q->nb[3] + g->first * (int64_t)q->nb[1],
                .token_stride = (ptrdiff_t)q->nb[1],
                .head_stride = (ptrdiff_t)q->nb[2]   },
      .out = {.data = (char *)node->data + stream * (int64_t)node->nb[3] + g->first * (int64_t)node->nb[2],
                .token_stride = (ptrdiff_t)node->nb[2],
                .head_stride = (ptrdiff_t)node->nb[1]},
  };
  return 1;
}

/* The mask is added to the logits of stored rows from a cell on. */
static void add_bias(const hooked_backend *s, const tensor *node, const int32_t *params, const uint16_t *from,
                     kvedge_attention_options *options) {
  const tensor *mask = node->src[MASK];
  options->half_bias = from;
  options->bias_strides[0] = mask->ne[2] > 1 ? (int64_t)mask->nb[2] / 2 : 0;
  options->bias_strides[1] = (int64_t)mask->nb[1] / 2;
  options->bias_strides[2] = 1;
  if (param(params, 1) != 0.0f) options->bias_factors = s->slopes;
}

/* Calls of a group whose mask is added: of all stored rows, those hidden whose exact ones are read, and of the exact ones. */
static int add_biased(hooked_backend *s, const tensor *node, const int32_t *params, int64_t stream, int64_t kv_stream,
                      const row_group *g, const exact_range *of) {
  const kvedge_rows sides[2] = {s->sides[0].rows, s->sides[1].rows};
  const uint16_t *mask = mask_row(node->src[MASK], stream, g->first) + of->first;
  const int64_t num_cells = of->stop - of->first, stride = (int64_t)node->src[MASK]->nb[1] / 2;
  const int first = s->num_segments;
  if (!add_segment(s, stored_row(&s->sides[0], kv_stream, of->first), stored_row(&s->sides[1], kv_stream, of->first),
                   num_cells))
    return 0;
  if (!add_call(s, node, params, stream, g, sides, first)) return 0;
  add_bias(s, node, params, mask, &s->options[s->num_calls - 1]);
  const int first_exact = s->num_segments;
  if (!add_exact_rows(s, of)) return 0;
  const int64_t num = tokens_from(s, first_exact);
  if (num == 0) return 1;
  if (!grow(&s->is_stored, &s->room_cells, (int)(s->num_cells + num_cells), sizeof *s->is_stored) ||
      !grow(&s->bias, &s->room_bias, (int)(s->num_bias + g->count * num), sizeof *s->bias) ||
      !add_call(s, node, params, stream, g, s->exact_sides, first_exact))
    return 0;
  kvedge_attention_options *options = &s->options[s->num_calls - 2];
  options[0].mask_strides[2] = 1;
  options[1].bias_strides[1] = num, options[1].bias_strides[2] = 1;
  options[1].bias_factors = options[0].bias_factors;
  s->calls[s->num_calls - 1].joins = 1;
  s->places[s->num_calls - 2].first_cell = s->num_cells, s->places[s->num_calls - 1].first_bias = s->num_bias;
  uint8_t *is_stored = s->is_stored + s->num_cells;
  uint16_t *bias = s->bias + s->num_bias;
  s->num_cells += (int)num_cells, s->num_bias += (int)(g->count * num);
  memset(is_stored, 1, (size_t)num_cells);
  for (int i = 0, n = 0; i < s->num_exact; i++) {
    const int64_t cell = s->exact[i].cell;
    if (!is_exact_read(of, cell)) continue;
    is_stored[cell - of->first] = 0;
    for (int64_t row = 0; row < g->count; row++) bias[row * num + n] = mask[row * stride + cell - of->first];
    n++;
  }
  return 1;
}

/* Calls of a group of query rows that see runs of cells. */
static int add_group(hooked_backend *s, const tensor *node, const int32_t *params, int64_t stream, int64_t kv_stream,
                     const row_group *g, const exact_range *of, int is_masked) {
  kvedge_rows sides[2] = {s->sides[0].rows, s->sides[1].rows};
  const int first = s->num_segments, num_calls = s->num_calls, many = g->count > 1 && is_masked;
  if (!add_stored(s, of, kv_stream)) return 0;
  if (g->scattered && s->num_segments > first) gather(s, node, first, sides);
  const int first_exact = s->num_segments;
  if (!add_exact_rows(s, of)) return 0;
  const int num_stored = first_exact - first, num_exact = s->num_segments - first_exact;
  const int64_t exact_tokens = tokens_from(s, first_exact);
  s->num_segments = first_exact;
  if (num_stored && !add_call(s, node, params, stream, g, sides, first)) return 0;
  if (num_stored && many && (!of->is_causal || g->window)) {
    s->options[num_calls].causal = 1, s->options[num_calls].window = g->window;
    if (of->is_causal) s->caches[num_calls].num_behind = exact_tokens;
  }
  s->num_segments = first_exact + num_exact;
  if (num_exact) {
    if (!add_call(s, node, params, stream, g, s->exact_sides, first_exact)) return 0;
    s->calls[s->num_calls - 1].joins = num_stored > 0;
    s->options[s->num_calls - 1].causal = many && of->is_causal;
    s->options[s->num_calls - 1].window = of->is_causal ? g->window : 0;
  }
  return 1;
}

/* A part of a group: rows from its row `first` on, and the runs that they see, in `runs`. */
static row_group part_of_group(const row_group *g, int64_t first, int64_t count, const cell_run *all, cell_run *runs) {
  row_group part = *g;
  part.first += first, part.count = count;
  memcpy(runs, all, (size_t)g->num_runs * sizeof *runs);
  if (!g->biased && g->count > 1) {
    cell_run *last = &runs[g->num_runs - 1];
    last->stop -= g->count - first - count;
    const int64_t seen_by_first = last->stop - count + 1 - g->window;
    if (g->window && seen_by_first > last->first) last->first = seen_by_first;
  }
  return part;
}

/* The calls of a node, in the state; their number, or -1: there is no memory. */
static int make_calls(hooked_backend *s, tensor *node, const int32_t *params) {
  enum { ROWS_AT_ONCE = 128 }; /* of a call with exact rows, whose two results one thread merges */
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *mask = node->src[MASK];
  const float max_bias = mask ? param(params, 1) : 0.0f;
  const cell_run all_cells = {0, k->ne[1]};
  const row_group all_rows = {.count = q->ne[1], .num_runs = 1};
  const shown all = {0, 1};
  const seen_cells *seen = NULL;
  s->num_calls = s->num_segments = s->num_cells = s->num_bias = 0;
  if (max_bias != 0.0f && !make_slopes(s, q->ne[2], max_bias)) return -1;
  if (mask && !(seen = seen_by(s, node, max_bias != 0.0f))) return -1;
  if (!reserve_gathered(s, node, seen)) return -1;
  for (int64_t stream = 0; stream < q->ne[3]; stream++) {
    const shown *of = seen ? &seen->streams[stream % seen->num_streams] : &all;
    const int64_t kv_stream = stream / (q->ne[3] / k->ne[3]);
    find_exact(s, node, kv_stream);
    for (int i = 0; i < of->num_groups; i++) {
      const row_group g = seen ? seen->groups[of->first_group + i] : all_rows;
      const cell_run *runs = seen ? seen->runs + g.first_run : &all_cells;
      if (g.num_runs == 0) {
        clear_rows(node, stream, &g);
        continue;
      }
      const int64_t most = s->num_exact ? ROWS_AT_ONCE : g.count;
      if (!grow(&s->runs, &s->room_runs, g.num_runs, sizeof *s->runs)) return -1;
      for (int64_t row = 0; row < g.count; row += most) {
        const row_group part = part_of_group(&g, row, g.count - row < most ? g.count - row : most, runs, s->runs);
        const exact_range read = exact_range_of(s, &part, s->runs);
        if (part.biased ? !add_biased(s, node, params, stream, kv_stream, &part, &read)
                        : !add_group(s, node, params, stream, kv_stream, &part, &read, seen != NULL))
          return -1;
      }
    }
  }
  for (int i = 0; i < s->num_calls; i++) { /* now that all stays where it is */
    const call_place *place = &s->places[i];
    s->caches[i].segments = s->segments + place->first_segment;
    s->calls[i].rows = &s->caches[i];
    s->calls[i].options = &s->options[i];
    if (place->first_cell >= 0) s->options[i].mask = s->is_stored + place->first_cell;
    if (place->first_bias >= 0) s->options[i].half_bias = s->bias + place->first_bias;
  }
  return s->num_calls;
}

/* ---- and runs ---------------------------------------------------------------------------------- */

/* Plans a node; 0: it falls back. *num_calls 0: nothing is left to do. */
static int plan_node(hooked_backend *s, tensor *node, const int32_t *params, int num_threads) {
  s->slices = NULL;
  place_rows(s, node);
  for (int i = 0; i < 2; i++) s->sides[i] = side_of(node->src[KEYS + i]);
  const int num = make_calls(s, node, params);
  if (num <= 0) return num == 0;
  const size_t bytes = kvedge_slices_bytes(s->calls, num, num_threads);
  return bytes && reserve(&s->memory, &s->memory_bytes, bytes) &&
         kvedge_slices_init(s->memory, bytes, s->calls, num, num_threads, &s->slices) == KVEDGE_OK;
}

/* Is all of the output a number that kvedge has not bounded? (Sums that are not finite become +-FLT_MAX.) */
static int is_finite(const tensor *node) {
  const uint32_t flt_max = 0x7f7fffffu; /* its bits */
  const int64_t rows = node->ne[1] * node->ne[2] * node->ne[3];
  const uint32_t *x = node->data; /* contiguous, as ggml makes it */
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows * node->ne[0]; i++) {
    const uint32_t magnitude = x[i] & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < flt_max;
}

void wait_for(const atomic_int *x, int least) {
  enum { SPINS = 4096 }; /* some 100 us: planning takes less, unless thread 0 was held up */
  for (int i = 0; atomic_load_explicit(x, memory_order_acquire) < least; i++) {
    if (i >= SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}

void restore_node(const node_job *j) {
  j->node->op = j->op;
  memcpy(j->node->op_params, j->params, sizeof j->params);
}

void compute_by_ggml(hooked_backend *s, node_job *j) {
  const host *h = s->of;
  const size_t bytes = h->f.ggml_graph_overhead() + 1024;
  context *ctx = h->f.ggml_init((init_params){bytes, NULL, true});
  graph *g = ctx ? h->f.ggml_new_graph(ctx) : NULL;
  if (!s->helper) {
    s->helper = h->init_backend(h->cpu, NULL);
    if (s->helper) set_num_threads(h, s->helper, 1);
  }
  restore_node(j);
  if (g && s->helper) {
    h->f.ggml_graph_add_node(g, j->node);
    h->f.ggml_backend_graph_compute(s->helper, g);
  }
  if (ctx) h->f.ggml_free(ctx);
  count(FELL_BACK, 1);
}

void run_node(tensor *dst, int ith, int nth, void *userdata) {
  node_job *j = userdata;
  hooked_backend *s = j->of;
  if (ith == 0)
    atomic_store_explicit(&j->is_planned, plan_node(s, dst, j->params, nth) ? PLANNED : REFUSED, memory_order_release);
  else wait_for(&j->is_planned, PLANNED);
  if (s->slices) {
    const int num = kvedge_slices_count(s->slices);
    int slice = atomic_fetch_add_explicit(&j->next_slice, 1, memory_order_relaxed);
    while (slice < num) { /* a thread knows its next one, which is prefetched */
      const int next = atomic_fetch_add_explicit(&j->next_slice, 1, memory_order_relaxed);
      kvedge_slices_run(s->slices, slice, next < num ? next : -1, ith);
      slice = next;
    }
  }
  if (atomic_fetch_add_explicit(&j->num_done, 1, memory_order_acq_rel) + 1 < nth) return;
  const int is_refused = atomic_load_explicit(&j->is_planned, memory_order_relaxed) == REFUSED;
  if (is_refused || !is_finite(dst)) compute_by_ggml(s, j);
  else count(TAKEN, 1);
  remember_rows(s, dst);
}
