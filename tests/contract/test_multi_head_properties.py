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
