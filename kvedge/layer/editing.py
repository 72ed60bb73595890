"""Tokens taken out of a layer, the others closing ranks."""

from __future__ import annotations

import numpy as np

from kvedge.layer import keys
from kvedge.layer.reading import block_tokens
from kvedge.layer.store import LayerStore

__all__ = ["clear", "keep", "keep_rows"]


def clear(store: LayerStore) -> None:
    """Hold no token, and forget what of the key map the first ones decided."""
    if store.held().num_dropped or (store.turns is not None and not store.frozen):
        store.restart()
    else:
        store.set_len(0)  # rows stay where they are: a cache may return to them
    rule = store.key_rule
    if any(rule):
        store.turns = None  # no row is returned to
        keys.store_as(store, rule.given_of(store.key_map), rule)


def keep(store: LayerStore, indices: np.ndarray) -> None:
    """Keep what :func:`kvedge.core.checks.check_keep` gave, in the parts too."""
    dropped = store.held().num_dropped
    turns, parts = store.turns, store.parts
    if turns is not None and len(indices) and indices[-1] != len(indices) - 1:  # some move
        turns = turns.kept(indices + dropped, dropped) or None
    if store.config.in_runs:
        _keep_runs(store, indices)
        store.turns = turns
        return
    before = None if parts is None else parts.state()
    store.keep(indices)
    if parts is not None and before is not None:
        parts.return_to(before)
        parts.keep(indices + dropped, dropped)
    store.turns = turns


def keep_rows(store: LayerStore, indices: np.ndarray) -> None:
    """Keep tokens in the rows alone, moved in NumPy."""
    first = _first_moved(indices)
    step = block_tokens(store.config)
    tokens = store.held().tokens
    store.set_len(min(first, len(store)))  # should this be broken off, no wrong row is seen
    for start in range(first, len(indices), step):
        # indices[i] >= i, so what a later block reads is not yet written over.
        source = indices[start : start + step]
        for rows in tokens:
            rows[start : start + len(source)] = rows[source]
    store.set_len(len(indices))


def _keep_runs(store: LayerStore, indices: np.ndarray) -> None:
    """Keep tokens that lie in runs: those that move are stored anew."""
    first, held = _first_moved(indices), store.held()
    kept, rows = indices[first:], []
    for values in (False, True):
        shape = store.config.rows_shape(values, held.num_tokens - first)
        of_all = store.dequantize(held, values, first, held.num_tokens, np.empty(shape, np.float32))
        rows.append(of_all[kept - first])
    before, store.turns = store.turns, None  # rows move as they are stored
    try:
        store.set_len(first)
        if len(kept):
            store.append(rows[0], rows[1])
    finally:
        store.turns = before


def _first_moved(indices: np.ndarray) -> int:
    """The first index that is not its own place; their number where all are."""
    moved = np.flatnonzero(indices != np.arange(len(indices)))
    return int(moved[0]) if len(moved) else len(indices)
