"""What is told of repeated measurements: the median and the spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Spread", "spread_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one quantity, in its own unit.

    The median and the quartiles are told, not the mean and the deviation: a few rounds that
    something else on the machine disturbed shall not move them.
    """

    count: int
    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    minimum: float
    maximum: float

    @property
    def relative(self) -> float:
        """Half the distance of the quartiles, as a part of the median: the ``±`` of the tables."""
        return (self.upper - self.lower) / 2 / self.median if self.median else 0.0

    def as_json(self) -> dict[str, float]:
        """Return what a saved run keeps of it."""
        return asdict(self) | {"relative_spread": self.relative}


def spread_of(measurements: Sequence[float]) -> Spread:
    """Return the spread of at least one measurement."""
    quartiles = np.percentile(measurements, (0, 25, 50, 75, 100))
    lowest, lower, median, upper, highest = (float(value) for value in quartiles)
    return Spread(len(measurements), median, lower, upper, lowest, highest)
