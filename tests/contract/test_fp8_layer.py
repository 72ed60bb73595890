"""FP8 rows: the bytes of OCP's types, and saturation, which is no error."""

import numpy as np
import pytest
import reference
from support import ROWS, normal, refuses

import kvedge
from kvedge import errors
from kvedge.core.registry import layer_types

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


@pytest.fixture(params=LARGEST)
def dtype(request):
    return request.param


@pytest.fixture
def layer_class(dtype):
    return layer_types[dtype]


def numbers(dtype):
    """Every finite number that is not negative, float64; the index is the code."""
    values = reference.FLOATS[dtype](np.arange(128, dtype=np.uint8))
    return values[values <= LARGEST[dtype]]


def interesting(dtype):
    """Each number, each tie between two, the floats next to these, and what lies beyond."""
    exact = numbers(dtype)
    ties = (exact[1:] + exact[:-1]) / 2
    step = exact[-1] - exact[-2]
    beyond = [LARGEST[dtype] + step / 2, LARGEST[dtype] + step, 1e6, np.finfo(np.float32).max]
    x = np.concatenate([exact, ties, beyond]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(3e38))])
    return np.concatenate([x, -x])


def codes_of(layer_class, x):
    layer = layer_class(x.size, 1, 1)
    layer.extend(x.reshape(-1, 1, 1), -x.reshape(-1, 1, 1))
    np.testing.assert_array_equal(layer.key_codes ^ 0x80, layer.value_codes)
    return layer.key_codes.reshape(-1)


def test_rows_round_to_the_nearest_ties_to_even_and_saturate(dtype, layer_class):
    x = interesting(dtype)
    codes = codes_of(layer_class, x)
    exact = numbers(dtype)
    size = np.minimum(np.abs(x).astype(np.float64), LARGEST[dtype])
    distance = np.abs(size[:, None] - exact)
    nearest = distance.argmin(axis=1)  # of a tie the lower, which an odd code is rounded up from
    tied = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) == 2
    nearest += tied & (nearest % 2 == 1)
    np.testing.assert_array_equal(codes & 0x7F, nearest)
    np.testing.assert_array_equal(codes >> 7, np.signbit(x))


@pytest.mark.parametrize("kind", ROWS)
def test_the_bytes_are_those_of_ml_dtypes(kind, dtype, layer_class, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[dtype]
    x = np.concatenate([ROWS[kind](rng, (200, 40)).reshape(-1), interesting(dtype)])
    expected = np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(getattr(ml_dtypes, name))
    np.testing.assert_array_equal(codes_of(layer_class, x), expected.view(np.uint8))


def test_what_saturates_is_no_error_and_what_is_not_finite_is_one(dtype, layer_class, rng):
    layer = layer_class(8, 2, 40)
    rows = normal(rng, 3, 2, 40) * np.float32(1e30)
    layer.extend(rows, rows)
    np.testing.assert_array_equal(layer.keys(), np.sign(rows) * LARGEST[dtype])
    assert np.isfinite(layer.attend(normal(rng, 4, 40))).all()
    rows[1, 1, 3] = np.inf
    with refuses(errors.NonFiniteInputError, layer):
        layer.extend(rows, rows)


def test_a_shifted_key_does_not_saturate(dtype, layer_class):
    layer = layer_class(1, 1, 2)
    row = np.full((1, 2), LARGEST[dtype], np.float32)
    layer.push(row, row)
    layer.shift(1, rope=kvedge.Rope(inv_freq=np.array([np.pi / 4])))  # to (0, 1.41 times as large)
    expected = [0, 2**0.5 * LARGEST[dtype]]
    np.testing.assert_allclose(layer.keys()[0, 0], expected, rtol=1e-6, atol=1e-6)


def test_the_layer_of_a_type_is_made_by_its_name(rng):
    for dtype, kind in (
        ("fp8_e4m3", kvedge.Fp8E4m3KvLayer),
        ("fp8_e5m2", kvedge.Fp8E5m2KvLayer),
    ):
        layer = kvedge.Fp8KvLayer(4, 2, 8, dtype=dtype, value_head_dim=6)
        assert type(layer) is kind and layer.dtype == dtype and layer.value_head_dim == 6
    assert type(kvedge.Fp8KvLayer(num_kv_heads=1, head_dim=8)) is kvedge.Fp8E4m3KvLayer
    for dtype in ("float16", np.int8):
        with pytest.raises(kvedge.InvalidArgumentError, match="fp8_e4m3"):
            kvedge.Fp8KvLayer(4, 2, 8, dtype=dtype)
