/* One attention node (GGML_OP_FLASH_ATTN_EXT) on kvedge. The node is a custom one while its graph is computed: ggml calls
 * run_node on all of its threads, and has them meet after it. Thread 0 plans, all take slices, the last one looks at the
 * result. */
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { QUERY, KEYS, VALUES, MASK, SINKS };
enum {
  MOST_DIM = 1024,
  /* Decoding takes about as long as ggml's kernel for so many query rows of a KV head, which decodes values for each. */
  LEAST_ROWS_TO_DECODE = 3,
  CELLS_PER_PART = 64, /* that a thread decodes at a time */
};

/* Below so many cells ggml's kernels take no longer. With vectors kvedge was faster from the first visible cell on (9 to 32
 * heads of 64 and 128, one row, AVX2 and AVX-512: 1.4 to 4 times); llama.cpp's caches show 256 cells at least. */
static int64_t least_cells(void) { return strcmp(kvedge_isa_name(), "scalar") == 0 ? 512 : 32; }

/* ---- Which nodes ----------------------------------------------------------------------------- */

const row_type row_types[NUM_ROW_TYPES] = {
    {TYPE_F32,  "f32",  KVEDGE_FLOAT32,  1,  4 },
    {TYPE_F16,  "f16",  KVEDGE_FLOAT16,  1,  2 },
    {TYPE_BF16, "bf16", KVEDGE_BFLOAT16, 1,  2 },
    {TYPE_Q8_0, "q8_0", KVEDGE_Q8_0,     32, 34}
};

/* The type of a side's rows; NULL: kvedge does not read it in place. */
static const row_type *row_type_of(const tensor *t) {
  for (int i = 0; i < NUM_ROW_TYPES; i++)
    if (row_types[i].type == t->type) return &row_types[i];
  return NULL;
}

/* Rows of any other type that ggml decodes are decoded for the node; NULL: it does not decode them. */
static to_float decoder_of(const host *h, const tensor *t) {
  return row_type_of(t) ? NULL : h->f.ggml_get_type_traits(t->type)->to_float;
}

/* Are the elements of each row side by side, in whole blocks? */
static int has_whole_rows(const host *h, const tensor *t) {
  const int64_t elements = h->f.ggml_blck_size(t->type);
  const size_t bytes = h->f.ggml_type_size(t->type);
  return t->nb[0] == bytes && t->ne[0] % elements == 0 && t->nb[1] >= bytes * (size_t)(t->ne[0] / elements);
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
  int is_decoded = 0;
  for (int i = 0; i < 2; i++) {
    if (row_type_of(sides[i])) continue;
    if (!decoder_of(h, sides[i])) return LEFT_TYPE;
    is_decoded = 1;
  }
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
  if (is_decoded && q->ne[1] * (q->ne[2] / k->ne[2]) < LEAST_ROWS_TO_DECODE) return LEFT_DECODING;
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

/* A side of a node as kvedge has it; one that is decoded gets room for it. 0: there is no memory. */
static int make_side(hooked_backend *s, const tensor *t, side *of) {
  const row_type *type = row_type_of(t);
  *of = (side){
      .rows = {.dim = (int)t->ne[0], .token_stride = (ptrdiff_t)t->nb[1], .head_stride = (ptrdiff_t)t->nb[2]},
      .data = t->data,
      .stream_stride = (ptrdiff_t)t->nb[3],
      .room = of->room,
      .room_bytes = of->room_bytes,
      .from = t
  };
  if (type) {
    of->rows.format = type->format;
    return 1;
  }
  of->decode = decoder_of(s->of, t);
  of->rows.format = KVEDGE_FLOAT32;
  of->rows.head_stride = (ptrdiff_t)t->ne[0] * (ptrdiff_t)sizeof(float);
  of->rows.token_stride = of->rows.head_stride * t->ne[2];
  of->stream_stride = of->rows.token_stride * t->ne[1];
  if (!reserve(&of->room, &of->room_bytes, (size_t)(of->stream_stride * t->ne[3]))) return 0;
  of->data = of->room;
  of->parts_per_stream = (int)((t->ne[1] + CELLS_PER_PART - 1) / CELLS_PER_PART);
  of->num_parts = of->parts_per_stream * (int)t->ne[3];
  return 1;
}

/* Decodes a part of a side: some cells of a stream, of all KV heads. */
static void decode_part(const side *of, int part) {
  const tensor *t = of->from;
  const int64_t stream = part / of->parts_per_stream, first = (int64_t)(part % of->parts_per_stream) * CELLS_PER_PART;
  const int64_t stop = first + CELLS_PER_PART < t->ne[1] ? first + CELLS_PER_PART : t->ne[1];
  const char *from = (const char *)t->data + stream * (int64_t)t->nb[3];
  char *to = (char *)of->room + stream * of->stream_stride;
  for (int64_t cell = first; cell < stop; cell++)
    for (int64_t head = 0; head < t->ne[2]; head++)
      of->decode(from + cell * (int64_t)t->nb[1] + head * (int64_t)t->nb[2],
                 (float *)(to + cell * of->rows.token_stride + head * of->rows.head_stride), t->ne[0]);
}

/* The call of a group of query rows; `segments` are its own. */
static void make_call(const hooked_backend *s, const tensor *node, const int32_t *params, int64_t stream,
                      const row_group *g, const cell_run *runs, kvedge_rows_segment *segments,
                      kvedge_attention_options *options, kvedge_rows_cache *cache, kvedge_attention_call *call) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *mask = node->src[MASK];
  const side *keys = &s->sides[0], *values = &s->sides[1];
  const int64_t kv_stream = stream / (q->ne[3] / k->ne[3]);
  for (int i = 0; i < g->num_runs; i++)
    segments[i] = (kvedge_rows_segment){
        keys->data + kv_stream * keys->stream_stride + runs[i].first * keys->rows.token_stride,
        values->data + kv_stream * values->stream_stride + runs[i].first * values->rows.token_stride,
        runs[i].stop - runs[i].first};
  kvedge_attention_defaults(options);
  options->scale = param(params, 0);
  options->softcap = param(params, 2);
  options->causal = g->count > 1 && !g->biased;
  options->window = g->window;
  if (node->src[SINKS]) options->sink_logits = node->src[SINKS]->data;
  if (g->biased) {
    const char *m = (const char *)mask->data + stream % mask->ne[3] * (int64_t)mask->nb[3];
    options->half_bias = (const uint16_t *)(m + g->first * (int64_t)mask->nb[1]) + runs[0].first;
    options->bias_strides[0] = mask->ne[2] > 1 ? (int64_t)mask->nb[2] / 2 : 0;
    options->bias_strides[1] = (int64_t)mask->nb[1] / 2;
    options->bias_strides[2] = 1;
    if (param(params, 1) != 0.0f) options->bias_factors = s->slopes;
  }
  *cache = (kvedge_rows_cache){.keys = keys->rows,
                               .values = values->rows,
                               .num_kv_heads = (int)k->ne[2],
                               .segments = segments,
                               .num_segments = g->num_runs};
  *call = (kvedge_attention_call){
      .rows = cache,
      .num_heads = (int)q->ne[2],
      .num_rows = g->count,
      .query = {.data = (char *)q->data + stream * (int64_t)q->nb[3] + g->first * (int64_t)q->nb[1],
                .token_stride = (ptrdiff_t)q->nb[1],
                .head_stride = (ptrdiff_t)q->nb[2]   },
      .out = {.data = (char *)node->data + stream * (int64_t)node->nb[3] + g->first * (int64_t)node->nb[2],
                .token_stride = (ptrdiff_t)node->nb[2],
                .head_stride = (ptrdiff_t)node->nb[1]},
      .options = options
  };
}

/* The calls of a node, in the state; their number, or -1: there is no memory. */
static int make_calls(hooked_backend *s, tensor *node, const int32_t *params) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *mask = node->src[MASK];
  const float max_bias = mask ? param(params, 1) : 0.0f;
  const cell_run all_cells = {0, k->ne[1]};
  const row_group all_rows = {.count = q->ne[1], .num_runs = 1};
  const shown all = {0, 1};
  const seen_cells *seen = NULL;
  if (max_bias != 0.0f && !make_slopes(s, q->ne[2], max_bias)) return -1;
  if (mask && !(seen = seen_by(s, node, max_bias != 0.0f))) return -1;
  int num_calls = 0, num_segments = 0;
  for (int64_t stream = 0; stream < q->ne[3]; stream++) { /* how many */
    const shown *of = seen ? &seen->streams[stream % seen->num_streams] : &all;
    num_calls += of->num_groups;
    for (int i = 0; i < of->num_groups; i++) num_segments += seen ? seen->groups[of->first_group + i].num_runs : 1;
  }
  if (!grow(&s->calls, &s->room_calls, num_calls, sizeof *s->calls) ||
      !grow(&s->caches, &s->room_caches, num_calls, sizeof *s->caches) ||
      !grow(&s->options, &s->room_options, num_calls, sizeof *s->options) ||
      !grow(&s->segments, &s->room_segments, num_segments, sizeof *s->segments))
    return -1;
  kvedge_rows_segment *segments = s->segments;
  num_calls = 0;
  for (int64_t stream = 0; stream < q->ne[3]; stream++) {
    const shown *of = seen ? &seen->streams[stream % seen->num_streams] : &all;
    for (int i = 0; i < of->num_groups; i++) {
      row_group g = seen ? seen->groups[of->first_group + i] : all_rows;
      const cell_run *runs = seen ? seen->runs + g.first_run : &all_cells;
      if (g.num_runs == 0) {
        clear_rows(node, stream, &g);
        continue;
      }
      make_call(s, node, params, stream, &g, runs, segments, &s->options[num_calls], &s->caches[num_calls],
                &s->calls[num_calls]);
      if (!seen) s->options[num_calls].causal = 0;
      segments += g.num_runs, num_calls++;
    }
  }
  return num_calls;
}

/* ---- and runs ---------------------------------------------------------------------------------- */

/* Plans a node; 0: it falls back. *num_calls 0: nothing is left to do. */
static int plan_node(hooked_backend *s, tensor *node, const int32_t *params, int num_threads) {
  s->slices = NULL;
  for (int i = 0; i < 2; i++)
    if (!make_side(s, node->src[KEYS + i], &s->sides[i])) return 0;
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

static void wait_for(const atomic_int *x, int least) {
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
  j->node->op = j->of->of->op_attention;
  memcpy(j->node->op_params, j->params, sizeof j->params);
}

/* Computes a node by ggml's own kernel, on this thread. */
static void compute_by_ggml(hooked_backend *s, node_job *j) {
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

/* Decodes what is to be decoded, together with the other threads; all of it is there at the end. */
static void decode_sides(const hooked_backend *s, node_job *j) {
  const int of_keys = s->sides[0].num_parts, num = of_keys + s->sides[1].num_parts;
  for (int part; num && (part = atomic_fetch_add_explicit(&j->next_part, 1, memory_order_relaxed)) < num;) {
    if (part < of_keys) decode_part(&s->sides[0], part);
    else decode_part(&s->sides[1], part - of_keys);
    atomic_fetch_add_explicit(&j->num_decoded, 1, memory_order_release);
  }
  wait_for(&j->num_decoded, num);
}

enum { NOT_PLANNED, PLANNED, REFUSED };

void run_node(tensor *dst, int ith, int nth, void *userdata) {
  node_job *j = userdata;
  hooked_backend *s = j->of;
  if (ith == 0)
    atomic_store_explicit(&j->is_planned, plan_node(s, dst, j->params, nth) ? PLANNED : REFUSED, memory_order_release);
  else wait_for(&j->is_planned, PLANNED);
  if (s->slices) {
    decode_sides(s, j);
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
}
