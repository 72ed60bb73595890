"""One head of a MultiHeadKvCache."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvedge.core import checks
from kvedge.core.types import Array, Floats
from kvedge.multi_head.config import KvCacheConfig

__all__ = ["KvCacheHead"]


class _Cache(Protocol):
    """What a head asks of its cache."""

    @property
    def config(self) -> KvCacheConfig: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def is_empty(self) -> bool: ...
    @property
    def key_codes(self) -> np.ndarray: ...
    @property
    def value_codes(self) -> np.ndarray: ...
    @property
    def compression_ratio(self) -> float: ...
    def __len__(self) -> int: ...
    def attention_scores(self, query: Array) -> Floats: ...
    def decode_keys(self) -> Floats: ...
    def decode_values(self) -> Floats: ...


class KvCacheHead:
    """A head of a :class:`~kvedge.MultiHeadKvCache`, to be read; it shares the cache's storage."""

    def __init__(self, cache: _Cache, index: int) -> None:
        self._cache = cache
        self._index = index

    @property
    def index(self) -> int:
        """Which head of the cache it is."""
        return self._index

    def __len__(self) -> int:
        """Tokens stored."""
        return len(self._cache)

    @property
    def is_empty(self) -> bool:
        """Whether no token is stored."""
        return self._cache.is_empty

    def attention_scores(self, query: Array) -> Floats:
        """Scaled logits of one query, float32 (head_dim,), over this head: float32 (len,)."""
        config = self._cache.config
        query = checks.as_float32(query, "query", shape=(config.head_dim,))
        checks.check_finite(query, "query")
        queries = np.zeros((self._cache.num_heads, config.head_dim), np.float32)
        queries[self._index] = query
        scores: Floats = self._cache.attention_scores(queries)[self._index]
        return scores

    def decode_keys(self) -> Floats:
        """Keys as stored, float32 (len, head_dim)."""
        return self._cache.decode_keys()[:, self._index]

    def decode_values(self) -> Floats:
        """Values as stored, float32 (len, head_dim)."""
        return self._cache.decode_values()[:, self._index]

    @property
    def key_codes(self) -> np.ndarray:
        """Packed codes of the keys, uint8 (len, bytes), read-only and without a copy."""
        return self._cache.key_codes[:, self._index]

    @property
    def value_codes(self) -> np.ndarray:
        """Packed codes of the values; as :attr:`key_codes`."""
        return self._cache.value_codes[:, self._index]

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than float32."""
        return self._cache.compression_ratio

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._index} of {self._cache!r}>"
