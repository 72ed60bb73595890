"""A paged cache's sequences as caches of their own, and back: byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvedge.cache.cache import KVCache, cache_holding, state_of
from kvedge.cache.editing import with_turns_stored
from kvedge.cache.state import layer_names
from kvedge.core import checks, memory
from kvedge.core.key_map import KeyMap, same_vector
from kvedge.errors import InvalidArgumentError, LayersOutOfStepError, ShapeMismatchError
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.layer.parts import PartContents, contents_of, runs_end
from kvedge.paged.readings import Reading
from kvedge.paged.sequences import NO_BLOCKS, SequenceState
from kvedge.paged.state import PagedState, PoolState

__all__ = ["check_nothing_pending", "empty_cache", "from_cache", "to_cache"]


def to_cache(state: PagedState, seq: int, max_seq_len: int | None) -> KVCache:
    """A cache with a copy of a sequence."""
    max_seq_len = checks.check_max_seq_len(max_seq_len)
    pool = state.pool
    running: list[Reading] = []
    try:
        with pool.lock:  # all layers as they are at one moment
            sequence = state.sequence(seq)
            length = sequence.length
            check_nothing_pending(sequence.layer_lengths, length)
            moments = list(sequence.moments or ())
            for layer in range(pool.num_layers):
                running.append(state.begin(seq, sequence, layer))
        layers = [_layer_contents(pool, layer, run) for layer, run in enumerate(running)]
        indexes = [
            pool.index.gather(layer, run.table, moment)
            for layer, (run, moment) in enumerate(zip(running, moments, strict=False))
            if pool.index is not None
        ]
    finally:
        pool.readings.end_all(running)
    contents = CacheContents(_format(pool), length, tuple(layers), indexes=tuple(indexes))
    return cache_holding(contents, max_seq_len)


def empty_cache(state: PagedState) -> KVCache:
    """A cache that stores as the pool does."""
    pool = state.pool
    with pool.lock:
        own = SequenceState(pool.num_layers, parts=pool.new_parts(), moments=pool.new_moments())
        seq = state.add(own)
        try:
            return to_cache(state, seq, None)
        finally:
            del state.sequences[seq]


def from_cache(
    state: PagedState, cache: object, token_ids: np.ndarray | None, namespace: bytes = b""
) -> int:
    """Begin a sequence with a cache's tokens, but for what is registered of `token_ids`."""
    pool = state.pool
    if not isinstance(cache, KVCache):
        raise InvalidArgumentError(f"cache must be a KVCache, not {checks.describe(cache)}")
    saved, form = state_of(cache), _format(pool)
    if saved.format != form:
        raise ShapeMismatchError(f"the cache is {saved.format}, this pool {form}")
    if cache.key_offset is not None:
        raise InvalidArgumentError("blocks have no key offset, but this cache has one")
    if not same_vector(cache.key_scale, pool.key_scale):
        raise InvalidArgumentError(
            "the cache has another key_scale than the pool: make the pool with "
            "key_scale=cache.key_scale"
        )
    length, in_runs = saved.length, pool.config.in_runs
    saved = with_turns_stored(saved)  # blocks are shared: their keys are where they are
    views = [store.snapshot() for store in saved.stores]
    if in_runs and any(view.num_dropped for view in views):
        raise InvalidArgumentError(
            "runs in blocks begin with a sequence's first token, which this cache has dropped"
        )
    check_nothing_pending([len(store) for store in saved.stores], length)
    if token_ids is not None and len(token_ids) > length:
        raise ShapeMismatchError(f"{len(token_ids)} token ids for {length} tokens")
    contents = [
        contents_of(view, store.config, view.num_dropped, view.num_dropped + length, copy=False)
        for store, view in zip(saved.stores, views, strict=True)
    ]
    with pool.lock:
        # Held before blocks are taken, which may be theirs.
        first = NO_BLOCKS if token_ids is None else pool.blocks.find(token_ids, namespace)
        start = len(first) * pool.block_size
        taken = fine = NO_BLOCKS
        parts = None
        try:
            taken = pool.take(pool.blocks_for(length - start))
            table = np.concatenate([first, taken])
            if pool.parts is not None:
                parts, fine = pool.parts.filled(contents, length)
            for store, view, own in zip(pool.stores, views, contents, strict=True):
                rows = own[2].arrays if in_runs else view.tokens
                rows = memory.rows_of(rows, store.config, start, length)
                store.scatter(table, pool.block_size, rows, start)
            if pool.index is not None:
                for layer, own_index in saved.indexes.items():
                    first_key = start // pool.index.config.ratio
                    pool.index.scatter(layer, table, own_index.arrays(), first_key)
        except BaseException:
            pool.blocks.release(taken)
            pool.blocks.release(first)
            if pool.parts is not None:
                pool.parts.blocks.release(fine)
            raise
        moments = saved.moments() if saved.indexes else None
        return state.add(SequenceState(pool.num_layers, table, length, parts, moments))


def check_nothing_pending(lengths: Sequence[int], length: int) -> None:
    """LayersOutOfStepError if a layer has tokens that the sequence was not advanced over."""
    if max(lengths) == length:
        return
    pending = [layer for layer, tokens in enumerate(lengths) if tokens > length]
    raise LayersOutOfStepError(
        f"there are pending tokens in {layer_names(pending)} of {len(lengths)}: {max(lengths)} "
        f"tokens are held, but {length} were advanced over; advance() over them or truncate() first"
    )


def _layer_contents(pool: PoolState, layer: int, reading: Reading) -> LayerContents:
    """A copy of what a reading holds, as a layer stores it."""
    length, store, table, size = reading.length, pool.stores[layer], reading.table, pool.block_size
    if pool.parts is None:
        return _contents(store.gather(table, size, 0, length), store.key_map)
    last, parts = pool.parts.contents(layer, reading)
    if not pool.config.in_runs:
        return _contents(store.gather(table, size, 0, length), store.key_map, parts)
    runs = PartContents(store.gather(table, size, 0, runs_end(length, last)), store.key_map)
    layout = memory.slab_layout(replace(pool.config, capacity=length))  # rows of no bytes
    rows = memory.Slabs(*(np.empty(shape, dtype) for shape, dtype in layout))
    return _contents(rows, store.key_map, (*parts, runs))


def _contents(
    rows: memory.Slabs, key_map: KeyMap, parts: tuple[PartContents, ...] = ()
) -> LayerContents:
    return LayerContents(
        rows.key_codes, rows.value_codes, rows.key_scales, rows.value_scales, key_map, parts=parts
    )


def _format(pool: PoolState) -> CacheFormat:
    config = None if pool.index is None else pool.index.config
    indexes = [] if config is None else [(i, config) for i in range(pool.num_layers)]
    return CacheFormat.of([pool.config] * pool.num_layers, indexes=tuple(indexes))
