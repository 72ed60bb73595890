"""Files of arrays with metadata and a digest over all, written whole or not at all.

For what is no cache of layers: a :class:`~kvedge.MultiHeadKvCache`, a pool. (Caches of layers have
:mod:`kvedge.files.session`, which knows each tensor's place.) What the arrays mean, and which must
be there, is for the caller to check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from kvedge.core.config import MAX_LAYERS, LayerConfig
from kvedge.core.formats import FORMATS
from kvedge.files.header import (
    TYPES,
    TypedArrays,
    corrupt,
    digest,
    pieces,
    read_header,
    read_into,
)
from kvedge.files.replacing import replacing

__all__ = ["check_array", "check_numbers", "have_scales", "read", "read_arrays", "typed", "write"]

# Safetensors' names of the types that these files have, by NumPy's.
_TYPES = {TYPES[name].name: name for name in ("I8", "U8", "U16", "I32", "I64", "F16", "F32")}
_MOST_TENSORS = 9 + 9 * MAX_LAYERS  # those of a pool


def write(
    path: str | os.PathLike[str], fields: Mapping[str, str], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write arrays and metadata, which has the kind of file as its field "format"."""
    with replacing(path) as file:
        for piece in pieces(fields, typed(arrays)):
            file.write(piece)


def typed(arrays: Mapping[str, np.ndarray]) -> TypedArrays:
    """Arrays with safetensors' names of their types."""
    return {
        name: (_TYPES[array.dtype.name], np.ascontiguousarray(array))
        for name, array in arrays.items()
    }


def read(file: BinaryIO, kind: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and arrays of a file whose "format" is `kind`."""
    fields, arrays = read_arrays(file, kind)
    if digest(fields, typed(arrays)) != fields.get("sha256"):
        corrupt("its content does not match its sha256: it was changed or damaged")
    return fields, arrays


def read_arrays(file: BinaryIO, kind: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The same of a file whose digest is for the caller to check."""
    fields, tensors = read_header(file, lambda fields: _MOST_TENSORS)
    if fields.get("format") != kind:
        corrupt(f"it is a safetensors file, but not of {kind}")
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES.values():
            corrupt(f"tensor {name[:40]!r} is of type {tensor.dtype}, which is none of {kind}")
        try:
            arrays[name] = np.empty(tensor.shape, TYPES[tensor.dtype])
        except ValueError as error:  # of more axes than NumPy has, or so long beside one of 0
            corrupt(f"tensor {name[:40]!r} has a shape that no array has: {error}", error)
        read_into(file, tensor, arrays[name])
    return fields, arrays


def check_array(
    arrays: Mapping[str, np.ndarray], name: str, dtype: Any, shape: tuple[int, ...]
) -> np.ndarray:
    """One of the arrays, which has to be there, of that type and shape."""
    array = arrays.get(name)
    if array is None:
        corrupt(f"tensor {name} is missing")
    if array.dtype != dtype or array.shape != shape:
        corrupt(
            f"tensor {name} is {array.dtype} {array.shape} where {np.dtype(dtype)} {shape} belongs"
        )
    return array


def have_scales(*dtypes: Any) -> bool:
    """Whether one of these formats, if they are any, has scales."""
    return any(
        FORMATS[name].has_scales for name in dtypes if isinstance(name, str) and name in FORMATS
    )


def check_numbers(name: str, array: np.ndarray, config: LayerConfig) -> None:
    """Refuse numbers in a tensor PREFIX.NAME of a layer that its format cannot have made."""
    if not array.size:
        return
    of_values = ".value" in name
    form = config.value_format if of_values else config.key_format
    if name.endswith("_codes") and form.kivi is not None:
        fault = form.kivi.fault(array, config.value_head_dim if of_values else config.head_dim)
    elif name.endswith("_codes"):
        fault = form.fault_of_codes(array)
    elif name.endswith("_scales"):
        fault = form.fault_of_scales(array)
    else:  # a key offset or a key scale
        fault = FORMATS["float32"].fault_of_codes(array)
        if fault is None and name.endswith(".key_scale") and not (array > 0).all():
            fault = "a number that is not positive"
    if fault is not None:
        corrupt(f"tensor {name} holds {fault}")
