#!/usr/bin/env python3
"""Measures the two errors of attention on a quantized cache, and what the formats cost in memory.

*arithmetic*  against float64 attention over the stored values, dequantized exactly: what kvedge's
              kernels add. The contract (docs/numerics.md) allows 2e-4 of the largest output.
*storage*     against float64 attention over the keys and values as they were given: what storing
              them in int8 costs, on normally distributed rows; and on such whose keys have constant
              channels besides (10 in every 16th), as some models' have.

    python bench/accuracy.py                     # the kernels kvedge chose, lengths to 32,768
    KVEDGE_ISA=avx2 python bench/accuracy.py     # others
    python bench/accuracy.py --longest 131072
    python bench/accuracy.py --precision         # arithmetic only: each path of this CPU, by
                                                 # precision_bits and the spread of the logits
    python bench/accuracy.py --worst             # arithmetic by default only: the worst of 9,450
                                                 # single rows between flat and sharp
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import kvedge

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import reference
import support

HEAD_DIMS = (1, 8, 40, 64, 80, 96, 112, 128, 256)
QUERY_GROUPS = (1, 2, 3, 4, 7, 8)
LENGTHS = (1, 15, 16, 17, 1000, 32768, 131072)
NUM_KV_HEADS = 2
SPREADS = (1, 2, 3, 4, 8, 16)  # standard deviations of logits: ordinary, to one token alone

FORMATS = {
    "int8, a scale per row": {},
    "int8, group_size=32": {"group_size": 32},
    "int8, float16 scales": {"scale_dtype": "float16"},
    'int8, key_offset="auto"': {"key_offset": "auto"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
}


def new_layer(capacity: int, *shape: int, **options: Any) -> Any:
    """An empty layer, with the options of a cache."""
    return kvedge.KVCache.with_capacity(1, *shape, capacity, **options).layer(0).copy()


def error(out: np.ndarray, exact: np.ndarray) -> float:
    """max|out - exact| as a share of max|exact|."""
    return float(np.abs(out - exact).max() / np.abs(exact).max())


def errors(
    seed: int, length: int, head_dim: int, group: int, constant: float = 0.0, **options: Any
) -> dict[str, float]:
    """Errors of one call on `length` normal tokens."""
    rng = np.random.default_rng(seed)
    keys, values = support.normal(rng, 2, length, NUM_KV_HEADS, head_dim)
    keys[..., ::16] += np.float32(constant)
    query = support.normal(rng, NUM_KV_HEADS * group, head_dim)
    layer = new_layer(length, NUM_KV_HEADS, head_dim, **options)
    layer.extend(keys, values)
    out = layer.attend(query)
    over_stored, _ = reference.attention(query, *support.stored(layer))
    as_given, _ = reference.attention(query, keys, values)
    return {
        "arithmetic": error(out, over_stored),
        "8 bits": error(layer.attend(query, precision_bits=8), over_stored),
        "16 bits": error(layer.attend(query, precision_bits=16), over_stored),
        "24 bits": error(layer.attend(query, precision_bits=24), over_stored),
        "storage": error(out, as_given),
    }


def largest(found: list[dict[str, float]]) -> dict[str, str]:
    """The largest of each kind of error, as text."""
    return {kind: f"{max(row[kind] for row in found):.1e}" for kind in found[0]}


def print_precision() -> None:
    """The table of arithmetic errors: kernels x spread of the logits x precision_bits."""
    print("| kernels | spread of the logits | by default | precision_bits=8 | 16 | 24 |")
    print("|:--|--:|--:|--:|--:|--:|")
    for isa in kvedge.isa_info()["available"]:
        if kvedge.backend == "native":
            kvedge.backends.native.select_isa(isa)
        for spread in SPREADS:
            found = [
                precision_errors(seed, head_dim, group, rows, spread)
                for seed, (head_dim, group), rows in product(
                    range(3), [(8, 3), (64, 4), (128, 2), (256, 7)], [1, 64]
                )
            ]
            worst = largest(found)
            print(f"| {isa} | {spread} | {' | '.join(worst.values())} |", flush=True)


def precision_errors(
    seed: int, head_dim: int, group: int, rows: int, spread: float
) -> dict[str, float]:
    """Arithmetic error by precision_bits, of `rows` query rows over 2,000 normal tokens."""
    rng = np.random.default_rng(seed)
    layer = support.filled(kvedge.QuantizedKvLayer, rng, 2000, NUM_KV_HEADS, head_dim)
    query = np.float32(spread) * support.normal(rng, rows, NUM_KV_HEADS * group, head_dim)
    exact, _ = reference.attention(query, *support.stored(layer))
    return {
        f"{bits} bits": error(layer.attend(query, precision_bits=bits), exact)
        for bits in (None, 8, 16, 24)
    }


def print_worst() -> None:
    """The largest arithmetic error of single rows, where 16 bits may just suffice."""
    print("| tokens | query heads per KV head, head_dim | worst | at a spread of |")
    print("|--:|--:|--:|--:|")
    shapes = ((1, 64), (4, 64), (1, 80), (1, 96), (2, 128), (4, 256))
    for length, (group, head_dim) in product((1152, 2048, 4096), shapes):
        found = []
        for seed in range(25):
            rng = np.random.default_rng(seed)
            layer = support.filled(kvedge.QuantizedKvLayer, rng, length, 1, head_dim)
            rows = support.stored(layer)
            for spread in 3 * (1, 1.5, 2, 2.5, 3, 4, 6):
                query = np.float32(spread) * support.normal(rng, 1, group, head_dim)
                exact, _ = reference.attention(query, *rows)
                found.append((error(layer.attend(query), exact), spread))
        worst, spread = max(found)
        print(f"| {length:,} | {group}, {head_dim} | {worst:.1e} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--longest", type=int, default=32768, help="tokens (default: %(default)s)")
    parser.add_argument("--precision", action="store_true", help="the table of precision_bits")
    parser.add_argument("--worst", action="store_true", help="the worst of many single rows")
    options = parser.parse_args()
    if options.worst:
        print_worst()
        return
    if options.precision:
        print_precision()
        return
    longest = options.longest
    lengths = [length for length in LENGTHS if length <= longest]
    print(f"backend {kvedge.backend}, kernels {kvedge.isa_info()['isa']}\n")

    print("| tokens | arithmetic, worst of all shapes | precision_bits=8 | 16 | 24 |")
    print("|--:|--:|--:|--:|--:|")
    for length in lengths:
        shapes = list(product(HEAD_DIMS, QUERY_GROUPS))
        if length > 1000:  # float64 attention takes its time
            shapes = [(64, 4), (128, 8), (256, 1), (8, 3)]
        worst = largest([errors(0, length, *shape) for shape in shapes])
        bits = " | ".join(worst[f"{bits} bits"] for bits in (8, 16, 24))
        print(f"| {length:,} | {worst['arithmetic']} | {bits} |", flush=True)

    print(
        "\n| format (head_dim 128) | bytes per value | against float32 | storage "
        "| storage, constant channels |\n|:--|--:|--:|--:|--:|"
    )
    for name, options in FORMATS.items():
        layer = new_layer(1000, 8, 128, **options)
        size = layer.memory_bytes / (2 * 1000 * 8 * 128)
        plain = largest([errors(seed, 1000, 128, 4, **options) for seed in range(5)])
        shifted = largest([errors(seed, 1000, 128, 4, 10, **options) for seed in range(5)])
        print(
            f"| {name} | {size:.3f} | {layer.compression_ratio:.2f}x smaller "
            f"| {plain['storage']} | {shifted['storage']} |"
        )


if __name__ == "__main__":
    main()
