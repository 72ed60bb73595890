"""Attention where arithmetic is hard: magnitudes at the ends of float32, and adversarial contexts.

For any finite input what comes out is finite and not denormal. Where the answer is well
conditioned it also keeps the numerics contract.
"""

import itertools

import numpy as np
import pytest
import reference
from support import ROWS, assert_attention_close, assert_well_formed, normal, stored

import kvedge
from kvedge import QuantizedKvLayer

H, D, HEADS = 2, 40, 6
FLT_MAX = np.finfo(np.float32).max


@pytest.fixture(params=["int8", "float32"])
def layer_class(request):
    """Each kind of layer that holds float32's largest number."""
    return kvedge.KVCache._layer_types[request.param]


def layer_of(layer_class, keys, values, **options):
    layer = layer_class(*keys.shape, **options)
    layer.extend(keys, values)
    return layer


def check(layer, query, hint="", **options):
    ref, _ = reference.attention(query, *stored(layer), **options)
    out = layer.attend(query, **options)
    assert_attention_close(out, ref, hint=hint)
    assert_well_formed(out)


# -- any magnitude -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROWS)
def test_no_nan_infinity_or_denormal_for_any_finite_rows(kind, layer_class, rng):
    """Every kind of row as keys, values and query, in all combinations with ordinary ones."""
    for which in itertools.product([True, False], repeat=3):
        shape = (50, H, D)
        keys = ROWS[kind](rng, shape) if which[0] else normal(rng, *shape)
        values = ROWS[kind](rng, shape) if which[1] else normal(rng, *shape)
        layer = layer_of(layer_class, keys, values)
        for shape in ((HEADS, D), (9, HEADS, D)):
            query = ROWS[kind](rng, shape) if which[2] else normal(rng, *shape)
            out, lse = layer.attend(query, return_lse=True)
            assert_well_formed(out)
            assert_well_formed(lse)
        assert np.isfinite(layer.scores(np.ascontiguousarray(query[0]))).all()


@pytest.mark.parametrize("other", ROWS)
def test_no_nan_infinity_or_denormal_when_rows_of_all_kinds_meet(other, layer_class, rng):
    rows = np.concatenate([kind(rng, (7, H, D)) for kind in ROWS.values()])
    layer = layer_of(layer_class, rows[rng.permutation(len(rows))], rows)
    assert_well_formed(layer.attend(ROWS[other](rng, (HEADS, D))))
    assert_well_formed(layer.attend(ROWS[other](rng, (33, HEADS, D))))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 3e38},
        {"scale": 1e-45},
        {"scale": -3e38},
        {"scale": 1e300},
        {"softcap": 1e-38},
        {"softcap": 3e38},
        {"softcap": 1e-300},
        {"alibi_slopes": np.full(HEADS, 3e38, np.float32)},
        {"alibi_slopes": np.full(HEADS, -3e38, np.float32)},
        {"alibi_slopes": np.full(HEADS, 1e-45, np.float32)},
        {"mask": np.full(50, -3e38, np.float32)},
        {"mask": np.full(50, 3e38, np.float32)},
        {"mask": np.float32([-3e38, 3e38] * 25)},
        {"sink_logits": np.full(HEADS, 3e38, np.float32)},
        {"sink_logits": np.full(HEADS, -3e38, np.float32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["random", "huge", "tiny", "zero"])
def test_no_nan_infinity_or_denormal_for_any_finite_option(kind, options, layer_class, rng):
    rows = ROWS[kind](rng, (50, H, D))
    layer = layer_of(layer_class, rows, rows)
    for shape in ((HEADS, D), (9, HEADS, D)):
        for query in (normal(rng, *shape), ROWS[kind](rng, shape)):
            try:
                out, lse = layer.attend(query, return_lse=True, **options)
            except ValueError:
                assert abs(options.get("scale", 0)) == 1e300 or "softcap" in options
                continue  # no float32 can hold it: a clear refusal is an answer too
            assert_well_formed(out)
            assert not np.isnan(lse).any()


def test_the_largest_values_average_to_the_largest_value(layer_class):
    keys = np.zeros((1000, H, D), np.float32)
    values = np.full((1000, H, D), FLT_MAX, np.float32)
    values[:, 1] *= -1
    layer = layer_of(layer_class, keys, values)
    out = layer.attend(np.ones((HEADS, D), np.float32))
    np.testing.assert_allclose(out[:3], FLT_MAX, rtol=2e-4)
    np.testing.assert_allclose(out[3:], -FLT_MAX, rtol=2e-4)


def test_zero_queries_and_zero_keys_average_the_values(layer_class, rng):
    keys, values = normal(rng, 2, 100, H, D)
    layer = layer_of(layer_class, keys, values)
    mean = stored(layer)[1].mean(axis=0)
    out = layer.attend(np.zeros((HEADS, D), np.float32))
    assert_attention_close(out, np.repeat(mean, 3, axis=0))
    layer = layer_of(layer_class, 0 * keys, values)
    assert_attention_close(layer.attend(normal(rng, HEADS, D)), np.repeat(mean, 3, axis=0))


@pytest.mark.parametrize("size", [1e-33, 1e-30, 1e-10, 1e10, 1e30, 1e37])
def test_values_of_any_magnitude_keep_the_contract(size, layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    layer = layer_of(layer_class, keys, values * np.float32(size))
    check(layer, normal(rng, HEADS, D))


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-10, 1e10, 1e30, 1e37])
def test_keys_and_queries_of_inverse_magnitudes_keep_the_contract(size, layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    query = normal(rng, HEADS, D)
    layer = layer_of(layer_class, keys * np.float32(size), values)
    check(layer, (query / np.float64(size)).astype(np.float32))


def test_a_scale_that_undoes_huge_queries_keeps_the_contract(layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, HEADS, D)
    for size in (1e-30, 1e30):
        check(layer, query * np.float32(size), scale=0.15 / size)


def test_values_of_all_magnitudes_keep_the_contract(layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    values *= (10.0 ** rng.uniform(-30, 3, (300, H, 1))).astype(np.float32)
    check(layer_of(layer_class, keys, values), normal(rng, HEADS, D))


def test_keys_of_all_magnitudes_keep_the_contract(layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    keys *= (10.0 ** rng.uniform(-38, 0, (300, H, 1))).astype(np.float32)
    check(layer_of(layer_class, keys, values), normal(rng, HEADS, D))


# -- adversarial contexts ------------------------------------------------------------------------


def aimed(rng, logits, head_dim=64):
    """Keys (len, 1, D) and a query (1, D) whose logits are nearly the given ones, and values."""
    query = normal(rng, 1, head_dim)
    unit = query[0] / np.linalg.norm(query[0])
    noise = 0.5 * normal(rng, len(logits), head_dim)
    noise -= (noise @ unit)[:, None] * unit  # no part in the logits
    size = np.asarray(logits) * np.sqrt(head_dim) / np.linalg.norm(query[0])
    keys = noise + size[:, None] * unit
    return keys[:, None].astype(np.float32), query, normal(rng, len(logits), 1, head_dim)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 255, 256, 500, 998, 999])
@pytest.mark.parametrize("logit", [8, 20, 80])
def test_one_dominating_token_keeps_the_contract(position, logit, layer_class, rng):
    logits = np.zeros(1000)
    logits[position] = logit
    keys, query, values = aimed(rng, logits)
    check(layer_of(layer_class, keys, values), query)


@pytest.mark.parametrize("size", [1e-44, 1e-39, 1e-37, 1e-30])
def test_maxima_that_grow_by_less_than_the_headroom_suit_values_of_any_size(size, layer_class, rng):
    """A weight may then be 2^8 until its row is done, and small values make it larger still."""
    keys, query, values = aimed(rng, np.linspace(-4, 1, 2000))
    values = (size * values).astype(np.float32)
    layer = layer_of(layer_class, keys, values)
    for call in (query, np.repeat(query[None], 12, 0)):
        out = layer.attend(call)
        assert_well_formed(out)
        assert abs(out).max() <= abs(stored(layer)[1]).max() + 1e-38


@pytest.mark.parametrize("slope", [0.001, 0.01, 0.05, 0.3])
def test_maxima_that_grow_along_the_context_keep_the_contract(slope, layer_class, rng):
    for logits in (slope * np.arange(2000), slope * np.arange(2000)[::-1]):
        keys, query, values = aimed(rng, logits)
        check(layer_of(layer_class, keys, values), query, hint=f"slope {slope}")


@pytest.mark.parametrize("logit", [4, 6, 8, 10, 12, 16])
@pytest.mark.parametrize("length", [100, 4096])
def test_uniform_attention_after_an_early_outlier_keeps_the_contract(
    length, logit, layer_class, rng
):
    """Many tokens of one small probability each: their roundings all go the same way."""
    logits = np.zeros(length)
    logits[2] = logit
    keys, query, values = aimed(rng, logits)
    check(layer_of(layer_class, keys, values), query)
    keys = np.zeros((length, 1, 64), np.float32)
    keys[2, 0, 0] = 8.0 * logit
    values[:, 0, 0] += 3  # an average that does not cancel
    query = np.zeros((1, 64), np.float32)
    query[0, 0] = 1
    check(layer_of(layer_class, keys, values), query)


@pytest.mark.parametrize("logit", [3, 6, 9, 12])
@pytest.mark.parametrize("length", [16, 64, 256, 1000])
def test_an_attention_sink_with_a_small_value_keeps_the_contract(length, logit, layer_class, rng):
    """As real models have it: the first token takes most of the weight and carries nothing."""
    logits = normal(rng, length).astype(np.float64)
    logits[0] = logit
    keys, query, values = aimed(rng, logits)
    values[0] *= 0.01
    check(layer_of(layer_class, keys, values), query)


@pytest.mark.parametrize("constant", [5, 30, 200])
def test_large_constant_key_channels_keep_the_contract(constant, rng):
    keys, values = normal(rng, 2, 1000, H, 64)
    keys[..., [3, 40]] += np.float32(constant)
    query = normal(rng, HEADS, 64)
    for options in ({}, {"group_size": 32}, {"key_offset": "auto"}):
        layer = layer_of(QuantizedKvLayer, keys, values, **options)
        check(layer, query, hint=f"{constant} {options}")


@pytest.mark.parametrize("spread", [4, 8, 16, 32, 64])
def test_sharp_attention_errs_in_proportion_to_the_spread_of_its_logits(spread, layer_class, rng):
    """A query of 15 bits gives each logit an error in proportion to its size."""
    keys, values = normal(rng, 2, 1000, H, 64)
    query = np.float32(spread) * normal(rng, HEADS, 64)
    layer = layer_of(layer_class, keys, values)
    ref, _ = reference.attention(query, *stored(layer))
    assert_attention_close(layer.attend(query), ref, reference.TOLERANCE * max(1, spread / 12))


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_an_outlier_channel_of_the_query_keeps_the_contract(factor, layer_class, rng):
    keys, values = normal(rng, 2, 1000, H, 64)
    query = normal(rng, HEADS, 64)
    query[:, 5] = 3 * factor
    check(layer_of(layer_class, keys, values), query)


@pytest.mark.parametrize("size", [100, 10000])
def test_an_outlier_value_channel_keeps_the_contract(size, layer_class, rng):
    keys, values = normal(rng, 2, 1000, H, 64)
    values[..., 7] *= size
    check(layer_of(layer_class, keys, values), normal(rng, HEADS, 64))


def test_identical_tokens_give_their_value(layer_class, rng):
    token = normal(rng, 1, H, D)
    rows = np.repeat(token, 1000, axis=0)
    layer = layer_of(layer_class, rows, rows)
    out = layer.attend(normal(rng, HEADS, D))
    expected = np.repeat(stored(layer)[1][0], 3, axis=0)
    assert_attention_close(out, expected, 1e-5)


def test_a_single_token_gives_its_value(layer_class, rng):
    rows = normal(rng, 1, H, D)
    layer = layer_of(layer_class, rows, rows)
    out = layer.attend(100 * normal(rng, HEADS, D))
    assert_attention_close(out, np.repeat(stored(layer)[1][0], 3, axis=0), 1e-6)


def test_values_that_cancel_leave_no_more_than_rounding(layer_class, rng):
    rows = normal(rng, 500, H, D)
    values = np.concatenate([rows, -rows])
    keys = np.concatenate([rows, rows])
    out = layer_of(layer_class, keys, values).attend(normal(rng, HEADS, D))
    assert np.abs(out).max() < 1e-4


# -- what is hidden or gone ----------------------------------------------------------------------


def with_a_huge_token(layer_class, rng, at):
    """100 tokens, one of them as large as float32 goes; and the layer without it, as it should be.

    What no row sees must leave no trace, in bounds or scales that are kept for speed.
    """
    keys, values = normal(rng, 2, 100, H, D)
    keys[at], values[at] = 3e38, -3e38
    others = np.arange(100) != at
    return layer_of(layer_class, keys, values), layer_of(layer_class, keys[others], values[others])


def test_a_huge_token_that_is_masked_leaves_the_others_exact(layer_class, rng):
    layer, others = with_a_huge_token(layer_class, rng, 30)
    query = normal(rng, HEADS, D)
    ref, _ = reference.attention(query, *stored(others))
    assert_attention_close(layer.attend(query, mask=np.arange(100) != 30), ref)


def test_a_huge_token_outside_the_window_leaves_the_others_exact(layer_class, rng):
    layer, _ = with_a_huge_token(layer_class, rng, 30)
    check(layer, normal(rng, HEADS, D), window=60)


def test_a_huge_token_in_the_future_leaves_earlier_rows_exact(layer_class, rng):
    layer, _ = with_a_huge_token(layer_class, rng, 99)
    query = normal(rng, 20, HEADS, D)
    out = layer.attend(query)
    layer.truncate(99)
    ref, _ = reference.attention(query[:-1], *stored(layer))
    assert_attention_close(out[:-1], ref)


@pytest.mark.parametrize("how", ["truncate", "keep", "clear"])
def test_a_huge_token_that_is_gone_leaves_no_trace(how, layer_class, rng):
    layer, others = with_a_huge_token(layer_class, rng, 99)
    if how == "truncate":
        layer.truncate(99)
    elif how == "keep":
        layer.keep(np.arange(99))
    else:
        layer.clear()
        layer.extend(others.keys(), others.values())
    query = normal(rng, HEADS, D)
    check(layer, query)
    assert np.abs(layer.attend(query) - others.attend(query)).max() < 0.02


def test_a_huge_token_of_another_head_leaves_the_others_exact(layer_class, rng):
    keys, values = normal(rng, 2, 100, H, D)
    keys[30, 0], values[30, 0] = 3e38, -3e38
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, HEADS, D)
    ref, _ = reference.attention(query, *stored(layer))
    assert_attention_close(layer.attend(query)[3:], ref[3:])


@pytest.mark.parametrize("head_dim", [1, 2, 3, 4, 5, 8])
def test_few_channels_are_exact_beside_what_cancels(head_dim, layer_class, rng):
    """One output of one channel may cancel to nothing; then the error is small beside its parts."""
    for _ in range(40):
        heads, group, n = rng.integers(1, 3), rng.integers(1, 4), rng.integers(1, 400)
        layer = layer_of(layer_class, *normal(rng, 2, n, heads, head_dim))
        query = normal(rng, heads * group, head_dim) * rng.choice(np.float32([0.3, 1, 3, 8]))
        keys, values = stored(layer)
        out = layer.attend(query)
        ref, _ = reference.attention(query, keys, values)
        parts, _ = reference.attention(query, keys, np.abs(values))
        limit = max(reference.TOLERANCE * np.abs(ref).max(), 3e-6 * np.abs(parts).max())
        assert np.abs(out - ref).max() <= limit
