"""Attention over the sequences of a paged cache, one by one or several in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvedge.core import arrays, checks, index_keys
from kvedge.core.lists import check_heads
from kvedge.core.options import AttendOptions
from kvedge.core.types import Array, Layout
from kvedge.errors import InvalidArgumentError
from kvedge.paged import batch, cascade
from kvedge.paged.readings import Reading
from kvedge.paged.state import PagedState
from kvedge.paged.store import Rows

__all__ = ["attend", "attend_batch", "select"]


def select(
    state: PagedState, seq: int, layer: int, queries: Array, k: int, **options: Any
) -> np.ndarray:
    """Lists by the index of a layer of a sequence; see :meth:`kvedge.PagedKvCache.select`."""
    pool, sequence = state.pool, state.sequence(seq)
    layer, index = pool.checked_layer(layer), pool.index
    if index is None:
        raise InvalidArgumentError("the pool has no index: KvBlockPool(index=) makes one")
    reading = state.begin(seq, sequence, layer)
    try:
        stored = index.stored(layer, reading.table)
        capacity = pool.blocks.num_blocks * pool.block_size
        return index_keys.select(
            index.config, reading.length, stored, capacity, queries, k, **options
        )
    finally:
        pool.readings.end(reading)


def attend(
    state: PagedState,
    seq: int,
    layer: int,
    query: Array,
    /,
    *,
    out: Array | None = None,
    layout: Layout = "nhd",
    **options: Any,
) -> object:
    """Attend to one layer of a sequence; see :meth:`kvedge.PagedKvCache.attend`."""
    pool, sequence = state.pool, state.sequence(seq)
    layer = pool.checked_layer(layer)
    config, store = pool.config, pool.stores[layer]
    reading = state.begin(seq, sequence, layer)
    try:
        rows, single = checks.as_query(query, config, finite=False, layout=layout)
        rows = np.ascontiguousarray(rows)
        num_rows, num_heads, head_dim = rows.shape
        resolved = AttendOptions.make(head_dim, num_rows, num_heads, reading.length, **options)
        check_heads(resolved.lists, config.num_kv_heads)
        shape = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        shape = config.out_shape(shape)
        reads = () if out is None else (rows, *pool.slabs_of(layer), *resolved.arrays())
        target = arrays.as_target(out, shape, reads=reads, layout=layout, dense=True)
        lse = np.empty(rows.shape[:2], np.float32) if resolved.return_lse else None
        to = target.rows.reshape(config.out_shape(rows.shape))
        parts = pool.read_parts(layer, reading)
        own = Rows(reading.table, reading.length, rows, to, lse, parts=parts)
        if num_rows and parts is None:
            store.attend_blocks(pool.block_size, [own], resolved)
        elif num_rows:
            store.attend_parts([own], resolved)
    finally:
        pool.readings.end(reading)
    if lse is None:
        return target.finish()
    return target.finish(), _lse_of(lse, single, layout)


def attend_batch(
    state: PagedState,
    seqs: Sequence[int],
    layer: int,
    queries: Array | Sequence[Array],
    start: int | Sequence[int] | None,
    /,
    *,
    out: Array | Sequence[Array] | None = None,
    layout: Layout = "nhd",
    **options: Any,
) -> object:
    """Attend to several sequences; see :meth:`kvedge.PagedKvCache.attend_batch`."""
    pool = state.pool
    layer = pool.checked_layer(layer)
    config, store = pool.config, pool.stores[layer]
    readings: list[Reading] = []
    try:
        for seq in batch.as_list(seqs, "seqs"):
            readings.append(state.begin(seq, state.sequence(seq), layer))
        if not readings:
            raise InvalidArgumentError("seqs must name at least one sequence")
        arrays.as_layout(layout)
        checked = batch.checked_queries(queries, len(readings), config, layout)
        lengths = [reading.length for reading in readings]
        resolved, starts = batch.batch_options(checked, lengths, start, **options)
        stacked = not isinstance(queries, Sequence)
        reads: tuple[np.ndarray, ...] = ()
        if out is not None:
            slabs = pool.slabs_of(layer)
            reads = (*(query for query, _ in checked), *slabs, *resolved.arrays())
        targets, outs = batch.checked_outs(out, checked, stacked, reads, config, layout)
        lses: list[Any] = [None] * len(readings)
        if resolved.return_lse:
            lses = [np.empty(query.shape[:2], np.float32) for query, _ in checked]
        rows = [
            Rows(seen.table, seen.length, query, to, lse, first, parts=pool.read_parts(layer, seen))
            for seen, (query, _), to, lse, first in zip(
                readings, checked, outs, lses, starts, strict=True
            )
            if len(query)
        ]
        if rows:
            cascade.attend_batch(store, pool.block_size, rows, resolved)
    finally:
        pool.readings.end_all(readings)
    results = [target.finish() for target in targets]
    result = results[0] if stacked else results
    if not resolved.return_lse:
        return result
    if stacked:
        return result, np.concatenate(lses)
    return result, [
        _lse_of(lse, single, layout) for lse, (_, single) in zip(lses, checked, strict=True)
    ]


def _lse_of(lse: np.ndarray, single: bool, layout: Layout) -> np.ndarray:
    """The log-sum-exp of (rows, num_heads), as the query came."""
    of_rows: np.ndarray = lse[0] if single else lse.T if layout == "hnd" else lse
    return of_rows
