/* A layer's life: sizes, arrays, append, truncate, read back. */
#define _GNU_SOURCE
#include "store/layer_struct.h"

#include <stdlib.h>
#include <string.h>

#include "store/ranges.h"
#include "store/rotation.h"
#include "system/dispatch.h"
#include "system/pages.h"
#include "system/parallel.h"
#include "system/float_mode.h"

enum { MAX_KV_HEADS = 65536, MAX_RECENT = 65536, MAX_ROOM = 1 << 30 };
#define MAX_CAPACITY ((int64_t)1 << 40)

/* What concerns first and last tokens; 0 if it is not valid. */
static int complete_ranges(kvedge_layer_config *config) {
  if (config->recent < 0 || config->recent > MAX_RECENT || config->sinks < 0 || config->sinks > MAX_RECENT) return 0;
  if (config->recent_room < 0 || config->recent_room > MAX_ROOM) return 0;
  if (config->recent_format == 0 && !config->recent && !config->sinks) return config->recent_room == 0;
  if (config->recent_format == 0) config->recent_format = KVEDGE_RECENT(KVEDGE_FLOAT16);
  const int format = config->recent_format - 1;
  return format == KVEDGE_FLOAT32 || format == KVEDGE_FLOAT16 || format == KVEDGE_BFLOAT16;
}

/* Fills in what the config leaves open; 0 if it is not valid. */
static int complete_config(const kvedge_layer_config *wanted, kvedge_layer_config *config) {
  if (!wanted || wanted->capacity < 1 || wanted->capacity > MAX_CAPACITY) return 0;
  if (wanted->num_kv_heads < 1 || wanted->num_kv_heads > MAX_KV_HEADS) return 0;
  if (wanted->head_dim < 1 || wanted->head_dim > KVEDGE_MAX_HEAD_DIM || wanted->group_size < 0) return 0;
  if (wanted->value_head_dim < 0 || wanted->value_head_dim > KVEDGE_MAX_HEAD_DIM) return 0;
  if (!kvedge_side_format(wanted, 0) || !kvedge_side_format(wanted, 1)) return 0;
  if (wanted->scale_type != KVEDGE_SCALE_FLOAT32 && wanted->scale_type != KVEDGE_SCALE_FLOAT16) return 0;
  if (wanted->value_rotation != 0 && wanted->value_rotation != 1) return 0;
  *config = *wanted;
  if (config->value_head_dim == 0) config->value_head_dim = config->head_dim;
  if (config->value_format == 0) config->value_format = KVEDGE_VALUES(config->format);
  const int widest = config->head_dim > config->value_head_dim ? config->head_dim : config->value_head_dim;
  if (!complete_ranges(config)) return 0;
  for (int values = 0; values < 2; values++) {
    const kvedge_format_info *format = kvedge_side_format(config, values);
    if (config->recent_format == 0 && config->capacity % format->row_tokens) return 0;
    const int dim = values ? config->value_head_dim : config->head_dim;
    if (format->group_bytes && dim % format->group_channels) return 0;
  }
  if (config->group_size == 0 || config->group_size > widest) config->group_size = widest;
  return 1;
}

/* A config that is complete: does its layer have three ranges? */
static int has_ranges(const kvedge_layer_config *config) { return config->recent_format != 0; }

/* One side of a layer, whose rows have `dim` elements, without its arrays. */
static kvedge_side side_of(const kvedge_layer_config *config, const kvedge_format_info *format, int dim) {
  kvedge_side side = {.format = format,
                      .num_kv_heads = config->num_kv_heads,
                      .shape = kvedge_row_shape_of(format, dim, config->group_size, config->scale_type)};
  side.row_bytes = kvedge_row_bytes(format, dim);
  side.scale_row_bytes = format->has_scales ? kvedge_scale_row_bytes(&side.shape) : 0;
  return side;
}

static kvedge_side keys_of(const kvedge_layer_config *config) {
  return side_of(config, kvedge_side_format(config, 0), config->head_dim);
}

static kvedge_side values_of(const kvedge_layer_config *config) {
  kvedge_side side = side_of(config, kvedge_side_format(config, 1), config->value_head_dim);
  if (config->value_rotation) side.rotated = kvedge_rotated_together(config->value_head_dim);
  return side;
}

/* Elements of a key offset or scale, (num_kv_heads, head_dim). */
static size_t key_vector_size(const kvedge_layer_config *config) {
  return (size_t)config->num_kv_heads * (size_t)config->head_dim;
}

/* Of the layer alone; headers of first and last tokens follow. */
static size_t own_header_bytes(const kvedge_layer_config *config) {
  return kvedge_align(sizeof(kvedge_layer) + 2 * key_vector_size(config) * sizeof(float));
}

static size_t header_bytes(const kvedge_layer_config *config) {
  return own_header_bytes(config) + (has_ranges(config) ? 2 * kvedge_align(sizeof(kvedge_layer)) : 0);
}

/* Bytes of a side's array of codes and of its scales; 0 if they do not fit into a size_t. */
static int side_bytes(const kvedge_layer_config *config, const kvedge_side *side, size_t *codes, size_t *scales) {
  const int64_t unit = kvedge_in_runs(config) ? KVEDGE_RUN : 1; /* rows beside runs come with them, too */
  const int64_t of_head = kvedge_num_rows(side->format, (config->capacity + unit - 1) & -unit);
  size_t rows;
  if (__builtin_mul_overflow((size_t)of_head, (size_t)config->num_kv_heads, &rows) ||
      (size_t)of_head != (uint64_t)of_head)
    return 0;
  if (__builtin_mul_overflow(rows, side->row_bytes, codes)) return 0;
  if (__builtin_mul_overflow(rows, side->scale_row_bytes, scales)) return 0;
  if (*codes > SIZE_MAX / 8 || *scales > SIZE_MAX / 8) return 0;
  *codes = kvedge_align(*codes);
  *scales = kvedge_align(*scales);
  return 1;
}

/* Lays the arrays of a layer out from `base` on (NULL: only counts); returns their bytes, 0: more than a size_t has. */
static size_t lay_out(const kvedge_layer_config *config, char *base, kvedge_slabs *slabs) {
  const kvedge_side keys = keys_of(config), values = values_of(config);
  size_t key_codes, value_codes, key_scales, value_scales, used = 0;
  if (!side_bytes(config, &keys, &key_codes, &key_scales)) return 0;
  if (!side_bytes(config, &values, &value_codes, &value_scales)) return 0;
  *slabs = (kvedge_slabs){.key_codes = kvedge_take(base, &used, key_codes)};
  slabs->value_codes = kvedge_take(base, &used, value_codes);
  slabs->key_scales = kvedge_take(base, &used, key_scales);
  slabs->value_scales = kvedge_take(base, &used, value_scales);
  void **const apart[] = {&slabs->first_keys, &slabs->first_values, &slabs->last_keys, &slabs->last_values};
  for (int i = 0; i < 4 && has_ranges(config); i++) {
    const kvedge_layer_config of = i < 2 ? kvedge_first_config(config) : kvedge_last_config(config);
    const kvedge_side side = i % 2 ? values_of(&of) : keys_of(&of);
    size_t codes, scales;
    if (!side_bytes(&of, &side, &codes, &scales)) return 0;
    *apart[i] = kvedge_take(base, &used, codes);
  }
  return used;
}

int64_t kvedge_layer_last_rows(const kvedge_layer_config *wanted) {
  kvedge_layer_config config;
  if (!complete_config(wanted, &config)) return -1;
  return has_ranges(&config) ? kvedge_last_rows(&config) : 0;
}

size_t kvedge_layer_header_bytes(const kvedge_layer_config *wanted) {
  kvedge_layer_config config;
  return complete_config(wanted, &config) ? header_bytes(&config) : 0;
}

size_t kvedge_layer_bytes(const kvedge_layer_config *wanted) {
  kvedge_layer_config config;
  kvedge_slabs unused;
  const size_t slabs = complete_config(wanted, &config) ? lay_out(&config, NULL, &unused) : 0;
  return slabs ? header_bytes(&config) + slabs : 0;
}

/* An empty plain layer over arrays. */
static void open_layer(kvedge_layer *layer, const kvedge_layer_config *config, const kvedge_slabs *slabs) {
  kvedge_side keys = keys_of(config), values = values_of(config);
  keys.codes = slabs->key_codes, values.codes = slabs->value_codes;
  keys.scales = keys.format->has_scales ? slabs->key_scales : slabs->key_codes;
  values.scales = values.format->has_scales ? slabs->value_scales : slabs->value_codes;
  layer->config = *config;
  layer->allocator = (kvedge_allocator){.allocate = NULL};
  layer->keys = keys, layer->values = values;
  layer->first = layer->last = NULL;
  layer->written = 0;
  atomic_init(&layer->start, 0);
  atomic_init(&layer->stop, 0);
  atomic_init(&layer->key_bound, 0.0f);
  atomic_init(&layer->value_bound, 0.0f);
}

/* Gives an empty layer first and last tokens: two layers whose headers follow its own. */
static void open_ranges(kvedge_layer *layer, const kvedge_slabs *slabs) {
  layer->first = (kvedge_layer *)((char *)layer + own_header_bytes(&layer->config));
  layer->last = (kvedge_layer *)((char *)layer->first + kvedge_align(sizeof(kvedge_layer)));
  kvedge_layer_config first, last;
  const kvedge_layer_config of_first = kvedge_first_config(&layer->config),
                            of_last = kvedge_last_config(&layer->config);
  complete_config(&of_first, &first), complete_config(&of_last, &last);
  open_layer(layer->first, &first, &(kvedge_slabs){.key_codes = slabs->first_keys, .value_codes = slabs->first_values});
  open_layer(layer->last, &last, &(kvedge_slabs){.key_codes = slabs->last_keys, .value_codes = slabs->last_values});
  atomic_init(&layer->first->stop, first.capacity); /* all their rows are there: the layer tells which are tokens */
  atomic_init(&layer->last->stop, last.capacity);
  atomic_init(&layer->version, 0);
  atomic_init(&layer->last_from, 0);
  atomic_init(&layer->first_row, 0);
  atomic_init(&layer->num_first, 0);
  atomic_init(&layer->num_readers, 0);
  atomic_init(&layer->is_draining, 0);
  kvedge_watch_forks();
  atomic_init(&layer->process, kvedge_process());
  layer->first_stop = layer->config.sinks;
  atomic_init(&layer->last_written, 0);
  atomic_init(&layer->last_row, 0);
}

kvedge_status kvedge_layer_init(void *memory, size_t bytes, const kvedge_layer_config *wanted,
                                const kvedge_slabs *slabs, kvedge_layer **out) {
  kvedge_layer_config config;
  kvedge_slabs own;
  if (!memory || !out || !complete_config(wanted, &config)) return KVEDGE_ERROR_ARGUMENT;
  size_t needed = header_bytes(&config);
  if (!slabs) {
    const size_t own_bytes = lay_out(&config, (char *)memory + needed, &own);
    if ((uintptr_t)memory % 64 || own_bytes == 0) return KVEDGE_ERROR_ARGUMENT;
    needed += own_bytes, slabs = &own;
  }
  if (!slabs->key_codes || !slabs->value_codes) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_side keys = keys_of(&config), values = values_of(&config);
  if ((keys.format->has_scales && !slabs->key_scales) || (values.format->has_scales && !slabs->value_scales))
    return KVEDGE_ERROR_ARGUMENT;
  if (has_ranges(&config) && config.sinks && (!slabs->first_keys || !slabs->first_values)) return KVEDGE_ERROR_ARGUMENT;
  if (has_ranges(&config) && kvedge_last_rows(&config) && (!slabs->last_keys || !slabs->last_values))
    return KVEDGE_ERROR_ARGUMENT;
  if (bytes < needed) return KVEDGE_ERROR_MEMORY;
  kvedge_status status = kvedge_isa_ready();
  if (status != KVEDGE_OK) return status;
  *out = memory;
  open_layer(*out, &config, slabs);
  if (has_ranges(&config)) open_ranges(*out, slabs);
  return KVEDGE_OK;
}

/* All of an array but its first huge page: a short context takes small pages only. */
static void advise_codes(const kvedge_layer_config *config, const kvedge_side *side) {
  size_t codes, scales;
  if (side_bytes(config, side, &codes, &scales) && codes > KVEDGE_HUGE_PAGE)
    kvedge_advise_huge_pages(side->codes + KVEDGE_HUGE_PAGE, codes - KVEDGE_HUGE_PAGE);
}

static void *allocate_pages(void *context, size_t bytes) {
  (void)context;
  return kvedge_pages_alloc(bytes);
}

static void release_pages(void *context, void *memory, size_t bytes) {
  (void)context;
  kvedge_pages_free(memory, bytes);
}

kvedge_status kvedge_layer_create(const kvedge_layer_config *config, const kvedge_allocator *allocator,
                                  kvedge_layer **out) {
  static const kvedge_allocator pages = {.allocate = allocate_pages, .release = release_pages};
  const kvedge_allocator *from = allocator ? allocator : &pages;
  const size_t bytes = kvedge_layer_bytes(config);
  if (!bytes || !out || !from->allocate || !from->release) return KVEDGE_ERROR_ARGUMENT;
  void *memory = from->allocate(from->context, bytes);
  if (!memory) return KVEDGE_ERROR_MEMORY;
  kvedge_status status = kvedge_layer_init(memory, bytes, config, NULL, out);
  if (status != KVEDGE_OK) {
    from->release(from->context, memory, bytes);
    return status;
  }
  (*out)->allocator = *from;
  if (allocator) return KVEDGE_OK;
  advise_codes(&(*out)->config, &(*out)->keys);
  advise_codes(&(*out)->config, &(*out)->values);
  return KVEDGE_OK;
}

void kvedge_layer_destroy(kvedge_layer *layer) {
  if (!layer) return;
  kvedge_quiesce();
  const kvedge_allocator from = layer->allocator;
  from.release(from.context, layer, kvedge_layer_bytes(&layer->config));
}

kvedge_status kvedge_layer_set_key_offset(kvedge_layer *layer, const float *offset) {
  KVEDGE_FLOAT_MODE;
  if (!layer || kvedge_layer_len(layer) > 0) return KVEDGE_ERROR_ARGUMENT;
  if (!layer->keys.format->has_scales) return KVEDGE_ERROR_ARGUMENT;
  const size_t n = key_vector_size(&layer->config);
  if (offset) {
    if (kvedge_active()->rows->abs_max_bits(offset, n) >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
    memcpy(layer->key_vectors, offset, n * sizeof(float));
  }
  layer->keys.offset = offset ? layer->key_vectors : NULL;
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_set_key_scale(kvedge_layer *layer, const float *scale) {
  KVEDGE_FLOAT_MODE;
  if (!layer || kvedge_layer_len(layer) > 0 || (scale && kvedge_is_of_runs(layer->keys.format)))
    return KVEDGE_ERROR_ARGUMENT;
  const size_t n = key_vector_size(&layer->config);
  float *own = layer->key_vectors + n;
  if (scale) {
    if (kvedge_active()->rows->abs_max_bits(scale, n) >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
    for (size_t i = 0; i < n; i++)
      if (!(scale[i] > 0.0f)) return KVEDGE_ERROR_ARGUMENT;
    memcpy(own, scale, n * sizeof(float));
  }
  layer->keys.scale = scale ? own : NULL;
  return KVEDGE_OK;
}

/* Where a token lies, for the writer, who alone moves `start`. */
static int64_t row_of(const kvedge_layer *layer, int64_t token) {
  return atomic_load_explicit(&layer->start, memory_order_relaxed) + token;
}

/* Tokens are checked and stored in chunks of about so many values, which a core's own cache still holds
 * when they are read for the second time. What a chunk leaves behind if a later one is refused lies
 * where nothing was ever written. */
enum { CHUNK_VALUES = 4096 };

/* Keys and values of some tokens, and where they go. */
typedef struct {
  kvedge_array keys, values;
  int64_t position, num_tokens;
} token_rows;

static token_rows tokens_from(const token_rows *rows, int64_t first, int64_t num_tokens) {
  return (token_rows){.keys = kvedge_array_from(&rows->keys, first, 0),
                      .values = kvedge_array_from(&rows->values, first, 0),
                      .position = rows->position + first,
                      .num_tokens = num_tokens};
}

static kvedge_status check_tokens(const kvedge_layer *layer, const token_rows *rows, kvedge_bounds *bound) {
  if (kvedge_has_ranges(layer)) return kvedge_ranges_check(layer, &rows->keys, &rows->values, rows->num_tokens, bound);
  kvedge_status status = kvedge_rows_check(&layer->keys, &rows->keys, rows->num_tokens, &bound->keys);
  if (status == KVEDGE_OK) status = kvedge_rows_check(&layer->values, &rows->values, rows->num_tokens, &bound->values);
  return status;
}

static void store_rows(const kvedge_layer *layer, const token_rows *rows) {
  const int64_t row = row_of(layer, rows->position);
  kvedge_rows_store(&layer->keys, &rows->keys, rows->num_tokens, row);
  kvedge_rows_store(&layer->values, &rows->values, rows->num_tokens, row);
}

static void store_tokens(kvedge_layer *layer, const token_rows *rows, const kvedge_bounds *bound) {
  store_rows(layer, rows);
  kvedge_raise_bound(&layer->key_bound, bound->keys);
  kvedge_raise_bound(&layer->value_bound, bound->values);
}

static void set_appended(kvedge_layer *layer, int64_t len) {
  atomic_store_explicit(&layer->stop, row_of(layer, len), memory_order_release);
}

/* Stores tokens that passed all checks behind the last one. */
static void append_checked(kvedge_layer *layer, const token_rows *rows, const kvedge_bounds *bound) {
  if (kvedge_has_ranges(layer)) {
    kvedge_ranges_append(layer, &rows->keys, &rows->values, rows->num_tokens, bound);
    return;
  }
  store_tokens(layer, rows, bound);
  kvedge_raise_written(layer, row_of(layer, rows->position) + rows->num_tokens);
  set_appended(layer, rows->position + rows->num_tokens);
}

static void raise_bounds(kvedge_bounds *bound, const kvedge_bounds *other) {
  if (other->keys > bound->keys) bound->keys = other->keys;
  if (other->values > bound->values) bound->values = other->values;
}

/* Tokens first..stop-1 of some, chunk by chunk; raises their bound. */
static kvedge_status write_chunks(const kvedge_layer *layer, const token_rows *rows, int64_t first, int64_t stop,
                                  int64_t chunk, kvedge_bounds *bound) {
  for (int64_t done = first, count; done < stop; done += count) {
    kvedge_bounds of_chunk;
    count = chunk < stop - done ? chunk : stop - done;
    const token_rows some = tokens_from(rows, done, count);
    const kvedge_status status = check_tokens(layer, &some, &of_chunk);
    if (status != KVEDGE_OK) return status;
    store_rows(layer, &some);
    raise_bounds(bound, &of_chunk);
  }
  return KVEDGE_OK;
}

enum {
  VALUES_PER_US = 1500, /* that are checked and stored, about */
  MOST_WRITE_TASKS = 64,
};

typedef struct {
  const kvedge_layer *layer;
  const token_rows *rows;
  int64_t chunk, of_task; /* tokens */
  kvedge_status status[MOST_WRITE_TASKS];
  kvedge_bounds bound[MOST_WRITE_TASKS];
} write_work;

static void write_task(void *context, int task) {
  write_work *w = context;
  const int64_t first = task * w->of_task, left = w->rows->num_tokens - first;
  w->bound[task] = (kvedge_bounds){0.0f, 0.0f};
  w->status[task] = write_chunks(w->layer, w->rows, first, first + (left < w->of_task ? left : w->of_task), w->chunk,
                                 &w->bound[task]);
}

/* The same on several threads. The error is that of the first tokens that have one. */
static kvedge_status write_on_threads(const kvedge_layer *layer, const token_rows *rows, int64_t chunk, int threads,
                                      kvedge_bounds *bound) {
  const int64_t chunks = (rows->num_tokens + chunk - 1) / chunk;
  const int64_t of_task = (chunks + MOST_WRITE_TASKS - 1) / MOST_WRITE_TASKS * chunk;
  write_work w = {.layer = layer, .rows = rows, .chunk = chunk, .of_task = of_task};
  const int num_tasks = (int)((rows->num_tokens + of_task - 1) / of_task);
  kvedge_run_once(write_task, &w, num_tasks, threads);
  for (int i = 0; i < num_tasks; i++) {
    if (w.status[i] != KVEDGE_OK) return w.status[i];
    raise_bounds(bound, &w.bound[i]);
  }
  return KVEDGE_OK;
}

/* Arguments, and room. */
static kvedge_status check_call(const kvedge_layer *layer, const token_rows *rows) {
  if (!layer || rows->position < 0 || rows->num_tokens < 0) return KVEDGE_ERROR_ARGUMENT;
  if (rows->num_tokens > 0 && !(kvedge_array_is_valid(&rows->keys) && kvedge_array_is_valid(&rows->values)))
    return KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_has_ranges(layer) && (rows->position | rows->num_tokens) & (kvedge_row_tokens(layer) - 1))
    return KVEDGE_ERROR_ARGUMENT;
  const int64_t left = layer->config.capacity - row_of(layer, 0);
  return rows->num_tokens > left - rows->position ? KVEDGE_ERROR_CAPACITY : KVEDGE_OK;
}

static kvedge_status write_tokens(kvedge_layer *layer, const token_rows *rows) {
  kvedge_status status = check_call(layer, rows);
  if (status != KVEDGE_OK) return status;
  if (rows->position < kvedge_layer_len(layer)) kvedge_quiesce();  /* a late reader may look at these rows */
  int overwrites = row_of(layer, rows->position) < layer->written; /* rows that must stay if a new one is refused */
  const int64_t channels = layer->config.head_dim + layer->config.value_head_dim, unit = kvedge_row_tokens(layer);
  const int64_t token = layer->config.num_kv_heads * channels, num_tokens = rows->num_tokens;
  int64_t chunk = overwrites ? num_tokens : 2 * CHUNK_VALUES / token + 1;
  chunk = (chunk + unit - 1) & -unit;
  const double us = (double)(num_tokens * token) / VALUES_PER_US;
  const int threads = chunk < num_tokens ? kvedge_threads_for(us, 0) : 1;
  kvedge_bounds bound = {0.0f, 0.0f};
  status = threads > 1 ? write_on_threads(layer, rows, chunk, threads, &bound)
                       : write_chunks(layer, rows, 0, num_tokens, chunk, &bound);
  if (status != KVEDGE_OK) return status;
  kvedge_raise_bound(&layer->key_bound, bound.keys);
  kvedge_raise_bound(&layer->value_bound, bound.values);
  kvedge_raise_written(layer, row_of(layer, rows->position) + num_tokens);
  return KVEDGE_OK;
}

static kvedge_status append_tokens(kvedge_layer *layer, token_rows rows) {
  rows.position = layer ? kvedge_layer_len(layer) : 0;
  kvedge_status status;
  if (layer && kvedge_has_ranges(layer)) {
    kvedge_bounds bound;
    status = check_call(layer, &rows);
    if (status == KVEDGE_OK && rows.num_tokens > 0) status = check_tokens(layer, &rows, &bound);
    if (status == KVEDGE_OK && rows.num_tokens > 0) append_checked(layer, &rows, &bound);
    return status;
  }
  status = write_tokens(layer, &rows);
  if (status == KVEDGE_OK) set_appended(layer, rows.position + rows.num_tokens);
  return status;
}

/* Tokens of C-contiguous float32 arrays. */
static token_rows dense_tokens(const kvedge_layer *layer, int64_t position, const float *keys, const float *values,
                               int64_t num_tokens) {
  token_rows rows = {.position = position, .num_tokens = num_tokens};
  if (!layer) return rows;
  rows.keys = kvedge_dense_array(keys, layer->keys.num_kv_heads, layer->keys.shape.dim);
  rows.values = kvedge_dense_array(values, layer->values.num_kv_heads, layer->values.shape.dim);
  return rows;
}

kvedge_status kvedge_layer_write(kvedge_layer *layer, int64_t position, const float *keys, const float *values,
                                 int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  const token_rows rows = dense_tokens(layer, position, keys, values, num_tokens);
  return layer && kvedge_has_ranges(layer) ? KVEDGE_ERROR_ARGUMENT : write_tokens(layer, &rows);
}

kvedge_status kvedge_layer_append(kvedge_layer *layer, const float *keys, const float *values, int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  return append_tokens(layer, dense_tokens(layer, 0, keys, values, num_tokens));
}

static token_rows rows_of_batch(kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values,
                                int64_t num_tokens) {
  return (token_rows){.keys = *keys, .values = *values, .position = kvedge_layer_len(layer), .num_tokens = num_tokens};
}

kvedge_status kvedge_layers_append(kvedge_layer *const *layers, const kvedge_array *keys, const kvedge_array *values,
                                   int num_layers, int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  if (!layers || !keys || !values || num_layers < 1) return KVEDGE_ERROR_ARGUMENT;
  if (num_layers == 1)
    return append_tokens(layers[0], (token_rows){.keys = *keys, .values = *values, .num_tokens = num_tokens});
  for (int i = 0; i < num_layers; i++) { /* arguments and room first: they cost nothing */
    for (int j = 0; j < i; j++)
      if (layers[j] == layers[i]) return KVEDGE_ERROR_ARGUMENT;
    if (!layers[i]) return KVEDGE_ERROR_ARGUMENT;
    const token_rows rows = rows_of_batch(layers[i], &keys[i], &values[i], num_tokens);
    const kvedge_status status = check_call(layers[i], &rows);
    if (status != KVEDGE_OK) return status;
  }
  for (int i = 0; i < num_layers; i++) {
    const token_rows rows = rows_of_batch(layers[i], &keys[i], &values[i], num_tokens);
    const kvedge_status status = check_tokens(layers[i], &rows, &layers[i]->checked);
    if (status != KVEDGE_OK) return status;
  }
  for (int i = 0; i < num_layers; i++) {
    const token_rows rows = rows_of_batch(layers[i], &keys[i], &values[i], num_tokens);
    if (num_tokens > 0) append_checked(layers[i], &rows, &layers[i]->checked);
  }
  return KVEDGE_OK;
}

/* Both of one moment: start only rises, so it was the same all the time between two looks that find it so. */
int64_t kvedge_layer_range(const kvedge_layer *layer, int64_t *start) {
  int64_t before, stop;
  *start = atomic_load_explicit(&layer->start, memory_order_acquire);
  do {
    before = *start;
    stop = atomic_load_explicit(&layer->stop, memory_order_acquire);
    *start = atomic_load_explicit(&layer->start, memory_order_acquire);
  } while (*start != before);
  return stop - *start;
}

int64_t kvedge_layer_len(const kvedge_layer *layer) {
  int64_t start;
  return kvedge_layer_range(layer, &start);
}

int64_t kvedge_layer_written(const kvedge_layer *layer) {
  int64_t rows = layer->written; /* of runs: the tokens of the last one lie among the last tokens */
  if (kvedge_has_ranges(layer)) {
    const int64_t last = atomic_load_explicit(&layer->last_written, memory_order_relaxed);
    rows = last > rows ? last : rows;
    rows = rows > layer->config.capacity ? layer->config.capacity : rows;
  }
  return rows - row_of(layer, 0);
}

kvedge_status kvedge_layer_filled(kvedge_layer *layer, int64_t position, int64_t num_tokens) {
  KVEDGE_FLOAT_MODE;
  if (!layer || position < 0 || num_tokens < 0 || kvedge_has_ranges(layer)) return KVEDGE_ERROR_ARGUMENT;
  if (num_tokens > layer->config.capacity - row_of(layer, 0) - position) return KVEDGE_ERROR_ARGUMENT;
  const int64_t row = row_of(layer, position), stop = row + num_tokens;
  kvedge_raise_bound(&layer->key_bound, kvedge_rows_bound(&layer->keys, row, stop));
  kvedge_raise_bound(&layer->value_bound, kvedge_rows_bound(&layer->values, row, stop));
  kvedge_raise_written(layer, stop);
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_set_len(kvedge_layer *layer, int64_t len) {
  if (!layer || len < 0 || len > layer->config.capacity - row_of(layer, 0)) return KVEDGE_ERROR_ARGUMENT;
  int64_t old = kvedge_layer_len(layer);
  if (len < old) kvedge_quiesce(); /* rows that a late reader may look at become writable */
  if (kvedge_has_ranges(layer)) {
    if (len > old && len > kvedge_layer_written(layer)) return KVEDGE_ERROR_ARGUMENT;
    kvedge_ranges_set_stop(layer, row_of(layer, len));
    return KVEDGE_OK;
  }
  if (len == 0) {
    atomic_store_explicit(&layer->key_bound, 0.0f, memory_order_relaxed);
    atomic_store_explicit(&layer->value_bound, 0.0f, memory_order_relaxed);
  } else if (len > old) {
    kvedge_layer_filled(layer, old, len - old);
  }
  set_appended(layer, len);
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_drop_first(kvedge_layer *layer, int64_t num_tokens) {
  if (!layer || num_tokens < 0 || num_tokens > kvedge_layer_len(layer)) return KVEDGE_ERROR_ARGUMENT;
  if (num_tokens > 0 && kvedge_row_tokens(layer) > 1 && !kvedge_has_ranges(layer)) return KVEDGE_ERROR_ARGUMENT;
  atomic_store_explicit(&layer->start, row_of(layer, num_tokens), memory_order_release);
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_compact(kvedge_layer *layer) {
  if (!layer) return KVEDGE_ERROR_ARGUMENT;
  int64_t start, len = kvedge_layer_range(layer, &start);
  if (start == 0) return KVEDGE_OK;
  if (kvedge_has_ranges(layer)) {
    kvedge_ranges_compact(layer);
    return KVEDGE_OK;
  }
  kvedge_quiesce(); /* a late reader may look at rows that are written over */
  kvedge_copy_tokens(layer, start, layer, 0, len);
  layer->written = len;
  atomic_store_explicit(&layer->start, 0, memory_order_release);
  atomic_store_explicit(&layer->stop, len, memory_order_release);
  return KVEDGE_OK;
}

kvedge_status kvedge_layer_get(const kvedge_layer *layer, int values, int64_t first_row, int64_t start, int64_t stop,
                               float *out) {
  KVEDGE_FLOAT_MODE;
  if (!layer || !out || start < 0 || stop < start || first_row < -1) return KVEDGE_ERROR_ARGUMENT;
  int64_t row;
  const int64_t len = kvedge_layer_range(layer, &row);
  const int64_t moved = first_row < 0 ? 0 : row - first_row; /* tokens dropped since first_row was told */
  if (stop > len + moved) return KVEDGE_ERROR_ARGUMENT;
  row += start - moved;
  if (kvedge_has_ranges(layer)) kvedge_ranges_load(layer, values, row, row + stop - start, out);
  else kvedge_rows_load(values ? &layer->values : &layer->keys, row, row + stop - start, out);
  return KVEDGE_OK;
}

void kvedge_layer_describe(const kvedge_layer *layer, kvedge_layer_config *config, kvedge_slabs *slabs) {
  if (config) *config = layer->config;
  if (!slabs) return;
  *slabs = (kvedge_slabs){.key_codes = layer->keys.codes, .value_codes = layer->values.codes};
  if (layer->keys.format->has_scales) slabs->key_scales = layer->keys.scales;
  if (layer->values.format->has_scales) slabs->value_scales = layer->values.scales;
  if (!kvedge_has_ranges(layer)) return;
  slabs->first_keys = layer->first->keys.codes, slabs->first_values = layer->first->values.codes;
  slabs->last_keys = layer->last->keys.codes, slabs->last_values = layer->last->values.codes;
}
