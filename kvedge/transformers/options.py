"""How the rows of a KvedgeCache are stored, and what the installed transformers means by crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers

from kvedge.backends.select import KVCache
from kvedge.core.config import layer_config
from kvedge.core.formats import FORMATS
from kvedge.core.options import AttendOptions
from kvedge.core.types import Array, Dtype, ScaleDtype
from kvedge.errors import InvalidArgumentError

__all__ = ["StoreOptions"]

_MAJOR = int(transformers.__version__.split(".", 1)[0])


@dataclass(frozen=True)
class StoreOptions:
    """The options of a KvedgeCache that its layers need; checked by the cache."""

    dtype: Dtype
    group_size: int | None
    scale_dtype: ScaleDtype
    key_offset: Literal["auto"] | Sequence[Array | None] | None  # arrays: one for each layer
    precision_bits: int | None
    num_threads: int | None  # None: as many as torch uses
    shares_rows: bool  # some layers of the model read the rows of another

    def check(self, num_layers: int) -> None:
        """Raise what is wrong with an option, as far as it does not depend on a layer's shape.

        Raises
        ------
        InvalidArgumentError
        """
        layer_config(self.dtype, 1, 1, 1, group_size=self.group_size, scale_dtype=self.scale_dtype)
        AttendOptions.make(
            1, 1, 1, 1, precision_bits=self.precision_bits, num_threads=self.num_threads
        )
        offset = self.key_offset
        if isinstance(offset, str):
            if offset != "auto":
                raise InvalidArgumentError(f"key_offset must be 'auto' or arrays, not {offset!r}")
        elif offset is not None and len(offset) != num_layers:
            raise InvalidArgumentError(
                f"key_offset must have an array (or None) for each of {num_layers} layers, not "
                f"{len(offset)}"
            )
        if offset is not None and not FORMATS[self.dtype].has_scales:
            raise InvalidArgumentError(f"key_offset is for formats with scales, not {self.dtype}")

    def new_row(self, index: int, heads: int, head_dim: int, value_head_dim: int) -> Any:
        """Make an empty kvedge layer for a sequence in layer `index` of the model."""
        offset = self.key_offset
        if offset is not None and not isinstance(offset, str):
            offset = offset[index]  # type: ignore[assignment]
        kind: Any = KVCache._layer_types[self.dtype]
        more: dict[str, Any] = {}
        if FORMATS[self.dtype].has_scales:
            more = {
                "group_size": self.group_size,
                "scale_dtype": self.scale_dtype,
                "key_offset": offset,
            }
        return kind(None, heads, head_dim, value_head_dim=value_head_dim, **more)

    @staticmethod
    def tokens_after_crop(number: int, length: int) -> int:
        """Tokens that stay of `length` after transformers' ``crop(number)``."""
        if number <= 0 and (number < 0 or _MAJOR >= 5):
            return max(length + number, 0)
        if _MAJOR >= 5:
            raise InvalidArgumentError(
                f"crop({number}): transformers {transformers.__version__} takes a negative number, "
                "of the tokens to remove"
            )
        return min(number, length)
