"""A KvedgeCache of bounded memory: in every mode of generate, kept, saved, or refused."""

import copy

import pytest
from tiny_models import KvedgeCache, prompt, reference_model, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge import InvalidArgumentError
from kvedge.layer.layer import store_of
from kvedge.transformers.evicting import KvedgeEvictingLayer

METHODS = [
    "sinks+recent:tokens=24,sinks=2",
    "snapkv:tokens=24,window=4",
    "snapkv:tokens=24,window=8,per=layer",
]
FIVE = int(transformers.__version__.split(".")[0]) >= 5


def evicting(cache):
    return [layer for layer in cache.layers if isinstance(layer, KvedgeEvictingLayer)]


def generate(model, cache, inputs, **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": 40, "do_sample": False, **options}
    return model.generate(**inputs, past_key_values=cache, **options)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padding", [0, 5])
def test_sinks_and_recent_are_what_a_mask_shows_that_hides_the_others(family, padding):
    """Positions and padding too: transformers' own attention, with a mask for each token."""
    model, inputs = tiny_model(family), prompt(2, 60, padding=padding)
    cache = KvedgeCache(model.config, "float32", eviction="sinks+recent:tokens=24,sinks=2")
    ids, got, seen = inputs["input_ids"], [], []
    for at in range(60):
        mask = inputs["attention_mask"][:, : at + 1]
        positions = (mask.sum(1, keepdim=True) - 1).clamp(min=0)
        with torch.inference_mode():
            logits = model(
                ids[:, at : at + 1], attention_mask=mask, position_ids=positions,
                past_key_values=cache,
            ).logits  # fmt: skip
        got.append(logits[:, 0])
        seen.append([(row.num_dropped, len(row)) for row in evicting(cache)[0].rows])
    full = torch.zeros(2, 1, 60, 60, dtype=torch.bool)
    for row in range(2):
        gap = padding if row == 0 else 0
        for at in range(gap, 60):
            gone, held = seen[at][row]
            visible = [*range(gap, gap + min(2, held)), *range(at + 1 - max(held - 2, 0), at + 1)]
            full[row, 0, at, visible] = True
            assert gone + held == at + 1 - gap and held <= 24
    own = reference_model(family)
    masks = {"full_attention": full}
    if family != "llama":
        near = torch.arange(60)[:, None] - torch.arange(60) < model.config.sliding_window
        causal = torch.ones(60, 60, dtype=torch.bool).tril() & near
        columns = inputs["attention_mask"].bool()[:, None, None]
        masks["sliding_attention"] = causal & columns
    lowest = torch.finfo(torch.float32).min
    masks = {name: torch.zeros(one.shape).masked_fill(~one, lowest) for name, one in masks.items()}
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    given = masks["full_attention"] if family == "llama" else masks
    with torch.inference_mode():
        wanted = own(ids, attention_mask=given, position_ids=positions).logits
    difference = (torch.stack(got, 1) - wanted)[inputs["attention_mask"].bool()]
    assert difference.abs().max() < 2e-3 * wanted.abs().max()


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 8},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["sampling", "beams", "sequences", "prefill-chunks", "prompt-lookup"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_mode_of_generate_stays_within_the_budget(family, options, method):
    alone = "prompt_lookup_num_tokens" in options
    if alone and not FIVE:
        pytest.skip("transformers 4 cannot take tokens back from layers with a window")
    model, inputs = tiny_model(family), prompt(1 if alone else 2, 40, padding=0 if alone else 5)
    cache = KvedgeCache(model.config, "float32", eviction=method)
    out = generate(model, cache, inputs, **options)
    assert (out.shape[1], cache.get_seq_length()) == (80, 79)
    assert evicting(cache)
    for layer in evicting(cache):
        for row, gap in zip(layer.rows, layer.padding, strict=True):
            assert len(row) <= 24 + (3 if alone else 0)
            assert row.num_dropped + len(row) + gap == 79


@pytest.mark.parametrize("method", METHODS)
def test_a_large_budget_changes_nothing(method):
    method = method.replace("tokens=24", "tokens=100")
    model, inputs = tiny_model("llama"), prompt(2, 40, padding=5)
    caches = KvedgeCache(model.config), KvedgeCache(model.config, eviction=method)
    assert torch.equal(*(generate(model, cache, inputs) for cache in caches))
    assert caches[0].memory_bytes == caches[1].memory_bytes


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_conversation_goes_on_with_the_same_tokens(method, tmp_path):
    model, inputs = tiny_model("llama"), prompt(2, 40, padding=5)
    cache = KvedgeCache(model.config, "int8", eviction=method)
    out = generate(model, cache, inputs, max_new_tokens=13)
    cache.save(tmp_path, out)
    loaded, branch = KvedgeCache.load(tmp_path, model.config), copy.deepcopy(cache)
    assert loaded.eviction == cache.eviction
    for one, other in zip(evicting(cache), evicting(loaded), strict=True):
        ends = [[store_of(row).evicted_at for row in each.rows] for each in (one, other)]
        assert ends[0] == ends[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 13), value=1)
    texts = [
        generate(model, each, {"input_ids": out, "attention_mask": mask})
        for each in (cache, loaded, branch)
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    for one, other in zip(evicting(cache), evicting(loaded), strict=True):
        for row, same in zip(one.rows, other.rows, strict=True):
            assert (row.key_codes == same.key_codes).all()
            assert row.num_dropped == same.num_dropped > 0


def test_a_cache_goes_back_to_the_last_eviction_and_no_further():
    model, inputs = tiny_model("llama"), prompt(1, 40)
    cache = KvedgeCache(model.config, "int8", eviction="sinks+recent:tokens=48")
    out = generate(model, cache, inputs, max_new_tokens=30)
    at = max(row.num_dropped for row in evicting(cache)[0].rows)
    assert at
    cache.token_ids = out
    held = [row.key_codes.copy() for row in evicting(cache)[0].rows]
    with pytest.raises(InvalidArgumentError, match="evicted tokens at"):
        cache.keep_prefix(out[:, :45])
    with pytest.raises(InvalidArgumentError, match="evicted tokens at"):
        cache.crop(-30)
    assert (held[0] == evicting(cache)[0].rows[0].key_codes).all()
    assert cache.keep_prefix(out[:, :69]) == 68
    cache.token_ids = out[:, :69]
    assert cache.keep_prefix(torch.full((1, 9), 2)) == 0  # nothing in common: it begins anew
    assert torch.equal(generate(model, cache, inputs, max_new_tokens=30), out)


def test_no_checkpoint_before_an_eviction_is_left():
    model, inputs = tiny_model("gemma2"), prompt(1, 40)
    cache = KvedgeCache(model.config, "int8", eviction="snapkv:tokens=24,window=4")
    generate(model, cache, inputs, max_new_tokens=2)
    assert cache.checkpoints == [40]  # once the prompt's tokens went
    cache.evict()
    assert cache.checkpoints in ([], [40])
    generate(model, cache, prompt(1, 60, seed=1), max_new_tokens=2)
    assert 40 not in cache.checkpoints


def test_a_model_with_states_evicts_from_its_attention():
    if not FIVE:
        pytest.skip("transformers 4 has no states beside a cache")
    for name in ("Qwen3Next", "FalconH1"):
        model, _, _ = structure_of(name)
        model.set_attn_implementation("kvedge")
        cache = KvedgeCache(model.config, "int8", eviction="snapkv:tokens=24,window=4")
        generate(model, cache, prompt(2, 40, padding=5))
        assert evicting(cache)
        assert all(len(row) <= 24 for layer in evicting(cache) for row in layer.rows)


def test_eval_evicts_after_each_chunk():
    from kvedge.evaluation import evaluate, parse_choices
    from kvedge.evaluation.hugging_face import HuggingFaceSubject

    subject = HuggingFaceSubject(tiny_model("llama"))
    choices = [f"float32:eviction={one},eviction_tokens=40" for one in ("sinks+recent", "snapkv")]
    tokens = prompt(1, 161)["input_ids"][0].numpy()
    float32, *others = evaluate(subject, tokens, parse_choices(choices), window=161)
    for each in others:
        assert each.bytes_per_token <= float32.bytes_per_token / 4
        assert each.kl.mean > 1e-4


def test_what_cannot_be_evicted_is_refused():
    model, inputs = tiny_model("llama"), prompt(1, 40)
    with pytest.raises(InvalidArgumentError, match="over several ranks evicts no tokens"):
        KvedgeCache(model.config, eviction="snapkv:tokens=24,window=4", group=object())
    with pytest.raises(InvalidArgumentError, match="the method of eviction"):
        KvedgeCache(model.config, eviction="oldest:tokens=24")
    config = getattr(transformers, "Gemma3nTextConfig", None)
    if config is not None:
        with pytest.raises(InvalidArgumentError, match="read the rows of an earlier one"):
            KvedgeCache(structure_of("Gemma4Text")[0].config, eviction="snapkv:tokens=24,window=4")
    own = tiny_model("llama", "sdpa")  # decodes all tokens
    with pytest.raises(InvalidArgumentError, match="attn_implementation='kvedge'"):
        generate(own, KvedgeCache(own.config, "int8", eviction="sinks+recent:tokens=24"), inputs)
    cache = KvedgeCache(model.config, "kivi4", eviction="snapkv:tokens=60")
    with pytest.raises(InvalidArgumentError, match=r"96 last ones .* in runs of 32"):
        generate(model, cache, prompt(1, 80))
    cache = KvedgeCache(model.config, "int8", eviction="snapkv:tokens=24,window=4")
    generate(model, cache, inputs)
    mask = torch.zeros(1, 1, 1, 80)
    mask[..., 40] = -torch.inf
    with pytest.raises(InvalidArgumentError, match="mask that is written out"):
        model(torch.tensor([[5]]), attention_mask=mask, past_key_values=cache)
