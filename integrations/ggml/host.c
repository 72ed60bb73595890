/* A ggml that is loaded: found, checked, tried on a tiny graph, and taken over.
 *
 * What is taken over is one slot of its CPU device, init_backend: CPU backends made from then on are ggml's own, with
 * another graph_compute, which lets attention nodes run on kvedge and all else as ever. The scheduler, threadpools, abort
 * callbacks and "flash attention: auto" see nothing of it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "kvedge_ggml.h"

enum { MOST_HOSTS = 8 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static host hosts[MOST_HOSTS];
static int num_hosts;
static hooked_backend *hooked; /* of all backends that kvedge looks at */
static atomic_int is_enabled;

/* ---- Backends that kvedge looks at ---------------------------------------------------------------- */

hooked_backend *hooked_of_backend(backend *b) {
  pthread_mutex_lock(&lock);
  hooked_backend *s = hooked;
  while (s && s->of_backend != b) s = s->following;
  pthread_mutex_unlock(&lock);
  return s;
}

static void free_hooked(backend *b) {
  pthread_mutex_lock(&lock);
  hooked_backend **at = &hooked;
  while (*at && (*at)->of_backend != b) at = &(*at)->following;
  hooked_backend *s = *at;
  if (s) *at = s->following;
  pthread_mutex_unlock(&lock);
  if (!s) return; /* not possible: the slot was set with the state */
  void (*own)(backend *) = s->free;
  if (s->helper) s->of->f.ggml_backend_free(s->helper);
  for (size_t i = 0; i < sizeof s->masks / sizeof *s->masks; i++) forget_masks(&s->masks[i]);
  free(s->jobs), free(s->memory), free(s->calls), free(s->caches), free(s->options), free(s->segments), free(s->slopes),
      free(s->tokens), free(s->places), free(s->is_stored), free(s->bias), free(s->runs), free(s->gathered);
  forget_exact(s);
  free(s);
  own(b);
}

/* Does a graph attend by products and a softmax? That has a mask, or several heads; one of experts has neither. */
static int has_softmax_of_heads(const host *h, graph *g) {
  const int num_nodes = h->f.ggml_graph_n_nodes(g);
  for (int i = 0; i < num_nodes; i++) {
    const tensor *node = h->f.ggml_graph_node(g, i);
    if ((node->src[1] || node->ne[2] > 1) && strcmp(h->f.ggml_op_name(node->op), "SOFT_MAX") == 0) return 1;
  }
  return 0;
}

/* Makes a node a custom one, whose own operation and parameters are kept. */
static void make_custom(const host *h, tensor *node, int32_t *params, custom_op run, void *userdata) {
  const custom_params custom = {run, N_TASKS_MAX, userdata};
  memcpy(params, node->op_params, PARAM_BYTES);
  memset(node->op_params, 0, PARAM_BYTES);
  memcpy(node->op_params, &custom, sizeof custom);
  node->op = h->op_custom;
}

/* Lets the nodes that write rows into quantized caches run on kvedge, so that exact ones are kept; returns how many. */
static int replace_writes(hooked_backend *s, graph *g) {
  const host *h = s->of;
  const int num_nodes = exact_recent() ? h->f.ggml_graph_n_nodes(g) : 0;
  int num = 0;
  for (int i = 0; i < MOST_WRITTEN; i++) s->written[i].node = NULL; /* of the last graph */
  for (int i = 0; i < num_nodes; i++) {
    tensor *node = h->f.ggml_graph_node(g, i);
    if (!writes_rows(h, node)) continue;
    if (!grow(&s->write_jobs, &s->room_write_jobs, num + 1, sizeof *s->write_jobs)) break;
    s->write_jobs[num] = (write_job){.of = s, .node = node, .op = node->op};
    if (!reserve_written(s, &s->write_jobs[num], num)) break;
    num++;
  }
  for (int i = 0; i < num; i++) {
    write_job *j = &s->write_jobs[i];
    make_custom(h, j->node, j->params, run_write, j);
  }
  s->num_graphs++;
  return num;
}

static void restore_write(const write_job *j) {
  j->node->op = j->op;
  memcpy(j->node->op_params, j->params, sizeof j->params);
}

/* Lets the attention nodes and scans of an index of a graph run on kvedge; returns how many. */
static int replace_nodes(hooked_backend *s, graph *g) {
  const host *h = s->of;
  const int num_nodes = h->f.ggml_graph_n_nodes(g);
  int num = 0, num_attention = 0;
  for (size_t i = 0; i < sizeof s->masks / sizeof *s->masks; i++) s->masks[i].mask = NULL; /* those of the last graph */
  for (int i = 0; i < num_nodes; i++) {
    tensor *node = h->f.ggml_graph_node(g, i);
    const int is_attention = node->op == h->op_attention;
    if (!is_attention && node->op != h->op_index) continue;
    num_attention += is_attention;
    const reason why = is_attention ? serves(h, node, s->takes_all) : serves_index(h, node, s->takes_all);
    if (why != TAKEN) {
      count(why, 1);
      continue;
    }
    if (!grow(&s->jobs, &s->room_jobs, num + 1, sizeof *s->jobs)) break;
    s->jobs[num++] = (node_job){.of = s, .node = node, .op = node->op};
  }
  if (!num_attention && has_softmax_of_heads(h, g)) count(LEFT_NO_NODE, 1);
  for (int i = 0; i < num; i++) /* once the jobs stay where they are */
    make_custom(h, s->jobs[i].node, s->jobs[i].params, s->jobs[i].op == h->op_attention ? run_node : run_index,
                &s->jobs[i]);
  return num;
}

static int compute_hooked(backend *b, graph *g) {
  hooked_backend *s = hooked_of_backend(b);
  if (!s) return -1; /* not possible */
  if (!atomic_load(&is_enabled) && !s->takes_all) return s->compute(b, g);
  if (atomic_flag_test_and_set(&s->is_busy)) {
    count(LEFT_BUSY, 1);
    return s->compute(b, g);
  }
  const int num = replace_nodes(s, g), num_writes = num ? replace_writes(s, g) : 0;
  const int status = s->compute(b, g);
  for (int i = 0; i < num; i++) restore_node(&s->jobs[i]);
  for (int i = 0; i < num_writes; i++) restore_write(&s->write_jobs[i]);
  atomic_flag_clear(&s->is_busy);
  return status;
}

static hooked_backend *hook(host *h, backend *b) {
  hooked_backend *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  void **words = backend_words(b);
  s->of = h, s->of_backend = b;
  atomic_flag_clear(&s->is_busy);
  memcpy(&s->free, &words[h->at_free], sizeof s->free);
  memcpy(&s->compute, &words[h->at_compute], sizeof s->compute);
  pthread_mutex_lock(&lock);
  s->following = hooked;
  hooked = s;
  pthread_mutex_unlock(&lock);
  int (*const compute)(backend *, graph *) = compute_hooked;
  void (*const release)(backend *) = free_hooked;
  memcpy(&words[h->at_free], &release, sizeof release);
  memcpy(&words[h->at_compute], &compute, sizeof compute);
  return s;
}

static host *known_host(const device *cpu) {
  pthread_mutex_lock(&lock);
  host *found = NULL;
  for (int i = 0; i < num_hosts; i++)
    if (hosts[i].cpu == cpu) found = &hosts[i];
  pthread_mutex_unlock(&lock);
  return found;
}

backend *init_hooked(device *cpu, const char *params) {
  host *h = known_host(cpu);
  if (!h) return NULL; /* not possible: the slot is set once the host is known */
  backend *b = h->init_backend(cpu, params);
  if (b) hook(h, b);
  return b;
}

/* ---- Is this ggml as expected? -------------------------------------------------------------------- */

#define EXPECT(condition, ...)                                                                                         \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      snprintf(why, why_bytes, __VA_ARGS__);                                                                           \
      return 0;                                                                                                        \
    }                                                                                                                  \
  } while (0)

static int find_functions(host *h, char *why, size_t why_bytes) {
  void *at;
#define FIND(result, name, arguments)                                                                                  \
  EXPECT(at = dlsym(h->handle, #name), "this ggml has no function " #name);                                            \
  memcpy(&h->f.name, &at, sizeof at);
  GGML_FUNCTIONS(FIND)
#undef FIND
  /* A CPU backend that is a library of its own is none that the handle knows. */
  void *init = NULL;
  memcpy(&init, &h->cpu->init_backend, sizeof init);
  if ((at = dlsym(h->handle, "ggml_get_type_traits_cpu")) ||
      (at = dlsym(library_of(init), "ggml_get_type_traits_cpu"))) {
    memcpy(&h->cpu_traits, &at, sizeof at);
    h->encode_float16 = h->cpu_traits(TYPE_F16)->from_float;
  }
  const char *(*version)(void) = NULL;
  if ((at = dlsym(h->handle, "ggml_version"))) memcpy(&version, &at, sizeof at);
  snprintf(h->name, sizeof h->name, "ggml %s", version ? version() : "of an unknown version");
  return 1;
}

/* Tensors of a tiny attention, in a context of theirs. */
typedef struct {
  context *ctx;
  tensor *q, *k, *v, *mask, *out, *custom;
  graph *g;
} tiny;
enum { TINY_DIM = 64, TINY_CELLS = 32, TINY_ROWS = 2, TINY_HEADS = 4, TINY_KV_HEADS = 2 };

static tiny make_tiny(const ggml_functions *f, void *userdata) {
  const size_t bytes =
      ((size_t)TINY_DIM * 4 * (2 * TINY_CELLS * TINY_KV_HEADS + 4 * TINY_ROWS * TINY_HEADS) + (64 << 10));
  tiny t = {.ctx = f->ggml_init((init_params){bytes + f->ggml_graph_overhead(), NULL, false})};
  if (!t.ctx) return t;
  t.q = f->ggml_new_tensor_4d(t.ctx, TYPE_F32, TINY_DIM, TINY_ROWS, TINY_HEADS, 1);
  t.k = f->ggml_new_tensor_4d(t.ctx, TYPE_F16, TINY_DIM, TINY_CELLS, TINY_KV_HEADS, 1);
  t.v = f->ggml_new_tensor_4d(t.ctx, TYPE_F16, TINY_DIM, TINY_CELLS, TINY_KV_HEADS, 1);
  t.mask = f->ggml_new_tensor_4d(t.ctx, TYPE_F16, TINY_CELLS, 64, 1, 1);
  t.out = f->ggml_flash_attn_ext(t.ctx, t.q, t.k, t.v, t.mask, 0.125f, 0.0f, 0.0f);
  t.custom = f->ggml_custom_4d(t.ctx, TYPE_F32, 1, 2, 3, 4, &t.q, 1, run_node, N_TASKS_MAX, userdata);
  t.g = f->ggml_new_graph(t.ctx);
  f->ggml_build_forward_expand(t.g, t.out);
  return t;
}

/* Do the CPU backend's functions encode as float16 and q8_0 are known? */
static int encodes_as_known(const host *h) {
  enum { BLOCK = 32 };
  uint16_t halves[2] = {0, 0};
  struct {
    uint16_t scale;
    int8_t codes[BLOCK];
  } block = {.scale = 0};
  float row[BLOCK];
  for (int i = 0; i < BLOCK; i++)
    row[i] = (float)(i * 8 - 127 + (i == BLOCK - 1) * 6); /* -127 to 127, so the scale is 1 */
  const from_float encode = encoder_of(h, TYPE_Q8_0);
  if (!h->encode_float16 || !encode) return 0;
  h->encode_float16((const float[]){1.0f, -5.0f}, halves, 2);
  encode(row, &block, BLOCK);
  int is_known = halves[0] == 0x3c00 && halves[1] == 0xc500 && block.scale == 0x3c00;
  for (int i = 0; i < BLOCK; i++) is_known &= block.codes[i] == (int8_t)row[i];
  return is_known;
}

/* Are tensors laid out as in ggml_abi.h? */
static int check_tensors(host *h, const tiny *t, const void *userdata, char *why, size_t why_bytes) {
  const ggml_functions *f = &h->f;
  enum { OVERHEAD = 32 }; /* of an object in a context */
  EXPECT(t->ctx && t->q && t->k && t->v && t->mask && t->out && t->custom && t->g, "it makes no tensors");
  EXPECT(f->ggml_tensor_overhead() >= sizeof(tensor) + OVERHEAD, "its tensors have %zu bytes",
         f->ggml_tensor_overhead() - OVERHEAD);
  const tensor *k = t->k, *out = t->out;
  EXPECT(k->type == TYPE_F16 && k->ne[0] == TINY_DIM && k->ne[1] == TINY_CELLS && k->ne[2] == TINY_KV_HEADS &&
             k->ne[3] == 1 && k->nb[0] == 2 && k->nb[1] == TINY_DIM * 2 && k->nb[2] == TINY_DIM * 2 * TINY_CELLS &&
             k->data && k->op == 0 && !k->src[0],
         "its tensors are laid out in another way");
  float params[3];
  memcpy(params, out->op_params, sizeof params);
  EXPECT(out->src[0] == t->q && out->src[1] == t->k && out->src[2] == t->v && out->src[3] == t->mask && !out->src[4] &&
             out->type == TYPE_F32 && out->ne[0] == TINY_DIM && out->ne[1] == TINY_HEADS && out->ne[2] == TINY_ROWS &&
             out->nb[2] == TINY_DIM * 4 * TINY_HEADS && params[0] == 0.125f && params[1] == 0.0f && params[2] == 0.0f,
         "its attention nodes are laid out in another way");
  h->op_attention = out->op, h->op_custom = t->custom->op;
  EXPECT(strcmp(f->ggml_op_name(h->op_attention), "FLASH_ATTN_EXT") == 0 &&
             strcmp(f->ggml_op_name(h->op_custom), "CUSTOM") == 0,
         "its operations have other names");
  custom_params custom;
  memcpy(&custom, t->custom->op_params, sizeof custom);
  EXPECT(custom.fun == run_node && custom.n_tasks == N_TASKS_MAX && custom.userdata == userdata,
         "its custom nodes are laid out in another way");
  for (int i = 0; i < NUM_ROW_TYPES; i++) {
    const row_type *of = &row_types[i];
    EXPECT(strcmp(f->ggml_type_name(of->type), of->name) == 0, "its types have other numbers");
    EXPECT(f->ggml_blck_size(of->type) == of->block_elements && f->ggml_type_size(of->type) == of->block_bytes,
           "its type %s has other blocks", of->name);
    const type_traits *traits = f->ggml_get_type_traits(of->type);
    EXPECT(traits->name == f->ggml_type_name(of->type) && traits->block_elements == of->block_elements &&
               traits->block_bytes == of->block_bytes && traits->is_quantized == (of->block_elements > 1),
           "its types are laid out in another way");
  }
  if (h->cpu_traits && !encodes_as_known(h)) h->encode_float16 = NULL; /* no exact rows then */
  EXPECT(f->ggml_graph_n_nodes(t->g) == 1 && f->ggml_graph_node(t->g, 0) == t->out, "its graphs are other ones");
  return 1;
}

/* Is the memory writable? */
static int is_writable(const void *at) {
  FILE *maps = fopen("/proc/self/maps", "r");
  if (!maps) return 0;
  char line[512];
  int found = 0;
  while (!found && fgets(line, sizeof line, maps)) {
    unsigned long first, stop;
    char mode[5];
    if (sscanf(line, "%lx-%lx %4s", &first, &stop, mode) != 3) continue;
    if ((uintptr_t)at >= first && (uintptr_t)at < stop) found = mode[1] == 'w' ? 1 : -1;
  }
  fclose(maps);
  return found == 1;
}

static int check_device(host *h, char *why, size_t why_bytes) {
  const ggml_functions *f = &h->f;
  device *d = h->cpu;
  reg *of = f->ggml_backend_dev_backend_reg(d);
  EXPECT(of && f->ggml_backend_dev_type(d) == DEVICE_TYPE_CPU, "its device is no CPU");
  EXPECT(of->api_version >= OLDEST_API && of->api_version <= NEWEST_API,
         "its backends have version %d, and %d to %d are known", of->api_version, OLDEST_API, NEWEST_API);
  EXPECT(of == d->of && d->get_type(d) == DEVICE_TYPE_CPU && d->get_name(d) == f->ggml_backend_dev_name(d),
         "its devices are laid out in another way");
  EXPECT(is_writable(&d->init_backend), "its devices are constant");
  return 1;
}

/* Finds the slots of a CPU backend: name, free, some that are empty, graph_plan_create, _free, an empty one, _compute,
 * graph_compute. */
static int find_slots(host *h, backend *b, char *why, size_t why_bytes) {
  void **words = backend_words(b);
  int device_at = 0;
  for (int i = BACKEND_FREE + 1; i < BACKEND_MOST_WORDS && !device_at; i++)
    if (words[i] == h->cpu) device_at = i;
  EXPECT(device_at, "its backends are laid out in another way");
  int full[8], num = 0;
  for (int i = 1; i < device_at; i++)
    if (words[i] && num < 8) full[num++] = i;
  EXPECT(num == 6 && full[0] == BACKEND_GET_NAME && full[1] == BACKEND_FREE && full[3] == full[2] + 1 &&
             full[4] == full[3] + 2 && full[5] == full[4] + 1,
         "its CPU backends have other functions");
  h->at_free = full[1], h->at_compute = full[5], h->at_device = device_at;
  const char *(*get_name)(backend *);
  memcpy(&get_name, &words[BACKEND_GET_NAME], sizeof get_name);
  EXPECT(get_name(b) == h->f.ggml_backend_name(b), "its backends are laid out in another way");
  return 1;
}

/* The same tiny attention by ggml and by kvedge. */
static int try_out(host *h, const tiny *t, backend *b, char *why, size_t why_bytes) {
  uint16_t *halves[] = {t->k->data, t->v->data}, *mask = t->mask->data;
  float *q = t->q->data, expected[TINY_DIM * TINY_HEADS * TINY_ROWS];
  for (int i = 0; i < TINY_DIM * TINY_ROWS * TINY_HEADS; i++) q[i] = (float)(i * 37 % 64) / 32.0f - 1.0f;
  for (int s = 0; s < 2; s++)
    for (int i = 0; i < TINY_DIM * TINY_CELLS * TINY_KV_HEADS; i++) /* -2..2 */
      halves[s][i] = (uint16_t)((i * (29 + 2 * s) % 2 << 15) | (0x3800 + i * (41 + 4 * s) % 0x800));
  for (int row = 0; row < 64; row++)
    for (int i = 0; i < TINY_CELLS; i++) mask[row * TINY_CELLS + i] = i < TINY_CELLS - 8 + row ? 0 : 0xfc00;
  EXPECT(h->f.ggml_backend_graph_compute(b, t->g) == STATUS_SUCCESS, "it cannot compute");
  memcpy(expected, t->out->data, sizeof expected);
  memset(t->out->data, 0xff, sizeof expected);
  hooked_backend *s = hook(h, b);
  EXPECT(s, "there is no memory");
  s->takes_all = 1;
  const long taken = counted(TAKEN);
  const int status = h->f.ggml_backend_graph_compute(b, t->g);
  EXPECT(status == STATUS_SUCCESS && counted(TAKEN) == taken + 1, "its CPU backend cannot be made to call kvedge");
  count(TAKEN, -1);
  EXPECT(t->out->op == h->op_attention, "its graphs are other ones");
  const float *out = t->out->data;
  for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
    EXPECT(fabsf(out[i] - expected[i]) < 4e-3f, "kvedge computes %g where it computes %g", (double)out[i],
           (double)expected[i]);
  return 1;
}

/* The same tiny scan of an index by ggml and by kvedge; where ggml has none, or another one, scans stay ggml's. */
static void try_index(host *h) {
  enum { ROW_VALUES = TINY_DIM * TINY_HEADS };
  const ggml_functions *f = &h->f;
  tensor *(*make)(context *, tensor *, tensor *, tensor *, tensor *) = NULL;
  void *at = dlsym(h->handle, "ggml_lightning_indexer");
  memcpy(&make, &at, sizeof make);
  context *ctx = make ? f->ggml_init((init_params){(64 << 10) + f->ggml_graph_overhead(), NULL, false}) : NULL;
  if (!ctx) return;
  tensor *q = f->ggml_new_tensor_4d(ctx, TYPE_F32, TINY_DIM, TINY_HEADS, TINY_ROWS, 1);
  tensor *k = f->ggml_new_tensor_4d(ctx, TYPE_F32, TINY_DIM, 1, TINY_CELLS, 1);
  tensor *w = f->ggml_new_tensor_4d(ctx, TYPE_F32, TINY_HEADS, TINY_ROWS, 1, 1);
  tensor *mask = f->ggml_new_tensor_4d(ctx, TYPE_F16, TINY_CELLS, TINY_ROWS, 1, 1);
  tensor *node = make(ctx, q, k, w, mask);
  backend *b = h->init_backend(h->cpu, NULL);
  float expected[TINY_CELLS * TINY_ROWS];
  int is_known = b && node && strcmp(f->ggml_op_name(node->op), "LIGHTNING_INDEXER") == 0 && node->src[0] == q &&
                 node->src[1] == k && node->src[2] == w && node->src[3] == mask && serves_index(h, node, 1) == TAKEN;
  if (is_known) {
    for (int i = 0; i < ROW_VALUES * TINY_ROWS; i++) ((float *)q->data)[i] = (float)(i * 37 % 64) / 32.0f - 1.0f;
    for (int i = 0; i < TINY_DIM * TINY_CELLS; i++) ((float *)k->data)[i] = (float)(i * 29 % 63) / 32.0f - 1.0f;
    for (int i = 0; i < TINY_HEADS * TINY_ROWS; i++) ((float *)w->data)[i] = (float)(i * 3 % 5) - 1.5f;
    for (int i = 0; i < TINY_CELLS * TINY_ROWS; i++) ((uint16_t *)mask->data)[i] = i % 3 ? 0 : i % 2 ? HIDDEN : 0xbc00;
    graph *g = f->ggml_new_graph(ctx);
    f->ggml_build_forward_expand(g, node);
    is_known = f->ggml_backend_graph_compute(b, g) == STATUS_SUCCESS;
    memcpy(expected, node->data, sizeof expected);
    h->op_index = node->op;
    set_num_threads(h, b, 1);
    hooked_backend *s = is_known ? hook(h, b) : NULL;
    const long taken = counted(TAKEN_INDEX);
    if (s) s->takes_all = 1;
    is_known = s && f->ggml_backend_graph_compute(b, g) == STATUS_SUCCESS && counted(TAKEN_INDEX) == taken + 1;
    if (is_known) count(TAKEN_INDEX, -1);
    const float *scores = node->data;
    for (int i = 0; is_known && i < TINY_CELLS * TINY_ROWS; i++)
      is_known = scores[i] == expected[i] || fabsf(scores[i] - expected[i]) < 1e-3f;
  }
  if (!is_known) h->op_index = -1;
  if (b) f->ggml_backend_free(b);
  f->ggml_free(ctx);
}

static int check_host(host *h, char *why, size_t why_bytes) {
  if (!find_functions(h, why, why_bytes) || !check_device(h, why, why_bytes)) return 0;
  h->init_backend = h->cpu->init_backend;
  const tiny t = make_tiny(&h->f, h);
  backend *b = NULL;
  int good = check_tensors(h, &t, h, why, why_bytes);
  if (good && !(b = h->init_backend(h->cpu, NULL))) good = 0, snprintf(why, why_bytes, "it makes no CPU backend");
  if (good && find_slots(h, b, why, why_bytes)) {
    set_num_threads(h, b, 1);
    good = try_out(h, &t, b, why, why_bytes);
    try_index(h);
  } else {
    good = 0;
  }
  if (b) h->f.ggml_backend_free(b);
  if (t.ctx) h->f.ggml_free(t.ctx);
  return good;
}

host *host_of_device(device *cpu, void *handle, char *why, size_t why_bytes) {
  static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&one_at_a_time);
  host *found = known_host(cpu);
  if (!found && num_hosts == MOST_HOSTS) {
    snprintf(why, why_bytes, "there are more than %d of them in the process", MOST_HOSTS);
  } else if (!found) {
    host *h = &hosts[num_hosts];
    *h = (host){.cpu = cpu, .handle = handle, .op_index = -1};
    const char *why_not = "", *asked = getenv("KVEDGE_ISA");
    if (kvedge_select_isa(NULL, &why_not) != KVEDGE_OK) {
      snprintf(why, why_bytes, "KVEDGE_ISA=%s cannot be used here: %s", asked ? asked : "", why_not);
    } else if (check_host(h, why, why_bytes)) {
      pthread_mutex_lock(&lock);
      num_hosts++;
      pthread_mutex_unlock(&lock);
      found = h;
    }
  }
  pthread_mutex_unlock(&one_at_a_time);
  return found;
}

void *library_of(const void *address) {
  Dl_info found;
  void *handle = NULL;
  if (dladdr(address, &found) && found.dli_fname) handle = dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  return handle ? handle : dlopen(NULL, RTLD_LAZY);
}

/* ---- What programs call ---------------------------------------------------------------------------- */

static char refused[256]; /* why a ggml that was preloaded before was not taken over */

/* At the end, with KVEDGE_GGML_STATS=1. */
static void print_counts(void) {
  if (!num_hosts) {
    fprintf(stderr, "kvedge: no ggml was taken over: %s\n",
            *refused ? refused
                     : "no shared library of this program called ggml_backend_dev_init for a CPU backend (one that "
                       "ggml_backend_cpu_init makes, or a ggml that is linked statically, is not seen)");
    return;
  }
  fprintf(stderr, "kvedge (%s): %ld attention nodes", kvedge_isa_name(), counted(TAKEN));
  if (counted(TAKEN_INDEX)) fprintf(stderr, ", %ld scans of an index", counted(TAKEN_INDEX));
  for (int i = TAKEN_INDEX + 1; i < NUM_REASONS; i++)
    if (counted((reason)i)) fprintf(stderr, "; left to ggml: %ld (%s)", counted((reason)i), name_of_reason((reason)i));
  const char *name;
  const long read = kvedge_ggml_exact(ROWS_READ, &name), without = kvedge_ggml_exact(NODES_WITHOUT, &name);
  if (read) fprintf(stderr, "; exact rows: %ld read, %ld changed", read, kvedge_ggml_exact(ROWS_CHANGED, &name));
  if (without) fprintf(stderr, "; %ld nodes of quantized caches without exact rows", without);
  fprintf(stderr, "\n");
}

static void print_counts_at_exit(void) {
  static atomic_flag done = ATOMIC_FLAG_INIT;
  if (wants_counts() && !atomic_flag_test_and_set(&done)) atexit(print_counts);
}

/* ---- Contexts that were made before ----------------------------------------------------------------
 *
 * Their backends are ggml's own, which nobody can list. But before each graph llama.cpp gives the CPU backend its threads,
 * by a function that it asks the registry for: that one counts. */

static host *watched; /* the first that kvedge_ggml_enable took over */
static _Atomic(void (*)(backend *, void *)) own_set_threadpool;

static void set_threadpool_watched(backend *b, void *pool) {
  if (atomic_load(&is_enabled) && !hooked_of_backend(b)) count(LEFT_OLDER, 1);
  atomic_load (&own_set_threadpool)(b, pool);
}

static void *get_proc_address_watched(reg *r, const char *name) {
  void *at = watched->get_proc_address(r, name);
  if (!at || strcmp(name, "ggml_backend_cpu_set_threadpool") != 0) return at;
  void (*own)(backend *, void *), (*const ours)(backend *, void *) = set_threadpool_watched;
  memcpy(&own, &at, sizeof own);
  atomic_store(&own_set_threadpool, own);
  memcpy(&at, &ours, sizeof at);
  return at;
}

static void watch_older(host *h) {
  static const char name[] = "ggml_backend_set_n_threads";
  reg *of = h->cpu->of;
  if (!watched && is_writable(&of->get_proc_address) && of->get_proc_address &&
      of->get_proc_address(of, name) == h->f.ggml_backend_reg_get_proc_address(of, name))
    h->get_proc_address = of->get_proc_address, watched = h;
  if (h == watched) __atomic_store_n(&of->get_proc_address, get_proc_address_watched, __ATOMIC_SEQ_CST);
}

/* Takes a CPU device over; 0: `why` tells. */
static int take_over(device *cpu, void *handle, char *why, size_t why_bytes) {
  host *h = host_of_device(cpu, handle, why, why_bytes);
  if (!h) return 0;
  atomic_store(&is_enabled, 1);
  if (cpu->init_backend != init_hooked) __atomic_store_n(&cpu->init_backend, init_hooked, __ATOMIC_SEQ_CST);
  backend *b = h->f.ggml_backend_dev_init(cpu, NULL);
  const int works = b && hooked_of_backend(b);
  if (b) h->f.ggml_backend_free(b);
  if (!works) __atomic_store_n(&cpu->init_backend, h->init_backend, __ATOMIC_SEQ_CST);
  EXPECT(works, "its CPU device cannot be taken over");
  print_counts_at_exit();
  return 1;
}

int kvedge_ggml_enable(void *handle, char *text, size_t bytes) {
  device *(*by_type)(int) = NULL;
  void *at = dlsym(handle, "ggml_backend_dev_by_type");
  if (!at) {
    snprintf(text, bytes, "this library has no ggml with backends (ggml_backend_dev_by_type)");
    return 0;
  }
  memcpy(&by_type, &at, sizeof at);
  device *cpu = by_type(DEVICE_TYPE_CPU);
  if (!cpu) {
    snprintf(text, bytes, "its ggml has loaded no CPU backend yet");
    return 0;
  }
  if (!take_over(cpu, handle, text, bytes)) return 0;
  watch_older(known_host(cpu));
  snprintf(text, bytes, "%s", known_host(cpu)->name);
  return 1;
}

void kvedge_ggml_disable(void) {
  atomic_store(&is_enabled, 0);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_hosts; i++)
    if (hosts[i].cpu->init_backend == init_hooked)
      __atomic_store_n(&hosts[i].cpu->init_backend, hosts[i].init_backend, __ATOMIC_SEQ_CST);
  if (watched) __atomic_store_n(&watched->cpu->of->get_proc_address, watched->get_proc_address, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&lock);
}

long kvedge_ggml_count(int index, const char **name) {
  if (index < 0 || index >= NUM_REASONS) return -1;
  *name = name_of_reason((reason)index);
  return counted((reason)index);
}

/* ---- LD_PRELOAD ------------------------------------------------------------------------------------
 *
 * Programs ask for backends by this function of ggml's. A library that is preloaded is found before ggml, also by
 * libraries that are loaded later, so the first call comes here, and ggml is taken over before it goes on. */

__attribute__((constructor)) static void loaded(void) {
  if (is_preloaded()) print_counts_at_exit();
}

static void preloaded(device *cpu, void *handle) {
  static atomic_int was_told;
  char why[256] = "";
  if (atomic_load(&was_told)) return; /* what was not as expected once stays so */
  if (take_over(cpu, handle, why, sizeof why) || atomic_exchange(&was_told, 1)) return;
  memcpy(refused, why, sizeof refused);
  fprintf(stderr, "kvedge leaves attention to ggml: %s\n", why);
}

backend *ggml_backend_dev_init(device *d, const char *params) {
  /* By a function of the device, not by the return address: ggml_backend_init_by_type jumps here, and then that is the
   * address of whoever called it, which needs no ggml (ctypes). */
  void *of_device = NULL;
  memcpy(&of_device, &d->get_type, sizeof of_device);
  void *handle = library_of(of_device), *at = NULL;
  backend *(*own)(device *, const char *) = NULL;
  int (*type)(device *) = NULL;
  if (handle && (at = dlsym(handle, "ggml_backend_dev_type"))) memcpy(&type, &at, sizeof at);
  if (handle && (at = dlsym(handle, "ggml_backend_dev_init"))) memcpy(&own, &at, sizeof at);
  if (type && type(d) == DEVICE_TYPE_CPU && !known_host(d)) preloaded(d, handle);
  if (own && own != ggml_backend_dev_init) return own(d, params);
  return d->init_backend(d, params); /* a program that exports its ggml */
}
