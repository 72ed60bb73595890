"""Session files in C: what Python writes, a program in C reads and writes again, to the byte."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from session_support import DIM, HEADS, LAYERS, feed, filled_cache, forge, put
from support import cache_content, normal

from kvedge import KVCache, c_library, errors
from kvedge.core.formats import FORMATS

TESTS = Path(__file__).parent.parent
SCALE = np.linspace(0.2, 5, HEADS * DIM, dtype=np.float32).reshape(HEADS, DIM)

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy a file by the C API; the reason where it is refused."""
    try:
        flags = f"{c_library.compile_flags()} {c_library.link_flags()}".split()
    except errors.BackendUnavailableError:
        pytest.skip("needs the C library")
    program = tmp_path_factory.mktemp("c") / "copy_session"
    source = TESTS / "helpers" / "copy_session.c"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", str(source)]
    command += [*flags, "-o", str(program)]
    subprocess.run(command, check=True)

    def run(source, target):
        done = subprocess.run(
            [program, source, target], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode in (0, 3), done.stderr
        return done.stderr

    return run


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
        {"num_kv_heads": 2, "head_dim": 40, "value_dtype": "int4", "group_size": 16},
        {"num_kv_heads": 2, "head_dim": 24, "dtype": "float16", "value_dtype": "float32"},
    ] * 3  # names of layers are sorted as text: 10 before 2
    for layers in (shapes, shapes[1:]):
        cache = KVCache(layers=layers)
        fill(cache, rng)
        assert_copied(copy, cache, tmp_path)


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
    "path", sorted((TESTS / "fixtures").glob("*.safetensors")), ids=lambda p: p.stem
)
def test_c_copies_files_of_earlier_versions(copy, tmp_path, path):
    """Their fields were in another order, so as a new save of them."""
    if "recent" in path.stem:  # C layers hold a token once
        assert "does not know" in copy(path, tmp_path / "c.safetensors")
        return
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


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (put("layers.0.key_codes", (0, 0, 0), -128), {}),
        (put("layers.1.value_scales", 2, np.nan), {}),
        (put("layers.1.key_scales", 2, -1), {}),
        (None, {"num_layers": "3"}),
        (None, {"length": "8"}),
        (None, {"dtype": "float32"}),
        (None, {"format_version": "2"}),
        (None, {"other": "field"}),
        (None, {"key_scale": ""}),
        (None, {"head_dim": "0040"}),
        (None, {"layers": "[{},{}]"}),
    ],
    ids=str,
)
def test_c_refuses_forged_files_as_python_does(copy, tmp_path, rng, change, fields):
    path = tmp_path / "forged.safetensors"
    filled_cache(rng).save(path)
    forge(path, change, **fields)
    with pytest.raises(errors.CorruptFileError):
        KVCache.load(path)
    assert "a session file is damaged or none" in copy(path, tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()
