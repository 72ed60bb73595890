"""The numbers that competitors attend to, and the exact answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvedge.bench.shapes import AttentionShape

__all__ = ["Workload", "make_workload", "reference_attention", "relative_error"]

_SEED = 20240229


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step: a query, and the keys and values of all tokens it sees."""

    shape: AttentionShape
    context: int  # T, tokens
    query: np.ndarray  # float32 (num_heads, head_dim)
    keys: np.ndarray  # float32 (T, num_kv_heads, head_dim)
    values: np.ndarray  # float32 (T, num_kv_heads, head_dim)


def make_workload(shape: AttentionShape, context: int) -> Workload:
    """Return normally distributed numbers, the same ones in every run."""
    rng = np.random.default_rng((_SEED, shape.num_heads, shape.num_kv_heads, shape.head_dim))
    rows = (context, shape.num_kv_heads, shape.head_dim)
    query = rng.standard_normal((shape.num_heads, shape.head_dim), np.float32)
    keys = rng.standard_normal(rows, np.float32)
    values = rng.standard_normal(rows, np.float32)
    return Workload(shape, context, query, keys, values)


def reference_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Attention of one token in float64, one KV head at a time to keep the copies small.

    Parameters
    ----------
    query : numpy.ndarray
        (num_heads, head_dim).
    keys, values : numpy.ndarray
        (T, num_kv_heads, head_dim).

    Returns
    -------
    numpy.ndarray
        float64 (num_heads, head_dim).
    """
    num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    out = np.empty((num_heads, head_dim))
    for head in range(num_kv_heads):
        rows = slice(head * group, (head + 1) * group)
        logits = keys[:, head].astype(np.float64) @ query[rows].astype(np.float64).T  # (T, group)
        logits /= np.sqrt(head_dim)
        weights = np.exp(logits - logits.max(axis=0))
        weights /= weights.sum(axis=0)
        out[rows] = weights.T @ values[:, head].astype(np.float64)
    return out


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Return ``max |out - reference| / max |reference|``."""
    return float(np.abs(out - reference).max() / np.abs(reference).max())
