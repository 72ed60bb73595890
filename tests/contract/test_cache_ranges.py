"""Ranges of tokens from one cache to another, byte for byte or stored anew."""

import pickle

import numpy as np
import pytest
from support import normal

from kvedge import KVCache, errors
from kvedge.core.formats import FORMATS

L, H, D = 2, 2, 16


def filled(rng, n, **options):
    cache = KVCache(L, H, D, **options)
    feed(cache, rng, n)
    return cache


def feed(cache, rng, n):
    for layer in range(L):
        cache.append(layer, *normal(rng, 2, n, H, D))
    cache.advance(n)


def stored(cache, start=0, stop=None):
    names = ("key_codes", "value_codes", "key_scales", "value_scales")
    layers = [cache.layer(i) for i in range(L)]
    return [getattr(layer, name)[start:stop].tobytes() for layer in layers for name in names]


def test_a_range_goes_from_cache_to_cache_byte_for_byte(rng, dtype):
    cache, other = filled(rng, 9, dtype=dtype), filled(rng, 5, dtype=dtype)
    before = stored(other)
    part = cache.extract(2, 7)
    assert len(part) == 5 and stored(part) == stored(cache, 2, 7)
    other.inject(pickle.loads(pickle.dumps(part)))
    assert len(other) == 10 and stored(other, 5) == stored(cache, 2, 7)
    assert stored(other, 0, 5) == before
    query = normal(rng, H, D)
    keys = np.concatenate([other.k(0)[:5], cache.k(0)[2:7]])
    values = np.concatenate([other.v(0)[:5], cache.v(0)[2:7]])
    exact = KVCache(1, H, D, dtype="float32")
    exact.append(0, keys, values)
    wanted = exact.attend(0, query)
    np.testing.assert_allclose(other.attend(0, query), wanted, atol=1e-3 * np.abs(wanted).max())
    feed(other, rng, 3)
    other.inject(other)
    assert len(other) == 26 and stored(other, 13) == stored(other, 0, 13)
    assert len(cache.extract()) == 9 and len(cache.extract(4, 4)) == 0
    other.inject(cache.extract(4, 4))
    assert len(other) == 26
    empty = KVCache(L, H, D, dtype=dtype)
    empty.inject(part)
    assert stored(empty) == stored(part)


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_are_stored_anew_where_that_is_asked_for(rng, name):
    source = filled(rng, 6, dtype=name)
    for options in ({"dtype": "int8", "scale_dtype": "float16"}, {"dtype": "bfloat16"}):
        if options["dtype"] == name and name != "int8":
            continue
        cache, expected = filled(rng, 3, **options), None
        expected = cache.copy()
        with pytest.raises(errors.ShapeMismatchError, match="requantize"):
            cache.inject(source)
        assert len(cache) == 3
        cache.inject(source, requantize=True)
        for i in range(L):
            expected.append(i, source.k(i), source.v(i))
        expected.advance(6)
        assert stored(cache) == stored(expected)


def test_key_offsets_have_to_agree(rng):
    one = filled(rng, 5, key_offset="auto")
    plain = filled(rng, 2)
    with pytest.raises(errors.ShapeMismatchError, match="key offset"):
        plain.inject(one)
    plain.inject(one, requantize=True)
    np.testing.assert_allclose(plain.k(0)[2:], one.k(0), atol=0.05)
    part = one.extract(1, 3)
    np.testing.assert_array_equal(part.k(1), one.k(1)[1:3])
    one.inject(part)
    np.testing.assert_array_equal(one.k(1)[5:], part.k(1))
    auto = KVCache(L, H, D, key_offset="auto")
    auto.inject(part)  # an empty one takes the offset as well
    assert stored(auto) == stored(part)
    np.testing.assert_array_equal(auto.k(0), part.k(0))


def test_what_does_not_fit_is_refused_and_changes_nothing(rng):
    cache = filled(rng, 5, max_seq_len=8)
    before = stored(cache)
    cases = [
        (filled(rng, 4), errors.CapacityExceededError),
        (KVCache(L + 1, H, D), errors.ShapeMismatchError),
        (KVCache(L, H, D + 1), errors.ShapeMismatchError),
        (KVCache(L, H, D, window=4), errors.InvalidArgumentError),
        ("cache", errors.InvalidArgumentError),
    ]
    pending = filled(rng, 1)
    pending.append(0, *normal(rng, 2, H, D))
    cases.append((pending, errors.LayersOutOfStepError))
    for other, error in cases:
        for requantize in (False, True):
            with pytest.raises(error):
                cache.inject(other, requantize=requantize)
    large = KVCache(L, H, D, dtype="float32")
    large.push_step(np.ones((L, H, D), np.float32), np.full((L, H, D), 1e30, np.float32))
    half = filled(rng, 5, dtype="float16")
    whole = stored(half)
    with pytest.raises(errors.ScaleRangeError):
        half.inject(large, requantize=True)
    assert stored(cache) == before and stored(half) == whole
    for start, stop in ((-1, 3), (0, 6), (4, 2)):
        with pytest.raises(errors.PositionOutOfRangeError):
            cache.extract(start, stop)
    with pytest.raises(errors.LayersOutOfStepError):
        pending.extract()


def test_marks_of_tokens_that_are_written_over_are_stale(rng):
    cache = filled(rng, 6)
    low, high = cache.snapshot(), None
    feed(cache, rng, 4)
    high = cache.snapshot()
    cache.truncate(6)
    cache.inject(cache.extract(0, 2))
    with pytest.raises(errors.StaleSnapshotError):
        cache.restore(high)
    cache.restore(low)
    assert len(cache) == 6


@pytest.mark.parametrize(("start", "n"), [(0, 3), (2, 4), (6, 3), (0, 12), (5, 9), (9, 4), (3, 0)])
def test_tokens_are_replaced_at_a_position(rng, dtype, start, n):
    cache, other = filled(rng, 9, dtype=dtype), filled(rng, n, dtype=dtype)
    before = [(cache.k(i).copy(), cache.v(i).copy()) for i in range(L)]
    cache.inject(other, start)
    length = max(9, start + n)
    assert len(cache) == length
    assert stored(cache, start, start + n) == stored(other)
    for layer, sides in enumerate(before):
        for rows, read in zip(sides, (KVCache.k, KVCache.v), strict=True):
            whole = np.concatenate([rows[:start], read(other, layer), rows[start + n :]])
            np.testing.assert_array_equal(read(cache, layer), whole)
    exact = KVCache(1, H, D, dtype="float32")
    exact.append(0, cache.k(0), cache.v(0))
    query = normal(rng, H, D)
    out = exact.attend(0, query)
    np.testing.assert_allclose(cache.attend(0, query), out, atol=1e-3 * np.abs(out).max())
    feed(cache, rng, 2)
    assert len(cache) == length + 2


def test_a_huge_value_put_in_and_taken_out_leaves_the_rest_right(rng):
    cache, huge = filled(rng, 9, dtype="float32"), KVCache(L, H, D, dtype="float32")
    query, wanted = normal(rng, H, D), cache.copy()
    rows = np.full((L, H, D), 1e30, np.float32)
    huge.push_step(np.zeros_like(rows), rows)
    kept = cache.extract(4, 5)
    cache.inject(huge, 4)
    assert 1e20 < np.abs(cache.attend(0, query)).max() < np.inf
    cache.inject(kept, 4)
    np.testing.assert_allclose(cache.attend(0, query), wanted.attend(0, query), atol=1e-5)


def test_a_position_beyond_the_end_or_the_room_is_refused(rng):
    cache, other = filled(rng, 5, max_seq_len=8), filled(rng, 4)
    before = stored(cache)
    for start in (-1, 6, 100):
        with pytest.raises(errors.PositionOutOfRangeError) as caught:
            cache.inject(other, start)
        assert (caught.value.expected, caught.value.got) == (range(6), start)
    for start in (5, None):
        with pytest.raises(errors.CapacityExceededError):
            cache.inject(other, start)
    with pytest.raises(errors.InvalidArgumentError):
        cache.inject(other, 1.0)
    assert stored(cache) == before
    low, high = cache.snapshot(), None
    cache.inject(other, 4)
    high = cache.snapshot()
    assert len(cache) == 8 and low.is_stale and not high.is_stale
    cache.inject(cache, 0)  # of itself, the same bytes
    cache.inject(cache.extract(0, 3), 5)
    assert stored(cache, 5) == stored(cache, 0, 3)


def test_tokens_at_a_position_are_stored_anew_where_that_is_asked_for(rng):
    cache, other = filled(rng, 6, key_scale="auto"), filled(rng, 2, dtype="float16")
    with pytest.raises(errors.ShapeMismatchError, match="requantize"):
        cache.inject(other, 1)
    scale = cache.key_scale
    cache.inject(other, 1, requantize=True)
    np.testing.assert_array_equal(cache.key_scale, scale)
    np.testing.assert_allclose(cache.k(1)[1:3], other.k(1), atol=0.05)


def test_recent_tokens_at_a_position(rng):
    """Replaced to the end, tokens keep their recent format; before others, they are read anew."""
    options = {"dtype": "int4", "recent": 4, "sinks": 2}
    for start, n in ((3, 6), (5, 6), (1, 3), (6, 1)):
        cache, other = filled(rng, 9, **options), filled(rng, n, **options)
        own, new = cache.k(0).copy(), other.k(0).copy()
        cache.inject(other, start)
        length = max(9, start + n)
        to_end = start + n == length
        whole = np.concatenate([own[:start], new, own[start + n :]])
        off = np.abs(cache.k(0) - whole).max(axis=(1, 2))
        assert len(off) == length and (off < 1.1).all()
        if to_end:
            assert (off[-min(4, n) :] == 0).all()
        assert (off[: min(2, start)] == 0).all()
        feed(cache, rng, 6)
        query = normal(rng, H, D)
        exact = KVCache(1, H, D, dtype="float32")
        exact.append(0, cache.k(0), cache.v(0))
        wanted = exact.attend(0, query)
        np.testing.assert_allclose(cache.attend(0, query), wanted, atol=1e-3 * np.abs(wanted).max())
        cache.truncate(start)
        assert len(cache.k(1)) == start
