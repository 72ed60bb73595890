"""Pictures for ``--plot``, by matplotlib (``pip install 'kvedge[bench]'``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvedge.console.exits import UsageError
from kvedge.errors import MissingExtraError

__all__ = ["require", "save_figure"]

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
