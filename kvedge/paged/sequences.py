"""One sequence of tokens: which blocks hold it, how far each layer is, and marks of it."""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvedge.errors import InvalidArgumentError

__all__ = ["Contents", "PagedSnapshot", "Recent", "SequenceState"]

NO_BLOCKS = np.empty(0, np.int32)


class Recent(NamedTuple):
    """Which blocks hold tokens of a sequence in another format, and which; never written to.

    See kvedge.paged.recent.
    """

    table: np.ndarray  # int32 (blocks,), each held once by the sequence; -1: none
    since: list[int]  # of each layer: its last tokens are there from this position on
    base: list[int]  # the same once pending tokens are forgotten
    sinks: int  # so many first tokens are there, as far as there are tokens

    @property
    def held(self) -> np.ndarray:
        """The blocks, without gaps."""
        return self.table[self.table >= 0]


class Contents(NamedTuple):
    """The blocks of a sequence and how many tokens each layer has in them."""

    table: np.ndarray  # int32 (blocks,), distinct, each held once by the sequence; never written to
    held: list[int]  # tokens of each layer; raised once the rows are there, never lowered
    recent: Recent | None = None  # which tokens are held in another format too, where some are


class SequenceState:
    """What a cache knows of a sequence; changed under the pool's lock, read without it.

    Whatever takes rows away or moves them replaces the contents as a whole, before blocks are
    released: a reader that finds the same object twice has read a table and a count that belong
    together, see :mod:`kvedge.paged.readings`.
    """

    __slots__ = ("contents", "length", "resumed")

    contents: Contents | None  # None once dropped

    def __init__(
        self,
        num_layers: int,
        table: np.ndarray = NO_BLOCKS,
        length: int = 0,
        recent: Recent | None = None,
    ) -> None:
        self.go_to(num_layers, table, length, recent)

    def go_to(self, num_layers: int, table: np.ndarray, length: int, recent: Recent | None) -> None:
        """Hold `length` tokens in these blocks, in every layer."""
        self.contents = Contents(table, [length] * num_layers, recent)
        self.length = length  # tokens advanced over
        self.resumed = length  # rows from here on may have been read before, by anyone

    @property
    def table(self) -> np.ndarray:
        """The blocks, int32 (blocks,), of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.table

    @property
    def held(self) -> list[int]:
        """Tokens of each layer, at least the length, of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.held

    @property
    def recent(self) -> Recent | None:
        """Its tokens in another format, of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.recent


class _Pool(Protocol):
    """What a snapshot asks of its pool."""

    _lock: RLock
    _abandoned: deque[tuple[np.ndarray, Recent | None]]

    def _release_all(self, table: np.ndarray, recent: Recent | None) -> None: ...


class PagedSnapshot:
    """A sequence at one moment, made by :meth:`kvedge.PagedKvCache.snapshot`.

    It shares the sequence's blocks and copies nothing, so it can be restored whatever happens to
    the sequence meanwhile, and any number of times. Its blocks stay held until :meth:`release`, the
    end of a ``with`` block, or its garbage collection.
    """

    __slots__ = ("__weakref__", "_length", "_pool", "_recent", "_table")

    _length: int
    _pool: _Pool
    _table: np.ndarray | None  # None once released
    _recent: Recent | None

    def __init__(self) -> None:
        """Not to be called: PagedKvCache.snapshot() makes them."""
        raise InvalidArgumentError("a PagedSnapshot is made by PagedKvCache.snapshot()")

    @classmethod
    def _holding(
        cls, pool: _Pool, table: np.ndarray, length: int, recent: Recent | None
    ) -> PagedSnapshot:
        """A snapshot that owns one reference to each block of `table` and `recent`."""
        self = cls.__new__(cls)
        self._pool = pool
        self._length = length
        self._recent = recent
        self._table = table
        return self

    @property
    def length(self) -> int:
        """Tokens that the sequence held."""
        return self._length

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True  # also at length 0: `if snapshot` asks whether there is one

    @property
    def is_released(self) -> bool:
        """Whether its blocks were given back, so that it can be restored no more."""
        return self._table is None

    def release(self) -> None:
        """Give its blocks back; again does nothing."""
        with self._pool._lock:
            table, self._table = self._table, None
            if table is not None:
                self._pool._release_all(table, self._recent)

    def __enter__(self) -> PagedSnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        table = getattr(self, "_table", None)
        if table is not None:
            self._pool._abandoned.append((table, self._recent))

    def __copy__(self) -> PagedSnapshot:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSnapshot:
        return self

    def __reduce__(self) -> Any:
        raise InvalidArgumentError(
            "a snapshot shares its pool's blocks, so it cannot be pickled: "
            "PagedKvCache.to_kv_cache() copies a sequence out of the pool"
        )

    def __repr__(self) -> str:
        what = "released" if self._table is None else f"{len(self._table)} blocks"
        return f"<PagedSnapshot of {self._length} tokens ({what})>"
