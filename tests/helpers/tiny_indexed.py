"""Tiny models of the families that choose by an index which tokens attention reads."""

from __future__ import annotations

import pytest
from tiny_models import SIZES, torch, transformers

_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"] * 2,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 8,
    **_EXPERTS,
}  # fmt: skip
_SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip

# Name of the model: (name of its text config, options of that one, of the vision config or None).
INDEXED = {
    "Qwen4ExpForCausalLM": (
        "Qwen4ExpTextConfig",
        {"head_dim": 16, "layer_types": ["linear_attention", "indexed_attention"] * 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "hc_count": 2,
         "hc_lowrank": 8, "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
         "eos_token_id": 2, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16,
         "indexer_budget": 9, "indexer_compress_ratio": 3},
        None,
    ),
    "DeepseekV32ForCausalLM": ("DeepseekV32Config", _LATENT, None),
    "GlmMoeDsaForCausalLM": ("GlmMoeDsaConfig", {**_LATENT, **_SHARED}, None),
    "Glm5NextForConditionalGeneration": (
        "Glm5NextTextConfig",
        {**_LATENT, "qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 9, "index_kpool": 3,
         "layer_types": ["indexed_attention"] * 2 + ["linear_attention", "indexed_attention"],
         "linear_head_dim": 16,
         "linear_num_heads": 4, "hc_mult": 2, "indexer_types": ["full", "shared", "full", "full"]},
        {**_VISION, "depth": 1, "out_hidden_size": 64, "num_heads": 2},
    ),
    "HYV4ForCausalLM": ("HYV4Config", {**_LATENT, **_SHARED, "hc_mult": 2}, None),
    "MistralLarge4ForConditionalGeneration": (
        "MistralLarge4TextConfig",
        {**_LATENT, "indexer_types": ["full", "shared", "full", "shared"],
         "kv_source_layers": [0, 1, 0, 1], "no_rope_layers": [1, 0, 1, 0]},
        {"model_type": "pixtral", **_VISION},
    ),
    "Dots3NoteForCausalLM": (
        "Dots3NoteTextConfig",
        {**_LATENT, "layer_types": ["indexed_attention", "sliding_attention"] * 2,
         "sliding_window": 8},
        None,
    ),
    "AXK2ForCausalLM": ("AXK2Config", {**_LATENT, "gated_norm_rank": 4}, None),
    "MiniMaxM3VLForCausalLM": (
        "MiniMaxM3VLTextConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8,
         "dense_intermediate_size": 64, "shared_intermediate_size": 32, "index_n_heads": 2,
         "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2,
         "index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
         "mlp_layer_types": ["dense", "sparse"] * 2},
        None,
    ),
}  # fmt: skip


def indexed_model(name, attention="kvedge"):
    """A tiny model of a family, the same weights each time."""
    config_name, options, vision = INDEXED[name]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, config_name)(**{**SIZES, **options})
    if vision is not None:
        whole = getattr(transformers, name).config_class
        config = whole(text_config=config.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation(attention)
    return model
