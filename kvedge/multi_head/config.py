"""The settings of a MultiHeadKvCache."""

from __future__ import annotations

from dataclasses import dataclass

from kvedge.core.config import MAX_HEAD_DIM, LayerConfig, as_int, layer_config, one_of
from kvedge.core.formats import SCALE_TYPES
from kvedge.core.types import ScaleDtype
from kvedge.errors import InvalidArgumentError

__all__ = ["KvCacheConfig"]


@dataclass(frozen=True)
class KvCacheConfig:
    """How each head of a :class:`~kvedge.MultiHeadKvCache` stores keys and values.

    Parameters
    ----------
    head_dim : int
        Channels of a key and of a value, 1 to 1024.
    bits : int
        Bits of a stored value, 2 to 8; a row has a scale besides.
    projections : int
        0. Signs of random projections of what storing a key loses are no longer kept: a further
        bit costs less for a smaller error.
    seed : int
        Of the random rotations, 0 to 2^64 - 1. Head h takes seed + h.
    scale_dtype : {"float16", "float32"}
        What the scale of a row is stored as. float16 refuses rows whose rotation passes 29,100.

    Raises
    ------
    InvalidArgumentError
    """

    head_dim: int
    bits: int
    projections: int = 0
    seed: int = 0
    scale_dtype: ScaleDtype = "float16"

    def __post_init__(self) -> None:
        """Check, and make plain ints of whatever integers came."""
        for name, least, most in (
            ("head_dim", 1, MAX_HEAD_DIM),
            ("bits", 2, 8),
            ("seed", 0, (1 << 64) - 1),
        ):
            number = as_int(getattr(self, name), name)
            if not least <= number <= most:
                raise InvalidArgumentError(f"{name} must be from {least} to {most}, not {number}")
            object.__setattr__(self, name, number)
        if as_int(self.projections, "projections"):
            raise InvalidArgumentError(
                f"projections must be 0, not {self.projections}: take a further bit instead"
            )
        one_of(self.scale_dtype, "scale_dtype", SCALE_TYPES)

    def layer_config(self, num_heads: int, capacity: int) -> LayerConfig:
        """The layer that holds the rotated rows of so many heads."""
        shape = layer_config("int8", capacity, num_heads, self.head_dim)  # checks num_heads
        return LayerConfig(
            dtype=f"grid{self.bits}",
            capacity=capacity,
            num_kv_heads=shape.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            group_size=self.head_dim,
            scale_dtype=self.scale_dtype,
        )
