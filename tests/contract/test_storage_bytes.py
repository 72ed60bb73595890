"""Stored bytes: the same input gives the same bytes on every path, those of the reference."""

import numpy as np
import pytest
import reference
from support import HEAD_DIMS, ROWS, group_sizes, normal, refuses

from kvedge import Float32KvLayer, QuantizedKvLayer, errors

TOKENS, HEADS = 6, 2


def assert_stores(layer, keys, values, group_size=None, scale_dtype="float32", offset=None):
    """Codes and scales in the layer are bit for bit those of the reference."""
    shifted = keys if offset is None else keys - offset
    for name, rows in (("key", shifted), ("value", values)):
        codes, scales = reference.quantize(rows, group_size, scale_dtype)
        stored_codes = getattr(layer, f"{name}_codes")
        stored_scales = getattr(layer, f"{name}_scales")
        assert stored_codes.dtype == np.int8 and stored_scales.dtype == scale_dtype
        np.testing.assert_array_equal(stored_codes, codes, err_msg=f"{name} codes")
        if scales.shape[-1] == 1:
            scales = scales[..., 0]
        assert stored_scales.shape == scales.shape
        assert stored_scales.tobytes() == scales.tobytes(), f"{name} scales differ"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", ROWS)
def test_codes_and_scales_are_those_of_the_reference(kind, head_dim, rng):
    shape = (TOKENS, HEADS, head_dim)
    keys, values = ROWS[kind](rng, shape), ROWS[kind](rng, shape)
    for group_size in group_sizes(head_dim):
        layer = QuantizedKvLayer(TOKENS, HEADS, head_dim, group_size=group_size)
        layer.extend(keys, values)
        assert_stores(layer, keys, values, group_size)


@pytest.mark.parametrize("head_dim", range(1, 70))
def test_every_tail_of_a_row_is_stored_exactly(head_dim, rng):
    keys, values = normal(rng, 2, 3, 1, head_dim)
    for group_size in (None, *(size for size in (1, 2, 7, 16, 17) if size <= head_dim)):
        layer = QuantizedKvLayer(3, 1, head_dim, group_size=group_size)
        layer.extend(keys, values)
        assert_stores(layer, keys, values, group_size)


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind not in ("huge", "all-magnitudes")])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 256])
def test_float16_scales_are_rounded_up_and_codes_follow(kind, head_dim, rng):
    shape = (TOKENS, HEADS, head_dim)
    keys, values = ROWS[kind](rng, shape), ROWS[kind](rng, shape)
    for group_size in group_sizes(head_dim):
        layer = QuantizedKvLayer(
            TOKENS, HEADS, head_dim, group_size=group_size, scale_dtype="float16"
        )
        layer.extend(keys, values)
        assert_stores(layer, keys, values, group_size, "float16")


def test_float16_scales_reach_from_the_smallest_subnormal_to_65504():
    peaks = np.float32([1e-45, 1e-38, 127 * 2.0**-24, 127 * 2.0**-25, 1e-3, 127 * 65504.0])
    rows = np.repeat(peaks[:, None, None], 4, axis=2)
    layer = QuantizedKvLayer(len(rows), 1, 4, scale_dtype="float16")
    layer.extend(rows, rows)
    assert_stores(layer, rows, rows, scale_dtype="float16")
    assert layer.key_scales[-1, 0] == np.float16(65504)
    assert (layer.key_scales[1:] > 0).all(), "a scale that is not zero was stored as zero"


def test_ties_under_float16_scales_fall_as_in_the_reference(rng):
    """Codes that end in .5, where x / scale and x * (1 / scale) round to different sides."""
    scales = np.arange(0x0400, 0x7C00, 4, np.uint16).view(np.float16).astype(np.float32)
    codes = rng.integers(0, 127, (len(scales), 1, 8)).astype(np.float32) + np.float32(0.5)
    rows = scales[:, None, None] * codes
    rows[:, 0, 0] = scales * 127
    layer = QuantizedKvLayer(len(rows), 1, 8, scale_dtype="float16")
    layer.extend(rows, rows)
    assert_stores(layer, rows, rows, scale_dtype="float16")


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("peak", [127 * 65504.0 * 1.0001, 1e30, 3.4e38])
def test_a_row_beyond_float16_scales_is_refused_and_nothing_written(which, peak, rng):
    layer = QuantizedKvLayer(8, 2, 64, scale_dtype="float16", group_size=32)
    layer.extend(normal(rng, 2, 2, 64), normal(rng, 2, 2, 64))
    batch = {"keys": normal(rng, 3, 2, 64), "values": normal(rng, 3, 2, 64)}
    batch[which][2, 1, 63] = peak
    with refuses(errors.ScaleRangeError, layer):
        layer.extend(batch["keys"], batch["values"])
    with refuses(errors.ScaleRangeError, layer):
        layer.push(batch["keys"][2], batch["values"][2])
    layer.extend(batch["keys"][:2], batch["values"][:2])
    assert len(layer) == 4


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("group_size", [None, 24])
def test_push_of_one_token_stores_what_extend_stores(scale_dtype, group_size, shape, rng):
    heads, head_dim = shape
    group_size = group_size and min(group_size, head_dim)
    options = {"scale_dtype": scale_dtype, "group_size": group_size}
    keys, values = normal(rng, 2, 5, heads, head_dim)
    layer = QuantizedKvLayer(5, heads, head_dim, **options)
    for t in range(5):
        if t % 2:
            layer.push(keys[t], values[t])
        else:
            layer.push(keys[t].reshape(-1), values[t].reshape(-1))
        assert len(layer) == t + 1
    assert_stores(layer, keys, values, group_size, scale_dtype)


def test_extend_in_any_chunks_stores_the_same_bytes(rng):
    keys, values = normal(rng, 2, 700, 3, 80)
    whole = QuantizedKvLayer(700, 3, 80)
    whole.extend(keys, values)
    assert_stores(whole, keys, values)
    parts = QuantizedKvLayer(700, 3, 80)
    at = 0
    for n in (0, 1, 15, 16, 17, 255, 396):
        parts.extend(keys[at : at + n], values[at : at + n])
        at += n
    assert_stores(parts, keys, values)


def test_a_group_as_wide_as_the_row_is_the_whole_row(rng):
    keys, values = normal(rng, 2, 2, 2, 64)
    for group_size in (None, 64):
        layer = QuantizedKvLayer(2, 2, 64, group_size=group_size)
        layer.extend(keys, values)
        assert layer.num_groups == 1 and layer.group_size == 64
        assert layer.key_scales.shape == (2, 2)
        assert_stores(layer, keys, values)


# -- key_offset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 128])
def test_keys_are_stored_less_the_given_offset(head_dim, scale_dtype, rng):
    keys, values = normal(rng, 2, TOKENS, HEADS, head_dim)
    offset = 10 * normal(rng, HEADS, head_dim)
    keys += offset
    for group_size in group_sizes(head_dim):
        layer = QuantizedKvLayer(
            TOKENS,
            HEADS,
            head_dim,
            group_size=group_size,
            scale_dtype=scale_dtype,
            key_offset=offset,
        )
        layer.extend(keys[:3], values[:3])
        for t in range(3, TOKENS):
            layer.push(keys[t], values[t])
        assert_stores(layer, keys, values, group_size, scale_dtype, offset)
        assert layer.key_offset.dtype == np.float32
        np.testing.assert_array_equal(layer.key_offset, offset)


def test_the_automatic_offset_is_the_mean_of_the_first_keys_where_that_narrows_them_then_frozen(
    rng,
):
    keys, values = normal(rng, 2, 9, HEADS, 40)
    keys[:, :, ::2] += 9
    layer = QuantizedKvLayer(9, HEADS, 40, key_offset="auto")
    layer.extend(keys[:0], values[:0])
    layer.extend(keys[:4], values[:4])
    offset = reference.automatic_key_offset(keys[:4])
    assert offset[:, ::2].all() and not offset[:, 1::2].all()
    np.testing.assert_array_equal(layer.key_offset, offset)
    layer.extend(keys[4:8], values[4:8])
    layer.push(keys[8], values[8])
    np.testing.assert_array_equal(layer.key_offset, offset)
    assert_stores(layer, keys, values, offset=offset)


def test_the_automatic_offset_of_a_single_pushed_token_is_that_token(rng):
    keys, values = normal(rng, 2, HEADS, 40)
    layer = QuantizedKvLayer(2, HEADS, 40, key_offset="auto")
    layer.push(keys, values)
    np.testing.assert_array_equal(layer.key_offset, keys)
    assert not layer.key_codes.any()
    np.testing.assert_array_equal(layer.keys()[0], keys)


def test_clear_thaws_the_automatic_offset_and_truncate_does_not(rng):
    keys, values = normal(rng, 2, 4, HEADS, 40)
    layer = QuantizedKvLayer(4, HEADS, 40, key_offset="auto")
    layer.extend(keys[:2], values[:2])
    layer.truncate(0)
    layer.extend(keys[2:], values[2:])
    np.testing.assert_array_equal(layer.key_offset, reference.automatic_key_offset(keys[:2]))
    layer.clear()
    layer.extend(keys[2:], values[2:])
    np.testing.assert_array_equal(layer.key_offset, reference.automatic_key_offset(keys[2:]))


def test_a_given_offset_stays_after_clear(rng):
    keys, values = normal(rng, 2, 2, HEADS, 8)
    offset = normal(rng, HEADS, 8)
    layer = QuantizedKvLayer(4, HEADS, 8, key_offset=offset)
    layer.extend(keys, values)
    layer.clear()
    layer.extend(keys, values)
    assert_stores(layer, keys, values, offset=offset)


def test_the_offset_given_is_copied(rng):
    offset = normal(rng, HEADS, 8)
    before = offset.copy()
    layer = QuantizedKvLayer(4, HEADS, 8, key_offset=offset)
    offset[:] = 99
    np.testing.assert_array_equal(layer.key_offset, before)


def test_a_refused_first_append_does_not_freeze_the_automatic_offset(rng):
    keys, values = normal(rng, 2, 3, HEADS, 8)
    layer = QuantizedKvLayer(4, HEADS, 8, key_offset="auto")
    bad = values.copy()
    bad[2, 1, 7] = np.nan
    with refuses(errors.NonFiniteInputError, layer):
        layer.extend(keys, bad)
    layer.push(keys[0], values[0])
    np.testing.assert_array_equal(layer.key_offset, keys[0])


def test_an_automatic_offset_of_huge_keys_stays_finite():
    keys = np.full((4, 1, 8), 3.4e38, np.float32)
    layer = QuantizedKvLayer(4, 1, 8, key_offset="auto")
    layer.extend(keys, keys)
    np.testing.assert_array_equal(layer.keys(), keys)
    assert np.isfinite(layer.key_offset).all()


# -- what may come in ----------------------------------------------------------------------------


class DLPackOnly:
    """An array of another library: it has DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class BFloat16Tensor:
    """A tensor in bfloat16 as PyTorch has it: NumPy cannot take it before ``.float()``."""

    dtype = "torch.bfloat16"

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        raise BufferError("bfloat16 is not supported by NumPy")

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def float(self):
        return DLPackOnly(self.array.astype(np.float32))


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("convert", [read_only, DLPackOnly, BFloat16Tensor])
def test_arrays_of_other_kinds_are_taken(convert, layer_class, rng):
    keys, values = normal(rng, 2, 3, HEADS, 8)
    layer, expected = layer_class(4, HEADS, 8), layer_class(4, HEADS, 8)
    layer.extend(convert(keys), convert(values))
    layer.push(convert(keys[0].copy()), convert(values[0].copy()))
    expected.extend(keys, values)
    expected.push(keys[0], values[0])
    np.testing.assert_array_equal(layer.keys(), expected.keys())
    np.testing.assert_array_equal(layer.values(), expected.values())
    query = normal(rng, HEADS, 8)
    np.testing.assert_array_equal(layer.attend(convert(query)), expected.attend(query))


def test_the_arrays_given_are_not_changed_nor_kept(layer_class, rng):
    keys, values = normal(rng, 2, 3, HEADS, 8)
    before = keys.copy(), values.copy()
    layer = layer_class(3, HEADS, 8)
    layer.extend(keys, values)
    assert (keys == before[0]).all() and (values == before[1]).all()
    stored = layer.keys().copy()
    keys[:] = 0
    np.testing.assert_array_equal(layer.keys(), stored)


@pytest.mark.parametrize(("n", "start"), [(100, 1), (5000, 1), (5000, 4990), (1, 3)])
def test_rows_that_overlap_their_new_place_are_stored_as_they_were(n, start, rng):
    """A view of rows that truncate() has freed, moved towards the end over itself."""
    keys, values = normal(rng, 2, start + 2 * n, HEADS, 40)
    layer = Float32KvLayer(start + 2 * n, HEADS, 40)
    layer.extend(keys, values)
    old_keys, old_values = layer.key_codes[:n], layer.value_codes[:n]
    layer.truncate(start)
    layer.extend(old_keys, old_values)
    np.testing.assert_array_equal(layer.keys(), np.concatenate([keys[:start], keys[:n]]))
    np.testing.assert_array_equal(layer.values(), np.concatenate([values[:start], values[:n]]))
