"""Keys and values in formats of their own: any pair, as each is by itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.reference import attention

import kvedge
from kvedge.core.formats import FORMATS
from kvedge.layer.layer import store_of

PAIRS = [pair for pair in itertools.product(FORMATS, FORMATS) if pair[0] != pair[1]]
TOKENS, HEADS, DIM = 70, 2, 24


def rows(seed, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, tokens, HEADS, DIM)).astype(np.float32)


def new_cache(keys, values, **options):
    cache = kvedge.KVCache(2, HEADS, DIM, dtype=keys, value_dtype=values, **options)
    for layer in range(2):
        cache.append(layer, *rows(layer))
    cache.advance(TOKENS)
    return cache


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_each_side_is_stored_as_in_a_cache_of_its_own(keys, values):
    layer = new_cache(keys, values).layer(0)
    of_keys, of_values = (new_cache(name, None).layer(0) for name in (keys, values))
    assert (layer.dtype, layer.value_dtype) == (keys, values)
    np.testing.assert_array_equal(layer.keys(), of_keys.keys())
    np.testing.assert_array_equal(layer.values(), of_values.values())
    np.testing.assert_array_equal(layer.key_codes, of_keys.key_codes)
    np.testing.assert_array_equal(layer.value_codes, of_values.value_codes)
    assert 2 * layer.memory_bytes == of_keys.memory_bytes + of_values.memory_bytes


@pytest.mark.parametrize(("keys", "values"), PAIRS)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_attention_is_that_of_what_is_stored(keys, values, num_rows):
    layer = new_cache(keys, values).layer(1)
    query = np.random.default_rng(9).standard_normal((num_rows, 3 * HEADS, DIM)).astype(np.float32)
    expected, _ = attention(query, layer.keys(), layer.values())
    np.testing.assert_allclose(layer.attend(query), expected, atol=2e-4 * np.abs(expected).max())


def test_shift_and_keep_touch_keys_alone():
    layer = kvedge.QuantizedKvLayer(100, HEADS, DIM, value_dtype="float16")
    layer.extend(*rows(3))
    values = layer.values()
    layer.shift(-5, rope=kvedge.Rope())
    np.testing.assert_array_equal(layer.values(), values)
    layer.keep(range(0, TOKENS, 3))
    np.testing.assert_array_equal(layer.values(), values[::3])


def test_options_of_scales_are_for_the_side_that_has_them():
    layer = kvedge.Float32KvLayer(8, HEADS, DIM, value_dtype="int8", group_size=8)
    assert layer.group_size == 8
    with pytest.raises(kvedge.InvalidArgumentError, match="float32 layers store keys as they are"):
        kvedge.KVCache(1, HEADS, DIM, dtype="float32", value_dtype="int8", key_offset="auto")
    with pytest.raises(kvedge.InvalidArgumentError, match="group_size is for"):
        kvedge.KVCache(1, HEADS, DIM, dtype="float32", value_dtype="float16", group_size=8)
    with pytest.raises(kvedge.InvalidArgumentError, match='value_dtype must be "int8" or'):
        kvedge.KVCache(1, HEADS, DIM, value_dtype="int9")


def test_the_same_format_for_both_is_no_pair():
    one, other = (kvedge.KVCache(1, HEADS, DIM, value_dtype=name) for name in ("int8", None))
    assert store_of(one.layer(0)).config == store_of(other.layer(0)).config
