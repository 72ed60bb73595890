"""Any split of any context over layers, attended part by part and merged, is the whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support import assert_lse_close, normal

from kvedge import Float32KvLayer, QuantizedKvLayer, merge_attention


@given(st.data())
def test_any_split_of_a_context_merges_into_the_whole(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=7))
    heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    widths = st.integers(1, 70) | st.sampled_from([80, 128, 256])
    head_dim = data.draw(widths)
    value_head_dim = data.draw(st.just(head_dim) | widths)
    if data.draw(st.booleans()):
        layer_class, options = Float32KvLayer, {}
    else:
        layer_class = QuantizedKvLayer
        offset = data.draw(st.sampled_from([None, 3.0]))
        options = {
            "group_size": data.draw(st.sampled_from([None, 24, 32])),
            "key_offset": None if offset is None else offset * normal(rng, heads, head_dim),
        }
    options["value_head_dim"] = value_head_dim
    keys = normal(rng, sum(lengths), heads, head_dim)
    values = normal(rng, sum(lengths), heads, value_head_dim)
    n = data.draw(st.integers(1, lengths[-1]))
    query = normal(rng, n, heads * group, head_dim)

    whole = layer_class(sum(lengths), heads, head_dim, **options)
    whole.extend(keys, values)
    pieces, end = [], 0
    call = {"return_lse": True, "precision_bits": 24}
    for i, length in enumerate(lengths):
        part = layer_class(length, heads, head_dim, **options)
        part.extend(keys[end : end + length], values[end : end + length])
        end += length
        pieces.append(part.attend(query, causal=i == len(lengths) - 1, **call))
    merged, lse = merge_attention(*zip(*pieces, strict=True), return_lse=True)
    expected, expected_lse = whole.attend(query, **call)
    # what cancels in the output cannot be better than what is summed
    limit = 1e-5 * max(np.abs(expected).max(), 0.1)
    assert np.abs(merged - expected).max() <= limit, (lengths, options)
    assert_lse_close(lse, expected_lse, 1e-5)


@given(st.data())
def test_any_nesting_of_merges_is_one_merge(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parts = data.draw(st.integers(1, 7))
    outs, lses = normal(rng, parts, 3, 5), data.draw(st.floats(0, 1e4)) * normal(rng, parts, 3)
    lses = lses.astype(np.float32)
    lses[rng.random(lses.shape) < data.draw(st.floats(0, 1))] = -np.inf
    outs[np.isneginf(lses)] = data.draw(st.sampled_from([0.0, np.nan]))
    expected, expected_lse = merge_attention(outs, lses, return_lse=True)
    cut = data.draw(st.integers(1, parts))
    halves = [merge_attention(outs[:cut], lses[:cut], return_lse=True)]
    if cut < parts:
        halves.append(merge_attention(outs[cut:], lses[cut:], return_lse=True))
    merged, lse = merge_attention(*zip(*halves, strict=True), return_lse=True)
    size = max(1.0, np.abs(expected_lse[np.isfinite(expected_lse)]).max(initial=0))
    # an lse between is rounded to float32, and moves the weights by as much
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-6 * size)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
