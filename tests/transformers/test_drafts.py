"""Drafts of models with states: written as without, taken back without a trace, computed once."""

import copy
from collections import Counter

import numpy as np
import pytest
from tiny_models import KvedgeCache, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge import InvalidArgumentError
from kvedge.transformers import cache_argument, enable_drafts

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("transformers 4 has no states beside a cache", allow_module_level=True)

STATES = ["Qwen3Next", "Qwen3_5Text", "GraniteMoeHybrid", "FalconH1", "OlmoHybrid"]
# torch computes several tokens of KimiLinear in seconds; test_accelerate has its drafts.
KIMI = pytest.param("KimiLinear", marks=pytest.mark.slow)
FAMILIES = [*STATES, KIMI, "NemotronH", "Lfm2", "Gemma4Text"]
DENSE = ["Qwen3_5Text", "FalconH1", "OlmoHybrid", "Lfm2"]  # experts compute tokens together


@pytest.fixture(scope="module")
def models():
    """Each model is made once."""
    return {}


def model_of(models, name):
    if name not in models:
        model, _, _ = structure_of(name)
        if name != "KimiLinear":
            model.set_attn_implementation("kvedge")
        models[name] = model
    return models[name]


def new_cache(model):
    return KvedgeCache(model.config, "float32")


def step(model, cache, *ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), **{cache_argument(model): cache}).logits


def contents(cache):
    """All rows and states of a cache."""
    found = []
    for layer in cache.layers:
        for row in getattr(layer, "rows", ()):
            found += [row.keys().copy(), row.values().copy()]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += [state.numpy().copy() for state in states.values() if state is not None]
    return found


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def prompt():
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    ids[0, 10:] = ids[0, :10]  # so that prompt lookup finds something
    return ids


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["prompt-lookup", "assisted"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_writes_with_drafts_what_it_writes_without(models, name, mode):
    model = model_of(models, name)
    plain = model.generate(
        prompt(), do_sample=False, max_new_tokens=24, past_key_values=new_cache(model)
    )
    enable_drafts(model)
    more = {"prompt_lookup_num_tokens": 4}
    if mode == "assisted":
        more = {"assistant_model": tiny_model("llama")}
    cache = new_cache(model)
    out = model.generate(
        prompt(), do_sample=False, max_new_tokens=24, past_key_values=cache, **more
    )
    assert torch.equal(out, plain)
    assert cache.get_seq_length() == 43


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_that_is_rejected_leaves_no_trace(models, name):
    model = model_of(models, name)
    enable_drafts(model)
    cache, other = new_cache(model), new_cache(model)
    rng = np.random.default_rng(0)
    for each in (cache, other):
        each.activate_past_recording()
        step(model, each, *prompt()[0].tolist())
        each.crop(0)
    for n in (1, 5, 64):
        before = contents(cache)
        step(model, cache, *rng.integers(3, 128, n))
        cache.crop(-n)
        assert same(contents(cache), before)
    for _ in range(64):  # one token at a time, as an assistant's own
        step(model, cache, *rng.integers(3, 128, 1))
    cache.crop(-64)
    assert same(contents(cache), before)
    for ids in ([7, 8], [9]):
        assert torch.equal(step(model, cache, *ids), step(model, other, *ids))


@pytest.mark.parametrize("name", DENSE)
def test_what_is_kept_of_a_draft_does_not_depend_on_what_is_rejected(models, name):
    model = model_of(models, name)
    enable_drafts(model)
    cache = new_cache(model)
    cache.activate_past_recording()
    step(model, cache, *prompt()[0].tolist())
    cache.crop(0)
    one, other, plain = (copy.deepcopy(cache) for _ in range(3))
    step(model, one, 7, 8, 9, 10, 11)
    step(model, other, 7, 8, 99, 98, 97)
    step(model, plain, 7, 8)
    for each, back in ((one, 3), (other, 3), (plain, 0)):
        each.crop(-back)
        assert each.get_seq_length() == 22
    assert same(contents(one), contents(other))
    for a, b in zip(contents(one), contents(plain), strict=True):
        assert np.abs(a - b).max() < 1e-5 * max(np.abs(b).max(), 1)  # other shapes of products
    for each in (one, other):  # a draft over a draft, part of each taken back
        for n in (4, 3, 1):
            step(model, each, *range(20, 20 + n))
        each.crop(-5)
        assert each.get_seq_length() == 25
    assert same(contents(one), contents(other))


def test_only_states_are_computed_again_and_only_for_tokens_that_are_kept(models):
    model = model_of(models, "Qwen3_5Text")
    enable_drafts(model)
    counts = Counter()
    layers = model.model.layers
    mixer = next(one.linear_attn for one in layers if hasattr(one, "linear_attn"))
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: counts.update(
                {name: (args[0] if args else kwargs["hidden_states"]).shape[1]}
            ),
            with_kwargs=True,
        )
        for name, module in (("feed-forward", layers[0].mlp), ("state", mixer))
    ]
    cache = new_cache(model)
    cache.activate_past_recording()
    step(model, cache, *prompt()[0].tolist())
    cache.crop(0)
    counts.clear()
    for n, back in ((8, 0), (8, 8), (8, 5)):
        step(model, cache, *range(3, 3 + n))
        cache.crop(-back)
    for handle in handles:
        handle.remove()
    assert counts == {"feed-forward": 24, "state": 24 + 3}


def test_memory_of_a_recorded_past_does_not_grow(models):
    model = model_of(models, "Qwen3_5Text")
    enable_drafts(model)
    cache = new_cache(model)
    cache.activate_past_recording()
    held = []
    for n in range(120):
        step(model, cache, 3 + n % 100)
        held.append(max(len(calls) for calls in cache._drafts._calls.values()))
    assert max(held) <= 64 + 2 * 16
    before = contents(cache)
    step(model, cache, *range(3, 67))
    cache.crop(-64)
    assert same(contents(cache)[-1:], before[-1:])


def test_checkpoints_are_taken_between_drafts(models):
    model = model_of(models, "Qwen3_5Text")
    enable_drafts(model)
    cache = new_cache(model)
    out = model.generate(
        prompt(), do_sample=False, max_new_tokens=8, past_key_values=cache,
        prompt_lookup_num_tokens=2,
    )  # fmt: skip
    assert cache.checkpoints
    cache.token_ids = out
    kept = cache.keep_prefix(out[:, : cache.checkpoints[-1] + 1])
    assert kept == cache.checkpoints[-1] == cache.get_seq_length()


def test_states_that_cannot_go_back_are_refused(models):
    model, _, _ = structure_of("Qwen3Next")
    cache = new_cache(model)
    cache.activate_past_recording()
    step(model, cache, *prompt()[0].tolist())
    before = contents(cache)
    with pytest.raises(InvalidArgumentError, match="cannot go back by 3 tokens"):
        cache.crop(-3)  # nothing has told what the tokens were computed from
    assert same(contents(cache), before) and not cache.is_croppable
    enable_drafts(model)
    step(model, cache, 5, 6)
    assert cache.is_croppable
    before = contents(cache)
    with pytest.raises(InvalidArgumentError, match="it has recorded the last 2"):
        cache.crop(-3)
    assert same(contents(cache), before)


@pytest.mark.parametrize("name", ["Jamba", "Zamba", "Bamba"])
def test_a_model_that_forgets_its_states_is_refused_or_writes_the_same(name):
    model, _, _ = structure_of(name)
    try:
        enable_drafts(model)
    except InvalidArgumentError as error:
        assert "forgets its states where several tokens follow" in str(error)
    else:  # a later transformers mends it
        plain = model.generate(prompt(), do_sample=False, max_new_tokens=24)
        cache = new_cache(model)
        more = {"prompt_lookup_num_tokens": 4, "past_key_values": cache}
        out = model.generate(prompt(), do_sample=False, max_new_tokens=24, **more)
        assert torch.equal(out, plain)


def test_a_model_without_states_is_left_as_it_is():
    model = tiny_model("llama")
    assert enable_drafts(model) == 0
    assert "_is_stateful" not in vars(model)
    with pytest.raises(InvalidArgumentError, match="must be a model"):
        enable_drafts(model.config)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Qwen3Next", "InklingText"])
def test_a_model_writes_with_multi_token_prediction_what_it_writes_without(name, monkeypatch):
    """The layers that predict are made here, as no tiny checkpoint has them."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip(f"transformers {transformers.__version__} has no multi-token prediction")
    monkeypatch.setattr(
        layers.MtpModel,
        "from_pretrained",
        classmethod(lambda cls, main, **_: cls(main, 2).eval().requires_grad_(False)),
    )
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    enable_drafts(model)
    options = {"do_sample": False, "max_new_tokens": 24}
    plain = model.generate(prompt(), past_key_values=new_cache(model), **options)
    model.config.num_mtp_layers = 2
    if name != "InklingText":
        model.config.mtp_layer_types = ["full_attention"] * 2
    out = model.generate(prompt(), past_key_values=new_cache(model), use_mtp=True, **options)
    assert torch.equal(out, plain)
