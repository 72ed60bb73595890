"""The classes of the NumPy backend: a layer's core in NumPy, and what is public over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.cache.cache import CacheMethods
from kvedge.core import arrays, checks, memory, registry
from kvedge.core.config import LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.formats import Format
from kvedge.core.key_map import NO_MAP, KeyMap
from kvedge.core.kivi import RUN
from kvedge.core.memory import Held, Slabs, clamp
from kvedge.core.options import AttendOptions, default_scale, takes_options_of
from kvedge.core.rows import RowShape
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer.core import LayerCore, document
from kvedge.layer.parts import ranges_of, spans_of
from kvedge.layer.types import layer_classes

_BLOCK_NUMBERS = 1 << 20  # float32 numbers worked on at a time: 4 MiB


class _LayerCore(LayerCore):
    """Storage, quantizer and attention of one layer; see LayerCore for what it must provide."""

    _now: Held  # replaced as a whole, so that a reader sees one moment
    _last_row: int  # rows below it have been written

    if TYPE_CHECKING:  # what LayerMethods adds

        def _decide_key_map(self, keys: np.ndarray) -> None: ...
        def _mark(self) -> tuple[Any, ...]: ...
        def _return_to(self, mark: tuple[Any, ...]) -> None: ...
        def _reserve(self, n: int) -> None: ...
        def _slide(self, n: int) -> None: ...
        def _memory_of(self, held: Held) -> Sequence[np.ndarray]: ...
        def _turned_back(self, keys: np.ndarray, position: int) -> np.ndarray: ...

    def _open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        self._frozen = False
        self._precise = None
        self._turns = None
        slabs = memory.reserve_slabs(config) if slabs is None else slabs
        self._now = Held(slabs, 0, 0, 0, NO_MAP)
        self._last_row = 0
        self._bind(slabs, config)

    def __len__(self) -> int:
        """Tokens stored."""
        return self._held().num_tokens

    def _held(self) -> Held:
        if self._precise is None:
            return self._now
        parts = self._precise.now  # first: see the native backend
        held = self._now
        n = max(0, min(held.num_tokens, parts.end - held.num_dropped))
        return held._replace(num_tokens=n, parts=parts)

    def _end(self) -> int:
        held = self._held()
        return held.num_dropped + held.num_tokens

    def _written(self) -> int:
        return self._last_row - self._now.start

    @property
    def _slabs(self) -> Slabs:  # type: ignore[override]
        return self._now.slabs

    @property
    def _key_map(self) -> KeyMap:  # type: ignore[override]
        key_map: KeyMap = self._now.source
        return key_map

    def _bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
        self._last_row -= self._now.start
        source = self._now.source if key_map is None else key_map
        self._now = self._now._replace(slabs=slabs, start=0, source=source)
        self._config = config

    def _filled(self, position: int, n: int) -> None:
        self._last_row = max(self._last_row, self._now.start + position + n)

    def _set_len(self, n: int) -> None:
        self._filled(0, n)
        self._now = self._now._replace(num_tokens=n)
        if self._precise is not None:
            self._precise.set_end(self._now.num_dropped + n)

    def _drop(self, n: int) -> None:
        held = self._now
        self._now = held._replace(
            start=held.start + n,
            num_tokens=held.num_tokens - n,
            num_dropped=held.num_dropped + n,
        )

    def _restart(self, num_dropped: int = 0) -> None:
        self._now = self._now._replace(start=0, num_tokens=0, num_dropped=num_dropped)
        self._last_row = 0
        self._turns = None
        if self._precise is not None:
            self._precise.restart(num_dropped)

    def _set_key_map(self, key_map: KeyMap) -> None:
        self._bind(self._slabs, self._config, key_map)

    def _binding(self) -> tuple[Any, ...]:
        return self._now, self._last_row, self._config

    def _rebind(self, binding: tuple[Any, ...]) -> None:
        self._now, self._last_row, self._config = binding

    def push(self, keys: Array, values: Array) -> None:
        checks.check_unfrozen(self._frozen)
        self._store(*checks.checked_rows(keys, values, self._config, len(self), many=False))
        self._slide(1)

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        checks.check_unfrozen(self._frozen)
        before = len(self)
        self._extend(keys, values, True, layout)
        self._slide(len(self) - before)

    def _append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
        self._extend(keys, values, None, layout)

    def _extend(self, keys: Array, values: Array, many: bool | None, layout: Layout) -> None:
        config, length = self._config, len(self)
        self._store(*checks.checked_rows(keys, values, config, length, many=many, layout=layout))

    def _store(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append checked float32 rows (n, num_kv_heads, channels)."""
        if len(keys):
            keys = self._turned_back(keys, self._end())
            mark = self._mark()
            try:
                self._make_ready(keys, values)
                self._reserve(len(keys))
                self._store_ready(keys, values)
            except BaseException:
                self._return_to(mark)
                raise

    @in_default_mode
    def _make_ready(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Decide how checked rows are stored, and raise if they cannot be."""
        if self._key_map_is_open:
            self._decide_key_map(keys)
        config = self._config
        self._refuse(keys, self._key_map, "keys", config.key_format, config.key_rows)
        self._refuse(values, NO_MAP, "values", config.value_format, config.value_rows)
        if self._precise is not None:
            self._precise.refuse(keys, values)

    def _store_ready(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append rows that are checked, and that there is room for."""
        if self._precise is None:
            self._store_in_slabs(keys, values)
            return
        made = self._precise.begin(self._end(), len(keys))
        made.first.layer._store_in_slabs(keys[: made.sinks], values[: made.sinks])
        made.last.layer._store_in_slabs(keys[made.skipped :], values[made.skipped :])
        self._store_in_slabs(keys, values)

        def append(layer: Any, first: int, n: int) -> None:
            layer._store_in_slabs(keys[first : first + n], values[first : first + n])

        self._precise.commit(made, self._precise.runs_of(made, append))

    def _store_in_slabs(self, keys: np.ndarray, values: np.ndarray) -> None:
        held, n = self._now, len(keys)
        self._write(held.start + held.num_tokens, keys, values)
        self._filled(held.num_tokens, n)
        self._now = held._replace(num_tokens=held.num_tokens + n)

    def _refuse(
        self, rows: np.ndarray, key_map: KeyMap, name: str, form: Format, shape: RowShape
    ) -> None:
        """Raise if any of the rows cannot be stored, before the first is written."""
        for block in self._blocks(len(rows)):
            mapped = key_map.to_stored(rows[block])
            if not key_map.is_plain:
                checks.check_finite(mapped, key_map.text)
            form.refuse(mapped, name, shape)

    @in_default_mode
    def _write(self, row: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store tokens (n, num_kv_heads, channels) from a row of the slabs on."""
        slabs, config = self._slabs, self._config
        for block in self._blocks(len(keys)):
            rows = memory.rows_of(slabs, config, row + block.start, row + block.stop)
            rows.key_codes[:], rows.key_scales[:] = config.key_format.encode(
                self._key_map.to_stored(keys[block]), config.key_rows
            )
            rows.value_codes[:], rows.value_scales[:] = config.value_format.encode(
                values[block], config.value_rows
            )

    def _blocks(self, n: int) -> Iterator[slice]:
        config = self._config
        step = max(1, _BLOCK_NUMBERS // (config.num_kv_heads * config.widest))
        step = -(-step // RUN) * RUN
        return (slice(start, min(n, start + step)) for start in range(0, n, step))

    def _dequantize(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        if held.parts is None:
            return self._dequantize_rows(held, values, start, stop, out)
        for span in spans_of(held, self._config):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                layer = self if span.layer is None else span.layer
                own = held if span.layer is None else layer._held()
                at = span.at + first - span.start
                to = out[first - start : last - start]
                layer._dequantize_rows(own, values, at, at + last - first, to)
        return out

    @in_default_mode
    def _dequantize_rows(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        stored = held.slabs.side(values, self._config)
        start, stop = held.start + start, held.start + stop
        key_map: KeyMap = NO_MAP if values else held.source
        for block in self._blocks(stop - start):
            at = slice(start + block.start, start + block.stop)
            clamp(key_map.from_stored(stored.decode(at, np.float32)), out[block])
        return out

    @takes_options_of(LayerCore.attend)
    def attend(
        self,
        query: Array,
        *,
        window: int | None = None,
        sink_tokens: int = 0,
        out: Any = None,
        layout: Layout = "nhd",
        **options: Any,
    ) -> Any:
        rows, single = checks.as_query(query, self._config, layout=layout)
        n_rows, num_heads, head_dim = rows.shape
        held = self._held()  # taken once: another thread may be appending
        length = held.num_tokens
        window = self._config.window if window is None else window
        checks.check_reach(self._config, held, n_rows, window, sink_tokens)
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
        reads = (arrays.memory_of(query, "query"), *self._memory_of(held), *made.arrays())
        target = arrays.as_target(out, self._config.out_shape(given), reads=reads, layout=layout)
        to = target.rows[np.newaxis] if single else target.rows
        lse = attention.attend(self._stored(held), rows, made, to)
        if not made.return_lse:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        rows, _ = checks.as_query(query, self._config, many=False)
        scale = default_scale(rows.shape[2]) if scale is None else checks.as_float(scale, "scale")
        return attention.scores(self._stored(self._held()), rows, scale)

    def _stored(self, held: Held) -> attention.Stored:
        spans = []
        for span in spans_of(held, self._config):
            own = held if span.layer is None else span.layer._held()
            config = self._config if span.layer is None else span.layer._config
            for start, stop, turn in ranges_of(self._turns, held.num_dropped, span):
                first = own.start + span.at + start - span.start
                spans.append(
                    attention.StoredSpan(own.slabs, config, own.source, first, start, stop, turn)
                )
        return attention.Stored(spans, self._config, held.num_tokens)


document(_LayerCore)


layer_types = layer_classes(_LayerCore)
globals().update({kind.__name__: kind for kind in layer_types.values()})


@registry.backend_class
class KVCache(CacheMethods):
    __doc__ = CacheMethods.__doc__
    _layer_types: ClassVar = layer_types
