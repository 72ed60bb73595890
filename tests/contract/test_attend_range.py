"""Rows that a query does not see have no part in its result, however large they are."""

import numpy as np
import pytest
import reference
from support import WIDE, assert_attention_close, normal, stored

from kvedge import KvBlockPool, PagedKvCache
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

H, D, HEADS = 2, 40, 6
HUGE = np.float32(3e38)
SMALL = [1e-3, 1e-15, 1e-25, 1e-33]


@pytest.fixture(params=WIDE)
def layer_class(request):
    """Each kind of layer that holds what float32 does."""
    return layer_types[request.param]


def rows(rng, n, size=1.0):
    return normal(rng, n, H, D) * np.float32(size)


def signs(rng, *shape):
    return np.where(rng.integers(0, 2, shape), np.float32(1), np.float32(-1))


def layer_of(layer_class, keys, values):
    layer = layer_class(len(keys), H, D)
    layer.extend(keys, values)
    return layer


def check(out, ref, hint=""):
    """The contract, for each row and head alone: others may be far larger."""
    out, ref = out.reshape(-1, D), ref.reshape(-1, D)
    for i in range(len(ref)):
        assert_attention_close(out[i], ref[i], hint=f"{hint} row {i}")


@pytest.mark.parametrize("huge", [1.0, 1e25, HUGE], ids=str)
@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("kind", ["bool", "bias", "window", "causal", "alone"])
def test_a_huge_value_that_is_not_seen_leaves_small_ones_alone(kind, small, huge, layer_class, rng):
    n = 300
    keys, values = rows(rng, n), rows(rng, n, small)
    hidden = {"bool": 100, "bias": 100, "window": 10, "causal": n - 1, "alone": 100}[kind]
    values[hidden] = huge * signs(rng, H, D)
    seen = np.arange(n) != hidden
    options = {
        "bool": {"mask": seen},
        "bias": {"mask": np.where(seen, np.float32(0), np.float32(-np.inf))},
        "window": {"window": 200},
        "causal": {},
        "alone": {"mask": np.broadcast_to(seen, (HEADS, 3, n))},
    }[kind]
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, 3, HEADS, D)
    out, lse = layer.attend(query, return_lse=True, **options)
    ref, ref_lse = reference.attention(query, *stored(layer), **options)
    last = 2 if kind == "causal" else 3  # the last row of three sees the last token
    check(out[:last], ref[:last])
    np.testing.assert_allclose(lse, ref_lse, rtol=1e-4)


@pytest.mark.parametrize("small", SMALL)
def test_a_huge_key_that_is_not_seen_leaves_small_ones_alone(small, layer_class, rng):
    n = 300
    keys, values = rows(rng, n, small), rows(rng, n)
    keys[100] = HUGE * signs(rng, H, D)
    seen = np.arange(n) != 100
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, HEADS, D) * np.float32(1 / small)
    ref, _ = reference.attention(query, *stored(layer), mask=seen)
    check(layer.attend(query, mask=seen), ref)


def test_each_head_has_a_range_of_its_own(layer_class, rng):
    keys, values = rows(rng, 200), rows(rng, 200)
    values[:, 0] *= np.float32(1e35)
    values[:, 1] *= np.float32(1e-33)
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, 2, HEADS, D)
    check(layer.attend(query), reference.attention(query, *stored(layer))[0])


def test_zero_values_beside_huge_ones_give_zero(layer_class, rng):
    keys, values = rows(rng, 200), rows(rng, 200)
    values[:, 0] *= np.float32(1e35)
    values[:, 1] = 0
    layer = layer_of(layer_class, keys, values)
    assert (layer.attend(normal(rng, HEADS, D))[HEADS // 2 :] == 0).all()


@pytest.mark.parametrize("small", SMALL)
def test_what_was_truncated_leaves_the_rest_alone(small, layer_class, rng):
    layer = layer_class(400, H, D)
    layer.extend(rows(rng, 100, small), rows(rng, 100, small))
    layer.extend(HUGE * signs(rng, 50, H, D), HUGE * signs(rng, 50, H, D))
    layer.truncate(100)
    query = normal(rng, HEADS, D) * np.float32(1 / small)
    check(layer.attend(query), reference.attention(query, *stored(layer))[0])
    keys = np.repeat(stored(layer)[0], HEADS // H, axis=1)
    logits = np.einsum("thd,hd->ht", keys, query.astype(np.float64)) / np.sqrt(D)
    check_scores = np.abs(layer.scores(query) - logits).max() / np.abs(logits).max()
    assert check_scores < 1e-5


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("small", SMALL)
def test_a_sequence_that_was_dropped_leaves_others_of_its_pool_alone(small, dtype, rng):
    scales = {"scale_dtype": "float32"} if FORMATS[dtype].has_scales else {}
    cache = PagedKvCache(KvBlockPool(40, 16, 1, H, D, dtype=dtype, **scales))
    gone = cache.new_sequence()
    cache.append(gone, 0, HUGE * signs(rng, 30, H, D), HUGE * signs(rng, 30, H, D))
    cache.advance(gone, 30)
    cache.drop(gone)
    seqs = [cache.new_sequence() for _ in range(2)]
    for seq in seqs:
        cache.append(seq, 0, rows(rng, 100), rows(rng, 100, small))
        cache.advance(seq, 100)
    queries = normal(rng, 2, HEADS, D)
    outs = cache.attend_batch(seqs, 0, queries)
    for seq, query, out in zip(seqs, queries, outs, strict=True):
        keys, values = (cache.k(seq, 0).astype(np.float64), cache.v(seq, 0).astype(np.float64))
        check(out, reference.attention(query, keys, values)[0])
        np.testing.assert_array_equal(out, cache.attend(seq, 0, query))


OPTIONS = [
    {},
    {"softcap": 5.0},
    {"sink_logits": np.zeros(HEADS, np.float32)},
    {"alibi_slopes": np.full(HEADS, 0.1, np.float32)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_options_still_hold_for_rows_with_a_range_of_their_own(options, layer_class, rng):
    n = 200
    keys, values = rows(rng, n), rows(rng, n, 1e-20)
    values[50] = HUGE
    seen = np.broadcast_to(np.arange(n) != 50, (HEADS, 4, n)).copy()
    seen[1:3, 2, 100:] = False
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, 4, HEADS, D)
    one = layer.attend(query, mask=seen, num_threads=1, **options)
    two = layer.attend(query, mask=seen, num_threads=2, **options)
    np.testing.assert_array_equal(one, two)
    check(one, reference.attention(query, *stored(layer), mask=seen, **options)[0])
