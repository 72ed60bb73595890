"""``kvedge bench logits``: what options on logits cost, against attention without any."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.copies import copies_that_fit
from kvedge.bench.peers import KvedgeLayer, filled_layers
from kvedge.bench.report import print_by_shape, print_header, timing_rows
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run, all_cases, settings_of
from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.bench.statistics import against_first
from kvedge.bench.workload import Workload, make_workload
from kvedge.console.exits import CommandError
from kvedge.console.output import Output

NAME = "logits"
SUMMARY = "what softcap, ALiBi, masks, biases, windows and sinks cost"
DESCRIPTION = """\
Attention with each of the options that look at single logits, against the same without any, in
turn in one run: softcap (Gemma 2), ALiBi slopes, a boolean mask that hides a tenth of the tokens,
a float one (a bias), learned sinks (gpt-oss), and a window of half of the tokens, which reads half
as much.
"""
EXAMPLES = """\
  kvedge bench logits
  kvedge bench logits --shape 8,4,256 --context 8192     # Gemma 2 2B
  kvedge bench logits --new-tokens 128                   # a prompt
"""

_CONTEXT = 8192
_SEED = 7


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    gemma_2 = AttentionShape("Gemma-2-2B", 8, 4, 256)
    cases = common.add_cases(parser, (_CONTEXT,), (SHAPES[0], gemma_2))
    common.add_new_tokens(cases)
    common.add_threads(cases)
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    cases = all_cases(options)
    settings = settings_of(options, "cache", "rounds", "pinned")
    run = Run(NAME, options, settings)

    def measure_case(
        num_threads: int, shape: AttentionShape, context: int
    ) -> tuple[dict[str, Any], Sequence[str]]:
        if context < options.new_tokens:
            raise CommandError(f"{context} tokens are too few for {options.new_tokens}")
        workload = make_workload(shape, context, options.new_tokens)
        calls = _calls(workload, num_threads, run.machine, hot=options.hot)
        names, samples = [call.name for call in calls], run.samples(calls)
        return {
            "shape": asdict(shape),
            "context": context,
            "new_tokens": options.new_tokens,
            "num_threads": num_threads,
            "results": against_first(names, samples, "ratio_to_none"),
        }, ()

    run.show(output, len(cases), options.rounds)
    return run.over(cases, measure_case)


def _variants(workload: Workload) -> dict[str, dict[str, Any]]:
    """Arguments of ``attend``, by what the tables call them."""
    rng = np.random.default_rng(_SEED)
    num_heads, seen = workload.shape.num_heads, (workload.num_rows, workload.context)
    mask = rng.random(seen) < 0.9
    mask[:, -workload.num_rows :] |= np.eye(workload.num_rows, dtype=bool)  # each row sees itself
    slopes = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)  # Press et al. 2022
    return {
        "none": {},
        "softcap": {"softcap": 50.0},
        "ALiBi": {"alibi_slopes": slopes.astype(np.float32)},
        "boolean mask": {"mask": mask},
        "float mask": {"mask": rng.standard_normal(seen, np.float32)},
        "learned sinks": {"sink_logits": np.zeros(num_heads, np.float32)},
        "window of half": {"window": max(1, workload.context // 2)},
    }


def _calls(
    workload: Workload, num_threads: int, machine: system.Machine, *, hot: bool
) -> list[TimedCalls]:
    """Attention with each option; all read the same copies."""
    shape = workload.shape
    size = int(workload.context * KvedgeLayer().bytes_per_token(shape))
    copies = copies_that_fit(f"{shape}, {workload.context} tokens", size, machine, hot=hot)
    layers = filled_layers(workload, copies)
    out = np.empty_like(workload.query)

    def call_with(arguments: dict[str, Any]) -> Callable[[int], object]:
        return lambda copy: layers[copy].attend(
            workload.query, out=out, num_threads=num_threads, **arguments
        )

    return [
        TimedCalls(name, call_with(arguments), copies)
        for name, arguments in _variants(workload).items()
    ]


_COLUMNS = (
    ">context",
    ">new tokens",
    ">threads",
    "option",
    ">us per call",
    ">spread",
    ">time / without",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape."""
    print_header(report, output)
    print_by_shape(report, output, report["settings"]["cache"], _COLUMNS, _rows)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    numbers = (f"{case['context']:,}", str(case["new_tokens"]), str(case["num_threads"]))
    return timing_rows(case, numbers, lambda result: (f"{result['ratio_to_none']:.2f}",))


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the time of each option as bars."""
    plotting.draw_bars(
        figure,
        report,
        "Options on logits",
        value=lambda result: result["ratio_to_none"],
        label="time / without",
        title=lambda case: f"{case['context']:,} tokens, {case['num_threads']} threads",
    )
