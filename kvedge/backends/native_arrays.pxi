"""Arrays of the caller's as C reads them: where they lie, their element type, shape and strides. Included by native.pyx.

A NumPy array or torch tensor in float32, float16 or bfloat16 is read as it lies, whatever its strides but of the last
axis. All others go through kvedge.core, which converts or refuses them.
"""

cdef enum:
    _MAX_AXES = 4

cdef object _NHD = "nhd"  # interned, as a literal of the caller's is


@cython.final
cdef class _Torch:
    """What is known of torch, once somebody has imported it; set once and never changed."""

    cdef object tensor, strided  # torch.Tensor, torch.strided
    cdef dict types              # torch.float32 and the others that C reads


cdef _Torch _torch = _Torch()


cdef struct _Array:
    char *data
    kvedge_element_type type
    int itemsize
    int ndim
    Py_ssize_t shape[_MAX_AXES]
    Py_ssize_t strides[_MAX_AXES]  # bytes


cdef bint _find_torch():
    torch = arrays.torch_if_loaded()
    if torch is None:
        return False
    types = {
        torch.float32: KVEDGE_TYPE_FLOAT32,
        torch.float16: KVEDGE_TYPE_FLOAT16,
        torch.bfloat16: KVEDGE_TYPE_BFLOAT16,
    }
    tensor, strided = torch.Tensor, torch.strided
    with cython.critical_section(_torch):  # of two threads that found it, the first is heard
        if _torch.tensor is None:
            if _team is None:
                use_openmp(openmp.find_team(torch))
            _torch.types, _torch.strided, _torch.tensor = types, strided, tensor
    return True


cdef inline bint _is_tensor(object array):
    cdef bint known
    with cython.critical_section(_torch):
        known = _torch.tensor is not None
    return (known or _find_torch()) and isinstance(array, _torch.tensor)


cdef bint _read(object array, _Array *to) except -1:
    """Whether `array` can be read as it lies: then `to` says how. Else kvedge.core has to look at it."""
    if cnp.PyArray_CheckExact(array):
        return _read_ndarray(<cnp.ndarray>array, to)
    if not _is_tensor(array) or array.requires_grad or not array.is_cpu:
        return False
    return array.layout is _torch.strided and not array.is_neg() and _read_tensor(array, to)


cdef bint _read_ndarray(cnp.ndarray array, _Array *to) except -1:
    cdef int i, kind = cnp.PyArray_TYPE(array)
    if kind == cnp.NPY_FLOAT32:
        to.type = KVEDGE_TYPE_FLOAT32
        to.itemsize = 4
    elif kind == cnp.NPY_FLOAT16:
        to.type = KVEDGE_TYPE_FLOAT16
        to.itemsize = 2
    elif arrays.is_bfloat16(array):
        to.type = KVEDGE_TYPE_BFLOAT16
        to.itemsize = 2
    else:
        return False
    if not cnp.PyArray_ISBEHAVED_RO(array) or not 1 <= array.ndim <= _MAX_AXES:
        return False
    to.data = <char *>cnp.PyArray_DATA(array)
    to.ndim = array.ndim
    for i in range(to.ndim):
        to.shape[i] = array.shape[i]
        to.strides[i] = array.strides[i]
    return _has_rows(to)


cdef bint _read_tensor(object tensor, _Array *to) except -1:
    cdef uintptr_t data
    cdef int i
    kind = _torch.types.get(tensor.dtype)
    if kind is None:
        return False
    to.type = <kvedge_element_type><int>kind
    to.itemsize = 4 if to.type == KVEDGE_TYPE_FLOAT32 else 2
    shape, strides = tensor.shape, tensor.stride()  # a torch.Size and a tuple
    to.ndim = <int>len(shape)
    if not 1 <= to.ndim <= _MAX_AXES:
        return False
    for i in range(to.ndim):
        to.shape[i] = shape[i]
        to.strides[i] = <Py_ssize_t>strides[i] * to.itemsize
    try:
        data = tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own, as those inside torch.func.vmap
        return False
    to.data = <char *>data
    return (data != 0 or _size(to) == 0) and _has_rows(to)


cdef inline bint _has_rows(const _Array *array):
    """Whether elements are aligned and those of the last axis lie side by side."""
    cdef int i
    if <uintptr_t>array.data % <uintptr_t>array.itemsize:
        return False
    for i in range(array.ndim):
        if array.strides[i] % array.itemsize:
            return False
    return (
        array.strides[array.ndim - 1] == array.itemsize
        or array.shape[array.ndim - 1] <= 1
        or _size(array) == 0
    )


cdef inline Py_ssize_t _size(const _Array *array):
    cdef Py_ssize_t size = 1
    cdef int i
    for i in range(array.ndim):
        size *= array.shape[i]
    return size


cdef inline void _swap_axes(_Array *array, int i, int j):
    array.shape[i], array.shape[j] = array.shape[j], array.shape[i]
    array.strides[i], array.strides[j] = array.strides[j], array.strides[i]


cdef inline void _insert_axis(_Array *array, int at):
    """An axis of size 1; there is room for it."""
    cdef int i
    for i in range(array.ndim, at, -1):
        array.shape[i] = array.shape[i - 1]
        array.strides[i] = array.strides[i - 1]
    array.shape[at] = 1
    array.strides[at] = 0
    array.ndim += 1


cdef inline bint _is_hnd(layout) except -1:
    return False if layout is _NHD else arrays.as_layout(layout) == "hnd"


cdef inline void _as_batch(_Array *array, bint one_layer, bint one_row, bint hnd):
    """Axes to (batch, n, heads, head_dim), of which one layer has no first and one row no second."""
    if one_layer:
        _insert_axis(array, 0)
    if one_row:
        _insert_axis(array, 1)
    elif hnd:
        _swap_axes(array, 1, 2)


cdef kvedge_array _rows_of(const _Array *array, Py_ssize_t i):
    """Row i of a batch (batch, n, heads, head_dim)."""
    cdef kvedge_array rows
    rows.data = array.data + i * array.strides[0]
    rows.type = array.type
    rows.token_stride = array.strides[1]
    rows.head_stride = array.strides[2]
    return rows


cdef void _bounds(const _Array *array, uintptr_t *low, uintptr_t *high):
    """All of its bytes lie from low to high."""
    cdef int i
    cdef Py_ssize_t reach
    low[0] = <uintptr_t>array.data
    high[0] = low[0] + array.itemsize
    if _size(array) == 0:
        high[0] = low[0]
        return
    for i in range(array.ndim):
        reach = (array.shape[i] - 1) * array.strides[i]
        if reach < 0:
            low[0] += reach
        else:
            high[0] += reach


cdef bint _is_apart_from_itself(const _Array *array):
    """Whether surely no two elements share memory: each stride passes over what smaller ones reach."""
    cdef Py_ssize_t reach = array.itemsize, stride, smallest
    cdef int i, next_axis, used = 0
    if _size(array) <= 1:
        return True
    while True:
        next_axis = -1
        smallest = 0
        for i in range(array.ndim):
            stride = array.strides[i] if array.strides[i] >= 0 else -array.strides[i]
            if array.shape[i] > 1 and not used >> i & 1 and (next_axis < 0 or stride < smallest):
                next_axis = i
                smallest = stride
        if next_axis < 0:
            return True
        if smallest < reach:
            return False
        reach += smallest * (array.shape[next_axis] - 1)
        used |= 1 << next_axis
