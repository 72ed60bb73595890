"""Files that any version of kvedge has written decode to the same bytes, for ever."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from fixtures import make

import kvedge

FIXTURES = Path(make.__file__).parent
SAVED = sorted(FIXTURES.glob("*.safetensors"))
STORED = ("key_codes", "value_codes", "key_scales", "value_scales")


@pytest.fixture(params=[path.stem for path in SAVED])
def name(request):
    return request.param


@pytest.fixture
def expected(name):
    """What the file held when it was written."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays)


def assert_holds(cache, expected):
    num_layers, tokens = expected["keys"].shape[:2]
    assert (cache.num_layers, len(cache)) == (num_layers, tokens)
    for i in range(num_layers):
        layer = cache.layer(i)
        for field in STORED:
            stored = expected[field][i]
            # A view of scales leaves out the last axis where a row has one scale.
            assert getattr(layer, field).tobytes() == stored.tobytes(), (i, field)
            assert getattr(layer, field).dtype == stored.dtype, (i, field)
        assert layer.keys().tobytes() == expected["decoded_keys"][i].tobytes()
        assert layer.values().tobytes() == expected["decoded_values"][i].tobytes()
    if "key_offset" in expected:
        assert cache.key_offset.tobytes() == expected["key_offset"].tobytes()
    else:
        assert cache.key_offset is None


def test_every_case_has_its_golden_file():
    assert {path.stem for path in SAVED} >= set(make.CASES)


@pytest.mark.parametrize("mmap", [False, True])
def test_old_files_decode_to_the_same_bytes(name, expected, mmap):
    cache = kvedge.KVCache.load(FIXTURES / f"{name}.safetensors", mmap=mmap)
    assert_holds(cache, expected)
    assert cache.metadata == make.METADATA


def test_the_same_rows_are_still_stored_as_the_same_bytes(name, expected):
    keys, values = expected["keys"], expected["values"]  # (num_layers, tokens, heads, dim)
    num_layers, tokens, heads, dim = keys.shape
    options = dict(make.CASES[name])
    if "key_offset" in options:  # "auto" takes another one today; these bytes are with theirs
        options["key_offset"] = expected["key_offset"]
    cache = kvedge.KVCache(num_layers, heads, dim, **options)
    for i in range(num_layers):
        cache.append(i, keys[i], values[i])
    cache.advance(tokens)
    assert_holds(cache, expected)


@pytest.mark.parametrize("mmap", [False, True])
def test_states_are_stored_as_the_same_bytes_for_ever(tmp_path, mmap):
    golden, cache = FIXTURES / "states" / "v3.safetensors", make.cache_of_states()
    cache.save(tmp_path / "now", metadata=make.METADATA)
    assert (tmp_path / "now").read_bytes() == golden.read_bytes()
    loaded = kvedge.KVCache.load(golden, mmap=mmap)
    assert (len(loaded), loaded.num_layers, loaded.max_seq_len) == (5, 12, 9)
    for i in range(12):
        if isinstance(cache.layer(i), kvedge.StateLayer):
            assert loaded.layer(i) == cache.layer(i)
        else:
            assert loaded.k(i).tobytes() == cache.k(i).tobytes()


@pytest.mark.parametrize("capped", ["v1-int8", "v1-int8-capped"])
def test_the_limit_of_a_capped_cache_is_kept(capped):
    cache = kvedge.KVCache.load(FIXTURES / f"{capped}.safetensors")
    assert cache.max_seq_len == make.CASES[capped].get("max_seq_len")


@pytest.mark.parametrize("name", ["rows", "runs"])
def test_last_tokens_of_earlier_versions_in_any_format_are_read_as_they_were(name):
    """In float32 now: `recent_dtype` was "int8", and may no longer be."""
    path = FIXTURES / "recent" / f"int8-{name}.safetensors"
    with np.load(FIXTURES / "recent" / "int8.npz") as arrays:
        keys, values, pickled = arrays[f"{name}-k"], arrays[f"{name}-v"], arrays["pickle"]
    caches = [kvedge.KVCache.load(path, mmap=mmap) for mmap in (False, True)]
    if name == "runs":
        caches.append(pickle.loads(pickled.tobytes()))
    for cache in caches:
        assert cache.recent_dtype == "float32"
        for i in range(2):
            np.testing.assert_array_equal(cache.k(i), keys[i])
            np.testing.assert_array_equal(cache.v(i), values[i])


@pytest.mark.parametrize("name", ["plain", "recent", "runs", "auto"])
def test_pickles_of_earlier_versions_come_back(name):
    with np.load(FIXTURES / "v1-pickles.npz") as arrays:
        cache, snapshot, layer = (
            pickle.loads(arrays[f"{what}-{name}"].tobytes())
            for what in ("cache", "snapshot", "layer")
        )
        keys, values = arrays[f"keys-{name}"], arrays[f"values-{name}"]
    assert isinstance(cache, kvedge.KVCache) and len(cache) == len(snapshot) == len(layer) == 35
    again = kvedge.KVCache(2, 1, 8) if name == "plain" else cache.extract(0, 0)
    again.restore(snapshot)
    for made in (cache, again, pickle.loads(pickle.dumps(cache))):
        for index in range(2):
            np.testing.assert_array_equal(made.k(index), keys[index])
            np.testing.assert_array_equal(made.v(index), values[index])
    np.testing.assert_array_equal(layer.keys(), keys[0])
    assert cache.num_query_heads == (4 if name == "auto" else None)
