"""What a layer tells about itself: getters, views of the stored bytes, sizes and ratios."""

import gc
import os
import sys

import numpy as np
import pytest
import reference
from support import PLAIN, filled, normal

from kvedge import Float32KvLayer, QuantizedKvLayer
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

H, D = 2, 40

OPTIONS = {
    "whole-rows": {},
    "groups": {"group_size": 16},
    "float16-scales": {"scale_dtype": "float16", "group_size": 24},
    "offset": {"key_offset": "auto"},
}


@pytest.fixture(params=[*OPTIONS, *PLAIN])
def layer(request, rng):
    """Five of eight tokens stored, in each storage format."""
    if request.param in PLAIN:
        return filled(layer_types[request.param], rng, 5, H, D, capacity=8)
    return filled(QuantizedKvLayer, rng, 5, H, D, capacity=8, **OPTIONS[request.param])


def float32_rows(layer):
    """Keys and values as float32, dequantized by the reference."""
    if layer.dtype != "int8":
        rows = (layer.key_codes, layer.value_codes)
        return [reference.FLOATS[layer.dtype](codes).astype(np.float32) for codes in rows]
    result = []
    for name, offset in (("key", layer.key_offset), ("value", None)):
        codes = getattr(layer, f"{name}_codes")
        scales = np.asarray(getattr(layer, f"{name}_scales")).reshape(len(layer), H, -1)
        result.append(reference.dequantize(codes, scales, layer.group_size, offset, np.float32))
    return result


# -- getters -------------------------------------------------------------------------------------


def test_every_getter_gives_the_dequantized_rows(layer):
    keys, values = float32_rows(layer)
    np.testing.assert_array_equal(layer.keys(), keys)
    np.testing.assert_array_equal(layer.values(), values)
    for t in range(len(layer)):
        np.testing.assert_array_equal(layer.get_keys_at(t), keys[t].reshape(-1))
        np.testing.assert_array_equal(layer.get_values_at(t), values[t].reshape(-1))
        for h in range(H):
            np.testing.assert_array_equal(layer.get_key(t, h), keys[t, h])
            np.testing.assert_array_equal(layer.get_value(t, h), values[t, h])


def test_getters_return_float32_arrays_of_their_own(layer):
    for get in (
        layer.keys,
        layer.values,
        lambda: layer.get_key(0, 0),
        lambda: layer.get_keys_at(0),
        lambda: layer.get_values_at(4),
    ):
        first = get()
        assert first.dtype == np.float32 and first.flags.c_contiguous and first.flags.writeable
        before = first.copy()
        first[:] = 77
        np.testing.assert_array_equal(get(), before)


def test_getters_write_into_out(layer):
    for get, shape in (
        (layer.keys, (5, H, D)),
        (layer.values, (5, H, D)),
        (lambda **kw: layer.get_key(1, 1, **kw), (D,)),
        (lambda **kw: layer.get_value(1, 0, **kw), (D,)),
        (lambda **kw: layer.get_keys_at(2, **kw), (H * D,)),
        (lambda **kw: layer.get_values_at(2, **kw), (H * D,)),
    ):
        out = np.full(shape, np.nan, np.float32)
        assert get(out=out) is out
        np.testing.assert_array_equal(out, get())


def test_huge_rows_read_back_without_infinity():
    rows = np.full((1, 1, 8), np.finfo(np.float32).max, np.float32)
    rows[..., ::2] *= -1
    for options in ({}, {"group_size": 3}, {"key_offset": "auto"}):
        layer = QuantizedKvLayer(1, 1, 8, **options)
        layer.extend(rows, rows)
        assert np.isfinite(layer.keys()).all() and np.isfinite(layer.values()).all()
        np.testing.assert_allclose(layer.keys(), rows, rtol=1e-6)


# -- views ---------------------------------------------------------------------------------------

VIEWS = ["key_codes", "value_codes", "key_scales", "value_scales"]


def test_views_have_the_documented_shapes(layer):
    groups = layer.num_groups
    form = FORMATS[layer.dtype]
    scales = (5, H, 0) if not form.has_scales else (5, H) if groups == 1 else (5, H, groups)
    for name in ("key", "value"):
        codes = getattr(layer, f"{name}_codes")
        assert codes.shape == (5, H, D) and codes.dtype == form.codes
        assert getattr(layer, f"{name}_scales").shape == scales
    if form.has_scales:
        assert layer.key_scales.dtype == np.dtype(layer.scale_dtype)


def test_views_are_read_only(layer):
    for name in VIEWS:
        view = getattr(layer, name)
        assert not view.flags.writeable
        with pytest.raises(ValueError):
            view[...] = 0
        with pytest.raises(AttributeError):
            setattr(layer, name, view)


def test_views_share_the_memory_of_the_layer(layer, rng):
    for name in VIEWS[:2]:
        view = getattr(layer, name)
        assert np.shares_memory(view, getattr(layer, name))
        before = view.copy()
        layer.truncate(4)
        layer.push(*normal(rng, 2, H, D))
        assert len(layer) == 5
        np.testing.assert_array_equal(view[:4], before[:4])
        np.testing.assert_array_equal(view, getattr(layer, name))
        assert (view[4] != before[4]).any()


def test_views_outlive_the_layer(rng):
    for layer_class in (QuantizedKvLayer, Float32KvLayer):
        layer = filled(layer_class, rng, 300, 4, 64, capacity=3000)
        views = [getattr(layer, name) for name in VIEWS]
        before = [view.copy() for view in views]
        del layer
        gc.collect()
        others = [filled(layer_class, rng, 300, 4, 64, capacity=3000) for _ in range(3)]
        for view, copy in zip(views, before, strict=True):
            np.testing.assert_array_equal(view, copy)
        del others


def test_the_slabs_are_aligned_to_64_bytes(layer):
    for name in ("key_codes", "value_codes"):
        assert getattr(layer, name).ctypes.data % 64 == 0
    if FORMATS[layer.dtype].has_scales:
        assert layer.key_scales.ctypes.data % 64 == 0


# -- sizes ---------------------------------------------------------------------------------------


def test_a_head_dim_of_64_is_compressed_3_76_times():
    layer = QuantizedKvLayer(100, 8, 64)
    assert round(layer.compression_ratio, 2) == 3.76
    assert layer.fp32_memory_bytes == 2 * 100 * 8 * 64 * 4


@pytest.mark.parametrize("capacity", [1, 7, 1000])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 128])
def test_sizes_in_bytes_follow_from_the_shape(capacity, head_dim):
    rows = 2 * capacity * H
    for group_size in (None, min(24, head_dim), min(32, head_dim)):
        groups = len(reference.group_slices(head_dim, group_size))
        for scale_dtype, scale_bytes in (("float32", 4), ("float16", 2)):
            layer = QuantizedKvLayer(
                capacity, H, head_dim, group_size=group_size, scale_dtype=scale_dtype
            )
            assert layer.num_groups == groups
            assert layer.memory_bytes == rows * (head_dim + groups * scale_bytes)
            assert layer.fp32_memory_bytes == rows * head_dim * 4
            ratio = layer.fp32_memory_bytes / layer.memory_bytes
            assert layer.compression_ratio == pytest.approx(ratio)
    layer = Float32KvLayer(capacity, H, head_dim)
    assert layer.memory_bytes == layer.fp32_memory_bytes == rows * head_dim * 4
    assert layer.compression_ratio == 1


def test_sizes_do_not_overflow():
    layer = QuantizedKvLayer(2**20, 256, 8)
    assert layer.fp32_memory_bytes == 2 * 2**20 * 256 * 8 * 4 == 2**34


def test_facts_about_a_layer(layer):
    assert layer.capacity == 8 and layer.remaining == 3 and len(layer) == 5
    assert layer.num_kv_heads == H and layer.head_dim == D and layer.entry_size == H * D
    assert not layer.is_empty and not layer.is_full
    assert layer.dtype in FORMATS
    layer.clear()
    assert layer.is_empty and layer.remaining == 8 and len(layer) == 0


FACTS = [
    "capacity",
    "compression_ratio",
    "dtype",
    "entry_size",
    "fp32_memory_bytes",
    "group_size",
    "head_dim",
    "is_empty",
    "is_full",
    "key_offset",
    "memory_bytes",
    "num_groups",
    "num_kv_heads",
    "remaining",
    "resident_bytes",
    "scale_dtype",
]


def test_facts_are_read_only(layer):
    for name in FACTS:
        value = getattr(layer, name)
        with pytest.raises(AttributeError):
            setattr(layer, name, value)


def test_the_offset_shown_cannot_change_the_one_used(rng):
    layer = filled(QuantizedKvLayer, rng, 3, H, D, key_offset="auto")
    before = layer.keys()
    shown = layer.key_offset
    if shown.flags.writeable:
        shown[:] = 5
    np.testing.assert_array_equal(layer.keys(), before)


def test_repr_names_the_class_and_its_size(layer):
    text = repr(layer)
    assert type(layer).__name__ in text
    for number in (5, 8, H, D):
        assert str(number) in text


def test_memory_is_committed_only_as_tokens_come(layer_class, rng):
    layer = layer_class(200_000, 4, 64)  # 100 MB of int8
    assert layer.resident_bytes <= 0.02 * layer.memory_bytes
    layer.extend(*normal(rng, 2, 2000, 4, 64))
    used = layer.memory_bytes // 100
    assert used <= layer.resident_bytes <= 3 * used + 2**22


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="64-bit Linux")
@pytest.mark.skipif(
    os.environ.get("KVEDGE_NO_SUBPROCESS") == "1",
    reason="an emulator keeps a record of each page, which takes 4% of what is reserved",
)
def test_more_than_the_machine_has_may_be_reserved(rng):
    layer = QuantizedKvLayer(2**28, 8, 64)  # 272 GiB
    kv = normal(rng, 8, 64)
    layer.push(kv, kv)
    np.testing.assert_allclose(layer.attend(kv), layer.values()[0], rtol=1e-5, atol=1e-7)


def test_the_memory_of_a_layer_goes_back(layer_class, rng):
    for _ in range(300):  # 60 GB if nothing went back
        layer = layer_class(100_000, 8, 128)
        layer.push(*normal(rng, 2, 8, 128))
