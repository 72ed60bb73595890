"""What a selection of tokens by index keys is to do, in numbers, for both backends."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_HEADS", "Selection"]

MAX_HEADS = 1024  # of a query


@dataclass(frozen=True, slots=True)
class Selection:
    """Row i stands at position first_position + i, and sees whole keys up to that."""

    k: int  # blocks of keys for each list
    scale: float  # factor of the dot products
    first_position: int
    ratio: int = 1  # tokens of a key
    block: int = 1  # keys that are chosen together, by the largest of their scores
    local_blocks: int = 0  # the last blocks that a row sees, chosen always
    start: int = 0  # the first token that may be chosen, a multiple of ratio
    per_head: bool = False  # a list for each head, by its own scores

    def width(self, last_position: int) -> int:
        """Tokens of the longest list of rows up to a position."""
        chosen = self.k * self.block * self.ratio + self.ratio - 1
        return min(chosen, last_position + 1 - self.start)
