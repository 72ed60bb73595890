"""Snapshots: marks that cost nothing and know when they have gone stale, and detached copies."""

import pickle
import sys
import tracemalloc

import numpy as np
import pytest
from counted import CountedCalls
from support import cache_content, normal, refuses

from kvedge import KVCache, KvCacheSnapshot, Rope, errors
from kvedge.cache.cache import state_of
from kvedge.cache.overwrites import OverwriteLog
from kvedge.core.formats import FORMATS
from kvedge.files.contents import LayerContents

L, H, D = 2, 2, 8


@pytest.fixture
def cache(dtype):
    return KVCache(L, H, D, dtype=dtype)


def step(cache, rng, n=1):
    kv = normal(rng, L, 2, n, H, D)
    for i in range(L):
        cache.append(i, kv[i, 0], kv[i, 1])
    cache.advance(n)


def test_restore_goes_back_to_the_mark(cache, rng):
    step(cache, rng, 3)
    before = cache_content(cache)
    mark = cache.snapshot()
    assert isinstance(mark, KvCacheSnapshot)
    step(cache, rng, 4)
    cache.restore(mark)
    assert cache_content(cache) == before
    step(cache, rng, 2)
    cache.restore_from_snapshot(mark)
    assert cache_content(cache) == before


def test_restore_drops_pending_tokens(cache, rng):
    step(cache, rng, 3)
    before = cache_content(cache)
    mark = cache.snapshot()
    cache.append(1, *normal(rng, 2, H, D))
    cache.restore(mark)
    assert cache_content(cache) == before


def test_a_snapshot_marks_what_was_advanced_over_and_not_what_is_pending(cache, rng):
    step(cache, rng, 3)
    before = cache_content(cache)
    cache.append(0, *normal(rng, 2, H, D))
    cache.restore(cache.snapshot())
    assert cache_content(cache) == before


def test_restore_goes_forward_again_while_nothing_was_overwritten(cache, rng):
    step(cache, rng, 3)
    early = cache.snapshot()
    step(cache, rng, 3)
    before, late = cache_content(cache), cache.snapshot()
    cache.restore(early)
    cache.restore(late)
    assert cache_content(cache) == before
    cache.truncate(0)
    cache.restore(late)
    assert cache_content(cache) == before


def test_a_snapshot_is_stale_once_tokens_below_it_were_overwritten(cache, rng):
    step(cache, rng, 3)
    early = cache.snapshot()
    step(cache, rng, 3)
    late = cache.snapshot()
    cache.restore(early)
    step(cache, rng)  # overwrites position 3
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(late)
    step(cache, rng, 10)
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(late)
    cache.restore(early)
    assert len(cache) == 3


def test_one_layer_overwritten_makes_a_snapshot_stale(cache, rng):
    step(cache, rng, 6)
    late = cache.snapshot()
    cache.truncate(3)
    cache.append(L - 1, *normal(rng, 2, H, D))  # pending, in one layer only
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(late)


def test_tokens_above_a_snapshot_may_be_overwritten(cache, rng):
    step(cache, rng, 3)
    before, mark = cache_content(cache), cache.snapshot()
    for _ in range(5):
        step(cache, rng, 4)
        cache.truncate(4)
        step(cache, rng, 3)
        cache.restore(mark)
        assert cache_content(cache) == before


REFUSED = {
    "NaN in the first key": ("keys", 0, np.nan),
    "NaN in the last key": ("keys", -1, np.nan),
    "NaN in the last value": ("values", -1, np.nan),
    "infinity in the last value": ("values", -1, -np.inf),
    "scale out of range in the last key": ("keys", -1, 1e30),
    "scale out of range in the last value": ("values", -1, 1e30),
}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("n", [1, 2, 50, 500, 3000])  # a core may store long ones in chunks
@pytest.mark.parametrize("room", ["growing", "grown", "fixed"])
@pytest.mark.parametrize(
    "options",
    [*({"dtype": name} for name in FORMATS), {"scale_dtype": "float16"}, {"key_offset": "auto"}],
    ids=str,
)
def test_a_refused_append_leaves_what_a_snapshot_above_the_length_stands_for(
    rng, options, room, n, refused
):
    which, at, number = REFUSED[refused]
    if number == 1e30 and options.get("scale_dtype") != "float16":
        number = np.nan
    cache = KVCache(L, H, D, max_seq_len=4000 if room == "fixed" else None, **options)
    step(cache, rng, 600)
    before, mark = cache_content(cache), cache.snapshot()
    cache.truncate(2)
    if room == "grown":  # refused in larger slabs than the rows were written to
        state_of(cache).make_room(2 * cache.capacity)
    rows = {"keys": normal(rng, n, H, D), "values": normal(rng, n, H, D)}
    rows[which][at, H - 1, D - 1] = number
    with refuses(errors.KvedgeError, cache):
        cache.append(1, rows["keys"], rows["values"])
    with refuses(errors.ShapeMismatchError, cache):
        cache.append(1, rows["keys"], normal(rng, n + 1, H, D))
    with refuses(errors.KvedgeError, cache):
        cache.push_step(normal(rng, L, H, D), np.full((L, H, D), np.nan, np.float32))
    if room == "fixed":
        with refuses(errors.CapacityExceededError, cache):
            cache.append(1, *normal(rng, 2, 5000, H, D))
    cache.append(0, *np.empty((2, 0, H, D), np.float32))
    assert not mark.is_stale
    cache.restore(mark)
    assert cache_content(cache) == before


def test_keep_makes_snapshots_above_the_first_moved_token_stale(cache, rng):
    step(cache, rng, 2)
    low, low_content = cache.snapshot(), cache_content(cache)
    step(cache, rng, 4)
    high = cache.snapshot()
    cache.keep([0, 1, 3, 5])
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(high)
    cache.restore(low)
    assert cache_content(cache) == low_content


@pytest.mark.parametrize("stop", [None, 3])  # one token, too
def test_shift_makes_snapshots_above_its_start_stale(cache, rng, stop):
    step(cache, rng, 2)
    low, low_content = cache.snapshot(), cache_content(cache)
    step(cache, rng, 4)
    high = cache.snapshot()
    cache.shift(3, rope=Rope(), start=2, stop=stop)
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(high)
    cache.restore(low)
    assert cache_content(cache) == low_content


def test_a_refused_edit_makes_no_snapshot_stale(cache, rng):
    step(cache, rng, 4)
    before, mark = cache_content(cache), cache.snapshot()
    with pytest.raises(errors.KvedgeError):
        cache.keep([3, 1])
    with pytest.raises((errors.KvedgeError, TypeError)):
        cache.shift(3, rope=Rope(rotary_dim=100))
    cache.restore(mark)
    assert cache_content(cache) == before


def test_snapshots_survive_growth(dtype, rng):
    cache = KVCache(L, H, D, dtype=dtype)
    step(cache, rng, 100)
    before, mark = cache_content(cache), cache.snapshot()
    step(cache, rng, 2000)
    cache.restore(mark)
    assert cache_content(cache) == before


def test_overwriting_with_growth_makes_a_snapshot_stale(dtype, rng):
    cache = KVCache(L, H, D, dtype=dtype)
    step(cache, rng, 100)
    mark = cache.snapshot()
    cache.truncate(10)
    many = normal(rng, 300, H, D)
    cache.append(0, many, many)  # overwrites layer 0 from 10 on, and grows
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(mark)


def test_an_empty_snapshot_can_always_be_restored(cache, rng):
    mark = cache.snapshot()
    step(cache, rng, 5)
    cache.shift(3, rope=Rope())
    cache.keep([1, 3])
    step(cache, rng, 2)
    cache.restore(mark)
    assert cache.is_empty


def test_a_snapshot_is_of_its_cache(cache, dtype, rng):
    step(cache, rng, 3)
    mark = cache.snapshot()
    other = KVCache(L, H, D, dtype=dtype)
    step(other, rng, 3)
    with refuses(errors.InvalidArgumentError, other):
        other.restore(mark)
    with refuses(errors.InvalidArgumentError, other):
        cache.copy().restore(mark)
    for bad in (None, 3, "snapshot"):
        with pytest.raises((errors.KvedgeError, TypeError)):
            cache.restore(bad)
    assert len(cache) == 3


def test_whether_a_mark_is_stale_is_right_at_every_step_of_an_overwrite(rng):
    """Another thread may ask in between: what was stale stays so, what is not touched is not."""
    for _ in range(30):
        log = OverwriteLog()
        marks = []
        for position in rng.integers(0, 12, 12):
            marks.append((int(rng.integers(0, 12)), log.epoch))
            before = [log.reach_below(n, since=epoch) for n, epoch in marks]
            seen = []

            def trace(frame, event, argument, log=log, marks=marks, seen=seen):
                frame.f_trace_opcodes = True
                if event == "opcode":
                    seen.append([log.reach_below(n, since=epoch) for n, epoch in marks])
                return trace

            old = sys.gettrace()
            sys.settrace(trace)
            try:
                log.add(int(position))
            finally:
                sys.settrace(old)
            after = [log.reach_below(n, since=epoch) for n, epoch in marks]
            assert after == [was or position < n for was, (n, _) in zip(before, marks, strict=True)]
            assert len(seen) > 5
            for moment in seen:
                assert all(
                    now in (was, then) for was, now, then in zip(before, moment, after, strict=True)
                )


def test_a_snapshot_costs_nothing_however_long_the_cache(dtype, rng):
    made = []
    for tokens in (10, 8000):
        cache = KVCache(2, 8, 64, dtype=dtype)
        many = normal(rng, tokens, 8, 64)
        for i in range(2):
            cache.append(i, many, many)
        cache.advance(tokens)
        resident = cache.resident_bytes
        tracemalloc.start()
        with CountedCalls() as calls:
            marks = [cache.snapshot() for _ in range(1000)]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        made.append(calls.made)
        assert peak < 1000 * 1000  # bytes: a mark is an object or two
        assert cache.resident_bytes <= resident + 2**16
        assert {mark.length for mark in marks} == {tokens}
    assert made[1] < made[0] + 100  # a garbage collection may come in between


def test_many_snapshots_and_overwrites_do_not_slow_down(cache, rng):
    step(cache, rng, 10)
    base = cache.snapshot()
    kv = normal(rng, L, H, D)

    def rounds(n):
        with CountedCalls() as calls:
            for _ in range(n):
                cache.restore(base)
                cache.push_step(kv, kv)
                cache.snapshot()
        return calls.made

    rounds(10)
    first = rounds(100)
    rounds(1800)
    assert rounds(100) == first
    assert len(state_of(cache).overwrites._entries[0]) < 3


# -- detached snapshots --------------------------------------------------------------------------


def test_a_detached_snapshot_restores_whatever_happened_since(cache, rng):
    step(cache, rng, 5)
    before = cache_content(cache)
    detached = cache.snapshot().detach()
    cache.shift(3, rope=Rope())
    cache.keep([0, 4])
    step(cache, rng, 7)
    cache.restore(detached)
    assert cache_content(cache) == before
    cache.clear()
    step(cache, rng, 1)
    cache.restore(detached)
    assert cache_content(cache) == before
    step(cache, rng, 2)
    assert len(cache) == 7


def test_pickles_of_versions_with_fewer_fields_open(cache, rng, monkeypatch):
    step(cache, rng, 5)
    state = LayerContents.__getstate__
    monkeypatch.setattr(LayerContents, "__getstate__", lambda self: state(self)[:-1])
    old = pickle.dumps((cache, cache.snapshot().detach()))
    monkeypatch.undo()
    again, detached = pickle.loads(old)
    assert cache_content(again) == cache_content(cache)
    again.clear()
    again.restore(detached)
    assert cache_content(again) == cache_content(cache)


def test_an_attached_snapshot_does_not_pickle_into_a_foreign_cache(cache, rng):
    step(cache, rng, 2)
    mark = cache.snapshot()
    try:
        again = pickle.loads(pickle.dumps(mark))
    except (errors.KvedgeError, TypeError, pickle.PicklingError):
        return
    twin = cache.copy()
    with refuses(errors.InvalidArgumentError, twin):
        twin.restore(again)


def check_decoded(snapshot, keys, values):
    assert snapshot.seq_len == snapshot.length == len(snapshot)
    for got, expected in ((snapshot.keys, keys), (snapshot.values, values)):
        assert [rows.dtype for rows in got] == [np.float32] * L
        for rows, wanted in zip(got, expected, strict=True):
            np.testing.assert_array_equal(rows, wanted)


def test_a_mark_tells_what_it_marks_and_not_what_came_after(cache, rng):
    step(cache, rng, 5)
    keys = [np.array(cache.k(i)) for i in range(L)]
    values = [np.array(cache.v(i)) for i in range(L)]
    mark = cache.snapshot()
    cache.append(0, *normal(rng, 2, 1, H, D))
    pending = cache.snapshot()
    cache.truncate(5)
    step(cache, rng, 3)
    cache.truncate(2)  # it lies above the length now
    for one in (mark, pending):
        check_decoded(one, keys, values)
    with pytest.raises(errors.LayersOutOfStepError):
        pending.to_bytes()
    cache.clear()
    check_decoded(cache.snapshot(), [np.empty((0, H, D))] * L, [np.empty((0, H, D))] * L)


def test_a_stale_snapshot_tells_and_writes_nothing(cache, rng):
    step(cache, rng, 5)
    overwritten = cache.snapshot()
    cache.truncate(2)
    step(cache, rng, 1)
    lost = KVCache(L, H, D).snapshot()  # of a cache that is gone
    for mark in (overwritten, lost):
        for call in ("keys", "values", "to_bytes"):
            with pytest.raises(errors.StaleSnapshotError):
                getattr(mark, call)()
        assert mark.seq_len == mark.length


def test_bytes_of_a_snapshot_are_those_of_the_file(cache, rng, tmp_path):
    step(cache, rng, 5)
    cache.save(tmp_path / "file", metadata={})
    data = (tmp_path / "file").read_bytes()
    assert cache.snapshot().to_bytes() == data
    assert cache_content(KVCache.load(tmp_path / "file")) == cache_content(cache)
    for wrong in (b"", data[:-1], data[:50], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(errors.CorruptFileError, match=r"^the bytes of a snapshot: "):
            KvCacheSnapshot.from_bytes(wrong)
    for wrong in (None, 3, "text", tmp_path):
        with pytest.raises(errors.InvalidArgumentError, match="must be bytes"):
            KvCacheSnapshot.from_bytes(wrong)
    for same in (bytearray(data), memoryview(data)):
        assert len(KvCacheSnapshot.from_bytes(same)) == 5


def test_a_detached_snapshot_of_another_shape_is_refused(cache, dtype, rng):
    step(cache, rng, 5)
    detached = cache.snapshot().detach()
    other_dtype = "float32" if dtype == "int8" else "int8"
    for other in (
        KVCache(L + 1, H, D, dtype=dtype),
        KVCache(L, H + 1, D, dtype=dtype),
        KVCache(L, H, D + 1, dtype=dtype),
        KVCache(L, H, D, dtype=other_dtype),
    ):
        with refuses((errors.InvalidArgumentError, errors.ShapeMismatchError), other):
            other.restore(detached)
    if dtype == "int8":
        for options in ({"group_size": 4}, {"scale_dtype": "float16"}):
            other = KVCache(L, H, D, **options)
            with refuses((errors.InvalidArgumentError, errors.ShapeMismatchError), other):
                other.restore(detached)
    small = KVCache(L, H, D, dtype=dtype, max_seq_len=4)
    with refuses(errors.CapacityExceededError, small):
        small.restore(detached)


def test_a_stale_snapshot_cannot_be_detached(cache, rng):
    step(cache, rng, 5)
    mark = cache.snapshot()
    cache.truncate(1)
    step(cache, rng, 1)
    with refuses(errors.StaleSnapshotError, cache):
        mark.detach()


def test_pending_tokens_are_not_dropped_by_detach(cache, rng):
    step(cache, rng, 3)
    clean, before = cache.snapshot(), cache_content(cache)
    cache.append(1, *normal(rng, 2, H, D))
    mark = cache.snapshot()
    with refuses(errors.LayersOutOfStepError, cache, match=("layer 1", "advance", "truncate")):
        mark.detach()
    detached = clean.detach()  # taken when all layers were in step: they still are below it
    cache.append(0, *normal(rng, 2, H, D))
    cache.advance()
    with refuses(errors.LayersOutOfStepError, cache, match="layer 1"):
        mark.detach()  # the moment it stands for had a pending token
    cache.restore(mark)  # drops what was pending, as it says
    assert cache_content(cache) == before
    cache.clear()
    cache.restore(detached)
    assert cache_content(cache) == before


def test_a_stale_mark_with_pending_tokens_is_stale(cache, rng):
    step(cache, rng, 3)
    cache.append(1, *normal(rng, 2, H, D))
    mark = cache.snapshot()
    cache.truncate(1)
    step(cache, rng, 1)
    with refuses(errors.StaleSnapshotError, cache):
        mark.detach()


def test_restoring_a_detached_snapshot_makes_other_snapshots_stale(cache, rng):
    step(cache, rng, 5)
    detached = cache.snapshot().detach()
    cache.clear()
    step(cache, rng, 5)
    mark = cache.snapshot()
    cache.restore(detached)
    with refuses(errors.StaleSnapshotError, cache):
        cache.restore(mark)


# -- automatic key offsets -----------------------------------------------------------------------


def with_auto_offset(rng):
    cache = KVCache(L, H, D, key_offset="auto")
    step(cache, rng, 4)
    return cache, cache_content(cache), [cache.k(i) for i in range(L)]


def test_a_snapshot_taken_before_clear_brings_back_its_offset_or_is_stale(rng):
    cache, before, keys = with_auto_offset(rng)
    mark = cache.snapshot()
    cache.clear()
    try:
        cache.restore(mark)
    except errors.StaleSnapshotError:
        assert cache.is_empty
        return
    assert cache_content(cache) == before
    for i in range(L):
        np.testing.assert_array_equal(cache.k(i), keys[i])


def test_an_empty_snapshot_leaves_the_automatic_offset_usable(rng):
    cache = KVCache(L, H, D, key_offset="auto")
    mark = cache.snapshot()
    step(cache, rng, 4)
    cache.restore(mark)
    step(cache, rng, 2)
    assert np.isfinite(cache.k(0)).all() and len(cache) == 2
