"""Bad input to a layer: a clear error each time, the length and every stored byte unchanged."""

import numpy as np
import pytest
from support import filled, normal, refuses

from kvedge import Float32KvLayer, KVCache, QuantizedKvLayer, errors

pytestmark = pytest.mark.covering(1)  # one check serves all formats

H, D = 3, 8  # different from each other, so that a transposed array does not fit


@pytest.fixture
def layer(layer_class, rng):
    """Two tokens stored, room for four more."""
    return filled(layer_class, rng, 2, H, D, capacity=6)


def told(number):
    """How a message tells a number; one of 60 digits need not be written out."""
    return str(number) if abs(number) <= 2**64 else ""


def write_calls(layer, rng):
    """Both ways in, as name -> call(keys, values) with the good arrays for it."""
    one, many = normal(rng, 2, H, D), normal(rng, 2, 2, H, D)
    return [(layer.push, one[0], one[1]), (layer.extend, many[0], many[1])]


# -- capacity ------------------------------------------------------------------------------------


def test_push_beyond_capacity_is_refused(layer_class, rng):
    layer = filled(layer_class, rng, 4, H, D)
    assert layer.is_full and layer.remaining == 0
    one = normal(rng, H, D)
    with refuses(errors.CapacityExceededError, layer, match="4"):
        layer.push(one, one)
    with pytest.raises(IndexError):
        layer.push(one, one)
    layer.truncate(3)
    layer.push(one, one)
    assert len(layer) == 4


def test_extend_beyond_capacity_is_all_or_nothing(layer_class, rng):
    layer = filled(layer_class, rng, 3, H, D, capacity=5)
    many = normal(rng, 3, H, D)
    with refuses(errors.CapacityExceededError, layer, match="5"):
        layer.extend(many, many)
    layer.extend(many[:2], many[:2])
    assert len(layer) == 5
    layer.extend(many[:0], many[:0])
    with refuses(errors.CapacityExceededError, layer):
        layer.extend(many[:1], many[:1])


# -- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["capacity", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("bad", [0, -1, -(2**40), 2**40 + 1, 2**63, 2**64, 2**200])
def test_dimensions_out_of_range_are_refused(layer_class, name, bad):
    good = {"capacity": 4, "num_kv_heads": 2, "head_dim": 8}
    with refuses(errors.InvalidArgumentError, match=[name, told(bad)]):
        layer_class(**{**good, name: bad})


@pytest.mark.parametrize("name", ["capacity", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("bad", [1.5, 4.0, "4", True, [4], np.float32(4), np.bool_(True)])
def test_dimensions_that_are_no_integers_are_refused(layer_class, name, bad):
    good = {"capacity": 4, "num_kv_heads": 2, "head_dim": 8}
    with refuses((errors.InvalidArgumentError, errors.DtypeMismatchError), match=name):
        layer_class(**{**good, name: bad})


@pytest.mark.parametrize(("name", "bad"), [("num_kv_heads", 65537), ("head_dim", 1025)])
def test_more_than_the_largest_dimensions_is_refused(layer_class, name, bad):
    with refuses(errors.InvalidArgumentError, match=[name, str(bad)]):
        layer_class(**{"capacity": 1, "num_kv_heads": 1, "head_dim": 1, name: bad})


def test_the_largest_dimensions_work(layer_class):
    layer = layer_class(1, 65536, 1024)
    assert layer.entry_size == 65536 * 1024
    layer = layer_class(np.int64(2), np.int32(3), np.uint8(8))
    assert (layer.capacity, layer.num_kv_heads, layer.head_dim) == (2, 3, 8)


def test_memory_that_the_system_does_not_have_is_refused(layer_class):
    with refuses(errors.OutOfMemoryError):
        layer_class(2**40, 65536, 1024)
    with pytest.raises(MemoryError):
        layer_class(2**40, 1024, 1024)


@pytest.mark.parametrize("bad", [0, -1, 65, 1024, 1.5, "32", True])
def test_bad_group_sizes_are_refused(bad):
    with refuses((errors.InvalidArgumentError, errors.DtypeMismatchError), match="group_size"):
        QuantizedKvLayer(4, 2, 64, group_size=bad)


@pytest.mark.parametrize("bad", ["float64", "int8", "half", 16, b"float16", "bfloat16"])
def test_bad_scale_dtypes_are_refused(bad):
    with refuses(errors.InvalidArgumentError, match="scale_dtype"):
        QuantizedKvLayer(4, 2, 64, scale_dtype=bad)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (np.zeros((D, H), np.float32), errors.ShapeMismatchError),
        (np.zeros(H * D + 1, np.float32), errors.ShapeMismatchError),
        (np.zeros((H, D)), errors.DtypeMismatchError),
        (np.full((H, D), np.nan, np.float32), errors.NonFiniteInputError),
        (np.full((H, D), np.inf, np.float32), errors.NonFiniteInputError),
        ("mean", errors.KvedgeError),
        (1.0, errors.KvedgeError),
        ([[0.0] * D] * H, errors.KvedgeError),
    ],
)
def test_bad_key_offsets_are_refused(bad, error):
    with refuses(error, match="key_offset"):
        QuantizedKvLayer(4, H, D, key_offset=bad)


@pytest.mark.parametrize(
    "option",
    [
        {"group_size": 4},
        {"scale_dtype": "float16"},
        {"key_offset": "auto"},
        {"key_offset": np.zeros((H, D), np.float32)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_int8_are_refused_for_float32_layers(option):
    with refuses(errors.InvalidArgumentError, match=next(iter(option))):
        Float32KvLayer(4, H, D, **option)


# -- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [(H + 1, D), (H, D + 1), (D, H), (H * D - 1,), (H * D + 1,), (1, H, D), (2, H, D), (), (0,)],
    ids=str,
)
def test_push_of_a_wrong_shape_is_refused(layer, bad, rng):
    good, wrong = normal(rng, H, D), np.zeros(bad, np.float32)
    for keys, values in ((wrong, good), (good, wrong), (wrong, wrong)):
        with refuses(errors.ShapeMismatchError, layer, match=[str(H), str(D)]):
            layer.push(keys, values)


@pytest.mark.parametrize(
    "bad",
    [(2, D, H), (2, H, D + 1), (2, H + 1, D), (2, H * D), (H, D), (2, 1, H, D), (H * D,), ()],
    ids=str,
)
def test_extend_of_a_wrong_shape_is_refused(layer, bad, rng):
    good, wrong = normal(rng, 2, H, D), np.zeros(bad, np.float32)
    for keys, values in ((wrong, good), (good, wrong), (wrong, wrong)):
        with refuses(errors.ShapeMismatchError, layer, match=[str(H), str(D)]):
            layer.extend(keys, values)


def test_different_numbers_of_keys_and_values_are_refused(layer, rng):
    with refuses(errors.ShapeMismatchError, layer):
        layer.extend(normal(rng, 2, H, D), normal(rng, 1, H, D))
    with refuses(errors.ShapeMismatchError, layer):
        layer.extend(normal(rng, 0, H, D), normal(rng, 2, H, D))


# -- dtypes and layouts --------------------------------------------------------------------------


def wrong_kinds(good):
    """What is no array that can be taken: (what, DtypeMismatchError)."""
    structured = np.dtype([("a", np.float32)])
    return {
        "float64": good.astype(np.float64),
        "int8": good.astype(np.int8),
        "int32": good.astype(np.int32),
        "uint16": np.zeros(good.shape, np.uint16),
        "complex64": good.astype(np.complex64),
        "bool": good > 0,
        "object": good.astype(object),
        "str": good.astype(str),
        "structured": good.view(structured),
        "list": good.tolist(),
        "None": None,
        "number": 1.0,
        "text": "keys",
        "bytes": good.tobytes(),
        "object()": object(),
        "class": np.ndarray,
    }


@pytest.mark.parametrize("kind", wrong_kinds(np.zeros((H, D), np.float32)))
def test_what_is_no_float32_array_is_refused(layer, kind, rng):
    for call, keys, values in write_calls(layer, rng):
        with refuses(errors.DtypeMismatchError, layer, match="keys"):
            call(wrong_kinds(keys)[kind], values)
        with refuses(errors.DtypeMismatchError, layer, match="values"):
            call(keys, wrong_kinds(values)[kind])
        with pytest.raises(TypeError):
            call(keys, wrong_kinds(values)[kind])


def test_the_error_for_float64_says_how_to_convert(layer, rng):
    one = normal(rng, H, D)
    with refuses(errors.DtypeMismatchError, layer, match=["float64", "astype(numpy.float32)"]):
        layer.push(one.astype(np.float64), one)


def misaligned(array):
    """The same numbers one byte off any alignment."""
    raw = np.empty(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


LAYOUTS = {
    "every-second-channel": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[..., ::-1],
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[..., :1], a.shape),
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "misaligned": misaligned,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_memory_layouts_are_refused(layer, layout, rng):
    for call, keys, values in write_calls(layer, rng):
        with refuses(errors.LayoutError, layer, match="keys"):
            call(LAYOUTS[layout](keys), values)
        with refuses(errors.LayoutError, layer, match="values"):
            call(keys, LAYOUTS[layout](values))


def test_the_error_for_strides_says_how_to_mend_them(layer, rng):
    one = normal(rng, H, D)
    with refuses(errors.LayoutError, layer, match="ascontiguousarray"):
        layer.push(np.asfortranarray(one), one)


# -- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_nan_and_infinity_are_refused_wherever_they_stand(layer_class, bad, which, rng):
    layer = filled(layer_class, rng, 2, H, 40, capacity=40)
    for at in [0, 1, 7, 15, 16, 39, 40, 41, 119]:  # element of a (3, 40) token
        token = {"keys": normal(rng, H, 40), "values": normal(rng, H, 40)}
        token[which].reshape(-1)[at] = bad
        with refuses(errors.NonFiniteInputError, layer, match=which):
            layer.push(token["keys"], token["values"])
    for at in [(0, 0, 0), (16, 1, 3), (19, 2, 39)]:
        batch = {"keys": normal(rng, 20, H, 40), "values": normal(rng, 20, H, 40)}
        batch[which][at] = bad
        with refuses(errors.NonFiniteInputError, layer, match=[which, str(at)]):
            layer.extend(batch["keys"], batch["values"])


def test_a_key_that_overflows_when_centred_is_refused(rng):
    offset = np.full((H, D), -3e38, np.float32)
    layer = QuantizedKvLayer(4, H, D, key_offset=offset)
    keys, values = normal(rng, 2, 2, H, D)
    layer.extend(keys, values)
    keys[1, 2, 3] = 3e38
    with refuses(errors.NonFiniteInputError, layer, match="key"):
        layer.extend(keys, values)
    with refuses(errors.NonFiniteInputError, layer, match="key"):
        layer.push(keys[1], values[1])


# -- positions and heads -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [2, 3, -1, -2, 5, 2**31, 2**40, 2**63, 2**64, 2**200, -(2**63)])
def test_positions_out_of_range_are_refused(layer, bad):
    for call in (
        lambda: layer.get_key(bad, 0),
        lambda: layer.get_value(bad, 0),
        lambda: layer.get_keys_at(bad),
        lambda: layer.get_values_at(bad),
    ):
        with refuses(errors.PositionOutOfRangeError, layer, match=[told(bad), "2"]):
            call()
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("bad", [H, -1, 100, 2**31, 2**40, 2**64, -(2**63)])
def test_heads_out_of_range_are_refused(layer, bad):
    for get in (layer.get_key, layer.get_value):
        with refuses(errors.HeadOutOfRangeError, layer, match=[str(bad), str(H)]):
            get(0, bad)


@pytest.mark.parametrize("bad", [0.0, "0", None, [0], np.float32(0)])
def test_positions_that_are_no_integers_are_refused(layer, bad):
    for call in (lambda: layer.get_key(bad, 0), lambda: layer.get_value(0, bad)):
        with pytest.raises((errors.KvedgeError, TypeError)):
            call()


def test_numpy_integers_are_positions(layer):
    np.testing.assert_array_equal(layer.get_key(np.int64(1), np.uint8(2)), layer.keys()[1, 2])


def test_an_empty_layer_has_no_positions(layer_class):
    layer = layer_class(4, H, D)
    with refuses(errors.PositionOutOfRangeError, layer):
        layer.get_key(0, 0)
    with refuses(errors.PositionOutOfRangeError, layer):
        layer.get_values_at(0)
    assert layer.keys().shape == layer.values().shape == (0, H, D)


# -- out= ----------------------------------------------------------------------------------------


def test_bad_out_arrays_of_getters_are_refused(layer):
    read_only = np.empty(D, np.float32)
    read_only.flags.writeable = False
    for bad in (
        np.empty(D + 1, np.float32),
        np.empty((1, D), np.float32),
        np.empty(D, np.float64),
        np.empty(2 * D, np.float32)[::2],
        read_only,
        [0.0] * D,
    ):
        with refuses(errors.KvedgeError, layer, match="out"):
            layer.get_key(0, 0, out=bad)
    with refuses(errors.ShapeMismatchError, layer, match="out"):
        layer.keys(out=np.empty((3, H, D), np.float32))


# -- editing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 3, 2**40, 2**70, -(2**63)])
def test_truncating_to_what_is_not_there_is_refused(layer, bad):
    with refuses((errors.PositionOutOfRangeError, errors.InvalidArgumentError), layer):
        layer.truncate(bad)


@pytest.mark.parametrize("bad", [1.0, "1", None, [1]])
def test_truncating_to_what_is_no_integer_is_refused(layer, bad):
    with pytest.raises((errors.KvedgeError, TypeError)):
        layer.truncate(bad)
    assert len(layer) == 2


@pytest.mark.parametrize(
    "bad",
    [
        [1, 0],
        [0, 0],
        [0, 1, 2],
        [-1],
        [2**40],
        [0.0, 1.0],
        [[0, 1]],
        "01",
        np.ones(3, bool),
        np.ones(1, bool),
        np.ones((2, 1), bool),
        None,
        0,
    ],
    ids=str,
)
def test_keeping_what_is_not_there_is_refused(layer, bad):
    with refuses(errors.KvedgeError, layer):
        layer.keep(bad)


# -- attend --------------------------------------------------------------------------------------


def refuses_attend(layer, error, query, **options):
    with refuses(error, layer):
        layer.attend(query, **options)


@pytest.mark.parametrize(
    "bad",
    [(H, D + 1), (H + 1, D), (D,), (H * D,), (), (0, D), (H, 0), (1, 1, H, D), (1, H + 1, D)],
    ids=str,
)
def test_queries_of_a_wrong_shape_are_refused(layer, bad):
    refuses_attend(layer, errors.ShapeMismatchError, np.zeros(bad, np.float32))


@pytest.mark.parametrize("kind", wrong_kinds(np.zeros((H, D), np.float32)))
def test_queries_that_are_no_float32_array_are_refused(layer, kind, rng):
    refuses_attend(layer, errors.DtypeMismatchError, wrong_kinds(normal(rng, H, D))[kind])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_of_other_memory_layouts_are_refused(layer, layout, rng):
    refuses_attend(layer, errors.LayoutError, LAYOUTS[layout](normal(rng, H, D)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_queries_that_are_not_finite_are_refused(layer, bad, rng):
    for at in (0, 7, H * D - 1):
        query = normal(rng, H, D)
        query.reshape(-1)[at] = bad
        refuses_attend(layer, errors.NonFiniteInputError, query)


def test_attending_to_an_empty_layer_is_refused(layer_class, rng):
    layer = layer_class(4, H, D)
    refuses_attend(layer, errors.InvalidArgumentError, normal(rng, H, D))


def test_more_query_rows_than_tokens_are_refused(layer, rng):
    refuses_attend(layer, errors.ShapeMismatchError, normal(rng, 3, H, D))


NAN_BIAS = np.array([0, np.nan], np.float32)
INF_BIAS = np.array([0, np.inf], np.float32)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": np.nan}, errors.KvedgeError),
        ({"scale": np.inf}, errors.KvedgeError),
        ({"scale": "1"}, errors.KvedgeError),
        ({"window": 0}, errors.InvalidArgumentError),
        ({"window": -1}, errors.InvalidArgumentError),
        ({"window": 1.5}, errors.KvedgeError),
        ({"window": 2, "causal": False}, errors.InvalidArgumentError),
        ({"sink_tokens": 1}, errors.InvalidArgumentError),
        ({"sink_tokens": -1, "window": 1}, errors.InvalidArgumentError),
        ({"sink_tokens": -1}, errors.InvalidArgumentError),
        ({"sink_tokens": 1.0, "window": 1}, errors.InvalidArgumentError),
        ({"sink_tokens": None, "window": 1}, errors.InvalidArgumentError),
        ({"sink_tokens": np.zeros(H, np.float32), "window": 1}, errors.InvalidArgumentError),
        ({"sink_logits": 1}, errors.DtypeMismatchError),
        ({"sink_logits": np.zeros(H + 1, np.float32)}, errors.ShapeMismatchError),
        ({"sink_logits": np.full(H, np.nan, np.float32)}, errors.NonFiniteInputError),
        ({"sink_logits": np.full(H, np.inf, np.float32)}, errors.NonFiniteInputError),
        ({"softcap": -1.0}, errors.InvalidArgumentError),
        ({"softcap": np.nan}, errors.KvedgeError),
        ({"softcap": np.inf}, errors.KvedgeError),
        ({"alibi_slopes": np.zeros(H - 1, np.float32)}, errors.ShapeMismatchError),
        ({"alibi_slopes": np.full(H, np.inf, np.float32)}, errors.NonFiniteInputError),
        ({"mask": np.ones(3, bool)}, errors.ShapeMismatchError),
        ({"mask": np.ones((H + 1, 2), bool)}, errors.ShapeMismatchError),
        ({"mask": np.ones((1, 1, 1, 2), bool)}, errors.ShapeMismatchError),
        ({"mask": np.ones(2, np.int32)}, errors.DtypeMismatchError),
        ({"mask": np.ones(2)}, errors.DtypeMismatchError),
        ({"mask": "all"}, errors.DtypeMismatchError),
        ({"mask": NAN_BIAS}, errors.NonFiniteInputError),
        ({"mask": INF_BIAS}, errors.NonFiniteInputError),
        ({"num_threads": 0}, errors.InvalidArgumentError),
        ({"num_threads": -1}, errors.InvalidArgumentError),
        ({"num_threads": 1.5}, errors.KvedgeError),
        ({"out": np.zeros((H, D + 1), np.float32)}, errors.ShapeMismatchError),
        ({"out": np.zeros((1, H, D), np.float32)}, errors.ShapeMismatchError),
        ({"out": np.zeros((H, D))}, errors.DtypeMismatchError),
        ({"out": np.zeros((D, H), np.float32).T}, errors.LayoutError),
        ({"start": -1}, errors.InvalidArgumentError),
        ({"start": 3}, errors.InvalidArgumentError),
        ({"start": None}, errors.InvalidArgumentError),
        ({"layout": "ndh"}, errors.InvalidArgumentError),
        ({"out": [[0.0] * D] * H}, errors.DtypeMismatchError),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_attend_options_are_refused(layer, options, error, rng):
    with refuses(error, layer, match=next(iter(options))):
        layer.attend(normal(rng, H, D), **options)


def test_an_out_that_cannot_be_written_is_refused(layer, rng):
    query = normal(rng, H, D)
    out = np.zeros((H, D), np.float32)
    out.flags.writeable = False
    refuses_attend(layer, errors.LayoutError, query, out=out)
    refuses_attend(layer, errors.LayoutError, query, out=query)
    memory = normal(rng, H * D + 1)
    overlap = memory[1:].reshape(H, D)
    refuses_attend(layer, errors.LayoutError, memory[:-1].reshape(H, D), out=overlap)


def test_an_out_inside_the_stored_rows_is_refused(rng):
    layer = filled(Float32KvLayer, rng, 2, H, D)
    inside = layer.key_codes[0]
    refuses_attend(layer, errors.LayoutError, normal(rng, H, D), out=inside)


@pytest.mark.parametrize("option", ["mask", "alibi_slopes", "sink_logits"])
def test_an_out_that_overlaps_another_array_of_the_call_is_refused(layer, option, rng):
    memory = normal(rng, H * D)
    read = memory[:H].reshape(H, 1) if option == "mask" else memory[:H]
    refuses_attend(
        layer, errors.LayoutError, normal(rng, H, D), out=memory.reshape(H, D), **{option: read}
    )


def test_an_out_that_overlaps_a_bool_mask_is_refused(layer, rng):
    out = normal(rng, H, D)
    mask = out.reshape(-1).view(np.bool_)[:2]
    mask[:] = True
    refuses_attend(layer, errors.LayoutError, normal(rng, H, D), out=out, mask=mask)


def test_an_out_beside_what_is_read_is_written_to(layer, rng):
    memory = normal(rng, 3, H, D)
    query, out = memory[1], memory[2]
    given, before = query.copy(), memory[0].copy()
    assert layer.attend(query, out=out) is out
    np.testing.assert_array_equal(out, layer.attend(given))
    np.testing.assert_array_equal(memory[:2], np.stack([before, given]))


def test_a_refused_attend_leaves_out_as_it_was(layer, rng):
    good, out = normal(rng, H, D), np.full((H, D), 7, np.float32)
    bad = good.copy()
    bad[H - 1, D - 1] = np.nan
    for query, options in [
        (bad, {}),
        (good.astype(np.float64), {}),
        (good, {"window": -1}),
        (good, {"sink_logits": np.full(H, np.inf, np.float32)}),
        (good, {"mask": np.full((1, len(layer)), np.nan, np.float32)}),
        (good, {"alibi_slopes": np.full(H, np.nan, np.float32)}),
    ]:
        refuses_attend(layer, errors.KvedgeError, query, out=out, **options)
        assert (out == 7).all(), options


def test_bad_queries_for_scores_are_refused(layer, rng):
    with refuses(errors.ShapeMismatchError, layer):
        layer.scores(normal(rng, H + 1, D))
    with refuses(errors.DtypeMismatchError, layer):
        layer.scores(normal(rng, H, D).astype(np.float64))
    with refuses(errors.NonFiniteInputError, layer):
        layer.scores(np.full((H, D), np.nan, np.float32))


# -- classes of the user's -----------------------------------------------------------------------


def test_a_subclass_that_makes_no_layer_is_told_so(layer_class, rng):
    class Unmade(layer_class):
        def __init__(self):
            pass

    layer, one = Unmade(), normal(rng, H, D)
    calls = [
        lambda: len(layer),
        lambda: layer.push(one, one),
        lambda: layer.attend(one),
        lambda: layer.scores(one),
        lambda: layer.truncate(0),
    ]
    for call in calls:
        with pytest.raises((errors.KvedgeError, AttributeError)):
            call()


@pytest.mark.parametrize("wrong", [3, None, KVCache(1, 2, 8)], ids=["int", "None", "cache"])
def test_a_method_of_the_class_refuses_what_is_no_layer(wrong):
    rows = np.ones((2, 8), np.float32)
    for name, given in (("push", 2), ("extend", 2), ("attend", 1), ("scores", 1)):
        with pytest.raises((TypeError, AttributeError)):
            getattr(QuantizedKvLayer, name)(wrong, *[rows] * given)
