"""``kvedge bench formats``: every storage format beside int8, decode and a part of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import choose_cpus, pinned_to, pinning
from kvedge.bench.benchmark import measuring, progress
from kvedge.bench.contest import Conditions, measure_case
from kvedge.bench.peers import KvedgeLayer, installed_peers
from kvedge.bench.report import (
    by_shape,
    header,
    microseconds,
    percent,
    plus_minus,
    print_header,
    remarks,
    scientific,
)
from kvedge.bench.shapes import SHAPES
from kvedge.console.output import Output
from kvedge.core.formats import DTYPES

NAME = "formats"
SUMMARY = "every storage format beside int8, decode and a part of a prompt"
DESCRIPTION = """\
Time of one layer in each storage format, in turn in one run: for one token over a long cache, which
is cold, and for the last tokens of a prompt; beside them ggml's flash attention on q4_0. Ratios are
to int8 with a scale per row; the share is of the speed at which this machine reads memory.
"""
EXAMPLES = """\
  kvedge bench formats                                       # five shapes, 32,768 tokens
  kvedge bench formats --formats fp8_e4m3 float16 --shape Phi-3-mini
  KVEDGE_ISA=avx2 kvedge bench formats --new-tokens 512
  kvedge bench formats --save run.json --plot run.png
"""

_CONTEXTS = (32768,)
_NEW_TOKENS = 64
_SHAPES = ("Phi-3-mini", "Qwen3-0.6B", "Phi-2", "Llama-3.2-1B", "Qwen2.5-0.5B")
_BASE = "int8"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = parser.add_argument_group("what is measured")
    common.add_shapes(cases, [next(one for one in SHAPES if one.name == name) for name in _SHAPES])
    common.add_contexts(cases, _CONTEXTS)
    others = [name for name in DTYPES if name != _BASE]
    cases.add_argument(
        "--formats",
        choices=others,
        nargs="+",
        action="extend",
        metavar="FORMAT",
        help=f"what to compare with int8: {', '.join(others)} (default: all)",
    )
    common.add_new_tokens(cases, _NEW_TOKENS, "the last tokens of --context, as part of a prompt")
    common.add_threads(cases)
    common.add_peers(cases, default="ggml-q4_0")
    how = parser.add_argument_group("how")
    common.add_hot(how)
    common.add_rounds(how)
    common.add_output(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    machine = system.machine()
    conditions = Conditions(machine, options.rounds, options.budget, options.hot)
    names = [name for name in DTYPES if name in (options.formats or DTYPES) and name != _BASE]
    peers, notes = installed_peers(common.chosen_peers(options))
    competitors = [*(KvedgeLayer(name) for name in (_BASE, *names)), *peers]
    cases = [
        (num_threads, shape, context, new_tokens)
        for num_threads in common.chosen_threads(options)
        for shape in common.chosen_shapes(options)
        for context in common.chosen_contexts(options)
        for new_tokens in (None, min(options.new_tokens, context))
    ]
    settings = {
        "cache": "hot" if options.hot else "cold",
        "new tokens": options.new_tokens,
        "rounds": options.rounds,
        "threads": ", ".join(str(count) for count in dict.fromkeys(case[0] for case in cases)),
        "pinned": pinning(max(case[0] for case in cases)),
    }
    report = header(NAME, machine, competitors, settings=settings, notes=notes)
    report["cases"] = []
    advance = progress(
        output, len(cases) * (len(competitors) + options.rounds), "kvedge bench formats"
    )
    with measuring(report):
        for num_threads, shape, context, new_tokens in cases:
            with pinned_to(choose_cpus(num_threads)):
                case, found = measure_case(
                    competitors, shape, context, num_threads, conditions, advance, new_tokens
                )
                report["cases"].append(case)
                report["notes"] += found
    report["notes"] += remarks(report["cases"])
    return report


# ---- tables --------------------------------------------------------------------------------------


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print the machine, and a table per shape and number of threads."""
    print_header(report, output)
    for (name, num_threads), cases in by_shape(report["cases"], "num_threads").items():
        threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        title = f"{name}; {threads}, {report['settings']['cache']}; per layer"
        output.table(title, _COLUMNS, [row for case in cases for row in _rows(case)])


_COLUMNS = (
    ">context",
    ">queries of",
    "",
    ">MB",
    ">us",
    ">spread",
    ">time / int8's",
    ">GB/s",
    ">of the read limit",
    ">share / int8's",
    ">error",
    ">of it arithmetic",
)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    base = case["results"][0]
    tokens = "1 token" if case["new_tokens"] is None else f"{case['new_tokens']} tokens"
    for result in case["results"]:
        is_base = result is base
        yield (
            f"{case['context']:,}" if is_base else "",
            tokens if is_base else "",
            _dtype(result),
            f"{result['bytes'] / 1e6:.1f}",
            microseconds(result["seconds"]["median"]),
            plus_minus(result["seconds"]),
            f"{result['ratio_to_kvedge']:.2f}",
            f"{result['bytes_per_second'] / 1e9:.1f}",
            percent(result["share_of_bandwidth"]),
            f"{result['share_of_bandwidth'] / base['share_of_bandwidth']:.2f}",
            scientific(result["error"]),
            scientific(result["arithmetic_error"]),
        )


def _dtype(result: Mapping[str, Any]) -> str:
    """Return the format that a competitor is named by."""
    return str(result["name"]).removeprefix("kvedge-").replace("kvedge", _BASE)


# ---- plot ----------------------------------------------------------------------------------------


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw times beside int8's: a group of bars for each case."""
    panels = by_shape(report["cases"], "num_threads")
    for axes, ((name, num_threads), cases) in zip(
        plotting.grid(figure, len(panels)), panels.items(), strict=True
    ):
        width = 0.8 / len(cases)
        for i, case in enumerate(cases):
            what = "decode" if case["new_tokens"] is None else f"{case['new_tokens']} queries"
            ratios = [result["ratio_to_kvedge"] for result in case["results"]]
            places = [at + i * width for at in range(len(ratios))]
            axes.bar(places, ratios, width, label=f"{case['context']:,}, {what}")
        axes.axhline(1.0, color="black", linestyle=":")
        axes.set_xticks(
            range(len(cases[0]["results"])),
            [_dtype(result) for result in cases[0]["results"]],
            rotation=45,
        )
        axes.set_ylabel("time / int8's")
        axes.set_title(f"{name}; {num_threads} threads", fontsize="small")
        axes.legend(fontsize="x-small")
    figure.suptitle(f"Storage formats, {report['machine']['cpu']}", fontsize="medium")
