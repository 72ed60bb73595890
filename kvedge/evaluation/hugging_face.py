"""A checkpoint of Hugging Face transformers as the model that reads the text, on a KvedgeCache."""

from __future__ import annotations

from typing import Any

import numpy as np

from .choice import CacheChoice

__all__ = ["HuggingFaceSubject"]


class HuggingFaceSubject:
    """A causal language model of transformers, loaded with ``attn_implementation="kvedge"``.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In float32, on the CPU.
    num_threads : int, optional
        Threads of attention.
    """

    def __init__(self, model: Any, num_threads: int | None = None) -> None:
        self.model = model
        self.num_threads = num_threads
        self._text = model.config.get_text_config()

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        return int(self._text.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self._text.vocab_size)

    def reader(self, choice: CacheChoice) -> _Reader:
        """Return a reader on an empty cache, which has no option that the choice does not name."""
        return _Reader(self, choice)


class _Reader:
    def __init__(self, subject: HuggingFaceSubject, choice: CacheChoice) -> None:
        self._model = subject.model
        self._dtype = choice.dtype
        self._options = {
            **({} if "policy" in choice.cache_options else {"key_scale": None}),
            "num_threads": subject.num_threads,
            **choice.cache_options,
            **choice.attention_options,
        }
        self.clear()

    def clear(self) -> None:
        from kvedge.transformers import KvedgeCache

        self._cache: Any = KvedgeCache(self._model.config, self._dtype, **self._options)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        import torch

        from kvedge.transformers._installed import cache_argument

        ids = torch.tensor(np.asarray(tokens, np.int64))[None]
        cache = {cache_argument(self._model): self._cache}
        with torch.inference_mode():
            found = self._model(input_ids=ids, use_cache=True, **cache)
        self._cache.evict()
        logits: np.ndarray = found.logits[0].float().numpy()
        return logits

    @property
    def used_bytes(self) -> int:
        return int(self._cache.memory_bytes)
