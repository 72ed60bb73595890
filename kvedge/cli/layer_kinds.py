"""Which layers of a model keep the keys and values of all tokens, of a window, or of none.

Configurations say it in many ways; newer ones list a kind for each layer (``layer_types``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FULL", "NOTHING", "SLIDING", "layer_kinds", "sliding_window"]

FULL, SLIDING, NOTHING = "full", "sliding", "nothing"

# What files call a layer. "hybrid": attention beside a linear layer.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "hybrid": FULL,
    "global": FULL,
    "sliding_attention": SLIDING,
    "hybrid_sliding": SLIDING,
    "chunked_attention": SLIDING,
    "local": SLIDING,
    "linear_attention": NOTHING,
    "mamba": NOTHING,
    "mamba2": NOTHING,
    "conv": NOTHING,
    "recurrent": NOTHING,
    "moe": NOTHING,
    "mlp": NOTHING,
}
# One layer in so many sees all, where the file does not tell.
_PATTERNS = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "gemma3": 6,
    "gemma3_text": 6,
    "llama4": 4,
    "llama4_text": 4,
}


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a sliding layer sees, where the file tells."""
    for name in ("sliding_window", "attention_window_size", "attention_chunk_size"):
        window = config.get(name)
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            return window
    return None


def layer_kinds(config: Mapping[str, Any], num_layers: int | None) -> tuple[list[str], set[str]]:
    """The kind of each layer: FULL, SLIDING or NOTHING.

    Returns
    -------
    kinds : list of str
    unknown : set of str
        Names of kinds that were taken for FULL.

    Raises
    ------
    ValueError, TypeError
        The configuration does not say it in a way that can be read.
    """
    named = _named(config, num_layers)
    unknown = {str(name) for name in named if name not in _KINDS}
    kinds = [_KINDS.get(name, FULL) for name in named]
    crossing = config.get("cross_attention_layers")
    if isinstance(crossing, list):  # Mllama: these look at the picture alone
        kinds = [NOTHING if i in crossing else kind for i, kind in enumerate(kinds)]
    shared = config.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:  # Gemma 3n: the last ones read others' rows
        kept = max(len(kinds) - shared, 0)
        kinds = kinds[:kept] + [NOTHING] * (len(kinds) - kept)
    return kinds, unknown


def _named(config: Mapping[str, Any], n: int | None) -> list[str]:
    """The kind of each layer by a name of `_KINDS`, in whichever way the file says it."""
    for name in ("layer_types", "layers_block_type"):
        if config.get(name) is not None:
            if not isinstance(config[name], list):
                raise TypeError(f"{name} is no list")
            return [str(kind) for kind in config[name]]
    if config.get("hybrid_override_pattern"):  # Nemotron-H: "M-M*-..."
        pattern = config["hybrid_override_pattern"]
        return ["attention" if letter == "*" else "mamba" for letter in pattern]
    if n is None:
        raise ValueError("it gives neither a number of layers nor a list of their kinds")
    if config.get("block_types"):  # RecurrentGemma: repeated; its attention is always local
        cycle = config["block_types"]
        names = [cycle[i % len(cycle)] for i in range(n)]
        return ["local" if name == "attention" else str(name) for name in names]
    if config.get("attn_layer_period"):  # Jamba
        period, offset = int(config["attn_layer_period"]), int(config.get("attn_layer_offset", 0))
        return ["attention" if i % period == offset else "mamba" for i in range(n)]
    if config.get("full_attention_interval"):  # Qwen3-Next, Qwen3.5
        every = int(config["full_attention_interval"])
        return ["linear_attention" if (i + 1) % every else "attention" for i in range(n)]
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if config.get(name) is not None:
            chosen = {int(i) for i in config[name]}
            return ["attention" if i in chosen else "mamba" for i in range(n)]
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("full_attn_layers"):  # Kimi Linear, from 1 on
        chosen = {int(i) - 1 for i in linear["full_attn_layers"]}
        return ["attention" if i in chosen else "linear_attention" for i in range(n)]
    if config.get("attn_type_list"):  # MiniMax-Text-01
        return ["attention" if kind else "linear_attention" for kind in config["attn_type_list"]]
    return _windows(config, n)


def _windows(config: Mapping[str, Any], n: int) -> list[str]:
    """Which layers slide, where the file does not list kinds."""
    full, sliding = "full_attention", "sliding_attention"
    first = config.get("max_window_layers")  # Qwen2: the layers from this one on, if any
    if not sliding_window(config) or not config.get("use_sliding_window", first is None):
        return [full] * n
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str):  # EXAONE 4: "LLLG"
        return [full if pattern[i % len(pattern)] == "G" else sliding for i in range(n)]
    if pattern:
        return [sliding if (i + 1) % int(pattern) else full for i in range(n)]
    if isinstance(first, int):
        return [sliding if i >= first else full for i in range(n)]
    return [sliding] * n
