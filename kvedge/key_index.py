"""Index keys: what a model's indexer scores to choose the tokens that attention reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

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
    ReadOnlyLayerError,
    ScaleRangeError,
    ShapeMismatchError,
)

__all__ = [
    "Finish",
    "IndexConfig",
    "IndexDtype",
    "IndexMoment",
    "KeyIndex",
    "Prepared",
    "check_keep",
    "go_to",
    "hold",
    "is_owned",
    "keep",
    "moment_of",
    "new_index",
    "own",
    "prepare",
    "put",
]

IndexDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
#: Makes keys of means (m, head_dim) of whole blocks and positions (m,) of their first tokens.
Finish: TypeAlias = "Callable[[np.ndarray, np.ndarray], Array]"

_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_MAX_DIM = 1024
_LEAST_ROOM = 64
_LARGEST = 2.0**40  # KVEDGE_INDEX_LARGEST: so that all products are finite


@dataclass(frozen=True)
class IndexConfig:
    """What must be equal for the bytes of one index to mean the same in another."""

    head_dim: int
    ratio: int = 1
    dtype: IndexDtype = "int8"
    raw_tokens: int | None = 64

    def __post_init__(self) -> None:
        """Check all fields; InvalidArgumentError."""
        _count(self.head_dim, "head_dim", _MAX_DIM)
        _count(self.ratio, "ratio", 1 << 16)
        if self.raw_tokens is not None and as_int(self.raw_tokens, "raw_tokens") < 0:
            raise InvalidArgumentError(f"raw_tokens must be at least 0, not {self.raw_tokens}")
        one_of(self.dtype, "dtype", get_args(IndexDtype))

    def __str__(self) -> str:
        ratio = f" of {self.ratio} tokens" if self.ratio > 1 else ""
        return f"an index of {self.head_dim} channels, {self.dtype}{ratio}"


class IndexMoment(NamedTuple):
    """Where an index stands, with what appending behind it needs besides its keys."""

    length: int
    raw: np.ndarray  # float32 (tokens, head_dim)


class Prepared(NamedTuple):
    """Index keys that are checked, and have room."""

    rows: np.ndarray  # keys to store
    raw: np.ndarray  # of last tokens
    stop: int  # tokens with them


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
        self._config = IndexConfig(
            as_int(head_dim, "head_dim"),
            as_int(ratio, "ratio"),
            dtype,
            None if raw_tokens is None else as_int(raw_tokens, "raw_tokens"),
        )
        self._owned = False
        self._length = 0
        self._keys = aligned_zeros((0, head_dim), _TYPES[dtype])
        self._scales = aligned_zeros((0,), np.float32)
        self._raw = np.empty((0, head_dim), np.float32)  # of the last tokens

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def config(self) -> IndexConfig:
        """What must be equal for its bytes to mean the same in another index."""
        return self._config

    @property
    def capacity(self) -> int | None:
        """Tokens that there is room for; None: it grows."""
        return self._capacity

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self._config.head_dim

    @property
    def ratio(self) -> int:
        """Tokens of a key."""
        return self._config.ratio

    @property
    def dtype(self) -> IndexDtype:
        """How keys are stored."""
        return self._config.dtype

    @property
    def num_keys(self) -> int:
        """Keys stored: those of whole blocks."""
        return self._length // self._config.ratio

    @property
    def memory_bytes(self) -> int:
        """Bytes that keys, their scales and what stays of the last tokens take."""
        return self._keys.nbytes + self._scales.nbytes + self._raw.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of that which hold something."""
        of_key = self._keys.itemsize * self.head_dim + (4 if self.dtype == "int8" else 0)
        return self.num_keys * of_key + self._raw.nbytes

    def __len__(self) -> int:
        """Tokens appended."""
        return self._length

    def __repr__(self) -> str:
        ratio = f", ratio={self.ratio}" if self.ratio > 1 else ""
        return (
            f"KeyIndex({self._capacity}, {self.head_dim}{ratio}, dtype={self.dtype!r}): "
            f"{self._length} tokens, {self.num_keys} keys"
        )

    def keys(self) -> np.ndarray:
        """The keys as they are stored, float32 (num_keys, head_dim); int8 ones rotated back."""
        keys = self._decoded()
        return hadamard.rotate_float32(keys) if self._config.dtype == "int8" else keys.copy()

    # ---- appending and removing ------------------------------------------------------------------

    def append(self, keys: Array, finish: Finish | None = None) -> None:
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
        ReadOnlyLayerError
            It belongs to a KVCache: ``append`` to that.
        """
        self._check_free("append(index_keys=)")
        put(self, prepare(self, keys, finish))

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens.

        Raises
        ------
        PositionOutOfRangeError
            `n` is beyond the tokens, or in the middle of a block whose tokens' own keys did not
            stay (``raw_tokens``).
        """
        self._check_free("truncate()")
        go_to(self, moment_of(self, check_length(n, self._length)))

    def clear(self) -> None:
        """Remove all tokens."""
        self.truncate(0)

    def _check_free(self, instead: str) -> None:
        if self._owned:
            raise ReadOnlyLayerError(
                f"this index belongs to a KVCache: {instead} the cache, or take a copy()"
            )

    def drop_first(self, n: int) -> None:
        """Remove the first `n` tokens, a multiple of ratio; the others move to positions from 0 on.

        Raises
        ------
        PositionOutOfRangeError, InvalidArgumentError
        """
        self._check_free("drop tokens of")
        n = check_drop(n, self._length)
        if n % self._config.ratio:
            raise InvalidArgumentError(
                f"n must be a multiple of ratio={self._config.ratio}, not {n}"
            )
        keys, dropped = self.num_keys, n // self._config.ratio
        for stored in (self._keys, self._scales):
            if len(stored):
                stored[: keys - dropped] = stored[dropped:keys].copy()
        self._length -= n
        self._raw = self._raw[-self._length :] if self._length else self._raw[:0]

    def _raw_needed(self, length: int) -> int:
        """Tokens whose own keys stay, of so many: `raw_tokens`, and the rest of their blocks."""
        last, ratio = self._config.raw_tokens, self._config.ratio
        return length if last is None else -(-last // ratio) * ratio + length % ratio

    def _reserve(self, stop: int) -> None:
        """Make room for so many keys."""
        if stop <= len(self._keys):
            return
        room = max(stop, 2 * len(self._keys), _LEAST_ROOM)
        if self._capacity is not None:
            room = min(room, self._capacity // self._config.ratio)
        grown = []
        for old in (self._keys, self._scales)[: 2 if self._config.dtype == "int8" else 1]:
            grown.append(aligned_zeros((room, *old.shape[1:]), old.dtype))
            grown[-1][: len(old)] = old
        self._keys, self._scales = (*grown, self._scales)[:2]

    def _stored(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The codes of some keys, and their scales if they have any."""
        return self._keys[first:stop], self._scales[
            first:stop
        ] if self._config.dtype == "int8" else None

    def _decoded(self) -> np.ndarray:
        keys = self._keys[: self.num_keys]
        if self._config.dtype == "bfloat16":
            return half.decode_bfloat16(keys)
        if self._config.dtype == "int8":
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
        if rows.ndim != 3 or rows.shape[2] != self._config.head_dim or not rows.size:
            raise ShapeMismatchError(
                f"queries must be (n, num_heads, {self._config.head_dim}) or (num_heads, "
                f"{self._config.head_dim}), not {rows.shape}"
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
            ratio=self._config.ratio,
            block=_count(block_size, "block_size", 1 << 20),
            local_blocks=_count(local_blocks, "local_blocks", 1 << 31, least=0),
            start=_count(start, "start", self._length - n, least=0),
            per_head=bool(per_head),
        )
        if selection.start % self._config.ratio:
            raise InvalidArgumentError(
                f"start must be a multiple of {self._config.ratio}, not {start}"
            )
        if selection.local_blocks > selection.k:
            raise InvalidArgumentError(f"local_blocks={local_blocks} are more than k={k}")
        threads = 0 if num_threads is None else as_num_threads(num_threads)
        width = selection.width(self._length - 1)
        lists = np.empty((n, num_heads if per_head else 1, width), np.int32)
        queries = np.ascontiguousarray(rows)
        stored = self._stored(0, self.num_keys)
        active("index_select")(
            self._config.dtype, *stored, queries, factors, selection, lists, threads
        )
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

    def arrays(self, moment: IndexMoment | None = None) -> dict[str, np.ndarray]:
        """What the index stores, as copies by name: for a file, or for :meth:`put_arrays`.

        `moment` is one of :func:`moment_of`; by default the present.
        """
        length, raw = moment_of(self) if moment is None else moment
        number = length // self._config.ratio
        stored = {"keys": self._keys[:number].copy(), "raw": raw.copy()}
        stored["length"] = np.array([length], np.int64)
        if self._config.dtype == "int8":
            stored["scales"] = self._scales[:number].copy()
        return stored

    def put_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold what :meth:`arrays` of an index of the same kind gave, in place of all tokens.

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, NonFiniteInputError, CapacityExceededError
            The arrays are of no such index. Nothing has changed.
        """
        self._check_free("put arrays into")
        hold(self, arrays)

    def copy(self) -> KeyIndex:
        """An index of its own with the same tokens."""
        other = new_index(self._config, self._capacity)
        other.put_arrays(self.arrays())
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> KeyIndex:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_keys"] = self._keys[: self.num_keys]
        state["_scales"] = self._scales[: self.num_keys]
        return {**state, "_owned": False}


# ---- for the rest of the package -----------------------------------------------------------------


def new_index(config: IndexConfig, capacity: int | None) -> KeyIndex:
    """An empty one."""
    return KeyIndex(
        capacity,
        config.head_dim,
        ratio=config.ratio,
        dtype=config.dtype,
        raw_tokens=config.raw_tokens,
    )


def is_owned(index: KeyIndex) -> bool:
    """Whether an index belongs to a cache."""
    return index._owned


def own(index: KeyIndex) -> None:
    """Let an index belong to a cache, through which alone it changes from then on."""
    index._owned = True


def prepare(index: KeyIndex, keys: Array, finish: Finish | None = None) -> Prepared:
    """Check what :meth:`KeyIndex.append` is given, and make room; nothing is stored."""
    rows = as_float32(keys, "keys", contiguous=False)
    rows = rows[np.newaxis] if rows.ndim == 1 else rows
    dim = index._config.head_dim
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ShapeMismatchError(
            f"keys must be (n, {dim}) or ({dim},), not {rows.shape}",
            expected=("n", dim),
            got=rows.shape,
        )
    check_finite(rows, "keys")
    stop = index._length + len(rows)
    if index._capacity is not None and stop > index._capacity:
        raise CapacityExceededError(
            f"{len(rows)} tokens more than {index._length} are {stop}, and the capacity is "
            f"{index._capacity}",
            expected=index._capacity,
            got=stop,
        )
    raw = rows
    if index._config.ratio > 1:
        raw = np.concatenate([index._raw, rows])
        behind = index._length % index._config.ratio + len(rows)  # tokens without a key yet
        pending = raw[len(raw) - behind :][: behind // index._config.ratio * index._config.ratio]
        rows = pending.reshape(-1, index._config.ratio, index._config.head_dim).mean(1)
    if finish is not None and len(rows):
        firsts = (index.num_keys + np.arange(len(rows))) * index._config.ratio
        shape = rows.shape
        rows = as_float32(finish(rows, firsts), "finish(keys)", shape=shape, contiguous=False)
        check_finite(rows, "finish(keys)")
    if rows.size and np.abs(rows).max() > _LARGEST:
        raise ScaleRangeError(f"keys hold {np.abs(rows).max():.6g}, above {_LARGEST:.6g}")
    index._reserve(index.num_keys + len(rows))
    left = raw[:0]
    if index._config.ratio > 1:
        needed = min(index._raw_needed(stop), len(raw))
        left = raw[len(raw) - needed :].copy()
    return Prepared(np.ascontiguousarray(rows), left, stop)


def put(index: KeyIndex, prepared: Prepared) -> None:
    """Store what was prepared."""
    codes, scales = index._stored(index.num_keys, index.num_keys + len(prepared.rows))
    active("index_encode")(index._config.dtype, prepared.rows, codes, scales)
    index._length, index._raw = prepared.stop, prepared.raw


def moment_of(index: KeyIndex, n: int | None = None) -> IndexMoment:
    """Where it stands, or stood when it had `n` tokens; raises as :meth:`KeyIndex.truncate`."""
    n = index._length if n is None else n
    first, ratio = index._length - len(index._raw), index._config.ratio
    if n % ratio and n - n % ratio < first:
        raise PositionOutOfRangeError(
            f"token {n} is within a block of {ratio}, and of tokens before {first} only whole "
            "blocks are stored: give raw_tokens=None, or a multiple"
        )
    return IndexMoment(n, index._raw[: max(0, n - first)])


def go_to(index: KeyIndex, moment: IndexMoment) -> None:
    """Go back, or forward again where nothing was appended meanwhile."""
    index._length, index._raw = moment


def keep(index: KeyIndex, tokens: np.ndarray) -> None:
    """Keep only some tokens, ascending (n,); without `ratio` alone."""
    check_keep(index, "keep()")
    for stored in (index._keys, index._scales):
        if len(stored):
            stored[: len(tokens)] = stored[tokens]
    index._length = len(tokens)


def check_keep(index: KeyIndex, call: str) -> None:
    """InvalidArgumentError where keys are those of several tokens."""
    if index._config.ratio > 1:
        raise InvalidArgumentError(
            f"{call} takes tokens out, and an index has a key for {index._config.ratio} of them"
        )


def hold(index: KeyIndex, arrays: Mapping[str, np.ndarray]) -> None:
    """As :meth:`KeyIndex.put_arrays`, of one that belongs to a cache too."""
    length = int(_checked(arrays, "length", (1,), np.int64)[0])
    if length < 0 or (index._capacity is not None and length > index._capacity):
        raise CapacityExceededError(f"{length} tokens, and the capacity is {index._capacity}")
    number, dim = length // index._config.ratio, index._config.head_dim
    keys = _checked(arrays, "keys", (number, dim), _TYPES[index._config.dtype])
    raw = _checked(arrays, "raw", (None, dim), np.float32)
    least = length % index._config.ratio if index._config.ratio > 1 else 0
    if not least <= len(raw) <= (length if index._config.ratio > 1 else 0):
        raise ShapeMismatchError(f"raw has {len(raw)} tokens of {length}")
    scales = index._scales[:0]
    if index._config.dtype == "int8":
        scales = _checked(arrays, "scales", (number,), np.float32)
        if len(scales) and scales.min() < 0:
            raise InvalidArgumentError(f"scales are at least 0, not {scales.min()}")
    numbers = half.decode_bfloat16(keys) if index._config.dtype == "bfloat16" else keys
    for name, array in (("keys", numbers), ("raw", raw), ("scales", scales)):
        check_finite(array.astype(np.float32, copy=False), name)
    index._length = length
    index._keys = aligned_zeros(keys.shape, keys.dtype)
    index._scales = aligned_zeros(scales.shape, np.float32)
    index._keys[...], index._scales[...], index._raw = keys, scales, raw.copy()


def _count(value: Any, name: str, most: int, least: int = 1) -> int:
    number = as_int(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"{name} must be from {least} to {most}, not {number}",
            expected=range(least, most + 1),
            got=number,
        )
    return number


def _checked(arrays: Mapping[str, np.ndarray], name: str, shape: Any, dtype: Any) -> np.ndarray:
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
