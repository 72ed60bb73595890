"""What every benchmark's report says first: versions, the machine, how it was measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvedge
from kvedge import system
from kvedge.bench.peers import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.console.exits import CommandError
from kvedge.console.output import Output
from kvedge.console.sizes import format_size
from kvedge.files.replacing import replacing

__all__ = [
    "FORMAT",
    "by_shape",
    "header",
    "json_line",
    "load_report",
    "microseconds",
    "milliseconds",
    "percent",
    "plus_minus",
    "print_by_shape",
    "print_header",
    "product_limit",
    "remarks",
    "save_report",
    "scientific",
    "threads_of",
]

#: Changes when a field of a report changes its meaning.
FORMAT = 1

# More than this many programs running on average in the last minute, and figures are doubtful.
_QUIET_LOAD = 0.5


def header(
    benchmark: str,
    machine: system.Machine,
    competitors: Iterable[Competitor],
    *,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the fields that all reports begin with."""
    isa = kvedge.isa_info()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if load is not None and load > _QUIET_LOAD:
        notes = [*notes, f"other programs were running at the start: load average {load:.1f}"]
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv[1:]),
        "version": kvedge.__version__,
        "backend": isa["backend"],
        "isa": isa["isa"],
        "machine": asdict(machine),
        "load_average": load,
        "settings": dict(settings),
        "competitors": {peer.name: peer.version() for peer in competitors},
        "notes": list(notes),
    }


def print_header(report: Mapping[str, Any], output: Output) -> None:
    """Print machine and versions, as they belong beside any figure."""
    here = report["machine"]
    cores = here["physical_cores"] or here["usable_cores"]
    cache = max((level["bytes"] for level in here["caches"]), default=0)
    pages = here["huge_pages"]
    rows = [
        ("processor", here["cpu"]),
        ("cores", f"{cores}, last-level cache {format_size(cache)}"),
        ("huge pages", pages["policy"] if pages else "unknown"),
        ("kvedge", f"{report['version']}, {report['backend']}, {report['isa']}"),
    ]
    versions = report["competitors"].items()
    peers = ", ".join(
        f"{name} {version}" for name, version in versions if not name.startswith("kvedge")
    )
    rows += [("peers", peers)] if peers else []
    rows += [(name, str(value)) for name, value in report["settings"].items()]
    rows.append(("measured", report["time"]))
    output.facts(f"kvedge bench {report['benchmark']}", rows)


def remarks(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say once what each competitor noted about how it was run."""
    found: dict[str, set[str]] = {}
    for case in cases:
        for result in case["results"]:
            if result.get("note"):
                found.setdefault(f"{result['name']}: {result['note']}", set()).add(
                    case["shape"]["name"] or "the given shape"
                )
    return [f"{remark} ({', '.join(sorted(shapes))})" for remark, shapes in found.items()]


def by_shape(
    cases: Iterable[Mapping[str, Any]], *numbers: str
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the cases of each shape, and of each of those numbers of a case."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for case in cases:
        key = (str(AttentionShape(**case["shape"])), *(case[number] for number in numbers))
        found.setdefault(key, []).append(case)
    return found


def print_by_shape(
    report: Mapping[str, Any],
    output: Output,
    title: str | Callable[..., str],
    columns: Sequence[str],
    rows_of: Callable[[Mapping[str, Any]], Iterable[Sequence[str]]],
    *numbers: str,
) -> None:
    """Print one table per shape with the rows of all of its cases.

    Parameters
    ----------
    title : str or callable
        What a table's title says beside the shape; a function gets its first case.
    numbers : str
        Of a case, besides its shape: a table for each of them.
    """
    for (shape, *_), cases in by_shape(report["cases"], *numbers).items():
        said = title if isinstance(title, str) else title(cases[0])
        output.table(f"{shape}; {said}", columns, [row for case in cases for row in rows_of(case)])


def threads_of(case: Mapping[str, Any]) -> str:
    """Write the number of a case's threads."""
    count = case["num_threads"]
    return "1 thread" if count == 1 else f"{count} threads"


def save_report(report: Mapping[str, Any], path: str) -> None:
    """Write a report as JSON, in one line."""
    with replacing(path) as file:
        file.write(json_line(report).encode())


def json_line(report: Mapping[str, Any]) -> str:
    """Return a report as one line of JSON: what a file of it holds."""
    return json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n"


def load_report(path: str) -> dict[str, Any]:
    """Read a report that ``--save`` or ``--json`` wrote.

    Raises
    ------
    CommandError
        If the file is no such report.
    """
    try:
        report = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise CommandError(f"{path} is no report of this version's 'kvedge bench --save'")
    return report


def microseconds(seconds: float) -> str:
    """Write a time in microseconds, to three or four digits."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def milliseconds(seconds: float) -> str:
    """Write a time in milliseconds, to three or four digits."""
    return microseconds(seconds * 1e-3)


def product_limit(case: Mapping[str, Any]) -> float | None:
    """Return the seconds that a case's products take alone; None if that was not measured."""
    rate = case.get("product_rate")  # runs of before had none, and the NumPy backend has none
    return None if rate is None else float(case["products"] / rate["median"])


def plus_minus(measured: Mapping[str, Any]) -> str:
    """Write how far measurements lie apart, against their median."""
    return f"±{measured['relative_spread']:.1%}"


def percent(part: float) -> str:
    """Write a part of a whole in percent."""
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


def scientific(error: float | None) -> str:
    """Write an error to two digits; nothing where there is none."""
    return "" if error is None else f"{error:.1e}"
