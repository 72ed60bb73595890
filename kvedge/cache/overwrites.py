"""Which bytes of a cache still are what its snapshots are of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["OverwriteLog"]


class OverwriteLog:
    """Which of a cache's past overwrites can still make a snapshot stale.

    Each overwrite begins an epoch and has a lowest position. A later one at the same or a lower
    position makes every snapshot stale that an earlier one does, and more: so only those are kept
    whose positions ascend with their epochs, and a snapshot is judged by the first after it.
    """

    __slots__ = ("_entries", "epoch")

    def __init__(self) -> None:
        self.epoch = 0  # overwrites so far
        # Epochs and positions, both ascending. Another thread may look: lists that it holds are
        # added to, the epoch last, and never shortened.
        self._entries: tuple[list[int], list[int]] = ([], [])

    def add(self, position: int) -> None:
        """Note that tokens from ``position`` on are no longer what earlier snapshots are of."""
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
