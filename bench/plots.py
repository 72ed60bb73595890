#!/usr/bin/env python3
"""Draws the pictures of README.md from runs in bench/runs/, into docs/: python bench/plots.py.

It needs matplotlib. Each is what ``kvedge bench NAME --plot FILE`` draws of such a run.
"""

from __future__ import annotations

from pathlib import Path

from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.report import load_report
from kvedge.console.plotting import save_figure

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"

#: Picture in docs/: the run that it shows.
PICTURES = {"bench-decode.svg": "decode", "bench-threads.svg": "threads"}


def main() -> None:
    """Write the pictures."""
    modules = {module.NAME: module for module in BENCHMARKS}
    for picture, run in PICTURES.items():
        report = load_report(str(HERE / "runs" / f"{run}.json"))
        module = modules[report["benchmark"]]
        save_figure(str(DOCS / picture), lambda figure: module.draw(report, figure))  # noqa: B023
        print(DOCS / picture)


if __name__ == "__main__":
    main()
