"""What the tests of saving and loading share: caches, files that are wrong, another process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support import normal

from kvedge import KVCache, errors
from kvedge.files.header import digest
from kvedge.files.tensors import typed

LAYERS, HEADS, DIM, TOKENS = 2, 2, 40, 9


def filled_cache(rng, tokens=TOKENS, **options):
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    feed(cache, rng, tokens)
    return cache


def feed(cache, rng, tokens):
    kv = normal(rng, cache.num_layers, 2, tokens, cache.num_kv_heads, cache.head_dim)
    for i in range(cache.num_layers):
        cache.append(i, kv[i, 0], kv[i, 1])
    cache.advance(tokens)
    return kv


def small_file(path):
    """A small file for tests that go through it byte by byte: stored keys and values are equal."""
    cache = KVCache(1, 1, 2, key_offset=np.full((1, 1, 2), 3, np.float32))
    cache.push_step(np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), -2, np.float32))
    cache.save(path, metadata={"note": "x"})
    return path.read_bytes()


def assert_corrupt(path, data=None, match=None, mmap=False):
    """Loading says that the file is corrupt, names it, and says what is wrong."""
    if data is not None:
        path.unlink(missing_ok=True)  # a new file is quicker than one cut and written again
        path.write_bytes(data)
    with pytest.raises(errors.CorruptFileError) as caught:
        KVCache.load(path, mmap=mmap)
    message = str(caught.value)
    del caught  # it is in a cycle, which would keep what was reserved before the fault was found
    assert str(path) in message and len(message) > len(str(path)) + 10
    if match is not None:
        assert match in message, message


def forge(path, change=None, **fields):
    """Rewrite a saved file with some tensors or metadata changed, and a digest that fits."""
    peer = pytest.importorskip("safetensors.numpy")
    tensors = peer.load_file(path)
    data = path.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    for name, value in fields.items():
        if value is None:
            del metadata[name]
        else:
            metadata[name] = value
    if change is not None:
        change(tensors)
    with contextlib.suppress(KeyError):  # a type that kvedge never writes has no digest that fits
        metadata["sha256"] = digest(metadata, typed(tensors))
    peer.save_file(tensors, path, metadata=metadata)


def name_of_case(value):
    """An id that is the same in every process, of a change too."""
    return value.__qualname__ if callable(value) else str(value)


def put(name, index, value):
    def change(tensors):
        tensors[name][index] = value

    return change


def replaced(name, function):
    def change(tensors):
        tensors[name] = function(tensors[name])

    return change


def run(script, *args, **variables):
    """Run a script in a new process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
