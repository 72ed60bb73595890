"""What several of the benchmarks here have in common: ratios, a straight line, copies, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedge import system
from kvedge.bench.copies import available_bytes, copies_for, shortage
from kvedge.bench.report import microseconds, plus_minus
from kvedge.bench.statistics import spread_of
from kvedge.console.exits import CommandError

__all__ = ["Line", "against_first", "copies_that_fit", "fit_line", "timing_rows"]


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


def copies_that_fit(
    case: str, cache_bytes: int, machine: system.Machine, *, hot: bool, layouts: int = 1
) -> int:
    """Return :func:`copies_for`, of each of so many layouts, where there is memory for them.

    Raises
    ------
    CommandError
        If there is not; it names the ``case``.
    """
    copies = copies_for(cache_bytes, machine, hot=hot)
    lacking = shortage(layouts * copies * cache_bytes, available_bytes(system.machine()))
    if lacking is not None:
        raise CommandError(f"{case}: {lacking}")
    return copies


def timing_rows(
    case: Mapping[str, Any],
    numbers: Sequence[str],
    figures_of: Callable[[Mapping[str, Any]], Iterable[str]],
) -> Iterable[Sequence[str]]:
    """Write a case's results: its numbers once, and of each its name, time, figures and rounds."""
    for result in case["results"]:
        seconds = result["seconds"]
        yield (
            *numbers,
            result["name"],
            microseconds(seconds["median"]),
            plus_minus(seconds),
            *figures_of(result),
            str(seconds["count"]),
        )
        numbers = [""] * len(numbers)
