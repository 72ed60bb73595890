"""A rank of a group that loses one in the middle of a step: python losing_ranks.py JSON.

Prints, as JSON, what a rank that survives has noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys

import numpy as np
from gloo_pool import join
from gloo_work import DIM, HEADS, LAYERS, decode, feed, other_rows
from support import normal

from kvedge import KVCache, errors
from kvedge.cache.cache import state_of
from kvedge.distributed import ShardedKVCache

STEP = 4  # the one that breaks off
SIGNALS = {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}


def digest(part, length):
    """Of the bytes of a part's first tokens."""
    sha256 = hashlib.sha256()
    for layer in state_of(part).contents(length).layers:
        for array in layer.arrays:
            sha256.update(array.tobytes())
    return sha256.hexdigest()


def main(told):
    rank, lost = told["rank"], told["lost"]
    join(rank, told["size"], told["port"])
    if told["how"] == "rows":
        return dict(zip(("error", "message"), other_rows(None), strict=True))
    part = KVCache(LAYERS, HEADS, DIM)
    cache = ShardedKVCache(part, block_size=16, timeout=told["timeout"])
    feed(cache, 1, 100)
    cache.save(told["folder"])
    decode(cache, 2, STEP)
    before = digest(part, len(part))
    query = normal(np.random.default_rng(3), 2 * HEADS, DIM)
    try:
        for layer in range(LAYERS):
            cache.append(layer, query[:HEADS], query[HEADS:])
            if rank == lost and layer == 1:  # in the middle of a step
                os.kill(os.getpid(), SIGNALS[told["how"]])
            cache.attend(layer, query)
        cache.advance()
    except errors.RankLostError as error:
        found = {"error": str(error), "rank": error.rank}
    else:
        return {"error": None}
    try:
        cache.attend(0, query)
    except errors.RankLostError as error:
        found["again"] = str(error)
    cache.truncate(len(cache))  # the step's pending tokens
    found["unharmed"] = digest(part, len(part)) == before
    # The part is still a cache that can be read and kept.
    part.save(os.path.join(told["folder"], f"rest-{rank}"))
    found["kept"] = len(KVCache.load(os.path.join(told["folder"], f"rest-{rank}"))) == len(part)
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
