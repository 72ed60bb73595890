"""Tokens into the layers of a cache: one to all of them, and what goes wrong on the way."""

from __future__ import annotations

import numpy as np

from kvedge.cache.state import CacheState
from kvedge.core import checks, memory
from kvedge.core.index_keys import Finish, Prepared, check_asked
from kvedge.core.types import Array, Layout
from kvedge.errors import CapacityExceededError, OutOfMemoryError
from kvedge.key_index import prepare
from kvedge.layer.keys import roll_back, savepoint
from kvedge.layer.room import slide
from kvedge.layer.store import LayerStore

__all__ = ["check_position", "failed", "prepared_keys", "push_step"]


def check_position(
    state: CacheState, store: LayerStore, start: int, keys: Array, layout: Layout
) -> None:
    """Raise if tokens end beyond max_seq_len, which a layer with a window cannot know."""
    n = len(checks.as_rows(keys, False, store.config, many=None, layout=layout))
    limit = state.max_seq_len
    if limit is not None and n > limit - start:
        raise CapacityExceededError(f"no room for {n} tokens after {start}")


def prepared_keys(
    state: CacheState,
    layer: int,
    keys: Array,
    layout: Layout,
    index_keys: Array | None,
    finish: Finish | None,
) -> Prepared | None:
    """Check the index keys of tokens to append, and make room for them; None: there is no index."""
    index, store = state.indexes.get(layer), state.store_at[layer]
    check_asked(index is not None, index_keys, finish, f"layer {layer}")
    if index is None or store is None or index_keys is None:
        return None
    n = len(checks.as_rows(keys, False, store.config, many=None, layout=layout))
    return prepare(index, index_keys, finish, n)


def failed(state: CacheState, layer: int, start: int, error: MemoryError) -> OutOfMemoryError:
    """What append() raises where a layer ran out of memory."""
    if start < state.high_water[layer]:
        # Broken off half way, perhaps: then bytes above may not be what snapshots stand for.
        state.overwrites.add(start)
        state.high_water[layer] = start
    return memory.out_of_memory(error, f"tokens appended to layer {layer}")


def push_step(state: CacheState, keys: np.ndarray, values: np.ndarray) -> None:
    """Append one token to every layer, then advance: all of it or nothing."""
    state.refuse_states("push_step()")
    state.refuse_indexes("push_step()")
    state.refuse_pending("push_step()")
    start = state.length
    if start >= state.room:
        limit = state.max_seq_len
        if limit is not None and start >= limit:
            raise state.no_room(0, CapacityExceededError(f"no room for 1 token after {start}"))
        state.make_room(1)

    # What one call does not: a layer may still refuse its token when others already hold theirs (a
    # number that is not finite, an offset key or a scale out of range). The bytes above the length
    # may be what a snapshot stands for: so they are put back as well.
    overwrites = max(state.high_water) > start
    if not state.stores or not state.stores[0].append_step(state.stores, keys, values):
        savepoints = [(store, savepoint(store, 1)) for store in state.stores]
        try:
            for store, key, value in zip(state.stores, keys, values, strict=True):
                store.append(key, value)
        except BaseException:
            for store, saved in savepoints:
                roll_back(store, saved)
            # The layer named the element within its own token; these name it in the arrays given.
            checks.check_finite(keys, "keys")
            checks.check_finite(values, "values")
            raise
    if overwrites:
        state.overwrites.add(start)
    state.high_water = [start + 1] * state.num_layers
    state.length = start + 1
    if state.has_windows:
        for store in state.stores:
            slide(store, 1)
