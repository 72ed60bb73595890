"""A cache without some of its tokens, or with keys at other positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvedge import key_index
from kvedge.cache.state import CacheState
from kvedge.core import checks
from kvedge.errors import InvalidArgumentError
from kvedge.layer import editing, evicting, shifts
from kvedge.layer.keys import rule_of
from kvedge.layer.store import LayerStore
from kvedge.rope import Rope

__all__ = ["clear", "evict", "evict_due", "keep", "shift", "with_turns_stored"]


def clear(state: CacheState) -> None:
    """Forget all tokens; what is automatic is taken anew from the next ones."""
    state.set_length(0)
    if state.eviction is not None:
        state.eviction.clear()
    for store in state.stores:
        store.key_rule = rule_of(store, state.key_rule)
        editing.clear(store)
    if any(state.key_rule):  # the bytes still there mean nothing without the map they had
        state.forget_bytes()


def keep(state: CacheState, positions: np.ndarray) -> None:
    """Keep only tokens at checked positions."""
    state.refuse_states("keep()")
    state.refuse_pending("keep()")
    state.refuse_evicted("keep()")
    for index in state.indexes.values():
        key_index.check_keep(index, "keep()")
    for store in state.stores:
        checks.check_whole(store.config, store.view(), "keep()")
    moved = np.flatnonzero(positions != np.arange(len(positions)))
    if moved.size == 0:
        state.set_length(len(positions))
        return
    editing.keep(state.stores, positions)
    for index in state.indexes.values():
        key_index.keep(index, positions)
    state.overwrites.add(int(moved[0]))
    state.high_water = [len(positions)] * state.num_layers
    state.length = len(positions)


def evict(state: CacheState, index: int, indices: np.ndarray) -> None:
    """Keep checked rows of one layer alone; positions stay."""
    store = state.store_at[index]
    assert store is not None  # the caller has looked
    if indices.shape[-1] == len(store):
        return
    of_layer = state.indexes.get(index)
    if of_layer is not None:
        key_index.check_keep(of_layer, "evict()")
        if indices.ndim > 1:
            raise InvalidArgumentError(
                f"evict() takes one list for all KV heads where layer {index} has an index"
            )
    attended = None if state.eviction is None else state.eviction.of_layers.get(index)
    if attended is not None:
        attended.kept(store, indices)
    evicting.evict(store, indices)
    if of_layer is not None:
        key_index.keep(of_layer, indices)
    state.has_evicted = True
    state.overwrites.add(0)
    state.high_water[index] = store.end()
    state.room = state.capacity


def evict_due(state: CacheState, more: int, *, at_end: bool = False) -> int:
    """Keep a cache within its budget before so many tokens come; tokens that went, of all layers.

    "snapkv" waits for the end of a prompt: for a step of one token, or until `at_end` says so.
    """
    eviction = state.eviction
    if eviction is None:
        return 0
    goes_on = eviction.in_prompt and more > 1 and eviction.eviction.method == "snapkv"
    if goes_on and not at_end:
        return 0
    before = sum(map(len, state.stores))
    for index, rows in eviction.due(state.numbered(), more):
        evict(state, index, rows)
    return before - sum(map(len, state.stores))


def shift(
    state: CacheState, delta: int, rope: Rope | Sequence[Rope | None], start: int, stop: int
) -> None:
    """Rotate stored keys of a checked range."""
    state.refuse_states("shift()")
    state.refuse_indexes("shift()")
    state.refuse_pending("shift()")
    state.refuse_evicted("shift()")
    ropes = rope if isinstance(rope, (list, tuple)) else None
    if ropes is not None and len(ropes) != state.num_layers:
        raise InvalidArgumentError(
            f"rope must be one for all or one for each of {state.num_layers} layers, not "
            f"{len(ropes)}"
        )
    turned = []
    for index, store in enumerate(state.stores):
        own = rope if ropes is None else ropes[index]
        if ropes is None or own is not None:
            turned.append((store, own))
    shifts.owe(
        [
            (store, shifts.check_shift(store, delta, own, *_stored_range(store, start, stop)))
            for store, own in turned
        ]
    )
    if delta and start < stop:
        state.overwrites.add(start)


def with_turns_stored(state: CacheState) -> CacheState:
    """Return ``state``, or a copy with all turns of keys stored where layers still owe some."""
    if all(store.turns is None for store in state.stores):
        return state
    other = state.copy()
    for store in other.stores:
        shifts.store_turns(store)
    return other


def _stored_range(store: LayerStore, start: int, stop: int) -> tuple[int, int]:
    """Positions start to stop of a cache as tokens of a layer, which may have dropped some."""
    dropped = store.view().num_dropped
    return max(0, start - dropped), max(0, stop - dropped)
