"""Tokens taken out of a layer from among those it holds, positions staying as they are.

The rows that stay close ranks byte for byte, perhaps other tokens for each KV head. What went
counts as dropped: the next token's position is the number of tokens seen, and keys, which the model
has rotated by their positions, stay right.
"""

from __future__ import annotations

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.kivi import RUN
from kvedge.errors import InvalidArgumentError, ShapeMismatchError
from kvedge.layer import parts
from kvedge.layer.parts import kept_rows
from kvedge.layer.room import shrink
from kvedge.layer.store import LayerStore

__all__ = ["check_evict", "evict", "tail_needed", "unit_of"]


def unit_of(config: LayerConfig) -> int:
    """Tokens that are kept or evicted together: a run's, or 1."""
    return RUN if config.in_runs else 1


def tail_needed(config: LayerConfig) -> int:
    """Last tokens that a layer holds in another format besides, and that are to be kept."""
    return kept_rows(config)


def check_evict(store: LayerStore, keep: object) -> np.ndarray:
    """The rows to keep, intp (n,), or (num_kv_heads, n) where KV heads keep different ones.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError
        Nothing has changed.
    """
    config, n = store.config, len(store)
    if config.window is not None:
        raise InvalidArgumentError(
            f"a layer with window={config.window} drops tokens by itself: none are evicted"
        )
    if store.turns is not None:
        raise InvalidArgumentError(
            "tokens are evicted by their positions, and keys of this layer were moved by shift()"
        )
    array = _as_array(keep)
    if array.ndim != 2:
        indices = checks.check_keep(array, n)
    else:
        if len(array) != config.num_kv_heads:
            raise ShapeMismatchError(
                f"what to keep must be (tokens,) or ({config.num_kv_heads}, tokens), one row for "
                f"each KV head, not {array.shape}"
            )
        rows = [checks.check_keep(row, n) for row in array]
        if len({len(row) for row in rows}) > 1:
            raise InvalidArgumentError(
                f"all KV heads must keep as many tokens, not {[len(row) for row in rows]}"
            )
        indices = np.stack(rows)
    _check_tail(store, indices)
    return indices


def _as_array(keep: object) -> np.ndarray:
    try:
        array = np.asarray(keep)
    except Exception as error:  # ragged lists, foreign __array__
        raise InvalidArgumentError("indices must be a sequence of integers or a mask") from error
    return array


def _check_tail(store: LayerStore, indices: np.ndarray) -> None:
    """Raise where tokens go that a layer holds in another format besides, or parts of runs."""
    config, view = store.config, store.view()
    n, last = view.num_tokens, min(tail_needed(store.config), view.num_tokens)
    if last and not np.array_equal(
        indices[..., -last:], np.broadcast_to(np.arange(n - last, n), (*indices.shape[:-1], last))
    ):
        raise InvalidArgumentError(
            f"the last {last} tokens of this layer are held in {config.recent_dtype} besides, and "
            "have to be kept"
        )
    if config.in_runs:
        runs = view.num_dropped % RUN == 0
        whole = np.zeros(-(-n // RUN) * RUN, bool)
        whole[n:] = True  # what the last run lacks
        for row in np.atleast_2d(indices):
            of_runs = whole.copy()
            of_runs[row] = True
            by_run = of_runs.reshape(-1, RUN)
            runs &= bool((by_run.all(1) | ~by_run.any(1)).all())
        if not runs:
            raise InvalidArgumentError(
                f"a layer of runs ({config.dtypes}) keeps or evicts whole runs: {RUN} tokens, at "
                f"positions that begin with a multiple of {RUN}"
            )


def evict(store: LayerStore, indices: np.ndarray) -> None:
    """Keep the rows that :func:`check_evict` gave."""
    n, kept = len(store), indices.shape[-1]
    if kept == n:
        return
    view, moves, own = store.snapshot(), [], None  # all memory first
    end = view.num_dropped + n
    if view.parts is not None:
        own = parts.evicted(view.parts, store.config, indices, view.num_dropped, n)
    hold = store.holding(kept, end - kept, own, view.start)
    if not store.config.in_runs:  # whose rows have no bytes
        moved = np.flatnonzero(np.atleast_2d(indices != np.arange(kept)).any(0))
        first, start = int(moved[0]) if len(moved) else kept, view.start
        to = slice(start + first, start + kept)
        moves = [
            (slab[to], memory.rows_at(slab, indices[..., first:] + start)) for slab in view.slabs
        ]
    for rows, moved_rows in moves:
        rows[...] = moved_rows
    hold()
    store.evicted_at = end
    shrink(store)
