"""A range of tokens out of one cache and into another: byte for byte where stored alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvedge.cache.state import CacheState
from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.memory import Slabs
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    PositionOutOfRangeError,
    ShapeMismatchError,
)
from kvedge.files.contents import CacheContents
from kvedge.key_index import hold
from kvedge.layer.keys import store_as, whole_or_nothing
from kvedge.layer.parts import joined, parts_of_range, put
from kvedge.layer.reading import read_blocks, read_sides, turned_back
from kvedge.layer.room import set_end
from kvedge.layer.store import LayerStore
from kvedge.rope import NO_TURNS

__all__ = ["extract", "inject"]


def extract(state: CacheState, start: int = 0, stop: int | None = None) -> CacheState:
    """A cache of a range of tokens; see :meth:`kvedge.KVCache.extract`."""
    start, stop = checks.check_range(start, stop, state.length)
    contents = _whole(state, "extract()")
    contents = replace(contents, indexes=_of_range(state, start, stop))
    if start % RUN and any(config.in_runs for config in contents.format.layers):
        extracted = extract(state, 0, 0)
        _store_anew(extracted, state, start, stop)
        for index, arrays in zip(extracted.indexes.values(), contents.indexes, strict=True):
            hold(index, arrays)
        return extracted
    layers = []
    for layer, config in zip(contents.layers, contents.format.layers, strict=True):
        rows = {name: getattr(layer, name)[start:stop] for name in Slabs._fields}
        parts = parts_of_range(layer.parts, config, contents.length, start, stop)
        turns = layer.turns and layer.turns.moved(start, stop)
        layers.append(replace(layer, **rows, parts=parts, turns=turns))
    contents = replace(contents, length=stop - start, layers=tuple(layers))
    return CacheState.holding(contents, None, state.key_rule, {})


def _of_range(state: CacheState, start: int, stop: int) -> tuple[dict[str, np.ndarray], ...]:
    """The index keys of a range of tokens, of each layer that has such."""
    arrays = []
    for _, index in sorted(state.indexes.items()):
        own = index.copy()
        own.truncate(stop)
        own.drop_first(start)
        arrays.append(own.arrays())
    return tuple(arrays)


def inject(
    state: CacheState, other: CacheState, start: int | None = None, *, requantize: bool = False
) -> None:
    """Take all tokens of another cache; see :meth:`kvedge.KVCache.inject`."""
    requantize = checks.as_bool(requantize, "requantize")
    for side in (state, other):
        side.refuse_indexes("inject()")
    own, contents = _whole(state, "inject()"), _whole(other, "inject()")
    limit, length = state.max_seq_len, state.length
    start = length if start is None else checks.as_int(start, "start")
    if not 0 <= start <= length:
        raise PositionOutOfRangeError(
            f"start must be from 0 to the {length} tokens held, not {start}",
            expected=range(length + 1),
            got=start,
        )
    if limit is not None and contents.length > limit - start:
        raise CapacityExceededError(
            f"no room for {contents.length} tokens after {start}: max_seq_len is {limit}",
            expected=limit - start,
            got=contents.length,
        )
    shapes = [[_shape(config) for config in side.format.layers] for side in (own, contents)]
    if shapes[0] != shapes[1]:
        raise ShapeMismatchError(f"the tokens are of {contents.format}, this cache {own.format}")
    if not _stores_alike(state, own, contents):
        if not requantize:
            raise ShapeMismatchError(
                f"the tokens are stored as {contents.format}, this cache stores {own.format}"
                f"{_offsets(own, contents)}: requantize=True stores them anew"
            )
        other = _requantized(state, other)
        contents = other.contents(copy=False)
    if not length:
        state.replace(contents)
    elif contents.length:
        _write(state, contents, start, other)


def _whole(state: CacheState, call: str) -> CacheContents:
    """All that is held, not copied, in layers without windows, states or pending tokens."""
    state.refuse_states(call)
    state.refuse_pending(call)
    if state.has_windows:
        raise InvalidArgumentError(f"{call} needs layers that keep all tokens: one has a window")
    state.refuse_evicted(call)
    return state.contents(copy=False)


def _stores_alike(state: CacheState, own: CacheContents, other: CacheContents) -> bool:
    """Whether the other's bytes mean the same here; an empty cache may take what is its own."""
    if own.format != other.format:
        return False
    rule = state.key_rule
    return all(
        mine.key_map.is_same(theirs.key_map)
        if state.length  # else what first tokens decide is still open
        else rule.given_of(mine.key_map).is_same(rule.given_of(theirs.key_map))
        for mine, theirs in zip(own.layers, other.layers, strict=True)
    )


def _requantized(state: CacheState, other: CacheState) -> CacheState:
    """The other's tokens in a cache that stores as this one does."""
    converted = extract(state, 0, 0)
    if state.length:
        for store, mine in zip(converted.stores, state.stores, strict=True):
            store_as(store, mine.key_map, KeyRule())
    _store_anew(converted, other, 0, other.length)
    return converted


def _store_anew(state: CacheState, other: CacheState, start: int, stop: int) -> None:
    """Decode a range of another cache's tokens and append them."""
    for mine, store in zip(state.stores, other.stores, strict=True):
        _append(mine, read_blocks(store, start, stop))
    state.high_water = [state.length + stop - start] * state.num_layers
    state.length += stop - start
    state.room = state.capacity


def _write(state: CacheState, contents: CacheContents, start: int, other: CacheState) -> None:
    """Put bytes that mean the same here at a position, over what is there and past the end.

    Tokens that lie in runs are encoded anew.
    """
    n = contents.length
    length = max(state.length, start + n)
    in_runs = any(config.in_runs for config in contents.format.layers)
    ends_inside = start + n < state.length and (start + n) % RUN
    if in_runs and start != state.length and (start % RUN or ends_inside):
        raise InvalidArgumentError(
            f"layers of runs take tokens at their end, {state.length}, or in place of whole "
            f"runs: from a multiple of {RUN} on to another, or to the end or beyond it, not "
            f"{start} to {start + n}"
        )
    state.make_room(length - state.length)
    with whole_or_nothing(state.stores, n, start):
        _write_layers(state, contents, start, length, other)
    if start < max(state.high_water):
        state.overwrites.add(start)
    state.high_water = [length] * state.num_layers
    state.length = length


def _write_layers(
    state: CacheState, contents: CacheContents, start: int, length: int, other: CacheState
) -> None:
    n = contents.length
    for store, tokens, source in zip(state.stores, contents.layers, other.stores, strict=True):
        if store.config.in_runs:
            _write_runs(store, start, length, source, n)
            continue
        view, hold = store.snapshot(start), None
        if view.parts is None:
            set_end(store, start)  # a store looks anew at the rows that it gets back below
            view = store.view()
        else:
            parts = view.parts.until(start)
            if start + n == length:
                parts = joined(parts, store.config, tokens.parts, n)
            else:  # the last ones are among those written over, or behind them
                parts = parts.until(0)._replace(first=parts.first, last_at=length)
            hold = store.holding(length, view.num_dropped, parts, view.start)
        for slab, rows in zip(view.slabs, tokens.arrays, strict=True):
            slab[view.start + start : view.start + start + n] = rows
        if hold is None:
            set_end(store, length)
        else:
            hold()
        if store.turns is not None or tokens.turns is not None:
            turns = (store.turns or NO_TURNS).spliced(
                start, start + n, tokens.turns or NO_TURNS, 0, ends=start + n == length
            )
            store.turns = turns or None


def _write_runs(to: LayerStore, start: int, length: int, store: LayerStore, n: int) -> None:
    """Put a layer's `n` tokens, as they are read, into one of runs that shall hold `length`."""
    if start == len(to) and store is not to:
        _append(to, read_blocks(store, 0, n))
        return
    keys, values = read_sides(store, store.view(), 0, n)
    if start + n < length:
        view = to.snapshot()
        parts = put(
            view.parts, to.config, view.key_map, start, turned_back(to, keys, start), values
        )
        to.holding(view.num_tokens, view.num_dropped, parts, view.start)()
    else:
        set_end(to, start)
        to.append(keys, values)


def _append(to: LayerStore, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    for keys, values in blocks:
        to.append(keys, values)


def _shape(config: LayerConfig) -> tuple[int, int, int]:
    return config.num_kv_heads, config.head_dim, config.value_head_dim


def _offsets(own: CacheContents, other: CacheContents) -> str:
    return "" if own.format != other.format else " with another key offset or scale"
