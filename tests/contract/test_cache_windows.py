"""Caches whose layers differ: in their windows, shapes and formats."""

import numpy as np
import pytest
from support import cache_content, content, normal, refuses

import kvedge
from kvedge import KVCache, Rope, errors
from kvedge.core.registry import layer_types

H, D = 2, 40
WINDOWS = [8, None, 3, 1]


@pytest.fixture
def pair(dtype):
    """A cache of layers with windows, and one of layers that keep all."""
    return KVCache(4, H, D, dtype=dtype, window=WINDOWS), KVCache(4, H, D, dtype=dtype)


def step(caches, n, rng, *, advance=True):
    """Append n tokens to every layer of some caches, and attend to them."""
    for layer in range(4):
        rows = normal(rng, 2, n, H, D)
        for cache in caches:
            cache.append(layer, *rows)
        assert_same(caches, layer, n, rng)
    if advance:
        for cache in caches:
            cache.advance(n)


def assert_same(caches, layer, n, rng):
    query = normal(rng, n, 2 * H, D)
    windowed, *others = (
        cache.attend(layer, query, window=None if i == 0 else WINDOWS[layer])
        for i, cache in enumerate(caches)
    )
    for other in others:
        np.testing.assert_allclose(windowed, other, atol=1e-5)


def test_windows_of_layers_see_what_they_should(pair, rng):
    cache, full = pair
    total = 0
    for n in (1, 30, 1, 1, 5, 700, 1, *[1] * 30):
        step(pair, n, rng)
        total += n
        assert len(cache) == len(full) == total
    assert [len(cache.layer(i)) for i in range(4)] == [8, total, 3, 1]
    assert cache.window == tuple(WINDOWS)
    rows = normal(rng, 2, 4, H, D)
    for one in pair:
        one.push_step(*rows)
    for layer in range(4):
        assert_same(pair, layer, 1, rng)
    assert "window of 8" in repr(cache) and str(total + 1) in repr(cache)


def test_one_window_for_all_layers(dtype, rng):
    cache = KVCache(3, H, D, dtype=dtype, window=5)
    assert cache.window == (5, 5, 5)
    for bad in ([5], [5, 5, 5, 5], [5, 0, 5], "555", 0, 1.5, [5, None, "5"]):
        with refuses(errors.InvalidArgumentError, match="window"):
            KVCache(3, H, D, dtype=dtype, window=bad)


def test_windows_take_little_memory(dtype, rng):
    cache = KVCache(4, H, D, dtype=dtype, window=[16, None, 16, 16])
    for _ in range(300):
        for layer in range(4):
            cache.append(layer, *normal(rng, 2, 1, H, D))
        cache.advance()
    of = [cache.layer(i) for i in range(4)]
    per_token = of[1].memory_bytes // of[1].capacity
    assert all(layer.memory_bytes <= 32 * per_token for layer in (of[0], of[2], of[3]))
    assert cache.memory_bytes == sum(layer.memory_bytes for layer in of)
    assert cache.fp32_memory_bytes == sum(layer.fp32_memory_bytes for layer in of)
    assert cache.used_bytes == per_token * (300 + 3 * 16)
    assert cache.capacity >= 300


def test_max_seq_len_bounds_the_position(dtype, rng):
    cache = KVCache(4, H, D, dtype=dtype, window=WINDOWS, max_seq_len=20)
    step([cache], 19, rng)
    for layer in range(4):
        with refuses(errors.CapacityExceededError, cache, match=["20", str(layer)]):
            cache.append(layer, *normal(rng, 2, 2, H, D))
    cache.push_step(*normal(rng, 2, 4, H, D))
    with refuses(errors.CapacityExceededError, cache, match="20"):
        cache.push_step(*normal(rng, 2, 4, H, D))
    for layer in range(4):
        with refuses(errors.CapacityExceededError, cache, match=["20", str(layer)]):
            cache.append(layer, *normal(rng, 2, H, D))


def test_pending_tokens_of_windows(pair, rng):
    cache, _ = pair
    step(pair, 20, rng)
    step(pair, 4, rng, advance=False)
    assert len(cache) == 20
    with refuses(errors.LayersOutOfStepError, cache):
        cache.advance(5)
    with refuses(errors.LayersOutOfStepError, cache):
        cache.push_step(*normal(rng, 2, 4, H, D))
    for one in pair:
        one.truncate(20)
    step(pair, 2, rng)


def test_going_back_within_the_last_append(pair, rng):
    cache, _full = pair
    step(pair, 50, rng)
    step(pair, 6, rng)
    for n in (49, 41, 1):
        with refuses(errors.PositionOutOfRangeError, cache, match=[str(n), "window"]):
            cache.truncate(n)
    for n in (55, 50):
        for one in pair:
            one.truncate(n)
        assert len(cache) == n
    step(pair, 3, rng)
    for one in pair:
        one.truncate(0)
    assert len(cache) == 0 and [cache.layer(i).num_dropped for i in range(4)] == [0] * 4
    step(pair, 30, rng)
    for one in pair:
        one.clear()
    step(pair, 9, rng)


def test_marks_hold_while_the_windows_have_what_they_need(pair, rng):
    cache, _ = pair
    empty = cache.snapshot()
    step(pair, 30, rng)
    mark = cache.snapshot()
    others = pair[1].snapshot()
    kept = mark.detach()
    step(pair, 5, rng)
    assert not mark.is_stale
    cache.restore(mark)
    pair[1].restore(others)
    step(pair, 5, rng)
    assert not mark.is_stale
    step(pair, 1, rng)
    assert mark.is_stale
    with refuses(errors.StaleSnapshotError, cache, match="30"):
        cache.restore(mark)
    with refuses(errors.StaleSnapshotError, cache, match="30"):
        mark.detach()
    cache.restore(kept)
    pair[1].restore(others)
    assert len(cache) == 30
    step(pair, 4, rng)
    cache.restore(empty) if not empty.is_stale else cache.clear()
    pair[1].truncate(0)
    assert len(cache) == 0
    step(pair, 20, rng)


def test_a_mark_above_the_length_can_be_gone_to(pair, rng):
    cache, _full = pair
    step(pair, 20, rng)
    step(pair, 5, rng)
    marks = [one.snapshot() for one in pair]
    before = cache_content(cache)
    for one in pair:
        one.truncate(21)
    for one, mark in zip(pair, marks, strict=True):
        one.restore(mark)
    assert cache_content(cache) == before
    step(pair, 3, rng)


def test_a_refused_step_changes_no_layer(pair, rng):
    cache, _ = pair
    step(pair, 30, rng)
    dropped = [cache.layer(i).num_dropped for i in range(4)]
    keys, values = normal(rng, 2, 4, H, D)
    for layer in range(4):
        bad = values.copy()
        bad[layer, -1, -1] = np.nan
        with refuses(errors.NonFiniteInputError, cache):
            cache.push_step(keys, bad)
        with refuses(errors.NonFiniteInputError, cache):
            cache.append(layer, keys[layer], bad[layer])
    assert [cache.layer(i).num_dropped for i in range(4)] == dropped
    for one in pair:
        one.push_step(keys, values)
    for layer in range(4):
        assert_same(pair, layer, 1, rng)


def test_editing_with_windows(pair, rng):
    cache, _full = pair
    step(pair, 1, rng)
    for one in pair:
        one.keep([0])
    step(pair, 30, rng)
    with refuses(errors.InvalidArgumentError, cache, match="window"):
        cache.keep(np.arange(30))
    rope = Rope(10000.0)
    for one in pair:
        one.shift(3, rope=rope)
        one.shift(-1, rope=rope, start=5, stop=29)
    for layer in range(4):
        assert_same(pair, layer, 1, rng)


# -- layers that differ ---------------------------------------------------------------------------

SHAPES = [
    {"num_kv_heads": 2, "head_dim": 40, "window": 8},
    {"num_kv_heads": 1, "head_dim": 64, "value_head_dim": 32},
    {"dtype": "float16"},
    {"dtype": "float32", "num_kv_heads": 3, "window": 2},
    {"group_size": 16, "scale_dtype": "float16"},
]


def mixed(**options):
    return KVCache(num_kv_heads=2, head_dim=40, layers=SHAPES, **options)


def fill_mixed(cache, n, rng):
    for i in range(cache.num_layers):
        layer = cache.layer(i)
        keys = normal(rng, n, layer.num_kv_heads, layer.head_dim)
        cache.append(i, keys, normal(rng, n, layer.num_kv_heads, layer.value_head_dim))
    cache.advance(n)


def test_layers_may_differ_in_all_but_their_position(rng, tmp_path):
    cache = mixed()
    fill_mixed(cache, 5, rng)
    fill_mixed(cache, 20, rng)
    assert [cache.layer(i).dtype for i in range(5)] == [
        "int8", "int8", "float16", "float32", "int8"
    ]  # fmt: skip
    assert [cache.layer(i).head_dim for i in range(5)] == [40, 64, 40, 40, 40]
    assert [len(cache.layer(i)) for i in range(5)] == [25, 25, 25, 21, 25]
    assert len(cache) == 25 and cache.k(2).shape == (25, 2, 40)
    assert ("3 KV heads" in repr(cache) and "64 and 32" in repr(cache)) or "64" in repr(cache)
    assert cache.attend(1, normal(rng, 4, 64)).shape == (4, 32)
    mark = cache.snapshot().detach()
    fill_mixed(cache, 1, rng)
    cache.restore(mark)
    for read in (
        lambda: cache.head_dim,
        lambda: cache.num_kv_heads,
        lambda: cache.dtype,
        lambda: cache.push_step(normal(rng, 5, 2, 40), normal(rng, 5, 2, 40)),
    ):
        with refuses(errors.InvalidArgumentError, cache, match="differ"):
            read()


def test_what_layers_are_told_is_checked():
    for layers, word in [
        ([], "num_layers"),
        ("ab", "layers"),
        ({}, "layers"),
        (5, "layers"),
        ([{}, 3], "layer 1"),
        ([{}, {"capacity": 3}], "capacity"),
        ([{}, {"head_dim": 0}], "layer 1"),
        ([{"dtype": "int3"}], "dtype"),
        ([{"dtype": "float32", "group_size": 8}], "group_size"),
    ]:
        with refuses(errors.InvalidArgumentError, match=word):
            KVCache(num_kv_heads=2, head_dim=8, layers=layers)
    with refuses(errors.InvalidArgumentError, match=["3", "2"]):
        KVCache(3, 2, 8, layers=[{}, {}])
    with refuses(errors.InvalidArgumentError, match="num_kv_heads"):
        KVCache(2)
    with refuses(errors.InvalidArgumentError, match="num_layers"):
        KVCache()
    with refuses(errors.ShapeMismatchError, match="2"):
        KVCache(3, 2, 8, key_offset=[None, None])


def test_key_offsets_of_layers_that_differ(rng):
    offsets = [normal(rng, 2, 40), None, None, None, normal(rng, 2, 40)]
    cache = mixed(key_offset=offsets)
    np.testing.assert_array_equal(cache.layer(4).key_offset, offsets[4])
    assert cache.layer(1).key_offset is None
    with refuses(errors.InvalidArgumentError, match="key_offset"):
        mixed(key_offset=[None, None, offsets[0], None, None])


def test_a_cache_takes_over_layers(dtype, rng, tmp_path):
    kind = layer_types[dtype]
    layers = [kind(None, H, D), kind(None, H, D, window=4), kvedge.Float32KvLayer(30, 1, 8)]
    for layer in layers:
        shape = (12, layer.num_kv_heads, layer.head_dim)
        layer.extend(normal(rng, *shape), normal(rng, *shape))
        layer.extend(*normal(rng, 2, 1, *shape[1:]))
    before = [content(layer) for layer in layers]
    cache = KVCache(layers=layers)
    assert len(cache) == 13 and cache.max_seq_len == 30 and cache.window == (None, 4, None)
    assert [content(cache.layer(i)) for i in range(3)] == before
    assert cache.layer(1) is layers[1]
    with refuses(errors.ReadOnlyLayerError, cache):
        layers[0].truncate(0)
    with refuses(errors.InvalidArgumentError, match="belongs"):
        KVCache(layers=layers)
    for i, layer in enumerate(layers):
        cache.append(i, *normal(rng, 2, 1, layer.num_kv_heads, layer.head_dim))
    cache.advance()
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache")
    assert cache_content(loaded) == cache_content(cache)


def test_layers_that_cannot_be_taken_over(rng):
    def layer(n):
        made = kvedge.QuantizedKvLayer(None, H, D)
        made.extend(*normal(rng, 2, n, H, D))
        return made

    one = layer(3)
    for layers, options, word in [
        ([one, layer(4)], {}, "position"),
        ([one, one], {}, "once"),
        ([one, {}], {}, "layer 0"),
        ([one], {"head_dim": 8}, "head_dim"),
        ([one], {"max_seq_len": 8}, "max_seq_len"),
        ([one], {"window": 8}, "window"),
        ([one, kvedge.QuantizedKvLayer(None, H, D, key_offset="auto")], {}, "position"),
    ]:
        with refuses(errors.InvalidArgumentError, one, match=word):
            KVCache(layers=layers, **options)
    with refuses(errors.InvalidArgumentError, match="auto"):
        KVCache(layers=[layer(0), kvedge.QuantizedKvLayer(None, H, D, key_offset="auto")])
    one.truncate(0)  # it is nobody's
