/* What a session file holds, of layers that are written or in a file that is read: its tensors, and the text of its
 * metadata, which is the same for the file (header) and for its digest but for how it is spaced and escaped. */
#ifndef KVEDGE_CONTENTS_H
#define KVEDGE_CONTENTS_H

#include "session/output.h"
#include "session/parts.h"

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
} kvedge_layer_tensors;

typedef struct {
  const kvedge_session *session;
  /* Where the tensors lie: in layers (then session->layers has no more than windows), or in a file. */
  kvedge_layer *const *layers;
  const kvedge_session_parts *parts; /* beside layers; NULL: no layer has any */
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
kvedge_tensor kvedge_contents_tensor(const kvedge_contents *contents, int index, int part, int column);
kvedge_tensor kvedge_state_tensor(const kvedge_session_state *state); /* of no bytes: there is no such array */

/* Hands over the tensors that are there in the order of their names, "layers.0.key_codes", "states.1.recurrent": folder,
 * number and what is left. `item_bytes`: those of such elements; 0: all. */
typedef void kvedge_take_tensor(kvedge_output *out, const kvedge_tensor *t, const char *folder, int number,
                                const char *name);
void kvedge_each_tensor(const kvedge_contents *contents, int item_bytes, kvedge_take_tensor *take, kvedge_output *out);

/* Is the session one that kvedge writes? The sentence that says why not, or NULL. The configs are valid ones. */
const char *kvedge_contents_fault(const kvedge_contents *contents);

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

/* SHA-256 of all but itself, as hexadecimal digits. */
void kvedge_contents_digest(const kvedge_contents *contents, char digest[KVEDGE_DIGEST]);

/* What of two layers has to be the same for the bytes of one to mean the same in the other. */
int kvedge_same_rows(const kvedge_layer_config *a, const kvedge_layer_config *b);

#endif
