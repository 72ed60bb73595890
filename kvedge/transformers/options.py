"""How the rows of a KvedgeCache are stored, and what the installed transformers means by crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers

from kvedge.core.types import Array, Dtype, ScaleDtype
from kvedge.errors import InvalidArgumentError
from kvedge.transformers import rows

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

    def new_row(self, index: int, heads: int, head_dim: int, value_head_dim: int) -> Any:
        """Make an empty kvedge layer for a sequence in layer `index` of the model."""
        offset = self.key_offset
        if offset is not None and not isinstance(offset, str):
            offset = offset[index]  # type: ignore[assignment]
        return rows.new_row(
            self.dtype, heads, head_dim, value_head_dim,
            group_size=self.group_size, scale_dtype=self.scale_dtype, key_offset=offset,
        )  # fmt: skip

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
