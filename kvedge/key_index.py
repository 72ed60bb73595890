"""Index keys: what a model's indexer scores to choose the tokens that attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvedge.core import hadamard, half
from kvedge.core.checks import as_int, check_drop, check_finite, check_length, count
from kvedge.core.index_keys import (
    INDEX_TYPES,
    Finish,
    IndexConfig,
    IndexDtype,
    IndexMoment,
    Prepared,
    StoredKeys,
    moment_at,
    prepared,
    select,
)
from kvedge.core.memory import aligned_zeros
from kvedge.core.registry import active
from kvedge.core.types import Array
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    ReadOnlyLayerError,
    ShapeMismatchError,
)

__all__ = [
    "KeyIndex",
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
    "stored_keys",
]

_LEAST_ROOM = 64


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
        self._capacity = None if capacity is None else count(capacity, "capacity", 1 << 40)
        self._config = IndexConfig(
            as_int(head_dim, "head_dim"),
            as_int(ratio, "ratio"),
            dtype,
            None if raw_tokens is None else as_int(raw_tokens, "raw_tokens"),
        )
        self._owned = False
        self._moment = IndexMoment(0, np.empty((0, head_dim), np.float32))
        self._keys = aligned_zeros((0, head_dim), INDEX_TYPES[dtype])
        self._scales = aligned_zeros((0,), np.float32)

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
        return len(self) // self._config.ratio

    @property
    def memory_bytes(self) -> int:
        """Bytes that keys, their scales and what stays of the last tokens take."""
        return self._keys.nbytes + self._scales.nbytes + self._moment.raw.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of that which hold something."""
        of_key = self._keys.itemsize * self.head_dim + (4 if self.dtype == "int8" else 0)
        return self.num_keys * of_key + self._moment.raw.nbytes

    def __len__(self) -> int:
        """Tokens appended."""
        return self._moment.length

    def __repr__(self) -> str:
        ratio = f", ratio={self.ratio}" if self.ratio > 1 else ""
        return (
            f"KeyIndex({self._capacity}, {self.head_dim}{ratio}, dtype={self.dtype!r}): "
            f"{len(self)} tokens, {self.num_keys} keys"
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
        go_to(self, moment_of(self, check_length(n, len(self))))

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
        n = check_drop(n, len(self))
        if n % self._config.ratio:
            raise InvalidArgumentError(
                f"n must be a multiple of ratio={self._config.ratio}, not {n}"
            )
        keys, dropped = self.num_keys, n // self._config.ratio
        for stored in (self._keys, self._scales):
            if len(stored):
                stored[: keys - dropped] = stored[dropped:keys].copy()
        length, raw = len(self) - n, self._moment.raw
        self._moment = IndexMoment(length, raw[max(0, len(raw) - length) :])

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
        scales = self._scales[first:stop] if self._config.dtype == "int8" else None
        return self._keys[first:stop], scales

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
            Keys, or with `block_size` blocks of keys, of a list; more than there are yet are no
            error, more than the capacity has room for are one.
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
        return select(
            self._config,
            len(self),
            StoredKeys(*self._stored(0, self.num_keys)),
            self._capacity,
            queries,
            k,
            weights=weights,
            scale=scale,
            per_head=per_head,
            block_size=block_size,
            local_blocks=local_blocks,
            start=start,
            num_threads=num_threads,
        )

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


def stored_keys(index: KeyIndex, first: int, stop: int) -> dict[str, np.ndarray]:
    """Some keys as they are stored, by the names of :meth:`KeyIndex.arrays`; not copied."""
    codes, scales = index._stored(first, stop)
    return {"keys": codes} if scales is None else {"keys": codes, "scales": scales}


def prepare(
    index: KeyIndex, keys: Array, finish: Finish | None, num_tokens: int | None = None
) -> Prepared:
    """Check what :meth:`KeyIndex.append` is given, and make room; nothing is stored."""
    new = prepared(index._config, index._moment, keys, finish, index._capacity, num_tokens)
    index._reserve(index.num_keys + len(new.rows))
    return new


def put(index: KeyIndex, new: Prepared) -> None:
    """Store what was prepared."""
    codes, scales = index._stored(index.num_keys, index.num_keys + len(new.rows))
    active("index_encode")(index._config.dtype, new.rows, codes, scales)
    index._moment = new.moment


def moment_of(index: KeyIndex, n: int | None = None) -> IndexMoment:
    """Where it stands, or stood when it had `n` tokens; raises as :meth:`KeyIndex.truncate`."""
    return index._moment if n is None else moment_at(index._config, index._moment, n)


def go_to(index: KeyIndex, moment: IndexMoment) -> None:
    """Go back, or forward again where nothing was appended meanwhile."""
    index._moment = moment


def keep(index: KeyIndex, tokens: np.ndarray) -> None:
    """Keep only some tokens, ascending (n,); without `ratio` alone."""
    check_keep(index, "keep()")
    for stored in (index._keys, index._scales):
        if len(stored):
            stored[: len(tokens)] = stored[tokens]
    index._moment = index._moment._replace(length=len(tokens))


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
    keys = _checked(arrays, "keys", (number, dim), INDEX_TYPES[index._config.dtype])
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
    index._moment = IndexMoment(length, raw.copy())
    index._keys = aligned_zeros(keys.shape, keys.dtype)
    index._scales = aligned_zeros(scales.shape, np.float32)
    index._keys[...], index._scales[...] = keys, scales


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
