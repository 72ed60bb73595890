"""`PoolState`: blocks, their owners and stores. `PagedState`: a cache's sequences and readings."""

from __future__ import annotations

import threading
from collections import Counter, deque
from itertools import count

import numpy as np

from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.index_keys import IndexConfig, IndexMoment
from kvedge.core.kivi import RUN
from kvedge.errors import UnknownSequenceError
from kvedge.paged.index import PoolIndex
from kvedge.paged.owners import KnownBlocks
from kvedge.paged.parts import PartBlocks
from kvedge.paged.readings import Reading, Readings
from kvedge.paged.sequences import Contents, SequenceParts, SequenceState
from kvedge.paged.store import BlockPart, new_stores

__all__ = ["PagedState", "PoolState"]

_numbers = count()  # of sequences: one series for all caches, so that no two share a number


class PoolState:
    """The blocks of a pool, for all caches over it; what changes something holds the lock.

    Parameters
    ----------
    config : LayerConfig
        Of a layer as large as the pool.
    num_blocks, block_size : int
    key_scales : list
        The key scale of each layer, or None.
    num_part_blocks : int
        Blocks for first and last tokens in another format; 0: there are no such tokens.
    max_pinned : int
        Most blocks of prefixes that may be pinned.
    index : IndexConfig, optional
        Of all layers.
    """

    def __init__(
        self,
        config: LayerConfig,
        num_blocks: int,
        block_size: int,
        key_scales: list[np.ndarray | None],
        num_part_blocks: int,
        max_pinned: int,
        index: IndexConfig | None = None,
    ) -> None:
        self.config = config
        self.block_size = block_size
        own = config.runs(config.capacity) if config.in_runs else config.plain
        self.stores = new_stores(own, key_scales)  # one for each layer
        self.quiesce = self.stores[0].quiesce  # waits for late helper threads of calls that ended
        self.readings = Readings()
        self.blocks = KnownBlocks(num_blocks, block_size, max_pinned, self.readings, self.quiesce)
        self.parts: PartBlocks | None = None
        if num_part_blocks:
            self.parts = PartBlocks(config, key_scales, num_part_blocks, self.readings)
        self.index: PoolIndex | None = None
        if index is not None:
            self.index = PoolIndex(index, len(self.stores), num_blocks, block_size)
        self.lock = threading.RLock()
        self.lent: Counter[int] = Counter()  # references that allocate() and share() gave out
        # Blocks of snapshots and caches that were garbage-collected, which may happen in the middle
        # of anything: they are given back when the pool is next looked at.
        self.abandoned: deque[tuple[np.ndarray, SequenceParts | None]] = deque()

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.stores)

    @property
    def key_scale(self) -> np.ndarray | None:
        """What keys are stored over, float32 (num_layers, num_kv_heads, head_dim); or None."""
        scales = [store.key_map.scale for store in self.stores]
        known = [scale for scale in scales if scale is not None]
        return np.stack(known) if known else None

    def checked_layer(self, layer: int) -> int:
        """A layer's number, or LayerOutOfRangeError."""
        num_layers = len(self.stores)
        if layer.__class__ is int and 0 <= layer < num_layers:
            return layer
        return checks.check_layer(layer, num_layers)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens lie in."""
        return -(-tokens // self.block_size)

    def slabs_of(self, layer: int) -> tuple[np.ndarray, ...]:
        """All memory that a layer's tokens lie in."""
        slabs = self.stores[layer].slabs
        return slabs if self.parts is None else (*slabs, *self.parts.stores[layer].slabs)

    def read_parts(self, layer: int, reading: Reading) -> list[BlockPart] | None:
        """Where the tokens of a layer are read; None: in the pool's blocks."""
        if self.parts is None:
            return None
        return self.parts.read_parts(self.stores[layer], self.block_size, layer, reading)

    def new_parts(self, length: int = 0) -> SequenceParts | None:
        """Of a sequence that begins with tokens of which none is held in another format."""
        return None if self.parts is None else self.parts.new(length)

    def new_moments(self, length: int = 0) -> list[IndexMoment] | None:
        """Where the indexes of a sequence stand that begins with tokens of whole keys."""
        return None if self.index is None else self.index.new_moments(length)

    def moments_at(self, sequence: SequenceState, length: int) -> list[IndexMoment] | None:
        """Where the indexes of a sequence stand, or stood at a position."""
        if self.index is None or sequence.moments is None:
            return None
        return self.index.moments_at(sequence.moments, length)

    # ---- who has which blocks: the lock is held --------------------------------------------------

    def collect(self) -> None:
        """Give back what garbage-collected snapshots held and what calls read that have ended."""
        while self.abandoned:
            self.release(*self.abandoned.popleft())
        self.blocks.unpark()

    def num_free(self) -> int:
        """Blocks that can be had."""
        self.collect()
        return self.blocks.num_free()

    def check_room(self, n: int) -> None:
        """CapacityExceededError unless `n` blocks can be had."""
        self.collect()
        self.blocks.check_room(n)

    def take(self, n: int) -> np.ndarray:
        """`n` free blocks, int32 (n,), now held once; CapacityExceededError if there are fewer."""
        self.collect()
        return self.blocks.take(n)

    def hold(self, table: np.ndarray, parts: SequenceParts | None) -> None:
        """One owner more of a sequence's blocks."""
        self.blocks.hold(table)
        if self.parts is not None and parts is not None:
            self.parts.blocks.hold(parts.blocks)

    def release(self, table: np.ndarray, parts: SequenceParts | None) -> None:
        """One owner less of a sequence's blocks, after it gave its tables up."""
        self.blocks.release(table)
        if self.parts is not None and parts is not None:
            self.parts.blocks.release(parts.blocks)

    def match(
        self, token_ids: np.ndarray, namespace: bytes, *, partial: bool
    ) -> tuple[np.ndarray, int]:
        """The blocks of the longest known prefix, held once more, and its tokens.

        If `partial`, the last may be a copy of a block that goes on otherwise, where one is free.
        """
        table, source, n = self.blocks.match(token_ids, namespace, partial=partial)
        length = len(table) * self.block_size
        n -= n % RUN if self.config.in_runs else 0
        n -= 0 if self.index is None else n % self.index.config.ratio
        if not n:
            return table, length
        blocks = np.array([source], np.int32)
        self.blocks.hold(blocks)  # or its memory might be what is free
        try:
            if not self.num_free():
                return table, length
            taken = self.take(1)
            self.copy_block(source, int(taken[0]))
        finally:
            self.blocks.release(blocks)
        return np.concatenate([table, taken]), length + n

    def copy_block(self, source: int, target: int) -> None:
        """Copy all rows of a block, in all layers."""
        for store in self.stores:
            store.copy_block(self.block_size, source, target)
        if self.index is not None:
            self.index.copy_block(source, target)

    def advanced_over(self, sequence: SequenceState) -> tuple[np.ndarray, SequenceParts | None]:
        """The blocks of the tokens that a sequence was advanced over."""
        table = sequence.table[: self.blocks_for(sequence.length)]
        if self.parts is None or sequence.parts is None:
            return table, None
        return table, self.parts.shortened(sequence.parts, sequence.length)


class PagedState:
    """The sequences of a paged cache, in a pool."""

    def __init__(self, pool: PoolState) -> None:
        self.pool = pool
        self.sequences: dict[int, SequenceState] = {}  # by number, oldest first

    def add(self, sequence: SequenceState) -> int:
        """Have one sequence more; its number."""
        seq = next(_numbers)
        self.sequences[seq] = sequence
        return seq

    def sequence(self, seq: int) -> SequenceState:
        """A sequence by its number, or UnknownSequenceError."""
        sequence = self.sequences.get(seq) if seq.__class__ is int else None
        if sequence is not None:
            return sequence
        seq = checks.as_int(seq, "seq")
        sequence = self.sequences.get(seq)
        if sequence is None:
            raise _unknown(seq)
        return sequence

    def contents(self, seq: int) -> Contents:
        """What a sequence holds now."""
        contents = self.sequence(seq).contents
        if contents is None:  # dropped since it was looked up
            raise _unknown(seq)
        return contents

    def begin(self, seq: int, sequence: SequenceState, layer: int) -> Reading:
        """A reading of a layer, which the caller ends."""
        reading = self.pool.readings.begin(sequence, layer)
        if reading is None:  # dropped since it was looked up
            raise _unknown(seq)
        return reading

    def abandon(self) -> None:
        """Leave the blocks to the pool, which may be another cache's as well."""
        self.pool.abandoned.extend(
            (sequence.table, sequence.parts) for sequence in self.sequences.values()
        )


def _unknown(seq: int) -> UnknownSequenceError:
    return UnknownSequenceError(
        f"sequence {seq} is not in this cache: it was dropped, or is another cache's"
    )
