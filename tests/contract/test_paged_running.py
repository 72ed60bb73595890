"""A running call holds what it reads, whatever other threads do to the sequence meanwhile.

Each test stops a call at the moment its rows are about to be read, lets another thread change
things, and compares what the call gives with what it gave undisturbed.
"""

import threading

import numpy as np
import pytest
from support import STORAGE_ERROR, cache_content, normal

from kvedge import KvBlockPool, PagedKvCache, errors

L, H, D, BLOCK, LENGTH = 2, 2, 8, 4, 10
IDS = list(range(LENGTH))


@pytest.fixture(params=[{}, {"recent": 3, "sinks": 2}], ids=["plain", "recent"])
def pool(dtype, request):
    return KvBlockPool(12, BLOCK, L, H, D, dtype, **request.param)


@pytest.fixture
def cache(pool):
    return PagedKvCache(pool)


def fill(cache, seq, rng, n):
    for layer in range(L):
        cache.append(seq, layer, *normal(rng, 2, n, H, D))
    cache.advance(seq, n)


@pytest.fixture
def seq(cache, rng):
    seq = cache.new_sequence()
    fill(cache, seq, rng, LENGTH)
    return seq


def run_beside(action):
    """Run it in another thread to its end; what it raised is raised here."""
    raised = []

    def run():
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "a writer waits for a running call"
    if raised:
        raise raised[0]


@pytest.fixture
def during(monkeypatch, cache):
    """``during(call, action)``: what the call gives when the action comes in its middle."""
    store = type(cache.pool._state.stores[0])
    waiting = []

    def stopping(method):
        def stopped(self, *arguments):
            if waiting:
                run_beside(waiting.pop())
            return method(self, *arguments)

        return stopped

    for name in ("attend_blocks", "attend_parts", "read", "gather"):
        monkeypatch.setattr(store, name, stopping(getattr(store, name)))

    def call_during(call, action):
        waiting.append(action)
        result = call()
        assert not waiting
        return result

    return call_during


def overwrite_what_is_free(cache, rng):
    """Fill all free blocks with other rows; a sequence to be dropped."""
    other = cache.new_sequence()
    n = cache.pool.free_count * BLOCK
    for layer in range(L):
        cache.append(other, layer, *(100 * normal(rng, 2, n, H, D)))
    return other


QUERY = np.random.default_rng(0).standard_normal((2 * H, D), dtype=np.float32)

READS = {
    "attend": lambda cache, seq: cache.attend(seq, 1, QUERY),
    "a prompt": lambda cache, seq: cache.attend(seq, 1, np.stack([QUERY] * 3)),
    "attend_batch": lambda cache, seq: cache.attend_batch([seq, seq], 1, np.stack([QUERY] * 2)),
    "k": lambda cache, seq: cache.k(seq, 1),
    "v": lambda cache, seq: cache.v(seq, 1),
    "to_kv_cache": lambda cache, seq: np.frombuffer(
        repr(cache_content(cache.to_kv_cache(seq))).encode(), np.uint8
    ),
}


def drop(cache, seq, rng):
    return lambda: cache.drop(seq)


def truncate(cache, seq, rng):
    return lambda: cache.truncate(seq, 3)


def truncate_and_append(cache, seq, rng):
    def action():
        cache.truncate(seq, 9)
        fill(cache, seq, rng, 1)

    return action


def append_elsewhere_first(cache, seq, rng):
    """Layer 0, which is not read, may be written in place; layer 1 may not."""

    def action():
        cache.truncate(seq, 9)
        cache.append(seq, 0, *normal(rng, 2, H, D))
        cache.append(seq, 1, *normal(rng, 2, H, D))

    return action


def restore(cache, seq, rng):
    short = cache.fork(seq)
    cache.truncate(short, 2)
    mark = cache.snapshot(short)
    cache.drop(short)

    def action():
        cache.restore(seq, mark)
        mark.release()
        fill(cache, seq, rng, 3)  # into the block that is read

    return action


def copy_on_write_and_drop_of_the_fork(cache, seq, rng):
    fork = cache.fork(seq)

    def action():
        fill(cache, seq, rng, 1)
        cache.drop(fork)

    return action


def copy_on_write_and_release(cache, seq, rng):
    mark = cache.snapshot(seq)

    def action():
        fill(cache, seq, rng, 1)
        mark.release()

    return action


def copy_on_write_and_garbage_collection(cache, seq, rng):
    marks = [cache.snapshot(seq)]

    def action():
        fill(cache, seq, rng, 1)
        marks.clear()

    return action


def a_fork_goes_on_in_the_block(cache, seq, rng):
    fork = cache.fork(seq)
    cache.truncate(fork, 9)

    def action():
        cache.drop(seq)
        fill(cache, fork, rng, 1)  # its own alone now, but read

    return action


def forget_prefixes(cache, seq, rng):
    cache.register(seq, IDS)

    def action():
        cache.drop(seq)
        cache.pool.forget_prefixes()

    return action


def forget_prefixes_before_the_drop(cache, seq, rng):
    cache.register(seq, IDS)

    def action():
        cache.pool.forget_prefixes()
        cache.drop(seq)

    return action


def make_room_by_forgetting(cache, seq, rng):
    cache.register(seq, IDS)
    return lambda: cache.drop(seq)


CHANGES = [
    drop,
    truncate,
    truncate_and_append,
    append_elsewhere_first,
    restore,
    copy_on_write_and_drop_of_the_fork,
    copy_on_write_and_release,
    copy_on_write_and_garbage_collection,
    a_fork_goes_on_in_the_block,
    forget_prefixes,
    forget_prefixes_before_the_drop,
    make_room_by_forgetting,
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_running_call_holds_what_it_reads(pool, cache, seq, rng, during, read, change):
    expected = read(cache, seq)
    change = change(cache, seq, rng)

    def action():
        change()
        overwrite_what_is_free(cache, rng)

    np.testing.assert_array_equal(during(lambda: read(cache, seq), action), expected)
    for each in cache.sequences:
        cache.drop(each)
    assert pool.free_count == pool.num_blocks
    assert len(set(pool.allocate(pool.num_blocks).tolist())) == pool.num_blocks


def test_a_batch_holds_the_beginning_that_is_read_once(dtype, rng, monkeypatch):
    cache = PagedKvCache(KvBlockPool(300, 16, 1, 2, 16, dtype))
    stem = cache.new_sequence()
    cache.append(stem, 0, *normal(rng, 2, 2048, 2, 16))
    cache.advance(stem, 2048)
    seqs = [cache.fork(stem) for _ in range(4)]
    cache.drop(stem)
    for seq in seqs:
        cache.append(seq, 0, *normal(rng, 2, 20, 2, 16))
    queries = normal(rng, 4, 4, 16)
    expected = cache.attend_batch(seqs, 0, queries)
    store = type(cache.pool._state.stores[0])
    attend, calls = store.attend_blocks, []

    def disturbed(self, block_size, rows, options):
        calls.append(len(rows))

        def overwrite():
            free = cache.pool.free_count
            assert free == 300 - 128 - 8
            other = cache.new_sequence()
            cache.append(other, 0, *normal(rng, 2, free * 16, 2, 16))
            cache.drop(other)

        def action():
            for seq in cache.sequences:
                cache.drop(seq)
            overwrite()

        run_beside(action)
        return attend(self, block_size, rows, options)

    monkeypatch.setattr(store, "attend_blocks", disturbed)
    np.testing.assert_array_equal(cache.attend_batch(seqs, 0, queries), expected)
    assert calls == [1, 4] and cache.pool.free_count == 300


def test_blocks_that_are_read_count_as_used_until_the_call_ends(pool, cache, seq, during):
    counts = []

    def action():
        cache.drop(seq)
        counts.append((pool.free_count, pool.used_count, pool.reference_counts.sum()))
        with pytest.raises(errors.CapacityExceededError):
            pool.allocate(10)
        counts.append(len(pool.allocate(9)))

    during(lambda: cache.k(seq, 0), action)
    assert counts == [(9, 3, 0), 9] and pool.free_count == 3


def test_blocks_that_are_read_come_back_in_their_order(pool, cache, seq, rng, during):
    table = cache.block_table(seq)
    during(lambda: cache.k(seq, 0), lambda: cache.drop(seq))
    other = cache.new_sequence()
    fill(cache, other, rng, LENGTH)
    assert cache.block_table(other).tolist() == table.tolist()


def test_a_prefix_is_found_again_while_its_blocks_are_only_read(pool, cache, seq, during):
    cache.register(seq, IDS)
    keys, found = cache.k(seq, 0), []

    def action():
        cache.drop(seq)
        assert (pool.used_count, pool.cached_count) == (3, 0)
        found.append(cache.match_prefix(IDS))
        assert pool.reference_counts.sum() == 2

    during(lambda: cache.k(seq, 0), action)
    ((again, n),) = found
    assert n == 8 and (pool.used_count, pool.cached_count) == (2, 0)
    if pool.recent_dtype is None:  # else as the pool stores it, which keys are not
        np.testing.assert_array_equal(cache.k(again, 0), keys[:8])
    cache.drop(again)
    assert (pool.used_count, pool.cached_count) == (0, 2)


def test_a_prefix_that_was_only_read_is_cached_when_the_call_ends(pool, cache, seq, during):
    cache.register(seq, IDS)
    during(lambda: cache.k(seq, 0), lambda: cache.drop(seq))
    assert (pool.used_count, pool.cached_count) == (0, 2)
    assert cache.match_prefix(IDS)[1] == 8


def test_two_calls_that_read_the_same_blocks_both_hold_them(pool, cache, seq, rng, during):
    expected = cache.attend(seq, 1, QUERY)
    inner = []

    def action():
        inner.append(during(lambda: cache.attend(seq, 1, QUERY), lambda: cache.drop(seq)))
        assert pool.used_count == 3  # the first call goes on
        overwrite_what_is_free(cache, rng)

    np.testing.assert_array_equal(during(lambda: cache.attend(seq, 1, QUERY), action), expected)
    np.testing.assert_array_equal(inner[0], expected)


def test_a_running_call_does_not_make_the_next_token_copy_its_block(cache, seq, rng, during):
    table = cache.block_table(seq)
    during(lambda: cache.attend(seq, 0, QUERY), lambda: fill(cache, seq, rng, 1))
    assert cache.block_table(seq).tolist() == table.tolist()
    row = normal(rng, H, D)
    cache.append(seq, 0, row, row)  # layer 0 is read with its pending token, layer 1 gets its own
    during(lambda: cache.attend(seq, 0, QUERY), lambda: cache.append(seq, 1, row, row))
    assert cache.block_table(seq).tolist() == table.tolist()


def test_rows_that_are_read_are_not_written_over_where_no_block_is_free(
    pool, cache, seq, rng, during
):
    pool.allocate(pool.free_count)
    keys = cache.k(seq, 0)
    row = normal(rng, H, D)

    def action():
        cache.truncate(seq, 9)
        with pytest.raises(errors.CapacityExceededError):
            cache.append(seq, 0, row, row)
        assert cache.length(seq) == 9 and len(cache.k(seq, 0)) == 9

    np.testing.assert_array_equal(during(lambda: cache.k(seq, 0), action), keys)
    cache.append(seq, 0, row, row)
    np.testing.assert_allclose(cache.k(seq, 0)[9], row, atol=STORAGE_ERROR[pool.dtype])


def test_a_registered_block_that_is_read_is_not_written_over(pool, cache, rng, during):
    seq = cache.new_sequence()
    fill(cache, seq, rng, pool.num_blocks * BLOCK)
    ids = list(range(pool.num_blocks * BLOCK))
    cache.register(seq, ids)
    keys = cache.k(seq, 0)
    row = normal(rng, H, D)

    def action():
        cache.truncate(seq, len(ids) - 1)
        with pytest.raises(errors.CapacityExceededError):
            cache.append(seq, 0, row, row)

    np.testing.assert_array_equal(during(lambda: cache.k(seq, 0), action), keys)
    assert cache.match_prefix(ids)[1] == len(ids)


def test_a_refused_call_holds_nothing_afterwards(pool, cache, seq):
    bad = np.full((2 * H, D), np.nan, np.float32)
    empty = cache.new_sequence()
    refused = [
        lambda: cache.attend(seq, 1, bad),
        lambda: cache.attend(seq, 1, QUERY[:1]),
        lambda: cache.attend(empty, 1, QUERY),
        lambda: cache.attend_batch([seq, seq], 1, np.stack([QUERY, bad])),
        lambda: cache.attend_batch([seq, empty], 1, np.stack([QUERY, QUERY])),
        lambda: cache.attend_batch([seq, 10**9], 1, np.stack([QUERY, QUERY])),
        lambda: cache.to_kv_cache(seq, max_seq_len=1),
    ]
    for call in refused:
        with pytest.raises(errors.KvedgeError):
            call()
    cache.drop(seq)
    assert pool.free_count == pool.num_blocks


# -- the moments before a call is known to run -----------------------------------------------------


class DroppingLookup(dict):
    """Sequences of a cache; one is dropped right after it was looked up."""

    def get(self, seq, default=None):
        state = super().get(seq, default)
        cache, self.cache = self.cache, None
        if cache is not None:
            run_beside(lambda: cache.drop(seq))
        return state


FACTS = {
    "block_table": lambda cache, seq: cache.block_table(seq),
    "block_tables": lambda cache, seq: cache.block_tables([seq]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("read", {**READS, **FACTS}.values(), ids={**READS, **FACTS})
def test_a_sequence_dropped_just_before_is_unknown(cache, seq, read):
    if read is READS["to_kv_cache"]:
        pytest.skip("looks it up under the lock that drop() takes")
    sequences = cache._state.sequences = DroppingLookup(cache._state.sequences)
    sequences.cache = cache
    with pytest.raises(errors.UnknownSequenceError):
        read(cache, seq)
    assert cache.pool.free_count == cache.pool.num_blocks


class LateSet(set):
    """The readings of a pool; something happens right before the first one is there."""

    action = None

    def add(self, reading):
        action, self.action = self.action, None
        if action is not None:
            run_beside(action)
        super().add(reading)


@pytest.mark.parametrize("change", [truncate_and_append, restore, copy_on_write_and_release, drop])
def test_a_change_just_before_a_call_is_known_is_seen_by_it(cache, seq, rng, change):
    change = change(cache, seq, rng)

    def action():
        change()
        overwrite_what_is_free(cache, rng)

    running = cache.pool._state.readings.running = LateSet()
    running.action = action
    if seq in cache and change.__qualname__.startswith("drop"):
        with pytest.raises(errors.UnknownSequenceError):
            cache.k(seq, 1)
    else:
        np.testing.assert_array_equal(cache.k(seq, 1), cache.k(seq, 1))
    assert not running
