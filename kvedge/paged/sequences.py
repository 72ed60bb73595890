"""One sequence of tokens: which blocks hold it, and how far each layer is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvedge.core.index_keys import IndexMoment

__all__ = ["NO_BLOCKS", "Contents", "SequenceParts", "SequenceState"]

NO_BLOCKS = np.empty(0, np.int32)


class SequenceParts(NamedTuple):
    """Which blocks hold first and last tokens of a sequence in another format, and which tokens.

    Never written to. See kvedge.paged.parts.
    """

    table: np.ndarray  # int32 (blocks,), each held once by the sequence; -1: none
    since: list[int]  # of each layer: its last tokens are there from this position on
    base: list[int]  # the same once pending tokens are forgotten
    sinks: int  # so many first tokens are there, as far as there are tokens

    @property
    def blocks(self) -> np.ndarray:
        """The blocks, without gaps."""
        return self.table[self.table >= 0]


class Contents(NamedTuple):
    """The blocks of a sequence and how many tokens each layer has in them."""

    table: np.ndarray  # int32 (blocks,), distinct, each held once by the sequence; never written to
    layer_lengths: list[int]  # tokens of each layer; raised once the rows are there, never lowered
    parts: SequenceParts | None = None  # None: no tokens are held in another format too


class SequenceState:
    """What a cache knows of a sequence; changed under the pool's lock, read without it.

    Whatever takes rows away or moves them replaces the contents as a whole, before blocks are
    released: a reader that finds the same object twice has read a table and a count that belong
    together, see :mod:`kvedge.paged.readings`.
    """

    __slots__ = ("contents", "length", "moments", "resumed")

    contents: Contents | None  # None once dropped

    def __init__(
        self,
        num_layers: int,
        table: np.ndarray = NO_BLOCKS,
        length: int = 0,
        parts: SequenceParts | None = None,
        moments: list[IndexMoment] | None = None,
    ) -> None:
        self.go_to(num_layers, table, length, parts, moments)

    def go_to(
        self,
        num_layers: int,
        table: np.ndarray,
        length: int,
        parts: SequenceParts | None,
        moments: list[IndexMoment] | None,
    ) -> None:
        """Hold `length` tokens in these blocks, in every layer; index keys as at `moments`."""
        self.moments = moments  # of each layer's index; None: there are none
        self.contents = Contents(table, [length] * num_layers, parts)
        self.length = length  # tokens advanced over
        self.resumed = length  # rows from here on may have been read before, by anyone

    @property
    def table(self) -> np.ndarray:
        """The blocks, int32 (blocks,), of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.table

    @property
    def layer_lengths(self) -> list[int]:
        """Tokens of each layer, at least the length, of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.layer_lengths

    @property
    def parts(self) -> SequenceParts | None:
        """Its tokens in another format, of a sequence that was not dropped."""
        assert self.contents is not None
        return self.contents.parts
