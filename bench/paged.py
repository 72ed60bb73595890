"""``python -m bench paged``: attention over blocks, against the same tokens in one piece."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvedge
from bench.figures import against_first, copies_that_fit, timing_rows
from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.peers import filled_layers
from kvedge.bench.report import print_by_shape, print_header
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run, all_cases, settings_of
from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.bench.workload import Workload, make_workload
from kvedge.console.exits import CommandError
from kvedge.console.output import Output
from kvedge.console.values import positive_int
from kvedge.core.config import layer_config
from kvedge.core.formats import DTYPES, IN_RUNS, format_of
from kvedge.core.kivi import RUN
from kvedge.core.memory import token_bytes
from kvedge.core.types import Dtype

NAME = "paged"
SUMMARY = "sequences in blocks of a pool, against the same tokens in one piece"
DESCRIPTION = """\
Decode attention over the same tokens and bytes, laid out in several ways: one layer in one piece;
one sequence in blocks that lie in order, and in blocks that lie in disorder; and a batch of shorter
sequences in one call, likewise. Scales, where a format has them, are float16.
"""
EXAMPLES = """\
  python -m bench paged
  python -m bench paged --context 8192 --block-size 16 32 64 --batch 4
  python -m bench paged --dtype kivi4 --shape Phi-3-mini
"""

_CONTEXT = 32768
_BLOCK = 16
_SEED = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, (_CONTEXT,), SHAPES[:1])
    cases.add_argument(
        "--block-size",
        type=positive_int,
        nargs="+",
        action="extend",
        metavar="N",
        help="tokens of a block (default: 16; of runs 32, and multiples of it)",
    )
    cases.add_argument(
        "--dtype",
        choices=DTYPES,
        default="int8",
        metavar="FORMAT",
        help=f"storage format: {', '.join(DTYPES)} (default: %(default)s)",
    )
    cases.add_argument(
        "--batch",
        type=positive_int,
        default=8,
        metavar="N",
        help="sequences that the context is divided into (default: %(default)s)",
    )
    common.add_threads(cases)
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    step = RUN if options.dtype in IN_RUNS else 1
    sizes = sorted(set(options.block_size or [max(_BLOCK, step)]))
    if odd := [size for size in sizes if size % step]:
        raise CommandError(
            f"blocks of {options.dtype} are of multiples of {step} tokens, not {odd[0]}"
        )
    cases = all_cases(options, sizes)
    settings = settings_of(options, "cache", "rounds", "pinned") | {"format": options.dtype}
    run = Run(NAME, options, settings)

    def measure_case(
        num_threads: int, shape: AttentionShape, context: int, block_size: int
    ) -> tuple[dict[str, Any], Sequence[str]]:
        if context < options.batch:
            raise CommandError(f"{context} tokens are too few for {options.batch}")
        layouts = _layouts(
            make_workload(shape, context),
            _Numbers(block_size, options.batch, num_threads, options.dtype),
            run.machine,
            hot=options.hot,
        )
        case = {
            "shape": asdict(shape),
            "context": context,
            "block_size": block_size,
            "batch": options.batch,
            "num_threads": num_threads,
            "bytes": context * _bytes_per_token(shape, options.dtype),
        }
        names, samples = [layout.name for layout in layouts], run.samples(layouts)
        return case | {"results": _results(names, samples, case)}, ()

    run.show(output, len(cases), options.rounds)
    return run.over(cases, measure_case)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a case."""

    block_size: int
    batch: int
    num_threads: int
    dtype: Dtype


def _scales(dtype: Dtype) -> dict[str, Any]:
    """The options of a layer, or a pool, of a format."""
    return {"scale_dtype": "float16"} if format_of(dtype).has_scales else {}


def _bytes_per_token(shape: AttentionShape, dtype: Dtype) -> int:
    return token_bytes(layer_config(dtype, 1, shape.num_kv_heads, shape.head_dim, **_scales(dtype)))


def _layouts(
    workload: Workload, numbers: _Numbers, machine: system.Machine, *, hot: bool
) -> list[TimedCalls]:
    """The same tokens in every layout, ready to be attended to."""
    size = workload.context * _bytes_per_token(workload.shape, numbers.dtype)
    case = f"{workload.shape}, {workload.context} tokens"
    copies = copies_that_fit(case, size, machine, hot=hot, layouts=5)
    calls = {
        "in one piece": _one_piece(workload, numbers, copies),
        "blocks in order": _blocks(workload, numbers, copies, 1, shuffled=False),
        "blocks in disorder": _blocks(workload, numbers, copies, 1, shuffled=True),
    }
    if numbers.batch > 1:
        name = f"batch of {numbers.batch}"
        for order, shuffled in ((" in order", False), (" in disorder", True)):
            call = _blocks(workload, numbers, copies, numbers.batch, shuffled=shuffled)
            calls[name + order] = call
    return [TimedCalls(name, call, copies) for name, call in calls.items()]


def _one_piece(workload: Workload, numbers: _Numbers, copies: int) -> Callable[[int], object]:
    layers = filled_layers(workload, copies, numbers.dtype, **_scales(numbers.dtype))
    out = np.empty_like(workload.query)
    threads = numbers.num_threads
    return lambda copy: layers[copy].attend(workload.query, out=out, num_threads=threads)


def _blocks(
    workload: Workload, numbers: _Numbers, copies: int, batch: int, *, shuffled: bool
) -> Callable[[int], object]:
    shape = workload.shape
    of_sequence = workload.context // batch
    num_blocks = batch * -(-of_sequence // numbers.block_size)
    rng = np.random.default_rng(_SEED)
    filled = []
    for _ in range(copies):
        pool = kvedge.KvBlockPool(
            num_blocks,
            numbers.block_size,
            1,
            shape.num_kv_heads,
            shape.head_dim,
            numbers.dtype,
            **_scales(numbers.dtype),
        )
        if shuffled:
            pool.free(rng.permutation(pool.allocate(num_blocks)))
        cache = kvedge.PagedKvCache(pool)
        seqs = [cache.new_sequence() for _ in range(batch)]
        for i, seq in enumerate(seqs):
            part = slice(i * of_sequence, (i + 1) * of_sequence)
            cache.append(seq, 0, workload.keys[part], workload.values[part])
        filled.append((cache, seqs))
    queries = np.stack([workload.query] * batch)
    out = np.empty_like(queries)

    def call(copy: int) -> object:
        cache, seqs = filled[copy]
        return cache.attend_batch(seqs, 0, queries, out=out, num_threads=numbers.num_threads)

    return call


def _results(
    names: Sequence[str], samples: Sequence[list[float]], case: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return [
        result | {"bytes_per_second": case["bytes"] / result["seconds"]["median"]}
        for result in against_first(names, samples, "ratio_to_one_piece")
    ]


_COLUMNS = (
    ">context",
    ">block",
    ">threads",
    "",
    ">us per call",
    ">spread",
    ">GB/s",
    ">time / in one piece",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape."""
    print_header(report, output)
    print_by_shape(report, output, report["settings"]["cache"], _COLUMNS, _rows)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    numbers = (f"{case['context']:,}", str(case["block_size"]), str(case["num_threads"]))
    return timing_rows(
        case,
        numbers,
        lambda result: (
            f"{result['bytes_per_second'] / 1e9:.2f}",
            f"{result['ratio_to_one_piece']:.2f}",
        ),
    )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the GB/s of each case as bars."""
    plotting.draw_bars(
        figure,
        report,
        "Attention over blocks",
        value=lambda result: result["bytes_per_second"] / 1e9,
        label="GB/s",
        title=lambda case: f"{case['context']:,} tokens, {case['num_threads']} threads",
    )
