"""What a layer costs a token beyond attention itself: from transformers' tensors to its output.

    taskset -c 1 python tools/transformers_layer_cost.py

A layer of Qwen2.5-0.5B's shape, batch 1, 32 tokens held: update() and the attention function of a
KvedgeCache, of a DynamicCache with sdpa, and kvedge's own push() and attend() on arrays. All in
turn on one thread; microseconds, the best of 300 rounds and their median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvedge
from kvedge.transformers import KvedgeCache
from kvedge.transformers.attention import kvedge_attention

HEADS, KV_HEADS, DIM, HELD, STEPS = 14, 2, 64, 32, 20


class Attention(torch.nn.Module):
    """What an attention function asks of a module."""

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


def by_cache(make: Callable[[Any], Any], attend: Any, dtype: torch.dtype) -> Callable[[], float]:
    """Seconds that a token takes with a cache of transformers."""
    config = Qwen2Config(num_hidden_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    module = Attention().eval()
    held, new, query = (
        torch.randn(1, heads, tokens, DIM).to(dtype)
        for heads, tokens in ((KV_HEADS, HELD), (KV_HEADS, 1), (HEADS, 1))
    )

    def seconds() -> float:
        cache = make(config)
        cache.update(held, held, 0)
        start = time.perf_counter()
        for _ in range(STEPS):
            attend(module, query, *cache.update(new, new, 0), None, scaling=DIM**-0.5)
        return (time.perf_counter() - start) / STEPS

    return seconds


def by_layer() -> float:
    """Seconds that a token takes with a layer of kvedge."""
    layer = kvedge.QuantizedKvLayer(HELD + STEPS, KV_HEADS, DIM)
    layer.extend(*np.ones((2, HELD, KV_HEADS, DIM), np.float32))
    new, query = np.ones((KV_HEADS, DIM), np.float32), np.ones((HEADS, DIM), np.float32)
    out = np.empty_like(query)
    start = time.perf_counter()
    for _ in range(STEPS):
        layer.push(new, new)
        layer.attend(query, out=out, num_threads=1)
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        ways = {
            "KvedgeCache": by_cache(KvedgeCache, kvedge_attention, dtype),
            "DynamicCache, sdpa": by_cache(
                lambda config: DynamicCache(config=config), sdpa_attention_forward, dtype
            ),
            "push() and attend()": by_layer,
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        with torch.inference_mode():
            for _ in range(300):
                for name, way in ways.items():
                    taken[name].append(way() * 1e6)
        for name, each in taken.items():
            best, median = min(each), statistics.median(each)
            print(f"{dtype!s:16}{name:22}{best:8.1f}{median:8.1f}")


if __name__ == "__main__":
    main()
