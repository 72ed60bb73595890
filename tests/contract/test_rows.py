"""quantize_rows and dequantize_rows: the bytes of layers, for rows of any shape."""

import numpy as np
import pytest
from support import ROWS, normal

import kvedge
from kvedge import dequantize_rows, errors, quantize_rows
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

CASES = [
    (name, options)
    for name, form in FORMATS.items()
    for options in (
        [{}, {"group_size": 24}, {"scale_dtype": "float16", "group_size": 8}]
        if form.has_scales
        else [{}]
    )
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_rows_have_the_bytes_that_a_layer_stores(rng, dtype, options):
    for kind in ("random", "tiny", "zero", "outlier"):
        rows = ROWS[kind](rng, (4, 3, 40))
        layer = layer_types[dtype](4, 3, 40, **options)
        layer.extend(rows, rows)
        codes, scales = quantize_rows(rows, dtype, **options)
        assert codes.tobytes() == layer.key_codes.tobytes() and codes.dtype == layer.key_codes.dtype
        size = {key: value for key, value in options.items() if key == "group_size"}
        if scales is None:
            assert not FORMATS[dtype].has_scales
            back = dequantize_rows(codes, dtype=dtype)
        else:
            assert scales.tobytes() == layer.key_scales.tobytes()
            back = dequantize_rows(layer.key_codes, layer.key_scales, dtype, dim=40, **size)
        np.testing.assert_array_equal(back, layer.keys())


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 3, 4, 5), (1, 1024)])
def test_rows_come_in_any_shape(rng, shape):
    rows = normal(rng, *shape)
    codes, scales = quantize_rows(rows)
    assert codes.shape == shape and scales.shape == (*shape[:-1], 1)
    for given in (scales, scales[..., 0]):
        back = dequantize_rows(codes, given)
        assert back.shape == shape and back.dtype == np.float32
        np.testing.assert_allclose(back, rows, atol=0.02)
    turned = np.asfortranarray(rows)
    assert quantize_rows(turned)[0].tobytes() == codes.tobytes()


def test_what_makes_no_rows_is_refused(rng):
    rows = normal(rng, 2, 8)
    for call, error in (
        (lambda: quantize_rows(rows.astype(np.float64)), errors.DtypeMismatchError),
        (lambda: quantize_rows([1.0, 2.0]), errors.DtypeMismatchError),
        (lambda: quantize_rows(np.float32(1)[()] * np.ones((), np.float32)), errors.KvedgeError),
        (lambda: quantize_rows(rows[:, :0]), errors.ShapeMismatchError),
        (lambda: quantize_rows(rows * np.inf), errors.NonFiniteInputError),
        (lambda: quantize_rows(rows, "int5"), errors.InvalidArgumentError),
        (lambda: quantize_rows(rows, "grid4"), errors.InvalidArgumentError),
        (lambda: quantize_rows(rows, "float16", group_size=4), errors.InvalidArgumentError),
        (lambda: quantize_rows(rows * 1e30, "float16"), errors.ScaleRangeError),
        (lambda: dequantize_rows(rows), errors.InvalidArgumentError),
        (lambda: dequantize_rows(rows, rows[:, 0]), errors.DtypeMismatchError),
        (lambda: dequantize_rows(rows, rows[:, 0], "float32"), errors.InvalidArgumentError),
    ):
        with pytest.raises(error):
            call()
    codes, scales = quantize_rows(rows, group_size=4)
    for wrong, error in (
        ((codes, scales), errors.ShapeMismatchError),  # which groups?
        ((codes[:1], scales[:, :1]), errors.ShapeMismatchError),
        ((np.full_like(codes, -128), scales[:, :1]), errors.InvalidArgumentError),
        ((codes, scales[:, :1] * np.float32(np.nan)), errors.InvalidArgumentError),
    ):
        with pytest.raises(error):
            dequantize_rows(*wrong)


def test_packed_codes_do_not_tell_their_channels(rng):
    rows = normal(rng, 3, 5)
    codes, scales = quantize_rows(rows, "int4")
    assert codes.shape == (3, 3)
    np.testing.assert_array_equal(
        dequantize_rows(codes, scales, "int4", dim=5), dequantize_rows(codes, scales, "int4")[:, :5]
    )
    with pytest.raises(kvedge.ShapeMismatchError, match="codes of 7 channels have 4 elements"):
        dequantize_rows(codes, scales, "int4", dim=7)
