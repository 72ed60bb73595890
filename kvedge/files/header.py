"""The format of all files: safetensors, which other tools read.

https://github.com/huggingface/safetensors#format: 8 bytes with the length of the header, the header
in JSON, the tensors one after the other. Nothing in a file is trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from kvedge.core.checks import checked_path
from kvedge.errors import CorruptFileError, InvalidArgumentError

__all__ = [
    "TYPES",
    "Tensor",
    "TypedArrays",
    "corrupt",
    "digest",
    "header",
    "naming",
    "number_of",
    "opened",
    "pieces",
    "read_header",
    "read_into",
]

_MAX_HEADER = 100_000_000  # bytes; the safetensors package refuses longer ones
_SHORT_HEADER = 1 << 20  # bytes that are quickly parsed, whatever they are
_LONGEST_ENTRY = 200  # characters of a tensor's name and object, with room for spaces

#: NumPy's types of elements, by safetensors' names of those that kvedge writes.
TYPES: dict[str, np.dtype] = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}

#: Arrays by name, each after safetensors' name of its type.
TypedArrays = Mapping[str, tuple[str, np.ndarray]]


class Tensor(NamedTuple):
    """Where a tensor lies in a file."""

    dtype: str  # safetensors' name: "I8", "F16", "F32"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


# ---- writing -------------------------------------------------------------------------------------


def pieces(fields: Mapping[str, str], tensors: TypedArrays) -> Iterator[bytes | memoryview]:
    """The bytes of a file, one after the other, with the digest of all as metadata "sha256"."""
    signed = {**fields, "sha256": digest(fields, tensors)}
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    yield header(signed, {name: tensors[name] for name in order})
    for name in order:
        yield tensors[name][1].reshape(-1).view(np.uint8).data


def header(fields: Mapping[str, str], tensors: TypedArrays) -> bytes:
    """A file up to its tensors, which follow in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(fields.items()))}
    offset = 0
    for name, (dtype, array) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": (offset, offset + array.nbytes),
        }
        offset += array.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    if len(text) > _MAX_HEADER:
        raise InvalidArgumentError(
            f"metadata takes too much room: a header of {len(text)} bytes where {_MAX_HEADER} are "
            "the limit"
        )
    return len(text).to_bytes(8, "little") + text


def digest(fields: Mapping[str, str], tensors: TypedArrays) -> str:
    """SHA-256 of the metadata and of every tensor's name, type, shape and bytes."""
    sha256 = hashlib.sha256()
    covered = {name: value for name, value in fields.items() if name != "sha256"}
    sha256.update(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        dtype, array = tensors[name]
        sha256.update(f"[{_quoted(name)}, {_quoted(dtype)}, {[*array.shape]}]".encode())  # in JSON
        if array.size:
            sha256.update(array.reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def corrupt(what: str, cause: Exception | None = None) -> NoReturn:
    """CorruptFileError; :func:`naming` puts the file's name before it."""
    raise CorruptFileError(what) from cause


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Let CorruptFileErrors of the block begin with a file's name."""
    try:
        yield
    except CorruptFileError as error:
        raise CorruptFileError(f"{file}: {error}") from error.__cause__


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to be read; CorruptFileErrors of the block name it."""
    path = checked_path(path)
    mode = os.stat(path).st_mode
    with naming(path):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe waits for its writer
            corrupt("it is not a regular file")
        with open(path, "rb") as file:
            yield file


def read_header(
    file: BinaryIO, most_tensors: Callable[[Mapping[str, str]], int]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file, which have to fill it without a gap.

    A long header has to begin with the metadata, and is parsed beyond it only if it has room for
    no more tensors than `most_tensors` gives for such metadata.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > min(_MAX_HEADER, end - 8):
        what = "it is no safetensors file, or cut short"
        corrupt(
            f"{what}: it has {end} bytes, its header {size}, and at most {_MAX_HEADER} are read"
        )
    try:
        fields, tensors = _parse(file.read(size).decode(), 8 + size, most_tensors)
    except CorruptFileError:
        raise
    except (ValueError, RecursionError) as error:
        corrupt(f"it is no safetensors file, or damaged: {error}", error)
    at = 8 + size
    for offset, nbytes, name in sorted([(t.offset, t.nbytes, name) for name, t in tensors.items()]):
        if offset != at:
            corrupt(f"tensor {name[:60]!r} begins at byte {offset}, where {at} lie before it")
        at += nbytes
    if at != end:
        corrupt(f"it has {end} bytes, and its tensors end at {at}: it was cut or damaged")
    return fields, tensors


def _parse(
    text: str, start: int, most_tensors: Callable[[Mapping[str, str]], int]
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a header, whose tensors lie from byte `start` on."""
    is_long = len(text) > _SHORT_HEADER
    fields: dict[str, str] | None = None
    entries: dict[str, Tensor] = {}
    at, key = 0, _FIRST_NAME.match(text)
    while key is not None:
        name, at = _JSON.decode(key[1]) if "\\" in key[1] else key[1][1:-1], key.end()
        if name in entries:
            raise ValueError(f"tensor {name[:60]!r} is there twice")
        if name == "__metadata__" and fields is None:
            fields, at = _JSON.raw_decode(text, at)
            assert fields is not None
            if not {str}.issuperset(map(type, fields.values())):
                raise ValueError("its metadata is not all text")
            "".join([*fields, *fields.values()]).encode()  # no half of a pair of surrogates
            if is_long and len(text) - at > most_tensors(fields) * _LONGEST_ENTRY:
                raise ValueError("its header is too long for the tensors of such metadata")
        elif is_long and fields is None:
            raise ValueError("its header is long, and does not begin with metadata")
        else:
            entries[name], at = _entry(text, at, start)
        key = _NEXT_NAME.match(text, at)
    if _END.fullmatch(text, at) is None:
        raise ValueError(f"a tensor or the end is expected at character {at}")
    return fields or {}, entries


def _entry(text: str, at: int, start: int) -> tuple[Tensor, int]:
    """The object of a tensor, and where the text goes on."""
    found, end = _PLAIN_JSON.raw_decode(text[at : at + _LONGEST_ENTRY])
    if text.count('"', at, at + end) > 8:
        raise ValueError(f"three names and a type are expected at character {at}, no more")
    if found.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"dtype, shape, data_offsets are expected at character {at}, not {found}")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ValueError(f"a tensor is of type {dtype}, which kvedge never writes")
    # A minus sign is in no name or type: none is there, not even of -0.
    if not (type(shape) is type(offsets) is list) or "-" in text[at : at + end]:
        raise ValueError(f"lists of numbers are expected, not {shape} and {offsets}")
    numbers = [*shape, *offsets]
    if not {int}.issuperset(map(type, numbers)) or max(numbers, default=0) >= 10**18:
        raise ValueError(f"numbers of 0 to 10^18 are expected, not {shape} and {offsets}")
    nbytes = math.prod(shape) * TYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"a tensor {dtype} {shape} has {nbytes} bytes, not those of {offsets}")
    return Tensor(dtype, tuple(shape), start + offsets[0], nbytes), at + end


_NAME = r'[ \t\n\r]*("(?:[^"\\\x00-\x1f]|\\.){0,200}")[ \t\n\r]*:[ \t\n\r]*(?=\{)'  # then an object
_FIRST_NAME = re.compile(r"\{" + _NAME)
_NEXT_NAME = re.compile(r"[ \t\n\r]*," + _NAME)
_END = re.compile(r"[ \t\n\r]*\}[ \t\n\r]*")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"one of {', '.join(found)[:60]} is there twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_unique)
_PLAIN_JSON = json.JSONDecoder()


def read_into(file: BinaryIO, tensor: Tensor, array: np.ndarray) -> None:
    """Read a tensor into an array of its bytes."""
    if not array.size:
        return
    file.seek(tensor.offset)
    count = file.readinto(array.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]
    if count != tensor.nbytes:
        corrupt(f"it ends {tensor.nbytes - count} bytes early: it was cut while being read")


def number_of(fields: Mapping[str, str], name: str) -> int:
    """A field as the number that was written, or CorruptFileError."""
    text = fields.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and str(int(text)) == text):
        corrupt(f"its {name} is {text[:40]!r}, not a number")
    return int(text)
