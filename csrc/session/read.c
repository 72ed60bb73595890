/* Reading what a file says it holds: its header, which nobody vouches for. The file's numbers are load.c's to check. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "session/json.h"
#include "session/reader.h"

/* ---- The fields of the metadata, as text -------------------------------------------------------------------------- */

enum {
  DTYPE,
  FORMAT,
  FORMAT_VERSION,
  GROUP_SIZE,
  HEAD_DIM,
  KEY_OFFSETS,
  LENGTH,
  MAX_SEQ_LEN,
  NUM_KV_HEADS,
  NUM_LAYERS,
  SCALE_DTYPE,
  SHA256,
  NUM_NEEDED, /* the others need not be there */
  KEY_SCALES_OF_FIRST = NUM_NEEDED,
  LAYERS,
  RECENT, /* these three, or none */
  RECENT_DTYPE,
  SINKS,
  VALUE_DTYPE,
  VALUE_HEAD_DIM,
  VALUE_ROTATION,
  NUM_FIELDS
};

static const char *const field_names[NUM_FIELDS] = {
    [DTYPE] = "dtype",
    [FORMAT] = "format",
    [FORMAT_VERSION] = "format_version",
    [GROUP_SIZE] = "group_size",
    [HEAD_DIM] = "head_dim",
    [KEY_OFFSETS] = "key_offset",
    [LENGTH] = "length",
    [MAX_SEQ_LEN] = "max_seq_len",
    [NUM_KV_HEADS] = "num_kv_heads",
    [NUM_LAYERS] = "num_layers",
    [SCALE_DTYPE] = "scale_dtype",
    [SHA256] = "sha256",
    [KEY_SCALES_OF_FIRST] = "key_scale",
    [LAYERS] = "layers",
    [RECENT] = "recent",
    [RECENT_DTYPE] = "recent_dtype",
    [SINKS] = "sinks",
    [VALUE_DTYPE] = "value_dtype",
    [VALUE_HEAD_DIM] = "value_head_dim",
    [VALUE_ROTATION] = "value_rotation",
};

enum { LONGEST_FIELD = 72 };

typedef struct {
  char field[NUM_FIELDS][LONGEST_FIELD]; /* ended by a NUL; of "layers" nothing */
  int has[NUM_FIELDS];
  kvedge_json metadata, layers, entries; /* the object; the string "layers"; what follows the object */
  size_t layers_bytes, user_bytes;       /* of their texts */
  int num_user;
  const char *tensors;
  uint64_t tensor_bytes;
  int num_states;         /* arrays of states, by their names */
  kvedge_session session; /* without what needs memory */
  kvedge_session_layer first;
} header;

int kvedge_read_text(kvedge_json *json, char *text, size_t room) {
  const int64_t bytes = kvedge_json_string(json, text, room - 1);
  if (bytes < 0) return 0;
  text[bytes] = 0;
  return strlen(text) == (size_t)bytes;
}

static int is_user_key(const kvedge_json *json) {
  return json->end - json->at > 6 && memcmp(json->at, "\"user.", 6) == 0;
}

static const char *read_field(header *head, kvedge_json *json) {
  char name[24];
  int i = 0;
  if (!kvedge_read_text(json, name, sizeof name)) i = NUM_FIELDS;
  else if (!strcmp(name, "key_turns"))
    return "its keys were shifted and are stored as before, which only Python reads: requantize() stores them turned";
  while (i < NUM_FIELDS && strcmp(field_names[i], name)) i++;
  if (i == NUM_FIELDS) return "its metadata has a field that kvedge does not know, or is no JSON";
  if (head->has[i]++) return "its metadata has a field twice";
  if (!kvedge_json_next(json, ':')) return "its metadata is no JSON";
  if (i != LAYERS)
    return kvedge_read_text(json, head->field[i], LONGEST_FIELD) ? NULL : "a field of its metadata is none of kvedge's";
  head->layers = *json;
  const int64_t bytes = kvedge_json_string(json, NULL, 0);
  head->layers_bytes = (size_t)bytes;
  return bytes < 0 ? "its metadata is no JSON" : NULL;
}

static const char *read_metadata(header *head, kvedge_json *json) {
  if (!kvedge_json_next(json, '{')) return "its metadata is no JSON object";
  head->metadata = *json;
  do {
    kvedge_json_skip(json);
    if (is_user_key(json)) {
      const int64_t key = kvedge_json_string(json, NULL, 0);
      const int64_t value = kvedge_json_next(json, ':') ? kvedge_json_string(json, NULL, 0) : -1;
      if (key < 0 || value < 0) return "its metadata is no JSON of text";
      head->user_bytes += (size_t)(key + value), head->num_user++;
    } else {
      const char *fault = read_field(head, json);
      if (fault) return fault;
    }
  } while (kvedge_json_next(json, ','));
  if (!kvedge_json_next(json, '}')) return "its metadata is no JSON of text";
  head->entries = *json;
  for (int i = 0; i < NUM_NEEDED; i++)
    if (!head->has[i]) return "its metadata lacks a field: it is no session of kvedge";
  return NULL;
}

/* ---- What the fields mean ----------------------------------------------------------------------------------------- */

int kvedge_number_of(const char *text, int64_t *number) {
  kvedge_json json = {text, text + strlen(text)};
  return *text >= '0' && *text <= '9' && kvedge_json_number(&json, number) && json.at == json.end;
}

static int small_number_of(const char *text, int *number) {
  int64_t wide;
  if (!kvedge_number_of(text, &wide) || wide > INT_MAX) return 0;
  *number = (int)wide;
  return 1;
}

/* Of rows of any width. */
static const kvedge_format_info *format_named(const char *name) {
  for (int i = 0; i < KVEDGE_NUM_FORMATS; i++) {
    const kvedge_format_info *format = kvedge_format_of((kvedge_format)i);
    if (format->file_type && !strcmp(format->name, name)) return format;
  }
  return NULL;
}

/* Of rows or runs. */
static const kvedge_format_info *any_format_named(const char *name) {
  static const kvedge_format others[] = {KVEDGE_KIVI2, KVEDGE_KIVI4, KVEDGE_KIVI8, KVEDGE_Q8_0};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (!strcmp(kvedge_format_of(others[i])->name, name)) return kvedge_format_of(others[i]);
  return format_named(name);
}

/* Of keys. */
static int read_format(const char *name, kvedge_layer_config *config) {
  const kvedge_format_info *format = any_format_named(name);
  if (format) config->format = format->id;
  return format != NULL;
}

/* That of first and last tokens; "": there are none. Layers have three of them only: config_fault. */
static int read_recent_format(const char *name, kvedge_layer_config *config) {
  const kvedge_format_info *format = format_named(name);
  config->recent_format = format ? KVEDGE_RECENT(format->id) : 0;
  return format || !*name;
}

static int widest_row(const kvedge_layer_config *config) {
  return config->head_dim > config->value_head_dim ? config->head_dim : config->value_head_dim;
}

static int scale_type_named(const char *name, kvedge_scale_type *type) {
  *type = strcmp(name, "float16") ? KVEDGE_SCALE_FLOAT32 : KVEDGE_SCALE_FLOAT16;
  return *type == KVEDGE_SCALE_FLOAT16 || !strcmp(name, "float32");
}

/* Why no layer can be made for so many tokens of this config, which leaves nothing open; NULL: one can, and the bytes of all its
 * tokens fit into a size_t. */
static const char *config_fault(kvedge_layer_config *config, int64_t tokens) {
  const int recent = config->recent_format;
  config->capacity = tokens > 0 ? tokens : 1;
  if (recent && recent != KVEDGE_RECENT(KVEDGE_FLOAT32) && recent != KVEDGE_RECENT(KVEDGE_FLOAT16) &&
      recent != KVEDGE_RECENT(KVEDGE_BFLOAT16))
    return "its recent_dtype is not float32, float16 or bfloat16: only Python reads it";
  if (config->value_head_dim > 0 && config->group_size > 0 && config->group_size <= widest_row(config) &&
      kvedge_layer_bytes(config) > 0)
    return NULL;
  return "its metadata makes no layer";
}

/* "": that of the keys. */
static int read_value_format(const char *name, kvedge_layer_config *config) {
  const kvedge_format_info *format = *name ? any_format_named(name) : NULL;
  config->value_format = format ? KVEDGE_VALUES(format->id) : 0;
  return !*name || format;
}

/* "": they are not rotated. */
static int read_rotation(const char *name, kvedge_layer_config *config) {
  config->value_rotation = !strcmp(name, "hadamard");
  return !*name || config->value_rotation;
}

/* Rows without scales are one group, of no text. */
static const char *read_first_layer(header *head) {
  kvedge_layer_config *config = &head->first.config;
  if (!read_format(head->field[DTYPE], config)) return "its dtype is none that this library reads";
  if (head->has[VALUE_DTYPE] && (!read_value_format(head->field[VALUE_DTYPE], config) || !config->value_format ||
                                 config->value_format == KVEDGE_VALUES(config->format)))
    return "its value_dtype is none that this library reads, or its dtype";
  if (!small_number_of(head->field[NUM_KV_HEADS], &config->num_kv_heads) ||
      !small_number_of(head->field[HEAD_DIM], &config->head_dim))
    return "its num_kv_heads or head_dim is no number";
  config->value_head_dim = config->head_dim;
  if (head->has[VALUE_HEAD_DIM] && (!small_number_of(head->field[VALUE_HEAD_DIM], &config->value_head_dim) ||
                                    config->value_head_dim == config->head_dim))
    return "its value_head_dim is no number, or its head_dim";
  if (head->has[VALUE_ROTATION] && (!read_rotation(head->field[VALUE_ROTATION], config) || !config->value_rotation))
    return "its value_rotation is none that this library knows";
  if (kvedge_has_scales(config)) {
    if (!small_number_of(head->field[GROUP_SIZE], &config->group_size)) return "its group_size is no number";
    if (!scale_type_named(head->field[SCALE_DTYPE], &config->scale_type)) return "its scale_dtype is unknown";
  } else {
    if (*head->field[GROUP_SIZE] || *head->field[SCALE_DTYPE]) return "it gives scales to rows that have none";
    config->group_size = widest_row(config);
  }
  if (head->has[RECENT] || head->has[SINKS] || head->has[RECENT_DTYPE]) {
    if (!small_number_of(head->field[RECENT], &config->recent) ||
        !small_number_of(head->field[SINKS], &config->sinks) || !*head->field[RECENT_DTYPE] ||
        !read_recent_format(head->field[RECENT_DTYPE], config))
      return "its recent, sinks or recent_dtype is missing, or none of kvedge's";
  }
  return config_fault(config, 1);
}

/* Of a file that holds states alone: zeros, as kvedge_put_metadata writes them, and no more. */
static const char *read_no_layer(const header *head) {
  static const struct {
    int field;
    const char *text;
  } wanted[] = {
      {DTYPE,        "int8"   },
      {NUM_KV_HEADS, "0"      },
      {HEAD_DIM,     "0"      },
      {GROUP_SIZE,   "0"      },
      {SCALE_DTYPE,  "float32"},
      {KEY_OFFSETS,  ""       },
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
    if (strcmp(head->field[wanted[i].field], wanted[i].text)) return "it tells of layers that it has not";
  for (int i = NUM_NEEDED; i < NUM_FIELDS; i++)
    if (head->has[i]) return "it tells of layers that it has not";
  return NULL;
}

static const char *auto_field(const char *text, int is_there, int *is_auto) {
  *is_auto = is_there && !strcmp(text, "auto");
  return is_there && *text && !*is_auto ? "its key_offset or key_scale is unknown" : NULL;
}

/* All fields but "layers". */
static const char *read_fields(header *head) {
  kvedge_session *session = &head->session;
  if (strcmp(head->field[FORMAT], "kvedge")) return "it is no session of kvedge";
  const char *version = head->field[FORMAT_VERSION];
  if (version[0] < '1' || version[0] > '3' || version[1])
    return "it is of another version: a newer kvedge may have written it";
  if (!small_number_of(head->field[NUM_LAYERS], &session->num_layers) || session->num_layers < (*version != '3') ||
      session->num_layers > KVEDGE_MAX_LAYERS)
    return "its num_layers is not 1 to 4096";
  if (!kvedge_number_of(head->field[LENGTH], &session->length) || session->length > KVEDGE_MAX_TOKENS)
    return "its length is no number of tokens";
  if (*head->field[MAX_SEQ_LEN] &&
      (!kvedge_number_of(head->field[MAX_SEQ_LEN], &session->max_seq_len) || session->max_seq_len < 1))
    return "its max_seq_len is no number of tokens";
  const char *fault = auto_field(head->field[KEY_OFFSETS], 1, &session->auto_key_offset);
  if (!fault)
    fault = auto_field(head->field[KEY_SCALES_OF_FIRST], head->has[KEY_SCALES_OF_FIRST], &session->auto_key_scale);
  if (!fault && head->has[KEY_SCALES_OF_FIRST] && !session->auto_key_scale) fault = "its key_scale is unknown";
  if (!fault && strlen(head->field[SHA256]) != KVEDGE_DIGEST) fault = "its sha256 is none";
  session->num_metadata = head->num_user;
  if (fault) return fault;
  return session->num_layers ? read_first_layer(head) : read_no_layer(head);
}

/* Goes past 1 to `most` numbers; returns how many, 0: there are none. */
static int read_numbers(kvedge_json *json, int64_t *numbers, int most) {
  int n = 0;
  while (n < most && kvedge_json_next(json, n ? ',' : '[') && kvedge_json_number(json, &numbers[n])) n++;
  return kvedge_json_next(json, ']') ? n : 0;
}

const char *kvedge_read_entry(kvedge_json *json, kvedge_entry *e) {
  char name[16];
  int has_type = 0, has_offsets = 0;
  e->num_dims = 0;
  if (!kvedge_json_next(json, ':') || !kvedge_json_next(json, '{')) return "its header is no JSON";
  do {
    if (!kvedge_read_text(json, name, sizeof name) || !kvedge_json_next(json, ':'))
      return "its header is no JSON of tensors";
    if (!strcmp(name, "dtype")) {
      if (has_type++ || !kvedge_read_text(json, e->type, sizeof e->type)) return "a tensor's dtype is none of kvedge's";
    } else if (!strcmp(name, "shape")) {
      if (e->num_dims || !(e->num_dims = read_numbers(json, e->shape, KVEDGE_MAX_STATE_AXES)))
        return "a tensor's shape is none of kvedge's";
    } else if (!strcmp(name, "data_offsets")) {
      if (has_offsets++ || read_numbers(json, e->offsets, 2) != 2) return "a tensor has no offsets";
    } else {
      return "its header has an entry that is no tensor's";
    }
  } while (kvedge_json_next(json, ','));
  if (!kvedge_json_next(json, '}') || !has_type || !e->num_dims || !has_offsets)
    return "its header is no JSON of tensors";
  return NULL;
}

/* "states.0.recurrent" */
static int is_state(const char *name) { return strncmp(name, "states.", 7) == 0; }

enum { LONGEST_NAME = 48 };

static const char *count_states(header *head) {
  kvedge_json json = head->entries;
  char name[LONGEST_NAME];
  kvedge_entry e;
  while (kvedge_json_next(&json, ',')) {
    if (!kvedge_read_text(&json, name, sizeof name)) return "it has a tensor that no layer has";
    const char *fault = kvedge_read_entry(&json, &e);
    if (fault) return fault;
    if (is_state(name)) head->num_states++;
  }
  return head->num_states || head->session.num_layers ? NULL : "it has no layers";
}

const char *kvedge_open_file(kvedge_file *file, const void *data, size_t bytes) {
  const uint8_t *from = data;
  uint64_t size = 0;
  if (bytes < 8) return "it is too short for a safetensors file";
  for (int i = 0; i < 8; i++) size |= (uint64_t)from[i] << 8 * i;
  if (size > KVEDGE_MAX_HEADER || size > bytes - 8) return "its header is longer than the file, or than headers may be";
  kvedge_json json = {(const char *)data + 8, (const char *)data + 8 + size};
  file->tensors = json.end, file->tensor_bytes = bytes - 8 - size;
  char name[16];
  if (json.at == json.end || *json.at != '{') return "it is no safetensors file";
  json.at++;
  if (!kvedge_read_text(&json, name, sizeof name) || strcmp(name, "__metadata__") || !kvedge_json_next(&json, ':'))
    return "its header does not begin with metadata: it is no file of kvedge";
  file->header = json;
  return NULL;
}

/* The header up to its tensors. */
static const char *read_header(header *head, const void *data, size_t bytes) {
  memset(head, 0, sizeof *head);
  kvedge_file file;
  const char *fault = kvedge_open_file(&file, data, bytes);
  if (fault) return fault;
  head->tensors = file.tensors, head->tensor_bytes = file.tensor_bytes;
  fault = read_metadata(head, &file.header);
  if (!fault) fault = read_fields(head);
  if (!fault && *head->field[FORMAT_VERSION] == '3') fault = count_states(head);
  head->session.num_states = head->num_states;
  return fault;
}

/* ---- Memory of the caller's --------------------------------------------------------------------------------------- */

typedef struct {
  char *base; /* NULL: bytes are counted */
  size_t used;
} arena;

static void *take(arena *a, size_t bytes) {
  void *at = a->base ? a->base + a->used : NULL;
  a->used += (bytes + 15) / 16 * 16;
  return at;
}

typedef struct {
  kvedge_session_reader *reader;
  kvedge_session_layer *layers;
  kvedge_layer_tensors *tensors;
  kvedge_session_text *metadata;
  kvedge_session_state *states;
  char *texts, *layers_text;
} places;

/* Where all that is read goes. The sums fit: each is of things that the header, of 10^8 bytes at most, has. */
static places places_in(arena *a, const header *head) {
  const size_t num_layers = (size_t)head->session.num_layers;
  places p;
  p.reader = take(a, sizeof *p.reader);
  p.layers = take(a, num_layers * sizeof *p.layers);
  p.tensors = take(a, num_layers * sizeof *p.tensors);
  p.metadata = take(a, (size_t)head->num_user * sizeof *p.metadata);
  p.states = take(a, (size_t)head->num_states * sizeof *p.states);
  p.texts = take(a, head->user_bytes);
  p.layers_text = take(a, head->layers_bytes);
  return p;
}

/* ---- What needs memory: the user's metadata, layers that differ ---------------------------------------------------- */

static int by_key(const void *a, const void *b) { return kvedge_compare_keys(a, b); }

static void read_user_metadata(const header *head, places *p) {
  kvedge_json json = head->metadata;
  char *text = p->texts, *end = text + head->user_bytes;
  int n = 0, in_order = 1;
  do {
    kvedge_json_skip(&json);
    const int is_user = is_user_key(&json);
    char *out[2] = {NULL, NULL};
    int64_t bytes[2];
    for (int side = 0; side < 2; side++) {
      if (is_user) out[side] = text;
      bytes[side] = kvedge_json_string(&json, out[side], is_user ? (size_t)(end - text) : 0);
      if (is_user) text += bytes[side];
      kvedge_json_next(&json, ':');
    }
    if (!is_user) continue;
    p->metadata[n] = (kvedge_session_text){
        .key = out[0] + 5, .key_bytes = (size_t)bytes[0] - 5, .value = out[1], .value_bytes = (size_t)bytes[1]};
    if (n > 0) in_order &= kvedge_compare_keys(&p->metadata[n - 1], &p->metadata[n]) < 0;
    n++;
  } while (kvedge_json_next(&json, ','));
  if (!in_order) qsort(p->metadata, (size_t)n, sizeof *p->metadata, by_key); /* other tools do not sort */
}

/* One member of what layers have of their own. */
static int read_own(kvedge_json *json, kvedge_session_layer *layer, int *group_size, char scale_type[12]) {
  char name[16], text[12] = "";
  int64_t number = 0;
  if (!kvedge_read_text(json, name, sizeof name) || !kvedge_json_next(json, ':')) return 0;
  kvedge_json_skip(json);
  const int is_text = json->at < json->end && *json->at == '"';
  if (is_text ? !kvedge_read_text(json, text, sizeof text) : !kvedge_json_number(json, &number)) return 0;
  kvedge_layer_config *config = &layer->config;
  if (!strcmp(name, "dtype")) return read_format(text, config);
  if (!strcmp(name, "recent_dtype")) return is_text && read_recent_format(text, config);
  if (!strcmp(name, "value_dtype")) return is_text && read_value_format(text, config);
  if (!strcmp(name, "value_rotation")) return is_text && read_rotation(text, config);
  if (!strcmp(name, "scale_dtype")) return memcpy(scale_type, text, sizeof text), is_text;
  if (!strcmp(name, "window")) return layer->window = number, 1;
  if (!strcmp(name, "dropped")) return layer->dropped = number, 1;
  if (number > INT_MAX) return 0;
  int *const to = !strcmp(name, "num_kv_heads")     ? &config->num_kv_heads
                  : !strcmp(name, "head_dim")       ? &config->head_dim
                  : !strcmp(name, "value_head_dim") ? &config->value_head_dim
                  : !strcmp(name, "recent")         ? &config->recent
                  : !strcmp(name, "sinks")          ? &config->sinks
                  : !strcmp(name, "group_size")     ? group_size
                                                    : NULL;
  if (to) *to = (int)number;
  return to != NULL;
}

static int read_own_layer(kvedge_json *json, const header *head, kvedge_session_layer *layer) {
  const kvedge_layer_config *first = &head->first.config;
  const int first_has_scales = kvedge_has_scales(first);
  int group_size = first_has_scales ? first->group_size : 0; /* 0: written as "" */
  char scale_type[12] = "";
  if (first_has_scales) strcpy(scale_type, first->scale_type ? "float16" : "float32");
  *layer = head->first;
  if (!kvedge_json_next(json, '{')) return 0;
  if (!kvedge_json_next(json, '}')) {
    do
      if (!read_own(json, layer, &group_size, scale_type)) return 0;
    while (kvedge_json_next(json, ','));
    if (!kvedge_json_next(json, '}')) return 0;
  }
  kvedge_layer_config *config = &layer->config;
  if (kvedge_has_scales(config)) {
    config->group_size = group_size;
    if (!scale_type_named(scale_type, &config->scale_type)) return 0;
  } else {
    config->group_size = widest_row(config), config->scale_type = KVEDGE_SCALE_FLOAT32;
  }
  return 1;
}

/* A sink that compares. */
static int is_other(void *expected, const void *data, size_t bytes) {
  kvedge_json *left = expected;
  if ((size_t)(left->end - left->at) < bytes || memcmp(left->at, data, bytes)) return 1;
  left->at += bytes;
  return 0;
}

/* The text has to be what these layers have: no other number, name or order will do. */
static const char *read_layers(const header *head, places *p) {
  kvedge_json json = head->layers;
  kvedge_session session = head->session;
  kvedge_json text = {p->layers_text, p->layers_text + head->layers_bytes};
  if (head->has[LAYERS]) kvedge_json_string(&json, p->layers_text, head->layers_bytes);
  json = text;
  for (int i = 0; i < session.num_layers; i++) {
    kvedge_session_layer *layer = &p->layers[i];
    *layer = head->first;
    if (head->has[LAYERS] && (!kvedge_json_next(&json, i ? ',' : '[') || !read_own_layer(&json, head, layer)))
      return "its layers are not as kvedge writes them";
    if (layer->dropped > session.length) return "a layer has dropped more tokens than there are";
    const char *fault = config_fault(&layer->config, session.length - kvedge_first_position(layer));
    if (fault) return fault;
  }
  session.layers = p->layers;
  const kvedge_contents contents = {.session = &session};
  if (strcmp(head->field[FORMAT_VERSION], kvedge_version_of(&contents)))
    return "it is not of the version of what it holds: runs of 32 tokens lay otherwise before version 2";
  kvedge_output out = kvedge_output_to(is_other, &text);
  kvedge_put_layers(&out, &contents, "\"");
  kvedge_output_flush(&out);
  if (out.failed || text.at != text.end || (head->has[LAYERS] && !head->layers_bytes))
    return "its layers are not as kvedge writes them";
  return NULL;
}

/* ---- Tensors ------------------------------------------------------------------------------------------------------- */

/* "layers.0.key_codes"; or that of an array of a state, whose `name` is set then. */
static const kvedge_tensor_name *read_tensor_name(kvedge_json *json, int num_layers, int *index,
                                                  kvedge_session_state *state) {
  static const kvedge_tensor_name of_state;
  char name[LONGEST_NAME];
  int64_t number;
  *state = (kvedge_session_state){0};
  if (!kvedge_read_text(json, name, sizeof name)) return NULL;
  const int in_state = is_state(name);
  if ((!in_state && strncmp(name, "layers.", 7)) || name[7] < '0' || name[7] > '9') return NULL;
  kvedge_json digits = {name + 7, name + strlen(name)};
  if (!kvedge_json_number(&digits, &number) || *digits.at != '.') return NULL;
  const char *rest = digits.at + 1;
  if (in_state) {
    if (number >= KVEDGE_MAX_LAYERS || !*rest || strlen(rest) > KVEDGE_MAX_STATE_NAME) return NULL;
    state->layer = (int)number;
    memcpy(state->name, rest, strlen(rest));
    return &of_state;
  }
  if (number >= num_layers) return NULL;
  *index = (int)number;
  for (int n = 0; n < NUM_TENSORS; n++)
    if (!strcmp(rest, kvedge_tensors[n].name)) return &kvedge_tensors[n];
  return NULL;
}

/* Is it the tensor that belongs there, next in the file? */
static const char *entry_fault(const kvedge_entry *e, const kvedge_tensor *t, uint64_t offset) {
  if (strcmp(e->type, t->type)) return "a tensor has another dtype than its metadata says";
  if (e->num_dims != t->num_dims || memcmp(e->shape, t->shape, (size_t)t->num_dims * sizeof *e->shape))
    return "a tensor has another shape than its metadata says";
  if ((uint64_t)e->offsets[0] != offset || (uint64_t)e->offsets[1] != offset + t->bytes)
    return "its tensors do not follow one another, or are longer than their shapes";
  return NULL;
}

/* How many first and last tokens a layer has is in no field: as many as the codes of their keys. */
static const char *count_tokens(const header *head, places *p, const kvedge_session *session) {
  kvedge_json json = head->entries;
  memset(p->tensors, 0, (size_t)session->num_layers * sizeof *p->tensors);
  while (kvedge_json_next(&json, ',')) {
    int index;
    kvedge_entry e;
    kvedge_session_state state;
    const kvedge_tensor_name *name = read_tensor_name(&json, session->num_layers, &index, &state);
    if (!name) return "it has a tensor that no layer has";
    const char *fault = kvedge_read_entry(&json, &e);
    if (fault) return fault;
    if (*state.name || name->column != KEY_CODES) continue;
    if (name->part == FIRST_TOKENS) p->tensors[index].num_first = e.shape[0];
    if (name->part == LAST_TOKENS) p->tensors[index].num_last = e.shape[0];
  }
  const kvedge_contents contents = {.session = session, .tensors = p->tensors};
  const char *fault = NULL;
  for (int i = 0; i < session->num_layers && !fault; i++) fault = kvedge_ends_fault(&contents, i);
  return fault;
}

/* An array of a state, next in the file. */
static const char *read_state(const kvedge_entry *e, kvedge_session_state *state, const header *head,
                              uint64_t *offset) {
  state->type = !strcmp(e->type, "F16")    ? KVEDGE_TYPE_FLOAT16
                : !strcmp(e->type, "BF16") ? KVEDGE_TYPE_BFLOAT16
                                           : KVEDGE_TYPE_FLOAT32;
  state->num_axes = e->num_dims;
  memcpy(state->shape, e->shape, (size_t)e->num_dims * sizeof *e->shape);
  state->data = head->tensors + *offset;
  const kvedge_tensor t = kvedge_state_tensor(state);
  const char *fault = entry_fault(e, &t, *offset);
  if (fault) return fault;
  if (t.bytes > head->tensor_bytes - *offset) return "it ends before its last tensor";
  *offset += t.bytes;
  return NULL;
}

static int by_layer(const void *a, const void *b) { return kvedge_compare_states(a, b); }

static const char *read_tensors(const header *head, places *p, const kvedge_session *session) {
  const kvedge_contents contents = {.session = session, .tensors = p->tensors};
  kvedge_json json = head->entries;
  uint64_t offset = 0;
  int num_states = 0;
  while (kvedge_json_next(&json, ',')) {
    int index;
    kvedge_entry e;
    kvedge_session_state state;
    const kvedge_tensor_name *name =
        read_tensor_name(&json, session->num_layers, &index, &state); /* as count_tokens has seen */
    if (*state.name) {
      kvedge_read_entry(&json, &e);
      if (num_states == head->num_states) return "it has a state, which its version does not hold";
      const char *fault = read_state(&e, &state, head, &offset);
      if (fault) return fault;
      p->states[num_states++] = state;
      continue;
    }
    const char **at = &p->tensors[index].at[name->part][name->column];
    if (*at) return "it has a tensor twice";
    const kvedge_session_layer *layer = &session->layers[index];
    if (!kvedge_has_part(&layer->config, name->part)) return "it has a tensor that no layer has";
    if (name->column == KEY_OFFSET && !kvedge_side_format(&layer->config, 0)->has_scales)
      return "it has a key offset of rows without scales";
    const kvedge_tensor t = kvedge_contents_tensor(&contents, index, name->part, name->column);
    kvedge_read_entry(&json, &e);
    const char *fault = entry_fault(&e, &t, offset);
    if (fault) return fault;
    if (t.bytes > head->tensor_bytes - offset) return "it ends before its last tensor";
    *at = head->tensors + offset;
    offset += t.bytes;
  }
  const int is_closed = kvedge_json_next(&json, '}');
  kvedge_json_skip(&json);
  if (!is_closed || json.at != json.end) return "its header is no JSON of tensors";
  if (offset != head->tensor_bytes) return "it does not end with its last tensor";
  for (int i = 0; i < session->num_layers; i++) {
    kvedge_session_layer *layer = &p->layers[i];
    for (int part = 0; part < NUM_PARTS; part++)
      for (int column = 0; column < KEY_OFFSET && kvedge_has_part(&layer->config, part); column++)
        if (!p->tensors[i].at[part][column]) return "a tensor is missing";
    layer->has_key_offset = p->tensors[i].at[OWN_ROWS][KEY_OFFSET] != NULL;
    layer->has_key_scale = p->tensors[i].at[OWN_ROWS][KEY_SCALE] != NULL;
    if (layer->has_key_scale && kvedge_is_of_runs(kvedge_side_format(&layer->config, 0)))
      return "it has a key scale of keys in runs";
  }
  if (num_states > 0) qsort(p->states, (size_t)num_states, sizeof *p->states, by_layer);
  return kvedge_states_fault(session);
}

/* ---- Calls --------------------------------------------------------------------------------------------------------- */

static kvedge_status status_of(const char *fault, const char **why) {
  if (why) *why = fault;
  return fault ? KVEDGE_ERROR_FILE : KVEDGE_OK;
}

kvedge_status kvedge_session_reader_bytes(const void *data, size_t bytes, size_t *needed, const char **why) {
  header head;
  if (why) *why = NULL;
  if (!data || !needed) return KVEDGE_ERROR_ARGUMENT;
  const char *fault = read_header(&head, data, bytes);
  if (!fault) {
    arena counted = {0};
    places_in(&counted, &head);
    *needed = counted.used;
  }
  return status_of(fault, why);
}

kvedge_status kvedge_session_read(const void *data, size_t bytes, void *memory, size_t memory_bytes,
                                  kvedge_session_reader **out, const char **why) {
  header head;
  arena within = {.base = memory}, counted = {0};
  if (why) *why = NULL;
  if (!data || !memory || (uintptr_t)memory % 16 || !out) return KVEDGE_ERROR_ARGUMENT;
  const char *fault = read_header(&head, data, bytes);
  if (fault) return status_of(fault, why);
  places_in(&counted, &head);
  if (memory_bytes < counted.used) return KVEDGE_ERROR_MEMORY;
  places p = places_in(&within, &head);
  kvedge_session *session = &p.reader->session;
  *session = head.session;
  session->layers = p.layers, session->metadata = p.metadata, session->states = p.states;
  p.reader->tensors = p.tensors;
  memcpy(p.reader->digest, head.field[SHA256], KVEDGE_DIGEST);
  if (head.num_user > 0) read_user_metadata(&head, &p);
  fault = read_layers(&head, &p);
  if (!fault) fault = kvedge_contents_fault(&(kvedge_contents){.session = session});
  if (!fault) fault = count_tokens(&head, &p, session);
  if (!fault) fault = read_tensors(&head, &p, session);
  if (!fault) *out = p.reader;
  return status_of(fault, why);
}

const kvedge_session *kvedge_session_held(const kvedge_session_reader *reader) { return &reader->session; }
