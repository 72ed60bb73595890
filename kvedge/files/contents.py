"""What a cache holds as plain data, apart from its memory: copied, pickled, detached, in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvedge.core.config import LayerConfig
from kvedge.core.index_keys import IndexConfig
from kvedge.core.key_map import KeyMap
from kvedge.core.pickled import PickledByFields
from kvedge.layer.parts import PartContents, config_of_today, parts_of_today
from kvedge.rope import Turns
from kvedge.states.layer import StateConfig, StateLayer

__all__ = ["CacheContents", "CacheFormat", "LayerContents"]


@dataclass(frozen=True)
class CacheFormat(PickledByFields):
    """What must be equal for the bytes of one cache to mean the same in another."""

    layers: tuple[LayerConfig, ...]  # without regard to room: of one row each, without a limit
    states: tuple[tuple[int, StateConfig], ...] = ()  # and their numbers among all layers
    indexes: tuple[tuple[int, IndexConfig], ...] = ()  # and the numbers of their layers

    @classmethod
    def of(
        cls,
        configs: Iterable[LayerConfig],
        states: tuple[tuple[int, StateConfig], ...] = (),
        indexes: tuple[tuple[int, IndexConfig], ...] = (),
    ) -> CacheFormat:
        """The format of layers as in `configs`."""
        known: dict[LayerConfig, LayerConfig] = {}  # equal ones are one object
        plain = (replace(config, capacity=1, limit=None) for config in configs)
        return cls(tuple(known.setdefault(config, config) for config in plain), states, indexes)

    @property
    def num_layers(self) -> int:
        """Layers of keys and values."""
        return len(self.layers)

    def __str__(self) -> str:
        counts = Counter(map(_layer_text, self.layers))  # in the order of their first layers
        counts.update(f"state of {config}" for _, config in self.states)
        counts.update(str(config) for _, config in self.indexes)
        return ", ".join(f"{count} layers x {text}" for text, count in counts.items())


def _layer_text(config: LayerConfig) -> str:
    text = f"{config.num_kv_heads} KV heads x {config.widths}, {config.dtypes}"
    if config.has_scales:
        text += f" in groups of {config.group_size} with {config.scale_dtype} scales"
    if config.value_rotation:
        text += ", values rotated"
    for name, count in (("first", config.sinks), ("last", config.recent)):
        if count:
            text += f", the {name} {count} in {config.recent_dtype}"
    return text if config.window is None else f"{text} in a window of {config.window}"


@dataclass(frozen=True)
class LayerContents(PickledByFields):
    """The tokens of one layer as they are stored, with nothing of the memory beyond them."""

    key_codes: np.ndarray  # (tokens, num_kv_heads, codes per row)
    value_codes: np.ndarray  # (tokens, num_kv_heads, codes per row)
    key_scales: np.ndarray  # (tokens, num_kv_heads, num_groups) float32 or float16
    value_scales: np.ndarray  # (tokens, num_kv_heads, num_groups) float32 or float16
    key_map: KeyMap  # how keys are stored
    num_dropped: int = 0  # tokens before the first of these
    parts: tuple[PartContents, ...] = ()  # first and last tokens in another format, if some are
    turns: Turns | None = None  # what keys are still to be turned by, if they are
    evicted_at: int = (
        0  # position at which tokens were evicted last; 0: where they end, if any were
    )

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The four token arrays, in the order of the slabs."""
        return (self.key_codes, self.value_codes, self.key_scales, self.value_scales)

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return len(self.key_codes)


@dataclass(frozen=True)
class CacheContents(PickledByFields):
    """All that a cache holds, apart from its memory: what is copied, pickled and detached."""

    format: CacheFormat
    length: int  # tokens that all layers hold; a layer may hold more
    layers: tuple[LayerContents, ...]
    states: tuple[StateLayer, ...] = ()  # in the order of the format's
    indexes: tuple[Mapping[str, np.ndarray], ...] = ()  # as KeyIndex.arrays() has them, as well

    @property
    def of_today(self) -> CacheContents:
        """The same, or what :func:`config_of_today` makes of it."""
        form = replace(self.format, layers=tuple(map(config_of_today, self.format.layers)))
        layers = tuple(
            replace(layer, parts=parts_of_today(config, layer.parts))
            for config, layer in zip(self.format.layers, self.layers, strict=True)
        )
        return self if form == self.format else replace(self, format=form, layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        of_indexes = sum(array.nbytes for arrays in self.indexes for array in arrays.values())
        return (
            of_indexes
            + sum(state.nbytes for state in self.states)
            + sum(
                array.nbytes
                for layer in self.layers
                for arrays in (layer.arrays, *(part.arrays for part in layer.parts))
                for array in arrays
            )
        )
