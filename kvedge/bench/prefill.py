"""``kvedge bench prefill``: attention of a prompt's tokens over what is stored, against peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.contest import Entry, enter, errors_of, product_figures, product_probes
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import (
    by_shape,
    milliseconds,
    plus_minus,
    print_by_shape,
    print_header,
    product_limit,
    scientific,
    threads_of,
)
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run, all_cases, settings_of
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.bench.workload import make_workload
from kvedge.console.output import Output

NAME = "prefill"
SUMMARY = "attention of a prompt's tokens over what is stored, against the peers"
DESCRIPTION = """\
Time of one layer for a chunk of a prompt behind contexts of several lengths, causal: kvedge, the
same with precision_bits=8 and 16, and whichever of PyTorch, ONNX Runtime and ggml are
installed, in turn in one run. Times are of attention alone; for kvedge also with the chunk's keys
and values quantized and stored. A call reads everything once for hundreds of rows, so caches are
neither kept hot nor made cold. Errors are those of some rows of the chunk.
"""
EXAMPLES = """\
  kvedge bench prefill                                       # all shapes: many minutes
  kvedge bench prefill --shape Llama-3.2-1B --context 0 4096 --threads 1 2
  kvedge bench prefill --new-tokens 64 --peers torch-fp32 ggml-q8_0
  kvedge bench prefill --save run.json --plot run.png
"""

_CONTEXTS = (0, 4096, 32768)
_NEW_TOKENS = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, _CONTEXTS, empty=True)
    common.add_new_tokens(
        cases, _NEW_TOKENS, "tokens of the prompt in one call, after those of --context"
    )
    common.add_threads(cases)
    common.add_peers(cases)
    common.add_variants(cases)
    common.add_rounds(parser.add_argument_group("how"))
    common.add_output(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    settings = settings_of(options, "new tokens", "rounds", "threads", "pinned")
    run = Run.against_peers(NAME, options, settings, "kvedge-8", "kvedge-16")
    cases = all_cases(options)
    run.show(output, len(cases))
    return run.over(cases, lambda *case: _measure_case(run, *case))


def _measure_case(
    run: Run, num_threads: int, shape: AttentionShape, context: int
) -> tuple[dict[str, Any], Sequence[str]]:
    """Measure one case: attention alone of all, and with the append of kvedge's."""
    conditions, new_tokens = run.conditions, run.options.new_tokens
    workload = make_workload(shape, context + new_tokens, new_tokens)
    contest = enter(run.competitors, workload, num_threads, conditions, run.advance)
    try:
        alone = {entry.competitor.name: entry.competitor.run for entry in contest.entries}
        appending = {
            entry.competitor.name: entry.competitor.run_with_append
            for entry in contest.entries
            if isinstance(entry.competitor, KvedgeLayer)
        }
        samples = run.samples(
            [
                *(
                    TimedCalls(name, call, wake_seconds=conditions.wake_seconds(num_threads))
                    for name, call in (*alone.items(), *appending.items())
                ),
                *product_probes(num_threads),
            ],
            pause_seconds=conditions.pause_seconds(num_threads),
        )
        times = dict(zip(alone, samples, strict=False))
        count = len(alone) + len(appending)
        append_times = dict(zip(appending, samples[len(alone) : count], strict=True))
        product_rates = samples[count:]
        own_seconds = spread_of(samples[0]).median
        rows_times_tokens = new_tokens * context + new_tokens * (new_tokens + 1) // 2
        operations = 4 * shape.num_heads * shape.head_dim * rows_times_tokens
        return {
            "shape": asdict(shape),
            "context": context,
            "new_tokens": new_tokens,
            "num_threads": num_threads,
            "operations": operations,
            **product_figures(operations // 2, product_rates),
            "results": [
                _result(
                    entry,
                    times[entry.competitor.name],
                    append_times.get(entry.competitor.name),
                    own_seconds,
                    operations,
                )
                for entry in contest.entries
            ],
        }, contest.notes
    finally:
        contest.release()


def _result(
    entry: Entry,
    seconds: Sequence[float],
    with_append: Sequence[float] | None,
    own_seconds: float,
    operations: int,
) -> dict[str, Any]:
    median = spread_of(seconds).median
    return {
        "name": entry.competitor.name,
        "note": entry.competitor.note,
        "bytes": entry.bytes,
        "seconds": spread_of(seconds).as_json(),
        "seconds_with_append": None if with_append is None else spread_of(with_append).as_json(),
        "operations_per_second": operations / median,
        "ratio_to_kvedge": median / own_seconds,
        **errors_of(entry),
    }


# ---- tables ----------------------------------------------------------------------------------


_COLUMNS = (
    ">context",
    "",
    ">ms",
    ">spread",
    ">ms with append",
    ">Gflop/s",
    ">time / kvedge's",
    ">error",
    ">of it arithmetic",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print the machine, and one table per shape and number of threads."""

    def title(case: Mapping[str, Any]) -> str:
        return f"{threads_of(case)}; per layer and {report['settings']['new tokens']} new tokens"

    print_header(report, output)
    print_by_shape(report, output, title, _COLUMNS, _rows, "num_threads")


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    context = f"{case['context']:,}"
    if (limit := product_limit(case)) is not None:
        count = str(case["product_rate"]["count"])
        rate = f"{case['operations'] / limit / 1e9:.1f}"
        yield (context, "product limit", milliseconds(limit), "", "", rate, "", "", "", count)
        context = ""
    for result in case["results"]:
        seconds, appended = result["seconds"], result["seconds_with_append"]
        yield (
            context,
            result["name"],
            milliseconds(seconds["median"]),
            plus_minus(seconds),
            milliseconds(appended["median"]) if appended else "",
            f"{result['operations_per_second'] / 1e9:.1f}",
            f"{result['ratio_to_kvedge']:.2f}",
            scientific(result["error"]),
            scientific(result["arithmetic_error"]),
            str(seconds["count"]),
        )
        context = ""


# ---- plot ------------------------------------------------------------------------------------


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw time against all tokens for each shape, with the product limit below all."""
    names = list(report["competitors"])
    panels = {
        f"{name}; {num_threads} threads": cases
        for (name, num_threads), cases in by_shape(report["cases"], "num_threads").items()
    }
    what = f"Attention of {report['settings']['new tokens']} new tokens"
    for axes, cases in plotting.panels(figure, report, what, panels):
        totals = [_total(case) for case in cases]
        plotting.draw_limit(axes, totals, [product_limit(case) for case in cases], 1e3)
        plotting.draw_times(axes, cases, names, _total, 1e3)
        axes.set(xlabel="tokens, the new ones included", ylabel="ms per layer")


def _total(case: Mapping[str, Any]) -> int:
    total: int = case["context"] + case["new_tokens"]
    return total
