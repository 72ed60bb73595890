"""The shapes of attention that are measured, named by the models they come from."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

__all__ = ["CONTEXTS", "SHAPES", "AttentionShape", "parse_shape"]

#: Context lengths (tokens) that the benchmarks choose from: 512 to 131072.
CONTEXTS = tuple(512 << i for i in range(9))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer of a model."""

    name: str
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def values_per_token(self) -> int:
        """Numbers that one token adds to a layer's cache, keys and values together."""
        return 2 * self.num_kv_heads * self.head_dim

    def __str__(self) -> str:
        numbers = f"{self.num_heads} query heads, {self.num_kv_heads} KV heads of {self.head_dim}"
        return f"{self.name}: {numbers}" if self.name else numbers


#: Sources: config.json of each model (num_attention_heads, num_key_value_heads, head_dim).
SHAPES = (
    AttentionShape("Llama-3.2-1B", 32, 8, 64),
    AttentionShape("Qwen2.5-0.5B", 14, 2, 64),
    AttentionShape("Qwen3-0.6B", 16, 8, 128),
    AttentionShape("Phi-3-mini", 32, 32, 96),
    AttentionShape("Gemma-3-1B", 4, 1, 256),
    AttentionShape("SmolLM2-135M", 9, 3, 64),
    AttentionShape("Phi-2", 32, 32, 80),
)


def parse_shape(text: str) -> AttentionShape:
    """Return the shape that ``text`` names (upper or lower case), or spells out as ``HQ,HKV,D``.

    Raises
    ------
    argparse.ArgumentTypeError
        For a name that is not known, or numbers that are no shape.
    """
    for shape in SHAPES:
        if shape.name.lower() == text.strip().lower():
            return shape
    try:
        num_heads, num_kv_heads, head_dim = (int(part) for part in text.split(","))
    except ValueError:
        names = ", ".join(shape.name for shape in SHAPES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape: write one of {names}, or query heads, KV heads and head "
            "dimension as 32,8,64"
        ) from None
    if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape: three numbers of 1 or more, the first (query heads) a multiple "
            "of the second (KV heads)"
        )
    numbers = (num_heads, num_kv_heads, head_dim)
    for shape in SHAPES:
        if (shape.num_heads, shape.num_kv_heads, shape.head_dim) == numbers:
            return shape
    return AttentionShape("", *numbers)
