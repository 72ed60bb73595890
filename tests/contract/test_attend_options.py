"""Every option of attend, alone, against the float64 reference."""

import numpy as np
import pytest
import reference
from support import (
    assert_attention_close,
    assert_lse_close,
    content,
    filled,
    normal,
    refuses,
    stored,
)

from kvedge import QuantizedKvLayer, errors

H, D, HEADS = 2, 40, 6  # 3 query heads per KV head


@pytest.fixture(params=[(17, None), (300, None), (300, 1), (300, 5), (17, 17)], ids=str)
def case(request, layer_class, rng):
    """A layer and a query for it: (layer, query), one row (N, D) or several (n, N, D)."""
    length, rows = request.param
    options = {"key_offset": "auto"} if layer_class is QuantizedKvLayer else {}
    layer = filled(layer_class, rng, length, H, D, **options)
    shape = (HEADS, D) if rows is None else (rows, HEADS, D)
    return layer, 2 * normal(rng, *shape)


def check(layer, query, **options):
    ref, ref_lse = reference.attention(query, *stored(layer), **options)
    out, lse = layer.attend(query, return_lse=True, **options)
    assert_attention_close(out, ref, hint=str(options))
    assert_lse_close(lse, ref_lse)
    return out


def num_rows(query):
    return query.shape[0] if query.ndim == 3 else 1


@pytest.mark.parametrize("scale", [1, 1.0, 0.01, -0.2, 0.0, 1e-30, np.float32(0.5)])
def test_scale_multiplies_the_logits(case, scale):
    layer, query = case
    check(layer, query / 2, scale=scale)


def test_without_causal_every_row_sees_every_token(case):
    layer, query = case
    out = check(layer, query, causal=False)
    if num_rows(query) == 1:
        np.testing.assert_allclose(out, layer.attend(query), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 300, 1000, 2**40])
def test_a_window_sees_the_last_tokens(case, window):
    layer, query = case
    out = check(layer, query, window=window)
    if window >= len(layer):
        np.testing.assert_allclose(out, layer.attend(query), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink_tokens", [0, 1, 4, 16, 17, 1000])
@pytest.mark.parametrize("window", [1, 8, 50])
def test_the_first_tokens_stay_visible_beside_the_window(case, window, sink_tokens):
    check(*case, window=window, sink_tokens=sink_tokens)


@pytest.mark.parametrize("level", [-20.0, 0.0, 3.0, 50.0])
def test_learned_sinks_take_their_share_of_the_softmax(case, level, rng):
    layer, query = case
    sinks = normal(rng, HEADS) + np.float32(level)
    check(layer, query, sink_logits=sinks)
    check(layer, query, sink_logits=sinks, window=10)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50, 1e6])
def test_softcap_bounds_the_logits(case, softcap):
    check(*case, softcap=softcap)


def test_alibi_slopes_favour_what_is_near(case, rng):
    layer, query = case
    slopes = np.exp2(-np.arange(1, HEADS + 1)).astype(np.float32)
    check(layer, query, alibi_slopes=slopes)
    check(layer, query, alibi_slopes=-slopes / 10)
    check(layer, query, alibi_slopes=0 * slopes)


# -- masks ---------------------------------------------------------------------------------------


def masks_of(layer, query, draw):
    """A mask in every shape that broadcasts to (N, n, len)."""
    n, length = num_rows(query), len(layer)
    shapes = [(length,), (1, length), (n, length), (1, n, length), (HEADS, n, length)]
    shapes += [(HEADS, 1, length), (1, 1, 1), (HEADS, n, 1)]
    if query.ndim == 2:
        shapes.append((HEADS, length))
    for shape in shapes:
        yield draw(shape)


@pytest.mark.parametrize("causal", [True, False])
def test_a_boolean_mask_says_what_is_visible(case, causal, rng):
    layer, query = case

    def draw(shape):
        mask = rng.random(shape) < 0.5
        mask[..., 0] = True
        return mask

    for mask in masks_of(layer, query, draw):
        check(layer, query, mask=mask, causal=causal)


def test_an_additive_mask_is_added_to_the_logits(case, rng):
    layer, query = case

    def draw(shape):
        bias = normal(rng, *shape)
        if shape[-1] > 1:
            bias[..., 1:][rng.random(bias[..., 1:].shape) < 0.3] = -np.inf
        return bias

    for mask in masks_of(layer, query, draw):
        check(layer, query, mask=mask)


def test_masks_need_not_be_contiguous(case, rng):
    layer, query = case
    shape = (HEADS, num_rows(query), len(layer))
    bias = normal(rng, *shape)
    visible = rng.random(shape) < 0.5
    visible[..., 0] = True
    for mask in (bias, visible):
        expected = check(layer, query, mask=mask)
        turned = np.asfortranarray(mask)
        np.testing.assert_array_equal(layer.attend(query, mask=turned), expected)
        broad = np.broadcast_to(mask[:1], shape)
        check(layer, query, mask=broad)


def test_a_row_that_sees_nothing_gives_zeros(case, rng):
    layer, query = case
    nothing = np.zeros(len(layer), bool)
    for mask in (nothing, np.where(nothing, np.float32(0), np.float32(-np.inf))):
        out, lse = layer.attend(query, mask=mask, return_lse=True)
        assert (out == 0).all() and np.isneginf(lse).all()
    some = rng.random((HEADS, num_rows(query), len(layer))) < 0.5
    some[..., 0] = True
    some[2] = False  # a whole head sees nothing
    some[4, -1] = False
    out = check(layer, query, mask=some)
    rows = out.reshape(-1, HEADS, D)
    assert (rows[:, 2] == 0).all() and (rows[-1, 4] == 0).all() and (rows[:, 0] != 0).any()


def test_a_row_that_sees_only_a_learned_sink_gives_zeros(layer_class, rng):
    layer = filled(layer_class, rng, 20, H, D)
    sinks = normal(rng, HEADS)
    out = layer.attend(normal(rng, HEADS, D), mask=np.zeros(20, bool), sink_logits=sinks)
    assert (out == 0).all()


# -- what comes back -----------------------------------------------------------------------------


def test_out_is_written_and_returned(case):
    layer, query = case
    expected = layer.attend(query)
    assert expected.shape == query.shape and expected.dtype == np.float32
    assert expected.flags.c_contiguous and expected.flags.writeable
    out = np.full(query.shape, np.nan, np.float32)
    assert layer.attend(query, out=out) is out
    np.testing.assert_array_equal(out, expected)
    again, lse = layer.attend(query, out=out, return_lse=True)
    assert again is out and lse.shape == query.shape[:-1]


def test_a_query_of_no_rows_has_an_empty_result(case):
    layer, query = case
    none = np.empty((0, *query.shape[-2:]), np.float32)
    out, lse = layer.attend(none, return_lse=True)
    assert out.shape == none.shape and lse.shape == none.shape[:2]
    assert layer.attend(none, out=none, window=3, num_threads=2) is none
    with refuses(errors.InvalidArgumentError, layer):
        layer.attend(none, window=0)


def test_attending_changes_nothing(case):
    layer, query = case
    before, asked = content(layer), query.copy()
    layer.attend(query, window=5, sink_tokens=1, softcap=3.0)
    assert content(layer) == before
    np.testing.assert_array_equal(query, asked)


def test_a_single_row_in_three_dimensions_is_the_same_row(case):
    layer, query = case
    row = query if query.ndim == 2 else query[-1]
    row = np.ascontiguousarray(row)
    np.testing.assert_allclose(layer.attend(row[None])[0], layer.attend(row), rtol=0, atol=1e-5)
