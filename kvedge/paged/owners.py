"""Blocks by number: which are free, and how many owners each of the others has.

Changed under the pool's lock. A block that nobody holds but that a running call reads is parked,
and counts as used, until somebody asks for blocks after the call. One that nobody holds but that is
known by its token ids is idle: it stays as it is until its memory is needed, and counts as free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from kvedge.errors import CapacityExceededError, OutOfMemoryError
from kvedge.paged.prefixes import PrefixTree
from kvedge.paged.readings import Readings

__all__ = ["BlockOwners", "KnownBlocks"]

# What there is none of, and what helps: of the pool's blocks, and of those of parts.
_OUT_OF = (
    ("the pool is out of blocks", "drop() a sequence or make a larger pool"),
    (
        "the pool is out of blocks of first and last tokens",
        "drop() a sequence, or make a pool with more num_recent_blocks",
    ),
)


class BlockOwners:
    """Free and used blocks; those freed last are used again first.

    Parameters
    ----------
    num_blocks : int
    readings : Readings
        Of the calls that run on the pool.
    quiesce : callable
        Waits for late helper threads of calls that have ended.
    of_parts : bool
        The blocks are those of a reading's `part_table`.
    """

    def __init__(
        self, num_blocks: int, readings: Readings, quiesce: Callable[[], None], of_parts: bool
    ) -> None:
        try:
            self.references = np.zeros(num_blocks, np.int32)  # committed as it is touched, too
        except MemoryError as error:
            raise OutOfMemoryError(
                f"no memory to count references to {num_blocks} blocks"
            ) from error
        self.num_blocks = num_blocks
        self.untouched = 0  # blocks from this one on were never used
        self._readings = readings
        self._quiesce = quiesce
        self._of_parts = of_parts
        self._freed: list[int] = []  # the last one is used next
        self._parked: dict[int, None] = {}  # held by nobody, but read by a running call

    def restore(self, counts: np.ndarray) -> None:
        """Let the first blocks, none of which was ever used, have so many owners each."""
        self.untouched = len(counts)
        self.references[: len(counts)] = counts

    def num_free(self) -> int:
        """Blocks that can be had."""
        self.unpark()
        return self.num_blocks - self.untouched + len(self._freed)

    def check_room(self, n: int) -> None:
        """CapacityExceededError unless `n` blocks are free."""
        free = self.num_free()
        if n > free:
            lack, remedy = _OUT_OF[self._of_parts]
            raise CapacityExceededError(
                f"{lack}: {n} wanted, {free} of {self.num_blocks} are free; {remedy}"
            )

    def take(self, n: int) -> np.ndarray:
        """`n` free blocks, int32 (n,), now held once; CapacityExceededError if there are fewer."""
        self.check_room(n)
        taken: list[int] = []
        while len(taken) < n:
            if self._freed:
                taken.append(self._freed.pop())
            elif self.untouched < self.num_blocks:
                more = min(n - len(taken), self.num_blocks - self.untouched)
                taken.extend(range(self.untouched, self.untouched + more))
                self.untouched += more
            else:
                self._make_free()
        blocks = np.array(taken, np.int32)
        self.references[blocks] = 1
        return blocks

    def hold(self, blocks: np.ndarray) -> None:
        """One owner more for each of these distinct blocks."""
        unowned = self.references[blocks] == 0
        self.references[blocks] += 1
        for block in blocks[unowned].tolist():
            self._wake(block)

    def release(self, blocks: np.ndarray) -> None:
        """One owner less for each of these distinct blocks, after it gave its table up.

        What a running call reads is parked.
        """
        self.references[blocks] -= 1
        # From the end: a prefix is forgotten from its end, and freed blocks come back in order.
        unowned = blocks[self.references[blocks] == 0][::-1]
        if self._readings.running and len(unowned):
            read = self._readings.are_read(unowned, self._of_parts)
            self._parked.update(dict.fromkeys(unowned[read].tolist()))
            unowned = unowned[~read]
        self._set_free(unowned)

    def unpark(self) -> None:
        """Give back what calls read that have ended."""
        if self._parked:
            blocks = np.array(list(self._parked), np.int32)
            ended = blocks[~self._readings.are_read(blocks, self._of_parts)]
            for block in ended.tolist():
                del self._parked[block]
            self._set_free(ended)

    def _set_free(self, blocks: np.ndarray) -> None:
        """Blocks that nobody holds or reads can be had from now on, the last one first."""
        if not len(blocks):
            return
        self._quiesce()  # calls have ended, but late helpers of theirs may still look
        for block in blocks.tolist():
            self._put_back(block)

    def _put_back(self, block: int) -> None:
        self._freed.append(block)

    def _wake(self, block: int) -> None:
        """A block that nobody held has an owner again."""
        del self._parked[block]

    def _make_free(self) -> None:
        """Free a block that is kept for nobody; there is one."""
        raise NotImplementedError


class KnownBlocks(BlockOwners):
    """The blocks of a pool, of `block_size` tokens, some of which can be found by token ids.

    At most `max_pinned` of them may be pinned; for the rest see :class:`BlockOwners`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_pinned: int,
        readings: Readings,
        quiesce: Callable[[], None],
    ) -> None:
        super().__init__(num_blocks, readings, quiesce, of_parts=False)
        self.prefixes = PrefixTree(block_size)
        self.max_pinned = max_pinned
        self.pinned: Counter[int] = Counter()  # references of pin()
        self.idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody; oldest first

    def num_free(self) -> int:
        """Blocks that can be had, those that can still be found included."""
        return super().num_free() + len(self.idle)

    def must_forget(self, n: int) -> bool:
        """Whether `n` blocks can be had only by forgetting prefixes."""
        return n > self.num_blocks - self.untouched + len(self._freed)

    def set_idle(self, blocks: Iterable[int]) -> None:
        """Let known blocks that nobody holds be idle, the least recently used first."""
        self.idle.update(dict.fromkeys(blocks))

    def find(self, token_ids: np.ndarray, namespace: bytes) -> np.ndarray:
        """The blocks of the longest known prefix, held once more."""
        blocks = np.array(self.prefixes.find(token_ids, namespace), np.int32)
        self.hold(blocks)
        return blocks

    def match(
        self, token_ids: np.ndarray, namespace: bytes, *, partial: bool
    ) -> tuple[np.ndarray, int, int]:
        """As :meth:`find`, counted as a hit or a miss, and what may be copied of one block more."""
        found, source, n = self.prefixes.match(token_ids, namespace, partial=partial)
        blocks = np.array(found, np.int32)
        self.hold(blocks)
        return blocks, source, n

    def forget(self, block: int) -> None:
        """Let a prefix that ends in or goes through this block be found no more."""
        for gone in self.prefixes.remove(block):
            if gone in self.idle:  # else it is held, or parked
                del self.idle[gone]
                self._freed.append(gone)

    def forget_all(self) -> None:
        """Let no prefix be found any more, or be pinned."""
        while self.pinned:
            self._unpin(list(self.pinned))
        self.prefixes = self.prefixes.emptied()
        self._freed.extend(reversed(self.idle))
        self.idle.clear()

    def pin(self, token_ids: np.ndarray, namespace: bytes) -> int:
        """Hold the blocks of the longest known prefix until they are unpinned; how many."""
        blocks = self.prefixes.find(token_ids, namespace)
        wanted = len(self.pinned.keys() | set(blocks))
        if wanted > self.max_pinned:
            raise CapacityExceededError(
                f"{wanted} blocks would be pinned, and max_pinned_blocks is {self.max_pinned}",
                expected=self.max_pinned,
                got=wanted,
            )
        self.hold(np.array(blocks, np.int32))
        self.pinned.update(blocks)
        return len(blocks)

    def unpin(self, token_ids: np.ndarray, namespace: bytes) -> int:
        """Undo one :meth:`pin` of the same tokens; how many blocks were pinned."""
        blocks = [
            block for block in self.prefixes.find(token_ids, namespace) if block in self.pinned
        ]
        self._unpin(blocks)
        return len(blocks)

    def _unpin(self, blocks: list[int]) -> None:
        self.pinned.subtract(blocks)
        self.pinned += Counter()  # without those at 0
        self.release(np.array(blocks, np.int32))

    def _put_back(self, block: int) -> None:
        if block in self.prefixes:
            self.idle[block] = None
        else:
            self._freed.append(block)

    def _wake(self, block: int) -> None:
        del (self._parked if block in self._parked else self.idle)[block]

    def _make_free(self) -> None:
        self.forget(next(iter(self.idle)))
