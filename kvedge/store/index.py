"""The index of a prefix store: a tree of files in SQLite, which several processes share.

Nodes are files. A block's parent is the block before it; a checkpoint's the last block that ends no
later. Readers never wait; writers do for each other. Files are written before they stand in the
index, and go after they have gone from it or with it: so a process that ends anywhere leaves a file
that no row names, or a row whose file is missing, and :meth:`Index.mend` makes both good.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from kvedge.errors import CorruptFileError, KvedgeError
from kvedge.store.files import NAME, About, fcntl, is_removable, read_about

sqlite3: Any
try:
    import sqlite3
except ImportError:  # a Python that was built without it
    sqlite3 = None

__all__ = ["INDEX", "DatabaseError", "Index", "Node"]

DatabaseError: Any = KvedgeError if sqlite3 is None else sqlite3.DatabaseError

INDEX = "index-1.sqlite"  # of another name where a version of it changes
_NOT_THERE = (errno.ENOLCK, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP)
_WAIT = 60.0  # seconds for another writer
_MOST = 1 << 62  # what a damaged index may say of uses
_SCHEMA = """
CREATE TABLE IF NOT EXISTS node (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, kind TEXT NOT NULL, identity TEXT NOT NULL,
    variant TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL, name TEXT NOT NULL UNIQUE,
    nbytes INTEGER NOT NULL, used INTEGER NOT NULL, hits INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS child ON node (parent, kind, ids);
CREATE INDEX IF NOT EXISTS age ON node (used);
"""
_COLUMNS = "id, parent, kind, identity, variant, start, ids, name, nbytes, used, hits"


class Node(NamedTuple):
    """A row of the index."""

    id: int
    parent: int  # 0: none
    kind: str
    identity: str
    variant: str
    start: int
    ids: bytes
    name: str  # of the file: its digest
    nbytes: int
    used: int  # greater: later
    hits: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids) // 4

    def about(self, parent: str) -> About:
        """What the file has to say of itself, behind the file of a name."""
        return About(self.identity, self.variant, parent, self.kind, self.start, self.ids)


_TYPES = (int, int, str, str, str, int, bytes, str, int, int, int)  # of a row


# What SQLite says where the index is as it should be.
_NO_DAMAGE = ("locked", "unable to open", "full", "disk I/O", "busy")


class Index:
    """The rows of a folder; connections last for one call, so threads and forks share nothing."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, name: str) -> str:
        """The file of a node."""
        return os.path.join(self.folder, f"{name}.safetensors")

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A connection, which sees the index as it is at its first look."""
        path = os.path.join(self.folder, INDEX)
        db = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = NORMAL")
            yield db
        except sqlite3.OperationalError as error:
            is_damaged = not any(words in str(error) for words in _NO_DAMAGE)
            if is_damaged and os.access(path, os.W_OK):  # else it is read-only for this user
                raise
            raise KvedgeError(f"{self.folder}: its index cannot be used: {error}") from error
        finally:
            db.close()

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """The same; nobody else writes rows or files until the block ends."""
        with self.reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    def open(self, *, is_damaged: bool = False) -> None:
        """Make the folder and the index where there is none; a damaged one is made again.

        Raises
        ------
        OSError, KvedgeError
        """
        if sqlite3 is None:
            raise KvedgeError("a PrefixStore needs sqlite3, and this Python was built without it")
        os.makedirs(self.folder, exist_ok=True)
        if is_damaged:
            self._drop()
        try:
            self._open()
            self.mend()
        except sqlite3.DatabaseError:
            self._drop()
            self._open()
            self.mend()

    def _drop(self) -> None:
        """Remove a damaged index; :meth:`mend` makes it again from the files."""
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, INDEX + suffix))

    def _check_system(self) -> None:
        """Refuse a file system without locks or shared memory: SQLite says less."""
        if fcntl is None:
            return
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(1)
                mmap.mmap(file.fileno(), 1).close()
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise self._no_file_system() from error

    def _no_file_system(self) -> KvedgeError:
        return KvedgeError(
            f"{self.folder}: its file system has no shared memory or no locks, which an index "
            "needs: choose a folder on a local disk"
        )

    def _open(self) -> None:
        self._check_system()
        with self.reading() as db:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise self._no_file_system()
            if db.execute("PRAGMA user_version").fetchone() != (1,):
                db.executescript(_SCHEMA)
                db.execute("PRAGMA user_version = 1")
            self.select(db, "0")  # it has all columns
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")

    def mend(self) -> None:
        """Take in files that no row names, and drop what misses its file or its parent."""
        with self.writing() as db:
            there = {
                entry.name.partition(".")[0]: entry.stat().st_size
                for entry in os.scandir(self.folder)
                if NAME.fullmatch(entry.name)
            }
            rows = {row[0]: row[1] for row in db.execute("SELECT name, nbytes FROM node")}
            for name, nbytes in rows.items():
                if name not in there:
                    db.execute("DELETE FROM node WHERE name = ?", (name,))
                elif nbytes != there[name]:
                    db.execute("UPDATE node SET nbytes = ? WHERE name = ?", (there[name], name))
            found = []
            for name in there.keys() - rows.keys():
                try:
                    found.append((*read_about(self.path(name)), name))
                except CorruptFileError:
                    self.unlink(name)
                except OSError:
                    continue
            # Blocks first, each after the block before it.
            for about, nbytes, name in sorted(
                found, key=lambda item: (item[0].kind, item[0].start)
            ):
                parent = self._id_of(db, about.parent)
                if parent is None:
                    self.unlink(name)
                else:
                    self.add(db, parent, about, name, nbytes)
            self.drop_orphans(db)
            self._remove_temporary()

    def _remove_temporary(self) -> None:
        """Remove what writers left behind: none is at work, as this process holds their lock."""
        for name in os.listdir(self.folder):
            if name.startswith(".") and name.endswith(".tmp") and ".safetensors" in name:
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, name))

    @staticmethod
    def _id_of(db: Any, name: str) -> int | None:
        if not name:
            return 0
        row = db.execute("SELECT id FROM node WHERE name = ? AND kind = 'block'", (name,))
        found = row.fetchone()
        return None if found is None else int(found[0])

    def drop_orphans(self, db: Any) -> None:
        """Drop nodes whose parent has gone, or is no older than they, and their files."""
        while True:
            orphans = db.execute(
                "SELECT id, name FROM node WHERE parent != 0 "
                "AND (parent >= id OR parent NOT IN (SELECT id FROM node))"
            ).fetchall()
            if not orphans:
                return
            for number, name in orphans:
                db.execute("DELETE FROM node WHERE id = ?", (number,))
                self.unlink(name)

    def unlink(self, name: str) -> None:
        """Remove a file; one that is gone already, or cannot be, is left to :meth:`mend`."""
        with suppress(OSError):
            os.unlink(self.path(name))

    # ---- rows ------------------------------------------------------------------------------------

    def add(self, db: Any, parent: int, about: About, name: str, nbytes: int) -> Node:
        """A row for a file."""
        row = (parent, about.kind, about.identity, about.variant, about.start, about.ids, name)
        columns = _COLUMNS.removeprefix("id, ")
        used = self._next_use(db)
        cursor = db.execute(
            f"INSERT INTO node ({columns}) VALUES ({', '.join('?' * 10)})", (*row, nbytes, used, 0)
        )
        assert cursor.lastrowid is not None
        return Node(cursor.lastrowid, *row, nbytes, used, 0)

    @staticmethod
    def _next_use(db: Any) -> int:
        (used,) = db.execute("SELECT max(CAST(used AS INTEGER)) FROM node").fetchone()
        return min(int(used or 0) + 1, _MOST)

    def touch(self, db: Any, nodes: Sequence[Node], *, hits: int = 0) -> None:
        """Note that nodes were used."""
        used = self._next_use(db)
        db.executemany(
            "UPDATE node SET used = ?, hits = min(hits + ?, ?) WHERE id = ?",
            [(used, hits, _MOST, node.id) for node in nodes],
        )

    def children(
        self,
        db: Any,
        before: Node | None,
        kind: str,
        identity: str,
        ids: bytes | None = None,
    ) -> list[Node]:
        """Nodes behind another, or the first ones of an identity, with these ids; None: any."""
        parent, start = (0, 0) if before is None else (before.id, before.stop)
        own = "" if start else identity
        where, values = "parent = ? AND kind = ? AND identity = ?", [parent, kind, own]
        if ids is not None:
            where, values = f"{where} AND ids = ?", [*values, ids]
        found = self.select(db, where, values)
        return [n for n in found if n.start == start and (ids is None or n.ids == ids)]

    @staticmethod
    def select(db: Any, where: str = "1", values: Sequence[object] = ()) -> list[Node]:
        """Nodes by a condition in SQL."""
        rows = db.execute(f"SELECT {_COLUMNS} FROM node WHERE {where}", values)
        found = [Node(*row) for row in rows]
        # All others are damaged.
        return [n for n in found if tuple(map(type, n)) == _TYPES and len(n.ids) % 4 == 0]

    def forget(self, node: Node) -> None:
        """Drop a node and all behind it, and their files."""
        with self.writing() as db:
            db.execute("DELETE FROM node WHERE id = ?", (node.id,))
            self.unlink(node.name)
            self.drop_orphans(db)

    @staticmethod
    def total(db: Any) -> int:
        """Bytes of all files."""
        (nbytes,) = db.execute("SELECT sum(CAST(nbytes AS INTEGER)) FROM node").fetchone()
        return int(nbytes or 0)

    def make_room(self, db: Any, nbytes: int, max_bytes: int, kept: Sequence[int] = ()) -> bool:
        """Remove what was used longest ago until so many bytes fit; children before parents.

        Nothing goes that a process has mapped, or that is `kept`. False: not so many fit.
        """
        total, passed = self.total(db), {*kept}
        while total + nbytes > max_bytes:
            skip = ", ".join(map(str, passed)) or "0"
            row = db.execute(
                "SELECT id, name, nbytes FROM node AS n WHERE NOT EXISTS "
                f"(SELECT 1 FROM node WHERE parent = n.id) AND id NOT IN ({skip}) "
                "ORDER BY used, start DESC LIMIT 1"
            ).fetchone()
            if row is None:
                return False
            number, name, size = row
            if not is_removable(self.path(name)):
                passed.add(number)
                continue
            db.execute("DELETE FROM node WHERE id = ?", (number,))
            self.unlink(name)
            total -= size
        return True
