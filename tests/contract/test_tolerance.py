"""attend(tolerance=): what is left out is bounded for any data, and does not depend on threads.

Logits are laid out on purpose: keys of one channel, and a query of 1.
"""

import itertools
import math

import numpy as np
import pytest
import reference
from hard_logits import KINDS, TOLERANCES, below_the_threshold, layer_of_logits
from support import normal, refuses

import kvedge
from kvedge import Float32KvLayer, InvalidArgumentError, NonFiniteInputError, QuantizedKvLayer
from kvedge.core.formats import DTYPES


@pytest.mark.parametrize("factors", [[1.0, 1.0], [1.0, 0.5, 0.1, -0.7]], ids=["alike", "apart"])
@pytest.mark.parametrize("rows", [None, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_a_row_never_loses_more_than_the_tolerance(rng, kind, tolerance, rows, factors):
    length = 3000
    logits = kind(rng, length, tolerance)[:, np.newaxis]
    layer = layer_of_logits(logits, np.ones((length, 1, 64), np.float32))
    query = np.zeros((rows or 1, len(factors), 2), np.float32)
    query[..., 0] = factors
    out = layer.attend(query if rows else query[0], scale=1.0, tolerance=tolerance)
    assert out.min() >= 1 - tolerance - 2e-4
    assert out.max() <= 1 + 2e-4


@pytest.mark.skipif(kvedge.backend == "numpy", reason="NumPy reads all")
@pytest.mark.parametrize("dtype", [*DTYPES, "kivi4/int8", "int8/kivi2"])
@pytest.mark.parametrize("rows", [None, 40])
def test_what_holds_nothing_is_left_out(rng, dtype, rows):
    length, heads, dim = 4096, 2, 64
    dtype, _, values = dtype.partition("/")
    cache = kvedge.KVCache(1, heads, dim, dtype=dtype, value_dtype=values or None)
    keys = normal(rng, length, heads, dim) * 0.1
    keys[:64] = 1.0  # what the query looks for
    cache.push_step(keys[:1], normal(rng, 1, heads, dim))
    cache.append(0, keys[1:], normal(rng, length - 1, heads, dim))
    query = np.full((rows or 1, 4, dim), 3.0, np.float32)
    query = query if rows else query[0]
    seen, dropped = kvedge.tolerance_counts()
    out = cache.attend(0, query, tolerance=1e-3)
    now_seen, now_dropped = kvedge.tolerance_counts()
    assert now_dropped - dropped > 0.8 * (now_seen - seen) > 0
    np.testing.assert_allclose(out, cache.attend(0, query), atol=5e-3)


def test_no_tolerance_is_the_exact_result_to_the_bit(rng):
    layer = QuantizedKvLayer(2000, 2, 64)
    layer.extend(normal(rng, 2000, 2, 64) * 3, normal(rng, 2000, 2, 64))
    for query in (normal(rng, 4, 64) * 3, normal(rng, 20, 4, 64) * 3):
        exact, counts = layer.attend(query), kvedge.tolerance_counts()
        for none in (0, 0.0, np.float32(0)):
            np.testing.assert_array_equal(layer.attend(query, tolerance=none), exact)
        assert kvedge.tolerance_counts() == counts


@pytest.mark.parametrize("rows", [None, 5, 70])
@pytest.mark.parametrize(("heads", "group"), [(4, 1), (4, 4)])
def test_the_result_does_not_depend_on_threads(rng, heads, group, rows):
    length, dim = 10000, 64  # several slices
    layer = Float32KvLayer(length, heads, dim)
    layer.extend(normal(rng, length, heads, dim) * 2, normal(rng, length, heads, dim))
    query = normal(rng, rows or 1, heads * group, dim) * 2
    query = query if rows else query[0]
    one = layer.attend(query, tolerance=1e-3, num_threads=1)
    for threads in (2, 3, 7):
        again = layer.attend(query, tolerance=1e-3, num_threads=threads)
        np.testing.assert_array_equal(again, one)


def test_however_a_prompt_is_cut_it_stays_within_the_tolerance(rng):
    length, heads, dim = 1500, 2, 64
    keys, values = (normal(rng, length, heads, dim) * 2 for _ in range(2))
    query = normal(rng, length, 4, dim) * 2
    ref, _ = reference.attention(query, keys.astype(np.float64), values.astype(np.float64))
    for cuts in ([0, 1500], [0, 7, 700, 1500], [0, 1499, 1500]):
        layer = Float32KvLayer(length, heads, dim)
        for first, stop in itertools.pairwise(cuts):
            layer.extend(keys[first:stop], values[first:stop])
            out = layer.attend(query[first:stop], tolerance=1e-2)
            allowed = reference.TOLERANCE * np.abs(ref).max() + 1e-2 * np.abs(values).max()
            np.testing.assert_allclose(out, ref[first:stop], rtol=0, atol=allowed)


def test_parts_of_a_context_lose_together_no_more_than_the_tolerance(rng):
    length, tolerance = 4000, 0.05
    logits = below_the_threshold(rng, length, tolerance)[:, np.newaxis]
    ones = np.ones((length, 1, 64), np.float32)
    query = np.array([[1.0, 0.0]], np.float32)
    parts = [
        layer_of_logits(logits[at : at + 1000], ones[:1000]).attend(
            query, scale=1.0, tolerance=tolerance, return_lse=True
        )
        for at in range(0, length, 1000)
    ]
    out = kvedge.merge_attention([part[0] for part in parts], [part[1] for part in parts])
    assert out.min() >= 1 - tolerance - 2e-4


def test_batches_and_blocks_take_it_too(rng):
    length, heads, dim = 2100, 2, 64
    keys, values = normal(rng, length, heads, dim) * 3, normal(rng, length, heads, dim)
    query = normal(rng, 4, dim) * 3
    layer = QuantizedKvLayer(length, heads, dim)
    layer.extend(keys, values)
    whole = layer.attend(query, tolerance=1e-2)
    batch = kvedge.attend_batch([layer, layer], np.stack([query, query]), tolerance=1e-2)
    np.testing.assert_array_equal(batch, [whole, whole])
    exact = layer.attend(query)
    allowed = 1e-2 * np.abs(values).max() + 1e-3
    pool = kvedge.KvBlockPool(2 * length // 16 + 2, 16, 1, heads, dim)
    paged = kvedge.PagedKvCache(pool)
    seq = paged.new_sequence()
    paged.append(seq, 0, keys, values)
    paged.advance(seq, length)
    for out in (
        whole,
        paged.attend(seq, 0, query, tolerance=1e-2),
        paged.attend_batch([seq], 0, query[np.newaxis], tolerance=1e-2)[0],
    ):
        np.testing.assert_allclose(out, exact, rtol=0, atol=allowed)


@pytest.mark.parametrize("tolerance", [-1e-9, 1, 1.5, 0.99999999999, -math.inf, "0.1", None, True])
def test_a_tolerance_is_a_share_below_1(rng, tolerance):
    layer = QuantizedKvLayer(4, 1, 8)
    layer.extend(normal(rng, 4, 1, 8), normal(rng, 4, 1, 8))
    wrong = NonFiniteInputError if tolerance == -math.inf else InvalidArgumentError
    with refuses(wrong, match="tolerance"):
        layer.attend(normal(rng, 1, 8), tolerance=tolerance)
    with refuses(wrong, match="tolerance"):
        kvedge.attend_batch([layer], normal(rng, 1, 1, 8), tolerance=tolerance)
