"""Random operations on a KVCache against a plain Python model: lists of rows, a log of writes."""

import contextlib
import copy
import pickle
from types import MappingProxyType

import numpy as np
import pytest
import reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvedge import KVCache, Rope, errors

L, H, D = 2, 2, 4
CAPACITY = 40


class CacheMachine(RuleBasedStateMachine):
    """What the cache must hold after any sequence of operations.

    The model: ``tokens[layer]`` lists the (key, value) rows of each position, pending ones
    included; ``length`` is the committed part. ``slots[layer]`` is what each position was last
    written with, also above the length, for a snapshot may go forward again. A mark is stale when
    ``writes``, the log of (overwritten position, certain), has one below its length since it was
    taken; where only uncertain ones are below, the specification leaves it open.
    """

    dtype = "int8"
    options = MappingProxyType({})
    marks = Bundle("marks")
    detached = Bundle("detached")

    @initialize(growing=st.booleans(), seed=st.integers(0, 2**32))
    def start(self, growing, seed):
        self.rng = np.random.default_rng(seed)
        self.limit = None if growing else CAPACITY
        self.cache = KVCache(L, H, D, dtype=self.dtype, max_seq_len=self.limit, **self.options)
        self.length = 0
        self.slots = [[] for _ in range(L)]
        self.held = [0] * L
        self.writes = []
        self.identity = 0  # a copy is another cache: marks of the old one are foreign to it

    # -- the model

    def rows(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def fits(self, layer, n):
        return self.limit is None or self.held[layer] + n <= self.limit

    def write(self, layer, keys, values):
        for key, value in zip(keys, values, strict=True):
            at = self.held[layer]
            del self.slots[layer][at:]
            self.slots[layer].append((key, value))
            self.writes.append((at, True))
            self.held[layer] += 1

    def set_length(self, n):
        self.length = n
        self.held = [n] * L

    def in_step(self):
        return all(held == self.length for held in self.held)

    # -- operations

    @rule(layer=st.integers(0, L - 1), n=st.integers(0, 7), one=st.booleans())
    def append(self, layer, n, one):
        keys, values = self.rows(2, n, H, D)
        if one and n:
            keys, values, n = keys[:1], values[:1], 1
            call = (keys[0], values[0])
        else:
            call = (keys, values)
        if self.fits(layer, n):
            self.cache.append(layer, *call)
            self.write(layer, keys, values)
        else:
            with pytest.raises(errors.CapacityExceededError):
                self.cache.append(layer, *call)

    @rule(layer=st.integers(0, L - 1), n=st.integers(1, 4))
    def append_bad(self, layer, n):
        keys, values = self.rows(2, n, H, D)
        values[n - 1, H - 1, D - 1] = np.nan
        with pytest.raises(errors.KvedgeError):
            self.cache.append(layer, keys, values)

    @rule(n=st.integers(0, 5))
    def advance(self, n):
        if min(self.held) >= self.length + n:
            self.cache.advance(n)
            self.length += n
        else:
            with pytest.raises(errors.LayersOutOfStepError):
                self.cache.advance(n)

    @precondition(in_step)
    @rule(n=st.integers(1, 3))
    def push_steps(self, n):
        for _ in range(n):
            keys, values = self.rows(2, L, H, D)
            if not self.fits(0, 1):
                with pytest.raises(errors.CapacityExceededError):
                    self.cache.push_step(keys, values)
                continue
            self.cache.push_step(keys, values)
            for layer in range(L):
                self.write(layer, keys[layer : layer + 1], values[layer : layer + 1])
            self.length += 1

    @precondition(in_step)
    @rule(n=st.integers(1, 12))
    def prompt(self, n):
        if not self.fits(0, n):
            return
        for layer in range(L):
            keys, values = self.rows(2, n, H, D)
            self.cache.append(layer, keys, values)
            self.write(layer, keys, values)
        self.cache.advance(n)
        self.length += n

    @rule(part=st.floats(0, 1))
    def truncate(self, part):
        n = int(part * self.length)
        self.cache.truncate(n)
        self.set_length(n)

    @rule(beyond=st.integers(1, 5))
    def truncate_too_far(self, beyond):
        with pytest.raises(errors.KvedgeError):
            self.cache.truncate(self.length + beyond)

    @rule()
    def clear(self):
        self.cache.clear()
        self.set_length(0)

    @precondition(in_step)
    @rule(data=st.data())
    def keep(self, data):
        flags = data.draw(st.lists(st.booleans(), min_size=self.length, max_size=self.length))
        mask = np.array(flags, bool)
        indices = np.flatnonzero(mask)
        self.cache.keep(mask if data.draw(st.booleans()) else indices)
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        for layer in range(L):
            slots = self.slots[layer]
            kept = [slots[i] for i in indices]
            if len(moved):
                slots[:] = kept
        if len(moved):
            self.writes.append((int(moved[0]), True))
        self.writes.append((len(indices), False))
        self.set_length(len(indices))

    # -- snapshots

    def expected_of(self, mark):
        """The exception that a mark must raise, None for none, or any of the two where open."""
        _, length, written, identity = mark
        if identity != self.identity:
            return errors.InvalidArgumentError
        below = [certain for at, certain in self.writes[written:] if at < length]
        if any(below):
            return errors.StaleSnapshotError
        return "open" if below else None

    @rule(target=marks)
    def snapshot(self):
        return self.cache.snapshot(), self.length, len(self.writes), self.identity

    @rule(mark=marks)
    def restore(self, mark):
        handle, length, *_ = mark
        assert handle.length == length
        expected = self.expected_of(mark)
        if expected == "open":
            with contextlib.suppress(errors.StaleSnapshotError):
                self.cache.restore(handle)
                self.set_length(length)
        elif expected:
            with pytest.raises(expected):
                self.cache.restore(handle)
        else:
            self.cache.restore(handle)
            self.set_length(length)

    @rule(target=detached, mark=consumes(marks))
    def detach(self, mark):
        handle, length, _, identity = mark
        expected = self.expected_of(mark)
        if identity != self.identity or expected == "open":
            return multiple()
        if expected:
            with pytest.raises(expected):
                handle.detach()
            return multiple()
        return handle.detach(), [list(slots[:length]) for slots in self.slots]

    @rule(saved=detached)
    def restore_detached(self, saved):
        handle, slots = saved
        self.cache.restore(handle)
        self.slots = [list(layer) for layer in slots]
        self.set_length(len(slots[0]))
        self.writes.append((0, len(slots[0]) > 0))

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]))
    def go_on_with_a_copy(self, how):
        self.cache = how(self.cache)
        self.identity += 1
        self.slots = [self.slots[i][: self.held[i]] for i in range(L)]

    # -- what must hold at any time

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        assert self.cache.is_empty == (self.length == 0)
        for i in range(L):
            layer = self.cache.layer(i)
            held = self.held[i]
            assert len(layer) == held
            tokens = self.slots[i][:held]
            for which, name in enumerate(("key", "value")):
                rows = np.array([token[which] for token in tokens], np.float32)
                rows = rows.reshape(held, H, D)
                codes = getattr(layer, f"{name}_codes")
                if self.dtype == "float32":
                    np.testing.assert_array_equal(codes, rows)
                    continue
                expected, scales = reference.quantize(rows, layer.group_size)
                np.testing.assert_array_equal(codes, expected)
                now = np.asarray(getattr(layer, f"{name}_scales"))
                assert now.reshape(scales.shape).tobytes() == scales.tobytes()

    @rule(layer=st.integers(0, L - 1))
    def attend(self, layer):
        if self.held[layer] == 0:
            return
        query = self.rows(2 * H, D)
        keys, values = self.cache.k(layer), self.cache.v(layer)
        ref, _ = reference.attention(query, keys, values)
        np.testing.assert_allclose(self.cache.attend(layer, query), ref, rtol=0, atol=1e-3)

    @precondition(in_step)
    @rule(delta=st.integers(-5, 5))
    def shift_there_and_forget(self, delta):
        """A shift rounds keys, so the model takes the float64 rotation only as a bound."""
        if self.length == 0 or self.dtype != "float32":
            return
        twin = self.cache.copy()
        before = twin.k(0).copy()
        twin.shift(delta, rope=Rope())
        np.testing.assert_allclose(twin.k(0), reference.rotate(before, delta), atol=1e-5)


class GroupedCacheMachine(CacheMachine):
    options = MappingProxyType({"group_size": 3})


class Float32CacheMachine(CacheMachine):
    dtype = "float32"


steps = settings(max_examples=max(10, settings.default.max_examples // 2), stateful_step_count=60)
TestInt8Cache = CacheMachine.TestCase
TestGroupedCache = GroupedCacheMachine.TestCase
TestFloat32Cache = Float32CacheMachine.TestCase
for machine in (TestInt8Cache, TestGroupedCache, TestFloat32Cache):
    machine.settings = steps
