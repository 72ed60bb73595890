"""Layers that grow, and layers whose first tokens are dropped."""

import numpy as np
import pytest
from support import content, filled, normal, refuses

from kvedge import QuantizedKvLayer, Rope, errors
from kvedge.core import memory
from kvedge.layer.layer import store_of

H, D = 2, 40


def fresh(layer, rows):
    """A layer of the same kind that has never held anything but these rows (2, n, H, D)."""
    other = type(layer)(max(1, rows.shape[1]), H, D)
    other.extend(*np.ascontiguousarray(rows))
    return other


def assert_holds(layer, rows, rng):
    """The tokens are these, by every way to read them."""
    other = fresh(layer, rows)
    assert content(layer) == content(other)
    np.testing.assert_array_equal(layer.keys(), other.keys())
    np.testing.assert_array_equal(layer.values(), other.values())
    if not rows.shape[1]:
        return
    for position in {0, rows.shape[1] - 1}:
        np.testing.assert_array_equal(layer.get_keys_at(position), other.get_keys_at(position))
        np.testing.assert_array_equal(layer.get_value(position, 1), other.get_value(position, 1))
    query = normal(rng, min(3, rows.shape[1]), 2 * H, D)
    np.testing.assert_array_equal(layer.scores(query[0]), other.scores(query[0]))
    out, lse = layer.attend(query, return_lse=True)
    expected, expected_lse = other.attend(query, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    mask = rng.random((1, len(query), rows.shape[1])) < 0.7
    np.testing.assert_allclose(
        layer.attend(query, mask=mask), other.attend(query, mask=mask), atol=1e-5
    )


# -- growing --------------------------------------------------------------------------------------


def test_a_layer_without_a_capacity_grows(layer_class, rng):
    rows = normal(rng, 2, 3000, H, D)
    layer = layer_class(num_kv_heads=H, head_dim=D)
    for start, stop in [(0, 1), (1, 250), (250, 257), (257, 258), (258, 3000)]:
        layer.extend(*rows[:, start:stop])
        assert layer.capacity >= len(layer) == stop and not layer.is_full
        assert layer.remaining == layer.capacity - stop
    assert_holds(layer, rows, rng)
    assert content(layer_class(None, H, D)) == content(
        layer_class(capacity=None, num_kv_heads=H, head_dim=D)
    )


def test_growing_doubles(layer_class, rng):
    """So that a token costs O(1) on average."""
    layer = layer_class(None, H, D)
    capacities = set()
    for _ in range(300):
        layer.extend(*normal(rng, 2, 7, H, D))
        capacities.add(layer.capacity)
    assert len(capacities) <= 5 and layer.capacity <= 2 * len(layer)


def test_a_growing_layer_says_so(layer_class):
    text = repr(layer_class(None, H, D))
    assert "growing" in text and "0 of 256 tokens" in text
    with refuses(errors.InvalidArgumentError, match="num_kv_heads"):
        layer_class()
    with refuses(errors.InvalidArgumentError, match="head_dim"):
        layer_class(None, H)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_refused_append_does_not_grow_a_layer(layer_class, bad, rng):
    layer = layer_class(None, H, D)
    layer.extend(*normal(rng, 2, 250, H, D))
    keys, values = normal(rng, 2, 20, H, D)
    values[-1, -1, -1] = bad
    with refuses(errors.NonFiniteInputError, layer):
        layer.extend(keys, values)
    assert layer.capacity == 256


def test_growth_without_memory_changes_nothing(layer_class, rng, monkeypatch):
    def refuse(config):
        raise errors.OutOfMemoryError(f"no memory for {config.capacity} tokens")

    layer = layer_class(None, H, D)
    rows = normal(rng, 2, 300, H, D)
    layer.extend(*rows[:, :256])
    with monkeypatch.context() as patch:
        patch.setattr(memory, "reserve_slabs", refuse)
        for call in (
            lambda: layer.extend(*rows[:, 256:]),
            lambda: layer.push(*rows[:, 256]),
            lambda: layer.reserve(1),
        ):
            with refuses(errors.OutOfMemoryError, layer, match="tokens"):
                call()
    layer.extend(*rows[:, 256:])
    assert_holds(layer, rows, rng)


def test_a_first_append_that_grows_takes_its_automatic_offset(rng, monkeypatch):
    keys, values = normal(rng, 2, 400, H, D)
    keys += 20  # an offset narrows the range of every channel
    layer = QuantizedKvLayer(num_kv_heads=H, head_dim=D, key_offset="auto")
    bad = keys.copy()
    bad[-1, -1, -1] = np.inf
    with refuses(errors.NonFiniteInputError, layer):
        layer.extend(bad, values)
    assert layer.key_offset is None
    with monkeypatch.context() as patch:
        patch.setattr(memory, "reserve_slabs", lambda config: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            layer.extend(keys, values)
    assert layer.key_offset is None
    layer.extend(keys, values)
    np.testing.assert_allclose(layer.key_offset, keys.mean(axis=0), rtol=1e-6)


def test_reserved_room_is_there_without_further_memory(layer_class, rng, monkeypatch):
    layer = layer_class(None, H, D)
    layer.reserve(1000)
    monkeypatch.setattr(memory, "reserve_slabs", None)
    layer.extend(*normal(rng, 2, 1000, H, D))
    assert layer.capacity >= 1000


def test_what_cannot_be_reserved_is_refused(layer_class, rng):
    layer = filled(layer_class, rng, 3, H, D, capacity=5)
    layer.reserve(2)
    for n in (3, 1 << 50):
        with refuses(errors.CapacityExceededError, layer, match="5"):
            layer.reserve(n)
    for n in (-1, 1.5, None):
        with refuses(errors.InvalidArgumentError, layer):
            layer.reserve(n)
    with refuses(errors.CapacityExceededError, match="no room"):
        layer_class(None, 1, 1).reserve(1 << 41)


# -- dropping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [20, None])
def test_drop_first_makes_a_later_token_the_first(layer_class, capacity, rng):
    rows = normal(rng, 2, 20, H, D)
    layer = layer_class(capacity, H, D)
    layer.extend(*rows[:, :12])
    for n, dropped in [(0, 0), (1, 1), (4, 5), (6, 11)]:
        layer.drop_first(n)
        assert layer.num_dropped == dropped and len(layer) == 12 - dropped
        assert_holds(layer, rows[:, dropped:12], rng)
    layer.extend(*rows[:, 12:])
    assert_holds(layer, rows[:, 11:], rng)
    layer.drop_first(9)
    assert layer.is_empty and layer.num_dropped == 20
    with pytest.raises(errors.InvalidArgumentError):
        layer.attend(normal(rng, H, D))
    layer.extend(*rows)
    assert_holds(layer, rows, rng)


@pytest.mark.parametrize(("n", "error"), [
    (-1, errors.PositionOutOfRangeError),
    (13, errors.PositionOutOfRangeError),
    (2**70, errors.PositionOutOfRangeError),
    (1.0, errors.InvalidArgumentError),
    (None, errors.InvalidArgumentError),
])  # fmt: skip
def test_more_than_is_stored_cannot_be_dropped(layer_class, n, error, rng):
    layer = filled(layer_class, rng, 12, H, D, capacity=20)
    with refuses(error, layer):
        layer.drop_first(n)


def test_the_capacity_counts_what_is_held(layer_class, rng):
    """However many were dropped, and wherever in its slabs the layer stands."""
    rows = normal(rng, 2, 100, H, D)
    layer = layer_class(10, H, D)
    first = 0
    for stop in range(100):
        layer.push(*rows[:, stop])
        if len(layer) == 10:
            assert layer.is_full and layer.remaining == 0 and layer.capacity == 10
            with refuses(errors.CapacityExceededError, layer, match="10"):
                layer.push(*rows[:, 0])
            layer.drop_first(1 + stop % 3)
            first += 1 + stop % 3
        assert layer.num_dropped == first
    assert_holds(layer, rows[:, first:], rng)


@pytest.mark.parametrize(("capacity", "most"), [(64, 2), (None, 4)])
def test_a_sliding_layer_moves_a_row_per_token_on_average(
    layer_class, capacity, most, rng, monkeypatch
):
    window, tokens, moved = 64, 2000, []
    copy_tokens = memory.copy_tokens
    monkeypatch.setattr("kvedge.layer.room.FIRST_ROWS", 1)
    monkeypatch.setattr(
        memory, "copy_tokens", lambda s, t, n: (moved.append(n), copy_tokens(s, t, n))
    )
    layer = layer_class(capacity, H, D)
    rows = normal(rng, 2, tokens, H, D)
    for t in range(tokens):
        if len(layer) == window:
            layer.drop_first(1)
        layer.push(*rows[:, t])
        assert (
            layer.memory_bytes
            <= most * window * layer.memory_bytes // store_of(layer).config.capacity
        )
    assert sum(moved) <= tokens + 2 * window
    assert_holds(layer, rows[:, -window:], rng)


def test_editing_after_dropping(layer_class, rng):
    rows = normal(rng, 2, 30, H, D)
    layer = filled(layer_class, rng, 0, H, D, capacity=30)
    layer.extend(*rows)
    layer.drop_first(7)
    layer.truncate(20)
    assert_holds(layer, rows[:, 7:27], rng)
    layer.keep([0, 3, 4, 11, 19])
    assert_holds(layer, rows[:, 7:27][:, [0, 3, 4, 11, 19]], rng)
    other = fresh(layer, rows[:, 7:27][:, [0, 3, 4, 11, 19]])
    for one in (layer, other):
        one.shift(-7, rope=Rope(10000.0), start=1)
    assert content(layer) == content(other)
    layer.clear()
    assert layer.num_dropped == 0 and layer.is_empty
    layer.extend(*rows)
    assert_holds(layer, rows, rng)


def test_an_offset_stays_with_a_layer_that_drops_and_moves(rng):
    keys, values = normal(rng, 2, 500, H, D) + np.float32(5)
    layer = QuantizedKvLayer(num_kv_heads=H, head_dim=D, key_offset="auto")
    layer.extend(keys[:100], values[:100])
    offset = layer.key_offset.copy()
    for start in range(100, 500, 40):
        layer.drop_first(40)
        layer.extend(keys[start : start + 40], values[start : start + 40])
    np.testing.assert_array_equal(layer.key_offset, offset)
    np.testing.assert_allclose(layer.keys(), keys[-100:], atol=0.05)
