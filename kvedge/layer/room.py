"""Room in a layer: growing, dropping first tokens, and moving to other slabs for either.

Rows are never moved below a reader. A layer that comes to the end of its slabs takes new ones and
copies what it holds to their front; the old ones live as long as somebody reads them.
"""

from __future__ import annotations

from dataclasses import replace

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.kivi import RUN
from kvedge.core.memory import LayerView
from kvedge.layer.store import LayerStore

__all__ = [
    "FIRST_ROWS",
    "first_rows",
    "keeps",
    "reserve",
    "restarts",
    "room_until",
    "set_end",
    "shrink",
    "slide",
]

FIRST_ROWS = 256  # rows that a growing layer is made with; it doubles from there


def first_rows(limit: int | None, tokens: int = 0, window: int | None = None) -> int:
    """Rows of a new layer that shall hold so many tokens now, and at most `limit`."""
    if limit is not None:
        return limit
    rows = max(FIRST_ROWS, 1 << tokens.bit_length())
    return rows if window is None else max(tokens, min(rows, 2 * window))


def _rows_for(tokens: int, config: LayerConfig, *, drops: bool) -> int:
    """Rows of the next slabs, for a layer that shall hold `tokens`.

    Half of the rows are free after a move, so that moving costs a token O(1) on average: a copy of
    at most one row, or of two where the layer grows.
    """
    if config.window is not None:  # twice the window, but where a prompt needs more
        return max(tokens, min(max(2 * tokens, FIRST_ROWS), 2 * config.window))
    if drops:  # the rows of dropped tokens are used up too
        most = None if config.limit is None else 2 * config.limit
        rows = max(2 * tokens, FIRST_ROWS)
    else:
        most = config.limit
        rows = max(tokens, 2 * config.capacity, FIRST_ROWS) if most is None else most
    return rows if most is None else min(rows, most)


def reserve(store: LayerStore, n: int) -> None:
    """Have room for `n` more tokens, or raise what says that there cannot be."""
    view, config = store.view(), store.config
    checks.check_room(config, view.num_tokens, n)
    if n > config.capacity - view.start - view.num_tokens:
        _move(store, view.num_tokens + n)


def room_until(store: LayerStore) -> int:
    """Position up to which tokens can be appended without moving."""
    view, config = store.view(), store.config
    rows = config.capacity - view.start
    if config.limit is not None:
        rows = min(rows, config.limit)
    return view.num_dropped + rows


def keeps(store: LayerStore, length: int, view: LayerView | None = None) -> bool:
    """Whether it can go to a position: what the next token there sees was not dropped."""
    view = store.view() if view is None else view
    window = store.config.window
    if not view.num_dropped or not length:
        return True
    if window is None:
        return 0 < store.evicted_at <= length
    return length - view.num_dropped >= window - 1


def set_end(store: LayerStore, length: int) -> None:
    """Go to a position that :func:`keeps` is true of."""
    if restarts(store, length):
        store.restart()
    else:
        store.set_len(length - store.view().num_dropped)


def restarts(store: LayerStore, length: int) -> bool:
    """Whether going to a position begins anew, at row 0."""
    return not length and store.view().num_dropped > 0


def slide(store: LayerStore, n: int) -> None:
    """Drop what no row sees from now on, once `n` tokens have been appended.

    Rows of these may still be attended: what they see stays until the next append.
    """
    window = store.config.window
    if window is not None:
        unseen = len(store) - n - (window - 1)
        if unseen > 0 and n > 0:
            store.drop(unseen)


def shrink(store: LayerStore) -> None:
    """Give memory back where a layer holds a small part of what it has room for."""
    config, tokens = store.config, len(store)
    rows = max(2 * tokens, FIRST_ROWS)
    if config.in_runs or config.capacity <= 4 * rows:
        return
    config, view = replace(config, capacity=rows), store.view()
    try:
        slabs = memory.reserve_slabs(config)
    except MemoryError:  # then it stays where it is
        return
    memory.copy_tokens(view.tokens, slabs, tokens)
    store.bind(slabs, config)


def _move(store: LayerStore, tokens: int) -> None:
    """Take other slabs with room for `tokens`, those that are held included."""
    view = store.view()
    if store.config.in_runs:  # the first one moves along
        tokens += view.start % RUN
    rows = _rows_for(tokens, store.config, drops=view.start > 0)
    config = replace(store.config, capacity=rows)
    slabs = memory.reserve_slabs(config)
    # Up to the last that was written: a cache may go back to tokens above the length.
    written = slice(view.start, view.start + store.written())
    memory.copy_tokens([slab[written] for slab in view.slabs], slabs, store.written())
    store.bind(slabs, config)
