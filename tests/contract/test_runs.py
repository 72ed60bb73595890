"""``dtype="kivi4"`` and the others: runs of 32 tokens encoded together, everywhere alike."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.precise import (
    BESIDE_ROWS,
    DIM,
    HEADS,
    PartsMachine,
    bits,
    cache_bits,
    cache_of,
    layer_of,
    read,
    rows,
)
from helpers.reference import attention
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from support import read_positions_beside, rows_of_positions

import kvedge
from kvedge import KvBlockPool, KVCache, PagedKvCache, Rope, errors
from kvedge.core.registry import layer_types
from kvedge.layer.layer import store_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"
RUN = 32
BITS = {"kivi2": 2, "kivi4": 4, "kivi8": 8}
CLASSES = {"kivi2": kvedge.Kivi2KvLayer, "kivi4": kvedge.Kivi4KvLayer, "kivi8": kvedge.Kivi8KvLayer}
EIGHT_BITS = ["kivi8", "kivi8/int8", "int8/kivi8"]


def options_of(dtype, **options):
    """Of a cache of a format, or of two: "kivi4/int8"."""
    keys, _, values = dtype.partition("/")
    return {"dtype": keys, **({"value_dtype": values} if values else {}), **options}


def new_layer(dtype="kivi4", **options):
    return layer_of(dtype, **options)


# ---- the reference: written from the formula, a group at a time ----


def half_below(x):
    """The largest float16 that is at most x."""
    half = np.float16(x)
    half = np.nextafter(half, np.float16(-np.inf)) if np.float32(half) > x else half
    return np.float16(0) if half == 0 else half


def half_above(x):
    half = np.float16(x)
    half = np.nextafter(half, np.float16(np.inf)) if np.float32(half) < x else half
    return np.float16(0) if half == 0 else half


def of_group(x, bits):
    """Codes, step and smallest value of float32 numbers, and what they decode to."""
    most = np.float32(2**bits - 1)
    low = half_below(x.min())
    step = half_above((x.max() - np.float32(low)) / most)
    inverse = np.float32(1) / np.float32(step) if step > 0 else np.float32(0)
    codes = np.minimum(np.rint((x - np.float32(low)) * inverse), most)
    return (
        codes.astype(int),
        step,
        low,
        np.float32(low) + codes.astype(np.float32) * np.float32(step),
    )


def reference_run(x, bits, of_values):
    """A run (32, dim) of one head: its bytes, and what is read."""
    dim = x.shape[1]
    codes, decoded = np.zeros(x.shape, int), np.empty_like(x)
    steps, lows = [], []
    groups = [(slice(None), slice(d, d + 1)) for d in range(dim)]
    if of_values:
        groups = [
            (slice(t, t + 1), slice(d, min(d + 64, dim)))
            for d in range(0, dim, 64)
            for t in range(RUN)
        ]
    for group in groups:
        codes[group], step, low, decoded[group] = of_group(x[group], bits)
        steps.append(step), lows.append(low)
    of_word = 32 // bits
    lanes = codes.T if of_values else codes  # a word of 4 bytes has codes of one channel, or token
    words = [
        sum(int(code) << i * bits for i, code in enumerate(lane[first : first + of_word]))
        for first in range(0, lanes.shape[1], of_word)
        for lane in lanes
    ]
    return np.array(words, "<u4").tobytes() + np.array(steps + lows, "<f2").tobytes(), decoded


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 24), (5, 3), (64, 130), (1, 65)])
@pytest.mark.parametrize("dtype", CLASSES)
def test_stored_bytes_are_those_of_the_formula(dtype, dim, value_dim):
    keys, values = rows(0, 64, dim)[0], rows(1, 64, value_dim)[1]
    keys[..., 0] += 300  # a channel that is large in all tokens
    values[3], values[4, :, 0], values[5] = 0, 60000, -values[5] * 1e-6
    keys[32:, :, -1], keys[40] = -0.0, keys[41]
    layer = CLASSES[dtype](None, HEADS, dim, value_head_dim=value_dim)
    layer.extend(keys, values)
    runs = store_of(layer).snapshot().parts.runs
    for of_values, given_rows, got in ((0, keys, layer.keys()), (1, values, layer.values())):
        slab = runs[of_values]
        given_rows = given_rows.astype(np.float16).astype(
            np.float32
        )  # as the last tokens have them
        for run in range(2):
            for head in range(HEADS):
                x = given_rows[run * RUN : (run + 1) * RUN, head]
                stored, decoded = reference_run(x, BITS[dtype], of_values)
                assert slab[run, head].tobytes() == stored
                np.testing.assert_array_equal(got[run * RUN : (run + 1) * RUN, head], decoded)
    per_token = HEADS * (runs[0].shape[2] + runs[1].shape[2]) / RUN
    cache = KVCache(1, HEADS, dim, value_head_dim=value_dim, dtype=dtype)
    cache.append(0, keys, values)
    assert cache.used_bytes == 64 * int(np.ceil(per_token))


@pytest.mark.parametrize("dtype", CLASSES)
@pytest.mark.filterwarnings("error")
def test_the_largest_halves_are_stored_without_a_warning(dtype):
    """Steps as large as runs have them: half of the range below 0, half above."""
    layer = new_layer(dtype)
    x = np.where(np.arange(96 * HEADS * DIM) % 3 == 0, 65504, -65504).astype(np.float32)
    x = x.reshape(96, HEADS, DIM)
    layer.extend(x, x)
    step = 2 * 65504 / (2 ** BITS[dtype] - 1)
    np.testing.assert_allclose(read(layer), np.stack([x, x]), atol=0.51 * step * 1.001)
    query = rows(8, 1)[0][0].repeat(2, axis=0) * 1e-4
    wanted, _ = attention(query[None], *read(layer))
    atol = 2e-4 * np.abs(wanted).max()
    np.testing.assert_allclose(layer.attend(query), wanted[0], atol=atol)


@pytest.mark.parametrize(("keys", "values"), [("kivi4", "kivi2"), ("kivi2", "kivi8")])
def test_keys_and_values_may_be_in_runs_of_their_own(keys, values):
    """Each side is as by itself."""
    both = new_layer(keys, value_dtype=values, recent=5)
    alike = {dtype: new_layer(dtype, recent=5) for dtype in (keys, values)}
    for layer in (both, *alike.values()):
        layer.extend(*rows(6, 150))
    np.testing.assert_array_equal(both.keys(), alike[keys].keys())
    np.testing.assert_array_equal(both.values(), alike[values].values())
    assert (both.dtype, both.value_dtype) == (keys, values)
    query = rows(7, 3)[0].repeat(2, axis=1)
    wanted, _ = attention(query, *read(both))
    np.testing.assert_allclose(both.attend(query), wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", BESIDE_ROWS)
@pytest.mark.parametrize(
    "options", [{}, {"recent": 5, "sinks": 2}, {"group_size": 8, "scale_dtype": "float16"}]
)
def test_rows_beside_runs_are_as_by_themselves(dtype, options):
    """They come there with the runs, as the last tokens have them."""
    keys, values = dtype.split("/")
    if "group_size" in options and {"int8", "int4"}.isdisjoint((keys, values)):
        return
    both = new_layer(dtype, **options)
    tokens = rows(6, 150).astype(np.float16).astype(np.float32)
    both.extend(*tokens)
    assert (both.dtype, both.value_dtype) == (keys, values)
    runs, sinks = slice(both.sinks, 128), slice(0, both.sinks)
    for side, (name, got) in enumerate(zip((keys, values), read(both), strict=True)):
        own = options if name in ("int8", "int4") else {"sinks": both.sinks}
        alike = new_layer(name, **own)
        alike.extend(*tokens)
        np.testing.assert_array_equal(got[runs], read(alike)[side][runs])
        np.testing.assert_array_equal(got[128:], tokens[side][128:])
        np.testing.assert_array_equal(got[sinks], tokens[side][sinks])


@pytest.mark.parametrize("keys", ["int8", "int4", "fp8_e4m3", "float16"])
@pytest.mark.parametrize("recent_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["key_scale", "key_offset", "both"])
def test_keys_beside_runs_of_values_have_a_scale_and_an_offset(keys, recent_dtype, name):
    """Given or taken from the first tokens, token by token; a copy goes on alike."""
    tokens, auto = rows(7, 120), "auto"
    tokens[0, ..., 3] += 60
    if keys == "float16":
        auto = np.full((HEADS, DIM), 3, np.float32)
    names = ("key_scale", "key_offset") if name == "both" else (name,)
    options = dict.fromkeys(names, auto)
    if "key_offset" in names and keys not in ("int8", "int4"):
        with pytest.raises(errors.InvalidArgumentError, match="store keys as they are"):
            new_layer(f"{keys}/kivi4", **options)
        return
    layer = new_layer(f"{keys}/kivi4", recent_dtype=recent_dtype, **options)
    for t in range(120):
        layer.push(*tokens[:, t])
    query = rows(8, 1)[0][0].repeat(2, axis=0)
    wanted, wanted_lse = attention(query[None], *read(layer))
    out, lse = layer.attend(query, return_lse=True)
    np.testing.assert_allclose(out, wanted[0], atol=2e-4 * np.abs(wanted).max())
    np.testing.assert_allclose(lse, wanted_lse[0], atol=5e-4)
    size = {"int4": 10, "int8": 0.6, "fp8_e4m3": 4, "float16": 0.6}[keys]
    np.testing.assert_allclose(layer.keys(), tokens[0], atol=size)
    others = [layer.copy(), pickle.loads(pickle.dumps(layer))]
    assert all(bits(other) == bits(layer) for other in others)
    for each in (layer, *others):
        each.truncate(90)
        each.extend(*tokens[:, :70])
    assert all(bits(other) == bits(layer) for other in others)
    layer.clear()
    layer.extend(*tokens)
    np.testing.assert_allclose(layer.keys(), tokens[0], atol=size)


@pytest.mark.parametrize("start", [0, 45])
def test_a_long_prompt_takes_little_room_besides(start):
    """Runs are encoded in pieces, in a cache and in a pool."""
    prompt = rows(41, 20_000)
    cache, pool = (
        KVCache(1, HEADS, DIM, dtype="kivi4"),
        KvBlockPool(700, 32, 1, HEADS, DIM, "kivi4"),
    )
    paged = PagedKvCache(pool)
    seq = paged.new_sequence()
    cache.append(0, *rows(42, 200))
    paged.append(seq, 0, *rows(42, 200))
    cache.advance(200), paged.advance(seq, 200)
    cache.truncate(start), paged.truncate(seq, start)
    for append in (cache.append, lambda layer, *rows: paged.append(seq, layer, *rows)):
        tracemalloc.start()
        append(0, *prompt)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < prompt.nbytes / 4
    cache.advance(20_000), paged.advance(seq, 20_000)
    np.testing.assert_array_equal(cache.k(0), paged.k(seq, 0))
    np.testing.assert_array_equal(cache.v(0), paged.v(seq, 0))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 95, 96, 100, 200])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_going_back_into_a_run_keeps_what_is_read(dtype, n):
    layer = new_layer(dtype, recent=8)
    tokens = rows(11, 500)
    layer.extend(*tokens[:, :499])
    layer.extend(*tokens[:, 499:])
    before = read(layer)[:, :n]
    layer.truncate(n)
    np.testing.assert_array_equal(read(layer), before)
    layer.extend(*tokens[:, :70])
    np.testing.assert_allclose(read(layer)[:, :n], before, atol=0.03)
    np.testing.assert_array_equal(
        read(layer)[:, -8:], tokens[:, 62:70].astype(np.float16).astype(np.float32)
    )
    fresh = new_layer(dtype, recent=8)
    fresh.extend(*before)
    fresh.extend(*tokens[:, :70])
    whole = n // RUN * RUN  # encoded anew are the tokens of the run that was cut
    np.testing.assert_array_equal(read(fresh)[:, whole:], read(layer)[:, whole:])


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_window_slides_over_runs(dtype):
    tokens = rows(12, 500)
    layer = new_layer(dtype, window=70, recent=10)
    query = rows(13, 1)[0][0].repeat(2, axis=0)
    for t in range(500):
        layer.push(*tokens[:, t])
        n = len(layer)
        np.testing.assert_allclose(read(layer), tokens[:, t + 1 - n : t + 1], atol=0.03)
        if t % 50 == 49:
            wanted, _ = attention(query[None], *read(layer), window=70)
            got = layer.attend(query)
            np.testing.assert_allclose(got, wanted[0], atol=2e-4 * np.abs(wanted).max())
            assert bits(pickle.loads(pickle.dumps(layer))) == bits(layer)
    assert store_of(layer).config.capacity <= 512


@pytest.mark.parametrize(
    "options",
    [*({"dtype": dtype} for dtype in EIGHT_BITS), {"dtype": "int8/kivi8", "key_scale": "auto"}],
    ids=str,
)
def test_keeping_dropping_and_shifting(options):
    tokens = rows(14, 200)
    layer = new_layer(recent=10, sinks=4, **options)
    layer.extend(*tokens)
    whole = read(layer)
    kept = np.r_[0:2, 30:100, 185:196, 198:200]
    layer.keep(kept)
    np.testing.assert_allclose(read(layer), whole[:, kept], atol=0.05)
    np.testing.assert_array_equal(read(layer)[:, -8:], whole[:, kept[-8:]])
    layer.drop_first(37)
    assert len(layer) == len(kept) - 37
    np.testing.assert_allclose(read(layer), whole[:, kept[37:]], atol=0.05)
    before, rope = read(layer), Rope()
    layer.shift(-7, rope=rope, start=3)
    np.testing.assert_allclose(layer.keys()[3:], rope.rotate(before[0, 3:], -7), atol=0.1)
    np.testing.assert_allclose(layer.keys()[:3], before[0, :3], atol=0.05)
    np.testing.assert_array_equal(layer.values(), before[1])
    layer.clear()
    layer.extend(*tokens)
    np.testing.assert_array_equal(read(layer), whole)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    for recent_dtype, dtype in itertools.product(
        ("float16", "float32"), ("kivi4", "kivi4/int8", "int8/kivi4")
    ):
        layer = new_layer(dtype, recent=4, recent_dtype=recent_dtype)
        layer.extend(*rows(15, 50))
        before = bits(layer)
        for tokens, at in ((1, 0), (40, 39), (400, 3)):
            for wrong, error in (
                (7e4, errors.ScaleRangeError),
                (np.nan, errors.NonFiniteInputError),
            ):
                huge = rows(16, tokens)
                huge[1, at] = wrong
                with pytest.raises(error):
                    layer.extend(*huge)
                assert bits(layer) == before
    limited = CLASSES["kivi4"](60, HEADS, DIM)
    limited.extend(*rows(15, 58))
    before = bits(limited)
    with pytest.raises(errors.CapacityExceededError):
        limited.extend(*rows(16, 3))
    assert bits(limited) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"group_size": 8}, "no scales"),
        ({"value_dtype": "float16", "group_size": 8}, "no scales"),
        ({"value_dtype": "int8", "key_scale": np.ones((HEADS, DIM), np.float32)}, "no key_scale"),
        ({"value_dtype": "int8", "key_offset": "auto"}, "store keys as they are"),
        ({"key_scale": np.ones((HEADS, DIM), np.float32)}, "no key_scale"),
        ({"key_offset": "auto"}, "no scales|key_offset"),
        ({"recent_dtype": "kivi2"}, "recent_dtype must be"),
    ],
)
def test_options_are_checked(options, match):
    with pytest.raises(errors.InvalidArgumentError, match=match):
        new_layer(**options)


# ---- caches ----


def new_cache(tokens, layers=2, **options):
    return cache_of(tokens, layers, **{"dtype": "kivi4", **options})


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_ranges(dtype):
    tokens = rows(23, 230)
    cache = new_cache(tokens, **options_of(dtype))
    for start, stop in ((0, 230), (32, 230), (64, 200), (40, 199), (7, 40), (9, 9)):
        part = cache.extract(start, stop)
        np.testing.assert_allclose(part.k(0), tokens[0, start:stop], atol=0.05)
        part.inject(cache.extract(200, 230))
        np.testing.assert_allclose(part.v(1)[-30:], tokens[1, 200:], atol=0.05)
        np.testing.assert_allclose(part.v(1)[: stop - start], tokens[1, start:stop], atol=0.05)
    np.testing.assert_array_equal(cache.extract(64, 160).k(0), cache.k(0)[64:160])
    plain = KVCache(2, HEADS, DIM)
    plain.inject(cache, requantize=True)
    np.testing.assert_allclose(plain.k(0), tokens[0], atol=0.06)


@pytest.mark.parametrize("options", [{}, {"recent": 40, "sinks": 37, "recent_dtype": "float32"}])
@pytest.mark.parametrize("start", [0, 32, 160, 192, 224, 256, 288])
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, "int8/kivi8 scaled"])
def test_tokens_are_put_in_place_of_whole_runs(dtype, start, options):
    """Those before and after them stay, to the byte."""
    dtype, _, scaled = dtype.partition(" ")
    if scaled:
        scale = np.random.default_rng(3).uniform(0.5, 2, (2, HEADS, DIM))
        options = {**options, "key_scale": scale.astype(np.float32)}
    options = options_of(dtype, **options)
    cache = new_cache(rows(30, 300), **options)
    other = new_cache(rows(31, 64), **options)
    before = [read(cache.layer(i)) for i in range(2)]
    mark, stop = cache.snapshot(), start + 64
    cache.inject(other, start=start)
    assert mark.is_stale and len(cache) == max(300, stop)
    for i in range(2):
        got = read(cache.layer(i))
        old = min(start, 260)  # what was recent may be no more
        np.testing.assert_array_equal(got[:, :old], before[i][:, :old])
        np.testing.assert_allclose(got[:, :start], before[i][:, :start], atol=0.05)
        np.testing.assert_array_equal(got[:, stop:], before[i][:, stop:])
        np.testing.assert_allclose(got[:, start:stop], read(other.layer(i)), atol=0.05)
        query = rows(32, 1)[0][0].repeat(2, axis=0)
        wanted, _ = attention(query[None], *got)
        atol = 2e-4 * np.abs(wanted).max()
        np.testing.assert_allclose(cache.attend(i, query), wanted[0], atol=atol)
    twin = pickle.loads(pickle.dumps(cache))
    for each in (cache, twin):
        each.truncate(len(each) - 50)
        each.push_step(*rows(33, 2))
    assert cache_bits(twin) == cache_bits(cache)


@pytest.mark.parametrize("start", [1, 31, 200, 240])
def test_tokens_are_put_in_place_of_no_part_of_a_run(start):
    cache, other = new_cache(rows(30, 300)), new_cache(rows(31, 60))
    before = cache_bits(cache)
    with pytest.raises(errors.InvalidArgumentError, match="multiple of 32"):
        cache.inject(other, start=start if start != 200 else 192)
    assert cache_bits(cache) == before


# ---- anything in any order ----


class RunsMachine(PartsMachine):
    """Close to what was given, and last tokens as float16 has them."""

    @initialize(
        dtype=st.sampled_from(EIGHT_BITS),
        recent=st.sampled_from([0, 1, 7, 40]),
        sinks=st.sampled_from([0, 6]),
    )
    def start(self, dtype, recent, sinks):
        self.begin(new_layer(dtype, recent=recent, sinks=sinks))

    def is_read_as(self, got, n):
        np.testing.assert_allclose(got, self.tokens, atol=0.025 * self.anew)
        precise = slice(max(self.base, n - self.layer.recent), n)
        np.testing.assert_array_equal(
            got[:, precise], self.tokens[:, precise].astype(np.float16).astype(np.float32)
        )


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(stateful_step_count=20)


# ---- readers beside a writer ----


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("kivi8", {}),
        ("kivi4", {"recent": 20}),
        ("int8", {"recent": 20, "sinks": 3}),
        ("int8", {"value_dtype": "kivi8"}),
        ("kivi4", {"value_dtype": "int8", "recent": 20}),
    ],
)
def test_readers_beside_a_writer_see_whole_prefixes(dtype, options):
    """However far the writer is."""
    classes = {**CLASSES, "int8": kvedge.QuantizedKvLayer}
    layer, query = classes[dtype](None, 1, 8, **options), np.zeros((1, 8), np.float32)
    layer.push(query, query)

    def write():
        for step in [1] * 300 + [5, 100, 33, 400] * 2 + [1] * 200:
            values = rows_of_positions(len(layer), step)
            layer.extend(np.zeros_like(values), values)

    read_positions_beside(write, lambda: layer.values()[:, 0], lambda: layer.attend(query))


# ---- files that earlier versions wrote ----


@pytest.mark.parametrize("dtype", CLASSES)
def test_old_files_decode_to_the_same_bytes(dtype, tmp_path):
    with np.load(FIXTURES / "v1.npz") as arrays:
        expected = dict(arrays)
    old = KVCache.load(FIXTURES / f"v2-{dtype}.safetensors")
    new = KVCache(2, HEADS, 40, dtype=dtype, recent=4, sinks=1)
    for i in range(2):
        new.append(i, expected["keys"], expected["values"])
    new.advance(len(expected["keys"]))
    for cache in (old, new):
        assert cache.k(1).tobytes() == expected[f"{dtype}.keys"].tobytes()
        assert cache.v(1).tobytes() == expected[f"{dtype}.values"].tobytes()
    new.save(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == (FIXTURES / f"v2-{dtype}.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", CLASSES)
@pytest.mark.parametrize("precision_bits", [None, 8, 16, 24])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_key_thousands_of_times_the_others_of_its_run_leaves_their_scores(
    dtype, precision_bits, is_hidden
):
    rng = np.random.default_rng(6)
    for size, sharpness in itertools.product([1e3, 3e4], [1, 6]):
        layer = CLASSES[dtype](capacity=96, num_kv_heads=2, head_dim=64)
        keys, values = rng.standard_normal((2, 96, 2, 64)).astype(np.float32)
        keys[40] = np.clip(keys[40] * np.float32(size), -6e4, 6e4)
        layer.extend(keys, values)
        query = rng.standard_normal((1, 4, 64)).astype(np.float32) * np.float32(sharpness)
        mask = np.ones((1, 96), bool)
        mask[0, 40] = not is_hidden
        out = layer.attend(query, mask=mask, precision_bits=precision_bits)
        wanted, _ = attention(query, *read(layer), mask=mask)
        allowed = {8: 1e-3, 16: 4e-4}.get(precision_bits, 2e-4)
        np.testing.assert_allclose(out, wanted, atol=allowed * np.abs(wanted).max())


@pytest.mark.parametrize("tokens", [1, 20, 100])
@pytest.mark.parametrize("drop", [64, 70, 83])
def test_a_copy_whose_run_has_lost_tokens_stores_what_the_layer_stores(drop, tokens):
    rows = np.random.default_rng(0).standard_normal((190, 2, 16)).astype(np.float32)
    layer = layer_types["kivi8"](num_kv_heads=2, head_dim=16)
    layer.extend(rows[:90], rows[:90])
    layer.drop_first(drop)
    other = layer.copy()
    for each in (layer, other):
        each.extend(rows[90 : 90 + tokens], rows[90 : 90 + tokens])
    np.testing.assert_array_equal(layer.keys(), other.keys())
    np.testing.assert_array_equal(layer.values(), other.values())
