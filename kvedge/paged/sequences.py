"""One sequence of tokens: which blocks hold it, how far each layer is, and marks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvedge.paged.pool import BlockPoolMethods

__all__ = ["PagedSnapshot", "SequenceState"]

NO_BLOCKS = np.empty(0, np.int32)


class SequenceState:
    """What a cache knows of a sequence; changed under the pool's lock.

    The table is replaced, never written to, and a layer's count is raised after its rows are there:
    so whoever reads the count first and the table second sees rows that are whole.
    """

    __slots__ = ("held", "length", "table")

    def __init__(self, num_layers: int, table: np.ndarray = NO_BLOCKS, length: int = 0) -> None:
        self.table = table  # int32 (blocks,), each distinct and held once by this sequence
        self.length = length  # tokens advanced over
        self.held = [length] * num_layers  # tokens of each layer, >= length


class PagedSnapshot:
    """A sequence at one moment, made by :meth:`kvedge.PagedKvCache.snapshot`.

    It shares the sequence's blocks and copies nothing, so it can be restored whatever happens to
    the sequence meanwhile, and any number of times. Its blocks stay held until :meth:`release`, the
    end of a ``with`` block, or its garbage collection.
    """

    __slots__ = ("__weakref__", "_length", "_pool", "_table")

    _length: int
    _pool: BlockPoolMethods
    _table: np.ndarray | None  # None once released

    def __init__(self) -> None:
        """Not to be called: PagedKvCache.snapshot() makes them."""
        raise InvalidArgumentError("a PagedSnapshot is made by PagedKvCache.snapshot()")

    @classmethod
    def _holding(cls, pool: BlockPoolMethods, table: np.ndarray, length: int) -> PagedSnapshot:
        """A snapshot that owns one reference to each block of `table`."""
        self = cls.__new__(cls)
        self._pool = pool
        self._length = length
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
                self._pool._release(table)

    def __enter__(self) -> PagedSnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        table = getattr(self, "_table", None)
        if table is not None:
            self._pool._abandoned.append(table)

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
