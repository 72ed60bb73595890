/* Filling layers from a file, once its digest and every number in it are as they should be. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "session/reader.h"
#include "system/float_mode.h"

/* ---- Layers -------------------------------------------------------------------------------------------------------- */

kvedge_status kvedge_check_layer(const kvedge_session_layer *of, int64_t length, kvedge_layer *const *layers, int i) {
  int64_t start;
  if (!layers[i] || kvedge_layer_range(layers[i], &start) > 0) return KVEDGE_ERROR_ARGUMENT;
  for (int j = 0; j < i; j++)
    if (layers[j] == layers[i]) return KVEDGE_ERROR_ARGUMENT;
  if (!kvedge_stored_alike(&layers[i]->config, &of->config)) return KVEDGE_ERROR_ARGUMENT;
  if (kvedge_has_ranges(layers[i])) start = 0; /* it is filled from the start of its arrays */
  return length - kvedge_first_position(of) > layers[i]->config.capacity - start ? KVEDGE_ERROR_CAPACITY : KVEDGE_OK;
}

/* ---- Numbers ------------------------------------------------------------------------------------------------------- */

/* Rows of one side of a part, as they lie in the file, and as many of them as
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
  const kvedge_layer_config stored = kvedge_part_config(&contents->session->layers[index].config, part);
  const kvedge_layer_config *config = &stored;
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
  room row_room;
  float x[KVEDGE_MAX_HEAD_DIM];
  for (int64_t row = 0; row < rows->num_rows; row++) {
    copy_rows(rows, row, 1, &row_room);
    rows->format->decode(&rows->shape, row_room.codes, row_room.scales, 1, x);
    double limit = scale ? 1.25 * FLT_MAX : FLT_MAX;
    if (rows->format->has_scales) limit += rows->format->bound(&rows->shape, row_room.codes, row_room.scales, 1);
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
  const int is_mapped = part == OWN_ROWS || part == RUNS; /* first and last keys are stored as they are */
  const char *offset = is_mapped ? own[KEY_OFFSET] : NULL, *scale = is_mapped ? own[KEY_SCALE] : NULL;
  if ((offset || scale) && !keys_are_valid(&keys, layer->config.num_kv_heads, offset, scale))
    return "a key offset or key scale leads to keys beyond float32";
  return NULL;
}

const char *kvedge_numbers_fault(const kvedge_contents *contents, int index) {
  const kvedge_tensor offset = kvedge_contents_tensor(contents, index, OWN_ROWS, KEY_OFFSET);
  const kvedge_tensor scale = kvedge_contents_tensor(contents, index, OWN_ROWS, KEY_SCALE);
  const char *fault = NULL;
  if (!vector_is_valid(&offset, 0)) return "a key offset is not finite";
  if (!vector_is_valid(&scale, 1)) return "a key scale is not finite and positive";
  const kvedge_layer_config *config = &contents->session->layers[index].config;
  for (int part = kvedge_in_runs(config) ? FIRST_TOKENS : OWN_ROWS; part < NUM_PARTS && !fault; part++)
    if (kvedge_has_part(config, part)) fault = part_fault(contents, index, part);
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

/* Copies a part to rows of a layer from `row` on. */
static void copy_part(const kvedge_contents *contents, int index, int part, kvedge_layer *to, int64_t row) {
  for (int column = KEY_CODES; column <= VALUE_SCALES; column++) {
    const kvedge_side *side = column == VALUE_CODES || column == VALUE_SCALES ? &to->values : &to->keys;
    const kvedge_tensor t = kvedge_contents_tensor(contents, index, part, column);
    if (!t.bytes) continue;
    const int is_codes = column == KEY_CODES || column == VALUE_CODES;
    memcpy(is_codes ? kvedge_codes_at(side, row) : kvedge_scales_at(side, row), t.data, (size_t)t.bytes);
  }
}

void kvedge_fill_rows(kvedge_layer *layer, const kvedge_contents *contents, int index, int64_t first) {
  const kvedge_session_layer *of = &contents->session->layers[index];
  int64_t start = 0;
  if (!kvedge_has_ranges(layer)) kvedge_layer_range(layer, &start);
  copy_part(contents, index, kvedge_in_runs(&of->config) ? RUNS : OWN_ROWS, layer,
            start + kvedge_first_position(of) - first);
}

void kvedge_fill_rest(kvedge_layer *layer, const kvedge_contents *contents, int index) {
  const kvedge_session *session = contents->session;
  const kvedge_session_layer *of = &session->layers[index];
  const char *const *own = contents->tensors[index].at[OWN_ROWS];
  const size_t n = (size_t)of->config.num_kv_heads * (size_t)of->config.head_dim;
  if (of->has_key_offset) memcpy(layer->key_vectors, own[KEY_OFFSET], n * sizeof(float));
  if (of->has_key_scale) memcpy(layer->key_vectors + n, own[KEY_SCALE], n * sizeof(float));
  layer->keys.offset = of->has_key_offset ? layer->key_vectors : NULL;
  layer->keys.scale = of->has_key_scale ? layer->key_vectors + n : NULL;
  if (!kvedge_has_ranges(layer)) {
    kvedge_layer_set_len(layer, kvedge_stored_tokens(session, of));
    return;
  }
  const int64_t first = kvedge_first_position(of), stop = session->length - first;
  const int64_t last = stop - kvedge_part_tokens(contents, index, LAST_TOKENS);
  const kvedge_ranges ranges = {.start = of->dropped - first,
                                .stop = stop,
                                .last_from = last,
                                .last_row = last,
                                .num_first = kvedge_part_tokens(contents, index, FIRST_TOKENS),
                                .first_stop = of->config.sinks};
  copy_part(contents, index, FIRST_TOKENS, layer->first, 0);
  copy_part(contents, index, LAST_TOKENS, layer->last, 0);
  kvedge_layer_set_ranges(layer, &ranges);
}

kvedge_status kvedge_session_load(const kvedge_session_reader *reader, kvedge_layer *const *layers, const char **why) {
  KVEDGE_FLOAT_MODE;
  if (why) *why = NULL;
  if (!reader || (!layers && reader->session.num_layers)) return KVEDGE_ERROR_ARGUMENT;
  const kvedge_contents contents = {.session = &reader->session, .tensors = reader->tensors};
  const int num_layers = reader->session.num_layers;
  for (int i = 0; i < num_layers; i++) {
    const kvedge_status status = kvedge_check_layer(&reader->session.layers[i], reader->session.length, layers, i);
    if (status != KVEDGE_OK) return status;
  }
  char digest[KVEDGE_DIGEST];
  kvedge_contents_digest(&contents, digest);
  const char *fault = NULL;
  if (memcmp(digest, reader->digest, KVEDGE_DIGEST)) fault = "it does not match its sha256: it was changed or damaged";
  for (int i = 0; i < num_layers && !fault; i++) fault = kvedge_numbers_fault(&contents, i);
  for (int i = 0; i < reader->session.num_states && !fault; i++) fault = state_fault(&reader->session.states[i]);
  if (why) *why = fault;
  if (fault) return KVEDGE_ERROR_FILE;
  for (int i = 0; i < num_layers; i++) {
    kvedge_fill_rows(layers[i], &contents, i, kvedge_first_position(&reader->session.layers[i]));
    kvedge_fill_rest(layers[i], &contents, i);
  }
  return KVEDGE_OK;
}
