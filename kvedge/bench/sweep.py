"""``kvedge bench sweep``: time against context, which must be a straight line."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import choose_cpus, pinned_to
from kvedge.bench.contest import Contest, enter
from kvedge.bench.peers import Competitor, KvedgeLayer, make_peers
from kvedge.bench.report import microseconds, plus_minus, print_header
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run, settings_of
from kvedge.bench.shapes import CONTEXTS, SHAPES, AttentionShape
from kvedge.bench.statistics import Line, fit_line, spread_of
from kvedge.bench.workload import make_workload
from kvedge.console.exits import UsageError
from kvedge.console.output import Output

NAME = "sweep"
SUMMARY = "time against context, and how straight a line it is"
DESCRIPTION = """\
Decode attention over many context lengths, all in one run, and the straight line through the times:
nanoseconds per token of context, microseconds for the call itself, and how far off the line the
worst point lies. A bend would mean that long contexts cost more than their bytes.
"""
EXAMPLES = """\
  kvedge bench sweep
  kvedge bench sweep --shape Qwen2.5-0.5B --context 1000 2000 3000 --threads 2 --plot sweep.png
  kvedge bench sweep --peers ggml-q8_0
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, CONTEXTS, SHAPES[:1])
    common.add_threads(cases)
    common.add_peers(cases, default="none")
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure; one competitor after the other, each over all contexts in turn."""
    contexts = common.chosen_contexts(options)
    if len(contexts) < 2:
        raise UsageError("--context: a line needs two contexts or more")
    settings = settings_of(options, "cache", "rounds", "threads")
    run = Run.against_peers(NAME, options, settings, lists=("lines",))
    shapes = common.chosen_shapes(options)
    cases = [*itertools.product(common.chosen_threads(options), shapes, run.competitors)]
    run.show(output, len(cases), len(contexts) + options.rounds)
    with run.measuring():
        for num_threads, shape, competitor in cases:
            with pinned_to(choose_cpus(num_threads)):
                line, found = _measure_line(run, competitor.name, shape, contexts, num_threads)
            run.report["lines"] += line
            run.report["notes"] += found
    return run.report


def _measure_line(
    run: Run, name: str, shape: AttentionShape, contexts: Sequence[int], num_threads: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure one competitor over all contexts that fit in the memory together."""
    contests: list[Contest] = []
    notes: list[str] = []
    try:
        for context in contexts:
            competitor: Competitor = KvedgeLayer() if name == "kvedge" else make_peers([name])[0]
            workload = make_workload(shape, context)
            contest = enter([competitor], workload, num_threads, run.conditions, run.advance)
            contests.append(contest)
            notes += contest.notes
        entries = [
            (contest.workload.context, entry) for contest in contests for entry in contest.entries
        ]
        timed = [
            TimedCalls(str(context), entry.competitor.run, entry.copies)
            for context, entry in entries
        ]
        samples = run.samples(timed)
    finally:
        for contest in contests:
            contest.release()
    points: list[dict[str, Any]] = [
        {"context": context, "bytes": entry.bytes, "seconds": spread_of(seconds).as_json()}
        for (context, entry), seconds in zip(entries, samples, strict=True)
    ]
    if len(points) < 2:
        return [], [*notes, f"{name}, {shape}: too few contexts for a line"]
    line = fit_line(
        [point["context"] for point in points], [point["seconds"]["median"] for point in points]
    )
    found = {
        "name": name,
        "shape": asdict(shape),
        "num_threads": num_threads,
        "seconds_per_token": line.slope,
        "intercept_seconds": line.intercept,
        "r_squared": line.r_squared,
        "largest_residual": line.largest_residual,
        "points": points,
    }
    return [found], notes


def _line_of(found: Mapping[str, Any]) -> Line:
    return Line(
        found["seconds_per_token"],
        found["intercept_seconds"],
        found["r_squared"],
        found["largest_residual"],
    )


_COLUMNS = (">context", ">us", ">spread", ">GB/s", ">line, us", ">off the line", ">rounds")
_LINE_COLUMNS = (
    "shape",
    ">threads",
    "",
    ">ns per token",
    ">call, us",
    ">GB/s on the line",
    ">r squared",
    ">worst point",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print the points of each line, and all lines."""
    print_header(report, output)
    for found in report["lines"]:
        title = f"{found['name']}; {_title(found)}, {report['settings']['cache']}"
        output.table(title, _COLUMNS, _rows(found))
    output.table("straight lines", _LINE_COLUMNS, [_line_row(one) for one in report["lines"]])


def _title(found: Mapping[str, Any]) -> str:
    return f"{AttentionShape(**found['shape'])}; {found['num_threads']} threads"


def _rows(found: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    line = _line_of(found)
    for point in found["points"]:
        seconds, on_line = point["seconds"], line.at(point["context"])
        yield (
            f"{point['context']:,}",
            microseconds(seconds["median"]),
            plus_minus(seconds),
            f"{point['bytes'] / seconds['median'] / 1e9:.1f}",
            microseconds(on_line),
            f"{seconds['median'] / on_line - 1:+.1%}",
            str(seconds["count"]),
        )


def _line_row(found: Mapping[str, Any]) -> Sequence[str]:
    last = found["points"][-1]
    rate = last["bytes"] / last["context"] / found["seconds_per_token"]
    return (
        str(AttentionShape(**found["shape"])),
        str(found["num_threads"]),
        found["name"],
        f"{found['seconds_per_token'] * 1e9:.3f}",
        microseconds(found["intercept_seconds"]),
        f"{rate / 1e9:.1f}",
        f"{found['r_squared']:.5f}",
        f"{found['largest_residual']:.1%}",
    )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw points and lines, one panel per shape and number of threads."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for found in report["lines"]:
        panels.setdefault(_title(found), []).append(found)
    names = list(report["competitors"])
    for axes, lines in plotting.panels(figure, report, "Time against context", panels):
        for found in lines:
            style = plotting.style_of(found["name"], names)
            contexts = [point["context"] for point in found["points"]]
            times = [point["seconds"]["median"] * 1e6 for point in found["points"]]
            axes.plot(contexts, times, **(style | {"linestyle": ""}), label=found["name"])
            on_line = [_line_of(found).at(n) * 1e6 for n in contexts]
            axes.plot(contexts, on_line, color=style["color"], linewidth=0.8)
        axes.set(xlabel="context (tokens)", ylabel="us per layer and token")
