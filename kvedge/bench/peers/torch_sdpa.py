"""PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload

__all__ = ["TorchSdpa"]

_BYTES = {"fp32": 4, "bf16": 2}
_TRIALS = 3
_TRIAL_SECONDS = 1.0  # after which no way is tried again


class TorchSdpa(Competitor):
    """Keys and values as (1, num_kv_heads, T, head_dim), as Hugging Face's caches keep them.

    There are two ways to let query heads share KV heads without repeating the cache in memory:
    ``enable_gqa=True``, or the heads of a group as so many query rows of one head, which is the
    same for a single token as no row hides anything from another. The faster one here is taken.

    A prompt needs a mask where tokens precede it (``is_causal`` aligns the first query with the
    first key): a boolean one, or -inf that is added. Again the fastest way is taken.
    """

    package = "torch"
    module = "torch"

    def __init__(self, kind: str) -> None:
        super().__init__(f"torch-{kind}")
        self._kind = kind
        self._stored: list[tuple[Any, Any]] = []
        self._attend: Callable[[Any, Any], Any] | None = None
        self._is_prompt = False

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """Four or two bytes per value."""
        return _BYTES[self._kind] * shape.values_per_token

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Store the tensors and find the faster of the two ways."""
        torch: Any = import_module("torch")
        torch.set_num_threads(num_threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self._kind]
        for _ in range(copies):
            keys, values = (
                torch.from_numpy(rows).transpose(0, 1)[None].to(dtype).contiguous()
                for rows in (workload.keys, workload.values)
            )
            self._stored.append((keys, values))
        query = torch.from_numpy(workload.query).to(dtype)
        self._is_prompt = query.ndim == 3
        if self._is_prompt:
            ways = self._prompt_ways(query, workload)
        else:
            ways = self._ways(query, workload.shape)
        seconds = {name: _fastest(attend, self._stored) for name, attend in ways.items()}
        best = min(seconds, key=seconds.__getitem__)
        self._attend = ways[best]
        self.note = best if len(ways) > 1 else ""

    def _ways(self, query: Any, shape: AttentionShape) -> dict[str, Callable[[Any, Any], Any]]:
        sdpa = import_module("torch").nn.functional.scaled_dot_product_attention
        rows = query.reshape(1, shape.num_kv_heads, shape.group, shape.head_dim)
        ways = {"heads of a group as query rows": lambda keys, values: sdpa(rows, keys, values)}
        if shape.group > 1:
            heads = query.reshape(1, shape.num_heads, 1, shape.head_dim)
            ways["enable_gqa=True"] = lambda keys, values: sdpa(
                heads, keys, values, enable_gqa=True
            )
        return ways

    def _prompt_ways(self, query: Any, workload: Workload) -> dict[str, Callable[[Any, Any], Any]]:
        torch: Any = import_module("torch")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        heads = query.transpose(0, 1)[None].contiguous()  # (1, num_heads, n, head_dim)
        shared = workload.shape.group > 1

        def way(**how: Any) -> Callable[[Any, Any], Any]:
            return lambda keys, values: sdpa(heads, keys, values, enable_gqa=shared, **how)

        if workload.context == workload.num_rows:
            return {"is_causal=True": way(is_causal=True)}
        seen = torch.from_numpy(~workload.hidden())
        added = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, float("-inf"))
        return {"a boolean mask": way(attn_mask=seen), "a mask added": way(attn_mask=added)}

    def run(self, copy: int) -> object:
        """Attend in the way that was found faster."""
        assert self._attend is not None
        return self._attend(*self._stored[copy])

    def as_array(self, output: object) -> np.ndarray:
        """Widen; both ways have the heads in the same order."""
        tensor: Any = output
        if self._is_prompt:  # (1, num_heads, n, head_dim)
            return np.asarray(tensor[0].float().transpose(0, 1).numpy())
        return np.asarray(tensor.float().reshape(-1, tensor.shape[-1]).numpy())

    def release(self) -> None:
        """Drop the tensors."""
        self._stored = []
        self._attend = None


def _fastest(attend: Callable[[Any, Any], Any], stored: list[tuple[Any, Any]]) -> float:
    best, spent = float("inf"), 0.0
    for i in range(_TRIALS):
        start = time.perf_counter()
        attend(*stored[i % len(stored)])
        seconds = time.perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > _TRIAL_SECONDS:
            break
    return best
