/* Filling layers from a file, once its digest and every number in it are as they should be. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "session/reader.h"
#include "store/layer.h"
#include "system/float_mode.h"

/* ---- Layers -------------------------------------------------------------------------------------------------------- */

/* What is to be filled. */
typedef struct {
  kvedge_layer *const *layers;
  kvedge_session_parts *parts;
} targets;

static kvedge_layer *layer_of(const targets *to, int index, int part) {
  return kvedge_layer_of_part(to->layers, to->parts, index, part);
}

static kvedge_status check_part(const kvedge_session *session, const targets *to, int index, int part) {
  const kvedge_session_part held = kvedge_part_of(session, &session->layers[index], part);
  const kvedge_layer *layer = layer_of(to, index, part);
  kvedge_layer_config config;
  int64_t start;
  if (!layer || !held.config.capacity) return layer || held.config.capacity ? KVEDGE_ERROR_ARGUMENT : KVEDGE_OK;
  if (layer->last || kvedge_layer_range(layer, &start) > 0) return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < index * NUM_PARTS + part; i++)
    if (layer_of(to, i / NUM_PARTS, i % NUM_PARTS) == layer) return KVEDGE_ERROR_ARGUMENT;
  kvedge_layer_get_config(layer, &config);
  if (!kvedge_same_rows(&config, &held.config)) return KVEDGE_ERROR_ARGUMENT;
  return held.num_tokens > config.capacity - start ? KVEDGE_ERROR_CAPACITY : KVEDGE_OK;
}

static kvedge_status check_layers(const kvedge_session *session, const targets *to) {
  for (int i = 0; i < session->num_layers; i++)
    for (int part = 0; part < NUM_PARTS; part++) {
      const kvedge_status status = check_part(session, to, i, part);
      if (status != KVEDGE_OK) return status;
    }
  return KVEDGE_OK;
}

/* ---- Numbers ------------------------------------------------------------------------------------------------------- */

/* Rows of one side of a layer, or of a part, as they lie in the file, and as many of them as
 * `room` has, where they are aligned. */
typedef struct {
  const kvedge_format_info *format;
  kvedge_row_shape shape;
  size_t row_bytes, scale_row_bytes;
  int64_t num_rows; /* tokens, or runs, x heads */
  const char *codes, *scales;
} file_rows;

enum { ROOM = KVEDGE_MAX_HEAD_DIM * sizeof(float) };
typedef struct {
  _Alignas(16) char codes[ROOM], scales[ROOM];
} room;

static file_rows rows_of(const kvedge_contents *contents, int index, int part, int values) {
  const kvedge_session *session = contents->session;
  const kvedge_session_part held = kvedge_part_of(session, &session->layers[index], part);
  const kvedge_layer_config *config = &held.config;
  const kvedge_tensor codes = kvedge_contents_tensor(contents, index, part, values ? VALUE_CODES : KEY_CODES);
  const kvedge_tensor scales = kvedge_contents_tensor(contents, index, part, values ? VALUE_SCALES : KEY_SCALES);
  const kvedge_format_info *format = kvedge_side_format(config, values);
  file_rows rows = {.format = format,
                    .shape = kvedge_row_shape_of(format, values ? config->value_head_dim : config->head_dim,
                                                 config->group_size, config->scale_type),
                    .num_rows = codes.shape[0] * codes.shape[1],
                    .codes = codes.data,
                    .scales = scales.data};
  rows.row_bytes = kvedge_row_bytes(format, rows.shape.dim);
  rows.scale_row_bytes = format->has_scales ? kvedge_scale_row_bytes(&rows.shape) : 0;
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
  if (rows->row_bytes == 0) return 1;
  if (rows->format->run_bytes) return rows->format->is_valid(&rows->shape, rows->codes, NULL, rows->num_rows);
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

/* Are keys within float32 once they are multiplied by the key scale and the key offset is added?
 * Rounding may have taken them further: by a scale; a format of few bits, over a key scale, by
 * up to a quarter. */
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

static const char *part_fault(const kvedge_contents *contents, int index, int part) {
  const kvedge_session_layer *layer = &contents->session->layers[index];
  const file_rows keys = rows_of(contents, index, part, 0), values = rows_of(contents, index, part, 1);
  if (!rows_are_valid(&keys) || !rows_are_valid(&values)) return "a tensor holds codes or scales that no row has";
  const char *const *own = contents->tensors[index].at[OWN_ROWS];
  const char *offset = kvedge_part_has(layer, part, KEY_OFFSET) ? own[KEY_OFFSET] : NULL;
  const char *scale = kvedge_part_has(layer, part, KEY_SCALE) ? own[KEY_SCALE] : NULL;
  if ((offset || scale) && keys.row_bytes && !keys_are_valid(&keys, layer->config.num_kv_heads, offset, scale))
    return "a key offset or key scale leads to keys beyond float32";
  return NULL;
}

static const char *layer_fault(const kvedge_contents *contents, int index) {
  const kvedge_tensor offset = kvedge_contents_tensor(contents, index, OWN_ROWS, KEY_OFFSET);
  const kvedge_tensor scale = kvedge_contents_tensor(contents, index, OWN_ROWS, KEY_SCALE);
  const char *fault = NULL;
  if (!vector_is_valid(&offset, 0)) return "a key offset is not finite";
  if (!vector_is_valid(&scale, 1)) return "a key scale is not finite and positive";
  for (int part = 0; part < NUM_PARTS && !fault; part++)
    if (contents->tensors[index].at[part][KEY_CODES]) fault = part_fault(contents, index, part);
  return fault;
}

static const char *state_fault(const kvedge_session_state *state) {
  const kvedge_tensor t = kvedge_state_tensor(state);
  const uint32_t exponent = state->type == KVEDGE_TYPE_FLOAT32   ? 0x7f800000
                            : state->type == KVEDGE_TYPE_FLOAT16 ? 0x7c00
                                                                 : 0x7f80;
  for (uint64_t at = 0; at < t.bytes; at += (uint64_t)t.item_bytes) {
    uint32_t bits = 0;
    uint16_t half;
    if (t.item_bytes == 4) memcpy(&bits, t.data + at, 4);
    else memcpy(&half, t.data + at, 2), bits = half;
    if ((bits & exponent) == exponent) return "a state is not finite";
  }
  return NULL;
}

/* ---- Filling ------------------------------------------------------------------------------------------------------- */

static void copy_tensor(void *to, const kvedge_contents *contents, int index, int part, int column) {
  const kvedge_tensor t = kvedge_contents_tensor(contents, index, part, column);
  if (t.bytes > 0) memcpy(to, t.data, (size_t)t.bytes);
}

static void fill_part(kvedge_layer *layer, const kvedge_contents *contents, int index, int part) {
  const kvedge_session_layer *of = &contents->session->layers[index];
  const kvedge_session_part held = kvedge_part_of(contents->session, of, part);
  const size_t n = (size_t)held.config.num_kv_heads * (size_t)held.config.head_dim;
  const int has_offset = kvedge_part_has(of, part, KEY_OFFSET), has_scale = kvedge_part_has(of, part, KEY_SCALE);
  int64_t start;
  kvedge_layer_range(layer, &start); /* 0 of runs */
  copy_tensor(kvedge_codes_at(&layer->keys, start), contents, index, part, KEY_CODES);
  copy_tensor(kvedge_scales_at(&layer->keys, start), contents, index, part, KEY_SCALES);
  copy_tensor(kvedge_codes_at(&layer->values, start), contents, index, part, VALUE_CODES);
  copy_tensor(kvedge_scales_at(&layer->values, start), contents, index, part, VALUE_SCALES);
  if (has_offset) copy_tensor(layer->key_vectors, contents, index, OWN_ROWS, KEY_OFFSET);
  if (has_scale) copy_tensor(layer->key_vectors + n, contents, index, OWN_ROWS, KEY_SCALE);
  layer->keys.offset = has_offset ? layer->key_vectors : NULL;
  layer->keys.scale = has_scale ? layer->key_vectors + n : NULL;
  kvedge_layer_set_len(layer, held.num_tokens);
}

kvedge_status kvedge_session_load(const kvedge_session_reader *reader, kvedge_layer *const *layers,
                                  kvedge_session_parts *parts, const char **why) {
  KVEDGE_FLOAT_MODE;
  if (why) *why = NULL;
  if (!reader || (!layers && reader->session.num_layers)) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_contents contents = {.session = &reader->session, .tensors = reader->tensors};
  const targets to = {layers, parts};
  const int num_layers = reader->session.num_layers;
  const kvedge_status status = check_layers(&reader->session, &to);
  if (status != KVEDGE_OK) return status;
  char digest[KVEDGE_DIGEST];
  kvedge_contents_digest(&contents, digest);
  const char *fault = NULL;
  if (memcmp(digest, reader->digest, KVEDGE_DIGEST)) fault = "it does not match its sha256: it was changed or damaged";
  for (int i = 0; i < num_layers && !fault; i++) fault = layer_fault(&contents, i);
  for (int i = 0; i < reader->session.num_states && !fault; i++) fault = state_fault(&reader->session.states[i]);
  if (why) *why = fault;
  if (fault) return KVEDGE_ERROR_FILE;
  for (int i = 0; i < num_layers; i++) {
    for (int part = 0; part < NUM_PARTS; part++)
      if (layer_of(&to, i, part)) fill_part(layer_of(&to, i, part), &contents, i, part);
    if (parts) parts[i].runs_position = kvedge_runs_begin(&reader->session.layers[i]);
  }
  return KVEDGE_OK;
}
