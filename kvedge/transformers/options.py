"""How the rows of a KvedgeCache are stored, and what the installed transformers means by crop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import transformers

from kvedge.cache.cache import KVCache
from kvedge.core.config import MAX_HEAD_DIM
from kvedge.core.options import AttendOptions, PrecisionBits
from kvedge.core.recommended import AUTO, by_name
from kvedge.core.storage import NAMES, Storage
from kvedge.errors import InvalidArgumentError
from kvedge.eviction import Eviction
from kvedge.layer_policy import LayerPolicy

__all__ = ["StoreOptions", "is_for_each_layer", "of_policy", "storage_of", "stored_text"]

_MAJOR = int(transformers.__version__.split(".", 1)[0])

_TRIED = MAX_HEAD_DIM  # channels of the layer that options are tried on: any group_size fits


_PLAIN = {field.name: field.default for field in fields(Storage)}


def storage_of(dtype: Any, options: Mapping[str, Any], *, over_ranks: bool) -> dict[str, Any]:
    """Options of a KVCache, as a KvedgeCache is told them, in place of names what they set.

    So what a conversation is saved with does not depend on what a name means.
    """
    stored = {"key_scale": AUTO, **options, "dtype": dtype}
    if not is_for_each_layer(dtype):
        return by_name(stored, over_ranks=over_ranks)
    if any(is_for_each_layer(value) and len(value) != len(dtype) for value in stored.values()):
        return stored  # which StoreOptions.check refuses
    layers = [by_name(_of_layer(stored, i), over_ranks=over_ranks) for i in range(len(dtype))]
    names = dict.fromkeys(name for layer in layers for name in layer)
    return {name: [layer.get(name, _PLAIN.get(name)) for layer in layers] for name in names}


def is_for_each_layer(value: Any) -> bool:
    """Whether an option has an element for each layer of the model, and is not for all alike."""
    if isinstance(value, (str, Mapping)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__")


def _of_layer(storage: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The options of one layer of the model."""
    return {
        name: value[index] if is_for_each_layer(value) else value for name, value in storage.items()
    }


def of_policy(policy: Any, besides: Mapping[str, Any]) -> dict[str, Any]:
    """Options of storage as a policy, or its file, has them; `besides` are those beside it."""
    for name, value in besides.items():
        if name in NAMES and (name, value) != ("dtype", AUTO):
            raise InvalidArgumentError(f"{name} does not go with a policy, which says it")
    if not isinstance(policy, LayerPolicy):
        policy = LayerPolicy.load(policy)
    unknown = {name: value for name, value in besides.items() if name not in NAMES}
    of_layers = _PLAIN | policy.of_each_layer() | unknown  # which are refused as without a policy
    return storage_of(of_layers.pop("dtype"), of_layers, over_ranks=False)


@dataclass(frozen=True)
class StoreOptions:
    """The options of a KvedgeCache that its layers need; checked by the cache."""

    storage: dict[str, Any]  # of NAMES: what was given or is recommended
    precision_bits: PrecisionBits
    num_threads: int | None  # None: as many as torch uses
    shares_rows: bool  # some layers of the model read the rows of another
    state_dtype: str | None = None  # of recurrent states; None: that of the model
    eviction: Eviction | None = None  # of layers without a window; None: none

    def check(self, num_layers: int) -> None:
        """Raise what is wrong with an option, as far as it does not depend on a layer's shape.

        Raises
        ------
        InvalidArgumentError
        """
        for name, value in self.storage.items():
            if name not in NAMES:
                raise InvalidArgumentError(
                    f"{name} is no option of a KvedgeCache: it has {', '.join(NAMES)}, "
                    "precision_bits and num_threads"
                )
            if is_for_each_layer(value) and len(value) != num_layers:
                raise InvalidArgumentError(
                    f"{name} must be one for all or have one for each of {num_layers} layers, not "
                    f"{len(value)}"
                )
        AttendOptions.make(
            1,
            1,
            1,
            1,
            precision_bits=self.precision_bits,
            num_threads=self.num_threads,
        )
        for index in range(num_layers):
            # Arrays have the shape of a layer's rows, which is not known yet: ones stand for them.
            tried = {
                name: np.ones((1, _TRIED), np.float32) if hasattr(value, "__dlpack__") else value
                for name, value in _of_layer(self.storage, index).items()
            }
            self._row(1, _TRIED, None, tried)
            if not any(map(is_for_each_layer, self.storage.values())):
                break  # they are all alike

    def new_row(self, index: int, heads: int, head_dim: int, value_head_dim: int) -> Any:
        """Make an empty kvedge layer for a sequence in layer `index` of the model."""
        return self._row(heads, head_dim, value_head_dim, _of_layer(self.storage, index))

    @staticmethod
    def _row(heads: int, head_dim: int, value_head_dim: int | None, storage: Any) -> Any:
        # A cache of one layer takes arrays with an axis of layers.
        vectors: dict[str, Any] = {
            name: [value] if hasattr(value, "__dlpack__") else value
            for name, value in storage.items()
        }
        cache = KVCache(1, heads, head_dim, value_head_dim=value_head_dim, **vectors)
        return cache.layer(0).copy()

    @staticmethod
    def tokens_after_crop(number: int, length: int) -> int:
        """Tokens that stay of `length` after transformers' ``crop(number)``."""
        if number <= 0 and (number < 0 or _MAJOR >= 5):
            return max(length + number, 0)
        if _MAJOR >= 5:
            raise InvalidArgumentError(
                f"crop({number}): transformers {transformers.__version__} takes a negative number, "
                "of the tokens to remove"
            )
        return min(number, length)


def stored_text(options: StoreOptions) -> str:
    """What of the options has to be equal on all ranks of a group, for a comparison."""
    texts = []
    for name, value in sorted(options.storage.items()):
        if hasattr(value, "__dlpack__"):
            value = f"sha256 {hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:12]}"
        texts.append(f"{name}={value}")
    return ", ".join(texts)
