/* kvedge beside ggml_flash_attn_ext in one ggml graph: the same keys, values, queries and masks.
 *
 *   make run           or compile this and kvedge_ggml.c with kvedge and ggml; the Makefile is a few lines
 *   ./compare          compares results: prompts, single tokens, cells in disorder, two sequences in one cache
 *   ./compare time     times one token at 8,192 and 32,768 tokens; THREADS=n, default 1
 *
 * Exits with 1 if a result is wrong.
 */
#define _POSIX_C_SOURCE 200809L
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvedge_ggml.h"

typedef struct {
  const char *name;
  int num_heads, num_kv_heads, head_dim;
} shape;

static const shape SHAPES[] = {
    {"Llama-3.2-1B", 32, 8, 64 },
    {"Qwen2.5-0.5B", 14, 2, 64 },
    {"Qwen3-0.6B",   16, 8, 128},
};
enum { NUM_SHAPES = sizeof SHAPES / sizeof *SHAPES };

/* A layer's cache: that of llama.cpp with flash attention, which kvedge reads in place, or one that kvedge stores itself. */
typedef struct {
  const char *name;
  enum ggml_type type;
  int is_kvedge;
  double tolerance; /* of the largest output, against float64 on the float32 rows */
} storage;

static const storage STORAGES[] = {
    {"ggml f16",    GGML_TYPE_F16,  0, 1e-2}, /* it sums values in float16 */
    {"ggml q8_0",   GGML_TYPE_Q8_0, 0, 2e-2},
    {"kvedge f16",  GGML_TYPE_F16,  1, 1e-3},
    {"kvedge int8", GGML_TYPE_I8,   1, 2e-2},
};
enum { NUM_STORAGES = sizeof STORAGES / sizeof *STORAGES, GGML_F16 = 0, GGML_Q8_0, IN_PLACE, INT8 };

typedef struct {
  struct ggml_tensor *k, *v, *k_scale, *v_scale;
  kvedge_layer *layer; /* NULL: ggml's */
} cache;

static void *check(void *pointer, const char *what) {
  if (!pointer) {
    fprintf(stderr, "compare: no %s\n", what);
    exit(1);
  }
  return pointer;
}

static struct ggml_context *new_context(void) { /* of descriptions; data is in buffers */
  const struct ggml_init_params params = {.mem_size = (size_t)1 << 20, .no_alloc = true};
  return check(ggml_init(params), "context");
}

static cache new_tensors(struct ggml_context *ctx, const storage *s, const shape *m, int64_t cells) {
  const int64_t width = (int64_t)m->num_kv_heads * m->head_dim;
  cache c = {.k = ggml_new_tensor_2d(ctx, s->type, width, cells), .v = ggml_new_tensor_2d(ctx, s->type, width, cells)};
  if (s->type == GGML_TYPE_I8) {
    c.k_scale = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, m->num_kv_heads, cells);
    c.v_scale = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, m->num_kv_heads, cells);
  }
  return c;
}

/* The attention of one layer as llama.cpp builds it (llama_kv_cache::cpy_k, get_k, build_attn_mha): k_cur and v_cur,
 * [head_dim, n_head_kv, n_tokens], are stored in `cells`, and q, [head_dim, n_head, n_tokens], sees cells 0..n_kv-1. */
static struct ggml_tensor *build_attention(struct ggml_context *ctx, struct ggml_cgraph *graph, const cache *c,
                                           const shape *m, kvedge_ggml_call *call, struct ggml_tensor *q,
                                           struct ggml_tensor *k_cur, struct ggml_tensor *v_cur,
                                           struct ggml_tensor *cells, struct ggml_tensor *mask, int64_t n_kv) {
  const float scale = 1.0f / sqrtf((float)m->head_dim);
  struct ggml_tensor *out;
  q = ggml_permute(ctx, q, 0, 2, 1, 3);
  if (c->layer) {
    *call = (kvedge_ggml_call){.layer = c->layer, .n_kv = n_kv, .scale = scale};
    if (c->k->type != GGML_TYPE_I8) k_cur = v_cur = NULL; /* ggml has stored them */
    out = kvedge_ggml_attend(ctx, call, q, k_cur, v_cur, cells, mask, NULL);
  } else {
    struct ggml_tensor *stored[] = {c->k, c->v}, *rows[] = {k_cur, v_cur};
    for (int i = 0; i < 2; i++) {
      if (k_cur) { /* first in the graph, so that it comes before it is read */
        struct ggml_tensor *flat = ggml_reshape_2d(ctx, rows[i], c->k->ne[0], rows[i]->ne[2]);
        ggml_build_forward_expand(graph, ggml_set_rows(ctx, stored[i], flat, cells));
      }
      stored[i] = ggml_view_3d(ctx, stored[i], m->head_dim, m->num_kv_heads, n_kv,
                               ggml_row_size(stored[i]->type, m->head_dim), stored[i]->nb[1], 0);
      stored[i] = ggml_permute(ctx, stored[i], 0, 2, 1, 3);
    }
    out = ggml_flash_attn_ext(ctx, q, stored[0], stored[1], mask, scale, 0.0f, 0.0f);
  }
  ggml_set_output(out);
  ggml_build_forward_expand(graph, out);
  return out;
}

static float random_float(unsigned *state) { /* about normal, variance 1 */
  float sum = 0.0f;
  for (int i = 0; i < 4; i++) {
    *state = *state * 1664525u + 1013904223u;
    sum += (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
  }
  return sum * 0.866f;
}

static float *random_floats(size_t n, unsigned *state) {
  float *x = check(malloc(n * sizeof *x), "memory");
  for (size_t i = 0; i < n; i++) x[i] = random_float(state);
  return x;
}

/* ---- Comparing ----------------------------------------------------------------------------- */

enum { CELLS = 512, LONGEST_STEP = 40, SEQUENCES = 2 };

/* A cell's token, as llama_kv_cells keeps them. */
typedef struct {
  int sequence, position; /* position -1: free */
} cell;

/* float64 attention of one query row over the cells that it sees, on rows as they were before they were stored. */
static void reference(const shape *m, const float *q, int head, const float *keys, const float *values,
                      const cell *cells, cell own, double *out) {
  const int width = m->num_kv_heads * m->head_dim, kv_head = head / (m->num_heads / m->num_kv_heads);
  double sum = 0.0;
  for (int i = 0; i < m->head_dim; i++) out[i] = 0.0;
  for (int c = 0; c < CELLS; c++) { /* logits here are small: no maximum is needed in float64 */
    if (cells[c].position < 0 || cells[c].sequence != own.sequence || cells[c].position > own.position) continue;
    const float *key = keys + c * width + kv_head * m->head_dim, *value = values + c * width + kv_head * m->head_dim;
    double dot = 0.0;
    for (int i = 0; i < m->head_dim; i++) dot += (double)q[i] * key[i];
    const double p = exp(dot / sqrt(m->head_dim));
    sum += p;
    for (int i = 0; i < m->head_dim; i++) out[i] += p * value[i];
  }
  for (int i = 0; i < m->head_dim; i++) out[i] /= sum;
}

/* Two sequences take turns in one cache of cells in disorder, a prompt at first and single tokens then; all storages in one
 * graph. Returns 1 if all is as it has to be. */
static int compare(const shape *m, int num_threads) {
  const int width = m->num_kv_heads * m->head_dim;
  unsigned state = 1;
  struct ggml_context *fixed = new_context();
  cache caches[NUM_STORAGES];
  for (int s = 0; s < NUM_STORAGES; s++)
    caches[s] = s == IN_PLACE ? caches[GGML_F16] : new_tensors(fixed, &STORAGES[s], m, CELLS);
  ggml_backend_t backend = check(ggml_backend_cpu_init(), "backend");
  ggml_backend_cpu_set_n_threads(backend, num_threads);
  ggml_backend_buffer_t buffer = check(ggml_backend_alloc_ctx_tensors(fixed, backend), "buffer");
  ggml_backend_buffer_clear(buffer, 0);
  for (int s = 0; s < NUM_STORAGES; s++) {
    const cache *c = &caches[s];
    caches[s].layer = STORAGES[s].is_kvedge
                          ? check(kvedge_ggml_attach(c->k, c->v, c->k_scale, c->v_scale, m->num_kv_heads), "layer")
                          : NULL;
  }
  ggml_gallocr_t allocator = check(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)), "allocator");

  cell cells[CELLS];
  float *keys = random_floats((size_t)CELLS * (size_t)width, &state);
  float *values = random_floats((size_t)CELLS * (size_t)width, &state);
  for (int c = 0; c < CELLS; c++) cells[c] = (cell){.position = -1};
  double worst[NUM_STORAGES] = {0}, largest = 0.0;
  int lengths[SEQUENCES] = {0}, used = 0, good = 1;

  for (int step = 0; used + LONGEST_STEP <= CELLS; step++) {
    const int n = step < 8 ? LONGEST_STEP - step : 1, sequence = step % SEQUENCES;
    const int is_row = step % 3 != 0; /* cells side by side, or a jump from one to the next */
    /* What a free cell holds is not looked at. n_kv is a multiple of 256, as llama.cpp pads it. */
    const int64_t n_kv = used + n <= 256 ? 256 : CELLS;
    struct ggml_context *ctx = new_context();
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    struct ggml_tensor *q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, m->head_dim, m->num_heads, n);
    struct ggml_tensor *k_cur = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, m->head_dim, m->num_kv_heads, n);
    struct ggml_tensor *v_cur = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, m->head_dim, m->num_kv_heads, n);
    struct ggml_tensor *where = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
    struct ggml_tensor *mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, n);
    struct ggml_tensor *inputs[] = {q, k_cur, v_cur, where, mask}, *outs[NUM_STORAGES];
    for (int i = 0; i < 5; i++) ggml_set_input(inputs[i]);
    kvedge_ggml_call calls[NUM_STORAGES];
    for (int s = 0; s < NUM_STORAGES; s++)
      outs[s] = build_attention(ctx, graph, &caches[s], m, &calls[s], q, k_cur, v_cur, where, mask, n_kv);
    if (!ggml_gallocr_alloc_graph(allocator, graph)) check(NULL, "memory for the graph");

    /* New tokens, in free cells. */
    cell own[LONGEST_STEP];
    int at[LONGEST_STEP];
    float *queries = random_floats((size_t)(n * m->num_heads * m->head_dim), &state);
    memcpy(q->data, queries, ggml_nbytes(q));
    for (int i = 0, c = 0; i < n; i++, c += is_row ? 1 : 7) {
      while (cells[c % n_kv].position >= 0) c++;
      at[i] = c % (int)n_kv;
      own[i] = cells[at[i]] = (cell){.sequence = sequence, .position = lengths[sequence]++};
      ((int64_t *)where->data)[i] = at[i];
      memcpy((float *)k_cur->data + i * width, keys + at[i] * width, (size_t)width * sizeof(float));
      memcpy((float *)v_cur->data + i * width, values + at[i] * width, (size_t)width * sizeof(float));
    }
    used += n;
    for (int i = 0; i < n; i++)
      for (int c = 0; c < n_kv; c++) {
        const int seen =
            cells[c].position >= 0 && cells[c].sequence == sequence && cells[c].position <= own[i].position;
        ((ggml_fp16_t *)mask->data)[i * n_kv + c] = ggml_fp32_to_fp16(seen ? 0.0f : -INFINITY);
      }

    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) check(NULL, "result of the graph");
    for (int s = 0; s < NUM_STORAGES; s++)
      if (caches[s].layer && calls[s].status) check(NULL, kvedge_strerror(calls[s].status));
    double expected[256];
    for (int row = 0; row < n; row++)
      for (int head = 0; head < m->num_heads; head++) {
        const int from = (row * m->num_heads + head) * m->head_dim;
        reference(m, queries + from, head, keys, values, cells, own[row], expected);
        for (int i = 0; i < m->head_dim; i++) {
          largest = fmax(largest, fabs(expected[i]));
          for (int s = 0; s < NUM_STORAGES; s++) {
            const double error = fabs(((float *)outs[s]->data)[from + i] - expected[i]);
            if (!(error <= worst[s])) worst[s] = error; /* also a NaN */
          }
        }
      }
    free(queries);
    ggml_free(ctx);
  }
  printf("%-14s %d threads, error of the largest output:", m->name, num_threads);
  for (int s = 0; s < NUM_STORAGES; s++) {
    printf("  %s %.1e", STORAGES[s].name, worst[s] / largest);
    good &= worst[s] <= STORAGES[s].tolerance * largest;
  }
  printf("%s\n", good ? "" : "  WRONG");

  for (int s = 0; s < NUM_STORAGES; s++)
    if (caches[s].layer) kvedge_ggml_detach(caches[s].layer);
  free(keys), free(values);
  ggml_gallocr_free(allocator);
  ggml_backend_buffer_free(buffer);
  ggml_backend_free(backend);
  ggml_free(fixed);
  return good;
}

/* ---- Timing -------------------------------------------------------------------------------- */

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Layers of a model, each with a cache of its own, so that no cache is in the processor's when its turn comes. */
enum { LAYERS = 4, ROUNDS = 9 };

/* One token through LAYERS layers of n_kv - 1 tokens: it is stored and attends to all, as in decoding, without a mask. */
static void time_decode(const shape *m, int64_t n_kv, int num_threads) {
  const int width = m->num_kv_heads * m->head_dim;
  enum { CHUNK = 1024 };
  unsigned state = 1;
  float *rows = random_floats((size_t)CHUNK * (size_t)width, &state);
  ggml_backend_t backend = check(ggml_backend_cpu_init(), "backend");
  ggml_threadpool_t pool;
  struct ggml_threadpool_params pool_params = ggml_threadpool_params_default(num_threads);
  ggml_backend_cpu_set_n_threads(backend, num_threads);
  ggml_backend_cpu_set_threadpool(backend, pool = check(ggml_threadpool_new(&pool_params), "threads"));

  struct ggml_context *fixed[NUM_STORAGES], *ctx[NUM_STORAGES];
  struct ggml_cgraph *graphs[NUM_STORAGES];
  ggml_backend_buffer_t buffers[NUM_STORAGES];
  ggml_gallocr_t allocators[NUM_STORAGES];
  static kvedge_ggml_call calls[NUM_STORAGES][LAYERS];
  cache caches[NUM_STORAGES][LAYERS];
  for (int s = 0; s < NUM_STORAGES; s++) {
    fixed[s] = new_context();
    for (int l = 0; l < LAYERS; l++)
      caches[s][l] = s == IN_PLACE ? caches[GGML_F16][l] : new_tensors(fixed[s], &STORAGES[s], m, n_kv);
    struct ggml_tensor *q = ggml_new_tensor_3d(fixed[s], GGML_TYPE_F32, m->head_dim, m->num_heads, 1);
    struct ggml_tensor *k_cur = ggml_new_tensor_3d(fixed[s], GGML_TYPE_F32, m->head_dim, m->num_kv_heads, 1);
    struct ggml_tensor *v_cur = ggml_new_tensor_3d(fixed[s], GGML_TYPE_F32, m->head_dim, m->num_kv_heads, 1);
    struct ggml_tensor *where = ggml_new_tensor_1d(fixed[s], GGML_TYPE_I64, 1);
    buffers[s] = check(ggml_backend_alloc_ctx_tensors(fixed[s], backend), "buffer");
    ggml_backend_buffer_clear(buffers[s], 0);
    memcpy(q->data, rows, ggml_nbytes(q)); /* CHUNK rows are more than any query */
    memcpy(k_cur->data, rows, ggml_nbytes(k_cur));
    memcpy(v_cur->data, rows, ggml_nbytes(v_cur));
    *(int64_t *)where->data = n_kv - 1;

    ctx[s] = new_context();
    graphs[s] = ggml_new_graph(ctx[s]);
    for (int l = 0; l < LAYERS; l++) {
      cache *c = &caches[s][l];
      c->layer = STORAGES[s].is_kvedge
                     ? check(kvedge_ggml_attach(c->k, c->v, c->k_scale, c->v_scale, m->num_kv_heads), "layer")
                     : NULL;
      for (int64_t token = 0; token < n_kv; token += CHUNK)
        if (s == INT8) {
          if (kvedge_layer_append(c->layer, rows, rows, CHUNK)) check(NULL, "room");
        } else if (s != IN_PLACE) {
          for (int side = 0; side < 2; side++) {
            struct ggml_tensor *t = side ? c->v : c->k;
            ggml_get_type_traits_cpu(t->type)->from_float(rows, (char *)t->data + (size_t)token * t->nb[1],
                                                          CHUNK * width);
          }
        }
      if (s == IN_PLACE && kvedge_layer_set_len(c->layer, n_kv)) check(NULL, "layer");
      build_attention(ctx[s], graphs[s], c, m, &calls[s][l], q, k_cur, v_cur, where, NULL, n_kv);
    }
    allocators[s] = check(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)), "allocator");
    if (!ggml_gallocr_alloc_graph(allocators[s], graphs[s])) check(NULL, "memory for the graph");
  }

  double times[NUM_STORAGES][ROUNDS];
  for (int round = -1; round < ROUNDS; round++) /* -1: warming up */
    for (int s = 0; s < NUM_STORAGES; s++) {
      const double start = seconds();
      if (ggml_backend_graph_compute(backend, graphs[s]) != GGML_STATUS_SUCCESS) check(NULL, "result of the graph");
      if (round >= 0) times[s][round] = (seconds() - start) * 1e6 / LAYERS;
    }
  double medians[NUM_STORAGES];
  for (int s = 0; s < NUM_STORAGES; s++) {
    qsort(times[s], ROUNDS, sizeof *times[s], by_size);
    medians[s] = times[s][ROUNDS / 2];
  }
  printf("| %s | %lld |", m->name, (long long)n_kv);
  for (int s = 0; s < NUM_STORAGES; s++) printf(" %.0f |", medians[s]);
  printf(" %.1f | %.1f |\n", medians[GGML_F16] / medians[IN_PLACE], medians[GGML_Q8_0] / medians[INT8]);
  fflush(stdout);

  for (int s = 0; s < NUM_STORAGES; s++) {
    for (int l = 0; l < LAYERS; l++)
      if (caches[s][l].layer) kvedge_ggml_detach(caches[s][l].layer);
    ggml_gallocr_free(allocators[s]);
    ggml_backend_buffer_free(buffers[s]);
    ggml_free(ctx[s]), ggml_free(fixed[s]);
  }
  ggml_backend_free(backend);
  ggml_threadpool_free(pool);
  free(rows);
}

int main(int argc, char **argv) {
  if (argc > 2 || (argc == 2 && strcmp(argv[1], "time"))) {
    fprintf(stderr, "compare [time]\n");
    return 2;
  }
  if (argc == 1) {
    int good = 1;
    for (int i = 0; i < NUM_SHAPES; i++)
      for (int threads = 1; threads <= 2; threads++) good &= compare(&SHAPES[i], threads);
    return !good;
  }
  const char *threads = getenv("THREADS");
  printf("us per layer and token, %s thread(s), %s\n", threads ? threads : "1", kvedge_isa_name());
  printf("| model | tokens |");
  for (int s = 0; s < NUM_STORAGES; s++) printf(" %s |", STORAGES[s].name);
  printf(" f16: times as fast | 8 bits: times as fast |\n|:--|--:|--:|--:|--:|--:|--:|--:|\n");
  for (int i = 0; i < NUM_SHAPES; i++)
    for (int64_t n_kv = 8192; n_kv <= 32768; n_kv *= 4) time_decode(&SHAPES[i], n_kv, threads ? atoi(threads) : 1);
  return 0;
}
