"""KvedgeCache(store=): what is read again is what was stored, to the bit."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from tiny_indexed import INDEXED, indexed_model
from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers
from tiny_structures import model_of

from kvedge import PrefixStore
from kvedge.errors import InvalidArgumentError
from kvedge.transformers import states

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 reads prompts anew"),
]
NAMES = ["llama", "gemma2", "Qwen3_5Text", "FalconH1"]
OPTIONS = [
    {},
    {"dtype": "small"},
    {"dtype": "int8"},
    {"dtype": "int4", "recent": 9, "sinks": 2},
    {"dtype": "float32", "key_offset": None},
]


def answer(model, store, ids, mask=None, new=3, **options):
    cache = KvedgeCache(model.config, store=store, **options)
    more = {} if mask is None else {"attention_mask": mask}
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=new, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip
    return cache, out


def assert_same(cache, other):
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        for row, own in zip(getattr(layer, "rows", ()), getattr(twin, "rows", ()), strict=True):
            n = min(len(row), len(own))
            assert np.array_equal(row.keys()[-n:], own.keys()[-n:])
            assert np.array_equal(row.values()[-n:], own.values()[-n:])
        if states.has_state(layer):
            one, two = states.copy_states(layer), states.copy_states(twin)
            for state, other_state in zip(
                (*one.conv.values(), *one.recurrent.values()),
                (*two.conv.values(), *two.recurrent.values()),
                strict=True,
            ):
                assert state is None or all(map(torch.equal, *map(parts_of, (state, other_state))))


def parts_of(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_prompt_is_read_again_but_for_its_last_token(tmp_path, name, options):
    model, ids = model_of(name), prompt(1, 300)["input_ids"]
    cold, first = answer(model, PrefixStore(tmp_path), ids, **options)
    warm, second = answer(model, PrefixStore(tmp_path), ids, **options)
    assert cold.reused == 0 and warm.reused == 299
    assert all(map(torch.equal, first.logits, second.logits))
    assert_same(cold, warm)
    other, _ = answer(model, PrefixStore(tmp_path), ids, dtype="bfloat16")
    assert other.reused == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_begins_alike_goes_on_from_the_last_place(tmp_path, name, options):
    model, store = model_of(name), PrefixStore(tmp_path)
    ids, other = prompt(1, 400)["input_ids"], prompt(1, 60, seed=1)["input_ids"]
    answer(model, store, ids, checkpoint_every=100, **options)
    both = torch.cat([ids[:, :330], other], 1)
    cache, _ = answer(model, store, both, checkpoint_every=100, **options)
    if name != "llama":
        assert cache.reused == 300
    else:
        assert cache.reused >= (330 if options.get("dtype") in ("int8", "float32") else 256)
    reused = cache.reused
    anew = KvedgeCache(model.config, checkpoint_every=100, **options)
    with torch.no_grad():
        for part in torch.split(both[:, :reused], [100] * (reused // 100) + [reused % 100], 1):
            if part.shape[1]:
                model(part, past_key_values=anew)
    loaded = KvedgeCache(model.config, store=store, checkpoint_every=100, **options)
    loaded._prefixes._begin(loaded, both[:, : reused + 1], None, model)
    assert loaded.reused == reused
    with torch.no_grad():
        for part in (both[:, reused : reused + 1], both[:, reused + 1 :]):
            logits = [model(part, past_key_values=x).logits for x in (anew, loaded)]
            assert torch.equal(*logits) or name == "llama"  # which was read in other steps


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_window_has_checkpoints_within_the_steps_of_a_prompt(tmp_path, options):
    model, store = model_of("gemma2"), PrefixStore(tmp_path)
    ids, other = prompt(1, 900)["input_ids"], prompt(1, 60, seed=1)["input_ids"]
    answer(model, store, ids, **options)
    both = torch.cat([ids[:, :800], other], 1)
    warm, second = answer(model, store, both, **options)
    cold, first = answer(model, PrefixStore(tmp_path / "empty"), both, **options)
    assert (cold.reused, warm.reused) == (0, 768)
    assert torch.equal(first.sequences, second.sequences)


@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_with_padding_are_sequences_of_their_own(tmp_path, name, options):
    model, store = model_of(name), PrefixStore(tmp_path)
    ids = prompt(3, 290)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[2, :240] = 0
    cold, first = answer(model, store, ids, mask, **options)
    warm, second = answer(model, store, ids, mask, **options)
    assert cold.reused == 0 and warm.reused == 289
    assert all(map(torch.equal, first.logits, second.logits))
    assert_same(cold, warm)
    alone, _ = answer(model, store, ids[:1, 7:], **options)
    assert alone.reused == 282  # as a batch of its own


def test_rows_that_hold_padding_are_not_stored_as_if_they_did_not(tmp_path):
    model, ids = (
        tiny_model("mistral", "sdpa"),
        prompt(1, 400, padding=100).values(),
    )  # windows alone
    first, second = (answer(model, PrefixStore(tmp_path), *ids) for _ in range(2))
    assert second[0].reused == 0
    assert all(map(torch.equal, first[1].logits, second[1].logits))


@pytest.mark.parametrize(("name", "max_bytes"), [("FalconH1", 1_200_000), ("Qwen3_5Text", 600_000)])
def test_checkpoints_of_a_prompt_keep_to_a_quarter_of_the_budget(tmp_path, name, max_bytes):
    model, ids = model_of(name), prompt(1, 2100)["input_ids"]
    ends = {}
    for folder, budget in (("all", None), ("few", max_bytes)):
        store = PrefixStore(tmp_path / folder, max_bytes=budget)
        assert answer(model, store, ids)[0].reused == 0
        ends[folder] = sorted(node.stop for node in store.nodes() if node.kind == "checkpoint")
        assert answer(model, store, ids)[0].reused == 2099
    assert ends["all"] == [*range(256, 2049, 256), 2099]
    assert ends["few"] == [*range(512, 2049, 512), 2099]


@pytest.mark.parametrize("name", INDEXED)
def test_index_keys_are_stored_with_their_tokens(tmp_path, name):
    model, store = indexed_model(name), PrefixStore(tmp_path)
    ids = prompt(2, 300)["input_ids"]
    mask = torch.ones_like(ids)
    if name == "Qwen4ExpForCausalLM":  # rows of the others hold padding
        mask[1, :9] = 0
    cold, first = answer(model, store, ids, mask)
    if name == "Glm5NextForConditionalGeneration":  # tells no cache that a step begins
        assert cold.store_prefix(first.sequences, model=model) > 0
        ids = torch.cat([first.sequences, ids[:, :1]], 1)
        warm, second = answer(model, PrefixStore(tmp_path), ids)
        assert warm.reused == 302
        plain = answer(model, None, ids)[1]
        assert torch.equal(second.sequences, plain.sequences)
        return
    warm, second = answer(model, PrefixStore(tmp_path), ids, mask)
    assert cold.reused == 0 and warm.reused == 299
    assert all(map(torch.equal, first.logits, second.logits))
    assert_same(cold, warm)
    assert warm.memory_bytes == cold.memory_bytes
    other = torch.cat([ids[:1, :280], prompt(1, 9, seed=1)["input_ids"]], 1)
    longer, third = answer(model, store, other)
    assert longer.reused >= 256
    assert torch.equal(third.sequences, answer(model, None, other)[1].sequences)


def test_rows_whose_blocks_count_padding_are_not_stored(tmp_path):
    model, ids = indexed_model("MiniMaxM3VLForCausalLM"), prompt(1, 300)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    for _ in range(2):
        assert answer(model, PrefixStore(tmp_path), ids, mask)[0].reused == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_is_stored_with_its_answer(tmp_path, name):
    model, store = model_of(name), PrefixStore(tmp_path)
    cache, out = answer(model, store, prompt(1, 280)["input_ids"], new=5)
    assert cache.store_prefix(out.sequences) > 0
    again = torch.cat([out.sequences, prompt(1, 9, seed=2)["input_ids"]], 1)
    assert answer(model, store, again)[0].reused == 284


def test_other_weights_and_namespaces_are_not_found(tmp_path):
    model, store, ids = model_of("llama"), PrefixStore(tmp_path), prompt(1, 280)["input_ids"]
    answer(model, store, ids, namespace="a")
    assert answer(model, store, ids, namespace="b")[0].reused == 0
    weight = model.lm_head.weight
    before = weight.detach()[0, 0].clone()
    try:
        weight.data[0, 0] += 1
        assert answer(model, store, ids, namespace="a")[0].reused == 0
    finally:
        weight.data[0, 0] = before
    assert answer(model, store, ids, namespace="a")[0].reused == 279


def test_what_a_store_cannot_serve_is_refused(tmp_path):
    config, store = model_of("llama").config, PrefixStore(tmp_path)
    with pytest.raises(InvalidArgumentError, match="evicts"):
        KvedgeCache(config, store=store, eviction="snapkv:tokens=512")
    with pytest.raises(InvalidArgumentError, match=r"must be a kvedge\.PrefixStore"):
        KvedgeCache(config, store=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="needs a cache that was given a store"):
        KvedgeCache(config).store_prefix([[1]])


def test_files_that_cannot_be_opened_are_a_warning(tmp_path, monkeypatch):
    model, ids = model_of("FalconH1"), prompt(1, 300)["input_ids"]
    store = PrefixStore(tmp_path)
    answer(model, store, ids)

    def refused(nodes):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", refused)
        with pytest.warns(RuntimeWarning, match="Too many open files"):
            assert answer(model, store, ids)[0].reused == 0
    assert answer(model, store, ids)[0].reused == 299
