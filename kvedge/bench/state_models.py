"""Models whose layers have states, for ``kvedge bench transformers``: plain, and accelerated."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvedge.bench import plotting
from kvedge.bench.report import milliseconds, plus_minus
from kvedge.bench.runner import Run
from kvedge.bench.statistics import spread_of
from kvedge.console.output import Output

__all__ = ["STATE_MODELS", "draw_models", "layers_of", "measure_model", "print_table"]

# What is measured: whether layers are accelerated, the implementation of attention.
_KINDS = {
    "plain": (False, "sdpa"),
    "accelerated": (True, "sdpa"),
    "accelerated, KvedgeCache": (True, "kvedge"),
}


def _qwen(layers: int | None) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM, Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers or 24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
    )


def _granite(layers: int | None) -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    # attention in 4 layers of 32: in the last of the first four, where there are no more
    kinds = ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(layers or 32)]
    if "attention" not in kinds:
        kinds[-1] = "attention"
    return GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=768,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_hidden_layers=len(kinds),
        num_attention_heads=12,
        num_key_value_heads=4,
        layer_types=kinds,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        tie_word_embeddings=True,
    )


def _lfm(layers: int | None) -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    attention = (2, 5, 8, 10, 12, 14)
    count = layers or 16
    return Lfm2ForCausalLM, Lfm2Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=count,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if i in attention else "conv" for i in range(count)],
        conv_L_cache=3,
        tie_word_embeddings=True,
    )


#: The class and the config of a model of so many layers; None: all of them.
STATE_MODELS: dict[str, Callable[[int | None], Any]] = {
    "qwen3.5-0.8b": _qwen,
    "granite4-350m": _granite,
    "lfm2-350m": _lfm,
}


def layers_of(shape: str, layers: int | None) -> int:
    """How many layers a model of a shape gets."""
    return int(STATE_MODELS[shape](layers)[1].num_hidden_layers)


class _Call:
    """A model, plain or accelerated; a sample is the time of a prompt, or of one more token."""

    def __init__(self, name: str, model: Any, context: int, is_token: bool) -> None:
        import torch

        self.name = name
        self._accelerated, self._attention = _KINDS[name]
        self._model, self._is_token = model, is_token
        self._prompt = torch.arange(1, context + 1)[None] % model.config.vocab_size
        self._cache: Any = None

    def warm_up(self) -> None:
        """Read the prompt, and one token after it."""
        self._timed(self._prompt, self._new_cache())
        self.sample()

    def _new_cache(self) -> Any:
        if self._attention == "kvedge":
            from kvedge.transformers import KvedgeCache

            self._cache = KvedgeCache(self._model.config)
        else:
            from transformers import DynamicCache

            self._cache = DynamicCache(config=self._model.config)
        return self._cache

    def sample(self) -> float:
        """Seconds of one call of the model."""
        if self._is_token:
            return self._timed(self._prompt[:, :1], self._cache)
        return self._timed(self._prompt, self._new_cache())

    def _timed(self, ids: Any, cache: Any) -> float:
        import torch

        from kvedge.transformers import accelerate, cache_argument

        model = self._model
        model.set_attn_implementation(self._attention)
        acceleration = accelerate(model) if self._accelerated else None
        # A prompt without logits: torch 2.13 takes seconds for those of its last token in bfloat16.
        called = model if ids.shape[1] == 1 else model.base_model
        options = {cache_argument(model): cache, "use_cache": True}
        try:
            with torch.inference_mode():
                start = time.perf_counter()
                called(ids, **options)
                return time.perf_counter() - start
        finally:
            if acceleration is not None:
                acceleration.restore()


def measure_model(
    run: Run,
    shape: str,
    layers: int | None,
    dtypes: Iterable[str],
    contexts: Iterable[int],
    threads: Sequence[int],
) -> None:
    """Measure prompts, and tokens after them, of a model with random weights."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # torch's functions tell that they are slow
    kind, config = STATE_MODELS[shape](layers)
    for dtype in dtypes:
        torch.manual_seed(0)
        model = kind(config).to(getattr(torch, dtype)).eval().requires_grad_(False)
        for context in contexts:
            for is_token in (True, False):
                calls = [_Call(name, model, context, is_token) for name in _KINDS]
                for count in threads:
                    torch.set_num_threads(count)
                    samples = run.samples(calls, pause_seconds=0.02)
                    run.report["models"].append(
                        _case(shape, dtype, context, 1 if is_token else context, count, samples)
                    )
        del model, calls
        gc.collect()


def _case(
    shape: str, dtype: str, context: int, tokens: int, threads: int, samples: Sequence[list[float]]
) -> dict[str, Any]:
    spreads = [spread_of(seconds) for seconds in samples]
    return {
        "shape": shape,
        "dtype": dtype,
        "context": context,
        "tokens": tokens,
        "threads": threads,
        "results": [
            {
                "name": name,
                "seconds": spread.as_json(),
                "tokens_per_second": tokens / spread.median,
                "speed_of_plain": spreads[0].median / spread.median,
            }
            for name, spread in zip(_KINDS, spreads, strict=True)
        ],
    }


_COLUMNS = (
    "model", "weights", "what", ">threads", "", ">ms", ">spread", ">tokens/s", ">times plain's",
)  # fmt: skip


def print_table(models: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Print what was measured of models with states."""
    rows = [row for case in models for row in _rows(case)]
    output.table("prompts, and a token after one", _COLUMNS, rows)


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    tokens = case["tokens"]
    what = f"prompt of {tokens}" if tokens > 1 else f"a token after {case['context']}"
    names = [case["shape"], case["dtype"], what, str(case["threads"])]
    for result in case["results"]:
        yield (
            *names,
            result["name"],
            milliseconds(result["seconds"]["median"]),
            plus_minus(result["seconds"]),
            f"{result['tokens_per_second']:.2f}",
            f"{result['speed_of_plain']:.2f}",
        )
        names = ["", "", "", ""]


def draw_models(report: Mapping[str, Any], figure: Any) -> None:
    """Draw the time of each call as a bar."""
    plotting.draw_bars(
        figure,
        {**report, "cases": report["models"]},
        "Models whose layers have states",
        value=lambda result: 1e3 * result["seconds"]["median"],
        label="ms",
        title=lambda case: f"{case['dtype']}, {case['tokens']} tokens, {case['threads']} threads",
        shape=lambda case: str(case["shape"]),
    )
