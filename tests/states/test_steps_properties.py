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
    decays=st.sampled_from([(1,), (0, 1, 1000), (1, 1e-6, 1e4)]),
)
def test_any_split_of_tokens_gives_the_same_within_the_contract(name, seed, batch, parts, decays):
    rng = np.random.default_rng(seed)
    case = made(name, rng, batch, max(sum(parts), 1))
    for key in {"gate", "dt"} & case.inputs.keys():  # some tokens forget all, others nothing
        shape = (*case.inputs[key].shape[:2], *[1] * (case.inputs[key].ndim - 2))
        case.inputs[key] *= rng.choice(np.float32(decays), shape)
    state, outs, first = case.state(), [], 0
    for n in [*parts, case.tokens - sum(parts)]:
        outs.append(state.extend(**case.part(first, first + n)))
        first += n
    case.check(state, np.concatenate(outs, axis=1 if batch else 0))
    assert state.position == case.tokens
