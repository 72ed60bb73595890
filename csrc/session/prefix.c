/* Files of a prefix store (kvedge/store/files.py, rows.py), written by Python: read one by one, and layers filled from a path
 * of them. A layer of a file is a session of this layer alone, whose checks and copies then do. */
#include <string.h>

#include "session/reader.h"
#include "session/sha256.h"
#include "store/layer_struct.h"
#include "system/float_mode.h"

enum { BLOCK = 256, LONGEST_NAME = 48 };
/* The arrays of a layer: those of kvedge_tensors, then "at", its positions in a checkpoint. */
enum { AT = NUM_TENSORS, NUM_ARRAYS };

typedef struct {
  kvedge_session_prefix prefix; /* the first member: what the caller has of it */
  char start[20];               /* as text */
  kvedge_tensor ids;
  kvedge_tensor (*arrays)[NUM_ARRAYS]; /* [num_layers]; without data: not there */
} prefix_file;

/* ---- The header --------------------------------------------------------------------------------------------------- */

enum { FORMAT, FORMAT_VERSION, IDENTITY, KIND, PARENT, SHA256, START, VARIANT, NUM_FIELDS };
static const char *const field_names[NUM_FIELDS] = {"format", "format_version", "identity", "kind",
                                                    "parent", "sha256",         "start",    "variant"};

typedef struct {
  kvedge_file file;
  kvedge_json field[NUM_FIELDS]; /* at its text */
  size_t bytes[NUM_FIELDS];      /* of that */
  kvedge_json entries;           /* what follows the metadata */
  int num_layers;
} prefix_header;

static const char *read_metadata(prefix_header *head, kvedge_json *json) {
  static const char fault[] = "its metadata is not that of a prefix store's file";
  char name[LONGEST_NAME];
  if (!kvedge_json_next(json, '{')) return fault;
  for (int n = 0; n < NUM_FIELDS; n++) {
    if ((n && !kvedge_json_next(json, ',')) || !kvedge_read_text(json, name, sizeof name)) return fault;
    int i = 0;
    while (i < NUM_FIELDS && strcmp(field_names[i], name)) i++;
    if (i == NUM_FIELDS || head->field[i].at || !kvedge_json_next(json, ':')) return fault;
    head->field[i] = *json;
    const int64_t bytes = kvedge_json_string(json, NULL, 0);
    if (bytes < 0) return fault;
    head->bytes[i] = (size_t)bytes;
  }
  if (!kvedge_json_next(json, '}')) return fault;
  head->entries = *json;
  return NULL;
}

/* A field as text that a NUL ends; 0: it is longer. */
static int text_of(const prefix_header *head, int field, char *text, size_t room) {
  kvedge_json json = head->field[field];
  return kvedge_read_text(&json, text, room);
}

static const char *read_fields(const prefix_header *head, prefix_file *file) {
  kvedge_session_prefix *to = &file->prefix;
  char format[16], version[2], kind[16];
  if (!text_of(head, FORMAT, format, sizeof format) || strcmp(format, "kvedge.prefix"))
    return "it is no file of a prefix store";
  if (!text_of(head, FORMAT_VERSION, version, sizeof version) || strcmp(version, "1"))
    return "it is of another version: a newer kvedge may have written it";
  if (!text_of(head, KIND, kind, sizeof kind)) return "its kind is unknown";
  to->is_checkpoint = !strcmp(kind, "checkpoint");
  if (!to->is_checkpoint && strcmp(kind, "block")) return "its kind is unknown";
  if (!text_of(head, START, file->start, sizeof file->start) || !kvedge_number_of(file->start, &to->start) ||
      to->start % BLOCK || to->start > KVEDGE_MAX_TOKENS)
    return "its start is not the end of a block";
  if (!text_of(head, SHA256, to->digest, sizeof to->digest) || strlen(to->digest) != KVEDGE_DIGEST)
    return "its sha256 is none";
  if (!text_of(head, PARENT, to->parent, sizeof to->parent) ||
      strlen(to->parent) != (to->start ? (size_t)KVEDGE_DIGEST : 0))
    return "its parent is not that of a file that starts there";
  return NULL;
}

/* Which array of a layer a name is of, as "0.key_codes"; -1: of none. */
static int array_named(const char *name, int *layer) {
  int64_t number;
  kvedge_json digits = {name, name + strlen(name)};
  if (*name < '0' || *name > '9' || !kvedge_json_number(&digits, &number) || *digits.at != '.') return -1;
  if (number >= KVEDGE_MAX_LAYERS) return -1;
  *layer = (int)number;
  if (!strcmp(digits.at + 1, "at")) return AT;
  for (int i = 0; i < NUM_TENSORS; i++)
    if (kvedge_tensors[i].part != RUNS && !strcmp(digits.at + 1, kvedge_tensors[i].name)) return i;
  return -1;
}

/* Where a tensor lies, next in the file. */
static const char *find_tensor(const kvedge_entry *e, const kvedge_file *file, uint64_t *offset, kvedge_tensor *t) {
  static const struct {
    const char *name;
    int bytes;
  } types[] = {
      {"I8",  1},
      {"U8",  1},
      {"U16", 2},
      {"F16", 2},
      {"I32", 4},
      {"F32", 4},
      {"I64", 8}
  };
  *t = (kvedge_tensor){.num_dims = e->num_dims, .data = file->tensors + *offset};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (!strcmp(types[i].name, e->type)) t->type = types[i].name, t->item_bytes = types[i].bytes;
  if (!t->type) return "a tensor's dtype is none of a prefix store";
  t->bytes = (uint64_t)t->item_bytes;
  for (int d = 0; d < e->num_dims; d++) {
    t->shape[d] = e->shape[d];
    if (e->shape[d] && t->bytes > UINT64_MAX / (uint64_t)e->shape[d]) return "a tensor is too large";
    t->bytes *= (uint64_t)e->shape[d];
  }
  if (t->bytes > file->tensor_bytes - *offset) return "it ends before its last tensor";
  if ((uint64_t)e->offsets[0] != *offset || (uint64_t)e->offsets[1] != *offset + t->bytes)
    return "its tensors do not follow one another, or are longer than their shapes";
  *offset += t->bytes;
  return NULL;
}

/* Finds the tensors; `to` NULL: only looks how many layers there are. */
static const char *read_tensors(prefix_header *head, prefix_file *to) {
  kvedge_json json = head->entries;
  uint64_t offset = 0;
  while (kvedge_json_next(&json, ',')) {
    char name[LONGEST_NAME];
    kvedge_entry e;
    kvedge_tensor t;
    int layer = 0;
    if (!kvedge_read_text(&json, name, sizeof name)) name[0] = 0;
    const int is_ids = !strcmp(name, "ids"), array = is_ids ? 0 : array_named(name, &layer);
    if (array < 0)
      return "it has an array that is none of keys and values: of a state, an index or llama.cpp, which only Python "
             "reads";
    const char *fault = kvedge_read_entry(&json, &e);
    if (!fault) fault = find_tensor(&e, &head->file, &offset, &t);
    if (fault) return fault;
    if (!is_ids && layer >= head->num_layers) head->num_layers = layer + 1;
    if (!to) continue;
    kvedge_tensor *at = is_ids ? &to->ids : &to->arrays[layer][array];
    if (at->data) return "it has a tensor twice";
    *at = t;
  }
  const int is_closed = kvedge_json_next(&json, '}');
  kvedge_json_skip(&json);
  if (!is_closed || json.at != json.end) return "its header is no JSON of tensors";
  return offset == head->file.tensor_bytes ? NULL : "it does not end with its last tensor";
}

static const char *read_header(prefix_header *head, const void *data, size_t bytes) {
  memset(head, 0, sizeof *head);
  const char *fault = kvedge_open_file(&head->file, data, bytes);
  if (!fault) fault = read_metadata(head, &head->file.header);
  return fault ? fault : read_tensors(head, NULL);
}

/* Takes the memory of a file that is read; NULL: only counts its bytes. */
static prefix_file *place(const prefix_header *head, char *base, size_t *used) {
  prefix_file *file = kvedge_take(base, used, sizeof *file);
  kvedge_tensor(*arrays)[NUM_ARRAYS] = kvedge_take(base, used, (size_t)head->num_layers * sizeof *arrays);
  char *texts = kvedge_take(base, used, head->bytes[IDENTITY] + head->bytes[VARIANT]);
  if (!base) return NULL;
  memset(file, 0, sizeof *file), memset(arrays, 0, (size_t)head->num_layers * sizeof *arrays);
  kvedge_session_prefix *to = &file->prefix;
  file->arrays = arrays, to->num_layers = head->num_layers;
  to->identity = texts, to->identity_bytes = head->bytes[IDENTITY];
  to->variant = texts + to->identity_bytes, to->variant_bytes = head->bytes[VARIANT];
  kvedge_json identity = head->field[IDENTITY], variant = head->field[VARIANT];
  kvedge_json_string(&identity, texts, to->identity_bytes);
  kvedge_json_string(&variant, texts + to->identity_bytes, to->variant_bytes);
  return file;
}

static const char *ids_fault(const kvedge_tensor *ids, const kvedge_session_prefix *prefix) {
  if (!ids->data || strcmp(ids->type, "I32") || ids->num_dims != 1) return "it has no ids";
  if (ids->shape[0] > BLOCK || (!prefix->is_checkpoint && ids->shape[0] < BLOCK) || prefix->start + ids->shape[0] == 0)
    return "it has not the 256 tokens of a block, or the 256 at most of a checkpoint";
  return NULL;
}

static kvedge_status status_of(const char *fault, const char **why) {
  if (why) *why = fault;
  return fault ? KVEDGE_ERROR_FILE : KVEDGE_OK;
}

kvedge_status kvedge_session_prefix_bytes(const void *data, size_t bytes, size_t *needed, const char **why) {
  prefix_header head;
  if (why) *why = NULL;
  if (!data || !needed) return KVEDGE_ERROR_ARGUMENT;
  const char *fault = read_header(&head, data, bytes);
  size_t used = 0;
  if (!fault) place(&head, NULL, &used), *needed = used;
  return status_of(fault, why);
}

kvedge_status kvedge_session_read_prefix(const void *data, size_t bytes, void *memory, size_t memory_bytes,
                                         kvedge_session_prefix **prefix, const char **why) {
  prefix_header head;
  size_t used = 0;
  if (why) *why = NULL;
  if (!data || !memory || (uintptr_t)memory % 16 || !prefix) return KVEDGE_ERROR_ARGUMENT;
  const char *fault = read_header(&head, data, bytes);
  if (fault) return status_of(fault, why);
  place(&head, NULL, &used);
  if (memory_bytes < used) return KVEDGE_ERROR_MEMORY;
  used = 0;
  prefix_file *file = place(&head, memory, &used);
  fault = read_fields(&head, file);
  if (!fault) fault = read_tensors(&head, file);
  if (!fault) fault = ids_fault(&file->ids, &file->prefix);
  if (fault) return status_of(fault, why);
  file->prefix.ids = file->ids.data, file->prefix.num_ids = file->ids.shape[0];
  *prefix = &file->prefix;
  return KVEDGE_OK;
}

/* ---- Its digest --------------------------------------------------------------------------------------------------- */

static void put_field(kvedge_output *out, int field, const char *text, size_t bytes) {
  kvedge_put_text(out, field ? ", \"" : "{\""), kvedge_put_text(out, field_names[field]),
      kvedge_put_text(out, "\": \"");
  kvedge_put_escaped(out, text, bytes, 1);
  kvedge_put_text(out, "\"");
}

static void put_array(kvedge_output *out, const prefix_file *file, int layer, int array) {
  const kvedge_tensor *t = &file->arrays[layer][array];
  if (!t->data) return;
  kvedge_put_text(out, "[\""), kvedge_put_number(out, layer), kvedge_put_text(out, ".");
  kvedge_put_text(out, array == AT ? "at" : kvedge_tensors[array].name);
  kvedge_put_digested(out, t);
}

static const char *digest_fault(const prefix_file *file) {
  const kvedge_session_prefix *prefix = &file->prefix;
  const char *kind = prefix->is_checkpoint ? "checkpoint" : "block";
  char digest[KVEDGE_DIGEST];
  kvedge_sha256 sha;
  kvedge_sha256_begin(&sha);
  kvedge_output out = kvedge_output_to(kvedge_take_into_digest, &sha);
  put_field(&out, FORMAT, "kvedge.prefix", 13);
  put_field(&out, FORMAT_VERSION, "1", 1);
  put_field(&out, IDENTITY, prefix->identity, prefix->identity_bytes);
  put_field(&out, KIND, kind, strlen(kind));
  put_field(&out, PARENT, prefix->parent, strlen(prefix->parent));
  put_field(&out, START, file->start, strlen(file->start));
  put_field(&out, VARIANT, prefix->variant, prefix->variant_bytes);
  kvedge_put_text(&out, "}");
  for (int i = prefix->num_layers ? 0 : -1; i >= 0; i = kvedge_next_layer(i, prefix->num_layers)) {
    put_array(&out, file, i, AT); /* in the order of names */
    for (int n = 0; n < NUM_TENSORS; n++) put_array(&out, file, i, n);
  }
  kvedge_put_text(&out, "[\"ids"), kvedge_put_digested(&out, &file->ids);
  kvedge_output_flush(&out);
  kvedge_sha256_end(&sha, digest);
  return memcmp(digest, prefix->digest, KVEDGE_DIGEST) ? "it does not match its sha256: it was changed or damaged"
                                                       : NULL;
}

/* ---- A path ------------------------------------------------------------------------------------------------------- */

typedef struct {
  kvedge_session_prefix *const *files;
  int num_files;
} prefix_path;

static const prefix_file *file_of(const prefix_path *path, int i) { return (const prefix_file *)path->files[i]; }
static int64_t stop_of(const kvedge_session_prefix *prefix) { return prefix->start + prefix->num_ids; }

static const char *path_fault(const prefix_path *path) {
  const kvedge_session_prefix *before = NULL;
  for (int i = 0; i < path->num_files; before = path->files[i++]) {
    const kvedge_session_prefix *prefix = path->files[i];
    if (strcmp(prefix->parent, before ? before->digest : "") || prefix->start != (before ? stop_of(before) : 0))
      return "a file is not the one that follows in its path";
    if (before && (before->is_checkpoint || before->variant_bytes != prefix->variant_bytes ||
                   memcmp(before->variant, prefix->variant, prefix->variant_bytes)))
      return "a file follows a checkpoint, or has keys that are stored in another way";
  }
  return NULL;
}

/* A layer as it is in a file, and alone in a session of its own; or as it is to be after a path, which has its first and last
 * tokens from the last file. */
typedef struct {
  kvedge_contents contents;
  kvedge_session session;
  kvedge_session_layer layer;
  kvedge_layer_tensors tensors;
} lone_layer;

static void set_positions(lone_layer *own, int64_t start, int64_t stop) {
  own->layer.dropped = start, own->session = (kvedge_session){.num_layers = 1, .length = stop, .layers = &own->layer};
  own->contents = (kvedge_contents){.session = &own->session, .tensors = &own->tensors};
}

static const kvedge_tensor *array_of(const prefix_file *file, int index, int array) {
  const int is_there = index < file->prefix.num_layers && file->arrays[index][array].data;
  return is_there ? &file->arrays[index][array] : NULL;
}

static int has_layer(const prefix_file *file, int index) {
  for (int n = 0; n < NUM_ARRAYS; n++)
    if (array_of(file, index, n)) return 1;
  return 0;
}

/* Python's names of types are NumPy's, which has no floats of 8 bits and no bfloat16. */
static int is_type(const char *type, const char *wanted) {
  return !strcmp(type, !strncmp(wanted, "F8", 2) ? "U8" : !strcmp(wanted, "BF16") ? "U16" : wanted);
}

/* Takes the arrays of a file for the positions that are set; the vectors of keys stay. */
static const char *take_arrays(lone_layer *own, const prefix_file *file, int index) {
  kvedge_layer_tensors *to = &own->tensors;
  to->num_first = to->num_last = 0;
  for (int n = 0; n < NUM_TENSORS && file->prefix.is_checkpoint; n++) {
    const kvedge_tensor *codes = kvedge_tensors[n].column == KEY_CODES ? array_of(file, index, n) : NULL;
    if (codes && kvedge_tensors[n].part == FIRST_TOKENS) to->num_first = codes->shape[0];
    if (codes && kvedge_tensors[n].part == LAST_TOKENS) to->num_last = codes->shape[0];
  }
  for (int n = 0; n < NUM_TENSORS; n++) {
    const int column = kvedge_tensors[n].column, is_vector = column >= KEY_OFFSET;
    if (kvedge_tensors[n].part == RUNS) continue;
    const int in_runs = kvedge_tensors[n].part == OWN_ROWS && !is_vector && kvedge_in_runs(&own->layer.config);
    const int part = in_runs ? RUNS : kvedge_tensors[n].part;
    const kvedge_tensor *t = array_of(file, index, n);
    const kvedge_tensor wanted = kvedge_contents_tensor(&own->contents, 0, part, column);
    if (!t && !is_vector && wanted.bytes) return "a tensor is missing";
    if (t && !wanted.type) return "it has a tensor that no layer has";
    if (t && (!is_type(t->type, wanted.type) || t->num_dims != wanted.num_dims ||
              memcmp(t->shape, wanted.shape, sizeof t->shape)))
      return "a tensor has another dtype or shape than its layer";
    if (!is_vector) to->at[part][column] = t ? t->data : "";
  }
  return NULL;
}

/* What a layer is to be after a path: its positions, and the vectors of its keys. */
static const char *describe(lone_layer *own, const prefix_path *path, int index, kvedge_layer *const *layer) {
  const prefix_file *last = file_of(path, path->num_files - 1);
  const kvedge_tensor *at = array_of(last, index, AT);
  const kvedge_session plain = {.num_layers = 1};
  const kvedge_tensor *vectors[2] = {NULL, NULL};
  int64_t positions[3] = {0};
  memset(own, 0, sizeof *own);
  own->layer = kvedge_contents_layer(&(kvedge_contents){.session = &plain, .layers = layer}, 0);
  if (!last->prefix.is_checkpoint && own->layer.config.recent_format)
    return "a layer has first or last tokens apart, so that its path ends with a checkpoint: this ends with a block";
  if (last->prefix.is_checkpoint) {
    if (!at || strcmp(at->type, "I64") || at->num_dims != 1 || at->shape[0] != 3)
      return "a checkpoint does not say where a layer is";
    memcpy(positions, at->data, sizeof positions);
    if (positions[0] < 0 || positions[1] < positions[0] || positions[2] < positions[1] ||
        positions[2] != stop_of(&last->prefix))
      return "a layer is at positions that its checkpoint is not";
  }
  for (int i = positions[0] ? path->num_files - 1 : 0; i < path->num_files; i++) /* those whose shapes walk() checks */
    for (int n = 0; n < NUM_TENSORS; n++) {
      const kvedge_tensor *t = array_of(file_of(path, i), index, n);
      if (!t || kvedge_tensors[n].column < KEY_OFFSET) continue;
      const kvedge_tensor **vector = &vectors[kvedge_tensors[n].column - KEY_OFFSET];
      if (*vector && ((*vector)->bytes != t->bytes || memcmp((*vector)->data, t->data, (size_t)t->bytes)))
        return "files of a path have different key offsets or key scales";
      *vector = t, own->tensors.at[OWN_ROWS][kvedge_tensors[n].column] = t->data;
    }
  own->layer.has_key_offset = own->tensors.at[OWN_ROWS][KEY_OFFSET] != NULL;
  own->layer.has_key_scale = own->tensors.at[OWN_ROWS][KEY_SCALE] != NULL;
  const kvedge_format_info *keys = kvedge_side_format(&own->layer.config, 0);
  if ((own->layer.has_key_offset && !keys->has_scales) || (own->layer.has_key_scale && kvedge_is_of_runs(keys)))
    return "it has a key offset of rows without scales, or a key scale of keys in runs";
  set_positions(own, positions[0], stop_of(&last->prefix));
  own->layer.window = positions[0] > 0; /* of tokens that are not said: it has dropped some */
  return NULL;
}

enum { CHECK_SHAPES, CHECK_NUMBERS, FILL };

/* Goes over the files of a path that have tokens of a layer. CHECK_SHAPES: may the layer be filled? *status says so too. */
static const char *walk(const prefix_path *path, int index, kvedge_layer *const *layers, int task,
                        kvedge_status *status) {
  lone_layer whole, own;
  const char *fault = describe(&whole, path, index, &layers[index]);
  if (fault) return fault;
  const int64_t first = kvedge_first_position(&whole.layer), stop = whole.session.length;
  int64_t position = whole.layer.dropped;
  own = whole;
  for (int i = position ? path->num_files - 1 : 0; i < path->num_files; i++) {
    const prefix_file *file = file_of(path, i);
    int64_t start = file->prefix.start;
    if (!has_layer(file, index)) continue; /* a block, of a layer that is all in checkpoints */
    const kvedge_tensor *at = array_of(file, index, AT);
    if (at && !file->prefix.is_checkpoint) return "a block has positions, as checkpoints have";
    if (at) memcpy(&start, at->data + sizeof start, sizeof start); /* as describe has seen */
    if (start != position) return "a layer lacks tokens, or has some twice";
    position = stop_of(&file->prefix);
    own.layer.window = 0;
    set_positions(&own, start, position);
    fault = take_arrays(&own, file, index);
    if (!fault && task == CHECK_NUMBERS) fault = kvedge_numbers_fault(&own.contents, 0);
    if (fault) return fault;
    if (task == FILL) kvedge_fill_rows(layers[index], &own.contents, 0, first);
  }
  if (position != stop) return "a layer lacks tokens";
  own.layer.window = whole.layer.window;
  set_positions(&own, whole.layer.dropped, stop); /* with first and last tokens of the last file */
  if (task == FILL) kvedge_fill_rest(layers[index], &own.contents, 0);
  if (task != CHECK_SHAPES) return NULL;
  fault = kvedge_contents_fault(&own.contents);
  if (!fault) fault = kvedge_ends_fault(&own.contents, 0);
  if (!fault && kvedge_in_runs(&own.layer.config) && own.tensors.num_last < stop % KVEDGE_RUN)
    fault = "a layer lacks tokens behind its runs";
  *status = kvedge_check_layer(&own.layer, stop, layers, index);
  return fault;
}

kvedge_status kvedge_session_load_prefix(kvedge_session_prefix *const *files, int num_files,
                                         kvedge_layer *const *layers, int num_layers, const char **why) {
  KVEDGE_FLOAT_MODE;
  const prefix_path path = {files, num_files};
  kvedge_status status = KVEDGE_OK;
  if (why) *why = NULL;
  if (!files || num_files < 1 || !layers || num_layers < 1) return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < num_files; i++)
    if (!files[i]) return KVEDGE_ERROR_ARGUMENT;
  for (int i = 0; i < num_layers; i++)
    if (!layers[i]) return KVEDGE_ERROR_ARGUMENT;
  const char *fault = path_fault(&path);
  for (int i = 0; i < num_files && !fault; i++)
    if (files[i]->num_layers > num_layers) fault = "it has more layers than there are";
  for (int i = 0; i < num_layers && !fault; i++) {
    fault = walk(&path, i, layers, CHECK_SHAPES, &status);
    if (!fault && status != KVEDGE_OK) return status;
  }
  for (int i = 0; i < num_files && !fault; i++) {
    if (!files[i]->is_checked) fault = digest_fault(file_of(&path, i));
    if (!fault) files[i]->is_checked = 1;
  }
  for (int i = 0; i < num_layers && !fault; i++) fault = walk(&path, i, layers, CHECK_NUMBERS, &status);
  if (fault) return status_of(fault, why);
  for (int i = 0; i < num_layers; i++) walk(&path, i, layers, FILL, &status);
  return KVEDGE_OK;
}
