"""Which layers of a model keep the keys and values of all tokens, of a window, or of none.

Configurations say it in many ways; newer ones list a kind for each layer (``layer_types``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

__all__ = [
    "FULL",
    "NOTHING",
    "SLIDING",
    "WINDOWS",
    "kv_heads_of_layers",
    "layer_kinds",
    "layer_names",
    "sliding_window",
    "windows_of_layers",
]

_Item = TypeVar("_Item")

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
    "no_op": NOTHING,
}
_BESIDE = ("falcon_h1",)
# Lists that name the kind of each layer.
_LISTS = ("layer_types", "layers_block_type", "attention_layers")
# Lists of the KV heads of each layer, beside those of a number for all.
_KV_HEADS = ("num_key_value_heads_per_layer", "num_kv_heads_per_layer")
_KV_HEADS_OF_ALL = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
# Windows, a number for all or a list.
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size")

# What else a file may say of each layer. Of these nothing depends on it ...
_NOT_OF_CACHES = re.compile(
    r"mlp|ffn|feed|moe|expert|intermediate|rope|activation|sparsity|quant|norm|dropout|token|label"
    r"|vision|image|audio|architectures|query_heads|num_attention_heads|embed|prun|map$"
)
# ... and of these some of it may.
_OF_CACHES = re.compile(r"attn|attention|kv|hybrid|block|window|layer|skip|no_op")
_UNDERSTOOD = {
    *(*_LISTS, *_KV_HEADS, *_KV_HEADS_OF_ALL, "block_configs", "block_types", "attn_layer_indices"),
    *("full_attn_idxs", "linear_attn_config", "attn_type_list", "cross_attention_layers"),
    *("attn_config", "attention_types"),  # attention_types: what attention_layers are made from
    *(*WINDOWS, "head_dim", "v_head_dim"),
    "qkv_multipliers",  # OpenELM: what its lists of heads are made from
}
# Of an attention in block_configs; others that say something are not understood.
_OF_BLOCKS = {"no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads"}
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
    return next(filter(None, (_as_window(config.get(name)) for name in WINDOWS)), None)


def windows_of_layers(config: Mapping[str, Any]) -> list[int | None] | None:
    """The window of each layer, None where it sees all, if the file lists them."""
    for name in WINDOWS:
        if isinstance(config.get(name), list):
            return [_as_window(window) for window in config[name]]
    return None


def _as_window(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and value > 0 else None


def layer_kinds(config: Mapping[str, Any], num_layers: int | None) -> tuple[list[str], list[str]]:
    """The kind of each layer: FULL, SLIDING or NOTHING.

    Returns
    -------
    kinds : list of str
    notes : list of str
        What of the file is not understood, and what it was taken for.

    Raises
    ------
    ValueError, TypeError
        The configuration does not say it in a way that can be read.
    """
    named = _named(config, num_layers)
    notes = _not_understood(config, len(named) if num_layers is None else num_layers)
    named = _of_all_layers(named, num_layers, "full_attention", "kinds", notes)
    if unknown := sorted({name for name in named if name not in _KINDS}):
        notes.append(f"layers of unknown kinds are counted as full attention: {', '.join(unknown)}")
    kinds = [_KINDS.get(name, FULL) for name in named]
    listed = _listed_kv_heads(config)
    if listed is not None and _blocks(config) is None:
        listed = _of_all_layers(listed, len(kinds), -1, "KV heads", notes)
        kinds = [NOTHING if count == 0 else kind for count, kind in zip(listed, kinds, strict=True)]
    crossing = config.get("cross_attention_layers")
    if isinstance(crossing, list):  # Mllama: these look at the picture alone
        kinds = [NOTHING if i in crossing else kind for i, kind in enumerate(kinds)]
    shared = config.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:  # Gemma 3n: the last ones read others' rows
        kept = max(len(kinds) - shared, 0)
        kinds = kinds[:kept] + [NOTHING] * (len(kinds) - kept)
    return kinds, notes


def layer_names(config: Mapping[str, Any], num_layers: int | None) -> list[str]:
    """What the file, or its family, calls each layer; as :func:`layer_kinds` reads it."""
    names = _of_all_layers(_named(config, num_layers), num_layers, "full_attention", "kinds", [])
    if config.get("model_type") in _BESIDE:  # a state beside attention in each layer
        return ["hybrid"] * len(names)
    return names


def _of_all_layers(
    listed: list[_Item], n: int | None, other: _Item, what: str, notes: list[str]
) -> list[_Item]:
    """A list for `n` layers, from one in the file that may be shorter or longer."""
    if n is None or len(listed) == n:
        return listed
    text = f"the file lists {what} of {len(listed)} layers, and says that it has {n}: "
    if len(listed) < n:
        text += f"the last {n - len(listed)} are counted as full attention"
    else:
        text += f"the first {n} are counted"
    notes.append(text)
    return (listed + [other] * n)[:n]


def kv_heads_of_layers(
    config: Mapping[str, Any], heads: Mapping[int, int], n: int
) -> list[int | None]:
    """KV heads of each of `n` layers where the file lists them; None: as many as all others.

    `heads` are the query heads of the layers that have attention.

    Raises
    ------
    ValueError, TypeError
        A number makes no sense.
    """
    blocks, listed = _blocks(config), _listed_kv_heads(config)
    found: list[int | None] = [None] * n
    if blocks is not None:
        found = [_kv_heads_of_block(block, heads.get(i, 0)) for i, block in enumerate(blocks[:n])]
    elif listed is not None:
        found = [count or None for count in listed]
    return (found + [None] * n)[:n]


def _listed_kv_heads(config: Mapping[str, Any]) -> list[int] | None:
    """KV heads of each layer, 0 where it has no attention, if the file lists them."""
    for name in (*_KV_HEADS, *_KV_HEADS_OF_ALL):
        if isinstance(config.get(name), list):
            return [0 if count is None else _whole(count, name, 0) for count in config[name]]
    return None


def _blocks(config: Mapping[str, Any]) -> list[Mapping[str, Any] | None] | None:
    """The attention of each block of a model that was searched for (NAS), as Nemotron's."""
    blocks = config.get("block_configs")
    if blocks is None:
        return None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise TypeError("block_configs is no list of objects")
    found = [block.get("attention", {}) for block in blocks]
    if not all(attention is None or isinstance(attention, dict) for attention in found):
        raise TypeError("an attention in block_configs is no object")
    return found


def _kv_heads_of_block(block: Mapping[str, Any] | None, heads: int) -> int | None:
    if _keeps_nothing(block):
        return None
    assert block is not None
    if block.get("n_heads_in_group") is not None:
        of_one = _whole(block["n_heads_in_group"], "n_heads_in_group", 1)
        if heads % of_one:
            raise ValueError(f"groups of {of_one} do not divide {heads} heads")
        return heads // of_one
    count = block.get("num_key_value_heads")
    return None if count is None else _whole(count, "num_key_value_heads", 0)


def _keeps_nothing(block: Mapping[str, Any] | None) -> bool:
    if block is None or block.get("no_op") or block.get("replace_with_linear"):
        return True
    return block.get("num_key_value_heads") == 0


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must hold whole numbers of {least} or more, not {value!r}")
    return value


def _not_understood(config: Mapping[str, Any], n: int) -> list[str]:
    """Notes of what the file seems to say of single layers, in a way that is not known here."""
    names = []
    for name, value in config.items():
        if name in _UNDERSTOOD or _NOT_OF_CACHES.search(name) or not value:
            continue
        of_each = isinstance(value, list) and n > 1 and len(value) == n
        if of_each or (isinstance(value, (list, dict)) and _OF_CACHES.search(name)):
            names.append(name)
    for block in _blocks(config) or ():
        said = {f"block_configs.{name}" for name, value in (block or {}).items() if value}
        names += sorted(said - {f"block_configs.{name}" for name in _OF_BLOCKS} - set(names))
    if not names:
        return []
    return [f"not understood, and not counted: {', '.join(names)}"]


def _named(config: Mapping[str, Any], n: int | None) -> list[str]:
    """The kind of each layer by a name of `_KINDS`, in whichever way the file says it."""
    blocks = _blocks(config)
    if blocks is not None:
        return ["no_op" if _keeps_nothing(block) else "attention" for block in blocks]
    for name in _LISTS:
        if config.get(name) is not None:
            if not isinstance(config[name], list):
                raise TypeError(f"{name} is no list")
            return [str(kind) for kind in config[name]]
    if config.get("hybrid_override_pattern"):  # Nemotron-H: "M-M*-..."
        pattern = config["hybrid_override_pattern"]
        return [{"*": "attention", "M": "mamba"}.get(letter, "mlp") for letter in pattern]
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
    listed = windows_of_layers(config)
    if listed is not None:
        return [full if window is None else sliding for window in listed]
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
