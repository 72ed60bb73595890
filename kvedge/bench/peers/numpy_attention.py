"""NumPy: what attention costs without any library for it."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload
from kvedge.core.packages import obstacle

__all__ = ["NumpyAttention"]


class NumpyAttention(Competitor):
    """Two batched matrix products (BLAS) and a softmax, keys and values head-major in float32.

    A prompt goes one KV head after the other, so that the logits stay small.
    """

    package = "numpy"

    def __init__(self, kind: str) -> None:
        super().__init__(f"numpy-{kind}")
        self._stored: list[tuple[np.ndarray, np.ndarray]] = []
        self._query = np.empty(0, np.float32)  # (num_kv_heads, group * rows, head_dim), scaled
        self._hidden: np.ndarray | None = None  # of a prompt: (rows, T), added to the logits
        self._limits = contextlib.ExitStack()

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """Four bytes per value."""
        return 4 * shape.values_per_token

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Store (num_kv_heads, T, head_dim), so that BLAS reads each head in one piece."""
        self._limit_threads(num_threads)
        shape = workload.shape
        by_row = workload.query.reshape(workload.num_rows, shape.num_heads, shape.head_dim)
        by_head = by_row.swapaxes(0, 1).reshape(shape.num_kv_heads, -1, shape.head_dim)
        self._query = by_head / np.sqrt(np.float32(shape.head_dim))
        if workload.query.ndim == 3:
            self._hidden = np.where(workload.hidden(), -np.inf, 0).astype(np.float32)
        for _ in range(copies):
            keys = np.ascontiguousarray(workload.keys.swapaxes(0, 1))
            values = np.ascontiguousarray(workload.values.swapaxes(0, 1))
            self._stored.append((keys, values))

    def _limit_threads(self, num_threads: int) -> None:
        if why := obstacle("threadpoolctl"):
            self.note = f"as many threads as its BLAS takes ({why})"
            return
        limit: Any = importlib.import_module("threadpoolctl").threadpool_limits
        self._limits.enter_context(limit(num_threads, user_api="blas"))

    def run(self, copy: int) -> object:
        """Attend: the heads of a group are the rows of one matrix."""
        keys, values = self._stored[copy]
        if self._hidden is None:
            return self._attend(self._query, keys, values)
        heads = range(len(keys))
        return np.stack([self._attend(self._query[h], keys[h], values[h]) for h in heads])

    def _attend(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        logits = np.matmul(query, keys.swapaxes(-1, -2))  # (..., group * rows, T)
        if self._hidden is not None:
            by_row = logits.reshape(-1, *self._hidden.shape)
            by_row += self._hidden
        logits -= logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits, out=logits)
        sums = weights.sum(axis=-1, keepdims=True)
        return np.asarray(np.matmul(weights, values) / sums)

    def as_array(self, output: object) -> np.ndarray:
        """Put the groups back in a row, and the rows of a prompt first."""
        assert isinstance(output, np.ndarray)
        if self._hidden is None:
            return output.reshape(-1, output.shape[-1])
        return output.reshape(-1, len(self._hidden), output.shape[-1]).swapaxes(0, 1)

    def release(self) -> None:
        """Drop the arrays, and give BLAS its threads back."""
        self._stored, self._hidden = [], None
        self._limits.close()
