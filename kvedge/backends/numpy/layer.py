"""The classes of the NumPy backend: a layer's core in NumPy, and what is public over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.core import arrays, checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.key_map import NO_MAP, KeyMap, KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.lists import check_heads
from kvedge.core.memory import LayerView, Slabs, clamp
from kvedge.core.options import AttendOptions, default_scale
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer.keys import decide, roll_back, savepoint
from kvedge.layer.layer import KvLayer as BaseKvLayer
from kvedge.layer.parts import (
    PIECE,
    Parts,
    concatenated,
    decoded,
    empty_parts,
    encoded,
    kept_rows,
    ranges_of,
    refuse,
    runs_end,
    tail_of,
)
from kvedge.layer.reading import memory_of, turned_back_next
from kvedge.layer.room import reserve, slide
from kvedge.rope import Turns

_BLOCK_NUMBERS = 1 << 20  # float32 numbers worked on at a time: 4 MiB


class LayerStore:
    """Storage, quantizer and attention of one layer: a :class:`kvedge.layer.store.LayerStore`."""

    config: LayerConfig
    frozen: bool
    key_map_is_auto: bool
    key_rule: KeyRule
    turns: Turns | None
    evicted_at: int

    # Replaced as a whole, so that a reader sees one moment. No array of parts is written to, but
    # runs behind those that are held.
    _now: LayerView
    _last_row: int  # rows below it have been written

    def open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        self.frozen = self.key_map_is_auto = False
        self.evicted_at = 0
        self.key_rule = KeyRule()
        self.turns = None
        slabs = memory.reserve_slabs(config) if slabs is None else slabs
        parts = empty_parts(config, 0)
        if parts is not None and config.in_runs:
            parts = parts._replace(runs=memory.reserve_runs(config))
        self._now = LayerView(slabs, 0, 0, 0, None, NO_MAP, parts)
        self._last_row = 0
        self.config = config

    def __len__(self) -> int:
        """Tokens stored."""
        return self.view().num_tokens

    def arrays(self) -> list[np.ndarray]:
        parts: Parts | None = self._now.parts
        if parts is None:
            return [*self._now.slabs]
        body = self._now.slabs if parts.runs is None else parts.runs
        return [*body, *parts.first, *parts.last]

    def view(self) -> LayerView:
        return self._now

    def snapshot(self, end: int | None = None) -> LayerView:
        view = self.view()
        return view if end is None else self._at(view, end - view.num_dropped)

    def _at(self, view: LayerView, n: int) -> LayerView:
        """The view of the layer at another length."""
        parts = view.parts
        if parts is None:
            return view._replace(num_tokens=n)
        before, end = view.num_dropped + view.num_tokens, view.num_dropped + n
        if end < before:
            parts = parts.since(before - kept_rows(self.config))
        if end > parts.last_at + len(parts.last.key_codes) or not kept_rows(self.config):
            parts = parts.until(0)._replace(first=parts.first, last_at=end)
        return view._replace(num_tokens=max(n, 0), parts=parts)

    def end(self) -> int:
        view = self._now
        return view.num_dropped + view.num_tokens

    def written(self) -> int:
        return self._last_row - self._now.start

    @property
    def slabs(self) -> Slabs:
        return self._now.slabs

    @property
    def key_map(self) -> KeyMap:
        key_map: KeyMap = self._now.key_map
        return key_map

    def bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
        view, parts, row = self._now, self._now.parts, self._now.start
        if config.in_runs:
            row = row // RUN * RUN
            if slabs is view.slabs:
                row = 0
            else:
                runs = memory.reserve_runs(config)
                memory.copy_runs(parts.runs, config, row, self._last_row, runs)
                parts = parts._replace(runs=runs, runs_at=parts.runs_at + row)
        self._last_row -= row
        key_map = view.key_map if key_map is None else key_map
        self._now = view._replace(slabs=slabs, start=view.start - row, key_map=key_map, parts=parts)
        self.config = config

    def filled(self, position: int, n: int) -> None:
        self._last_row = max(self._last_row, self._now.start + position + n)

    def set_len(self, n: int) -> None:
        self.filled(0, n)
        self._now = self._at(self._now, n)

    def drop(self, n: int) -> None:
        view = self._now
        self._now = view._replace(
            start=view.start + n,
            num_tokens=view.num_tokens - n,
            num_dropped=view.num_dropped + n,
        )

    def holding(
        self,
        num_tokens: int,
        num_dropped: int,
        parts: Parts | None = None,
        start: int = 0,
        key_map: KeyMap | None = None,
    ) -> Callable[[], None]:
        config, slabs = self.config, self._now.slabs
        if config.recent_dtype:
            parts = empty_parts(config, num_dropped) if parts is None else parts
            assert parts is not None
            parts = parts.since(num_dropped + num_tokens - kept_rows(config))
            runs = parts.runs
            if runs is not None:
                start = num_dropped - parts.runs_at
                if start + num_tokens > config.capacity:  # it begins within a run
                    config = replace(config, capacity=start + num_tokens)
                    slabs = memory.reserve_slabs(config)
                if runs is not self._now.parts.runs or config is not self.config:
                    source, runs = runs, memory.reserve_runs(config)
                    tokens = memory.tokens_of_runs(source, config)
                    memory.copy_runs(source, config, 0, tokens, runs)
            first, last = (Slabs(*map(np.array, part)) for part in (parts.first, parts.last))
            parts = parts._replace(first=first, last=last, runs=runs)

        def take() -> None:
            own_map = self._now.key_map if key_map is None else key_map
            self._now = LayerView(slabs, start, num_tokens, num_dropped, None, own_map, parts)
            self.config = config
            self._last_row = start + num_tokens

        return take

    def restart(self, num_dropped: int = 0) -> None:
        self.holding(0, num_dropped)()
        self.evicted_at = 0
        self.turns = None

    def set_key_map(self, key_map: KeyMap) -> None:
        self.bind(self.slabs, self.config, key_map)

    def binding(self) -> object:
        return self._now, self._last_row, self.config

    def rebind(self, binding: object) -> None:
        self._now, self._last_row, self.config = cast("tuple[LayerView, int, LayerConfig]", binding)

    def keeping(self, indices: np.ndarray) -> Callable[[], None]:
        blocks = list(self._blocks(len(indices)))
        tokens = [(rows, np.empty_like(rows[blocks[0]])) for rows in self.view().tokens if blocks]

        def move() -> None:
            for block in blocks:
                # indices[i] >= i, so what a later block reads is not yet written over.
                for rows, room in tokens:
                    to = room[: block.stop - block.start]
                    np.take(rows, indices[block], axis=0, out=to, mode="clip")
                    rows[block] = to
            self._now = self._now._replace(num_tokens=len(indices))

        return move

    def push(self, keys: Array, values: Array) -> None:
        checks.check_unfrozen(self.frozen)
        self._store(*checks.checked_rows(keys, values, self.config, len(self), many=False))
        slide(self, 1)

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        checks.check_unfrozen(self.frozen)
        before = len(self)
        self._extend(keys, values, True, layout)
        slide(self, len(self) - before)

    def append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
        self._extend(keys, values, None, layout)

    @staticmethod
    def append_step(stores: Sequence[object], keys: np.ndarray, values: np.ndarray) -> bool:
        return False

    def _extend(self, keys: Array, values: Array, many: bool | None, layout: Layout) -> None:
        config, length = self.config, len(self)
        self._store(*checks.checked_rows(keys, values, config, length, many=many, layout=layout))

    def _store(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append checked float32 rows (n, num_kv_heads, channels)."""
        if len(keys):
            before = savepoint(self, len(keys))
            try:
                keys = turned_back_next(self, keys)
                self.make_ready(keys, values)
                reserve(self, len(keys))
                self.store_ready(keys, values)
            except BaseException:
                roll_back(self, before)
                raise

    @in_default_mode
    def make_ready(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Decide how checked rows are stored, and raise if they cannot be."""
        if self.key_map_is_auto:
            decide(self, keys)
        config = self.config
        self._refuse_keys(keys)
        for block in self._blocks(len(values)):
            checks.refuse_values(values[block], config)
        if config.recent_dtype:
            refuse(config, self.key_map, keys, values)

    @in_default_mode
    def store_ready(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append rows that are checked, and that there is room for."""
        view, n, parts = self._now, len(keys), self._now.parts
        piece = n if self.config.recent else PIECE  # where none but the last few stay
        for start in range(0, 0 if parts is None else n, piece):
            some, end = slice(start, start + piece), view.num_dropped + view.num_tokens + start
            parts = self._longer(parts, end, keys[some], values[some])
        if not self.config.in_runs:
            self.write_rows(view.start + view.num_tokens, keys, values)
        self._last_row = view.start + view.num_tokens + n
        self._now = view._replace(num_tokens=view.num_tokens + n, parts=parts)

    def _longer(self, parts: Parts, end: int, keys: np.ndarray, values: np.ndarray) -> Parts:
        """Those of a layer to which some tokens are appended; runs that they fill are encoded."""
        config, n = self.config, len(keys)
        new = encoded(config.part_config, NO_MAP, keys, values)
        first, sinks = parts.until(end).first, min(n, config.sinks - end)
        if sinks > 0 and end == self._now.num_dropped:  # an empty layer begins anew
            first = Slabs(*(slab[:0] for slab in first))
            parts = parts._replace(first_at=end)
        if sinks > 0 and parts.first_at + len(first.key_codes) == end:
            first = concatenated(first, Slabs(*(slab[:sinks] for slab in new)))
        else:
            first = parts.first
        kept = kept_rows(config)
        if not kept:
            return parts._replace(first=first, last_at=end + n)
        cut = end // RUN * RUN if config.in_runs else end
        if parts.last_at > cut:  # of a run that it went back into
            parts = self._with_rest(parts, cut, end)
        last, at = concatenated(parts.until(end).last, new), parts.last_at
        if parts.runs is not None:
            self._encode_runs(parts, Slabs(*(slab[cut - at :] for slab in last)), cut, end + n)
        parts = parts._replace(first=first, last=last)
        return parts.since((end if config.recent else end + n) - kept)

    def _with_rest(self, parts: Parts, cut: int, end: int) -> Parts:
        """Last tokens from a position on, those in front as they lie in rows or runs."""
        config, stop = self.config, end
        if config.recent:  # from here on they are read among the last ones
            stop = min(end, max(parts.last_at, end - config.recent))
        form = config.run if config.in_runs else config.plain
        slabs = self._now.slabs if parts.runs is None else parts.runs
        at, sides = cut - self._now.num_dropped + self._now.start, []
        for side in (False, True):
            rows = np.empty(config.rows_shape(side, stop - cut), np.float32)
            self._read(slabs, form, self.key_map, side, at, rows)
            sides.append(rows)
        rest, first = encoded(config.part_config, NO_MAP, *sides), parts.until(stop).first
        low, high = max(cut, parts.first_at), parts.first_at + len(first.key_codes)
        if low < high:
            for new, old in zip(rest, first, strict=True):
                new[low - cut : high - cut] = old[low - parts.first_at :]
        return parts._replace(
            last=concatenated(rest, parts.until(end).since(stop).last), last_at=cut
        )

    def _encode_runs(self, parts: Parts, tokens: Slabs, cut: int, end: int) -> None:
        """Encode the whole ones of tokens from a position on, in pieces."""
        config, form = self.config, self.config.run
        for start in range(cut, end // RUN * RUN, PIECE):
            stop = min(start + PIECE, end // RUN * RUN)
            some = Slabs(*(slab[start - cut : stop - cut] for slab in tokens))
            sides = (decoded(config.part_config, some, values) for values in (False, True))
            at = start - parts.runs_at
            assert parts.runs is not None
            rows = memory.rows_of(parts.runs, form, at, at + stop - start)
            for row, stored in zip(rows, encoded(form, self.key_map, *sides), strict=True):
                row[:] = stored

    def _refuse_keys(self, keys: np.ndarray) -> None:
        """Raise if any of the keys cannot be stored."""
        config, key_map = self.config, self.key_map
        for block in self._blocks(len(keys)):
            mapped = key_map.to_stored(keys[block])
            if not key_map.is_plain:
                checks.check_finite(mapped, key_map.text)
            config.key_format.refuse(mapped, "keys", config.key_rows)

    @in_default_mode
    def write_rows(self, row: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store tokens (n, num_kv_heads, channels) from a row of the slabs on."""
        slabs, config = self.slabs, self.config
        for block in self._blocks(len(keys)):
            rows = memory.rows_of(slabs, config, row + block.start, row + block.stop)
            rows.key_codes[:], rows.key_scales[:] = config.key_format.encode(
                self.key_map.to_stored(keys[block]), config.key_rows
            )
            rows.value_codes[:], rows.value_scales[:] = config.value_format.encode(
                config.stored_values(values[block]), config.value_rows
            )

    def _blocks(self, n: int) -> Iterator[slice]:
        config = self.config
        step = max(1, _BLOCK_NUMBERS // (config.num_kv_heads * config.widest))
        step = -(-step // RUN) * RUN
        return (slice(start, min(n, start + step)) for start in range(0, n, step))

    def dequantize(
        self, view: LayerView, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        for slabs, config, key_map, row, first, last in self._reads(view):
            low, high = max(start, first), min(stop, last)
            if low < high:
                to = out[low - start : high - start]
                self._read(slabs, config, key_map, values, row + low - first, to)
        return out

    @in_default_mode
    def _read(
        self,
        slabs: Slabs,
        config: LayerConfig,
        key_map: KeyMap,
        values: bool,
        row: int,
        out: np.ndarray,
    ) -> None:
        """Write keys, or values, of slabs from a row on to `out`."""
        stored = slabs.side(values, config)
        for block in self._blocks(len(out)):
            at = slice(row + block.start, row + block.stop)
            rows = stored.decode(at, np.float32)
            clamp(rows if values else key_map.from_stored(rows), out[block])
            if values:
                out[block] = config.read_values(out[block])

    def _reads(
        self, view: LayerView, num_rows: int = 1
    ) -> list[tuple[Slabs, LayerConfig, KeyMap, int, int, int]]:
        """Where tokens are read by so many queries: slabs, what they are, a row, tokens."""
        n, dropped, config = view.num_tokens, view.num_dropped, self.config
        parts: Parts | None = view.parts
        if parts is None:
            return [(view.slabs, config, view.key_map, view.start, 0, n)] if n else []
        own, end, sinks, stop = config.part_config, dropped + n, 0, None
        if parts.first_at <= dropped:
            sinks = min(n, max(0, parts.first_at + len(parts.first.key_codes) - dropped))
        if parts.runs is not None:
            stop = runs_end(end, parts.last_at) - dropped
        tail = tail_of(config, n, sinks, parts.last_at - dropped, stop, num_rows)
        form = config.plain if parts.runs is None else config.run
        body = view.slabs if parts.runs is None else parts.runs
        reads = (
            (parts.first, own, NO_MAP, dropped - parts.first_at, 0, sinks),
            (body, form, view.key_map, view.start + sinks, sinks, tail),
            (parts.last, own, NO_MAP, tail + dropped - parts.last_at, tail, n),
        )
        return [read for read in reads if read[4] < read[5]]

    def attend(self, query: Array, options: dict[str, Any]) -> Any:
        return self._attend(query, **options)

    def _attend(
        self,
        query: Array,
        *,
        window: int | None = None,
        sink_tokens: int = 0,
        out: Any = None,
        layout: Layout = "nhd",
        **options: Any,
    ) -> Any:
        rows, single = checks.as_query(query, self.config, layout=layout)
        n_rows, num_heads, head_dim = rows.shape
        view = self.view()  # taken once: another thread may be appending
        length = view.num_tokens
        window = self.config.window if window is None else window
        checks.check_reach(self.config, view, n_rows, window, sink_tokens)
        resolved = AttendOptions.make(
            head_dim,
            n_rows,
            num_heads,
            length,
            window=window,
            sink_tokens=sink_tokens,
            **options,
        )
        check_heads(resolved.lists, self.config.num_kv_heads)
        shape = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        reads = (arrays.memory_of(query, "query"), *memory_of(self, view), *resolved.arrays())
        target = arrays.as_target(out, self.config.out_shape(shape), reads=reads, layout=layout)
        to = target.rows[np.newaxis] if single else target.rows
        lse = attention.attend(self.stored(view, n_rows), rows, resolved, to)
        if not resolved.return_lse:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        rows, _ = checks.as_query(query, self.config, many=False)
        scale = default_scale(rows.shape[2]) if scale is None else checks.as_float(scale, "scale")
        return attention.scores(self.stored(self.view()), rows, scale)

    def stored(self, view: LayerView, num_rows: int = 1) -> attention.Stored:
        parts = [
            attention.StoredPart(slabs, config, key_map, row + start - first, start, stop, turn)
            for slabs, config, key_map, row, first, last in self._reads(view, num_rows)
            for start, stop, turn in ranges_of(self.turns, view.num_dropped, first, last)
        ]
        return attention.Stored(parts, self.config, view.num_tokens)


class KvLayer(BaseKvLayer):
    """A layer over such a store."""

    _store_type = LayerStore
