"""What tests share of layers and caches whose first or last tokens are in another format."""

from __future__ import annotations

import pickle

import numpy as np
from helpers.reference import attention
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvedge import KVCache
from kvedge.core.formats import IN_RUNS
from kvedge.core.registry import layer_types

HEADS, DIM = 2, 24
DRAFT = 64  # tokens that may be taken back without a trace
# Keys and values: one side in runs, the other in rows beside them.
BESIDE_ROWS = ["kivi4/int8", "kivi2/float32", "int8/kivi4", "fp8_e4m3/kivi8", "int4/kivi2"]
# Options of attend, each of which sees other tokens, or sees them otherwise, of 190.
ATTENDS = [
    {},
    {"window": 45},
    {"window": 3},
    {"window": 9, "sink_tokens": 37},
    {"start": 45, "sink_tokens": 3, "window": 30},
    {"start": 189},
    {"softcap": 2.0, "precision_bits": 24},
    {"causal": False, "scale": -0.3},
]


def rows(seed, tokens, dim=DIM, size=1.0):
    """Keys and values, (2, tokens, HEADS, dim)."""
    rng = np.random.default_rng(seed)
    return size * rng.standard_normal((2, tokens, HEADS, dim)).astype(np.float32)


def layer_of(dtype, **options):
    """A layer of a format, or of two: "kivi4/int8"."""
    keys, _, values = dtype.partition("/")
    if values:
        options["value_dtype"] = values
    return layer_types[keys](None, HEADS, DIM, **options)


def read(layer):
    return np.stack([layer.keys(), layer.values()])


def read_by(layer, tokens, num_rows):
    """What query rows at the end read of tokens, the last `num_rows` or more appended at once."""
    made, start = read(layer), max(0, len(layer) - layer.recent - (num_rows - 1))
    precise = layer_of(layer.recent_dtype)
    precise.extend(*tokens[:, start:])
    made[:, start:] = read(precise)
    return made


def bits(layer):
    """All that two equal layers have in common."""
    query = np.random.default_rng(1).standard_normal((4, DIM)).astype(np.float32)
    return read(layer).tobytes(), layer.attend(query).tobytes(), layer.scores(query).tobytes()


def cache_of(tokens, layers, **options):
    """A cache that holds the same tokens in each of its layers."""
    cache = KVCache(layers, HEADS, DIM, **options)
    for i in range(layers):
        cache.append(i, *tokens)
    cache.advance(tokens.shape[1])
    return cache


def cache_bits(cache):
    return [bits(cache.layer(i)) for i in range(cache.num_layers)]


class PartsMachine(RuleBasedStateMachine):
    """Anything in any order: a layer against a list of its tokens.

    `base`: from here on last tokens are precise, if so many. `first`: up to here first ones are.
    `anew`: how often stored tokens may have been encoded again.
    """

    def begin(self, layer):
        self.layer, self.seed = layer, 0
        self.forget()

    def forget(self):
        self.tokens, self.base, self.first, self.anew = rows(0, 0), 0, 0, 1

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 31, 64, 130, 400]))
    def extend(self, n):
        self.seed += 1
        if self.first == self.tokens.shape[1]:
            sinks = self.layer.sinks - self.layer.num_dropped
            self.first = max(self.first, min(self.first + n, sinks))
        new = rows(self.seed, n)
        self.layer.extend(*new)
        self.tokens = np.concatenate([self.tokens, new], axis=1)
        self.base = max(self.base, self.tokens.shape[1] - self.layer.recent - DRAFT)

    @rule(back=st.integers(0, 200))
    def truncate(self, back):
        n = max(0, len(self.layer) - back)
        self.layer.truncate(n)
        self.tokens = self.tokens[:, :n]
        self.base, self.first = min(self.base, n), min(self.first, n)
        self.anew += back > DRAFT

    @rule(n=st.integers(0, 50))
    def drop_first(self, n):
        n = min(n, len(self.layer))
        self.layer.drop_first(n)
        self.tokens = self.tokens[:, n:]
        self.base, self.first = max(0, self.base - n), max(0, self.first - n)

    @precondition(lambda self: self.tokens.shape[1] > 3)
    @rule(data=st.data())
    def keep(self, data):
        gone = data.draw(st.sets(st.integers(0, len(self.layer) - 1), max_size=9))
        kept = np.array([t for t in range(len(self.layer)) if t not in gone], np.int64)
        self.layer.keep(kept)
        self.tokens = self.tokens[:, kept]
        self.base, self.first = int((kept < self.base).sum()), int((kept < self.first).sum())
        if {self.layer.dtype, self.layer.value_dtype} & {*IN_RUNS}:
            self.base, self.anew = len(kept), self.anew + 1

    @rule(how=st.sampled_from([lambda x: x.copy(), lambda x: pickle.loads(pickle.dumps(x))]))
    def other(self, how):
        self.layer = how(self.layer)

    @rule()
    def clear(self):
        self.layer.clear()
        self.forget()

    @invariant()
    def holds_them(self):
        if not hasattr(self, "layer"):
            return
        n, got = self.tokens.shape[1], read(self.layer)
        assert len(self.layer) == n
        self.is_read_as(got, n)
        if n:
            query = np.ones((HEADS, DIM), np.float32)
            wanted, _ = attention(query[None], *got)
            np.testing.assert_allclose(
                self.layer.attend(query), wanted[0], atol=2e-4 * np.abs(wanted).max()
            )
