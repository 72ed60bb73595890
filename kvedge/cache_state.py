"""What a cache holds: its layers, how far each is, and all of it taken out or put in.

Nothing here is public. :class:`kvedge.cache.CacheMethods` makes a KVCache of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvedge.cache_facts import CacheFacts
from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.memory import memory_for
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    LayersOutOfStepError,
    ShapeMismatchError,
    StaleSnapshotError,
)
from kvedge.layer import LayerMethods, new_layer
from kvedge.layer_room import first_rows
from kvedge.snapshot import (
    CacheContents,
    CacheFormat,
    KvCacheSnapshot,
    LayerContents,
    OverwriteLog,
)

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

    _auto_offset: bool  # layers take their key offset from their first tokens
    _room: int  # tokens that every layer has room for, or fewer
    _high_water: list[int]  # tokens of each layer whose bytes are still there, whatever its length
    _overwrites: OverwriteLog

    def _start(
        self,
        num_layers: int,
        config: LayerConfig,
        max_seq_len: int | None,
        key_offset: Any,
        metadata: Mapping[str, str],
    ) -> None:
        """Be an empty cache, from arguments that are checked but for the key offset."""
        offsets: Any = [key_offset] * num_layers
        if config.has_scales and key_offset is not None and not isinstance(key_offset, str):
            shape = (num_layers, config.num_kv_heads, config.head_dim)
            offsets = checks.as_float32(key_offset, "key_offset", shape=shape)
        kind = self._layer_types[config.dtype]
        layers = []
        for offset in offsets:
            offset = checks.as_key_offset(offset, config)
            layer = new_layer(kind, config, config.capacity, offset)
            layer._frozen = True  # changed through the cache alone, which keeps the positions
            layers.append(layer)

        self._layers = tuple(layers)
        self._num_layers = num_layers
        self._config = config
        self._max_seq_len = max_seq_len
        self._auto_offset = isinstance(key_offset, str)
        self._length = 0
        self._room = config.capacity
        self._high_water = [0] * num_layers
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
            f"layer {index} has {error}: max_seq_len is {self._max_seq_len}"
        )

    # ---- positions -------------------------------------------------------------------------------

    def _set_length(self, length: int) -> None:
        for layer in self._layers:
            layer._set_len(length)
        self._length = length

    def _refuse_pending(self, call: str) -> None:
        ahead = self._ahead(self._length)
        if ahead:
            hold = "holds" if len(ahead) == 1 else "hold"
            raise LayersOutOfStepError(
                f"{call} needs all layers at position {self._length}, but {layer_names(ahead)} "
                f"{hold} tokens beyond it: advance() over them or truncate() first"
            )

    def _ahead(self, length: int) -> list[int]:
        """Layers with tokens beyond the length, which are pending."""
        return [i for i, layer in enumerate(self._layers) if len(layer) != length]

    def _who_lacks(self, length: int) -> str:
        lacking = [i for i, layer in enumerate(self._layers) if len(layer) < length]
        held = min(len(self._layers[i]) for i in lacking)
        return (
            f"cannot advance to position {length}: {layer_names(lacking)} of {self._num_layers} "
            f"lack tokens (the shortest holds {held}): append to them first"
        )

    # ---- snapshots -------------------------------------------------------------------------------

    def _is_stale(self, snapshot: KvCacheSnapshot) -> bool:
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
                f"tokens below position {snapshot._length} have been overwritten since this "
                "snapshot was taken: detach() it before writing over them"
            )
        return snapshot._length

    @memory_for("the bytes of a snapshot")
    def _contents_at(self, snapshot: KvCacheSnapshot) -> CacheContents:
        """Copy what a mark stands for, which may lie above the current length."""
        length = self._checked_mark(snapshot)
        if snapshot._pending:
            held = "was" if len(snapshot._pending) == 1 else "were"
            raise LayersOutOfStepError(
                f"detach() would lose tokens: {layer_names(list(snapshot._pending))} {held} "
                f"beyond position {length} when this snapshot was taken: advance() over them or "
                "truncate() first, and take another"
            )
        return self._contents([length] * self._num_layers, length)

    # ---- all that is held ------------------------------------------------------------------------

    def _contents(
        self, lengths: list[int] | None = None, length: int | None = None, *, copy: bool = True
    ) -> CacheContents:
        """Return the stored bytes of each layer: by default of all tokens it holds."""
        if length is None:
            length = self._length  # before those of the layers, which are never less
        layers = []
        for index, layer in enumerate(self._layers):
            held = layer._held()
            stop = held.num_tokens if lengths is None else lengths[index]
            keys, values, key_scales, value_scales = (
                slab[:stop].copy() if copy else slab[:stop] for slab in held.slabs
            )
            layers.append(LayerContents(keys, values, key_scales, value_scales, layer._key_offset))
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
        self._adopt(contents.length, [(t.num_tokens, t.key_offset) for t in contents.layers])

    def _adopt(self, length: int, layers: list[tuple[int, np.ndarray | None]]) -> None:
        """Take over bytes that were put into the slabs: tokens and key offset of each layer."""
        for layer, (tokens, offset) in zip(self._layers, layers, strict=True):
            layer._set_len(0)  # a core forgets what it knew of the old bytes
            layer._set_key_offset(offset)
            # Tokens that were stored without an offset must not be given one by the next append.
            layer._auto_key_offset = self._auto_offset and (offset is not None or tokens == 0)
            layer._set_len(tokens)
        self._high_water = [tokens for tokens, _ in layers]
        self._length = length
        self._room = self.capacity

    @classmethod
    def _holding(
        cls,
        contents: CacheContents,
        max_seq_len: int | None,
        auto_offset: bool,
        metadata: Mapping[str, str],
    ) -> Self:
        """Make a cache that holds ``contents``."""
        held = max(layer.num_tokens for layer in contents.layers)
        cache = cls._empty(contents.format, max_seq_len, auto_offset, metadata, held)
        cache._replace(contents)
        return cache

    @classmethod
    def _empty(
        cls,
        form: CacheFormat,
        max_seq_len: int | None,
        auto_offset: bool,
        metadata: Mapping[str, str],
        tokens: int,
    ) -> Self:
        """Make an empty cache with room for ``tokens``, without the constructor of a subclass."""
        cache = cls.__new__(cls)
        config = form.layer_config(first_rows(max_seq_len, tokens), max_seq_len)
        offset = "auto" if auto_offset else None
        cache._start(form.num_layers, config, max_seq_len, offset, metadata)
        return cache

    def _token_bytes(self, index: int, position: int) -> tuple[Any, list[np.ndarray]]:
        """Return a layer's slabs, and a copy of one token in each."""
        slabs = self._layers[index]._slabs
        return slabs, [slab[position].copy() for slab in slabs]


def layer_names(layers: list[int]) -> str:
    """Name some layers in a message: "layers 3, 4, 5, ... (12 layers)"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    listed = ", ".join(map(str, layers[:8]))
    return f"layers {listed}" + (f", ... ({len(layers)} layers)" if len(layers) > 8 else "")
