"""``recent=`` and ``sinks=``: first and last tokens in a format that loses less."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from helpers.precise import (
    DIM,
    HEADS,
    PartsMachine,
    bits,
    cache_of,
    layer_of,
    read,
    read_by,
    rows,
)
from helpers.reference import attention
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

import kvedge
from kvedge import KVCache, Rope, errors

CLASSES = {
    "int8": kvedge.QuantizedKvLayer,
    "int4": kvedge.Int4KvLayer,
    "fp8_e4m3": kvedge.Fp8E4m3KvLayer,
    "float32": kvedge.Float32KvLayer,
    "float16": kvedge.Float16KvLayer,
    "bfloat16": kvedge.Bfloat16KvLayer,
}


def new_layer(dtype="int4", **options):
    return layer_of(dtype, **options)


def through(dtype, tokens):
    """Tokens as a layer of that format gives them back."""
    layer = new_layer(dtype)
    if tokens.shape[1]:
        layer.extend(*tokens)
    return np.stack([layer.keys(), layer.values()])


def expected(layer, tokens):
    """What is read of all tokens where first and last ones are in another format."""
    made, n = through(layer.dtype, tokens), tokens.shape[1]
    precise = through(layer.recent_dtype, tokens)
    first, last = min(n, layer.sinks), max(0, n - layer.recent)
    made[:, :first], made[:, last:] = precise[:, :first], precise[:, last:]
    return made


@pytest.mark.parametrize("recent_dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", CLASSES)
@pytest.mark.parametrize(("recent", "sinks"), [(8, 0), (0, 5), (33, 4)])
def test_first_and_last_tokens_are_read_in_the_other_format(dtype, recent_dtype, recent, sinks):
    layer = new_layer(dtype, recent=recent, sinks=sinks, recent_dtype=recent_dtype)
    assert (layer.recent, layer.sinks, layer.recent_dtype) == (recent, sinks, recent_dtype)
    tokens = rows(0, 0)
    for seed, n in enumerate((1, 1, 3, 30, 1, 250, 1, 1, 63, 64, 65, 1)):
        new = rows(seed, n)
        tokens = np.concatenate([tokens, new], axis=1)
        layer.extend(*new)
        np.testing.assert_array_equal(read(layer), expected(layer, tokens))
    at = len(layer) - 1
    np.testing.assert_array_equal(layer.get_keys_at(at).reshape(HEADS, DIM), layer.keys()[at])
    np.testing.assert_array_equal(layer.get_value(0, 1), layer.values()[0, 1])
    assert layer.memory_bytes > new_layer(dtype).memory_bytes


@pytest.mark.parametrize("dtype", ["int4", "kivi4"])
@pytest.mark.parametrize("cuts", [(300, 50), (350,), (100, 200, 1), (50, 3, 70)])
def test_a_prompt_is_read_as_exactly_as_a_token(dtype, cuts):
    """Whatever its chunks, each query reads the last tokens before it; then their room is free."""
    layer, tokens, queries = new_layer(dtype, recent=20), rows(3, 360), rows(4, 360)[0]
    start = 0
    for n in cuts:
        layer.extend(*tokens[:, start : start + n])
        start += n
        query = queries[start - n : start].repeat(2, axis=1)
        wanted, _ = attention(query, *read_by(layer, tokens[:, :start], n))
        np.testing.assert_allclose(layer.attend(query), wanted, atol=2e-4 * np.abs(wanted).max())
    one_by_one = new_layer(dtype, recent=20)
    for t in range(start):
        one_by_one.push(*tokens[:, t])
    for each in (layer, one_by_one):
        each.extend(*tokens[:, start : start + 1])
    assert bits(layer) == bits(one_by_one)
    assert layer.memory_bytes <= one_by_one.memory_bytes


def test_other_maps_of_keys_go_along():
    keys, values = rows(7, 120)
    keys[..., 3] += 60
    for recent_dtype, options in itertools.product(
        ("bfloat16", "float16"),
        (
            {"key_scale": "auto"},
            {"key_offset": "auto"},
            {"key_scale": np.full((HEADS, DIM), 2, np.float32)},
        ),
    ):
        layer = new_layer("int8", recent=10, sinks=3, recent_dtype=recent_dtype, **options)
        for t in range(120):
            layer.push(keys[t], values[t])
        query = rows(8, 1)[0][0].repeat(2, axis=0)
        wanted, wanted_lse = attention(query[None], *read(layer))
        out, lse = layer.attend(query, return_lse=True)
        np.testing.assert_allclose(out, wanted[0], atol=2e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(lse, wanted_lse[0], atol=5e-4)
        np.testing.assert_allclose(layer.keys(), keys, atol=0.6)
        for other in (layer.copy(), pickle.loads(pickle.dumps(layer))):
            assert bits(other) == bits(layer)


def test_tokens_gone_back_to_before_the_last_ones_stay_as_they_are_stored():
    tokens = rows(11, 400)
    layer = new_layer(recent=16)
    layer.extend(*tokens[:, :399])
    layer.extend(*tokens[:, 399:])
    layer.truncate(100)
    np.testing.assert_array_equal(read(layer), through("int4", tokens[:, :100]))
    layer.extend(*tokens[:, :5])
    np.testing.assert_array_equal(read(layer)[:, 100:], through("float16", tokens[:, :5]))
    np.testing.assert_array_equal(read(layer)[:, :100], through("int4", tokens[:, :100]))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_window_slides_over_them(dtype):
    tokens = rows(12, 300)
    layer = new_layer(dtype, window=40, recent=10)
    query = rows(13, 1)[0][0].repeat(2, axis=0)
    for t in range(300):
        layer.push(*tokens[:, t])
        got, n = read(layer), len(layer)
        np.testing.assert_array_equal(got, expected(layer, tokens[:, : t + 1])[:, t + 1 - n :])
    wanted, _ = attention(query[None], *read(layer), window=40)
    np.testing.assert_allclose(layer.attend(query), wanted[0], atol=2e-4 * np.abs(wanted).max())
    layer.truncate(len(layer) - 0)


def test_keeping_dropping_and_shifting():
    tokens = rows(14, 200)
    layer = new_layer("int8", recent=10, sinks=4)
    layer.extend(*tokens)
    whole = read(layer)
    kept = np.r_[0:2, 30:100, 185:196, 198:200]
    layer.keep(kept)
    np.testing.assert_array_equal(read(layer)[:, :2], whole[:, :2])
    np.testing.assert_array_equal(read(layer)[:, -10:], through("float16", tokens[:, kept[-10:]]))
    before = len(layer)
    layer.drop_first(1)
    np.testing.assert_array_equal(read(layer)[:, 0], whole[:, 1])
    assert len(layer) == before - 1
    keys, rope = layer.keys(), Rope()
    layer.shift(-7, rope=rope)
    np.testing.assert_allclose(layer.keys(), rope.rotate(keys, -7), atol=0.05)
    np.testing.assert_allclose(layer.keys()[-10:], rope.rotate(keys[-10:], -7), atol=4e-3)
    layer.clear()
    layer.extend(*tokens)
    np.testing.assert_array_equal(read(layer), whole)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recent": -1}, "recent must be from 0"),
        ({"recent": 1 << 17}, "recent must be from 0"),
        ({"sinks": 2.5}, "sinks must be an integer"),
        ({"recent_dtype": "int8"}, "recent_dtype is for"),
        ({"recent": 3, "recent_dtype": "int8"}, "recent_dtype must be"),
        ({"sinks": 3, "window": 9}, "sinks=3 are gone"),
    ],
)
def test_options_are_checked(options, match):
    with pytest.raises(errors.InvalidArgumentError, match=match):
        new_layer("int8", **options)
    with pytest.raises(errors.InvalidArgumentError, match=match):
        KVCache(1, HEADS, DIM, layers=[options])


# ---- caches ----


def new_cache(tokens, layers=2, **options):
    return cache_of(tokens, layers, **{"dtype": "int4", "recent": 12, "sinks": 3, **options})


def test_ranges_take_them_along():
    tokens = rows(23, 130)
    cache = new_cache(tokens)
    part = cache.extract(40, 125)
    np.testing.assert_array_equal(part.k(0)[-12:], through("float16", tokens[:, 113:125])[0])
    start = cache.extract(0, 40)
    start.inject(part)
    np.testing.assert_array_equal(start.k(1)[-12:], through("float16", tokens[:, 113:125])[0])
    np.testing.assert_array_equal(start.k(1)[:3], through("float16", tokens[:, :3])[0])
    np.testing.assert_array_equal(start.v(1)[3:100], through("int4", tokens[:, 3:100])[1])
    plain = KVCache(2, HEADS, DIM, dtype="int4")
    with pytest.raises(errors.ShapeMismatchError, match="requantize"):
        plain.inject(part)
    plain.inject(part, requantize=True)
    assert len(plain) == 85


# ---- anything in any order ----


class RecentMachine(PartsMachine):
    """As the layer's own format has a token or as float16 does, which first and last ones are."""

    @initialize(
        recent=st.sampled_from([0, 1, 7, 40]),
        sinks=st.sampled_from([0, 1, 6]),
        dtype=st.sampled_from(["int8", "int4", "float32"]),
    )
    def start(self, recent, sinks, dtype):
        self.begin(new_layer(dtype, recent=recent, sinks=sinks if recent or sinks else 2))

    def is_read_as(self, got, n):
        coarse, fine = (through(dtype, self.tokens) for dtype in (self.layer.dtype, "float16"))
        is_fine = (got == fine).all((0, 2, 3))
        assert (is_fine | (got == coarse).all((0, 2, 3))).all()
        assert is_fine[max(self.base, n - self.layer.recent) : n].all() or not self.layer.recent
        assert is_fine[: min(self.first, n)].all()


TestRecent = RecentMachine.TestCase
TestRecent.settings = settings(stateful_step_count=20)
