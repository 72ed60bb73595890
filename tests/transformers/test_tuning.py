"""`kvedge tune` through transformers: windows, states, shared rows; the policy in a KvedgeCache."""

import numpy as np
import pytest
from tiny_models import VOCABULARY, WINDOW, KvedgeCache, tiny_model
from tiny_structures import structure_of

import kvedge
from kvedge.evaluation import CacheChoice, evaluate
from kvedge.evaluation.hugging_face import HuggingFaceSubject
from kvedge.evaluation.tuning import tune

TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 96)


def check_tuned(model, bits=8):
    """Tune, read on the policy; return what each layer holds and how it is stored."""
    subject = HuggingFaceSubject(model, 1)
    found = tune(subject, TOKENS, recent=4, sinks=1, window=48, chunk=12, bits=bits)
    assert found.bits_per_value <= bits
    assert found.result.kl.mean <= found.uniform_result.kl.mean
    choice = CacheChoice("policy", "float32", {"policy": found.policy})
    _, result = evaluate(subject, TOKENS, [choice], window=48, chunk=12)
    assert result.kl.mean == pytest.approx(found.result.kl.mean, rel=1e-3)
    assert len(KvedgeCache(model.config, policy=found.policy).layers) == len(found.policy.layers)
    return list(zip(subject.layers(), found.policy.layers, strict=True))


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_layers_with_a_window_have_no_sinks(family):
    layers = check_tuned(tiny_model(family))
    assert [shape.window for shape, _ in layers] == [WINDOW, None] * 2
    assert not any("sinks" in layer for shape, layer in layers if shape.window)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Gemma3nText"])
def test_layers_without_keys_are_left_as_they_are(name):
    """States have none; layers that read another's keys have none of their own."""
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    layers = check_tuned(model)
    assert any(shape is not None for shape, _ in layers)
    assert all(layer == {"dtype": "float32"} for shape, layer in layers if shape is None)


@pytest.mark.filterwarnings("ignore:.*the slow way")
def test_a_model_whose_attention_is_not_kvedges_is_refused():
    model = tiny_model("llama", "eager")
    with pytest.raises(kvedge.InvalidArgumentError, match="attn_implementation"):
        tune(HuggingFaceSubject(model, 1), TOKENS, recent=4, bits=8)
