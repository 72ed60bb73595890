"""Keys moved to other positions of their rotary embedding, and stored anew where that must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvedge.core import checks
from kvedge.core.float_mode import in_default_mode
from kvedge.core.kivi import RUN
from kvedge.core.memory import LayerView
from kvedge.errors import InvalidArgumentError
from kvedge.layer.keys import whole_or_nothing
from kvedge.layer.parts import Parts, with_keys
from kvedge.layer.reading import block_tokens
from kvedge.layer.store import LayerStore, rows_alone, scratch_store
from kvedge.rope import NO_TURNS, Rope, Rotation, Turn, Turns, turned

__all__ = ["SQRT2", "check_shift", "check_turn", "owe", "shift", "store_turned", "store_turns"]

SQRT2 = 2.0**0.5  # by which turning a key makes its largest channel larger, at most


def shift(
    store: LayerStore, delta: int, rope: object, start: int = 0, stop: int | None = None
) -> None:
    """Shift the keys of a range of tokens; all or nothing."""
    owe([(store, check_shift(store, delta, rope, start, stop))])


def owe(stores: Sequence[tuple[LayerStore, Turns]]) -> None:
    """Let layers owe what :func:`check_shift` gave; all or nothing."""
    many = [store for store, turns in stores if turns.are_many]
    with whole_or_nothing(many, max(map(len, many), default=0) + RUN, 0):
        for store, turns in stores:
            if turns.are_many:
                store.turns = turns
                store_turns(store)
    for store, turns in stores:
        if not turns.are_many:
            store.turns = turns or None


def store_turns(store: LayerStore) -> None:
    """Store all keys turned, so that none are still to be turned."""
    turns = store.turns or NO_TURNS
    for first, last, turn in turns.ranges(store.view().num_dropped, store.end()):
        if turn:
            store_turned(store, turn, first, last)
            turns = turns.spliced(first, last, NO_TURNS, first, ends=False)
            store.turns = turns  # should the next one be broken off
    store.turns = None


def check_shift(
    store: LayerStore, delta: int, rope: object, start: int = 0, stop: int | None = None
) -> Turns:
    """Raise what :func:`shift` would raise, or return what is owed after it.

    Quick unless keys are huge.
    """
    if not isinstance(rope, Rope):
        raise InvalidArgumentError(f"rope must be a kvedge.Rope, not {checks.describe(rope)}")
    rotation = Rotation.of(rope, delta, store.config.head_dim)
    start, stop = checks.check_range(start, stop, len(store))
    turns, dropped = store.turns or NO_TURNS, store.view().num_dropped
    if not delta or start == stop:
        return turns
    checks.check_finite(np.array(rotation.angles), "the angles of the turn")
    # Tokens that were dropped, or lie above the length, are not returned to after a shift.
    turns = turns.within(dropped, dropped + len(store)).shifted(
        rotation,
        dropped + start if start else 0,
        dropped + stop if stop < len(store) else None,
    )
    for first, last, turn in turns.ranges(dropped + start, dropped + stop):
        check_turn(store, turn, first, last)
    return turns


def check_turn(store: LayerStore, turn: Turn, start: int, stop: int) -> None:
    """Raise unless turned keys of some positions fit what they are stored in."""
    if not turn or not _may_overflow(store, turn, start, stop):
        return
    if not store.config.in_runs:
        _encoded(store, turn, start, stop)
    _turned_parts(store, turn, start, stop)


def store_turned(store: LayerStore, turn: Turn, start: int, stop: int) -> None:
    """Store the keys of some positions anew, turned, in their other format too."""
    view, parts = _turned_parts(store, turn, start, stop)
    hold = store.holding(view.num_tokens, view.num_dropped, parts, view.start)
    if not store.config.in_runs:
        row = view.start + start - view.num_dropped
        codes, scales = _encoded(store, turn, start, stop)
        view.slabs.key_codes[row : row + len(codes)] = codes
        view.slabs.key_scales[row : row + len(codes)] = scales
    hold()


def _turned_parts(
    store: LayerStore, turn: Turn, start: int, stop: int
) -> tuple[LayerView, Parts | None]:
    """What a layer holds now, and its parts with the keys of some positions turned."""
    view = store.snapshot()
    if view.parts is None:
        return view, None

    def turned_by(keys: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # refused when it is encoded
            return turned(turn, keys).astype(np.float32)

    return view, with_keys(view.parts, store.config, view.key_map, turned_by, start, stop)


def _may_overflow(store: LayerStore, turn: Turn, start: int, stop: int) -> bool:
    """Whether some turned key could pass the range of what it is stored in."""
    config, view = store.config, store.view()
    if config.recent_dtype:  # in several formats: by the keys as they are read
        keys = np.empty(config.rows_shape(False, stop - start), np.float32)
        store.dequantize(view, False, start - view.num_dropped, stop - view.num_dropped, keys)
        body = config.run if config.in_runs else config
        limits = (stored.key_format.limit(stored.key_rows) for stored in (body, config.part_config))
        if view.key_map.is_plain:
            return 1.02 * SQRT2 * float(np.abs(keys).max(initial=0.0)) > min(limits)
        return True
    tokens, key_map = view.tokens, view.key_map
    offset = 0.0 if key_map.offset is None else float(np.abs(key_map.offset).max())
    low, high = 1.0, 1.0
    if key_map.scale is not None:
        low, high = float(key_map.scale.min()), float(key_map.scale.max())
    form, rows = config.key_format, slice(start - view.num_dropped, stop - view.num_dropped)
    largest = form.largest(tokens.key_codes[rows], tokens.key_scales[rows]) * high + offset
    # A rotation makes a channel at most sqrt(2) times the largest; the rest is for rounding.
    bound = 1.01 * (SQRT2 * largest + offset) / low
    return bound > form.limit(config.key_rows)


@in_default_mode
def _encoded(store: LayerStore, turn: Turn, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the turned keys of rows, made by a store of the same kind."""
    own, dropped = rows_alone(store), store.view().num_dropped
    row = store.view().start - dropped
    start, stop, view, config = start + row, stop + row, own.view(), own.config
    step = block_tokens(config)
    scratch = scratch_store(own, max(1, min(step, stop - start)), own.key_map)
    codes = np.empty_like(view.tokens.key_codes[start:stop])
    scales = np.empty_like(view.tokens.key_scales[start:stop])
    keys = np.empty(config.rows_shape(False, scratch.config.capacity), np.float32)
    values = np.zeros(config.rows_shape(True, scratch.config.capacity), np.float32)
    for first in range(start, stop, step):
        last = min(stop, first + step)
        block = own.dequantize(view, False, first, last, keys[: last - first])
        with np.errstate(over="ignore"):  # refused when it is appended
            rows = turned(turn, block).astype(np.float32)
        scratch.set_len(0)
        scratch.append(rows, values[: last - first])
        at = slice(first - start, last - start)
        codes[at] = scratch.slabs.key_codes[: last - first]
        scales[at] = scratch.slabs.key_scales[: last - first]
    return codes, scales
