"""A rank with a limit on its memory: python limited_ranks.py JSON. Prints what came of it."""

from __future__ import annotations

import json
import resource
import sys

import numpy as np
from gloo_pool import join
from support import normal

from kvedge import KVCache, errors, set_num_threads
from kvedge.distributed import Placement, ShardedKVCache

HEADS, DIM, CHUNK = 8, 64, 4096
TOKENS = 200_000
BYTES = TOKENS * 2 * HEADS * (DIM + 4)  # of the context in int8


def limit_memory(more):
    """As ``ulimit -v``: so many bytes of addresses more than there are in use."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def fill_and_attend(cache):
    """A long context in chunks, and one query."""
    rng = np.random.default_rng(1)
    for start in range(0, TOKENS, CHUNK):
        n = min(CHUNK, TOKENS - start)
        cache.append(0, *normal(rng, 2, n, HEADS, DIM))
        cache.advance(n)
    return cache.attend(0, normal(rng, 4 * HEADS, DIM))


def main(told):
    rank, size = told["rank"], told["size"]
    set_num_threads(1)
    join(rank, size, told["port"])
    group = ShardedKVCache(KVCache(1, 1, 1))._share.group  # all that gloo needs is there
    np.ones((512, 512), np.float32) @ np.ones((512, 512), np.float32)  # and what OpenBLAS needs
    limit_memory(told["more"])
    placement = Placement(size)
    try:
        part = KVCache(1, HEADS, DIM, max_seq_len=placement.count(TOKENS, rank))
        out = fill_and_attend(ShardedKVCache(part, group))
    except errors.OutOfMemoryError as error:
        return {"error": str(error)}
    return {"error": None, "out": out.tolist(), "part": part.used_bytes}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
