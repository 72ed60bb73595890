"""``kvedge bench index``: models with an index, where attention reads what an indexer chose."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import pinning
from kvedge.bench.copies import available_bytes, shortage
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import milliseconds, percent, plus_minus, print_header
from kvedge.bench.roundrobin import BandwidthProbe, TimedCalls
from kvedge.bench.runner import Run
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output
from kvedge.console.values import non_negative_int, positive_int
from kvedge.key_index import KeyIndex
from kvedge.layer.types import QuantizedKvLayer

NAME = "index"
SUMMARY = "models with an index: the scan, attention over its lists, dense, transformers' layer"
DESCRIPTION = """\
Time of one layer of a model with an index (docs/indexed.md), random numbers: a token behind
contexts of several lengths, and whole prompts. In turn in one run: "kvedge", KeyIndex and attention
over its lists (int8); the scan alone (KeyIndex.select), with its share of the read limit of the
index keys; kvedge's attention to all tokens (int8); and, where transformers with such models is
installed, one layer of the model with random weights in float32 (projections and a small
feed-forward included): plain, and accelerated with a KvedgeCache.
Random keys are chosen here and there, so lists are as scattered as they can be. DeepSeek V3.2 has
16 of its 128 query heads here.
"""
EXAMPLES = """\
  kvedge bench index
  kvedge bench index --shape qwen4-exp --context 8192 131072 --prompt 0 --threads 1 2
  kvedge bench index --context 8192 --prompt 8192 --peer-context 8192     # many minutes
"""

_CONTEXTS = (512, 2048, 8192, 131072)
_PROMPTS = (2048,)
_PEER_CONTEXT = 2048
_ROUNDS = 5
_INDEX_DIM = 128
_CHUNK = 4096  # random tokens appended at a time
_PLAIN, _ACCELERATED, _SCAN = "transformers", "transformers, KvedgeCache", "scan alone"


class _Shape(NamedTuple):
    """A layer with an index."""

    title: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    ratio: int
    budget: int  # tokens
    model: str  # class of transformers
    config: str
    options: dict[str, Any]


_COMMON = {
    "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1,
    "max_position_embeddings": 1 << 18, "moe_intermediate_size": 32, "num_experts_per_tok": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_SHAPES = {
    "qwen4-exp": _Shape(
        "Qwen4-Exp", 24, 2, 256, 16, 4, 2048, "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                             "partial_rotary_factor": 0.25},
         "layer_types": ["indexed_attention"], "shared_expert_intermediate_size": 32,
         "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [], "indexer_n_heads": 16,
         "indexer_kv_heads": 1, "indexer_head_dim": _INDEX_DIM, "indexer_budget": 2048,
         "indexer_compress_ratio": 4},
    ),
    "deepseek-v3.2": _Shape(
        "DeepSeek V3.2", 16, 1, 576, 64, 1, 2048, "DeepseekV32ForCausalLM", "DeepseekV32Config",
        {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "head_dim": 64, "index_topk": 2048, "index_head_dim": _INDEX_DIM, "index_n_heads": 64,
         "n_routed_experts": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "mlp_layer_types": ["dense"]},
    ),
}  # fmt: skip


class _Transformers:
    """What a report names."""

    name = "transformers"

    def version(self) -> str:
        """Of the package."""
        return importlib.metadata.version("transformers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, _CONTEXTS, shapes=())
    cases.add_argument(
        "--shape", nargs="+", choices=tuple(_SHAPES), default=list(_SHAPES), metavar="MODEL",
        help=f"{', '.join(_SHAPES)} (default: both)",
    )  # fmt: skip
    cases.add_argument(
        "--prompt", type=non_negative_int, nargs="+", default=list(_PROMPTS), metavar="N",
        help=f"tokens of prompts; 0: none (default: {' '.join(map(str, _PROMPTS))})",
    )  # fmt: skip
    cases.add_argument(
        "--peer-context", type=non_negative_int, default=_PEER_CONTEXT, metavar="N",
        help="longest context and prompt of transformers' layers, whose time grows fast; 0: "
        "without them (default: %(default)s)",
    )  # fmt: skip
    common.add_threads(cases)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rounds", type=positive_int, default=_ROUNDS, metavar="N",
        help="measurements of each competitor, taken in turn (default: %(default)s)",
    )  # fmt: skip
    how.add_argument(
        "--budget", type=common.parse_seconds, default=common.BUDGET_SECONDS, metavar="SECONDS",
        help="time after which a slow competitor gets no more rounds (default: %(default)s)",
    )  # fmt: skip
    common.add_output(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    threads, contexts = common.chosen_threads(options), common.chosen_contexts(options)
    prompts = [n for n in sorted(set(options.prompt)) if n]
    settings = {
        "rounds": options.rounds,
        "threads": ", ".join(map(str, threads)),
        "pinned": pinning(max(threads)),
    }
    shapes = [_SHAPES[name] for name in dict.fromkeys(options.shape)]
    missing = [shape.title for shape in shapes if not _has_model(shape)]
    notes = [
        f"transformers' layer of {title} is left out: pip install 'kvedge[transformers]', with "
        "a version that has the model"
        for title in missing
        if options.peer_context
    ]
    peers = [_Transformers()] if len(missing) < len(shapes) and options.peer_context else []
    run = Run(NAME, options, settings, competitors=[KvedgeLayer(), *peers], notes=notes)
    calls = [(n, 1) for n in contexts] + [(n, n) for n in prompts]
    cases = [(count, shape, *call) for count in threads for shape in shapes for call in calls]
    run.show(output, len(cases), options.rounds)
    return run.over(cases, lambda *case: _measure_case(run, *case))


def _measure_case(
    run: Run, threads: int, shape: _Shape, context: int, tokens: int
) -> tuple[dict[str, Any], Sequence[str]]:
    """Measure one case: a token behind a context, or a prompt that is all of it."""
    case = {
        "shape": shape.title, "context": context, "tokens": tokens, "num_threads": threads,
        "scan_bytes": 0, "read_bandwidth": None, "results": [],
    }  # fmt: skip
    rows = 2 * shape.num_kv_heads * shape.head_dim + _INDEX_DIM // shape.ratio  # int8
    if lack := shortage(context * rows, available_bytes(run.machine)):
        return case, [f"{shape.title}, {context:,} tokens: {lack}"]
    layer, index = _filled(shape, context)
    calls = _kvedge_calls(shape, layer, index, tokens, threads)
    if context > run.options.peer_context or not _has_model(shape):
        samples, rates = _samples(run, calls, threads)
    else:
        with _torch_threads(threads):
            calls |= _model_calls(shape, context, tokens)
            samples, rates = _samples(run, calls, threads)
    spreads = {name: spread_of(found) for name, found in zip(calls, samples, strict=True)}
    case["scan_bytes"] = index.num_keys * (_INDEX_DIM + 4)
    case["read_bandwidth"] = spread_of(rates).median
    case["results"] = [
        {
            "name": name,
            "seconds": seconds.as_json(),
            "ratio_to_kvedge": seconds.median / spreads["kvedge"].median,
        }
        for name, seconds in spreads.items()
    ]
    return case, ()


def _samples(
    run: Run, calls: Mapping[str, Callable[[int], object]], threads: int
) -> tuple[list[list[float]], list[float]]:
    """Seconds of each call, and rates at which memory is read."""
    timed = [TimedCalls(name, call) for name, call in calls.items()]
    probe = BandwidthProbe(threads, megabytes=256)
    *samples, rates = run.samples([*timed, probe], pause_seconds=0.02)
    return samples, rates


def _rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _filled(shape: _Shape, tokens: int) -> tuple[QuantizedKvLayer, KeyIndex]:
    rng = np.random.default_rng(0)
    layer = QuantizedKvLayer(tokens, shape.num_kv_heads, shape.head_dim)
    index = KeyIndex(None, _INDEX_DIM, ratio=shape.ratio)
    for start in range(0, tokens, _CHUNK):
        n = min(_CHUNK, tokens - start)
        of = (n, shape.num_kv_heads, shape.head_dim)
        layer.extend(_rows(rng, *of), _rows(rng, *of))
        index.append(_rows(rng, n, _INDEX_DIM))
    return layer, index


def _kvedge_calls(
    shape: _Shape, layer: QuantizedKvLayer, index: KeyIndex, tokens: int, threads: int
) -> dict[str, Callable[[int], object]]:
    rng = np.random.default_rng(1)
    query = _rows(rng, tokens, shape.num_heads, shape.head_dim)
    index_query = _rows(rng, tokens, shape.index_heads, _INDEX_DIM)

    def select(_: int) -> np.ndarray:
        return index.select(index_query, shape.budget // shape.ratio, num_threads=threads)

    def attend(_: int) -> np.ndarray:
        return layer.attend(query, tokens=select(0), num_threads=threads)

    def attend_all(_: int) -> np.ndarray:
        return layer.attend(query, num_threads=threads)

    return {"kvedge": attend, _SCAN: select, "kvedge, all tokens": attend_all}


# ---- transformers' layer -------------------------------------------------------------------------


def _has_model(shape: _Shape) -> bool:
    try:
        import transformers
    except ImportError:
        return False
    return hasattr(transformers, shape.model)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Torch's threads are so many within, and as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model_calls(shape: _Shape, context: int, tokens: int) -> dict[str, Callable[[int], object]]:
    """One layer of the model, plain and accelerated: a token, or a prompt."""
    import torch
    import transformers

    from kvedge.transformers import KvedgeCache, accelerate, cache_argument

    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**_COMMON, **shape.options)
    kind = getattr(transformers, shape.model)

    def call_of(attention: str, make: Callable[[], Any]) -> Callable[[int], object]:
        model = kind(config).eval().requires_grad_(False)
        model.set_attn_implementation(attention)
        if attention == "kvedge":
            accelerate(model)
        called = model.base_model

        def run(number: int, cache: Any) -> None:
            ids = torch.arange(number)[None] % config.vocab_size
            with torch.inference_mode():
                called(ids, **{cache_argument(called): cache}, use_cache=True)

        if tokens > 1:
            return lambda _: run(tokens, make())
        cache = make()
        if attention == "kvedge":
            run(context, cache)
        else:  # which takes minutes by a prompt
            probe = make()
            run(1, probe)
            _fill(cache.layers[0], probe.layers[0], context)
        return lambda _: run(1, cache)

    return {
        _PLAIN: call_of("sdpa", lambda: transformers.DynamicCache(config=config)),
        _ACCELERATED: call_of("kvedge", lambda: KvedgeCache(config)),
    }


def _fill(layer: Any, like: Any, context: int) -> None:
    """Append random rows to a cache's layer, of the shapes that `like` has."""
    import torch

    keys, values = (
        torch.randn(1, rows.shape[1], context, rows.shape[3]) for rows in (like.keys, like.values)
    )
    layer.update(keys, values)
    layer.update_indexer(torch.randn(1, context, like.indexer_keys.shape[2]))
    if like.indexer_position_ids is not None:
        shape = (len(like.indexer_position_ids), 1, context)
        layer.indexer_position_ids = torch.arange(context).expand(shape)


# ---- tables --------------------------------------------------------------------------------------

_COLUMNS = (
    "what", ">threads", "", ">ms", ">spread", ">least ms", ">time / kvedge's", ">of the read limit",
    ">rounds",
)  # fmt: skip


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per model."""
    print_header(report, output)
    shapes: dict[str, list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        shapes.setdefault(case["shape"], []).append(case)
    for shape, cases in shapes.items():
        rows = [row for case in cases for row in _table_rows(case)]
        output.table(f"{shape}; per layer", _COLUMNS, rows)


def _what(case: Mapping[str, Any]) -> str:
    if case["tokens"] > 1:
        return f"prompt of {case['tokens']:,}"
    return f"a token behind {case['context']:,}"


def _table_rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    first = [_what(case), str(case["num_threads"])]
    for result in case["results"]:
        seconds, share = result["seconds"], ""
        if result["name"] == _SCAN and case["tokens"] == 1:
            limit = case["scan_bytes"] / case["read_bandwidth"]
            share = percent(limit / seconds["median"])
        yield (
            *first,
            result["name"],
            milliseconds(seconds["median"]),
            plus_minus(seconds),
            milliseconds(seconds["minimum"]),
            f"{result['ratio_to_kvedge']:.2f}",
            share,
            str(seconds["count"]),
        )
        first = ["", ""]


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw the time of each call as a bar."""
    plotting.draw_bars(
        figure,
        report,
        "Models with an index",
        value=lambda result: 1e3 * result["seconds"]["median"],
        label="ms",
        title=_what,
        shape=lambda case: str(case["shape"]),
    )
