"""Logits on which a call with a tolerance could lose the most, and layers that have just these."""

import math

import numpy as np

from kvedge import Float32KvLayer

BLOCK = 16
TOLERANCES = [1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.999]


def below_the_threshold(rng, length, share):
    """Each block holds just about what it may: together they would be all of the tolerance."""
    blocks = -(-length // BLOCK)
    logits = np.full(length, math.log(share / length) if share < 1 else 0.0)
    logits += rng.choice([-1e-3, 1e-3, 0.0], length)
    logits[rng.integers(blocks) * BLOCK :][:1] = 0.0
    return logits


def late_giants(rng, length, share):
    """Every block outweighs all before it."""
    return np.arange(length) * rng.uniform(0.01, 2.0)


def early_giant(rng, length, share):
    """The first token outweighs all others."""
    logits = rng.normal(size=length) * rng.uniform(0, 3)
    logits[0] = rng.uniform(5, 60)
    return logits


def all_equal(rng, length, share):
    return np.full(length, rng.normal() * 10)


def falling(rng, length, share):
    return -np.arange(length) * rng.uniform(1e-4, 0.5)


def spread(rng, length, share):
    return rng.normal(size=length) * rng.choice([0.1, 3.0, 30.0])


KINDS = [below_the_threshold, late_giants, early_giant, all_equal, falling, spread]


def layer_of_logits(logits, values, cls=Float32KvLayer, **options):
    """A layer whose keys are `logits` (len, heads), in one channel of two: the query is (1, 0)."""
    length, heads = logits.shape
    layer = cls(length, heads, 2, value_head_dim=values.shape[2], **options)
    keys = np.zeros((length, heads, 2), np.float32)
    keys[..., 0] = logits
    layer.extend(keys, values)
    return layer
