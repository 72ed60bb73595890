"""Layers of every kind: states stay transformers' own; shared and narrow values; chunks."""

import json

import pytest
from tiny_models import KvedgeCache, dynamic_cache, prompt, torch, transformers
from tiny_structures import STRUCTURES, structure_of

from kvedge.cli.layer_kinds import layer_names
from kvedge.cli.layer_states import state_of
from kvedge.transformers import layers
from kvedge.transformers.states import copy_states, has_state


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_kind_of_layer_writes_the_same_text(name, monkeypatch):
    model, fused, kinds = structure_of(name)
    options = {"max_new_tokens": 14, "do_sample": False}
    inputs = prompt(2, padding=5)
    if not model._supports_default_dynamic_cache():
        with pytest.raises(ValueError, match=f"{type(model).__name__} .* cache of its own"):
            KvedgeCache(model.config)
        return
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, past_key_values=dynamic_cache(model), **options)
    decoded = []
    elements = layers.LazyRows.elements
    monkeypatch.setattr(
        layers.LazyRows, "elements", lambda self: decoded.append(1) or elements(self)
    )
    model.set_attn_implementation("kvedge")
    cache = KvedgeCache(model.config, dtype="float32")
    assert model.generate(**inputs, past_key_values=cache, **options).tolist() == wanted.tolist()
    if kinds is not None:
        assert [type(layer).__name__ for layer in cache.layers] == kinds
    if fused is not None:
        assert bool(decoded) != fused


def test_beams_on_a_hybrid_model():
    model, _, _ = structure_of("Qwen3Next")
    texts = []
    for attention in ("eager", "kvedge"):
        model.set_attn_implementation(attention)
        cache = dynamic_cache(model)
        if attention == "kvedge":
            cache = KvedgeCache(model.config, dtype="float32")
        texts.append(
            model.generate(
                **prompt(2, padding=5), past_key_values=cache, num_beams=3, max_new_tokens=14,
                do_sample=False,
            ).tolist()
        )  # fmt: skip
    assert texts[0] == texts[1]


def test_layers_that_compress_tokens_are_refused():
    config_class = getattr(transformers, "DeepseekV4Config", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no DeepseekV4Config")
    with pytest.raises(ValueError, match=r"layer 0 .* use transformers' DynamicCache"):
        KvedgeCache(config_class())


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 keeps them elsewhere")
@pytest.mark.parametrize(
    "name",
    ["Qwen3Next", "Qwen3_5Text", "Lfm2", "GraniteMoeHybrid", "Jamba", "FalconH1", "KimiLinear",
     "Bamba", "NemotronH", "OlmoHybrid"],
)  # fmt: skip
def test_a_plan_counts_the_states_that_a_cache_holds(name):
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    cache = KvedgeCache(model.config)
    with torch.no_grad():
        model(**prompt(1, 20), past_key_values=cache)
    config = json.loads(model.config.to_json_string(use_diff=False))
    names = layer_names(config, config.get("num_hidden_layers"))
    for layer, called in zip(cache.layers, names, strict=True):
        planned = state_of(config, called)
        assert (planned is not None) == has_state(layer)
        if planned is not None:
            copies = copy_states(layer)
            held = [sum(s.numel() for s in side.values() if s is not None) for side in copies[:2]]
            assert [planned.conv, planned.recurrent] == held
