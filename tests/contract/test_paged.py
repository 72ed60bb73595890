"""Sequences in the blocks of a pool: sharing, copying on write, errors that change nothing."""

import copy
import gc
import pickle

import numpy as np
import pytest
import reference
from support import STORAGE_ERROR, cache_content, normal

import kvedge
from kvedge import KvBlockPool, KVCache, PagedKvCache, errors
from kvedge.core.formats import FORMATS

L, H, D, BLOCK = 2, 2, 8, 4


@pytest.fixture
def pool(dtype):
    return KvBlockPool(10, BLOCK, L, H, D, dtype)


@pytest.fixture
def cache(pool):
    return PagedKvCache(pool)


def fill(cache, seq, rng, n):
    """Append `n` tokens to every layer and advance; returns the rows (L, 2, n, H, D)."""
    rows = normal(rng, cache.pool.num_layers, 2, n, H, D)
    for layer, (keys, values) in enumerate(rows):
        cache.append(seq, layer, keys, values)
    cache.advance(seq, n)
    return rows


def sequence(cache, rng, n):
    seq = cache.new_sequence()
    if n:
        fill(cache, seq, rng, n)
    return seq


def contents(cache):
    """All that a refused call must leave as it is."""
    layers = range(cache.pool.num_layers)
    held = {
        seq: [(cache.k(seq, i).tobytes(), cache.v(seq, i).tobytes()) for i in layers]
        for seq in cache.sequences
    }
    tables = {seq: cache.block_table(seq).tolist() for seq in cache.sequences}
    counts = cache.pool.reference_counts.tolist()
    return held, tables, counts, cache.context_lens.tolist(), cache.pool.cached_count


def refused(cache, error, call, *arguments, match=None):
    before = contents(cache)
    with pytest.raises(error, match=match) as caught:
        call(*arguments)
    assert isinstance(caught.value, errors.KvedgeError)
    assert len(str(caught.value)) > 10
    assert contents(cache) == before


# -- the pool --------------------------------------------------------------------------------------


def test_a_pool_tells_its_size(pool, dtype):
    assert (pool.num_blocks, pool.block_size, pool.num_layers) == (10, BLOCK, L)
    assert (pool.num_kv_heads, pool.head_dim, pool.dtype) == (H, D, dtype)
    assert (pool.free_count, pool.used_count, pool.utilization) == (10, 0, 0.0)
    form = FORMATS[dtype]
    per_row = D * form.bits // 8 + (4 if form.has_scales else 0)  # float32 scales by default
    assert pool.memory_bytes == 10 * pool.block_bytes == 10 * BLOCK * L * 2 * H * per_row
    assert pool.fp32_memory_bytes == 10 * BLOCK * L * 2 * H * D * 4
    assert "10 blocks" in repr(pool) and dtype in repr(pool)


def test_pools_layers_and_caches_have_one_default_type_of_scales(rng):
    pool, cache = KvBlockPool(4, BLOCK, L, H, D), KVCache(L, H, D)
    layer = kvedge.QuantizedKvLayer(4, H, D)
    assert pool.scale_dtype == cache.scale_dtype == layer.scale_dtype == "float32"
    assert KvBlockPool(1, 1, 1, 1, 1, "int8", "float16").scale_dtype == "float16"
    cache.push_step(*normal(rng, 2, L, H, D))
    paged = PagedKvCache(pool)
    seq = paged.from_kv_cache(cache)
    np.testing.assert_array_equal(paged.k(seq, 0), cache.k(0))


def test_a_large_pool_takes_memory_only_as_it_is_written(rng):
    pool = KvBlockPool(1 << 16, 16, L, 8, 64)  # 2 GiB
    assert pool.memory_bytes > 2 << 30
    assert pool.resident_bytes < 64 << 20


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad", [0, -1, 2**62, 2**200, 1.5, "3", True, None])
@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim"]
)
def test_bad_sizes_are_refused(name, bad):
    good = {"num_blocks": 2, "block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4}
    with pytest.raises(errors.InvalidArgumentError, match=name):
        KvBlockPool(**{**good, name: bad})


def test_a_pool_too_large_is_refused():
    with pytest.raises(errors.InvalidArgumentError, match="num_blocks"):
        KvBlockPool(2**31 - 1, 2**31, 1, 1, 1)
    with pytest.raises(errors.OutOfMemoryError):
        KvBlockPool(2**31 - 1, 2**9, 64, 1 << 16, 1024)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "int5"}, {"scale_dtype": "bfloat16"}, {"dtype": "float32", "group_size": 4}],
)
def test_bad_formats_are_refused(options):
    with pytest.raises(errors.InvalidArgumentError):
        KvBlockPool(1, 1, 1, 1, 8, **options)


def test_blocks_can_be_allocated_shared_and_freed(pool):
    blocks = pool.allocate(3)
    assert blocks.dtype == np.int32 and len(set(blocks.tolist())) == 3
    pool.share(blocks[:1])
    pool.free(blocks)
    assert pool.used_count == 1
    pool.free(blocks[:1])
    assert pool.used_count == 0


def test_double_free_and_foreign_blocks_are_errors(pool, cache, rng):
    blocks = pool.allocate(2)
    owned = cache.block_table(sequence(cache, rng, 3))
    pool.free(blocks[:1])
    for bad in (blocks[:1], blocks, owned, [-1], [10], [2**40]):
        refused(cache, errors.BlockNotHeldError, pool.free, bad)
        refused(cache, errors.BlockNotHeldError, pool.share, bad)
    refused(cache, errors.InvalidArgumentError, pool.free, [blocks[1], blocks[1]])
    refused(cache, errors.DtypeMismatchError, pool.free, [0.5])
    refused(cache, errors.ShapeMismatchError, pool.free, 3)
    refused(cache, errors.CapacityExceededError, pool.allocate, 9)
    refused(cache, errors.InvalidArgumentError, pool.allocate, -1)


def test_freed_blocks_are_used_again_in_their_order(pool, cache, rng):
    seq = sequence(cache, rng, 3 * BLOCK)
    table = cache.block_table(seq)
    cache.drop(seq)
    assert cache.block_table(sequence(cache, rng, 3 * BLOCK)).tolist() == table.tolist()


def test_other_runtimes_can_read_the_blocks(pool, cache, rng, dtype):
    seq = sequence(cache, rng, 7)
    table = cache.block_table(seq)
    codes = pool.key_codes(1)
    per_row = D // 2 if dtype == "int4" else D
    assert codes.shape == (10, BLOCK, H, per_row) and not codes.flags.writeable
    rows = codes[table].reshape(-1, H, per_row)[:7]
    if dtype == "int4":
        rows = reference.int4_levels(rows, D)
    if dtype in reference.FLOATS:
        rows = reference.FLOATS[dtype](rows)
    else:
        scales = pool.key_scales(1)[table].reshape(-1, H, 1)[:7]
        rows = rows.astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(rows, cache.k(seq, 1))
    with pytest.raises(errors.LayerOutOfRangeError):
        pool.value_codes(L)


# -- sequences -------------------------------------------------------------------------------------


def test_sequences_have_numbers_that_no_cache_gives_again(pool):
    first, second = PagedKvCache(pool), PagedKvCache(pool)
    numbers = [first.new_sequence(), second.new_sequence(), first.new_sequence()]
    first.drop(numbers[0])
    numbers.append(first.new_sequence())
    assert len(set(numbers)) == 4
    assert numbers[1] in second and numbers[1] not in first and "x" not in first
    assert len(first) == first.num_sequences == 2


def test_block_tables_and_context_lens_are_int32_in_the_usual_layout(cache, rng):
    seqs = [sequence(cache, rng, n) for n in (9, 0, 4)]
    assert cache.sequences == tuple(seqs)
    assert cache.context_lens.dtype == np.int32 and cache.context_lens.tolist() == [9, 0, 4]
    tables = cache.block_tables()
    assert tables.dtype == np.int32 and tables.shape == (3, 3)
    for seq, row, blocks in zip(seqs, tables, (3, 0, 1), strict=True):
        table = cache.block_table(seq)
        assert table.dtype == np.int32 and row.tolist() == table.tolist() + [0] * (3 - blocks)
    assert cache.block_tables([seqs[2]]).shape == (1, 1)
    assert cache.block_tables([]).shape == (0, 0)


def test_a_fork_shares_all_blocks_and_copies_the_last_to_write(pool, cache, rng):
    seq = sequence(cache, rng, 10)
    old = cache.k(seq, 0)
    fork = cache.fork(seq)
    assert pool.used_count == 3
    assert cache.block_table(fork).tolist() == cache.block_table(seq).tolist()
    fill(cache, fork, rng, 1)
    mine, its = cache.block_table(seq), cache.block_table(fork)
    assert (mine[:2] == its[:2]).all() and mine[2] != its[2]
    fill(cache, seq, rng, 1)  # alone now: no further copy
    assert pool.used_count == 4
    np.testing.assert_array_equal(cache.k(seq, 0)[:10], old)
    np.testing.assert_array_equal(cache.k(fork, 0)[:10], old)
    assert (cache.k(seq, 0)[10] != cache.k(fork, 0)[10]).any()


def test_a_fork_at_the_end_of_a_block_copies_nothing(pool, cache, rng):
    seq = sequence(cache, rng, 2 * BLOCK)
    fill(cache, cache.fork(seq), rng, 1)
    assert pool.used_count == 3


def test_pending_tokens_stay_with_their_sequence(pool, cache, rng):
    seq = sequence(cache, rng, 3)
    keys, values = normal(rng, 2, 3, H, D)
    cache.append(seq, 0, keys, values)  # layer 1 lacks them
    assert cache.length(seq) == 3 and len(cache.k(seq, 0)) == 6 and len(cache.k(seq, 1)) == 3
    held = cache.k(seq, 0)
    snapshot = cache.snapshot(seq)  # marks what was advanced over
    assert len(snapshot) == 3
    twin = cache.new_sequence()
    cache.restore(twin, snapshot)
    assert len(cache.k(twin, 0)) == 3
    fill(cache, twin, rng, 2)
    np.testing.assert_array_equal(cache.k(seq, 0), held)
    cache.append(seq, 1, keys, values)
    cache.advance(seq, 3)
    np.testing.assert_array_equal(cache.k(seq, 0), held)
    cache.append(seq, 0, keys, values)
    cache.truncate(seq, 6)  # gives the block of pending tokens back
    assert len(cache.k(seq, 0)) == 6 and len(cache.block_table(seq)) == 2


def test_pending_tokens_are_not_left_behind_silently(cache, rng):
    seq = sequence(cache, rng, 3)
    row = normal(rng, 1, H, D)
    cache.append(seq, 1, row, row)
    advice = r"layer 1 .*advance\(\) over them or truncate\(\) first"
    for call in (cache.fork, cache.to_kv_cache):
        refused(cache, errors.LayersOutOfStepError, call, seq, match=advice)
    cache.append(seq, 0, row, row)
    refused(cache, errors.LayersOutOfStepError, cache.fork, seq, match="layers 0, 1 ")
    cache.truncate(seq, 3)
    assert cache.length(cache.fork(seq)) == len(cache.to_kv_cache(seq)) == 3
    cache.append(seq, 0, row, row)
    cache.append(seq, 1, row, row)
    cache.advance(seq)
    assert cache.length(cache.fork(seq)) == len(cache.to_kv_cache(seq)) == 4


def test_pending_tokens_of_a_kv_cache_are_not_left_behind_silently(pool, cache, rng):
    copied = KVCache(L, H, D, dtype=pool.dtype, scale_dtype=pool.scale_dtype)
    row = normal(rng, 1, H, D)
    copied.append(0, row, row)
    refused(
        cache,
        errors.LayersOutOfStepError,
        cache.from_kv_cache,
        copied,
        match=r"layer 0 .*advance\(\) over them or truncate\(\) first",
    )
    copied.append(1, row, row)
    copied.advance()
    assert cache.length(cache.from_kv_cache(copied)) == 1
    copied.append(1, row, row)
    refused(cache, errors.LayersOutOfStepError, cache.from_kv_cache, copied, match="layer 1 ")
    copied.truncate(1)
    assert cache.length(cache.from_kv_cache(copied)) == 1


def test_advance_names_the_layer_that_lacks_tokens(cache, rng):
    seq = sequence(cache, rng, 1)
    cache.append(seq, 0, *normal(rng, 2, H, D))
    refused(cache, errors.LayersOutOfStepError, cache.advance, seq, match="layer 1")
    refused(cache, errors.InvalidArgumentError, cache.advance, seq, -1)


def test_a_snapshot_outlives_whatever_happens_to_its_sequence(pool, cache, rng):
    seq = sequence(cache, rng, 6)
    old = cache.v(seq, 1)
    snapshot = cache.snapshot(seq)
    fill(cache, seq, rng, 5)
    cache.restore(seq, snapshot)
    np.testing.assert_array_equal(cache.v(seq, 1), old)
    cache.truncate(seq, 1)
    fill(cache, seq, rng, 8)
    cache.restore(seq, snapshot)
    np.testing.assert_array_equal(cache.v(seq, 1), old)
    cache.drop(seq)
    other = sequence(cache, rng, 9)
    cache.restore(other, snapshot)  # into another sequence, too
    np.testing.assert_array_equal(cache.v(other, 1), old)
    snapshot.release()
    snapshot.release()
    refused(cache, errors.StaleSnapshotError, cache.restore, other, snapshot)
    cache.drop(other)
    assert pool.used_count == 0


def test_snapshots_give_their_blocks_back(pool, cache, rng):
    seq = sequence(cache, rng, 6)
    snapshot = cache.snapshot(seq)
    cache.drop(seq)
    assert pool.used_count == 2 and "6 tokens" in repr(snapshot) and snapshot
    del snapshot
    gc.collect()
    assert pool.used_count == 0
    seq = sequence(cache, rng, 6)
    with cache.snapshot(seq) as snapshot:
        cache.drop(seq)
        assert pool.used_count == 2 and not snapshot.is_released
    assert pool.used_count == 0 and snapshot.is_released


def test_a_cache_gives_its_blocks_back(pool, rng):
    cache = PagedKvCache(pool)
    sequence(cache, rng, 6)
    del cache
    gc.collect()
    assert pool.free_count == 10


def test_caches_can_share_a_pool(pool, rng):
    one, other = PagedKvCache(pool), PagedKvCache(pool)
    first, second = sequence(one, rng, 6), sequence(other, rng, 6)
    assert not set(one.block_table(first)) & set(other.block_table(second))
    for call in (other.drop, other.fork, other.snapshot, other.k):
        with pytest.raises(errors.UnknownSequenceError):
            call(first) if call != other.k else call(first, 0)


# -- errors ----------------------------------------------------------------------------------------


def test_use_after_drop_is_an_error(cache, rng):
    seq = sequence(cache, rng, 3)
    snapshot = cache.snapshot(seq)
    cache.drop(seq)
    row, query = normal(rng, H, D), normal(rng, H, D)
    calls = [
        (cache.append, seq, 0, row, row),
        (cache.advance, seq),
        (cache.truncate, seq, 0),
        (cache.fork, seq),
        (cache.drop, seq),
        (cache.snapshot, seq),
        (cache.restore, seq, snapshot),
        (cache.register, seq, [1]),
        (cache.attend, seq, 0, query),
        (cache.attend_batch, [seq], 0, query[np.newaxis]),
        (cache.length, seq),
        (cache.k, seq, 0),
        (cache.block_table, seq),
        (cache.block_tables, [seq]),
        (cache.to_kv_cache, seq),
    ]
    for call, *arguments in calls:
        refused(cache, errors.UnknownSequenceError, call, *arguments)


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad", [None, "0", 1.0, True, [0], np.zeros(1, int)])
def test_a_sequence_is_an_integer(cache, bad):
    refused(cache, errors.InvalidArgumentError, cache.length, bad)


def test_bad_rows_change_nothing(cache, rng, dtype):
    seq = sequence(cache, rng, 3)
    fork = cache.fork(seq)
    good = normal(rng, 6, H, D)
    bad = good.copy()
    bad[5, 1, 3] = np.nan
    with pytest.raises(errors.NonFiniteInputError, match=r"\(5, 1, 3\)"):
        cache.append(fork, 0, good, bad)
    for keys, values, error in [
        (good, bad, errors.NonFiniteInputError),
        (bad, good, errors.NonFiniteInputError),
        (good, good[:5], errors.ShapeMismatchError),
        (good[:, :1], good, errors.ShapeMismatchError),
        (good.astype(np.float64), good, errors.DtypeMismatchError),
        (good[..., ::-1], good, errors.LayoutError),
        (normal(rng, 60, H, D), normal(rng, 60, H, D), errors.CapacityExceededError),
    ]:
        refused(cache, error, cache.append, fork, 0, keys, values)
    if FORMATS[dtype].has_scales:
        large = np.full((6, H, D), 1e38, np.float32)
        half = PagedKvCache(KvBlockPool(10, BLOCK, L, H, D, dtype, "float16"))
        other = half.fork(sequence(half, rng, 3))
        refused(half, errors.ScaleRangeError, half.append, other, 0, good, large)
    for layer in (-1, L, 2**70):
        refused(cache, errors.LayerOutOfRangeError, cache.append, fork, layer, good, good)
    refused(cache, errors.PositionOutOfRangeError, cache.truncate, fork, 4)
    refused(cache, errors.PositionOutOfRangeError, cache.truncate, fork, -1)


def test_out_of_blocks_leaves_the_pool_unchanged_and_can_be_mended(pool, cache, rng):
    seq, other = sequence(cache, rng, 6 * BLOCK), sequence(cache, rng, 3 * BLOCK)
    rows = normal(rng, 2 * BLOCK, H, D)
    refused(cache, errors.CapacityExceededError, cache.append, seq, 0, rows, rows, match="1 of 10")
    cache.drop(other)
    cache.append(seq, 0, rows, rows)


def test_copy_on_write_needs_a_free_block_as_well(pool, cache, rng):
    seq = sequence(cache, rng, 10 * BLOCK - 1)
    fork = cache.fork(seq)
    row = normal(rng, H, D)
    refused(cache, errors.CapacityExceededError, cache.append, fork, 0, row, row)
    cache.drop(fork)
    cache.append(seq, 0, row, row)  # nobody shares it any more


def test_foreign_snapshots_are_refused(cache, rng, dtype):
    seq = sequence(cache, rng, 2)
    other = PagedKvCache(KvBlockPool(10, BLOCK, L, H, D, dtype))
    mark = other.snapshot(sequence(other, rng, 2))
    for bad in (mark, None, 3, KVCache(1, 1, 1).snapshot()):
        refused(cache, errors.InvalidArgumentError, cache.restore, seq, bad)
    with pytest.raises(errors.InvalidArgumentError):
        kvedge.PagedSnapshot()


def test_a_cache_needs_a_pool():
    for bad in (None, 3, KVCache(1, 1, 1)):
        with pytest.raises(errors.InvalidArgumentError, match="KvBlockPool"):
            PagedKvCache(bad)


def test_what_shares_memory_is_not_copied_by_accident(pool, cache, rng):
    for thing in (pool, cache, cache.snapshot(sequence(cache, rng, 1))):
        with pytest.raises(errors.InvalidArgumentError):
            pickle.dumps(thing)
    for thing in (pool, cache):
        with pytest.raises(errors.InvalidArgumentError):
            copy.copy(thing)


# -- copies to and from a KVCache ------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 4, 7])
def test_a_sequence_goes_to_a_kv_cache_and_back_byte_for_byte(pool, cache, rng, n):
    sequence(cache, rng, 5)
    seq = sequence(cache, rng, n)
    fork = cache.fork(seq)
    rows = fill(cache, fork, rng, 2)
    copied = cache.to_kv_cache(fork)
    assert len(copied) == n + 2 and copied.scale_dtype == pool.scale_dtype
    direct = KVCache(L, H, D, dtype=pool.dtype, scale_dtype=pool.scale_dtype)
    for layer in range(L):
        np.testing.assert_array_equal(copied.k(layer), cache.k(fork, layer))
        direct.append(layer, *rows[layer])
        np.testing.assert_array_equal(copied.v(layer)[n:], direct.v(layer))
    back = cache.from_kv_cache(copied)
    assert cache_content(cache.to_kv_cache(back)) == cache_content(copied)
    query = normal(rng, 2 * H, D)
    np.testing.assert_allclose(cache.attend(back, 1, query), copied.attend(1, query), atol=1e-5)


def test_only_caches_of_the_same_format_come_in(pool, cache, rng, dtype):
    seq = sequence(cache, rng, 3)
    same = {"dtype": dtype, "scale_dtype": pool.scale_dtype}
    other = {"dtype": "float32" if dtype == "int8" else "int8"}
    for bad in (KVCache(L + 1, H, D, **same), KVCache(L, H, D, **other)):
        refused(cache, errors.ShapeMismatchError, cache.from_kv_cache, bad)
    refused(cache, errors.InvalidArgumentError, cache.from_kv_cache, cache)
    if FORMATS[dtype].has_scales:
        centred = KVCache(L, H, D, key_offset=np.ones((L, H, D), np.float32), **same)
        refused(cache, errors.InvalidArgumentError, cache.from_kv_cache, centred)
    large = KVCache(L, H, D, **same)
    for layer in range(L):
        large.append(layer, *normal(rng, 2, 38, H, D))
    large.advance(38)
    refused(cache, errors.CapacityExceededError, cache.from_kv_cache, large)
    assert len(cache.to_kv_cache(seq, max_seq_len=3)) == 3
    refused(cache, errors.CapacityExceededError, lambda: cache.to_kv_cache(seq, max_seq_len=2))


# -- threads ---------------------------------------------------------------------------------------


# ---- single tokens, and room beforehand ----------------------------------------------------------


def test_single_tokens_are_those_of_the_whole(cache, rng):
    sequence(cache, rng, 3)
    seq = sequence(cache, rng, 9)
    cache.append(seq, 1, *normal(rng, 2, H, D))  # pending
    for layer, tokens in ((0, 9), (1, 10)):
        keys, values = cache.k(seq, layer), cache.v(seq, layer)
        for position in range(tokens):
            of_token = cache.get_keys_at(seq, layer, position)
            np.testing.assert_array_equal(of_token, keys[position].reshape(-1))
            of_token = cache.get_values_at(seq, layer, position)
            np.testing.assert_array_equal(of_token, values[position].reshape(-1))
            for head in range(H):
                key = cache.get_key(seq, layer, position, head)
                np.testing.assert_array_equal(key, keys[position, head])
                value = cache.get_value(seq, layer, position, head)
                np.testing.assert_array_equal(value, values[position, head])
        for read in (cache.get_keys_at, cache.get_values_at):
            refused(cache, errors.PositionOutOfRangeError, read, seq, layer, tokens)
            refused(cache, errors.PositionOutOfRangeError, read, seq, layer, -1)
    refused(cache, errors.HeadOutOfRangeError, cache.get_key, seq, 0, 0, H)
    refused(cache, errors.HeadOutOfRangeError, cache.get_value, seq, 0, 0, -1)
    refused(cache, errors.LayerOutOfRangeError, cache.get_keys_at, seq, L, 0)
    refused(cache, errors.UnknownSequenceError, cache.get_keys_at, 10**9, 0, 0)


def test_what_was_reserved_is_there_when_the_pool_is_full(cache, pool, rng):
    seq = sequence(cache, rng, 2)
    cache.reserve(seq, 10)  # 3 blocks in all
    assert len(cache.block_table(seq)) == 3 and pool.used_count == 3
    cache.reserve(seq, 4)
    assert pool.used_count == 3
    others = pool.allocate(pool.free_count)
    fill(cache, seq, rng, 10)
    refused(cache, errors.CapacityExceededError, cache.append, seq, 0, *normal(rng, 2, H, D))
    refused(cache, errors.CapacityExceededError, cache.reserve, seq, 1)
    pool.free(others)
    refused(cache, errors.CapacityExceededError, cache.reserve, seq, 2**70)
    refused(cache, errors.InvalidArgumentError, cache.reserve, seq, -1)
    refused(cache, errors.UnknownSequenceError, cache.reserve, 10**9, 1)


def test_reserved_blocks_are_nobody_elses(cache, pool, rng):
    seq = sequence(cache, rng, 6)
    cache.reserve(seq, 9)
    query = normal(rng, H, D)
    before = cache.attend(seq, 0, query)
    with cache.snapshot(seq) as mark:
        twin, copy = cache.fork(seq), cache.new_sequence()
        cache.restore(copy, mark)
        np.testing.assert_array_equal(cache.attend(twin, 0, query), before)
        rows = [fill(cache, each, rng, 3) for each in (seq, twin, copy)]
    for each, (keys, _) in zip((seq, twin, copy), (of[0] for of in rows), strict=True):
        error = np.abs(cache.k(each, 0)[6:] - keys).max()
        assert error <= 4 * STORAGE_ERROR[pool.dtype]
    own = [set(cache.block_table(each)[2:].tolist()) for each in (seq, twin, copy)]
    assert not (own[0] & own[1] or own[1] & own[2] or own[0] & own[2])
    cache.truncate(seq, 1)
    assert len(cache.block_table(seq)) == 1  # reserved blocks are given back
    for each in (seq, twin, copy):
        cache.drop(each)
    assert pool.used_count == 0


@pytest.mark.parametrize("length", [0, -3])
def test_a_cache_of_no_tokens_at_most_is_refused(length):
    cache = PagedKvCache(KvBlockPool(4, 4, 1, 2, 8))
    with pytest.raises(errors.InvalidArgumentError, match="max_seq_len must be from 1"):
        cache.to_kv_cache(cache.new_sequence(), max_seq_len=length)
