"""The benchmarks that ``kvedge bench`` offers."""

from __future__ import annotations

from typing import Any

from kvedge.bench import (
    decode,
    distributed,
    formats,
    hugging_face,
    logits,
    paged,
    prefill,
    push,
    skip,
    state,
    sweep,
    threads,
)

__all__ = ["BENCHMARKS"]

#: Modules, each a :class:`kvedge.bench.benchmark.Benchmark`.
BENCHMARKS: tuple[Any, ...] = (
    decode,
    prefill,
    formats,
    push,
    paged,
    logits,
    skip,
    state,
    threads,
    sweep,
    hugging_face,
    distributed,
)
