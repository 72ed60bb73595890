"""Blocks by number: which are free, and how many owners each of the others has.

Changed under the pool's lock. A block that nobody holds but that a running call reads is parked,
and counts as used, until somebody asks for blocks after the call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvedge.errors import CapacityExceededError, OutOfMemoryError
from kvedge.paged import readings

__all__ = ["BlockOwners"]


class BlockOwners:
    """Free and used blocks; those freed last are used again first."""

    _num_blocks: int
    _running: set[readings.Reading]  # what calls read at the moment
    _settle: Callable[[], None]  # waits for late helper threads of calls that have ended

    _is_of_recent = False  # the blocks are those of a reading's `recent` table
    _out_of_blocks = "the pool is out of blocks"
    _remedy = "drop() a sequence or make a larger pool"

    def _own_nothing(self, num_blocks: int, running: set[readings.Reading]) -> None:
        try:
            self._references = np.zeros(num_blocks, np.int32)  # committed as it is touched, too
        except MemoryError as error:
            raise OutOfMemoryError(
                f"no memory to count references to {num_blocks} blocks"
            ) from error
        self._num_blocks = num_blocks
        self._running = running
        self._freed: list[int] = []  # the last one is used next
        self._untouched = 0  # blocks from this one on were never used
        self._parked: dict[int, None] = {}  # held by nobody, but read by a running call

    def _num_free(self) -> int:
        """Blocks that can be had."""
        self._unpark()
        return self._num_blocks - self._untouched + len(self._freed)

    def _check_room(self, n: int) -> None:
        """CapacityExceededError unless `n` blocks are free."""
        free = self._num_free()
        if n > free:
            raise CapacityExceededError(
                f"{self._out_of_blocks}: {n} wanted, {free} of {self._num_blocks} are free; "
                f"{self._remedy}"
            )

    def _make_free(self) -> None:
        """Free a block that is kept for nobody; there is one."""
        raise NotImplementedError

    def _take(self, n: int) -> np.ndarray:
        """`n` free blocks, int32 (n,), now held once; CapacityExceededError if there are fewer."""
        self._check_room(n)
        taken: list[int] = []
        while len(taken) < n:
            if self._freed:
                taken.append(self._freed.pop())
            elif self._untouched < self._num_blocks:
                more = min(n - len(taken), self._num_blocks - self._untouched)
                taken.extend(range(self._untouched, self._untouched + more))
                self._untouched += more
            else:
                self._make_free()
        blocks = np.array(taken, np.int32)
        self._references[blocks] = 1
        return blocks

    def _hold(self, blocks: np.ndarray) -> None:
        """One owner more for each of these distinct blocks."""
        idle = self._references[blocks] == 0
        self._references[blocks] += 1
        for block in blocks[idle].tolist():
            self._wake(block)

    def _wake(self, block: int) -> None:
        """A block that nobody held has an owner again."""
        del self._parked[block]

    def _release(self, blocks: np.ndarray) -> None:
        """One owner less for each of these distinct blocks, after it gave its table up.

        What a running call reads is parked.
        """
        self._references[blocks] -= 1
        # From the end: a prefix is forgotten from its end, and freed blocks come back in order.
        unheld = blocks[self._references[blocks] == 0][::-1]
        if self._running and len(unheld):
            read = readings.are_read(self._running, unheld, self._is_of_recent)
            self._parked.update(dict.fromkeys(unheld[read].tolist()))
            unheld = unheld[~read]
        self._set_free(unheld)

    def _set_free(self, blocks: np.ndarray) -> None:
        """Blocks that nobody holds or reads can be had from now on, the last one first."""
        if not len(blocks):
            return
        self._settle()  # calls have ended, but late helpers of theirs may still look
        for block in blocks.tolist():
            self._put_back(block)

    def _put_back(self, block: int) -> None:
        self._freed.append(block)

    def _unpark(self) -> None:
        """Give back what calls read that have ended."""
        if self._parked:
            blocks = np.array(list(self._parked), np.int32)
            ended = blocks[~readings.are_read(self._running, blocks, self._is_of_recent)]
            for block in ended.tolist():
                del self._parked[block]
            self._set_free(ended)
