"""Generation: llama2.c's known text, sampling, stopping, the end of the context, going on."""

import numpy as np
import pytest

import kvedge
from kvedge.data import STORIES_MODEL
from kvedge.llama import LlamaModel, Sampler, generate, shift_context

# llama2.c, test_all.py: ./run stories260K.bin -z tok512.bin -t 0.0 -n 200
LLAMA2C_TEXT = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. \
One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. \
She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""

# llama2.c, doc/stories260K.md: the same, 256 steps (run.c's default)
LLAMA2C_MORE = """\
 said, "I'm sorry, mom. I didn't know what to do." Her mom said, "Don't worry, Lily. \
We can help you."""


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


def text_of(generation):
    return "".join(piece.text for piece in generation)


def test_greedy_text_is_llama2cs_own(stories):
    generation = generate(stories, max_tokens=200, cache=stories.new_cache("float32"))
    assert text_of(generation) == LLAMA2C_TEXT
    assert generation.stop_reason == "length"
    assert len(generation.tokens) == len(generation.cache) == 200


def test_the_story_goes_on_as_llama2cs_and_ends_with_bos(stories):
    generation = generate(stories, cache=stories.new_cache("float32"))
    pieces = list(generation)
    assert "".join(piece.text for piece in pieces[:256]) == LLAMA2C_TEXT + LLAMA2C_MORE
    assert generation.stop_reason == "stop"
    assert len(generation.cache) == 1 + len(pieces) < 512  # BOS and all of them
    assert generation.pending == []
    assert not stories.tokenizer.stop_ids & set(generation.tokens)


def test_an_int8_cache_tells_the_same_story(stories):
    """Word for word at first; at a near tie (0.1 nats, token 118) the two may part."""
    text = text_of(generate(stories, max_tokens=200, cache=stories.new_cache("int8")))
    assert text.startswith(LLAMA2C_TEXT[: LLAMA2C_TEXT.index("One day")])
    assert len(text) > 400


def test_a_prompt_is_continued(stories):
    prompt = "Once upon a time, there was a little girl named Lily."
    generation = generate(
        stories, prompt=prompt, max_tokens=20, cache=stories.new_cache("float32"), chunk=5
    )
    text = text_of(generation)
    assert LLAMA2C_TEXT.startswith(prompt + text)
    assert generation.prompt_tokens == stories.tokenizer.encode(prompt)
    assert generation.prompt_tokens_per_second > 0
    assert generation.tokens_per_second > 0
    assert generation.logits.shape == (512,)


def test_tokens_as_prompt_and_no_tokens_to_make(stories):
    generation = generate(stories, prompt=[1, 403], max_tokens=0)
    assert list(generation) == []
    assert (generation.stop_reason, len(generation.cache)) == ("length", 2)


def test_a_text_can_be_continued_later(stories, dtype):
    """Ten tokens, then twenty: the same as thirty."""
    whole = generate(stories, max_tokens=30, cache=stories.new_cache(dtype))
    expected = text_of(whole)
    first = generate(stories, max_tokens=10, cache=stories.new_cache(dtype))
    text = text_of(first)
    second = generate(stories, prompt=first.pending, max_tokens=20, cache=first.cache)
    assert text + text_of(second) == expected
    assert first.tokens + second.tokens == whole.tokens


def test_a_text_that_continues_a_cache_gets_no_bos(stories):
    cache = stories.new_cache()
    list(generate(stories, prompt="Once", max_tokens=0, cache=cache))
    more = generate(stories, prompt=" upon", max_tokens=1, cache=cache)
    assert more.prompt_tokens == stories.tokenizer.encode("upon", bos=False)


def test_the_same_seed_gives_the_same_text(stories):
    options = {"max_tokens": 40, "temperature": 1.0, "top_p": 0.9}
    texts = [text_of(generate(stories, seed=seed, **options)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_random_state_can_be_taken_on(stories):
    logits = np.zeros(512, np.float32)
    first, second = Sampler(1.0, seed=3), Sampler(1.0, seed=4)
    first(logits)
    second.random_state = first.random_state
    assert [first(logits) for _ in range(5)] == [second(logits) for _ in range(5)]
    with pytest.raises(kvedge.InvalidArgumentError, match="state"):
        second.random_state = {"state": 1}
    assert generate(stories, max_tokens=1).sampler.temperature == 0


def test_a_full_context_is_an_error_that_says_so(stories):
    generation = generate(stories, max_tokens=30, cache=stories.new_cache(max_seq_len=16))
    made = []
    with pytest.raises(kvedge.CapacityExceededError, match="16 tokens is full after 16 of 30"):
        made.extend(generation)
    assert len(made) == 16


def test_without_a_number_generation_ends_with_the_context(stories):
    generation = generate(stories, cache=stories.new_cache(max_seq_len=16))
    assert len(list(generation)) == 16
    assert generation.stop_reason == "context"


def test_a_prompt_beyond_the_context_is_refused_at_once(stories):
    with pytest.raises(kvedge.CapacityExceededError, match="prompt of 17 tokens after 0"):
        generate(stories, prompt=[1] * 17, cache=stories.new_cache(max_seq_len=16))


def test_a_context_shift_goes_on_for_ever(stories, dtype):
    cache = stories.new_cache(dtype, max_seq_len=48)
    generation = generate(stories, max_tokens=150, cache=cache, context_shift=True)
    text = text_of(generation)
    assert generation.stop_reason == "length"
    assert len(generation.tokens) == 150
    assert len(cache) <= 48
    if dtype != "int4":  # whose keys, of 8 channels, tell another story
        assert text.startswith(LLAMA2C_TEXT[:60])
    assert len(set(text.split())) > 20  # still words, not one again and again


def test_shifted_keys_are_those_of_the_new_positions(stories):
    """The first layer's keys depend on token and position alone, so they can be made afresh."""
    tokens = stories.tokenizer.encode(LLAMA2C_TEXT)[:40]
    cache = stories.new_cache("float32", max_seq_len=40)
    stories.forward(tokens, cache)
    assert shift_context(stories, cache, keep_tokens=4) == 18
    kept = tokens[:4] + tokens[22:]
    fresh = stories.new_cache("float32")
    stories.forward(kept, fresh)
    assert len(cache) == len(kept) == 22
    np.testing.assert_allclose(cache.k(0), fresh.k(0), atol=2e-5)
    np.testing.assert_allclose(cache.v(0), fresh.v(0), atol=1e-6)


def test_greedy_takes_the_most_likely_and_top_p_the_likely_ones():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert Sampler()(logits) == 0
    drawn = [Sampler(1.0, seed=seed)(logits) for seed in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn) / 2000, [0.5, 0.3, 0.15, 0.05], atol=0.04)
    assert {Sampler(1.0, 0.75, seed=seed)(logits) for seed in range(200)} == {0, 1}
    assert {Sampler(1.0, 1e-9, seed=seed)(logits) for seed in range(50)} == {0}
    assert {Sampler(1e-300, seed=seed)(logits) for seed in range(50)} == {0}
    assert len({Sampler(1e30, seed=seed)(logits) for seed in range(200)}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"max_tokens": -1},
        {"chunk": 0},
        {"prompt": []},
        {"context_shift": True, "keep_tokens": 511},
        {"context_shift": True, "keep_tokens": -1},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(stories, options):
    with pytest.raises(kvedge.InvalidArgumentError):
        generate(stories, **options)


def test_logits_that_are_not_finite_are_refused():
    for value in (np.nan, np.inf):
        with pytest.raises(kvedge.NonFiniteInputError):
            Sampler()(np.array([0, value], np.float32))


def test_a_tokenizer_is_needed_and_must_fit(stories):
    bare = LlamaModel(stories.config, stories.weights)
    with pytest.raises(kvedge.InvalidArgumentError, match="without a tokenizer"):
        generate(bare)
    other = kvedge.llama.ScoredBpeTokenizer([b"<unk>", b"<s>", b"</s>"], [0.0] * 3)
    with pytest.raises(kvedge.InvalidArgumentError, match="3 tokens, the model has 512"):
        generate(stories, other)
