/* A layer of three ranges: its first tokens, the body, its last tokens; private to csrc/.
 *
 * The body is the layer's own arrays: rows of all tokens, or whole runs of 32. First and last tokens lie besides, in
 * recent_format, in two plain layers whose headers follow the layer's own. All rows below count from the start of the
 * body's arrays.
 *
 * Last tokens lie in the order of their rows. When there is no room for more, which is once in 64 tokens or fewer, those that
 * are still needed are moved to the front: the append waits until no call reads. */
#ifndef KVEDGE_RANGES_H
#define KVEDGE_RANGES_H

#include "store/layer_struct.h"

static inline int kvedge_has_ranges(const kvedge_layer *layer) { return layer->last != NULL; }

/* Last tokens that stay in recent_format: those that are read there, and 64 more, so that as many can be taken back. */
int64_t kvedge_kept_rows(const kvedge_layer_config *config);

/* Last tokens that there is room for; 0: there are none. */
int64_t kvedge_last_rows(const kvedge_layer_config *config);

/* The configs of the two plain layers. */
kvedge_layer_config kvedge_first_config(const kvedge_layer_config *config);
kvedge_layer_config kvedge_last_config(const kvedge_layer_config *config);

/* Keeps a layer's writer from writing over rows that kvedge_layer_get_ranges tells of from now on, until it is released. Who
 * holds a layer must not wait for another, nor for the same again: it may try, and if that fails, 0, release what it holds. */
int kvedge_try_hold(const kvedge_layer *layer);
void kvedge_hold(const kvedge_layer *layer);
void kvedge_release(const kvedge_layer *layer);

/* What kvedge_layer_get_ranges tells; and as the writer has it: of a layer that went back, last_from and first tokens may lie
 * above stop. Last tokens are there up to row *last_written. */
kvedge_ranges kvedge_ranges_now(const kvedge_layer *layer);
kvedge_ranges kvedge_ranges_written(const kvedge_layer *layer, int64_t *last_written);

/* Where num_tokens tokens from a row on are read by query rows, the first of which stands at row `query_row`, or by
 * a getter (the last one): parts, in order, whose positions count from that row. Returns their number, 0 to 3. */
int kvedge_parts_of_ranges(const kvedge_layer *layer, const kvedge_ranges *ranges, int64_t row, int64_t num_tokens,
                           int64_t query_row, kvedge_part parts[3]);

/* Can tokens be stored in all ranges that they come to? Their bound in the body is *bound. Writes nothing. */
kvedge_status kvedge_ranges_check(const kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values,
                                  int64_t num_tokens, kvedge_bounds *bound);

/* Appends tokens that passed the check, and that the body has room for. */
void kvedge_ranges_append(kvedge_layer *layer, const kvedge_array *keys, const kvedge_array *values, int64_t num_tokens,
                          const kvedge_bounds *bound);

/* Ends at another row; see kvedge_layer_set_len. */
void kvedge_ranges_set_stop(kvedge_layer *layer, int64_t stop);

/* Reads tokens of rows start..stop-1 back. */
void kvedge_ranges_load(const kvedge_layer *layer, int values, int64_t start, int64_t stop, float *out);

/* Takes over the ranges of another layer, whose row `row` is row 0 here, and its first and last tokens; those behind stop too,
 * up to row `written`. */
void kvedge_ranges_copy(kvedge_layer *layer, const kvedge_layer *from, const kvedge_ranges *ranges, int64_t written,
                        int64_t row);

/* kvedge_layer_compact and _keep, whose arguments are checked. keep moves first and last tokens, and tells how many there are. */
void kvedge_ranges_compact(kvedge_layer *layer);
void kvedge_ranges_keep(kvedge_layer *layer, const int64_t *tokens, int64_t num_tokens);

#endif
