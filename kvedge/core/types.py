"""Types that annotations share; nothing here does anything. `Dtype` is of the table of formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, Union

import numpy as np
import numpy.typing as npt

from kvedge.core.formats import Dtype
from kvedge.core.recommended import Recommended

__all__ = [
    "Array",
    "CacheArguments",
    "Dtype",
    "Floats",
    "KeyVectors",
    "LayerArguments",
    "Layout",
    "PoolArguments",
    "ScaleDtype",
    "StorageArguments",
    "StorageDtype",
    "SupportsDLPack",
]


class SupportsDLPack(Protocol):
    """An array of another library, such as a torch tensor on the CPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


# What comes out.
Floats: TypeAlias = "npt.NDArray[np.float32]"

ScaleDtype: TypeAlias = Literal["float32", "float16"]

# What a whole cache is stored as: a format, or a name of recommended storage.
StorageDtype: TypeAlias = Dtype | Recommended

# Order of the axes tokens (n), heads (h) and channels (d), where there are tokens.
Layout: TypeAlias = Literal["nhd", "hnd"]


class _SharedArguments(TypedDict, total=False):
    """The options of storage that layers, caches and pools have alike, as keywords."""

    value_dtype: Dtype | None
    recent: int
    sinks: int
    recent_dtype: Dtype | None
    value_rotation: bool


class PoolArguments(_SharedArguments, total=False):
    """The options of storage of a pool that are keywords."""

    key_dtype: Dtype | None


class _RowArguments(_SharedArguments, total=False):
    """The options of storage that layers and caches have alike."""

    group_size: int | None
    scale_dtype: ScaleDtype


class LayerArguments(_RowArguments, total=False):
    """The options of a layer but for its size."""

    value_head_dim: int | None
    key_offset: Array | Literal["auto"] | None
    key_scale: Array | Literal["auto"] | None
    window: int | None


class StorageArguments(_RowArguments, total=False):
    """The options of a KVCache that say how rows are stored, but for their ``dtype``."""

    key_dtype: Dtype | None
    key_offset: KeyVectors
    key_scale: KeyVectors


class CacheArguments(StorageArguments, total=False):
    """The options of a KVCache but for its size."""

    value_head_dim: int | None
    dtype: StorageDtype
    window: int | Sequence[int | None] | None
    num_query_heads: int | None


# What keys, values and queries may come as: float32, or float16 and bfloat16, which are converted.
Array: TypeAlias = Union["npt.NDArray[Any]", SupportsDLPack]

# A key offset or scale: an array for all layers, what first tokens decide, or one for each layer.
KeyVectors: TypeAlias = Array | Literal["auto"] | Sequence[Array | Literal["auto"] | None] | None
