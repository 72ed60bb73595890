"""A file that takes another's place whole: written beside it, synced, renamed.

After a crash at any moment there is the old file or the new one. What a crash may leave behind is
the temporary file, ``.NAME.<16 hex digits>.tmp``. Its writer holds it locked (flock) until it is
renamed, and the system drops a lock with its process: so one that can be locked is abandoned, and
the next writer of NAME in that folder removes it. On a system without flock nothing is removed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["locked", "remove_abandoned", "replacing"]

_NAME_CHARS = 100  # of the target's name: file systems allow 255 bytes


@contextmanager
def replacing(target: str) -> Iterator[BinaryIO]:
    """Give a new file open for writing, which takes the place of ``target`` if all goes well.

    Raises
    ------
    OSError
        What the system says; it names ``target`` where it is about writing.
    """
    folder, name = os.path.split(target)
    prefix = f".{name[:_NAME_CHARS]}."
    remove_abandoned(folder, re.escape(name[:_NAME_CHARS]))
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        mode = None  # the one that any new file gets
    temporary, descriptor = _locked_file(folder, prefix, 0o666 if mode is None else 0o600)
    try:
        with _naming(target), open(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(descriptor)
            if os.name == "posix":  # renamed while it is locked
                os.replace(temporary, target)
        if os.name != "posix":  # an open file cannot be renamed
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if os.name == "posix":
        # The rename has happened and cannot be taken back, so a file system that does not sync
        # folders is no failure of the call.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def _naming(target: str) -> Iterator[None]:
    """Add the target's name to errors that come without one, as those of write() do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot write: {error.strerror}", target) from error


def _locked_file(folder: str, prefix: str, mode: int) -> tuple[str, int]:
    """Make a new file; return its path and a descriptor that holds it locked."""
    while True:
        path = os.path.join(folder, f"{prefix}{secrets.token_hex(8)}.tmp")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags, mode)
        # Before it is locked another writer may take it for abandoned, and then a new one is made.
        if fcntl is None or (_lock(descriptor) is not False and _is_at(descriptor, path)):
            return path, descriptor
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(path)


def remove_abandoned(folder: str, names: str) -> None:
    """Remove what writers left behind when they were killed.

    Only regular files of this user, and only those that nobody holds locked. A failure of any kind
    leaves them where they are.

    Parameters
    ----------
    folder : str
    names : str
        A regular expression for the names that were to be written.
    """
    if fcntl is None:
        return
    pattern = re.compile(rf"\.(?:{names})\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):
        for name in os.listdir(folder or os.curdir):
            if pattern.fullmatch(name):
                with suppress(OSError):
                    _remove_if_abandoned(os.path.join(folder, name))


@contextmanager
def locked(folder: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a folder locked against others that ask for it here; wait for them.

    Readers share it. On a file system or a system without such locks it is not locked.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_abandoned(path: str) -> None:
    status = os.lstat(path)  # before it is opened, which a pipe would wait for
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        return
    # For writing: NFS makes an flock a lock of another kind, which asks for it.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(descriptor) and _is_at(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock a file: True if it is locked now, False if somebody holds it, None if none can."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nobody can take one for abandoned
        return None
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
