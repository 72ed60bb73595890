"""Files of a prefix store in C: a path of them fills layers with what PrefixStore.load gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvedge import KVCache, PrefixStore
from kvedge.errors import CorruptFileError
from kvedge.store import files
from kvedge.store.entries import BLOCK

LAYERS, HEADS, DIM = 2, 2, 32
OPTIONS = [
    {"dtype": "int8"},
    {"dtype": "int8", "key_scale": "auto", "recent": 20},
    {"dtype": "int4", "group_size": 16, "scale_dtype": "float16"},
    {"dtype": "auto"},
    {"dtype": "small"},
    {"dtype": "small", "recent": 0, "layers": [{"window": 45, "sinks": 0}, {}]},
    {"dtype": "float16", "layers": [{"window": 40}, {}]},
    {"dtype": "bfloat16", "window": 300},
    {"dtype": "fp8_e4m3"},
]


def saved(folder, options, n):
    """A store of `n` tokens, and its cache's options."""
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    rng = np.random.default_rng(0)
    for start in range(0, n, 100):
        for layer in range(LAYERS):
            rows = rng.standard_normal((2, HEADS, min(100, n - start), DIM), dtype=np.float32)
            cache.append(layer, *rows.swapaxes(1, 2))
        cache.advance(min(100, n - start))
    PrefixStore(folder).save(cache, np.arange(n), model="m")


def path_to(folder, stop):
    """The files of a path by what they say themselves, as an embedder finds them."""
    there = {path.stem: files.read_about(str(path))[0] for path in folder.glob("*.safetensors")}
    ends = [name for name, about in there.items() if about.stop == stop]
    path = [sorted(ends, key=lambda name: there[name].kind)[-1]]  # a checkpoint, if there is
    while there[path[0]].parent:
        path.insert(0, there[path[0]].parent)
    return [folder / f"{name}.safetensors" for name in path]


def loaded(folder, options, stop):
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    assert PrefixStore(folder).load(cache, np.arange(stop), model="m") == stop
    return cache


@pytest.mark.parametrize("n", [100, 256, 768, 900])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_c_fills_layers_with_what_python_loads(copy, tmp_path, options, n):
    saved(tmp_path, options, n)
    expected, found = tmp_path / "expected", tmp_path / "found"
    loaded(tmp_path, options, n).save(expected)
    assert copy(expected, found, "path", *path_to(tmp_path, n)) == ""
    assert found.read_bytes() == expected.read_bytes()
