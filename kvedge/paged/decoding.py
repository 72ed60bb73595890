"""What a paged cache holds of a sequence, decoded."""

from __future__ import annotations

import numpy as np

from kvedge.core import checks
from kvedge.paged.readings import Reading
from kvedge.paged.sequences import Contents
from kvedge.paged.state import PagedState, PoolState

__all__ = ["read", "read_end"]


def read(
    state: PagedState, values: bool, seq: int, layer: int, position: int | None = None
) -> np.ndarray:
    """Keys or values of a layer's tokens, or of one, float32 (tokens, num_kv_heads, channels)."""
    pool, sequence = state.pool, state.sequence(seq)
    layer = pool.checked_layer(layer)
    reading = state.begin(seq, sequence, layer)
    try:
        start, stop = 0, reading.length
        if position is not None:
            start = checks.check_position(position, stop)
            stop = start + 1
        return _rows(pool, values, layer, reading, start, stop)
    finally:
        pool.readings.end(reading)


def read_end(
    pool: PoolState, contents: Contents, layer: int, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a layer's last tokens, from `start` on; the pool's lock is held."""
    reading = Reading(layer, contents)
    keys, values = (
        _rows(pool, side, layer, reading, start, reading.length) for side in (False, True)
    )
    return keys, values


def _rows(
    pool: PoolState, values: bool, layer: int, reading: Reading, start: int, stop: int
) -> np.ndarray:
    """float32 (stop - start, num_kv_heads, channels) of tokens that a reading holds."""
    parts = pool.read_parts(layer, reading)
    if parts is None:
        store = pool.stores[layer]
        return store.read(values, reading.table, pool.block_size, start, stop)
    out = np.empty(pool.config.rows_shape(values, stop - start), np.float32)
    for part in parts:
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            rows = part.store.read(values, part.table, part.block_size, first, last)
            out[first - start : last - start] = rows
    return out
