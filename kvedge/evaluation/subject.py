"""What is evaluated: a model that reads tokens, its keys and values in a cache of our choice.

A further runtime is a further :class:`Subject` here; :mod:`.measure` knows no other thing of it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..cache.cache import state_of
from ..cache.editing import evict_due
from ..errors import InvalidArgumentError
from ..llama import LlamaModel
from .choice import CacheChoice

__all__ = ["LlamaSubject", "Reader", "Subject", "reader_of"]


class Reader(Protocol):
    """One model on one cache."""

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Read n more tokens, and return the logits of what follows each: (n, vocab_size)."""

    def clear(self) -> None:
        """Forget all tokens."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the cache for the tokens read since it was clear."""


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


class _LlamaReader:
    def __init__(self, subject: LlamaSubject, choice: CacheChoice) -> None:
        self._model = subject.model
        if "state_dtype" in choice.cache_options:
            raise InvalidArgumentError(
                f"{choice.name!r}: state_dtype is for models with recurrent states, which kvedge "
                "runs by transformers alone: kvedge eval --hf DIR"
            )
        self._cache = subject.model.new_cache(choice.dtype, **choice.cache_options)
        self._options = {"num_threads": subject.num_threads, **choice.attention_options}

    def read(self, tokens: np.ndarray) -> np.ndarray:
        logits = self._model.forward(tokens, self._cache, **self._options)
        evict_due(state_of(self._cache), 0, at_end=True)
        return logits

    def clear(self) -> None:
        self._cache.clear()

    @property
    def used_bytes(self) -> int:
        return self._cache.used_bytes
