"""Rows in blocks: the store of one layer of a pool. Included by native.pyx."""

from kvedge.paged.store import BlockStoreMethods


cdef class _BlockStoreCore(_LayerCore):
    """See BlockStoreMethods for what it must provide."""

    def _write_at(self, int64_t position, keys, values):
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

    def _settle(self):
        with nogil:
            kvedge_quiesce()

    def _attend_blocks(self, int64_t block_size, list rows, options):
        cdef _Handle handle = self._opened()
        cdef kvedge_attention_options c_options
        cdef kvedge_status status
        cdef kvedge_sequence *sequences
        cdef int i, num_heads = 0, num_threads = options.num_threads
        cdef int num_sequences = <int>len(rows)
        cdef cnp.ndarray query
        cdef int64_t numbers = 0
        _fill(&c_options, options)
        sequences = <kvedge_sequence *>PyMem_Malloc(num_sequences * sizeof(kvedge_sequence))
        if sequences == NULL:
            raise OutOfMemoryError(f"no memory for a call over {num_sequences} sequences")
        try:
            for i, (table, length, one, out, lse, start) in enumerate(rows):
                query = one
                num_heads = <int>query.shape[1]
                sequences[i].blocks = <const int32_t *>cnp.PyArray_DATA(<cnp.ndarray>table)
                sequences[i].len = length
                sequences[i].query = _floats(query)
                sequences[i].num_rows = query.shape[0]
                sequences[i].out = _floats(out)
                sequences[i].lse = NULL if lse is None else _floats(lse)
                sequences[i].start = start
                numbers += query.shape[0] * (sequences[i].len - sequences[i].start)
            if numbers * num_heads * self._widest < _KEEP_GIL:
                status = kvedge_attend_batch(
                    handle.layer, block_size, sequences, num_sequences, num_heads, &c_options,
                    num_threads)
            else:
                with nogil:
                    status = kvedge_attend_batch(
                        handle.layer, block_size, sequences, num_sequences, num_heads, &c_options,
                        num_threads)
        finally:
            PyMem_Free(sequences)
        if status != KVEDGE_OK:
            for one in rows:
                checks.check_finite(one.query, "query")
            self._refuse_attend(query, status)


@registry.backend_class
class BlockStore(_BlockStoreCore, BlockStoreMethods):
    pass
