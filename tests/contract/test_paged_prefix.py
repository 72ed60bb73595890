"""Prefixes found by their token ids, shared, and forgotten when their memory is needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import normal

from kvedge import KvBlockPool, PagedKvCache, errors

L, H, D, BLOCK = 2, 2, 8, 4


@pytest.fixture
def pool():
    return KvBlockPool(10, BLOCK, L, H, D, scale_dtype="float16")


@pytest.fixture
def cache(pool):
    return PagedKvCache(pool)


def append(cache, seq, rng, n):
    for layer in range(L):
        cache.append(seq, layer, *normal(rng, 2, n, H, D))
    cache.advance(seq, n)


def registered(cache, rng, ids):
    """A sequence of these tokens that others can find."""
    seq, n = cache.match_prefix(ids)
    if n < len(ids):
        append(cache, seq, rng, len(ids) - n)
    cache.register(seq, ids)
    return seq


def matched(cache, ids):
    """How many tokens are known, without keeping the sequence."""
    seq, n = cache.match_prefix(ids)
    assert cache.length(seq) == n == len(cache.k(seq, 0))
    cache.drop(seq)
    return n


def test_full_blocks_of_a_registered_sequence_are_found_and_shared(pool, cache, rng):
    ids = list(range(100, 111))
    seq = registered(cache, rng, ids)
    twin, n = cache.match_prefix(ids)
    assert n == 8  # the third block is not full
    assert cache.block_table(twin).tolist() == cache.block_table(seq)[:2].tolist()
    np.testing.assert_array_equal(cache.k(twin, 1), cache.k(seq, 1)[:8])
    assert pool.used_count == 3


@pytest.mark.parametrize(
    ("ids", "n"),
    [
        ([], 0),
        ([1], 0),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], 8),
        ([1, 2, 3, 4, 5, 6, 7, 9], 4),
        ([1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8], 4),
        ([5, 6, 7, 8], 0),  # a block counts with all that is before it
        ([2, 1, 3, 4, 5, 6, 7, 8], 0),
        (np.array([1, 2, 3, 4, 5], np.uint8), 4),
    ],
)
def test_the_longest_known_prefix_is_found(cache, rng, ids, n):
    registered(cache, rng, [1, 2, 3, 4, 5, 6, 7, 8])
    assert matched(cache, ids) == n


def test_a_prefix_branches(cache, rng):
    registered(cache, rng, [1, 1, 1, 1, 2, 2, 2, 2])
    registered(cache, rng, [1, 1, 1, 1, 3, 3, 3, 3])
    assert cache.pool.used_count == 3
    assert matched(cache, [1, 1, 1, 1, 2, 2, 2, 2]) == 8
    assert matched(cache, [1, 1, 1, 1, 3, 3, 3, 3]) == 8


def test_a_prefix_outlives_its_sequence(pool, cache, rng):
    seq = registered(cache, rng, list(range(9)))
    keys = cache.k(seq, 0)
    cache.drop(seq)
    assert (pool.free_count, pool.cached_count, pool.utilization) == (10, 2, 0.0)
    again, n = cache.match_prefix(range(9))
    assert n == 8 and pool.cached_count == 0 and pool.used_count == 2
    np.testing.assert_array_equal(cache.k(again, 0), keys[:8])


def test_prefixes_are_found_through_every_cache_of_the_pool(pool, cache, rng):
    registered(cache, rng, [1, 2, 3, 4])
    assert matched(PagedKvCache(pool), [1, 2, 3, 4]) == 4


def test_the_least_recently_used_prefix_makes_room(pool, cache, rng):
    for first in (10, 20, 30):  # two blocks each
        cache.drop(registered(cache, rng, [first] * 8))
    assert pool.cached_count == 6
    assert matched(cache, [10] * 8) == 8  # used again
    seq = cache.new_sequence()
    append(cache, seq, rng, 5 * BLOCK)  # four are free, one more is needed
    assert pool.cached_count == 5
    append(cache, seq, rng, 2 * BLOCK)
    # The end of a prefix goes before its beginning.
    assert [matched(cache, [first] * 8) for first in (10, 20, 30)] == [8, 0, 4]


def test_prefixes_in_use_never_make_room(pool, cache, rng):
    seq = registered(cache, rng, [1] * 8)
    other = cache.new_sequence()
    with pytest.raises(errors.CapacityExceededError):
        append(cache, other, rng, 9 * BLOCK)
    append(cache, other, rng, 8 * BLOCK)
    assert matched(cache, [1] * 8) == 8
    cache.drop(seq)


def test_a_failed_append_forgets_no_prefix(pool, cache, rng):
    cache.drop(registered(cache, rng, [1] * 40))
    seq = cache.new_sequence()
    bad = np.full((8, H, D), np.nan, np.float32)
    with pytest.raises(errors.NonFiniteInputError):
        cache.append(seq, 0, bad, bad)
    large = np.full((8, H, D), 1e38, np.float32)
    with pytest.raises(errors.ScaleRangeError):
        cache.append(seq, 0, large, large)
    with pytest.raises(errors.CapacityExceededError):
        cache.append(seq, 0, *normal(rng, 2, 41, H, D))
    assert pool.cached_count == 10 and matched(cache, [1] * 40) == 40


def test_writing_into_a_registered_block_copies_it(pool, cache, rng):
    ids = list(range(8))
    seq = registered(cache, rng, ids)
    keys = cache.k(seq, 0)
    cache.truncate(seq, 7)  # as after a prompt that was known to its end
    append(cache, seq, rng, 1)
    assert matched(cache, ids) == 8
    again, _ = cache.match_prefix(ids)
    np.testing.assert_array_equal(cache.k(again, 0), keys)
    np.testing.assert_array_equal(cache.k(seq, 0)[:7], keys[:7])


def test_in_a_full_pool_a_registered_block_is_written_over_instead(pool, cache, rng):
    seq = registered(cache, rng, list(range(40)))
    cache.truncate(seq, 39)
    append(cache, seq, rng, 1)
    assert matched(cache, range(40)) == 36


def test_registering_again_goes_on_where_it_stopped(cache, rng):
    ids = list(range(20))
    seq = registered(cache, rng, ids[:6])
    append(cache, seq, rng, 14)
    cache.register(seq, ids[:10])
    cache.register(seq, ids)
    cache.register(seq, ids)
    assert matched(cache, ids) == 20


def test_what_was_computed_twice_is_registered_once(pool, cache, rng):
    seqs = [cache.new_sequence(), cache.new_sequence()]
    for seq in seqs:
        append(cache, seq, rng, 12)
    cache.register(seqs[0], [1] * 8)
    cache.register(seqs[1], [1] * 12)
    twin, n = cache.match_prefix([1] * 12)
    first, second = (cache.block_table(seq) for seq in seqs)
    assert n == 12 and cache.block_table(twin).tolist() == [*first[:2], second[2]]
    for seq in (*seqs, twin):
        cache.drop(seq)
    assert pool.free_count == 10 and pool.cached_count == 3


def test_a_prefix_that_was_cut_off_lets_go_of_what_followed(pool, cache, rng):
    early, late = cache.new_sequence(), cache.new_sequence()
    for seq in (early, late):
        append(cache, seq, rng, 12)
    cache.register(early, [1] * 8)
    cache.register(late, [1] * 12)  # its third block follows the first two of the other
    cache.drop(early)
    other = cache.new_sequence()
    append(cache, other, rng, 7 * BLOCK)  # all but the blocks of `late`
    assert matched(cache, [1] * 12) == 0
    cache.register(late, [1] * 12)
    assert matched(cache, [1] * 12) == 12


def test_wrong_token_ids_are_refused(cache, rng):
    seq = registered(cache, rng, [1, 2, 3, 4, 5])
    before = cache.pool.reference_counts
    for ids, error in [
        ([1, 2, 3, 4, 5, 6], errors.ShapeMismatchError),
        ([[1, 2]], errors.ShapeMismatchError),
        (3, errors.ShapeMismatchError),
        ([1.0, 2.0], errors.InvalidArgumentError),
        (["a"], errors.InvalidArgumentError),
        ([True, False], errors.InvalidArgumentError),
        ([1, [2]], errors.InvalidArgumentError),
        ([2**70], errors.InvalidArgumentError),
        ([9, 2, 3, 4, 5], errors.InvalidArgumentError),  # registered under others
    ]:
        with pytest.raises(error):
            cache.register(seq, ids)
    for ids in ([1.5], [[1]], None, [2**63], "ab"):
        with pytest.raises((errors.InvalidArgumentError, errors.ShapeMismatchError)):
            cache.match_prefix(ids)
    assert matched(cache, [1, 2, 3, 4]) == 4 and matched(cache, [9, 2, 3, 4]) == 0
    assert cache.num_sequences == 1
    np.testing.assert_array_equal(cache.pool.reference_counts, before)


def test_prefixes_can_be_forgotten(pool, cache, rng):
    seq = registered(cache, rng, [1] * 8)
    cache.drop(registered(cache, rng, [2] * 8))
    pool.forget_prefixes()
    assert pool.cached_count == 0 and pool.used_count == 2
    assert matched(cache, [1] * 8) == matched(cache, [2] * 8) == 0
    cache.register(seq, [3] * 8)  # the blocks are nobody's any more
    assert matched(cache, [3] * 8) == 8


def test_hits_and_misses_are_counted_until_prefixes_are_forgotten(pool, cache, rng):
    assert (pool.prefix_hits, pool.prefix_misses) == (0, 0)
    registered(cache, rng, list(range(9)))
    for ids in (range(9), range(4), range(3), [7] * 8):
        matched(cache, ids)
    assert (pool.prefix_hits, pool.prefix_misses) == (2, 3)
    pool.forget_prefixes()
    assert (pool.prefix_hits, pool.prefix_misses) == (0, 0)


def test_last_tokens_are_left_to_be_computed(cache, rng):
    registered(cache, rng, list(range(8)))
    assert cache.match_prefix(range(8))[1] == 8
    assert cache.match_prefix(range(8), leave=1)[1] == 4
    assert cache.match_prefix(range(9), leave=1)[1] == 8
    assert cache.match_prefix(range(8), leave=99)[1] == 0
    for leave in (-1, 1.0):
        with pytest.raises(errors.InvalidArgumentError, match="leave"):
            cache.match_prefix(range(8), leave=leave)


# ---- pinned --------------------------------------------------------------------------------------


def fill(cache, rng, blocks):
    """Take so many blocks, and give them back: what nobody holds is forgotten on the way."""
    seq = cache.new_sequence()
    append(cache, seq, rng, blocks * BLOCK)
    cache.drop(seq)


def test_a_pinned_prefix_is_still_found_when_memory_was_needed(pool, cache, rng):
    system, chat = [*range(8)], [*range(50, 58)]
    for ids in (system, chat):
        cache.drop(registered(cache, rng, ids))
    hits, misses = pool.prefix_hits, pool.prefix_misses
    assert pool.pin_prefix([*system, 99]) == 8
    assert (pool.pinned_count, pool.used_count, pool.cached_count) == (2, 2, 2)
    assert (pool.prefix_hits, pool.prefix_misses) == (hits, misses)
    fill(cache, rng, 8)
    assert matched(cache, chat) == 0 and matched(cache, system) == 8
    with pytest.raises(errors.CapacityExceededError):
        fill(cache, rng, 9)
    assert pool.unpin_prefix(system) == 8
    assert (pool.pinned_count, pool.used_count, pool.cached_count) == (0, 0, 2)
    assert pool.unpin_prefix(system) == 0  # it was not pinned any more
    fill(cache, rng, 10)
    assert matched(cache, system) == 0
    assert pool.pin_prefix(system) == 0 and pool.pinned_count == 0


def test_prefixes_are_pinned_as_often_as_asked_and_apart(pool, cache, rng):
    short, long = [*range(4)], [*range(12)]
    cache.drop(registered(cache, rng, long))
    assert [pool.pin_prefix(ids) for ids in (short, long, long)] == [4, 12, 12]
    assert pool.pinned_count == 3
    assert pool.reference_counts[pool.reference_counts > 0].tolist() == [3, 2, 2]
    assert pool.unpin_prefix(long) == 12 and pool.pinned_count == 3
    assert pool.unpin_prefix(long) == 12 and pool.pinned_count == 1
    fill(cache, rng, 9)
    assert matched(cache, long) == 4
    assert pool.unpin_prefix(long) == 4 and pool.pinned_count == 0
    assert pool.used_count == 0


def test_no_more_blocks_are_pinned_than_the_pool_was_told(cache, rng):
    pool = KvBlockPool(10, BLOCK, L, H, D, max_pinned_blocks=3)
    cache = PagedKvCache(pool)
    first, second = [*range(8)], [*range(20, 28)]
    for ids in (first, second):
        cache.drop(registered(cache, rng, ids))
    assert pool.max_pinned_blocks == 3 and pool.pin_prefix(first) == 8
    before = pool.reference_counts
    with pytest.raises(errors.CapacityExceededError, match="max_pinned_blocks is 3") as caught:
        pool.pin_prefix(second)
    assert (caught.value.expected, caught.value.got) == (3, 4)
    np.testing.assert_array_equal(pool.reference_counts, before)
    assert pool.pin_prefix(first) == 8  # no block more
    assert pool.pin_prefix(second[:4]) == 4
    for bad in (-1, 11, 1.5):
        with pytest.raises(errors.InvalidArgumentError, match="max_pinned_blocks"):
            KvBlockPool(10, BLOCK, L, H, D, max_pinned_blocks=bad)
    assert KvBlockPool(10, BLOCK, L, H, D).max_pinned_blocks == 10
    with pytest.raises(errors.InvalidArgumentError):
        pool.pin_prefix(["a"])
    pool.forget_prefixes()
    assert (pool.pinned_count, pool.used_count) == (0, 0)


def test_a_sequence_that_goes_on_in_a_pinned_block_copies_it(pool, cache, rng):
    ids = [*range(8)]
    seq = registered(cache, rng, ids)
    pool.pin_prefix(ids)
    keys = cache.k(seq, 0)
    cache.truncate(seq, 6)
    append(cache, seq, rng, 5)
    twin, n = cache.match_prefix(ids)
    assert n == 8
    np.testing.assert_array_equal(cache.k(twin, 0), keys)


def test_a_namespace_shares_with_itself_alone(pool, cache, rng, tmp_path):
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    for namespace in (None, "tenant a", "tenant b", "\ud800", "tenant a"):
        seq, n = cache.match_prefix(ids, namespace=namespace)
        append(cache, seq, rng, 8 - n)
        cache.register(seq, ids, namespace=namespace)
        cache.drop(seq)
    assert pool.used_count == 0 and pool.prefix_hits == 1
    first = cache.match_prefix(ids)[0], cache.match_prefix(ids, namespace="tenant a")[0]
    assert not set(cache.block_table(first[0])) & set(cache.block_table(first[1]))
    assert pool.pin_prefix(ids, namespace="tenant b") == 8 == pool.pinned_count * BLOCK
    assert pool.unpin_prefix(ids, namespace="tenant a") == 0
    assert pool.unpin_prefix(ids, namespace="tenant b") == 8
    with pytest.raises(errors.InvalidArgumentError, match="registered already"):
        cache.register(first[0], ids, namespace="tenant c")
    for wrong in ("", b"a", 3):
        with pytest.raises(errors.InvalidArgumentError, match="namespace must be a text"):
            cache.match_prefix(ids, namespace=wrong)
    cache.save(tmp_path / "pool")
    loaded = PagedKvCache.load(tmp_path / "pool")
    for namespace, n in ((None, 8), ("tenant a", 8), ("\ud800", 8), ("tenant c", 0)):
        seq, got = loaded.match_prefix(ids, namespace=namespace)
        assert got == n
        same = cache.match_prefix(ids, namespace=namespace)[0]
        np.testing.assert_array_equal(loaded.k(seq, 0), cache.k(same, 0))


# ---- partly filled blocks ------------------------------------------------------------------------


def rows_of(ids):
    """Keys and values (2, tokens, heads, channels) that depend on a token and all before it."""
    seeds = [hash(tuple(ids[: i + 1])) & 0xFFFFFFFF for i in range(len(ids))]
    made = [np.random.default_rng(seed).standard_normal((2, H, D), np.float32) for seed in seeds]
    return np.stack(made, 1) if made else np.zeros((2, 0, H, D), np.float32)


def give(cache, seq, ids, partial=True, known=True, **options):
    """Let a sequence hold all tokens of `ids`, of which it has the first, and register them."""
    keys, values = rows_of(ids)[:, cache.length(seq) :]
    for layer in range(cache.pool.num_layers):
        if len(keys):
            cache.append(seq, layer, keys, values)
    cache.advance(seq, len(keys))
    if known:
        cache.register(seq, ids, partial=partial, **options)


def assert_is(cache, seq, ids):
    """A sequence has the rows of these tokens, as a sequence that was given them alone has."""
    other = cache.new_sequence()
    give(cache, other, ids, known=False)
    assert cache.length(seq) == len(ids)
    for layer in range(cache.pool.num_layers):
        np.testing.assert_array_equal(cache.k(seq, layer), cache.k(other, layer))
        np.testing.assert_array_equal(cache.v(seq, layer), cache.v(other, layer))
    cache.drop(other)


@pytest.mark.parametrize(
    ("ids", "n"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 9], 6),
        ([1, 2, 3, 4, 5], 5),
        ([1, 9], 1),
        ([9, 9], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 10),  # the last block holds two
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 9),
    ],
)
def test_the_common_rows_of_a_block_are_copied(pool, cache, ids, n):
    known = list(range(1, 11))
    seq = cache.new_sequence()
    give(cache, seq, known)
    twin, found = cache.match_prefix(ids, partial=True)
    assert found == n
    assert_is(cache, twin, ids[:n])
    give(cache, twin, [*ids[:n], 77, 78])  # each goes on by itself
    give(cache, seq, [*known, 88])
    assert_is(cache, twin, [*ids[:n], 77, 78])
    assert_is(cache, seq, [*known, 88])
    shared = n // BLOCK
    tables = cache.block_table(twin).tolist(), cache.block_table(seq).tolist()
    assert tables[0][:shared] == tables[1][:shared]
    assert not set(tables[0][shared:]) & set(tables[1])
    assert matched(cache, ids) == n // BLOCK * BLOCK  # without being asked, full blocks alone


def test_a_tail_is_found_while_its_sequence_goes_on_and_after_it_is_gone(pool, cache):
    seq = cache.new_sequence()
    give(cache, seq, [1, 2, 3, 4, 5])
    table = cache.block_table(seq).tolist()
    keys, values = rows_of([1, 2, 3, 4, 5, 6])[:, 5:]
    for layer in range(L):
        cache.append(seq, layer, keys, values)
    cache.advance(seq)
    assert cache.block_table(seq).tolist() == table  # it goes on where it was
    found, n = cache.match_prefix([1, 2, 3, 4, 5, 6, 7], partial=True, leave=1)
    assert n == 5  # 6 was not registered
    assert_is(cache, found, [1, 2, 3, 4, 5])
    cache.drop(found)
    cache.register(seq, [1, 2, 3, 4, 5, 6], partial=True)
    cache.drop(seq)
    assert pool.cached_count == 2
    found, n = cache.match_prefix([1, 2, 3, 4, 5, 6, 7], partial=True)
    assert n == 6
    assert_is(cache, found, [1, 2, 3, 4, 5, 6])
    give(cache, found, list(range(1, 9)))  # full now: shared from now on
    assert matched(cache, list(range(1, 9))) == 8


@pytest.mark.parametrize("is_full", [False, True])
def test_rows_that_are_written_over_are_found_no_more(cache, rng, is_full):
    seq, other = cache.new_sequence(), cache.new_sequence()
    give(cache, seq, [1, 2, 3])
    if is_full:
        append(cache, other, rng, 9 * BLOCK)
    cache.truncate(seq, 1)
    give(cache, seq, [1, 9, 9], known=False)  # in a copy; in place where there is no room for one
    cache.drop(other)
    found, n = cache.match_prefix([1, 2, 3], partial=True)
    assert n == (0 if is_full else 3)
    assert_is(cache, found, [1, 2, 3][:n])
    give(cache, seq, [1, 9, 9])
    assert cache.match_prefix([1, 9, 3], partial=True)[1] == 2
    with pytest.raises(errors.InvalidArgumentError, match="tokens 0 to 3 are registered already"):
        cache.register(seq, [1, 2], partial=True)
    cache.register(seq, [1, 9], partial=True)  # less than is known already
    assert cache.match_prefix([1, 9, 9], partial=True)[1] == 3


@pytest.mark.parametrize("ids", [[1, 2], list(range(1, 10))], ids=["tail", "full blocks"])
def test_what_is_registered_in_another_namespace_is_refused_by_its_name(cache, ids):
    for registered, asked in (("a", "b"), (None, "b"), ("c", None)):
        seq = cache.new_sequence()
        give(cache, seq, ids, namespace=registered)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            cache.register(seq, ids, namespace=asked, partial=True)
        one, other = (f"the namespace '{x}'" if x else "no namespace" for x in (registered, asked))
        assert f"in {one}, and these are of {other}" in str(caught.value)
        with pytest.raises(errors.InvalidArgumentError, match="under other token ids"):
            cache.register(seq, [7, *ids[1:]], namespace=registered, partial=True)


def test_tails_are_of_their_namespace(cache):
    seq, other = cache.new_sequence(), cache.new_sequence()
    give(cache, seq, [1, 2, 3], namespace="a")
    first = int.from_bytes(b"abcdefgh", "little")  # ids that look like a namespace
    give(cache, other, [first, 5, 6, 7])
    assert cache.match_prefix([1, 2, 3], partial=True)[1] == 0
    assert cache.match_prefix([5, 6, 7], partial=True, namespace="abcdefgh")[1] == 0
    assert cache.match_prefix([1, 2, 3], partial=True, namespace="a")[1] == 3


def test_without_a_free_block_full_ones_are_shared(pool, cache, rng):
    seq = cache.new_sequence()
    give(cache, seq, list(range(6)))
    other = cache.new_sequence()
    append(cache, other, rng, 8 * BLOCK)
    found, n = cache.match_prefix(range(6), partial=True)
    assert n == 4 and pool.free_count == 0
    cache.drop(found)
    cache.drop(seq)  # its blocks are what is free now
    found, n = cache.match_prefix(range(6), partial=True)
    assert n == 4  # the tail's own block is no room for its copy
    assert cache.k(found, 0).shape == (4, H, D)


def test_runs_are_copied_by_runs_of_32():
    pool = KvBlockPool(12, 64, L, H, D, dtype="kivi4", recent_dtype="float16")
    cache = PagedKvCache(pool)
    seq, ids = cache.new_sequence(), list(range(1, 111))
    give(cache, seq, ids)
    found, n = cache.match_prefix([*range(1, 105), 7], partial=True)
    assert n == 96
    np.testing.assert_array_equal(cache.k(found, 0)[:64], cache.k(seq, 0)[:64])
    give(cache, found, [*range(1, 97), *[5] * 40])
    again = cache.new_sequence()
    give(cache, again, [*range(1, 97), *[5] * 40], namespace="b")
    np.testing.assert_array_equal(cache.k(found, 1)[96:], cache.k(again, 1)[96:])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["match", "give", "truncate", "drop", "fork"]),
            st.integers(0, 9),
            st.lists(st.integers(1, 2), max_size=11),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_any_trace_leaves_each_sequence_its_own_rows(steps):
    cache = PagedKvCache(KvBlockPool(9, BLOCK, 1, H, D, scale_dtype="float32"))
    held = {}  # sequence: its tokens

    def check():
        for seq, ids in held.items():
            keys = np.ones((len(ids), H, D)) if not ids else rows_of(ids)[0]
            np.testing.assert_allclose(cache.k(seq, 0), keys, atol=0.05)

    for step, n, ids, flag in steps:
        seqs = sorted(held)
        seq = seqs[n % len(seqs)] if seqs else None
        try:
            if step == "match":
                found, length = cache.match_prefix(ids, partial=True)
                assert length <= len(ids)
                held[found] = ids[:length]
            elif seq is None:
                continue
            elif step == "give":
                longer = [*held[seq], *ids]
                give(cache, seq, longer, partial=flag)
                held[seq] = longer
            elif step == "truncate":
                cache.truncate(seq, min(n, len(held[seq])))
                held[seq] = held[seq][: min(n, len(held[seq]))]
            elif step == "fork":
                held[cache.fork(seq)] = list(held[seq])
            else:
                cache.drop(seq)
                del held[seq]
        except errors.CapacityExceededError:
            pass
        except errors.InvalidArgumentError as error:  # the tokens are there, and known otherwise
            assert "registered already" in str(error)
            held[seq] = longer
        check()
