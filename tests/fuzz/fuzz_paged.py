#!/usr/bin/env python3
"""Programs of calls on two PagedKvCaches over one KvBlockPool, against a dictionary of lists.

The model of a sequence is its token ids; keys and values follow from them, as in a model. Held at
the end of every program, and after each call that fails: each block's references are those of the
sequences, snapshots and loans that have it; the counts of free blocks follow from them; every
sequence holds the rows of its tokens, and attention over them is plain softmax.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from driver import Program, instrumented, run

with instrumented():
    from kvedge import KvBlockPool, PagedKvCache, errors

L, H, D = 2, 1, 4
MAX_CALLS, MAX_SEQUENCES = 60, 12
RUN = 32
# By a program's last byte: most pools are plain, the others hold first and last tokens apart.
KINDS = {
    5: {"recent": 3, "sinks": 2},
    6: {"dtype": "kivi8"},
    7: {"dtype": "kivi8", "recent": 40, "sinks": 33},
}


@lru_cache(1 << 16)
def row(layer: int, prefix: tuple[int, ...]) -> np.ndarray:
    """Key and value (2, H, D) of a token, which depend on it and all before it."""
    seed = zlib.crc32(bytes([layer, *prefix]))
    return (
        ((np.arange(2 * H * D) * 2654435761 + seed) % 65521 / 32760.5 - 1)
        .astype(np.float32)
        .reshape(2, H, D)
    )


def rows(layer: int, ids: list[int], start: int, stop: int) -> np.ndarray:
    made = [row(layer, tuple(ids[: t + 1])) for t in range(start, stop)]
    return np.array(made, np.float32).reshape(-1, 2, H, D).swapaxes(0, 1).copy()


class Sequence:
    """What the model knows of a sequence."""

    def __init__(self, cache: int, ids=(), length: int = 0) -> None:
        self.cache = cache  # 0 or 1
        self.go_to(ids, length)

    def go_to(self, ids, length: int) -> None:
        self.ids = list(ids[:length])
        self.length = length
        self.held = [length] * L


class Machine:
    def __init__(self, program: Program, kind: int = 0) -> None:
        self.program = program
        self.block = 1 + program.below(5)
        self.num_blocks = 2 + program.below(15)
        self.dtype = program.choice(("int8", "float32"))
        options = dict(KINDS.get(kind, {}))
        self.is_plain = not options
        self.dtype = options.pop("dtype", self.dtype)
        self.in_runs = self.dtype == "kivi8"
        self.unit = 13 if self.in_runs else 1  # tokens, so that runs become full
        if self.in_runs:
            self.block = RUN * (1 + self.block % 2)
        if self.dtype == "int8":  # scales that large rows do not fit
            options["scale_dtype"] = "float16"
        self.pool = KvBlockPool(self.num_blocks, self.block, L, H, D, self.dtype, **options)
        self.caches = [PagedKvCache(self.pool), PagedKvCache(self.pool)]
        self.models: dict[int, Sequence] = {}
        self.snapshots: list = []  # (PagedSnapshot, table, ids)
        self.lent: Counter[int] = Counter()
        self.registered: list[list[int]] = []
        self.gone: list[int] = []
        self.calls = [
            *(self.tokens, self.tokens, self.tokens, self.append, self.append, self.append_bad),
            *(self.new, self.advance, self.truncate, self.fork, self.drop, self.use_gone),
            *(self.register, self.register, self.match, self.match, self.attend),
            *(self.snapshot, self.restore, self.release),
            *(self.allocate, self.share, self.free, self.copy_out_and_in, self.forget),
            self.forget_cache,
        ]

    def pick(self) -> tuple[int, Sequence, PagedKvCache]:
        if not self.models:
            self.new()
        seq = self.program.choice(sorted(self.models))
        model = self.models[seq]
        return seq, model, self.caches[model.cache]

    def has_room(self) -> bool:
        return len(self.models) < MAX_SEQUENCES

    def lengthen(self, model: Sequence, length: int) -> None:
        while len(model.ids) < length:
            model.ids.append(self.program.below(3))

    # ---- calls

    def new(self) -> None:
        if self.has_room():
            cache = self.program.below(2)
            self.models[self.caches[cache].new_sequence()] = Sequence(cache)

    def wanted(self, seq: int, start: int, stop: int) -> int:
        """Free blocks that writing these tokens needs at least."""
        model = self.models[seq]
        table = self.caches[model.cache].block_table(seq)
        wanted = max(0, -(-stop // self.block) - len(table))
        last, used = divmod(model.length, self.block)
        writes = not self.in_runs or stop // RUN > start // RUN  # runs that are full are
        if used and start // self.block == last and writes:
            wanted += int(self.pool.reference_counts[table[last]] > 1)
        return wanted

    def give(self, seq: int, layer: int, n: int, flat: bool) -> bool:
        """Append n tokens to a layer; False: there was no room, and there was none indeed."""
        model = self.models[seq]
        start = model.held[layer]
        self.lengthen(model, start + n)
        keys, values = rows(layer, model.ids, start, start + n)
        if flat and n == 1:
            keys, values = keys.reshape(-1), values.reshape(-1)
        free = self.pool.free_count
        fits = n == 0 or self.wanted(seq, start, start + n) <= free
        try:
            self.caches[model.cache].append(seq, layer, keys, values)
        except errors.CapacityExceededError as error:
            assert not fits or self.is_of_last_tokens(error), "refused, though there were blocks"
            assert self.pool.free_count == free
            self.check()
            return False
        assert fits, "more blocks than there are"
        model.held[layer] = start + n
        return True

    def is_of_last_tokens(self, error: Exception) -> bool:
        """Whether blocks of first and last tokens are what there is too few of."""
        return not self.is_plain and "first and last" in str(error)

    def append(self) -> None:
        seq, _, _ = self.pick()
        layer, n = self.program.below(L), self.program.below(9) * self.unit
        self.give(seq, layer, n, self.program.below(2) == 1)

    def append_bad(self) -> None:
        seq, _, cache = self.pick()
        n, layer = 1 + self.program.below(9), self.program.below(L)
        before = self.pool.free_count, self.pool.cached_count, cache.block_table(seq).tolist()
        pair = np.ones((2, n, H, D), np.float32)
        kinds = [errors.NonFiniteInputError, errors.CapacityExceededError]
        where = (self.program.below(2), n - 1, H - 1, self.program.below(D))
        if self.program.below(2) and self.dtype == "int8":
            pair[where] = 3e38
            kinds.append(errors.ScaleRangeError)
        else:
            pair[where] = np.nan
        try:
            cache.append(seq, layer, *pair)
        except tuple(kinds):
            now = self.pool.free_count, self.pool.cached_count, cache.block_table(seq).tolist()
            assert now == before
            self.check()
        else:
            raise AssertionError("rows that cannot be stored were taken")

    def tokens(self) -> None:
        """A step of a model: every layer, then advance."""
        seq, model, cache = self.pick()
        stop = model.length + self.program.below(9) * self.unit
        for layer in range(L):
            if model.held[layer] < stop and not self.give(
                seq, layer, stop - model.held[layer], False
            ):
                return
        cache.advance(seq, stop - model.length)
        model.length = stop

    def advance(self) -> None:
        seq, model, cache = self.pick()
        n = self.program.below(9) * self.unit
        try:
            cache.advance(seq, n)
        except errors.LayersOutOfStepError:
            assert min(model.held) < model.length + n
        else:
            assert min(model.held) >= model.length + n
            model.length += n

    def truncate(self) -> None:
        seq, model, cache = self.pick()
        n = self.program.below(model.length + 2)
        try:
            cache.truncate(seq, n)
        except errors.PositionOutOfRangeError:
            assert n > model.length
        else:
            model.go_to(model.ids, n)

    def fork(self) -> None:
        seq, model, cache = self.pick()
        if not self.has_room():
            return
        try:
            twin = cache.fork(seq)
        except errors.LayersOutOfStepError:
            assert max(model.held) > model.length
            return
        assert max(model.held) == model.length
        self.models[twin] = Sequence(model.cache, model.ids, model.length)

    def drop(self) -> None:
        seq, _, cache = self.pick()
        cache.drop(seq)
        del self.models[seq]
        self.gone.append(seq)

    def use_gone(self) -> None:
        """Dropped sequences, and those of the other cache."""
        others = [seq for seq, model in self.models.items() if model.cache == 1]
        for seq in (self.gone + others)[-3:]:
            for call in ("drop", "fork", "advance", "snapshot", "block_table"):
                try:
                    getattr(self.caches[0], call)(seq)
                except errors.UnknownSequenceError:
                    continue
                raise AssertionError(f"{call} of an unknown sequence")

    def snapshot(self) -> None:
        seq, model, cache = self.pick()
        if len(self.snapshots) < 4:
            table = cache.block_table(seq)[: -(-model.length // self.block)]
            self.snapshots.append((cache.snapshot(seq), table, model.ids[: model.length]))

    def restore(self) -> None:
        seq, model, cache = self.pick()
        if self.snapshots:
            snapshot, _, ids = self.program.choice(self.snapshots)
            cache.restore(seq, snapshot)
            model.go_to(ids, len(ids))

    def release(self) -> None:
        if not self.snapshots:
            return
        snapshot = self.snapshots.pop(self.program.below(len(self.snapshots)))[0]
        if self.program.below(2):  # else it is garbage
            snapshot.release()
            seq, _, cache = self.pick()
            try:
                cache.restore(seq, snapshot)
            except errors.StaleSnapshotError:
                return
            raise AssertionError("a released snapshot was restored")

    def register(self) -> None:
        seq, model, cache = self.pick()
        shorter = self.program.below(model.length + 1) if self.program.below(4) == 0 else 0
        ids = model.ids[: model.length - shorter]
        if self.program.below(8) == 7 and ids:
            ids[self.program.below(len(ids))] ^= 3  # not what the sequence was computed from
            try:
                cache.register(seq, ids)
            except errors.InvalidArgumentError:
                self.check()
                return
            # Nobody can know: it is found under these ids. So the pool is of no more use here.
            self.pool.forget_prefixes()
            self.registered.clear()
            return
        cache.register(seq, ids)
        self.registered.append(ids[: len(ids) // self.block * self.block])

    def match(self) -> None:
        if not self.has_room():
            return
        ids = list(self.program.choice(self.registered)) if self.registered else []
        if self.program.below(4) == 0:
            ids = ids[: self.program.below(len(ids) + 1)]
        for _ in range(self.program.below(6)):
            ids.append(self.program.below(3))
        cache = self.program.below(2)
        seq, n = self.caches[cache].match_prefix(ids)
        assert n % self.block == 0 and n <= len(ids)
        self.models[seq] = Sequence(cache, ids, n)

    def attend(self) -> None:
        seq, model, cache = self.pick()
        layer, num_rows = self.program.below(L), 1 + self.program.below(3)
        query = np.random.default_rng(self.program.byte()).standard_normal(
            (num_rows, 2, D), np.float32
        )
        held = model.held[layer]
        batch = self.program.below(2)
        try:
            if batch:
                out = cache.attend_batch([seq, seq], layer, [query, query])[1]
            else:
                out = cache.attend(seq, layer, query)
        except (errors.InvalidArgumentError, errors.ShapeMismatchError):
            assert held < num_rows
            return
        assert held >= num_rows
        keys, values = cache.k(seq, layer).astype(float), cache.v(seq, layer).astype(float)
        for i in range(num_rows):
            seen = held - num_rows + i + 1
            for head in range(2):
                logits = keys[:seen, 0] @ query[i, head].astype(float) / np.sqrt(D)
                p = np.exp(logits - logits.max())
                expected = p @ values[:seen, 0] / p.sum()
                assert np.abs(out[i, head] - expected).max() < 2e-4 * np.abs(values).max()

    def allocate(self) -> None:
        n, free = self.program.below(4), self.pool.free_count
        try:
            blocks = self.pool.allocate(n)
        except errors.CapacityExceededError:
            assert n > free
        else:
            assert n <= free and len(set(blocks.tolist())) == n
            self.lent.update(blocks.tolist())

    def share(self) -> None:
        self.lend(self.pool.share, 1)

    def free(self) -> None:
        self.lend(self.pool.free, -1)

    def lend(self, call, change: int) -> None:
        blocks = [self.program.below(self.num_blocks) for _ in range(self.program.below(3))]
        if self.lent and self.program.below(4):
            blocks = [self.program.choice(sorted(self.lent))]
        try:
            call(blocks)
        except errors.BlockNotHeldError:
            assert any(not self.lent[block] for block in blocks)
            self.check()
        except errors.InvalidArgumentError:
            assert len(set(blocks)) < len(blocks)
            self.check()
        else:
            for block in blocks:
                assert self.lent[block] > 0
                self.lent[block] += change
        self.lent += Counter()

    def copy_out_and_in(self) -> None:
        seq, model, cache = self.pick()
        if not self.has_room():
            return
        try:
            copied = cache.to_kv_cache(seq)
        except errors.LayersOutOfStepError:
            assert max(model.held) > model.length
            return
        assert max(model.held) == model.length
        assert len(copied) == model.length
        free, cache = self.pool.free_count, self.program.below(2)
        try:
            seq = self.caches[cache].from_kv_cache(copied)
        except errors.CapacityExceededError as error:
            assert self.is_of_last_tokens(error) or -(-model.length // self.block) > free
        else:
            self.models[seq] = Sequence(cache, model.ids, model.length)

    def forget(self) -> None:
        if self.program.below(4) == 0:
            self.pool.forget_prefixes()
            self.registered.clear()

    def forget_cache(self) -> None:
        """A cache is garbage, with all of its sequences."""
        if self.program.below(4):
            return
        which = self.program.below(2)
        self.caches[which] = PagedKvCache(self.pool)
        for seq in [seq for seq, model in self.models.items() if model.cache == which]:
            del self.models[seq]
            self.gone.append(seq)

    # ---- what always holds

    def check(self) -> None:
        owners = np.zeros(self.num_blocks, np.int64)
        for seq, model in self.models.items():
            cache = self.caches[model.cache]
            table = cache.block_table(seq)
            assert len(set(table.tolist())) == len(table)
            assert len(table) == -(-max(model.held) // self.block)
            assert cache.length(seq) == model.length
            owners[table] += 1
        for snapshot, table, ids in self.snapshots:
            assert len(snapshot) == len(ids)
            owners[table] += 1
        for block, n in self.lent.items():
            owners[block] += n
        assert (self.pool.reference_counts == owners).all()
        assert self.pool.free_count == (owners == 0).sum()
        assert 0 <= self.pool.cached_count <= self.pool.free_count
        for which, cache in enumerate(self.caches):
            mine = sorted(seq for seq, model in self.models.items() if model.cache == which)
            assert sorted(cache.sequences) == mine

    def check_rows(self) -> None:
        for seq, model in self.models.items():
            cache = self.caches[model.cache]
            for layer in range(L):
                wanted = rows(layer, model.ids, 0, model.held[layer])
                # half a code of 1 / 127, and what a float16 scale is rounded up by
                allowed = {"int8": 0.5 / 127 * 1.002, "kivi8": 0.03, "float32": 0.0}[self.dtype]
                allowed = allowed if self.is_plain else max(allowed, 0.0005)
                for given, stored in zip(
                    wanted, (cache.k(seq, layer), cache.v(seq, layer)), strict=True
                ):
                    assert stored.shape == given.shape
                    assert not given.size or np.abs(stored - given).max() <= allowed

    def run(self) -> None:
        for _ in range(MAX_CALLS):
            if self.program.ended:
                break
            self.program.choice(self.calls)()
        self.check()
        self.check_rows()
        # All is given back: nothing is held any more.
        self.models.clear()
        self.snapshots.clear()
        self.caches = [PagedKvCache(self.pool), PagedKvCache(self.pool)]
        self.check()


def target(data: bytes) -> None:
    program = Program(data)
    machine = Machine(program, data[-1] % 8 if data else 0)
    # Its calls refer to it: without this, only the garbage collector would free its pool.
    try:
        machine.run()
        assert machine.pool.free_count == machine.num_blocks - len(machine.lent)
    finally:
        machine.calls.clear()


if __name__ == "__main__":
    run(target)
