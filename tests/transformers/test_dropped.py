"""A cache that transformers drops by itself: said, once. The examples are not warned of."""

import warnings

import pytest
import tiny_models
from tiny_models import SIZES, KvedgeCache, prompt, torch, transformers

from kvedge.transformers import cache_argument

BOUNDARY = 16
FAMILIES = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM"),
}


@pytest.fixture(params=["kvedge", "sdpa"])
def model(request, long_rope):
    found = long_rope
    found.set_attn_implementation(request.param)
    return found


@pytest.fixture(params=FAMILIES)
def long_rope(request):
    """A model of LongRoPE whose rotations change after 16 tokens."""
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 drops a cache without asking it for anything")
    config_name, model_name = FAMILIES[request.param]
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    rope = {
        "type": "longrope",
        "rope_type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": BOUNDARY,
    }
    try:
        config = getattr(transformers, config_name)(
            **SIZES, rope_scaling=rope, original_max_position_embeddings=BOUNDARY
        )
        torch.manual_seed(0)
        return getattr(transformers, model_name)(config).eval().requires_grad_(False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        pytest.skip(f"transformers {transformers.__version__}: {error!r}")


def generated(model, cache, ids, tokens):
    """Text, and what was said of a dropped cache."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None, **{cache_argument(model): cache},
        )  # fmt: skip
    said = [str(each.message) for each in found]
    return out, [text for text in said if "drops this KvedgeCache" in text], said


@pytest.mark.parametrize("length", [5, BOUNDARY, BOUNDARY + 3])
def test_a_cache_that_a_model_drops_is_said_once(model, length):
    cache = KvedgeCache(model.config)
    ids = prompt(1, length)["input_ids"]
    out, told, _ = generated(model, cache, ids, 20)
    assert len(told) == 1 and f"more than {BOUNDARY} tokens" in told[0]
    assert type(model).__name__ in told[0]
    held = cache.get_seq_length()
    assert held <= BOUNDARY  # it was dropped indeed
    with pytest.raises(ValueError, match=rf"holds {held} tokens .* not \(1, {out.shape[1]}\)"):
        cache.token_ids = out
    assert cache.token_ids is None


def test_nothing_is_said_of_a_cache_that_is_kept(model):
    cache = KvedgeCache(model.config)
    _, told, said = generated(model, cache, prompt(1, 5)["input_ids"], BOUNDARY - 5)
    assert not told and cache.get_seq_length() == BOUNDARY - 1
    assert not [text for text in said if "deprecated" in text]
    long = KvedgeCache(model.config)
    ids = prompt(1, BOUNDARY + 5)["input_ids"]
    model(ids[:, :-1], **{cache_argument(model): long})
    _, told, _ = generated(model, long, ids, 4)
    assert not told and long.get_seq_length() == BOUNDARY + 8


def test_other_models_are_told_nothing():
    model = tiny_models.tiny_model("llama")
    _, told, said = generated(model, KvedgeCache(model.config), prompt(1, 20)["input_ids"], 20)
    assert not told and not [text for text in said if "deprecated" in text]
