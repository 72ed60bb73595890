"""Runs one benchmark as a command: measure, save, print, plot."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from kvedge.bench.report import save_report
from kvedge.console import plotting
from kvedge.console.exits import INTERRUPTED, OK
from kvedge.console.output import Output, print_json
from kvedge.files.replacing import check_target

__all__ = ["Benchmark", "present", "run_benchmark"]


class Benchmark(Protocol):
    """What a benchmark's module has."""

    NAME: str
    SUMMARY: str
    DESCRIPTION: str
    EXAMPLES: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def measure(self, options: argparse.Namespace, output: Output) -> dict[str, Any]:
        """Measure, and return the report; with ``"interrupted": True`` if Ctrl-C ended it."""

    def print_tables(self, report: dict[str, Any], output: Output) -> None:
        """Print a report, measured now or read from a file."""

    def draw(self, report: dict[str, Any], figure: Any) -> None:
        """Draw a report into a matplotlib figure."""


def run_benchmark(benchmark: Benchmark, options: argparse.Namespace, output: Output) -> int:
    """Run a benchmark; the exit code tells whether it was interrupted."""
    if options.plot is not None:
        plotting.require(options.plot)  # before minutes of measuring
    if options.save is not None:
        check_target(options.save)
    report = benchmark.measure(options, output)
    if options.save is not None:
        save_report(report, options.save)
    present(benchmark, report, options, output)
    return INTERRUPTED if report.get("interrupted") else OK


def present(
    benchmark: Benchmark, report: dict[str, Any], options: argparse.Namespace, output: Output
) -> None:
    """Print a report the way the options ask for, and draw it."""
    if options.json:
        print_json(report)
    else:
        benchmark.print_tables(report, output)
        for note in report["notes"]:
            output.note(f"note: {note}")
    if options.plot is not None:
        plotting.save_figure(options.plot, lambda figure: benchmark.draw(report, figure))
