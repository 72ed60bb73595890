"""Values of another width than keys (value_head_dim): every promise of a layer, cache and pool."""

import numpy as np
import pytest
import reference
from support import (
    assert_attention_close,
    assert_lse_close,
    cache_content,
    content,
    filled,
    normal,
    refuses,
    stored,
)

from kvedge import KvBlockPool, KVCache, PagedKvCache, Rope, errors
from kvedge.core.formats import FORMATS

#: (head_dim, value_head_dim): the two forms of DeepSeek, ends of the range, tails of every kernel.
WIDTHS = [(1, 7), (192, 128), (576, 512), (40, 96), (1024, 1), (3, 1024), (128, 64), (64, 128)]


@pytest.fixture(params=WIDTHS, ids=lambda widths: f"D{widths[0]}-V{widths[1]}")
def widths(request):
    return request.param


def options_of(name, widths):
    """Every way to store rows in a format: without groups, in groups, with float16 scales."""
    if not FORMATS[name].has_scales:
        return [{}]
    return [
        {},
        {"group_size": min(24, max(widths)), "key_offset": "auto"},
        {"group_size": min(64, max(widths)), "scale_dtype": "float16"},
    ]


def narrowed(options, width):
    """The group_size of rows that may be narrower than it."""
    return {"group_size": min(options["group_size"], width)} if "group_size" in options else {}


def check(attend, layer, query, **options):
    """`attend` gives what the reference makes of the bytes in `layer`."""
    ref, ref_lse = reference.attention(query, *stored(layer), **options)
    out, lse = attend(query, return_lse=True, **options)
    assert_attention_close(out, ref)
    assert_lse_close(lse, ref_lse)
    given = np.full_like(out, np.nan)
    assert attend(query, out=given, **options) is given
    np.testing.assert_array_equal(given, out)


# ---- one layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_attention_is_that_of_the_reference(layer_class, widths, heads, rng):
    head_dim, value_head_dim = widths
    for options in options_of(layer_class._dtype, widths):
        layer = filled(
            layer_class, rng, 300, heads, head_dim, value_head_dim=value_head_dim, **options
        )
        for group in (1, 4):
            check(layer.attend, layer, normal(rng, heads * group, head_dim))
            check(layer.attend, layer, normal(rng, 18, heads * group, head_dim))


def test_the_default_scale_is_that_of_keys(layer_class, rng):
    layer = filled(layer_class, rng, 20, 2, 16, value_head_dim=100)
    query = normal(rng, 4, 16)
    np.testing.assert_array_equal(layer.attend(query), layer.attend(query, scale=16**-0.5))
    np.testing.assert_array_equal(layer.scores(query), layer.scores(query, scale=16**-0.5))
    assert layer.scores(query).shape == (4, 20)


@pytest.mark.covering(1)
def test_each_side_is_stored_as_in_a_layer_of_its_width(layer_class, widths, rng):
    head_dim, value_head_dim = widths
    for options in options_of(layer_class._dtype, widths):
        layer = layer_class(9, 2, head_dim, value_head_dim=value_head_dim, **options)
        keys, values = normal(rng, 9, 2, head_dim), normal(rng, 9, 2, value_head_dim)
        layer.extend(keys[:4], values[:4])
        for key, value in zip(keys[4:], values[4:], strict=True):
            layer.push(key, value)
        of_keys, of_values = (
            layer_class(9, 2, width, **options | narrowed(options, width)) for width in widths
        )
        for one, other in ((of_keys, keys), (of_values, values)):
            one.extend(other[:4], other[:4])
            one.extend(other[4:], other[4:])
        assert layer.key_codes.tobytes() == of_keys.key_codes.tobytes()
        assert layer.key_scales.tobytes() == of_keys.key_scales.tobytes()
        assert layer.value_codes.tobytes() == of_values.value_codes.tobytes()
        assert layer.value_scales.tobytes() == of_values.value_scales.tobytes()
        assert layer.value_scales.shape == of_values.value_scales.shape
        np.testing.assert_array_equal(layer.keys(), of_keys.keys())
        np.testing.assert_array_equal(layer.values(), of_values.values())
        assert layer.memory_bytes == (of_keys.memory_bytes + of_values.memory_bytes) / 2
        assert layer.fp32_memory_bytes == 9 * 2 * (head_dim + value_head_dim) * 4
        assert layer.compression_ratio == layer.fp32_memory_bytes / layer.memory_bytes


@pytest.mark.covering(1)
def test_getters_give_rows_of_their_width(layer_class, widths, rng):
    head_dim, value_head_dim = widths
    layer = filled(layer_class, rng, 5, 3, head_dim, value_head_dim=value_head_dim)
    assert (layer.head_dim, layer.value_head_dim) == widths
    assert layer.entry_size == 3 * head_dim
    assert f"value_head_dim={value_head_dim}" in repr(layer)
    keys, values = layer.keys(), layer.values()
    assert keys.shape == (5, 3, head_dim) and values.shape == (5, 3, value_head_dim)
    np.testing.assert_array_equal(layer.get_key(4, 2), keys[4, 2])
    np.testing.assert_array_equal(layer.get_value(4, 2), values[4, 2])
    np.testing.assert_array_equal(layer.get_keys_at(3), keys[3].ravel())
    np.testing.assert_array_equal(layer.get_values_at(3), values[3].ravel())
    out = np.empty((5, 3, value_head_dim), np.float32)
    assert layer.values(out=out) is out
    with pytest.raises(errors.ShapeMismatchError, match=f"{value_head_dim}"):
        layer.get_value(0, 0, out=np.empty(value_head_dim + 1, np.float32))


def test_without_a_width_values_are_as_wide_as_keys(layer_class, rng):
    layer = layer_class(4, 2, 24)
    assert layer.value_head_dim == 24 and "value_head_dim" not in repr(layer)
    same = layer_class(4, 2, 24, value_head_dim=24)
    kv = normal(rng, 2, 4, 2, 24)
    layer.extend(*kv)
    same.extend(*kv)
    assert content(layer) == content(same)


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", [0, -1, 1025, True, 1.5, "64"])
def test_a_width_out_of_range_is_refused(layer_class, width):
    for make in (
        lambda: layer_class(4, 2, 24, value_head_dim=width),
        lambda: KVCache(1, 2, 24, value_head_dim=width, dtype=layer_class._dtype),
        lambda: KvBlockPool(1, 4, 1, 2, 24, value_head_dim=width, dtype=layer_class._dtype),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="value_head_dim"):
            make()


def test_rows_of_the_other_side_are_refused_and_the_error_says_which_width(layer_class, rng):
    layer = filled(layer_class, rng, 3, 2, 40, capacity=9, value_head_dim=24)
    one, key, value = normal(rng, 2, 40), normal(rng, 5, 2, 40), normal(rng, 5, 2, 24)
    with refuses(
        errors.ShapeMismatchError, layer, ["values", "(2, 24)", "(2, 40)", "value_head_dim is 24"]
    ):
        layer.push(one, one)
    with refuses(errors.ShapeMismatchError, layer, ["values", "(n, 2, 24)", "(5, 2, 40)"]):
        layer.extend(key, key)
    with refuses(errors.ShapeMismatchError, layer, ["keys", "(n, 2, 40)", "(5, 2, 24)"]):
        layer.extend(value, value)
    with refuses(errors.ShapeMismatchError, layer, ["query", "40", "24"]):
        layer.attend(normal(rng, 2, 24))
    for shape in ((2, 40), (2, 25), (1, 2, 24)):
        with refuses(errors.ShapeMismatchError, layer, ["out", "(2, 24)"]):
            layer.attend(one, out=np.empty(shape, np.float32))
    bad = value.copy()
    bad[4, 1, 23] = np.nan
    with refuses(errors.NonFiniteInputError, layer, ["values", "(4, 1, 23)"]):
        layer.extend(key, bad)


def test_an_out_over_what_is_read_is_refused(layer_class, rng):
    layer = filled(layer_class, rng, 30, 2, 16, value_head_dim=48)
    room = normal(rng, 2 * 16 + 2 * 48)
    query = room[:32].reshape(2, 16)
    apart = room[32:].reshape(2, 48)
    ref, _ = reference.attention(query, *stored(layer))
    assert_attention_close(layer.attend(query, out=apart), ref)
    with pytest.raises(errors.LayoutError, match="overlaps"):
        layer.attend(query, out=room[31 : 31 + 96].reshape(2, 48))
    wide = filled(layer_class, rng, 30, 2, 48, value_head_dim=16)
    query = room[:96].reshape(2, 48)
    with pytest.raises(errors.LayoutError, match="overlaps"):
        wide.attend(query, out=room[80:112].reshape(2, 16))


# ---- a cache -------------------------------------------------------------------------------------


def filled_cache(rng, dtype, tokens=12, **options):
    """Two layers of 2 KV heads, keys 40 wide, values 24."""
    cache = KVCache(2, 2, 40, value_head_dim=24, dtype=dtype, **options)
    for layer in range(2):
        cache.append(layer, normal(rng, tokens, 2, 40), normal(rng, tokens, 2, 24))
    cache.advance(tokens)
    return cache


def test_a_cache_grows_goes_back_and_attends(dtype, rng):
    cache = filled_cache(rng, dtype)
    assert cache.value_head_dim == 24 and "40/24" in repr(cache)
    mark, kept = cache.snapshot(), cache.snapshot().detach()
    before = cache_content(cache)
    for _ in range(300):  # beyond the first reservation
        cache.push_step(normal(rng, 2, 2, 40), normal(rng, 2, 2, 24))
    check(lambda *a, **o: cache.attend(1, *a, **o), cache.layer(1), normal(rng, 4, 40))
    assert cache.v(0).shape == (312, 2, 24) and cache.k(0).shape == (312, 2, 40)
    assert cache.fp32_memory_bytes == 4 * 2 * 2 * (40 + 24) * cache.capacity
    assert cache.used_bytes == 312 * cache.memory_bytes // cache.capacity
    cache.restore(mark)
    assert cache_content(cache) == before
    for wrong in (KVCache(2, 2, 40, dtype=dtype), KVCache(2, 2, 24, dtype=dtype)):
        with refuses(errors.ShapeMismatchError, wrong, "40/24"):
            wrong.restore(kept)
    with refuses(errors.ShapeMismatchError, cache, ["values", "(2, 2, 24)"]):
        cache.push_step(normal(rng, 2, 2, 40), normal(rng, 2, 2, 40))
    cache.shift(4, rope=Rope())
    cache.keep([1, 5])
    assert len(cache) == 2


# ---- sequences in a pool -------------------------------------------------------------------------


def filled_pool(rng, dtype, lengths, widths=(40, 24), block_size=4):
    """A cache with one sequence for each length, and what it holds: (keys, values)."""
    head_dim, value_head_dim = widths
    blocks = sum(-(-n // block_size) for n in lengths) + 4
    pool = KvBlockPool(
        blocks, block_size, 1, 2, head_dim, dtype=dtype, value_head_dim=value_head_dim
    )
    cache = PagedKvCache(pool)
    for n in lengths:
        seq = cache.new_sequence()
        cache.append(seq, 0, normal(rng, n, 2, head_dim), normal(rng, n, 2, value_head_dim))
        cache.advance(seq, n)
    return cache


def test_a_beginning_that_is_read_once_for_all_gives_the_same(dtype, rng):
    cache = filled_pool(rng, dtype, (2500,), block_size=16)
    seqs = [cache.sequences[0]]
    for _ in range(3):
        seqs.append(cache.fork(seqs[0]))
        cache.append(seqs[-1], 0, normal(rng, 3, 2, 40), normal(rng, 3, 2, 24))
        cache.advance(seqs[-1], 3)
    queries = normal(rng, 4, 4, 40)
    outs, lses = cache.attend_batch(seqs, 0, queries, return_lse=True)
    assert outs.shape == (4, 4, 24)
    for seq, query, out, lse in zip(seqs, queries, outs, lses, strict=True):
        ref, ref_lse = reference.attention(query, *stored(cache.to_kv_cache(seq).layer(0)))
        assert_attention_close(out, ref)
        assert_lse_close(lse, ref_lse)


def test_a_pool_copies_caches_of_its_widths_alone(dtype, rng):
    pool_cache = filled_pool(rng, dtype, (9,))
    cache = KVCache(1, 2, 40, value_head_dim=24, dtype=dtype)
    cache.append(0, normal(rng, 9, 2, 40), normal(rng, 9, 2, 24))
    cache.advance(9)
    seq = pool_cache.from_kv_cache(cache)
    with pytest.raises(errors.ShapeMismatchError, match="40/24"):
        pool_cache.from_kv_cache(KVCache(1, 2, 40, dtype=dtype))
    with pytest.raises(errors.ShapeMismatchError, match="value_head_dim is 24"):
        pool_cache.append(seq, 0, normal(rng, 2, 40), normal(rng, 2, 40))
    pool = pool_cache.pool
    codes = 12 if dtype == "int4" else 24
    assert pool.value_codes(0).shape[-2:] == (2, codes) and "40/24" in repr(pool)
    assert pool.fp32_memory_bytes == len(pool) * 4 * 2 * (40 + 24) * 4
