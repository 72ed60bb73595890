/* One scan of an index (GGML_OP_LIGHTNING_INDEXER) on kvedge: with the queries q, weights w and mask m of a row,
 *
 *   score[k] = m[k] + sum_h w[h] max(0, q[h] . key[k])
 *
 * The node is a custom one while its graph is computed, as an attention node is. It is cut into tasks, a few rows and some of
 * the keys each; of those only the range that the rows see is scanned. The top-k and the mask that follow are ggml's. */
#include <math.h>

#include "formats/half.h"
#include "internal.h"

enum { QUERY, KEYS, WEIGHTS, MASK, NUM_SOURCES };
enum { MOST_DIM = 1024, MOST_HEADS = 1024 };
enum {
  LEAST_KEYS = 256, /* of a task: a tile */
  MOST_KEYS = 8192, /* a task prepares its queries anew */
  QUERIES = 32,     /* that are multiplied together: of several rows if their heads are fewer */
  QUANTIZED = 8,    /* times as many rows where keys are quantized, which are decoded once for all of them */
  TASKS_OF_THREAD = 4,
};

reason serves_index(const host *h, const tensor *node, int takes_all) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *w = node->src[WEIGHTS], *mask = node->src[MASK];
  if (!q || !k || !w || !mask) return LEFT_SHAPE;
  for (int i = NUM_SOURCES; i < MAX_SOURCES; i++)
    if (node->src[i]) return LEFT_SHAPE;
  for (int i = 0; i < PARAM_BYTES / 4; i++)
    if (node->op_params[i]) return LEFT_SHAPE; /* it has none */
  if (!row_type_of(k) || node->type != TYPE_F32 || q->type != TYPE_F32 || w->type != TYPE_F32 || mask->type != TYPE_F16)
    return LEFT_TYPE;
  const int64_t keys = k->ne[2], heads = q->ne[1], rows = q->ne[2], streams = q->ne[3];
  const tensor *floats[] = {q, w, node};
  for (int i = 0; i < 3; i++)
    for (int d = 0; d < 4; d++)
      if (floats[i]->nb[d] % 4 || (d == 0 && floats[i]->nb[d] != 4)) return LEFT_SHAPE;
  const size_t element = row_type_of(k)->block_elements > 1 ? 2 : row_type_of(k)->block_bytes;
  if (k->nb[0] != row_type_of(k)->block_bytes || k->ne[0] % row_type_of(k)->block_elements) return LEFT_SHAPE;
  if (k->nb[2] < row_bytes_of(h, k->type, k->ne[0]) || k->nb[2] % element || k->nb[3] % element) return LEFT_SHAPE;
  if (k->ne[0] != q->ne[0] || k->ne[0] > MOST_DIM || k->ne[1] != 1 || k->ne[3] != streams) return LEFT_SHAPE;
  if (heads < 1 || heads > MOST_HEADS || rows < 1 || keys < 1 || keys > INT32_MAX) return LEFT_SHAPE;
  if (w->ne[0] != heads || w->ne[1] != rows || w->ne[2] != 1 || w->ne[3] != streams) return LEFT_SHAPE;
  if (mask->nb[0] != 2 || mask->nb[1] % 2 || mask->nb[3] % 2) return LEFT_SHAPE;
  if (mask->ne[0] < keys || mask->ne[1] < rows || mask->ne[2] != 1 || streams % mask->ne[3]) return LEFT_SHAPE;
  if (node->ne[0] != keys || node->ne[1] != rows || node->ne[2] != 1 || node->ne[3] != streams) return LEFT_SHAPE;
  if (node->nb[1] < (size_t)keys * 4) return LEFT_SHAPE;
  if (takes_all) return TAKEN;
  if (strcmp(kvedge_isa_name(), "scalar") == 0) return LEFT_SCALAR;
  return keys < least_cells() ? LEFT_SMALL : TAKEN;
}

/* How a node is cut. */
typedef struct {
  int64_t rows, keys; /* of a task */
  int64_t row_groups, chunks;
  int num_tasks;
} cut;

static cut cut_of(const tensor *node, int num_threads) {
  const int64_t rows = node->ne[1], keys = node->ne[0], heads = node->src[QUERY]->ne[1];
  cut c = {.rows = heads < QUERIES ? QUERIES / heads : 1};
  if (row_type_of(node->src[KEYS])->block_elements > 1) c.rows *= QUANTIZED;
  c.row_groups = (rows + c.rows - 1) / c.rows * node->ne[3];
  c.keys = keys * c.row_groups / (TASKS_OF_THREAD * num_threads) / LEAST_KEYS * LEAST_KEYS;
  c.keys = c.keys < LEAST_KEYS ? LEAST_KEYS : c.keys > MOST_KEYS ? MOST_KEYS : c.keys;
  c.chunks = (keys + c.keys - 1) / c.keys;
  c.num_tasks = c.row_groups * c.chunks > INT32_MAX ? 0 : (int)(c.row_groups * c.chunks);
  return c;
}

static const char *at(const tensor *t, int64_t row, int64_t stream) {
  return (const char *)t->data + row * (int64_t)t->nb[1] + stream * (int64_t)t->nb[3];
}

/* Adds a row's mask to its scores, those of hidden keys whatever they are; 0: a score that is seen is not finite. */
static int add_mask(float *scores, const uint16_t *mask, int64_t num_keys) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < num_keys; i++) {
    if (mask[i] == HIDDEN) {
      scores[i] = -INFINITY;
      continue;
    }
    if (mask[i]) scores[i] += kvedge_float_of_any_half(mask[i]);
    const uint32_t magnitude = kvedge_bits_of_float(scores[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7f800000u;
}

/* Runs a task; 0: ggml's kernel has to compute the node. */
static int run_task(tensor *node, const cut *c, int task, void *memory) {
  const tensor *q = node->src[QUERY], *k = node->src[KEYS], *w = node->src[WEIGHTS], *mask = node->src[MASK];
  const int64_t groups_of_stream = c->row_groups / node->ne[3], group = task / c->chunks;
  const int64_t stream = group / groups_of_stream, row = group % groups_of_stream * c->rows;
  const int64_t first = task % c->chunks * c->keys;
  const int64_t num_rows = node->ne[1] - row < c->rows ? node->ne[1] - row : c->rows;
  const int64_t num_keys = node->ne[0] - first < c->keys ? node->ne[0] - first : c->keys;
  int64_t from = num_keys, stop = 0; /* that one of the rows sees */
  for (int64_t r = 0; r < num_rows; r++) {
    const uint16_t *of_row = mask_row(mask, stream, row + r) + first;
    for (int64_t i = 0; i < from; i++)
      if (of_row[i] != HIDDEN) from = i;
    for (int64_t i = num_keys; i > stop && i > from; i--)
      if (of_row[i - 1] != HIDDEN) stop = i;
  }
  float *scores = (float *)(uintptr_t)at(node, row, stream) + first;
  if (from < stop) {
    const kvedge_index_scores_call call = {
        .format = row_type_of(k)->format,
        .head_dim = (int)k->ne[0],
        .keys = at(k, 0, stream) + (first + from) * (int64_t)k->nb[2],
        .key_stride = (ptrdiff_t)k->nb[2],
        .num_keys = stop - from,
        .query = (const float *)((const char *)q->data + row * (int64_t)q->nb[2] + stream * (int64_t)q->nb[3]),
        .row_stride = (ptrdiff_t)q->nb[2],
        .head_stride = (ptrdiff_t)q->nb[1],
        .weights = (const float *)at(w, row, stream),
        .weight_stride = (ptrdiff_t)w->nb[1],
        .num_rows = num_rows,
        .num_heads = (int)q->ne[1],
        .scores = scores + from,
        .score_stride = (ptrdiff_t)node->nb[1]};
    if (kvedge_index_scores(&call, memory) != KVEDGE_OK) return 0;
  }
  int is_finite = 1;
  for (int64_t r = 0; r < num_rows; r++)
    is_finite &= add_mask((float *)((char *)scores + r * (int64_t)node->nb[1]), mask_row(mask, stream, row + r) + first,
                          num_keys);
  return is_finite;
}

void run_index(tensor *dst, int ith, int nth, void *userdata) {
  node_job *j = userdata;
  hooked_backend *s = j->of;
  const cut c = cut_of(dst, nth);
  const size_t bytes = kvedge_index_scores_bytes((int)dst->src[KEYS]->ne[0]);
  if (ith == 0) {
    const int is_ready = c.num_tasks && reserve(&s->memory, &s->memory_bytes, bytes * (size_t)nth);
    atomic_store_explicit(&j->is_planned, is_ready ? PLANNED : REFUSED, memory_order_release);
  }
  wait_for(&j->is_planned, PLANNED);
  while (atomic_load_explicit(&j->is_planned, memory_order_relaxed) == PLANNED) {
    const int task = atomic_fetch_add_explicit(&j->next_slice, 1, memory_order_relaxed);
    if (task >= c.num_tasks) break;
    if (!run_task(dst, &c, task, (char *)s->memory + bytes * (size_t)ith))
      atomic_store_explicit(&j->is_planned, REFUSED, memory_order_relaxed);
  }
  if (atomic_fetch_add_explicit(&j->num_done, 1, memory_order_acq_rel) + 1 < nth) return;
  if (atomic_load_explicit(&j->is_planned, memory_order_relaxed) == REFUSED) compute_by_ggml(s, j);
  else count(TAKEN_INDEX, 1);
}
