"""Keys, values and queries that a model makes of a text, as of one context of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedge import Float32KvLayer, KVCache, Rope
from kvedge.console.exits import CommandError

__all__ = ["LayerRows", "rows_of_model"]


@dataclass(frozen=True)
class LayerRows:
    """What one layer of a model stores of a context, and what its last tokens ask."""

    keys: np.ndarray  # float32 (context, num_kv_heads, head_dim)
    values: np.ndarray  # likewise
    queries: np.ndarray  # float32 (rows, num_heads, head_dim), of the last tokens


class _Noting:
    """A cache that notes the queries which attend to it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.queries: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def __len__(self) -> int:
        return len(self.cache)

    def attend(self, layer: int, query: np.ndarray, **options: Any) -> Any:
        self.queries[layer] = query
        return self.cache.attend(layer, query, **options)


def rows_of_model(model: Any, tokens: Sequence[int], context: int, rows: int) -> list[LayerRows]:
    """Run a model over the first `context` tokens, in windows of the length that it was made for.

    Each window is read from its beginning. Its keys, and the queries of the last one, are then
    turned by RoPE to the positions that they have in the whole.

    Parameters
    ----------
    model : kvedge.llama.LlamaModel
    tokens : sequence of int
        Of a text; at least `context`.
    context : int
    rows : int
        Queries of the last tokens that are wanted, at most those of a window.

    Returns
    -------
    list of LayerRows
        One for each layer.

    Raises
    ------
    CommandError
        The text is too short, or the model has layers with windows or several ropes.
    """
    config = model.config
    window = config.max_seq_len
    if len(tokens) < context:
        raise CommandError(f"the text has {len(tokens):,} tokens, {context:,} are needed (--text)")
    first_cache = model.new_cache("float32")
    if any(first_cache.layer(i).window is not None for i in range(config.num_layers)):
        raise CommandError("a model whose layers all keep the whole context is needed")
    keys: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(config.num_layers)]
    queries: list[np.ndarray] = []
    for start in range(0, context, window):
        part = tokens[start : min(start + window, context)]
        noting = _Noting(model.new_cache("float32", max_seq_len=window))
        model.forward(part, noting, last_only=True)
        for i in range(config.num_layers):
            layer = noting.cache.layer(i)
            keys[i].append(_turned(layer.keys(), start, config.rope))
            values[i].append(layer.values())
        queries = [
            _turned(noting.queries[i][-rows:], start, config.rope) for i in range(config.num_layers)
        ]
    return [
        LayerRows(np.concatenate(k), np.concatenate(v), q)
        for k, v, q in zip(keys, values, queries, strict=True)
    ]


def _turned(rows: np.ndarray, by: int, rope: Rope) -> np.ndarray:
    """Rows (n, heads, head_dim) that RoPE has turned, turned `by` positions further."""
    n, heads, head_dim = rows.shape
    layer = Float32KvLayer(n, heads, head_dim)
    layer.extend(rows, rows)
    if by:
        layer.shift(by, rope=rope)
    return np.array(layer.keys())
