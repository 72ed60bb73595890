"""The classes of the NumPy backend: a layer's core in NumPy, and what is public over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.cache import CacheMethods
from kvedge.core import arrays, checks, memory, registry
from kvedge.core.config import LayerConfig
from kvedge.core.formats import Format
from kvedge.core.memory import Held, Slabs, clamp
from kvedge.core.options import AttendOptions, takes_options_of
from kvedge.core.rows import RowShape
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer_core import LayerCore, document
from kvedge.layer_types import layer_classes

_BLOCK_NUMBERS = 1 << 20  # float32 numbers worked on at a time: 4 MiB


class _LayerCore(LayerCore):
    """Storage, quantizer and attention of one layer; see LayerCore for what it must provide."""

    _now: Held  # replaced as a whole, so that a reader sees one moment
    _last_row: int  # rows below it have been written

    if TYPE_CHECKING:  # what LayerMethods adds

        def _offset_for(self, keys: np.ndarray) -> np.ndarray | None: ...
        def _reserve(self, n: int) -> None: ...
        def _slide(self, n: int) -> None: ...

    def _open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        self._frozen = False
        self._key_offset = None
        slabs = memory.reserve_slabs(config) if slabs is None else slabs
        self._now = Held(slabs, 0, 0, 0, None)
        self._last_row = 0
        self._bind(slabs, config)

    def __len__(self) -> int:
        """Tokens stored."""
        return self._now.num_tokens

    def _held(self) -> Held:
        return self._now

    def _end(self) -> int:
        held = self._now
        return held.num_dropped + held.num_tokens

    def _written(self) -> int:
        return self._last_row - self._now.start

    @property
    def _slabs(self) -> Slabs:  # type: ignore[override]
        return self._now.slabs

    def _bind(self, slabs: Slabs, config: LayerConfig) -> None:
        self._last_row -= self._now.start
        self._now = self._now._replace(slabs=slabs, start=0)
        self._config = config

    def _filled(self, position: int, n: int) -> None:
        self._last_row = max(self._last_row, self._now.start + position + n)

    def _set_len(self, n: int) -> None:
        self._filled(0, n)
        self._now = self._now._replace(num_tokens=n)

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

    def _set_key_offset(self, key_offset: np.ndarray | None) -> None:
        self._key_offset = key_offset

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
            offset = self._refused(keys, values)
            self._reserve(len(keys))
            self._store_with(keys, values, offset)

    def _refused(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray | None:
        """Raise if checked rows cannot be stored, else the key offset to store them with."""
        offset = self._offset_for(keys)
        config = self._config
        self._refuse(keys, offset, "keys", config.key_format, config.key_rows)
        self._refuse(values, None, "values", config.value_format, config.value_rows)
        return offset

    def _store_with(self, keys: np.ndarray, values: np.ndarray, offset: np.ndarray | None) -> None:
        """Append rows that are checked, and that there is room for."""
        held = self._now
        self._write(held.start + held.num_tokens, keys, values, offset)
        if offset is not self._key_offset:
            self._set_key_offset(offset)
        self._set_len(held.num_tokens + len(keys))

    def _refuse(
        self,
        rows: np.ndarray,
        offset: np.ndarray | None,
        name: str,
        form: Format,
        shape: RowShape,
    ) -> None:
        """Raise if any of the rows cannot be stored, before the first is written."""
        for block in self._blocks(len(rows)):
            centred = _minus(rows[block], offset)
            if offset is not None:
                checks.check_finite(centred, f"{name} minus key_offset")
            form.refuse(centred, name, shape)

    def _write(
        self, row: int, keys: np.ndarray, values: np.ndarray, offset: np.ndarray | None
    ) -> None:
        """Store tokens (n, num_kv_heads, channels) from a row of the slabs on, less the offset."""
        slabs, config = self._slabs, self._config
        for block in self._blocks(len(keys)):
            at = slice(row + block.start, row + block.stop)
            slabs.key_codes[at], slabs.key_scales[at] = config.key_format.encode(
                _minus(keys[block], offset), config.key_rows
            )
            slabs.value_codes[at], slabs.value_scales[at] = config.value_format.encode(
                values[block], config.value_rows
            )

    def _blocks(self, n: int) -> Iterator[slice]:
        config = self._config
        step = max(1, _BLOCK_NUMBERS // (config.num_kv_heads * config.widest))
        return (slice(start, min(n, start + step)) for start in range(0, n, step))

    def _dequantize(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        stored = held.tokens.side(values, self._config)
        offset = None if values else self._key_offset
        for block in self._blocks(stop - start):
            at = slice(start + block.start, start + block.stop)
            rows = stored.decode(at, np.float32)
            if offset is not None:
                with np.errstate(all="ignore"):
                    rows = rows + offset
            clamp(rows, out[block])
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
        reads = (arrays.memory_of(query, "query"), *held.slabs, *made.arrays())
        target = arrays.as_target(out, self._config.out_shape(given), reads=reads, layout=layout)
        to = target.rows[np.newaxis] if single else target.rows
        lse = attention.attend(self._stored(held), rows, made, to)
        if not made.return_lse:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        rows, _ = checks.as_query(query, self._config, many=False)
        scale = rows.shape[2] ** -0.5 if scale is None else checks.as_float(scale, "scale")
        return attention.scores(self._stored(self._held()), rows, scale)

    def _stored(self, held: Held) -> attention.Stored:
        return attention.Stored(held.tokens, self._config, held.num_tokens, self._key_offset)


def _minus(rows: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
    if offset is None:
        return rows
    with np.errstate(all="ignore"):
        return np.asarray(rows - offset)


document(_LayerCore)


layer_types = layer_classes(_LayerCore)
globals().update({kind.__name__: kind for kind in layer_types.values()})


@registry.backend_class
class KVCache(CacheMethods):
    __doc__ = CacheMethods.__doc__
    _layer_types: ClassVar = layer_types
