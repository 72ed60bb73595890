/* kvedge in a ggml that is loaded already; docs/llama_cpp.md.
 *
 *   ggml_abi.h  what is known of ggml's structs and functions
 *   host.c      a ggml is found, checked, tried and taken over; what its CPU backends compute
 *   node.c      one attention node on kvedge, on ggml's own threads
 *   index.c     one scan of an index, likewise
 *   masks.c     what a mask shows, as runs of cells
 *   exact.c     rows of the last and first tokens in float16, beside a quantized cache
 *   device.c    a device of ggml's, for test-backend-ops and for those who load backends themselves
 *   exec.c      programs that this one starts or becomes without kvedge
 *   counts.c    how many nodes were taken and left, and why left
 */
#ifndef KVEDGE_GGML_INTERNAL_H
#define KVEDGE_GGML_INTERNAL_H

#include <stdatomic.h>
#include <string.h>

#include "ggml_abi.h"
#include "kvedge.h"

/* ---- counts.c ---- */

/* Why a node was left to ggml, or a whole graph. */
typedef enum {
  TAKEN,        /* attention */
  TAKEN_INDEX,  /* the scan of an index */
  LEFT_SMALL,   /* too few cells to gain */
  LEFT_SCALAR,  /* a scan of an index, where kvedge has no vectors */
  LEFT_TYPE,    /* keys or values are of a type that kvedge does not read */
  LEFT_SHAPE,   /* strides, broadcasts or widths that it does not know */
  LEFT_BUSY,    /* the backend is computing another graph at the same time */
  FELL_BACK,    /* kvedge refused it, or gave what is not finite: ggml's kernel computed it */
  LEFT_NO_NODE, /* a graph: its attention is products and a softmax, no node */
  LEFT_OLDER,   /* a graph: its backend was made before ggml was taken over */
  NUM_REASONS
} reason;

void count(reason why, long num);
long counted(reason why);
const char *name_of_reason(reason why);

/* ---- masks.c ---- */

enum { HIDDEN = 0xfc00 }; /* -infinity in float16: the cell is not seen */

/* What a query row of a stream sees, of the first head: a number for each cell. */
static inline const uint16_t *mask_row(const tensor *mask, int64_t stream, int64_t row) {
  return (const uint16_t *)((const char *)mask->data + stream % mask->ne[3] * (int64_t)mask->nb[3] +
                            row * (int64_t)mask->nb[1]);
}

/* Cells first..stop-1. */
typedef struct {
  int64_t first, stop;
} cell_run;

/* Query rows first..first+count-1, which see runs; each row's last run is longer by one cell than that of the row before.
 * window: and its first cell is one further, as soon as so many are seen. biased: the mask is added to the logits of the
 * cells of the one run. scattered: one row, whose cells are gathered. No runs: they see nothing. */
typedef struct {
  int64_t first, count, window;
  int first_run, num_runs, biased, scattered;
} row_group;

/* What one stream of a mask shows. */
typedef struct {
  int first_group, num_groups;
} shown;

/* What a mask shows, looked at once per graph. */
typedef struct {
  const tensor *mask;
  int64_t rows, cells;
  int adds; /* other values than 0 count: all is biased (ALiBi) */
  shown *streams;
  row_group *groups;
  cell_run *runs;
  int num_streams, num_groups, num_runs, room_streams, room_groups, room_runs;
} seen_cells;

/* 0: there is no memory. */
int look_at_mask(seen_cells *seen, const tensor *mask, int64_t rows, int64_t cells, int adds);
void forget_masks(seen_cells *seen);

/* Room for num elements of `size` bytes, what is in it kept; 0: there is no memory. */
int grow(void *array, int *room, int num, size_t size);
/* Room for so many bytes, aligned to 64, what is in it lost; 0: there is no memory. */
int reserve(void **memory, size_t *room, size_t bytes);

/* ---- host.c ---- */

typedef struct {
  ggml_functions f;
  void *handle;
  device *cpu;
  backend *(*init_backend)(device *, const char *); /* the CPU device's own */
  void *(*get_proc_address)(reg *, const char *);   /* of its registry; NULL unless it was replaced */
  const cpu_type_traits *(*cpu_traits)(int type);   /* NULL: exact rows cannot be kept */
  from_float encode_float16;
  int op_attention, op_index, op_custom; /* op_index -1: scans of an index stay ggml's */
  int at_free, at_compute, at_device;    /* words of a backend */
  char name[64];                         /* "ggml 0.25.3" */
} host;

/* A node that kvedge runs, while its graph is computed. */
struct hooked_backend;
typedef struct {
  struct hooked_backend *of;
  tensor *node;
  int op; /* its own, and parameters, whose place the custom node's have taken */
  int32_t params[PARAM_BYTES / 4];
  atomic_int is_planned, next_slice, num_done;
} node_job;

/* Keys or values of the node that runs. */
typedef struct {
  kvedge_rows rows;
  const char *data;
  ptrdiff_t stream_stride;
} side;

/* Rows that a node has written into a quantized cache, in float16. */
typedef struct {
  const tensor *node; /* NULL: none */
  void *memory;       /* float16 (rows, elements), then for each row whether it is finite */
  size_t bytes;
} written_rows;
enum { MOST_WRITTEN = 4 }; /* nodes of a graph whose rows are there at the same time: of the next attention node */

/* A node that writes rows, run by kvedge. */
typedef struct {
  struct hooked_backend *of;
  tensor *node;
  int op; /* and parameters: its own */
  int32_t params[PARAM_BYTES / 4];
  written_rows *to;
} write_job;

/* The rows of a cell that are to be read instead of the stored ones, of KV head 0. */
typedef struct {
  int64_t cell;
  const char *rows[2]; /* of keys, of values: in float16, or where they lie if that side is not quantized */
} exact_row;

/* Where the rows of a side, keys or values, lie in the cache that they are written to. */
typedef struct {
  const char *data;            /* of the cache: its cell 0; NULL: the side is not quantized */
  size_t cell_bytes;           /* from a cell to the next one */
  size_t row_bytes;            /* of a cell, all heads */
  int64_t elements;            /* of a cell */
  ptrdiff_t first, of_head;    /* bytes in a float16 row to the side's KV head 0, and from a head to the next one */
  const written_rows *written; /* by this graph; or NULL */
} side_place;

/* The same of the node that runs, with what is kept of its caches. */
typedef struct {
  side_place sides[2];
  int of;                      /* a side that is quantized; -1: the node has no exact rows */
  const written_rows *written; /* by this graph, of that side */
  struct kept_rows *kept;      /* or NULL */
  int recent, first;           /* tokens of a sequence that are to be kept */
} row_places;

/* A token of the graph, as a row that may be kept. */
typedef struct {
  int sequence, position, is_kept; /* sequence -1: of none */
} token_place;

/* Where a call's segments begin, and what its options point to: a mask, a bias; -1: none. */
typedef struct {
  int first_segment, first_cell, first_bias;
} call_place;

/* What belongs to a CPU backend whose graphs kvedge looks at. */
typedef struct hooked_backend {
  struct hooked_backend *following;
  host *of;
  backend *of_backend;
  int (*compute)(backend *, graph *); /* ggml's own */
  void (*free)(backend *);
  atomic_flag is_busy;
  int takes_all;   /* however small */
  backend *helper; /* a CPU backend of ggml's own, of one thread, for nodes that fall back; or NULL */

  node_job *jobs;
  write_job *write_jobs;
  seen_cells masks[4]; /* of the graph, by mask */
  int room_jobs, room_write_jobs, next_mask;
  written_rows written[MOST_WRITTEN];
  struct kept_rows *kept; /* of all layers */
  int64_t num_graphs;

  /* Of the node that runs. */
  side sides[2];    /* keys, values */
  row_places rows;  /* where they lie in its caches */
  exact_row *exact; /* of the stream at hand, by cell */
  kvedge_rows exact_sides[2];
  token_place *tokens;
  int num_exact, room_exact, room_tokens;
  kvedge_slices *slices; /* NULL: it falls back */
  void *memory;
  size_t memory_bytes;
  void *gathered; /* rows of scattered cells, side by side */
  size_t gathered_bytes, gathered_used;
  kvedge_attention_call *calls;
  kvedge_rows_cache *caches;         /* of calls */
  kvedge_attention_options *options; /* of calls */
  call_place *places;                /* of calls */
  kvedge_rows_segment *segments;
  uint8_t *is_stored; /* of cells: 1: the stored row is read, where a mask is added */
  uint16_t *bias;     /* what is added for exact rows there */
  cell_run *runs;     /* of the rows at hand */
  float *slopes;
  int num_calls, num_segments, num_cells, num_bias;
  int room_calls, room_caches, room_options, room_places, room_segments, room_cells, room_bias, room_runs, room_slopes;
} hooked_backend;

/* The host of a CPU device, found, checked and tried; NULL: `why` tells what is not as expected. */
host *host_of_device(device *cpu, void *handle, char *why, size_t why_bytes);
backend *init_hooked(device *cpu, const char *params);
hooked_backend *hooked_of_backend(backend *b);

/* The library that an address lies in, one that has or needs ggml, so that ggml's functions are found from there; else the
 * program. */
void *library_of(const void *address);

/* ---- exec.c ---- */

/* Was the library loaded by LD_PRELOAD, as by `kvedge exec`? Then programs that are started without it are told of. */
int is_preloaded(void);
/* Is KVEDGE_GGML_STATS set, and not 0? */
int wants_counts(void);

/* Threads of a CPU backend of ggml's own. */
static inline void set_num_threads(const host *h, backend *b, int num_threads) {
  void (*set)(backend *, int) = NULL;
  void *at = h->f.ggml_backend_reg_get_proc_address(h->cpu->of, "ggml_backend_set_n_threads");
  memcpy(&set, &at, sizeof at);
  if (set) set(b, num_threads);
}

/* ---- exact.c ---- */

/* What kvedge_ggml_exact counts. */
typedef enum { ROWS_READ, ROWS_CHANGED, ROWS_HELD, BYTES_HELD, NODES_WITHOUT, NUM_EXACT_COUNTS } exact_count;

/* How many of a sequence's last tokens are kept; 0: none are, and nodes that write rows stay ggml's. */
int exact_recent(void);
/* Does a node write float32 rows into a quantized cache, as run_write does? */
int writes_rows(const host *h, const tensor *node);
/* The function of the CPU backend for a type; NULL: it has none. */
static inline from_float encoder_of(const host *h, int type) { return h->cpu_traits(type)->from_float; }
/* Bytes of so many elements, whole blocks. */
static inline size_t row_bytes_of(const host *h, int type, int64_t elements) {
  return h->f.ggml_type_size(type) * (size_t)(elements / h->f.ggml_blck_size(type));
}
/* Room for what write node `index` of a graph writes; 0: there is no memory. */
int reserve_written(hooked_backend *s, write_job *j, int index);
void run_write(tensor *dst, int ith, int nth, void *userdata);
/* Finds where a node's rows lie in its caches: s->rows, before the calls below. */
void place_rows(hooked_backend *s, const tensor *node);
/* Finds the exact rows of a node's stream, whose sides are set, in s->exact and s->exact_sides. */
void find_exact(hooked_backend *s, const tensor *node, int64_t stream);
/* Keeps what the graph wrote for a node that has run. */
void remember_rows(hooked_backend *s, const tensor *node);
void forget_exact(hooked_backend *s);

/* ---- node.c ---- */

/* A type of rows that kvedge reads where they lie. */
typedef struct {
  int type; /* ggml's */
  const char *name;
  kvedge_format format;
  int block_elements;
  size_t block_bytes;
} row_type;
enum { NUM_ROW_TYPES = 9 };
extern const row_type row_types[NUM_ROW_TYPES];

/* NULL: a type that kvedge does not read. */
const row_type *row_type_of(const tensor *t);
/* Below so many cells ggml's kernels take no longer. */
int64_t least_cells(void);

reason serves(const host *h, const tensor *node, int takes_all);
void run_node(tensor *dst, int ith, int nth, void *userdata);
/* Makes a custom node again what it was. */
void restore_node(const node_job *j);
/* Computes a node by ggml's own kernel, on this thread. */
void compute_by_ggml(hooked_backend *s, node_job *j);

/* Of node_job.is_planned, which threads wait for. */
enum { NOT_PLANNED, PLANNED, REFUSED };
void wait_for(const atomic_int *x, int least);

/* ---- index.c ---- */

reason serves_index(const host *h, const tensor *node, int takes_all);
void run_index(tensor *dst, int ith, int nth, void *userdata);

#endif
