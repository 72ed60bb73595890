/* A storage format is a row of a table: how a row, the elements of one token and KV head, becomes bytes, and back.
 *
 * A format works everywhere with the functions here; kernels/kernels.h has a second table, which makes it fast path by
 * path. Nothing else knows a format by name.
 */
#ifndef KVEDGE_FORMAT_H
#define KVEDGE_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#include "kvedge.h"
#include "system/arithmetic.h"

enum {
  KVEDGE_MAX_HEAD_DIM = 1024,
  KVEDGE_RUN = 32,          /* tokens of a run, in formats that encode several together: two blocks of attention */
  KVEDGE_RUN_CHANNELS = 64, /* channels of a run that are encoded at a time; of values they share a step */
};

/* What all rows of one side (keys, or values) of a layer have in common. */
typedef struct {
  int dim;        /* elements, 1..KVEDGE_MAX_HEAD_DIM */
  int group_size; /* elements that share a scale, at most dim */
  int num_groups; /* scales; 0 for formats without */
  kvedge_scale_type scale_type;
} kvedge_row_shape;

typedef struct {
  kvedge_format id;
  const char *name;      /* as Python says it */
  const char *file_type; /* safetensors' name of the type of an element; NULL: session files hold none of the format */
  int bits;              /* of an element; a row takes ceil(dim * bits / 8) bytes */
  int has_scales;        /* a row has a scale for each group, and may be stored minus a key offset */
  int row_tokens;        /* tokens of a stored row: 1, or KVEDGE_RUN, a run, which are encoded together */
  int group_channels; /* of formats that keep scales within rows, with has_scales 0: channels of a group, which dim */
  int group_bytes;    /* is a multiple of; bytes of a group: its scale, a half, and from codes_at on codes as those */
  int codes_at;       /* of int8, or `codes`. In other formats these are 0. */
  const struct kvedge_block_codes *codes;
  int product_bits; /* what KVEDGE_PRECISION_AUTO takes: 8 where the error of the format on models is ten times that
                          * of products of 8 bits (docs/numerics.md), else 0 */

  /* The bound of a row whose largest magnitude is `largest`: at least its largest scale, or without scales its largest
   * stored magnitude. INFINITY: it is too large to be stored. */
  float (*bound_of)(const kvedge_row_shape *shape, float largest);

  /* Rows (num_rows, dim), finite and with a finite bound, to bytes: the same on every machine. */
  void (*encode)(const kvedge_row_shape *shape, const float *x, int64_t num_rows, void *codes, void *scales);

  /* Rows back to floats, finite ones. */
  void (*decode)(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows, float *x);

  /* The bound of rows that are stored. In all of these rows lie one after the other. */
  float (*bound)(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows);

  /* Can `encode` have made these bytes, which come from a file? Else decode might give what is
   * not finite. Runs may lie at any address. */
  int (*is_valid)(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows);

  /* Of formats of runs alone. A run of a head, [KVEDGE_RUN][dim], is what `bound` calls a row;
   * it has so many bytes, and starts at an even address. Instead of encode: channels
   * first..first+count-1, a group of KVEDGE_RUN_CHANNELS or the last ones, of x (KVEDGE_RUN,
   * count), in order. Instead of decode: some of its tokens back to floats, `stride` floats
   * apart. */
  size_t (*run_bytes)(int dim);
  void (*encode_run)(const kvedge_row_shape *shape, const float *x, int first, int count, void *run);
  void (*decode_run)(const kvedge_row_shape *shape, const void *run, int first, int count, float *x, ptrdiff_t stride);
} kvedge_format_info;

/* Are tokens encoded in runs? */
static inline int kvedge_is_of_runs(const kvedge_format_info *format) { return format->row_tokens > 1; }

/* The stored row that a token lies in, and where in it; tokens count from the start of a row. */
static inline int64_t kvedge_row_of(const kvedge_format_info *format, int64_t token) {
  return format->row_tokens == 1 ? token : token / KVEDGE_RUN;
}

static inline int kvedge_place_in_row(const kvedge_format_info *format, int64_t token) {
  return (int)(token & (format->row_tokens - 1)); /* a power of two */
}

/* Stored rows that tokens 0..num_tokens-1 lie in. */
static inline int64_t kvedge_num_rows(const kvedge_format_info *format, int64_t num_tokens) {
  return kvedge_row_of(format, num_tokens + format->row_tokens - 1);
}

/* The shape of rows of `dim` elements of a format, in a layer with such groups and scales. */
static inline kvedge_row_shape kvedge_row_shape_of(const kvedge_format_info *format, int dim, int group_size,
                                                   kvedge_scale_type scale_type) {
  kvedge_row_shape shape = {.dim = dim, .group_size = dim, .scale_type = scale_type};
  if (format->has_scales) {
    if (group_size < dim) shape.group_size = group_size;
    shape.num_groups = (dim + shape.group_size - 1) / shape.group_size;
  } else if (format->group_bytes) {
    shape.group_size = format->group_channels;
    shape.num_groups = dim / format->group_channels;
    shape.scale_type = KVEDGE_SCALE_FLOAT16;
  }
  return shape;
}

extern const kvedge_format_info kvedge_format_int8, kvedge_format_float32, kvedge_format_float16,
    kvedge_format_bfloat16, kvedge_format_fp8_e4m3, kvedge_format_fp8_e5m2, kvedge_format_int4, kvedge_format_q8_0,
    kvedge_format_grid2, kvedge_format_grid3, kvedge_format_grid4, kvedge_format_grid5, kvedge_format_grid6,
    kvedge_format_grid7, kvedge_format_grid8, kvedge_format_kivi2_keys, kvedge_format_kivi4_keys,
    kvedge_format_kivi8_keys, kvedge_format_kivi2_values, kvedge_format_kivi4_values, kvedge_format_kivi8_values;

/* Of grids, by bits: their levels, by code. */
extern const float *const kvedge_grid_levels[9];

/* NULL: there is no such format. Of keys, where values have another one of that name. */
const kvedge_format_info *kvedge_format_of(kvedge_format format);
const kvedge_format_info *kvedge_value_format_of(kvedge_format format);

/* Of rows in memory of others alone: ggml's 4 and 5 bits. NULL: there is no such format. */
const kvedge_format_info *kvedge_format_of_blocks(kvedge_format format);

/* The format of a layer's keys, or of its values; NULL: there is no such format. */
static inline const kvedge_format_info *kvedge_side_format(const kvedge_layer_config *config, int values) {
  if (!values) return kvedge_format_of(config->format);
  if (config->value_format == 0) return kvedge_value_format_of(config->format);
  return config->value_format < 0 ? NULL : kvedge_value_format_of((kvedge_format)(config->value_format - 1));
}

/* Are keys or values in runs? */
static inline int kvedge_in_runs(const kvedge_layer_config *config) {
  return kvedge_is_of_runs(kvedge_side_format(config, 0)) || kvedge_is_of_runs(kvedge_side_format(config, 1));
}

/* Do keys or values have scales? */
static inline int kvedge_has_scales(const kvedge_layer_config *config) {
  return kvedge_side_format(config, 0)->has_scales || kvedge_side_format(config, 1)->has_scales;
}

/* Bytes of n elements of so many bits. */
static inline size_t kvedge_packed_bytes(int n, int bits) { return ((size_t)n * (size_t)bits + 7) / 8; }

static inline size_t kvedge_row_bytes(const kvedge_format_info *format, int dim) {
  if (format->group_bytes) return (size_t)(dim / format->group_channels * format->group_bytes);
  return format->run_bytes ? format->run_bytes(dim) : kvedge_packed_bytes(dim, format->bits);
}

static inline size_t kvedge_scale_size(kvedge_scale_type type) {
  return type == KVEDGE_SCALE_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

/* Of scales that lie apart. */
static inline size_t kvedge_scale_row_bytes(const kvedge_row_shape *shape) {
  return (size_t)shape->num_groups * kvedge_scale_size(shape->scale_type);
}

#endif
