"""Index keys: what a model's indexer scores to choose the tokens that attention reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from kvedge.core import hadamard, half
from kvedge.core.checks import (
    as_float,
    as_float32,
    as_int,
    check_drop,
    check_finite,
    check_length,
)
from kvedge.core.config import one_of
from kvedge.core.memory import aligned_zeros
from kvedge.core.options import as_num_threads
from kvedge.core.registry import active
from kvedge.core.selection import Selection
from kvedge.core.types import Array
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    PositionOutOfRangeError,
    ScaleRangeError,
    ShapeMismatchError,
)

__all__ = ["IndexDtype", "KeyIndex"]

IndexDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]

_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_MAX_DIM = 1024
_LEAST_ROOM = 64
_LARGEST = 2.0**40  # KVEDGE_INDEX_LARGEST: so that all products are finite


class KeyIndex:
    """The index keys of a layer, and the selection of tokens by them.

    A key is one token's, or with ``ratio`` above 1 that of a block of so many adjacent tokens: the
    mean of what was appended for them, stored when the block is whole. A row sees the keys whose
    tokens all lie up to its own position, and its score of one is::

        sum_h weights[h] * max(0, scale * q_h . k)

    or, with ``per_head``, ``scale * q_h . k`` for each head alone. The best are chosen, ties to the
    lower position (DeepSeek V3.2, Qwen4-Exp, MiniMax M3; docs/indexed.md).

    Parameters
    ----------
    capacity : int or None
        Tokens that there is room for; None: it grows.
    head_dim : int
        Channels of a key, 1 to 1024.
    ratio : int
        Tokens of a key.
    dtype : {"int8", "bfloat16", "float32"}
        How keys are stored. "int8" rotates them by a Hadamard matrix first, and queries too, and
        has a scale for each.
    raw_tokens : int or None
        With ``ratio`` above 1, of how many last tokens what was appended stays in float32:
        :meth:`truncate` into the middle of a block needs it. None: of all.

    Raises
    ------
    InvalidArgumentError

    Examples
    --------
    >>> import numpy as np
    >>> index = KeyIndex(None, 4, dtype="float32")
    >>> index.append(np.eye(4, dtype=np.float32))
    >>> index.select(np.array([[0, 0, 1, 0.5]], np.float32), 2).tolist()  # one row, one head
    [[2, 3]]
    """

    def __init__(
        self,
        capacity: int | None,
        head_dim: int,
        *,
        ratio: int = 1,
        dtype: IndexDtype = "int8",
        raw_tokens: int | None = 64,
    ) -> None:
        self._capacity = None if capacity is None else _count(capacity, "capacity", 1 << 40)
        self._head_dim = _count(head_dim, "head_dim", _MAX_DIM)
        self._ratio = _count(ratio, "ratio", 1 << 16)
        self._raw_tokens = None if raw_tokens is None else as_int(raw_tokens, "raw_tokens")
        if self._raw_tokens is not None and self._raw_tokens < 0:
            raise InvalidArgumentError(f"raw_tokens must be at least 0, not {raw_tokens}")
        one_of(dtype, "dtype", get_args(IndexDtype))
        self._dtype: IndexDtype = dtype
        self._length = 0
        self._keys = aligned_zeros((0, self._head_dim), _TYPES[dtype])
        self._scales = aligned_zeros((0,), np.float32)
        self._raw = np.empty((0, self._head_dim), np.float32)  # of the last tokens

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Tokens that there is room for; None: it grows."""
        return self._capacity

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self._head_dim

    @property
    def ratio(self) -> int:
        """Tokens of a key."""
        return self._ratio

    @property
    def dtype(self) -> IndexDtype:
        """How keys are stored."""
        return self._dtype

    @property
    def num_keys(self) -> int:
        """Keys stored: those of whole blocks."""
        return self._length // self._ratio

    @property
    def memory_bytes(self) -> int:
        """Bytes that keys, their scales and what stays of the last tokens take."""
        return self._keys.nbytes + self._scales.nbytes + self._raw.nbytes

    def __len__(self) -> int:
        """Tokens appended."""
        return self._length

    def __repr__(self) -> str:
        ratio = f", ratio={self._ratio}" if self._ratio > 1 else ""
        return (
            f"KeyIndex({self._capacity}, {self._head_dim}{ratio}, dtype={self._dtype!r}): "
            f"{self._length} tokens, {self.num_keys} keys"
        )

    def keys(self) -> np.ndarray:
        """The keys as they are stored, float32 (num_keys, head_dim); int8 ones rotated back."""
        keys = self._decoded()
        return hadamard.rotate_float32(keys) if self._dtype == "int8" else keys.copy()

    # ---- appending and removing ------------------------------------------------------------------

    def append(
        self, keys: Array, finish: Callable[[np.ndarray, np.ndarray], Array] | None = None
    ) -> None:
        """Append the index keys of tokens.

        Parameters
        ----------
        keys : array
            float32 (n, head_dim), or (head_dim,) for one token. float16 and bfloat16 are converted.
        finish : callable, optional
            Called with the means float32 (m, head_dim) of blocks that became whole and the
            positions int64 (m,) of their first tokens; returns the keys to store, of the same
            shape: the model's norm and rotation.

        Raises
        ------
        CapacityExceededError, ShapeMismatchError, DtypeMismatchError, NonFiniteInputError
            Nothing has changed.
        ScaleRangeError
            A key is above 2^40.
        """
        rows = as_float32(keys, "keys", contiguous=False)
        rows = rows[np.newaxis] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != self._head_dim:
            raise ShapeMismatchError(
                f"keys must be (n, {self._head_dim}) or ({self._head_dim},), not {rows.shape}",
                expected=("n", self._head_dim),
                got=rows.shape,
            )
        check_finite(rows, "keys")
        stop = self._length + len(rows)
        if self._capacity is not None and stop > self._capacity:
            raise CapacityExceededError(
                f"{len(rows)} tokens more than {self._length} are {stop}, and the capacity is "
                f"{self._capacity}",
                expected=self._capacity,
                got=stop,
            )
        raw = rows
        if self._ratio > 1:
            raw = np.concatenate([self._raw, rows])
            behind = self._length % self._ratio + len(rows)  # tokens without a key yet
            pending = raw[len(raw) - behind :][: behind // self._ratio * self._ratio]
            rows = pending.reshape(-1, self._ratio, self._head_dim).mean(1)
        if finish is not None and len(rows):
            firsts = (self.num_keys + np.arange(len(rows))) * self._ratio
            shape = rows.shape
            rows = as_float32(finish(rows, firsts), "finish(keys)", shape=shape, contiguous=False)
            check_finite(rows, "finish(keys)")
        if rows.size and np.abs(rows).max() > _LARGEST:
            raise ScaleRangeError(f"keys hold {np.abs(rows).max():.6g}, above {_LARGEST:.6g}")
        self._store(rows)
        self._length = stop
        if self._ratio > 1:
            left = raw if self._raw_tokens is None else raw[-self._raw_needed() :]
            self._raw = left.copy() if self._raw_needed() else raw[:0].copy()

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens.

        Raises
        ------
        PositionOutOfRangeError
            `n` is beyond the tokens, or in the middle of a block whose tokens' own keys did not
            stay (``raw_tokens``).
        """
        n = check_length(n, self._length)
        if self._ratio > 1:
            first = self._length - len(self._raw)  # token of the first that stayed
            if n % self._ratio and n - n % self._ratio < first:
                raise PositionOutOfRangeError(
                    f"truncate({n}) cuts a block of {self._ratio} tokens, and of tokens before "
                    f"{first} only whole blocks are stored: give raw_tokens=None, or a multiple"
                )
            self._raw = self._raw[: max(0, n - first)]
        self._length = n

    def clear(self) -> None:
        """Remove all tokens."""
        self.truncate(0)

    def drop_first(self, n: int) -> None:
        """Remove the first `n` tokens, a multiple of ratio; the others move to positions from 0 on.

        Raises
        ------
        PositionOutOfRangeError, InvalidArgumentError
        """
        n = check_drop(n, self._length)
        if n % self._ratio:
            raise InvalidArgumentError(f"n must be a multiple of ratio={self._ratio}, not {n}")
        keys, dropped = self.num_keys, n // self._ratio
        for stored in (self._keys, self._scales):
            if len(stored):
                stored[: keys - dropped] = stored[dropped:keys].copy()
        self._length -= n
        self._raw = self._raw[-self._length :] if self._length else self._raw[:0]

    def _raw_needed(self) -> int:
        """Tokens whose own keys stay: `raw_tokens`, and the rest of their blocks."""
        assert self._raw_tokens is not None or self._ratio > 1
        if self._raw_tokens is None:
            return self._length
        whole = -(-self._raw_tokens // self._ratio) * self._ratio
        return whole + self._length % self._ratio

    def _store(self, rows: np.ndarray) -> None:
        """Store keys behind those there are."""
        first, stop = self.num_keys, self.num_keys + len(rows)
        if stop > len(self._keys):
            most = None if self._capacity is None else self._capacity // self._ratio
            room = max(stop, 2 * len(self._keys), _LEAST_ROOM)
            room = room if most is None else min(room, most)
            for name in ("_keys", "_scales") if self._dtype == "int8" else ("_keys",):
                old = getattr(self, name)
                new = aligned_zeros((room, *old.shape[1:]), old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
        codes, scales = self._stored(first, stop)
        active("index_encode")(self._dtype, np.ascontiguousarray(rows), codes, scales)

    def _stored(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The codes of some keys, and their scales if they have any."""
        return self._keys[first:stop], self._scales[first:stop] if self._dtype == "int8" else None

    def _decoded(self) -> np.ndarray:
        keys = self._keys[: self.num_keys]
        if self._dtype == "bfloat16":
            return half.decode_bfloat16(keys)
        if self._dtype == "int8":
            return np.asarray(keys * self._scales[: self.num_keys, np.newaxis])
        return keys

    # ---- selection -------------------------------------------------------------------------------

    def select(
        self,
        queries: Array,
        k: int,
        *,
        weights: Array | None = None,
        scale: float = 1.0,
        per_head: bool = False,
        block_size: int = 1,
        local_blocks: int = 0,
        start: int = 0,
        num_threads: int | None = None,
    ) -> np.ndarray:
        """The tokens that each of the last rows reads, as ``attend(tokens=)`` takes them.

        Row i of n stands at position len - n + i. It gets the tokens of the `k` best keys that it
        sees, or of all if there are not more, and those behind the last whole key.

        Parameters
        ----------
        queries : array
            float32 (n, num_heads, head_dim), or (num_heads, head_dim) for the last token.
        k : int
            Keys, or with `block_size` blocks of keys, of a list.
        weights : array, optional
            float32 (n, num_heads), or (num_heads,): factors of the heads; by default 1.
        scale : float
            Factor of the dot products.
        per_head : bool
            A list for each head, by its own products.
        block_size : int
            So many adjacent keys are chosen together, by the largest of their scores.
        local_blocks : int
            So many last blocks that a row sees are always among the `k`.
        start : int
            The first token that may be chosen, a multiple of ratio (left padding).
        num_threads : int, optional
            See :func:`kvedge.set_num_threads`. Has no effect on the NumPy backend.

        Returns
        -------
        numpy.ndarray
            int32 (n, width), or with `per_head` (n, num_heads, width): ascending positions, -1 in
            unused places at the end.

        Raises
        ------
        InvalidArgumentError
            There are fewer tokens than rows, or a number is out of range.
        ShapeMismatchError, DtypeMismatchError, NonFiniteInputError
        """
        rows = as_float32(queries, "queries", contiguous=False)
        rows = rows[np.newaxis] if rows.ndim == 2 else rows
        if rows.ndim != 3 or rows.shape[2] != self._head_dim or not rows.size:
            raise ShapeMismatchError(
                f"queries must be (n, num_heads, {self._head_dim}) or (num_heads, "
                f"{self._head_dim}), not {rows.shape}"
            )
        check_finite(rows, "queries")
        n, num_heads = rows.shape[:2]
        if n > self._length:
            raise InvalidArgumentError(
                f"queries are of the last tokens: {n} rows, and {self._length} tokens are there"
            )
        factors = self._factors(weights, n, num_heads, per_head)
        selection = Selection(
            k=_count(k, "k", 1 << 31),
            scale=as_float(scale, "scale"),
            first_position=self._length - n,
            ratio=self._ratio,
            block=_count(block_size, "block_size", 1 << 20),
            local_blocks=_count(local_blocks, "local_blocks", 1 << 31, least=0),
            start=_count(start, "start", self._length - n, least=0),
            per_head=bool(per_head),
        )
        if selection.start % self._ratio:
            raise InvalidArgumentError(f"start must be a multiple of {self._ratio}, not {start}")
        if selection.local_blocks > selection.k:
            raise InvalidArgumentError(f"local_blocks={local_blocks} are more than k={k}")
        threads = 0 if num_threads is None else as_num_threads(num_threads)
        width = selection.width(self._length - 1)
        lists = np.empty((n, num_heads if per_head else 1, width), np.int32)
        queries = np.ascontiguousarray(rows)
        stored = self._stored(0, self.num_keys)
        active("index_select")(self._dtype, *stored, queries, factors, selection, lists, threads)
        return lists if per_head else lists[:, 0]

    @staticmethod
    def _factors(weights: Any, n: int, num_heads: int, per_head: bool) -> np.ndarray | None:
        if weights is None:
            return None
        if per_head:
            raise InvalidArgumentError("per_head takes no weights: each head chooses by itself")
        factors = as_float32(weights, "weights", contiguous=False)
        factors = factors[np.newaxis] if factors.ndim == 1 else factors
        if factors.shape != (n, num_heads):
            raise ShapeMismatchError(
                f"weights must be ({n}, {num_heads}), not {factors.shape}",
                expected=(n, num_heads),
                got=factors.shape,
            )
        check_finite(factors, "weights")
        return np.ascontiguousarray(factors)

    # ---- copies and bytes ------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """What the index stores, as copies by name: for a file, or for :meth:`put_arrays`."""
        stored = {"keys": self._keys[: self.num_keys].copy(), "raw": self._raw.copy()}
        stored["length"] = np.array([self._length], np.int64)
        if self._dtype == "int8":
            stored["scales"] = self._scales[: self.num_keys].copy()
        return stored

    def put_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Hold what :meth:`arrays` of an index of the same kind gave, in place of all tokens.

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, NonFiniteInputError, CapacityExceededError
            The arrays are of no such index. Nothing has changed.
        """
        length = int(_checked(arrays, "length", (1,), np.int64)[0])
        if length < 0 or (self._capacity is not None and length > self._capacity):
            raise CapacityExceededError(f"{length} tokens, and the capacity is {self._capacity}")
        number, dim = length // self._ratio, self._head_dim
        keys = _checked(arrays, "keys", (number, dim), _TYPES[self._dtype])
        raw = _checked(arrays, "raw", (None, dim), np.float32)
        least = length % self._ratio if self._ratio > 1 else 0
        if not least <= len(raw) <= (length if self._ratio > 1 else 0):
            raise ShapeMismatchError(f"raw has {len(raw)} tokens of {length}")
        scales = self._scales[:0]
        if self._dtype == "int8":
            scales = _checked(arrays, "scales", (number,), np.float32)
            if len(scales) and scales.min() < 0:
                raise InvalidArgumentError(f"scales are at least 0, not {scales.min()}")
        numbers = half.decode_bfloat16(keys) if self._dtype == "bfloat16" else keys
        for name, array in (("keys", numbers), ("raw", raw), ("scales", scales)):
            check_finite(array.astype(np.float32, copy=False), name)
        self._length = length
        self._keys = aligned_zeros(keys.shape, keys.dtype)
        self._scales = aligned_zeros(scales.shape, np.float32)
        self._keys[...], self._scales[...], self._raw = keys, scales, raw.copy()

    def copy(self) -> KeyIndex:
        """An index of its own with the same tokens."""
        other = type(self)(
            self._capacity,
            self._head_dim,
            ratio=self._ratio,
            dtype=self._dtype,
            raw_tokens=self._raw_tokens,
        )
        other.put_arrays(self.arrays())
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> KeyIndex:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_keys"] = self._keys[: self.num_keys]
        state["_scales"] = self._scales[: self.num_keys]
        return state


def _count(value: Any, name: str, most: int, least: int = 1) -> int:
    number = as_int(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"{name} must be from {least} to {most}, not {number}",
            expected=range(least, most + 1),
            got=number,
        )
    return number


def _checked(arrays: dict[str, np.ndarray], name: str, shape: Any, dtype: Any) -> np.ndarray:
    """An array of that shape (None: any size) and type, or ShapeMismatchError."""
    array = np.asarray(arrays.get(name))
    fits = array.ndim == len(shape) and all(
        want in (None, have) for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        raise ShapeMismatchError(
            f"{name} must be {np.dtype(dtype)} {shape}, not {array.dtype} {array.shape}",
            expected=shape,
            got=array.shape,
        )
    return array
