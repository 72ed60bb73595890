"""The step of states, as kvedge.states asks for it: shapes are right. Included by native.pyx.

Arrays have the axes of batch and tokens, and lie wherever _read() can read them; a state is dense, and bfloat16 as uint16.
"""

cdef struct _State:
    char *data
    kvedge_element_type type
    int batch_size
    Py_ssize_t bytes  # of one sequence


cdef int _read_state(cnp.ndarray state, _State *to) except -1:
    to.type = KVEDGE_TYPE_FLOAT32 if cnp.PyArray_TYPE(state) == cnp.NPY_FLOAT32 else KVEDGE_TYPE_BFLOAT16
    to.data = <char *>cnp.PyArray_DATA(state)
    to.batch_size = <int>state.shape[0]
    to.bytes = cnp.PyArray_NBYTES(state) // to.batch_size
    return 0


cdef int _read_rows(object array, _Array *to) except -1:
    if not _read(array, to):
        raise KvedgeError(f"cannot read {type(array).__name__} of {array.dtype} as it lies")
    return 0


cdef void *_calls(Py_ssize_t number, size_t size) except NULL:
    cdef void *calls = PyMem_Malloc(number * size)
    if calls == NULL:
        raise OutOfMemoryError(f"no memory for a call over {number} sequences")
    return calls


cdef int _check_step(kvedge_status status) except -1:
    if status == KVEDGE_ERROR_NONFINITE:
        raise NonFiniteInputError("the arguments of a state's step hold a NaN or an infinity")
    if status != KVEDGE_OK:
        raise KvedgeError(kvedge_strerror(status).decode())
    return 0


def delta_extend(cnp.ndarray state, query, key, value, gate, beta, out, float scale, bint normalize, int threads):
    """One or several tokens of the gated delta rule; kvedge.states.DeltaState tells of the arguments."""
    cdef _State of
    cdef _Array q, k, v, g, b, o
    cdef kvedge_delta_shape shape
    cdef kvedge_delta_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i
    _read_state(state, &of)
    _read_rows(query, &q), _read_rows(key, &k), _read_rows(value, &v)
    _read_rows(gate, &g), _read_rows(beta, &b), _read_rows(out, &o)
    shape.num_heads, shape.num_key_heads = <int>state.shape[1], <int>k.shape[2]
    shape.key_dim, shape.value_dim, shape.gate_dim = <int>state.shape[2], <int>state.shape[3], <int>g.shape[3]
    shape.scale, shape.normalize = scale, normalize
    calls = <kvedge_delta_call *>_calls(of.batch_size, sizeof(kvedge_delta_call))
    try:
        for i in range(of.batch_size):
            calls[i].state, calls[i].state_type = of.data + i * of.bytes, of.type
            calls[i].num_tokens = q.shape[1]
            calls[i].query, calls[i].key, calls[i].value = _rows_of(&q, i), _rows_of(&k, i), _rows_of(&v, i)
            calls[i].gate, calls[i].beta, calls[i].out = _rows_of(&g, i), _rows_of(&b, i), _rows_of(&o, i)
        with nogil:
            status = kvedge_delta_extend(&shape, calls, of.batch_size, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)


def mamba_extend(
    cnp.ndarray state, x, dt, cnp.ndarray A, B, C, D, out, int threads
):
    """One or several tokens of Mamba-2; kvedge.states.MambaState tells of the arguments."""
    cdef _State of
    cdef _Array rows, steps, b, c, o
    cdef kvedge_mamba_shape shape
    cdef kvedge_mamba_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i
    _read_state(state, &of)
    _read_rows(x, &rows), _read_rows(dt, &steps), _read_rows(B, &b), _read_rows(C, &c), _read_rows(out, &o)
    shape.num_heads, shape.num_groups = <int>state.shape[1], <int>b.shape[2]
    shape.head_dim, shape.state_size = <int>state.shape[2], <int>state.shape[3]
    shape.a, shape.d = _floats(A), NULL if D is None else _floats(D)
    calls = <kvedge_mamba_call *>_calls(of.batch_size, sizeof(kvedge_mamba_call))
    try:
        for i in range(of.batch_size):
            calls[i].state, calls[i].state_type = of.data + i * of.bytes, of.type
            calls[i].num_tokens = rows.shape[1]
            calls[i].x, calls[i].out, calls[i].dt = _rows_of(&rows, i), _rows_of(&o, i), _rows_of(&steps, i)
            calls[i].b, calls[i].c = _rows_of(&b, i), _rows_of(&c, i)
        with nogil:
            status = kvedge_mamba_extend(&shape, calls, of.batch_size, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)


def conv_extend(cnp.ndarray state, x, cnp.ndarray weight, bias, bint silu, out, int threads):
    """One or several tokens of a short convolution; kvedge.states.ConvState tells of the arguments."""
    cdef _State of
    cdef _Array rows, o
    cdef kvedge_conv_shape shape
    cdef kvedge_conv_call *calls
    cdef kvedge_status status
    cdef Py_ssize_t i
    _read_state(state, &of)
    _read_rows(x, &rows), _read_rows(out, &o)
    shape.num_channels, shape.width = <int>state.shape[1], <int>weight.shape[1]
    shape.state_len, shape.silu = <int>state.shape[2], silu
    shape.weight, shape.bias = _floats(weight), NULL if bias is None else _floats(bias)
    calls = <kvedge_conv_call *>_calls(of.batch_size, sizeof(kvedge_conv_call))
    try:
        for i in range(of.batch_size):
            calls[i].state, calls[i].state_type = of.data + i * of.bytes, of.type
            calls[i].num_tokens = rows.shape[1]
            calls[i].x, calls[i].out = _rows_of(&rows, i), _rows_of(&o, i)
        with nogil:
            status = kvedge_conv_extend(&shape, calls, of.batch_size, threads)
    finally:
        PyMem_Free(calls)
    _check_step(status)
