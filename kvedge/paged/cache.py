"""The cache of many sequences over a pool of blocks: the class with every public method.

What does the work lies beside it, and works on a cache's :class:`kvedge.paged.state.PagedState`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from kvedge.cache.cache import KVCache
from kvedge.core import checks, registry
from kvedge.core.index_keys import Finish
from kvedge.core.kivi import RUN
from kvedge.core.options import (
    AttendArguments,
    BatchArguments,
    EitherArguments,
    LseArguments,
    shows_options,
)
from kvedge.core.types import Array, Floats, Layout
from kvedge.errors import InvalidArgumentError, ShapeMismatchError
from kvedge.files.replacing import check_target
from kvedge.paged import appending, attention, decoding, exchange, file
from kvedge.paged import snapshot as snapshots
from kvedge.paged.batch import as_list
from kvedge.paged.exchange import check_nothing_pending
from kvedge.paged.pool import KvBlockPool, state_of
from kvedge.paged.prefixes import as_namespace, as_token_ids
from kvedge.paged.sequences import SequenceState
from kvedge.paged.snapshot import PagedSnapshot
from kvedge.paged.state import PagedState
from kvedge.paged.tier import StoreTier
from kvedge.store.prefix_store import PrefixStore

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring them along

__all__ = ["PagedKvCache"]


class PagedKvCache:
    """Keys and values of many sequences, in blocks of a pool that they share.

    A sequence is a number, given by :meth:`new_sequence`, :meth:`fork`, :meth:`match_prefix` or
    :meth:`from_kv_cache`, and never used again once dropped. As in :class:`kvedge.KVCache`, each
    layer is given its tokens by :meth:`append` and attends to them at once; :meth:`advance` then
    moves the sequence past them. Tokens that a layer has and the sequence was not advanced over are
    pending: :meth:`truncate`, :meth:`restore` and :meth:`drop` forget them; :meth:`snapshot` and
    :meth:`register` are about the tokens advanced over; :meth:`fork` and :meth:`to_kv_cache`, which
    would leave pending tokens behind, are refused.

    Sequences share the blocks they have in common: those of a fork, a snapshot, or a prefix found
    by its token ids. A block that is shared, or registered for others to find, is copied before it
    is written to, which only ever happens to the last block of a sequence. (Kwon et al. 2023,
    https://arxiv.org/abs/2309.06180.)

    Parameters
    ----------
    pool : KvBlockPool
        Several caches may use one pool.
    store : kvedge.PrefixStore, optional
        A tier below the pool's memory: what :meth:`register` tells goes there too, and
        :meth:`match_prefix` finds there what memory has no longer, or another process computed.
    model : str, optional
        With `store`: which model computes the tokens, a digest of its weights.

    Raises
    ------
    InvalidArgumentError
        ``pool`` is no KvBlockPool; or only one of ``store`` and ``model`` is given.

    Notes
    -----
    Threads: calls that change anything take turns; any number of threads may attend and read
    meanwhile, also to a sequence that is appended to, truncated, restored or dropped. A running
    call holds what it reads: it sees the sequence as it was when the call began, and no block that
    it reads is used again before it ends. Until then such a block counts as used.

    Examples
    --------
    >>> cache = PagedKvCache(KvBlockPool(1024, 16, num_layers=1, num_kv_heads=8, head_dim=64))
    >>> seq = cache.new_sequence()
    >>> cache.append(seq, 0, keys, values)  # float32 (n, 8, 64) each
    >>> cache.advance(seq, len(keys))
    >>> twin = cache.fork(seq)  # takes no memory
    >>> outs = cache.attend_batch([seq, twin], 0, queries)  # float32 (2, 32, 64)
    """

    _pool: KvBlockPool
    _state: PagedState

    def __init__(
        self, pool: KvBlockPool, *, store: PrefixStore | None = None, model: str | None = None
    ) -> None:
        """Make a cache without sequences; the class tells of the parameters."""
        if not isinstance(pool, KvBlockPool):
            raise InvalidArgumentError(f"pool must be a KvBlockPool, not {checks.describe(pool)}")
        self._pool = pool
        self._state = PagedState(state_of(pool))
        self._tier = None
        if store is not None or model is not None:
            self._tier = StoreTier(store, model, self._state)

    # ---- sequences -------------------------------------------------------------------------------

    def new_sequence(self) -> int:
        """Begin a sequence without tokens; it takes no block until the first are appended.

        Returns
        -------
        int
        """
        pool = self._state.pool
        with pool.lock:
            return self._state.add(
                SequenceState(pool.num_layers, parts=pool.new_parts(), moments=pool.new_moments())
            )

    def fork(self, seq: int) -> int:
        """Begin a sequence with the same tokens, sharing their blocks.

        Parameters
        ----------
        seq : int

        Returns
        -------
        int

        Raises
        ------
        UnknownSequenceError
        LayersOutOfStepError
            Some layer has pending tokens.
        """
        state = self._state
        with state.pool.lock:
            sequence = state.sequence(seq)
            check_nothing_pending(sequence.layer_lengths, sequence.length)
            moments = state.pool.moments_at(sequence, sequence.length)
            table, parts = state.pool.advanced_over(sequence)
            state.pool.hold(table, parts)
            num_layers = len(sequence.layer_lengths)
            return state.add(SequenceState(num_layers, table, sequence.length, parts, moments))

    def drop(self, seq: int) -> None:
        """Forget a sequence. Blocks that nobody else holds become free.

        Parameters
        ----------
        seq : int

        Raises
        ------
        UnknownSequenceError
            Also if it was dropped already.
        """
        state = self._state
        with state.pool.lock:
            sequence = state.sequence(seq)
            table, parts = sequence.table, sequence.parts
            del state.sequences[checks.as_int(seq, "seq")]
            if self._tier is not None:
                self._tier.forget(seq)
            sequence.contents = None  # for whoever has looked it up, but reads nothing yet
            state.pool.release(table, parts)

    # ---- tokens in -------------------------------------------------------------------------------

    def append(
        self,
        seq: int,
        layer: int,
        keys: Array,
        values: Array,
        *,
        layout: Layout = "nhd",
        index_keys: Array | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Give one layer of a sequence its next token or tokens: all of them or none.

        Parameters
        ----------
        seq, layer : int
        keys, values : array of float32 (or float16, bfloat16)
            One token, (num_kv_heads, head_dim) or flat, or several, (n, num_kv_heads, head_dim);
            values of value_head_dim where that differs. They follow what this layer of the sequence
            already holds. Any strides but of the channels.
        layout : {"nhd", "hnd"}
            "hnd": several tokens come as (num_kv_heads, n, head_dim).
        index_keys, finish
            Of as many tokens, where the pool has an index: as of :meth:`kvedge.KeyIndex.append`.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            The pool has an index and ``index_keys`` are not given, or the other way round.
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError
            The pool has too few free blocks.
        """
        with self._state.pool.lock:
            appending.append(self._state, seq, layer, keys, values, layout, index_keys, finish)

    def reserve(self, seq: int, n: int) -> None:
        """Take the blocks that `n` more tokens of a sequence need, so that appending finds room.

        They are the sequence's until :meth:`truncate`, :meth:`restore` or :meth:`drop`. A last
        block that is shared is copied when it is written to, which may need one block more. Blocks
        of first and last tokens in another format are not taken beforehand.

        Parameters
        ----------
        seq : int
        n : int
            Tokens after those that the fullest layer holds.

        Raises
        ------
        UnknownSequenceError
        InvalidArgumentError
            ``n`` is negative or no integer.
        CapacityExceededError
            The pool has too few free blocks; nothing has changed.
        """
        with self._state.pool.lock:
            appending.reserve(self._state, seq, n)

    def advance(self, seq: int, n: int = 1) -> None:
        """Move a sequence past ``n`` tokens that all of its layers have been given.

        Parameters
        ----------
        seq : int
        n : int

        Raises
        ------
        UnknownSequenceError
        LayersOutOfStepError
            Some layer has not; the message names the first.
        InvalidArgumentError
            ``n`` is negative or no integer.
        """
        with self._state.pool.lock:
            appending.advance(self._state, seq, n)

    # ---- attention -------------------------------------------------------------------------------

    @overload
    def attend(
        self, seq: int, layer: int, query: Array, **options: Unpack[AttendArguments]
    ) -> Floats: ...
    @overload
    def attend(
        self, seq: int, layer: int, query: Array, **options: Unpack[LseArguments]
    ) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self, seq: int, layer: int, query: Array, **options: Unpack[EitherArguments]
    ) -> Floats | tuple[Floats, Floats]: ...
    @shows_options
    def attend(self, seq: int, layer: int, query: Array, **options: Any) -> object:
        """Attend to what one layer of a sequence holds, pending tokens included.

        Parameters
        ----------
        seq, layer : int
        query : array of float32 (or float16, bfloat16)
            (num_heads, head_dim) for one token, (n, num_heads, head_dim) for the last n; without
            rows the result is empty.
        **options
            Those of a layer: see :meth:`kvedge.QuantizedKvLayer.attend`.

        Returns
        -------
        numpy.ndarray
            float32, shaped as the query, but as wide as values; with ``return_lse`` a pair with
            the log-sum-exp.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            The sequence has no tokens, or options do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        return attention.attend(self._state, seq, layer, query, **options)

    @shows_options
    def select(self, seq: int, layer: int, queries: Array, k: int, **options: Any) -> np.ndarray:
        """Choose the tokens that the last rows read, by the index of the pool.

        Parameters
        ----------
        seq, layer : int
        queries, k, **options
            As of :meth:`kvedge.KeyIndex.select`.

        Returns
        -------
        numpy.ndarray
            int32, lists for ``attend(seq, layer, query, tokens=)``.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            The pool has no index; and as :meth:`kvedge.KeyIndex.select` raises.
        ShapeMismatchError, DtypeMismatchError, NonFiniteInputError
        """
        return attention.select(self._state, seq, layer, queries, k, **options)

    def attend_batch(
        self,
        seqs: Sequence[int],
        layer: int,
        queries: Array | Sequence[Array],
        *,
        mask: None = None,
        tokens: None = None,
        start: int | Sequence[int] | None = None,
        **options: Unpack[BatchArguments],
    ) -> Any:
        """Attend to several sequences in one call, whose work is shared out over the threads.

        A long beginning that several of them share (1024 tokens or more, the same blocks) is read
        once for all, unless there is a window or ALiBi.

        Parameters
        ----------
        seqs : sequence of int
            They may differ in length, and one may occur several times.
        layer : int
        queries : array or list of arrays
            float32 (len(seqs), num_heads, head_dim), one row for each sequence; or for each one an
            array as for :meth:`attend`, all with one number of heads. float16 and bfloat16 are
            converted.
        out : array or list of them, optional
            float32, float16 or bfloat16, shaped as `queries`, but as wide as values, to write to.
        start : int or sequence of int, optional
            Of each sequence the first token that is seen, 0 to its length. ``sink_tokens`` count
            from it.
        layout : {"nhd", "hnd"}
            "hnd": queries and results of n tokens are (num_heads, n, head_dim).
        **options
            Those of a layer, see :meth:`kvedge.QuantizedKvLayer.attend`, the same for all
            sequences; no mask, no tokens.

        Returns
        -------
        out : numpy.ndarray or list of numpy.ndarray
            float32, shaped as `queries`, but as wide as values; or what `out` gave.
        lse : numpy.ndarray or list of numpy.ndarray
            With ``return_lse``: float32, without the last dimension.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            A sequence has no tokens, there is none at all, or options do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        if mask is not None or tokens is not None:
            raise InvalidArgumentError(
                "attend_batch takes no mask and no tokens: attend() to each with its own"
            )
        return attention.attend_batch(self._state, seqs, layer, queries, start, **options)

    # ---- reading ---------------------------------------------------------------------------------

    def k(self, seq: int, layer: int) -> np.ndarray:
        """Keys of one layer of a sequence, pending tokens included.

        Parameters
        ----------
        seq, layer : int

        Returns
        -------
        numpy.ndarray
            float32 (tokens, num_kv_heads, head_dim), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        """
        return decoding.read(self._state, False, seq, layer)

    def v(self, seq: int, layer: int) -> np.ndarray:
        """Values of one layer of a sequence, of value_head_dim; as :meth:`k`."""
        return decoding.read(self._state, True, seq, layer)

    def get_key(self, seq: int, layer: int, position: int, head: int) -> np.ndarray:
        """Key of one token and KV head, pending tokens included.

        Parameters
        ----------
        seq, layer, position, head : int

        Returns
        -------
        numpy.ndarray
            float32 (head_dim,), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError, PositionOutOfRangeError, HeadOutOfRangeError
        """
        head = checks.check_head(head, self._pool.num_kv_heads)
        return decoding.read(self._state, False, seq, layer, position)[:, head].reshape(-1)

    def get_value(self, seq: int, layer: int, position: int, head: int) -> np.ndarray:
        """Value of one token and KV head, of value_head_dim; as :meth:`get_key`."""
        head = checks.check_head(head, self._pool.num_kv_heads)
        return decoding.read(self._state, True, seq, layer, position)[:, head].reshape(-1)

    def get_keys_at(self, seq: int, layer: int, position: int) -> np.ndarray:
        """Keys of one token, all heads one after the other.

        Parameters
        ----------
        seq, layer, position : int

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * head_dim,), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError, PositionOutOfRangeError
        """
        return decoding.read(self._state, False, seq, layer, position).reshape(-1)

    def get_values_at(self, seq: int, layer: int, position: int) -> np.ndarray:
        """Values of one token, all heads, of value_head_dim each; as :meth:`get_keys_at`."""
        return decoding.read(self._state, True, seq, layer, position).reshape(-1)

    # ---- going back ------------------------------------------------------------------------------

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence; pending tokens are dropped.

        Parameters
        ----------
        seq : int
        n : int

        Raises
        ------
        UnknownSequenceError
        PositionOutOfRangeError
            Unless n is from 0 to the sequence's length.
        """
        with self._state.pool.lock:
            appending.truncate(self._state, seq, n)

    def snapshot(self, seq: int) -> PagedSnapshot:
        """Hold the tokens that a sequence was advanced over so far, pending ones excepted.

        Nothing is copied. See :class:`kvedge.PagedSnapshot`.

        Parameters
        ----------
        seq : int

        Returns
        -------
        PagedSnapshot

        Raises
        ------
        UnknownSequenceError
        """
        with self._state.pool.lock:
            return snapshots.snapshot(self._state, seq)

    def restore(self, seq: int, snapshot: PagedSnapshot) -> None:
        """Let a sequence be what a snapshot holds, of itself or of another sequence of the pool.

        Parameters
        ----------
        seq : int
        snapshot : PagedSnapshot
            It may be restored again.

        Raises
        ------
        UnknownSequenceError
        StaleSnapshotError
            The snapshot was released.
        InvalidArgumentError
            Not a snapshot, or of another pool.
        """
        with self._state.pool.lock:
            snapshots.restore(self._state, seq, snapshot)

    # ---- prefixes --------------------------------------------------------------------------------

    def register(
        self,
        seq: int,
        token_ids: Sequence[int] | np.ndarray,
        *,
        namespace: str | None = None,
        partial: bool = False,
    ) -> None:
        """Tell which token ids a sequence was computed from, so that others can share its blocks.

        Full blocks are registered, and they stay to be found when the sequence is dropped, until
        their memory is needed. Call it again when a sequence has become longer.

        Parameters
        ----------
        seq : int
        token_ids : sequence or array of int
            Of the sequence's first len(token_ids) tokens.
        namespace : str, optional
            Whatever keys depend on beside token ids, or may not be shared across: a tenant, an
            adapter, the digest of an image. Only the same namespace finds these blocks.
        partial : bool
            Register the tokens of the last, partly filled block too, of which ``match_prefix`` with
            `partial` makes copies; the sequence goes on in it. They are in no file.

        Raises
        ------
        UnknownSequenceError
        ShapeMismatchError
            There are more token ids than tokens, or they are not in one dimension.
        InvalidArgumentError
            Not integers; or blocks of the sequence were registered under others.
        """
        state = self._state
        with state.pool.lock:
            sequence, ids = state.sequence(seq), as_token_ids(token_ids)
            space, partial = as_namespace(namespace), checks.as_bool(partial, "partial")
            if len(ids) > sequence.length:
                raise ShapeMismatchError(
                    f"{len(ids)} token ids for the {sequence.length} tokens of sequence {seq}"
                )
            if state.pool.config.in_runs:  # of which whole ones are in blocks
                ids = ids[: len(ids) // RUN * RUN]
            state.pool.blocks.prefixes.add(ids, space, sequence.table.tolist(), partial=partial)
        if self._tier is not None:
            self._tier.put(seq, as_token_ids(token_ids), namespace)

    def match_prefix(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        leave: int = 0,
        namespace: str | None = None,
        partial: bool = False,
    ) -> tuple[int, int]:
        """Begin a sequence with the longest registered prefix of some tokens, sharing its blocks.

        Parameters
        ----------
        token_ids : sequence or array of int
            Such as those of a prompt.
        leave : int
            So many of the last tokens are not looked for. A model needs to run at least one of a
            prompt to say what comes next: leave=1.
        namespace : str, optional
            As of :meth:`register`.
        partial : bool
            Where the tokens part with what is known inside a block, copy that block, if one is
            free, and keep the rows of the tokens that agree; rows that lie in runs by runs of 32.

        Returns
        -------
        seq : int
            A new sequence, which holds the first `n` of the tokens.
        n : int
            A multiple of the block size, but with `partial`; 0 where nothing is known.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError
            Not integers in one dimension.

        Notes
        -----
        Token ids are compared one by one, never by a hash alone, so a prefix cannot be mistaken for
        another (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
        """
        ids, space = as_token_ids(token_ids), as_namespace(namespace)
        leave = checks.as_int(leave, "leave")
        if leave < 0:
            raise InvalidArgumentError(f"leave must be at least 0, not {leave}")
        pool, partial = self._state.pool, checks.as_bool(partial, "partial")
        with pool.lock:
            ids = ids[: max(0, len(ids) - leave)]
            table, n = pool.match(ids, space, partial=partial)
            sequence = SequenceState(
                pool.num_layers, table, n, pool.new_parts(n), pool.new_moments(n)
            )
            seq = self._state.add(sequence)
        if self._tier is not None and n < len(ids):
            found = self._tier.take(ids, namespace, n, partial=partial)
            if found is not None:
                self.drop(seq)
                return found
        return seq, n

    # ---- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all sequences and the pool's known prefixes to a file: all of it or nothing.

        What sequences share is there once. Sequences of other caches over the pool, snapshots and
        blocks that :meth:`KvBlockPool.allocate` gave are not saved.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        LayersOutOfStepError
            Some layer of a sequence has pending tokens.
        OSError
        """
        check_target(path)
        sequences = self._state.sequences
        with self._state.pool.lock:
            for sequence in sequences.values():
                check_nothing_pending(sequence.layer_lengths, sequence.length)
            file.save(self._state.pool, list(sequences.values()), path)

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
        OSError, OutOfMemoryError
        """
        number = None if num_blocks is None else checks.as_int(num_blocks, "num_blocks")
        pool, sequences = file.load(path, number)
        cache = cls(pool)
        for sequence in sequences:
            cache._state.add(sequence)
        return cache

    def swap_out(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Write one sequence to a file and drop it, which gives its blocks back.

        The file is one of :meth:`kvedge.KVCache.save`.

        Parameters
        ----------
        seq : int
        path : str or path-like

        Raises
        ------
        UnknownSequenceError
        LayersOutOfStepError
            Some layer has pending tokens.
        OSError, OutOfMemoryError
            The sequence is still there, and so is what was at `path`.
        """
        check_target(path)
        with self._state.pool.lock:  # nothing is appended between the file and the end
            self.to_kv_cache(seq).save(path)
            self.drop(seq)

    def swap_in(
        self,
        path: str | os.PathLike[str],
        *,
        token_ids: Sequence[int] | np.ndarray | None = None,
        namespace: str | None = None,
    ) -> int:
        """Begin a sequence with the tokens that :meth:`swap_out` wrote; the file stays.

        Parameters
        ----------
        path : str or path-like
            Or of any :meth:`kvedge.KVCache.save` of a cache that the pool could take.
        token_ids : sequence or array of int, optional
            Of the sequence's first tokens, as of :meth:`register`: what is registered of them is
            shared, and only the rest is taken from the file.
        namespace : str, optional
            As of :meth:`register`.

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
        OSError, OutOfMemoryError
        """
        cache = registry.active("KVCache").load(path, mmap=True)
        ids = None if token_ids is None else as_token_ids(token_ids)
        return exchange.from_cache(self._state, cache, ids, as_namespace(namespace))

    def save_prefix(
        self,
        seq: int,
        token_ids: Sequence[int] | np.ndarray,
        store: PrefixStore,
        *,
        model: str,
        namespace: str = "",
    ) -> int:
        """Store a sequence, before it is dropped, below the pool's memory.

        Parameters
        ----------
        seq : int
        token_ids : sequence or array of int
            Of all its tokens.
        store : kvedge.PrefixStore
        model, namespace
            As of :meth:`kvedge.PrefixStore.save`.

        Returns
        -------
        int
            As of :meth:`kvedge.PrefixStore.save`, as are its errors.
        """
        return store.save(self.to_kv_cache(seq), token_ids, model=model, namespace=namespace)

    def load_prefix(
        self,
        token_ids: Sequence[int] | np.ndarray,
        store: PrefixStore,
        *,
        model: str,
        namespace: str = "",
    ) -> int:
        """Begin a sequence with what a store knows of token ids, perhaps nothing.

        What is registered of them in the pool is shared (:meth:`register`, of the same namespace).

        Parameters
        ----------
        token_ids : sequence or array of int
        store : kvedge.PrefixStore
        model, namespace
            As of :meth:`kvedge.PrefixStore.load`.

        Returns
        -------
        int
            The sequence; :meth:`length` tells the tokens.

        Raises
        ------
        InvalidArgumentError
        CapacityExceededError
            The pool has too few free blocks.
        """
        ids, cache = as_token_ids(token_ids), exchange.empty_cache(self._state)
        n = store.load(cache, ids, model=model, namespace=namespace)
        return exchange.from_cache(self._state, cache, ids[:n], as_namespace(namespace or None))

    # ---- to and from a KVCache -------------------------------------------------------------------

    def to_kv_cache(self, seq: int, *, max_seq_len: int | None = None) -> KVCache:
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
        return exchange.to_cache(self._state, seq, max_seq_len)

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
        return exchange.from_cache(self._state, cache, None)

    # ---- facts -----------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Tokens that a sequence was advanced over.

        Parameters
        ----------
        seq : int

        Returns
        -------
        int

        Raises
        ------
        UnknownSequenceError
        """
        return self._state.sequence(seq).length

    def block_table(self, seq: int) -> np.ndarray:
        """The blocks of a sequence in order, those of pending tokens and reserved ones included.

        Parameters
        ----------
        seq : int

        Returns
        -------
        numpy.ndarray
            int32 (blocks,): token t is row t % block_size of block table[t // block_size]. A copy.

        Raises
        ------
        UnknownSequenceError
        """
        return self._state.contents(seq).table.copy()

    def block_tables(self, seqs: Sequence[int] | None = None) -> np.ndarray:
        """The blocks of several sequences, as paged attention kernels take them.

        Parameters
        ----------
        seqs : sequence of int, optional
            By default all, in the order of :attr:`sequences`.

        Returns
        -------
        numpy.ndarray
            int32 (len(seqs), most blocks of one), filled up with zeros.

        Raises
        ------
        UnknownSequenceError
        """
        chosen = self.sequences if seqs is None else as_list(seqs, "seqs")
        tables = [self._state.contents(seq).table for seq in chosen]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    @property
    def context_lens(self) -> np.ndarray:
        """Tokens of all sequences, int32 (num_sequences,), in the order of :attr:`sequences`."""
        with self._state.pool.lock:
            lengths = [sequence.length for sequence in self._state.sequences.values()]
        return np.array(lengths, np.int32)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, oldest first."""
        with self._state.pool.lock:
            return tuple(self._state.sequences)

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self._state.sequences)

    @property
    def pool(self) -> KvBlockPool:
        """The pool whose blocks hold the sequences."""
        return self._pool

    def __len__(self) -> int:
        return len(self._state.sequences)

    def __bool__(self) -> bool:
        return True  # also without sequences: `if cache` asks whether there is one

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, (int, np.integer)) and int(seq) in self._state.sequences

    def __repr__(self) -> str:
        tokens = int(self.context_lens.sum())
        return f"<{type(self).__name__} of {len(self)} sequences, {tokens} tokens, in {self._pool}>"

    def __reduce__(self) -> tuple[object, ...]:
        raise InvalidArgumentError(
            "a PagedKvCache shares its pool, so it cannot be copied or pickled: fork() its "
            "sequences, or copy them out of it with to_kv_cache()"
        )

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            state.abandon()
