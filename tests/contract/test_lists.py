"""attend(tokens=): each query row reads the tokens of its list, and no others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvedge
from kvedge import (
    DtypeMismatchError,
    InvalidArgumentError,
    KvBlockPool,
    KVCache,
    PagedKvCache,
    ShapeMismatchError,
)

DTYPES = ["float32", "bfloat16", "fp8_e4m3", "int8", "int4", "q8_0", "kivi4", "auto", "small"]


def rows(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def lists_for(rng, n_rows, heads, length, width, blocks=1):
    """Random lists of runs of `blocks` tokens, -1 behind the last."""
    lists = np.full((n_rows, heads, width), -1, np.int32)
    for row in range(n_rows):
        seen = length - n_rows + row + 1
        for head in range(heads):
            starts = rng.integers(0, seen, rng.integers(1, width + 1))
            tokens = np.unique(np.minimum(starts[:, None] + np.arange(blocks), seen - 1))[:width]
            lists[row, head, : len(tokens)] = tokens
    return lists


def reference(keys, values, query, lists, softcap=None, sinks=None):
    """float64 attention and log-sum-exp over the tokens of each list."""
    n_rows, num_heads, dim = query.shape
    group = num_heads // keys.shape[1]
    out, lse = np.zeros((n_rows, num_heads, values.shape[2])), np.zeros((n_rows, num_heads))
    for row, head in np.ndindex(n_rows, num_heads):
        of = lists[row, head * lists.shape[1] // num_heads]
        at = of[of >= 0]
        logits = keys[at, head // group].astype(float) @ query[row, head] / np.sqrt(dim)
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        total = np.logaddexp.reduce(np.append(logits, [] if sinks is None else sinks[head]))
        out[row, head] = np.exp(logits - total) @ values[at, head // group]
        lse[row, head] = total
    return out, lse


def assert_close(got, want):
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_reads_the_tokens_of_its_list(dtype):
    rng = np.random.default_rng(1)
    cache = KVCache(1, 2, 64, dtype=dtype)
    cache.append(0, rows(rng, 301, 2, 64), rows(rng, 301, 2, 64))
    cache.advance(301)
    stored = cache.layer(0).keys(), cache.layer(0).values()
    for n_rows, heads, width, blocks in [
        (1, 1, 40, 1),
        (1, 2, 90, 17),
        (7, 2, 5, 1),
        (5, 1, 300, 64),
        (20, 1, 300, 64),  # nearly all tokens
        (20, 2, 300, 64),
    ]:
        query = rows(rng, n_rows, 6, 64)
        lists = lists_for(rng, n_rows, heads, 301, width, blocks)
        out, lse = cache.attend(0, query, tokens=lists, return_lse=True)
        if cache.layer(0).recent:  # which tokens a row reads exactly is not told by keys()
            mask = np.zeros((6, n_rows, 302), bool)
            for head in range(6):
                np.put_along_axis(mask[head], lists[:, head * heads // 6], True, 1)
            want, want_lse = cache.attend(0, query, mask=mask[:, :, :301], return_lse=True)
        else:
            want, want_lse = reference(*stored, query, lists)
        assert_close(out, want)
        np.testing.assert_allclose(lse, want_lse, atol=2e-3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shapes_nobody_would_choose(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    dim, kv_heads = data.draw(st.sampled_from([3, 8, 40, 72])), data.draw(st.integers(1, 3))
    group, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 90))
    n_rows = data.draw(st.integers(1, min(length, 9)))
    dtype = data.draw(st.sampled_from(["float32", "int8", "int4", "float16"]))
    cache = KVCache(
        1, kv_heads, dim, dtype=dtype, value_head_dim=data.draw(st.sampled_from([dim, 5]))
    )
    cache.append(
        0, rows(rng, length, kv_heads, dim), rows(rng, length, kv_heads, cache.value_head_dim)
    )
    cache.advance(length)
    stored = cache.layer(0).keys(), cache.layer(0).values()
    query = rows(rng, n_rows, kv_heads * group, dim)
    heads = data.draw(st.sampled_from([1, kv_heads]))
    lists = lists_for(rng, n_rows, heads, length, data.draw(st.integers(1, length)))
    sinks = data.draw(st.sampled_from([None, rows(rng, kv_heads * group)]))
    out = cache.attend(0, query, tokens=lists, softcap=3.0, sink_logits=sinks)
    assert_close(out, reference(*stored, query, lists, 3.0, sinks)[0])


@pytest.mark.parametrize("dtype", ["int8", "auto"])
@pytest.mark.parametrize("block_size", [32, 128])
def test_paged_sequences_read_lists_as_layers_do(dtype, block_size):
    rng = np.random.default_rng(2)
    pool = KvBlockPool(40, block_size, 1, 2, 64, dtype)
    cache = PagedKvCache(pool)
    other, seq = cache.new_sequence(), cache.new_sequence()
    alone = KVCache(1, 2, 64, dtype=dtype)
    for _ in range(6):  # so that blocks of both lie in turn
        keys, values = rows(rng, 50, 2, 64), rows(rng, 50, 2, 64)
        cache.append(other, 0, values, keys)
        cache.append(seq, 0, keys, values)
        alone.append(0, keys, values)
        cache.advance(other, 50)
        cache.advance(seq, 50)
        alone.advance(50)
    query, lists = rows(rng, 3, 4, 64), lists_for(rng, 3, 2, 300, 80, 5)
    assert_close(cache.attend(seq, 0, query, tokens=lists), alone.attend(0, query, tokens=lists))


def test_a_prompt_whose_lists_have_all_tokens_is_as_without_lists():
    rng = np.random.default_rng(3)
    cache = KVCache(1, 2, 64)
    cache.append(0, rows(rng, 70, 2, 64), rows(rng, 70, 2, 64))
    cache.advance(70)
    query, steps = rows(rng, 70, 4, 64), np.arange(70, dtype=np.int32)
    lists = np.where(steps <= steps[:, None], steps, -1).astype(np.int32)
    assert_close(cache.attend(0, query, tokens=lists), cache.attend(0, query))


def test_results_do_not_depend_on_threads():
    rng = np.random.default_rng(4)
    cache = KVCache(1, 2, 128)
    cache.append(0, rows(rng, 4000, 2, 128), rows(rng, 4000, 2, 128))
    cache.advance(4000)
    query, lists = rows(rng, 20, 8, 128), lists_for(rng, 20, 2, 4000, 1500, 3)
    one, two = (cache.attend(0, query, tokens=lists, num_threads=n) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[3, 3]], "ascend without duplicates: 3 is followed by 3"),
        ([[4, 3]], "ascend"),
        ([[-1, 3]], "has -1 where a position"),
        ([[2, -2]], "has -2"),
        ([[50]], "has token 50, and its row stands at position 49"),
        ([[-1, -1]], "no token"),
        ([[1], [2]], "list for each query row"),
        ([[[1], [2], [3]]], "for each of 2 KV heads, not 3"),
        ([[[1], [2], [3], [4]]], "for each of 2 KV heads, not 4"),
        ([1], "must be"),
    ],
)
def test_lists_that_are_wrong_are_refused(tokens, message):
    layer = kvedge.QuantizedKvLayer(64, 2, 8)
    layer.extend(np.ones((50, 2, 8), np.float32), np.ones((50, 2, 8), np.float32))
    out = np.full((6, 8), 7, np.float32)
    with pytest.raises((InvalidArgumentError, ShapeMismatchError), match=message):
        layer.attend(np.ones((6, 8), np.float32), tokens=np.array(tokens, np.int32), out=out)
    assert (out == 7).all()


def test_a_row_reads_no_token_behind_it_and_options_that_do_not_fit_are_refused():
    layer = kvedge.QuantizedKvLayer(64, 2, 8)
    layer.extend(np.ones((50, 2, 8), np.float32), np.ones((50, 2, 8), np.float32))
    query, tokens = np.ones((2, 4, 8), np.float32), np.array([[49], [49]], np.int32)
    with pytest.raises(InvalidArgumentError, match="its row stands at position 48"):
        layer.attend(query, tokens=tokens)
    tokens[0] = 0
    for name, value in {
        "window": 3,
        "causal": False,
        "start": 1,
        "mask": np.ones(50, bool),
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"goes with no .*{name}"):
            layer.attend(query, tokens=tokens, **{name: value})
    with pytest.raises(DtypeMismatchError, match="int32 array, not int64"):
        layer.attend(query, tokens=tokens.astype(np.int64))
