"""What a layer tells about itself: views of its bytes, its shape and its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core import memory
from kvedge.core.config import ConfigFacts
from kvedge.core.key_map import KeyMap, KeyRule


class LayerFacts(ConfigFacts):
    """The part of a layer that changes nothing; a backend's core fills the fields."""

    _slabs: memory.Slabs  # those of now: a reader takes `_held()`
    _key_map: KeyMap  # how keys are stored
    _key_rule: KeyRule = KeyRule()  # what of that the first tokens decide
    _key_map_is_open: bool  # the next append may decide it
    _precise: Any  # PreciseTokens, or None: no tokens are held in another format too

    if TYPE_CHECKING:

        def __len__(self) -> int: ...
        def _held(self) -> memory.Held: ...

    # A reader takes `_held()` once: a writer may drop tokens, or move the layer to other slabs, at
    # any moment.

    # ---- views -----------------------------------------------------------------------------------

    @property
    def key_codes(self) -> np.ndarray:
        """Stored keys, read-only and without a copy: int8 (or float32) (len, H, head_dim).

        As they came: :meth:`shift` does not turn these, but what is read of them.
        """
        return self._view("key_codes")

    @property
    def value_codes(self) -> np.ndarray:
        """Stored values, (len, H, value_head_dim); for the rest as :attr:`key_codes`."""
        return self._view("value_codes")

    @property
    def key_scales(self) -> np.ndarray:
        """Scales of the keys, read-only and without a copy.

        (len, H), or (len, H, num_groups) where a row has several; (len, H, 0) in float32 layers.
        """
        return self._scales_view("key_scales")

    @property
    def value_scales(self) -> np.ndarray:
        """Scales of the values; as :attr:`key_scales`, in the groups of a value."""
        return self._scales_view("value_scales")

    def _view(self, name: str) -> np.ndarray:
        view: np.ndarray = getattr(self._held().tokens, name)
        view.flags.writeable = False
        return view

    def _scales_view(self, name: str) -> np.ndarray:
        view = self._view(name)
        return view[:, :, 0] if view.shape[2] == 1 else view

    @property
    def key_offset(self) -> np.ndarray | None:
        """What is taken off stored keys, float32 (num_kv_heads, head_dim), read-only; or None."""
        return _read_only(self._key_map.offset)

    @property
    def key_scale(self) -> np.ndarray | None:
        """What stored keys are divided by, float32 (num_kv_heads, head_dim), read-only; or None."""
        return _read_only(self._key_map.scale)

    # ---- shape and sizes -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens there is room for now; a growing layer takes more room when it is full."""
        config = self._config
        return config.capacity if config.limit is None else min(config.capacity, config.limit)

    @property
    def num_dropped(self) -> int:
        """Tokens dropped from the front so far, since the layer was made or cleared."""
        return self._held().num_dropped

    @property
    def window(self) -> int | None:
        """Tokens that a query row sees, if the layer keeps only what they need; else None."""
        return self._config.window

    @property
    def remaining(self) -> int:
        """Tokens that may still be appended; in a growing layer, before it grows."""
        length = len(self)
        return self.capacity - length

    @property
    def is_empty(self) -> bool:
        """Whether no token is stored."""
        return len(self) == 0

    @property
    def is_full(self) -> bool:
        """Whether no further token fits; never in a growing layer."""
        return len(self) == self._config.limit

    @property
    def num_groups(self) -> int:
        """Scales per row of the keys; 0 in float32 layers."""
        return self._config.key_rows.num_groups

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys and values, scales included."""
        own = memory.slab_bytes(self._config)
        return own + self._precise_bytes

    @property
    def _precise_bytes(self) -> int:
        """Bytes reserved for tokens that are held in another format too."""
        if self._precise is None:
            return 0
        return sum(part.layer.memory_bytes for part in self._precise.now.each)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the system has committed so far, in whole pages.

        Where the system does not tell, the bytes of the tokens stored.
        """
        slabs = self._slabs if self._precise is None else (*self._slabs, *self._precise.slabs)
        resident = memory.resident_bytes(slabs)
        return len(self) * memory.token_bytes(self._config) if resident is None else resident

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes that the same capacity takes in float32, keys and values: 4 bytes a number."""
        return 4 * self._config.capacity * self._config.token_size

    def __repr__(self) -> str:
        """Class, fill and shape."""
        length, config = len(self), self._config
        room = config.capacity if config.limit is None else config.limit
        parts = [f"{length} of {room} tokens", f"num_kv_heads={config.num_kv_heads}"]
        parts.append(f"head_dim={config.head_dim}")
        if config.value_head_dim != config.head_dim:
            parts.append(f"value_head_dim={config.value_head_dim}")
        if config.value_dtype is not None:
            parts.append(f"value_dtype={config.value_dtype}")
        if config.window is not None:
            parts.append(f"window={config.window}")
        elif config.limit is None:
            parts.append("growing")
        if config.has_scales and config.group_size < config.widest:
            parts.append(f"group_size={config.group_size}")
        if config.scale_dtype != "float32":
            parts.append(f"scale_dtype={config.scale_dtype!r}")
        for name, count in (("sinks", config.sinks), ("recent", config.recent)):
            if count:
                parts.append(f"{name}={count} in {config.recent_dtype}")
        if self._key_rule.auto_offset:
            parts.append('key_offset="auto"')
        elif self._key_map.offset is not None:
            parts.append("key_offset=given")
        if self._key_rule.auto_scale:
            parts.append('key_scale="auto"')
        elif self._key_map.scale is not None:
            parts.append("key_scale=given")
        size = self.memory_bytes / 2**20
        return f"{type(self).__name__}({', '.join(parts)}, {size:.1f} MiB)"


def _read_only(vector: np.ndarray | None) -> np.ndarray | None:
    if vector is None:
        return None
    view = vector.view()
    view.flags.writeable = False
    return view
