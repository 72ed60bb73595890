"""The Llama forward pass again, in float64, over a whole text at once and without a cache.

Written apart from kvedge/llama/model.py: RoPE by complex numbers, attention head by head.
"""

from __future__ import annotations

import numpy as np


def logits(config, weights, tokens):
    """Logits (n, vocab_size), float64, of the token after each of `tokens` (n,)."""
    n, group = len(tokens), config.num_heads // config.num_kv_heads
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    x = weights.token_embedding[np.asarray(tokens)].astype(np.float64)
    for layer in weights.layers:
        h = _norm(x, layer.attention_norm, config.norm_eps)
        qkv = h @ layer.wqkv.astype(np.float64).T
        if layer.bqkv is not None:
            qkv = qkv + layer.bqkv
        q, k, v = np.split(qkv, [query_rows, query_rows + kv_rows], axis=1)
        out = np.empty((n, config.num_heads, config.head_dim))
        for head in range(config.num_heads):
            query = _turn(_head(q, head, config), config.rope)
            key = _turn(_head(k, head // group, config), config.rope)
            value = _head(v, head // group, config)
            scores = query @ key.T / np.sqrt(config.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weight = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weight @ value / weight.sum(axis=1, keepdims=True)
        x = x + out.reshape(n, -1) @ layer.wo.astype(np.float64).T
        h = _norm(x, layer.ffn_norm, config.norm_eps)
        gate, up = np.split(h @ layer.w13.astype(np.float64).T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.w2.astype(np.float64).T
    return _norm(x, weights.final_norm, config.norm_eps) @ weights.output.astype(np.float64).T


def _norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + eps)


def _head(x, head, config):
    return x[:, head * config.head_dim : (head + 1) * config.head_dim]


def _turn(x, rope):
    """RoPE of (n, head_dim) at positions 0..n-1."""
    angle = np.exp(1j * np.outer(np.arange(len(x)), rope.inv_freq))  # (n, pairs)
    pairs = angle.shape[1]
    turned = x.copy()
    if rope.interleaved:
        z = (x[:, 0 : 2 * pairs : 2] + 1j * x[:, 1 : 2 * pairs : 2]) * angle
        turned[:, 0 : 2 * pairs : 2], turned[:, 1 : 2 * pairs : 2] = z.real, z.imag
    else:
        z = (x[:, :pairs] + 1j * x[:, pairs : 2 * pairs]) * angle
        turned[:, :pairs], turned[:, pairs : 2 * pairs] = z.real, z.imag
    return turned
