"""The numbers that competitors attend to, and the exact answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvedge.bench.shapes import AttentionShape

__all__ = ["Workload", "make_workload", "reference_attention", "relative_error"]

_SEED = 20240229
_CHECKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Queries of the last tokens, and the keys and values of all tokens they see.

    Decode is one token, whose query has no axis of its own. A prompt is n of them, causal.
    """

    shape: AttentionShape
    context: int  # T, tokens
    query: np.ndarray  # float32 (num_heads, head_dim), or (n, num_heads, head_dim)
    keys: np.ndarray  # float32 (T, num_kv_heads, head_dim)
    values: np.ndarray  # float32 (T, num_kv_heads, head_dim)

    @property
    def num_rows(self) -> int:
        """Tokens that have a query."""
        return len(self.query) if self.query.ndim == 3 else 1

    def hidden(self) -> np.ndarray:
        """Which tokens each row of a prompt does not see: bool (n, T)."""
        token = np.arange(self.context)
        return token > np.arange(self.context - self.num_rows, self.context)[:, np.newaxis]

    def exact(self, keys: np.ndarray | None = None, values: np.ndarray | None = None) -> np.ndarray:
        """Return attention in float64, over other (stored) keys and values if given.

        Of a long prompt it has some rows: all in float64 would take longer than what is measured.
        """
        keys = self.keys if keys is None else keys
        values = self.values if values is None else values
        if self.query.ndim == 2:
            return reference_attention(self.query, keys, values)
        rows = self._checked_rows()
        return reference_attention(self.query[rows], keys, values, ~self.hidden()[rows])

    def error(self, out: np.ndarray, exact: np.ndarray) -> float:
        """Return the error of an output against an :meth:`exact` one."""
        return relative_error(out if self.query.ndim == 2 else out[self._checked_rows()], exact)

    def _checked_rows(self) -> np.ndarray:
        return np.unique(np.linspace(0, self.num_rows - 1, _CHECKED_ROWS).astype(int))


def make_workload(shape: AttentionShape, context: int, new_tokens: int | None = None) -> Workload:
    """Return normally distributed numbers, the same ones in every run.

    Parameters
    ----------
    shape : AttentionShape
    context : int
        All tokens.
    new_tokens : int, optional
        So many of them at the end are a prompt; None: decode.
    """
    rng = np.random.default_rng((_SEED, shape.num_heads, shape.num_kv_heads, shape.head_dim))
    rows = (context, shape.num_kv_heads, shape.head_dim)
    prompt = () if new_tokens is None else (new_tokens,)
    query = rng.standard_normal((*prompt, shape.num_heads, shape.head_dim), np.float32)
    keys = rng.standard_normal(rows, np.float32)
    values = rng.standard_normal(rows, np.float32)
    return Workload(shape, context, query, keys, values)


def reference_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray:
    """Attention in float64, one KV head at a time to keep the copies small.

    Parameters
    ----------
    query : numpy.ndarray
        (num_heads, head_dim), or (n, num_heads, head_dim).
    keys, values : numpy.ndarray
        (T, num_kv_heads, head_dim).
    seen : numpy.ndarray, optional
        bool (n, T): the tokens that each row sees; None: all.

    Returns
    -------
    numpy.ndarray
        float64, shaped as the query.
    """
    *_, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    rows = query.reshape(-1, num_heads, head_dim)
    grouped = rows.reshape(len(rows), num_kv_heads, -1, head_dim)
    out = np.empty(grouped.shape)
    for head in range(num_kv_heads):
        one_head = grouped[:, head].astype(np.float64)  # (n, group, head_dim)
        logits = one_head @ keys[:, head].astype(np.float64).T  # (n, group, T)
        logits /= np.sqrt(head_dim)
        if seen is not None:
            logits[np.broadcast_to(~seen[:, np.newaxis], logits.shape)] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, head] = weights @ values[:, head].astype(np.float64)
    return out.reshape(query.shape)


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Return ``max |out - reference| / max |reference|``."""
    return float(np.abs(out - reference).max() / np.abs(reference).max())
