"""Random operations on a PagedKvCache against a dictionary of token lists, in a pool too small."""

import zlib
from collections import Counter
from functools import cache as remembered

import numpy as np
import pytest
import reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvedge import KvBlockPool, PagedKvCache, errors

L, H, D = 2, 2, 4
NUM_BLOCKS, BLOCK = 12, 4
SCALES = {"int8": "float16", "float32": "float32"}


@remembered
def row(layer, prefix):
    """Key and value (2, H, D) of a token, which depend on it and all before it, as in a model."""
    seed = zlib.crc32(bytes([layer, *prefix]))
    return np.random.default_rng(seed).standard_normal((2, H, D), dtype=np.float32)


@remembered
def stored_row(dtype, layer, prefix):
    """What the cache gives back for it."""
    if dtype == "float32":
        return row(layer, prefix)
    codes, scales = reference.quantize(row(layer, prefix), scale_dtype="float16")
    return reference.dequantize(codes, scales, dtype=np.float32)


def rows(layer, ids, start, stop):
    made = [row(layer, tuple(ids[: t + 1])) for t in range(start, stop)]
    return np.array(made, np.float32).reshape(-1, 2, H, D).swapaxes(0, 1).copy()


class Model:
    """One sequence: its token ids, how many are committed, and how many each layer holds."""

    def __init__(self, ids=(), length=0):
        self.ids = list(ids[:length])
        self.length = length
        self.held = [length] * L

    def go_to(self, ids, length):
        self.__init__(ids, length)


class PagedMachine(RuleBasedStateMachine):
    """The model holds token ids; keys and values follow from them, whatever blocks are shared."""

    dtype = "int8"

    @initialize()
    def start(self):
        self.pool = KvBlockPool(NUM_BLOCKS, BLOCK, L, H, D, self.dtype)
        self.cache = PagedKvCache(self.pool)
        self.models = {}
        self.snapshots = []  # (PagedSnapshot, its table, token ids)
        self.lent = Counter()
        self.dropped = []

    # -- helpers

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.models)))

    def blocks_wanted(self, seq, start, stop):
        """Free blocks that writing tokens `start` to `stop` needs."""
        model, table = self.models[seq], self.cache.block_table(seq)
        wanted = max(0, -(-stop // BLOCK) - len(table))
        last, used = divmod(model.length, BLOCK)
        if used and start // BLOCK == last:  # a block of others as well is copied first
            wanted += self.pool.reference_counts[table[last]] > 1
        return wanted

    # -- operations

    @rule()
    def new_sequence(self):
        self.models[self.cache.new_sequence()] = Model()

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(0, 9), layer=st.integers(0, L - 1))
    def append(self, data, n, layer):
        seq = self.pick(data)
        model = self.models[seq]
        start = model.held[layer]
        ids = list(model.ids)
        while len(ids) < start + n:
            ids.append(data.draw(st.integers(0, 1)))
        keys, values = rows(layer, ids, start, start + n)
        free, cached = self.pool.free_count, self.pool.cached_count
        if n and self.blocks_wanted(seq, start, start + n) > free:
            with pytest.raises(errors.CapacityExceededError):
                self.cache.append(seq, layer, keys, values)
            assert (self.pool.free_count, self.pool.cached_count) == (free, cached)
            return
        if n == 1 and data.draw(st.booleans()):
            keys, values = keys[0], values[0]
        self.cache.append(seq, layer, keys, values)
        model.ids = ids
        model.held[layer] = start + n

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(1, 9))
    def append_bad(self, data, n):
        seq = self.pick(data)
        before = self.pool.free_count, self.pool.cached_count
        keys, values = np.ones((2, n, H, D), np.float32)
        values[n - 1, H - 1, D - 1] = np.nan
        with pytest.raises((errors.NonFiniteInputError, errors.CapacityExceededError)):
            self.cache.append(seq, 0, keys, values)
        assert (self.pool.free_count, self.pool.cached_count) == before

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(0, 9))
    def tokens(self, data, n):
        """A whole step of a model: every layer, then advance."""
        seq = self.pick(data)
        model = self.models[seq]
        while len(model.ids) < model.length + n:
            model.ids.append(data.draw(st.integers(0, 1)))
        stop = model.length + n
        try:
            for layer in range(L):
                start = model.held[layer]
                if start < stop:
                    self.cache.append(seq, layer, *rows(layer, model.ids, start, stop))
                    model.held[layer] = stop
        except errors.CapacityExceededError:
            return
        self.cache.advance(seq, n)
        model.length = stop

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(0, 9))
    def advance(self, data, n):
        seq = self.pick(data)
        model = self.models[seq]
        if min(model.held) >= model.length + n:
            self.cache.advance(seq, n)
            model.length += n
        else:
            with pytest.raises(errors.LayersOutOfStepError):
                self.cache.advance(seq, n)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), part=st.floats(0, 1))
    def truncate(self, data, part):
        seq = self.pick(data)
        model = self.models[seq]
        n = int(part * model.length)
        self.cache.truncate(seq, n)
        model.go_to(model.ids, n)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def fork(self, data):
        model = self.models[seq := self.pick(data)]
        self.models[self.cache.fork(seq)] = Model(model.ids, model.length)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def drop(self, data):
        seq = self.pick(data)
        self.cache.drop(seq)
        del self.models[seq]
        self.dropped.append(seq)

    @precondition(lambda self: self.dropped)
    @rule(data=st.data())
    def use_after_drop(self, data):
        seq = data.draw(st.sampled_from(self.dropped))
        for call in (self.cache.drop, self.cache.fork, self.cache.block_table, self.cache.advance):
            with pytest.raises(errors.UnknownSequenceError):
                call(seq)

    # -- snapshots

    @precondition(lambda self: self.models and len(self.snapshots) < 4)
    @rule(data=st.data())
    def snapshot(self, data):
        seq = self.pick(data)
        model = self.models[seq]
        table = self.cache.block_table(seq)[: -(-model.length // BLOCK)]
        self.snapshots.append((self.cache.snapshot(seq), table, model.ids[: model.length]))

    @precondition(lambda self: self.models and self.snapshots)
    @rule(data=st.data())
    def restore(self, data):
        seq = self.pick(data)
        # By its number: Hypothesis would hold on to a snapshot, and so to its blocks.
        snapshot, _, ids = self.snapshots[data.draw(st.integers(0, len(self.snapshots) - 1))]
        self.cache.restore(seq, snapshot)
        self.models[seq].go_to(ids, len(ids))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), explicit=st.booleans())
    def release(self, data, explicit):
        i = data.draw(st.integers(0, len(self.snapshots) - 1))
        snapshot = self.snapshots.pop(i)[0]
        if explicit:
            snapshot.release()

    # -- prefixes

    @precondition(lambda self: self.models)
    @rule(data=st.data(), part=st.floats(0, 1))
    def register(self, data, part):
        seq = self.pick(data)
        model = self.models[seq]
        self.cache.register(seq, model.ids[: int(part * model.length)])

    @rule(data=st.data())
    def match_prefix(self, data):
        known = [model.ids for model in self.models.values()] or [[]]
        ids = data.draw(st.sampled_from(known)) + data.draw(st.lists(st.integers(0, 1)))
        seq, n = self.cache.match_prefix(ids)
        assert n % BLOCK == 0 and n <= len(ids)
        self.models[seq] = Model(ids, n)

    @rule()
    def forget_prefixes(self):
        self.pool.forget_prefixes()
        assert self.pool.cached_count == 0

    # -- blocks of the user's own, and copies

    @rule(n=st.integers(0, 4))
    def allocate(self, n):
        if n > self.pool.free_count:
            with pytest.raises(errors.CapacityExceededError):
                self.pool.allocate(n)
        else:
            self.lent.update(self.pool.allocate(n).tolist())

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data):
        block = data.draw(st.sampled_from(sorted(self.lent)))
        self.pool.free([block])
        self.lent -= Counter([block])

    @rule(block=st.integers(-1, NUM_BLOCKS))
    def free_what_is_not_held(self, block):
        if not self.lent[block]:
            with pytest.raises(errors.BlockNotHeldError):
                self.pool.free([block])

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def copy_out_and_in(self, data):
        seq = self.pick(data)
        model = self.models[seq]
        copy = self.cache.to_kv_cache(seq)
        assert len(copy) == model.length
        try:
            twin = self.cache.from_kv_cache(copy)
        except errors.CapacityExceededError:
            assert self.pool.free_count < -(-model.length // BLOCK)
            return
        self.models[twin] = Model(model.ids, model.length)

    # -- attention

    @precondition(lambda self: any(min(model.held) for model in self.models.values()))
    @rule(data=st.data(), layer=st.integers(0, L - 1), seed=st.integers(0, 99))
    def attend(self, data, layer, seed):
        able = [seq for seq, model in sorted(self.models.items()) if model.held[layer]]
        seqs = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=5))
        rng = np.random.default_rng(seed)
        query = rng.standard_normal((len(seqs), 2 * H, D), dtype=np.float32)
        together = self.cache.attend_batch(seqs, layer, query)
        for seq, one, out in zip(seqs, query, together, strict=True):
            keys, values = self.expected(seq, layer)
            exact, _ = reference.attention(one, keys, values)
            assert np.abs(out - exact).max() <= reference.TOLERANCE * np.abs(exact).max()
            assert np.abs(out - self.cache.attend(seq, layer, one)).max() <= 1e-5

    # -- what always holds

    def expected(self, seq, layer):
        model = self.models[seq]
        made = [
            stored_row(self.dtype, layer, tuple(model.ids[: t + 1]))
            for t in range(model.held[layer])
        ]
        return np.array(made, np.float32).reshape(-1, 2, H, D).swapaxes(0, 1)

    @invariant()
    def every_sequence_holds_its_tokens(self):
        assert self.cache.sequences == tuple(self.models)
        assert self.cache.context_lens.tolist() == [m.length for m in self.models.values()]
        for seq in self.models:
            for layer in range(L):
                keys, values = self.expected(seq, layer)
                np.testing.assert_array_equal(self.cache.k(seq, layer), keys)
                np.testing.assert_array_equal(self.cache.v(seq, layer), values)

    @invariant()
    def every_block_is_owned_or_free(self):
        owners = Counter(self.lent)
        for seq, model in self.models.items():
            table = self.cache.block_table(seq).tolist()
            assert len(set(table)) == len(table)
            assert -(-max(model.held) // BLOCK) == len(table)
            owners.update(table)
        for _, table, _ in self.snapshots:
            owners.update(table.tolist())
        counts = self.pool.reference_counts
        assert counts.tolist() == [owners[block] for block in range(NUM_BLOCKS)]
        assert self.pool.free_count == np.count_nonzero(counts == 0)
        assert 0 <= self.pool.cached_count <= self.pool.free_count
        assert self.pool.utilization == self.pool.used_count / NUM_BLOCKS

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for seq in self.cache.sequences:
            self.cache.drop(seq)
        self.snapshots.clear()
        for block, times in self.lent.items():
            for _ in range(times):
                self.pool.free([block])
        assert self.pool.free_count == NUM_BLOCKS
        assert self.pool.allocate(NUM_BLOCKS).tolist() != []  # cached ones make room
        assert self.pool.cached_count == 0


class Float32Machine(PagedMachine):
    dtype = "float32"


PagedMachine.TestCase.settings = settings(stateful_step_count=60)
Float32Machine.TestCase.settings = settings(stateful_step_count=60)
TestPagedInt8 = PagedMachine.TestCase
TestPagedFloat32 = Float32Machine.TestCase
