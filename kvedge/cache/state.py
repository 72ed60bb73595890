"""What a cache holds: its layers, how far each is, and all of it taken out or put in.

Nothing here is public. :class:`kvedge.cache.cache.CacheMethods` makes a KVCache of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvedge.cache.facts import CacheFacts
from kvedge.cache.snapshot import KvCacheSnapshot, OverwriteLog
from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.memory import memory_for
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    LayersOutOfStepError,
    PositionOutOfRangeError,
    ShapeMismatchError,
    StaleSnapshotError,
)
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.layer.layer import LayerMethods, new_layer
from kvedge.layer.parts import PartContents, contents_of
from kvedge.layer.room import first_rows
from kvedge.rope import Turns

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["CacheState", "layer_names"]


class CacheState(CacheFacts):
    """The layers of a cache, its position, and which of its bytes still stand for what.

    Position, pending, high water. ``len(cache)`` counts the tokens that all layers hold, as told by
    ``advance``. A layer that has been given the next token already holds more (its pending tokens),
    and attends to them. After going back, the bytes above are still there, up to the layer's
    high-water mark, and a later snapshot can be restored until something overwrites them.
    """

    _layer_types: ClassVar[dict[str, type[LayerMethods]]]  # the backend's, by their dtype

    _has_windows: bool  # some layer keeps only what its window needs
    _key_rule: KeyRule  # what layers take from their first tokens, those that can
    _room: int  # tokens that every layer has room for, or fewer
    _high_water: list[int]  # tokens of each layer whose bytes are still there, whatever its length
    _overwrites: OverwriteLog

    def _start(
        self,
        configs: Sequence[LayerConfig],
        max_seq_len: int | None,
        key_offset: Any,
        key_scale: Any,
        metadata: Mapping[str, str],
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Be an empty cache, with room for ``tokens`` in each layer.

        The arguments are checked but for the key offset and scale.
        """
        layers = []
        with_offset = [config.keys_have_scales for config in configs]
        with_scale = [config.has_auto_scale for config in configs]
        offsets = _of_each(key_offset, "key_offset", configs, with_offset)
        scales = _of_each(key_scale, "key_scale", configs, with_scale)
        for index, config in enumerate(configs):
            # The window bounds what such a layer holds; the cache bounds the position.
            limit = None if config.window is not None else max_seq_len
            rows = first_rows(limit, 0 if tokens is None else tokens[index], config.window)
            layer = new_layer(
                self._layer_types[config.dtype],
                replace(config, limit=limit),
                rows,
                checks.as_key_offset(offsets[index], config),
                checks.as_key_scale(scales[index], config),
            )
            layers.append(layer)
        rule = KeyRule(isinstance(key_offset, str), isinstance(key_scale, str) and any(with_scale))
        self._take(layers, max_seq_len, rule, metadata)

    def _take(
        self,
        layers: Sequence[Any],
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
    ) -> None:
        """Be a cache of layers that stand at one position."""
        for layer in layers:
            layer._frozen = True  # changed through the cache alone, which keeps the positions
        self._layers = tuple(layers)
        self._num_layers = len(layers)
        self._format = CacheFormat.of(layer._config for layer in layers)
        self._has_windows = any(config.window is not None for config in self._format.layers)
        self._max_seq_len = max_seq_len
        self._key_rule = key_rule
        self._length = layers[0]._end()
        self._room = self.capacity
        self._high_water = [self._length] * self._num_layers
        self._overwrites = OverwriteLog()
        self._metadata = dict(metadata)

    def _make_room(self, n: int) -> None:
        """Reserve room for ``n`` more tokens in every layer."""
        for index, layer in enumerate(self._layers):
            try:
                layer._reserve(n)
            except CapacityExceededError as error:
                raise self._no_room(index, error) from None
        self._room = self.capacity

    def _no_room(self, index: int, error: CapacityExceededError) -> CapacityExceededError:
        """What a layer refused, with its number and the cache's limit."""
        return CapacityExceededError(
            f"layer {index} has {error}: max_seq_len is {self._max_seq_len}",
            expected=error.expected,
            got=error.got,
            layer=index,
        )

    # ---- positions -------------------------------------------------------------------------------

    def _set_length(self, length: int) -> None:
        """Go to a position that all layers keep."""
        if not length and any(layer.num_dropped for layer in self._layers):
            self._forget_bytes()
        for layer in self._layers:
            layer._set_end(length)
        self._length = length

    def _forget_bytes(self) -> None:
        """Note that no byte stands for a position any more, and that layers begin anew."""
        self._overwrites.add(0)
        self._high_water = [0] * self._num_layers
        self._room = 0

    def _check_kept(self, length: int) -> None:
        """Raise unless every layer can go to a position."""
        for index, layer in enumerate(self._layers):
            if not layer._keeps(length):
                held = layer._held()
                raise PositionOutOfRangeError(
                    f"cannot go to position {length}: layer {index} keeps a window of "
                    f"{layer.window} tokens, and has dropped those before {held.num_dropped}"
                )

    def _refuse_pending(self, call: str) -> None:
        ahead = self._ahead(self._length)
        if ahead:
            hold = "holds" if len(ahead) == 1 else "hold"
            raise LayersOutOfStepError(
                f"{call} needs all layers at position {self._length}, but {layer_names(ahead)} "
                f"{hold} tokens beyond it: advance() over them or truncate() first",
                expected=self._length,
                got=self._layers[ahead[0]]._end(),
                layer=ahead[0],
            )

    def _ahead(self, length: int) -> list[int]:
        """Layers with tokens beyond the length, which are pending."""
        return [i for i, layer in enumerate(self._layers) if layer._end() != length]

    def _lacking(self, length: int) -> LayersOutOfStepError:
        """What advance() raises where layers have not been given their tokens."""
        lacking = [i for i, layer in enumerate(self._layers) if layer._end() < length]
        held = min(self._layers[i]._end() for i in lacking)
        return LayersOutOfStepError(
            f"cannot advance to position {length}: {layer_names(lacking)} of {self._num_layers} "
            f"lack tokens (the shortest holds {held}): append to them first",
            expected=length,
            got=held,
            layer=lacking[0],
        )

    # ---- snapshots -------------------------------------------------------------------------------

    def _is_stale(self, snapshot: KvCacheSnapshot) -> bool:
        if self._has_windows and not all(layer._keeps(snapshot._length) for layer in self._layers):
            return True
        return self._overwrites.reach_below(snapshot._length, since=snapshot._epoch)

    def _checked_mark(self, snapshot: Any) -> int:
        """Return the length to go to for a mark that this cache made and that still holds."""
        if not isinstance(snapshot, KvCacheSnapshot):
            raise InvalidArgumentError(
                f"snapshot must be a KvCacheSnapshot, not {checks.describe(snapshot)}"
            )
        if snapshot._cache is None or snapshot._cache() is not self:
            raise InvalidArgumentError(
                "this snapshot is a mark in another cache: only its detach() can be restored here"
            )
        if self._is_stale(snapshot):
            raise StaleSnapshotError(
                f"tokens below position {snapshot._length} have been overwritten, or dropped from "
                "a window, since this snapshot was taken: detach() it before that"
            )
        return snapshot._length

    @memory_for("the bytes of a snapshot")
    def _contents_at(self, snapshot: KvCacheSnapshot, *, alone: bool = True) -> CacheContents:
        """Copy what a mark stands for, which may lie above the current length.

        `alone`: pending tokens, which are not in it, would be lost.
        """
        length = self._checked_mark(snapshot)
        if alone and snapshot._pending:
            held = "was" if len(snapshot._pending) == 1 else "were"
            raise LayersOutOfStepError(
                f"detach() would lose tokens: {layer_names(list(snapshot._pending))} {held} "
                f"beyond position {length} when this snapshot was taken: advance() over them or "
                "truncate() first, and take another"
            )
        contents = self._contents(length)
        self._checked_mark(snapshot)  # nothing was overwritten meanwhile
        return contents

    # ---- all that is held ------------------------------------------------------------------------

    def _contents(self, upto: int | None = None, *, copy: bool = True) -> CacheContents:
        """Return the stored bytes of each layer, up to a position or of all tokens it holds."""
        length = self._length if upto is None else upto  # first: layers never hold less
        layers = []
        for index, layer in enumerate(self._layers):
            held = layer._held()
            if upto is not None and not layer._keeps(upto, held):
                raise LayersOutOfStepError(
                    f"layer {index} has dropped tokens that position {upto} sees: they were "
                    "appended to meanwhile"
                )
            n = held.num_tokens if upto is None else max(0, upto - held.num_dropped)
            rows = slice(held.start, held.start + n)
            keys, values, key_scales, value_scales = (
                slab[rows].copy() if copy else slab[rows] for slab in held.slabs
            )
            dropped = held.num_dropped if upto is None else min(held.num_dropped, upto)
            parts = contents_of(held, dropped, dropped + n, copy=copy)
            layers.append(
                LayerContents(
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    layer._key_map,
                    dropped,
                    parts,
                    layer._turns if n else None,
                )
            )
        return CacheContents(self._format, length, tuple(layers))

    def _replace(self, contents: CacheContents) -> None:
        """Hold what ``contents`` holds, and nothing else; all or nothing."""
        if contents.format != self._format:
            raise ShapeMismatchError(
                f"the snapshot is of {contents.format}, this cache is {self._format}"
            )
        for index, (layer, tokens) in enumerate(zip(self._layers, contents.layers, strict=True)):
            try:
                layer._reserve(max(0, tokens.num_tokens - len(layer)))
            except CapacityExceededError as error:
                raise self._no_room(index, error) from None
        if any(self._high_water):
            self._overwrites.add(0)
        for layer, tokens in zip(self._layers, contents.layers, strict=True):
            memory.copy_tokens(tokens.arrays, layer._slabs, tokens.num_tokens)
        self._adopt(
            contents.length,
            [(t.num_tokens, t.key_map, t.num_dropped, t.parts, t.turns) for t in contents.layers],
        )

    def _adopt(
        self,
        length: int,
        layers: list[tuple[int, KeyMap, int, Sequence[PartContents], Turns | None]],
    ) -> None:
        """Take over bytes that were put into the slabs.

        Of each layer: tokens, which lie from row 0 on, how keys are stored, tokens dropped before
        them, what is held in another format too, and what keys are still to be turned by.
        """
        for layer, (tokens, key_map, dropped, parts, turns) in zip(
            self._layers, layers, strict=True
        ):
            layer._restart(dropped)  # a core forgets what it knew of the old bytes
            layer._store_keys_as(key_map, self._rule_of(layer).held_by(key_map, tokens + dropped))
            layer._set_len(tokens)
            if layer._precise is not None:
                layer._precise.fill(parts, dropped, dropped + tokens)
            layer._turns = turns
        self._high_water = [layer._end() for layer in self._layers]
        self._length = length
        self._room = self.capacity

    def _rule_of(self, layer: LayerMethods) -> KeyRule:
        """What of the cache's rule an empty layer has."""
        config, rule = layer._config, self._key_rule
        return KeyRule(
            rule.auto_offset and config.keys_have_scales,
            rule.auto_scale and config.has_auto_scale,
        )

    @classmethod
    def _holding(
        cls,
        contents: CacheContents,
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
    ) -> Self:
        """Make a cache that holds ``contents``."""
        held = [layer.num_tokens for layer in contents.layers]
        cache = cls._empty(contents.format, max_seq_len, key_rule, metadata, held)
        cache._replace(contents)
        return cache

    @classmethod
    def _empty(
        cls,
        form: CacheFormat,
        max_seq_len: int | None,
        key_rule: KeyRule,
        metadata: Mapping[str, str],
        tokens: Sequence[int],
    ) -> Self:
        """Make an empty cache with room for ``tokens``, without the constructor of a subclass."""
        cache = cls.__new__(cls)
        offset = "auto" if key_rule.auto_offset else None
        scale = "auto" if key_rule.auto_scale else None
        cache._start(form.layers, max_seq_len, offset, scale, metadata, tokens)
        return cache

    def _token_bytes(self, index: int, position: int) -> tuple[Any, list[np.ndarray]]:
        """Return a layer's rows from a position on, which may lie above the length; and a copy."""
        held = self._layers[index]._held()
        row = held.start + position - held.num_dropped
        rows = [slab[row] for slab in held.slabs]
        if self._layers[index]._precise is not None:
            rows += self._layers[index]._precise.rows_at(position)
        return rows, [one.copy() for one in rows]


def _of_each(given: Any, name: str, configs: Sequence[LayerConfig], can_be_auto: list[bool]) -> Any:
    """The key offset or scale of each layer, by what the cache was given; not yet checked."""
    if isinstance(given, str):  # for the layers that can have one, if any can
        return [given if one or not any(can_be_auto) else None for one in can_be_auto]
    if isinstance(given, (list, tuple)):
        if len(given) != len(configs):
            raise ShapeMismatchError(f"{name} must hold {len(configs)} vectors, not {len(given)}")
        return given
    if given is None or (name == "key_offset" and not can_be_auto[0]):
        return [given] * len(configs)
    shape = (len(configs), configs[0].num_kv_heads, configs[0].head_dim)
    return checks.as_float32(given, name, shape=shape)


def layer_names(layers: list[int]) -> str:
    """Name some layers in a message: "layers 3, 4, 5, ... (12 layers)"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    listed = ", ".join(map(str, layers[:8]))
    return f"layers {listed}" + (f", ... ({len(layers)} layers)" if len(layers) > 8 else "")
