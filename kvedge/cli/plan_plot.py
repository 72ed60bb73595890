"""Draws ``kvedge plan``: memory against context for each format, and the machines' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvedge.cli.plan_machines import RESERVED, machines
from kvedge.cli.shape import Planned
from kvedge.console.terminal import printable

__all__ = ["draw"]

_GIB = 1 << 30
_FORMATS = ("float32", "float16", "int8", "int4")
_POINTS = 65


def draw(models: Sequence[tuple[Planned, int]], figure: Any) -> None:
    """Fill a matplotlib figure, a panel per model.

    Parameters
    ----------
    models : sequence of (Planned, int)
        Each with the longest context to draw.
    figure : matplotlib.figure.Figure
    """
    figure.set_size_inches(6.5 * len(models), 5)
    for axes, (model, context) in zip(
        figure.subplots(1, len(models), squeeze=False)[0], models, strict=True
    ):
        _panel(axes, model, context)


def _panel(axes: Any, model: Planned, context: int) -> None:
    weights = model.loaded_bytes or 0
    tokens = sorted({max(context * i // (_POINTS - 1), 1) for i in range(_POINTS)})
    highest = 0.0
    for name in _FORMATS:
        sizes = [(weights + model.shape.bytes(count, name)) / _GIB for count in tokens]
        axes.plot(tokens, sizes, label=name)
        highest = max(highest, sizes[-1])
    for machine in machines():
        room = (machine.ram_bytes - RESERVED) / _GIB
        if room <= 1.5 * highest:  # the others would only flatten the curves
            axes.axhline(room, color="gray", linestyle="--", linewidth=0.8)
            axes.text(
                tokens[0],
                room,
                f"{machine.name}, {machine.ram_bytes / _GIB:.3g} GiB",
                fontsize="x-small",
                va="bottom",
                color="gray",
            )
    if weights:
        axes.axhline(weights / _GIB, color="gray", linestyle=":", linewidth=0.8)
        axes.text(tokens[-1], weights / _GIB, "weights", fontsize="x-small", ha="right", va="top")
    axes.set_ylim(bottom=0)
    axes.set_title(printable(model.shape.name), fontsize="medium", parse_math=False)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("weights and cache (GiB)" if weights else "cache (GiB)")
    axes.legend(fontsize="small", loc="best")
