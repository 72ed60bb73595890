/* A device of ggml's own kind, of type ACCEL: for test-backend-ops, and for programs that load backends by GGML_BACKEND_PATH
 * or ggml_backend_load. It claims attention nodes and scans of an index in host memory, and runs them by a CPU backend that
 * kvedge looks at. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static host *of; /* the ggml that loads us */
static device own_device;

/* A backend of ours: its words as ggml's CPU backends have them, its context a CPU backend that is hooked. */
static backend *inner_of(backend *b) { return backend_words(b)[of->at_device + 1]; }

static const char *get_name(void *backend_or_reg) {
  (void)backend_or_reg;
  return "KVEDGE";
}
static const char *get_description(device *d) {
  (void)d;
  return "kvedge's attention, on the CPU";
}
static int get_type(device *d) {
  (void)d;
  return of->cpu->of->api_version > 1 ? DEVICE_TYPE_ACCEL : DEVICE_TYPE_ACCEL - 1;
}
static const char *device_name(device *d) { return get_name(d); }

static void get_props(device *d, void *props) {
  typedef struct { /* what all versions begin with */
    const char *name, *description;
    size_t memory_free, memory_total;
    int type;
  } first;
  of->cpu->get_props(of->cpu, props);
  first *own = props;
  own->name = get_name(d), own->description = get_description(d), own->type = get_type(d);
}

static bool supports_op(device *d, const tensor *op) {
  (void)d;
  static const char *const nothing_to_do[] = {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"};
  if (op->op == of->op_attention) return serves(of, op, 1) == TAKEN;
  if (op->op == of->op_index) return serves_index(of, op, 1) == TAKEN;
  const char *name = of->f.ggml_op_name(op->op);
  for (size_t i = 0; i < sizeof nothing_to_do / sizeof *nothing_to_do; i++)
    if (strcmp(name, nothing_to_do[i]) == 0) return true;
  return false;
}

static int compute(backend *b, graph *g) { return of->f.ggml_backend_graph_compute(inner_of(b), g); }

static void free_backend(backend *b) {
  of->f.ggml_backend_free(inner_of(b));
  free(b);
}

static void set_n_threads(backend *b, int num_threads) { set_num_threads(of, inner_of(b), num_threads); }

static backend *init_backend(device *d, const char *params) {
  static char guid[16] = {0x6b, 0x76, 0x65, 0x64, 0x67, 0x65, 0x2d, 0x67,
                          0x67, 0x6d, 0x6c, 0x2d, 0x61, 0x63, 0x63, 0x01};
  (void)params;
  backend *b = calloc(BACKEND_MOST_WORDS + 2, sizeof(void *)), *inner = init_hooked(of->cpu, NULL);
  hooked_backend *s = inner ? hooked_of_backend(inner) : NULL;
  if (!b || !s) {
    if (inner) of->f.ggml_backend_free(inner);
    free(b);
    return NULL;
  }
  s->takes_all = 1;
  void **words = backend_words(b);
  const char *(*const name)(void *) = get_name;
  void (*const release)(backend *) = free_backend;
  int (*const run)(backend *, graph *) = compute;
  words[0] = guid;
  memcpy(&words[BACKEND_GET_NAME], &name, sizeof name);
  memcpy(&words[of->at_free], &release, sizeof release);
  memcpy(&words[of->at_compute], &run, sizeof run);
  words[of->at_device] = d, words[of->at_device + 1] = inner;
  return b;
}

static const char *reg_name(reg *r) { return get_name(r); }
static size_t get_device_count(reg *r) {
  (void)r;
  return 1;
}
static device *get_device(reg *r, size_t index) {
  (void)r;
  return index == 0 ? &own_device : NULL;
}
static void *get_proc_address(reg *r, const char *name) {
  (void)r;
  void (*const set)(backend *, int) = set_n_threads;
  void *at = NULL;
  if (strcmp(name, "ggml_backend_set_n_threads") == 0) memcpy(&at, &set, sizeof at);
  return at;
}

/* ggml calls it once it has loaded the library. NULL: it goes on without. */
__attribute__((visibility("default"))) reg *ggml_backend_init(void) {
  static reg own = {.get_name = reg_name,
                    .get_device_count = get_device_count,
                    .get_device = get_device,
                    .get_proc_address = get_proc_address};
  char why[256] = "its CPU backend is not loaded yet";
  device *(*by_type)(int) = NULL;
  void *handle = library_of(__builtin_return_address(0)), *at = NULL;
  if (handle) at = dlsym(handle, "ggml_backend_dev_by_type");
  memcpy(&by_type, &at, sizeof at);
  device *cpu = by_type ? by_type(DEVICE_TYPE_CPU) : NULL;
  if (!of && cpu) of = host_of_device(cpu, handle, why, sizeof why);
  if (!of) {
    fprintf(stderr, "kvedge leaves attention to ggml: %s\n", why);
    return NULL;
  }
  own_device = *of->cpu;
  own_device.get_name = device_name, own_device.get_description = get_description;
  own_device.get_type = get_type, own_device.get_props = get_props, own_device.init_backend = init_backend;
  own_device.get_host_buffer_type = NULL, own_device.offload_op = NULL;
  own_device.supports_op = supports_op;
  own_device.of = &own;
  own.api_version = of->cpu->of->api_version;
  return &own;
}
