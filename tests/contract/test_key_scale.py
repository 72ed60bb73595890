"""key_scale: keys stored over a factor per KV head and channel, queries multiplied by it."""

import numpy as np
import pytest
import reference
from support import assert_attention_close, assert_lse_close, normal, refuses

import kvedge
from kvedge import KvBlockPool, KVCache, PagedKvCache, QuantizedKvLayer, Rope, errors
from kvedge.core.formats import FORMATS
from kvedge.core.key_map import LEAST_TOKENS
from kvedge.core.registry import layer_types

HEADS, KV_HEADS, D = 4, 2, 40
SMALL = [name for name, form in FORMATS.items() if form.bits <= 8]  # that "auto" is for
BIAS = 100.0


def biased(rng, n, channels=(3, 3 + D // 2)):
    """Keys (n, KV_HEADS, D) of which some channels are as large as Qwen2.5's."""
    keys = normal(rng, n, KV_HEADS, D)
    keys[:, :, list(channels)] *= BIAS
    return keys


def scales(rng):
    return np.exp2(rng.uniform(-2.5, 2.5, (KV_HEADS, D))).astype(np.float32)


def assert_attends(layer, rng, n=3, **options):
    query = normal(rng, n, HEADS, D)
    out, lse = layer.attend(query, return_lse=True, **options)
    options.pop("precision_bits", None)
    ref, ref_lse = reference.attention(query, layer.keys(), layer.values(), **options)
    assert_attention_close(out, ref)
    assert_lse_close(lse, ref_lse)


def error(layer, keys):
    """Largest difference of stored keys in the channels that are not large."""
    return np.abs(layer.keys() - keys)[:, :, 4 : 3 + D // 2].max()


# ---- given --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 20, "sink_tokens": 2},
        {"softcap": 3.0},
        {"alibi_slopes": np.linspace(0.1, 0.4, HEADS, dtype=np.float32)},
        {"precision_bits": 24},
        {"causal": False},
        {"start": 7},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_attention_is_that_of_the_keys_read_back(layer_class, options, rng):
    layer = layer_class(80, KV_HEADS, D, key_scale=scales(rng))
    layer.extend(*normal(rng, 2, 80, KV_HEADS, D))
    assert_attends(layer, rng, **options)
    query = normal(rng, HEADS, D)
    logits = layer.scores(query, scale=0.2)
    keys = layer.keys().repeat(HEADS // KV_HEADS, axis=1)
    expected = 0.2 * np.einsum("hd,thd->ht", query.astype(np.float64), keys)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_what_is_stored_is_the_key_over_the_scale(layer_class, rng):
    scale, keys = scales(rng), normal(rng, 9, KV_HEADS, D)
    layer = layer_class(9, KV_HEADS, D, key_scale=scale)
    plain = layer_class(9, KV_HEADS, D)
    layer.extend(keys, keys)
    plain.extend(keys / scale, keys)
    np.testing.assert_array_equal(layer.key_codes, plain.key_codes)
    np.testing.assert_array_equal(layer.key_scales, plain.key_scales)
    np.testing.assert_array_equal(layer.keys(), plain.keys() * scale)
    np.testing.assert_array_equal(layer.key_scale, scale)
    assert not layer.key_scale.flags.writeable
    layer.clear()
    np.testing.assert_array_equal(layer.key_scale, scale)


def test_offset_and_scale_go_together(rng):
    scale, offset = scales(rng), 10 * normal(rng, KV_HEADS, D)
    keys, values = normal(rng, 2, 60, KV_HEADS, D)
    keys += offset
    layer = QuantizedKvLayer(60, KV_HEADS, D, key_offset=offset, key_scale=scale)
    layer.extend(keys, values)
    plain = QuantizedKvLayer(60, KV_HEADS, D)
    plain.extend((keys - offset) / scale, values)
    np.testing.assert_array_equal(layer.key_codes, plain.key_codes)
    assert_attends(layer, rng, softcap=5.0)


def test_layers_of_a_batch_have_their_own(rng):
    kinds = layer_types
    layers = [
        kinds[dtype](70, KV_HEADS, D, key_scale=scales(rng) if i % 3 else None)
        for i, dtype in enumerate([*FORMATS, *FORMATS])
    ]
    kvedge.append_batch(layers, *normal(rng, 2, len(layers), 70, KV_HEADS, D))
    query = normal(rng, len(layers), 2, HEADS, D)
    out = kvedge.attend_batch(layers, query)
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(out[i], layer.attend(query[i]))


def test_wrong_ones_are_refused(layer_class, rng):
    good = scales(rng)
    for wrong, error_class in (
        (good[:, :-1], errors.ShapeMismatchError),
        (good * 0, errors.InvalidArgumentError),
        (-good, errors.InvalidArgumentError),
        (good * np.nan, errors.NonFiniteInputError),
        (good * np.inf, errors.NonFiniteInputError),
        (good.astype(int), errors.DtypeMismatchError),
        ("aut", errors.InvalidArgumentError),
    ):
        with np.errstate(all="ignore"), pytest.raises(error_class, match="key_scale"):
            layer_class(9, KV_HEADS, D, key_scale=wrong)


def test_keys_that_it_takes_beyond_float32_are_refused(layer_class, rng):
    layer = layer_class(9, KV_HEADS, D, key_scale=np.full((KV_HEADS, D), 1e-38, np.float32))
    layer.push(*np.zeros((2, KV_HEADS, D), np.float32))
    keys = np.full((KV_HEADS, D), 100, np.float32)
    with refuses(errors.NonFiniteInputError, layer, match="keys over key_scale"):
        layer.push(keys, keys)


# ---- automatic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [name for name in FORMATS if name not in SMALL])
def test_wide_formats_take_no_automatic_one(dtype, rng):
    layer = layer_types[dtype](40, KV_HEADS, D, key_scale="auto")
    layer.extend(*normal(rng, 2, 40, KV_HEADS, D))
    assert layer.key_scale is None
    cache = KVCache(1, KV_HEADS, D, dtype=dtype, key_scale="auto")
    cache.append(0, *normal(rng, 2, 20, KV_HEADS, D))
    cache.advance(20)
    assert cache.key_scale is None


def test_large_channels_cost_the_others_nothing(rng):
    keys, values = biased(rng, 200), normal(rng, 200, KV_HEADS, D)
    plain = QuantizedKvLayer(200, KV_HEADS, D)
    scaled = QuantizedKvLayer(200, KV_HEADS, D, key_scale="auto")
    for layer in (plain, scaled):
        layer.extend(keys, values)
    assert error(scaled, keys) < 0.05 < 0.5 < error(plain, keys)
    scale = scaled.key_scale
    assert scale.min() == 1 and scale[:, 3].min() > BIAS / 4


@pytest.mark.parametrize("dtype", [name for name in SMALL if name.startswith("fp8")])
def test_large_channels_do_not_leave_the_range_of_fp8(dtype, rng):
    keys = biased(rng, 40)
    keys[:, :, 3] = np.where(keys[:, :, 3] < 0, -1e5, 1e5)
    layer = kvedge.Fp8KvLayer(40, KV_HEADS, D, dtype=dtype, key_scale="auto")
    layer.extend(keys, keys)
    np.testing.assert_allclose(layer.keys()[:, :, 3], keys[:, :, 3], rtol=0.13)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_channel_that_its_pair_turns_into_later_is_scaled_too(interleaved, rng):
    keys = normal(rng, 400, KV_HEADS, D)
    partner = 3 ^ 1 if interleaved else 3 + D // 2
    angle = np.arange(400)[:, np.newaxis] * 2e-3  # a slow pair: 0.1 over the first 64 tokens
    keys[:, :, 3], keys[:, :, partner] = BIAS * np.cos(angle), BIAS * np.sin(angle)
    layer = QuantizedKvLayer(400, KV_HEADS, D, key_scale="auto")
    layer.extend(keys[:64], keys[:64])
    layer.extend(keys[64:], keys[64:])
    others = [d for d in range(D) if d not in (3, partner)]
    assert np.abs(layer.keys() - keys)[:, :, others].max() < 0.1
    assert layer.key_scale[:, partner].min() >= layer.key_scale[:, 3].max() / 5


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("sizes", [(1,) * 20, (5, 3, 30), (15, 1), (16,), (100,)], ids=str)
def test_the_first_tokens_decide_and_are_encoded_anew(dtype, sizes, rng):
    total = sum(sizes)
    keys, values = biased(rng, total), normal(rng, total, KV_HEADS, D)
    layer = layer_types[dtype](None, KV_HEADS, D, key_scale="auto")
    at, scale = 0, None
    for size in sizes:
        layer.extend(keys[at : at + size], values[at : at + size])
        at += size
        if at >= LEAST_TOKENS:
            scale = layer.key_scale.copy() if scale is None else scale
            np.testing.assert_array_equal(layer.key_scale, scale)  # frozen
    assert scale[:, 3].min() > BIAS / 8
    if not FORMATS[dtype].has_scales:
        assert (np.frexp(scale)[0] == 0.5).all()  # powers of two, which change no digit
    allowed = {"int8": 0.1, "int4": 2.0}.get(dtype, 0.5)  # 16 levels, of rows up to 8 and more
    assert error(layer, keys) < allowed
    np.testing.assert_array_equal(layer.values().shape, values.shape)
    assert_attends(layer, rng, n=1)


def test_readers_keep_what_they_took_while_tokens_are_encoded_anew(rng):
    keys, values = biased(rng, 20), normal(rng, 20, KV_HEADS, D)
    layer = QuantizedKvLayer(30, KV_HEADS, D, key_scale="auto")
    layer.extend(keys[:10], values[:10])
    codes, kept = layer.key_codes, layer.key_codes.copy()
    layer.extend(keys[10:], values[10:])
    np.testing.assert_array_equal(codes, kept)


def test_a_refused_append_decides_nothing(rng):
    keys, values = biased(rng, 30), normal(rng, 30, KV_HEADS, D)
    layer = QuantizedKvLayer(20, KV_HEADS, D, key_scale="auto", key_offset="auto")
    for start in (0, 6):
        with pytest.raises(errors.CapacityExceededError):
            layer.extend(keys, values)
        bad = keys[start : start + 14].copy()
        bad[-1, 0, 0] = np.nan
        before = layer.key_scale
        with refuses(errors.NonFiniteInputError, layer):
            layer.extend(bad, values[:14])
        np.testing.assert_array_equal(before, layer.key_scale)
        layer.extend(keys[start : start + 6], values[start : start + 6])
    assert len(layer) == 12
    twin = QuantizedKvLayer(20, KV_HEADS, D, key_scale="auto", key_offset="auto")
    for start in (0, 6, 12):
        twin.extend(keys[start : start + 6], values[start : start + 6])
    layer.extend(keys[12:18], values[12:18])
    np.testing.assert_array_equal(layer.keys(), twin.keys())


def test_push_step_that_one_layer_refuses_decides_nothing(rng):
    cache = KVCache(2, KV_HEADS, D, key_scale="auto", scale_dtype="float16")
    keys = normal(rng, 20, 2, KV_HEADS, D)
    for token in keys[:15]:
        cache.push_step(token, token)
    before, held = cache.key_scale, [cache.k(i) for i in range(2)]
    bad = keys[15].copy()
    bad[1] = 3e38  # too large for a float16 scale
    with pytest.raises(errors.ScaleRangeError):
        cache.push_step(keys[15], bad)
    np.testing.assert_array_equal(cache.key_scale, before)
    for i in range(2):
        np.testing.assert_array_equal(cache.k(i), held[i])
    cache.push_step(keys[15], keys[15])
    assert len(cache) == 16 and not np.array_equal(cache.key_scale, before)


def test_clearing_takes_another(rng):
    first, second = biased(rng, 40), biased(rng, 40, channels=(7, 7 + D // 2))
    layer = QuantizedKvLayer(40, KV_HEADS, D, key_scale="auto")
    layer.extend(first, first)
    layer.clear()
    assert layer.key_scale is None
    layer.extend(second, second)
    assert layer.key_scale[0, 7] > BIAS / 4 and layer.key_scale[0, 3] == 1


def test_ranges_go_to_caches_of_another_one(rng):
    keys, values = biased(rng, 70), normal(rng, 70, KV_HEADS, D)
    cache, other = KVCache(1, KV_HEADS, D, key_scale="auto"), KVCache(1, KV_HEADS, D)
    for each, part in ((cache, slice(0, 40)), (other, slice(40, 70))):
        each.append(0, keys[part], values[part])
        each.advance(len(keys[part]))
    with refuses(errors.ShapeMismatchError, match="scale"):
        cache.inject(other)
    cache.inject(other, requantize=True)
    layer = cache.layer(0)
    np.testing.assert_allclose(layer.keys()[40:], other.k(0), atol=2)
    assert error(layer, keys)[()] < 1 and len(layer) == 70
    twin = KVCache(1, KV_HEADS, D, key_scale="auto")
    twin.inject(cache.extract(0, 40))
    np.testing.assert_array_equal(twin.k(0), cache.k(0)[:40])
    np.testing.assert_array_equal(twin.key_scale, cache.key_scale)


def test_a_mark_from_before_the_first_tokens_were_encoded_anew_holds(rng):
    keys, values = biased(rng, 40), normal(rng, 40, KV_HEADS, D)
    cache = KVCache(1, KV_HEADS, D, key_scale="auto")
    cache.append(0, keys[:10], values[:10])
    cache.advance(10)
    mark = cache.snapshot()
    cache.append(0, keys[10:], values[10:])
    cache.advance(30)
    cache.restore(mark)
    assert len(cache) == 10
    assert error(cache.layer(0), keys[:10]) < 0.1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", SMALL)
def test_shift_turns_keys_whose_pairs_have_two_factors(dtype, interleaved, rng):
    layer = layer_types[dtype](40, KV_HEADS, D, key_scale=scales(rng))
    layer.extend(*normal(rng, 2, 40, KV_HEADS, D))
    rope = Rope(interleaved=interleaved)
    expected = rope.rotate(layer.keys(), -7)
    layer.shift(-7, rope=rope)
    allowed = {"int8": 0.3, "int4": 6.0}.get(dtype, 1.5)
    np.testing.assert_allclose(layer.keys(), expected, atol=allowed)
    assert_attends(layer, rng)


def test_a_window_of_fewer_tokens_than_decide(rng):
    keys, values = biased(rng, 40), normal(rng, 40, KV_HEADS, D)
    layer = QuantizedKvLayer(None, KV_HEADS, D, window=5, key_scale="auto")
    for key, value in zip(keys, values, strict=True):
        layer.push(key, value)
    assert error(layer, keys[-len(layer) :]) < 0.2
    assert layer.key_scale[:, 3].min() > BIAS / 8


# ---- pools --------------------------------------------------------------------------------------


def test_a_pool_takes_caches_of_its_own_one_alone(rng):
    scale = np.stack([scales(rng), scales(rng)])
    cache = KVCache(2, KV_HEADS, D, key_scale=scale)
    pool = KvBlockPool(20, 8, 2, KV_HEADS, D, key_scale=scale)
    np.testing.assert_array_equal(pool.key_scale, scale)
    paged = PagedKvCache(pool)
    seq = paged.from_kv_cache(cache)
    for layer in range(2):
        paged.append(seq, layer, *normal(rng, 2, 30, KV_HEADS, D))
    paged.advance(seq, 30)
    held = paged.to_kv_cache(seq)
    np.testing.assert_array_equal(paged.get_key(seq, 1, 9, 1), held.k(1)[9, 1])
    with pytest.raises(errors.InvalidArgumentError, match="key_scale"):
        PagedKvCache(KvBlockPool(9, 8, 2, KV_HEADS, D)).from_kv_cache(cache)


def test_a_pool_has_no_first_tokens():
    with pytest.raises(errors.InvalidArgumentError, match="key_scale of a pool"):
        KvBlockPool(9, 8, 2, KV_HEADS, D, key_scale="auto")


def test_going_back_among_the_first_tokens_opens_it_again(rng):
    """Whatever the layer held before, as in one that never held more."""
    first, second = biased(rng, 40), biased(rng, 40, channels=(7, 7 + D // 2))
    layer, never = (QuantizedKvLayer(80, KV_HEADS, D, key_scale="auto") for _ in range(2))
    layer.extend(first, first)
    layer.truncate(0)
    for each in (layer, never):
        each.extend(second[:3], second[:3])
    np.testing.assert_array_equal(layer.key_codes, never.key_codes)
    scale = layer.key_scale.copy()
    layer.extend(first[:12], first[:12])  # 15 tokens decide nothing yet
    np.testing.assert_array_equal(layer.key_scale, scale)
    layer.extend(first[12:], first[12:])
    scale = layer.key_scale.copy()
    layer.truncate(16)
    layer.extend(second, second)
    np.testing.assert_array_equal(layer.key_scale, scale)
    layer.truncate(5)
    layer.extend(second, second)
    assert not np.array_equal(layer.key_scale, scale)
    assert layer.key_scale[0, 7] > BIAS / 4
