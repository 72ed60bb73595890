"""What a cache held at one moment: attached to the cache at no cost, or a copy, detached."""

from __future__ import annotations

import weakref

import numpy as np

from kvedge.cache.state import CacheState, layer_names
from kvedge.core import checks
from kvedge.core.index_keys import IndexMoment
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import memory_for
from kvedge.errors import InvalidArgumentError, LayersOutOfStepError, StaleSnapshotError
from kvedge.files import load, session
from kvedge.files.contents import CacheContents, CacheFormat
from kvedge.key_index import go_to
from kvedge.layer.room import keeps
from kvedge.states.layer import StateLayer

__all__ = ["KvCacheSnapshot", "restore", "snapshot"]


class KvCacheSnapshot:
    """A moment of a :class:`kvedge.KVCache`, made by its ``snapshot()``.

    As made it is attached to its cache: it copies nothing but states, and ``restore`` accepts it as
    long as its tokens have not been overwritten. ``detach()`` gives one that holds the stored bytes
    themselves: it can always be restored, into any cache of the same format.

    ``keys`` and ``values`` are decoded each time they are asked for. A snapshot is written and read
    with ``to_bytes()`` and ``from_bytes()``, which trusts nothing that it reads; or by ``pickle``,
    a detached one. Of an attached one all of these give what ``detach()`` would, so a stale one
    raises StaleSnapshotError; ``pickle`` refuses attached ones, which are of one cache alone.

    Like a number it never changes, so ``copy.copy`` and ``copy.deepcopy`` return it as it is.
    """

    __slots__ = ("_contents", "_epoch", "_length", "_moments", "_pending", "_state", "_states")

    _state: weakref.ref[CacheState] | None  # the cache's; None once detached
    _contents: CacheContents | None  # None while attached
    _epoch: int  # of the cache, when the snapshot was taken
    _length: int
    _pending: tuple[int, ...]  # layers that held tokens beyond the length when it was taken
    _states: tuple[StateLayer, ...]  # copies, while attached
    _moments: tuple[IndexMoment, ...]  # of indexes, while attached

    def __init__(self) -> None:
        raise InvalidArgumentError("a KvCacheSnapshot is made by KVCache.snapshot()")

    @classmethod
    def _holding(cls, contents: CacheContents) -> KvCacheSnapshot:
        self = cls.__new__(cls)
        self._state = None
        self._contents = contents
        self._epoch = 0
        self._length = contents.length
        self._pending = ()
        self._states, self._moments = (), ()
        return self

    @property
    def length(self) -> int:
        """Tokens that the cache held."""
        return self._length

    @property
    def seq_len(self) -> int:
        """Tokens that the cache held, as :attr:`length`."""
        return self._length

    @property
    def keys(self) -> tuple[np.ndarray, ...]:
        """Keys of each layer that has such, float32 (tokens, num_kv_heads, head_dim); copies.

        tokens are :attr:`length`, less those that the layer's window has dropped.

        Raises
        ------
        StaleSnapshotError
            As of :meth:`detach`.
        OutOfMemoryError
        """
        return self._decoded("keys")

    @property
    def values(self) -> tuple[np.ndarray, ...]:
        """Values of each layer, float32 (tokens, num_kv_heads, value_head_dim); as :attr:`keys`."""
        return self._decoded("values")

    @memory_for("the decoded tokens of a snapshot")
    def _decoded(self, side: str) -> tuple[np.ndarray, ...]:
        contents = self._contents
        if contents is None:
            contents = self._copied(alone=False)
        decoded = []
        for config, layer in zip(contents.format.layers, contents.layers, strict=True):
            state = _holding(CacheContents(CacheFormat((config,)), contents.length, (layer,)))
            decoded.append(getattr(state.layers[0], side)())
        return tuple(decoded)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True  # also at length 0: `if snapshot` asks whether there is one

    @property
    def is_detached(self) -> bool:
        """Whether it holds the stored bytes itself."""
        return self._contents is not None

    @property
    def is_stale(self) -> bool:
        """Whether it can no longer be restored: its tokens were overwritten, or the cache is gone.

        Or a layer with a window has dropped tokens that it needs.

        A detached snapshot is never stale.
        """
        if self._state is None:
            return False
        state = self._state()
        if state is None:
            return True
        if state.has_windows and not all(keeps(store, self._length) for store in state.stores):
            return True
        return state.overwrites.reach_below(self._length, since=self._epoch)

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds itself: attached 0, or those of its copies of states."""
        if self._contents is None:
            raw = sum(moment.raw.nbytes for moment in self._moments)
            return raw + sum(state.nbytes for state in self._states)
        return self._contents.nbytes

    def detach(self) -> KvCacheSnapshot:
        """Copy the quantized bytes, so that the snapshot no longer depends on its cache.

        Returns
        -------
        KvCacheSnapshot
            A detached snapshot; itself if it is one already.

        Raises
        ------
        StaleSnapshotError
            If the tokens have been overwritten since, or the cache no longer exists.
        LayersOutOfStepError
            If layers held pending tokens when the snapshot was taken, which the copy would lose;
            the message names them.
        OutOfMemoryError
        """
        if self._contents is not None:
            return self
        return KvCacheSnapshot._holding(self._copied())

    @memory_for("the bytes of a snapshot")
    def _copied(self, *, alone: bool = True) -> CacheContents:
        """Copy what an attached one stands for, which may lie above the cache's present length.

        `alone`: pending tokens, which are not in it, would be lost.
        """
        state = None if self._state is None else self._state()
        if state is None:
            raise StaleSnapshotError(
                f"the cache of this snapshot of {self._length} tokens no longer exists: "
                "detach() while it does"
            )
        self._refuse_stale()
        if alone and self._pending:
            verb = "was" if len(self._pending) == 1 else "were"
            raise LayersOutOfStepError(
                f"detach() would lose tokens: {layer_names(list(self._pending))} {verb} "
                f"beyond position {self._length} when this snapshot was taken: advance() over them "
                "or truncate() first, and take another"
            )
        contents = state.contents(self._length, states=self._states, moments=self._moments)
        self._refuse_stale()  # nothing was overwritten meanwhile
        return contents

    def _refuse_stale(self) -> None:
        if self.is_stale:
            raise StaleSnapshotError(
                f"tokens below position {self._length} have been overwritten, or dropped from "
                "a window, since this snapshot was taken: detach() it before that"
            )

    @memory_for("the bytes of a snapshot")
    def to_bytes(self) -> bytes:
        """Return the tokens as bytes, those of the file that :meth:`kvedge.KVCache.save` writes.

        Raises
        ------
        StaleSnapshotError, LayersOutOfStepError, OutOfMemoryError
            As of :meth:`detach`.
        """
        contents = self.detach()._contents
        assert contents is not None
        return b"".join(session.file_pieces(_holding(contents)))

    @classmethod
    @memory_for("the bytes of a snapshot")
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KvCacheSnapshot:
        """Read what :meth:`to_bytes` gave.

        Parameters
        ----------
        data : bytes-like
            Also the content of a file of :meth:`kvedge.KVCache.save`.

        Returns
        -------
        KvCacheSnapshot
            A detached one.

        Raises
        ------
        CorruptFileError
            It is damaged, cut short or something else.
        InvalidArgumentError, OutOfMemoryError
        """
        state = load.load_bytes(CacheState.empty, data, "the bytes of a snapshot")
        return cls._holding(state.contents(copy=False))

    def __copy__(self) -> KvCacheSnapshot:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> KvCacheSnapshot:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self._contents is None:
            raise InvalidArgumentError(
                "a snapshot attached to its cache cannot be pickled: pickle its detach(), or take "
                "its to_bytes()"
            )
        return (KvCacheSnapshot._holding, (self._contents,))

    def __repr__(self) -> str:
        if self._contents is not None:
            what = f"detached, {self._contents.format}"
        else:
            what = "stale" if self.is_stale else "attached"
        return f"<KvCacheSnapshot of {self._length} tokens ({what})>"


def snapshot(state: CacheState) -> KvCacheSnapshot:
    """Take a snapshot of a cache, attached to it."""
    ahead = [i for i in state.ahead(state.length) if state.store_at[i] is None]
    if ahead:
        raise LayersOutOfStepError(
            f"snapshot() is of position {state.length}, and {layer_names(ahead)} hold states that "
            "have gone on: take it before they do, or advance() over their tokens",
            layer=ahead[0],
        )
    taken = KvCacheSnapshot.__new__(KvCacheSnapshot)
    taken._length = state.length  # first: what is overwritten after that lies above
    taken._states = tuple(layer.copy() for layer in state.states)
    taken._moments = tuple(state.moments(taken._length))
    taken._epoch = state.overwrites.epoch
    taken._pending = tuple(state.ahead(taken._length))
    taken._state = weakref.ref(state)
    taken._contents = None
    return taken


def restore(state: CacheState, snapshot: object) -> None:
    """Return to a snapshot of this cache, or hold what a detached one does."""
    if not isinstance(snapshot, KvCacheSnapshot):
        raise InvalidArgumentError(
            f"snapshot must be a KvCacheSnapshot, not {checks.describe(snapshot)}"
        )
    if snapshot._contents is not None:
        state.replace(snapshot._contents)
        return
    if snapshot._state is None or snapshot._state() is not state:
        raise InvalidArgumentError(
            "this snapshot is attached to another cache: only its detach() can be restored here"
        )
    snapshot._refuse_stale()
    state.set_length(snapshot._length)
    state.put_states(snapshot._states)
    for (_, index), moment in zip(sorted(state.indexes.items()), snapshot._moments, strict=True):
        go_to(index, moment)


def _holding(contents: CacheContents) -> CacheState:
    """A cache of the active backend that holds them."""
    return CacheState.holding(contents, None, KeyRule(), {})
