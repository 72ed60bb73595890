"""``kvedge bench report``: several benchmarks of this machine, in one file to keep or to send."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvedge
from kvedge import system
from kvedge.bench import decode, page, prefill, threads
from kvedge.bench.report import FORMAT, json_line, load_report
from kvedge.console import plotting
from kvedge.console.exits import INTERRUPTED, OK, CommandError, UsageError
from kvedge.console.output import Output
from kvedge.files.replacing import check_target, replacing

NAME = "report"
SUMMARY = "the usual benchmarks of this machine in one file: .html, .md or .json"
DESCRIPTION = """\
Measure decoding, prompts, formats and threads on shapes of small models, and write one file:
a page that opens offline, with plots (.html, which needs matplotlib), Markdown (.md), or all
figures (.json). It says which machine and versions they are of. Takes some minutes; --quick takes
less, with fewer rounds and shorter contexts, for figures that are rougher. --from writes a .json
that was measured before, perhaps elsewhere, as one of the others.
"""
EXAMPLES = """\
  kvedge bench report --out report.html
  kvedge bench report --quick --out raspberry-pi-5.json
  kvedge bench report --from raspberry-pi-5.json --out raspberry-pi-5.html
"""

_SUFFIXES = (".html", ".md", ".json")

_SHAPES = ("--shape", "Llama-3.2-1B", "Qwen2.5-0.5B")
#: What is run: a benchmark, and its arguments; then those of --quick.
_RUNS: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    (decode, (*_SHAPES, "--context", "2048", "8192", "32768"), ("--context", "1024", "4096")),
    (prefill, ("--context", "0", "4096"), ("--context", "0", "1024")),
    (
        decode,
        (*_SHAPES[:2], "--context", "8192", "--peers", "ggml-q4_0", "--formats", "all"),
        ("--context", "2048"),
    ),
    (threads, ("--shape", "Llama-3.2-1B", "--peers", "none"), ("--context", "2048")),
)
_QUICK = ("--rounds", "5", "--budget", "2")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="file to write: .html, .md or .json"
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="a .json of this command; nothing is measured"
    )
    parser.add_argument("--quick", action="store_true", help="a minute or two, rougher figures")


def run(options: argparse.Namespace, output: Output) -> int:
    """Measure, and write the file; what was measured before Ctrl-C is written as well."""
    out = Path(options.out)
    if out.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--out {out}: the name must end with {', '.join(_SUFFIXES)}")
    if out.suffix.lower() == ".html":
        plotting.require_matplotlib("--out report.html")  # before minutes of measuring
    check_target(out)
    if options.source is None:
        report = measure(quick=options.quick, output=output)
    else:
        report = load_report(options.source)
        if report.get("benchmark") != NAME:
            raise CommandError(f"{options.source} is no report of 'kvedge bench report'")
    with replacing(out) as file:
        file.write(written(report, out.suffix.lower()).encode())
    output.note(f"written: {out}")
    return INTERRUPTED if report["interrupted"] else OK


def measure(*, quick: bool, output: Output) -> dict[str, Any]:
    """Run the benchmarks one after the other.

    Returns
    -------
    dict
        ``runs``: their reports, each as --save writes it; beside it the machine, versions, time.
    """
    found: dict[str, Any] = {
        "format": FORMAT,
        "benchmark": NAME,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": kvedge.__version__,
        "isa": kvedge.isa_info()["isa"],
        "machine": asdict(system.machine()),
        "quick": quick,
        "interrupted": False,
        "notes": [],
        "runs": [],
    }
    for benchmark, usual, shorter in _RUNS:
        words = [*usual, *_QUICK] if quick else [*usual]
        if quick and "--context" in shorter:
            words = [*_without(words, "--context"), *shorter]
        report = benchmark.measure(_parsed(benchmark, words), output)
        report["command"] = " ".join(["bench", benchmark.NAME, *words])
        found["runs"].append(report)
        if report.get("interrupted"):
            found["interrupted"] = True
            found["notes"].append("interrupted: only what was measured by then is here")
            break
    return found


def written(report: dict[str, Any], suffix: str) -> str:
    """Return a report as the text of a file with that suffix."""
    if suffix == ".json":
        return json_line(report)
    by_name = {benchmark.NAME: benchmark for benchmark, _, _ in _RUNS}
    names = [run["benchmark"] for run in report["runs"]]
    if unknown := [name for name in names if name not in by_name]:
        raise CommandError(f"runs of {', '.join(unknown)} are of another version of kvedge")
    sections = [(by_name[run["benchmark"]], run) for run in report["runs"]]
    title = f"kvedge {report['version']} on {report['machine']['cpu']}, {report['time'][:10]}"
    if suffix == ".html":
        return page.html_page(title, sections, report["notes"])
    parts = [f"# {title}", *(f"- {note}" for note in report["notes"])]
    for benchmark, run in sections:
        parts.append(f"```\nkvedge {run['command']}\n```")
        parts += map(page.markdown_table, page.tables_of(benchmark, run))
        parts.append("\n".join(f"- {note}" for note in run["notes"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _parsed(benchmark: Any, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"kvedge bench {benchmark.NAME}")
    benchmark.add_options(parser)
    return parser.parse_args([*words])


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Leave out a flag and what is said with it."""
    if flag not in words:
        return [*words]
    start = words.index(flag)
    stop = start + 1
    while stop < len(words) and not words[stop].startswith("--"):
        stop += 1
    return [*words[:start], *words[stop:]]
