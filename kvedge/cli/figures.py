"""The figures of a run that ``kvedge generate`` tells: bytes of the cache, tokens a second."""

from __future__ import annotations

from typing import Any

from kvedge.console.sizes import format_size
from kvedge.core.formats import format_of

__all__ = ["cache_figures", "describe_cache", "stored_as", "tokens_and_speed"]


def stored_as(cache: Any, name: str) -> Any:
    """A fact of how a cache is stored: of all layers, or in words where they differ."""
    local = getattr(cache, "part", cache)  # what a rank holds of a ShardedKVCache
    found = dict.fromkeys(getattr(local.layer(i), name) for i in range(local.num_layers))
    return next(iter(found)) if len(found) == 1 else ", ".join(map(str, found))


def cache_figures(cache: Any) -> dict[str, Any]:
    """Return what a cache takes for the tokens it holds, and what float32 would take (bytes).

    Of a ShardedKVCache: what all ranks take, how many they are, and what this one takes.
    """
    local = getattr(cache, "part", cache)
    layers = [local.layer(i) for i in range(local.num_layers)]
    scaled = any(format_of(dtype).has_scales for c in layers for dtype in (c.dtype, c.value_dtype))
    fp32 = len(cache) * (cache.fp32_memory_bytes // cache.capacity)
    ranks = getattr(cache, "num_ranks", None)  # of a ShardedKVCache
    used = cache.used_bytes if ranks is None else cache.total_bytes
    figures = {
        "dtype": stored_as(cache, "dtype"),
        "group_size": stored_as(cache, "group_size") if scaled else None,
        "tokens": len(cache),
        "used_bytes": used,
        "fp32_bytes": fp32,
        "ratio": fp32 / used if used else None,
        "reserved_bytes": cache.memory_bytes,
    }
    return figures if ranks is None else figures | {"ranks": ranks, "part_bytes": cache.used_bytes}


def describe_cache(figures: dict[str, Any]) -> str:
    """Return :func:`cache_figures` in words."""
    text = f"{figures['dtype']}, {figures['tokens']} tokens in {format_size(figures['used_bytes'])}"
    if "ranks" in figures:
        text += f" over {figures['ranks']} ranks, {format_size(figures['part_bytes'])} here"
    if figures["dtype"] == "float32" or not figures["ratio"]:
        return text
    return f"{text}; float32: {format_size(figures['fp32_bytes'])}, {figures['ratio']:.2f}x"


def tokens_and_speed(count: int, speed: float | None) -> str:
    """Write a number of tokens and, where it was measured, how many of them a second."""
    text = f"{count} token{'' if count == 1 else 's'}"
    return text if speed is None else f"{text}, {speed:.1f} tokens/s"
