/* As kvedge/layer_precise.py has them. */
#include "session/parts.h"

#include "store/layer.h"

enum { DRAFT = 64, ROOM = 64 }; /* tokens of last: that may be taken back; that are appended between two moves */

kvedge_layer *kvedge_layer_of_part(kvedge_layer *const *layers, const kvedge_session_parts *parts, int index,
                                   int part) {
  if (part == OWN_ROWS) return layers[index];
  if (!parts) return NULL;
  return part == FIRST_TOKENS ? parts[index].first : part == LAST_TOKENS ? parts[index].last : parts[index].runs;
}

kvedge_session_part kvedge_part_of(const kvedge_session *session, const kvedge_session_layer *layer, int part) {
  if (part == OWN_ROWS) return (kvedge_session_part){layer->config, kvedge_held_tokens(session, layer)};
  return part == FIRST_TOKENS ? layer->first : part == LAST_TOKENS ? layer->last : layer->runs;
}

/* ---- Configs ------------------------------------------------------------------------------------------------------ */

static kvedge_layer_config with_groups(kvedge_layer_config config, int has_groups) {
  if (!has_groups) config.group_size = kvedge_widest_row(&config), config.scale_type = KVEDGE_SCALE_FLOAT32;
  return config;
}

kvedge_layer_config kvedge_precise_config(const kvedge_layer_config *stored, kvedge_format format) {
  kvedge_layer_config config = *stored;
  config.format = format, config.value_format = 0, config.capacity = 1, config.value_rotation = 0;
  return with_groups(config, kvedge_has_scales(&config) && kvedge_has_scales(stored));
}

kvedge_layer_config kvedge_runs_config(const kvedge_layer_config *stored) {
  kvedge_layer_config config = *stored;
  config.capacity = KVEDGE_RUN;
  return with_groups(config, kvedge_has_scales(stored));
}

int kvedge_part_has(const kvedge_session_layer *layer, int part, int column) {
  const int has = column == KEY_OFFSET ? layer->has_key_offset : layer->has_key_scale;
  const kvedge_format_info *precise = kvedge_format_of(layer->last.config.format);
  if (part == OWN_ROWS || part == RUNS || !has) return has;
  return column == KEY_OFFSET ? precise->has_scales : precise->bits <= 8;
}

/* ---- How many tokens ---------------------------------------------------------------------------------------------- */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t kvedge_most_first(const kvedge_session *session, const kvedge_session_layer *layer) {
  return smaller(layer->sinks, kvedge_held_tokens(session, layer));
}

/* With runs, tokens before the first that the layer holds may be there too: those of its run. */
int64_t kvedge_most_last(const kvedge_session *session, const kvedge_session_layer *layer) {
  const int in_runs = kvedge_in_runs(layer);
  const int64_t recent = in_runs ? larger(layer->recent, KVEDGE_RUN) : layer->recent;
  const int64_t before = in_runs ? layer->dropped - kvedge_runs_begin(layer) : 0;
  return recent ? smaller(recent + DRAFT + ROOM, kvedge_held_tokens(session, layer) + before) : 0;
}

/* They end with the last whole run, or where the layer does if last tokens do not reach back to there. */
int64_t kvedge_tokens_of_runs(const kvedge_session *session, const kvedge_session_layer *layer) {
  const int64_t end = session->length, whole = end / KVEDGE_RUN * KVEDGE_RUN;
  return (end - layer->last.num_tokens <= whole ? whole : end) - kvedge_runs_begin(layer);
}

/* ---- Where tokens are read ---------------------------------------------------------------------------------------- */

static int put_part(kvedge_part *part, const kvedge_layer *layer, int64_t at, int64_t first, int64_t stop) {
  int64_t start;
  kvedge_layer_range(layer, &start);
  *part = (kvedge_part){.layer = layer, .first_row = start + at, .num_tokens = stop - first, .position = first};
  return stop > first;
}

int kvedge_session_attended(const kvedge_session_layer *of, const kvedge_layer *layer,
                            const kvedge_session_parts *parts, kvedge_part attended[3]) {
  const int64_t n = kvedge_layer_len(layer);
  if (!parts || !parts->last) return put_part(attended, layer, 0, 0, n);
  const int64_t last = n - kvedge_layer_len(parts->last); /* where last tokens begin */
  const int64_t sinks = of->dropped ? 0 : smaller(n, kvedge_layer_len(parts->first));
  const int64_t base = parts->runs_position - of->dropped;
  int64_t tail = smaller(n, larger(sinks, larger(last, n - of->recent)));
  if (parts->runs) tail = smaller(tail, larger(sinks, base + kvedge_layer_len(parts->runs)));
  int count = put_part(attended, parts->first, 0, 0, sinks);
  if (parts->runs) count += put_part(attended + count, parts->runs, sinks - base, sinks, tail);
  else count += put_part(attended + count, layer, sinks, sinks, tail);
  return count + put_part(attended + count, parts->last, tail - last, tail, n);
}
