"""What a layer's stored bytes mean: its keys and values, decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.memory import Held
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
    store: LayerStore, held: Held, values: bool, start: int, stop: int, out: np.ndarray
) -> np.ndarray:
    """Keys, turned to where they are, or values of a range of what was held, written to `out`."""
    store.dequantize(held, values, start, stop, out)
    if store.turns is not None and not values:
        out[:] = store.turns.of_rows(out, held.num_dropped + start)
    return out


def read_sides(
    store: LayerStore, held: Held, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a range, float32 (n, num_kv_heads, channels)."""
    shape = store.config.rows_shape
    keys, values = (np.empty(shape(side, stop - start), np.float32) for side in (False, True))
    read_rows(store, held, False, start, stop, keys)
    read_rows(store, held, True, start, stop, values)
    return keys, values


def read_blocks(
    store: LayerStore, start: int = 0, stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of a range, by default all, some at a time."""
    held, step = store.held(), block_tokens(store.config)
    stop = held.num_tokens if stop is None else stop
    for first in range(start, stop, step):
        yield read_sides(store, held, first, min(stop, first + step))


def turned_back_next(store: LayerStore, keys: np.ndarray) -> np.ndarray:
    """Keys (n, H, D) that are appended next, as they are stored: turned as the last one held.

    What was owed above is forgotten; the caller gives it back if the append is refused.
    """
    held = store.held()
    end = held.num_dropped + held.num_tokens
    if store.turns is not None:
        store.turns = store.turns.within(held.num_dropped, end) or None
    return turned_back(store, keys, end)


def turned_back(store: LayerStore, keys: np.ndarray, position: int) -> np.ndarray:
    """Keys (n, H, D) of tokens from a position on, as they are stored there."""
    return keys if store.turns is None else store.turns.of_rows(keys, position, back=True)


def memory_of(store: LayerStore, held: Held) -> Sequence[np.ndarray]:
    """All memory that what is held lies in."""
    return (*held.slabs, *store.arrays())


def one_row(
    store: LayerStore, values: bool, position: int, head: int, out: np.ndarray | None
) -> np.ndarray:
    """Key or value of one token and KV head; arguments are checked."""
    held, config = store.held(), store.config
    position = checks.check_position(position, held.num_tokens)
    head = checks.check_head(head, config.num_kv_heads)
    shape = config.rows_shape(values, 1)
    out = checks.as_out(out, shape[2:], reads=memory_of(store, held))
    token = np.empty(shape, np.float32)
    out[:] = read_rows(store, held, values, position, position + 1, token)[0, head]
    return out


def one_token(store: LayerStore, values: bool, position: int, out: np.ndarray | None) -> np.ndarray:
    """Keys or values of one token, all heads; arguments are checked."""
    held = store.held()
    position = checks.check_position(position, held.num_tokens)
    shape = store.config.rows_shape(values, 1)
    out = checks.as_out(out, (shape[1] * shape[2],), reads=memory_of(store, held))
    read_rows(store, held, values, position, position + 1, out.reshape(shape))
    return out


def all_tokens(store: LayerStore, values: bool, out: np.ndarray | None) -> np.ndarray:
    """All keys or values; arguments are checked."""
    held = store.held()
    shape = store.config.rows_shape(values, held.num_tokens)
    out = checks.as_out(out, shape, reads=memory_of(store, held))
    return read_rows(store, held, values, 0, held.num_tokens, out)
