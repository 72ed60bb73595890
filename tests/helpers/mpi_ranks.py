"""Ranks of an MPI job: mpiexec -n N python mpi_ranks.py FOLDER. Prints JSON from rank 0."""

from __future__ import annotations

import json
import sys

import numpy as np
from gloo_work import DIM, HEADS, LAYERS, decode, feed
from mpi4py import MPI

from kvedge import KVCache
from kvedge.distributed import MpiGroup, ShardedKVCache


def main(folder):
    world = MPI.COMM_WORLD
    cache = ShardedKVCache(KVCache(LAYERS, HEADS, DIM), world, block_size=16, timeout=30)
    feed(cache, 1, 100)
    cache.save(folder)
    outs = [decode(cache, 2, 5), decode(ShardedKVCache.load(folder, world), 2, 5)]
    group = MpiGroup(world, timeout=30)
    own = np.full(9, 10 + group.rank, np.uint8)
    told = [group.all_gather(own).tolist(), group.broadcast(own, group.size - 1).tolist()]
    every = world.gather([out.tobytes().hex() for out in outs])
    if world.rank == 0:
        same = len({text for rank in every for text in rank}) == 1
        found = {"ranks": world.size, "same": same, "told": told, "out": outs[0].tolist()}
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
