"""PrefixStore.save and load: a KVCache, and a sequence of a pool, go on as they were."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvedge
from kvedge import KvBlockPool, KVCache, PagedKvCache, PrefixStore
from kvedge.errors import InvalidArgumentError, ShapeMismatchError

OPTIONS = [
    {"dtype": "int8"},
    {"dtype": "auto"},
    {"dtype": "small"},
    {"dtype": "int8", "key_scale": "auto", "recent": 20},
    {"dtype": "float16", "layers": [{"window": 40}, {}]},
    {"dtype": "int4", "recent": 9, "layers": [{"window": 50}, {}]},
]


def cache_of(options, n=0):
    cache = KVCache(2, 2, 32, **options)
    fill(cache, 0, n)
    return cache


def fill(cache, start, stop):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 2, 900, 2, 32), dtype=np.float32)
    for layer in range(2 if stop > start else 0):
        cache.append(layer, *rows[layer][:, start:stop])
    cache.advance(stop - start)


def assert_alike(cache, other):
    query = np.random.default_rng(1).standard_normal((4, 32), dtype=np.float32)
    assert len(cache) == len(other)
    for stop in (len(cache) + 1, len(cache) + 80):
        for layer in range(2):
            assert np.array_equal(cache.attend(layer, query), other.attend(layer, query))
            assert np.array_equal(cache.k(layer), other.k(layer))
        for one in (cache, other):
            fill(one, len(one), stop)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cache_that_was_loaded_goes_on_as_the_one_that_was_saved(tmp_path, options):
    ids, cache, other = np.arange(600), cache_of(options, 600), cache_of(options)
    assert PrefixStore(tmp_path).save(cache, ids, model="m") > 2
    store = PrefixStore(tmp_path)
    for wrong in ({"model": "n"}, {"model": "m", "namespace": "other"}):
        assert store.load(other, ids, **wrong) == 0 == len(other)
    assert store.load(other, np.arange(700), model="m") == 600
    assert_alike(cache, other)
    assert store.load(cache_of({"dtype": "bfloat16"}), ids, model="m") == 0


@pytest.mark.parametrize("options", OPTIONS[4:], ids=str)
def test_windows_have_checkpoints_within_what_was_appended_at_once(tmp_path, options):
    store, cache, other = PrefixStore(tmp_path), cache_of(options, 256), cache_of(options)
    store.save(cache_of(options, 600), np.arange(600), model="m")
    assert store.load(other, [*range(300), 9, 9], model="m") == 256 == len(other)
    query = np.random.default_rng(1).standard_normal((4, 32), dtype=np.float32)
    for stop in (257, 336):
        for layer in range(2):
            # Rows are added up from another one on.
            out = [each.attend(layer, query) for each in (cache, other)]
            np.testing.assert_allclose(*out, rtol=0, atol=1e-6)
            own = other.k(layer)  # of a window what is read, at least
            assert len(own) >= 39 and np.array_equal(cache.k(layer)[-len(own) :], own)
        for one in (cache, other):
            fill(one, len(one), stop)


LOADED = """
import sys
sys.path[:0] = [sys.argv[1]]
from test_caches import *
for number, options in enumerate(OPTIONS):
    cache = cache_of(options)
    assert PrefixStore(sys.argv[2]).load(cache, np.arange(600), model=str(number)) == 600
    print(bits_of(cache))
"""


def bits_of(cache):
    rows = [array for layer in range(2) for array in (cache.k(layer), cache.v(layer))]
    return hashlib.sha256(b"".join(array.tobytes() for array in rows)).hexdigest()


@pytest.mark.subprocess
@pytest.mark.parametrize("path", [{"KVEDGE_ISA": "scalar"}, {"KVEDGE_BACKEND": "numpy"}], ids=str)
def test_another_kernel_path_finds_the_same_bits_after_a_restart(tmp_path, path):
    caches = [cache_of(options, 600) for options in OPTIONS]
    for number, cache in enumerate(caches):
        PrefixStore(tmp_path).save(cache, np.arange(600), model=str(number))
    env = {k: v for k, v in os.environ.items() if k not in ("KVEDGE_ISA", "KVEDGE_BACKEND")}
    env |= {"PYTHONPATH": str(Path(kvedge.__file__).parents[1]), **path}
    command = [sys.executable, "-c", LOADED, Path(__file__).parent, tmp_path]
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.stdout.split() == [bits_of(cache) for cache in caches], found.stderr


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_a_beginning_is_what_the_same_tokens_alone_would_be(tmp_path, options):
    store, ids, other = PrefixStore(tmp_path), np.arange(600), cache_of(options)
    store.save(cache_of(options, 600), ids, model="m")
    n = store.load(other, np.concatenate([ids[:530], ids[:9]]), model="m")
    assert n == (530 if options["dtype"] == "int8" else 512)
    assert_alike(cache_of(options, n), other)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_a_sequence_that_was_dropped_is_found_below_the_pool(tmp_path, options):
    ids, store = np.arange(300), PrefixStore(tmp_path)
    pools = [KvBlockPool(40, 32, 2, 2, 32, **options) for _ in range(2)]
    first, second = map(PagedKvCache, pools)
    seq = first.from_kv_cache(cache_of(options, 300))
    assert first.save_prefix(seq, ids, store, model="m") > 0
    first.drop(seq)
    for paged in (first, second):
        again = paged.load_prefix(np.arange(400), store, model="m")
        assert paged.length(again) == 300
        assert_alike(cache_of(options, 300), paged.to_kv_cache(again))
        assert paged.length(paged.load_prefix(np.arange(9, 99), store, model="m")) == 0


def test_what_cannot_be_saved_is_refused(tmp_path):
    store, cache = PrefixStore(tmp_path), cache_of(OPTIONS[0], 300)
    with pytest.raises(ShapeMismatchError, match="holds 300 tokens"):
        store.save(cache, np.arange(299), model="m")
    with pytest.raises(InvalidArgumentError, match="model must be a text"):
        store.save(cache, np.arange(300), model="")
    with pytest.raises(InvalidArgumentError, match="empty cache"):
        store.load(cache, np.arange(300), model="m")
    with pytest.raises(InvalidArgumentError, match="must be a KVCache"):
        store.load({}, np.arange(300), model="m")


@pytest.mark.parametrize("dtype", ["int8", "auto"])
@pytest.mark.parametrize("ratio", [1, 4])
def test_an_index_is_stored_with_its_tokens(tmp_path, ratio, dtype):
    rng, index = np.random.default_rng(3), {"head_dim": 16, "ratio": ratio}
    cache = KVCache(2, 2, 32, dtype=dtype, index=[index, None])
    ids = rng.integers(0, 999, 602)

    def append(to, keys, index_keys):
        to.append(0, keys, keys, index_keys=index_keys)
        to.append(1, keys, keys)
        to.advance(len(keys))

    def rows(n):
        return (rng.standard_normal(shape, dtype=np.float32) for shape in ((n, 2, 32), (n, 16)))

    append(cache, *rows(602))
    assert PrefixStore(tmp_path).save(cache, ids, model="m") > 2
    for n in (602, 570):  # whole, and parting within a block
        other = KVCache(2, 2, 32, dtype=dtype, index=[index, None])
        store = PrefixStore(tmp_path)
        loaded = store.load(other, np.concatenate([ids[:n], ids[n:] + 1000]), model="m")
        assert loaded == (n if n == 602 else 512 if dtype == "auto" else n // ratio * ratio)
        twin = cache.copy()
        twin.truncate(loaded)
        more = [*rows(7)]
        query = rng.standard_normal((3, 2, 16), dtype=np.float32)
        for each in (twin, other):
            append(each, *more)
        assert np.array_equal(twin.index(0).keys(), other.index(0).keys())
        lists = other.index(0).select(query, 9)
        assert np.array_equal(twin.index(0).select(query, 9), lists)
    plain = KVCache(2, 2, 32, dtype=dtype)
    assert PrefixStore(tmp_path).load(plain, ids, model="m") == 0
    with pytest.raises(InvalidArgumentError, match="ratio divides"):
        store.load(KVCache(1, 1, 8, index={"head_dim": 4, "ratio": 3}), ids, model="m")


# ---- below a pool's memory -----------------------------------------------------------------------


def registered(cache, rng, ids, namespace=None):
    """A sequence of random tokens, registered; its keys as the pool stores them."""
    seq = cache.new_sequence()
    for layer in range(2):
        rows = rng.standard_normal((len(ids), 2, 64), dtype=np.float32)
        cache.append(seq, layer, rows, rows)
    cache.advance(seq, len(ids))
    cache.register(seq, ids, namespace=namespace)
    return seq, [cache.k(seq, layer) for layer in range(2)]


@pytest.mark.parametrize("dtype", ["int8", "float32", "kivi4", "auto"])
def test_what_a_pool_has_no_longer_is_found_in_its_store(tmp_path, dtype):
    rng, store = np.random.default_rng(1), PrefixStore(tmp_path)
    pool = KvBlockPool(26, 32, 2, 2, 64, dtype)  # of 832 tokens
    cache = PagedKvCache(pool, store=store, model="m")
    ids = rng.integers(0, 999, 640)
    seq, keys = registered(cache, rng, ids)
    cache.drop(seq)
    other, _ = registered(cache, rng, ids + 1000)  # takes the blocks of the first
    cache.drop(other)
    plain = PagedKvCache(pool)
    assert plain.match_prefix(ids)[1] < 512
    again, n = cache.match_prefix(ids, leave=1)
    assert n >= (639 // 32 * 32 if dtype in ("int8", "float32") else 512)
    for layer in range(2):
        body = slice(32, n - 200)  # first and last ones are perhaps read as the pool stores them
        assert np.array_equal(cache.k(again, layer)[body], keys[layer][body])
    cache.drop(again)
    assert plain.match_prefix(ids)[1] >= 512  # known in memory again
    # Another process, another namespace, another model.
    fresh = KvBlockPool(26, 32, 2, 2, 64, dtype)
    assert PagedKvCache(fresh, store=PrefixStore(tmp_path), model="m").match_prefix(ids)[1] >= 512
    assert PagedKvCache(fresh, store=store, model="o").match_prefix(ids, namespace="a")[1] == 0


def test_index_keys_of_a_pool_are_found_in_its_store(tmp_path):
    rng = np.random.default_rng(4)
    ids, keys = rng.integers(0, 999, 600), rng.standard_normal((600, 2, 64), dtype=np.float32)
    index_keys = rng.standard_normal((600, 16), dtype=np.float32)
    query, lists = rng.standard_normal((2, 2, 16), dtype=np.float32), []
    for _ in range(2):  # the second time by another pool
        pool = KvBlockPool(40, 32, 1, 2, 64, index={"head_dim": 16, "ratio": 4})
        cache = PagedKvCache(pool, store=PrefixStore(tmp_path), model="m")
        seq, n = cache.match_prefix(ids)
        cache.append(seq, 0, keys[n:], keys[n:], index_keys=index_keys[n:])
        cache.advance(seq, 600 - n)
        cache.register(seq, ids)
        lists.append(cache.select(seq, 0, query, 9))
    assert n == 576 and np.array_equal(*lists)


def test_a_store_that_fails_below_a_pool_is_not_asked_again(tmp_path, monkeypatch):
    rng, store = np.random.default_rng(2), PrefixStore(tmp_path)
    cache = PagedKvCache(KvBlockPool(40, 32, 2, 2, 64), store=store, model="m")
    calls = []

    def fail(*args, **options):
        calls.append(args)
        raise OSError("no room")

    monkeypatch.setattr(PrefixStore, "save", fail)
    with pytest.warns(RuntimeWarning, match="not asked again: no room"):
        registered(cache, rng, np.arange(300))
    registered(cache, rng, np.arange(1000, 1300))
    assert len(calls) == 1
    with pytest.raises(InvalidArgumentError, match="which model"):
        PagedKvCache(KvBlockPool(4, 32, 1, 1, 8), store=store)


def test_files_that_cannot_be_opened_stay(tmp_path, monkeypatch):
    store, ids = PrefixStore(tmp_path), np.arange(600)
    store.save(cache_of({"dtype": "int8"}, 600), ids, model="m")
    other = cache_of({"dtype": "int8"})

    def refused(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        for call in (lambda: store.load(other, ids, model="m"), store.verify):
            with pytest.raises(OSError, match="Too many"):
                call()
    assert len(other) == 0
    assert store.load(other, ids, model="m") == 600


def test_a_damaged_file_is_looked_for_again_once(tmp_path, monkeypatch):
    store, ids = PrefixStore(tmp_path), np.arange(800)
    store.save(cache_of({"dtype": "int8"}, 800), ids, model="m")
    second = next(node for node in store.nodes() if node.start == 256)
    path = tmp_path / f"{second.name}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    finds, find = [], store.find
    monkeypatch.setattr(store, "find", lambda *args: finds.append(args) or find(*args))
    assert store.load(cache_of({"dtype": "int8"}), ids, model="m") == 256
    assert len(finds) == 2
