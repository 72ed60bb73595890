"""The choice of tokens: each step alone, and all of them as transformers takes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvedge
from kvedge.llama import Sampler
from kvedge.llama.sampling import LLAMA_CPP_ORDER, TRANSFORMERS_ORDER
from kvedge.llama.text_stream import TextStream

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))


def drawn(logits=LOGITS, seen=(), **options):
    """The tokens that come in many draws."""
    return {Sampler(1.0, seed=seed, **options)(logits, seen) for seed in range(200)}


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 0.31}, {0, 1}),
        ({"top_k": 3, "top_p": 0.55}, {0}),  # 0.5 of the 0.9 that top-k leaves is 0.556
        ({"top_p": 0.55}, {0, 1}),
        ({"logit_bias": {0: -np.inf, 3: 1.0}}, {1, 2, 3}),
        ({"top_k": 2, "samplers": ()}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6, "samplers": ("top_k", "top_p")}, {0}),  # 0.5 of 0.75
        ({"top_k": 2, "top_p": 0.6, "samplers": ("top_p", "top_k")}, {0, 1}),
    ],
    ids=str,
)
def test_only_the_tokens_that_are_left_are_drawn(options, tokens):
    assert drawn(**options) == tokens


def test_a_repeat_penalty_makes_seen_tokens_less_likely():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    assert Sampler(repeat_penalty=1.5)(logits) == 0
    assert Sampler(repeat_penalty=1.5)(logits, [0]) == 1
    assert Sampler(repeat_penalty=1.5)(logits, [0, 1]) == 0  # both by the same factor
    assert Sampler(repeat_penalty=1.5, repeat_last=1)(logits, [0, 2]) == 0
    assert Sampler(repeat_penalty=1.5, repeat_last=-1)(logits, [0] + [2] * 100) == 1
    assert Sampler(repeat_penalty=1.5)(logits, [0] + [2] * 100) == 0
    assert Sampler(repeat_penalty=1.5, repeat_last=0)(logits, [0]) == 0
    np.testing.assert_array_equal(logits, np.array([2.0, 1.5, -1.0], np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
        {"repeat_penalty": np.inf},
        {"repeat_last": -2},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: np.inf}},
        {"logit_bias": {1: np.nan}},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(kvedge.InvalidArgumentError):
        Sampler(1.0, **options)


def test_biases_that_do_not_fit_the_vocabulary_are_refused():
    with pytest.raises(kvedge.InvalidArgumentError, match=f"token {10**20} of a vocabulary of 4"):
        Sampler(logit_bias={10**20: 1.0})(np.zeros(4, np.float32))
    with pytest.raises(kvedge.InvalidArgumentError, match="token 4 of a vocabulary of 4"):
        Sampler(logit_bias={4: 1.0})(LOGITS)
    with pytest.raises(kvedge.InvalidArgumentError, match="forbids every token"):
        Sampler(logit_bias=dict.fromkeys(range(4), -np.inf))(LOGITS)


@pytest.mark.extras
@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_those_of_transformers(seed):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers").generation.logits_process
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(40)).astype(np.float32)
    seen = [int(token) for token in rng.integers(0, 40, 10)]
    bias = {3: 1.5, 7: -2.0}
    options = {"top_k": 12, "top_p": 0.8, "min_p": 0.08, "repeat_penalty": 1.3}
    scores, ids = torch.tensor(logits)[None], torch.tensor([seen])
    for processor in (
        processors.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]),
        processors.RepetitionPenaltyLogitsProcessor(1.3),
        processors.TemperatureLogitsWarper(0.7),
        processors.TopKLogitsWarper(12),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.08),
    ):
        scores = processor(ids, scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    sampler = Sampler(0.7, seed=1, logit_bias=bias, repeat_last=-1, **options)
    counts = np.bincount([sampler(logits, seen) for _ in range(4000)], minlength=40)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(counts / 4000, expected, atol=5 * np.sqrt(0.25 / 4000))


@pytest.mark.parametrize("temperature", [0.3, 1.5, 4.0])
def test_in_llama_cpps_order_temperature_adds_no_token(temperature):
    options = {"top_p": 0.7, "min_p": 0.4}
    for samplers, at in ((LLAMA_CPP_ORDER, 1.0), (TRANSFORMERS_ORDER, temperature)):
        seen = {
            Sampler(temperature, seed=seed, samplers=samplers, **options)(LOGITS)
            for seed in range(300)
        }
        p = np.exp(LOGITS.astype(float) / at)
        p /= p.sum()
        kept = int(np.searchsorted(np.cumsum(p), 0.7)) + 1
        assert seen == {token for token in range(kept) if p[token] >= 0.4 * p[0]}


def test_a_late_penalty_sorts_what_is_left_anew():
    samplers = ("top_k", "penalties", "top_p", "temperature")
    late = Sampler(
        1.0, seed=0, top_k=2, top_p=0.1, repeat_penalty=9.0, repeat_last=-1, samplers=samplers
    )
    assert {late(np.array([2.0, 1.5, 1.4], np.float32), [0]) for _ in range(50)} == {1}


@pytest.mark.parametrize("samplers", [("typ_p",), ("top_k", "top_k"), "top_k"], ids=str)
def test_unknown_samplers_are_refused(samplers):
    with pytest.raises(kvedge.InvalidArgumentError, match="samplers must be some of penalties"):
        Sampler(1.0, samplers=samplers)


class Bytes:
    """A token is a byte."""

    def piece(self, token, previous=None):
        return bytes([token])


@given(st.text(alphabet="abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4)))
def test_text_comes_whole_and_ends_before_the_first_stop_text(text, stop):
    stream, shown = TextStream(Bytes(), stop=stop), ""
    for byte in text.encode():
        shown += stream.push(byte)
        if stream.stop_string is not None:
            break
        assert text.startswith(shown)
    shown += stream.rest()
    # the stop text that is complete first ends it; of those, the one that began first
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert shown == (text[: min(ends)[1]] if ends else text)


def test_a_character_split_between_two_texts_is_completed():
    first, second = "é".encode()
    assert TextStream(Bytes(), before=[ord("a"), first]).push(second) == "é"
    stream = TextStream(Bytes())
    assert stream.push(first) == "" == stream.rest(incomplete=False)
    assert stream.rest() == "\ufffd"
