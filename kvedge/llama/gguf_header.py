"""The header of a GGUF file: its fields, and where its tensors lie.

The format is ggml's (``docs/gguf.md``), versions 2 and 3. The package ``gguf`` reads it value by
value: 21 s for a vocabulary of 262,144 tokens, 0.05 s here, where a list of numbers is one view and
a list of strings one loop over their lengths. Nothing is allocated before the file is seen to hold
it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from ..errors import CorruptFileError, UnsupportedModelError

__all__ = ["TENSOR_TYPES", "GgufHeader", "TensorInfo", "TensorType"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # of a tensor, as in ggml
_MAX_DEPTH = 4  # lists in lists; no known file has any
# Fields, members of lists, tensors: read one by one, in about a second. A vocabulary of 262,144
# tokens with scores, types and merges has a million.
_MAX_PARTS = 4_000_000
_WEIGHT = 40  # parts that a field, a tensor, a list in a list counts as: it costs that much

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Final = {  # GGUF's number of a type -> how NumPy calls it
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",  # any byte but 0 is true
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A format of a tensor's elements."""

    name: str
    elements: int  # of a block
    bytes: int


#: ggml's number of a format -> its name, elements of a block, bytes of a block.
TENSOR_TYPES: Final = {
    number: TensorType(*facts)
    for number, facts in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # the slowest axis first (the file names the fastest first)
    type_number: int  # a key of TENSOR_TYPES
    start: int  # byte of the file
    nbytes: int

    @property
    def type(self) -> TensorType:
        """The format of its elements."""
        return TENSOR_TYPES[self.type_number]


class GgufHeader:
    """Fields and tensors of one file, which is open while they are read only.

    Parameters
    ----------
    path : path-like

    Raises
    ------
    CorruptFileError
        The file is damaged, or ends before what its header tells.
    UnsupportedModelError
        It is of the other byte order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 4:
                raise self._corrupt(f"{size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
                self._size = len(self._bytes)
                self._read()

    def _read(self) -> None:
        self._at = self._num_parts = 0
        if self._take(4) != _MAGIC:
            raise self._corrupt("it does not begin with GGUF")
        version = self._u32()
        if version & 0xFFFF == 0 or sys.byteorder == "big":
            raise UnsupportedModelError(f"{self._path}: the GGUF file is of the other byte order")
        if version not in _VERSIONS:
            raise self._corrupt(f"it is of version {version}, versions 2 and 3 are known")
        num_tensors, num_fields = self._u64(), self._u64()
        #: Name -> value; strings are bytes, lists of numbers arrays, other lists lists.
        self.fields: dict[str, Any] = {}
        for _ in self._counted(num_fields, 13, _WEIGHT):
            name = self._name("field")
            if name in self.fields:
                raise self._corrupt(f"there are two fields {name!r:.80}")
            self.fields[name] = self._value(self._u32(), 0)
        found = [self._tensor() for _ in self._counted(num_tensors, 24, _WEIGHT)]
        #: Name -> tensor, in the order of the file.
        self.tensors = self._placed(found, self._aligned(self._at))

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Some rows of a tensor as the file has them, uint8 (rows, ..., bytes of a row).

        They are read, not mapped: what a file loses meanwhile is an error then, not a signal, and
        its pages do not count as memory of the process.

        Raises
        ------
        CorruptFileError
            The file has become shorter.
        """
        shape = tensor.shape or (1,)
        inner = (*shape[1:-1], shape[-1] // tensor.type.elements * tensor.type.bytes)
        if len(shape) == 1:  # a vector is one row
            start, stop, inner = 0, 1, (tensor.nbytes,)
        step = math.prod(inner)
        with self._path.open("rb") as file:
            file.seek(tensor.start + start * step)
            data = np.fromfile(file, np.uint8, (stop - start) * step)
        if data.size != (stop - start) * step:
            raise self._corrupt(f"it ends within the tensor {tensor.name!r:.80}")
        return data.reshape(stop - start, *inner)

    # ---- bytes -----------------------------------------------------------------------------------

    def _corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path}: not a readable GGUF file: {what}")

    def _too_short(self, end: int) -> NoReturn:
        raise self._corrupt(f"{end} bytes are needed, the file has {self._size}")

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > self._size:
            self._too_short(self._at)
        return self._bytes[start : self._at]

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _counted(self, count: int, smallest: int, weight: int = 1) -> range:
        """A range over parts that take at least `smallest` bytes each, if the file has them."""
        if self._at + count * smallest > self._size:
            self._too_short(self._at + count * smallest)
        self._num_parts += count * weight
        if self._num_parts > _MAX_PARTS:
            raise self._corrupt(f"the header has more than {_MAX_PARTS} parts")
        return range(count)

    def _name(self, of: str) -> str:
        name = self._take(self._u64())
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"the name of a {of} is not UTF-8: {name!r:.80}") from error

    # ---- fields ----------------------------------------------------------------------------------

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._take(self._u64())
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self._corrupt(f"lists lie in lists more than {_MAX_DEPTH} deep")
            return self._list(self._u32(), self._u64(), depth + 1)
        return self._numbers(kind, 1)[0].item()

    def _list(self, kind: int, count: int, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(kind, depth) for _ in self._counted(count, 12, _WEIGHT)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise self._corrupt(f"a field is of type {kind}, which GGUF does not have")
        dtype = np.dtype(_NUMBERS[kind])
        self._counted(count, dtype.itemsize)
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return array != 0 if kind == _BOOL else array

    def _strings(self, count: int) -> list[bytes]:
        self._counted(count, 8)
        length_at, data, size, at = _U64.unpack_from, self._bytes, self._size, self._at
        found = []
        for _ in range(count):
            start = at + 8
            if start > size:
                self._too_short(start)
            at = start + length_at(data, at)[0]
            if at > size:
                self._too_short(at)
            found.append(data[start:at])
        self._at = at
        return found

    # ---- tensors ---------------------------------------------------------------------------------

    def _tensor(self) -> TensorInfo:
        """The next tensor's facts; `start` counts from where tensors begin."""
        name = self._name("tensor")
        num_dims = self._u32()
        if num_dims > _MAX_DIMS:
            raise self._corrupt(f"the tensor {name!r:.80} has {num_dims} axes, at most {_MAX_DIMS}")
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        number = self._u32()
        if number not in TENSOR_TYPES:
            raise self._corrupt(
                f"the tensor {name!r:.80} is of the format {number}, which is not known"
            )
        kind = TENSOR_TYPES[number]
        if (shape or (1,))[-1] % kind.elements:
            raise self._corrupt(
                f"the tensor {name!r:.80} has rows of {shape[-1:]} elements, not of whole blocks "
                f"of {kind.elements} ({kind.name})"
            )
        nbytes = math.prod(shape) // kind.elements * kind.bytes
        return TensorInfo(name, shape, number, self._u64(), nbytes)

    def _aligned(self, at: int) -> int:
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment must be a power of two, got {alignment!r:.40}")
        return -(-at // alignment) * alignment

    def _placed(self, found: list[TensorInfo], begin: int) -> dict[str, TensorInfo]:
        """The tensors at their bytes: in the file, under one name each, none over another."""
        placed: dict[str, TensorInfo] = {}
        for tensor in found:
            if tensor.name in placed:
                raise self._corrupt(f"there are two tensors {tensor.name!r:.80}")
            start = begin + tensor.start
            if start + tensor.nbytes > self._size:
                self._too_short(start + tensor.nbytes)
            placed[tensor.name] = replace(tensor, start=start)
        filled = (tensor for tensor in placed.values() if tensor.nbytes)
        in_order = sorted(filled, key=lambda tensor: tensor.start)
        for before, after in pairwise(in_order):
            if before.start + before.nbytes > after.start:
                raise self._corrupt(
                    f"the tensors {before.name!r:.80} and {after.name!r:.80} overlap"
                )
        return placed
