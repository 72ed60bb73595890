"""The weights of a model, named as in Llama's paper: float32 arrays, or matrices in fewer bits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from kvedge import system

from ..errors import OutOfMemoryError
from .config import LlamaConfig
from .matrix import Weight

__all__ = ["LayerWeights", "LlamaWeights", "check_fits", "tensor_shapes"]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer.

    Query, key and value projections are stacked into one matrix, and so are the two that open the
    feed-forward network: one product reads them in one pass.
    """

    attention_norm: np.ndarray  # (dim,)
    wqkv: Weight  # ((num_heads + 2 * num_kv_heads) * head_dim, dim): query, key, value rows
    bqkv: np.ndarray | None  # ((num_heads + 2 * num_kv_heads) * head_dim,) or None
    wo: Weight  # (dim, num_heads * head_dim)
    ffn_norm: np.ndarray  # (dim,)
    w13: Weight  # (2 * hidden_dim, dim): gate rows, then up rows
    w2: Weight  # (dim, hidden_dim)
    # What only some models have: norms of each head's query and key (Qwen3, Gemma 3), and of what
    # attention and feed-forward network give (Gemma 2 and 3).
    q_norm: np.ndarray | None = None  # (head_dim,)
    k_norm: np.ndarray | None = None  # (head_dim,)
    attention_post_norm: np.ndarray | None = None  # (dim,)
    ffn_post_norm: np.ndarray | None = None  # (dim,)


@dataclass(frozen=True)
class LlamaWeights:
    """Weights of a whole model."""

    token_embedding: Weight  # (vocab_size, dim)
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray  # (dim,)
    output: Weight  # (vocab_size, dim); the token embedding itself where the two are tied


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


def check_fits(path: str | os.PathLike[str], needed: int) -> None:
    """Refuse weights that will not fit in memory, before they are loaded.

    Parameters
    ----------
    path : path-like
        The model, for the message.
    needed : int
        Bytes of the weights as they will be held.

    Raises
    ------
    OutOfMemoryError
    """
    available = system.machine().ram_available_bytes
    if available is not None and needed > available:
        size = os.path.getsize(path)
        raise OutOfMemoryError(
            f"{path}: its weights take {needed / 2**30:.2f} GiB in memory (the file has "
            f"{size / 2**30:.2f}), and {available / 2**30:.2f} GiB are available"
        )
