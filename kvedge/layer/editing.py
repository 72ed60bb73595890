"""Tokens taken out of a layer, the others closing ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvedge.layer import keys, parts
from kvedge.layer.store import LayerStore
from kvedge.rope import Turns

__all__ = ["clear", "keep"]


def clear(store: LayerStore) -> None:
    """Hold no token, and forget what of the key map the first ones decided."""
    if store.view().num_dropped or (store.turns is not None and not store.frozen):
        store.restart()
    else:
        store.set_len(0)  # rows stay where they are: a cache may return to them
    rule = store.key_rule
    if any(rule):
        store.turns = None  # no row is returned to
        keys.store_as(store, rule.given_of(store.key_map), rule)


def keep(stores: Iterable[LayerStore], indices: np.ndarray) -> None:
    """Keep what :func:`kvedge.core.checks.check_keep` gave in all of some layers, or in none."""
    first, steps, runs = _first_moved(indices), [], []
    for store in stores:
        if store.config.in_runs:
            runs.append(store)
        else:  # all memory is taken before any row moves
            hold = _holding_kept(store, indices)
            steps.append((store, store.keeping(indices), _turns_kept(store, indices), hold))
    with keys.whole_or_nothing(runs, len(indices) - first, first):
        for store in runs:
            turns = _turns_kept(store, indices)
            _keep_runs(store, indices)
            store.turns = turns
    for store, move, turns, hold in steps:
        move()
        store.turns = turns
        if hold is not None:
            hold()


def _holding_kept(store: LayerStore, indices: np.ndarray) -> Callable[[], None] | None:
    """What makes a layer hold of first and last tokens those that it keeps."""
    view = store.snapshot()
    if view.parts is None:
        return None
    kept = parts.kept(view.parts, view.num_dropped, indices)
    return store.holding(len(indices), view.num_dropped, kept, view.start)


def _turns_kept(store: LayerStore, indices: np.ndarray) -> Turns | None:
    turns, dropped = store.turns, store.view().num_dropped
    if turns is not None and len(indices) and indices[-1] != len(indices) - 1:  # some move
        turns = turns.kept(indices + dropped, dropped) or None
    return turns


def _keep_runs(store: LayerStore, indices: np.ndarray) -> None:
    """Keep tokens that lie in runs: those that move are stored anew."""
    first, view = _first_moved(indices), store.view()
    kept, rows = indices[first:], []
    for values in (False, True):
        shape = store.config.rows_shape(values, view.num_tokens - first)
        of_all = store.dequantize(view, values, first, view.num_tokens, np.empty(shape, np.float32))
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
