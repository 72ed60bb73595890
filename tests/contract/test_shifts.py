"""Any sequence of shifts costs what one shift of their sum costs: no key is stored again."""

import copy
import pickle

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from support import normal

import kvedge
from kvedge import KVCache, Rope
from kvedge.layer.layer import store_of

H, D = 2, 32
ROPES = [Rope(), Rope(interleaved=True), Rope(rotary_dim=20), Rope(base=500.0)]
FORMATS = {
    "int8": {},
    "int8 in groups": {"group_size": 16, "scale_dtype": "float16"},
    "int8 with an offset": {"key_offset": "auto"},
    "int8 over a scale": {"key_scale": "auto"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2 over a scale": {"dtype": "fp8_e5m2", "key_scale": "auto"},
    "int4": {"dtype": "int4", "group_size": 16},
    "int4 with first and last ones": {"dtype": "int4", "sinks": 3, "recent": 5},
    "kivi4": {"dtype": "kivi4"},
    "kivi2 with sinks": {"dtype": "kivi2", "sinks": 4},
}


def error_of(read, keys):
    return np.sqrt(np.square(read - keys).mean())


class Model:
    """A cache, its keys in float64, turned as they are, and a twin that is never shifted."""

    def __init__(self, options, seed):
        self.rng = np.random.default_rng(seed)
        self.cache, self.twin = (KVCache(1, H, D, **options) for _ in range(2))
        self.keys = self.given = np.empty((0, H, D))  # now; and when they came
        self.values = np.empty((0, H, D), np.float32)

    def append(self, n):
        keys, values = normal(self.rng, 2, n, H, D)
        for cache in (self.cache, self.twin):
            cache.append(0, keys, values)
            cache.advance(n)
        self.keys = np.concatenate([self.keys, keys])
        self.given = np.concatenate([self.given, keys])
        self.values = np.concatenate([self.values, values])

    def shift(self, delta, rope, start, stop):
        self.cache.shift(delta, rope=rope, start=start, stop=stop)
        how = {"base": rope.base, "interleaved": rope.interleaved, "rotary_dim": rope.rotary_dim}
        self.keys[start:stop] = reference.rotate(self.keys[start:stop], delta, **how)

    def keep(self, kept):
        for cache in (self.cache, self.twin):
            cache.keep(kept)
        self.keys, self.given = self.keys[kept], self.given[kept]
        self.values = self.values[kept]

    def check(self):
        """Keys are as exact as if they had never been shifted, which one shift is as well."""
        n = len(self.keys)
        if n == 0:
            return
        bound = 1.5 * error_of(self.twin.k(0), self.given) + 2e-7
        layer = self.cache.layer(0)
        read = layer.keys()
        assert error_of(read, self.keys) <= bound
        np.testing.assert_array_equal(self.cache.k(0), read)
        np.testing.assert_array_equal(layer.get_key(n - 1, 1), read[n - 1, 1])
        np.testing.assert_array_equal(layer.get_keys_at(n // 2), read[n // 2].reshape(-1))
        query = normal(self.rng, 2 * H, D)
        expected, lse = reference.attention(query, read, layer.values())
        out, own = layer.attend(query, return_lse=True)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-4 * np.abs(expected).max() + 1e-6)
        np.testing.assert_allclose(own, lse, rtol=0, atol=1e-3)
        logits = np.einsum("hgd,nhd->hgn", query.reshape(H, 2, D), read).reshape(2 * H, n) / D**0.5
        np.testing.assert_allclose(layer.scores(query), logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_a_sequence_of_shifts_costs_what_one_costs(name, data, tmp_path_factory):
    model = Model(FORMATS[name], data.draw(st.integers(0, 1000)))
    model.append(data.draw(st.integers(8, 70)))
    for _ in range(data.draw(st.integers(1, 12))):
        n = len(model.keys)
        step = data.draw(st.sampled_from(["shift"] * 4 + ["append", "truncate", "keep", "copies"]))
        if step == "shift":
            start = data.draw(st.integers(0, n))
            stop = data.draw(st.one_of(st.just(n), st.integers(start, n)))
            rope = ROPES[data.draw(st.sampled_from([0, 0, 0, 1, 2, 3]))]
            for _ in range(data.draw(st.sampled_from([1, 1, 30]))):
                model.shift(data.draw(st.integers(-3, 3)), rope, start, stop)
        elif step == "append":
            model.append(data.draw(st.integers(1, 40)))
        elif step == "truncate":
            model.keep(np.arange(data.draw(st.integers(n // 2, n))))
        elif step == "keep":
            flags = np.random.default_rng(n).random(n) < 0.8
            model.keep(np.flatnonzero(flags))
        else:
            how = data.draw(st.sampled_from(["copy", "pickle", "detach", "extract", "file"]))
            model.cache = copied(model.cache, how, tmp_path_factory)
            model.twin = copied(model.twin, how, tmp_path_factory)
        assert len(model.cache) == len(model.keys)
    model.check()


def copied(cache, how, tmp_path_factory):
    if how == "copy":
        return copy.copy(cache)
    if how == "pickle":
        return pickle.loads(pickle.dumps(cache))
    if how == "extract":
        half = cache.extract(0, len(cache) // 2)
        half.inject(cache.extract(len(cache) // 2))
        return half
    if how == "detach":
        mark = cache.snapshot().detach()
        cache.clear()
        cache.restore(mark)
        return cache
    path = tmp_path_factory.mktemp("shifts") / "session"
    cache.save(path)
    return KVCache.load(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_that_drops_a_token_for_each_new_one(name):
    """Sinks stay, all others move by -1 at every step: keys of any age are as exact as new ones."""
    model = Model(FORMATS[name], 1)
    model.append(40)
    for step in range(300):
        if step % 7 == 0:
            kept = np.r_[0:4, 11:40]
            model.keep(kept)
            for _ in range(7):
                model.shift(-1, ROPES[0], 4, len(kept))
        model.append(1)
    assert len(store_of(model.cache.layer(0)).turns.starts) == 2
    model.check()


@pytest.mark.parametrize("options", [{}, {"window": 16}, {"recent": 5}, {"sinks": 3}], ids=str)
def test_a_layer_that_drops_its_first_tokens(options, rng):
    """One turn, however long it goes on: that of the tokens that are there."""
    layer = kvedge.QuantizedKvLayer(None, H, D, **options)
    keys = normal(rng, 40, H, D)
    layer.extend(keys, keys)
    expected = keys.astype(np.float64)
    for _ in range(300):
        if "window" not in options:
            layer.drop_first(1)
        expected = expected[-len(layer) :]
        layer.shift(-1, rope=Rope())
        expected = reference.rotate(expected, -1)
        key = normal(rng, H, D)
        layer.push(key, key)
        expected = np.concatenate([expected, key[None]])
    expected = expected[-len(layer) :]
    assert len(store_of(layer).turns.starts) == 1
    assert error_of(layer.keys(), expected) <= 0.008
    query = normal(rng, 2 * H, D)
    out, _ = reference.attention(query, layer.keys(), layer.values(), window=layer.window)
    np.testing.assert_allclose(layer.attend(query), out, rtol=0, atol=2e-4 * np.abs(out).max())
    copied = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(copied.keys(), layer.keys())


def test_tokens_are_kept_out_of_a_layer_that_has_dropped_and_shifted(rng):
    """Turns count from the first token ever appended, keep() from the first that is held."""
    layer = kvedge.QuantizedKvLayer(None, H, D)
    keys = normal(rng, 80, H, D)
    layer.extend(keys, keys)
    layer.drop_first(20)
    layer.shift(-20, rope=Rope(), start=10, stop=40)
    indices = [0, 3, 9, 10, 25, 39, 40, 59]
    expected = layer.keys()[indices]
    layer.keep(indices)
    np.testing.assert_allclose(layer.keys(), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["int8", "int8 with an offset", "kivi4"])
def test_shifted_tokens_are_put_into_a_shifted_cache(name, rng):
    caches = [Model(FORMATS[name], seed) for seed in (1, 2)]
    for model, n, delta, start in zip(caches, (96, 32), (-7, 9), (4, 3), strict=True):
        model.append(n)
        model.shift(delta, ROPES[0], start, n)
    one, other = caches
    for start in (32, 64, 96):
        cache = one.cache.copy()
        cache.inject(other.cache, start, requantize=True)
        expected = np.concatenate([one.keys[:start], other.keys, one.keys[start + 32 :]])
        assert error_of(cache.k(0), expected) <= 1.5 * error_of(one.cache.k(0), one.keys)


@pytest.mark.parametrize("dtype", ["int8", "float32", "int4"])
def test_rows_of_a_prompt_windows_masks_and_batches_see_turned_keys(dtype, rng):
    cache = KVCache(2, H, D, dtype=dtype)
    keys, values = normal(rng, 2, 60, H, D)
    for layer in range(2):
        cache.append(layer, keys, values)
    cache.advance(60)
    cache.shift(-3, rope=[Rope(), None], start=4)
    cache.shift(5, rope=[Rope(base=99.0), None], start=20, stop=30)
    layer = cache.layer(0)
    query = normal(rng, 8, 2 * H, D)
    plain = kvedge.Float32KvLayer(None, H, D)
    plain.extend(layer.keys(), layer.values())
    bias = normal(rng, 2 * H, 8, 60)
    slopes = np.float32([0.1, 0.2, 0.3, 0.4])
    for options in (
        {},
        {"window": 9, "sink_tokens": 3},
        {"mask": bias, "softcap": 5.0},
        {"start": 22, "alibi_slopes": slopes, "sink_logits": slopes},
        {"causal": False},
    ):
        out = layer.attend(query, **options)
        expected = plain.attend(query, **options)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    both = kvedge.attend_batch([layer, cache.layer(1)], query[:2].copy())
    expected = np.stack([plain.attend(query[0]), cache.layer(1).attend(query[1])])
    np.testing.assert_allclose(both, expected, rtol=0, atol=1e-3)
    new_keys, new_values = normal(rng, 2, 2, 1, H, D)
    alone = [kvedge.QuantizedKvLayer(None, H, D) for _ in range(2)]
    for one in alone:
        one.extend(keys, values)
        one.shift(-9, rope=Rope())
    kvedge.append_batch(alone, new_keys, new_values)
    for one, key in zip(alone, new_keys, strict=True):
        np.testing.assert_allclose(one.keys()[-1:], key, rtol=0, atol=0.03)


def test_a_shift_there_and_back_leaves_nothing(rng, tmp_path):
    cache = KVCache(1, H, D)
    cache.append(0, *normal(rng, 2, 20, H, D))
    cache.advance(20)
    cache.save(tmp_path / "before")
    before = cache.k(0)
    for delta in (-7, 3, 5, -1):
        cache.shift(delta, rope=Rope(), start=2)
    np.testing.assert_array_equal(cache.k(0), before)
    cache.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()


def test_tokens_that_all_move_differently_are_stored_turned(rng):
    """Self-extend: groups of two share a position. Past 256 ranges the turned keys are stored."""
    layer = kvedge.QuantizedKvLayer(None, H, D)
    keys, values = normal(rng, 2, 600, H, D)
    layer.extend(keys, values)
    before = layer.keys()
    for t in range(1, 600):
        layer.shift(t // 2 - t, rope=Rope(), start=t, stop=t + 1)
    expected = np.stack([reference.rotate(k, t // 2 - t) for t, k in enumerate(before)])
    step = 1.5 * np.abs(before).max() / 127
    assert (np.abs(layer.keys() - expected) <= step).all()


def test_a_pool_takes_a_shifted_cache(rng):
    cache = KVCache(1, H, D)
    cache.append(0, *normal(rng, 2, 40, H, D))
    cache.advance(40)
    cache.shift(-5, rope=Rope(), start=3)
    paged = kvedge.PagedKvCache(kvedge.KvBlockPool(8, 16, 1, H, D))
    seq = paged.from_kv_cache(cache)
    np.testing.assert_allclose(paged.k(seq, 0), cache.k(0), rtol=0, atol=0.03)
    assert store_of(cache.layer(0)).turns is not None
