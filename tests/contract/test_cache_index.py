"""Caches whose layers have an index: it goes where keys and values go."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvedge
from kvedge import (
    CorruptFileError,
    InvalidArgumentError,
    KeyIndex,
    KvBlockPool,
    KVCache,
    KvCacheSnapshot,
    PagedKvCache,
    PositionOutOfRangeError,
    ReadOnlyLayerError,
    ShapeMismatchError,
)

DIM = 16


def rows(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def new_cache(ratio=1, dtype="int8", raw_tokens=64, storage="int8"):
    index = {"head_dim": DIM, "ratio": ratio, "dtype": dtype, "raw_tokens": raw_tokens}
    return KVCache(2, 1, 8, dtype=storage, index=[index, None])


class Tokens:
    """What a cache shall hold, token by token."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.keys, self.index_keys = rows(self.rng, 0, 1, 8), rows(self.rng, 0, DIM)

    def append(self, cache, n):
        keys, index_keys = rows(self.rng, n, 1, 8), rows(self.rng, n, DIM)
        cache.append(0, keys, keys, index_keys=index_keys)
        cache.append(1, keys, keys)
        cache.advance(n)
        self.keys = np.concatenate([self.keys, keys])
        self.index_keys = np.concatenate([self.index_keys, index_keys])

    def cut(self, taken):
        self.keys, self.index_keys = self.keys[taken], self.index_keys[taken]

    def check(self, cache, ratio):
        n = len(self.keys)
        index = cache.index(0)
        assert len(cache) == len(index) == n
        alone = KeyIndex(None, DIM, ratio=ratio, dtype=index.dtype)
        alone.append(self.index_keys)
        np.testing.assert_allclose(index.keys(), alone.keys(), atol=1e-6)
        if not n:
            return
        query = rows(self.rng, 1, 3, DIM)
        lists = index.select(query, 5)
        np.testing.assert_array_equal(lists, alone.select(query, 5))
        layer = kvedge.QuantizedKvLayer(n, 1, 8)
        layer.extend(self.keys, self.keys)
        heads = rows(self.rng, 1, 2, 8)
        np.testing.assert_allclose(
            cache.attend(0, heads, tokens=lists), layer.attend(heads, tokens=lists), atol=1e-5
        )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_index_goes_where_its_layer_goes(data, tmp_path_factory):
    ratio = data.draw(st.sampled_from([1, 4]))
    dtype = data.draw(st.sampled_from(["int8", "bfloat16", "float32"]))
    cache, tokens = new_cache(ratio, dtype, raw_tokens=None), Tokens(data.draw(st.integers(0, 99)))
    snapshots = []
    for _ in range(data.draw(st.integers(1, 12))):
        n = len(tokens.keys)
        step = data.draw(
            st.sampled_from(
                ["append", "append", "truncate", "snapshot", "restore", "copy", "file", "keep",
                 "evict", "extract", "bytes", "clear", "requantize"]
            )
        )  # fmt: skip
        if step == "append":
            tokens.append(cache, data.draw(st.integers(1, 90)))
        elif step == "truncate":
            kept = data.draw(st.integers(0, n))
            cache.truncate(kept)
            tokens.cut(slice(kept))
        elif step == "snapshot":
            snapshots.append((cache.snapshot(), tokens.keys, tokens.index_keys))
        elif step == "restore" and snapshots and not snapshots[-1][0].is_stale:
            snapshot, tokens.keys, tokens.index_keys = snapshots[-1]
            cache.restore(snapshot if data.draw(st.booleans()) else snapshot.detach())
        elif step == "copy":
            cache = data.draw(
                st.sampled_from([KVCache.copy, lambda c: pickle.loads(pickle.dumps(c))])
            )(cache)
            snapshots.clear()
        elif step == "file":
            path = tmp_path_factory.mktemp("index") / "cache"
            cache.save(path)
            cache = KVCache.load(path, mmap=data.draw(st.booleans()))
            snapshots.clear()
        elif step == "bytes":
            cache.restore(KvCacheSnapshot.from_bytes(cache.snapshot().to_bytes()))
        elif step == "keep" and ratio == 1:
            kept = np.flatnonzero(tokens.rng.random(n) < 0.7)
            cache.keep(kept)
            tokens.cut(kept)
        elif step == "extract":
            start = data.draw(st.integers(0, n // ratio)) * ratio
            cache = cache.extract(start, n)
            tokens.cut(slice(start, n))
            snapshots.clear()
        elif step == "clear":
            cache.clear()
            tokens.cut(slice(0))
        elif step == "requantize":
            cache.requantize("int8")
        if step in ("keep", "clear", "requantize"):
            snapshots.clear()
        tokens.check(cache, ratio)


def test_an_evicted_layer_chooses_among_what_is_left():
    cache, tokens = new_cache(), Tokens(1)
    tokens.append(cache, 50)
    left = np.flatnonzero(np.arange(50) % 3)
    cache.evict(0, left)
    index = cache.index(0)
    assert len(index) == len(left) == len(cache.layer(0))
    alone = KeyIndex(None, DIM)
    alone.append(tokens.index_keys[left])
    query = rows(tokens.rng, 1, 2, DIM)
    lists = index.select(query, 4)
    np.testing.assert_array_equal(lists, alone.select(query, 4))
    assert np.isfinite(cache.attend(0, rows(tokens.rng, 1, 1, 8), tokens=lists)).all()
    blocks = new_cache(ratio=4)
    Tokens(2).append(blocks, 20)
    with pytest.raises(InvalidArgumentError, match="takes tokens out"):
        blocks.evict(0, [1, 2])


def test_pending_tokens_are_in_the_index_and_go_with_truncate():
    cache, tokens = new_cache(ratio=4), Tokens(3)
    tokens.append(cache, 6)
    keys = rows(tokens.rng, 3, 1, 8)
    cache.append(0, keys, keys, index_keys=rows(tokens.rng, 3, DIM))
    assert len(cache.index(0)) == 9
    snapshot = cache.snapshot()
    cache.truncate(6)
    tokens.check(cache, 4)
    cache.restore(snapshot)
    tokens.check(cache, 4)


def test_what_does_not_fit_changes_nothing():
    cache, tokens = new_cache(ratio=4, raw_tokens=8), Tokens(4)
    tokens.append(cache, 50)
    keys = rows(tokens.rng, 2, 1, 8)
    wrong = [
        ({}, InvalidArgumentError, "index_keys are not given"),
        ({"index_keys": rows(tokens.rng, 3, DIM)}, ShapeMismatchError, "of 3 tokens"),
        ({"index_keys": rows(tokens.rng, 2, DIM + 1)}, ShapeMismatchError, "must be"),
        ({"index_keys": rows(tokens.rng, 2, DIM) * np.inf}, kvedge.NonFiniteInputError, "keys"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            cache.append(0, keys, keys, **options)
    with pytest.raises(kvedge.NonFiniteInputError):
        cache.append(0, keys * np.nan, keys, index_keys=rows(tokens.rng, 2, DIM))
    with pytest.raises(InvalidArgumentError, match="has no index"):
        cache.append(1, keys, keys, index_keys=rows(tokens.rng, 2, DIM))
    with pytest.raises(PositionOutOfRangeError, match="within a block"):
        cache.truncate(13)
    with pytest.raises(ReadOnlyLayerError):
        cache.index(0).truncate(3)
    with pytest.raises(InvalidArgumentError, match="no index"):
        cache.index(1)
    for call in (
        lambda: cache.push_step(rows(tokens.rng, 2, 1, 8), rows(tokens.rng, 2, 1, 8)),
        lambda: cache.shift(1, rope=kvedge.Rope(8)),
        lambda: cache.inject(cache.copy()),
        lambda: kvedge.KvCachePolicy(eviction="snapkv:tokens=512").attach(cache),
    ):
        with pytest.raises(InvalidArgumentError, match="with an index"):
            call()
    tokens.check(cache, 4)
    for index, message in [
        ({"head_dim": 0}, "head_dim"),
        ({"dims": 4}, "dims"),
        ([None], "one for each"),
        (5, "sequence"),
        ([3, None], "mapping"),
        ([KeyIndex(None, 4)] * 2, "belongs"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            KVCache(2, 1, 8, index=index)
    with pytest.raises(InvalidArgumentError, match="a window"):
        KVCache(1, 1, 8, window=4, index={"head_dim": 4})


def test_forged_files_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    cache, tokens = new_cache(ratio=4), Tokens(5)
    tokens.append(cache, 30)
    path = tmp_path / "cache"
    cache.save(path)
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = safetensors.load_file(path)
    fields = json.loads(metadata["indexes"])["0"]

    def forged(changed=None, **more):
        from kvedge.files.header import digest

        fields = {**metadata, **(changed or {})}
        arrays = {k: v for k, v in {**tensors, **more}.items() if v is not None}
        types = {np.int8: "I8", np.float32: "F32", np.int32: "I32"}
        typed = {name: (types[a.dtype.type], a) for name, a in arrays.items()}
        fields["sha256"] = digest(fields, typed)
        safetensors.save_file(arrays, path, fields)
        return KVCache.load(path)

    tokens.check(forged(), 4)
    keys, scales = tensors["indexes.0.keys"], tensors["indexes.0.scales"]
    for changed, more in [
        ({"indexes": json.dumps({"0": {**fields, "ratio": 5}}, separators=(",", ":"))}, {}),
        ({"indexes": json.dumps({"2": fields}, separators=(",", ":"))}, {}),
        ({"indexes": json.dumps({"0": {**fields, "ratio": 0}}, separators=(",", ":"))}, {}),
        ({"indexes": "[]"}, {}),
        ({}, {"indexes.0.keys": keys[:-1]}),
        ({}, {"indexes.0.keys": keys.astype(np.int32)}),
        ({}, {"indexes.0.scales": -scales}),
        ({}, {"indexes.0.scales": scales * np.nan}),
        ({}, {"indexes.0.raw": None}),
        ({}, {"indexes.1.raw": tensors["indexes.0.raw"]}),
    ]:
        with pytest.raises(CorruptFileError):
            forged(changed, **more)


# ---- paged sequences -----------------------------------------------------------------------------


class Sequences:
    """A paged cache with an index, and what each of its sequences shall hold."""

    def __init__(self, seed, ratio, dtype, storage):
        index = {"head_dim": DIM, "ratio": ratio, "dtype": dtype, "raw_tokens": None}
        self.cache = PagedKvCache(KvBlockPool(60, 32, 2, 1, 8, storage, index=index))
        self.ratio, self.dtype = ratio, dtype
        self.rng = np.random.default_rng(seed)
        self.held = {}  # keys and index keys by sequence

    def new(self):
        empty = rows(self.rng, 0, 1, 8), rows(self.rng, 0, DIM)
        self.held[self.cache.new_sequence()] = empty

    def append(self, seq, n):
        keys, index_keys = rows(self.rng, n, 1, 8), rows(self.rng, n, DIM)
        for layer in range(2):
            sign = 1 - 2 * layer
            self.cache.append(seq, layer, keys, keys, index_keys=sign * index_keys)
        self.cache.advance(seq, n)
        pairs = zip(self.held[seq], (keys, index_keys), strict=True)
        self.held[seq] = tuple(np.concatenate(pair) for pair in pairs)

    def check(self):
        for seq, (keys, index_keys) in self.held.items():
            if not len(keys):
                continue
            n = min(3, len(keys))
            query, heads = rows(self.rng, n, 2, DIM), rows(self.rng, n, 2, 8)
            layer = KVCache(1, 1, 8, dtype="float32")
            layer.append(0, keys, keys)
            layer.advance(len(keys))
            for number in range(2):
                alone = KeyIndex(None, DIM, ratio=self.ratio, dtype=self.dtype)
                alone.append((1 - 2 * number) * index_keys)
                lists = self.cache.select(seq, number, query, 7)
                np.testing.assert_array_equal(lists, alone.select(query, 7))
                out = self.cache.attend(seq, number, heads, tokens=lists)
                assert np.abs(out - layer.attend(0, heads, tokens=lists)).max() < 0.3


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_index_is_paged_with_its_sequences(data, tmp_path_factory):
    ratio = data.draw(st.sampled_from([1, 4, 32]))
    dtype = data.draw(st.sampled_from(["int8", "bfloat16", "float32"]))
    storage = data.draw(st.sampled_from(["int8", "kivi4", "auto"]))
    own = Sequences(data.draw(st.integers(0, 99)), ratio, dtype, storage)
    own.new()
    snapshots = []
    for _ in range(data.draw(st.integers(1, 12))):
        seq = data.draw(st.sampled_from(sorted(own.held)))
        keys, index_keys = own.held[seq]
        n = len(keys)
        step = data.draw(
            st.sampled_from(
                ["append", "append", "new", "fork", "truncate", "snapshot", "restore", "drop",
                 "prefix", "file", "cache", "swap"]
            )
        )  # fmt: skip
        if step == "append" and own.cache.pool.free_count > 10:
            own.append(seq, data.draw(st.integers(1, 70)))
        elif step == "new":
            own.new()
        elif step == "fork":
            own.held[own.cache.fork(seq)] = keys, index_keys
        elif step == "truncate":
            kept = data.draw(st.integers(0, n))
            own.cache.truncate(seq, kept)
            own.held[seq] = keys[:kept], index_keys[:kept]
        elif step == "snapshot":
            snapshots.append((own.cache.snapshot(seq), keys, index_keys))
        elif step == "restore" and snapshots:
            snapshot, *contents = snapshots[-1]
            own.cache.restore(seq, snapshot)
            own.held[seq] = tuple(contents)
        elif step == "drop" and len(own.held) > 1:
            own.cache.drop(seq)
            del own.held[seq]
        elif step == "prefix":
            ids = np.abs(keys[:, 0, 0].view(np.int32).astype(np.int64))
            own.cache.register(seq, ids, partial=True)
            found, length = own.cache.match_prefix(ids[: n - n // 5], partial=True)
            own.held[found] = keys[:length], index_keys[:length]
        elif step == "file":
            path = tmp_path_factory.mktemp("index") / "pool"
            own.cache.save(path)
            snapshots.clear()
            own.cache = PagedKvCache.load(path)
            own.held = dict(zip(own.cache.sequences, own.held.values(), strict=True))
        elif step == "cache":
            cache = own.cache.to_kv_cache(seq)
            own.held[own.cache.from_kv_cache(cache)] = keys, index_keys
        elif step == "swap":
            path = tmp_path_factory.mktemp("index") / "sequence"
            own.cache.swap_out(seq, path)
            del own.held[seq]
            own.held[own.cache.swap_in(path)] = keys, index_keys
        own.check()


def test_what_a_pool_does_not_take():
    pool = KvBlockPool(8, 32, 1, 1, 8, index={"head_dim": DIM, "ratio": 4})
    assert pool.block_bytes == KvBlockPool(8, 32, 1, 1, 8).block_bytes + 8 * (DIM + 4)
    cache, plain = PagedKvCache(pool), PagedKvCache(KvBlockPool(8, 32, 1, 1, 8))
    rng = np.random.default_rng(6)
    seq, keys = cache.new_sequence(), rows(rng, 3, 1, 8)
    for options, error, message in [
        ({}, InvalidArgumentError, "are not given"),
        ({"index_keys": rows(rng, 2, DIM)}, ShapeMismatchError, "of 2 tokens"),
        ({"index_keys": rows(rng, 3, 3)}, ShapeMismatchError, "must be"),
    ]:
        with pytest.raises(error, match=message):
            cache.append(seq, 0, keys, keys, **options)
    with pytest.raises(InvalidArgumentError, match="no index"):
        plain.append(plain.new_sequence(), 0, keys, keys, index_keys=rows(rng, 3, DIM))
    with pytest.raises(InvalidArgumentError, match="no index"):
        plain.select(plain.new_sequence(), 0, rows(rng, 1, 1, DIM), 1)
    assert pool.used_count == 0
    for index, message in [
        ({"head_dim": 4, "ratio": 5}, "multiple of the index's ratio"),
        ({"head_dim": 4, "width": 5}, "width"),
        (4, "mapping"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            KvBlockPool(8, 32, 1, 1, 8, index=index)
