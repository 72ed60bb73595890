"""KeyIndex: what a model's indexer chooses, held against float64."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvedge import (
    CapacityExceededError,
    InvalidArgumentError,
    KeyIndex,
    NonFiniteInputError,
    PositionOutOfRangeError,
    ShapeMismatchError,
)


def rows(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def scores_of(keys, query, weights, per_head):
    """float64 (1 or heads, keys), before any choice."""
    products = query.astype(float) @ keys.astype(float).T
    return products if per_head else (weights @ np.maximum(products, 0))[np.newaxis]


def check(index, keys, queries, k, lists, weights=None, block=1, local=0, start=0, slack=1e-5):
    """Each list is the tail and `k` best blocks: none left out is better by more than `slack`."""
    n, heads, _ = queries.shape
    ratio, per_head = index.ratio, lists.ndim == 3
    for row, of_heads in enumerate(lists if per_head else lists[:, np.newaxis]):
        position = len(index) - n + row
        stop = (position + 1) // ratio
        factors = np.ones(heads) if weights is None else weights[row].astype(float)
        all_scores = scores_of(keys[:stop], queries[row], factors, per_head)
        for scores, tokens in zip(all_scores, of_heads, strict=True):
            used = tokens[tokens >= 0]
            assert (tokens[len(used) :] == -1).all() and (np.diff(used) > 0).all()
            assert used[0] >= start and used[-1] <= position
            tail = np.arange(max(start, stop * ratio), position + 1)
            assert set(tail) <= set(used)
            size, blocks = block * ratio, {}
            for at in range(start // ratio, stop):
                blocks[at // block] = max(blocks.get(at // block, -np.inf), scores[at])
            chosen = set(used[used < stop * ratio] // size)
            whole = [t for b in chosen for t in range(b * size, (b + 1) * size)]
            assert set(used) == {t for t in whole if start <= t < stop * ratio} | set(tail)
            assert len(chosen) == min(k, len(blocks))
            last = set(sorted(blocks)[len(blocks) - local :]) if local else set()
            assert last <= chosen
            left = [blocks[b] for b in blocks if b not in chosen]
            free = [blocks[b] for b in chosen - last]
            if left and free:
                assert max(left) <= min(free) + slack * (1 + np.abs(scores).max())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_best_keys_are_chosen_on_any_shape(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    dim, ratio = data.draw(st.sampled_from([1, 5, 72, 128])), data.draw(st.sampled_from([1, 3, 4]))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    per_head, n_keys = data.draw(st.booleans()), data.draw(st.integers(1, 700))
    block = data.draw(st.sampled_from([1, 1, 7, 32]))
    n, heads = data.draw(st.integers(1, min(n_keys, 6))), data.draw(st.sampled_from([1, 2, 16, 40]))
    k = data.draw(st.sampled_from([1, 2, 30, 4000]))
    local = data.draw(st.integers(0, min(k, 2)))
    index = KeyIndex(None, dim, ratio=ratio, dtype=dtype)
    while len(index) < n_keys:
        index.append(rows(rng, min(n_keys - len(index), int(rng.integers(1, 200))), dim))
    start = data.draw(st.sampled_from([0, (n_keys - n) // 2 // ratio * ratio]))
    weights = None if per_head or data.draw(st.booleans()) else rows(rng, n, heads)
    queries = rows(rng, n, heads, dim)
    lists = index.select(
        queries,
        k,
        weights=weights,
        per_head=per_head,
        block_size=block,
        local_blocks=local,
        start=start,
    )
    check(index, index.keys(), queries, k, lists, weights, block, local, start, 1e-4)


def test_ties_go_to_the_lower_position():
    index = KeyIndex(None, 8)
    index.append(np.ones((500, 8), np.float32))
    lists = index.select(np.ones((2, 3, 8), np.float32), 5)
    assert lists.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_blocks_key_is_the_mean_finished_by_the_caller_once():
    rng = np.random.default_rng(5)
    raw, seen = rows(rng, 10, 16), []
    index = KeyIndex(None, 16, ratio=3, dtype="float32")

    def finish(means, firsts):
        seen.extend(firsts.tolist())
        return 2 * means

    for first, stop in [(0, 1), (1, 2), (2, 8), (8, 10)]:
        index.append(raw[first:stop], finish)
    assert seen == [0, 3, 6] and len(index) == 10 and index.num_keys == 3
    np.testing.assert_allclose(index.keys(), 2 * raw[:9].reshape(3, 3, 16).mean(1), rtol=1e-6)
    assert index.select(rows(rng, 1, 2, 16), 1)[0, 3] == 9  # the incomplete block is read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_in_the_middle_of_a_block_goes_on_as_its_original(dtype, way):
    rng = np.random.default_rng(6)
    index = KeyIndex(100, 24, ratio=4, dtype=dtype)
    index.append(rows(rng, 30, 24))
    more, other = rows(rng, 20, 24), way(index)
    fresh = KeyIndex(100, 24, ratio=4, dtype=dtype)
    fresh.put_arrays(index.arrays())
    for one_of_them in (index, other, fresh):
        one_of_them.append(more)
        np.testing.assert_array_equal(one_of_them.keys(), index.keys())
    other.clear()
    assert len(index) == 50 and len(other) == 0


def test_tokens_that_are_taken_back_and_appended_again_give_the_same_keys():
    rng = np.random.default_rng(7)
    raw = rows(rng, 200, 16)
    index, whole = KeyIndex(None, 16, ratio=4), KeyIndex(None, 16, ratio=4)
    whole.append(raw)
    index.append(raw)
    for n in (150, 149, 147, 146):
        index.truncate(n)
    index.append(raw[146:])
    np.testing.assert_array_equal(index.keys(), whole.keys())
    with pytest.raises(PositionOutOfRangeError, match="raw_tokens"):
        index.truncate(21)
    assert len(index) == 200
    index.truncate(20)
    index.drop_first(8)
    np.testing.assert_array_equal(index.keys(), whole.keys()[2:5])


def test_int8_chooses_what_float32_does():
    rng = np.random.default_rng(8)
    keys, queries = rows(rng, 4000, 128), rows(rng, 8, 16, 128)
    keys[:, 3] *= 12  # a channel with outliers
    chosen = []
    for dtype in ("float32", "int8"):
        index = KeyIndex(None, 128, dtype=dtype)
        index.append(keys)
        chosen.append(index.select(queries, 500))
    recall = np.mean([len(np.intersect1d(*of)) / 500 for of in zip(*chosen, strict=True)])
    assert recall >= 0.99  # of random keys, whose scores lie closer together than a model's


def test_what_is_wrong_is_refused_and_nothing_has_changed():
    index = KeyIndex(40, 8, ratio=4)
    index.append(np.ones((30, 8), np.float32))
    bad, two = np.full((1, 8), np.nan, np.float32), np.ones((2, 8), np.float32)
    for error, call in [
        (ShapeMismatchError, lambda: index.append(np.ones((2, 7), np.float32))),
        (NonFiniteInputError, lambda: index.append(bad)),
        (CapacityExceededError, lambda: index.append(np.ones((11, 8), np.float32))),
        (ShapeMismatchError, lambda: index.append(np.ones((9, 8), np.float32), lambda k, _: k[:1])),
        (PositionOutOfRangeError, lambda: index.truncate(31)),
        (InvalidArgumentError, lambda: index.drop_first(3)),
        (InvalidArgumentError, lambda: index.select(np.ones((31, 2, 8), np.float32), 3)),
        (InvalidArgumentError, lambda: index.select(two, 0)),
        (InvalidArgumentError, lambda: index.select(two, 11)),  # of 40 tokens, by fours
        (InvalidArgumentError, lambda: index.select(two, 6, block_size=2)),
        (InvalidArgumentError, lambda: index.select(two, 1, start=3)),
        (
            InvalidArgumentError,
            lambda: index.select(two, 1, local_blocks=2),
        ),
        (ShapeMismatchError, lambda: index.select(np.ones((2, 7), np.float32), 1)),
        (NonFiniteInputError, lambda: index.select(bad, 1)),
        (ShapeMismatchError, lambda: index.select(two, 1, weights=np.ones(3, np.float32))),
        (ShapeMismatchError, lambda: index.put_arrays({"length": np.array([3])})),
        (InvalidArgumentError, lambda: KeyIndex(4, 8, dtype="int4")),
        (InvalidArgumentError, lambda: KeyIndex(4, 0)),
    ]:
        with pytest.raises(error):
            call()
    assert len(index) == 30 and index.num_keys == 7
    assert index.select(two, 10).shape == (1, 30)  # more than there are yet
