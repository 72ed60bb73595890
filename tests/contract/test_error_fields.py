"""What was wanted and what came, as fields of an error, and what a dtype may not be."""

import pickle

import numpy as np
import pytest
from support import normal

from kvedge import KvBlockPool, KVCache, PagedKvCache, QuantizedKvLayer, errors


def raised(call, *arguments, **options):
    with pytest.raises(errors.KvedgeError) as caught:
        call(*arguments, **options)
    return caught.value


def test_errors_carry_what_was_expected_and_what_came(rng):
    layer = QuantizedKvLayer(4, 2, 8)
    layer.push(normal(rng, 2, 8), normal(rng, 2, 8))
    error = raised(layer.push, normal(rng, 2, 7), normal(rng, 2, 8))
    assert error.expected == "(2, 8) or (16,)" and error.got == (2, 7) and error.layer is None
    error = raised(layer.attend, normal(rng, 3, 8))
    assert error.got == (3, 8) and "(num_heads, 8)" in error.expected
    error = raised(layer.push, np.ones((2, 8)), np.ones((2, 8)))
    assert (error.expected, error.got) == ("float32", "float64")
    error = raised(layer.extend, normal(rng, 4, 2, 8), normal(rng, 4, 2, 8))
    assert (error.expected, error.got) == (3, 4)
    error = raised(layer.get_key, 1, 0)
    assert (error.expected, error.got) == (range(1), 1)
    error = raised(layer.get_key, 0, 2)
    assert (error.expected, error.got) == (range(2), 2)


def test_errors_of_a_cache_name_the_layer(rng):
    cache = KVCache(3, 2, 8, max_seq_len=2)
    for layer in (0, 2):
        cache.append(layer, *normal(rng, 2, 2, 8))
    error = raised(cache.advance)
    assert (error.expected, error.got, error.layer) == (1, 0, 1)
    error = raised(cache.snapshot().detach)
    assert isinstance(error, errors.LayersOutOfStepError)
    error = raised(cache.copy().extract)
    assert (error.expected, error.got, error.layer) == (0, 1, 0)
    error = raised(cache.append, 2, *normal(rng, 2, 2, 2, 8))
    assert (error.expected, error.got, error.layer) == (1, 2, 2)
    assert raised(cache.layer, 3).layer == 3
    paged = PagedKvCache(KvBlockPool(2, 4, 3, 2, 8))
    error = raised(paged.advance, paged.new_sequence())
    assert (error.expected, error.got, error.layer) == (1, 0, 0)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and (again.expected, again.layer) == (1, 0)


@pytest.mark.parametrize("dtype", [np.int8, np.dtype("int8"), int, None, 8])
def test_a_dtype_is_a_name(dtype):
    error = raised(KVCache, 1, 1, 8, dtype=dtype)
    assert '"int8"' in str(error) and "builtins" not in str(error)
    assert error.got is dtype or error.got == dtype
    if dtype is np.int8:
        assert "the class int8" in str(error)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16")])
def test_a_type_that_has_a_name_here_is_told_it(dtype):
    assert 'write dtype="float16"' in str(raised(KVCache, 1, 1, 8, dtype=dtype))
    assert 'write scale_dtype="float16"' in str(raised(KVCache, 1, 1, 8, scale_dtype=dtype))
    assert "write" not in str(raised(KVCache, 1, 1, 8, dtype=np.int64))


def test_a_group_wider_than_a_row_is_refused():
    for make in (lambda **o: QuantizedKvLayer(4, 2, 8, **o), lambda **o: KVCache(2, 2, 8, **o)):
        error = raised(make, group_size=99)
        assert (error.expected, error.got) == (range(1, 9), 99) and "1 to 8" in str(error)
        make(group_size=99, value_head_dim=128)  # a group of the values


def test_rows_in_the_other_order_are_named(rng):
    layer = QuantizedKvLayer(9, 2, 8)
    rows = normal(rng, 2, 5, 8)
    assert 'layout="hnd"' in str(raised(layer.extend, rows, rows))
    layer.extend(rows, rows, layout="hnd")
    assert "layout" not in str(raised(layer.extend, rows[..., :7], rows[..., :7]))
    query = normal(rng, 4, 5, 8)
    assert 'layout="hnd"' in str(raised(layer.attend, query))
    layer.attend(query, layout="hnd")
    assert "layout" not in str(raised(layer.attend, query[..., :7]))
    assert "layout" not in str(raised(layer.attend, query[:3]))


def test_an_empty_cache_is_false_as_empty_containers_are(rng):
    cache, layer = KVCache(1, 2, 8), QuantizedKvLayer(4, 2, 8)
    assert not cache and not layer
    cache.push_step(*normal(rng, 2, 1, 2, 8))
    assert cache
