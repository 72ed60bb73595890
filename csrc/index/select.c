/* Selection by index keys: a scan that scores the keys for each query row, and the best of them as a list of tokens.
 *
 * Scores are the products of attention's cells for the keys' format, 32 queries at a time, a tile of 256 keys after the
 * other; of a row's heads max(0, product) is added up. Rows whose scores fit in SCORES_BYTES are scanned together: first all
 * of their scores, cut by rows and by keys for threads, then a list for each row. A runtime that has threads of its own, and
 * chooses itself, takes the scores alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/format.h"
#include "kernels/kernels.h"
#include "kvedge.h"
#include "store/layer_struct.h"
#include "store/rotation.h"
#include "system/bits.h"
#include "system/dispatch.h"
#include "system/float_mode.h"
#include "system/memory.h"
#include "system/parallel.h"

enum {
  MAX_HEADS = 1024,
  LEAST_KEYS = 1024, /* of a task */
  MOST_KEYS = 8192, /* a task prepares its queries anew; these keys are 1 MB of int8, which stays in L2 for its heads */
  CHUNKS_OF_THREAD = 4,
  DECODED_KEYS = 1024,     /* together, for all rows of a call for scores alone */
  SCORES_BYTES = 16 << 20, /* of rows that are scanned together, at most; or one row's */
};

/* The working memory of a thread that scans. */
typedef struct {
  _Alignas(64) char scratch[KVEDGE_SCRATCH];
  _Alignas(64) float products[KVEDGE_QUERY_ROWS * KVEDGE_TILE];
  _Alignas(64) float sums[KVEDGE_QUERY_ROWS][KVEDGE_TILE];
  _Alignas(64) float scales[KVEDGE_TILE];
  _Alignas(64) float values[KVEDGE_QUERY_ROWS * KVEDGE_MAX_HEAD_DIM];
  _Alignas(64) int8_t quantized[KVEDGE_QUERY_ROWS * KVEDGE_MAX_HEAD_DIM * KVEDGE_QUANTIZED_BYTES];
  float query_scale[KVEDGE_QUERY_ROWS], factor[KVEDGE_QUERY_ROWS];
  int32_t offsets[KVEDGE_QUERY_ROWS * 4];
  _Alignas(64) float decoded[KVEDGE_BLOCK * KVEDGE_MAX_HEAD_DIM];
} scan_memory; /* where keys lie in blocks a tile of rows follows, which are gathered there */

/* Rows that are scanned together. */
typedef struct {
  const kvedge_index_keys *keys;
  const kvedge_index_call *call;
  const kvedge_kernels *kernels;
  const kvedge_format_info *format;    /* of the keys */
  const kvedge_cell *cell;             /* of the format, or of float32 if decodes */
  int decodes;                         /* the path has no cell for the format: rows are decoded, block by block */
  ptrdiff_t key_bytes;                 /* from a key to the next one */
  ptrdiff_t query_bytes, weight_bytes; /* from a row to the next one */
  ptrdiff_t head_bytes;                /* of queries */
  int64_t first_row, num_rows;
  int64_t num_keys; /* that the last of them sees */
  int lists;        /* of a row: 1, or one for each head */
  int rows_of_task;
  int64_t chunk_keys, num_chunks;
  float *scores; /* (num_rows, lists, score_stride) */
  int64_t score_stride;
  size_t thread_bytes; /* of a thread's memory */
  scan_memory *memory; /* (threads) */
} scan;

static int has_cell(const kvedge_kernels *kernels, kvedge_format format) {
  return (unsigned)format < KVEDGE_NUM_FORMATS && kernels->cells[format].scores;
}

/* What scans of a call have in common. */
static scan new_scan(const kvedge_index_keys *keys, const kvedge_index_call *call) {
  scan s = {.keys = keys, .call = call, .format = kvedge_format_of(keys->format), .kernels = kvedge_active()};
  s.decodes = !has_cell(s.kernels, keys->format);
  s.cell = &s.kernels->cells[s.decodes ? KVEDGE_FLOAT32 : keys->format];
  s.rows_of_task = call->num_heads < KVEDGE_QUERY_ROWS ? KVEDGE_QUERY_ROWS / call->num_heads : 1;
  return s;
}

static int64_t keys_seen(const kvedge_index_call *call, int64_t row) {
  return (call->first_position + row + 1) / call->ratio;
}

/* Blocks, from that of `start` on, of which a row sees a key. */
static int64_t blocks_seen(const kvedge_index_call *call, int64_t row) {
  const int64_t first_key = call->start / call->ratio, stop_key = keys_seen(call, row);
  return first_key < stop_key ? (stop_key + call->block - 1) / call->block - first_key / call->block : 0;
}

/* ---- The scan --------------------------------------------------------------------------------- */

/* Query `head` of a row as the cell multiplies it: over a power of two, which `factor` has. */
static void prepare_query(const scan *s, int64_t row, int head, int at, scan_memory *m) {
  const int dim = s->keys->head_dim, pad = kvedge_padded_channels(dim);
  const float *x = (const float *)((const char *)s->call->query + row * s->query_bytes + head * s->head_bytes);
  float rotated[KVEDGE_MAX_HEAD_DIM];
  if (s->keys->format == KVEDGE_INT8) {
    kvedge_rotate_channels(x, kvedge_rotated_together(dim), 0, dim, rotated);
    x = rotated;
  }
  const float largest = kvedge_float_of_bits(s->kernels->rows->abs_max_bits(x, (size_t)dim));
  const int exponent = largest > 0.0f && largest <= 0x1p120f ? ilogbf(largest) : largest > 0.0f ? 120 : 0;
  const float inverse = ldexpf(1.0f, exponent < -120 ? 120 : -exponent);
  m->factor[at] = s->call->scale / inverse;
  if (s->cell->encode_query) {
    s->cell->encode_query(x, dim, inverse, largest * inverse, 2, m->quantized + at * pad * KVEDGE_QUANTIZED_BYTES,
                          &m->query_scale[at], &m->offsets[at * 4]);
    return;
  }
  float *values = m->values + at * pad;
  for (int d = 0; d < pad; d++) values[d] = d < dim ? x[d] * inverse : 0.0f;
}

/* The keys first..first+num_keys-1, side by side; and `scales`, if there are any, in m->scales. */
static const char *rows_of(const scan *s, int64_t first, int num_keys, scan_memory *m) {
  const ptrdiff_t row_bytes = s->key_bytes;
  const kvedge_index_keys *keys = s->keys;
  const char *rows = keys->keys;
  for (int i = 0, n; i < num_keys; i += n) { /* as many as lie together */
    int64_t key = first + i;
    n = num_keys;
    if (keys->blocks) {
      const int64_t block = key / keys->keys_of_block, at = key % keys->keys_of_block, left = keys->keys_of_block - at;
      key = keys->blocks[block] * keys->keys_of_block + at;
      n = left < num_keys - i ? (int)left : num_keys - i;
      memcpy((char *)(m + 1) + i * row_bytes, rows + key * row_bytes, (size_t)(n * row_bytes));
    }
    if (keys->scales) memcpy(m->scales + i, keys->scales + key, (size_t)n * sizeof *m->scales);
  }
  return keys->blocks ? (const char *)(m + 1) : rows + first * row_bytes;
}

/* Products of the first `count` prepared queries with keys first..first+num_keys-1, at most a tile. */
static void multiply_tile(const scan *s, int64_t first, int num_keys, int count, scan_memory *m) {
  const kvedge_index_keys *keys = s->keys;
  const ptrdiff_t pad = kvedge_padded_channels(keys->head_dim);
  const char *blocks[KVEDGE_TILE_BLOCKS], *rows = rows_of(s, first, num_keys, m);
  const kvedge_row_shape shape = kvedge_row_shape_of(s->format, keys->head_dim, keys->head_dim, KVEDGE_SCALE_FLOAT32);
  for (int b = 0; b * KVEDGE_BLOCK < num_keys; b++) blocks[b] = rows + b * KVEDGE_BLOCK * s->key_bytes;
  kvedge_tile tile = {.blocks = blocks,
                      .token_stride = s->key_bytes,
                      .num_tokens = num_keys,
                      .dim = keys->head_dim,
                      .factor = 1.0f,
                      .bits = s->format->bits};
  if (keys->scales) {
    for (int t = num_keys; t % KVEDGE_BLOCK; t++) m->scales[t] = 0.0f;
    tile.scales = m->scales;
  }
  kvedge_query q = {.num_queries = count, .dim = keys->head_dim, .stride = pad, .scratch = m->scratch};
  if (s->cell->encode_query)
    q.quantized = m->quantized, q.scale = m->query_scale, q.scale_stride = 1, q.offsets = m->offsets, q.planes = 2;
  else q.values = m->values;
  if (!s->decodes) {
    s->cell->scores(&q, &tile, m->products, 0);
    return;
  }
  tile.token_stride = keys->head_dim * (ptrdiff_t)sizeof(float), tile.scales = NULL;
  for (int b = 0; b * KVEDGE_BLOCK < num_keys; b++) {
    const int left = num_keys - b * KVEDGE_BLOCK;
    const char *decoded = (const char *)m->decoded;
    tile.num_tokens = left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK, tile.blocks = &decoded;
    s->format->decode(&shape, blocks[b], m->scales + b * KVEDGE_BLOCK, tile.num_tokens, m->decoded);
    s->cell->scores(&q, &tile, m->products + b * KVEDGE_BLOCK, 0);
  }
}

/* sums[t] += weight * max(0, products[t]) */
static void add_positive(float *restrict sums, const float *restrict products, float factor, float weight) {
  for (int t = 0; t < KVEDGE_TILE; t++) {
    const float x = products[t] * factor;
    sums[t] += weight * (x > 0.0f ? x : 0.0f);
  }
}

static const float *weights_of(const scan *s, int64_t row) {
  return (const float *)((const char *)s->call->weights + row * s->weight_bytes);
}

/* The scores of some rows for the keys of a chunk, by `count` heads from one on: for one list they are added up. */
static void scan_heads(const scan *s, int64_t first_row, int num_rows, int head, int count, int64_t first_key,
                       int64_t stop_key, scan_memory *m) {
  const kvedge_index_call *call = s->call;
  for (int r = 0; r < num_rows; r++)
    for (int h = 0; h < count; h++) prepare_query(s, first_row + r, head + h, r * count + h, m);
  for (int64_t key = first_key; key < stop_key; key += KVEDGE_TILE) {
    const int num_keys = stop_key - key < KVEDGE_TILE ? (int)(stop_key - key) : KVEDGE_TILE;
    multiply_tile(s, key, num_keys, num_rows * count, m);
    for (int r = 0; r < num_rows; r++) {
      float *scores = s->scores + (first_row - s->first_row + r) * s->lists * s->score_stride + key;
      if (!call->per_head) {
        memset(m->sums[r], 0, sizeof m->sums[r]);
        if (head > 0) memcpy(m->sums[r], scores, (size_t)num_keys * sizeof *scores);
      }
      for (int h = 0; h < count; h++) {
        const int at = r * count + h;
        const float *products = m->products + at * KVEDGE_TILE;
        const float weight = call->weights ? weights_of(s, first_row + r)[head + h] : 1.0f;
        if (!call->per_head) add_positive(m->sums[r], products, m->factor[at], weight);
        else
          for (int t = 0; t < num_keys; t++) scores[(head + h) * s->score_stride + t] = products[t] * m->factor[at];
      }
      if (!call->per_head) memcpy(scores, m->sums[r], (size_t)num_keys * sizeof *scores);
    }
  }
}

/* The scores of some rows for the keys of a chunk. */
static void scan_rows(const scan *s, int64_t first_row, int num_rows, int64_t first_key, int64_t stop_key,
                      scan_memory *m) {
  const int num_heads = s->call->num_heads;
  for (int head = 0; head < num_heads; head += KVEDGE_QUERY_ROWS) {
    const int count = num_heads - head < KVEDGE_QUERY_ROWS ? num_heads - head : KVEDGE_QUERY_ROWS;
    scan_heads(s, first_row, num_rows, head, count, first_key, stop_key, m);
  }
}

static void run_scan(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const scan *s = context;
  const int64_t first_row = s->first_row + task / s->num_chunks * s->rows_of_task, chunk = task % s->num_chunks;
  const int64_t left = s->first_row + s->num_rows - first_row;
  const int num_rows = left < s->rows_of_task ? (int)left : s->rows_of_task;
  const int64_t first_key = chunk * s->chunk_keys, seen = keys_seen(s->call, first_row + num_rows - 1);
  const int64_t stop_key = seen < first_key + s->chunk_keys ? seen : first_key + s->chunk_keys;
  (void)next, (void)slot, (void)stop;
  if (blocks_seen(s->call, first_row + num_rows - 1) <= s->call->k) return; /* all are chosen */
  scan_rows(s, first_row, num_rows, first_key, stop_key,
            (scan_memory *)((char *)s->memory + (size_t)thread * s->thread_bytes));
}

/* ---- The best ---------------------------------------------------------------------------------- */

/* Floats order as these do; -0 as 0. */
static inline uint32_t order_of(float x) {
  const uint32_t bits = kvedge_bits_of_float(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Of n scores, the k-th largest in that order, k <= n; *ties: how many of those equal to it are among the k. By digits of 11, 11
 * and 10 bits: each pass counts the scores that begin as the k-th does. */
static uint32_t threshold_of(const float *scores, int64_t n, int64_t k, int64_t *ties) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 21; shift >= 0; shift = shift > 10 ? shift - 11 : shift > 0 ? 0 : -1) {
    enum { DIGITS = 2048 };
    uint32_t counts[DIGITS] = {0};
    const uint32_t digits = shift == 0 ? 1023 : DIGITS - 1;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t order = order_of(scores[i]);
      if ((order & mask) == prefix) counts[order >> shift & digits]++;
    }
    uint32_t digit = digits;
    while (counts[digit] < k) k -= counts[digit--];
    prefix |= digit << shift, mask |= digits << shift;
  }
  *ties = k;
  return prefix;
}

/* Scores of keys become those of blocks, from block `first` on: their largest. */
static void take_blocks(const kvedge_index_call *call, float *scores, int64_t first_key, int64_t stop_key) {
  const int64_t first = first_key / call->block, stop = (stop_key + call->block - 1) / call->block;
  for (int64_t b = first; b < stop; b++) {
    const int64_t from = b * call->block > first_key ? b * call->block : first_key;
    const int64_t to = (b + 1) * call->block < stop_key ? (b + 1) * call->block : stop_key;
    float largest = -INFINITY;
    for (int64_t i = from; i < to; i++) largest = scores[i] > largest ? scores[i] : largest;
    scores[b - first] = largest; /* b - first <= from */
  }
  for (int64_t b = stop - 1; b >= first && b >= stop - call->local_blocks; b--) scores[b - first] = INFINITY;
}

static void choose(const scan *s, int64_t row, int list) {
  const kvedge_index_call *call = s->call;
  const int64_t position = call->first_position + row, stop_key = keys_seen(call, row);
  const int64_t first_key = call->start / call->ratio, first = first_key / call->block;
  const int64_t size = call->block * call->ratio, stop = stop_key * call->ratio;
  float *scores = s->scores + ((row - s->first_row) * s->lists + list) * s->score_stride;
  int32_t *to = call->tokens + (row * s->lists + list) * call->token_width, *end = to + call->token_width;
  const int64_t n = blocks_seen(call, row);
  int64_t ties = n;
  uint32_t threshold = 0;
  if (n > call->k) {
    take_blocks(call, scores, first_key, stop_key);
    threshold = threshold_of(scores, n, call->k, &ties);
  }
  for (int64_t b = 0; b < n; b++) {
    const uint32_t order = n > call->k ? order_of(scores[b]) : 0;
    if (order < threshold || (order == threshold && ties-- <= 0)) continue;
    const int64_t block_stop = (first + b + 1) * size < stop ? (first + b + 1) * size : stop;
    for (int64_t t = (first + b) * size; t < block_stop; t++)
      if (t >= call->start) *to++ = (int32_t)t;
  }
  for (int64_t t = stop > call->start ? stop : call->start; t <= position; t++) *to++ = (int32_t)t;
  while (to < end) *to++ = -1;
}

static void run_choose(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const scan *s = context;
  (void)next, (void)slot, (void)thread, (void)stop;
  choose(s, s->first_row + task / s->lists, task % s->lists);
}

/* ---- A call ------------------------------------------------------------------------------------ */

int64_t kvedge_index_width(const kvedge_index_call *call) {
  const int64_t seen = call->first_position + call->num_rows - call->start, size = call->block * call->ratio;
  const int64_t chosen = call->k <= seen / size ? call->k * size + call->ratio - 1 : seen;
  return chosen < seen ? chosen : seen;
}

static int call_is_valid(const kvedge_index_keys *keys, const kvedge_index_call *call) {
  if (!keys || !call || !call->query || !call->tokens) return 0;
  if (keys->format != KVEDGE_INT8 && keys->format != KVEDGE_BFLOAT16 && keys->format != KVEDGE_FLOAT32) return 0;
  if (keys->head_dim < 1 || keys->head_dim > KVEDGE_MAX_HEAD_DIM || keys->num_keys < 0) return 0;
  if (keys->blocks && keys->keys_of_block < 1) return 0;
  if ((keys->num_keys > 0 && !keys->keys) || (keys->format == KVEDGE_INT8) != (keys->scales != NULL)) return 0;
  if (call->num_rows < 1 || call->num_heads < 1 || call->num_heads > MAX_HEADS || !isfinite(call->scale)) return 0;
  if (call->k < 1 || call->ratio < 1 || call->block < 1 || call->local_blocks < 0 || call->start < 0) return 0;
  if (call->ratio > INT32_MAX || call->block > INT32_MAX || call->k > INT32_MAX || call->local_blocks > call->k)
    return 0;
  if (call->first_position < 0 || call->first_position > INT32_MAX - call->num_rows) return 0;
  if (call->start % call->ratio || call->start > call->first_position) return 0;
  if (call->per_head && call->weights) return 0;
  if (call->per_head != 0 && call->per_head != 1) return 0;
  return keys_seen(call, call->num_rows - 1) <= keys->num_keys && call->token_width >= kvedge_index_width(call);
}

static int is_finite(const float *x, int64_t n) {
  return !x || n == 0 || kvedge_active()->rows->abs_max_bits(x, (size_t)n) < KVEDGE_NOT_FINITE;
}

/* Runs tasks, each once, which are `work` multiplications. */
static kvedge_status run_tasks(scan *s, void (*run)(void *, int, int, int, int, const volatile int *), int num_tasks,
                               double work, int num_threads) {
  num_threads = kvedge_threads_for(work / s->kernels->tuning.work_per_us, num_threads);
  const int threads = kvedge_job_threads(num_threads, num_tasks);
  const size_t head = kvedge_align(sizeof *s);
  kvedge_job *job = kvedge_job_take(head + (run == run_scan ? (size_t)threads * s->thread_bytes : 0));
  if (!job) return KVEDGE_ERROR_MEMORY;
  scan *own = kvedge_job_memory(job);
  *own = *s, own->memory = (scan_memory *)((char *)own + head);
  kvedge_job_run(job, (kvedge_work){.context = own, .num_tasks = num_tasks, .run = run, .once = 1}, threads);
  return KVEDGE_OK;
}

kvedge_status kvedge_index_select(const kvedge_index_keys *keys, const kvedge_index_call *call, int num_threads) {
  KVEDGE_FLOAT_MODE;
  if (num_threads < 0 || !call_is_valid(keys, call)) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_status ready = kvedge_isa_ready();
  if (ready != KVEDGE_OK) return ready;
  const int64_t num_queries = call->num_rows * call->num_heads;
  if (!is_finite(call->query, num_queries * keys->head_dim) || !is_finite(call->weights, num_queries))
    return KVEDGE_ERROR_NONFINITE;
  scan s = new_scan(keys, call);
  s.lists = call->per_head ? call->num_heads : 1;
  s.key_bytes = (ptrdiff_t)kvedge_row_bytes(s.format, keys->head_dim);
  s.head_bytes = keys->head_dim * (ptrdiff_t)sizeof(float), s.query_bytes = call->num_heads * s.head_bytes;
  s.weight_bytes = call->num_heads * (ptrdiff_t)sizeof(float);
  s.thread_bytes = kvedge_align(sizeof(scan_memory) + (keys->blocks ? KVEDGE_TILE * (size_t)s.key_bytes : 0));
  const size_t of_row = (size_t)s.lists * (size_t)(keys_seen(call, call->num_rows - 1) + 1) * sizeof(float);
  int64_t together = (int64_t)(SCORES_BYTES / of_row) / s.rows_of_task * s.rows_of_task;
  if (together < s.rows_of_task) together = s.rows_of_task;
  if (together > call->num_rows) together = call->num_rows;
  s.scores = kvedge_aligned_alloc(64, kvedge_align((size_t)together * of_row));
  if (!s.scores) return KVEDGE_ERROR_MEMORY;
  kvedge_status status = KVEDGE_OK;
  for (; s.first_row < call->num_rows && status == KVEDGE_OK; s.first_row += together) {
    const int64_t left = call->num_rows - s.first_row;
    s.num_rows = left < together ? left : together;
    s.num_keys = s.score_stride = keys_seen(call, s.first_row + s.num_rows - 1);
    s.chunk_keys = s.num_keys / (CHUNKS_OF_THREAD * (num_threads ? num_threads : kvedge_get_num_threads()));
    s.chunk_keys = s.chunk_keys < LEAST_KEYS  ? LEAST_KEYS
                   : s.chunk_keys > MOST_KEYS ? MOST_KEYS
                                              : s.chunk_keys / KVEDGE_TILE * KVEDGE_TILE;
    s.num_chunks = (s.num_keys + s.chunk_keys - 1) / s.chunk_keys;
    const int64_t groups = (s.num_rows + s.rows_of_task - 1) / s.rows_of_task;
    const double of_keys = (double)s.num_rows * (double)s.num_keys;
    if (s.num_chunks > 0)
      status = run_tasks(&s, run_scan, (int)(groups * s.num_chunks),
                         of_keys * keys->head_dim * (call->num_heads + 3.0 / s.rows_of_task), num_threads);
    if (status == KVEDGE_OK)
      status = run_tasks(&s, run_choose, (int)(s.num_rows * s.lists), of_keys * s.lists * 64, num_threads);
  }
  kvedge_aligned_free(s.scores);
  return status;
}

/* ---- Scores alone ------------------------------------------------------------------------------- */

/* The format of rows in memory of others; NULL: there is none. */
static const kvedge_format_info *format_of_rows(kvedge_format format) {
  const int has_rows =
      format == KVEDGE_FLOAT32 || format == KVEDGE_FLOAT16 || format == KVEDGE_BFLOAT16 || format == KVEDGE_Q8_0;
  return has_rows ? kvedge_format_of(format) : kvedge_format_of_blocks(format);
}

static int scores_are_valid(const kvedge_index_scores_call *c) {
  const ptrdiff_t size = sizeof(float);
  if (!c || !c->keys || !c->query || !c->weights || !c->scores) return 0;
  const kvedge_format_info *format = format_of_rows(c->format);
  if (!format || c->head_dim < 1 || c->head_dim > KVEDGE_MAX_HEAD_DIM) return 0;
  if (format->group_bytes && c->head_dim % format->group_channels) return 0;
  const ptrdiff_t element = format->group_bytes ? (ptrdiff_t)sizeof(uint16_t) : format->bits / 8;
  if (c->key_stride < (ptrdiff_t)kvedge_row_bytes(format, c->head_dim) || c->key_stride % element) return 0;
  if (c->num_keys < 1 || c->num_keys > INT32_MAX || c->num_rows < 1 || c->num_heads < 1 || c->num_heads > MAX_HEADS)
    return 0;
  if (c->row_stride % size || c->head_stride % size || c->weight_stride % size || c->score_stride % size) return 0;
  return c->score_stride / size >= c->num_keys || c->num_rows == 1;
}

size_t kvedge_index_scores_bytes(int head_dim) {
  return kvedge_align(sizeof(scan_memory)) + DECODED_KEYS * sizeof(float) * (size_t)head_dim;
}

kvedge_status kvedge_index_scores(const kvedge_index_scores_call *c, void *memory) {
  KVEDGE_FLOAT_MODE;
  if (!scores_are_valid(c) || !memory) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_status ready = kvedge_isa_ready();
  if (ready != KVEDGE_OK) return ready;
  for (int64_t row = 0; row < c->num_rows; row++)
    for (int h = 0; h < c->num_heads; h++)
      if (!is_finite((const float *)((const char *)c->query + row * c->row_stride + h * c->head_stride), c->head_dim))
        return KVEDGE_ERROR_NONFINITE;
  const kvedge_format_info *format = format_of_rows(c->format);
  const kvedge_row_shape shape = kvedge_row_shape_of(format, c->head_dim, c->head_dim, KVEDGE_SCALE_FLOAT32);
  const int decodes = !has_cell(kvedge_active(), c->format);
  float *decoded = (float *)((char *)memory + kvedge_align(sizeof(scan_memory)));
  const kvedge_index_keys keys = {.format = decodes ? KVEDGE_FLOAT32 : c->format,
                                  .head_dim = c->head_dim,
                                  .num_keys = c->num_keys,
                                  .keys = decodes ? decoded : c->keys};
  const kvedge_index_call call = {
      .query = c->query, .weights = c->weights, .num_rows = c->num_rows, .num_heads = c->num_heads, .scale = 1.0f};
  scan s = new_scan(&keys, &call);
  s.lists = 1, s.score_stride = c->score_stride / (ptrdiff_t)sizeof(float);
  s.query_bytes = c->row_stride, s.head_bytes = c->head_stride, s.weight_bytes = c->weight_stride;
  s.key_bytes = decodes ? c->head_dim * (ptrdiff_t)sizeof(float) : c->key_stride;
  const int64_t step = decodes ? DECODED_KEYS : c->num_keys;
  for (int64_t first = 0; first < c->num_keys; first += step) {
    const int64_t num_keys = c->num_keys - first < step ? c->num_keys - first : step;
    for (int64_t i = 0; decodes && i < num_keys; i++)
      format->decode(&shape, (const char *)c->keys + (first + i) * c->key_stride, NULL, 1, decoded + i * c->head_dim);
    s.scores = c->scores + first;
    for (int64_t row = 0; row < c->num_rows; row += s.rows_of_task) {
      const int64_t left = c->num_rows - row;
      scan_rows(&s, row, left < s.rows_of_task ? (int)left : s.rows_of_task, 0, num_keys, memory);
    }
  }
  return KVEDGE_OK;
}
