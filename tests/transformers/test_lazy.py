"""Keys and values stay stored: who runs fused never decodes them, who does not is named, once."""

import contextlib
import copy
import tracemalloc
import warnings

import pytest
from tiny_models import (
    FAMILIES,
    KvedgeCache,
    dynamic_cache,
    prompt,
    reference_model,
    tiny_model,
    torch,
    transformers,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvedge
from kvedge.transformers import layers, lazy

# Families whose attention code is their own: name: (config, model, options).
DECODED = {
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 64, "n_layers": 3, "n_heads": 4}),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": False},
    ),
    "codegen": (
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
}


@pytest.fixture(autouse=True)
def _warned_of_nobody():
    lazy.forget_warnings()


@pytest.fixture
def decodings(monkeypatch):
    """A list that grows by one with every decoding of keys or values."""
    calls = []
    elements = layers.LazyRows.elements

    def counted(self):
        calls.append(self)
        return elements(self)

    monkeypatch.setattr(layers.LazyRows, "elements", counted)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_models_make_no_decoded_copy_of_the_past(family, decodings):
    model = tiny_model(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.generate(
            **prompt(2, padding=3), past_key_values=KvedgeCache(model.config), max_new_tokens=12,
            do_sample=False,
        )  # fmt: skip
    assert not decodings


class _Made(TorchDispatchMode):
    """Counts the elements that torch operations make."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements += sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


def made_by_a_step(model, tokens, monkeypatch):
    """Elements that torch makes, and bytes that Python and NumPy hold at most, for a token."""
    cache = KvedgeCache(model.config)
    with torch.no_grad(), monkeypatch.context() as patch:
        model(prompt(1, tokens)["input_ids"], past_key_values=cache)
        model(torch.tensor([[5]]), past_key_values=cache)  # what is kept for later is made here
        for name in ("keys", "values"):
            patch.setattr(kvedge.QuantizedKvLayer, name, None)
        patch.setattr("kvedge.layer.reading.read_rows", None)
        tracemalloc.start()
        try:
            with _Made() as made:
                model(torch.tensor([[6]]), past_key_values=cache)
            return made.elements, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_takes_no_memory_for_the_past(family, decodings, monkeypatch):
    """Neither torch nor NumPy makes anything as large as one decoded head of the past."""
    model = tiny_model(family)
    (few, few_bytes), (many, many_bytes) = (
        made_by_a_step(model, tokens, monkeypatch) for tokens in (100, 400)
    )
    decoded = 300 * 16  # elements of one head of one layer's keys
    assert many - few < decoded
    assert not decodings
    if kvedge.backend == "native":
        assert many_bytes - few_bytes < 4 * decoded


@pytest.mark.parametrize("family", DECODED)
def test_attention_code_of_a_models_own_is_right_and_named_once(family, decodings):
    if family == "mpt" and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4's MPT fails with any cache")
    config_name, model_name, options = DECODED[family]
    config = getattr(transformers, config_name)(
        vocab_size=128, bos_token_id=1, eos_token_id=None, pad_token_id=0, **options
    )
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    inputs, texts = prompt(2, padding=5), []
    model.set_attn_implementation("eager")
    for cache in (dynamic_cache(model), KvedgeCache(config, dtype="float32")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                texts.append(
                    model.generate(
                        **inputs, past_key_values=cache, max_new_tokens=16, do_sample=False
                    ).tolist()
                )
        with contextlib.suppress(ValueError):  # a class may take no other than its own
            model.set_attn_implementation("kvedge")
    assert texts[0] == texts[1]
    slow = [str(w.message) for w in caught if w.category is RuntimeWarning]
    if model._supports_attention_backend:  # GPT-J and CodeGen from transformers 5.24 on
        assert not decodings
        assert not slow
        return
    assert decodings
    assert len(slow) == 1
    assert slow[0].startswith(f"{model_name} is served the slow way: ")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_loaded_without_kvedges_attention_is_right_and_named(attention):
    model = tiny_model("llama", attention)
    reference = reference_model("llama").generate(
        **prompt(2, padding=5), max_new_tokens=12, do_sample=False
    )
    with pytest.warns(RuntimeWarning, match=r"LlamaForCausalLM .* attn_implementation='kvedge'"):
        got = model.generate(
            **prompt(2, padding=5), past_key_values=KvedgeCache(model.config, dtype="float32"),
            max_new_tokens=12, do_sample=False,
        )  # fmt: skip
    assert got.tolist() == reference.tolist()


def test_a_model_with_kvedges_attention_takes_any_cache(decodings):
    """Without a cache, and with transformers' own: attention is then sdpa's."""
    model, inputs = tiny_model("gemma2"), prompt(2, padding=5)
    reference = reference_model("gemma2")
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = reference.generate(**inputs, **options).tolist()
    assert model.generate(**inputs, **options).tolist() == wanted
    assert model.generate(**inputs, use_cache=False, **options).tolist() == wanted
    llama = tiny_model("llama").requires_grad_(True).train()
    llama(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()  # training runs


def test_reading_keys_outside_a_model_warns_of_nothing():
    cache = KvedgeCache(tiny_model("llama").config)
    keys, values = cache.update(torch.ones(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (keys + values).sum() == 96
        assert keys.numpy().shape == (1, 2, 3, 16)
        assert values.tolist()[0][0][0] == [0.0] * 16
        assert torch.equal(copy.deepcopy(keys), keys + 0)
        assert repr(keys) == "LazyRows(shape=(1, 2, 3, 16), dtype=torch.float32)"


def test_a_mask_that_is_passed_is_honoured(decodings):
    """Two documents in one sequence, kept apart by a mask of four dimensions, bool or added."""
    model, ids = tiny_model("llama"), prompt(1, 12)["input_ids"]
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    visible[6:, :6] = False
    added = torch.zeros(12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = torch.arange(6).repeat(2)[None]
    with torch.no_grad():
        wanted = model(ids[:, 6:], past_key_values=KvedgeCache(model.config, "float32")).logits
        for mask in (visible, added):
            cache = KvedgeCache(model.config, "float32")
            got = model(
                ids, attention_mask=mask[None, None], position_ids=positions, past_key_values=cache
            )
            assert torch.allclose(got.logits[:, 6:], wanted, atol=1e-4)
    assert not decodings


@pytest.mark.parametrize("kind", ["right", "holes"])
def test_padding_that_is_not_on_the_left_is_hidden(kind, decodings):
    model, reference = tiny_model("gemma2"), reference_model("gemma2")
    inputs = prompt(2, 20)
    inputs["attention_mask"][0, 12:] = 0
    if kind == "holes":
        inputs["attention_mask"][1, 3:7] = 0
    with torch.no_grad():
        got = model(**inputs, past_key_values=KvedgeCache(model.config, "float32")).logits
        wanted = reference(**inputs, past_key_values=dynamic_cache(reference)).logits
    visible = inputs["attention_mask"].bool()
    assert torch.allclose(got[visible], wanted[visible], atol=1e-4)
    assert not decodings
