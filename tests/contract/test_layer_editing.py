"""Taking tokens back, dropping some, moving them on, and copies of a layer."""

import copy
import pickle

import numpy as np
import pytest
import reference
from support import PLAIN, content, filled, huge, normal, refuses

from kvedge import Float32KvLayer, QuantizedKvLayer, Rope, errors
from kvedge.core.registry import layer_types

H, D = 2, 40

OPTIONS = {
    "whole-rows": {},
    "groups": {"group_size": 16},
    "float16-scales": {"scale_dtype": "float16", "group_size": 24},
    "offset": {"key_offset": "auto"},
}


@pytest.fixture(params=[*OPTIONS, *PLAIN])
def new_layer(request):
    """A maker of layers in one storage format: new_layer(capacity, head_dim=D)."""
    if request.param in PLAIN:
        kind = layer_types[request.param]
        return lambda capacity, head_dim=D: kind(capacity, H, head_dim)
    options = OPTIONS[request.param]
    return lambda capacity, head_dim=D: QuantizedKvLayer(capacity, H, head_dim, **options)


@pytest.fixture
def layer(new_layer, rng):
    """Twelve of twenty tokens stored, in each storage format."""
    layer = new_layer(20)
    layer.extend(*normal(rng, 2, 12, H, D))
    return layer


def rows_of(layer):
    """Copies of the raw stored rows, token first: codes and scales."""
    return [
        np.array(getattr(layer, name))
        for name in ("key_codes", "key_scales", "value_codes", "value_scales")
    ]


def assert_rows(layer, rows):
    for now, expected in zip(rows_of(layer), rows, strict=True):
        np.testing.assert_array_equal(now, expected)


# -- truncate and clear --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 11, 12])
def test_truncate_keeps_the_first_tokens_as_they_are(layer, length):
    rows = rows_of(layer)
    layer.truncate(length)
    assert len(layer) == length and layer.capacity == 20
    assert_rows(layer, [array[:length] for array in rows])


def test_a_rejected_draft_is_rolled_back(new_layer, rng):
    prompt, draft, accepted = normal(rng, 3, 2, 5, H, D)
    layer, straight = new_layer(20), new_layer(20)
    layer.extend(*prompt)
    layer.extend(*draft)
    layer.truncate(5 + 2)  # the model accepts two of the five
    for t in range(3):
        layer.push(accepted[0, t], accepted[1, t])
    straight.extend(*prompt)
    straight.extend(draft[0, :2], draft[1, :2])
    straight.extend(accepted[0, :3], accepted[1, :3])
    assert content(layer) == content(straight)
    query = normal(rng, H, D)
    np.testing.assert_array_equal(layer.attend(query), straight.attend(query))


# -- keep ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "indices",
    [
        [],
        [0],
        [11],
        [0, 1, 2],
        [3, 4, 5, 6, 7, 8, 9, 10, 11],
        [0, 2, 4, 6, 8, 10],
        [1, 5, 6, 11],
        list(range(12)),
    ],
    ids=str,
)
def test_keep_leaves_exactly_those_tokens_in_order(layer, indices):
    rows = rows_of(layer)
    mask = np.zeros(12, bool)
    mask[indices] = True
    for form in (indices, np.array(indices, np.int64), np.array(indices, np.int32), mask):
        kept = copy.copy(layer)
        kept.keep(form)
        assert len(kept) == len(indices)
        assert_rows(kept, [array[mask] for array in rows])


def test_keep_of_many_tokens(layer_class, rng):
    layer = filled(layer_class, rng, 5000, 1, 8)
    rows = rows_of(layer)
    mask = rng.random(5000) < 0.7
    layer.keep(mask)
    assert_rows(layer, [array[mask] for array in rows])
    layer.push(*normal(rng, 2, 1, 8))
    assert len(layer) == mask.sum() + 1


# -- shift ---------------------------------------------------------------------------------------

ROPES = [
    {},
    {"base": 500000.0},
    {"interleaved": True},
    {"rotary_dim": 20},
    {"rotary_dim": 20, "interleaved": True},
    {"inv_freq": np.linspace(1, 0.001, 20)},
]


def step(layer):
    """The largest error that storing keys again can make, (len, H, 1)."""
    if layer.dtype != "int8":
        rounding = {
            "float32": 2.0**-24,
            "float16": 2.0**-11,
            "bfloat16": 2.0**-8,
            "fp8_e4m3": 2.0**-4,
            "fp8_e5m2": 2.0**-3,
        }[layer.dtype]
        return 1e-6 + rounding * np.abs(layer.keys()).max()
    scales = np.asarray(layer.key_scales, np.float64).reshape(len(layer), H, -1)
    return 0.51 * scales.max(axis=-1, keepdims=True)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("delta", [-3, 1, 1000, -100000])
def test_shift_rotates_the_keys_by_the_rope_delta(layer, rope, delta):
    keys = layer.keys()
    rows = rows_of(layer)
    layer.shift(delta, rope=Rope(**rope))
    expected = reference.rotate(keys, delta, **rope)
    assert len(layer) == 12
    assert (np.abs(layer.keys() - expected) <= step(layer) + 1e-4).all()
    np.testing.assert_array_equal(layer.value_codes, rows[2])
    np.testing.assert_array_equal(layer.value_scales, rows[3])


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 5), (3, 9), (4, None), (12, None), (5, 5), (0, 12)]
)
def test_shift_of_a_part_leaves_the_rest_as_it_is(layer, start, stop):
    keys, rows = layer.keys(), rows_of(layer)
    layer.shift(-4, rope=Rope(), start=start, stop=stop)
    part = slice(start, stop)
    expected = keys.astype(np.float64)
    expected[part] = reference.rotate(keys[part], -4)
    assert (np.abs(layer.keys() - expected) <= step(layer) + 1e-4).all()
    outside = np.ones(12, bool)
    outside[part] = False
    for now, before in zip(rows_of(layer), rows, strict=True):
        np.testing.assert_array_equal(now[outside], before[outside])


def test_dropping_old_tokens_and_shifting_the_rest_keeps_attention(rng):
    """The context shift of llama.cpp: what is kept attends as if the old had never been."""
    base = normal(rng, 40, H, 64)  # keys before RoPE
    values = normal(rng, 40, H, 64)
    at = np.arange(40)

    def roped(rows, positions):
        turned = [reference.rotate(row, p) for row, p in zip(rows, positions, strict=True)]
        return np.float32(turned)

    layer = Float32KvLayer(40, H, 64)
    layer.extend(roped(base, at), values)
    layer.keep(np.r_[0:4, 20:40])
    layer.shift(-16, rope=Rope(), start=4)
    fresh = Float32KvLayer(40, H, 64)
    kept = np.r_[0:4, 20:40]
    fresh.extend(roped(base[kept], np.arange(24)), values[kept])
    query = normal(rng, H, 64)
    np.testing.assert_allclose(layer.attend(query), fresh.attend(query), atol=1e-5)


def test_rotate_turns_rows_of_any_layout(rng):
    rows = normal(rng, 5, H, 16)
    np.testing.assert_allclose(Rope().rotate(rows, 3), reference.rotate(rows, 3), atol=1e-5)
    every_other = np.repeat(rows, 2, axis=0)[::2]
    np.testing.assert_array_equal(Rope().rotate(every_other, 3), Rope().rotate(rows, 3))
    assert Rope().rotate(rows[:0], 3).shape == (0, H, 16)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (None, errors.DtypeMismatchError),
        ([[1.0, 2.0]], errors.DtypeMismatchError),
        (3.5, errors.DtypeMismatchError),
        ("rows", errors.DtypeMismatchError),
        (np.ones((2, 8)), errors.DtypeMismatchError),
        (np.ones((2, 8), np.int32), errors.DtypeMismatchError),
        (np.ma.ones((2, 8), np.float32), errors.DtypeMismatchError),
        (np.float32(1), errors.DtypeMismatchError),
        (np.array(1, np.float32), errors.ShapeMismatchError),
        (np.ones((2, 0), np.float32), errors.ShapeMismatchError),
        (np.ones((2, 7), np.float32), errors.ShapeMismatchError),
    ],
    ids=str,
)
def test_rotate_takes_arrays_of_rows_only(rows, error):
    with refuses(error):
        Rope().rotate(rows, 1)


def test_shift_of_many_tokens_is_shift_of_each(new_layer, rng):
    keys, values = normal(rng, 2, 3000, H, 24)
    layer = new_layer(3000, 24)
    layer.extend(keys, values)
    before = layer.keys()
    layer.shift(5, rope=Rope())
    assert (np.abs(layer.keys() - reference.rotate(before, 5)) <= step(layer) + 1e-4).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "shift",
    [
        lambda layer: layer.shift(rope=Rope()),
        lambda layer: layer.shift(3),
        lambda layer: layer.shift(3, rope="llama"),
        lambda layer: layer.shift(3, rope=Rope(rotary_dim=D + 2)),
        lambda layer: layer.shift(3, rope=Rope(rotary_dim=7)),
        lambda layer: layer.shift(3, rope=Rope(rotary_dim=20, inv_freq=np.ones(3))),
        lambda layer: layer.shift(3, rope=Rope(inv_freq=np.full(D // 2, np.nan))),
        lambda layer: layer.shift(3, rope=Rope(base=-1.0)),
        lambda layer: layer.shift(3, rope=Rope(base=float("nan"))),
        lambda layer: layer.shift("3", rope=Rope()),
        lambda layer: layer.shift(float("nan"), rope=Rope()),
        lambda layer: layer.shift(3, rope=Rope(), start=13),
        lambda layer: layer.shift(3, rope=Rope(), start=-1),
        lambda layer: layer.shift(3, rope=Rope(), stop=13),
        lambda layer: layer.shift(3, rope=Rope(), stop=2**70),
        lambda layer: layer.shift(3, rope=Rope(), start=5, stop=4),
    ],
)
def test_bad_shifts_are_refused(layer, shift):
    before = content(layer)
    with pytest.raises((errors.KvedgeError, TypeError)):
        shift(layer)
    assert content(layer) == before


def test_an_odd_head_dim_cannot_be_rotated_whole(layer_class, rng):
    layer = filled(layer_class, rng, 3, H, 7)
    with refuses(errors.KvedgeError, layer):
        layer.shift(1, rope=Rope())


def test_a_shift_beyond_float16_scales_changes_nothing(rng):
    """Turning (m, m) by 45 degrees gives (0, 1.41 m): the last token then has no float16 scale."""
    layer = QuantizedKvLayer(4, 1, 2, scale_dtype="float16")
    rows = normal(rng, 4, 1, 2)
    rows[3] = 127 * 65000.0
    layer.extend(rows, rows)
    with refuses(errors.ScaleRangeError, layer):
        layer.shift(1, rope=Rope(inv_freq=np.array([np.pi / 4])))


def test_a_shift_never_stores_infinity(layer_class):
    layer = layer_class(2, 1, 2)
    rows = np.full((2, 1, 2), huge(layer_class), np.float32)
    layer.extend(rows, rows)
    before = content(layer)
    try:
        layer.shift(1, rope=Rope(inv_freq=np.array([np.pi / 4])))
    except errors.KvedgeError:
        assert content(layer) == before
    assert np.isfinite(layer.keys()).all()


# -- copies --------------------------------------------------------------------------------------


COPIES = {
    "copy()": lambda layer: layer.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "old-pickle": lambda layer: pickle.loads(pickle.dumps(layer, protocol=2)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_thaws_its_automatic_offset_like_the_original(how, rng):
    layer = filled(QuantizedKvLayer, rng, 3, H, D, key_offset="auto", capacity=6)
    twin = COPIES[how](layer)
    kv = normal(rng, 2, 3, H, D)
    for each in (layer, twin):
        each.clear()
        each.extend(*kv)
    assert content(twin) == content(layer)


def test_a_pickle_holds_the_tokens_and_not_the_capacity(layer_class, rng):
    layer = filled(layer_class, rng, 2, H, D, capacity=1_000_000)
    assert len(pickle.dumps(layer)) < 10_000
