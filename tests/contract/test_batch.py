"""Several layers in one call: attend_batch and append_batch."""

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
    run_together,
    stored,
)

import kvedge
from kvedge import errors
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

HEADS, D = 4, 40
LENGTHS = [3, 17, 130, 64]  # of layers of a batch


def layers_of(rng, lengths, num_kv_heads=2, head_dim=D, dtypes=tuple(FORMATS)):
    """Layers of every format in turn."""
    kinds = layer_types
    return [
        filled(kinds[dtypes[i % len(dtypes)]], rng, n, num_kv_heads, head_dim, capacity=n + 8)
        for i, n in enumerate(lengths)
    ]


def expected(layers, query, starts=None, masks=None, **options):
    """What each row of a batch (batch, n, N, D) gets, in float64."""
    results = []
    for i, layer in enumerate(layers):
        start = starts[i] if starts else 0
        mask = None if masks is None else masks[i][..., : len(layer)]
        keys, values = stored(layer)
        results.append(
            reference.attention(query[i], keys, values, start=start, mask=mask, **options)
        )
    outs, lses = zip(*results, strict=True)
    return np.stack(outs), np.stack(lses)


@pytest.mark.parametrize("n", [None, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "sink_tokens": 2}, {"softcap": 3.0}, {"scale": 0.2}], ids=str
)
def test_every_layer_gets_what_it_would_get_alone(n, options, rng):
    layers = layers_of(rng, LENGTHS)
    query = normal(rng, 4, HEADS, D) if n is None else normal(rng, 4, n, HEADS, D)
    out, lse = kvedge.attend_batch(layers, query, return_lse=True, **options)
    assert out.shape == query.shape and lse.shape == query.shape[:-1]
    for i, layer in enumerate(layers):
        alone, alone_lse = layer.attend(query[i], return_lse=True, **options)
        np.testing.assert_array_equal(out[i], alone)
        np.testing.assert_array_equal(lse[i], alone_lse)
    ref, ref_lse = expected(layers, query, **options)
    assert_attention_close(out, ref)
    assert_lse_close(lse, ref_lse)


def test_layers_of_a_batch_may_differ_in_kv_heads_and_occur_twice(rng):
    layers = [layer for heads in (1, 2, 4) for layer in layers_of(rng, [20], heads)]
    layers.append(layers[0])
    query = normal(rng, 4, HEADS, D)
    out = kvedge.attend_batch(tuple(layers), query)
    for row, layer, one in zip(out, layers, query, strict=True):
        np.testing.assert_array_equal(row, layer.attend(one))


def test_a_batch_does_not_depend_on_the_number_of_threads(rng):
    layers = layers_of(rng, [700, 1500, 90, 1100], 2, 64)
    query = normal(rng, 4, 5, HEADS, 64)
    outs = [kvedge.attend_batch(layers, query, num_threads=n) for n in (1, 2, 4)]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


# -- start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "sink_tokens": 3}, {"causal": False}, {"alibi": True}], ids=str
)
@pytest.mark.parametrize("length", [17, 130])
def test_tokens_before_start_are_not_seen(layer_class, n, options, length, rng):
    layer = filled(layer_class, rng, length, 2, D)
    query = normal(rng, n, HEADS, D)
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = normal(rng, HEADS)
    for start in (0, 1, 15, 16, 17, length - 1, length):
        out, lse = layer.attend(query, start=start, return_lse=True, **options)
        ref, ref_lse = reference.attention(query, *stored(layer), start=start, **options)
        assert_attention_close(out, ref, hint=f"start {start}")
        assert_lse_close(lse, ref_lse)
        before = np.arange(length - n, length) < start
        if options.get("causal", True):
            assert (out[before] == 0).all() and np.isneginf(lse[before]).all()


def test_each_layer_of_a_batch_has_its_start(rng):
    layers = layers_of(rng, LENGTHS)
    query = normal(rng, 4, 3, HEADS, D)
    starts = [3, 16, 129, 0]
    for start in (starts, tuple(starts), np.array(starts), 2):
        each = starts if np.ndim(start) else [2] * 4
        out, lse = kvedge.attend_batch(layers, query, start=start, return_lse=True)
        ref, ref_lse = expected(layers, query, each)
        assert_attention_close(out, ref)
        assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("start", [-1, 4, [0, 0, 0], [0, 18, 0, 0], 1.0, "a", [0, 0, 0, None]])
def test_a_start_that_is_none_is_refused(start, rng):
    layers = layers_of(rng, LENGTHS)
    with pytest.raises((errors.InvalidArgumentError, errors.ShapeMismatchError), match="start"):
        kvedge.attend_batch(layers, normal(rng, 4, HEADS, D), start=start)


def test_start_in_caches_and_pools(dtype, rng):
    keys, values = normal(rng, 2, 40, 2, D)
    query = normal(rng, 3, HEADS, D)
    cache = kvedge.KVCache(1, 2, D, dtype=dtype)
    cache.append(0, keys, values)
    options = {"scale_dtype": "float32"} if FORMATS[dtype].has_scales else {}  # as the cache's
    pool = kvedge.KvBlockPool(8, 8, 1, 2, D, dtype, **options)
    paged = kvedge.PagedKvCache(pool)
    seq = paged.new_sequence()
    paged.append(seq, 0, keys, values)
    for start in (0, 1, 7, 8, 9, 37, 39, 40):
        out = cache.attend(0, query, start=start)
        ref, _ = reference.attention(query, *stored(cache.layer(0)), start=start)
        assert_attention_close(out, ref)
        assert_attention_close(paged.attend(seq, 0, query, start=start), ref)
        outs = paged.attend_batch([seq, seq], 0, [query, query[0]], start=start)
        assert_attention_close(outs[0], ref)
        for call in (cache.attend, paged.attend):
            with pytest.raises(errors.InvalidArgumentError, match="start"):
                call(*((seq,) if call == paged.attend else ()), 0, query, start=41)


# -- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bool, np.float32, np.float16])
@pytest.mark.parametrize(
    "shape", [(4, 1, 3, 130), (4, HEADS, 3, 130), (1, 1, 3, 130), (130,), (4, 1, 1, 1)], ids=str
)
def test_masks_of_a_batch_broadcast(kind, shape, rng):
    layers = layers_of(rng, LENGTHS)
    query = normal(rng, 4, 3, HEADS, D)
    mask = rng.random(shape) < 0.7
    if kind is not bool:
        mask = np.where(mask, normal(rng, *shape), -np.inf).astype(kind)
    full = np.broadcast_to(mask, (4, HEADS, 3, 130))
    ref, ref_lse = expected(layers, query, masks=full)
    out, lse = kvedge.attend_batch(layers, query, mask=mask, return_lse=True)
    assert_attention_close(out, ref)
    assert_lse_close(lse, ref_lse)
    starts = [1, 2, 100, 64]
    out = kvedge.attend_batch(layers, query, mask=full, start=starts)
    assert_attention_close(out, expected(layers, query, starts, full)[0])
    turned = np.asfortranarray(full[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    np.testing.assert_array_equal(
        kvedge.attend_batch(layers, query, mask=turned, start=starts), out
    )


def test_masks_that_do_not_fit_are_refused(rng):
    layers = layers_of(rng, LENGTHS)
    query = normal(rng, 4, 3, HEADS, D)
    for shape in [(5, 3, 130), (3, 1, 3, 130), (4, 1, 3, 129), (1, 4, 1, 3, 130)]:
        with pytest.raises(errors.ShapeMismatchError, match="mask"):
            kvedge.attend_batch(layers, query, mask=np.ones(shape, bool))


# -- append_batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [None, 1, 5])
@pytest.mark.parametrize("auto", [False, True], ids=["", "auto"])
def test_tokens_go_to_every_layer(dtype, n, auto, rng):
    options = {"key_offset": "auto"} if auto and FORMATS[dtype].has_scales else {}
    kind = layer_types[dtype]
    layers, alone = ([kind(20, 2, D, **options) for _ in range(3)] for _ in range(2))
    for _ in range(2):
        shape = (3, 2, D) if n is None else (3, n, 2, D)
        keys, values = normal(rng, *shape), normal(rng, *shape)
        kvedge.append_batch(layers, keys, values)
        for layer, key, value in zip(alone, keys, values, strict=True):
            layer.push(key, value) if n is None else layer.extend(key, value)
    assert [content(layer) for layer in layers] == [content(layer) for layer in alone]


def test_append_batch_is_all_or_nothing(dtype, rng):
    kind = layer_types[dtype]
    layers = [filled(kind, rng, 2, 2, D, capacity=2 + room) for room in (9, 3, 5)]
    if FORMATS[dtype].has_scales:
        layers.append(kind(9, 2, D, key_offset="auto"))
    else:
        layers.append(kind(9, 2, D))
    before = [content(layer) for layer in layers]
    good = normal(rng, 4, 3, 2, D)
    nan, inf = good.copy(), good.copy()
    nan[3, 2, 1, D - 1], inf[2, 0, 0, 0] = np.nan, np.inf
    frozen = kvedge.KVCache(1, 2, D, dtype=dtype).layer(0)
    cases = [
        (layers, good, nan, errors.NonFiniteInputError),
        (layers, inf, good, errors.NonFiniteInputError),
        (layers, normal(rng, 4, 4, 2, D), normal(rng, 4, 4, 2, D), errors.CapacityExceededError),
        (layers, good, good[:, :2], errors.ShapeMismatchError),
        (layers, good[:3], good[:3], errors.ShapeMismatchError),
        (layers, good[..., :1, :], good, errors.ShapeMismatchError),
        (layers, good.astype(np.float64), good, errors.DtypeMismatchError),
        (layers, good[..., ::-1], good, errors.LayoutError),
        ([*layers[:3], layers[0]], good, good, errors.InvalidArgumentError),
        ([*layers[:3], frozen], good, good, errors.ReadOnlyLayerError),
        ([*layers[:3], None], good, good, errors.InvalidArgumentError),
        ([], good[:0], good[:0], errors.InvalidArgumentError),
        (3, good, good, errors.InvalidArgumentError),
    ]
    if dtype == "float16":
        large = good.copy()
        large[3, 2, 1, 3] = 70000
        cases.append((layers, good, large, errors.ScaleRangeError))
    for chosen, keys, values, error in cases:
        with refuses(error):
            kvedge.append_batch(chosen, keys, values)
        assert [content(layer) for layer in layers] == before
    with refuses(errors.InvalidArgumentError, match="layout"):
        kvedge.append_batch(layers, good, good, layout="ndh")
    kvedge.append_batch(layers, good[:, :0], good[:, :0])
    assert [content(layer) for layer in layers] == before
    kvedge.append_batch(layers, good, good)
    assert [len(layer) for layer in layers] == [5, 5, 5, 3]


# -- what is refused -----------------------------------------------------------------------------


def test_a_batch_that_makes_no_sense_is_refused(rng):
    layers = layers_of(rng, LENGTHS)
    good, out = normal(rng, 4, 2, HEADS, D), np.full((4, 2, HEADS, D), 7, np.float32)
    bad = good.copy()
    bad[3, 1, 3, D - 1] = np.inf
    empty = kvedge.QuantizedKvLayer(4, 2, D)
    for chosen, query, error, options in [
        ([], good[:0], errors.InvalidArgumentError, {}),
        (None, good, errors.InvalidArgumentError, {}),
        ([*layers[:3], "layer"], good, errors.InvalidArgumentError, {}),
        ([*layers[:3], empty], good, errors.InvalidArgumentError, {}),
        (layers[:3], good, errors.ShapeMismatchError, {}),
        (layers, good[:, :, :3], errors.ShapeMismatchError, {}),
        (layers, good[..., :8], errors.ShapeMismatchError, {}),
        (layers, good[0], errors.ShapeMismatchError, {}),
        (layers, normal(rng, 4, 4, HEADS, D), errors.ShapeMismatchError, {}),  # 3 tokens
        (layers, bad, errors.NonFiniteInputError, {}),
        (layers, good.astype(np.float64), errors.DtypeMismatchError, {}),
        (layers, good, errors.InvalidArgumentError, {"window": 0}),
        (layers, good, errors.InvalidArgumentError, {"layout": "ndh"}),
        (layers, good, errors.ShapeMismatchError, {"layout": "hnd"}),
        (layers, good, errors.InvalidArgumentError, {"num_threads": 0}),
    ]:
        with refuses(error):
            kvedge.attend_batch(chosen, query, **options)
        if query.shape == out.shape:
            with refuses(error):
                kvedge.attend_batch(chosen, query, out=out, **options)
            assert (out == 7).all()


def test_readers_of_a_batch_beside_writers(dtype, rng):
    """Each call sees every layer at one length, and whole tokens."""
    kind = layer_types[dtype]
    layers = [kind(400, 1, 8) for _ in range(3)]
    ones = np.ones((3, 1, 8), np.float32)
    kvedge.append_batch(layers, ones, ones)

    def write():
        for _ in range(399):
            kvedge.append_batch(layers, ones, ones)

    def read():
        query = np.ones((3, HEADS, 8), np.float32)
        for _ in range(150):
            out = kvedge.attend_batch(layers, query, num_threads=2)
            assert np.allclose(out, 1, atol=1e-2)

    run_together(write, read, read)
    assert [len(layer) for layer in layers] == [400] * 3
