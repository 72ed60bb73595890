"""How a layer stores its keys: the key map, and what of it the first tokens decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from kvedge.core import memory
from kvedge.core.key_map import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    KeyMap,
    KeyRule,
    key_offset_of,
    key_scale_of,
)
from kvedge.core.memory import LayerView
from kvedge.layer.store import LayerStore, SavedRows, scratch_store
from kvedge.rope import Turns

__all__ = [
    "Savepoint",
    "decide",
    "encode_anew",
    "roll_back",
    "rule_of",
    "savepoint",
    "store_as",
    "whole_or_nothing",
]

Savepoint: TypeAlias = "tuple[object, Turns | None, SavedRows | None]"


def rule_of(store: LayerStore, rule: KeyRule) -> KeyRule:
    """What of a cache's rule an empty layer has."""
    return KeyRule(
        rule.auto_offset and store.config.keys_have_scales,
        rule.auto_scale and store.config.has_auto_scale,
    )


def store_as(store: LayerStore, key_map: KeyMap, rule: KeyRule) -> None:
    """Set how keys are stored; those in the slabs, from row 0 on, are."""
    if key_map is not store.key_map:
        store.set_key_map(key_map)
    store.key_rule = rule
    store.key_map_is_auto = rule.auto_offset or rule.auto_scale


def decide(store: LayerStore, keys: np.ndarray) -> None:
    """Let checked keys (n, H, D), n >= 1, that are appended next decide what is open, if it is.

    What is stored already is encoded anew. Keys are those that are stored: turned back.
    """
    key_map, rule, view, end = store.key_map, store.key_rule, store.view(), store.end()
    if not rule.is_open(key_map, end):
        return
    if rule.auto_offset and key_map.offset is None and not end:
        key_map = key_map._replace(offset=key_offset_of(keys))
    if rule.auto_scale and (not end or end + len(keys) >= LEAST_TOKENS):
        stored = np.empty(store.config.rows_shape(False, view.num_tokens), np.float32)
        store.dequantize(view, False, 0, view.num_tokens, stored)
        first = np.concatenate([stored, keys[:FIRST_TOKENS]])
        scale = key_scale_of(
            KeyMap(key_map.offset).to_stored(first[:FIRST_TOKENS]),
            powers_of_two=not store.config.keys_have_scales,
        )
        key_map = key_map._replace(scale=scale)
    if view.start or view.num_tokens:
        encode_anew(store, key_map, view)
    store_as(store, key_map, rule)


def encode_anew(store: LayerStore, key_map: KeyMap, view: LayerView) -> None:
    """Move to slabs in which keys are stored as in `key_map`; readers keep the old ones."""
    config, n = store.config, view.num_tokens
    if not n:
        store.set_key_map(key_map)
        return
    if config.in_runs:
        _encode_runs_anew(store, key_map)
        return
    slabs = memory.reserve_slabs(config)
    scratch = scratch_store(store, n, key_map)
    keys = np.empty(config.rows_shape(False, n), np.float32)
    store.dequantize(view, False, 0, n, keys)
    scratch.append(keys, np.zeros(config.rows_shape(True, n), np.float32))
    anew = scratch.view().tokens
    tokens = view.tokens._replace(key_codes=anew.key_codes, key_scales=anew.key_scales)
    memory.copy_tokens(tokens, slabs, n)
    store.bind(slabs, config, key_map)


def _encode_runs_anew(store: LayerStore, key_map: KeyMap) -> None:
    """Store keys that lie in rows beside runs so, of the few tokens that may decide a key map.

    Of these there are runs only where the layer went back into its first one.
    """
    view, form = store.snapshot(), store.config.run
    n, runs = view.num_tokens, memory.Slabs(*map(np.array, view.parts.runs))
    keys = np.empty(store.config.rows_shape(False, n), np.float32)
    store.dequantize(view, False, 0, n, keys)
    rows = slice(view.num_dropped - view.parts.runs_at, view.num_dropped - view.parts.runs_at + n)
    runs.key_codes[rows], runs.key_scales[rows] = form.key_format.encode(
        key_map.to_stored(keys), form.key_rows
    )
    hold = store.holding(n, view.num_dropped, view.parts._replace(runs=runs))
    store.set_key_map(key_map)
    hold()


def savepoint(store: LayerStore, n: int = 0, start: int | None = None) -> Savepoint:
    """What :func:`roll_back` needs, before the key map is decided or `n` tokens are stored.

    These are appended, or come in place of those from token `start` on.
    """
    rows = None
    if n:
        start = len(store) if start is None else start
        rows = SavedRows.of(store, start, start + n)
    return store.binding(), store.turns, rows


def roll_back(store: LayerStore, saved: Savepoint) -> None:
    """Undo all that was done since :func:`savepoint`, by appends alone."""
    binding, store.turns, rows = saved
    if rows is not None:
        rows.put_back()
    store.rebind(binding)


@contextlib.contextmanager
def whole_or_nothing(stores: Iterable[LayerStore], n: int, start: int) -> Iterator[None]:
    """Undo all where a block that stores `n` tokens from index `start` on is broken off."""
    savepoints = [(store, savepoint(store, n, start)) for store in stores]
    try:
        yield
    except BaseException:
        for store, saved in savepoints:
            roll_back(store, saved)
        raise
