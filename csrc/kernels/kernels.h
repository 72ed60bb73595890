/* The kernel tables: everything whose machine code differs from CPU to CPU.
 *
 * A kernel has no state, allocates nothing, starts no thread and reads no byte outside the rows it is given. All paths
 * store the same bytes and agree on results within the numerics contract (docs/numerics.md). Each path has a table in
 * a folder of its own; system/dispatch.c picks one.
 */
#ifndef KVEDGE_KERNELS_H
#define KVEDGE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "kvedge.h"
#include "system/arithmetic.h"

enum {
  /* Tokens per tile at most. A multiple of 16, the widest vector of floats. */
  KVEDGE_TILE = 256,
  /* Tokens that a kernel works on together at least: tiles are cut at multiples of it only. */
  KVEDGE_BLOCK = 16,
  KVEDGE_TILE_BLOCKS = KVEDGE_TILE / KVEDGE_BLOCK,
  /* Query rows of a KV head (group x rows of a prompt) that one kernel call serves at most. */
  KVEDGE_QUERY_ROWS = 32,
  /* Prepared query groups are padded with zeros to this many channels: one 64-byte vector. */
  KVEDGE_QUERY_PAD = 64,
  /* Columns that transpose_scales writes at most. */
  KVEDGE_SCALE_COLUMNS = 4,
  /* Channels of the groups that a kernel takes all at once, and how many of them at most: of 1,024 channels. */
  KVEDGE_GROUP = 32,
  KVEDGE_GROUPS = 32,
  /* KV heads of a head batch: those whose scales come together. */
  KVEDGE_HEADS = KVEDGE_SCALE_COLUMNS,
  /* Channels that each of them has at most; at least 64, and a multiple of 16. */
  KVEDGE_HEADS_DIM = 256,
  /* Bytes that a channel of a quantized query takes at most. */
  KVEDGE_QUANTIZED_BYTES = 6,
  /* How many powers of two a probability may be above 1 before softmax takes a new maximum. */
  KVEDGE_HEADROOM = 8,
  /* Bytes of a cell's working memory. Stacks of threads are small (musl: 128 KiB), so what is
   * large lies here. The most is what the weighted sum of a grid takes: 64 KiB of decoded rows,
   * 32 KiB of weights, 32 KiB for the cell of float32. */
  KVEDGE_SCRATCH = 144 << 10,
};

/* Takes `bytes` of a cell's working memory; what stays is for the cells that it calls. */
static inline void *kvedge_take_scratch(char **scratch, size_t bytes) {
  void *taken = *scratch;
  *scratch += (bytes + 63) / 64 * 64;
  return taken;
}

static inline int kvedge_padded_channels(int dim) {
  return (dim + KVEDGE_QUERY_PAD - 1) / KVEDGE_QUERY_PAD * KVEDGE_QUERY_PAD;
}

/* Query rows of a KV head (group x rows of a prompt) against one group of channels: as floats,
 * or for cells with an encode_query as integers of 24 bits in three planes, 8-bit digits: value
 * ~ scale * (65536 * high + 256 * middle + low). So the query adds nothing to what the keys'
 * storage costs, whatever the size of the logits. Channels dim..padded are zero in both.
 * Of several groups, of KVEDGE_GROUP channels, group g of a query is g * group_stride channels further; it has offsets of
 * its own, and the scale of all. */
typedef struct {
  int num_queries;         /* 1..KVEDGE_QUERY_ROWS */
  int dim;                 /* channels of this group or of these groups, 1..1024 */
  int planes;              /* digits to multiply by: 3, or fewer (the high ones) for 16 or 8 bits */
  ptrdiff_t stride;        /* channels from one query to the next */
  ptrdiff_t group_stride;  /* channels from one group to the next */
  const float *values;     /* (num_queries, stride); magnitudes up to 2 */
  const int8_t *quantized; /* (num_queries, stride * KVEDGE_QUANTIZED_BYTES), 64-byte aligned: the integers as the path
                           * multiplies them, in an order of its own; NULL where the cell has no encode_query */
  ptrdiff_t scale_stride;  /* groups from one query to the next, in scale and offsets */
  const float *scale;      /* (num_queries) */
  const int32_t *offsets;  /* (num_queries, 4): where the sum of products with each plane starts. Paths that multiply
                           * unsigned keys, k + 128, take off here what that adds; else zeros. */
  const float *error;      /* (num_queries), for runs, whose cell encodes queries itself: how far two planes may move a
                           * logit, per unit of such a code. Where planes is 0 it takes two if this is at most
                           * KVEDGE_LOGIT_ERROR. */
  char *scratch; /* (KVEDGE_SCRATCH) working memory, 64-byte aligned; its contents mean nothing to anybody else */
} kvedge_query;

/* Two planes of a query have to move no logit by more than about this. At this figure the output keeps the numerics
 * contract (2e-4) between flat and sharp, where it is hardest (bench/accuracy.py --worst). */
#define KVEDGE_LOGIT_ERROR 8e-5f

/* Rows to prefetch, of a tile that comes later: with each block of the tile at hand one such block, of as many bytes as
 * that has (tokens x dim). They are never read. */
typedef struct {
  const char *const *blocks; /* (blocks of the tile at hand); NULL: nothing is prefetched */
  ptrdiff_t offset;          /* bytes from blocks[b] to the first */
  int in_order;              /* they lie side by side, behind those that were prefetched before */
} kvedge_prefetch;

/* One group of several. */
static inline kvedge_query kvedge_query_group(const kvedge_query *q, int g) {
  kvedge_query of_group = *q;
  of_group.dim = KVEDGE_GROUP, of_group.scale += g;
  if (q->values) of_group.values += g * q->group_stride;
  if (q->quantized) of_group.quantized += g * q->group_stride * KVEDGE_QUANTIZED_BYTES, of_group.offsets += 4 * g;
  return of_group;
}

/* How rows in blocks of ggml's hold elements, KVEDGE_GROUP a block: a scale, which is a half and may be negative, and codes of
 * 4 bits, in byte j those of elements j and j + 16. Where `fifth` is not 0 the four bytes before have a fifth bit of each,
 * element j's bit j. An element is the level of its code times the scale, and where mins_at is not 0 plus the block's minimum. */
typedef struct kvedge_block_codes {
  int8_t codes_at;   /* bytes from a block's scale to its codes */
  int8_t mins_at;    /* and to its minimum, a half, which cells do not look at */
  int8_t fifth;      /* what the fifth bit adds to a level; 0: there is none */
  int8_t levels[16]; /* by code */
} kvedge_block_codes;

/* Are there no fifth bits, and is each level the one before it plus 1? */
static inline int kvedge_codes_are_levels(const kvedge_block_codes *of) {
  return !of->fifth && of->levels[15] - of->levels[0] == 15;
}

/* A tile: the rows of up to KVEDGE_TILE tokens, of one group of channels of one KV head, or of several groups of
 * KVEDGE_GROUP channels (head batch: of KVEDGE_HEADS heads side by side), as a table of blocks of KVEDGE_BLOCK tokens,
 * wherever these lie. */
typedef struct {
  const char *const *blocks; /* (ceil(num_tokens / KVEDGE_BLOCK)) */
  ptrdiff_t offset;          /* bytes from blocks[b] to the first channel of the block's first row */
  ptrdiff_t token_stride;    /* bytes from a row to the next of the same block */
  int num_tokens;            /* 1..KVEDGE_TILE; rows past the last are not there, and may not be read */
  ptrdiff_t group_stride;    /* bytes from the first channel of a group to that of the next */
  int dim;                   /* channels, of one head */
  const float *scales;       /* one per token, 0..2^61, readable to the end of the last block and 0 from num_tokens on;
                              * NULL for formats without scales */
  ptrdiff_t scale_stride;    /* from the scales of a group to those of the next; of a head (head batch) */
  float factor;              /* what rows without scales are multiplied by: a power of two, at most 1 for values */
  int bits;                  /* of a code */
  const kvedge_block_codes *codes; /* of rows in blocks of ggml's, whose scales may be negative */
  int first; /* of runs, of a head's keys or values (formats/kivi.h): `blocks` are those that hold the
                              * tile's tokens, and `next` has one for each; where in the first run the tile
                              * begins. first + num_tokens is at most KVEDGE_TILE */
  kvedge_prefetch next;
} kvedge_tile;

static inline kvedge_tile kvedge_tile_group(const kvedge_tile *tile, int g) {
  kvedge_tile of_group = *tile;
  of_group.dim = KVEDGE_GROUP, of_group.offset += g * tile->group_stride, of_group.scales += g * tile->scale_stride;
  of_group.next.offset += KVEDGE_BLOCK * g * tile->group_stride;
  return of_group;
}

static inline const char *kvedge_tile_block(const kvedge_tile *tile, int token) {
  return tile->blocks[token / KVEDGE_BLOCK] + tile->offset;
}

/* Where row `token` of a tile starts. */
static inline const char *kvedge_tile_row(const kvedge_tile *tile, int token) {
  return kvedge_tile_block(tile, token) + token % KVEDGE_BLOCK * tile->token_stride;
}

/* Probabilities of a tile's tokens, as softmax leaves them. */
typedef struct {
  int num_queries;
  int planes;     /* of quantized probabilities: weights p[t] * scale[t] are rounded to 2^-24 of the tile's largest or
                   * better; to 2^-16 or 2^-8 if it is 2 or 1 (or to 2^-15 of the largest of 64 tokens, whose errors add
                   * up as those of 2^-16 of 256 do), small ones up or down as kvedge_dither has it */
  const float *p; /* (num_queries, KVEDGE_TILE), 0 from num_tokens to the end of the last block (cells of float32: to a
                   * multiple of 4) */
  char *scratch;  /* (KVEDGE_SCRATCH) as in kvedge_query */
  int by_32;      /* whether 2^-15 of the largest of 32 tokens suffices where planes is 3 */
} kvedge_probabilities;

/* Accumulators of the values. */
typedef struct {
  float *acc; /* (num_queries, stride) */
  ptrdiff_t stride;
  const float *rescale; /* (num_queries): what they are multiplied by first */
} kvedge_accumulators;

/* What a path has for a storage format: a row of these is its cells. Heads of a head batch have one query each, query i
 * for head i. */
typedef struct {
  /* Codes, scale and offsets of one query over one group of `dim` channels, as kvedge_query has them: of all planes, or
   * if `planes` is 1 of that of 8 bits, which scores then multiply. Its values are
   * x[d] * factor; `largest`, their largest magnitude, is at most 2. NULL where scores multiply floats. */
  void (*encode_query)(const float *x, int dim, float factor, float largest, int planes, int8_t *codes, float *scale,
                       int32_t *offsets);

  /* scores[i * KVEDGE_TILE + t] (+)= scale[t] * sum_d value[i][d] * key[t][d] for the queries and the tile's tokens,
   * adding where `accumulate` is not 0. Scores past the last token are undefined.
   * NULL, and those of groups too: the path has no kernels for the format, and its rows are decoded for those of float32. */
  void (*scores)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate);

  /* acc[i][d] = acc[i][d] * rescale[i] + sum_t p[i][t] * scale[t] * value[t][d] */
  void (*weighted_sum)(const kvedge_probabilities *p, const kvedge_tile *values, const kvedge_accumulators *to);

  /* The same for all groups of KVEDGE_GROUP channels of a head, two or more; NULL: groups are served one by one. */
  void (*scores_of_groups)(const kvedge_query *q, const kvedge_tile *keys, float *scores);
  void (*weighted_sum_of_groups)(const kvedge_probabilities *p, const kvedge_tile *values,
                                 const kvedge_accumulators *to);

  /* The same for a head batch; NULL: there are none. `to->stride` is dim. They want head_dim to
   * be a multiple of 16 from 64 to KVEDGE_HEADS_DIM, and one scale per row. */
  void (*scores_of_heads)(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate);
  void (*weighted_sum_of_heads)(const kvedge_probabilities *p, const kvedge_tile *values,
                                const kvedge_accumulators *to);
} kvedge_cell;

/* Sizes of a path, each measured on the CPUs that its file names. */
typedef struct {
  /* Bytes of keys of one head, and as many of values, that a tile has at most: what is read again for further queries
   * should stay in the first-level cache. Larger tiles cost less per token. */
  int step_bytes;
  /* Work of a microsecond: bytes read, times 3 + the queries that meet each of them. (Reading one costs as much as the
   * products of about three queries with it.) */
  int work_per_us;
} kvedge_tuning;

/* Rows of floats and of scales. */
typedef struct {
  /* max over i of the bits of |x[i]|: as a float the largest magnitude; >= 0x7f800000 tells of a NaN
   * or an infinity, since those order above every finite number as integers. n may be 0. */
  uint32_t (*abs_max_bits)(const float *x, size_t n);

  /* codes[i] = rint(x[i] * inverse), ties to even; the caller sees to |x[i] * inverse| <= 127.49. */
  void (*quantize)(const float *x, size_t n, float inverse, int8_t *codes);

  /* out[i] = codes[i] * scale */
  void (*dequantize)(const int8_t *codes, size_t n, float scale, float *out);

  /* out[c * out_stride + t] = row t's scales[c] * factor, for num_tokens rows of which 1 to KVEDGE_SCALE_COLUMNS
   * values of `type` are read, token_stride bytes apart. */
  void (*transpose_scales)(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride, int num_tokens,
                           int num_columns, float factor, float *out, ptrdiff_t out_stride);

  /* One step of the online softmax for num_queries rows of scores[KVEDGE_TILE]: with
   * m' = max(m, max_t s[t]),   p[t] = 2^((s[t] - m') * factor),   rescale = 2^((m - m') * factor)
   * scores become p, sum becomes sum * rescale + sum_t p[t], m becomes m'. Where no p would be above 2^KVEDGE_HEADROOM,
   * m' may be m instead, for which nothing need wait. A score of -INFINITY gives p = 0 whatever m is; from num_tokens
   * to the end of the last block p = 0.
   * m starts at -FLT_MAX, which does not stay where there is a score; factor > 0. Results below 2^-125 are 0: no
   * denormal is made. */
  void (*softmax)(float *scores, int num_queries, int num_tokens, const float *factor, float *max, float *sum,
                  float *rescale);

  /* to = to * keep + from * add, n elements that do not overlap. */
  void (*merge_row)(float *to, float keep, const float *from, float add, int n);

  /* out = row * factor * power, in this order (power, of two, may take the product to where it rounds), or the
   * nearest float that is neither infinite nor denormal. */
  void (*scale_row)(const float *row, int n, float factor, float power, float *out);

  /* Reads n bytes (a multiple of 512, 64-byte aligned) with the widest loads: the yardstick of
   * `kvedge info` and of the benchmarks. The result only keeps the loads alive. */
  uint64_t (*read_bytes)(const void *p, size_t n);
} kvedge_row_kernels;

/* Options that look at single logits: of one query, n tokens of a tile. Arrays are of n and do not overlap. */
typedef struct {
  /* Scores become logits, row[t] * factor + bias, or with a cap above 0 cap * tanh(logit / cap); finite ones, the
   * nearest where they would be infinite. */
  void (*to_logits)(float *row, int n, double factor, double bias, float cap);
  /* logits[t] += slope * (first + t), finite */
  void (*add_slope)(float *logits, int n, float slope, float first);
  /* logits[t] += bias[t], finite; -INFINITY where bias[t] is */
  void (*add_bias)(float *logits, int n, const float *bias);
  /* out[t] = bias[t] * factor, of halves; -INFINITY where bias[t] is, for factors above 0 */
  void (*widen_bias)(const uint16_t *bias, int n, float factor, float *out);
  /* row[t] = instead where mask[t] is 0 or bias[t] is -INFINITY; NULL: nowhere */
  void (*hide)(float *row, int n, const uint8_t *mask, const float *bias, float instead);
} kvedge_logit_kernels;

/* A token of the delta rule in one head. With k the rows of the state, for each column:
 *   update = beta (value - sum_k read_key[k] state[k]);   out = sum_k read_query[k] state[k] + product * update;
 *   state[k] = decay[k] state[k] + key[k] update */
typedef struct {
  float *state;     /* (key_dim, value_dim), rows `stride` apart */
  ptrdiff_t stride; /* floats */
  int key_dim, value_dim;
  const float *read_key, *read_query, *decay, *key; /* (key_dim) */
  float product, beta;
  const float *value; /* (value_dim) */
  float *out;         /* (value_dim) */
} kvedge_delta_token;

/* What csrc/state/ needs besides the cells of float32. */
typedef struct {
  /* out[i] = exp(x[i]) for x[i] <= 0, n of them, relative error below 1e-6; below -87 that of -87. */
  void (*decays)(const float *x, int n, float *out);

  /* n bfloat16 to float32, and back: to nearest, ties to even, to the largest finite number instead of an infinity. */
  void (*widen_bfloats)(const uint16_t *from, int n, float *to);
  void (*narrow_bfloats)(const float *from, int n, uint16_t *to);

  /* out[t][c] = act(bias[c] + sum_w weights[w * KVEDGE_TILE + c] * rows[t + w][c]) for n channels, n up to KVEDGE_TILE; bias
   * may be NULL; act(x) = x / (1 + exp(-x)) where `silu` is not 0. */
  void (*convolve)(const float *const *rows, const float *weights, const float *bias, int width, int num_tokens, int n,
                   int silu, float *const *out);

  void (*delta_token)(const kvedge_delta_token *token);

  /* A token of Mamba-2 in one head: state[p] = keep * state[p] + x[p] * b; out[p] = the product of state[p] and c; for
   * num_rows rows of `size` floats. */
  void (*mamba_token)(float *state, int num_rows, int size, float keep, const float *x, const float *b, const float *c,
                      float *out);
} kvedge_state_kernels;

typedef struct kvedge_kernels {
  const char *name; /* as in KVEDGE_ISA */
  kvedge_tuning tuning;
  kvedge_cell cells[KVEDGE_NUM_FORMATS]; /* by kvedge_format */
  kvedge_cell grids;                     /* of grids, by the bits of a tile: queries are floats; empty as in cells */
  kvedge_cell runs;                      /* of kivi2, kivi4 and kivi8: queries are floats, tiles tables of runs */
  kvedge_cell blocks;                    /* of ggml's blocks: there are kernels of all groups alone */

  const kvedge_row_kernels *rows;
  const kvedge_logit_kernels *logits;
  const kvedge_state_kernels *states;

  /* Multiplies n codes of 16 bits, of queries or weights, with as many bytes of keys or values, and adds up: in
   * registers alone, by the instructions that scores and weighted sums are made of here. The yardstick of arithmetic.
   * The result only keeps the sums alive. */
  uint64_t (*multiply)(size_t n);
} kvedge_kernels;

/* What is added to a token's weight before it is rounded to a code of 16 or 8 bits, where it is below KVEDGE_DITHERED:
 * -1/2 to 1/2, the bits of its place in the tile in reverse. Many tokens of the same small weight then keep their sum,
 * which rounding alone would make 0 or twice as large; larger weights are rounded alone, which errs less. (Ordered
 * dither, Bayer 1973.) */
enum { KVEDGE_DITHERED = 4 };
extern const float kvedge_dither[KVEDGE_TILE];

/* The paths of this processor family; system/dispatch.c knows which of them this CPU runs. */
extern const kvedge_kernels kvedge_kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const kvedge_kernels kvedge_kernels_avx2;
extern const kvedge_kernels kvedge_kernels_avxvnni;
extern const kvedge_kernels kvedge_kernels_avx512vnni;
#elif defined(__aarch64__) || defined(__arm__)
extern const kvedge_kernels kvedge_kernels_neon;
extern const kvedge_kernels kvedge_kernels_neondot;
extern const kvedge_kernels kvedge_kernels_neoni8mm;
#endif

#endif
