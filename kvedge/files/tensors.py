"""Files of arrays: safetensors with metadata and a digest over all, written whole or not at all.

For what is no cache of layers: a :class:`~kvedge.MultiHeadKvCache`, a pool. (Caches of layers have
:mod:`kvedge.files.session`, which knows each tensor's place.) Reading trusts nothing: the structure
is checked by the safetensors package, the content against its digest; what the arrays mean, and
which must be there, is for the caller to check.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from kvedge.core.checks import checked_path
from kvedge.errors import CorruptFileError
from kvedge.files.replacing import replacing
from kvedge.files.session import digest, header, safetensors_package

__all__ = ["check_array", "corrupt", "number", "read", "write"]

_TYPES = {
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
}


def write(
    path: str | os.PathLike[str], fields: Mapping[str, str], tensors: Mapping[str, np.ndarray]
) -> None:
    """Write arrays and metadata, which has the kind of file as its field "format"."""
    safetensors_package()  # what could not be loaded here is not saved either
    with replacing(path) as file:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        type_of = _type_of(arrays)
        signed = {**fields, "sha256": digest(fields, arrays, type_of)}
        names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
        file.write(header(signed, {name: arrays[name] for name in names}, type_of))
        for name in names:
            file.write(arrays[name].reshape(-1).view(np.uint8).data)


def read(
    path: str | os.PathLike[str], kind: str
) -> tuple[str, dict[str, str], dict[str, np.ndarray]]:
    """Read a file whose "format" is `kind`: its path as text, metadata, arrays of their own.

    Raises
    ------
    CorruptFileError, OSError, MissingExtraError
    """
    path = checked_path(path)
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for its writer
        corrupt(path, "it is not a regular file")
    with open(path, "rb"):
        pass  # what the system says of the path, before the package has its own words
    safetensors = safetensors_package()
    arrays: dict[str, np.ndarray] = {}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            fields = dict(file.metadata() or {})
            if fields.get("format") != kind:
                corrupt(path, f"it is a safetensors file, but not of {kind}")
            for name in file.keys():  # noqa: SIM118, it is no mapping
                if file.get_slice(name).get_dtype() not in _TYPES.values():
                    corrupt(path, f"tensor {name[:40]!r} is of a type that kvedge never writes")
                arrays[name] = file.get_tensor(name)
    except safetensors.SafetensorError as error:
        corrupt(path, f"it is no safetensors file, or damaged or cut short: {error}", error)
    if digest(fields, arrays, _type_of(arrays)) != fields.get("sha256"):
        corrupt(path, "its content does not match its sha256: it was changed or damaged")
    return path, fields, arrays


def number(path: str, fields: Mapping[str, str], name: str) -> int:
    """A field as the number that was written, or CorruptFileError."""
    text = fields.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and str(int(text)) == text):
        corrupt(path, f"its {name} is {text[:40]!r}, not a number")
    return int(text)


def check_array(
    path: str, arrays: Mapping[str, np.ndarray], name: str, dtype: Any, shape: tuple[int, ...]
) -> np.ndarray:
    """One of the arrays, which has to be there, of that type and shape."""
    array = arrays.get(name)
    if array is None:
        corrupt(path, f"tensor {name} is missing")
    if array.dtype != dtype or array.shape != shape:
        corrupt(
            path,
            f"tensor {name} is {array.dtype} {array.shape} where {np.dtype(dtype)} {shape} belongs",
        )
    return array


def corrupt(path: str, what: str, cause: Exception | None = None) -> NoReturn:
    """CorruptFileError."""
    raise CorruptFileError(f"{path}: {what}") from cause


def _type_of(arrays: Mapping[str, np.ndarray]) -> Callable[[str], str]:
    return lambda name: _TYPES[arrays[name].dtype.name]
