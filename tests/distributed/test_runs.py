"""Runs of query rows see, between them, exactly what each row sees of a part."""

import numpy as np
import reference
from hypothesis import given
from hypothesis import strategies as st

from kvedge.core.options import AttendOptions
from kvedge.distributed import Placement
from kvedge.distributed.attention import runs_of


def seen_by(run, num_rows):
    """What a run's rows see, by what its fields tell a layer's attend: bool (rows, tokens)."""
    n = run.last - run.first
    options = {"causal": run.causal, "start": run.start}
    if run.window is not None:
        options |= {"window": run.window, "sink_tokens": run.sinks}
    seen = reference.visible_tokens(n, run.tokens, **options)
    return seen if run.seen is None else seen & run.seen


@given(
    ranks=st.integers(1, 4),
    block_size=st.integers(1, 7),
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=4, max_size=4),
    length=st.integers(1, 90),
    rows=st.integers(1, 40),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 60),
    sink_tokens=st.integers(0, 12),
    start=st.integers(0, 30),
)
def test_runs_see_what_the_rows_see(
    ranks, block_size, weights, length, rows, causal, window, sink_tokens, start
):
    rows = min(rows, length)
    start = min(start, length)
    given_options = {"causal": causal, "start": start}
    if causal and window is not None:
        given_options |= {"window": window, "sink_tokens": sink_tokens}
    options = AttendOptions.make(8, rows, 1, length, **given_options)
    wanted = reference.visible_tokens(rows, length, **given_options)
    placement = Placement(ranks, block_size=block_size, weights=weights[:ranks])
    for rank in range(ranks):
        mine = placement.positions(rank, 0, placement.count(length, rank))
        seen = np.zeros((rows, len(mine)), bool)
        last = 0
        for run in runs_of(placement, rank, length, rows, options):
            assert run.first >= last  # no row is in two
            last = run.last
            part = seen_by(run, rows)
            assert part.any(axis=1).all()
            seen[run.first : run.last, : run.tokens] |= part
        assert (seen == wanted[:, mine]).all()


def test_one_row_needs_no_mask():
    """A step of decoding reads its window and nothing else, whatever the options."""
    placement = Placement(3, block_size=4)
    for length in range(1, 60):
        for window in (None, 1, 5, 17):
            for sinks in (0, 6) if window else (0,):
                options = AttendOptions.make(8, 1, 1, length, window=window, sink_tokens=sinks)
                for rank in range(3):
                    runs = runs_of(placement, rank, length, 1, options)
                    assert len(runs) <= 1
                    assert all(run.seen is None for run in runs)


def test_a_prompt_is_a_few_runs_of_plain_causal_attention():
    placement = Placement(2, block_size=16)
    options = AttendOptions.make(8, 64, 1, 128)
    runs = runs_of(placement, 0, 128, 64, options)
    assert all(run.seen is None and run.window is None for run in runs)
    assert [(run.first, run.last, run.causal) for run in runs] == [
        (0, 16, True),
        (16, 32, False),
        (32, 48, True),
        (48, 64, False),
    ]
