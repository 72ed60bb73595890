"""Tensors of torch on the CPU: read and written where they lie, in each type and with any strides.

Importing this skips it where torch is not installed.
"""

import numpy as np
import pytest
import reference
from support import assert_attention_close, content, filled, normal, stored

import kvedge
from kvedge import errors
from kvedge.core.registry import layer_types

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.extras

H, HEADS, D, N, BATCH = 2, 4, 24, 5, 3

#: Views of a tensor (batch, n, heads, D) that hold the same numbers.
VIEWS = {
    "dense": lambda t: t.contiguous(),
    "heads outside": lambda t: t.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
    "tokens outside": lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "batch inside": lambda t: t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "part of a projection": lambda t: torch.cat([t, t, t], dim=-1)[..., D : 2 * D],
    "every second": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
}


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def tensor_type(request):
    return getattr(torch, request.param)


@pytest.fixture(params=VIEWS)
def view(request):
    return VIEWS[request.param]


def tensor(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(normal(rng, *shape)).to(dtype)


def layers_of(dtype, rng, length=30):
    kind = layer_types[dtype]
    return [filled(kind, rng, length + i, H, D, capacity=60) for i in range(BATCH)]


# -- what is read --------------------------------------------------------------------------------


def test_tokens(dtype, tensor_type, view, rng):
    kind = layer_types[dtype]
    expected, layers, turned = ([kind(40, H, D) for _ in range(BATCH)] for _ in range(3))
    keys, values = (tensor(rng, BATCH, N, H, D, dtype=tensor_type) for _ in range(2))
    wide = keys.float().numpy(), values.float().numpy()
    for _ in range(2):
        kvedge.append_batch(expected, *wide)
        kvedge.append_batch(layers, view(keys), view(values))
        kvedge.append_batch(
            turned, *(view(t).permute(0, 2, 1, 3) for t in (keys, values)), layout="hnd"
        )
    kvedge.append_batch(expected, wide[0][:, 1], wide[1][:, 1])
    kvedge.append_batch(layers, view(keys)[:, 1], view(values)[:, 1])
    kvedge.append_batch(turned, view(keys)[:, 1], view(values)[:, 1], layout="hnd")
    for one, key, value, wide_key, wide_value in zip(
        range(BATCH), view(keys), view(values), *wide, strict=True
    ):
        expected[one].extend(wide_key, wide_value)
        expected[one].push(wide_key[0], wide_value[0])
        layers[one].extend(key, value)
        layers[one].push(key[0], value[0])
        turned[one].extend(key.transpose(0, 1), value.transpose(0, 1), layout="hnd")
        turned[one].push(key[0], value[0])
    wanted = [content(layer) for layer in expected]
    assert [content(layer) for layer in layers] == wanted
    assert [content(layer) for layer in turned] == wanted


def test_queries(dtype, tensor_type, view, rng):
    layers = layers_of(dtype, rng)
    query = tensor(rng, BATCH, N, HEADS, D, dtype=tensor_type)
    wide = query.float().numpy()
    out, lse = kvedge.attend_batch(layers, view(query), return_lse=True, start=[0, 2, 29])
    assert type(out) is np.ndarray
    expected = kvedge.attend_batch(layers, wide, return_lse=True, start=[0, 2, 29])
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    for row, layer, one, start in zip(out, layers, wide, [0, 2, 29], strict=True):
        assert_attention_close(row, reference.attention(one, *stored(layer), start=start)[0])
        np.testing.assert_array_equal(
            layer.attend(torch.from_numpy(one).to(tensor_type), start=start), row
        )


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_results(dtype, tensor_type, view, layout, rng):
    """In the type and strides of `out`; what lies between is not touched."""
    layers = layers_of(dtype, rng)
    query = tensor(rng, BATCH, N, HEADS, D, dtype=tensor_type)
    expected = torch.from_numpy(kvedge.attend_batch(layers, query)).to(tensor_type)
    out = view(torch.full((BATCH, N, HEADS, D), 9, dtype=tensor_type))
    around = torch.as_strided(out, (out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
    if layout == "hnd":
        query, expected, out = (t.transpose(1, 2) for t in (query, expected, out))
    made, lse = kvedge.attend_batch(layers, query, layout=layout, out=out, return_lse=True)
    assert made is out and lse.shape == out.shape[:-1]
    assert torch.equal(out, expected)
    out[...] = 9
    assert (around == 9).all()
    for i, layer in enumerate(layers):
        assert layer.attend(query[i], layout=layout, out=out[i]).data_ptr() == out[i].data_ptr()
    assert torch.equal(out, expected)


def test_masks(layer_class, rng):
    layer = filled(layer_class, rng, 30, H, D)
    query = tensor(rng, 1, N, HEADS, D)
    seen = torch.from_numpy(rng.random((1, 1, N, 30)) < 0.7)
    ref, _ = reference.attention(query[0].numpy(), *stored(layer), mask=seen[0].numpy())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        assert_attention_close(kvedge.attend_batch([layer], query, mask=bias)[0], ref)
    assert_attention_close(kvedge.attend_batch([layer], query, mask=seen)[0], ref)
    turned = seen.expand(1, HEADS, N, 30).transpose(1, 3).contiguous().transpose(1, 3)
    assert_attention_close(kvedge.attend_batch([layer], query, mask=turned)[0], ref)


# -- gradients -----------------------------------------------------------------------------------


def test_tensors_that_require_gradients(dtype, tensor_type, rng):
    layers = layers_of(dtype, rng)
    rows = tensor(rng, BATCH, 1, H, D, dtype=tensor_type)
    query = tensor(rng, BATCH, 1, HEADS, D, dtype=tensor_type)
    out = torch.zeros_like(query)
    wanting = [t.clone().requires_grad_() for t in (rows, query, out)]
    before = [content(layer) for layer in layers]
    for call in (
        lambda: kvedge.append_batch(layers, wanting[0], rows),
        lambda: kvedge.append_batch(layers, rows, wanting[0]),
        lambda: layers[0].extend(wanting[0][0], rows[0]),
        lambda: kvedge.attend_batch(layers, wanting[1]),
        lambda: kvedge.attend_batch(layers, query, out=wanting[2]),
        lambda: layers[0].attend(wanting[1][0]),
        lambda: layers[0].attend(query[0], out=wanting[2][0]),
    ):
        with pytest.raises(errors.InvalidArgumentError, match="gradient"):
            call()
    assert [content(layer) for layer in layers] == before
    assert (wanting[2] == 0).all()
    expected = torch.from_numpy(kvedge.attend_batch(layers, query)).to(tensor_type)
    twins = [layer.copy() for layer in layers]
    kvedge.append_batch(twins, rows, rows)
    with torch.no_grad():
        made = kvedge.attend_batch(layers, wanting[1], out=wanting[2])
        assert made is wanting[2] and torch.equal(made, expected)
        kvedge.append_batch(layers, wanting[0], wanting[0])
    assert [content(layer) for layer in layers] == [content(layer) for layer in twins]


def test_tensors_of_inference_mode(layer_class, tensor_type, rng):
    layer = filled(layer_class, rng, 30, H, D, capacity=40)
    with torch.inference_mode():
        query = tensor(rng, N, HEADS, D, dtype=tensor_type)
        out = layer.attend(query, out=torch.empty_like(query))
        layer.extend(query[:, :H], query[:, H:])
    layer.truncate(30)
    assert torch.equal(out, torch.from_numpy(layer.attend(query.float().numpy())).to(tensor_type))


# -- what is refused -----------------------------------------------------------------------------


def fake(t):
    """A tensor of the CPU that has no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(t)


REFUSED = {
    "meta": (lambda t: t.to("meta"), errors.DtypeMismatchError),
    "fake": (fake, errors.DtypeMismatchError),
    "sparse": (lambda t: t.to_sparse(), errors.DtypeMismatchError),
    "float64": (lambda t: t.double(), errors.DtypeMismatchError),
    "int64": (lambda t: t.long(), errors.DtypeMismatchError),
    "complex": (lambda t: t.to(torch.complex64), errors.DtypeMismatchError),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), errors.DtypeMismatchError),
    "channels apart": (lambda t: t.mT.contiguous().mT, errors.LayoutError),
    "another shape": (lambda t: t[..., :-1], errors.ShapeMismatchError),
    "no axes": (lambda t: t.sum(), errors.ShapeMismatchError),
    "more axes": (lambda t: t[None, None], errors.ShapeMismatchError),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # torch, of a fake tensor
@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_read_is_refused(how, tensor_type, rng):
    make, error = REFUSED[how]
    layers = layers_of("int8", rng)
    rows = tensor(rng, BATCH, N, H, D, dtype=tensor_type)
    query = tensor(rng, BATCH, N, HEADS, D, dtype=tensor_type)
    good_out, before = torch.full_like(query, 9), [content(layer) for layer in layers]
    for call in (
        lambda: kvedge.attend_batch(layers, make(query), out=good_out),
        lambda: kvedge.attend_batch(layers, query, out=make(good_out)),
        lambda: layers[0].attend(make(query[0]), out=good_out[0]),
        lambda: layers[0].attend(query[0], out=make(good_out[0])),
        lambda: kvedge.append_batch(layers, make(rows), rows),
        lambda: kvedge.append_batch(layers, rows, make(rows)),
        lambda: layers[0].extend(make(rows[0]), rows[0]),
        lambda: layers[0].push(rows[0, 0], make(rows[0, 0])),
    ):
        with pytest.raises(error):
            call()
    assert (good_out == 9).all()
    assert [content(layer) for layer in layers] == before


def test_tensors_inside_vmap_are_refused(layer_class, tensor_type, rng):
    """They stand for a batch and have no memory of their own."""
    layer = filled(layer_class, rng, 30, H, D, capacity=40)
    query = tensor(rng, 2, N, HEADS, D, dtype=tensor_type)
    before = content(layer)
    for call in (
        lambda one: layer.attend(one),
        lambda one: layer.attend(query[0], out=one),
        lambda one: kvedge.attend_batch([layer], one[None]),
        lambda one: layer.extend(one[:, :H], one[:, H:]),
    ):
        with pytest.raises(errors.DtypeMismatchError):
            torch.func.vmap(call)(query)
    assert content(layer) == before


def test_negated_views(layer_class, rng):
    """torch notes the sign of the imaginary part of a conjugate and does not write it."""
    layer = filled(layer_class, rng, 30, H, D)
    plain = tensor(rng, N, HEADS, D)
    with pytest.raises(errors.LayoutError, match="negated"):
        layer.attend(plain, out=torch._neg_view(torch.empty_like(plain)))
    np.testing.assert_array_equal(layer.attend(torch._neg_view(plain)), layer.attend(-plain))
