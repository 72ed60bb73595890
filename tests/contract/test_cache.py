"""KVCache: many layers that grow in step."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import reference
from support import cache_content, normal, refuses

import kvedge
from kvedge import KVCache, Rope, errors
from kvedge.core.formats import FORMATS

L, H, D = 3, 2, 8


def new_cache(dtype, **options):
    return KVCache(L, H, D, dtype=dtype, **options)


def step(cache, rng, n=1):
    """Append n tokens to every layer and advance; what was appended, (L, 2, n, H, D)."""
    kv = normal(rng, cache.num_layers, 2, n, cache.num_kv_heads, cache.head_dim)
    for i in range(cache.num_layers):
        cache.append(i, kv[i, 0], kv[i, 1])
    cache.advance(n)
    return kv


@pytest.fixture
def cache(dtype, rng):
    """Five tokens in a cache for at most twelve."""
    cache = new_cache(dtype, max_seq_len=12)
    step(cache, rng, 5)
    return cache


# -- construction and facts ----------------------------------------------------------------------


def test_a_new_cache_is_empty(dtype):
    cache = new_cache(dtype)
    assert len(cache) == 0 and cache.is_empty
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (L, H, D)
    assert cache.entry_size == H * D and cache.dtype == dtype
    assert cache.max_seq_len is None
    assert cache.k(0).shape == cache.v(0).shape == (0, H, D)


def test_with_capacity_reserves_for_so_many_tokens(dtype, rng):
    cache = KVCache.with_capacity(L, H, D, 4, dtype=dtype)
    assert cache.capacity == 4 and cache.max_seq_len == 4
    step(cache, rng, 4)
    one = normal(rng, H, D)
    with refuses(errors.CapacityExceededError, cache, match="4"):
        cache.append(0, one, one)


def test_layers_have_the_type_of_their_storage(cache, dtype):
    name = {"int8": "quantized"}.get(dtype, dtype.replace("_", "")) + "kvlayer"
    expected = next(getattr(kvedge, each) for each in kvedge.__all__ if each.lower() == name)
    for i in range(L):
        assert isinstance(cache.layer(i), expected)
        assert cache.layer(i) is cache.layer(i)


def test_sizes_are_the_sum_over_layers(cache, dtype):
    layers = [cache.layer(i) for i in range(L)]
    for fact in ("memory_bytes", "resident_bytes", "fp32_memory_bytes"):
        assert getattr(cache, fact) == sum(getattr(layer, fact) for layer in layers)
    assert cache.fp32_memory_bytes == L * 2 * 12 * H * D * 4
    ratio = cache.fp32_memory_bytes / cache.memory_bytes
    assert cache.compression_ratio == pytest.approx(ratio)
    form = FORMATS[dtype]
    per_token = 2 * H * (D * form.bits // 8 + (4 if form.has_scales else 0))
    assert cache.used_bytes == L * 5 * per_token


def test_repr_names_the_class_and_its_size(cache, dtype):
    text = repr(cache)
    for word in ("KVCache", str(L), str(H), str(D), dtype, "5", "12"):
        assert word in text


FACTS = [
    "capacity",
    "compression_ratio",
    "dtype",
    "entry_size",
    "fp32_memory_bytes",
    "head_dim",
    "is_empty",
    "max_seq_len",
    "memory_bytes",
    "num_kv_heads",
    "num_layers",
    "resident_bytes",
    "used_bytes",
]


def test_facts_are_read_only(cache):
    for name in FACTS:
        with pytest.raises(AttributeError):
            setattr(cache, name, getattr(cache, name))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "max_seq_len"])
@pytest.mark.parametrize("bad", [0, -1, 2**62, 2**200, 1.5, "3", True])
def test_bad_dimensions_are_refused(dtype, name, bad):
    good = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 4}
    with refuses((errors.InvalidArgumentError, errors.DtypeMismatchError), match=name):
        KVCache(**{**good, name: bad}, dtype=dtype)


@pytest.mark.parametrize("bad", ["int5", "float64", None, 8, np.float64])
def test_unknown_dtypes_are_refused(bad):
    with refuses(errors.InvalidArgumentError, match="dtype"):
        KVCache(2, 2, 8, dtype=bad)


# -- append and advance --------------------------------------------------------------------------


def test_appended_tokens_can_be_attended_to_at_once(cache, rng):
    keys, values = normal(rng, 2, H, D)
    cache.append(1, keys, values)
    assert len(cache) == 5 and len(cache.layer(1)) == 6 and len(cache.layer(0)) == 5
    assert cache.k(1).shape == (6, H, D) and cache.k(0).shape == (5, H, D)
    query = normal(rng, 2 * H, D)
    ref, _ = reference.attention(query, cache.k(1), cache.v(1))
    np.testing.assert_allclose(cache.attend(1, query), ref, rtol=0, atol=2e-4)


def test_append_takes_one_token_flat_or_shaped_or_many(dtype, rng):
    keys, values = normal(rng, 2, 4, H, D)
    cache, straight = new_cache(dtype), new_cache(dtype)
    cache.append(0, keys[0], values[0])
    cache.append(0, keys[1].reshape(-1), values[1].reshape(-1))
    cache.append(0, keys[2:], values[2:])
    cache.append(0, keys[:0], values[:0])
    straight.append(0, keys, values)
    assert cache_content(cache) == cache_content(straight)


def test_advance_needs_the_tokens_in_every_layer(cache, rng):
    one = normal(rng, H, D)
    cache.append(1, one, one)
    with refuses(errors.LayersOutOfStepError, cache, match=["0", "2"]):
        cache.advance()
    cache.append(0, one, one)
    cache.append(2, one, one)
    with refuses(errors.LayersOutOfStepError, cache):
        cache.advance(2)
    cache.advance()
    assert len(cache) == 6
    with refuses(errors.LayersOutOfStepError, cache):
        cache.advance()


def test_advance_by_some_of_the_tokens_leaves_the_rest_pending(cache, rng):
    many = normal(rng, 3, H, D)
    for i in range(L):
        cache.append(i, many, many)
    cache.advance(2)
    assert len(cache) == 7 and len(cache.layer(0)) == 8
    cache.advance()
    assert len(cache) == 8


@pytest.mark.parametrize("bad", [-1, 1.5, "1", None, 2**70])
def test_bad_advances_are_refused(cache, bad):
    before = cache_content(cache)
    with pytest.raises((errors.KvedgeError, TypeError)):
        cache.advance(bad)
    assert cache_content(cache) == before


def test_push_step_is_append_to_each_then_advance(dtype, rng):
    kv = normal(rng, 4, 2, L, H, D)
    cache, straight = new_cache(dtype), new_cache(dtype)
    for keys, values in kv:
        cache.push_step(keys, values)
        for i in range(L):
            straight.append(i, keys[i], values[i])
        straight.advance()
    assert len(cache) == 4
    assert cache_content(cache) == cache_content(straight)


def test_push_step_is_all_or_nothing_over_all_layers(cache, rng):
    good = normal(rng, L, H, D)
    for at in ((0, 0, 0), (L - 1, H - 1, D - 1)):
        for number in (np.nan, np.inf):
            bad = good.copy()
            bad[at] = number
            with refuses(errors.NonFiniteInputError, cache, match="keys"):
                cache.push_step(bad, good)
            with refuses(errors.NonFiniteInputError, cache, match="values"):
                cache.push_step(good, bad)
    for shape in ((L + 1, H, D), (L, H, D + 1), (L, D, H), (H, D), (L, H * D + 1)):
        with refuses(errors.ShapeMismatchError, cache):
            cache.push_step(np.zeros(shape, np.float32), good)
        with refuses(errors.ShapeMismatchError, cache):
            cache.push_step(good, np.zeros(shape, np.float32))
    with refuses(errors.DtypeMismatchError, cache):
        cache.push_step(good.astype(np.float64), good)
    with refuses(errors.LayoutError, cache):
        cache.push_step(np.asfortranarray(good), good)
    for _ in range(7):
        cache.push_step(good, good)
    with refuses(errors.CapacityExceededError, cache):
        cache.push_step(good, good)


def test_append_of_bad_input_changes_nothing(cache, rng):
    good = normal(rng, 3, H, D)
    bad = good.copy()
    bad[2, 1, 7] = np.nan
    with refuses(errors.NonFiniteInputError, cache, match="values"):
        cache.append(0, good, bad)
    with refuses(errors.ShapeMismatchError, cache):
        cache.append(0, good[:, :1].copy(), good)
    with refuses(errors.DtypeMismatchError, cache):
        cache.append(0, good.tolist(), good)
    too_many = np.zeros((8, H, D), np.float32)
    with refuses(errors.CapacityExceededError, cache):
        cache.append(0, too_many, too_many)


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad", [-1, L, 100, 2**40, 2**70, -(2**63)])
def test_layers_out_of_range_are_refused(cache, bad, rng):
    one = normal(rng, H, D)
    for call in (
        lambda: cache.append(bad, one, one),
        lambda: cache.layer(bad),
        lambda: cache.k(bad),
        lambda: cache.v(bad),
        lambda: cache.attend(bad, one),
    ):
        with refuses(errors.LayerOutOfRangeError, cache, match=[str(bad), str(L)]):
            call()
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("bad", [0.0, "0", None, [0]])
def test_layers_that_are_no_integers_are_refused(cache, bad):
    with pytest.raises((errors.KvedgeError, TypeError)):
        cache.layer(bad)


def test_a_layer_cannot_be_changed_behind_the_back_of_its_cache(cache, rng):
    layer = cache.layer(1)
    one = normal(rng, H, D)
    for change in (
        lambda: layer.push(one, one),
        lambda: layer.extend(one[None], one[None]),
        lambda: layer.truncate(2),
        layer.clear,
        lambda: layer.keep([0]),
        lambda: layer.shift(1, rope=Rope()),
        lambda: layer.drop_first(1),
        lambda: layer.reserve(1),
    ):
        with refuses(errors.ReadOnlyLayerError, cache):
            change()


# -- growth --------------------------------------------------------------------------------------


def test_a_cache_without_max_seq_len_grows(dtype, rng):
    cache, straight = new_cache(dtype), new_cache(dtype, max_seq_len=1200)
    layers = [cache.layer(i) for i in range(L)]
    for n in (1, 254, 1, 1, 700, 243):  # across every doubling from 256
        kv = normal(rng, L, 2, n, H, D)
        for each in (cache, straight):
            for i in range(L):
                each.append(i, kv[i, 0], kv[i, 1])
            each.advance(n)
        assert cache.capacity >= len(cache) and cache.max_seq_len is None
        assert [len(layer) for layer in layers] == [len(cache)] * L
    assert cache_content(cache) == cache_content(straight)
    assert [cache.layer(i) for i in range(L)] == layers
    query = normal(rng, 2 * H, D)
    np.testing.assert_array_equal(cache.attend(2, query), straight.attend(2, query))


def test_views_taken_before_growth_stay_as_they_were(dtype, rng):
    cache = new_cache(dtype)
    step(cache, rng, 200)
    views = [cache.layer(i).key_codes for i in range(L)] + [cache.layer(0).value_scales]
    if FORMATS[dtype].is_float32:
        views.append(cache.v(1))
    before = [view.copy() for view in views]
    step(cache, rng, 5000)
    gc.collect()
    for view, copied in zip(views, before, strict=True):
        np.testing.assert_array_equal(view, copied)
    for i in range(L):
        np.testing.assert_array_equal(cache.layer(i).key_codes[:200], before[i])


GROWTH_WITHOUT_MEMORY = """
import resource, sys
import numpy as np
from kvedge import KVCache, OutOfMemoryError

cache = KVCache(4, 8, 64, dtype=sys.argv[1])
rows = np.ones((100, 8, 64), np.float32)
for layer in range(4):
    cache.append(layer, rows, rows)
cache.advance(100)
before = [cache.k(layer).tobytes() for layer in range(4)]
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
steps = 0
try:
    while steps < 10**6:
        for layer in range(4):
            cache.append(layer, rows, rows)
        cache.advance(100)
        steps += 1
except OutOfMemoryError as error:
    assert "bytes" in str(error), error
else:
    sys.exit("it grew for ever")
cache.truncate(100)
assert [cache.k(layer).tobytes() for layer in range(4)] == before
cache.push_step(np.ones((4, 8, 64), np.float32), np.ones((4, 8, 64), np.float32))
assert len(cache) == 101
"""


@pytest.mark.subprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_growth_to_what_the_system_does_not_have_changes_nothing(dtype):
    done = subprocess.run(
        [sys.executable, "-c", GROWTH_WITHOUT_MEMORY, dtype],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


# -- k and v -------------------------------------------------------------------------------------


def test_k_and_v_are_zero_copy_views_of_float32(rng):
    cache = new_cache("float32", max_seq_len=12)
    kv = step(cache, rng, 5)
    for get, which in ((cache.k, 0), (cache.v, 1)):
        view = get(1)
        assert not view.flags.writeable and np.shares_memory(view, get(1))
        np.testing.assert_array_equal(view, kv[1, which])
        with pytest.raises(ValueError):
            view[0] = 0
    view = cache.k(0)
    del cache
    gc.collect()
    np.testing.assert_array_equal(view, kv[0, 0])


def test_attend_is_attend_of_the_layer(cache, rng):
    query = normal(rng, 3, 2 * H, D)
    for options in ({}, {"window": 2, "sink_tokens": 1}, {"softcap": 3.0}):
        mine = cache.attend(2, query, return_lse=True, **options)
        theirs = cache.layer(2).attend(query, return_lse=True, **options)
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])
    out = np.empty_like(query)
    assert cache.attend(0, query, out=out) is out


# -- key_offset ----------------------------------------------------------------------------------


def test_each_layer_has_its_own_automatic_offset(rng):
    cache = new_cache("int8", key_offset="auto")
    kv = step(cache, rng, 4)
    step(cache, rng, 2)
    for i in range(L):
        np.testing.assert_array_equal(
            cache.layer(i).key_offset, reference.automatic_key_offset(kv[i, 0])
        )


def test_offsets_can_be_given_for_each_layer(rng):
    offset = normal(rng, L, H, D)
    cache = new_cache("int8", key_offset=offset)
    kv = step(cache, rng, 4)
    for i in range(L):
        np.testing.assert_array_equal(cache.layer(i).key_offset, offset[i])
        codes, _ = reference.quantize(kv[i, 0] - offset[i])
        np.testing.assert_array_equal(cache.layer(i).key_codes, codes)
    for bad in (offset[0], offset[:-1], offset.astype(np.float64), offset * np.nan, "mean"):
        with refuses(errors.KvedgeError, match="key_offset"):
            new_cache("int8", key_offset=bad)


# -- editing -------------------------------------------------------------------------------------


def test_truncate_takes_tokens_back_in_every_layer_and_drops_pending_ones(cache, rng):
    one = normal(rng, H, D)
    rows = [np.array(cache.layer(i).key_codes) for i in range(L)]
    cache.append(0, one, one)
    cache.truncate(5)
    assert len(cache) == 5 and len(cache.layer(0)) == 5
    cache.append(2, one, one)
    cache.truncate(3)
    assert len(cache) == 3
    for i in range(L):
        np.testing.assert_array_equal(cache.layer(i).key_codes, rows[i][:3])
    for bad in (-1, 4, 2**70):
        with refuses((errors.PositionOutOfRangeError, errors.InvalidArgumentError), cache):
            cache.truncate(bad)


def test_pending_tokens_cannot_be_kept_by_truncate(cache, rng):
    one = normal(rng, H, D)
    cache.append(0, one, one)
    with refuses((errors.PositionOutOfRangeError, errors.InvalidArgumentError), cache):
        cache.truncate(6)


def test_clear_empties_every_layer(cache, rng):
    cache.append(0, *normal(rng, 2, H, D))
    cache.clear()
    assert cache.is_empty and len(cache) == 0
    assert all(cache.layer(i).is_empty for i in range(L))
    step(cache, rng, 12)


def test_keep_drops_tokens_in_every_layer(cache):
    rows = [np.array(cache.layer(i).value_codes) for i in range(L)]
    for bad in ([2, 1], [5], [0, 0], np.ones(6, bool)):
        with refuses(errors.KvedgeError, cache):
            cache.keep(bad)
    cache.keep([0, 3, 4])
    assert len(cache) == 3
    for i in range(L):
        np.testing.assert_array_equal(cache.layer(i).value_codes, rows[i][[0, 3, 4]])


def test_shift_turns_each_layer_by_a_rope_of_its_own(cache):
    ropes = [Rope(base=100.0), None, *[Rope()] * (cache.num_layers - 2)][: cache.num_layers]
    twins = [cache.layer(i).copy() for i in range(cache.num_layers)]
    cache.shift(-2, rope=ropes, start=1)
    for i, (twin, rope) in enumerate(zip(twins, ropes, strict=True)):
        if rope is not None:
            twin.shift(-2, rope=rope, start=1)
        assert np.array_equal(cache.layer(i).keys(), twin.keys())
    with pytest.raises(kvedge.InvalidArgumentError, match="one for each"):
        cache.shift(-2, rope=[Rope()] * (cache.num_layers + 1))
    with pytest.raises(kvedge.KvedgeError):
        cache.shift(-2, rope=None)


def test_shift_is_all_or_nothing_over_all_layers(rng):
    cache = KVCache(2, 1, 2, scale_dtype="float16")
    good, bad = normal(rng, 2, 3, 1, 2)
    bad[2] = 127 * 65000.0
    cache.append(0, good, good)
    cache.append(1, bad, bad)
    cache.advance(3)
    with refuses(errors.ScaleRangeError, cache):
        cache.shift(1, rope=Rope(inv_freq=np.array([np.pi / 4])))
