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

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvedge.paged.sequences import Contents, SequenceState

__all__ = ["Reading", "are_read", "begin", "reads_from"]


_NO_BLOCKS = np.empty(0, np.int32)


class Reading:
    """The tokens of one layer of a sequence that a call reads. Compared by identity."""

    __slots__ = ("layer", "length", "recent", "since", "sinks", "table")

    def __init__(self, layer: int, contents: Contents) -> None:
        recent = contents.recent
        self.layer = layer
        self.table = contents.table  # int32 (blocks,)
        self.length = contents.held[layer]  # tokens, all of them in blocks of the table
        # As of kvedge.paged.recent.Recent, where there is one.
        self.recent = _NO_BLOCKS if recent is None else recent.table
        self.since = 0 if recent is None else recent.since[layer]
        self.sinks = 0 if recent is None else recent.sinks

    def blocks(self, of_recent: bool) -> np.ndarray:
        """Its table, or that of tokens in another format."""
        return self.recent if of_recent else self.table


def begin(running: set[Reading], state: SequenceState, layer: int) -> Reading | None:
    """A new reading of what a layer of a sequence holds now; None if it was dropped.

    The caller discards it from `running` in the end, whatever happens.
    """
    while True:
        contents = state.contents
        if contents is None:
            return None
        reading = Reading(layer, contents)
        try:
            running.add(reading)
            if state.contents is contents:
                return reading
        except BaseException:  # KeyboardInterrupt
            running.discard(reading)
            raise
        running.discard(reading)


def are_read(running: set[Reading], blocks: np.ndarray, of_recent: bool = False) -> np.ndarray:
    """Which of these blocks a running call may read: bool (len(blocks),)."""
    listed = [reading.blocks(of_recent) for reading in running.copy()]
    tables = {id(table): table for table in listed}
    if not tables:
        return np.zeros(len(blocks), bool)
    return np.isin(blocks, np.concatenate(list(tables.values())))


def reads_from(
    running: set[Reading],
    layer: int,
    table: np.ndarray,
    index: int,
    token: int,
    of_recent: bool = False,
) -> bool:
    """Whether a running call may read rows of block table[index], from `token` on, of a layer.

    A block is at the same place in the table of everyone who shares it.
    """
    block = table[index]
    return any(
        reading.layer == layer
        and reading.length > token
        and len(reading.blocks(of_recent)) > index
        and reading.blocks(of_recent)[index] == block
        for reading in running.copy()
    )
