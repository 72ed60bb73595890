"""The settings of a MultiHeadKvCache."""

from __future__ import annotations

from dataclasses import dataclass

from kvedge.core.config import MAX_HEAD_DIM, LayerConfig, as_int, layer_config, one_of
from kvedge.core.formats import SCALE_TYPES
from kvedge.core.types import ScaleDtype
from kvedge.errors import InvalidArgumentError

__all__ = ["MAX_PROJECTIONS", "KvCacheConfig"]

MAX_PROJECTIONS = 4096


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
        Signs of random projections kept of what storing a key loses, 0 to 4096 per key. They make
        scores unbiased, and noisier; 0, the default, gives the smaller error (docs/formats.md).
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
            ("projections", 0, MAX_PROJECTIONS),
            ("seed", 0, (1 << 64) - 1),
        ):
            number = as_int(getattr(self, name), name)
            if not least <= number <= most:
                raise InvalidArgumentError(f"{name} must be from {least} to {most}, not {number}")
            object.__setattr__(self, name, number)
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
