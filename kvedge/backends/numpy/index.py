"""The scan of index keys in NumPy: scores of a row's queries, and its top-k as a list of tokens."""

from __future__ import annotations

import numpy as np

from kvedge.core.float_mode import in_default_mode
from kvedge.core.selection import Selection

__all__ = ["index_select"]


@in_default_mode
def index_select(
    keys: np.ndarray,
    queries: np.ndarray,
    weights: np.ndarray | None,
    selection: Selection,
    lists: np.ndarray,
    num_threads: int,
) -> None:
    """Write the list of each row, and head if `selection.per_head`, to `lists`.

    Parameters
    ----------
    keys : numpy.ndarray
        float32 (num_keys, head_dim), as stored.
    queries : numpy.ndarray
        float32 (n, num_heads, head_dim), rotated as the keys are.
    weights : numpy.ndarray, optional
        float32 (n, num_heads).
    selection : Selection
    lists : numpy.ndarray
        int32 (n, 1 or num_heads, width).
    num_threads : int
        Has no effect.
    """
    s = selection
    lists[...] = -1
    for row, query in enumerate(queries):
        position = s.first_position + row
        stop = (position + 1) // s.ratio  # keys that the row sees
        scores = s.scale * (query @ keys[:stop].T)  # (num_heads, stop)
        if not s.per_head:
            scores = np.maximum(scores, 0)
            factors = np.ones(len(query), np.float32) if weights is None else weights[row]
            scores = (factors @ scores)[np.newaxis]
        for head, of_keys in enumerate(scores):
            tokens = _tokens(_top(of_keys, s), position, stop, s)
            lists[row, head, : len(tokens)] = tokens


def _top(scores: np.ndarray, s: Selection) -> np.ndarray:
    """The blocks of keys that are chosen, ascending."""
    first = s.start // s.ratio // s.block
    scores = scores.copy()
    scores[: s.start // s.ratio] = -np.inf
    number = -(-len(scores) // s.block)
    of_blocks = np.full(number * s.block, -np.inf, np.float32)
    of_blocks[: len(scores)] = scores
    best = of_blocks.reshape(number, s.block).max(1)[first:]
    best[max(0, len(best) - s.local_blocks) :] = np.inf
    chosen = np.argsort(-best, kind="stable")[: s.k]  # ties to the lower position
    return np.sort(chosen) + first


def _tokens(blocks: np.ndarray, position: int, stop: int, s: Selection) -> np.ndarray:
    """The tokens of blocks, and those behind the last whole key."""
    size = s.block * s.ratio
    tokens = (blocks[:, np.newaxis] * size + np.arange(size)).reshape(-1)
    tokens = tokens[(tokens >= s.start) & (tokens < stop * s.ratio)]
    return np.concatenate([tokens, np.arange(max(s.start, stop * s.ratio), position + 1)])
