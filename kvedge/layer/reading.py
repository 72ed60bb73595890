"""What a layer's stored bytes mean: its keys and values, decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.memory import LayerView
from kvedge.layer.store import LayerStore

__all__ = [
    "all_tokens",
    "block_tokens",
    "memory_of",
    "one_row",
    "one_token",
    "read_blocks",
    "read_rows",
    "read_sides",
    "turned_back",
    "turned_back_next",
]

_BLOCK_VALUES = 1 << 19  # float32 values worked on at a time: 2 MiB


def block_tokens(config: LayerConfig) -> int:
    """Tokens that are worked on at a time."""
    return max(1, _BLOCK_VALUES // (config.num_kv_heads * config.widest))


def read_rows(
    store: LayerStore, view: LayerView, values: bool, start: int, stop: int, out: np.ndarray
) -> np.ndarray:
    """Keys, turned to where they are, or values of a range of a view, written to `out`."""
    store.dequantize(view, values, start, stop, out)
    if store.turns is not None and not values:
        out[:] = store.turns.of_rows(out, view.num_dropped + start)
    return out


def read_sides(
    store: LayerStore, view: LayerView, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a range, float32 (n, num_kv_heads, channels)."""
    shape = store.config.rows_shape
    keys, values = (np.empty(shape(side, stop - start), np.float32) for side in (False, True))
    read_rows(store, view, False, start, stop, keys)
    read_rows(store, view, True, start, stop, values)
    return keys, values


def read_blocks(
    store: LayerStore, start: int = 0, stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of a range, by default all, some at a time."""
    view, step = store.view(), block_tokens(store.config)
    stop = view.num_tokens if stop is None else stop
    for first in range(start, stop, step):
        yield read_sides(store, view, first, min(stop, first + step))


def turned_back_next(store: LayerStore, keys: np.ndarray) -> np.ndarray:
    """Keys (n, H, D) that are appended next, as they are stored: turned as the last one held.

    What was owed above is forgotten; the caller gives it back if the append is refused.
    """
    view = store.view()
    end = view.num_dropped + view.num_tokens
    if store.turns is not None:
        store.turns = store.turns.within(view.num_dropped, end) or None
    return turned_back(store, keys, end)


def turned_back(store: LayerStore, keys: np.ndarray, position: int) -> np.ndarray:
    """Keys (n, H, D) of tokens from a position on, as they are stored there."""
    return keys if store.turns is None else store.turns.of_rows(keys, position, back=True)


def memory_of(store: LayerStore, view: LayerView) -> Sequence[np.ndarray]:
    """All memory that a view lies in."""
    return (*view.slabs, *store.arrays())


def one_row(
    store: LayerStore, values: bool, position: int, head: int, out: np.ndarray | None
) -> np.ndarray:
    """Key or value of one token and KV head; arguments are checked."""
    view, config = store.view(), store.config
    position = checks.check_position(position, view.num_tokens)
    head = checks.check_head(head, config.num_kv_heads)
    shape = config.rows_shape(values, 1)
    out = checks.as_out(out, shape[2:], reads=memory_of(store, view))
    token = np.empty(shape, np.float32)
    out[:] = read_rows(store, view, values, position, position + 1, token)[0, head]
    return out


def one_token(store: LayerStore, values: bool, position: int, out: np.ndarray | None) -> np.ndarray:
    """Keys or values of one token, all heads; arguments are checked."""
    view = store.view()
    position = checks.check_position(position, view.num_tokens)
    shape = store.config.rows_shape(values, 1)
    out = checks.as_out(out, (shape[1] * shape[2],), reads=memory_of(store, view))
    read_rows(store, view, values, position, position + 1, out.reshape(shape))
    return out


def all_tokens(store: LayerStore, values: bool, out: np.ndarray | None) -> np.ndarray:
    """All keys or values; arguments are checked."""
    view = store.view()
    shape = store.config.rows_shape(values, view.num_tokens)
    out = checks.as_out(out, shape, reads=memory_of(store, view))
    return read_rows(store, view, values, 0, view.num_tokens, out)
