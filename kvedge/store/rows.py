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
from kvedge.core.memory import Slabs
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
    "contents",
    "fill",
    "has_last",
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


def _form(config: LayerConfig) -> LayerConfig:
    return config.run if config.in_runs else config.plain


def _named(prefix: str, slabs: Slabs) -> dict[str, np.ndarray]:
    named = zip(Slabs._fields, slabs, strict=True)
    return {f"{prefix}{name}": array for name, array in named if array.size}


def _rows(store: LayerStore, start: int, stop: int) -> Slabs:
    """Rows of tokens, or whole runs of them."""
    view, config = store.snapshot(), store.config
    if config.in_runs:
        at = view.parts.runs_at
        return memory.rows_of(view.parts.runs, config.run, start - at, stop // RUN * RUN - at)
    rows = slice(start - view.num_dropped, stop - view.num_dropped)
    return Slabs(*(slab[rows] for slab in view.tokens))


def _maps(key_map: KeyMap) -> dict[str, np.ndarray]:
    pairs = zip(KEY_VECTORS, key_map, strict=True)
    return {name: vector for name, vector in pairs if vector is not None}


def block(store: LayerStore, start: int, stop: int) -> dict[str, np.ndarray]:
    """The arrays of a range of tokens, which begins and ends at a run's end."""
    return _named("", _rows(store, start, stop)) | (_maps(store.key_map) if not start else {})


def _first_of_last(config: LayerConfig, stop: int, *, draft: bool) -> int:
    kept = kept_rows(config)
    return max(0, stop - (kept if draft else max(kept - DRAFT, 0)))


def has_last(store: LayerStore, stop: int, *, draft: bool = False) -> bool:
    """Whether a layer still has the last tokens before a position as it read them there."""
    view, config = store.snapshot(), store.config
    parts = view.parts
    if parts is None:
        return True
    first = max(_first_of_last(config, stop, draft=draft), view.num_dropped // RUN * RUN)
    there = first == stop or parts.last_at <= first
    return there and (not config.in_runs or parts.last_at <= stop // RUN * RUN)


def checkpoint(
    store: LayerStore, start: int, stop: int, *, draft: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of tokens from a block's end on, and what going on from `stop` needs besides.

    With `draft`, :data:`kvedge.layer.parts.DRAFT` more of the last tokens, so that rejected drafts
    leave no trace. :func:`has_last` has to be true.
    """
    view, config = store.snapshot(), store.config
    start = max(start, view.num_dropped)
    arrays = _named("", _rows(store, start // RUN * RUN if config.in_runs else start, stop))
    arrays |= _maps(store.key_map)
    arrays["at"] = np.array([view.num_dropped, start, stop], np.int64)
    parts = view.parts
    if parts is not None:
        begin = view.num_dropped
        low, high = begin - parts.first_at, min(config.sinks, stop) - parts.first_at
        of_first = slice(low, high) if 0 <= low < high else slice(0)
        begin = begin // RUN * RUN if config.in_runs else begin  # runs need those before it
        low = max(_first_of_last(config, stop, draft=draft), begin, parts.last_at) - parts.last_at
        high = max(stop - parts.last_at, 0)
        arrays |= _named("first.", Slabs(*(array[of_first] for array in parts.first)))
        arrays |= _named("last.", Slabs(*(array[low:high] for array in parts.last)))
    return arrays


def _joined(
    number: int, parts: Sequence[Arrays], config: LayerConfig, count: int, prefix: str = ""
) -> Slabs:
    """The slabs of `count` tokens, joined from files and checked."""
    shapes = memory.slab_layout(replace(config, capacity=RUN, limit=None))
    slabs = []
    for name, (shape, dtype), step in zip(
        Slabs._fields, shapes, memory.tokens_per_rows(config), strict=True
    ):
        whole = (count // step, *shape[1:])
        if not np.prod(whole):
            slabs.append(np.zeros(whole, dtype))
            continue
        found = [np.atleast_1d(a[prefix + name]) for a in parts if prefix + name in a]
        full = f"{number}.{prefix}{name}"
        for array in found:
            check_array({full: array}, full, dtype, (len(array), *shape[1:]))
        rows = found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, dtype)])
        check_array({full: rows}, full, dtype, whole)
        check_numbers(full, rows, config)
        slabs.append(rows)
    return Slabs(*slabs)


class Contents(NamedTuple):
    """The tokens of a layer."""

    rows: Slabs
    key_map: KeyMap
    num_dropped: int
    parts: list[PartContents]


def contents(config: LayerConfig, number: int, files: Sequence[Arrays], stop: int) -> Contents:
    """The tokens before a position, from the arrays of a layer in files, in order.

    Raises
    ------
    CorruptFileError
        The arrays are none of such a layer.
    """
    last = files[-1]
    dropped, start, end = 0, 0, stop
    if "at" in last:
        at = check_array(last, "at", np.int64, (3,))
        dropped, start, end = map(int, at)
    if not 0 <= dropped <= start <= end or end < stop or (config.recent_dtype and end != stop):
        corrupt(f"layer {number} is at {dropped}, {start}, {end}, which {stop} is not")
    if dropped:
        files = files[-1:]
    found = {n: vector for n, vector in {**files[0], **last}.items() if n in KEY_VECTORS}
    shape = (config.num_kv_heads, config.head_dim)
    vectors = [
        check_array(found, name, np.float32, shape) if name in found else None
        for name in KEY_VECTORS
    ]
    for vector in vectors:
        if vector is not None and not np.isfinite(vector).all():
            corrupt(f"layer {number} has keys over or less what is not finite")
    if vectors[1] is not None and not (vectors[1] > 0).all():
        corrupt(f"layer {number} has keys over what is not positive")
    key_map = NO_MAP if not found else KeyMap(*map(_copy, vectors))
    form, tokens = _form(config), stop - dropped
    parts: list[PartContents] = []
    if config.in_runs:
        begin = dropped // RUN * RUN
        runs = _joined(number, files, form, stop // RUN * RUN - begin)
        rows = _joined(number, (), replace(config.plain, capacity=1), tokens)
    else:
        count = sum(len(np.atleast_1d(a.get("key_codes", []))) for a in files)
        if count < tokens:
            corrupt(f"layer {number} has {count} tokens of {tokens}")
        rows = _joined(number, files, form, count)
        rows = Slabs(*(array[:tokens] for array in rows))
    if config.recent_dtype:
        own = config.part_config
        for prefix in ("first.", "last."):
            codes = last.get(f"{prefix}key_codes")
            count = 0 if codes is None else len(np.atleast_1d(codes))
            if count > min(stop, config.sinks if prefix == "first." else last_rows(config)):
                corrupt(f"layer {number} has {count} {prefix[:-1]} tokens")
            parts.append(PartContents(_joined(number, files[-1:], own, count, prefix), NO_MAP))
        if config.in_runs and len(parts[1].arrays.key_codes) < stop % RUN:
            corrupt(f"layer {number} lacks tokens behind its runs")
        if config.in_runs:
            parts.append(PartContents(runs, key_map))
    return Contents(rows, key_map, dropped, parts)


def fill(store: LayerStore, number: int, files: Sequence[Arrays], stop: int) -> None:
    """Let an empty layer hold the :func:`contents`."""
    own = contents(store.config, number, files, stop)
    reserve(store, stop - own.num_dropped)
    copies.fill(store, own.rows, own.key_map, store.key_rule, own.num_dropped, own.parts)


def _copy(vector: np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else np.array(vector)
