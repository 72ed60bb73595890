/* Layers with parts: first and last tokens in another format, runs of 32 tokens; which tokens lie where, and how. */
#ifndef KVEDGE_SESSION_PARTS_H
#define KVEDGE_SESSION_PARTS_H

#include "formats/format.h"

/* A layer's own rows and its parts, each of four tensors; own rows also have those of keys. */
enum { OWN_ROWS, FIRST_TOKENS, LAST_TOKENS, RUNS, NUM_PARTS };
enum { KEY_CODES, KEY_SCALES, VALUE_CODES, VALUE_SCALES, KEY_OFFSET, KEY_SCALE, NUM_COLUMNS };

/* Tokens that a layer holds. */
static inline int64_t kvedge_held_tokens(const kvedge_session *session, const kvedge_session_layer *layer) {
  return session->length - layer->dropped;
}

/* The layer of own rows or of a part; NULL: there is none. */
kvedge_layer *kvedge_layer_of_part(kvedge_layer *const *layers, const kvedge_session_parts *parts, int index, int part);

/* What a file has of a part, and how many tokens of own rows. */
kvedge_session_part kvedge_part_of(const kvedge_session *session, const kvedge_session_layer *layer, int part);

static inline int kvedge_widest_row(const kvedge_layer_config *config) {
  return config->head_dim > config->value_head_dim ? config->head_dim : config->value_head_dim;
}

static inline int kvedge_in_runs(const kvedge_session_layer *layer) { return layer->config.format == KVEDGE_NO_ROWS; }

/* How a layer stores tokens: as its rows or, if it has runs, as these have both sides. */
static inline kvedge_layer_config kvedge_stored_config(const kvedge_session_layer *layer) {
  kvedge_layer_config config = layer->config;
  if (kvedge_in_runs(layer))
    config.format = layer->runs.config.format, config.value_format = layer->runs.config.value_format;
  return config;
}

/* Is one side of runs, and are both in files? */
static inline int kvedge_makes_runs(const kvedge_layer_config *config) {
  int runs = 0;
  for (int values = 0; values < 2; values++) {
    const kvedge_format_info *format = kvedge_side_format(config, values);
    if (!format || !format->file_type || format->id == KVEDGE_NO_ROWS) return 0;
    runs |= kvedge_is_of_runs(format);
  }
  return runs;
}

/* The configs of first and last tokens in a format, and of runs, of a layer that stores tokens so; of the least
 * capacity. */
kvedge_layer_config kvedge_precise_config(const kvedge_layer_config *stored, kvedge_format format);
kvedge_layer_config kvedge_runs_config(const kvedge_layer_config *stored);

/* Does a part store keys minus the layer's key offset (column KEY_OFFSET), or over its key scale (KEY_SCALE)? */
int kvedge_part_has(const kvedge_session_layer *layer, int part, int column);

static inline int64_t kvedge_runs_begin(const kvedge_session_layer *layer) {
  return layer->dropped / KVEDGE_RUN * KVEDGE_RUN;
}

/* Tokens of first and last that a file has at most; tokens of runs that belong to so many of last. */
int64_t kvedge_most_first(const kvedge_session *session, const kvedge_session_layer *layer);
int64_t kvedge_most_last(const kvedge_session *session, const kvedge_session_layer *layer);
int64_t kvedge_tokens_of_runs(const kvedge_session *session, const kvedge_session_layer *layer);

#endif
