"""What `kvedge tune` finds: a budget spent, and a policy of the model that comes along."""

import numpy as np
import pytest

import kvedge
from kvedge.data import STORIES_MODEL, STORIES_TEXT
from kvedge.evaluation import CacheChoice, LlamaSubject, evaluate
from kvedge.evaluation.tuning import _Frontier, _Layer, tune
from kvedge.llama import LlamaModel


def layers(rng, count=4, choices=4):
    """Layers that can be stored in several ways, of which some are never of use."""
    return [
        _Layer(rng.integers(1, 12, choices).astype(float), rng.random(choices) ** 3)
        for _ in range(count)
    ]


def totals(given, chosen):
    return tuple(
        sum(float(getattr(layer, name)[at]) for layer, at in zip(given, chosen, strict=True))
        for name in ("bytes", "kl")
    )


def every_choice(given):
    shape = [layer.bytes.size for layer in given]
    return [totals(given, chosen) for chosen in np.ndindex(*shape)]


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_kept_and_spent_as_well_as_can_be(seed):
    given = layers(np.random.default_rng(seed))
    frontier, every = _Frontier(given), every_choice(given)
    for budget in (min(every)[0], 15.0, 20.0, 1e9, None):
        within = every if budget is None else [one for one in every if one[0] <= budget]
        if within:
            chosen, expected = frontier.pick(budget, None)
            assert totals(given, chosen) in within
            assert expected == pytest.approx(min(kl for _, kl in within))
        for target in (1.5, 0.5, 0.1):
            enough = [size for size, kl in within if kl <= target]
            if not enough:
                with pytest.raises(kvedge.InvalidArgumentError, match="max_kl"):
                    frontier.pick(budget, target)
                continue
            size, kl = totals(given, frontier.pick(budget, target)[0])
            assert size == min(enough) and kl <= target


def test_many_layers_are_chosen_for_nearly_as_well():
    """More ways than are kept: the bound is the best mixture of two ways."""
    rng = np.random.default_rng(0)
    given = [
        _Layer(np.arange(1.0, 33.0) * rng.integers(90, 110), np.sort(rng.random(32))[::-1])
        for _ in range(20)
    ]
    frontier = _Frontier(given)
    for budget in (4e3, 1e4, 3e4):
        chosen, expected = frontier.pick(budget, None)
        size, kl = totals(given, chosen)
        assert size <= budget and kl == pytest.approx(expected)
        slopes = np.geomspace(1e-7, 1e-2, 200)  # of KL by bytes
        bound = max(
            sum(float((layer.kl + slope * layer.bytes).min()) for layer in given) - slope * budget
            for slope in slopes
        )
        assert bound <= expected <= 1.01 * bound + 0.02


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


@pytest.fixture(scope="module")
def tokens(stories):
    return stories.tokenizer.encode(STORIES_TEXT.read_text(encoding="utf-8")[:4000])[:900]


def test_a_policy_beats_the_best_single_format_on_a_text_that_it_did_not_see(stories, tokens):
    subject = LlamaSubject(stories)
    found = tune(subject, tokens[:400], bits=6.5, recent=32, sinks=0, window=200, chunk=50)
    assert found.bits_per_value <= 6.5 and found.uniform_bits <= found.bits_per_value
    assert found.result.bits_per_value == pytest.approx(found.bits_per_value, abs=0.01)
    assert found.result.kl.mean < found.uniform_result.kl.mean
    assert found.expected_kl == pytest.approx(found.result.kl.mean, rel=0.7)
    policies = {
        "tuned": found.policy,
        "kivi4": kvedge.LayerPolicy([{"dtype": "kivi4", "recent": 32}] * 5),
    }
    choices = [CacheChoice(name, "kivi4", {"policy": one}) for name, one in policies.items()]
    _, tuned, uniform = evaluate(subject, tokens[400:], choices, window=200, chunk=50)
    assert tuned.bits_per_value <= uniform.bits_per_value == pytest.approx(6.5, abs=0.01)
    assert tuned.kl.mean < 0.9 * uniform.kl.mean


def test_a_loss_that_is_allowed_is_kept(stories, tokens):
    subject = LlamaSubject(stories)
    found = tune(subject, tokens[:200], max_kl=2e-4, recent=0, sinks=0, window=100, chunk=50)
    assert found.result.kl.mean <= 2e-4 and found.bits_per_value < 12
    assert all("recent" not in layer for layer in found.policy.layers)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({}, "a budget is needed"),
        ({"bits": 2}, r"bits must be \d\.\d\d or more"),
        ({"max_kl": 1e-12}, "max_kl"),
        ({"bits": 6.1, "max_kl": 5e-6, "recent": 0}, "max_kl: .* within the bits"),
        ({"bits": 7, "window": 9999}, "window must be"),
        ({"bits": 7, "chunk": 0}, "chunk must be"),
        ({"bits": 7, "recent": 60}, "window must be more than the 60"),
        ({"bits": 7, "chunk": 60}, "the 60 that enter at once"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_kept_is_refused(budget, reason, stories, tokens):
    with pytest.raises(kvedge.InvalidArgumentError, match=reason):
        tune(LlamaSubject(stories), tokens[:60], **{"recent": 8, **budget})
