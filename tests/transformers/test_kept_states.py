"""Recurrent states in fewer bytes: kept so between steps, in checkpoints, copies and files."""

import copy

import pytest
from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge.errors import CorruptFileError, InvalidArgumentError, NonFiniteInputError
from kvedge.transformers import accelerate, enable_drafts
from kvedge.transformers.kept_states import Int8State
from kvedge.transformers.states import has_state, kept

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 keeps states in caches of their own"
)
NAMES = ["Qwen3_5Text", "Qwen3Next", "GraniteMoeHybrid", "FalconH1", "Jamba", "Bamba", "NemotronH"]
LOSES = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}  # of the largest of a row, in a step


def model_of(name):
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    return model


def step(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


def states_in(cache):
    """All recurrent states of a cache as they are held."""
    layers = [layer for layer in cache.layers if has_state(layer)]
    return [kept(layer, 0) for layer in layers if layer.is_recurrent_states_initialized[0]]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_kept_in_the_type_that_is_asked_for(name):
    model, ids = model_of(name), prompt(2, 20)["input_ids"]
    caches = {dtype: KvedgeCache(model.config, "float32", state_dtype=dtype) for dtype in LOSES}
    plain = KvedgeCache(model.config, "float32")
    logits = {dtype: step(model, cache, ids) for dtype, cache in caches.items()}
    assert torch.equal(logits["float32"], step(model, plain, ids))
    sizes = {
        dtype: sum(state.nbytes for state in states_in(cache)) for dtype, cache in caches.items()
    }
    assert sizes["float32"] == 2 * sizes["bfloat16"] > 2.5 * sizes["int8"] > 0
    wanted = states_in(plain)
    for dtype, cache in caches.items():
        for state, one in zip(states_in(cache), wanted, strict=True):
            state = state.decoded() if isinstance(state, Int8State) else state.float()
            largest = one.abs().amax(-1, keepdim=True)
            assert ((state - one).abs() <= LOSES[dtype] * largest).all()
    for _ in range(3):  # and goes on from them
        logits = {dtype: step(model, cache, ids[:, :1]) for dtype, cache in caches.items()}
        assert torch.equal(logits["float32"], step(model, plain, ids[:, :1]))
        assert all(torch.isfinite(one).all() for one in logits.values())
        assert not torch.equal(logits["int8"], logits["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "FalconH1"])
def test_checkpoints_copies_and_files_have_the_same_bytes(name, dtype, tmp_path):
    model, ids = model_of(name), prompt(2, 60)["input_ids"]
    cache = KvedgeCache(model.config, "float32", state_dtype=dtype)
    step(model, cache, ids[:, :30])
    assert cache.checkpoint() == 30
    held = sum(state.nbytes for state in states_in(cache))
    assert held <= cache.held_checkpoint_bytes < held + 100_000
    twin = copy.deepcopy(cache)
    cache.save(tmp_path, ids[:, :30])
    loaded = KvedgeCache.load(tmp_path, model)
    assert loaded.state_dtype == dtype
    step(model, cache, ids[:, 30:50])
    step(model, cache, ids[:, 50:51])
    cache.crop(-21)
    wanted = step(model, twin, ids[:, 51:])
    assert torch.equal(step(model, cache, ids[:, 51:]), wanted)
    assert torch.equal(step(model, loaded, ids[:, 51:]), wanted)
    cache.reset()
    anew = KvedgeCache(model.config, "float32", state_dtype=dtype)
    assert torch.equal(step(model, cache, ids), step(model, anew, ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["Qwen3_5Text", "FalconH1"])
def test_a_draft_that_is_taken_back_leaves_no_trace(name, dtype):
    model, ids = model_of(name), prompt(1, 40)["input_ids"]
    enable_drafts(model)
    cache = KvedgeCache(model.config, "float32", state_dtype=dtype)
    step(model, cache, ids[:, :20])
    step(model, cache, ids[:, 20:21])
    twin = copy.deepcopy(cache)
    cache.activate_past_recording()
    step(model, cache, ids[:, 21:29])
    cache.crop(-8)
    for one, other in zip(states_in(cache), states_in(twin), strict=True):
        pairs = zip(one, other, strict=True) if dtype == "int8" else [(one, other)]
        assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(step(model, cache, ids[:, 29:]), step(model, twin, ids[:, 29:]))


def test_states_of_another_type_than_the_index_says_are_refused(tmp_path, monkeypatch):
    model, ids = model_of("Qwen3_5Text"), prompt(1, 9)["input_ids"]
    cache = KvedgeCache(model.config, "float32", state_dtype="int8")
    step(model, cache, ids)
    told = KvedgeCache(model.config, "float32")._options
    monkeypatch.setattr(cache, "_options", told)
    cache.save(tmp_path, ids)
    with pytest.raises(CorruptFileError, match="int8"):
        KvedgeCache.load(tmp_path, model)


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 7, 33)])
def test_int8_encodes_what_it_decodes_to_the_same_bytes(shape):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(shape, generator=generator) * 10 ** torch.randn(
        (*shape[:-1], 1), generator=generator
    )
    state[0] = 0
    state[-1] *= 1e-39
    state[1] = state[1] / state[1].abs().max() * 3.4e38
    once = Int8State.of(state)
    again = Int8State.of(once.decoded())
    assert torch.equal(once.codes, again.codes) and torch.equal(once.scales, again.scales)
    error = (once.decoded() - state).abs()
    assert (error <= 0.502 * once.scales.clamp_min(2.0**-126)).all()
    with pytest.raises(NonFiniteInputError):
        Int8State.of(state / 0)


def test_a_type_that_there_is_not_or_a_model_without_states_is_refused():
    model = model_of("Qwen3_5Text")
    with pytest.raises(InvalidArgumentError, match="bfloat16, int8"):
        KvedgeCache(model.config, state_dtype="int4")
    with pytest.raises(InvalidArgumentError, match="no layer of LlamaConfig has one"):
        KvedgeCache(tiny_model("llama").config, state_dtype="int8")


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_token_changes_states_in_int8_as_it_does_in_float32(name, accelerated):
    # Mamba's layers change a state where it lies, and give nothing back
    model, ids = model_of(name), prompt(1, 20)["input_ids"]
    if accelerated:
        accelerate(model)
    caches = [KvedgeCache(model.config, "float32", state_dtype=one) for one in (None, "int8")]
    for cache in caches:
        step(model, cache, ids)
    for _ in range(3):
        before = [state.decoded() for state in states_in(caches[1])]
        for cache in caches:
            step(model, cache, ids[:, :1])
        for state, old, wanted in zip(
            *map(states_in, caches[1:]), before, states_in(caches[0]), strict=True
        ):
            assert not torch.equal(state.decoded(), old)
            assert (state.decoded() - wanted).norm() <= 0.05 * wanted.norm()
    branch = copy.deepcopy(caches[1])
    held = [state.clone() for state in states_in(branch)]
    step(model, caches[1], ids[:, 1:2])
    assert all(map(torch.equal, (a.codes for a in held), (b.codes for b in states_in(branch))))
