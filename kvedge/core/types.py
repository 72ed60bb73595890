"""Types that annotations share; nothing here is needed when kvedge runs."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, Union

import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array of another library, such as a torch tensor on the CPU."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


# What keys, values and queries may come as: float32, or float16 and bfloat16, which are converted.
Array: TypeAlias = Union["npt.NDArray[Any]", SupportsDLPack]
