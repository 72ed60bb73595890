"""``kvedge bench formats``: every storage format beside int8, decode and a part of a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.contest import measure_case
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import (
    by_shape,
    microseconds,
    percent,
    plus_minus,
    print_by_shape,
    print_header,
    scientific,
    threads_of,
)
from kvedge.bench.runner import Run, all_cases, settings_of
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
    shapes = [next(one for one in SHAPES if one.name == name) for name in _SHAPES]
    cases = common.add_cases(parser, _CONTEXTS, shapes)
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
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    names = [name for name in DTYPES if name in (options.formats or DTYPES) and name != _BASE]
    own = [KvedgeLayer(name) for name in (_BASE, *names)]
    settings = settings_of(options, "cache", "new tokens", "rounds", "threads", "pinned")
    run = Run.against_peers(NAME, options, settings, own=own)
    cases = [
        (*case, new_tokens)
        for case in all_cases(options)
        for new_tokens in (None, min(options.new_tokens, case[-1]))
    ]
    run.show(output, len(cases))
    return run.over(
        cases,
        lambda num_threads, shape, context, new_tokens: measure_case(
            run.competitors, shape, context, num_threads, run.conditions, run.advance, new_tokens
        ),
    )


# ---- tables --------------------------------------------------------------------------------------


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print the machine, and a table per shape and number of threads."""

    def title(case: Mapping[str, Any]) -> str:
        return f"{threads_of(case)}, {report['settings']['cache']}; per layer"

    print_header(report, output)
    print_by_shape(report, output, title, _COLUMNS, _rows, "num_threads")


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
    panels = {
        f"{name}; {num_threads} threads": cases
        for (name, num_threads), cases in by_shape(report["cases"], "num_threads").items()
    }
    for axes, cases in plotting.panels(figure, report, "Storage formats", panels):
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
