"""MultiHeadKvCache: rows of 2 to 8 bits after a random rotation."""

import copy
import hashlib
import itertools
import math
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support import normal

import kvedge
from kvedge import KvCacheConfig, MultiHeadKvCache, errors
from kvedge.core import checks
from kvedge.core.formats import GRIDS
from kvedge.core.grid_levels import POSITIVE_LEVELS
from kvedge.core.rows import RowShape

BITS = range(2, 9)
DIMS = [1, 7, 64, 80]

# SHA-256 of codes and scales, keys and values, of `golden_cache`: written by the first version.
GOLDEN = {
    (2, 64): "ac8c5f397d3275141227564bbb8a68c3b9f3bcb119a464f3bdb967ab4eeca68d",
    (3, 80): "c16c26308082c76e7aed2de733a06d3567d8a8a9e3ed57e248ff8bb4d74a3bb1",
    (4, 64): "8bcd21625a857ff0b402abce85109207922e10ccbed8b52b5100d45f03823a85",
    (5, 7): "6096440a16dc151bcd042a999e22348c3749d58c16839218268ec6d5ddc083e0",
    (8, 80): "4a04a82c58bb54e0b2c79f63a1d4df783e025e49a2dbc6be1a0c6576ee7bf2fb",
}


def filled(rng, bits, dim, *, tokens=50, heads=3, **options):
    cache = MultiHeadKvCache(heads, KvCacheConfig(dim, bits, seed=9), **options)
    keys, values = normal(rng, tokens, heads, dim), normal(rng, tokens, heads, dim)
    cache.extend(keys, values)
    return cache, keys, values


def same(one, other):
    names = ("key_codes", "value_codes", "key_scales", "value_scales")
    return len(one) == len(other) and all(
        getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in names
    )


def attention(query, keys, values, visible=None, scale=None):
    """float64 attention of rows (n, num_heads, D) over keys and values (T, H, D)."""
    n, num_heads, dim = query.shape
    group = num_heads // keys.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (keys, values))
    logits = np.einsum("nhd,thd->hnt", query.astype(np.float64), keys)
    logits *= dim**-0.5 if scale is None else scale
    positions = len(keys) - n + np.arange(n)[:, np.newaxis]
    seen = np.arange(len(keys)) <= positions
    logits[:, ~seen if visible is None else ~(seen & visible)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnt,thd->nhd", weights, values)


# ---- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_what_is_nearest_to_them(bits):
    levels = POSITIVE_LEVELS[bits]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 40.0]
    for level, low, high in zip(levels, edges, edges[1:], strict=False):
        mass = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
        moment = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        assert level == pytest.approx(moment / mass, rel=1e-5)


def plain_row(bits, row):
    """Codes and scale of a row by the formula, a number after the other."""
    levels = [np.float32(x) for x in POSITIVE_LEVELS[bits]]
    levels = [-x for x in reversed(levels)] + levels
    bounds = [float((a + b) / np.float32(2)) for a, b in itertools.pairwise(levels)]

    def by_halves(terms):
        terms = terms + [0.0] * ((1 << (len(terms) - 1).bit_length()) - len(terms))
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
        return terms[0]

    x = [float(value) for value in row]
    rms = math.sqrt(by_halves([value * value for value in x]) / len(x))
    inverse = 1 / rms if rms else 0.0
    codes = [sum(bound <= value * inverse for bound in bounds) for value in x]
    chosen = [float(levels[code]) for code in codes]
    product = by_halves([value * level for value, level in zip(x, chosen, strict=True)])
    return codes, np.float32(product / by_halves([level * level for level in chosen]))


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_scales_are_those_of_the_formula(rng, bits, scale_dtype):
    cache = MultiHeadKvCache(1, KvCacheConfig(21, bits, scale_dtype=scale_dtype))
    sizes = [1.0, 1e-3, 100.0, 0.0, 1e-30 if scale_dtype == "float32" else 1e-6]
    rows = normal(rng, 5, 1, 21) * np.array(sizes, np.float32)[:, np.newaxis, np.newaxis]
    cache.extend(rows, -rows)
    rotated = cache._rotation.apply(rows[:, :, np.newaxis])[:, 0, 0].astype(np.float32)
    for row, packed, scale in zip(rotated, cache.key_codes, cache.key_scales, strict=True):
        codes, wanted = plain_row(bits, row)
        digits = sum(code << (bits * d) for d, code in enumerate(codes))
        assert packed.tobytes() == digits.to_bytes(-(-21 * bits // 8), "little")
        assert scale[0] == wanted.astype(scale_dtype)


def golden_cache(bits, dim):
    """Of integers, so that no generator's stream has to stay as it is."""
    cache = MultiHeadKvCache(3, KvCacheConfig(dim, bits, seed=2**64 - 2))
    count = 4 * 3 * dim
    rows = (np.arange(count) * 7919 % 1009 - 504).astype(np.float32).reshape(4, 3, dim) / 64
    cache.extend(rows, rows[::-1] ** 3)
    return cache


@pytest.mark.parametrize(("bits", "dim"), GOLDEN)
def test_the_same_rows_are_stored_as_the_same_bytes_everywhere(bits, dim):
    cache = golden_cache(bits, dim)
    stored = (cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in stored))
    assert digest.hexdigest() == GOLDEN[bits, dim]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_tokens_in_any_chunks_store_the_same_bytes(rng, bits, dim):
    whole, keys, values = filled(rng, bits, dim, tokens=6)
    by_token = MultiHeadKvCache(3, whole.config)
    for key, value in zip(keys[:3], values[:3], strict=True):
        by_token.push_token(list(key), tuple(value))
    by_token.push_token(keys[3].reshape(-1), values[3])
    by_token.extend(keys[4:].swapaxes(0, 1), values[4:].swapaxes(0, 1), layout="hnd")
    assert same(whole, by_token)


@pytest.mark.parametrize("dim", [1, 2, 3, 24, 64, 80, 1000])
def test_the_rotation_is_orthogonal(rng, dim):
    cache = MultiHeadKvCache(2, KvCacheConfig(dim, 4))
    rows = normal(rng, 5, 2, 3, dim)
    turned = cache._rotation.apply(rows)
    np.testing.assert_allclose(cache._rotation.undo(turned), rows, atol=1e-12)
    products = np.einsum("nhgd,nhkd->nhgk", rows, rows, dtype=np.float64)
    np.testing.assert_allclose(np.einsum("nhgd,nhkd->nhgk", turned, turned), products, atol=1e-9)


def test_heads_and_seeds_have_rotations_of_their_own(rng):
    row = normal(rng, 64)
    cache = MultiHeadKvCache(3, KvCacheConfig(64, 4, seed=5))
    cache.push_token([row] * 3, [row] * 3)
    first = [cache.head(i).key_codes.tobytes() for i in range(3)]
    assert len(set(first)) == 3
    other = MultiHeadKvCache(1, KvCacheConfig(64, 4, seed=6))
    other.push_token(row, row)
    assert other.head(0).key_codes.tobytes() == first[1]  # head h has seed + h


def test_seeds_of_heads_go_on_at_0(rng):
    rows = normal(rng, 5, 2, 24)
    last, first = (MultiHeadKvCache(2, KvCacheConfig(24, 4, seed=s)) for s in (2**64 - 1, 0))
    last.extend(rows, rows)
    first.extend(rows[:, ::-1], rows[:, ::-1])
    np.testing.assert_array_equal(last.head(1).key_codes, first.head(0).key_codes)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("kind", ["normal", "outliers", "one"])
def test_storing_loses_what_the_grid_loses_of_a_normal_distribution(rng, dim, kind):
    # Distortion of the Lloyd-Max quantizers of a normal distribution: Max 1960, table I.
    losses = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
    keys = normal(rng, 200, 2, dim)
    if kind == "outliers":
        keys[..., 3] += 50
        keys[..., dim - 1] -= 20
    elif kind == "one":
        keys[..., 1:] = 0
    for bits, loss in losses.items():
        cache = MultiHeadKvCache(2, KvCacheConfig(dim, bits))
        cache.extend(keys, keys)
        for back in (cache.decode_keys(), cache.decode_values()):
            assert np.square(back - keys).sum() / np.square(keys).sum() < 1.15 * loss


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 80])
def test_memory_shrinks_as_it_says(rng, bits, dim):
    cache, _, _ = filled(rng, bits, dim)
    arrays = (cache.key_codes, cache.value_codes, cache.key_scales, cache.value_scales)
    assert sum(array.nbytes for array in arrays) == 50 * cache.token_bytes
    assert cache.token_bytes == 2 * 3 * (dim * bits // 8 + 2)
    assert cache.compression_ratio == pytest.approx(32 * dim / (dim * bits + 16))
    assert cache.memory_bytes == cache._layer.capacity * cache.token_bytes
    assert cache.head(0).compression_ratio == cache.compression_ratio


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_is_that_over_the_decoded_rows(rng, bits, dim):
    cache, _, _ = filled(rng, bits, dim)
    for shape in ((3, dim), (6, dim), (4, 6, dim)):
        query = 2 * normal(rng, *shape)
        expected = attention(
            query.reshape(-1, *shape[-2:]), cache.decode_keys(), cache.decode_values()
        )
        out = cache.attend(query)
        assert out.shape == shape and out.dtype == np.float32
        np.testing.assert_allclose(
            out, expected.reshape(shape), atol=2e-4 * np.abs(expected).max(), rtol=0
        )


def test_every_option_of_attend_is_taken(rng):
    cache, _, _ = filled(rng, 4, 40)
    keys, values = cache.decode_keys(), cache.decode_values()
    exact = kvedge.Float32KvLayer(50, 3, 40)
    exact.extend(keys, values)
    query = normal(rng, 4, 6, 40)
    mask = rng.integers(0, 2, (6, 4, 50)).astype(bool)
    mask[..., 0] = True
    for options in (
        {"scale": 0.3},
        {"causal": False},
        {"window": 7, "sink_tokens": 2},
        {"sink_logits": normal(rng, 6)},
        {"softcap": 2.0},
        {"mask": mask},
        {"mask": normal(rng, 6, 4, 50)},
        {"start": 11},
        {"alibi_slopes": normal(rng, 6)},
        {"precision_bits": 16, "num_threads": 1},
    ):
        out, lse = cache.attend(query, return_lse=True, **options)
        wanted, wanted_lse = exact.attend(query, return_lse=True, **options)
        np.testing.assert_allclose(out, wanted, atol=3e-4 * np.abs(wanted).max(), rtol=0)
        np.testing.assert_allclose(lse, wanted_lse, atol=1e-3)
    turned = np.ascontiguousarray(query.swapaxes(0, 1))
    target = np.empty(turned.shape, np.float16)
    out, lse = cache.attend(turned, layout="hnd", out=target, return_lse=True)
    assert out is target and lse.shape == (6, 4)
    np.testing.assert_allclose(out.swapaxes(0, 1), cache.attend(query), atol=2e-3)
    with pytest.raises(errors.LayoutError):
        cache.attend(query, out=query)


def test_attention_makes_no_decoded_copy_of_the_past(rng):
    cache, _, _ = filled(rng, 4, 64, tokens=20_000, heads=2)
    query = normal(rng, 2, 64)
    tracemalloc.start()
    cache.attend(query)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000 * 2 * 64 * 4  # bytes of the decoded keys alone


def test_a_long_prompt_is_rotated_in_pieces(rng):
    cache = MultiHeadKvCache(2, KvCacheConfig(64, 4))
    rows = normal(rng, 20_000, 2, 64)
    tracemalloc.start()
    cache.extend(rows, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    scratch = 3 * 2**22 if kvedge.isa_info()["backend"] == "native" else 2**25  # NumPy: in float64
    assert peak < 2.5 * rows.nbytes + scratch  # rotated keys and values besides


def test_scores_are_scaled_logits(rng):
    cache, _, _ = filled(rng, 3, 64)
    query = normal(rng, 6, 64)
    keys = np.repeat(cache.decode_keys().astype(np.float64), 2, axis=1)
    expected = np.einsum("hd,thd->ht", query, keys)
    np.testing.assert_allclose(cache.attention_scores(query), expected / 8, atol=1e-3)
    np.testing.assert_allclose(cache.attention_scores(query, scale=2.0), 2 * expected, atol=2e-2)
    heads = normal(rng, 3, 64)
    for i in range(3):
        of_head = cache.head(i).attention_scores(heads[i])
        np.testing.assert_array_equal(of_head, cache.attention_scores(heads)[i])


# ---- the life of a cache -------------------------------------------------------------------------


def test_eviction_truncation_and_clearing_leave_the_other_tokens_as_they_are(rng):
    cache, keys, values = filled(rng, 4, 24)
    query = normal(rng, 3, 24)
    scores = cache.attention_scores(query)
    cache.evict_outside_window(60)
    assert len(cache) == 50
    cache.evict_outside_window(30)
    assert len(cache) == 30
    np.testing.assert_array_equal(cache.attention_scores(query), scores[:, 20:])
    cache.truncate(10)
    np.testing.assert_array_equal(cache.attention_scores(query), scores[:, 20:30])
    cache.extend(keys[30:], values[30:])
    np.testing.assert_array_equal(cache.attention_scores(query), scores[:, 20:])
    cache.evict_outside_window(0)
    assert cache.is_empty and cache.head(0).is_empty
    assert cache.attention_scores(query).shape == (3, 0)
    cache.clear()
    cache.extend(keys, values)
    np.testing.assert_array_equal(cache.attention_scores(query), scores)
    with pytest.raises(errors.InvalidArgumentError):
        cache.evict_outside_window(-1)
    with pytest.raises(errors.PositionOutOfRangeError):
        cache.truncate(51)


def test_copies_pickles_and_files_hold_the_same(rng, tmp_path):
    cache, keys, values = filled(rng, 3, 20, num_query_heads=6)
    cache.evict_outside_window(40)
    cache.save(tmp_path / "cache.safetensors")
    query = normal(rng, 6, 20)
    expected = cache.attend(query)
    for other in (
        cache.copy(),
        copy.copy(cache),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        MultiHeadKvCache.load(tmp_path / "cache.safetensors"),
    ):
        assert same(cache, other) and other.config == cache.config
        assert other.num_query_heads == 6
        np.testing.assert_array_equal(other.attend(query), expected)
        other.extend(keys, values)
        assert len(other) == 90 and len(cache) == 40
    empty = MultiHeadKvCache(2, KvCacheConfig(8, 4))
    empty.save(tmp_path / "empty")
    assert MultiHeadKvCache.load(tmp_path / "empty").is_empty


def test_damaged_and_foreign_files_are_refused(rng, tmp_path):
    cache, _, _ = filled(rng, 3, 8, tokens=2)
    path = tmp_path / "cache"
    cache.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(errors.CorruptFileError):
            MultiHeadKvCache.load(path)
        path.write_bytes(whole[:at])
        with pytest.raises(errors.CorruptFileError):
            MultiHeadKvCache.load(path)
    kvedge.KVCache(1, 2, 8).save(path)
    with pytest.raises(errors.CorruptFileError, match="not of kvedge multi-head cache"):
        MultiHeadKvCache.load(path)
    path.write_bytes(whole)
    with pytest.raises(errors.CorruptFileError):
        kvedge.KVCache.load(path)
    with pytest.raises(FileNotFoundError):
        MultiHeadKvCache.load(tmp_path / "none")


def test_an_old_file_opens_for_ever():
    """golden_cache(4, 64) of the first version, with 20 projections, which are left out."""
    fixtures = Path(__file__).parents[1] / "fixtures"
    caches = (
        MultiHeadKvCache.load(fixtures / "v1-multi-head.kvedge"),
        pickle.loads((fixtures / "v1-multi-head.pickle").read_bytes()),
    )
    for cache in caches:
        assert same(cache, golden_cache(4, 64)) and cache.config == golden_cache(4, 64).config
        assert same(pickle.loads(pickle.dumps(cache)), cache)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 4), "head_dim"),
        ((1025, 4), "head_dim"),
        ((8, 1), "bits"),
        ((8, 9), "bits"),
        ((8, 2.0), "bits"),
        ((8, 4, 20), "projections"),
        ((8, 4, 0, -1), "seed"),
        ((8, 4, 0, 2**64), "seed"),
        ((8, 4, 0, 0, "int8"), "scale_dtype"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, name):
    with pytest.raises(errors.InvalidArgumentError, match=name):
        KvCacheConfig(*arguments)


def test_arguments_that_make_no_cache_are_refused():
    config = KvCacheConfig(8, 4)
    for num_heads in (0, -1, 1 << 17, 1.5):
        with pytest.raises(errors.InvalidArgumentError, match="num_heads"):
            MultiHeadKvCache(num_heads, config)
    for num_query_heads in (0, 3, 2.0):
        with pytest.raises(errors.InvalidArgumentError, match="num_query_heads"):
            MultiHeadKvCache(2, config, num_query_heads=num_query_heads)
    with pytest.raises(errors.InvalidArgumentError, match="config"):
        MultiHeadKvCache(2, {"head_dim": 8})
    with pytest.raises(errors.HeadOutOfRangeError):
        MultiHeadKvCache(2, config).head(2)


def test_rows_that_do_not_fit_are_refused_and_change_nothing(rng):
    cache, _, _ = filled(rng, 4, 8, tokens=3)
    before = cache.copy()
    good = normal(rng, 3, 8)
    bad, large = good.copy(), good.copy()
    bad[2, 5] = np.nan
    large[1] = 29_000
    wrong = [
        (normal(rng, 2, 8), errors.ShapeMismatchError),
        (normal(rng, 3, 9), errors.ShapeMismatchError),
        ([good[0], good[1]], errors.ShapeMismatchError),
        ([good[0], good[1], good[2, :7]], errors.ShapeMismatchError),
        ([], errors.ShapeMismatchError),
        (good.astype(np.float64), errors.DtypeMismatchError),
        ([[1.0] * 8] * 3, errors.DtypeMismatchError),
        (bad, errors.NonFiniteInputError),
        (large, errors.ScaleRangeError),
    ]
    for rows, error in wrong:
        with pytest.raises(error):
            cache.push_token(rows, good)
        with pytest.raises(error):
            cache.push_token(good, rows)
        if error not in (errors.ScaleRangeError,):
            with pytest.raises(error):
                cache.attention_scores(rows)
    with pytest.raises(errors.ShapeMismatchError):
        cache.extend(good[np.newaxis], normal(rng, 2, 3, 8))
    assert same(cache, before)
    query = normal(rng, 3, 8)
    np.testing.assert_array_equal(cache.attend(query), before.attend(query))
    with pytest.raises(errors.InvalidArgumentError, match="no tokens"):
        MultiHeadKvCache(1, cache.config).attend(good[:1])


def test_rows_that_pass_float32_when_rotated_are_refused():
    cache = MultiHeadKvCache(1, KvCacheConfig(64, 4, scale_dtype="float32"))
    rows = np.full((1, 64), checks.FLOAT32_MAX, np.float32)
    with pytest.raises(errors.KvedgeError):
        cache.push_token(rows, rows)
    assert cache.is_empty


def test_queries_must_have_the_heads_that_were_named(rng):
    cache = MultiHeadKvCache(2, KvCacheConfig(8, 4), num_query_heads=4)
    cache.push_token(normal(rng, 2, 8), normal(rng, 2, 8))
    assert cache.attend(normal(rng, 4, 8)).shape == (4, 8)
    for call in (cache.attend, cache.attention_scores):
        with pytest.raises(errors.ShapeMismatchError, match="num_query_heads"):
            call(normal(rng, 2, 8))


def test_a_grid_takes_what_its_limit_says():
    for form in GRIDS.values():
        for scale_dtype in ("float32", "float16"):
            shape = RowShape.of(4, 4, scale_dtype, True)
            limit = np.float32(form.limit(shape))
            rows = np.array([[[limit, -limit, 0, 1]]], np.float32)
            form.refuse(rows, "keys", shape)
            assert np.isfinite(form.decode(*form.encode(rows, shape), shape, np.float64)).all()
            with pytest.raises(errors.ScaleRangeError):
                form.refuse(rows * np.float32(1.01), "keys", shape)
