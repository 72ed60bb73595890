"""The numerics contract over shapes: error at most 2e-4 of the largest output.

The reference is float64 attention over exactly what is stored.
"""

import functools
import zlib

import numpy as np
import pytest
import reference
from support import assert_attention_close, assert_lse_close, group_sizes, normal, stored

from kvedge import Float32KvLayer, QuantizedKvLayer

H = 2
HEAD_DIMS = [1, 8, 40, 64, 80, 96, 112, 128, 256]
QUERY_GROUPS = [1, 2, 3, 4, 7, 8]
LENGTHS = [1000, 17, 16, 15, 1]  # one layer is cut shorter and shorter


def seeded(*name):
    return np.random.default_rng(zlib.crc32(repr(name).encode()))


@functools.lru_cache(maxsize=2)
def tokens(length, head_dim):
    """Keys and values (length, H, D), with a constant of a few sigmas in some key channels."""
    rng = seeded(length, head_dim)
    keys, values = normal(rng, 2, length, H, head_dim)
    keys += np.where(rng.random((H, head_dim)) < 0.1, np.float32(6), np.float32(0))
    return keys, values


def layers(length, head_dim):
    """(name, layer) in every storage format for this head_dim."""
    keys, values = tokens(length, head_dim)
    offset = keys.mean(axis=0)
    formats = [
        (f"group_size={size} key_offset={name}", {"group_size": size, "key_offset": given})
        for size in group_sizes(head_dim)
        for name, given in (("None", None), ("given", offset))
    ]
    formats.append(("float16 scales", {"scale_dtype": "float16"}))
    for name, options in formats:
        layer = QuantizedKvLayer(length, H, head_dim, **options)
        layer.extend(keys, values)
        yield name, layer
    layer = Float32KvLayer(length, H, head_dim)
    layer.extend(keys, values)
    yield "float32", layer


def check(layer, query, hint, **options):
    keys, values = stored(layer)
    ref, ref_lse = reference.attention(query, keys, values, **options)
    out, lse = layer.attend(query, return_lse=True, **options)
    hint = f"{hint}, {len(layer)} tokens, {query.shape}"
    assert_attention_close(out, ref, hint=hint)
    assert_lse_close(lse, ref_lse)
    np.testing.assert_array_equal(layer.attend(query, **options), out)


@pytest.mark.parametrize("query_group", QUERY_GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_is_that_of_the_reference(head_dim, query_group):
    rng = seeded(head_dim, query_group)
    query = normal(rng, query_group * H, head_dim)
    rows = normal(rng, 5, query_group * H, head_dim)
    for name, layer in layers(LENGTHS[0], head_dim):
        for length in LENGTHS:
            layer.truncate(length)
            check(layer, query, name)
        layer.truncate(min(length, 15))
        check(layer, rows[: len(layer)], name)


@pytest.mark.parametrize("head_dim", [1, 40, 64])
def test_every_length_up_to_some_tiles_is_that_of_the_reference(head_dim):
    query = normal(seeded(head_dim), 3 * H, head_dim)
    for name, layer in list(layers(70, head_dim))[::3]:
        for length in range(70, 0, -1):
            layer.truncate(length)
            check(layer, query, name)


@pytest.mark.parametrize("head_dim", [*range(1, 35), 63, 65, 127, 129, 255, 544, 1023, 1024])
def test_every_tail_of_head_dim_is_that_of_the_reference(head_dim):
    query = normal(seeded(head_dim), 3 * H, head_dim)
    for name, layer in layers(37, head_dim):
        for query_group in (1, 2, 3):
            check(layer, query[: query_group * H], name)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 33])
def test_any_number_of_kv_heads_is_that_of_the_reference(num_kv_heads, rng):
    layer = QuantizedKvLayer(100, num_kv_heads, 64)
    layer.extend(*normal(rng, 2, 100, num_kv_heads, 64))
    check(layer, normal(rng, 2 * num_kv_heads, 64), "")
    check(layer, normal(rng, 7, num_kv_heads, 64), "")


@pytest.mark.parametrize("query_group", [16, 32, 71])
def test_large_query_groups_are_those_of_the_reference(query_group, rng):
    layer = QuantizedKvLayer(100, 1, 64)
    layer.extend(*normal(rng, 2, 100, 1, 64))
    check(layer, normal(rng, query_group, 64), "")


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64, 100])
@pytest.mark.parametrize("length", [100, 130])
def test_many_rows_attend_causally(rows, length, layer_class, rng):
    layer = layer_class(length, H, 40)
    layer.extend(*normal(rng, 2, length, H, 40))
    check(layer, normal(rng, rows, 3 * H, 40), "")


LONG = [
    (64, 4, {}),
    (128, 2, {"group_size": 32, "key_offset": "auto"}),
]


def check_long(head_dim, query_group, length, options):
    rng = seeded(head_dim, query_group, length)
    keys, values = normal(rng, 2, length, 1, head_dim)
    keys[..., 0] += 6
    layer = QuantizedKvLayer(length, 1, head_dim, **options)
    layer.extend(keys, values)
    stored_keys, stored_values = stored(layer)
    for sharpness in (1, 8):  # spread over all tokens, and on a few
        query = sharpness * normal(rng, query_group, head_dim)
        ref, _ = reference.attention(query, stored_keys, stored_values)
        assert_attention_close(layer.attend(query), ref, hint=f"sharpness {sharpness}")


@pytest.mark.parametrize(("head_dim", "query_group", "options"), LONG, ids=str)
def test_attention_over_32768_tokens_is_that_of_the_reference(head_dim, query_group, options):
    check_long(head_dim, query_group, 32768, options)


@pytest.mark.slow
@pytest.mark.parametrize("query_group", QUERY_GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_over_32768_tokens_in_every_shape(head_dim, query_group):
    for size in group_sizes(head_dim):
        for offset in (None, "auto"):
            check_long(head_dim, query_group, 32768, {"group_size": size, "key_offset": offset})


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_over_131072_tokens_is_that_of_the_reference(head_dim):
    check_long(head_dim, 4, 131072, {})


# -- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [1, 40, 64, 128])
def test_scores_are_the_scaled_logits(head_dim):
    rng = seeded(head_dim)
    query = normal(rng, 3 * H, head_dim)
    for _, layer in layers(100, head_dim):
        keys, _ = stored(layer)
        for scale in (None, 0.3):
            ref = reference.logits(query[None], keys, scale=scale)[:, 0]
            out = layer.scores(query, scale=scale)
            assert out.dtype == np.float32 and out.shape == (3 * H, 100)
            np.testing.assert_allclose(out, ref, rtol=0, atol=2e-4 * np.abs(ref).max())


def test_scores_of_an_empty_layer_are_empty(layer_class, rng):
    layer = layer_class(4, H, 8)
    assert layer.scores(normal(rng, 2 * H, 8)).shape == (2 * H, 0)
