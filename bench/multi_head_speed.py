"""Time of `MultiHeadKvCache.attend` for one token, as a share of int8's: a table by bits.

Caches are cold, one thread; the best of the rounds, in turn. ``KVEDGE_ISA`` chooses the kernels.

    python bench/multi_head_speed.py --tokens 32768 --head-dim 128 --group 4
"""

import argparse
import time

import numpy as np

import kvedge
from kvedge import KvCacheConfig, MultiHeadKvCache, QuantizedKvLayer

COLD = np.zeros(1 << 23)  # 64 MB, read between two calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8, help="key/value heads (default: 8)")
    parser.add_argument("--group", type=int, default=1, help="queries per head (default: 1)")
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    kvedge.set_num_threads(1)
    heads, dim = options.heads, options.head_dim
    names = "".join(f"{f'{bits} bits':>9}" for bits in options.bits)
    print(f"{'tokens':>7}{'int8 us':>9}{names}")
    rng = np.random.default_rng(0)
    for tokens in options.tokens:
        keys, values = (rng.standard_normal((tokens, heads, dim), np.float32) for _ in range(2))
        query = rng.standard_normal((heads * options.group, dim), np.float32)
        caches = [QuantizedKvLayer(tokens, heads, dim)]
        caches += [MultiHeadKvCache(heads, KvCacheConfig(dim, bits)) for bits in options.bits]
        for cache in caches:
            cache.extend(keys, values)
        rounds = [[seconds(cache, query) for cache in caches] for _ in range(options.rounds)]
        best = np.min(rounds, axis=0)
        ratios = "".join(f"{ratio:9.2f}" for ratio in best[1:] / best[0])
        print(f"{tokens:7}{best[0] * 1e6:9.0f}{ratios}", flush=True)


def seconds(cache: QuantizedKvLayer | MultiHeadKvCache, query: np.ndarray) -> float:
    COLD.sum()
    start = time.perf_counter()
    cache.attend(query)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
