"""Fields of a GGUF file that would change what a model computes, and that nobody has asked for.

What :mod:`.gguf_config` asks for, it understands. Of an architecture's other fields some change
nothing, by name or by value; any other may, so it is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from .config import LlamaConfig

__all__ = ["not_understood"]

# What the arithmetic of a text model without experts does not depend on. With a type of RoPE
# scaling that would need the fields of scaling, the file is refused.
_WITHOUT_EFFECT = frozenset(
    {
        *("vocab_size", "tensor_data_layout", "pooling_type", "classifier.output_labels"),
        *("rope.scaling.type", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
        *("rope.scaling.factor", "rope.scale_linear", "rope.scaling.yarn_log_multiplier"),
        *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        *("expert_used_count", "expert_shared_count", "expert_feed_forward_length"),
        *("expert_shared_feed_forward_length", "expert_group_count", "expert_group_used_count"),
        *("expert_weights_scale", "expert_weights_norm", "expert_gating_func"),
        *("leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers"),
    }
)


def not_understood(
    fields: Mapping[str, Any], architecture: str, asked: Collection[str], config: LlamaConfig
) -> list[str]:
    """Names of fields that may change what the model computes.

    Parameters
    ----------
    fields : mapping
        All fields of the file, as plain values.
    architecture : str
        Fields of it, ``ARCHITECTURE.name``, are looked at: others do not describe the model.
    asked : collection of str
        Names, after the architecture's, that were asked for.
    config : LlamaConfig
        The model, for values that say what holds anyway.
    """
    front = f"{architecture}."
    found = []
    for name, value in fields.items():
        key = name.removeprefix(front)
        if not name.startswith(front) or key in asked or key in _WITHOUT_EFFECT:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(_says_what_holds(key, number, config) for number in values):
            found.append(name)
    return found


def _says_what_holds(key: str, value: Any, config: LlamaConfig) -> bool:
    """Whether a field says of the model what is so without it."""
    if not isinstance(value, (bool, int, float)):
        return False
    head_dim = config.head_dim
    holds: dict[str, float] = {
        "attention.causal": True,
        "attention.scale": config.attention_scale or 1 / math.sqrt(head_dim),
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.output_scale": 1,
        "embedding_length_out": config.dim,
        "embedding_scale": config.embedding_scale,
        "logit_scale": config.logit_scale,
        "residual_scale": config.residual_scale,
        "rope.dimension_count_swa": config.rope.rotary_dim or head_dim,
        "rope.freq_base_swa": config.rope.base,
        "rope.scaling.alpha": 1,
    }
    if key == "attention.sliding_window" and value >= config.max_seq_len:
        return True  # every token of a context lies in the window
    if key == "attention.sliding_window_pattern" and config.windows is None:
        return True
    if key in holds and math.isclose(value, holds[key], rel_tol=1e-5):
        return True
    return value == 0 and key != "attention.causal"  # switched off: softcaps, clamps, biases ...
