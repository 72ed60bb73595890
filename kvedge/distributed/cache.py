"""A context over several processes: each holds a part, and attention is merged from all parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge import KVCache
from kvedge.cache.cache import state_of
from kvedge.cache.overwrites import OverwriteLog
from kvedge.cache.state import layer_names
from kvedge.core import arrays, checks
from kvedge.core.config import as_int
from kvedge.core.options import AttendOptions, shows_options
from kvedge.core.types import Array, Layout
from kvedge.distributed import files
from kvedge.distributed.facts import ShardedFacts
from kvedge.distributed.first_tokens import FirstTokens, check_shareable, check_storable, close
from kvedge.distributed.group import as_group
from kvedge.distributed.placement import BLOCK_SIZE
from kvedge.distributed.share import Share, join
from kvedge.distributed.snapshot import ShardedSnapshot
from kvedge.errors import (
    CapacityExceededError,
    GroupMismatchError,
    InvalidArgumentError,
    LayersOutOfStepError,
)
from kvedge.layer.keys import rule_of

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["ShardedKVCache"]

# Options of attend that speak of positions; a part is told of its own.
_OF_POSITIONS = {
    "causal",
    "window",
    "sink_tokens",
    "sink_logits",
    "mask",
    "start",
    "alibi_slopes",
}


class ShardedKVCache(ShardedFacts):
    """The keys and values of a model over a group of processes, each with a part of the tokens.

    Every process (rank) runs the model and makes the same calls: ``append`` with all keys and
    values, of which a rank stores its own, and ``attend``, whose result is the same bits on all of
    them. ``attend`` sends ``num_heads * (value_head_dim + 1)`` floats for each row to every other
    rank, whatever the context; ``save``, ``load`` and the constructor send a little; nothing else
    communicates. What is stored is what one cache would store, byte for byte.

    A rank that dies or hangs is a RankLostError on the others after at most ``timeout`` seconds.
    """

    def __init__(
        self,
        cache: KVCache,
        group: Any = None,
        *,
        block_size: int = BLOCK_SIZE,
        weights: Sequence[float] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Form a group; all ranks call it.

        Parameters
        ----------
        cache : KVCache
            This rank's part: empty, or what this rank held of a context that is placed so. From now
            on it is changed through this object alone. Its ``max_seq_len`` bounds the part.
        group : process group of torch.distributed, mpi4py communicator or Group, optional
            By default that of ``torch.distributed.init_process_group()``.
        block_size : int
            Tokens that lie on a rank before the next rank's begin.
        weights : sequence of float, optional
            For each rank a number in proportion to the tokens it shall hold, as
            :func:`kvedge.distributed.measure_weights` gives. None: block i is on rank i mod n.
        timeout : float
            Seconds without an answer after which a rank counts as lost. Not looked at where
            ``group`` is a :class:`kvedge.distributed.Group`, which has its own.

        Raises
        ------
        InvalidArgumentError
            ``cache`` has layers with windows or with ``recent`` or ``sinks``, or an argument makes
            no sense.
        LayersOutOfStepError
            Some layer of ``cache`` has pending tokens.
        GroupMismatchError
            Ranks differ in shape, format, version, placement, or in how many tokens they hold.
        RankLostError
        """
        if not isinstance(cache, KVCache):
            raise InvalidArgumentError(f"cache must be a KVCache, not {checks.describe(cache)}")
        for config in state_of(cache).format.layers:
            check_shareable(config)
        state_of(cache).refuse_pending("sharding")
        share = join(group, timeout, block_size=block_size, weights=weights)
        self._form(cache, share)

    def _form(self, cache: KVCache, share: Share) -> None:
        self._part = cache
        self._share = share
        share.agree(
            {
                "the format": str(state_of(cache).format),
                **share.placement_facts(),
                "key offset and scale": _maps_text(cache),
            }
        )
        told = share.tell([len(cache), cache.max_seq_len])
        self._length = self._length_of([tokens for tokens, _ in told])
        self._max_seq_len = share.placement.longest(limit for _, limit in told)
        self._ends = [self._length] * cache.num_layers
        self._high_water = list(self._ends)
        self._overwrites = OverwriteLog()
        self._first: list[FirstTokens | None] = [None] * cache.num_layers
        if not self._length:
            self._begin_anew()
        for store in state_of(cache).stores:
            close(store)

    def _length_of(self, lengths: Sequence[int]) -> int:
        """Tokens of the context of which ranks hold so many each."""
        length = sum(lengths)
        for rank, tokens in enumerate(lengths):
            wanted = int(self.placement.count(length, rank))
            if tokens != wanted:
                raise GroupMismatchError(
                    f"the ranks do not fit together: rank {rank} holds {tokens} tokens, and "
                    f"{wanted} of a context of {length} tokens in {self.placement} (all ranks: "
                    f"{', '.join(map(str, lengths))})",
                    expected=wanted,
                    got=tokens,
                )
        return length

    def _begin_anew(self) -> None:
        """Let the next tokens decide what is automatic."""
        state = state_of(self._part)
        for index, store in enumerate(state.stores):
            rule = rule_of(store, state.key_rule)
            self._first[index] = (
                FirstTokens(store, rule) if rule.is_open(store.key_map, 0) else None
            )

    # ---- tokens in -------------------------------------------------------------------------------

    def append(self, layer: int, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """Give one layer its next token or tokens, on all ranks the same; each stores its own.

        Parameters
        ----------
        layer : int
        keys, values : array of float32 (or float16, bfloat16)
            One token, (num_kv_heads, head_dim) or flat, or several, (n, num_kv_heads, head_dim);
            values of value_head_dim where that differs. They follow what this layer already holds.
        layout : {"nhd", "hnd"}
            "hnd": several tokens come as (num_kv_heads, n, head_dim).

        Raises
        ------
        LayerOutOfRangeError, DtypeMismatchError, ShapeMismatchError, LayoutError
        NonFiniteInputError, ScaleRangeError
            On all ranks, whichever would have held the rows.
        CapacityExceededError
            More tokens than ``max_seq_len``, on all ranks.
        OutOfMemoryError
            This rank could not grow; others do not know of it.
        """
        index = checks.check_layer(layer, self.num_layers)
        part = state_of(self._part).stores[index]
        start = self._ends[index]
        keys, values = checks.checked_rows(
            keys, values, replace(part.config, limit=None), start, many=None, layout=layout
        )
        n = len(keys)
        self._check_room(index, n)
        if not n:
            return
        first = self._first[index]
        if first is None or not first.is_open:
            check_storable(part.config, part.key_map, keys, values)
        else:
            first.take(keys, values)  # which checks them as well
        mine = self._share.own_positions(start, start + n)
        if len(mine) == n:
            self._part.append(index, keys, values)
        elif len(mine):
            self._part.append(index, keys[mine], values[mine])
        if start < self._high_water[index]:
            self._overwrites.add(start)
        self._ends[index] = self._high_water[index] = start + n

    def _check_room(self, index: int, n: int) -> None:
        limit, start = self._max_seq_len, self._ends[index]
        if limit is not None and n > limit - start:
            raise CapacityExceededError(
                f"layer {index} has no room for {n} more tokens: {start} of {limit}, which is what "
                f"the parts hold in {self.placement}, are in use",
                expected=limit - start,
                got=n,
                layer=index,
            )

    def advance(self, n: int = 1) -> None:
        """Move the position past ``n`` tokens that every layer has been given.

        Raises
        ------
        LayersOutOfStepError, InvalidArgumentError
            As of :meth:`kvedge.KVCache.advance`.
        """
        n = as_int(n, "n")
        if n < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {n}: truncate() goes back")
        length = self._length + n
        lacking = [i for i, end in enumerate(self._ends) if end < length]
        if lacking:
            least = min(self._ends[i] for i in lacking)
            raise LayersOutOfStepError(
                f"cannot advance to position {length}: {layer_names(lacking)} of "
                f"{self.num_layers} lack tokens (the shortest holds {least}): append to them first",
                expected=length,
                got=least,
                layer=lacking[0],
            )
        self._part.advance(self._share.count(length) - len(self._part))
        self._length = length

    def push_step(self, keys: Array, values: Array) -> None:
        """Append one token to every layer, then advance: all of it or nothing.

        Parameters
        ----------
        keys, values : array of float32 (or float16, bfloat16), (num_layers, num_kv_heads, head_dim)

        Raises
        ------
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
        CapacityExceededError, OutOfMemoryError
            As of :meth:`append`.
        """
        config, layers = self._config, self.num_layers
        keys = checks.as_float32(keys, "keys", shape=config.rows_shape(False, layers))
        values = checks.as_float32(values, "values", shape=config.rows_shape(True, layers))
        self._refuse_pending("push_step()")
        checks.check_finite(keys, "keys")
        checks.check_finite(values, "values")
        start = self._length
        self._check_room(0, 1)
        for index, store in enumerate(state_of(self._part).stores):
            first, row = self._first[index], slice(index, index + 1)
            if first is None or not first.is_open:
                check_storable(store.config, store.key_map, keys[row], values[row])
            else:
                first.check(keys[row], values[row])
        try:
            for index in range(layers):
                self.append(index, keys[index], values[index])
        except BaseException:
            self.truncate(start)
            raise
        self.advance()

    def _refuse_pending(self, call: str) -> None:
        ahead = self._ahead()
        if ahead:
            hold = "holds" if len(ahead) == 1 else "hold"
            raise LayersOutOfStepError(
                f"{call} needs all layers at position {self._length}, but {layer_names(ahead)} "
                f"{hold} tokens beyond it: advance() over them or truncate() first",
                expected=self._length,
                got=self._ends[ahead[0]],
                layer=ahead[0],
            )

    def _ahead(self) -> list[int]:
        """Layers with pending tokens, on whichever rank."""
        return [i for i, end in enumerate(self._ends) if end != self._length]

    # ---- attention -------------------------------------------------------------------------------

    @shows_options
    def attend(
        self,
        layer: int,
        query: Array,
        *,
        return_lse: bool = False,
        out: Any = None,
        layout: Layout = "nhd",
        **options: Any,
    ) -> Any:
        """Attend to what one layer holds on all ranks, pending tokens included; all ranks call it.

        Parameters
        ----------
        layer : int
        query : array of float32 (or float16, bfloat16)
            (num_heads, head_dim) for one token, (n, num_heads, head_dim) for the last n of the
            context.
        **options
            Those of a layer: see :meth:`kvedge.QuantizedKvLayer.attend`. Positions, and whatever
            speaks of them, are those of the whole context.

        Returns
        -------
        ndarray of float32
            Shaped as the query, but as wide as values; with ``return_lse`` a pair with the
            log-sum-exp. The same bits on all ranks.

        Raises
        ------
        LayerOutOfRangeError
            And whatever a layer's ``attend`` raises, on all ranks.
        RankLostError
            A rank did not answer in time, or has died. What is stored here is as it was.
        GroupMismatchError
            The ranks are not at the same call.
        """
        index = checks.check_layer(layer, self.num_layers)
        part = state_of(self._part).stores[index]
        rows, single = checks.as_query(query, part.config, layout=layout)
        n_rows, num_heads, head_dim = rows.shape
        length = self._ends[index]
        if options.get("tokens") is not None:
            raise InvalidArgumentError("a ShardedKVCache takes no tokens: its parts have no lists")
        resolved = AttendOptions.make(
            head_dim, n_rows, num_heads, length, return_lse=return_lse, **options
        )
        shape = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        reads = (arrays.memory_of(query, "query"), *resolved.arrays())
        target = arrays.as_target(out, part.config.out_shape(shape), reads=reads, layout=layout)
        passed = {name: value for name, value in options.items() if name not in _OF_POSITIONS}
        whole, lse = self._share.attend(
            index,
            [self._part.layer(index)],
            [rows],
            length,
            [resolved],
            passed,
            resolved.sink_logits,
        )
        to = target.rows[np.newaxis] if single else target.rows
        to[...] = whole[0]
        result = target.finish()
        if not resolved.return_lse:
            return result
        of_rows = lse[0].astype(np.float32)
        return result, (of_rows[0] if single else of_rows.T if layout == "hnd" else of_rows)

    # ---- going back and forth --------------------------------------------------------------------

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens of the context; pending tokens are dropped.

        Raises
        ------
        PositionOutOfRangeError
            Unless 0 <= n <= len(cache).
        """
        self._set_length(checks.check_length(n, self._length))

    def _set_length(self, n: int) -> None:
        state_of(self._part).set_length(self._share.count(n))
        for first in self._first:
            if first is not None:
                first.go_to(n)
        self._length = n
        self._ends = [n] * self.num_layers

    def clear(self) -> None:
        """Forget all tokens. Automatic key offsets and scales are taken anew from the next ones."""
        self._set_length(0)
        self._part.clear()
        self._begin_anew()
        state = state_of(self._part)
        for store in state.stores:
            close(store)
        if any(state.key_rule):
            self._overwrites.add(0)
            self._high_water = [0] * self.num_layers

    def snapshot(self) -> ShardedSnapshot:
        """Take a snapshot; nothing is copied. Pending tokens are not in it."""
        return ShardedSnapshot(self, self._overwrites.epoch, tuple(self._ahead()))

    def restore(self, snapshot: ShardedSnapshot) -> None:
        """Return to a snapshot: back, or forward again; all ranks to that of the same moment.

        One that was detached brings its key offsets and scales along, which stay from then on.

        Raises
        ------
        StaleSnapshotError
            Tokens of the snapshot have been overwritten since, on whichever rank.
        InvalidArgumentError
            Not a snapshot of this cache.
        """
        if not isinstance(snapshot, ShardedSnapshot) or snapshot._cache is not self:
            raise InvalidArgumentError(
                f"snapshot must be one that this cache made, not {checks.describe(snapshot)}"
            )
        if snapshot.is_stale:
            raise snapshot._stale()
        n = len(snapshot)
        self._part.restore(snapshot._part)
        for first in self._first:
            if first is not None:
                first.go_to(n)
        if snapshot.is_detached:
            for store in state_of(self._part).stores:
                close(store)
            self._first = [None] * self.num_layers
            self._overwrites.add(0)
            self._high_water = [n] * self.num_layers
        self._length = n
        self._ends = [n] * self.num_layers

    # ---- files -----------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the context to a folder, a file per rank and a manifest; all ranks call it.

        The folder may be one that all share, or one on each machine. What was saved there before is
        replaced once all parts of this context are written.

        Parameters
        ----------
        path : str or path
            Made if it is not there.
        metadata : mapping of str to str, optional
            As of :meth:`kvedge.KVCache.save`.

        Raises
        ------
        KvedgeError
            Another rank could not write its part. What was saved before is still there.
        LayersOutOfStepError, OSError, InvalidArgumentError, RankLostError
            As of :meth:`kvedge.KVCache.save`.
        """
        self._refuse_pending("save()")
        saved = dict(self.metadata if metadata is None else metadata)
        files.save(self._part, self._share, path, self._length, self._max_seq_len, saved)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        group: Any = None,
        *,
        block_size: int | None = None,
        weights: Sequence[float] | None = None,
        timeout: float = 60.0,
    ) -> Self:
        """Read a context that :meth:`save` wrote, with any number of ranks; all ranks call it.

        Parameters
        ----------
        path : str or path
            With the same ranks placed alike, a rank needs its own file only; else all files that
            hold one of its tokens.
        group, timeout
            As of the constructor.
        block_size, weights : optional
            As of the constructor; by default as saved, striped if the number of ranks is another.

        Raises
        ------
        CorruptFileError
            A file is damaged, or of another save.
        FileNotFoundError
            There is no manifest, or a file is not on this machine.
        KvedgeError
            Another rank could not read what it needs.
        InvalidArgumentError, OutOfMemoryError, GroupMismatchError, RankLostError
        """
        joined = as_group(group, timeout)
        part, share = files.load(path, joined, block_size, weights)
        cache = cls.__new__(cls)
        cache._form(part, share)
        return cache


def _maps_text(cache: KVCache) -> str:
    """What of key offsets and scales has to be equal on all ranks, in a few characters."""
    state = state_of(cache)
    vectors = [vector for store in state.stores for vector in store.key_map]
    texts = [b"-" if array is None else np.ascontiguousarray(array).tobytes() for array in vectors]
    rule = state.key_rule
    autos = [name for name, is_auto in zip(("offset", "scale"), rule, strict=False) if is_auto]
    digest = hashlib.sha256(b"|".join(texts)).hexdigest()[:12]
    return f"{'+'.join(autos) or 'nothing'} automatic, vectors {digest}"
