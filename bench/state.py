"""``python -m bench state``: steps of states, beside torch's and the speed of memory."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.figures import copies_that_fit, timing_rows
from bench.state_steps import LAYERS, Layer, Steps, torch_version
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import pinning
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import percent, print_header
from kvedge.bench.roundrobin import TimedCalls
from kvedge.bench.runner import Run
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output
from kvedge.console.values import positive_int
from kvedge.core.options import MAX_THREADS

NAME = "state"
SUMMARY = "steps of states: gated delta nets, Mamba-2, convolutions, beside torch's"
DESCRIPTION = f"""\
Time of tokens that pass one layer's state: kvedge's DeltaState, MambaState and ConvState, the
functions of transformers where it is installed (with torch, version 5 or later), and, for a token
on one thread, one pass that reads and writes the state: the limit. States come from memory, so many
are read in turn; with --hot one stays in the processor's caches.
--dtype is of the state. Inputs of kvedge are float32; torch's are of that type, and its recurrent
states float32, as transformers keeps them.
Layers: {", ".join(LAYERS)}.
"""
EXAMPLES = """\
  python -m bench state
  python -m bench state --layer qwen3.5-0.8b --tokens 1 --hot
  python -m bench state --layer granite4-350m lfm2-350m --tokens 512 --threads 1 2
"""

_TOKENS = (1, 512)
_MEMORY = "read and written"


class _Torch:
    """What a report names."""

    name = "torch / transformers"

    def version(self) -> str:
        """Both versions."""
        return torch_version() or ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, shapes=())
    cases.add_argument(
        "--layer", nargs="+", choices=tuple(LAYERS), default=list(LAYERS), metavar="LAYER",
        help="layers of models (default: all)",
    )  # fmt: skip
    cases.add_argument(
        "--tokens", type=positive_int, nargs="+", default=list(_TOKENS), metavar="N",
        help=f"tokens per call (default: {' '.join(map(str, _TOKENS))})",
    )  # fmt: skip
    cases.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"],
        help="of the state (default: float32)",
    )  # fmt: skip
    common.add_threads(cases)
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases."""
    with_torch = torch_version() is not None
    notes = [] if with_torch else ["torch is left out: pip install 'kvedge[transformers]'"]
    threads = [n for n in common.chosen_threads(options) if n <= MAX_THREADS]
    settings = {
        "states": "hot" if options.hot else "cold",
        "rounds": options.rounds,
        "threads": ", ".join(map(str, threads)),
        "pinned": pinning(max(threads)),
    }
    layers = [LAYERS[name] for name in dict.fromkeys(options.layer)]
    cases = list(
        itertools.product(
            threads, layers, dict.fromkeys(options.dtype), sorted(set(options.tokens))
        )
    )
    peers = [_Torch()] if with_torch else []
    run = Run(NAME, options, settings, competitors=[KvedgeLayer(), *peers], notes=notes)

    def measure_case(
        threads: int, layer: Layer, dtype: str, tokens: int
    ) -> tuple[dict[str, Any], Sequence[str]]:
        size = layer.elements * (4 if dtype == "float32" else 2)
        copies = copies_that_fit(
            layer.name, size, run.machine, hot=options.hot, layouts=1 + with_torch
        )
        steps = Steps(layer, tokens, dtype, copies)
        calls = [TimedCalls("kvedge", steps.kvedge(threads), copies)]
        if tokens == 1 and threads == 1:
            calls.append(TimedCalls(_MEMORY, steps.memory(), copies))
        if with_torch:
            calls.append(TimedCalls("torch", steps.torch(), copies))
        with _torch_threads(threads, with_torch):
            samples = run.samples(calls)
        return _case(layer, dtype, tokens, threads, steps.state_bytes, calls, samples), ()

    run.show(output, len(cases), options.rounds)
    return run.over(cases, measure_case)


class _torch_threads:
    """Torch's threads are so many within, and as before afterwards."""

    def __init__(self, count: int, is_there: bool) -> None:
        self._count, self._is_there = count, is_there

    def __enter__(self) -> None:
        if self._is_there:
            import torch

            self._before = torch.get_num_threads()
            torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        if self._is_there:
            import torch

            torch.set_num_threads(self._before)


def _case(
    layer: Layer,
    dtype: str,
    tokens: int,
    threads: int,
    state_bytes: int,
    calls: Sequence[TimedCalls],
    samples: Sequence[list[float]],
) -> dict[str, Any]:
    spreads = {call.name: spread_of(seconds) for call, seconds in zip(calls, samples, strict=True)}
    limit = spreads[_MEMORY].median if _MEMORY in spreads else None
    return {
        "layer": layer.name,
        "sizes": str(layer),
        "dtype": dtype,
        "tokens": tokens,
        "num_threads": threads,
        "state_bytes": state_bytes,
        "results": [
            {
                "name": name,
                "seconds": seconds.as_json(),
                "seconds_per_token": seconds.median / tokens,
                "share_of_limit": None if limit is None else limit / seconds.median,
                "ratio_to_kvedge": seconds.median / spreads["kvedge"].median,
            }
            for name, seconds in spreads.items()
        ],
    }


_COLUMNS = (
    "state", ">tokens", ">threads", "", ">us per call", ">spread", ">us per token",
    ">of the limit", ">time / kvedge's", ">rounds",
)  # fmt: skip


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per layer."""
    print_header(report, output)
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        layers.setdefault(case["sizes"], []).append(case)
    for sizes, cases in layers.items():
        output.table(sizes, _COLUMNS, [row for case in cases for row in _rows(case)])


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    def figures(result: Mapping[str, Any]) -> Iterable[str]:
        share = result["share_of_limit"]
        return (
            f"{1e6 * result['seconds_per_token']:.3g}",
            "" if share is None else percent(share),
            f"{result['ratio_to_kvedge']:.2f}",
        )

    return timing_rows(
        case, (case["dtype"], str(case["tokens"]), str(case["num_threads"])), figures
    )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the time per token of each case as bars."""
    plotting.draw_bars(
        figure,
        report,
        "Tokens that pass a state",
        value=lambda result: 1e6 * result["seconds_per_token"],
        label="us per token",
        title=lambda case: f"{case['dtype']}, {case['tokens']} tokens",
        shape=lambda case: str(case["layer"]),
    )
