"""What is stored of a sequence, and what is found: blocks of tokens, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from kvedge.store.index import Node

__all__ = ["BLOCK", "Entry", "Known"]

#: Tokens of a block, which all sequences that begin with the same tokens share.
BLOCK = 256


class Entry(NamedTuple):
    """What is to be stored of a sequence: a block, or a checkpoint at `stop`.

    A checkpoint has all that blocks up to it have not; it begins where the last of them ends.
    """

    kind: str  # "block" or "checkpoint"
    start: int
    stop: int
    arrays: Callable[[], Mapping[str, np.ndarray]]  # only called where it is not there yet


class Known(NamedTuple):
    """What a store has of the beginning of a sequence."""

    blocks: list[Node]
    checkpoints: list[Node]  # by their ends
    partial: Node | None = None  # a block behind these of which only the first tokens fit
    shared: int = 0  # tokens that fit, those of `partial` included

    @property
    def length(self) -> int:
        """Tokens of the blocks."""
        return self.blocks[-1].stop if self.blocks else 0
