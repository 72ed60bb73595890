"""Attention where arithmetic is hard: magnitudes at the ends of float32, and adversarial contexts.

For any finite input what comes out is finite and not denormal. Where the answer is well
conditioned it also keeps the numerics contract.
"""

import itertools

import numpy as np
import pytest
import reference
from support import ROWS, assert_attention_close, assert_well_formed, normal, stored

from kvedge import QuantizedKvLayer
from kvedge.core.registry import layer_types

H, D, HEADS = 2, 40, 6
FLT_MAX = np.finfo(np.float32).max


@pytest.fixture(params=["int8", "float32"])
def layer_class(request):
    """Each kind of layer that holds float32's largest number."""
    return layer_types[request.param]


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


def spread(rng, low, high):
    """A factor of each row, each at its own power of ten."""
    return 10.0 ** rng.uniform(low, high, (300, H, 1))


def channel(rows, factor):
    rows[..., 7] *= factor
    return rows


#: What is done to normal keys, values and a query: name -> function(keys, values, query, rng)
HARD = {
    **{
        f"{what} {x}": lambda k, v, q, rng, change=change, x=x: change(k, v, q, x)
        for what, sizes, change in (
            ("values", (1e-33, 1e-30, 1e-10, 1e10, 1e30, 1e37), lambda k, v, q, x: (k, v * x, q)),
            ("keys", (1e-37, 1e-30, 1e-10, 1e10, 1e30, 1e37), lambda k, v, q, x: (k * x, v, q / x)),
            ("query channel", (6, 12, 24), lambda k, v, q, x: (k, v, channel(q, x))),
            ("value channel", (100, 10000), lambda k, v, q, x: (k, channel(v, x), q)),
        )
        for x in sizes
    },
    "values of all magnitudes": lambda k, v, q, rng: (k, v * spread(rng, -30, 3), q),
    "keys of all magnitudes": lambda k, v, q, rng: (k * spread(rng, -38, 0), v, q),
}


@pytest.mark.parametrize("case", HARD)
def test_rows_of_any_magnitude_keep_the_contract(case, layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    changed = HARD[case](keys.astype(float), values.astype(float), normal(rng, HEADS, D), rng)
    keys, values, query = (rows.astype(np.float32) for rows in changed)
    check(layer_of(layer_class, keys, values), query)


def test_a_scale_that_undoes_huge_queries_keeps_the_contract(layer_class, rng):
    keys, values = normal(rng, 2, 300, H, D)
    layer = layer_of(layer_class, keys, values)
    query = normal(rng, HEADS, D)
    for size in (1e-30, 1e30):
        check(layer, query * np.float32(size), scale=0.15 / size)


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


# -- what is hidden or gone ----------------------------------------------------------------------


def with_a_huge_token(layer_class, rng, at):
    """100 tokens, one of them as large as float32 goes; and the layer without it, as it should be.

    What no row sees must leave no trace, in bounds or scales that are kept for speed.
    """
    keys, values = normal(rng, 2, 100, H, D)
    keys[at], values[at] = 3e38, -3e38
    others = np.arange(100) != at
    return layer_of(layer_class, keys, values), layer_of(layer_class, keys[others], values[others])


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
