"""Readers beside a writer on a small pool, whose blocks are used again at once.

Every row that is written carries a tag of its own, and the tag tells which row came before it. So a
reader can tell whether it saw the first n rows of what was written to its sequence, or anything
else: rows of another sequence, rows written later over others, rows that are missing.

``KVEDGE_SLOW=1`` runs it longer.
"""

import os
import random
import sys
import threading
import time

import numpy as np
import pytest

from kvedge import KvBlockPool, PagedKvCache, errors
from kvedge.core.formats import FORMATS
from kvedge.paged import cascade

SLOW = os.environ.get("KVEDGE_SLOW") == "1"
NUM_OPERATIONS = 8_000 if SLOW else 500
SECONDS = 300  # a hanging run fails after this
MAX_TAGS = 160 * NUM_OPERATIONS  # some 85 rows are written in an operation

L, H, D, BLOCK, NUM_BLOCKS = 2, 2, 16, 16, 96
LONGEST = 500  # tokens of a sequence
NONE = -1


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


DIGITS = 8 ** np.arange(7)  # FP8 stores integers up to 8 exactly
TAG, LAYER, POSITION = slice(1, 8), 8, slice(D - 3, D)


class Rows:
    """All rows ever written, of numbers that each format stores exactly.

    Those are integers of two binary digits; INT8 needs one of them to be 127.
    """

    def __init__(self, dtype, seed):
        noise = np.random.default_rng(seed).integers((4, 0), (8, 5), (1 << 12, D, 2))
        self.noise = np.ldexp(noise[..., 0], noise[..., 1] - 2).round()  # up to 28
        self.largest = 127 if FORMATS[dtype].has_scales else 112
        self.parents = np.full(MAX_TAGS, NONE)
        self.positions = np.zeros(MAX_TAGS, np.int64)
        self.sums = np.zeros((MAX_TAGS, D))  # of the values of a row and all before it, layer 0
        self.count = 0

    def add(self, parent, n):
        """The tags of n new rows after another one (or NONE)."""
        tags = range(self.count, self.count + n)
        self.count += n
        values = self.values(np.arange(tags.start, tags.stop), 0)
        for tag, row in zip(tags, values, strict=True):
            first = parent == NONE
            self.parents[tag] = parent
            self.positions[tag] = 0 if first else self.positions[parent] + 1
            self.sums[tag] = row if first else self.sums[parent] + row
            parent = tag
        return list(tags)

    def values(self, tags, layer):
        """(n, D): the largest number, the tag in seven digits, the layer, and noise."""
        rows = self.noise[tags * 7 % len(self.noise)].astype(np.float32)
        rows[:, 0] = self.largest
        rows[:, TAG] = digits(tags, 7)
        rows[:, LAYER] = layer
        return rows

    def keys(self, tags, layer):
        """(n, D): as the values, but the last three channels are the position."""
        rows = self.values(tags, layer)
        rows[:, POSITION] = digits(self.positions[tags], 3)
        return rows

    def tags_of(self, rows):
        """Of keys or values (n, D)."""
        return np.rint(rows[:, TAG]).astype(np.int64) @ DIGITS


def digits(numbers, n):
    """(len(numbers), n): of base 8, the lowest first."""
    return np.asarray(numbers)[:, None] // DIGITS[:n] % 8


# Of four query heads on two KV heads: every first sees all tokens alike, so that its output is the
# mean of the values and its log-sum-exp the logarithm of their number; every second sees the last
# token alone, so that its output is that token's value.
QUERY = np.zeros((2 * H, D), np.float32)
QUERY[1::2, POSITION] = 200 * DIGITS[:3]


class Stress:
    """A pool, a cache, a writer's model of it, and what readers may see."""

    def __init__(self, dtype, seed):
        self.pool = KvBlockPool(NUM_BLOCKS, BLOCK, L, H, D, dtype)
        self.cache = PagedKvCache(self.pool)
        self.rows = Rows(dtype, seed)
        self.tags = {}  # of each sequence, as it is
        self.ever = {}  # of each sequence, all tags that it held; added before they are appended
        self.readable = []  # sequences with tokens
        self.dropped = set()  # added before they are
        self.marks = []  # (PagedSnapshot, tags)
        self.known = []  # token ids that were registered
        self.done = threading.Event()
        self.failures = []
        self.reads = 0

    # -- the writer

    def write(self, seed):
        choose = random.Random(seed)
        operations = (
            [self.append] * 6
            + [self.append_and_read] * 2
            + [self.fork_write_drop] * 4
            + [self.drop] * 3
            + [self.truncate] * 3
            + [self.mark, self.release, self.restore] * 2
            + [self.register, self.match] * 2
            + [self.fork, self.forget]
        )
        for _ in range(NUM_OPERATIONS):
            if self.failures:
                return
            while len(self.readable) < 3:
                self.begin(choose)
            try:
                choose.choice(operations)(choose)
            except errors.CapacityExceededError:
                self.make_room(choose)
            if choose.random() < 0.3:
                time.sleep(0)  # lets a reader begin

    def add(self, seq, tags):
        self.tags[seq], self.ever[seq] = list(tags), set(tags)
        if tags:
            self.readable.append(seq)

    def extend(self, seq, n):
        held = self.tags[seq]
        n = min(n, LONGEST - len(held))
        if n < 1:
            return
        tags = self.rows.add(held[-1] if held else NONE, n)
        self.ever[seq].update(tags)
        numbers = np.array(tags)
        try:
            for layer in range(L):
                keys, values = self.rows.keys(numbers, layer), self.rows.values(numbers, layer)
                keys, values = (np.repeat(x[:, np.newaxis], H, axis=1) for x in (keys, values))
                self.cache.append(seq, layer, keys, values)
        except errors.CapacityExceededError:
            self.cache.truncate(seq, len(held))  # what some layers have already
            raise
        self.cache.advance(seq, n)
        held.extend(tags)
        if seq not in self.readable:
            self.readable.append(seq)

    def begin(self, choose):
        seq = self.cache.new_sequence()
        self.add(seq, [])
        try:
            self.extend(seq, choose.randint(200, 400))
        except errors.CapacityExceededError:
            self.remove(seq)
            self.make_room(choose)

    def remove(self, seq):
        self.dropped.add(seq)
        if seq in self.readable:
            self.readable.remove(seq)
        self.cache.drop(seq)
        del self.tags[seq]

    def make_room(self, choose):
        while self.marks:
            self.marks.pop()[0].release()
        if self.readable:
            self.remove(choose.choice(self.readable))

    def append(self, choose):
        self.extend(choose.choice(self.readable), choose.choice([1, 1, 1, 5, 40]))

    def append_and_read(self, choose):
        seq = choose.choice(self.readable)
        self.extend(seq, 1)
        self.check_attend(seq, choose)

    def fork(self, choose):
        seq = choose.choice(self.readable)
        self.add(self.cache.fork(seq), self.tags[seq])

    def fork_write_drop(self, choose):
        """A block is shared, copied on write, freed, and used again."""
        seq = choose.choice(self.readable)
        fork = self.cache.fork(seq)
        try:
            self.extend(seq, 1)
        finally:
            self.cache.drop(fork)
        self.begin(choose)

    def drop(self, choose):
        self.remove(choose.choice(self.readable))
        self.begin(choose)

    def truncate(self, choose):
        seq = choose.choice(self.readable)
        n = len(self.tags[seq])
        n = max(1, n - choose.choice([1, 3, 20, 150]))
        self.cache.truncate(seq, n)
        self.tags[seq] = self.tags[seq][:n]
        self.extend(seq, choose.randint(1, 30))

    def mark(self, choose):
        if len(self.marks) < 3:
            seq = choose.choice(self.readable)
            self.marks.append((self.cache.snapshot(seq), list(self.tags[seq])))

    def release(self, choose):
        if self.marks:
            self.marks.pop(choose.randrange(len(self.marks)))[0].release()

    def restore(self, choose):
        if self.marks:
            seq, (mark, tags) = choose.choice(self.readable), choose.choice(self.marks)
            self.ever[seq].update(tags)
            self.cache.restore(seq, mark)
            self.tags[seq] = list(tags)

    def register(self, choose):
        seq = choose.choice(self.readable)
        self.cache.register(seq, self.tags[seq])
        self.known.append(list(self.tags[seq]))
        if choose.random() < 0.5:
            self.remove(seq)

    def match(self, choose):
        if self.known:
            ids = choose.choice(self.known[-5:])
            seq, n = self.cache.match_prefix(ids)
            self.add(seq, ids[:n])
            self.extend(seq, 20)

    def forget(self, choose):
        self.pool.forget_prefixes()

    # -- readers

    def read(self, seed):
        choose = random.Random(seed)
        reads = [
            *[self.check_attend] * 4,
            *[self.check_batch] * 3,
            self.check_rows,
            self.check_snapshot,
        ]
        while not self.done.is_set() and not self.failures:
            try:
                seq = choose.choice(self.readable)
            except IndexError:  # between two sequences
                continue
            try:
                choose.choice(reads)(seq, choose)
                self.reads += 1
            except errors.UnknownSequenceError as error:
                assert any(f"sequence {gone} " in str(error) for gone in list(self.dropped))

    def check_attend(self, seq, choose):
        layer = choose.randrange(L)
        n = choose.choice([1, 16])  # the longer runs long enough for many writes
        query = np.repeat(QUERY[np.newaxis], n, axis=0)
        out, lse = self.cache.attend(
            seq, layer, query, causal=False, precision_bits=24, return_lse=True
        )
        for one, one_lse in zip(out, lse, strict=True):
            self.check_result(seq, layer, one, one_lse)

    def check_batch(self, seq, choose):
        layer = choose.randrange(L)
        try:
            others = [choose.choice(self.readable) for _ in range(3)]
        except IndexError:
            others = []
        seqs = [seq, *others]
        queries = np.repeat(QUERY[np.newaxis], len(seqs), axis=0)
        outs, lses = self.cache.attend_batch(
            seqs, layer, queries, precision_bits=24, return_lse=True
        )
        for each, out, lse in zip(seqs, outs, lses, strict=True):
            self.check_result(each, layer, out, lse)

    def check_result(self, seq, layer, out, lse):
        last = self.rows.tags_of(out[1::2])
        assert last[0] == last[1], f"heads end with rows {last}"
        tag, n = int(last[0]), round(float(np.exp(lse[0])))
        self.check_last(seq, tag, n)
        assert np.abs(lse[::2] - np.log(n)).max() < 5e-4
        mean = self.rows.sums[tag] / n
        mean[LAYER] = layer
        off = np.abs(out[::2] - mean).max()
        assert off < 0.02, f"the mean of {n} rows to {tag} of sequence {seq} is off by {off:.3g}"

    def check_rows(self, seq, choose):
        layer = choose.randrange(L)
        for read in (self.cache.v, self.cache.k):
            rows = read(seq, layer)
            tags = self.rows.tags_of(rows[:, 0])
            assert tags.min() >= 0 and tags.max() < self.rows.count
            before = self.rows.parents[tags]
            assert before[0] == NONE, f"sequence {seq} begins with row {tags[0]}"
            np.testing.assert_array_equal(before[1:], tags[:-1])
            self.check_last(seq, int(tags[-1]), len(tags))
            made = self.rows.values if read == self.cache.v else self.rows.keys
            np.testing.assert_array_equal(rows[:, 0], made(tags, layer))
            np.testing.assert_array_equal(rows[:, 1], rows[:, 0])

    def check_last(self, seq, tag, n):
        assert 0 <= tag < self.rows.count, f"sequence {seq} ends with row {tag}"
        assert tag in self.ever[seq], f"row {tag} was never of sequence {seq}"
        assert self.rows.positions[tag] == n - 1, f"{n} tokens of sequence {seq} end with {tag}"

    def check_snapshot(self, seq, choose):
        """A reader's own sequence from a snapshot, in a cache of its own."""
        own = PagedKvCache(self.pool)
        with self.cache.snapshot(seq) as mark:
            twin = own.new_sequence()
            own.restore(twin, mark)
        rows = own.v(twin, 1)
        assert len(rows) == own.length(twin)
        tags = self.rows.tags_of(rows[:, 0])
        np.testing.assert_array_equal(self.rows.parents[tags][1:], tags[:-1])
        self.check_last(seq, int(tags[-1]), len(tags))
        if choose.random() < 0.5:
            own.drop(twin)  # else the cache is garbage-collected with it

    # -- all of them

    def run(self, seed, num_readers):
        def guarded(work, *arguments):
            try:
                work(*arguments)
            except BaseException as error:
                self.failures.append(error)

        readers = [
            threading.Thread(target=guarded, args=(self.read, seed + i), daemon=True)
            for i in range(num_readers)
        ]
        writer = threading.Thread(target=guarded, args=(self.write, seed), daemon=True)
        for thread in (writer, *readers):
            thread.start()
        writer.join(SECONDS)
        self.done.set()
        assert not writer.is_alive(), "the writer hangs"
        for thread in readers:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a reader hangs"
        if self.failures:
            raise self.failures[0]

    def finish(self):
        """Every block comes back, once."""
        for seq in self.cache.sequences:
            self.cache.drop(seq)
        for mark, _ in self.marks:
            mark.release()
        assert self.pool.free_count == NUM_BLOCKS
        assert sorted(self.pool.allocate(NUM_BLOCKS).tolist()) == list(range(NUM_BLOCKS))


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_readers", [1, 3])
def test_readers_see_only_what_was_written_to_their_sequence(
    dtype, num_readers, frequent_switches, monkeypatch
):
    if dtype == "int4":
        pytest.skip("16 levels hold few of these numbers exactly")
    monkeypatch.setattr(cascade, "_SHARED_TOKENS", 64)  # shared beginnings are read once
    monkeypatch.setattr(cascade, "_SAVED_TOKENS", 128)
    stress = Stress(dtype, seed=num_readers)
    stress.run(num_readers, num_readers)
    stress.finish()
    assert stress.reads > 0
