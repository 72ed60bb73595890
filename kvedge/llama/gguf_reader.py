"""The fields and tensors of GGUF files, through the package ``gguf`` (an extra).

A model may be split over files, ``NAME-00001-of-00003.gguf`` and so on (llama.cpp's gguf-split):
the first has the fields, and each has some of the tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptFileError, MissingExtraError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

__all__ = ["GgufFile", "is_gguf"]

# A damaged list length would have gguf read a large file value by value. A vocabulary of 260,000
# tokens with as many merges has about 2 million.
_MAX_PARTS = 8_000_000

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_ELEMENTS_AT_ONCE = 1 << 20  # of a tensor: 4 MB of float32


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
        self._reader = _open(first)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for more in self._further_files(first):
            self._tensors |= {tensor.name: tensor for tensor in _open(more).tensors}
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
        field = self._reader.get_field(key)
        if field is None:
            if default is ...:
                raise CorruptFileError(f"{self.path}: the field {key!r} is missing")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:  # such as a string that is not UTF-8
            message = f"{self.path}: the field {key!r} is damaged: {error}"
            raise CorruptFileError(message) from error
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
        field = self._reader.get_field(key)
        value = default if field is None else field.contents()
        return self.get(key, type(value) if type(value) in kinds else kinds[0], default)

    def has(self, key: str) -> bool:
        """Whether there is such a field."""
        return self._reader.get_field(key) is not None

    # ---- tensors ---------------------------------------------------------------------------------

    @property
    def tensor_names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, the slowest axis first (GGUF names the fastest first)."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def kind(self, name: str) -> str:
        """Name of the format of a tensor's elements, such as "Q4_K"."""
        return str(self._tensor(name).tensor_type.name)

    def chunks(self, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """A tensor of the shape expected, float32, some rows at a time; finite.

        Copies even of float32: the file's own bytes may change, or be unaligned.
        """
        from gguf import dequantize

        tensor = self._tensor(name)
        if self.shape(name) != shape:
            raise CorruptFileError(
                f"{self.path}: the tensor {name!r} must have the shape {shape}, "
                f"got {self.shape(name)}"
            )
        step = len(tensor.data)
        if len(shape) > 1:
            step = max(_ELEMENTS_AT_ONCE // shape[-1], 1)
        for start in range(0, len(tensor.data), step):
            try:
                values = dequantize(tensor.data[start : start + step], tensor.tensor_type)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self.path}: the tensor {name!r} has the format {self.kind(name)}, "
                    "which the package gguf cannot read"
                ) from error
            values = np.array(values, dtype=np.float32, order="C")
            if not np.isfinite(values).all():
                raise CorruptFileError(
                    f"{self.path}: the tensor {name!r} holds a NaN or an infinity"
                )
            yield values

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A whole tensor of the shape expected, float32, C-contiguous."""
        parts = list(self.chunks(name, shape))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tensor(self, name: str) -> ReaderTensor:
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


def _open(path: Path) -> GGUFReader:
    """The file's fields and tensors, by the package gguf, whose errors become CorruptFileError."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtraError(
            "reading GGUF files needs the package gguf: pip install kvedge[gguf]"
        ) from error

    class CheckedReader(GGUFReader):
        """Refuses to read past the end, where GGUFReader goes on with less."""

        num_parts = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise EOFError(f"{end} bytes are needed, the file has {len(self.data)}")
            self.num_parts += 1
            if self.num_parts > _MAX_PARTS:
                raise ValueError(f"the header has more than {_MAX_PARTS} parts")
            return super()._get(offset, dtype, count, *args, **kwargs)

    try:
        reader = CheckedReader(path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # gguf raises whatever NumPy does
        raise CorruptFileError(f"{path}: not a readable GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise UnsupportedModelError(f"{path}: the GGUF file is of the other byte order")
    return reader
