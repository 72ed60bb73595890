"""Every mode of generate that the installed transformers has, against its own cache."""

import pytest
from tiny_models import (
    KvedgeCache,
    dynamic_cache,
    prompt,
    reference_model,
    tiny_model,
    torch,
    transformers,
)

from kvedge.transformers import layers

LLAMA, WINDOWS = "llama", "gemma2"


def generate(model, cache, inputs, **options):
    """Tokens written greedily unless options say otherwise, and the cache."""
    torch.manual_seed(0)
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    return model.generate(**inputs, past_key_values=cache, **options).tolist()


@pytest.fixture(params=[LLAMA, WINDOWS])
def family(request):
    """A model of full attention, and one with a window in every second layer."""
    return request.param


def both(family, inputs, storage=None, **options):
    """What transformers' own cache writes, and what ours does."""
    model = reference_model(family)
    wanted = generate(model, dynamic_cache(model), inputs, **options)
    model = tiny_model(family)
    cache = KvedgeCache(model.config, **(storage or {"dtype": "float32"}))
    return wanted, generate(model, cache, inputs, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"prefill_chunk_size": 4},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["sampling", "sampled-beams", "sequences", "beams-returned", "prefill-chunks", "penalties"],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_mode_of_generate(family, options, padding):
    wanted, got = both(family, prompt(2, padding=padding), **options)
    assert got == wanted


@pytest.mark.parametrize("dtype", ["kivi2", "int4"])
@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "num_beams": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=["sampled-beams", "prompt-lookup"],
)
def test_tokens_are_read_as_recent_dtype_while_all_are_recent(family, dtype, options):
    """Nothing is read from rows or runs of few bits, whatever is stored there and taken back."""
    if "num_beams" not in options and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 cannot take tokens back from layers with a window")
    inputs = prompt(1, 40) if "num_beams" not in options else prompt(2, 40, padding=5)
    storage = {"dtype": dtype, "recent": 200, "recent_dtype": "float32"}
    wanted, got = both(family, inputs, storage, max_new_tokens=40, **options)
    assert got == wanted


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) >= 5, reason="transformers 5 has no group beams"
)
def test_group_beams():
    wanted, got = both(LLAMA, prompt(2), num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
    assert got == wanted


@pytest.mark.parametrize("length", [5, 13])
def test_prompt_lookup(length, family):
    inputs = prompt(1, length)
    inputs["input_ids"] = torch.cat([inputs["input_ids"]] * 3, 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if family == WINDOWS and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 cannot take tokens back from layers with a window")
    wanted, got = both(family, inputs, prompt_lookup_num_tokens=3, eos_token_id=2)
    assert got == wanted


def test_assisted_by_another_model():
    model, assistant = tiny_model(LLAMA), tiny_model("qwen3", "sdpa")
    reference = generate(reference_model(LLAMA), None, prompt())
    cache = KvedgeCache(model.config, dtype="float32")
    assert generate(model, cache, prompt(), assistant_model=assistant) == reference
    assert cache.get_seq_length() >= 36 - 13


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_16_bits(family, dtype):
    """Storage in the model's own type is exact, so the difference is rounding inside attention."""
    inputs, model = prompt(2, padding=4), tiny_model(family).to(getattr(torch, dtype))
    reference = reference_model(family).to(getattr(torch, dtype))
    with torch.inference_mode():
        cache = KvedgeCache(model.config, dtype=dtype)
        got = model(**inputs, past_key_values=cache).logits
        wanted = reference(**inputs, past_key_values=dynamic_cache(reference)).logits
    assert got.dtype == wanted.dtype
    visible = inputs["attention_mask"].bool()
    error = (got - wanted)[visible].float().norm() / wanted[visible].float().norm()
    assert error < (0.03 if dtype == "bfloat16" else 0.004)
    with torch.inference_mode():
        model.generate(**inputs, past_key_values=cache.__class__(model.config), max_new_tokens=4)


def test_the_text_depends_on_the_mask(family):
    """What the tests above compare is worth comparing: padding that is seen changes the text."""
    model, inputs = tiny_model(family), prompt(1, padding=5)
    seen = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    caches = [KvedgeCache(model.config, dtype="float32") for _ in range(2)]
    assert generate(model, caches[0], inputs) != generate(model, caches[1], seen)


def test_threads_are_those_that_torch_is_set_to(monkeypatch):
    model, seen, before = tiny_model(LLAMA), [], torch.get_num_threads()
    attend = layers.attend_batch
    monkeypatch.setattr(
        layers,
        "attend_batch",
        lambda *args, **options: seen.append(options["num_threads"]) or attend(*args, **options),
    )
    try:
        for num_threads, wanted in ((None, [1, 2]), (3, [3, 3])):
            cache = KvedgeCache(model.config, num_threads=num_threads)
            for number, count in enumerate(wanted, 1):
                torch.set_num_threads(number)
                with torch.no_grad():
                    model(torch.tensor([[5]]), past_key_values=cache)
                assert seen == [count] * 4
                seen.clear()
    finally:
        torch.set_num_threads(before)


def test_two_models_and_two_caches_in_turn():
    llama, gemma = tiny_model(LLAMA), tiny_model(WINDOWS)
    wanted = [
        generate(model, KvedgeCache(model.config, dtype="float32"), prompt())[0]
        for model in (llama, gemma)
    ]
    texts = [prompt()["input_ids"], prompt()["input_ids"]]
    caches = [KvedgeCache(model.config, dtype="float32") for model in (llama, gemma)]
    with torch.no_grad():
        for _ in range(24):
            for i, model in enumerate((llama, gemma)):
                new = texts[i][:, caches[i].get_seq_length() :]
                logits = model(new, past_key_values=caches[i]).logits
                texts[i] = torch.cat([texts[i], logits[:, -1:].argmax(-1)], 1)
    assert [text[0].tolist() for text in texts] == wanted
