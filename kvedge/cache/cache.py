"""The key/value cache of a whole model: one layer object per layer, and what they have in common.

Everything here is about positions; storage and attention are the layers'. Each backend derives its
KVCache from :class:`CacheMethods` and names its layer types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from kvedge.cache.configs import layer_configs, taken_over
from kvedge.cache.history import CacheHistory
from kvedge.core import checks, memory
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import memory_for
from kvedge.core.options import takes_options_of
from kvedge.core.types import (
    Array,
    AttendArguments,
    CacheArguments,
    Dtype,
    Floats,
    Layout,
    ScaleDtype,
)
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    OutOfMemoryError,
    ShapeMismatchError,
)
from kvedge.layer.layer import LayerMethods

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring it along

__all__ = ["CacheMethods"]


class CacheMethods(CacheHistory):
    """The keys and values of a whole model, one layer object per layer.

    Tokens are appended to each layer and then advanced over; until then they are pending. Pending
    tokens never vanish silently. ``copy`` and pickle keep them, ``truncate``, ``clear`` and
    ``restore`` drop them, as they say, and calls that can do neither raise LayersOutOfStepError,
    which names the layers: ``save``, ``keep``, ``shift``, ``push_step``, and ``detach`` of a
    snapshot that was taken while layers held pending tokens.

    An empty cache, like an empty layer, is false as any container without items is: to ask whether
    there is a cache, write ``cache is not None``.

    Parameters are those of ``__init__``. What a layer can do by itself is in
    :class:`kvedge.QuantizedKvLayer`.

    Examples
    --------
    >>> import numpy as np
    >>> cache = KVCache(num_layers=2, num_kv_heads=8, head_dim=64)
    >>> rows = np.ones((5, 8, 64), np.float32)  # 5 tokens
    >>> for layer in range(2):
    ...     cache.append(layer, rows, rows)
    ...     out = cache.attend(layer, np.ones((5, 32, 64), np.float32))  # 4 query heads per KV head
    >>> cache.advance(5)
    >>> len(cache), out.shape
    (5, (5, 32, 64))
    >>> cache.truncate(3)  # going back costs nothing
    >>> cache.layer(0).key_codes.shape
    (3, 8, 64)
    """

    def __init__(
        self,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_head_dim: int | None = None,
        dtype: Dtype = "int8",
        key_dtype: Dtype | None = None,
        value_dtype: Dtype | None = None,
        max_seq_len: int | None = None,
        group_size: int | None = None,
        scale_dtype: ScaleDtype = "float32",
        key_offset: Array | Literal["auto"] | Sequence[Any] | None = None,
        key_scale: Array | Literal["auto"] | Sequence[Any] | None = None,
        window: int | Sequence[int | None] | None = None,
        recent: int = 0,
        sinks: int = 0,
        recent_dtype: Dtype | None = None,
        layers: Sequence[Mapping[str, Any]] | Sequence[LayerMethods] | None = None,
        num_query_heads: int | None = None,
    ) -> None:
        """Make an empty cache.

        Parameters
        ----------
        num_layers : int
            Layers of the model, 1 to 4096.
        num_kv_heads : int
            Key/value heads of each layer, 1 to 65536.
        head_dim : int
            Channels of a head in queries and keys, 1 to 1024.
        value_head_dim : int, optional
            Channels of a head in values and in what attention gives, 1 to 1024; by default
            head_dim. (DeepSeek's latent attention has 192 and 128, or 576 and 512.)
        dtype : kvedge.core.types.Dtype
            How keys and values are stored, such as "int8": docs/numerics.md has the table.
        key_dtype, value_dtype : kvedge.core.types.Dtype, optional
            How keys, or values, are stored where not as `dtype`.
        max_seq_len : int, optional
            Tokens to reserve for; memory is committed only as it is filled. None: the cache grows,
            doubling a layer's reservation when it is full.
        group_size : int, optional
            int8 and int4 only: channels that share a scale, at most those of a row. None: the whole
            row of a head, as for values (or keys) narrower than that.
        scale_dtype : {"float32", "float16"}
            int8 and int4 only: type of the scales.
        key_offset : None, "auto" or array of float32 (num_layers, num_kv_heads, head_dim)
            int8 and int4 only: a vector subtracted from every key before it is stored, which
            changes no attention and helps keys with large constant channels. "auto" takes the mean
            over the first tokens that a layer is given, in the channels whose range that halves.
            For layers that differ, a list of one each.
        key_scale : None, "auto" or array of float32 (num_layers, num_kv_heads, head_dim)
            Positive factors that keys are divided by before they are stored, and queries multiplied
            by, which changes no attention and keeps a few large channels of the keys (as Qwen2.5
            has) from costing the others their precision. "auto" takes them from the first 64
            tokens, of 16 at least: fewer are encoded anew once 16 are there. They stay until
            :meth:`clear`. (Formats of more than 8 bits gain nothing: "auto" takes none there.) For
            layers that differ, a list of one each.
        window : int, None or a sequence of them, optional
            Tokens that a query row sees, in all layers or in each. A layer with a window keeps what
            that needs, attends with it by default, and takes memory for two windows
            (:class:`kvedge.QuantizedKvLayer`). Gemma 3: ``[512] * 5 + [None]``, and so on.
        recent, sinks : int
            So many last and first tokens are read in ``recent_dtype``, which repairs most of what
            a format of few bits loses. Besides, 64 more of the last tokens are kept so: what is
            appended and taken back by :meth:`truncate`, up to 64 tokens, leaves no trace. Layers
            with a window have no ``sinks``.
        recent_dtype : kvedge.core.types.Dtype, optional
            By default "float16".
        layers : sequence of mappings, or of layers, optional
            Layers that differ: a mapping for each, of what is not as given above, out of
            num_kv_heads, head_dim, value_head_dim, dtype, key_dtype, value_dtype, group_size,
            scale_dtype, window, recent, sinks and recent_dtype. Or layer objects, which the cache
            takes over with their tokens: from then on they are changed through it alone. They have
            to stand at one position.
        num_query_heads : int, optional
            Heads of the model's queries, a multiple of the KV heads of every layer; `attend` then
            refuses any other number. It is kept in copies and pickles, not in files.

        Raises
        ------
        InvalidArgumentError
            A size out of range, or an option that float32 storage does not have; ``layers`` or
            ``num_query_heads`` that do not fit.
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
            A bad ``key_offset`` or ``key_scale`` array.
        OutOfMemoryError
            The system refused to reserve the memory.
        """
        given = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers}
        more: dict[str, Any]
        more = {"value_head_dim": value_head_dim, "group_size": group_size, "window": window}
        more |= {"key_dtype": key_dtype, "value_dtype": value_dtype}
        more |= {"max_seq_len": max_seq_len, "key_offset": key_offset, "key_scale": key_scale}
        more |= {"recent": recent or None, "sinks": sinks or None, "recent_dtype": recent_dtype}
        ready = taken_over(layers, **given, **more)
        if ready is not None:
            limits = [one._config.limit for one in ready if one._config.limit is not None]
            rule = KeyRule.of_any(one._key_rule for one in ready)
            self._take(ready, min(limits, default=None), rule, {})
            self._set_query_heads(num_query_heads)
            return
        max_seq_len = checks.check_max_seq_len(max_seq_len)
        common = {
            "dtype": dtype,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "group_size": group_size,
            "scale_dtype": scale_dtype,
            "recent": recent,
            "sinks": sinks,
            "recent_dtype": recent_dtype,
        }
        configs = layer_configs(num_layers, layers, window, common)
        for config in configs:
            checks.as_num_query_heads(num_query_heads, config.num_kv_heads)
        self._start(configs, max_seq_len, key_offset, key_scale, {})
        self._set_query_heads(num_query_heads)

    def _set_query_heads(self, num_query_heads: int | None) -> None:
        for config in self._format.layers:
            num_query_heads = checks.as_num_query_heads(num_query_heads, config.num_kv_heads)
        self._num_query_heads = num_query_heads

    @classmethod
    def with_capacity(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        **options: Unpack[CacheArguments],
    ) -> Self:
        """Make an empty cache with room for ``max_seq_len`` tokens; options as for the class."""
        max_seq_len = checks.as_int(max_seq_len, "max_seq_len")
        return cls(num_layers, num_kv_heads, head_dim, max_seq_len=max_seq_len, **options)

    # ---- tokens in -------------------------------------------------------------------------------

    def append(self, layer: int, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """Give one layer its next token or tokens; ``attend(layer, ...)`` sees them at once.

        Parameters
        ----------
        layer : int
        keys, values : array of float32 (or float16, bfloat16)
            One token, (num_kv_heads, head_dim) or flat, or several, (n, num_kv_heads, head_dim);
            values of value_head_dim where that differs. They follow what this layer already holds.
            Any strides but of the channels.
        layout : {"nhd", "hnd"}
            "hnd": several tokens come as (num_kv_heads, n, head_dim).

        Raises
        ------
        LayerOutOfRangeError
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError
            More tokens than ``max_seq_len``.
        OutOfMemoryError
            A growing cache could not grow.
        """
        if layer.__class__ is not int or not 0 <= layer < self._num_layers:
            layer = checks.check_layer(layer, self._num_layers)
        target = self._layers[layer]
        start = target._end()
        try:
            if self._has_windows and self._max_seq_len is not None:
                self._check_position(target, start, keys, layout)
            target._append(keys, values, layout)
        except OutOfMemoryError:
            raise
        except CapacityExceededError as error:
            raise self._no_room(layer, error) from None
        except MemoryError as error:
            raise self._append_failed(layer, start, error) from error
        stop = target._end()
        if start < self._high_water[layer]:
            if start == stop:
                return
            self._overwrites.add(start)
        self._high_water[layer] = stop
        if self._has_windows:
            target._slide(stop - start)

    def _check_position(self, target: Any, start: int, keys: Array, layout: Layout) -> None:
        """Raise if tokens end beyond max_seq_len, which a layer with a window cannot know."""
        n = len(checks.as_rows(keys, False, target._config, many=None, layout=layout))
        limit = self._max_seq_len
        if limit is not None and n > limit - start:
            raise CapacityExceededError(f"no room for {n} tokens after {start}")

    def _append_failed(self, layer: int, start: int, error: MemoryError) -> OutOfMemoryError:
        if start < self._high_water[layer]:
            # Broken off half way, perhaps: then bytes above may not be what marks stand for.
            self._overwrites.add(start)
            self._high_water[layer] = start
        return memory.out_of_memory(error, f"tokens appended to layer {layer}")

    def advance(self, n: int = 1) -> None:
        """Move the position past ``n`` tokens that every layer has been given.

        Raises
        ------
        LayersOutOfStepError
            Some layer has not; the message names them.
        InvalidArgumentError
            If ``n`` is negative or no integer.
        """
        if n.__class__ is not int or n < 0:
            n = checks.as_int(n, "n")
            if n < 0:
                raise InvalidArgumentError(f"n must be at least 0, not {n}: truncate() goes back")
        length = self._length + n
        for layer in self._layers:
            if layer._end() < length:
                raise self._lacking(length)
        self._length = length

    @memory_for("a token of all layers")
    def push_step(self, keys: Array, values: Array) -> None:
        """Append one token to every layer, then advance: all of it or nothing.

        Parameters
        ----------
        keys, values : array of float32 (or float16, bfloat16), (num_layers, num_kv_heads, head_dim)
            Values of value_head_dim where that differs.

        Raises
        ------
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError, OutOfMemoryError
            As for :meth:`append`.
        """
        config, layers = self._config, self._num_layers
        keys = checks.as_float32(keys, "keys", shape=config.rows_shape(False, layers))
        values = checks.as_float32(values, "values", shape=config.rows_shape(True, layers))
        self._refuse_pending("push_step()")
        start = self._length
        if start >= self._room:
            limit = self._max_seq_len
            if limit is not None and start >= limit:
                raise self._no_room(0, CapacityExceededError(f"no room for 1 token after {start}"))
            self._make_room(1)

        # What a layer may still refuse, when others already hold the token: a number that is not
        # finite, or an offset key or a scale out of range. The bytes above the length may be what a
        # snapshot stands for, so then they are put back as well.
        saved = [self._token_bytes(i, start) for i, n in enumerate(self._high_water) if n > start]
        marks = [
            (each, each._mark())
            for each in self._layers
            if each._key_map_is_open or each._precise is not None
        ]
        try:
            for layer, key, value in zip(self._layers, keys, values, strict=True):
                layer._append(key, value)
        except BaseException:
            for layer in self._layers:
                layer._set_end(start)
            for layer, mark in marks:
                layer._return_to(mark)
            for rows, copies in saved:
                for row, copy in zip(rows, copies, strict=True):
                    row[...] = copy
            # The layer named the element within its own token; these name it in the arrays given.
            checks.check_finite(keys, "keys")
            checks.check_finite(values, "values")
            raise
        if saved:
            self._overwrites.add(start)
        self._high_water = [start + 1] * self._num_layers
        self._length = start + 1
        if self._has_windows:
            for layer in self._layers:
                layer._slide(1)

    # ---- reading ---------------------------------------------------------------------------------

    def layer(self, index: int) -> Any:
        """Return the layer object, which shares the cache's storage and follows its length.

        Its getters, codes, scales and ``attend`` may be used; its mutators raise
        ReadOnlyLayerError, since the cache has to keep the layers in step.

        Parameters
        ----------
        index : int
            0 to num_layers - 1.

        Returns
        -------
        QuantizedKvLayer, Float32KvLayer or whichever is the class of its dtype

        Raises
        ------
        LayerOutOfRangeError
        """
        return self._layers[checks.check_layer(index, self._num_layers)]

    @overload
    def attend(
        self,
        layer: int,
        query: Array,
        *,
        return_lse: Literal[False] = False,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats: ...
    @overload
    def attend(
        self,
        layer: int,
        query: Array,
        *,
        return_lse: Literal[True],
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self,
        layer: int,
        query: Array,
        *,
        return_lse: bool,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats | tuple[Floats, Floats]: ...
    @takes_options_of(LayerMethods.attend)
    def attend(self, layer: int, query: Array, **options: Any) -> Any:
        """Attend to what one layer holds, pending tokens included.

        Parameters
        ----------
        layer : int
        query : array of float32 (or float16, bfloat16)
            (num_heads, head_dim) for one token, (n, num_heads, head_dim) for the last n stored.
        scale, causal, window, sink_tokens, sink_logits, softcap, mask, start, alibi_slopes
        precision_bits, tolerance, return_lse, out, num_threads, layout
            As in :meth:`kvedge.QuantizedKvLayer.attend`.

        Returns
        -------
        ndarray of float32
            Shaped as the query, but as wide as values; with ``return_lse`` a pair with the
            log-sum-exp.

        Raises
        ------
        LayerOutOfRangeError
            And whatever the layer's ``attend`` raises.
        """
        if layer.__class__ is not int or not 0 <= layer < self._num_layers:
            layer = checks.check_layer(layer, self._num_layers)
        if self._num_query_heads is not None:
            self._check_query_heads(layer, query, options.get("layout", "nhd"))
        try:
            return self._layers[layer].attend(query, **options)
        except OutOfMemoryError:
            raise
        except MemoryError as error:
            raise memory.out_of_memory(error, "the result of attention") from error

    @memory_for("logits")
    def scores(self, layer: int, query: Array, *, scale: float | None = None) -> Floats:
        """Return the scaled logits of a query against what one layer holds.

        Parameters
        ----------
        layer : int
        query : array of float32 (or float16, bfloat16), (num_heads, head_dim)
        scale : float, optional
            Factor of the dot products, by default 1 / sqrt(head_dim).

        Returns
        -------
        ndarray of float32, (num_heads, tokens)

        Raises
        ------
        LayerOutOfRangeError
            And whatever the layer's ``scores`` raises.
        """
        if self._num_query_heads is not None:
            self._check_query_heads(checks.check_layer(layer, self._num_layers), query)
        logits: Floats = self.layer(layer).scores(query, scale=scale)
        return logits

    def _check_query_heads(self, layer: int, query: Any, layout: str = "nhd") -> None:
        """ShapeMismatchError unless a query has as many heads as the cache was told."""
        config = self._layers[layer]._config
        rows, _ = checks.as_query(query, config, finite=False, layout=layout)
        if rows.shape[1] != self._num_query_heads:
            raise ShapeMismatchError(
                f"query must have num_query_heads={self._num_query_heads} heads, not "
                f"{rows.shape[1]}",
                expected=self._num_query_heads,
                got=rows.shape[1],
                layer=layer,
            )

    @memory_for("the keys of a layer")
    def k(self, layer: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return the keys of one layer, pending tokens included.

        Parameters
        ----------
        layer : int
        out : ndarray of float32 (tokens, num_kv_heads, head_dim), optional
            Filled and returned.

        Returns
        -------
        ndarray of float32, (tokens, num_kv_heads, head_dim)
            For float32 storage without ``key_scale``, ``out`` and a :meth:`shift` before, a
            read-only view of the stored keys; else a copy.
            A view keeps showing the tokens it was made for, and what later overwrites them.
        """
        held: LayerMethods = self.layer(layer)
        plain = held._key_map.is_plain and held._precise is None and held._turns is None
        if out is None and held._config.key_format.is_float32 and plain:
            return held.key_codes
        return held.keys(out=out)

    @memory_for("the values of a layer")
    def v(self, layer: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return the values of one layer, pending tokens included; as :meth:`k`.

        Returns
        -------
        ndarray of float32, (tokens, num_kv_heads, value_head_dim)
        """
        held: LayerMethods = self.layer(layer)
        if out is None and held._config.value_format.is_float32 and held._precise is None:
            return held.value_codes
        return held.values(out=out)
