"""What a command prints: tables, notes, progress, JSON.

Tables, colours and progress bars are rich's (``pip install 'kvedge[cli]'``). Without it the same
facts come as tab-separated lines, and nothing is laid out by hand.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

try:
    import rich.box
    import rich.console
    import rich.measure
    import rich.progress
    import rich.table
    import rich.text
except ImportError:
    rich = None  # type: ignore[assignment]

__all__ = ["Output", "print_json"]

_Item = TypeVar("_Item")

_HINT = "pip install 'kvedge[cli]' gives tables, colours and progress bars"


class Output:
    """The output of one run of a command, on the process's stdout and stderr of that moment."""

    def __init__(self) -> None:
        self._hinted = False

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        stream: TextIO | None = None,
    ) -> None:
        """Print a table.

        Parameters
        ----------
        title : str
            One line above the table.
        columns : sequence of str
            Headings. One that starts with ``>`` is of a column of figures, aligned to the right.
        rows : iterable of sequence of str
            Cells, as many as there are columns.
        stream : text file, optional
            Where to; stdout by default.
        """
        stream = sys.stdout if stream is None else stream
        headings = [column.lstrip(">") for column in columns]
        if rich is None:
            self._plain(title, [headings, *rows] if any(headings) else rows, stream)
            return
        table = rich.table.Table(
            box=rich.box.ROUNDED, header_style="bold", show_header=any(headings)
        )
        for column, heading in zip(columns, headings, strict=True):
            figures = column.startswith(">")
            table.add_column(heading, justify="right" if figures else "left", overflow="fold")
        for row in rows:
            table.add_row(*(rich.text.Text(cell) for cell in row))
        console = _console(stream)
        if not console.is_terminal:  # nobody's screen: as wide as the table wants to be
            wide = console.options.update_width(10_000)
            console.width = rich.measure.Measurement.get(console, wide, table).maximum
        console.print(rich.text.Text(title, style="bold"), soft_wrap=True)
        console.print(table)

    def facts(
        self, title: str, rows: Iterable[tuple[str, str]], *, stream: TextIO | None = None
    ) -> None:
        """Print pairs of a name and a value, as a table without headings."""
        self.table(title, ("", ""), rows, stream=stream)

    def _plain(self, title: str, rows: Iterable[Sequence[str]], stream: TextIO) -> None:
        self._hint()
        print(title, file=stream)
        for row in rows:
            print("\t".join(row), file=stream)

    def note(self, text: str) -> None:
        """Print one line beside the results, on stderr."""
        if rich is None:
            print(text, file=sys.stderr)
        else:
            _console(sys.stderr).print(rich.text.Text(text), style="dim", soft_wrap=True)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show that something goes on, while it does; only on a terminal."""
        if rich is None or not _console(sys.stderr).is_terminal:
            yield
            return
        with _console(sys.stderr).status(rich.text.Text(text)):
            yield

    def track(self, items: Sequence[_Item], text: str) -> Iterable[_Item]:
        """Iterate over ``items`` with a progress bar on stderr; without one where nobody looks."""
        if rich is None or not _console(sys.stderr).is_terminal:
            return items
        return rich.progress.track(items, text, console=_console(sys.stderr), transient=True)

    def _hint(self) -> None:
        if not self._hinted:
            self._hinted = True
            print(_HINT, file=sys.stderr)


def _console(stream: TextIO) -> rich.console.Console:
    console = rich.console.Console(file=stream)
    # rich would exit with code 1; main() has a code of its own for a closed pipe.
    console.on_broken_pipe = _closed_pipe  # type: ignore[method-assign]
    return console


def _closed_pipe() -> None:
    raise BrokenPipeError


def print_json(value: Any) -> None:
    """Print a JSON object on stdout; figures that are not finite become null."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
