"""What a layer holds as arrays of a prefix store's files, and a layer that holds it again.

A block has the rows of its tokens, or their runs. A checkpoint has those behind the last block, and
first and last tokens that are in another format besides: so what goes on from it goes on as the
layer would have, to the bit. A layer that has dropped tokens (a window) is all in checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvedge.core import memory
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import NO_MAP, KeyMap
from kvedge.core.kivi import RUN
from kvedge.core.memory import LayerView, Slabs
from kvedge.core.storage import KEY_VECTORS
from kvedge.files.header import corrupt
from kvedge.files.tensors import check_array, check_numbers
from kvedge.layer import copies
from kvedge.layer.parts import DRAFT, PartContents, kept_rows, last_rows
from kvedge.layer.room import reserve
from kvedge.layer.store import LayerStore

__all__ = [
    "Arrays",
    "block",
    "by_layer",
    "checkpoint",
    "fill",
    "has_last",
    "read",
    "variant_of",
]

Arrays = Mapping[str, np.ndarray]


def variant_of(stores: Iterable[LayerStore]) -> str | None:
    """How keys of layers are stored, a digest, "" for as they are; None: further tokens decide."""
    digest, is_plain = hashlib.sha256(), True
    for store in stores:
        if store.turns is not None or store.evicted_at:
            return None
        if store.key_rule.is_open(store.key_map, store.end()):
            return None
        for vector in store.key_map:
            digest.update(b"-" if vector is None else np.ascontiguousarray(vector).tobytes())
            is_plain = is_plain and vector is None
    return "" if is_plain else digest.hexdigest()


def by_layer(arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of a file, by the number of their layer, as a text."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        number, _, own = name.partition(".")
        found.setdefault(number, {})[own] = array
    return found


def _named(prefix: str, slabs: Slabs) -> dict[str, np.ndarray]:
    named = zip(Slabs._fields, slabs, strict=True)
    return {f"{prefix}{name}": array for name, array in named if array.size}


def _rows(config: LayerConfig, view: LayerView, start: int, stop: int) -> Slabs:
    """Rows of tokens, or whole runs of them."""
    if view.parts is not None and view.parts.runs is not None:
        at = view.parts.runs_at
        return memory.rows_of(view.parts.runs, config.run, start - at, stop // RUN * RUN - at)
    rows = slice(start - view.num_dropped, stop - view.num_dropped)
    return Slabs(*(slab[rows] for slab in view.tokens))


def _maps(key_map: KeyMap) -> dict[str, np.ndarray]:
    pairs = zip(KEY_VECTORS, key_map, strict=True)
    return {name: vector for name, vector in pairs if vector is not None}


def block(config: LayerConfig, view: LayerView, start: int, stop: int) -> dict[str, np.ndarray]:
    """The arrays of a range of tokens, which begins and ends at a run's end."""
    rows = _named("", _rows(config, view, start, stop))
    return rows if start else rows | _maps(view.key_map)


def _first_of_last(config: LayerConfig, stop: int, *, draft: bool) -> int:
    kept = kept_rows(config)
    return max(0, stop - (kept if draft else max(kept - DRAFT, 0)))


def has_last(
    config: LayerConfig,
    view: LayerView,
    stop: int,
    *,
    window: int | None = None,
    draft: bool = False,
) -> bool:
    """Whether a layer still has what it read at a position, and what it would read from there."""
    if window is not None and view.num_dropped > max(0, stop - window + 1):
        return False
    parts = view.parts
    if parts is None:
        return True
    first = max(_first_of_last(config, stop, draft=draft), view.num_dropped // RUN * RUN)
    there = first == stop or parts.last_at <= first
    return there and (not config.in_runs or parts.last_at <= stop // RUN * RUN)


def checkpoint(
    config: LayerConfig,
    view: LayerView,
    start: int,
    stop: int,
    *,
    first: int = 0,
    draft: bool = False,
) -> dict[str, np.ndarray]:
    """The arrays of tokens from a block's end on, and what going on from `stop` needs besides.

    The layer that holds them again has dropped those before `first`. With `draft`,
    :data:`kvedge.layer.parts.DRAFT` more of the last tokens, so that rejected drafts leave no
    trace. :func:`has_last` has to be true.
    """
    begin = max(view.num_dropped, first)
    start = max(start, begin)
    arrays = _named("", _rows(config, view, start // RUN * RUN if config.in_runs else start, stop))
    arrays |= _maps(view.key_map)
    arrays["at"] = np.array([begin, start, stop], np.int64)
    parts = view.parts
    if parts is not None:
        low, high = begin - parts.first_at, min(config.sinks, stop) - parts.first_at
        of_first = slice(low, high) if 0 <= low < high else slice(0)
        begin = begin // RUN * RUN if config.in_runs else begin  # runs need those before it
        low = max(_first_of_last(config, stop, draft=draft), begin, parts.last_at) - parts.last_at
        high = max(stop - parts.last_at, 0)
        arrays |= _named("first.", Slabs(*(array[of_first] for array in parts.first)))
        arrays |= _named("last.", Slabs(*(array[low:high] for array in parts.last)))
    return arrays


def _joined(
    number: int,
    files: Sequence[Arrays],
    config: LayerConfig,
    count: int,
    prefix: str = "",
    slabs: Slabs | None = None,
) -> Slabs:
    """What files hold of `count` tokens, checked, at the front of slabs or in arrays of its own."""
    shapes = memory.slab_layout(replace(config, capacity=RUN, limit=None))
    joined = []
    for i, (name, (shape, dtype), step) in enumerate(
        zip(Slabs._fields, shapes, memory.tokens_per_rows(config), strict=True)
    ):
        whole, full = (count // step, *shape[1:]), f"{number}.{prefix}{name}"
        rows = np.empty(whole, dtype) if slabs is None else slabs[i][: count // step]
        joined.append(rows)
        if not np.prod(whole):
            continue
        found = [np.atleast_1d(a[prefix + name]) for a in files if prefix + name in a]
        if sum(map(len, found)) != whole[0]:
            corrupt(f"tensor {full} has {sum(map(len, found))} rows where {whole[0]} belong")
        at = 0
        for array in found:
            check_array({full: array}, full, dtype, (len(array), *shape[1:]))
            room = rows[at : at + len(array)]  # of the last file the first tokens may be enough
            room[...] = array[: len(room)]
            at += len(array)
        check_numbers(full, rows, config)
    return Slabs(*joined)


class Contents(NamedTuple):
    """What a layer is to hold, whose tokens are in its slabs."""

    num_tokens: int
    key_map: KeyMap
    num_dropped: int
    parts: tuple[PartContents, ...]


def read(store: LayerStore, number: int, files: Sequence[Arrays], stop: int) -> Contents:
    """Put the tokens before a position into the slabs of an empty layer, which it holds not yet.

    They are in the arrays of the layer in files, in order.

    Raises
    ------
    CorruptFileError
        The arrays are none of such a layer.
    """
    last, config = files[-1], store.config
    dropped, start, end = 0, 0, stop
    if "at" in last:
        at = check_array(last, "at", np.int64, (3,))
        dropped, start, end = map(int, at)
    if not 0 <= dropped <= start <= end or end < stop or (config.recent_dtype and end != stop):
        corrupt(f"layer {number} is at {dropped}, {start}, {end}, which {stop} is not")
    if dropped:
        files = files[-1:]
    tokens = stop - dropped
    if not config.in_runs:
        count = sum(len(np.atleast_1d(a.get("key_codes", []))) for a in files)
        if count < tokens:
            corrupt(f"layer {number} has {count} tokens of {tokens}")
    key_map = _key_map(number, config, {**files[0], **last})
    reserve(store, tokens)
    config = store.config
    if not config.in_runs:
        slabs = Slabs(*(slab[:tokens] for slab in store.slabs))
        _joined(number, files, config.plain, count, slabs=slabs)
    parts: list[PartContents] = []
    if config.recent_dtype:
        for prefix in ("first.", "last."):
            codes = last.get(f"{prefix}key_codes")
            count = 0 if codes is None else len(np.atleast_1d(codes))
            if count > min(stop, config.sinks if prefix == "first." else last_rows(config)):
                corrupt(f"layer {number} has {count} {prefix[:-1]} tokens")
            own = _joined(number, files[-1:], config.part_config, count, prefix)
            parts.append(PartContents(own, NO_MAP))
    if config.in_runs:
        if len(parts[1].arrays.key_codes) < stop % RUN:
            corrupt(f"layer {number} lacks tokens behind its runs")
        begin, view = dropped // RUN * RUN, store.snapshot()
        assert view.parts is not None and view.parts.runs is not None
        runs = view.parts.runs
        if stop // RUN * RUN - begin <= memory.tokens_of_runs(runs, config):
            _joined(number, files, config.run, stop // RUN * RUN - begin, slabs=runs)
        else:  # it begins within a run
            runs = _joined(number, files, config.run, stop // RUN * RUN - begin)
        parts.append(PartContents(runs, key_map))
    return Contents(tokens, key_map, dropped, tuple(parts))


def _key_map(number: int, config: LayerConfig, arrays: Arrays) -> KeyMap:
    shape = (config.num_kv_heads, config.head_dim)
    vectors = [
        np.array(check_array(arrays, name, np.float32, shape)) if name in arrays else None
        for name in KEY_VECTORS
    ]
    for vector in vectors:
        if vector is not None and not np.isfinite(vector).all():
            corrupt(f"layer {number} has keys over or less what is not finite")
    if vectors[1] is not None and not (vectors[1] > 0).all():
        corrupt(f"layer {number} has keys over what is not positive")
    return KeyMap(*vectors)


def fill(store: LayerStore, number: int, files: Sequence[Arrays], stop: int) -> None:
    """Let an empty layer hold what files hold before a position; as :func:`read`."""
    own = read(store, number, files, stop)
    copies.take(store, own.num_tokens, own.key_map, store.key_rule, own.num_dropped, own.parts)
