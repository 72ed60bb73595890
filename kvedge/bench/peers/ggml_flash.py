"""ggml's flash attention, called as llama.cpp calls it."""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

import numpy as np

from kvedge.bench import ggml
from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload

__all__ = ["GgmlFlashAttention"]

_TYPES = {"f16": ggml.F16, "q8_0": ggml.Q8_0, "q4_0": ggml.Q4_0}
_BLOCK = (
    32  # values of a block: 32 codes, of a byte (q8_0) or half of one (q4_0), and a float16 scale
)
_BLOCK_BYTES = {"f16": 2 * _BLOCK, "q8_0": _BLOCK + 2, "q4_0": _BLOCK // 2 + 2}
_GRAPH_NODES = 8  # views, permutations, the attention itself
_MASK_ROWS = 64  # older versions want a mask padded to so many rows
# sizeof(struct ggml_threadpool_params) is 528 with 512 threads at most; ggml fills it in itself.
_PARAMS_BYTES = 8192


class GgmlFlashAttention(Competitor):
    """``ggml_flash_attn_ext`` on the CPU backend, with a thread pool of its own.

    The cache is llama.cpp's: one row of num_kv_heads * head_dim per token, seen through a view and
    a permutation (``llama_kv_cache::get_k``, ``llm_graph_context::build_attn_mha``). llama.cpp adds
    a mask, all zeros here; leaving it out is in ggml's favour. A prompt needs one.
    """

    package = "llama-cpp-python"
    module = "llama_cpp"

    def __init__(self, kind: str) -> None:
        super().__init__(f"ggml-{kind}")
        self._kind = kind
        self._context: int | None = None
        self._backend: int | None = None
        self._pool: int | None = None
        self._mask: int | None = None
        self._graphs: list[tuple[int, np.ndarray]] = []  # graph, its output
        self._compute: Any = None

    def unavailable(self) -> str | None:
        """The libraries must be where llama-cpp-python's wheels have them."""
        missing = super().unavailable()
        if missing:
            return missing
        try:
            ggml.load()
        except OSError as error:
            return str(error)
        return None

    def version(self) -> str:
        """Return the version of the package that ggml came with."""
        return importlib.metadata.version(self.package)

    def refuses(self, shape: AttentionShape) -> str | None:
        """A head must be whole blocks, or its view would begin inside of one."""
        if self._kind != "f16" and shape.head_dim % _BLOCK:
            return f"head_dim {shape.head_dim} is no multiple of its blocks of {_BLOCK}"
        return None

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """Two bytes per value, or 34 or 18 for 32 values."""
        return shape.values_per_token * _BLOCK_BYTES[self._kind] / _BLOCK

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Make the tensors and one graph per copy."""
        lib: Any = ggml.load()
        shape, context = workload.shape, workload.context
        row = lib.row_size(_TYPES[self._kind], shape.num_kv_heads * shape.head_dim)
        # What tensors and graphs take besides their data, and the query and output of each copy.
        tensors = lib.tensor_overhead() + 64
        graph = lib.graph_overhead_custom(_GRAPH_NODES, False) + 64
        of_copy = 2 * row * context + 8 * workload.query.nbytes + 12 * tensors + graph
        mask = workload.hidden() if workload.query.ndim == 3 else np.empty((0, 0))
        mask = np.pad(mask, ((0, -len(mask) % _MASK_ROWS), (0, 0)))
        self._context = lib.new_context(copies * of_copy + 2 * mask.size + (1 << 20))
        if mask.size:
            self._mask = self._new_mask(lib, mask)
        self._start_backend(lib, num_threads)
        self._compute = lib.backend_graph_compute
        first: tuple[int, int] | None = None
        for _ in range(copies):
            keys, values = self._new_cache(lib, workload)
            for target, rows, source in zip(
                (keys, values),
                (workload.keys, workload.values),
                first or (None, None),
                strict=True,
            ):
                if source is None:
                    lib.from_float(_TYPES[self._kind])(
                        rows.ctypes.data, lib.get_data(target), rows.size
                    )
                else:
                    ctypes.memmove(lib.get_data(target), lib.get_data(source), row * context)
            first = first or (keys, values)
            self._graphs.append(self._new_graph(lib, workload, keys, values))

    def _new_mask(self, lib: Any, hidden: np.ndarray) -> int:
        added = np.where(hidden, np.float16(-np.inf), np.float16(0))
        mask: int = lib.new_tensor_2d(self._context, ggml.F16, *added.shape[::-1])
        ctypes.memmove(lib.get_data(mask), added.ctypes.data, added.nbytes)
        return mask

    def _start_backend(self, lib: Any, num_threads: int) -> None:
        self._backend = lib.backend_cpu_init()
        lib.backend_cpu_set_n_threads(self._backend, num_threads)
        parameters = ctypes.create_string_buffer(_PARAMS_BYTES)
        lib.threadpool_params_init(parameters, num_threads)
        self._pool = lib.threadpool_new(parameters)
        lib.backend_cpu_set_threadpool(self._backend, self._pool)

    def _new_cache(self, lib: Any, workload: Workload) -> tuple[int, int]:
        shape = workload.shape
        width = shape.num_kv_heads * shape.head_dim
        keys, values = (
            lib.new_tensor_2d(self._context, _TYPES[self._kind], width, workload.context)
            for _ in range(2)
        )
        return keys, values

    def _new_graph(
        self, lib: Any, workload: Workload, keys: int, values: int
    ) -> tuple[int, np.ndarray]:
        shape = workload.shape
        query = lib.new_tensor_4d(
            self._context, ggml.F32, shape.head_dim, shape.num_heads, workload.num_rows, 1
        )
        ctypes.memmove(lib.get_data(query), workload.query.ctypes.data, workload.query.nbytes)
        query, keys, values = (
            # (head_dim, heads, tokens) to (head_dim, tokens, heads): strides only
            lib.permute(self._context, tensor, 0, 2, 1, 3)
            for tensor in (
                query,
                self._by_head(lib, workload, keys),
                self._by_head(lib, workload, values),
            )
        )
        scale = shape.head_dim**-0.5
        output = lib.flash_attn_ext(self._context, query, keys, values, self._mask, scale, 0.0, 0.0)
        graph = lib.new_graph_custom(self._context, _GRAPH_NODES, False)
        lib.build_forward_expand(graph, output)
        floats = (ctypes.c_float * workload.query.size).from_address(lib.get_data(output))
        return graph, np.frombuffer(memoryview(floats), np.float32).reshape(workload.query.shape)

    def _by_head(self, lib: Any, workload: Workload, rows: int) -> int:
        shape, kind = workload.shape, _TYPES[self._kind]
        token = lib.row_size(kind, shape.num_kv_heads * shape.head_dim)
        view: int = lib.view_4d(
            self._context,
            rows,
            *(shape.head_dim, shape.num_kv_heads, workload.context, 1),
            *(lib.row_size(kind, shape.head_dim), token, token * workload.context, 0),
        )
        return view

    def run(self, copy: int) -> object:
        """Compute the graph."""
        graph, output = self._graphs[copy]
        self._compute(self._backend, graph)
        return output

    def as_array(self, output: object) -> np.ndarray:
        """Read ggml's memory while it is still there."""
        assert isinstance(output, np.ndarray)
        return output.copy()

    def release(self) -> None:
        """Free everything, in the reverse order."""
        lib: Any = ggml.load()
        self._graphs, self._compute, self._mask = [], None, None
        if self._backend is not None:
            lib.backend_free(self._backend)
        if self._pool is not None:
            lib.threadpool_free(self._pool)
        if self._context is not None:
            lib.free(self._context)
        self._context = self._backend = self._pool = None
