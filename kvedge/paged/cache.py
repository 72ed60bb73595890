"""The cache of many sequences over a pool of blocks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core import checks
from kvedge.errors import (
    InvalidArgumentError,
    KvedgeError,
    LayersOutOfStepError,
    ShapeMismatchError,
    StaleSnapshotError,
)
from kvedge.paged import readings
from kvedge.paged.exchange import PagedExchange, check_nothing_pending
from kvedge.paged.pool import KvBlockPool
from kvedge.paged.prefixes import as_token_ids
from kvedge.paged.recent import TOKENS
from kvedge.paged.sequences import Contents, PagedSnapshot, Recent, SequenceState

if TYPE_CHECKING:
    from kvedge.core.types import Array, Layout

__all__ = ["PagedKvCache"]

_numbers = count()  # of sequences: one series for all caches, so that no two share a number


class PagedKvCache(PagedExchange):
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

    Raises
    ------
    InvalidArgumentError
        ``pool`` is no KvBlockPool.

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

    def __init__(self, pool: KvBlockPool) -> None:
        """Make a cache without sequences; the class tells of the parameter."""
        if not isinstance(pool, KvBlockPool):
            raise InvalidArgumentError(f"pool must be a KvBlockPool, not {checks.describe(pool)}")
        self._pool: Any = pool
        self._sequences: dict[int, SequenceState] = {}

    # ---- sequences -------------------------------------------------------------------------------

    def new_sequence(self) -> int:
        """Begin a sequence without tokens; it takes no block until the first are appended.

        Returns
        -------
        int
        """
        with self._pool._lock:
            pool = self._pool
            return self._add(SequenceState(pool.num_layers, recent=pool._new_recent()))

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
        with self._pool._lock:
            state = self._state(seq)
            check_nothing_pending(state.held, state.length)
            table, recent = self._advanced_over(state)
            self._pool._hold_all(table, recent)
            return self._add(SequenceState(self._pool.num_layers, table, state.length, recent))

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
        with self._pool._lock:
            state = self._state(seq)
            table, recent = state.table, state.recent
            del self._sequences[checks.as_int(seq, "seq")]
            state.contents = None  # for whoever has looked the sequence up, but reads nothing yet
            self._pool._release_all(table, recent)

    # ---- tokens in -------------------------------------------------------------------------------

    def append(
        self, seq: int, layer: int, keys: Array, values: Array, *, layout: Layout = "nhd"
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

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError
            The pool has too few free blocks.
        """
        pool = self._pool
        with pool._lock:
            state = self._state(seq)
            layer = self._layer(layer)
            keys = checks.as_rows(keys, False, pool._config, many=None, layout=layout)
            values = checks.as_rows(values, True, pool._config, many=None, layout=layout)
            keys, values = np.ascontiguousarray(keys), np.ascontiguousarray(values)
            if len(keys) != len(values):
                raise ShapeMismatchError(
                    f"keys and values must hold as many tokens: {len(keys)} against {len(values)}"
                )
            if not len(keys):
                return
            if pool._recent is not None:
                self._append_with_recent(state, layer, keys, values)
                return
            store, start = pool._stores[layer], state.held[layer]
            stop = start + len(keys)
            block = self._unwritable(state, layer, start)
            if block is None and start == state.resumed:
                store.settle()  # calls that read these rows have ended, late helpers may not have
            num_new = max(0, pool._blocks_for(stop) - len(state.table))
            if num_new or block is not None:
                self._append_to_new_blocks(state, layer, start, num_new, block, keys, values)
            else:
                store.write(state.table, pool.block_size, start, keys, values)
            state.held[layer] = stop

    def _append_to_new_blocks(
        self,
        state: SequenceState,
        layer: int,
        start: int,
        num_new: int,
        block: int | None,
        keys: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Write rows with so many blocks added to the table, and one of it (or None) replaced."""
        pool, table = self._pool, state.table
        store = pool._stores[layer]
        copied, wanted = self._wanted(layer, table, block, start, num_new)
        if pool._must_forget(wanted):
            store.check(keys, values)  # before prefixes are forgotten for good
        if block is not None and copied is None:
            self._own(table, block)
        taken = pool._take(wanted)
        try:
            longer = self._longer(table, taken, num_new, copied)
            store.write(longer, pool.block_size, start, keys, values)
        except BaseException:
            pool._release(taken)
            raise
        state.contents = Contents(longer, state.held, state.recent)
        if copied is not None:
            pool._release(table[copied : copied + 1])

    def _append_with_recent(
        self, state: SequenceState, layer: int, keys: np.ndarray, values: np.ndarray
    ) -> None:
        """Append to a layer whose first and last tokens lie in blocks of another format too."""
        pool, table, contents = self._pool, state.table, state.contents
        assert contents is not None
        store, recent = pool._stores[layer], pool._recent
        rows = (keys, values)
        recent.refuse(keys, values, store.key_map)
        plan = recent.plan(contents, layer, len(keys))
        # Runs are written once they are full, from the first of their tokens on.
        writes = plan.writes_run or not pool._config.in_runs
        is_cut = plan.recent.since[layer] > plan.cut  # tokens of the run are read in the pool
        token = plan.cut if is_cut else plan.start
        block = self._unwritable(state, layer, plan.start, token) if writes else None
        num_new = max(0, pool._blocks_for(plan.stop) - len(table))
        if plan.start == state.resumed:
            pool._settle()  # calls that read these rows have ended, late helpers may not have
        if num_new == 0 and block is None and plan.is_in_place and not plan.writes_run:
            recent.write(plan, plan.recent.table, layer, rows, None)
            if not pool._config.in_runs:
                store.write(table, pool.block_size, plan.start, *rows)
            state.held[layer] = plan.stop
            return
        copied, wanted = self._wanted(layer, table, block, token, num_new)
        pool._check_room(wanted)
        recent._check_room(recent.needed(plan))
        before = None
        if plan.cut < plan.start and (plan.writes_run or plan.first < plan.start):
            here = readings.Reading(layer, contents)
            before = tuple(
                self._read_parts(values, layer, here, plan.cut, plan.start)
                for values in (False, True)
            )
        if pool._must_forget(wanted):
            store.check(keys, values)
            recent.check(layer, keys, values)
        elif plan.writes_run and is_cut:  # over rows that are read
            recent.check(layer, keys, values)
        if block is not None and copied is None:
            self._own(table, block)
        taken, fine = pool._take(wanted), recent._take(recent.needed(plan))
        try:
            longer = self._longer(table, taken, num_new, copied)
            of_recent = recent.table_of(plan, fine)
            recent.write(plan, of_recent, layer, rows, before)
            if not pool._config.in_runs:
                store.write(longer, pool.block_size, plan.start, *rows)
            elif writes:
                for start, runs in recent.runs(layer, plan, rows, before):
                    store.write(longer, pool.block_size, start, *runs)
        except KvedgeError:
            pool._release(taken)
            recent._release(fine)
            recent.check(layer, keys, values)  # names the element within all of the rows
            raise
        except BaseException:
            pool._release(taken)
            recent._release(fine)
            raise
        held = list(contents.held)
        held[layer] = plan.stop
        state.contents = Contents(longer, held, recent.after(plan, layer, of_recent))
        if copied is not None:
            pool._release(table[copied : copied + 1])
        if plan.copied is not None:
            recent._release(plan.recent.table[plan.copied : plan.copied + 1])
        if len(plan.missing) > 1:  # a prompt, perhaps in pieces that are pending
            self._trim(state)

    def _trim(self, state: SequenceState) -> None:
        """Give back the blocks of last tokens that are too old by now."""
        contents, pool = state.contents, self._pool
        assert contents is not None and contents.recent is not None
        recent, gone = pool._recent.trimmed(contents.recent, contents.held, state.length)
        if len(gone):
            state.contents = contents._replace(recent=recent)
            pool._recent._release(gone)

    def _wanted(
        self, layer: int, table: np.ndarray, block: int | None, start: int, num_new: int
    ) -> tuple[int | None, int]:
        """Of a block that cannot be written to: whether it is copied, and the blocks needed."""
        pool = self._pool
        wanted = num_new + (block is not None)
        if block is not None and wanted > pool.free_count:
            # No room for a copy: if nobody else holds or reads the block, write over it.
            alone = pool._references[table[block]] == 1
            if alone and not readings.reads_from(pool._running, layer, table, block, start):
                return None, wanted - 1
        return block, wanted

    def _own(self, table: np.ndarray, block: int) -> None:
        """Let a block be written over that others could find by its token ids."""
        pool = self._pool
        if table[block] in pool._prefixes:
            pool._forget(int(table[block]))
        pool._settle()  # as for other rows written in place

    def _longer(
        self, table: np.ndarray, taken: np.ndarray, num_new: int, copied: int | None
    ) -> np.ndarray:
        """A table with blocks that were taken, one of which becomes a copy."""
        if not len(taken):
            return table
        longer = np.concatenate([table, taken[:num_new]])
        if copied is not None:
            longer[copied] = taken[-1]
            self._pool._copy_block(int(table[copied]), int(taken[-1]))
        return longer

    def _unwritable(
        self, state: SequenceState, layer: int, start: int, token: int | None = None
    ) -> int | None:
        """Which block of the table must be copied before a layer's tokens from `start` on come.

        Only one can be: the last that has tokens advanced over. Blocks after it are nobody else's,
        since forks and snapshots share no pending tokens, and are new since rows were last taken
        away. A running call that reads rows before `start` alone, as in decoding, is no reason.
        """
        last, used = divmod(state.length, self._pool.block_size)
        if not used or start // self._pool.block_size != last:
            return None
        pool, table = self._pool, state.table
        block = int(table[last])
        if pool._references[block] > 1 or block in pool._prefixes:
            return int(last)
        token = start if token is None else token  # rows from here on are written
        if pool._running and readings.reads_from(pool._running, layer, table, last, token):
            return int(last)
        return None

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
        pool = self._pool
        with pool._lock:
            state = self._state(seq)
            n = checks.as_int(n, "n")
            if n < 0:
                raise InvalidArgumentError(f"n must be at least 0, not {n}")
            more = pool._blocks_for(max(state.held) + n) - len(state.table)
            if more > 0:
                longer = np.concatenate([state.table, pool._take(more)])
                state.contents = Contents(longer, state.held, state.recent)

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
        with self._pool._lock:
            state = self._state(seq)
            n = checks.as_int(n, "n")
            if n < 0:
                raise InvalidArgumentError(f"n must be at least 0, not {n}: truncate() goes back")
            length = state.length + n
            fewest = min(state.held)
            if fewest < length:
                raise LayersOutOfStepError(
                    f"cannot advance sequence {seq} to position {length}: layer "
                    f"{state.held.index(fewest)} holds {fewest} tokens, append to it first",
                    expected=length,
                    got=fewest,
                    layer=state.held.index(fewest),
                )
            crosses = length // TOKENS != state.length // TOKENS
            state.length = length
            contents = state.contents
            if contents is not None and contents.recent is not None:
                recent = self._pool._recent.advanced(contents.recent, length)
                if recent is not contents.recent:
                    state.contents = contents._replace(recent=recent)
                if crosses:
                    self._trim(state)

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
        with self._pool._lock:
            state = self._state(seq)
            n = checks.check_length(n, state.length)
            pool, kept = self._pool, self._pool._blocks_for(n)
            table, recent = state.table, state.recent
            shorter = None if recent is None else pool._recent.shortened(recent, n)
            state.go_to(pool.num_layers, table[:kept], n, shorter)
            pool._release(table[kept:])
            if recent is not None and shorter is not None:
                gone = recent.table[len(shorter.table) :]
                pool._recent._release(gone[gone >= 0])

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
        with self._pool._lock:
            state = self._state(seq)
            table, recent = self._advanced_over(state)
            self._pool._hold_all(table, recent)
            return PagedSnapshot._holding(self._pool, table, state.length, recent)

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
        with self._pool._lock:
            state = self._state(seq)
            table, recent = self._table_of(snapshot), snapshot._recent
            self._pool._hold_all(table, recent)
            gone, recent_gone = state.table, state.recent
            state.go_to(self._pool.num_layers, table, len(snapshot), recent)
            self._pool._release_all(gone, recent_gone)

    # ---- prefixes --------------------------------------------------------------------------------

    def register(self, seq: int, token_ids: Any) -> None:
        """Tell which token ids a sequence was computed from, so that others can share its blocks.

        Only full blocks are registered, and they stay to be found when the sequence is dropped,
        until their memory is needed. Call it again when a sequence has become longer.

        Parameters
        ----------
        seq : int
        token_ids : sequence or array of int
            Of the sequence's first len(token_ids) tokens.

        Raises
        ------
        UnknownSequenceError
        ShapeMismatchError
            There are more token ids than tokens, or they are not in one dimension.
        InvalidArgumentError
            Not integers; or blocks of the sequence were registered under others.
        """
        with self._pool._lock:
            state = self._state(seq)
            ids = as_token_ids(token_ids)
            if len(ids) > state.length:
                raise ShapeMismatchError(
                    f"{len(ids)} token ids for the {state.length} tokens of sequence {seq}"
                )
            self._pool._prefixes.add(ids, state.table.tolist())

    def match_prefix(self, token_ids: Any, *, leave: int = 0) -> tuple[int, int]:
        """Begin a sequence with the longest registered prefix of some tokens, sharing its blocks.

        Parameters
        ----------
        token_ids : sequence or array of int
            Such as those of a prompt.
        leave : int
            So many of the last tokens are not looked for. A model needs to run at least one of a
            prompt to say what comes next: leave=1.

        Returns
        -------
        seq : int
            A new sequence, which holds the first `n` of the tokens.
        n : int
            A multiple of the block size; 0 where nothing is known.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError
            Not integers in one dimension.

        Notes
        -----
        Token ids are compared one by one, never by a hash alone, so a prefix cannot be mistaken for
        another (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
        """
        ids = as_token_ids(token_ids)
        leave = checks.as_int(leave, "leave")
        if leave < 0:
            raise InvalidArgumentError(f"leave must be at least 0, not {leave}")
        pool = self._pool
        with pool._lock:
            table = pool._match(ids[: max(0, len(ids) - leave)])
            n = len(table) * pool.block_size
            recent = pool._new_recent(n)
            return self._add(SequenceState(pool.num_layers, table, n, recent)), n

    def __reduce__(self) -> Any:
        raise InvalidArgumentError(
            "a PagedKvCache shares its pool, so it cannot be copied or pickled: fork() its "
            "sequences, or copy them out of it with to_kv_cache()"
        )

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:  # the pool may be another cache's as well
            pool._abandoned.extend((one.table, one.recent) for one in self._sequences.values())

    # ---- inside ----------------------------------------------------------------------------------

    def _add(self, state: SequenceState) -> int:
        seq = next(_numbers)
        self._sequences[seq] = state
        return seq

    def _advanced_over(self, state: SequenceState) -> tuple[np.ndarray, Recent | None]:
        """The blocks of the tokens that a sequence was advanced over."""
        table = state.table[: self._pool._blocks_for(state.length)]
        if state.recent is None:
            return table, None
        return table, self._pool._recent.shortened(state.recent, state.length)

    def _table_of(self, snapshot: Any) -> np.ndarray:
        if not isinstance(snapshot, PagedSnapshot):
            raise InvalidArgumentError(
                f"snapshot must be a PagedSnapshot, not {checks.describe(snapshot)}"
            )
        if snapshot._pool is not self._pool:
            raise InvalidArgumentError("this snapshot is of another pool")
        if snapshot._table is None:
            raise StaleSnapshotError("this snapshot was released: its blocks are no longer held")
        return snapshot._table
