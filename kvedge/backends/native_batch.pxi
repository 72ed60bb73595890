"""Calls on several layers, and on one with arrays of any strides. Included by native.pyx."""

cdef object _attend_to(
    list layers, object original, const _Array *asked, bint one_layer, bint one_row, bint hnd, object out,
    dict options
):
    """Attention of a query, `original` as it was `asked`: its shape is right, for one layer or for a batch of them.

    `options` are taken apart; their window is that of the layers where none was given.
    """
    cdef int i, num_heads, threads = 0, num = <int>len(layers)
    cdef _Array query = asked[0]
    cdef Py_ssize_t n_rows, head_dim, width = (<LayerStore>layers[0])._value_head_dim
    cdef cnp.npy_intp out_shape[_MAX_AXES]
    cdef int64_t length, first_row, longest = 0, shortest = 0, work = 0
    cdef kvedge_attention_options c_options
    cdef kvedge_attention_call *calls
    cdef kvedge_attention_options *own
    cdef kvedge_status status
    cdef cnp.npy_intp shape[3]
    cdef _Array to
    cdef _Handle handle
    cdef cnp.ndarray mask_array = None
    cdef float *lse_data = NULL
    cdef list handles = []
    cdef list lengths = []
    cdef list first_rows = []
    cdef list ranges = []        # of each layer whose keys are still to be turned
    cdef int num_parts = 0
    cdef int num_turns = 0
    cdef kvedge_part *parts
    cdef kvedge_rotation *turns
    start, return_lse, window, sink_tokens = (0 if one_layer else None), False, None, 0
    if options:
        start = options.pop("start", start)
        options.pop("layout", None)
        return_lse = options.get("return_lse", False)
        window, sink_tokens = options.get("window"), options.get("sink_tokens", 0)
    _as_batch(&query, one_layer, one_row, hnd)
    n_rows, num_heads, head_dim = query.shape[1], <int>query.shape[2], query.shape[3]
    for layer in layers:
        handle = (<LayerStore>layer)._opened()
        length = kvedge_layer_range(handle.layer, &first_row)  # once: another thread may be writing
        if (<LayerStore>layer).turns is None:
            ranges.append(None)
        else:
            ranges.append([
                (start_of, stop_of, query_turns(turn)) for start_of, stop_of, turn
                in ranges_of((<LayerStore>layer).turns, handle.dropped + first_row, 0, length)
            ])
            num_parts += <int>len(ranges[-1])
            for part in ranges[-1]:
                num_turns += <int>len(part[2])
        longest = length if length > longest else longest
        shortest = length if not handles or length < shortest else shortest
        handles.append(handle)
        lengths.append(length)
        first_rows.append(first_row)
        if (<LayerStore>layer)._window is not None and handle.dropped + first_row > 0:
            view = memory.LayerView(None, first_row, length, handle.dropped + first_row, None, None)
            checks.check_reach((<LayerStore>layer).config, view, n_rows, window, sink_tokens)
    kvedge_attention_defaults(&c_options)
    reads = ()
    resolved = None  # keeps their arrays
    if not (
        0 < shortest >= n_rows
        and _fill_plain(&c_options, &threads, longest, None, options, True)
    ):
        if not one_layer:
            _batch.check_lengths(lengths, n_rows, options.get("causal", True))
        resolved = AttendOptions.make(
            head_dim, n_rows, num_heads, longest, None if one_layer else num, **options)
        _fill(&c_options, resolved)
        check_heads(resolved.lists, (<LayerStore>layers[0])._num_kv_heads, start)
        threads = resolved.num_threads
        return_lse = resolved.return_lse
        reads = resolved.arrays()
        if not one_layer:
            mask_array = resolved.mask_bias if resolved.mask_bool is None else resolved.mask_bool
    starts = None
    if one_layer:
        c_options.start = 0 if start.__class__ is int and start == 0 else checks.as_start(start, longest)
    elif start is not None:
        starts = checks.as_starts(start, lengths)

    for i in range(asked.ndim):
        out_shape[i] = asked.shape[i] if i + 1 < asked.ndim else width
    if out is None:
        out = _empty(asked.ndim, out_shape)
        _read_ndarray(<cnp.ndarray>out, &to)
    else:
        _read_out(out, original, asked, out_shape, handles, reads, &to)
    _as_batch(&to, one_layer, one_row, hnd)
    lse = None
    if return_lse:
        shape[0], shape[1], shape[2] = num, n_rows, num_heads
        lse = _empty(3, shape)
        lse_data = _floats(lse)

    calls = <kvedge_attention_call *>PyMem_Malloc(
        num * (sizeof(kvedge_attention_call) + sizeof(kvedge_attention_options))
        + num_parts * sizeof(kvedge_part) + num_turns * sizeof(kvedge_rotation))
    if calls == NULL:
        raise OutOfMemoryError(f"no memory for a call over {num} layers")
    try:
        own = <kvedge_attention_options *>(calls + num)
        parts = <kvedge_part *>(own + num)
        turns = <kvedge_rotation *>(parts + num_parts)
        for i in range(num):
            handle = <_Handle>handles[i]
            own[i] = c_options
            own[i].num_tokens, own[i].first_row = lengths[i], first_rows[i]
            if starts is not None:
                own[i].start = starts[i]
            if mask_array is not None:
                _take_mask(&own[i], mask_array, i)
            calls[i].layer, calls[i].parts, calls[i].num_parts = handle.layer, NULL, 0
            if ranges[i]:
                calls[i].layer, calls[i].parts, calls[i].num_parts = NULL, parts, <int>len(ranges[i])
                for start_of, stop_of, turn in ranges[i]:
                    parts.layer, parts.blocks = handle.layer, NULL
                    parts.first_row, parts.position = <int64_t>first_rows[i] + <int64_t>start_of, start_of
                    parts.num_tokens = stop_of - start_of
                    parts.turns, parts.num_turns = turns, <int>len(turn)
                    for cosines, sines, interleaved in turn:
                        turns.dims, turns.interleaved = 2 * len(cosines), interleaved
                        turns.cosines, turns.sines = _floats(cosines), _floats(sines)
                        turns += 1
                    parts += 1
            calls[i].query = _rows_of(&query, i)
            calls[i].num_rows = n_rows
            calls[i].num_heads, calls[i].rows = num_heads, NULL
            calls[i].out = _rows_of(&to, i)
            calls[i].lse = NULL if lse_data == NULL else lse_data + i * n_rows * num_heads
            calls[i].options = &own[i]
            work += own[i].num_tokens - own[i].start
        if n_rows == 0:
            status = KVEDGE_OK
        elif work * n_rows * num_heads * max(head_dim, width) < _KEEP_GIL:
            status = kvedge_attend_layers(calls, num, threads)
        else:
            with nogil:
                status = kvedge_attend_layers(calls, num, threads)
    finally:
        PyMem_Free(calls)
    if status != KVEDGE_OK:
        checks.check_finite(checks.as_ndarray(original, "query"), "query")
        _refuse_status(status)
    if not return_lse:
        return out
    lse = lse[:, 0] if one_row else lse.swapaxes(1, 2) if hnd else lse
    return out, (lse[0] if one_layer else lse)


cdef _read_out(
    out, original, const _Array *query, const cnp.npy_intp *out_shape, list handles, reads, _Array *to
):
    """Where the result of a query is written to."""
    cdef uintptr_t low, high, query_low, query_high
    cdef _Handle handle
    cdef bint right = _read(out, to) and to.ndim == query.ndim and _is_apart_from_itself(to)
    cdef int i
    if right and cnp.PyArray_CheckExact(out):
        right = cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out)
    for i in range(query.ndim):
        right = right and to.shape[i] == out_shape[i]
    if right:
        _bounds(to, &low, &high)
        _bounds(query, &query_low, &query_high)
        right = not len(reads) and (high <= query_low or query_high <= low)
        for handle in handles:
            right = right and handle.is_apart(low, high)
    if right:
        return
    # It is refused, in the words of kvedge.core, or is right though bounds overlap.
    shape = tuple([out_shape[i] for i in range(query.ndim)])
    slabs = []
    for handle in handles:
        slabs += handle.arrays()
    target = arrays.as_target(out, shape, reads=(arrays.memory_of(original, "query"), *slabs, *reads))
    if _read(out, to):
        return
    # A tensor that requires a gradient, where none is recorded, or a subclass of ndarray.
    if not _read_ndarray(target.memory.view(np.float16) if target.bits else target.memory, to):
        raise LayoutError(f"out cannot be written to as it lies: {checks.describe(out)}")
    if target.bits:
        to.type = KVEDGE_TYPE_BFLOAT16


cdef _take_mask(kvedge_attention_options *c, cnp.ndarray mask, Py_ssize_t i):
    """The part of a mask (batch, num_heads, n, length) that is layer i's."""
    if c.mask != NULL:
        c.mask = <const uint8_t *>cnp.PyArray_DATA(mask) + i * mask.strides[0]
    else:
        c.bias = <const float *>(<char *>cnp.PyArray_DATA(mask) + i * mask.strides[0])


def attend_batch(layers, query, *, out=None, **options):
    cdef list stores = _as_stores(layers)
    cdef _Array asked
    layout = options.get("layout", _NHD)
    cdef bint hnd = _is_hnd(layout), one_row
    read = query
    if not (_read(query, &asked) and _fits_batch(&asked, stores, hnd, _QUERY)):
        read, one_row = _batch.as_query(query, stores, layout)  # refuses or converts
        read = read[:, 0] if one_row else arrays.in_nhd(read, layout)
        _read_ndarray(<cnp.ndarray>read, &asked)
    try:
        options["window"] = _batch.window_of(stores, options.get("window"))
        return _attend_to(stores, query, &asked, False, asked.ndim == 3, hnd, out, options)
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise memory.out_of_memory(error, "the result of attention") from error


def append_batch(layers, keys, values, *, layout="nhd"):
    cdef list stores = _as_stores(layers)
    cdef bint hnd = _is_hnd(layout), decides = False, is_turned = False, right
    cdef _Array key_rows, value_rows
    cdef LayerStore layer
    right = (
        _read(keys, &key_rows) and _fits_batch(&key_rows, stores, hnd, _KEYS)
        and _read(values, &value_rows) and _fits_batch(&value_rows, stores, hnd, _VALUES)
    )
    for store in stores:
        layer = <LayerStore>store
        layer._opened()
        decides = decides or layer.key_map_is_open()
        right = right and not layer.frozen
        is_turned = is_turned or layer.turns is not None
    if is_turned:
        dense_keys, dense_values = _batch.checked_rows(stores, keys, values, layout)
        _append_each(stores, dense_keys, dense_values)
        return
    if right and not decides:
        _as_batch(&key_rows, False, key_rows.ndim == 3, hnd)
        _as_batch(&value_rows, False, value_rows.ndim == 3, hnd)
        if key_rows.shape[1] == value_rows.shape[1]:
            _store_batch(stores, keys, values, &key_rows, &value_rows, layout)
            return
    dense_keys, dense_values = _batch.checked_rows(stores, keys, values, layout)
    _read_ndarray(<cnp.ndarray>dense_keys, &key_rows)
    _read_ndarray(<cnp.ndarray>dense_values, &value_rows)
    savepoints = []
    try:
        for store, rows in zip(stores, dense_keys):
            if (<LayerStore>store).key_map_is_open() and len(rows):
                savepoints.append((store, layer_keys.savepoint(store)))
                layer_keys.decide(store, rows)
        _store_batch(stores, keys, values, &key_rows, &value_rows, layout)
    except BaseException:
        for store, saved in savepoints:
            layer_keys.roll_back(store, saved)
        raise


cdef _append_each(list layers, dense_keys, dense_values):
    """Append checked rows to layers of which some have keys to turn: to all or none."""
    cdef int64_t num_tokens = dense_keys.shape[1]
    if num_tokens == 0:
        return
    savepoints = [(layer, layer_keys.savepoint(layer, num_tokens), len(layer)) for layer in layers]
    try:
        for layer in layers:
            room.reserve(layer, num_tokens)
        for layer, rows, value_rows in zip(layers, dense_keys, dense_values):
            layer.append(rows, value_rows)
    except BaseException:
        for layer, saved, length in savepoints:
            layer.set_len(length)
            layer_keys.roll_back(layer, saved)
        raise
    _slide_all(layers, num_tokens)


cdef Py_ssize_t _begin_writing_to(list layers) except -1:
    """Begin to append to layers, in order; how many were free of other threads, all others not being begun."""
    cdef Py_ssize_t begun = 0
    for layer in layers:
        if not (<LayerStore>layer)._begin_writing():
            break
        begun += 1
    return begun


cdef _end_writing_to(list layers, Py_ssize_t begun):
    cdef Py_ssize_t i
    for i in range(begun):
        (<LayerStore>layers[i])._end_writing()


cdef _store_batch(list layers, keys, values, const _Array *key_rows, const _Array *value_rows, layout):
    """Append rows (batch, n, num_kv_heads, head_dim) that lie as told."""
    cdef Py_ssize_t begun = 0
    if key_rows.shape[1] == 0:
        return
    try:
        begun = _begin_writing_to(layers)
        if begun < len(layers):
            _batch.checked_rows(layers, keys, values, layout)  # refuses a layer that occurs twice
            raise KvedgeError("another thread is appending to this layer: one at a time may")
        _store_batch_alone(layers, keys, values, key_rows, value_rows, layout)
    finally:
        _end_writing_to(layers, begun)
    _slide_all(layers, key_rows.shape[1])


cdef _store_batch_alone(
    list layers, keys, values, const _Array *key_rows, const _Array *value_rows, layout
):
    cdef int64_t num_tokens = key_rows.shape[1]
    cdef kvedge_status status = _append_to_all(layers, key_rows, value_rows)
    if status == KVEDGE_ERROR_CAPACITY:
        handles = [(<LayerStore>layer)._opened() for layer in layers]
        try:
            for layer in layers:
                room.reserve(layer, num_tokens)
            status = _append_to_all(layers, key_rows, value_rows)
        finally:
            if status != KVEDGE_OK:
                for layer, handle in zip(layers, handles):
                    (<LayerStore>layer)._take(handle)
    if status == KVEDGE_OK:
        return
    dense_keys, dense_values = _batch.checked_rows(layers, keys, values, layout)
    for layer, some_keys, some_values in zip(layers, dense_keys, dense_values):
        layer._refuse_range(some_keys, some_values)
    _refuse_status(status)


cdef _slide_all(list layers, int64_t num_tokens):
    cdef LayerStore layer
    for layer in layers:
        if layer._window is not None:
            room.slide(layer, num_tokens)


cdef kvedge_status _append_to_all(
    list layers, const _Array *key_rows, const _Array *value_rows
) except *:
    """Append to all layers, or, also where one lacks room, to none."""
    cdef int i, num = <int>len(layers)
    cdef int64_t num_tokens = key_rows.shape[1]
    cdef kvedge_layer **pointers
    cdef kvedge_array *sides
    cdef kvedge_status status
    cdef LayerStore layer
    cdef _Handle handle
    cdef list handles = []
    for store in layers:
        layer = <LayerStore>store
        handle = layer._opened()
        if num_tokens > layer._limit - kvedge_layer_len(handle.layer):
            return KVEDGE_ERROR_CAPACITY
        if not layer._has_room(handle, num_tokens):
            handle = _again(handle, num_tokens)
            layer._take(handle)
        handles.append(handle)
    sides = <kvedge_array *>PyMem_Malloc(num * (2 * sizeof(kvedge_array) + sizeof(kvedge_layer *)))
    if sides == NULL:
        raise OutOfMemoryError(f"no memory for a call over {num} layers")
    pointers = <kvedge_layer **>(sides + 2 * num)
    for i in range(num):
        pointers[i] = (<_Handle>handles[i]).layer
        sides[i] = _rows_of(key_rows, i)
        sides[num + i] = _rows_of(value_rows, i)
    if _size(key_rows) < _KEEP_GIL and _size(value_rows) < _KEEP_GIL:
        status = kvedge_layers_append(pointers, sides, sides + num, num, num_tokens)
    else:
        with nogil:
            status = kvedge_layers_append(pointers, sides, sides + num, num, num_tokens)
    PyMem_Free(sides)
    return status


cdef list _as_stores(layers):
    """The stores of layers of this backend."""
    cdef list stores = []
    if type(layers) is list or type(layers) is tuple:
        for layer in layers:
            if not isinstance(layer, _LayerFace):
                break
            stores.append((<_LayerFace>layer)._opened())
        else:
            if stores:
                return stores
    return _batch.as_stores(layers, LayerStore)


cdef enum:
    _QUERY
    _KEYS
    _VALUES


cdef bint _fits_batch(const _Array *array, list layers, bint hnd, int kind):
    """Whether it is (batch, heads, channels), or has an axis of tokens beside the heads, for all layers."""
    cdef LayerStore layer
    cdef Py_ssize_t heads
    if array.ndim != 3 and array.ndim != 4 or array.shape[0] != len(layers):
        return False
    heads = array.shape[1 if array.ndim == 3 or hnd else 2]
    for store in layers:
        layer = <LayerStore>store
        if array.shape[array.ndim - 1] != (layer._value_head_dim if kind == _VALUES else layer._head_dim):
            return False
        if heads != layer._num_kv_heads:
            if kind != _QUERY or heads == 0 or heads % layer._num_kv_heads:
                return False
        if layer._value_head_dim != (<LayerStore>layers[0])._value_head_dim:
            return False  # results are one array
    return True


cdef _refuse_status(kvedge_status status):
    if status == KVEDGE_ERROR_MEMORY:
        raise OutOfMemoryError("no memory for the intermediate results of attention")
    raise KvedgeError(kvedge_strerror(status).decode())
