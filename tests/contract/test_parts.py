"""What caches with first and last tokens in another format, and those of runs, promise alike."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from helpers.precise import (
    ATTENDS,
    BESIDE_ROWS,
    DIM,
    DRAFT,
    HEADS,
    bits,
    cache_bits,
    cache_of,
    layer_of,
    read_by,
    rows,
)
from helpers.reference import attention

from kvedge import (
    KvBlockPool,
    KVCache,
    PagedKvCache,
    Rope,
    append_batch,
    attend_batch,
    errors,
)
from kvedge.core.formats import DTYPES

RECENT = {"dtype": "int4", "recent": 12, "sinks": 3}
KINDS = [
    RECENT,
    {**RECENT, "recent_dtype": "bfloat16", "dtype": "int8", "key_scale": "auto"},
    {**RECENT, "recent": 0},
    {**RECENT, "sinks": 0},
    {"dtype": "kivi4"},
    {"dtype": "kivi4", "recent": 12, "sinks": 3},
    {"dtype": "kivi2", "recent": 40, "recent_dtype": "bfloat16"},
    {"dtype": "kivi8", "value_dtype": "kivi2", "recent": 12},
    {"dtype": "int8", "key_dtype": "kivi4", "value_dtype": "kivi8"},
    {"dtype": "int8", "key_dtype": "kivi4", "scale_dtype": "float16", "recent": 12},
    {"dtype": "int8", "value_dtype": "kivi2", "key_scale": "auto", "key_offset": "auto"},
    {"dtype": "fp8_e5m2", "value_dtype": "kivi8", "key_scale": "auto", "recent": 40},
]
kinds = pytest.mark.parametrize("options", KINDS, ids=str)


@pytest.mark.parametrize("dtype", [*(name for name in DTYPES if name != "q8_0"), *BESIDE_ROWS])
@pytest.mark.parametrize("num_rows", [1, 7, 190])
@pytest.mark.parametrize("options", ATTENDS, ids=str)
def test_attention_is_that_over_what_is_read(dtype, num_rows, options):
    layer, tokens = layer_of(dtype, recent=20, sinks=5), rows(3, 190)
    layer.extend(*tokens)
    by_rows = read_by(layer, tokens, num_rows)
    query = rows(4, num_rows)[0].repeat(2, axis=1)
    mask = np.random.default_rng(5).random((4, num_rows, 190)) < 0.8
    for more in (
        {},
        {"alibi_slopes": np.array([0.1, -0.2, 0.0, 0.3], np.float32)},
        {"sink_logits": np.array([0.5, -2, 3, 0], np.float32)},
        {"mask": mask},
        {"mask": np.random.default_rng(6).standard_normal(mask.shape).astype(np.float32)},
    ):
        given = {**options, **more}
        out, lse = layer.attend(query, return_lse=True, **given)
        given.pop("precision_bits", None)
        wanted, wanted_lse = attention(query, *by_rows, **given)
        np.testing.assert_allclose(out, wanted, atol=2e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(lse, wanted_lse, atol=5e-4)
    one_row = layer.attend(query[-1:], **options)[0]
    np.testing.assert_array_equal(layer.attend(query[-1], **options), one_row)
    wanted = DIM**-0.5 * np.einsum("hd,thd->ht", query[-1], layer.keys().repeat(2, axis=1))
    np.testing.assert_allclose(layer.scores(query[-1]), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        ("int8", {"recent": 16}, DRAFT),
        # Rows with first tokens: 63 or 64 tokens at length 17 or 18 change attention's last digit.
        ("int8", {"recent": 16, "sinks": 2}, DRAFT - 2),
        ("int4", {"recent": 16, "sinks": 2}, DRAFT - 2),
        ("kivi4", {}, DRAFT),
        ("kivi4", {"recent": 16, "sinks": 2}, DRAFT),
        ("kivi4", {"recent": 90}, DRAFT),
        ("kivi4/int8", {}, DRAFT),
        ("int8/kivi4", {"recent": 16, "sinks": 2}, DRAFT),
    ],
)
def test_a_rejected_draft_leaves_no_trace(dtype, options, most):
    """At every length, of every number of tokens up to `most`, one by one or at once."""
    tokens, draft = rows(9, 150), rows(10, DRAFT)
    layer = layer_of(dtype, **options)
    for n in range(1, 150):
        layer.push(*tokens[:, n - 1])
        before = bits(layer)
        for count in {n % most + 1, (7 * n) % most + 1, most}:
            if n % 3:
                layer.extend(*draft[:, :count])
            else:
                for t in range(count):
                    layer.push(*draft[:, t])
            layer.truncate(n)
            assert bits(layer) == before, (n, count)
    never = layer_of(dtype, **options)
    never.extend(*tokens[:, :149])
    assert bits(layer) == bits(never)


@pytest.mark.parametrize("dtype", [*(name for name in DTYPES if name != "q8_0"), *BESIDE_ROWS])
@pytest.mark.parametrize("sinks", [0, 3])
def test_stored_bytes_do_not_depend_on_how_tokens_come(dtype, sinks, rng):
    for most in (5, 40, 90, 150):
        cuts = np.cumsum(rng.integers(1, most + 1, 8))
        tokens = rows(40, cuts[-1])
        parts, whole = (layer_of(dtype, recent=10, sinks=sinks) for _ in range(2))
        for start, stop in zip([0, *cuts], cuts, strict=False):
            parts.extend(*tokens[:, start:stop])
        whole.extend(*tokens)
        assert bits(parts) == bits(whole)


@kinds
def test_snapshots_go_back_and_forth(options):
    cache = cache_of(rows(19, 330), 2, **options)
    mark, before = cache.snapshot(), cache_bits(cache)
    cache.truncate(100)
    early, read_early = cache.snapshot(), cache_bits(cache)
    cache.restore(mark)
    assert cache_bits(cache) == before
    cache.restore(early)
    assert cache_bits(cache) == read_early
    cache.restore(mark)
    detached = mark.detach()
    cache.truncate(20)
    cache.push_step(*rows(20, 2))
    assert mark.is_stale
    cache.restore(detached)
    assert cache_bits(cache) == before
    other = KVCache(2, HEADS, DIM, **options)
    other.restore(pickle.loads(pickle.dumps(detached)))
    assert cache_bits(other) == before


@pytest.mark.parametrize(
    "options",
    [
        RECENT,
        {**RECENT, "scale_dtype": "float16", "recent_dtype": "float32"},
        {"dtype": "kivi4"},
        {"dtype": "kivi4", "value_dtype": "int8", "scale_dtype": "float16"},
        {"dtype": "int8", "value_dtype": "kivi4", "key_scale": "auto", "recent": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [95, 110, 127, 300])
def test_tokens_that_are_refused_change_nothing(options, n):
    cache = cache_of(rows(21, 330), 2, **options)
    mark, before = cache.snapshot(), cache_bits(cache)
    cache.truncate(n)
    read = cache_bits(cache)
    keys, values = rows(22, 40)
    values[-1, 0, 0] = 1e9  # too large for the second layer
    step = (keys[-2:], values[-2:])
    copied = cache.copy()  # in which nothing lies above the end
    for refused in (
        lambda: cache.push_step(*step),
        lambda: cache.append(0, keys, values),
        lambda: copied.push_step(*step),
        lambda: copied.append(0, keys, values),
    ):
        with pytest.raises(errors.ScaleRangeError):
            refused()
        assert cache_bits(cache) == cache_bits(copied) == read
    assert not mark.is_stale
    cache.restore(mark)
    assert cache_bits(cache) == before
    dtype, rest = options["dtype"], {k: v for k, v in options.items() if k != "dtype"}
    layers = [layer_of(dtype, **rest) for _ in range(2)]
    for layer in layers:
        layer.extend(*rows(21, 330))
        layer.truncate(n)
    read = [bits(layer) for layer in layers]
    with pytest.raises(errors.ScaleRangeError):
        append_batch(layers, *(side.reshape(2, 20, HEADS, DIM) for side in (keys, values)))
    assert [bits(layer) for layer in layers] == read


@pytest.mark.parametrize(
    ("dtype", "recent", "large"),
    [("bfloat16", 4, 18), ("kivi8", 90, 1), ("kivi8/int8", 90, 1), ("int8/kivi8", 90, 1)],
)
def test_a_shift_that_is_refused_changes_nothing(dtype, recent, large):
    layer = layer_of(dtype, recent=recent)
    tokens = np.full((2, 20, HEADS, DIM), 1.0, np.float32)
    tokens[0, large] = 60000  # within float16; turned, it may not be
    layer.extend(*tokens)
    before = bits(layer)
    with pytest.raises(errors.ScaleRangeError):
        layer.shift(1, rope=Rope())
    assert bits(layer) == before


@pytest.mark.parametrize("start", [None, 32, 95])
def test_an_inject_that_is_refused_changes_nothing(start):
    """Keys that cannot be stored turned back."""
    options = {"dtype": "kivi4", "value_dtype": "int8", "scale_dtype": "float16"}
    cache = cache_of(rows(23, 130), 2, **options)
    cache.shift(5, rope=Rope(DIM))
    mark = cache.snapshot()
    before = cache_bits(cache)
    cache.truncate(95)
    read = cache_bits(cache)
    other = cache_of(rows(24, 32), 2, **options)
    huge = rows(24, 32)
    huge[0, 20] = 6e4
    other.truncate(0)
    for i, tokens in enumerate((rows(24, 32), huge)):
        other.append(i, *tokens)
    other.advance(32)
    with pytest.raises(errors.ScaleRangeError):
        cache.inject(other, start)
    assert cache_bits(cache) == read
    assert not mark.is_stale
    cache.restore(mark)
    assert cache_bits(cache) == before


def test_a_requantize_of_turned_keys_that_is_refused_changes_nothing():
    huge = rows(25, 40)
    huge[0, 20] = 6e4  # a float16 until it is turned
    cache = cache_of(rows(26, 0), 2, dtype="int8")
    for i, tokens in enumerate((rows(25, 40), huge)):
        cache.append(i, *tokens)
    cache.advance(40)
    cache.shift(5, rope=Rope(DIM))
    read = cache_bits(cache)
    with pytest.raises(errors.ScaleRangeError):
        cache.requantize("float16")
    assert cache.layer(0).dtype == "int8"
    assert cache_bits(cache) == read


@pytest.mark.parametrize("x", [1e9, np.nan])
def test_tokens_that_a_paged_sequence_refuses_change_nothing(x):
    """Runs come in pieces: here the second holds what is refused, and the first is cut."""
    options = {"dtype": "kivi4", "value_dtype": "int8", "scale_dtype": "float16"}
    cache = PagedKvCache(KvBlockPool(64, 64, 1, HEADS, DIM, **options))
    seq = cache.new_sequence()
    cache.append(seq, 0, *rows(27, 330))
    cache.advance(seq, 330)
    cache.truncate(seq, 95)
    query = rows(28, 1)[0][0]
    before = cache.attend(seq, 0, query).tobytes()
    keys, values = rows(29, 1300)
    values[1100, 0, 0] = x
    with pytest.raises((errors.ScaleRangeError, errors.NonFiniteInputError)):
        cache.append(seq, 0, keys, values)
    assert cache.attend(seq, 0, query).tobytes() == before


@pytest.mark.parametrize(
    "layers",
    [
        [("int8", {"recent": 5, "sinks": 2}), ("int8", {}), ("int8", {"recent": 40})],
        [("kivi4", {}), ("int8", {}), ("kivi8", {"recent": 40})],
    ],
    ids=["recent", "runs"],
)
def test_batches_are_as_their_layers(layers):
    layers = [layer_of(dtype, **options) for dtype, options in layers]
    alone = [layer.copy() for layer in layers]
    for seed, n in enumerate((1, 30, 90, 1, 200)):
        keys, values = (
            np.stack([rows(seed + 10 * i, n)[side] for i in range(3)]) for side in (0, 1)
        )
        append_batch(layers, keys, values)
        for i, layer in enumerate(alone):
            layer.extend(keys[i], values[i])
    query = np.stack([rows(30 + i, 1)[0][0].repeat(2, axis=0) for i in range(3)])
    for start in (None, [0, 7, 320]):
        out, lse = attend_batch(layers, query, start=start, return_lse=True)
        for i, layer in enumerate(alone):
            wanted = layer.attend(query[i], start=start[i] if start else 0, return_lse=True)
            np.testing.assert_array_equal(out[i], wanted[0])
            np.testing.assert_array_equal(lse[i], wanted[1])
    before = [bits(layer) for layer in layers]
    keys[2, -1] = 1e6
    with pytest.raises(errors.ScaleRangeError):
        append_batch(layers, keys, values)
    assert [bits(layer) for layer in layers] == before
