"""A state: arrays that are replaced whole, gone back to whole, and never half written."""

import copy
import pickle

import numpy as np
import pytest

import kvedge

SHAPES = {"recurrent": (2, 4, 3), "conv": (10, 4)}


def bits(values):
    """Bfloat16 of float32, which end in zeros here."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def a_state(seed=0, position=5):
    rng = np.random.default_rng(seed)
    recurrent = rng.standard_normal(SHAPES["recurrent"]).astype(np.float32)
    conv = bits(rng.standard_normal(SHAPES["conv"]))
    layer = kvedge.StateLayer({"recurrent": recurrent, "conv": conv}, dtype={"conv": "bfloat16"})
    layer.advance(position)
    return layer


def test_arrays_are_taken_without_a_copy_and_told():
    array = np.zeros((3, 5), np.float32)
    layer = kvedge.StateLayer({"state": array, "half": np.zeros(2, np.float16)})
    array[1, 2] = 7
    assert layer.arrays["state"] is array
    assert (layer.names, layer.dtypes) == (("half", "state"), ("float16", "float32"))
    assert layer.nbytes == layer.memory_bytes == layer.resident_bytes == 64
    assert layer.fp32_memory_bytes == 68
    assert not hasattr(layer, "__len__")
    with pytest.raises(TypeError):
        layer.arrays["state"] = array


def test_a_snapshot_puts_back_bits_and_position_where_the_arrays_lie():
    layer, other = a_state(), a_state(1, 9)
    before, arrays = layer.snapshot(), dict(layer.arrays)
    assert before.nbytes == layer.nbytes == 24 * 4 + 40 * 2
    layer.replace(**other.arrays)
    layer.advance(4)
    assert layer == other
    layer.restore(unpickled(before))
    assert layer == a_state()
    assert all(layer.arrays[name] is array for name, array in arrays.items())
    layer.reset()
    assert layer.position == 0
    assert not any(array.any() for array in layer.arrays.values())


def unpickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, unpickled])
def test_copies_and_pickles_are_equal_and_independent(again):
    layer = a_state()
    other = again(layer)
    assert other == layer
    other.arrays["recurrent"][0, 0, 0] = -0.0
    layer.arrays["recurrent"][0, 0, 0] = 0.0
    assert other != layer  # equal numbers of other bits
    other.restore(layer.snapshot())
    other.advance()
    assert other != layer


BAD = {
    "no array of that name": ({"other": np.zeros(2, np.float32)}, kvedge.InvalidArgumentError),
    "another shape": ({"conv": bits(np.zeros((4, 10)))}, kvedge.ShapeMismatchError),
    "another type": ({"conv": np.zeros((10, 4), np.float32)}, kvedge.DtypeMismatchError),
    "a list": ({"conv": [[0.0] * 4] * 10}, kvedge.DtypeMismatchError),
    "an infinity": ({"conv": bits(np.full((10, 4), np.inf))}, kvedge.NonFiniteInputError),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_replaced_changes_nothing(what):
    arrays, error = BAD[what]
    layer = a_state()
    with pytest.raises(error, match=next(iter(arrays))):
        layer.replace(recurrent=np.ones(SHAPES["recurrent"], np.float32), **arrays)
    assert layer == a_state()


def test_arrays_may_be_exchanged_for_views_of_one_another():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    layer = kvedge.StateLayer({"one": rows.copy(), "two": -rows})
    one, two = layer.arrays["one"], layer.arrays["two"]
    layer.replace(one=two[::-1], two=one)
    np.testing.assert_array_equal(one, -rows[::-1])
    np.testing.assert_array_equal(two, rows)


ROWS = np.zeros((4, 6), np.float32)
READ_ONLY = ROWS.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("arrays", "options", "error"),
    [
        ({}, {}, kvedge.InvalidArgumentError),
        ([ROWS], {}, kvedge.InvalidArgumentError),
        ({"a b": ROWS}, {}, kvedge.InvalidArgumentError),
        ({"a" * 33: ROWS}, {}, kvedge.InvalidArgumentError),
        ({"a": ROWS[:0]}, {}, kvedge.ShapeMismatchError),
        ({"a": ROWS[:, ::2]}, {}, kvedge.LayoutError),
        ({"a": READ_ONLY}, {}, kvedge.LayoutError),
        ({"a": ROWS, "b": ROWS[1:]}, {}, kvedge.LayoutError),
        ({"a": ROWS.astype(np.float64)}, {}, kvedge.DtypeMismatchError),
        ({"a": ROWS.astype(">f4")}, {}, kvedge.DtypeMismatchError),
        ({"a": bits(ROWS)}, {}, kvedge.DtypeMismatchError),
        ({"a": bits(ROWS)}, {"dtype": "float32"}, kvedge.DtypeMismatchError),
        ({"a": ROWS}, {"dtype": "bfloat16"}, kvedge.DtypeMismatchError),
        ({"a": ROWS}, {"dtype": "int8"}, kvedge.InvalidArgumentError),
        ({"a": ROWS}, {"dtype": {"b": "float32"}}, kvedge.InvalidArgumentError),
        ({"a": ROWS + np.nan}, {}, kvedge.NonFiniteInputError),
    ],
)
def test_what_no_state_can_be_made_of_is_refused(arrays, options, error):
    with pytest.raises(error):
        kvedge.StateLayer(arrays, **options)


@pytest.mark.parametrize("n", [-1, 1.5, None])
def test_a_position_only_goes_on(n):
    layer = a_state()
    with pytest.raises(kvedge.InvalidArgumentError):
        layer.advance(n)
    with pytest.raises(kvedge.InvalidArgumentError, match="StateSnapshot"):
        layer.restore(layer)
    with pytest.raises(kvedge.ShapeMismatchError):
        layer.restore(kvedge.StateLayer({"conv": ROWS}).snapshot())
    assert layer == a_state()
