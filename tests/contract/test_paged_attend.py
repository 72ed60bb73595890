"""Attention over blocks: as over a contiguous layer with the same rows, alone or in a batch."""

import numpy as np
import pytest
import reference
from support import assert_attention_close, assert_lse_close, filled, normal, stored

from kvedge import KvBlockPool, PagedKvCache, errors
from kvedge.core.formats import FORMATS, IN_RUNS
from kvedge.core.kivi import RUN
from kvedge.core.registry import layer_types
from kvedge.paged import cascade


@pytest.fixture(params=[*FORMATS, *IN_RUNS])
def dtype(request):
    """The storage format of a pool."""
    return request.param


def size_of(block, dtype):
    """Tokens of a block, for tests that ask for so many: of runs whole ones."""
    return -(-block // RUN) * RUN if dtype in IN_RUNS else block


def scattered(rng, dtype, lengths, heads, dim, block, **options):
    """Sequences of these lengths whose blocks lie in disorder, and layers with the same rows."""
    block = size_of(block, dtype)
    blocks = sum(-(-n // block) for n in lengths)
    pool = KvBlockPool(2 * blocks + 2, block, 1, heads, dim, dtype, **options)
    cache = PagedKvCache(pool)
    taken = pool.allocate(pool.num_blocks)
    pool.free(rng.permutation(taken))
    kind = layer_types[dtype]
    quantized = {}
    if dtype not in IN_RUNS and FORMATS[dtype].has_scales:
        quantized = {"scale_dtype": pool.scale_dtype, "group_size": options.get("group_size")}
    layers, seqs = [], []
    for n in lengths:
        layer = filled(kind, rng, 0, heads, dim, capacity=n, **quantized)
        rows = normal(rng, 2, n, heads, dim)
        layer.extend(*rows)
        seq = cache.new_sequence()
        for start in range(0, n, 37):
            cache.append(seq, 0, *rows[:, start : start + 37])
        layers.append(layer)
        seqs.append(seq)
    return cache, seqs, layers


@pytest.mark.parametrize("block", [1, 4, 16, 100])
@pytest.mark.parametrize("n", [1, 3, 16, 33, 300])
def test_attention_is_that_of_a_contiguous_layer(rng, dtype, shape, block, n):
    heads, dim = shape
    cache, (seq,), (layer,) = scattered(rng, dtype, [n], heads, dim, block)
    query = normal(rng, 3 * heads, dim)
    out, lse = cache.attend(seq, 0, query, return_lse=True, precision_bits=24)
    flat, flat_lse = layer.attend(query, return_lse=True, precision_bits=24)
    np.testing.assert_allclose(out, flat, atol=1e-5)
    np.testing.assert_allclose(lse, flat_lse, atol=1e-5)
    exact, exact_lse = reference.attention(query, *stored(layer))
    assert_attention_close(cache.attend(seq, 0, query), exact)
    assert_lse_close(lse, exact_lse)


OPTIONS = {
    "scale": {"scale": 0.3},
    "window": {"window": 7},
    "wide window": {"window": 50},
    "window and sinks": {"window": 7, "sink_tokens": 3},
    "softcap": {"softcap": 5.0},
    "not causal": {"causal": False},
    "alibi": {"alibi_slopes": np.linspace(0.1, 0.6, 4, dtype=np.float32)},
    "learned sinks": {"sink_logits": np.linspace(-1, 1, 4, dtype=np.float32)},
    "16 bits": {"precision_bits": 16},
    "24 bits": {"precision_bits": 24},
    "threads": {"num_threads": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_option_is_that_of_a_layer(rng, dtype, options, rows):
    lengths = [9, 70, 33]
    cache, seqs, layers = scattered(rng, dtype, lengths, 2, 40, 8)
    queries = [normal(rng, rows, 4, 40) for _ in lengths]
    known = {k: v for k, v in options.items() if k not in ("precision_bits", "num_threads")}
    together, lses = cache.attend_batch(seqs, 0, queries, return_lse=True, **options)
    for seq, layer, query, out, lse in zip(seqs, layers, queries, together, lses, strict=True):
        exact, exact_lse = reference.attention(query, *stored(layer), **known)
        assert_attention_close(out, exact)
        assert_lse_close(lse, exact_lse)
        alone, alone_lse = cache.attend(seq, 0, query, return_lse=True, **options)
        np.testing.assert_allclose(out, alone, atol=1e-5)
        np.testing.assert_allclose(lse, alone_lse, atol=1e-5)


def test_masks_are_for_one_sequence(rng, dtype):
    cache, (seq, other), (layer, _) = scattered(rng, dtype, [33, 20], 2, 8, 4)
    query = normal(rng, 2, 4, 8)
    for mask in (rng.random((4, 2, 33)) < 0.5, normal(rng, 2, 33), np.ones((4, 2, 33), bool)):
        exact, _ = reference.attention(query, *stored(layer), mask=mask)
        assert_attention_close(cache.attend(seq, 0, query, mask=mask), exact)
        with pytest.raises(errors.InvalidArgumentError, match="mask"):
            cache.attend_batch([seq], 0, [query], mask=mask)
    with pytest.raises(errors.ShapeMismatchError, match="mask"):
        cache.attend(other, 0, query, mask=np.ones((4, 2, 33), bool))


def test_a_prompt_and_single_tokens_go_in_one_batch(rng, dtype):
    lengths = [40, 1, 17]
    cache, seqs, layers = scattered(rng, dtype, lengths, 2, 16, 4)
    queries = [normal(rng, 40, 2, 16), normal(rng, 2, 16), normal(rng, 3, 2, 16)]
    outs = cache.attend_batch(seqs, 0, queries)
    for layer, query, out in zip(layers, queries, outs, strict=True):
        assert_attention_close(out, reference.attention(query, *stored(layer))[0])


@pytest.mark.parametrize("group_size", [None, 8])
def test_a_batch_in_one_array_gives_one_array(rng, group_size):
    options = {"group_size": group_size}
    cache, seqs, layers = scattered(rng, "int8", [12, 30, 5], 2, 16, 4, **options)
    queries = normal(rng, 3, 8, 16)
    out = np.empty_like(queries)
    result, lse = cache.attend_batch(seqs, 0, queries, return_lse=True, out=out)
    assert result is out or np.shares_memory(result, out)
    assert lse.shape == (3, 8) and lse.dtype == np.float32
    for layer, query, one in zip(layers, queries, out, strict=True):
        assert_attention_close(one, reference.attention(query, *stored(layer))[0])
    outs = [np.empty((8, 16), np.float32) for _ in seqs]
    listed = cache.attend_batch(seqs, 0, list(queries), out=outs)
    assert all(np.shares_memory(a, b) for a, b in zip(listed, outs, strict=True))
    np.testing.assert_allclose(np.stack(outs), out, atol=1e-6)
    again = cache.attend_batch([seqs[1], seqs[1]], 0, queries[[1, 1]])
    np.testing.assert_array_equal(again[0], again[1])


def test_forks_and_drops_in_the_middle_of_batches(rng, dtype):
    cache, seqs, layers = scattered(rng, dtype, [21, 30], 2, 16, 4)
    query = normal(rng, 3, 4, 16)
    empty = cache.new_sequence()
    with pytest.raises(errors.InvalidArgumentError, match="no tokens"):
        cache.attend_batch([*seqs, empty], 0, query)
    for seq, layer in zip(seqs, layers, strict=True):
        cache.advance(seq, len(layer))
    fork = cache.fork(seqs[0])
    both = cache.attend_batch([*seqs, fork], 0, query[[0, 1, 0]])
    np.testing.assert_allclose(both[2], both[0], atol=1e-6)
    cache.drop(seqs[0])
    np.testing.assert_allclose(cache.attend(fork, 0, query[0]), both[0], atol=1e-6)
    with pytest.raises(errors.UnknownSequenceError):
        cache.attend_batch([*seqs, fork], 0, query)


def test_results_do_not_depend_on_threads(rng, dtype):
    lengths = [700, 2, 6000, 64]  # work for several threads
    cache, seqs, _ = scattered(rng, dtype, lengths, 2, 64, 16)
    queries = normal(rng, 4, 8, 64)
    one = cache.attend_batch(seqs, 0, queries, num_threads=1)
    for n in (2, 3, 8):
        many = cache.attend_batch(seqs, 0, queries, num_threads=n)
        np.testing.assert_array_equal(many, one)


def test_bad_batches_are_refused(rng, dtype):
    cache, seqs, _ = scattered(rng, dtype, [5, 9], 2, 8, 4)
    good = normal(rng, 2, 4, 8)
    bad = good.copy()
    bad[1, 0, 0] = np.inf
    shape, argument = errors.ShapeMismatchError, errors.InvalidArgumentError
    for chosen, queries, error, options in [
        ([], good[:0], argument, {}),
        ([], [], argument, {}),
        (3, good, argument, {}),
        (seqs, good[:1], shape, {}),
        (seqs, good[0], shape, {}),
        (seqs, [good[0]], shape, {}),
        (seqs, [good[0], good[1, :2]], shape, {}),
        (seqs, [good[0], normal(rng, 10, 4, 8)], shape, {}),  # more rows than tokens
        (seqs, good[:, :3], shape, {}),
        (seqs, None, argument, {}),
        (seqs, "ab", argument, {}),
        (seqs, good.astype(np.float64), errors.DtypeMismatchError, {}),
        (seqs, bad, errors.NonFiniteInputError, {}),
        (seqs, list(bad), errors.NonFiniteInputError, {}),
        (seqs, good, argument, {"window": 0}),
        (seqs, good, argument, {"num_threads": 0}),
        (seqs, good, argument, {"causal": 1}),
        (seqs, good, shape, {"out": np.empty((2, 4, 7), np.float32)}),
        (seqs, good, errors.LayoutError, {"out": good}),
        (seqs, list(good), shape, {"out": [None]}),
        (seqs, list(good), shape, {"out": good}),
    ]:
        with pytest.raises(error):
            cache.attend_batch(chosen, 0, queries, **options)
    twice = np.empty((4, 8), np.float32)
    with pytest.raises(errors.LayoutError):
        cache.attend_batch(seqs, 0, list(good), out=[twice, twice])
    with pytest.raises(errors.LayerOutOfRangeError):
        cache.attend_batch(seqs, 1, good)
    with pytest.raises(TypeError):
        cache.attend_batch(seqs, 0, good, windows=3)


@pytest.mark.parametrize("long", [False, True], ids=["apart", "shared beginning"])
def test_a_refused_batch_leaves_outs_as_they_were(rng, dtype, long, monkeypatch):
    """Also where only the last sequence is wrong, and where a shared beginning is read first."""
    monkeypatch.setattr(cascade, "_SHARED_TOKENS", 16 if long else 10**9)
    monkeypatch.setattr(cascade, "_SAVED_TOKENS", 16 if long else 10**9)
    cache, (seq, other), _ = scattered(rng, dtype, [70, 9], 2, 8, 4)
    cache.advance(seq, 70)
    seqs = [seq, cache.fork(seq), other]
    queries = normal(rng, 3, 4, 8)
    queries[2, 3, 7] = np.nan
    out = np.full((3, 4, 8), 7, np.float32)
    for chosen, bad, options in [
        (seqs, queries, {}),
        (seqs, normal(rng, 3, 4, 8), {"sink_logits": np.full(4, np.nan, np.float32)}),
        ([*seqs[:2], 10**6], normal(rng, 3, 4, 8), {}),
    ]:
        with pytest.raises(errors.KvedgeError):
            cache.attend_batch(chosen, 0, bad, out=out, **options)
        assert (out == 7).all()


def test_no_query_rows_give_empty_results(rng, dtype):
    cache, (seq, other), _ = scattered(rng, dtype, [33, 5], 2, 8, 4)
    none = np.empty((0, 4, 8), np.float32)
    for options in ({}, {"causal": False}, {"window": 3}, {"mask": np.ones((4, 0, 33), bool)}):
        assert cache.attend(seq, 0, none, **options).shape == (0, 4, 8)
        out, lse = cache.attend(seq, 0, none, return_lse=True, **options)
        assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))
        assert out.dtype == lse.dtype == np.float32
    given = np.empty((0, 4, 8), np.float32)
    assert np.asarray(cache.attend(seq, 0, none, out=given)).shape == (0, 4, 8)
    outs, lses = cache.attend_batch([seq, other], 0, [none, none], return_lse=True)
    assert [out.shape for out in outs] == [(0, 4, 8)] * 2
    assert [lse.shape for lse in lses] == [(0, 4)] * 2
    empty = cache.new_sequence()
    shape, argument = errors.ShapeMismatchError, errors.InvalidArgumentError
    for chosen, query, error, options in [  # no rows excuse nothing else
        (empty, none, argument, {}),
        (seq, none[:, :3], shape, {}),
        (seq, none[..., :7], shape, {}),
        (seq, none.astype(np.float64), errors.DtypeMismatchError, {}),
        (seq, none, shape, {"out": np.empty((1, 4, 8), np.float32)}),
        (seq, none, argument, {"window": 0}),
        (seq, none, argument, {"num_threads": 0}),
    ]:
        with pytest.raises(error):
            cache.attend(chosen, 0, query, **options)
        if "out" in options:
            options = {"out": [options["out"]]}
        with pytest.raises(error):
            cache.attend_batch([chosen], 0, [query], **options)


@pytest.mark.parametrize("shared", [0, 2048])
def test_a_sequence_without_query_rows_changes_no_other_of_its_batch(rng, dtype, shared):
    cache, seqs = sharing(rng, dtype, shared, [5, 7, 9, 11])
    queries = [normal(rng, n, 4, 16) for n in (1, 0, 2, 1)]
    outs, lses = cache.attend_batch(seqs, 0, queries, return_lse=True)
    kept = [0, 2, 3]
    alone, alone_lse = cache.attend_batch(
        [seqs[i] for i in kept], 0, [queries[i] for i in kept], return_lse=True
    )
    assert outs[1].shape == (0, 4, 16) and lses[1].shape == (0, 4)
    for i, out, lse in zip(kept, alone, alone_lse, strict=True):
        np.testing.assert_array_equal(outs[i], out)
        np.testing.assert_array_equal(lses[i], lse)
    queries[3][0, 0, 0] = np.nan
    with pytest.raises(errors.NonFiniteInputError):
        cache.attend_batch(seqs, 0, queries)


# -- a beginning that several share is read once ---------------------------------------------------


def sharing(rng, dtype, shared, own, heads=2, dim=16, block=16):
    """A cache whose sequences have `shared` tokens in common, and some of their own."""
    block = size_of(block, dtype)
    blocks = shared // block + sum(-(-n // block) + 1 for n in own) + 1
    cache = PagedKvCache(KvBlockPool(blocks, block, 1, heads, dim, dtype))
    stem = cache.new_sequence()
    cache.append(stem, 0, *normal(rng, 2, shared, heads, dim))
    cache.advance(stem, shared)
    seqs = []
    for n in own:
        seqs.append(cache.fork(stem))
        if n:
            cache.append(seqs[-1], 0, *normal(rng, 2, n, heads, dim))
    return cache, seqs


CASCADE_OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "learned sinks": {"sink_logits": np.linspace(-2, 2, 4, dtype=np.float32)},
    "window": {"window": 900},
    "alibi": {"alibi_slopes": np.linspace(0.001, 0.01, 4, dtype=np.float32)},
}


@pytest.mark.parametrize("options", CASCADE_OPTIONS.values(), ids=CASCADE_OPTIONS)
@pytest.mark.parametrize("shared", [1500, 2048])
def test_a_shared_beginning_changes_no_result(rng, dtype, options, shared):
    own = [5, 0, 70, 33, 1, 16]
    cache, seqs = sharing(rng, dtype, shared, own)
    other = cache.new_sequence()  # shares nothing
    cache.append(other, 0, *normal(rng, 2, 9, 2, 16))
    seqs.insert(2, other)
    seqs.append(seqs[0])
    queries = [normal(rng, 1 + i % 3, 4, 16) for i in range(len(seqs))]
    options = {"precision_bits": 24, **options}
    outs, lses = cache.attend_batch(seqs, 0, queries, return_lse=True, **options)
    for seq, query, out, lse in zip(seqs, queries, outs, lses, strict=True):
        alone, alone_lse = cache.attend(seq, 0, query, return_lse=True, **options)
        np.testing.assert_allclose(out, alone, atol=1e-5)
        np.testing.assert_allclose(lse, alone_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", FORMATS)  # of runs: test_paged_recent
def test_a_shared_beginning_is_read_once(rng, dtype, monkeypatch):
    cache, seqs = sharing(rng, dtype, 2048, [20] * 4)
    queries = normal(rng, 4, 4, 16)
    expected = cache.attend_batch(seqs, 0, queries, window=5000, alibi_slopes=np.zeros(4, "f4"))
    read = []
    store = type(cache.pool._state.stores[0])
    attend = store.attend_blocks

    def counting(self, block_size, rows, options):
        read.append(sum(one.length for one in rows))
        return attend(self, block_size, rows, options)

    monkeypatch.setattr(store, "attend_blocks", counting)
    out = np.empty_like(queries)
    np.testing.assert_allclose(cache.attend_batch(seqs, 0, queries, out=out), expected, atol=1e-3)
    assert read == [2048, 4 * 20]
    bad = queries.copy()
    bad[3, 0, 0] = np.nan
    out[:] = 7
    with pytest.raises(errors.NonFiniteInputError):
        cache.attend_batch(seqs, 0, bad, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("options", [{}, OPTIONS["window and sinks"], OPTIONS["alibi"]])
@pytest.mark.parametrize("rows", [1, 5])
def test_each_sequence_has_its_start_and_arrays_their_layout(rng, dtype, rows, options, layout):
    lengths, starts = [9, 70, 33, 40], [4, 0, 33, 17]
    cache, seqs, layers = scattered(rng, dtype, lengths, 2, 40, 8)
    queries = [normal(rng, rows, 4, 40) for _ in lengths]
    given = [query.transpose(1, 0, 2).copy() if layout == "hnd" else query for query in queries]
    outs, lses = cache.attend_batch(
        seqs, 0, given, start=starts, layout=layout, return_lse=True, precision_bits=24, **options
    )
    for layer, query, start, out, lse in zip(layers, queries, starts, outs, lses, strict=True):
        want, want_lse = layer.attend(
            query, start=start, return_lse=True, precision_bits=24, **options
        )
        if layout == "hnd":
            out, lse = out.transpose(1, 0, 2), lse.T
        np.testing.assert_allclose(out, want, atol=1e-5)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    halves = [np.full(query.shape, 9, np.float16) for query in given]
    again = cache.attend_batch(seqs, 0, given, start=starts, layout=layout, out=halves, **options)
    assert all(one is half for one, half in zip(again, halves, strict=True))
    for half, out in zip(halves, outs, strict=True):
        np.testing.assert_allclose(half, out, atol=2e-3)


def test_starts_of_a_batch_that_make_no_sense_are_refused(rng, dtype):
    cache, seqs, _ = scattered(rng, dtype, [9, 20], 2, 40, 8)
    queries = normal(rng, 2, 4, 40)
    for start in ([0, 21], [10, 0], -1, [0], [0, 0, 0], 1.5, [0, "a"]):
        with pytest.raises(ValueError, match="start"):
            cache.attend_batch(seqs, 0, queries, start=start)
    with pytest.raises(ValueError, match="layout"):
        cache.attend_batch(seqs, 0, queries, layout="dnh")


def test_sequences_with_starts_share_no_beginning(rng, monkeypatch):
    monkeypatch.setattr(cascade, "_SHARED_TOKENS", 16)
    monkeypatch.setattr(cascade, "_SAVED_TOKENS", 16)
    cache, (seq,), (layer,) = scattered(rng, "int8", [64], 2, 40, 8)
    cache.advance(seq, 64)
    twin = cache.fork(seq)
    query = normal(rng, 2, 4, 40)
    outs = cache.attend_batch([seq, twin], 0, query, start=[0, 40])
    for out, one, start in zip(outs, query, [0, 40], strict=True):
        np.testing.assert_allclose(out, layer.attend(one, start=start), atol=1e-4)
