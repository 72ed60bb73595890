"""What layers of linear attention, Mamba and short convolutions keep: a state, of any context.

Elements are those that transformers 5.24 keeps for a sequence: recurrent states, in float32, and
the last tokens of convolutions, in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["State", "state_of"]


class State(NamedTuple):
    """Elements of one layer's state."""

    recurrent: int
    conv: int

    @property
    def num_bytes(self) -> int:
        """Bytes: float32, and a model's 16 bits."""
        return 4 * self.recurrent + 2 * self.conv


def state_of(config: Mapping[str, Any], name: str) -> State | None:
    """The state of a layer that is called `name`, or of the state beside its attention.

    None where there is none, or the file does not tell.
    """
    try:
        if name == "conv":
            return State(0, config["hidden_size"] * config["conv_L_cache"])
        if name in ("linear_attention", "mamba", "mamba2", "hybrid"):
            is_mamba = "mamba_d_state" in config or "ssm_state_size" in config
            return _mamba(config) if is_mamba else _delta(config)
    except (KeyError, TypeError):
        pass
    return None


def _delta(config: Mapping[str, Any]) -> State:
    """Gated delta nets: a matrix for each value head, and convolutions of query, key and value."""
    of_all = config.get("linear_attn_config")
    if isinstance(of_all, Mapping):  # Kimi Linear, as its authors write it
        heads, dim, width = (
            of_all[name] for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        return State(heads * dim * dim, 3 * heads * dim * width)
    if "linear_num_heads" in config:  # as transformers writes it
        heads, dim = config["linear_num_heads"], config["linear_head_dim"]
        return State(heads * dim * dim, 3 * heads * dim * config["linear_conv_kernel_dim"])
    keys, values = (
        (config[f"linear_num_{side}_heads"], config[f"linear_{side}_head_dim"])
        for side in ("key", "value")
    )
    channels = 2 * keys[0] * keys[1] + values[0] * values[1]
    return State(values[0] * keys[1] * values[1], channels * config["linear_conv_kernel_dim"])


def _mamba(config: Mapping[str, Any]) -> State:
    """Mamba-2, whose convolution takes B and C along; Mamba where a layer has no heads."""
    if "ssm_state_size" in config:  # Nemotron-H
        state, width = config["ssm_state_size"], config["conv_kernel"]
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        return State(inner * state, (inner + 2 * config["n_groups"] * state) * width)
    state, width = config["mamba_d_state"], config["mamba_d_conv"]
    if "mamba_n_heads" in config:
        inner = config.get("mamba_d_ssm") or config["mamba_n_heads"] * config["mamba_d_head"]
        return State(inner * state, (inner + 2 * config["mamba_n_groups"] * state) * width)
    inner = config["mamba_expand"] * config["hidden_size"]
    return State(inner * state, inner * width)
