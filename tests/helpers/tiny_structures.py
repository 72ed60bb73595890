"""Tiny models whose layers are of every kind: states, windows, shared and narrow values."""

from __future__ import annotations

import pytest
from tiny_models import FAMILIES, SIZES, tiny_model, torch, transformers

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **_EXPERTS,
}
_SHARED = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_INKLING = {
    "head_dim": 16, "sliding_window_size": 8, "n_routed_experts": 4, "n_shared_experts": 1,
    **_EXPERTS,
}  # fmt: skip
_MIXED = ["KvedgeStateLayer", "KvedgeLayer"] * 2

# Name of the config without "Config": (options, whether attention runs fused, layers' classes).
STRUCTURES = {
    "Qwen3Next": (
        {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        True,
        _MIXED,
    ),
    "Qwen3_5Text": (_LINEAR, True, _MIXED),
    "Lfm2": (_CONV, True, _MIXED),
    "GraniteMoeHybrid": (
        {**_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
         "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        True,
        _MIXED,
    ),
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8,
         "use_mamba_kernels": False, "mamba_dt_rank": 4},
        True,
        _MIXED,
    ),
    "FalconH1": ({**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16}, True, ["KvedgeHybridLayer"] * 4),
    "Gemma4Text": (
        {**_SHARED, "global_head_dim": 32},
        True,
        ["KvedgeSlidingLayer", "KvedgeLayer", "DummyLayer", "DummyLayer"],
    ),
    "Gemma3nText": (
        {**_SHARED, "laurel_rank": 8, "intermediate_size": 96,
         "activation_sparsity_pattern": [0.0] * 4},
        None,  # transformers 4 takes parts of a sliding layer's keys
        None,
    ),
    "Llama4Text": (
        {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2,
         "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
        True,
        ["KvedgeSlidingLayer"] * 3 + ["KvedgeLayer"],
    ),
    "MiMoV2Flash": (
        {"head_dim": 16, "v_head_dim": 12, "swa_head_dim": 16, "swa_v_head_dim": 12,
         "sliding_window": 8, "num_experts": 4},
        True,
        None,
    ),
    "DeepseekV2": (_LATENT, None, ["KvedgeLayer"] * 4),  # transformers 5 keeps the latents
    "DeepseekV3": (_LATENT, None, ["KvedgeLayer"] * 4),
    "MiniCPM3": (_LATENT, None, ["KvedgeLayer"] * 4),
    "KimiLinear": (
        {**_LATENT, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        None,
        _MIXED,
    ),
    "Bamba": ({**_MAMBA, "attn_layer_indices": [1, 3]}, True, None),
    "NemotronH": (
        {**_MAMBA, "head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
         "mamba_num_heads": 8, "mamba_head_dim": 16, "n_routed_experts": 4, **_EXPERTS},
        True,
        None,
    ),
    "OlmoHybrid": (_LINEAR, True, _MIXED),
    "Zamba": (
        {**_MAMBA, "n_mamba_heads": 8, "layer_types": ["mamba", "hybrid"] * 2, "mamba_dt_rank": 4,
         "use_mamba_kernels": False},
        True,
        ["KvedgeStateLayer", "KvedgeHybridLayer"] * 2,
    ),
    "Zaya": ({"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1}, True, None),
    # None: transformers 4 has attention code of their own. Moshi sees all of a prompt.
    "Moshi": ({"sliding_window": 8, "head_dim": 16, "ffn_dim": 96}, None, None),
    "StableLm": ({}, None, None),
    "Phimoe": ({"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, None, None),
    "InklingText": (_INKLING, True, None),
    # a bias, and a sink for each query row
    "Inkling2Text": ({**_INKLING, "unpadded_vocab_size": 128}, True, None),
    "Afmoe": ({"head_dim": 16, "sliding_window": 8, "num_experts": 4, **_EXPERTS}, True, None),
    "ModernBertDecoder": ({"sliding_window": 8, "local_attention": 16}, True, None),
    "OPT": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, True, None),
}  # fmt: skip

# Further families with states, whose attention is as of others: options of their configs.
STATES = {
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "Zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 8,
        "layer_types": ["mamba", "hybrid"] * 2, "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
    },
    "Lfm2Moe": {**_CONV, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "Lfm3": {**_CONV, "head_dim": 16},
    "Qwen3_5MoeText": {
        **_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32,
    },
    "BailingHybrid": {
        **_LATENT, "num_experts": 4, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "MiniMax": {
        "head_dim": 16, "num_local_experts": 4, **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}  # fmt: skip


def structure_of(name):
    """A tiny model, its config and what is expected of it."""
    options, fused, kinds = STRUCTURES.get(name) or (STATES[name], None, None)
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}Config")
    config = config_class(**{**SIZES, **options})
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    return model, fused, kinds


def model_of(name):
    """A tiny model of a family or a structure, with kvedge's attention."""
    if name in FAMILIES:
        return tiny_model(name)
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    return model
