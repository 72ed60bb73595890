"""A prefix store below a pool: what sequences register is stored, and found when memory has it not.

Registered sequences are written through, so that nothing is left to do when the pool needs their
blocks, and a process that ends has lost nothing. The pool's lock is not taken while files are read
and written.
"""

from __future__ import annotations

import warnings

import numpy as np

from kvedge.core import checks
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    KvedgeError,
    LayersOutOfStepError,
    UnknownSequenceError,
)
from kvedge.paged import exchange
from kvedge.paged.prefixes import as_namespace
from kvedge.paged.state import PagedState
from kvedge.store import caches
from kvedge.store.entries import BLOCK
from kvedge.store.prefix_store import PrefixStore

__all__ = ["StoreTier"]


class StoreTier:
    """The store of a paged cache.

    Parameters
    ----------
    store : PrefixStore
    model : str
    state : PagedState
        Of the cache.

    Raises
    ------
    InvalidArgumentError
    """

    def __init__(self, store: object, model: object, state: PagedState) -> None:
        if not isinstance(store, PrefixStore) or not (isinstance(model, str) and model):
            raise InvalidArgumentError(
                "store must be a kvedge.PrefixStore, and model a text that says which model "
                f"computes the tokens, not {checks.describe(store)} and {checks.describe(model)}"
            )
        self._store: PrefixStore | None = store  # None once it has failed
        self._model, self._state = model, state
        self._stored: dict[int, int] = {}  # whole blocks of the store by sequence

    def put(self, seq: int, ids: np.ndarray, namespace: str | None) -> None:
        """Store a sequence that was registered, if it has a block more of the store than before."""
        store, blocks = self._store, len(ids) // BLOCK
        if store is None or blocks <= self._stored.get(seq, 0):
            return
        try:
            cache = exchange.to_cache(self._state, seq, None)
            cache.truncate(len(ids))
            store.save(cache, ids, model=self._model, namespace=namespace or "")
        except (LayersOutOfStepError, UnknownSequenceError):
            return  # pending tokens, or dropped meanwhile
        except (OSError, KvedgeError) as error:
            self._fail(error)
        self._stored[seq] = blocks

    def take(
        self, ids: np.ndarray, namespace: str | None, least: int, *, partial: bool
    ) -> tuple[int, int] | None:
        """Begin a sequence with more tokens than `least` that are known; it, and how many."""
        store, pool, space = self._store, self._state.pool, as_namespace(namespace)
        if store is None:
            return None
        cache = exchange.empty_cache(self._state)
        try:
            n = caches.load(
                store, cache, ids, self._model, namespace or "", needs_last=False, least=least
            )
        except (OSError, KvedgeError) as error:
            self._fail(error)
            return None
        ratio = 1 if pool.index is None else pool.index.config.ratio
        n -= n % (ratio if partial else pool.block_size)
        if n <= least:
            return None
        cache.truncate(n)
        try:
            seq = exchange.from_cache(self._state, cache, ids[:n], space)
        except CapacityExceededError:
            return None
        with pool.lock:
            table = self._state.sequence(seq).table.tolist()
            pool.blocks.prefixes.add(ids[: n // pool.block_size * pool.block_size], space, table)
        self._stored[seq] = n // BLOCK
        return seq, n

    def forget(self, seq: int) -> None:
        """A sequence was dropped."""
        self._stored.pop(seq, None)

    def _fail(self, error: Exception) -> None:
        self._store = None
        warnings.warn(
            f"the store below the pool is not asked again: {error}", RuntimeWarning, stacklevel=4
        )
