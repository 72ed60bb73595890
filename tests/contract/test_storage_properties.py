"""Stored bytes of rows that Hypothesis thinks up, and attention under options it combines."""

import numpy as np
import reference
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvedge import QuantizedKvLayer

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 70)),
    elements=finite,
)


def drawn_group_size(data, widest):
    return data.draw(st.none() | st.integers(1, widest), label="group_size")


@given(keys=rows, data=st.data())
def test_any_finite_rows_store_the_bytes_of_the_reference(keys, data):
    group_size = drawn_group_size(data, keys.shape[2])
    layer = QuantizedKvLayer(*keys.shape, group_size=group_size)
    layer.extend(keys, -keys)
    codes, scales = reference.quantize(keys, group_size)
    np.testing.assert_array_equal(layer.key_codes, codes)
    np.testing.assert_array_equal(layer.value_codes, -codes)
    assert layer.key_scales.tobytes() == scales.tobytes() == layer.value_scales.tobytes()


@given(keys=rows, width=st.integers(1, 80), data=st.data())
def test_any_rows_of_two_widths_store_the_bytes_of_the_reference(keys, width, data):
    group_size = drawn_group_size(data, max(width, keys.shape[2]))
    values = np.resize(-keys, (*keys.shape[:2], width))
    layer = QuantizedKvLayer(*keys.shape, value_head_dim=width, group_size=group_size)
    layer.extend(keys, values)
    for given_rows, codes, scales in (
        (keys, layer.key_codes, layer.key_scales),
        (values, layer.value_codes, layer.value_scales),
    ):
        wanted = reference.quantize(given_rows, group_size)
        np.testing.assert_array_equal(codes, wanted[0])
        assert scales.tobytes() == wanted[1].tobytes()


@given(keys=rows, data=st.data())
def test_any_rows_in_range_store_the_bytes_of_the_reference_with_float16_scales(keys, data):
    group_size = drawn_group_size(data, keys.shape[2])
    assume(np.abs(keys).max() < 127 * 65504)
    layer = QuantizedKvLayer(*keys.shape, group_size=group_size, scale_dtype="float16")
    layer.extend(keys, keys)
    codes, scales = reference.quantize(keys, group_size, "float16")
    np.testing.assert_array_equal(layer.key_codes, codes)
    assert layer.key_scales.tobytes() == scales.tobytes()


@given(peak=st.floats(width=32, min_value=0, max_value=float(np.finfo(np.float32).max)))
@example(peak=2.0**-96)
@example(peak=2.0**-149)
@example(peak=float(np.finfo(np.float32).tiny))
@example(peak=float(np.finfo(np.float32).max))
def test_a_row_at_any_magnitude_stores_the_bytes_of_the_reference(peak):
    steps = np.linspace(-1, 1, 255).astype(np.float32) * np.float32(peak)
    layer = QuantizedKvLayer(1, 1, 255)
    layer.push(steps, steps)
    codes, scales = reference.quantize(steps.reshape(1, 1, -1))
    np.testing.assert_array_equal(layer.key_codes, codes)
    assert layer.key_scales.tobytes() == scales.tobytes()
