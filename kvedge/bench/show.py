"""``kvedge bench show``: the tables and the plot of a run that was saved."""

from __future__ import annotations

import argparse

from kvedge.bench.benchmark import present
from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.report import load_report
from kvedge.console import plotting
from kvedge.console.exits import OK, CommandError
from kvedge.console.output import Output

NAME = "show"
SUMMARY = "the tables and the plot of a saved run"
DESCRIPTION = """\
Print the tables of a run that --save (or --json) wrote, or plot it, without measuring again.
"""
EXAMPLES = """\
  kvedge bench show run.json
  kvedge bench show run.json --plot run.png
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("report", metavar="FILE", help="what --save wrote")
    parser.add_argument(
        "--plot", metavar="FILE", help="also draw the results (.png, .svg, .pdf; needs matplotlib)"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Present the report."""
    if options.plot is not None:
        plotting.require(options.plot)
    report = load_report(options.report)
    by_name = {module.NAME: module for module in BENCHMARKS}
    benchmark = by_name.get(report.get("benchmark", ""))
    if benchmark is None:
        raise CommandError(f"{options.report} is of an unknown benchmark")
    present(benchmark, report, options, output)
    return OK
