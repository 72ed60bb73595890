"""Saving and loading a MultiHeadKvCache.

Older files may hold signs of projections as well. They are checked and left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

import numpy as np

from kvedge.core import checks, memory
from kvedge.errors import KvedgeError
from kvedge.files.header import corrupt, number_of, opened
from kvedge.files.tensors import check_array, check_numbers, read, write
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
    write(path, fields, dict(zip(memory.Slabs._fields, tokens, strict=True)))


def load(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    """What a file holds, as :func:`kvedge.multi_head.cache._restored` takes it."""
    with opened(path) as file:
        return _read(*read(file, _FORMAT))


def _read(fields: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    if fields.get("format_version") != _VERSION:
        corrupt(
            f"its format_version is {fields.get('format_version')!r}, and this kvedge reads "
            f"{_VERSION!r}: a newer kvedge wrote it",
        )
    options: dict[str, Any] = {
        name: number_of(fields, name) for name in ("head_dim", "bits", "seed")
    }
    projections = number_of(fields, "projections")
    length = number_of(fields, "length")
    num_heads = number_of(fields, "num_heads")
    num_query_heads = None
    if fields.get("num_query_heads"):
        num_query_heads = number_of(fields, "num_query_heads")
    try:
        config = KvCacheConfig(scale_dtype=fields.get("scale_dtype"), **options)  # type: ignore[arg-type]
        checks.as_num_query_heads(num_query_heads, num_heads)
        layer = config.layer_config(num_heads, 1)
    except KvedgeError as error:
        corrupt(f"its metadata makes no cache: {error}", error)
    tokens = []
    for name, (shape, dtype) in zip(memory.Slabs._fields, memory.slab_layout(layer), strict=True):
        array = check_array(arrays, name, dtype, (length, *shape[1:]))
        check_numbers(name, array, layer)
        tokens.append(array)
    if projections:
        shape = (length, num_heads, -(-projections // 8))
        check_array(arrays, "sketch_signs", np.uint8, shape)
        check_array(arrays, "sketch_norms", np.float32, shape[:2])
    if len(arrays) != (6 if projections else 4):
        corrupt("it has tensors that do not belong there")
    return config, num_heads, num_query_heads, tokens
