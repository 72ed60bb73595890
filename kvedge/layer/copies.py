"""New layers, and layers that take over the stored bytes of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from kvedge.core import memory
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.layer import keys
from kvedge.layer.parts import PartContents, contents_of, kept_rows, parts_of_contents
from kvedge.layer.store import LayerStore, plain_store
from kvedge.rope import Turns

__all__ = [
    "RowCheckpoint",
    "Stored",
    "copy_of",
    "fill",
    "new_store",
    "restore_row",
    "row_checkpoint",
    "stored",
    "take",
]

_Store = TypeVar("_Store", bound=LayerStore)

# What a pickle of a layer holds behind the name of its class.
Stored = tuple[
    LayerConfig,
    "list[np.ndarray]",
    KeyMap,
    KeyRule,
    int,
    "tuple[PartContents, ...]",
    "Turns | None",
    int,
]


def new_store(
    kind: type[_Store],
    config: LayerConfig,
    key_offset: np.ndarray | str | None = None,
    key_scale: np.ndarray | str | None = None,
) -> _Store:
    """An empty store, from checked arguments.

    A key offset or scale that is "auto" is taken from the first tokens.
    """
    store = plain_store(kind, config)
    key_map = KeyMap(
        None if isinstance(key_offset, str) else key_offset,
        None if isinstance(key_scale, str) else key_scale,
    )
    rule = KeyRule(isinstance(key_offset, str), isinstance(key_scale, str))
    keys.store_as(store, key_map, rule)
    return store


def fill(
    store: LayerStore,
    tokens: Sequence[np.ndarray],
    key_map: KeyMap,
    rule: KeyRule,
    num_dropped: int,
    parts: Sequence[PartContents],
    turns: Turns | None = None,
    evicted_at: int = 0,
) -> None:
    """Take over the stored bytes of another layer; this one is empty."""
    n = len(tokens[0])
    memory.copy_tokens(tokens, store.slabs, n)
    take(store, n, key_map, rule, num_dropped, parts)
    store.turns, store.evicted_at = turns, evicted_at


def take(
    store: LayerStore,
    num_tokens: int,
    key_map: KeyMap,
    rule: KeyRule,
    num_dropped: int,
    parts: Sequence[PartContents],
) -> None:
    """Hold tokens that were put into the slabs of an empty layer."""
    own = parts_of_contents(parts, store.config, num_dropped, num_dropped + num_tokens)
    store.holding(num_tokens, num_dropped, own, key_map=key_map)()
    keys.store_as(store, store.key_map, rule)


def copy_of(store: _Store, num_dropped: int | None = None) -> _Store:
    """An independent store with the same tokens and capacity; it belongs to no cache.

    With `num_dropped` so many tokens have gone before it, which the other may not know of: of runs
    a multiple of 32 more or fewer.
    """
    view, config = store.snapshot(), store.config  # in this order: a writer may replace both
    # It may have moved to fewer rows since.
    rows = max(config.capacity, view.num_tokens)
    other = new_store(type(store), replace(config, capacity=rows))
    end = view.num_dropped + view.num_tokens
    parts = contents_of(view, config, view.num_dropped, end, copy=False)
    dropped = view.num_dropped if num_dropped is None else num_dropped
    more = dropped, parts, store.turns, store.evicted_at
    fill(other, view.tokens, store.key_map, store.key_rule, *more)
    return other


def stored(store: LayerStore) -> Stored:
    """All that a layer holds, copied."""
    view, config = store.snapshot(), store.config  # in this order: as in :func:`copy_of`
    tokens = [np.array(rows) for rows in view.tokens]
    end = view.num_dropped + view.num_tokens
    parts = contents_of(view, config, view.num_dropped, end, copy=True)
    more = view.num_dropped, parts, store.turns, store.evicted_at
    return config, tokens, store.key_map, store.key_rule, *more


class RowCheckpoint(NamedTuple):
    """What a layer needs to go back to where it was, all that it held being still there."""

    num_tokens: int
    last: memory.Slabs | None  # the last tokens in their other format, which going on lets go
    rows: PartContents | None  # all tokens, which more of them may have encoded anew

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        copies = ([] if self.last is None else [self.last]) + (
            [] if self.rows is None else [self.rows.arrays]
        )
        return sum(array.nbytes for slabs in copies for array in slabs)


def row_checkpoint(store: LayerStore) -> RowCheckpoint:
    """Where a layer without a window is."""
    rows, last, view = None, None, store.snapshot()
    if view.parts is not None:
        since = view.num_dropped + view.num_tokens - kept_rows(store.config)
        last = memory.Slabs(*map(np.array, view.parts.since(since).last))
    if store.key_rule.is_open(store.key_map, store.end()):
        tokens = memory.Slabs(*(slab.copy() for slab in view.tokens))
        rows = PartContents(tokens, view.key_map)
    return RowCheckpoint(view.num_tokens, last, rows)


def restore_row(store: LayerStore, checkpoint: RowCheckpoint) -> None:
    """Go back to a checkpoint; the layer has only been appended to since, never cut below it."""
    store.set_len(checkpoint.num_tokens)
    if checkpoint.rows is not None:
        slabs = memory.reserve_slabs(store.config)
        memory.copy_tokens(checkpoint.rows.arrays, slabs, checkpoint.num_tokens)
        store.bind(slabs, store.config, checkpoint.rows.key_map)
        keys.store_as(store, checkpoint.rows.key_map, store.key_rule)
    if checkpoint.last is not None:
        view = store.snapshot()
        at = store.end() - len(checkpoint.last.key_codes)
        parts = view.parts._replace(last=checkpoint.last, last_at=at)
        store.holding(view.num_tokens, view.num_dropped, parts, view.start)()
