/* kvedge: a quantized key/value cache for decode attention on CPUs, and the attention on it.
 *
 * This header is the manual; read it from top to bottom.
 *
 *   kvedge_layer_config config;
 *   kvedge_layer_config_of("auto", &config);
 *   config.capacity = 4096, config.num_kv_heads = 8, config.head_dim = 64;
 *   kvedge_layer *layer;
 *   if (kvedge_layer_create(&config, NULL, &layer) != KVEDGE_OK) ...
 *   kvedge_layer_append(layer, keys, values, 1);         // float[num_kv_heads][head_dim] each
 *   kvedge_attend(layer, query, 1, 32, NULL, 0, out, NULL); // float[32][head_dim] in and out
 *   kvedge_layer_destroy(layer);
 *
 * All arrays are C-contiguous, in the order written in brackets, but for kvedge_array, which has
 * strides. Every call that can fail returns a kvedge_status and, failing, has changed nothing.
 * Nothing here prints, exits or keeps a pointer to an argument after it returned, except where
 * it says so.
 *
 * Threads: many may attend to one layer at the same time; one may append or drop first tokens at the same
 * time, since it writes only rows that no reader looks at yet. A call looks once at which tokens a layer
 * holds, when it begins. Everything that takes rows away (set_len, compact, destroy) needs the layer alone.
 */
#ifndef KVEDGE_H
#define KVEDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(KVEDGE_EXPORTS) &&                                                                                         \
    defined(__GNUC__) /* the library is being compiled: all that is declared here is exported */
#pragma GCC visibility push(default)
#endif

#define KVEDGE_VERSION_MAJOR 0
#define KVEDGE_VERSION_MINOR 2
#define KVEDGE_VERSION_PATCH 0

/* The version of the library that runs, such as "0.2.0"; the macros are those of the header that was compiled with. */
const char *kvedge_version(void);

/* ---- Status ------------------------------------------------------------------------------- */

typedef enum {
  KVEDGE_OK = 0,
  KVEDGE_ERROR_ARGUMENT,  /* a number out of its range, a NULL where an array is needed */
  KVEDGE_ERROR_CAPACITY,  /* the tokens do not fit any more */
  KVEDGE_ERROR_NONFINITE, /* a NaN or an infinity in keys, values or query */
  KVEDGE_ERROR_SCALE,     /* a row too large for what it is stored in: a float16 scale, a 16-bit float */
  KVEDGE_ERROR_MEMORY,    /* no memory, or too little of it was handed over */
  KVEDGE_ERROR_ISA,       /* KVEDGE_ISA names a path that this CPU cannot run */
  KVEDGE_ERROR_FILE,      /* a session file is damaged, or none; or the sink of one refused its bytes */
} kvedge_status;

/* One sentence about a status, never NULL. */
const char *kvedge_strerror(kvedge_status status);

/* ---- Threads and their stacks -------------------------------------------------------------- */

/* Bytes of stack that a thread needs free when it calls any function here: musl's threads have twice as many in all by
 * default. kvedge's own threads are started with more. */
enum { KVEDGE_STACK_BYTES = 64 << 10 };

/* ---- Kernel paths ------------------------------------------------------------------------- */

/* Picks a path by name ("scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neondot", "neoni8mm"), or with NULL
 * what the environment variable KVEDGE_ISA names, or if unset the best this CPU runs. Called once by
 * itself; call it to choose or to learn why not (*why_not, unless NULL, names what is missing). */
kvedge_status kvedge_select_isa(const char *name, const char **why_not);

const char *kvedge_isa_name(void);                                /* the path in use */
const char *kvedge_isa_compiled(int index);                       /* the paths in this library; NULL past the end */
int kvedge_isa_available(const char *name, const char **why_not); /* can this CPU run it? */

/* ---- Arrays ------------------------------------------------------------------------------- */

typedef enum { KVEDGE_TYPE_FLOAT32 = 0, KVEDGE_TYPE_FLOAT16 = 1, KVEDGE_TYPE_BFLOAT16 = 2 } kvedge_element_type;

/* Rows of channels, one for each token and head, as they lie in the caller's memory: the row's channels side by side,
 * the rows at any distance. Address and strides are multiples of the element's size. 16-bit elements are converted
 * exactly when they are read, and rounded to nearest, ties to even, when they are written (to the largest finite number
 * where that would be infinite). An array that is only read is not written to; one that is written to has no two rows
 * that share memory: its larger stride passes over all that the smaller one reaches. */
typedef struct {
  void *data; /* row of token t and head h: (char *)data + t * token_stride + h * head_stride */
  kvedge_element_type type;
  ptrdiff_t token_stride, head_stride; /* in bytes; may be 0 or negative */
} kvedge_array;

/* ---- A layer ------------------------------------------------------------------------------ */

/* The keys and values of one attention layer for the tokens 0..len-1. Token 0 is the first that has not been dropped;
 * it lies in row `start` of the arrays, the others in the rows after it.
 *
 * Storage is token-major: codes[token][num_kv_heads][head_dim],
 * scales[token][num_kv_heads][groups]; values have rows of value_head_dim where that is given.
 * KVEDGE_INT8 keeps a signed byte per value and one scale per group of a row (by default the
 * row): value = code * scale. KVEDGE_FLOAT32 keeps the values, KVEDGE_FLOAT16 and
 * KVEDGE_BFLOAT16 round them to 16 bits; KVEDGE_FP8_E4M3 and KVEDGE_FP8_E5M2 to the 8 bits of
 * OCP's types, where what lies beyond the largest, 448 and 57344, becomes the largest and is no
 * error. KVEDGE_INT4 keeps one of 16 levels per value, two to a byte, and a scale per group:
 * value = level * scale. A group of 32 loses less than a row does. Values bear it better than
 * keys: docs/formats.md. KVEDGE_Q8_0 has the bytes of ggml's q8_0, for caches of llama.cpp: of
 * each 32 channels a half, their scale, and 32 signed bytes; no scales apart, no groups or
 * scales of the config, and rows of a multiple of 32 channels. KVEDGE_KIVI2, _KIVI4 and _KIVI8
 * encode runs of 32 tokens together, keys with a step and a smallest value per channel and run,
 * values per token and 64 channels, as halves: codes[run][num_kv_heads][bytes of a run]
 * (csrc/formats/kivi.c has them; arrays aligned to 2 bytes). They have no groups or scales of
 * the config, keys of them no key offset or key scale, and elements of up to 65504; the other
 * side of the layer may be of rows. The capacity is a multiple of 32, and so is what append and
 * write are given, from such a position on, and the size of blocks of a pool; drop_first,
 * compact, keep and shift are refused. The last tokens, until a run is full, lie in a layer of
 * another format: kvedge_part. With recent_format (below) none of this is the caller's concern.
 * KVEDGE_GRID2 to KVEDGE_GRID8 keep one of 2^bits levels per value,
 * as bits one after the other, and one scale per group: value = level * scale. Levels suit a
 * normal distribution: rotate rows by a random orthogonal matrix first, the query as the keys,
 * and the result back as values were. The paths
 * of x86 have kernels for them; elsewhere they are decoded block by block.
 *
 * With `recent` or `sinks` (or recent_format) a layer has three ranges: the first `sinks` tokens and the last ones lie in
 * recent_format besides, and are read there; all others are read from the body, which is of `format`. A query row reads the
 * `recent` tokens that end with it so, each row of a prompt its own, where recent_room allows; the getters those that end with
 * the last token. Such a layer is appended to, attended to, cut and copied as any other, and takes tokens of any number in
 * runs, too, a run being encoded from its tokens as recent_format has them once it is whole. 64 tokens more than are read are kept,
 * so that going back by as many leaves no trace; further back, what is read stays as it is stored. An append waits for calls
 * that read, once in 64 tokens or fewer. Of runs the capacity may be any, and arrays hold whole ones, as do rows beside them.
 * kvedge_layer_write and _filled, pools and kvedge_slices are for other layers. */
typedef struct kvedge_layer kvedge_layer;

typedef enum {
  KVEDGE_INT8 = 0,
  KVEDGE_FLOAT32 = 1,
  KVEDGE_FLOAT16 = 2,
  KVEDGE_BFLOAT16 = 3,
  KVEDGE_FP8_E4M3 = 4,
  KVEDGE_FP8_E5M2 = 5,
  KVEDGE_INT4 = 6,
  KVEDGE_KIVI2 = 34, /* 32 + bits; not counted below */
  KVEDGE_KIVI4 = 36,
  KVEDGE_KIVI8 = 40,
  KVEDGE_GRID2 = 66, /* 64 + bits; not counted below */
  KVEDGE_GRID3,
  KVEDGE_GRID4,
  KVEDGE_GRID5,
  KVEDGE_GRID6,
  KVEDGE_GRID7,
  KVEDGE_GRID8,
  KVEDGE_Q8_0 = 104, /* 96 + ggml's number of the type; not counted below */
  KVEDGE_Q4_0 = 98,  /* of rows in memory of others alone, as the next ones */
  KVEDGE_Q4_1 = 99,
  KVEDGE_Q5_0 = 102,
  KVEDGE_Q5_1 = 103,
  KVEDGE_IQ4_NL = 116,
} kvedge_format;
enum { KVEDGE_NUM_FORMATS = 7 };
typedef enum { KVEDGE_SCALE_FLOAT32 = 0, KVEDGE_SCALE_FLOAT16 = 1 } kvedge_scale_type;

typedef struct {
  kvedge_format format;
  kvedge_scale_type scale_type;
  int64_t capacity;   /* tokens, 1..2^40 */
  int num_kv_heads;   /* 1..65536 */
  int head_dim;       /* channels, 1..1024 */
  int group_size;     /* channels that share a scale; 0, or more than a row has: the whole row */
  int value_head_dim; /* channels of a value, where they are not head_dim: 1..1024; 0: head_dim */
  int value_format;   /* KVEDGE_VALUES(a kvedge_format) of the values, where `format` is that of the keys; 0: both */
  int value_rotation; /* 1: values are stored rotated; 0: as they are. What attention and kvedge_layer_get give is
                       * rotated back. A Hadamard matrix spreads what one channel has over the 2^k, the most that
                       * divide value_head_dim, so that all share what encoding loses. Values that are not finite once
                       * they are rotated are refused */
  int recent, sinks;  /* last and first tokens that are read in recent_format, 0..65536 */
  int recent_format;  /* KVEDGE_RECENT(a kvedge_format) of those: float32, float16 or bfloat16. 0: float16 where recent
                        * or sinks are given, else there are none. */
  int recent_room;    /* tokens appended at once that all stay in recent_format until the next ones come, 1..2^30; of
                        * more the last ones do. 0: 64 */
} kvedge_layer_config;
#define KVEDGE_VALUES(format) (1 + (int)(format))
#define KVEDGE_RECENT(format) (1 + (int)(format))

/* How tokens are stored by a name; the config is else 0: capacity, num_kv_heads and head_dim are the caller's to set. Bits are
 * those of a value at head_dim 64, without first and last tokens; docs/formats.md has what each loses.
 *   "auto"  8.75 bits: keys in KVEDGE_KIVI8, values rotated in KVEDGE_INT8, with recent and sinks
 *   "small"  4.75 bits: both in KVEDGE_KIVI4, with sinks and more recent tokens
 *   "int8"  8.5 bits: rows of KVEDGE_INT8 alone
 * KVEDGE_ERROR_ARGUMENT: there is no such name. */
kvedge_status kvedge_layer_config_of(const char *name, kvedge_layer_config *config);

/* The arrays of a layer; each followed by nothing, aligned to 64 bytes for speed. */
typedef struct {
  void *key_codes, *value_codes;   /* [capacity][num_kv_heads][head_dim or value_head_dim], int8_t, float, or
                                    * floats of 16 or 8 bits */
  void *key_scales, *value_scales; /* [capacity][num_kv_heads][groups of such a row], float or float16; NULL where the
                                    * format has no scales */
  void *first_keys, *first_values; /* [sinks][num_kv_heads][head_dim or value_head_dim] in recent_format */
  void *last_keys,
      *last_values; /* [kvedge_layer_last_rows(config)], as first ones; NULL where there are no such rows */
} kvedge_slabs;
int64_t kvedge_layer_last_rows(const kvedge_layer_config *config); /* 0: no last tokens; -1: the config is not valid */

/* Size, then init on memory of the caller's, aligned to 64 bytes: header and arrays in one block, which need not be cleared
 * and is committed by the system only as tokens arrive. With `slabs` the arrays lie there, and are kept, not copied;
 * `memory` needs kvedge_layer_header_bytes(config) then, aligned as malloc's. */
size_t kvedge_layer_bytes(const kvedge_layer_config *config);        /* 0: the config is not valid */
size_t kvedge_layer_header_bytes(const kvedge_layer_config *config); /* as well */
kvedge_status kvedge_layer_init(void *memory, size_t bytes, const kvedge_layer_config *config,
                                const kvedge_slabs *slabs, kvedge_layer **layer);

/* The convenience: memory of an allocator of the caller's, which lives as long as the layer. NULL: from the heap, or pages of
 * the system's for 64 KiB and more (small ones, and huge ones where an array is long, whatever the policy for huge pages
 * is). Destroy only what create made. */
typedef struct {
  void *(*allocate)(void *context, size_t bytes); /* aligned to 64 bytes, need not be cleared; NULL: there is none */
  void (*release)(void *context, void *memory, size_t bytes);
  void *context;
} kvedge_allocator;
kvedge_status kvedge_layer_create(const kvedge_layer_config *config, const kvedge_allocator *allocator,
                                  kvedge_layer **layer);
void kvedge_layer_destroy(kvedge_layer *layer);

/* Stores keys minus this vector, float[num_kv_heads][head_dim], which changes no attention result
 * and helps INT8 where keys have large constant channels. Only while the layer is empty; NULL takes
 * it away; formats with scales only (KVEDGE_INT8). The vector is copied. */
kvedge_status kvedge_layer_set_key_offset(kvedge_layer *layer, const float *key_offset);

/* Stores keys divided by this, float[num_kv_heads][head_dim], positive and finite, after the offset is taken off; the
 * query is multiplied by it once per call, so that results are the same in algebra. A scale that is large where keys
 * are keeps a few large channels from costing the others their precision. Any format; only while the layer is empty;
 * NULL takes it away. Copied. KVEDGE_ERROR_ARGUMENT: not positive; KVEDGE_ERROR_NONFINITE: not finite. Keys so
 * divided that are not finite are refused by append. */
kvedge_status kvedge_layer_set_key_scale(kvedge_layer *layer, const float *key_scale);

/* Appends num_tokens tokens, keys float[num_tokens][num_kv_heads][head_dim] and values
 * float[num_tokens][num_kv_heads][value_head_dim]; all of them or none. */
kvedge_status kvedge_layer_append(kvedge_layer *layer, const float *keys, const float *values, int64_t num_tokens);

/* Appends num_tokens tokens to each of num_layers layers (one, or more), to layer i those of keys[i] and values[i], arrays with
 * strides, float32 or 16-bit: to all of them or, also where one lacks room, to none. The layers may differ in all but have
 * to be different ones. */
kvedge_status kvedge_layers_append(kvedge_layer *const *layers, const kvedge_array *keys, const kvedge_array *values,
                                   int num_layers, int64_t num_tokens);

int64_t kvedge_layer_len(const kvedge_layer *layer);

/* Length, and the row of token 0, both of one moment; for a reader beside a writer that drops. */
int64_t kvedge_layer_range(const kvedge_layer *layer, int64_t *start);

/* Forgets the first tokens: token i becomes token i - num_tokens. No row is moved, and beside
 * readers this is as safe as append. The rows are free again only after compact: a layer that is
 * appended to and dropped from comes to the end of its arrays, and append returns
 * KVEDGE_ERROR_CAPACITY, while it holds fewer tokens than its capacity. */
kvedge_status kvedge_layer_drop_first(kvedge_layer *layer, int64_t num_tokens);

/* Moves the tokens to row 0. Needs the layer alone. With a capacity of twice what a sliding window holds, one row is
 * moved per token on average. */
kvedge_status kvedge_layer_compact(kvedge_layer *layer);

/* Sets the number of tokens. Fewer: the last ones are forgotten. More: the rows up to len must have
 * been filled in by the caller (a loaded file, a copy), finite and with scales >= 0. */
kvedge_status kvedge_layer_set_len(kvedge_layer *layer, int64_t len);

/* Up to so many tokens set_len finds as they were written (or filled in), whatever len is now. The writer's to ask. */
int64_t kvedge_layer_written(const kvedge_layer *layer);

/* Quantizes tokens to any position within capacity, all of them or none; len stays as it is. */
kvedge_status kvedge_layer_write(kvedge_layer *layer, int64_t position, const float *keys, const float *values,
                                 int64_t num_tokens);

/* Tells that the caller has filled in the rows of these tokens himself: finite, scales >= 0. */
kvedge_status kvedge_layer_filled(kvedge_layer *layer, int64_t position, int64_t num_tokens);

/* Where the tokens of a layer with recent or sinks lie; rows count from the start of the arrays of codes, whose row 0 is the
 * first of a run. All tokens are there as rows, or as whole runs of 32; first and last ones lie apart as well. */
typedef struct {
  int64_t start, stop; /* its tokens are rows start..stop-1 */
  int64_t
      last_from; /* those from this row on also lie among the last tokens, whose row 0 has that of row last_row. Runs end
                                 * with the last whole one, or where last tokens do not reach back to it, with the tokens */
  int64_t last_row;
  int64_t first_row, num_first; /* so many from this row on also lie in row 0 and on of the first tokens */
  int64_t first_stop;           /* tokens that are appended below this row become first tokens: sinks */
} kvedge_ranges;
void kvedge_layer_get_ranges(const kvedge_layer *layer, kvedge_ranges *ranges);
/* Tells that the caller has filled in all these rows, finite and with scales >= 0; needs the layer alone. */
kvedge_status kvedge_layer_set_ranges(kvedge_layer *layer, const kvedge_ranges *ranges);
/* Makes `layer`, which is empty and whose arrays hold those of `from` from a row on (of runs a multiple of 32), hold its tokens:
 * lengths and bounds, first and last tokens are taken over; rows are not looked at, and key vectors stay. */
kvedge_status kvedge_layer_adopt(kvedge_layer *layer, const kvedge_layer *from, int64_t row);

/* Writes the keys (values: 1) of tokens start..stop-1 to out, float[stop-start][num_kv_heads][head_dim
 * (value_head_dim)]. first_row: the row of token 0, as kvedge_layer_range told it, though tokens may have been dropped
 * since; -1: that of now. */
kvedge_status kvedge_layer_get(const kvedge_layer *layer, int values, int64_t first_row, int64_t start, int64_t stop,
                               float *out);

/* ---- Editing a layer ---------------------------------------------------------------------- */

/* Makes `to`, which is empty, hold the tokens, the key offset and the key scale of `from`; a
 * snapshot, a beam. The two are of one config but for the capacity: KVEDGE_ERROR_CAPACITY if
 * `to` is too small. `from` may be appended to meanwhile. */
kvedge_status kvedge_layer_copy(const kvedge_layer *from, kvedge_layer *to);

/* Room for num_tokens more: moves the tokens to row 0 where half of the rows are free then, else
 * to a layer with twice the room, which *layer becomes, the old one being destroyed. So
 * appending costs O(1) per token, whether a layer grows or slides. For layers that create made;
 * needs the layer alone. On KVEDGE_ERROR_MEMORY nothing has changed.
 *
 * A layer that attends within a window: after appending n rows and attending to them,
 *     int64_t unseen = kvedge_layer_len(layer) - (window - 1);
 *     if (unseen > 0) kvedge_layer_drop_first(layer, unseen);
 * and kvedge_layer_reserve(&layer, n) before the next append: it holds at most about four windows. */
kvedge_status kvedge_layer_reserve(kvedge_layer **layer, int64_t num_tokens);

/* Drops all tokens but these, which close ranks: strictly increasing positions, 0 to len - 1. Needs the layer alone. */
kvedge_status kvedge_layer_keep(kvedge_layer *layer, const int64_t *tokens, int64_t num_tokens);

/* How keys are turned that move to other positions: pair i of channels through an angle.
 * Channels (2i, 2i + 1) are a pair if interleaved (llama2.c, GPT-J), else (i, i + dims / 2) are
 * (Hugging Face's Llama, GPT-NeoX). */
typedef struct {
  int dims;                     /* channels that are rotated, the first ones of a head: even, 2 to head_dim */
  int interleaved;              /* 0 or 1 */
  const float *cosines, *sines; /* [dims / 2] of the angles */
} kvedge_rotation;

/* Cosines and sines [dims / 2] of a move by `delta` positions: angles delta * base^(-2i / dims), in double precision.
 * Models that scale their frequencies bring their own. */
kvedge_status kvedge_rotation_angles(double base, int dims, int64_t delta, float *cosines, float *sines);

/* Rotates the keys of tokens start..stop-1: read, turned in float, stored again. All of them or,
 * where one would not fit what it is stored in (KVEDGE_ERROR_NONFINITE, KVEDGE_ERROR_SCALE),
 * none. After drop_first or keep, it brings the rest to positions that the model knows
 * (llama.cpp's context shift). Every call rounds the keys once more, which many small moves add
 * up to: rather keep the sum of moves, append keys turned back by it, and turn the query by
 * kvedge_part.turns, which costs nothing (Python's shift does so). Needs the layer alone. */
kvedge_status kvedge_layer_shift(kvedge_layer *layer, int64_t start, int64_t stop, const kvedge_rotation *rotation);

/* The config with nothing left open (no 0 in it), and the arrays, unless NULL. */
void kvedge_layer_describe(const kvedge_layer *layer, kvedge_layer_config *config, kvedge_slabs *slabs);

/* ---- Sessions ----------------------------------------------------------------------------- */

/* A session file holds what layers hold, as they store it: the file that KVCache.save of Python
 * writes and KVCache.load reads, byte for byte (safetensors; kvedge/files/session.py has the names).
 * Files are the caller's: writing hands over bytes, reading looks at memory, such as a mapped
 * file. No call here takes memory. KVEDGE_GRID2 to KVEDGE_GRID8 are in no session.
 *
 *   const kvedge_session session = {.num_layers = n, .length = kvedge_layer_len(layers[0])};
 *   kvedge_session_write(&session, layers, my_fwrite, file);
 *
 *   kvedge_session_reader_bytes(data, bytes, &needed, &why);   // data: a whole file; why: what is wrong with it
 *   kvedge_session_read(data, bytes, memory, needed, &reader, &why);
 *   const kvedge_session *held = kvedge_session_held(reader);
 *   for every layer:  kvedge_layer_create(&config, NULL, &layers[i])   // held->layers[i].config, with the capacity you want
 *   kvedge_session_load(reader, layers, &why);
 *
 * Layers with recent or sinks are in files whole, and so are those in runs that have a recent_format. Of the last tokens a
 * file holds those that are kept: up to recent + 64, or in runs 96 where that is more. A file of Python's whose recent_dtype is not
 * float32, float16 or bfloat16 is refused. */
typedef struct {
  const char *key, *value; /* UTF-8, which no NUL ends */
  size_t key_bytes, value_bytes;
} kvedge_session_text;

typedef struct {
  int64_t window; /* tokens that a query row sees, 1..2^40; 0: all */
  /* Tokens before the first that the layer holds; with a window, whose last window - 1 tokens are held. In runs
   * kvedge_layer_range's start is as far from a multiple of 32. */
  int64_t dropped;
  /* These a reader tells; writing asks the layer. */
  kvedge_layer_config config; /* capacity: length - dropped, in runs from the first one's run on; or 1 */
  int has_key_offset, has_key_scale;
} kvedge_session_layer;

/* An array of a layer that holds a state: what linear attention, Mamba or a convolution keeps of the past, of one size
 * whatever the context. Such a layer is no kvedge_layer. Its arrays are all of the session's last token. */
enum { KVEDGE_MAX_STATE_ARRAYS = 8, KVEDGE_MAX_STATE_AXES = 8, KVEDGE_MAX_STATE_NAME = 32 };
typedef struct {
  int layer; /* its number among all layers of the model, those of keys and values counted too: these are the others */
  char name[KVEDGE_MAX_STATE_NAME + 1]; /* a C identifier; a layer has 1 to 8 of different names */
  kvedge_element_type type;
  int num_axes;                         /* 1..8 */
  int64_t shape[KVEDGE_MAX_STATE_AXES]; /* 1 and more each */
  const void *data;                     /* one row after the other; a reader's lies in the file, at any address */
} kvedge_session_state;

typedef struct {
  int num_layers;      /* of keys and values: 1..4096, with all that hold states; 0: there are states alone */
  int64_t length;      /* tokens of the session, which each layer holds but for those it has dropped */
  int64_t max_seq_len; /* tokens that a KVCache made of it has room for, length..2^40; 0: it grows */
  /* Not 0: a KVCache made of it takes key offsets (key scales, of formats of up to 8 bits) from
   * the first tokens of layers that have none. */
  int auto_key_offset, auto_key_scale;
  const kvedge_session_layer *layers;  /* [num_layers]; writing, NULL: none has a window */
  const kvedge_session_text *metadata; /* [num_metadata] of the user's own, ascending by the bytes of their keys */
  int num_metadata;
  const kvedge_session_state *states; /* [num_states], ascending by layer, then by the bytes of their names */
  int num_states;
} kvedge_session;

/* Takes the next bytes of a file; not 0 ends the writing with KVEDGE_ERROR_FILE. */
typedef int (*kvedge_session_sink)(void *context, const void *data, size_t bytes);

/* Bytes of the file; 0: it cannot be written. */
size_t kvedge_session_bytes(const kvedge_session *session, kvedge_layer *const *layers);

/* Writes the first length - dropped tokens of each layer. Others may append meanwhile, but
 * not to layers with a recent_format, and drop nothing. KVEDGE_ERROR_ARGUMENT: a number
 * out of its range, a layer with fewer tokens, or in runs without a recent_format, metadata that is
 * no UTF-8 or not in order, states that are not in order or lie where there is no layer. The tokens are read twice, at first for their digest. */
kvedge_status kvedge_session_write(const kvedge_session *session, kvedge_layer *const *layers, kvedge_session_sink sink,
                                   void *context);

/* Reading trusts nothing in `data`, which must stay as it is meanwhile. Where it is refused
 * (KVEDGE_ERROR_FILE) nothing has changed, and *why, unless NULL, says in a sentence what is
 * wrong. */

/* The memory that reading needs, aligned to 16 bytes: some for each layer, and for the user's
 * metadata at most four times what it takes in the file. */
kvedge_status kvedge_session_reader_bytes(const void *data, size_t bytes, size_t *needed, const char **why);

typedef struct kvedge_session_reader kvedge_session_reader;

/* Reads what the file says it holds, in `memory`; data and memory are the reader's until it is used no more. */
kvedge_status kvedge_session_read(const void *data, size_t bytes, void *memory, size_t memory_bytes,
                                  kvedge_session_reader **reader, const char **why);
const kvedge_session *kvedge_session_held(const kvedge_session_reader *reader);

/* Compares all of the file with its digest, checks every number, then fills the layers: all of
 * them or none. They are different ones, empty and of the configs that the reader tells; what
 * capacity and recent_room they have is theirs. Key offset and key scale become the file's. Nobody
 * reads the layers meanwhile. States are checked too: from then on the caller may copy what the reader tells of them. */
kvedge_status kvedge_session_load(const kvedge_session_reader *reader, kvedge_layer *const *layers, const char **why);

/* Files of a prefix store, which kvedge.PrefixStore of Python writes (docs/prefix_store.md): blocks of 256 tokens, and
 * checkpoints, which have the tokens behind the last block, and what windows, first and last tokens need besides. A sequence is a
 * path of them, each of which names the one before: blocks from the first on, then a checkpoint or none. docs/c_api.md says how
 * to keep a store.
 *
 *   of every file:  kvedge_session_prefix_bytes(data, bytes, &needed, &why);
 *                   kvedge_session_read_prefix(data, bytes, memory, needed, &path[i], &why);
 *   kvedge_session_load_prefix(path, num_files, layers, num_layers, &why); */
typedef struct {
  int is_checkpoint;      /* 0: a block */
  int64_t start, num_ids; /* the position of its first token, and how many it has: 0..256 */
  const void *ids;        /* int32_t[num_ids], little-endian, at any address of the file */
  char digest[65];        /* SHA-256 of what it holds, which is its name too; ended by a NUL */
  char parent[65];        /* that of the file before; "": there is none */
  const char *identity;   /* of a first file: what computed the tokens, and how they are stored; else "" */
  const char *variant;    /* how keys are stored, where tokens decide that; the same in all of a path */
  size_t identity_bytes, variant_bytes; /* of these, UTF-8 that no NUL ends */
  int num_layers;                       /* it has arrays of none but the first ones */
  int is_checked; /* 1: loading has compared the file with its digest, and does so no more; at first 0 */
} kvedge_session_prefix;

/* The memory that reading needs, aligned to 16 bytes, and what a file says of itself, in `memory`; data and memory are the
 * prefix's until it is used no more. Nothing of the file but its header and ids is looked at. Files with other arrays than those of
 * keys and values (states, index keys, llama.cpp's) are refused. */
kvedge_status kvedge_session_prefix_bytes(const void *data, size_t bytes, size_t *needed, const char **why);
kvedge_status kvedge_session_read_prefix(const void *data, size_t bytes, void *memory, size_t memory_bytes,
                                         kvedge_session_prefix **prefix, const char **why);

/* Fills layers with the tokens of a path, which are those before the end of its last file: all of them or none, after files
 * have been compared with their digests, and every number is checked. Layer i is that of number i; they are different ones,
 * empty, and of the configs that the sequence was stored from, with room for it. Ids and identity are the caller's to compare.
 * Key offset and key scale become those of the files. A layer that had dropped tokens holds fewer, its last ones: the caller
 * looks whether its window is there. Layers with recent, sinks or a window, or in runs, need a path that ends with a
 * checkpoint; of others kvedge_layer_set_len then gives any beginning. A file is in one call at a time, and nobody reads the
 * layers meanwhile. */
kvedge_status kvedge_session_load_prefix(kvedge_session_prefix *const *path, int num_files, kvedge_layer *const *layers,
                                         int num_layers, const char **why);

/* ---- Attention ---------------------------------------------------------------------------- */

/* Start from kvedge_attention_defaults() and change what is needed. */
enum { KVEDGE_PRECISION_AUTO = -1 }; /* kvedge_attention_options.precision_bits */

typedef struct {
  float scale;               /* of the logits; NaN: 1 / sqrt(head_dim) */
  int causal;                /* 1: row i of n sees tokens 0..len-n+i; 0: all tokens */
  int64_t window;            /* the row at position p sees tokens p-window+1..p; 0: no window */
  int64_t sink_tokens;       /* the first tokens, seen besides the window */
  const float *sink_logits;  /* [num_heads]: exp(logit) joins the denominator; NULL: none */
  float softcap;             /* c: logits become c * tanh(logit / c); 0: none */
  const float *alibi_slopes; /* [num_heads]: slope * (token - p) is added; NULL: none */
  const uint8_t *mask;       /* mask[head * strides[0] + row * strides[1] + token * strides[2]] != 0: seen */
  int64_t mask_strides[3];   /* in elements; 0 repeats */
  const float *bias;         /* added to the logits, found as mask is; -INFINITY hides; NULL: none */
  int64_t bias_strides[3];
  int precision_bits; /* of queries and probabilities in integer products: 24, 16, 8 (the fewer the
                             * faster; docs/numerics.md has the errors), or 0: 16 where the contract
                             * (2e-4) allows, else 24: for queries where logits are small enough, for
                             * probabilities past the first 1,024 tokens if value_head_dim is 64 or more;
                             * or KVEDGE_PRECISION_AUTO: 8 for keys and for values that are stored as int4, whose own
                             * error is more than ten times that of products of 8 bits, else as 0 */
  int64_t num_tokens; /* the call reads tokens 0..num_tokens-1 of a layer, and its query rows are those of the
                             * last of them; 0: all that the layer holds when the call begins. Where another thread
                             * appends, set it to the length that masks, biases and room for slices were made for.
                             * Sequences of a pool have their own len; leave it 0 there. */
  int64_t
      start; /* the first token that is seen, 0 to len: the padding before it is neither read nor paid for. Positions
                  * and causality stay as they are; sink_tokens count from it. A row that sees nothing, as one before
                  * it, gives out = 0 and lse = -INFINITY (but for sink_logits). */
  int64_t first_row;         /* with num_tokens, where another thread also drops tokens: the row of token 0, as
                      * kvedge_layer_range told it together with the length; -1: that of the layer when the call begins */
  const uint16_t *half_bias; /* a bias in float16, found by bias_strides, where `bias` is NULL */
  const float *bias_factors; /* [num_heads], positive and finite: what a head's bias, of either type, is multiplied by,
                              * such as ALiBi's slopes; NULL: 1 */
  /* [num_rows][token_heads][token_width]: the tokens that a row reads, or its query heads of each KV head, and no others: at
   * least one, ascending, up to the row's own; -1 in unused places at the end. NULL: all tokens. Calls on layers and parts take
   * it, causal and without window, mask, bias, slopes and start; kvedge_slices does not. It stays as it is during the call. */
  const int32_t *tokens;
  int token_heads; /* 1, or num_kv_heads */
  int64_t token_width;
} kvedge_attention_options;

void kvedge_attention_defaults(kvedge_attention_options *options);

/* out[num_rows][num_heads][value_head_dim] = attention of query[num_rows][num_heads][head_dim], the rows
 * being those of the last num_rows tokens; num_heads a multiple of num_kv_heads, whose query heads
 * lie side by side. `lse`, if not NULL, float[num_rows][num_heads], gets the logarithm of the
 * softmax denominator, with which results over parts of a context merge exactly.
 * options NULL: defaults. num_threads 1: this thread only; 0: the pool's default; n: at most n.
 * num_rows 0: nothing is read or written. */
kvedge_status kvedge_attend(const kvedge_layer *layer, const float *query, int64_t num_rows, int num_heads,
                            const kvedge_attention_options *options, int num_threads, float *out, float *lse);

/* One of several calls: kvedge_attend with strides, and with options of its own; on a layer, on parts of layers, or on
 * rows in memory of others (see below). */
typedef struct {
  const kvedge_layer *layer;
  kvedge_array query; /* (num_rows, num_heads, head_dim), of the layer's last num_rows tokens */
  int64_t num_rows;
  int num_heads;                           /* a multiple of the layer's num_kv_heads */
  kvedge_array out;                        /* as query; overlaps nothing that any of the calls reads or writes */
  float *lse;                              /* [num_rows][num_heads] or NULL */
  const kvedge_attention_options *options; /* NULL: defaults */
  const struct kvedge_part *parts;         /* where `layer` is NULL: [num_parts], what is attended to instead */
  int num_parts;                           /* 0 to 4096; 0: `layer` */
  const struct kvedge_rows_cache *rows;    /* where both are missing; for kvedge_slices alone, with lse NULL */
  int joins; /* 1: to the call before, of rows too, whose query rows see these tokens besides: in another format, or elsewhere.
              * Rows, heads and dims are as there; query and out are that call's, whose out gets the merged result; options are
              * its own, but for sink_logits, which count once. Up to 7 join a call */
} kvedge_attention_call;

/* Some tokens of a layer, at their place in a sequence whose tokens lie in several layers: first
 * and last ones in a format that loses less, shards of a long context, a prefix that others read
 * too. They lie side by side, or in blocks of a pool (see "Paged" below). Parts follow one
 * another, in the order of their positions, and have heads and widths in common, but formats,
 * key offsets and key scales of their own. Causality, windows, sinks, slopes, masks, biases and
 * options.start mean positions of the sequence; of positions that are in no part nothing is
 * seen. The sequence's length, whose last tokens the query rows are of, is options.num_tokens,
 * or if that is 0 the end of the last part; so one shard alone is a call with one part, and
 * `lse` merges several. Results of the parts are merged in double. */
typedef struct kvedge_part {
  const kvedge_layer *layer;
  int64_t first_row;     /* of its first token, as in kvedge_attention_options; -1: that of the layer's token 0 */
  int64_t num_tokens;    /* 0: it is passed over */
  int64_t position;      /* of its first token in the sequence */
  const int32_t *blocks; /* or NULL; [ceil((first_row + num_tokens) / block_size)]: row r, here 0 or more, is row
                          * r % block_size of block blocks[r / block_size]; blocks before first_row's are not looked at */
  int64_t block_size;    /* a multiple of 32 where tokens lie in runs */
  const kvedge_rotation *turns; /* [num_turns], which the query gets before it meets these keys, one after the other: a
                                 * query that is turned by -delta positions attends as if the keys were moved by delta */
  int num_turns;
} kvedge_part;

/* kvedge_attend for every call, such as for the rows of a batch, which are layers of their own:
 * the work of all is shared out over the threads in one go. Layers may differ in length, format
 * and shape, and one may occur several times. Nothing is written unless all arguments are good. */
kvedge_status kvedge_attend_layers(const kvedge_attention_call *calls, int num_calls, int num_threads);

/* logits[num_heads][num_tokens] of one query row against num_tokens tokens from first_row on (-1: from token 0):
 * scale * query . key, before any option. KVEDGE_ERROR_ARGUMENT if the layer holds fewer. */
kvedge_status kvedge_scores(const kvedge_layer *layer, const float *query, int num_heads, float scale,
                            int64_t first_row, int64_t num_tokens, float *logits);

/* The same in slices, for a runtime that has threads of its own and memory of its own; calls are planned and run together:
 *
 *   size_t bytes = kvedge_slices_bytes(calls, num_calls, num_threads);
 *   kvedge_slices_init(memory, bytes, calls, num_calls, num_threads, &slices);
 *   for every slice below kvedge_slices_count(slices), on any thread, at the same time:
 *     kvedge_slices_run(slices, slice, next, thread);
 *
 * Once all slices have run, all is written. Nothing is allocated. What calls point to stays as it is until then. Results
 * do not depend on the threads, to the bit. Calls are on a layer or on rows in memory of others. */
typedef struct kvedge_slices kvedge_slices;

/* Bytes for calls; 0: a call is not valid. What query and out point to is not looked at. options.num_tokens may be more than a
 * layer holds, up to its capacity: bytes do not shrink as tokens are added, so those of the longest context are enough for
 * all of it. A thread takes some 300 KiB of them. */
size_t kvedge_slices_bytes(const kvedge_attention_call *calls, int num_calls, int num_threads);
/* Checks and plans calls in memory aligned to 64 bytes. A failure has written nothing to any `out`. */
kvedge_status kvedge_slices_init(void *memory, size_t bytes, const kvedge_attention_call *calls, int num_calls,
                                 int num_threads, kvedge_slices **slices);
int kvedge_slices_count(const kvedge_slices *slices);
/* Runs a slice, each of them once, on thread 0..num_threads-1, which runs one at a time. `next` is the slice that the
 * thread will run after it, whose start is prefetched; -1: not known. */
void kvedge_slices_run(kvedge_slices *slices, int slice, int next, int thread);

/* ---- Memory of others --------------------------------------------------------------------------
 *
 * Attention to keys and values where another program keeps them, such as a runtime's own cache: nothing is copied, and
 * there is no layer. kvedge_attention_call.rows, in slices. */

/* Keys, or values: rows of float32, float16, bfloat16 or of what ggml's quantized caches hold (q8_0, q4_0, q4_1, q5_0,
 * q5_1, iq4_nl), the elements of each side by side. Those of tokens that are seen are finite, and of hidden ones as well;
 * scales of q8_0 are not negative, and all scales lie at even addresses. */
typedef struct {
  kvedge_format format;   /* KVEDGE_FLOAT32, _FLOAT16, _BFLOAT16, _Q8_0, _Q4_0, _Q4_1, _Q5_0, _Q5_1 or _IQ4_NL */
  int dim;                /* elements of a row, 1..1024; of ggml's types a multiple of 32 */
  ptrdiff_t token_stride; /* bytes from a token's row to the next one's of the same KV head: those of a row at least */
  ptrdiff_t head_stride;  /* and to that of the next KV head; where heads lie side by side they are read together */
  float bound;            /* at least the largest magnitude of a row; 0: not known, which costs nothing unless rows are
                             * beyond 2^60 (they are looked at again then); of float16 and q8_0 it does not matter */
} kvedge_rows;

/* Tokens that lie one after the other: their first rows, of KV head 0. Aligned as elements are. */
typedef struct {
  const void *keys, *values;
  int64_t num_tokens; /* 1 or more */
} kvedge_rows_segment;

/* Tokens count over the segments: token 0 is the first of the first one, and the query rows of a call are those of the last
 * num_rows tokens. So cells that a mask hides from all rows are best left out of the segments. Of the options, num_tokens and
 * start are 0. */
typedef struct kvedge_rows_cache {
  kvedge_rows keys, values;
  int num_kv_heads;
  const kvedge_rows_segment *segments;
  int num_segments; /* 1 or more */
  int64_t
      num_behind; /* tokens of the sequence behind these that lie in calls that join: positions count them, so that the
                       * query rows are those of the last tokens of all */
} kvedge_rows_cache;

/* ---- Paged: sequences in the blocks of a pool ------------------------------------------------
 *
 * A pool of blocks is a layer of capacity num_blocks * block_size: block b holds the tokens of positions b * block_size to
 * (b + 1) * block_size - 1, written with kvedge_layer_write. The layer's own len is not used: kvedge_quiesce before a block that
 * calls have read is written again. What a sequence is, is the caller's business: attention to it is a kvedge_attention_call with
 * one kvedge_part, whose `blocks` they are. Of a format of runs block_size is a multiple of 32; a sequence's last tokens, until a
 * run is full, then are another part. */

/* ---- States ------------------------------------------------------------------------------- */

/* What layers without keys and values keep of the past, and their step: read once, written once. docs/states.md has the
 * formulas and their sources. A state lies in the caller's memory, dense, as float32 or bfloat16, and is changed in place; in
 * bfloat16 it is rounded once a call. Arrays are of rows (token, head), of any element type; `out` shares memory with no other
 * argument, and no two calls have memory in common that one of them writes. A call is a sequence: its tokens, one or many, in
 * order. Calls are worked on together, by heads; results do not depend on threads. Numbers are read before anything is written:
 * KVEDGE_ERROR_NONFINITE: not finite; KVEDGE_ERROR_ARGUMENT: shapes, or a decay above 1. Dims are 1 to 256, tokens 1 or more. */

/* The gated delta rule (Yang, Kautz, Hatamizadeh 2024; one decay per channel of the key: Kimi Linear 2025):
 *
 *   S = exp(gate) S;  S += beta k (v - k S);  out = scale q S
 *
 * of each head, S[key_dim][value_dim]. Head h has query and key head h / (num_heads / num_key_heads). */
typedef struct {
  int num_heads, num_key_heads, key_dim, value_dim;
  int gate_dim;  /* 1, or key_dim: a decay for each channel */
  int normalize; /* not 0: queries and keys are divided by sqrt(sum of squares + 1e-6) first */
  float scale;
} kvedge_delta_shape;

typedef struct {
  void *state; /* [num_heads][key_dim][value_dim] */
  kvedge_element_type state_type;
  int64_t num_tokens;
  kvedge_array query, key; /* (num_tokens, num_key_heads, key_dim) */
  kvedge_array value, out; /* (num_tokens, num_heads, value_dim) */
  kvedge_array gate;       /* (num_tokens, num_heads, gate_dim): logarithms, 0 or less */
  kvedge_array beta;       /* (num_tokens, num_heads, 1) */
} kvedge_delta_call;

kvedge_status kvedge_delta_extend(const kvedge_delta_shape *shape, const kvedge_delta_call *calls, int num_calls,
                                  int num_threads);

/* Mamba-2, the state space dual (Dao, Gu 2024):
 *
 *   S = exp(dt a) S + dt x B^T;  out = S C + d x
 *
 * of each head, S[head_dim][state_size]. Head h has B and C of group h / (num_heads / num_groups). */
typedef struct {
  int num_heads, num_groups, head_dim, state_size;
  const float *a; /* [num_heads], 0 or less */
  const float *d; /* [num_heads]; NULL: 0 */
} kvedge_mamba_shape;

typedef struct {
  void *state; /* [num_heads][head_dim][state_size] */
  kvedge_element_type state_type;
  int64_t num_tokens;
  kvedge_array x, out; /* (num_tokens, num_heads, head_dim) */
  kvedge_array dt;     /* (num_tokens, num_heads, 1), 0 or more */
  kvedge_array b, c;   /* (num_tokens, num_groups, state_size) */
} kvedge_mamba_call;

kvedge_status kvedge_mamba_extend(const kvedge_mamba_shape *shape, const kvedge_mamba_call *calls, int num_calls,
                                  int num_threads);

/* A short causal convolution of each channel alone: out[t] = act(bias + sum_w weight[w] x[t - (width - 1) + w]). The state
 * has the last state_len inputs of each channel, the newest last, state_len >= width - 1. */
typedef struct {
  int num_channels, width; /* width: 1 to 16 */
  int state_len;
  const float *weight; /* [num_channels][width] */
  const float *bias;   /* [num_channels]; NULL: 0 */
  int silu;            /* not 0: act(x) = x / (1 + exp(-x)); 0: x */
} kvedge_conv_shape;

typedef struct {
  void *state; /* [num_channels][state_len] */
  kvedge_element_type state_type;
  int64_t num_tokens;
  kvedge_array x, out; /* (num_tokens, 1, num_channels) */
} kvedge_conv_call;

kvedge_status kvedge_conv_extend(const kvedge_conv_shape *shape, const kvedge_conv_call *calls, int num_calls,
                                 int num_threads);

/* ---- Index keys ---------------------------------------------------------------------------- */

/* Models with an index choose for each query row which tokens attention reads (docs/indexed.md). Their index keys lie in memory
 * of the caller's, one for each token, or for each block of `ratio` tokens once that is whole. */
typedef struct {
  kvedge_format
      format; /* KVEDGE_FLOAT32, KVEDGE_BFLOAT16 or KVEDGE_INT8, whose keys are rotated by a Hadamard matrix */
  int head_dim;
  int64_t num_keys;
  const void *keys;      /* [num_keys][head_dim] as kvedge_index_encode writes them */
  const float *scales;   /* [num_keys] of KVEDGE_INT8; else NULL */
  const int32_t *blocks; /* NULL, or where keys lie in blocks: key j is row blocks[j / keys_of_block] * keys_of_block +
                          * j % keys_of_block of `keys` and `scales` */
  int64_t keys_of_block;
} kvedge_index_keys;

/* Magnitudes of keys are at most this, so that all products are finite. */
#define KVEDGE_INDEX_LARGEST 0x1p40f

/* Stores keys [num_keys][head_dim]. KVEDGE_ERROR_NONFINITE, or KVEDGE_ERROR_SCALE where one is too large: nothing is written. */
kvedge_status kvedge_index_encode(kvedge_format format, int head_dim, const float *keys, int64_t num_keys, void *to,
                                  float *scales);

/* Row i stands at position first_position + i and sees the keys whose tokens lie up to that. Its score of a key is
 * sum_h weight[h] max(0, scale q_h . k), or for lists of each head scale q_h . k. A block's score is the largest of its keys
 * that the row sees. The k best are chosen, ties to the lower position, the last local_blocks always. */
typedef struct {
  const float *query;   /* [num_rows][num_heads][head_dim], not rotated */
  const float *weights; /* [num_rows][num_heads]; NULL: 1 */
  int64_t num_rows;
  int num_heads; /* 1 to 1024 */
  int per_head;  /* 1: a list for each head, without weights */
  float scale;
  int64_t first_position;
  int64_t k;            /* blocks of a list */
  int64_t ratio;        /* tokens of a key */
  int64_t block;        /* keys of a block; 1: keys are chosen one by one */
  int64_t local_blocks; /* at most k */
  int64_t start;        /* the first token that may be chosen, a multiple of ratio up to first_position */
  int32_t *tokens;      /* [num_rows][1 or num_heads][token_width], for kvedge_attention_options.tokens */
  int64_t token_width;  /* at least kvedge_index_width() */
} kvedge_index_call;

/* The most tokens of a list: k block ratio + ratio - 1, or all that the last row sees. */
int64_t kvedge_index_width(const kvedge_index_call *call);

/* Writes the lists: tokens of the chosen blocks, and those behind the last whole key, which are always read. */
kvedge_status kvedge_index_select(const kvedge_index_keys *keys, const kvedge_index_call *call, int num_threads);

/* The scores alone, for a runtime that has threads and index keys of its own: scores[i][j] =
 * sum_h weights[i][h] max(0, query[i][h] . keys[j]), of quantized keys as they decode, once for all rows. Strides are bytes,
 * multiples of the elements' size. */
typedef struct {
  kvedge_format format; /* as in kvedge_rows, none of them rotated */
  int head_dim;         /* 1..1024; of ggml's types a multiple of 32 */
  const void *keys;     /* (num_keys, head_dim) */
  ptrdiff_t key_stride; /* those of a key at least */
  int64_t num_keys;     /* 1 or more */
  const float *query;   /* (num_rows, num_heads, head_dim) */
  ptrdiff_t row_stride, head_stride;
  const float *weights; /* (num_rows, num_heads), the heads side by side */
  ptrdiff_t weight_stride;
  int64_t num_rows;
  int num_heads; /* 1 to 1024 */
  float *scores; /* (num_rows, num_keys) */
  ptrdiff_t score_stride;
} kvedge_index_scores_call;

/* Bytes of the memory of a call, which is aligned to 64; a multiple of 64. */
size_t kvedge_index_scores_bytes(int head_dim);

/* Writes the scores, on this thread. KVEDGE_ERROR_NONFINITE for a query that is not finite: nothing is written. */
kvedge_status kvedge_index_scores(const kvedge_index_scores_call *call, void *memory);

/* ---- Threads ------------------------------------------------------------------------------ */

/* How many threads kvedge_attend uses by default, 1 to 1024; at first 1. Threads are started when
 * first needed. Between calls they look out for the next one before they sleep: twice the time that calls usually are
 * apart, for 1 ms at most after the last one, and not at all where calls are further apart, where more threads are started than
 * there are processors, or where another thread wants the processor. */
kvedge_status kvedge_set_num_threads(int num_threads);
int kvedge_get_num_threads(void);

/* The most that they look out, in microseconds, 0 to 1000 (at first): 0 where the process's share of processor time is
 * less than its threads. */
kvedge_status kvedge_set_lookout(int us);

/* Threads that the process has anyway, so that two pools do not fight for the processors. */
typedef struct {
  /* Runs task(context, thread) for all thread numbers from 0 to num_threads - 1 at the same time, 0 on the calling thread, and returns
   * when all have ended. Numbers from some n on may be left out. */
  void (*run)(void *data, void (*task)(void *context, int thread), void *context);
  int (*num_threads)(void *data); /* how many there are now for a call of this thread */
  void *data;
} kvedge_executor;

/* Lets calls run on these threads, as many as their num_threads says; NULL: on those of kvedge, as at first. Where the
 * threads come late (they sleep, or another program has their processor) kvedge's own do fifty times as much work as
 * that cost. A forked child has none. Not while another thread calls kvedge. */
kvedge_status kvedge_set_executor(const kvedge_executor *executor);

/* Waits until no helper thread still reads a layer on behalf of a call that has already returned
 * (one that was held up by another program; its work was done by others meanwhile). Needed before
 * memory handed to kvedge_layer_init is freed; the calls here that take rows away do it. */
void kvedge_quiesce(void);

#if defined(KVEDGE_EXPORTS) && defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
