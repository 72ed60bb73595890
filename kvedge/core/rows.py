"""The shape of a row: the elements of one token and KV head, of keys or of values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RowShape"]


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a format is told of the rows it stores; kvedge_row_shape of csrc/formats/format.h."""

    dim: int  # elements
    group_size: int  # elements that share a scale, at most dim
    num_groups: int  # scales; 0 for formats without
    scale_dtype: str

    @classmethod
    def of(cls, dim: int, group_size: int, scale_dtype: str, has_scales: bool) -> RowShape:
        """The shape of rows of `dim` elements in groups of `group_size`, or one shorter group."""
        group_size = min(group_size, dim)
        return cls(dim, group_size, -(-dim // group_size) if has_scales else 0, scale_dtype)
