"""What tests of contexts over gloo let each rank do: see gloo_pool."""

from __future__ import annotations

import numpy as np
from support import normal

from kvedge import KVCache, errors
from kvedge.distributed import ShardedKVCache, TorchGroup

LAYERS, HEADS, DIM = 2, 2, 32


def feed(cache, seed, tokens):
    """The same tokens on every rank, and in one cache."""
    rng = np.random.default_rng(seed)
    for layer in range(cache.num_layers):
        cache.append(layer, *normal(rng, 2, tokens, HEADS, DIM))
    cache.advance(tokens)


def decode(cache, seed, steps):
    """Steps of decoding whose every query depends on what attention gave before."""
    rng = np.random.default_rng(seed)
    query = normal(rng, 2 * HEADS, DIM)
    outs = []
    for _ in range(steps):
        for layer in range(cache.num_layers):
            cache.append(layer, query[:HEADS], query[HEADS:])
            query = 0.5 * query + cache.attend(layer, query) + 0.1 * normal(rng, 2 * HEADS, DIM)
        cache.advance()
        outs.append(query)
    return np.stack(outs)


def messages(group):
    """What the protocol promises: gathered in the order of ranks, and a broadcast from any."""
    group = TorchGroup(group, timeout=30)
    own = np.full(9, 10 + group.rank, np.uint8)
    gathered = group.all_gather(own)
    told = [group.broadcast(own, root).tolist() for root in range(group.size)]
    big = group.all_gather(np.full(3_000_000, group.rank, np.uint8))
    return gathered.tolist(), told, [int(row.min()) + int(row.max()) for row in big]


def save_and_decode(group, path):
    cache = ShardedKVCache(KVCache(LAYERS, HEADS, DIM), group, block_size=16)
    feed(cache, 1, 100)
    cache.save(path)
    return decode(cache, 2, 5)


def load_and_decode(group, path):
    return decode(ShardedKVCache.load(path, group), 2, 5)


def other_rows(group):
    """Ranks that attend with another number of rows: an error on all, and no answer."""
    cache = ShardedKVCache(KVCache(LAYERS, HEADS, DIM), group, block_size=16, timeout=2)
    feed(cache, 1, 40)
    rows = 1 + TorchGroup(group).rank
    try:
        cache.attend(0, np.ones((rows, HEADS, DIM), np.float32))
    except (errors.GroupMismatchError, errors.RankLostError) as error:
        return type(error).__name__, str(error)
    return None, None
