"""A float32 layer is exact: what comes out is bit for bit what went in."""

import pytest
import reference
from support import ROWS, assert_attention_close, normal

from kvedge import Float32KvLayer, KVCache


@pytest.mark.parametrize("kind", ROWS)
def test_a_float32_layer_stores_every_bit(kind, rng):
    keys, values = ROWS[kind](rng, (5, 2, 40)), ROWS[kind](rng, (5, 2, 40))
    layer = Float32KvLayer(6, 2, 40)
    layer.extend(keys, values)
    layer.push(keys[0], values[0])
    assert layer.keys()[:5].tobytes() == keys.tobytes()
    assert layer.value_codes[:5].tobytes() == values.tobytes()
    assert layer.get_value(5, 1).tobytes() == values[0, 1].tobytes()


@pytest.mark.parametrize("kind", ROWS)
def test_a_float32_cache_stores_every_bit(kind, rng):
    keys, values = ROWS[kind](rng, (5, 2, 40)), ROWS[kind](rng, (5, 2, 40))
    cache = KVCache(1, 2, 40, dtype="float32")
    cache.append(0, keys, values)
    cache.advance(5)
    assert cache.k(0).tobytes() == keys.tobytes() and cache.v(0).tobytes() == values.tobytes()


def test_attention_over_float32_rows_has_the_error_of_float32(shape, rng):
    heads, head_dim = shape
    keys, values = normal(rng, 2, 1000, heads, head_dim)
    query = normal(rng, 3 * heads, head_dim)
    layer = Float32KvLayer(1000, heads, head_dim)
    layer.extend(keys, values)
    ref, _ = reference.attention(query, keys, values)
    assert_attention_close(layer.attend(query), ref, 1e-5)
