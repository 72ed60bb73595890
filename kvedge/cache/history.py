"""Going back and forth in a cache, and all of it elsewhere: snapshots, editing, copies, files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.cache.snapshot import KvCacheSnapshot
from kvedge.cache.storage import CacheStorage
from kvedge.core import checks, registry
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import memory_for
from kvedge.errors import InvalidArgumentError
from kvedge.files import load, session
from kvedge.files.contents import CacheContents

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["CacheHistory"]


class CacheHistory(CacheStorage):
    """The part of a cache that takes back, moves and copies what it holds."""

    # ---- going back and forth --------------------------------------------------------------------

    def snapshot(self) -> KvCacheSnapshot:
        """Mark this moment; nothing is copied. See :class:`kvedge.KvCacheSnapshot`.

        It marks the tokens advanced over: restoring it drops pending ones.
        """
        length = self._length  # first: what is overwritten after that lies above
        epoch = self._overwrites.epoch
        return KvCacheSnapshot._mark(self, epoch, length, tuple(self._ahead(length)))

    @memory_for("the tokens of a snapshot")
    def restore(self, snapshot: KvCacheSnapshot) -> None:
        """Return to a snapshot: back, or forward again. Pending tokens are dropped.

        Parameters
        ----------
        snapshot : KvCacheSnapshot
            A mark made by this cache, or a detached snapshot of any cache of the same format, whose
            bytes and key offsets then replace all that is here.

        Raises
        ------
        StaleSnapshotError
            Tokens below a mark have been overwritten since.
        InvalidArgumentError
            Not a snapshot, or a mark of another cache.
        ShapeMismatchError
            A detached snapshot of another format.
        CapacityExceededError, OutOfMemoryError
            A detached snapshot that does not fit.
        """
        if isinstance(snapshot, KvCacheSnapshot) and snapshot._contents is not None:
            self._replace(snapshot._contents)
        else:
            self._set_length(self._checked_mark(snapshot))

    def restore_from_snapshot(self, snapshot: KvCacheSnapshot) -> None:
        """Return to a snapshot; another name of :meth:`restore`."""
        self.restore(snapshot)

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens; pending tokens are dropped.

        Raises
        ------
        PositionOutOfRangeError
            Unless 0 <= n <= len(cache); or a layer with a window has dropped tokens that the next
            one would see. Those of the last append can always be taken back, and all (n=0).
        """
        n = checks.check_length(n, self._length)
        self._check_kept(n)
        self._set_length(n)

    def clear(self) -> None:
        """Forget all tokens. Automatic key offsets and scales are taken anew from the next ones."""
        self._set_length(0)
        for layer in self._layers:
            layer._key_rule = self._rule_of(layer)
            layer._clear()
        if any(self._key_rule):  # the bytes still there mean nothing without the map they had
            self._forget_bytes()

    @memory_for("the positions to keep")
    def keep(self, indices: Any) -> None:
        """Keep only some tokens, moved together in their order.

        Stored keys are not rotated to the new positions; see :meth:`shift`.

        Parameters
        ----------
        indices : sequence of int, or mask of bool (len(cache),)
            Positions, strictly increasing.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError
            Also where a layer with a window has dropped tokens.
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        """
        positions = checks.check_keep(indices, self._length)
        self._refuse_pending("keep()")
        for layer in self._layers:
            checks.check_whole(layer._config, layer._held(), "keep()")
        moved = np.flatnonzero(positions != np.arange(len(positions)))
        if moved.size == 0:
            self._set_length(len(positions))
            return
        for layer in self._layers:
            layer._keep_all(positions)
        self._overwrites.add(int(moved[0]))
        self._high_water = [len(positions)] * self._num_layers
        self._length = len(positions)

    @memory_for("the shifted keys of a layer")
    def shift(self, delta: int, *, rope: Any, start: int = 0, stop: int | None = None) -> None:
        """Rotate stored keys of all layers by ``delta`` positions of their rotary embedding.

        With :meth:`keep` this is a context shift: drop old tokens, then move the rest to where
        they now are. No key is stored again, so any number of shifts costs no precision: see
        :meth:`kvedge.QuantizedKvLayer.shift`.

        Parameters
        ----------
        delta : int
            Positions to move by; negative moves towards the start.
        rope : Rope, or sequence of Rope or None
            The model's rotary embedding; where layers differ, one for each, None for layers whose
            keys are not rotated.
        start, stop : int, optional
            Range of tokens; by default all.

        Raises
        ------
        InvalidArgumentError, PositionOutOfRangeError, ScaleRangeError, NonFiniteInputError
        LayersOutOfStepError
            If some layer holds tokens that have not been advanced over.
        """
        start, stop = checks.check_range(start, stop, self._length)
        self._refuse_pending("shift()")
        ropes = list(rope) if isinstance(rope, (list, tuple)) else [rope] * self._num_layers
        if len(ropes) != self._num_layers:
            raise InvalidArgumentError(
                f"rope must be one for all or one for each of {self._num_layers} layers, not "
                f"{len(ropes)}"
            )
        several = isinstance(rope, (list, tuple))
        turned = [
            (layer, one)
            for layer, one in zip(self._layers, ropes, strict=True)
            if one is not None or not several
        ]
        for layer, one in turned:
            layer._check_shift(delta, one, *_held_range(layer, start, stop))
        for layer, one in turned:
            layer._shift(delta, one, *_held_range(layer, start, stop))
        if delta and start < stop:
            self._overwrites.add(start)

    # ---- copies ----------------------------------------------------------------------------------

    @memory_for("a copy of the cache")
    def copy(self) -> Self:
        """Return an independent cache with the same tokens, pending ones included.

        Snapshots stay with the cache that made them.
        """
        other = self._holding(
            self._contents(copy=False), self._max_seq_len, self._key_rule, self._metadata
        )
        other._num_query_heads = self._num_query_heads
        return other

    def _settled(self) -> Self:
        """This cache; or a copy whose keys are stored turned, where some are still to be turned."""
        if all(layer._turns is None for layer in self._layers):
            return self
        other = self.copy()
        for layer in other._layers:
            layer._settle()
        return other

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @memory_for("a pickle of the cache")
    def __reduce__(self) -> tuple[Any, ...]:
        kind = registry.named(type(self))
        return (
            _restore_cache,
            (
                *(kind, self._contents(), self._max_seq_len, self._key_rule, self._metadata),
                self._num_query_heads,
            ),
        )

    @memory_for("the file of the cache")
    def save(
        self, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the tokens to a file in safetensors format (extra ``kvedge[io]``).

        The file appears whole or not at all: it is written beside ``path``, synced and renamed.
        Pending tokens are never dropped silently: it refuses while there are any.

        Parameters
        ----------
        path : str or path
        metadata : mapping of str to str, optional
            Kept in the file, and given back as ``metadata`` of the loaded cache. By default this
            cache's own ``metadata``.

        Raises
        ------
        MissingExtraError
            The package safetensors is not installed.
        InvalidArgumentError
            ``path`` is no path, or ``metadata`` holds something else than strings.
        LayersOutOfStepError
            Some layer holds tokens that have not been advanced over; the message names it.
        OSError
            The file cannot be written; what was at ``path`` is still there. It is found out before
            anything is computed where ``path`` leads to what is no regular file (a folder, a pipe,
            a device, an open file as /dev/stdout is), to one that is a mount point of its own or
            that this process may not write, or to a folder in which no new file can be made with
            the owner of the old one.
        OutOfMemoryError

        Notes
        -----
        The new file takes the place of the old one, through links, and has its owner, group and
        mode. Other names of the old one (hard links) keep the old content; access control lists
        and extended attributes are not copied.

        A process that is killed meanwhile leaves a file ``.NAME.<16 hex digits>.tmp`` beside
        ``path``. The next save to that path removes it: it is locked (``fcntl.flock``) while it is
        written, so one that is not locked is abandoned. Where Python has no ``fcntl`` (Windows) it
        stays until someone removes it.
        """
        session.save(self, path, metadata=metadata)

    @classmethod
    @memory_for("the cache of the file")
    def load(cls, path: str | os.PathLike[str], mmap: bool = False) -> Self:
        """Read a cache from a file that :meth:`save` wrote, with either backend, on any machine.

        Parameters
        ----------
        path : str or path
        mmap : bool
            Map the file instead of reading it into memory: its pages are loaded and dropped by the
            system as it sees fit, and copied when written to. The file must not be changed in
            place while it is in use (``save`` to the same path is fine, it makes a new file).

        Returns
        -------
        KVCache

        Raises
        ------
        CorruptFileError
            The file is damaged, truncated, or something else; the message says what is wrong. So is
            one whose ``max_seq_len`` or sizes ask for more memory than can be reserved here.
        OutOfMemoryError
            There is no memory for the tokens of the file.
        MissingExtraError
            The package safetensors is not installed.
        FileNotFoundError, PermissionError, OSError
            As ``open`` raises them.
        """
        return load.load(cls, path, mmap=mmap)

    def _to_bytes(self) -> bytes:
        """The file that :meth:`save` would write."""
        return b"".join(session.pieces(self))

    @classmethod
    def _from_bytes(cls, data: Any, what: str) -> Self:
        """Read what :meth:`_to_bytes` gave; an error calls it `what`."""
        return load.load_bytes(cls, data, what)


def _held_range(layer: Any, start: int, stop: int) -> tuple[int, int]:
    """Positions start to stop of a cache as tokens of a layer, which may have dropped some."""
    dropped = layer.num_dropped
    return max(0, start - dropped), max(0, stop - dropped)


@memory_for("the cache of a pickle")
def _restore_cache(
    kind: str | type[CacheHistory],
    contents: CacheContents,
    max_seq_len: int | None,
    key_rule: KeyRule,
    metadata: Mapping[str, str],
    num_query_heads: int | None = None,  # earlier versions had none
) -> CacheHistory:
    """Rebuild a pickled cache, in the active backend unless it is of a user's own class."""
    cache: CacheHistory = registry.resolved(kind)._holding(
        contents, max_seq_len, key_rule, metadata
    )
    cache._num_query_heads = num_query_heads
    return cache
