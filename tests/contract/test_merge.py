"""merge_attention: a context may lie in parts, and their results merge into that of the whole."""

import warnings

import numpy as np
import pytest
import reference
from support import assert_lse_close, filled, normal, refuses, stored

from kvedge import errors, merge_attention

H, D, HEADS = 2, 40, 6
EXACT = {"precision_bits": 24}  # by default queries are rounded tile by tile, and parts tile anew
FLT_MAX = np.finfo(np.float32).max


def parts_of(layer_class, rng, lengths, **options):
    """Layers of those lengths, and one with all their tokens."""
    keys, values = normal(rng, 2, sum(lengths), H, D)
    ends = np.cumsum(lengths)
    layers = [
        filled_with(layer_class, keys[end - n : end], values[end - n : end], **options)
        for n, end in zip(lengths, ends, strict=True)
    ]
    return layers, filled_with(layer_class, keys, values, **options)


def filled_with(layer_class, keys, values, **options):
    layer = layer_class(max(len(keys), 1), H, D, **options)
    layer.extend(keys, values)
    return layer


def attend_parts(layers, query, **options):
    """outs and lses: the last part causally, those before it in full."""
    *early, last = layers
    options = {"return_lse": True, **EXACT, **options}
    pieces = [part.attend(query, causal=False, **options) for part in early]
    pieces.append(last.attend(query, **options))
    outs, lses = zip(*pieces, strict=True)
    return list(outs), list(lses)


def assert_same(merged, whole, tolerance=1e-5):
    assert merged.dtype == np.float32 and merged.shape == whole.shape
    assert np.abs(merged - whole).max() <= tolerance * np.abs(whole).max()


def random_parts(rng, parts, *shape):
    """outs (parts, *shape, HEADS, D) and lses (parts, *shape, HEADS), some of them empty."""
    lses = 3 * normal(rng, parts, *shape, HEADS)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    return normal(rng, parts, *shape, HEADS, D), lses


# -- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(100,), (1, 99), (64, 64), (300, 7, 20), (17,) * 7], ids=str)
def test_parts_of_a_context_merge_into_the_whole(lengths, layer_class, rng):
    layers, whole = parts_of(layer_class, rng, lengths)
    for rows in (1, min(lengths[-1], 9)):
        query = normal(rng, rows, HEADS, D)
        merged, lse = merge_attention(*attend_parts(layers, query), return_lse=True)
        expected, expected_lse = whole.attend(query, return_lse=True, **EXACT)
        assert_same(merged, expected)
        assert_lse_close(lse, expected_lse, 1e-5)
        plain = merge_attention(*attend_parts(layers, query, precision_bits=None))
        assert_same(plain, expected, reference.TOLERANCE)


def test_the_merge_is_that_of_the_reference_in_float64(rng):
    for parts in (1, 2, 7):
        outs, lses = random_parts(rng, parts, 5)
        merged, lse = merge_attention(outs, lses, return_lse=True)
        ref = reference.merge(np.where(np.isneginf(lses)[..., None], 0, outs), lses)
        np.testing.assert_allclose(merged, ref, rtol=2e-7, atol=1e-7)
        ref_lse = np.logaddexp.reduce(lses.astype(np.float64), axis=0)
        np.testing.assert_allclose(lse, ref_lse, rtol=1e-7, atol=1e-7)


def test_merging_is_associative_and_takes_any_order(rng):
    outs, lses = random_parts(rng, 6, 3)
    whole, whole_lse = merge_attention(outs, lses, return_lse=True)
    pairs = [merge_attention(outs[i : i + 2], lses[i : i + 2], return_lse=True) for i in (0, 2, 4)]
    nested, nested_lse = merge_attention(*zip(*pairs, strict=True), return_lse=True)
    turned, turned_lse = merge_attention(outs[::-1], lses[::-1], return_lse=True)
    for out, lse in ((nested, nested_lse), (turned, turned_lse)):
        np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-6)


def test_a_learned_sink_belongs_to_one_part_whichever(layer_class, rng):
    layers, whole = parts_of(layer_class, rng, (50, 60, 70))
    query, sinks = normal(rng, HEADS, D), normal(rng, HEADS) + 4
    expected = whole.attend(query, sink_logits=sinks, **EXACT)
    for chosen in layers:
        pieces = [
            layer.attend(
                query, return_lse=True, sink_logits=sinks if layer is chosen else None, **EXACT
            )
            for layer in layers
        ]
        assert_same(merge_attention(*zip(*pieces, strict=True)), expected)


def test_the_other_options_hold_over_parts(layer_class, rng):
    lengths = (50, 60, 70)
    layers, whole = parts_of(layer_class, rng, lengths)
    query = normal(rng, 5, HEADS, D)
    for options in ({"scale": 0.3}, {"softcap": 2.0}):
        merged = merge_attention(*attend_parts(layers, query, **options))
        assert_same(merged, whole.attend(query, **EXACT, **options))
    bias = normal(rng, 5, 180)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    for mask in (bias, bias > 0):
        pieces = [
            layer.attend(query, mask=part, causal=layer is layers[-1], return_lse=True, **EXACT)
            for layer, part in zip(layers, np.split(mask, np.cumsum(lengths)[:-1], 1), strict=True)
        ]
        merged = merge_attention(*zip(*pieces, strict=True))
        assert_same(merged, whole.attend(query, mask=mask, **EXACT))


def test_alibi_over_parts_needs_the_distance_of_each_part(layer_class, rng):
    lengths = (50, 60, 70)
    layers, whole = parts_of(layer_class, rng, lengths)
    query, slopes = normal(rng, HEADS, D), np.exp2(-np.arange(1, HEADS + 1)).astype(np.float32)
    outs, lses = attend_parts(layers, query, alibi_slopes=slopes)
    behind = sum(lengths) - np.cumsum(lengths)  # tokens after the end of each part
    lses = [lse - slopes * np.float32(d) for lse, d in zip(lses, behind, strict=True)]
    assert_same(merge_attention(outs, lses), whole.attend(query, alibi_slopes=slopes, **EXACT))


# -- parts that saw nothing, and numbers at the ends of float32 -----------------------------------


def test_a_part_that_saw_nothing_is_ignored_whatever_its_out_holds(rng):
    outs, lses = random_parts(rng, 3, 4)
    lses[1] = -np.inf
    outs[1] = np.nan
    merged = merge_attention(outs, lses)
    np.testing.assert_array_equal(merged, merge_attention(outs[::2], lses[::2]))


def test_empty_and_seeing_rows_mix(layer_class, rng):
    layer = filled(layer_class, rng, 30, H, D)
    query = normal(rng, 4, HEADS, D)
    seen = rng.random((HEADS, 4, 30)) < 0.1
    seen[:, 2] = False
    half = np.arange(30) < 15
    pieces = [layer.attend(query, mask=seen & part, return_lse=True) for part in (half, ~half)]
    merged, lse = merge_attention(*zip(*pieces, strict=True), return_lse=True)
    ref, ref_lse = reference.attention(query, *stored(layer), mask=seen)
    np.testing.assert_allclose(merged, ref, rtol=0, atol=2e-4 * np.abs(ref).max())
    assert_lse_close(lse, ref_lse)
    assert (merged[2] == 0).all() and np.isneginf(lse[2]).all()


def test_where_nobody_saw_anything_the_result_is_zero():
    outs, lses = (
        np.full((3, HEADS, D), np.nan, np.float32),
        np.full((3, HEADS), -np.inf, np.float32),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged, lse = merge_attention(outs, lses, return_lse=True)
    assert (merged == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("far", [100.0, 1e5, 1e30, FLT_MAX])
def test_huge_differences_leave_the_larger_part(far, rng):
    outs = normal(rng, 2, HEADS, D)
    for low, high in ((0.0, far), (-far, 0.0), (-far, far)):
        lses = np.stack([np.full(HEADS, low), np.full(HEADS, high)]).astype(np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            merged, lse = merge_attention(outs, lses, return_lse=True)
        np.testing.assert_allclose(merged, outs[1], rtol=1e-6)
        np.testing.assert_array_equal(lse, lses[1])


def test_the_largest_and_the_smallest_values_stay_in_range():
    lses = np.zeros((3, HEADS), np.float32)
    for sign in (1, -1):
        outs = np.full((3, HEADS, D), sign * FLT_MAX, np.float32)
        np.testing.assert_array_equal(merge_attention(outs, lses), outs[0])
    denormal = np.full((3, HEADS, D), 1e-39, np.float32)
    assert (merge_attention(denormal, lses) == 0).all()  # as attend itself gives


def test_equally_large_logits_share_evenly(rng):
    for level in (FLT_MAX, -FLT_MAX, 1e4):
        outs = normal(rng, 4, HEADS, D)
        merged = merge_attention(outs, np.full((4, HEADS), level, np.float32))
        np.testing.assert_allclose(merged, outs.astype(np.float64).mean(0), rtol=0, atol=1e-6)


# -- what goes in, what comes back -----------------------------------------------------------------


def test_parts_may_come_stacked_or_one_by_one_and_need_not_be_contiguous(rng):
    outs, lses = random_parts(rng, 3, 4)
    expected = merge_attention(outs, lses)
    for given in (list(outs), tuple(outs), iter(outs), np.asfortranarray(outs)):
        np.testing.assert_array_equal(merge_attention(given, lses), expected)
    for given in (list(lses), tuple(lses), iter(lses), np.asfortranarray(lses)):
        np.testing.assert_array_equal(merge_attention(outs, given), expected)


def test_half_precision_is_widened(rng):
    outs, lses = random_parts(rng, 3)
    outs, lses = outs.astype(np.float16), lses.astype(np.float16)
    expected = merge_attention(outs.astype(np.float32), lses.astype(np.float32))
    np.testing.assert_array_equal(merge_attention(list(outs), list(lses)), expected)


def test_out_is_written_and_returned_even_over_a_part(rng):
    outs, lses = random_parts(rng, 3, 4)
    outs = list(outs)
    expected = merge_attention(outs, lses)
    out = np.full((4, HEADS, D), np.nan, np.float32)
    assert merge_attention(outs, lses, out=out) is out
    np.testing.assert_array_equal(out, expected)
    again, _ = merge_attention(outs, lses, out=outs[0], return_lse=True)
    assert again is outs[0]
    np.testing.assert_array_equal(again, expected)


def test_inputs_stay_as_they_are(rng):
    outs, lses = random_parts(rng, 3, 4)
    before = outs.copy(), lses.copy()
    merge_attention(outs, lses)
    np.testing.assert_array_equal(outs, before[0])
    np.testing.assert_array_equal(lses, before[1])


def test_what_does_not_fit_is_refused(rng):
    outs, lses = normal(rng, 3, 4, HEADS, D), normal(rng, 3, 4, HEADS)
    with refuses(errors.InvalidArgumentError, match="nothing to merge"):
        merge_attention([], [])
    with refuses(errors.InvalidArgumentError, match="outs must be a sequence"):
        merge_attention(None, lses)
    with refuses(errors.ShapeMismatchError, match=["3 outs", "2 lses"]):
        merge_attention(outs, lses[:2])
    with refuses(errors.ShapeMismatchError, match=["outs[1]", "(3, 6, 40)"]):
        merge_attention([outs[0], outs[1, :3]], lses[:2])
    with refuses(errors.ShapeMismatchError, match=["lses[1]", "(4, 6)", "(3, 6)"]):
        merge_attention(outs[:2], [lses[0], lses[1, :3]])
    with refuses(errors.ShapeMismatchError, match="(..., num_heads, head_dim)"):
        merge_attention(outs[0, 0], lses[0, 0])  # one part, where several are needed
    with refuses(errors.ShapeMismatchError):
        merge_attention(outs, lses[0])
    with refuses(errors.DtypeMismatchError, match=["outs[1]", "float64"]):
        merge_attention([outs[0], outs[1].astype(np.float64)], lses[:2])
    with refuses(errors.DtypeMismatchError, match="lses"):
        merge_attention(outs, lses.astype(int))
    with refuses(errors.DtypeMismatchError, match="outs[0]"):
        merge_attention([None], lses[:1])
    with refuses(errors.ShapeMismatchError, match="out must have shape"):
        merge_attention(outs, lses, out=np.empty((4, HEADS, D + 1), np.float32))
    with refuses(errors.DtypeMismatchError, match="out must be"):
        merge_attention(outs, lses, out=np.empty((4, HEADS, D)))
    with refuses(errors.InvalidArgumentError, match="return_lse"):
        merge_attention(outs, lses, return_lse="yes")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_mean_nothing_are_refused(bad, rng):
    outs, lses = normal(rng, 3, HEADS, D), normal(rng, 3, HEADS)
    lses[1, 2] = bad
    with refuses(errors.NonFiniteInputError, match="lses[1]"):
        merge_attention(outs, lses)
    lses[1, 2] = 0
    outs[2, 3, 4] = bad
    before = np.zeros((HEADS, D), np.float32)
    with refuses(errors.NonFiniteInputError, match="outs[2]"):
        merge_attention(outs, lses, out=before)
    assert (before == 0).all()
