/* Filling layers from a file, once its digest and every number in it are as they should be. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "session/reader.h"
#include "store/layer.h"

/* ---- Layers -------------------------------------------------------------------------------------------------------- */

static kvedge_status check_layers(const kvedge_session *session, kvedge_layer *const *layers) {
  for (int i = 0; i < session->num_layers; i++) {
    int64_t start;
    kvedge_layer_config config;
    if (!layers[i] || kvedge_layer_range(layers[i], &start) > 0) return KVEDGE_ERROR_ARGUMENT;
    for (int j = 0; j < i; j++)
      if (layers[j] == layers[i]) return KVEDGE_ERROR_ARGUMENT;
    kvedge_layer_get_config(layers[i], &config);
    if (!kvedge_same_rows(&config, &session->layers[i].config)) return KVEDGE_ERROR_ARGUMENT;
    if (kvedge_held_tokens(session, &session->layers[i]) > config.capacity - start) return KVEDGE_ERROR_CAPACITY;
  }
  return KVEDGE_OK;
}

/* ---- Numbers ------------------------------------------------------------------------------------------------------- */

/* Rows of one side of a layer as they lie in the file, and as many of them as `room` has, where they are aligned. */
typedef struct {
  const kvedge_format_info *format;
  kvedge_row_shape shape;
  size_t row_bytes, scale_row_bytes;
  int64_t num_rows; /* tokens x heads */
  const char *codes, *scales;
} file_rows;

enum { ROOM = KVEDGE_MAX_HEAD_DIM * sizeof(float) };
typedef struct {
  _Alignas(16) char codes[ROOM], scales[ROOM];
} room;

static file_rows rows_of(const kvedge_contents *contents, int index, int values) {
  const kvedge_session_layer layer = kvedge_contents_layer(contents, index);
  const kvedge_layer_config *config = &layer.config;
  const kvedge_tensor codes = kvedge_contents_tensor(contents, index, values ? VALUE_CODES : KEY_CODES);
  const kvedge_tensor scales = kvedge_contents_tensor(contents, index, values ? VALUE_SCALES : KEY_SCALES);
  const kvedge_format_info *format = kvedge_side_format(config, values);
  file_rows rows = {.format = format,
                    .shape = kvedge_row_shape_of(format, values ? config->value_head_dim : config->head_dim,
                                                 config->group_size, config->scale_type),
                    .num_rows = codes.shape[0] * codes.shape[1],
                    .codes = codes.data,
                    .scales = scales.data};
  rows.row_bytes = kvedge_row_bytes(format, rows.shape.dim);
  rows.scale_row_bytes = kvedge_scale_row_bytes(&rows.shape);
  return rows;
}

/* Copies rows from `row` on, as many as there is room for, and returns their number. */
static int64_t copy_rows(const file_rows *rows, int64_t row, int64_t most, room *to) {
  int64_t n = rows->num_rows - row < most ? rows->num_rows - row : most;
  if (n > (int64_t)(ROOM / rows->row_bytes)) n = (int64_t)(ROOM / rows->row_bytes);
  if (rows->scale_row_bytes && n > (int64_t)(ROOM / rows->scale_row_bytes)) n = (int64_t)(ROOM / rows->scale_row_bytes);
  memcpy(to->codes, rows->codes + (size_t)row * rows->row_bytes, (size_t)n * rows->row_bytes);
  memcpy(to->scales, rows->scales + (size_t)row * rows->scale_row_bytes, (size_t)n * rows->scale_row_bytes);
  return n;
}

static int rows_are_valid(const file_rows *rows) {
  room some;
  for (int64_t row = 0, n; row < rows->num_rows; row += n) {
    n = copy_rows(rows, row, INT64_MAX, &some);
    if (!rows->format->is_valid(&rows->shape, some.codes, some.scales, n)) return 0;
  }
  return 1;
}

static float float_at(const char *data, size_t index) {
  float x;
  memcpy(&x, data + index * sizeof x, sizeof x);
  return x;
}

static int vector_is_valid(const kvedge_tensor *vector, int is_scale) {
  for (size_t i = 0; vector->data && i < vector->bytes / sizeof(float); i++) {
    const float x = float_at(vector->data, i);
    if (!isfinite(x) || (is_scale && !(x > 0.0f))) return 0;
  }
  return 1;
}

/* Are keys within float32 once they are multiplied by the key scale and the key offset is added? Rounding may have taken
 * them further: by a scale; a format of few bits, over a key scale, by up to a quarter. */
static int keys_are_valid(const file_rows *rows, int num_kv_heads, const char *offset, const char *scale) {
  const size_t dim = (size_t)rows->shape.dim;
  room one;
  float x[KVEDGE_MAX_HEAD_DIM];
  for (int64_t row = 0; row < rows->num_rows; row++) {
    copy_rows(rows, row, 1, &one);
    rows->format->decode(&rows->shape, one.codes, one.scales, 1, x);
    double limit = scale ? 1.25 * FLT_MAX : FLT_MAX;
    if (rows->format->has_scales) limit += rows->format->bound(&rows->shape, one.codes, one.scales, 1);
    const size_t head = (size_t)(row % num_kv_heads) * dim;
    for (size_t d = 0; d < dim; d++) {
      double key = x[d];
      if (scale) key *= float_at(scale, head + d);
      if (offset) key += float_at(offset, head + d);
      if (fabs(key) > limit) return 0;
    }
  }
  return 1;
}

static const char *layer_fault(const kvedge_contents *contents, int index) {
  const file_rows keys = rows_of(contents, index, 0), values = rows_of(contents, index, 1);
  const kvedge_tensor offset = kvedge_contents_tensor(contents, index, KEY_OFFSET);
  const kvedge_tensor scale = kvedge_contents_tensor(contents, index, KEY_SCALE);
  if (!rows_are_valid(&keys) || !rows_are_valid(&values)) return "a tensor holds codes or scales that no row has";
  if (!vector_is_valid(&offset, 0)) return "a key offset is not finite";
  if (!vector_is_valid(&scale, 1)) return "a key scale is not finite and positive";
  const int num_kv_heads = contents->session->layers[index].config.num_kv_heads;
  if ((offset.data || scale.data) && !keys_are_valid(&keys, num_kv_heads, offset.data, scale.data))
    return "a key offset or key scale leads to keys beyond float32";
  return NULL;
}

/* ---- Filling ------------------------------------------------------------------------------------------------------- */

static void copy_tensor(void *to, const kvedge_contents *contents, int index, int tensor) {
  const kvedge_tensor t = kvedge_contents_tensor(contents, index, tensor);
  if (t.bytes > 0) memcpy(to, t.data, (size_t)t.bytes);
}

static void fill_layer(kvedge_layer *layer, const kvedge_contents *contents, int index) {
  const kvedge_session_layer *held = &contents->session->layers[index];
  const size_t n = (size_t)held->config.num_kv_heads * (size_t)held->config.head_dim;
  int64_t start;
  kvedge_layer_range(layer, &start);
  copy_tensor(kvedge_codes_at(&layer->keys, start), contents, index, KEY_CODES);
  copy_tensor(kvedge_scales_at(&layer->keys, start), contents, index, KEY_SCALES);
  copy_tensor(kvedge_codes_at(&layer->values, start), contents, index, VALUE_CODES);
  copy_tensor(kvedge_scales_at(&layer->values, start), contents, index, VALUE_SCALES);
  if (held->has_key_offset) copy_tensor(layer->key_vectors, contents, index, KEY_OFFSET);
  if (held->has_key_scale) copy_tensor(layer->key_vectors + n, contents, index, KEY_SCALE);
  layer->keys.offset = held->has_key_offset ? layer->key_vectors : NULL;
  layer->keys.scale = held->has_key_scale ? layer->key_vectors + n : NULL;
  kvedge_layer_set_len(layer, kvedge_held_tokens(contents->session, held));
}

kvedge_status kvedge_session_load(const kvedge_session_reader *reader, kvedge_layer *const *layers, const char **why) {
  if (why) *why = NULL;
  if (!reader || !layers) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_contents contents = {.session = &reader->session, .tensors = reader->tensors};
  const kvedge_status status = check_layers(&reader->session, layers);
  if (status != KVEDGE_OK) return status;
  char digest[KVEDGE_DIGEST];
  kvedge_contents_digest(&contents, digest);
  const char *fault = NULL;
  if (memcmp(digest, reader->digest, KVEDGE_DIGEST)) fault = "it does not match its sha256: it was changed or damaged";
  for (int i = 0; i < reader->session.num_layers && !fault; i++) fault = layer_fault(&contents, i);
  if (why) *why = fault;
  if (fault) return KVEDGE_ERROR_FILE;
  for (int i = 0; i < reader->session.num_layers; i++) fill_layer(layers[i], &contents, i);
  return KVEDGE_OK;
}
