"""A pool in a file: all sequences, what they share, and the prefixes that can be found."""

import numpy as np
import pytest
from fixtures import make_pools
from support import normal

from kvedge import KvBlockPool, KVCache, PagedKvCache, errors
from kvedge.files.header import opened
from kvedge.files.tensors import read, write

L, H, D, BLOCK = 2, 2, 8, 4


def append(cache, seq, rng, n):
    for layer in range(L):
        cache.append(seq, layer, *normal(rng, 2, n, H, D))
    cache.advance(seq, n)


@pytest.fixture
def cache(rng, dtype):
    """Sequences that share, one that is empty, prefixes of sequences and of dropped ones."""
    cache = PagedKvCache(KvBlockPool(30, BLOCK, L, H, D, dtype))
    gone = cache.new_sequence()
    append(cache, gone, rng, 9)
    first = cache.new_sequence()
    append(cache, first, rng, 10)
    cache.register(first, range(10))
    append(cache, cache.fork(first), rng, 3)
    cache.new_sequence()
    other = cache.match_prefix(range(8))[0]
    append(cache, other, rng, 6)
    cache.register(other, [*range(8), 50, 51, 52, 53])
    cache.drop(gone)
    for start in (100, 200):
        idle = cache.new_sequence()
        append(cache, idle, rng, 8)
        cache.register(idle, range(start, start + 8))
        cache.drop(idle)
    cache.reserve(first, 9)
    return cache


def contents(cache):
    return [
        [(cache.k(seq, i).tobytes(), cache.v(seq, i).tobytes()) for i in range(L)]
        for seq in cache.sequences
    ]


def shared(cache):
    """Which sequences have which blocks in common."""
    tables = [
        cache.block_table(seq)[: -(-cache.length(seq) // BLOCK)].tolist() for seq in cache.sequences
    ]
    return [[len(set(one) & set(other)) for one in tables] for other in tables]


def found(cache, ids):
    seq, n = cache.match_prefix(ids)
    rows = cache.k(seq, 0).tobytes()
    cache.drop(seq)
    return n, rows


def test_a_loaded_pool_holds_what_was_saved_and_goes_on_like_it(cache, rng, tmp_path):
    path = tmp_path / "pool"
    cache.save(path)
    other = PagedKvCache.load(path)
    assert contents(other) == contents(cache) and shared(other) == shared(cache)
    assert other.context_lens.tolist() == cache.context_lens.tolist() == [10, 13, 0, 14]
    assert other.pool.num_blocks == 30 and other.pool.cached_count == cache.pool.cached_count
    assert other.pool.used_count == cache.pool.used_count - 2  # what was reserved
    for ids in (range(8), [*range(8), 50, 51, 52, 53], range(100, 108), range(200, 208), [7] * 4):
        assert found(other, ids) == found(cache, ids)
    query = normal(rng, 3, 4, D)
    chosen = [other.sequences[i] for i in (0, 1, 3)]
    outs = cache.attend_batch([cache.sequences[i] for i in (0, 1, 3)], 1, query)
    np.testing.assert_array_equal(other.attend_batch(chosen, 1, query), outs)
    for seq in other.sequences:  # each writes to blocks of its own
        append(other, seq, rng, 5)
    assert contents(PagedKvCache.load(path)) == contents(cache)
    for seq in other.sequences:
        other.drop(seq)
    assert other.pool.used_count == 0
    assert other.pool.reference_counts.sum() == 0


def test_the_least_recently_used_prefix_is_still_the_first_to_go(cache, rng, tmp_path):
    cache.save(tmp_path / "pool")
    for each in (cache, PagedKvCache.load(tmp_path / "pool")):
        for seq in each.sequences:
            each.drop(seq)
        each.pool.allocate(each.pool.free_count - each.pool.cached_count + 2)
        assert found(each, range(100, 108))[0] == 0
        assert found(each, range(200, 208))[0] == 8


def test_a_pool_is_loaded_with_more_or_fewer_blocks(cache, tmp_path):
    path = tmp_path / "pool"
    cache.save(path)
    needed = cache.pool.used_count + cache.pool.cached_count - 2
    for num_blocks in (needed, 1000):
        other = PagedKvCache.load(path, num_blocks=num_blocks)
        assert other.pool.num_blocks == num_blocks and contents(other) == contents(cache)
    with pytest.raises(errors.InvalidArgumentError, match="num_blocks"):
        PagedKvCache.load(path, num_blocks=needed - 1)


def test_rows_that_no_sequence_has_are_not_saved(rng, tmp_path):
    cache = PagedKvCache(KvBlockPool(4, BLOCK, L, H, D, "float32"))
    secret = cache.new_sequence()
    append(cache, secret, rng, 8)
    rows = cache.k(secret, 0)[3].tobytes()
    cache.drop(secret)
    append(cache, cache.new_sequence(), rng, 2)
    cache.save(tmp_path / "pool")
    assert rows in cache.pool.key_codes(0).tobytes()
    assert rows not in (tmp_path / "pool").read_bytes()


def test_pending_tokens_are_not_saved(cache, rng, tmp_path):
    cache.append(cache.sequences[0], 1, *normal(rng, 2, H, D))
    with pytest.raises(errors.LayersOutOfStepError):
        cache.save(tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


def test_an_empty_cache_is_saved_and_loaded(dtype, tmp_path):
    cache = PagedKvCache(KvBlockPool(3, BLOCK, L, H, D, dtype))
    cache.save(tmp_path / "pool")
    other = PagedKvCache.load(tmp_path / "pool")
    assert len(other) == 0 and other.pool.free_count == 3


def forged(path, **changes):
    """The file with some metadata or arrays replaced, and a digest that fits."""
    with opened(path) as saved:
        fields, arrays = read(saved, "kvedge pool")
    for name, value in changes.items():
        (fields if isinstance(value, str) else arrays)[name] = value
    target = path.with_name("forged")
    write(target, fields, arrays)
    return target


def test_damaged_and_forged_files_are_refused(rng, tmp_path):
    cache = PagedKvCache(KvBlockPool(9, BLOCK, 1, H, D))
    for i in range(2):
        seq = cache.new_sequence()
        cache.append(seq, 0, *normal(rng, 2, 8, H, D))
        cache.advance(seq, 8)
        cache.register(seq, range(10 * i, 10 * i + 8))
    cache.drop(cache.sequences[1])
    path = tmp_path / "pool"
    cache.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 41):
        (tmp_path / "cut").write_bytes(whole[:at])
        (tmp_path / "bad").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        for name in ("cut", "bad"):
            with pytest.raises(errors.CorruptFileError):
                PagedKvCache.load(tmp_path / name)
    assert contents_of_one(PagedKvCache.load(forged(path))) == contents_of_one(cache)
    codes = np.zeros((16, H, D), np.int8)
    for changes in (
        {"num_blocks": "3"},
        {"num_blocks": "x"},
        {"head_dim": "0"},
        {"dtype": "int5"},
        {"format_version": "2"},
        {"blocks": "5"},
        {"lengths": np.array([99], np.int64)},
        {"lengths": np.array([-1], np.int64)},
        {"lengths": np.array([[8]], np.int64)},
        {"tables": np.array([0, 0], np.int32)},
        {"tables": np.array([0, 4], np.int32)},
        {"tables": np.array([0, -1], np.int32)},
        {"tables": np.array([1, 0], np.int32)},
        {"idle": np.array([2], np.int32)},
        {"idle": np.array([1, 2], np.int32)},
        {"prefix_blocks": np.array([0, 1, 2, 2], np.int32)},
        {"prefix_parents": np.array([-1, 3, -1, 2], np.int32)},
        {"prefix_ids": np.zeros((4, BLOCK), np.int64)},
        {"layers.0.key_codes": codes - np.int8(-128)},
        {"layers.0.key_codes": codes[1:]},
        {"layers.0.key_scales": np.full((16, H, 1), np.nan, np.float16)},
        {"more": codes},
    ):
        with pytest.raises(errors.CorruptFileError):
            PagedKvCache.load(forged(path, **changes))
    KVCache(1, H, D).save(tmp_path / "cache")
    with pytest.raises(errors.CorruptFileError, match="not of kvedge pool"):
        PagedKvCache.load(tmp_path / "cache")


def contents_of_one(cache):
    return [cache.k(seq, 0).tobytes() for seq in cache.sequences]


# ---- one sequence ----------------------------------------------------------------------------


def of_sequence(cache, seq):
    return [(cache.k(seq, i).tobytes(), cache.v(seq, i).tobytes()) for i in range(L)]


def test_a_sequence_is_swapped_out_and_in_again(cache, rng, tmp_path):
    path = tmp_path / "sequence"
    seq = cache.sequences[-1]
    append(cache, seq, rng, 3)
    before, used, length = of_sequence(cache, seq), cache.pool.used_count, cache.length(seq)
    others = [of_sequence(cache, each) for each in cache.sequences[:-1]]
    cache.swap_out(seq, path)
    assert seq not in cache and cache.pool.used_count < used
    again = cache.swap_in(path)
    assert again not in (seq, *cache.sequences[:-1]) and path.exists()
    assert cache.length(again) == length and of_sequence(cache, again) == before
    assert [of_sequence(cache, each) for each in cache.sequences[:-1]] == others
    append(cache, again, rng, 2)
    query = normal(rng, H, D)
    twin = cache.from_kv_cache(cache.to_kv_cache(again))
    out, wanted = cache.attend(again, 0, query), cache.attend(twin, 0, query)
    np.testing.assert_allclose(out, wanted, atol=1e-5)  # in other blocks
    assert len(KVCache.load(path)) == length  # the file of any cache
    empty = cache.new_sequence()
    cache.swap_out(empty, path)
    assert cache.length(cache.swap_in(path)) == 0


def test_what_is_registered_is_shared_when_a_sequence_comes_back(cache, rng, tmp_path):
    ids = [*range(300, 310)]
    seq = cache.new_sequence()
    append(cache, seq, rng, 10)
    cache.register(seq, ids)
    before, other = of_sequence(cache, seq), cache.fork(seq)
    cache.swap_out(seq, tmp_path / "sequence")
    used = cache.pool.used_count
    hits = cache.pool.prefix_hits
    again = cache.swap_in(tmp_path / "sequence", token_ids=ids)
    assert of_sequence(cache, again) == before
    assert cache.pool.used_count == used + 1  # the block that is not full
    assert cache.block_table(again)[:2].tolist() == cache.block_table(other)[:2].tolist()
    assert cache.pool.prefix_hits == hits
    whole = cache.swap_in(tmp_path / "sequence", token_ids=ids[:8])
    assert of_sequence(cache, whole) == before
    with pytest.raises(errors.ShapeMismatchError, match="11 token ids for 10 tokens"):
        cache.swap_in(tmp_path / "sequence", token_ids=range(11))


def test_a_swap_that_fails_changes_nothing(cache, rng, tmp_path):
    path = tmp_path / "sequence"
    seq = cache.sequences[1]
    before, counts = contents(cache), cache.pool.reference_counts
    with pytest.raises(OSError):
        cache.swap_out(seq, tmp_path / "no" / "folder")
    with pytest.raises(FileNotFoundError):
        cache.swap_in(path)
    pending = cache.new_sequence()
    cache.append(pending, 0, *normal(rng, 2, H, D))
    with pytest.raises(errors.LayersOutOfStepError):
        cache.swap_out(pending, path)
    cache.drop(pending)
    KVCache(L, H, D + 1).save(path)
    with pytest.raises(errors.ShapeMismatchError):
        cache.swap_in(path)
    path.write_bytes(b"no session")
    with pytest.raises(errors.CorruptFileError):
        cache.swap_in(path)
    ids = [*range(500, 508)]
    known = cache.new_sequence()
    append(cache, known, rng, 8)
    cache.register(known, ids)
    longer = cache.to_kv_cache(known)
    for layer in range(L):
        longer.append(layer, *normal(rng, 2, 120, H, D))
    longer.advance(120)
    longer.save(path)
    cache.drop(known)
    with pytest.raises(errors.CapacityExceededError):
        cache.swap_in(path, token_ids=ids)
    assert contents(cache) == before
    np.testing.assert_array_equal(cache.pool.reference_counts, counts)
    with pytest.raises(errors.UnknownSequenceError):
        cache.swap_out(known, path)


# ---- files that earlier versions wrote ----------------------------------------------------------


@pytest.mark.parametrize("name", make_pools.CASES)
def test_old_files_of_pools_open_and_go_on(name, tmp_path):
    """Their sequences read the same bytes, share the same blocks, and grow as they would have."""
    path = make_pools.HERE / f"{name}.kvedge"
    old, new = PagedKvCache.load(path), make_pools.build(make_pools.CASES[name])
    expected = path.with_suffix(".sha256").read_text().strip()
    assert make_pools.digest(old) == make_pools.digest(new) == expected
    assert old.context_lens.tolist() == [140, 170, 45, 0]
    assert old.pool.used_count == new.pool.used_count
    assert old.pool.cached_count == new.pool.cached_count > 0
    new.save(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == path.read_bytes()
    size = old.pool.block_size
    known = range(make_pools.KNOWN, make_pools.KNOWN + 70)
    for cache in (old, new):
        for seed, seq in enumerate(cache.sequences):
            make_pools.append(cache, seq, 10 + seed, 61)
        for ids in (known, range(140)):
            assert cache.match_prefix(ids)[1] == len(ids) // size * size
    assert make_pools.digest(old) == make_pools.digest(new)
