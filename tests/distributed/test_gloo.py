"""Contexts over processes of torch.distributed, with gloo on this machine."""

import gloo_work
import numpy as np
import pytest
from hypothesis import given
from sharded import check_trace, run_sharded
from sharded_traces import traces

from kvedge import KVCache

pytest.importorskip("torch")
pytestmark = [pytest.mark.extras, pytest.mark.subprocess]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_messages_come_in_the_order_of_ranks(pool, ranks):
    for gathered, told, big in pool.run(ranks, gloo_work.messages):
        assert gathered == [[10 + rank] * 9 for rank in range(ranks)]
        assert told == gathered
        assert big == [2 * rank for rank in range(ranks)]


@given(traces())
def test_any_trace_over_processes_is_that_of_one_cache(pool, trace):
    check_trace(trace, pool.run(trace["ranks"], run_sharded, trace))


@pytest.mark.parametrize(("ranks", "others"), [(3, 2), (2, 4), (4, 1)])
def test_what_some_processes_saved_others_go_on_with(pool, tmp_path, ranks, others):
    whole = KVCache(gloo_work.LAYERS, gloo_work.HEADS, gloo_work.DIM)
    gloo_work.feed(whole, 1, 100)
    expected = gloo_work.decode(whole, 2, 5)
    outs = pool.run(ranks, gloo_work.save_and_decode, tmp_path)
    outs += pool.run(others, gloo_work.load_and_decode, tmp_path)
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=2e-3)
    same = outs[:ranks], outs[ranks:]
    assert all(np.array_equal(each[0], out) for each in same for out in each)


def test_the_same_number_of_ranks_gives_the_same_bits(pool, tmp_path):
    first = pool.run(3, gloo_work.save_and_decode, tmp_path)
    again = pool.run(3, gloo_work.save_and_decode, tmp_path)
    assert len({out.tobytes() for out in first + again}) == 1
