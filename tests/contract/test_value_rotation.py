"""Values stored rotated: the bytes of rotated rows, and results as of the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.reference import attention

import kvedge
from kvedge.core.hadamard import rotate, rotate_float32

TOKENS, HEADS = 150, 2
DIMS = (1, 7, 40, 64, 72, 80, 96, 112, 128, 320)
FORMATS = (
    {},
    {"group_size": 32, "scale_dtype": "float16"},
    {"dtype": "kivi8", "value_dtype": "int8"},
    {"value_dtype": "kivi4"},
    {"dtype": "kivi4"},
    {"dtype": "int4", "recent": 20, "sinks": 3},
    {"value_dtype": "fp8_e4m3"},
    {"dtype": "float16"},
    {"dtype": "float32"},
)


def rows(seed, dim, tokens=TOKENS, large=20):
    """Keys and values, these with a channel so many times as large."""
    keys, values = (
        np.random.default_rng(seed).standard_normal((2, tokens, HEADS, dim)).astype(np.float32)
    )
    values[..., dim // 3] *= large
    return keys, values


def new_cache(dim, options, keys, values, rotation=True):
    if options.get("group_size", 0) > dim:
        options = {}
    cache = kvedge.KVCache(1, HEADS, dim, value_rotation=rotation, **options)
    cache.append(0, keys[:100], values[:100])
    cache.append(0, keys[100:], values[100:])
    cache.advance(len(keys))
    return cache


def is_close(got, expected):
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal_and_its_own_inverse(dim):
    matrix = rotate(np.eye(dim))
    size = dim & -dim
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-14)
    np.testing.assert_allclose(np.abs(matrix[:size, :size]), size**-0.5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_attention_is_that_of_the_values_read(dim, options):
    keys, values = rows(dim, dim, large=3)  # or errors of one channel alone would be looked at
    cache = new_cache(dim, options, keys, values)
    rows_asked = 1 if "recent" in options else 3  # each row of several has recent tokens of its own
    query = rows(9, dim, rows_asked)[0].repeat(3, axis=1)
    expected, expected_lse = attention(query, cache.k(0), cache.v(0))
    out, lse = cache.attend(0, query, return_lse=True)
    is_close(out, expected)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)
    is_close(cache.attend(0, query[-1]), expected[-1])
    half = np.empty(query.shape, np.float16)
    is_close(cache.attend(0, query, out=half), half.astype(np.float64))
    np.testing.assert_allclose(half, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "float32", "fp8_e5m2"])
def test_bytes_are_those_of_rotated_rows(dim, dtype):
    keys, values = rows(dim, dim)
    one = new_cache(dim, {"dtype": dtype}, keys, values).layer(0)
    other = new_cache(dim, {"dtype": dtype}, keys, rotate_float32(values), False).layer(0)
    assert one.value_codes.tobytes() == other.value_codes.tobytes()
    if one.value_scales is not None:
        assert one.value_scales.tobytes() == other.value_scales.tobytes()
    assert one.values().tobytes() == rotate_float32(other.values()).tobytes()
    token = np.empty((HEADS, dim), np.float32)
    one.get_values_at(7, out=token.reshape(-1))
    assert token.tobytes() == one.values()[7].tobytes()


@pytest.mark.parametrize("dim", [40, 64, 96, 128, 320])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_runs_are_those_of_rotated_tokens_as_the_last_ones_have_them(dim, bits):
    keys, values = rows(dim, dim, 128)
    options = {"dtype": f"kivi{bits}", "recent_dtype": "float32"}
    one = new_cache(dim, options, keys, values).layer(0)
    other = new_cache(dim, options, keys, rotate_float32(values), False).layer(0)
    given = rotate_float32(other.values())[:96]
    assert one.values()[:96].tobytes() == given.tobytes()


def test_a_large_channel_costs_the_others_less():
    keys, values = rows(1, 64)
    errors = []
    for rotation in (False, True):
        error = new_cache(64, {}, keys, values, rotation).v(0) - values
        errors.append(np.sqrt(np.mean(error**2)))
    assert errors[1] < 0.5 * errors[0]


def test_a_snapshot_of_rotated_values_is_for_caches_that_rotate():
    rotated, plain = (new_cache(48, {}, *rows(3, 48), rotation=each) for each in (True, False))
    with pytest.raises(kvedge.ShapeMismatchError, match="rotated"):
        plain.restore(rotated.snapshot().detach())


def test_a_file_of_an_unknown_rotation_is_refused(tmp_path):
    new_cache(48, {}, *rows(3, 48)).save(tmp_path / "cache")
    data = (tmp_path / "cache").read_bytes()
    (tmp_path / "cache").write_bytes(data.replace(b'"hadamard"', b'"hadamord"'))
    with pytest.raises(kvedge.CorruptFileError, match="value_rotation"):
        kvedge.KVCache.load(tmp_path / "cache")


def test_a_cache_of_layers_that_differ_is_stored_anew():
    cache = kvedge.KVCache(layers=[{}, {"value_rotation": True}], num_kv_heads=HEADS, head_dim=64)
    keys, values = rows(8, 64)
    for layer in range(2):
        cache.append(layer, keys, values)
    cache.advance(TOKENS)
    before = cache.v(1)
    cache.requantize("float32")
    assert cache.v(1).tobytes() == before.tobytes() and not cache.value_rotation
    cache.requantize("int8", value_rotation=True)
    np.testing.assert_allclose(cache.v(1), before, atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_huge_and_tiny_values_are_stored_or_refused(dtype):
    cache = kvedge.KVCache(1, 1, 64, dtype=dtype, value_rotation=True)
    key, value = np.ones((1, 64), np.float32), np.zeros((1, 64), np.float32)
    value[0, 5] = 3e38
    cache.append(0, key, value)
    cache.append(0, key, value * np.float32(1e-76))
    cache.advance(2)
    np.testing.assert_allclose(cache.v(0)[0], value, atol=2e36)
    assert np.isfinite(cache.attend(0, key)).all()
    for huge, name in ((np.full_like(value, 3e38), "rotated"), (np.full_like(value, np.inf), "")):
        with pytest.raises(kvedge.NonFiniteInputError, match=f"values {name}"):
            cache.append(0, key, huge)
    assert len(cache) == 2


@pytest.mark.parametrize("given", [1, "on", []])
def test_it_is_a_bool(given):
    with pytest.raises(kvedge.InvalidArgumentError, match="value_rotation must be True or False"):
        kvedge.KVCache(1, 1, 64, value_rotation=given)
