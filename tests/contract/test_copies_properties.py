"""A cache, its copies and a list of its tokens, whatever is done to all of them."""

from __future__ import annotations

import copy
import pickle
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.precise import rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvedge import KVCache, KvCacheSnapshot, Rope, errors
from kvedge.core import memory

H, D = 2, 32
STORAGE = [
    {"dtype": "int8", "key_scale": "auto"},
    {"dtype": "int8", "key_scale": "auto", "key_offset": "auto", "recent": 20, "sinks": 3},
    {"dtype": "int8", "recent": 7, "recent_dtype": "bfloat16", "key_scale": "auto"},
    {"dtype": "kivi8", "value_dtype": "int8", "value_rotation": True},
    {"dtype": "kivi4", "recent": 96, "sinks": 4},
    {"dtype": "kivi8"},
    {"dtype": "int8", "value_dtype": "kivi8", "key_scale": "auto", "key_offset": "auto"},
    {"dtype": "int4", "recent": 32, "sinks": 4, "key_scale": "auto", "scale_dtype": "float16"},
    {"dtype": "q8_0", "key_scale": "auto", "sinks": 5},
    {"dtype": "fp8_e4m3", "key_scale": "auto"},
    {"dtype": "float16", "recent": 9, "recent_dtype": "float32"},
    {"dtype": "kivi4", "recent": 40, "recent_dtype": "bfloat16"},
    {"dtype": "int8", "key_dtype": "kivi4", "scale_dtype": "float16", "recent": 12},
    {"dtype": "fp8_e5m2", "value_dtype": "kivi8", "key_scale": "auto", "recent": 40},
]
SHAPE = ("num_kv_heads", "head_dim", "layers")
ALLOCATING = ("empty", "empty_like", "zeros", "zeros_like", "concatenate", "stack", "array")


@contextmanager
def no_memory_from(n):
    """Refuse all memory from the n-th request on."""
    left = [n]

    def refusing(function):
        def asked(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError
            return function(*args, **kwargs)

        return asked

    of_numpy = {name: refusing(getattr(np, name)) for name in ALLOCATING}
    with (
        mock.patch.multiple(np, **of_numpy),
        mock.patch.object(memory, "_reserve", refusing(memory._reserve)),
    ):
        yield


def saved(cache, mmap):
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder, "cache"))
        return KVCache.load(Path(folder, "cache"), mmap=mmap)


def restored(cache, snapshot, options):
    other = KVCache(**options)
    other.restore(snapshot)
    return other


def injected(cache, options):
    other = KVCache(**options)
    other.inject(cache)
    return other


WAYS = {
    "copy": lambda cache, _: cache.copy(),
    "deepcopy": lambda cache, _: copy.deepcopy(cache),
    "pickle": lambda cache, _: pickle.loads(pickle.dumps(cache)),
    "detached": lambda cache, made: restored(cache, cache.snapshot().detach(), made),
    "pickled snapshot": lambda cache, made: restored(
        cache, pickle.loads(pickle.dumps(cache.snapshot().detach())), made
    ),
    "file": lambda cache, _: saved(cache, False),
    "mapped file": lambda cache, _: saved(cache, True),
    "bytes": lambda cache, made: restored(
        cache, KvCacheSnapshot.from_bytes(cache.snapshot().to_bytes()), made
    ),
    "extract": lambda cache, _: cache.extract(),
    "inject": injected,
}
OF_WHOLE = ("extract", "inject")  # refused where tokens have gone
OF_FILES = ("file", "mapped file", "bytes")


def contents(cache):
    """All that is to be the same."""
    made = [len(cache)]
    for i in range(cache.num_layers):
        layer = cache.layer(i)
        arrays = [cache.k(i), cache.v(i), layer.key_codes, layer.value_codes]
        arrays += [layer.key_scales, layer.value_scales]
        if len(layer) >= ((layer.num_dropped and layer.window) or 1):
            n = 1 if layer.window else min(3, len(layer))
            query = np.random.default_rng(1).standard_normal((n, 4, D))
            arrays += [cache.attend(i, query.astype(np.float32))]
            arrays += [each for each in (layer.key_scale, layer.key_offset) if each is not None]
        made.append([layer.num_dropped, *(np.asarray(array).tobytes() for array in arrays)])
    return made


class CopiesMachine(RuleBasedStateMachine):
    """A cache and copies of it, all of which every call goes to; and a list of its tokens.

    The second layer may have a window; `tokens` are those of the first one, which has evicted
    `gone` before them, at `evicted_at` the last time.
    """

    @initialize(
        storage=st.sampled_from(STORAGE),
        window=st.sampled_from([None, None, 1, 8, 40]),
        seed=st.integers(0, 1 << 30),
    )
    def start(self, storage, window, seed):
        self.rng = np.random.default_rng(seed)
        layers = [{}, {} if window is None else {"window": window, "sinks": 0}]
        self.made = dict(zip(SHAPE, (H, D, layers), strict=True)) | storage
        self.window = window
        self.caches = [KVCache(**self.made)]
        self.forget()

    def forget(self):
        self.tokens = np.zeros((2, 0, H, D), np.float32)
        self.gone, self.evicted_at = 0, 0

    def new_rows(self, n):
        made = self.rng.standard_normal((2, n, H, D)).astype(np.float32)
        if self.made.get("key_scale"):
            made[0, ..., 3] += 8
        return made

    def each(self, memory_from, name, *args, **kwargs):
        """Let all caches do it, the first one perhaps once memory has run out in the middle."""
        done = 0
        if memory_from is not None:
            before = contents(self.caches[0])
            try:
                with no_memory_from(memory_from):
                    getattr(self.caches[0], name)(*args, **kwargs)
                done = 1
            except errors.OutOfMemoryError:
                assert contents(self.caches[0]) == before
        for cache in self.caches[done:]:
            getattr(cache, name)(*args, **kwargs)

    refusals = st.none() | st.integers(0, 2) | st.integers(0, 12)

    @rule(n=st.sampled_from([1, 1, 2, 5, 7, 10, 31, 64, 130, 200, 350]), memory_from=refusals)
    def append(self, n, memory_from):
        new = self.new_rows(n)
        for i in range(2):
            self.each(memory_from, "append", i, *new)
        self.each(None, "advance", n)
        self.tokens = np.concatenate([self.tokens, new], axis=1)

    @rule(n=st.integers(1, 3), memory_from=refusals)
    def push(self, n, memory_from):
        for _ in range(n):
            new = self.new_rows(1)
            self.each(memory_from, "push_step", *new.repeat(2, axis=1))
            self.tokens = np.concatenate([self.tokens, new], axis=1)

    @property
    def length(self):
        return self.gone + self.tokens.shape[1]

    @property
    def is_whole(self):
        return self.window is None and not self.gone

    def can_go_to(self, n):
        gone = self.caches[0].layer(1).num_dropped
        return n >= self.evicted_at and (not gone or not self.window or n - gone >= self.window - 1)

    @rule(back=st.sampled_from([0, 1, 2, 4, 9, 20, 64, 65, 100, 150, 500]), memory_from=refusals)
    def truncate(self, back, memory_from):
        n = max(0, self.length - back)
        if not n or self.can_go_to(n):
            self.each(memory_from, "truncate", n)
            self.tokens = self.tokens[:, : max(n - self.gone, 0)]
            if not n:
                self.forget()

    @rule(back=st.integers(0, 200))
    def back_and_forth(self, back):
        n = max(0, self.length - back)
        if n and self.can_go_to(n):
            for cache in self.caches:
                mark = cache.snapshot()
                cache.truncate(n)
                cache.restore(mark)

    @precondition(lambda self: not self.gone and not self.caches[0].layer(1).num_dropped)
    @rule(data=st.data(), memory_from=refusals, delta=st.integers(-3, 3))
    def keep(self, data, memory_from, delta):
        n = self.tokens.shape[1]
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        kept = np.r_[0:start, stop:n]
        self.each(memory_from, "keep", kept)
        self.tokens = self.tokens[:, kept]
        self.shift(delta, start, None, memory_from)

    @precondition(lambda self: not self.gone)
    @rule(
        delta=st.integers(-50, 50),
        start=st.integers(0, 99),
        n=st.integers(0, 99) | st.none(),
        memory_from=refusals,
    )
    def shift(self, delta, start, n, memory_from):
        end = self.tokens.shape[1]
        start = min(start, end)
        stop = end if n is None else min(start + n, end)
        self.each(memory_from, "shift", delta, rope=Rope(D), start=start, stop=stop)
        self.tokens[0, start:stop] = Rope(D).rotate(self.tokens[0, start:stop], delta)

    @rule(back=st.integers(0, 99), n=st.integers(32, 150), memory_from=refusals)
    def evict(self, back, n, memory_from):
        """Tokens before the last ones, in whole runs."""
        held = self.tokens.shape[1]
        stop = max(held - 160 - back, 0) // 32 * 32  # the last 160 stay in any format
        start = max(stop - n // 32 * 32, 0)
        if start == stop or self.caches[0].layer(0).num_dropped % 32:
            return
        kept = np.r_[0:start, stop:held]
        try:
            self.each(memory_from, "evict", 0, kept)
        except errors.InvalidArgumentError as error:
            assert "shift" in str(error)
            return
        self.evicted_at = self.length
        self.gone, self.tokens = self.gone + stop - start, self.tokens[:, kept]

    @rule(storage=st.sampled_from(STORAGE))
    def requantize(self, storage):
        if self.window is None or "sinks" not in storage:
            self.each(None, "requantize", **storage)
            self.made = {**{name: self.made[name] for name in SHAPE}, **storage}

    @precondition(lambda self: self.is_whole)
    @rule(start=st.integers(0, 200), n=st.integers(0, 200))
    def extract(self, start, n):
        start = min(start, self.length)
        self.tokens = self.tokens[:, start : start + n]
        stop = start + self.length
        self.caches = [cache.extract(start, stop) for cache in self.caches]

    @rule(memory_from=refusals, sure=st.integers(0, 5))
    def clear(self, memory_from, sure):
        if sure:
            return
        self.each(memory_from, "clear")
        self.forget()

    @precondition(lambda self: self.is_whole)
    @rule(start=st.floats(0, 1), n=st.integers(0, 70), memory_from=refusals, mine=st.booleans())
    def inject(self, start, n, memory_from, mine):
        at = int(start * self.tokens.shape[1])
        if "kivi" in str(self.made):
            at, n = at // 32 * 32, n // 32 * 32
        n = min(n, self.tokens.shape[1]) if mine else n
        new = self.tokens[:, :n] if mine else self.new_rows(n)
        if mine:
            other = self.caches[0].extract(0, n)
        else:
            other = KVCache(**self.made)
            for i in range(2):
                other.append(i, *new)
            other.advance(n)
        self.each(memory_from, "inject", other, at, requantize=not mine)
        self.tokens = np.concatenate([self.tokens[:, :at], new, self.tokens[:, at + n :]], axis=1)

    @rule(way=st.sampled_from(list(WAYS)), goes_on=st.booleans())
    def copied(self, way, goes_on):
        if way in OF_WHOLE and not self.is_whole:
            return
        made = WAYS[way](self.caches[0], self.made)
        self.caches = [*self.caches[:2], made][-3:]
        if goes_on:
            self.caches.reverse()

    @invariant()
    def are_the_same(self):
        if not hasattr(self, "caches"):
            return
        first = contents(self.caches[0])
        for other in self.caches[1:]:
            assert contents(other) == first

    @invariant()
    def holds_its_tokens(self):
        if not hasattr(self, "caches"):
            return
        read = np.stack([self.caches[0].k(0), self.caches[0].v(0)])
        assert read.shape == self.tokens.shape
        error = np.abs(read - self.tokens).mean(axis=(2, 3))  # 1.1 from another token
        assert (error < [[1.0], [0.5]]).all()


TestCopies = CopiesMachine.TestCase
TestCopies.settings = settings(
    max_examples=max(80, settings.default.max_examples), stateful_step_count=25
)


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8_e4m3", "q8_0", "kivi4"])
@pytest.mark.parametrize(
    ("parts", "sizes", "back"),
    [
        ({}, (7, 10), 13),
        ({}, (7, 20), 5),
        ({"recent": 20}, (200, 150), 210),
        ({"recent": 96, "sinks": 4}, (200, 150), 200),
    ],
)
def test_a_copy_goes_back_and_on_as_its_original(dtype, parts, sizes, back):
    made = {"num_layers": 1, "num_kv_heads": H, "head_dim": D, "dtype": dtype, **parts}
    if dtype != "kivi4":
        made["key_scale"] = "auto"
    tokens, cache, at = rows(3, sum(sizes) + 40, D), KVCache(**made), 0
    tokens[0, ..., 3] += 20
    for n in (*sizes, 40):
        if n == 40:
            caches = [cache, *(way(cache, made) for way in WAYS.values())]
            for each in caches:
                each.truncate(back)
            caches += [way(cache, made) for way in WAYS.values()]
            for each in caches[1:]:
                assert contents(each) == contents(cache)
        for each in caches if n == 40 else [cache]:
            each.append(0, *tokens[:, at : at + n])
            each.advance(n)
        at += n
    for each in caches[1:]:
        assert contents(each) == contents(cache)


@pytest.mark.parametrize("storage", STORAGE, ids=str)
def test_a_context_shift_keeps_the_last_tokens_as_they_are(storage):
    cache, new = KVCache(1, H, D, **storage), rows(4, 301, D)
    cache.append(0, *new)
    cache.advance(301)
    kept = np.r_[0:4, 104:301]
    last = slice(-max(cache.recent, 1), None)
    before = cache.k(0)[last], cache.v(0)[last]
    cache.keep(kept)
    np.testing.assert_array_equal(cache.k(0)[last], before[0])
    np.testing.assert_array_equal(cache.v(0)[last], before[1])
    cache.push_step(*new[:, :1])
    assert len(cache) == 202
