"""``kvedge bench decode``: attention of one token over a long cache, against the peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.contest import Conditions, bandwidth_megabytes, measure_case
from kvedge.bench.report import (
    by_shape,
    microseconds,
    percent,
    plus_minus,
    print_by_shape,
    print_header,
    product_limit,
    scientific,
    threads_of,
)
from kvedge.bench.roundrobin import BandwidthProbe, round_robin
from kvedge.bench.runner import Run, all_cases, settings_of
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output
from kvedge.console.sizes import format_rate

NAME = "decode"
SUMMARY = "attention of one token over a long cache, against the peers"
DESCRIPTION = """\
Time of one layer and token, for shapes of known models and several context lengths: kvedge and
whichever of PyTorch, ONNX Runtime and ggml are installed, in turn in one run, beside the
speed at which this machine reads memory. Caches are cold unless --hot is given.
"""
EXAMPLES = """\
  kvedge bench decode                                        # all shapes: many minutes
  kvedge bench decode --shape Llama-3.2-1B --context 32768 --threads 1 2
  kvedge bench decode --shape 24,8,128 --context all --peers ggml-q8_0 ort-int8
  kvedge bench decode --peers none --hot --shape Qwen3-0.6B --context 512
  kvedge bench decode --context all --shape Llama-3.2-1B     # time against context
  kvedge bench decode --peers none --formats all             # every storage format beside int8
  kvedge bench decode --peers none --formats float16 kivi4:recent=96,sinks=4
  kvedge bench decode --peers none --options all             # softcap, ALiBi, masks, windows
  kvedge bench decode --peers kvedge-16 kvedge-24            # other precision_bits
  kvedge bench decode --save run.json --plot run.png
"""

_CONTEXTS = (512, 4096, 32768)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, _CONTEXTS)
    common.add_threads(cases)
    common.add_peers(cases)
    common.add_variants(cases)
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    settings = settings_of(options, "cache", "rounds", "threads", "pinned")
    lists = ("read_bandwidth", "cases")
    run = Run.against_peers(NAME, options, settings, lists=lists)
    cases = all_cases(options)
    run.show(output, len(cases))
    with run.measuring():
        most_threads = max(common.chosen_threads(options))
        run.report["read_bandwidth"] = measure_bandwidth(run.conditions, most_threads)
    return run.over(
        cases,
        lambda num_threads, shape, context: measure_case(
            run.competitors, shape, context, num_threads, run.conditions, run.advance
        ),
    )


def measure_bandwidth(conditions: Conditions, num_threads: int) -> list[dict[str, Any]]:
    """Measure the read bandwidth with 1, 2, 4, ... threads, as many as are used and as are here."""
    here = conditions.machine
    cores = here.physical_cores or here.usable_cores
    counts = system.bandwidth_thread_counts(max(num_threads, cores))
    megabytes = bandwidth_megabytes(here, hot=conditions.hot)
    probes = [BandwidthProbe(count, megabytes) for count in counts]
    rates = round_robin(probes, rounds=min(conditions.rounds, 5))
    return [
        {"num_threads": probe.num_threads, "bytes_per_second": spread_of(rate).median}
        for probe, rate in zip(probes, rates, strict=True)
    ]


# ---- tables ----------------------------------------------------------------------------------


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print the machine, one table per shape and number of threads, and a summary."""
    rows = [
        (str(row["num_threads"]), format_rate(row["bytes_per_second"]))
        for row in report["read_bandwidth"]
    ]

    def title(case: Mapping[str, Any]) -> str:
        return f"{threads_of(case)}, {report['settings']['cache']}; per layer and token"

    print_header(report, output)
    output.table("memory read bandwidth in this run", (">threads", ">speed"), rows)
    print_by_shape(report, output, title, _COLUMNS, _rows, "num_threads")
    output.table("summary", _SUMMARY_COLUMNS, [_summary(case) for case in report["cases"]])


_COLUMNS = (
    ">context",
    "",
    ">us",
    ">spread",
    ">GB/s",
    ">of the read limit",
    ">time / kvedge's",
    ">error",
    ">of it arithmetic",
    ">rounds",
)

_SUMMARY_COLUMNS = (
    "shape",
    ">context",
    ">threads",
    ">read limit us",
    ">product limit us",
    ">kvedge us",
    ">of the read limit",
    "best peer",
    ">its us",
    ">times kvedge's",
)


def _read_limit(case: Mapping[str, Any]) -> float:
    """Return the seconds in which kvedge's bytes could be read."""
    return float(case["results"][0]["bytes"] / case["read_bandwidth"]["median"])


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    bandwidth = case["read_bandwidth"]["median"]
    yield (
        f"{case['context']:,}",
        "read limit",
        microseconds(_read_limit(case)),
        "",
        f"{bandwidth / 1e9:.1f}",
        *("", "", "", "", str(case["read_bandwidth"]["count"])),
    )
    if (limit := product_limit(case)) is not None:
        count = str(case["product_rate"]["count"])
        yield ("", "product limit", microseconds(limit), *[""] * 6, count)
    for result in case["results"]:
        seconds = result["seconds"]
        yield (
            "",
            result["name"],
            microseconds(seconds["median"]),
            plus_minus(seconds),
            f"{result['bytes_per_second'] / 1e9:.1f}",
            percent(result["share_of_bandwidth"]),
            f"{result['ratio_to_kvedge']:.2f}",
            scientific(result["error"]),
            scientific(result["arithmetic_error"]),
            str(seconds["count"]),
        )


def _summary(case: Mapping[str, Any]) -> Sequence[str]:
    own, *others = case["results"]
    peers = [result for result in others if not result["name"].startswith("kvedge-")]
    shape = case["shape"]
    name = shape["name"] or f"{shape['num_heads']},{shape['num_kv_heads']},{shape['head_dim']}"
    best = min(peers, key=lambda peer: peer["seconds"]["median"], default=None)
    told = ("", "", "")
    if best is not None:
        time = microseconds(best["seconds"]["median"])
        told = (best["name"], time, f"{best['ratio_to_kvedge']:.2f}")
    return (
        name,
        f"{case['context']:,}",
        str(case["num_threads"]),
        microseconds(_read_limit(case)),
        "" if (limit := product_limit(case)) is None else microseconds(limit),
        microseconds(own["seconds"]["median"]),
        percent(own["share_of_bandwidth"]),
        *told,
    )


# ---- plot ------------------------------------------------------------------------------------


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw how near each comes to the read limit, per shape; and time against context.

    The second for shapes that were measured at several contexts.
    """
    names = list(report["competitors"])
    panels = by_shape(report["cases"], "num_threads")
    longest = [max(cases, key=lambda case: case["context"]) for cases in panels.values()]
    titles = {
        f"{name.replace(': ', chr(10))}; {threads_of(cases[0])}": cases
        for (name, _), cases in panels.items()
        if len(cases) > 1
    }
    what = f"Decode attention, {report['settings']['cache']}"
    for axes, cases in plotting.panels(figure, report, what, {"": longest, **titles}):
        if cases is longest:
            _draw_shares(axes, longest, names)
            continue
        contexts = [case["context"] for case in cases]
        limits = [_read_limit(case) * 1e6 for case in cases]
        axes.plot(contexts, limits, "k:", marker="_", label="read limit of INT8")
        plotting.draw_limit(axes, contexts, [product_limit(case) for case in cases], 1e6)
        plotting.draw_times(axes, cases, names, lambda case: case["context"], 1e6)
        axes.set(xlabel="context (tokens)", ylabel="us per layer and token")
    if not titles:
        figure.set_size_inches(9, 1 + 0.85 * len(longest))


def _draw_shares(axes: Any, cases: Sequence[Mapping[str, Any]], names: list[str]) -> None:
    """Draw the share of the read limit that each reaches, by the bytes that kvedge reads."""
    width = 0.85 / len(names)
    for place, name in enumerate(names):
        found = {
            number: _read_limit(case) / result["seconds"]["median"]
            for number, case in enumerate(cases)
            for result in case["results"]
            if result["name"] == name
        }
        rows = [number + (place - (len(names) - 1) / 2) * width for number in found]
        color = plotting.style_of(name, names)["color"]
        bars = axes.barh(rows, found.values(), width, label=name, color=color)
        if name == "kvedge":
            axes.bar_label(bars, [f" {share:.0%}" for share in found.values()], fontsize="small")
    limits = [(number, product_limit(case)) for number, case in enumerate(cases)]
    reached = [
        (min(1.0, _read_limit(cases[number]) / limit), number) for number, limit in limits if limit
    ]
    if reached:
        style = {"marker": "|", "markersize": 12, "color": "black", "linestyle": ""}
        axes.plot(*zip(*reached, strict=True), **style, label="kvedge's products alone")
    contexts = {case["context"] for case in cases}
    titles = [_title(case, len(contexts) > 1) for case in cases]
    axes.set_yticks(range(len(cases)), titles, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_formatter("{x:.0%}")
    tokens = f"; {contexts.pop():,} tokens" if len(contexts) == 1 else ""
    axes.set_xlabel(f"of the speed at which kvedge's bytes can be read{tokens}")
    axes.grid(False, axis="y")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))


def _title(case: Mapping[str, Any], with_context: bool) -> str:
    shape = AttentionShape(**case["shape"])
    name = f"{shape.name}\n{replace(shape, name='')}" if shape.name else str(shape)
    more = [f"{case['context']:,} tokens"] if with_context else []
    more += [threads_of(case)] if case["num_threads"] > 1 else []
    return "; ".join([name, *more])
