"""Tokens that are evicted: the others keep bytes and positions, and are those that it says."""

import base64
import copy
import io
import json
import pickle

import numpy as np
import pytest

import kvedge
from kvedge import Eviction, InvalidArgumentError, KVCache, KvCachePolicy
from kvedge.cache.cache import state_of
from kvedge.core.formats import FORMATS
from kvedge.errors import (
    CapacityExceededError,
    PositionOutOfRangeError,
    ShapeMismatchError,
    StaleSnapshotError,
)
from kvedge.eviction import Attended, CacheEviction

HEADS, DIM, TOKENS = 2, 64, 340
PARTS = [{}, {"recent": 16, "sinks": 40}]
METHODS = ["sinks+recent:tokens=256", "snapkv:tokens=256,window=8"]


def rows(rng, n=TOKENS, heads=HEADS):
    return rng.standard_normal((n, heads, DIM)).astype(np.float32)


def filled(rng, dtype, **options):
    """A cache of one layer, and what its tokens are read as once they are old."""
    cache = KVCache(1, HEADS, DIM, dtype=dtype, **options)
    keys, values = rows(rng), rows(rng)
    cache.append(0, keys[:300], values[:300])
    cache.append(0, keys[300:], values[300:])
    cache.advance(TOKENS)
    return cache


def kept_rows(per_head):
    """Whole runs, so that every format can: other ones of each head, or the same of both."""
    tail = np.arange(192, TOKENS)
    runs = [[0, 1, 4], [0, 2, 3]] if per_head else [[0, 1, 4]] * 2
    made = [np.r_[tuple(np.arange(32 * r, 32 * r + 32) for r in own)] for own in runs]
    made = np.stack([np.r_[own, tail] for own in made])
    return made if per_head else made[0]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("parts", PARTS, ids=["plain", "parts"])
def test_rows_that_stay_keep_their_bytes_and_positions(rng, dtype, parts, per_head):
    cache, keep = filled(rng, dtype, **parts), kept_rows(per_head)
    layer, n = cache.layer(0), keep.shape[-1]
    before = [getattr(layer, name).copy() for name in ("key_codes", "value_codes", "key_scales")]
    keys, values = cache.k(0).copy(), cache.v(0).copy()
    cache.evict(0, keep)
    assert (len(cache), len(layer), layer.num_dropped) == (TOKENS, n, TOKENS - n)
    each = np.broadcast_to(keep, (HEADS, n))
    if not FORMATS[dtype].kivi:  # whose rows lie elsewhere
        for name, was in zip(("key_codes", "value_codes", "key_scales"), before, strict=True):
            now = getattr(layer, name)
            for head in range(HEADS):
                assert np.array_equal(now[:, head], was[each[head], head])
    for head in range(HEADS):
        for now, was in ((cache.k(0), keys), (cache.v(0), values)):
            wanted = was[each[head], head]
            since = -16 if parts else 0  # others are read in the layer's own format from now on
            assert np.array_equal(now[since:, head], wanted[since:])
    more = rows(rng, 10)
    cache.append(0, more, more)
    cache.advance(10)
    query = rng.standard_normal((4, DIM)).astype(np.float32)
    out, keys, values = cache.attend(0, query), cache.k(0), cache.v(0)
    for head in range(4):
        logits = keys[:, head // 2].astype(np.float64) @ query[head] / 8
        p = np.exp(logits - logits.max())
        wanted = p @ values[:, head // 2] / p.sum()
        assert np.abs(out[head] - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_a_cache_goes_back_to_the_eviction_and_no_further(rng):
    cache = filled(rng, "int8")
    mark = cache.snapshot()
    cache.evict(0, np.arange(100, TOKENS))
    codes = cache.layer(0).key_codes.copy()
    more = rows(rng, 70)
    cache.append(0, more, more)
    cache.advance(70)
    cache.truncate(TOKENS)
    assert np.array_equal(cache.layer(0).key_codes, codes)
    for other in (cache, cache.copy(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (len(other), len(other.layer(0))) == (TOKENS, TOKENS - 100)
        with pytest.raises(PositionOutOfRangeError, match="evicted tokens at position 340"):
            other.truncate(TOKENS - 1)
    with pytest.raises(StaleSnapshotError):
        cache.restore(mark)
    cache.truncate(0)
    cache.append(0, more, more)
    assert (len(cache.layer(0)), cache.layer(0).num_dropped) == (70, 0)


def test_positions_of_a_cache_end_at_max_seq_len_whatever_was_evicted(rng):
    cache = KVCache(1, HEADS, DIM, max_seq_len=64)
    cache.append(0, rows(rng, 60), rows(rng, 60))
    cache.advance(60)
    cache.evict(0, range(40, 60))
    with pytest.raises(CapacityExceededError):
        cache.append(0, rows(rng, 5), rows(rng, 5))
    cache.append(0, rows(rng, 4), rows(rng, 4))


@pytest.mark.parametrize("parts", PARTS, ids=["plain", "parts"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "kivi4"])
def test_a_file_holds_what_is_left(rng, tmp_path, dtype, parts):
    cache = filled(rng, dtype, **parts)
    cache.evict(0, kept_rows(True))
    cache.save(tmp_path / "cache")
    other, more = KVCache.load(tmp_path / "cache"), rows(rng, 40)
    for each in (cache, other):
        each.append(0, more, more)
        each.advance(40)
    assert len(other) == len(cache)
    assert np.array_equal(other.k(0), cache.k(0)) and np.array_equal(other.v(0), cache.v(0))


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_cache_goes_on_evicting_the_same_tokens(rng, tmp_path, method):
    policy = KvCachePolicy(eviction=method)
    cache = policy.new_cache(2, HEADS, DIM, window=[None, 16])
    keys, queries = rows(rng, 500), rows(rng, 500, 4)

    def read(each, start, stop):
        policy.apply(each, more=stop - start)
        for layer in range(2):
            each.append(layer, keys[start:stop], keys[start:stop])
            each.attend(layer, queries[start:stop])
        each.advance(stop - start)

    read(cache, 0, 400)
    read(cache, 400, 401)
    cache.save(tmp_path / "cache", metadata={"title": "x"})
    assert cache.eviction is not None
    caches = [cache, KVCache.load(tmp_path / "cache"), KVCache.load(tmp_path / "cache", mmap=True)]
    for each in caches:
        assert (each.eviction, each.metadata.get("title", "x")) == (cache.eviction, "x")
        assert "kvedge.eviction" not in each.metadata
        for at in range(401, 460):
            read(each, at, at + 1)
    for each in caches[1:]:
        assert np.array_equal(each.layer(0).key_codes, cache.layer(0).key_codes)
    text = state_of(cache).eviction.as_text().replace("tokens=256", "tokens=0")
    plain = KVCache(1, HEADS, DIM)
    plain.save(tmp_path / "forged", metadata={"kvedge.eviction": text})
    with pytest.raises(kvedge.CorruptFileError, match="eviction is damaged"):
        KVCache.load(tmp_path / "forged")


def test_what_cannot_be_evicted_is_refused_and_changes_nothing(rng):
    cache = filled(rng, "int8")
    for keep, error in (
        ([3, 2], InvalidArgumentError),
        ([TOKENS], PositionOutOfRangeError),
        ([0.5], InvalidArgumentError),
        ([[0, 1]], ShapeMismatchError),
        (np.ones((HEADS, TOKENS + 1), bool), ShapeMismatchError),
        ([[0, 1], [2]], InvalidArgumentError),
    ):
        with pytest.raises(error):
            cache.evict(0, keep)
    uneven = np.zeros((HEADS, TOKENS), bool)
    uneven[0, :3] = uneven[1, :2] = True
    with pytest.raises(InvalidArgumentError, match=r"as many tokens, not \[3, 2\]"):
        cache.evict(0, uneven)
    recent = filled(rng, "int8", recent=16)
    with pytest.raises(InvalidArgumentError, match=r"last 80 tokens .* have to be kept"):
        recent.evict(0, range(TOKENS - 1))
    runs = filled(rng, "kivi4")
    for keep in (np.r_[1:TOKENS], np.r_[0:31, 64:TOKENS], np.r_[0:33, 64:TOKENS]):
        with pytest.raises(InvalidArgumentError, match="whole runs"):
            runs.evict(0, keep)
    window = KVCache(1, HEADS, DIM, window=8)
    window.append(0, rows(rng, 4), rows(rng, 4))
    window.advance(4)
    with pytest.raises(InvalidArgumentError, match="window=8 drops tokens by itself"):
        window.evict(0, [0])
    cache.shift(1, rope=kvedge.Rope(DIM))
    with pytest.raises(InvalidArgumentError, match=r"moved by shift\(\)"):
        cache.evict(0, [0])
    assert [len(each.layer(0)) for each in (cache, recent, runs)] == [TOKENS] * 3


def test_calls_that_need_all_positions_are_refused_after_an_eviction(rng):
    cache = filled(rng, "int8")
    cache.evict(0, range(10, TOKENS))
    for call in (
        lambda: cache.keep([0, 1]),
        lambda: cache.shift(1, rope=kvedge.Rope(DIM)),
        lambda: cache.extract(0, 5),
        lambda: cache.inject(KVCache(1, HEADS, DIM), 0),
    ):
        with pytest.raises(InvalidArgumentError, match="evicted 10 of 340"):
            call()
    cache.requantize("int4")
    assert (len(cache), len(cache.layer(0))) == (TOKENS, TOKENS - 10)
    with pytest.raises(PositionOutOfRangeError):
        cache.truncate(TOKENS - 1)


# ---- what is chosen ------------------------------------------------------------------------------


def mass_of(keys, queries, chosen, softcap=None, sinks=None):
    """Softmax mass of each token and KV head, summed over some of the queries."""
    mass = np.zeros((keys.shape[1], len(keys)))
    for i in chosen:
        for head in range(queries.shape[1]):
            kv_head = head * keys.shape[1] // queries.shape[1]
            logits = keys[: i + 1, kv_head].astype(np.float64) @ queries[i, head] / 8
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            p = np.exp(logits)
            mass[kv_head, : i + 1] += p / (p.sum() + (0 if sinks is None else np.exp(sinks[head])))
    return mass


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sink_logits": np.ones(4, np.float32)}])
def test_the_tokens_that_queries_attended_to_most_are_kept(rng, per, options):
    policy = KvCachePolicy(eviction=f"snapkv:tokens=64,recent=16,sinks=2,per={per},window=8,pool=1")
    cache = policy.new_cache(1, HEADS, DIM, dtype="float32")
    keys, queries = rows(rng, 150), rows(rng, 150, 4)
    for at in range(0, 150, 50):  # in chunks
        cache.append(0, keys[at : at + 50], keys[at : at + 50])
        cache.attend(0, queries[at : at + 50], **options)
        cache.advance(50)
    policy.apply(cache, more=1)
    assert (len(cache), len(cache.layer(0))) == (150, 60)
    mass = mass_of(
        keys, queries, range(142, 150), options.get("softcap"), options.get("sink_logits")
    )
    if per == "layer":
        mass = mass.sum(0, keepdims=True).repeat(HEADS, 0)
    for head in range(HEADS):
        best = np.argsort(-mass[head, 2:134], kind="stable")[: 60 - 18] + 2
        wanted = np.r_[0:2, np.sort(best), 134:150]
        assert np.array_equal(cache.k(0)[:, head], keys[wanted, head])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", [{"dtype": "int8"}, {"dtype": "kivi4"}, {"recent": 32}])
def test_a_cache_stays_within_its_budget(rng, method, storage):
    policy = KvCachePolicy(eviction=method)
    cache = policy.new_cache(2, HEADS, DIM, window=[None, 16], **storage)
    assert cache.eviction == Eviction.parse(method)
    for n in (400, *[1] * 40):  # a prompt, and what is written
        policy.apply(cache, more=n)
        for layer in range(2):
            cache.append(layer, rows(rng, n), rows(rng, n))
            cache.attend(layer, rows(rng, n, 4))
        cache.advance(n)
        assert len(cache.layer(0)) <= (256 if n == 1 else 400)
        assert len(cache.layer(1)) <= 16 + n
    assert len(cache) == 440
    assert cache.layer(0).capacity <= 2048


def test_a_budget_in_bytes_is_of_all_layers_that_evict():
    one = Eviction("sinks+recent", num_bytes=100_000)
    cache = KVCache(3, HEADS, DIM, window=[None, 16, None])
    configs = [layer.config for layer in state_of(cache).stores if layer.config.window is None]
    assert one.tokens_for(configs) == 100_000 // (2 * HEADS * 2 * (DIM + 4))
    assert one.tokens_for(configs * 2) == 100_000 // (4 * HEADS * 2 * (DIM + 4))


def test_a_draft_that_is_taken_back_leaves_no_trace_in_what_is_chosen(rng):
    policy = KvCachePolicy(eviction="snapkv:tokens=96,window=16")
    caches = [policy.new_cache(1, HEADS, DIM) for _ in range(2)]
    keys, queries = rows(rng, 160), rows(rng, 160, 4)
    for cache, draft in zip(caches, (0, 16), strict=True):
        cache.append(0, keys[:90], keys[:90])
        cache.attend(0, queries[:90])
        cache.advance(90)
        if draft:
            cache.append(0, keys[90 : 90 + draft], keys[90 : 90 + draft])
            cache.attend(0, queries[90 : 90 + draft])
            cache.advance(draft)
            cache.truncate(90)
        for at in range(90, 100):
            cache.append(0, keys[at : at + 1], keys[at : at + 1])
            cache.attend(0, queries[at])
            cache.advance()
        policy.apply(cache, more=1)
    assert len(caches[0].layer(0)) == 90
    assert np.array_equal(*(cache.layer(0).key_codes for cache in caches))


def test_a_choice_of_ones_own_goes_with_what_is_noted(rng):
    policy = KvCachePolicy(eviction="snapkv:tokens=64,window=8")
    cache = policy.new_cache(1, HEADS, DIM, dtype="float32")
    for n in (60, 10):
        cache.append(0, rows(rng, n), rows(rng, n))
        cache.attend(0, rows(rng, n, 4))
        cache.advance(n)
        if n == 60:
            cache.evict(0, np.r_[0:20, 40:57, 59])
    policy.apply(cache, more=1)
    assert (len(cache), len(cache.layer(0))) == (70, 48)
    mass = state_of(cache).eviction.of_layers[0]._mass(state_of(cache).store_at[0])
    assert np.isfinite(mass).all() and mass.sum() > 10


def test_a_file_that_evicted_by_heavy_goes_on_with_snapkv(rng, tmp_path):
    """Earlier versions had that method, and sums of what was attended to."""
    policy = KvCachePolicy(eviction="snapkv:tokens=24,window=4")
    cache = policy.new_cache(1, HEADS, DIM)
    cache.append(0, rows(rng, 20), rows(rng, 20))
    cache.attend(0, rows(rng, 20, 4))
    cache.advance(20)
    eviction = state_of(cache).eviction
    data = io.BytesIO()
    np.savez(data, sums=np.ones((HEADS, 20), np.float32), **eviction.of_layers[0].arrays)
    layers = {"0": base64.b64encode(data.getvalue()).decode()}
    text = json.dumps({"eviction": "heavy:tokens=24,every=2", "in_prompt": True, "layers": layers})
    read = CacheEviction.of_text(text, [(0, state_of(cache).store_at[0])])
    assert read.eviction == Eviction("snapkv", tokens=24, window=6)
    assert json.loads(read.as_text())["layers"] == json.loads(eviction.as_text())["layers"]


def test_pickles_of_evictions_of_earlier_versions_come_back(rng):
    """They had one more field, and what was noted had sums."""
    of_all = {"tokens": 24, "num_bytes": None, "sinks": 4, "recent": None, "per": "layer"}
    of_all |= {"window": 32, "pool": 7, "every": 2}
    heavy, snapkv = (Eviction.__new__(Eviction) for _ in range(2))
    heavy.__setstate__({"method": "heavy", **of_all})
    assert heavy == Eviction("snapkv", tokens=24, per="layer", window=6)
    snapkv.__setstate__({"method": "snapkv", **of_all, "tokens": 99})
    assert snapkv == Eviction("snapkv", tokens=99, per="layer")
    noted = Attended.__new__(Attended)
    noted.__setstate__((None, {"_sums": None, "_until": 0, "_queries": [], "eviction": snapkv}))
    assert (noted.eviction, noted.arrays) == (snapkv, {})
    assert pickle.loads(pickle.dumps(noted)).eviction == snapkv


def test_snapkv_lets_a_prompt_in_chunks_be_whole(rng):
    policy = KvCachePolicy(eviction="snapkv:tokens=64")
    cache = policy.new_cache(1, HEADS, DIM)
    for more in (50, 50, 50):
        policy.apply(cache, more=more)
        cache.append(0, rows(rng, more), rows(rng, more))
        cache.attend(0, rows(rng, more, 4))
        cache.advance(more)
    assert len(cache.layer(0)) == 150
    policy.apply(cache, more=1)
    assert len(cache.layer(0)) == 60


def test_an_evictions_text_is_read_back():
    for one in (
        Eviction("sinks+recent", tokens=512),
        Eviction("snapkv", num_bytes=1 << 20, per="layer", window=16, pool=5, recent=40, sinks=0),
    ):
        assert Eviction.parse(str(one)) == one
        assert Eviction.of(str(one)) == one
        assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("oldest:tokens=8", "sinks\\+recent, snapkv, not"),
        ("snapkv", "either tokens or num_bytes"),
        ("snapkv:tokens=9,num_bytes=9", "either tokens or num_bytes"),
        ("snapkv:tokens=many", "whole number"),
        ("snapkv:token=9", "no option 'token=9'"),
        (
            "snapkv:tokens=8,recent=8,window=4",
            "too little for 4 first and 8 last .* and others: it has to be 14",
        ),
        ("snapkv:tokens=32", "too little for 4 first and 32 last .* has to be 39"),
        ("sinks+recent:tokens=4", "too little for 4 first and 1 last .* has to be 6"),
        ("snapkv:tokens=64,per=token", '"head" or "layer"'),
        ("snapkv:tokens=64,pool=0", "pool must be at least 1"),
        ({"method": "snapkv", "tokens": 64, "top": 3}, "top"),
        (7, "must be an Eviction"),
    ],
)
def test_an_eviction_that_makes_no_sense_is_refused(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Eviction.of(given)


def test_a_policy_refuses_what_it_cannot_evict_from(rng):
    policy = KvCachePolicy(eviction="snapkv:tokens=120")
    pool = kvedge.KvBlockPool(num_blocks=4, block_size=16, num_layers=1, num_kv_heads=1, head_dim=8)
    for other in (kvedge.PagedKvCache(pool), object()):
        with pytest.raises(InvalidArgumentError, match="tokens in blocks or over ranks"):
            policy.apply(other)
    with pytest.raises(InvalidArgumentError, match=r"32 first and 96 last .* in runs of 32"):
        policy.attach(KVCache(1, HEADS, DIM, dtype="kivi4"))
    with pytest.raises(InvalidArgumentError, match="needs memory_bytes"):
        KvCachePolicy()
    with pytest.raises(InvalidArgumentError, match="it only evicts"):
        policy.occupancy(KVCache(1, HEADS, DIM))
    cache = policy.new_cache(1, HEADS, DIM)
    cache.append(0, rows(rng, 4), rows(rng, 4))
    for options in (
        {"mask": np.ones((4, 4), bool)},
        {"alibi_slopes": np.ones(4, np.float32)},
        {"window": 2},
        {"start": 1},
    ):
        with pytest.raises(InvalidArgumentError, match="counts positions"):
            cache.attend(0, rows(rng, 1, 4)[0], **options)
    with pytest.raises(InvalidArgumentError, match="causal attention alone"):
        cache.attend(0, rows(rng, 1, 4)[0], causal=False)


def test_a_policy_requantizes_what_is_left(rng):
    policy = KvCachePolicy(80_000, eviction="sinks+recent:tokens=128")
    cache = policy.new_cache(1, HEADS, DIM)
    for _ in range(20):
        policy.apply(cache, more=64)
        cache.append(0, rows(rng, 64), rows(rng, 64))
        cache.advance(64)
    assert (cache.dtype, len(cache)) == ("int8", 20 * 64)
    assert cache.used_bytes <= 80_000
