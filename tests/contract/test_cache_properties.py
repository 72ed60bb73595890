"""Random operations on a KVCache against a plain Python model: stored bytes, a log of writes."""

import contextlib
import copy
import pickle
import tempfile
from pathlib import Path
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
from support import assert_well_formed

from kvedge import KVCache, Rope, errors

L, H, D = 2, 2, 4
CAPACITY = 40
LARGE_CAPACITY = 3000  # room for appends that a core stores in chunks: several thousand values
LONG = (1, 3, 60, 700, 2000)  # tokens of appends that are refused
FLOAT16_MAX_ROW = 127 * 65504.0


def stored_bytes(layer, position):
    """What one token of a layer is stored as: keys, values, their scales."""
    arrays = (layer.key_codes, layer.value_codes, layer.key_scales, layer.value_scales)
    return tuple(np.asarray(array)[position].tobytes() for array in arrays)


class CacheMachine(RuleBasedStateMachine):
    """What the cache must hold after any sequence of operations.

    The model: ``slots[layer]`` is what each position was last written with, as stored bytes, also
    above the length, for a snapshot may go forward again. ``held[layer]`` counts the tokens of the
    layer, pending ones included; ``length`` is the committed part; ``offsets[layer]`` is the key
    offset. A mark is stale when ``writes``, the log of (overwritten position, certain), has one
    below its length since it was taken; where only uncertain ones are below, the specification
    leaves it open.
    """

    dtype = "int8"
    options = MappingProxyType({})
    marks = Bundle("marks")
    detached = Bundle("detached")

    @initialize(limit=st.sampled_from([None, CAPACITY, LARGE_CAPACITY]), seed=st.integers(0, 2**32))
    def start(self, limit, seed):
        self.rng = np.random.default_rng(seed)
        self.limit = limit
        self.cache = KVCache(L, H, D, dtype=self.dtype, max_seq_len=self.limit, **self.options)
        self.length = 0
        self.slots = [[] for _ in range(L)]
        self.held = [0] * L
        self.offsets = [None] * L
        self.writes = []
        self.turned = False  # by a shift: keys that follow may be stored turned back
        self.identity = 0  # a copy is another cache: marks of the old one are foreign to it
        self.recent = []  # the latest marks

    # -- the model

    def rows(self, *shape):
        return self.rng.standard_normal(shape, dtype=np.float32)

    def pair(self, n):
        """Keys and values of n tokens."""
        return self.rows(n, H, D), self.rows(n, H, self.options.get("value_head_dim", D))

    def fits(self, layer, n):
        return self.limit is None or self.held[layer] + n <= self.limit

    @property
    def is_auto(self):
        return self.options.get("key_offset") == "auto"

    @property
    def has_float16(self):
        return self.options.get("scale_dtype") == "float16"

    def offset_for(self, layer, keys):
        """The offset that these keys are stored with; the first of a layer decide."""
        if not self.is_auto or self.offsets[layer] is not None or not len(keys):
            return self.offsets[layer]
        return reference.automatic_key_offset(keys)

    def quantized(self, rows, offset=None):
        """Codes and scales that rows are stored as; None if they cannot be."""
        if offset is not None:
            with np.errstate(all="ignore"):
                rows = rows - offset
        if not np.isfinite(rows).all():
            return None
        if self.dtype == "float32":
            return rows, np.empty((*rows.shape[:2], 0), np.float32)
        scale_dtype = self.options.get("scale_dtype", "float32")
        with np.errstate(all="ignore"):
            if self.has_float16 and (np.abs(rows) / np.float32(127) > 65504).any():
                return None
            return reference.quantize(rows, self.options.get("group_size"), scale_dtype)

    def as_stored(self, layer, keys, values):
        """The bytes of each token that these rows make; None if they are to be refused."""
        k = self.quantized(keys, self.offset_for(layer, keys))
        v = self.quantized(values)
        if k is None or v is None:
            return None
        arrays = (k[0], v[0], k[1], v[1])
        return [tuple(array[i].tobytes() for array in arrays) for i in range(len(keys))]

    def write(self, layer, keys, values):
        tokens = self.as_stored(layer, keys, values)
        self.offsets[layer] = self.offset_for(layer, keys)
        if self.turned:
            read = self.cache.k(layer)[self.held[layer] :].astype(np.float64)
            assert (np.abs(read - keys) <= self.rounding(layer, np.abs(keys))).all()
        for i, token in enumerate(tokens):
            at = self.held[layer]
            if self.turned:
                stored = stored_bytes(self.cache.layer(layer), at)
                assert (token[1], token[3]) == (stored[1], stored[3])
                token = tokens[i] = stored
            del self.slots[layer][at:]
            self.slots[layer].append(token)
            self.writes.append((at, True))
            self.held[layer] += 1

    def rounding(self, layer, rows):
        """A bound of what storing turned rows of these magnitudes may cost."""
        offset = 0 if self.offsets[layer] is None else np.abs(self.offsets[layer]).max()
        largest = rows.max(axis=-1, keepdims=True).astype(np.float64) + offset
        # Turned, a channel may be sqrt(2) times as large, and the error may go to one of a pair.
        bound = largest * (2e-5 if self.dtype == "float32" else 2 * (0.51 / 127 + 1e-5)) + 1e-37
        return bound * 1.001 + 1e-4 if self.has_float16 else bound

    def set_length(self, n):
        self.length = n
        self.held = [n] * L

    def in_step(self):
        return all(held == self.length for held in self.held)

    def ahead(self):
        return [layer for layer in range(L) if self.held[layer] != self.length]

    @contextlib.contextmanager
    def refused(self, error=errors.KvedgeError):
        """The block raises, and no mark that could be restored stands for other bytes than before.

        Also one above the length: a refused append must not have written there.
        """
        before = [(mark, self.bytes_of(mark)) for mark in self.recent[-3:]]
        with pytest.raises(error):
            yield
        for mark, content in before:
            assert content is None or self.bytes_of(mark) == content, "a refused call changed bytes"

    def bytes_of(self, mark):
        """What a mark stands for, read through another cache; None if it cannot be asked."""
        handle, length, _, identity, pending = mark
        if identity != self.identity or pending or self.expected_of(mark) is not None:
            return None
        other = KVCache(L, H, D, dtype=self.dtype, **self.options)
        other.restore(handle.detach())
        content = [[stored_bytes(other.layer(i), p) for p in range(length)] for i in range(L)]
        assert content == [slots[:length] for slots in self.slots]
        return content

    # -- operations

    @rule(layer=st.integers(0, L - 1), n=st.integers(0, 7), one=st.booleans())
    def append(self, layer, n, one):
        keys, values = self.pair(n)
        if one and n:
            keys, values, n = keys[:1], values[:1], 1
            call = (keys[0], values[0])
        else:
            call = (keys, values)
        if not self.fits(layer, n):
            with self.refused(errors.CapacityExceededError):
                self.cache.append(layer, *call)
        elif self.as_stored(layer, keys, values) is None:  # far from an offset made of an extreme
            if self.turned:
                return  # turned back, they may fit
            with self.refused():
                self.cache.append(layer, *call)
        else:
            self.cache.append(layer, *call)
            self.write(layer, keys, values)

    @precondition(lambda self: not self.turned)  # turned back, they may or may not fit
    @rule(layer=st.integers(0, L - 1), n=st.integers(1, 4), low=st.integers(-45, 38))
    def append_extremes(self, layer, n, low):
        """Each row at a power of ten of its own, from denormal to next to the largest."""
        keys, values = self.pair(n)
        for rows in (keys, values):
            exponents = self.rng.uniform(low, 38, (n, H, 1))
            rows[...] = self.rng.uniform(-3, 3, rows.shape) * 10.0**exponents
        if not self.fits(layer, n) or self.as_stored(layer, keys, values) is None:
            with self.refused():
                self.cache.append(layer, keys, values)
        else:
            self.cache.append(layer, keys, values)
            self.write(layer, keys, values)

    @rule(
        layer=st.integers(0, L - 1),
        n=st.sampled_from(LONG),
        first=st.booleans(),
        in_keys=st.booleans(),
        bad=st.sampled_from([np.nan, np.inf, -np.inf, "range"]),
    )
    def append_refused_numbers(self, layer, n, first, in_keys, bad):
        keys, values = self.pair(n)
        if bad == "range":
            bad = 2 * FLOAT16_MAX_ROW if self.has_float16 else np.nan
        element = (0, 0, 0) if first else (n - 1, H - 1, -1)
        (keys if in_keys else values)[element] = bad
        if self.as_stored(layer, keys, values) is not None:
            return  # an automatic offset brings the only row of keys into range
        with self.refused():
            self.cache.append(layer, keys, values)

    @rule(layer=st.integers(0, L - 1), n=st.sampled_from(LONG))
    def append_refused_shapes(self, layer, n):
        keys, values = self.pair(n)
        for bad in (
            (keys, values[:-1]),
            (keys[:, :1].copy(), values[:, :1].copy()),
            (keys[..., :-1].copy(), values),
            (keys, values.astype(np.float64)),
            (keys[..., ::-1], values),
            (None, values),
        ):
            with self.refused():
                self.cache.append(layer, *bad)
        with self.refused(errors.LayerOutOfRangeError):
            self.cache.append(L, keys, values)

    @precondition(lambda self: self.limit is not None)
    @rule(layer=st.integers(0, L - 1), beyond=st.integers(1, 3))
    def append_beyond_capacity(self, layer, beyond):
        n = self.limit - self.held[layer] + beyond
        keys, values = self.pair(n)
        with self.refused(errors.CapacityExceededError):
            self.cache.append(layer, keys, values)

    @rule(layer=st.integers(0, L - 1), bad=st.sampled_from([np.nan, np.inf, "range"]))
    def push_refused(self, layer, bad):
        keys, values = self.pair(L)
        if bad == "range":
            bad = 2 * FLOAT16_MAX_ROW if self.has_float16 else np.nan
        values[layer, H - 1, -1] = bad
        with self.refused():
            self.cache.push_step(keys, values)

    @rule(n=st.integers(0, 5))
    def advance(self, n):
        if min(self.held) >= self.length + n:
            self.cache.advance(n)
            self.length += n
        else:
            with self.refused(errors.LayersOutOfStepError):
                self.cache.advance(n)

    @precondition(in_step)
    @rule(n=st.integers(1, 3))
    def push_steps(self, n):
        for _ in range(n):
            keys, values = self.pair(L)
            stored = [self.as_stored(i, keys[i : i + 1], values[i : i + 1]) for i in range(L)]
            if not self.fits(0, 1) or None in stored:
                with self.refused():
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
            keys, values = self.pair(n)
            if self.as_stored(layer, keys, values) is None:  # less an offset of an extreme
                return
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
        with self.refused():
            self.cache.truncate(self.length + beyond)

    @rule()
    def clear(self):
        self.cache.clear()
        self.set_length(0)
        if self.is_auto:
            self.offsets = [None] * L
            self.slots = [[] for _ in range(L)]
            self.writes.append((0, True))

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

    @rule()
    def edit_refused(self):
        with self.refused():
            self.cache.keep([self.length])
        with self.refused():
            self.cache.shift(1, rope=Rope(rotary_dim=2 * D))
        if not self.in_step():
            with self.refused(errors.LayersOutOfStepError):
                self.cache.keep([])
            with self.refused(errors.LayersOutOfStepError):
                self.cache.shift(1, rope=Rope())

    @precondition(in_step)
    @rule(delta=st.integers(-5, 5), part=st.floats(0, 1))
    def shift(self, delta, part):
        """No stored byte changes, and the keys that are read do."""
        start = int(part * self.length)
        before = [self.cache.k(i).astype(np.float64) for i in range(L)]
        try:
            self.cache.shift(delta, rope=Rope(), start=start)
        except (errors.NonFiniteInputError, errors.ScaleRangeError):
            return  # rotated, an extreme is out of range: the invariant sees that nothing changed
        if not delta or start == self.length:
            return
        self.turned = True
        self.writes.append((start, True))
        for i in range(L):
            expected = before[i].copy()
            with np.errstate(all="ignore"):
                expected[start:] = reference.rotate(before[i][start:].astype(np.float32), delta)
                largest = np.abs(expected).max(axis=-1, keepdims=True)
                wrong = np.abs(self.cache.k(i) - expected) > 1e-5 * largest + 1e-37
            assert not (wrong & np.isfinite(expected)).any()

    # -- snapshots

    def expected_of(self, mark):
        """The exception that a mark must raise, None for none, or any of the two where open."""
        _, length, written, identity, _ = mark
        if identity != self.identity:
            return errors.InvalidArgumentError
        below = [certain for at, certain in self.writes[written:] if at < length]
        if any(below):
            return errors.StaleSnapshotError
        return "open" if below else None

    @rule(target=marks)
    def snapshot(self):
        handle = self.cache.snapshot()
        mark = handle, self.length, len(self.writes), self.identity, bool(self.ahead())
        self.recent.append(mark)
        return mark

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
            with self.refused(expected):
                self.cache.restore(handle)
        else:
            self.cache.restore(handle)
            self.set_length(length)

    @rule(target=detached, mark=consumes(marks))
    def detach(self, mark):
        handle, length, _, identity, pending = mark
        expected = self.expected_of(mark)
        if identity != self.identity or expected == "open":
            return multiple()
        if expected is None and pending:
            expected = errors.LayersOutOfStepError
        if expected:
            with self.refused(expected):
                handle.detach()
            return multiple()
        offsets = [offset if length else None for offset in self.offsets]
        return handle.detach(), [list(slots[:length]) for slots in self.slots], offsets

    @rule(saved=detached)
    def restore_detached(self, saved):
        handle, slots, offsets = saved
        self.cache.restore(handle)
        self.slots = [list(layer) for layer in slots]
        self.set_length(len(slots[0]))
        self.writes.append((0, len(slots[0]) > 0))
        self.offsets = list(offsets) if slots[0] else self.offsets_now()

    def offsets_now(self):
        """The offsets of empty layers, which the specification leaves open."""
        return [self.cache.layer(i).key_offset for i in range(L)]

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]))
    def go_on_with_a_copy(self, how):
        self.cache = how(self.cache)
        self.identity += 1
        self.slots = [self.slots[i][: self.held[i]] for i in range(L)]
        self.offsets = [
            self.offsets[i] if self.held[i] else now for i, now in enumerate(self.offsets_now())
        ]

    @rule(mmap=st.booleans())
    def go_on_with_a_saved_file(self, mmap):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "session")
            if not self.in_step():
                with self.refused(errors.LayersOutOfStepError):
                    self.cache.save(path)
                assert not path.exists()
                return
            self.cache.save(path)
            self.cache = KVCache.load(path, mmap=mmap)
        self.identity += 1
        self.slots = [self.slots[i][: self.held[i]] for i in range(L)]
        if not self.length:
            self.offsets = self.offsets_now()

    # -- what must hold at any time

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        assert self.cache.is_empty == (self.length == 0)
        for i in range(L):
            layer, held = self.cache.layer(i), self.held[i]
            assert len(layer) == held
            arrays = (layer.key_codes, layer.value_codes, layer.key_scales, layer.value_scales)
            for which, array in enumerate(arrays):
                expected = b"".join(token[which] for token in self.slots[i][:held])
                assert np.asarray(array).tobytes() == expected
            if held and self.offsets[i] is not None:
                np.testing.assert_array_equal(layer.key_offset, self.offsets[i])

    @rule(layer=st.integers(0, L - 1))
    def attend(self, layer):
        if self.held[layer] == 0:
            return
        query = self.rows(2 * H, D)
        keys, values = self.cache.k(layer), self.cache.v(layer)
        out = self.cache.attend(layer, query)
        assert_well_formed(out)
        offset = self.offsets[layer]
        largest = max(np.abs(keys).max(), 0 if offset is None else np.abs(offset).max())
        if largest < 10 and np.abs(values).max() < 10:
            ref, _ = reference.attention(query, keys, values)
            np.testing.assert_allclose(out, ref, rtol=0, atol=2e-3)


class GroupedCacheMachine(CacheMachine):
    options = MappingProxyType({"group_size": 3})


class Float16ScalesCacheMachine(CacheMachine):
    options = MappingProxyType({"scale_dtype": "float16"})


class AutoOffsetCacheMachine(CacheMachine):
    options = MappingProxyType({"key_offset": "auto"})


class AutoOffsetFloat16CacheMachine(CacheMachine):
    options = MappingProxyType({"key_offset": "auto", "scale_dtype": "float16", "group_size": 3})


class Float32CacheMachine(CacheMachine):
    dtype = "float32"


class WideValuesCacheMachine(CacheMachine):
    options = MappingProxyType({"value_head_dim": 7, "group_size": 5, "key_offset": "auto"})


steps = settings(max_examples=max(10, settings.default.max_examples // 2), stateful_step_count=60)
TestInt8Cache = CacheMachine.TestCase
TestGroupedCache = GroupedCacheMachine.TestCase
TestFloat16ScalesCache = Float16ScalesCacheMachine.TestCase
TestAutoOffsetCache = AutoOffsetCacheMachine.TestCase
TestAutoOffsetFloat16Cache = AutoOffsetFloat16CacheMachine.TestCase
TestFloat32Cache = Float32CacheMachine.TestCase
TestWideValuesCache = WideValuesCacheMachine.TestCase
for machine in (
    TestInt8Cache,
    TestGroupedCache,
    TestFloat16ScalesCache,
    TestAutoOffsetCache,
    TestAutoOffsetFloat16Cache,
    TestFloat32Cache,
    TestWideValuesCache,
):
    machine.settings = steps
del machine  # else it is collected as one more test
