"""What a layer tells about itself: its sizes, and how it prints."""

from __future__ import annotations

from kvedge.core import memory
from kvedge.layer.store import LayerStore

__all__ = ["memory_bytes", "resident_bytes", "text"]


def memory_bytes(store: LayerStore) -> int:
    """Bytes reserved for keys and values, scales, first and last tokens included."""
    return sum(array.nbytes for array in store.arrays())


def resident_bytes(store: LayerStore) -> int:
    """Bytes that the system has committed; where it does not tell, those of the tokens."""
    resident = memory.resident_bytes(store.arrays())
    return len(store) * memory.token_bytes(store.config) if resident is None else resident


def text(store: LayerStore) -> str:
    """Fill and shape."""
    length, config = len(store), store.config
    room = config.capacity if config.limit is None else config.limit
    parts = [f"{length} of {room} tokens", f"num_kv_heads={config.num_kv_heads}"]
    parts.append(f"head_dim={config.head_dim}")
    if config.value_head_dim != config.head_dim:
        parts.append(f"value_head_dim={config.value_head_dim}")
    if config.value_dtype is not None:
        parts.append(f"value_dtype={config.value_dtype}")
    if config.value_rotation:
        parts.append("value_rotation=True")
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
    if store.key_rule.auto_offset:
        parts.append('key_offset="auto"')
    elif store.key_map.offset is not None:
        parts.append("key_offset=given")
    if store.key_rule.auto_scale:
        parts.append('key_scale="auto"')
    elif store.key_map.scale is not None:
        parts.append("key_scale=given")
    return ", ".join([*parts, f"{memory_bytes(store) / 2**20:.1f} MiB"])
