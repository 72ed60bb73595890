"""Which rank holds which tokens: blocks of tokens dealt out to ranks in a repeating pattern.

Pure arithmetic; nothing here communicates. Block b holds the tokens at positions
``b * block_size`` to ``(b + 1) * block_size - 1`` and lies on rank ``pattern[b % len(pattern)]``. A
rank holds its tokens in their order, so a token has a position in the context and an index on its
rank. Ranks alike: the pattern is 0, 1, ..., n - 1 (striped blocks), and a growing context stays
balanced to a block. Unequal ones come in the pattern as often as their weights say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvedge.core import checks
from kvedge.core.config import as_float, as_int
from kvedge.errors import InvalidArgumentError

__all__ = ["BLOCK_SIZE", "Placement"]

BLOCK_SIZE = 256  # tokens: long enough that a prompt is few blocks, short beside a long context
_MAX_BLOCK_SIZE = 1 << 20
_MAX_RANKS = 1 << 12
_MAX_PERIOD = 64  # blocks of a pattern for weights, or one for each rank if they are more
_CLOSE = 0.02  # a pattern whose shares are within this of the weights is close enough


class Placement:
    """Where the tokens of a context are, over a number of ranks."""

    __slots__ = ("_before", "_owned", "block_size", "num_ranks", "pattern")

    def __init__(
        self,
        num_ranks: int,
        *,
        block_size: int = BLOCK_SIZE,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Deal out blocks.

        Parameters
        ----------
        num_ranks : int
            1 to 4096.
        block_size : int
            Tokens of a block, 1 to 2^20.
        weights : sequence of float, optional
            For each rank a positive number in proportion to the tokens that it shall hold, such as
            the speed at which it reads memory. None: all alike.

        Raises
        ------
        InvalidArgumentError
        """
        self.num_ranks = _between(num_ranks, "num_ranks", _MAX_RANKS)
        self.block_size = _between(block_size, "block_size", _MAX_BLOCK_SIZE)
        shares = [1] * self.num_ranks if weights is None else _shares(weights, self.num_ranks)
        self._deal(_spread(shares))

    @classmethod
    def of_pattern(cls, num_ranks: int, block_size: int, pattern: Sequence[int]) -> Placement:
        """Make the placement that has this pattern, as a file names it.

        Raises
        ------
        InvalidArgumentError
            A rank is missing in the pattern, or is none of ``num_ranks``.
        """
        placement = cls(num_ranks, block_size=block_size)
        ranks = [as_int(rank, "a rank of pattern") for rank in pattern]
        if set(ranks) != set(range(placement.num_ranks)):
            raise InvalidArgumentError(
                f"pattern must hold the ranks 0 to {num_ranks - 1}, each at least once: {ranks}"
            )
        placement._deal(ranks)
        return placement

    def _deal(self, pattern: Sequence[int]) -> None:
        self.pattern = tuple(pattern)
        ranks = np.array(pattern, np.int64)
        owns = ranks == np.arange(self.num_ranks)[:, np.newaxis]  # (rank, place in the pattern)
        # Blocks of a rank before each place of the pattern, and before its end.
        self._before = np.zeros((self.num_ranks, len(pattern) + 1), np.int64)
        np.cumsum(owns, axis=1, out=self._before[:, 1:])
        self._owned = [np.flatnonzero(row) for row in owns]  # places that a rank has

    def owner(self, position: int) -> int:
        """Rank that holds the token at a position."""
        return self.pattern[position // self.block_size % len(self.pattern)]

    def count(self, length: Any, rank: int) -> Any:
        """Tokens that a rank holds of the first ``length`` of a context.

        Parameters
        ----------
        length : int, or array of int
        rank : int

        Returns
        -------
        int, or ndarray of int64
            Also the index on the rank of the first of its tokens at position ``length`` or beyond.
        """
        block, offset = divmod(length, self.block_size)
        period, place = divmod(block, len(self.pattern))
        before = self._before[rank]
        full = period * before[-1] + before[place]
        partial = offset * (before[place + 1] - before[place])
        tokens = full * self.block_size + partial
        return tokens if isinstance(tokens, np.ndarray) else int(tokens)

    def positions(self, rank: int, start: int, stop: int) -> np.ndarray:
        """Positions of the tokens that a rank holds at the indices ``start`` to ``stop - 1``."""
        positions: np.ndarray = self._position_of(rank, np.arange(start, stop))
        return positions

    def _position_of(self, rank: int, index: Any) -> Any:
        owned = self._owned[rank]
        block, offset = divmod(index, self.block_size)
        period, nth = divmod(block, len(owned))
        return (period * len(self.pattern) + owned[nth]) * self.block_size + offset

    def held_by(self, rank: int, start: int, stop: int) -> np.ndarray:
        """Which of the positions ``start`` to ``stop - 1`` a rank holds, counted from ``start``."""
        first, last = self.count(start, rank), self.count(stop, rank)
        return self.positions(rank, first, last) - start

    def longest(self, limits: Iterable[int | None]) -> int | None:
        """Tokens of the longest context where no rank holds more than its limit; None: no limit."""
        most = [
            int(self._position_of(rank, limit))
            for rank, limit in enumerate(limits)
            if limit is not None
        ]
        return min(most, default=None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (self.num_ranks, self.block_size, self.pattern) == (
            other.num_ranks,
            other.block_size,
            other.pattern,
        )

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.block_size, self.pattern))

    def __str__(self) -> str:
        shares = [len(owned) for owned in self._owned]
        how = "" if len(set(shares)) == 1 else " as " + ":".join(map(str, shares))
        return f"blocks of {self.block_size} tokens over {self.num_ranks} ranks{how}"

    def __repr__(self) -> str:
        return f"<Placement of {self}>"


def _between(value: Any, name: str, most: int) -> int:
    number = as_int(value, name)
    if not 1 <= number <= most:
        raise InvalidArgumentError(f"{name} must be from 1 to {most}, not {number}")
    return number


def _shares(weights: Sequence[float], num_ranks: int) -> list[int]:
    """Blocks for each rank in a pattern that is close to the weights, and as short as may be."""
    try:
        numbers = [as_float(weight, f"weights[{i}]") for i, weight in enumerate(weights)]
    except TypeError:
        raise InvalidArgumentError(
            f"weights must be numbers, one for each rank, not {checks.describe(weights)}"
        ) from None
    if len(numbers) != num_ranks or min(numbers) <= 0:
        raise InvalidArgumentError(
            f"weights must be {num_ranks} positive numbers, one for each rank, not {numbers}"
        )
    total = math.fsum(numbers)
    wanted = [weight / total for weight in numbers]
    best, least = [1] * num_ranks, math.inf
    for blocks in range(num_ranks, max(_MAX_PERIOD, num_ranks) + 1):
        shares = [max(1, round(share * blocks)) for share in wanted]
        error = max(
            abs(count / sum(shares) - share) for count, share in zip(shares, wanted, strict=True)
        )
        if error < least:
            best, least = shares, error
        if error < _CLOSE:
            break
    return best


def _spread(shares: Sequence[int]) -> list[int]:
    """Ranks in an order in which each comes as often as its share, as evenly as can be.

    Each place goes to the rank that is furthest behind its share, the lower one of equals.
    """
    total, places = sum(shares), [0] * len(shares)
    pattern = []
    for place in range(1, total + 1):
        behind = [place * share - total * had for share, had in zip(shares, places, strict=True)]
        rank = behind.index(max(behind))
        places[rank] += 1
        pattern.append(rank)
    return pattern
