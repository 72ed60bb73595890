"""What a command prints: tables, notes, progress, JSON.

Tables, colours and progress bars are rich's (``pip install 'kvedge[cli]'``). Without it the same
facts come as tab-separated lines, and nothing is laid out by hand.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

from kvedge.console.terminal import printable
from kvedge.core import packages

rich: Any = packages.require("rich", "") if packages.obstacle("rich") is None else None

__all__ = ["Output", "print_json"]

_Item = TypeVar("_Item")

# A word longer than this, such as a path, may be broken where a terminal is narrow.
_LONGEST_WORD = 28


class Output:
    """The output of one run of a command, on the process's stdout and stderr of that moment."""

    def __init__(self) -> None:
        self._bars: list[Any] = []  # progress bars that may still be shown
        self._hid_cursor = False

    def stop(self) -> None:
        """End progress bars that are still shown, and bring the terminal's cursor back."""
        while self._bars:
            self._bars.pop().close()
        if self._hid_cursor:  # an interrupt within rich may have left it so
            with contextlib.suppress(OSError):
                _console(sys.stderr).show_cursor(True)
            self._hid_cursor = False

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
            One that starts with ``?`` can be done without: the last of these go first where a
            terminal is too narrow for all; where that is not enough a row becomes a few lines.
        rows : iterable of sequence of str
            Cells, as many as there are columns.
        stream : text file, optional
            Where to; stdout by default.
        """
        self.stop()
        stream = sys.stdout if stream is None else stream
        title = printable(title)
        headings = [printable(column.lstrip("?>")) for column in columns]
        cells = [[printable(cell) for cell in row] for row in rows]
        if rich is None:
            self._plain(title, [headings, *cells] if any(headings) else cells, stream)
            return
        console = _console(stream)
        width = console.width if console.is_terminal else 1 << 30  # nobody's screen: all of it
        kept = list(range(len(columns)))
        figures = [">" in column[:2] for column in columns]
        spare = [i for i in kept if columns[i].startswith("?")]
        while (widths := _column_widths(headings, cells, figures, kept, width)) is None and spare:
            kept.remove(spare.pop())
        if widths is None:
            widths = _column_widths(headings, cells, figures, kept, width, lines=None)
        console.print(rich.text.Text(title, style="bold"), soft_wrap=not console.is_terminal)
        if widths is None:
            self._blocks(console, headings, cells)
            return
        table = rich.table.Table(
            box=rich.box.ROUNDED, header_style="bold", show_header=any(headings)
        )
        for i, column_width in zip(kept, widths, strict=True):
            table.add_column(
                headings[i],
                justify="right" if figures[i] else "left",
                overflow="fold",
                width=column_width,
            )
        for row in cells:
            table.add_row(*(rich.text.Text(row[i]) for i in kept))
        if not console.is_terminal:
            console.width = sum(widths) + 3 * len(widths) + 1
        console.print(table)
        left_out = [heading for i, heading in enumerate(headings) if i not in kept]
        if left_out:
            text = f"left out at this width: {', '.join(left_out)} (--json has them)"
            console.print(rich.text.Text(text, style="dim"))

    @staticmethod
    def _blocks(
        console: rich.console.Console, headings: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        """Print each row as a line of its first cell, and a line for each of the others."""
        for first, *others in rows:
            console.print(rich.text.Text(first, style="bold"))
            for heading, cell in zip(headings[1:], others, strict=True):
                if cell:
                    text = f"{heading}: {cell}" if heading else cell
                    console.print(
                        rich.padding.Padding(rich.text.Text(text), (0, 0, 0, 2), expand=False)
                    )

    def facts(
        self, title: str, rows: Iterable[tuple[str, str]], *, stream: TextIO | None = None
    ) -> None:
        """Print pairs of a name and a value, as a table without headings."""
        self.table(title, ("", ""), rows, stream=stream)

    def _plain(self, title: str, rows: Iterable[Sequence[str]], stream: TextIO) -> None:
        print(title, file=stream)
        for row in rows:
            print("\t".join(row), file=stream)

    def note(self, text: str) -> None:
        """Print one line beside the results, on stderr."""
        text = printable(text)
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
        self._hid_cursor = True
        with _console(sys.stderr).status(rich.text.Text(text)):
            yield

    def track(
        self, items: Sequence[_Item], text: str, *, tell_time: bool = False
    ) -> Iterable[_Item]:
        """Iterate over ``items`` with a progress bar on stderr; without one where nobody looks.

        There a note after the first of them says how long the others may take, with `tell_time`.
        """
        if rich is None or not _console(sys.stderr).is_terminal:
            return self._timed(items, text) if tell_time else items
        self._hid_cursor = True
        bar: Iterator[_Item] = iter(
            rich.progress.track(items, text, console=_console(sys.stderr), transient=True)
        )
        self._bars.append(bar)
        return bar

    def _timed(self, items: Sequence[_Item], text: str) -> Iterator[_Item]:
        started = time.perf_counter()
        for index, item in enumerate(items):
            if index == 1:
                seconds = (time.perf_counter() - started) * (len(items) - 1)
                length = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
                self.note(f"{text}: 1 of {len(items)} done, about {length} to go")
            yield item


def _column_widths(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Sequence[bool],
    kept: Sequence[int],
    width: int,
    lines: int | None = 2,
) -> list[int] | None:
    """Characters for each of the columns `kept` in a table so many wide.

    Figures are never wrapped, nor is text over more than about so many `lines`, if that is given;
    headings are, between words. None where that takes more width.
    """
    length = rich.cells.cell_len
    widths, least = [], []
    for i in kept:
        cells = [row[i] for row in rows]
        longest = max(map(length, cells), default=0)
        texts = [headings[i]] if figures[i] else [headings[i], *cells]
        words = (length(word) for text in texts for word in text.split())
        word = min(max(words, default=0), _LONGEST_WORD)
        whole = longest if figures[i] else 0 if lines is None else -(-longest // lines) + 3
        widths.append(max(longest, length(headings[i])))
        least.append(min(max(word, whole), widths[-1]))
    while sum(widths) + 3 * len(widths) + 1 > width:  # the borders, and a space beside each
        spare = [(widths[i], i) for i in range(len(widths)) if widths[i] > least[i]]
        if not spare:
            return None
        widths[max(spare)[1]] -= 1
    return widths


def _console(stream: TextIO) -> Any:
    console = rich.console.Console(file=stream)
    # rich would exit with code 1; main() has a code of its own for a closed pipe.
    console.on_broken_pipe = _closed_pipe
    return console


def _closed_pipe() -> None:
    raise BrokenPipeError


def print_json(value: Any) -> None:
    """Print a JSON object on stdout; figures that are not finite become null."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # what a terminal obeys and JSON lets pass, and what no stream takes
    print(re.sub(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", _json_escape, text))


def _json_escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
