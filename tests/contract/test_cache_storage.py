"""A cache stored anew in another format, and the policy that does it as memory fills up."""

import copy
import pickle
import weakref

import numpy as np
import pytest
from support import cache_content, normal

from kvedge import KVCache, KvCachePolicy, QuantizedKvLayer, errors
from kvedge.cache import requantizing as cache_storage
from kvedge.core import memory
from kvedge.core.formats import FORMATS
from kvedge.layer.layer import store_of

L, H, D = 3, 2, 40


def filled(rng, n, scale=1.0, **options):
    cache = KVCache(L, H, D, **options)
    feed(cache, rng, n, scale)
    return cache


def feed(cache, rng, n, scale=1.0):
    for layer in range(L):
        keys, values = normal(rng, 2, n, H, D) * np.float32(scale)
        cache.append(layer, keys, values)
    cache.advance(n)


def appended(rows, **options):
    """A cache that was given rows (keys, values) of each layer as they are."""
    cache = KVCache(L, H, D, **options)
    for layer, (keys, values) in enumerate(rows):
        cache.append(layer, keys, values)
    cache.advance(len(rows[0][0]))
    return cache


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_stored_as_if_they_had_come_in_the_new_format(rng, dtype, name):
    cache = filled(rng, 70, dtype=dtype)
    rows = [(cache.k(i).copy(), cache.v(i).copy()) for i in range(L)]
    options = {"key_scale": "auto"}
    if FORMATS[name].has_scales:
        options |= {"group_size": 16, "scale_dtype": "float16", "key_offset": "auto"}
    cache.requantize(name, **options)
    wanted = appended(rows, dtype=name, **options)
    assert cache_content(cache) == cache_content(wanted)
    assert (cache.dtype, len(cache), cache.num_layers) == (name, 70, L)
    assert repr(cache) == repr(wanted)
    more = normal(rng, 2, L, H, D)
    for each in (cache, wanted):
        each.push_step(*more)
    assert cache_content(cache) == cache_content(wanted)
    query = normal(rng, 2 * H, D)
    np.testing.assert_array_equal(cache.attend(1, query), wanted.attend(1, query))
    cache.clear()
    cache.requantize("int8")
    assert len(cache) == 0 and cache.dtype == "int8"


def test_keys_and_values_may_differ_and_layers_keep_their_windows(rng):
    cache = filled(rng, 60, dtype="float32", window=[None, 20, None], max_seq_len=100)
    feed(cache, rng, 30)
    dropped = cache.layer(1).num_dropped
    keys = cache.layer(1).keys()
    assert dropped
    cache.requantize("int8", value_dtype="int4", group_size=8)
    assert (cache.dtype, cache.value_dtype, cache.max_seq_len) == ("int8", "int4", 100)
    assert cache.layer(1).num_dropped == dropped and cache.window == (None, 20, None)
    np.testing.assert_allclose(cache.layer(1).keys(), keys, atol=0.05)
    feed(cache, rng, 10)
    with pytest.raises(errors.CapacityExceededError):
        cache.push_step(*normal(rng, 2, L, H, D))


def test_last_and_first_tokens_stay_precise(rng):
    cache = filled(rng, 90, dtype="float16")
    keys = cache.k(1).copy()
    cache.requantize("int4", recent=16, sinks=4)
    assert (cache.recent, cache.sinks, cache.recent_dtype) == (16, 4, "float16")
    now = cache.k(1)
    assert (now[-16:] == keys[-16:]).all() and (now[:4] == keys[:4]).all()
    assert (now[4:-16] != keys[4:-16]).any()
    wanted = appended([(cache.k(i), cache.v(i)) for i in range(L)], dtype="float32")
    query = normal(rng, H, D)
    cache.requantize("float32")
    np.testing.assert_array_equal(cache.attend(1, query), wanted.attend(1, query))
    huge = KVCache(1, 1, 8, dtype="float32")
    huge.push_step(np.full((1, 1, 8), 7e4, np.float32), np.zeros((1, 1, 8), np.float32))
    with pytest.raises(errors.ScaleRangeError, match="recent_dtype"):
        huge.requantize("int8", recent=2)
    huge.requantize("int8", recent=2, recent_dtype="bfloat16")


def test_what_does_not_fit_is_refused_and_changes_nothing(rng):
    cache = filled(rng, 20, dtype="float32")
    keys = normal(rng, L, H, D)
    for huge in (70000.0, 9e6, 3e38):
        mark = len(cache)
        values = normal(rng, L, H, D)
        values[2, 1, 5] = huge
        cache.push_step(keys, values)
        before, snapshot = cache_content(cache), cache.snapshot()
        refused = [("float16", {})] + [("int8", {"scale_dtype": "float16"})] * (huge > 8e6)
        for name, options in refused:
            with pytest.raises(errors.ScaleRangeError):
                cache.requantize(name, **options)
        for name, options, error in (
            ("int9", {}, errors.InvalidArgumentError),
            ("int8", {"group_size": D + 1}, errors.InvalidArgumentError),
            ("int8", {"key_scale": np.ones((L, H, 3), np.float32)}, errors.ShapeMismatchError),
            ("float16", {"group_size": 8}, errors.InvalidArgumentError),
        ):
            with pytest.raises(error):
                cache.requantize(name, **options)
        assert cache_content(cache) == before and not snapshot.is_stale
        cache.truncate(mark)
    cache.append(0, *normal(rng, 2, H, D))
    with pytest.raises(errors.LayersOutOfStepError, match="requantize"):
        cache.requantize("int8")


def test_large_numbers_that_a_key_scale_makes_small_enough_are_stored(rng):
    cache = filled(rng, 30, dtype="float32")
    scale = np.full((L, H, D), 2.0**10, np.float32)
    rows = normal(rng, L, H, D) * np.float32(1e6)
    cache.push_step(rows, normal(rng, L, H, D))
    with pytest.raises(errors.ScaleRangeError):
        cache.requantize("float16")
    cache.requantize("float16", key_scale=scale)
    np.testing.assert_allclose(cache.k(1)[-1], rows[1], rtol=1e-3)


def test_marks_are_stale_and_old_layers_stay_as_they_were(rng):
    cache = filled(rng, 10)
    mark, detached = cache.snapshot(), cache.snapshot().detach()
    layer = cache.layer(0)
    keys = layer.keys()
    cache.requantize("float16")
    assert mark.is_stale
    with pytest.raises(errors.StaleSnapshotError):
        cache.restore(mark)
    with pytest.raises(errors.ShapeMismatchError):
        cache.restore(detached)
    feed(cache, rng, 5)
    cache.truncate(2)
    np.testing.assert_array_equal(layer.keys(), keys)
    assert cache.layer(0) is not layer
    cache.restore(cache.snapshot())


def test_no_more_than_one_layer_is_there_twice(rng, monkeypatch):
    cache = filled(rng, 100, dtype="float32")
    old = [weakref.ref(cache.layer(index)) for index in range(L)]
    convert, alive = cache_storage._convert, []

    def counting(source, target):
        convert(source, target)
        alive.append(sum(layer() is not None for layer in old))

    monkeypatch.setattr(cache_storage, "_convert", counting)
    cache.requantize("int8")
    assert alive == [*range(L, 0, -1)]
    assert not any(layer() is not None for layer in old)


def test_running_out_of_memory_half_way_leaves_a_whole_cache(rng, monkeypatch):
    cache = filled(rng, 100, dtype="float32")
    keys = [cache.k(i).copy() for i in range(L)]
    convert = cache_storage._convert

    def failing(source, target):
        if source is store_of(cache.layer(1)):
            raise MemoryError
        convert(source, target)

    monkeypatch.setattr(cache_storage, "_convert", failing)
    with pytest.raises(errors.OutOfMemoryError, match="anew"):
        cache.requantize("int8")
    assert [cache.layer(i).dtype for i in range(L)] == ["int8", "float32", "float32"]
    for index in range(L):
        np.testing.assert_allclose(cache.k(index), keys[index], atol=0.05)
    feed(cache, rng, 3)
    monkeypatch.setattr(cache_storage, "_convert", convert)
    cache.requantize("int8")
    assert cache.dtype == "int8" and len(cache) == 103


# ---- query heads ---------------------------------------------------------------------------------


def test_query_heads_are_checked_at_construction_and_at_every_query(rng):
    for bad in (0, -4, 3, 2.0, "4"):
        with pytest.raises(errors.InvalidArgumentError, match="num_query_heads"):
            KVCache(L, H, D, num_query_heads=bad)
    with pytest.raises(errors.InvalidArgumentError, match="num_query_heads"):
        KVCache(layers=[{"num_kv_heads": n} for n in (2, 3)], head_dim=D, num_query_heads=4)
    with pytest.raises(errors.InvalidArgumentError, match="num_query_heads"):
        KVCache(layers=[QuantizedKvLayer(4, 3, D)], num_query_heads=4)
    assert KVCache(L, H, D).num_query_heads is None
    cache = filled(rng, 5, num_query_heads=4)
    assert cache.num_query_heads == 4
    query = normal(rng, 3, 4, D)
    for each in (cache, cache.copy(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert each.attend(0, query).shape == (3, 4, D)
        each.attend(0, query.transpose(1, 0, 2), layout="hnd")
        each.scores(0, query[0])
        for call in (
            lambda each=each: each.attend(1, normal(rng, 6, D)),
            lambda each=each: each.attend(1, normal(rng, 4, 3, D), layout="nhd"),
            lambda each=each: each.attend(1, normal(rng, 3, 4, D), layout="hnd"),
            lambda each=each: each.scores(1, normal(rng, 2, D)),
        ):
            with pytest.raises(errors.ShapeMismatchError):
                call()
    with pytest.raises(errors.ShapeMismatchError, match="num_query_heads=4") as caught:
        cache.attend(2, normal(rng, 2, D))
    assert (caught.value.expected, caught.value.got, caught.value.layer) == (4, 2, 2)


# ---- the policy ----------------------------------------------------------------------------------


def bytes_of(dtype, tokens, **options):
    config = store_of(KVCache(1, H, D, dtype=dtype, **options).layer(0)).config
    return L * tokens * memory.token_bytes(config)


def test_a_policy_takes_the_finest_format_whose_share_holds_the_tokens(rng):
    limit = bytes_of("float16", 100)
    policy = KvCachePolicy(limit)
    cache = policy.new_cache(L, H, D)
    seen = {}
    while policy.occupancy(cache) < 1:
        switched = policy.apply(cache, more=5)
        assert policy.apply(cache, more=5) is False
        feed(cache, rng, 5)
        seen.setdefault(cache.dtype, []).append((len(cache), policy.occupancy(cache)))
        assert switched == (len(seen[cache.dtype]) == 1 and len(seen) > 1)
        assert policy.dtype_for(cache) == cache.dtype
    assert list(seen) == ["float16", "int8", "int4"]
    assert seen["float16"][-1][0] == 80  # 0.8 of what float16 could hold
    shares = {"float16": 0.8, "int8": 0.95, "int4": 1.1}
    for name, rows in seen.items():
        assert all(share <= shares[name] + 1e-9 for _, share in rows)
    tokens = seen["int8"][-1][0]
    assert bytes_of("int8", tokens) <= 0.95 * limit < bytes_of("int8", tokens + 5)
    assert cache.layer(0).group_size == 32 and cache.key_scale is not None


def test_what_is_stored_after_each_step_is_near_what_came(rng):
    policy = KvCachePolicy(bytes_of("float16", 100))
    cache, exact = policy.new_cache(L, H, D), KVCache(L, H, D, dtype="float32")
    for _ in range(60):
        keys, values = normal(rng, 2, L, H, D)
        cache.push_step(keys, values)
        exact.push_step(keys, values)
    query = normal(rng, H, D)
    wanted = exact.attend(0, query)
    most = {"float16": 1e-3, "int8": 0.02, "int4": 0.2}
    for tokens, name in ((10, "float16"), (60, "int8"), (300, "int4")):
        assert policy.dtype_for(cache, more=tokens) == name
        policy.apply(cache, more=tokens)
        error = np.abs(cache.attend(0, query) - wanted).max() / np.abs(wanted).max()
        assert error <= most[name], name


def test_going_step_by_step_costs_little_more_than_the_last_step(rng):
    keys = normal(rng, 500, H, D)
    options = {"group_size": 20, "key_scale": "auto"}
    stepped = appended([(keys, keys)] * L, dtype="float16")
    stepped.requantize("int8", key_scale="auto")
    stepped.requantize("int4", **options)
    at_once = appended([(keys, keys)] * L, dtype="int4", **options)
    errors_of = [np.sqrt(np.square(each.k(1) - keys).mean()) for each in (stepped, at_once)]
    assert errors_of[0] < 1.02 * errors_of[1]


def test_a_finer_format_comes_back_with_room_to_spare(rng):
    limit = bytes_of("float16", 100)
    policy = KvCachePolicy(limit, hysteresis=0.2)
    cache = policy.new_cache(L, H, D)
    feed(cache, rng, 90)
    assert policy.apply(cache) and cache.dtype == "int8"
    cache.truncate(70)  # float16 would fill 0.7, its share is 0.8
    assert not policy.apply(cache) and cache.dtype == "int8"
    cache.truncate(60)
    assert policy.apply(cache) and cache.dtype == "float16" and len(cache) == 60
    feed(cache, rng, 30)
    policy.apply(cache)
    cache.clear()
    assert policy.apply(cache) and cache.dtype == "float16"
    strange = filled(rng, 10, dtype="float32")  # no step at all
    assert policy.apply(strange) and strange.dtype == "float16"


def test_steps_of_ones_own_and_windows(rng):
    steps = [
        {"dtype": "bfloat16", "share": 0.5},
        {"dtype": "int8", "value_dtype": "int4", "group_size": 1000, "share": 1},
    ]
    policy = KvCachePolicy(bytes_of("bfloat16", 40), steps)
    assert [step["dtype"] for step in policy.steps] == ["bfloat16", "int8"]
    assert "bfloat16 up to 0.5" in repr(policy) and policy.hysteresis == 0.1
    cache = policy.new_cache(L, H, D, window=8)  # holds at most two windows
    for _ in range(100):
        assert not policy.apply(cache, more=1)
        cache.push_step(*normal(rng, 2, L, H, D))
    cache = policy.new_cache(L, H, D, value_head_dim=D)
    feed(cache, rng, 21)
    assert policy.apply(cache) and cache.value_dtype == "int4" and cache.group_size == D


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0,), {}),
        (("1G",), {}),
        ((1.5,), {}),
        ((9, []), {}),
        ((9, "int8"), {}),
        ((9, [{}]), {}),
        ((9, ["int8"]), {}),
        ((9, [{"dtype": "int9"}]), {}),
        ((9, [{"dtype": "int8", "bits": 3}]), {}),
        ((9, [{"dtype": "float16"}, {"dtype": "int8"}]), {}),  # the first has no share
        ((9, [{"dtype": "float16", "share": 1.5}, {"dtype": "int8"}]), {}),
        ((9, [{"dtype": "float16", "share": 0}, {"dtype": "int8"}]), {}),
        ((9, [{"dtype": "int8", "share": 0.5}, {"dtype": "float16"}]), {}),
        ((9,), {"hysteresis": -0.1}),
        ((9,), {"hysteresis": 2}),
    ],
    ids=str,
)
def test_bad_policies_are_refused(arguments, options):
    with pytest.raises(errors.InvalidArgumentError):
        KvCachePolicy(*arguments, **options)


def test_a_policy_is_for_caches():
    policy = KvCachePolicy(1000)
    for call in (policy.apply, policy.occupancy, policy.dtype_for):
        with pytest.raises(errors.InvalidArgumentError, match="KVCache"):
            call("cache")
    with pytest.raises(errors.InvalidArgumentError, match="more"):
        policy.apply(policy.new_cache(L, H, D), more=-1)
