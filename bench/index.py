"""Measures models with an index: the scan, attention over its lists, and dense attention, in turn.

python bench/index.py [--context 8192 131072] [--prompt 8192] [--threads 1 2] [--rounds 7]

Times are of one layer, the smallest and the median of the rounds. Keys, values and queries are
random; so lists are as scattered as they can be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import kvedge
from kvedge import system

_CHUNK = 4096


class Shape(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    ratio: int
    budget: int  # tokens


SHAPES = [
    Shape("Qwen4-Exp", 24, 2, 256, 16, 4, 2048),
    Shape("DeepSeek V3.2", 16, 1, 576, 64, 1, 2048),
]


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def filled(shape: Shape, tokens: int) -> tuple[kvedge.QuantizedKvLayer, kvedge.KeyIndex]:
    rng = np.random.default_rng(0)
    layer = kvedge.QuantizedKvLayer(tokens, shape.num_kv_heads, shape.head_dim)
    index = kvedge.KeyIndex(tokens, 128, ratio=shape.ratio)
    for start in range(0, tokens, _CHUNK):
        n = min(_CHUNK, tokens - start)
        of = (n, shape.num_kv_heads, shape.head_dim)
        layer.extend(rows(rng, *of), rows(rng, *of))
        index.append(rows(rng, n, 128))
    return layer, index


def show(shape: Shape, tokens: int, new: int, threads: int, rounds: int) -> None:
    layer, index = filled(shape, tokens)
    rng = np.random.default_rng(1)
    query = rows(rng, new, shape.num_heads, shape.head_dim)
    index_query, k = rows(rng, new, shape.index_heads, 128), shape.budget // shape.ratio
    lists = index.select(index_query, k)
    calls: dict[str, Callable[[], object]] = {
        "select": lambda: index.select(index_query, k, num_threads=threads),
        "lists": lambda: layer.attend(query, tokens=lists, num_threads=threads),
        "dense": lambda: layer.attend(query, num_threads=threads),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    figures = " | ".join(f"{min(of):.3g} ({statistics.median(of):.3g})" for of in times.values())
    print(f"| {shape.name} | {tokens:,} | {new:,} | {threads} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, nargs="*", default=[8192, 131072])
    parser.add_argument("--prompt", type=int, default=8192, help="its tokens; 0: none")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    print(f"{system.machine().cpu}, {kvedge.isa_info()['isa']}, ms of a layer, least (median)\n")
    print("| shape | tokens | new | threads | select | lists | dense int8 |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        for threads in options.threads:
            for tokens in options.context:
                show(shape, tokens, 1, threads, options.rounds)
            if options.prompt:
                show(shape, options.prompt, options.prompt, threads, min(2, options.rounds))


if __name__ == "__main__":
    main()
