"""One node of ggml, attention or the scan of an index, made and computed by its own functions."""

import ctypes as c

import llama_cpp.llama_cpp as api
import numpy as np

_lib = api._lib
F32, F16, BF16 = 0, 1, 30
QUANTIZED = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q6_k": 14, "iq4_nl": 20}


class _InitParams(c.Structure):
    _fields_ = [("bytes", c.c_size_t), ("memory", c.c_void_p), ("no_alloc", c.c_bool)]


def _function(name, result, *arguments):
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, arguments
    return function


_init = _function("ggml_init", c.c_void_p, _InitParams)
_free = _function("ggml_free", None, c.c_void_p)
_tensor = _function("ggml_new_tensor_4d", c.c_void_p, c.c_void_p, c.c_int, *[c.c_int64] * 4)
_data = _function("ggml_get_data", c.c_void_p, c.c_void_p)
_attention = _function(
    "ggml_flash_attn_ext", c.c_void_p, *[c.c_void_p] * 5, c.c_float, c.c_float, c.c_float
)
_add_sinks = _function("ggml_flash_attn_ext_add_sinks", None, c.c_void_p, c.c_void_p)
_graph = _function("ggml_new_graph", c.c_void_p, c.c_void_p)
_expand = _function("ggml_build_forward_expand", None, c.c_void_p, c.c_void_p)
_type_size = _function("ggml_type_size", c.c_size_t, c.c_int)
_block_elements = _function("ggml_blck_size", c.c_int64, c.c_int)
_by_type = _function("ggml_backend_init_by_type", c.c_void_p, c.c_int, c.c_char_p)
_compute = _function("ggml_backend_graph_compute", c.c_int, c.c_void_p, c.c_void_p)
_free_backend = _function("ggml_backend_free", None, c.c_void_p)


_set_rows = _function("ggml_set_rows", *[c.c_void_p] * 5)
_copy = _function("ggml_cpy", *[c.c_void_p] * 4)
_view = _function(
    "ggml_view_4d", c.c_void_p, c.c_void_p, c.c_void_p, *[c.c_int64] * 4, *[c.c_size_t] * 4
)
I64 = 27
HAS_INDEX = hasattr(_lib, "ggml_lightning_indexer")
if HAS_INDEX:
    _scan = _function("ggml_lightning_indexer", *[c.c_void_p] * 6)


class Cache:
    """A cache of keys and values as llama.cpp has it: cells of rows, and graphs that write them and
    attend to all of them, in one backend."""

    def __init__(self, types, cells, kv_heads=2, dim=64, threads=2):
        self.cells, self.kv_heads, self.dim = cells, kv_heads, dim
        self.types = [{"f16": F16, "f32": F32, **QUANTIZED}[name] for name in types]
        elements = kv_heads * dim
        self.row_bytes = [elements // _block_elements(t) * _type_size(t) for t in self.types]
        self._context = _init(_InitParams(sum(self.row_bytes) * cells + (1 << 16), None, False))
        self._tensors = [_tensor(self._context, t, elements, cells, 1, 1) for t in self.types]
        self.bytes = []
        for tensor, size in zip(self._tensors, self.row_bytes, strict=True):
            flat = (c.c_uint8 * (size * cells)).from_address(_data(tensor))
            self.bytes.append(np.frombuffer(flat, np.uint8).reshape(cells, size))
            self.bytes[-1][:] = 0
        self._backend = _by_type(0, None)
        _lib.ggml_backend_cpu_set_n_threads.argtypes = [c.c_void_p, c.c_int]
        _lib.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def step(self, keys, values, cells, q, mask, scale=0.125, by_copy=False):
        """Write rows (tokens, KV heads, dim) into cells, and return the attention (tokens, heads,
        dim) of q (heads, tokens, dim) to all cells under a mask (rows, cells). ``by_copy``: as
        llama.cpp did before August 2025, into cells that follow each other."""
        tokens, elements = len(cells), self.kv_heads * self.dim
        sizes = [8 * tokens * elements, 8 * q.size, 2 * mask.size]
        context = _init(_InitParams(sum(sizes) + (1 << 20), None, False))

        def tensor(kind, array, *shape):
            made = _tensor(context, kind, *[*shape, 1, 1, 1][:4])
            data = np.ascontiguousarray(array)
            c.memmove(_data(made), data.ctypes.data, data.nbytes)
            return made

        graph = _graph(context)
        sides = []
        for i, rows in enumerate((keys, values)):
            source = tensor(F32, np.asarray(rows, np.float32), elements, tokens)
            head = self.dim // _block_elements(self.types[i]) * _type_size(self.types[i])
            cell = self.row_bytes[i]
            if by_copy:
                place = (elements, tokens, 1, 1, cell, cell * tokens, cell * tokens)
                to = _view(context, self._tensors[i], *place, cell * cells[0])
                _expand(graph, _copy(context, source, to))
            else:
                index = tensor(I64, np.asarray(cells, np.int64), tokens)
                _expand(graph, _set_rows(context, self._tensors[i], source, index))
            shape = (self.dim, self.cells, self.kv_heads, 1)
            sides.append(_view(context, self._tensors[i], *shape, cell, head, cell * self.cells, 0))
        heads = q.shape[0]
        query = tensor(F32, q, self.dim, tokens, heads)
        shown = tensor(F16, mask, self.cells, len(mask))
        node = _attention(context, query, *sides, shown, scale, 0.0, 0.0)
        _expand(graph, node)
        try:
            assert _compute(self._backend, graph) == 0
            flat = (c.c_float * (tokens * heads * self.dim)).from_address(_data(node))
            return np.array(flat, np.float32).reshape(tokens, heads, self.dim)
        finally:
            _free(context)

    def close(self):
        _free_backend(self._backend)
        _free(self._context)


class Blocks:
    """Rows of a quantized type: their bytes, (heads, cells, bytes)."""

    def __init__(self, name, data):
        self.type, self.data = QUANTIZED[name], data
        self.nbytes, self.size = data.nbytes, data.size
        self.strides, self.base = data.strides, None
        elements = data.shape[-1] // _type_size(self.type) * _block_elements(self.type)
        self.shape = (*data.shape[:-1], elements)


def _filled(context, array):
    """A tensor with the bytes of an array or of Blocks."""
    if isinstance(array, Blocks):
        kind, data = array.type, array.data
    else:
        kind, data = {"float32": F32, "float16": F16, "uint16": BF16}[array.dtype.name], array
    made = _tensor(context, kind, *[*array.shape[::-1], 1, 1, 1][:4])
    c.memmove(_data(made), np.ascontiguousarray(data).ctypes.data, data.nbytes)
    return made


def _computed(context, node, shape, threads):
    """What ggml's CPU backend computes for a node, float32 of a shape."""
    backend = _by_type(0, None)
    try:
        graph = _graph(context)
        _expand(graph, node)
        _lib.ggml_backend_cpu_set_n_threads.argtypes = [c.c_void_p, c.c_int]
        _lib.ggml_backend_cpu_set_n_threads(backend, threads)
        assert _compute(backend, graph) == 0
        flat = (c.c_float * int(np.prod(shape))).from_address(_data(node))
        return np.array(flat, np.float32).reshape(shape)
    finally:
        _free_backend(backend)


def scan(q, k, weights, mask, threads=2):
    """Return ggml's scores (streams, rows, keys) of the keys of an index.

    Queries are (streams, rows, heads, dim), and lie as their array's strides tell, weights
    (streams, rows, heads), keys (streams, keys, dim) in the types of :func:`attend`; the mask is
    float16 (streams or 1, rows, keys).
    """

    def whole_of(array):
        return array if array.base is None else array.base

    shape = (*q.shape[:2], k.shape[1])
    size = sum(whole_of(array).nbytes for array in (q, k, weights)) + mask.nbytes
    context = _init(_InitParams(size + 4 * int(np.prod(shape)) + (1 << 20), None, False))

    def view(array, *axes):
        """The axes of an array, from the innermost on, in a tensor of all that it is part of."""
        whole = whole_of(array)
        sizes = [1 if axis is None else array.shape[axis] for axis in axes]
        strides = [whole.nbytes if axis is None else array.strides[axis] for axis in axes]
        return _view(context, _filled(context, whole), *sizes, *strides[1:], 0)

    try:
        node = _scan(
            context,
            view(q, 3, 2, 1, 0),
            view(k, 2, None, 1, 0),
            view(weights, 2, 1, None, 0),
            _filled(context, mask[:, None]),
        )
        return _computed(context, node, shape, threads)
    finally:
        _free(context)


def attend(q, k, v, mask=None, *, sinks=None, scale=0.125, max_bias=0.0, softcap=0.0, threads=2):
    """Return ggml's (rows, heads, dim) of q (heads, rows, dim), k and v (heads, cells, dim).

    Keys and values are float32, float16, bfloat16 as uint16, or Blocks; the mask is float16 (rows,
    cells). Values may be ``k[..., :dim]``, in the keys' rows as latents of MLA are.
    """
    size = 1 << 20
    size += (
        4 * sum(array.size for array in (q, k, v))
        + 4 * q.size
        + (mask.nbytes if mask is not None else 0)
    )
    context = _init(_InitParams(size, None, False))

    def tensor(array):
        return _filled(context, array)

    try:
        keys = tensor(k)
        if isinstance(v, np.ndarray) and v.base is k:
            strides = (k.strides[1], k.strides[0], k.nbytes)
            values = _view(context, keys, *v.shape[::-1], 1, *strides, 0)
        else:
            values = tensor(v)
        node = _attention(
            context,
            tensor(q),
            keys,
            values,
            None if mask is None else tensor(mask),
            scale,
            max_bias,
            softcap,
        )
        if sinks is not None:
            _add_sinks(node, tensor(sinks))
        return _computed(context, node, (q.shape[1], q.shape[0], v.shape[-1]), threads)
    finally:
        _free(context)


def expected(q, k, v, mask, *, sinks=None, scale=0.125, max_bias=0.0, softcap=0.0):
    """Return the same in float64."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    heads, rows, _ = q.shape
    group = heads // k.shape[0]
    out = np.zeros((rows, heads, v.shape[-1]))
    power = 2.0 ** np.floor(np.log2(heads))
    for h in range(heads):
        logits = q[h] @ k[h // group].T * scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        slope = 1.0
        if max_bias:
            m0, m1 = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
            slope = m0 ** (h + 1) if h < power else m1 ** (2 * (h - power) + 1)
        if mask is not None:
            logits = logits + slope * np.asarray(mask[:rows], np.float64)
        for row in range(rows):
            most = logits[row].max()
            if np.isneginf(most):
                continue
            p = np.exp(logits[row] - most)
            total = p.sum() + (np.exp(sinks[h] - most) if sinks is not None else 0.0)
            out[row, h] = p @ v[h // group] / total
    return out


def expected_scores(q, k, weights, mask):
    """Return the scores of :func:`scan` in float64; keys are float32."""
    products = np.einsum("srhd,skd->srhk", q.astype(np.float64), k.astype(np.float64))
    scores = np.einsum("srhk,srh->srk", np.maximum(products, 0), weights.astype(np.float64))
    return scores + mask[:, : q.shape[1]]
