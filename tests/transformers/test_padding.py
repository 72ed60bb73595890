"""Padding on the left is not held: what counts from the beginning counts a sequence's tokens."""

import copy

import numpy as np
import pytest
from tiny_models import (
    VOCABULARY,
    KvedgeCache,
    prompt,
    reference_model,
    tiny_model,
    torch,
    transformers,
)

from kvedge import errors

pytestmark = pytest.mark.extras

OPTIONS = {
    "int8": {},
    "int8 with an offset": {"key_offset": "auto"},
    "fp8": {"dtype": "fp8_e4m3"},
    "int4 with first and last ones": {"dtype": "int4", "sinks": 4, "recent": 4},
    "kivi4": {"dtype": "kivi4", "sinks": 4},
}


@pytest.fixture(scope="module")
def biased():
    """A model whose keys have large biases, as Qwen2's, and whose padding is embedded as 0."""
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_()
            layer.self_attn.k_proj.bias[::7] += 20
    model.set_attn_implementation("kvedge")
    return model


def padded(ids, padding):
    """The prompt behind padding, beside one of that length without."""
    other = torch.randint(3, VOCABULARY, (ids.shape[1] + padding,))
    rows = torch.stack([torch.cat([torch.zeros(padding, dtype=torch.int64), ids[0]]), other])
    mask = torch.ones_like(rows)
    mask[0, :padding] = 0
    return rows, mask


def log_p(model, ids, mask, cache, chunks=(), steps=4):
    """Log-probabilities after each of the last tokens, which come one by one; of row 0."""
    results, done, end = [], 0, ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for stop in [*chunks, *range(end - steps, end + 1)]:
        out = model(
            ids[:, done:stop], attention_mask=mask[:, :stop], position_ids=positions[:, done:stop],
            past_key_values=cache,
        )  # fmt: skip
        results.append(out.logits[0, -1].double().log_softmax(-1))
        done = stop
    return torch.stack(results[len(chunks) :])


def divergence(p, q):
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_costs_nothing(biased, name):
    ids = prompt(1, 40, seed=3)["input_ids"]
    options = OPTIONS[name]

    def cost(ids, mask, **how):
        exact = log_p(biased, ids, mask, KvedgeCache(biased.config, dtype="float32"), **how)
        cache = KvedgeCache(biased.config, **options)
        return divergence(exact, log_p(biased, ids, mask, cache, **how)), cache

    alone, cache = cost(ids, torch.ones_like(ids))
    wanted = [layer.rows[0] for layer in cache.layers]
    for padding in (3, 80):
        behind, cache = cost(*padded(ids, padding))
        assert behind <= 1.1 * alone + 1e-7
        for layer, row in zip(cache.layers, wanted, strict=True):
            assert layer.padding == [padding, 0]
            assert len(layer.rows[0]) == len(row) == 40
            np.testing.assert_allclose(layer.rows[0].keys(), row.keys(), rtol=0, atol=0.5)
            if row.key_scale is not None:
                np.testing.assert_allclose(layer.rows[0].key_scale, row.key_scale, rtol=1e-3)
    behind, cache = cost(*padded(ids, 80), chunks=(50, 90))  # the first chunk is all padding
    assert behind <= 3 * alone + 1e-7  # scales are provisional at 10 tokens
    assert cache.layers[0].padding == [80, 0]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_beams_crops_copies_and_files_keep_the_padding(family, tmp_path):
    """Text is that of a DynamicCache; windows are of 8 tokens or so."""
    model, reference = tiny_model(family), reference_model(family)
    inputs = prompt(2, 12, padding=7)
    options = {"max_new_tokens": 14, "do_sample": False}
    wanted = reference.generate(**inputs, num_beams=3, **options)
    cache = KvedgeCache(model.config, dtype="float32")
    got = model.generate(**inputs, past_key_values=cache, num_beams=3, **options)
    assert got.tolist() == wanted.tolist()
    wanted = reference.generate(**inputs, **options)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 14, dtype=torch.int64)], 1)
    for how in ("deepcopy", "file", "reordered"):
        cache = KvedgeCache(model.config, dtype="float32")
        first = model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
        if how == "deepcopy":
            cache = copy.deepcopy(cache)
        elif how == "file":
            cache.save(tmp_path / "talk", first)
            cache = KvedgeCache.load(tmp_path / "talk", model.config)
            assert cache.token_ids.tolist() == first[:, :-1].tolist()
        else:
            for _ in range(2):
                cache.reorder_cache(torch.tensor([1, 0]))
        rest = model.generate(
            first, attention_mask=mask[:, : first.shape[1]], past_key_values=cache,
            max_new_tokens=9, do_sample=False,
        )  # fmt: skip
        assert rest.tolist() == wanted.tolist()


def test_a_crop_into_the_padding_begins_anew():
    model, inputs = tiny_model("llama"), prompt(2, 12, padding=7)
    cache = KvedgeCache(model.config, dtype="float32")
    wanted = model(**inputs, past_key_values=cache).logits
    cache.crop(-8 if transformers.__version__ > "5" else 4)
    assert cache.get_seq_length() == 4
    assert cache.layers[0].padding == [4, 0]
    positions = torch.arange(4, 12)[None]
    again = model(
        inputs["input_ids"][:, 4:], attention_mask=inputs["attention_mask"],
        position_ids=positions, past_key_values=cache,
    ).logits  # fmt: skip
    torch.testing.assert_close(again[:, -5:], wanted[:, -5:], atol=1e-4, rtol=0)
    assert cache.layers[0].padding == [7, 0]


@pytest.mark.parametrize("added", [False, True])
def test_padding_in_a_mask_of_four_dimensions_is_not_held(added):
    model, inputs = tiny_model("llama"), prompt(2, 12, padding=7)
    visible = (
        torch.ones(12, 12, dtype=torch.bool).tril() & inputs["attention_mask"][:, None, None].bool()
    )
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    caches = [KvedgeCache(model.config, dtype="float32") for _ in range(2)]
    four, two = (
        model(inputs["input_ids"], attention_mask=m, position_ids=positions, past_key_values=c)
        for m, c in zip((mask if added else visible, inputs["attention_mask"]), caches, strict=True)
    )
    assert caches[0].layers[0].padding == [7, 0]
    torch.testing.assert_close(four.logits[:, 7:], two.logits[:, 7:], atol=1e-5, rtol=0)


def test_padding_that_is_shown_later_is_an_error():
    model, inputs = tiny_model("llama"), prompt(2, 12, padding=7)
    cache = KvedgeCache(model.config)
    model(**inputs, past_key_values=cache)
    with pytest.raises(errors.InvalidArgumentError, match="padded by 7 tokens"):
        model(inputs["input_ids"][:, :1], past_key_values=cache)
