"""A snapshot of a sequence of a paged cache, and the way back to it."""

from __future__ import annotations

import numpy as np

from kvedge.core import checks
from kvedge.core.index_keys import IndexMoment
from kvedge.errors import InvalidArgumentError, StaleSnapshotError
from kvedge.paged.sequences import SequenceParts
from kvedge.paged.state import PagedState, PoolState

__all__ = ["PagedSnapshot", "restore", "snapshot"]


class PagedSnapshot:
    """A sequence at one moment, made by :meth:`kvedge.PagedKvCache.snapshot`.

    It shares the sequence's blocks and copies nothing, so it can be restored whatever happens to
    the sequence meanwhile, and any number of times. Its blocks stay held until :meth:`release`, the
    end of a ``with`` block, or its garbage collection.
    """

    __slots__ = ("__weakref__", "_length", "_moments", "_parts", "_pool", "_table")

    _length: int
    _pool: PoolState
    _table: np.ndarray | None  # None once released
    _parts: SequenceParts | None
    _moments: list[IndexMoment] | None

    def __init__(self) -> None:
        """Not to be called: PagedKvCache.snapshot() makes them."""
        raise InvalidArgumentError("a PagedSnapshot is made by PagedKvCache.snapshot()")

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
        with self._pool.lock:
            table, self._table = self._table, None
            if table is not None:
                self._pool.release(table, self._parts)

    def __enter__(self) -> PagedSnapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        table = getattr(self, "_table", None)
        if table is not None:
            self._pool.abandoned.append((table, self._parts))

    def __copy__(self) -> PagedSnapshot:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PagedSnapshot:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise InvalidArgumentError(
            "a snapshot shares its pool's blocks, so it cannot be pickled: "
            "PagedKvCache.to_kv_cache() copies a sequence out of the pool"
        )

    def __repr__(self) -> str:
        what = "released" if self._table is None else f"{len(self._table)} blocks"
        return f"<PagedSnapshot of {self._length} tokens ({what})>"


def snapshot(state: PagedState, seq: int) -> PagedSnapshot:
    """Hold what a sequence was advanced over; the pool's lock is held."""
    sequence, pool = state.sequence(seq), state.pool
    moments = pool.moments_at(sequence, sequence.length)
    table, parts = pool.advanced_over(sequence)
    pool.hold(table, parts)
    taken = PagedSnapshot.__new__(PagedSnapshot)
    taken._pool = pool
    taken._length = sequence.length
    taken._parts = parts
    taken._moments = moments
    taken._table = table
    return taken


def restore(state: PagedState, seq: int, snapshot: object) -> None:
    """Let a sequence be what a snapshot holds; the pool's lock is held."""
    sequence, pool = state.sequence(seq), state.pool
    if not isinstance(snapshot, PagedSnapshot):
        raise InvalidArgumentError(
            f"snapshot must be a PagedSnapshot, not {checks.describe(snapshot)}"
        )
    if snapshot._pool is not pool:
        raise InvalidArgumentError("this snapshot is of another pool")
    if snapshot._table is None:
        raise StaleSnapshotError("this snapshot was released: its blocks are no longer held")
    pool.hold(snapshot._table, snapshot._parts)
    moments = None if snapshot._moments is None else list(snapshot._moments)
    gone, parts_gone = sequence.table, sequence.parts
    sequence.go_to(pool.num_layers, snapshot._table, snapshot._length, snapshot._parts, moments)
    pool.release(gone, parts_gone)
