"""Readers beside a writer that appends and drops first tokens: a read sees one moment.

The value of token t is t + 1, so that a result tells which tokens it is of: without a gap, no
older than what was dropped when the read began, no newer than what was there when it ended. The
layer begins with room for four tokens, and moves to other slabs often.
"""

import pickle
import random
import sys
import threading
import time

import numpy as np
import pytest

from kvedge.core.registry import layer_types
from kvedge.errors import InvalidArgumentError, PositionOutOfRangeError
from kvedge.layer.layer import store_of

H, D, HEADS = 2, 16, 4
SECONDS = 0.4
QUERY = np.full((HEADS, D), 0.05, np.float32)


def rows(numbers):
    """Keys and values of tokens, exact in every format of this file."""
    t = np.asarray(numbers, np.float32)[:, None, None]
    keys = np.broadcast_to(0.6 + 0.4 * np.cos(0.37 * t), (len(numbers), H, D))
    values = np.broadcast_to(t + 1, (len(numbers), H, D))
    return np.ascontiguousarray(keys, np.float32), np.ascontiguousarray(values, np.float32)


def run_of(values):
    """The first of some tokens and how many, by their values (n, H, D)."""
    numbers = values[:, 0, 0].astype(np.float64) - 1
    first = round(numbers[0]) if len(numbers) else None
    assert np.allclose(values, rows(range(first or 0, (first or 0) + len(numbers)))[1], rtol=1e-5)
    return first, len(numbers)


def all_values(layer, rng):
    return run_of(layer.values())


def views(layer, rng):
    view = store_of(layer).view()  # two properties would be two moments
    assert len({len(rows) for rows in view.tokens}) == 1
    return view.num_dropped if view.num_tokens else None, view.num_tokens


def copied(layer, rng):
    other = layer.copy() if rng.random() < 0.5 else pickle.loads(pickle.dumps(layer))
    first, n = run_of(other.values())
    assert n == 0 or other.num_dropped == first
    assert np.allclose(other.keys(), rows(range(first or 0, (first or 0) + n))[0], rtol=1e-5)
    return first, n


def attended(layer, rng):
    """With scale 0 the result is the middle of the values, and lse the number of tokens."""
    window = 3 if layer.window or rng.random() < 0.3 else None
    options = {"window": window, "softcap": rng.choice([None, 30.0]), "precision_bits": 24}
    out, lse = layer.attend(QUERY, scale=0.0, return_lse=True, **options)
    n = round(float(np.exp(lse[0])))
    return round(float(out[0, 0]) - (n - 1) / 2 - 1), n, window


def logits(layer, rng):
    """Which tokens the logits are of: searched for, since a logit tells no number."""
    before = layer.num_dropped
    got = layer.scores(QUERY, scale=1.0)[0]
    for first in range(before, layer.num_dropped + 1):
        expected = rows(range(first, first + len(got)))[0][:, 0] @ QUERY[0]
        if np.allclose(got, expected, atol=1e-4):
            return (first if len(got) else None), len(got)
    raise AssertionError("no moment explains the logits")


def one_token(layer, rng):
    position = rng.randrange(max(1, len(layer)))
    value = layer.get_value(position, 1)
    assert (value == value[0]).all()
    return round(float(value[0])) - 1 - position, position + 1, "at least"


READS = (all_values, views, copied, attended, logits, one_token)


def read_on(layer, appended, done, failures, counts, seed):
    rng = random.Random(seed)
    while not done.is_set() and not failures:
        read = rng.choice(READS)
        dropped, stop = layer.num_dropped, appended[0]
        try:
            first, n, *partly = read(layer, rng)
        except (InvalidArgumentError, PositionOutOfRangeError):  # empty, or shorter, by then
            continue
        except BaseException as error:
            failures.append(error)
            return
        counts[read.__name__] = counts.get(read.__name__, 0) + 1
        if first is None:
            continue
        latest, last = layer.num_dropped, appended[1]
        ends = stop <= first + n <= last or "at least" in partly
        if not (ends and (dropped <= first <= latest or any(partly))):
            failures.append(AssertionError(
                f"{read.__name__}: tokens {first} to {first + n}; {dropped} to {latest} were "
                f"dropped, {stop} to {last} appended"
            ))  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize(
    "options", [{}, {"capacity": 40}, {"window": 20}], ids=["growing", "fixed", "window"]
)
def test_readers_of_a_sliding_layer_see_one_moment(dtype, options, monkeypatch):
    monkeypatch.setattr("kvedge.layer.room.FIRST_ROWS", 4)
    layer = layer_types[dtype](num_kv_heads=H, head_dim=D, **options)
    appended = [0, 0]  # tokens that are there, and that may be
    done, failures, counts = threading.Event(), [], {}
    threads = [
        threading.Thread(target=read_on, args=(layer, appended, done, failures, counts, seed))
        for seed in range(4)
    ]
    rng, before = random.Random(3), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + SECONDS
        # Without a GIL this thread may be stopped where the layer is empty: each read shall see
        # tokens, in half a minute at most.
        while not failures and time.monotonic() < (end if len(counts) == len(READS) else end + 30):
            n = 1 if rng.random() < 0.7 else rng.randint(2, 20)
            appended[1] += n
            layer.extend(*rows(range(appended[0], appended[1])))
            appended[0] = appended[1]
            if layer.window is None and len(layer) > 20:
                layer.drop_first(rng.randint(len(layer) - 20, len(layer)))
            if rng.random() < 0.3:
                time.sleep(0.0005)
    finally:
        done.set()
        for thread in threads:
            thread.join(timeout=60)
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]
    assert len(counts) == len(READS), counts


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_copy_has_room_for_what_was_held_however_small_the_layer_becomes(dtype, monkeypatch):
    monkeypatch.setattr("kvedge.layer.room.FIRST_ROWS", 4)
    kind = layer_types[dtype]

    class Overtaken(kind._store_type):
        """A store whose writer drops nearly all, and moves, whenever a copy has looked at it."""

        overtaking = None  # the layer over it, once

        def view(self):
            view = super().view()
            layer, self.overtaking = self.overtaking, None
            if layer is not None:
                layer.drop_first(len(layer) - 1)
                for t in range(300, 700):
                    layer.push(*(side[0] for side in rows([t])))
                    layer.drop_first(1)
            return view

    def restored(layer):
        make, arguments = layer.__reduce__()
        return make(kind, *arguments[1:])

    for copied in (lambda layer: layer.copy(), restored):
        layer = type("Layer", (kind,), {"_store_type": Overtaken})(num_kv_heads=H, head_dim=D)
        layer.extend(*rows(range(300)))
        store_of(layer).overtaking = layer
        other = copied(layer)
        assert layer.num_dropped == 699
        assert other.num_dropped == 0
        assert run_of(other.values()) == (0, 300)
