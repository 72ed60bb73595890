#!/usr/bin/env python3
"""Times two builds of kvedge in turn, on every kernel path of this CPU: old/new time per shape.

    make ab OLD=COMMIT            builds COMMIT in build/ab, and compares it with this checkout
    python bench/ab.py OLD_PYTHON NEW_PYTHON [--isa avx2] [--shapes llama,kivi8] [--asks 12]

OLD_PYTHON and NEW_PYTHON are interpreters with a kvedge of their own. A shared machine has slow
moments, when a neighbour computes on the same core. So each side is asked many times in turn, and
its shortest time counts; a shape below the floor is asked again, twice at most, before it is
reported. Two pairs of processes, since where pages lie matters, too.

Cold: layers rotate through 272 MiB, as a model's do. Hot: one layer again and again. One thread.
Exit code 1: a shape is below the floor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COLD_BYTES = 272 << 20
MOST_LAYERS = 12


@dataclass(frozen=True)
class Shape:
    """One measurement: query heads, KV heads and head_dim of a layer, and its tokens."""

    heads: int
    kv_heads: int
    dim: int
    tokens: int
    rows: int = 1  # query rows: more than one is a prompt
    hot: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of KVCache


LLAMA, QWEN3, PHI3 = (32, 8, 64), (16, 8, 128), (32, 32, 96)
SHAPES = {
    "llama": Shape(*LLAMA, 32768),
    "qwen2.5": Shape(14, 2, 64, 32768),
    "qwen3": Shape(*QWEN3, 32768),
    "phi3": Shape(*PHI3, 8192),
    "gemma": Shape(4, 1, 256, 32768),
    "short": Shape(*LLAMA, 512),
    "odd-40": Shape(10, 2, 40, 9001),
    "odd-72": Shape(20, 4, 72, 9001),
    "odd-112": Shape(12, 2, 112, 9001),
    "odd-192": Shape(12, 1, 192, 9001),
    "prompt": Shape(*LLAMA, 2560, rows=512),
    "hot-llama": Shape(*LLAMA, 512, hot=True),
    "hot-qwen3": Shape(*QWEN3, 512, hot=True),
    "hot-phi3": Shape(*PHI3, 512, hot=True),
    "hot-qwen2.5": Shape(14, 2, 64, 512, hot=True),
    "hot-16": Shape(*LLAMA, 16, hot=True),
    "2k-llama": Shape(*LLAMA, 2048, hot=True),
    "2k-qwen3": Shape(*QWEN3, 2048, hot=True),
}
FORMATS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "groups-32": {"group_size": 32},
    "int4": {"dtype": "int4"},
    "kivi8": {"dtype": "kivi8"},
    "kivi8+int8": {"dtype": "kivi8", "value_dtype": "int8"},
    "kivi4": {"dtype": "kivi4", "recent": 96},
    "int8+kivi4": {"dtype": "int8", "value_dtype": "kivi4"},
    "kivi2": {"dtype": "kivi2"},
}
SHAPES |= {name: Shape(*LLAMA, 16384, options=options) for name, options in FORMATS.items()}


# ---- One side: a process that times what it is told on its standard input --------------------


def make_layers(shape: Shape) -> list[Any]:
    """As many equal layers as a cold rotation wants; one where the shape is hot or a prompt."""
    from kvedge import KVCache

    rows = np.random.default_rng(0).standard_normal(
        (shape.tokens, shape.kv_heads, shape.dim), dtype=np.float32
    )
    layers: list[Any] = []
    while True:
        cache = KVCache(1, shape.kv_heads, shape.dim, max_seq_len=shape.tokens, **shape.options)
        cache.append(0, rows, rows)
        layers.append(cache.layer(0))
        num_bytes = len(layers) * cache.memory_bytes
        if shape.hot or shape.rows > 1 or num_bytes > COLD_BYTES or len(layers) == MOST_LAYERS:
            return layers


def serve() -> None:
    """Answer each name of a shape with the seconds of one call; keep only the last one's layers."""
    shape_name: str | None = None
    layers: list[Any] = []
    for line in sys.stdin:
        name = line.strip()
        shape = SHAPES[name]
        if name != shape_name:
            layers.clear()
            layers, shape_name = make_layers(shape), name
        query = np.random.default_rng(1).standard_normal(
            (shape.rows, shape.heads, shape.dim), dtype=np.float32
        )
        times = []
        for layer in layers * (25 if shape.hot else 1):
            start = time.perf_counter()
            layer.attend(query if shape.rows > 1 else query[0], num_threads=1)
            times.append(time.perf_counter() - start)
        # One of the shortest: the shortest of all is now and then a trick of the clock.
        print(sorted(times)[len(times) // 8], flush=True)


# ---- The two sides in turn --------------------------------------------------------------------


class Side:
    """A process of one build on one kernel path."""

    def __init__(self, python: str, isa: str) -> None:
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",  # not a checkout, whose kvedge would be imported
            env=os.environ | {"KVEDGE_ISA": isa},
        )

    def ask(self, name: str) -> float:
        """Seconds of a call; SystemExit if the process ended, as where a build lacks a format."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"ab.py: {self.process.args} failed at {name}")
        return float(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def compare(old: str, new: str, isa: str, names: list[str], asks: int) -> dict[str, float]:
    """old/new of the shortest times, {shape: ratio}."""
    least = {name: [float("inf"), float("inf")] for name in names}
    for turn in range(2):
        sides = [Side(python, isa) for python in (old, new)]
        for name in names:
            for i in range(asks):
                for which in (0, 1) if (i + turn) % 2 else (1, 0):
                    least[name][which] = min(least[name][which], sides[which].ask(name))
        for side in sides:
            side.close()
    return {name: before / after for name, (before, after) in least.items()}


def paths_of(python: str) -> list[str]:
    """Kernel paths that this CPU runs, the best one first."""
    ask = "import kvedge; print(*kvedge.isa_info()['available'])"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, cwd="/")
    return [path for path in found.stdout.split() if path != "scalar"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?")
    parser.add_argument("new", nargs="?", default=sys.executable)
    parser.add_argument("--isa", help="paths, by commas (default: all of this CPU but scalar)")
    parser.add_argument("--shapes", help="by commas, of: " + " ".join(SHAPES))
    parser.add_argument("--asks", type=int, default=10)
    parser.add_argument("--floor", type=float, default=0.97)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    if not args.old:
        parser.error("whose kvedge is the old one?")
    names = args.shapes.split(",") if args.shapes else list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no such shapes: {' '.join(unknown)}; there are {' '.join(SHAPES)}")
    slower = []
    for isa in args.isa.split(",") if args.isa else paths_of(args.new):
        ratios = compare(args.old, args.new, isa, names, args.asks)
        for _ in range(2):
            if again := [name for name in names if ratios[name] < args.floor]:
                second = compare(args.old, args.new, isa, again, args.asks)
                ratios |= {name: max(ratios[name], second[name]) for name in again}
        for name in names:
            note = "  slower" if ratios[name] < args.floor else ""
            print(f"{isa:12s} {name:12s} old/new {ratios[name]:.2f}{note}", flush=True)
        slower += [f"{isa} {name}" for name in names if ratios[name] < args.floor]
    print(f"below {args.floor}:", *(slower or ["none"]), sep=" ")
    raise SystemExit(bool(slower))


if __name__ == "__main__":
    main()
