"""A checkpoint of Hugging Face transformers as the model that reads the text, on a KvedgeCache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .choice import FLOAT32, CacheChoice
from .subject import LayerShape, Tell, squares

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

    def layers(self) -> list[LayerShape | None]:
        """Return what a policy says the storage of, layer by layer; None: it has no keys."""
        from kvedge.layer.layer import store_of

        reader = self.reader(FLOAT32)
        reader.read(np.zeros(1, np.int64))  # layers learn their shape from the first token
        found: list[LayerShape | None] = []
        for layer in reader.cache.layers:
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            rows = getattr(layer, "rows", None)
            found.append(LayerShape.of(store_of(rows[0]).config, window) if rows else None)
        return found

    def watched(self, choices: Sequence[CacheChoice], tell: Tell) -> _Reader:
        """Return a reader on float32 that compares attention on caches beside it, as it goes."""
        return _WatchedReader(self, [_Reader(self, choice) for choice in choices], tell)


class _Reader:
    def __init__(self, subject: HuggingFaceSubject, choice: CacheChoice) -> None:
        self._model = subject.model
        stored = {"dtype": choice.dtype, "key_scale": None}
        self._options = {
            **({} if "policy" in choice.cache_options else stored),
            "num_threads": subject.num_threads,
            **choice.cache_options,
            **choice.attention_options,
        }
        self.clear()

    def clear(self) -> None:
        from kvedge.transformers import KvedgeCache

        self.cache: Any = KvedgeCache(self._model.config, **self._options)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        import torch

        from kvedge.transformers._installed import cache_argument

        ids = torch.tensor(np.asarray(tokens, np.int64))[None]
        cache = {cache_argument(self._model): self.cache}
        with torch.inference_mode():
            found = self._model(input_ids=ids, use_cache=True, **cache)
        self.cache.evict()
        logits: np.ndarray = found.logits[0].float().numpy()
        return logits

    @property
    def used_bytes(self) -> int:
        return int(self.cache.memory_bytes)


class _WatchedReader(_Reader):
    def __init__(self, subject: HuggingFaceSubject, beside: list[_Reader], tell: Tell) -> None:
        self._beside = beside
        self._tell = tell
        super().__init__(subject, FLOAT32)

    def clear(self) -> None:
        super().clear()
        for reader in self._beside:
            reader.clear()
        for index, layer in enumerate(self.cache.layers):
            if hasattr(layer, "rows"):
                others = [reader.cache.layers[index] for reader in self._beside]
                _watch(layer, others, partial(self._tell, index))


def _watch(layer: Any, others: list[Any], tell: Any) -> None:
    """Let layers get the tokens that one gets, and compare what attention gives of them."""
    update, attend = layer.update, layer.attend

    def update_all(*arguments: Any, **options: Any) -> Any:
        for other in others:
            other.update(*arguments, **options)
        return update(*arguments, **options)

    def attend_all(*arguments: Any, **options: Any) -> Any:
        exact = attend(*arguments, **options)
        for index, other in enumerate(others):
            found = other.attend(*arguments, **options)
            tell(index, squares(found.float().numpy(), exact.float().numpy()))
        return exact

    layer.update, layer.attend = update_all, attend_all
