"""What caches with first and last tokens in another format, and those of runs, promise alike."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers.precise import DIM, HEADS, bits, cache_bits, cache_of, layer_of, rows

from kvedge import KVCache, append_batch, attend_batch, errors
from kvedge.cache.cache import state_of

RECENT = {"dtype": "int4", "recent": 12, "sinks": 3}
KINDS = [
    RECENT,
    {**RECENT, "recent_dtype": "int8", "dtype": "int8", "key_scale": "auto"},
    {**RECENT, "recent": 0},
    {**RECENT, "sinks": 0},
    {"dtype": "kivi4"},
    {"dtype": "kivi4", "recent": 12, "sinks": 3},
    {"dtype": "kivi2", "recent": 40, "recent_dtype": "int8"},
    {"dtype": "kivi8", "value_dtype": "kivi2", "recent": 12},
    {"dtype": "int8", "key_dtype": "kivi4", "value_dtype": "kivi8"},
    {"dtype": "int8", "key_dtype": "kivi4", "scale_dtype": "float16", "recent": 12},
    {"dtype": "int8", "value_dtype": "kivi2", "key_scale": "auto", "key_offset": "auto"},
    {"dtype": "fp8_e5m2", "value_dtype": "kivi8", "key_scale": "auto", "recent": 40},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=str)


@kinds
@pytest.mark.parametrize("tokens", [1, 31, 32, 130, 352])
def test_copies_files_and_pickles_keep_all(tmp_path, tokens, options):
    pytest.importorskip("safetensors")
    cache = cache_of(rows(17, tokens), 2, **options)
    cache.save(tmp_path / "cache")
    others = [
        cache.copy(),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        KVCache.load(tmp_path / "cache"),
        KVCache.load(tmp_path / "cache", mmap=True),
        cache.extract(),
    ]
    for other in others:
        assert cache_bits(other) == cache_bits(cache)
        assert str(state_of(other).format) == str(state_of(cache).format)
    for other in (cache, *others):  # and go on alike
        other.truncate(tokens * 2 // 3)
        for i in range(2):
            other.append(i, *rows(18, 70))
        other.advance(70)
        assert cache_bits(other) == cache_bits(cache)
    cache.truncate(len(cache) - 69)  # into a run, perhaps
    cache.save(tmp_path / "again")
    assert cache_bits(KVCache.load(tmp_path / "again")) == cache_bits(cache)


@kinds
def test_snapshots_go_back_and_forth(options):
    cache = cache_of(rows(19, 330), 2, **options)
    mark, before = cache.snapshot(), cache_bits(cache)
    cache.truncate(100)
    early, read_early = cache.snapshot(), cache_bits(cache)
    cache.restore(mark)
    assert cache_bits(cache) == before
    cache.restore(early)
    assert cache_bits(cache) == read_early
    cache.restore(mark)
    detached = mark.detach()
    cache.truncate(20)
    cache.push_step(*rows(20, 2))
    assert mark.is_stale
    cache.restore(detached)
    assert cache_bits(cache) == before
    other = KVCache(2, HEADS, DIM, **options)
    other.restore(pickle.loads(pickle.dumps(detached)))
    assert cache_bits(other) == before


@pytest.mark.parametrize(
    "options",
    [
        RECENT,
        {"dtype": "kivi4"},
        {"dtype": "kivi4", "value_dtype": "int8", "scale_dtype": "float16"},
        {"dtype": "int8", "value_dtype": "kivi4", "key_scale": "auto", "recent": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [95, 110, 127])
def test_a_step_that_is_refused_changes_nothing(options, n):
    cache = cache_of(rows(21, 330), 2, **options)
    mark, before = cache.snapshot(), cache_bits(cache)
    cache.truncate(n)
    there = cache_bits(cache)
    keys, values = rows(22, 2)
    values[1, 0, 0] = 1e6  # too large for the second layer's last tokens
    with pytest.raises(errors.ScaleRangeError):
        cache.push_step(keys, values)
    assert cache_bits(cache) == there
    cache.restore(mark)
    assert cache_bits(cache) == before


@pytest.mark.parametrize(
    "layers",
    [
        [("int8", {"recent": 5, "sinks": 2}), ("int8", {}), ("int8", {"recent": 40})],
        [("kivi4", {}), ("int8", {}), ("kivi8", {"recent": 40})],
    ],
    ids=["recent", "runs"],
)
def test_batches_are_as_their_layers(layers):
    layers = [layer_of(dtype, **options) for dtype, options in layers]
    alone = [layer.copy() for layer in layers]
    for seed, n in enumerate((1, 30, 90, 1, 200)):
        keys, values = (
            np.stack([rows(seed + 10 * i, n)[side] for i in range(3)]) for side in (0, 1)
        )
        append_batch(layers, keys, values)
        for i, layer in enumerate(alone):
            layer.extend(keys[i], values[i])
    query = np.stack([rows(30 + i, 1)[0][0].repeat(2, axis=0) for i in range(3)])
    for start in (None, [0, 7, 320]):
        out, lse = attend_batch(layers, query, start=start, return_lse=True)
        for i, layer in enumerate(alone):
            wanted = layer.attend(query[i], start=start[i] if start else 0, return_lse=True)
            np.testing.assert_array_equal(out[i], wanted[0])
            np.testing.assert_array_equal(lse[i], wanted[1])
    before = [bits(layer) for layer in layers]
    keys[2, -1] = 1e6
    with pytest.raises(errors.ScaleRangeError):
        append_batch(layers, keys, values)
    assert [bits(layer) for layer in layers] == before
