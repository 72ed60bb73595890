"""``kvedge bench transformers``: a token of a whole model, on KvedgeCache and on others."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.report import milliseconds, plus_minus, print_header
from kvedge.bench.runner import Run
from kvedge.bench.state_models import (
    STATE_MODELS,
    draw_models,
    layers_of,
    measure_model,
    print_table,
)
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output
from kvedge.console.sizes import format_size
from kvedge.console.values import positive_int
from kvedge.core.types import Dtype
from kvedge.errors import MissingExtraError

NAME = "transformers"
SUMMARY = "tokens/s and memory of a Hugging Face model on KvedgeCache and other caches"
DESCRIPTION = """\
Time of one further token of a whole model (the shape of Qwen2.5-0.5B, random weights) after so many
tokens, with KvedgeCache and with transformers' own caches: DynamicCache (sdpa), and QuantizedCache
where quanto or HQQ is installed. Caches are filled with random keys and values, not by a prompt;
"process" is by how much the process's memory (VmRSS in /proc) grew meanwhile.
With --shape of a model whose layers have states: a prompt of so many tokens, without logits, and a
token after it; plain (DynamicCache, sdpa), with kvedge.transformers.accelerate, and that on a
KvedgeCache.
All are measured in turn. Needs: pip install 'kvedge[transformers]'.
"""
EXAMPLES = """\
  kvedge bench transformers
  kvedge bench transformers --context 1024 8192 --threads 1 --cache kvedge-int8 dynamic
  kvedge bench transformers --shape qwen3.5-0.8b --layers 4 --context 512
  kvedge bench transformers --layers 2 --context 256 --rounds 3      # seconds, to see that it runs
"""

_CONTEXTS = (1024, 8192, 32768)
_STATE_CONTEXTS = (512,)
_SHAPE = "qwen2.5-0.5b"
_LAYERS = 24
_DTYPES = ("bfloat16", "float32")
_FILL = 2048  # tokens given to a cache at a time


@dataclass(frozen=True)
class _Kind:
    """A cache that is measured."""

    attention: str
    package: str  # what it needs besides transformers; or ""
    make: Callable[[Any], Any]  # from the model's config


def _kvedge(dtype: Dtype, num_threads: int | None = None) -> Callable[[Any], Any]:
    def make(config: Any) -> Any:
        from kvedge.transformers import KvedgeCache

        return KvedgeCache(config, dtype, num_threads=num_threads)

    return make


def _dynamic(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _quantized(backend: str, bits: int) -> Callable[[Any], Any]:
    def make(config: Any) -> Any:
        from transformers import QuantizedCache

        axis = 0 if backend == "quanto" else 1
        return QuantizedCache(backend, config, nbits=bits, axis_key=axis, axis_value=axis)

    return make


_KINDS = {
    "kvedge-int8": _Kind("kvedge", "", _kvedge("int8")),
    "kvedge-int8-one-thread": _Kind("kvedge", "", _kvedge("int8", 1)),  # whatever torch has
    "kvedge-float32": _Kind("kvedge", "", _kvedge("float32")),
    "kvedge-bfloat16": _Kind("kvedge", "", _kvedge("bfloat16")),
    "dynamic": _Kind("sdpa", "", _dynamic),
    "quanto-4": _Kind("sdpa", "optimum-quanto", _quantized("quanto", 4)),
    "hqq-8": _Kind("sdpa", "hqq", _quantized("hqq", 8)),
}
_DEFAULT_KINDS = ("kvedge-int8", "dynamic", "quanto-4", "hqq-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, _CONTEXTS, shapes=())
    cases.add_argument(
        "--shape", nargs="+", choices=(_SHAPE, *STATE_MODELS), default=[_SHAPE], metavar="MODEL",
        help=f"{_SHAPE} (the default) with other caches; {', '.join(STATE_MODELS)} plain and "
        f"accelerated, where --context is by default {_STATE_CONTEXTS[0]}",
    )  # fmt: skip
    cases.add_argument(
        "--dtype", nargs="+", choices=_DTYPES, default=list(_DTYPES), help="of the model's weights"
    )
    cases.add_argument(
        "--cache", nargs="+", choices=tuple(_KINDS), default=list(_DEFAULT_KINDS), help="caches"
    )
    cases.add_argument(
        "--layers", type=positive_int, metavar="N", help="of the model (default: all)"
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--threads", type=positive_int, nargs="+", default=[1, 2], metavar="N",
        help="of torch, which kvedge follows (default: 1 2)",
    )  # fmt: skip
    common.add_rounds(how)
    common.add_output(parser)


class _Versioned:
    """A package whose version a report names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def version(self) -> str:
        """As pip says it."""
        return importlib.metadata.version(self.name)


class _Token:
    """One cache, filled; a sample is the time of one further token."""

    def __init__(
        self, name: str, model: Any, cache: Any, attention: str, grown: int | None
    ) -> None:
        import torch

        self.name = name
        self.cache = cache
        self.grown = grown  # bytes of the process, by the cache
        self._model, self._attention = model, attention
        self._token = torch.ones((1, 1), dtype=torch.long)

    def warm_up(self) -> None:
        """Run one token."""
        self.sample()

    def sample(self) -> float:
        """Seconds of the next token."""
        import torch

        from kvedge.transformers._installed import cache_argument

        self._model.set_attn_implementation(self._attention)
        with torch.inference_mode():
            start = time.perf_counter()
            self._model(self._token, **{cache_argument(self._model): self.cache})
            return time.perf_counter() - start


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases."""
    from kvedge.transformers import KvedgeCache  # noqa: F401  (says what is to be installed)

    import torch  # isort: skip

    kinds, notes = _installed(options.cache)
    packages: list[Any] = [_Versioned("torch"), _Versioned("transformers")]
    packages += [_Versioned(_KINDS[kind].package) for kind in kinds if _KINDS[kind].package]
    shapes = list(dict.fromkeys(options.shape))
    layers = {
        shape: options.layers or _LAYERS if shape == _SHAPE else layers_of(shape, options.layers)
        for shape in shapes
    }
    said = "; ".join(f"{shape}'s shape, {count} layers" for shape, count in layers.items())
    settings = {"model": said.replace(_SHAPE, "Qwen2.5-0.5B"), "rounds": options.rounds}
    contexts = common.chosen_contexts(options)
    of_states = contexts if options.context else list(_STATE_CONTEXTS)
    run = Run(NAME, options, settings, competitors=packages, notes=notes, lists=("cases", "models"))
    counts = [len(contexts) if shape == _SHAPE else 2 * len(of_states) for shape in shapes]
    run.show(output, len(options.dtype) * sum(counts) * len(options.threads), options.rounds)
    before = torch.get_num_threads()
    try:
        with run.measuring():
            for shape in shapes:
                if shape == _SHAPE:
                    _measure_caches(run, layers[shape], kinds, contexts)
                else:
                    measure_model(
                        run, shape, options.layers, options.dtype, of_states, options.threads
                    )
    finally:
        torch.set_num_threads(before)
    return run.report


def _measure_caches(run: Run, layers: int, kinds: Sequence[str], contexts: Sequence[int]) -> None:
    """Measure a token of a model on all caches."""
    import torch

    for dtype in run.options.dtype:
        model = _model(layers, dtype)
        for context in contexts:
            tokens = [_filled(kind, model, context) for kind in kinds]
            for threads in run.options.threads:
                torch.set_num_threads(threads)
                samples = run.samples(tokens, pause_seconds=0.02)
                run.report["cases"].append(_case(dtype, context, threads, tokens, samples))
            del tokens
            gc.collect()


def _installed(kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which caches can run here, and notes of those that cannot."""
    found, notes = [], []
    for kind in dict.fromkeys(kinds):
        package = _KINDS[kind].package
        try:
            if package:
                importlib.metadata.version(package)
            found.append(kind)
        except importlib.metadata.PackageNotFoundError:
            notes.append(f"{kind} is left out: pip install {package}")
    if not found:
        raise MissingExtraError("; ".join(notes))
    return found, notes


def _model(layers: int, dtype: str) -> Any:
    """Make a model of Qwen2.5-0.5B's shape with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)


def _filled(kind: str, model: Any, context: int) -> _Token:
    """Make a cache that holds `context` tokens of random keys and values."""
    import torch

    config = model.config
    gc.collect()
    before = system.process_bytes()
    cache = _KINDS[kind].make(config)
    head_dim = config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    for start in range(0, context, _FILL):
        tokens = min(_FILL, context - start)
        shape = (1, config.num_key_value_heads, tokens, head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        for layer in range(config.num_hidden_layers):
            cache.update(keys, values, layer)
    after = system.process_bytes()
    grown = None if before is None or after is None else after - before
    return _Token(kind, model, cache, _KINDS[kind].attention, grown)


def _bytes(cache: Any) -> int:
    """Memory that the tokens of a cache take."""
    if hasattr(cache, "memory_bytes"):
        return int(cache.memory_bytes)
    seen: dict[int, int] = {}

    def add(value: Any) -> None:
        if hasattr(value, "untyped_storage") and type(value).__name__ in ("Tensor", "Parameter"):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, dict):
            for item in value.values():
                add(item)
        elif hasattr(value, "__tensor_flatten__"):  # quanto
            for name in value.__tensor_flatten__()[0]:
                add(getattr(value, name))

    for layer in cache.layers:
        add([value for name, value in vars(layer).items() if name != "_sliding_window_tensor"])
    return sum(seen.values())


def _case(
    dtype: str, context: int, threads: int, tokens: Sequence[_Token], samples: Sequence[list[float]]
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for token, seconds in zip(tokens, samples, strict=True):
        spread = spread_of(seconds)
        results.append(
            {
                "name": token.name,
                "seconds": spread.as_json(),
                "tokens_per_second": 1.0 / spread.median,
                "cache_bytes": _bytes(token.cache),
                "process_bytes": token.grown,
                "note": "",
            }
        )
    first = results[0]["seconds"]["median"]
    for result in results:
        result["ratio_to_first"] = result["seconds"]["median"] / first
    return {"dtype": dtype, "context": context, "threads": threads, "results": results}


_COLUMNS = (
    "model", ">context", ">threads", "cache", ">ms per token", ">spread", ">tokens/s",
    ">time / the first's", ">cache", ">process",
)  # fmt: skip


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print machine and results."""
    print_header(report, output)
    if report["cases"]:
        rows = [row for case in report["cases"] for row in _rows(case)]
        output.table("one further token", _COLUMNS, rows)
    if report.get("models"):  # runs of before had none
        print_table(report["models"], output)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    names = [case["dtype"], str(case["context"]), str(case["threads"])]
    for result in case["results"]:
        yield (
            *names,
            result["name"],
            milliseconds(result["seconds"]["median"]),
            plus_minus(result["seconds"]),
            f"{result['tokens_per_second']:.2f}",
            f"{result['ratio_to_first']:.2f}",
            format_size(result["cache_bytes"]),
            "" if result["process_bytes"] is None else format_size(max(0, result["process_bytes"])),
        )
        names = ["", "", ""]


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw ms per token over the context, a line per cache; of models with states bars."""
    if report.get("models"):
        draw_models(report, figure)
        return
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        title = f"{case['dtype']} weights, {case['threads']} threads"
        groups.setdefault(title, []).append(case)
    for axes, cases in plotting.panels(figure, report, "A token of a model", groups):
        for number, result in enumerate(cases[0]["results"]):
            axes.plot(
                [case["context"] for case in cases],
                [1e3 * case["results"][number]["seconds"]["median"] for case in cases],
                marker="o",
                label=result["name"],
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens before", ylabel="ms per token")
