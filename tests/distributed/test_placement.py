"""Which rank holds which tokens: against lists made one token at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedge.distributed import Placement
from kvedge.errors import InvalidArgumentError


@st.composite
def placements(draw):
    ranks = draw(st.integers(1, 5))
    weights = draw(st.none() | st.lists(st.floats(0.1, 10.0), min_size=ranks, max_size=ranks))
    return Placement(ranks, block_size=draw(st.integers(1, 9)), weights=weights)


def owners(placement, length):
    """The rank of each token, from the words of the docstring."""
    pattern = placement.pattern
    return [pattern[position // placement.block_size % len(pattern)] for position in range(length)]


@given(placements(), st.integers(0, 300))
def test_counts_and_positions_are_those_of_the_list(placement, length):
    of = np.array(owners(placement, length), int)
    for rank in range(placement.num_ranks):
        mine = np.flatnonzero(of == rank)
        assert placement.count(length, rank) == len(mine)
        assert placement.positions(rank, 0, len(mine)).tolist() == mine.tolist()
        every = placement.count(np.arange(length + 1), rank)
        assert every.tolist() == [int((of[:n] == rank).sum()) for n in range(length + 1)]
        start = length // 3
        assert placement.held_by(rank, start, length).tolist() == [
            p - start for p in mine if p >= start
        ]
    assert [placement.owner(p) for p in range(length)] == of.tolist()


@given(placements(), st.lists(st.none() | st.integers(0, 60), min_size=5, max_size=5))
def test_the_longest_context_is_the_last_that_fits(placement, limits):
    limits = limits[: placement.num_ranks]
    longest = placement.longest(limits)
    if longest is None:
        assert limits == [None] * placement.num_ranks
        return
    fits = [
        all(m is None or placement.count(n, r) <= m for r, m in enumerate(limits))
        for n in (longest, longest + 1)
    ]
    assert fits == [True, False]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
def test_striped_blocks_are_balanced_to_a_block(ranks, block_size, length):
    placement = Placement(ranks, block_size=block_size)
    assert placement.pattern == tuple(range(ranks))
    counts = [placement.count(length, rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= block_size


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5))
def test_weights_are_shares_of_the_blocks_wherever_the_context_ends(weights):
    placement = Placement(len(weights), block_size=1, weights=weights)
    total, blocks = sum(weights), 64 * len(placement.pattern)
    for rank, weight in enumerate(weights):
        share = placement.count(blocks, rank) / blocks
        assert abs(share - weight / total) < 0.04
        for length in range(1, 3 * len(placement.pattern)):  # even within the pattern
            assert abs(placement.count(length, rank) - share * length) <= len(weights)


def test_small_ratios_are_exact():
    assert Placement(3, weights=[2, 1, 1]).pattern == (0, 1, 2, 0)
    assert Placement(2, weights=[7.0, 7.0]).pattern == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_ranks": 0}, "num_ranks must be from 1"),
        ({"num_ranks": 2, "block_size": 0}, "block_size must be from 1"),
        ({"num_ranks": 2, "weights": [1.0]}, "2 positive numbers"),
        ({"num_ranks": 2, "weights": [1.0, 0.0]}, "2 positive numbers"),
        ({"num_ranks": 2, "weights": 3}, "one for each rank"),
        ({"num_ranks": 2, "weights": [1.0, float("nan")]}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises((InvalidArgumentError, ValueError), match=said):
        Placement(**arguments)
    with pytest.raises(InvalidArgumentError, match="each at least once"):
        Placement.of_pattern(3, 16, [0, 1, 1])
