"""The little that the benchmarks' plots have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvedge.cli.exits import UsageError
from kvedge.errors import MissingExtraError

__all__ = ["grid", "require", "save_figure", "style_of"]

_SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 150


def require(path: str) -> None:
    """Check that a plot can be made.

    Raises
    ------
    MissingExtraError
        Without matplotlib.
    UsageError
        If the file's name does not end as that of a picture.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end with {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "--plot needs matplotlib: pip install 'kvedge[bench]' or pip install matplotlib"
        )


def save_figure(path: str, draw: Callable[[Any], None]) -> None:
    """Let ``draw`` fill a figure, and write it to a file."""
    # Not through pyplot: no window, no global state.
    figure = import_module("matplotlib.figure").Figure(layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=_DPI)


def grid(figure: Any, count: int) -> list[Any]:
    """Return ``count`` axes in rows of three at most, on a figure of a fitting size."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure.set_size_inches(4.5 * columns + 0.5, 3.5 * rows + 0.5)
    axes: list[Any] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def style_of(name: str, names: list[str]) -> dict[str, Any]:
    """Return a competitor's colour and line: kvedge stands out, the others keep their colour."""
    if name == "kvedge":
        return {"color": "black", "linewidth": 2.2, "marker": "o", "zorder": 3}
    others = [one for one in names if one != "kvedge"]
    return {"color": f"C{others.index(name)}", "linewidth": 1.2, "marker": "."}
