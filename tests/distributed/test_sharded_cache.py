"""A context over ranks: what is refused, and by whom; what it sends; what it tells of itself."""

import time

import numpy as np
import pytest
import reference
from sharded import check_bytes
from support import normal
from thread_group import run_ranks

from kvedge import KVCache, errors
from kvedge.cache.cache import state_of
from kvedge.distributed import Placement, ShardedKVCache

LAYERS, HEADS, DIM = 2, 2, 16


def filled(group, tokens=50, **options):
    """A context of the same tokens on every rank."""
    cache = ShardedKVCache(KVCache(LAYERS, HEADS, DIM), group, block_size=4, **options)
    rng = np.random.default_rng(7)
    for layer in range(LAYERS):
        cache.append(layer, *normal(rng, 2, tokens, HEADS, DIM))
    cache.advance(tokens)
    return cache


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda rank: KVCache(LAYERS + rank, HEADS, DIM), "3 layers x .* on rank 1, and 2 layers"),
        (lambda rank: KVCache(LAYERS, HEADS, DIM + rank), "x 17, int8 .* on rank 1, .* x 16, int8"),
        (
            lambda rank: KVCache(LAYERS, HEADS, DIM, dtype=["int8", "float16"][rank]),
            "float16 on rank 1, and .* int8",
        ),
        (
            lambda rank: KVCache(LAYERS, HEADS, DIM, key_scale=[None, "auto"][rank]),
            "key offset and scale is scale automatic.* on rank 1, and nothing automatic",
        ),
        (
            lambda rank: KVCache(
                LAYERS, HEADS, DIM, key_offset=np.full((LAYERS, HEADS, DIM), rank, np.float32)
            ),
            "key offset and scale is nothing automatic, vectors .* on rank 1",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_both_figures(make, said):
    def form(group):
        with pytest.raises(errors.GroupMismatchError, match=said):
            ShardedKVCache(make(group.rank), group)

    run_ranks(2, form)


def test_other_placements_and_versions_are_refused_with_both_figures(monkeypatch):
    def form(group, said, **options):
        with pytest.raises(errors.GroupMismatchError, match=said):
            ShardedKVCache(KVCache(LAYERS, HEADS, DIM), group, **options)

    run_ranks(2, lambda g: form(g, "block_size is 65 on rank 1, and 64", block_size=64 + g.rank))
    weights = [[1, 1], [2, 1]]
    said = r"order of ranks is \[0, 1, 0\] on rank 1, and \[0, 1\] on rank 0"
    run_ranks(2, lambda g: form(g, said, weights=weights[g.rank]))

    from kvedge.distributed import share

    agree = share.Share.agree

    def as_other_version(self, facts):
        told = {"version of kvedge": "9.9"} if self.rank else {}
        return agree(self, {**facts, **told})

    monkeypatch.setattr(share.Share, "agree", as_other_version)
    run_ranks(2, lambda g: form(g, "version of kvedge is 9.9 on rank 1, and "))


def test_parts_that_are_of_no_one_context_are_refused_with_both_figures():
    def form(group):
        part = KVCache(1, 1, 4)
        tokens = [8, 4][group.rank]
        part.append(0, *normal(np.random.default_rng(0), 2, tokens, 1, 4))
        part.advance(tokens)
        said = "rank 1 holds 4 tokens, and 8 of a context of 12 tokens|rank 0 holds 8 tokens"
        with pytest.raises(errors.GroupMismatchError, match=said):
            ShardedKVCache(part, group, block_size=2)
        good = KVCache(1, 1, 4)
        tokens = Placement(2, block_size=2).count(13, group.rank)
        good.append(0, *normal(np.random.default_rng(0), 2, tokens, 1, 4))
        good.advance(tokens)
        assert len(ShardedKVCache(good, group, block_size=2)) == 13

    run_ranks(2, form)


def test_what_cannot_be_shared_is_refused():
    def form(group):
        with pytest.raises(errors.InvalidArgumentError, match="window keeps little"):
            ShardedKVCache(KVCache(2, 1, 4, window=[8, None]), group)
        with pytest.raises(errors.InvalidArgumentError, match="recent= and sinks= are of one"):
            ShardedKVCache(KVCache(2, 1, 4, recent=8), group)
        with pytest.raises(errors.InvalidArgumentError, match="must be a KVCache"):
            ShardedKVCache(None, group)
        part = KVCache(1, 1, 4)
        part.append(0, *normal(np.random.default_rng(0), 2, 1, 4))
        with pytest.raises(errors.LayersOutOfStepError):
            ShardedKVCache(part, group)

    run_ranks(1, form)
    with pytest.raises(errors.InvalidArgumentError, match="mpi4py communicator"):
        ShardedKVCache(KVCache(1, 1, 4), "gloo")


def test_rows_that_one_rank_cannot_store_are_refused_on_all():
    """float16 ends at 65504; the row is one rank's, and no rank takes it."""

    def work(group):
        cache = ShardedKVCache(KVCache(1, 1, 4, dtype="float16"), group, block_size=1)
        good = np.ones((3, 1, 4), np.float32)
        cache.append(0, good, good)
        cache.advance(3)
        for bad in (1e6, np.nan):
            keys = good.copy()
            keys[1] = bad
            with pytest.raises((errors.ScaleRangeError, errors.NonFiniteInputError)):
                cache.append(0, keys, good)
            with pytest.raises((errors.ScaleRangeError, errors.NonFiniteInputError)):
                cache.push_step(keys[1][np.newaxis], good[:1])
        with pytest.raises(errors.ShapeMismatchError):
            cache.append(0, good[:, :, :3], good)
        assert len(cache) == 3
        out = cache.attend(0, np.ones((1, 4), np.float32))
        np.testing.assert_allclose(out, 1.0, rtol=1e-3)

    run_ranks(3, work)


def test_a_step_that_is_refused_decides_nothing():
    """Automatic scales are those of the tokens that are there, as in one cache."""
    rng = np.random.default_rng(5)
    rows = 30 * normal(rng, 40, 2, 2, 1, 8)  # token, keys or values, layer

    def run(cache):
        for i in range(40):
            bad = rows[i].copy()
            bad[1, 1] = 1e30  # the second layer cannot store it, the first could
            with pytest.raises(errors.ScaleRangeError):
                cache.push_step(*bad)
            cache.push_step(*rows[i])
        return cache

    options = {"scale_dtype": "float16", "key_scale": "auto", "key_offset": "auto"}
    whole = state_of(run(KVCache(2, 1, 8, **options))).contents()

    def work(group):
        cache = run(ShardedKVCache(KVCache(2, 1, 8, **options), group, block_size=4))
        for own, every in zip(state_of(cache.part).contents().layers, whole.layers, strict=True):
            check_bytes(own, every, cache.placement.positions(group.rank, 0, own.num_tokens))

    run_ranks(3, work)


def test_a_limit_is_that_of_the_parts_and_the_same_on_all_ranks():
    def work(group):
        placement = Placement(2, block_size=4)
        part = KVCache(1, 1, 4, max_seq_len=placement.count(11, group.rank))
        cache = ShardedKVCache(part, group, block_size=4)
        assert cache.max_seq_len == 11
        rows = np.ones((11, 1, 4), np.float32)
        cache.append(0, rows, rows)
        with pytest.raises(errors.CapacityExceededError, match=r"11 of 11.*blocks of 4 tokens"):
            cache.append(0, rows[:1], rows[:1])
        cache.advance(11)
        assert cache.attend(0, rows[0]).shape == (1, 4)

    run_ranks(2, work)


def test_a_step_sends_a_message_of_the_heads_whatever_the_context():
    def work(group):
        cache = filled(group)
        sent = []
        gather = group.all_gather
        group.all_gather = lambda data: sent.append(len(data)) or gather(data)
        before = group.messages
        query = np.ones((2 * HEADS, DIM), np.float32)
        cache.attend(0, query)
        assert group.messages == before + 1
        cache.append(0, query[:HEADS], query[:HEADS])
        cache.append(1, query[:HEADS], query[:HEADS])
        cache.advance()
        cache.truncate(3)
        cache.restore(cache.snapshot())
        assert group.messages == before + 1  # only attend sends
        floats = 2 * HEADS * (DIM + 1)
        assert sent == [4 * floats + 48]

    run_ranks(3, work)


def test_ranks_at_different_calls_are_an_error_with_both_figures():
    def work(group):
        cache = filled(group)
        query = np.ones((HEADS, DIM), np.float32)
        with pytest.raises(errors.GroupMismatchError, match=r"layer is \d on rank \d, and \d on"):
            cache.attend(group.rank, query)

    run_ranks(2, work)


def test_what_it_tells_of_itself():
    def work(group):
        cache = filled(group, weights=[3, 1])
        part = cache.part
        assert (cache.rank, cache.num_ranks) == (group.rank, 2)
        assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (LAYERS, HEADS, DIM)
        assert (len(cache), cache.is_empty, cache.max_seq_len) == (50, False, None)
        assert len(part) == cache.placement.count(50, group.rank)
        assert cache.used_bytes == part.used_bytes > 0
        assert "50 tokens in blocks of 4 tokens over 2 ranks as 3:1" in repr(cache)
        mark = cache.snapshot()
        assert repr(mark) == "<ShardedSnapshot of 50 tokens (attached)>"
        cache.clear()
        assert cache.is_empty and len(part) == 0
        return len(mark)

    assert run_ranks(2, work) == [50, 50]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_results_go_where_they_are_asked_for(layout):
    def work(group):
        cache = filled(group)
        query = normal(np.random.default_rng(1), 5, 2 * HEADS, DIM)
        expected, lse = cache.attend(1, query, return_lse=True)
        turned = query.transpose(1, 0, 2) if layout == "hnd" else query
        out = np.zeros(turned.shape, np.float16)
        got = cache.attend(1, turned, layout=layout, out=out)
        assert got is out
        back = out.transpose(1, 0, 2) if layout == "hnd" else out
        np.testing.assert_allclose(back, expected, rtol=1e-2, atol=1e-3)
        _, own = cache.attend(1, turned, layout=layout, return_lse=True)
        assert np.array_equal(own.T if layout == "hnd" else own, lse)
        single = cache.attend(1, query[-1])
        assert np.array_equal(single, cache.attend(1, query[-1:])[0])

    run_ranks(2, work)


def test_the_same_call_gives_the_same_bits():
    def work(group):
        cache = filled(group)
        query = normal(np.random.default_rng(1), 2 * HEADS, DIM)
        return [cache.attend(0, query).tobytes() for _ in range(3)]

    first = run_ranks(3, work)
    assert len({bits for rank in first + run_ranks(3, work) for bits in rank}) == 1


def test_delays_between_ranks_change_no_bit():
    """Latency and jitter, whatever the transport; test_slow_network.py has them in the kernel."""

    def work(group):
        rng = np.random.default_rng(group.rank)
        gather = group.all_gather

        def late(data):
            time.sleep(rng.uniform(0, 0.02))
            return gather(data)

        query = normal(np.random.default_rng(1), 2 * HEADS, DIM)
        cache = filled(group)
        wanted = cache.attend(0, query)
        group.all_gather = late
        return [np.array_equal(cache.attend(0, query), wanted) for _ in range(5)]

    assert run_ranks(4, work) == [[True] * 5] * 4


def test_huge_options_leave_no_nan():
    def work(group):
        cache = filled(group)
        big = np.full(2 * HEADS, 3e38, np.float32)
        for options in ({"alibi_slopes": big}, {"alibi_slopes": -big}, {"sink_logits": big}):
            mask = np.full((1, 1, 50), -3e38, np.float32)
            for more in ({}, {"mask": mask}, {"window": 3, "sink_tokens": 2}):
                query = normal(np.random.default_rng(1), 6, 2 * HEADS, DIM)
                out, lse = cache.attend(0, query, return_lse=True, **options, **more)
                assert np.isfinite(out).all()
                assert not np.isnan(lse).any()

    run_ranks(3, work)


def test_ring_of_one_rank_is_one_cache():
    def work(group):
        cache = filled(group)
        query = normal(np.random.default_rng(1), 2 * HEADS, DIM)
        stored = cache.part.k(0), cache.part.v(0)
        want, _ = reference.attention(query, *stored)
        limit = reference.TOLERANCE * np.abs(want).max()
        np.testing.assert_allclose(cache.attend(0, query), want, atol=limit)

    run_ranks(1, work)
