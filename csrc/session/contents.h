/* What a session file holds, of layers that are written or in a file that is read: its tensors, and the text of its
 * metadata, which is the same for the file (header) and for its digest but for how it is spaced and escaped. */
#ifndef KVEDGE_CONTENTS_H
#define KVEDGE_CONTENTS_H

#include "session/output.h"
#include "store/ranges.h"

/* What a layer has in a file, each as four tensors: its rows, which have no bytes where tokens lie in runs; its first and last
 * tokens, in recent_format; its runs. Rows also have the vectors of keys. */
enum { OWN_ROWS, FIRST_TOKENS, LAST_TOKENS, RUNS, NUM_PARTS };
enum { KEY_CODES, KEY_SCALES, VALUE_CODES, VALUE_SCALES, KEY_OFFSET, KEY_SCALE, NUM_COLUMNS };

typedef struct {
  uint8_t part, column;
  char name[19]; /* without that of the layer */
} kvedge_tensor_name;

/* The tensors of a layer, in the order of their names. */
enum { NUM_TENSORS = 4 * NUM_PARTS + 2 };
extern const kvedge_tensor_name kvedge_tensors[NUM_TENSORS];

enum { KVEDGE_MAX_LAYERS = 4096, KVEDGE_MAX_HEADER = 100000000, KVEDGE_DIGEST = 64 };
#define KVEDGE_MAX_TOKENS ((int64_t)1 << 40)

typedef struct {
  const char *at[NUM_PARTS][NUM_COLUMNS]; /* NULL: not there */
  int64_t num_first, num_last;            /* tokens, which is in no field of the metadata */
} kvedge_layer_tensors;

typedef struct {
  const kvedge_session *session;
  /* Where the tensors lie: in layers (then session->layers has no more than windows), or in a file. */
  kvedge_layer *const *layers;
  const kvedge_layer_tensors *tensors;
} kvedge_contents;

typedef struct {
  const char *type; /* safetensors' name */
  int item_bytes;
  int num_dims;
  int64_t shape[KVEDGE_MAX_STATE_AXES];
  uint64_t bytes;
  const char *data; /* NULL: not there */
} kvedge_tensor;

/* All of a layer; of none, zeros. */
kvedge_session_layer kvedge_contents_layer(const kvedge_contents *contents, int index);
int kvedge_has_part(const kvedge_layer_config *config, int part);
kvedge_layer_config kvedge_part_config(const kvedge_layer_config *config, int part); /* how its rows are stored */
int64_t kvedge_part_tokens(const kvedge_contents *contents, int index, int part);
kvedge_tensor kvedge_contents_tensor(const kvedge_contents *contents, int index, int part, int column);
kvedge_tensor kvedge_state_tensor(const kvedge_session_state *state); /* of no bytes: there is no such array */

/* Hands over the tensors that are there in the order of their names, "layers.0.key_codes", "states.1.recurrent": folder,
 * number and what is left. `item_bytes`: those of such elements; 0: all. */
typedef void kvedge_take_tensor(kvedge_output *out, const kvedge_tensor *t, const char *folder, int number,
                                const char *name);
void kvedge_each_tensor(const kvedge_contents *contents, int item_bytes, kvedge_take_tensor *take, kvedge_output *out);

void kvedge_put_data(kvedge_output *out, const kvedge_tensor *t);

/* Is the session one that kvedge writes? The sentence that says why not, or NULL. The configs are valid ones. */
const char *kvedge_contents_fault(const kvedge_contents *contents);

/* Of the number of a layer's first and last tokens in a file. */
const char *kvedge_ends_fault(const kvedge_contents *contents, int index);

/* Of its states, which are not looked at above. */
const char *kvedge_states_fault(const kvedge_session *session);

/* Below 0, 0, above 0: the order of two arrays of states. */
int kvedge_compare_states(const kvedge_session_state *a, const kvedge_session_state *b);

/* Below 0, 0, above 0: the order of two items of metadata. */
int kvedge_compare_keys(const kvedge_session_text *a, const kvedge_session_text *b);

/* The layer after this one in the order of tensors' names, where 10 is before 2; the first is 0; -1: there is none. */
int kvedge_next_layer(int index, int num_layers);

/* What makes layers differ from layer 0, as the field "layers" has it; nothing, if nothing does. Quotes are written as
 * `quote` says. */
void kvedge_put_layers(kvedge_output *out, const kvedge_contents *contents, const char *quote);

/* "layers.0.key_codes" */
void kvedge_put_tensor_name(kvedge_output *out, const char *folder, int number, const char *name);

/* The version of a file: "1"; "2" where it holds runs; "3" where it holds states. (In files of runs of version "1", which
 * no release wrote, codes lay otherwise.) */
const char *kvedge_version_of(const kvedge_contents *contents);

/* The metadata, as in a file's header; without a digest, as the digest covers it. */
void kvedge_put_metadata(kvedge_output *out, const kvedge_contents *contents, const char *digest);

/* What the digest covers of a tensor behind its name; a sink that takes it into a kvedge_sha256. */
void kvedge_put_digested(kvedge_output *out, const kvedge_tensor *t);
int kvedge_take_into_digest(void *sha, const void *data, size_t bytes);

/* SHA-256 of all but itself, as hexadecimal digits. */
void kvedge_contents_digest(const kvedge_contents *contents, char digest[KVEDGE_DIGEST]);

/* Tokens that a layer holds. */
static inline int64_t kvedge_stored_tokens(const kvedge_session *session, const kvedge_session_layer *layer) {
  return session->length - layer->dropped;
}

/* The position of its first row: that of the first token, or of its run. */
static inline int64_t kvedge_first_position(const kvedge_session_layer *layer) {
  return kvedge_in_runs(&layer->config) ? layer->dropped & -KVEDGE_RUN : layer->dropped;
}

#endif
