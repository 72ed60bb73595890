"""Which rows running calls read, so that nobody writes there before they end.

A call publishes its reading before it looks at rows and takes it back when it ends. There is no
lock: a reader publishes first and then looks whether the sequence still is what it read, else it
tries again; a writer first replaces the sequence's contents and then looks at the readings. So
either the writer sees the reading, or the reader sees the new contents. (Hazard pointers: Michael
2004, https://doi.org/10.1109/TPDS.2004.8.) Without a lock a reader never waits for a prompt that
is appended meanwhile, and whatever a garbage collection or a signal runs cannot deadlock.

The readings of a pool are a plain set. Adding to it, discarding from it and copying it are single
steps of the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvedge.paged.sequences import NO_BLOCKS, Contents, SequenceState

__all__ = ["Reading", "Readings"]


class Reading:
    """The tokens of one layer of a sequence that a call reads. Compared by identity."""

    __slots__ = ("layer", "length", "part_table", "since", "sinks", "table")

    def __init__(self, layer: int, contents: Contents) -> None:
        parts = contents.parts
        self.layer = layer
        self.table = contents.table  # int32 (blocks,)
        self.length = contents.layer_lengths[layer]  # tokens, all of them in blocks of the table
        # As of kvedge.paged.sequences.SequenceParts, where there are such.
        self.part_table = NO_BLOCKS if parts is None else parts.table
        self.since = 0 if parts is None else parts.since[layer]
        self.sinks = 0 if parts is None else parts.sinks

    def blocks(self, of_parts: bool) -> np.ndarray:
        """Its table, or that of its first and last tokens in another format."""
        return self.part_table if of_parts else self.table


class Readings:
    """The readings of the calls that run on one pool."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running: set[Reading] = set()

    def begin(self, sequence: SequenceState, layer: int) -> Reading | None:
        """A new reading of what a layer of a sequence holds now; None if it was dropped.

        The caller ends it, whatever happens.
        """
        running = self.running
        while True:
            contents = sequence.contents
            if contents is None:
                return None
            reading = Reading(layer, contents)
            try:
                running.add(reading)
                if sequence.contents is contents:
                    return reading
            except BaseException:  # KeyboardInterrupt
                running.discard(reading)
                raise
            running.discard(reading)

    def end(self, reading: Reading) -> None:
        """A call has read."""
        self.running.discard(reading)

    def end_all(self, readings: Iterable[Reading]) -> None:
        """A call has read all of these."""
        self.running.difference_update(readings)

    def are_read(self, blocks: np.ndarray, of_parts: bool) -> np.ndarray:
        """Which of these blocks a running call may read: bool (len(blocks),)."""
        if not self.running:
            return np.zeros(len(blocks), bool)
        listed = [reading.blocks(of_parts) for reading in self.running.copy()]
        tables = {id(table): table for table in listed}
        if not tables:
            return np.zeros(len(blocks), bool)
        return np.isin(blocks, np.concatenate(list(tables.values())))

    def reach(
        self, layer: int, table: np.ndarray, index: int, token: int, of_parts: bool = False
    ) -> bool:
        """Whether a running call may read rows of block table[index], from `token` on, of a layer.

        A block is at the same place in the table of everyone who shares it.
        """
        if not self.running:
            return False
        block = table[index]
        return any(
            reading.layer == layer
            and reading.length > token
            and len(reading.blocks(of_parts)) > index
            and reading.blocks(of_parts)[index] == block
            for reading in self.running.copy()
        )
