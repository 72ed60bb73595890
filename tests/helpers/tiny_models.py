"""Tiny transformers models with random weights, one for each family that the tests go through.

Importing this skips a test module where torch or transformers is not installed.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest

_WHY = "needs the extra: pip install 'kvedge[transformers]'"
torch = pytest.importorskip("torch", reason=_WHY)
transformers = pytest.importorskip("transformers", reason=_WHY)

from kvedge.transformers import KvedgeCache  # noqa: E402, F401

torch.set_num_threads(1)  # OpenMP's waiting threads are slow where many tests run at once

VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 8
_SLIDING = ["sliding_attention", "full_attention"] * 2

# Name: (config class, model class, what the config has besides SIZES).
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": WINDOW, "head_dim": 16, "layer_types": _SLIDING},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _SLIDING,
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": _SLIDING},
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": _SLIDING},
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"attention_multiplier": 0.3}),
}


@cache
def _model(family: str):
    config_name, model_name, more = FAMILIES[family]
    config_class = getattr(transformers, config_name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config_class(**{**SIZES, **more})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than by default: attention then matters to the text
            torch.nn.init.normal_(parameter, std=0.15)
        elif "sinks" not in dict(model.named_parameters()):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model.requires_grad_(False)


def tiny_model(family: str, attention: str = "kvedge"):
    """A model of a family, the same weights each time."""
    model = copy.deepcopy(_model(family))
    model.set_attn_implementation(attention)
    return model


def reference_model(family: str):
    """The same with attention of transformers' own, eager where sdpa lacks what it needs."""
    return tiny_model(family, "eager" if family in ("gemma2", "gpt-oss") else "sdpa")


def prompt(batch: int = 1, length: int = 13, *, padding: int = 0, seed: int = 0):
    """Token ids and attention mask; the first row begins with so much padding."""
    ids = torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def dynamic_cache(model):
    """The cache that transformers would make for a model."""
    return transformers.DynamicCache(config=model.config)
