"""A file that takes another's place whole: written beside it, synced, renamed.

After a crash at any moment there is the old file or the new one. What a crash may leave behind is
the temporary file, ``.NAME.<16 hex digits>.tmp``. Its writer holds it locked (flock) until it is
renamed, and the system drops a lock with its process: so one that can be locked is abandoned, and
the next writer of NAME in that folder removes it. On a system without flock nothing is removed.

Nothing is written in any other way. What cannot be replaced so is refused by :func:`check_target`,
which callers ask before they compute: what is no regular file (a pipe, a device, the standard
output under its name in /dev), a file that is a mount point of its own, one that this process may
not write or could not give back to its owner. The new file has the owner, the group and the mode of
the old one; other names of the old one (hard links) keep the old content, and access control lists
and extended attributes are not copied.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kvedge.core.checks import checked_path

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["check_folder", "check_target", "locked", "remove_abandoned", "replacing", "sync_folder"]

_NAME_BYTES = 100  # of the target's name in the temporary one: file systems allow 143 to 255
_MOST_LINKS = 40  # in a row, as Linux follows
# Where a system keeps names of the open files of processes: /dev/stdout leads there.
_OPEN_FILES = re.compile(r"/dev/fd|/proc/\d+(?:/task/\d+)?/fd")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    like: str | None = None,
    syncs_folder: bool = True,
    removes_abandoned: bool = True,
) -> Iterator[BinaryIO]:
    """Give a new file open for writing, which takes the place of ``path`` if all goes well.

    Parameters
    ----------
    path : str or path-like
        Through links, which stay.
    like : str, optional
        A file, perhaps, whose owner and mode the new one gets where there is none at ``path``.
    syncs_folder : bool
        False: the caller does it, once for many files, by :func:`sync_folder`.
    removes_abandoned : bool
        False: the folder, which may have many files, is not listed for temporary files of killed
        writers; the caller removes them at another time.

    Raises
    ------
    InvalidArgumentError
        It is no path.
    OSError
        What :func:`check_target` finds, before there is a file; or what the system says, which
        names the target where it is about writing.
    """
    target, old = _target(path)
    if old is None and like is not None:
        with suppress(FileNotFoundError):
            old = os.stat(like)
    temporary, descriptor = _temporary(target, old, removes_abandoned=removes_abandoned)
    try:
        with _naming(target, temporary), open(descriptor, "wb") as file:
            yield file
            file.flush()
            if old is not None:
                os.chmod(temporary, stat.S_IMODE(old.st_mode))
            os.fsync(descriptor)
            if os.name == "posix":  # renamed while it is locked
                os.replace(temporary, target)
        if os.name != "posix":  # an open file cannot be renamed
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if syncs_folder:
        sync_folder(os.path.dirname(target))


def sync_folder(folder: str) -> None:
    """Let renames in a folder last.

    They have happened and cannot be taken back, so a file system that does not sync folders is no
    failure.
    """
    if os.name == "posix":
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_target(path: str | os.PathLike[str]) -> None:
    """Find out whether a file could take the place of ``path``; leave all as it is.

    Raises
    ------
    InvalidArgumentError
        It is no path.
    OSError
        It is no regular file, or a mount point of its own, or may not be written; no file can be
        made in its folder, or none with its owner and group. The message says which.
    """
    _drop(*_temporary(*_target(path)))


def check_folder(path: str | os.PathLike[str], *names: str) -> None:
    """Find out whether files can be written to a folder, which need not be there yet.

    Parameters
    ----------
    path : str or path-like
    *names : str
        Of files in it that are replaced.

    Raises
    ------
    InvalidArgumentError, OSError
        As of :func:`check_target`.
    """
    folder = checked_path(path)
    there = os.path.abspath(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    kind = stat.S_IFMT(os.stat(there).st_mode)
    if kind != stat.S_IFDIR:
        what = _KINDS.get(kind, "a file")
        raise OSError(errno.ENOTDIR, f"{there} is {what}, and no folder", folder)
    if os.path.lexists(folder):
        for name in names:
            check_target(os.path.join(folder, name))
    _drop(*_temporary(os.path.join(os.path.realpath(there), "folder"), None))


def _target(path: str | os.PathLike[str]) -> tuple[str, os.stat_result | None]:
    """The regular file that a path leads to, and its status if it is there."""
    text = checked_path(path)
    if os.path.basename(text) in ("", os.curdir, os.pardir):
        _refuse(text, errno.EISDIR, "it is the name of a folder")
    try:
        old = os.stat(text)
    except FileNotFoundError:
        return os.path.realpath(text), None
    if _is_open_file(text):
        _refuse(text, errno.EINVAL, "it is an open file of a process, which is not replaced")
    kind = stat.S_IFMT(old.st_mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        what = _KINDS.get(kind, "something else")
        _refuse(text, number, f"it is {what}, and only a regular file is replaced")
    target = os.path.realpath(text)
    if _is_mount_point(target):
        _refuse(text, errno.EBUSY, "it is a mount point, and is not replaced: mount its folder")
    # Who may not write a file has no right to replace it, even where the folder allows that; an
    # immutable one cannot be.
    flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
    try:
        os.close(os.open(target, flags))
    except OSError as error:
        _refuse(text, error.errno, _reason(error))
    return target, old


def _refuse(path: str, number: int | None, why: str) -> NoReturn:
    raise OSError(number, f"cannot be written: {why}", path)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _is_open_file(path: str) -> bool:
    """Whether a path goes through the name that an open file of a process has."""
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        if _OPEN_FILES.fullmatch(folder):
            return True
        link = os.path.join(folder, name)
        if not os.path.islink(link):
            return False
        path = os.path.join(folder, os.readlink(link))
    return False


def _is_mount_point(target: str) -> bool:
    """Whether a file is mounted by itself, as ``docker -v file:file`` does (Linux).

    Its device tells nothing: a bind mount has its file system's, and on overlayfs files have others
    than their folders.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return False
    points = (line.split(b" ", 5)[4] for line in mounts.splitlines() if line.count(b" ") > 4)
    escapes = re.compile(rb"\\([0-7]{3})")
    name = os.fsencode(target)
    return any(escapes.sub(lambda found: bytes([int(found[1], 8)]), p) == name for p in points)


@contextmanager
def _naming(target: str, temporary: str) -> Iterator[None]:
    """Let errors about the temporary file, and those without a name, name the target."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, temporary):
            raise
        raise OSError(error.errno, f"cannot be written: {_reason(error)}", target) from error


def _temporary(
    target: str, old: os.stat_result | None, *, removes_abandoned: bool = True
) -> tuple[str, int]:
    """Make a new file beside a target, of its owner; return its path and a descriptor, locked."""
    folder, name = os.path.split(target)
    name = os.fsencode(name)[:_NAME_BYTES].decode(sys.getfilesystemencoding(), "ignore")
    if removes_abandoned:
        remove_abandoned(folder, re.escape(name), None if old is None else old.st_uid)
    try:
        path, descriptor = _locked_file(folder, f".{name}.", 0o666 if old is None else 0o600)
    except OSError as error:
        if not os.path.isdir(folder):
            _refuse(target, error.errno, f"there is no folder {folder}")
        _refuse(target, error.errno, f"no new file can be made in {folder}: {_reason(error)}")
    try:
        new = os.fstat(descriptor)
        if old is not None and (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    except OSError as error:
        _drop(path, descriptor)
        assert old is not None
        owner = f"user {old.st_uid}, group {old.st_gid}"
        _refuse(target, error.errno, f"the new file cannot be given to {owner}: {_reason(error)}")
    return path, descriptor


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


def _drop(path: str, descriptor: int) -> None:
    """Remove a temporary file and close it; unlocked, another writer might have removed it."""
    if os.name == "posix":
        os.unlink(path)
        os.close(descriptor)
    else:  # an open file cannot be removed
        os.close(descriptor)
        os.unlink(path)


def remove_abandoned(folder: str, names: str, owner: int | None = None) -> None:
    """Remove what writers left behind when they were killed.

    Only regular files of this user or the owner, and only those that nobody holds locked. A failure
    of any kind leaves them where they are.

    Parameters
    ----------
    folder : str
    names : str
        A regular expression for the names that were to be written.
    owner : int, optional
        The user whom the file that was to be replaced belongs to.
    """
    if fcntl is None:
        return
    pattern = re.compile(rf"\.(?:{names})\.[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):
        for name in os.listdir(folder or os.curdir):
            if pattern.fullmatch(name):
                with suppress(OSError):
                    _remove_if_abandoned(os.path.join(folder, name), owner)


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


def _remove_if_abandoned(path: str, owner: int | None) -> None:
    status = os.lstat(path)  # before it is opened, which a pipe would wait for
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return
    if status.st_uid not in (os.geteuid(), owner):
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
