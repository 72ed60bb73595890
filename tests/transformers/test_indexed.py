"""Families whose attention reads what an index chose, against transformers' own cache."""

import copy

import pytest
from tiny_indexed import INDEXED, indexed_model
from tiny_models import KvedgeCache, dynamic_cache, prompt, torch

from kvedge.transformers import accelerate, cache_argument, enable_drafts

OF_STATES = {"Qwen4ExpForCausalLM", "Glm5NextForConditionalGeneration"}
# transformers itself gives another text with padding, which takes part in what is chosen.
NOT_PADDED = {"MiniMaxM3VLForCausalLM"}

MODES = {
    "padding": ({"batch": 2, "length": 14, "padding": 5}, {}),
    "chunks": ({"batch": 2, "length": 14}, {"prefill_chunk_size": 5}),
    "beams": ({"batch": 1, "length": 13}, {"num_beams": 2, "num_return_sequences": 2}),
    "drafts": ({"batch": 1, "length": 13}, {"prompt_lookup_num_tokens": 3}),
}


def generate(model, cache, inputs, **options):
    options = {"max_new_tokens": 12, "do_sample": False, cache_argument(model): cache, **options}
    return model.generate(**inputs, **options).tolist()


def inputs_of(name, mode):
    given = {**MODES[mode][0]}
    if name in NOT_PADDED:
        given.pop("padding", None)
    inputs = prompt(**given)
    if mode == "drafts":
        inputs = {key: value.repeat(1, 2) for key, value in inputs.items()}
    return inputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("accelerated", [False, True])
def test_the_text_is_that_of_plain_transformers(name, mode, accelerated):
    inputs, options = inputs_of(name, mode), MODES[mode][1]
    model = indexed_model(name, "eager")
    plain = {} if mode == "drafts" and name in OF_STATES else options  # which it refuses there
    wanted = generate(model, dynamic_cache(model), inputs, **plain)
    model.set_attn_implementation("kvedge")
    if mode == "drafts":
        assert bool(enable_drafts(model)) == (name in OF_STATES)
    cache = KvedgeCache(model.config, dtype="float32")
    acceleration = accelerate(model) if accelerated else None
    assert generate(model, cache, inputs, **options) == wanted
    assert acceleration is None or not acceleration.fallbacks


def ask(model, cache, ids, tokens=6):
    """Tokens written after all of `ids`, the text."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = torch.tensor(generate(model, cache, inputs, max_new_tokens=tokens))
    if isinstance(cache, KvedgeCache):
        cache.token_ids = out
    return out


@pytest.mark.parametrize("name", INDEXED)
def test_any_course_of_a_conversation_is_that_of_its_text(name, tmp_path):
    """Branches, files in the middle of a block, going back, beams after that."""
    model = indexed_model(name)
    with torch.no_grad():
        text = ask(model, KvedgeCache(model.config, dtype="float32"), prompt(2, 14)["input_ids"])
    longer = torch.cat([text, prompt(2, 5, seed=1)["input_ids"]], 1)
    other = torch.cat([text[:, :14], prompt(2, 7, seed=2)["input_ids"]], 1)

    def plain(ids):
        model.set_attn_implementation("eager")
        wanted = ask(model, dynamic_cache(model), ids)
        model.set_attn_implementation("kvedge")
        return wanted

    cache = KvedgeCache(model.config, dtype="float32")
    if name == "Glm5NextForConditionalGeneration":  # asks no cache for the size of a mask
        with torch.no_grad():
            model(text[:, :13], use_cache=True, **{cache_argument(model): cache})
        cache.checkpoint()
    ask(model, cache, text[:, :14])
    branch = copy.deepcopy(cache)
    cache.save(tmp_path, model=model)
    loaded = KvedgeCache.load(tmp_path, model)
    assert loaded.memory_bytes == cache.memory_bytes
    for each in (cache, loaded):
        assert ask(model, each, longer).tolist() == plain(longer).tolist()
    assert branch.keep_prefix(other) in (13, 14)
    assert ask(model, branch, other).tolist() == plain(other).tolist()
    loaded.batch_select_indices(torch.tensor([1]))
    loaded.batch_repeat_interleave(2)
    twice = torch.cat([loaded_text := plain(longer)[1:], loaded_text])
    twice = torch.cat([twice, prompt(2, 4, seed=3)["input_ids"]], 1)
    assert ask(model, loaded, twice).tolist() == plain(twice).tolist()
    cache.reset()
    assert cache.memory_bytes == 0
    assert ask(model, cache, other[:1]).tolist() == plain(other[:1]).tolist()
