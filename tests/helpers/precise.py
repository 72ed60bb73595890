"""What tests share of layers and caches whose first or last tokens are in another format."""

from __future__ import annotations

import numpy as np

from kvedge import KVCache

HEADS, DIM = 2, 24
DRAFT = 64  # tokens that may be taken back without a trace
# Options of attend, each of which sees other tokens, or sees them otherwise, of 190.
ATTENDS = [
    {},
    {"window": 45},
    {"window": 9, "sink_tokens": 37},
    {"start": 45, "sink_tokens": 3, "window": 30},
    {"start": 189},
    {"softcap": 2.0},
    {"causal": False, "scale": -0.3},
]


def rows(seed, tokens, dim=DIM, size=1.0):
    """Keys and values, (2, tokens, HEADS, dim)."""
    rng = np.random.default_rng(seed)
    return size * rng.standard_normal((2, tokens, HEADS, dim)).astype(np.float32)


def layer_of(dtype, **options):
    return KVCache._layer_types[dtype](None, HEADS, DIM, **options)


def read(layer):
    return np.stack([layer.keys(), layer.values()])


def bits(layer):
    """All that two equal layers have in common."""
    query = np.random.default_rng(1).standard_normal((4, DIM)).astype(np.float32)
    return read(layer).tobytes(), layer.attend(query).tobytes(), layer.scores(query).tobytes()


def cache_of(tokens, layers, **options):
    """A cache that holds the same tokens in each of its layers."""
    cache = KVCache(layers, HEADS, DIM, **options)
    for i in range(layers):
        cache.append(i, *tokens)
    cache.advance(tokens.shape[1])
    return cache


def cache_bits(cache):
    return [bits(cache.layer(i)) for i in range(cache.num_layers)]
