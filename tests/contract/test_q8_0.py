"""q8_0: ggml's bytes, to the bit, and attention over them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.reference import attention
from helpers.support import assert_attention_close, normal, stored
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvedge
from kvedge import InvalidArgumentError, KVCache, Q8_0KvLayer, ScaleRangeError, quantize_rows


def encoded(group):
    """ggml's quantize_row_q8_0_ref of 32 numbers, one by one: 34 bytes."""
    d = np.float32(max(abs(x) for x in group)) / np.float32(127)
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / d if d else np.float32(0)
    codes = []
    for x in group:
        product = float(np.float32(x) * inverse) if np.isfinite(inverse) else 0.0
        codes.append(int(np.copysign(np.floor(abs(product) + 0.5), product)))  # exact: roundf
    return d.astype("<f2").tobytes() + np.array(codes, np.int8).tobytes()


ROWS = hnp.arrays(np.float32, (2, 1, 64), elements=st.floats(-8e6, 8e6, width=32))


def bytes_of(rows):
    return [b"".join(encoded(g) for g in row.reshape(-1, 32)) for row in rows.reshape(-1, 64)]


@given(rows=ROWS)
def test_the_bytes_are_ggmls(rows):
    layer = Q8_0KvLayer(2, 1, 64)
    layer.extend(rows, -rows)
    assert [codes.tobytes() for codes in layer.key_codes] == bytes_of(rows)
    assert [codes.tobytes() for codes in layer.value_codes] == bytes_of(-rows)
    codes, scales = quantize_rows(rows, "q8_0")
    assert scales is None and codes.tobytes() == layer.key_codes.tobytes()


def test_gguf_writes_the_same_bytes(rng):
    gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'kvedge[gguf]'")
    rows = normal(rng, 200, 2, 128) * np.exp(rng.uniform(-20, 12, (200, 2, 1))).astype(np.float32)
    rows[3] = 0
    rows[4, 0, :32] = 127 * np.sign(rows[4, 0, :32])
    rows[5, :, 1:32] = np.arange(31) + 0.5  # halves, once the largest is 127
    rows[5, :, 0] = 127
    rows[6] *= np.float32(1e-38)
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(quantize_rows(rows, "q8_0")[0], expected)
    decoded = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(kvedge.dequantize_rows(expected, dtype="q8_0"), decoded)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bits", [None, 8, 16, 24])
def test_attention_is_that_of_the_reference(rng, dim, heads, bits):
    layer = Q8_0KvLayer(700, heads, dim)
    keys, values = normal(rng, 2, 700, heads, dim)
    keys[..., 5] *= 20  # a large channel: groups whose scales differ
    values[::7] *= 30
    layer.extend(keys, values)
    for query in (normal(rng, 4 * heads, dim), normal(rng, 7, heads, dim), normal(rng, heads, dim)):
        for scale in (None, 1e-3):
            out = layer.attend(query, scale=scale, precision_bits=bits)
            expected, _ = attention(query, *stored(layer), scale=scale)
            if bits == 8:
                assert np.abs(out - expected).max() < 0.15 * np.abs(expected).max()
            else:
                assert_attention_close(out, expected)


@pytest.mark.parametrize("other", ["int8", "float16", "kivi4"])
def test_either_side_may_be_in_it(rng, other):
    for dtype, value_dtype in (("q8_0", other), (other, "q8_0")):
        cache = KVCache(1, 2, 64, dtype=dtype, value_dtype=value_dtype)
        cache.append(0, *normal(rng, 2, 200, 2, 64))
        layer = cache.layer(0)
        query = normal(rng, 8, 64)
        expected, _ = attention(query, layer.keys(), layer.values())
        assert_attention_close(layer.attend(query), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda dim: KVCache(1, 2, dim, dtype="q8_0"),
        lambda dim: KVCache(1, 2, 64, value_head_dim=dim, dtype="q8_0"),
        lambda dim: KVCache(1, 2, 64, value_head_dim=dim, value_dtype="q8_0"),
        lambda dim: KVCache(1, 2, dim, key_dtype="q8_0", value_dtype="int8"),
        lambda dim: KVCache(1, 2, dim, dtype="q8_0", value_dtype="kivi4"),
        lambda dim: Q8_0KvLayer(None, 2, dim),
        lambda dim: kvedge.KvBlockPool(4, 16, 1, 2, dim, "q8_0"),
        lambda dim: quantize_rows(np.zeros((1, dim), np.float32), "q8_0"),
    ],
)
@pytest.mark.parametrize("dim", [1, 40, 80, 1000])
def test_rows_of_other_widths_are_refused(make, dim):
    with pytest.raises(InvalidArgumentError, match=f"multiple of 32 for q8_0.*not {dim}"):
        make(dim)


def test_what_it_has_no_scales_for_is_refused(rng):
    rows = np.zeros((1, 1, 32), np.float32)
    rows[0, 0, 3] = 127 * 65520
    layer = Q8_0KvLayer(4, 1, 32)
    with pytest.raises(ScaleRangeError, match="q8_0"):
        layer.extend(rows, rows * 0)
    with pytest.raises(InvalidArgumentError, match="group_size"):
        KVCache(1, 2, 64, dtype="q8_0", group_size=32)
    assert len(layer) == 0
    below = np.nextafter(rows, np.float32(0))
    layer.extend(below, -below)
    assert layer.keys()[0, 0, 3] == 127 * 65504 == -layer.values()[0, 0, 3]


@pytest.mark.parametrize(("at", "byte"), [(1, 0x80), (1, 0x7C), (7, 0x80)])
def test_foreign_bytes_that_no_row_has_are_refused(at, byte):
    codes = np.zeros((1, 34), np.uint8)
    codes[0, at] = byte
    with pytest.raises(InvalidArgumentError, match="q8_0 cannot hold"):
        kvedge.dequantize_rows(codes, dtype="q8_0")


def test_a_cache_is_stored_anew_in_another_format(rng):
    cache = KVCache(1, 2, 64, dtype="q8_0")
    cache.append(0, *normal(rng, 2, 100, 2, 64))
    cache.advance(100)
    held = cache.layer(0).keys()
    cache.requantize("float16")
    np.testing.assert_allclose(cache.layer(0).keys(), held, rtol=1e-3)


def test_tokens_are_kept_moved_and_taken_back(rng):
    keys, values = normal(rng, 2, 60, 1, 64)
    cache = KVCache(1, 1, 64, dtype="q8_0", recent=8, sinks=2, key_scale="auto")
    cache.append(0, keys, values)
    cache.advance(60)
    cache.keep([*range(10), *range(30, 60)])
    cache.truncate(35)
    cache.shift(-2, rope=kvedge.Rope(64))
    layer = cache.layer(0)
    query = normal(rng, 2, 64)
    expected, _ = attention(query, layer.keys(), layer.values())
    assert np.abs(cache.attend(0, query) - expected).max() < 0.02
