"""A stress test for storage formats: a model whose keys have constant channels, as Qwen2.5's have.

Qwen2.5 adds a bias of tens to hundreds to a few channels of its keys, before RoPE turns them. A
format with one scale per row then loses the other channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import InvalidArgumentError
from .model import LlamaModel
from .weights import LayerWeights

__all__ = ["with_key_bias"]

# Where in the rotated half of a head, as a share of it: a pair of channels that turns fast, one in
# between, one that turns slowly.
_PLACES = (1 / 16, 3 / 8, 7 / 8)
_MIN_PAIRS_PER_BIAS = 8  # a model with few pairs of channels cannot spare one


def with_key_bias(model: LlamaModel, magnitude: float, *, seed: int = 0) -> LlamaModel:
    """Return a model like another, with a constant in some channel pairs of its keys before RoPE.

    A bias b alone would make attention depend on the distance of two tokens more than on anything
    else: a pair's share of a logit would grow from q.k to q.(k + b). Models are trained so that it
    does not. So the query's channels of such a pair are divided by |b| / (size of the pair's keys),
    and the pair's logits stay as large as they were. The pair's information is lost to the model:
    its float32 run is somewhat worse than the original's (books5M, head_dim 64: 3.148 instead of
    3.140 nats per token), and is what formats are to be compared with.

    Parameters
    ----------
    model : LlamaModel
        With RoPE; it is left alone.
    magnitude : float
        Length of the bias of a pair of channels, give or take half of it; positive.
    seed : int
        Of the bias's lengths and directions, which differ between layers and KV heads.

    Returns
    -------
    LlamaModel
        Three pairs of channels of each KV head are biased, one that turns fast, one slowly, one in
        between; fewer where a head has less than 24 pairs.

    Raises
    ------
    InvalidArgumentError
        If `magnitude` is not a positive number, or the model normalizes its keys, which takes the
        length of a bias away.
    """
    if any(layer.k_norm is not None for layer in model.weights.layers):
        raise InvalidArgumentError("the model normalizes its keys: a bias before that is no test")
    if not (np.isfinite(magnitude) and magnitude > 0):
        raise InvalidArgumentError(f"magnitude must be a positive number, got {magnitude!r}")
    rng = np.random.default_rng(seed)
    layers = tuple(_biased(model, layer, magnitude, rng) for layer in model.weights.layers)
    return LlamaModel(model.config, replace(model.weights, layers=layers), model.tokenizer)


def _biased(
    model: LlamaModel, layer: LayerWeights, magnitude: float, rng: np.random.Generator
) -> LayerWeights:
    c = model.config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim  # rows of wqkv
    wqkv = np.array(layer.wqkv, np.float32)
    bqkv = np.zeros(len(wqkv), np.float32) if layer.bqkv is None else layer.bqkv.copy()
    wq = wqkv[:queries].reshape(c.num_kv_heads, -1, c.head_dim, c.dim)  # (KV heads, group, ...)
    bq = bqkv[:queries].reshape(c.num_kv_heads, -1, c.head_dim)
    wk = wqkv[queries : queries + keys].reshape(c.num_kv_heads, c.head_dim, c.dim)
    bk = bqkv[queries : queries + keys].reshape(c.num_kv_heads, c.head_dim)
    for head in range(c.num_kv_heads):
        for pair in _pairs(model):  # [channel, channel]
            length = magnitude * rng.uniform(0.5, 1.5)
            angle = rng.uniform(0, 2 * np.pi)
            # What goes in is normalized: a row's length is about the size of what comes out.
            size = np.sqrt((wk[head, pair] ** 2).sum())
            bk[head, pair] += np.float32(length) * np.array([np.cos(angle), np.sin(angle)])
            wq[head][:, pair] *= np.float32(size / length)
            bq[head][:, pair] *= np.float32(size / length)
    return replace(layer, wqkv=wqkv, bqkv=bqkv)


def _pairs(model: LlamaModel) -> list[list[int]]:
    """Channels of the pairs that get a bias."""
    rope = model.config.rope
    half = (rope.rotary_dim or model.config.head_dim) // 2
    count = max(1, min(len(_PLACES), half // _MIN_PAIRS_PER_BIAS))
    pairs = [int(place * half) for place in _PLACES[-count:]]
    return [[2 * i, 2 * i + 1] if rope.interleaved else [i, i + half] for i in pairs]
