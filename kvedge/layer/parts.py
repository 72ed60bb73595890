"""First and last tokens of a layer in a format that loses less: ``sinks=`` and ``recent=``.

The rows of a layer hold all tokens, in its own format. First and last tokens lie besides in
`recent_dtype`; attention and the getters read these where they are. A token that grows old is no
longer read there, and nothing has to be stored again. Of the last tokens 64 more are kept than are
read, so that a rejected draft leaves no trace. With ``recent=``, those appended at once all stay
until the next ones come: each of their queries reads the last ones before it, and a prompt is read
as exactly as a single token. But a layer that goes back reads of its last tokens only the
:func:`kept_rows` before its former end, as its copies do, which have no others.

A layer of runs (``dtype="kivi4"``) has no rows: 32 tokens of a head, at positions that begin with a
multiple of 32, are encoded together as a run; the others are among the last tokens. Where keys
alone are in runs, or values alone, the other side's rows lie beside the runs, and come there with
them. Which bytes a run gets depends on its tokens alone, as `recent_dtype` has them. The runs end
with the last whole one, unless the layer has gone back into one of them, further than the last
tokens reach: then they end there, and what follows is encoded anew with the run's tokens.

A store has all that in its backend's way (csrc/store/ranges.h, kvedge/backends/numpy/layer.py).
:class:`Parts` is the same as plain arrays, of one moment: for copies, files and edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import RECENT_DTYPES, LayerConfig
from kvedge.core.key_map import NO_MAP, KeyMap
from kvedge.core.kivi import RUN
from kvedge.core.memory import LayerView, Slabs
from kvedge.errors import ScaleRangeError
from kvedge.rope import Turn, Turns

__all__ = [
    "DRAFT",
    "PIECE",
    "PartContents",
    "Parts",
    "concatenated",
    "config_of_today",
    "contents_of",
    "decoded",
    "empty_parts",
    "encoded",
    "evicted",
    "joined",
    "kept",
    "kept_rows",
    "last_rows",
    "part_key_map",
    "parts_of_contents",
    "parts_of_range",
    "parts_of_today",
    "put",
    "ranges_of",
    "refuse",
    "runs_end",
    "tail_of",
    "with_keys",
]

_Turned: TypeAlias = "Callable[[np.ndarray], np.ndarray]"  # keys (n, num_kv_heads, head_dim)

DRAFT = 64  # last tokens that may be taken back, and those before them are still all there
PIECE = 32 * RUN  # tokens of a prompt that are encoded at a time
_ROOM = 64  # tokens appended until last ones are written over, at least


class PartContents(NamedTuple):
    """The stored bytes of first tokens, last tokens or runs, and how their keys are stored."""

    arrays: Slabs
    key_map: KeyMap


class Parts(NamedTuple):
    """First and last tokens, and runs, of one moment.

    Positions count tokens that were dropped. Arrays may reach beyond the layer's end, where it went
    back; nothing of them is written over.
    """

    first: Slabs  # of recent_dtype: codes (tokens, num_kv_heads, channels)
    first_at: int  # position of the first one
    last: Slabs
    last_at: int
    runs: Slabs | None  # of `LayerConfig.runs`; None in layers of rows
    runs_at: int  # position of their first token: a multiple of 32

    def until(self, end: int) -> Parts:
        """Those before a position alone, but for runs."""
        first, last = max(0, end - self.first_at), max(0, end - self.last_at)
        at = min(self.last_at, end)
        return self._replace(
            first=_rows(self.first, 0, first), last=_rows(self.last, 0, last), last_at=at
        )

    def since(self, position: int) -> Parts:
        """Without last tokens before a position."""
        gone = min(max(position - self.last_at, 0), len(self.last.key_codes))
        last = _rows(self.last, gone, len(self.last.key_codes))
        return self._replace(last=last, last_at=max(position, self.last_at))


def _rows(slabs: Slabs, start: int, stop: int) -> Slabs:
    return Slabs(*[slab[start:stop] for slab in slabs])


def concatenated(slabs: Slabs, other: Slabs) -> Slabs:
    """The rows of both."""
    return Slabs(*(np.concatenate(pair) for pair in zip(slabs, other, strict=True)))


def kept_rows(config: LayerConfig) -> int:
    """Last tokens that a layer may have to read in their other format."""
    recent = max(config.recent, RUN) if config.in_runs else config.recent
    return recent + DRAFT if recent else 0


def last_rows(config: LayerConfig, n: int = 0) -> int:
    """Last tokens that a layer has room for in their other format, `n` of them appended at once."""
    kept = kept_rows(config)
    return kept + max(n if config.recent else 0, _ROOM) if kept else 0


def runs_end(end: int, last: int) -> int:
    """Where the runs of a layer end whose tokens do, and whose last tokens begin at `last`."""
    whole = end // RUN * RUN
    return whole if last <= whole else end


def part_key_map(config: LayerConfig, key_map: KeyMap) -> KeyMap:
    """How first and last tokens store keys, where the layer stores them as in `key_map`."""
    own = config.part_config
    if not own.has_auto_scale:
        return NO_MAP
    return key_map if own.key_format.has_scales else KeyMap(None, key_map.scale)


def refuse(config: LayerConfig, key_map: KeyMap, keys: np.ndarray, values: np.ndarray) -> None:
    """Raise if checked rows cannot be stored as first or last tokens, or as runs of these."""
    own = config.part_config
    for start in range(0, len(keys), PIECE):
        some = slice(start, start + PIECE)
        try:
            apart = encoded(own, NO_MAP, keys[some], values[some])
        except ScaleRangeError as error:
            why = f"{error} (recent_dtype: bfloat16 and float32 take all)"
            raise ScaleRangeError(why) from error
        if config.in_runs:
            form = config.run
            stored = key_map.to_stored(decoded(own, apart, False))
            checks.check_finite(stored, key_map.text)
            form.key_format.refuse(stored, "keys", form.key_rows)
            checks.refuse_values(decoded(own, apart, True), form)


def empty_parts(config: LayerConfig, position: int) -> Parts | None:
    """Parts that hold no token of a layer whose next one is at a position."""
    if not config.recent_dtype:
        return None
    own, cut = config.part_config, position // RUN * RUN if config.in_runs else position
    none, before = (
        Slabs(*(np.zeros((n, *shape[1:]), dtype) for shape, dtype in memory.slab_layout(own)))
        for n in (0, position - cut)  # of a run that begins before, which are never read
    )
    runs = None
    if config.in_runs:
        runs = Slabs(
            *(np.zeros(shape, dtype) for shape, dtype in memory.slab_layout(config.runs(0)))
        )
    return Parts(none, position, before, cut, runs, cut)


# ---- as files and copies have them ---------------------------------------------------------------


def contents_of(
    view: LayerView, config: LayerConfig, start: int, end: int, *, copy: bool
) -> tuple[PartContents, ...]:
    """First tokens, last tokens and runs of positions `start` to `end`, as they are stored.

    `view` is the store's ``snapshot(end)``. Of last ones there are no more than :func:`kept_rows`
    of the layer's config.
    """
    parts = view.parts
    if parts is None:
        return ()
    first, last = parts.first, parts.last
    of_first = slice(max(0, start - parts.first_at), max(0, end - parts.first_at))
    if parts.first_at > start:
        of_first = slice(0, 0)
    stop = end - parts.last_at
    if not 0 <= stop <= len(last.key_codes):
        stop = 0
    since = start // RUN * RUN if config.in_runs else start  # runs need those before it
    since = max(since, max(end, view.num_dropped + view.num_tokens) - kept_rows(config))
    of_last = slice(min(stop, max(0, since - parts.last_at)), stop)
    contents = [
        PartContents(Slabs(*(array[rows] for array in arrays)), NO_MAP)
        for arrays, rows in ((first, of_first), (last, of_last))
    ]
    if parts.runs is not None:
        begin = end - len(contents[1].arrays.key_codes)
        rows = (start - parts.runs_at, runs_end(end, begin) - parts.runs_at)
        arrays = memory.rows_of(parts.runs, config.run, *rows)
        contents.append(PartContents(arrays, view.key_map))
    if copy:
        contents = [part._replace(arrays=Slabs(*map(np.array, part.arrays))) for part in contents]
    return tuple(contents)


def parts_of_contents(
    contents: Sequence[PartContents], config: LayerConfig, start: int, end: int
) -> Parts | None:
    """The parts of a layer that holds positions `start` to `end`."""
    if not config.recent_dtype:
        return None
    first, last = contents[0].arrays, contents[1].arrays
    runs = contents[2].arrays if config.in_runs else None
    at = end - len(last.key_codes)
    return Parts(first, start, last, at, runs, start // RUN * RUN).since(end - kept_rows(config))


def parts_of_range(
    parts: Sequence[PartContents], config: LayerConfig, length: int, start: int, stop: int
) -> tuple[PartContents, ...]:
    """The parts of tokens `start` to `stop`, of those of `length` tokens of a layer."""
    if not parts:
        return ()
    before = length - len(parts[1].arrays.key_codes)  # tokens before the last ones
    ranges = (slice(start, stop), slice(max(0, start - before), max(0, stop - before)))
    arrays = [
        memory.Slabs(*(array[rows] for array in part.arrays))
        for part, rows in zip(parts, ranges, strict=False)
    ]
    if config.in_runs:  # from the start of a run on
        arrays.append(memory.rows_of(parts[2].arrays, config.run, start, stop))
    return tuple(part._replace(arrays=rows) for part, rows in zip(parts, arrays, strict=True))


def config_of_today(config: LayerConfig) -> LayerConfig:
    """One of an earlier version, whose first and last tokens may lie in any format: in float32."""
    if not config.recent_dtype or config.recent_dtype in RECENT_DTYPES:
        return config
    return replace(config, recent_dtype="float32")


def parts_of_today(config: LayerConfig, parts: Sequence[PartContents]) -> tuple[PartContents, ...]:
    """What a layer of such a config holds apart, as one of :func:`config_of_today` does."""
    if config_of_today(config) is config:
        return tuple(parts)
    own = config.part_config
    converted = []
    for arrays, key_map in parts[:2]:
        keys = key_map.from_stored(decoded(own, arrays, False))
        values = decoded(own, arrays, True)
        slabs = encoded(config_of_today(config).part_config, NO_MAP, keys, values)
        converted.append(PartContents(slabs, NO_MAP))
    return (*converted, *parts[2:])


# ---- where tokens are read -----------------------------------------------------------------------


def tail_of(
    config: LayerConfig, n: int, sinks: int, last: int, runs: int | None, num_rows: int = 1
) -> int:
    """Of `n` tokens the one from which on last ones are read, those before it as rows or runs.

    `sinks` first tokens are read as such; last ones are there from `last` on, runs up to `runs`.
    The first of `num_rows` queries, which end with the tokens, reads `recent` of them up to itself.
    """
    recent = config.recent + num_rows - 1 if config.recent else 0
    tail = min(n, max(sinks, last, n - recent))
    return tail if runs is None else min(tail, max(sinks, runs))


def ranges_of(
    turns: Turns | None, dropped: int, start: int, stop: int
) -> Iterator[tuple[int, int, Turn]]:
    """Tokens of a range whose keys are to be turned alike: first, the one after the last, turn.

    `dropped` tokens are before the layer's first one.
    """
    if turns is None:
        yield start, stop, ()
        return
    for first, last, turn in turns.ranges(start + dropped, stop + dropped):
        yield first - dropped, last - dropped, turn


# ---- edits ---------------------------------------------------------------------------------------


def encoded(config: LayerConfig, key_map: KeyMap, keys: np.ndarray, values: np.ndarray) -> Slabs:
    """Keys and values as they are stored; refused if they cannot be."""
    stored = key_map.to_stored(keys)
    checks.check_finite(stored, key_map.text)
    config.key_format.refuse(stored, "keys", config.key_rows)
    checks.refuse_values(values, config)
    key_codes, key_scales = config.key_format.encode(stored, config.key_rows)
    value_codes, value_scales = config.value_format.encode(
        config.stored_values(values), config.value_rows
    )
    return Slabs(key_codes, value_codes, key_scales, value_scales)


def decoded(config: LayerConfig, slabs: Slabs, values: bool) -> np.ndarray:
    """Keys, whose map is plain, or values of whole slabs, float32 (n, num_kv_heads, channels)."""
    rows = slabs.side(values, config).decode(slice(0, len(slabs.key_codes)), np.float32)
    return np.asarray(rows, np.float32)


def joined(parts: Parts, config: LayerConfig, contents: Sequence[PartContents], n: int) -> Parts:
    """The parts of a layer behind whose end `n` tokens of another come; their last ones count.

    `parts` end with the layer. First tokens are those of an empty layer only.
    """
    last, end = contents[1].arrays, parts.last_at + len(parts.last.key_codes)
    tokens = len(last.key_codes)
    if tokens == n:
        last = concatenated(parts.since(end + tokens - kept_rows(config)).last, last)
    return parts._replace(last=last, last_at=end + n - len(last.key_codes))


def kept(parts: Parts, start: int, indices: np.ndarray) -> Parts:
    """The parts of a layer of rows from a position on that keeps these tokens alone."""
    positions = indices + start
    slabs = []
    for arrays, at in ((parts.first, parts.first_at), (parts.last, parts.last_at)):
        those = positions[(at <= positions) & (positions < at + len(arrays.key_codes))]
        slabs.append(Slabs(*(slab[those - at] for slab in arrays)))
        if at == parts.first_at and len(those) and positions[0] != those[0]:
            slabs[-1] = _rows(slabs[-1], 0, 0)
    end = start + len(positions)
    return parts._replace(
        first=slabs[0], first_at=start, last=slabs[1], last_at=end - len(slabs[1].key_codes)
    )


def evicted(
    parts: Parts, config: LayerConfig, indices: np.ndarray, start: int, num_tokens: int
) -> Parts:
    """The parts of a layer of tokens from a position on that keeps these rows of them.

    Positions of the last ones stay. `indices` are (n,) or (num_kv_heads, n); the last ones of
    :func:`kept_rows` are among them, and whole runs.
    """
    moved = np.flatnonzero(np.atleast_2d(indices != np.arange(indices.shape[-1])).any(0))
    gone = num_tokens - indices.shape[-1]
    sinks = min(
        int(moved[0]) if len(moved) else indices.shape[-1],
        max(parts.first_at + len(parts.first.key_codes) - start, 0),
    )
    at = start - parts.first_at
    rest = parts._replace(first=_rows(parts.first, at, at + sinks), first_at=start + gone)
    if parts.runs is None:
        return rest
    form = config.run
    runs = (indices[..., ::RUN] + start - parts.runs_at) // RUN
    num_run_tokens = runs_end(start + num_tokens, parts.last_at) - parts.runs_at
    runs = runs[..., runs.max(axis=tuple(range(runs.ndim - 1))) < -(-num_run_tokens // RUN)]
    rows = memory.rows_of_runs(parts.runs, form, runs)
    return rest._replace(runs=rows, runs_at=start + gone)


def put(
    parts: Parts,
    config: LayerConfig,
    key_map: KeyMap,
    position: int,
    keys: np.ndarray,
    values: np.ndarray,
) -> Parts:
    """Whole runs of tokens (n, num_kv_heads, channels) in place of those at a position."""
    own, form, stop = config.part_config, config.run, position + len(keys)
    assert parts.runs is not None
    refuse(config, key_map, keys, values)
    apart = encoded(own, NO_MAP, keys, values)
    codes = encoded(form, key_map, decoded(own, apart, False), decoded(own, apart, True))
    arrays = Slabs(*map(np.array, parts.runs))
    at = position - parts.runs_at
    for rows, new in zip(memory.rows_of(arrays, form, at, at + len(keys)), codes, strict=True):
        rows[...] = new
    sides = []
    for begin, stored in ((parts.first_at, parts.first), (parts.last_at, parts.last)):
        copies = Slabs(*map(np.array, stored))
        low, high = max(position, begin), min(stop, begin + len(stored.key_codes))
        for rows, new in zip(copies, apart, strict=True):
            if low < high:
                rows[low - begin : high - begin] = new[low - position : high - position]
        sides.append(copies)
    return parts._replace(first=sides[0], last=sides[1], runs=arrays)


def with_keys(
    parts: Parts, config: LayerConfig, key_map: KeyMap, turned: _Turned, start: int, stop: int
) -> Parts:
    """The same with keys of a range of positions turned, in whatever they are stored."""
    own = config.part_config
    sides = []
    for begin, stored in ((parts.first_at, parts.first), (parts.last_at, parts.last)):
        low, high = max(start - begin, 0), min(stop - begin, len(stored.key_codes))
        if low < high:
            side = stored.side(False, own)
            keys = turned(side.decode(slice(low, high), np.float32))
            own.key_format.refuse(keys, "keys", own.key_rows)
            codes = np.array(stored.key_codes)
            codes[low:high] = own.key_format.encode(keys, own.key_rows)[0]
            stored = stored._replace(key_codes=codes)
        sides.append(stored)
    parts = parts._replace(first=sides[0], last=sides[1])
    if parts.runs is None:
        return parts
    form = config.run
    step = form.key_format.tokens_per_row
    low = max(start - parts.runs_at, 0)
    high = min(stop - parts.runs_at, len(parts.runs.key_codes) * step)
    if low >= high:
        return parts
    first, last = low // step * step, -(-high // step) * step
    stored_keys = parts.runs.side(False, form).decode(slice(first, last), np.float32)
    keys = key_map.from_stored(np.array(stored_keys))
    keys[low - first : high - first] = turned(keys[low - first : high - first])
    keys = key_map.to_stored(keys)
    checks.check_finite(keys, key_map.text)
    form.key_format.refuse(keys, "keys", form.key_rows)
    codes, scales = np.array(parts.runs.key_codes), np.array(parts.runs.key_scales)
    rows = slice(first // step, last // step)
    codes[rows], scales[rows] = form.key_format.encode(keys, form.key_rows)
    return parts._replace(runs=parts.runs._replace(key_codes=codes, key_scales=scales))
