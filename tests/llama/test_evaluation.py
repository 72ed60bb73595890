"""What formats cost a model: the arithmetic against a reference, names of configurations, plots."""

from pathlib import Path

import numpy as np
import pytest
from llama_reference import logits as reference_logits

import kvedge
from kvedge.core.formats import FORMATS
from kvedge.core.recommended import RECOMMENDED
from kvedge.data import STORIES_MODEL
from kvedge.evaluation import (
    FLOAT32,
    CacheChoice,
    Estimate,
    LlamaSubject,
    Recall,
    Result,
    default_choices,
    evaluate,
    parse_choices,
    recall,
)
from kvedge.evaluation.plot import draw, frontier
from kvedge.llama import LlamaModel, with_key_bias

SHARED = Path(__file__).parents[3] / "shared"  # beside the checkout, not part of it


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


@pytest.fixture(scope="module")
def story(stories):
    text = "Once upon a time, there was a big dog named Max. Max liked to run in the park. "
    return stories.tokenizer.encode(text * 8)[:300]


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


# ---- measuring -----------------------------------------------------------------------------------


def test_blocks_are_predicted_each_from_its_own_start(stories, story):
    tokens = story[:25]
    losses = []
    for part in (tokens[:10], tokens[10:20], tokens[20:]):
        log_p = log_softmax(reference_logits(stories.config, stories.weights, part))[:-1]
        losses.append(-log_p[np.arange(len(part) - 1), part[1:]])
    subject = LlamaSubject(stories)
    (float32,) = evaluate(subject, tokens, [], window=10, chunk=4)
    every = np.concatenate(losses)
    assert float32.nats.mean == pytest.approx(every.mean(), abs=1e-4)
    assert float32.perplexity == pytest.approx(np.exp(every.mean()), rel=1e-4)
    assert (float32.tokens, float32.blocks) == (every.size, 3)
    # a single token left over predicts nothing
    (float32,) = evaluate(subject, tokens[:21], [], window=10)
    assert float32.nats.mean == pytest.approx(every[:18].mean(), abs=1e-4)
    assert float32.blocks == 2


class Scripted:
    """A model of three tokens whose logits depend on the format and the position alone."""

    context, vocab_size = 6, 3

    def __init__(self, logits):
        self.logits = {name: np.asarray(rows, np.float32) for name, rows in logits.items()}

    def reader(self, choice):
        return _ScriptedReader(self.logits[choice.name])


class _ScriptedReader:
    def __init__(self, rows):
        self.rows, self.position = rows, 0

    def clear(self):
        self.position = 0

    def read(self, tokens):
        start, self.position = self.position, self.position + len(tokens)
        return self.rows[start : self.position]

    @property
    def used_bytes(self):
        return 10 * self.position


@pytest.mark.parametrize("chunk", [1, 2, 32])
def test_the_measures_are_those_of_the_logits(chunk):
    rng = np.random.default_rng(3)
    exact, other = rng.normal(size=(2, 6, 3)).astype(np.float32)
    subject = Scripted({"float32": exact, "int8": other})
    tokens = rng.integers(0, 3, 15)
    float32, int8 = evaluate(subject, tokens, parse_choices(["int8"]), chunk=chunk)
    p, q = log_softmax(exact), log_softmax(other)
    sums = []  # per block: tokens, loss, KL, agreements
    for start in (0, 6, 12):
        targets = tokens[start + 1 : start + 6]
        n = len(targets)
        loss = (p - q)[np.arange(n), targets].sum()
        kl = (np.exp(p) * (p - q))[:n].sum()
        sums.append((n, loss, kl, (p.argmax(1) == q.argmax(1))[:n].sum()))
    n, *figures = np.array(sums, float).T
    for name, total in zip(("loss", "kl", "agreement"), figures, strict=True):
        mean = total.sum() / n.sum()
        error = np.sqrt(((total - mean * n) ** 2).sum() * 3 / 2) / n.sum()
        estimate = getattr(int8, name)
        assert estimate.mean == pytest.approx(mean, rel=1e-6), name
        assert estimate.standard_error == pytest.approx(error, rel=1e-6), name
    assert int8.largest_logit_difference == pytest.approx(np.abs(exact - other)[:5].max())
    assert int8.bytes_per_token == 10 and int8.bits_per_value == 32
    assert int8.nats.mean - float32.nats.mean == pytest.approx(int8.loss.mean)
    assert float32.kl == float32.loss == Estimate(0.0, 0.0)
    assert float32.agreement.mean == 1


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_what_means_hide_is_told(chunk, monkeypatch):
    monkeypatch.setattr("kvedge.evaluation.measure._ELEMENTS", 6)  # two rows of logits at once
    rng = np.random.default_rng(4)
    exact, change = 2 * rng.normal(size=(2, 6, 3)).astype(np.float32)
    other = exact + change
    tokens = rng.integers(0, 3, 15)  # windows of 6, 6 and 3
    subject = Scripted({"float32": exact, "int8": other})
    float32, int8 = evaluate(subject, tokens, parse_choices(["int8"]), chunk=chunk)
    p, q = log_softmax(exact), log_softmax(other)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    read = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]  # positions in the windows
    assert int8.kl_99 == pytest.approx(np.percentile(kl[read], 99), rel=1e-5)
    first, second = np.sort(exact, axis=1)[:, :0:-1].T
    sure = [i for i in read if first[i] - second[i] > 1]
    changed = [i for i in sure if exact[i].argmax() != other[i].argmax()]
    assert 0 < len(changed) < len(sure) < len(read)
    assert (int8.sure_tokens, int8.sure_changed) == (len(sure), len(changed))
    assert int8.sure_changed_share == len(changed) / len(sure)
    assert (float32.kl_99, float32.sure_changed) == (0, 0)
    # quarters of 6 positions: 0 and 1, 2, 3 and 4 of them, and 5, of which nothing is predicted
    assert [(each.first, each.last) for each in int8.positions] == [(1, 2), (3, 3), (4, 5)]
    means = [kl[[0, 1]].mean(), kl[2], kl[[3, 4]].mean()]
    assert [each.kl for each in int8.positions] == pytest.approx(means, rel=1e-6)
    total = sum(
        each.loss * sum(each.first <= i + 1 <= each.last for i in read) for each in int8.positions
    )
    assert total / len(read) == pytest.approx(int8.loss.mean)


class Letters:
    """A tokenizer whose tokens are characters, behind one that begins every text."""

    def encode(self, text):
        return [1, *map(ord, text)]


class Remembering:
    """Recalls every number, but for those whose digit it may not; answers nothing else right."""

    context, vocab_size = 2000, 128

    def __init__(self, forgets):
        self.forgets = forgets

    def reader(self, choice):
        return _RememberingReader("7" if choice.name in self.forgets else None)


class _RememberingReader:
    used_bytes = 1

    def __init__(self, lost):
        self.lost, self.text = lost, ""

    def clear(self):
        self.text = ""

    def read(self, tokens):
        logits = np.zeros((len(tokens), 128), np.float32)
        for row, token in enumerate(tokens):
            self.text += chr(token)
            city, of, said = self.text.rpartition("The code of ")[2].partition(" is")
            known = self.text.partition(f"The code of {city} is")[2].partition("\n")[0]
            if of and self.lost not in list(known) and len(said) < len(known):
                logits[row, ord(known[len(said)])] = 9
        return logits


@pytest.mark.parametrize("chunk", [7, 400])
def test_numbers_are_hidden_at_ten_depths_and_asked_for(chunk):
    text = Letters().encode("so it goes on. " * 100)
    subject = Remembering(forgets={"int8"})
    found = recall(
        subject, Letters(), text, parse_choices(["int8", "kivi4"]), [900, 1200], chunk=chunk
    )
    names = [(each.choice.name, each.length) for each in found]
    kinds = ["float32", "int8", "kivi4"]
    assert names == [(name, length) for length in (900, 1200) for name in kinds]
    for exact, forgetful, other in (found[:3], found[3:]):
        assert exact.right == (True,) * 10 == exact.kept and exact.accuracy == 1
        assert other == Recall(other.choice, other.length, exact.right, exact.kept, exact.nats)
        assert 0 < sum(forgetful.right) < 10 and forgetful.nats > exact.nats
        assert forgetful.kept == forgetful.right


def test_lengths_that_cannot_be_are_refused():
    text = Letters().encode("so it goes on. " * 100)
    for length, reason in ((200, "or more"), (2001, "made for 2000"), (1999, "need a text of")):
        with pytest.raises(kvedge.InvalidArgumentError, match=reason):
            recall(Remembering(()), Letters(), text[:1000], [], [length])


def test_one_block_has_no_standard_error(stories, story):
    for result in evaluate(LlamaSubject(stories), story[:20], parse_choices(["int8"])):
        assert result.blocks == 1 and result.loss.standard_error is None


def test_every_format_and_option_costs_little_and_takes_its_bytes(stories, story):
    choices = default_choices(stories.config.head_dim)
    assert [each.name for each in choices[:2]] == list(RECOMMENDED)
    assert {each.dtype for each in choices[2:]} == set(FORMATS)
    first, *results = evaluate(LlamaSubject(stories), story, choices, window=100)
    assert first.choice == FLOAT32 and first.bytes_per_token == 1280
    assert [each.choice for each in results] == [each for each in choices if each != FLOAT32]
    for result in results:
        cache = stories.new_cache(result.choice.dtype, **result.choice.cache_options)
        stories.forward(story[:99], cache)
        assert result.bytes_per_token == pytest.approx(cache.used_bytes / 99)
        # Keys of 8 channels, of which one is large: 16 levels are few.
        most = 0.5 if result.choice.dtype == "int4" else 0.1
        assert 0 < result.kl.mean < most, result.choice.name
        assert abs(result.loss.mean) < most / 2, result.choice.name


def test_attention_options_reach_attention(stories, story):
    choices = parse_choices(["float32:precision_bits=24", "int8", "int8:precision_bits=8"])
    _, same, int8, coarse = evaluate(LlamaSubject(stories), story[:100], choices)
    assert same.kl.mean < 1e-9
    # NumPy attends in float64 and scalar C in float32, whatever is asked for.
    rounds = kvedge.backend == "native" and kvedge.isa_info()["isa"] != "scalar"
    assert (coarse.kl.mean != int8.kl.mean) == rounds
    assert coarse.bytes_per_token == int8.bytes_per_token


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ([], {}),
        ([1], {}),
        ([1, 2], {"window": 1}),
        ([1, 2], {"window": 513}),
        ([1, 2], {"chunk": 0}),
    ],
    ids=str,
)
def test_texts_and_windows_that_make_no_sense_are_refused(stories, tokens, options):
    with pytest.raises(kvedge.InvalidArgumentError):
        evaluate(LlamaSubject(stories), tokens, [], **options)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="../shared is not there")
def test_books5m_predicts_its_text_as_well_as_it_did_in_training():
    """3.27 nats per token over the first 40 windows of 512 tokens."""
    model = LlamaModel.from_file(SHARED / "models/books5M.bin")
    text = (SHARED / "text/books_val.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text[:80000])[: 40 * 512]
    float32, int8 = evaluate(LlamaSubject(model), tokens, parse_choices(["int8"]))
    assert float32.nats.mean == pytest.approx(3.2724, abs=0.002)
    assert int8.loss.mean == pytest.approx(0, abs=0.001)
    assert int8.kl.mean < 1e-4


# ---- names of configurations ---------------------------------------------------------------------


def test_configurations_are_named_by_format_and_options():
    names = [
        "float16,int8:group_size=32,key_offset=auto, bfloat16",
        "int8:precision_bits=8",
        "int8",
    ]
    assert parse_choices([*names, "float16"]) == [
        CacheChoice("float16", "float16"),
        CacheChoice(
            "int8:group_size=32,key_offset=auto", "int8", {"group_size": 32, "key_offset": "auto"}
        ),
        CacheChoice("bfloat16", "bfloat16"),
        CacheChoice("int8:precision_bits=8", "int8", {}, {"precision_bits": 8}),
        CacheChoice("int8", "int8"),
    ]
    (auto,) = parse_choices(["auto:group_size=4"])
    assert (auto.dtype, auto.cache_options["value_dtype"]) == ("kivi8", "int8")
    assert (auto.cache_options["value_rotation"], auto.cache_options["group_size"]) == (True, 4)
    assert [each.dtype for each in parse_choices(["small", "small:key_offset=auto"])] == [
        "kivi4",
        "int4",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int9",
        "int8,",
        "group_size=32",
        "int8:size=32",
        "int8:group_size",
        "int8:max_seq_len=9",
        "int8:value_head_dim=4",
    ],
)
def test_names_of_no_configuration_are_refused(name):
    with pytest.raises(kvedge.InvalidArgumentError, match=r"only (auto|.*key_dtype=)"):
        parse_choices([name])


def test_the_error_for_options_that_clash_names_the_configuration(stories, story):
    choices = parse_choices(["float16:group_size=4"])
    with pytest.raises(kvedge.InvalidArgumentError, match=r"^float16:group_size=4: "):
        evaluate(LlamaSubject(stories), story, choices)


# ---- the stress test -----------------------------------------------------------------------------


def test_a_key_bias_makes_channels_constant_before_rope(stories, story):
    biased = with_key_bias(stories, 100.0)
    c = stories.config
    rope = c.rope
    for layer in range(c.num_layers):
        keys = {}
        for name, model in (("plain", stories), ("biased", biased)):
            cache = model.new_cache("float32")
            model.forward(story[:50], cache)
            turned = [rope.rotate(k, -t) for t, k in enumerate(cache.k(layer))]
            keys[name] = np.array(turned)  # (n, KV heads, head_dim), before RoPE
        mean = keys["biased"].mean(axis=0)
        lengths = np.hypot(mean[:, 0::2], mean[:, 1::2])  # (KV heads, pairs)
        assert np.all((lengths[:, 3] > 40) & (lengths[:, 3] < 170))  # the pair that turns slowest
        assert np.all(lengths[:, :3] < 20)
        deviation = keys["biased"].std(axis=0)
        assert deviation.max() < 20  # constant: only the model's own keys vary
    assert stories.weights.layers[0].bqkv is None  # left alone


def test_a_key_bias_is_what_one_scale_per_row_loses(stories, story):
    choices = parse_choices(["int8"])
    _, plain = evaluate(LlamaSubject(stories), story, choices)
    _, biased = evaluate(LlamaSubject(with_key_bias(stories, 100.0)), story, choices)
    assert biased.kl.mean > 10 * plain.kl.mean


@pytest.mark.parametrize("magnitude", [0.0, -1.0, float("inf"), float("nan")])
def test_a_key_bias_that_is_none_is_refused(stories, magnitude):
    with pytest.raises(kvedge.InvalidArgumentError, match="magnitude"):
        with_key_bias(stories, magnitude)


# ---- the plot ------------------------------------------------------------------------------------


def result(name, size, kl):
    some = Estimate(kl, kl / 10)
    return Result(CacheChoice(name, "int8"), 100, 2, size, 8.0, some, some, some, some, 0.1)


def test_the_frontier_holds_what_nothing_smaller_does_better():
    results = [result("a", 16, 0.1), result("b", 8, 0.2), result("c", 9, 0.3), result("d", 8, 0.4)]
    assert [each.choice.name for each in frontier(results)] == ["b", "a"]


def test_a_plot_is_drawn(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw([result("float32", 32, 0.0), result("a", 16, 0.1), result("b", 8, 0.2)], figure, "title")
    left, _ = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["frontier", "a", "b"]
    figure.savefig(tmp_path / "plot.svg")
