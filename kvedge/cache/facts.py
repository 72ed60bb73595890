"""The read-only facts of a KVCache: its shape, its sizes, how it prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvedge.core import memory
from kvedge.core.config import ConfigFacts, LayerConfig
from kvedge.errors import InvalidArgumentError
from kvedge.files.contents import CacheFormat


class CacheFacts(ConfigFacts):
    """The part of a cache that changes nothing."""

    _layers: tuple[Any, ...]
    _num_layers: int
    _format: CacheFormat
    _max_seq_len: int | None
    _length: int
    _metadata: dict[str, str]
    _num_query_heads: int | None = None  # None: any multiple of the KV heads

    def __len__(self) -> int:
        return self._length

    @property
    def is_empty(self) -> bool:
        """Whether no token has been advanced over."""
        return self._length == 0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    @property
    def num_query_heads(self) -> int | None:
        """Heads that queries must have; None: any multiple of the KV heads."""
        return self._num_query_heads

    @property
    def key_offset(self) -> np.ndarray | None:
        """Vectors subtracted from stored keys, (num_layers, num_kv_heads, head_dim) float32.

        None where there are none; layers whose automatic offset is not yet known show zeros.

        Raises
        ------
        InvalidArgumentError
            The layers differ: so do the shapes of their vectors.
        """
        return self._vectors([layer._key_map.offset for layer in self._layers], 0.0)

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
        return self._vectors([layer._key_map.scale for layer in self._layers], 1.0)

    def _vectors(self, of_layers: list[np.ndarray | None], none: float) -> np.ndarray | None:
        """One array of those of all layers, with `none` for a layer without; or None."""
        if all(vector is None for vector in of_layers):
            return None
        plain = np.full((self.num_kv_heads, self.head_dim), none, np.float32)
        return np.stack([plain if vector is None else vector for vector in of_layers])

    @property
    def window(self) -> tuple[int | None, ...]:
        """Window of each layer, None where it keeps all."""
        return tuple(config.window for config in self._format.layers)

    @property
    def recent(self) -> int:
        """So many last tokens are read in :attr:`recent_dtype`: the most of any layer."""
        return max(config.recent for config in self._format.layers)

    @property
    def sinks(self) -> int:
        """So many first tokens are read in :attr:`recent_dtype`: the most of any layer."""
        return max(config.sinks for config in self._format.layers)

    @property
    def recent_dtype(self) -> str | None:
        """What first and last tokens are stored as, in the first layer that has such."""
        return next((c.recent_dtype for c in self._format.layers if c.recent_dtype), None)

    @property
    def max_seq_len(self) -> int | None:
        """Most tokens it takes; None if it grows."""
        return self._max_seq_len

    @property
    def capacity(self) -> int:
        """Tokens there is memory reserved for now, those that windows have dropped included."""
        capacity: int = min(layer._room_until() for layer in self._layers)
        return capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys, values and scales of all layers."""
        return sum(layer.memory_bytes for layer in self._layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes of that which the system has really committed."""
        return sum(layer.resident_bytes for layer in self._layers)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens held, pending ones included."""
        return sum(memory.token_bytes(layer._config) * len(layer) for layer in self._layers)

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes the same capacity would take as float32."""
        return sum(layer.fp32_memory_bytes for layer in self._layers)

    @property
    def metadata(self) -> dict[str, str]:
        """Notes of the user's own, saved and loaded with the cache; str to str."""
        return self._metadata

    def __repr__(self) -> str:
        room = "growing" if self._max_seq_len is None else f"max_seq_len={self._max_seq_len}"
        length = self._length  # before those of the layers, which are never less
        pending = max(layer._end() for layer in self._layers) - length
        more = f" + up to {pending} pending" if pending else ""
        return (
            f"<{type(self).__name__} {self._format}, {length} tokens{more}, {room}, "
            f"{self.memory_bytes} bytes reserved>"
        )

    @property
    def _config(self) -> LayerConfig:  # type: ignore[override]
        """The shape of a layer, if all have one; room, window and what is held twice aside."""
        shapes = {replace(config.plain, window=None) for config in self._format.layers}
        if len(shapes) > 1:
            raise InvalidArgumentError(
                f"layers differ in this cache ({self._format}): ask layer(i), append() to each"
            )
        return shapes.pop()
