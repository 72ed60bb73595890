"""Several layers in one call, in NumPy: one after the other, once all is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvedge import batch
from kvedge.backends.numpy import attention
from kvedge.backends.numpy.layer import _LayerCore
from kvedge.core import arrays, checks
from kvedge.core.options import AttendOptions, takes_options_of
from kvedge.core.types import Array, Layout

__all__ = ["append_batch", "attend_batch"]


@takes_options_of(batch.attend_batch)
def attend_batch(
    layers: Sequence[Any],
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
    layers = batch.as_layers(layers, _LayerCore)
    rows, single = batch.as_query(query, layers, layout)
    num, n_rows, num_heads, head_dim = rows.shape
    held = [layer._held() for layer in layers]  # taken once: another thread may be writing
    lengths = [one.num_tokens for one in held]
    batch.check_lengths(lengths, n_rows, causal)
    window = batch.window_of(layers, window)
    for layer, one in zip(layers, held, strict=True):
        checks.check_reach(layer._config, one, n_rows, window, sink_tokens)
    made = AttendOptions.make(
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
        slab for layer, one in zip(layers, held, strict=True) for slab in layer._memory_of(one)
    ]
    reads = (arrays.memory_of(query, "query"), *made.arrays(), *slabs)
    shape = rows[:, 0].shape if single else arrays.in_nhd(rows, layout).shape
    shape = layers[0]._config.out_shape(shape)
    target = arrays.as_target(out, shape, reads=reads, layout="nhd" if single else layout)
    checks.check_finite(rows[:, 0] if single else rows, "query")
    lse = np.empty((num, n_rows, num_heads), np.float32)
    to = target.rows[:, np.newaxis] if single else target.rows
    for i, layer in enumerate(layers):
        own = _own_options(made, i, lengths[i], starts[i])
        lse[i] = attention.attend(layer._stored(held[i]), rows[i], own, to[i])
    if not made.return_lse:
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
    layers: Sequence[Any], keys: Array, values: Array, *, layout: Layout = "nhd"
) -> None:
    layers = batch.as_layers(layers, _LayerCore)
    sides = batch.checked_rows(layers, keys, values, layout)
    if not sides[0].shape[1]:
        return
    pairs = [
        (layer._turned_back(some, layer._end()), rows)
        for layer, some, rows in zip(layers, *sides, strict=True)
    ]
    marks = [layer._mark() for layer in layers]
    try:
        for layer, pair in zip(layers, pairs, strict=True):
            layer._make_ready(*pair)
        for layer in layers:
            layer._reserve(sides[0].shape[1])
    except BaseException:
        for layer, mark in zip(layers, marks, strict=True):
            layer._return_to(mark)
        raise
    for layer, pair in zip(layers, pairs, strict=True):
        layer._store_ready(*pair)
        layer._slide(sides[0].shape[1])


attend_batch.__doc__ = batch.attend_batch.__doc__
append_batch.__doc__ = batch.append_batch.__doc__
