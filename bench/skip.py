"""``python -m bench skip``: what ``tolerance`` saves where values need not be read."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import kvedge
from bench.figures import against_first, copies_that_fit, timing_rows
from bench.model_rows import LayerRows, rows_of_model
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import percent, print_by_shape, print_header
from kvedge.bench.roundrobin import BandwidthProbe, TimedCalls
from kvedge.bench.runner import Run, settings_of
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.console.exits import CommandError
from kvedge.console.output import Output

NAME = "skip"
SUMMARY = "what tolerance= saves: values that hold next to nothing are not read"
DESCRIPTION = """\
A token's attention in all layers of a model, int8 and cold, with tolerances of 0, 1e-4 and 1e-3 in
turn in one run. Keys, values and queries are what the model makes of a text, read in windows of its
context, each from its beginning, whose keys and queries are then turned by RoPE to the positions of
one long context. Beside it normal rows of the same shape, of which nothing can be left out. The
last column is what reading all would take at this machine's read limit, over the time it took.
"""
EXAMPLES = """\
  python -m bench skip --model model.bin --text book.txt
  python -m bench skip --model model.bin --text book.txt --new-tokens 64    # a prompt
"""

_CONTEXTS = (2048, 8192, 32768)
_TOLERANCES = (0.0, 1e-4, 1e-3)
_ROWS = 8  # queries of as many last tokens, in turn
_NORMAL_LAYERS = 2
_MEGABYTES = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = parser.add_argument_group("what is measured")
    cases.add_argument(
        "--model",
        metavar="FILE",
        help="a llama2.c checkpoint or GGUF file (default: the small story writer)",
    )
    cases.add_argument("--text", metavar="FILE", help="what it reads, UTF-8 (needed with --model)")
    common.add_contexts(cases, _CONTEXTS)
    common.add_new_tokens(cases)
    common.add_threads(cases)
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    contexts = common.chosen_contexts(options)
    model, tokens = _model_and_tokens(options, max(contexts))
    if options.new_tokens > min(*contexts, model.config.max_seq_len):
        raise CommandError(f"--new-tokens {options.new_tokens}: a window or a context has fewer")
    cases = list(itertools.product(common.chosen_threads(options), contexts, ("model", "normal")))
    settings = settings_of(options, "cache", "rounds", "pinned")
    run = Run(NAME, options, settings)
    name = Path(options.model or "stories260K").stem

    def measure_case(
        num_threads: int, context: int, data: str
    ) -> tuple[dict[str, Any], Sequence[str]]:
        rows = rows_of_model(model, tokens, context, _ROWS + options.new_tokens - 1)
        rows = rows if data == "model" else _normal(rows)
        shape = AttentionShape(name, *_heads(rows[0]))
        case = {"shape": asdict(shape), "data": data, "context": context}
        return case | _measure_case(run, rows, num_threads), ()

    run.show(output, len(cases), options.rounds)
    return run.over(cases, measure_case)


def _model_and_tokens(options: argparse.Namespace, count: int) -> tuple[Any, list[int]]:
    """Load the model, and the first tokens of the text."""
    from kvedge import data, llama

    if (options.model is None) != (options.text is None):
        raise CommandError("--model and --text go together: a model, and a text for it to read")
    path = data.STORIES_MODEL if options.model is None else options.model
    model = llama.LlamaModel.from_file(path)
    if model.tokenizer is None:
        raise CommandError(f"{path} came without a tokenizer")
    text = Path(data.STORIES_TEXT if options.text is None else options.text)
    known = text.read_text(encoding="utf-8")[: 16 * count]
    tokens = model.tokenizer.encode(known)
    if options.text is None and tokens:  # the stories that come along are short
        tokens = [*tokens] * (count // len(tokens) + 1)
    return model, tokens[:count]


def _heads(rows: LayerRows) -> tuple[int, int, int]:
    return rows.queries.shape[1], rows.keys.shape[1], rows.keys.shape[2]


def _normal(like: Sequence[LayerRows]) -> list[LayerRows]:
    rng = np.random.default_rng(7)

    def normal(rows: np.ndarray) -> np.ndarray:
        return rng.standard_normal(rows.shape, np.float32)

    return [
        LayerRows(normal(layer_rows.keys), normal(layer_rows.values), normal(layer_rows.queries))
        for layer_rows in like[:_NORMAL_LAYERS]
    ]


def _measure_case(run: Run, rows: Sequence[LayerRows], num_threads: int) -> dict[str, Any]:
    """Time all layers, one after the other, with each tolerance."""
    context, num_kv_heads, head_dim = rows[0].keys.shape
    of_token = KvedgeLayer().bytes_per_token(AttentionShape("", *_heads(rows[0])))
    size = int(len(rows) * context * of_token)
    copies = copies_that_fit(f"{context:,} tokens", size, run.machine, hot=run.options.hot)
    layers = []
    for _ in range(copies):
        layers.append([kvedge.QuantizedKvLayer(context, num_kv_heads, head_dim) for _ in rows])
        for layer, layer_rows in zip(layers[-1], rows, strict=True):
            layer.extend(layer_rows.keys, layer_rows.values)
    n = run.options.new_tokens
    queries = [
        [
            np.ascontiguousarray(
                layer_rows.queries[at] if n == 1 else layer_rows.queries[at : at + n]
            )
            for layer_rows in rows
        ]
        for at in range(_ROWS)
    ]

    def call_with(tolerance: float) -> Callable[[int], object]:
        turn = 0

        def call(copy: int) -> None:
            nonlocal turn
            turn += 1
            asked = queries[turn % _ROWS]
            for layer, query in zip(layers[copy], asked, strict=True):
                layer.attend(query, num_threads=num_threads, tolerance=tolerance)

        return call

    dropped = []
    for tolerance in _TOLERANCES:
        before = kvedge.tolerance_counts()
        for _ in range(_ROWS):
            call_with(tolerance)(0)
        seen, left_out = (b - a for a, b in zip(before, kvedge.tolerance_counts(), strict=True))
        dropped.append(left_out / seen if seen else 0.0)
    calls = [
        TimedCalls(f"{tolerance:g}" if tolerance else "dense", call_with(tolerance), copies)
        for tolerance in _TOLERANCES
    ]
    probe = BandwidthProbe(num_threads, _MEGABYTES)
    *samples, speeds = run.samples([*calls, probe])
    speed = spread_of(speeds).median
    results = against_first([call.name for call in calls], samples, "ratio_to_dense")
    for result, share in zip(results, dropped, strict=True):
        result["dropped"] = share
        result["bytes"] = size * (1 - share / 2)
        result["share_of_read_limit"] = size / speed / result["seconds"]["median"]
    return {
        "layers": len(rows),
        "new_tokens": n,
        "num_threads": num_threads,
        "read_bytes_per_second": speed,
        "results": results,
    }


_COLUMNS = (
    ">context",
    "data",
    ">new tokens",
    ">threads",
    "tolerance",
    ">us per layer",
    ">spread",
    ">time / dense",
    ">blocks dropped",
    ">MB read",
    ">of the read limit",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape."""
    print_header(report, output)
    print_by_shape(report, output, report["settings"]["cache"], _COLUMNS, _rows)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    numbers = (
        f"{case['context']:,}",
        case["data"],
        str(case["new_tokens"]),
        str(case["num_threads"]),
    )

    def figures(result: Mapping[str, Any]) -> Iterable[str]:
        return (
            f"{result['ratio_to_dense']:.2f}",
            percent(result["dropped"]),
            f"{result['bytes'] / case['layers'] / 1e6:.2f}",
            percent(result["share_of_read_limit"]),
        )

    return timing_rows(_per_layer(case), numbers, figures)


def _per_layer(case: Mapping[str, Any]) -> dict[str, Any]:
    """The case with seconds of one layer, in the mean."""
    results = [
        result
        | {"seconds": result["seconds"] | {"median": result["seconds"]["median"] / case["layers"]}}
        for result in case["results"]
    ]
    return {**case, "results": results}


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the time with each tolerance as bars."""
    plotting.draw_bars(
        figure,
        report,
        "tolerance",
        value=lambda result: result["ratio_to_dense"],
        label="time / dense",
        title=lambda case: f"{case['context']:,} tokens, {case['data']} rows",
    )
