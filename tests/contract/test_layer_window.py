"""Layers that keep what a sliding window needs, against layers that keep all."""

import numpy as np
import pytest
from support import content, normal, refuses

import kvedge
from kvedge import errors
from kvedge.core import memory
from kvedge.layer.layer import store_of

H, D = 2, 40


def pair(layer_class, window):
    """A layer with a window, and one that keeps all."""
    return layer_class(None, H, D, window=window), layer_class(None, H, D)


def extend(layers, rows):
    for layer in layers:
        layer.extend(*rows)


def assert_same(windowed, full, n_rows, rng, **options):
    """Attention of the last rows, in the layer's window if none is given."""
    query = normal(rng, n_rows, 2 * H, D)
    out, lse = windowed.attend(query, return_lse=True, **options)
    expected, expected_lse = full.attend(
        query, return_lse=True, **{"window": windowed.window, **options}
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 17, 64])
def test_a_window_sees_what_it_should_whatever_comes(layer_class, window, rng):
    """Prompts longer than the window, chunks, single tokens: each attended as it comes."""
    windowed, full = pair(layer_class, window)
    total = 0
    for n in [1, 1, 5, 200, 1, 1, 64, 3, *[1] * 150, 700, 1]:
        extend((windowed, full), normal(rng, 2, n, H, D))
        total += n
        assert windowed.num_dropped + len(windowed) == total
        assert len(windowed) == min(total, window - 1 + n)
        assert_same(windowed, full, n, rng)
        assert_same(windowed, full, 1, rng)
        if window > 1:
            assert_same(windowed, full, 1, rng, window=window - 1)
    np.testing.assert_array_equal(windowed.keys(), full.keys()[windowed.num_dropped :])


def test_options_mean_the_same_within_a_window(layer_class, rng):
    windowed, full = pair(layer_class, 16)
    extend((windowed, full), normal(rng, 2, 40, H, D))
    extend((windowed, full), normal(rng, 2, 4, H, D))
    slopes = np.linspace(0.1, 0.5, 2 * H, dtype=np.float32)
    for options in (
        {"alibi_slopes": slopes},
        {"softcap": 3.0},
        {"sink_logits": slopes},
        {"precision_bits": 24},
        {"window": 3},
    ):
        assert_same(windowed, full, 4, rng, **options)
    mask = rng.random((4, 44)) < 0.7
    query = normal(rng, 4, 2 * H, D)
    np.testing.assert_allclose(
        windowed.attend(query, mask=np.ascontiguousarray(mask[:, windowed.num_dropped :])),
        full.attend(query, mask=mask, window=16),
        atol=1e-5,
    )


def test_what_was_dropped_is_not_seen_silently(layer_class, rng):
    windowed, _ = pair(layer_class, 16)
    windowed.extend(*normal(rng, 2, 12, H, D))
    query = normal(rng, 5, 2 * H, D)
    windowed.attend(query, window=1000)  # nothing was dropped
    windowed.attend(query[0], window=8, sink_tokens=2)
    windowed.extend(*normal(rng, 2, 12, H, D))
    windowed.extend(*normal(rng, 2, 4, H, D))
    assert len(windowed) == 19
    for bad in (
        {"window": 16, "query": query},  # its first row is older than the last append
        {"window": 20, "query": query[0]},
        {"window": 18, "query": query[:3]},
        {"window": 8, "sink_tokens": 1, "query": query[0]},
        {"causal": False, "query": query[0]},
    ):
        with refuses(errors.InvalidArgumentError, windowed, match="window"):
            windowed.attend(**bad)
        with refuses(errors.InvalidArgumentError, windowed, match="window"):
            batch = {**bad, "query": bad["query"][np.newaxis]}
            kvedge.attend_batch([windowed], **batch)
    windowed.attend(query[0], window=19)
    windowed.attend(query[:4], window=16)


def test_a_window_layer_says_what_it_is(layer_class):
    layer = layer_class(num_kv_heads=H, head_dim=D, window=512)
    assert layer.window == 512 and "window=512" in repr(layer)
    assert layer_class(4, H, D).window is None
    for bad in (0, -1, 1.5, "4", True, 2**41):
        with refuses(errors.InvalidArgumentError, match="window"):
            layer_class(None, H, D, window=bad)
    with refuses(errors.InvalidArgumentError, match=["window", "capacity", "64"]):
        layer_class(64, H, D, window=32)


@pytest.mark.parametrize("window", [1, 7, 100, 300])
def test_a_window_takes_memory_for_two_windows(layer_class, window, rng):
    layer = layer_class(None, H, D, window=window)
    per_token = layer.memory_bytes // store_of(layer).config.capacity
    for _ in range(5 * window):
        layer.extend(*normal(rng, 2, 1, H, D))
        assert layer.memory_bytes <= 2 * window * per_token
    layer.extend(*normal(rng, 2, 3000, H, D))
    for _ in range(2):  # what a prompt took is given back after it
        layer.extend(*normal(rng, 2, 1, H, D))
        layer.extend(*normal(rng, 2, 1, H, D))
    assert layer.memory_bytes <= 2 * max(window, 2) * per_token


def test_a_refused_append_drops_nothing(layer_class, rng, monkeypatch):
    layer = layer_class(None, H, D, window=16)
    layer.extend(*normal(rng, 2, 100, H, D))
    keys, values = normal(rng, 2, 3, H, D)
    values[-1, -1, -1] = np.nan
    with refuses(errors.NonFiniteInputError, layer):
        layer.extend(keys, values)
    with refuses(errors.ShapeMismatchError, layer):
        layer.extend(keys, values[:2])

    def refuse(config):
        raise errors.OutOfMemoryError("there is no memory")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "reserve_slabs", refuse)
        with refuses(errors.OutOfMemoryError, layer):
            layer.extend(keys, keys)
    assert layer.num_dropped == 0
    layer.extend(keys, keys)
    assert layer.num_dropped == 85
    layer.extend(keys[:0], keys[:0])
    assert layer.num_dropped == 85


def test_going_back_keeps_the_window_whole(layer_class, rng):
    windowed, full = pair(layer_class, 16)
    extend((windowed, full), normal(rng, 2, 50, H, D))
    extend((windowed, full), normal(rng, 2, 6, H, D))
    assert (len(windowed), windowed.num_dropped) == (21, 35)
    with refuses(errors.PositionOutOfRangeError, windowed, match=["49", "35"]):
        windowed.truncate(14)
    windowed.truncate(15)  # all that the last append brought
    full.truncate(50)
    extend((windowed, full), normal(rng, 2, 2, H, D))
    assert_same(windowed, full, 2, rng)
    for call in (
        lambda: windowed.drop_first(1),
        lambda: windowed.keep([0, 1]),
        lambda: windowed.truncate(0),
    ):
        with refuses(
            (errors.InvalidArgumentError, errors.PositionOutOfRangeError), windowed, match="window"
        ):
            call()
    windowed.clear()
    full.clear()
    assert windowed.num_dropped == 0
    extend((windowed, full), normal(rng, 2, 40, H, D))
    assert_same(windowed, full, 40, rng)


def test_a_batch_of_windows(layer_class, rng):
    pairs = [pair(layer_class, 16) for _ in range(3)]
    for i, layers in enumerate(pairs):
        extend(layers, normal(rng, 2, 10 + 20 * i, H, D))
    for n in (1, 30, 2):
        rows = normal(rng, 2, 3, n, H, D)
        for side in range(2):
            kvedge.append_batch([layers[side] for layers in pairs], *rows)
        query = normal(rng, 3, n, 2 * H, D)
        out = kvedge.attend_batch([windowed for windowed, _ in pairs], query)
        expected = kvedge.attend_batch([full for _, full in pairs], query, window=16)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert [len(windowed) for windowed, _ in pairs] == [17] * 3
    other = layer_class(None, H, D, window=8)
    other.extend(*normal(rng, 2, 9, H, D))
    with refuses(errors.InvalidArgumentError, match="window"):
        kvedge.attend_batch([pairs[0][0], other], normal(rng, 2, 2 * H, D))
    kvedge.attend_batch([pairs[0][0], other], normal(rng, 2, 2 * H, D), window=8)


def test_a_batch_grows_or_changes_no_layer(layer_class, rng, monkeypatch):
    layers = [layer_class(None, H, D), layer_class(None, H, D), layer_class(300, H, D)]
    first = normal(rng, 2, 3, 250, H, D)
    kvedge.append_batch(layers, *first)
    before = [content(layer) for layer in layers]
    rows = normal(rng, 2, 3, 60, H, D)
    with refuses(errors.CapacityExceededError, match="300"):
        kvedge.append_batch(layers, *rows)
    made = []

    def refuse_the_second(config, reserve=memory.reserve_slabs):
        made.append(config)
        if len(made) == 2:
            raise errors.OutOfMemoryError("there is no memory for the second")
        return reserve(config)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "reserve_slabs", refuse_the_second)
        with refuses(errors.OutOfMemoryError):
            kvedge.append_batch(layers[:2], *(side[:2] for side in rows))
    assert [content(layer) for layer in layers] == before
    kvedge.append_batch(layers[:2], *(side[:2] for side in rows))
    alone = layer_class(None, H, D)
    for keys, values in (first[:, 1], rows[:, 1]):
        alone.extend(keys, values)
    np.testing.assert_array_equal(layers[1].values(), alone.values())
