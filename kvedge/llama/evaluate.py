"""Measures how well a model predicts a text, with its keys and values in a given cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from .model import LlamaModel

__all__ = ["nats_per_token"]

_CHUNK = 512  # tokens at once: their logits take vocab_size floats each


def nats_per_token(
    model: LlamaModel,
    tokens: Sequence[int] | np.ndarray,
    *,
    window: int | None = None,
    num_threads: int | None = None,
    **cache_options: Any,
) -> float:
    """Mean negative log-likelihood of a text's tokens; perplexity is its exponential.

    The text is cut into windows one after the other, each predicted from its own beginning on.
    Keys and values go through the cache as in generation, so the figure includes what its storage
    format costs.

    Parameters
    ----------
    model : LlamaModel
        The model.
    tokens : sequence of int
        The text, two tokens or more.
    window : int, optional
        Tokens per window; the model's context length unless given.
    num_threads : int, optional
        Threads for attention.
    **cache_options
        Arguments of :meth:`LlamaModel.new_cache`, such as ``dtype="float32"``.

    Returns
    -------
    float
        Nats per predicted token: of a window of n tokens, n - 1 are predicted.

    Raises
    ------
    InvalidArgumentError
        If the text has fewer than two tokens, or `window` is below 2 or beyond the context.
    """
    limit = model.config.max_seq_len
    window = limit if window is None else window
    if not 2 <= window <= limit:
        raise InvalidArgumentError(f"window must be 2 to {limit} tokens, got {window}")
    tokens = np.asarray(tokens)
    if tokens.size < 2:
        raise InvalidArgumentError(f"a text of 2 tokens or more is needed, got {tokens.size}")
    total, count = 0.0, 0
    cache = model.new_cache(**cache_options)
    for start in range(0, tokens.size - 1, window):
        part = tokens[start : start + window]  # (n,)
        cache.clear()
        for at in range(0, part.size - 1, _CHUNK):
            targets = part[at + 1 : at + 1 + _CHUNK]  # (m,)
            logits = model.forward(part[at : at + targets.size], cache, num_threads=num_threads)
            total += _negative_log_likelihood(logits, targets).sum()  # of (m, vocab_size)
        count += part.size - 1
    return float(total / count)


def _negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[target] per row: (n, vocab_size), (n,) -> (n,), float64."""
    logits = logits.astype(np.float64)
    largest = logits.max(axis=-1)
    log_sum = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return np.asarray(log_sum - logits[np.arange(targets.size), targets])
