"""What a Llama-architecture model looks like: its sizes, its RoPE, its epsilon."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import InvalidArgumentError
from ..rope import Rope

__all__ = ["LlamaConfig", "rope_frequencies"]

_SIZES = (
    "dim",
    "hidden_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_seq_len",
)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-architecture model.

    Parameters
    ----------
    dim : int
        Width of the residual stream.
    hidden_dim : int
        Width of the feed-forward network.
    num_layers, num_heads, num_kv_heads, head_dim : int
        Layers, query heads, key/value heads (`num_heads` is a multiple of it), channels per head.
    vocab_size : int
        Tokens the model knows.
    max_seq_len : int
        Context length in tokens that the model was trained for.
    norm_eps : float
        Added to the mean square in RMSNorm.
    rope : Rope
        Rotation of queries and keys; ``rope.inv_freq`` is always set here, in radians per token.

    Raises
    ------
    InvalidArgumentError
        For sizes that cannot belong together.
    """

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise InvalidArgumentError(f"{name} must be an integer of 1 or more, got {size!r}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} query heads "
                f"and {self.num_kv_heads} KV heads"
            )
        if not (np.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise InvalidArgumentError(f"norm_eps must be 0 or more, got {self.norm_eps!r}")


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scale: float = 1.0,
    factors: np.ndarray | None = None,
) -> np.ndarray:
    """Angle that each pair of channels turns per token.

    Parameters
    ----------
    rotary_dim : int
        Channels of a head that are rotated; even.
    base : float
        RoPE base (Su et al. 2021, "RoFormer": theta_i = base^(-2i / rotary_dim)).
    scale : float
        Linear position scaling (Chen et al. 2023): positions are divided by it.
    factors : ndarray, shape (rotary_dim / 2,), optional
        Each pair's frequency is divided by its factor: GGUF's ``rope_freqs`` tensor (Llama 3).

    Returns
    -------
    ndarray, shape (rotary_dim / 2,), float64
        Radians per token.

    Raises
    ------
    InvalidArgumentError
        If `rotary_dim` is odd, or `base`, `scale` or a factor is not a positive number.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise InvalidArgumentError(f"RoPE turns pairs: rotary_dim must be even, got {rotary_dim}")
    if not (np.isfinite(base) and base > 0 and np.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"RoPE base and scale must be positive, got {base} and {scale}")
    pair = np.arange(0, rotary_dim, 2, dtype=np.float64)  # (rotary_dim / 2,)
    frequencies = base ** (-pair / rotary_dim) / scale
    if factors is None:
        return frequencies
    factors = np.asarray(factors, dtype=np.float64)
    if factors.shape != frequencies.shape or not (np.isfinite(factors) & (factors > 0)).all():
        raise InvalidArgumentError(
            f"RoPE factors must be {frequencies.size} positive numbers, got shape {factors.shape}"
        )
    return np.asarray(frequencies / factors)
