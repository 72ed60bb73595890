"""A cache whose tokens are stored anew, in another format, where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvedge.cache.state import CacheState
from kvedge.core.config import LayerConfig
from kvedge.core.hadamard import LARGEST_GAIN
from kvedge.core.types import KeyVectors
from kvedge.files.contents import CacheFormat
from kvedge.layer.copies import new_store
from kvedge.layer.keys import store_as
from kvedge.layer.reading import block_tokens, read_blocks
from kvedge.layer.shifts import SQRT2
from kvedge.layer.store import LayerStore

__all__ = ["requantize"]

_SLACK = 1.01  # for rounding


def requantize(
    state: CacheState,
    configs: Sequence[LayerConfig],
    key_offset: KeyVectors,
    key_scale: KeyVectors,
) -> None:
    """Store all layers as in `configs` from now on; see :meth:`kvedge.KVCache.requantize`."""
    tokens = [len(store) for store in state.stores]  # their memory is reserved, and not yet taken
    converted = CacheState.new(configs, state.max_seq_len, key_offset, key_scale, {}, tokens)
    for old, new in zip(state.stores, converted.stores, strict=True):
        _check_fits(old, new)

    numbers = [number for number, store in enumerate(state.store_at) if store is not None]
    del old  # or it would keep what is to be given back
    state.overwrites.add(0)
    try:
        for index, number in enumerate(numbers):
            _convert(state.stores[index], converted.stores[index])
            # The old layer goes, if nobody else has it.
            state.put_layer(number, converted.layers[index])
    finally:
        form = state.format
        state.format = CacheFormat.of(
            (store.config for store in state.stores), form.states, form.indexes
        )
        state.high_water = [state.length] * state.num_layers
        state.room = state.capacity
    state.key_rule = converted.key_rule


def _convert(old: LayerStore, new: LayerStore) -> None:
    """Fill an empty layer with the tokens of another."""
    new.restart(old.view().num_dropped)
    for keys, values in read_blocks(old):
        new.append(keys, values)
    new.evicted_at = old.evicted_at


def _check_fits(old: LayerStore, new: LayerStore) -> None:
    """Raise what storing a layer's tokens in another would raise; quick unless some are huge."""
    if not len(old) or _surely_fits(old, new):
        return
    rows = block_tokens(old.config)
    config = replace(new.config, limit=None, window=None, capacity=rows)
    scratch = new_store(type(new), config)
    store_as(scratch, new.key_map, new.key_rule)
    for keys, values in read_blocks(old):
        scratch.append(keys, values)
        scratch.set_len(0)


def _surely_fits(old: LayerStore, new: LayerStore) -> bool:
    """Whether no element can pass the range of the new format, by a bound of all of them."""
    config, tokens = old.config, old.view().tokens
    values = config.value_format.largest(tokens.value_codes, tokens.value_scales)
    if config.value_rotation or new.config.value_rotation:
        values *= LARGEST_GAIN**2  # of each
    keys = config.key_format.largest(tokens.key_codes, tokens.key_scales)
    was, will = old.key_map, new.key_map
    keys = keys * _largest(was.scale, 1.0) + _largest(was.offset, 0.0)
    if old.turns is not None:
        keys *= SQRT2
    keys += keys if new.key_rule.auto_offset else _largest(will.offset, 0.0)
    if will.scale is not None:  # automatic ones are at least 1
        keys /= float(will.scale.min())
    configs = [new.config] + ([new.config.part_config] if new.config.recent_dtype else [])
    limits = [
        (form.key_format.limit(form.key_rows), form.value_format.limit(form.value_rows))
        for form in configs
    ]
    return all(_SLACK * keys <= key and _SLACK * values <= value for key, value in limits)


def _largest(vector: np.ndarray | None, none: float) -> float:
    return none if vector is None else float(np.abs(vector).max())
