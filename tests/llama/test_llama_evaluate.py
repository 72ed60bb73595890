"""Nats per token: the arithmetic, what int8 costs, and the figure known for books5M."""

from pathlib import Path

import numpy as np
import pytest
from llama_reference import logits as reference_logits

import kvedge
from kvedge.data import STORIES_MODEL
from kvedge.llama import LlamaModel, nats_per_token

SHARED = Path(__file__).parents[3] / "shared"  # beside the checkout, not part of it


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


@pytest.fixture(scope="module")
def story(stories):
    text = "Once upon a time, there was a big dog named Max. Max liked to run in the park. "
    return stories.tokenizer.encode(text * 8)[:300]


def test_windows_are_predicted_each_from_its_own_start(stories, story):
    tokens = story[:25]
    losses = []
    for part in (tokens[:10], tokens[10:20], tokens[20:]):
        logits = reference_logits(stories.config, stories.weights, part)[:-1]
        log_probability = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.extend(-log_probability[np.arange(len(part) - 1), part[1:]])
    got = nats_per_token(stories, tokens, window=10, dtype="float32")
    assert got == pytest.approx(np.mean(losses), abs=1e-4)
    # a single token left over predicts nothing
    assert nats_per_token(stories, tokens[:21], window=10, dtype="float32") == pytest.approx(
        np.mean(losses[:18]), abs=1e-4
    )


def test_int8_costs_little(stories, story):
    float32 = nats_per_token(stories, story, dtype="float32")
    assert nats_per_token(stories, story) == pytest.approx(float32, abs=0.02)


@pytest.mark.parametrize(
    ("tokens", "window"), [([], None), ([1], None), ([1, 2], 1), ([1, 2], 513)], ids=str
)
def test_texts_and_windows_that_make_no_sense_are_refused(stories, tokens, window):
    with pytest.raises(kvedge.InvalidArgumentError):
        nats_per_token(stories, tokens, window=window)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="../shared is not there")
@pytest.mark.parametrize(
    ("options", "cost"), [({"dtype": "float32"}, 0.0), ({}, 0.002)], ids=["float32", "int8"]
)
def test_books5m_predicts_its_text_as_well_as_it_did_in_training(options, cost):
    """3.27 nats per token over the first 40 windows of 512 tokens."""
    model = LlamaModel.from_file(SHARED / "models/books5M.bin")
    text = (SHARED / "text/books_val.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text[:80000])[: 40 * 512]
    assert nats_per_token(model, tokens, **options) == pytest.approx(3.2724 + cost, abs=0.002)
