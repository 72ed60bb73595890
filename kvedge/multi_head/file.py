"""Saving and loading a MultiHeadKvCache.

Older files may hold signs of projections as well. They are checked and left out.
"""

from __future__ import annotations

import os
from dataclasses import fields as fields_of
from typing import Any

import numpy as np

from kvedge.core import checks, memory
from kvedge.errors import KvedgeError
from kvedge.files import tensors as tensor_file
from kvedge.multi_head.config import KvCacheConfig

__all__ = ["load", "save"]

_FORMAT = "kvedge multi-head cache"
_VERSION = "1"


def save(state: tuple[Any, ...], path: str | os.PathLike[str]) -> None:
    """Write what a cache is made of; see :meth:`kvedge.MultiHeadKvCache.save`."""
    config, num_heads, num_query_heads, tokens = state
    fields = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "num_heads": str(num_heads),
        "num_query_heads": "" if num_query_heads is None else str(num_query_heads),
        "length": str(len(tokens[0])),
        **{field.name: str(getattr(config, field.name)) for field in fields_of(config)},
    }
    tensor_file.write(path, fields, dict(zip(memory.Slabs._fields, tokens, strict=True)))


def load(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """What a file holds, as :func:`kvedge.multi_head.cache._restored` takes it."""
    path, fields, arrays = tensor_file.read(path, _FORMAT)
    if fields.get("format_version") != _VERSION:
        tensor_file.corrupt(
            path,
            f"its format_version is {fields.get('format_version')!r}, and this kvedge reads "
            f"{_VERSION!r}: a newer kvedge wrote it",
        )
    options: dict[str, Any] = {
        name: tensor_file.number(path, fields, name) for name in ("head_dim", "bits", "seed")
    }
    projections = tensor_file.number(path, fields, "projections")
    length = tensor_file.number(path, fields, "length")
    num_heads = tensor_file.number(path, fields, "num_heads")
    num_query_heads = None
    if fields.get("num_query_heads"):
        num_query_heads = tensor_file.number(path, fields, "num_query_heads")
    try:
        config = KvCacheConfig(scale_dtype=fields.get("scale_dtype"), **options)  # type: ignore[arg-type]
        checks.as_num_query_heads(num_query_heads, num_heads)
        layer = config.layer_config(num_heads, 1)
    except KvedgeError as error:
        tensor_file.corrupt(path, f"its metadata makes no cache: {error}", error)
    tokens = []
    for name, (shape, dtype) in zip(memory.Slabs._fields, memory.slab_layout(layer), strict=True):
        array = tensor_file.check_array(path, arrays, name, dtype, (length, *shape[1:]))
        fault = layer.key_format.fault_of_scales(array) if "scales" in name and array.size else None
        if fault is not None:
            tensor_file.corrupt(path, f"tensor {name} holds {fault}")
        tokens.append(array)
    if projections:
        shape = (length, num_heads, -(-projections // 8))
        tensor_file.check_array(path, arrays, "sketch_signs", np.uint8, shape)
        tensor_file.check_array(path, arrays, "sketch_norms", np.float32, shape[:2])
    if len(arrays) != (6 if projections else 4):
        tensor_file.corrupt(path, "it has tensors that do not belong there")
    return config, num_heads, num_query_heads, tokens
