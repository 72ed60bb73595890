"""Arrays as callers have them: any strides, 16-bit elements, both layouts."""

import numpy as np
import pytest
from reference import FLOATS
from support import assert_attention_close, content, filled, normal

import kvedge
from kvedge import errors
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

H, HEADS, D, N = 2, 4, 24, 5

#: Strides that keep channels side by side: name -> function(array (..., D)) -> the same numbers.
STRIDES = {
    "dense": np.ascontiguousarray,
    "part of a row": lambda a: np.concatenate([a, a], axis=-1)[..., : a.shape[-1]],
    "behind an offset": lambda a: np.concatenate([a, a], axis=-1)[..., a.shape[-1] :],
    "tokens backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "heads outside": lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
    "heads backwards": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "every third": lambda a: np.repeat(a, 3, axis=0)[::3],
}
#: Types, and how much float32 rounds to them.
TYPES = [np.float32, np.float16]


def strided(a, how, dtype=np.float32):
    return STRIDES[how](a.astype(dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("type_of", TYPES)
@pytest.mark.parametrize("how", STRIDES)
def test_tokens_of_any_strides_store_the_same_bytes(layer_class, how, type_of, rng):
    keys, values = normal(rng, 2, N, H, D).astype(type_of)
    expected, layer = layer_class(40, H, D), layer_class(40, H, D)
    wide = keys.astype(np.float32), values.astype(np.float32)
    expected.extend(*wide)
    expected.push(wide[0][1], wide[1][1])
    expected.extend(*wide)
    layer.extend(strided(keys, how, type_of), strided(values, how, type_of))
    layer.push(strided(keys, how, type_of)[1], strided(values, how, type_of)[1])
    turned = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (keys, values)]
    layer.extend(*turned, layout="hnd")
    assert content(layer) == content(expected)
    cache = kvedge.KVCache(1, H, D, dtype=layer.dtype)
    cache.append(0, strided(keys, how, type_of), strided(values, how, type_of))
    cache.append(0, strided(keys[1:2], "dense"), strided(values, "dense")[1:2])
    cache.append(0, *turned, layout="hnd")
    assert content(cache.layer(0)) == content(expected)


def test_a_token_repeated_by_a_zero_stride(layer_class, rng):
    key, value = normal(rng, 2, 1, H, D)
    expected, layer = layer_class(N, H, D), layer_class(N, H, D)
    expected.extend(np.repeat(key, N, axis=0), np.repeat(value, N, axis=0))
    layer.extend(np.broadcast_to(key, (N, H, D)), np.broadcast_to(value, (N, H, D)))
    assert content(layer) == content(expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("type_of", TYPES)
@pytest.mark.parametrize("how", STRIDES)
def test_queries_and_results_of_any_strides(layer_class, how, type_of, rng):
    layer = filled(layer_class, rng, 30, H, D)
    given = normal(rng, N, HEADS, D).astype(type_of)
    expected, expected_lse = layer.attend(given.astype(np.float32), return_lse=True)
    query = strided(given, how, type_of)
    np.testing.assert_array_equal(layer.attend(query), expected)
    np.testing.assert_array_equal(layer.attend(query[2:3], start=3).shape, (1, HEADS, D))
    room = strided(np.full((N, HEADS, D), 9), how, type_of)
    out, lse = layer.attend(query, out=room, return_lse=True)
    assert out is room
    np.testing.assert_array_equal(out, expected.astype(type_of))
    np.testing.assert_array_equal(lse, expected_lse)
    turned, out = np.ascontiguousarray(query.swapaxes(0, 1)), room.swapaxes(0, 1)
    out[...] = 0
    made, lse = layer.attend(turned, layout="hnd", out=out, return_lse=True)
    assert made is out
    np.testing.assert_array_equal(room, expected.astype(type_of))
    np.testing.assert_array_equal(lse, expected_lse.T)
    np.testing.assert_array_equal(layer.attend(turned, layout="hnd"), expected.swapaxes(0, 1))


@pytest.mark.parametrize("type_of", TYPES)
def test_layouts_of_a_batch(dtype, type_of, rng):
    kind = layer_types[dtype]
    batches = [[kind(20, H, D) for _ in range(3)] for _ in range(2)]
    keys, values = normal(rng, 2, 3, N, H, D).astype(type_of)
    kvedge.append_batch(batches[0], keys.astype(np.float32), values.astype(np.float32))
    turned = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (keys, values)]
    kvedge.append_batch(batches[1], *turned, layout="hnd")
    assert [*map(content, batches[0])] == [*map(content, batches[1])]
    query = normal(rng, 3, N, HEADS, D).astype(type_of)
    expected, expected_lse = kvedge.attend_batch(
        batches[0], query.astype(np.float32), return_lse=True
    )
    out = np.empty((3, HEADS, N, D), type_of)
    made, lse = kvedge.attend_batch(
        batches[1],
        np.ascontiguousarray(query.swapaxes(1, 2)),
        layout="hnd",
        out=out,
        return_lse=True,
    )
    assert made is out
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected.astype(type_of))
    np.testing.assert_array_equal(lse.swapaxes(1, 2), expected_lse)
    one = kvedge.attend_batch(batches[0], query[:, -1], layout="hnd")
    if dtype in FLOATS:  # whose products are added in another order where there is one query
        np.testing.assert_allclose(one, expected[:, -1], rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(one, expected[:, -1])
    memory = np.zeros((N, 3, HEADS, 2 * D), type_of)
    kvedge.attend_batch(batches[0], query, out=memory.swapaxes(0, 1)[..., D:])
    np.testing.assert_array_equal(memory.swapaxes(0, 1)[..., D:], expected.astype(type_of))
    assert (memory[..., :D] == 0).all()


def test_paged_caches_take_strides_and_layouts(dtype, rng):
    pool = kvedge.KvBlockPool(8, 4, 1, H, D, dtype)
    paged = kvedge.PagedKvCache(pool)
    plain, other = paged.new_sequence(), paged.new_sequence()
    keys, values = normal(rng, 2, N, H, D)
    paged.append(plain, 0, keys, values)
    turned = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (keys, values)]
    paged.append(other, 0, *turned, layout="hnd")
    query = normal(rng, N, HEADS, D)
    expected, expected_lse = paged.attend(plain, 0, query, return_lse=True)
    out = np.zeros((HEADS, N, D), np.float16)
    made, lse = paged.attend(other, 0, query.swapaxes(0, 1), layout="hnd", out=out, return_lse=True)
    assert made is out
    np.testing.assert_array_equal(out.swapaxes(0, 1), expected.astype(np.float16))
    np.testing.assert_array_equal(lse, expected_lse.T)


# -- what is refused -----------------------------------------------------------------------------


def test_results_that_share_memory_are_refused(layer_class, rng):
    layer = filled(layer_class, rng, 30, H, D)
    query = normal(rng, N, HEADS, D)
    memory = np.zeros(N * HEADS * D + D, np.float32)
    step = np.lib.stride_tricks.as_strided
    for out in [
        np.broadcast_to(memory[: HEADS * D].reshape(HEADS, D), (N, HEADS, D)),
        step(memory, (N, HEADS, D), (4 * D, 4 * D, 4)),
        step(memory, (N, HEADS, D), (4 * HEADS * D - 4, 4 * D, 4)),
        step(memory, (N, HEADS, D), (0, 4 * D, 4)),
        query,
        query[::-1],
        np.moveaxis(np.zeros((D, N, HEADS), np.float32), 0, -1),
    ]:
        with pytest.raises(errors.LayoutError, match="out"):
            layer.attend(query, out=out)


def test_a_result_between_the_rows_of_the_query_is_written(layer_class, rng):
    """Their bounds overlap, their memory does not."""
    layer = filled(layer_class, rng, 30, H, D)
    memory = normal(rng, N, HEADS, 2, D)
    query, out = memory[:, :, 0], memory[:, :, 1]
    expected = layer.attend(query.copy())
    layer.attend(query, out=out)
    np.testing.assert_array_equal(out, expected)
    kvedge.attend_batch([layer], query[np.newaxis], out=out[np.newaxis])
    np.testing.assert_array_equal(out, expected)


def test_elements_off_their_alignment_are_refused(layer_class, rng):
    layer = filled(layer_class, rng, 5, H, D, capacity=10)
    raw = np.zeros(4 * HEADS * D + 9, np.uint8)
    query = raw[1 : 1 + 4 * HEADS * D].view(np.float32).reshape(HEADS, D)
    apart = np.lib.stride_tricks.as_strided(
        raw[: 4 * D].view(np.float32), (2, D), (4 * D + 2, 4), writeable=True
    )
    for call in (
        lambda: layer.attend(query),
        lambda: layer.attend(normal(rng, HEADS, D), out=query),
        lambda: layer.push(apart, apart),
        lambda: layer.attend(apart),
        lambda: kvedge.attend_batch([layer], query[np.newaxis]),
        lambda: kvedge.append_batch([layer], apart[np.newaxis], apart[np.newaxis]),
    ):
        with pytest.raises(errors.LayoutError):
            call()


@pytest.mark.parametrize("layout", ["ndh", "", None, 3, "NHD"])
def test_layouts_that_are_none_are_refused(layer_class, layout, rng):
    layer = filled(layer_class, rng, 5, H, D, capacity=10)
    rows, query = normal(rng, 1, H, D), normal(rng, 1, HEADS, D)
    for call in (
        lambda: layer.extend(rows, rows, layout=layout),
        lambda: layer.attend(query, layout=layout),
        lambda: kvedge.KVCache(1, H, D).append(0, rows, rows, layout=layout),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="layout"):
            call()


# -- 16 bits -------------------------------------------------------------------------------------


def test_results_too_large_for_16_bits_are_the_largest(rng):
    layer = kvedge.Float32KvLayer(1, 1, D)
    values = np.full((1, D), 1e30, np.float32)
    values[0, 0] = -1e30
    layer.push(np.zeros((1, D), np.float32), values)
    out = np.empty((1, D), np.float16)
    layer.attend(np.zeros((1, D), np.float32), out=out)
    np.testing.assert_array_equal(np.abs(out), 65504)
    assert out[0, 0] < 0


def test_bfloat16_arrays_of_ml_dtypes(layer_class, rng):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    keys, values = normal(rng, 2, N, H, D).astype(bfloat16)
    expected, layer = layer_class(N, H, D), layer_class(N, H, D)
    expected.extend(keys.astype(np.float32), values.astype(np.float32))
    layer.extend(keys, values)
    assert content(layer) == content(expected)
    query = normal(rng, N, HEADS, D).astype(bfloat16)
    wanted = expected.attend(query.astype(np.float32))
    out = layer.attend(query, out=np.empty((N, HEADS, D), bfloat16))
    assert out.dtype == bfloat16
    np.testing.assert_array_equal(out, wanted.astype(bfloat16))
    np.testing.assert_array_equal(layer.attend(query), wanted)
    assert_attention_close(wanted, wanted.astype(np.float64))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_results_in_a_subclass_of_arrays(layer_class, name, rng, tmp_path):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name
    layer = filled(layer_class, rng, 30, H, D)
    query = normal(rng, N, HEADS, D)
    file = np.memmap(tmp_path / "out", kind, "w+", shape=(N, HEADS, D))
    assert layer.attend(query, out=file) is file
    np.testing.assert_array_equal(np.asarray(file), layer.attend(query).astype(kind))


def test_infinities_in_16_bits_are_refused(dtype, rng):
    kind = layer_types[dtype]
    layers = [filled(kind, rng, 5, H, D, capacity=10) for _ in range(2)]
    assert set(FORMATS) >= {dtype}
    query = normal(rng, 2, HEADS, D).astype(np.float16)
    rows = normal(rng, 2, H, D).astype(np.float16)
    for bad in (np.inf, -np.inf, np.nan):
        query[1, 3, 7] = rows[1, 1, 3] = bad
        for call in (
            lambda: layers[0].attend(query[1]),
            lambda: kvedge.attend_batch(layers, query),
            lambda: layers[0].push(rows[1], rows[0]),
            lambda: kvedge.append_batch(layers, rows, rows),
        ):
            with pytest.raises(errors.NonFiniteInputError):
                call()
    assert [len(layer) for layer in layers] == [5, 5]
