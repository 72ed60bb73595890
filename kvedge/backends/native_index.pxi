"""Index keys. Included by native.pyx; kvedge.KeyIndex checks all arguments."""

cdef kvedge_format _index_format(str dtype):
    return KVEDGE_INT8 if dtype == "int8" else KVEDGE_BFLOAT16 if dtype == "bfloat16" else KVEDGE_FLOAT32


cdef _check_index(kvedge_status status):
    if status == KVEDGE_ERROR_MEMORY:
        raise OutOfMemoryError("no memory for a scan of index keys")
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())


def index_encode(str dtype, rows, codes, scales):
    """Store keys, C-contiguous float32 (n, head_dim), in arrays of as many."""
    cdef cnp.ndarray keys = rows
    cdef int64_t num_keys = keys.shape[0]
    _check_index(kvedge_index_encode(
        _index_format(dtype), <int>keys.shape[1], _floats(keys), num_keys,
        cnp.PyArray_DATA(<cnp.ndarray>codes), NULL if scales is None else _floats(scales)))


def index_select(
    str dtype, codes, scales, queries, weights, selection, lists, int num_threads, table=None,
    int64_t keys_of_block=0, num_keys=None,
):
    """Write the tokens that each row reads to `lists`; all arrays are C-contiguous."""
    cdef cnp.ndarray stored = codes
    cdef cnp.ndarray rows = queries
    cdef kvedge_index_keys keys
    cdef kvedge_index_call call
    cdef kvedge_status status
    keys.format, keys.head_dim, keys.num_keys = _index_format(dtype), <int>stored.shape[1], stored.shape[0]
    keys.keys = cnp.PyArray_DATA(stored)
    keys.scales = NULL if scales is None else _floats(scales)
    keys.blocks = NULL if table is None else <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>table)
    keys.keys_of_block = keys_of_block
    if num_keys is not None:
        keys.num_keys = num_keys
    call.query, call.weights = _floats(rows), NULL if weights is None else _floats(weights)
    call.num_rows, call.num_heads, call.per_head = rows.shape[0], <int>rows.shape[1], selection.per_head
    call.scale, call.first_position, call.k = selection.scale, selection.first_position, selection.k
    call.ratio, call.block, call.start = selection.ratio, selection.block, selection.start
    call.local_blocks = selection.local_blocks
    call.tokens = <int32_t *>cnp.PyArray_DATA(<cnp.ndarray>lists)
    call.token_width = (<cnp.ndarray>lists).shape[2]
    with nogil:
        status = kvedge_index_select(&keys, &call, num_threads)
    _check_index(status)
