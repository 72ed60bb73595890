"""Moments of a conversation that a cache can go back to.

Keys and values of full attention stay where they are, so going back drops the last ones. A state is
written over and a window's tokens are dropped: a checkpoint has copies of these, and of the last
tokens that a layer holds in ``recent_dtype``. Computing on from a checkpoint gives the bits of a
cache that has never gone further.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvedge.eviction import Attended
from kvedge.layer.copies import RowCheckpoint, restore_row, row_checkpoint
from kvedge.layer.layer import store_of
from kvedge.transformers import states
from kvedge.transformers.evicting import KvedgeEvictingLayer
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer

__all__ = ["Checkpoint", "Checkpoints", "Rows", "Window", "go_back", "take"]


class Rows(NamedTuple):
    """The rows of a layer with full attention."""

    checkpoints: list[RowCheckpoint]
    padding: list[int]
    attended: list[Attended] | None  # of a layer that evicts tokens

    @property
    def num_bytes(self) -> int:
        noted = sum(attended.num_bytes for attended in self.attended or ())
        return noted + sum(checkpoint.num_bytes for checkpoint in self.checkpoints)


class Window(NamedTuple):
    """The rows of a layer with a window, copied."""

    rows: list[Any]
    padding: list[int]
    cumulative_length: int

    @property
    def num_bytes(self) -> int:
        return sum(row.memory_bytes for row in self.rows)


class Checkpoint(NamedTuple):
    """A moment of a cache; nothing in it changes."""

    length: int  # tokens seen
    rows: list[Rows | Window | None]  # of each layer
    states: list[states.StateCopies | None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(part.num_bytes for part in (*self.rows, *self.states) if part is not None)

    def can_lose_its_last(self, layers: list[Any]) -> bool:
        """Whether layers that are gone back to this one can drop another token."""
        if any(self.states):
            return False
        kept = self.length - 1
        for layer, rows in zip(layers, self.rows, strict=True):
            if isinstance(rows, Window) and rows.rows:
                length = len(rows.rows[0]) + rows.padding[0] - 1
                if length < min(kept, layer.sliding_window - 1):
                    return False
            if isinstance(layer, KvedgeEvictingLayer) and layer.why_not_back(kept) is not None:
                return False
        return True


def take(layers: list[Any], length: int) -> Checkpoint:
    """A checkpoint of the layers of a cache, which all have seen `length` tokens."""
    return Checkpoint(
        length,
        [_rows_of(layer) if isinstance(layer, KvedgeLayer) else None for layer in layers],
        [states.copy_states(layer) if states.has_state(layer) else None for layer in layers],
    )


def _rows_of(layer: KvedgeLayer) -> Rows | Window:
    if isinstance(layer, KvedgeSlidingLayer):
        rows = [row.copy() for row in layer.rows]
        return Window(rows, list(layer.padding), layer.cumulative_length)
    attended = None
    if isinstance(layer, KvedgeEvictingLayer):
        attended = [queries.copy() for queries in layer.attended]
    checkpoints = [row_checkpoint(store_of(row)) for row in layer.rows]
    return Rows(checkpoints, list(layer.padding), attended)


def go_back(layers: list[Any], to: Checkpoint) -> None:
    """Let layers be as they were at a checkpoint; they have only been appended to since."""
    for layer, rows, state in zip(layers, to.rows, to.states, strict=True):
        if rows is not None:
            layer.version += 1
            layer.padding = list(rows.padding)
            layer.forget_begun()
        if isinstance(rows, Window):
            layer.put_rows([row.copy() for row in rows.rows])
            layer.cumulative_length = rows.cumulative_length
        elif rows is not None:
            layer.own_rows()
            for row, checkpoint in zip(layer.rows, rows.checkpoints, strict=True):
                restore_row(store_of(row), checkpoint)
            if isinstance(layer, KvedgeIndexedLayer):
                layer.truncate_index(to.length)
            if rows.attended is not None:
                layer.attended = [queries.copy() for queries in rows.attended]
        if state is not None:
            states.put(layer, state)


class Checkpoints:
    """The checkpoints of a cache, oldest first.

    Old ones thin out: what goes is the one whose neighbours are nearest to each other, in
    proportion to how long ago it was.

    Parameters
    ----------
    most : int
        So many are held.
    most_bytes : int or None
        So many bytes they take together at most.
    every : int
        Tokens after which one is taken where nothing else gives cause.
    """

    def __init__(self, most: int, most_bytes: int | None, every: int) -> None:
        self.most, self.most_bytes, self.every = most, most_bytes, every
        self._saved: list[Checkpoint] = []
        self._was_prompt = False
        self.wanted: int | None = None  # tokens at which the next step has one, if it begins there

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoints:
        """Share the checkpoints, which do not change."""
        other = Checkpoints(self.most, self.most_bytes, self.every)
        other._saved, other._was_prompt = list(self._saved), self._was_prompt
        return other

    @property
    def saved(self) -> list[Checkpoint]:
        """All of them, oldest first."""
        return list(self._saved)

    @property
    def lengths(self) -> list[int]:
        """Tokens that had been seen at each."""
        return [checkpoint.length for checkpoint in self._saved]

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(checkpoint.num_bytes for checkpoint in self._saved)

    def is_due(self, length: int, tokens: int) -> bool:
        """Whether one is to be taken at a length, before so many tokens more are computed.

        It is at the end of a prompt or where that is `wanted`, at the end of a turn (what comes
        next is a prompt), and `every` so many tokens.
        """
        was_prompt, self._was_prompt = self._was_prompt or self.wanted == length, tokens > 1
        last = self._saved[-1].length if self._saved else 0
        if not self.most or length in (0, last):
            return False
        return was_prompt or tokens > 1 or length - last >= self.every

    def add(self, checkpoint: Checkpoint) -> None:
        """Hold another one, later than the others, and let go of what is too much."""
        self.drop_after(checkpoint.length - 1)
        self._saved.append(checkpoint)
        while len(self._saved) > max(self.most, 1) or (
            self.most_bytes is not None and self._saved and self.num_bytes > self.most_bytes
        ):
            del self._saved[self._least_needed()]

    def _least_needed(self) -> int:
        """Which one goes; the latest only where it is the only one."""
        at, end = self.lengths, self._saved[-1].length
        gap = [
            (at[i + 1] - (at[i - 1] if i else 0)) / (end - at[i] + 1) for i in range(len(at) - 1)
        ]
        return gap.index(min(gap)) if gap else 0

    def latest(self, length: int) -> Checkpoint | None:
        """The last one at which at most so many tokens had been seen."""
        return next(
            (checkpoint for checkpoint in reversed(self._saved) if checkpoint.length <= length),
            None,
        )

    def drop_after(self, length: int) -> None:
        """Let go of those at which more tokens had been seen."""
        self._saved = [checkpoint for checkpoint in self._saved if checkpoint.length <= length]

    def drop_all(self) -> None:
        """Let go of all: none of them can be gone back to."""
        self._saved = []

    def clear(self) -> None:
        """Let go of all; another text begins."""
        self._saved, self._was_prompt = [], False
