"""A paged cache's sequences elsewhere: in files, and in caches of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.cache.cache import KVCache, cache_over, state_of
from kvedge.cache.editing import settled
from kvedge.cache.state import CacheState, layer_names
from kvedge.core import checks, memory, registry
from kvedge.core.key_map import KeyMap, KeyRule, same_vector
from kvedge.errors import InvalidArgumentError, LayersOutOfStepError, ShapeMismatchError
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.files.replacing import check_target
from kvedge.layer.parts import contents_of, runs_end
from kvedge.layer.store import PartContents
from kvedge.paged import file, readings
from kvedge.paged.attention import PagedAttention
from kvedge.paged.pool import KvBlockPool
from kvedge.paged.prefixes import as_token_ids
from kvedge.paged.sequences import SequenceState

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["PagedExchange", "check_nothing_pending"]


class PagedExchange(PagedAttention):
    """The part of a paged cache that gives sequences away and takes them back."""

    if TYPE_CHECKING:

        def __init__(self, pool: KvBlockPool) -> None: ...
        def drop(self, seq: int) -> None: ...
        def _add(self, state: SequenceState) -> int: ...

    # ---- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all sequences and the pool's known prefixes to a file: all of it or nothing.

        What sequences share is there once. Sequences of other caches over the pool, snapshots and
        blocks that :meth:`KvBlockPool.allocate` gave are not saved. Needs ``kvedge[io]``.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        LayersOutOfStepError
            Some layer of a sequence has pending tokens.
        OSError, MissingExtraError
        """
        check_target(path)
        with self._pool._lock:
            for state in self._sequences.values():
                check_nothing_pending(state.held, state.length)
            file.save(self._pool, list(self._sequences.values()), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, num_blocks: int | None = None) -> Self:
        """Read what :meth:`save` wrote into a pool of its own.

        Parameters
        ----------
        path : str or path-like
        num_blocks : int, optional
            Of the new pool; by default as many as the saved one had.

        Returns
        -------
        PagedKvCache
            :attr:`sequences` are in the order they were saved in, under numbers of their own.

        Raises
        ------
        CorruptFileError
            The file is damaged, or none of a paged cache.
        InvalidArgumentError
            num_blocks are too few.
        OSError, MissingExtraError, OutOfMemoryError
        """
        number = None if num_blocks is None else checks.as_int(num_blocks, "num_blocks")
        pool, sequences = file.load(path, number)
        cache = cls(pool)
        for state in sequences:
            cache._add(state)
        return cache

    def swap_out(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Write one sequence to a file and drop it, which gives its blocks back.

        The file is one of :meth:`kvedge.KVCache.save`. Needs ``kvedge[io]``.

        Parameters
        ----------
        seq : int
        path : str or path-like

        Raises
        ------
        UnknownSequenceError
        LayersOutOfStepError
            Some layer has pending tokens.
        OSError, MissingExtraError, OutOfMemoryError
            The sequence is still there, and so is what was at `path`.
        """
        check_target(path)
        with self._pool._lock:  # nothing is appended between the file and the end
            self.to_kv_cache(seq).save(path)
            self.drop(seq)

    def swap_in(self, path: str | os.PathLike[str], *, token_ids: Any = None) -> int:
        """Begin a sequence with the tokens that :meth:`swap_out` wrote; the file stays.

        Parameters
        ----------
        path : str or path-like
            Or of any :meth:`kvedge.KVCache.save` of a cache that the pool could take.
        token_ids : sequence or array of int, optional
            Of the sequence's first tokens, as of :meth:`register`: what is registered of them is
            shared, and only the rest is taken from the file.

        Returns
        -------
        int

        Raises
        ------
        CorruptFileError
        ShapeMismatchError, InvalidArgumentError
            A cache that the pool does not take, or no token ids of its.
        CapacityExceededError
            The pool has too few free blocks.
        OSError, MissingExtraError, OutOfMemoryError
        """
        cache = registry.active("KVCache").load(path, mmap=True)
        return self._from_kv_cache(cache, None if token_ids is None else as_token_ids(token_ids))

    # ---- to and from a KVCache -------------------------------------------------------------------

    def to_kv_cache(self, seq: int, *, max_seq_len: int | None = None) -> Any:
        """Copy a sequence, byte for byte, into a cache of its own.

        Parameters
        ----------
        seq : int
        max_seq_len : int, optional
            Of the new cache, at least the length of the sequence; by default it grows.

        Returns
        -------
        KVCache

        Raises
        ------
        UnknownSequenceError
        LayersOutOfStepError
            Some layer has pending tokens.
        InvalidArgumentError, CapacityExceededError
            ``max_seq_len`` is no length, or too short.
        OutOfMemoryError
        """
        max_seq_len = checks.check_max_seq_len(max_seq_len)
        pool = self._pool
        running: list[readings.Reading] = []
        layers = []
        try:
            with pool._lock:  # all layers as they are at one moment
                state = self._state(seq)
                length = state.length
                check_nothing_pending(state.held, length)
                for layer in range(pool.num_layers):
                    running.append(self._begin(seq, state, layer))
            for layer, reading in enumerate(running):
                layers.append(self._layer_contents(layer, reading))
        finally:
            pool._running.difference_update(running)
        contents = CacheContents(self._format, length, tuple(layers))
        kind: type[KVCache] = registry.active("KVCache")
        made = CacheState.holding(kind._layer_types, contents, max_seq_len, KeyRule(), {})
        return cache_over(kind, made)

    def from_kv_cache(self, cache: KVCache) -> int:
        """Begin a sequence with a copy of a cache's tokens, byte for byte.

        Parameters
        ----------
        cache : KVCache
            Of the pool's layers, heads, head_dim, dtype, group size, scale dtype and key scale, and
            without a key offset.

        Returns
        -------
        int

        Raises
        ------
        InvalidArgumentError
            Not a KVCache, or one with a key offset or another key scale.
        ShapeMismatchError
            A cache of another format.
        LayersOutOfStepError
            Some layer of the cache has tokens that it was not advanced over.
        CapacityExceededError
            The pool has too few free blocks.
        """
        return self._from_kv_cache(cache, None)

    def _from_kv_cache(self, cache: KVCache, token_ids: np.ndarray | None) -> int:
        """Begin a sequence with a cache's tokens, but for what is registered of `token_ids`."""
        if not isinstance(cache, KVCache):
            raise InvalidArgumentError(f"cache must be a KVCache, not {checks.describe(cache)}")
        state = state_of(cache)
        if state.format != self._format:
            raise ShapeMismatchError(f"the cache is {state.format}, this pool {self._format}")
        if cache.key_offset is not None:
            raise InvalidArgumentError("blocks have no key offset, but this cache has one")
        if not same_vector(cache.key_scale, self._pool.key_scale):
            raise InvalidArgumentError(
                "the cache has another key_scale than the pool: make the pool with "
                "key_scale=cache.key_scale"
            )
        pool, length = self._pool, len(cache)
        state = settled(state)  # blocks are shared: their keys are where they are
        helds = [store.held() for store in state.stores]
        if pool._config.in_runs and any(held.num_dropped for held in helds):
            raise InvalidArgumentError(
                "runs in blocks begin with a sequence's first token, which this cache has dropped"
            )
        check_nothing_pending([len(store) for store in state.stores], length)
        if token_ids is not None and len(token_ids) > length:
            raise ShapeMismatchError(f"{len(token_ids)} token ids for {length} tokens")
        with pool._lock:
            shared = pool._prefixes.find(token_ids) if token_ids is not None else []
            first = np.array(shared, np.int32)
            pool._hold(first)  # before blocks are taken, which may be theirs
            start = len(first) * pool.block_size
            taken = fine = np.empty(0, np.int32)
            recent = None
            try:
                taken = pool._take(pool._blocks_for(length - start))
                table = np.concatenate([first, taken])
                parts = [
                    contents_of(held, held.num_dropped, held.num_dropped + length, copy=False)
                    for held in helds
                ]
                if pool._recent is not None:
                    recent, fine = pool._recent.filled(parts, length)
                for store, held, own in zip(pool._stores, helds, parts, strict=True):
                    rows = own[2].arrays if pool._config.in_runs else held.tokens
                    rows = memory.rows_of(rows, store.config, start, length)
                    store.scatter(table, pool.block_size, rows, start)
            except BaseException:
                pool._release(taken)
                pool._release(first)
                if pool._recent is not None:
                    pool._recent._release(fine)
                raise
            return self._add(SequenceState(pool.num_layers, table, length, recent))

    def _layer_contents(self, layer: int, reading: readings.Reading) -> LayerContents:
        """A copy of what a reading holds, as a layer stores it."""
        pool, length = self._pool, reading.length
        store, table, size = pool._stores[layer], reading.table, pool.block_size
        if pool._recent is None:
            return _contents(store.gather(table, size, 0, length), store.key_map)
        last, parts = pool._recent.contents(layer, reading)
        if not pool._config.in_runs:
            return _contents(store.gather(table, size, 0, length), store.key_map, parts)
        runs = PartContents(store.gather(table, size, 0, runs_end(length, last)), store.key_map)
        layout = memory.slab_layout(replace(pool._config, capacity=length))  # rows of no bytes
        rows = memory.Slabs(*(np.empty(shape, dtype) for shape, dtype in layout))
        return _contents(rows, store.key_map, (*parts, runs))

    @property
    def _format(self) -> CacheFormat:
        return CacheFormat.of([self._pool._config] * self._pool.num_layers)


def _contents(
    rows: memory.Slabs, key_map: KeyMap, parts: tuple[PartContents, ...] = ()
) -> LayerContents:
    return LayerContents(
        rows.key_codes, rows.value_codes, rows.key_scales, rows.value_scales, key_map, parts=parts
    )


def check_nothing_pending(held: Sequence[int], length: int) -> None:
    """LayersOutOfStepError if a layer has tokens that the sequence was not advanced over."""
    if max(held) == length:
        return
    pending = [layer for layer, tokens in enumerate(held) if tokens > length]
    raise LayersOutOfStepError(
        f"there are pending tokens in {layer_names(pending)} of {len(held)}: {max(held)} tokens "
        f"are held, but {length} were advanced over; advance() over them or truncate() first"
    )
