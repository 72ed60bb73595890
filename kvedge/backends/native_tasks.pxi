"""What each task of a call takes alone on one thread. Included by native.pyx."""

def task_times(layer, query, int num_threads, int first):
    """Run the tasks of a call, as they are cut for several threads, on this thread: all from one on, in a circle.

    Parameters
    ----------
    layer : KvLayer
        With tokens, but no recent ones or sinks of another format.
    query : numpy.ndarray
        float32 (num_heads, head_dim).
    num_threads : int
        1 to 1,024: for how many tasks are cut.
    first : int
        The task that begins, modulo their number. The last one merges as well, where tokens are split.

    Returns
    -------
    serial_seconds : float
        To plan the call, and to prepare queries that tasks share.
    task_seconds : list of float
        Of each task, in their order.

    Raises
    ------
    InvalidArgumentError
    OutOfMemoryError
    """
    cdef LayerStore store = <LayerStore>_as_stores([layer])[0]
    cdef _Handle handle = store._opened()
    cdef _Array asked, to
    cdef kvedge_attention_call call
    cdef kvedge_slices *slices
    cdef kvedge_status status
    cdef cnp.npy_intp shape[2]
    cdef size_t size, start
    cdef int i, task, num_tasks
    if not store._is_query(query) or query.ndim != 2:
        raise InvalidArgumentError(
            f"query must be float32 (num_heads, {store._head_dim}), got {checks.describe(query)}")
    _read_ndarray(<cnp.ndarray>query, &asked)
    shape[0], shape[1] = asked.shape[0], store._value_head_dim
    out = _empty(2, shape)
    _read_ndarray(<cnp.ndarray>out, &to)
    _as_batch(&asked, True, True, False)
    _as_batch(&to, True, True, False)
    memset(&call, 0, sizeof(call))
    call.layer, call.num_rows, call.num_heads = handle.layer, 1, <int>shape[0]
    call.query, call.out = _rows_of(&asked, 0), _rows_of(&to, 0)
    size = kvedge_slices_bytes(&call, 1, num_threads)
    if size == 0:
        raise InvalidArgumentError(
            "tasks are those of a layer that has tokens, but no recent ones or sinks of another format (as kivi's), "
            f"and of 1 to {_MAX_THREADS} threads; got {num_threads} threads and {layer!r}")
    cdef char *memory_of = <char *>PyMem_Malloc(size + 64)
    if memory_of == NULL:
        raise OutOfMemoryError(f"cannot allocate {size} bytes for a call")
    try:
        start = 64 - <uintptr_t>memory_of % 64
        begin = perf_counter()
        status = kvedge_slices_init(memory_of + start, size, &call, 1, num_threads, &slices)
        serial = perf_counter() - begin
        if status != KVEDGE_OK:
            store._refuse_attend(query, status)
        num_tasks = kvedge_slices_count(slices)
        seconds = [0.0] * num_tasks
        for i in range(num_tasks):
            task = (first % num_tasks + i) % num_tasks
            begin = perf_counter()
            kvedge_slices_run(slices, task, (task + 1) % num_tasks if i + 1 < num_tasks else -1, 0)
            seconds[task] = perf_counter() - begin
        return serial, seconds
    finally:
        PyMem_Free(memory_of)
