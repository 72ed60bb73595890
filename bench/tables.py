#!/usr/bin/env python3
"""Puts the tables of the runs in bench/runs/ into bench/README.md, between its two marks.

python bench/tables.py
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from kvedge.cli import main as kvedge

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = (
    "<!-- tables: written by bench/tables.py from bench/runs/ -->",
    "<!-- end of tables -->",
)


def main() -> int:
    """Write the tables."""
    sections = [section(path) for path in sorted((HERE / "runs").glob("*.json"))]
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{README} has lost its marks", file=sys.stderr)
        return 1
    tables = "\n\n".join(sections) or "No run has been recorded yet."
    README.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")
    return 0


def section(path: Path) -> str:
    """Return one run as Markdown: its command, and its tables as they are printed."""
    command = json.loads(path.read_text(encoding="utf-8"))["command"]
    tables, notes = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(tables), contextlib.redirect_stderr(notes):
        code = kvedge(["bench", "show", str(path)])
    if code != 0:
        raise SystemExit(notes.getvalue())
    remarks = "".join(f"\n- {line}" for line in notes.getvalue().splitlines())
    return f"### `kvedge {command}`\n\n```\n{tables.getvalue().rstrip()}\n```\n{remarks}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
