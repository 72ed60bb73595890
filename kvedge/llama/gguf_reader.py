"""The fields and tensors of GGUF models; the package ``gguf`` (an extra) decodes their weights.

A model may be split over files, ``NAME-00001-of-00003.gguf`` and so on (llama.cpp's gguf-split):
the first has the fields, and each has some of the tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.packages import require
from ..errors import CorruptFileError, UnsupportedModelError
from .gguf_header import GgufHeader, TensorInfo

__all__ = ["GgufFile", "is_gguf"]

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_ELEMENTS_AT_ONCE = 1 << 18  # of a tensor: 1 MB of float32, and as much again in between
_PLAIN = {"F32": "<f4", "F16": "<f2"}  # formats that NumPy reads


def is_plain(kind: str) -> bool:
    """Whether NumPy reads a format of tensors, without the package gguf."""
    return kind in _PLAIN


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins with GGUF's magic."""
    with Path(path).open("rb") as file:
        return file.read(4) == b"GGUF"


class GgufFile:
    """A model's fields and tensors by name, each refusal naming the file.

    Parameters
    ----------
    path : path-like
        The file, or any one of a split model's.

    Raises
    ------
    CorruptFileError
        A file is damaged or missing.
    MissingExtraError
        Without the package gguf.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = _first_of_split(Path(path))
        self.path = first
        header = GgufHeader(first)
        self._fields = header.fields
        self._tensors = {name: (header, tensor) for name, tensor in header.tensors.items()}
        for more in self._further_files(first):
            header = GgufHeader(more)
            self._tensors |= {name: (header, tensor) for name, tensor in header.tensors.items()}
        expected = self.get("split.tensors.count", int, None)
        if expected is not None and expected != len(self._tensors):
            raise CorruptFileError(
                f"{first}: the files of the model should have {expected} tensors together, they "
                f"have {len(self._tensors)}"
            )

    def _further_files(self, first: Path) -> Iterator[Path]:
        count = self.get("split.count", int, 1)
        if count <= 1:
            return
        match = _SPLIT.fullmatch(first.name)
        if match is None:
            raise CorruptFileError(
                f"{first}: part of a model of {count} files, whose names must end with "
                f"-00001-of-{count:05}.gguf and so on"
            )
        for number in range(2, count + 1):
            file = first.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
            if not file.exists():
                raise CorruptFileError(f"{first}: the model's file {file.name} is missing")
            yield file

    # ---- fields ----------------------------------------------------------------------------------

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """A field's value; `default` if it is absent, unless it must be there."""
        if key not in self._fields:
            if default is ...:
                raise CorruptFileError(f"{self.path}: the field {key!r} is missing")
            return default
        value = self._as_plain(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CorruptFileError(
                f"{self.path}: the field {key!r} must be {kind.__name__}, got {value!r:.40}"
            )
        return value

    def get_list(self, key: str, kind: type) -> list[Any]:
        """A field that is a list of one type."""
        values: list[Any] = self.get(key, list)
        if not all(type(value) is kind for value in values):
            raise CorruptFileError(
                f"{self.path}: the field {key!r} must be a list of {kind.__name__} only"
            )
        return values

    def get_either(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        """A field of one of several types; a list is one of them."""
        kind = type(self._as_plain(key) if key in self._fields else default)
        return self.get(key, kind if kind in kinds else kinds[0], default)

    def _as_plain(self, key: str) -> Any:
        try:
            return _plain(self._fields[key])
        except UnicodeDecodeError as error:
            message = f"{self.path}: the field {key!r} is damaged: {error}"
            raise CorruptFileError(message) from error

    def described(self, front: str) -> dict[str, Any]:
        """Fields whose names begin so; text that is not UTF-8, which no number is, stays bytes."""
        found = {}
        for key, value in self._fields.items():
            if key.startswith(front):
                try:
                    found[key] = _plain(value)
                except UnicodeDecodeError:
                    found[key] = value
        return found

    def is_list(self, key: str) -> bool:
        """Whether there is such a field, and it is a list."""
        return isinstance(self._fields.get(key), (list, np.ndarray))

    def has(self, key: str) -> bool:
        """Whether there is such a field."""
        return key in self._fields

    def count(self, key: str) -> int:
        """Members of a field that is a list; 0 if it is absent or no list."""
        return len(self._fields[key]) if self.is_list(key) else 0

    # ---- tensors ---------------------------------------------------------------------------------

    @property
    def tensor_names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, the slowest axis first (GGUF names the fastest first)."""
        return self._tensor(name)[1].shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or of another shape."""
        if self.shape(name) != shape:
            raise CorruptFileError(
                f"{self.path}: the tensor {name!r} must have the shape {shape}, "
                f"got {self.shape(name)}"
            )

    def kind(self, name: str) -> str:
        """Name of the format of a tensor's elements, such as "Q4_K"."""
        return self._tensor(name)[1].type.name

    def chunks(self, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """A tensor of the shape expected, float32, some rows at a time; finite."""
        self.check_shape(name, shape)
        header, tensor = self._tensor(name)
        rows, step = 1, 1
        if len(shape) > 1:
            rows, step = shape[0], max(_ELEMENTS_AT_ONCE // max(shape[-1], 1), 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = self._decoded(tensor, header.rows(tensor, start, stop))
            if len(shape) == 1:
                values = values[0]
            if not np.isfinite(values).all():
                raise CorruptFileError(
                    f"{self.path}: the tensor {name!r} holds a NaN or an infinity"
                )
            yield values

    def _decoded(self, tensor: TensorInfo, data: np.ndarray) -> np.ndarray:
        """Some rows of a tensor, a float32 copy."""
        kind = tensor.type.name
        if kind in _PLAIN:
            return np.array(data.view(_PLAIN[kind]), dtype=np.float32, order="C")
        gguf = require("gguf", f"weights of the format {kind} need")
        try:
            values = gguf.dequantize(data, gguf.GGMLQuantizationType(tensor.type_number))
        except (NotImplementedError, ValueError) as error:  # ValueError: no such type in this gguf
            raise UnsupportedModelError(
                f"{self.path}: the tensor {tensor.name!r} has the format {kind}, "
                "which the package gguf cannot read"
            ) from error
        return np.array(values, dtype=np.float32, order="C")

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A whole tensor of the shape expected, float32, C-contiguous."""
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> np.ndarray:
        """Tensors of the shapes expected one after the other, float32, C-contiguous."""
        first = parts[0][1]
        whole = np.empty((sum(shape[0] for _, shape in parts), *first[1:]), np.float32)
        at = 0
        for name, shape in parts:
            for chunk in self.chunks(name, shape):
                whole[at : at + len(chunk)] = chunk
                at += len(chunk)
        return whole

    def _tensor(self, name: str) -> tuple[GgufHeader, TensorInfo]:
        if name not in self._tensors:
            raise CorruptFileError(f"{self.path}: the tensor {name!r} is missing")
        return self._tensors[name]


def _first_of_split(path: Path) -> Path:
    """The file that has the fields: the first one, where a later one of a split model is named."""
    match = _SPLIT.fullmatch(path.name)
    if match is None or match[2] == "00001":
        return path
    first = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    if not first.exists():
        raise CorruptFileError(f"{path}: the model's first file, {first.name}, is missing")
    return first


def _plain(value: Any) -> Any:
    """A field as Python's own types: bytes of the file become text, arrays lists."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value
