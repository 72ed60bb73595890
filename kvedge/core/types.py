"""Types that annotations share; nothing here does anything."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, Union

import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array of another library, such as a torch tensor on the CPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


# The names in kvedge.core.formats, which a type checker cannot read there.
Dtype: TypeAlias = Literal["int8", "float32"]
ScaleDtype: TypeAlias = Literal["float32", "float16"]


class RowConfig(Protocol):
    """What a format is told of the rows it stores."""

    @property
    def head_dim(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def scale_dtype(self) -> str: ...


# What keys, values and queries may come as: float32, or float16 and bfloat16, which are converted.
Array: TypeAlias = Union["npt.NDArray[Any]", SupportsDLPack]
