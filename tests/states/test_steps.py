"""Steps of states against float64: any shape, any threads; bad input."""

import numpy as np
import pytest
from state_cases import SHAPES, Case, made

import kvedge
from kvedge.errors import (
    DtypeMismatchError,
    InvalidArgumentError,
    LayoutError,
    NonFiniteInputError,
    ShapeMismatchError,
)

TOKENS = [1, 2, 15, 16, 17, 33, 100]
KINDS = ["delta-40-72", "kda-33-65", "mamba-40-72", "conv-4"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_state_are_those_of_float64(name, tokens, batch, dtype, rng):
    case = made(name, rng, batch, tokens, dtype)
    state = case.state()
    out = state.extend(**case.part())
    case.check(state, out)
    assert out.dtype == np.float32 and state.position == tokens


@pytest.mark.parametrize("name", KINDS)
def test_the_contract_holds_over_4096_tokens(name, rng):
    case = made(name, rng, None, 4096)
    state = case.state()
    case.check(state, state.extend(**case.part()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_an_extend_of_one_token(name, batch, dtype, rng):
    case = made(name, rng, batch, 1, dtype)
    stepped, extended = case.state(), case.state()
    given = case.part()
    one = {k: given[k][:, 0] if batch else given[k][0] for k in case.inputs} | case.constants
    out = stepped.step(**one)
    assert np.array_equal(out, extended.extend(**given)[(slice(None), 0) if batch else 0])
    assert stepped == extended


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_and_the_same_tokens_give_the_same_bits(name, rng):
    case = made(name, rng, 2, 50)
    state = case.state()
    state.extend(**case.part(0, 20))
    before = state.snapshot()
    out = state.extend(**case.part(20))
    after = state.copy()
    state.restore(before)
    assert np.array_equal(state.extend(**case.part(20)), out)
    assert state == after


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_results_do_not_depend_on_threads(name, batch, tokens, rng):
    case = made(name, rng, batch, tokens)
    alone = case.state()
    out = alone.extend(**case.part(), num_threads=1)
    for num_threads in (2, 3, 8):
        other = case.state()
        assert np.array_equal(other.extend(**case.part(), num_threads=num_threads), out)
        assert other == alone


@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_a_batch_is_as_alone(name, rng):
    case = made(name, rng, 3, 20)
    whole = case.state()
    out = whole.extend(**case.part())
    kind, shape = SHAPES[name]
    alone = Case(kind, rng, None, 20, **shape)
    alone.inputs = {k: a[1:2] for k, a in case.inputs.items()}
    alone.constants, alone.start = case.constants, case.start[1:2]
    state = alone.state()
    assert np.array_equal(state.extend(**alone.part()), out[1])
    assert np.array_equal(state.array, whole.array[1])


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("name", KINDS)
def test_views_with_any_strides_of_outer_axes_are_read_and_written(name, tokens, rng):
    case = made(name, rng, 2, tokens)
    plain = case.state()
    out = plain.extend(**case.part())
    apart = {}
    for k, a in case.inputs.items():  # tokens outside of the batch, gaps between all rows
        wide = np.full((a.shape[1], a.shape[0] + 1, *a.shape[2:-1], a.shape[-1] + 3), np.nan)
        view = wide.astype(np.float32)[:, :-1, ..., 1:-2].swapaxes(0, 1)
        view[...] = a
        apart[k] = view
    room = np.full((out.shape[1], *out.shape[2:-1], out.shape[0], out.shape[-1] + 5), np.nan)
    target = np.moveaxis(room.astype(np.float32), -2, 0)[..., 2:-3]
    state = case.state()
    assert state.extend(**case.part(inputs=apart), out=target) is target
    assert np.array_equal(target, out)
    assert state == plain


@pytest.mark.parametrize("name", KINDS)
def test_sixteen_bit_inputs_and_results_are_converted(name, rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = made(name, rng, None, 5)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        rounded = {k: a.astype(dtype) for k, a in case.inputs.items()}
        state, other = case.state(), case.state()
        out = state.extend(**case.part(inputs=rounded))
        case.inputs = {k: a.astype(np.float32) for k, a in rounded.items()}
        assert np.array_equal(out, other.extend(**case.part()))
        given = np.empty(out.shape, dtype)
        case.state().extend(**case.part(), out=given)
        assert np.array_equal(given, out.astype(dtype))


@pytest.mark.parametrize("name", KINDS)
def test_no_tokens_change_nothing(name, rng):
    case = made(name, rng, 2, 3)
    state, before = case.state(), case.state()
    out = state.extend(**case.part(0, 0))
    assert out.shape[1] == 0 and state == before


def test_a_state_begins_with_zeros_and_says_what_it_is():
    delta = kvedge.DeltaState(4, 40, 72, num_key_heads=2, batch_size=3, dtype="bfloat16")
    assert (delta.num_heads, delta.num_key_heads, delta.key_dim, delta.value_dim) == (4, 2, 40, 72)
    assert (delta.batch_size, delta.dtype, delta.array.dtype) == (3, "bfloat16", np.uint16)
    mamba = kvedge.MambaState(4, 40, 72, num_groups=2)
    assert (mamba.num_heads, mamba.head_dim, mamba.state_size, mamba.num_groups) == (4, 40, 72, 2)
    conv = kvedge.ConvState(72, 4)
    assert (conv.num_channels, conv.width, conv.array.shape) == (72, 4, (72, 3))
    for state in (delta, mamba, conv):
        assert not state.array.any() and isinstance(state, kvedge.StateLayer)
        assert state.array is state.arrays["state"]


def test_values_as_large_and_small_as_a_model_has_them_stay_finite(rng):
    case = made("delta-40-72", rng, None, 100)
    case.inputs["gate"][:, ::4] = -1e4  # forgets all, between tokens that forget little
    case.inputs["gate"][:, 1::4] = 0
    case.inputs["key"][:, ::3] = 0  # as of padding
    case.inputs["query"][:, ::5] = 0
    state = case.state()
    case.check(state, state.extend(**case.part()))
    case = made("mamba-40-72", rng, None, 100)
    case.inputs["dt"][:, ::2] = 0  # keeps all
    case.inputs["dt"][:, 1::4] = 500
    state = case.state()
    case.check(state, state.extend(**case.part()))
    case = made("conv-4", rng, None, 30)
    case.inputs["x"] *= 1e4  # exp(-out) overflows
    state = case.state()
    case.check(state, state.extend(**case.part()))


# ---- what is refused -----------------------------------------------------------------------------


def bad(given, name, change):
    return {**given, name: change(given[name])}


def with_nan(array):
    array = array.copy()
    array.reshape(-1)[-1] = np.nan
    return array


CHANGES = {
    "nan": (with_nan, NonFiniteInputError),
    "infinite": (lambda a: a * np.float32(np.inf), NonFiniteInputError),
    "float64": (lambda a: a.astype(np.float64), DtypeMismatchError),
    "list": (lambda a: a.tolist(), DtypeMismatchError),
    "one too few": (lambda a: a[..., :-1], ShapeMismatchError),
    "no axis": (lambda a: a[0] if a.ndim > 1 else a[:0], ShapeMismatchError),
    "one axis more": (lambda a: a[None], ShapeMismatchError),
    "gaps": (lambda a: np.repeat(a, 2, axis=-1)[..., ::2], LayoutError),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", KINDS)
def test_bad_arrays_are_refused_and_nothing_is_changed(name, what, rng):
    case = made(name, rng, 2, 3)
    state, before = case.state(), case.state()
    change, error = CHANGES[what]
    arrays = [k for k, a in case.part().items() if isinstance(a, np.ndarray)]
    for at in arrays:
        with pytest.raises(error, match=at):
            state.extend(**bad(case.part(), at, change))
    assert state == before


@pytest.mark.parametrize("name", KINDS)
def test_bad_options_are_refused_and_nothing_is_changed(name, rng):
    case = made(name, rng, 2, 3)
    state, before = case.state(), case.state()
    given = case.part()
    shape = given["value" if "value" in given else "x"].shape
    read = given["value" if "value" in given else "x"]
    for wrong, error in (
        ({"num_threads": 0}, InvalidArgumentError),
        ({"num_threads": 1.5}, InvalidArgumentError),
        ({"out": np.empty(shape, np.float64)}, DtypeMismatchError),
        ({"out": np.empty(shape[1:], np.float32)}, ShapeMismatchError),
        ({"out": np.empty((*shape, 2), np.float32)[..., 0]}, LayoutError),
        ({"out": read}, LayoutError),
        ({"out": np.broadcast_to(np.float32(0), shape)}, LayoutError),
    ):
        with pytest.raises(error):
            state.extend(**{**given, **wrong})
    for key, wrong, error in (
        ("gate", np.abs, InvalidArgumentError),
        ("dt", np.negative, InvalidArgumentError),
        ("A", np.negative, InvalidArgumentError),
        ("normalize", lambda _: 1, InvalidArgumentError),
        ("scale", lambda _: float("nan"), NonFiniteInputError),
        ("activation", lambda _: "gelu", InvalidArgumentError),
    ):
        if key in given or (key == "scale" and "query" in given):
            with pytest.raises(error, match=key):
                state.extend(**{**given, key: wrong(given.get(key))})
    assert state == before


def test_results_may_not_be_written_over_the_state():
    state = kvedge.DeltaState(2, 8, 8)
    rows = np.ones((2, 8), np.float32)
    flat = np.zeros((2, 2), np.float32)
    with pytest.raises(LayoutError):
        state.step(rows, rows, rows, flat[0], flat[0], out=state.array[0, :2])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: kvedge.DeltaState(0, 8, 8), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, num_key_heads=3), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, num_key_heads=8), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 257, 8), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 257), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8.0, 8), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, batch_size=0), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, dtype="float16"), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, dtype=np.float32), InvalidArgumentError),
        (lambda: kvedge.DeltaState(4, 8, 8, array=np.zeros((4, 8, 8))), DtypeMismatchError),
        (lambda: kvedge.DeltaState(4, 8, 8, array=np.zeros((8, 8), "f4")), ShapeMismatchError),
        (lambda: kvedge.DeltaState(4, 8, 8, array=np.zeros((4, 8, 8), "u2")), DtypeMismatchError),
        (lambda: kvedge.DeltaState(1, 2, 3, array=np.zeros((3, 2, 1), "f4").T), LayoutError),
        (
            lambda: kvedge.DeltaState(1, 2, 3, array=np.full((1, 2, 3), np.nan, "f4")),
            NonFiniteInputError,
        ),
        (lambda: kvedge.MambaState(4, 8, 8, num_groups=3), InvalidArgumentError),
        (lambda: kvedge.MambaState(4, 8, 257), InvalidArgumentError),
        (lambda: kvedge.ConvState(4, 1), InvalidArgumentError),
        (lambda: kvedge.ConvState(4, 9), InvalidArgumentError),
        (lambda: kvedge.ConvState(4, 4, array=np.zeros((4, 2), "f4")), ShapeMismatchError),
        (lambda: kvedge.ConvState(4, 4, array=np.float32(1)), DtypeMismatchError),
    ],
)
def test_states_that_make_no_sense_are_refused(make, error):
    with pytest.raises(error):
        make()
