"""`PrefixStore`: a folder of what was computed for sequences of tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from kvedge.cache.cache import KVCache
from kvedge.core import checks
from kvedge.core.checks import checked_path
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError
from kvedge.files.replacing import sync_folder
from kvedge.store import caches
from kvedge.store.entries import BLOCK, Entry, Known
from kvedge.store.files import About, content, open_mapped, write
from kvedge.store.index import DatabaseError, Index, Node

__all__ = ["PrefixStore"]

_Result = TypeVar("_Result")
_THREADS = 8  # that wait for the disk at a time: syncs of several files take little longer than one


class PrefixStore:
    """What was computed for sequences of tokens, found again by their longest common beginning.

    It lies in a folder, and outlives the process; any number of processes share it. What
    identifies a sequence is content only: the model, how its layers are stored, a namespace, the
    ids, which are compared in full.

    Parameters
    ----------
    folder : str or path
        Made where there is none. Who can write to it can change what models compute.
    max_bytes : int, optional
        The most that its files take. What was used longest ago goes, ends before beginnings.

    Raises
    ------
    InvalidArgumentError
    OSError, KvedgeError
        The folder cannot be made, or its file system has no locks or no shared memory.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (
            isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1
        ):
            raise InvalidArgumentError(
                f"max_bytes must be None or an integer from 1 on, not {checks.describe(max_bytes)}"
            )
        self.folder = os.path.abspath(checked_path(folder))
        self.max_bytes = max_bytes
        self._index = Index(self.folder)
        self._index.open()
        self._checked: set[tuple[str, int, int, int]] = set()  # files whose digest is right
        if max_bytes is not None:
            self.prune(max_bytes)

    def __repr__(self) -> str:
        limit = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"PrefixStore({self.folder!r}{limit})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.max_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixStore:
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the index."""
        with self._index.reading() as db:
            return self._index.total(db)

    # ---- finding ---------------------------------------------------------------------------------

    def find(self, identity: str, ids: Sequence[int] | np.ndarray) -> Known:
        """What is known of the beginning of a sequence.

        Parameters
        ----------
        identity : str
            All that decides what is computed for ids.
        ids : integers (tokens,)

        Raises
        ------
        InvalidArgumentError
        """
        whole = _as_bytes(ids)

        def search() -> Known:
            with self._index.reading() as db:
                return self._find(db, identity, whole)

        return self._mended(search)

    def _mended(self, call: Callable[[], _Result]) -> _Result:
        """What a call gives; again, if the index was damaged or the folder gone."""
        try:
            return call()
        except DatabaseError:
            self._index.open(is_damaged=True)
        except KvedgeError as error:
            if isinstance(error, InvalidArgumentError):
                raise
            self._index.open()
        return call()

    def _find(self, db: Any, identity: str, ids: bytes) -> Known:
        best = Known([], [])
        waiting: list[list[Node]] = [[]]
        while waiting:  # keys that were stored in other ways branch, else there is one path
            path = waiting.pop()
            last = path[-1] if path else None
            at = 4 * last.stop if last else 0
            more = self._index.children(db, last, "block", identity, ids[at : at + 4 * BLOCK])
            waiting += [[*path, node] for node in more]
            if not more:
                known = self._along(db, path, identity, ids)
                if _reach(known) > _reach(best):
                    best = known
        return best

    def _along(self, db: Any, path: list[Node], identity: str, ids: bytes) -> Known:
        """A path with the checkpoints beside it, and what fits the longest behind it."""
        checkpoints = []
        partial, shared = None, path[-1].stop if path else 0
        for before in (None, *path):
            for node in self._index.children(db, before, "checkpoint", identity):
                is_same = not path or node.variant == path[0].variant
                if is_same and ids.startswith(node.ids, 4 * node.start):
                    checkpoints.append(node)
        last = path[-1] if path else None
        for kind in ("block", "checkpoint"):
            for node in self._index.children(db, last, kind, identity):
                fits = node.start + _common(node.ids, ids[4 * node.start :])
                if fits > shared:
                    partial, shared = node, fits
        return Known(path, sorted(checkpoints, key=lambda node: node.stop), partial, shared)

    def read(self, nodes: Sequence[Node]) -> list[dict[str, np.ndarray]] | None:
        """The arrays of nodes that :meth:`find` gave, each behind the one before it, mapped.

        None: one of them was removed meanwhile, or is damaged; it is known no longer.

        Raises
        ------
        OSError
            A file cannot be read, or no more files can be open: nothing is removed.
        """
        with ThreadPoolExecutor(_THREADS) as pool:  # digests take longest
            parents = ["", *(node.name for node in nodes[:-1])]
            mapped = pool.map(self._mapped, nodes, parents)
        found = []
        for node, arrays in zip(nodes, mapped, strict=True):
            if arrays is None:
                self._index.forget(node)
                return None
            found.append(arrays)
        return found

    def _mapped(self, node: Node, parent: str) -> dict[str, np.ndarray] | None:
        path = self._index.path(node.name)
        try:
            status = os.stat(path)
            key = (node.name, status.st_ino, status.st_mtime_ns, status.st_size)
            arrays = open_mapped(path, node.about(parent), is_known=key in self._checked)
        except (FileNotFoundError, CorruptFileError):
            return None
        self._checked.add(key)
        return arrays

    def forget(self, node: Node) -> None:
        """Remove a node, and all behind it."""
        self._index.forget(node)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Note that what :meth:`read` gave was of use."""
        with self._index.writing() as db:
            self._index.touch(db, nodes, hits=1)

    # ---- storing ---------------------------------------------------------------------------------

    def put(
        self,
        identity: str,
        ids: Sequence[int] | np.ndarray,
        entries: Iterable[Entry],
        *,
        variant: str = "",
    ) -> int:
        """Store what is not there yet of a sequence.

        Parameters
        ----------
        identity : str
        ids : integers (tokens,)
        entries : iterable of Entry
            Blocks from the first one on, each of BLOCK tokens, and checkpoints, each at most BLOCK
            tokens behind the end of a block.
        variant : str
            How keys are stored, where the first tokens of a sequence decide it: blocks follow
            blocks of the same one alone.

        Returns
        -------
        int
            Entries that were written.

        Raises
        ------
        InvalidArgumentError
        OSError
            The disk is full, or the folder is gone. What was written stays.
        """
        whole, wanted = _as_bytes(ids), list(entries)
        return self._mended(lambda: self._put(identity, whole, wanted, variant))

    def _put(self, identity: str, ids: bytes, entries: Iterable[Entry], variant: str) -> int:
        blocks: dict[int, Node] = {}  # by their ends
        kept: list[Node] = []
        files: list[tuple[Node, Future[None]]] = []
        with self._index.writing() as db:
            # While files are synced, the next ones are prepared.
            with ThreadPoolExecutor(_THREADS) as pool:
                for entry in entries:
                    self._check(entry, len(ids) // 4)
                    before = blocks.get(entry.start)
                    if entry.start and before is None:
                        break  # there was no room for it
                    parent, own_identity = (before.id, "") if before else (0, identity)
                    about = About(
                        own_identity,
                        variant,
                        before.name if before else "",
                        entry.kind,
                        entry.start,
                        ids[4 * entry.start : 4 * entry.stop],
                    )
                    same = self._index.children(db, before, entry.kind, identity, about.ids)
                    there = (n for n in same if n.variant == variant and self._is_there(n))
                    node = next(there, None)
                    if node is None:
                        file, ours = content(about, entry.arrays()), [n.id for n in kept]
                        if self.max_bytes is not None and not self._index.make_room(
                            db, file.nbytes, self.max_bytes, ours
                        ):
                            break
                        if len(files) >= _THREADS and files[-_THREADS][1].exception():
                            break  # this also bounds the arrays that wait
                        db.execute("DELETE FROM node WHERE name = ?", (file.name,))  # it was lost
                        node = self._index.add(db, parent, about, file.name, file.nbytes)
                        files.append((node, pool.submit(write, self.folder, file)))
                    kept.append(node)
                    if entry.kind == "block":
                        blocks[entry.stop] = node
            errors = [error for _, future in files if (error := future.exception()) is not None]
            for error in errors:
                if not isinstance(error, OSError):
                    raise error
            lost = [(node.id,) for node, future in files if future.exception() is not None]
            db.executemany("DELETE FROM node WHERE id = ?", lost)
            if lost:
                self._index.drop_orphans(db)
            if files:
                sync_folder(self.folder)
            self._index.touch(db, kept)
        if errors:
            raise errors[0]
        return len(files)

    def _is_there(self, node: Node) -> bool:
        return os.path.exists(self._index.path(node.name))

    @staticmethod
    def _check(entry: Entry, length: int) -> None:
        is_block = entry.kind == "block" and entry.stop - entry.start == BLOCK
        is_checkpoint = entry.kind == "checkpoint" and 0 <= entry.stop - entry.start <= BLOCK
        if entry.start % BLOCK or not (is_block or is_checkpoint) or entry.stop > length:
            raise InvalidArgumentError(
                f"an entry is a block of {BLOCK} tokens or a checkpoint at most so many behind "
                f"one, of {length} tokens, not {entry.kind} {entry.start} to {entry.stop}"
            )

    # ---- caches ------------------------------------------------------------------------------

    def save(self, cache: KVCache, token_ids: Any, *, model: str, namespace: str = "") -> int:
        """Store what a cache holds.

        Parameters
        ----------
        cache : kvedge.KVCache
        token_ids : integers (tokens,)
            The ids of all its tokens.
        model : str
            Which model computed them, as a digest of its weights.
        namespace : str
            What else decides what tokens are: a tenant, an adapter, an image.

        Returns
        -------
        int
            Blocks and checkpoints that were new; 0 too where tokens were evicted or shifted, or
            are fewer than an automatic key scale needs.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, LayersOutOfStepError
            A cache with states or pending tokens, or an index whose ratio does not divide 256;
            ids of another number.
        OSError
        """
        return caches.save(self, cache, token_ids, model, namespace)

    def load(self, cache: KVCache, token_ids: Any, *, model: str, namespace: str = "") -> int:
        """Let an empty cache hold what is known of a sequence; as :meth:`save` has stored it.

        Give all ids but the last, where its logits are wanted.

        Returns
        -------
        int
            The tokens that the cache holds.

        Raises
        ------
        InvalidArgumentError
            The cache is not empty, or has states, or such an index.
        OSError
            A file cannot be read, or no more files can be open.
        """
        return caches.load(self, cache, token_ids, model, namespace)

    # ---- looking after it ------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """All blocks and checkpoints, in no order."""
        with self._index.reading() as db:
            return self._index.select(db)

    def prune(self, max_bytes: int) -> int:
        """Remove what was used longest ago until files take at most so many bytes.

        Returns
        -------
        int
            The bytes that they take.
        """
        with self._index.writing() as db:
            self._index.make_room(db, 0, max_bytes)
            return self._index.total(db)

    def verify(self) -> list[str]:
        """Compute the digest of every file; what is damaged is removed, with all behind it.

        Returns
        -------
        list of str
            The names of those files.

        Raises
        ------
        OSError
            A file cannot be read: it is not removed.
        """
        self._checked.clear()
        self._index.mend()
        damaged = []
        nodes = {node.id: node for node in self.nodes()}
        for node in nodes.values():
            parent = nodes.get(node.parent)
            about = node.about(parent.name if parent else "")
            try:
                open_mapped(self._index.path(node.name), about, is_known=False)
            except FileNotFoundError:
                continue
            except CorruptFileError:
                damaged.append(node.name)
                self._index.forget(node)
        return damaged


def _opened(folder: str, max_bytes: int | None) -> PrefixStore:
    return PrefixStore(folder, max_bytes=max_bytes)


def _reach(known: Known) -> int:
    """Positions of a sequence that it can be taken up at, at most."""
    return max([known.shared, *(node.stop for node in known.checkpoints)])


def _as_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"ids must be integers (tokens,), not {array.dtype} {array.shape}"
        )
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise InvalidArgumentError("ids must be from 0 to 2**31 - 1")
    return array.astype("<i4").tobytes()


def _common(some: bytes, other: bytes) -> int:
    """Ids that both begin with."""
    a, b = (np.frombuffer(ids, "<i4") for ids in (some, other[: len(some)]))
    differ = np.flatnonzero(a[: len(b)] != b)
    return int(differ[0]) if len(differ) else len(b)
