/* What kvedge knows of ggml's structs and functions, without its headers: one binary serves many versions.
 *
 * Each fact here is checked on the ggml that is loaded before anything is taken over (host.c): tensors by building one with
 * its public functions, slots of backends and devices by what they are seen to do. Numbers of operations are never assumed.
 */
#ifndef KVEDGE_GGML_ABI_H
#define KVEDGE_GGML_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers of types are those of GGUF files; their names and blocks are checked as well. */
enum {
  TYPE_F32 = 0,
  TYPE_F16 = 1,
  TYPE_Q4_0 = 2,
  TYPE_Q4_1 = 3,
  TYPE_Q5_0 = 6,
  TYPE_Q5_1 = 7,
  TYPE_Q8_0 = 8,
  TYPE_IQ4_NL = 20,
  TYPE_I32 = 26,
  TYPE_I64 = 27,
  TYPE_BF16 = 30
};
enum { STATUS_SUCCESS = 0 };
enum { DEVICE_TYPE_CPU = 0, DEVICE_TYPE_ACCEL = 3 }; /* ACCEL: 2 with version 1 of the API, which has no IGPU */
enum { OLDEST_API = 1, NEWEST_API = 2 };             /* of ggml_backend_reg.api_version: what has been tried */
enum { PARAM_BYTES = 64, MAX_SOURCES = 10 };

typedef struct tensor {
  int type;
  void *buffer;
  int64_t ne[4]; /* elements */
  size_t nb[4];  /* strides, bytes */
  int op;
  int32_t op_params[PARAM_BYTES / 4];
  int32_t flags;
  struct tensor *src[MAX_SOURCES];
  struct tensor *view_src;
  size_t view_offs;
  void *data;
  char name[64];
  /* more, which kvedge does not look at */
} tensor;

typedef struct graph graph;
typedef struct context context;

typedef struct {
  size_t mem_size;
  void *mem_buffer;
  bool no_alloc;
} init_params;

typedef void (*custom_op)(tensor *dst, int ith, int nth, void *userdata);
enum { N_TASKS_MAX = -1 };

/* In op_params of a custom node. */
typedef struct {
  custom_op fun;
  int n_tasks;
  void *userdata;
} custom_params;

/* A backend is a table of words: its guid, then functions, its device, its context. How many functions there are differs. */
typedef struct backend backend;
static inline void **backend_words(backend *b) { return (void **)b; }
enum { BACKEND_GET_NAME = 1, BACKEND_FREE = 2, BACKEND_MOST_WORDS = 24 };

typedef struct device device;
typedef struct reg reg;
typedef void *buffer_type;

struct device {
  const char *(*get_name)(device *);
  const char *(*get_description)(device *);
  void (*get_memory)(device *, size_t *free, size_t *total);
  int (*get_type)(device *);
  void (*get_props)(device *, void *props);
  backend *(*init_backend)(device *, const char *params);
  buffer_type (*get_buffer_type)(device *);
  buffer_type (*get_host_buffer_type)(device *);
  void *(*buffer_from_host_ptr)(device *, void *ptr, size_t size, size_t max_tensor_size);
  bool (*supports_op)(device *, const tensor *op);
  bool (*supports_buft)(device *, buffer_type);
  bool (*offload_op)(device *, const tensor *op);
  void *(*event_new)(device *);
  void (*event_free)(device *, void *event);
  void (*event_synchronize)(device *, void *event);
  reg *of;
  void *context;
};

struct reg {
  int api_version;
  const char *(*get_name)(reg *);
  size_t (*get_device_count)(reg *);
  device *(*get_device)(reg *, size_t index);
  void *(*get_proc_address)(reg *, const char *name);
  void *context;
};

typedef struct {
  const char *name;
  int64_t block_elements, interleaved;
  size_t block_bytes;
  bool is_quantized;
  /* more */
} type_traits;

/* Of a CPU backend, not of ggml itself. */
typedef void (*from_float)(const float *row, void *to, int64_t num);
typedef struct {
  from_float from_float;
  /* more */
} cpu_type_traits;

/* The functions of the ggml that is loaded: FUNCTION(result, name, arguments). */
#define GGML_FUNCTIONS(FUNCTION)                                                                                       \
  FUNCTION(context *, ggml_init, (init_params))                                                                        \
  FUNCTION(void, ggml_free, (context *))                                                                               \
  FUNCTION(size_t, ggml_tensor_overhead, (void))                                                                       \
  FUNCTION(tensor *, ggml_new_tensor_4d, (context *, int type, int64_t, int64_t, int64_t, int64_t))                    \
  FUNCTION(tensor *, ggml_flash_attn_ext,                                                                              \
           (context *, tensor * q, tensor * k, tensor * v, tensor * mask, float scale, float max_bias, float softcap)) \
  FUNCTION(tensor *, ggml_custom_4d,                                                                                   \
           (context *, int type, int64_t, int64_t, int64_t, int64_t, tensor **args, int n_args, custom_op,             \
            int n_tasks, void *userdata))                                                                              \
  FUNCTION(const char *, ggml_op_name, (int op))                                                                       \
  FUNCTION(const char *, ggml_type_name, (int type))                                                                   \
  FUNCTION(int64_t, ggml_blck_size, (int type))                                                                        \
  FUNCTION(size_t, ggml_type_size, (int type))                                                                         \
  FUNCTION(const type_traits *, ggml_get_type_traits, (int type))                                                      \
  FUNCTION(graph *, ggml_new_graph, (context *))                                                                       \
  FUNCTION(size_t, ggml_graph_overhead, (void))                                                                        \
  FUNCTION(void, ggml_graph_add_node, (graph *, tensor *))                                                             \
  FUNCTION(void, ggml_build_forward_expand, (graph *, tensor *))                                                       \
  FUNCTION(int, ggml_graph_n_nodes, (graph *))                                                                         \
  FUNCTION(tensor *, ggml_graph_node, (graph *, int i))                                                                \
  FUNCTION(backend *, ggml_backend_dev_init, (device *, const char *params))                                           \
  FUNCTION(const char *, ggml_backend_dev_name, (device *))                                                            \
  FUNCTION(int, ggml_backend_dev_type, (device *))                                                                     \
  FUNCTION(reg *, ggml_backend_dev_backend_reg, (device *))                                                            \
  FUNCTION(void *, ggml_backend_reg_get_proc_address, (reg *, const char *name))                                       \
  FUNCTION(const char *, ggml_backend_name, (backend *))                                                               \
  FUNCTION(void, ggml_backend_free, (backend *))                                                                       \
  FUNCTION(int, ggml_backend_graph_compute, (backend *, graph *))

#define DECLARE(result, name, arguments) result(*name) arguments;
typedef struct {
  GGML_FUNCTIONS(DECLARE)
} ggml_functions;
#undef DECLARE

#endif
