"""int4: the bytes that docs/numerics.md promises, and attention over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.reference import attention, int4_levels
from helpers.support import assert_attention_close, normal, stored
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvedge import Int4KvLayer, QuantizedKvLayer, ScaleRangeError

LEVELS = [-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127]


def by_halves(terms):
    """A sum in the order that the contract names."""
    terms = list(terms) + [0.0] * ((1 << (len(terms) - 1).bit_length()) - len(terms))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def encoded(x):
    """Codes and scale of a group, number by number."""
    largest = max(abs(float(v)) for v in x)
    codes = []
    for v in x:
        t = float(v) * (127.0 / largest) if largest else 0.0
        codes.append(sum((a + b) / 2 <= t for a, b in itertools.pairwise(LEVELS)))
    product = by_halves([float(v) * LEVELS[c] for v, c in zip(x, codes, strict=True)])
    scale = product / sum(LEVELS[c] ** 2 for c in codes) if product > 0 else 0.0
    return codes, np.float32(scale)


ROWS = hnp.arrays(np.float32, (3, 1, 21), elements=st.floats(-(2.0**99), 2.0**99, width=32))


@given(rows=ROWS, group=st.sampled_from([None, 4, 7, 16]))
def test_the_bytes_are_those_promised(rows, group):
    layer = Int4KvLayer(3, 1, 21, group_size=group)
    layer.extend(rows, rows)
    codes = np.stack([layer.key_codes % 16, layer.key_codes // 16], -1).reshape(3, -1)
    scales = np.asarray(layer.key_scales).reshape(3, -1)
    assert (codes[:, 21] == 0).all()  # the half byte over
    for token in range(3):
        for g, start in enumerate(range(0, 21, group or 21)):
            x = rows[token, 0, start : start + (group or 21)]
            expected, scale = encoded(x)
            assert codes[token, start : start + len(x)].tolist() == expected
            assert scales[token, g] == scale and not np.signbit(scales[token, g])


@pytest.mark.parametrize("dim", [1, 2, 33, 64, 96, 200])
def test_values_are_levels_times_scales(rng, dim):
    layer = Int4KvLayer(40, 2, dim)
    layer.extend(*normal(rng, 2, 40, 2, dim))
    scales = np.asarray(layer.value_scales).reshape(40, 2, 1)
    expected = int4_levels(layer.value_codes, dim) * scales.astype(np.float64)
    np.testing.assert_array_equal(layer.values(), expected.astype(np.float32))


@pytest.mark.parametrize("group", [None, 5, 16, 32])  # groups of 5 begin within bytes
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_over_groups_that_begin_anywhere(rng, group, heads):
    layer = Int4KvLayer(300, heads, 80, group_size=group, scale_dtype="float16")
    layer.extend(*normal(rng, 2, 300, heads, 80))
    for n in (1, 7):
        query = normal(rng, n, 3 * heads, 80)
        expected, _ = attention(query, *stored(layer))
        assert_attention_close(layer.attend(query), expected)


def test_rows_beyond_float16_scales_are_refused():
    layer = QuantizedKvLayer(2, 1, 4, value_dtype="int4", scale_dtype="float16")
    rows = np.full((1, 1, 4), 3.97e6, np.float32)
    with pytest.raises(ScaleRangeError, match=r"values hold 3\.97e\+06"):
        layer.extend(rows, rows)
    assert len(layer) == 0
    layer.extend(rows * np.float32(0.99), rows * np.float32(0.99))
    np.testing.assert_allclose(layer.values(), rows * 0.99, rtol=1e-3)
