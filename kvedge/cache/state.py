"""`CacheState`: the layers of a cache, its position in tokens, and its contents as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from kvedge import key_index
from kvedge.cache.overwrites import OverwriteLog
from kvedge.core import checks, memory, registry
from kvedge.core.config import MAX_CAPACITY, LayerConfig
from kvedge.core.index_keys import IndexMoment
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.types import KeyVectors
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    LayersOutOfStepError,
    PositionOutOfRangeError,
    ShapeMismatchError,
)
from kvedge.eviction import CacheEviction
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.key_index import KeyIndex
from kvedge.layer import keys
from kvedge.layer.layer import KvLayer, new_layer, store_of
from kvedge.layer.parts import PartContents, contents_of, parts_of_contents
from kvedge.layer.room import first_rows, keeps, reserve, restarts, room_until, set_end
from kvedge.layer.store import LayerStore
from kvedge.rope import Turns
from kvedge.states.layer import StateLayer, config_of, empty_state, own, put, reset

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["Adopted", "CacheState", "contents_of_stores", "layer_names"]

#: Of a layer whose bytes were put into the slabs from row 0 on: tokens, how keys are stored, tokens
#: dropped before them, what is held in another format too, what keys are still to be turned by,
#: where tokens were evicted last (0: at the end).
Adopted: TypeAlias = "tuple[int, KeyMap, int, Sequence[PartContents], Turns | None, int]"


class CacheState:
    """The layers of a cache, its position, and which of its bytes still stand for what.

    Position, pending, high water. `length` counts the tokens that all layers hold, as told by
    ``advance``. A layer that has been given the next token already holds more (its pending tokens),
    and attends to them. After going back, the bytes above are still there, up to the layer's
    high-water mark, and a later snapshot can be restored until something overwrites them.

    States. `layers` are all, with their numbers; `stores` are those of keys and values, one after
    the other, and `states` the others. A state that has been replaced for the next token is pending
    too. It cannot go back to a position: snapshots have copies of it.

    Parameters
    ----------
    layers : sequence of KvLayer or StateLayer
        They stand at one position, and are changed through the cache alone from now on.
    max_seq_len : int or None
    key_rule : KeyRule
    metadata : mapping of str to str
    indexes : mapping of int to KeyIndex, optional
        Index keys of layers, by their numbers; as many as the layer holds tokens.
    """

    __slots__ = (
        "__weakref__",
        "eviction",  # CacheEviction or None
        "format",
        "has_evicted",  # tokens among those held were evicted from some layer
        "has_windows",  # some layer keeps only what its window needs
        "high_water",  # list of int: tokens of each layer whose bytes are still there
        "indexes",  # dict of int to KeyIndex, by number of the layer
        "key_rule",  # what layers take from their first tokens, those that can
        "layers",  # tuple of KvLayer or StateLayer
        "length",
        "max_seq_len",
        "metadata",
        "num_layers",  # int
        "num_query_heads",  # None: any multiple of the KV heads
        "overwrites",
        "room",  # tokens that every layer has room for, or fewer
        "states",  # tuple of StateLayer
        "store_at",  # tuple of LayerStore or None: by number of a layer, None of a state
        "stores",  # tuple of LayerStore: those of the layers
    )

    def __init__(
        self,
        layers: Sequence[KvLayer | StateLayer],
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
        indexes: Mapping[int, KeyIndex] | None = None,
    ) -> None:
        self._hold(layers)
        self.indexes = dict(indexes or {})
        for index in self.indexes.values():
            key_index.own(index)
        numbers = [i for i, layer in enumerate(layers) if isinstance(layer, StateLayer)]
        self.format = CacheFormat.of(
            (store.config for store in self.stores),
            tuple(zip(numbers, map(config_of, self.states), strict=True)),
            tuple((number, index.config) for number, index in sorted(self.indexes.items())),
        )
        for store in self.stores:
            store.frozen = True  # changed through the cache alone, which keeps the positions
        for state in self.states:
            own(state)
        self.has_windows = any(config.window is not None for config in self.format.layers)
        self.has_evicted = any(store.evicted_at for store in self.stores)
        self.max_seq_len = max_seq_len
        self.key_rule = key_rule
        self.length: int = self.ends()[0]
        self.room = self.capacity
        self.high_water = [self.length] * self.num_layers
        self.overwrites = OverwriteLog()
        self.metadata: dict[str, str] = dict(metadata)
        self.num_query_heads: int | None = None
        self.eviction: CacheEviction | None = None

    @classmethod
    def new(
        cls,
        configs: Sequence[LayerConfig],
        max_seq_len: int | None,
        key_offset: KeyVectors,
        key_scale: KeyVectors,
        metadata: Mapping[str, str],
        tokens: Sequence[int] | None = None,
        states: Mapping[int, StateLayer] | None = None,
        indexes: Mapping[int, KeyIndex] | None = None,
    ) -> Self:
        """Make the state of an empty cache, with room for ``tokens`` in each layer.

        The arguments are checked but for the key offset and scale. ``states`` are taken over, with
        their numbers among all layers; ``configs`` and ``tokens`` are of the others.
        """
        layers: list[KvLayer | StateLayer] = []
        with_offset = [config.keys_have_scales for config in configs]
        with_scale = [config.has_auto_scale for config in configs]
        offsets = _of_each(key_offset, "key_offset", configs, with_offset)
        scales = _of_each(key_scale, "key_scale", configs, with_scale)
        for index, config in enumerate(configs):
            # The window bounds what such a layer holds; the cache bounds the position.
            limit = None if config.window is not None else max_seq_len
            rows = first_rows(limit, 0 if tokens is None else tokens[index], config.window)
            layer = new_layer(
                registry.layer_types[config.dtype],
                replace(config, limit=limit, capacity=rows),
                checks.as_key_offset(offsets[index], config),
                checks.as_key_scale(scales[index], config),
            )
            layers.append(layer)
        for number in sorted(states or {}):
            layers.insert(number, (states or {})[number])
        rule = KeyRule(isinstance(key_offset, str), isinstance(key_scale, str) and any(with_scale))
        return cls(layers, max_seq_len, rule, metadata, indexes)

    @classmethod
    def empty(
        cls,
        form: CacheFormat,
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
        tokens: Sequence[int],
    ) -> Self:
        """As :meth:`new`, with the rule of another cache, and states of zeros."""
        states = {number: empty_state(config) for number, config in form.states}
        offset: Literal["auto"] | None = "auto" if key_rule.auto_offset else None
        scale: Literal["auto"] | None = "auto" if key_rule.auto_scale else None
        indexes = {
            number: key_index.new_index(config, max_seq_len) for number, config in form.indexes
        }
        return cls.new(form.layers, max_seq_len, offset, scale, metadata, tokens, states, indexes)

    @classmethod
    def holding(
        cls,
        contents: CacheContents,
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
    ) -> Self:
        """Make the state of a cache that holds ``contents``."""
        contents = contents.of_today
        lengths = [layer.num_tokens for layer in contents.layers]
        cache = cls.empty(contents.format, max_seq_len, key_rule, metadata, lengths)
        for (number, _), state in zip(contents.format.states, contents.states, strict=True):
            cache.put_layer(number, state.copy())  # of its own class
        cache.replace(contents)
        return cache

    def copy(self) -> Self:
        """An independent one with the same tokens, pending ones included."""
        contents = self.contents(copy=False)
        other = self.holding(contents, self.max_seq_len, self.key_rule, self.metadata)
        other.num_query_heads = self.num_query_heads
        other.eviction = None if self.eviction is None else self.eviction.copy()
        return other

    def put_layer(self, number: int, layer: KvLayer | StateLayer) -> None:
        """Hold another layer in the place of one; `format` is as it was."""
        self._hold([*self.layers[:number], layer, *self.layers[number + 1 :]])
        if isinstance(layer, StateLayer):
            own(layer)

    def _hold(self, layers: Sequence[KvLayer | StateLayer]) -> None:
        self.layers = tuple(layers)
        self.num_layers = len(self.layers)
        self.store_at: tuple[LayerStore | None, ...] = tuple(
            None if isinstance(layer, StateLayer) else store_of(layer) for layer in layers
        )
        self.stores: tuple[LayerStore, ...] = tuple(
            store for store in self.store_at if store is not None
        )
        self.states = tuple(layer for layer in layers if isinstance(layer, StateLayer))

    def numbered(self) -> list[tuple[int, LayerStore]]:
        """The layers of keys and values, with their numbers among all."""
        return [(i, store) for i, store in enumerate(self.store_at) if store is not None]

    def refuse_states(self, call: str) -> None:
        """InvalidArgumentError if some layer holds a state, for a call that is about tokens."""
        if self.states:  # else asked for at each token
            raise self.no_tokens(self.store_at.index(None), call)

    def refuse_indexes(self, call: str) -> None:
        """InvalidArgumentError if some layer has an index, for a call that cannot change it."""
        for number in self.indexes:
            raise InvalidArgumentError(
                f"{call} is not for layers with an index, which layer {number} has", layer=number
            )

    def no_tokens(self, number: int, call: str) -> InvalidArgumentError:
        """What a call raises that is about keys and values, of a layer that holds a state."""
        return InvalidArgumentError(
            f"{call} needs keys and values, and layer {number} holds a state, "
            f"{self.layers[number]!r}: replace() it, or step it by its own methods",
            layer=number,
        )

    @property
    def capacity(self) -> int:
        """Tokens there is memory reserved for now, those that windows have dropped included."""
        return min(map(room_until, self.stores), default=self.max_seq_len or MAX_CAPACITY)

    def make_room(self, n: int) -> None:
        """Reserve room for ``n`` more tokens in every layer."""
        for index, store in self.numbered():
            try:
                reserve(store, n)
            except CapacityExceededError as error:
                raise self.no_room(index, error) from None
        self.room = self.capacity

    def no_room(self, index: int, error: CapacityExceededError) -> CapacityExceededError:
        """What a layer refused, with its number and the cache's limit."""
        return CapacityExceededError(
            f"layer {index} has {error}: max_seq_len is {self.max_seq_len}",
            expected=error.expected,
            got=error.got,
            layer=index,
        )

    # ---- positions -------------------------------------------------------------------------------

    def set_length(self, length: int) -> None:
        """Go to a position that all layers of keys and values keep; states at 0 begin anew."""
        begin = [  # all memory first
            store.holding(0, 0) if restarts(store, length) else None for store in self.stores
        ]
        if not length:
            for state in self.states:
                reset(state)
        if any(restarts(store, length) for store in self.stores):
            self.forget_bytes()
        for store, at_0 in zip(self.stores, begin, strict=True):
            if at_0 is None:
                set_end(store, length)
            else:
                at_0()
                store.evicted_at, store.turns = 0, None
        self.length = length
        for number, keys_of in self.indexes.items():
            n = min(len(keys_of), self._tokens_at(number, length))
            key_index.go_to(keys_of, key_index.moment_of(keys_of, n))

    def forget_bytes(self) -> None:
        """Note that no byte stands for a position any more, and that layers begin anew."""
        self.overwrites.add(0)
        self.high_water = [0] * self.num_layers
        self.room = 0

    def check_kept(self, length: int) -> None:
        """Raise unless every layer can go to a position."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, StateLayer) and length not in (0, layer.position):
                raise PositionOutOfRangeError(
                    f"cannot go to position {length}: layer {index} holds a state, which has seen "
                    f"{layer.position} tokens and cannot be cut: restore() a snapshot() that was "
                    "taken there",
                    got=length,
                    layer=index,
                )
        for index, store in self.numbered():
            if not keeps(store, length):
                if store.evicted_at:
                    raise PositionOutOfRangeError(
                        f"cannot go to position {length}: layer {index} has evicted tokens at "
                        f"position {store.evicted_at}, which it cannot go back behind"
                    )
                raise PositionOutOfRangeError(
                    f"cannot go to position {length}: layer {index} keeps a window of "
                    f"{store.config.window} tokens, and has dropped those before "
                    f"{store.view().num_dropped}"
                )
        for number, keys_of in self.indexes.items():
            key_index.moment_of(keys_of, self._tokens_at(number, length))

    def refuse_pending(self, call: str) -> None:
        """LayersOutOfStepError if some layer has pending tokens, for a call that needs none."""
        ahead = self.ahead(self.length)
        if ahead:
            hold = "holds" if len(ahead) == 1 else "hold"
            raise LayersOutOfStepError(
                f"{call} needs all layers at position {self.length}, but {layer_names(ahead)} "
                f"{hold} tokens beyond it: advance() over them or truncate() first",
                expected=self.length,
                got=self.ends()[ahead[0]],
                layer=ahead[0],
            )

    def refuse_evicted(self, call: str) -> None:
        """InvalidArgumentError if tokens were evicted, for a call that needs all positions."""
        for index, store in enumerate(self.stores):
            if store.evicted_at:
                raise InvalidArgumentError(
                    f"{call} needs all tokens: layer {index} has evicted "
                    f"{store.view().num_dropped} of {store.end()}"
                )

    def ahead(self, length: int) -> list[int]:
        """Layers with tokens beyond the length, which are pending."""
        return [i for i, end in enumerate(self.ends()) if end != length]

    def ends(self) -> list[int]:
        """Tokens that each layer has been given."""
        return [
            layer.position if isinstance(layer, StateLayer) else store_of(layer).end()
            for layer in self.layers
        ]

    def lacking(self, length: int) -> LayersOutOfStepError:
        """What advance() raises where layers have not been given their tokens."""
        ends = self.ends()
        lacking = [i for i, end in enumerate(ends) if end < length]
        fewest = min(ends[i] for i in lacking)
        return LayersOutOfStepError(
            f"cannot advance to position {length}: {layer_names(lacking)} of {self.num_layers} "
            f"lack tokens (the shortest holds {fewest}): append to them first"
            + (", replace or step the states" if self.states else ""),
            expected=length,
            got=fewest,
            layer=lacking[0],
        )

    # ---- all that is held ------------------------------------------------------------------------

    def contents(
        self,
        upto: int | None = None,
        *,
        copy: bool = True,
        states: tuple[StateLayer, ...] | None = None,
        moments: Sequence[IndexMoment] | None = None,
    ) -> CacheContents:
        """Return the stored bytes of each layer, up to a position or of all tokens it holds.

        `states` and `moments` are those at the position, where the cache's own have gone on.
        """
        length = self.length if upto is None else upto  # first: layers never hold less
        own_states = self.states if states is None else states
        contents = contents_of_stores(
            self.stores,
            self.format,
            length,
            upto,
            copy=copy,
            states=tuple(state.copy() for state in own_states) if copy else own_states,
        )
        if not self.indexes:
            return contents
        if moments is None:
            moments = self.moments(upto)
        pairs = zip(sorted(self.indexes), moments, strict=True)
        arrays = tuple(self.indexes[number].arrays(moment) for number, moment in pairs)
        return replace(contents, indexes=arrays)

    def moments(self, upto: int | None = None) -> list[IndexMoment]:
        """Where each index stands, or stood at a position."""
        return [
            key_index.moment_of(index, None if upto is None else self._tokens_at(number, upto))
            for number, index in sorted(self.indexes.items())
        ]

    def _tokens_at(self, number: int, position: int) -> int:
        """Tokens that a layer holds up to a position."""
        store = self.store_at[number]
        assert store is not None
        return max(0, position - store.view().num_dropped)

    def replace(self, contents: CacheContents) -> None:
        """Hold what ``contents`` holds, and nothing else; all or nothing."""
        if contents.format != self.format:
            raise ShapeMismatchError(
                f"the snapshot is of {contents.format}, this cache is {self.format}"
            )
        for (index, store), tokens in zip(self.numbered(), contents.layers, strict=True):
            try:
                reserve(store, max(0, tokens.num_tokens - len(store)))
            except CapacityExceededError as error:
                raise self.no_room(index, error) from None
        self.adopt(
            contents.length,
            [
                (t.num_tokens, t.key_map, t.num_dropped, t.parts, t.turns, t.evicted_at)
                for t in contents.layers
            ],
            [t.arrays for t in contents.layers],
        )
        self.put_states(contents.states)
        for number, of_index in zip(sorted(self.indexes), contents.indexes, strict=True):
            key_index.hold(self.indexes[number], of_index)

    def put_states(self, states: Sequence[StateLayer]) -> None:
        """Let the states be as others of the same format are."""
        for state, other in zip(self.states, states, strict=True):
            put(state, other.arrays.values(), other.position)

    def adopt(
        self,
        length: int,
        layers: Sequence[Adopted],
        arrays: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> None:
        """Take over bytes that were put into the slabs of each layer, or those of arrays."""
        hold = [  # all memory first
            store.holding(
                tokens,
                dropped,
                parts_of_contents(parts, store.config, dropped, dropped + tokens),
                key_map=key_map,
            )
            for store, (tokens, key_map, dropped, parts, *_) in zip(
                self.stores, layers, strict=True
            )
        ]
        if arrays is not None:
            if any(self.high_water):
                self.overwrites.add(0)
            for store, of_layer in zip(self.stores, arrays, strict=True):
                memory.copy_tokens(of_layer, store.slabs, len(of_layer[0]))
        for store, take, (tokens, _, dropped, _, turns, evicted_at) in zip(
            self.stores, hold, layers, strict=True
        ):
            take()
            keys.store_as(store, store.key_map, keys.rule_of(store, self.key_rule))
            store.turns, store.evicted_at = turns, 0
            if dropped and store.config.window is None:  # what is left is taken for all there is
                store.evicted_at = evicted_at or dropped + tokens
        self.has_evicted = any(store.evicted_at for store in self.stores)
        self.high_water = self.ends()
        self.length = length
        self.room = self.capacity


def contents_of_stores(
    stores: Sequence[LayerStore],
    form: CacheFormat,
    length: int,
    upto: int | None = None,
    *,
    copy: bool = True,
    states: tuple[StateLayer, ...] = (),
) -> CacheContents:
    """The stored bytes of layers, up to a position or of all tokens they hold, and states."""
    layers = []
    for index, store in enumerate(stores):
        view = store.snapshot(upto)
        if upto is not None and not keeps(store, upto, view):
            raise LayersOutOfStepError(
                f"layer {index} has dropped tokens that position {upto} sees: they were "
                "appended to meanwhile"
            )
        n = view.num_tokens if upto is None else max(0, upto - view.num_dropped)
        rows = slice(view.start, view.start + n)
        arrays = [slab[rows].copy() if copy else slab[rows] for slab in view.slabs]
        dropped = view.num_dropped if upto is None else min(view.num_dropped, upto)
        parts = contents_of(view, store.config, dropped, dropped + n, copy=copy)
        layers.append(
            LayerContents(
                *(arrays[0], arrays[1], arrays[2], arrays[3], store.key_map),
                num_dropped=dropped,
                parts=parts,
                turns=store.turns if n else None,
                evicted_at=store.evicted_at,
            )
        )
    return CacheContents(form, length, tuple(layers), states)


def _of_each(
    value: KeyVectors, name: str, configs: Sequence[LayerConfig], can_be_auto: Sequence[bool]
) -> Sequence[object]:
    """The key offset or scale of each layer, by what the cache was given; not yet checked."""
    if isinstance(value, str):  # for the layers that can have one, if any can
        return [value if can or not any(can_be_auto) else None for can in can_be_auto]
    if isinstance(value, (list, tuple)):
        if len(value) != len(configs):
            raise ShapeMismatchError(f"{name} must hold {len(configs)} vectors, not {len(value)}")
        return value
    if value is None or (name == "key_offset" and not can_be_auto[0]):
        return [value] * len(configs)
    shape = (len(configs), configs[0].num_kv_heads, configs[0].head_dim)
    vectors: Sequence[np.ndarray] = list(checks.as_float32(value, name, shape=shape))
    return vectors


def layer_names(layers: Sequence[int]) -> str:
    """Name some layers in a message: "layers 3, 4, 5, ... (12 layers)"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    listed = ", ".join(map(str, layers[:8]))
    return f"layers {listed}" + (f", ... ({len(layers)} layers)" if len(layers) > 8 else "")
