"""What the size of a model's cache depends on: groups of like layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvedge.console.sizes import format_count
from kvedge.core.config import MAX_CAPACITY, LayerConfig, layer_config
from kvedge.core.kivi import RUN
from kvedge.core.memory import slab_layout

__all__ = ["CacheShape", "LayerGroup"]

# Tokens that a layer has room for in float16 beyond the last ones that it reads there: 64 that may
# be taken back, and 64 that are appended before its last tokens are moved.
_SPARE = 128


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a model that keep the same of each token."""

    count: int  # layers
    num_kv_heads: int
    head_dim: int  # channels of a key
    value_head_dim: int  # channels of a value
    window: int | None = None  # tokens that a sliding layer sees; None: all
    values_in_keys: bool = False  # a value is the beginning of its key, and kept once

    def tokens(self, context: int) -> int:
        """Tokens that a layer holds of a context: of a sliding one, at most twice its window."""
        return context if self.window is None else min(context, 2 * self.window)

    def bytes_per_token(self, dtype: str, **options: Any) -> int:
        """Bytes that one token takes in all of the layers, by the layers' own arithmetic."""
        return self.count * self._token_bytes(self._config(dtype, options))

    def bytes(self, context: int, dtype: str, **options: Any) -> int:
        """Bytes of a context in all of the layers, first and last tokens in float16 included."""
        config, tokens = self._config(dtype, options), self.tokens(context)
        if config.in_runs:
            tokens = -(-tokens // RUN) * RUN
        size = tokens * self._token_bytes(config)
        if config.recent_dtype:
            last = config.sinks + config.recent + (_SPARE if config.recent else 0)
            size += last * self._token_bytes(config.part_config)
        return self.count * size

    def _config(self, dtype: str, options: dict[str, Any]) -> LayerConfig:
        if options.get("group_size") is not None:  # of the widest layers: these may be narrower
            widest = max(self.head_dim, self.value_head_dim)
            options = options | {"group_size": min(options["group_size"], widest)}
        if self.window is not None:
            options = options | {"sinks": 0}
        return layer_config(
            dtype,
            None,
            self.num_kv_heads,
            self.head_dim,
            value_head_dim=self.value_head_dim,
            **options,
        )

    def _token_bytes(self, config: LayerConfig) -> int:
        slabs = slab_layout(config.run if config.in_runs else config)
        if self.values_in_keys:
            slabs = slabs[::2]  # those of the keys
        tokens = RUN if config.in_runs else config.capacity
        return -(-sum(dtype.itemsize * math.prod(shape) for shape, dtype in slabs) // tokens)

    def __str__(self) -> str:
        heads = "1 KV head" if self.num_kv_heads == 1 else f"{self.num_kv_heads} KV heads"
        text = f"{self.count} layer{'' if self.count == 1 else 's'}, {heads} of {self.head_dim}"
        if self.values_in_keys:
            text += f" channels, whose first {self.value_head_dim} are the value"
        elif self.value_head_dim != self.head_dim:
            text += f" channels (values: {self.value_head_dim})"
        else:
            text += " channels"
        return text if self.window is None else f"{text}, a window of {self.window} tokens"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the size of a cache depends on."""

    name: str
    groups: tuple[LayerGroup, ...]  # layers that keep keys and values; those that see all first
    context: int | None = None  # tokens the model was made for, where known
    notes: tuple[str, ...] = ()
    latent: tuple[LayerGroup, ...] = ()  # the same layers, as latent attention (MLA) can keep them
    state_bytes: int = 0  # of all layers' states, whatever the context

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(group.count for group in self.groups)

    @property
    def widest(self) -> int:
        """Channels of the widest rows."""
        return max(max(group.head_dim, group.value_head_dim) for group in self.groups)

    def count(self, tokens: int) -> str:
        """Write a context, with a star where the model was made for fewer tokens."""
        beyond = self.context is not None and tokens > self.context
        return format_count(tokens) + ("*" if beyond else "")

    def bytes_per_token(self, dtype: str, **options: Any) -> int:
        """Bytes that one token takes in all layers, while none has dropped it.

        Parameters
        ----------
        dtype : kvedge.core.types.StorageDtype
        **options
            ``group_size`` and ``scale_dtype`` of :class:`kvedge.QuantizedKvLayer`.
        """
        return sum(group.bytes_per_token(dtype, **options) for group in self.groups)

    def bytes(self, context: int, dtype: str, **options: Any) -> int:
        """Bytes of a context in all layers, states included; options as for `bytes_per_token`."""
        return self.state_bytes + sum(
            group.bytes(context, dtype, **options) for group in self.groups
        )

    def longest_context(self, ram: int, dtype: str, **options: Any) -> int | None:
        """Tokens of the longest context that fits in `ram` bytes; None: there is no end to them."""
        if self.bytes(MAX_CAPACITY, dtype, **options) <= ram:
            return None
        fits, too_many = 0, MAX_CAPACITY
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.bytes(middle, dtype, **options) <= ram:
                fits = middle
            else:
                too_many = middle
        return fits
