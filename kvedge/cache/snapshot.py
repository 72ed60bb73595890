"""What a cache held at one moment: a mark that costs nothing, or a copy that stands alone."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from typing import Any, Protocol

import numpy as np

from kvedge.core import registry
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import memory_for
from kvedge.errors import InvalidArgumentError, StaleSnapshotError
from kvedge.files.contents import CacheContents, CacheFormat

__all__ = ["KvCacheSnapshot", "OverwriteLog"]


class OverwriteLog:
    """Which of a cache's past overwrites can still hurt a mark.

    Each overwrite begins an epoch and has a lowest position. A later one at the same or a lower
    position hurts every mark that an earlier one does, and more: so only those are kept whose
    positions ascend with their epochs, and a mark is judged by the first after it.
    """

    __slots__ = ("_entries", "epoch")

    def __init__(self) -> None:
        self.epoch = 0  # overwrites so far
        # Epochs and positions, both ascending. Another thread may look: lists that it holds are
        # added to, the epoch last, and never shortened.
        self._entries: tuple[list[int], list[int]] = ([], [])

    def add(self, position: int) -> None:
        """Note that tokens from ``position`` on are no longer what earlier marks saw."""
        epochs, positions = self._entries
        kept = bisect_left(positions, position)
        if kept < len(positions):
            epochs, positions = epochs[:kept], positions[:kept]
        self.epoch += 1
        positions.append(position)
        epochs.append(self.epoch)
        self._entries = (epochs, positions)

    def reach_below(self, length: int, *, since: int) -> bool:
        """Whether an overwrite after epoch ``since`` began below ``length``."""
        epochs, positions = self._entries
        after = bisect_right(epochs, since)
        return after < len(positions) and positions[after] < length


class _Marked(Protocol):
    """What a mark asks its cache."""

    def _is_stale(self, snapshot: KvCacheSnapshot) -> bool: ...
    def _contents_at(self, snapshot: KvCacheSnapshot, *, alone: bool = True) -> CacheContents: ...


class KvCacheSnapshot:
    """A moment of a :class:`kvedge.KVCache`, made by its ``snapshot()``.

    As made it is a mark: it copies nothing, and ``restore`` accepts it as long as the tokens below
    it have not been overwritten. ``detach()`` gives one that holds the stored bytes themselves: it
    can always be restored, into any cache of the same format.

    ``keys`` and ``values`` are decoded each time they are asked for. A snapshot is written and read
    with ``to_bytes()`` and ``from_bytes()``, which trusts nothing that it reads; or by ``pickle``,
    a detached one. Of a mark all of these give what ``detach()`` would, so a stale one raises
    StaleSnapshotError; ``pickle`` refuses marks, which are of one cache alone.

    Like a number it never changes, so ``copy.copy`` and ``copy.deepcopy`` return it as it is.
    """

    __slots__ = ("_cache", "_contents", "_epoch", "_length", "_pending")

    _cache: weakref.ref[_Marked] | None  # None once detached
    _contents: CacheContents | None  # None while a mark
    _epoch: int  # of the cache, when the mark was made
    _length: int
    _pending: tuple[int, ...]  # layers that held tokens beyond the length when it was marked

    def __init__(self) -> None:
        raise InvalidArgumentError("a KvCacheSnapshot is made by KVCache.snapshot()")

    @classmethod
    def _mark(
        cls, cache: _Marked, epoch: int, length: int, pending: tuple[int, ...]
    ) -> KvCacheSnapshot:
        self = cls.__new__(cls)
        self._cache = weakref.ref(cache)
        self._contents = None
        self._epoch = epoch
        self._length = length
        self._pending = pending
        return self

    @classmethod
    def _holding(cls, contents: CacheContents) -> KvCacheSnapshot:
        self = cls.__new__(cls)
        self._cache = None
        self._contents = contents
        self._epoch = 0
        self._length = contents.length
        self._pending = ()
        return self

    @property
    def length(self) -> int:
        """Tokens that the cache held."""
        return self._length

    @property
    def seq_len(self) -> int:
        """Tokens that the cache held, as :attr:`length`."""
        return self._length

    @property
    def keys(self) -> tuple[np.ndarray, ...]:
        """Keys of each layer, float32 (tokens, num_kv_heads, head_dim), decoded now; copies.

        tokens are :attr:`length`, less those that the layer's window has dropped.

        Raises
        ------
        StaleSnapshotError
            As of :meth:`detach`.
        OutOfMemoryError
        """
        return self._decoded("keys")

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """Values of each layer, float32 (tokens, num_kv_heads, value_head_dim); as :attr:`keys`."""
        return self._decoded("values")

    @memory_for("the decoded tokens of a snapshot")
    def _decoded(self, side: str) -> tuple[np.ndarray, ...]:
        contents = self._contents
        if contents is None:
            contents = self._marked()._contents_at(self, alone=False)
        decoded = []
        for config, layer in zip(contents.format.layers, contents.layers, strict=True):
            cache = _cache_of(CacheContents(CacheFormat((config,)), contents.length, (layer,)))
            decoded.append(getattr(cache.layer(0), side)())
        return tuple(decoded)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True  # also at length 0: `if snapshot` asks whether there is one

    @property
    def is_detached(self) -> bool:
        """Whether it holds the stored bytes itself."""
        return self._contents is not None

    @property
    def is_stale(self) -> bool:
        """Whether it can no longer be restored: its tokens were overwritten, or the cache is gone.

        Or a layer with a window has dropped tokens that it needs.

        A detached snapshot is never stale.
        """
        if self._cache is None:
            return False
        cache = self._cache()
        return cache is None or cache._is_stale(self)

    @property
    def nbytes(self) -> int:
        """Bytes of stored keys and values it holds itself; 0 for a mark."""
        return 0 if self._contents is None else self._contents.nbytes

    def detach(self) -> KvCacheSnapshot:
        """Copy the quantized bytes, so that the snapshot no longer depends on its cache.

        Returns
        -------
        KvCacheSnapshot
            A detached snapshot; itself if it is one already.

        Raises
        ------
        StaleSnapshotError
            If the tokens have been overwritten since, or the cache no longer exists.
        LayersOutOfStepError
            If layers held pending tokens when the mark was made, which the copy would lose; the
            message names them.
        OutOfMemoryError
        """
        if self._contents is not None:
            return self
        return KvCacheSnapshot._holding(self._marked()._contents_at(self))

    def _marked(self) -> _Marked:
        """The cache that this is a mark of."""
        cache = None if self._cache is None else self._cache()
        if cache is None:
            raise StaleSnapshotError(
                f"the cache of this snapshot of {self._length} tokens no longer exists: "
                "detach() while it does"
            )
        return cache

    @memory_for("the bytes of a snapshot")
    def to_bytes(self) -> bytes:
        """Return the tokens as bytes, those of the file that :meth:`kvedge.KVCache.save` writes.

        Raises
        ------
        StaleSnapshotError, LayersOutOfStepError, OutOfMemoryError
            As of :meth:`detach`.
        """
        contents = self.detach()._contents
        assert contents is not None
        data: bytes = _cache_of(contents)._to_bytes()
        return data

    @classmethod
    @memory_for("the bytes of a snapshot")
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KvCacheSnapshot:
        """Read what :meth:`to_bytes` gave; needs ``kvedge[io]``.

        Parameters
        ----------
        data : bytes-like
            Also the content of a file of :meth:`kvedge.KVCache.save`.

        Returns
        -------
        KvCacheSnapshot
            A detached one.

        Raises
        ------
        CorruptFileError
            It is damaged, cut short or something else.
        InvalidArgumentError, MissingExtraError, OutOfMemoryError
        """
        cache = registry.active("KVCache")._from_bytes(data, "the bytes of a snapshot")
        return cls._holding(cache._contents(copy=False))

    def __copy__(self) -> KvCacheSnapshot:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KvCacheSnapshot:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._contents is None:
            raise InvalidArgumentError(
                "a snapshot that is a mark in its cache cannot be pickled: pickle its detach(), or "
                "take its to_bytes()"
            )
        return (KvCacheSnapshot._holding, (self._contents,))

    def __repr__(self) -> str:
        if self._contents is not None:
            what = f"detached, {self._contents.format}"
        else:
            what = "stale" if self.is_stale else "mark"
        return f"<KvCacheSnapshot of {self._length} tokens ({what})>"


def _cache_of(contents: CacheContents) -> Any:
    """A cache that holds them."""
    return registry.active("KVCache")._holding(contents, None, KeyRule(), {})
