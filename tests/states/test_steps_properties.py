"""Steps of states in any split of tokens that Hypothesis draws, against float64."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from state_cases import SHAPES, made


@given(
    name=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 2**32),
    batch=st.sampled_from([None, 1, 2]),
    parts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_any_split_of_tokens_gives_the_same_within_the_contract(name, seed, batch, parts):
    rng = np.random.default_rng(seed)
    case = made(name, rng, batch, max(sum(parts), 1))
    state, outs, first = case.state(), [], 0
    for n in [*parts, case.tokens - sum(parts)]:
        outs.append(state.extend(**case.part(first, first + n)))
        first += n
    case.check(state, np.concatenate(outs, axis=1 if batch else 0))
    assert state.position == case.tokens
