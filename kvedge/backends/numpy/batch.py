"""Several layers in one call, in NumPy: one after the other, once all is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvedge import batch
from kvedge.backends.numpy import attention
from kvedge.backends.numpy.layer import LayerStore
from kvedge.core import arrays, checks
from kvedge.core.options import AttendOptions, shows_options
from kvedge.core.types import Array, Layout
from kvedge.layer.keys import roll_back, savepoint
from kvedge.layer.layer import KvLayer
from kvedge.layer.reading import memory_of, turned_back
from kvedge.layer.room import reserve, slide

__all__ = ["append_batch", "attend_batch"]


@shows_options
def attend_batch(
    layers: Sequence[KvLayer],
    query: Array,
    *,
    causal: bool = True,
    window: int | None = None,
    sink_tokens: int = 0,
    start: int | Sequence[int] | None = None,
    out: Any = None,
    layout: Layout = "nhd",
    **options: Any,
) -> Any:
    stores = batch.as_stores(layers, LayerStore)
    rows, single = batch.as_query(query, stores, layout)
    num, n_rows, num_heads, head_dim = rows.shape
    views = [store.view() for store in stores]  # taken once: another thread may be writing
    lengths = [view.num_tokens for view in views]
    batch.check_lengths(lengths, n_rows, causal)
    window = batch.window_of(stores, window)
    for store, view in zip(stores, views, strict=True):
        checks.check_reach(store.config, view, n_rows, window, sink_tokens)
    resolved = AttendOptions.make(
        head_dim,
        n_rows,
        num_heads,
        max(lengths),
        num,
        causal=causal,
        window=window,
        sink_tokens=sink_tokens,
        **options,
    )
    starts = checks.as_starts(start, lengths)
    slabs = [
        slab for store, view in zip(stores, views, strict=True) for slab in memory_of(store, view)
    ]
    reads = (arrays.memory_of(query, "query"), *resolved.arrays(), *slabs)
    shape = rows[:, 0].shape if single else arrays.in_nhd(rows, layout).shape
    shape = stores[0].config.out_shape(shape)
    target = arrays.as_target(out, shape, reads=reads, layout="nhd" if single else layout)
    checks.check_finite(rows[:, 0] if single else rows, "query")
    lse = np.empty((num, n_rows, num_heads), np.float32)
    to = target.rows[:, np.newaxis] if single else target.rows
    for i, store in enumerate(stores):
        own = _own_options(resolved, i, lengths[i], starts[i])
        lse[i] = attention.attend(store.stored(views[i], len(rows[i])), rows[i], own, to[i])
    if not resolved.return_lse:
        return target.finish()
    if single:
        return target.finish(), lse[:, 0]
    return target.finish(), (lse.swapaxes(1, 2) if layout == "hnd" else lse)


def _own_options(options: AttendOptions, i: int, length: int, start: int) -> AttendOptions:
    """Those of layer i: its part of the mask, its start, and no window where that hides nothing."""
    own: dict[str, Any] = {"start": start}
    for name in ("mask_bool", "mask_bias"):
        mask = getattr(options, name)
        if mask is not None:
            own[name] = mask[i, :, :, :length]
    if options.window >= length:
        own.update(window=0, sink_tokens=0)
    return replace(options, **own)


def append_batch(
    layers: Sequence[KvLayer], keys: Array, values: Array, *, layout: Layout = "nhd"
) -> None:
    stores = batch.as_stores(layers, LayerStore)
    sides = batch.checked_rows(stores, keys, values, layout)
    if not sides[0].shape[1]:
        return
    pairs = [
        (turned_back(store, some, store.end()), rows)
        for store, some, rows in zip(stores, *sides, strict=True)
    ]
    n = sides[0].shape[1]
    savepoints = [savepoint(store, n) for store in stores]
    try:
        for store, pair in zip(stores, pairs, strict=True):
            store.make_ready(*pair)
        for store in stores:
            reserve(store, n)
        for store, pair in zip(stores, pairs, strict=True):
            store.store_ready(*pair)
    except BaseException:
        for store, saved in zip(stores, savepoints, strict=True):
            roll_back(store, saved)
        raise
    for store in stores:
        slide(store, n)


attend_batch.__doc__ = batch.attend_batch.__doc__
append_batch.__doc__ = batch.append_batch.__doc__
