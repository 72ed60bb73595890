#!/usr/bin/env python3
"""Draws the pictures of README.md from runs in bench/runs/, into docs/: python bench/plots.py.

It needs matplotlib. Each is what ``kvedge bench NAME --plot FILE`` draws of such a run.
"""

from __future__ import annotations

import io
from pathlib import Path

from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.report import load_report
from kvedge.console.plotting import write_svg

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"

#: Picture in docs/: the run that it shows.
PICTURES = {"bench-decode.svg": "decode", "bench-threads.svg": "threads"}


def drawn(run: str) -> str:
    """Return the picture of a run, as SVG."""
    modules = {module.NAME: module for module in BENCHMARKS}
    report = load_report(str(HERE / "runs" / f"{run}.json"))
    picture = io.StringIO()
    write_svg(picture, lambda figure: modules[report["benchmark"]].draw(report, figure))
    return picture.getvalue()


def main() -> None:
    """Write the pictures."""
    for picture, run in PICTURES.items():
        (DOCS / picture).write_text(drawn(run), encoding="utf-8")
        print(DOCS / picture)


if __name__ == "__main__":
    main()
