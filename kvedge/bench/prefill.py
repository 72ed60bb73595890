"""``kvedge bench prefill``: attention of a prompt's tokens over what is stored, against peers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import choose_cpus, pinned_to, pinning
from kvedge.bench.benchmark import measuring, progress
from kvedge.bench.contest import (
    Conditions,
    Entry,
    enter,
    errors_of,
    product_figures,
    product_probes,
)
from kvedge.bench.peers import Competitor, KvedgeLayer, installed_peers
from kvedge.bench.report import (
    by_shape,
    header,
    milliseconds,
    plus_minus,
    print_header,
    product_limit,
    remarks,
    scientific,
)
from kvedge.bench.roundrobin import TimedCalls, round_robin
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.bench.workload import make_workload
from kvedge.console.output import Output

NAME = "prefill"
SUMMARY = "attention of a prompt's tokens over what is stored, against the peers"
DESCRIPTION = """\
Time of one layer for a chunk of a prompt behind contexts of several lengths, causal: kvedge, the
same with precision_bits=8 and 16, and whichever of NumPy, PyTorch, ONNX Runtime and ggml are
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
    cases = parser.add_argument_group("what is measured")
    common.add_shapes(cases)
    common.add_contexts(cases, _CONTEXTS, empty=True)
    common.add_new_tokens(
        cases, _NEW_TOKENS, "tokens of the prompt in one call, after those of --context"
    )
    common.add_threads(cases)
    common.add_peers(cases)
    common.add_rounds(parser.add_argument_group("how"))
    common.add_output(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    machine = system.machine()
    conditions = Conditions(machine, options.rounds, options.budget, hot=True)
    names = dict.fromkeys(("kvedge-8", "kvedge-16", *common.chosen_peers(options)))
    peers, notes = installed_peers(tuple(names))
    competitors = [KvedgeLayer(), *peers]
    thread_counts = common.chosen_threads(options)
    cases = [
        (shape, context)
        for shape in common.chosen_shapes(options)
        for context in common.chosen_contexts(options)
    ]
    settings = {
        "new tokens": options.new_tokens,
        "rounds": options.rounds,
        "threads": ", ".join(map(str, thread_counts)),
        "pinned": pinning(max(thread_counts)),
    }
    report = header(NAME, machine, competitors, settings=settings, notes=notes)
    report["cases"] = []
    steps = len(thread_counts) * len(cases) * (len(competitors) + options.rounds)
    advance = progress(output, steps, "kvedge bench prefill")
    with measuring(report):
        for num_threads in thread_counts:
            with pinned_to(choose_cpus(num_threads)):
                for shape, context in cases:
                    case, found = _measure_case(
                        competitors, shape, context, options.new_tokens, num_threads, conditions,
                        advance,
                    )  # fmt: skip
                    report["cases"].append(case)
                    report["notes"] += found
    report["notes"] += remarks(report["cases"])
    return report


def _measure_case(
    competitors: Sequence[Competitor],
    shape: AttentionShape,
    context: int,
    new_tokens: int,
    num_threads: int,
    conditions: Conditions,
    advance: Callable[[], None],
) -> tuple[dict[str, Any], list[str]]:
    """Measure one case: attention alone of all, and with the append of kvedge's."""
    workload = make_workload(shape, context + new_tokens, new_tokens)
    contest = enter(competitors, workload, num_threads, conditions, advance)
    try:
        alone = {entry.competitor.name: entry.competitor.run for entry in contest.entries}
        appending = {
            entry.competitor.name: entry.competitor.run_with_append
            for entry in contest.entries
            if isinstance(entry.competitor, KvedgeLayer)
        }
        samples = round_robin(
            [
                *(
                    TimedCalls(name, call, wake_seconds=conditions.wake_seconds(num_threads))
                    for name, call in (*alone.items(), *appending.items())
                ),
                *product_probes(num_threads),
            ],
            rounds=conditions.rounds,
            budget_seconds=conditions.budget_seconds,
            settle_seconds=conditions.settle_seconds(num_threads),
            after_round=advance,
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
        }, list(contest.notes)
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
    print_header(report, output)
    for (name, num_threads), cases in by_shape(report["cases"], "num_threads").items():
        threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        tokens = report["settings"]["new tokens"]
        title = f"{name}; {threads}; per layer and {tokens} new tokens"
        output.table(title, _COLUMNS, [row for case in cases for row in _rows(case)])


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
    panels = by_shape(report["cases"], "num_threads")
    for axes, ((name, num_threads), cases) in zip(
        plotting.grid(figure, len(panels)), panels.items(), strict=True
    ):
        totals = [_total(case) for case in cases]
        plotting.draw_limit(axes, totals, [product_limit(case) for case in cases], 1e3)
        plotting.draw_times(axes, cases, names, _total, 1e3)
        axes.set_xlabel("tokens, the new ones included")
        axes.set_ylabel("ms per layer")
        axes.set_title(f"{name}; {num_threads} threads", fontsize="small")
    tokens = report["settings"]["new tokens"]
    figure.suptitle(
        f"Attention of {tokens} new tokens, {report['machine']['cpu']}", fontsize="medium"
    )


def _total(case: Mapping[str, Any]) -> int:
    total: int = case["context"] + case["new_tokens"]
    return total
