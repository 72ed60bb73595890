"""The step of states, as kvedge.states and kvedge.transformers.steps ask for it. Included by native.pyx.

Every array that C reads or writes is looked at here, and none of another shape or type than the state makes it gets
there. Inputs have the axes of batch and tokens and lie wherever _read() can read them; a state is dense, and bfloat16
in NumPy as uint16.
"""

cdef enum:
    _ANY = -1  # an axis of any size
    _LARGEST = 2147483647  # C counts heads, channels and sequences in int


cdef object _other_shape(str name, const _Array *array, int ndim, const Py_ssize_t *shape):
    expected = ", ".join(["any" if shape[i] == _ANY else str(shape[i]) for i in range(ndim)])
    got = tuple([array.shape[i] for i in range(array.ndim)])
    return ShapeMismatchError(f"{name} must have shape ({expected}), not {got}", expected=f"({expected})", got=got)


cdef int _take(
    object array, str name, _Array *to, int ndim, Py_ssize_t n0, Py_ssize_t n1=0, Py_ssize_t n2=0, Py_ssize_t n3=0
) except -1:
    """Where an array of such a shape lies."""
    cdef Py_ssize_t[_MAX_AXES] shape
    cdef int i
    shape[0], shape[1], shape[2], shape[3] = n0, n1, n2, n3
    if not _read(array, to):
        raise LayoutError(f"{name} cannot be read as it lies: {type(array).__name__}, {getattr(array, 'dtype', '')}")
    if to.ndim != ndim:
        raise _other_shape(name, to, ndim, shape)
    for i in range(ndim):
        if to.shape[i] != shape[i] and (shape[i] != _ANY or to.shape[i] > _LARGEST):
            raise _other_shape(name, to, ndim, shape)
    return 0


cdef bint _is_dense(const _Array *array):
    cdef Py_ssize_t stride = array.itemsize
    cdef int i
    for i in range(array.ndim - 1, -1, -1):
        if array.shape[i] > 1 and array.strides[i] != stride:
            return False
        stride *= array.shape[i]
    return True


cdef float *_take_floats(object array, str name, _Array *to, int ndim, Py_ssize_t n0, Py_ssize_t n1=0) except? NULL:
    """A dense float32 array."""
    _take(array, name, to, ndim, n0, n1)
    if to.type != KVEDGE_TYPE_FLOAT32 or not _is_dense(to):
        raise LayoutError(f"{name} must be float32 and C-contiguous")
    return <float *>to.data


cdef int _check_writable(object array, str name) except -1:
    if cnp.PyArray_CheckExact(array) and not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>array):
        raise LayoutError(f"{name} is read-only")
    return 0


cdef int _take_state(object state, _Array *to, int ndim) except -1:
    """Where a state (batch, ...) lies."""
    bits = cnp.PyArray_CheckExact(state) and cnp.PyArray_TYPE(<cnp.ndarray>state) == cnp.NPY_UINT16
    _take(state.view(np.float16) if bits else state, "the state", to, ndim, _ANY, _ANY, _ANY, _ANY)
    if bits:
        to.type = KVEDGE_TYPE_BFLOAT16
    if to.type == KVEDGE_TYPE_FLOAT16 or not _is_dense(to):
        raise LayoutError("the state must be float32 or bfloat16, and C-contiguous")
    return _check_writable(state, "the state")


cdef int _check_apart(object array, const _Array *at, str name, object other, const _Array *other_at) except -1:
    """LayoutError if an array that is written shares memory with another."""
    cdef uintptr_t low, high, other_low, other_high
    _bounds(at, &low, &high)
    _bounds(other_at, &other_low, &other_high)
    if low < other_high and other_low < high:
        arrays.check_apart(arrays.memory_of(array, name), [arrays.memory_of(other, "an input")], name)
    return 0


cdef int _take_out(
    object out, _Array *to, object state, const _Array *state_array, tuple inputs, const _Array *read,
    int ndim, Py_ssize_t tokens, Py_ssize_t n2, Py_ssize_t n3=0
) except -1:
    """Where results go; neither they nor the state share memory with what is read."""
    cdef int i
    _take(out, "out", to, ndim, state_array.shape[0], tokens, n2, n3)
    _check_writable(out, "out")
    if not _is_apart_from_itself(to):
        raise LayoutError("elements of out share memory")
    _check_apart(out, to, "out", state, state_array)
    for i in range(len(inputs)):
        if inputs[i] is not None:
            _check_apart(out, to, "out", inputs[i], &read[i])
            _check_apart(state, state_array, "the state", inputs[i], &read[i])
    return 0


cdef inline char *_sequence(const _Array *state, Py_ssize_t i):
    return state.data + i * state.strides[0]


cdef void *_calls(Py_ssize_t number, size_t size) except NULL:
    cdef void *calls = PyMem_Malloc(number * size)
    if calls == NULL:
        raise OutOfMemoryError(f"no memory for a call over {number} sequences")
    return calls


cdef int _check_step(kvedge_status status) except -1:
    if status == KVEDGE_ERROR_NONFINITE:
        raise NonFiniteInputError("the arguments of a state's step hold a NaN or an infinity")
    if status == KVEDGE_ERROR_MEMORY:
        raise OutOfMemoryError("no memory for a state's step")
    if status == KVEDGE_ERROR_ARGUMENT:
        raise InvalidArgumentError("a decay of a state's step is above 1, or its sizes are not served")
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())
    return 0


def delta_extend(state, query, key, value, gate, beta, out, float scale, bint normalize, int threads):
    """One or several tokens of the gated delta rule; kvedge.states.DeltaState tells of the arguments."""
    cdef _Array of, o
    cdef _Array[5] read
    cdef _Array *q = &read[0]
    cdef _Array *k = &read[1]
    cdef _Array *v = &read[2]
    cdef _Array *g = &read[3]
    cdef _Array *b = &read[4]
    cdef kvedge_delta_shape shape
    cdef kvedge_delta_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i, batch, tokens, heads
    _take_state(state, &of, 4)
    batch, heads = of.shape[0], of.shape[1]
    _take(query, "query", q, 4, batch, _ANY, _ANY, of.shape[2])
    tokens = q.shape[1]
    _take(key, "key", k, 4, batch, tokens, q.shape[2], of.shape[2])
    _take(value, "value", v, 4, batch, tokens, heads, of.shape[3])
    _take(gate, "gate", g, 4, batch, tokens, heads, _ANY)
    if g.shape[3] != 1:
        _take(gate, "gate", g, 4, batch, tokens, heads, of.shape[2])
    _take(beta, "beta", b, 3, batch, tokens, heads)
    _take_out(out, &o, state, &of, (query, key, value, gate, beta), read, 4, tokens, heads, of.shape[3])
    if batch == 0 or tokens == 0:
        return
    shape.num_heads, shape.num_key_heads = <int>heads, <int>q.shape[2]
    shape.key_dim, shape.value_dim, shape.gate_dim = <int>of.shape[2], <int>of.shape[3], <int>g.shape[3]
    shape.scale, shape.normalize = scale, normalize
    calls = <kvedge_delta_call *>_calls(batch, sizeof(kvedge_delta_call))
    try:
        for i in range(batch):
            calls[i].state, calls[i].state_type, calls[i].num_tokens = _sequence(&of, i), of.type, tokens
            calls[i].query, calls[i].key, calls[i].value = _rows_of(q, i), _rows_of(k, i), _rows_of(v, i)
            calls[i].gate, calls[i].beta, calls[i].out = _rows_of(g, i), _rows_of(b, i), _rows_of(&o, i)
        with nogil:
            status = kvedge_delta_extend(&shape, calls, <int>batch, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)


def mamba_extend(state, x, dt, A, B, C, D, out, int threads):
    """One or several tokens of Mamba-2; kvedge.states.MambaState tells of the arguments."""
    cdef _Array of, o
    cdef _Array[6] read
    cdef _Array *rows = &read[0]
    cdef _Array *steps = &read[1]
    cdef _Array *b = &read[2]
    cdef _Array *c = &read[3]
    cdef kvedge_mamba_shape shape
    cdef kvedge_mamba_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i, batch, tokens, heads
    _take_state(state, &of, 4)
    batch, heads = of.shape[0], of.shape[1]
    _take(x, "x", rows, 4, batch, _ANY, heads, of.shape[2])
    tokens = rows.shape[1]
    _take(dt, "dt", steps, 3, batch, tokens, heads)
    _take(B, "B", b, 4, batch, tokens, _ANY, of.shape[3])
    _take(C, "C", c, 4, batch, tokens, b.shape[2], of.shape[3])
    shape.a = _take_floats(A, "A", &read[4], 1, heads)
    shape.d = NULL if D is None else _take_floats(D, "D", &read[5], 1, heads)
    _take_out(out, &o, state, &of, (x, dt, B, C, A, D), read, 4, tokens, heads, of.shape[2])
    if batch == 0 or tokens == 0:
        return
    shape.num_heads, shape.num_groups = <int>heads, <int>b.shape[2]
    shape.head_dim, shape.state_size = <int>of.shape[2], <int>of.shape[3]
    calls = <kvedge_mamba_call *>_calls(batch, sizeof(kvedge_mamba_call))
    try:
        for i in range(batch):
            calls[i].state, calls[i].state_type, calls[i].num_tokens = _sequence(&of, i), of.type, tokens
            calls[i].x, calls[i].out, calls[i].dt = _rows_of(rows, i), _rows_of(&o, i), _rows_of(steps, i)
            calls[i].b, calls[i].c = _rows_of(b, i), _rows_of(c, i)
        with nogil:
            status = kvedge_mamba_extend(&shape, calls, <int>batch, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)


def conv_extend(state, x, weight, bias, bint silu, out, int threads):
    """One or several tokens of a short convolution; kvedge.states.ConvState tells of the arguments."""
    cdef _Array of, o
    cdef _Array[3] read
    cdef _Array *rows = &read[0]
    cdef kvedge_conv_shape shape
    cdef kvedge_conv_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i, batch, tokens, channels
    _take_state(state, &of, 3)
    batch, channels = of.shape[0], of.shape[1]
    _take(x, "x", rows, 3, batch, _ANY, channels)
    tokens = rows.shape[1]
    shape.weight = _take_floats(weight, "weight", &read[1], 2, channels, _ANY)
    shape.bias = NULL if bias is None else _take_floats(bias, "bias", &read[2], 1, channels)
    _take_out(out, &o, state, &of, (x, weight, bias), read, 3, tokens, channels)
    if batch == 0 or tokens == 0:
        return
    shape.num_channels, shape.width = <int>channels, <int>read[1].shape[1]
    shape.state_len, shape.silu = <int>of.shape[2], silu
    calls = <kvedge_conv_call *>_calls(batch, sizeof(kvedge_conv_call))
    try:
        for i in range(batch):
            calls[i].state, calls[i].state_type, calls[i].num_tokens = _sequence(&of, i), of.type, tokens
            calls[i].x, calls[i].out = _rows_of(rows, i), _rows_of(&o, i)
        with nogil:
            status = kvedge_conv_extend(&shape, calls, <int>batch, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)
