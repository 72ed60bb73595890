"""Time of a token's attention in formats with options, against float16: a layer, cold, one thread.

    KVEDGE_ISA=avx2 python bench/format_times.py
    python bench/format_times.py --shape Qwen2.5-0.5B --formats int8 kivi4:recent=96

A format is named as for `kvedge eval`. Layers of each rotate through more than caches hold, formats
in turn; of a format's times the one is shown that an eighth of them fall below.
"""

import argparse
import time

import numpy as np

import kvedge
from kvedge import KVCache
from kvedge.bench.shapes import SHAPES
from kvedge.evaluation import parse_choices

COLD_BYTES, MOST_LAYERS = 272 << 20, 8
FORMATS = ["auto", "small", "bfloat16", "int8"]


def layers_of(choice, shape, rows):
    """As many equal layers as a cold rotation wants."""
    layers, num_bytes = [], 0
    while num_bytes < COLD_BYTES and len(layers) < MOST_LAYERS:
        cache = KVCache(
            1, shape.num_kv_heads, shape.head_dim,
            max_seq_len=len(rows), dtype=choice.dtype, **choice.cache_options,
        )  # fmt: skip
        cache.append(0, rows, rows)
        layers.append(cache.layer(0))
        num_bytes += cache.memory_bytes
    return layers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[known.name for known in SHAPES], default="Llama-3.2-1B")
    parser.add_argument("--context", type=int, default=32768, help="tokens")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--asks", type=int, default=5, help="turns of each")
    options = parser.parse_args()
    shape = next(known for known in SHAPES if known.name == options.shape)
    rng = np.random.default_rng(0)
    size = (options.context, shape.num_kv_heads, shape.head_dim)
    rows = rng.standard_normal(size, dtype=np.float32)
    query = rng.standard_normal((shape.num_heads, shape.head_dim), dtype=np.float32)
    choices = parse_choices(["float16", *options.formats])
    layers_of_choice = {choice.name: layers_of(choice, shape, rows) for choice in choices}
    times = {name: [] for name in layers_of_choice}
    for _ in range(options.asks):
        for name, layers in layers_of_choice.items():
            for layer in layers:
                start = time.perf_counter()
                layer.attend(query, num_threads=1)
                times[name].append(time.perf_counter() - start)
    least = {name: sorted(own)[len(own) // 8] for name, own in times.items()}
    of_float16 = least["float16"]
    print(f"{shape}, {options.context} tokens, {kvedge.isa_info()['isa']}")
    for name, seconds in least.items():
        print(f"{name:32} {1e3 * seconds:8.2f} ms  {seconds / of_float16:.2f}")


if __name__ == "__main__":
    main()
