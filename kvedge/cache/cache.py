"""The key/value cache of a whole model: the class with every public method.

Everything here is about positions; storage and attention are the layers'. What does the work lies
beside it, and works on a cache's :class:`kvedge.cache.state.CacheState`.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

from kvedge.cache import appending, editing, ranges
from kvedge.cache import snapshot as snapshots
from kvedge.cache.configs import (
    check_at_start,
    indexes_of,
    layer_configs,
    shape_of,
    states_among,
    taken_over,
    without_window,
)
from kvedge.cache.requantizing import requantize
from kvedge.cache.snapshot import KvCacheSnapshot
from kvedge.cache.state import CacheState
from kvedge.core import checks, memory, registry
from kvedge.core.config import ConfigFacts, LayerConfig
from kvedge.core.index_keys import Finish
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import memory_for
from kvedge.core.options import AttendArguments, EitherArguments, LseArguments, shows_options
from kvedge.core.storage import shows_storage, storage_of
from kvedge.core.types import (
    Array,
    CacheArguments,
    Floats,
    Layout,
    StorageArguments,
    StorageDtype,
)
from kvedge.errors import (
    CapacityExceededError,
    CorruptFileError,
    InvalidArgumentError,
    OutOfMemoryError,
    ShapeMismatchError,
)
from kvedge.eviction import CacheEviction, Eviction
from kvedge.files import load, session
from kvedge.files.contents import CacheContents
from kvedge.key_index import KeyIndex, put
from kvedge.layer import evicting
from kvedge.layer.layer import KvLayer, store_of
from kvedge.layer.room import slide
from kvedge.layer.store import LayerStore
from kvedge.rope import Rope
from kvedge.states.layer import StateLayer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring them along

    from kvedge.layer.types import AnyKvLayer

__all__ = ["KVCache", "cache_holding", "cache_over", "restored", "state_of"]

_EVICTION = "kvedge.eviction"  # among a file's metadata: what a cache evicts by

_Cache = TypeVar("_Cache", bound="KVCache")


@registry.backend_class
class KVCache(ConfigFacts):
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

    _state: CacheState

    @shows_storage()
    def __init__(
        self,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_head_dim: int | None = None,
        dtype: StorageDtype = "int8",
        max_seq_len: int | None = None,
        window: int | Sequence[int | None] | None = None,
        layers: Sequence[Mapping[str, object] | StateLayer]
        | Sequence[KvLayer | StateLayer]
        | None = None,
        index: Mapping[str, object]
        | Sequence[Mapping[str, object] | KeyIndex | None]
        | None = None,
        num_query_heads: int | None = None,
        **storage: Unpack[StorageArguments],
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
        dtype : kvedge.core.types.StorageDtype
            How keys and values are stored, such as "int8": docs/numerics.md has the table. Or what
            docs/formats.md recommends, by a name that sets the options below which are not given:
            "auto" (8.75 bits per value at head_dim 64, nearer to float32 than bfloat16), "small"
            (4.75 bits).
        key_dtype, value_dtype : kvedge.core.types.Dtype, optional
            How keys, or values, are stored where not as `dtype`.
        max_seq_len : int, optional
            Tokens to reserve for; memory is committed only as it is filled. None: the cache grows,
            doubling a layer's reservation when it is full.
        group_size : int, optional
            int8 and int4 only: channels that share a scale, at most those of a row. None: the whole
            row of a head, as for values (or keys) narrower than that.
        scale_dtype : {"float32", "float16"}
            int8 and int4 only: type of the scales; by default float32.
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
            So many last and first tokens (by default none) are read in ``recent_dtype``, which
            repairs most of what a format loses. Besides, 64 more of the last tokens are kept so:
            what is appended and taken back by :meth:`truncate`, up to 64 tokens, leaves no trace.
            Layers with a window have no ``sinks``.
        recent_dtype : kvedge.core.types.Dtype, optional
            By default "float16".
        value_rotation : bool
            Values are stored rotated by a Hadamard matrix, so that the channels of a row share what
            encoding loses, and what attention and the getters give of them is rotated back. As many
            channels together as 2^k divide ``value_head_dim``.
        layers : sequence of mappings, or of layers, and of states, optional
            Layers that differ: a mapping for each, of what is not as given above, out of
            num_kv_heads, head_dim, value_head_dim, dtype, key_dtype, value_dtype, group_size,
            scale_dtype, window, recent, sinks, recent_dtype and value_rotation. Or layer objects,
            which the cache takes over with their tokens: from then on they are changed through it
            alone. They have to stand at one position. A :class:`kvedge.StateLayer` may be anywhere
            among either: it is replaced (:meth:`replace`) or stepped by its own methods.
        index : mapping, or sequence of mapping, KeyIndex or None, optional
            Layers whose attention reads what an index chooses (docs/indexed.md): the arguments of
            :class:`kvedge.KeyIndex` but its capacity, for all layers or for each. ``append`` takes
            ``index_keys`` for them. Layers with a window have none.
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
        options = storage_of(type(self).__name__, {"dtype": dtype, **storage})
        shape: dict[str, object] = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
        }
        asked = {**shape, "num_layers": num_layers, "window": window, "max_seq_len": max_seq_len}
        ready = taken_over(layers, asked | options.chosen())
        if ready is not None:
            stores = [store_of(layer) for layer in ready if isinstance(layer, KvLayer)]
            limits = [store.config.limit for store in stores if store.config.limit is not None]
            rule = KeyRule.of_any(store.key_rule for store in stores)
            limit = min(limits, default=None)
            num_query_heads = _as_num_query_heads(num_query_heads, [s.config for s in stores])
            numbered = {i: store_of(x) for i, x in enumerate(ready) if isinstance(x, KvLayer)}
            configs_at = {i: store.config for i, store in numbered.items()}
            indexes = indexes_of(index, len(ready), configs_at, limit)
            for number, store in numbered.items():
                if number in indexes and len(indexes[number]) != len(store):
                    raise InvalidArgumentError(
                        f"layer {number} holds {len(store)} tokens, and its index "
                        f"{len(indexes[number])}"
                    )
            self._state = CacheState(ready, limit, rule, {}, indexes)
        else:
            max_seq_len = checks.check_max_seq_len(max_seq_len)
            configs = layer_configs(num_layers, layers, window, shape | options.of_layers())
            states = states_among(layers)
            check_at_start(states)
            num_query_heads = _as_num_query_heads(num_query_heads, configs)
            of_tokens = [i for i in range(len(configs) + len(states)) if i not in states]
            configs_at = dict(zip(of_tokens, configs, strict=True))
            indexes = indexes_of(index, len(configs) + len(states), configs_at, max_seq_len)
            if any(map(len, indexes.values())):
                raise InvalidArgumentError("index holds tokens, and new layers hold none")
            self._state = CacheState.new(
                configs,
                max_seq_len,
                options.key_offset,
                options.key_scale,
                {},
                states=states,
                indexes=indexes,
            )
        self._state.num_query_heads = num_query_heads

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

    def append(
        self,
        layer: int,
        keys: Array,
        values: Array,
        *,
        layout: Layout = "nhd",
        index_keys: Array | None = None,
        finish: Finish | None = None,
    ) -> None:
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
        index_keys, finish
            Of as many tokens, for a layer with an index: as of :meth:`kvedge.KeyIndex.append`.

        Raises
        ------
        LayerOutOfRangeError
        InvalidArgumentError
            The layer has an index and is given no ``index_keys``, or the other way round.
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError
            More tokens than ``max_seq_len``.
        OutOfMemoryError
            A growing cache could not grow.
        """
        state = self._state
        if layer.__class__ is not int or not 0 <= layer < state.num_layers:
            layer = checks.check_layer(layer, state.num_layers)
        store = state.store_at[layer]
        if store is None:
            raise state.no_tokens(layer, "append()")
        prepared = None
        if state.indexes or index_keys is not None or finish is not None:
            prepared = appending.prepared_keys(state, layer, keys, layout, index_keys, finish)
        start = store.end()
        try:
            if state.max_seq_len is not None and (state.has_windows or state.has_evicted):
                appending.check_position(state, store, start, keys, layout)
            store.append(keys, values, layout)
        except OutOfMemoryError:
            raise
        except MemoryError as error:
            raise appending.failed(state, layer, start, error) from error
        except CapacityExceededError as error:
            raise state.no_room(layer, error) from None
        stop = store.end()
        if prepared is not None:
            put(state.indexes[layer], prepared)
        if start < state.high_water[layer]:
            if start == stop:
                return
            state.overwrites.add(start)
        state.high_water[layer] = stop
        if state.has_windows:
            slide(store, stop - start)

    def replace(self, layer: int, n: int = 1, /, **arrays: Array) -> None:
        """Give a layer that holds a state its next one: what :meth:`append` is to the others.

        Parameters
        ----------
        layer : int
        n : int
            Tokens that the new state has seen since the last.
        **arrays : array
            As of :meth:`kvedge.StateLayer.replace`. A state that was stepped in its own arrays is
            given none.

        Raises
        ------
        LayerOutOfRangeError
        InvalidArgumentError
            The layer holds keys and values; or there is no array of that name.
        DtypeMismatchError, ShapeMismatchError, NonFiniteInputError
        CapacityExceededError
            More tokens than ``max_seq_len``.
        """
        state, limit = self.state(layer), self._state.max_seq_len
        number = checks.as_int(n, "n")
        if limit is not None and number > limit - state.position:
            error = CapacityExceededError(f"no room for {number} tokens after {state.position}")
            raise self._state.no_room(int(layer), error)
        if number < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {number}: restore() goes back")
        state.replace(**arrays)
        state.advance(number)

    def advance(self, n: int = 1) -> None:
        """Move the position past ``n`` tokens that every layer has been given.

        Raises
        ------
        LayersOutOfStepError
            Some layer has not; the message names them.
        InvalidArgumentError
            If ``n`` is negative or no integer.
        """
        state = self._state
        if n.__class__ is not int or n < 0:
            n = checks.as_int(n, "n")
            if n < 0:
                raise InvalidArgumentError(f"n must be at least 0, not {n}: truncate() goes back")
        length = state.length + n
        for store in state.stores:
            if store.end() < length:
                raise state.lacking(length)
        for state_layer in state.states:
            if state_layer.position < length:
                raise state.lacking(length)
        state.length = length

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
        config, state = self._config, self._state
        keys = checks.as_float32(keys, "keys", shape=config.rows_shape(False, state.num_layers))
        values = checks.as_float32(
            values, "values", shape=config.rows_shape(True, state.num_layers)
        )
        appending.push_step(state, keys, values)

    # ---- attention -------------------------------------------------------------------------------

    @overload
    def attend(self, layer: int, query: Array, **options: Unpack[AttendArguments]) -> Floats: ...
    @overload
    def attend(
        self, layer: int, query: Array, **options: Unpack[LseArguments]
    ) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self, layer: int, query: Array, **options: Unpack[EitherArguments]
    ) -> Floats | tuple[Floats, Floats]: ...
    @shows_options
    def attend(self, layer: int, query: Array, **options: object) -> object:
        """Attend to what one layer holds, pending tokens included.

        Parameters
        ----------
        layer : int
        query : array of float32 (or float16, bfloat16)
            (num_heads, head_dim) for one token, (n, num_heads, head_dim) for the last n stored.
        **options
            Those of a layer: see :meth:`kvedge.QuantizedKvLayer.attend`.

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
        state = self._state
        if layer.__class__ is not int or not 0 <= layer < state.num_layers:
            layer = checks.check_layer(layer, state.num_layers)
        store = state.store_at[layer]
        if store is None:
            raise state.no_tokens(layer, "attend()")
        if state.num_query_heads is not None:
            self._check_query_heads(layer, query, options.get("layout", "nhd"))
        eviction = state.eviction
        if eviction is not None:
            eviction.check_options(store, options)
        try:
            if eviction is None:
                return store.attend(query, options)
            out = store.attend(query, dict(options))
            eviction.saw(layer, store, query, options)
            return out
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
        state = self._state
        layer = checks.check_layer(layer, state.num_layers)
        store = state.store_at[layer]
        if store is None:
            raise state.no_tokens(layer, "scores()")
        if state.num_query_heads is not None:
            self._check_query_heads(layer, query)
        return store.scores(query, scale=scale)

    def _check_query_heads(self, layer: int, query: Array, layout: object = "nhd") -> None:
        """ShapeMismatchError unless a query has as many heads as the cache was told."""
        state = self._state
        store = state.store_at[layer]
        if store is None:
            raise state.no_tokens(layer, "attend()")
        rows, _ = checks.as_query(query, store.config, finite=False, layout=layout)
        if rows.shape[1] != state.num_query_heads:
            raise ShapeMismatchError(
                f"query must have num_query_heads={state.num_query_heads} heads, not "
                f"{rows.shape[1]}",
                expected=state.num_query_heads,
                got=rows.shape[1],
                layer=layer,
            )

    # ---- reading ---------------------------------------------------------------------------------

    def layer(self, index: int) -> AnyKvLayer:
        """Return the layer object, which shares the cache's storage and follows its length.

        Its getters, codes, scales and ``attend`` may be used; its mutators raise
        ReadOnlyLayerError, since the cache has to keep the layers in step.

        Parameters
        ----------
        index : int
            0 to num_layers - 1.

        Returns
        -------
        QuantizedKvLayer, Float32KvLayer or whichever is the class of its dtype; or a StateLayer,
        as :meth:`state` has it

        Raises
        ------
        LayerOutOfRangeError
        """
        layers = self._state.layers
        # Most are of that type; state() tells that of the others.
        return layers[checks.check_layer(index, len(layers))]  # type: ignore[return-value]

    def state(self, index: int) -> StateLayer:
        """Return the layer object of a layer that holds a state.

        It may be replaced and stepped, and goes back with the cache alone: its ``reset`` and
        ``restore`` raise ReadOnlyLayerError.

        Parameters
        ----------
        index : int
            0 to num_layers - 1.

        Raises
        ------
        LayerOutOfRangeError
        InvalidArgumentError
            The layer holds keys and values.
        """
        number = checks.check_layer(index, self._state.num_layers)
        state = self._state.layers[number]
        if not isinstance(state, StateLayer):
            raise InvalidArgumentError(
                f"layer {number} holds keys and values, and no state: {state!r}", layer=number
            )
        return state

    def index(self, layer: int) -> KeyIndex:
        """Return the index of a layer: what chooses the tokens that its attention reads.

        Its ``select`` gives lists for ``attend(layer, query, tokens=)``. It changes through the
        cache alone.

        Parameters
        ----------
        layer : int

        Raises
        ------
        LayerOutOfRangeError
        InvalidArgumentError
            The layer has none.
        """
        number = checks.check_layer(layer, self._state.num_layers)
        if number not in self._state.indexes:
            raise InvalidArgumentError(f"layer {number} has no index", layer=number)
        return self._state.indexes[number]

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
        kv_layer, store = self._tokens_of(layer, "k()")
        plain = store.key_map.is_plain and not store.config.recent_dtype and store.turns is None
        if out is None and store.config.key_format.is_float32 and plain:
            return kv_layer.key_codes
        return kv_layer.keys(out=out)

    @memory_for("the values of a layer")
    def v(self, layer: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Return the values of one layer, pending tokens included; as :meth:`k`.

        Returns
        -------
        ndarray of float32, (tokens, num_kv_heads, value_head_dim)
        """
        kv_layer, store = self._tokens_of(layer, "v()")
        if out is None and store.config.values_are_codes and not store.config.recent_dtype:
            return kv_layer.value_codes
        return kv_layer.values(out=out)

    def _tokens_of(self, layer: int, call: str) -> tuple[KvLayer, LayerStore]:
        """A layer of keys and values."""
        state = self._state
        index = checks.check_layer(layer, state.num_layers)
        kv_layer, store = state.layers[index], state.store_at[index]
        if store is None or isinstance(kv_layer, StateLayer):
            raise state.no_tokens(index, call)
        return kv_layer, store

    # ---- going back and forth --------------------------------------------------------------------

    def snapshot(self) -> KvCacheSnapshot:
        """Take a snapshot; nothing but states is copied. See :class:`kvedge.KvCacheSnapshot`.

        It is of the tokens advanced over: restoring it drops pending ones.

        Raises
        ------
        LayersOutOfStepError
            A state has seen tokens that are pending: there is none that has not.
        """
        return snapshots.snapshot(self._state)

    @memory_for("the tokens of a snapshot")
    def restore(self, snapshot: KvCacheSnapshot) -> None:
        """Return to a snapshot: back, or forward again. Pending tokens are dropped.

        Parameters
        ----------
        snapshot : KvCacheSnapshot
            Of this cache, or detached from any cache of the same format, whose
            bytes and key offsets then replace all that is here.

        Raises
        ------
        StaleSnapshotError
            Tokens of an attached snapshot have been overwritten since.
        InvalidArgumentError
            Not a snapshot, or one attached to another cache.
        ShapeMismatchError
            A detached snapshot of another format.
        CapacityExceededError, OutOfMemoryError
            A detached snapshot that does not fit.
        """
        snapshots.restore(self._state, snapshot)

    def restore_from_snapshot(self, snapshot: KvCacheSnapshot) -> None:
        """Return to a snapshot; another name of :meth:`restore`."""
        self.restore(snapshot)

    @memory_for("a layer that begins anew")
    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens; pending tokens are dropped.

        Raises
        ------
        PositionOutOfRangeError
            Unless 0 <= n <= len(cache); or a layer with a window has dropped tokens that the next
            one would see. Those of the last append can always be taken back, and all (n=0). Or a
            layer holds a state at another position, which cannot be cut: a :meth:`snapshot` taken
            there can be restored. States at position 0 are zero.
        """
        n = checks.check_length(n, self._state.length)
        self._state.check_kept(n)
        self._state.set_length(n)

    @memory_for("a layer that begins anew")
    def clear(self) -> None:
        """Forget all tokens. Automatic key offsets and scales are taken anew from the next ones."""
        editing.clear(self._state)

    @memory_for("the positions to keep")
    def keep(self, indices: Sequence[int] | Array) -> None:
        """Keep only some tokens, moved together in their order.

        Stored keys are not rotated to the new positions; see :meth:`shift`.

        Parameters
        ----------
        indices : sequence of int, or mask of bool (len(cache),)
            Positions, strictly increasing.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError
            Also where a layer with a window has dropped tokens.
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        """
        editing.keep(self._state, checks.check_keep(indices, self._state.length))

    @memory_for("the tokens to keep")
    def evict(self, layer: int, keep: Sequence[int] | Array) -> None:
        """Drop all tokens of one layer but those at `keep`, while positions stay as they are.

        ``len(cache)`` still counts all tokens seen, and the next one has that position; the layer
        holds fewer. It cannot go back behind this moment, but to no token at all, and snapshots
        that are attached become stale. :class:`kvedge.Eviction` chooses tokens.

        Parameters
        ----------
        layer : int
        keep : sequence or array
            As of :meth:`kvedge.QuantizedKvLayer.evict`.

        Raises
        ------
        LayerOutOfRangeError
        InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError
            Also where the layer has a window.
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        """
        state = self._state
        layer = checks.check_layer(layer, state.num_layers)
        state.refuse_pending("evict()")
        store = state.store_at[layer]
        if store is None:
            raise state.no_tokens(layer, "evict()")
        editing.evict(state, layer, evicting.check_evict(store, keep))

    @memory_for("the shifted keys of a layer")
    def shift(
        self,
        delta: int,
        *,
        rope: Rope | Sequence[Rope | None],
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Rotate stored keys of all layers by ``delta`` positions of their rotary embedding.

        With :meth:`keep` this is a context shift: drop old tokens, then move the rest to where
        they now are. No key is stored again, so any number of shifts costs no precision: see
        :meth:`kvedge.QuantizedKvLayer.shift`.

        Parameters
        ----------
        delta : int
            Positions to move by; negative moves towards the start.
        rope : Rope, or sequence of Rope or None
            The model's rotary embedding; where layers differ, one for each, None for layers whose
            keys are not rotated.
        start, stop : int, optional
            Range of tokens; by default all.

        Raises
        ------
        InvalidArgumentError, PositionOutOfRangeError, ScaleRangeError, NonFiniteInputError
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        """
        editing.shift(
            self._state, delta, rope, *checks.check_range(start, stop, self._state.length)
        )

    # ---- ranges, and other formats ---------------------------------------------------------------

    @memory_for("the tokens of a range")
    def extract(self, start: int = 0, stop: int | None = None) -> Self:
        """Copy a range of tokens, byte for byte, into a cache of their own, which grows.

        Runs (``dtype="kivi4"``) are encoded anew where `start` is no multiple of 32.

        Parameters
        ----------
        start, stop : int, optional
            Positions, by default all.

        Returns
        -------
        KVCache

        Raises
        ------
        PositionOutOfRangeError
        InvalidArgumentError
            Some layer has a window.
        LayersOutOfStepError
            Some layer has pending tokens.

        Notes
        -----
        Keys keep the rotation of the positions they had: see :meth:`shift`.
        """
        return cache_over(type(self), ranges.extract(self._state, start, stop))

    @memory_for("the tokens of another cache")
    def inject(self, other: KVCache, start: int | None = None, *, requantize: bool = False) -> None:
        """Take all tokens of another cache: byte for byte, or not at all.

        Parameters
        ----------
        other : KVCache
            Such as one that :meth:`extract` gave. It stays as it is.
        start : int, optional
            Position of the first of them, 0 to len(cache); by default they are appended. Tokens
            that are there already are replaced, those before and after them stay. (Where tokens
            follow, ``recent`` ones and ``sinks`` from `start` on are read in the cache's own format
            from then on. Layers of runs take tokens at their end, or in place of whole runs: from a
            multiple of 32 on, to one or to the end or beyond.)
        requantize : bool
            Where the other cache stores keys and values in another way (dtype, groups, scales, key
            offset), decode them and store them anew, which costs precision. Else that is an error.

        Raises
        ------
        InvalidArgumentError
            Not a KVCache; or some layer has a window.
        ShapeMismatchError
            It has other layers, heads or widths; or stores them otherwise, without ``requantize``.
        PositionOutOfRangeError
            `start` is negative or beyond the last token.
        LayersOutOfStepError
            Some layer of either has pending tokens.
        CapacityExceededError, ScaleRangeError, NonFiniteInputError, OutOfMemoryError
            Nothing has changed.

        Notes
        -----
        Keys keep the rotation of the positions they had: see :meth:`shift`.
        """
        if not isinstance(other, KVCache):
            raise InvalidArgumentError(f"other must be a KVCache, not {checks.describe(other)}")
        ranges.inject(self._state, other._state, start, requantize=requantize)

    @memory_for("the tokens of a cache, stored anew")
    @shows_storage()
    def requantize(self, dtype: StorageDtype, **storage: Unpack[StorageArguments]) -> None:
        """Store all layers in another format from now on, the tokens held included.

        A layer's old memory is given back before the next layer is converted, so that besides the
        new bytes no more than one layer is there twice. What a coarser format rounds away does not
        come back with a finer one. :class:`kvedge.KvCachePolicy` calls this when memory fills up.

        Parameters
        ----------
        dtype, **storage
            As of :class:`kvedge.KVCache`, for all layers: key_dtype, value_dtype, group_size,
            scale_dtype, key_offset, key_scale, recent, sinks, recent_dtype and value_rotation. What
            is left out is as in a new cache. "auto" looks at the first of the tokens held.

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
        Attached snapshots become stale; detached ones are of the old format. Layer objects
        that :meth:`layer` gave before are no longer the cache's, and keep their memory while they
        live, as do arrays that show it.
        """
        state = self._state
        state.refuse_pending("requantize()")
        options = storage_of("requantize", {"dtype": dtype, **storage})
        shapes = [shape_of(old) for old in state.format.layers]
        configs = layer_configs(len(shapes), shapes, None, options.of_layers())
        requantize(state, configs, options.key_offset, options.key_scale)

    # ---- copies and files ------------------------------------------------------------------------

    @memory_for("a copy of the cache")
    def copy(self) -> Self:
        """Return an independent cache with the same tokens, pending ones included.

        Snapshots stay with the cache that made them.
        """
        return cache_over(type(self), self._state.copy())

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.copy()

    @memory_for("a pickle of the cache")
    def __reduce__(self) -> tuple[object, ...]:
        state, kind = self._state, registry.named(type(self))
        contents = (kind, state.contents(), state.max_seq_len, state.key_rule, state.metadata)
        return restored, (*contents, state.num_query_heads)

    @memory_for("the file of the cache")
    def save(
        self, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the tokens to a file in safetensors format.

        The file appears whole or not at all: it is written beside ``path``, synced and renamed.
        Pending tokens are never dropped silently: it refuses while there are any.

        Parameters
        ----------
        path : str or path
        metadata : mapping of str to str, optional
            Kept in the file, and given back as ``metadata`` of the loaded cache. By default this
            cache's own ``metadata``. How the cache evicts tokens is kept with it.

        Raises
        ------
        InvalidArgumentError
            ``path`` is no path, or ``metadata`` holds something else than strings.
        LayersOutOfStepError
            Some layer holds tokens that have not been advanced over; the message names it.
        OSError
            The file cannot be written; what was at ``path`` is still there. It is found out before
            anything is computed where ``path`` leads to what is no regular file (a folder, a pipe,
            a device, an open file as /dev/stdout is), to one that is a mount point of its own or
            that this process may not write, or to a folder in which no new file can be made with
            the owner of the old one.
        OutOfMemoryError

        Notes
        -----
        The new file takes the place of the old one, through links, and has its owner, group and
        mode. Other names of the old one (hard links) keep the old content; access control lists
        and extended attributes are not copied.

        A process that is killed meanwhile leaves a file ``.NAME.<16 hex digits>.tmp`` beside
        ``path``. The next save to that path removes it: it is locked (``fcntl.flock``) while it is
        written, so one that is not locked is abandoned. Where Python has no ``fcntl`` (Windows) it
        stays until someone removes it.
        """
        state = self._state
        saved = state.metadata if metadata is None else metadata
        if state.eviction is not None and isinstance(saved, Mapping):
            saved = {**saved, _EVICTION: state.eviction.as_text()}
        session.save(state, path, metadata=saved)

    @classmethod
    @memory_for("the cache of the file")
    def load(cls, path: str | os.PathLike[str], mmap: bool = False) -> Self:
        """Read a cache from a file that :meth:`save` wrote, with either backend, on any machine.

        Parameters
        ----------
        path : str or path
        mmap : bool
            Map the file instead of reading it into memory: its pages are loaded and dropped by the
            system as it sees fit, and copied when written to. The file must not be changed in
            place while it is in use (``save`` to the same path is fine, it makes a new file).

        Returns
        -------
        KVCache

        Raises
        ------
        CorruptFileError
            The file is damaged, truncated, or something else; the message says what is wrong. So is
            one whose ``max_seq_len`` or sizes ask for more memory than can be reserved here.
        OutOfMemoryError
            There is no memory for the tokens of the file.
        FileNotFoundError, PermissionError, OSError
            As ``open`` raises them.
        """
        state = load.load(CacheState.empty, path, mmap=mmap)
        evicts = state.metadata.pop(_EVICTION, None)
        if evicts is not None:
            try:
                state.eviction = CacheEviction.of_text(evicts, state.numbered())
            except (KeyError, TypeError, ValueError, AttributeError, zipfile.BadZipFile) as error:
                raise CorruptFileError(
                    f"{os.fspath(path)}: what it says of eviction is damaged: {error}"
                ) from error
        return cache_over(cls, state)

    # ---- shape and sizes -------------------------------------------------------------------------

    @property
    def eviction(self) -> Eviction | None:
        """How the cache keeps within a budget (:class:`kvedge.KvCachePolicy`), or None."""
        cache_eviction = self._state.eviction
        return None if cache_eviction is None else cache_eviction.eviction

    @property
    def _config(self) -> LayerConfig:  # type: ignore[override]
        """The shape of a layer, if all have one; room, window and what is held twice aside."""
        form = self._state.format
        shapes = {without_window(config) for config in form.layers}
        if not shapes:
            raise InvalidArgumentError(f"no layer of this cache has keys and values ({form})")
        if len(shapes) > 1:
            raise InvalidArgumentError(
                f"layers differ in this cache ({form}): ask layer(i), append() to each"
            )
        return shapes.pop()

    def __len__(self) -> int:
        return self._state.length

    @property
    def is_empty(self) -> bool:
        """Whether no token has been advanced over."""
        return self._state.length == 0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._state.num_layers

    @property
    def num_query_heads(self) -> int | None:
        """Heads that queries must have; None: any multiple of the KV heads."""
        return self._state.num_query_heads

    @property
    def key_offset(self) -> np.ndarray | None:
        """Vectors subtracted from stored keys, (num_layers, num_kv_heads, head_dim) float32.

        None where there are none; layers whose automatic offset is not yet known show zeros.

        Raises
        ------
        InvalidArgumentError
            The layers differ: so do the shapes of their vectors.
        """
        return self._vectors([store.key_map.offset for store in self._state.stores], 0.0)

    @property
    def key_scale(self) -> np.ndarray | None:
        """Factors that stored keys are divided by, (num_layers, num_kv_heads, head_dim) float32.

        None where there are none; layers without, or whose automatic ones are not yet known, show
        ones.

        Raises
        ------
        InvalidArgumentError
            The layers differ: so do the shapes of their vectors.
        """
        return self._vectors([store.key_map.scale for store in self._state.stores], 1.0)

    def _vectors(self, of_layers: list[np.ndarray | None], none: float) -> np.ndarray | None:
        """One array of those of all layers, with `none` for a layer without; or None."""
        if all(vector is None for vector in of_layers):
            return None  # also of a cache of states alone
        plain = np.full((self.num_kv_heads, self.head_dim), none, np.float32)
        return np.stack([plain if vector is None else vector for vector in of_layers])

    @property
    def window(self) -> tuple[int | None, ...]:
        """Window of each layer, None where it keeps all or holds a state."""
        return tuple(
            None if store is None else store.config.window for store in self._state.store_at
        )

    @property
    def recent(self) -> int:
        """So many last tokens are read in :attr:`recent_dtype`: the most of any layer."""
        return max((config.recent for config in self._state.format.layers), default=0)

    @property
    def sinks(self) -> int:
        """So many first tokens are read in :attr:`recent_dtype`: the most of any layer."""
        return max((config.sinks for config in self._state.format.layers), default=0)

    @property
    def recent_dtype(self) -> str | None:
        """What first and last tokens are stored as, in the first layer that has such."""
        return next((c.recent_dtype for c in self._state.format.layers if c.recent_dtype), None)

    @property
    def max_seq_len(self) -> int | None:
        """Most tokens it takes; None if it grows."""
        return self._state.max_seq_len

    @property
    def capacity(self) -> int:
        """Tokens there is memory reserved for now, those that windows have dropped included."""
        return self._state.capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys, values, scales and indexes of all layers, and of states."""
        of_indexes = sum(index.memory_bytes for index in self._state.indexes.values())
        return of_indexes + sum(layer.memory_bytes for layer in self._state.layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes of that which the system has really committed."""
        return sum(layer.resident_bytes for layer in self._state.layers)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens held, pending ones and indexes included, and of states."""
        tokens = sum(memory.token_bytes(s.config) * len(s) for s in self._state.stores)
        tokens += sum(index.used_bytes for index in self._state.indexes.values())
        return tokens + sum(state.nbytes for state in self._state.states)

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes the same capacity would take as float32."""
        return sum(layer.fp32_memory_bytes for layer in self._state.layers)

    @property
    def metadata(self) -> dict[str, str]:
        """Notes of the user's own, saved and loaded with the cache; str to str."""
        return self._state.metadata

    def __repr__(self) -> str:
        state = self._state
        room = "growing" if state.max_seq_len is None else f"max_seq_len={state.max_seq_len}"
        length = state.length  # before those of the layers, which are never less
        pending = max(state.ends()) - length
        more = f" + up to {pending} pending" if pending else ""
        return (
            f"<{type(self).__name__} {state.format}, {length} tokens{more}, {room}, "
            f"{self.memory_bytes} bytes reserved>"
        )


def state_of(cache: KVCache) -> CacheState:
    """What a cache holds, for the rest of the package."""
    return cache._state


def cache_over(kind: type[_Cache], state: CacheState) -> _Cache:
    """A cache of class `kind`, which may have another __init__, with a state of its backend."""
    cache = kind.__new__(kind)
    cache._state = state
    return cache


def cache_holding(contents: CacheContents, max_seq_len: int | None) -> KVCache:
    """A cache of the active backend with these tokens."""
    state = CacheState.holding(contents, max_seq_len, KeyRule(), {})
    return cache_over(KVCache, state)


@memory_for("the cache of a pickle")
def restored(
    kind: str | type[KVCache],
    contents: CacheContents,
    max_seq_len: int | None,
    key_rule: KeyRule,
    metadata: Mapping[str, str],
    num_query_heads: int | None = None,  # version 0.1 had none
) -> KVCache:
    """Unpickle a cache, into the active backend unless it is of a user's own class."""
    cls: type[KVCache] = registry.resolved(kind)
    state = CacheState.holding(contents, max_seq_len, key_rule, metadata)
    state.num_query_heads = num_query_heads
    return cache_over(cls, state)


def _as_num_query_heads(num_query_heads: int | None, configs: Sequence[LayerConfig]) -> int | None:
    for config in configs:
        num_query_heads = checks.as_num_query_heads(num_query_heads, config.num_kv_heads)
    return num_query_heads
