"""What is told of repeated measurements: the median, the spread, a straight line through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Line", "Spread", "against_first", "fit_line", "spread_of"]


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


def against_first(
    names: Sequence[str], samples: Sequence[Sequence[float]], ratio: str
) -> list[dict[str, Any]]:
    """Return results as a saved run keeps them, each with its ratio to the first, under a name."""
    spreads = [spread_of(seconds) for seconds in samples]
    return [
        {"name": name, "seconds": seconds.as_json(), ratio: seconds.median / spreads[0].median}
        for name, seconds in zip(names, spreads, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Line:
    """``y = intercept + slope * x``, and how well it describes the points."""

    slope: float
    intercept: float
    r_squared: float  # 1: all points lie on the line
    largest_residual: float  # max |y - line| / y: how far off the line the worst point is

    def at(self, x: float) -> float:
        """Return the line's y at ``x``."""
        return self.intercept + self.slope * x


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a straight line, each point weighted by ``1 / y``.

    Times over contexts from 512 to 131072 span two or three orders of magnitude and are each
    measured to about the same percentage. Unweighted, the longest context alone would decide, and
    no bend at the short ones would show.

    Parameters
    ----------
    x, y : sequence of float
        Two points or more with different ``x``; ``y`` positive.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(np.unique(xs)) < 2:
        raise ValueError("a line needs two points with different x")
    slope, intercept = np.polyfit(xs, ys, 1, w=1 / ys)
    residuals = (ys - (intercept + slope * xs)) / ys
    mean = np.average(ys, weights=ys**-2.0)
    total = float(np.sum(((ys - mean) / ys) ** 2))
    r_squared = 1.0 - float(np.sum(residuals**2)) / total if total else 1.0
    return Line(float(slope), float(intercept), r_squared, float(np.abs(residuals).max()))
