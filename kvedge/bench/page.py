"""What a benchmark prints, collected, and written as a page: Markdown, or HTML with its plots."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from kvedge.console import plotting
from kvedge.console.output import Output

__all__ = ["Collected", "Table", "html_page", "markdown_table", "tables_of"]


@dataclass(frozen=True)
class Table:
    """A table as :meth:`Output.table` has it: headings of columns of figures start with ``>``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Collected(Output):
    """Keeps the tables that are printed."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Table] = []

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        stream: TextIO | None = None,
    ) -> None:
        """Keep a table."""
        self.tables.append(Table(title, columns, [*rows]))


def tables_of(benchmark: Any, report: dict[str, Any]) -> list[Table]:
    """Return the tables that a benchmark prints of a report."""
    output = Collected()
    benchmark.print_tables(report, output)
    return output.tables


def markdown_table(table: Table) -> str:
    """Return a heading and the table, as Markdown."""
    alignments = ["--:" if column.startswith(">") else ":--" for column in table.columns]
    lines = [[column.lstrip(">") for column in table.columns], alignments, *table.rows]
    return f"## {table.title}\n\n" + "\n".join(map(_line, lines))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- HTML ----------------------------------------------------------------------------------------

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em;
  color: #1a1a1a; background: #ffffff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2.5em } h3 { font-size: 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .8em; border-bottom: 1px solid #dddddd; text-align: left }
.figure { text-align: right }
.figure, thead + tbody td { white-space: nowrap }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto }
code { background: #f3f3f3; padding: .1em .3em }
"""


def html_page(
    title: str, sections: Iterable[tuple[Any, dict[str, Any]]], notes: Iterable[str] = ()
) -> str:
    """Return a page that needs nothing else, with the tables and the plot of each report.

    Parameters
    ----------
    title : str
    sections : iterable of (benchmark, report)
        As of :data:`kvedge.bench.catalog.BENCHMARKS`, and what it measured.
    notes : iterable of str
        Said at the top.

    Raises
    ------
    MissingExtraError
        Without matplotlib.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _notes(notes)]
    for benchmark, report in sections:
        parts.append(f"<h2>{html.escape(benchmark.SUMMARY)}</h2>")
        parts.append(f"<p><code>kvedge {html.escape(report['command'])}</code></p>")
        parts.append(f'<div class="wide">{_svg(benchmark, report)}</div>')
        parts += map(_html_table, tables_of(benchmark, report))
        parts.append(_notes(report["notes"]))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _svg(benchmark: Any, report: Mapping[str, Any]) -> str:
    picture = io.StringIO()
    plotting.write_svg(picture, lambda figure: benchmark.draw(report, figure))
    text = picture.getvalue()
    return text[text.index("<svg") :]  # without the XML that comes before in a file of its own


def _html_table(table: Table) -> str:
    sides = ['class="figure"' if column.startswith(">") else "" for column in table.columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        columns = (
            f"<{tag} {side}>{html.escape(cell)}</{tag}>"
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(columns)}</tr>"

    headings = [column.lstrip(">") for column in table.columns]
    head = f"<thead>{row('th', headings)}</thead>" if any(headings) else ""
    rows = "".join(row("td", cells) for cells in table.rows)
    return (
        f"<h3>{html.escape(table.title)}</h3>"
        f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
    )
