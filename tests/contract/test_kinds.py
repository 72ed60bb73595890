"""Each kind of storage in each way of having it twice: copies, pickles, files, snapshots, pools."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from support import cache_content, content, normal

from kvedge import KvBlockPool, KVCache, KvCacheSnapshot, PagedKvCache, errors
from kvedge.core.formats import DTYPES

LAYERS, HEADS, D = 2, 2, 64
SCALE = np.exp2(np.linspace(-2, 2, LAYERS * HEADS * D)).astype(np.float32).reshape(-1, HEADS, D)
#: Options of a KVCache: formats, pairs of them, widths, rotations, maps of keys, windows, parts.
KINDS = {
    **{name: {"dtype": name} for name in DTYPES},
    "limit": {"max_seq_len": 200},
    "groups": {"group_size": 24, "scale_dtype": "float16"},
    "pair": {"dtype": "fp8_e4m3", "value_dtype": "int8"},
    "float32 keys": {"dtype": "float32", "value_dtype": "int8"},
    "runs and rows": {"dtype": "kivi8", "value_dtype": "int8", "value_rotation": True},
    "narrow values": {"value_head_dim": 24, "group_size": 20},
    "wide values": {"dtype": "int4", "value_head_dim": 320},
    "rotation": {"value_rotation": True},
    "rotated runs": {"dtype": "kivi4", "value_rotation": True},
    "key scale": {"key_scale": SCALE},
    "key scale of float16": {"dtype": "float16", "key_scale": SCALE},
    "automatic key scale": {"key_scale": "auto"},
    "automatic scales of a pair": {"value_dtype": "float16", "key_scale": "auto"},
    "automatic scale of fp8": {"dtype": "fp8_e4m3", "key_scale": "auto"},
    "offset": {"key_offset": "auto", "scale_dtype": "float16"},
    "offset and scale": {"dtype": "int4", "key_offset": "auto", "key_scale": "auto"},
    "window": {"window": 20, "key_scale": "auto"},
    "window of one layer": {"dtype": "float16", "window": [None, 7]},
    "last tokens": {"dtype": "int4", "recent": 20, "sinks": 3},
    "query heads": {"num_query_heads": 4},
    "layers that differ": {
        "layers": [{}, {"dtype": "float16", "value_dtype": "int4", "value_rotation": True}]
    },
    "first and last tokens that differ": {
        "layers": [{"recent": 0, "sinks": 0, "recent_dtype": None}, {"recent_dtype": "float32"}],
        **{"recent": 9, "sinks": 2, "recent_dtype": "bfloat16"},
    },
    "runs and windows that differ": {
        "layers": [{"dtype": "kivi4", "value_dtype": "int8", "window": 40}, {"recent": 9}],
        **{"dtype": "float16", "value_dtype": "kivi8"},
    },
    "shapes that differ": {
        "layers": [{"head_dim": 40, "window": 9}, {"num_kv_heads": 4, "value_head_dim": 32}],
        "key_offset": "auto",
    },
}
#: What a cache of one kind says of itself.
FACTS = ("dtype", "value_dtype", "group_size", "scale_dtype", "value_rotation", "value_head_dim")
LAYER_FACTS = (*FACTS, "num_groups", "num_kv_heads", "head_dim", "window", "num_dropped")
# Options that a pool has: it has no first tokens, and no windows.
OF_POOLS = (
    *(*DTYPES, "groups", "pair", "rotation"),
    *("float32 keys", "runs and rows", "narrow values", "wide values", "rotated runs"),
    *("key scale", "key scale of float16"),
)


def new_cache(kind):
    options = KINDS[kind]
    shape = {} if "layers" in options else {"num_layers": LAYERS}
    return KVCache(**shape, **{"num_kv_heads": HEADS, "head_dim": D} | options)


def feed(cache, rng, n, *, pending=False):
    """Append n tokens, pending or not, whose keys have a large channel."""
    for i in range(LAYERS):
        layer = cache.layer(i)
        keys = normal(rng, n, layer.num_kv_heads, layer.head_dim)
        keys[..., 3] *= 20
        cache.append(i, keys, normal(rng, n, layer.num_kv_heads, layer.value_head_dim))
    if not pending:
        cache.advance(n)


def restored(cache, snapshot, kind):
    other = new_cache(kind)
    other.restore(snapshot)
    return other


def saved(cache, path, mmap):
    cache.save(path)
    return KVCache.load(path, mmap=mmap)


#: What makes a second cache of one, given its kind and a path.
WAYS = {
    "copy": lambda cache, kind, path: cache.copy(),
    "copy.copy": lambda cache, kind, path: copy.copy(cache),
    "deepcopy": lambda cache, kind, path: copy.deepcopy(cache),
    "pickle": lambda cache, kind, path: pickle.loads(pickle.dumps(cache)),
    "snapshot": lambda cache, kind, path: restored(cache, cache.snapshot().detach(), kind),
    "pickled snapshot": lambda cache, kind, path: restored(
        cache, pickle.loads(pickle.dumps(cache.snapshot().detach())), kind
    ),
    "bytes": lambda cache, kind, path: restored(
        cache, KvCacheSnapshot.from_bytes(cache.snapshot().to_bytes()), kind
    ),
    "file": lambda cache, kind, path: saved(cache, path, False),
    "mapped file": lambda cache, kind, path: saved(cache, path, True),
}
COPIES = ("copy", "copy.copy", "deepcopy", "pickle")  # which have pending tokens too


def assert_same(cache, other):
    """The same settings, bytes, decoded rows and attention."""
    assert cache_content(other) == cache_content(cache)
    assert (other.max_seq_len, other.window) == (cache.max_seq_len, cache.window)
    rng = np.random.default_rng(5)
    for i in range(LAYERS):
        one, same = cache.layer(i), other.layer(i)
        for name in LAYER_FACTS:
            assert getattr(same, name) == getattr(one, name), name
        assert (cache.recent, cache.sinks) == (other.recent, other.sinks)
        assert same.keys().tobytes() == one.keys().tobytes()
        assert same.values().tobytes() == one.values().tobytes()
        if len(one):
            query = normal(rng, 4, one.head_dim)
            assert same.attend(query).tobytes() == one.attend(query).tobytes()


# 9 tokens leave open what is automatic; 70 have runs, and more than the windows hold.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 9, 70])
@pytest.mark.parametrize("way", WAYS)
def test_the_second_cache_is_as_the_first_and_goes_on_alike(kind, tokens, way, tmp_path, rng):
    cache = new_cache(kind)
    if tokens:
        feed(cache, rng, tokens - 2)
        feed(cache, rng, 2, pending=way in COPIES)
    before = cache_content(cache)
    other = WAYS[way](cache, kind, tmp_path / "cache")
    assert_same(cache, other)
    with pytest.raises(errors.ReadOnlyLayerError):
        other.layer(0).clear()
    for each in (other, cache):
        assert cache_content(each) == before  # whatever was done to the other
        if tokens and way in COPIES:
            each.advance(2)
        again = np.random.default_rng(3)
        each.truncate(max(0, tokens - 1))
        for n in (1, 30, 3):
            feed(each, again, n)
        assert cache_content(each) != before
    assert_same(cache, other)
    if way in COPIES:
        assert other.num_query_heads == cache.num_query_heads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 9, 70])
def test_a_layer_alone_is_copied_and_goes_on_alike(kind, tokens, rng):
    cache = new_cache(kind)
    if tokens:
        feed(cache, rng, tokens - 1)
        feed(cache, rng, 1)
    for i in range(LAYERS):
        one = cache.layer(i)
        others = [one.copy(), copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
        more = 100 if kind == "limit" else 300  # than it has room for
        shape = (more, one.num_kv_heads)
        rows = normal(rng, *shape, one.head_dim), normal(rng, *shape, one.value_head_dim)
        before = content(one)
        for other in others:
            assert type(other) is type(one)
            assert content(other) == before
            other.extend(*rows)
        assert content(one) == before
        cache.append(i, *rows)
        for other in others:
            assert content(other) == content(one)
            for name in LAYER_FACTS:
                assert getattr(other, name) == getattr(one, name), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 9, 70])
def test_a_snapshot_tells_its_keys_and_values_and_is_written_and_read(kind, tokens, rng):
    cache = new_cache(kind)
    feed(cache, rng, tokens)
    mark = cache.snapshot()
    detached = mark.detach()
    pickled = pickle.loads(pickle.dumps(detached))
    read = [KvCacheSnapshot.from_bytes(each.to_bytes()) for each in (mark, detached, pickled)]
    for snapshot in (mark, detached, pickled, *read):
        assert snapshot.is_detached == (snapshot is not mark)
        assert snapshot.seq_len == snapshot.length == len(snapshot) == tokens
        assert snapshot.to_bytes() == detached.to_bytes()
        for i in range(LAYERS):
            for got, wanted in ((snapshot.keys[i], cache.k(i)), (snapshot.values[i], cache.v(i))):
                assert got.dtype == np.float32
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_saved_again_is_the_same_file(kind, tmp_path, rng):
    cache = new_cache(kind)
    feed(cache, rng, 40)
    for mmap in (False, True):
        loaded = saved(cache, tmp_path / "one", mmap)
        loaded.save(tmp_path / "two")
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("kind", OF_POOLS)
def test_a_pool_holds_what_a_cache_does_and_is_saved(kind, tmp_path, rng):
    cache = new_cache(kind)
    feed(cache, rng, 70)
    options = {name: value for name, value in KINDS[kind].items() if name != "max_seq_len"}
    paged = PagedKvCache(KvBlockPool(12, 32, LAYERS, HEADS, D, **options))
    appended = paged.new_sequence()
    for i in range(LAYERS):
        paged.append(appended, i, cache.k(i), cache.v(i))
    paged.advance(appended, 70)
    seq = paged.from_kv_cache(cache)
    assert_same(paged.to_kv_cache(seq), cache)
    paged.save(tmp_path / "pool")
    loaded = PagedKvCache.load(tmp_path / "pool")
    query = normal(rng, 4, D)
    for i in range(LAYERS):
        assert paged.k(seq, i).tobytes() == cache.k(i).tobytes()
        assert paged.v(seq, i).tobytes() == cache.v(i).tobytes()
        wanted = cache.attend(i, query)
        limit = 4e-4 * np.abs(wanted).max()
        np.testing.assert_allclose(paged.attend(seq, i, query), wanted, rtol=0, atol=limit)
        for one, same in zip(paged.sequences, loaded.sequences, strict=True):
            assert loaded.k(same, i).tobytes() == paged.k(one, i).tobytes()
            assert loaded.attend(same, i, query).tobytes() == paged.attend(one, i, query).tobytes()
    for name in FACTS:
        assert getattr(loaded.pool, name) == getattr(paged.pool, name), name
    for each in (paged, loaded):
        again = np.random.default_rng(4)
        own = each.sequences[-1]
        for i in range(LAYERS):
            keys = normal(again, 5, HEADS, D)
            each.append(own, i, keys, normal(again, 5, HEADS, cache.layer(i).value_head_dim))
        each.advance(own, 5)
    assert loaded.k(loaded.sequences[-1], 0).tobytes() == paged.k(seq, 0).tobytes()
