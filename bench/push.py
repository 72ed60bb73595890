"""``python -m bench push``: how fast keys and values are taken in."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.figures import timing_rows
from bench.quantizers import QUANTIZERS, Intake, Step, make_intake
from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import choose_cpus
from kvedge.bench.copies import copies_for
from kvedge.bench.peers import KvedgeLayer, installed_peers
from kvedge.bench.report import print_by_shape, print_header
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run
from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output
from kvedge.console.values import positive_int

NAME = "push"
SUMMARY = "GB/s of float32 keys and values taken in: one token, and a prompt's"
DESCRIPTION = """\
Time to store keys and values as INT8, for one token (push) and for many (extend), on one thread:
kvedge, ggml's q8_0 (the conversion alone) and a copy of the float32 bytes. GB/s are bytes of
float32 that come in. One token comes from the processor's caches, where the model has just left it;
many tokens come from memory, or with --hot from the caches too.
"""
EXAMPLES = """\
  python -m bench push
  python -m bench push --shape Qwen3-0.6B --tokens 1 64 512 4096 --hot
"""

_TOKENS = (1, 512)
_FEW = 16  # tokens up to which the input is always hot
_HOT_INPUTS = 4
# For few tokens: this many are stored before the store begins anew. At 8 heads of 64 that is 16 MiB
# of INT8, more than a second-level cache.
_STORED_TOKENS = 1 << 14


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, shapes=SHAPES[:1])
    cases.add_argument(
        "--tokens",
        type=positive_int,
        nargs="+",
        action="extend",
        metavar="N",
        help=f"tokens per call (default: {' '.join(map(str, _TOKENS))})",
    )
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases."""
    peers, notes = installed_peers(("ggml-q8_0",))
    names = [name for name in QUANTIZERS if name != "ggml-q8_0" or peers]
    cpus = choose_cpus(1)
    settings = {
        "input": "hot" if options.hot else f"cold; up to {_FEW} tokens hot",
        "rounds": options.rounds,
        "threads": 1,
        "pinned": f"to processor {cpus[0]}" if cpus else "no: this system cannot",
    }
    tokens = sorted(set(options.tokens or _TOKENS))
    cases = list(itertools.product([1], common.chosen_shapes(options), tokens))
    run = Run(NAME, options, settings, competitors=[KvedgeLayer(), *peers], notes=notes)

    def measure_case(
        _: int, shape: AttentionShape, tokens: int
    ) -> tuple[dict[str, Any], Sequence[str]]:
        intake = _intake(shape, tokens, run.machine, hot=options.hot)
        return _case(intake, names, run.samples([_timed(name, intake) for name in names])), ()

    run.show(output, len(cases), options.rounds)
    return run.over(cases, measure_case)


def _intake(shape: AttentionShape, tokens: int, machine: system.Machine, *, hot: bool) -> Intake:
    size = 4 * shape.values_per_token * tokens
    cold = copies_for(size, machine, hot=False)
    if tokens <= _FEW:
        return make_intake(shape, tokens, _HOT_INPUTS, -(-_STORED_TOKENS // tokens))
    return make_intake(shape, tokens, 1 if hot else cold, cold)


def _timed(name: str, intake: Intake) -> TimedCalls:
    step: Step = QUANTIZERS[name](intake)
    for place in range(intake.places):  # every page is there from now on
        step(place)
    return TimedCalls(name, step, intake.places)


def _case(intake: Intake, names: Sequence[str], samples: Sequence[list[float]]) -> dict[str, Any]:
    spreads = {name: spread_of(seconds) for name, seconds in zip(names, samples, strict=True)}
    copy, own = spreads["memory copy"].median, spreads["kvedge"].median
    return {
        "shape": asdict(intake.shape),
        "tokens": intake.tokens,
        "bytes": intake.bytes,
        "results": [
            {
                "name": name,
                "seconds": seconds.as_json(),
                "bytes_per_second": intake.bytes / seconds.median,
                "speed_of_memory_copy": copy / seconds.median,
                "ratio_to_kvedge": seconds.median / own,
            }
            for name, seconds in spreads.items()
        ],
    }


_COLUMNS = (
    ">tokens",
    "",
    ">us per call",
    ">spread",
    ">GB/s of float32",
    ">of a copy's speed",
    ">time / kvedge's",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape."""
    print_header(report, output)
    print_by_shape(report, output, "keys and values in", _COLUMNS, _rows)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    return timing_rows(
        case,
        (str(case["tokens"]),),
        lambda result: (
            f"{result['bytes_per_second'] / 1e9:.2f}",
            f"{result['speed_of_memory_copy']:.0%}",
            f"{result['ratio_to_kvedge']:.2f}",
        ),
    )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the GB/s of each case as bars."""
    plotting.draw_bars(
        figure,
        report,
        "Storing keys and values",
        value=lambda result: result["bytes_per_second"] / 1e9,
        label="GB/s of float32 taken in",
        title=lambda case: f"{case['tokens']} tokens",
    )
