"""What `kvedge tune` finds: a budget spent, and a policy of the model that comes along."""

import numpy as np
import pytest

import kvedge
from kvedge.data import STORIES_MODEL, STORIES_TEXT
from kvedge.evaluation import CacheChoice, LlamaSubject, evaluate
from kvedge.evaluation.tuning import _allocate, _Side, tune
from kvedge.llama import LlamaModel


def sides(rng, count=4, formats=3):
    """Sides whose formats lose less the more bytes they take."""
    made = []
    for at in range(count):
        sizes = np.cumsum(rng.integers(1, 5, formats)).astype(float)
        kl = np.sort(rng.random(formats) ** 3)[::-1]
        made.append(
            _Side(at // 2, bool(at % 2), ("a", "b", "c")[:formats], tuple(sizes), tuple(kl))
        )
    return made


def totals(given, chosen):
    return tuple(
        sum(getattr(side, name)[at] for side, at in zip(given, chosen, strict=True))
        for name in ("bytes", "kl")
    )


def every_choice(given):
    shape = [len(side.formats) for side in given]
    return [totals(given, chosen) for chosen in np.ndindex(*shape)]


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_of_bytes_is_kept_and_well_spent(seed):
    given = sides(np.random.default_rng(seed))
    every = every_choice(given)
    for budget in (min(every)[0], 15.0, 20.0, 1e9):
        if budget < min(every)[0]:
            continue
        chosen, expected = _allocate(given, budget, None)
        spent, kl = totals(given, chosen)
        assert spent <= budget and kl == pytest.approx(expected)
        # A single step more would not fit: so it is near what trying every choice finds.
        best = min(kl for size, kl in every if size <= budget)
        assert kl <= best + max(side.kl[0] for side in given)
        if budget == 1e9:
            assert kl == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_of_loss_is_kept_with_few_bytes(seed):
    given = sides(np.random.default_rng(seed))
    every = every_choice(given)
    for target in (1.5, 0.5, 0.1):
        if min(kl for _, kl in every) > target:
            with pytest.raises(kvedge.InvalidArgumentError, match="max_kl"):
                _allocate(given, None, target)
            continue
        chosen, expected = _allocate(given, None, target)
        kl = totals(given, chosen)[1]
        assert kl <= target and kl == pytest.approx(expected)
        for at in range(len(given)):  # no single side can do with less
            for smaller in range(chosen[at]):
                other = [*chosen[:at], smaller, *chosen[at + 1 :]]
                assert totals(given, other)[1] > target


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
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_kept_is_refused(budget, reason, stories, tokens):
    with pytest.raises(kvedge.InvalidArgumentError, match=reason):
        tune(LlamaSubject(stories), tokens[:60], **budget)
