"""What transformers asks of a cache: lengths, mask sizes, crop, rows of a batch, copies."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers

import kvedge
from kvedge import system
from kvedge.core.formats import FORMATS
from kvedge.core.types import StorageArguments
from kvedge.transformers import options

MAJOR = int(transformers.__version__.split(".")[0])


def states(batch, tokens, *, heads=2, head_dim=16, seed=0, dtype=None):
    """Keys and values as a model would give them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, head_dim)
    pair = (torch.randn(shape, generator=generator) for _ in range(2))
    return tuple(tensor.to(dtype or torch.float32) for tensor in pair)


@pytest.fixture(params=["llama", "gemma2"])
def config(request):
    """Of a model of full attention, and of one with a window of 8 in every second layer."""
    return tiny_model(request.param).config


@pytest.fixture
def pair(config):
    """Our cache and transformers' own, empty."""
    return KvedgeCache(config, dtype="float32"), transformers.DynamicCache(config=config)


def mask_sizes(cache, n, layer):
    """get_mask_sizes of either version of transformers."""
    if MAJOR < 5:
        first = cache.get_seq_length()
        return tuple(map(int, cache.get_mask_sizes(torch.arange(first, first + n), layer)))
    return cache.get_mask_sizes(n, layer)


def crop(cache, removed):
    """Take tokens back as the installed version says it."""
    cache.crop(-removed)


def step(caches, tokens, *, batch=2, seed=0):
    """Give both caches the same tokens; returns each one's keys and values, layer by layer."""
    results = []
    for cache in caches:
        results.append(
            [
                cache.update(*states(batch, tokens, seed=seed + 100 * i), i)
                for i in range(len(cache.layers))
            ]
        )
    return results


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert torch.equal(a + 0, b)


@pytest.mark.parametrize("lengths", [(13, 1, 1), (1, 1, 1, 1), (5, 5, 5, 5), (30,), (7, 1, 8)])
def test_update_returns_what_transformers_own_cache_returns(pair, lengths):
    for number, tokens in enumerate(lengths):
        ours, theirs = pair
        for layer in range(4):
            before = ours.get_seq_length(layer)
            sizes = mask_sizes(ours, tokens, layer)
            assert sizes == mask_sizes(theirs, tokens, layer)
            assert ours.get_seq_length(layer) == before  # sizes are asked for before update()
        results = []
        for i in range(4):  # each layer is read before the next, as models do
            new = states(2, tokens, seed=number * 10 + i)
            mine, other = ours.update(*new, i), theirs.update(*new, i)
            assert_same([mine], [other])
            assert mine[0].shape[2] == mask_sizes_of(ours, i, tokens)
            results.append(mine)
        assert ours.get_seq_length() == theirs.get_seq_length() == sum(lengths[: number + 1])


def mask_sizes_of(cache, layer, tokens):
    """Keys that the mask for the tokens just appended had."""
    row = cache.layers[layer]
    window = getattr(row, "sliding_window", None)
    seen = row.get_seq_length()
    return seen if window is None else min(seen, window - 1 + tokens)


def test_a_window_layer_holds_at_most_twice_its_window():
    model = tiny_model("gemma2")
    cache = KvedgeCache(model.config)
    with torch.no_grad():
        model(prompt(2, 100)["input_ids"], past_key_values=cache)
        for step in range(40):
            held = [len(layer.rows[0]) for layer in cache.layers if layer.is_sliding]
            assert max(held) <= 2 * 8
            assert cache.get_seq_length() == 100 + step
            model(torch.tensor([[5], [6]]), past_key_values=cache)


def test_reorder_select_and_repeat(pair):
    step(pair, 6, batch=3)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([5, 1, 1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True, True])),
    ):
        for cache in pair:
            change(cache)
        held = [[(layer.keys, layer.values) for layer in cache.layers] for cache in pair]
        batch = held[1][0][0].shape[0]
        for mine, other in zip(*held, strict=True):
            assert_same([mine], [other])
        step(pair, 1, batch=batch)  # rows that were one are independent now


def test_crop_takes_tokens_back(pair, config):
    step(pair, 6)
    for cache in pair:
        if MAJOR >= 5:
            cache.activate_past_recording()
    for removed in (2, 1):
        for cache in pair:
            crop(cache, removed)
    assert pair[0].get_seq_length() == pair[1].get_seq_length() == 3
    assert_same(*step(pair, 2, seed=7))
    if MAJOR < 5:
        for cache in pair:
            cache.crop(4)
            cache.crop(10)
        assert pair[0].get_seq_length() == pair[1].get_seq_length() == 4


def test_crop_past_a_window_needs_recording():
    config = tiny_model("gemma2").config
    cache = KvedgeCache(config)
    step([cache], 40)
    cache.layers[0].drop_unread()
    with pytest.raises(ValueError, match="layer 0 cannot go back by 20 tokens"):
        cache.crop(-20)
    assert len(cache.layers[0].rows[0]) <= 16


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 has no activate_past_recording")
def test_recorded_past_comes_back():
    config = tiny_model("gemma2").config
    pair = KvedgeCache(config, dtype="float32"), transformers.DynamicCache(config=config)
    step(pair, 12)
    for cache in pair:
        cache.activate_past_recording()
    for removed in (0, 3, 5, 1):
        step(pair, 6, seed=removed)
        for cache in pair:
            crop(cache, removed)
        assert pair[0].get_seq_length() == pair[1].get_seq_length()
    assert_same(*step(pair, 1, seed=9))


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 takes the tokens to keep")
def test_crop_to_a_length_is_refused_where_transformers_refuses_it(config):
    cache = KvedgeCache(config)
    step([cache], 6)
    with pytest.raises(ValueError, match=r"crop\(3\).*negative"):
        cache.crop(3)


def test_reset_begins_anew_with_another_batch(pair):
    step(pair, 6)
    for cache in pair:
        cache.reset()
    assert pair[0].get_seq_length() == 0
    step([pair[0]], 9, batch=5, seed=3)
    assert pair[0].get_seq_length() == 9
    assert pair[0].layers[1].keys.shape == (5, 2, 9, 16)


def test_copies_are_independent(pair):
    cache = pair[0]
    step([cache], 12)
    other = copy.deepcopy(cache)
    step([other], 3)
    assert (cache.get_seq_length(), other.get_seq_length()) == (12, 15)
    again = pickle.loads(pickle.dumps(other))
    assert again.get_seq_length() == 15
    assert torch.equal(again.layers[1].keys + 0, other.layers[1].keys + 0)


def test_early_initialization_makes_empty_rows(config):
    cache = KvedgeCache(config)
    cache.early_initialization(3, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.get_seq_length() == 0
    assert all(len(layer.rows) == 3 for layer in cache.layers)
    keys, _ = cache.update(*states(3, 4, dtype=torch.bfloat16), 0)
    assert (keys.dtype, tuple(keys.shape)) == (torch.bfloat16, (3, 2, 4, 16))


def test_memory_is_that_of_the_tokens(config):
    cache = KvedgeCache(config)
    assert cache.memory_bytes == 0
    step([cache], 6, batch=2)
    per_token = 2 * (16 + 2 + 16 + 4)  # heads; a key, its share of steps; a value and its scale
    assert cache.memory_bytes == 4 * 2 * 6 * per_token
    rows = KvedgeCache(config, "int8")
    step([rows], 6, batch=2)
    assert rows.memory_bytes == 4 * 2 * 6 * 2 * 2 * (16 + 4)


GROWTH = """
from tiny_models import KvedgeCache, tiny_model, torch
from kvedge import system

config, shape = tiny_model("llama").config, (1, 2, 2048, 64)
keys, values = torch.randn(shape), torch.randn(shape)
KvedgeCache(config).update(keys, values, 0)  # what a first call loads and allocates
cache, before = KvedgeCache(config), system.process_bytes()
for layer in range(4):
    for _ in range(16):
        cache.update(keys, values, layer)
print(system.process_bytes() - before)
"""


@pytest.mark.skipif(system.process_bytes() is None, reason="reads /proc")
def test_the_process_grows_by_a_quarter_of_float32():
    """A cache of 134 MB in float32: head_dim 64, where a row has 68 or 72 bytes instead of 256.

    Besides, the tokens that came last are held in float16 until the next ones come. A process of
    its own tells, since what earlier tests leave is freed and allocated at times of its choosing.
    """
    helpers = str(Path(tiny_models.__file__).parent)
    path = os.pathsep.join(filter(None, [helpers, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", GROWTH]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    last = 4 * 2048 * 2 * 2 * 64 * 2
    assert int(done.stdout) - last < 0.36 * 4 * 32768 * 2 * 2 * 64 * 4


def test_options_of_storage_are_those_of_a_kvcache():
    """All but the shape, which the model has; the types name the same."""
    assert {"dtype", "group_size", "scale_dtype", "key_offset"} <= set(options.NAMES)
    assert {"dtype", *StorageArguments.__annotations__} == set(options.NAMES)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, ("kivi8", "int8", True)),
        ({"recent": 8}, ("kivi8", "int8", True)),
        ({"value_dtype": "int4"}, ("kivi8", "int4", False)),
        ({"key_dtype": "float16"}, ("float16", "int8", True)),
        ({"key_offset": "auto"}, ("int8", "int8", False)),
        ({"key_scale": np.ones((4, 2, 16), np.float32)}, ("int8", "int8", False)),
        ({"dtype": ["auto", "int8", "small", "int8"]}, ("kivi8", "int8", True)),
        ({"dtype": "small"}, ("kivi4", "kivi4", False)),
        ({"dtype": "kivi8"}, ("kivi8", "kivi8", False)),
        ({"dtype": "int8"}, ("int8", "int8", False)),
    ],
    ids=lambda each: "-".join(map(str, each)) or "nothing",
)
def test_what_is_recommended_gives_way_to_what_is_asked_for(config, given, stored):
    cache = KvedgeCache(config, **given)
    step([cache], 40)
    row = cache.layers[0].rows[0]
    assert (row.dtype, row.value_dtype, row.value_rotation) == stored
    if "dtype" not in given:
        assert (row.recent, row.sinks) == (given.get("recent", 64), 4)
    assert (row.key_scale is not None) == (row.dtype == "int8")


def test_layers_may_differ_in_storage(config):
    cache = KvedgeCache(config, dtype=["int8", "float32", "bfloat16", "int8"], group_size=None)
    step([cache], 6)
    assert [layer.rows[0].dtype for layer in cache.layers] == [
        "int8",
        "float32",
        "bfloat16",
        "int8",
    ]
    assert cache.memory_bytes == 2 * 6 * 2 * 2 * (20 + 64 + 32 + 20)


def test_each_layer_is_stored_as_a_policy_says(tmp_path):
    config = tiny_model("llama").config
    layers = [{"dtype": "kivi8", "value_dtype": "int8", "scale_dtype": "float16"}]
    layers += [{"dtype": "kivi4", "recent": 32}] * (config.num_hidden_layers - 1)
    policy = kvedge.LayerPolicy(layers)
    policy.save(tmp_path / "policy.json")
    keys, values = states(1, 150)
    for given in (policy, str(tmp_path / "policy.json")):
        cache = KvedgeCache(config, policy=given)
        for index, own in enumerate(layers):
            got = cache.update(keys, values, index)
            layer = kvedge.KVCache(1, 2, 16, key_scale="auto", **own).layer(0).copy()
            layer.extend(*(each[0].transpose(0, 1).numpy() for each in (keys, values)))
            assert_same_rows(got, layer)


def test_a_policy_that_does_not_fit_is_refused(tmp_path):
    config = tiny_model("llama").config
    policy = kvedge.LayerPolicy([{"dtype": "int8"}])
    with pytest.raises(ValueError, match=f"each of {config.num_hidden_layers} layers, not 1"):
        KvedgeCache(config, policy=policy)
    policy = kvedge.LayerPolicy([{"dtype": "int8"}] * config.num_hidden_layers)
    for given in ({"dtype": "kivi4"}, {"recent": 32}, {"key_scale": None}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} does not go with a policy"):
            KvedgeCache(config, policy=policy, **given)
    with pytest.raises(ValueError, match="window is no option"):
        KvedgeCache(config, policy=policy, window=3)
    for given in (tmp_path / "none.json", 3):
        with pytest.raises((OSError, ValueError)):
            KvedgeCache(config, policy=given)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_format_stores_what_its_layer_would(dtype):
    config = tiny_model("llama").config
    keys, values = states(1, 5)
    for given in ({}, {"key_scale": None}):
        got = KvedgeCache(config, dtype=dtype, **given).update(keys, values, 0)
        own = {"key_scale": "auto", **given}  # which is the default of a KvedgeCache alone
        layer = kvedge.KVCache(1, 2, 16, dtype=dtype, **own).layer(0).copy()
        layer.extend(*(states[0].transpose(0, 1).numpy() for states in (keys, values)))
        assert_same_rows(got, layer)


def assert_same_rows(got, layer):
    np.testing.assert_array_equal(got[0].numpy()[0], layer.keys().transpose(1, 0, 2))
    np.testing.assert_array_equal(got[1].numpy()[0], layer.values().transpose(1, 0, 2))
