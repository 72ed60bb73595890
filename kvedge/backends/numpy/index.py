"""The scan of index keys in NumPy: scores of a row's queries, and its top-k as a list of tokens."""

from __future__ import annotations

import numpy as np

from kvedge.core import hadamard, half, int8
from kvedge.core.float_mode import in_default_mode
from kvedge.core.rows import RowShape
from kvedge.core.selection import Selection

__all__ = ["index_encode", "index_select"]


@in_default_mode
def index_encode(
    dtype: str, rows: np.ndarray, codes: np.ndarray, scales: np.ndarray | None
) -> None:
    """Store keys, float32 (n, head_dim), in arrays of as many."""
    if dtype == "float32":
        codes[...] = rows
    elif dtype == "bfloat16":
        codes[...] = half.encode_bfloat16(rows)
    else:
        assert scales is not None
        shape = RowShape.of(rows.shape[1], rows.shape[1], "float32", True)
        stored = int8.quantize(hadamard.rotate_float32(rows)[:, np.newaxis], shape)
        codes[...], scales[...] = stored[0][:, 0], stored[1][:, 0, 0]


@in_default_mode
def index_select(
    dtype: str,
    codes: np.ndarray,
    scales: np.ndarray | None,
    queries: np.ndarray,
    weights: np.ndarray | None,
    selection: Selection,
    lists: np.ndarray,
    num_threads: int,
    table: np.ndarray | None = None,
    keys_of_block: int = 0,
    num_keys: int | None = None,
) -> None:
    """Write the list of each row, and head if `selection.per_head`, to `lists`.

    Parameters
    ----------
    dtype : str
        How keys are stored.
    codes : numpy.ndarray
        (num_keys, head_dim).
    scales : numpy.ndarray, optional
        float32 (num_keys,), of int8.
    queries : numpy.ndarray
        float32 (n, num_heads, head_dim).
    weights : numpy.ndarray, optional
        float32 (n, num_heads).
    selection : Selection
    lists : numpy.ndarray
        int32 (n, 1 or num_heads, width).
    num_threads : int
        Has no effect.
    table : numpy.ndarray, optional
        int32 (blocks,): codes and scales are those of blocks of `keys_of_block` keys, of which
        these have the `num_keys`.
    """
    s = selection
    if table is not None:
        at = np.arange(num_keys or 0)
        at = table[at // keys_of_block] * np.int64(keys_of_block) + at % keys_of_block
        codes, scales = codes[at], None if scales is None else scales[at]
    keys = half.decode_bfloat16(codes) if dtype == "bfloat16" else codes
    if dtype == "int8":
        assert scales is not None
        keys = codes * scales[:, np.newaxis]
        queries = hadamard.rotate_float32(queries)
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
