"""The benchmarks that ``kvedge bench`` offers."""

from __future__ import annotations

from typing import Any

from kvedge.bench import decode, hugging_face, index, prefill, threads

__all__ = ["BENCHMARKS"]

#: Modules, each a :class:`kvedge.bench.benchmark.Benchmark`. ``python -m bench`` adds its own.
BENCHMARKS: list[Any] = [decode, prefill, threads, hugging_face, index]
