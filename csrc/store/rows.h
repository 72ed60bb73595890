/* One side of a layer, its keys or its values: how rows are stored, and where. */
#ifndef KVEDGE_ROWS_H
#define KVEDGE_ROWS_H

#include "formats/array.h"

/* The largest magnitude of floats, as bits: this or more is not finite. */
#define KVEDGE_NOT_FINITE 0x7f800000u

typedef struct {
  const kvedge_format_info *format;
  kvedge_row_shape shape;
  int num_kv_heads;
  size_t row_bytes, scale_row_bytes; /* of one token, or run of tokens, and head */
  char *codes;                       /* [capacity][num_kv_heads] rows */
  char *scales;                      /* [capacity][num_kv_heads] rows of scales; for formats without, the codes: rows of
                                      * no bytes somewhere, since a NULL may not be added to */
  const float *offset;               /* (num_kv_heads, dim) what rows are stored minus, or NULL */
  const float *scale;                /* (num_kv_heads, dim) what rows are stored divided by, after that; or NULL */
  int rotated;                       /* channels that are rotated together before rows are encoded: rotation.h; or 0 */
} kvedge_side;

/* Where a token's row lies, or its run; rows count tokens from the start of the arrays. */
static inline char *kvedge_codes_at(const kvedge_side *side, int64_t row) {
  return side->codes + (size_t)kvedge_row_of(side->format, row) * (size_t)side->num_kv_heads * side->row_bytes;
}

static inline char *kvedge_scales_at(const kvedge_side *side, int64_t row) {
  return side->scales + (size_t)row * (size_t)side->num_kv_heads * side->scale_row_bytes;
}

/* Checks rows (num_tokens, num_kv_heads, dim) without writing anything; *bound is what theirs will be. */
kvedge_status kvedge_rows_check(const kvedge_side *side, const kvedge_array *rows, int64_t num_tokens, float *bound);

/* Stores tokens that passed the check, from row `at` on. */
void kvedge_rows_store(const kvedge_side *side, const kvedge_array *rows, int64_t num_tokens, int64_t at);

/* The same for a run, on the threads of calls where it takes long enough. */
void kvedge_run_store(const kvedge_side *side, const kvedge_array *rows, int64_t at);

/* Reads the tokens in rows start..stop-1 back. */
void kvedge_rows_load(const kvedge_side *side, int64_t start, int64_t stop, float *out);

/* The keys, or values, of one token (or of the run that it lies in) and head, as a side of one row. */
kvedge_side kvedge_side_of_head(const kvedge_side *side, int64_t row, int head);

/* Copies tokens from a row of one side on to another, stored alike, or within one. */
void kvedge_copy_rows(const kvedge_side *from, int64_t row, const kvedge_side *to, int64_t at, int64_t num_tokens);

/* The bound of the tokens in rows start..stop-1, as they are stored. */
float kvedge_rows_bound(const kvedge_side *side, int64_t start, int64_t stop);

#endif
