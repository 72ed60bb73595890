"""Pictures for ``--plot``, by matplotlib (``pip install 'kvedge[bench]'``)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from kvedge.console.exits import UsageError
from kvedge.core import packages
from kvedge.files.replacing import check_target, replacing

__all__ = ["require", "require_matplotlib", "save_figure", "write_svg"]

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
    OSError
        It cannot be written there.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end with {', '.join(_SUFFIXES)}")
    require_matplotlib("--plot")
    check_target(path)


def require_matplotlib(what: str) -> None:
    """MissingExtraError, which says what needs it, without matplotlib."""
    packages.require("matplotlib", f"{what} needs")


def save_figure(path: str, draw: Callable[[Any], None]) -> None:
    """Let ``draw`` fill a figure, and write it to a file; the same figure as the same bytes."""
    suffix = Path(path).suffix.lower()
    dated = {"Date": None} if suffix == ".svg" else None
    with import_module("matplotlib").rc_context({"svg.hashsalt": "kvedge"}):
        figure = _drawn(draw)
        with replacing(path) as file:
            figure.savefig(file, format=suffix[1:], dpi=_DPI, metadata=dated)


def write_svg(stream: TextIO, draw: Callable[[Any], None]) -> None:
    """Let ``draw`` fill a figure, and write it as SVG."""
    with import_module("matplotlib").rc_context({"svg.hashsalt": "kvedge"}):
        _drawn(draw).savefig(stream, format="svg", metadata={"Date": None})


def _drawn(draw: Callable[[Any], None]) -> Any:
    # Not through pyplot: no window, no global state.
    figure = import_module("matplotlib.figure").Figure(layout="constrained")
    draw(figure)
    return figure
