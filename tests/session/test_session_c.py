"""Session files in C: what Python writes, a program in C reads and writes again, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fixtures import make
from session_support import (
    DIM,
    HEADS,
    LAYERS,
    feed,
    filled_cache,
    forge,
    name_of_case,
)
from state_support import FORGED, KV, OF_STATES, new_cache, new_state, of_states, rewritten
from state_support import feed as feed_states
from state_support import forge as forge_states
from support import cache_content, normal

from kvedge import KVCache, Rope
from kvedge.core.formats import DTYPES, FORMATS

FIXTURES = Path(make.__file__).parent

TESTS = Path(__file__).parent.parent
SCALE = np.linspace(0.2, 5, HEADS * DIM, dtype=np.float32).reshape(HEADS, DIM)


def assert_copied(copy, cache, tmp_path, **options):
    path, again = tmp_path / "python.safetensors", tmp_path / "c.safetensors"
    cache.save(path, **options)
    assert copy(path, again) == ""
    assert again.read_bytes() == path.read_bytes()
    loaded = KVCache.load(again)
    assert cache_content(loaded) == cache_content(cache)
    assert loaded.metadata == options.get("metadata", cache.metadata)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_seq_len": 32},
        {"value_head_dim": 24},
        {"key_scale": np.stack([SCALE] * LAYERS)},
        {"key_scale": "auto"},
        {"window": 4},
        {"window": [None, 6]},
        {"value_rotation": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", FORMATS)
def test_c_copies_a_session_to_the_byte(copy, tmp_path, rng, dtype, options):
    cache = KVCache(LAYERS, HEADS, DIM, dtype=dtype, **options)
    fill(cache, rng)
    assert_copied(copy, cache, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 16},
        {"scale_dtype": "float16", "group_size": 24},
        {"key_offset": np.stack([SCALE] * LAYERS)},
        {"key_offset": "auto", "key_scale": "auto"},
        {"value_head_dim": 64, "group_size": 48},
        {"value_dtype": "float16", "scale_dtype": "float16"},
        {"key_dtype": "float32", "scale_dtype": "float16"},
    ],
    ids="-".join,
)
def test_c_copies_what_formats_with_scales_have(copy, tmp_path, rng, options):
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    fill(cache, rng)
    assert_copied(copy, cache, tmp_path)


def fill(cache, rng, tokens=9):
    for i in range(cache.num_layers):
        layer = cache.layer(i)
        keys = normal(rng, tokens, layer.num_kv_heads, layer.head_dim)
        cache.append(i, keys, normal(rng, tokens, layer.num_kv_heads, layer.value_head_dim))
    cache.advance(tokens)


def test_c_copies_layers_that_differ(copy, tmp_path, rng):
    shapes = [
        {"num_kv_heads": 2, "head_dim": 40, "group_size": 8},
        {"num_kv_heads": 1, "head_dim": 24, "dtype": "float32", "window": 3},
        {"num_kv_heads": 2, "head_dim": 40, "scale_dtype": "float16", "value_head_dim": 8},
        {"num_kv_heads": 4, "head_dim": 40, "dtype": "fp8_e5m2"},
        {"num_kv_heads": 2, "head_dim": 33, "dtype": "int4"},
        {"num_kv_heads": 2, "head_dim": 40, "value_rotation": True},
        {"num_kv_heads": 2, "head_dim": 40, "value_dtype": "int4", "group_size": 16},
        {"num_kv_heads": 2, "head_dim": 24, "dtype": "float16", "value_dtype": "float32"},
    ] * 3  # names of layers are sorted as text: 10 before 2
    for layers in (shapes, shapes[1:]):
        cache = KVCache(layers=layers)
        fill(cache, rng)
        assert_copied(copy, cache, tmp_path)


# ---- parts: first and last tokens in another format, runs ----------------------------------------

PARTS = [
    {"recent": 4},
    {"sinks": 3},
    {"recent": 70, "sinks": 40, "value_head_dim": 24},
    {"recent": 4, "recent_dtype": "bfloat16", "max_seq_len": 400},
    {"recent": 3, "sinks": 2, "recent_dtype": "float32"},
    {"recent": 4, "recent_dtype": "bfloat16", "window": 6},
    {"recent": 33, "window": [None, 40]},
    {"recent": 4, "value_rotation": True},
]


RUNS_BESIDE_ROWS = ["kivi4/int8", "int8/kivi2", "float16/kivi8", "kivi8/fp8_e4m3", "int4/kivi4"]


def with_parts(rng, tokens, dtype="int8", **options):
    """Of a format, or of two, such as "kivi4/int8"."""
    dtype, _, values = dtype.partition("/")
    if values:
        options["value_dtype"] = values
    cache = KVCache(LAYERS, HEADS, DIM, dtype=dtype, **options)
    if tokens:
        fill(cache, rng, tokens)
    return cache


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", PARTS, ids=str)
@pytest.mark.parametrize(
    "dtype", [*(name for name in DTYPES if name != "q8_0"), "kivi8/kivi2", *RUNS_BESIDE_ROWS]
)
def test_c_copies_first_and_last_tokens_and_runs_to_the_byte(copy, tmp_path, rng, dtype, options):
    for tokens in (0, 9, 150):
        assert_copied(copy, with_parts(rng, tokens, dtype, **options), tmp_path)


@pytest.mark.parametrize("dtype", ["q8_0", "q8_0/int8", "kivi4/q8_0", "q8_0/kivi8"])
@pytest.mark.parametrize("options", [{}, {"recent": 3, "sinks": 2}], ids=str)
def test_c_copies_rows_that_hold_their_scales(copy, tmp_path, rng, dtype, options):
    dtype, _, values = dtype.partition("/")
    cache = KVCache(LAYERS, HEADS, 64, dtype=dtype, value_dtype=values or None, **options)
    for tokens in (9, 150):
        for layer in range(LAYERS):
            cache.append(layer, *normal(rng, 2, tokens, HEADS, 64))
        cache.advance(tokens)
        assert_copied(copy, cache, tmp_path)


@pytest.mark.parametrize("precise", ["float32", "float16", "bfloat16"])
def test_first_and_last_keys_are_stored_without_key_vectors(copy, tmp_path, rng, precise):
    options = {"recent": 5, "sinks": 2, "recent_dtype": precise}
    vectors = {"key_scale": np.stack([SCALE] * LAYERS)}
    assert_copied(copy, with_parts(rng, 20, "float16", **options, **vectors), tmp_path)
    vectors["key_offset"] = np.stack([SCALE] * LAYERS)
    scales = {"group_size": 16, "scale_dtype": "float16"}
    for dtype in ("int8", "int8/kivi4"):
        assert_copied(copy, with_parts(rng, 80, dtype, **options, **vectors, **scales), tmp_path)


@pytest.mark.parametrize("name", ["int8-rows", "int8-runs"])
def test_c_says_which_recent_dtypes_it_reads(copy, tmp_path, name):
    again = tmp_path / "c.safetensors"
    said = copy(FIXTURES / "recent" / f"{name}.safetensors", again)
    assert "recent_dtype is not float32, float16 or bfloat16" in said
    assert not again.exists()


@pytest.mark.parametrize("dtype", RUNS_BESIDE_ROWS)
def test_scales_beside_runs_are_copied(copy, tmp_path, rng, dtype):
    options = {"key_scale": "auto", "recent": 5}
    if {"int8", "int4"} & {*dtype.split("/")}:
        options |= {"group_size": 16, "scale_dtype": "float16"}
    for recent_dtype in ("float16", "float32"):
        cache = with_parts(rng, 150, dtype, recent_dtype=recent_dtype, **options)
        assert_copied(copy, cache, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["int4", "kivi2", "kivi4", "kivi8", *RUNS_BESIDE_ROWS])
@pytest.mark.parametrize("length", [250, 224, 130, 45, 64, 1, 0])
def test_c_copies_layers_that_went_back(copy, tmp_path, rng, dtype, length):
    """Further than last tokens reach: they end inside a run, and nothing is in last."""
    cache = with_parts(rng, 300, dtype, recent=40, sinks=5)
    cache.truncate(length)
    assert_copied(copy, cache, tmp_path)
    fill(cache, rng, 7)
    assert_copied(copy, cache, tmp_path)


def test_c_copies_parts_of_layers_that_differ(copy, tmp_path, rng):
    shape = {"num_kv_heads": 2, "head_dim": 40}
    shapes = [
        {**shape, "dtype": "kivi4"},
        {**shape, "dtype": "kivi4", "value_rotation": True},
        {**shape, "group_size": 8, "recent": 4, "recent_dtype": "bfloat16"},
        {**shape, "dtype": "kivi2", "recent": 8, "sinks": 3, "recent_dtype": "float32"},
        {"num_kv_heads": 1, "head_dim": 24, "dtype": "float32", "window": 3},
        {**shape, "dtype": "kivi4", "window": 50},
        {**shape, "dtype": "kivi4", "value_dtype": "int8", "group_size": 8, "window": 60},
        {**shape, "value_dtype": "kivi2", "scale_dtype": "float16", "recent": 2},
        {**shape, "dtype": "int4", "value_dtype": "int8", "sinks": 2, "scale_dtype": "float16"},
        {**shape},
    ] * 2
    for layers in (shapes, shapes[1:], shapes[3:]):
        cache = KVCache(layers=layers)
        for n in (40, 90, 3):
            fill(cache, rng, n)
            assert_copied(copy, cache, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("truncated", [None, 45, 64, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8", "recent": 8},
        {"dtype": "int4", "sinks": 3, "recent": 8, "recent_dtype": "float32"},
        {"dtype": "float16", "sinks": 90},
        {"dtype": "int8", "recent": 8, "window": 40},
        {"dtype": "kivi2", "recent": 96, "sinks": 4},
        {"dtype": "kivi4"},
        {"dtype": "kivi8", "recent": 5, "sinks": 70, "recent_dtype": "bfloat16"},
        {"dtype": "kivi4", "window": 50, "value_head_dim": 24},
        {"dtype": "kivi4/int8", "recent": 40, "value_rotation": True},
        {"dtype": "int8/kivi2", "recent": 5, "sinks": 3, "key_scale": np.stack([SCALE] * LAYERS)},
        {"dtype": "kivi4/int8", "window": 50, "value_head_dim": 24},
    ],
    ids=str,
)
def test_c_attends_to_parts_and_appends_as_python_does(copy, tmp_path, rng, options, truncated):
    """What C appends, attends to and writes, Python reads as if it had done so itself."""
    path, again, rows, out = (tmp_path / name for name in ("python", "c", "rows", "out"))
    group, queries = 2, 3
    for tokens, more in ((3, 0), (77, 0), (77, 150), (200, 9), (0, 60)):
        cache = with_parts(rng, tokens, **options)
        if truncated is not None and "window" not in options:
            cache.truncate(min(truncated, tokens))
        cache.save(path)
        width = cache.layer(0).value_head_dim
        given, expected = [], []
        for i in range(LAYERS):
            keys = normal(rng, more, HEADS, DIM)
            values = normal(rng, more, HEADS, width)
            query = normal(rng, queries, HEADS * group, DIM)
            given += [keys, values, query]
            if more:
                cache.append(i, keys, values)
        cache.advance(more)
        n = min(queries, len(cache))
        for i in range(LAYERS):
            given[3 * i + 2] = given[3 * i + 2][:n]
            expected.append(cache.attend(i, given[3 * i + 2]))
        rows.write_bytes(b"".join(array.tobytes() for array in given))
        assert copy(path, again, rows, out, more, n, group) == ""
        got = np.fromfile(out, np.float32).reshape(LAYERS, n, HEADS * group, width)
        bound = 2e-4 * np.abs(expected).max()  # the contract's: Python may be of another path
        np.testing.assert_allclose(got, expected, atol=bound, rtol=0)
        cache.save(path)
        assert again.read_bytes() == path.read_bytes() or "window" in options
        loaded = KVCache.load(again)
        assert len(loaded) == len(cache)
        for i in range(LAYERS):
            held = min(len(loaded.k(i)), len(cache.k(i)))
            np.testing.assert_array_equal(loaded.k(i)[-held:], cache.k(i)[-held:])
            np.testing.assert_array_equal(loaded.v(i)[-held:], cache.v(i)[-held:])
        one = normal(rng, HEADS, DIM), normal(rng, HEADS, width), normal(rng, HEADS, DIM)
        for both in (loaded, cache):  # go on alike
            for i in range(LAYERS):
                both.append(i, *one[:2])
            both.advance()
        for i in range(LAYERS):
            np.testing.assert_array_equal(loaded.attend(i, one[2]), cache.attend(i, one[2]))
        assert_copied(copy, loaded, tmp_path)


# ---- metadata, other files -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_c_copies_any_metadata(copy, tmp_path, rng, tokens):
    metadata = {
        "": "empty",
        "quotes": '"\\"/ and \b\f\n\r\t\0\x1f\x7f',
        "ключ": "значение",
        "emoji 😀\uffff": "\u2028\U0010ffff\xa0é",
        "json": json.dumps({"é": ["😀"]}),
        "z" * 300: "long" * 500,
    }
    cache = KVCache(LAYERS, HEADS, DIM)
    if tokens:
        feed(cache, rng, tokens)
    assert_copied(copy, cache, tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    "path",
    sorted([*(TESTS / "fixtures").glob("*.safetensors"), TESTS / "fixtures/states/v3.safetensors"]),
    ids=lambda p: p.stem,
)
def test_c_copies_files_of_earlier_versions(copy, tmp_path, path):
    """Their fields were in another order, so as a new save of them."""
    assert copy(path, tmp_path / "c.safetensors") == ""
    KVCache.load(path).save(tmp_path / "python.safetensors")
    copied = (tmp_path / "c.safetensors").read_bytes()
    assert copied == (tmp_path / "python.safetensors").read_bytes()


def test_c_reads_what_the_safetensors_package_writes(copy, tmp_path, rng):
    path, again = tmp_path / "python.safetensors", tmp_path / "c.safetensors"
    cache = filled_cache(rng)
    cache.save(path, metadata={"b": "2", "a": "1"})
    data = path.read_bytes()
    forge(path)  # the same tensors, the fields in another order
    assert copy(path, again) == ""
    assert again.read_bytes() == data


def test_c_says_that_keys_are_still_to_be_turned(copy, tmp_path, rng):
    path, again = tmp_path / "python.safetensors", tmp_path / "c.safetensors"
    cache = filled_cache(rng)
    cache.shift(-3, rope=Rope(), start=1)
    cache.save(path)
    np.testing.assert_array_equal(KVCache.load(path).k(0), cache.k(0))
    assert "a session file is damaged or none" in copy(path, again)
    cache.requantize("int8")
    cache.save(path)
    assert copy(path, again) == ""
    np.testing.assert_array_equal(KVCache.load(again).k(0), cache.k(0))


# ---- states --------------------------------------------------------------------------------------


def more_layers(rng):
    """Twelve states and runs among them, so that layer 10 is before layer 2 in the file."""
    layers = [new_state() for _ in range(12)]
    layers.insert(5, {"dtype": "kivi4", "recent_dtype": "float16"})
    return feed_states(KVCache(layers=layers, max_seq_len=99, **KV), rng, 40)


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: feed_states(new_cache(), rng, 7),
        lambda rng: feed_states(of_states(), rng, 7),
        lambda rng: of_states(),
        more_layers,
    ],
    ids=["beside", "alone", "empty", "many"],
)
def test_c_copies_states_to_the_byte(copy, tmp_path, rng, make):
    path, again = tmp_path / "python.safetensors", tmp_path / "c.safetensors"
    make(rng).save(path, metadata={"a": "b"})
    assert copy(path, again) == ""
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("change", [*FORGED, *map(rewritten, OF_STATES)], ids=name_of_case)
def test_forged_states_are_refused_by_c_as_well(tmp_path, rng, change, refused):
    path = tmp_path / "forged.safetensors"
    cache = new_cache() if change in FORGED else of_states()
    feed_states(cache, rng, 7).save(path)
    forge_states(path, change)
    refused(path)
