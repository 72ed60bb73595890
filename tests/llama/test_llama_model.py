"""The forward pass: against a float64 reference, whatever the model's shape and the cache."""

import numpy as np
import pytest
from llama_reference import logits as reference_logits

import kvedge
from kvedge.data import STORIES_MODEL
from kvedge.llama import (
    LayerWeights,
    LlamaConfig,
    LlamaModel,
    LlamaWeights,
    read_config,
    rope_frequencies,
)

TOKENS = [1, 403, 407, 261, 378, 5, 9, 300, 42, 511, 261, 262]


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


def random_model(rng, *, num_heads=6, num_kv_heads=2, head_dim=10, bias=False, **rope_options):
    """A model of random weights; head_dim need not be dim / num_heads."""
    interleaved = rope_options.pop("interleaved", True)
    rotary_dim = rope_options.pop("rotary_dim", head_dim)
    frequencies = rope_frequencies(rotary_dim, **rope_options)
    config = LlamaConfig(
        dim=24,
        hidden_dim=36,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=50,
        max_seq_len=64,
        norm_eps=1e-6,
        rope=kvedge.Rope(interleaved=interleaved, rotary_dim=rotary_dim, inv_freq=frequencies),
    )

    def matrix(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    qkv_rows = (num_heads + 2 * num_kv_heads) * head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=matrix(24) + 1,
            wqkv=2 * matrix(qkv_rows, 24),
            bqkv=3 * matrix(qkv_rows) if bias else None,
            wo=matrix(24, num_heads * head_dim),
            ffn_norm=matrix(24) + 1,
            w13=matrix(72, 24),
            w2=matrix(24, 36),
        )
        for _ in range(config.num_layers)
    )
    embedding = matrix(50, 24)
    return LlamaModel(config, LlamaWeights(embedding, layers, matrix(24) + 1, matrix(50, 24)))


def step_by_step(model, tokens, cache):
    return np.array([model.forward([token], cache, last_only=True) for token in tokens])


def assert_close(got, expected, tolerance=2e-4):
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def test_logits_of_stories260k_are_those_of_the_reference(stories):
    got = stories.forward(TOKENS, stories.new_cache("float32"))
    assert_close(got, reference_logits(stories.config, stories.weights, TOKENS))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 5, "num_kv_heads": 5},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 3, "rotary_dim": 2},
        {"bias": True, "interleaved": False},
        {"rotary_dim": 4},
        {"interleaved": False, "rotary_dim": 6},
        {"base": 500000.0, "factors": np.array([1, 1, 2.5, 8, 8])},
        {"scale": 4.0},
    ],
    ids=str,
)
def test_logits_of_every_shape_and_rope_are_those_of_the_reference(rng, options):
    model = random_model(rng, **options)
    tokens = rng.integers(0, 50, 40)
    expected = reference_logits(model.config, model.weights, tokens)
    assert_close(model.forward(tokens, model.new_cache("float32")), expected)


def test_a_prompt_may_come_at_once_in_chunks_or_token_by_token(stories):
    at_once = stories.forward(TOKENS, stories.new_cache("float32"))
    assert_close(step_by_step(stories, TOKENS, stories.new_cache("float32")), at_once, 1e-5)
    cache = stories.new_cache("float32")
    chunks = [stories.forward(part, cache) for part in (TOKENS[:5], TOKENS[5:6], TOKENS[6:])]
    assert_close(np.concatenate(chunks), at_once, 1e-5)


def test_last_only_gives_the_last_row(stories):
    all_rows = stories.forward(TOKENS, stories.new_cache("float32"))
    last = stories.forward(TOKENS, stories.new_cache("float32"), last_only=True)
    assert last.shape == (stories.config.vocab_size,)
    assert_close(last, all_rows[-1], 1e-5)


@pytest.mark.parametrize("options", [{}, {"group_size": 4}, {"scale_dtype": "float16"}], ids=str)
def test_an_int8_cache_changes_logits_little(stories, options):
    exact = stories.forward(TOKENS, stories.new_cache("float32"))
    int8 = stories.forward(TOKENS, stories.new_cache("int8", **options))
    assert 0 < np.abs(int8 - exact).max() < 0.05 * np.abs(exact).max()


def test_keys_and_values_land_in_the_cache(stories, dtype):
    cache = stories.new_cache(dtype)
    stories.forward(TOKENS, cache)
    assert len(cache) == len(TOKENS)
    assert cache.k(4).shape == cache.v(4).shape == (len(TOKENS), 4, 8)
    assert cache.max_seq_len == 512


def test_a_failure_in_any_layer_leaves_the_cache_as_it_was(stories, monkeypatch, dtype):
    cache = stories.new_cache(dtype)
    stories.forward(TOKENS[:4], cache)
    expected = stories.forward(TOKENS[4:], cache.copy())
    attend = type(cache).attend

    def failing(self, layer, *args, **options):
        if layer == 3:
            raise KeyboardInterrupt
        return attend(self, layer, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(cache), "attend", failing, raising=True)
        with pytest.raises(KeyboardInterrupt):
            stories.forward(TOKENS[4:], cache)
    assert len(cache) == 4
    assert [len(cache.layer(i)) for i in range(5)] == [4] * 5
    np.testing.assert_array_equal(stories.forward(TOKENS[4:], cache), expected)


@pytest.mark.parametrize("tokens", [[], [512], [-1], [1.5], [[1, 2]], ["a"], [1, 10**30]], ids=str)
def test_tokens_that_are_none_are_refused(stories, tokens):
    cache = stories.new_cache()
    with pytest.raises(kvedge.InvalidArgumentError, match="tokens must be"):
        stories.forward(tokens, cache)
    assert len(cache) == 0


def test_a_cache_of_another_shape_is_refused(stories):
    with pytest.raises(kvedge.ShapeMismatchError, match=r"\(5, 4, 8\), got \(5, 4, 16\)"):
        stories.forward([1], kvedge.KVCache(5, 4, 16))


def test_more_tokens_than_the_context_are_refused(stories):
    cache = stories.new_cache(max_seq_len=10)
    stories.forward(TOKENS[:9], cache)
    with pytest.raises(kvedge.CapacityExceededError, match="context of 10"):
        stories.forward([1, 2], cache)
    assert len(cache) == 9
    growing = stories.new_cache(max_seq_len=None)
    assert stories.context_limit(growing) == 512


def test_rope_frequencies_are_checked():
    with pytest.raises(kvedge.InvalidArgumentError, match="even"):
        rope_frequencies(7)
    with pytest.raises(kvedge.InvalidArgumentError, match="positive"):
        rope_frequencies(8, base=0.0)
    with pytest.raises(kvedge.InvalidArgumentError, match="factors"):
        rope_frequencies(8, factors=np.ones(3))


def test_read_config_reads_the_sizes_alone(stories):
    assert read_config(STORIES_MODEL) == stories.config
    assert repr(stories).startswith("LlamaModel(dim=64, num_layers=5, num_heads=8")
