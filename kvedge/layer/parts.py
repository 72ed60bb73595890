"""The first and the last tokens of a layer in a format that loses less: ``sinks=`` and ``recent=``.

The rows of a layer hold all tokens, in its own format. Beside them two small layers hold the first
tokens and the last ones again; attention and the getters read these where they are. A token that
grows old is no longer read there, and nothing has to be moved or stored again. Of the last tokens
64 more are kept than are read, so that a rejected draft leaves no trace. With ``recent=``, those
appended at once all stay until the next ones come: each of their queries reads the last ones before
it, and a prompt is read as exactly as a single token. But a layer that goes back reads of its last
tokens only the :func:`kept_rows` before its former end, as its copies do, which have no others:
`Parts.since` says from where on.

A layer of runs (``dtype="kivi4"``) has no rows of its own: 32 tokens of a head, at positions that
begin with a multiple of 32, are encoded together and lie in a third part; the others are among the
last tokens. Where keys alone are in runs, or values alone, the other side's rows lie in that part
as well, and come there with the runs. Which bytes a run gets depends on its tokens alone, as
`recent_dtype` has them. The runs end with the last whole one, unless the layer has gone back into
one of them, further than the last tokens reach: then they end there, and what follows is encoded
anew with the run's tokens.

A reader takes `Held`, which has the parts of one moment. A writer that has no room in the layer of
the last tokens copies what is still needed to another one, and replaces `now` as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import NO_MAP, KeyMap
from kvedge.core.kivi import RUN
from kvedge.core.memory import Held
from kvedge.errors import ScaleRangeError
from kvedge.layer import shifts
from kvedge.layer.keys import encode_anew
from kvedge.layer.store import (
    LayerStore,
    Part,
    PartContents,
    Parts,
    PartsState,
    SavedRows,
    plain_store,
)
from kvedge.rope import Turn, Turns, turned

__all__ = [
    "DRAFT",
    "PIECE",
    "LayerParts",
    "ReadPart",
    "contents_of",
    "kept_rows",
    "last_rows",
    "part_key_map",
    "parts_of",
    "parts_of_range",
    "ranges_of",
    "runs_end",
    "tail_of",
]

_Append = Callable[[LayerStore, int, int], None]  # to a store, from a token on, so many

DRAFT = 64  # last tokens that may be taken back, and those before them are still all there
_FIRST_ROWS = 256  # tokens that runs have room for at first; it doubles from there
PIECE = 32 * RUN  # tokens of a prompt that are encoded at a time
_ROOM = 64  # tokens appended between two moves, each of which copies the last tokens


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


class ReadPart(NamedTuple):
    """Consecutive tokens of a layer that lie together."""

    store: LayerStore | None  # a part's; None: the layer itself
    at: int  # index of the first one there
    start: int  # the same in the whole layer
    stop: int


class LayerParts:
    """The parts of one layer; its methods are the writer's, but for `now`.

    Parameters
    ----------
    whole : LayerStore
        An empty one whose config has ``recent`` or ``sinks``.
    """

    def __init__(self, whole: LayerStore) -> None:
        config = whole.config
        self._whole = whole
        self._kept = kept_rows(config)
        self._config = config.part_config
        self._in_runs = config.in_runs
        self.now = self.empty(0)

    def _first(self, position: int) -> Part:
        """Room for the first tokens."""
        return self._empty(self._whole.config.sinks, position)

    def _last(self, position: int, n: int = 0) -> Part:
        """Room for the last tokens, and for `n` that are appended at once."""
        return self._empty(last_rows(self._whole.config, n), position)

    def _runs(self, position: int, tokens: int) -> Part | None:
        """Room for runs of so many tokens from a position on."""
        if not self._in_runs:
            return None
        limit = self._whole.config.limit
        rows = max(_FIRST_ROWS, 1 << max(tokens - 1, 0).bit_length())
        if limit is not None:
            rows = min(rows, -(-max(limit, tokens) // RUN) * RUN)
        store = plain_store(type(self._whole), self._whole.config.runs(rows))
        if not self._whole.key_map.is_plain:  # of keys in rows
            store.set_key_map(self._whole.key_map)
        return Part(store, position // RUN * RUN)

    def _scratch(self, tokens: int) -> LayerStore:
        """An empty layer of the parts' format."""
        return self._empty(tokens, 0).store

    def _empty(self, rows: int, position: int) -> Part:
        config = replace(self._config, capacity=max(rows, 1), limit=max(rows, 1))
        store = plain_store(type(self._whole), config)
        key_map = part_key_map(self._whole.config, self._whole.key_map)
        if not key_map.is_plain:
            store.set_key_map(key_map)
        return Part(store, position)

    @property
    def slabs(self) -> list[np.ndarray]:
        """All memory of the parts."""
        return [slab for part in self.now.each for slab in part.store.held().slabs]

    # ---- appending -------------------------------------------------------------------------------

    def begin(self, end: int, n: int) -> Appending:
        """Make ready for `n` tokens from position `end` on; nothing is changed yet."""
        first, last, runs = self.now[:3]
        lengths = [len(first.store), len(last.store)]
        recent, room = self._whole.config.recent, last.store.config.capacity
        kept = max(0, end + (0 if recent else n) - self._kept)  # tokens from here on are needed
        cut = end // RUN * RUN if self._in_runs else end
        rest = None
        if not self._kept:
            last = Part(last.store, end)
        elif last.position + lengths[1] != end or self.now.last_from > cut:
            # It was gone back to before the part.
            last = self._last(max(cut, kept), n)
            if cut < end:
                rest = self._read(cut, end)
                if last.position < end:
                    since = last.position - cut
                    last.store.append(rest[0][since:], rest[1][since:])
            lengths[1] = len(last.store)
        elif n > room - lengths[1] or room > last_rows(self._whole.config, n):
            moved = self._last(max(last.position, kept), n)
            if cut < min(end, moved.position):  # the run has tokens that were dropped, too
                rest = self._decoded(last.store, cut - last.position, self._room(end - cut))
            rows = [each[moved.position - last.position :] for each in last.store.held().tokens]
            if len(rows[0]):
                memory.copy_tokens(rows, moved.store.slabs, len(rows[0]))
                moved.store.set_len(len(rows[0]))
            last, lengths[1] = moved, len(rows[0])
        skipped = max(0, last.position - end) if self._kept else n
        joins = first.position + lengths[0] == end
        sinks = max(0, min(n, self._whole.config.sinks - end)) if joins else 0
        saved: list[SavedRows | None] = [None, None]
        if sinks:
            saved[0] = SavedRows.of(first.store, lengths[0], lengths[0] + sinks)
        if last.store.written() > lengths[1]:
            saved[1] = SavedRows.of(last.store, lengths[1], lengths[1] + n - skipped)
        if runs is not None:
            lengths.append(len(runs.store))
            fills = end + n >= cut + RUN
            saved.append(_runs_over(runs, end, n) if fills else None)
        return Appending(first, last, runs, sinks, skipped, end, n, lengths, saved, rest)

    def _read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a few positions, as they are read now."""
        held, config = self._whole.held(), self._whole.config
        gone = max(0, held.num_dropped - start)  # those that were dropped are not read again
        at = (start + gone - held.num_dropped, stop - held.num_dropped)
        rows = [np.zeros(config.rows_shape(v, stop - start), np.float32) for v in (False, True)]
        for v in (False, True):
            self._whole.dequantize(held, v, *at, rows[v][gone:])
        return rows[0], rows[1]

    def runs_of(self, made: Appending, append: _Append) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of the runs that appended tokens fill, as they are to be encoded.

        They come in pieces, so that a long prompt needs little room besides. `append` puts some of
        the appended tokens, from one on, into a layer.
        """
        cut, whole = made.end // RUN * RUN, (made.end + made.n) // RUN * RUN
        if not self._in_runs or whole == cut:
            return
        n = whole - cut
        if made.last.position <= cut:  # they all are there by now
            yield self._decoded(made.last.store, cut - made.last.position, self._room(n))
            return
        # All memory is taken before the first runs are written.
        scratch, room = self._scratch(min(n, PIECE)), self._room(min(n, PIECE))
        for start in range(cut, whole, PIECE):
            stop = min(start + PIECE, whole)
            first = max(start, made.end)
            scratch.set_len(0)
            if start < first:
                scratch.append(*(made.rest or self._read(start, first)))
            append(scratch, first - made.end, stop - first)
            yield self._decoded(scratch, 0, [rows[: stop - start] for rows in room])

    def _room(self, tokens: int) -> list[np.ndarray]:
        """For keys and values of so many tokens."""
        return [np.empty(self._config.rows_shape(v, tokens), np.float32) for v in (False, True)]

    @staticmethod
    def _decoded(
        store: LayerStore, first: int, rows: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of tokens of a part, from one on."""
        held = store.held()
        for values in (False, True):
            store.dequantize(held, values, first, first + len(rows[values]), rows[values])
        return rows[0], rows[1]

    def commit(self, made: Appending, pieces: Iterable[tuple[np.ndarray, np.ndarray]] = ()) -> None:
        """Let readers see what was appended to the parts of `begin`, and encode whole runs."""
        last, runs, cut = made.last, self.now.runs, made.end
        if runs is not None:
            cut, whole = made.end // RUN * RUN, (made.end + made.n) // RUN * RUN
            runs = self._grown(runs, cut, whole - cut)
            for rows in pieces:
                runs.store.append(*rows)
        if not self._kept:  # it only says where the tokens end
            last = Part(last.store, last.position + made.n)
        since = self.now.since  # else all last tokens are new ones
        self.now = Parts(made.first, last, runs, since if since <= cut else 0)

    def _grown(self, runs: Part, end: int, n: int) -> Part:
        """The runs before a position, with room for `n` more tokens."""
        length = end - runs.position
        if length + n <= runs.store.config.capacity:
            if length != len(runs.store):
                runs.store.set_len(length)
            return runs
        gone = self._whole.held().num_dropped // RUN * RUN - runs.position
        gone = min(max(gone, 0), length)
        grown = self._runs(runs.position + gone, 2 * (length - gone) + n)
        assert grown is not None
        held, config = runs.store.held(), runs.store.config
        rows = memory.rows_of(held.slabs, config, gone, runs.store.written())
        _copy_runs(rows, grown.store, length - gone)
        return grown

    def take_back(self, made: Appending) -> None:
        """Undo what was appended to the parts of `begin`."""
        parts = Parts(made.first, made.last, made.runs).each
        for part, length, saved in zip(parts, made.lengths, made.saved, strict=True):
            _put_back(part.store, length, saved)

    def refuse(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Raise if checked rows cannot be stored in the parts."""
        config = self._config
        stored = self.now.last.store.key_map.to_stored(keys)
        try:
            config.key_format.refuse(stored, "keys", config.key_rows)
            checks.refuse_values(values, config)
        except ScaleRangeError as error:
            raise ScaleRangeError(
                f"{error} (recent_dtype: bfloat16 and float32 take all)"
            ) from error

    def _lasting(self) -> int:
        """From which position on last tokens stay once others come, or the layer goes back."""
        return min(max(self.now.last_from, self.now.end - self._kept), self.now.end)

    # ---- going back and forth --------------------------------------------------------------------

    def set_end(self, end: int) -> None:
        """Hold the tokens before a position, which may lie above the present one."""
        first, last, runs, since = self.now[:4]
        length = end - last.position
        if not self._kept:
            last = Part(last.store, end)
        elif length > last.store.written():
            last = self._last(end)
        else:
            if end < self.now.end:
                since = max(since, self.now.end - self._kept)
            last.store.set_len(max(length, 0))
        first.store.set_len(min(max(end - first.position, 0), first.store.written()))
        if runs is not None:
            length = runs_end(end, max(last.position, since)) - runs.position
            runs.store.set_len(min(max(length, 0), runs.store.written()))
        self.now = Parts(first, last, runs, since, end if end < last.position else None)

    def empty(self, position: int) -> Parts:
        """Parts that hold no token; the next one is at a position."""
        # A run that begins before it is never read there.
        last = self._last(position // RUN * RUN if self._in_runs else position)
        if last.position < position:
            shape = (position - last.position, self._config.num_kv_heads)
            keys, values = (np.zeros((*shape, dim), np.float32) for dim in self._widths)
            last.store.append(keys, values)
        return Parts(self._first(position), last, self._runs(position, 0))

    @property
    def _widths(self) -> tuple[int, int]:
        return self._config.head_dim, self._config.value_head_dim

    def forget(self, position: int, end: int) -> None:
        """Hold no token from a position on, written ones included; the next one is at `end`."""
        self.now = Parts(self._first_until(position), self._last(end))

    def _first_until(self, position: int) -> Part:
        """The first tokens before a position, and room for others."""
        first = self.now.first
        kept = slice(0, min(max(position - first.position, 0), len(first.store)))
        return _filled(self._first(first.position), _contents(first, kept))

    def state(self, start: int = 0, n: int = 0) -> PartsState:
        """What `return_to` needs, before `n` tokens are stored from position `start` on.

        Of a run that the layer has gone back into also before one token is appended.
        """
        now, layers = self._state_of(self.now)
        if n:
            for i, part in enumerate(now[:2]):
                at = start - part.position
                layers[i] = (*layers[i][:2], SavedRows.of(part.store, at, at + n))
        if now.runs is not None:
            binding, length, _ = layers[2]
            if n:
                layers[2] = (binding, length, _runs_over(now.runs, start, n))
            elif length % RUN:
                saved = SavedRows.of(now.runs.store, length // RUN * RUN, length)
                layers[2] = (binding, length, saved)
        return now, layers

    @staticmethod
    def _state_of(parts: Parts) -> PartsState:
        """The state in which the parts are those, and nothing is written over."""
        return parts, [(part.store.binding(), len(part.store), None) for part in parts.each]

    def return_to(self, state: PartsState) -> None:
        """Be as it was; tokens were stored since, and keys stored otherwise."""
        now, layers = state
        for part, (binding, length, saved) in zip(now.each, layers, strict=True):
            part.store.rebind(binding)
            _put_back(part.store, length, saved)
        self.now = now

    # ---- other keys ------------------------------------------------------------------------------

    def store_keys_as(self, key_map: KeyMap) -> None:
        """Store keys as the layer does, where the format of the parts gains by it."""
        own = part_key_map(self._whole.config, key_map)
        for part in self.now[:2]:
            if not part.store.key_map.is_same(own):
                encode_anew(part.store, own, part.store.held())
        runs = self.now.runs
        if runs is not None and not runs.store.key_map.is_same(key_map):
            self.now = self.now._replace(runs=self._runs_as(runs))

    def _runs_as(self, runs: Part) -> Part:
        """Runs whose keys, which are in rows, are stored as the layer's."""
        n, config = len(runs.store), runs.store.config
        if not n:
            runs.store.set_key_map(self._whole.key_map)
            return runs
        made = self._runs(runs.position, 0)
        assert made is not None and n < RUN  # what is decided is settled before a run is full
        keys = np.empty(config.rows_shape(False, n), np.float32)
        runs.store.dequantize(runs.store.held(), False, 0, n, keys)
        keys = made.store.key_map.to_stored(keys)
        _copy_runs(memory.rows_of(runs.store.slabs, config, 0, n), made.store, n)
        with _rewriting(made.store, 0) as slabs:
            slabs.key_codes[:n], slabs.key_scales[:n] = config.key_format.encode(
                keys, config.key_rows
            )
        return made

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[LayerStore, int, int]]:
        """First and last tokens of a range of positions."""
        for part in self.now[:2]:
            low, high = max(start - part.position, 0), min(stop - part.position, len(part.store))
            if low < high:
                yield part.store, low, high

    def check_turn(self, turn: Turn, start: int, stop: int) -> None:
        """Raise unless turned keys of a range of positions fit what they are stored in."""
        for store, low, high in self._ranges(start, stop):
            shifts.check_turn(store, turn, low, high)
        self._turned(turn, start, stop)

    def store_turned(self, turn: Turn, start: int, stop: int) -> None:
        """Store the keys of a range of positions anew, turned."""
        runs, encoded = self.now.runs, self._turned(turn, start, stop)
        for store, low, high in self._ranges(start, stop):
            shifts.store_turned(store, turn, low, high)
        if runs is not None and encoded is not None:
            first, (codes, scales) = encoded
            with _rewriting(runs.store, first) as slabs:
                row = first // runs.store.config.key_format.tokens_per_row
                slabs.key_codes[row : row + len(codes)] = codes
                slabs.key_scales[row : row + len(codes)] = scales

    def _turned(
        self, turn: Turn, start: int, stop: int
    ) -> tuple[int, tuple[np.ndarray, np.ndarray]] | None:
        """Keys that lie in runs, or beside them, with a range of positions turned.

        The first token that is encoded anew, and codes and scales from there on.
        """
        runs = self.now.runs
        if runs is None:
            return None
        start, stop = max(start - runs.position, 0), min(stop - runs.position, len(runs.store))
        if start >= stop:
            return None
        config, key_map = runs.store.config, runs.store.key_map
        step = config.key_format.tokens_per_row
        first, last = start // step * step, -(-stop // step) * step
        stored = runs.store.held().slabs.side(False, config)
        keys = key_map.from_stored(np.array(stored.decode(slice(first, last), np.float32)))
        with np.errstate(over="ignore"):  # refused below
            keys[start - first : stop - first] = turned(turn, keys[start - first : stop - first])
        keys = key_map.to_stored(keys)
        checks.check_finite(keys, key_map.text)
        config.key_format.refuse(keys, "keys", config.key_rows)
        return first, config.key_format.encode(keys, config.key_rows)

    def put(self, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store whole runs of tokens (n, H, channels) at a position, over the runs there."""
        runs, own, stop = self.now.runs, self._config, position + len(keys)
        assert runs is not None
        key_map = self.now.last.store.key_map
        self.refuse(keys, values)
        stored = _encoded(own, key_map, keys, values)
        read = (
            key_map.from_stored(own.key_format.decode(*stored[0], own.key_rows, np.float32)),
            own.value_format.decode(*stored[1], own.value_rows, np.float32),
        )
        config, first = runs.store.config, position - runs.position
        stored_keys = runs.store.key_map.to_stored(read[0])
        config.key_format.refuse(stored_keys, "keys", config.key_rows)
        checks.refuse_values(read[1], config)
        made = _encoded(config, runs.store.key_map, *read)
        with _rewriting(runs.store, first) as slabs:
            rows = memory.rows_of(slabs, config, first, first + len(keys))
            rows.key_codes[:], rows.key_scales[:] = made[0]
            rows.value_codes[:], rows.value_scales[:] = made[1]
        for store, low, high in self._ranges(position, stop):
            part = self.now.first if store is self.now.first.store else self.now.last
            row, start = store.held().start + low, part.position + low - position
            to, given = slice(row, row + high - low), slice(start, start + high - low)
            with _rewriting(store, low) as slabs:
                slabs.key_codes[to], slabs.key_scales[to] = (one[given] for one in stored[0])
                slabs.value_codes[to], slabs.value_scales[to] = (one[given] for one in stored[1])

    def kept(self, indices: np.ndarray) -> Parts:
        """The parts of a layer of rows that keeps these tokens alone, which close ranks."""
        start, (first, last) = self._whole.held().num_dropped, self.now[:2]
        positions = indices + start
        held = [
            positions[(begin <= positions) & (positions < part.position + len(part.store))]
            for part, begin in ((first, first.position), (last, self._lasting()))
        ]
        begins = len(held[0]) == 0 or positions[0] == held[0][0]
        contents = [
            _contents(part, rows - part.position)
            for part, rows in zip((first, last), held, strict=True)
        ]
        if not begins:
            contents[0] = _contents(first, slice(0, 0))
        return self.filled(contents, start, start + len(positions))

    def evicted(self, indices: np.ndarray, gone: int) -> Parts:
        """The parts of a layer that keeps these rows, before `gone` tokens go.

        Positions of the last ones stay. `indices` are (n,) or (num_kv_heads, n); the last ones of
        :func:`kept_rows` are among them, and whole runs.
        """
        first, last, runs = self.now[:3]
        held = self._whole.held()
        start, end = held.num_dropped, held.num_dropped + held.num_tokens
        moved = np.flatnonzero(np.atleast_2d(indices != np.arange(indices.shape[-1])).any(0))
        sinks = min(
            int(moved[0]) if len(moved) else indices.shape[-1],
            max(first.position + len(first.store) - start, 0),
        )
        of_first = start - first.position
        contents = [
            _contents(first, slice(of_first, of_first + sinks)),
            _contents(last, slice(self._lasting() - last.position, None)),
        ]
        if runs is not None:
            at = (indices[..., ::RUN] + start - runs.position) // RUN
            at = at[..., at.max(axis=tuple(range(at.ndim - 1))) < -(-len(runs.store) // RUN)]
            slabs = runs.store.held().slabs
            rows = memory.rows_of_runs(slabs, runs.store.config, at)
            contents.append(PartContents(rows, runs.store.key_map))
        return self.filled(contents, start + gone, end)

    # ---- copying ---------------------------------------------------------------------------------

    def filled(self, contents: Sequence[PartContents], start: int, end: int) -> Parts:
        """The parts of a layer that holds positions `start` to `end`, of stored bytes."""
        first, last = contents[:2]
        tokens = len(last.arrays.key_codes)
        runs = None
        if self._in_runs:
            length = runs_end(end, end - tokens) - start // RUN * RUN
            runs = self._runs(start, max(length, 0))
            assert runs is not None
            if not contents[2].key_map.is_same(runs.store.key_map):
                runs.store.set_key_map(contents[2].key_map)
            _copy_runs(contents[2].arrays, runs.store, max(length, 0))
        return Parts(
            _filled(self._first(start), first), _filled(self._last(end - tokens), last), runs
        )

    def last_contents(self) -> PartContents:
        """The last tokens that going on needs, copied, for :meth:`return_to_last`."""
        last = self.now.last
        since = self._lasting() - last.position
        tokens = (np.array(each[since:]) for each in last.store.held().tokens)
        return PartContents(memory.Slabs(*tokens), last.store.key_map)

    def return_to_last(self, contents: PartContents, end: int) -> None:
        """Hold last tokens again that a layer had at a position, to which it has gone back."""
        first, last, runs = self.now[:3]
        last = _filled(self._last(end - len(contents.arrays.key_codes)), contents)
        if runs is not None:
            length = max(runs_end(end, last.position) - runs.position, 0)
            runs.store.set_len(min(length, runs.store.written()))
        self.now = Parts(first, last, runs)

    def joined(self, contents: Sequence[PartContents], end: int, n: int) -> PartsState:
        """What :meth:`return_to` needs once `n` tokens come behind position `end`.

        Their last ones count; first tokens are those of an empty layer only.
        """
        last = contents[1]
        tokens = len(last.arrays.key_codes)
        arrays = last.arrays
        before = 0
        if tokens == n:
            before = max(0, min(self.now.end - self._lasting(), self._kept - tokens))
        if before and self.now.last.store.key_map.is_same(last.key_map):
            own = self.now.last.store.held().tokens
            arrays = memory.Slabs(
                *(
                    np.concatenate([mine[-before:], new])
                    for mine, new in zip(own, arrays, strict=True)
                )
            )
        part = self._last(end + n - len(arrays.key_codes))
        part = _filled(part, last._replace(arrays=arrays))
        return self._state_of(Parts(self._first_until(end), part))


class Appending(NamedTuple):
    """Tokens on their way into the parts: the first `sinks` of them, and all but `skipped`."""

    first: Part
    last: Part
    runs: Part | None
    sinks: int
    skipped: int
    end: int  # position of the first one
    n: int
    lengths: list[int]  # of the parts before
    saved: list[SavedRows | None]  # what is written over in each of them
    rest: tuple[np.ndarray, np.ndarray] | None  # of runs: the tokens of the last one, if it was cut


def _runs_over(runs: Part, end: int, n: int) -> SavedRows | None:
    """What the runs that `n` tokens from position `end` on fill are written over."""
    cut, whole = end // RUN * RUN, (end + n) // RUN * RUN
    return SavedRows.of(runs.store, cut - runs.position, whole - runs.position)


def _put_back(store: LayerStore, length: int, saved: SavedRows | None) -> None:
    """Hold so many tokens again, and the rows that were written over."""
    store.set_len(length)
    if saved is not None:
        with _rewriting(store, min(saved.start, length)):
            saved.put_back()


def _encoded(
    config: LayerConfig, key_map: KeyMap, keys: np.ndarray, values: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Codes and scales of keys, and of values."""
    return (
        config.key_format.encode(key_map.to_stored(keys), config.key_rows),
        config.value_format.encode(config.stored_values(values), config.value_rows),
    )


@contextlib.contextmanager
def _rewriting(store: LayerStore, start: int) -> Iterator[memory.Slabs]:
    """The slabs of a layer whose tokens from `start` on are written over."""
    length = len(store)
    store.set_len(start)  # a core looks anew at the rows that it gets back below
    try:
        yield store.held().slabs
    finally:
        store.set_len(length)


def _copy_runs(arrays: Sequence[np.ndarray], store: LayerStore, tokens: int) -> None:
    """Take over runs, and hold so many tokens of them."""
    config = store.config
    held = min(len(arrays[0]) * config.key_format.tokens_per_row, store.config.capacity)
    sides = (memory.rows_of(slabs, config, 0, held) for slabs in (store.slabs, arrays))
    for new, old in zip(*sides, strict=True):
        new[:] = old
    store.set_len(held)
    store.set_len(tokens)


def _filled(part: Part, contents: PartContents) -> Part:
    store, tokens = part.store, len(contents.arrays.key_codes)
    if not contents.key_map.is_same(store.key_map):
        store.set_key_map(contents.key_map)
    memory.copy_tokens(contents.arrays, store.slabs, tokens)
    store.set_len(tokens)
    return part


def _contents(part: Part, rows: slice | np.ndarray) -> PartContents:
    held = part.store.held()
    return PartContents(memory.Slabs(*(each[rows] for each in held.tokens)), part.store.key_map)


def contents_of(
    held: Held, config: LayerConfig, start: int, end: int, *, copy: bool
) -> tuple[PartContents, ...]:
    """The first and last ones of the tokens at positions `start` to `end`, as they are stored.

    `end` may lie above what is held, where a layer can go. Of last ones there are no more than
    :func:`kept_rows` of the layer's config.
    """
    if held.parts is None:
        return ()
    first, last, runs = held.parts[:3]
    first_rows = slice(max(0, start - first.position), max(0, end - first.position))
    if first.position > start:
        first_rows = slice(0, 0)
    rows = min(len(first.store), first_rows.stop)
    first_rows = slice(min(first_rows.start, rows), rows)
    stop = end - last.position
    if not 0 <= stop <= last.store.written():
        stop = 0
    since = start if runs is None else start // RUN * RUN  # runs need those before it
    since = max(since, held.parts.last_from, max(end, held.parts.end) - kept_rows(config))
    of_last = slice(min(stop, max(0, since - last.position)), stop)
    made = []
    for part, at in ((first, first_rows), (last, of_last)):
        of_part = part.store.held()
        arrays = memory.Slabs(
            *(slab[of_part.start + at.start : of_part.start + at.stop] for slab in of_part.slabs)
        )
        if copy:
            arrays = memory.Slabs(*(each.copy() for each in arrays))
        made.append(PartContents(arrays, part.store.key_map))
    if runs is not None:
        begin = end - len(made[1].arrays.key_codes)
        of_runs = runs.store.held()
        stop = runs_end(end, begin) - runs.position
        arrays = memory.rows_of(of_runs.slabs, runs.store.config, start - runs.position, stop)
        if copy:
            arrays = memory.Slabs(*(each.copy() for each in arrays))
        made.append(PartContents(arrays, runs.store.key_map))
    return tuple(made)


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
        arrays.append(memory.rows_of(parts[2].arrays, config.runs(RUN), start, stop))
    return tuple(part._replace(arrays=rows) for part, rows in zip(parts, arrays, strict=True))


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


def parts_of(held: Held, config: LayerConfig, num_rows: int = 1) -> list[ReadPart]:
    """Where `num_rows` queries read the tokens of a layer, in their order; none overlap."""
    n, dropped = held.num_tokens, held.num_dropped
    if held.parts is None or not n:
        return [ReadPart(None, 0, 0, n)] if n else []
    first, last, runs = held.parts[:3]
    sinks = 0
    if first.position <= dropped:
        sinks = min(n, max(0, first.position + len(first.store) - dropped))
    stop = None if runs is None else runs.position + len(runs.store) - dropped
    tail = tail_of(config, n, sinks, held.parts.last_from - dropped, stop, num_rows)
    middle = ReadPart(None, sinks, sinks, tail)
    if runs is not None:
        middle = ReadPart(runs.store, sinks + dropped - runs.position, sinks, tail)
    parts = (
        ReadPart(first.store, dropped - first.position, 0, sinks),
        middle,
        ReadPart(last.store, tail + dropped - last.position, tail, n),
    )
    return [part for part in parts if part.start < part.stop]


def ranges_of(turns: Turns | None, dropped: int, part: ReadPart) -> Iterator[tuple[int, int, Turn]]:
    """The tokens of a part whose keys are to be turned alike: first, the one after the last, turn.

    `dropped` tokens are before the layer's first one.
    """
    if turns is None:
        yield part.start, part.stop, ()
        return
    for start, stop, turn in turns.ranges(part.start + dropped, part.stop + dropped):
        yield start - dropped, stop - dropped, turn
