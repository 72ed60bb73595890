"""What is evaluated: a model that reads tokens, its keys and values in a cache of our choice.

A further runtime is a further :class:`Subject` here; :mod:`.measure` knows no other thing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import KVCache
from ..cache.cache import state_of
from ..cache.editing import evict_due
from ..core.config import LayerConfig
from ..errors import InvalidArgumentError
from ..llama import LlamaModel
from .choice import FLOAT32, CacheChoice

__all__ = ["LayerShape", "LlamaSubject", "Reader", "Subject", "Tell", "reader_of", "squares"]

#: Told a layer, the index of a choice, and the sum of squares by which attention on it differs.
Tell = Callable[[int, int, float], None]


class Reader(Protocol):
    """One model on one cache."""

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Read n more tokens, and return the logits of what follows each: (n, vocab_size)."""

    def clear(self) -> None:
        """Forget all tokens."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the cache for the tokens read since it was clear."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The keys and values of a layer."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None

    @classmethod
    def of(cls, config: LayerConfig, window: int | None) -> LayerShape:
        """That of a layer which is stored so."""
        return cls(config.num_kv_heads, config.head_dim, config.value_head_dim, window)

    @property
    def num_values(self) -> int:
        """Keys and values of a token."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


class Subject(Protocol):
    """A model that can read on any cache."""

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""

    def reader(self, choice: CacheChoice) -> Reader:
        """Return a reader on an empty cache; an InvalidArgumentError for options that clash."""

    def layers(self) -> list[LayerShape | None]:
        """Return what a policy says the storage of, layer by layer; None: it has no keys."""

    def watched(self, choices: Sequence[CacheChoice], tell: Tell) -> Reader:
        """Return a reader on float32 that compares attention on caches beside it, as it goes."""


def reader_of(subject: Subject, choice: CacheChoice) -> Reader:
    """Return a reader on an empty cache; the error for options that clash names the choice."""
    try:
        return subject.reader(choice)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{choice.name}: {error}") from error


class LlamaSubject:
    """A model of :mod:`kvedge.llama`.

    Parameters
    ----------
    model : LlamaModel
    num_threads : int, optional
        Threads of attention.
    """

    def __init__(self, model: LlamaModel, num_threads: int | None = None) -> None:
        self.model = model
        self.num_threads = num_threads

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        return self.model.config.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self.model.config.vocab_size

    def reader(self, choice: CacheChoice) -> Reader:
        """Return a reader on an empty cache."""
        return _LlamaReader(self, choice)

    def layers(self) -> list[LayerShape | None]:
        """Return what a policy says the storage of, layer by layer."""
        stores = state_of(self.model.new_cache("float32")).stores
        return [LayerShape.of(store.config, store.config.window) for store in stores]

    def watched(self, choices: Sequence[CacheChoice], tell: Tell) -> Reader:
        """Return a reader on float32 that compares attention on caches beside it, as it goes."""
        reader = _LlamaReader(self, FLOAT32)
        reader._cache = _Watched([FLOAT32, *choices], self.model, tell)
        return reader


class _LlamaReader:
    def __init__(self, subject: LlamaSubject, choice: CacheChoice) -> None:
        self._model = subject.model
        if "state_dtype" in choice.cache_options:
            raise InvalidArgumentError(
                f"{choice.name!r}: state_dtype is for models with recurrent states, which kvedge "
                "runs by transformers alone: kvedge eval --hf DIR"
            )
        self._cache: Any = subject.model.new_cache(choice.dtype, **choice.cache_options)
        self._options = {"num_threads": subject.num_threads, **choice.attention_options}

    def read(self, tokens: np.ndarray) -> np.ndarray:
        logits = self._model.forward(tokens, self._cache, **self._options)
        if isinstance(self._cache, KVCache):
            evict_due(state_of(self._cache), 0, at_end=True)
        return logits

    def clear(self) -> None:
        self._cache.clear()

    @property
    def used_bytes(self) -> int:
        used: int = self._cache.used_bytes
        return used


def squares(found: np.ndarray, exact: np.ndarray) -> float:
    """Sum of squares of what two arrays differ by."""
    return float(np.square(found - exact, dtype=np.float64).sum())


class _Watched:
    """A cache, with others beside it whose attention is compared with its own.

    A model reads on the first. What a LlamaModel uses of a KVCache is here.
    """

    def __init__(self, choices: Sequence[CacheChoice], model: LlamaModel, tell: Tell) -> None:
        new = model.new_cache
        self._caches = [new(choice.dtype, **choice.cache_options) for choice in choices]
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caches[0], name)

    def __len__(self) -> int:
        return len(self._caches[0])

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        for cache in self._caches:
            cache.append(layer, keys, values)

    def attend(self, layer: int, query: np.ndarray, **options: Any) -> np.ndarray:
        exact: np.ndarray = self._caches[0].attend(layer, query, **options)
        for index, cache in enumerate(self._caches[1:]):
            self._tell(layer, index, squares(cache.attend(layer, query, **options), exact))
        return exact

    def advance(self, n: int) -> None:
        for cache in self._caches:
            cache.advance(n)

    def truncate(self, length: int) -> None:
        for cache in self._caches:
            cache.truncate(length)

    def clear(self) -> None:
        for cache in self._caches:
            cache.clear()
