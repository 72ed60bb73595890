"""A moment of a context over ranks."""

from __future__ import annotations

import copy

from kvedge.cache.state import layer_names
from kvedge.distributed.facts import ShardedFacts
from kvedge.errors import LayersOutOfStepError, StaleSnapshotError

__all__ = ["ShardedSnapshot"]


class ShardedSnapshot:
    """A moment of a :class:`ShardedKVCache`, made by its ``snapshot()`` on each rank."""

    def __init__(self, cache: ShardedFacts, epoch: int, pending: tuple[int, ...]) -> None:
        self._cache = cache
        self._length = len(cache)
        self._epoch = epoch
        self._pending = pending  # layers that held tokens beyond the length
        self._part = cache.part.snapshot()

    def __len__(self) -> int:
        return self._length

    @property
    def is_detached(self) -> bool:
        """Whether it holds the stored bytes of this rank itself."""
        return self._part.is_detached

    @property
    def is_stale(self) -> bool:
        """Whether it can no longer be restored; the same on all ranks."""
        overwrites = self._cache._overwrites
        return not self.is_detached and overwrites.reach_below(self._length, since=self._epoch)

    def _stale(self) -> StaleSnapshotError:
        return StaleSnapshotError(
            f"tokens below position {self._length} have been overwritten since this snapshot was "
            "taken: detach() it before that"
        )

    def detach(self) -> ShardedSnapshot:
        """Copy this rank's stored bytes, so that it can always be restored; all ranks call it.

        Raises
        ------
        StaleSnapshotError, LayersOutOfStepError, OutOfMemoryError
            As of :meth:`kvedge.KvCacheSnapshot.detach`.
        """
        if self.is_stale:
            raise self._stale()
        if self._pending:
            raise LayersOutOfStepError(
                f"detach() would lose tokens: {layer_names(list(self._pending))} held some beyond "
                f"position {self._length} when this snapshot was taken"
            )
        other = copy.copy(self)
        other._part = self._part.detach()
        return other

    def __repr__(self) -> str:
        what = "detached" if self.is_detached else "stale" if self.is_stale else "attached"
        return f"<ShardedSnapshot of {self._length} tokens ({what})>"
