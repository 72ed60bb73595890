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
from kvedge.core.memory import Slabs, clamp
from kvedge.core.options import AttendOptions
from kvedge.core.rows import RowShape
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer import (
    Bfloat16LayerMethods,
    Float16LayerMethods,
    Float32LayerMethods,
    QuantizedLayerMethods,
)
from kvedge.layer_core import LayerCore, document

_BLOCK_NUMBERS = 1 << 20  # float32 numbers worked on at a time: 4 MiB


class _LayerCore(LayerCore):
    """Storage, quantizer and attention of one layer; see LayerCore for what it must provide."""

    _len: int

    if TYPE_CHECKING:  # what LayerMethods adds

        def _offset_for(self, keys: np.ndarray) -> np.ndarray | None: ...

    def _open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        self._frozen = False
        self._len = 0
        self._key_offset = None
        self._bind(memory.reserve_slabs(config) if slabs is None else slabs, config)

    def __len__(self) -> int:
        """Tokens stored."""
        return self._len

    def _bind(self, slabs: Slabs, config: LayerConfig) -> None:
        self._slabs = slabs
        self._config = config

    def _filled(self, position: int, n: int) -> None:
        pass  # nothing is known of the rows that would have to be kept up

    def _set_len(self, n: int) -> None:
        self._len = n

    def _set_key_offset(self, key_offset: np.ndarray | None) -> None:
        self._key_offset = key_offset

    def push(self, keys: Array, values: Array) -> None:
        checks.check_unfrozen(self._frozen)
        self._store(*checks.checked_rows(keys, values, self._config, self._len, many=False))

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        checks.check_unfrozen(self._frozen)
        self._extend(keys, values, True, layout)

    def _append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
        self._extend(keys, values, None, layout)

    def _extend(self, keys: Array, values: Array, many: bool | None, layout: Layout) -> None:
        config, length = self._config, self._len
        self._store(*checks.checked_rows(keys, values, config, length, many=many, layout=layout))

    def _store(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append checked float32 rows (n, num_kv_heads, channels)."""
        if len(keys):
            self._store_with(keys, values, self._refused(keys, values))

    def _refused(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray | None:
        """Raise if checked rows cannot be stored, else the key offset to store them with."""
        offset = self._offset_for(keys)
        config = self._config
        self._refuse(keys, offset, "keys", config.key_format, config.key_rows)
        self._refuse(values, None, "values", config.value_format, config.value_rows)
        return offset

    def _store_with(self, keys: np.ndarray, values: np.ndarray, offset: np.ndarray | None) -> None:
        self._write(self._len, keys, values, offset)
        if offset is not self._key_offset:
            self._set_key_offset(offset)
        self._len += len(keys)

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
        self, position: int, keys: np.ndarray, values: np.ndarray, offset: np.ndarray | None
    ) -> None:
        """Store rows (n, num_kv_heads, channels) at a position, keys less the offset."""
        slabs, config = self._slabs, self._config
        for block in self._blocks(len(keys)):
            at = slice(position + block.start, position + block.stop)
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

    def _dequantize(self, values: bool, start: int, stop: int) -> Floats:
        out = np.empty(self._config.rows_shape(values, stop - start), dtype=np.float32)
        self._dequantize_into(values, start, stop, out)
        return out

    def _dequantize_into(self, values: bool, start: int, stop: int, out: np.ndarray) -> None:
        stored = self._slabs.side(values, self._config)
        offset = None if values else self._key_offset
        for block in self._blocks(stop - start):
            at = slice(start + block.start, start + block.stop)
            rows = stored.decode(at, np.float32)
            if offset is not None:
                with np.errstate(all="ignore"):
                    rows = rows + offset
            clamp(rows, out[block])

    def attend(
        self,
        query: Array,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_tokens: int = 0,
        sink_logits: Array | None = None,
        softcap: float | None = None,
        mask: Array | None = None,
        start: int = 0,
        alibi_slopes: Array | None = None,
        precision_bits: int | None = None,
        return_lse: bool = False,
        out: Any = None,
        num_threads: int | None = None,
        layout: Layout = "nhd",
    ) -> Any:
        rows, single = checks.as_query(query, self._config, layout=layout)
        n_rows, num_heads, head_dim = rows.shape
        length = self._len  # read once: another thread may be appending
        options = AttendOptions.make(
            head_dim,
            n_rows,
            num_heads,
            length,
            scale=scale,
            causal=causal,
            window=window,
            sink_tokens=sink_tokens,
            sink_logits=sink_logits,
            softcap=softcap,
            mask=mask,
            start=start,
            alibi_slopes=alibi_slopes,
            precision_bits=precision_bits,
            return_lse=return_lse,
            num_threads=num_threads,
        )
        given = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        reads = (arrays.memory_of(query, "query"), *self._slabs, *options.arrays())
        target = arrays.as_target(out, self._config.out_shape(given), reads=reads, layout=layout)
        to = target.rows[np.newaxis] if single else target.rows
        lse = attention.attend(self._stored(length), rows, options, to)
        if not options.return_lse:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        rows, _ = checks.as_query(query, self._config, many=False)
        scale = rows.shape[2] ** -0.5 if scale is None else checks.as_float(scale, "scale")
        return attention.scores(self._stored(self._len), rows, scale)

    def _stored(self, length: int) -> attention.Stored:
        return attention.Stored(self._slabs, self._config, length, self._key_offset)


def _minus(rows: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
    if offset is None:
        return rows
    with np.errstate(all="ignore"):
        return np.asarray(rows - offset)


document(_LayerCore)


@registry.backend_class
class QuantizedKvLayer(_LayerCore, QuantizedLayerMethods):
    __doc__ = QuantizedLayerMethods.__doc__


@registry.backend_class
class Float32KvLayer(_LayerCore, Float32LayerMethods):
    __doc__ = Float32LayerMethods.__doc__


@registry.backend_class
class Float16KvLayer(_LayerCore, Float16LayerMethods):
    __doc__ = Float16LayerMethods.__doc__


@registry.backend_class
class Bfloat16KvLayer(_LayerCore, Bfloat16LayerMethods):
    __doc__ = Bfloat16LayerMethods.__doc__


@registry.backend_class
class KVCache(CacheMethods):
    __doc__ = CacheMethods.__doc__
    _layer_types: ClassVar = {
        kind._dtype: kind
        for kind in (QuantizedKvLayer, Float32KvLayer, Float16KvLayer, Bfloat16KvLayer)
    }
