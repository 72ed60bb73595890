"""Rows in blocks: the store of one layer of a pool. Included by native.pyx."""

cdef class _BlockStore(LayerStore):
    """See BlockStoreMethods for what it must provide."""

    def write_at(self, int64_t position, keys, values):
        cdef _Handle handle = self._opened()
        cdef const float *key_data = _floats(keys)
        cdef const float *value_data = _floats(values)
        cdef int64_t num_tokens = (<cnp.ndarray>keys).shape[0]
        cdef kvedge_status status
        if num_tokens * self._num_kv_heads * self._widest < _KEEP_GIL:
            status = kvedge_layer_write(handle.layer, position, key_data, value_data, num_tokens)
        else:
            with nogil:
                status = kvedge_layer_write(
                    handle.layer, position, key_data, value_data, num_tokens)
        if status != KVEDGE_OK:
            raise KvedgeError(kvedge_strerror(status).decode())

    def quiesce(self):
        with nogil:
            kvedge_quiesce()

    def attend_blocks(self, int64_t block_size, list rows, options):
        self._attend_rows(rows, options, block_size)

    def attend_parts(self, list rows, options):
        self._attend_rows(rows, options, 0)

    cdef object _attend_rows(self, list rows, options, int64_t table_size):
        """Sequences in parts; or, table_size their size, in blocks of this pool alone."""
        cdef kvedge_attention_options c_options
        cdef kvedge_attention_options *own
        cdef kvedge_attention_call *calls
        cdef kvedge_part *parts
        cdef kvedge_status status
        cdef _Handle handle = self._opened()
        cdef int i, num_heads = 0, num_threads = options.num_threads
        cdef int num = <int>len(rows)
        cdef int num_parts = num if table_size else sum([len(row.parts) for row in rows])
        cdef int64_t numbers = 0
        cdef list handles = []  # live until the call is over
        _fill(&c_options, options)
        calls = <kvedge_attention_call *>PyMem_Malloc(
            num * (sizeof(kvedge_attention_call) + sizeof(kvedge_attention_options))
            + num_parts * sizeof(kvedge_part))
        if calls == NULL:
            raise OutOfMemoryError(f"no memory for a call over {num} sequences")
        try:
            own = <kvedge_attention_options *>(calls + num)
            parts = <kvedge_part *>(own + num)
            for i, (blocks, length, query, out, lse, start, own_parts) in enumerate(rows):
                num_heads = <int>(<cnp.ndarray>query).shape[1]
                own[i] = c_options
                if start:
                    own[i].start = start
                if table_size:
                    own_parts = ((self, blocks, table_size, 0, length),)
                calls[i].layer, calls[i].parts, calls[i].num_parts = NULL, parts, <int>len(own_parts)
                for store, table, block_size, first, stop in own_parts:
                    if not table_size:
                        handle = (<_BlockStore>store)._opened()
                        handles.append(handle)
                    parts.layer = handle.layer
                    parts.blocks = <const int32_t *>cnp.PyArray_DATA(<cnp.ndarray>table)
                    parts.block_size = block_size
                    parts.first_row, parts.position, parts.num_tokens = first, first, stop - first
                    parts.turns, parts.num_turns = NULL, 0
                    parts += 1
                calls[i].query = self._dense_heads(query, self._head_dim)
                calls[i].num_rows = (<cnp.ndarray>query).shape[0]
                calls[i].num_heads, calls[i].rows = num_heads, NULL
                calls[i].out = self._dense_heads(out, self._value_head_dim)
                calls[i].lse = NULL if lse is None else _floats(lse)
                calls[i].options = &own[i]
                numbers += calls[i].num_rows * (<int64_t>length - own[i].start)
            if numbers * num_heads * self._widest < _KEEP_GIL:
                status = kvedge_attend_layers(calls, num, num_threads)
            else:
                with nogil:
                    status = kvedge_attend_layers(calls, num, num_threads)
        finally:
            PyMem_Free(calls)
        if status != KVEDGE_OK:
            for row in rows:
                checks.check_finite(row.query, "query")
            self._refuse_attend(rows[0].query, status)

    cdef kvedge_array _dense_heads(self, rows, cnp.npy_intp width):
        """Query rows, or results, (n, num_heads, width) side by side."""
        cdef kvedge_array dense
        dense.data, dense.type = cnp.PyArray_DATA(<cnp.ndarray>rows), KVEDGE_TYPE_FLOAT32
        dense.head_stride = width * <int64_t>sizeof(float)
        dense.token_stride = (<cnp.ndarray>rows).shape[1] * dense.head_stride
        return dense
