/* A file that is being read, of a session or of a prefix store. */
#ifndef KVEDGE_READER_H
#define KVEDGE_READER_H

#include "session/contents.h"
#include "session/json.h"

struct kvedge_session_reader {
  kvedge_session session;
  kvedge_layer_tensors *tensors; /* [num_layers], where they lie in the file, at any address */
  char digest[KVEDGE_DIGEST];    /* as the file tells it */
};

typedef struct {
  kvedge_json header; /* what follows "__metadata__": */
  const char *tensors;
  uint64_t tensor_bytes;
} kvedge_file;

/* What the header says of a tensor. */
typedef struct {
  char type[16];
  int num_dims;
  int64_t shape[KVEDGE_MAX_STATE_AXES], offsets[2];
} kvedge_entry;

/* These return what is wrong, or NULL. */
const char *kvedge_open_file(kvedge_file *file, const void *data, size_t bytes);
const char *kvedge_read_entry(kvedge_json *json, kvedge_entry *e); /* from the colon behind its name on */

/* Goes past a short string without a NUL in it, which one ends in `text`; 0: there is none. */
int kvedge_read_text(kvedge_json *json, char *text, size_t room);

/* Text that is a number and nothing else, as kvedge writes it. */
int kvedge_number_of(const char *text, int64_t *number);

/* Is layer i another one than those before, empty, of the config that `of` tells, and with room? */
kvedge_status kvedge_check_layer(const kvedge_session_layer *of, int64_t length, kvedge_layer *const *layers, int i);

/* What is wrong with the numbers of a layer, which need not be aligned. */
const char *kvedge_numbers_fault(const kvedge_contents *contents, int index);

/* Copies the rows, or runs, of a layer whose first position is `first`; then key vectors, first and last tokens, and lets the
 * layer hold all. */
void kvedge_fill_rows(kvedge_layer *layer, const kvedge_contents *contents, int index, int64_t first);
void kvedge_fill_rest(kvedge_layer *layer, const kvedge_contents *contents, int index);

#endif
