"""The facts of a context over ranks: its placement, its sizes, how it prints."""

from __future__ import annotations

import numpy as np

from kvedge import KVCache
from kvedge.cache.cache import state_of
from kvedge.cache.overwrites import OverwriteLog
from kvedge.core import memory
from kvedge.core.config import ConfigFacts, LayerConfig
from kvedge.distributed.placement import Placement
from kvedge.distributed.share import Share

__all__ = ["ShardedFacts"]


class ShardedFacts(ConfigFacts):
    """The part of a ShardedKVCache that changes nothing."""

    _part: KVCache
    _share: Share
    _length: int  # tokens of the context that all layers hold
    _max_seq_len: int | None
    _ends: list[int]  # tokens that each layer has been given
    _overwrites: OverwriteLog

    @property
    def part(self) -> KVCache:
        """The tokens that this rank holds; to be read, saved or copied, and not to be changed."""
        return self._part

    @property
    def placement(self) -> Placement:
        """Which rank holds which tokens."""
        return self._share.placement

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        return self._share.rank

    @property
    def num_ranks(self) -> int:
        """Processes of the group."""
        return self._share.size

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._part.num_layers

    @property
    def max_seq_len(self) -> int | None:
        """Most tokens of the whole context; None if all parts grow."""
        return self._max_seq_len

    @property
    def capacity(self) -> int:
        """Tokens that this rank has memory reserved for now."""
        return self._part.capacity

    @property
    def is_empty(self) -> bool:
        """Whether no token has been advanced over."""
        return self._length == 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank has reserved."""
        return self._part.memory_bytes

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes the same capacity would take as float32."""
        return self._part.fp32_memory_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens that this rank holds."""
        return self._part.used_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the tokens that all ranks hold between them, pending ones aside."""
        return self._length * sum(
            memory.token_bytes(store.config) for store in state_of(self._part).stores
        )

    @property
    def key_offset(self) -> np.ndarray | None:
        """As of :attr:`kvedge.KVCache.key_offset`; the same on all ranks."""
        return self._part.key_offset

    @property
    def key_scale(self) -> np.ndarray | None:
        """As of :attr:`kvedge.KVCache.key_scale`; the same on all ranks."""
        return self._part.key_scale

    @property
    def window(self) -> tuple[int | None, ...]:
        """None for each layer: all keep all tokens."""
        return self._part.window

    @property
    def metadata(self) -> dict[str, str]:
        """Notes of the user's own, saved and loaded with the cache; those of this rank's part."""
        return self._part.metadata

    @property
    def _config(self) -> LayerConfig:  # type: ignore[override]
        return self._part._config

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return (
            f"<ShardedKVCache {state_of(self._part).format}, {self._length} tokens in "
            f"{self.placement}, {len(self._part)} of them on this rank, {self.rank}>"
        )
