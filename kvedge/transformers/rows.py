"""Rows of a batch: kvedge layers that are appended to and attended together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvedge.backends.select import KVCache


def new_row(dtype: str, heads: int, head_dim: int, value_head_dim: int, **options: Any) -> Any:
    kind = KVCache._layer_types[dtype]
    if dtype != "int8":
        options = {}
    return kind(None, heads, head_dim, value_head_dim=value_head_dim, **options)


def value_head_dim(row: Any) -> int:
    return int(row.value_head_dim)


def used_bytes(row: Any) -> int:
    return int(row.memory_bytes * len(row) // row.capacity)


def _floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float32).transpose(0, 1).contiguous().numpy()


def append(layers: list[Any], keys: torch.Tensor, values: torch.Tensor) -> None:
    for number, row in enumerate(layers):
        row.extend(_floats(keys[number]), _floats(values[number]))


def without_first(row: Any, n: int) -> Any:
    row.drop_first(n)
    return row


def decoded(layers: list[Any], of_values: bool, tokens: int) -> torch.Tensor:
    all_rows = [(row.values() if of_values else row.keys())[len(row) - tokens :] for row in layers]
    return torch.stack([torch.from_numpy(row).transpose(0, 1) for row in all_rows])


def attend(
    layers: list[Any],
    query: torch.Tensor,
    tokens: int,
    *,
    starts: list[int] | None,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    causal: bool,
    **options: Any,
) -> torch.Tensor:
    n = query.shape[2]
    if sink_logits is not None:
        options["sink_logits"] = sink_logits.detach().to(torch.float32).numpy()
    out = []
    for b, row in enumerate(layers):
        hidden = len(row) - tokens + (starts[b] if starts else 0)
        m: Any = None
        if mask is not None:
            m = mask[b if mask.shape[0] > 1 else 0].detach()
            m = m.numpy() if m.dtype == torch.bool else m.to(torch.float32).numpy()
            m = np.broadcast_to(m, (m.shape[0], n, tokens))
            fill = False if m.dtype == np.bool_ else -np.inf
            m = np.concatenate(
                [np.full((*m.shape[:2], len(row) - tokens), fill, m.dtype), m], axis=2
            )
        elif hidden:
            m = np.arange(len(row)) >= hidden
        out.append(row.attend(_floats(query[b]), mask=m, causal=causal, **options))
    return torch.from_numpy(np.stack(out)).to(query.dtype)
