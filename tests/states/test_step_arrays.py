"""What a backend's functions for states are handed: arrays that fit together, or nothing is done.

kvedge.states and kvedge.transformers.steps both call them, and no check is anywhere else that an
array of a torch model has to pass.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedge.backends.numpy import states as in_numpy
from kvedge.core.half import decode_bfloat16, encode_bfloat16
from kvedge.core.registry import active
from kvedge.errors import InvalidArgumentError, LayoutError, ShapeMismatchError

REFUSED = (ShapeMismatchError, LayoutError, InvalidArgumentError)
MARGIN = 64  # elements before and behind an array, which nobody may change
FUNCTIONS = {
    "delta_extend": ("state", "query", "key", "value", "gate", "beta", "out"),
    "mamba_extend": ("state", "x", "dt", "A", "B", "C", "D", "out"),
    "conv_extend": ("state", "x", "weight", "bias", "silu", "out"),
}
ODD = ["shape", "shape", "dtype", "reordered", "apart", "reversed", "repeated", "read-only"]


@st.composite
def shapes(draw, name):
    """Shapes of a call's arrays that fit together."""
    batch, tokens, shared, each = (
        draw(st.integers(*most)) for most in ((0, 3), (0, 5), (1, 2), (1, 3))
    )
    one, two = draw(st.sampled_from([1, 3, 8, 40])), draw(st.sampled_from([1, 2, 17, 64]))
    lead, heads = (batch, tokens), shared * each
    if name == "conv_extend":
        width = min(two + 1, 8)
        of = {
            "state": (batch, one, width - 1 + draw(st.integers(0, 9))), "x": (*lead, one),
            "weight": (one, width), "bias": (one,), "out": (*lead, one),
        }  # fmt: skip
    elif name == "mamba_extend":
        of = {
            "state": (batch, heads, one, two), "x": (*lead, heads, one), "dt": (*lead, heads),
            "A": (heads,), "B": (*lead, shared, two), "C": (*lead, shared, two), "D": (heads,),
            "out": (*lead, heads, one),
        }  # fmt: skip
    else:
        gate = (*lead, heads, draw(st.sampled_from([1, one])))
        of = {
            "state": (batch, heads, one, two), "query": (*lead, shared, one),
            "key": (*lead, shared, one), "value": (*lead, heads, two), "gate": gate,
            "beta": (*lead, heads), "out": (*lead, heads, two),
        }  # fmt: skip
    return of


def other_shape(draw, shape):
    axis = draw(st.integers(0, len(shape) - 1))
    size = draw(st.sampled_from([0, 1, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]]))
    same = (*shape[:axis], max(size, 0), *shape[axis + 1 :])
    without = shape[:axis] + shape[axis + 1 :] or (1, 1)
    return draw(st.sampled_from([same, same, without, (*shape, 1), shape[::-1]]))


class Memory:
    """An array within a larger one."""

    def __init__(self, rng, shape, dtype="float32", how="dense", axis=0):
        order = list(range(len(shape)))
        if how == "reordered":
            order.insert(0, order.pop(axis % len(shape)))
        room = [shape[i] for i in order]
        room[-1] += 3 if how == "apart" else 0
        n = int(np.prod(room))
        self.whole = rng.standard_normal(n + 2 * MARGIN).astype(np.float32)
        bits = encode_bfloat16(self.whole)
        self.whole = bits if dtype == "uint16" else self.whole.astype(dtype)
        at = np.arange(n).reshape(room)[..., : shape[order[-1]]].transpose(np.argsort(order))
        start = 0
        if how == "reversed":
            at = np.flip(at, axis % len(shape))
        if how == "repeated":
            at = np.broadcast_to(at.take([0], axis % len(shape)), shape) if at.size else at
        if at.size:
            start = int(at.flat[0])
        strides = [
            (int(at.take(1, i).flat[0]) - start if size > 1 else 1) * self.whole.itemsize
            for i, size in enumerate(shape)
        ] if at.size else None  # fmt: skip
        begin = self.whole[MARGIN + start :]
        self.array = (
            np.lib.stride_tricks.as_strided(begin, shape, strides)
            if strides
            else np.empty(shape, dtype)
        )
        self.is_part = np.zeros(len(self.whole), bool)
        self.is_part[MARGIN + at.ravel()] = True
        if how == "read-only":
            self.array.flags.writeable = False


def floats(array):
    return decode_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_arrays_fit_together_or_nothing_is_changed(name, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    of = draw(shapes(name))
    odd = draw(st.dictionaries(st.sampled_from(sorted(of)), st.sampled_from(ODD), max_size=2))
    memory = {}
    for key, shape in of.items():
        how, axis = odd.get(key, "dense"), draw(st.integers(0, 3)) if key in odd else 0
        dtype = (
            draw(st.sampled_from(["float16", "uint16", "float64", "int32"]))
            if how == "dtype"
            else "float32"
        )
        memory[key] = Memory(
            rng, other_shape(draw, shape) if how == "shape" else shape, dtype, how, axis
        )
    for key in {"gate", "A"} & memory.keys():
        memory[key].whole[:] = -np.abs(memory[key].whole)
    for key in {"dt"} & memory.keys():
        memory[key].whole[:] = np.abs(memory[key].whole)
    arrays = {key: one.array for key, one in memory.items()}
    if draw(st.integers(0, 9)) == 0:  # two arguments are one
        one, other = draw(st.permutations(sorted(of)))[:2]
        arrays[one] = arrays[other]
    before = {key: one.whole.copy() for key, one in memory.items()}
    copies = {key: floats(array).copy() for key, array in arrays.items()}
    more = {"delta_extend": (0.5, True), "mamba_extend": (), "conv_extend": ()}[name]

    def call(function, arrays):
        given = [arrays.get(key, True) for key in FUNCTIONS[name]]  # True: silu
        function(*given[:-1], given[-1], *more, 1)

    try:
        call(active(name), arrays)
    except REFUSED:
        assert all(np.array_equal(before[key], one.whole) for key, one in memory.items())
        return
    for key, one in memory.items():
        kept = ~one.is_part if key in ("state", "out") else slice(None)
        assert np.array_equal(before[key][kept], one.whole[kept])
    call(getattr(in_numpy, name), copies)  # which refuses what does not fit together
    for key in ("state", "out"):
        assert np.allclose(floats(arrays[key]), copies[key], rtol=2e-2, atol=2e-2)
