"""Random operations on two PagedKvCaches over one pool, too small, against lists of token ids.

The model knows the token ids of each sequence, and keys and values follow from these. It knows who
owns which block: sequences, snapshots, and blocks allocated beside. Refused calls of every kind
come in between and must change nothing.
"""

import zlib
from collections import Counter
from functools import cache as remembered

import numpy as np
import pytest
import reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvedge import KvBlockPool, KVCache, PagedKvCache, errors

L, H, D = 2, 2, 4
NUM_BLOCKS, BLOCK = 12, 4
NORMAL = None
EXTREME = (-44.0, 38.4)  # decimal exponents of rows: denormal to the largest float32
FLOAT16_SCALES = (-44.0, 6.9)  # to 65504 * 127


@remembered
def row(layer, prefix, magnitudes=NORMAL):
    """Key and value (2, H, D) of a token, which depend on it and all before it, as in a model."""
    rng = np.random.default_rng(zlib.crc32(bytes([layer, *prefix])))
    made = rng.standard_normal((2, H, D), dtype=np.float32)
    if magnitudes is not NORMAL:  # one for each head, so that a token mixes them
        unit = made / np.abs(made).max(-1, keepdims=True)
        powers = 10.0 ** rng.uniform(*magnitudes, (2, H, 1))
        made = (unit * powers).astype(np.float32)
    return made


@remembered
def stored_row(dtype, scale_dtype, layer, prefix, magnitudes):
    """What the cache gives back for it."""
    made = row(layer, prefix, magnitudes)
    if dtype == "float32":
        return made
    codes, scales = reference.quantize(made, scale_dtype=scale_dtype)
    with np.errstate(over="ignore"):
        return reference.dequantize(codes, scales, dtype=np.float32)


class Model:
    """One sequence: its token ids, how many are committed, and how many each layer holds."""

    def __init__(self, cache, ids=(), length=0):
        self.cache = cache
        self.go_to(ids, length)

    def go_to(self, ids, length):
        self.ids = list(ids[:length])
        self.length = length
        self.held = [length] * L

    @property
    def is_pending(self):
        return max(self.held) > self.length


class PagedMachine(RuleBasedStateMachine):
    """The model holds token ids; keys and values follow from them, whatever blocks are shared."""

    dtype, scale_dtype, magnitudes = "int8", "float16", NORMAL

    @initialize()
    def start(self):
        self.pool = KvBlockPool(NUM_BLOCKS, BLOCK, L, H, D, self.dtype, self.scale_dtype)
        self.caches = [PagedKvCache(self.pool), PagedKvCache(self.pool)]
        self.models = {}
        self.snapshots = []  # (PagedSnapshot, its table, token ids)
        self.lent = Counter()
        self.dropped = []
        self.is_any_registered = False

    # -- helpers

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.models)))

    def of(self, seq):
        return self.models[seq].cache

    def pick_cache(self, data):
        return self.caches[data.draw(st.integers(0, 1))]

    def rows(self, layer, ids, start, stop):
        made = [row(layer, tuple(ids[: t + 1]), self.magnitudes) for t in range(start, stop)]
        return np.array(made, np.float32).reshape(-1, 2, H, D).swapaxes(0, 1).copy()

    def blocks_wanted(self, seq, start, stop):
        """Free blocks that writing tokens `start` to `stop` needs."""
        model, table = self.models[seq], self.of(seq).block_table(seq)
        wanted = max(0, -(-stop // BLOCK) - len(table))
        last, used = divmod(model.length, BLOCK)
        if used and start // BLOCK == last:  # a block of others as well is copied first
            wanted += self.pool.reference_counts[table[last]] > 1
        return wanted

    def everything(self):
        """All that a refused call must leave as it is."""
        pool, held = self.pool, []
        for seq, model in self.models.items():
            cache = model.cache
            rows = [(cache.k(seq, i).tobytes(), cache.v(seq, i).tobytes()) for i in range(L)]
            held.append((seq, cache.length(seq), cache.block_table(seq).tolist(), rows))
        sequences = [cache.sequences for cache in self.caches]
        counts = pool.reference_counts.tolist(), pool.free_count, pool.cached_count
        prefixes = sorted(pool._state.blocks.prefixes.nodes()), list(pool._state.blocks.idle)
        lent = {block: times for block, times in pool._state.lent.items() if times}
        marks = [(len(mark), mark.is_released) for mark, _, _ in self.snapshots]
        return held, sequences, counts, prefixes, lent, marks

    def refuses(self, error, call, *arguments, **options):
        before = self.everything()
        with pytest.raises(error) as caught:
            call(*arguments, **options)
        assert isinstance(caught.value, errors.KvedgeError) and len(str(caught.value)) > 10
        del caught  # its traceback holds arguments
        assert self.everything() == before

    # -- operations

    @rule(data=st.data())
    def new_sequence(self, data):
        cache = self.pick_cache(data)
        self.models[cache.new_sequence()] = Model(cache)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(0, 9), layer=st.integers(0, L - 1))
    def append(self, data, n, layer):
        seq = self.pick(data)
        model = self.models[seq]
        start = model.held[layer]
        ids = list(model.ids)
        while len(ids) < start + n:
            ids.append(data.draw(st.integers(0, 1)))
        keys, values = self.rows(layer, ids, start, start + n)
        if n and self.blocks_wanted(seq, start, start + n) > self.pool.free_count:
            error = errors.CapacityExceededError
            self.refuses(error, model.cache.append, seq, layer, keys, values)
            return
        if n == 1 and data.draw(st.booleans()):
            keys, values = keys[0], values[0]
        model.cache.append(seq, layer, keys, values)
        model.ids = ids
        model.held[layer] = start + n

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
                    rows = self.rows(layer, model.ids, start, stop)
                    model.cache.append(seq, layer, *rows)
                    model.held[layer] = stop
        except errors.CapacityExceededError:
            return
        model.cache.advance(seq, n)
        model.length = stop

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(0, 9))
    def advance(self, data, n):
        seq = self.pick(data)
        model = self.models[seq]
        if min(model.held) >= model.length + n:
            model.cache.advance(seq, n)
            model.length += n
        else:
            self.refuses(errors.LayersOutOfStepError, model.cache.advance, seq, n)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), part=st.floats(0, 1))
    def truncate(self, data, part):
        seq = self.pick(data)
        model = self.models[seq]
        n = int(part * model.length)
        model.cache.truncate(seq, n)
        model.go_to(model.ids, n)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def fork(self, data):
        model = self.models[seq := self.pick(data)]
        if model.is_pending:
            self.refuses(errors.LayersOutOfStepError, model.cache.fork, seq)
        else:
            self.models[model.cache.fork(seq)] = Model(model.cache, model.ids, model.length)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def drop(self, data):
        seq = self.pick(data)
        self.of(seq).drop(seq)
        del self.models[seq]
        self.dropped.append(seq)

    @rule(data=st.data())
    def lose_a_cache(self, data):
        """It is garbage-collected with its sequences; its snapshots stay."""
        i = data.draw(st.integers(0, 1))
        lost = [seq for seq, model in self.models.items() if model.cache is self.caches[i]]
        for seq in lost:
            del self.models[seq]
        self.dropped.extend(lost)
        self.caches[i] = PagedKvCache(self.pool)

    # -- refused calls

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.integers(1, 9), layer=st.integers(0, L - 1))
    def append_bad_rows(self, data, n, layer):
        seq = self.pick(data)
        good = np.ones((n, H, D), np.float32)
        bad = good.copy()
        bad[n - 1, H - 1, D - 1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        calls = {
            "value": (good, bad, errors.NonFiniteInputError),
            "key": (bad, good, errors.NonFiniteInputError),
            "count": (good, good[1:], errors.ShapeMismatchError),
            "heads": (good[:, :1], good[:, :1], errors.ShapeMismatchError),
            "dtype": (good, good.astype(np.float64), errors.DtypeMismatchError),
            "layout": (good[..., ::-1], good, errors.LayoutError),
        }
        if self.scale_dtype == "float16":
            large = good.copy()
            large[n - 1, 0, 0] = -3e38
            calls["scale of a value"] = (good, large, errors.ScaleRangeError)
            calls["scale of a key"] = (large, good, errors.ScaleRangeError)
        keys, values, error = calls[data.draw(st.sampled_from(sorted(calls)))]
        start = self.models[seq].held[layer]
        if self.blocks_wanted(seq, start, start + n) > self.pool.free_count:
            error = (error, errors.CapacityExceededError)
        self.refuses(error, self.of(seq).append, seq, layer, keys, values)

    @rule(data=st.data())
    def use_an_unknown_sequence(self, data):
        cache = self.pick_cache(data)
        others = [seq for seq, model in self.models.items() if model.cache is not cache]
        seq = data.draw(st.sampled_from([*self.dropped, *others, 2**62, -1]))
        one = np.ones((H, D), np.float32)
        mark = self.snapshots[0][0] if self.snapshots else None
        name, *arguments = data.draw(
            st.sampled_from(
                [
                    ("append", 0, one, one),
                    ("advance",),
                    ("truncate", 0),
                    ("fork",),
                    ("drop",),
                    ("snapshot",),
                    ("register", []),
                    ("attend", 0, one),
                    ("length",),
                    ("k", 0),
                    ("v", 1),
                    ("block_table",),
                    ("to_kv_cache",),
                    ("restore", "the first mark"),
                ]
            )
        )
        if name == "restore":
            arguments = [mark]
        self.refuses(errors.UnknownSequenceError, getattr(cache, name), seq, *arguments)
        known = [other for other, model in self.models.items() if model.cache is cache]
        query = np.ones((len(known) + 1, H, D), np.float32)
        self.refuses(errors.UnknownSequenceError, cache.attend_batch, [*known, seq], 0, query)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def refused_calls(self, data):
        seq = self.pick(data)
        model = self.models[seq]
        cache = model.cache
        one, two = np.ones((H, D), np.float32), np.ones((model.held[0] + 1, H, D), np.float32)
        other = KvBlockPool(1, BLOCK, L, H, D, self.dtype, self.scale_dtype)
        foreign = PagedKvCache(other)
        calls = [
            (errors.LayerOutOfRangeError, cache.append, seq, L, one, one),
            (errors.LayerOutOfRangeError, cache.k, seq, -1),
            (errors.LayerOutOfRangeError, cache.attend, seq, L, one),
            (errors.InvalidArgumentError, cache.advance, seq, -1),
            (errors.LayersOutOfStepError, cache.advance, seq, 10**9),
            (errors.PositionOutOfRangeError, cache.truncate, seq, model.length + 1),
            (errors.PositionOutOfRangeError, cache.truncate, seq, -1),
            (errors.InvalidArgumentError, cache.restore, seq, None),
            (
                errors.InvalidArgumentError,
                cache.restore,
                seq,
                foreign.snapshot(foreign.new_sequence()),
            ),
            (errors.ShapeMismatchError, cache.register, seq, [0] * (model.length + 1)),
            (errors.InvalidArgumentError, cache.register, seq, [0.5]),
            (errors.InvalidArgumentError, cache.match_prefix, [[1], [2, 3]]),
            (errors.CapacityExceededError, self.pool.allocate, NUM_BLOCKS + 1),
            (errors.InvalidArgumentError, self.pool.allocate, -1),
            (errors.InvalidArgumentError, cache.from_kv_cache, cache),
            (errors.ShapeMismatchError, cache.from_kv_cache, KVCache(L + 1, H, D)),
            (errors.CapacityExceededError, cache.from_kv_cache, self.too_large()),
        ]
        if model.held[0]:
            bad = one * np.float32("nan")
            calls += [
                (errors.ShapeMismatchError, cache.attend, seq, 0, two),
                (errors.NonFiniteInputError, cache.attend, seq, 0, bad),
                (errors.NonFiniteInputError, cache.attend_batch, [seq] * 2, 0, [one, bad]),
            ]
        else:
            calls.append((errors.InvalidArgumentError, cache.attend, seq, 0, one))
        if model.length and not model.is_pending:
            calls.append(
                (
                    errors.CapacityExceededError,
                    lambda: cache.to_kv_cache(seq, max_seq_len=model.length - 1),
                )
                if model.length > 1
                else (errors.InvalidArgumentError, lambda: cache.to_kv_cache(seq, max_seq_len=0))
            )
        known = self.pool._state.blocks.prefixes
        if model.length >= BLOCK and int(cache.block_table(seq)[0]) in known:
            wrong = [1 - model.ids[0], *model.ids[1 : model.length]]
            calls.append((errors.InvalidArgumentError, cache.register, seq, wrong))
        self.refuses(*calls[data.draw(st.integers(0, len(calls) - 1))])

    def too_large(self):
        """A cache of more tokens than the pool has."""
        n = NUM_BLOCKS * BLOCK + 1
        cache = KVCache(L, H, D, dtype=self.dtype, scale_dtype=self.scale_dtype)
        for layer in range(L):
            cache.append(layer, *np.zeros((2, n, H, D), np.float32))
        cache.advance(n)
        return cache

    # -- snapshots

    @precondition(lambda self: self.models and len(self.snapshots) < 4)
    @rule(data=st.data())
    def snapshot(self, data):
        seq = self.pick(data)
        model = self.models[seq]
        table = model.cache.block_table(seq)[: -(-model.length // BLOCK)]
        self.snapshots.append((model.cache.snapshot(seq), table, model.ids[: model.length]))

    @precondition(lambda self: self.models and self.snapshots)
    @rule(data=st.data())
    def restore(self, data):
        seq = self.pick(data)
        # By its number: Hypothesis would hold on to a snapshot, and so to its blocks.
        snapshot, _, ids = self.snapshots[data.draw(st.integers(0, len(self.snapshots) - 1))]
        self.of(seq).restore(seq, snapshot)  # also into the other cache
        self.models[seq].go_to(ids, len(ids))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), explicit=st.booleans())
    def release(self, data, explicit):
        i = data.draw(st.integers(0, len(self.snapshots) - 1))
        snapshot = self.snapshots.pop(i)[0]
        if not explicit:
            return
        snapshot.release()
        for seq, model in self.models.items():
            self.refuses(errors.StaleSnapshotError, model.cache.restore, seq, snapshot)
            break

    # -- prefixes

    @precondition(lambda self: self.models)
    @rule(data=st.data(), part=st.floats(0, 1))
    def register(self, data, part):
        seq = self.pick(data)
        model = self.models[seq]
        ids = model.ids[: int(part * model.length)]
        model.cache.register(seq, ids)
        self.is_any_registered = True
        found, n = self.pick_cache(data).match_prefix(ids)
        assert n == len(ids) // BLOCK * BLOCK  # through either cache
        for cache in self.caches:
            if found in cache:
                cache.drop(found)

    @rule(data=st.data())
    def match_prefix(self, data):
        known = [model.ids for model in self.models.values()] or [[]]
        ids = data.draw(st.sampled_from(known)) + data.draw(st.lists(st.integers(0, 1)))
        cache = self.pick_cache(data)
        seq, n = cache.match_prefix(ids)
        assert n % BLOCK == 0 and n <= len(ids)
        assert n == 0 or self.is_any_registered
        self.models[seq] = Model(cache, ids, n)

    @rule()
    def forget_prefixes(self):
        self.pool.forget_prefixes()
        self.is_any_registered = False
        assert self.pool.cached_count == 0

    # -- blocks of the user's own, and copies

    @rule(n=st.integers(0, 4))
    def allocate(self, n):
        if n > self.pool.free_count:
            self.refuses(errors.CapacityExceededError, self.pool.allocate, n)
        else:
            self.lent.update(self.pool.allocate(n).tolist())

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted(self.lent)))
        self.pool.share([block])
        self.lent[block] += 1

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data):
        block = data.draw(st.sampled_from(sorted(self.lent)))
        self.pool.free([block])
        self.lent -= Counter([block])

    @rule(block=st.integers(-1, NUM_BLOCKS), more=st.booleans())
    def free_what_is_not_held(self, block, more):
        if not self.lent[block]:
            blocks = [*self.lent, block] if more else [block]  # all of them or none
            self.refuses(errors.BlockNotHeldError, self.pool.free, list(set(blocks)))
            self.refuses(errors.BlockNotHeldError, self.pool.share, [block])

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def copy_out_and_in(self, data):
        seq = self.pick(data)
        model = self.models[seq]
        if model.is_pending:
            self.refuses(errors.LayersOutOfStepError, model.cache.to_kv_cache, seq)
            return
        copy = model.cache.to_kv_cache(seq)
        assert len(copy) == model.length
        cache = self.pick_cache(data)
        if self.pool.free_count < -(-model.length // BLOCK):
            self.refuses(errors.CapacityExceededError, cache.from_kv_cache, copy)
            return
        twin = cache.from_kv_cache(copy)
        self.models[twin] = Model(cache, model.ids, model.length)
        copy.append(1, *self.rows(1, [0], 0, 1))
        self.refuses(errors.LayersOutOfStepError, cache.from_kv_cache, copy)

    # -- attention

    @precondition(lambda self: any(min(model.held) for model in self.models.values()))
    @rule(data=st.data(), layer=st.integers(0, L - 1), seed=st.integers(0, 99))
    def attend(self, data, layer, seed):
        able = [seq for seq, model in sorted(self.models.items()) if model.held[layer]]
        cache = self.of(data.draw(st.sampled_from(able)))
        able = [seq for seq in able if self.of(seq) is cache]
        seqs = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=5))
        rng = np.random.default_rng(seed)
        query = rng.standard_normal((len(seqs), 2 * H, D), dtype=np.float32)
        together = cache.attend_batch(seqs, layer, query)
        for seq, one, out in zip(seqs, query, together, strict=True):
            keys, values = self.expected(seq, layer)
            alone = cache.attend(seq, layer, one)
            if self.magnitudes is NORMAL:
                exact, _ = reference.attention(one, keys, values)
                assert np.abs(out - exact).max() <= reference.TOLERANCE * np.abs(exact).max()
                assert np.abs(out - alone).max() <= 1e-5
                continue
            # Logits up to 1e38 decide between tokens by their last digits: only bounds are sure.
            largest = np.abs(values.astype(np.float64)).max(axis=(0, 2)).repeat(2)[:, np.newaxis]
            bound = 1.001 * largest
            for each in (out, alone):
                assert np.isfinite(each).all() and (np.abs(each) <= bound).all()

    # -- what always holds

    def expected(self, seq, layer):
        model, kind = self.models[seq], (self.dtype, self.scale_dtype, layer)
        made = [
            stored_row(*kind, tuple(model.ids[: t + 1]), self.magnitudes)
            for t in range(model.held[layer])
        ]
        return np.array(made, np.float32).reshape(-1, 2, H, D).swapaxes(0, 1)

    @invariant()
    def every_sequence_holds_its_tokens(self):
        for cache in self.caches:
            mine = {seq: model for seq, model in self.models.items() if model.cache is cache}
            assert cache.sequences == tuple(mine)
            assert cache.context_lens.tolist() == [model.length for model in mine.values()]
        for seq, model in self.models.items():
            for layer in range(L):
                keys, values = self.expected(seq, layer)
                np.testing.assert_array_equal(model.cache.k(seq, layer), keys)
                np.testing.assert_array_equal(model.cache.v(seq, layer), values)

    @invariant()
    def every_block_is_owned_or_free(self):
        owners = Counter(self.lent)
        for seq, model in self.models.items():
            table = model.cache.block_table(seq).tolist()
            assert len(set(table)) == len(table)
            assert -(-max(model.held) // BLOCK) == len(table)
            owners.update(table)
        for _, table, _ in self.snapshots:
            owners.update(table.tolist())
        counts = self.pool.reference_counts
        assert counts.tolist() == [owners[block] for block in range(NUM_BLOCKS)]
        assert self.pool.free_count == np.count_nonzero(counts == 0)
        assert self.pool.free_count + self.pool.used_count == NUM_BLOCKS
        assert 0 <= self.pool.cached_count <= self.pool.free_count
        assert self.pool.utilization == self.pool.used_count / NUM_BLOCKS

    @invariant()
    def every_block_is_in_one_list(self):
        held = np.flatnonzero(self.pool.reference_counts).tolist()
        blocks = self.pool._state.blocks
        never = range(blocks.untouched, NUM_BLOCKS)
        lists = [*blocks._freed, *blocks.idle, *blocks._parked, *never, *held]
        assert sorted(lists) == list(range(NUM_BLOCKS))
        assert all(block in blocks.prefixes for block in blocks.idle)
        assert not any(block in blocks.prefixes for block in [*blocks._freed, *never])
        assert not self.pool._state.readings.running and not blocks._parked  # no call is running

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for cache in self.caches:
            for seq in cache.sequences:
                cache.drop(seq)
        self.snapshots.clear()
        for block, times in self.lent.items():
            for _ in range(times):
                self.pool.free([block])
        assert self.pool.free_count == NUM_BLOCKS
        assert sorted(self.pool.allocate(NUM_BLOCKS).tolist()) == list(range(NUM_BLOCKS))
        assert self.pool.cached_count == 0  # cached ones made room


class Float32Machine(PagedMachine):
    dtype, scale_dtype = "float32", "float32"


class ExtremeInt8Machine(PagedMachine):
    scale_dtype, magnitudes = "float32", EXTREME


class ExtremeFloat16ScaleMachine(PagedMachine):
    magnitudes = FLOAT16_SCALES


class ExtremeFloat32Machine(Float32Machine):
    magnitudes = EXTREME


def case_of(machine):
    machine.TestCase.settings = settings(stateful_step_count=60)
    return machine.TestCase


TestPagedInt8 = case_of(PagedMachine)
TestPagedFloat32 = case_of(Float32Machine)
TestPagedInt8Extremes = case_of(ExtremeInt8Machine)
TestPagedFloat16ScaleExtremes = case_of(ExtremeFloat16ScaleMachine)
TestPagedFloat32Extremes = case_of(ExtremeFloat32Machine)
