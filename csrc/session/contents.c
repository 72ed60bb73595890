/* What a session file holds: tensors, metadata, digest. */
#include "session/contents.h"

#include <string.h>

#include "session/json.h"
#include "session/sha256.h"
#include "store/layer_struct.h"

#define PART(part, prefix)                                                                                             \
  {part, KEY_CODES, prefix "key_codes"}, {part, KEY_SCALES, prefix "key_scales"},                                      \
      {part, VALUE_CODES, prefix "value_codes"}, {part, VALUE_SCALES, prefix "value_scales"}
const kvedge_tensor_name kvedge_tensors[NUM_TENSORS] = {
    PART(FIRST_TOKENS, "first."),
    {OWN_ROWS, KEY_CODES,    "key_codes"   },
    {OWN_ROWS, KEY_OFFSET,   "key_offset"  },
    {OWN_ROWS, KEY_SCALE,    "key_scale"   },
    {OWN_ROWS, KEY_SCALES,   "key_scales"  },
    PART(LAST_TOKENS, "last."),
    PART(RUNS, "runs."),
    {OWN_ROWS, VALUE_CODES,  "value_codes" },
    {OWN_ROWS, VALUE_SCALES, "value_scales"},
};

/* ---- Layers and tensors ------------------------------------------------------------------------------------------- */

kvedge_session_layer kvedge_contents_layer(const kvedge_contents *contents, int index) {
  const kvedge_session *session = contents->session;
  kvedge_session_layer layer = {0};
  if (index >= session->num_layers) return layer;
  if (session->layers) layer = session->layers[index];
  if (contents->layers) {
    const kvedge_layer *from = contents->layers[index];
    layer.config = from->config;
    if (!layer.config.recent && !layer.config.sinks && !kvedge_in_runs(&layer.config)) layer.config.recent_format = 0;
    layer.has_key_offset = from->keys.offset != NULL;
    layer.has_key_scale = from->keys.scale != NULL;
  }
  return layer;
}

int kvedge_has_part(const kvedge_layer_config *config, int part) {
  return part == OWN_ROWS || (part == RUNS ? kvedge_in_runs(config) : config->recent_format != 0);
}

kvedge_layer_config kvedge_part_config(const kvedge_layer_config *config, int part) {
  return part == FIRST_TOKENS || part == LAST_TOKENS ? kvedge_first_config(config) : *config;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where the tokens of a layer lie that is written, as if it were cut to the session's length: first ones from first_row of its
 * own, and of last ones no more than are kept. */
static kvedge_ranges ranges_to_write(const kvedge_contents *contents, int index, const kvedge_session_layer *of) {
  const kvedge_layer *layer = contents->layers[index];
  kvedge_ranges r;
  kvedge_layer_get_ranges(layer, &r);
  const int64_t begin = kvedge_in_runs(&of->config) ? r.start & -KVEDGE_RUN : r.start;
  const int64_t first_stop = r.first_row + r.num_first;
  const int64_t since = larger(r.last_from, r.stop - kvedge_kept_rows(&of->config));
  r.stop = r.start + kvedge_stored_tokens(contents->session, of);
  r.last_from = smaller(larger(since, begin), r.stop);
  r.num_first = r.first_row > r.start ? 0 : larger(0, smaller(first_stop, r.stop) - r.start);
  r.first_row = r.num_first ? r.start - r.first_row : 0;
  return r;
}

int64_t kvedge_part_tokens(const kvedge_contents *contents, int index, int part) {
  const kvedge_session_layer layer = kvedge_contents_layer(contents, index);
  const int64_t length = contents->session->length, whole = length & -KVEDGE_RUN;
  if (part == OWN_ROWS) return kvedge_stored_tokens(contents->session, &layer);
  int64_t num_first, num_last;
  if (contents->layers) {
    const kvedge_ranges r = ranges_to_write(contents, index, &layer);
    num_first = r.num_first, num_last = r.stop - r.last_from;
  } else {
    num_first = contents->tensors[index].num_first, num_last = contents->tensors[index].num_last;
  }
  if (part == FIRST_TOKENS) return num_first;
  if (part == LAST_TOKENS) return num_last;
  /* Runs end with the last whole one, or where the layer does if last tokens do not reach back to there. */
  return (length - num_last <= whole ? whole : length) - kvedge_first_position(&layer);
}

/* Where a tensor lies in a layer. */
static void find_in_layer(const kvedge_contents *contents, int index, int part, int column, kvedge_tensor *t) {
  const kvedge_session_layer of = kvedge_contents_layer(contents, index);
  const kvedge_ranges r = ranges_to_write(contents, index, &of);
  const kvedge_layer *own = contents->layers[index];
  const kvedge_layer *layer = part == FIRST_TOKENS ? own->first : part == LAST_TOKENS ? own->last : own;
  const kvedge_side *side = column == VALUE_CODES || column == VALUE_SCALES ? &layer->values : &layer->keys;
  const int64_t row = part == FIRST_TOKENS  ? r.first_row
                      : part == LAST_TOKENS ? r.last_from - r.last_row
                      : part == RUNS        ? r.start & -KVEDGE_RUN
                                            : r.start;
  t->data = !t->bytes                                      ? ""
            : column == KEY_OFFSET                         ? (const char *)side->offset
            : column == KEY_SCALE                          ? (const char *)side->scale
            : column == KEY_CODES || column == VALUE_CODES ? kvedge_codes_at(side, row)
                                                           : kvedge_scales_at(side, row);
}

kvedge_tensor kvedge_contents_tensor(const kvedge_contents *contents, int index, int part, int column) {
  const kvedge_session_layer layer = kvedge_contents_layer(contents, index);
  if (layer.config.capacity == 0 || !kvedge_has_part(&layer.config, part)) return (kvedge_tensor){0};
  const kvedge_layer_config config = kvedge_part_config(&layer.config, part);
  const int is_value = column == VALUE_CODES || column == VALUE_SCALES;
  const int has_bytes = part != OWN_ROWS || !kvedge_in_runs(&config);
  const kvedge_format_info *format = kvedge_side_format(&config, is_value);
  const int dim = is_value ? config.value_head_dim : config.head_dim;
  const kvedge_row_shape rows = kvedge_row_shape_of(format, dim, config.group_size, config.scale_type);
  const int halves = kvedge_has_scales(&config) && config.scale_type == KVEDGE_SCALE_FLOAT16;
  const int64_t num_tokens = kvedge_part_tokens(contents, index, part);
  kvedge_tensor t = {
      .num_dims = 3, .shape = {num_tokens, config.num_kv_heads, 0}
  };
  if (part == RUNS) /* whole ones, rows as well */
    t.shape[0] = (num_tokens + KVEDGE_RUN - 1) / KVEDGE_RUN * (KVEDGE_RUN / format->row_tokens);
  if (column == KEY_CODES || column == VALUE_CODES) {
    t.type = has_bytes ? format->file_type : "U8", t.item_bytes = has_bytes && format->bits >= 8 ? format->bits / 8 : 1;
    if (has_bytes) t.shape[2] = (int64_t)kvedge_row_bytes(format, dim) / t.item_bytes;
  } else if (column == KEY_SCALES || column == VALUE_SCALES) {
    t.type = halves ? "F16" : "F32", t.item_bytes = halves ? 2 : 4;
    if (has_bytes && format->has_scales) t.shape[2] = rows.num_groups;
  } else {
    t.type = "F32", t.item_bytes = 4, t.num_dims = 2;
    t.shape[0] = config.num_kv_heads, t.shape[1] = dim;
  }
  t.bytes = (uint64_t)t.item_bytes;
  for (int i = 0; i < t.num_dims; i++) t.bytes *= (uint64_t)t.shape[i];
  if (contents->layers) find_in_layer(contents, index, part, column, &t);
  else t.data = contents->tensors[index].at[part][column];
  return t;
}

kvedge_tensor kvedge_state_tensor(const kvedge_session_state *state) {
  static const char *const types[] = {"F32", "F16", "BF16"};
  const unsigned type = (unsigned)state->type;
  kvedge_tensor t = {.num_dims = state->num_axes, .data = state->data};
  if (type > 2 || t.num_dims < 1 || t.num_dims > KVEDGE_MAX_STATE_AXES) return t;
  t.type = types[type], t.item_bytes = type ? 2 : 4;
  uint64_t bytes = (uint64_t)t.item_bytes;
  for (int i = 0; i < t.num_dims; i++) {
    t.shape[i] = state->shape[i];
    if (t.shape[i] < 1 || (uint64_t)t.shape[i] > (uint64_t)SIZE_MAX / 2 / bytes) return t;
    bytes *= (uint64_t)t.shape[i];
  }
  t.bytes = bytes;
  return t;
}

/* The first array of a layer, or of one after it. */
static int first_state(const kvedge_session *session, int layer) {
  int low = 0, high = session->num_states;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (session->states[middle].layer < layer) low = middle + 1;
    else high = middle;
  }
  return low;
}

void kvedge_each_tensor(const kvedge_contents *contents, int item_bytes, kvedge_take_tensor *take, kvedge_output *out) {
  const kvedge_session *session = contents->session;
  for (int i = 0; i >= 0; i = kvedge_next_layer(i, session->num_layers))
    for (int n = 0; n < NUM_TENSORS; n++) {
      const kvedge_tensor_name *name = &kvedge_tensors[n];
      const kvedge_tensor t = kvedge_contents_tensor(contents, i, name->part, name->column);
      if (t.data && (!item_bytes || t.item_bytes == item_bytes)) take(out, &t, "layers", i, name->name);
    }
  if (!session->num_states) return;
  const int end = session->states[session->num_states - 1].layer + 1;
  for (int i = 0; i >= 0; i = kvedge_next_layer(i, end))
    for (int n = first_state(session, i); n < session->num_states && session->states[n].layer == i; n++) {
      const kvedge_tensor t = kvedge_state_tensor(&session->states[n]);
      if (!item_bytes || t.item_bytes == item_bytes) take(out, &t, "states", i, session->states[n].name);
    }
}

int kvedge_next_layer(int index, int num_layers) {
  if (index > 0 && index * 10 < num_layers) return index * 10;
  while (index % 10 == 9 || index + 1 >= num_layers) {
    index /= 10;
    if (index == 0) return -1;
  }
  return index + 1;
}

/* ---- What kvedge writes ------------------------------------------------------------------------------------------- */

int kvedge_compare_keys(const kvedge_session_text *a, const kvedge_session_text *b) {
  const size_t shorter = a->key_bytes < b->key_bytes ? a->key_bytes : b->key_bytes;
  const int order = shorter ? memcmp(a->key, b->key, shorter) : 0;
  return order ? order : (a->key_bytes > b->key_bytes) - (a->key_bytes < b->key_bytes);
}

static const char *metadata_fault(const kvedge_session *session) {
  if (session->num_metadata < 0 || (session->num_metadata > 0 && !session->metadata)) return "its metadata is missing";
  uint64_t total = 0;
  for (int i = 0; i < session->num_metadata; i++) {
    const kvedge_session_text *text = &session->metadata[i];
    const char *const part[] = {text->key, text->value};
    const size_t bytes[] = {text->key_bytes, text->value_bytes};
    for (int side = 0; side < 2; side++) {
      total += bytes[side];
      if ((!part[side] && bytes[side]) || total > KVEDGE_MAX_HEADER) return "its metadata is missing, or too long";
      for (size_t at = 0; at < bytes[side];) {
        uint32_t code;
        const int length = kvedge_utf8(part[side] + at, bytes[side] - at, &code);
        if (length == 0) return "its metadata is not UTF-8";
        at += (size_t)length;
      }
    }
    if (i > 0 && kvedge_compare_keys(text - 1, text) >= 0)
      return "the keys of its metadata do not ascend, or one is there twice";
  }
  return NULL;
}

static const char *config_fault(const kvedge_session_layer *layer) {
  const kvedge_layer_config *config = &layer->config;
  if (!kvedge_side_format(config, 0)->file_type || !kvedge_side_format(config, 1)->file_type)
    return "a layer has a format that session files do not hold";
  if (config->sinks > 0 && layer->window > 0) return "a layer with a window has sinks";
  if ((config->recent_format != 0) != (config->recent || config->sinks || kvedge_in_runs(config)))
    return "a layer has recent tokens, sinks or runs without a recent_dtype, or a recent_dtype without any of these";
  return NULL;
}

const char *kvedge_contents_fault(const kvedge_contents *contents) {
  const kvedge_session *session = contents->session;
  int any_has_scales = 0, any_is_small = 0;
  if (session->num_layers < !session->num_states || session->num_layers > KVEDGE_MAX_LAYERS)
    return "it has not 1 to 4096 layers";
  if (session->length < 0 || session->length > KVEDGE_MAX_TOKENS) return "its length is out of its range";
  if (session->max_seq_len != 0 &&
      (session->max_seq_len < session->length || session->max_seq_len < 1 || session->max_seq_len > KVEDGE_MAX_TOKENS))
    return "it holds more tokens than its max_seq_len, or that is out of its range";
  for (int i = 0; i < session->num_layers; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    const char *fault = config_fault(&layer);
    if (fault) return fault;
    const kvedge_format_info *keys = kvedge_side_format(&layer.config, 0);
    if (layer.window < 0 || layer.window > KVEDGE_MAX_TOKENS) return "a layer's window is out of its range";
    if (layer.dropped < 0 || layer.dropped > session->length ||
        (layer.dropped > 0 && (layer.window == 0 || session->length - layer.dropped < layer.window - 1)))
      return "a layer has dropped tokens that it needs";
    any_has_scales |= keys->has_scales, any_is_small |= keys->bits <= 8 && !kvedge_is_of_runs(keys);
  }
  if (session->auto_key_offset && !any_has_scales) return "its key_offset is for keys with scales, and it has none";
  if (session->auto_key_scale && !any_is_small) return "its key_scale is for keys of up to 8 bits, and it has none";
  return metadata_fault(session);
}

const char *kvedge_ends_fault(const kvedge_contents *contents, int index) {
  enum { ROOM = 64 }; /* last tokens that files may hold beside those that are kept */
  const kvedge_session *session = contents->session;
  const kvedge_session_layer *layer = &session->layers[index];
  const kvedge_layer_tensors *tensors = &contents->tensors[index];
  const int64_t kept = kvedge_kept_rows(&layer->config);
  if (tensors->num_first > layer->config.sinks || tensors->num_first > kvedge_stored_tokens(session, layer) ||
      tensors->num_last > (kept ? kept + ROOM : 0) ||
      tensors->num_last > session->length - kvedge_first_position(layer))
    return "a layer has more first or last tokens than its metadata says";
  return NULL;
}

int kvedge_compare_states(const kvedge_session_state *a, const kvedge_session_state *b) {
  return a->layer != b->layer ? (a->layer > b->layer) - (a->layer < b->layer) : strcmp(a->name, b->name);
}

static int is_identifier(const char *name) {
  size_t n = 0;
  for (; n <= KVEDGE_MAX_STATE_NAME && name[n]; n++) {
    const char c = name[n], letter = (char)(c | 32);
    if (!(letter >= 'a' && letter <= 'z') && c != '_' && !(n && c >= '0' && c <= '9')) return 0;
  }
  return n && n <= KVEDGE_MAX_STATE_NAME;
}

const char *kvedge_states_fault(const kvedge_session *session) {
  int64_t num_layers = session->num_layers;
  int arrays = 0;
  if (session->num_states < 0 || (session->num_states > 0 && !session->states)) return "its states are missing";
  for (int i = 0; i < session->num_states; i++) {
    const kvedge_session_state *state = &session->states[i], *before = i ? state - 1 : NULL;
    const kvedge_tensor t = kvedge_state_tensor(state);
    if (!is_identifier(state->name) || !t.bytes || !t.data) return "an array of a state is none of kvedge's";
    if (state->layer < 0 || (before && kvedge_compare_states(before, state) >= 0))
      return "its states do not ascend, or an array is there twice";
    if (before && before->layer == state->layer) arrays++;
    else num_layers++, arrays = 1;
    if (arrays > KVEDGE_MAX_STATE_ARRAYS) return "a state has more arrays than kvedge's have";
  }
  if (num_layers > KVEDGE_MAX_LAYERS || (arrays && session->states[session->num_states - 1].layer >= num_layers))
    return "it has a state in a layer that it does not have";
  return NULL;
}

/* ---- Metadata ----------------------------------------------------------------------------------------------------- */

static const char *scale_type_name(kvedge_scale_type type) {
  return type == KVEDGE_SCALE_FLOAT16 ? "float16" : "float32";
}

/* What keys are stored in, as Python says it. */
static const char *format_name(const kvedge_layer_config *config) { return kvedge_side_format(config, 0)->name; }

/* The same of values where it is not that of keys, else "". */
static const char *value_format_name(const kvedge_layer_config *config) {
  const char *name = kvedge_side_format(config, 1)->name;
  return strcmp(name, format_name(config)) ? name : "";
}

/* By which matrix values are rotated; "": by none. */
static const char *rotation_name(const kvedge_layer_config *config) { return config->value_rotation ? "hadamard" : ""; }

/* The format of first and last tokens; "": there are none. */
static const char *recent_format_name(const kvedge_layer_config *config) {
  return config->recent_format ? kvedge_format_of((kvedge_format)(config->recent_format - 1))->name : "";
}

/* The members of a JSON object, one after the other. */
typedef struct {
  kvedge_output *out;
  const char *quote, *comma, *colon;
  int count;
} members;

static void put_name(members *m, const char *name) {
  if (m->count++) kvedge_put_text(m->out, m->comma);
  kvedge_put_text(m->out, m->quote), kvedge_put_text(m->out, name), kvedge_put_text(m->out, m->quote);
  kvedge_put_text(m->out, m->colon);
}

static void put_value(members *m, const char *text) {
  kvedge_put_text(m->out, m->quote), kvedge_put_text(m->out, text), kvedge_put_text(m->out, m->quote);
}

static void put_text(members *m, const char *name, const char *text) {
  put_name(m, name);
  put_value(m, text);
}

/* A number as text; "" where there is none. */
static void put_digits(members *m, const char *name, int is_there, int64_t number) {
  put_name(m, name);
  kvedge_put_text(m->out, m->quote);
  if (is_there) kvedge_put_number(m->out, number);
  kvedge_put_text(m->out, m->quote);
}

static void put_text_if_other(members *m, const char *name, const char *text, const char *common) {
  if (strcmp(text, common)) put_text(m, name, text);
}

static void put_if_other(members *m, const char *name, int64_t number, int64_t common) {
  if (number == common) return;
  put_name(m, name);
  kvedge_put_number(m->out, number);
}

/* What a layer has of its own; its number of members. */
static int put_own(kvedge_output *out, const kvedge_session_layer *layer, const kvedge_session_layer *first,
                   const char *quote) {
  const kvedge_layer_config *own = &layer->config, *common = &first->config;
  const int has_scales = kvedge_has_scales(own), common_has_scales = kvedge_has_scales(common);
  members m = {.out = out, .quote = quote, .comma = ",", .colon = ":"};
  put_if_other(&m, "num_kv_heads", own->num_kv_heads, common->num_kv_heads);
  put_if_other(&m, "head_dim", own->head_dim, common->head_dim);
  put_if_other(&m, "value_head_dim", own->value_head_dim, common->value_head_dim);
  put_text_if_other(&m, "dtype", format_name(own), format_name(common));
  put_text_if_other(&m, "value_dtype", value_format_name(own), value_format_name(common));
  put_text_if_other(&m, "value_rotation", rotation_name(own), rotation_name(common));
  if (!has_scales) {
    if (common_has_scales) put_text(&m, "group_size", ""), put_text(&m, "scale_dtype", "");
  } else {
    put_if_other(&m, "group_size", own->group_size, common_has_scales ? common->group_size : 0);
    if (!common_has_scales || own->scale_type != common->scale_type)
      put_text(&m, "scale_dtype", scale_type_name(own->scale_type));
  }
  put_if_other(&m, "window", layer->window, 0);
  put_if_other(&m, "recent", own->recent, common->recent);
  put_if_other(&m, "sinks", own->sinks, common->sinks);
  put_text_if_other(&m, "recent_dtype", recent_format_name(own), recent_format_name(common));
  put_if_other(&m, "dropped", layer->dropped, 0);
  return m.count;
}

void kvedge_put_layers(kvedge_output *out, const kvedge_contents *contents, const char *quote) {
  const kvedge_session_layer first = kvedge_contents_layer(contents, 0);
  const int n = contents->session->num_layers;
  kvedge_output nowhere = kvedge_output_to(NULL, NULL);
  int any = 0;
  for (int i = 0; i < n && !any; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    any = put_own(&nowhere, &layer, &first, quote);
  }
  if (!any) return;
  for (int i = 0; i < n; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    kvedge_put_text(out, i ? ",{" : "[{");
    put_own(out, &layer, &first, quote);
    kvedge_put_text(out, "}");
  }
  kvedge_put_text(out, "]");
}

const char *kvedge_version_of(const kvedge_contents *contents) {
  if (contents->session->num_states) return "3";
  for (int i = 0; i < contents->session->num_layers; i++) {
    const kvedge_session_layer layer = kvedge_contents_layer(contents, i);
    if (kvedge_in_runs(&layer.config)) return "2";
  }
  return "1";
}

void kvedge_put_metadata(kvedge_output *out, const kvedge_contents *contents, const char *digest) {
  const kvedge_session *session = contents->session;
  const kvedge_session_layer first = kvedge_contents_layer(contents, 0);
  const kvedge_layer_config *config = &first.config;
  const int has_scales = kvedge_has_scales(config);
  members m = {.out = out, .quote = "\"", .comma = digest ? "," : ", ", .colon = digest ? ":" : ": "};
  kvedge_put_text(out, "{");
  put_text(&m, "dtype", format_name(config)); /* in the order of names */
  put_text(&m, "format", "kvedge");
  put_text(&m, "format_version", kvedge_version_of(contents));
  put_digits(&m, "group_size", has_scales, config->group_size);
  put_digits(&m, "head_dim", 1, config->head_dim);
  put_text(&m, "key_offset", session->auto_key_offset ? "auto" : "");
  if (session->auto_key_scale) put_text(&m, "key_scale", "auto");
  kvedge_output probe = kvedge_output_to(NULL, NULL);
  kvedge_put_layers(&probe, contents, "\"");
  if (probe.written > 0) {
    put_name(&m, "layers");
    kvedge_put_text(out, "\"");
    kvedge_put_layers(out, contents, "\\\"");
    kvedge_put_text(out, "\"");
  }
  put_digits(&m, "length", 1, session->length);
  put_digits(&m, "max_seq_len", session->max_seq_len > 0, session->max_seq_len);
  put_digits(&m, "num_kv_heads", 1, config->num_kv_heads);
  put_digits(&m, "num_layers", 1, session->num_layers);
  if (config->recent_format) {
    put_digits(&m, "recent", 1, config->recent);
    put_text(&m, "recent_dtype", recent_format_name(config));
  }
  put_text(&m, "scale_dtype", has_scales ? scale_type_name(config->scale_type) : "");
  if (digest) {
    put_name(&m, "sha256");
    kvedge_put_text(out, "\"");
    kvedge_put(out, digest, KVEDGE_DIGEST);
    kvedge_put_text(out, "\"");
  }
  if (config->recent_format) put_digits(&m, "sinks", 1, config->sinks);
  for (int i = 0; i < session->num_metadata; i++) {
    const kvedge_session_text *text = &session->metadata[i];
    kvedge_put_text(out, m.comma), kvedge_put_text(out, "\"user.");
    kvedge_put_escaped(out, text->key, text->key_bytes, !digest);
    kvedge_put_text(out, "\""), kvedge_put_text(out, m.colon), kvedge_put_text(out, "\"");
    kvedge_put_escaped(out, text->value, text->value_bytes, !digest);
    kvedge_put_text(out, "\"");
  }
  if (*value_format_name(config)) put_text(&m, "value_dtype", value_format_name(config));
  if (config->value_head_dim != config->head_dim) put_digits(&m, "value_head_dim", 1, config->value_head_dim);
  if (config->value_rotation) put_text(&m, "value_rotation", rotation_name(config));
  kvedge_put_text(out, "}");
}

void kvedge_put_tensor_name(kvedge_output *out, const char *folder, int number, const char *name) {
  kvedge_put_text(out, folder), kvedge_put_text(out, ".");
  kvedge_put_number(out, number);
  kvedge_put_text(out, "."), kvedge_put_text(out, name);
}

int kvedge_take_into_digest(void *sha, const void *data, size_t bytes) {
  kvedge_sha256_take(sha, data, bytes);
  return 0;
}

void kvedge_put_data(kvedge_output *out, const kvedge_tensor *t) { kvedge_put(out, t->data, (size_t)t->bytes); }

void kvedge_put_digested(kvedge_output *out, const kvedge_tensor *t) {
  kvedge_put_text(out, "\", \""), kvedge_put_text(out, t->type), kvedge_put_text(out, "\", [");
  for (int d = 0; d < t->num_dims; d++) {
    if (d > 0) kvedge_put_text(out, ", ");
    kvedge_put_number(out, t->shape[d]);
  }
  kvedge_put_text(out, "]]");
  kvedge_put_data(out, t);
}

static void put_into_digest(kvedge_output *out, const kvedge_tensor *t, const char *folder, int number,
                            const char *name) {
  kvedge_put_text(out, "[\"");
  kvedge_put_tensor_name(out, folder, number, name);
  kvedge_put_digested(out, t);
}

void kvedge_contents_digest(const kvedge_contents *contents, char digest[KVEDGE_DIGEST]) {
  kvedge_sha256 sha;
  kvedge_sha256_begin(&sha);
  kvedge_output out = kvedge_output_to(kvedge_take_into_digest, &sha);
  kvedge_put_metadata(&out, contents, NULL);
  kvedge_each_tensor(contents, 0, put_into_digest, &out);
  kvedge_output_flush(&out);
  kvedge_sha256_end(&sha, digest);
}
