"""The arrays of a Llama-architecture model, float32 and C-contiguous, named as in the paper."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import LlamaConfig

__all__ = ["LayerWeights", "LlamaWeights", "tensor_shapes"]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer.

    Query, key and value projections are stacked into one matrix, and so are the two that open the
    feed-forward network: one product reads them in one pass.
    """

    attention_norm: np.ndarray  # (dim,)
    wqkv: np.ndarray  # ((num_heads + 2 * num_kv_heads) * head_dim, dim): query, key, value rows
    bqkv: np.ndarray | None  # ((num_heads + 2 * num_kv_heads) * head_dim,) or None
    wo: np.ndarray  # (dim, num_heads * head_dim)
    ffn_norm: np.ndarray  # (dim,)
    w13: np.ndarray  # (2 * hidden_dim, dim): gate rows, then up rows
    w2: np.ndarray  # (dim, hidden_dim)


@dataclass(frozen=True)
class LlamaWeights:
    """Weights of a whole model."""

    token_embedding: np.ndarray  # (vocab_size, dim)
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray  # (dim,)
    output: np.ndarray  # (vocab_size, dim); the token embedding itself where the two are tied


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of one layer, by llama2.c's names; matrices are (out, in)."""
    query_dim = config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    return {
        "rms_att": (config.dim,),
        "wq": (query_dim, config.dim),
        "wk": (kv_dim, config.dim),
        "wv": (kv_dim, config.dim),
        "wo": (config.dim, query_dim),
        "rms_ffn": (config.dim,),
        "w1": (config.hidden_dim, config.dim),
        "w2": (config.dim, config.hidden_dim),
        "w3": (config.hidden_dim, config.dim),
    }
