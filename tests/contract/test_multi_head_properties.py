"""MultiHeadKvCache under rows and calls that Hypothesis thinks up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvedge import KvCacheConfig, MultiHeadKvCache

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-3e3, max_value=3e3)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 70))


@given(
    rows=hnp.arrays(np.float32, shapes, elements=finite),
    bits=st.integers(2, 8),
    seed=st.integers(0, 2**64 - 1),
    scale_dtype=st.sampled_from(["float16", "float32"]),
)
def test_any_finite_rows_come_back_within_what_the_grid_loses(rows, bits, seed, scale_dtype):
    """A row never comes back longer than it was, nor with a larger error than itself."""
    cache = MultiHeadKvCache(
        rows.shape[1], KvCacheConfig(rows.shape[2], bits, seed=seed, scale_dtype=scale_dtype)
    )
    cache.extend(rows, rows)
    back = cache.decode_keys()
    np.testing.assert_array_equal(cache.decode_values(), back)
    rows, back = (array.astype(np.float64) for array in (rows, back))  # squares of tiny ones
    length = np.linalg.norm(rows, axis=-1)
    slack = 2e-3 * length + (1e-5 if scale_dtype == "float16" else 1e-40) * rows.shape[2]
    assert (np.linalg.norm(back, axis=-1) <= length + slack).all()
    assert (np.linalg.norm(back - rows, axis=-1) <= length + slack).all()


@given(
    rows=hnp.arrays(
        np.float32, st.tuples(st.just(1), st.just(1), st.integers(1, 16)), elements=finite
    ),
    seed=st.integers(0, 1000),
)
def test_rows_of_few_channels_keep_their_length_and_what_they_resemble(rows, seed):
    length = np.linalg.norm(rows.astype(np.float64))
    if length < 1e-2:  # of float16 scales
        return
    cache = MultiHeadKvCache(1, KvCacheConfig(rows.shape[2], 4, seed=seed))
    cache.extend(rows, rows)
    assert abs(np.linalg.norm(cache.decode_keys()) / length - 1) < 0.15
    assert cache.attention_scores(rows[0])[0, 0] > 0


@given(data=st.data())
def test_any_calls_leave_what_a_list_of_tokens_would_hold(data):
    config = KvCacheConfig(6, 3, seed=1)
    cache, held = MultiHeadKvCache(2, config), []
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    query = rng.standard_normal((2, 6), np.float32)
    for _ in range(data.draw(st.integers(1, 8))):
        call = data.draw(st.sampled_from(["push", "extend", "evict", "truncate", "clear"]))
        n = data.draw(st.integers(0, 9))
        if call in ("push", "extend"):
            rows = rng.standard_normal((1 if call == "push" else n, 2, 6), np.float32)
            cache.push_token(rows[0], rows[0]) if call == "push" else cache.extend(rows, rows)
            held += list(rows)
        elif call == "evict":
            cache.evict_outside_window(n)
            held = held[-n:] if n else []
        elif call == "truncate":
            n = min(n, len(held))
            cache.truncate(n)
            held = held[:n]
        else:
            cache.clear()
            held = []
        assert len(cache) == len(held)
    expected = MultiHeadKvCache(2, config)
    if held:
        expected.extend(np.stack(held), np.stack(held))
    assert cache.key_codes.tobytes() == expected.key_codes.tobytes()
    np.testing.assert_array_equal(cache.attention_scores(query), expected.attention_scores(query))
