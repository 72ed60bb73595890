"""The C API of csrc/kvedge.h for Cython: ``from kvedge cimport kvedge_layer, kvedge_attend``."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t


cdef extern from "kvedge.h" nogil:
    ctypedef enum kvedge_status:
        KVEDGE_OK
        KVEDGE_ERROR_ARGUMENT
        KVEDGE_ERROR_CAPACITY
        KVEDGE_ERROR_NONFINITE
        KVEDGE_ERROR_SCALE
        KVEDGE_ERROR_MEMORY
        KVEDGE_ERROR_ISA
        KVEDGE_ERROR_FILE

    ctypedef enum kvedge_format:
        KVEDGE_INT8
        KVEDGE_FLOAT32
        KVEDGE_FLOAT16
        KVEDGE_BFLOAT16
        KVEDGE_FP8_E4M3
        KVEDGE_FP8_E5M2
        KVEDGE_INT4
        KVEDGE_Q8_0

    enum:
        KVEDGE_NUM_FORMATS
        KVEDGE_VERSION_MAJOR
        KVEDGE_VERSION_MINOR
        KVEDGE_VERSION_PATCH

    ctypedef enum kvedge_scale_type:
        KVEDGE_SCALE_FLOAT32
        KVEDGE_SCALE_FLOAT16

    ctypedef enum kvedge_element_type:
        KVEDGE_TYPE_FLOAT32
        KVEDGE_TYPE_FLOAT16
        KVEDGE_TYPE_BFLOAT16

    ctypedef struct kvedge_array:
        void *data
        kvedge_element_type type
        ptrdiff_t token_stride
        ptrdiff_t head_stride

    ctypedef struct kvedge_layer:
        pass

    ctypedef struct kvedge_layer_config:
        kvedge_format format
        kvedge_scale_type scale_type
        int64_t capacity
        int num_kv_heads
        int head_dim
        int group_size
        int value_head_dim
        int value_format
        int value_rotation
        int recent
        int sinks
        int recent_format
        int recent_room

    ctypedef struct kvedge_slabs:
        void *key_codes
        void *value_codes
        void *key_scales
        void *value_scales
        void *first_keys
        void *first_values
        void *last_keys
        void *last_values

    ctypedef struct kvedge_ranges:
        int64_t start
        int64_t stop
        int64_t last_from
        int64_t last_row
        int64_t first_row
        int64_t num_first
        int64_t first_stop

    ctypedef struct kvedge_allocator:
        void *(*allocate)(void *context, size_t bytes)
        void (*release)(void *context, void *memory, size_t bytes)
        void *context

    ctypedef struct kvedge_rotation:
        int dims
        int interleaved
        const float *cosines
        const float *sines

    ctypedef struct kvedge_attention_options:
        float scale
        int causal
        int64_t window
        int64_t sink_tokens
        const float *sink_logits
        float softcap
        const float *alibi_slopes
        const int32_t *tokens
        int token_heads
        int64_t token_width
        const uint8_t *mask
        int64_t mask_strides[3]
        const float *bias
        int64_t bias_strides[3]
        int precision_bits
        int64_t num_tokens
        int64_t start
        int64_t first_row
        const uint16_t *half_bias
        const float *bias_factors

    ctypedef struct kvedge_part:
        const kvedge_layer *layer
        int64_t first_row
        int64_t num_tokens
        int64_t position
        const int32_t *blocks
        int64_t block_size
        const kvedge_rotation *turns
        int num_turns

    ctypedef struct kvedge_rows:
        kvedge_format format
        int dim
        ptrdiff_t token_stride
        ptrdiff_t head_stride
        float bound

    ctypedef struct kvedge_rows_segment:
        const void *keys
        const void *values
        int64_t num_tokens

    ctypedef struct kvedge_rows_cache:
        kvedge_rows keys
        kvedge_rows values
        int num_kv_heads
        const kvedge_rows_segment *segments
        int num_segments
        int64_t num_behind

    ctypedef struct kvedge_attention_call:
        const kvedge_layer *layer
        kvedge_array query
        int64_t num_rows
        int num_heads
        kvedge_array out
        float *lse
        const kvedge_attention_options *options
        const kvedge_part *parts
        int num_parts
        const kvedge_rows_cache *rows
        int joins

    ctypedef struct kvedge_slices:
        pass

    const char *kvedge_version()
    const char *kvedge_strerror(kvedge_status status)
    kvedge_status kvedge_select_isa(const char *name, const char **why_not)
    const char *kvedge_isa_name()
    const char *kvedge_isa_compiled(int index)
    int kvedge_isa_available(const char *name, const char **why_not)

    size_t kvedge_layer_bytes(const kvedge_layer_config *config)
    size_t kvedge_layer_header_bytes(const kvedge_layer_config *config)
    kvedge_status kvedge_layer_init(
        void *memory, size_t bytes, const kvedge_layer_config *config, const kvedge_slabs *slabs,
        kvedge_layer **layer)
    kvedge_status kvedge_layer_create(
        const kvedge_layer_config *config, const kvedge_allocator *allocator, kvedge_layer **layer)
    void kvedge_layer_destroy(kvedge_layer *layer)
    kvedge_status kvedge_layer_set_key_offset(kvedge_layer *layer, const float *key_offset)
    kvedge_status kvedge_layer_set_key_scale(kvedge_layer *layer, const float *key_scale)
    kvedge_status kvedge_layer_append(
        kvedge_layer *layer, const float *keys, const float *values, int64_t num_tokens)
    kvedge_status kvedge_layers_append(
        kvedge_layer *const *layers, const kvedge_array *keys, const kvedge_array *values,
        int num_layers, int64_t num_tokens)
    int64_t kvedge_layer_len(const kvedge_layer *layer)
    int64_t kvedge_layer_range(const kvedge_layer *layer, int64_t *start)
    int64_t kvedge_layer_written(const kvedge_layer *layer)
    kvedge_status kvedge_layer_drop_first(kvedge_layer *layer, int64_t num_tokens)
    kvedge_status kvedge_layer_compact(kvedge_layer *layer)
    kvedge_status kvedge_layer_set_len(kvedge_layer *layer, int64_t len)
    kvedge_status kvedge_layer_write(
        kvedge_layer *layer, int64_t position, const float *keys, const float *values,
        int64_t num_tokens)
    kvedge_status kvedge_layer_filled(kvedge_layer *layer, int64_t position, int64_t num_tokens)
    kvedge_status kvedge_layer_get(
        const kvedge_layer *layer, int values, int64_t first_row, int64_t start, int64_t stop,
        float *out)
    kvedge_status kvedge_layer_copy(const kvedge_layer *layer, kvedge_layer *to)
    kvedge_status kvedge_layer_reserve(kvedge_layer **layer, int64_t num_tokens)
    kvedge_status kvedge_layer_keep(
        kvedge_layer *layer, const int64_t *tokens, int64_t num_tokens)
    kvedge_status kvedge_rotation_angles(
        double base, int dims, int64_t delta, float *cosines, float *sines)
    kvedge_status kvedge_layer_shift(
        kvedge_layer *layer, int64_t start, int64_t stop, const kvedge_rotation *rotation)
    void kvedge_layer_describe(
        const kvedge_layer *layer, kvedge_layer_config *config, kvedge_slabs *slabs)
    kvedge_status kvedge_layer_config_of(const char *name, kvedge_layer_config *config)
    int64_t kvedge_layer_last_rows(const kvedge_layer_config *config)
    void kvedge_layer_get_ranges(const kvedge_layer *layer, kvedge_ranges *ranges)
    kvedge_status kvedge_layer_set_ranges(kvedge_layer *layer, const kvedge_ranges *ranges)
    kvedge_status kvedge_layer_adopt(kvedge_layer *layer, const kvedge_layer *source, int64_t row)

    ctypedef struct kvedge_session_text:
        const char *key
        const char *value
        size_t key_bytes
        size_t value_bytes

    ctypedef struct kvedge_session_layer:
        int64_t window
        int64_t dropped
        kvedge_layer_config config
        int has_key_offset
        int has_key_scale

    ctypedef struct kvedge_session_state:
        int layer
        char name[33]
        kvedge_element_type type
        int num_axes
        int64_t shape[8]
        const void *data

    ctypedef struct kvedge_session:
        int num_layers
        int64_t length
        int64_t max_seq_len
        int auto_key_offset
        int auto_key_scale
        const kvedge_session_layer *layers
        const kvedge_session_text *metadata
        int num_metadata
        const kvedge_session_state *states
        int num_states

    ctypedef struct kvedge_session_reader:
        pass
    ctypedef int (*kvedge_session_sink)(void *context, const void *piece, size_t bytes) noexcept

    size_t kvedge_session_bytes(
        const kvedge_session *session, kvedge_layer *const *layers)
    kvedge_status kvedge_session_write(
        const kvedge_session *session, kvedge_layer *const *layers,
        kvedge_session_sink sink, void *context)
    kvedge_status kvedge_session_reader_bytes(
        const void *data, size_t bytes, size_t *needed, const char **why)
    kvedge_status kvedge_session_read(
        const void *data, size_t bytes, void *memory, size_t memory_bytes,
        kvedge_session_reader **reader, const char **why)
    const kvedge_session *kvedge_session_held(const kvedge_session_reader *reader)
    kvedge_status kvedge_session_load(
        const kvedge_session_reader *reader, kvedge_layer *const *layers, const char **why)

    ctypedef struct kvedge_session_prefix:
        int is_checkpoint
        int64_t start
        int64_t num_ids
        const void *ids
        char digest[65]
        char parent[65]
        const char *identity
        const char *variant
        size_t identity_bytes
        size_t variant_bytes
        int num_layers
        int is_checked

    kvedge_status kvedge_session_prefix_bytes(
        const void *data, size_t bytes, size_t *needed, const char **why)
    kvedge_status kvedge_session_read_prefix(
        const void *data, size_t bytes, void *memory, size_t memory_bytes,
        kvedge_session_prefix **prefix, const char **why)
    kvedge_status kvedge_session_load_prefix(
        kvedge_session_prefix *const *path, int num_files, kvedge_layer *const *layers,
        int num_layers, const char **why)

    void kvedge_attention_defaults(kvedge_attention_options *options)
    kvedge_status kvedge_attend(
        const kvedge_layer *layer, const float *query, int64_t num_rows, int num_heads,
        const kvedge_attention_options *options, int num_threads, float *out, float *lse)
    kvedge_status kvedge_attend_layers(
        const kvedge_attention_call *calls, int num_calls, int num_threads)
    kvedge_status kvedge_scores(
        const kvedge_layer *layer, const float *query, int num_heads, float scale,
        int64_t first_row, int64_t num_tokens, float *logits)

    size_t kvedge_slices_bytes(const kvedge_attention_call *calls, int num_calls, int num_threads)
    kvedge_status kvedge_slices_init(
        void *memory, size_t bytes, const kvedge_attention_call *calls, int num_calls,
        int num_threads, kvedge_slices **slices)
    int kvedge_slices_count(const kvedge_slices *slices)
    void kvedge_slices_run(kvedge_slices *slices, int slice, int next, int thread)

    ctypedef struct kvedge_delta_shape:
        int num_heads, num_key_heads, key_dim, value_dim, gate_dim, normalize
        float scale

    ctypedef struct kvedge_delta_call:
        void *state
        kvedge_element_type state_type
        int64_t num_tokens
        kvedge_array query, key, value, out, gate, beta

    kvedge_status kvedge_delta_extend(
        const kvedge_delta_shape *shape, const kvedge_delta_call *calls, int num_calls, int num_threads)

    ctypedef struct kvedge_mamba_shape:
        int num_heads, num_groups, head_dim, state_size
        const float *a
        const float *d

    ctypedef struct kvedge_mamba_call:
        void *state
        kvedge_element_type state_type
        int64_t num_tokens
        kvedge_array x, out, dt, b, c

    kvedge_status kvedge_mamba_extend(
        const kvedge_mamba_shape *shape, const kvedge_mamba_call *calls, int num_calls, int num_threads)

    ctypedef struct kvedge_conv_shape:
        int num_channels, width, state_len
        const float *weight
        const float *bias
        int silu

    ctypedef struct kvedge_conv_call:
        void *state
        kvedge_element_type state_type
        int64_t num_tokens
        kvedge_array x, out

    kvedge_status kvedge_conv_extend(
        const kvedge_conv_shape *shape, const kvedge_conv_call *calls, int num_calls, int num_threads)

    ctypedef struct kvedge_index_keys:
        kvedge_format format
        int head_dim
        int64_t num_keys
        const void *keys
        const float *scales
        const int32_t *blocks
        int64_t keys_of_block

    kvedge_status kvedge_index_encode(
        kvedge_format format, int head_dim, const float *keys, int64_t num_keys, void *to, float *scales)

    ctypedef struct kvedge_index_call:
        const float *query
        const float *weights
        int64_t num_rows
        int num_heads
        int per_head
        float scale
        int64_t first_position
        int64_t k
        int64_t ratio
        int64_t block
        int64_t local_blocks
        int64_t start
        int32_t *tokens
        int64_t token_width

    int64_t kvedge_index_width(const kvedge_index_call *call)
    kvedge_status kvedge_index_select(
        const kvedge_index_keys *keys, const kvedge_index_call *call, int num_threads)

    kvedge_status kvedge_set_num_threads(int num_threads)
    int kvedge_get_num_threads()
    kvedge_status kvedge_set_lookout(int us)

    ctypedef struct kvedge_executor:
        void (*run)(void *data, void (*task)(void *context, int thread), void *context)
        int (*num_threads)(void *data)
        void *data

    kvedge_status kvedge_set_executor(const kvedge_executor *executor)
    void kvedge_quiesce()
