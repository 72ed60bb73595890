"""A weight matrix that stays in 16 or 8 bits, and its product with vectors.

The product of a matrix and a vector is what attention calls scores: a row of the matrix is a key,
the vector a query. So a matrix is kept as the keys of layers, and the layers' kernels multiply the
bytes where they lie. On x86-64 with AVX2 that is faster than NumPy's product with float32 weights,
for one vector as for many: there is less to read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

import kvedge

from ..core.formats import FORMATS
from ..core.rows import RowShape

__all__ = ["GROUP", "Matrix", "Weight", "is_worth_it", "product", "rows_of", "stored_bytes"]

GROUP = 32  # elements that share a scale in int8: a block of GGUF's Q8_0, which this holds exactly
_WIDEST = 1024  # channels of a head
_ROWS_AT_ONCE = 64  # vectors in a call: their scores are (vectors, rows of the matrix) float32
_MIN_BYTES_PER_THREAD = 1 << 19  # below this a second thread costs more than it brings

_CLASSES: dict[str, type[Any]] = {
    "int8": kvedge.QuantizedKvLayer,
    "float16": kvedge.Float16KvLayer,
    "bfloat16": kvedge.Bfloat16KvLayer,
}


def is_worth_it() -> bool:
    """Whether the active backend multiplies stored bytes as fast as NumPy does float32."""
    return kvedge.backend == "native" and kvedge.isa_info()["isa"] != "scalar"


class Matrix:
    """A matrix of (num_rows, num_columns) in a storage format.

    Parameters
    ----------
    num_rows, num_columns : int
    dtype : {"int8", "float16", "bfloat16"}
        int8 has a float16 scale per 32 elements of a row, where 32 divides their number.
    chunks : iterable of ndarray, float32 (n, num_columns)
        The rows, in order; all of them together.

    Raises
    ------
    NonFiniteInputError, ScaleRangeError
        A row that cannot be stored so.
    OutOfMemoryError
    """

    def __init__(
        self, num_rows: int, num_columns: int, dtype: str, chunks: Iterable[np.ndarray]
    ) -> None:
        self.shape = (num_rows, num_columns)
        self.dtype = dtype
        self._heads = heads_for(num_columns)
        width = num_columns // self._heads
        options: dict[str, Any] = {
            "num_kv_heads": self._heads,
            "head_dim": width,
            "value_head_dim": 1,
        }
        if dtype == "int8":
            options |= {"group_size": min(GROUP, width), "scale_dtype": "float16"}
        # A part per thread that may ever be asked for, in the order of rows.
        most = max(num_rows * num_columns // _MIN_BYTES_PER_THREAD, 1)
        count = min(most, kvedge.get_num_threads(), num_rows)
        self._bounds = [num_rows * i // count for i in range(count + 1)]
        sizes = np.diff(self._bounds)
        self._parts = [_CLASSES[dtype](capacity=int(size), **options) for size in sizes]
        at = part = 0
        for chunk in chunks:
            while len(chunk):
                room = self._parts[part].remaining
                rows, chunk = chunk[:room], chunk[room:]
                shape = (len(rows), self._heads, -1)
                self._parts[part].extend(rows.reshape(shape), np.zeros((*shape[:2], 1), np.float32))
                at += len(rows)
                part += self._parts[part].is_full
        assert at == num_rows, (at, num_rows)

    def __repr__(self) -> str:
        return f"Matrix({self.shape[0]}, {self.shape[1]}, {self.dtype!r})"

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.memory_bytes for part in self._parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.concatenate([part.keys() for part in self._parts]).reshape(self.shape)
        return whole.astype(dtype or np.float32, copy=False)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Some rows, float32 (n, num_columns)."""
        found = np.empty((len(indices), self.shape[1]), np.float32)
        form = FORMATS[self.dtype]
        for part, start, stop in zip(self._parts, self._bounds, self._bounds[1:], strict=False):
            here = (indices >= start) & (indices < stop)
            local = indices[here] - start
            shape = RowShape.of(part.head_dim, part.group_size, "float16", form.has_scales)
            scales = np.empty(0)
            if form.has_scales:  # one group has no axis in `key_scales`
                groups = (len(local), self._heads, shape.num_groups)
                scales = part.key_scales[local].reshape(groups)
            decoded = form.decode(part.key_codes[local], scales, shape, np.float32)
            found[here] = decoded.reshape(len(local), self.shape[1])
        return found

    def product(self, x: np.ndarray, num_threads: int | None = None) -> np.ndarray:
        """The matrix times vectors.

        Parameters
        ----------
        x : ndarray, float32 (n, num_columns)
        num_threads : int, optional
            None: as many as kvedge uses.

        Returns
        -------
        ndarray, float32 (n, num_rows)
        """
        out = np.empty((len(x), self.shape[0]), np.float32)
        threads = min(num_threads or kvedge.get_num_threads(), len(self._parts))

        def run(part: int) -> None:
            columns = slice(self._bounds[part], self._bounds[part + 1])
            for start in range(0, len(x), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                out[rows, columns] = self._scores(self._parts[part], x[rows])

        if threads == 1:
            for part in range(len(self._parts)):
                run(part)
        else:
            list(_pool(threads).map(run, range(len(self._parts))))
        return out

    def _scores(self, part: Any, x: np.ndarray) -> np.ndarray:
        """Products of one part, (n, rows of the part): vectors are the query heads of a group."""
        n = len(x)
        by_head = x.reshape(n, self._heads, -1).transpose(1, 0, 2)  # (heads, n, channels)
        query = np.ascontiguousarray(by_head).reshape(self._heads * n, -1)
        scores: np.ndarray = part.scores(query, scale=1.0)  # (heads * n, rows)
        return scores if self._heads == 1 else scores.reshape(self._heads, n, -1).sum(axis=0)


#: A matrix of weights, or a plain float32 array.
Weight = Matrix | np.ndarray


def product(x: np.ndarray, weight: Weight, num_threads: int | None = None) -> np.ndarray:
    """``x @ weight.T``: x (..., in), weight (out, in)."""
    if isinstance(weight, np.ndarray):
        return np.asarray(x @ weight.T)
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    return weight.product(flat, num_threads).reshape(*x.shape[:-1], -1)


def rows_of(weight: Weight, indices: np.ndarray) -> np.ndarray:
    """Some rows, float32 (n, in), a copy."""
    if isinstance(weight, np.ndarray):
        return np.asarray(weight[indices], np.float32)
    return weight.rows(indices)


def stored_bytes(num_rows: int, num_columns: int, dtype: str) -> int:
    """Bytes that a matrix takes in memory, as a plain array where `dtype` is "float32"."""
    if dtype == "float32":
        return 4 * num_rows * num_columns
    form, heads = FORMATS[dtype], heads_for(num_columns)
    scales = 2 * (num_columns // GROUP + heads) if form.has_scales else 0  # of keys, of values
    return num_rows * ((num_columns + heads) * form.bits // 8 + scales)


def heads_for(num_columns: int) -> int:
    """Parts that a row is cut into, each narrow enough for a head; as few as whole groups allow."""
    for heads in range(-(-num_columns // _WIDEST), num_columns + 1):
        if num_columns % heads == 0 and (num_columns // heads) % min(GROUP, num_columns) == 0:
            return heads
    return next(
        heads
        for heads in range(-(-num_columns // _WIDEST), num_columns + 1)
        if num_columns % heads == 0
    )


@cache  # dropped in a forked child, where its threads are not
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kvedge-matrix")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
