"""The classes of the NumPy backend: a layer's core in NumPy, and what is public over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.cache.cache import KVCache as BaseCache
from kvedge.core import arrays, checks, memory, registry
from kvedge.core.config import LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.key_map import NO_MAP, KeyMap, KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.memory import Held, Slabs, clamp
from kvedge.core.options import AttendOptions, default_scale
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer.keys import decide, mark, return_to
from kvedge.layer.parts import LayerParts, parts_of, ranges_of
from kvedge.layer.reading import memory_of, turned_back_next
from kvedge.layer.room import reserve, slide
from kvedge.layer.store import Part, Parts, StoreParts
from kvedge.layer.types import layer_classes
from kvedge.rope import Turns

_BLOCK_NUMBERS = 1 << 20  # float32 numbers worked on at a time: 4 MiB


class LayerStore:
    """Storage, quantizer and attention of one layer: a :class:`kvedge.layer.store.LayerStore`."""

    config: LayerConfig
    frozen: bool
    key_map_is_auto: bool
    key_rule: KeyRule
    parts: StoreParts | None
    turns: Turns | None
    evicted_at: int

    _now: Held  # replaced as a whole, so that a reader sees one moment
    _last_row: int  # rows below it have been written

    def open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        self.frozen = self.key_map_is_auto = False
        self.evicted_at = 0
        self.key_rule = KeyRule()
        self.parts = None
        self.turns = None
        slabs = memory.reserve_slabs(config) if slabs is None else slabs
        self._now = Held(slabs, 0, 0, 0, NO_MAP)
        self._last_row = 0
        self.bind(slabs, config)

    def __len__(self) -> int:
        """Tokens stored."""
        return self.held().num_tokens

    def held(self) -> Held:
        if self.parts is None:
            return self._now
        parts = self.parts.now  # first: see the native backend
        held = self._now
        n = max(0, min(held.num_tokens, parts.end - held.num_dropped))
        return held._replace(num_tokens=n, parts=parts)

    def end(self) -> int:
        held = self.held()
        return held.num_dropped + held.num_tokens

    def written(self) -> int:
        return self._last_row - self._now.start

    @property
    def slabs(self) -> Slabs:
        return self._now.slabs

    @property
    def key_map(self) -> KeyMap:
        key_map: KeyMap = self._now.source
        return key_map

    def bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
        self._last_row -= self._now.start
        source = self._now.source if key_map is None else key_map
        self._now = self._now._replace(slabs=slabs, start=0, source=source)
        self.config = config

    def filled(self, position: int, n: int) -> None:
        self._last_row = max(self._last_row, self._now.start + position + n)

    def set_len(self, n: int) -> None:
        self.filled(0, n)
        self._now = self._now._replace(num_tokens=n)
        if self.parts is not None:
            self.parts.set_end(self._now.num_dropped + n)

    def drop(self, n: int) -> None:
        held = self._now
        self._now = held._replace(
            start=held.start + n,
            num_tokens=held.num_tokens - n,
            num_dropped=held.num_dropped + n,
        )

    def restart(self, num_dropped: int = 0, parts: Parts | None = None) -> None:
        if self.parts is not None and parts is None:
            parts = self.parts.empty(num_dropped)
        self._now = self._now._replace(start=0, num_tokens=0, num_dropped=num_dropped)
        self._last_row = self.evicted_at = 0
        self.turns = None
        if self.parts is not None and parts is not None:
            self.parts.now = parts

    def set_key_map(self, key_map: KeyMap) -> None:
        self.bind(self.slabs, self.config, key_map)

    def binding(self) -> object:
        return self._now, self._last_row, self.config

    def rebind(self, binding: object) -> None:
        self._now, self._last_row, self.config = cast("tuple[Held, int, LayerConfig]", binding)

    def keeping(self, indices: np.ndarray) -> Callable[[], None]:
        blocks = list(self._blocks(len(indices)))
        tokens = [(rows, np.empty_like(rows[blocks[0]])) for rows in self.held().tokens if blocks]

        def move() -> None:
            for block in blocks:
                # indices[i] >= i, so what a later block reads is not yet written over.
                for rows, room in tokens:
                    to = room[: block.stop - block.start]
                    np.take(rows, indices[block], axis=0, out=to, mode="clip")
                    rows[block] = to
            self._now = self._now._replace(num_tokens=len(indices))

        return move

    def evicted(self, kept: int) -> None:
        held = self._now
        dropped = held.num_dropped + held.num_tokens - kept
        self._now = held._replace(num_tokens=kept, num_dropped=dropped)

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

    def _extend(self, keys: Array, values: Array, many: bool | None, layout: Layout) -> None:
        config, length = self.config, len(self)
        self._store(*checks.checked_rows(keys, values, config, length, many=many, layout=layout))

    def _store(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append checked float32 rows (n, num_kv_heads, channels)."""
        if len(keys):
            if len(self) < self._now.num_tokens:  # forked beside an append, which ends here
                self.set_len(len(self))
            before = mark(self, len(keys))
            try:
                keys = turned_back_next(self, keys)
                self.make_ready(keys, values)
                reserve(self, len(keys))
                self.store_ready(keys, values)
            except BaseException:
                return_to(self, before)
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
        if self.parts is not None:
            self.parts.refuse(keys, values)

    def store_ready(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append rows that are checked, and that there is room for."""
        if self.parts is None:
            self.store_in_slabs(keys, values)
            return
        assert isinstance(self.parts, LayerParts)
        made = self.parts.begin(self.end(), len(keys))
        self._of(made.first).store_in_slabs(keys[: made.sinks], values[: made.sinks])
        self._of(made.last).store_in_slabs(keys[made.skipped :], values[made.skipped :])
        self.store_in_slabs(keys, values)

        def append(store: Any, first: int, n: int) -> None:
            store.store_in_slabs(keys[first : first + n], values[first : first + n])

        self.parts.commit(made, self.parts.runs_of(made, append))

    @staticmethod
    def _of(part: Part) -> LayerStore:
        """The store of a part, which is of this backend too."""
        return cast(LayerStore, part.store)

    def store_in_slabs(self, keys: np.ndarray, values: np.ndarray) -> None:
        held, n = self._now, len(keys)
        self.write_rows(held.start + held.num_tokens, keys, values)
        self.filled(held.num_tokens, n)
        self._now = held._replace(num_tokens=held.num_tokens + n)

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
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        if held.parts is None:
            return self.dequantize_rows(held, values, start, stop, out)
        for part in parts_of(held, self.config):
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                layer = self if part.store is None else cast(LayerStore, part.store)
                own = held if part.store is None else layer.held()
                at = part.at + first - part.start
                to = out[first - start : last - start]
                layer.dequantize_rows(own, values, at, at + last - first, to)
        return out

    @in_default_mode
    def dequantize_rows(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        stored = held.slabs.side(values, self.config)
        start, stop = held.start + start, held.start + stop
        key_map: KeyMap = NO_MAP if values else held.source
        for block in self._blocks(stop - start):
            at = slice(start + block.start, start + block.stop)
            clamp(key_map.from_stored(stored.decode(at, np.float32)), out[block])
            if values:
                out[block] = self.config.read_values(out[block])
        return out

    def attend(self, query: Array, options: Mapping[str, Any]) -> Any:
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
        held = self.held()  # taken once: another thread may be appending
        length = held.num_tokens
        window = self.config.window if window is None else window
        checks.check_reach(self.config, held, n_rows, window, sink_tokens)
        made = AttendOptions.make(
            head_dim,
            n_rows,
            num_heads,
            length,
            window=window,
            sink_tokens=sink_tokens,
            **options,
        )
        given = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        reads = (arrays.memory_of(query, "query"), *memory_of(self, held), *made.arrays())
        target = arrays.as_target(out, self.config.out_shape(given), reads=reads, layout=layout)
        to = target.rows[np.newaxis] if single else target.rows
        lse = attention.attend(self.stored(held, n_rows), rows, made, to)
        if not made.return_lse:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        rows, _ = checks.as_query(query, self.config, many=False)
        scale = default_scale(rows.shape[2]) if scale is None else checks.as_float(scale, "scale")
        return attention.scores(self.stored(self.held()), rows, scale)

    def stored(self, held: Held, num_rows: int = 1) -> attention.Stored:
        parts = []
        for part in parts_of(held, self.config, num_rows):
            own = held if part.store is None else part.store.held()
            config = self.config if part.store is None else part.store.config
            for start, stop, turn in ranges_of(self.turns, held.num_dropped, part):
                first = own.start + part.at + start - part.start
                parts.append(
                    attention.StoredPart(own.slabs, config, own.source, first, start, stop, turn)
                )
        return attention.Stored(parts, self.config, held.num_tokens)


layer_types = layer_classes(__name__, LayerStore)
globals().update({kind.__name__: kind for kind in layer_types.values()})


@registry.backend_class
class KVCache(BaseCache):
    __doc__ = BaseCache.__doc__
    _layer_types: ClassVar = layer_types
