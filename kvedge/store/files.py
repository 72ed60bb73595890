"""Files of a prefix store: safetensors, written once, named by their digest, read mapped.

A file says all that it is: the digest of the file whose tokens come before its own, or, of the
first tokens, the identity of what computed them; its ids; the arrays. So nothing that an index says
of a file is trusted, and a lost index can be made again from the files.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from kvedge.files.header import (
    TYPES,
    Tensor,
    corrupt,
    digest,
    header,
    naming,
    number_of,
    read_header,
)
from kvedge.files.replacing import replacing
from kvedge.files.tensors import typed

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, which removes no file that is mapped
    fcntl = None

__all__ = [
    "NAME",
    "About",
    "Content",
    "content",
    "fcntl",
    "is_removable",
    "open_mapped",
    "read_about",
    "write",
]

NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_FORMAT, _VERSION = "kvedge.prefix", "1"
_FIELDS = {"format", "format_version", "identity", "variant", "parent", "kind", "start", "sha256"}
_IDS = "ids"
_MOST_TENSORS = 1 << 17


class About(NamedTuple):
    """What a file is, apart from its arrays."""

    identity: str  # who computed it, of a sequence's first file; else ""
    variant: str  # how keys are stored, where tokens decide that
    parent: str  # digest of the file before it; "" of the first
    kind: str  # "block" or "checkpoint"
    start: int  # position of the first id
    ids: bytes  # int32, little-endian

    @property
    def stop(self) -> int:
        """Position after the last id."""
        return self.start + len(self.ids) // 4


def _fields(about: About) -> dict[str, str]:
    own = about._asdict() | {"format": _FORMAT, "format_version": _VERSION}
    return {name: str(value) for name, value in own.items() if name != _IDS}


class Content(NamedTuple):
    """The bytes of a file that is to be written."""

    name: str  # its digest
    pieces: list[bytes | memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(len(piece) for piece in self.pieces)


def content(about: About, arrays: Mapping[str, np.ndarray]) -> Content:
    """A file as :func:`write` takes it; arrays are not copied."""
    ids = np.frombuffer(about.ids, "<i4").astype(np.int32)
    tensors = typed({_IDS: ids, **arrays})
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    sha256 = digest(_fields(about), tensors)
    head = header({**_fields(about), "sha256": sha256}, {name: tensors[name] for name in order})
    arrays_of = (tensors[name][1].reshape(-1).view(np.uint8).data for name in order)
    return Content(sha256, [head, *arrays_of])


def write(folder: str, content: Content) -> None:
    """Write a file, synced, but for its name in the folder: that is for the caller to sync.

    What killed writers left behind is removed where a store is opened (:meth:`Index.mend`).
    """
    path = os.path.join(folder, f"{content.name}.safetensors")
    with replacing(path, syncs_folder=False, removes_abandoned=False) as file:
        file.writelines(content.pieces)


def _open(path: str) -> BinaryIO:
    """Open a file that nobody removes while it is open, or mapped."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    file = open(os.open(path, flags), "rb")  # noqa: SIM115
    if fcntl is not None:
        with suppress(OSError):  # a file system without such locks; or it is being removed
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _about(file: BinaryIO) -> tuple[About, dict[str, Tensor], dict[str, str]]:
    fields, tensors = read_header(file, lambda fields: _MOST_TENSORS)
    if (fields.get("format"), fields.get("format_version")) != (_FORMAT, _VERSION):
        corrupt("it is no file of a prefix store that this kvedge reads")
    if fields.keys() != _FIELDS or fields["kind"] not in ("block", "checkpoint"):
        corrupt("its metadata is not as kvedge writes it")
    ids = tensors.pop(_IDS, None)
    if ids is None or ids.dtype != "I32" or len(ids.shape) != 1:
        corrupt("it has no ids")
    file.seek(ids.offset)
    own = {name: fields[name] for name in ("identity", "variant", "parent", "kind")}
    start = number_of(fields, "start")
    return About(**own, start=start, ids=file.read(ids.nbytes)), tensors, fields


def _array(mapping: Any, tensor: Tensor) -> np.ndarray:
    dtype = TYPES[tensor.dtype]
    count = tensor.nbytes // dtype.itemsize
    return np.frombuffer(mapping, dtype, count, tensor.offset).reshape(tensor.shape)


def read_about(path: str) -> tuple[About, int]:
    """What a file says of itself, its arrays unread, and its bytes.

    Raises
    ------
    CorruptFileError, OSError
    """
    with naming(path), _open(path) as file:
        return _about(file)[0], os.fstat(file.fileno()).st_size


def open_mapped(path: str, about: About, *, is_known: bool) -> dict[str, np.ndarray]:
    """Map a file that has to be what `about` says; its digest is computed unless it `is_known`.

    The arrays are read-only, and keep the mapping alive.

    Raises
    ------
    CorruptFileError
        It is something else, or damaged.
    OSError
    """
    with naming(path), _open(path) as file:
        found, tensors, fields = _about(file)
        if found != about:
            corrupt("it is of other tokens than the index says")
        if f"{fields['sha256']}.safetensors" != os.path.basename(path):
            corrupt("its name is not its sha256")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays = {name: _array(mapping, tensor) for name, tensor in tensors.items()}
        if not is_known:
            covered = {name: (tensors[name].dtype, array) for name, array in arrays.items()}
            covered[_IDS] = ("I32", np.frombuffer(about.ids, np.int32))
            if digest(fields, covered) != fields["sha256"]:
                corrupt("its content does not match its sha256: it was changed or damaged")
        return arrays


def is_removable(path: str) -> bool:
    """Whether nobody has a file mapped."""
    if fcntl is None:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True
