#!/usr/bin/env python3
"""Writes the tables of the runs in bench/runs/ as Markdown, a file for each, into bench/tables/.

python bench/tables.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.page import markdown_table, tables_of
from kvedge.bench.report import load_report

HERE = Path(__file__).resolve().parent
RUNS, TABLES = HERE / "runs", HERE / "tables"


def page(run: Path) -> str:
    """Return one run as Markdown: its command, its tables, and the notes of the run."""
    report = load_report(str(run))
    modules = {module.NAME: module for module in BENCHMARKS}
    tables = map(markdown_table, tables_of(modules[report["benchmark"]], report))
    source = f"[{run.name}](../runs/{run.name})"
    head = f"# {run.stem}\n\nWritten by `python bench/tables.py` from {source}:"
    notes = "\n".join(f"- {note}" for note in report["notes"])
    parts = [head, f"```\nkvedge {report['command']}\n```", *tables, notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def pages() -> dict[str, str]:
    """Return the pages of all runs, by the names of their files in bench/tables/."""
    return {f"{run.stem}.md": page(run) for run in sorted(RUNS.glob("*.json"))}


def main() -> int:
    """Write the pages; remove those of runs that are gone."""
    TABLES.mkdir(exist_ok=True)
    written = pages()
    for name, text in written.items():
        (TABLES / name).write_text(text, encoding="utf-8")
    for old in TABLES.glob("*.md"):
        if old.name not in written:
            old.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
