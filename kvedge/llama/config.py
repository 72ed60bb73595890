"""What a model looks like: its sizes, its RoPE, and where it departs from Llama."""

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
    """Sizes of a model of Llama's kind, and what its relatives do otherwise.

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
    ropes : tuple of Rope or None, optional
        One for each layer, where they differ: Gemma 3's sliding layers have another base, and one
        in four layers of SmolLM3 has none.
    rope_magnitude : float
        Turned channels are multiplied by it (LongRoPE).
    windows : tuple of int or None, optional
        Tokens that each layer sees; None: all.
    activation : {"silu", "gelu"}
        Of the feed-forward network; GELU in its tanh form (Gemma).
    attention_scale : float, optional
        Logits of attention are multiplied by it; None: 1 / sqrt(head_dim).
    attention_softcap, logit_softcap : float, optional
        Logits x of attention, or of the next token, become cap * tanh(x / cap) (Gemma 2).
    embedding_scale, residual_scale, logit_scale : float
        Factors of token embeddings (Gemma, Granite), of what each half of a layer adds, and of the
        logits (Granite).
    context_reason : str
        Why `max_seq_len` is less than the file's own context length, where it is.

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
    ropes: tuple[Rope | None, ...] | None = None
    rope_magnitude: float = 1.0
    windows: tuple[int | None, ...] | None = None
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    context_reason: str = field(default="", compare=False)

    def rope_of(self, layer: int) -> Rope | None:
        """How a layer turns queries and keys; None: not at all."""
        return self.rope if self.ropes is None else self.ropes[layer]

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer sees; None: all."""
        return None if self.windows is None else self.windows[layer]

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
        for name in ("ropes", "windows"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_layers:
                raise InvalidArgumentError(f"{len(values)} {name} for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows or ()):
            raise InvalidArgumentError(f"windows must be 1 or more, got {self.windows}")
        if self.activation not in ("silu", "gelu"):
            raise InvalidArgumentError(f"activation must be silu or gelu, got {self.activation!r}")
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
