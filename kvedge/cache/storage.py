"""A cache whose tokens are stored anew, in another format, where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from kvedge.cache.configs import layer_configs, shape_of
from kvedge.cache.ranges import CacheRanges
from kvedge.core import registry
from kvedge.core.memory import memory_for
from kvedge.core.types import Array, Dtype, ScaleDtype
from kvedge.files.contents import CacheFormat
from kvedge.layer.layer import new_layer

__all__ = ["CacheStorage"]

_SLACK = 1.01  # for rounding


class CacheStorage(CacheRanges):
    """The part of a cache that changes how it is stored."""

    @memory_for("the tokens of a cache, stored anew")
    def requantize(
        self,
        dtype: Dtype,
        *,
        key_dtype: Dtype | None = None,
        value_dtype: Dtype | None = None,
        group_size: int | None = None,
        scale_dtype: ScaleDtype = "float32",
        key_offset: Array | Literal["auto"] | Sequence[Any] | None = None,
        key_scale: Array | Literal["auto"] | Sequence[Any] | None = None,
        recent: int = 0,
        sinks: int = 0,
        recent_dtype: Dtype | None = None,
    ) -> None:
        """Store all layers in another format from now on, the tokens held included.

        A layer's old memory is given back before the next layer is converted, so that besides the
        new bytes no more than one layer is there twice. What a coarser format rounds away does not
        come back with a finer one. :class:`kvedge.KvCachePolicy` calls this when memory fills up.

        Parameters
        ----------
        dtype, key_dtype, value_dtype, group_size, scale_dtype, key_offset, key_scale, recent, sinks
        recent_dtype
            As of :class:`kvedge.KVCache`, for all layers; what is left out is as in a new cache.
            "auto" looks at the first of the tokens held.

        Raises
        ------
        InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, LayoutError
        LayersOutOfStepError
            Some layer has pending tokens.
        NonFiniteInputError, ScaleRangeError
            A number is too large for the new format.
        OutOfMemoryError
            Nothing has changed, as after the others. (If memory runs out in the middle, layers
            converted by then stay so, and the cache is whole.)

        Notes
        -----
        Snapshots that are marks become stale; detached ones are of the old format. Layer objects
        that :meth:`layer` gave before are no longer the cache's, and keep their memory while they
        live, as do arrays that show it.
        """
        self._refuse_pending("requantize()")
        common = {
            "dtype": dtype,
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "group_size": group_size,
            "scale_dtype": scale_dtype,
            "recent": recent,
            "sinks": sinks,
            "recent_dtype": recent_dtype,
        }
        shapes = [shape_of(old) for old in self._format.layers]
        configs = layer_configs(self._num_layers, shapes, None, common)
        made = type(self).__new__(type(self))  # its memory is reserved, and not yet taken
        tokens = [len(layer) for layer in self._layers]
        made._start(configs, self._max_seq_len, key_offset, key_scale, {}, tokens)
        for old, new in zip(self._layers, made._layers, strict=True):
            _check_fits(old, new)

        layers = list(self._layers)
        del old  # or it would keep what is to be given back
        self._overwrites.add(0)
        try:
            for index, new in enumerate(made._layers):
                _convert(layers[index], new)
                layers[index] = new
                self._layers = tuple(layers)  # the old one goes, unless somebody else has it
        finally:
            self._format = CacheFormat.of(layer._config for layer in self._layers)
            self._high_water = [self._length] * self._num_layers
            self._room = self.capacity
        self._key_rule = made._key_rule


def _blocks(layer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The keys and values of a layer, float32 (n, num_kv_heads, channels), some at a time."""
    held, step = layer._held(), layer._block_tokens()
    for start in range(0, held.num_tokens, step):
        stop = min(held.num_tokens, start + step)
        rows = [
            np.empty(layer._config.rows_shape(values, stop - start), np.float32)
            for values in (False, True)
        ]
        for values in (False, True):
            layer._read_rows(held, values, start, stop, rows[values])
        yield rows[0], rows[1]


def _convert(old: Any, new: Any) -> None:
    """Fill an empty layer with the tokens of another."""
    new._restart(old.num_dropped)
    for keys, values in _blocks(old):
        new._append(keys, values)


def _check_fits(old: Any, new: Any) -> None:
    """Raise what storing a layer's tokens in another would raise; quick unless some are huge."""
    if not len(old) or _surely_fits(old, new):
        return
    config = replace(new._config, limit=None, window=None)
    scratch = new_layer(registry.backend_class_of(type(new)), config, old._block_tokens())
    scratch._store_keys_as(new._key_map, new._key_rule)
    for keys, values in _blocks(old):
        scratch._append(keys, values)
        scratch._set_len(0)


def _surely_fits(old: Any, new: Any) -> bool:
    """Whether no element can pass the range of the new format, by a bound of all of them."""
    config, tokens = old._config, old._held().tokens
    values = config.value_format.largest(tokens.value_codes, tokens.value_scales)
    keys = config.key_format.largest(tokens.key_codes, tokens.key_scales)
    was, will = old._key_map, new._key_map
    keys = keys * _largest(was.scale, 1.0) + _largest(was.offset, 0.0)
    keys += keys if new._key_rule.auto_offset else _largest(will.offset, 0.0)
    if will.scale is not None:  # automatic ones are at least 1
        keys /= float(will.scale.min())
    configs = [new._config] + ([] if new._precise is None else [new._config.precise])
    limits = [
        (each.key_format.limit(each.key_rows), each.value_format.limit(each.value_rows))
        for each in configs
    ]
    return all(_SLACK * keys <= key and _SLACK * values <= value for key, value in limits)


def _largest(vector: np.ndarray | None, none: float) -> float:
    return none if vector is None else float(np.abs(vector).max())
